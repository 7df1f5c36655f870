"""Launch plans on the CPU: the kernel's Python code runs over numpy arrays, one program at a time.

This builds on Triton's own interpreter but uses none of its switches: no environment variable is read or written, and
torch is not needed. The same `@triton.jit` function may be compiled before, after and even during an interpreted run.
Every access is checked to stay inside the launch's arrays, and inputs are read-only. Outputs start as NaN (floats) or
as a conspicuous integer, so that elements which a kernel does not write are noticed.
"""

import itertools
import threading
from typing import Any

import ml_dtypes
import numpy as np

from blockdiag.common.dtype_table import ELEMENT_TYPES
from blockdiag.triton_kernels.launch.compile import check_plan, map_argument
from blockdiag.triton_kernels.launch.generated import function_of
from blockdiag.triton_kernels.launch.plan import (
    Constexpr,
    Descriptor,
    KernelSpec,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
)

# The target if none is given. It affects which configuration a spec plans, not the results.
DEFAULT_TARGET = Target(arch=90, num_sms=4)

_POISON_BYTE = 0xA5
_ALIGNMENT = 128
_SCALAR_TYPES = {"i1": np.bool_, "i32": np.int32, "i64": np.int64, "fp32": np.float32}

# Allows one launch at a time: the interpreter replaces methods of Triton's tensor type while it runs.
_lock = threading.RLock()


def interpret(spec: KernelSpec, *arrays: np.ndarray, target: Target | None = None) -> tuple[np.ndarray, ...]:
    """Run the kernel of `spec` over numpy arrays and return its outputs.

    Args:
        spec: the launch; its plan is made for `target`.
        *arrays: one array for each of `spec.inputs`; bfloat16 and float8 arrays have ml_dtypes types. They are never
            modified.
        target: the target whose plan is interpreted. None: sm_90 with 4 multiprocessors, so that persistent loops run
            several iterations.

    Returns:
        One array for each of `spec.outputs`.

    Raises:
        ValueError: when an array does not match its spec, or the plan does not describe its kernel.
        IndexError: when the kernel reads outside its arrays, or writes outside its outputs.
        NotImplementedError: for Gluon kernels.
    """
    return interpret_plan(spec.plan(target or DEFAULT_TARGET), *arrays)


def interpret_plan(plan: LaunchPlan, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Run one launch plan; see `interpret`."""
    from blockdiag.interop.interpreter import language

    check_plan(plan)
    if plan.kernel.is_gluon():
        raise NotImplementedError(
            f"kernel {plan.name!r} is written in Gluon, whose layouts exist on a GPU only; interpret its Triton "
            "counterpart"
        )
    inputs = _matching_inputs(plan, arrays)
    outputs = _fresh_outputs(plan, inputs)
    memory = language.Memory()
    for index, array in enumerate(inputs):
        memory.add(f"input {index}", array, is_writable=False)
    for index, array in enumerate(outputs):
        memory.add(f"output {index}", array, is_writable=True)
    session = language.Session(plan.grid, memory)
    with _lock, language.lent_to(session), np.errstate(all="ignore"):
        kernel = session.interpreted(function_of(plan.kernel))
        arguments = {
            name: map_argument(lambda x: _argument(session, plan, x, inputs, outputs), argument)
            for name, argument in plan.arguments.items()
        }
        for program in itertools.product(*map(range, plan.grid)):
            session.builder.set_grid_idx(*program)
            kernel(**arguments)
    return tuple(outputs)


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a dtype name, from ml_dtypes if numpy has none."""
    extended = getattr(ml_dtypes, name, None)
    return np.dtype(name if extended is None else extended)


def _matching_inputs(plan: LaunchPlan, arrays: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    if len(arrays) != len(plan.inputs):
        raise ValueError(f"kernel {plan.name!r} takes {len(plan.inputs)} arrays, got {len(arrays)}")
    inputs = []
    for position, (array, spec) in enumerate(zip(arrays, plan.inputs, strict=True)):
        if array.shape != spec.shape or array.dtype.name != spec.dtype:
            raise ValueError(
                f"kernel {plan.name!r}: array {position} must be {spec.dtype}{list(spec.shape)}, "
                f"got {array.dtype.name}{list(array.shape)}"
            )
        inputs.append(_aligned_like(array))
    return inputs


def _fresh_outputs(plan: LaunchPlan, inputs: list[np.ndarray]) -> list[np.ndarray]:
    outputs = []
    sources = {output: source for source, output in plan.aliases}
    for index, spec in enumerate(plan.outputs):
        output = _aligned_empty(spec.shape, numpy_dtype(spec.dtype))
        if index in sources:
            output[...] = inputs[sources[index]]
            # The kernel may access the shared buffer through its input, so the input must be the written array, too.
            inputs[sources[index]] = output
        elif output.dtype == np.bool_:
            output[...] = True
        elif output.dtype.kind in "iu":
            output.view(np.uint8)[...] = _POISON_BYTE
        else:
            output[...] = np.nan
        outputs.append(output)
    return outputs


def _aligned_like(array: np.ndarray) -> np.ndarray:
    if array.flags.c_contiguous and array.ctypes.data % 16 == 0:
        return array
    copy = _aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _argument(
    session: Any, plan: LaunchPlan, argument: Any, inputs: list[np.ndarray], outputs: list[np.ndarray]
) -> Any:
    match argument:
        case Constexpr():
            return argument.value
        case Scalar():
            return session.scalar(np.array([argument.value], _SCALAR_TYPES[argument.dtype]), argument.dtype)
        case Pointer() | Descriptor():
            is_input = argument.role == "input"
            array = (inputs if is_input else outputs)[argument.index]
            spec = (plan.inputs if is_input else plan.outputs)[argument.index]
            pointer = session.pointer(array.ctypes.data, ELEMENT_TYPES[spec.dtype].triton)
            if isinstance(argument, Pointer):
                return pointer
            return session.descriptor(pointer, argument.shape, argument.strides, argument.block_shape)
    raise ValueError(f"kernel {plan.name!r}: {argument!r} is not a plan argument")
