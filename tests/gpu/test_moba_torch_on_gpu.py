"""MoBA in torch on a GPU: bitwise equality with JAX, streams and CUDA graphs, without host synchronisation."""

import copy
import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockdiag.ops.moba import tables as moba_tables  # noqa: E402
from blockdiag.torch import MoBASelfAttention, Routing, moba_attention, moba_routing  # noqa: E402
from blockdiag.torch.ops.moba import tables  # noqa: E402
from blockdiag.torch.ops.moba.operators import describe_lists  # noqa: E402
from tests.gpu.gate import Gate  # noqa: E402
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory  # noqa: E402
from tests.ops import moba_cases  # noqa: E402
from tests.ops.moba_cases import MoBACase, assert_accurate, dense_results  # noqa: E402
from tests.torch.moba_torch_support import (  # noqa: E402
    attend,
    attention_arguments,
    list_arguments,
    options_of,
    results_of,
    route,
    tensors_of,
    to_torch_routing,
    value_and_gradients,
)
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]

OPERATORS = torch.ops.blockdiag
GPU = "cuda:0"

TILE = {"head_dim": 128, "dtype": "bfloat16", "block_size": 128}
LENGTHS = (300, 0, 1, 513, 128)
CASES = {
    "batch": MoBACase(lengths=(700, 700), top_k=3, **TILE),
    "heads of 64, float16": MoBACase(lengths=(500,), head_dim=64, dtype="float16", block_size=64, top_k=4),
    "grouped, packed": MoBACase(
        lengths=LENGTHS, layout="offsets", padding=70, query_heads=8, key_heads=2, top_k=3, **TILE
    ),
    "packed, other keys, masked": MoBACase(
        lengths=(7, 5, 0, 300), key_lengths=(400, 0, 9, 333), layout="offsets", padding=3, mask=0.3, **TILE
    ),
    "not causal": MoBACase(lengths=(200, 200), key_lengths=(600, 600), is_causal=False, top_k=2, **TILE),
    "blocks of 512": MoBACase(lengths=(1500,), head_dim=128, dtype="bfloat16", block_size=512, top_k=2),
    "float32": MoBACase(lengths=(200,), head_dim=64, block_size=32, query_heads=4, mask=0.2),
    "own block only": MoBACase(lengths=(300,), top_k=1, **TILE),
}
BATCH, PACKED = CASES["batch"], CASES["grouped, packed"]


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def in_jax(case, **more):
    """Return output, log-sum-exp and gradients of the JAX function."""
    function = functools.partial(moba_cases.value_and_gradients, case.attend("triton", **more))
    return jax.jit(function)(*case.operands())


def edited_routing(case):
    """Return a JAX routing with blocks that are not the best, missing own blocks, and invalid block numbers."""
    routing = jax.jit(case.route("triton"))(*case.operands()[:2])
    indices = np.random.default_rng(3).integers(-2, routing.num_blocks + 2, routing.indices.shape, dtype=np.int32)
    return dataclasses.replace(routing, indices=jnp.asarray(indices))


# Bitwise equality with JAX


@pytest.mark.parametrize("name", CASES)
def test_native_moba_and_moba_through_jax_equal_jax_bitwise(name):
    case = CASES[name]
    poison_free_memory()
    native = results_of(case, GPU)
    assert all(x.is_cuda for x in native)
    assert_same_bits(native, in_jax(case))
    assert_same_bits(results_of(case, GPU, via="jax"), native)
    poison_free_memory()
    assert_same_bits(results_of(case, GPU), native)
    routing = route(case, GPU)(*tensors_of(case, GPU)[:2])
    assert_same_bits([routing.indices], [jax.jit(case.route("triton"))(*case.operands()[:2]).indices])
    assert_same_bits([route(case, GPU, via="jax")(*tensors_of(case, GPU)[:2]).indices], [routing.indices])


@pytest.mark.parametrize("name", ["batch", "packed, other keys, masked", "not causal"])
def test_native_moba_and_moba_through_jax_with_a_given_routing_equal_jax_bitwise(name):
    case = CASES[name]
    routing = edited_routing(case)
    native = results_of(case, GPU, routing=to_torch_routing(routing, GPU))
    assert_same_bits(native, in_jax(case, routing=routing))
    assert_same_bits(results_of(case, GPU, routing=to_torch_routing(routing, GPU), via="jax"), native)


