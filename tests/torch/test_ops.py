"""The registered operators on the CPU: values, gradients, and torch's transformations of the operators."""

import dataclasses
import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    Rotary,
    block_diagonal_attention,
    block_diagonal_attention_bhsd,
    fused_qkv_block_attention,
    rotary_tables,
)
from tests.support import Case, RotaryCase, assert_accurate, exact_attention, largest_error  # noqa: E402
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

OPERATORS = torch.ops.blockdiag

CASES = {
    "batch": Case(lengths=(37, 37)),
    "causal, grouped, bfloat16": Case(
        lengths=(37, 37), query_heads=6, key_heads=2, is_causal=True, dtype="bfloat16", head_dim=32
    ),
    "float16, scale": Case(lengths=(20,), dtype="float16", scale=0.7),
    "offsets": Case(lengths=(3, 0, 40), layout="offsets", padding=7, query_heads=4),
    "lengths": Case(lengths=(16, 9, 0, 12), layout="lengths", padding=5, dtype="bfloat16"),
    "half-split": Case(lengths=(20, 20), rotary=RotaryCase()),
    "interleaved, value too": Case(
        lengths=(20, 20), rotary=RotaryCase(interleaved=True, apply_to=("query", "key", "value"))
    ),
    "positions": Case(lengths=(20, 20), query_heads=4, rotary=RotaryCase(tables="explicit")),
    "per token, offsets": Case(
        lengths=(3, 0, 29), layout="offsets", padding=5, rotary=RotaryCase(tables="token", dtype="bfloat16")
    ),
    "long blocks": Case(lengths=(280, 7), layout="lengths", block_size=280, query_heads=1, key_heads=1, head_dim=8),
}


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


# Values


@pytest.mark.parametrize("name", CASES)
def test_results_equal_jax_bitwise(name):
    case = CASES[name]
    *operands, cotangent = case.operands()
    function = case.attend(None)
    output = function(*operands)
    gradients = jax.jit(lambda operands, cotangent: jax.vjp(function, *operands)[1](cotangent))(operands, cotangent)
    assert_same_bits(results_of(case), (output, *gradients))


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_accurate(name):
    case = CASES[name]
    assert_accurate(case, [to_numpy(x) for x in results_of(case)], case.operands())


@pytest.mark.parametrize("implementation", ["reference", "xla", ("pallas", "xla")])
def test_named_implementations_are_accurate(implementation):
    case = CASES["offsets"]
    assert_accurate(case, [to_numpy(x) for x in results_of(case, implementation=implementation)], case.operands())


@pytest.mark.versions
def test_kernels_in_the_interpreter_equal_jax_bitwise():
    pytest.importorskip("triton")
    case = Case(lengths=(20,), block_size=16, query_heads=2, key_heads=1, rotary=RotaryCase())
    expected = case.results("triton")
    assert_same_bits(results_of(case, implementation="triton"), expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(37, 37)),
        Case(lengths=(37, 37), dtype="bfloat16", query_heads=4, is_causal=True),
        Case(lengths=(40, 3), layout="offsets", dtype="float16", scale=0.4),
    ],
    ids=["batch", "causal, grouped, bfloat16", "offsets, float16"],
)
def test_operator_is_as_accurate_as_torch_attention(case):
    """Errors against torch's attention in float64 are at most twice those of torch's attention in the case's dtype."""
    operands = tensors_of(case)
    reference = functools.partial(masked_attention, case)
    exact = value_and_gradients(reference, *(x.double() for x in operands))
    assert_as_accurate(results_of(case), value_and_gradients(reference, *operands), exact)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", ["offsets", "interleaved, value too"])
def test_float64_results_are_accurate(implementation, name):
    case = dataclasses.replace(CASES[name], dtype="float64")
    with jax.enable_x64(True):
        operands = case.operands()
    tensors = [to_tensor(x) for x in operands]
    for actual, exact in zip(
        value_and_gradients(attend(case, implementation=implementation), *tensors),
        exact_attention(case, operands),
        strict=True,
    ):
        assert actual.dtype == torch.float64
        assert largest_error(to_numpy(actual), exact) <= 1e-12


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", ["batch", "packed, rotary"])
def test_gradients_pass_gradcheck(implementation, name):
    case = {
        "batch": Case(lengths=(3, 3), query_heads=2, key_heads=1, head_dim=8, block_size=2, is_causal=True),
        "packed, rotary": Case(
            lengths=(2, 3), layout="offsets", padding=1, head_dim=8, block_size=2, rotary=RotaryCase()
        ),
    }[name]
    inputs = [x.double().requires_grad_() for x in tensors_of(case)[:3]]
    assert torch.autograd.gradcheck(attend(case, implementation=implementation), inputs)


