"""Every implementation of MoBA's canonical call against computations by loops: routing, lists, output and gradients."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from blockdiag import block_diagonal_attention
from blockdiag.ops.moba import xla as xla_moba
from blockdiag.ops.moba.centroids import whole_centroids
from blockdiag.ops.moba.tables import moba_tables
from tests.ops.moba_support import INTERPRETED, MODULES, MoBACase, assert_accurate, exact_routing, load
from tests.support import compiled_quickly

ARRAY_IMPLEMENTATIONS = ("reference", "xla")

CASES = {
    "one sequence": MoBACase(lengths=(70,)),
    "whole blocks, head dimension 72": MoBACase(lengths=(32, 32), slots=3, head_dim=72),
    "grouped heads": MoBACase(lengths=(20, 20), query_heads=6, key_heads=2),
    "one key head, scale": MoBACase(lengths=(50,), query_heads=4, key_heads=1, scale=0.7),
    "own block only": MoBACase(lengths=(50,), slots=0),
    "more slots than blocks": MoBACase(lengths=(50,), slots=6),
    "one token": MoBACase(lengths=(1,)),
    "larger blocks": MoBACase(lengths=(110,), block_size=48, slots=1),
    "bfloat16": MoBACase(lengths=(70,), dtype="bfloat16", head_dim=64),
    "float16, grouped": MoBACase(lengths=(70,), dtype="float16", query_heads=4),
    "packed": MoBACase(lengths=(3, 0, 40, 1, 0, 33), padding=5, spare_blocks=3),
    "packed, bfloat16": MoBACase(lengths=(0, 20, 50), padding=9, spare_blocks=1, dtype="bfloat16", query_heads=4),
    "fewer queries than keys": MoBACase(lengths=(5, 20, 0, 1), key_lengths=(50, 37, 20, 40), padding=3),
    "more queries than keys": MoBACase(lengths=(50, 7, 40), key_lengths=(20, 0, 33)),
    "key mask": MoBACase(lengths=(70, 40), masked=0.4),
    "all keys masked": MoBACase(lengths=(40,), masked=1.0),
    "key mask, packed, bfloat16": MoBACase(
        lengths=(10, 60, 0), key_lengths=(30, 60, 4), padding=4, spare_blocks=2, masked=0.3, dtype="bfloat16"
    ),
    "not causal": MoBACase(lengths=(50, 50), is_causal=False, slots=3),
    "not causal, packed, masked": MoBACase(
        lengths=(3, 0, 30, 8), key_lengths=(40, 5, 20, 0), padding=3, spare_blocks=2, is_causal=False, masked=0.3
    ),
    "edited own": MoBACase(lengths=(55,), slots=3, edits="own", query_heads=2, key_heads=1),
    "edited, not causal": MoBACase(lengths=(60,), slots=3, edits="random", is_causal=False, dtype="bfloat16"),
    "edited own, packed, masked": MoBACase(
        lengths=(20, 0, 40), key_lengths=(33, 4, 40), padding=6, spare_blocks=1, edits="own", masked=0.4
    ),
    "long, bfloat16": MoBACase(lengths=(70,), dtype="bfloat16", head_dim=72, slots=3, is_long=True),
    "long, float16, packed, masked": MoBACase(
        lengths=(20, 0, 60), padding=9, spare_blocks=1, masked=0.3, dtype="float16", query_heads=4, is_long=True
    ),
    "no tokens": MoBACase(lengths=(0, 0)),
    "no queries": MoBACase(lengths=(0,), key_lengths=(20,)),
    "no keys": MoBACase(lengths=(20,), key_lengths=(0,)),
    "padding only": MoBACase(lengths=(), padding=20),
    "padding only, spare blocks": MoBACase(lengths=(), padding=20, spare_blocks=2),
}


# The interpreter has time for these cases, which reach every branch of the kernels. Calls without queries or blocks
# never reach the kernels.
INTERPRETED_CASES = (
    "more slots than blocks",
    "grouped heads",
    "own block only",
    "larger blocks",
    "float16, grouped",
    "packed, bfloat16",
    "fewer queries than keys",
    "more queries than keys",
    "key mask, packed, bfloat16",
    "not causal, packed, masked",
    "edited own, packed, masked",
    "long, bfloat16",
    "long, float16, packed, masked",
)


def pairs_of(names) -> list[tuple[str, str]]:
    """Return pairs of implementation and tested case.

    Pairs of one case are adjacent, because they share the expected results.
    """
    return [
        (implementation, name)
        for name in names
        for implementation in MODULES
        if implementation not in INTERPRETED or name in INTERPRETED_CASES
    ]


@pytest.mark.parametrize(("implementation", "name"), pairs_of(CASES))
def test_output_and_gradients_are_accurate(implementation, name):
    case = CASES[name]
    case.skip_unless_supported(implementation)
    assert_accurate(case, case.results(implementation), case.operands())


# Head dimensions and scales do not matter to routing and lists. Edits do not matter either: they replace the routing.
ROUTED = [name for name in CASES if not name.startswith(("edited", "one key head"))]
LISTED = [
    "grouped heads",
    "own block only",
    "more slots than blocks",
    "packed",
    "edited own, packed, masked",
    "no tokens",
]
LISTED += ["no keys", "padding only, spare blocks"]


def tables_agree(case: MoBACase, *arguments: jax.Array) -> None:
    """Assert that the tables of array code equal those of a loop over tokens."""
    make = compiled_quickly(functools.partial(moba_tables, case.problem, len(case.lengths)))
    blocks, queries = (np.array(x) for x in make(*arguments))
    assert blocks.dtype == queries.dtype == np.int32
    blocks[blocks[:, 3] == 0, 2] = 0  # the first query is unspecified where there is none
    np.testing.assert_array_equal(blocks, case.tables[0])
    np.testing.assert_array_equal(queries, case.tables[1])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lengths and case.problem.num_blocks])
def test_tables_of_offsets_match_loops(name):
    case = CASES[name]
    offsets = (np.cumsum([0, *x], dtype=np.int32) for x in (case.lengths, case.key_lengths or case.lengths))
    tables_agree(case, *(jnp.asarray(x) for x in offsets))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [(40, 40), (9, 40), (40, 9), (0, 20), (32, 32)])
def test_tables_of_a_batch_match_loops(lengths, is_causal):
    tables_agree(MoBACase(lengths=lengths[:1] * 3, key_lengths=lengths[1:] * 3, is_causal=is_causal))


def assert_routed(case: MoBACase, chosen: np.ndarray, operands) -> None:
    """Assert that each choice is allowed, in order, and within rounding as good as the best one.

    If scores differ clearly, the choice must be the best one.
    """
    assert chosen.dtype == np.int32
    expected, scores = exact_routing(case, operands)
    np.testing.assert_array_equal(chosen >= 0, expected >= 0)
    eps = 64 * float(jnp.finfo(jnp.float64 if case.dtype == "float64" else jnp.float32).eps)
    for n, t in np.ndindex(chosen.shape[:2]):
        row, best = (x[n, t][x[n, t] >= 0] for x in (chosen, expected))
        allowed = eps * (1 + np.abs(scores[n, t][scores[n, t] > -np.inf]).max(initial=0.0))
        assert len(set(row)) == len(row), "a block chosen twice"
        # Sorting is 1-Lipschitz, so at each place the choice is as good as the best one.
        assert (scores[n, t, row] >= scores[n, t, best] - allowed).all()
        candidates = np.sort(scores[n, t][scores[n, t] > -np.inf])
        if (np.diff(candidates) > 2 * allowed).all():
            np.testing.assert_array_equal(row, best)


@pytest.mark.parametrize(("implementation", "name"), pairs_of(ROUTED))
def test_routing_matches_loops(implementation, name):
    case = CASES[name]
    case.skip_unless_supported(implementation)
    assert_routed(case, case.route(implementation), case.operands())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("implementation", MODULES)
def test_routing_of_equal_scores_chooses_the_later_block_first(implementation, is_causal):
    """Small integers are not rounded, so ties are exact, and -0 equals 0."""
    case = MoBACase(lengths=(90,), is_causal=is_causal, slots=3, head_dim=16)
    case.skip_unless_supported(implementation)
    query, key, *_ = case.operands()
    query = jnp.sign(query).at[::3].set(0).at[1::6].set(-0.0)
    # Every second block has the same keys.
    key = jnp.where((jnp.arange(90) // 16 % 2 == 0)[:, None, None], 1.0, -1.0) * jnp.ones_like(key)
    chosen = case.route(implementation, (query, key))
    np.testing.assert_array_equal(chosen, exact_routing(case, (query, key))[0])
    np.testing.assert_array_equal(chosen[0, 60], [2, 1, 0] if is_causal else [5, 4, 3])


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_routing_of_a_block_with_nan_scores_never_chooses_it(implementation, value):
    """There are slots for every past block, but the block of key 20 has NaN scores and is not chosen."""
    case = MoBACase(lengths=(70, 20), slots=5)
    case.skip_unless_supported(implementation)
    query, key, *_ = case.operands()
    clean = case.route(implementation, (query, key))
    chosen = case.route(implementation, (query, key.at[20].set(value)))
    bad = 20 // case.block_size
    assert (clean == bad).any()
    np.testing.assert_array_equal(np.sort(chosen, axis=-1), np.sort(np.where(clean == bad, -1, clean), axis=-1))


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("factor", [2.0**20, 2.0**-20])
def test_routing_of_long_sequences_ignores_the_magnitude_of_queries_and_of_other_sequences(implementation, factor):
    """Halves of mean keys are float16, whose range is smaller."""
    case = MoBACase(lengths=(70, 70), dtype="bfloat16", slots=2, is_long=True)
    case.skip_unless_supported(implementation)
    query, key, *_ = case.operands()
    scaled = query * jnp.asarray(factor, query.dtype), key.at[70:].multiply(factor**3)
    chosen = case.route(implementation, (query, key))
    assert (chosen >= 0).any()
    np.testing.assert_array_equal(case.route(implementation, scaled), chosen)


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize(("query_scale", "key_scale"), [(2.0**126, 2.0**-30), (2.0**-100, 2.0**120), (1.0, 2.0**-62)])
def test_routing_of_long_sequences_takes_large_and_small_queries_and_keys(implementation, query_scale, key_scale):
    """The scales of halves, and the scores, stay in float32's range."""
    case = MoBACase(lengths=(70, 70), dtype="bfloat16", slots=2, is_long=True)
    case.skip_unless_supported(implementation)
    query, key, *_ = case.operands()
    query, key = (jnp.clip(x, -3, 3) for x in (query, key))
    chosen = case.route(implementation, (query, key))
    scaled = tuple(x * jnp.asarray(scale, x.dtype) for x, scale in ((query, query_scale), (key, key_scale)))
    assert (chosen >= 0).any()
    np.testing.assert_array_equal(case.route(implementation, scaled), chosen)


