"""Calls whose tokens are sharded over four or two devices, compared with one device."""

import contextlib
import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import (
    ContextParallel,
    Rotary,
    block_diagonal_attention,
    key_convolution,
    moba_attention,
    moba_routing,
    rotary_tables,
)
from blockdiag.common.context_parallel import gather_tokens
from blockdiag.common.division import divisible
from blockdiag.ops.moba import context as moba_context
from blockdiag.ops.moba.api import _choose, _plan, prepare_moba_call
from blockdiag.ops.moba.tables import moba_tables
from tests.division.division_support import count_collectives, make_mesh, shard

KINDS = ("automatic", "explicit", "manual")
TOKENS, HEADS, KEY_HEADS, WIDTH, BLOCK = 128, 8, 4, 8, 16
OFFSETS = jnp.asarray([0, 21, 21, 90, 117], jnp.int32)


def random_arrays(*shapes):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def operands(batch, key_heads=KEY_HEADS, query_heads=HEADS):
    lead = () if batch is None else (batch,)
    keys = (*lead, TOKENS, key_heads, WIDTH)
    return random_arrays((*lead, TOKENS, query_heads, WIDTH), keys, keys)


def assert_shared(attend, arrays, spec, kind, shape, context, *, collectives=None, result=None):
    """Assert that results and gradients on the mesh match those on one device.

    Args:
        attend: function of a context or None and of the arrays; returns an array.
        arrays: the arrays on one device.
        spec: the spec of the first three arrays; the others are on all devices.
        kind, shape: kind and shape of the mesh.
        context: the context that `attend` takes on the mesh.
        collectives: names of the allowed collectives.
        result: the spec of the result, if it differs from `spec`.
    """
    mesh = make_mesh("automatic" if kind == "manual" else kind, shape)
    expected = jax.jit(gradients_of(attend, None))(*arrays)
    context = dataclasses.replace(context, mesh=mesh) if kind == "automatic" else context
    compute = gradients_of(attend, context)
    if kind == "manual":
        specs = (*(spec,) * 3, *(P(),) * (len(arrays) - 3))
        results = (result or spec, (spec,) * 3)
        compute = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=results)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        placed = [shard(mesh, x, spec if i < 3 else P()) for i, x in enumerate(arrays)]
        compiled = jax.jit(compute).lower(*placed).compile()
        found, again = compiled(*placed), compiled(*placed)
    for one, other, second in zip(*map(jax.tree.leaves, (found, expected, again)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())
        np.testing.assert_array_equal(one, second)
    if collectives is not None:
        assert set(count_collectives(compiled.as_text())) <= set(collectives)


@functools.cache
def gradients_of(attend, context):
    """Return a function that computes the result and the gradients of three arrays.

    The cotangent differs from element to element. All tests share the function, so that JAX compiles it once
    for one device.
    """

    def compute(query, key, value, *more):
        output, pull_back = jax.vjp(lambda *x: attend(context, *x, *more), query, key, value)
        return output, pull_back(jnp.cos(3 * output))

    return compute


def moba(context, query, key, value, offsets=None, mask=None, **options):
    options = {"block_size": BLOCK, "top_k": 3} | options
    return moba_attention(
        query, key, value, sequence_offsets=offsets, key_mask=mask, context_parallel=context, **options
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["ulysses", "gather"])
@pytest.mark.division("tokens", "gradients", operation="moba")
def test_moba_of_sharded_tokens_matches_one_device(strategy, kind):
    context = ContextParallel("model", strategy)
    gathers = {"all-gather", "reduce-scatter", "all-reduce", "collective-permute"}
    moves = {"ulysses": {"all-to-all"}, "gather": gathers}[strategy]
    assert_shared(moba, operands(1), P(None, "model"), kind, (1, 4), context, collectives=moves)


# Eager execution compiles about a hundred programs.
@pytest.mark.parametrize("strategy", ["ulysses", pytest.param("gather", marks=pytest.mark.exhaustive)])
def test_moba_of_sharded_tokens_outside_jit_matches_the_compiled_call(strategy):
    """Eagerly, `jax.shard_map` runs one operation at a time.

    It then refuses derivatives that a compiled program may have.
    """
    mesh = make_mesh("explicit", (1, 4))
    compute = gradients_of(moba, ContextParallel("model", strategy))
    with jax.set_mesh(mesh):
        placed = [shard(mesh, x, P(None, "model")) for x in operands(1)]
        found, expected = compute(*placed), jax.jit(compute)(*placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("key_heads", [2, 4])
def test_ulysses_with_one_key_head_on_each_device_equals_one_device(key_heads):
    """Each group then has only query heads, and the key head moves once."""
    context, arrays = ContextParallel("model", "ulysses"), operands(1, key_heads, query_heads=8)
    assert_shared(moba, arrays, P(None, "model"), "explicit", (1, 4), context, collectives={"all-to-all"})


@pytest.mark.parametrize(("kind", "strategy"), [("automatic", "ulysses"), ("explicit", "gather")])
def test_moba_of_sharded_tokens_and_batch_matches_one_device(strategy, kind):
    context = ContextParallel("model", strategy, batch_axes=("data",))
    assert_shared(moba, operands(2), P("data", "model"), kind, (2, 2), context)


@pytest.mark.parametrize(("kind", "strategy"), [("automatic", "gather"), ("explicit", "ulysses")])
def test_moba_of_sharded_tokens_and_heads_matches_one_device(strategy, kind):
    context = ContextParallel("data", strategy, head_axes=("model",))
    assert_shared(moba, operands(1), P(None, "data", "model"), kind, (2, 2), context)


@pytest.mark.parametrize(("kind", "strategy"), [("manual", "gather"), ("automatic", "ulysses"), ("explicit", "gather")])
def test_moba_of_sharded_packed_tokens_matches_one_device(strategy, kind):
    context = ContextParallel("model", strategy)
    assert_shared(moba, [*operands(None), OFFSETS], P("model"), kind, (1, 4), context)


def moba_of_all_keys(context, *arrays):
    return moba(context, *arrays, is_causal=False)


@pytest.mark.parametrize("strategy", ["ulysses", "gather"])
def test_non_causal_moba_of_sharded_tokens_matches_one_device(strategy):
    assert_shared(
        moba_of_all_keys, operands(1), P(None, "model"), "explicit", (1, 4), ContextParallel("model", strategy)
    )


def masked_moba(context, query, key, value, mask):
    return moba(context, query, key, value, mask=mask)


@pytest.mark.parametrize(("kind", "strategy"), [("automatic", "gather"), ("explicit", "ulysses")])
def test_moba_of_sharded_tokens_with_a_key_mask_matches_one_device(strategy, kind):
    mask = jnp.asarray(np.random.default_rng(1).random((1, TOKENS)) < 0.7)
    assert_shared(masked_moba, [*operands(1), mask], P(None, "model"), kind, (1, 4), ContextParallel("model", strategy))


def test_moba_with_an_odd_number_of_blocks_per_device_gathers_consecutive_queries():
    attend = functools.partial(moba, block_size=TOKENS // 4)
    moves = {"all-gather", "reduce-scatter", "all-reduce"}
    context = ContextParallel("model", "gather")
    assert_shared(attend, operands(1), P(None, "model"), "explicit", (1, 4), context, collectives=moves)


def test_moba_without_a_strategy_gathers_only_where_heads_cannot_be_exchanged():
    gathers, context = {"all-gather", "reduce-scatter", "all-reduce", "collective-permute"}, ContextParallel("model")
    for query_heads, key_heads, moves in ((6, 2, gathers), (8, 2, {"all-to-all"}), (4, 4, {"all-to-all"})):
        arrays = operands(1, key_heads, query_heads=query_heads)
        assert_shared(moba, arrays, P(None, "model"), "explicit", (1, 4), context, collectives=moves)


@pytest.mark.parametrize(("strategy", "is_packed"), [("ulysses", False), ("gather", False), ("gather", True)])
def test_moba_of_sharded_tokens_equals_one_device_bitwise(strategy, is_packed):
    """Bitwise equality implies that every query chose the same blocks."""
    arrays = [x.astype(jnp.bfloat16) for x in operands(None if is_packed else 1)]
    attend = functools.partial(moba, offsets=OFFSETS if is_packed else None, implementation="xla")
    mesh = make_mesh("explicit", (1, 4))
    expected = jax.jit(functools.partial(attend, None))(*arrays)
    with jax.set_mesh(mesh):
        placed = [shard(mesh, x, P("model") if is_packed else P(None, "model")) for x in arrays]
        found = jax.jit(functools.partial(attend, ContextParallel("model", strategy)))(*placed)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["batched", "packed"])
def test_moba_routing_of_sharded_tokens_does_not_wait_for_gathered_keys(offsets, monkeypatch):
    """Queries choose the same blocks if zeros arrive in place of the gathered keys."""
    arrays = operands(2 if offsets is None else None)
    routing = moba_routing(*arrays[:2], block_size=BLOCK, top_k=3, sequence_offsets=offsets)
    expected = moba(None, arrays[0], 0 * arrays[1], arrays[2], offsets, routing=routing)
    gathered = []

    def gather(operands, *options):
        gathered.append(operands)
        key, value = gather_tokens(operands, *options)
        return 0 * key, value

    monkeypatch.setattr(moba_context, "gather_tokens", gather)
    mesh = make_mesh("explicit", (1, 4))
    spec = P(None, "model") if offsets is None else P("model")
    with jax.set_mesh(mesh):
        placed = [shard(mesh, x, spec) for x in arrays]
        found = jax.jit(functools.partial(moba, ContextParallel("model", "gather"), offsets=offsets))(*placed)
    assert len(gathered) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_moba_centroids_and_choice_are_partitioned_over_batch_and_heads(is_mapped):
    """Batch rows (or an axis of `jax.vmap`) and heads are sharded, with fewer key heads than query heads."""
    query, key, _ = operands(4)
    key = key[:, :, :2]
    rows = slice(0, 1) if is_mapped else slice(None)
    options = {name: None for name in ("scale", "sequence_offsets", "key_sequence_offsets", "key_mask", "routing")}
    call = prepare_moba_call(
        query[rows], key[rows], block_size=BLOCK, top_k=3, is_causal=True, implementation="xla", **options
    )
    tables = moba_tables(call.problem, query[rows].shape[0])

    def choose(has_centroids, query, key):
        query, key = (x.reshape(-1, *x.shape[-2:]) for x in (query, key))
        if not has_centroids:
            return _choose(call, query, key, None, tables)
        centroids = divisible(_plan, call, "centroids")(key, None, tables[0])
        return divisible(_plan, call, "choose")(query, centroids, tables[1])

    def compute(has_centroids):
        function = functools.partial(choose, has_centroids)
        return jax.jit(jax.vmap(function) if is_mapped else function)

    expected = compute(False)(query, key)
    mesh = make_mesh("explicit", (2, 2))
    with jax.set_mesh(mesh):
        found = compute(True)(*(shard(mesh, x, P("data", None, "model")) for x in (query, key)))
    assert (expected >= 0).any()
    np.testing.assert_array_equal(found, expected)


TABLES = rotary_tables(TOKENS, WIDTH)
ROTARIES = {
    "none": None,
    "by position": Rotary(*TABLES),
    "by token": Rotary(*TABLES, per_token=True),
    "positions": Rotary(*TABLES, positions=jnp.arange(TOKENS, dtype=jnp.int32)[::-1]),
}


def block_diagonal(context, query, key, value, *more, rotary="none", **options):
    options = {"block_size": BLOCK, "is_causal": True} | options
    given = ROTARIES[rotary]
    return block_diagonal_attention(query, key, value, *more, rotary=given, context_parallel=context, **options)


@functools.cache
def block_diagonal_with(**options):
    return functools.partial(block_diagonal, **options)


@pytest.mark.parametrize(("kind", "rotary"), [*((kind, "by position") for kind in KINDS), ("explicit", "by token"),
                                              ("explicit", "positions"), ("automatic", "none")])  # fmt: skip
@pytest.mark.division("tokens", "gradients", operation="block_diagonal")
def test_block_diagonal_with_shards_cut_between_blocks_has_no_collectives(kind, rotary):
    attend = block_diagonal_with(rotary=rotary)
    context = ContextParallel("model", batch_axes=("data",))
    assert_shared(attend, operands(2), P("data", "model"), kind, (2, 2), context, collectives=())


@pytest.mark.parametrize(
    ("kind", "rotary"), [("automatic", "by position"), ("explicit", "by token"), ("explicit", "positions")]
)
def test_block_diagonal_of_blocks_that_span_devices_matches_one_device(kind, rotary):
    attend = block_diagonal_with(rotary=rotary, block_size=TOKENS)
    assert_shared(attend, operands(1), P(None, "model"), kind, (1, 4), ContextParallel("model"))


def packed_block_diagonal(context, query, key, value, offsets):
    return block_diagonal(context, query, key, value, sequence_offsets=offsets, rotary="by position")


@pytest.mark.parametrize("kind", KINDS)
def test_block_diagonal_of_sharded_packed_tokens_permutes_rows_between_neighbours(kind):
    context = ContextParallel("model")
    moves = {"collective-permute"}
    assert_shared(
        packed_block_diagonal, [*operands(None), OFFSETS], P("model"), kind, (1, 4), context, collectives=moves
    )


@pytest.mark.parametrize(
    ("kind", "rotary", "is_causal"),
    [
        ("automatic", "by position", True),
        ("manual", "none", False),
        ("explicit", "by token", False),
        ("explicit", "positions", True),
    ],
)
def test_block_diagonal_of_blocks_cut_by_shards_permutes_rows_between_neighbours(kind, rotary, is_causal):
    """Four devices do not divide the two key heads."""
    attend = functools.partial(block_diagonal, rotary=rotary, block_size=20, is_causal=is_causal)
    context, moves = ContextParallel("model"), {"collective-permute"}
    assert_shared(attend, operands(2, 2), P(None, "model"), kind, (1, 4), context, collectives=moves)


@pytest.mark.parametrize("rotary", ["by position", "by token"])
def test_block_diagonal_of_sharded_block_lengths_permutes_rows_between_neighbours(rotary):
    def attend(context, query, key, value, lengths):
        return block_diagonal(context, query, key, value, block_lengths=lengths, rotary=rotary, is_causal=False)

    # One block is longer than the largest block size. Its other rows belong to no block.
    lengths = jnp.asarray([5, 16, 16, 0, 9, 30, 1, 16, 11], jnp.int32)
    context, moves = ContextParallel("model"), {"collective-permute"}
    assert_shared(attend, [*operands(None), lengths], P("model"), "explicit", (1, 4), context, collectives=moves)


def convolve_three(context, *arrays, weights=None, offsets=None):
    """Return a weighted sum of three convolutions, so that the gradients of the three keys differ."""
    weights = random_arrays((4, KEY_HEADS, WIDTH))[0] if weights is None else weights
    convolved = [key_convolution(x, weights, sequence_offsets=offsets, context_parallel=context) for x in arrays]
    return convolved[0] + 2 * convolved[1] - convolved[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.division("tokens", "gradients", operation="key_convolution")
def test_key_convolution_of_sharded_tokens_permutes_only_the_previous_keys(kind):
    arrays = random_arrays(*[(2, TOKENS, KEY_HEADS, WIDTH)] * 3)
    context = ContextParallel("model", batch_axes=("data",))
    moves = {"collective-permute"}
    assert_shared(convolve_three, arrays, P("data", "model"), kind, (2, 2), context, collectives=moves)


def convolve_three_packed(context, *arrays):
    return convolve_three(context, *arrays[:3], offsets=arrays[3])


@pytest.mark.parametrize("kind", KINDS)
def test_key_convolution_of_sharded_packed_tokens_matches_one_device(kind):
    arrays = [*random_arrays(*[(TOKENS, KEY_HEADS, WIDTH)] * 3), OFFSETS]
    assert_shared(convolve_three_packed, arrays, P("model"), kind, (1, 4), ContextParallel("model"))


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_key_convolution_weight_gradient_is_summed_over_token_shards(kind):
    key, weights = random_arrays((1, TOKENS, KEY_HEADS, WIDTH), (4, KEY_HEADS, WIDTH))
    mesh = make_mesh(kind, (1, 4))

    def gradient(context):
        return jax.grad(lambda w, x: (key_convolution(x, w, context_parallel=context) ** 2).sum())

    expected = gradient(None)(weights, key)
    context = ContextParallel("model", mesh=mesh if kind == "automatic" else None)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        found = jax.jit(gradient(context))(shard(mesh, weights, P()), shard(mesh, key, P(None, "model")))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
@pytest.mark.parametrize("attend", [moba, block_diagonal, convolve_three], ids=lambda function: function.__name__)
def test_tokens_that_the_mesh_does_not_divide_raise_value_error_with_the_padded_length(attend, kind):
    """JAX cannot shard an axis of this length, so no result could have the right shape."""
    mesh = make_mesh(kind, (1, 4))
    context = ContextParallel("model", mesh=mesh if kind == "automatic" else None)
    message = r"must be a multiple of the 4 devices along 'model', got 126; pad them to 128"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        attend(context, *(shard(mesh, x[:, :126, :KEY_HEADS], P()) for x in operands(1)))


def test_block_diagonal_with_an_unsupported_strategy_or_head_count_raises_value_error():
    mesh = make_mesh("explicit", (1, 4))
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="'gather' does not support `block_diagonal_attention`"):
            block_diagonal(ContextParallel("model", "gather"), *(shard(mesh, x, P()) for x in operands(1)))
        with pytest.raises(ValueError, match=r"the 4 devices .* batched sequences of 512 tokens, 128 here"):
            few = operands(1, key_heads=2, query_heads=6)
            block_diagonal(ContextParallel("model"), *(shard(mesh, x, P()) for x in few), block_size=TOKENS)


OFFSETS_OF_ROWS = [
    (moba, "offsets", "gather"),
    (moba, "offsets", "ulysses"),
    (convolve_three, "offsets", None),
    (block_diagonal, "sequence_offsets", None),
    (block_diagonal, "block_lengths", None),
]


@pytest.mark.parametrize(("attend", "name", "strategy"), OFFSETS_OF_ROWS)
def test_offsets_of_batched_tokens_raise_the_value_error_of_one_device(attend, name, strategy):
    arrays = [x[:, :, :KEY_HEADS] for x in operands(2)]
    mesh, message = make_mesh("explicit", (1, 4)), "describes one packed token axis, .*; reshape the batch"
    with pytest.raises(ValueError, match=message):
        attend(None, *arrays, **{name: OFFSETS})
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"{message}") as error:
        attend(ContextParallel("model", strategy), *(shard(mesh, x, P()) for x in arrays), **{name: OFFSETS})
    assert "tokens of shape (2, 128)" in str(error.value)


def test_offsets_are_checked_against_the_tokens_of_all_devices():
    """The check also applies inside `jax.shard_map`, where each device has a quarter of the tokens."""
    mesh = make_mesh("automatic", (1, 4))
    key, weights = random_arrays((TOKENS, KEY_HEADS, WIDTH), (4, KEY_HEADS, WIDTH))

    def convolve(end):
        options = {"sequence_offsets": np.asarray([0, end], np.int32), "context_parallel": ContextParallel("model")}
        compute = functools.partial(key_convolution, **options)
        return jax.shard_map(compute, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"))(key, weights)

    assert convolve(TOKENS).shape == key.shape
    with pytest.raises(ValueError, match="must end within the 128 tokens of `key`, got 129"):
        convolve(TOKENS + 1)


def test_key_convolution_with_shards_shorter_than_its_window_raises_value_error():
    mesh = make_mesh("explicit", (1, 4))
    key, weights = random_arrays((1, 8, 1, 8), (4, 1, 8))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"need at least 3 tokens .* got 2; pad .* to 12"):
        key_convolution(shard(mesh, key, P()), weights, context_parallel=ContextParallel("model"))


@pytest.mark.parametrize(
    ("context", "change", "message"),
    [
        (ContextParallel("absent"), {}, r"names the axis 'absent', but the mesh has \['data', 'model'\]"),
        (
            ContextParallel("model", "ulysses"),
            {"key_heads": 3, "query_heads": 6},
            r"key heads that are a multiple or a divisor of these, got 6 query heads and 3 key heads on each",
        ),
        (ContextParallel("model", "gather"), {"block_size": 48}, r"`block_size`=48; pad the 128 tokens to 192"),
        (
            ContextParallel("model"),
            {"tokens": 126},
            r"tokens must be a multiple of the 4 devices along 'model', got 126; pad them to 128",
        ),
    ],
)
def test_unsupported_context_parallel_calls_raise_value_error(context, change, message):
    change = dict(change)
    arrays = operands(1, change.pop("key_heads", KEY_HEADS), change.pop("query_heads", HEADS))
    tokens = change.pop("tokens", TOKENS)
    mesh = make_mesh("explicit", (1, 4))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        moba(context, *(shard(mesh, x[:, :tokens], P()) for x in arrays), **change)


@pytest.mark.parametrize(
    ("spec", "field"), [(P("data", "model"), "batch_axes"), (P(None, "model", "data"), "head_axes")]
)
def test_unnamed_sharded_axes_of_an_automatic_mesh_are_gathered_with_a_warning(spec, field):
    """The warning needs an eager call: within `jax.jit` these shardings are unknown."""
    mesh = make_mesh("automatic")
    arrays = [shard(mesh, x, spec) for x in operands(2)]
    context = ContextParallel("model", mesh=mesh)
    with pytest.warns(UserWarning, match=rf"gathered over \['data'\]: name them in `{field}`"):
        found = block_diagonal(context, *arrays)
    np.testing.assert_allclose(found, block_diagonal(None, *operands(2)), rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block_diagonal(dataclasses.replace(context, **{field: ("data",)}), *arrays)


def test_context_parallel_without_a_mesh_raises_value_error():
    with pytest.raises(ValueError, match=r"but the mesh has none; call inside `jax.set_mesh\(mesh\)`"):
        moba(ContextParallel("model"), *operands(1))


def test_unknown_strategy_raises_value_error():
    with pytest.raises(ValueError, match="`strategy` must be None, 'ulysses', 'gather' or 'ring', got 'rings'"):
        ContextParallel("model", "rings")


def test_ring_strategy_of_other_operations_than_fuse_raises_value_error():
    context, mesh = ContextParallel("model", "ring"), make_mesh("explicit", (1, 4))
    arrays = [shard(mesh, x, P()) for x in operands(1)]
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"'ring' supports only `fuse`, not MoBA; use strategy='gather', or 'ulys"):
            moba(context, *arrays)
        with pytest.raises(ValueError, match=r"not `block_diagonal_attention`; leave it None, or use 'ulysses'"):
            block_diagonal(context, *arrays)
        with pytest.raises(ValueError, match=r"not `key_convolution`; leave it None, or use the strategy of the att"):
            key_convolution(arrays[1], jnp.zeros((3, *arrays[1].shape[-2:])), context_parallel=context)
