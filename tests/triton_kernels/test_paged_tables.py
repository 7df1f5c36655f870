"""The kernel that builds tables of tiles of paged attention, against the table that JAX builds."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.common.shards import Part
from blockdiag.interop.interpreter.launch import interpret_plan
from blockdiag.ops.paged.packed import canonical_queries
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.paged.tables import TilesLaunch
from tests.triton_kernels.plans_support import report_of
from tests.triton_kernels.test_paged_plans import BASE

SMALL = dataclasses.replace(BASE, query_heads=8, key_heads=2, num_splits=1)
# Rows, offsets, lengths of keys.
PACKED = {
    "mixed": (700, [0, 1, 301, 301, 304, 640], [500, 300, 7, 3, 1000]),
    "rows on both sides": (100, [3, 40, 90], [37, 60]),
    "garbage": (100, [-3, 50, 20, 60, 99, 2**31 - 1, -5], [-4, 2**31 - 1, 5, 60, 0, 1]),
    "no rows inside": (64, [64, 64], [5]),
    "many sequences": (900, list(range(0, 901, 3)), list(range(300))),
}
BATCHES = {
    "equal": (3, 70, None, [70, 500, 3]),
    "lengths": (4, 70, [70, 0, -3, 2**31 - 1], [70, 500, 3, 0]),
    "many sequences": (150, 33, [x % 40 for x in range(150)], list(range(150))),
}


def assert_equal_to_jax(problem, kv_lengths, query_lengths, offsets):
    kv_lengths, query_lengths, offsets = (
        None if x is None else np.asarray(x, np.int32) for x in (kv_lengths, query_lengths, offsets)
    )
    shape = (problem.batch, problem.query_tokens) if problem.packed_rows is None else (problem.packed_rows,)
    query = jnp.zeros((*shape, 8, 128), jnp.bfloat16)
    expected = canonical_queries(
        problem, query, jnp.asarray(kv_lengths), query_lengths, offsets, Part({}, {}, {})
    ).tiles
    launch = TilesLaunch(problem)
    arrays = {"kv_lengths": kv_lengths, "query_lengths": query_lengths, "query_offsets": offsets}
    tiles, zeros = interpret_plan(launch.plan(Target.for_arch(90)), *(arrays[name] for name in launch.input_names))
    np.testing.assert_array_equal(tiles, expected)
    assert zeros.tolist() == [0]
    # Every row is in one tile.
    rows = [np.arange(row, row + count) for row, count, _, _ in np.asarray(tiles)[: problem.tiled.num_tiles]]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(problem.tiled.packed_rows))


@pytest.mark.parametrize("few", [None, 8])
@pytest.mark.parametrize("name", PACKED)
def test_table_of_packed_queries_equals_that_of_jax(name, few):
    rows, offsets, kv_lengths = PACKED[name]
    problem = dataclasses.replace(
        SMALL, batch=len(kv_lengths), packed_rows=rows, query_tokens=rows, few_queries=few, has_query_lengths=True
    )
    assert_equal_to_jax(problem, kv_lengths, None, offsets)


@pytest.mark.parametrize("name", BATCHES)
def test_table_of_a_batch_equals_that_of_jax(name):
    batch, tokens, query_lengths, kv_lengths = BATCHES[name]
    problem = dataclasses.replace(
        SMALL, batch=batch, query_tokens=tokens, few_queries=0, has_query_lengths=query_lengths is not None
    )
    assert_equal_to_jax(problem, kv_lengths, query_lengths, None)


@pytest.mark.every_case
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_plan_fits_its_architecture(arch):
    problem = dataclasses.replace(SMALL, batch=40, packed_rows=4096, query_tokens=4096, few_queries=8)
    report = report_of(TilesLaunch(problem).plan(Target.for_arch(arch)), arch)
    assert report.shared_bytes <= report.shared_limit and report.spill_bytes == 0, str(report)
