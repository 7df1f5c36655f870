"""Calls of a fused function from torch: choice of the implementation, and a cache of programs by kind of call."""

import collections
import functools
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from blockdiag.common.dispatch import normalise_implementation
from blockdiag.fusion.api import fuse, is_fused
from blockdiag.fusion.frontend.trace import has_effects
from blockdiag.fusion.ir.structural_hash import shared
from blockdiag.fusion.ir.tree import FUSE, NotFusible, Region
from blockdiag.fusion.program import Program, trace
from blockdiag.fusion.regions.axis_labels import place_of
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.fusion.runtime.region_op import Call, attend_with_carriers, gradients_of, results_of
from blockdiag.interop import private_torch
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop._torch_mistakes import explaining
from blockdiag.interop._torch_transforms import call_under_transforms
from blockdiag.interop._wrapped_program import check_operand
from blockdiag.interop.dlpack import DTYPES, PLAIN_TYPES, check_tensor, to_jax, to_torch
from blockdiag.interop.torch_launch import bound_launch, on_device
from blockdiag.interop.wrap import static_key, wrap_jax
from blockdiag.torch.arguments import check_via
from blockdiag.torch.context.parallel import ContextParallel
from blockdiag.torch.fusion.context import LocalRegion, SharedProgram
from blockdiag.torch.fusion.context_call import check_shared_call, compare_parts, shared_axes, whole_type
from blockdiag.torch.fusion.program import TorchProgram
from blockdiag.torch.fusion.random_keys import data_of
from blockdiag.torch.fusion.region import Bind, Tensors, mark, mark_gradients
from blockdiag.torch.fusion.ring import Passes, RingRegion
from blockdiag.triton_kernels.launch.plan import KernelSpec

# Number of programs that are cached; the least recently used one is dropped first.
_REMEMBERED_PROGRAMS = 128


