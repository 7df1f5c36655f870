"""Quick checks of every operation, which `./do test-newest` and `./do test-oldest` run with other versions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from blockdiag import (
    append_to_pages,
    block_diagonal_attention,
    fuse,
    key_convolution,
    moba_attention,
    moba_paged_attention,
    paged_attention,
)
from blockdiag.interop import compile_target
from blockdiag.triton_kernels.append.plans import AppendLaunch
from blockdiag.triton_kernels.key_convolution.plans import KeyConvolutionLaunch
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.moba_paged.plans import steps
from tests.fusion.codegen import test_plans as test_fusion_plans
from tests.triton_kernels import (
    test_append_plans,
    test_key_convolution_plans,
    test_moba_paged_plans,
    test_moba_plans,
    test_paged_plans,
)
from tests.triton_kernels.plans_support import report_of

pytestmark = pytest.mark.versions

BATCH, TOKENS, HEADS, KEY_HEADS, HEAD_DIM, BLOCK, PAGE = 2, 48, 4, 2, 16, 16, 8
PAGES = BATCH * TOKENS // PAGE


def launches(op):
    """Return the launches of a typical call of an operation, forward and backward."""
    if op == "moba":
        return test_moba_plans.launches(test_moba_plans.BASE)
    if op == "paged":
        return test_paged_plans.launches(test_paged_plans.BASE)
    if op == "moba_paged":
        return steps(test_moba_paged_plans.BASE)
    if op == "append":
        return [AppendLaunch(test_append_plans.PROBLEMS["decode"])]
    if op == "key_convolution":
        kinds = test_key_convolution_plans.KINDS
        return [KeyConvolutionLaunch(test_key_convolution_plans.PROBLEMS["size 3"], kind) for kind in kinds]
    return test_fusion_plans.launches("document").values()


OPS = ("block_diagonal", "moba", "paged", "moba_paged", "append", "key_convolution", "fuse")


@pytest.mark.every_case
@pytest.mark.parametrize("op", OPS[1:])
def test_kernels_of_an_operation_compile_for_consumer_gpus(op):
    """The tests of launch plans cover other architectures; there, the same calls have the marker `versions`."""
    for launch in launches(op):
        report = report_of(launch.plan(Target.for_arch(120)), 120)
        assert report.shared_bytes <= report.shared_limit
        assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def attention_operands():
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [random(BATCH, TOKENS, count, HEAD_DIM, seed=seed) for seed, count in enumerate(heads)]


def cache():
    """Return pages of keys and values, a shuffled page table, and the lengths."""
    table = np.random.default_rng(5).permutation(PAGES).reshape(BATCH, -1).astype(np.int32)
    pages = [random(PAGES, PAGE, KEY_HEADS, HEAD_DIM, seed=seed) for seed in (3, 4)]
    return *pages, jnp.asarray(table), jnp.asarray([TOKENS - 3, 20], jnp.int32)


def windowed(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None]
    scores = jnp.where(((distance >= 0) & (distance < 20))[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def call(op):
    """Return a function with the option `implementation`, its operands, and whether it has gradients."""
    query, key, value = attention_operands()
    if op == "block_diagonal":
        return functools.partial(block_diagonal_attention, block_size=BLOCK, is_causal=True), [query, key, value], True
    if op == "moba":
        return functools.partial(moba_attention, block_size=BLOCK, top_k=2), [query, key, value], True
    if op == "paged":
        return paged_attention, [query[:, :1], *cache()], False
    if op == "moba_paged":
        centroids = random(BATCH, TOKENS // BLOCK, KEY_HEADS, HEAD_DIM, seed=6)
        function = functools.partial(moba_paged_attention, block_size=BLOCK, top_k=2)
        return function, [query[:, :1], *cache(), centroids], False
    if op == "append":
        return append_to_pages, [key[:, :2], value[:, :2], *cache()], False
    if op == "key_convolution":
        return key_convolution, [key, random(3, KEY_HEADS, HEAD_DIM, seed=7)], True

    def fused(*arrays, implementation):
        return fuse(windowed, implementation=implementation)(*arrays)

    return fused, [query, query, query + 1], True


def results(op, implementation):
    """Return a jitted function and its operands; the function returns the results and any gradients."""
    function, arrays, is_differentiable = call(op)
    function = functools.partial(function, implementation=implementation)
    if not is_differentiable:
        return jax.jit(function), arrays

    def loss(*arrays):
        output = function(*arrays)
        return jnp.sum(jnp.sin(output)), output

    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)), arrays


@pytest.mark.parametrize("op", OPS)
def test_operation_lowers_for_cuda_with_its_gradient(op):
    function, arrays = results(op, "triton")
    with compile_target(90):
        text = function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @triton_kernel_call_ffi" in text


@pytest.mark.parametrize("op", OPS)
def test_interpreted_kernels_match_xla(op):
    found, expected = (function(*arrays) for function, arrays in (results(op, "triton"), results(op, "xla")))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_fused_function_matches_the_function_with_gradients():
    function, arrays = results("fuse", "xla")
    (total, _), gradients = function(*arrays)
    plain = jax.value_and_grad(lambda *arrays: jnp.sum(jnp.sin(windowed(*arrays))), argnums=(0, 1, 2))
    expected_total, expected = plain(*arrays)
    for one, other in zip((total, *gradients), (expected_total, *expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
