"""The only module that uses Triton's private interfaces.

Triton has no public interface for compiling without a GPU, for skipping ptxas, for host-made descriptors without
checks, or for running a kernel with numpy. The private interfaces differ between versions, so each feature is probed
when it is first needed:

| feature | if missing or unknown |
|---|---|
| a hook that skips ptxas (since 3.7 it is also asked for a cache key) | ptxas always runs |
| Gluon's language for Hopper | Hopper runs the plain Triton kernels |
| host-made descriptors that are dataclasses | their constructor checks every descriptor at every launch |
| the interpreter's classes | interpreting a kernel raises NotImplementedError |

`describe_features` reports the result of each probe and the reason.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Exceptions that an unknown version of Triton may raise when it is called like a known one.
MISMATCHES = (ImportError, AttributeError, TypeError, ValueError, LookupError)

# Element types of tensor maps. Keys are PTX's numbers (`.elemtype` of `tensormap.replace`), as in Triton's metadata;
# values are the driver's `CUtensorMapDataType`.
_DRIVER_ELEMENT_TYPES = {number: number for number in range(8)} | {8: 10, 9: 8, 10: 9}

# Names that the Hopper kernels import from Gluon, by module. "|" separates the spellings of different versions.
_GLUON_NAMES = {
    "triton.experimental.gluon": ("jit",),
    "triton.experimental.gluon.language": (
        "DistributedLinearLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "allocate_shared_memory",
        "inline_asm_elementwise",
        "shared_memory_descriptor",
        "thread_barrier|barrier",
        "warp_specialize",
    ),
    "triton.experimental.gluon.language.nvidia.ampere": ("async_copy",),
    "triton.experimental.gluon.language.nvidia.ampere.async_copy": (
        "async_load|async_copy_global_to_shared",
        "commit_group",
        "mbarrier_arrive",
        "wait_group",
    ),
    "triton.experimental.gluon.language.nvidia.hopper": (
        "fence_async_shared",
        "mbarrier",
        "tma",
        "warpgroup_mma",
        "warpgroup_mma_wait",
    ),
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier": ("MBarrierLayout", "arrive", "expect", "init", "wait"),
    "triton.experimental.gluon.language.nvidia.hopper.tma": (
        "async_load|async_copy_global_to_shared",
        "async_store|async_copy_shared_to_global",
        "store_wait",
    ),
    "triton.experimental.gluon._runtime": ("GluonASTSource",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """Whether one private feature of the installed Triton is used.

    Attributes:
        name: the feature's name.
        is_fast: whether the feature is used; if not, the slow path is.
        detail: the consequence, with the reason for a slow path.
    """

    name: str
    is_fast: bool
    detail: str


def describe_features() -> tuple[Feature, ...]:
    """Describe whether each private feature of the installed Triton is used. Imports Triton.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    rows = (
        ("PTX without ptxas", stage_hook_reason(), "a hook leaves ptxas out", "ptxas runs for every kernel"),
        ("Gluon kernels for Hopper", gluon_reason(), "Hopper's own kernels are used", "plain Triton kernels are used"),
        (
            "descriptors without checks",
            descriptor_reason(),
            "descriptors are checked once a plan",
            "descriptors are checked at every launch",
        ),
        ("interpreter", interpreter_reason(), "kernels can be interpreted", "kernels cannot be interpreted"),
    )
    return tuple(
        Feature(name, reason is None, fast if reason is None else f"{slow}: {reason}")
        for name, reason, fast, slow in rows
    )


def version() -> tuple[int, ...]:
    """Return the release numbers of the installed Triton, (3, 6, 0) for "3.6.0"."""
    numbers = []
    for part in importlib.metadata.version("triton").split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


# Compiling


# Gluon's modules import each other in a cycle. Two threads importing them at once fail with `_DeadlockError`.
_loading = threading.RLock()


def load_modules() -> None:
    """Import the modules that compiling needs and probe its features, one thread at a time."""
    with _loading:
        importlib.import_module("triton.compiler")
        gluon_reason()
        _probe_stage_hook()


def run_compiler(source: Any, arch: int, options: Mapping[str, Any]) -> Any:
    """Compile a source (see `kernel_source`) for an architecture and return Triton's CompiledKernel.

    Raises:
        PTXASError: ptxas rejects the kernel; see `ptxas_error`.
        RuntimeError: a pass of the compiler fails.
    """
    import triton

    return triton.compile(source, target=_gpu_target(arch), options=_with_fusion(options))


