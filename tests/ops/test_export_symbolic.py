"""Every operation exported for a symbolic batch, or number of sequences, and called with two of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from blockdiag import NotFusible
from blockdiag.interop import compile_target
from tests.ops.op_calls import CALLS, expected_results, mark_covered, pairs

KERNELS = frozenset({"triton", "pallas"})


def symbol(*constraints):
    (size,) = export.symbolic_shape("b", constraints=constraints)
    return size


def exported_call(call, function, size):
    return export.export(jax.jit(function))(**call.types(size))


def assert_agrees(exported, name, size, *, is_gradient=False):
    found = exported.call(**CALLS[name].arrays(size, seed=size))
    expected = expected_results(name, size, size, is_gradient=is_gradient)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        largest = np.abs(np.where(np.isfinite(other), other, 0)).max()
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)


def is_exported(name, implementation):
    return implementation not in KERNELS and not (name.startswith("fuse") and implementation is not None)


@pytest.mark.parametrize(("name", "implementation"), mark_covered(x for x in pairs() if is_exported(*x)))
def test_export_with_a_symbolic_batch_matches_the_operation(name, implementation):
    call = CALLS[name]
    exported = exported_call(call, call.bound(implementation), symbol())
    for size in (1, 3) if implementation is None else (3,):
        assert_agrees(exported, name, size)


# The operands of a variant do not change how bounds of a symbol are used.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if "," in name else []) for name in CALLS]
)
def test_export_with_a_bounded_batch_matches_the_operation(name):
    call = CALLS[name]
    assert_agrees(exported_call(call, call.bound(None), symbol("b<=1024")), name, 3)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if "," in name else [])
        for name, call in CALLS.items()
        if call.differentiated
    ],
)
def test_export_of_gradients_with_a_symbolic_batch_matches_the_operation(name):
    call = CALLS[name]
    assert_agrees(exported_call(call, call.gradients(None), symbol()), name, 3, is_gradient=True)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "triton" in call.implementations])
def test_export_of_kernels_with_a_symbolic_batch_raises_with_a_remedy(name):
    call = CALLS[name]
    with pytest.raises((NotImplementedError, NotFusible), match=r"sizes that are numbers|concrete sizes"):
        exported_call(call, call.bound("triton"), symbol())


@pytest.mark.parametrize("name", ["block_diagonal", "moba", "paged", "append", "key_convolution", "moba_paged"])
def test_export_for_cuda_with_a_symbolic_batch_needs_no_kernel(name):
    call = CALLS[name]
    with compile_target(90):
        exported = export.export(jax.jit(call.bound(None)), platforms=["cuda"])(**call.types(symbol()))
    assert exported.platforms == ("cuda",)


def test_export_of_pallas_with_a_symbolic_batch_raises_not_implemented_error():
    call = CALLS["block_diagonal"]
    with pytest.raises(NotImplementedError, match="export for each size, or with implementation="):
        exported_call(call, call.bound("pallas"), symbol())


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["block_diagonal", "block_diagonal, long blocks", "moba", "key_convolution"])
def test_export_with_symbolic_tokens_matches_the_operation(name, implementation):
    """The exported call has two sequences of any length."""
    call = CALLS[name]
    function = call.bound(implementation)
    (tokens,) = export.symbolic_shape("t")

    def resized(x, count):
        return (2, count, *x.shape[2:]) if x.shape[1:2] == (40,) else x.shape

    arrays = call.arrays(2)
    types = {name: jax.ShapeDtypeStruct(resized(x, tokens), x.dtype) for name, x in arrays.items()}
    exported = export.export(jax.jit(function))(**types)
    for count in (2, 61):
        given = {name: jnp.resize(x, resized(x, count)) for name, x in arrays.items()}
        for one, other in zip(
            jax.tree.leaves(exported.call(**given)), jax.tree.leaves(jax.jit(function)(**given)), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
