"""Functions that are fused although no softmax of scores appears in one place, on a GPU.

The functions are those of the CPU tests:

- weights divided by their own sums
- grids of pixels
- single queries
- guarded softmaxes
- weights beside softmaxes
- products written as sums
- operations that kernels spell out

They run in bfloat16, or in float32 if the comparison needs its precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from tests.fusion.fusion_support import assert_alike, assert_as_good_as_written, with_gradients
from tests.fusion.lowering import test_decompositions
from tests.fusion.passes import (
    test_canonicalise_products,
    test_defer_division,
    test_index_maps,
    test_late_division,
    test_merge_sources,
    test_query_axis,
)
from tests.fusion.regions import (
    test_beside,
    test_feature_sums,
    test_grids,
    test_log_sum_exps,
    test_nested_programs,
    test_softmaxes,
)
from tests.fusion.resident_cases import CASES as RESIDENT

pytestmark = pytest.mark.gpu

FORMS = {
    f"{module.__name__.rpartition('.test_')[2]}-{function.__name__}": (module, function)
    for module in (test_defer_division, test_grids, test_query_axis)
    for function in module.CASES
}
# By default, XLA's float32 products keep ten bits, which would also affect the expected results.
exactly = jax.default_matmul_precision("highest")


def check(module, name, dtype):
    """Check a function of the CPU tests on three operands and its other arrays."""
    function, *shapes = module.FUNCTIONS[name]
    given = [x.astype(dtype) for x in module.arrays(*[module.OPERAND] * 3, *shapes)]
    fused = fuse(function, implementation="triton")
    with exactly, jax.numpy_dtype_promotion("standard"):
        if dtype == "float32":
            assert_alike(with_gradients(fused, given), with_gradients(function, given))
        else:
            assert_as_good_as_written(function, fused, given)


@pytest.mark.parametrize("name", FORMS)
def test_fused_forms_in_bfloat16_are_accurate(name):
    module, function = FORMS[name]
    given = [array.astype(jnp.bfloat16) for array in module.arrays(function)]
    # Some functions have float32 constants.
    with exactly, jax.numpy_dtype_promotion("standard"):
        assert_as_good_as_written(function, fuse(function, implementation="triton"), given)


@pytest.mark.parametrize("name", test_softmaxes.GUARDED)
def test_guarded_fully_masked_rows_are_zero(name):
    generator = np.random.default_rng(0)
    given = [jnp.asarray(generator.normal(size=(2, 20, 2, 16)), jnp.float32) for _ in range(3)]
    function = test_softmaxes.attention_of(test_softmaxes.GUARDED[name])
    with exactly:
        found, expected = (with_gradients(x, given) for x in (fuse(function, implementation="triton"), function))
    assert_alike(found, expected)
    assert not np.any(found[0][:, 2])


@pytest.mark.parametrize("name", test_decompositions.BIASES)
def test_decompositions_in_kernels_match_the_reference(name):
    with exactly:
        test_decompositions.test_decompositions_in_kernels_match_the_reference(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", test_canonicalise_products.FUNCTIONS)
def test_canonicalised_products_match_the_reference(name, dtype):
    check(test_canonicalise_products, name, dtype)


@pytest.mark.parametrize("powers", test_late_division.POWERS)
def test_late_division_kernels_match_the_reference(powers):
    with exactly:
        test_late_division.test_guarded_softmax_kernels_match_the_reference(powers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", test_log_sum_exps.FUNCTIONS)
def test_log_sum_exps_match_the_reference(name, dtype):
    check(test_log_sum_exps, name, dtype)


@pytest.mark.parametrize("name", ["evoformer", "wide"])
def test_log_sum_exps_with_a_resident_bias_are_accurate(name):
    """The forward kernel keeps the bias. In the backward pass, other kernels replace the joint one."""
    shapes = RESIDENT[name].shapes

    def function(query, key, value, mask, pair):
        scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5 + mask + pair
        output = jnp.einsum("brnts,brsnh->brtnh", jax.nn.softmax(scores, axis=-1), value)
        return output * jax.nn.sigmoid(jax.nn.logsumexp(scores, -1)).mT[..., None].astype(output.dtype)

    given = list(RESIDENT[name].inputs().values())
    assert set(shapes) == {"query", "key", "value", "mask", "pair"}
    with exactly:
        assert_as_good_as_written(function, fuse(function, implementation="triton"), given)


@pytest.mark.parametrize("name", test_merge_sources.FUNCTIONS)
def test_merged_sources_match_the_reference(name):
    function, given = test_merge_sources.given_for(name)
    with exactly:
        found, expected = (with_gradients(x, given) for x in (fuse(function, implementation="triton"), function))
    assert_alike(found, expected, 1e-4)


@pytest.mark.parametrize("name", test_index_maps.MASKS)
def test_position_masks_match_the_reference(name):
    function = test_index_maps.masked(test_index_maps.MASKS[name])
    given = test_index_maps.arrays(*[test_index_maps.OPERAND] * 3)
    with exactly:
        found, expected = (with_gradients(x, given) for x in (fuse(function, implementation="triton"), function))
    assert_alike(found, expected)


@pytest.mark.parametrize("name", test_index_maps.GIVEN)
def test_masks_of_traced_arguments_match_the_reference(name):
    make, argument = test_index_maps.GIVEN[name]
    function = test_index_maps.masked(make)
    given = [*test_index_maps.arrays(*[test_index_maps.OPERAND] * 3), argument]
    with exactly:
        assert_alike([fuse(function, implementation="triton")(*given)], [function(*given)])


@pytest.mark.parametrize("name", test_beside.FUNCTIONS)
def test_operands_from_other_scores_match_the_reference(name):
    with exactly:
        test_beside.test_operands_from_other_scores_match_the_reference_with_gradients(name, "triton")


@pytest.mark.parametrize("name", test_canonicalise_products.BY_SUMS)
def test_queries_without_an_axis_and_scores_by_sums_match_the_reference(name):
    with exactly:
        test_canonicalise_products.test_queries_without_an_axis_and_scores_by_sums_match_the_reference(name, "triton")


@pytest.mark.parametrize("name", test_nested_programs.FUNCTIONS)
def test_nested_attention_matches_the_reference(name):
    with exactly:
        test_nested_programs.test_nested_attention_matches_the_reference_with_gradients(name, "triton")


@pytest.mark.parametrize("name", test_feature_sums.FORMS)
def test_feature_sums_match_the_reference(name):
    with exactly:
        test_feature_sums.test_feature_sums_match_the_reference_with_gradients(name, "triton")


@pytest.mark.parametrize("name", ["additive", "graph_attention", "several_outputs", "beside_product"])
def test_feature_sums_in_bfloat16_are_accurate(name):
    """There are more features than rows in a tile, and tokens are in several tiles."""
    function = test_feature_sums.FORMS[name]
    shapes = ((2, 150, 96), (2, 133, 96), (2, 133, 96), (96,))
    given = [x.astype(jnp.bfloat16) for x in test_feature_sums.arrays(*shapes)]
    with exactly, jax.numpy_dtype_promotion("standard"):
        assert_as_good_as_written(function, fuse(function, implementation="triton"), given)
