"""Worker process of test_sharding: checks of CPU tensors with gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from blockdiag.torch import (
    Rotary,
    block_diagonal_attention,
    fused_qkv_block_attention,
    rotary_tables,
)

BATCH, TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 4, 40, 8, 4, 16


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers that are the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operands(key_heads: int = KEY_HEADS, batch: int | None = BATCH) -> list[torch.Tensor]:
    """Return query, key, value and a cotangent of the output; packed ones without a batch."""
    lead = (TOKENS,) if batch is None else (batch, TOKENS)
    heads = (HEADS, key_heads, key_heads, HEADS)
    return [random(*lead, n, HEAD_DIM, seed=seed) for seed, n in enumerate(heads)]


def options(kind: str, batch: int = BATCH) -> dict:
    """Return options of a call, as plain tensors."""
    cos, sin = rotary_tables(TOKENS, HEAD_DIM)
    if kind == "rotary":
        return {"rotary": Rotary(cos, sin), "is_causal": True}
    if kind in ("positions", "shared positions"):
        shape = (TOKENS,) if kind == "shared positions" else (batch, TOKENS)
        positions = torch.randint(0, TOKENS, shape, generator=torch.Generator().manual_seed(9), dtype=torch.int32)
        return {"rotary": Rotary(cos, sin, positions=positions)}
    if kind == "tables of each row":
        tables = (torch.rand(batch, TOKENS, HEAD_DIM // 2, generator=torch.Generator().manual_seed(s)) for s in (7, 8))
        return {"rotary": Rotary(*tables, per_token=True, interleaved=True)}
    if kind == "offsets":
        return {"sequence_offsets": torch.tensor([0, 7, 7, 30], dtype=torch.int32), "rotary": Rotary(cos, sin)}
    if kind == "lengths":
        return {"block_lengths": torch.tensor([16, 0, 9, 12], dtype=torch.int32)}
    return {}


def whole_results(inputs: list[torch.Tensor], **call: object) -> list[torch.Tensor]:
    """Return output and gradients without sharding."""
    *leaves, cotangent = (x.clone() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    output = block_diagonal_attention(*leaves, block_size=16, **call)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


def check_sharded(kind: str, dims: tuple[int | None, ...], is_packed: bool, key_heads: int, via: str | None) -> None:
    """Check operands sharded over one dimension for each mesh axis: same results, same shards, no communication."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,) if len(dims) == 1 else (1, 2))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    inputs = operands(key_heads, None if is_packed else BATCH)
    call = options(kind)
    expected = whole_results(inputs, **call)
    *leaves, cotangent = (distribute_tensor(x, mesh, placements) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    with CommDebugMode() as communication:
        output = block_diagonal_attention(*leaves, block_size=16, via=via, **call)
        gradients = torch.autograd.grad(output, leaves, cotangent)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for actual, whole in zip((output, *gradients), expected, strict=True):
        assert isinstance(actual, DTensor) and list(actual.placements) == placements, actual.placements
        torch.testing.assert_close(actual.full_tensor().detach(), whole, rtol=1e-5, atol=2e-6)


def check_operators_directly() -> None:
    """Check torch.ops without the public function, with sharded DTensors as tables."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    inputs, rotary = operands(), options("positions")["rotary"]
    expected = whole_results(inputs, rotary=rotary)
    query, key, value, cotangent = (distribute_tensor(x, mesh, [Shard(0)]) for x in inputs)
    cos, sin = (distribute_tensor(x, mesh, [Replicate()]) for x in (rotary.cos, rotary.sin))
    positions = distribute_tensor(rotary.positions, mesh, [Shard(0)])
    arguments = (query, key, value, None, None, cos, sin, positions, 0, 16, None, False, "qk", "")
    with CommDebugMode() as communication:
        output = torch.ops.blockdiag.block_diagonal_forward(*arguments)
        gradients = torch.ops.blockdiag.block_diagonal_backward(cotangent, *arguments)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for actual, whole in zip((output, *gradients), expected, strict=True):
        assert actual.placements == (Shard(0),)
        torch.testing.assert_close(actual.full_tensor(), whole, rtol=1e-5, atol=2e-6)


def check_uneven_batch() -> None:
    """Check three batch rows on two processes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    inputs = operands(batch=3)
    expected = whole_results(inputs, **options("positions", batch=3))
    *leaves, cotangent = (distribute_tensor(x, mesh, [Shard(0)]) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    output = block_diagonal_attention(*leaves, block_size=16, **options("positions", batch=3))
    for actual, whole in zip((output, *torch.autograd.grad(output, leaves, cotangent)), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor().detach(), whole, rtol=1e-5, atol=2e-6)


def check_sum_of_output(dim: int) -> None:
    """Check the replicated cotangent of a sum, from which each process cuts its part."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    inputs = operands()
    inputs[3] = torch.ones_like(inputs[3])
    _, *expected = whole_results(inputs)
    leaves = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in inputs[:3]]
    with CommDebugMode() as communication:
        total = block_diagonal_attention(*leaves, block_size=16).sum()
        total.backward()
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for leaf, whole in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor(), whole, rtol=1e-5, atol=2e-6)


def check_what_cannot_stay(key_heads: int, query_dim: int, key_dim: int | None) -> None:
    """Check that shards that no process can compute with are gathered, with right results."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    inputs = operands(key_heads)
    expected = whole_results(inputs)
    dims = (query_dim, key_dim, key_dim, query_dim)
    *leaves, cotangent = (
        distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])
        for x, dim in zip(inputs, dims, strict=True)
    )
    leaves = [x.requires_grad_() for x in leaves]
    with CommDebugMode() as communication, pytest.warns(UserWarning, match="of an operand is sharded .* is gathered"):
        output = block_diagonal_attention(*leaves, block_size=16)
    assert communication.get_total_counts() > 0
    for actual, whole in zip((output, *torch.autograd.grad(output, leaves, cotangent)), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor().detach(), whole, rtol=1e-5, atol=2e-6)