@pytest.mark.parametrize("name", ["packed, other keys, masked", "float32"])
def test_native_moba_is_accurate(name):
    case = CASES[name]
    assert_accurate(case, tuple(map(to_numpy, results_of(case, GPU))), dense_results(case))


@pytest.mark.parametrize(
    "offsets",
    [
        ([-5, 90, 40, 10_000, 30], [10, -3, 5, 70, 20]),
        ([0, 0, 30, 30, 60], [0, 17, 17, 49, 49]),
        tuple(np.sort(np.random.default_rng(0).integers(0, [[3000], [5000]], (2, 300)))),
    ],
    ids=["wild", "empty ones", "many"],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_moba_tables_equal_those_of_jax(offsets, is_causal):
    offsets = [np.asarray(x, np.int32) for x in offsets]
    tokens, key_tokens = 3000, 5000
    num_sequences = len(offsets[0]) - 1
    arguments = list_arguments(MoBACase(lengths=(tokens,), key_lengths=(key_tokens,), is_causal=is_causal))
    problem = describe_lists(arguments)
    problem = dataclasses.replace(problem, num_blocks=(key_tokens + 15 * num_sequences) // 16)
    expected = moba_tables.moba_tables(problem, 1, *map(jnp.asarray, offsets))
    actual = tables.moba_tables(problem, 1, *(to_tensor(x, GPU) for x in offsets), torch.device(GPU))
    assert_same_bits(actual, expected)


def test_native_moba_does_not_import_jax():
    code = """
import sys
import torch
from blockdiag.torch import moba_attention, moba_routing
query = torch.randn(2, 500, 3, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
routing = moba_routing(query, query, block_size=128, top_k=2)
for given in (None, routing):
    moba_attention(query, query, query, block_size=128, top_k=2, routing=given).sum().backward()
torch.cuda.synchronize()
assert query.grad.isfinite().all()
assert not {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib"}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


# Layouts and devices of operands


def test_misaligned_and_strided_operands_give_equal_results():
    """Masks and cotangents are strided or transposed, too."""
    case = CASES["float32"]
    query, key, value, cotangent, log_sum_cotangent = tensors_of(case, GPU)
    expected = results_of(case, GPU)
    misaligned = torch.empty(query.numel() + 1, device=GPU)[1:].view(query.shape).copy_(query)
    assert misaligned.data_ptr() % 16
    transposed = key.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.stack((value, -value), dim=2)[:, :, 0]
    mask = options_of(case, GPU)["key_mask"]
    mask = torch.stack((mask, ~mask), dim=-1)[..., 0]
    log_sum_cotangent = log_sum_cotangent.transpose(1, 2).contiguous().transpose(1, 2)
    operands = (misaligned, transposed, sliced, cotangent.transpose(1, 3).contiguous().transpose(1, 3))
    results = value_and_gradients(attend(case, GPU, key_mask=mask), *operands, log_sum_cotangent)
    assert_same_bits(results, expected)


@pytest.mark.parametrize(("length", "key_length"), [(0, 0), (5, 0), (0, 5)])
def test_empty_operands_give_zero_outputs(length, key_length):
    query = torch.zeros(2, length, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    key = torch.zeros(2, key_length, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    output, log_sum = moba_attention(query, key, key, block_size=64, top_k=2, return_residual=True)
    output.sum().backward()
    assert output.shape == query.grad.shape == query.shape and key.grad.shape == key.shape
    assert not output.any() and log_sum.isneginf().all()
    assert (moba_routing(query, key, block_size=64, top_k=2).indices == -1).all()


def test_float64_call_runs_through_jax():
    case = MoBACase(lengths=(40, 40), query_heads=2, key_heads=1)
    operands = [x.double() for x in tensors_of(case)]
    on_gpu = value_and_gradients(attend(case, GPU), *(x.cuda() for x in operands))
    for one, other in zip(on_gpu, value_and_gradients(attend(case), *operands), strict=True):
        assert one.is_cuda and one.dtype == torch.float64
        torch.testing.assert_close(one.cpu(), other, rtol=1e-11, atol=1e-11)


def test_routing_conversions_equal_those_on_the_cpu():
    routing = to_torch_routing(edited_routing(PACKED), GPU)
    on_cpu = dataclasses.replace(routing, indices=routing.indices.cpu())
    offsets = options_of(PACKED, GPU)["sequence_offsets"]
    lists = routing.to_block_lists(offsets)
    assert_same_bits([*lists, routing.to_pattern()], [*on_cpu.to_block_lists(offsets.cpu()), on_cpu.to_pattern()])
    options = dict(num_queries=PACKED.operands()[0].shape[0], block_size=128, top_k=3)
    back = Routing.from_block_lists(*lists, **options, sequence_offsets=offsets)
    assert back.indices.is_cuda
    expected = Routing.from_block_lists(*(x.cpu() for x in lists), **options, sequence_offsets=offsets.cpu())
    assert_same_bits([back.indices], [expected.indices])


def test_operands_on_another_device_or_of_another_dtype_raise_value_error():
    query = torch.zeros(2, 20, 4, 64, device=GPU)
    attend = functools.partial(moba_attention, block_size=64, top_k=2)
    with pytest.raises(ValueError, match=r"`key` must be on the device of `query`, cuda:0, got cpu"):
        attend(query, query.cpu(), query.cpu())
    with pytest.raises(ValueError, match=r"`key_mask` must be on the device of `query`"):
        attend(query, query, query, key_mask=torch.ones(2, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`sequence_offsets` must be an int32 array, got torch.int64"):
        attend(query[0], query[0], query[0], sequence_offsets=torch.tensor([0, 20], device=GPU))


@pytest.mark.multigpu
@pytest.mark.parametrize("via", [None, "jax"])
def test_moba_on_the_second_gpu_equals_the_first(via):
    """The tensors are not on the current device."""
    assert torch.cuda.current_device() == 0
    results = results_of(PACKED, "cuda:1", via=via)
    assert all(x.device.index == 1 for x in results)
    assert_same_bits(results, results_of(PACKED, "cuda:0"))
    assert torch.cuda.current_device() == 0


# Streams and graphs


@pytest.mark.parametrize("via", [None, "jax"])
def test_moba_runs_on_the_current_stream(via):
    """Inputs are written late on a side stream, so a kernel on another stream would read the old values."""
    function, operands = attend(PACKED, GPU, via=via), tensors_of(PACKED, GPU)
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("name", ["batch", "packed, other keys, masked"])
def test_native_moba_does_not_synchronise_the_host(name, is_given):
    case = CASES[name]
    more = {"routing": to_torch_routing(edited_routing(case), GPU)} if is_given else {}
    operands, function = tensors_of(case, GPU), attend(case, GPU, **more)
    expected = value_and_gradients(function, *operands)
    choose = route(case, GPU)
    indices = choose(*operands[:2]).indices
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = value_and_gradients(function, *operands)
        again = choose(*operands[:2]).indices
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same_bits([*results, again], [*expected, indices])


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


@pytest.mark.parametrize("name", ["batch", "grouped, packed", "blocks of 512", "not causal"])
def test_cuda_graph_replay_with_new_values_equals_eager_calls(name):
    """New values in the same memory give new results, forward and backward."""
    case = CASES[name]
    function = attend(case, GPU)
    *leaves, cotangent, log_sum_cotangent = tensors_of(case, GPU)
    leaves = [x.requires_grad_() for x in leaves]

    def run():
        results = function(*leaves)
        return [*results, *torch.autograd.grad(results, leaves, (cotangent, log_sum_cotangent))]

    graph, results = captured(run)
    for seed in (3, 4):
        operands = tensors_of(case, GPU, seed)
        with torch.no_grad():
            for static, new in zip((*leaves, cotangent, log_sum_cotangent), operands, strict=True):
                static.copy_(new)
        expected = value_and_gradients(function, *operands)
        graph.replay()
        assert_same_bits(results, expected)


def test_cuda_graphs_read_new_offsets_and_routings():
    query, key, value, *_ = tensors_of(PACKED, GPU)
    options = options_of(PACKED, GPU)
    offsets, routing = options["sequence_offsets"], to_torch_routing(edited_routing(PACKED), GPU)
    runs = {
        "routed": lambda: [moba_attention(query, key, value, **options)],
        "given": lambda: [moba_attention(query, key, value, routing=routing, **options)],
    }
    graphs = {name: captured(run) for name, run in runs.items()}
    others = torch.sort(torch.randint(0, query.shape[0], offsets.shape, device=GPU)).values.int()
    others[0] = 0
    for new in (others, offsets.clone(), torch.zeros_like(offsets)):
        offsets.copy_(new)
        routing.indices.random_(-1, routing.num_blocks)
        for name, (graph, results) in graphs.items():
            graph.replay()
            assert_same_bits(results, runs[name]())


def test_capture_of_the_path_through_jax_raises_runtime_error():
    query, key, value, *_ = tensors_of(BATCH, GPU)
    function = attend(BATCH, GPU, via="jax")
    function(query, key, value)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"cannot capture the path through JAX"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        query + 1  # torch warns of empty graphs
        function(query, key, value)


# Compilation, autocast and modules


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # warnings of the compiler
@pytest.mark.parametrize("name", ["batch", "grouped, packed"])
def test_compiled_moba_runs_in_cuda_graphs(name):
    """The forward and backward passes of several steps with new tensors run in one graph."""
    function = attend(CASES[name], GPU)

    def layer(query, key, value):
        output, log_sum = function(query, key, value)
        return 2 * output + query, log_sum

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    counters = torch._dynamo.utils.counters
    counters.clear()
    for seed in range(5):
        operands = tensors_of(CASES[name], GPU, seed)
        torch.compiler.cudagraph_mark_step_begin()
        results = [x.clone() for x in value_and_gradients(compiled, *operands)]
        for one, other in zip(results, value_and_gradients(layer, *operands), strict=True):
            finite = other.isfinite()
            assert torch.equal(one[~finite], other[~finite])
            one, other = one[finite].float(), other[finite].float()
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())
    assert not counters["inductor"]["cudagraph_skips"]
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["grouped, packed", "not causal"])
def test_operators_pass_opcheck(name):
    case = CASES[name]
    lists = list_arguments(case, GPU)
    # Entries that no list covers are uninitialised memory, so results cannot be compared.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPERATORS.moba_lists, tuple(lists), test_utils=checks)
    torch.library.opcheck(OPERATORS.moba_routing, (*lists[:5], *lists[8:]))
    arguments = attention_arguments(case, GPU)
    leaves = tuple(x.clone().requires_grad_() for x in arguments[:3])
    torch.library.opcheck(OPERATORS.moba_forward, (*leaves, *arguments[3:]))
    results = OPERATORS.moba_forward(*arguments)
    torch.library.opcheck(OPERATORS.moba_backward, (*results, *tensors_of(case, GPU)[3:], *arguments))


def test_autocast_and_checkpointing_equal_the_bfloat16_call():
    *operands, cotangent, log_sum_cotangent = tensors_of(BATCH, GPU)
    function = attend(BATCH, GPU)

    def layer(*operands):
        return torch.utils.checkpoint.checkpoint(function, *operands, use_reentrant=False)

    output, log_sum, *gradients = value_and_gradients(function, *operands, cotangent, log_sum_cotangent)
    wide = [x.float() for x in operands]
    with torch.autocast("cuda", torch.bfloat16):
        actual = value_and_gradients(layer, *wide, cotangent, log_sum_cotangent)
    assert_same_bits(actual, [output, log_sum, *(x.float() for x in gradients)])


def test_moba_module_matches_the_cpu():
    """The packed module runs one training step on both devices."""
    torch.manual_seed(0)
    module = MoBASelfAttention(
        128, 4, num_key_heads=2, block_size=32, top_k=3, key_convolution_size=3, rotary_max_position=256
    )
    torch.nn.init.normal_(module.key_convolution_weight)
    on_gpu = copy.deepcopy(module).to(GPU)
    x, offsets = torch.randn(300, 128), torch.tensor([0, 200, 290], dtype=torch.int32)
    results = []
    for one, device in ((module, "cpu"), (on_gpu, GPU)):
        output = one(x.to(device), sequence_offsets=offsets.to(device))
        output.square().mean().backward()
        results.append([output.detach().cpu(), *(p.grad.cpu() for p in one.parameters())])
    for actual, expected in zip(*reversed(results), strict=True):
        # Near ties may be decided differently for a query or two.
        assert (actual - expected).norm() <= 2e-2 * expected.norm()
