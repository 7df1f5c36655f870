"""Every implementation of paged attention's canonical call against computations by loops, with poisoned caches."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.ops.paged import xla as xla_paged
from tests.ops.paged_support import EIGHT_BITS, INTEGERS, MODULES, PagedCase, assert_accurate, load
from tests.support import compiled_quickly

ARRAY_IMPLEMENTATIONS = ("reference", "xla")

# Numbers of keys: none, one, and around the edges of a tile of 64 keys.
EDGES = (0, 1, 63, 64, 65, 129)

FEW = (0, 1, 40)

CASES = {
    "page size 1": PagedCase(kv_lengths=EDGES, page_size=1, query_heads=8, key_heads=2, spare_pages=2),
    "page size 3, e4m3 cache": PagedCase(
        kv_lengths=EDGES, page_size=3, dtype="bfloat16", cache_dtype="float8_e4m3fn", spare_pages=2
    ),
    "page size 16, groups of 5": PagedCase(kv_lengths=EDGES, dtype="float16", query_heads=10, key_heads=2),
    "page size 64, 64 tokens": PagedCase(kv_lengths=(0, 40, 64, 100), query_tokens=64, page_size=64, dtype="bfloat16"),
    "page size 128, groups of 8": PagedCase(kv_lengths=EDGES, page_size=128, dtype="bfloat16", query_heads=8),
    "contiguous, e5m2 cache, key scales of tokens": PagedCase(
        kv_lengths=EDGES, page_size=None, dtype="float16", cache_dtype="float8_e5m2", key_scale="token", query_heads=4,
        key_heads=2, spare_pages=3,
    ),
    "larger tiles": PagedCase(kv_lengths=(511, 512, 513, 1025), dtype="bfloat16", page_size=64, num_splits=3),
    "four tokens, groups of 16": PagedCase(
        kv_lengths=(*EDGES, 3), query_tokens=4, query_heads=32, key_heads=2, dtype="bfloat16"
    ),
    "groups of 71, wider values": PagedCase(
        kv_lengths=FEW, query_heads=71, dtype="bfloat16", query_tokens=2, head_dim=24, value_dim=40
    ),
    "as many key heads, narrower values": PagedCase(
        kv_lengths=FEW, query_heads=3, key_heads=3, head_dim=72, value_dim=8, num_splits=2
    ),
    "ragged queries": PagedCase(
        kv_lengths=(0, 1, 40, 40, 70), query_lengths=(2, 4, 0, 1, 3), query_tokens=4, page_size=3, num_splits=2
    ),
    "not causal": PagedCase(kv_lengths=(0, 2, 70), query_tokens=4, is_causal=False, dtype="bfloat16"),
    "window": PagedCase(kv_lengths=EDGES, query_tokens=4, window=(20, None), page_size=3, dtype="bfloat16"),
    "window, both sides": PagedCase(
        kv_lengths=EDGES, query_tokens=6, query_lengths=(0, 6, 6, 2, 6, 5), window=(70, 2), is_causal=False
    ),
    "sinks, ragged, window, soft cap": PagedCase(
        kv_lengths=(0, 2, 70, 40), query_tokens=4, query_lengths=(4, 4, 0, 3), sinks=True, window=(9, None),
        soft_cap=2.0, scale=1.0, dtype="bfloat16",
    ),
    "e4m3 keys, e5m2 values": PagedCase(
        kv_lengths=FEW, dtype="float16", cache_dtype="float8_e4m3fn", value_dtype="float8_e5m2", query_tokens=3
    ),
    "e4m3 queries, scales of heads": PagedCase(
        kv_lengths=EDGES, dtype="float8_e4m3fn", score_scale=True, value_scale="head", query_heads=4, key_heads=2
    ),
    "e5m2 queries": PagedCase(kv_lengths=FEW, dtype="float8_e5m2", cache_dtype="float8_e4m3fn", query_tokens=4),
    "scales of tokens": PagedCase(
        kv_lengths=EDGES, score_scale=True, key_scale="token", value_scale="token", query_heads=4, key_heads=2,
        dtype="bfloat16", cache_dtype="float8_e4m3fn", page_size=3, soft_cap=9.0,
    ),
    "split size": PagedCase(kv_lengths=EDGES, split_size=64, num_splits=4, dtype="bfloat16", page_size=3),
    "splits between pages": PagedCase(
        kv_lengths=(500, 130), page_size=128, dtype="bfloat16", cache_dtype="float8_e4m3fn", num_splits=3
    ),
    "split size of no tile": PagedCase(
        kv_lengths=(300, 170), split_size=100, num_splits=3, dtype="bfloat16", page_size=128
    ),
    "latent, scales of tokens": PagedCase(
        kv_lengths=EDGES, is_latent=True, head_dim=40, value_dim=24, query_heads=4, key_scale="token", page_size=3,
        dtype="bfloat16", cache_dtype="float8_e4m3fn", query_tokens=2, window=(50, None), num_splits=2,
    ),
    "int8 cache, scales of tokens": PagedCase(
        kv_lengths=EDGES, key_scale="token", value_scale="token", query_heads=4, key_heads=2, dtype="bfloat16",
        cache_dtype="int8", page_size=3, spare_pages=2,
    ),
    "int8 cache, scales of heads, float16": PagedCase(
        kv_lengths=EDGES, score_scale=True, value_scale="head", query_heads=10, key_heads=2, dtype="float16",
        cache_dtype="int8", query_tokens=2, page_size=None, head_dim=40, value_dim=24, spare_pages=3,
    ),
    "int8 cache, everything": PagedCase(
        kv_lengths=(0, 2, 300, 40), query_lengths=(4, 4, 3, 0), query_tokens=4, score_scale=True, key_scale="token",
        value_scale="token", dtype="bfloat16", cache_dtype="int8", window=(90, None), soft_cap=5.0, sinks=True,
        num_splits=3,
    ),
    "int8 keys, e4m3 values": PagedCase(
        kv_lengths=FEW, dtype="bfloat16", cache_dtype="int8", value_dtype="float8_e4m3fn", key_scale="token",
        value_scale="head",
    ),
    "latent, int8, scales of tokens": PagedCase(
        kv_lengths=EDGES, is_latent=True, head_dim=40, value_dim=24, query_heads=4, key_scale="token", page_size=3,
        dtype="bfloat16", cache_dtype="int8", query_tokens=2, num_splits=2,
    ),
    "latent, no keys at all": PagedCase(kv_lengths=(0, 0), is_latent=True, value_dim=8),
    "no keys at all": PagedCase(kv_lengths=(0, 0), sinks=True, num_splits=2),
}  # fmt: skip

# The kernels compute these cases in separate ways. Array code computes them like the others.
KERNEL_CASES = {
    "page size 64": PagedCase(kv_lengths=EDGES, page_size=64, dtype="bfloat16"),
    "contiguous": PagedCase(kv_lengths=EDGES, page_size=None, spare_pages=3, query_heads=4, key_heads=2),
    "two tokens, one page": PagedCase(kv_lengths=(5, 2, 1), query_tokens=2, spare_pages=0),
    "64 tokens, page size 3": PagedCase(
        kv_lengths=(40, 100), query_tokens=64, dtype="bfloat16", page_size=3, num_splits=2
    ),
    "one query head": PagedCase(kv_lengths=FEW, query_heads=1),
    "256 and 128": PagedCase(kv_lengths=(1, 70), head_dim=256, value_dim=128, dtype="bfloat16"),
    "window of one key": PagedCase(kv_lengths=EDGES, query_tokens=2, window=(0, None)),
    "window ahead": PagedCase(kv_lengths=(3, 40), query_tokens=8, window=(None, 1), is_causal=False, num_splits=2),
    "window in splits": PagedCase(kv_lengths=(300, 70), window=(100, None), num_splits=5, dtype="bfloat16"),
    "sinks": PagedCase(kv_lengths=EDGES, query_tokens=3, query_heads=4, key_heads=2, sinks=True, num_splits=2),
    "e4m3 cache, float16": PagedCase(kv_lengths=EDGES, dtype="float16", cache_dtype="float8_e4m3fn", page_size=16),
    "e5m2 cache, bfloat16": PagedCase(kv_lengths=EDGES, dtype="bfloat16", cache_dtype="float8_e5m2", page_size=1),
    "e4m3 values": PagedCase(kv_lengths=FEW, dtype="bfloat16", value_dtype="float8_e4m3fn"),
    "scales of heads in splits": PagedCase(
        kv_lengths=EDGES, score_scale=True, value_scale="head", query_heads=4, key_heads=2, dtype="bfloat16",
        cache_dtype="float8_e4m3fn", num_splits=2,
    ),
    "int8 cache, 64 rows": PagedCase(
        kv_lengths=(40, 100), query_tokens=16, query_heads=4, dtype="float16", cache_dtype="int8", key_scale="token",
        value_scale="token", page_size=64,
    ),
    "bfloat16 keys, int8 values": PagedCase(
        kv_lengths=FEW, dtype="bfloat16", value_dtype="int8", value_scale="token", page_size=1
    ),
    "latent of 576 columns, int8": PagedCase(
        kv_lengths=(0, 1, 130), is_latent=True, head_dim=576, value_dim=512, query_heads=24, dtype="bfloat16",
        cache_dtype="int8", key_scale="token", scale=0.07, num_splits=2,
    ),
    "value scales of tokens": PagedCase(kv_lengths=FEW, value_scale="token", query_tokens=2, sinks=True),
    "latent of 576 columns, drafts": PagedCase(
        kv_lengths=(3, 70, 130), query_lengths=(4, 0, 3), is_latent=True, head_dim=576, value_dim=512, query_heads=64,
        query_tokens=4, dtype="bfloat16", page_size=64, scale=0.07, window=(70, None), sinks=True,
    ),
    "latent of 576 columns, e4m3, splits": PagedCase(
        kv_lengths=(0, 1, 130), is_latent=True, head_dim=576, value_dim=512, query_heads=128, dtype="bfloat16",
        cache_dtype="float8_e4m3fn", key_scale="token", scale=0.07, num_splits=2,
    ),
    "latent of 576 columns, few heads, e5m2": PagedCase(
        kv_lengths=(0, 1, 130), is_latent=True, head_dim=576, value_dim=512, query_heads=8, dtype="float16",
        cache_dtype="float8_e5m2", score_scale=True, page_size=None, soft_cap=9.0,
    ),
    "latent with values in the middle of a part": PagedCase(
        kv_lengths=(65, 2), is_latent=True, head_dim=200, value_dim=72, query_heads=3, query_tokens=2
    ),
    "512 and 512": PagedCase(
        kv_lengths=(1, 70), head_dim=512, query_heads=24, dtype="bfloat16", cache_dtype="float8_e4m3fn",
        is_causal=False, window=(None, 3), query_tokens=2, value_scale="head",
    ),
    "576 and 264": PagedCase(kv_lengths=(1, 70), head_dim=576, value_dim=264, query_heads=2, page_size=3),
    "more splits than keys": PagedCase(kv_lengths=EDGES, num_splits=8, query_heads=4, key_heads=2, sinks=True),
}  # fmt: skip

# Only array code computes these cases; `test_kernels_decline_unsupported_cases_with_a_remedy` says why.
DECLINED = {
    "float64": PagedCase(kv_lengths=EDGES, dtype="float64", query_tokens=2, sinks=True, key_scale="token"),
    "float32 beside e4m3": PagedCase(kv_lengths=FEW, cache_dtype="float8_e4m3fn"),
    "float32 beside int8": PagedCase(kv_lengths=FEW, cache_dtype="int8", key_scale="token", value_scale="token"),
    "seven elements": PagedCase(kv_lengths=FEW, head_dim=7),
    "520 elements": PagedCase(kv_lengths=FEW, value_dim=520, query_heads=1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", MODULES)
def test_output_and_residual_are_accurate(implementation, name):
    assert load(implementation).supports(CASES[name].problem) is None
    assert_accurate(CASES[name], CASES[name].results(implementation))


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_kernels_are_accurate(name):
    assert_accurate(KERNEL_CASES[name], KERNEL_CASES[name].results("triton"))


@pytest.mark.parametrize("name", DECLINED)
@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
def test_array_implementations_of_declined_cases_are_accurate(implementation, name):
    with jax.enable_x64(name == "float64"):
        assert_accurate(DECLINED[name], DECLINED[name].results(implementation))


@pytest.mark.parametrize("name", DECLINED)
def test_kernels_decline_unsupported_cases_with_a_remedy(name):
    assert "implementation='xla'" in load("triton").supports(DECLINED[name].problem)


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
def test_results_with_x64_enabled_are_accurate(implementation):
    with jax.enable_x64(True):
        results = compiled_quickly(CASES["scales of tokens"].compute(implementation).__wrapped__)
        assert_accurate(CASES["scales of tokens"], results(*CASES["scales of tokens"].operands()))


@st.composite
def cases(draw) -> PagedCase:
    """Draw any call of up to three sequences."""
    length = st.one_of(st.sampled_from([0, 1, 64]), st.integers(0, 80))
    lengths = tuple(draw(st.lists(length, min_size=1, max_size=3)))
    tokens, is_causal = draw(st.sampled_from([1, 2, 5])), draw(st.booleans())
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", *EIGHT_BITS]))
    # The kernels do not combine float32 with eight-bit dtypes.
    narrow = st.sampled_from(
        [None] if dtype == "float32" else [None, *EIGHT_BITS, *(() if dtype in EIGHT_BITS else INTEGERS)]
    )
    size = st.one_of(st.none(), st.integers(0, 30))
    is_ragged, key_heads = draw(st.booleans()), draw(st.integers(1, 2))
    return PagedCase(
        kv_lengths=lengths,
        query_lengths=tuple(draw(st.integers(0, tokens)) for _ in lengths) if is_ragged else None,
        query_tokens=tokens,
        query_heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        head_dim=draw(st.sampled_from([8, 16, 24])),
        value_dim=draw(st.sampled_from([8, 16])),
        dtype=dtype,
        cache_dtype=draw(narrow),
        value_dtype=draw(narrow),
        page_size=draw(st.sampled_from([None, 1, 5, 16])),
        spare_pages=draw(st.integers(0 if max(lengths) else 1, 2)),
        is_causal=is_causal,
        window=draw(st.one_of(st.just((None, None)), st.tuples(size, st.none() if is_causal else size))),
        soft_cap=draw(st.sampled_from([None, 3.0])),
        sinks=draw(st.booleans()),
        score_scale=draw(st.booleans()),
        key_scale=draw(st.sampled_from(["none", "token"])),
        value_scale=draw(st.sampled_from(["none", "head", "token"])),
        num_splits=draw(st.sampled_from([1, 2])),
    )


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@hypothesis.settings(max_examples=3)
@hypothesis.given(case=cases())
def test_drawn_cases_are_accurate(implementation, case):
    assert_accurate(case, case.results(implementation))


@hypothesis.settings(max_examples=8)
@hypothesis.given(case=cases())
def test_drawn_cases_of_kernels_are_accurate(case):
    assert_accurate(case, case.results("triton"))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 16])
def test_number_of_splits_keeps_accuracy(num_splits):
    """Only the kernels read `num_splits`."""
    case = PagedCase(kv_lengths=(0, 1, 64, 300), query_tokens=2, query_heads=4, sinks=True, num_splits=num_splits)
    assert_accurate(case, case.results("triton"))


@pytest.mark.parametrize(("implementation", "dtype"), [("xla", "float32"), ("xla", "bfloat16"), ("triton", "bfloat16")])
def test_split_size_makes_results_independent_of_the_batch(implementation, dtype):
    """A sequence gives the same bits alone, among others and in a longer table."""
    options = dict(query_tokens=2, query_heads=4, key_heads=2, split_size=128, dtype=dtype)
    among = PagedCase(kv_lengths=(400, 3, 150, 0), num_splits=4, **options)
    expected = among.results(implementation)
    for b in (0, 2):
        length = among.kv_lengths[b]
        alone = PagedCase(kv_lengths=(length,), num_splits=-(-length // 128) + 1, **options)
        names = ("query", "key", "value", "sinks", "score_scale", "key_scale", "value_scale")
        rows = {name: among.dense[name][b : b + 1] for name in names}
        rows |= {name: rows[name][:, :length] for name in ("key", "value")}
        alone.__dict__["dense"] = rows
        for x, y in zip(expected, alone.results(implementation), strict=True):
            np.testing.assert_array_equal(np.asarray(x)[b : b + 1], y)


@pytest.mark.parametrize("implementation", MODULES)
def test_page_size_keeps_results_bitwise(implementation):
    """Pages of 1 token, pages of 16 tokens and a contiguous cache give the same bits."""
    case = PagedCase(kv_lengths=(0, 15, 144), query_tokens=3, query_heads=4, key_heads=2, spare_pages=0)
    expected = case.results(implementation)
    for page_size in (1, None):
        for x, y in zip(expected, dataclasses.replace(case, page_size=page_size).results(implementation), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("name", ["ragged queries", "scales of tokens", "int8 cache, everything"])
def test_repeated_calls_agree_bitwise(implementation, name):
    for first, second in zip(CASES[name].results(implementation), CASES[name].results(implementation), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_sequence_and_head(implementation, poison):
    """NaN or infinity among the keys and values of one sequence and head changes no bit of any other."""
    case = PagedCase(
        kv_lengths=(20, 40, 40), query_tokens=3, query_lengths=(3, 2, 3), query_heads=4, key_heads=2, num_splits=2
    )
    query, key, value, *others = case.operands()
    clean = case.compute(implementation)(query, key, value, *others)
    page = case.table[1, 0]
    key, value = key.at[page, 3, 1].set(poison), value.at[page, 5, 1].set(poison)
    dirty = case.compute(implementation)(query, key, value, *others)
    # Rows beyond the queries of the sequence are still 0 and -inf.
    keep = np.ones((3, 3, 4), bool)
    keep[1, :2, 2:] = False
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[keep], np.asarray(y)[keep])
    assert np.isnan(np.asarray(dirty[0])[1, :2, 2:]).any(axis=-1).all()


@pytest.mark.parametrize("implementation", MODULES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_inf_of_scales_of_integers_stay_in_their_sequence_and_head(implementation, poison):
    """A scale of NaN or infinity marks a lost token. It changes no bit of any other sequence or head."""
    case = PagedCase(
        kv_lengths=(20, 40, 40), query_tokens=3, query_lengths=(3, 2, 3), query_heads=4, key_heads=2, num_splits=2,
        dtype="bfloat16", cache_dtype="int8", key_scale="token", value_scale="token",
    )  # fmt: skip
    *others, key_scale, value_scale, tiles = case.operands()
    clean = case.compute(implementation)(*others, key_scale, value_scale, tiles)
    page = case.table[1, 0]
    key_scale, value_scale = key_scale.at[page, 3, 1].set(poison), value_scale.at[page, 5, 1].set(poison)
    dirty = case.compute(implementation)(*others, key_scale, value_scale, tiles)
    keep = np.ones((3, 3, 4), bool)
    keep[1, :2, 2:] = False
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[keep], np.asarray(y)[keep])
    assert not np.isfinite(np.asarray(dirty[0])[1, :2, 2:].astype(np.float32)).all(axis=-1).any()


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_integer_is_read_exactly(implementation, dtype):
    """A sequence with a single key returns its value: each integer times its scale."""
    case = PagedCase(
        kv_lengths=(1, 1), head_dim=8, value_dim=128, dtype=dtype, cache_dtype="int8", key_scale="token",
        value_scale="token",
    )  # fmt: skip
    value = np.arange(-128, 128, dtype=np.int8).reshape(2, 1, 1, 128)
    value_scale = np.asarray([0.5, 2.0], np.float32)[:, None, None]
    case.__dict__["dense"] = case.dense | {"value": value, "value_scale": value_scale}
    output, _ = case.results(implementation)
    expected = value[:, :, 0].astype(np.float32) * value_scale
    np.testing.assert_array_equal(np.asarray(output[:, 0]).astype(np.float32), np.repeat(expected, 2, 1))


@pytest.mark.parametrize("implementation", MODULES)
def test_out_of_range_pages_and_lengths_are_clipped(implementation):
    """Page numbers and lengths that no host has checked must not read outside of the arrays."""
    case = PagedCase(
        kv_lengths=(30, 40, 48), query_tokens=2, query_lengths=(2, 1, 2), query_heads=4, spare_pages=0, num_splits=2
    )
    compute, operands = case.compute(implementation), list(case.operands())
    last = case.problem.num_pages - 1
    wild = jnp.asarray([[-1, 2**31 - 1, 0], [-1, last + 1, -(2**31)], [5, -2, 2**31 - 1]], jnp.int32)
    wild_lengths, wild_queries = jnp.asarray([-5, 48, 10**9], jnp.int32), jnp.asarray([2, -1, 99], jnp.int32)
    pages = [jnp.where(jnp.isnan(x), 0.5, x) for x in operands[1:3]]
    actual = compute(operands[0], *pages, wild, wild_lengths, wild_queries, *operands[6:])
    tame = jnp.clip(wild, 0, last)
    tame_lengths, tame_queries = jnp.asarray([0, 48, 48], jnp.int32), jnp.asarray([2, 0, 2], jnp.int32)
    expected = compute(operands[0], *pages, tame, tame_lengths, tame_queries, *operands[6:])
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(actual[1][2]).all()


def test_xla_allocates_no_scores_of_all_keys():
    """The temporary memory of a compiled call of 65,536 keys is a fraction of the keys' memory."""
    problem = dataclasses.replace(PagedCase(kv_lengths=(16,)).problem, max_pages=4096, num_pages=4096)
    shapes = dict(query=(1, 1, 2, 16), key=(4096, 16, 1, 16), value=(4096, 16, 1, 16))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 4096), (1,)))

    def compute(*operands):
        return xla_paged.forward(problem, *operands, *[None] * 6)

    compiled = jax.jit(compute).lower(*arrays, table, lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 65536 * 4
