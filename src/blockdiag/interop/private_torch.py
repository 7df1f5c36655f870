"""The one module that uses private names of torch, which may change in any version.

Each name is probed at its first use. If the installed torch does not have it in the known form, a slower path with the
same results is used, and `describe_features` reports it. This module does not import JAX.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from blockdiag.common.features import Feature

# --- Transforms and observers


@functools.cache
def _flag(name: str) -> Callable[[], int] | None:
    """Return the function `name` of `torch._C`, which takes no arguments and returns an int, or None if unknown."""
    ask = getattr(torch._C, name, None)
    if not callable(ask):
        return None
    try:
        answer = ask()
    except TypeError:  # it takes arguments in this version
        return None
    return ask if isinstance(answer, int) else None


_OBSERVERS = ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_is_tracing")


@functools.cache
def _observer_flags() -> tuple[Callable[[], int], ...] | None:
    flags = tuple(flag for name in _OBSERVERS if (flag := _flag(name)) is not None)
    return flags if len(flags) == len(_OBSERVERS) else None


def may_be_observed() -> bool:
    """Return True if a dispatch mode, a torch.func transform or a trace may observe the current call.

    If torch cannot be queried, this is True: the call then goes through torch's dispatcher, which is always correct.
    """
    flags = _observer_flags()
    if flags is None:
        return True
    for is_active in flags:  # noqa: SIM110, this runs with every call and `any` of a generator takes longer
        if is_active():
            return True
    return False


def may_have_tangents() -> bool:
    """Return True if a level of forward-mode derivatives may be active.

    If torch cannot be queried, this is True: callers then test each operand with `forward_ad.unpack_dual`.
    """
    level = getattr(forward_ad, "_current_level", None)
    return not isinstance(level, int) or level >= 0


def can_tell_transforms() -> bool:
    """Return True if torch can be queried for active torch.func transforms; if not, callers test each operand."""
    return _flag("_are_functorch_transforms_active") is not None


def is_transformed() -> bool:
    """Return True if a torch.func transform is active, False if none is or if torch cannot be queried."""
    is_active = _flag("_are_functorch_transforms_active")
    return is_active is not None and bool(is_active())


def is_functional(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a wrapper of torch.func.functionalize, which has no memory of its own."""
    ask = getattr(torch, "_is_functional_tensor", None)
    if ask is not None:
        return ask(tensor)
    # Wrappers report a data pointer of 0. Ordinary tensors do so only if they have no elements.
    return tensor.numel() > 0 and tensor.data_ptr() == 0


# --- CUDA streams


@functools.cache
def _stream_reader(device_index: int) -> Callable[[int], int] | None:
    """Return the private reader of the current stream's handle if it agrees with the public API, else None."""
    read = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if not callable(read):
        return None
    handle = torch.cuda.current_stream(device_index).cuda_stream
    try:
        return read if read(device_index) == handle else None
    except TypeError:  # it takes other arguments in this version
        return None


def current_stream_handle(device_index: int) -> int:
    """Return the handle of torch's current stream of a CUDA device.

    The public API creates a stream object for it, which is slower.
    """
    read = _stream_reader(device_index)
    return torch.cuda.current_stream(device_index).cuda_stream if read is None else read(device_index)


# --- Runs without data


class DataDependentShape(Exception):
    """The shape of a result depends on the values of the arguments."""


@functools.cache
def _fake_tensors() -> tuple[Callable[..., Any], tuple[type[Exception], ...]] | None:
    """Return FakeTensorMode and the errors that it raises for data-dependent results, or None if unknown."""
    try:
        module = importlib.import_module("torch._subclasses.fake_tensor")
        module.FakeTensorMode(allow_non_fake_inputs=True)
        return module.FakeTensorMode, (module.DataDependentOutputException, module.DynamicOutputShapeException)
    except (ImportError, AttributeError, TypeError):
        return None


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Run torch on fake tensors, which have shapes and dtypes only. Outside tensors such as parameters may be used.

    If torch's fake tensors are unknown, the code runs on ordinary tensors, which it should create with `torch.zeros`.
    Data-dependent shapes are then those that zeros produce.

    Raises:
        DataDependentShape: if fake tensors are known and the shape of a result depends on values.
    """
    found = _fake_tensors()
    if found is None:
        yield
        return
    mode, errors = found
    try:
        with mode(allow_non_fake_inputs=True):
            yield
    except errors as error:
        raise DataDependentShape(str(error)) from error


# --- Options of torch's compiler, for benchmarks


def set_compiler_option(part: str, name: str, value: Any) -> None:
    """Set an option of a component of torch's compiler, in this process.

    Args:
        part: "functorch" or "inductor".
        name: name of the option, such as "donated_buffer".
        value: new value of the option.

    Raises:
        NotImplementedError: when the installed torch does not have the option.
    """
    try:
        config = importlib.import_module(f"torch._{part}.config")
    except ImportError:
        config = None
    if not hasattr(config, name):
        raise NotImplementedError(
            f"torch {torch.__version__} has no option torch._{part}.config.{name}; run the benchmark with a torch that "
            "constraints.txt names"
        )
    setattr(config, name, value)


# --- Report for doctor


def describe_features() -> tuple[Feature, ...]:
    """Describe the private features of the installed torch that the package uses. This initialises no device."""
    is_level_known = isinstance(getattr(forward_ad, "_current_level", None), int)
    features = [
        _feature(
            "observers of a call",
            _observer_flags() is not None,
            "calls on plain CUDA tensors are launched without the dispatcher",
            "every call goes through the dispatcher",
        ),
        _feature(
            "transforms and forward-mode levels",
            _flag("_are_functorch_transforms_active") is not None and is_level_known,
            "queried once in each call",
            "every operand of each call is checked",
        ),
        _feature(
            "functional tensors",
            hasattr(torch, "_is_functional_tensor"),
            "queried from the tensor",
            "inferred from the tensor's data pointer",
        ),
        _feature(
            "tensors without data",
            _fake_tensors() is not None,
            "wrap_torch infers shapes without a computation",
            "wrap_torch infers shapes by a run on zeros",
        ),
    ]
    # Builds without CUDA have no streams.
    if torch.version.cuda is not None:
        features.append(
            _feature(
                "current CUDA stream",
                callable(getattr(torch._C, "_cuda_getCurrentRawStream", None)),
                "read as a number",
                "read as an object",
            )
        )
    return tuple(features)


def _feature(name: str, is_fast: bool, fast: str, slow: str) -> Feature:
    missing = f"torch {torch.__version__} does not have it in the known form: "
    return Feature(f"torch: {name}", is_fast, fast if is_fast else missing + slow)
