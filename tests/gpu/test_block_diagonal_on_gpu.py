"""Block-diagonal attention on a GPU: every kernel family, with NaN poison and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockdiag
from blockdiag import block_diagonal_attention
from tests.support import Case, RotaryCase, assert_accurate, largest_error, value_and_gradients

pytestmark = pytest.mark.gpu

TILE = {"query_heads": 3, "key_heads": 3, "head_dim": 128, "dtype": "bfloat16", "block_size": 64}
GROUPED = TILE | {"query_heads": 8, "key_heads": 2}
LENGTHS = (64, 1, 0, 130, 63, 65, 320)

CASES = {
    # The tuned kernels have blocks of 64 rows and head dimensions of 64 and 128.
    "full tiles": Case(lengths=(256, 256), **TILE),
    "full tiles, heads of 64": Case(lengths=(256, 256), **TILE | {"head_dim": 64}),
    "full tiles, causal fp16": Case(lengths=(256,), is_causal=True, **TILE | {"dtype": "float16"}),
    "partial tiles": Case(lengths=(200, 200), **TILE),
    "packed": Case(lengths=LENGTHS, layout="offsets", padding=70, **TILE),
    "packed, heads of 64": Case(lengths=LENGTHS, layout="offsets", padding=70, **TILE | {"head_dim": 64}),
    "grouped": Case(lengths=(256, 256), **GROUPED),
    "grouped, one key head": Case(lengths=(256,), **TILE | {"query_heads": 5, "key_heads": 1}),
    "grouped, heads of 64": Case(lengths=(256, 256), **GROUPED | {"head_dim": 64}),
    "grouped, packed, causal": Case(lengths=LENGTHS, layout="offsets", padding=5, is_causal=True, **GROUPED),
    "odd number of units": Case(lengths=(64 * 67,), **TILE | {"query_heads": 1, "key_heads": 1}),
    "fewer tokens than a tile": Case(lengths=(5,), **TILE),
    "fewer tokens than a tile, grouped, rotary": Case(lengths=(7,), rotary=RotaryCase(), **GROUPED),
    "one tile": Case(lengths=(64,), **TILE | {"query_heads": 1, "key_heads": 1}),
    "windows": Case(lengths=(64, 64, 16, 0, 48, 64, 7), layout="lengths", padding=3, **TILE),
    # Rotary embedding.
    "half-split": Case(lengths=(256, 256), rotary=RotaryCase(), **TILE),
    "half-split, heads of 64": Case(lengths=(256, 256), rotary=RotaryCase(), **TILE | {"head_dim": 64}),
    "interleaved": Case(lengths=(256, 256), rotary=RotaryCase(interleaved=True), **TILE),
    "interleaved, heads of 64": Case(
        lengths=(256, 256), rotary=RotaryCase(interleaved=True), **TILE | {"head_dim": 64}
    ),
    "rotary, packed, explicit": Case(
        lengths=LENGTHS, layout="offsets", padding=9, rotary=RotaryCase(tables="explicit"), **TILE
    ),
    "rotary, packed, per token, bf16 tables": Case(
        lengths=LENGTHS, layout="offsets", rotary=RotaryCase(tables="token", interleaved=True, dtype="bfloat16"), **TILE
    ),
    "rotary, query only": Case(lengths=(256,), rotary=RotaryCase(apply_to=("query",)), **TILE),
    "rotary, key only": Case(lengths=(256,), rotary=RotaryCase(apply_to=("key",), interleaved=True), **TILE),
    "rotary, value too": Case(lengths=(256,), rotary=RotaryCase(apply_to=("query", "key", "value")), **TILE),
    "rotary, grouped": Case(lengths=(256, 256), rotary=RotaryCase(), **GROUPED),
    "rotary, grouped, packed": Case(lengths=LENGTHS, layout="offsets", rotary=RotaryCase(interleaved=True), **GROUPED),
    "rotary, heads of 80": Case(lengths=(200,), rotary=RotaryCase(), **TILE | {"head_dim": 80}),
    "rotary, heads of 40, blocks of 32": Case(
        lengths=(100, 100), rotary=RotaryCase(interleaved=True), **TILE | {"head_dim": 40, "block_size": 32}
    ),
    # Other tiles and the chunked kernels.
    "blocks of 1": Case(lengths=(50,), **TILE | {"block_size": 1}),
    "blocks of 7, heads of 8": Case(lengths=(50, 50), **TILE | {"block_size": 7, "head_dim": 8}),
    "blocks of 16, heads of 32": Case(lengths=(200,), **TILE | {"block_size": 16, "head_dim": 32}),
    "blocks of 48, heads of 72": Case(lengths=(200,), **GROUPED | {"block_size": 48, "head_dim": 72}),
    "blocks of 100, heads of 96": Case(
        lengths=(250, 250), is_causal=True, **TILE | {"block_size": 100, "head_dim": 96}
    ),
    "blocks of 256": Case(lengths=(600,), **GROUPED | {"block_size": 256}),
    "blocks of 200, rotary": Case(
        lengths=(450, 3), layout="offsets", padding=30, rotary=RotaryCase(), **TILE | {"block_size": 200}
    ),
    "heads of 256": Case(lengths=(150,), **TILE | {"head_dim": 256}),
    "heads of 256, rotary": Case(
        lengths=(150,), rotary=RotaryCase(interleaved=True), is_causal=True, **TILE | {"head_dim": 256}
    ),
    # Kernels shared with fused attention.
    "blocks of 512": Case(lengths=(2048, 2048), **TILE | {"block_size": 512}),
    "blocks of 512, grouped, causal": Case(lengths=(2048,), is_causal=True, **GROUPED | {"block_size": 512}),
    "blocks of 1024, heads of 64": Case(lengths=(2048, 2048), **TILE | {"block_size": 1024, "head_dim": 64}),
    "blocks of 1024, partial, rotary": Case(
        lengths=(1500, 1500), rotary=RotaryCase(), **GROUPED | {"block_size": 1024}
    ),
    "ragged to 2000": Case(
        lengths=(2000, 1, 0, 300, 63, 1025), layout="lengths", padding=70, **TILE | {"block_size": 2000}
    ),
    "ragged to 2000, grouped, causal": Case(
        lengths=(257, 2000, 0, 64), layout="lengths", padding=3, is_causal=True, **GROUPED | {"block_size": 2000}
    ),
    "blocks of 700, packed, rotary": Case(
        lengths=(1500, 3, 0, 699),
        layout="offsets",
        padding=9,
        is_causal=True,
        rotary=RotaryCase(tables="explicit"),
        **TILE | {"block_size": 700, "head_dim": 64},
    ),
    "blocks of 300, float32": Case(lengths=(450,), **GROUPED | {"block_size": 300, "dtype": "float32"}),
    "float32": Case(lengths=(130, 130), **GROUPED | {"dtype": "float32"}),
    "float32, packed, rotary": Case(
        lengths=LENGTHS, layout="offsets", padding=4, rotary=RotaryCase(), **TILE | {"dtype": "float32", "head_dim": 64}
    ),
}


def poison_free_memory() -> None:
    """Fill memory that the next call is likely to get with NaN, so that unwritten elements are detected."""
    blocks = [jnp.full((1 << 20,), jnp.nan, jnp.float32) for _ in range(32)]
    jax.block_until_ready(blocks)


@pytest.mark.parametrize("name", CASES)
def test_triton_kernels_are_accurate_and_repeatable(name):
    case = CASES[name]
    operands = case.operands()
    run = jax.jit(functools.partial(value_and_gradients, case.attend("triton")))
    results = []
    for _ in range(2):
        poison_free_memory()
        results.append(run(*operands))
    assert_accurate(case, results[0], operands)
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


@pytest.mark.parametrize("name", ["full tiles", "full tiles, causal fp16", "grouped", "full tiles, heads of 64"])
def test_pallas_kernels_are_accurate_and_repeatable(name):
    case = CASES[name]
    operands = case.operands()
    run = jax.jit(functools.partial(value_and_gradients, case.attend("pallas")))
    results = run(*operands)
    assert_accurate(case, results, operands)
    for first, second in zip(results, run(*operands), strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


LARGE = {
    "full": {"shape": (4, 4096), "heads": (8, 8, 128)},
    "full, heads of 64": {"shape": (4, 4096), "heads": (16, 16, 64)},
    "grouped": {"shape": (4, 4096), "heads": (8, 2, 128)},
    "partial": {"shape": (5, 3001), "heads": (4, 4, 128)},
    "causal": {"shape": (3, 4096), "heads": (7, 7, 64), "is_causal": True},
    "rotary": {"shape": (4, 4096), "heads": (8, 8, 128), "rotary": False},
    "rotary, heads of 64": {"shape": (4, 4096), "heads": (8, 8, 64), "rotary": True},
    "rotary, grouped": {"shape": (4, 4096), "heads": (8, 2, 128), "rotary": False},
    "blocks of 128": {"shape": (4, 4096), "heads": (4, 4, 128), "block_size": 128},
    "blocks of 1024": {"shape": (4, 4096), "heads": (8, 2, 128), "block_size": 1024, "is_causal": True},
    "blocks of 1000": {"shape": (4, 4096), "heads": (4, 4, 64), "block_size": 1000},
}


@pytest.mark.parametrize("name", LARGE)
def test_many_tiles_agree_with_array_code(name):
    """Every multiprocessor runs several tiles, and the last round is not full."""
    options = dict(LARGE[name])
    shape, (query_heads, key_heads, head_dim) = options.pop("shape"), options.pop("heads")
    interleaved = options.pop("rotary", None)
    if interleaved is not None:
        cos, sin = blockdiag.rotary_tables(shape[1], head_dim)
        options["rotary"] = blockdiag.Rotary(cos, sin, interleaved=interleaved)
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [
        jax.random.normal(k, (*shape, n, head_dim), jnp.bfloat16)
        for k, n in zip(keys, (query_heads, key_heads, key_heads, query_heads), strict=True)
    ]
    poison_free_memory()
    results = {}
    for implementation in ("triton", "xla"):
        attend = functools.partial(block_diagonal_attention, implementation=implementation, **options)
        results[implementation] = jax.jit(functools.partial(value_and_gradients, attend))(*operands)
    for actual, expected in zip(results["triton"], results["xla"], strict=True):
        actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
        assert np.linalg.norm(actual - expected) <= 8e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name",
    [
        "packed",
        "grouped, packed, causal",
        "rotary, packed, explicit",
        "windows",
        "ragged to 2000",
        "blocks of 700, packed, rotary",
    ],
)
def test_nan_and_inf_stay_in_their_block(name, poison):
    """Kernels load whole tiles. Rows past a block's end must not affect other blocks, and padding rows affect none."""
    case = CASES[name]
    operands = case.operands()
    poisoned_block = case.blocks[len(case.blocks) // 2]
    rows = np.zeros(case.tokens, bool)
    rows[poisoned_block.start : poisoned_block.start + poisoned_block.length] = True
    rows[case.tokens - case.padding :] = True
    run = jax.jit(functools.partial(value_and_gradients, case.attend("triton")))
    clean = run(*operands)
    dirty = run(*(jnp.where(rows[:, None, None], jnp.asarray(poison, x.dtype), x) for x in operands))
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(before)[~rows], np.asarray(after)[~rows])
        np.testing.assert_array_equal(np.asarray(after)[case.tokens - case.padding :].astype(np.float32), 0.0)


