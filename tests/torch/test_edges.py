"""Edge cases of torch calls: other devices, forward mode, empty calls and modules on the meta device."""

import contextlib
from collections import OrderedDict

import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from blockdiag.interop import to_jax, wrap_jax, wrap_torch  # noqa: E402
from blockdiag.torch import BlockDiagonalSelfAttention, block_diagonal_attention, fused_qkv_block_attention  # noqa: E402
from blockdiag.torch.arguments import is_plain  # noqa: E402
from blockdiag.torch.ops.block_diagonal import native  # noqa: E402
from blockdiag.torch.ops.block_diagonal.operators import Arguments  # noqa: E402

COMPILER_WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def operands(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def test_meta_tensor_among_others_raises_value_error():
    query, key, value = operands(1, 40, 2, 16)
    with pytest.raises(ValueError, match="`value` must be on the device of `query`, cpu, got meta"):
        block_diagonal_attention(query, key, value.to("meta"), block_size=16)


def test_meta_tensors_alone_give_meta_tensors():
    query, key, value = (tensor.to("meta") for tensor in operands(1, 40, 2, 16))
    assert block_diagonal_attention(query, key, value, block_size=16).shape == query.shape


def test_operands_that_are_not_tensors_raise_value_error():
    query, key, value = operands(1, 40, 2, 16)
    with pytest.raises(ValueError, match="operands must be torch tensors"):
        block_diagonal_attention(query.numpy(), key, value)


def test_packed_query_without_query_heads_raises_value_error():
    packed = torch.randn(40, 4, 16)
    with pytest.raises(ValueError, match="`key_heads` must leave heads to the query, got 2 of the 4 heads"):
        torch.ops.blockdiag.block_diagonal_forward(
            packed, None, None, None, None, None, None, None, 2, 16, None, False, "", ""
        )


@pytest.mark.versions
@COMPILER_WARNINGS
def test_forward_mode_inside_torch_compile_raises():
    query, key, value = operands(1, 40, 2, 16)
    function = lambda value: block_diagonal_attention(query, key, value, block_size=16)  # noqa: E731
    derivative = torch.compile(lambda x: torch.func.jvp(function, (x,), (x,))[1], backend="aot_eager")
    with pytest.raises(Exception, match="forward-mode derivatives of block-diagonal attention are not available"):
        derivative(value)


@pytest.mark.versions
def test_tangents_crossing_to_jax_raise_type_error():
    wrapped = wrap_jax(lambda x: x * 2)
    wrapped(torch.ones(3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        for function in (wrapped, to_jax):
            with pytest.raises(TypeError, match="has a tangent, which JAX would not see"):
                function(dual)


def test_static_values_within_tuples_are_distinguished():
    wrapped = wrap_jax(lambda x, options: jnp.full(x.shape, options[0]), static_argnames="options")
    ones = torch.ones(2, dtype=torch.int32)
    assert wrapped(ones, (2,)).dtype == torch.int32
    assert wrapped(ones, (2.0,)).dtype == torch.float32
    signed = wrap_jax(lambda x, options: x * options[0], static_argnames="options")
    assert not signed(torch.ones(1), (0.0,)).signbit().item()
    assert signed(torch.ones(1), (-0.0,)).signbit().item()


def test_wrap_torch_distinguishes_static_zeros_of_both_signs():
    wrapped = wrap_torch(lambda x, factor: x * factor)
    assert not jnp.signbit(wrapped(jnp.ones(1), 0.0)).item()
    assert jnp.signbit(wrapped(jnp.ones(1), -0.0)).item()


def test_rotary_tables_are_filled_however_parameters_are_loaded():
    def make(device=None):
        return BlockDiagonalSelfAttention(32, 2, block_size=16, rotary_max_position=40, device=device)

    x = torch.randn(1, 40, 32)
    module = make()
    expected = module(x)
    assigned = make("meta")
    assigned.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(assigned(x), expected)
    emptied = make()
    emptied.rotary_cos.fill_(7)
    emptied.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert torch.equal(emptied(x), expected)


@pytest.fixture
def launches(monkeypatch):
    """Return a list that collects each bound launch with its device and the current device."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(chosen):
        before, current[0] = current[0], chosen.index
        yield
        current[0] = before

    monkeypatch.setattr(native.prepare, "_calls", OrderedDict())
    monkeypatch.setattr(native, "device_target", lambda index: None)
    monkeypatch.setattr(native, "bound_launch", lambda spec, index: seen.append((spec.name, index, current[0])))
    monkeypatch.setattr(torch.cuda, "device", device)
    return seen


class OnDevice:
    """A stand-in for a CUDA tensor, with the attributes that are read before a launch."""

    def __init__(self, *shape, device=1):
        self.shape, self.ndim, self.dtype = torch.Size(shape), len(shape), torch.bfloat16
        self.device = torch.device("cuda", device)

    def numel(self):
        return self.shape.numel()


def call_of(*shape, key_heads):
    query, key = OnDevice(*shape), OnDevice(*shape[:-2], key_heads, shape[-1])
    return Arguments(query, key, key, None, None, None, None, None, 0, 64, None, False, "", "")


def test_kernels_are_bound_while_their_device_is_current(launches):
    native.prepare(call_of(2, 128, 4, 64, key_heads=2))
    assert launches == [("block_diagonal_forward", 1, 1)]


def test_prepare_of_empty_calls_binds_no_kernel(launches):
    native.prepare(call_of(2, 0, 4, 64, key_heads=2))
    assert launches == []


def test_fused_projection_with_invalid_heads_raises_value_error():
    with pytest.raises(ValueError, match="must be a multiple of the number of key heads"):
        fused_qkv_block_attention(torch.ones(4, 8), torch.ones(8, 7 * 8), query_heads=3, key_heads=2, head_dim=8)


def test_is_plain_excludes_subclasses_modes_and_transforms(monkeypatch):
    """CPU tensors that report `is_cuda` stand for CUDA tensors."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.ones(2)
    assert is_plain(x, None)
    assert not is_plain(x, torch.nn.Buffer(x).as_subclass(Watched))
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not is_plain(x)
    seen = []
    torch.func.vmap(lambda row: seen.append(is_plain(row)) or row)(torch.ones(2, 3))
    assert seen == [False]


class Watched(torch.Tensor):
    """A tensor subclass."""
