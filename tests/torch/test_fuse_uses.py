"""Uses of `blockdiag.torch.fuse`: random keys, effects, decorated methods and `explain`."""

import contextlib
import importlib.util
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import explain, fuse  # noqa: E402
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
BOTH = pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=NEEDS_TRITON)])


def attention(query, key, value):
    """Compute attention of operands [T, H]."""
    return jax.nn.softmax(query @ key.mT / 4) @ value


def dropped(query, key, value, rng):
    weights = jax.nn.softmax(query @ key.mT / 4)
    return jnp.where(jax.random.bernoulli(rng, 0.5, weights.shape), 2 * weights, 0.0) @ value


def scaled(query, key, value, scale):
    return attention(query * scale, key, value)


def tensors(grad: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, 16, generator=generator).requires_grad_(grad) for _ in range(3)]


@BOTH
def test_dropout_keys_repeat_and_match_jax(implementation):
    fused = fuse(dropped, implementation=implementation)
    operands = tensors(grad=True)
    first, again, other = (fused(*operands, jax.random.key(seed)) for seed in (0, 0, 1))
    assert_same_bits([again.detach()], [first.detach()])
    assert not torch.equal(other, first)
    first.sum().backward()
    arrays = [jnp.asarray(to_numpy(x)) for x in operands]
    expected = blockdiag.fuse(dropped)(*arrays, jax.random.key(0))
    torch.testing.assert_close(first.detach(), to_tensor(expected), rtol=1e-5, atol=1e-5)
    assert all(x.grad.isfinite().all() for x in operands)


@BOTH
def test_keys_of_several_implementations_are_accepted(implementation):
    fused = fuse(lambda q, k, v, keys: dropped(q, k, v, keys["rngs"][1]), implementation=implementation)
    keys = [jax.random.split(jax.random.key(3, impl=kind), 2) for kind in ("threefry2x32", "rbg")]
    found = [fused(*tensors(), {"rngs": x}) for x in keys]
    assert found[0].shape == (20, 16) and not torch.equal(*found)


def dropped_twice(x, rng):
    first, second = jax.random.split(rng)
    return dropped(*[jnp.tanh(dropped(x, x, x, first))] * 3, second)


def dropped_again(x, rng):
    again = jax.checkpoint(lambda x, rng: dropped(x, x, x, rng))
    return again(again(x, rng), jax.random.fold_in(rng, 1))


def dropped_in_steps(x, rng):
    return jax.lax.scan(lambda x, rng: (dropped(x, x, x, rng), rng), x, jax.random.split(rng, 3))[0]


def dropped_by_a_carried_key(x, rng):
    def step(carry, _):
        x, rng = carry
        rng, own = jax.random.split(rng)
        return (dropped(x, x, x, own), rng), None

    return jax.lax.scan(jax.checkpoint(step), (x, rng), None, length=3)[0][0]


def dropped_in_a_branch(x, rng):
    return jax.lax.cond(x[0, 0] < 9, lambda: dropped(x, x, x, rng), lambda: x)


def dropped_by_a_constant_key(x, rng):
    del rng
    return jax.lax.scan(lambda x, rng: (dropped(x, x, x, rng), None), x, jax.random.split(jax.random.key(5), 2))[0]


