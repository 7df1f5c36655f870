"""Worker process of test_sharding for MoBA and key convolution; see sharding_worker."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from blockdiag.torch import Routing, key_convolution, moba_attention, moba_routing
from tests.torch.sharding_worker import random

BATCH, TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 4, 40, 4, 2, 16
CHOICE: dict[str, Any] = {"block_size": 16, "top_k": 2}
# All implementations are sharded in the same way, and compilation takes most of the time here.
REFERENCE = {"implementation": "reference"}


def operands(key_heads: int = KEY_HEADS, batch: int | None = BATCH) -> list[torch.Tensor]:
    """Return query, key, value, and cotangents of the output and its log-sum-exp; packed ones without a batch."""
    lead = (TOKENS,) if batch is None else (batch, TOKENS)
    arrays = [random(*lead, n, HEAD_DIM, seed=seed) for seed, n in enumerate((HEADS, key_heads, key_heads, HEADS))]
    return [*arrays, random(*lead, HEADS, seed=4)]


def options(kind: str) -> dict[str, Any]:
    """Return options of a call, as plain tensors that every process has in full."""
    generator = torch.Generator().manual_seed(6)
    if kind == "offsets":
        return {"sequence_offsets": torch.tensor([0, 7, 7, 36], dtype=torch.int32)}
    if kind == "mask and routing":
        # Some queries do not see their own block, and some see nothing. Blocks after a query's own block are ignored.
        pattern = torch.rand(BATCH, TOKENS, HEADS, 3, generator=generator) < 0.4
        mask = torch.rand(BATCH, TOKENS, generator=generator) < 0.7
        return {"key_mask": mask, "routing": Routing.from_pattern(pattern, block_size=16, top_k=3), "top_k": 3}
    return {}


def results(leaves: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], **call: Any) -> list[torch.Tensor]:
    """Return output, log-sum-exp and gradients."""
    outputs = moba_attention(*leaves, return_residual=True, **{**CHOICE, **REFERENCE, **call})
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


def dense_pattern(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the blocks that each query sees by CHOICE, for sequences [B, T, heads, H]; bool [B, T, N, blocks]."""
    means = torch.stack([block.mean(dim=1) for block in key.split(CHOICE["block_size"], dim=1)], dim=-2)
    means = means.repeat_interleave(query.shape[2] // key.shape[2], dim=1)
    own = (torch.arange(query.shape[1]) // CHOICE["block_size"])[:, None, None]
    block = torch.arange(means.shape[2])
    scores = torch.einsum("btnh,bnch->btnc", query, means).masked_fill(block >= own, -torch.inf)
    best = scores.topk(min(CHOICE["top_k"] - 1, means.shape[2])).indices
    return (torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & (block < own)) | (block == own)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: torch.Tensor, key_mask: Any) -> Any:
    """Return output and log-sum-exp of batched sequences from a matrix of all scores."""
    tokens, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    seen = pattern.repeat_interleave(CHOICE["block_size"], dim=-1)[..., :tokens]
    seen = seen & (torch.arange(tokens) <= torch.arange(tokens)[:, None])[:, None]
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    scores = torch.einsum("btnh,bsnh->btns", query, key) * query.shape[-1] ** -0.5
    scores = torch.where(seen, scores, -1e30)
    output = torch.einsum("btns,bsnh->btnh", torch.where(seen, scores.softmax(dim=-1), 0.0), value)
    return output, torch.where(seen.any(dim=-1), scores.logsumexp(dim=-1), -torch.inf)


def whole_results(
    inputs: Sequence[torch.Tensor],
    *,
    routing: Routing | None = None,
    key_mask: torch.Tensor | None = None,
    sequence_offsets: torch.Tensor | None = None,
    top_k: int = 2,
) -> list[torch.Tensor]:
    """Return the expected `results` by dense attention in one process, which needs no compilation."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    if sequence_offsets is None:
        pattern = dense_pattern(*inputs[:2]) if routing is None else routing.to_pattern()
        outputs = dense(*leaves, pattern, key_mask)
    else:
        edges = sequence_offsets.tolist()
        sequences = [[x[None, start:end] for x in leaves] for start, end in itertools.pairwise(edges) if end > start]
        parts = [dense(*one, dense_pattern(*one[:2]), None) for one in sequences]
        padding = TOKENS - edges[-1]
        outputs = [torch.cat([part[index][0] for part in parts]) for index in (0, 1)]
        outputs[0] = torch.nn.functional.pad(outputs[0], (0, 0, 0, 0, 0, padding))
        outputs[1] = torch.nn.functional.pad(outputs[1], (0, 0, 0, padding), value=-torch.inf)
    gradients = torch.autograd.grad(outputs, leaves, inputs[3:])
    return [*(x.detach() for x in outputs), *gradients]


def distribute(inputs: Sequence[torch.Tensor], *dims: int | None) -> list[torch.Tensor]:
    """Return DTensors sharded over one dimension for each mesh axis, the first three of them leaves."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,) if len(dims) == 1 else (1, 2))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    parts = [distribute_tensor(x, mesh, placements) for x in inputs]
    return [x.requires_grad_() for x in parts[:3]] + parts[3:]


def assert_equal(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, whole in zip(actual, expected, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor().detach(), whole, rtol=1e-5, atol=4e-6)


def check_sharded(kind: str, dims: tuple[int | None, ...], is_packed: bool) -> None:
    """Check operands sharded over one dimension for each mesh axis: same results, same shards, no communication."""
    inputs, call = operands(batch=None if is_packed else BATCH), options(kind)
    parts = distribute(inputs, *dims)
    with CommDebugMode() as communication:
        actual = results(parts[:3], parts[3:], **call)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for one in actual:
        assert one.placements == parts[0].placements, one.placements
    assert_equal(actual, whole_results(inputs, **call))


def check_routing(dim: int) -> None:
    """Check a routing of DTensors: the same blocks, sharded as the queries, and accepted by attention unchanged."""
    inputs = operands()
    parts = distribute(inputs, dim)
    with CommDebugMode() as communication:
        routing = moba_routing(*parts[:2], **CHOICE, **REFERENCE)
        output = moba_attention(*parts[:3], routing=routing, **CHOICE, **REFERENCE)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert isinstance(routing.indices, DTensor) and routing.indices.placements == parts[0].placements
    whole = dataclasses.replace(routing, indices=routing.indices.full_tensor())
    assert torch.equal(whole.to_pattern(), dense_pattern(*inputs[:2]))
    assert_equal([output], whole_results(inputs)[:1])


def check_uneven_batch() -> None:
    """Check three batch rows on two processes against the first three rows of four."""
    inputs = operands()
    expected = [x[:3] for x in whole_results(inputs)]
    parts = distribute([x[:3] for x in inputs], 0)
    assert_equal(results(parts[:3], parts[3:]), expected)


def check_mixed(key_heads: int, dims: tuple[int | None, ...], cotangent_dim: int | None) -> None:
    """Check query, key and value with different shardings, or with unsupported ones: the results must be right."""
    inputs = operands(key_heads)
    expected = whole_results(inputs)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def place(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])

    leaves = [place(x, dim).requires_grad_() for x, dim in zip(inputs[:3], dims, strict=True)]
    assert_equal(results(leaves, [place(x, cotangent_dim) for x in inputs[3:]]), expected)


def check_compiled() -> None:
    """Check a compiled function of DTensors: the same results, and graphs with the operators and no communication."""
    inputs = operands()
    expected = whole_results(inputs)
    parts = distribute(inputs, 0)
    called: list[str] = []

    def collect(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=collect, bw_compiler=collect))
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return moba_attention(query, key, value, return_residual=True, **CHOICE, **REFERENCE)

    outputs = attend(*parts[:3])
    assert_equal([*outputs, *torch.autograd.grad(outputs, parts[:3], parts[3:])], expected)
    ours = [name for name in called if name.startswith("blockdiag")]
    assert ours == [f"blockdiag.moba_{method}_through_jax.default" for method in ("lists", "forward", "backward")], (
        called
    )
    assert not any("c10d" in name for name in called), called


