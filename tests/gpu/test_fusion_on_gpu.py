"""Fused kernels on a GPU: every variant of the gallery in bfloat16, compared with float64 and repeated."""

import jax
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.gallery import VARIANTS, Sizes
from tests.fusion.test_gallery import check, operands, promotion, value_and_gradients
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory

pytestmark = pytest.mark.gpu

SIZES = Sizes(rows=2, query_tokens=200, key_tokens=200, head_dim=64, value_dim=64, dtype="bfloat16")


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_accurate_with_gradients(name):
    check(name, SIZES, "triton")


@pytest.mark.parametrize("name", ["causal", "evoformer_row", "sinks_concatenated"])
def test_fused_kernels_repeat_bitwise(name):
    variant = VARIANTS[name]
    run = jax.jit(value_and_gradients(variant, fuse(variant.function, implementation="triton")))
    results = []
    for _ in range(2):
        poison_free_memory()
        with promotion(name):
            results.append({key: np.asarray(x, np.float32) for key, x in run(*operands(name, SIZES)).items()})
    for key, first in results[0].items():
        np.testing.assert_array_equal(first, results[1][key])
