"""The cases of `tests.ops.moba_cases` for torch: the same operands and options as tensors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import blockdiag
from blockdiag.torch import Routing, moba_attention, moba_routing
from blockdiag.torch.ops.moba.operators import ListArguments
from tests.ops.moba_cases import MoBACase
from tests.torch.torch_support import to_tensor

CASES = {
    "batch": MoBACase(lengths=(61, 61)),
    "grouped, bfloat16": MoBACase(lengths=(70,), dtype="bfloat16", query_heads=4, key_heads=2, head_dim=16),
    "own block only": MoBACase(lengths=(40,), top_k=1, dtype="float16"),
    "more keys, masked, scale": MoBACase(lengths=(20, 20), key_lengths=(61, 61), mask=0.6, scale=0.7),
    "more queries": MoBACase(lengths=(61,), key_lengths=(37,), top_k=2),
    "not causal": MoBACase(lengths=(61, 61), is_causal=False, top_k=2),
    "packed": MoBACase(lengths=(37, 0, 1, 50), layout="offsets", padding=9, top_k=2, query_heads=4),
    "packed, other keys": MoBACase(
        lengths=(7, 5, 0, 30), key_lengths=(40, 0, 9, 25), layout="offsets", padding=3, mask=0.3
    ),
    "packed, not causal": MoBACase(lengths=(37, 0, 40), layout="offsets", padding=4, is_causal=False, top_k=2),
}


def tensors_of(case: MoBACase, device: str = "cpu", seed: int = 0) -> list[torch.Tensor]:
    """Return query, key, value, and cotangents of the output and the log-sum-exp."""
    return [to_tensor(x, device) for x in case.operands(seed)]


def options_of(case: MoBACase, device: str = "cpu") -> dict[str, Any]:
    """Return the options that routing and attention share, except the implementation."""
    mask = case.key_mask()
    return {
        "block_size": case.block_size,
        "top_k": case.top_k,
        "is_causal": case.is_causal,
        "key_mask": None if mask is None else to_tensor(mask, device),
        **{name: to_tensor(values, device) for name, values in case.packing.items()},
    }


def attend(case: MoBACase, device: str = "cpu", **more: Any) -> Callable[..., Any]:
    """Return the operation as a function of query, key and value, with output and log-sum-exp."""
    return functools.partial(
        moba_attention, scale=case.scale, return_residual=True, **(options_of(case, device) | more)
    )


def route(case: MoBACase, device: str = "cpu", **more: Any) -> Callable[..., Routing]:
    return functools.partial(moba_routing, **(options_of(case, device) | more))


def to_torch_routing(routing: blockdiag.Routing, device: str = "cpu") -> Routing:
    """Return a routing with a tensor instead of an array."""
    return Routing(to_tensor(routing.indices, device), routing.block_size, routing.num_blocks)


def value_and_gradients(function: Callable[..., Any], *operands: torch.Tensor) -> list[torch.Tensor]:
    """Return output and log-sum-exp of `function` on query, key and value, and their gradients."""
    *inputs, cotangent, log_sum_cotangent = operands
    leaves = [x.detach().requires_grad_() for x in inputs]
    output, log_sum = function(*leaves)
    gradients = torch.autograd.grad((output, log_sum), leaves, (cotangent, log_sum_cotangent))
    return [output.detach(), log_sum.detach(), *gradients]


def results_of(case: MoBACase, device: str = "cpu", **more: Any) -> list[torch.Tensor]:
    """Return output, log-sum-exp, and gradients of query, key and value."""
    return value_and_gradients(attend(case, device, **more), *tensors_of(case, device))


def list_arguments(
    case: MoBACase, device: str = "cpu", routing: Routing | None = None, implementation: str = ""
) -> ListArguments:
    """Return the arguments of `torch.ops.blockdiag.moba_lists` for a call."""
    query, key, *_ = tensors_of(case, device)
    options = options_of(case, device)
    given = (None, 0, 0) if routing is None else (routing.indices, routing.block_size, routing.num_blocks)
    return ListArguments(
        query,
        key,
        options["key_mask"],
        options.get("sequence_offsets"),
        options.get("key_sequence_offsets"),
        *given,
        case.block_size,
        case.top_k,
        case.is_causal,
        implementation,
    )


def attention_arguments(
    case: MoBACase, device: str = "cpu", routing: Routing | None = None, implementation: str = ""
) -> tuple[Any, ...]:
    """Return the arguments of `torch.ops.blockdiag.moba_forward` for a call."""
    arguments = list_arguments(case, device, routing, implementation)
    *lists, own = torch.ops.blockdiag.moba_lists(*arguments)
    query, key, value, *_ = tensors_of(case, device)
    return (
        query,
        key,
        value,
        arguments.key_mask,
        *lists,
        own if routing is not None and case.is_causal else None,
        case.block_size,
        case.scale,
        case.is_causal,
        "sequence_offsets" in case.packing,
        implementation,
    )


@functools.cache
def routing_of(name: str) -> blockdiag.Routing:
    """Return the routing that JAX computes."""
    case = CASES[name]
    return case.route("xla")(*case.operands()[:2])


def edited_routing_of(name: str) -> blockdiag.Routing:
    """Return a routing with some blocks that are not the best, missing own blocks, and invalid block numbers."""
    routing = routing_of(name)
    indices = np.random.default_rng(3).integers(-2, routing.num_blocks + 2, routing.indices.shape, dtype=np.int32)
    return dataclasses.replace(routing, indices=jnp.asarray(indices))
