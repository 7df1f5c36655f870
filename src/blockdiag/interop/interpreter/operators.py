"""Fast paths for operators of interpreted tensors whose operands need no conversion: numpy is called directly.

Triton's language checks the types of every operand, broadcasts it and looks up the operation in the builder, which
takes about sixty microseconds of Python. Most operators of a kernel have operands of one type, or a tensor and a
number. This module applies these in a few microseconds and leaves all other operands to the language.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl

from blockdiag.interop.interpreter.builder import TensorHandle

_INTEGERS = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
_FLOATS = {"fp32": np.dtype(np.float32)}
_NUMBERS = {**_INTEGERS, **_FLOATS}
_BITS = {**_INTEGERS, "int1": np.dtype(np.bool_)}
_LANGUAGE_TYPES = {
    np.dtype(np.bool_): tl.int1,
    np.dtype(np.int32): tl.int32,
    np.dtype(np.int64): tl.int64,
    np.dtype(np.float32): tl.float32,
}

# Operator, numpy function, and the element types of the fast path. Integer division needs another function.
_OPERATORS: tuple[tuple[str, Callable[..., Any], dict[str, np.dtype]], ...] = (
    ("add", np.add, _NUMBERS),
    ("sub", np.subtract, _NUMBERS),
    ("mul", np.multiply, _NUMBERS),
    ("truediv", np.divide, _FLOATS),
    ("and", np.bitwise_and, _BITS),
    ("or", np.bitwise_or, _BITS),
)
_COMPARISONS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("lt", np.less),
    ("le", np.less_equal),
    ("gt", np.greater),
    ("ge", np.greater_equal),
    ("eq", np.equal),
    ("ne", np.not_equal),
)


def operators(semantic: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the replacement of each operator of `tl.tensor`.

    Args:
        semantic: semantic object of the session whose tensors the operators are applied to.
        methods: the language's operators by name, used for all other operands.
    """
    for name, function, types in _OPERATORS:
        name, reflected = f"__{name}__", f"__r{name}__"
        method = methods[name]
        if function is np.add:
            method = _adding_to_pointers(semantic, method)
        yield name, _operator(semantic, method, function, types)
        yield reflected, _operator(semantic, methods[reflected], _reflected(function), types)
    for name, function in _COMPARISONS:
        name = f"__{name}__"
        yield name, _operator(semantic, methods[name], function, _NUMBERS)
    yield "__getitem__", _index(semantic, methods["__getitem__"])


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda right, left: function(left, right)


def _operator(
    semantic: Any, method: Callable[..., Any], function: Callable[..., Any], types: dict[str, np.dtype]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(left: Any, right: Any, _semantic: Any = None) -> Any:
        if _semantic is None or _semantic is semantic:
            numbers = _operand(left, right, types)
            if numbers is not None:
                is_block = _is_block(left) or _is_block(right)
                return _tensor(function(left.handle.data, numbers), is_block)
        return method(left, right, _semantic=_semantic)

    return call


def _operand(left: Any, right: Any, types: dict[str, np.dtype]) -> Any:
    """Return the elements of the right operand if the language converts them as numpy does, else None."""
    dtype = types.get(left.dtype.name)
    # The builder stores some integer results in a type of another signedness or width.
    if dtype is None or left.handle.data.dtype != dtype:
        return None
    if isinstance(right, tl.tensor):
        other = types.get(right.dtype.name)
        # Operations on integers of two widths give the wider type in both numpy and Triton.
        is_like = other is dtype or (other is not None and dtype.kind == other.kind == "i")
        return right.handle.data if is_like and right.handle.data.dtype == other else None
    number = right.value if isinstance(right, tl.constexpr) else right
    if type(number) is int and -(2**31) <= number < 2**31 and dtype.kind in "if":
        return dtype.type(number)
    # The language represents numbers beyond float32's range in float64.
    is_float = type(number) is float and dtype.kind == "f"
    return dtype.type(number) if is_float and (number == 0 or 2**-126 <= abs(number) < 2**127) else None


def _adding_to_pointers(semantic: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(left: Any, right: Any, _semantic: Any = None) -> Any:
        is_ours = (_semantic is None or _semantic is semantic) and left.dtype.is_ptr() and isinstance(right, tl.tensor)
        if is_ours and right.dtype.name in _INTEGERS:
            size = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
            data = left.handle.data + size * right.handle.data.astype(np.uint64)
            is_block = _is_block(left) or _is_block(right)
            return tl.tensor(TensorHandle(data, left.dtype), _type(left.dtype, data.shape, is_block))
        return method(left, right, _semantic=_semantic)

    return call


def _index(semantic: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fast path for subscripts that add axes, the only ones that the language supports."""

    @functools.wraps(method)
    def call(tensor: Any, places: Any, _semantic: Any = None) -> Any:
        is_ours = (_semantic is None or _semantic is semantic) and tensor.type.is_block() and type(places) is tuple
        if is_ours and all(place is None or place == slice(None) for place in places):
            data = tensor.handle.data[places]
            return tl.tensor(TensorHandle(data, tensor.dtype), _type(tensor.dtype, data.shape, True))
        return method(tensor, places, _semantic=_semantic)

    return call


def _is_block(operand: Any) -> bool:
    kind: Any = operand.type if isinstance(operand, tl.tensor) else None
    return kind is not None and kind.is_block()


def _tensor(data: Any, is_block: bool) -> Any:
    dtype = _LANGUAGE_TYPES[data.dtype]
    return tl.tensor(TensorHandle(data, dtype), _type(dtype, data.shape, is_block))


_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _type(dtype: Any, shape: tuple[int, ...], is_block: bool) -> Any:
    if not is_block:
        return dtype
    key = (dtype.name, shape)
    if key not in _block_types:
        _block_types[key] = tl.block_type(dtype, list(shape))
    return _block_types[key]
