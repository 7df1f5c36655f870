"""Paged attention as users call it: forms of caches, queries and scales, with their numbers of splits and tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import paged_attention
from blockdiag.common.dispatch import capabilities, resolve
from blockdiag.ops.paged import checks
from blockdiag.ops.paged.checks import describe_paged_call
from blockdiag.ops.paged.splits import choose_splits
from blockdiag.triton_kernels.paged import plans
from tests.ops.block_diagonal.test_transformations import assert_close
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
