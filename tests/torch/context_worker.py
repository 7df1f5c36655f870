"""What each of several processes runs for tests of `context_parallel`: four of them on CPUs, or as many as GPUs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from blockdiag.torch import (
    ContextParallel,
    Rotary,
    block_diagonal_attention,
    key_convolution,
    moba_attention,
    rotary_tables,
)
from tests.torch.division_worker import device, implementation, random, spread

BLOCK, HEAD_DIM = 16, 16


def own_part(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """This process's part of a tensor."""
    return x.chunk(dist.get_world_size(), tokens)[dist.get_rank()]


def operands(tokens: int, key_heads: int, batch: tuple[int, ...] = (1,)) -> list[torch.Tensor]:
    """Query, key and value of all processes, with twice as many query heads."""
    shapes = [(*batch, tokens * dist.get_world_size(), heads, HEAD_DIM) for heads in (2 * key_heads, *(key_heads,) * 2)]
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def differentiated(attend: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients, of cotangents that depend on the results."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    results = attend(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else results
    loss = sum((0.3 * x + (3 * x).sin()).sum() for x in results)
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]


def assert_shared(
    attend: Callable[..., Any], whole: Sequence[torch.Tensor], context: ContextParallel | None = None, tokens: int = -3
) -> None:
    """Assert that processes which share tokens compute what one process does, the same each time.

    Args:
        attend: of operands, and of `context_parallel` or not.
        whole: the operands of one process.
        context: which processes; all by default.
        tokens: the axis of tokens in operands, results and gradients.
    """
    shared = functools.partial(attend, context_parallel=context or ContextParallel(dist.group.WORLD))
    expected = differentiated(attend, whole)
    parts = [own_part(x, tokens) for x in whole]
    found, again = differentiated(shared, parts), differentiated(shared, parts)
    tolerance = 2e-5 if device() == "cpu" else 1e-4
    for one, other, second in zip(found, expected, again, strict=True):
        # The log-sum-exp has no axis of elements.
        axis = tokens if other.ndim == whole[0].ndim else tokens + 1
        other = own_part(other, axis)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())
        assert torch.equal(one, second)


def check_moba(strategy: str | None, case: str) -> None:
    """MoBA with each strategy: batched, packed, masked, not causal, with few key heads."""
    size = dist.get_world_size()
    options: dict[str, Any] = {"block_size": BLOCK, "top_k": 3, **implementation()}
    own, key_heads, batch, offsets = 2 * BLOCK, 2 * size, (1,), None
    if case == "few key heads":
        own, key_heads, batch = BLOCK, 1, (2,)
    elif case == "packed":
        batch, offsets = (), torch.tensor([0, 21, 21, size * own * 2 // 3, size * own - 11], dtype=torch.int32)
        options["sequence_offsets"] = offsets.to(device())
    elif case == "masked":
        batch, options["return_residual"] = (2,), True
    elif case == "not causal":
        batch, options["is_causal"] = (2,), False
    whole = operands(own, key_heads, batch)
    mask = random(*batch, own * size, seed=7) > -0.8 if case == "masked" else None

    def attend(*tensors: torch.Tensor, context_parallel: ContextParallel | None = None) -> Any:
        given = own_part(mask, -1) if mask is not None and context_parallel else mask
        return moba_attention(*tensors, key_mask=given, context_parallel=context_parallel, **options)

    assert_shared(attend, whole, ContextParallel(dist.group.WORLD, strategy))
