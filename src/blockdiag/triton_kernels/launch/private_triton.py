"""Everything that this library uses of Triton's private parts; no other module names them.

Triton has no public interface for compiling without a GPU, for leaving out ptxas, for host-made descriptors without
checks, or for running a kernel with numpy. Its private parts differ between versions. So each feature is looked for
when it is first needed:

| feature | where it is missing or unknown |
|---|---|
| a hook that leaves ptxas out of a compilation (since 3.7 it is asked for a cache key, too) | ptxas runs always |
| Gluon's language for Hopper | Hopper runs the plain Triton kernels |
| host-made descriptors that are dataclasses | their constructor checks every descriptor of every launch |
| the interpreter's classes | interpreting a kernel raises NotImplementedError |

`describe_features` says which way each one goes, and why.
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

# What a version that works otherwise inside raises when it is asked as a known version would be.
MISMATCHES = (ImportError, AttributeError, TypeError, ValueError, LookupError)

# Element types of tensor maps: PTX's numbers (`.elemtype` of `tensormap.replace`), which Triton's metadata has, and
# the driver's `CUtensorMapDataType` of the same types.
_DRIVER_ELEMENT_TYPES = {number: number for number in range(8)} | {8: 10, 9: 8, 10: 9}

# What device code for Hopper takes from Gluon, by module. A name with alternatives separated by "|" differs by version.
_GLUON_NAMES = {
    "triton.experimental.gluon": ("jit",),
    "triton.experimental.gluon.language": (
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "allocate_shared_memory",
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
    """How one private feature of the installed Triton is used.

    Attributes:
        name: of the feature.
        is_fast: whether it is used; otherwise the slow way is.
        detail: what that means, with the reason where it is slow.
    """

    name: str
    is_fast: bool
    detail: str


def describe_features() -> tuple[Feature, ...]:
    """Describe how each private feature of the installed Triton is used; imports Triton.

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


# Modules of Gluon import each other in circles, in which two threads at once end with `_DeadlockError`.
_loading = threading.RLock()


def load_modules() -> None:
    """Import what compiling imports, and probe what it needs, one thread at a time."""
    with _loading:
        importlib.import_module("triton.compiler")
        gluon_reason()
        _probe_stage_hook()


def run_compiler(source: Any, arch: int, options: Mapping[str, Any]) -> Any:
    """Compile a source (see `kernel_source`) for an architecture and return Triton's CompiledKernel.

    Raises:
        PTXASError: ptxas refuses the kernel; see `ptxas_error`.
        RuntimeError: a pass of the compiler fails.
    """
    import triton

    return triton.compile(source, target=_gpu_target(arch), options=_with_fusion(options))


def ptxas_error() -> type[Exception]:
    """Return the exception that Triton raises for what ptxas refuses."""
    from triton.runtime.errors import PTXASError

    return PTXASError


def kernel_metadata(kernel: Any) -> dict[str, Any]:
    """Return what a launcher must know of a compiled kernel, named as the fields of `CompiledLaunch`."""
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
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    attributes: Mapping[tuple[int, ...], Any],
    *,
    function_of: Callable[[Any], Any],
    key_suffix: str,
    when_module: Callable[[], None],
) -> Any:
    """Return what Triton's compiler takes: a kernel with the types and values of its parameters.

    Args:
        kernel: the function, or what `function_of` makes a function of when the compiler needs one.
        signature, constants, attributes: as Triton's ASTSource takes them.
        function_of: makes a Triton function of the kernel.
        key_suffix: added to the source's part of the key of Triton's cache on disk.
        when_module: called when the front end has made a module of the function.
    """
    source = _source_class(kernel.is_gluon())(kernel, signature, constants, attributes)
    source.function_of, source.key_suffix, source.when_module = function_of, key_suffix, when_module
    return source


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
    """Name the fusion of products and sums as Triton's setting has it: Triton 3.9 warns where nobody does."""
    from triton import knobs

    return {"enable_fp_fusion": knobs.language.default_fp_fusion, **options}


# Leaving out ptxas


