"""The kernels of prompts for Hopper, in the interpreter: results, schedules of warps, and the order of accesses."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS
from blockdiag.common.shards import Part
from blockdiag.ops.paged import reference
from blockdiag.ops.paged.packed import canonical_queries
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.paged.plans import PagedLaunch
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.gluon_protocol import Slow

BASE = PagedProblem(
    batch=3,
    query_tokens=150,
    query_heads=4,
    key_heads=2,
    head_dim=64,
    value_dim=64,
    query_dtype="bfloat16",
    key_dtype="bfloat16",
    value_dtype="bfloat16",
    output_dtype="bfloat16",
    num_pages=40,
    page_size=16,
    max_pages=20,
    scale=0.125,
    packed_rows=150,
    few_queries=4,
)
E4M3, E5M2 = (dict(query_dtype=dtype, key_dtype=dtype, value_dtype=dtype) for dtype in ("float8_e4m3fn", "float8_e5m2"))
PROBLEMS = {
    "causal": BASE,
    "window": dataclasses.replace(BASE, window=(100, None)),
    "both sides, soft cap": dataclasses.replace(BASE, is_causal=False, window=(100, 20), soft_cap=5.0),
    "all keys, sinks": dataclasses.replace(BASE, is_causal=False, has_sinks=True),
    "sinks, pages of 1": dataclasses.replace(BASE, has_sinks=True, page_size=1, num_pages=640, max_pages=320),
    "group of 3, contiguous": dataclasses.replace(
        BASE, query_heads=6, has_page_table=False, num_pages=3, page_size=320, max_pages=1
    ),
    "float16, heads of 128": dataclasses.replace(
        BASE, query_heads=2, head_dim=128, value_dim=128, query_dtype="float16", key_dtype="float16",
        value_dtype="float16", output_dtype="float16",
    ),
    "heads of 256": dataclasses.replace(BASE, query_heads=2, key_heads=1, head_dim=256, value_dim=256),
    "e4m3": dataclasses.replace(BASE, **E4M3),
    "e4m3, many chunks": dataclasses.replace(
        BASE, **E4M3, key_heads=1, head_dim=128, value_dim=128, num_pages=300, max_pages=150, is_causal=False
    ),
    "e5m2, window, soft cap, sinks, scales by head": dataclasses.replace(
        BASE, **E5M2, window=(100, None), soft_cap=5.0, has_sinks=True, has_score_scale=True, value_scale="head"
    ),
    "e4m3, pages of 4": dataclasses.replace(BASE, **E4M3, page_size=4, num_pages=160, max_pages=80),
    "e4m3, group of 3, contiguous, scales by token": dataclasses.replace(
        BASE, **E4M3, query_heads=6, has_page_table=False, num_pages=3, page_size=320, max_pages=1, key_scale="token",
        value_scale="token",
    ),
    "e4m3, pages of 4, scales by token": dataclasses.replace(
        BASE, **E4M3, page_size=4, num_pages=160, max_pages=80, key_scale="token", value_scale="token"
    ),
    "e4m3, large scores": dataclasses.replace(BASE, **E4M3, scale=2.0),
    "e4m3, negative scales by head": dataclasses.replace(
        BASE, **E4M3, query_heads=2, key_heads=1, has_score_scale=True, value_scale="head"
    ),
    "e4m3, many chunks, scales by token": dataclasses.replace(
        BASE, **E4M3, query_heads=2, key_heads=1, num_pages=300, max_pages=150, key_scale="token", value_scale="token"
    ),
    "e4m3, scales by token": dataclasses.replace(
        BASE, **E4M3, query_heads=2, key_heads=1, key_scale="token", value_scale="token"
    ),
}  # fmt: skip
# The first sequence has too few queries, and the rows after the last one belong to none.
KEYS, OFFSETS = [9, 300, 130], [0, 3, 63, 140]
# 18 chunks.
MANY_KEYS = [9, 2300, 130]
# The delays of the partitions, in seconds: the two compute groups, and load.
SLOW_LOAD, SLOW_GROUP, SLOW_COMPUTE = (0, 0, 1e-3), (1e-3, 0, 0), (5e-4, 5e-4, 0)


def keys_of(problem):
    """Return the numbers of keys of the sequences."""
    return MANY_KEYS if problem.max_pages * problem.page_size > 2300 else KEYS


def inputs_of(problem):
    """Return the arrays of a call by name; rows of pages that no sequence has are NaN."""
    generator = np.random.default_rng(0)
    dtype = jnp.dtype(problem.query_dtype)
    pool = (problem.num_pages, problem.page_size, problem.key_heads, problem.head_dim)
    # Sequences share pages if the pool has not enough of them.
    table = np.resize(generator.permutation(problem.num_pages), (problem.batch, problem.max_pages)).astype(np.int32)
    if not problem.has_page_table:
        table = np.arange(problem.batch, dtype=np.int32)[:, None]
    lengths = keys_of(problem)
    is_used = np.zeros(pool[:2], bool)
    for pages, length in zip(table, lengths, strict=True):
        token = np.arange(length)
        is_used[pages[token // problem.page_size], token % problem.page_size] = True
    key, value = (
        np.where(is_used[..., None, None], generator.normal(size=pool), np.nan).astype(dtype) for _ in range(2)
    )
    query = generator.normal(size=(problem.packed_rows, problem.query_heads, problem.head_dim)).astype(dtype)
    kv_lengths, offsets = jnp.asarray(lengths, jnp.int32), jnp.asarray(OFFSETS, jnp.int32)
    tiles = canonical_queries(problem, query, kv_lengths, None, offsets, Part({}, {}, {})).tiles
    return {
        "query": query,
        "key": key,
        "value": value,
        "page_table": table,
        "kv_lengths": np.asarray(kv_lengths),
        "tiles": np.asarray(tiles),
        "sinks": generator.normal(size=problem.query_heads).astype(np.float32),
        "zeros": np.zeros(1, np.int32),
        "score_scale": generator.uniform(-1, 1, size=(problem.batch, problem.key_heads)).astype(np.float32),
        "key_scale": np.where(is_used[..., None], generator.uniform(0.5, 2, size=pool[:3]), np.nan).astype(np.float32),
        "value_scale": value_scales_of(problem, is_used, generator),
    }


def value_scales_of(problem, is_used, generator):
    """Return scales of values by head, or by token; those of tokens differ by factors of up to a million."""
    if problem.value_scale != "token":
        return generator.uniform(-2, 2, size=(problem.batch, problem.key_heads)).astype(np.float32)
    shape = (*is_used.shape, problem.key_heads)
    scales = 10 ** generator.uniform(-3, 3, size=shape) * generator.choice([-1, 1], size=shape)
    return np.where(is_used[..., None], scales, np.nan).astype(np.float32)


def launch_of(problem, **changes):
    """Return the plan of the kernel in few programs, and its inputs, of which some may be given."""
    launch, arrays = PagedLaunch(problem.tiled, "prompts"), inputs_of(problem) | changes
    plan = launch.plan(Target(90, 2))
    is_narrow = problem.query_dtype in EIGHT_BIT_FLOATS
    assert plan.kernel.__name__ == ("paged_eight_bit_prompts" if is_narrow else "paged_prompts")
    return plan, [arrays[name] for name in launch.input_names]


def interpreted(problem, **options):
    """Return output and log-sum-exp."""
    plan, arrays = launch_of(problem)
    output, log_sum, _ = interpret_gluon(plan, *arrays, **options)
    return output, log_sum


def expected(problem, is_positive=False):
    """Return what the reference computes in float32, perhaps with the magnitudes of values instead of these."""
    given = {name: jnp.asarray(x) for name, x in inputs_of(problem).items()}
    value, value_scale = given["value"].astype(jnp.float32), given["value_scale"]
    if is_positive:
        value, value_scale = jnp.abs(value), jnp.abs(value_scale)
    wide = dataclasses.replace(problem.tiled, query_dtype="float32", output_dtype="float32")
    return reference.forward(
        wide,
        given["query"].astype(jnp.float32),
        given["key"].astype(jnp.float32),
        value,
        given["page_table"] if problem.has_page_table else None,
        given["kv_lengths"],
        None,
        given["sinks"] if problem.has_sinks else None,
        given["score_scale"] if problem.has_score_scale else None,
        given["key_scale"] if problem.key_scale == "token" else None,
        None if problem.value_scale == "none" else value_scale,
        given["tiles"],
    )


def assert_equal_to_the_reference(problem, output, log_sum):
    exact, few = expected(problem), OFFSETS[1]
    # Rows of sequences with few queries are not written.
    assert np.isnan(np.asarray(output[:few], np.float32)).all() and np.isnan(log_sum[:few]).all()
    output, log_sum = np.asarray(output[few:], np.float32), log_sum[few:]
    unit = float(jnp.finfo(jnp.dtype(problem.output_dtype)).eps)
    bound = 4 * unit * (1 + np.abs(exact[0][few:]))
    if problem.query_dtype in EIGHT_BIT_FLOATS:
        # Each weight is rounded to three bits after its first one, or is at most 2^-18 of the largest.
        magnitudes = np.asarray(expected(problem, is_positive=True)[0][few:])
        lost = max(keys_of(problem)) * 2**-18 * magnitudes.max(-1, keepdims=True)
        bound = 2**-4 * magnitudes + 2 * unit * np.abs(exact[0][few:]) + lost
        error, whole = (np.linalg.norm(x, axis=-1) for x in (output - exact[0][few:], exact[0][few:]))
        assert (error <= 0.08 * whole).all()
    assert (np.abs(output - exact[0][few:]) <= bound).all()
    np.testing.assert_allclose(log_sum, exact[1][few:], atol=1e-4, rtol=1e-5)
    assert not output[OFFSETS[-1] - few :].any() and (log_sum[OFFSETS[-1] - few :] == -np.inf).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernel_matches_the_reference(name):
    assert_equal_to_the_reference(PROBLEMS[name], *interpreted(PROBLEMS[name], is_checked=True))


@pytest.mark.parametrize("scale", [0.2, 8.0])
def test_weights_at_the_largest_scores_neither_saturate_nor_vanish(scale):
    """Scores are the largest and smallest that e4m3 has, and exponents are on both sides of 2^22."""
    problem = dataclasses.replace(PROBLEMS["e4m3"], is_causal=False, scale=scale)
    inputs = inputs_of(problem)
    largest = EIGHT_BIT_FLOATS["float8_e4m3fn"].largest
    key = np.where(np.random.default_rng(1).random(inputs["key"].shape[:3]) < 0.1, largest, -largest)[..., None]
    key = np.broadcast_to(key, inputs["key"].shape).astype(inputs["key"].dtype)
    query = np.full(inputs["query"].shape, largest).astype(inputs["query"].dtype)
    plan, arrays = launch_of(problem, query=query, key=key)
    output, log_sum, _ = interpret_gluon(plan, *arrays)
    for sequence, (begin, end) in enumerate(itertools.pairwise(OFFSETS)):
        if end - begin <= problem.few_queries:
            continue
        token = np.arange(KEYS[sequence])
        places = inputs["page_table"][sequence, token // problem.page_size], token % problem.page_size
        is_large, value = (
            np.asarray(key[places], np.float32)[..., 0] > 0,
            np.asarray(inputs["value"][places], np.float32),
        )
        for head in range(problem.query_heads):
            seen = value[is_large[:, head // problem.group_size], head // problem.group_size]
            found = np.asarray(output[begin:end, head], np.float32)
            np.testing.assert_allclose(found, np.broadcast_to(seen.mean(0), found.shape), atol=2e-2)
            exponent = scale * largest**2 * problem.head_dim + math.log(len(seen))
            np.testing.assert_allclose(log_sum[begin:end, head], exponent, rtol=1e-6)


def test_earlier_chunks_keep_their_share_at_large_scores():
    """Exponents near 2^22 are rounded by up to 1/8, and by different amounts for the largest scores of two chunks."""
    problem = dataclasses.replace(PROBLEMS["e4m3"], is_causal=False, scale=0.19164)
    inputs = inputs_of(problem)
    largest, token = EIGHT_BIT_FLOATS["float8_e4m3fn"].largest, np.arange(KEYS[1])
    places = inputs["page_table"][1, token // problem.page_size], token % problem.page_size
    # The chunk at the end comes first. Its scores are 14 below those of the first three keys.
    is_low, is_high = token >= 256, token < 3
    query = np.full(inputs["query"].shape, largest)
    query[..., 0] = 2.0**-6
    key, value = (np.array(inputs[name], np.float32) for name in ("key", "value"))
    key[places] = np.where(is_low | is_high, largest, -largest)[:, None, None]
    key[(*places, slice(None), 0)] = np.where(is_high, largest, -largest)[:, None]
    value[places] = np.where(is_high, 0, 1)[:, None, None]
    dtype = inputs["key"].dtype
    plan, arrays = launch_of(problem, query=query.astype(dtype), key=key.astype(dtype), value=value.astype(dtype))
    output = interpret_gluon(plan, *arrays)[0][OFFSETS[1] : OFFSETS[2]]
    low = is_low.sum() * math.exp(-14 * problem.scale)
    np.testing.assert_allclose(np.asarray(output, np.float32), low / (low + is_high.sum()), rtol=0.02)


@pytest.mark.parametrize("naps", [SLOW_LOAD, SLOW_GROUP, SLOW_COMPUTE], ids=["load", "group", "compute"])
@pytest.mark.parametrize("name", ["causal", "heads of 256", "e4m3", "e4m3, pages of 4", "e4m3, scales by token"])
def test_results_do_not_depend_on_slow_warps(name, naps):
    punctual = interpreted(PROBLEMS[name])
    for one, other in zip(interpreted(PROBLEMS[name], chance=Slow(*naps)), punctual, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
