"""Dropout in generated kernels on a GPU has the same bits as on a CPU, and gradients use them."""

import jax
import numpy as np
import pytest

from tests.fusion.passes import test_random_bits as dropout

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("function", dropout.FUNCTIONS, ids=lambda function: function.__name__)
def test_dropout_bits_on_a_gpu_equal_those_on_a_cpu(function):
    masks = [dropout.mask_of(function, jax.random.key(5), name) for name in ("triton", "xla")]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = dropout.mask_of(function, jax.random.key(5), "xla")
    for mask in masks:
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("function", (dropout.chosen, dropout.of_all_heads), ids=lambda function: function.__name__)
def test_dropout_gradients_use_the_mask_of_the_forward_pass(function):
    dropout.test_gradients_use_the_mask_of_the_forward_pass(function, "triton")
