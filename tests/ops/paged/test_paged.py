"""Paged attention as users call it: forms of caches, queries and scales, with mistakes and merged states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import merge_attention_states, paged_attention
from blockdiag.common.dispatch import capabilities, resolve
from blockdiag.ops.paged import checks
from blockdiag.ops.paged.checks import describe_paged_call
from blockdiag.ops.paged.splits import choose_splits
from blockdiag.triton_kernels.paged import plans
from tests.ops.block_diagonal.test_transformations import assert_close, random_arrays
from tests.ops.paged_support import MIXED, MIXED_CASES, PagedCase, assert_accurate, simple_arguments
from tests.support import compiled_quickly

attend = functools.partial(paged_attention, return_residual=True)

CASES = {
    "paged": PagedCase(kv_lengths=(0, 1, 40), page_size=3, query_tokens=2, query_heads=4, key_heads=2),
    "contiguous": PagedCase(kv_lengths=(0, 1, 40), page_size=None, value_dim=24),
    "everything": PagedCase(
        kv_lengths=(2, 0, 40), query_lengths=(3, 1, 2), query_tokens=3, query_heads=4, key_heads=2, window=(9, None),
        soft_cap=5.0, sinks=True, score_scale=True, key_scale="token", value_scale="token", dtype="bfloat16",
        cache_dtype="float8_e4m3fn", scale=0.3,
    ),
    "not causal": PagedCase(kv_lengths=(2, 40), query_tokens=3, is_causal=False, window=(20, 1)),
    "int8": PagedCase(
        kv_lengths=(2, 0, 40), query_lengths=(3, 1, 2), query_tokens=3, query_heads=4, key_heads=2, sinks=True,
        score_scale=True, key_scale="token", value_scale="token", dtype="bfloat16", cache_dtype="int8", page_size=3,
    ),
    "e5m2 queries": PagedCase(kv_lengths=(1, 40), dtype="float8_e5m2", score_scale=True, value_scale="head"),
    "latent": PagedCase(
        kv_lengths=(2, 40), query_tokens=3, query_heads=4, is_latent=True, head_dim=24, value_dim=16,
        key_scale="token", score_scale=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("implementation", [None, "reference", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_output_and_residual_are_accurate(name, implementation):
    arguments = CASES[name].arguments()
    arrays = {key: x for key, x in arguments.items() if isinstance(x, jax.Array)}
    options = {key: x for key, x in arguments.items() if key not in arrays}
    function = compiled_quickly(functools.partial(attend, implementation=implementation, **options))
    assert_accurate(CASES[name], function(**arrays))


def test_call_outside_jit_is_accurate_and_returns_the_residual_only_on_request():
    case = CASES["paged"]
    output = paged_attention(**case.arguments())
    assert isinstance(output, jax.Array)
    assert_accurate(case, attend(**case.arguments()))


def test_numpy_arrays_and_lists_of_implementations_are_accepted():
    case = CASES["paged"]
    arguments = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in case.arguments().items()}
    assert_close(attend(**arguments, implementation=["triton", "xla"]), attend(**case.arguments()))


@pytest.mark.parametrize("query_dtype", ["float8_e4m3fn", jnp.float8_e5m2])
def test_queries_are_rounded_to_the_query_dtype(query_dtype):
    arguments = simple_arguments(tokens=3, dtype=jnp.float8_e4m3fn)
    # The largest finite number replaces greater ones.
    query = simple_arguments(tokens=3, seed=1)["query"].astype(jnp.bfloat16).at[0, 0, 0, 0].set(1e5)
    largest = float(jnp.finfo(query_dtype).max)
    rounded = jnp.clip(query, -largest, largest).astype(query_dtype)
    output, log_sum = attend(**(arguments | {"query": query}), query_dtype=query_dtype, query_scale=0.5)
    expected = attend(**(arguments | {"query": rounded}), query_scale=0.5)
    assert output.dtype == jnp.bfloat16 and jnp.isfinite(output.astype(jnp.float32)).all()
    assert_close((output, log_sum), expected)
    with pytest.raises(TypeError, match="paged_attention is for inference and cannot be differentiated"):
        jax.grad(lambda x: attend(**(arguments | {"query": x}), query_dtype=query_dtype)[0].sum().astype(float))(query)


# --- scales, windows, splits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["key_scale", "value_scale", "query_scale"])
def test_scalar_and_tensor_scales_are_the_same_factor(name):
    arguments, factor = simple_arguments(dtype=jnp.bfloat16), 1.5
    scaled = {"key_scale": "key_pages", "value_scale": "value_pages", "query_scale": "query"}[name]
    expected = attend(**(arguments | {scaled: arguments[scaled] * jnp.asarray(factor, jnp.bfloat16)}))
    forms = [factor, jnp.asarray(factor), jnp.full((2, 2), factor)]
    forms += [] if name == "query_scale" else [jnp.full((7, 4, 2), factor)]
    for form in forms:
        output, log_sum = attend(**arguments, **{name: form})
        np.testing.assert_allclose(log_sum, expected[1], rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(output.astype(jnp.float32), expected[0].astype(jnp.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("scale", [1.5, jnp.asarray([[0.5, 2.0], [3.0, 1.0]]), jnp.full((7, 4, 2), 0.7)], ids=np.ndim)
def test_key_scales_of_a_latent_cache_scale_keys_and_values(scale, implementation):
    arguments = simple_arguments(tokens=2)
    key_pages = arguments["key_pages"]
    values = key_pages[..., :5] if implementation != "triton" else key_pages
    expected = attend(**(arguments | {"value_pages": values}), key_scale=scale, value_scale=scale)
    actual = attend(
        **(arguments | {"value_pages": None}), value_dim=values.shape[-1], key_scale=scale,
        implementation=implementation,
    )  # fmt: skip
    assert_close(actual, expected)


def test_scales_of_queries_and_keys_multiply():
    arguments = simple_arguments()
    query_scale, key_scale = jnp.asarray([[1.0, 2.0], [0.5, 3.0]]), jnp.asarray([[2.0, 0.5], [1.5, 1.0]])
    actual = attend(**arguments, query_scale=query_scale, key_scale=key_scale)
    assert_close(actual, attend(**arguments, query_scale=query_scale * key_scale))
    assert_close(
        attend(**arguments, query_scale=query_scale, key_scale=jnp.full((7, 4, 2), 0.5)),
        attend(**arguments, query_scale=query_scale * 0.5),
    )


def describe(arguments, **options):
    """Return the problem of a call."""
    defaults = dict.fromkeys(
        ("query_lengths", "query_offsets", "max_query_length", "scale", "local_window_size", "logits_soft_cap", "sinks",
         "key_scale", "value_scale", "query_scale", "num_splits", "split_size")
    )  # fmt: skip
    return describe_paged_call(**(defaults | {"is_causal": True} | arguments | options))


def test_windows_that_mask_nothing_are_normalised_to_none():
    """Equivalent windows share one program: a window as long as the cache is no window."""
    windows = {
        (True, 3): (True, (3, None)),
        (True, (3, 0)): (True, (3, None)),
        (True, (None, 5)): (True, (None, None)),
        (True, 12): (True, (None, None)),
        (True, 2**40): (True, (None, None)),
        (False, 3): (False, (3, 3)),
        (False, (3, 0)): (True, (3, None)),
        (False, (12, 12)): (False, (None, 12)),
        (False, (12, 13)): (False, (None, None)),
        (False, None): (False, (None, None)),
    }
    for (is_causal, window), expected in windows.items():
        problem = describe(simple_arguments(), is_causal=is_causal, local_window_size=window)
        assert (problem.is_causal, problem.window) == expected


def test_splits_follow_from_shapes():
    arguments = simple_arguments()
    assert describe(arguments).num_splits == 1
    # 12 keys are in only one tile.
    assert describe(arguments, num_splits=9).num_splits == 1
    assert describe(arguments, split_size=64).num_splits == 1
    longer = arguments | {"page_table": jnp.zeros((2, 250), jnp.int32)}  # 1,000 keys
    shapes = dict(batch=2, query_tokens=1, group_size=2, key_heads=2, max_keys=1000)
    assert describe(longer).num_splits == choose_splits(**shapes) > 1
    assert describe(longer, num_splits=9).num_splits == 9
    assert describe(longer, num_splits=256).num_splits == 16
    assert describe(longer, split_size=192).num_splits == 6


def test_wide_heads_choose_splits_for_one_program_a_multiprocessor():
    """A program of 576 columns occupies a multiprocessor of 132."""
    shapes = dict(query_tokens=1, key_heads=1, is_wide=True)
    assert choose_splits(batch=32, group_size=64, max_keys=8192, **shapes) == 4
    assert choose_splits(batch=32, group_size=128, max_keys=8192, **shapes) == 2
    problem = PagedCase(kv_lengths=(8192,) * 32, query_heads=64, is_latent=True, head_dim=576, value_dim=512).problem
    assert checks.with_chosen_splits(problem).num_splits == 4


def test_choose_splits_occupies_the_gpu_within_the_number_of_keys():
    """Splits occupy a GPU and are at most as many as the keys allow. Many sequences need almost no splits."""
    shapes = dict(query_tokens=1, group_size=4, key_heads=8)
    for batch in (1, 3, 16, 32, 1000):
        for max_keys in (0, 1, 64, 1000, 8192, 131072):
            splits = choose_splits(**shapes, batch=batch, max_keys=max_keys)
            assert 1 <= splits <= max(1, min(128, -(-max_keys // 64)))
            assert batch < 1000 or splits <= 2
            assert max_keys < 131072 or splits * batch * 8 >= 132


def test_num_splits_and_split_size_change_nothing_but_rounding():
    arguments = simple_arguments() | {
        "page_table": jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 50)), jnp.int32)
    }
    arguments["kv_lengths"] = jnp.asarray([200, 77], jnp.int32)
    expected = attend(**arguments)
    for options in (dict(num_splits=3), dict(split_size=64), dict(num_splits=3, implementation="triton")):
        assert_close(attend(**arguments, **options), expected)


def test_new_lengths_and_pages_do_not_recompile():
    from blockdiag.ops.paged.api import _attention

    attend(**simple_arguments(seed=3))
    before = _attention._cache_size()
    attend(**simple_arguments(seed=4))
    assert _attention._cache_size() == before


def _divided(arguments: dict) -> tuple[dict, dict]:
    """Divide arguments into arrays and options."""
    arrays = {key: x for key, x in arguments.items() if isinstance(x, jax.Array)}
    return arrays, {key: x for key, x in arguments.items() if key not in arrays}


# --- packed queries -----------------------------------------------------------------------------------------------


def padded_to_packed(case: PagedCase) -> tuple[dict, np.ndarray]:
    """Return the call with packed queries and two more rows, and a mask of the packed rows in the padded query."""
    arguments = case.arguments()
    lengths = arguments.pop("query_lengths")
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    is_row = np.arange(case.query_tokens)[None, :] < np.asarray(lengths)[:, None]
    rows = arguments["query"][is_row]
    arguments["query"] = jnp.concatenate([rows, jnp.full((2, *rows.shape[1:]), jnp.nan, rows.dtype)])
    return arguments | {"query_offsets": jnp.asarray(offsets)}, is_row


@pytest.mark.parametrize("max_query_length", [None, 3])
def test_packed_queries_equal_padded_queries_bitwise(max_query_length):
    case = dataclasses.replace(CASES["everything"], kv_lengths=(2, 0, 40, 30), query_lengths=(3, 0, 2, 1))
    expected = attend(**case.arguments())
    packed, is_row = padded_to_packed(case)
    actual = attend(**packed, max_query_length=max_query_length)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a[:-2], np.asarray(e)[is_row])
    assert not np.asarray(actual[0][-2:]).any() and (np.asarray(actual[1][-2:]) == -np.inf).all()


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"split_size": 64}], ids=str)
@pytest.mark.parametrize("name", MIXED_CASES)
def test_packed_prompts_beside_decoding_sequences_are_accurate(name, options, implementation):
    assert_packed_call_is_accurate(MIXED_CASES[name], implementation, options)


def assert_packed_call_is_accurate(case, implementation, options):
    packed, is_row = padded_to_packed(case)
    arrays = {key: x for key, x in packed.items() if isinstance(x, jax.Array)}
    options = options | {key: x for key, x in packed.items() if key not in arrays}
    results = compiled_quickly(functools.partial(attend, implementation=implementation, **options))(**arrays)
    padded = []
    for x, outside in zip(results, (0, -np.inf), strict=True):
        assert (np.asarray(x[-2:], np.float32) == outside).all()
        found = np.full((*is_row.shape, *x.shape[1:]), outside, x.dtype)
        found[is_row] = np.asarray(x)[:-2]
        padded.append(found)
    assert_accurate(case, padded)


@pytest.fixture
def prompts_apart(monkeypatch):
    """Compute prompts apart from other sequences however few they are."""
    monkeypatch.setattr(checks, "FEWEST_PROMPT_ROWS", 0)


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("name", MIXED_CASES)
def test_packed_prompts_computed_apart_are_accurate(name, implementation, prompts_apart):
    arrays, options = _divided(padded_to_packed(MIXED_CASES[name])[0])
    problem = describe(arrays, **options)
    # All cases have sequences on both sides of the limit.
    assert problem.few_queries == 32 // problem.group_size
    assert_packed_call_is_accurate(MIXED_CASES[name], implementation, {})


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("has_lengths", [True, False])
@pytest.mark.parametrize("name", ["causal", "two key heads, pages of 3", "contiguous", "all keys", "window and sinks"])
def test_batches_of_prompts_are_accurate(name, has_lengths, implementation, prompts_apart):
    case = dataclasses.replace(MIXED_CASES[name], dtype="bfloat16")
    case = case if has_lengths else dataclasses.replace(case, query_lengths=None)
    arrays, options = _divided(case.arguments())
    assert describe(arrays, **options).few_queries == 0
    function = compiled_quickly(functools.partial(attend, implementation=implementation, **options))
    assert_accurate(case, function(**arrays))


def test_sequences_beside_prompts_are_merged_from_splits_into_the_same_results(prompts_apart):
    """The cache is long enough for several splits of the sequences with few queries."""
    arguments = padded_to_packed(MIXED)[0]
    table = arguments["page_table"]
    arguments["page_table"] = jnp.pad(table, ((0, 0), (0, 4096 // MIXED.page_size - table.shape[1])))
    problem = describe(arguments)
    assert problem.few_queries is not None and problem.num_splits > 1
    for one, other in zip(attend(**arguments, implementation="triton"), attend(**arguments, num_splits=1), strict=True):
        np.testing.assert_allclose(one[:-2], other[:-2], rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(one[-2:], other[-2:])


def test_prompts_computed_apart_under_vmap_equal_single_calls(prompts_apart):
    test_packed_queries_under_vmap_equal_single_calls([0, 1, 1, 40, 41, 80, 83])


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
def test_prompts_with_more_heads_than_a_tile_has_rows_are_accurate(implementation, prompts_apart):
    """A tile then has one query, as sequences with few queries have."""
    case = dataclasses.replace(
        MIXED, query_heads=96, kv_lengths=(20, 5), query_lengths=(9, 1), query_tokens=9, dtype="bfloat16"
    )
    assert_packed_call_is_accurate(case, implementation, {})


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}], ids=str)
def test_tiles_on_the_first_axis_of_a_grid_are_accurate(options, prompts_apart, monkeypatch):
    """Where there are more of them than the last axis can have."""
    monkeypatch.setattr(plans, "_MOST_ON_AXIS", 1)
    assert_packed_call_is_accurate(dataclasses.replace(MIXED, dtype="float16"), "triton", options)


def test_calls_that_are_no_prompts_keep_their_splits():
    """One query of many heads, drafts, and a symbolic number of heads."""
    problem = dataclasses.replace(
        PagedCase(kv_lengths=(9,)).problem, batch=64, query_heads=128, key_heads=1, max_pages=8192, page_size=16,
        num_pages=8192, query_dtype="bfloat16", key_dtype="bfloat16", value_dtype="bfloat16",
    )  # fmt: skip
    assert checks.with_chosen_splits(problem).few_queries is None
    drafts = dataclasses.replace(problem, batch=13, query_tokens=5, key_heads=8)
    assert checks.with_chosen_splits(drafts).num_splits > 1
    assert checks.with_chosen_splits(dataclasses.replace(problem, query_tokens=64)).few_queries == 0
    (heads,) = jax.export.symbolic_shape("h")
    symbolic = dataclasses.replace(problem, query_tokens=64, query_heads=2 * heads, key_heads=heads)
    assert checks.with_chosen_splits(symbolic).few_queries is None


def test_windows_of_packed_queries_end_at_the_rows():
    """A window that no query can reach is none, though queries of a sequence have no bound."""
    arguments = simple_arguments(batch=1, tokens=3)
    packed = arguments | {"query": arguments["query"][0], "query_offsets": jnp.asarray([0, 3], jnp.int32)}
    problem = describe(packed, is_causal=False, local_window_size=(None, 2**31 - 1))
    assert problem.window == (None, None)


def test_vmap_over_no_elements_returns_none():
    arguments = simple_arguments()
    query = jnp.zeros((0, *arguments.pop("query").shape))
    output, log_sum = jax.vmap(lambda query: attend(query, **arguments))(query)
    assert output.shape == query.shape and log_sum.shape == query.shape[:-1]


def test_number_of_tiles_grows_with_queries_and_sequences():
    """A prompt of 1,024 queries beside 31 single ones: about a hundred tiles of 16 queries, not 32 of 1,024."""
    case = PagedCase(kv_lengths=(8192,) * 31 + (1024,), query_heads=32, key_heads=8)
    problem = dataclasses.replace(case.problem, query_tokens=1055, packed_rows=1055, has_query_lengths=True)
    assert (problem.tiled.num_tiles, problem.tiled.query_tokens) == (1055 // 16 + 34, 16)
    short = dataclasses.replace(problem, query_tokens=2).tiled
    assert (short.num_tiles, short.query_tokens) == (1055 // 2 + 34, 2)
    apart = dataclasses.replace(problem, few_queries=8).tiled
    assert (apart.num_tiles, apart.query_tokens) == (1055 // 32 + 34, 32)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_bits_of_packed_sequences_do_not_depend_on_others_with_a_split_size(implementation):
    call = functools.partial(attend, implementation=implementation, split_size=64)
    packed, _ = padded_to_packed(dataclasses.replace(MIXED, dtype="bfloat16"))
    together = call(**packed)
    for b, (first, end) in enumerate(zip(packed["query_offsets"][:-1], packed["query_offsets"][1:], strict=True)):
        if first == end:
            continue
        own = packed | {
            "query": packed["query"][first:end],
            "query_offsets": jnp.asarray([0, end - first], jnp.int32),
            "page_table": packed["page_table"][b : b + 1],
            "kv_lengths": packed["kv_lengths"][b : b + 1],
        }
        for one, whole in zip(call(**own), together, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(whole[first:end], np.float32))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("chunk", [16, 32])
def test_prompts_in_chunks_of_whole_tiles_equal_the_whole_bitwise_with_a_split_size(chunk, implementation):
    call = functools.partial(attend, implementation=implementation, split_size=64)
    case = dataclasses.replace(MIXED, kv_lengths=(70,), query_lengths=(70,), query_tokens=70, dtype="bfloat16")
    packed, _ = padded_to_packed(case)
    whole = [np.asarray(x[:70], np.float32) for x in call(**packed)]
    for first in range(0, 70, chunk):
        end = min(70, first + chunk)
        part = packed | {
            "query": packed["query"][first:end],
            "query_offsets": jnp.asarray([0, end - first], jnp.int32),
            "kv_lengths": jnp.asarray([end], jnp.int32),
        }
        for one, expected in zip(call(**part), whole, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), expected[first:end])


@pytest.mark.parametrize(
    "other", [[0, 1, 1, 40, 41, 80, 83], [0, 0, 1, 2, 3, 4, 5]], ids=["prompts", "sequences of at most one query"]
)
def test_packed_queries_under_vmap_equal_single_calls(other):
    packed, _ = padded_to_packed(MIXED)
    queries = jnp.stack([packed["query"], 2 * packed["query"]])
    first = packed["query_offsets"] if other[3] > 3 else jnp.asarray([0, 1, 2, 2, 3, 4, 4], jnp.int32)
    offsets = jnp.stack([first, jnp.asarray(other, jnp.int32)])
    given = {key: x for key, x in packed.items() if key not in ("query", "query_offsets")}
    given["max_query_length"] = None if other[3] > 3 else 1
    mapped = jax.vmap(lambda query, offsets: attend(query, query_offsets=offsets, **given))(queries, offsets)
    for i in range(2):
        one = attend(queries[i], query_offsets=offsets[i], **given)
        for x, y in zip(mapped, one, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-6, atol=2e-6)


def test_garbage_offsets_of_packed_prompts_are_clipped():
    packed, _ = padded_to_packed(MIXED)
    call = compiled_quickly(functools.partial(attend, is_causal=True))
    arrays = {key: x for key, x in packed.items() if isinstance(x, jax.Array) and key != "query_offsets"}
    wild, tame = ([-3, 50, 20, 60, 99, 10**9, -5], [0, 50, 50, 60, 85, 85, 85])
    for one, other in zip(
        *(call(**arrays, query_offsets=jnp.asarray(x, jnp.int32)) for x in (wild, tame)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_packed_queries_beyond_max_query_length_are_right_or_nan_with_traced_offsets(implementation):
    arguments = simple_arguments(batch=3)
    query = arguments.pop("query")
    rows = jnp.concatenate([query[:, 0]] * 2)
    given = functools.partial(attend, implementation=implementation, **arguments)
    call = compiled_quickly(functools.partial(given, max_query_length=2))
    offsets = jnp.asarray([0, 1, 4, 6], jnp.int32)
    is_bad = np.asarray([False, True, True, True, False, False])
    for found, expected in zip(call(rows, query_offsets=offsets), given(rows, query_offsets=offsets), strict=True):
        is_nan = np.isnan(found)
        assert not is_nan[~is_bad].any()
        np.testing.assert_allclose(np.where(is_nan, 0, found), np.where(is_nan, 0, expected), rtol=2e-6, atol=2e-6)
    # Offsets are clipped and made non-decreasing.
    wild, tame = jnp.asarray([-3, 2, 1, 99], jnp.int32), jnp.asarray([0, 2, 2, 6], jnp.int32)
    np.testing.assert_array_equal(call(rows, query_offsets=wild)[0], call(rows, query_offsets=tame)[0])


@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize(
    ("batch", "tokens", "pages", "columns", "rows"),
    [
        (0, 1, 7, 3, None),
        (2, 0, 7, 3, None),
        (2, 1, 0, 3, None),
        (2, 1, 7, 0, None),
        (2, None, 7, 3, 0),
        (0, None, 7, 3, 4),
    ],
)
def test_empty_calls_return_zeros(batch, tokens, pages, columns, rows, implementation):
    """One dimension of the call is 0."""
    shape = (batch, tokens, 4, 8) if rows is None else (rows, 4, 8)
    packing = {} if rows is None else {"query_offsets": jnp.zeros(batch + 1, jnp.int32)}
    pools = jnp.ones((pages, 4, 2, 8)), jnp.ones((pages, 4, 2, 24))
    table, lengths = jnp.zeros((batch, columns), jnp.int32), jnp.zeros(batch, jnp.int32)
    options = dict(value_scale=jnp.ones((pages, 4, 2)), implementation=implementation)
    output, log_sum = attend(jnp.ones(shape), *pools, table, lengths, **options, **packing)
    assert output.shape == (*shape[:-1], 24) and log_sum.shape == shape[:-1]
    assert not output.any() and (log_sum == -jnp.inf).all()


def test_empty_contiguous_cache_returns_zeros():
    output, log_sum = attend(
        jnp.ones((2, 1, 4, 8)), jnp.ones((2, 0, 2, 8)), jnp.ones((2, 0, 2, 8)), None, jnp.zeros(2, jnp.int32)
    )
    assert not output.any() and (log_sum == -jnp.inf).all()


def test_out_of_range_pages_and_lengths_are_clipped_when_traced():
    arguments = simple_arguments()
    call = compiled_quickly(attend)
    wild = arguments | dict(
        page_table=jnp.asarray([[-9, 2**31 - 1, 7], [1, 2, 3]], jnp.int32), kv_lengths=jnp.asarray([99, -3], jnp.int32)
    )
    tame = arguments | dict(
        page_table=jnp.asarray([[0, 6, 6], [1, 2, 3]], jnp.int32), kv_lengths=jnp.asarray([12, 0], jnp.int32)
    )
    assert_close(call(**wild), call(**tame), 0)


# --- who computes it ----------------------------------------------------------------------------------------------


def test_capabilities_list_the_implementations_of_paged_attention():
    problem = describe(simple_arguments())
    assert set(capabilities(problem)) == {"reference", "xla", "triton"}
    assert resolve(problem, None).elsewhere.name == "xla"
    double = dataclasses.replace(problem, query_dtype="float64", key_dtype="float64", value_dtype="float64")
    assert resolve(double, None).cuda.name == "xla"
    assert resolve(dataclasses.replace(double, batch=0), ("triton",)).elsewhere.name == "reference"


def test_unsupported_implementation_raises_not_implemented_error():
    arguments = simple_arguments()
    arguments |= {name: arguments[name][..., :7] for name in ("query", "key_pages")}
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot compute this call"):
        paged_attention(**arguments, implementation="triton")


# --- mistakes -----------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def integers(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


GOOD = dict(
    query=zeros(2, 3, 4, 8), key_pages=zeros(5, 16, 2, 8), value_pages=zeros(5, 16, 2, 24),
    page_table=zeros(2, 3, dtype=jnp.int32), kv_lengths=integers(0, 48),
)  # fmt: skip
PACKED = dict(query=zeros(80, 4, 8), query_offsets=integers(0, 3, 60))
MISTAKES = {
    "rank 2": (dict(query=zeros(4, 8)), r"`query` must have shape \[B, T, N, H\], or .* got \(4, 8\); reshape"),
    "no heads": (dict(query=zeros(2, 3, 0, 8)), "`query` must have at least one head"),
    "rank 3 without offsets": (
        dict(query=zeros(2, 4, 8)),
        r"`query` of shape \(2, 4, 8\) needs `query_offsets`, .*None",
    ),
    "key head dimension": (
        dict(key_pages=zeros(5, 16, 2, 16)),
        r"`key_pages` must have shape \[P, page_size, K, 8\] .* got \(5, 16, 2, 16\); a contiguous",
    ),
    "key rank": (dict(key_pages=zeros(80, 2, 8)), r"`key_pages` must have shape .* got \(80, 2, 8\)"),
    "value pages": (
        dict(value_pages=zeros(5, 8, 2, 8)),
        r"`value_pages` must have shape \(5, 16, 2, V\) .* got \(5, 8, 2, 8\); one page number",
    ),
    "neither values nor their number": (
        dict(value_pages=None),
        r"`value_dim` must be an integer of 1\.\.8, known when tracing, without `value_pages`, got None; it is",
    ),
    "more values than columns": (
        dict(value_pages=None, value_dim=9),
        r"`value_dim` must be an integer of 1\.\.8, .* got 9",
    ),
    "values and their number": (
        dict(value_dim=8),
        r"`value_dim` and `value_pages` exclude each other, got 8 and values of shape \(5, 16, 2, 24\); pass",
    ),
    "value scale of a latent cache": (
        dict(value_pages=None, value_dim=8, value_scale=2.0),
        "`value_scale` must be None without `value_pages`, got a scale; the values .* `key_scale` is a factor on both",
    ),
    "no value elements": (dict(value_pages=zeros(5, 16, 2, 0)), r"`value_pages` must have shape \(5, 16, 2, V\)"),
    "heads do not divide": (dict(query=zeros(2, 3, 3, 8)), "must be a multiple .* got 3 and 2"),
    "no page tokens": (
        dict(key_pages=zeros(5, 0, 2, 8), value_pages=zeros(5, 0, 2, 8), kv_lengths=integers(0, 0)),
        "`key_pages` must have pages of at least one token",
    ),
    "query of integers": (
        dict(query=zeros(2, 3, 4, 8, dtype=jnp.int32)),
        "`query` must have one of the dtypes .* int32",
    ),
    "other cache dtype": (
        dict(key_pages=zeros(5, 16, 2, 8, dtype=jnp.bfloat16)),
        r"`key_pages` must have one of \D+ \['float32', 'float8_e4m3fn', 'float8_e5m2', 'int8'\] .* got bfloat16; cast",
    ),
    "wide cache of eight-bit queries": (
        dict(query=zeros(2, 3, 4, 8, dtype=jnp.float8_e5m2), key_pages=zeros(5, 16, 2, 8, dtype=jnp.float8_e5m2)),
        r"`value_pages` must have one of the dtypes \['float8_e4m3fn', 'float8_e5m2'\] .* got float32",
    ),
    "integers beside eight-bit queries": (
        dict(query=zeros(2, 3, 4, 8, dtype=jnp.float8_e5m2), key_pages=zeros(5, 16, 2, 8, dtype=jnp.int8)),
        r"`key_pages` must have one of the dtypes \['float8_e4m3fn', 'float8_e5m2'\] .* got int8",
    ),
    "unsigned integers": (
        dict(key_pages=zeros(5, 16, 2, 8, dtype=jnp.uint8)),
        "`key_pages` must have one of the dtypes .* got uint8",
    ),
    "integers without scale": (
        dict(key_pages=zeros(5, 16, 2, 8, dtype=jnp.int8)),
        "`key_scale` must be given for `key_pages` of int8, .* got None; pass pages of scales, or 1.0",
    ),
    "integers without scale of values": (
        dict(value_pages=zeros(5, 16, 2, 24, dtype=jnp.int8), key_scale=1.0),
        "`value_scale` must be given for `value_pages` of int8, .* got None",
    ),
    "query dtype beside integers": (
        dict(query_dtype="float8_e5m2", key_pages=zeros(5, 16, 2, 8, dtype=jnp.int8), key_scale=1.0),
        "`query_dtype` needs `key_pages` of eight-bit floats, .* got int8; leave `query_dtype` out",
    ),
    "lengths of int64": (
        dict(kv_lengths=np.asarray([0, 4])),
        "`kv_lengths` must be an int32 array, got int64; convert",
    ),
    "lengths of a list": (dict(kv_lengths=[0, 4]), "`kv_lengths` must be an int32 array, got <class 'list'>"),
    "too many lengths": (dict(kv_lengths=integers(0, 1, 2)), r"`kv_lengths` must have shape \(2,\), .* got \(3,\)"),
    "length beyond": (
        dict(kv_lengths=integers(3, 49)),
        r"`kv_lengths` must lie in \[0, 48\], the 48 keys that `page_table` has room for, got 49",
    ),
    "negative length": (dict(kv_lengths=integers(-1, 99)), "`kv_lengths` must lie in .* got -1; a sequence without"),
    "table of other sequences": (
        dict(page_table=zeros(3, 3, dtype=jnp.int32)),
        r"`page_table` must have shape \(2, max_pages\), .* got \(3, 3\)",
    ),
    "table of one row": (dict(page_table=integers(0, 1)), r"`page_table` must have rank 2, got shape \(2,\)"),
    "page beyond": (
        dict(page_table=jnp.asarray([[9, 9, 9], [1, 5, 9]], jnp.int32), kv_lengths=integers(0, 17)),
        r"`page_table` must hold page numbers in \[0, 5\) .* got 5 at \[1, 1\]; entries beyond",
    ),
    "negative page": (
        dict(page_table=jnp.asarray([[0, -1, 0], [0, 0, 0]], jnp.int32), kv_lengths=integers(17, 17)),
        r"`page_table` must hold .* got -1 at \[0, 1\]",
    ),
    "contiguous, other sequences": (
        dict(page_table=None),
        r"`key_pages` without a `page_table` must have shape \[B, S, K, H\] .* 2 sequences .* got \(5, 16, 2, 8\)",
    ),
    "contiguous, length beyond": (
        dict(page_table=None, key_pages=zeros(2, 9, 2, 8), value_pages=zeros(2, 9, 2, 8), kv_lengths=integers(1, 10)),
        r"`kv_lengths` must lie in \[0, 9\], the 9 keys that `key_pages` has room for, got 10",
    ),
    "query length beyond": (
        dict(query_lengths=integers(1, 4)),
        r"`query_lengths` must lie in \[0, 3\], the 3 queries .* got 4",
    ),
    "too few query lengths": (
        dict(query_lengths=integers(1)),
        r"`query_lengths` must have shape \(2,\), .* got \(1,\)",
    ),
    "packed, a batch": (
        dict(query_offsets=integers(0, 1, 2)),
        r"`query_offsets` describes packed .* \(2, 3, 4, 8\); pass",
    ),
    "packed, lengths too": (
        PACKED | dict(query_lengths=integers(3, 57)),
        "`query_lengths` and `query_offsets` exclude",
    ),
    "packed, other sequences": (
        PACKED | dict(query_offsets=integers(0, 60)),
        r"`kv_lengths` must have shape \(1,\), .* got \(2,\)",
    ),
    "packed, decreasing": (
        PACKED | dict(query_offsets=integers(0, 9, 3)),
        "`query_offsets` must not decrease, got 9 then 3",
    ),
    "packed, beyond": (
        PACKED | dict(query_offsets=integers(0, 9, 81)),
        "`query_offsets` must end within the 80 .* got 81",
    ),
    "packed, too long": (
        PACKED | dict(query_offsets=integers(0, 3, 70), max_query_length=64),
        "`query_offsets` describes a sequence of 67 queries, more than max_query_length=64; pass max_query_length=67",
    ),
    "longest without offsets": (dict(max_query_length=3), "`max_query_length` is for packed queries, .* got 3"),
    "longest of a float": (PACKED | dict(max_query_length=60.0), r"`max_query_length` must be an integer .* got 60\.0"),
    "negative scale": (dict(scale=-1.0), r"`scale` must be a positive number, .* got -1\.0"),
    "causal text": (dict(is_causal="yes"), "`is_causal` must be True or False, .* got 'yes'"),
    "negative window": (dict(local_window_size=-1), "`local_window_size` must be an integer from 0, .* got -1"),
    "window of three": (dict(local_window_size=(1, 2, 3)), r"`local_window_size` .* got \(1, 2, 3\)"),
    "window of a float": (dict(local_window_size=(None, 2.0)), r"`local_window_size` .* got \(None, 2\.0\)"),
    "window True": (dict(local_window_size=True), "`local_window_size` .* got True"),
    "soft cap 0": (dict(logits_soft_cap=0.0), r"`logits_soft_cap` must be a positive number, .* got 0\.0; pass None"),
    "sinks of key heads": (dict(sinks=zeros(2)), r"`sinks` must have shape \(4,\), .* got \(2,\)"),
    "sinks of integers": (dict(sinks=integers(1, 2, 3, 4)), "`sinks` must be an array of floats, got int32"),
    "sinks of a list": (dict(sinks=[0.0] * 4), "`sinks` must be an array of floats, got <class 'list'>"),
    "key scale of query heads": (
        dict(key_scale=zeros(2, 4)),
        r"`key_scale` must have shape \(\), \(2, 2\), .* or \(5, 16, 2\), one for each token .* got \(2, 4\)",
    ),
    "value scale of bfloat16": (
        dict(value_scale=zeros(2, 2, dtype=jnp.bfloat16)),
        "`value_scale` must be a number or a float32 array, got bfloat16; convert",
    ),
    "value scale True": (
        dict(value_scale=True),
        "`value_scale` must be a number or a float32 array, got <class 'bool'>",
    ),
    "query scale of tokens": (
        dict(query_scale=zeros(5, 16, 2)),
        r"`query_scale` must have shape \(\), \(2, 2\), one .*head, got \(5, 16, 2\)",
    ),
    "query dtype of 16 bits": (
        dict(query_dtype="float16"),
        r"`query_dtype` must be one of \['float8_e4m3fn', 'float8_e5m2'\] or None, got 'float16'",
    ),
    "query dtype beside a wide cache": (
        dict(query_dtype="float8_e5m2"),
        "`query_dtype` needs `key_pages` of eight-bit floats, .* got .*float32; leave `query_dtype` out",
    ),
    "no splits": (dict(num_splits=0), r"`num_splits` must be an integer of 1\.\.256, .* got 0; leave it out"),
    "splits True": (dict(num_splits=True), "`num_splits` .* got True"),
    "split size 100": (dict(split_size=100), "`split_size` must be a positive multiple of 64, .* got 100"),
    "both splits": (
        dict(num_splits=2, split_size=64),
        "`num_splits` and `split_size` exclude each other, got 2 and 64",
    ),
    "unknown implementation": (
        dict(implementation="pallas"),
        r"`implementation` must be None, one of \['reference', 'xla', 'triton'\] .* got 'pallas'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_value_error(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        paged_attention(**(GOOD | changes))


def test_valid_arguments_of_the_invalid_cases_are_accepted():
    assert paged_attention(**GOOD).shape == (2, 3, 4, 24)
    assert paged_attention(**(GOOD | PACKED)).shape == (80, 4, 24)
    assert paged_attention(**(GOOD | {"value_pages": None}), value_dim=5).shape == (2, 3, 4, 5)


def test_traced_options_raise_value_error():
    for name in ("num_splits", "split_size", "local_window_size", "logits_soft_cap", "scale"):
        with pytest.raises(ValueError, match=f"`{name}` must be .* known when tracing"):
            jax.jit(lambda x, name=name: paged_attention(**GOOD, **{name: x}))(64)


# --- merged states ------------------------------------------------------------------------------------------------


def test_merged_states_of_parts_match_the_whole():
    """Attention to the first keys and to the rest is merged, as sequences of arrays and stacked."""
    arguments = simple_arguments(tokens=2) | dict(kv_lengths=integers(12, 9))
    expected = attend(**arguments, is_causal=False)
    first = attend(**(arguments | dict(kv_lengths=integers(8, 8))), is_causal=False)
    rest = arguments | dict(page_table=arguments["page_table"][:, 2:], kv_lengths=integers(4, 1))
    nothing = attend(**(arguments | dict(kv_lengths=integers(0, 0))))
    outputs, lses = zip(first, nothing, attend(**rest, is_causal=False), strict=True)
    assert_close(merge_attention_states(outputs, lses), expected)
    assert_close(merge_attention_states(jnp.stack(outputs), jnp.stack(lses)), expected)


def test_merge_ignores_parts_with_a_log_sum_exp_of_minus_infinity():
    outputs = jnp.asarray([[[1.0], [jnp.nan], [3.0]], [[jnp.nan], [jnp.inf], [5.0]]])
    lses = jnp.asarray([[0.5, -jnp.inf, 1.0], [-jnp.inf, -jnp.inf, 1.0]])
    output, lse = merge_attention_states(outputs, lses)
    np.testing.assert_allclose(output[:, 0], [1, 0, 4])
    np.testing.assert_allclose(lse, [0.5, -np.inf, 1 + np.log(2)], rtol=1e-6)


def test_merging_rounds_once_and_repeats():
    outputs = random_arrays((5, 3, 4, 8), dtype=jnp.bfloat16)[0]
    lses = random_arrays((5, 3, 4), seed=1)[0] * 30
    output, lse = merge_attention_states(outputs, lses)
    assert output.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    weights = np.exp(np.asarray(lses, np.float64) - np.log(np.exp(np.asarray(lses, np.float64)).sum(axis=0)))
    exact = (np.asarray(outputs, np.float64) * weights[..., None]).sum(axis=0)
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(merge_attention_states(outputs, lses)[0], output)


def test_merging_is_differentiable():
    outputs, lses = random_arrays((3, 4, 8))[0], jnp.asarray([[0.0] * 4, [-jnp.inf] * 4, [-jnp.inf, 0, 1, 2]])

    def total(outputs, lses):
        output, lse = merge_attention_states(outputs, lses)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse)

    gradients = compiled_quickly(jax.grad(total, (0, 1)))(outputs, lses)
    assert all(np.isfinite(x).all() for x in gradients)
    step = jnp.zeros_like(lses).at[2, 3].set(1e-2)
    difference = (total(outputs, lses + step) - total(outputs, lses - step)) / 2e-2
    np.testing.assert_allclose(gradients[1][2, 3], difference, rtol=1e-2)


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        (
            zeros(2, 3, 4),
            zeros(2, 4),
            r"`lses` must have the shape of `outputs` without its last axis, .* got \(2, 4\)",
        ),
        (zeros(0, 3, 4), zeros(0, 3), "of at least one part"),
        ([], [], "`outputs` must be one or more arrays"),
        (
            [zeros(3, 4), zeros(2, 4)],
            zeros(2, 3),
            r"`outputs` must be one or more arrays of one shape .* 'float32\[2, 4\]'\]",
        ),
        (zeros(2, 3, 4), zeros(2, 3, dtype=jnp.int32), "`lses` must have a floating dtype, got int32"),
    ],
)
def test_merge_with_invalid_arguments_raises_value_error(outputs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_attention_states(outputs, lses)
