"""The static description of a fused rotary embedding. Imports neither jax nor torch."""

from dataclasses import dataclass
from typing import Literal

PositionSource = Literal["sequence", "explicit", "token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryProblem:
    """How rotary embedding is fused into an attention call.

    Attributes:
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + H/2).
        query, key, value: which operands are rotated.
        table_rows: rows of the cos and sin tables, P in [P, H/2].
        table_dtype: dtype name of both tables.
        positions: where a token's table row comes from: its position within its sequence, an explicit int32 array
            over tokens, or the token's own index in the flattened token axis.
    """

    interleaved: bool
    query: bool
    key: bool
    value: bool
    table_rows: int
    table_dtype: str
    positions: PositionSource
