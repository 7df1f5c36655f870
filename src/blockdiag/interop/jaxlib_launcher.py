"""The one file that touches `jaxlib.gpu_triton`, jaxlib's own and unofficial launcher of Triton kernels.

What it relies on, as found in jaxlib 0.11.2: a custom call `triton_kernel_call_ffi` whose attribute `opaque` is a
zlib-compressed message holding PTX, grid and parameters. The launcher hands one buffer to each array or descriptor
parameter in turn, first the custom call's operands, then its results, so `lay_out_buffers` decides which array stands
where, and refuses plans whose parameters cannot be served in that order.
"""

import functools
import importlib.metadata
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockdiag.triton_kernels import private_triton
from blockdiag.triton_kernels.compile import CompiledLaunch
from blockdiag.triton_kernels.plan import Constexpr, Descriptor, LaunchPlan, Pointer, Role, Scalar

CALL_TARGET = "triton_kernel_call_ffi"

# XLA's no-operation whose result is a buffer without content; `jax.lax.empty` is the same on a GPU.
EMPTY_BUFFER_TARGET = "AllocateBuffer"

# Pointers to scratch memory of the program and of a profiler, which the launcher adds to every kernel's parameters.
_SCRATCH_PARAMETERS = 2

# The first version whose launcher takes global scratch and descriptors, and the first one nobody tried.
_FIRST_KNOWN = (0, 11, 1)
_FIRST_UNKNOWN = (0, 13, 0)

_REQUIRED_NAMES = (
    "TritonKernel",
    "TritonKernelCall",
    "create_array_parameter",
    "create_scalar_parameter",
    "create_tma_descriptor_parameter",
)


@dataclass(frozen=True)
class BufferLayout:
    """Order of a plan's arrays in the custom call.

    Attributes:
        operands: what stands at each operand position: an input, maybe at several positions, or an output, meaning a
            buffer without content that is made for it and that it takes over.
        results: output indices, in result order.
        aliases: operand position to result position of arrays that share one buffer.
    """

    operands: tuple[tuple[Role, int], ...]
    results: tuple[int, ...]
    aliases: dict[int, int]


def availability() -> str | None:
    """None when the installed jaxlib is one this launcher was tried with; otherwise the reason and the remedy.

    Looks at installed packages only: imports nothing and starts no backend.
    """
    try:
        version = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return "jaxlib is not installed; install jax[cuda13]"
    return _version_reason(version) or _plugin_reason()


def lay_out_buffers(plan: LaunchPlan) -> BufferLayout:
    """Decides operands and results such that the launcher's walk over buffers meets the kernel's array parameters.

    The parameters up to some point take operands, the others results. An output that is needed before that point,
    because an input follows or because a second parameter uses it, gets an operand that it shares its buffer with.

    Raises:
        NotImplementedError: when no point will do; the message says how to order the kernel's parameters.
    """
    uses: list[tuple[Role, int]] = [
        (argument.role, argument.index)
        for argument in plan.arguments.values()
        if isinstance(argument, Pointer | Descriptor)
    ]
    for split in range(len(uses) + 1):
        layout = _split_layout(plan, uses[:split], uses[split:])
        if layout is not None:
            return layout
    raise NotImplementedError(
        f"kernel {plan.name!r}: jaxlib's launcher passes first operands, then results, and each output at most once "
        f"among either; the array parameters stand in the order {uses}. Put outputs after inputs and, where two "
        "parameters use each of several outputs, all first uses before all second ones"
    )


def _split_layout(
    plan: LaunchPlan, first: Sequence[tuple[Role, int]], second: Sequence[tuple[Role, int]]
) -> BufferLayout | None:
    shared = dict(plan.aliases)
    sources = {output: source for source, output in plan.aliases}
    results = [index for role, index in second if role == "output"]
    # Every operand position that shares its buffer with an output, by that output.
    position_of: dict[int, int] = {}
    for position, (role, index) in enumerate(first):
        output = index if role == "output" else shared.get(index)
        if output in position_of:
            return None  # of two operands that are one buffer XLA may copy one
        if output is not None:
            position_of[output] = position
    if len(results) < len(second) or len(set(results)) < len(results) or not sources.keys() <= position_of.keys():
        return None
    # Results that the walk does not reach stand at its end.
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
    """The custom call's `opaque` attribute for one launch of `compiled` as `plan` says."""
    jaxlib_triton = _jaxlib_triton()
    kernel = jaxlib_triton.TritonKernel(
        compiled.name,
        compiled.num_warps,
        compiled.num_ctas,
        compiled.shared_bytes,
        _without_line_information(compiled.ptx),
        "",  # ttir: kept by jaxlib, used for nothing
        compiled.arch,
        compiled.global_scratch_bytes or None,
        compiled.global_scratch_alignment if compiled.global_scratch_bytes else None,
    )
    call = jaxlib_triton.TritonKernelCall(kernel, *plan.grid, _parameters(jaxlib_triton, plan, compiled))
    return zlib.compress(call.to_proto(plan.name, b""))


