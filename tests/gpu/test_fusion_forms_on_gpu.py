"""Functions that are fused though they spell no softmax of scores in one place, on a GPU.

Weights divided by their own sums, grids of pixels, single queries, guarded softmaxes, weights beside softmaxes,
products that are written as sums, and operations that kernels spell out: the functions of the CPU's tests, here in
bfloat16, or in float32 where the comparison wants its digits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from tests.fusion.fusion_support import assert_alike, assert_as_good_as_written, with_gradients
from tests.fusion.lowering import test_decompositions as test_fusion_spelled
from tests.fusion.passes import test_canonicalise_products as test_fusion_respelled
from tests.fusion.passes import test_defer_division as test_fusion_sums
from tests.fusion.passes import test_index_maps as test_fusion_coordinates
from tests.fusion.passes import test_late_division as test_fusion_late_division
from tests.fusion.passes import test_merge_sources as test_fusion_sources
from tests.fusion.passes import test_query_axis as test_fusion_lone
from tests.fusion.regions import test_beside as test_fusion_beside
from tests.fusion.regions import test_feature_sums as test_fusion_features
from tests.fusion.regions import test_grids as test_fusion_grids
from tests.fusion.regions import test_log_sum_exps as test_fusion_log_sums
from tests.fusion.regions import test_nested_programs as test_fusion_inner
from tests.fusion.regions import test_softmaxes as test_fusion_softmaxes
from tests.fusion.resident_cases import CASES as RESIDENT

pytestmark = pytest.mark.gpu

FORMS = {
    f"{module.__name__.rpartition('.test_')[2]}-{function.__name__}": (module, function)
    for module in (test_fusion_sums, test_fusion_grids, test_fusion_lone)
    for function in module.CASES
}
# XLA's products of float32 keep ten bits otherwise, and with them what is compared with.
exactly = jax.default_matmul_precision("highest")


def check(module, name, dtype):
    """A function of the CPU's tests, of three operands and what else it takes."""
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
    # Some have constants of float32.
    with exactly, jax.numpy_dtype_promotion("standard"):
        assert_as_good_as_written(function, fuse(function, implementation="triton"), given)


@pytest.mark.parametrize("name", test_fusion_softmaxes.GUARDED)
def test_guarded_fully_masked_rows_are_zero(name):
    generator = np.random.default_rng(0)
    given = [jnp.asarray(generator.normal(size=(2, 20, 2, 16)), jnp.float32) for _ in range(3)]
    function = test_fusion_softmaxes.attention_of(test_fusion_softmaxes.GUARDED[name])
    with exactly:
        found, expected = (with_gradients(x, given) for x in (fuse(function, implementation="triton"), function))
    assert_alike(found, expected)
    assert not np.any(found[0][:, 2])


@pytest.mark.parametrize("name", test_fusion_spelled.BIASES)
def test_decompositions_in_kernels_match_the_reference(name):
    with exactly:
        test_fusion_spelled.test_decompositions_in_kernels_match_the_reference(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", test_fusion_respelled.FUNCTIONS)
def test_canonicalised_products_match_the_reference(name, dtype):
    check(test_fusion_respelled, name, dtype)


@pytest.mark.parametrize("powers", test_fusion_late_division.POWERS)
def test_late_division_kernels_match_the_reference(powers):
    with exactly:
        test_fusion_late_division.test_guarded_softmax_kernels_match_the_reference(powers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", test_fusion_log_sums.FUNCTIONS)
def test_log_sum_exps_match_the_reference(name, dtype):
    check(test_fusion_log_sums, name, dtype)


@pytest.mark.parametrize("name", ["evoformer", "wide"])
def test_log_sum_exps_with_a_resident_bias_are_accurate(name):
    """The forward kernel keeps it; of the backward ones the joint one gives way."""
    shapes = RESIDENT[name].shapes

    def function(query, key, value, mask, pair):
        scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5 + mask + pair
        output = jnp.einsum("brnts,brsnh->brtnh", jax.nn.softmax(scores, axis=-1), value)
        return output * jax.nn.sigmoid(jax.nn.logsumexp(scores, -1)).mT[..., None].astype(output.dtype)

    given = list(RESIDENT[name].inputs().values())
    assert set(shapes) == {"query", "key", "value", "mask", "pair"}
    with exactly:
        assert_as_good_as_written(function, fuse(function, implementation="triton"), given)


@pytest.mark.parametrize("name", test_fusion_sources.FUNCTIONS)
def test_merged_sources_match_the_reference(name):
    function, given = test_fusion_sources.given_for(name)
    with exactly:
        found, expected = (with_gradients(x, given) for x in (fuse(function, implementation="triton"), function))
    assert_alike(found, expected, 1e-4)


@pytest.mark.parametrize("name", test_fusion_coordinates.MASKS)
def test_position_masks_match_the_reference(name):
    function = test_fusion_coordinates.masked(test_fusion_coordinates.MASKS[name])
    given = test_fusion_coordinates.arrays(*[test_fusion_coordinates.OPERAND] * 3)
    with exactly:
        found, expected = (with_gradients(x, given) for x in (fuse(function, implementation="triton"), function))
    assert_alike(found, expected)


@pytest.mark.parametrize("name", test_fusion_coordinates.GIVEN)
def test_masks_of_traced_arguments_match_the_reference(name):
    make, argument = test_fusion_coordinates.GIVEN[name]
    function = test_fusion_coordinates.masked(make)
    given = [*test_fusion_coordinates.arrays(*[test_fusion_coordinates.OPERAND] * 3), argument]
    with exactly:
        assert_alike([fuse(function, implementation="triton")(*given)], [function(*given)])


@pytest.mark.parametrize("name", test_fusion_beside.FUNCTIONS)
def test_operands_from_other_scores_match_the_reference(name):
    with exactly:
        test_fusion_beside.test_operands_from_other_scores_match_the_reference_with_gradients(name, "triton")


@pytest.mark.parametrize("name", test_fusion_respelled.BY_SUMS)
def test_queries_without_an_axis_and_scores_by_sums_match_the_reference(name):
    with exactly:
        test_fusion_respelled.test_queries_without_an_axis_and_scores_by_sums_match_the_reference(name, "triton")


@pytest.mark.parametrize("name", test_fusion_inner.FUNCTIONS)
def test_nested_attention_matches_the_reference(name):
    with exactly:
        test_fusion_inner.test_nested_attention_matches_the_reference_with_gradients(name, "triton")


@pytest.mark.parametrize("name", test_fusion_features.FORMS)
def test_feature_sums_match_the_reference(name):
    with exactly:
        test_fusion_features.test_feature_sums_match_the_reference_with_gradients(name, "triton")


@pytest.mark.parametrize("name", ["additive", "graph_attention", "several_outputs", "beside_product"])
def test_feature_sums_in_bfloat16_are_accurate(name):
    """More of them than rows of a tile, and tokens in several tiles."""
    function = test_fusion_features.FORMS[name]
    shapes = ((2, 150, 96), (2, 133, 96), (2, 133, 96), (96,))
    given = [x.astype(jnp.bfloat16) for x in test_fusion_features.arrays(*shapes)]
    with exactly, jax.numpy_dtype_promotion("standard"):
        assert_as_good_as_written(function, fuse(function, implementation="triton"), given)
