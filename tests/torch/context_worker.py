"""Worker process for tests of `context_parallel`: four processes on CPUs, or one for each GPU."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from blockdiag.torch import (
    ContextParallel,
    Rotary,
    block_diagonal_attention,
    key_convolution,
    moba_attention,
    rotary_tables,
)
from blockdiag.torch.context.collectives import Transfer
from blockdiag.torch.context.exchange import exchange
from blockdiag.torch.ops.moba import passes
from tests.torch.division_worker import device, implementation, mesh_of, random, spread

BLOCK, HEAD_DIM = 16, 16


def own_part(x: torch.Tensor, tokens: int, context: ContextParallel) -> torch.Tensor:
    """Return this process's part of a tensor."""
    return x.chunk(context.size, tokens)[context.rank]


def world(strategy: Any = None) -> ContextParallel:
    return ContextParallel(dist.group.WORLD, strategy)


def operands(
    tokens: int, key_heads: int, batch: tuple[int, ...] = (2,), count: int | None = None, group: int = 2
) -> list[torch.Tensor]:
    """Return query, key and value of all processes, with a group of query heads for each key head."""
    total = tokens * (count or dist.get_world_size())
    shapes = [(*batch, total, heads, HEAD_DIM) for heads in (group * key_heads, key_heads, key_heads)]
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def differentiated(attend: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results and gradients, for cotangents that depend on the results."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    results = attend(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else results
    loss: Any = sum((0.3 * x + (3 * x).sin()).sum() for x in results)
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]


