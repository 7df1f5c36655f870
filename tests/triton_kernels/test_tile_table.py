"""The tile table that a kernel makes, compared with the one that JAX makes."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.common.packing import tiles_from_lengths, tiles_from_offsets
from blockdiag.common.tile_counts import count_length_tiles, count_offset_tiles

pytest.importorskip("triton")

from blockdiag.interop.interpreter.launch import interpret_plan
from blockdiag.triton_kernels.launch.offline import inspect_plan
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.parts.tile_table import TileTableLaunch
from tests.support import compiled_quickly

MANY = np.random.default_rng(0)
OFFSETS = {
    "no sequences": [0],
    "one": [0, 100],
    "empty ones": [0, 0, 70, 70, 71, 135, 135],
    "tail": [0, 64, 128],
    "late start": [10, 80],
    "decreasing": [0, 90, 40, 150],
    "negative and beyond": [-5, 20, 10_000, 30],
    "more than a chunk": np.sort(MANY.integers(0, 1001, 300)),
    "exactly a chunk": np.arange(128) * 3,
}
LENGTHS = {
    "none": [],
    "one": [40],
    "mixed": [0, 1, 64, 63, 0, 17],
    "too long": [100, 5],
    "negative": [-3, 10],
    "beyond the tokens": [64] * 40,
    "overflowing": [2**31 - 1] * 3,
    "more than a chunk": MANY.integers(0, 5, 300),
}


def expected_table(function, values, block_size):
    """Return the table that JAX makes in one program.

    Operation by operation, each shape would be compiled dozens of times.
    """
    return compiled_quickly(functools.partial(function, tokens=1001, block_size=block_size))(jnp.asarray(values))


def table_of(kind, values, tokens, block_size):
    count = count_offset_tiles(tokens, len(values) - 1, block_size)
    if kind == "lengths":
        count = count_length_tiles(tokens, len(values), block_size)
    launch = TileTableLaunch(kind=kind, num_values=len(values), num_tiles=count, tokens=tokens, block_size=block_size)
    (table,) = interpret_plan(launch.plan(Target.for_arch(90)), values)
    return table


@pytest.mark.parametrize("block_size", [17, 64])
@pytest.mark.parametrize("case", OFFSETS)
def test_table_of_offsets_equals_that_of_jax(case, block_size):
    values = np.asarray(OFFSETS[case], np.int32)
    expected = expected_table(tiles_from_offsets, values, block_size)
    np.testing.assert_array_equal(table_of("offsets", values, 1001, block_size), expected)


@pytest.mark.parametrize("case", LENGTHS)
def test_table_of_lengths_equals_that_of_jax(case):
    values = np.asarray(LENGTHS[case], np.int32)
    expected = expected_table(tiles_from_lengths, values, 64)
    np.testing.assert_array_equal(table_of("lengths", values, 1001, 64), expected)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_table_kernel_compiles_without_spills(arch):
    launch = TileTableLaunch(kind="offsets", num_values=1153, num_tiles=27_000, tokens=1_600_000, block_size=64)
    report = inspect_plan(launch.plan(Target.for_arch(arch)), arch)
    assert report.spill_bytes == 0 and report.ptx["f64"] == 0, str(report)