def ptxas_error() -> type[Exception]:
    """Return the exception class that Triton raises when ptxas rejects a kernel."""
    from triton.runtime.errors import PTXASError

    return PTXASError


def kernel_metadata(kernel: Any) -> dict[str, Any]:
    """Return the metadata that a launcher needs, keyed by the fields of `CompiledLaunch`."""
    metadata = kernel.metadata
    return {
        "name": metadata.name,
        "num_warps": metadata.num_warps,
        "num_ctas": metadata.num_ctas,
        "shared_bytes": metadata.shared,
        "tensor_memory_columns": metadata.tmem_size or 0,
        "global_scratch_bytes": metadata.global_scratch_size or 0,
        "global_scratch_alignment": metadata.global_scratch_align or 1,
        "descriptor_metadata": tuple(metadata.tensordesc_meta or ()),
    }


def kernel_source(
    kernel: Any,
    signature: Mapping[str, Any],
    constants: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    *,
    function_of: Callable[[Any], Any],
    key_suffix: str,
    when_module: Callable[[], None],
) -> Any:
    """Return the source object for Triton's compiler: a kernel with the types and values of its parameters.

    Args:
        kernel: a Triton function, or a kernel that `function_of` converts once the compiler needs a function.
        signature, constants, attributes: as Triton's ASTSource takes them.
        function_of: converts the kernel to a Triton function.
        key_suffix: appended to the source's hash, which is part of the key of Triton's on-disk cache.
        when_module: called when the front end has produced the MLIR module.
    """
    source = _source_class(kernel.is_gluon())(kernel, signature, constants, attributes)
    source.function_of, source.key_suffix, source.when_module = function_of, key_suffix, when_module
    return source


