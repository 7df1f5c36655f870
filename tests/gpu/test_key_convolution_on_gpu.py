"""Key convolution on a GPU: accuracy, NaN poison and bitwise equality of JAX and torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import key_convolution
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory
from tests.ops.key_convolution_support import ConvolutionCase, assert_accurate, exact_convolution
from tests.support import value_and_gradients

pytestmark = pytest.mark.gpu

LENGTHS = (64, 1, 0, 130, 3, 127, 129, 320)
HEADS = {"key_heads": 4, "head_dim": 128, "dtype": "bfloat16"}
CASES = {
    "size 3": ConvolutionCase(lengths=(300, 300), **HEADS),
    "size 5, packed": ConvolutionCase(lengths=LENGTHS, layout="offsets", padding=70, size=5, **HEADS),
    "size 5, packed, weights float32": ConvolutionCase(
        lengths=LENGTHS, layout="offsets", size=5, weights_dtype="float32", **HEADS
    ),
    "size 8, no residual": ConvolutionCase(lengths=(300,), size=8, residual=False, **HEADS),
    "size 8, float32, packed": ConvolutionCase(
        lengths=LENGTHS, layout="offsets", padding=9, size=8, key_heads=2, head_dim=128
    ),
    "size 1, nothing but the sum": ConvolutionCase(
        lengths=(50, 50), size=1, activation=None, residual=False, dtype="float16"
    ),
    "size 2, odd channels": ConvolutionCase(lengths=(200,), size=2, key_heads=3, head_dim=7, dtype="bfloat16"),
    "short sequences": ConvolutionCase(lengths=(5,) * 40, size=4, key_heads=1, head_dim=264, dtype="float16"),
}


@functools.cache
def compiled(case):
    return jax.jit(functools.partial(value_and_gradients, case.convolve("triton")))


def run(case, operands):
    return compiled(case)(*operands)


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_accurate_and_repeatable(name):
    case = CASES[name]
    operands = case.operands()
    results = []
    for _ in range(2):
        poison_free_memory()
        results.append(run(case, operands))
    assert_accurate(results[0], exact_convolution(case, operands), operands)
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_nan_stays_in_its_sequence():
    case = CASES["size 5, packed"]
    key, weights, cotangent = case.operands()
    rows = np.zeros(case.tokens, bool)
    rows[65:195] = True  # the sequence of 130 tokens
    rows[-case.padding :] = True
    dirty_key, dirty_cotangent = (jnp.where(rows[:, None, None], jnp.nan, x) for x in (key, cotangent))
    clean, dirty = run(case, (key, weights, cotangent)), run(case, (dirty_key, weights, dirty_cotangent))
    for before, after in zip(clean[:2], dirty[:2], strict=True):
        before, after = np.asarray(before), np.asarray(after)
        np.testing.assert_array_equal(after[~rows], before[~rows])
        assert not after[-case.padding :].any()


@pytest.mark.parametrize("packed", [False, True])
def test_many_tiles_agree_with_array_code(packed):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (40_000, 16, 128) if packed else (5, 8191, 16, 128)
    key, cotangent = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:2])
    weights = jax.random.normal(keys[2], (5, 16, 128), jnp.float32)
    options = {"sequence_offsets": jnp.asarray([0, 11_111, 11_112, 39_000], jnp.int32)} if packed else {}
    poison_free_memory()
    results = {}
    for name in ("triton", "xla"):
        convolve = functools.partial(key_convolution, implementation=name, **options)
        results[name] = jax.jit(functools.partial(value_and_gradients, convolve))(key, weights, cotangent)
    for actual, expected, tolerance in zip(results["triton"], results["xla"], (4e-3, 4e-3, 1e-5), strict=True):
        actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
        assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["size 3", "size 5, packed", "size 8, float32, packed"])
def test_torch_and_jax_agree_bitwise(name):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    from blockdiag import torch as blockdiag_torch
    from tests.torch import torch_support

    case = CASES[name]
    operands = case.operands()
    options = dict(case.options)
    if "sequence_offsets" in options:
        options["sequence_offsets"] = torch_support.to_tensor(options["sequence_offsets"], "cuda:0")
    tensors = [torch_support.to_tensor(x, "cuda:0") for x in operands]
    for via in (None, "jax"):
        function = functools.partial(blockdiag_torch.key_convolution, via=via, **options)
        results = torch_support.value_and_gradients(function, *tensors)
        assert all(x.is_cuda for x in results)
        torch_support.assert_same_bits(results, run(case, operands))


def test_cuda_graph_replay_equals_the_eager_call():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    from blockdiag import torch as blockdiag_torch
    from tests.torch import torch_support

    key, weights, _ = (torch_support.to_tensor(x, "cuda:0") for x in CASES["size 3"].operands())
    offsets = torch.tensor([0, 7, 250], dtype=torch.int32, device="cuda:0")
    key = key[0].contiguous()

    def convolve():
        return blockdiag_torch.key_convolution(key, weights, sequence_offsets=offsets)

    expected = convolve()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = convolve()
    output.zero_()
    graph.replay()
    torch_support.assert_same_bits([output], [expected])
