"""Tests of the results and gradients of `fuse` on random layers of many forms, inside random transformations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, fuse
from tests.fusion.fusion_random_forms import FORMS, KEPT, Form
from tests.fusion.fusion_random_wrapped import Wrapped
from tests.support import compiled_quickly

SEEDS = [
    pytest.param(range(len(FORMS)), id="each form once"),
    pytest.param(range(18), id="some forms again", marks=pytest.mark.exhaustive),
]
KERNEL_FORMS = ("joined", "log-sums")
DROPOUT_SEEDS = range(2)
FEWEST_FUSED = 0.75
"""The fraction of seeds that must fuse; docs/fusion.md rules out some kinds of functions."""
KNOWN_LINES = r"fusion_random_(forms|layer|parts|places|wrapped)\.py:\d+|no product with a softmax"
SLACK = {"float32": 2e-5, "bfloat16": 2.0**-7, "float16": 2.0**-9}


@pytest.fixture(autouse=True)
def promotion():
    """Allow implicit promotion of dtypes and ranks, on which users' functions may rely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def is_floating(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def evaluated(function, given, is_eager=False, in_axes=None):
    """Return results and gradients of floating arguments by name, with random cotangents.

    Args:
        function: takes all arguments, or one index of the mapped ones if `in_axes` is given.
        in_axes: the mapped axes of arguments; each index then has its own gradients.
    """

    def with_gradients(given, cotangents):
        floats = {name: x for name, x in given.items() if is_floating(x)}
        results, pull = jax.vjp(lambda floats: function(given | floats), floats)
        (gradients,) = pull(tuple(map(cotangent_of, results, cotangents)))
        return {f"result {i}": x for i, x in enumerate(results)} | gradients

    def cotangent_of(result, cotangent):
        return cotangent.astype(result.dtype) if is_floating(result) else np.zeros(result.shape, jax.dtypes.float0)

    mapped = with_gradients if in_axes is None else jax.vmap(with_gradients, in_axes=(in_axes, 0))
    whole = function if in_axes is None else jax.vmap(function, in_axes=(in_axes,))
    numbers = np.random.default_rng(1)
    shapes = [x.shape for x in jax.eval_shape(whole, given)]
    cotangents = [jnp.asarray(numbers.normal(size=x)) for x in shapes]
    return (mapped if is_eager else compiled_quickly(mapped))(given, cotangents)


def results_of(wrapped, function, given, call=None, is_eager=False):
    """Return `evaluated` of a function inside all transformations, fused by `call` if it is given."""
    if not wrapped.is_mapped_gradient:
        return evaluated(wrapped.around(function, call), given, is_eager)
    axes = wrapped.in_axes(wrapped.axes[-1], given)
    return evaluated(wrapped.inner(function, call), given, is_eager, axes)


def expected_of(wrapped, given, found):
    """Return the function's float64 results, and a callable that computes its results without `fuse`.

    If the fused function drew a dropout mask, both receive that mask as an argument.
    """
    kept = [x for x in found.values() if x.dtype == bool]
    given = given | ({KEPT: kept[0]} if kept else {})

    def own():
        return results_of(wrapped, lambda given: wrapped.form.guarded(given), given)

    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64 if is_floating(x) else x.dtype) for name, x in given.items()}
        found = results_of(wrapped, lambda given: wrapped.form.exact(given), wide)
        return {name: np.asarray(x) for name, x in found.items()}, own


def assert_right(wrapped, implementation=None):
    """Assert that errors are at most twice the function's own errors, plus a rounding of the largest number."""
    given = wrapped.operands()
    call = functools.partial(fuse, implementation=implementation)
    found = results_of(wrapped, wrapped.form, given, call, wrapped.is_eager)
    expected, compute_own = expected_of(wrapped, given, found)
    written = {f"result {i}": x for i, x in enumerate(jax.eval_shape(wrapped.around(wrapped.form), given))}
    slack = SLACK[wrapped.form.layer.dtypes.split()[0]]
    own = None
    for name, wanted in expected.items():
        like = written.get(name, given.get(name))
        assert found[name].dtype == like.dtype, name
        assert found[name].shape == wanted.shape, name
        error = np.abs(np.asarray(found[name], np.float64) - wanted).max(initial=0)
        if not error <= slack * np.abs(wanted).max(initial=0):
            # A gradient may be 0 except for rounding, so the slack is relative to the largest of all results.
            own = own or compute_own()
            allowed = np.abs(np.asarray(own[name], np.float64) - wanted).max()
            most = max(np.abs(x).max() for x in expected.values() if x.dtype != bool)
            assert error <= 2 * allowed + slack * most, (name, error, allowed, most, wrapped.form.layer.draws.made)
    return found


@pytest.mark.parametrize("seeds", SEEDS)
def test_random_forms_match_the_reference_with_gradients(seeds):
    refused = {}
    for seed in seeds:
        names = tuple(FORMS)
        wrapped = Wrapped(Form(seed, names[seed % len(names)]))
        try:
            assert_right(wrapped)
        except NotFusible as refusal:
            assert re.search(KNOWN_LINES, str(refusal))
            refused[seed] = str(refusal)
    assert len(refused) <= (1 - FEWEST_FUSED) * len(seeds), refused


@pytest.mark.parametrize("name", KERNEL_FORMS)
def test_random_form_kernels_match_the_reference(name):
    wrapped = Wrapped(Form(0, name, is_tiny=True), ())
    assert_right(wrapped, "triton")


@pytest.mark.parametrize("seed", DROPOUT_SEEDS)
def test_dropout_depends_on_the_key_alone(seed):
    """Kernels, XLA, checkpointed layers and layers that do not return the mask draw the same bits."""
    form = Form(seed, "dropped", is_tiny=True)
    wrapped, again = Wrapped(form, ()), Wrapped(form, ("checkpoint",))
    given = wrapped.operands()
    found, by_kernels = assert_right(wrapped, "xla"), assert_right(wrapped, "triton")
    (mask,) = (name for name, x in found.items() if x.dtype == bool)
    np.testing.assert_array_equal(found[mask], by_kernels[mask])
    np.testing.assert_array_equal(found[mask], assert_right(again, "xla")[mask])
    form.is_returned = False
    (alone,) = jax.jit(fuse(form, implementation="xla"))(given)
    whole, slack = np.asarray(found["result 0"], np.float64), SLACK[form.layer.dtypes.split()[0]]
    np.testing.assert_allclose(np.asarray(alone, np.float64), whole, rtol=0, atol=slack * np.abs(whole).max())
