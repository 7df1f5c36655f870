"""`blockdiag.torch.fuse` through JAX and with native launches in Triton's interpreter."""

import functools
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag import NotFusible  # noqa: E402
from blockdiag.fusion.gallery import VARIANTS, Sizes  # noqa: E402
from blockdiag.fusion.program import trace  # noqa: E402
from blockdiag.torch import explain as torch_explain  # noqa: E402
from blockdiag.torch import fuse  # noqa: E402
from blockdiag.torch.fusion import call  # noqa: E402
from blockdiag.torch.fusion import program as torch_program  # noqa: E402
from blockdiag.torch.fusion.program import marked  # noqa: E402
from blockdiag.torch.fusion.region import BoundRegion, region_p  # noqa: E402
from blockdiag.torch.fusion.split import Segment, Split  # noqa: E402
from blockdiag.triton_kernels.launch.plan import Target  # noqa: E402
from tests.fusion import fusion_refused  # noqa: E402
from tests.fusion.passes import test_defer_division as sums  # noqa: E402
from tests.fusion.regions import test_feature_sums as features  # noqa: E402
from tests.fusion.regions import test_grids as grids  # noqa: E402
from tests.fusion.regions import test_log_sum_exps as log_sums  # noqa: E402
from tests.fusion.resident_cases import CASES as RESIDENT  # noqa: E402
from tests.support import compiled_quickly  # noqa: E402
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402
from tests.triton_kernels.plans_support import report_of  # noqa: E402

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TRITON = pytest.param("triton", marks=NEEDS_TRITON)
BOTH = pytest.mark.parametrize("implementation", ["xla", TRITON])

# The tokens fill two tiles, so that the interpreter runs few programs.
SIZES = Sizes(batch=2, rows=1, query_tokens=40, key_tokens=40, query_heads=2, key_heads=1, value_dim=12)
# One variant of each structure, with the number of functions that JAX computes around the kernels.
NATIVE_VARIANTS = {
    "vanilla": 0,
    "causal_document": 1,  # lists of tiles
    "alibi_learned": 0,
    "dense_mask": 1,  # lists of tiles
    "grouped_query": 0,
    "sinks_concatenated": 0,
    "evoformer_row": 1,  # the gate
    "differential_learned": 2,  # the factor; the norm
    "t5_relative_bias": 1,  # the bias
    "sigmoid": 0,
    "invariant_points_frames": 2,  # points in one frame, and back
}


@functools.cache
def operands(name: str) -> tuple[dict[str, jax.Array], Any]:
    """Return the inputs of a variant and a cotangent of its outputs."""
    variant = VARIANTS[name]
    inputs = variant.make_inputs(jax.random.key(0), SIZES)
    generator = np.random.default_rng(0)
    outputs = jax.eval_shape(lambda: variant.function(**inputs))
    return inputs, jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), outputs)


@functools.cache
def exact(name: str) -> dict[str, np.ndarray]:
    """Return the outputs and gradients of a variant in float64."""
    variant = VARIANTS[name]
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else None), operands(name))
    inputs, cotangent = dict(wide[0]), wide[1]

    def compute(floating, others, cotangent):
        function = blockdiag.fuse(variant.function, implementation="reference")
        outputs, pull_back = jax.vjp(lambda floating: function(**floating, **others), floating)
        return outputs, pull_back(cotangent)[0]

    floating = {name: inputs.pop(name) for name in variant.differentiable}
    with jax.enable_x64(True):
        outputs, gradients = compiled_quickly(compute)(floating, inputs, cotangent)
        named = {f"output {i}": x for i, x in enumerate(jax.tree.leaves(outputs))}
        named |= {f"gradient of {name}": x for name, x in gradients.items()}
        return jax.tree.map(np.asarray, named)


def results_of(name: str, fused: Any) -> dict[str, Any]:
    """Return the outputs and gradients of a fused variant."""
    variant = VARIANTS[name]
    inputs, cotangent = jax.tree.map(to_tensor, operands(name))
    wanted = [inputs[name].requires_grad_() for name in variant.differentiable]
    outputs = jax.tree.leaves(fused(**inputs))
    gradients = torch.autograd.grad(outputs, wanted, jax.tree.leaves(cotangent))
    named = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return named | {f"gradient of {name}": x for name, x in zip(variant.differentiable, gradients, strict=True)}


def assert_exact(name: str, results: dict[str, Any]) -> None:
    for result, true in exact(name).items():
        actual = to_numpy(results[result])
        assert actual.shape == true.shape and actual.dtype == np.float32, result
        np.testing.assert_allclose(actual, true, rtol=0, atol=1e-5 * max(1.0, np.abs(true).max()), err_msg=result)


