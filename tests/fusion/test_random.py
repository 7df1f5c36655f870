"""Tests of `fuse` on random attention functions: results and gradients are right, or `NotFusible` says why not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, fuse
from tests import numpy_oracle
from tests.fusion.fusion_random import Attention

SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(6, 12))]
KERNEL_SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (8, 9))]
TRACED_SEEDS = [
    pytest.param((*range(100, 110), 138), id="some"),
    pytest.param(range(110, 120), id="others", marks=pytest.mark.exhaustive),
]
FEWEST_FUSED = 0.75
"""The fraction of traced seeds that must fuse; docs/fusion.md rules out some kinds of functions."""


@pytest.fixture(autouse=True)
def promotion():
    """Allow implicit promotion of dtypes and ranks, on which users' functions may rely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def operands(attention, dtype):
    return {
        name: jnp.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)
        for name, x in attention.arrays.items()
    }


def with_gradients(function):
    """Return a function that computes the result and the gradients of floating arrays, with a random cotangent."""

    def both(given):
        floats = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        result, pull = jax.vjp(lambda floats: function(given | floats), floats)
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=result.shape), result.dtype)
        return {"result": result, **pull(cotangent)[0]}

    return both


# XLA's fusion pass duplicates shared operands, so the bounds from which tile lists are made would take it minutes.
jit_unfused = functools.partial(jax.jit, compiler_options={"xla_disable_hlo_passes": "fusion"})


def exact(attention, given):
    """Return the function's results and gradients in float64."""
    with jax.enable_x64(True):
        wide = {
            name: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for name, x in given.items()
        }
        compute = with_gradients(lambda given: attention.guarded(given, is_exact=True))
        return numpy_oracle.traced(compute, wide)(wide)


def assert_right(attention, fused, given, jit=jax.jit):
    """Assert that errors are at most twice the function's own errors, plus a rounding of the largest number."""
    found, expected = jit(with_gradients(fused))(given), exact(attention, given)
    slack = max(2.0**-7 if x.dtype == jnp.bfloat16 else 1e-5 for x in given.values())
    own = {}
    for name, wanted in expected.items():
        assert found[name].dtype == (jax.eval_shape(attention, given) if name == "result" else given[name]).dtype
        error = np.abs(np.asarray(found[name], np.float64) - wanted).max()
        if error > slack * np.abs(wanted).max():
            # A gradient may be 0 except for rounding, so the slack is relative to the largest of all results.
            own = own or jax.jit(with_gradients(attention.guarded))(given)
            allowed = np.abs(np.asarray(own[name], np.float64) - wanted).max()
            most = max(np.abs(x).max() for x in expected.values())
            assert error <= 2 * allowed + slack * most, (name, attention.draws.made)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_attention_matches_the_reference_with_gradients(seed):
    attention = Attention(seed)
    dtype = jnp.bfloat16 if seed % 4 == 3 else jnp.float32
    try:
        assert_right(attention, fuse(attention), operands(attention, dtype))
    except NotFusible as refusal:
        assert re.search(r"fusion_random\.py:\d+|no product with a softmax", str(refusal))


@pytest.mark.parametrize("seed", KERNEL_SEEDS)
def test_random_attention_kernels_match_the_reference(seed):
    attention = Attention(seed, simplest=("size q", "size k", "size h", "size b", "size n", "size r"))
    assert_right(attention, fuse(attention, implementation="triton"), operands(attention, jnp.float32), jit_unfused)


@pytest.mark.parametrize("seeds", TRACED_SEEDS)
def test_most_functions_fuse(seeds):
    refused = {}
    for seed in seeds:
        attention = Attention(seed)
        given = operands(attention, jnp.float32)
        written = jax.eval_shape(attention, given)
        try:
            fused = jax.eval_shape(fuse(attention), given)
        except NotFusible as refusal:
            refused[seed] = str(refusal)
            continue
        assert (fused.shape, fused.dtype) == (written.shape, written.dtype), attention.draws.made
    assert len(refused) <= (1 - FEWEST_FUSED) * len(seeds), refused
