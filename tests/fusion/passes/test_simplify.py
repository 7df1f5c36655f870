"""Tests that programs with redundant equations, such as repeated or inverse ones, fuse as without them."""

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from blockdiag import explain, fuse
from blockdiag.fusion.frontend.trace import bind, flat_jaxpr
from blockdiag.fusion.gallery import VARIANTS, Sizes
from blockdiag.fusion.passes.simplify import plain
from blockdiag.fusion.program import trace
from tests.fusion.fusion_support import arrays, assert_alike, with_gradients

SIZES = Sizes(batch=2, rows=2, query_tokens=12, key_tokens=12, query_heads=2, key_heads=1, head_dim=8, value_dim=8)
# Variants whose results and gradients are compared too, including ones with sinks and without a softmax.
COMPUTED = ("softmax_by_hand", "causal_tril", "sinks_in_denominator", "evoformer_row", "latent", "retention")
SHARE = 0.35
"""The share of uses that compute a value anew, and the share of values that take a detour."""


@pytest.fixture(autouse=True)
def promotion():
    """Allow implicit promotion of dtypes and ranks, on which users' functions may rely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def names_of(closed: core.ClosedJaxpr) -> list[str]:
    return [x.primitive.name for x in closed.jaxpr.eqns]


@pytest.mark.parametrize(
    ("detour", "straight"),
    [
        pytest.param(lambda x: (x + 0.0) * 1.0 / 1.0 - 0.0, lambda x: x, id="numbers that change nothing"),
        pytest.param(lambda x: jnp.sin(0.0 + 1.0 * x), lambda x: jnp.sin(x), id="on the left"),
        pytest.param(lambda x: jnp.negative(-x), lambda x: x, id="negated twice"),
        pytest.param(lambda x: x + -jnp.sin(x), lambda x: x - jnp.sin(x), id="a negation added"),
        pytest.param(lambda x: -jnp.sin(x) + x, lambda x: x - jnp.sin(x), id="a negation first"),
        pytest.param(lambda x: x - -jnp.sin(x), lambda x: x + jnp.sin(x), id="a negation taken away"),
        pytest.param(lambda x: jnp.exp2(x * math.log2(math.e)), lambda x: jnp.exp(x), id="a power of 2"),
        pytest.param(lambda x: x.T.T, lambda x: x, id="transposed twice"),
        pytest.param(
            lambda x: x[None].transpose(1, 2, 0).transpose(1, 2, 0),
            lambda x: x[None].transpose(2, 0, 1),
            id="two permutations",
        ),
        pytest.param(lambda x: x[:, None, :, None].reshape(-1).reshape(x.shape), lambda x: x, id="reshaped and back"),
        pytest.param(lambda x: jnp.sin(x) * jnp.sin(x), lambda x: (lambda y: y * y)(jnp.sin(x)), id="computed twice"),
        pytest.param(lambda x: jnp.concatenate([x, -x])[:3], lambda x: x, id="a joined part"),
        pytest.param(
            lambda x: jnp.concatenate([jnp.concatenate([x, jnp.sin(x)]), x]),
            lambda x: jnp.concatenate([x, jnp.sin(x), x]),
            id="joined twice",
        ),
        pytest.param(lambda x: jnp.stack([jnp.sin(x), x], 1)[:, 1], lambda x: x, id="a stacked part"),
        pytest.param(
            lambda x: jnp.where((x > 0) & jnp.ones((), bool) | jnp.zeros((), bool), x, jnp.sin(x)),
            lambda x: jnp.where(x > 0, x, jnp.sin(x)),
            id="masks that hide nothing",
        ),
        pytest.param(
            lambda x: jnp.where(jnp.where(x > 0, True, False), x, jnp.sin(x)),
            lambda x: jnp.where(x > 0, x, jnp.sin(x)),
            id="a choice between true and false",
        ),
    ],
)
def test_simplify_removes_redundant_equations(detour: Callable[..., Any], straight: Callable[..., Any]) -> None:
    (x,) = arrays((3, 4))
    found, expected = flat_jaxpr(detour, x)[0], flat_jaxpr(straight, x)[0]
    shorter = plain(found)
    assert shorter is not None
    assert names_of(shorter) == names_of(plain(expected) or expected)
    np.testing.assert_allclose(core.jaxpr_as_fun(shorter)(x)[0], straight(x), rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x + 1e-30, id="a small number"),
        pytest.param(lambda x: x * 2.0 - 1.0, id="other numbers"),
        pytest.param(lambda x: 1.0 / x, id="a reciprocal"),
        pytest.param(lambda x: 0.0 - x, id="a negation"),
        pytest.param(lambda x: jnp.exp2(x * 1.4426), id="another base"),
        pytest.param(lambda x: x.T.reshape(x.shape), id="other elements"),
        pytest.param(lambda x: x.reshape(4, 3).T, id="elements in another order"),
        pytest.param(lambda x: jnp.concatenate([x, -x])[1:4], id="parts of both"),
        pytest.param(lambda x: jnp.stack([x, jnp.sin(x)], 1)[:2, 1], id="a part of one"),
        pytest.param(
            lambda x: jnp.concatenate([jnp.concatenate([x, -x], 1), jnp.concatenate([-x, x], 1)]), id="joined both ways"
        ),
        pytest.param(lambda x: x + jnp.zeros((2, 1, 1)), id="more elements"),
        pytest.param(lambda x: (x.astype(jnp.bfloat16) + jnp.bfloat16(0)).astype(x.dtype), id="rounded"),
        pytest.param(lambda x: jnp.where(x > 0, False, True), id="a negated mask"),
        pytest.param(lambda x: lax.optimization_barrier(jnp.sin(x)) + lax.optimization_barrier(jnp.sin(x)), id="kept"),
    ],
)
def test_simplify_keeps_equations_that_change_values(function: Callable[..., Any]) -> None:
    (x,) = arrays((3, 4))
    closed, _ = flat_jaxpr(function, x)
    shorter = plain(closed) or closed
    np.testing.assert_array_equal(core.jaxpr_as_fun(shorter)(x)[0], function(x))
    assert names_of(shorter).count("optimization_barrier") == names_of(closed).count("optimization_barrier")


def test_simplify_keeps_repeated_effects() -> None:
    def printed(x: jax.Array) -> jax.Array:
        jax.debug.print("once")
        jax.debug.print("once")
        return x + 0.0

    closed, _ = flat_jaxpr(printed, jnp.ones(3))
    shorter = plain(closed)
    assert shorter is not None
    assert len(shorter.jaxpr.eqns) == len(closed.jaxpr.eqns) - 1


def with_detours(function: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Return the function with random values computed anew for each use or sent through a detour."""

    def longer(**given: Any) -> Any:
        draw = np.random.default_rng(seed)
        closed, structure = flat_jaxpr(lambda given: function(**given), given)
        jaxpr = closed.jaxpr
        known: dict[core.Var, Any] = dict(zip(jaxpr.constvars, map(jnp.asarray, closed.consts), strict=True))
        known |= dict(zip(jaxpr.invars, jax.tree.leaves(given), strict=True))
        producers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}

        def value_of(operand: Any, depth: int = 3) -> Any:
            if isinstance(operand, core.Literal):
                return jnp.asarray(operand.val, operand.aval.dtype)
            equation = producers.get(operand)
            if equation is None or not depth or equation.primitive.name == "dot_general" or draw.random() > SHARE:
                return known[operand]
            results = bind(equation, [value_of(x, depth - 1) for x in equation.invars])
            return results[equation.outvars.index(operand)]

        for equation in jaxpr.eqns:
            results = bind(equation, list(map(value_of, equation.invars)))
            known |= dict(zip(equation.outvars, [detour(x, draw) for x in results], strict=True))
        return jax.tree.unflatten(structure, [known.get(x) if isinstance(x, core.Var) else x for x in jaxpr.outvars])

    return longer


