"""The routing of MoBA: the chosen blocks, and routings that are given, edited and converted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import Routing, moba_attention, moba_routing
from tests.ops.moba_cases import MoBACase, assert_accurate, dense_results, dense_routing
from tests.support import compiled_quickly

ARRAY_IMPLEMENTATIONS = ("reference", "xla")

CASES = {
    "two sequences": MoBACase(lengths=(61, 61)),
    "grouped heads": MoBACase(lengths=(75,), query_heads=4, key_heads=2),
    "own block only": MoBACase(lengths=(40,), top_k=1),
    "more slots than blocks": MoBACase(lengths=(40,), top_k=7),
    "more keys, masked": MoBACase(lengths=(20, 20), key_lengths=(61, 61), mask=0.6),
    "more queries": MoBACase(lengths=(61,), key_lengths=(37,)),
    "not causal": MoBACase(lengths=(61,), is_causal=False),
    "packed": MoBACase(lengths=(37, 0, 1, 50), layout="offsets", padding=9),
    "packed, fewer keys, not causal": MoBACase(
        lengths=(40, 20), key_lengths=(20, 33), layout="offsets", is_causal=False, top_k=2
    ),
    "bfloat16": MoBACase(lengths=(75,), dtype="bfloat16"),
    "all masked": MoBACase(lengths=(40,), mask=1.0),
    "no keys": MoBACase(lengths=(5,), key_lengths=(0,)),
}


@functools.cache
def routing_of(name: str) -> Routing:
    case = CASES[name]
    return case.route("xla")(*case.operands()[:2])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
def test_moba_routing_matches_dense_routing(implementation, name):
    case = CASES[name]
    query, key, *_ = case.operands()
    routing = case.route(implementation)(query, key)
    assert routing.indices.dtype == jnp.int32
    assert routing.block_size == 16 and routing.num_blocks == -(-key.shape[-3] // 16)
    np.testing.assert_array_equal(routing.indices, dense_routing(case, query, key))


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
def test_moba_routing_of_equal_scores_chooses_the_later_block(implementation):
    query = jnp.ones((80, 1, 4))
    key = jnp.ones((80, 1, 4))
    causal = moba_routing(query, key, block_size=16, top_k=3, implementation=implementation)
    np.testing.assert_array_equal(causal.indices[70, 0], [4, 3, 2])
    np.testing.assert_array_equal(causal.indices[20, 0], [1, 0, -1])
    whole = moba_routing(query, key, block_size=16, top_k=3, is_causal=False, implementation=implementation)
    np.testing.assert_array_equal(whole.indices[:, 0], [[4, 3, 2]] * 80)


def test_moba_routing_under_jit_and_vmap_equals_single_calls():
    case = MoBACase(lengths=(61,), layout="offsets", query_heads=4)
    query, key, *_ = MoBACase(lengths=(61, 61, 61), query_heads=4).operands()
    mapped = jax.jit(jax.vmap(case.route("xla")))(query, key)
    assert mapped.indices.shape == (3, 61, 4, 3)
    for i in range(3):
        np.testing.assert_array_equal(mapped.indices[i], case.route("xla")(query[i], key[i]).indices)


def test_moba_routing_has_zero_derivatives():
    query, key, *_ = MoBACase(lengths=(61,)).operands()

    def total(query, key):
        routing = moba_routing(query, key, block_size=16, top_k=2)
        return jnp.sum(routing.indices.astype(jnp.float32))

    for gradient in jax.grad(total, (0, 1))(query, key):
        assert not gradient.any()
    _, tangent = jax.jvp(total, (query, key), (query, key))
    assert tangent == 0


# --- given routings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "xla") for name in ("grouped heads", "packed", "not causal", "more keys, masked", "own block only")),
        ("packed", "reference"),
        ("not causal", "reference"),
    ],
)
def test_given_routing_matches_the_routing_of_the_call(name, implementation):
    case = CASES[name]
    expected = case.results(implementation)
    actual = case.results(implementation, routing_of(name))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


EDITS = {
    "another order": lambda indices, random: random.permuted(indices, axis=-1),
    "blocks named twice": lambda indices, random: np.concatenate([indices[..., :1], indices[..., :-1]], axis=-1),
    "own block missing": lambda indices, random: np.concatenate([indices[..., 1:], indices[..., 1:2]], axis=-1),
    "nothing": lambda indices, random: np.full_like(indices, -1),
    "anything": lambda indices, random: random.integers(-3, 9, indices.shape, dtype=np.int32),
    "extremes": lambda indices, random: random.choice(np.asarray([-(2**31), 2**31 - 1, 0, 1], np.int32), indices.shape),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["grouped heads", "packed", "not causal", "more keys, masked"])
def test_edited_routing_is_accurate(name, edit):
    case = CASES[name]
    indices = EDITS[edit](np.asarray(routing_of(name).indices), np.random.default_rng(3))
    routing = dataclasses.replace(routing_of(name), indices=indices)
    assert_accurate(case, case.results("xla", routing), dense_results(case, indices))


def test_new_routing_of_the_same_shape_does_not_retrace():
    """A routing is a pytree with static options, so new indices compile nothing."""
    query, key, value, *_ = MoBACase(lengths=(61,)).operands()
    traces = 0

    @jax.jit
    def layers(routing, query):
        nonlocal traces
        traces += 1
        for _ in range(2):
            query = moba_attention(query, key, value, block_size=16, top_k=2, routing=routing)
        return query

    routing = moba_routing(query, key, block_size=16, top_k=2)
    first = layers(routing, query)
    second = layers(jax.tree.map(lambda x: x.at[..., 1].set(-1), routing), query)
    assert traces == 1
    assert jnp.abs(first - second).max() > 1e-3


# --- conversions --------------------------------------------------------------------------------------------------


def assert_same_blocks(first: Routing, second: Routing):
    assert (first.block_size, first.num_blocks) == (second.block_size, second.num_blocks)
    np.testing.assert_array_equal(np.sort(first.indices, axis=-1), np.sort(second.indices, axis=-1))


@pytest.mark.parametrize("name", CASES)
def test_pattern_round_trip(name):
    routing = routing_of(name)
    pattern = compiled_quickly(Routing.to_pattern)(routing)
    assert pattern.shape == (*routing.indices.shape[:-1], routing.num_blocks)
    np.testing.assert_array_equal(np.asarray(pattern).sum(axis=-1), (np.asarray(routing.indices) >= 0).sum(axis=-1))
    convert = functools.partial(Routing.from_pattern, block_size=16, top_k=routing.indices.shape[-1])
    assert_same_blocks(compiled_quickly(convert)(pattern), routing)


def test_from_pattern_orders_blocks_and_checks_top_k():
    pattern = np.zeros((2, 1, 4), bool)
    pattern[0, 0, [0, 2, 3]] = True
    routing = Routing.from_pattern(pattern, block_size=64)
    np.testing.assert_array_equal(routing.indices[:, 0], [[3, 2, 0, -1], [-1] * 4])
    np.testing.assert_array_equal(Routing.from_pattern(pattern, block_size=64, top_k=6).indices[0, 0, 3:], [-1] * 3)
    with pytest.raises(ValueError, match="`top_k` must be at least the 3 blocks that `pattern` gives a query, got 2"):
        Routing.from_pattern(pattern, block_size=64, top_k=2)
    traced = jax.jit(lambda pattern: Routing.from_pattern(pattern, block_size=64, top_k=2))(pattern)
    np.testing.assert_array_equal(traced.indices[0, 0], [3, 2])


def test_pattern_of_all_blocks_matches_causal_attention():
    query, key, value, *_ = MoBACase(lengths=(61,)).operands()
    routing = Routing.from_pattern(jnp.ones((1, 61, 2, 4), bool), block_size=16)
    np.testing.assert_allclose(
        moba_attention(query, key, value, block_size=16, top_k=4, routing=routing),
        jax.nn.dot_product_attention(query, key, value, is_causal=True),
        rtol=1e-5,
        atol=1e-5,
    )


def lists_by_loops(case: MoBACase, indices: np.ndarray, num_blocks: int) -> dict[tuple[int, int, int], list[int]]:
    """Return the query rows of each sequence, head and block."""
    result = {}
    for s, (batch, rows, _, _) in enumerate(case.sequences()):
        for n in range(case.query_heads):
            for block in range(num_blocks):
                is_named = (indices[batch][rows, n] == block).any(axis=-1)
                result[s, n, block] = np.flatnonzero(is_named).tolist()
    return result


@pytest.mark.parametrize("name", CASES)
def test_block_lists_match_loops_and_round_trip(name):
    case, routing = CASES[name], routing_of(name)
    sequence_offsets = case.packing.get("sequence_offsets")
    lists = compiled_quickly(Routing.to_block_lists)(routing, sequence_offsets)
    offsets, counts, rows = map(np.asarray, lists)
    assert offsets.shape == counts.shape == (len(case.lengths), case.query_heads, routing.num_blocks)
    assert rows.shape == (routing.indices.size,)
    for index, expected in lists_by_loops(case, np.asarray(routing.indices), routing.num_blocks).items():
        np.testing.assert_array_equal(rows[offsets[index] : offsets[index] + counts[index]], expected)
    # Lists of different blocks do not overlap.
    assert int(counts.sum()) == int((rows >= 0).sum())

    convert = functools.partial(
        Routing.from_block_lists,
        num_queries=routing.indices.shape[-3],
        block_size=16,
        top_k=routing.indices.shape[-1],
    )
    back = compiled_quickly(convert)(*lists, sequence_offsets=sequence_offsets)
    assert back.indices.shape == routing.indices.shape
    assert_same_blocks(back, routing)


def test_block_lists_count_a_repeated_block_once():
    routing = Routing(jnp.asarray([[[1, 1, 0]], [[7, -1, 1]]], jnp.int32), 16, 2)
    offsets, counts, rows = routing.to_block_lists()
    np.testing.assert_array_equal(counts[0, 0], [1, 2])
    np.testing.assert_array_equal(rows[offsets[0, 0, 1] :][:2], [0, 1])


def test_from_block_lists_accepts_lists_of_flash_moba():
    """Offsets are int64. Lists are anywhere in the rows and in any order, and some rows are in no list."""
    offsets = np.asarray([[[5, 2, 2]], [[7, 0, 9]]])  # [sequences, heads, blocks]
    counts = np.asarray([[[2, 0, 3]], [[2, 2, 0]]], np.int32)
    rows = np.asarray([0, 3, 0, 1, 2, 0, 3, 1, 2, 77], np.int32)
    routing = Routing.from_block_lists(offsets, counts, rows, num_queries=4, block_size=16, top_k=2)
    expected = [[[2, 0], [2, -1], [2, -1], [0, -1]], [[1, -1], [0, -1], [0, -1], [1, -1]]]
    np.testing.assert_array_equal(routing.indices[:, :, 0], expected)
    assert routing.num_blocks == 3
    with pytest.raises(ValueError, match="`top_k` must be at least the 2 blocks that the lists give a query, got 1"):
        Routing.from_block_lists(offsets, counts, rows, num_queries=4, block_size=16, top_k=1)
    convert = functools.partial(Routing.from_block_lists, num_queries=4, block_size=16, top_k=1)
    np.testing.assert_array_equal(jax.jit(convert)(offsets, counts, rows).indices[0, :, 0, 0], [2, 2, 2, 0])


def test_attention_with_a_routing_from_block_lists_is_accurate():
    case = CASES["packed"]
    routing = routing_of("packed")
    sequence_offsets = jnp.asarray(case.packing["sequence_offsets"])

    def round_trip(routing):
        lists = routing.to_block_lists(sequence_offsets)
        options = dict(num_queries=97, block_size=16, top_k=3, sequence_offsets=sequence_offsets)
        return Routing.from_block_lists(*lists, **options)

    assert_accurate(case, case.results("xla", compiled_quickly(round_trip)(routing)), dense_results(case))


LISTS = (np.zeros((1, 2, 3), np.int32), np.zeros((1, 2, 3), np.int32), np.zeros(5, np.int32))
FROM_LISTS = functools.partial(Routing.from_block_lists, num_queries=4, block_size=16, top_k=2)
PACKED_ROUTING = Routing(jnp.zeros((4, 1, 2), jnp.int32), 16, 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda: Routing.from_pattern(jnp.zeros((4, 1, 2)), block_size=16),
            "`pattern` must be a bool array .* float32",
        ),
        (lambda: Routing.from_pattern(np.zeros(2, bool), block_size=16), r"`pattern` must be a bool array .* \(2,\)"),
        (lambda: Routing.from_pattern(np.zeros((4, 1, 2), bool), block_size=17), "`block_size` must be a multiple"),
        (lambda: Routing.from_pattern(np.zeros((4, 1, 2), bool), block_size=16, top_k=0), "`top_k` must be an integer"),
        (lambda: FROM_LISTS(LISTS[0], LISTS[1][:, :1], LISTS[2]), r"one shape .* got \(1, 2, 3\), \(1, 1, 3\)"),
        (lambda: FROM_LISTS(*LISTS[:2], LISTS[2] * 0.5), "`rows` must be an integer array, got float"),
        (lambda: FROM_LISTS(*LISTS, sequence_offsets=np.asarray([0, 2, 4], np.int32)), r"must have shape \(2,\)"),
        (
            lambda: dataclasses.replace(PACKED_ROUTING, indices=PACKED_ROUTING.indices[None]).to_block_lists(
                np.asarray([0, 4], np.int32)
            ),
            "`sequence_offsets` describes one packed token axis",
        ),
        (
            lambda: PACKED_ROUTING.to_block_lists(np.asarray([0, 5], np.int32)),
            "`sequence_offsets` must end within the 4 tokens of `routing`, got 5",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_conversions_raise_value_error(function, message):
    with pytest.raises(ValueError, match=message):
        function()


def test_to_block_lists_of_too_many_indices_raises_value_error():
    indices = jax.ShapeDtypeStruct((2**20, 32, 64), jnp.int32)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 indices .* got 2147483648"):
        jax.eval_shape(Routing.to_block_lists, Routing(indices, 128, 8192))
