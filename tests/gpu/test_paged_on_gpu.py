"""Paged attention and MoBA over a paged cache on a GPU, from JAX: accuracy, compilation and in-place updates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import append_to_pages, moba_attention, moba_paged_attention, paged_attention
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory
from tests.ops.moba_paged.test_moba_paged import CASES as FEW_BLOCKS
from tests.ops.moba_paged.test_moba_paged import MANY_BLOCKS
from tests.ops.moba_paged.test_prompts import CASES as MOBA_PROMPTS
from tests.ops.moba_paged.test_prompts import whole_prompt
from tests.ops.paged_support import PagedCase, assert_accurate

pytestmark = pytest.mark.gpu

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
DECODE = PagedCase(
    kv_lengths=(0, 1, 127, 128, 129, 700), query_heads=8, key_heads=2, head_dim=128, dtype="bfloat16", page_size=16
)
replace = functools.partial(dataclasses.replace, DECODE)
CASES = {
    "bfloat16, pages of 16": DECODE,
    "bfloat16, pages of 1, split": replace(page_size=1, num_splits=5),
    "float16, pages of 128, group of 71": replace(
        dtype="float16", page_size=128, query_heads=71, key_heads=1, head_dim=64, kv_lengths=(129, 300)
    ),
    "e4m3, pages of 3, split": replace(cache_dtype=E4M3, page_size=3, num_splits=4, dtype="float16"),
    "e5m2, pages of 64, fixed splits": replace(cache_dtype=E5M2, page_size=64, split_size=192),
    "sixteen queries": replace(query_tokens=16, query_lengths=(16, 1, 0, 3, 16, 9), num_splits=2),
    "sixty-four queries": replace(query_tokens=64, kv_lengths=(64, 200), num_splits=3),
    "drafts, everything": replace(
        query_tokens=4, query_lengths=(4, 1, 0, 3, 4, 2), window=(200, None), soft_cap=5.0, sinks=True, num_splits=2,
        score_scale=True, key_scale="token", value_scale="token", cache_dtype=E4M3, value_dim=64, scale=0.1,
    ),
    "wide heads, contiguous": replace(head_dim=256, page_size=None, is_causal=False, window=(90, 7), query_tokens=2),
    "int8, scales by token, pages of 1": replace(
        cache_dtype="int8", key_scale="token", value_scale="token", page_size=1, num_splits=3
    ),
    "int8, scales by head, float16": replace(
        cache_dtype="int8", score_scale=True, value_scale="head", dtype="float16", page_size=64, query_heads=10
    ),
    "int8, sixteen queries, everything": replace(
        query_tokens=16, query_lengths=(16, 1, 0, 3, 16, 9), window=(200, None), soft_cap=5.0, sinks=True, num_splits=2,
        score_scale=True, key_scale="token", value_scale="token", cache_dtype="int8", value_dim=64, page_size=3,
    ),
    "int8 keys, e4m3 values, contiguous": replace(
        cache_dtype="int8", key_scale="token", value_dtype=E4M3, page_size=None, query_tokens=2
    ),
    "queries of eight bits": replace(dtype=E5M2, cache_dtype=E4M3, value_scale="head"),
    "latent": replace(
        is_latent=True, head_dim=576, value_dim=512, query_heads=128, key_heads=1, page_size=64, num_splits=3,
        query_tokens=3, query_lengths=(3, 1, 0, 2, 3, 2), window=(300, None), sinks=True, scale=0.07,
    ),
    "narrow heads, float32": replace(dtype="float32", head_dim=8, value_dim=24, query_heads=5, key_heads=1),
}  # fmt: skip


def compiled(case):
    """Return the public function of a case's arrays, compiled for CUDA with the default kernels, and the arrays."""
    arguments = case.arguments()
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    splits = {"split_size": case.split_size} if case.split_size else {"num_splits": case.num_splits}
    function = functools.partial(paged_attention, **options, **splits, return_residual=True)
    return jax.jit(lambda arrays: function(**{"page_table": None} | arrays)).lower(arrays).compile(), arrays


@pytest.mark.parametrize("name", CASES)
def test_paged_attention_is_accurate_and_repeatable(name):
    run, arrays = compiled(CASES[name])
    assert "triton_kernel_call" in run.as_text()
    results = []
    for _ in range(2):
        poison_free_memory()
        results.append(run(arrays))
    assert_accurate(CASES[name], results[0])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_integer_is_read_exactly(dtype):
    """A sequence with a single key returns its value: each integer times its scale."""
    case = PagedCase(
        kv_lengths=(1, 1), head_dim=16, value_dim=128, dtype=dtype, cache_dtype="int8", key_scale="token",
        value_scale="token",
    )  # fmt: skip
    value = np.arange(-128, 128, dtype=np.int8).reshape(2, 1, 1, 128)
    value_scale = np.asarray([0.5, 2.0], np.float32)[:, None, None]
    case.__dict__["dense"] = case.dense | {"value": value, "value_scale": value_scale}
    run, arrays = compiled(case)
    output = np.asarray(run(arrays)[0][:, 0]).astype(np.float32)
    np.testing.assert_array_equal(output, np.repeat(value[:, :, 0].astype(np.float32) * value_scale, 2, 1))