@NEEDS_TRITON
@pytest.mark.parametrize("name", NATIVE_VARIANTS)
def test_native_variant_is_accurate_and_repeatable(name):
    fused = fuse(VARIANTS[name].function, implementation="triton")
    results = results_of(name, fused)
    assert_exact(name, results)
    again = results_of(name, fused)
    assert_same_bits(list(again.values()), list(results.values()))


@pytest.mark.parametrize("name", ["causal_document", "evoformer_row"])
def test_variant_through_jax_is_accurate_and_repeatable(name):
    fused = fuse(VARIANTS[name].function)
    results = results_of(name, fused)
    assert_exact(name, results)
    assert_same_bits(list(results_of(name, fused).values()), list(results.values()))


@pytest.mark.parametrize("name", NATIVE_VARIANTS)
def test_native_variant_has_the_expected_number_of_jax_segments(name):
    split = Split(marked(trace(VARIANTS[name].function, (), operands(name)[0]), has_gradient=True))
    assert sum(isinstance(part, Segment) for part in split.parts) == NATIVE_VARIANTS[name]


@NEEDS_TRITON
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_delta_kernel_compiles_without_spills(arch):
    sizes = Sizes(batch=2, rows=8, query_tokens=250, key_tokens=250, head_dim=48, value_dim=48, dtype="bfloat16")
    variant = VARIANTS["evoformer_row"]
    inputs = variant.make_inputs(jax.random.key(0), sizes)
    jaxpr = marked(trace(variant.function, (), inputs), has_gradient=True).jaxpr
    (steps,) = [equation.params["steps"] for equation in jaxpr.eqns if equation.primitive is region_p]
    report = report_of(steps.delta.launch.plan(Target.for_arch(arch)), arch)
    assert not report.local_accesses, str(report)
    assert report.ptx["f64"] == 0 and report.ptx["atom"] == 0


# Calls


