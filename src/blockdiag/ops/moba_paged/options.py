"""Types of call options, for the overloads of the public functions of JAX and torch; `A` is the array type."""

from collections.abc import Sequence
from typing import TypedDict


class MoBAPagedOptions[A](TypedDict, total=False):
    """Options of `moba_paged_attention`; see there."""

    query_lengths: A | None
    scale: float | None
    key_scale: A | float | None
    value_scale: A | float | None
    query_scale: A | float | None
    implementation: str | Sequence[str] | None
