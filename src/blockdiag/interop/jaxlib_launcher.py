"""The one module that uses private names of jaxlib: its Triton kernel launcher and its DLPack functions.

Each is probed at its first use with a call of the form that this module relies on. If the launcher has an unknown form,
kernels are not available and XLA computes instead. If the DLPack functions do, the ones in `jax.dlpack` are used.

The launcher of jaxlib 0.11.1 to 0.12 is a custom call `triton_kernel_call_ffi`. Its attribute `opaque` is a
zlib-compressed message with PTX, grid and parameters. The launcher assigns one buffer to each array or descriptor
parameter in turn, first the custom call's operands, then its results. So `lay_out_buffers` decides the position of each
array, and rejects plans whose parameters do not fit that order.
"""

import functools
import importlib
import importlib.metadata
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from blockdiag.common.features import Feature
from blockdiag.triton_kernels.launch import private_triton
from blockdiag.triton_kernels.launch.compile import CompiledLaunch
from blockdiag.triton_kernels.launch.plan import Constexpr, Descriptor, LaunchPlan, Pointer, Role, Scalar

CALL_TARGET = "triton_kernel_call_ffi"

# XLA's custom call that returns an uninitialised buffer; `jax.lax.empty` lowers to the same on a GPU.
EMPTY_BUFFER_TARGET = "AllocateBuffer"

# The launcher appends two pointers to every kernel's parameters: scratch memory of the program and of a profiler.
_SCRATCH_PARAMETERS = 2


@dataclass(frozen=True)
class BufferLayout:
    """Order of a plan's arrays in the custom call.

    Attributes:
        operands: the array at each operand position. An input may occur at several positions. An output stands for an
            uninitialised buffer that is allocated as operand and taken over by the output.
        results: output indices, in result order.
        aliases: operand position to result position of arrays that share one buffer.
    """

    operands: tuple[tuple[Role, int], ...]
    results: tuple[int, ...]
    aliases: dict[int, int]


def availability() -> str | None:
    """Return None if the installed jaxlib has a launcher of the known form, otherwise the reason and the remedy.

    This starts no backend.
    """
    return _plugin_reason() or _launcher_reason()


def lay_out_buffers(plan: LaunchPlan) -> BufferLayout:
    """Choose operands and results so that the launcher's order of buffers matches the kernel's array parameters.

    The parameters before a split point take operands, the others take results. An output that is needed before the
    split point shares its buffer with an operand. This happens if an input follows it or a second parameter uses it.

    Raises:
        NotImplementedError: when no split point works; the message says how to order the kernel's parameters.
    """
    uses: list[tuple[Role, int]] = [
        (argument.role, argument.index)
        for _, _, argument in plan.leaves()
        if isinstance(argument, Pointer | Descriptor)
    ]
    for split in range(len(uses) + 1):
        layout = _split_layout(plan, uses[:split], uses[split:])
        if layout is not None:
            return layout
    raise NotImplementedError(
        f"kernel {plan.name!r}: jaxlib's launcher passes first operands, then results, and each output at most once "
        f"among either; the array parameters are in the order {uses}. Put outputs after inputs and, where two "
        "parameters use each of several outputs, all first uses before all second ones"
    )


def _split_layout(
    plan: LaunchPlan, first: Sequence[tuple[Role, int]], second: Sequence[tuple[Role, int]]
) -> BufferLayout | None:
    shared = dict(plan.aliases)
    sources = {output: source for source, output in plan.aliases}
    results = [index for role, index in second if role == "output"]
    # Maps each output that shares its buffer with an operand to the position of that operand.
    position_of: dict[int, int] = {}
    for position, (role, index) in enumerate(first):
        output = index if role == "output" else shared.get(index)
        if output in position_of:
            return None  # XLA may copy one of two operands that share a buffer
        if output is not None:
            position_of[output] = position
    if len(results) < len(second) or len(set(results)) < len(results) or not sources.keys() <= position_of.keys():
        return None
    # Results that no parameter uses come last.
    results += [index for index in range(len(plan.outputs)) if index not in results]
    return BufferLayout(
        operands=tuple(
            ("input", sources[index]) if role == "output" and index in sources else (role, index)
            for role, index in first
        ),
        results=tuple(results),
        aliases={position: results.index(output) for output, position in position_of.items()},
    )


def build_opaque(plan: LaunchPlan, compiled: CompiledLaunch) -> bytes:
    """Return the custom call's `opaque` attribute for a launch of `compiled` according to `plan`."""
    jaxlib_triton = _jaxlib_triton()
    kernel = jaxlib_triton.TritonKernel(
        compiled.name,
        compiled.num_warps,
        compiled.num_ctas,
        compiled.shared_bytes,
        _without_line_information(compiled.ptx),
        "",  # ttir: stored by jaxlib but not used
        compiled.arch,
        compiled.global_scratch_bytes or None,
        compiled.global_scratch_alignment if compiled.global_scratch_bytes else None,
    )
    call = jaxlib_triton.TritonKernelCall(kernel, *plan.grid, _parameters(jaxlib_triton, plan, compiled))
    return zlib.compress(call.to_proto(plan.name, b""))


