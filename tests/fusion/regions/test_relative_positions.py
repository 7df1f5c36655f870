"""Tests of values of queries by keys that depend on q - k alone: they are read by distance, with gradients."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag import explain, fuse
from blockdiag.fusion.analysis.tile_tables import expanded
from blockdiag.fusion.gallery.scores import t5_relative_bias
from blockdiag.fusion.lowering.diagonals import distance_tile
from blockdiag.fusion.passes.position_constants import with_positions
from blockdiag.fusion.program import trace
from blockdiag.fusion.runtime import kernel_choice
from blockdiag.fusion.runtime.block_sparsity import live_tiles
from tests.fusion.fusion_support import alternated
from tests.support import compiled_quickly

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 50, 71, 2, 16
BOTH = pytest.mark.parametrize("implementation", ["xla", "triton"])


def attention(query, key, value, bias, mask=None):
    """Return attention of query [B, T, N, H] with key and value [B, S, N, H] and bias [B or 1, N or 1, T, S]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5 + bias
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def distance(query, key):
    return jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]


def causal_table(query, key, value, table):
    """Return causal attention with a table, which skips tiles along diagonals."""
    apart = distance(query, key)
    bias = table[jnp.clip(apart, 0, len(table) - 1)].transpose(2, 0, 1)[None]
    return attention(query, key, value, bias, (apart >= 0)[None, None])


def without_heads(query, key, value, table):
    """Return attention with a table whose gradient is summed over batch and heads, in parts."""
    return attention(query, key, value, jnp.take(table, distance(query, key) + 90, mode="clip")[None, None])


def of_each_row(query, key, value, table, offset):
    """Return attention with a table [B, rows] and an offset for each batch index, filled outside the table."""
    rows, columns = jnp.arange(query.shape[1])[None, :, None], jnp.arange(key.shape[1])[None, None, :]
    apart = offset[:, None, None] + rows - columns
    bias = jax.vmap(lambda row, index: row.at[index + 60].get(mode="fill", fill_value=-1.0))(table, apart)
    return attention(query, key, value, bias[:, None])


@jax.custom_vjp
def cut(x, least):
    return jnp.where(x > least, x, 0.0)


def _cut_backward(saved, cotangent):
    x, least = saved
    return jnp.where(x > least, cotangent, 0.5 * cotangent), -x * cotangent


cut.defvjp(lambda x, least: (cut(x, least), (x, least)), _cut_backward)


def network(query, key, value, first, second, least):
    """Return attention with a bias from a network of distances that has functions with custom derivatives."""
    apart = distance(query, key).astype(jnp.float32)[..., None]
    hidden = jax.nn.relu(jnp.sign(apart) * jnp.log1p(jnp.abs(apart)) @ first)
    bias = cut(jnp.sin(hidden) @ second, jnp.broadcast_to(least, (*apart.shape[:2], second.shape[1])))
    return attention(query, key, value, jnp.moveaxis(bias, -1, 0)[None])


def soft_network(query, key, value, first, second):
    """Return attention with a network of distances and softplus, whose custom derivative calls softplus itself."""
    apart = distance(query, key).astype(jnp.float32)[..., None]
    bias = jax.nn.log_sigmoid(jax.nn.softplus(apart / 9 @ first) @ second)
    return attention(query, key, value, jnp.moveaxis(bias, -1, 0)[None])


def one_hot(query, key, value, table):
    bias = jax.nn.one_hot(jnp.clip(distance(query, key) + 4, 0, len(table) - 1), len(table)) @ table
    return attention(query, key, value, jnp.moveaxis(bias, -1, 0)[None])


def two_tables(query, key, value, table, factors, offset):
    """Return attention with two tables, in which the first query has position `offset`."""
    apart = (jnp.arange(query.shape[1]) + offset)[:, None] - jnp.arange(key.shape[1])[None, :]
    bias = table[jnp.clip(3 - apart, 0, len(table) - 1)].transpose(2, 0, 1) * factors[jnp.abs(apart)][None]
    return attention(query, key, value, bias[None])


def allowed_distances(query, key, value, table, allowed):
    """Return attention with a mask, `allowed` [T + S - 1], whose dead tiles are known only at run time."""
    apart = distance(query, key)
    bias = table[jnp.clip(apart, 0, len(table) - 1)].transpose(2, 0, 1)[None]
    return attention(query, key, value, bias, allowed[apart + key.shape[1] - 1][None, None])


def of_weights(query, key, value, table):
    """Return attention with sigmoid weights instead of a softmax, with a table in the sigmoid."""
    bias = table[jnp.clip(distance(query, key), 0, len(table) - 1)].transpose(2, 0, 1)[None]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.25 + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.sigmoid(scores), value)


