"""Compiles launch plans with Triton's compiler; the GPU need not be present.

The result depends only on the plan's compile key: source, parameter types, compile-time values, options and
architecture. Problems that differ only in run-time scalars, grids or array sizes share one kernel. Triton keeps
compiled kernels on disk, so other processes load them instead of compiling.

By default compilation ends with PTX, which jaxlib's launcher takes and assembles itself. Callers that load kernels
without jaxlib also ask for a binary, which Triton assembles with ptxas. Such a kernel is a separate entry in memory and
on disk. If the installed Triton cannot skip ptxas, ptxas runs for every kernel.

Several threads may compile at the same time:

- The front end, which turns a function into an MLIR module, uses state shared between kernels: Python functions and
  Triton's knobs and caches. One thread at a time runs it (see `_Turn`). This costs nothing, because the front end holds
  Python's global lock anyway. Only the hashes of functions are computed outside, under locks of Triton's own.
- The later stages run without the global lock and take about 80 % of the time. Each module has its own MLIR context,
  ptxas is a process, and files appear in the cache by an atomic rename. LLVM's options are global to the process, but
  Triton sets them to the same values for every kernel.
"""

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blockdiag.common.dtype_table import ELEMENT_TYPES
from blockdiag.triton_kernels.launch import private_triton
from blockdiag.triton_kernels.launch.generated import function_of, source_lines
from blockdiag.triton_kernels.launch.plan import (
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)

# Shared memory that one program may use, in KiB, by architecture (CUDA programming guide, compute capabilities).
_SHARED_LIMITS_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}

# Columns of tensor memory, on architectures that have it. Above this Triton emits a trap instead of an error.
TENSOR_MEMORY_COLUMNS = 512

# 1024 threads. ptxas accepts more, but the launch then fails.
_MOST_WARPS = 32

_INTEGER_RANGES = {"i32": 31, "i64": 63}
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


class KernelCompileError(RuntimeError):
    """Raised for a kernel that the compiler rejects or that exceeds the architecture's resources.

    Example:
        >>> from blockdiag.triton_kernels.launch.compile import KernelCompileError
        >>> issubclass(KernelCompileError, RuntimeError)
        True
    """


@dataclass(frozen=True, eq=False)
class CompiledLaunch:
    """A kernel compiled for one architecture, with the metadata that a launcher needs.

    Attributes:
        kernel: Triton's CompiledKernel, not loaded on any device. Plans share it, so never load this object.
            Its `asm["cubin"]` may be empty if no binary was asked for.
        name: the entry point's name in the PTX.
        num_warps: warps of one program, including those added by warp specialisation.
        shared_bytes: dynamic shared memory of one program.
        tensor_memory_columns: columns of tensor memory of one program, 0 on architectures without it.
        global_scratch_bytes, global_scratch_alignment: global memory that each program needs for descriptors made on
            the device.
        descriptor_metadata: one mapping per host-made descriptor: swizzle, elem_type, elem_size, block_size. Empty on
            architectures without TMA, where a descriptor is passed as a pointer, shape and strides instead.
    """

    kernel: Any
    name: str
    arch: int
    num_warps: int
    num_ctas: int
    shared_bytes: int
    tensor_memory_columns: int
    global_scratch_bytes: int
    global_scratch_alignment: int
    descriptor_metadata: tuple[dict[str, Any], ...]

    @property
    def ptx(self) -> str:
        return self.kernel.asm["ptx"]


type Made = Callable[[LaunchPlan, Target], object]
"""Callback that receives the plan and target of a kernel once the kernel is compiled."""


def load_compiler() -> None:
    """Import the modules that compiling needs, one thread at a time.

    Call this before importing Gluon, and before starting threads that import it.
    """
    private_triton.load_modules()


def shared_limit(arch: int) -> int | None:
    """Return the bytes of shared memory a program may use on `arch`, or None for an architecture not in the table."""
    kib = _SHARED_LIMITS_KIB.get(arch)
    return None if kib is None else kib * 1024


