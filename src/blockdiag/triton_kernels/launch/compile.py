"""Compiles a launch plan with Triton's own compiler, for a GPU that need not be present.

The result belongs to the plan's compile key (source, parameter types, compile-time values, options, architecture) and
to nothing else of the plan: two problems that differ only in run-time scalars, grids or array sizes share one kernel.
Triton keeps compiled kernels on disk, so another process loads them instead of compiling.

Compiling ends with PTX, which is what jaxlib's launcher takes and assembles by itself. Who loads kernels without jaxlib
asks for a binary, too: a kernel of its own in memory and on disk, which Triton assembles with ptxas. Where the
installed Triton has no way to leave ptxas out, it runs for every kernel.

Threads may compile at the same time. Everything that kernels share is Python's: functions, Triton's knobs and caches,
the front end that makes a module of a function. It has one thread at a time, see `_Turn`, which costs nothing, as it
holds Python's global lock anyway; only hashes of functions are made outside of turns, under locks of Triton's. What
follows is the module's own, which lies in an MLIR context of its own: its passes, LLVM, ptxas as a process, and files
that appear in the cache by being renamed. It runs without the global lock and takes about 80 % of the time. LLVM's
options are the process's, and Triton sets them to the same values for every kernel.
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

# Bytes of shared memory that one program may use, by architecture (CUDA programming guide, compute capabilities).
_SHARED_LIMITS_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}

# Columns of tensor memory of an architecture that has it. Triton emits a trap, not an error, for a kernel above it.
TENSOR_MEMORY_COLUMNS = 512

# 1024 threads; ptxas accepts more and the launch then fails.
_MOST_WARPS = 32

_INTEGER_RANGES = {"i32": 31, "i64": 63}
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


class KernelCompileError(RuntimeError):
    """A kernel that the compiler refuses, or that asks for more of a resource than the architecture has.

    Example:
        >>> from blockdiag.triton_kernels.launch.compile import KernelCompileError
        >>> issubclass(KernelCompileError, RuntimeError)
        True
    """


@dataclass(frozen=True, eq=False)
class CompiledLaunch:
    """A kernel compiled for one architecture, with what a launcher must know of it.

    Attributes:
        kernel: Triton's CompiledKernel, not yet loaded on any device; shared between plans, so never load this one.
            Its `asm["cubin"]` may be empty where no binary was asked for.
        name: the entry point's name in the PTX.
        num_warps: warps of one program, those added by warp specialisation included.
        shared_bytes: dynamic shared memory of one program.
        tensor_memory_columns: columns of tensor memory of one program, 0 where there is none.
        global_scratch_bytes, global_scratch_alignment: global memory each program needs, for descriptors made on the
            device.
        descriptor_metadata: one mapping per host-made descriptor: swizzle, elem_type, elem_size, block_size. Empty for
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
"""What is called with plan and target of a kernel when it is there."""


def load_compiler() -> None:
    """Import what compiling imports, one thread at a time. Whoever imports Gluon, or starts threads that do, calls this
    before."""
    private_triton.load_modules()


def shared_limit(arch: int) -> int | None:
    """Bytes of shared memory a program may use on `arch`, or None where this table does not know the architecture."""
    kib = _SHARED_LIMITS_KIB.get(arch)
    return None if kib is None else kib * 1024


def compile_plan(plan: LaunchPlan, target: Target, *, binary: bool = False, made: Made | None = None) -> CompiledLaunch:
    """Compiles the kernel of `plan` for `target`; at once when this process already did for an equal compile key.

    Of threads that ask for one kernel at the same time the first compiles it, and the others wait.

    Args:
        plan, target: what to compile, and for what.
        binary: whether ptxas assembles the kernel here. jaxlib does so itself, once more, when XLA compiles the
            program around a launch.
        made: called with plan and target once the kernel is there, by the one call that makes it or reads it from disk.

    Raises:
        ValueError: when the plan does not describe its kernel (see `check_plan`).
        KernelCompileError: when the kernel does not fit the architecture or the compiler refuses it. What ptxas refuses
            is found here only with `binary`; otherwise XLA raises it.
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
            # It failed in another thread, which has the reason; this one finds it by itself.
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
    """Compiles several kernels to PTX side by side, in as many threads as this process has processors.

    Args:
        made: as of `compile_plan`, called by these threads.

    Raises:
        ValueError, KernelCompileError: as `compile_plan`, for the first one that fails, once all have ended.
    """
    load_compiler()
    # The fewer kernels, the better for whom debugs them: one is compiled where it is asked for.
    if len(launches) < 2:
        return [compile_plan(*launch, made=made) for launch in launches]
    with ThreadPoolExecutor(min(len(launches), _processors()), "compile") as pool:
        begun = {place: pool.submit(compile_plan, *launches[place], made=made) for place in _longest_first(launches)}
    return [begun[place].result() for place in range(len(launches))]


def compile_ahead(launches: Sequence[tuple[LaunchPlan, Target]], *, made: Made | None = None) -> None:
    """Begins to compile kernels to PTX that somebody will ask for soon, and returns at once.

    Who asks for a kernel meanwhile waits for it. A failure is theirs, too: `compile_plan` then tries again and raises.

    Args:
        made: as of `compile_plan`, called by the thread that compiles.

    Raises:
        ValueError: when a plan does not describe its kernel (see `check_plan`).
    """
    load_compiler()
    for plan, _ in launches:
        check_plan(plan)
    for plan, target in [launches[place] for place in _longest_first(launches)]:
        key = compile_key(plan, target.arch)
        if (key, False) not in _compiled and (key, True) not in _compiled:
            in_background(compile_plan, plan, target, made=made)


def in_background(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Calls a function in one of the threads that compile ahead; nobody hears of its failure."""
    _ahead(os.getpid()).submit(function, *arguments, **options)