def test_repeated_calls_agree_bitwise():
    case = CASES["per token, offsets"]
    assert_same_bits(results_of(case), results_of(case))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_block(poison):
    case = CASES["offsets"]
    block = case.blocks[-1]
    rows = torch.zeros(case.tokens, dtype=torch.bool)
    rows[block.start : block.start + block.length] = True
    rows[case.tokens - case.padding :] = True
    operands = tensors_of(case)
    clean = value_and_gradients(attend(case), *operands)
    dirty = value_and_gradients(attend(case), *(x.masked_fill(rows[:, None, None], poison) for x in operands))
    for before, after in zip(clean, dirty, strict=True):
        assert_same_bits([after[~rows]], [before[~rows]])
        assert not after[case.tokens - case.padding :].any()


@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8), (0, 4, 8)])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_empty_operands_keep_their_shape(shape, implementation):
    query = torch.zeros(shape, requires_grad=True)
    output = block_diagonal_attention(query, query, query, implementation=implementation)
    output.sum().backward()
    assert output.shape == query.grad.shape == shape


# Layouts


def test_non_contiguous_operands_give_equal_results():
    case = CASES["batch"]
    query, key, value, cotangent = tensors_of(case)
    expected = results_of(case)
    wide = torch.zeros(*query.shape[:-1], 2 * case.head_dim)
    wide[..., ::2] = query
    transposed = key.transpose(1, 2).contiguous().transpose(1, 2)
    packed = torch.stack((value, value), dim=2)[:, :, 1]
    operands = (wide[..., ::2], transposed, packed, cotangent.transpose(1, 3).contiguous().transpose(1, 3))
    assert not any(x.is_contiguous() for x in operands)
    assert_same_bits(value_and_gradients(attend(case), *operands), expected)


def test_misaligned_and_expanded_operands_give_equal_results():
    case = CASES["batch"]
    query, key, value, cotangent = tensors_of(case)
    shifted = torch.empty(query.numel() + 1)[1:].view(query.shape).copy_(query)
    one_head = key[:, :, :1].expand(key.shape)
    expected = value_and_gradients(attend(case), query, one_head.contiguous(), value, cotangent)
    assert_same_bits(value_and_gradients(attend(case), shifted, one_head, value, cotangent), expected)


def test_expanded_cotangent_gives_equal_gradients():
    case = CASES["offsets"]
    query, key, value, cotangent = tensors_of(case)
    expected = value_and_gradients(attend(case), query, key, value, torch.ones_like(cotangent))[1:]
    leaves = [x.requires_grad_() for x in (query, key, value)]
    attend(case)(*leaves).sum().backward()
    assert_same_bits([x.grad for x in leaves], expected)