class FusedFunction:
    """The implementation of a function returned by `blockdiag.torch.fuse`; see there.

    Attributes:
        fallbacks: reasons for which calls were not fusible and ran unfused.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        implementation: str | Sequence[str] | None,
        fallback: bool,
        via: str | None,
        context: ContextParallel | None,
        token_axes: Any,
        deterministic: bool = True,
    ) -> None:
        check_via(via)
        if context is not None:
            check_shared_call(context, token_axes, implementation, fallback)
        elif token_axes is not None:
            raise ValueError("`token_axes` is for `context_parallel`, which is None; pass both, or leave both out")
        self._context = None if context is None or context.size == 1 else context
        self._token_axes = token_axes
        function = explaining(plain(function))
        self._function = function
        self._fallback = fallback
        self._deterministic = deterministic
        self._names: tuple[str, ...] | None = None
        if implementation != "reference":
            self._names = normalise_implementation(implementation, FUSE)
        # The first name of a sequence that can compute the call wins, so native kernels run only if they come first.
        self._may_be_native = via is None and implementation != "reference"
        in_jax = fuse(function, implementation=implementation, fallback=fallback, deterministic=deterministic)
        self.fallbacks: list[str] = getattr(in_jax, "fallbacks", [])
        self._through_jax = wrap_jax(in_jax, max_compiled=_REMEMBERED_PROGRAMS)
        # Programs by kind of call; None where JAX computes the call.
        self._programs: collections.OrderedDict[Any, TorchProgram | None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if private_torch.is_transformed():
            if self._context is not None:
                raise ValueError(
                    "`context_parallel` is not available under transforms of torch.func, whose gradients compute the "
                    "function again; use torch.autograd, and give the function a batch axis"
                )
            return call_under_transforms(self, args, kwargs)
        # JAX traces the function, evaluates its constants, and compiles.
        with same_device():
            return self._computed(args, kwargs)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        device = _device_of(leaves)
        axes: list[int | None] = [None] * len(leaves)
        if self._context is not None:
            axes = shared_axes(self._context, self._token_axes, args, kwargs)
            compare_parts(self._context, axes, args, kwargs, device)
        elif device is None or not self._is_native(device):
            return self._through_jax(*args, **kwargs)
        assert device is not None
        operands = list(filter(_is_operand, leaves))
        _check_operands(operands)
        has_gradient = torch.is_grad_enabled() and any(
            [isinstance(x, torch.Tensor) and x.requires_grad for x in operands]
        )
        signature = [(tuple(x.shape), x.dtype) if _is_operand(x) else static_key(x) for x in leaves]
        key = (structure, tuple(signature), device, has_gradient, jax.config.jax_enable_x64)
        program = self._program(key, leaves, axes, structure, device, has_gradient)
        if program is None:
            return self._through_jax(*args, **kwargs)
        with on_device(device):
            return program([x if isinstance(x, torch.Tensor) else _as_tensor(x, device) for x in operands])

    def cache_clear(self) -> None:
        """Drop all programs."""
        with self._lock:
            self._programs.clear()
            self._through_jax.cache_clear()  # pyrefly: ignore[missing-attribute]

    def _is_native(self, device: torch.device) -> bool:
        """Return whether the kernels come first among the implementations."""
        if not self._may_be_native:
            return False
        return device.type == "cuda" if self._names is None else self._names[0] == "triton"

    def _program(
        self,
        key: Any,
        leaves: list[Any],
        axes: list[int | None],
        structure: Any,
        device: torch.device,
        has_gradient: bool,
    ) -> TorchProgram | None:
        with self._lock:
            try:
                is_known = key in self._programs
            except TypeError as error:
                raise TypeError(
                    f"every argument must be made of tensors, arrays and hashable values ({error}); turn lists of "
                    "numbers into tensors"
                ) from error
            if is_known:
                self._programs.move_to_end(key)
                return self._programs[key]
            _refuse_capture(device)
            with on_device(device):
                program = self._programs[key] = self._new_program(leaves, axes, structure, device, has_gradient)
            if len(self._programs) > _REMEMBERED_PROGRAMS:
                self._programs.popitem(last=False)
            return program

    def _new_program(
        self,
        leaves: list[Any],
        axes: list[int | None],
        structure: Any,
        device: torch.device,
        has_gradient: bool,
    ) -> TorchProgram | None:
        """Return the program of a call; None if JAX computes it.

        Args:
            axes: for each leaf, the axis of which it is a part, with context parallelism.

        Raises:
            NotFusible: the function has no attention, or one that breaks a rule.
            NotImplementedError: only the kernels are allowed, and they cannot compute it.
        """
        for x in filter(_is_operand, leaves):
            check_operand(x)
        own = list(map(_described, leaves))
        count = 1 if self._context is None else self._context.size
        whole = [x if axis is None else whole_type(x, axis, count) for x, axis in zip(own, axes, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, whole)
        try:
            program = trace(self._function, args, kwargs, deterministic=self._deterministic)
        except NotFusible:
            if self._fallback:
                return None
            raise
        if self._context is not None:
            launch = functools.partial(self._launch_region, device, has_gradient)
            arguments = [x for x in own if isinstance(x, jax.ShapeDtypeStruct)]
            shared_program = SharedProgram(program, self._context, arguments, launch)
            return TorchProgram(shared_program, device, _binding(device), has_gradient=has_gradient)
        reason = _why_not(program)
        if reason is None:
            return TorchProgram(program, device, _binding(device), has_gradient=has_gradient)
        self._refuse_jax(reason)
        return None

    def _launch_region(
        self, device: torch.device, has_gradient: bool, local: LocalRegion | RingRegion
    ) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """Return a function that computes one process's region, by kernels if they come first, else by JAX."""
        if isinstance(local, RingRegion):
            make = functools.partial(TorchProgram, device=device, bind=_binding(device), has_gradient=False)
            return local.bound(self._passes(device, local), make)
        if self._is_native(device):
            reason = _why_no_kernels([local.region])
            if reason is None:
                return TorchProgram(local, device, _binding(device), has_gradient=has_gradient)
            self._refuse_jax(reason)

        def attend_to(
            region: Region, has_log_sum: bool, leaves: Sequence[Any], value: Any, carriers: Mapping[int, Any]
        ) -> tuple[Any, Any]:
            return attend_with_carriers(Call(region, self._names, has_log_sum), leaves, value, carriers)

        in_jax = wrap_jax(lambda *arrays: local.evaluate(arrays, attend_to))
        return lambda tensors: in_jax(*tensors)

    def _passes(self, device: torch.device, ring: RingRegion) -> Passes:
        """Return the passes of a ring over one part of keys, by kernels or by JAX."""
        if self._is_native(device):
            reason = _why_no_kernels([ring.piece])
            if reason is None:
                return Passes(
                    lambda region: lambda *x: mark(region, x[:-1], x[-1], has_gradient=False, has_log_sum=True),
                    lambda region: lambda *x: mark_gradients(region, x[: len(region.leaves)], *x[len(region.leaves) :]),
                )
            self._refuse_jax(reason)
        return Passes(
            functools.partial(results_of, implementations=self._names),
            functools.partial(gradients_of, implementations=self._names),
        )

    def _refuse_jax(self, reason: str) -> None:
        """Check that JAX may compute a call that the kernels cannot.

        Raises:
            NotImplementedError: only the kernels are allowed.
        """
        if self._names == ("triton",):
            raise NotImplementedError(f"implementation='triton' cannot compute this call: {reason}")


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the unfused function if it is fused already, so that its implementation is chosen again."""
    return function.__wrapped__ if is_fused(function) else function  # pyrefly: ignore[missing-attribute]


def as_array(leaf: Any) -> Any:
    """Return an array that shares a tensor's memory, or its shape and dtype on the meta device; others unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_meta:
        return _described(leaf)
    return to_jax(leaf.detach(), copy=True)