@pytest.mark.parametrize("implementation", MODULES)
def test_routing_of_long_sequences_keeps_small_elements_of_float16_queries(implementation):
    """Only elements 2^-16 of the largest one tell the blocks apart."""
    case = MoBACase(lengths=(64,), dtype="float16", slots=1, is_causal=False, query_heads=1, key_heads=1, is_long=True)
    case.skip_unless_supported(implementation)
    generator = np.random.default_rng(3)
    query = np.zeros((64, 1, 16), np.float16)
    query[:, 0, 0] = 2.0**8
    query[:, 0, 1:5] = 2.0**-8 * generator.uniform(1, 1.9, size=(64, 4))
    key = np.zeros((64, 1, 16), np.float16)
    key[:, 0, 1:5] = np.repeat(np.eye(4, dtype=np.float16), 16, axis=0)
    chosen = case.route(implementation, (jnp.asarray(query), jnp.asarray(key)))
    # Ties go to the later block.
    np.testing.assert_array_equal(chosen[0, :, 0], 3 - query[:, 0, 4:0:-1].argmax(axis=-1))


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_centroids_sum_to_float32_means(implementation, dtype):
    """A block whose keys are all masked has NaN means."""
    case = MoBACase(lengths=(70, 20), dtype=dtype, masked=0.3)
    case.skip_unless_supported(implementation)
    _, key, *_ = case.operands()
    _, blocks, *_ = case.arguments()
    key_mask = np.array(case.key_mask)
    start, length = map(int, blocks[1, :2])
    key_mask[start : start + length] = False
    options = {"interpret": implementation in INTERPRETED}
    find = functools.partial(load(implementation).centroids, case.problem, **options)
    found = compiled_quickly(find)(key, jnp.asarray(key_mask), blocks)
    assert found.dtype == dtype
    assert found.shape == (
        case.problem.num_blocks,
        case.problem.key_heads,
        1 if dtype == "float32" else 3,
        key.shape[-1],
    )
    means = np.asarray(whole_centroids(case.problem, found))
    assert np.isnan(means[1]).all()
    for block, (start, length, *_) in enumerate(np.asarray(blocks)):
        rows = np.arange(start, start + length)
        rows = rows[key_mask[rows]]
        if len(rows):
            exact = np.asarray(key, np.float64)[rows].mean(axis=0)
            np.testing.assert_allclose(means[block], exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", MODULES)
def test_routing_of_a_query_with_nan_chooses_nothing(implementation):
    case = MoBACase(lengths=(70, 20), slots=5)
    case.skip_unless_supported(implementation)
    query, key, *_ = case.operands()
    clean = np.array(case.route(implementation, (query, key)))
    chosen = case.route(implementation, (query.at[60, 1, 2].set(np.nan), key))
    assert (clean[1, 60] >= 0).any() and (chosen[1, 60] == -1).all()
    clean[1, 60] = -1
    np.testing.assert_array_equal(chosen, clean)


@pytest.mark.parametrize(("implementation", "name"), pairs_of(LISTED))
def test_lists_match_loops(implementation, name):
    case = CASES[name]
    case.skip_unless_supported(implementation)
    lists = case.make_lists(implementation)
    assert all(x.dtype == np.int32 and x.shape == y.shape for x, y in zip(lists, case.lists, strict=True))
    np.testing.assert_array_equal(lists.counts, case.lists.counts)
    np.testing.assert_array_equal(lists.degrees, case.lists.degrees)
    for n, block in np.ndindex(lists.counts.shape):
        actual, expected = (
            x.entries[n, x.offsets[n, block] : x.offsets[n, block] + x.counts[n, block]] for x in (lists, case.lists)
        )
        np.testing.assert_array_equal(actual, expected)


@st.composite
def cases(draw, longest: int) -> MoBACase:
    """Draw any call with sequences of up to `longest` tokens, including empty and one-token ones."""
    block_size = draw(st.sampled_from([16, 32]))
    length = st.one_of(st.sampled_from([0, 1, block_size]), st.integers(0, longest))
    lengths = tuple(draw(st.lists(length, max_size=3)))
    same = draw(st.booleans())
    key_heads = draw(st.integers(1, 2))
    is_causal = draw(st.booleans())
    return MoBACase(
        lengths=lengths,
        key_lengths=None if same else tuple(draw(length) for _ in lengths),
        padding=draw(st.sampled_from([0, 7])),
        query_heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        head_dim=draw(st.sampled_from([8, 16, 24])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        block_size=block_size,
        slots=draw(st.integers(0 if is_causal else 1, 4)),
        is_causal=is_causal,
        masked=draw(st.sampled_from([None, 0.3])),
        edits=draw(st.sampled_from(["none", "random", "own"] if is_causal else ["none", "random"])),
        spare_blocks=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize("implementation", MODULES)
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_drawn_cases_are_accurate(implementation, data):
    case = data.draw(cases(longest=60))
    module = load(implementation)
    hypothesis.assume((module.available() or module.supports(case.problem)) is None)
    assert_routed(case, case.route(implementation), case.operands())
    assert_accurate(case, case.results(implementation), case.operands())


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["grouped heads", "edited own, packed, masked", "no keys"])
def test_float64_results_are_accurate(implementation, name):
    case = dataclasses.replace(CASES[name], dtype="float64")
    with jax.enable_x64(True):
        assert_routed(case, case.route(implementation), case.operands())
        assert_accurate(case, case.results(implementation), case.operands())


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["packed, bfloat16", "key mask, packed, bfloat16"])
def test_results_with_x64_enabled_are_accurate(implementation, name):
    case = CASES[name]
    with jax.enable_x64(True):
        assert_routed(case, case.route(implementation), case.operands())
        assert all(x.dtype == np.int32 for x in case.make_lists(implementation))
        assert_accurate(case, case.results(implementation), case.operands())


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize(
    "name",
    ["packed", "fewer queries than keys", "key mask, packed, bfloat16", "not causal, packed, masked", "edited own"],
)
def test_nan_and_inf_stay_in_their_sequence(implementation, name):
    """NaN or infinity in one sequence, in padding and in masked keys changes no bit of any other sequence."""
    case = CASES[name]
    case.skip_unless_supported(implementation)
    problem = case.problem
    is_bad_query, is_bad_key = np.zeros(problem.query_tokens, bool), np.zeros(problem.key_tokens, bool)
    query_row, length, key_row, key_length = max(case.sequences, key=lambda sequence: sequence[1])
    if len(case.sequences) > 1:
        is_bad_query[query_row : query_row + length] = True
        is_bad_key[key_row : key_row + key_length] = True
    is_bad_query[sum(case.lengths) :] = True
    is_bad_key[sum(case.key_lengths or case.lengths) :] = True
    is_masked = np.zeros_like(is_bad_key) if case.key_mask is None else ~case.key_mask
    hides = is_bad_key | is_masked

    clean, compute = case.operands(), case.compute(implementation)
    clean_routing, before = case.route(implementation, clean), compute(*clean, case.arguments())
    where = (is_bad_query, hides, hides, is_bad_query, is_bad_query)
    num_queries, num_keys = sum(case.lengths), sum(case.key_lengths or case.lengths)
    for poison in (np.nan, np.inf):
        dirty = tuple(
            jnp.asarray(np.where(bad.reshape(-1, *[1] * (x.ndim - 1)), np.asarray(poison, x.dtype), x))
            for x, bad in zip(clean, where, strict=True)
        )
        routing = case.route(implementation, dirty)
        np.testing.assert_array_equal(clean_routing[:, ~is_bad_query], routing[:, ~is_bad_query])

        after = compute(*dirty, case.arguments())
        keep = (~is_bad_query, ~is_bad_query, ~is_bad_query, ~is_bad_key, ~is_bad_key)
        for x, y, rows in zip(before, after, keep, strict=True):
            np.testing.assert_array_equal(np.asarray(x)[rows], np.asarray(y)[rows])
        output, log_sum, *gradients = map(np.asarray, after)
        assert not output[num_queries:].any(), "padding rows must be 0 whatever they hold"
        assert (log_sum[num_queries:] == -np.inf).all()
        hidden_rows = (np.arange(problem.query_tokens) >= num_queries, is_masked, is_masked)
        for x, hidden in zip(gradients, hidden_rows, strict=True):
            assert not x[hidden].any(), "gradients of padding and of masked keys are 0"
        assert not any(x[num_keys:].any() for x in gradients[1:])


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("name", ["grouped heads", "edited own, packed, masked"])
def test_repeated_calls_agree_bitwise(implementation, name):
    case = CASES[name]
    case.skip_unless_supported(implementation)
    compute, operands, arguments = case.compute(implementation), case.operands(), case.arguments()
    for first, second in zip(compute(*operands, arguments), compute(*operands, arguments), strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(case.route(implementation), case.route(implementation))


@pytest.mark.parametrize("implementation", MODULES)
def test_slots_for_every_block_match_dense_causal_attention(implementation):
    case = MoBACase(lengths=(70,), slots=4, query_heads=4)
    case.skip_unless_supported(implementation)
    query, key, value, *_ = case.operands()
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(case.results(implementation)[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", MODULES)
def test_zero_slots_match_block_diagonal_attention(implementation):
    case = MoBACase(lengths=(70,), slots=0, query_heads=4)
    case.skip_unless_supported(implementation)
    query, key, value, *_ = case.operands()
    expected = block_diagonal_attention(query, key, value, block_size=16, is_causal=True, implementation="xla")
    np.testing.assert_allclose(case.results(implementation)[0], expected, rtol=2e-5, atol=2e-5)


def test_second_derivatives_match_the_reference():
    """The gradients can be differentiated again."""
    case = dataclasses.replace(CASES["edited own, packed, masked"], query_heads=4)
    *operands, cotangent, log_sum_cotangent = case.operands()
    directions = case.operands(seed=1)[:3]

    def gradients(implementation, *operands):
        module, problem, arguments = load(implementation), case.problem, case.arguments()
        output, log_sum = module.forward(problem, *operands, *arguments)
        cotangents = cotangent, log_sum_cotangent
        return module.backward(problem, *operands, *arguments, output, log_sum, *cotangents)

    def second(implementation):
        _, pull_back = jax.vjp(functools.partial(gradients, implementation), *operands)
        return pull_back(tuple(directions))

    results = (compiled_quickly(functools.partial(second, name))() for name in ARRAY_IMPLEMENTATIONS)
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
def test_shard_map_results_are_accurate(implementation):
    """Loops must start from arrays that vary over the mesh like their operands."""
    case, module = MoBACase(lengths=(40,), query_heads=4), load(implementation)
    key_mask, blocks, queries, *_ = case.arguments()
    mesh = jax.make_mesh((2,), ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    operands = [jax.device_put(jnp.stack([x, x]), rows) for x in case.operands()]

    def compute(*operands):
        query, key, value, *cotangents = (x[0] for x in operands)
        chosen = module.route(case.problem, query, key, key_mask, blocks, queries)
        arguments = key_mask, blocks, queries, module.make_lists(case.problem, chosen), None
        output, log_sum = module.forward(case.problem, query, key, value, *arguments)
        gradients = module.backward(case.problem, query, key, value, *arguments, output, log_sum, *cotangents)
        return tuple(x[None] for x in (output, log_sum, *gradients))

    spec = PartitionSpec("rows")
    results = compiled_quickly(jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec))(*operands)
    for row in range(2):
        assert_accurate(case, [jnp.asarray(np.asarray(x)[row]) for x in results], case.operands())


def test_routing_in_several_chunks_matches_loops(monkeypatch):
    case = CASES["fewer queries than keys"]
    scores_of_a_query = case.problem.query_heads * case.problem.num_blocks
    monkeypatch.setattr(xla_moba, "_ROUTING_SCORES", 8 * scores_of_a_query)
    assert case.problem.query_tokens % 8 != 0
    query, key, *_ = case.operands()
    key_mask, blocks, queries, *_ = case.arguments()
    # The call is compiled again, because other tests' program of this problem has one chunk.
    route = compiled_quickly(functools.partial(xla_moba.route, case.problem))
    assert_routed(case, np.asarray(route(query, key, key_mask, blocks, queries)), case.operands())


def test_xla_allocates_no_scores_of_all_pairs():
    """The temporary memory of a compiled call of 8,192 tokens is a fraction of one score per pair."""
    tokens, case = 8192, MoBACase(lengths=(8192,), query_heads=1, key_heads=1, slots=3, block_size=64)
    problem = case.problem

    def compute(query, key, value, cotangent, log_sum_cotangent, blocks, queries):
        chosen = xla_moba.route(problem, query, key, None, blocks, queries)
        arguments = None, blocks, queries, xla_moba.make_lists(problem, chosen), None
        output, log_sum = xla_moba.forward(problem, query, key, value, *arguments)
        cotangents = cotangent, log_sum_cotangent
        return xla_moba.backward(problem, query, key, value, *arguments, output, log_sum, *cotangents)

    rows = jax.ShapeDtypeStruct((tokens, 1, case.head_dim), jnp.float32)
    per_query = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    tables = (jax.ShapeDtypeStruct((n, 4), jnp.int32) for n in (problem.num_blocks, tokens))
    compiled = jax.jit(compute).lower(rows, rows, rows, rows, per_query, *tables).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * tokens * tokens / 16