@pytest.mark.parametrize("wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)])
def test_gradients_of_some_operands_equal_the_full_gradients(wanted):
    case = CASES["batch"]
    *operands, cotangent = tensors_of(case)
    expected = results_of(case)[1:]
    for operand, is_wanted in zip(operands, wanted, strict=True):
        operand.requires_grad_(is_wanted)
    attend(case)(*operands).backward(cotangent)
    for operand, is_wanted, gradient in zip(operands, wanted, expected, strict=True):
        if is_wanted:
            assert_same_bits([operand.grad], [gradient])
        else:
            assert operand.grad is None


def test_call_without_requires_grad_builds_no_graph():
    case = CASES["batch"]
    query, key, value, _ = tensors_of(case)
    assert not attend(case)(query, key, value).requires_grad
    with torch.no_grad():
        assert not attend(case)(query.requires_grad_(), key, value).requires_grad
    expected = results_of(case)[:1]
    with torch.inference_mode():
        assert_same_bits([attend(case)(*tensors_of(case)[:3])], expected)


def test_residuals_are_the_operands():
    case = CASES["half-split"]
    query, key, value, _ = (x.requires_grad_() for x in tensors_of(case))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        rotary = options_of(case)["rotary"]
        block_diagonal_attention(query, key, value, block_size=16, rotary=rotary)
    expected = {x.data_ptr() for x in (query, key, value, rotary.cos, rotary.sin)}
    assert set(kept) == expected


@pytest.mark.parametrize("kind", ["views", "contiguous", "grouped, contiguous", "rotary", "positions", "one tensor"])
def test_bhsd_operator_matches_the_transposed_call(kind):
    case = Case(
        lengths=(37, 37),
        query_heads=4,
        key_heads=2 if kind.startswith("grouped") else 4,
        is_causal=True,
        rotary={"rotary": RotaryCase(), "positions": RotaryCase(tables="explicit")}.get(kind),
    )
    *operands, cotangent = tensors_of(case)
    if kind == "one tensor":
        operands = [operands[0]] * 3
    expected = value_and_gradients(attend(case), *operands, cotangent)
    swapped = [x.transpose(1, 2) for x in (*operands, cotangent)]
    if kind != "views":
        swapped = [x.contiguous() for x in swapped]
    options = {name: value for name, value in options_of(case).items()}
    results = value_and_gradients(functools.partial(block_diagonal_attention_bhsd, **options), *swapped)
    for actual, right in zip(results, expected, strict=True):
        torch.testing.assert_close(actual.transpose(1, 2), right, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"`key` must have shape \[B, heads, T, H\], got \(37, 4, 16\)"):
        block_diagonal_attention_bhsd(swapped[0], torch.zeros(37, 4, 16), swapped[2])


# The fused projection

HEADS = {"query_heads": 4, "key_heads": 2, "head_dim": 16, "block_size": 16}


def projection_operands(*tokens_shape: int) -> list[np.ndarray]:
    """Return x, w_qkv, bias and a cotangent of the output."""
    generator = np.random.default_rng(0)
    shapes = ((*tokens_shape, 24), (24, 8 * 16), (8 * 16,), (*tokens_shape, 4, 16))
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("kind", ["batch", "rotary, no bias", "offsets"])
def test_fused_projection_equals_jax(kind):
    tokens_shape = (37,) if kind == "offsets" else (2, 37)
    *inputs, cotangent = projection_operands(*tokens_shape)
    options, jax_options = {}, {}
    if kind.startswith("rotary"):
        inputs.pop()
        cos, sin = blockdiag.rotary_tables(37, 16)
        options = {"rotary": Rotary(to_tensor(cos), to_tensor(sin)), "is_causal": True}
        jax_options = {"rotary": blockdiag.Rotary(cos, sin), "is_causal": True}
    if kind == "offsets":
        offsets = np.asarray([0, 9, 9, 30], np.int32)
        options, jax_options = {"sequence_offsets": to_tensor(offsets)}, {"sequence_offsets": offsets}

    def run(*operands):
        function = functools.partial(blockdiag.fused_qkv_block_attention, **HEADS, **jax_options)
        output, pull_back = jax.vjp(function, *operands)
        return output, *pull_back(jnp.asarray(cotangent))

    expected = jax.jit(run)(*inputs)
    function = functools.partial(fused_qkv_block_attention, **HEADS, **options)
    actual = value_and_gradients(function, *map(to_tensor, (*inputs, cotangent)))
    for one, other in zip(actual, expected, strict=True):
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(to_numpy(one), np.asarray(other), rtol=1e-5, atol=2e-6 * scale)


def test_fused_projection_equals_its_parts():
    x, w_qkv, bias, cotangent = map(to_tensor, projection_operands(2, 37))

    def separate(x, w_qkv, bias):
        heads = torch.nn.functional.linear(x, w_qkv.t(), bias).unflatten(-1, (8, 16))
        return block_diagonal_attention(*heads.split((4, 2, 2), dim=-2), block_size=16)

    fused = functools.partial(fused_qkv_block_attention, **HEADS)
    for one, other in zip(
        value_and_gradients(fused, x, w_qkv, bias, cotangent),
        value_and_gradients(separate, x, w_qkv, bias, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# Operators under torch's transformations


@pytest.mark.parametrize("name", CASES)
def test_operators_pass_opcheck(name):
    """opcheck covers the schema, the fake kernel and the derivative, also with symbolic shapes."""
    case = CASES[name]
    arguments = operator_arguments(case)
    cotangent = tensors_of(case)[3]
    with_gradients = (*(x.clone().requires_grad_() for x in arguments[:3]), *arguments[3:])
    torch.library.opcheck(OPERATORS.block_diagonal_forward, with_gradients)
    torch.library.opcheck(OPERATORS.block_diagonal_backward, (cotangent, *arguments))


@pytest.mark.versions
@pytest.mark.parametrize("name", ["positions", "per token, offsets"])
def test_packed_operators_pass_opcheck(name):
    case = CASES[name]
    arguments = packed_operator_arguments(case)
    torch.library.opcheck(OPERATORS.block_diagonal_forward, (arguments[0].requires_grad_(), *arguments[1:]))
    arguments[0].requires_grad_(False)
    torch.library.opcheck(OPERATORS.block_diagonal_packed_backward, (tensors_of(case)[3], *arguments))


@pytest.mark.versions
def test_operators_through_jax_pass_opcheck():
    case = CASES["half-split"]
    arguments = operator_arguments(case, implementation="xla")
    with_gradients = (*(x.clone().requires_grad_() for x in arguments[:3]), *arguments[3:])
    torch.library.opcheck(OPERATORS.block_diagonal_forward_through_jax, with_gradients)
    torch.library.opcheck(OPERATORS.block_diagonal_backward_through_jax, (tensors_of(case)[3], *arguments))
    packed = packed_operator_arguments(case)
    torch.library.opcheck(OPERATORS.block_diagonal_packed_backward_through_jax, (tensors_of(case)[3], *packed))


def test_only_native_operators_are_safe_in_cuda_graphs():
    for method in ("forward", "backward", "packed_backward"):
        native, through_jax = (getattr(OPERATORS, f"block_diagonal_{method}{end}") for end in ("", "_through_jax"))
        assert torch.Tag.cudagraph_unsafe not in native.default.tags
        assert torch.Tag.cudagraph_unsafe in through_jax.default.tags


@pytest.mark.versions
@pytest.mark.parametrize("name", ["causal, grouped, bfloat16", "offsets", "positions"])
@pytest.mark.parametrize("via", [None, "jax"])
def test_compiled_call_is_one_graph_and_equals_the_eager_call(name, via):
    case = CASES[name]
    function = attend(case, via=via)
    compiled = torch.compile(lambda q, k, v: 2 * function(q, k, v), fullgraph=True, backend="aot_eager")
    plain = value_and_gradients(lambda q, k, v: 2 * function(q, k, v), *tensors_of(case))
    assert_same_bits(value_and_gradients(compiled, *tensors_of(case)), plain)


def test_rotary_made_in_a_compiled_function_equals_the_eager_call():
    case = CASES["half-split"]
    cos, sin = rotary_tables(20, case.head_dim)

    def function(query, key, value):
        rotary = Rotary(cos, sin, interleaved=True, apply_to=("query",))
        return block_diagonal_attention(query, key, value, block_size=16, rotary=rotary)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    operands = tensors_of(case)
    assert_same_bits(value_and_gradients(compiled, *operands), value_and_gradients(function, *operands))


@pytest.mark.versions
@pytest.mark.parametrize("layout", ["batch", "offsets"])
def test_new_lengths_do_not_recompile(layout):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def function(query, key, value, offsets):
        options = {"sequence_offsets": offsets} if layout == "offsets" else {}
        return block_diagonal_attention(query, key, value, block_size=16, is_causal=True, **options).sin()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 56, 23):
        case = Case(lengths=(length,) * 2, layout=layout)
        operands = tensors_of(case)
        offsets = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        actual, expected = (
            value_and_gradients(functools.partial(one, offsets=offsets), *operands) for one in (compiled, function)
        )
        assert_same_bits(actual, expected)
    assert counter.frame_count == 1


def test_compiled_fused_projection_and_bhsd_match_the_eager_call():
    x, w_qkv, bias, cotangent = map(to_tensor, projection_operands(2, 37))

    def function(x, w_qkv, bias):
        output = fused_qkv_block_attention(x, w_qkv, bias, **HEADS).transpose(1, 2)
        return block_diagonal_attention_bhsd(output, output, output, block_size=8).transpose(1, 2)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    operands = (x, w_qkv, bias, cotangent)
    for one, other in zip(
        value_and_gradients(compiled, *operands), value_and_gradients(function, *operands), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised when inductor is imported
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
def test_inductor_matches_the_eager_call():
    """inductor generates code for the operations before the operator and after its derivative."""
    case = CASES["half-split"]
    function = attend(case)

    def layer(query, key, value):
        return function(query.sin(), key * 2, value)

    # Without vector instructions, because finding out which ones there are compiles a program for each.
    compiled = torch.compile(layer, fullgraph=True, options={"cpp.vec_isa_ok": False})
    operands = tensors_of(case)
    for one, other in zip(value_and_gradients(compiled, *operands), value_and_gradients(layer, *operands), strict=True):
        torch.testing.assert_close(one, other)


def test_invalid_arguments_of_a_compiled_call_raise_value_error():
    query = torch.zeros(2, 20, 4, 8)
    compiled = torch.compile(
        lambda query: block_diagonal_attention(query, query, query, block_size=0), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="`block_size` must be a positive integer"):
        compiled(query)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_equals_the_bfloat16_call(is_compiled):
    case = CASES["half-split"]
    operands = tensors_of(case)
    function = attend(case)

    def layer(query, key, value):
        with torch.autocast("cpu", torch.bfloat16):
            return function(query, key, value)

    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    *inputs, cotangent = (x.bfloat16() for x in operands)
    output, *gradients = value_and_gradients(function, *inputs, cotangent)
    actual, *actual_gradients = value_and_gradients(layer, *operands[:3], cotangent)
    assert_same_bits([actual], [output])
    assert_same_bits(actual_gradients, [x.float() for x in gradients])
    double = [x.double() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(case)(*double).dtype == torch.float64


def test_autocast_of_the_fused_projection_returns_bfloat16():
    x, w_qkv, bias, cotangent = map(to_tensor, projection_operands(2, 37))
    function = functools.partial(fused_qkv_block_attention, **HEADS)
    with torch.autocast("cpu", torch.bfloat16):
        output, *gradients = value_and_gradients(function, x, w_qkv, bias, cotangent.bfloat16())
    assert output.dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_activation_checkpointing_equals_the_plain_call(is_compiled):
    case = CASES["offsets"]
    function = attend(case)

    def layer(query, key, value):
        run = lambda *operands: function(*(x.sin() for x in operands))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, query, key, value, use_reentrant=False)

    expected = value_and_gradients(lambda *operands: function(*(x.sin() for x in operands)), *tensors_of(case))
    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(value_and_gradients(layer, *tensors_of(case)), expected)


@pytest.mark.parametrize("is_packed", [False, True])
def test_second_derivatives_raise_not_implemented_error(is_packed):
    case = CASES["batch"]
    query, key, value, _ = tensors_of(case)
    query.requires_grad_()
    if is_packed:
        arguments = packed_operator_arguments(case)
        query = arguments[0].requires_grad_()
        output = OPERATORS.block_diagonal_forward(*arguments)
    else:
        output = attend(case)(query, key, value)
    (gradient,) = torch.autograd.grad(output.sin().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives .* not available in torch"):
        gradient.square().sum().backward()


# Transforms


def test_vmap_equals_single_calls():
    case = CASES["half-split"]
    operands = [torch.stack((x, 2 * x, -x)) for x in tensors_of(case)[:3]]
    mapped = torch.func.vmap(attend(case))(*operands)
    for index in range(3):
        assert_same_bits([mapped[index]], [attend(case)(*(x[index] for x in operands))])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch for its first tangent
def test_forward_mode_raises_not_implemented_error():
    """torch drops tangents at Python operators, which would silently give a derivative of 0."""
    case = CASES["batch"]
    operands = tuple(tensors_of(case)[:3])
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives .* not available in torch"):
        torch.func.jvp(attend(case), operands, operands)
    query, key, value = operands
    with torch.autograd.forward_ad.dual_level():
        plain = attend(case)(query, key, value)
        with pytest.raises(NotImplementedError, match=r"forward-mode derivatives"):
            attend(case)(query, torch.autograd.forward_ad.make_dual(key, key), value)
    assert_same_bits([plain], results_of(case)[:1])


def test_gradients_of_vmap_equal_single_calls():
    case = CASES["batch"]
    stacked = [torch.stack((x, 2 * x, -x)) for x in tensors_of(case)]
    mapped = value_and_gradients(torch.func.vmap(attend(case)), *stacked)
    for index in range(3):
        expected = value_and_gradients(attend(case), *(x[index] for x in stacked))
        assert_same_bits([x[index] for x in mapped], expected)