def causal(query, key, value):
    """Compute causal attention of operands [B, T, N, H]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    scores = jnp.where((positions[:, None] >= positions[None, :])[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def ranked(query, key, value):
    scores = jnp.sort(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def biased(query, key, value, bias):
    """Compute attention of operands [B, N, T, H] with a bias [N, T, T]."""
    scores = jnp.einsum("bnth,bnsh->bnts", query, key) + bias[None]
    return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores, axis=-1), value)


def tensors(count: int = 3, shape: tuple[int, ...] = (1, 20, 2, 16), grad: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(count)]


def plain(function: Any, *arguments: Any) -> Any:
    """Return the result of the unfused function as a tensor."""
    return to_tensor(function(*[jnp.asarray(to_numpy(x)) for x in arguments]))


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, function):
        self.function, self.traces = function, 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.function(*args, **kwargs)


@BOTH
def test_equal_calls_are_traced_once(implementation):
    counted = Counted(causal)
    fused = fuse(counted, implementation=implementation)
    operands = tensors()
    first = fused(*operands)
    torch.testing.assert_close(first, plain(causal, *operands))
    traces = counted.traces
    assert_same_bits([fused(*operands)], [first])
    assert counted.traces == traces > 0
    fused(*tensors(shape=(1, 24, 2, 16)))
    assert counted.traces == 2 * traces
    fused.cache_clear()
    fused(*operands)
    assert counted.traces == 3 * traces


@BOTH
def test_arguments_may_be_pytrees_with_static_values(implementation):
    def windowed(inputs, *, width, kind):
        query, key, value = inputs["query"], *inputs["memory"]
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        positions = jnp.arange(query.shape[1])
        mask = positions[:, None] - positions[None, :] < width
        weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf), axis=-1)
        output = jnp.einsum("bnts,bsnh->btnh", weights, value)
        return {"output": output, kind: (output.astype(jnp.float16), width)}

    counted = Counted(windowed)
    fused = fuse(counted, implementation=implementation)
    query, key, value = tensors()
    arguments = {"query": query, "memory": (key, value)}
    found = fused(arguments, width=3, kind="half")
    expected = windowed(jax.tree.map(lambda x: jnp.asarray(to_numpy(x)), arguments), width=3, kind="half")
    torch.testing.assert_close(found["output"], to_tensor(expected["output"]))
    half, width = found["half"]
    assert half.dtype == torch.float16 and width.item() == 3
    traces = counted.traces
    wide = fused(arguments, width=7, kind="half")
    assert counted.traces > traces
    assert not torch.equal(wide["output"], found["output"])


@BOTH
def test_gradients_are_computed_only_for_operands_that_require_them(implementation, monkeypatch):
    launched = []
    original = call._interpreted
    monkeypatch.setattr(call, "_interpreted", lambda spec: (launched.append(spec.name), original(spec))[1])
    query, key, value = tensors(3, (2, 2, 20, 16))
    bias = torch.zeros(2, 20, 20)
    value.requires_grad_()
    output = fuse(biased, implementation=implementation)(query, key, value, bias)
    output.sum().backward()
    assert query.grad is None and bias.grad is None
    arrays = [jnp.asarray(to_numpy(x)) for x in (query, key, value, bias)]
    expected = jax.grad(lambda *given: biased(*given).sum(), argnums=2)(*arrays)
    torch.testing.assert_close(value.grad, to_tensor(expected))
    if implementation == "triton":
        # The kernel for the gradient of the bias is not launched.
        assert "fused_forward" in launched and "fused_columns" in launched
        assert not {"fused_rows", "fused_pairs"} & set(launched)


@BOTH
def test_no_grad_and_inference_mode_build_no_graph(implementation):
    operands = tensors(grad=True)
    fused = fuse(causal, implementation=implementation)
    with torch.no_grad():
        output = fused(*operands)
    assert not output.requires_grad
    with torch.inference_mode():
        assert_same_bits([fused(*operands)], [output])
    assert_same_bits([fused(*operands)], [output])
    assert fused(*operands).requires_grad


@BOTH
def test_non_contiguous_operands_and_cotangents_give_equal_results(implementation):
    packed = torch.randn(2, 20, 3, 2, 16, requires_grad=True)
    fused = fuse(causal, implementation=implementation)
    output = fused(*packed.unbind(2))
    cotangent = torch.ones(20, 2, 2, 16).transpose(0, 1)
    (gradient,) = torch.autograd.grad(output, packed, cotangent)
    dense = [x.detach().contiguous().requires_grad_() for x in packed.unbind(2)]
    expected = fused(*dense)
    assert_same_bits([output.detach()], [expected.detach()])
    assert_same_bits(gradient.unbind(2), torch.autograd.grad(expected, dense, cotangent.contiguous()))


@NEEDS_TRITON
def test_bfloat16_in_the_interpreter_is_accurate():
    operands = [x.bfloat16().requires_grad_() for x in tensors()]
    output = fuse(causal, implementation="triton")(*operands)
    wide = [x.detach().float().requires_grad_() for x in operands]
    expected = fuse(causal, implementation="xla")(*wide)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(output.square().sum(), operands)
    for one, other in zip(gradients, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("cases", "function", "shapes"),
    [
        (sums, sums.linear_attention, (sums.linear_attention,)),
        (grids, grids.decomposed, (grids.decomposed,)),
        (features, features.graph_attention, features.OPERANDS),
    ],
)
def test_rewritten_programs_match_jax_with_gradients(cases, function, shapes):
    """The cases cover deferred division, grids of pixels and sums over features."""
    arrays = cases.arrays(*shapes)
    operands = [to_tensor(x).requires_grad_() for x in arrays]
    output = fuse(function, implementation="triton")(*operands)
    expected, pull_back = jax.vjp(function, *arrays)
    torch.testing.assert_close(output.detach(), to_tensor(expected), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(output, operands, torch.ones_like(output))
    for gradient, true in zip(gradients, pull_back(jnp.ones_like(expected)), strict=True):
        torch.testing.assert_close(gradient, to_tensor(true), rtol=2e-5, atol=2e-5)


@BOTH
@pytest.mark.parametrize("function", [log_sums.returned, log_sums.merged, log_sums.before])
def test_log_sum_exps_match_jax_with_gradients(function, implementation):
    arrays = log_sums.arrays(*[log_sums.OPERAND] * 3)
    operands = [to_tensor(x).requires_grad_() for x in arrays]
    output = fuse(function, implementation=implementation)(*operands)
    expected, pull_back = jax.vjp(function, *arrays)
    torch.testing.assert_close(output.detach(), to_tensor(expected), rtol=1e-5, atol=1e-5)
    cotangent = jnp.sin(expected)
    gradients = torch.autograd.grad(output, operands, to_tensor(cotangent))
    for gradient, true in zip(gradients, pull_back(cotangent), strict=True):
        torch.testing.assert_close(gradient, to_tensor(true), rtol=2e-5, atol=2e-5)


@NEEDS_TRITON
@pytest.mark.parametrize("place", [0, 1])
def test_gradient_of_output_or_log_sum_exp_alone_matches_jax(place):
    def both(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value), jax.nn.logsumexp(scores, -1)

    operands = tensors(grad=True)
    fuse(both, implementation="triton")(*operands)[place].sin().sum().backward()
    arrays = [jnp.asarray(to_numpy(x)) for x in operands]
    expected = jax.grad(lambda *x: jnp.sin(both(*x)[place]).sum(), (0, 1, 2))(*arrays)
    for operand, true in zip(operands, expected, strict=True):
        torch.testing.assert_close(operand.grad, to_tensor(true), rtol=2e-5, atol=2e-5)


@NEEDS_TRITON
def test_consecutive_attentions_match_jax_with_gradients():
    def twice(query, key, value):
        middle = jnp.tanh(causal(query, key, value))
        return causal(middle * 2, key, value) + middle

    def residual(query, key, value):
        output = causal(query, key, value) + query
        return causal(output, key, value) + output

    for function, segments in ((twice, 2), (residual, 0)):
        operands = tensors(grad=True)
        arrays = [jnp.asarray(to_numpy(x)) for x in operands]
        split = Split(marked(trace(function, tuple(arrays), {}), has_gradient=True))
        assert sum(isinstance(part, Segment) for part in split.parts) == segments
        output = fuse(function, implementation="triton")(*operands)
        expected, pull_back = jax.vjp(function, *arrays)
        torch.testing.assert_close(output.detach(), to_tensor(expected))
        gradients = torch.autograd.grad(output, operands, torch.ones_like(output))
        for gradient, true in zip(gradients, pull_back(jnp.ones_like(expected)), strict=True):
            torch.testing.assert_close(gradient, to_tensor(true), rtol=1e-5, atol=1e-5)


@BOTH
def test_results_own_their_memory(implementation):
    def with_inputs(query, key, value):
        output = causal(query, key, value)
        return output, output.reshape(-1), query, query.mT, jnp.arange(3), 2.0

    operands = tensors()
    output, flat, query, turned, numbers, two = fuse(with_inputs, implementation=implementation)(*operands)
    assert two.item() == 2.0 and numbers.tolist() == [0, 1, 2]
    kept = [output.clone(), operands[0].clone()]
    for x in (flat, query, turned, numbers):
        x.zero_()
    assert_same_bits([output, operands[0]], kept)
    assert fuse(with_inputs, implementation=implementation)(*operands)[4].tolist() == [0, 1, 2]


@BOTH
def test_arrays_beside_tensors_give_equal_results(implementation):
    query, key, value = tensors(3, (2, 2, 20, 16))
    bias = np.random.default_rng(0).normal(size=(2, 20, 20)).astype(np.float32)
    fused = fuse(biased, implementation=implementation)
    expected = fused(query, key, value, torch.from_numpy(bias))
    assert_same_bits([fused(query, key, value, bias)], [expected])
    assert_same_bits([fused(query, key, value, jnp.asarray(bias))], [expected])


@BOTH
def test_activation_checkpointing_keeps_gradients(implementation):
    from torch.utils.checkpoint import checkpoint

    fused = fuse(causal, implementation=implementation)
    operands = tensors(grad=True)
    expected = torch.autograd.grad(fused(*operands).square().sum(), operands)
    output = checkpoint(fused, *operands, use_reentrant=False)
    assert_same_bits(torch.autograd.grad(output.square().sum(), operands), expected)


@NEEDS_TRITON
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_reaches_the_region(deterministic, monkeypatch):
    found, original = [], torch_program.mark

    def mark(region, *args, **kwargs):
        found.append(region.is_ordered)
        return original(region, *args, **kwargs)

    monkeypatch.setattr(torch_program, "mark", mark)
    operands = tensors(grad=True)
    fuse(causal, implementation="triton", deterministic=deterministic)(*operands).sum().backward()
    assert found and set(found) == {deterministic}


# Refusals


@BOTH
def test_unfusible_function_raises_not_fusible_and_falls_back(implementation):
    with pytest.raises(NotFusible, match=r"`sort` of scores .*test_fuse.py:\d+"):
        fuse(ranked, implementation=implementation)(*tensors())
    fused = fuse(ranked, implementation=implementation, fallback=True)
    operands = tensors(grad=True)
    output = fused(*operands)
    torch.testing.assert_close(output.detach(), plain(ranked, *operands))
    output.sum().backward()
    assert "`sort`" in fused.fallbacks[0]
    assert fused(*operands).shape == output.shape


def test_refusal_names_the_first_line_that_breaks_a_rule():
    case = fusion_refused.REFUSED["talking_heads"]
    with pytest.raises(NotFusible, match=re.escape(case.says)) as refusal:
        fuse(case.function)(*map(to_tensor, case.operands))
    assert f"fusion_refused.py:{case.line}:" in str(refusal.value)
    assert blockdiag.torch.explain(case.function)(*map(to_tensor, case.operands)).reason == str(refusal.value)


def test_reference_implementation_runs_the_function():
    operands = tensors(grad=True)
    output = fuse(ranked, implementation="reference")(*operands)
    torch.testing.assert_close(output.detach(), plain(ranked, *operands))


@NEEDS_TRITON
def test_unsupported_dtypes_raise_with_a_remedy():
    query, key, value = tensors()
    with pytest.raises(ValueError, match=r"torch.int64, which JAX would narrow; cast it with tensor.to\(torch.int32\)"):
        fuse(causal, implementation="triton")(query, key, value.long())
    operands = [query.double(), key.double(), value.double()]
    with jax.enable_x64(True):
        with pytest.raises(NotImplementedError, match=r"take no \w+64 arrays"):
            fuse(causal, implementation="triton")(*operands)
        output = fuse(causal, implementation=("triton", "xla"))(*operands)
    expected = plain(causal, *[x.float() for x in operands]).double()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert output.dtype == torch.float64


@NEEDS_TRITON
def test_second_derivatives_raise_not_implemented_error():
    operands = tensors(grad=True)
    output = fuse(causal, implementation="triton")(*operands)
    (gradient, *_) = torch.autograd.grad(output.square().sum(), operands, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def test_invalid_options_raise_value_error():
    with pytest.raises(ValueError, match="`implementation` must be None"):
        fuse(causal, implementation="cuda")
    with pytest.raises(ValueError, match="`via` must be None or 'jax'"):
        fuse(causal, via="torch")


@BOTH
def test_invalid_arguments_raise(implementation):
    fused = fuse(causal, implementation=implementation)
    query, key, value = tensors()
    with pytest.raises(ValueError, match="all tensors must be on one device, got some on cpu and meta"):
        fused(query, key, value.to("meta"))
    with pytest.raises(ValueError, match="only cpu and NVIDIA cuda tensors cross"):
        fused(*[x.to("meta") for x in (query, key, value)])
    with pytest.raises(TypeError, match="hashable"):
        fused(query, key, {1, 2})
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.functionalize(fused)(query, key, value)
    output = fused(query.requires_grad_(), key, value)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(output, query, torch.ones(2, *output.shape), is_grads_batched=True)


@BOTH
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_raise_value_error(implementation):
    query, key, value = tensors()
    with pytest.raises(
        ValueError, match=r"(?s)nested, and JAX shares dense memory only.*torch.cat\(tensor.unbind\(\)\)"
    ):
        fuse(causal, implementation=implementation)(torch.nested.nested_tensor([query[0]]), key, value)


@pytest.mark.parametrize(
    ("arch", "needed", "is_joint"),
    [(90, True, True), (90, False, False), (100, True, False), (None, True, False)],
)
def test_joint_kernel_is_chosen_only_on_hopper_with_all_gradients_needed(arch, needed, is_joint):
    pytest.importorskip("triton")
    case = RESIDENT["evoformer"]
    given = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in case.shapes.items()}
    jaxpr = marked(trace(case.function, (), given), has_gradient=True)
    (steps,) = [x.params["steps"] for x in jaxpr.jaxpr.eqns if x.primitive is region_p]
    names = list(case.shapes)
    assert len(steps.on_hopper) == 2 and len(steps.backward) == 3

    def refuse(spec):
        raise AssertionError(f"{spec.name} is made ready")

    bound = BoundRegion(steps, refuse, None if arch is None else Target.for_arch(arch))
    # The query gradient, the first of the joint kernel, is needed in every case.
    place = steps.on_hopper[0].gradients[0].operand
    flags = [needed or i == place for i in range(len(names))]
    assert (bound.backward_steps(flags) is steps.on_hopper) == is_joint


@pytest.mark.parametrize("implementation", ["xla", TRITON])
def test_current_gpu_that_jax_changes_is_restored_by_fuse_and_explain(monkeypatch, implementation):
    """JAX leaves a thread on the GPU that it used last. Here each trace of the function changes the current GPU."""
    current = [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    traces = []

    def attention(query: Any, key: Any, value: Any) -> Any:
        traces.append(current[0])
        current[0] = 0
        return jax.nn.softmax(query @ key.mT) @ value

    x = torch.ones(1, 32, 16, requires_grad=True)
    fuse(attention, implementation=implementation)(x, x, x).sum().backward()
    assert traces and current == [1]
    traces.clear()
    torch_explain(attention)(x, x, x)
    assert traces and current == [1]
