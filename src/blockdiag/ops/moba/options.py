"""Types of call options, for the overloads of the public functions of JAX and torch; `A` is the array type."""

from collections.abc import Sequence
from typing import TypedDict


class MoBAOptions[A, RoutingType, ContextType](TypedDict, total=False):
    """Options of `moba_attention`; see there. `RoutingType` and `ContextType` are the framework's classes."""

    scale: float | None
    is_causal: bool
    sequence_offsets: A | None
    key_sequence_offsets: A | None
    routing: RoutingType | None
    key_mask: A | None
    implementation: str | Sequence[str] | None
    context_parallel: ContextType | None
