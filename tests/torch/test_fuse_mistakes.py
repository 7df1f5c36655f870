"""Errors for torch values inside functions that JAX traces name the value, its line and the remedy."""

import functools
import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag.torch  # noqa: E402
from blockdiag.interop import wrap_jax  # noqa: E402
from blockdiag.torch import explain, fuse  # noqa: E402

GAIN = torch.nn.Parameter(torch.ones(2, 1, 1))
GAINS = [torch.ones(2, 1, 1)]
BY_NAME = {"gain": torch.ones(2, 1, 1)}
OPTIONS = {"dtype": torch.float32}


class Layer(torch.nn.Module):
    """A module with a parameter and a submodule, which functions traced by JAX cannot use."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(2, 1, 1))
        self.norm = torch.nn.LayerNorm(20)
        self.factor = 2.0

    def by_parameter(self, scores):
        return scores * self.gain * self.factor

    def by_module(self, scores):
        return self.norm(scores)


LAYER = Layer()


def enclosed():
    bias = torch.zeros(20)

    def add(scores):
        return jnp.add(
            scores,
            bias,
        )

    return add


def of_helper(scores):
    return scaled(scores, GAIN)


def scaled(scores, factor):
    return scores * factor


# Each case holds an operation on scores [B, N, T, S], the name in the message and the remedy.
MISTAKES = {
    "a parameter": (lambda s: s * GAIN, "`GAIN`", r"torch parameter of shape \[2, 1, 1\].*make it an argument"),
    "a parameter first": (lambda s: GAIN * s, "`GAIN`", "make it an argument"),
    "a tensor in a list": (lambda s: s + GAINS[0], "`GAINS`", "holds a torch tensor.*make it an argument"),
    "a tensor in a dict": (lambda s: s + BY_NAME["gain"], "`BY_NAME`", "holds a torch tensor"),
    "a tensor of an enclosing function": (enclosed(), "`bias`", "make it an argument"),
    "a parameter of a module": (LAYER.by_parameter, "`self.gain`", "make it an argument"),
    "a tensor of a helper": (of_helper, "`factor`", "make it an argument"),
    "a tensor in jnp.where": (lambda s: jnp.where(GAINS[0] > 0, s, 0.0), "`GAINS`", "holds a torch tensor"),
    "a tensor in jax.lax": (lambda s: jax.lax.mul(s, GAIN), "`GAIN`", "torch parameter"),
    "a parameter as an array": (lambda s: s * jnp.asarray(GAIN), "`GAIN`", "torch parameter"),
    "a method of a tensor": (lambda s: s * GAIN.exp(), "`GAIN`", "torch parameter"),
    "an index": (lambda s: s[GAIN.flatten() > 0], "`GAIN`", "torch parameter"),
    "a function in C": (lambda s: torch.softmax(s, -1), "`torch.softmax`", "write it with jax.numpy, jax.nn or"),
    "a function in Python": (lambda s: torch.einsum("bnts->bnts", s), "`torch.einsum`", "write it with jax.numpy"),
    "a function of nn": (lambda s: torch.nn.functional.softmax(s, -1), "`torch.nn.functional.softmax`", "jax.nn"),
    "a new tensor": (lambda s: s + torch.ones(20), "`torch.ones`", "write it with jax.numpy"),
    "an array as a tensor": (lambda s: torch.as_tensor(s), "`torch.as_tensor`", "write it with jax.numpy"),
    "a module": (LAYER.by_module, "`self.norm`", "is a torch module.*make its parameters arguments"),
    "a torch operator": (
        lambda s: blockdiag.torch.key_convolution(s, s),
        "`blockdiag.torch.key_convolution`",
        "call blockdiag's function of the same name",
    ),
    "a dtype": (lambda s: s.astype(torch.float32), "`torch.float32`", "write jnp.float32"),
    "a dtype of jnp.zeros": (lambda s: s + jnp.zeros((), torch.bfloat16), "`torch.bfloat16`", "write jnp.bfloat16"),
    "a method of tensors": (lambda s: s.masked_fill(s > 0, 0.0), "`.masked_fill`", "JAX arrays do not have"),
    "cpu": (lambda s: s.cpu(), "`.cpu`", "JAX arrays do not have"),
    "numpy": (lambda s: s.numpy(), "`.numpy`", "JAX arrays do not have"),
    "dim": (lambda s: s.sum(dim=-1), "`dim=`", "write `axis=`"),
    "keepdim": (lambda s: jnp.max(s, axis=-1, keepdim=True), "`keepdim=`", "write `keepdims=`"),
    "a function of numpy": (lambda s: np.exp(s), r"`np.exp\(s\)`", "jax.numpy instead of numpy"),
}


def attention(change, query, key, value):
    scores = change(jnp.einsum("btnh,bsnh->bnts", query, key))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def operands():
    return torch.randn(3, 1, 20, 2, 8).unbind()


CALLS = {
    "fuse": fuse,
    "fuse, kernels": functools.partial(fuse, implementation="triton"),
    "fuse, as it stands": functools.partial(fuse, implementation="reference"),
    "explain": explain,
    "wrap_jax": wrap_jax,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_torch_inside_a_fused_function_raises_type_error_with_line_and_remedy(name):
    change, named, remedy = MISTAKES[name]
    with pytest.raises(TypeError, match=named + rf" \(.*test_fuse_mistakes\.py:\d+\) .*{remedy}") as caught:
        fuse(functools.partial(attention, change))(*operands())
    assert caught.value.__cause__ is not None
    place = str(caught.value).split("(", 1 if "np.exp" not in named else 2)[-1].split(")")[0]
    line = linecache.getline(__file__, int(place.rsplit(":", 1)[1]))
    assert named.strip("`.").replace("\\", "").split("=")[0] in line


@pytest.mark.parametrize("call", CALLS)
def test_every_call_into_jax_explains_torch_parameters(call):
    wrapped = CALLS[call](functools.partial(attention, MISTAKES["a parameter"][0]))
    with pytest.raises(TypeError, match=r"`GAIN` .* make it an argument of the function"):
        wrapped(*operands())


def fails(scores):
    options = OPTIONS, GAIN
    del options
    return scores.reshape(3, 5)


def refuses(scores):
    raise ValueError(f"no {GAIN.shape}")


def lacks(scores):
    return scores.no_such_attribute


def divides(scores):
    return scores * (LAYER.factor / 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (fails, TypeError, "cannot reshape array"),
        (refuses, ValueError, "no torch.Size"),
        (lacks, AttributeError, "no_such_attribute"),
        (divides, ZeroDivisionError, "division by zero"),
        (lambda s, t: s, TypeError, "missing 1 required positional argument"),
    ],
)
def test_unrelated_errors_are_not_changed(change, error, message):
    with pytest.raises(error, match=message):
        fuse(functools.partial(attention, change))(*operands())


def test_error_of_a_function_without_source_is_not_changed():
    names = {"GAIN": GAIN}
    exec("def change(scores): return scores * GAIN", names)
    with pytest.raises(TypeError, match="unsupported operand"):
        fuse(functools.partial(attention, names["change"]))(*operands())


def test_parameter_passed_as_an_argument_has_a_gradient():
    gain = torch.ones(1, 2, 1, 1, requires_grad=True)
    fused = fuse(lambda query, key, value, gain: attention(lambda s: s * gain, query, key, value))
    fused(*operands(), gain).square().sum().backward()
    assert gain.grad.abs().min() > 0