def numpy_indices(query, key, value, table):
    """Return attention with indices and a mask that NumPy makes, which are constants of the program."""
    apart = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])[None, :]
    buckets = np.minimum(np.log2(np.abs(apart) + 1).astype(int), len(table) - 1)
    far = ~((apart > -20) & (apart < 5))
    return attention(query, key, value, table[buckets].transpose(2, 0, 1)[None], far[None, None])


def numpy_bias(query, key, value):
    """Return attention with a bias [N, T, S], a triangular mask and positions that NumPy makes."""
    apart = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])[None, :]
    bias = np.exp(-np.abs(apart) / 9)[None] * np.array([1.0, -2.0])[:, None, None]
    lower = jnp.arange(query.shape[1])[:, None] >= jnp.asarray(3 * np.arange(key.shape[1]) + 4)[None, :]
    causal = np.tril(np.ones(apart.shape, bool))
    bias = jnp.asarray(bias, jnp.float32) + jnp.where(lower, 1.0, 0.0)[None]
    return attention(query, key, value, bias[None], causal[None, None])


def sized(*shape, seed=7):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


TABLE = sized(9, HEADS)
NEAR = jnp.abs(jnp.arange(QUERIES + KEYS - 1) - KEYS + 1) < 9
CASES = {
    "t5": (t5_relative_bias, sized(32, HEADS)),
    "causal": (causal_table, TABLE),
    "without heads": (without_heads, sized(120)),
    "of each row": (of_each_row, sized(BATCH, 101), jnp.array([3, 9])),
    "network": (network, sized(1, 5), sized(5, HEADS), sized(HEADS)[None, None]),
    "soft network": (soft_network, sized(1, 5), sized(5, HEADS)),
    "one hot": (one_hot, TABLE),
    "two tables": (two_tables, TABLE, sized(KEYS), jnp.int32(3)),
    "allowed distances": (allowed_distances, TABLE, NEAR),
    "of weights": (of_weights, TABLE),
    "numpy's indices": (numpy_indices, TABLE),
    "numpy's bias": (numpy_bias,),
}


def operands(dtype=jnp.float32):
    shapes = ((BATCH, QUERIES, HEADS, WIDTH), (BATCH, KEYS, HEADS, WIDTH), (BATCH, KEYS, HEADS, WIDTH))
    return [sized(*shape, seed=seed).astype(dtype) for seed, shape in enumerate(shapes)]