def check_operators_directly() -> None:
    """Check torch.ops without the public functions, and lists of some batch rows, which are invalid for others."""
    inputs = operands()
    query, key, value, *cotangents = (x.detach() for x in distribute(inputs, 0))
    lists = torch.ops.blockdiag.moba_lists(query, key, None, None, None, None, 0, 0, 16, 2, True, "")
    arguments = (query, key, value, None, *lists[:-1], None, 16, None, True, False, "")
    outputs = torch.ops.blockdiag.moba_forward(*arguments)
    gradients = torch.ops.blockdiag.moba_backward(*outputs, *cotangents, *arguments)
    assert_equal([*outputs, *gradients], whole_results(inputs))
    gathered = lists[0].redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match="tables and lists must be sharded over the same batch rows"):
        torch.ops.blockdiag.moba_forward(*arguments[:4], gathered, *arguments[5:])


def check_key_convolution(dims: tuple[int | None, ...], is_packed: bool, rows: int = BATCH) -> None:
    """Check keys sharded over batch rows or heads: no communication, and a partial gradient of the weights."""
    lead = (TOKENS,) if is_packed else (rows, TOKENS)
    key, cotangent = (random(*lead, KEY_HEADS, HEAD_DIM, seed=seed) for seed in (0, 1))
    weights = random(3, KEY_HEADS, HEAD_DIM, seed=2)
    call = {**options("offsets" if is_packed else ""), **REFERENCE}
    leaves = [x.clone().requires_grad_() for x in (key, weights)]
    expected = key_convolution(*leaves, **call)
    expected_gradients = torch.autograd.grad(expected, leaves, cotangent)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,) if len(dims) == 1 else (1, 2))
    heads = key.ndim - 2
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    weight_placements = [Shard(1) if dim == heads else Replicate() for dim in dims]
    key, cotangent = (distribute_tensor(x, mesh, placements) for x in (key, cotangent))
    leaves = [key.requires_grad_(), distribute_tensor(weights, mesh, weight_placements).requires_grad_()]
    with CommDebugMode() as communication:
        output = key_convolution(*leaves, **call)
        gradients = torch.autograd.grad(output, leaves, cotangent)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert list(output.placements) == list(gradients[0].placements) == placements
    sums = [Partial() if dim == 0 != heads else one for dim, one in zip(dims, weight_placements, strict=True)]
    assert list(gradients[1].placements) == sums, gradients[1].placements
    assert_equal([output, *gradients], [expected.detach(), *expected_gradients])
