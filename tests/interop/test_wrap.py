"""`wrap_jax`: JAX functions in torch, with their gradients."""

import functools
import gc
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from blockdiag.interop import jaxlib_launcher, wrap_jax


@pytest.fixture(autouse=True, scope="module")
def seed():
    torch.manual_seed(0)


def randn(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


class Counted:
    """A function that counts how often JAX traces it."""

    def __init__(self, fn):
        functools.update_wrapper(self, fn)
        self.fn, self.traces = fn, 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.fn(*args, **kwargs)


# --- Values and gradients


def mixture(x, w, b):
    return jnp.tanh(x @ w + b) * jnp.exp(b)


def torch_mixture(x, w, b):
    return torch.tanh(x @ w + b) * torch.exp(b)


@pytest.mark.versions
@pytest.mark.parametrize("names", ["x w b", "x", "w b", "b"])
def test_wrap_jax_gradients_match_torch(names):
    operands = [randn(5, 4), randn(4, 3), randn(5, 3)]
    for x, name in zip(operands, "xwb", strict=True):
        x.requires_grad_(name in names)
    twins = [x.detach().clone().requires_grad_(x.requires_grad) for x in operands]
    output, expected = wrap_jax(mixture)(*operands), torch_mixture(*twins)
    torch.testing.assert_close(output, expected)
    cotangent = torch.randn(5, 3)
    output.backward(cotangent)
    expected.backward(cotangent)
    for x, twin in zip(operands, twins, strict=True):
        assert (x.grad is None) == (twin.grad is None)
        if twin.grad is not None:
            torch.testing.assert_close(x.grad, twin.grad)


def test_wrap_jax_passes_gradcheck():
    function = wrap_jax(lambda x, y: (jnp.sin(x) * y, jnp.sum(x * x)))
    with jax.enable_x64(True):
        assert torch.autograd.gradcheck(function, (randn(3, dtype=torch.float64), randn(3, dtype=torch.float64)))


def test_wrap_jax_complex_gradients_match_torch():
    z, w = randn(4, dtype=torch.complex64), randn(4, dtype=torch.complex64)
    twins = [x.detach().clone().requires_grad_() for x in (z, w)]
    output = wrap_jax(lambda z, w: z * z * w + jnp.conj(z))(z, w)
    expected = twins[0] * twins[0] * twins[1] + twins[0].conj()
    cotangent = torch.randn(4, dtype=torch.complex64)
    output.backward(cotangent)
    expected.backward(cotangent)
    torch.testing.assert_close([z.grad, w.grad], [x.grad for x in twins])


def test_wrap_jax_keeps_bfloat16():
    x = randn(8, dtype=torch.bfloat16)
    y = wrap_jax(lambda x: x * x)(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_wrap_jax_without_requires_grad_builds_no_graph():
    function = Counted(mixture)
    wrapped = wrap_jax(function)
    operands = [randn(5, 4), randn(4, 3), randn(5, 3)]
    with torch.no_grad():
        assert wrapped(*operands).grad_fn is None
    assert wrapped(*[x.detach() for x in operands]).grad_fn is None
    assert function.traces == 1


def test_inputs_without_grad_are_not_differentiated():
    @jax.custom_jvp
    def only_forward(x):
        return x * 2

    @only_forward.defjvp
    def _(primals, tangents):
        raise AssertionError("differentiated")

    x, y = randn(3), randn(3, grad=False)
    wrap_jax(lambda x, y: x * only_forward(y))(x, y).sum().backward()
    torch.testing.assert_close(x.grad, 2 * y)


def test_wrap_jax_returns_gradients_of_selected_inputs():
    x, y = randn(3), randn(3)
    output = wrap_jax(lambda x, y: x * y)(x, y)
    (gradient,) = torch.autograd.grad(output.sum(), y, retain_graph=True)
    torch.testing.assert_close(gradient, x.detach())
    gradients = torch.autograd.grad(output.sum(), (x, y))
    torch.testing.assert_close(gradients, (y.detach(), x.detach()))


# --- Structure


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_wrap_jax_accepts_and_returns_pytrees():
    def function(batch, *, weights, options):
        assert options is None
        return {"sum": batch["x"].left @ weights[0], "both": Pair(batch["x"].right * weights[1][None], batch["y"])}

    x, y, w, v = randn(2, 3), randn(2, 3), randn(3, 4), randn(3)
    result = wrap_jax(function)({"x": Pair(x, y), "y": x.detach()}, weights=[w, v], options=None)
    assert set(result) == {"sum", "both"} and isinstance(result["both"], Pair)
    torch.testing.assert_close(result["sum"], x @ w)
    torch.testing.assert_close(result["both"].left, y * v)
    (result["sum"].sum() + result["both"].left.sum()).backward()
    torch.testing.assert_close(v.grad, y.detach().sum(0))
    torch.testing.assert_close(w.grad, x.detach().sum(0)[:, None].expand(3, 4).contiguous())


def test_wrap_jax_integers_and_booleans_have_no_gradient():
    def function(x, index, mask):
        return jnp.where(mask, x[index], 0), jnp.argsort(x).astype(jnp.int32), mask

    x = randn(4)
    index, mask = torch.tensor([3, 0, 1], dtype=torch.int32), torch.tensor([True, False, True])
    picked, order, same = wrap_jax(function)(x, index, mask)
    assert picked.requires_grad and not order.requires_grad and not same.requires_grad
    assert same.dtype == torch.bool and order.dtype == torch.int32
    picked.sum().backward()
    assert x.grad.tolist() == [0, 1, 0, 1]


def test_wrap_jax_accepts_functions_without_arrays():
    assert wrap_jax(lambda: jnp.arange(3, dtype=jnp.int32))().tolist() == [0, 1, 2]
    assert wrap_jax(lambda x: None)(torch.ones(2)) is None
    assert wrap_jax(lambda x: ())(randn(2)) == ()


def test_wrap_jax_with_missing_cotangents_treats_them_as_zero():
    seen = []

    @jax.custom_vjp
    def watched(x):
        return x * 2

    watched.defvjp(lambda x: (x * 2, None), lambda _, g: (jax.debug.callback(lambda: seen.append("run")) or g * 2,))
    x = randn(3)
    first, second, third = wrap_jax(lambda x: (watched(x), x * 3, x * x))(x)
    second.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [3, 3, 3]
    (first.sum() + third.sum()).backward()
    torch.testing.assert_close(x.grad, 3 + 2 + 2 * x.detach())
    assert torch.autograd.grad(wrap_jax(lambda x: (x * 2, 1))(x)[0].sum(), x)[0].tolist() == [2, 2, 2]


def test_wrap_jax_with_only_none_cotangents_skips_the_backward_pass():
    seen = []

    class Source(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            seen.append(g)
            return g

    class Sink(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return None

    x = randn(3)
    Sink.apply(wrap_jax(jnp.sin)(Source.apply(x))).sum().backward()
    assert seen == [None] or (seen == [] and x.grad is None)


# --- Static arguments and compilation


def test_wrap_jax_compiles_once_per_static_value():
    function = Counted(lambda x, power, *, mode="plus", scale=1.0: (x**power + scale) if mode == "plus" else x * scale)
    wrapped = wrap_jax(function)
    x = torch.full((2,), 2.0)
    assert wrapped(x, 3).tolist() == [9, 9]
    assert wrapped(x, 3).tolist() == [9, 9]
    assert wrapped(x, 2, mode="times", scale=0.5).tolist() == [1, 1]
    assert wrapped(x, 2, scale=0.5).tolist() == [4.5, 4.5]
    assert function.traces == 3
    assert wrapped.cache_info() == (1, 3, 128, 3)


def test_wrap_jax_distinguishes_equal_static_values_of_different_types():
    wrapped = wrap_jax(lambda x, value: x + (1 if isinstance(value, bool) else 2 if isinstance(value, int) else 3))
    assert [wrapped(torch.zeros(1), value).item() for value in (True, 1, 1.0, True)] == [1, 2, 3, 1]
    sign = wrap_jax(lambda x, value: jnp.copysign(x, value))
    assert [sign(torch.ones(1), value).item() for value in (0.0, -0.0)] == [1, -1]
    nan = wrap_jax(lambda x, value: x + value)
    for _ in range(3):
        nan(torch.ones(1), float("nan"))
    assert nan.cache_info().misses == 1


def test_wrap_jax_static_argnames_are_static():
    seen = []

    def function(x, shape, *, axes):
        seen.append((shape, axes))
        return x.reshape(shape).sum(axes)

    wrapped = wrap_jax(function, static_argnames=("shape", "axes"))
    x = randn(6)
    assert wrapped(x, (2, 3), axes=(0,)).shape == (3,)
    wrapped(x, shape=(2, 3), axes=(0,)).sum().backward()
    assert seen[0] == ((2, 3), (0,))
    assert x.grad.tolist() == [1] * 6
    with pytest.raises(TypeError, match=r"hashable.*static_argnames"):
        wrapped(x, [2, 3], axes=(0,))
    with pytest.raises(ValueError, match="static_argnames='form' is not an argument"):
        wrap_jax(function, static_argnames="form")


def test_wrap_jax_of_an_unhashable_leaf_raises_type_error():
    with pytest.raises(TypeError, match="made of tensors, arrays and hashable values"):
        wrap_jax(lambda x, s: x)(torch.ones(1), {1, 2})


def test_compiled_once_per_shape_dtype_and_grad():
    function = Counted(lambda x: x * x)
    wrapped = wrap_jax(function)
    for _ in range(3):
        for shape in ((3,), (4,)):
            for grad in (False, True):
                x = randn(*shape, grad=grad)
                wrapped(x)
                wrapped(x.detach().half())
    assert function.traces == 6
    assert wrapped.cache_info().currsize == 6


def test_backward_is_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(jax, "jit", lambda fn, jit=jax.jit, **options: compiled.append(fn) or jit(fn, **options))
    wrapped = wrap_jax(lambda x: jnp.sin(x))
    x = randn(3)
    for _ in range(4):
        wrapped(x).sum().backward()
    assert len(compiled) == 2


def test_wrap_jax_cache_evicts_the_least_recently_used():
    function = Counted(lambda x: x + 1)
    wrapped = wrap_jax(function, max_compiled=2)
    for size in (1, 2, 1, 3, 1):
        wrapped(torch.ones(size))
    assert function.traces == 3
    wrapped(torch.ones(2))
    assert function.traces == 4
    assert wrapped.cache_info().currsize == 2
    wrapped.cache_clear()
    assert wrapped.cache_info() == (0, 0, 2, 0)
    with pytest.raises(ValueError, match="max_compiled=0"):
        wrap_jax(function, max_compiled=0)


# --- differentiable=


def test_wrap_jax_differentiable_selects_arguments():
    x, y = randn(3), randn(3)

    def function(x, y):
        return x * y

    assert not wrap_jax(function, differentiable=False)(x, y).requires_grad
    for chosen in ("y", 1, ("y",), [1]):
        for arguments, keywords in (((x, y), {}), ((x,), {"y": y})):
            x.grad = y.grad = None
            wrap_jax(function, differentiable=chosen)(*arguments, **keywords).sum().backward()
            assert x.grad is None
            torch.testing.assert_close(y.grad, x.detach())
    for wrong in ("z", 2, -1):
        with pytest.raises(ValueError, match=r"differentiable=.* is not an argument"):
            wrap_jax(function, differentiable=wrong)


def test_wrap_jax_differentiable_selects_variable_arguments():
    x, y, z = randn(3), randn(3), randn(3)
    wrap_jax(lambda first, *rest, last: first * rest[0] * last, differentiable=(1, "last"))(
        x, y, last=z
    ).sum().backward()
    assert x.grad is None and y.grad is not None and z.grad is not None


# --- Operands


def test_wrap_jax_accepts_arrays_beside_tensors():
    x, weights, bias = randn(3), jnp.arange(3.0), np.ones(3, np.float32)
    output = wrap_jax(lambda x, w, b: x * w * b)(x, weights, bias)
    bias[:] = 100
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(3.0))


def test_wrap_jax_accepts_strided_operands_and_cotangents():
    packed = randn(2, 8, 3, 4)
    query, key, value = packed.unbind(2)
    output = wrap_jax(lambda q, k, v: q * k + v)(query, key, value)
    torch.testing.assert_close(output, query * key + value)
    output.expand(5, 2, 8, 4).sum().backward()
    torch.testing.assert_close(packed.grad[:, :, 2], torch.full((2, 8, 4), 5.0))
    torch.testing.assert_close(packed.grad[:, :, 0], 5 * key.detach())


def test_wrap_jax_accepts_transposed_operands():
    x = randn(2, 3, 5)
    y = wrap_jax(lambda x: jnp.cumsum(x, axis=1))(x.transpose(1, 2))
    torch.testing.assert_close(y, x.transpose(1, 2).cumsum(1))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(5.0, 0, -1).expand(2, 3, 5).contiguous())


def test_wrap_jax_of_64_bit_operands_requires_x64():
    wrapped = wrap_jax(lambda x: x + 1)
    for wrong in (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="would narrow"):
            wrapped(wrong)
    with pytest.raises(ValueError, match="float64, which JAX would narrow"):
        wrap_jax(lambda x, y: x)(torch.ones(2), np.ones(2))
    with jax.enable_x64(True):
        assert wrapped(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.versions
@pytest.mark.parametrize("crossing", ["direct", "public"])
def test_wrap_jax_backward_outside_enable_x64_keeps_64_bits(crossing, monkeypatch):
    if crossing == "public":
        monkeypatch.setattr(jaxlib_launcher, "dlpack_shortcut", lambda platform: "hidden by a test")
    x = randn(3, dtype=torch.float64)
    with jax.enable_x64(True):
        # The other result has no cotangent, so the backward program creates 64-bit zeros.
        y, _ = wrap_jax(lambda x: (jnp.sin(x) * jnp.arange(3.0), x * x))(x)
    y.backward(torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(x.grad, x.detach().cos() * torch.arange(3))


def test_wrap_jax_of_unsupported_operands_raises():
    wrapped = wrap_jax(lambda x: x + 1)
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        wrapped(torch.eye(2).to_sparse())
    wrapped(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        wrapped(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="takes concrete arguments"):
        jax.jit(lambda x: wrapped(x))(jnp.ones(2))
    with pytest.raises(TypeError, match="returns an array of int4"):
        wrap_jax(lambda x: x.astype(jnp.int4))(torch.ones(2))


def test_wrap_jax_module_parameters_have_gradients():
    layer = torch.nn.Linear(3, 2)
    wrap_jax(lambda x, p: x @ p["weight"].T + p["bias"][None])(
        torch.ones(4, 3), dict(layer.named_parameters())
    ).sum().backward()
    assert layer.bias.grad.tolist() == [4, 4]
    assert layer.weight.grad.tolist() == [[4] * 3] * 2


# --- Aliases and in-place writes


def test_results_own_their_memory():
    constant = jnp.ones(3)
    x = torch.zeros(3)
    same, known = wrap_jax(lambda x: (x, constant))(x)
    first, second = wrap_jax(lambda x: ((y := x + 1), y))(x)
    every = [x, same, known, first, second]
    assert len({tensor.data_ptr() for tensor in every}) == len(every)
    known.fill_(9)
    assert constant.tolist() == [1, 1, 1]


def test_gradients_own_their_memory():
    x, y = randn(3), randn(3)
    cotangent = torch.ones(3)
    gradients = torch.autograd.grad(wrap_jax(lambda x, y: x + y)(x, y), (x, y), cotangent)
    assert len({tensor.data_ptr() for tensor in (*gradients, cotangent)}) == 3


# Dynamo reads the .grad of every tensor at a graph break, which makes torch warn.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_torch_compile_breaks_the_graph():
    wrapped = wrap_jax(lambda x: jnp.sin(x))
    compiled = torch.compile(lambda x: wrapped(x * 2) + 1, backend="eager")
    x = randn(3)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).cos())


def test_wrap_jax_supports_vmap_and_grad_and_raises_for_functionalize():
    x = torch.tensor([1.0, 2.0, 3.0])
    derivative = torch.vmap(torch.func.grad(wrap_jax(jnp.sin)))(x)
    torch.testing.assert_close(derivative, x.cos())
    with pytest.raises(TypeError, match=r"transform of torch\.func"):
        torch.func.functionalize(wrap_jax(jnp.sin))(x)


def test_wrap_jax_with_batched_cotangents_raises_not_implemented_error():
    x = torch.ones(3, requires_grad=True)
    output = wrap_jax(jnp.sin)(x)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(output, x, torch.ones(4, 3), is_grads_batched=True)


def test_error_of_the_function_reaches_the_caller():
    def function(x):
        raise KeyError("missing weight")

    wrapped = wrap_jax(function)
    for _ in range(2):
        with pytest.raises(KeyError, match="missing weight"):
            wrapped(randn(3))


def test_wrap_jax_keeps_the_name():
    assert wrap_jax(mixture).__name__ == "mixture"


def test_threads_share_the_programs():
    function = Counted(lambda x, w: jnp.tanh(x @ w))
    wrapped = wrap_jax(function)
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(4, 8, generator=generator, requires_grad=True)
            w = torch.randn(8, 8, generator=generator, requires_grad=True)
            got = torch.autograd.grad(wrapped(x, w).sum(), (x, w))
            expected = torch.autograd.grad(torch.tanh(x @ w).sum(), (x, w))
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True)):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert wrapped.cache_info().currsize == 1
    assert wrapped.cache_info().hits == 119


def test_wrap_jax_backward_runs_on_another_thread():
    x = randn(3)
    loss = wrap_jax(jnp.sin)(x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_wrap_jax_calls_do_not_leak_arrays():
    wrapped = wrap_jax(lambda x, y: jnp.sin(x) * y)
    x, y = randn(64), randn(64)

    def steps(times):
        for _ in range(times):
            wrapped(x, y).sum().backward()

    steps(50)
    gc.collect()
    before = len(jax.live_arrays())
    steps(500)
    gc.collect()
    assert len(jax.live_arrays()) <= before
