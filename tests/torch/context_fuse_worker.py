"""Worker process for tests of `fuse` with `context_parallel`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

from blockdiag.torch import ContextParallel, explain, fuse
from blockdiag.torch.context.collectives import gather_whole
from blockdiag.torch.fusion import program
from tests.torch.context_worker import assert_alike, differentiated, expected_of, int32, own_part, world
from tests.torch.division_worker import mesh_of, random, spread

OWN, WIDTH = 16, 8


def grouped(query: Any, key: Any, value: Any, mask: Any, bias: Any = None) -> Any:
    """Attend from groups of query heads [B, T, N, H] to key heads, with a bias [heads, T, S] or [T, S]."""
    query = (query * query.shape[-1] ** -0.5).reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key)
    if bias is not None:
        scores = scores + bias.reshape(1, *((key.shape[2], -1) if bias.ndim == 3 else (1, 1)), *bias.shape[-2:])
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    output = jnp.einsum("bkgts,bskh->btkgh", weights, value)
    return output.reshape(*output.shape[:2], -1, output.shape[-1])


def places(x: Any) -> tuple[Any, Any]:
    """Return the positions of queries and of keys."""
    place = jnp.arange(x.shape[1])
    return place[:, None], place[None, :]


def causal(query: Any, key: Any, value: Any) -> Any:
    row, column = places(query)
    return grouped(query, key, value, row >= column)


def biased(query: Any, key: Any, value: Any, bias: Any) -> Any:
    row, column = places(query)
    return grouped(query, key, value, (row >= column) & (row - column < 40), bias)


def twice_biased(query: Any, key: Any, value: Any, table: Any, bias: Any) -> Any:
    """Attend with a bias for each head and each distance up to 15, and one for each query and key."""
    row, column = places(query)
    return biased(query, key, value, table[:, jnp.clip(row - column, -15, 15) + 15] + bias)


def layer(x: Any, weights: Any, projection: Any, number: Any) -> Any:
    """Compute a layer with a norm, rotary embedding by position, documents, and a residual."""
    hidden = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    query, key, value = jnp.einsum("btd,ndkh->nbtkh", hidden, weights)
    angles = jnp.arange(x.shape[1])[:, None, None] / 100.0 ** jnp.linspace(0, 1, WIDTH // 2)

    def rotated(x: Any) -> Any:
        low, high = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    row, column = places(x)
    mask = (row >= column) & (number[:, None] == number[None, :])
    output = grouped(rotated(query), rotated(key), value, mask)
    return x + jnp.einsum("btkh,khd->btd", output, projection)


def heads_first(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Attend in layout [B, N, T, H] without a mask, and return the log-sum-exp too."""
    scores = query @ key.mT / WIDTH**0.5
    return jax.nn.softmax(scores) @ value, jax.nn.logsumexp(scores, -1)


def operands(key_heads: int) -> list[torch.Tensor]:
    total = OWN * dist.get_world_size()
    return [random(1, total, heads, WIDTH, seed=i) for i, heads in enumerate((2 * key_heads, key_heads, key_heads))]


def check_shared(
    function: Callable[..., Any],
    whole: Sequence[torch.Tensor],
    axes: Sequence[int | None],
    context: ContextParallel,
    strategy: str,
    constant: Sequence[torch.Tensor] = (),
    **options: Any,
) -> None:
    """Compare results and gradients of processes that share tokens with one process, and repeat the call.

    Args:
        function: the function to fuse.
        whole: operands of one process that have a gradient.
        axes: the token axes of all operands.
        context: the processes.
        strategy: the expected description by `explain`.
        constant: further operands.
        options: options of `fuse`.
    """

    def parts(tensors: Sequence[torch.Tensor], axes: Sequence[int | None]) -> list[torch.Tensor]:
        return [
            x if axis is None else own_part(x, axis, context).contiguous()
            for x, axis in zip(tensors, axes, strict=True)
        ]

    count, fused = len(whole), fuse(function, **options)
    expected = expected_of(lambda *x: fused(*x, *constant), whole)
    rest = parts(constant, axes[count:])
    shared = fuse(function, context_parallel=context, token_axes=tuple(axes), **options)
    (region,) = explain(shared)(*parts(whole, axes[:count]), *rest).regions
    assert region.shared is not None and strategy in region.shared, region.shared
    found, again = (differentiated(lambda *x: shared(*x, *rest), parts(whole, axes[:count])) for _ in range(2))
    results = len(found) - count
    for one, second in zip(found, again, strict=True):
        assert torch.equal(one, second)
    for x, axis in zip(found[results:], axes, strict=False):
        if axis is None:
            dist.all_reduce(x, group=context.group)
    wanted = parts(expected, [*([axes[0]] * results), *axes[:count]])
    for one, other in zip(found, wanted, strict=True):
        assert_alike(one, other)