def test_packed_blocks_of_any_length_match_single_calls():
    """The kernels process several windows, because one window does not hold all tokens.

    Memory is linear in tokens. Each block's results match a call without the other blocks.
    """
    lengths = np.random.default_rng(0).integers(0, 2001, 64).astype(np.int32)
    tokens = 1 << 16
    lengths = lengths[np.cumsum(lengths) <= tokens]
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [jax.random.normal(k, (tokens, n, 64), jnp.bfloat16) for k, n in zip(keys, (8, 2, 2, 8), strict=True)]

    def run(*operands, **options):
        attend = functools.partial(block_diagonal_attention, is_causal=True, implementation="triton", **options)
        return value_and_gradients(attend, *operands)

    packed = jax.jit(functools.partial(run, block_lengths=jnp.asarray(lengths), block_size=2000))
    together = packed(*operands)
    assert packed.lower(*operands).compile().memory_analysis().temp_size_in_bytes <= 16 * operands[0].nbytes
    for index in (0, len(lengths) // 2, len(lengths) - 1):
        first, length = int(lengths[:index].sum()), int(lengths[index])
        alone = jax.jit(functools.partial(run, block_size=max(length, 1)))(
            *(x[first : first + length] for x in operands)
        )
        for part, whole in zip(alone, together, strict=True):
            part, whole = (np.asarray(x, np.float32) for x in (part, whole[first : first + length]))
            assert np.linalg.norm(part - whole) <= 8e-3 * np.linalg.norm(part)
    assert not np.asarray(together[0], np.float32)[lengths.sum() :].any()


def test_the_default_on_a_gpu_is_triton():
    case = CASES["packed"]
    operands = case.operands()
    default = jax.jit(functools.partial(value_and_gradients, case.attend(None)))
    assert "triton_kernel_call_ffi" in default.lower(*operands).as_text()
    named = jax.jit(functools.partial(value_and_gradients, case.attend("triton")))
    for first, second in zip(default(*operands), named(*operands), strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_mapped_calls_equal_single_calls_bitwise():
    case = CASES["partial tiles"]
    attend = case.attend("triton")
    operands = [jnp.stack([x, 2 * x, -x]) for x in case.operands()]
    mapped = jax.jit(jax.vmap(functools.partial(value_and_gradients, attend)))(*operands)
    single = jax.jit(functools.partial(value_and_gradients, attend))
    for index in range(3):
        for together, alone in zip(mapped, single(*(x[index] for x in operands)), strict=True):
            np.testing.assert_array_equal(np.asarray(together[index]), np.asarray(alone))


@pytest.mark.multigpu
def test_two_gpus_under_shard_map_agree_with_one_bitwise():
    """The batch rows are on two GPUs, and key and value are replicated, with varying axes checked."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Auto,), devices=devices)
    split, whole = jax.P("batch"), jax.P()
    case = Case(lengths=(200, 200), **GROUPED)
    query, key, value, cotangent = case.operands()
    key, value = key[:1], value[:1]

    def run(query, key, value, cotangent):
        key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
        return value_and_gradients(case.attend("triton"), query, key, value, cotangent)[:2]

    sharded = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(split, whole, whole, split), out_specs=split, check_vma=True)
    )
    for apart, together in zip(
        sharded(query, key, value, cotangent), jax.jit(run)(query, key, value, cotangent), strict=True
    ):
        assert len(apart.sharding.device_set) == 2
        np.testing.assert_array_equal(np.asarray(apart), np.asarray(together))


def test_second_derivatives_agree_with_array_code():
    case = Case(lengths=(64, 64), **TILE | {"dtype": "float32", "query_heads": 1, "key_heads": 1, "head_dim": 16})
    query, key, value, cotangent = case.operands()

    def curvature(implementation):
        def penalty(query):
            gradient = jax.grad(lambda q: jnp.vdot(case.attend(implementation)(q, key, value), cotangent))(query)
            return jnp.vdot(gradient, gradient)

        return jax.jit(jax.grad(penalty))(query)

    expected = np.asarray(curvature("xla"))
    assert largest_error(curvature("triton"), expected.astype(np.float64)) <= 1e-4 * np.abs(expected).max()


def test_torch_launch_equals_the_jax_call_bitwise():
    torch = pytest.importorskip("torch")
    from blockdiag.interop import torch_launch
    from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
    from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch

    for head_dim, key_heads in ((128, 8), (128, 2), (64, 8)):
        problem = BlockDiagonalProblem(
            tokens=1024, query_heads=8, key_heads=key_heads, head_dim=head_dim, dtype="bfloat16", block_size=64,
            sequence_length=1024, num_tiles=16, is_causal=False, scale=head_dim**-0.5,
        )  # fmt: skip
        keys = jax.random.split(jax.random.key(1), 4)
        operands = [
            jax.random.normal(k, (1024, n, head_dim), jnp.bfloat16)
            for k, n in zip(keys, (8, key_heads, key_heads, 8), strict=True)
        ]
        attend = functools.partial(block_diagonal_attention, implementation="triton")
        output, *gradients = jax.jit(functools.partial(value_and_gradients, attend))(*operands)
        tensors = [torch.from_numpy(np.array(x, np.float32)).to("cuda", torch.bfloat16) for x in operands]
        native = (
            *torch_launch.launch(BlockDiagonalLaunch(problem, "forward"), *tensors[:3]),
            *torch_launch.launch(BlockDiagonalLaunch(problem, "backward"), *tensors),
        )
        for through_jax, through_torch in zip((output, *gradients), native, strict=True):
            np.testing.assert_array_equal(np.asarray(through_jax, np.float32), through_torch.float().cpu().numpy())
