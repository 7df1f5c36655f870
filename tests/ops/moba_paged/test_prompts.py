"""MoBA over a paged cache for prompts: many queries of each sequence, in whole prompts and in chunks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import moba_attention, moba_paged_attention
from blockdiag.interop import EXPORT_DISABLED_CHECKS, compile_target
from blockdiag.ops.moba_paged import xla as xla_moba_paged
from blockdiag.ops.moba_paged.checks import describe_moba_paged_call
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.triton_kernels.moba_paged.plans import steps
from blockdiag.triton_kernels.moba_paged.prompts import PROMPT_QUERIES, is_prompt
from tests.ops.moba_paged.test_moba_paged import IMPLEMENTATIONS, SCALES, MoBAPagedCase
from tests.ops.paged_support import PagedCase

# A chunk, a whole prompt, a sequence without keys, one with few queries, and one that has fewer keys than queries.
CHUNKS = PagedCase(
    kv_lengths=(150, 67, 0, 40, 9), query_lengths=(70, 67, 0, 3, 12), query_tokens=70, query_heads=4, key_heads=2,
    dtype="bfloat16", page_size=16,
)  # fmt: skip
# The kernels for Hopper compute these on a GPU.
HOPPER = PagedCase(
    kv_lengths=(700, 300, 127), query_lengths=(300, 300, 65), query_tokens=300, query_heads=4, key_heads=2,
    head_dim=128, dtype="bfloat16", page_size=16,
)  # fmt: skip
CASES = {
    "pages of 16": MoBAPagedCase(paged=CHUNKS),
    "pages of 3, float32, one head": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, page_size=3, dtype="float32", query_heads=1, key_heads=1)
    ),
    "contiguous, float16, heads of 24": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, page_size=None, dtype="float16", head_dim=24, scale=0.4), block_size=48
    ),
    "all queries": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, kv_lengths=(65, 190), query_lengths=None, query_tokens=65, page_size=1)
    ),
    "own block only": MoBAPagedCase(paged=CHUNKS, top_k=1),
    "more than there are": MoBAPagedCase(paged=dataclasses.replace(CHUNKS, page_size=64), top_k=64),
    "tiles of a block": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, kv_lengths=(445, 300), query_lengths=(70, 70)), block_size=144, top_k=2
    ),
    "e4m3, scales of tokens": MoBAPagedCase(
        paged=dataclasses.replace(
            CHUNKS, page_size=3, cache_dtype="float8_e4m3fn", key_scale="token", value_scale="token"
        )
    ),
    "int8, scales of tokens": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, cache_dtype="int8", key_scale="token", value_scale="token")
    ),
    "e5m2, scales of heads": MoBAPagedCase(
        paged=dataclasses.replace(
            CHUNKS, page_size=None, dtype="float16", cache_dtype="float8_e5m2", score_scale=True, value_scale="head"
        )
    ),
    "eight bits": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, dtype="float8_e4m3fn", cache_dtype="float8_e5m2", score_scale=True)
    ),
    "bfloat16, scales of tokens": MoBAPagedCase(
        paged=dataclasses.replace(CHUNKS, score_scale=True, key_scale="token", value_scale="token")
    ),
    "values of another width": MoBAPagedCase(paged=dataclasses.replace(CHUNKS, value_dim=24)),
    "heads of 128, blocks of 128": MoBAPagedCase(paged=HOPPER, block_size=128, top_k=3),
    "float16, heads of 64, blocks of 64": MoBAPagedCase(
        paged=dataclasses.replace(HOPPER, dtype="float16", head_dim=64, page_size=64), block_size=64, top_k=4
    ),
    "e4m3, heads of 128, scales of tokens": MoBAPagedCase(
        paged=dataclasses.replace(
            HOPPER, cache_dtype="float8_e4m3fn", page_size=1, score_scale=True, key_scale="token", value_scale="token"
        ),
        block_size=128,
        top_k=3,
    ),
}  # fmt: skip


def problem_of(case: MoBAPagedCase) -> MoBAPagedProblem:
    """Return the description of a call."""
    arguments = dict.fromkeys((*SCALES, "query_lengths")) | case.arguments
    return describe_moba_paged_call(**arguments, block_size=case.block_size, top_k=case.top_k, scale=case.paged.scale)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_output_and_residual_are_accurate(implementation, name):
    CASES[name].check_products(CASES[name].results(implementation))


@pytest.mark.parametrize("name", ["pages of 16", "e5m2, scales of heads"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repeated_calls_agree_bitwise(implementation, name):
    case = CASES[name]
    for one, other in zip(case.results(implementation), case.attend(implementation), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@functools.cache
def whole_sequences(dtype: str):
    """Return a contiguous cache of two sequences with mean keys, and the results of MoBA over whole sequences."""
    generator = np.random.default_rng(2)
    query, key, value = (jnp.asarray(generator.normal(size=(2, 203, n, 16)), dtype) for n in (4, 2, 2))
    options = dict(block_size=16, top_k=3, return_residual=True)
    results = moba_attention(query, key, value, **options, implementation="reference")
    centroids = key[:, :192].astype(jnp.float32).reshape(2, 12, 16, 2, 16).mean(axis=2)
    return query, dict(key_pages=key, value_pages=value, page_table=None, key_centroids=centroids), results


def whole_prompt(tokens: int, page_size: int | None) -> tuple[dict[str, Any], jax.Array, jax.Array, jax.Array]:
    """Return the cache of one sequence in bfloat16, and its queries, keys and values [1, T, 8 or 2, 128]."""
    generator = np.random.default_rng(4)
    query, key, value = (
        jnp.asarray(generator.normal(size=(1, tokens, heads, 128)), jnp.bfloat16) for heads in (8, 2, 2)
    )
    means = key.astype(jnp.float32).reshape(1, tokens // 128, 128, 2, 128).mean(axis=2)
    cache = dict(kv_lengths=jnp.asarray([tokens], jnp.int32), key_centroids=means)
    if page_size is None:
        return cache | dict(key_pages=key, value_pages=value, page_table=None), query, key, value
    order = generator.permutation(tokens // page_size).astype(np.int32)
    pages = (x.reshape(-1, page_size, 2, 128)[np.argsort(order)] for x in (key, value))
    cache |= dict(zip(("key_pages", "value_pages"), pages, strict=True))
    return cache | dict(page_table=jnp.asarray(order[None])), query, key, value


@pytest.mark.parametrize("page_size", [16, None])
def test_whole_prompt_has_the_keys_of_its_pages(page_size):
    """The long prompts of the tests on a GPU, in small."""
    arguments, query, key, value = whole_prompt(256, page_size)
    options = dict(block_size=128, top_k=2, implementation="xla")
    results = moba_paged_attention(query=query, **arguments, **options)
    expected = moba_attention(query, key, value, **options)
    np.testing.assert_allclose(np.asarray(results, np.float32), np.asarray(expected, np.float32), atol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [203, 90])
def test_results_match_the_last_rows_of_moba_attention(tokens, implementation, dtype):
    """Log-sum-exps are float32, so they would differ visibly if a query chose another block."""
    query, cache, (output, log_sum) = whole_sequences(dtype)
    results = moba_paged_attention(
        query[:, -tokens:], **cache, kv_lengths=jnp.full(2, 203, jnp.int32), block_size=16, top_k=3,
        implementation=implementation, return_residual=True,
    )  # fmt: skip
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(results[0], np.float32), np.asarray(output[:, -tokens:], np.float32), atol=tolerance
    )
    np.testing.assert_allclose(results[1], log_sum[:, -tokens:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_chunks_of_a_prompt_match_the_whole_prompt_under_one_compilation(implementation):
    """Lengths are known only at run time: one program computes all chunks of a prompt."""
    query, cache, (output, _) = whole_sequences("float32")

    @jax.jit
    def attend(query, kv_lengths, query_lengths):
        return moba_paged_attention(
            query, **cache, kv_lengths=kv_lengths, query_lengths=query_lengths, block_size=16, top_k=3,
            implementation=implementation,
        )  # fmt: skip

    for first in range(0, 203, 80):
        count = min(80, 203 - first)
        chunk = jnp.full((2, 80, 4, 16), jnp.nan).at[:, :count].set(query[:, first : first + count])
        lengths = jnp.full(2, first + count, jnp.int32), jnp.full(2, count, jnp.int32)
        actual = attend(chunk, *lengths)
        np.testing.assert_allclose(actual[:, :count], output[:, first : first + count], rtol=1e-5, atol=1e-5)
        assert not np.asarray(actual[:, count:]).any()
    assert attend._cache_size() == 1


def chosen_blocks(implementation: str, centroids: list[float], top_k: int, dtype: str) -> list[set[int]]:
    """Return the blocks that the 64 queries of ones at the end of nine blocks of 16 see.

    Each block's values are nonzero in a separate column.
    """
    value = jnp.repeat(jnp.eye(9, 16, dtype=dtype), 16, axis=0)[None, :, None]
    output = moba_paged_attention(
        jnp.ones((1, 64, 1, 16), dtype),
        jnp.zeros((1, 144, 1, 16), dtype),
        value,
        None,
        jnp.asarray([144], jnp.int32),
        jnp.broadcast_to(jnp.asarray(centroids, jnp.float32)[None, :, None, None], (1, 8, 1, 16)),
        block_size=16,
        top_k=top_k,
        implementation=implementation,
    )
    return [set(np.flatnonzero(np.asarray(row) > 0).tolist()) for row in output[0, :, 0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_choose_the_later_block_and_nan_is_never_chosen(implementation, dtype):
    def choose(centroids, top_k):
        found = chosen_blocks(implementation, centroids, top_k, dtype)
        return found[0], found[-1]

    # The first query is in block 5, the last one in block 8.
    assert choose([1, 1, 1, 0, 1, 0, 0, 0], 3) == ({5, 4, 2}, {8, 4, 2}), "of equal scores the later block"
    assert choose([-1, 0.0, -0.0, -1, -0.0, -2, -1, -1], 3) == ({5, 4, 2}, {8, 4, 2}), "0 too, of either sign"
    nan = np.nan
    assert choose([nan, 1, 2, -7, nan, -3, -2, nan], 9) == ({5, 3, 2, 1}, {8, 6, 5, 3, 2, 1}), "NaN is never chosen"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_choice_has_the_precision_of_float32(implementation):
    """Mean keys that are equal in 16 bits, and tiny or huge ones, are told apart."""
    ascending = [1 + i * 2.0**-20 for i in (3, 0, 5, 1, 4, 2, 0, 0)]
    for scale in (1.0, 2.0**-40, 2.0**60):
        found = chosen_blocks(implementation, [x * scale for x in ascending], 3, "bfloat16")
        assert (found[0], found[-1]) == ({5, 4, 2}, {8, 4, 2})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_out_of_range_lengths_and_pages_are_clipped(implementation):
    """The interpreter refuses to read out of bounds. Results match those of clipped lengths and pages."""
    case = CASES["pages of 3, float32, one head"]
    problem = case.paged.problem
    wild = np.random.default_rng(5).choice([-(2**31), -7, 2**31 - 1], (problem.batch, problem.max_pages))
    lengths, queries = ([2**31 - 1, -5, 97, 31, 150], [-1, 99, 70, 2, 2**31 - 1])
    tame = dict(
        page_table=jnp.clip(jnp.asarray(wild, jnp.int32), 0, problem.num_pages - 1),
        kv_lengths=jnp.clip(jnp.asarray(lengths, jnp.int32), 0, problem.max_keys),
        query_lengths=jnp.clip(jnp.asarray(queries, jnp.int32), 0, problem.query_tokens),
    )
    bad = dict(
        page_table=jnp.asarray(wild, jnp.int32),
        kv_lengths=jnp.asarray(lengths, jnp.int32),
        query_lengths=jnp.asarray(queries, jnp.int32),
    )
    for one, other in zip(case.attend(implementation, **bad), case.attend(implementation, **tame), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["pages of 16", "all queries", "e4m3, scales of tokens"])
def test_chunks_of_queries_in_xla_are_accurate(monkeypatch, name):
    """Seven queries at a time leave a last chunk that is not full."""
    case = CASES[name]
    problem = problem_of(case)
    call = problem.paged
    monkeypatch.setattr(xla_moba_paged, "_GATHERED", 7 * 16 * call.batch * call.query_heads * call.head_dim)
    names = ("query", "key_pages", "value_pages", "page_table", "kv_lengths", "query_lengths", "query_scale",
             "key_scale", "value_scale", "key_centroids")  # fmt: skip
    operands = [case.arguments.get(name) for name in names]
    jaxpr = jax.make_jaxpr(functools.partial(xla_moba_paged.forward, problem))(*operands)
    assert f"length={-(-call.query_tokens // 7)}" in str(jaxpr), "one step for each chunk"
    case.check_products(xla_moba_paged.forward(problem, *operands))


def test_memory_of_xla_does_not_grow_with_the_number_of_queries():
    """The temporary memory of a long prompt is a small multiple of its arguments and results."""
    tokens, page = jax.ShapeDtypeStruct((1, 32768, 8, 64), jnp.bfloat16), jnp.bfloat16
    cache = jax.ShapeDtypeStruct((1, 32768, 2, 64), page)
    centroids = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
    call = functools.partial(moba_paged_attention, block_size=128, top_k=8, implementation="xla")
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = jax.jit(lambda *x: call(x[0], x[1], x[2], None, *x[3:])).lower(tokens, cache, cache, lengths, centroids)
    memory = compiled.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**29


def test_vmap_matches_single_calls():
    case = CASES["e4m3, scales of tokens"]
    call = functools.partial(
        moba_paged_attention, block_size=16, top_k=3, implementation="triton", return_residual=True
    )
    arguments = case.arguments
    pairs = {
        name: jnp.stack([x, jnp.flip(x, 0)])
        for name, x in arguments.items()
        if name in ("query", "page_table", "kv_lengths", "query_lengths", "key_centroids")
    }
    shared = {name: x for name, x in arguments.items() if name not in pairs}
    results = jax.jit(jax.vmap(lambda pairs: call(**pairs, **shared)))(pairs)
    for i in range(2):
        expected = case.attend("triton", **{name: x[i] for name, x in pairs.items()})
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(one[i], np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("spec", [P("rows"), P(None, None, "rows")], ids=["sequences", "heads"])
def test_results_of_divided_calls_match_one_device(spec):
    """Heads of queries, keys and mean keys are sharded together; caches are contiguous."""
    query, cache, _ = whole_sequences("bfloat16")
    arrays = dict(query=query, **{name: x for name, x in cache.items() if x is not None})

    def call(arrays):
        return moba_paged_attention(
            **arrays, page_table=None, kv_lengths=jnp.full(len(arrays["query"]), 203, jnp.int32), block_size=16,
            top_k=3, implementation="triton", return_residual=True,
        )  # fmt: skip

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.shard_map(call, mesh=mesh, in_specs=(spec,), out_specs=spec)
    results, expected = jax.jit(divided)(arrays), jax.jit(call)(arrays)
    np.testing.assert_allclose(np.asarray(results[0], np.float32), np.asarray(expected[0], np.float32), atol=1e-2)
    np.testing.assert_allclose(results[1], expected[1], rtol=1e-6, atol=1e-6)


def test_program_for_cuda_has_the_launches_of_a_prompt():
    """The default implementation, exported for a GPU that is not there."""
    pages, lengths = jax.ShapeDtypeStruct((64, 16, 2, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
    arrays = dict(
        query=jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.bfloat16),
        key_pages=pages,
        value_pages=pages,
        page_table=jax.ShapeDtypeStruct((1, 64), jnp.int32),
        kv_lengths=lengths,
        query_lengths=lengths,
        key_centroids=jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.float32),
    )
    call = jax.jit(lambda arrays: moba_paged_attention(**arrays, block_size=128, top_k=3))
    with compile_target(90):
        exported = jax.export.export(call, platforms=["cuda"], disabled_checks=EXPORT_DISABLED_CHECKS)(arrays)
    # Tables, halves, choice, four launches of lists, items, attention and merge.
    assert exported.mlir_module().count("@triton_kernel_call") == 10


def test_prompts_begin_at_a_number_of_queries():
    problem = problem_of(CASES["pages of 16"])
    for tokens, is_long in ((PROMPT_QUERIES - 1, False), (PROMPT_QUERIES, True)):
        problem = dataclasses.replace(problem, paged=dataclasses.replace(problem.paged, query_tokens=tokens))
        assert is_prompt(problem) == is_long
        assert ("moba_blocks_forward" in [launch.name for launch in steps(problem)]) == is_long
    assert not is_prompt(problem_of(CASES["values of another width"]))