def compile_plan(plan: LaunchPlan, target: Target, *, binary: bool = False, made: Made | None = None) -> CompiledLaunch:
    """Compile the kernel of `plan` for `target`, or return the kernel that this process has for an equal compile key.

    If several threads ask for the same kernel, the first one compiles it and the others wait.

    Args:
        plan: the launch whose kernel is compiled.
        target: the GPU it is compiled for.
        binary: whether to assemble the kernel with ptxas here. jaxlib assembles it again in any case, when XLA
            compiles the program around a launch.
        made: called with the plan and target once the kernel is compiled. Only the call that compiles the kernel or
            reads it from disk invokes this callback.

    Raises:
        ValueError: the plan does not describe its kernel (see `check_plan`).
        KernelCompileError: the kernel does not fit the architecture, or the compiler rejects it. A rejection by ptxas
            is raised here only with `binary`; otherwise XLA raises it.
    """
    load_compiler()
    check_plan(plan)
    key = compile_key(plan, target.arch)
    while True:
        with _lock:
            compiled = _compiled.get((key, True)) or _compiled.get((key, binary))
            if compiled is None:
                promised = _compiled[key, binary] = Future()
                break
        try:
            return compiled.result()
        except CancelledError:
            # Compilation failed in another thread, which raised the error. Retry to raise it in this thread, too.
            continue
    try:
        promised.set_result(_compile(plan, target.arch, binary))
    finally:
        if not promised.done():
            with _lock:
                del _compiled[key, binary]
            promised.cancel()
    if made is not None:
        made(plan, target)
    return promised.result()


def compile_together(
    launches: Sequence[tuple[LaunchPlan, Target]], *, made: Made | None = None
) -> list[CompiledLaunch]:
    """Compile several kernels to PTX in parallel, in as many threads as this process has processors.

    Args:
        launches: pairs of a plan and its target.
        made: as in `compile_plan`, called by the compiling threads.

    Raises:
        ValueError, KernelCompileError: as in `compile_plan`, for the first launch that failed, after all have ended.
    """
    load_compiler()
    # A single kernel is compiled in the calling thread, which is easier to debug.
    if len(launches) < 2:
        return [compile_plan(*launch, made=made) for launch in launches]
    with ThreadPoolExecutor(min(len(launches), _processors()), "compile") as pool:
        begun = {place: pool.submit(compile_plan, *launches[place], made=made) for place in _longest_first(launches)}
    return [begun[place].result() for place in range(len(launches))]


def compile_ahead(launches: Sequence[tuple[LaunchPlan, Target]], *, made: Made | None = None) -> None:
    """Start compiling kernels to PTX in the background and return at once.

    A caller that asks for such a kernel meanwhile waits for it. If the background compilation fails, `compile_plan`
    compiles again and raises the error to that caller.

    Args:
        launches: pairs of a plan and its target.
        made: as in `compile_plan`, called by the compiling thread.

    Raises:
        ValueError: a plan does not describe its kernel (see `check_plan`).
    """
    load_compiler()
    for plan, _ in launches:
        check_plan(plan)
    for plan, target in [launches[place] for place in _longest_first(launches)]:
        key = compile_key(plan, target.arch)
        if (key, False) not in _compiled and (key, True) not in _compiled:
            in_background(compile_plan, plan, target, made=made)


