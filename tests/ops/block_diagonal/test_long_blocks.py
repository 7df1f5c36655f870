"""Blocks of more than 256 rows: values and gradients, transformations, and their layout for the kernels."""

import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockdiag
from blockdiag import block_diagonal_attention, fused_qkv_block_attention
from blockdiag.common.dispatch import capabilities
from blockdiag.common.packing import tiles_from_lengths
from blockdiag.fusion.runtime import kernel_choice
from blockdiag.fusion.runtime import xla as fused_xla
from blockdiag.interop import jax_call
from blockdiag.ops.block_diagonal import region as blocks
from blockdiag.ops.block_diagonal import triton_long
from blockdiag.ops.block_diagonal.checks import describe_call
from blockdiag.ops.block_diagonal.layouts import Windows, WindowSizes, window_sizes
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch
from blockdiag.triton_kernels.launch.plan import Target, TensorSpec
from tests.support import (
    Case,
    RotaryCase,
    assert_accurate,
    compiled_call,
    compiled_quickly,
    exact_attention,
    largest_error,
    value_and_gradients,
)
from tests.triton_kernels.plans_support import report_of

CASES = {
    "full blocks": Case(lengths=(600, 600), block_size=300),
    "partial blocks": Case(
        lengths=(700,), block_size=512, is_causal=True, query_heads=2, key_heads=1, dtype="bfloat16"
    ),
    "a block for each sequence": Case(lengths=(1000,), block_size=1000, query_heads=1, key_heads=1, scale=0.7),
    "longer than every sequence": Case(
        lengths=(290, 290), block_size=10**6, head_dim=24,
        rotary=RotaryCase(tables="token", apply_to=("query", "key", "value")),
    ),
    "lengths": Case(
        lengths=(300, 0, 1000, 17, 1), layout="lengths", block_size=1000, padding=40, query_heads=1, key_heads=1,
        rotary=RotaryCase(interleaved=True),
    ),
    "offsets": Case(
        lengths=(650, 3, 0, 270), layout="offsets", block_size=512, padding=30, is_causal=True, query_heads=4,
        rotary=RotaryCase(tables="explicit"),
    ),
}  # fmt: skip