def result_and_gradients(function, *arguments):
    floating = tuple(i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating))

    def loss(*given):
        output = function(*given)
        slopes = jnp.sin(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
        return jnp.sum(slopes * output.astype(jnp.float32)), output

    (_, output), gradients = jax.value_and_grad(loss, floating, has_aux=True)(*arguments)
    return output, *gradients


def roles(function, *arguments):
    """Return the roles of leaves that have both queries and keys."""
    regions = explain(function)(*arguments).regions
    return [leaf.role for region in regions for leaf in region.leaves if leaf.role in ("score", "distance")]


def assert_close(found, expected, error=1e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=error, atol=error * scale)


@functools.cache
def has_only_distances(name):
    """Return whether every leaf with both queries and keys depends on their distance alone, in any implementation."""
    function, *rest = CASES[name]
    return set(roles(function, *operands(), *rest)) == {"distance"}


@functools.cache
def plain(name):
    function, *rest = CASES[name]
    return compiled_quickly(functools.partial(result_and_gradients, function))(*operands(), *rest)


@pytest.mark.parametrize(("name", "implementation"), alternated(CASES))
def test_relative_biases_match_the_reference_with_gradients(name, implementation):
    function, *rest = CASES[name]
    given = [*operands(), *rest]
    assert has_only_distances(name)
    found = compiled_quickly(functools.partial(result_and_gradients, fuse(function, implementation=implementation)))(
        *given
    )
    assert_close(found, plain(name))


@BOTH
def test_relative_biases_in_bfloat16_are_accurate(implementation):
    """Biases are as exact as the table; their gradients are rounded by distance and summed in float32."""
    given = [*operands(jnp.bfloat16), TABLE.astype(jnp.bfloat16)]
    fused = fuse(causal_table, implementation=implementation)
    found = compiled_quickly(functools.partial(result_and_gradients, fused))(*given)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 5
    wide = [x.astype(jnp.float32) for x in given]
    assert_close(found, compiled_quickly(functools.partial(result_and_gradients, causal_table))(*wide), error=2e-2)


@BOTH
def test_relative_biases_under_vmap_over_tables_match_the_reference(implementation):
    query, key, value = operands()
    tables = sized(3, 9, HEADS)
    fused = fuse(causal_table, implementation=implementation)

    def each(function):
        of_table = functools.partial(result_and_gradients, functools.partial(function, query, key, value))
        return compiled_quickly(jax.vmap(of_table))(tables)

    assert_close(each(fused), each(causal_table))


@BOTH
def test_relative_biases_inside_shard_map_match_the_reference(implementation):
    """The distances are equal on all devices, but the offsets differ."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    each, whole = P("rows"), P()
    given = [*operands(), sized(101), jnp.array([3, 9])]

    def of_rows(query, key, value, row, offset):
        return of_each_row(query, key, value, jnp.broadcast_to(row, (query.shape[0], *row.shape)), offset)

    fused = functools.partial(result_and_gradients, fuse(of_rows, implementation=implementation))
    sharded = jax.shard_map(
        fused, mesh=mesh, in_specs=(each, each, each, whole, each), out_specs=(each,) * 4 + (whole,), check_vma=True
    )
    expected = [
        result_and_gradients(of_rows, *(x[i : i + 1] for x in given[:3]), given[3], given[4][i : i + 1])
        for i in range(2)
    ]
    *parts, table = zip(*expected, strict=True)
    assert_close(compiled_quickly(sharded)(*given), (*(jnp.concatenate(x) for x in parts), sum(table)))


def test_relative_biases_have_second_derivatives():
    query, key, value = operands()

    def penalty(function, table):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(function(query, key, value, x))))(table) ** 2)

    found = [
        compiled_quickly(jax.grad(functools.partial(penalty, f)))(TABLE) for f in (fuse(causal_table), causal_table)
    ]
    assert_close(found[0], found[1], error=1e-4)


@pytest.mark.parametrize(
    "index",
    [
        lambda q, k: q + k,
        lambda q, k: 2 * q - k,
        lambda q, k: q // 2 - k // 2,
        lambda q, k: jnp.minimum(q, 7) - k + 71,
        lambda q, k: (q.astype(jnp.bfloat16) - k.astype(jnp.bfloat16)).astype(int) + 71,
        lambda q, k: q.astype(jnp.uint8) - k.astype(jnp.uint8),
    ],
    ids=["sum", "twice", "halves", "least", "bfloat16", "uint8"],
)
def test_functions_of_positions_other_than_distance_are_read_as_pairs(index):
    def function(query, key, value, table):
        rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None, :]
        return attention(query, key, value, jnp.take(table, index(rows, columns), mode="clip")[None, None])

    given = [*operands(), sized(122)]
    assert roles(function, *given) == ["score"]
    assert_close(jax.jit(fuse(function))(*given), function(*given))


def test_masks_of_numpy_are_known_while_tracing():
    """Such masks have no leaves, and the tiles that they rule out are known."""
    given = [x[:, :QUERIES] for x in operands()]
    (band,) = explain(numpy_indices)(*given, TABLE).regions
    (triangle,) = explain(numpy_bias)(*given).regions
    assert not [leaf for region in (band, triangle) for leaf in region.leaves if leaf.dtype == "bool"]
    assert triangle.visited.tolist() == [[True, False], [True, True]]
    assert band.visited.all()


@pytest.mark.parametrize(
    "constant",
    [
        np.arange(40)[:, None] * np.arange(30)[None, :],
        np.arange(40)[:, None] // 2 - np.arange(30)[None, :] // 2,
        np.random.default_rng(0).integers(0, 9, (40, 30)),
        np.eye(40, 30, dtype=bool)[::-1],
        np.arange(4)[:, None] - np.arange(4)[None, :],
        jnp.arange(60.0),
    ],
    ids=["product", "halves", "random", "other diagonal", "small", "weights"],
)
def test_constants_that_are_not_affine_in_positions_are_kept(constant):
    jaxpr = jax.make_jaxpr(lambda x: (x, jnp.asarray(constant)))(1.0)
    assert jaxpr.consts and with_positions(jaxpr) is jaxpr


@pytest.mark.parametrize(
    "constant",
    [
        np.arange(40) * 3 - 5,
        np.arange(2)[:, None, None] * 100 + np.arange(40)[:, None] - 2 * np.arange(30)[None, :],
        np.abs(np.arange(40)[:, None] - np.arange(30)[None, :])[:, None],
        np.tri(40, 30, 3, bool),
        ~np.tri(40, 30, -2, bool)[None],
        np.eye(40, 30, dtype=bool),
        np.zeros((9, 9), bool),
        np.stack([np.sin(np.arange(40)[:, None] - np.arange(30)[None, :])] * 2).astype(np.float32),
    ],
)
def test_affine_constants_are_computed_from_positions(constant):
    jaxpr = jax.make_jaxpr(lambda x: (x, jnp.asarray(constant)))(1.0)
    found = with_positions(jaxpr)
    assert all(np.size(x) < constant.size for x in found.consts)
    (_, same) = jax.jit(jax.extend.core.jaxpr_as_fun(found))(1.0)
    assert same.dtype == jnp.asarray(constant).dtype
    np.testing.assert_array_equal(same, constant)


def of_positions(query, key, value, table, positions):
    apart = positions[:, None] - jnp.arange(key.shape[1])[None, :]
    bias = table[jnp.clip(apart, 0, len(table) - 1)].transpose(2, 0, 1)[None]
    return attention(query, key, value, bias)


@BOTH
def test_traced_positions_are_read_as_pairs(implementation):
    """XLA makes the bias with the keys of a head contiguous, as kernels read them."""
    given = [*operands(), TABLE, jnp.arange(QUERIES)[::-1]]
    leaves = explain(of_positions)(*given).regions[0].leaves
    assert [(x.role, x.shape) for x in leaves if x.role == "score"] == [("score", (HEADS, QUERIES, KEYS))]
    found = compiled_quickly(
        functools.partial(result_and_gradients, fuse(of_positions, implementation=implementation))
    )(*given)
    assert_close(found, compiled_quickly(functools.partial(result_and_gradients, of_positions))(*given))


def test_relative_bias_program_has_no_array_of_queries_by_keys():
    """The program holds no array of queries by keys, nor does its gradient."""
    given = [*operands(), TABLE]
    program = jax.make_jaxpr(functools.partial(result_and_gradients, fuse(causal_table, implementation="triton")))
    text = str(program(*given))
    assert f"{QUERIES},{KEYS}" not in text and f"{QUERIES + KEYS - 1}" in text


def test_live_tiles_along_diagonals_cover_the_causal_triangle():
    """Only diagonals on and below the main one are live, each with all of its tiles."""
    square = [x[:, :QUERIES] for x in operands()]
    ((region,),) = trace(causal_table, (*square, TABLE), {}).regions.values()
    tile = kernel_choice.forward_kernel(region, None).tile
    assert tile.rows == tile.columns == 32
    found = live_tiles(region, tile, {})
    assert found is not None
    counts, numbers = (np.asarray(found.arrays[name]) for name in ("live_counts_d", "live_tiles_d"))
    assert counts[:, 1].tolist() == [0, 2, 1]
    states = expanded(found.lists.forms[2], counts, numbers, 2)
    assert (states > 0).tolist() == [[False, False], [True, True], [False, True]]


@pytest.mark.parametrize(("rows", "keys", "columns"), [(5, 7, 4), (8, 8, 4), (1, 3, 2), (9, 2, 2)])
def test_distance_tile_reads_values_by_distance(rows, keys, columns):
    line = jnp.arange(rows + keys - 1.0) + 1
    whole = np.asarray(line)[np.arange(rows)[:, None] - np.arange(keys) + keys - 1]
    for first in range(0, keys, columns):
        tile = distance_tile(line, jnp.int32(first), rows, keys, columns)
        assert tile.shape == (rows, columns)
        np.testing.assert_array_equal(tile[:, : keys - first], whole[:, first : first + columns])


def powers(apart, weights):
    """Return a bias that is a polynomial of distances with weights [3, N]."""
    scaled = apart.astype(jnp.float32) / 50
    return jnp.moveaxis(jnp.stack([scaled, scaled**2, jnp.ones(apart.shape)], axis=-1) @ weights, -1, 0)


def waves(apart, weights):
    angles = apart.astype(jnp.float32)[..., None] * jnp.exp(-jnp.arange(1.0, 3.0))[None, None]
    bias = jnp.concatenate([jnp.sin(angles), jnp.cos(angles[..., :1])], axis=-1) @ weights
    return jnp.tile(bias[..., :1].transpose(2, 0, 1), (HEADS, 1, 1))


def thresholds(apart, weights):
    steps = (jnp.abs(apart)[..., None] >= jnp.array([2, 20])[None, None]).sum(axis=-1)
    return weights[steps].max(axis=-1)[None] + jax.nn.softmax(weights[steps], axis=-1).transpose(2, 0, 1)


@pytest.mark.parametrize("bias", [powers, waves, thresholds])
def test_relative_biases_from_compound_functions_match_the_reference(bias):
    """The functions have stacks, repetitions and reductions along axes other than those of positions."""

    def function(query, key, value, weights):
        return attention(query, key, value, bias(distance(query, key), weights)[None])

    given = [*operands(), sized(3, HEADS)]
    found, expected = (
        compiled_quickly(functools.partial(result_and_gradients, f))(*given) for f in (fuse(function), function)
    )
    assert_close(found, expected)
    assert set(roles(function, *given)) <= {"distance"}
