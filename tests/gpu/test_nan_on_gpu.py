"""NaN on a GPU: kernels return NaN exactly where XLA and the reference do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import block_diagonal_attention, fuse, moba_attention
from blockdiag.fusion.lowering import streamed_schedule
from tests.fusion.fusion_support import with_gradients
from tests.fusion.resident_cases import CASES as RESIDENT
from tests.fusion.resident_cases import rows_of_heads
from tests.fusion.streamed_cases import CASES as STREAMED
from tests.fusion.thresholds import lifted
from tests.ops.nan_support import FUNCTIONS, ROWS, assert_same_nan, attention, operands
from tests.ops.test_nan_rows import OPERATIONS, results_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fuse_with_nan_in_scores_gives_nan_where_xla_does(name, dtype):
    function = attention(FUNCTIONS[name])
    given = operands(dtype)
    found = with_gradients(jax.jit(fuse(function, implementation="triton")), given)
    # Kernels compute scores in float32. In 16 bits or with tf32 products, other scores would be 0 or at a bound.
    with jax.default_matmul_precision("highest"):
        expected = with_gradients(jax.jit(function), [x.astype(jnp.float32) for x in given])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(np.asarray(one, np.float32)), np.isnan(np.asarray(other, np.float32)))
    if dtype == "float32":
        assert_same_nan(found, expected, 1e-3)


def test_relu_of_nan_scores_makes_their_rows_nan():
    function = attention(jax.nn.relu)
    output = np.asarray(jax.jit(fuse(function, implementation="triton"))(*operands()))
    assert np.isnan(output[list(ROWS)]).all() and np.isnan(output).sum() == output[list(ROWS)].size


def assert_same_nan_of_rows(function, inputs):
    """Assert that results and query gradients have NaN where plain code does, and return the number of NaN results."""

    def computed(function):
        others = {name: x for name, x in inputs.items() if name != "query"}
        output, pull = jax.vjp(jax.jit(lambda query: function(query=query, **others)), inputs["query"])
        return [np.asarray(x, np.float32) for x in (output, *pull(jnp.ones_like(output)))]

    found, expected = computed(fuse(function, implementation="triton")), computed(function)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    return np.isnan(expected[0]).sum()


def test_streamed_kernel_with_nan_in_a_query_gives_nan_where_xla_does():
    case = STREAMED["clipped"]
    inputs = case.inputs()
    inputs["query"] = inputs["query"].at[0, 5, 0, 3].set(jnp.nan)
    with lifted(streamed_schedule):
        assert assert_same_nan_of_rows(case.function, inputs) == inputs["value"].shape[-1]


def test_resident_kernels_with_nan_in_a_bias_give_nan_where_xla_does():
    inputs = RESIDENT["bent"].inputs()
    inputs["pair"] = inputs["pair"].at[0, 0, 1, 7, 4].set(jnp.nan)

    def clipped(query, key, value, mask, pair):
        return rows_of_heads(query, key, value, jnp.clip(mask, -1, 1), jax.nn.relu(pair))

    assert assert_same_nan_of_rows(clipped, inputs) == inputs["query"].shape[1] * inputs["value"].shape[-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_with_one_nan_makes_the_rows_of_the_reference_nan(name, dtype):
    operation = OPERATIONS[name]
    generator = np.random.default_rng(0)
    clean = [jnp.asarray(generator.normal(size=shape), dtype) for shape in operation.shapes]
    if name == "moba_paged":
        clean[-1] = clean[-1].astype(jnp.float32)  # mean keys
    for operand, index in operation.poisons:
        given = list(clean)
        given[operand] = given[operand].at[index].set(jnp.nan)
        expected = results_of(operation, given, "reference")
        assert np.isnan(np.asarray(expected[0], np.float32)).any()
        for one, other in zip(results_of(operation, given, "triton"), expected, strict=True):
            assert_differ_in_hidden_rows_only(one, other, operation.block_size, operand, index[0])


def assert_differ_in_hidden_rows_only(one, other, block_size, operand, row):
    """Assert that NaN differs only in rows that are hidden from each other within a causal block."""
    one, other = (np.isnan(np.asarray(x, np.float32)) for x in (one, other))
    rows = np.argwhere(one != other)[:, 0]
    is_hidden = rows // max(block_size, 1) == row // max(block_size, 1)
    is_hidden &= (rows < row) if operand else (rows > row)
    assert is_hidden.all(), (operand, row, rows)


# Hopper has separate kernels for these shapes.
@pytest.mark.parametrize("implementation", ["triton", "pallas"])
@pytest.mark.parametrize("operand", range(3))
def test_wide_block_diagonal_with_one_nan_makes_the_rows_of_the_reference_nan(operand, implementation):
    if implementation == "pallas" and jax.local_devices()[0].compute_capability != "9.0":
        pytest.skip("pallas is for Hopper")
    generator = np.random.default_rng(0)
    given = [jnp.asarray(generator.normal(size=(512, heads, 64)), "bfloat16") for heads in (4, 2, 2)]
    given[operand] = given[operand].at[100, 1, 3].set(jnp.nan)

    def compute(implementation):
        return with_gradients(lambda *x: block_diagonal_attention(*x, implementation=implementation), given)

    for one, other in zip(compute(implementation), compute("reference"), strict=True):
        assert_differ_in_hidden_rows_only(one, other, 0, operand, 100)


@pytest.mark.parametrize("operand", range(3))
def test_wide_moba_with_one_nan_makes_the_rows_of_the_reference_nan(operand):
    generator = np.random.default_rng(0)
    given = [jnp.asarray(generator.normal(size=(1024, heads, 64)), "bfloat16") for heads in (4, 2, 2)]
    given[operand] = given[operand].at[100, 1, 3].set(jnp.nan)

    def compute(implementation):
        options = dict(block_size=64, top_k=3, return_residual=True, implementation=implementation)
        results, pull = jax.vjp(lambda *x: moba_attention(*x, **options), *given)
        return [*results, *pull(jax.tree.map(jnp.ones_like, results))]

    found, expected = compute("triton"), compute("reference")
    # A query with NaN may turn keys of its block that it does not see into NaN, because a product has 0 * NaN.
    blocks = np.unique(np.argwhere(np.isnan(np.asarray(expected[0], np.float32)))[:, 0] // 64)
    for one, other in zip(found, expected, strict=True):
        one, other = (np.isnan(np.asarray(x, np.float32)) for x in (one, other))
        assert not (other & ~one).any()
        assert np.isin(np.argwhere(one & ~other)[:, 0] // 64, blocks).all()


@pytest.mark.parametrize("is_jitted", [False, True])
def test_checkpoint_of_pallas_changes_no_gradient(is_jitted):
    if jax.local_devices()[0].compute_capability != "9.0":
        pytest.skip("pallas is for Hopper")
    generator = np.random.default_rng(0)
    given = [jnp.asarray(generator.normal(size=(256, heads, 64)), "bfloat16") for heads in (4, 2, 2)]

    def loss(*x):
        return jnp.sum(block_diagonal_attention(*x, implementation="pallas").astype(jnp.float32) ** 2)

    found = jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))
    expected = jax.grad(loss, argnums=(0, 1, 2))(*given)
    for one, other in zip((jax.jit(found) if is_jitted else found)(*given), expected, strict=True):
        np.testing.assert_array_equal(one, other)
