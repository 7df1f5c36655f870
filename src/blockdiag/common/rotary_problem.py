"""The static description of a fused rotary embedding. Imports neither jax nor torch."""

from dataclasses import dataclass
from typing import Literal

PositionSource = Literal["sequence", "explicit", "token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryProblem:
    """The rotary embedding that is fused into an attention call.

    Attributes:
        interleaved: whether pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).
        query, key, value: whether this operand is rotated.
        table_rows: rows of the cos and sin tables, P in [P, H/2].
        table_dtype: dtype name of both tables.
        positions: source of a token's table row. "sequence" is its position within its sequence, "explicit" an int32
            array over tokens, and "token" its index in the flattened token axis.
    """

    interleaved: bool
    query: bool
    key: bool
    value: bool
    table_rows: int
    table_dtype: str
    positions: PositionSource