def in_background(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Call a function in one of the threads that compile ahead. Its exceptions are not reported."""
    _ahead(os.getpid()).submit(function, *arguments, **options)


def _longest_first(launches: Sequence[tuple[LaunchPlan, Target]]) -> list[int]:
    """Return the indices of launches, longest compilation first, so that no long one is left running alone at the end.

    Compilation time is estimated by the number of source lines.
    """
    return sorted(range(len(launches)), key=lambda place: -source_lines(launches[place][0].kernel))


@functools.cache
def _ahead(process: int) -> ThreadPoolExecutor:
    """Return the pool of threads that compile ahead, one per process because forks do not inherit threads."""
    del process
    return ThreadPoolExecutor(_processors(), "compile ahead")


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def compile_key(plan: LaunchPlan, arch: int) -> tuple[Any, ...]:
    """Return a hashable key of all inputs to the compiler. Plans with equal keys share one kernel."""
    return (
        plan.kernel.cache_key,
        tuple(signature(plan).items()),
        tuple((leaf.path, leaf.argument.key()) for leaf in plan.leaves() if isinstance(leaf.argument, Constexpr)),
        plan.options,
        arch,
    )


def signature(plan: LaunchPlan) -> dict[str, Any]:
    """Return the type of every kernel parameter in Triton's spelling, in the kernel's order.

    The type of a group is a NamedTuple with the same fields, from which Triton takes the names of attributes.
    """
    arguments = plan.arguments.items()
    return {name: map_argument(lambda x: _signature_type(plan, x), argument) for name, argument in arguments}


def map_argument(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return the result of a function for an argument, or for every member of a group as a group of the same kind."""
    if not isinstance(argument, tuple):
        return function(argument)
    kind: Any = type(argument)
    return kind._make(map(function, argument))


def parameter_places(plan: LaunchPlan) -> list[tuple[int, int, Callable[[list[Any]], Any] | None]] | None:
    """Return the first and the end leaf of every parameter, and what makes a group of them.

    Returns None if no parameter is a group.
    """
    places = []
    first = 0
    for argument in plan.arguments.values():
        kind: Any = type(argument)
        is_group = isinstance(argument, tuple)
        end = first + (len(argument) if is_group else 1)
        places.append((first, end, kind._make if is_group else None))
        first = end
    return places if any(make is not None for _, _, make in places) else None


def buffer_spec(plan: LaunchPlan, argument: Pointer | Descriptor) -> TensorSpec:
    """Return the spec of the array that a pointer or descriptor refers to."""
    return (plan.inputs if argument.role == "input" else plan.outputs)[argument.index]


def check_plan(plan: LaunchPlan) -> None:
    """Raise ValueError, naming the problem, if `plan` cannot describe a launch of its kernel."""
    names = list(plan.kernel.arg_names)
    if list(plan.arguments) != names:
        raise ValueError(
            f"plan {plan.name!r}: `arguments` must name the kernel's parameters in the kernel's order {names}, "
            f"got {list(plan.arguments)}"
        )
    if len(plan.grid) != 3 or any(not 1 <= size <= limit for size, limit in zip(plan.grid, _GRID_LIMITS, strict=True)):
        raise ValueError(f"plan {plan.name!r}: `grid` must be three sizes within 1..{_GRID_LIMITS}, got {plan.grid}")
    for name, argument in plan.arguments.items():
        if isinstance(argument, tuple):
            _check_group(plan, name, argument)
    for leaf in plan.leaves():
        _check_argument(plan, leaf.name, leaf.argument)
    _check_outputs(plan)


def _check_group(plan: LaunchPlan, name: str, group: Any) -> None:
    where = f"plan {plan.name!r}, parameter {name!r}"
    if not hasattr(group, "_fields"):
        raise ValueError(f"{where}: a group of arguments must be a NamedTuple, got {group!r}")
    if "values" in group._fields or "type" in group._fields:
        raise ValueError(
            f"{where}: Triton's tuples have attributes `values` and `type`; rename the fields of {type(group).__name__}"
        )
    if any(isinstance(argument, Descriptor | tuple) for argument in group):
        raise ValueError(
            f"{where}: a group may hold pointers, scalars and compile-time values, got {group!r}; Triton's launcher "
            "makes descriptors only for parameters of their own"
        )


def _check_argument(plan: LaunchPlan, name: str, argument: Any) -> None:
    where = f"plan {plan.name!r}, parameter {name!r}"
    match argument:
        case Constexpr():
            return
        case Scalar():
            bits = _INTEGER_RANGES.get(argument.dtype)
            if bits is not None and not -(2**bits) <= argument.value < 2**bits:
                raise ValueError(f"{where}: {argument.value} does not fit {argument.dtype}; use a wider Scalar dtype")
        case Pointer() | Descriptor():
            arrays = plan.inputs if argument.role == "input" else plan.outputs
            if not 0 <= argument.index < len(arrays):
                raise ValueError(f"{where}: there is no {argument.role} {argument.index}; the plan has {len(arrays)}")
            if isinstance(argument, Descriptor):
                _check_descriptor(where, argument, arrays[argument.index])
        case _:
            raise ValueError(
                f"{where}: {argument!r} is not an argument of a plan; use Pointer, Descriptor, Scalar or Constexpr"
            )


def _check_descriptor(where: str, descriptor: Descriptor, spec: TensorSpec) -> None:
    itemsize = ELEMENT_TYPES[spec.dtype].bytes
    if math.prod(descriptor.shape) > math.prod(spec.shape):
        raise ValueError(f"{where}: descriptor shape {descriptor.shape} is larger than its array {spec.shape}")
    if len(descriptor.block_shape) != len(descriptor.shape) or not 1 <= len(descriptor.shape) <= 5:
        raise ValueError(
            f"{where}: `shape` and `block_shape` must have one equal rank in 1..5, "
            f"got {descriptor.shape} and {descriptor.block_shape}"
        )
    if any(not 1 <= size <= 2**31 - 1 for size in descriptor.shape):
        raise ValueError(f"{where}: descriptor sizes must be within 1..2^31-1, got {descriptor.shape}")
    if any(stride * itemsize % 16 for stride in descriptor.strides[:-1]):
        raise ValueError(
            f"{where}: rows of a descriptor must be multiples of 16 bytes, got shape {descriptor.shape} of "
            f"{itemsize}-byte elements; use a pointer"
        )
    if descriptor.block_shape[-1] * itemsize < 16:
        raise ValueError(f"{where}: the last block size must be at least 16 bytes, got {descriptor.block_shape}")


def _check_outputs(plan: LaunchPlan) -> None:
    aliased = [output for _, output in plan.aliases]
    if len(set(aliased)) != len(aliased) or len({source for source, _ in plan.aliases}) != len(aliased):
        raise ValueError(f"plan {plan.name!r}: `aliases` must pair each input and output once, got {plan.aliases}")
    for source, output in plan.aliases:
        if not (0 <= source < len(plan.inputs) and 0 <= output < len(plan.outputs)):
            raise ValueError(f"plan {plan.name!r}: alias {(source, output)} names no input and output of the plan")
        if plan.inputs[source] != plan.outputs[output]:
            raise ValueError(
                f"plan {plan.name!r}: aliased input {source} and output {output} must have one shape and dtype, "
                f"got {plan.inputs[source]} and {plan.outputs[output]}"
            )
    written = {
        argument.index
        for _, _, argument in plan.leaves()
        if isinstance(argument, Pointer | Descriptor) and argument.role == "output"
    }
    for index, spec in enumerate(plan.outputs):
        if index not in written and index not in aliased and math.prod(spec.shape):
            raise ValueError(f"plan {plan.name!r}: no parameter of the kernel refers to output {index}, {spec}")


def _signature_type(plan: LaunchPlan, argument: Any) -> str:
    match argument:
        case Constexpr():
            return "constexpr"
        case Scalar():
            return argument.dtype
        case Pointer():
            return "*" + _element_type(plan, argument)
        case Descriptor():
            layout = "" if argument.layout is None else f",{argument.layout!r}"
            return f"tensordesc<{_element_type(plan, argument)}{list(argument.block_shape)}{layout}>"
    raise ValueError(f"plan {plan.name!r}: {argument!r} is not an argument of a plan")


def _element_type(plan: LaunchPlan, argument: Pointer | Descriptor) -> str:
    dtype = buffer_spec(plan, argument).dtype
    if dtype not in ELEMENT_TYPES:
        raise ValueError(f"plan {plan.name!r}: dtype {dtype!r} must be one of {sorted(ELEMENT_TYPES)}")
    return ELEMENT_TYPES[dtype].triton


# Kernels by compile key and by whether they have a binary. A kernel that is being compiled is a pending future. The
# lock protects lookups and insertions; it is not held during compilation.
_compiled: dict[tuple[tuple[Any, ...], bool], Future[CompiledLaunch]] = {}
_lock = threading.Lock()


class _Turn:
    """A lock on the compiler state that kernels share, held until the front end has produced a module.

    A kernel that is read from disk holds the lock until it is loaded.

    Args:
        hook: skips ptxas and is installed while the lock is held; Triton calls it before it makes the module. With None
            ptxas runs.
    """

    _lock = threading.Lock()

    def __init__(self, hook: private_triton.StageHook | None) -> None:
        self._hook = hook
        self._is_ours = False

    def __enter__(self) -> "_Turn":
        self._is_ours = _Turn._lock.acquire()
        if self._hook is not None:
            self._hook.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Release the lock for the next thread. Does nothing if it was released before."""
        if self._is_ours:
            self._is_ours = False
            if self._hook is not None:
                self._hook.remove()
            _Turn._lock.release()


def _compile(plan: LaunchPlan, arch: int, binary: bool) -> CompiledLaunch:
    try:
        kernel = _run_compiler(plan, arch, binary)
    except private_triton.ptxas_error() as error:
        raise KernelCompileError(f"ptxas refuses kernel {plan.name!r} for sm_{arch}: {error}") from error
    except RuntimeError as error:
        raise KernelCompileError(
            f"Triton's compiler fails on kernel {plan.name!r} for sm_{arch}: {error}; it printed why to stderr"
        ) from error
    compiled = CompiledLaunch(kernel=kernel, arch=arch, **private_triton.kernel_metadata(kernel))
    _check_resources(plan, compiled)
    return compiled


def _run_compiler(plan: LaunchPlan, arch: int, binary: bool) -> Any:
    """Return Triton's CompiledKernel, without a binary if none is asked for and ptxas can be skipped."""
    if binary or private_triton.stage_hook_reason() is not None:
        return _run_in_turn(plan, arch, None)
    try:
        return _run_in_turn(plan, arch, private_triton.StageHook())
    except private_triton.MISMATCHES as error:
        # Either the kernel is wrong, and compiling it again fails too, or this version uses the hook in an unknown way.
        kernel = _run_in_turn(plan, arch, None)
        private_triton.give_up_stage_hook(f"{type(error).__name__}: {error}")
        return kernel


def _run_in_turn(plan: LaunchPlan, arch: int, hook: private_triton.StageHook | None) -> Any:
    options = {
        "num_warps": plan.options.num_warps,
        "num_stages": plan.options.num_stages,
        "num_ctas": plan.options.num_ctas,
    }
    if plan.options.maxnreg is not None:
        options["maxnreg"] = plan.options.maxnreg
    attributes: dict[tuple[int, ...], Any] = {
        leaf.path: [["tt.divisibility", 16]] for leaf in plan.leaves() if isinstance(leaf.argument, Pointer)
    }
    constants = {
        leaf.path: private_triton.compile_time_value(leaf.argument.value)
        for leaf in plan.leaves()
        if isinstance(leaf.argument, Constexpr)
    }
    with _Turn(hook) as turn:
        source = private_triton.kernel_source(
            plan.kernel,
            signature(plan),
            constants,
            attributes,
            function_of=function_of,
            # Cached files without a binary need another key, because callers that need one must not find them.
            key_suffix="" if hook is None else "-ptx",
            when_module=turn.end,
        )
        return private_triton.run_compiler(source, arch, options)


def _check_resources(plan: LaunchPlan, compiled: CompiledLaunch) -> None:
    limit = shared_limit(compiled.arch)
    if limit is not None and compiled.shared_bytes > limit:
        raise KernelCompileError(
            f"kernel {plan.name!r} needs {compiled.shared_bytes} bytes of shared memory, sm_{compiled.arch} has "
            f"{limit}; use smaller tiles or fewer stages"
        )
    if compiled.num_warps > _MOST_WARPS:
        raise KernelCompileError(
            f"kernel {plan.name!r} has {compiled.num_warps} warps, partitions included, and a program may have "
            f"{_MOST_WARPS}; ask for fewer with `num_warps`"
        )
    if compiled.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
        raise KernelCompileError(
            f"kernel {plan.name!r} needs {compiled.tensor_memory_columns} columns of tensor memory, "
            f"sm_{compiled.arch} has {TENSOR_MEMORY_COLUMNS}; use smaller accumulators"
        )
