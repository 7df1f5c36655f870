"""Appending to a paged cache on a GPU: accuracy, repeatability, in-place writes and huge pools."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import append_to_pages
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory
from tests.ops.append.test_append import CASES, E4M3, E5M2, grown_in_place, split_arguments
from tests.ops.append_support import AppendCase, RotaryCase, assert_appended, bits

pytestmark = pytest.mark.gpu

LARGE = {
    "prefill, packed, computed scales": AppendCase(
        before=(0, 300, 5), new=(1000, 1, 64), layout="packed", padding=7, key_heads=8, head_dim=128, value_dim=64,
        key_dtype=E4M3, value_dtype=E5M2, key_scale="token", value_scale="token", block_size=128, max_blocks=12,
        rotary=RotaryCase(),
    ),
    "prefill, int8, computed scales": AppendCase(
        before=(0, 300, 5), new=(1000, 1, 64), layout="packed", padding=7, key_heads=8, head_dim=128, value_dim=64,
        key_dtype="int8", value_dtype="int8", key_scale="token", value_scale="token", block_size=128, max_blocks=12,
        rotary=RotaryCase(),
    ),
    "batch, float16, pages of 3": AppendCase(
        before=(127, 40, 200), new=(64, 64, 64), page_size=3, key_heads=8, head_dim=72, dtype="float16",
        block_size=48, rotary=RotaryCase(tables="explicit", interleaved=True, dtype="float16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_append_is_exact_and_repeatable(name, implementation):
    case = {**CASES, **LARGE}[name]
    arguments = case.arguments()
    run = jax.jit(case.append(implementation))
    results = []
    for _ in range(2):
        poison_free_memory()
        results.append([np.asarray(x) for x in run(**arguments)])
    assert_appended(case, dict(zip(case.written, results[0], strict=True)), arguments)
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(first), bits(second))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_append_rounds_to_nearest_float8(dtype, implementation):
    """The keys are midpoints of adjacent float8 numbers, their float32 neighbours, and values out of range."""
    case = AppendCase(before=(0,), new=(1,), key_heads=1, head_dim=1024, dtype="float32", key_dtype=dtype)
    arguments = case.arguments()
    numbers = np.arange(256, dtype=np.uint8).view(arguments["key_pages"].dtype).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    tests = np.concatenate([middles, *beside, np.asarray([1e9, -1e9], np.float32)])
    arguments["key"][0, 0, 0, : tests.size] = tests
    results = jax.jit(case.append(implementation))(**arguments)
    assert_appended(case, {name: np.asarray(x) for name, x in zip(case.written, results, strict=True)}, arguments)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_append_rounds_to_nearest_integer(implementation):
    """The keys are midpoints of integers, their float32 neighbours, values out of range and NaN."""
    case = AppendCase(
        before=(0,), new=(1,), key_heads=1, head_dim=1024, dtype="float32", key_dtype="int8", key_scale="head"
    )
    arguments = case.arguments()
    arguments["key_scale"][:] = 1
    middles = np.arange(-129.5, 130, dtype=np.float32)
    beside = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    tests = np.concatenate([middles, *beside, np.asarray([1e9, -np.inf, np.inf, 1e-30, np.nan], np.float32)])
    arguments["key"][0, 0, 0, : tests.size] = tests
    results = jax.jit(case.append(implementation))(**arguments)
    assert_appended(case, {name: np.asarray(x) for name, x in zip(case.written, results, strict=True)}, arguments)


@pytest.mark.parametrize("name", ["one token", "centroids, packed, rotary, computed scales"])
def test_append_writes_donated_pages_in_place(name):
    case = CASES[name]
    written, others = split_arguments(case)
    compiled = grown_in_place(case, None).lower(written, others).compile()
    shape = ",".join(map(str, written["key_pages"].shape))
    copies = [line for line in compiled.as_text().splitlines() if f"[{shape}]" in line and " copy(" in line]
    assert not copies
    places = {name: x.unsafe_buffer_pointer() for name, x in written.items()}
    for result, name in zip(compiled(written, others), case.written, strict=True):
        assert result.unsafe_buffer_pointer() == places[name], name


@pytest.mark.xdist_group("large pools")  # one at a time, because each needs gigabytes
def test_append_to_pools_of_more_than_2_to_the_31_elements_is_exact():
    pages, page_size, heads, size = 2**31 // (16 * 8 * 128) + 5, 16, 8, 128
    pool = jnp.zeros((pages, page_size, heads, size), E5M2)
    key = jnp.full((1, 1, heads, size), 2.0, jnp.bfloat16)
    table, lengths = jnp.asarray([[3, pages - 1]], jnp.int32), jnp.asarray([32], jnp.int32)
    append = jax.jit(append_to_pages, donate_argnums=(2, 3))
    key_pages, value_pages = append(key, 2 * key, pool, jnp.zeros_like(pool), table, lengths)
    for result, number in ((key_pages, 2), (value_pages, 4)):
        assert (np.asarray(result[-1, -1]).astype(np.float32) == number).all()
        assert not np.asarray(result[-1, :-1]).astype(np.float32).any()
        assert not np.asarray(result[:4]).astype(np.float32).any()
