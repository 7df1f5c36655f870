"""The launches that make up each pass of MoBA, in order; JAX and torch run the same ones.

Every launch reads arrays by name and adds those that it writes (see `moba.MoBALaunch`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.triton_kernels.moba.configs import key_tiles
from blockdiag.triton_kernels.moba.plans import Kind

# Parts of results that a query of a head may have in memory, each as large as the query itself. At blocks of 128 and
# top_k 8 that stays below the memory that FlashMoBA takes beyond its arguments and results.
_MOST_PARTS = 4


class Step(NamedTuple):
    """One launch: which kernel, and its key heads as (first, number of them) or None for all."""

    kind: Kind
    heads: tuple[int, int] | None = None


def centroid_steps() -> tuple[Step, ...]:
    """From keys to mean keys of blocks."""
    return (Step("centroids"),)


def choice_steps() -> tuple[Step, ...]:
    """From queries and mean keys to chosen blocks."""
    return (Step("choose"),)


def routing_steps() -> tuple[Step, ...]:
    """From query and key to chosen blocks."""
    return *centroid_steps(), *choice_steps()


def list_steps() -> tuple[Step, ...]:
    """From chosen blocks to lists."""
    return Step("count"), Step("add_spans"), Step("offsets"), Step("entries")


def forward_steps(problem: MoBAProblem) -> tuple[Step, ...]:
    """From operands and lists to output and log-sum-exp."""
    if problem.slots == 0:
        return (Step("merge_forward"),)
    steps = [Step("items")]
    for heads in _head_chunks(problem, problem.slots):
        steps += [Step("blocks_forward", heads), Step("merge_forward", heads)]
    return tuple(steps)


def backward_steps(problem: MoBAProblem) -> tuple[Step, ...]:
    """From operands, lists, output and cotangents to gradients."""
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
    """Key heads in chunks that keep the parts of results within bounds."""
    chunks = min(problem.key_heads, -(-parts // _MOST_PARTS))
    if chunks == 1:
        yield None
        return
    size = -(-problem.key_heads // chunks)
    for first in range(0, problem.key_heads, size):
        yield first, min(size, problem.key_heads - first)