def _longest_first(launches: Sequence[tuple[LaunchPlan, Target]]) -> list[int]:
    """The places of launches in the order in which they had better begin: a long kernel that begins last is alone then.

    How long a kernel takes is guessed from the lines of its source.
    """
    return sorted(range(len(launches)), key=lambda place: -source_lines(launches[place][0].kernel))


@functools.cache
def _ahead(process: int) -> ThreadPoolExecutor:
    """The threads of a process that compile ahead: a fork of it has none of them."""
    del process
    return ThreadPoolExecutor(_processors(), "compile ahead")


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def compile_key(plan: LaunchPlan, arch: int) -> tuple[Any, ...]:
    """Everything of a plan that the compiler sees, hashable; plans with equal keys share one kernel."""
    return (
        plan.kernel.cache_key,
        tuple(signature(plan).items()),
        tuple((name, argument.key()) for name, argument in plan.arguments.items() if isinstance(argument, Constexpr)),
        plan.options,
        arch,
    )


def signature(plan: LaunchPlan) -> dict[str, str]:
    """Type of every kernel parameter in Triton's spelling, in the kernel's order."""
    return {name: _signature_type(plan, argument) for name, argument in plan.arguments.items()}


def buffer_spec(plan: LaunchPlan, argument: Pointer | Descriptor) -> TensorSpec:
    """The array that a pointer or descriptor refers to."""
    return (plan.inputs if argument.role == "input" else plan.outputs)[argument.index]


def check_plan(plan: LaunchPlan) -> None:
    """Raises ValueError naming what is wrong when `plan` cannot describe a launch of its kernel."""
    names = list(plan.kernel.arg_names)
    if list(plan.arguments) != names:
        raise ValueError(
            f"plan {plan.name!r}: `arguments` must name the kernel's parameters in the kernel's order {names}, "
            f"got {list(plan.arguments)}"
        )
    if len(plan.grid) != 3 or any(not 1 <= size <= limit for size, limit in zip(plan.grid, _GRID_LIMITS, strict=True)):
        raise ValueError(f"plan {plan.name!r}: `grid` must be three sizes within 1..{_GRID_LIMITS}, got {plan.grid}")
    for name, argument in plan.arguments.items():
        _check_argument(plan, name, argument)
    _check_outputs(plan)


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
                f"{where}: {argument!r} is no plan argument; wrap it in Pointer, Descriptor, Scalar or Constexpr"
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
        for argument in plan.arguments.values()
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
    raise ValueError(f"plan {plan.name!r}: {argument!r} is no plan argument")


def _element_type(plan: LaunchPlan, argument: Pointer | Descriptor) -> str:
    dtype = buffer_spec(plan, argument).dtype
    if dtype not in ELEMENT_TYPES:
        raise ValueError(f"plan {plan.name!r}: dtype {dtype!r} must be one of {sorted(ELEMENT_TYPES)}")
    return ELEMENT_TYPES[dtype].triton


# Kernels by compile key and whether they are assembled, those that a thread is compiling among them; the lock is held
# to look and to promise only.
_compiled: dict[tuple[tuple[Any, ...], bool], Future[CompiledLaunch]] = {}
_lock = threading.Lock()


class _Turn:
    """A thread's turn to use what kernels share: from its beginning until the front end has made a module.

    Reading a kernel from the disk takes a whole turn.

    Args:
        hook: leaves ptxas out during the turn; Triton asks it before it makes the module. None: ptxas runs.
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
        """The next thread's turn; nothing where this one's has ended already."""
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
    """Triton's CompiledKernel, without a binary where none is asked for and ptxas can be left out."""
    if binary or private_triton.stage_hook_reason() is not None:
        return _run_in_turn(plan, arch, None)
    try:
        return _run_in_turn(plan, arch, private_triton.StageHook())
    except private_triton.MISMATCHES as error:
        # Either the kernel is wrong, which fails again, or this version asks the hook for something that is not known.
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
        (position,): [["tt.divisibility", 16]]
        for position, argument in enumerate(plan.arguments.values())
        if isinstance(argument, Pointer)
    }
    constants = {name: argument.value for name, argument in plan.arguments.items() if isinstance(argument, Constexpr)}
    with _Turn(hook) as turn:
        source = private_triton.kernel_source(
            plan.kernel,
            signature(plan),
            constants,
            attributes,
            function_of=function_of,
            # The name of Triton's files: those without a binary are no answer to who needs one.
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