def check_fused_projection() -> None:
    """Check a batch-sharded x with replicated weights, whose gradients are partial sums over the processes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    heads = {"query_heads": 4, "key_heads": 2, "head_dim": HEAD_DIM, "block_size": 16}
    inputs = [random(BATCH, TOKENS, 24, seed=0), random(24, 8 * HEAD_DIM, seed=1) / 5, random(8 * HEAD_DIM, seed=2)]
    cotangent = random(BATCH, TOKENS, 4, HEAD_DIM, seed=3)
    whole = [x.clone().requires_grad_() for x in inputs]
    rotary = Rotary(*rotary_tables(TOKENS, HEAD_DIM))
    expected = fused_qkv_block_attention(*whole, rotary=rotary, **heads)
    expected_gradients = torch.autograd.grad(expected, whole, cotangent)
    placements = (Shard(0), Replicate(), Replicate())
    parts = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(inputs, placements, strict=True)]
    cotangent = distribute_tensor(cotangent, mesh, [Shard(0)])
    with CommDebugMode() as communication:
        output = fused_qkv_block_attention(*parts, rotary=rotary, **heads)
        gradients = torch.autograd.grad(output, parts, cotangent)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    torch.testing.assert_close(output.full_tensor().detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    for actual, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual.full_tensor(), right, rtol=1e-5, atol=1e-4)


def check_compiled() -> None:
    """Check a compiled function of DTensors: the same results, without communication."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    inputs = operands()
    rotary = options("rotary")["rotary"]
    expected = whole_results(inputs, rotary=rotary)
    *leaves, cotangent = (distribute_tensor(x, mesh, [Shard(2)]) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return block_diagonal_attention(query, key, value, block_size=16, rotary=rotary)

    attend(*leaves)
    with CommDebugMode() as communication:
        output = attend(*leaves)
        gradients = torch.autograd.grad(output, leaves, cotangent)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for actual, whole in zip((output, *gradients), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor().detach(), whole, rtol=1e-5, atol=2e-6)
