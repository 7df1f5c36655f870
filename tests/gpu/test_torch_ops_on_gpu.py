"""The torch operators on a GPU: bitwise equality with JAX, streams and CUDA graphs, without host synchronisation."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.common import packing  # noqa: E402
from blockdiag.common.tile_counts import count_length_tiles, count_offset_tiles  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    Rotary,
    block_diagonal_attention,
    block_diagonal_attention_bhsd,
    fused_qkv_block_attention,
)
from tests import support  # noqa: E402
from tests.gpu import test_block_diagonal_on_gpu  # noqa: E402
from tests.gpu.gate import Gate  # noqa: E402
from tests.support import Case  # noqa: E402
from tests.torch.torch_support import (  # noqa: E402
    assert_as_accurate,
    assert_same_bits,
    attend,
    masked_attention,
    operator_arguments,
    options_of,
    packed_operator_arguments,
    results_of,
    tensors_of,
    to_numpy,
    to_tensor,
    value_and_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]

OPERATORS = torch.ops.blockdiag
GPU = "cuda:0"

# The tests of the JAX function also compile the kernels of these cases.
CASES = {
    name: test_block_diagonal_on_gpu.CASES[name]
    for name in (
        "full tiles",
        "full tiles, heads of 64",
        "full tiles, causal fp16",
        "partial tiles",
        "packed",
        "grouped",
        "windows",
        "half-split",
        "rotary, packed, explicit",
        "rotary, packed, per token, bf16 tables",
        "rotary, grouped",
        "blocks of 200, rotary",
        "float32",
    )
}
FULL, PACKED = CASES["full tiles"], CASES["rotary, packed, explicit"]
# torch and JAX launch different kernels for these cases.
LONG = {
    name: test_block_diagonal_on_gpu.CASES[name]
    for name in ("blocks of 512, grouped, causal", "ragged to 2000", "blocks of 700, packed, rotary")
}


def assert_close(actual, expected):
    """Assert that results agree up to a few roundings in low precision."""
    for one, other in zip(actual, expected, strict=True):
        largest = other.float().abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2 * largest)


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_native_operator_and_operator_through_jax_equal_jax_bitwise(name):
    case = CASES[name]
    native = results_of(case, GPU)
    assert all(x.is_cuda for x in native)
    in_jax = jax.jit(functools.partial(support.value_and_gradients, case.attend("triton")))(*case.operands())
    assert_same_bits(native, in_jax)
    assert_same_bits(results_of(case, GPU, via="jax"), native)
    assert_same_bits(results_of(case, GPU), native)


@pytest.mark.parametrize("name", LONG)
def test_long_blocks_are_accurate_and_repeatable(name):
    """Native calls use the chunked kernels. Calls through JAX use the kernels of fused attention."""
    case = LONG[name]
    for via in (None, "jax"):
        results = results_of(case, GPU, via=via)
        support.assert_accurate(case, [jnp.asarray(to_numpy(x)) for x in results], case.operands())
        assert_same_bits(results_of(case, GPU, via=via), results)


@pytest.mark.parametrize(
    "name", ["full tiles", "full tiles, heads of 64", "rotary, grouped", "rotary, packed, explicit"]
)
def test_packed_operators_equal_those_through_jax_bitwise(name):
    case = CASES[name]
    arguments, cotangent = packed_operator_arguments(case, GPU), tensors_of(case, GPU)[3]
    results = {
        end: (
            getattr(OPERATORS, f"block_diagonal_forward{end}")(*arguments),
            getattr(OPERATORS, f"block_diagonal_packed_backward{end}")(cotangent, *arguments),
        )
        for end in ("", "_through_jax")
    }
    assert_same_bits(results[""], results["_through_jax"])
    exact = results_of(case, GPU)
    whole = (exact[0], torch.cat(exact[1:], dim=-2))
    assert_close(results[""], whole)


def test_fused_projection_agrees_with_jax():
    generator = np.random.default_rng(0)
    shapes = (2, 200, 256), (256, 12 * 128), (12 * 128,), (2, 200, 8, 128)
    arrays = [generator.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays[1] /= 16
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    heads = {"query_heads": 8, "key_heads": 2, "head_dim": 128}
    cos, sin = blockdiag.rotary_tables(200, 128)
    in_jax = functools.partial(blockdiag.fused_qkv_block_attention, rotary=blockdiag.Rotary(cos, sin), **heads)
    expected = jax.jit(functools.partial(support.value_and_gradients, in_jax))(*arrays)
    rotary = Rotary(to_tensor(cos, GPU), to_tensor(sin, GPU))
    function = functools.partial(fused_qkv_block_attention, rotary=rotary, **heads)
    actual = value_and_gradients(function, *(to_tensor(x, GPU) for x in arrays))
    for one, other in zip(actual, expected, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (to_numpy(one), other))
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)


def test_native_operator_does_not_import_jax():
    code = """