def expected_of(attend: Callable[..., Any], whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one process's results and gradients, broadcast to all, because compilation is slow on CPUs."""
    found = [[x.cpu() for x in differentiated(attend, whole)]] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(found)
    (expected,) = found
    assert expected is not None
    return [x.to(device()) for x in expected]


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if device() == "cpu" else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def assert_shared(attend: Callable[..., Any], whole: Sequence[torch.Tensor], context: ContextParallel) -> None:
    """Assert that processes that share tokens compute the results of one process, and the same ones each time.

    Args:
        attend: function of operands, and optionally of `context_parallel`.
        whole: the operands of one process, [.., T, heads, elements].
        context: the processes.
    """
    expected = expected_of(attend, whole)
    parts = [own_part(x, -3, context) for x in whole]
    shared = functools.partial(attend, context_parallel=context)
    found, again = differentiated(shared, parts), differentiated(shared, parts)
    for one, other, second in zip(found, expected, again, strict=True):
        # The log-sum-exp has no axis of head elements.
        assert_alike(one, own_part(other, -3 if other.ndim == whole[0].ndim else -2, context))
        assert torch.equal(one, second)


def check_moba(strategy: str | None, case: str) -> None:
    """Check MoBA with each strategy: packed, masked over one axis of a mesh, and batched with few key heads."""
    context, count = world(strategy), dist.get_world_size()
    options: dict[str, Any] = {"block_size": BLOCK, "top_k": 3, **implementation()}
    own, key_heads, group, batch, mask = 2 * BLOCK, 2 * count, 2, (2,), None
    if case == "one key head":
        key_heads = 1
    elif case == "half a key head for each process":
        key_heads, group = count // 2, 4
    elif case == "packed":
        batch, key_heads = (), 2 * count if strategy == "ulysses" else 1
        edges = [0, 21, 21, count * own * 2 // 3, count * own - 11]
        options |= {"sequence_offsets": int32(edges), "return_residual": True}
    elif case == "masked":
        # Batch rows could be over the other axis of the mesh; here all processes along it have the same ones.
        mesh = mesh_of(count // 2, 2, names=("data", "tokens"))
        context, count = ContextParallel(mesh["tokens"], strategy), 2
        mask = random(*batch, own * count, seed=7) > -0.8
        # A query that sees no key has the log-sum-exp -inf, and the gradient of its sine would be NaN.
        mask[:, 0] = True
        options |= {"is_causal": strategy == "ulysses", "return_residual": True}

    def attend(*tensors: torch.Tensor, context_parallel: ContextParallel | None = None) -> Any:
        given = mask if mask is None or context_parallel is None else own_part(mask, -1, context_parallel)
        return moba_attention(*tensors, key_mask=given, context_parallel=context_parallel, **options)

    with mock.patch.object(passes, "choose", wraps=passes.choose) as choose:
        assert_shared(attend, operands(own, key_heads, batch, count, group), context)
    # The precision of routing must not depend on how many batch rows lie back to back.
    longest = {call.args[-1] for call in choose.call_args_list}
    assert longest == (set() if strategy == "ulysses" else {own * count // BLOCK})


def check_block_diagonal(case: str) -> None:
    """Check cuts between and within blocks, packed sequences, blocks with lengths, and blocks of several processes."""
    count = dist.get_world_size()
    own, batch, key_heads, options = 24, (2,), 1, {"block_size": BLOCK, **implementation()}
    total = own * count
    tables = [x.to(device()) for x in rotary_tables(total, HEAD_DIM)]
    order = torch.arange(total, dtype=torch.int32, device=device()).flip(0)
    cut: dict[str, Any] = {}
    if case == "between blocks":
        own = 2 * BLOCK
        tables = [x.to(device()) for x in rotary_tables(own * count, HEAD_DIM)]
    elif case == "packed":
        batch, options["sequence_offsets"] = (), int32([0, 21, 21, total * 2 // 3, total - 11])
    elif case == "lengths":
        batch, cut, options["is_causal"] = (), {"positions": order}, True
        options["block_lengths"] = int32([5, 16, 0, 11, *(16,) * (total // 16 - 3)])
    elif case == "exchanged":
        cut, key_heads, options["block_size"] = {"per_token": True}, count, total

    def attend(*tensors: torch.Tensor, context_parallel: ContextParallel | None = None) -> Any:
        part = (lambda x: x) if context_parallel is None else lambda x: own_part(x, 0, context_parallel)
        cos_sin = [part(x) for x in tables] if "per_token" in cut else tables
        rotary = Rotary(*cos_sin, **{name: part(x) if name == "positions" else x for name, x in cut.items()})
        return block_diagonal_attention(*tensors, rotary=rotary, context_parallel=context_parallel, **options)

    assert_shared(attend, operands(own, key_heads, batch), world())


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device())


def check_key_convolution(is_packed: bool) -> None:
    """Check that keys equal those of one process, and that gradients of weights add up to those of one process."""
    context, options = world(), implementation()
    total = 24 * context.size
    if is_packed:
        options["sequence_offsets"] = int32([0, 21, 21, 25, total - 11])
    key, weights = random(*(() if is_packed else (2,)), total, 2, HEAD_DIM, seed=0), random(4, 2, HEAD_DIM, seed=1)
    expected = expected_of(functools.partial(key_convolution, **options), (key, weights))
    shared = functools.partial(key_convolution, context_parallel=context, **options)
    found, again = (differentiated(shared, (own_part(key, -3, context), weights)) for _ in range(2))
    for one, second in zip(found, again, strict=True):
        assert torch.equal(one, second)
    dist.all_reduce(found[2])
    for one, other in zip(found, (*(own_part(x, -3, context) for x in expected[:2]), expected[2]), strict=True):
        assert_alike(one, other)


def check_transfers_beside_attention() -> None:
    """Check that the next heads are in flight before attention to the present ones, also in the backward pass."""
    events: list[str] = []

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            events.append("attend")
            return query + key

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            events.append("attend")
            return gradients[0], gradients[0]

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(Transfer, name)

        def record(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return function(*arguments, **options)

        return record

    count = dist.get_world_size()
    query, key = (random(2, 8, 2 * count, 4, seed=seed).requires_grad_() for seed in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("issue", "finish"):
            patch.setattr(Transfer, name, recorded(name))
        (output,) = exchange(world(), lambda *x: (Attend.apply(*x),), query, [key])
        forward = " ".join(events)
        events.clear()
        output.sum().backward()
    both = "issue issue", "finish finish"
    assert forward == " ".join([*both, both[0], "attend issue", both[1], "attend issue", both[1]])
    # The gradient of the second group's output has arrived, and that of the first group's output is in flight.
    backward = ["issue issue finish attend", both[0], "finish attend", both[1], *both]
    assert " ".join(events) == " ".join(backward)
    torch.testing.assert_close(output, query + key)


def check_compiled() -> None:
    """Check that the call runs between graphs, and is refused where only one graph is allowed."""
    # Compiled in one process, whose group consists of itself.
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        context, options = ContextParallel(group), implementation()
        key, weights = random(1, 24, 2, HEAD_DIM, seed=0), random(4, 2, HEAD_DIM, seed=1)

        def twice(key: torch.Tensor) -> torch.Tensor:
            return 2 * key_convolution(2 * key, weights, context_parallel=context, **options)

        expected = differentiated(twice, [key])
        found = differentiated(torch.compile(twice, backend="aot_eager"), [key])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
            torch.compile(twice, backend="aot_eager", fullgraph=True)(key)
    dist.barrier()


def check_refusals() -> None:
    """Check that errors name the problem and the remedy in every process, before anything is communicated."""
    rank, count = dist.get_rank(), dist.get_world_size()
    query, key, value = (own_part(x, -3, world()) for x in operands(24, 1, group=3))
    moba = functools.partial(moba_attention, query, key, value, block_size=BLOCK, top_k=2)
    attend = functools.partial(block_diagonal_attention, query, key, value)
    with pytest.raises(ValueError, match="`strategy` must be None, 'ulysses', 'gather' or 'ring', got 'rings'"):
        world("rings")
    for call in (moba, attend, functools.partial(key_convolution, key, random(4, 1, HEAD_DIM, seed=1))):
        with pytest.raises(ValueError, match=r"strategy 'ring' supports only `fuse`, not .*; (use|leave)"):
            call(context_parallel=world("ring"))
    with pytest.raises(
        ValueError, match="a multiple or a divisor of these, got 3 query heads and 1 key heads; use strategy='gather'"
    ):
        moba(context_parallel=world("ulysses"))
    pad = rf"`block_size`=16; pad the {24 * count} tokens to {32 * count}, or use strategy='ulysses'"
    with pytest.raises(ValueError, match=pad):
        moba(context_parallel=world())
    with pytest.raises(ValueError, match="does not support `routing` or `key_sequence_offsets`; leave them out"):
        moba(context_parallel=world(), key_sequence_offsets=int32([0, 24]))
    with pytest.raises(ValueError, match="as many queries as keys"):
        moba_attention(query[:, :16], key, value, block_size=BLOCK, top_k=2, context_parallel=world())
    with pytest.raises(ValueError, match="strategy 'gather' does not support `block_diagonal_attention`"):
        attend(context_parallel=world("gather"))
    with pytest.raises(
        ValueError, match=rf"and 1 key heads; batched sequences of {100 * count} tokens, {24 * count} here"
    ):
        attend(block_size=100, context_parallel=world())
    with pytest.raises(ValueError, match=rf"need at least 3 tokens in each process, got 2; pad them, to {3 * count}"):
        key_convolution(key[:, :2], random(4, 1, HEAD_DIM, seed=1), context_parallel=world())
    with pytest.raises(ValueError, match=rf"equally many tokens of `query`, got \[8, 9.*give each process {7 + count}"):
        block_diagonal_attention(*(x[:, : 8 + rank] for x in (query, key, value)), context_parallel=world())
    nested = torch.nested.nested_tensor([key[0], key[0, :5]], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"`key` must be a plain tensor .* got a nested tensor; pass"):
        key_convolution(nested, random(4, 1, HEAD_DIM, seed=1), context_parallel=world())
    with pytest.raises(ValueError, match=r"`context_parallel` must be a blockdiag\.torch\.ContextParallel or None"):
        moba(context_parallel=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"`sequence_offsets` describes one packed token axis"):
        attend(sequence_offsets=int32([0, 24 * count]), context_parallel=world())
    if device() == "cpu":
        # Values on a GPU are not checked.
        with pytest.raises(ValueError, match=rf"must end within the {24 * count} tokens of `query`, got {25 * count}"):
            block_diagonal_attention(
                query[0], key[0], value[0], sequence_offsets=int32([0, 25 * count]), context_parallel=world()
            )
    mesh = mesh_of(count // 2, 2, names=("data", "tokens"))
    with pytest.raises(ValueError, match=r"`query` must be a plain tensor .* to_local"):
        block_diagonal_attention(*(spread(x, mesh, None, None) for x in (query, key, value)), context_parallel=world())
    with pytest.raises(ValueError, match=r"a DeviceMesh of one axis, got the axes \('data', 'tokens'\)"):
        ContextParallel(mesh)
    with pytest.raises(ValueError, match="must be a process group or a DeviceMesh of one axis, got <class 'str'>"):
        ContextParallel("tokens")
    others = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="`group` does not have this process"):
            ContextParallel(others)
