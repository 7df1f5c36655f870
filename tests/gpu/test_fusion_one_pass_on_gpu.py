"""The one-pass backward kernel on a GPU: gradients are as accurate as those of the function, and repeatable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.lowering import one_pass_schedule
from blockdiag.fusion.runtime import kernel_choice
from tests.fusion import streamed_cases
from tests.fusion.one_pass_cases import CASES
from tests.fusion.thresholds import lifted
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory
from tests.gpu.test_fusion_resident_on_gpu import allowed, compiled, exact_results, results

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_calls():
    with lifted(one_pass_schedule):
        yield


def assert_exact(case, function, *, is_repeatable=True):
    inputs = case.inputs()
    whole = {x: array for x, array in inputs.items() if array.dtype.kind == "i"}
    inputs = {x: array for x, array in inputs.items() if x not in whole}

    def of(function):
        return lambda **given: function(**given, **whole)

    shape = jax.eval_shape(of(case.function), **inputs).shape
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=shape))
    run = compiled(of(function))
    poison_free_memory()
    found, again = (run(inputs, cotangent) for _ in range(2))
    rough = results(of(case.function), inputs, cotangent)
    for key, exact in exact_results(of(case.function), inputs, cotangent).items():
        if is_repeatable:
            np.testing.assert_array_equal(found[key], again[key])
        assert np.abs(found[key] - exact).max() <= allowed(rough[key], exact, case.dtype), key


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.streams])
def test_one_pass_gradients_are_as_accurate_as_the_function(name):
    case = CASES[name]
    names = {kernel.source.name for kernel in kernel_choice.kernels(case.region())}
    assert "fused_backward_one_pass" in names
    assert_exact(case, fuse(case.function, implementation="triton"))


def test_programs_that_go_through_all_queries_of_a_key_head(monkeypatch):
    monkeypatch.setattr(one_pass_schedule, "_FEWEST_PROGRAMS", 0)
    assert_exact(CASES["grouped"], fuse(CASES["grouped"].function, implementation="triton"))


@pytest.mark.parametrize(
    "name", ["causal", "narrow_causal", "full", "wide_causal", "parts_causal", "wide_parts_causal"]
)
def test_sums_in_any_order_are_as_accurate(name):
    case = CASES[name]
    assert_exact(case, fuse(case.function, implementation="triton", deterministic=False), is_repeatable=False)


@pytest.mark.parametrize(("tokens", "width"), [(8192, 64), (4096, 96), (8192, 128), (4096, 192), (4096, 256)])
@pytest.mark.parametrize("function", [streamed_cases.attend, streamed_cases.causal, streamed_cases.window])
def test_gradients_of_many_programs_are_equal_in_every_run(function, tokens, width):
    """More programs than multiprocessors: their order of additions must not depend on when they run."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, cotangent = (jax.random.normal(x, (1, tokens, 4, width), jnp.bfloat16) for x in keys)

    @jax.jit
    def gradients(*given):
        _, pull = jax.vjp(fuse(function, implementation="triton"), *given)
        return pull(cotangent)

    first = gradients(query, key, value)
    for _ in range(4):
        for one, other in zip(first, gradients(query, key, value), strict=True):
            assert bool((one == other).all()) and bool(jnp.isfinite(one).all())


def test_nan_values_that_no_query_sees_change_no_gradient():
    case = CASES["padded"]
    inputs = case.inputs()
    inputs["length"] = jnp.full_like(inputs["length"], 200)

    def gradients(value):
        def attention(query, key, value):
            return fuse(case.function, implementation="triton")(query, key, value, inputs["length"])

        output, pull = jax.vjp(attention, inputs["query"], inputs["key"], value)
        return pull(jnp.ones_like(output))

    # Forward, 0 * NaN is NaN in the tile that holds both kinds of keys; the first tile that no query sees is skipped.
    clean = jax.jit(gradients)(inputs["value"])
    poisoned = jax.jit(gradients)(inputs["value"].at[:, 256:].set(jnp.nan))
    for one, other in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
