"""torch's private names are used where the installed torch has them, and are never required."""

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from torch.autograd import forward_ad

from blockdiag.interop import dlpack, private_torch, wrap_jax, wrap_torch
from blockdiag.torch.arguments import is_plain

pytestmark = pytest.mark.versions

SOURCE = Path(private_torch.__file__).parents[1]


class Stripped:
    """A module with some of its names missing or replaced."""

    def __init__(self, module, *missing, **replaced):
        self._module, self._missing = module, missing
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(name)
        return getattr(self._module, name)


def forget() -> None:
    for probe in (
        private_torch._flag,
        private_torch._observer_flags,
        private_torch._stream_reader,
        private_torch._fake_tensors,
    ):
        probe.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """Yield a function that replaces `torch` in `private_torch` and clears its cached probes."""

    def replace(other) -> None:
        monkeypatch.setattr(private_torch, "torch", other)
        forget()

    yield replace
    monkeypatch.undo()
    forget()


FLAGS = ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_is_tracing")


def without_flags():
    return Stripped(torch, "_is_functional_tensor", _C=Stripped(torch._C, *FLAGS))


def with_other_flags():
    """Return a torch whose functions in `FLAGS` need an argument."""
    return Stripped(torch, _C=Stripped(torch._C, **dict.fromkeys(FLAGS, lambda thread: False)))


def features() -> dict[str, bool]:
    return {feature.name.removeprefix("torch: "): feature.is_fast for feature in private_torch.describe_features()}


def test_private_torch_features_are_fast_in_the_installed_torch():
    expected = {"observers of a call", "transforms and forward-mode levels", "functional tensors"}
    assert expected | {"tensors without data"} <= features().keys()
    assert all(features().values()), private_torch.describe_features()


@pytest.mark.parametrize("make", [without_flags, with_other_flags])
def test_private_torch_without_flags_sends_calls_through_the_dispatcher(make, install):
    x = SimpleNamespace(is_cuda=True)
    assert not private_torch.may_be_observed() and private_torch.can_tell_transforms()
    install(make())
    assert private_torch.may_be_observed() and not private_torch.can_tell_transforms()
    assert not is_plain(x)
    assert not features()["observers of a call"] and not features()["transforms and forward-mode levels"]
    assert "every call goes through the dispatcher" in private_torch.describe_features()[0].detail


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(torch.ones(2, 3)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(3)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_wrap_jax_without_flags_raises_type_error_under_transforms(transform, install):
    wrapped = wrap_jax(jnp.sin)
    transform_free = wrapped(torch.ones(3))
    install(without_flags())
    with pytest.raises(TypeError, match=r"transform of torch\.func"):
        transform(wrapped)
    assert torch.equal(wrapped(torch.ones(3)), transform_free)


def test_wrap_jax_without_flags_still_has_gradients(install):
    install(without_flags())
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    wrap_jax(lambda x: jnp.sum(x * x))(x).backward()
    assert x.grad.tolist() == [2, 4]
    assert dlpack.to_jax(torch.empty(0, 3)).shape == (0, 3)


def test_wrap_jax_without_the_forward_mode_level_raises_type_error_for_tangents(monkeypatch):
    monkeypatch.setattr(private_torch, "forward_ad", Stripped(forward_ad, "_current_level"))
    wrapped = wrap_jax(jnp.sin)
    wrapped(torch.ones(3))
    assert private_torch.may_have_tangents()
    with forward_ad.dual_level(), pytest.raises(TypeError, match="has a tangent"):
        wrapped(forward_ad.make_dual(torch.ones(3), torch.ones(3)))
    assert not features()["transforms and forward-mode levels"]


def test_wrap_torch_without_fake_tensors_finds_shapes_on_zeros(install, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", types.ModuleType("fake_tensor"))
    install(torch)
    layer = torch.nn.Linear(4, 5)
    assert wrap_torch(layer)(jnp.ones((3, 4))).shape == (3, 5)
    assert not features()["tensors without data"]
    # The function selects every element of the zeros that determine its shape, but none of the ones.
    with pytest.raises(Exception, match=r"expected float32\[3\]; correct result="):
        wrap_torch(lambda x: x[x <= 0])(jnp.ones(3)).block_until_ready()


def cuda_with(read) -> SimpleNamespace:
    """Return a stand-in for torch whose current stream of device 1 has the handle 70."""
    cuda = SimpleNamespace(current_stream=lambda index: SimpleNamespace(cuda_stream=70 if index == 1 else 0))
    return SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=read), cuda=cuda)


@pytest.mark.parametrize(
    ("read", "is_fast"),
    [
        (lambda index: 70 if index == 1 else 0, True),
        (lambda index: 71, False),
        (lambda: 70, False),
        (None, False),
    ],
    ids=["known", "another meaning", "other arguments", "missing"],
)
def test_current_stream_handle_is_the_public_one_whatever_torch_has(read, is_fast, install):
    install(cuda_with(read))
    assert private_torch.current_stream_handle(1) == 70
    assert (private_torch._stream_reader(1) is not None) == is_fast


def test_set_compiler_option_sets_it_or_raises_not_implemented_error():
    import torch._functorch.config as config

    before = config.donated_buffer
    private_torch.set_compiler_option("functorch", "donated_buffer", not before)
    assert config.donated_buffer is not before
    private_torch.set_compiler_option("functorch", "donated_buffer", before)
    for part, name in (("functorch", "no_such_option"), ("no_such_part", "donated_buffer")):
        with pytest.raises(NotImplementedError, match=rf"no option torch\._{part}\.config\.{name}"):
            private_torch.set_compiler_option(part, name, True)


PRIVATE = re.compile(
    r"(?<!blockdiag\.)\btorch\._|_current_level|\._subclasses|_op_schema|_op_dispatcher|_dtensor_spec|"
    r"jax\._src|jaxlib\._jax|jaxlib\.gpu_triton|jaxlib import"
)


def test_private_names_of_torch_and_jax_are_in_their_own_modules():
    homes = {SOURCE / "interop" / name for name in ("private_torch.py", "jaxlib_launcher.py")}
    assert all(PRIVATE.search(home.read_text()) for home in homes)
    found = {
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path not in homes
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    }
    assert not found