def _without_line_information(ptx: str) -> str:
    """Return the PTX without comments and debug sections.

    jaxlib's assembler uses neither, but the launcher hashes and copies the text. Source paths in it would make exported
    programs and XLA's compilation cache depend on the library's install location.
    """
    lines = []
    is_debug = False
    for line in ptx.splitlines():
        code = line.partition("//")[0].rstrip()
        is_debug = is_debug or code.lstrip().startswith(".section")
        # `.local`, which declares a kernel's local memory, is code, so directives are matched as whole words.
        if code and not is_debug and code.split(maxsplit=1)[0] not in (".loc", ".file"):
            lines.append(code)
        if code.strip() == "}":
            is_debug = False
    return "\n".join(lines) + "\n"


def _parameters(jaxlib_triton: Any, plan: LaunchPlan, compiled: CompiledLaunch) -> list[Any]:
    """Return the parameters of the kernel's entry point.

    Raises:
        NotImplementedError: the entry point takes another number of parameters, which the launcher does not check.
    """
    taken = _entry_parameters(compiled.ptx) - _SCRATCH_PARAMETERS
    descriptors = sum(isinstance(argument, Descriptor) for _, _, argument in plan.leaves())
    # Without TMA, Triton 3.6 and 3.7 pass one flag per descriptor (padding is NaN); later versions add a second one
    # (round to tf32).
    parameters = _listed(jaxlib_triton, plan, compiled, flags=1)
    if descriptors and not compiled.descriptor_metadata and taken > len(parameters):
        parameters = _listed(jaxlib_triton, plan, compiled, flags=1 + (taken - len(parameters)) // descriptors)
    if taken != len(parameters):
        raise NotImplementedError(
            f"kernel {plan.name!r}: its entry takes {taken} parameters and {len(parameters)} are known; the installed "
            "triton passes arguments in an unknown way: install triton 3.6 to 3.9, or choose "
            "implementation='xla'"
        )
    return parameters


def _entry_parameters(ptx: str) -> int:
    """Return the number of parameters of the kernel in a PTX module."""
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", ptx)
    return 0 if entry is None else entry[1].count(".param")


def _listed(jaxlib_triton: Any, plan: LaunchPlan, compiled: CompiledLaunch, *, flags: int) -> list[Any]:
    """Return the plan's parameters in the kernel's order.

    Args:
        flags: number of flags of each descriptor on an architecture without TMA.
    """
    metadata = iter(compiled.descriptor_metadata)
    parameters: list[Any] = []
    for _, _, argument in plan.leaves():
        match argument:
            case Pointer():
                parameters.append(jaxlib_triton.create_array_parameter(0, 16))
            case Descriptor() if compiled.descriptor_metadata:
                parameters += _descriptor(jaxlib_triton, argument, next(metadata))
            case Descriptor():
                parameters += _decomposed_descriptor(jaxlib_triton, argument, flags)
            case Scalar():
                parameters.append(_scalar(jaxlib_triton, argument.value, argument.dtype))
            case Constexpr():
                pass
    return parameters


def _descriptor(jaxlib_triton: Any, descriptor: Descriptor, metadata: dict[str, Any]) -> list[Any]:
    tensor_map = jaxlib_triton.create_tma_descriptor_parameter(
        elem_type=private_triton.driver_element_type(metadata),
        swizzle=metadata["swizzle"],
        shape=descriptor.shape,
        strides=descriptor.strides,
        block_shape=metadata["block_size"],
        oob_fill=0,
    )
    return [
        tensor_map,
        *_sizes(jaxlib_triton, descriptor.shape, "i32"),
        *_sizes(jaxlib_triton, descriptor.strides, "i64"),
    ]


def _decomposed_descriptor(jaxlib_triton: Any, descriptor: Descriptor, flags: int) -> list[Any]:
    """Return a descriptor's parameters without TMA: Triton rewrites it to a pointer and passes its sizes twice."""
    return [
        jaxlib_triton.create_array_parameter(0, 16),
        *_sizes(jaxlib_triton, descriptor.shape, "i64"),
        *_sizes(jaxlib_triton, descriptor.strides, "i64"),
        *(_scalar(jaxlib_triton, False, "i1") for _ in range(flags)),
        *_sizes(jaxlib_triton, descriptor.shape, "i32"),
        *_sizes(jaxlib_triton, descriptor.strides, "i64"),
    ]


def _sizes(jaxlib_triton: Any, sizes: Sequence[int], dtype: str) -> list[Any]:
    return [_scalar(jaxlib_triton, size, dtype) for size in sizes]


def _scalar(jaxlib_triton: Any, value: float | bool, dtype: str) -> Any:
    # jaxlib's overloads are strict about Python types and do not accept numpy scalars.
    cast = {"i1": bool, "i32": int, "i64": int, "fp32": float}[dtype]
    return jaxlib_triton.create_scalar_parameter(cast(value), dtype)


def _jaxlib_triton() -> Any:
    reason = availability()
    if reason is not None:
        raise NotImplementedError(reason)
    return importlib.import_module("jaxlib.gpu_triton")


@functools.cache
def _plugin_reason() -> str | None:
    for distribution in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return None
    return "JAX's CUDA plugin, which holds the launcher of Triton kernels, is not installed; install jax[cuda13]"


@functools.cache
def _launcher_reason() -> str | None:
    """Return None if jaxlib accepts a launch with each kind of parameter in the known form, otherwise the reason."""
    try:
        jaxlib_triton: Any = importlib.import_module("jaxlib.gpu_triton")
        kernel = jaxlib_triton.TritonKernel("probe", 4, 1, 0, "", "", 90, 128, 128)
        parameters = [
            jaxlib_triton.create_array_parameter(0, 16),
            *(jaxlib_triton.create_scalar_parameter(value, dtype) for value, dtype in _PROBED_SCALARS),
            jaxlib_triton.create_tma_descriptor_parameter(
                elem_type=6, swizzle=0, shape=(16,), strides=(1,), block_shape=(16,), oob_fill=0
            ),
        ]
        call = jaxlib_triton.TritonKernelCall(kernel, 1, 1, 1, parameters)
        message = call.to_proto("probe", b"")
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if isinstance(message, bytes) and b"probe" in message:
            return None
        problem = "its description of a launch has an unknown form"
    return (
        f"jaxlib {_version()} has no launcher of Triton kernels in the known form ({problem}); install a version of "
        "jax[cuda13] that this version of blockdiag was tested with, or choose implementation='xla'"
    )


_PROBED_SCALARS = ((True, "i1"), (1, "i32"), (1, "i64"), (1.0, "fp32"))


def _version() -> str:
    try:
        return importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


class Shortcut(NamedTuple):
    """jaxlib's two functions behind `jax.dlpack`, which take the device and the stream directly.

    `jax.dlpack.from_dlpack` spends most of its time on looking up the backend and on passing the array through
    `jnp.asarray`: it takes about 50 us per tensor, the function behind it 6 us.

    Attributes:
        import_capsule: takes a capsule, the JAX device, and the stream that readers wait for; returns an array on the
            same memory.
        export_array: takes an array and the stream that reads it; returns a capsule.
    """

    import_capsule: Callable[[Any, jax.Device, int | None], jax.Array]
    export_array: Callable[[jax.Array, int | None], Any]


@functools.cache
def dlpack_shortcut(platform: str) -> Shortcut | str:
    """Return the DLPack functions for a platform, "cpu" or "gpu", or a message that says why they cannot be used.

    The functions are tested by a round trip of an array through a capsule, which must end at the same memory. This
    starts JAX's backends.
    """
    try:
        module: Any = importlib.import_module("jaxlib._jax")
        import_capsule = module.dlpack_managed_tensor_to_buffer
        shortcut = Shortcut(
            lambda capsule, device, stream: import_capsule(capsule, device, stream, False),
            module.buffer_to_dlpack_managed_tensor,
        )
        device = jax.local_devices(backend=platform)[0]
        stream = None if platform == "cpu" else device.get_stream_for_external_ready_events()
        # The array must be concrete even while the caller is traced.
        with jax.ensure_compile_time_eval():
            array = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3), device)
        back = shortcut.import_capsule(shortcut.export_array(array, stream), device, stream)
        is_same = back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
        if is_same and (back.shape, back.dtype, back.sharding.device_set) == (array.shape, array.dtype, {device}):
            return shortcut
        problem = "an array came back as another"
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"jaxlib {_version()} has no DLPack functions in the known form ({problem}); those of jax.dlpack are used"


def describe_features() -> tuple[Feature, ...]:
    """Describe the private features of the installed jaxlib that the package uses. This starts JAX's backends."""
    reason = availability()
    features = [
        Feature("jaxlib: launcher of Triton kernels", reason is None, reason or "kernels are launched on XLA's stream")
    ]
    for platform in filter(_has_devices, ("cpu", "gpu")):
        found = dlpack_shortcut(platform)
        detail = found if isinstance(found, str) else "arrays cross by jaxlib's own functions"
        features.append(Feature(f"jaxlib: DLPack on {platform}", not isinstance(found, str), detail))
    return tuple(features)


def _has_devices(platform: str) -> bool:
    try:
        return bool(jax.local_devices(backend=platform))
    except RuntimeError:  # JAX raises this for a backend that it does not have
        return False