def whole_types(context: ContextParallel, token_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return (args, kwargs) with shapes and dtypes of whole arrays in place of the process's parts."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    axes = shared_axes(context, token_axes, args, kwargs)
    own = map(_described, leaves)
    found = [x if axis is None else whole_type(x, axis, context.size) for x, axis in zip(own, axes, strict=True)]
    return jax.tree.unflatten(structure, found)


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | jax.Array | np.ndarray | np.generic)


def _device_of(leaves: Sequence[Any]) -> torch.device | None:
    """Return the device of all tensors, None without tensors."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    for x in tensors:
        # Reading the shape of a nested tensor raises an error that asks users to report a bug to torch.
        if x.is_nested:
            check_tensor(x)
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise ValueError(f"all tensors must be on one device, got some on {names}; move them")
    return next(iter(devices), None)


def _check_operands(operands: Sequence[Any]) -> None:
    """Check properties that signatures do not cover: tensors have memory, and nothing but autograd tracks them."""
    is_followed = private_torch.may_have_tangents() or not private_torch.can_tell_transforms()
    for x in operands:
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                "a fused function of torch takes concrete arguments, got a traced JAX array; inside of JAX's "
                "transformations call blockdiag.fuse of the function"
            )
        if isinstance(x, torch.Tensor) and (is_followed or type(x) not in PLAIN_TYPES):
            check_tensor(x)


def _described(leaf: Any) -> Any:
    """Return the abstract value of an array for tracing, and other leaves unchanged."""
    if not _is_operand(leaf):
        return leaf
    dtype = DTYPES[leaf.dtype] if isinstance(leaf, torch.Tensor) else jnp.asarray(leaf).dtype
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _as_tensor(array: Any, device: torch.device) -> torch.Tensor:
    return to_torch(data_of(jnp.asarray(array))).to(device)


def _why_not(program: Program) -> str | None:
    """Return why torch and the kernels cannot compute a program; None if they can."""
    effect = next(filter(has_effects, program.jaxpr.jaxpr.eqns), None)
    if effect is not None:
        # Torch runs the program in parts and reads only results: writes would be lost, prints would be out of order.
        return (
            f"`{effect.primitive.name}` {place_of(effect)} has side effects, which need a single JAX program; pass "
            'via="jax"'
        )
    return _why_no_kernels([shared(region) for inner in program.programs() for region in inner.all_regions()])


def _why_no_kernels(regions: Sequence[Region]) -> str | None:
    """Return why the kernels cannot compute regions; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'blockdiag-attn[cuda]' (Linux only)"
    return next((reason for region in regions if (reason := triton_fused.supports(region)) is not None), None)


def _binding(device: torch.device) -> Bind:
    """Return the function that binds launches to a device."""
    return _interpreted if device.type == "cpu" else functools.partial(_bound, device)


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "kernels cannot be made while a CUDA graph is being captured; run the same call once before, and its "
            "backward pass where that is captured too"
        )


def _bound(device: torch.device, spec: KernelSpec) -> Callable[[Tensors], Tensors]:
    """Bind a launch to a CUDA device, which must be the current one."""
    _refuse_capture(device)
    assert device.index is not None
    with on_device(device):
        return bound_launch(spec, device.index)


def _interpreted(spec: KernelSpec) -> Callable[[Tensors], Tensors]:
    """Bind a launch to Triton's interpreter on the CPU."""
    from blockdiag.interop.interpreter.launch import interpret

    def launch(tensors: Tensors) -> Tensors:
        arrays = [np.asarray(to_jax(x.detach(), copy=True)) for x in tensors]
        device = jax.local_devices(backend="cpu")[0]
        return tuple(to_torch(jax.device_put(x, device)) for x in interpret(spec, *arrays))

    return launch
