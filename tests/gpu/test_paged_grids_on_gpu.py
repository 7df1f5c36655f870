"""The grids of other projects' tests of paged attention, with the kernels on a GPU."""

import pytest

from tests.ops.paged.test_foreign_grids import (
    FLASH_CASES,
    FLASH_LONG,
    JAX_CASES,
    JAX_ROUNDED,
    ROUNDING,
    VLLM_CASES,
    check_flash_case,
    check_jax_case,
    check_vllm_case,
    named,
    rounded_error,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("values", named([*JAX_CASES, *JAX_ROUNDED]))
def test_jax_grid_is_accurate(values):
    check_jax_case(values, "triton")


@pytest.mark.parametrize("values", named(JAX_ROUNDED))
def test_jax_grid_of_caches_that_append_rounds_is_near_the_unrounded_attention(values):
    assert rounded_error(values, "triton") < ROUNDING[values["cache"]]


# Other heads than multiples of 8 have no kernel.
@pytest.mark.parametrize("values", named([x for x in (*FLASH_CASES, *FLASH_LONG) if x["head_dim"] % 8 == 0]))
def test_flash_grid_is_accurate(values):
    check_flash_case(values, "triton")


@pytest.mark.parametrize("values", named(VLLM_CASES))
def test_vllm_grid_is_accurate(values):
    check_vllm_case(values, "triton")
