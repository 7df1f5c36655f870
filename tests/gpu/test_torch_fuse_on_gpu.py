"""`blockdiag.torch.fuse` on a GPU: accuracy of gallery variants in bfloat16, streams and CUDA graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockdiag import fuse as jax_fuse  # noqa: E402
from blockdiag.fusion.gallery import VARIANTS, Sizes  # noqa: E402
from blockdiag.fusion.lowering import one_pass_schedule, streamed_schedule  # noqa: E402
from blockdiag.interop import dlpack  # noqa: E402
from blockdiag.torch import explain, fuse  # noqa: E402
from tests.fusion.eight_bit_cases import CASES as EIGHT_BIT  # noqa: E402
from tests.fusion.one_pass_cases import CASES as ONE_PASS  # noqa: E402
from tests.fusion.regions import test_nested_programs as inner  # noqa: E402
from tests.fusion.resident_cases import CASES as RESIDENT  # noqa: E402
from tests.fusion.streamed_cases import CASES as STREAMED  # noqa: E402
from tests.fusion.test_gallery import exact_and_allowed, operands, promotion  # noqa: E402
from tests.fusion.thresholds import lifted  # noqa: E402
from tests.gpu.gate import Gate  # noqa: E402
from tests.support import largest_error  # noqa: E402
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]

GPU = "cuda:0"
SIZES = Sizes(rows=2, query_tokens=200, key_tokens=200, head_dim=64, value_dim=64, dtype="bfloat16")
# There is one variant for each structure.
NAMES = (
    "vanilla",
    "library_causal_grouped",
    "causal_document",
    "packed_documents",
    "dense_mask",
    "alibi_learned",
    "t5_relative_bias",
    "two_biases",
    "sinks_concatenated",
    "normalised_query_and_key",
    "grouped_query",
    "latent_slice",
    "similarity",
    "evoformer_row",
    "differential_learned",
    "invariant_points",
    "sigmoid",
    "retention",
    "projected",
)


def arguments_of(name, seed=0):
    """Return the inputs of a variant by name, and cotangents of its outputs."""
    with promotion(name):
        inputs, cotangent = operands(name, SIZES, seed)
    tensors = {key: to_tensor(x, GPU) for key, x in inputs.items()}
    return tensors, [to_tensor(x, GPU) for x in jax.tree.leaves(cotangent)]


def value_and_gradients(name, fused, tensors, cotangents):
    """Return outputs and gradients by name."""
    wanted = VARIANTS[name].differentiable
    leaves = {key: x.detach().requires_grad_(key in wanted) for key, x in tensors.items()}
    with promotion(name):
        outputs = jax.tree.leaves(fused(**leaves))
    gradients = torch.autograd.grad(outputs, [leaves[key] for key in wanted], cotangents)
    named = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return named | {f"gradient of {key}": x for key, x in zip(wanted, gradients, strict=True)}


def poison_free_memory():
    """Fill memory that torch is likely to hand out next with NaN, so that unwritten elements are detected."""
    blocks = [torch.full((1 << size,), torch.nan, device=GPU) for size in range(8, 24) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("name", NAMES)
def test_variant_is_accurate_and_repeatable(name):
    fused = fuse(VARIANTS[name].function, implementation="triton")
    arguments = arguments_of(name)
    poison_free_memory()
    results = value_and_gradients(name, fused, *arguments)
    with promotion(name):
        expected = exact_and_allowed(name, SIZES)
    for result, (true, allowed) in expected.items():
        assert results[result].dtype == torch.bfloat16 and results[result].is_cuda, result
        array = to_numpy(results[result])
        assert array.shape == true.shape, result
        error = largest_error(array, true)
        assert error <= allowed, f"{result} of {name} errs by {error}, allowed {allowed}"
        assert np.any(array != 0), result
    poison_free_memory()
    again = value_and_gradients(name, fused, *arguments)
    # Kernels do not compute the gradient of a gathered table. XLA scatters it in any order.
    kept = [key for key in results if key != "gradient of table"]
    assert_same_bits([again[key] for key in kept], [results[key] for key in kept])


@pytest.mark.parametrize("name", ["causal", "evoformer_row"])
def test_native_gradients_match_the_path_through_jax(name):
    arguments = arguments_of(name)
    native = value_and_gradients(name, fuse(VARIANTS[name].function), *arguments)
    through_jax = value_and_gradients(name, fuse(VARIANTS[name].function, via="jax"), *arguments)
    for result, one in native.items():
        other = through_jax[result]
        largest = other.float().abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2 * largest, msg=result)


@pytest.mark.parametrize("needed", [("query", "pair"), ("query", "value"), ("pair",)], ids="_".join)
def test_resident_bias_gradients_match_jax(needed):
    """On Hopper, one kernel computes the query and bias gradients if both are needed."""
    case = RESIDENT["evoformer"]
    inputs = case.inputs()
    tensors = {key: to_tensor(x, GPU).requires_grad_(key in needed) for key, x in inputs.items()}
    output = fuse(case.function)(**tensors)
    cotangent = torch.randn_like(output)
    found = torch.autograd.grad(output, [tensors[x] for x in needed], cotangent)

    def compute(given):
        return jax_fuse(case.function, implementation="triton")(**inputs | given)

    expected, pull = jax.vjp(compute, {x: inputs[x] for x in needed})
    torch.testing.assert_close(output.cpu(), to_tensor(np.asarray(expected)), rtol=0, atol=0)
    (gradients,) = pull(dlpack.to_jax(cotangent))
    for name, one in zip(needed, found, strict=True):
        other = to_tensor(np.asarray(gradients[name])).float()
        assert bool(other.abs().max() > 0)
        torch.testing.assert_close(one.cpu().float(), other, rtol=1e-2, atol=1e-2 * other.abs().max().item(), msg=name)


@pytest.fixture
def small_calls():
    with lifted(one_pass_schedule, streamed_schedule):
        yield


@pytest.mark.parametrize("name", ["cross", "causal", "documents", "differential"])
def test_streamed_output_equals_jax_bitwise(name):
    case = STREAMED[name]
    inputs = case.inputs()
    with lifted(streamed_schedule):
        output = fuse(case.function)(**{key: to_tensor(x, GPU) for key, x in inputs.items()})
        expected = jax.jit(jax_fuse(case.function, implementation="triton"))(**inputs)
    torch.testing.assert_close(output.cpu(), to_tensor(np.asarray(expected)), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["full", "causal", "grouped", "wide_causal", "numbered"])
@pytest.mark.usefixtures("small_calls")
def test_one_pass_gradients_match_jax_and_are_repeatable(name):
    case = ONE_PASS[name]
    inputs = case.inputs()
    tensors = {key: to_tensor(x, GPU).requires_grad_() for key, x in inputs.items()}
    fused = fuse(case.function)
    output = fused(**tensors)
    cotangent = torch.randn_like(output)
    found, again = (torch.autograd.grad(fused(**tensors), list(tensors.values()), cotangent) for _ in range(2))
    assert_same_bits(list(found), list(again))
    expected, pull = jax.vjp(lambda given: jax_fuse(case.function, implementation="triton")(**given), inputs)
    torch.testing.assert_close(output.cpu(), to_tensor(np.asarray(expected)), rtol=0, atol=0)
    (gradients,) = pull(dlpack.to_jax(cotangent))
    for key, one in zip(tensors, found, strict=True):
        wanted = to_tensor(np.asarray(gradients[key])).float()
        torch.testing.assert_close(one.cpu().float(), wanted, rtol=1e-2, atol=1e-2 * wanted.abs().max().item())


@pytest.mark.parametrize("name", ["causal", "alibi", "grouped_query", "two_biases", "differential"])
def test_simple_functions_do_not_cross_to_jax(name, monkeypatch):
    fused = fuse(VARIANTS[name].function)
    arguments = arguments_of(name)
    first = value_and_gradients(name, fused, *arguments)

    def crossed(*_):
        raise AssertionError("a tensor went to JAX")

    monkeypatch.setattr(dlpack, "share", crossed)
    monkeypatch.setattr(dlpack, "receive", crossed)
    again = value_and_gradients(name, fused, *arguments)
    assert_same_bits(list(again.values()), list(first.values()))


@pytest.mark.parametrize("name", ["causal", "causal_document", "evoformer_row"])
def test_fused_call_runs_on_the_current_stream(name):
    """Inputs are written late on a side stream, so a kernel on another stream would read the old values."""
    fused = fuse(VARIANTS[name].function)
    tensors, cotangents = arguments_of(name)
    expected = value_and_gradients(name, fused, tensors, cotangents)
    late = {key: torch.zeros_like(x) for key, x in tensors.items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), Gate() as gate:
        for key, x in tensors.items():
            late[key].copy_(x)
        results = value_and_gradients(name, fused, late, cotangents)
        assert gate.is_closed(), "the host waited for the device"
        copies = [x.clone() for x in results.values()]
    side.synchronize()
    assert_same_bits(copies, list(expected.values()))


def test_cuda_graph_replay_with_new_values_equals_eager_calls():
    """New values in the same memory give new results, forward and backward."""
    fused = fuse(VARIANTS["causal"].function)
    tensors, (cotangent,) = arguments_of("causal")
    leaves = {key: x.requires_grad_() for key, x in tensors.items()}

    def run():
        output = fused(**leaves)
        return [output, *torch.autograd.grad(output, list(leaves.values()), cotangent)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for seed in (1, 2):
        others, (other_cotangent,) = arguments_of("causal", seed)
        with torch.no_grad():
            for key, x in others.items():
                leaves[key].copy_(x)
            cotangent.copy_(other_cotangent)
        expected = value_and_gradients("causal", fused, others, [other_cotangent])
        graph.replay()
        assert_same_bits(results, list(expected.values()))


def test_capture_of_uncompiled_or_jax_parts_raises_runtime_error():
    tensors, _ = arguments_of("causal")
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="run the same call once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        tensors["query"] + 1  # torch warns of empty graphs
        fuse(VARIANTS["causal"].function)(**tensors)
    gated, _ = arguments_of("evoformer_row")
    fused = fuse(VARIANTS["evoformer_row"].function)
    fused(**gated)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="captured into a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gated["query"] + 1
        fused(**gated)


def test_head_dimensions_above_256_run_through_jax():
    tensors = {key: torch.randn(1, 32, 2, 264, device=GPU) for key in ("query", "key", "value")}
    fused = fuse(VARIANTS["vanilla"].function)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in tensors.values()))
    torch.testing.assert_close(fused(**tensors), expected.transpose(1, 2).float(), rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError, match="head sizes up to 256"):
        fuse(VARIANTS["vanilla"].function, implementation="triton")(**tensors)


@pytest.mark.parametrize("name", inner.FUNCTIONS)
def test_loops_branches_and_checkpoints_match_the_path_through_jax(name):
    """The functions give the same results run by torch and run by JAX."""
    function, _ = inner.FUNCTIONS[name]
    operands = [to_tensor(x, GPU).requires_grad_() for x in inner.given()]

    def compute(fused):
        outputs = jax.tree.leaves(fused(*operands))
        gradients = torch.autograd.grad(outputs, operands, [torch.sin(3 * x) for x in outputs], allow_unused=True)
        return [*outputs, *gradients]

    native = compute(fuse(function, implementation="triton"))
    for one, other in zip(native, compute(fuse(function, via="jax")), strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * largest)


def test_capture_of_a_branch_raises_runtime_error():
    def function(x, is_wanted):
        return jax.lax.cond(is_wanted, lambda: jax.nn.softmax(x @ x.mT) @ x, lambda: x)

    x, is_wanted = torch.randn(64, 16, device=GPU), torch.tensor(True, device=GPU)
    fused = fuse(function)
    fused(x, is_wanted)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="choose on the host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        fused(x, is_wanted)


@pytest.mark.multigpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_second_gpu_stays_the_current_one_after_fuse_and_explain(implementation):
    """JAX traces, evaluates masks and compiles on GPU 0, which would otherwise stay the current device."""

    def attention(query, key, value):
        mask = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool))
        return jax.nn.softmax(jnp.where(mask, query @ key.mT, -jnp.inf)) @ jnp.sin(value)

    torch.cuda.set_device(1)
    x = torch.ones(2, 256, 64, device="cuda", requires_grad=True)
    explain(attention)(x.detach(), x.detach(), x.detach())
    assert torch.cuda.current_device() == 1
    fuse(attention, implementation=implementation)(x, x, x).sum().backward()
    assert torch.cuda.current_device() == 1


@pytest.mark.parametrize("name", ["causal", "scaled_tokens", "eight_bit_values", "long_causal", "long_half"])
def test_eight_bit_tensors_give_the_bits_of_jax(name):
    case = EIGHT_BIT[name]
    inputs = case.inputs()
    with lifted(streamed_schedule):
        found = fuse(case, implementation="triton")(*(to_tensor(x, GPU) for x in inputs.values()))
        expected = jax.jit(jax_fuse(case, implementation="triton"))(*inputs.values())
    np.testing.assert_array_equal(to_numpy(found), np.asarray(expected))
