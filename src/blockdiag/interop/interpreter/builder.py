"""Triton's numpy builder, extended by GPU rounding, bfloat16 and float8 arithmetic, and bounds-checked memory."""

import bisect
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl

from blockdiag.triton_kernels.launch import private_triton

_PARTS = private_triton.interpreter_parts()
TensorHandle = _PARTS.handle

# Triton's interpreter stores types that numpy lacks as unsigned integers of the same width.
_EXTENDED = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_NUMPY = {
    tl.int1: np.dtype(np.bool_),
    tl.int8: np.dtype(np.int8),
    tl.int16: np.dtype(np.int16),
    tl.int32: np.dtype(np.int32),
    tl.int64: np.dtype(np.int64),
    tl.uint8: np.dtype(np.uint8),
    tl.uint16: np.dtype(np.uint16),
    tl.uint32: np.dtype(np.uint32),
    tl.uint64: np.dtype(np.uint64),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
    **_EXTENDED,
}
_STORAGE = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
# Keyed by name, because hashing Triton's types is slow.
_EXTENDED_BY_NAME = {dtype.name: numbers for dtype, numbers in _EXTENDED.items()}
_NUMPY_BY_NAME = {dtype.name: numbers for dtype, numbers in _NUMPY.items()}


class Memory:
    """Address ranges of the arrays of a launch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[tuple[int, int, bool, str]] = []

    def add(self, name: str, array: np.ndarray, *, is_writable: bool) -> None:
        """Register an array as readable, or also as writable. Adding it again replaces its registration."""
        start = array.ctypes.data
        if array.nbytes == 0:
            return
        position = bisect.bisect_left(self._starts, start)
        if position < len(self._starts) and self._starts[position] == start:
            del self._starts[position], self._regions[position]
        self._starts.insert(position, start)
        self._regions.insert(position, (start, start + array.nbytes, is_writable, name))

    def check(self, addresses: np.ndarray, itemsize: int, *, is_store: bool, program: tuple[int, int, int]) -> None:
        """Raise IndexError unless every element lies inside one array, which must be writable for a store."""
        if not addresses.size or self._holds(int(addresses.min()), int(addresses.max()) + itemsize, is_store):
            return
        # The block may span several arrays, so each element is checked.
        for address in addresses.reshape(-1).tolist():
            if not self._holds(address, address + itemsize, is_store):
                raise IndexError(
                    f"program {program} {'writes' if is_store else 'reads'} {itemsize} bytes {self._describe(address)}"
                )

    def _holds(self, start: int, end: int, is_store: bool) -> bool:
        position = bisect.bisect_right(self._starts, start) - 1
        if position < 0:
            return False
        _, region_end, is_writable, _ = self._regions[position]
        return end <= region_end and (is_writable or not is_store)

    def _describe(self, address: int) -> str:
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0:
            return "before every array of the launch"
        start, end, _, name = self._regions[position]
        if address < end:
            return f"at offset {address - start} of {name}, which is read-only"
        return f"{address - end} bytes after {name}"


class Builder(_PARTS.builder):
    """Builder that computes with numpy instead of emitting MLIR, one program at a time."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        # Otherwise Triton's language recomputes every integer sum and product in a wider type, for an assertion that
        # exists only with `debug`.
        self.options = dataclasses.replace(self.options, sanitize_overflow=False)
        self._memory = memory

    # Memory

    # The cache-control arguments differ between Triton versions, so they are passed through unchanged.

    def create_masked_load(self, ptrs: Any, mask: Any, *others: Any, **options: Any) -> TensorHandle:
        self._check(ptrs, mask, is_store=False)
        return super().create_masked_load(ptrs, mask, *others, **options)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *others: Any, **options: Any) -> Any:
        self._check(ptrs, mask, is_store=True)
        return super().create_masked_store(ptrs, value, mask, *others, **options)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> TensorHandle:
        self._check(ptr, None, is_store=True)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        self._check(ptr, mask, is_store=True)
        return super().create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)

    def _check(self, ptrs: Any, mask: Any, *, is_store: bool) -> None:
        bits = ptrs.get_element_ty().primitive_bitwidth
        addresses = ptrs.data if mask is None else ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        self._memory.check(addresses, max(1, bits // 8), is_store=is_store, program=self.grid_idx)

    # Constants. Triton's own methods build a table of all types for each constant.

    def get_null_value(self, type: Any) -> TensorHandle:
        return TensorHandle(np.zeros(1, _storage(type)), type)

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(
            np.full(tuple(ret_ty.shape), arg.data.reshape(-1)[0], _storage(arg.dtype)), arg.dtype.scalar
        )

    # Arithmetic

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return _converted(src, dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if rounding_mode == _PARTS.rounding_towards_zero:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return _converted(src, dst_type.scalar)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        return _stored(op(values(arg)), arg.dtype.scalar)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        return _stored(op(values(lhs), values(rhs)), lhs.dtype.scalar)

    def ternary_op(self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any) -> TensorHandle:
        return _stored(op(values(lhs), values(rhs), values(other)), other.dtype.scalar)

    # NaN handling follows PTX's `max.f32` and `max.NaN.f32`. Of a NaN and a number, `tl.maximum` returns the number by
    # default. Triton's own builder always propagates NaN, so a kernel that loses a NaN on a GPU would keep it there.

    # pyrefly: ignore[bad-override-param-name]
    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    # pyrefly: ignore[bad-override-param-name]
    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    # pyrefly: ignore[bad-override-param-name]
    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        propagates = propagate_nans == tl.PropagateNan.ALL
        larger, smaller = (np.maximum, np.minimum) if propagates else (np.fmax, np.fmin)
        return self.ternary_op(arg, lo, hi, lambda x, least, most: smaller(larger(x, least), most))

    # pyrefly: ignore[bad-override-param-name]
    def create_select(self, cond: TensorHandle, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        # Works on the stored bits: `np.where` only moves them and need not know the types.
        return TensorHandle(np.where(cond.data, lhs.data, rhs.data), rhs.dtype.scalar)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        # Rounds once, like the instruction: products of float32 are exact in float64.
        wide = values(x).astype(np.float64) * values(y).astype(np.float64) + values(z).astype(np.float64)
        return _stored(wide, z.dtype.scalar)

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        return _stored(1 / np.sqrt(values(arg)), arg.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> TensorHandle:
        wide = d.data.dtype if d.data.dtype.itemsize >= 4 else np.dtype(np.float32)
        product = np.matmul(values(a).astype(wide, copy=False), values(b).astype(wide, copy=False))
        return TensorHandle((product + d.data).astype(d.data.dtype, copy=False), d.dtype.scalar)


def _storage(dtype: Any) -> np.dtype:
    """Return the numpy type in which Triton's interpreter stores elements."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.uint64)
    numbers = _NUMPY_BY_NAME[scalar.name]
    return _STORAGE[numbers.itemsize] if scalar.name in _EXTENDED_BY_NAME else numbers


def values(handle: TensorHandle) -> np.ndarray:
    """Return the elements of a handle as an array that numpy can compute with."""
    extended = _EXTENDED_BY_NAME.get(handle.dtype.scalar.name)
    if extended is None or handle.data.dtype == np.bool_:
        return handle.data
    return handle.data.view(extended)


def handle_of(numbers: np.ndarray, dtype: Any) -> TensorHandle:
    """Return a handle of the numbers, rounded to `dtype`."""
    return _stored(numbers, dtype)


def _stored(numbers: np.ndarray, dtype: Any) -> TensorHandle:
    if numbers.dtype == np.bool_:
        return TensorHandle(numbers, tl.int1)
    wanted = _NUMPY_BY_NAME.get(dtype.name)
    if wanted is not None and numbers.dtype != wanted:
        # Signedness follows the operands, as in Triton's builder; width and kind follow the type.
        if numbers.dtype.kind in "iu" and wanted.kind in "iu" and numbers.dtype.itemsize <= wanted.itemsize:
            return TensorHandle(numbers, dtype)
        numbers = numbers.astype(wanted)
    if dtype.name in _EXTENDED_BY_NAME:
        numbers = numbers.view(_STORAGE[numbers.dtype.itemsize])
    return TensorHandle(numbers, dtype)


def _converted(src: TensorHandle, dtype: Any) -> TensorHandle:
    numbers = values(src)
    wanted = _NUMPY[dtype]
    if dtype in _EXTENDED or src.dtype.scalar in _EXTENDED:
        # ml_dtypes types convert to and from float32, with rounding to nearest even.
        numbers = numbers.astype(np.float32, copy=False)
    if dtype in _EXTENDED and wanted.itemsize == 1:
        # Conversions to float8 saturate on the GPU; ml_dtypes would return NaN or infinity.
        largest = float(ml_dtypes.finfo(wanted).max)
        numbers = np.clip(numbers, -largest, largest)
    numbers = numbers.astype(wanted)
    if dtype in _EXTENDED:
        numbers = numbers.view(_STORAGE[wanted.itemsize])
    return TensorHandle(numbers, dtype)