def check_fuse(case: str) -> None:
    """Check each strategy with masks and biases of all kinds, and with operations around attention."""
    count = dist.get_world_size()
    total, few, many = OWN * count, operands(1), operands(count)
    tokens = (1, 1, 1)
    zigzag = "'gather': they gather arrays with keys, and compute rows in zigzag order"
    if case == "gather":
        check_shared(causal, few, tokens, world(), zigzag)
    elif case == "ring":
        check_shared(causal, few, tokens, world("ring"), "steps, rows in zigzag order")
    elif case == "ring, biases":
        whole = [*few, random(2, 31, seed=3), random(total, total, seed=4)]
        check_shared(twice_biased, whole, (*tokens, None, 0), world("ring"), "'ring'")
    elif case == "ring, heads first":
        whole = [x.transpose(1, 2).contiguous() for x in few]
        check_shared(heads_first, whole, (2, 2, 2), world("ring"), "steps, consecutive rows")
    elif case == "ulysses":
        check_shared(causal, many, tokens, world("ulysses"), "'ulysses'")
    elif case == "gather, biases":
        whole = [*few, random(2, 31, seed=3), random(total, total, seed=4)]
        check_shared(twice_biased, whole, (*tokens, None, 0), world("gather"), zigzag)
    elif case == "ulysses, bias":
        check_shared(biased, [*many, random(total, total, seed=3)], (*tokens, 0), world(), "'ulysses'")
    elif case in ("layer", "ring, layer"):
        weights = random(3, WIDTH, 1, WIDTH, seed=1), random(1, WIDTH, WIDTH, seed=2)
        number = int32(np.sort(np.random.default_rng(0).integers(0, 4, total)).tolist())
        whole = [random(3, total, WIDTH, seed=0), *weights]
        strategy, words = ("ring", "'ring'") if "ring" in case else (None, zigzag)
        check_shared(layer, whole, (1, None, None, 0), world(strategy), words, [number])
    elif case == "heads first":
        whole = [x.transpose(1, 2).contiguous() for x in few]
        check_shared(heads_first, whole, (2, 2, 2), world("gather"), "consecutive rows")


def check_fuse_kernels(strategy: str | None = None) -> None:
    """Check the kernels in the interpreter on a CPU, with rows in zigzag order and without JAX around them."""
    steps: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_InJax", steps.append)
        check_shared(causal, operands(1), (1, 1, 1), world(strategy), "in zigzag order", implementation="triton")
    assert not steps