def _without_line_information(ptx: str) -> str:
    """The same code without comments and debug sections.

    jaxlib's assembler uses neither, while the launcher hashes and copies the text, and source paths in it would make
    exported programs and XLA's compilation cache depend on where the library is installed.
    """
    lines = []
    is_debug = False
    for line in ptx.splitlines():
        code = line.partition("//")[0].rstrip()
        is_debug = is_debug or code.lstrip().startswith(".section")
        # `.local`, which declares a kernel's own memory, is code.
        if code and not is_debug and code.split(maxsplit=1)[0] not in (".loc", ".file"):
            lines.append(code)
        if code.strip() == "}":
            is_debug = False
    return "\n".join(lines) + "\n"


def _parameters(jaxlib_triton: Any, plan: LaunchPlan, compiled: CompiledLaunch) -> list[Any]:
    """The parameters of the kernel's entry.

    Raises:
        NotImplementedError: the entry takes another number of them, which the launcher would not notice.
    """
    taken = _entry_parameters(compiled.ptx) - _SCRATCH_PARAMETERS
    descriptors = sum(isinstance(argument, Descriptor) for argument in plan.arguments.values())
    # Without TMA, Triton 3.6 and 3.7 pass one flag of a descriptor (padding is NaN), later versions another one too
    # (round to tf32).
    parameters = _listed(jaxlib_triton, plan, compiled, flags=1)
    if descriptors and not compiled.descriptor_metadata and taken > len(parameters):
        parameters = _listed(jaxlib_triton, plan, compiled, flags=1 + (taken - len(parameters)) // descriptors)
    if taken != len(parameters):
        raise NotImplementedError(
            f"kernel {plan.name!r}: its entry takes {taken} parameters and {len(parameters)} are known; the installed "
            "triton passes arguments in a way that is not known: install triton 3.6 to 3.9, or choose "
            "implementation='xla'"
        )
    return parameters


def _entry_parameters(ptx: str) -> int:
    """How many parameters the kernel in a PTX module takes."""
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", ptx)
    return 0 if entry is None else entry[1].count(".param")


def _listed(jaxlib_triton: Any, plan: LaunchPlan, compiled: CompiledLaunch, *, flags: int) -> list[Any]:
    """The plan's parameters in the order of the kernel's.

    Args:
        flags: of each descriptor on an architecture without TMA.
    """
    metadata = iter(compiled.descriptor_metadata)
    parameters: list[Any] = []
    for argument in plan.arguments.values():
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
    """A descriptor on an architecture without TMA: Triton rewrites it to a pointer, and keeps its sizes twice."""
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
    # jaxlib's overloads are strict about Python types, and numpy scalars are none of them.
    cast = {"i1": bool, "i32": int, "i64": int, "fp32": float}[dtype]
    return jaxlib_triton.create_scalar_parameter(cast(value), dtype)


def _jaxlib_triton() -> Any:
    reason = availability()
    if reason is not None:
        raise NotImplementedError(reason)
    from jaxlib import gpu_triton

    missing = [name for name in _REQUIRED_NAMES if not hasattr(gpu_triton, name)]
    if missing:
        raise NotImplementedError(
            f"jaxlib.gpu_triton offers no {missing}; install jax[cuda13] with a jaxlib in {_known_window()}"
        )
    return gpu_triton


def _version_reason(version: str) -> str | None:
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if _FIRST_KNOWN <= numbers < _FIRST_UNKNOWN:
        return None
    return (
        f"jaxlib {version} is outside the versions whose Triton launcher is known ({_known_window()}); "
        f"install 'jax[cuda13]{_known_window()}', or choose implementation='xla'"
    )


@functools.cache
def _plugin_reason() -> str | None:
    for distribution in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return None
    return "JAX's CUDA plugin, which holds the launcher of Triton kernels, is not installed; install jax[cuda13]"


def _known_window() -> str:
    return f">={'.'.join(map(str, _FIRST_KNOWN))},<{'.'.join(map(str, _FIRST_UNKNOWN[:2]))}"