def test_fixed_split_size_results_do_not_depend_on_the_batch():
    arguments = replace(kv_lengths=(700, 3, 129)).arguments()
    call = functools.partial(paged_attention, split_size=128, return_residual=True)
    rows = ("query", "page_table", "kv_lengths")
    alone = call(**(arguments | {name: arguments[name][:1] for name in rows}))
    for one, all_of_them in zip(alone, call(**arguments), strict=True):
        np.testing.assert_array_equal(np.asarray(one[0], np.float32), np.asarray(all_of_them[0], np.float32))


def test_a_decode_step_compiles_once_and_keeps_its_cache_in_place():
    """Each step appends and attends with donated pages, and the outputs match an uncached softmax."""
    generator = np.random.default_rng(0)
    tokens, heads, size = 40, 2, 64
    shape = (1, tokens, heads, size)
    query, key, value = (jnp.asarray(generator.normal(size=shape).astype(np.float32)) for _ in range(3))
    pages = [jnp.full((9, 16, heads, size), jnp.nan, jnp.float32) for _ in range(2)]
    table = jnp.asarray([[7, 2, 5]], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(key_pages, value_pages, query, key, value, length):
        key_pages, value_pages = append_to_pages(key, value, key_pages, value_pages, table, length)
        return key_pages, value_pages, paged_attention(query, key_pages, value_pages, table, length)

    places, outputs = [x.unsafe_buffer_pointer() for x in pages], []
    for t in range(tokens):
        now = (x[:, t : t + 1] for x in (query, key, value))
        *pages, output = step(*pages, *now, jnp.asarray([t + 1], jnp.int32))
        assert [x.unsafe_buffer_pointer() for x in pages] == places
        outputs.append(output[:, 0])
    assert step._cache_size() == 1
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(jnp.stack(outputs, axis=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.xdist_group("large pools")  # one at a time, because each needs gigabytes
def test_paged_attention_with_pools_of_more_than_2_to_the_31_elements_is_exact():
    """Pages at the end of such a pool give the same bits as pages of a small pool."""
    sizes = (16, 8, 128)
    num_pages = 2**31 // (16 * 8 * 128) + 9
    small = jax.random.normal(jax.random.key(0), (9, *sizes), jnp.float32).astype(E4M3)
    pool = jnp.zeros((num_pages, *sizes), E4M3).at[-9:].set(small)
    query = jax.random.normal(jax.random.key(1), (1, 1, 32, 128), jnp.bfloat16)
    order, length = jnp.asarray([[8, 3, 0, 5, 7, 1]], jnp.int32), jnp.asarray([90], jnp.int32)
    near = paged_attention(query, small, small, order, length)
    far = paged_attention(query, pool, pool, order + (num_pages - 9), length)
    assert np.isfinite(np.asarray(near, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(far, np.float32), np.asarray(near, np.float32))


MOBA_CASES = {name: case for name, case in FEW_BLOCKS.items() if name != "float64"} | {"many blocks": MANY_BLOCKS}


@pytest.mark.parametrize("name", MOBA_CASES)
def test_moba_paged_attention_is_accurate_and_repeatable(name):
    case = MOBA_CASES[name]
    options = dict(block_size=case.block_size, top_k=case.top_k, scale=case.paged.scale, return_residual=True)
    run = jax.jit(lambda arguments: moba_paged_attention(**arguments, **options))
    poison_free_memory()
    results = run(case.arguments)
    case.check(results)
    for one, other in zip(results, run(case.arguments), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("name", MOBA_PROMPTS)
def test_moba_paged_attention_of_prompts_is_accurate_and_repeatable(name):
    case = MOBA_PROMPTS[name]
    options = dict(block_size=case.block_size, top_k=case.top_k, scale=case.paged.scale, return_residual=True)
    run = jax.jit(lambda arguments: moba_paged_attention(**arguments, **options))
    poison_free_memory()
    results = run(case.arguments)
    case.check_products(results)
    poison_free_memory()
    for one, other in zip(results, run(case.arguments), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("page_size", [1, 16, 64, None])
@pytest.mark.parametrize("first", [0, 5000])
def test_moba_paged_attention_of_a_long_prompt_matches_moba_attention(page_size, first):
    """Their mean keys are rounded differently, so few queries may choose other blocks."""
    arguments, query, key, value = whole_prompt(8192, page_size)
    options = dict(block_size=128, top_k=8, return_residual=True)
    expected = moba_attention(query, key, value, **options)
    chunk = arguments | {"query": query[:, first:]}
    results = jax.jit(lambda chunk: moba_paged_attention(**chunk, **options))(chunk)
    for one, other, tolerance in zip(results, expected, (2e-2, 1e-4), strict=True):
        difference = np.abs(np.asarray(one, np.float32) - np.asarray(other[:, first:], np.float32))
        assert np.mean(difference > tolerance) < 1e-3
