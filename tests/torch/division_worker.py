"""Worker process for tests of division: an even number of processes, on CPUs or GPUs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from blockdiag.torch import (
    BlockDiagonalSelfAttention,
    MoBASelfAttention,
    Rotary,
    append_to_pages,
    block_diagonal_attention,
    fuse,
    key_convolution,
    merge_attention_states,
    moba_attention,
    moba_paged_attention,
    paged_attention,
    rotary_tables,
)

# Most checks use the same sizes, because compilation takes most of the time on CPUs.
ROWS, TOKENS, HEAD_DIM, BLOCK = 2, 32, 16, 16
ATTEND: dict[str, Callable[..., Any]] = {
    "block_diagonal": functools.partial(block_diagonal_attention, block_size=BLOCK),
    "moba": functools.partial(moba_attention, block_size=BLOCK, top_k=2),
}


ROW_AXIS, HEAD_AXIS = 0, 2


def implementation() -> dict[str, Any]:
    """Return the implementation that compiles fastest on CPUs, or the kernels on GPUs."""
    return {"implementation": "reference" if device() == "cpu" else None}


def random(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers that are the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(device(), shape, mesh_dim_names=names)


def spread(x: torch.Tensor, mesh: DeviceMesh, *axes: int | None) -> DTensor:
    """Return a DTensor sharded over one of its axes for each mesh axis; None for no axis."""
    return distribute_tensor(x, mesh, [Replicate() if axis is None else Shard(axis) for axis in axes])


def heads_of(key_heads: int, query_heads: int) -> list[torch.Tensor]:
    """Return query, key, value and a cotangent of the output."""
    counts = (query_heads, key_heads, key_heads, query_heads)
    return [random(ROWS, TOKENS, count, HEAD_DIM, seed=seed) for seed, count in enumerate(counts)]


def expected_of(name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return output and gradients from a matrix of all scores, which needs no compilation."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    query, key, value = leaves
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    block = torch.arange(TOKENS, device=device()) // BLOCK
    seen = block[:, None] == block
    if name == "moba":
        # With two blocks and two choices, a query sees all earlier keys.
        seen = (torch.arange(TOKENS)[:, None] >= torch.arange(TOKENS)).to(device())
    scores = torch.einsum("btnh,bsnh->bnts", query, key) * HEAD_DIM**-0.5
    output = torch.einsum("bnts,bsnh->btnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def close(actual: torch.Tensor, expected: torch.Tensor, *placements: Placement) -> None:
    """Assert that a DTensor has the expected values, and the given placements if any."""
    assert isinstance(actual, DTensor), type(actual)
    assert not placements or actual.placements == placements, actual.placements
    tolerance = 1e-5 if device() == "cpu" else 5e-5
    torch.testing.assert_close(actual.full_tensor().detach(), expected, rtol=tolerance, atol=tolerance)


def differentiated(attend: Callable[..., Any], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in parts[:3]]
    output = attend(*leaves)
    return [output, *torch.autograd.grad(output, leaves, parts[3])]


def check_few_key_heads(name: str, key_heads: int, is_compiled: bool) -> None:
    """Check query heads over all processes with fewer key heads, which communicate nothing."""
    count = dist.get_world_size()
    mesh, inputs = mesh_of(count), heads_of(key_heads, 2 * count)
    parts = [spread(x, mesh, axis) for x, axis in zip(inputs, (HEAD_AXIS, None, None, HEAD_AXIS), strict=True)]
    attend = functools.partial(ATTEND[name], **implementation())
    attend = torch.compile(attend, fullgraph=True, backend="aot_eager") if is_compiled else attend
    if is_compiled:
        differentiated(attend, parts)
    with CommDebugMode() as communication:
        results = differentiated(attend, parts)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    query, key = Shard(HEAD_AXIS), Partial() if key_heads < count else Shard(HEAD_AXIS)
    for x, whole, placement in zip(results, expected_of(name, inputs), (query, query, key, key), strict=True):
        close(x, whole, placement)


def check_rows_and_few_key_heads(name: str) -> None:
    """Check batch rows over one mesh axis and query heads over the other, with one key head for all."""
    count = dist.get_world_size() // 2
    mesh = mesh_of(count, 2)
    inputs = [torch.cat([x + number for number in range(count)]) for x in heads_of(1, 4)]
    axes = ((ROW_AXIS, HEAD_AXIS), (ROW_AXIS, None), (ROW_AXIS, None), (ROW_AXIS, HEAD_AXIS))
    parts = [spread(x, mesh, *each) for x, each in zip(inputs, axes, strict=True)]
    with CommDebugMode() as communication:
        results = differentiated(functools.partial(ATTEND[name], **implementation()), parts)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    query, key = (Shard(ROW_AXIS), Shard(HEAD_AXIS)), (Shard(ROW_AXIS), Partial())
    for x, whole, placements in zip(results, expected_of(name, inputs), (query, query, key, key), strict=True):
        close(x, whole, *placements)


def check_heads_that_do_not_divide() -> None:
    """Check that three query heads over an even number of processes are gathered, with a warning."""
    mesh, inputs = mesh_of(dist.get_world_size()), heads_of(1, 3)
    parts = [spread(x, mesh, axis) for x, axis in zip(inputs, (HEAD_AXIS, None, None, HEAD_AXIS), strict=True)]
    with pytest.warns(UserWarning, match=r"`block_diagonal_attention`: axis 2 \(`key_heads group`\) of an operand"):
        results = differentiated(functools.partial(ATTEND["block_diagonal"], **implementation()), parts)
    for x, whole in zip(results, expected_of("block_diagonal", inputs), strict=True):
        close(x, whole)


def check_channels() -> None:
    """Check key convolution of keys with sharded head elements and replicated weights."""
    count = dist.get_world_size()
    inputs = [random(*shape, seed=seed) for seed, shape in enumerate(((ROWS, TOKENS, 1, 4 * count), (3, 1, 4 * count)))]
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = key_convolution(*whole, **implementation())
    gradients = torch.autograd.grad(expected.sum(), whole)
    mesh = mesh_of(count)
    leaves = [spread(inputs[0], mesh, 3).requires_grad_(), spread(inputs[1], mesh, None).requires_grad_()]
    output = key_convolution(*leaves, **implementation())
    actual = torch.autograd.grad(output.sum(), leaves)
    close(output, expected.detach(), Shard(3))
    close(actual[0], gradients[0], Shard(3))
    close(actual[1], gradients[1], Shard(2))


def step(arrays: dict[str, torch.Tensor], rotary: Rotary) -> tuple[torch.Tensor, ...]:
    """Append one token to each sequence, then attend to the cache with and without MoBA."""
    cache = {name: arrays[name] for name in ("key_pages", "value_pages", "page_table", "kv_lengths")}
    append_to_pages(
        arrays["key"], arrays["value"], *cache.values(), rotary=rotary, key_centroids=arrays["centroids"],
        block_size=BLOCK, **implementation(),
    )  # fmt: skip
    query, centroids = arrays["query"], arrays["centroids"]
    output, log_sum = paged_attention(query, *cache.values(), return_residual=True, **implementation())
    choice = {"block_size": BLOCK, "top_k": 2}
    chosen = moba_paged_attention(query, *cache.values(), centroids, **choice, **implementation())
    return output, log_sum, chosen


def cache_of(rows: int, has_table: bool) -> dict[str, torch.Tensor]:
    """Return a cache of 48 tokens per row and one new token for each, with two key heads and four query heads."""
    pool = (3 * rows, BLOCK) if has_table else (rows, 3 * BLOCK)
    generator = torch.Generator().manual_seed(9)
    table = torch.randperm(3 * rows, generator=generator).reshape(rows, 3).to(device(), torch.int32)
    return {
        "key_pages": random(*pool, 2, HEAD_DIM, seed=0),
        "value_pages": random(*pool, 2, HEAD_DIM, seed=1),
        "page_table": table if has_table else None,
        "kv_lengths": torch.tensor([32, 5, 17, 48, 1, 33, 16, 2][:rows], dtype=torch.int32).to(device()),
        "centroids": random(rows, 3, 2, HEAD_DIM, seed=2),
        "query": random(rows, 1, 4, HEAD_DIM, seed=3),
        "key": random(rows, 1, 2, HEAD_DIM, seed=4),
        "value": random(rows, 1, 2, HEAD_DIM, seed=5),
    }  # fmt: skip


def check_cache(has_table: bool, is_compiled: bool) -> None:
    """Check heads of a cache over one mesh axis, and batch rows over the other for caches without a page table.

    The append is in place and communicates nothing.
    """
    count = dist.get_world_size() // 2
    rows = 2 * count
    mesh, arrays = mesh_of(count, 2), cache_of(rows, has_table)
    rotary = Rotary(*(x.to(device()) for x in rotary_tables(64, HEAD_DIM)))
    row = None if has_table else ROW_AXIS
    axes = {
        "key_pages": (row, 2), "value_pages": (row, 2), "centroids": (row, 2), "query": (ROW_AXIS, 2), "key": (row, 2),
        "value": (row, 2),
    }  # fmt: skip
    parts = {name: spread(x.clone(), mesh, *axes[name]) if name in axes else x for name, x in arrays.items()}
    pages = parts["key_pages"].to_local()
    compute = torch.compile(step, fullgraph=True, backend="aot_eager") if is_compiled else step
    with torch.inference_mode(not is_compiled), torch.no_grad(), CommDebugMode() as communication:
        results = compute(parts, rotary)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    with torch.no_grad():
        expected = step(arrays, rotary)
    for x, whole in zip(results, expected, strict=True):
        close(x, whole, Shard(ROW_AXIS), Shard(HEAD_AXIS))
    for name in ("key_pages", "value_pages", "centroids"):
        close(parts[name], arrays[name], *parts[name].placements)
    assert parts["key_pages"].to_local().data_ptr() == pages.data_ptr()


def check_one_key_head_in_a_cache() -> None:
    """Check query heads over all processes with one key head in a replicated cache."""
    count = dist.get_world_size()
    mesh, arrays = mesh_of(count), cache_of(2, has_table=True)
    cache = {name: arrays[name] for name in ("key_pages", "value_pages", "page_table", "kv_lengths")}
    for name in ("key_pages", "value_pages"):
        cache[name] = cache[name][:, :, :1].contiguous()
    query = random(2, 1, 2 * count, HEAD_DIM, seed=6)
    expected = paged_attention(query, *cache.values(), **implementation())
    parts = {name: spread(x, mesh, None) if name.endswith("pages") else x for name, x in cache.items()}
    query = spread(query, mesh, HEAD_AXIS)
    with CommDebugMode() as communication:
        output = paged_attention(query, *parts.values(), **implementation())
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    close(output, expected, Shard(HEAD_AXIS))


def check_caches_that_would_move() -> None:
    """Check that a cache with other placements than the call needs is refused, and nothing is written."""
    count = dist.get_world_size()
    mesh, arrays = mesh_of(count), cache_of(2, has_table=True)
    names = ("query", "key", "value", "key_pages", "value_pages", "page_table", "kv_lengths")
    query, key, value, key_pages, value_pages, *tables = (arrays[name] for name in names)

    def heads(x: torch.Tensor, axis: int | None = HEAD_AXIS) -> DTensor:
        return spread(x.repeat_interleave(count, dim=2), mesh, axis)

    pages = heads(key_pages), heads(value_pages)
    whole = heads(key_pages, None), heads(value_pages, None)
    before = pages[0].full_tensor()
    with pytest.raises(ValueError, match=r"`key_pages` must be placed as \[Shard\(dim=2\)\], got \[Replicate\(\)\]"):
        paged_attention(heads(query), *whole, *tables)
    with pytest.raises(ValueError, match=r"`key_pages` must be placed as \[Replicate\(\)\], got \[Shard\(dim=0\)\]"):
        paged_attention(heads(query, None), heads(key_pages, 0), heads(value_pages, 0), *tables)
    with pytest.raises(ValueError, match=r"`value_pages` must be placed as \[Shard\(dim=2\)\]"):
        append_to_pages(heads(key), heads(value), pages[0], whole[1], *tables)
    with pytest.raises(ValueError, match="`key` must be a DTensor, as other operands are"):
        append_to_pages(key.repeat_interleave(count, dim=2), heads(value), *pages, *tables)
    assert torch.equal(pages[0].full_tensor(), before)
    # Replicated keys are cut; keys with other placements are gathered first and then cut.
    with pytest.warns(UserWarning, match="`append_to_pages`: axis 3 .* is gathered"):
        append_to_pages(heads(key, 3), heads(value, None), *pages, *tables)
    append_to_pages(key, value, key_pages, value_pages, *tables)
    close(pages[0], key_pages.repeat_interleave(count, dim=2), Shard(2))
    close(pages[1], value_pages.repeat_interleave(count, dim=2), Shard(2))


def check_merged_states() -> None:
    """Check states whose heads or rows are sharded, and states on several processes, which are summed."""
    count = dist.get_world_size()
    outputs, lses = random(count, ROWS, 3, count, 4, seed=0), random(count, ROWS, 3, count, seed=1)
    mesh, expected = mesh_of(count), merge_attention_states(outputs, lses)
    for axis in (3, 0):
        results = merge_attention_states(spread(outputs, mesh, axis), spread(lses, mesh, axis))
        for x, whole in zip(results, expected, strict=True):
            close(x, whole)
        if axis == 3:
            assert all(x.placements == (Shard(2),) for x in results), [x.placements for x in results]


def check_fuse_is_refused() -> None:
    """Check that fused functions refuse DTensors with a message on how to get plain tensors."""
    import jax

    query = spread(random(2, TOKENS, HEAD_DIM, seed=0), mesh_of(dist.get_world_size()), None)
    attend = fuse(lambda query: jax.nn.softmax(query @ query.mT) @ query)
    with pytest.raises(TypeError, match=r"to_local\(\) of a DTensor"):
        attend(query)


class Attention(torch.nn.Module):
    """Attention with separate projections for query, key and value, as tensor parallelism needs."""

    def __init__(self, width: int, key_heads: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.query, self.out = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.key, self.value = (torch.nn.Linear(width, key_heads * HEAD_DIM) for _ in range(2))
        self.weights = torch.nn.Parameter(torch.randn(3, key_heads, HEAD_DIM) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = (self.query, self.key, self.value)
        query, key, value = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in projections)
        key = key_convolution(key, self.weights, **implementation())
        return self.out(ATTEND[self.name](query, key, value, **implementation()).flatten(-2))


class Block(torch.nn.Module):
    """A layer of a model: attention and a multilayer perceptron."""

    def __init__(self, width: int, key_heads: int, name: str) -> None:
        super().__init__()
        self.attention = Attention(width, key_heads, name)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def parallelize(block: Block, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism: query heads and the perceptron's channels are divided, the one key head is not."""
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False),
        "attention.query": ColwiseParallel(use_local_output=False),
        "attention.out": RowwiseParallel(input_layouts=Shard(-1), use_local_output=False),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(input_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(block, mesh, plan)
    # The rest is replicated: key, value, and the weights of the convolution.
    distribute_module(block, mesh)


def assert_trains_alike(model: torch.nn.Module, whole: torch.nn.Module, width: int) -> None:
    """Assert that gradients of mean losses of the processes' rows, summed over processes, are those of one process."""
    rank, count = dist.get_rank(), dist.get_world_size()
    inputs, target = (random(ROWS * (count // model.shared), TOKENS, width, seed=seed) for seed in (1, 2))
    torch.nn.functional.mse_loss(whole(inputs), target).backward()
    rows = slice(rank // model.shared * ROWS, (rank // model.shared + 1) * ROWS)
    output = model(inputs[rows])
    output = output.full_tensor() if isinstance(output, DTensor) else output
    torch.nn.functional.mse_loss(output, target[rows]).backward()
    for (name, actual), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(actual.grad, DTensor), name
        gradient = actual.grad.full_tensor()
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


def check_tensor_parallel(name: str) -> None:
    """Check FSDP2 over the batch with tensor parallelism over query heads, one key head, on a mesh of two axes."""
    width = 4 * HEAD_DIM
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("data", "model"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(Block(width, 1, name), Block(width, 1, name)).to(device()))
    model, whole = models
    for block in model:
        parallelize(block, mesh["model"])
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    model.shared = 2
    assert_trains_alike(model, whole, width)


def check_modules_with_fsdp() -> None:
    """Check FSDP2 with a model of the library's modules."""
    width = 2 * HEAD_DIM
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        heads: dict[str, Any] = {"num_key_heads": 1, "head_dim": HEAD_DIM, "block_size": BLOCK, **implementation()}
        blocks = BlockDiagonalSelfAttention(width, 2, rotary_max_position=TOKENS, **heads)
        chosen = MoBASelfAttention(width, 2, top_k=2, key_convolution_size=3, **heads)
        torch.nn.init.normal_(chosen.key_convolution_weight)
        models.append(torch.nn.Sequential(blocks, torch.nn.LayerNorm(width), chosen).to(device()))
    model, whole = models
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.shared = 1
    assert_trains_alike(model, whole, width)
