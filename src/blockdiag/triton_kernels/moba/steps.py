"""The launches of each pass of MoBA, in order. JAX and torch run the same ones.

Every launch reads arrays by name and adds the arrays that it writes (see `plans.MoBALaunch`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.triton_kernels.moba.configs import has_halves, key_tiles
from blockdiag.triton_kernels.moba.plans import Kind

# Limit on the memory of partial results, in multiples of the query's size. With blocks of 128 and top_k 8 this is less
# than the memory that FlashMoBA takes beyond its arguments and results.
_MOST_PARTS = 4


class Step(NamedTuple):
    """One launch: its kernel, and its key heads as (first, count) or None for all."""

    kind: Kind
    heads: tuple[int, int] | None = None


def centroid_steps() -> tuple[Step, ...]:
    """Return the steps from keys to mean keys of blocks."""
    return (Step("centroids"),)


def choice_steps(problem: MoBAProblem) -> tuple[Step, ...]:
    """Return the steps from queries and mean keys to chosen blocks."""
    return (Step("halves"), Step("choose")) if has_halves(problem) else (Step("choose"),)


def routing_steps(problem: MoBAProblem) -> tuple[Step, ...]:
    """Return the steps from query and key to chosen blocks."""
    return *centroid_steps(), *choice_steps(problem)


def list_steps() -> tuple[Step, ...]:
    """Return the steps from chosen blocks to the lists of queries by block."""
    return Step("count"), Step("add_spans"), Step("offsets"), Step("entries")


def forward_steps(problem: MoBAProblem) -> tuple[Step, ...]:
    """Return the steps from operands and lists to output and log-sum-exp."""
    if problem.slots == 0:
        return (Step("merge_forward"),)
    steps = [Step("items")]
    for heads in _head_chunks(problem, problem.slots):
        steps += [Step("blocks_forward", heads), Step("merge_forward", heads)]
    return tuple(steps)


def backward_steps(problem: MoBAProblem) -> tuple[Step, ...]:
    """Return the steps from operands, lists, output and cotangents to gradients."""
    steps = [Step("starts")]
    has_query_parts = key_tiles(problem) > 1 and problem.slots > 0
    if has_query_parts:
        steps.append(Step("items"))
    for heads in _head_chunks(problem, problem.slots + 1):
        steps.append(Step("blocks_backward", heads))
        if has_query_parts:
            steps.append(Step("query_parts", heads))
        steps.append(Step("merge_backward", heads))
    return tuple(steps)


def _head_chunks(problem: MoBAProblem, parts: int) -> Iterator[tuple[int, int] | None]:
    """Yield chunks of key heads that keep the memory of partial results within `_MOST_PARTS`."""
    chunks = min(problem.key_heads, -(-parts // _MOST_PARTS))
    if chunks == 1:
        yield None
        return
    size = -(-problem.key_heads // chunks)
    for first in range(0, problem.key_heads, size):
        yield first, min(size, problem.key_heads - first)