import sys
import torch
from blockdiag.torch import block_diagonal_attention
query = torch.randn(2, 256, 3, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
block_diagonal_attention(query, query, query).sum().backward()
torch.cuda.synchronize()
assert query.grad.isfinite().all()
assert not {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib"}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


# Comparison with torch's attention


def test_native_operator_is_as_accurate_as_varlen_attention():
    """The blocks are the sequences of torch's attention over packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    tile = test_block_diagonal_on_gpu.TILE
    case = Case(lengths=(64, 1, 130, 63, 65, 320), layout="offsets", **tile)
    edges = np.cumsum([0, *(block.length for block in case.blocks)], dtype=np.int32)
    edges = to_tensor(edges, GPU)
    operands = tensors_of(case, GPU)
    varlen = value_and_gradients(lambda q, k, v: varlen_attn(q, k, v, edges, edges, 64, 64), *operands)
    exact = value_and_gradients(functools.partial(masked_attention, case), *(x.double() for x in operands))
    assert_as_accurate(results_of(case, GPU), varlen, exact)


@pytest.mark.parametrize("name", ["full tiles", "grouped", "partial tiles", "full tiles, causal fp16"])
def test_native_operator_is_as_accurate_as_torch_attention(name):
    case = CASES[name]
    operands = tensors_of(case, GPU)
    reference = functools.partial(masked_attention, case)
    exact = value_and_gradients(reference, *(x.double() for x in operands))
    assert_as_accurate(results_of(case, GPU), value_and_gradients(reference, *operands), exact)


# Layouts and devices of operands


def test_misaligned_strided_and_expanded_operands_give_equal_results():
    """Cotangents are misaligned or broadcast, too."""
    query, key, value, cotangent = tensors_of(FULL, GPU)
    expected = results_of(FULL, GPU)
    misaligned = torch.empty(query.numel() + 1, dtype=query.dtype, device=GPU)[1:].view(query.shape).copy_(query)
    assert misaligned.data_ptr() % 16
    transposed = key.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.stack((value, -value), dim=2)[:, :, 0]
    shifted = torch.empty(query.numel() + 1, dtype=query.dtype, device=GPU)[1:].view(query.shape).copy_(cotangent)
    assert_same_bits(value_and_gradients(attend(FULL, GPU), misaligned, transposed, sliced, shifted), expected)
    ones = value_and_gradients(attend(FULL, GPU), query, key, value, torch.ones_like(cotangent))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    attend(FULL, GPU)(*leaves).sum().backward()
    assert_same_bits([x.grad for x in leaves], ones[1:])


def test_bhsd_operator_equals_the_transposed_call():
    *operands, cotangent = tensors_of(FULL, GPU)
    expected = results_of(FULL, GPU)
    function = functools.partial(block_diagonal_attention_bhsd, block_size=64)
    swapped = [x.transpose(1, 2) for x in (*operands, cotangent)]
    assert_same_bits([x.transpose(1, 2) for x in value_and_gradients(function, *swapped)], expected)
    # Heads become sequences, which another kernel may compute.
    results = value_and_gradients(function, *(x.contiguous() for x in swapped))
    assert_close([x.transpose(1, 2) for x in results], expected)


@pytest.mark.parametrize("shape", [(0, 20, 4, 64), (2, 0, 4, 64), (0, 4, 64)])
def test_empty_operands_keep_their_shape(shape):
    query = torch.zeros(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    output = block_diagonal_attention(query, query, query)
    output.sum().backward()
    assert output.shape == query.grad.shape == shape


def test_float64_call_runs_through_jax():
    case = Case(lengths=(20, 20), query_heads=2, key_heads=1)
    operands = [x.double() for x in tensors_of(case)]
    on_gpu = value_and_gradients(attend(case, GPU), *(x.cuda() for x in operands))
    for one, other in zip(on_gpu, value_and_gradients(attend(case), *operands), strict=True):
        assert one.is_cuda and one.dtype == torch.float64
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)


def test_invalid_operands_raise_value_error():
    query = torch.zeros(2, 20, 4, 64, device=GPU)
    for key in (query.cpu(), query[:, :, :3], query.half(), query[..., :32]):
        with pytest.raises(
            ValueError, match=r"`key` must be on the device|query heads must be a multiple|`key` must have"
        ):
            block_diagonal_attention(query, key, key)
    with pytest.raises(ValueError, match=r"`sequence_offsets` must be an int32 array, got torch.int64"):
        block_diagonal_attention(query[0], query[0], query[0], sequence_offsets=torch.tensor([0, 20], device=GPU))
    with pytest.raises(ValueError, match=r"`cos` must be on the device of `query`, cuda:0, got cpu"):
        block_diagonal_attention(query, query, query, rotary=Rotary(torch.zeros(20, 32), torch.zeros(20, 32)))


def test_second_and_forward_mode_derivatives_raise_not_implemented_error():
    query, key, value, _ = tensors_of(FULL, GPU)
    query.requires_grad_()
    output = attend(FULL, GPU)(query, key, value)
    (gradient,) = torch.autograd.grad(output.float().square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives .* not available in torch"):
        gradient.float().sum().backward()
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns at its first tangent
        dual = torch.autograd.forward_ad.make_dual(key, key)
        with pytest.raises(NotImplementedError, match=r"forward-mode derivatives"):
            attend(FULL, GPU)(query.detach(), dual, value)


@pytest.mark.multigpu
@pytest.mark.parametrize("via", [None, "jax"])
def test_operator_on_the_second_gpu_equals_the_first(via):
    """The tensors are not on the current device."""
    assert torch.cuda.current_device() == 0
    for case in (FULL, PACKED):
        results = results_of(case, "cuda:1", via=via)
        assert all(x.device.index == 1 for x in results)
        assert_same_bits(results, results_of(case, "cuda:0"))
    assert torch.cuda.current_device() == 0


# Tile tables


def launched_table(kind: str, values: np.ndarray, tokens: int, block_size: int) -> torch.Tensor:
    from blockdiag.interop.torch_launch import launch
    from blockdiag.triton_kernels.parts.tile_table import TileTableLaunch

    if kind == "offsets":
        num_tiles = count_offset_tiles(tokens, len(values) - 1, block_size)
    else:
        num_tiles = count_length_tiles(tokens, len(values), block_size)
    spec = TileTableLaunch(kind=kind, num_values=len(values), num_tiles=num_tiles, tokens=tokens, block_size=block_size)
    (table,) = launch(spec, to_tensor(values, GPU))
    return table


RANDOM = np.random.default_rng(0)
OFFSETS = {
    "no sequences": ([0], 100),
    "empty ones and a tail": ([0, 0, 70, 70, 71, 135, 135], 200),
    "late start": ([10, 80], 200),
    "decreasing, negative and beyond": ([-5, 90, 40, 10_000, 30], 200),
    "a chunk and one more": (np.arange(129) * 3, 1001),
    "many": (np.sort(RANDOM.integers(0, 300_000, 3000)), 300_001),
}
LENGTHS = {
    "none": ([], 100),
    "mixed": ([0, 1, 64, 63, 0, 17], 200),
    "too long, negative": ([100, -3, 5], 200),
    "beyond the tokens": ([64] * 40, 1001),
    "overflowing": ([2**31 - 1] * 3, 1001),
    "many": (RANDOM.integers(0, 65, 3000), 100_000),
}


@pytest.mark.parametrize("block_size", [48, 64])
@pytest.mark.parametrize("name", OFFSETS)
def test_tile_table_of_offsets_equals_that_of_jax(name, block_size):
    values, tokens = OFFSETS[name]
    values = np.asarray(values, np.int32)
    expected = packing.tiles_from_offsets(jnp.asarray(values), tokens, block_size)
    assert_same_bits([launched_table("offsets", values, tokens, block_size)], [expected])


@pytest.mark.parametrize("name", LENGTHS)
def test_tile_table_of_lengths_equals_that_of_jax(name):
    values, tokens = LENGTHS[name]
    values = np.asarray(values, np.int32)
    expected = packing.tiles_from_lengths(jnp.asarray(values), tokens, 64)
    assert_same_bits([launched_table("lengths", values, tokens, 64)], [expected])


# Streams and graphs

LONG_SLEEP = 200_000_000  # cycles that the device sleeps, a tenth of a second


@pytest.mark.parametrize("via", [None, "jax"])
@pytest.mark.parametrize("name", ["full tiles", "rotary, packed, explicit"])
def test_operator_runs_on_the_current_stream(name, via):
    """Inputs are written late on a side stream, so a kernel on another stream would read the old values."""
    case = CASES[name]
    function, operands = attend(case, GPU, via=via), tensors_of(case, GPU)
    expected = value_and_gradients(function, *operands)
    late = [torch.zeros_like(x) for x in operands]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), Gate(seconds=20 if via is None else 0.1) as gate:
        for target, source in zip(late, operands, strict=True):
            target.copy_(source)
        results = value_and_gradients(function, *late)
        if via is None:
            assert gate.is_closed(), "the host waited for the device"
        copies = [x.clone() for x in results]
    side.synchronize()
    assert_same_bits(copies, expected)


def test_operators_on_two_streams_keep_results_apart():
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [tensors_of(PACKED, GPU, seed) for seed in (0, 1)]
    function = attend(PACKED, GPU)
    expected = [value_and_gradients(function, *operands) for operands in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG_SLEEP // 100 * (1 + index))
                results[index].append(value_and_gradients(function, *inputs[index]))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        for one in found:
            assert_same_bits(one, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_native_operator_does_not_synchronise_the_host():
    for case in (FULL, PACKED, CASES["windows"]):
        operands, function = tensors_of(case, GPU), attend(case, GPU)
        expected = value_and_gradients(function, *operands)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = value_and_gradients(function, *operands)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert_same_bits(results, expected)


def captured(run):
    """Return a CUDA graph of `run`, captured after a run on a side stream, and the results that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize(
    "name", ["full tiles", "rotary, packed, explicit", "windows", "blocks of 200, rotary", "grouped"]
)
def test_cuda_graph_replay_with_new_values_equals_eager_calls(name):
    """New values in the same memory give new results, forward and backward."""
    case = CASES[name]
    function = attend(case, GPU)
    *leaves, cotangent = tensors_of(case, GPU)
    leaves = [x.requires_grad_() for x in leaves]

    def run():
        output = function(*leaves)
        return [output, *torch.autograd.grad(output, leaves, cotangent)]

    graph, results = captured(run)
    for seed in (3, 4):
        operands = tensors_of(case, GPU, seed)
        with torch.no_grad():
            for static, new in zip((*leaves, cotangent), operands, strict=True):
                static.copy_(new)
        expected = value_and_gradients(function, *operands)
        graph.replay()
        assert_same_bits(results, expected)


def test_cuda_graphs_read_new_offsets():
    case = CASES["packed"]
    query, key, value, _ = tensors_of(case, GPU)
    offsets = options_of(case, GPU)["sequence_offsets"]
    function = functools.partial(block_diagonal_attention, block_size=case.block_size)
    graph, (output,) = captured(lambda: [function(query, key, value, sequence_offsets=offsets)])
    others = torch.sort(torch.randint(0, case.tokens, offsets.shape, device=GPU)).values.int()
    others[0] = 0
    for new in (others, offsets.clone(), torch.zeros_like(offsets)):
        offsets.copy_(new)
        graph.replay()
        assert_same_bits([output], [function(query, key, value, sequence_offsets=new)])


def test_capture_of_the_path_through_jax_raises_runtime_error():
    query, key, value, _ = tensors_of(FULL, GPU)
    function = attend(FULL, GPU, via="jax")
    function(query, key, value)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"cannot capture the path through JAX"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        query + 1  # torch warns of empty graphs
        function(query, key, value)


# Compilation

COMPILER_WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def layers(case, **more):
    """Return the operator between other operations that a compiler fuses."""
    function = attend(case, GPU, **more)
    return lambda query, key, value: function(query * 2, key, value - 1) + query


@COMPILER_WARNINGS
@pytest.mark.parametrize("name", ["half-split", "packed"])
def test_compiled_operator_runs_in_cuda_graphs(name):
    """The forward and backward passes of several steps with new tensors run in one graph."""
    case = CASES[name]
    compiled = torch.compile(layers(case), fullgraph=True, mode="reduce-overhead")
    counters = torch._dynamo.utils.counters
    counters.clear()
    for seed in range(6):
        operands = tensors_of(case, GPU, seed)
        torch.compiler.cudagraph_mark_step_begin()
        results = [x.clone() for x in value_and_gradients(compiled, *operands)]
        assert_close(results, value_and_gradients(layers(case), *operands))
    assert not counters["inductor"]["cudagraph_skips"]
    assert not counters["graph_break"]


@COMPILER_WARNINGS
def test_compiled_operator_through_jax_runs_outside_cuda_graphs():
    compiled = torch.compile(layers(FULL, via="jax"), fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        operands = tensors_of(FULL, GPU, seed)
        torch.compiler.cudagraph_mark_step_begin()
        results = [x.clone() for x in value_and_gradients(compiled, *operands)]
        assert_close(results, value_and_gradients(layers(FULL), *operands))


def test_new_lengths_do_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    tile = test_block_diagonal_on_gpu.TILE

    def function(query, key, value):
        return 2 * block_diagonal_attention(query, key, value, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in (256, 200, 320):
        operands = tensors_of(Case(lengths=(length,) * 2, **tile), GPU)
        assert_same_bits(value_and_gradients(compiled, *operands), value_and_gradients(function, *operands))
    assert counter.frame_count == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_equals_the_bfloat16_call(is_compiled):
    function = attend(CASES["half-split"], GPU)

    def layer(query, key, value):
        with torch.autocast("cuda", torch.bfloat16):
            return function(query, key, value)

    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    *operands, cotangent = tensors_of(CASES["half-split"], GPU)
    output, *gradients = value_and_gradients(layer, *(x.float() for x in operands), cotangent)
    expected, *expected_gradients = value_and_gradients(function, *operands, cotangent)
    assert_same_bits([output], [expected])
    assert_same_bits(gradients, [x.float() for x in expected_gradients])


def test_activation_checkpointing_equals_the_plain_call():
    function = attend(PACKED, GPU)

    def layer(query, key, value):
        return torch.utils.checkpoint.checkpoint(function, query, key, value, use_reentrant=False)

    assert_same_bits(value_and_gradients(layer, *tensors_of(PACKED, GPU)), results_of(PACKED, GPU))


@pytest.mark.parametrize("name", ["grouped", "rotary, packed, explicit", "windows"])
def test_operators_pass_opcheck(name):
    case = CASES[name]
    arguments, cotangent = operator_arguments(case, GPU), tensors_of(case, GPU)[3]
    with_gradients = (*(x.clone().requires_grad_() for x in arguments[:3]), *arguments[3:])
    torch.library.opcheck(OPERATORS.block_diagonal_forward, with_gradients)
    torch.library.opcheck(OPERATORS.block_diagonal_backward, (cotangent, *arguments))


def test_packed_operators_pass_opcheck():
    arguments, cotangent = packed_operator_arguments(PACKED, GPU), tensors_of(PACKED, GPU)[3]
    torch.library.opcheck(OPERATORS.block_diagonal_packed_backward, (cotangent, *arguments))
    torch.library.opcheck(OPERATORS.block_diagonal_forward, (arguments[0].requires_grad_(), *arguments[1:]))