def detour(x: jax.Array, draw: np.random.Generator) -> jax.Array:
    """Return the same value, at random in more steps."""
    if draw.random() > SHARE:
        return x
    order = draw.permutation(x.ndim)
    moved = (
        lambda: lax.transpose(lax.transpose(x, order), np.argsort(order)),
        lambda: x.reshape(-1, 1).reshape(x.shape),
        lambda: jnp.expand_dims(x, x.ndim // 2).squeeze(x.ndim // 2),
    )
    changed = (lambda: x + 0.0, lambda: 1.0 * x, lambda: jnp.negative(-x))
    ways = (*moved, *changed) if jnp.issubdtype(x.dtype, jnp.floating) else moved
    return ways[draw.integers(len(ways))]()


def regions_of(function: Callable[..., Any], given: dict[str, jax.Array]) -> list[tuple[Any, ...]]:
    """Return the axis sizes of each region, and the roles and shapes of its leaves."""
    found = [x for program in trace(function, (), given).programs() for x in program.all_regions()]
    return [(x.sizes, sorted((leaf.role, leaf.source.shape) for leaf in x.leaves)) for x in found]


@pytest.mark.parametrize("name", VARIANTS)
def test_fuse_of_a_variant_with_redundant_equations_has_the_same_regions(name: str) -> None:
    variant = VARIANTS[name]
    given = variant.make_inputs(jax.random.key(0), SIZES)
    longer = with_detours(variant.function, zlib.crc32(name.encode()))
    assert regions_of(longer, given) == regions_of(variant.function, given)


@pytest.mark.parametrize("name", COMPUTED)
def test_fuse_of_a_variant_with_redundant_equations_has_the_same_results(name: str) -> None:
    variant = VARIANTS[name]
    given = variant.make_inputs(jax.random.key(0), SIZES)
    rest = {key: x for key, x in given.items() if key not in variant.differentiable}
    floats = [given[key] for key in variant.differentiable]

    def of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *floats: function(**dict(zip(variant.differentiable, floats, strict=True)), **rest)

    longer = with_detours(variant.function, zlib.crc32(name.encode()))
    found, expected = (with_gradients(of_floats(fuse(x)), floats) for x in (longer, variant.function))
    assert_alike(found, expected)
    assert explain(longer)(**given).source == explain(variant.function)(**given).source
