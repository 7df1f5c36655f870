"""The kernel of latent caches for Hopper in the interpreter: results, schedules of warps, the order of accesses."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.common.shards import Part
from blockdiag.interop.interpreter.launch import interpret_plan
from blockdiag.ops.paged import reference
from blockdiag.ops.paged.packed import canonical_queries
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.plan import Constexpr, Target
from blockdiag.triton_kernels.paged.plans import launches
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.gluon_protocol import Slow

BASE = PagedProblem(
    batch=3,
    query_tokens=1,
    query_heads=12,
    key_heads=1,
    head_dim=576,
    value_dim=512,
    query_dtype="bfloat16",
    key_dtype="bfloat16",
    value_dtype="bfloat16",
    output_dtype="bfloat16",
    has_value_pages=False,
    num_pages=20,
    page_size=64,
    max_pages=6,
    scale=0.04,
    num_splits=2,
)
PROBLEMS = {
    "decoding": BASE,
    "one split, sinks": dataclasses.replace(BASE, num_splits=1, has_sinks=True),
    "drafts, pages of 16, window, soft cap": dataclasses.replace(
        BASE, query_tokens=7, page_size=16, num_pages=80, max_pages=24, window=(90, None), soft_cap=5.0, num_splits=1
    ),
    "pages of 3, both sides": dataclasses.replace(
        BASE, query_tokens=3, page_size=3, num_pages=400, max_pages=128, is_causal=False, window=(300, 20),
        num_splits=1,
    ),
    "contiguous, fixed splits": dataclasses.replace(
        BASE, has_page_table=False, num_pages=3, page_size=390, max_pages=1, num_splits=4, split_size=128
    ),
    "float16, two key heads, lengths of queries": dataclasses.replace(
        BASE, query_tokens=3, key_heads=2, has_query_lengths=True,
        **{name: "float16" for name in ("query_dtype", "key_dtype", "value_dtype", "output_dtype")},
    ),
    "packed, two splits, window, sinks": dataclasses.replace(
        BASE, query_tokens=24, packed_rows=24, has_sinks=True, window=(150, None)
    ),
    "prompts beside decoding": dataclasses.replace(
        BASE, query_tokens=24, packed_rows=24, few_queries=4, num_splits=1
    ),
}  # fmt: skip
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def narrow(dtype, **changes):
    """Return a problem with keys of eight bits."""
    return dataclasses.replace(BASE, key_dtype=dtype, value_dtype=dtype, **changes)


PROBLEMS |= {
    "e4m3, scales of tokens": narrow(E4M3, key_scale="token", value_scale="token"),
    "e4m3, scales of heads, drafts, pages of 3, soft cap": narrow(
        E4M3, has_score_scale=True, value_scale="head", query_tokens=3, page_size=3, num_pages=400, max_pages=128,
        soft_cap=5.0, num_splits=1,
    ),
    "e5m2, float16, two key heads": narrow(
        E5M2, key_heads=2, **{name: "float16" for name in ("query_dtype", "output_dtype")}
    ),
    "int8, scales of tokens, packed, window, sinks": narrow(
        "int8", key_scale="token", value_scale="token", query_tokens=24, packed_rows=24, has_sinks=True,
        window=(150, None),
    ),
    "e4m3, contiguous, a scale of all values": narrow(
        E4M3, has_page_table=False, num_pages=3, page_size=390, max_pages=1, num_splits=4, split_size=128,
        has_score_scale=True,
    ),
}  # fmt: skip
KEYS, QUERIES = [384, 5, 150], [2, 3, 0]
OFFSETS = [0, 3, 18, 23]
# The delays of the partitions, in seconds: the two compute groups, and load.
SLOW_LOAD, SLOW_FIRST, SLOW_SECOND = (0, 0, 1e-3), (1e-3, 0, 0), (0, 1e-3, 0)


def inputs_of(problem):
    """Return the arrays of a call by name; rows of pages that no sequence has are NaN."""
    generator = np.random.default_rng(0)
    dtype = jnp.dtype(problem.query_dtype)
    pool = (problem.num_pages, problem.page_size, problem.key_heads, problem.head_dim)
    table = generator.permutation(problem.num_pages)[: problem.batch * problem.max_pages]
    table = np.resize(table, (problem.batch, problem.max_pages)).astype(np.int32)
    if not problem.has_page_table:
        table = np.arange(problem.batch, dtype=np.int32)[:, None]
    is_used = np.zeros(pool[:2], bool)
    for pages, length in zip(table, KEYS, strict=True):
        token = np.arange(length)
        is_used[pages[token // problem.page_size], token % problem.page_size] = True
    rows = (problem.packed_rows,) if problem.packed_rows else (problem.batch, problem.query_tokens)
    key = generator.normal(size=pool)
    if problem.key_dtype == "int8":
        # No integer is NaN, but the scales of unused rows are.
        key = np.where(is_used[..., None, None], np.round(40 * key), 127).clip(-128, 127)
    else:
        key = np.where(is_used[..., None, None], key, np.nan)
    scale = (0.02 if problem.key_dtype == "int8" else 1.0) * generator.uniform(0.5, 1.5, size=pool[:3])
    arrays = {
        "query": generator.normal(size=(*rows, problem.query_heads, problem.head_dim)).astype(dtype),
        "key": key.astype(jnp.dtype(problem.key_dtype)),
        "key_scale": np.where(is_used[..., None], scale, np.nan).astype(np.float32),
        "score_scale": generator.uniform(0.5, 1.5, size=(problem.batch, problem.key_heads)).astype(np.float32),
        "value_scale": generator.uniform(0.5, 1.5, size=(problem.batch, problem.key_heads)).astype(np.float32),
        "page_table": table,
        "kv_lengths": np.asarray(KEYS, np.int32),
        "query_lengths": np.asarray(QUERIES, np.int32),
        "sinks": generator.normal(size=problem.query_heads).astype(np.float32),
        "zeros": np.zeros(1, np.int32),
    }
    if problem.packed_rows:
        lengths, offsets = jnp.asarray(KEYS, jnp.int32), jnp.asarray(OFFSETS, jnp.int32)
        parts = canonical_queries(problem, arrays["query"], lengths, None, offsets, Part({}, {}, {}))
        arrays["tiles"] = np.asarray(parts.tiles)
    return arrays


def plans_of(problem):
    """Return the launches of a call and their plans on Hopper, of which each kernel of splits is the one tested."""
    for launch in launches(problem.tiled):
        plan = launch.plan(Target(90, 2))
        if launch.kind != "merge":
            assert plan.kernel.__name__ == "latent_splits"
        yield launch, plan


def launch_of(problem):
    """Return the plan of the first launch, and its inputs."""
    (launch, plan), arrays = next(plans_of(problem)), inputs_of(problem)
    return plan, [arrays[name] for name in launch.input_names]


def interpreted(problem, **options):
    """Return output and log-sum-exp."""
    arrays = inputs_of(problem)
    for launch, plan in plans_of(problem):
        given = [arrays[name] for name in launch.input_names]
        run = functools.partial(interpret_gluon, **options) if plan.kernel.is_gluon() else interpret_plan
        results = run(plan, *given)
        arrays |= dict(zip(launch.output_names, results, strict=True))
    return np.asarray(arrays["output"], np.float32), np.asarray(arrays["log_sum"])


def expected(problem):
    """Return what the reference computes in float32."""
    given = {name: jnp.asarray(x) for name, x in inputs_of(problem).items()}
    wide = dataclasses.replace(problem.tiled, query_dtype="float32", output_dtype="float32", num_splits=1)
    return reference.forward(
        wide,
        given["query"].astype(jnp.float32),
        given["key"].astype(jnp.float32),
        None,
        given["page_table"] if problem.has_page_table else None,
        given["kv_lengths"],
        given["query_lengths"] if problem.has_query_lengths else None,
        given["sinks"] if problem.has_sinks else None,
        given["score_scale"] if problem.has_score_scale else None,
        given["key_scale"] if problem.key_scale != "none" else None,
        {"none": None, "head": given["value_scale"], "token": given["key_scale"]}[problem.value_scale],
        given.get("tiles"),
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernel_matches_the_reference(name):
    problem = PROBLEMS[name]
    output, log_sum = interpreted(problem, is_checked=True)
    exact = [np.asarray(x, np.float64) for x in expected(problem)]
    unit = float(jnp.finfo(jnp.dtype(problem.output_dtype)).eps)
    assert (np.abs(output - exact[0]) <= 4 * unit * (1 + np.abs(exact[0]))).all()
    np.testing.assert_allclose(log_sum, exact[1], atol=1e-5, rtol=1e-5)


def test_keys_are_loaded_by_the_copy_engine_where_pages_are_large_enough():
    wide = {name: problem for name, problem in PROBLEMS.items() if problem.key_dtype == problem.query_dtype}
    boxes = {name: launch_of(problem)[0].arguments["keys"] for name, problem in wide.items()}
    assert [name for name, box in boxes.items() if box == Constexpr(None)] == ["pages of 3, both sides"]
    assert boxes["decoding"].block_shape == (64, 64)
    assert boxes["drafts, pages of 16, window, soft cap"].block_shape == (16, 64)


@pytest.mark.parametrize("naps", [SLOW_LOAD, SLOW_FIRST, SLOW_SECOND], ids=["load", "first", "second"])
@pytest.mark.parametrize("name", ["decoding", "pages of 3, both sides", "e4m3, scales of tokens"])
def test_results_do_not_depend_on_slow_warps(name, naps):
    punctual = interpreted(PROBLEMS[name])
    for one, other in zip(interpreted(PROBLEMS[name], chance=Slow(*naps)), punctual, strict=True):
        np.testing.assert_array_equal(one, other)