def check_fuse_rounding(strategy: str, implementation: str, most: float) -> None:
    """Check that gradients summed over processes are rounded once, so they are as exact as those of one process.

    Args:
        strategy, implementation: arguments of the call.
        most: the largest ratio of errors, against float64, of four processes to one process.
    """
    context, total, width = world(strategy), OWN * dist.get_world_size(), 16
    heads = (8, 4, 4, 8) if strategy == "ulysses" else (2, 1, 1, 2)
    shapes = [*((1, total, count, width) for count in heads), (total, total)]
    query, key, value, cotangent, bias = (random(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes))

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        key, value = (x.repeat_interleave(2, 2) for x in (key, value))
        scores = torch.einsum("btnh,bsnh->bnts", query, key) / width**0.5 + bias
        place = torch.arange(total, device=query.device)
        distance = place[:, None] - place
        weights = scores.masked_fill((distance < 0) | (distance >= 40), -torch.inf).softmax(-1)
        return torch.einsum("bnts,bsnh->btnh", weights, value)

    def gradients(function: Callable[..., Any], cotangent: torch.Tensor, *leaves: torch.Tensor) -> Sequence[Any]:
        leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
        return torch.autograd.grad(function(*leaves), leaves, cotangent)

    whole = (cotangent, query, key, value, bias)
    exact = gradients(plain, *(x.double() for x in whole))
    of_one = gradients(fuse(biased, implementation=implementation), *whole)
    axes = (1, 1, 1, 1, 0)
    parts = [own_part(x, axis, context).contiguous() for x, axis in zip(whole, axes, strict=True)]
    shared = fuse(biased, implementation=implementation, context_parallel=context, token_axes=axes[1:])
    summed = (3,) if strategy == "ulysses" else (1, 2)
    found = gradients(shared, *parts)
    for i, (x, one, wanted, axis) in enumerate(zip(found, of_one, exact, axes[1:], strict=True)):
        assert x.dtype == torch.bfloat16
        error, error_of_one = ((y.double() - wanted).norm().item() for y in (gather_whole(context, x, axis), one))
        # The other gradients differ from those of one process only in the order of sums.
        assert error <= (most if i in summed else max(most, 1.05)) * error_of_one, (i, error, error_of_one)


def check_fuse_refusals() -> None:
    """Check that errors name the problem and the remedy in every process, before anything but token counts is sent."""
    rank, count = dist.get_rank(), dist.get_world_size()
    query, key, value = (own_part(x, 1, world()).contiguous() for x in operands(1))
    few = [own_part(x, 1, world())[:, :3] for x in operands(1)]

    def refused(match: str, function: Callable[..., Any], *arguments: Any, strategy: Any = None, axes: Any = 1) -> None:
        with pytest.raises(ValueError, match=match):
            fuse(function, context_parallel=world(strategy), token_axes=axes)(*arguments)

    for options, match in (
        ({}, "`context_parallel` needs `token_axes`; pass the axis of tokens of all arrays, such as token_axes=1"),
        ({"token_axes": 1, "fallback": True}, "`fallback` runs the function unchanged, which with `context_parallel`"),
        ({"token_axes": 1, "implementation": "reference"}, "'reference' runs the function unchanged"),
    ):
        with pytest.raises(ValueError, match=match):
            fuse(causal, context_parallel=world(), **options)
    with pytest.raises(ValueError, match="`token_axes` is for `context_parallel`, which is None"):
        fuse(causal, token_axes=1)
    # A head axis is not a token axis, and every process needs its own part of the queries.
    refused("must name axes of queries, or of keys .*, has neither queries nor keys", heads_first, query, key, value)
    refused("names no axis that becomes the queries", heads_first, query, key, value, axes=(None, 2, 2))
    refused(r"`token_axes` has the axis 4 for `args\[0\]`, of shape", causal, query, key, value, axes=4)
    refused("does not fit the 3 arguments", causal, query, key, value, axes=(1, 1))
    refused(r"got \[3, 4.*give each process", causal, *(x[:, : 3 + rank] for x in (query, key, value)))
    refused("strategy 'ulysses' needs an axis .* use strategy='gather' or 'ring'", causal, *few, strategy="ulysses")
    # Operations around attention.
    own = query, key, value
    refused("`cumsum` at .* may: it runs along", lambda x, *rest: causal(jnp.cumsum(x, 1), *rest), *own)
    refused("`reduce_sum` at .* may: it runs", lambda *x: causal(*x).sum(1), *own)
    more = (lambda *x: (causal(*x[:3]), 2 * x[3])), *own, torch.ones(3, device=query.device)
    refused("result 1 of the function, of shape .*, has no axis of", *more, axes=(1, 1, 1, None))
    refused("does not support attention inside `jax.checkpoint`", jax.checkpoint(causal), *own)
    mesh = mesh_of(count // 2, 2, names=("data", "tokens"))
    refused(r"`args\[0\]` must be a plain tensor .* to_local", causal, *(spread(x, mesh, None, None) for x in few))
