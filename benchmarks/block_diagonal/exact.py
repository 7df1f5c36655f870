"""Block-diagonal attention and its gradients in float64, by torch's own autograd, for judging every implementation.

It shares no code with the implementations it judges: each block is gathered, rotated, attended and differentiated in
float64, and scattered back.
"""

from typing import NamedTuple

import numpy as np
import torch

from benchmarks.block_diagonal.cases import Case


class Exact(NamedTuple):
    """Output [T, N, H] and gradients of query [T, N, H], key and value [T, K, H]."""

    output: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


TENSOR_NAMES = ("output", "dQ", "dK", "dV")


def rotate_half(operand: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + H/2) of `operand` [..., H] by tables that broadcast against [..., H/2]."""
    first, second = operand.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def exact_attention(
    case: Case,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cotangent: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    chunk: int = 1024,
) -> Exact:
    """Compute in float64, `chunk` blocks at a time, and return in `dtype`.

    Args:
        case: where the blocks lie, and the scale.
        query, key, value, cotangent: [T, N, H], [T, K, H], [T, K, H], [T, N, H] of any floating dtype.
        tables: cos and sin [P, H/2] by position within the sequence, for a rotary case.
    """
    shaped_like = (query, query, key, value)
    results = Exact(*(torch.zeros(array.shape, dtype=dtype, device=array.device) for array in shaped_like))
    tiles, offsets = case.tiles, np.arange(case.block_size)
    for begin in range(0, len(tiles.starts), chunk):
        part = slice(begin, begin + chunk)
        valid = torch.from_numpy(offsets[None, :] < tiles.lengths[part, None]).to(query.device)
        offset = np.minimum(offsets[None, :], tiles.lengths[part, None] - 1)
        rows = torch.from_numpy(tiles.starts[part, None] + offset).to(query.device)
        positions = torch.from_numpy(tiles.positions[part, None] + offset).to(query.device)
        computed = _exact_blocks(case, query, key, value, cotangent, tables, rows, positions, valid)
        for target, block in zip(results, computed, strict=True):
            target[rows[valid]] = block[valid].to(dtype)
    return results


def _exact_blocks(
    case: Case,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cotangent: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    rows: torch.Tensor,
    positions: torch.Tensor,
    valid: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Output and gradients of the blocks whose rows [C, block_size] are given, each [C, block_size, heads, H]."""
    leaves = [array[rows].double().requires_grad_() for array in (query, key, value)]
    block_query, block_key, block_value = leaves
    if tables is not None:
        cos, sin = (table.double()[positions][:, :, None, :] for table in tables)
        block_query, block_key = rotate_half(block_query, cos, sin), rotate_half(block_key, cos, sin)
    group = case.query_heads // case.key_heads
    block_key, block_value = (array.repeat_interleave(group, dim=2) for array in (block_key, block_value))
    scores = torch.einsum("cqnh,cknh->cnqk", block_query, block_key) * case.scale
    scores = scores.masked_fill(~valid[:, None, None, :], -torch.inf)
    output = torch.einsum("cnqk,cknh->cqnh", scores.softmax(dim=-1), block_value)
    block_cotangent = cotangent[rows].double() * valid[:, :, None, None]
    return (output.detach(), *torch.autograd.grad(output, leaves, block_cotangent))
