"""Types of call options, for the overloads of the public functions of JAX and torch; `A` is the array type."""

from collections.abc import Sequence
from typing import Any, TypedDict

type Window = int | tuple[int | None, int | None]
"""Maximum number of keys seen before and after a query's own position; one number for both, None for no bound."""


class PagedOptions[A](TypedDict, total=False):
    """Options of `paged_attention`; see there."""

    value_dim: int | None
    query_lengths: A | None
    query_offsets: A | None
    max_query_length: int | None
    scale: float | None
    is_causal: bool
    local_window_size: Window | None
    logits_soft_cap: float | None
    sinks: A | None
    key_scale: A | float | None
    value_scale: A | float | None
    query_scale: A | float | None
    query_dtype: Any
    num_splits: int | None
    split_size: int | None
    implementation: str | Sequence[str] | None