# There are few tiles, because the interpreter takes some milliseconds for each.
INTERPRETED = {
    "full blocks": Case(
        lengths=(600,), block_size=300, query_heads=2, key_heads=1, dtype="bfloat16", is_causal=True
    ),
    "partial blocks": Case(
        lengths=(520,), block_size=512, query_heads=1, key_heads=1, dtype="float16", rotary=RotaryCase()
    ),
    "lengths": Case(
        lengths=(300, 0, 17, 1), layout="lengths", block_size=1000, padding=40, query_heads=1, key_heads=1,
        dtype="bfloat16",
    ),
    "offsets": Case(
        lengths=(1000, 3), layout="offsets", block_size=1000, padding=9, query_heads=1, key_heads=1, dtype="bfloat16",
        is_causal=True, rotary=RotaryCase(tables="explicit", interleaved=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_array_implementations_are_accurate(name):
    case = CASES[name]
    operands = case.operands()
    for implementation in ("reference", "xla"):
        assert_accurate(case, case.results(implementation), operands)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernels_are_accurate_and_repeatable(name):
    """A second run gives the same bits."""
    case = INTERPRETED[name]
    operands = case.operands()
    first = case.results("triton")
    assert_accurate(case, first, operands)
    if name == "lengths":
        for one, other in zip(first, case.results("triton"), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_repeated_calls_agree_bitwise():
    case = CASES["offsets"]
    for first, second in zip(case.results("xla"), case.results("xla"), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("name", "implementation"), [("offsets", "xla"), ("lengths", "triton")])
def test_nan_stays_in_its_block(name, implementation):
    """NaN in one block, and in padding, changes no bit of any other block."""
    case = (CASES if implementation == "xla" else INTERPRETED)[name]
    poisoned = max(case.blocks, key=lambda block: block.length)
    is_bad = np.zeros(case.tokens, bool)
    is_bad[poisoned.start : poisoned.start + poisoned.length] = True
    is_bad[sum(case.lengths) :] = True
    run, operands = compiled_call(case, implementation), case.operands()
    dirty = run(*(jnp.where(is_bad[:, None, None], jnp.asarray(np.nan, x.dtype), x) for x in operands))
    for before, after in zip(run(*operands), dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(before)[~is_bad], np.asarray(after)[~is_bad])
        assert not np.asarray(after)[sum(case.lengths) :].any()


def test_mapped_calls_equal_single_calls():
    case = dataclasses.replace(CASES["lengths"], lengths=(290, 0, 3), padding=7, block_size=300, dtype="float32")
    single = functools.partial(value_and_gradients, case.attend("xla"))
    operands = [jnp.stack([x, -2 * x]) for x in case.operands()]
    mapped = compiled_quickly(jax.vmap(single))(*operands)
    for index in range(2):
        alone = compiled_quickly(single)(*(x[index] for x in operands))
        for one, other in zip(mapped, alone, strict=True):
            np.testing.assert_array_equal(one[index], other)


def test_second_derivatives_match_the_reference():
    """First derivatives keep the log-sum-exp, which second derivatives must differentiate as well."""
    case = Case(lengths=(270, 9), layout="lengths", block_size=270, query_heads=1, key_heads=1)
    query, key, value, cotangent = case.operands()

    def curvature(implementation):
        def penalty(query, key):
            gradients = jax.grad(
                lambda *operands: jnp.vdot(case.attend(implementation)(*operands, value), cotangent), (0, 1)
            )
            return sum(jnp.vdot(x, x) for x in gradients(query, key))

        return compiled_quickly(jax.grad(penalty, (0, 1)))(query, key)

    for one, other in zip(curvature("xla"), curvature("reference"), strict=True):
        assert largest_error(one, np.asarray(other, np.float64)) <= 1e-4 * np.abs(other).max()


def test_checkpoint_policy_that_saves_the_output_skips_the_forward_pass():
    case = CASES["full blocks"]
    *operands, cotangent = case.operands()
    keep = jax.checkpoint_policies.save_only_these_names(blockdiag.BLOCK_DIAGONAL_OUTPUT)

    def launches(**options):
        attend = jax.checkpoint(case.attend("triton"), **options)
        program = jax.make_jaxpr(functools.partial(value_and_gradients, attend))(*operands, cotangent)
        names = [e.params["spec"].name for e in equations(program.jaxpr) if e.primitive is jax_call.launch_p]
        # The program has a branch with these launches for each platform, so the counts are divided.
        return names.count("fused_forward") / names.count("fused_rows")

    assert launches(policy=keep) == 1
    assert launches() == 2


def test_shard_map_over_the_batch_matches_one_device():
    """Two devices share a key and a value, whose gradients are summed."""
    case = CASES["full blocks"]
    query, key, value, cotangent = case.operands()
    mesh = jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def run(query, key, value, cotangent):
        def attend(query, key, value):
            key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
            return case.attend("xla")(query, key, value)

        return value_and_gradients(attend, query, key, value, cotangent)

    split, whole = jax.P("batch"), jax.P()
    given, results = (split, whole, whole, split), (split, split, whole, whole)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=results, check_vma=True)
    operands = (query, key[:1], value[:1], cotangent)
    for one, other in zip(compiled_quickly(sharded)(*operands), compiled_quickly(run)(*operands), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_fused_projection_matches_separate_projections(implementation):
    """This attention splits the packed buffer."""
    x = jax.random.normal(jax.random.key(0), (270, 8))
    w_qkv = jax.random.normal(jax.random.key(1), (8, 4 * 16)) / 4

    def run(attend):
        output, pull_back = jax.vjp(attend, x, w_qkv)
        return output, *pull_back(jnp.cos(output))

    def fused(x, w_qkv):
        sizes = {"query_heads": 2, "key_heads": 1, "head_dim": 16}
        return fused_qkv_block_attention(x, w_qkv, block_size=270, implementation=implementation, **sizes)

    def apart(x, w_qkv):
        packed = jnp.dot(x, w_qkv, precision="highest").reshape(-1, 4, 16)
        query, key, value = jnp.split(packed, (2, 3), axis=1)
        return block_diagonal_attention(query, key, value, block_size=270, implementation="reference")

    for one, other in zip(compiled_quickly(lambda: run(fused))(), compiled_quickly(lambda: run(apart))(), strict=True):
        assert largest_error(one, np.asarray(other, np.float64)) <= 1e-5 * np.abs(other).max()


def equations(jaxpr):
    """Yield all equations of a program, including those of calls and loops."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("layout", ["batch", "lengths"])
def test_largest_array_is_linear_in_tokens(implementation, layout):
    """Arrays of the forward and backward pass do not grow quadratically with the tokens or the block length."""

    def largest(tokens):
        case = Case(
            lengths=(tokens,) if layout == "batch" else (tokens // 2, 7, tokens // 4), layout=layout,
            block_size=tokens // 2, query_heads=1, key_heads=1, dtype="bfloat16", is_causal=True,
        )  # fmt: skip
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands()]
        program = jax.make_jaxpr(functools.partial(value_and_gradients, case.attend(implementation)))(*structs)
        return max(math.prod(x.aval.shape) for e in equations(program.jaxpr) for x in e.outvars)

    assert largest(16384) <= 4.5 * largest(4096)


def problem_of(case: Case) -> BlockDiagonalProblem:
    """Return the problem of a case."""
    query, key, *_ = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands())
    packing = {"sequence_offsets": None, "block_lengths": None} | case.packing
    return describe_call(
        query, key, block_size=case.block_size, rotary=None, scale=case.scale, is_causal=case.is_causal, **packing
    )


PROBLEM = problem_of(Case(lengths=(600,), block_size=300))

# Blocks have up to 300 rows, and a new window begins after about 500 rows.
TOKENS, NUM_BLOCKS, LONGEST = 2600, 8, 300


@functools.cache
def windowed(alignment):
    """Return a function that places blocks in windows.

    It returns the token of each window row (from 1, or 0 for none), these numbers by token, and the segments.
    """
    problem = dataclasses.replace(PROBLEM, tokens=TOKENS, block_size=LONGEST, sequence_length=None, num_tiles=17)
    capacity = 512 // alignment * alignment
    sizes = WindowSizes(alignment, capacity, capacity + -(-LONGEST // alignment) * alignment, 3600 // capacity)

    @compiled_quickly
    def lay(lengths):
        windows = Windows(problem, tiles_from_lengths(lengths, TOKENS, LONGEST), sizes)
        placed = windows.to_tiles(jnp.arange(1, TOKENS + 1, dtype=jnp.int32))
        return placed, windows.to_tokens(placed), *windows.segments

    return lay


@pytest.mark.parametrize("alignment", [32, 128])
@hypothesis.given(data=st.data())
def test_windows_place_every_token_once_and_separate_blocks(alignment, data):
    """Every token has one place, tiles have rows of one block, and segments match blocks."""
    length = st.one_of(st.sampled_from([0, 1, LONGEST]), st.integers(0, LONGEST))
    lengths = np.asarray(data.draw(st.lists(length, min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)), np.int32)
    placed, back, query_segments, key_segments = map(np.asarray, windowed(alignment)(lengths))
    expected = np.where(np.arange(TOKENS) < lengths.sum(), np.arange(1, TOKENS + 1), 0)
    np.testing.assert_array_equal(np.sort(placed[placed > 0]), expected[expected > 0])
    np.testing.assert_array_equal(back, expected)

    is_token = placed > 0
    block = np.where(is_token, np.searchsorted(np.cumsum(lengths), placed - 1, side="right") + 1, 0)
    assert all(len(set(run) - {0}) <= 1 for run in block.reshape(-1, alignment))
    seen = query_segments[:, :, None] == key_segments[:, None, :]
    # No query row, with or without a token, sees a key row without a token. Tokens see the keys of their block.
    assert not (seen & ~is_token[:, None, :]).any()
    same = (block[:, :, None] == block[:, None, :]) & is_token[:, None, :]
    np.testing.assert_array_equal(seen[is_token], same[is_token])


def test_windows_are_few_and_small():
    for tokens, num_blocks, block_size in ((1 << 20, 1000, 2000), (1 << 20, 100_000, 300), (5000, 3, 2000)):
        num_tiles = (tokens + (num_blocks + 1) * (block_size - 1)) // block_size
        problem = dataclasses.replace(
            PROBLEM, tokens=tokens, block_size=block_size, num_tiles=num_tiles, sequence_length=None
        )
        sizes = window_sizes(problem, 128)
        assert sizes.capacity % 128 == 0 and sizes.rows % 128 == 0
        assert sizes.count == 1 or sizes.rows == sizes.capacity + -(-block_size // 128) * 128
        assert sizes.count * sizes.capacity >= tokens + num_tiles * 127
        assert sizes.count * sizes.rows <= 1.3 * (tokens + num_tiles * 127) + 2 * sizes.rows


def test_attention_over_several_windows_is_accurate():
    """Each window holds only a few of the blocks."""
    case = Case(lengths=(300, 40, 0, 270, 33, 300), layout="lengths", block_size=300, padding=5, is_causal=True)
    query, key, value, _ = operands = case.operands()
    problem = problem_of(case)
    tiles = tiles_from_lengths(jnp.asarray(case.packing["block_lengths"]), case.tokens, case.block_size)
    windows = Windows(problem, tiles, WindowSizes(32, 384, 384 + 320, 4))
    attend = compiled_quickly(functools.partial(blocks.forward, fused_xla.forward, windows))
    output, log_sum = attend(query, key, value, None)
    assert largest_error(output, exact_attention(case, operands)[0]) <= 1e-5
    assert log_sum.shape == (case.tokens, case.query_heads) and not np.asarray(log_sum)[-5:].any()


@pytest.mark.parametrize(("block_size", "length", "expected"), [(300, 100, 256), (1000, 700, 700), (300, 700, 300)])
def test_block_size_is_limited_by_the_sequence_length(block_size, length, expected):
    """Blocks that fit into one tile of scores are computed in one, even if the caller allows longer blocks."""
    assert problem_of(Case(lengths=(length, length), block_size=block_size)).block_size == expected
    packed = problem_of(Case(lengths=(length - 7, 7), layout="offsets", block_size=block_size))
    assert packed.block_size == expected


def test_capabilities_of_long_blocks_name_the_limits():
    reasons = capabilities(dataclasses.replace(PROBLEM, dtype="bfloat16"))
    assert reasons["reference"] is None and reasons["xla"] is None and reasons["triton"] is None
    assert "block_size 64, got 300" in reasons["pallas"]
    assert "float64" in capabilities(dataclasses.replace(PROBLEM, dtype="float64"))["triton"]
    assert "256" in capabilities(dataclasses.replace(PROBLEM, head_dim=264))["triton"]
    with jax.enable_x64(True):
        case = dataclasses.replace(CASES["a block for each sequence"], dtype="float64", lengths=(280,))
        assert_accurate(case, case.results("xla"), case.operands())


def test_long_block_kernels_fit_hopper():
    """The kernels, compiled for an H100, use lists of tiles and matrix instructions and no local memory in loops."""
    case = Case(
        lengths=(2000, 96), layout="lengths", block_size=2000, head_dim=64, dtype="bfloat16", query_heads=4,
        is_causal=True,
    )  # fmt: skip
    problem = problem_of(case)
    region = triton_long.region_in_windows(problem, triton_long.sizes_of_windows(problem))
    found = []

    def trace(leaves, value, rows, result):
        arrays = {f"leaf{i}": x for i, x in enumerate(leaves)}
        arrays |= {"value": value, "log_sum": rows, "delta": rows, "cotangent": result}
        for kernel in (kernel_choice.forward_kernel(region, arrays), *kernel_choice.backward_kernels(region, arrays)):
            specs = [TensorSpec(x.shape, x.dtype.name) for x in kernel.given(arrays)]
            found.append(kernel.launch(specs))

    leaves = [jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in region.leaves]
    rows = jax.ShapeDtypeStruct([region.sizes[x] for x in (*region.batch, "q")], jnp.float32)
    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct(region.value.shape, region.value.dtype), rows, leaves[0])
    assert len(found) >= 3
    for launch in found:
        assert any("live_counts" in name for name in launch.source.inputs)
        report = report_of(launch.plan(Target.for_arch(90)), 90)
        assert report.ptx["wgmma"] > 0 and report.ptx["atom"] == 0 and report.shared_bytes <= report.shared_limit
        assert not any(depth > 0 and count for depth, count in report.local_accesses.items()), str(report)


def test_chunked_kernels_of_long_blocks_are_accurate():
    """torch launches these kernels natively."""
    case = INTERPRETED["lengths"]
    query, key, value, cotangent = operands = case.operands()
    problem = problem_of(case)
    tiles = tiles_from_lengths(jnp.asarray(case.packing["block_lengths"]), case.tokens, problem.block_size)

    def launch(kind, *arrays):
        spec = BlockDiagonalLaunch(problem, kind, is_portable=True)
        return jax_call.launch(spec, query, key, value, *arrays, tiles, interpret=True)

    (output,) = launch("forward")
    d_query, log_sum, delta = launch("query_gradient", cotangent)
    d_key, d_value = launch("key_gradient", cotangent, log_sum, delta)
    assert_accurate(case, (output, d_query, d_key, d_value), operands)
