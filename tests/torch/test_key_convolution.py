"""Key convolution in torch on the CPU: values, gradients, and the operators under torch's transformations."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockdiag.torch import key_convolution  # noqa: E402
from tests.ops.key_convolution_support import ConvolutionCase, assert_accurate, exact_convolution  # noqa: E402
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor, value_and_gradients  # noqa: E402

OPERATORS = torch.ops.blockdiag

CASES = {
    "batch": ConvolutionCase(lengths=(37, 37)),
    "offsets": ConvolutionCase(lengths=(3, 0, 40, 130), layout="offsets", padding=7, size=5),
    "bfloat16, weights float32": ConvolutionCase(
        lengths=(37,), dtype="bfloat16", weights_dtype="float32", residual=False
    ),
    "float16, no activation": ConvolutionCase(lengths=(20,), dtype="float16", size=8, activation=None),
}


def tensors_of(case):
    """Return key, weights and a cotangent of the output."""
    return [to_tensor(x) for x in case.operands()]


def convolve(case, **more):
    """Return the operation as a function of key and weights."""
    options = dict(case.options)
    if "sequence_offsets" in options:
        options["sequence_offsets"] = to_tensor(options["sequence_offsets"])
    return functools.partial(key_convolution, **options, **more)


def results_of(case, **more):
    """Return the output and the gradients of key and weights."""
    return value_and_gradients(convolve(case, **more), *tensors_of(case))


def operator_arguments(case, implementation=""):
    """Return the arguments of `torch.ops.blockdiag.key_convolution_forward` for a call."""
    key, weights, _ = tensors_of(case)
    offsets = case.options.get("sequence_offsets")
    offsets = None if offsets is None else to_tensor(offsets)
    return key, weights, offsets, case.activation, case.residual, implementation


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, implementation) for name in CASES for implementation in (None, "reference")),
        ("float16, no activation", ("triton", "xla")),
    ],
)
def test_output_and_gradients_are_accurate(name, implementation):
    case = CASES[name]
    actual = [to_numpy(x) for x in results_of(case, implementation=implementation)]
    assert_accurate(actual, exact_convolution(case, case.operands()), case.operands())


@pytest.mark.parametrize("name", CASES)
def test_results_equal_jax_bitwise(name):
    case = CASES[name]
    key, weights, cotangent = case.operands()
    output = case.convolve()(key, weights)
    gradients = jax.jit(lambda k, w, d: jax.vjp(case.convolve(), k, w)[1](d))(key, weights, cotangent)
    assert_same_bits(results_of(case), (output, *gradients))


def test_float64_results_are_accurate():
    case = dataclasses.replace(CASES["offsets"], dtype="float64")
    with jax.enable_x64(True):
        operands = case.operands()
    actual = value_and_gradients(convolve(case), *map(to_tensor, operands))
    assert_accurate([to_numpy(x) for x in actual], exact_convolution(case, operands), operands)


def test_gradients_pass_gradcheck():
    case = ConvolutionCase(lengths=(2, 4), layout="offsets", padding=1, key_heads=1, head_dim=3)
    inputs = [x.double().requires_grad_() for x in tensors_of(case)[:2]]
    assert torch.autograd.gradcheck(convolve(case), inputs)


def test_non_contiguous_operands_give_equal_results():
    case = CASES["batch"]
    key, weights, cotangent = tensors_of(case)
    operands = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (key, weights, cotangent)]
    assert not any(x.is_contiguous() for x in operands)
    assert_same_bits(value_and_gradients(convolve(case), *operands), results_of(case))


def test_gradient_of_one_operand_equals_the_full_gradient():
    case = CASES["batch"]
    expected = results_of(case)[1:]
    for wanted in range(2):
        *operands, cotangent = tensors_of(case)
        operands[wanted].requires_grad_()
        convolve(case)(*operands).backward(cotangent)
        assert_same_bits([operands[wanted].grad], [expected[wanted]])
        assert operands[1 - wanted].grad is None


@pytest.mark.parametrize("shape", [(0, 20, 2, 8), (2, 0, 2, 8), (0, 2, 8)])
def test_empty_operands_keep_their_shape(shape):
    key, weights = torch.zeros(shape, requires_grad=True), torch.ones(3, 2, 8, requires_grad=True)
    output = key_convolution(key, weights)
    output.sum().backward()
    assert output.shape == key.grad.shape == shape and not weights.grad.any()


@pytest.mark.parametrize("name", CASES)
def test_operators_pass_opcheck(name):
    """opcheck covers the schema, the fake kernel and the derivative, also with symbolic shapes."""
    case = CASES[name]
    key, weights, *rest = operator_arguments(case)
    with_gradients = (key.clone().requires_grad_(), weights.clone().requires_grad_(), *rest)
    torch.library.opcheck(OPERATORS.key_convolution_forward, with_gradients)
    torch.library.opcheck(OPERATORS.key_convolution_backward, (tensors_of(case)[2], key, weights, *rest))


def test_operators_through_jax_pass_opcheck():
    case = CASES["offsets"]
    key, weights, *rest = operator_arguments(case, "xla")
    with_gradients = (key.clone().requires_grad_(), weights.clone().requires_grad_(), *rest)
    torch.library.opcheck(OPERATORS.key_convolution_forward_through_jax, with_gradients)
    torch.library.opcheck(OPERATORS.key_convolution_backward_through_jax, (tensors_of(case)[2], key, weights, *rest))


def test_only_native_operators_are_safe_in_cuda_graphs():
    for method in ("forward", "backward"):
        native, through_jax = (getattr(OPERATORS, f"key_convolution_{method}{end}") for end in ("", "_through_jax"))
        assert torch.Tag.cudagraph_unsafe not in native.default.tags
        assert torch.Tag.cudagraph_unsafe in through_jax.default.tags


@pytest.mark.parametrize("name", ["offsets", "bfloat16, weights float32"])
@pytest.mark.parametrize("via", [None, "jax"])
def test_compiled_call_is_one_graph_and_equals_the_eager_call(name, via):
    case = CASES[name]
    function = convolve(case, via=via)
    compiled = torch.compile(lambda k, w: 2 * function(k, w), fullgraph=True, backend="aot_eager")
    plain = value_and_gradients(lambda k, w: 2 * function(k, w), *tensors_of(case))
    assert_same_bits(value_and_gradients(compiled, *tensors_of(case)), plain)


def test_new_lengths_do_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda k, w: key_convolution(k, w).sin(), fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 56, 23):
        operands = tensors_of(ConvolutionCase(lengths=(length,) * 2))
        expected = value_and_gradients(lambda k, w: key_convolution(k, w).sin(), *operands)
        assert_same_bits(value_and_gradients(compiled, *operands), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_casts_the_key_and_keeps_float32_weights(is_compiled):
    """The gradient of float32 weights stays float32."""
    case = CASES["batch"]
    key, weights, cotangent = tensors_of(case)

    def layer(key, weights):
        with torch.autocast("cpu", torch.bfloat16):
            return key_convolution(key, weights)

    expected = value_and_gradients(key_convolution, key.bfloat16(), weights, cotangent.bfloat16())
    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    output, d_key, d_weights = value_and_gradients(layer, key, weights, cotangent.bfloat16())
    assert_same_bits([output, d_key, d_weights], [expected[0], expected[1].float(), expected[2]])
    with torch.autocast("cpu", torch.bfloat16):
        assert key_convolution(key.double(), weights.double()).dtype == torch.float64


def test_activation_checkpointing_equals_the_plain_call():
    case = CASES["offsets"]

    def layer(key, weights):
        run = lambda key, weights: convolve(case)(key.sin(), weights)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, key, weights, use_reentrant=False)

    expected = value_and_gradients(lambda key, weights: convolve(case)(key.sin(), weights), *tensors_of(case))
    assert_same_bits(value_and_gradients(layer, *tensors_of(case)), expected)


def test_vmap_equals_single_calls():
    case = CASES["batch"]
    stacked = [torch.stack((x, 2 * x)) for x in tensors_of(case)]
    mapped = value_and_gradients(torch.func.vmap(convolve(case)), *stacked)
    for index in range(2):
        assert_same_bits([x[index] for x in mapped], value_and_gradients(convolve(case), *(x[index] for x in stacked)))


def test_second_derivatives_raise_not_implemented_error():
    key, weights, _ = tensors_of(CASES["batch"])
    key.requires_grad_()
    (gradient,) = torch.autograd.grad(key_convolution(key, weights).sin().sum(), key, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of key convolution are not available in torch"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch for its first tangent
def test_forward_mode_raises_not_implemented_error():
    operands = tuple(tensors_of(CASES["batch"])[:2])
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives of key convolution"):
        torch.func.jvp(key_convolution, operands, operands)


MISTAKES = {
    "array": ({"key": np.zeros((4, 1, 8), np.float32)}, "`key` must be a tensor, got <class 'numpy.ndarray'>"),
    "weights": ({"weights": torch.zeros(3, 2, 8)}, r"`weights` must have shape \(size, 1, 8\)"),
    "activation": ({"activation": "gelu"}, "`activation` must be \"silu\" or None, got 'gelu'"),
    "residual": ({"residual": None}, "`residual` must be True or False"),
    "via": ({"via": "xla"}, "`via` must be None or 'jax', got 'xla'"),
    "implementation": ({"implementation": "pallas"}, "`implementation` must be None, one of"),
    "offsets": ({"sequence_offsets": [0, 4]}, "`sequence_offsets` must be a tensor"),
    "offsets beyond": (
        {"sequence_offsets": torch.tensor([0, 5], dtype=torch.int32)},
        "must end within the 4 tokens of `key`, got 5",
    ),
    "device": ({"weights": torch.zeros(3, 1, 8, device="meta")}, "`weights` must be on the device of `key`, cpu"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_value_error(name):
    changes, message = MISTAKES[name]
    arguments = {"key": torch.zeros(4, 1, 8), "weights": torch.zeros(3, 1, 8), **changes}
    with pytest.raises(ValueError, match=message):
        key_convolution(**arguments)


def test_meta_tensors_give_meta_tensors():
    """Shape inference needs neither data nor an implementation."""
    key = torch.zeros(2, 20, 2, 8, device="meta", dtype=torch.bfloat16)
    output = key_convolution(key, torch.zeros(3, 2, 8, device="meta"))
    assert output.is_meta and output.shape == key.shape and output.dtype == key.dtype