class StageHook:
    """Leaves ptxas out of what one thread compiles, while it is installed.

    Triton has one hook for all threads. A hook of somebody else is called as Triton would call it.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._former: Any = None

    def install(self) -> None:
        """Take the place of the hook that is there."""
        from triton import knobs

        self._former = knobs.runtime.add_stages_inspection_hook
        # Triton's annotation of it forgets the backend, which comes first.
        hook: Any = self._call
        knobs.runtime.add_stages_inspection_hook = hook

    def remove(self) -> None:
        """Give the place back."""
        from triton import knobs

        knobs.runtime.add_stages_inspection_hook = self._former

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if not arguments:
            # Triton 3.7 and later ask for a part of the cache's key and its hash; `kernel_source` has the suffix.
            return ("", "") if self._former is None else self._former(**options)
        if self._former is not None:
            self._former(*arguments, **options)
        # Threads that are not this library's compile kernels of their own meanwhile.
        if threading.get_ident() == self._thread:
            _, stages, *_ = arguments
            stages["cubin"] = _no_binary
        return None


def _no_binary(ptx: str, metadata: Any) -> bytes:
    del ptx, metadata
    return b""


# Why the hook cannot be used, found while a kernel was compiled.
_hook_failures: list[str] = []


def stage_hook_reason() -> str | None:
    """Return why ptxas cannot be left out of a compilation, or None where it can."""
    return _hook_failures[0] if _hook_failures else _probe_stage_hook()


def give_up_stage_hook(reason: str) -> None:
    """Let ptxas run for every kernel from now on."""
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
    """The compiler's stages for a Triton kernel, by name."""
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


# What ptxas and nvdisasm say


@contextlib.contextmanager
def ptxas_log() -> Iterator[io.StringIO]:
    """Collect what ptxas says of kernels that are compiled meanwhile, and keep Triton from printing."""
    from triton import knobs

    # Triton prints the whole PTX when ptxas fails; the exception carries what ptxas said instead.
    with contextlib.redirect_stdout(io.StringIO()) as printed, knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def assemble(ptx: str, arch: int) -> str:
    """Return what ptxas says of PTX, assembled with the options that Triton assembles it with.

    Raises:
        PTXASError: ptxas refuses it; see `ptxas_error`.
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
    """Whether the kernels written in Gluon for Hopper run on an architecture; plain Triton kernels do elsewhere."""
    return arch == 90 and gluon_reason() is None


def gluon_reason() -> str | None:
    """Return what the installed Triton's Gluon lacks of what the kernels for Hopper are written in, or None."""
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
    return None


# Host-made descriptors


def driver_element_type(metadata: Mapping[str, Any]) -> int:
    """Return the driver's `CUtensorMapDataType` of a descriptor that a compiled kernel takes.

    Raises:
        NotImplementedError: the kernel wants a kind of tensor map that is not known here.
    """
    number = metadata["elem_type"]
    if number not in _DRIVER_ELEMENT_TYPES or metadata.get("fp4_padded") or metadata.get("is_im2col"):
        raise NotImplementedError(f"Triton {_version_text()} asks for a tensor map of an unknown kind: {metadata}")
    return _DRIVER_ELEMENT_TYPES[number]


def descriptor_maker(
    example: Any, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any
) -> Callable[[Any], Any]:
    """Return a function that makes a host descriptor over a tensor, for one plan's descriptor.

    Args:
        example: a tensor of the dtype that descriptors are over.
        shape, strides, block_shape: of every descriptor.
        layout: of a Gluon kernel's descriptor; None for a Triton kernel's.
    """
    kind = _descriptor_class(layout is not None)
    fields = (list(shape), list(strides), list(block_shape), *(() if layout is None else (layout,)))
    # Checks sizes and strides, which are the same for every call.
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
    """Return why descriptors cannot be made past their constructor, or None where they can."""
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
    """The classes that interpreting a kernel builds upon.

    Attributes:
        builder: computes with numpy what the compiler would make operations of.
        handle: an array with its type in the kernel language.
        semantic: makes calls of a builder of expressions of the kernel language.
        function: what `@triton.jit` makes of a Python function.
        rounding_towards_zero: the rounding mode.
    """

    builder: Any
    handle: Any
    semantic: Any
    function: Any
    rounding_towards_zero: Any


def interpreter_parts() -> InterpreterParts:
    """Return the classes of Triton's interpreter.

    Raises:
        NotImplementedError: the installed version has others.
    """
    reason = interpreter_reason()
    if reason is not None:
        raise NotImplementedError(
            f"kernels cannot be interpreted: {reason}; install triton 3.6 to 3.9, or choose implementation='xla'"
        )
    return _interpreter_parts()


@functools.cache
def interpreter_reason() -> str | None:
    """Return why kernels cannot be interpreted, or None where they can."""
    try:
        parts = _interpreter_parts()
        missing = [name for name in _BUILDER_METHODS if not callable(getattr(parts.builder, name, None))]
    except MISMATCHES as error:
        return f"Triton {_version_text()} has another interpreter ({error})"
    return f"the interpreter of Triton {_version_text()} has no {', '.join(missing)}" if missing else None


# What this library's builder replaces: a version that computed by other methods would not be checked, nor round.
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