def compile_time_value(value: Any) -> Any:
    """Return a compile-time value in the form that kernels are compiled with.

    The compiler wraps values in `constexpr`, but not their attributes. Lists of plain numbers, `and` and `not` of plain
    truth values, and plain strings as arguments then fail. So the fields of a dataclass are wrapped as well.
    """
    return _Fields(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


class _Fields:
    """A dataclass whose fields are read as `constexpr`. It has the value's equality, hash and `repr`."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        from triton.language import constexpr

        if name not in self._value.__dataclass_fields__:
            raise AttributeError(f"{type(self._value).__name__} has no field {name!r}")
        return constexpr(compile_time_value(getattr(self._value, name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fields) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return repr(self._value)


@functools.cache
def _source_class(is_gluon: bool) -> Any:
    if is_gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Base
    else:
        from triton.compiler import ASTSource as Base
    base: Any = Base

    class _Source(base):
        function_of: Callable[[Any], Any]
        key_suffix: str
        when_module: Callable[[], None]

        def hash(self) -> str:
            return super().hash() + self.key_suffix

        def make_ir(self, *arguments: Any, **options: Any) -> Any:
            self.fn = self.function_of(self.fn)
            module = super().make_ir(*arguments, **options)
            self.when_module()
            return module

    return _Source


def _gpu_target(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32)


def _with_fusion(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add `enable_fp_fusion` with Triton's default, because Triton 3.9 warns if it is not given."""
    from triton import knobs

    return {"enable_fp_fusion": knobs.language.default_fp_fusion, **options}


# Skipping ptxas


class StageHook:
    """A compiler hook that skips ptxas for one thread's compilations while it is installed.

    Triton has one hook for all threads. A hook that was installed before is still called as Triton would call it.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._former: Any = None

    def install(self) -> None:
        """Replace Triton's current hook by this one."""
        from triton import knobs

        self._former = knobs.runtime.add_stages_inspection_hook
        # Triton's annotation of the hook omits its first parameter, the backend.
        hook: Any = self._call
        knobs.runtime.add_stages_inspection_hook = hook

    def remove(self) -> None:
        """Restore the hook that `install` replaced."""
        from triton import knobs

        knobs.runtime.add_stages_inspection_hook = self._former

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if not arguments:
            # Triton 3.7 and later call the hook for a cache key and its hash. `kernel_source` adds this library's part.
            return ("", "") if self._former is None else self._former(**options)
        if self._former is not None:
            self._former(*arguments, **options)
        # Threads outside this library may compile their own kernels meanwhile.
        if threading.get_ident() == self._thread:
            _, stages, *_ = arguments
            stages["cubin"] = _no_binary
        return None


def _no_binary(ptx: str, metadata: Any) -> bytes:
    del ptx, metadata
    return b""


# Reasons not to use the hook that were found while a kernel was compiled.
_hook_failures: list[str] = []


def stage_hook_reason() -> str | None:
    """Return why ptxas cannot be skipped, or None if it can."""
    return _hook_failures[0] if _hook_failures else _probe_stage_hook()


def give_up_stage_hook(reason: str) -> None:
    """Run ptxas for every kernel from now on."""
    _hook_failures.append(reason)


@functools.cache
def _probe_stage_hook() -> str | None:
    from triton import knobs

    if not hasattr(knobs.runtime, "add_stages_inspection_hook"):
        return f"Triton {_version_text()} has no hook for the compiler's stages"
    hook = StageHook()
    try:
        stages = _stages_under(hook, 80)
    except MISMATCHES as error:
        return f"Triton {_version_text()} uses its hook in a way that is not known ({error})"
    if stages.get("cubin") is not _no_binary:
        return f"Triton {_version_text()} does not ask its hook about ptxas"
    return None


def _stages_under(hook: StageHook | None, arch: int) -> dict[str, Any]:
    """Return the compiler's stages for a Triton kernel by name, with `hook` installed if it is given."""
    from triton.backends.compiler import Language
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(_gpu_target(arch))
    stages: dict[str, Any] = {}
    if hook is not None:
        hook.install()
    try:
        backend.add_stages(stages, backend.parse_options(_with_fusion({})), Language.TRITON)
    finally:
        if hook is not None:
            hook.remove()
    return stages


def _version_text() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


# Output of ptxas and nvdisasm


@contextlib.contextmanager
def ptxas_log() -> Iterator[io.StringIO]:
    """Collect ptxas's output for kernels compiled in this context, and keep Triton from printing."""
    from triton import knobs

    # Triton prints the whole PTX when ptxas fails. The exception carries ptxas's message, so the print is dropped.
    with contextlib.redirect_stdout(io.StringIO()) as printed, knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def assemble(ptx: str, arch: int) -> str:
    """Assemble PTX with Triton's own options and return ptxas's output.

    Raises:
        PTXASError: ptxas rejects it; see `ptxas_error`.
    """
    with ptxas_log() as printed:
        _stages_under(None, arch)["cubin"](ptx, {})
    return printed.getvalue()


def disassembler() -> str:
    """Return the path of nvdisasm."""
    from triton import knobs

    return knobs.nvidia.nvdisasm.path


# Gluon


def has_hopper_kernels(arch: int) -> bool:
    """Whether an architecture runs the Gluon kernels for Hopper. All others run the plain Triton kernels."""
    return arch == 90 and gluon_reason() is None


def gluon_reason() -> str | None:
    """Return what the Hopper kernels need and the installed Triton's Gluon lacks, or None."""
    with _loading:
        return _probe_gluon()


@functools.cache
def _probe_gluon() -> str | None:
    for module, names in _GLUON_NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            return f"Triton {_version_text()} has no module {module} ({error})"
        for name in names:
            if not any(hasattr(found, alternative) for alternative in name.split("|")):
                return f"Triton {_version_text()} has no {name.replace('|', ' or ')} in {module}"
    from triton.experimental.gluon.language import shared_memory_descriptor

    if not any(hasattr(shared_memory_descriptor, name) for name in ("reinterpret", "_reinterpret")):
        return f"Triton {_version_text()} has no views of shared memory with another dtype"
    if tma_addition() is None:
        return f"Triton {_version_text()} has no addition by the copy engine"
    return None


@functools.cache
def tma_addition() -> Any:
    """Return Gluon's addition by the copy engine, (descriptor, place, memory), or None.

    It adds a tile in shared memory to a tile of an array in global memory. Triton 3.6 and 3.7 have it in their
    compiler, but not in their language.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon.language import _core, _semantic

    if not (
        hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce")
        and hasattr(ir, "DESCRIPTOR_REDUCE_KIND")
        and hasattr(_core, "builtin")
        and hasattr(_semantic.GluonSemantic, "_convert_to_ir_values")
    ):
        return None

    @_core.builtin
    def add(descriptor: Any, place: Any, memory: Any, _semantic: Any = None) -> None:
        places = _semantic._convert_to_ir_values(place, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, places, memory.handle)

    return add


# Host-made descriptors


def driver_element_type(metadata: Mapping[str, Any]) -> int:
    """Return the driver's `CUtensorMapDataType` for a descriptor of a compiled kernel.

    Raises:
        NotImplementedError: the kernel needs an unknown kind of tensor map.
    """
    number = metadata["elem_type"]
    if number not in _DRIVER_ELEMENT_TYPES or metadata.get("fp4_padded") or metadata.get("is_im2col"):
        raise NotImplementedError(f"Triton {_version_text()} asks for a tensor map of an unknown kind: {metadata}")
    return _DRIVER_ELEMENT_TYPES[number]


def descriptor_maker(
    example: Any, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any
) -> Callable[[Any], Any]:
    """Return a function that makes a host descriptor over a given tensor.

    Args:
        example: a tensor with the dtype of the later ones.
        shape, strides, block_shape: common to all these descriptors.
        layout: the shared-memory layout for a Gluon kernel; None for a Triton kernel.
    """
    kind = _descriptor_class(layout is not None)
    fields = (list(shape), list(strides), list(block_shape), *(() if layout is None else (layout,)))
    # The constructor checks sizes and strides, which are the same for every call.
    checked = kind(example, *fields)
    if descriptor_reason() is not None:
        return lambda tensor: kind(tensor, *fields)
    others = {name: value for name, value in vars(checked).items() if name != "base"}

    def make(tensor: Any) -> Any:
        descriptor = object.__new__(kind)
        descriptor.__dict__ = {"base": tensor, **others}
        return descriptor

    return make


@functools.cache
def descriptor_reason() -> str | None:
    """Return why descriptors cannot be made without their constructor, or None if they can."""
    for is_gluon in (False, True):
        try:
            kind = _descriptor_class(is_gluon)
        except ImportError as error:
            return f"Triton {_version_text()} has no such class ({error})"
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        if "base" not in [field.name for field in fields] or hasattr(kind, "__slots__"):
            return f"{kind.__qualname__} of Triton {_version_text()} is no dataclass over `base`"
    return None


def _descriptor_class(is_gluon: bool) -> Any:
    if is_gluon:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    else:
        from triton.tools.tensor_descriptor import TensorDescriptor
    return TensorDescriptor


# The interpreter


class InterpreterParts(NamedTuple):
    """The classes of Triton that this library's interpreter builds upon.

    Attributes:
        builder: evaluates with numpy the operations that the compiler would emit.
        handle: an array with its type in the kernel language.
        semantic: translates expressions of the kernel language to calls of a builder.
        function: the class of `@triton.jit` functions.
        rounding_towards_zero: the enum value of this rounding mode.
    """

    builder: Any
    handle: Any
    semantic: Any
    function: Any
    rounding_towards_zero: Any


def interpreter_parts() -> InterpreterParts:
    """Return the classes of Triton's interpreter.

    Raises:
        NotImplementedError: the installed version's classes are not the known ones.
    """
    reason = interpreter_reason()
    if reason is not None:
        raise NotImplementedError(
            f"kernels cannot be interpreted: {reason}; install triton 3.6 to 3.9, or choose implementation='xla'"
        )
    return _interpreter_parts()


@functools.cache
def interpreter_reason() -> str | None:
    """Return why kernels cannot be interpreted, or None if they can."""
    try:
        parts = _interpreter_parts()
        missing = [name for name in _BUILDER_METHODS if not callable(getattr(parts.builder, name, None))]
    except MISMATCHES as error:
        return f"Triton {_version_text()} has another interpreter ({error})"
    return f"the interpreter of Triton {_version_text()} has no {', '.join(missing)}" if missing else None


# Methods that this library's builder overrides. Checks and rounding would be lost in a version that uses others.
_BUILDER_METHODS = (
    "binary_op",
    "cast_impl",
    "create_atomic_cas",
    "create_atomic_rmw",
    "create_dot",
    "create_fma",
    "create_fp_to_fp",
    "create_masked_load",
    "create_masked_store",
    "create_rsqrt",
    "create_select",
    "set_grid_dim",
    "set_grid_idx",
    "ternary_op",
    "unary_op",
)


def _interpreter_parts() -> InterpreterParts:
    from triton._C.libtriton import ir
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from triton.runtime.jit import JITFunction

    return InterpreterParts(InterpreterBuilder, TensorHandle, TritonSemantic, JITFunction, ir.ROUNDING_MODE.RTZ)