@BOTH
@pytest.mark.parametrize(
    "function",
    [
        dropped_twice,
        dropped_again,
        dropped_in_steps,
        dropped_by_a_carried_key,
        dropped_in_a_branch,
        dropped_by_a_constant_key,
    ],
)
def test_dropout_inside_nested_programs_matches_jax(function, implementation):
    x = tensors(grad=True)[0]
    output = fuse(function, implementation=implementation)(x, jax.random.key(0))
    (gradient,) = torch.autograd.grad(output.sum(), x)
    fused = blockdiag.fuse(lambda x: function(x, jax.random.key(0)))
    expected, pull = jax.vjp(fused, jnp.asarray(to_numpy(x)))
    torch.testing.assert_close(output.detach(), to_tensor(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, to_tensor(*pull(jnp.ones_like(expected))), rtol=1e-3, atol=1e-3)


@BOTH
def test_returned_key_raises_type_error(implementation):
    with pytest.raises(TypeError, match=r"returns a random key, which torch does not support; return"):
        fuse(lambda *x: (attention(*x), jax.random.key(0)), implementation=implementation)(*tensors())


@BOTH
def test_numpy_scalars_are_operands_without_retracing(implementation):
    """A new value of a scalar must not retrace the function, and 64-bit values must not be narrowed silently."""
    traces = []
    fused = fuse(lambda *x: (traces.append(1), scaled(*x))[1], implementation=implementation)
    found = [fused(*tensors(), np.float32(scale)) for scale in (2, 3)]
    assert len(traces) == 1
    assert_same_bits(found[1:], [fused(*tensors(), torch.tensor(3.0))])
    assert not torch.equal(*found)
    for wide in (np.float64(2), np.full(16, 2.0)):
        with pytest.raises(ValueError, match="numpy array of float64, which JAX would narrow"):
            fused(*tensors(), wide)


def printing(query, key, value):
    output = attention(query, key, value)
    jax.debug.print("largest {:.0f}", jnp.float32(7) + 0 * output[0, 0])
    return output


def writing(query, key, value):
    reference = jax.new_ref(query)
    reference[...] = reference[...] * 2
    return attention(reference[...], key, value)


def writing_the_result(query, key, value):
    reference = jax.new_ref(jnp.zeros_like(query))
    reference[...] = attention(query, key, value)
    return reference[...]


def printing_in_a_loop(query, key, value):
    return jax.lax.scan(lambda x, _: (printing(x, key, value), None), query, None, length=1)[0]


EFFECTS = {"debug_print": printing, "new_ref": writing, "ref": writing_the_result, "scan": printing_in_a_loop}


@NEEDS_TRITON
@pytest.mark.parametrize("name", EFFECTS)
def test_effects_raise_not_implemented_error_in_kernels_and_run_through_jax(name):
    """A function with effects runs entirely in JAX, and is refused where JAX may not compute the call."""
    function = EFFECTS[name]
    with pytest.raises(NotImplementedError, match=rf"`\w*{name}.*test_fuse_uses.py.*via=\"jax\""):
        fuse(function, implementation="triton")(*tensors())
    arrays = [jnp.asarray(to_numpy(x)) for x in tensors()]
    expected = attention(2 * arrays[0] if name == "new_ref" else arrays[0], *arrays[1:])
    ways: list[dict[str, Any]] = [{"implementation": ("triton", "xla")}, {"implementation": "triton", "via": "jax"}]
    for way in ways:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found = fuse(function, **way)(*tensors())
            jax.effects_barrier()
        assert ("largest 7" in printed.getvalue()) == ("ref" not in name)
        torch.testing.assert_close(found, to_tensor(expected), rtol=1e-5, atol=1e-5)


class Scaled(torch.nn.Module):
    """A module whose `forward` passes its parameter to a fused function, while `decorated` closes over it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.attend = fuse(scaled)

    def forward(self, query, key, value):
        return self.attend(query, key, value, self.scale)

    @fuse
    def decorated(self, query, key, value):
        return scaled(query, key, value, self.scale)


def test_closed_over_parameters_raise_type_error():
    module = Scaled()
    module(*tensors()).sum().backward()
    assert module.scale.grad is not None
    with pytest.raises(TypeError, match=r"`scale` .* is a torch parameter .* make it an argument"):
        module.decorated(*tensors())


def test_unrelated_type_errors_are_not_changed():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fuse(attention)(*tensors()[:2])


@BOTH
def test_fuse_of_a_jax_fused_function_matches_it(implementation):
    fused = fuse(attention, implementation="xla")
    again = fuse(fused, implementation=implementation)
    torch.testing.assert_close(again(*tensors()), fused(*tensors()))
    arrays = [jnp.asarray(to_numpy(x)) for x in tensors()]
    assert len(blockdiag.explain(fused)(*arrays).regions) == 1
    found = to_tensor(blockdiag.fuse(fused)(*arrays))
    torch.testing.assert_close(found, fused(*tensors()))


def test_explain_of_tensors_matches_explain_of_arrays():
    def masked(query, key, value, segments):
        scores = jnp.where(segments[:, None] == segments[None, :], query @ key.mT, -jnp.inf)
        return jax.nn.softmax(scores) @ value

    operands = [torch.randn(256, 3, 64, requires_grad=True)[:, i] for i in range(3)]
    segments = torch.arange(256, dtype=torch.int32) // 64
    arrays = [jnp.asarray(to_numpy(x)) for x in (*operands, segments)]
    for function in (masked, fuse(masked)):
        (region,) = explain(function)(*operands, segments).regions
        (expected,) = blockdiag.explain(masked)(*arrays).regions
        assert region.picture == expected.picture and region.skipped > 0.5
        (described,) = explain(function)(*(x.to("meta") for x in (*operands, segments))).regions
        assert described.live is None and described.sizes == region.sizes
    assert explain(jnp.sin)(segments.float()).reason


@BOTH
def test_second_derivatives_raise_not_implemented_error(implementation):
    operands = tensors(grad=True)
    output = fuse(attention, implementation=implementation)(*operands)
    (gradient, *_) = torch.autograd.grad(output.square().sum(), operands, create_graph=True)
    with pytest.raises(NotImplementedError, match="derivatives"):
        gradient.sum().backward()
