"""Printer from the equations of a tile program to lines of Triton.

Tiles are values with two axes; a value with one element is a number. Products accumulate in float32. If only one
operand of a product was read from memory, the computed operand is cast to its dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, body_of, tile_jaxpr
from blockdiag.fusion.lowering.decompositions import SPELLED, is_spelled

# The head of a generated module has this line. PTX's `max.f32` drops NaN operands. XLA propagates them, and so does
# `max.NaN.f32`.
NAN_LINE = "PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)"
TRITON_HEAD = f"import triton\nimport triton.language as tl\n\n{NAN_LINE}\n\n\n"

_BINARY = {
    "add": "+", "add_any": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|", "xor": "^", "rem": "%", "shift_left": "<<", "shift_right_arithmetic": ">>",
    "shift_right_logical": ">>",
}  # fmt: skip
# 1 / (1 + 2**x), to about 2^-21. An inverse square root is one instruction, and a division eight. `exp2` takes fewer
# instructions than `exp`, because it rounds subnormal results to 0.
_SIGMOID = "tl.rsqrt(1.0 + tl.exp2({0})) * tl.rsqrt(1.0 + tl.exp2({0}))"
_CALLS = {
    "exp": "tl.exp({})", "exp2": "tl.exp2({})", "log": "tl.log({})", "sqrt": "tl.sqrt({})", "rsqrt": "tl.rsqrt({})",
    "abs": "tl.abs({})", "floor": "tl.floor({})", "ceil": "tl.ceil({})", "sin": "tl.sin({})", "cos": "tl.cos({})",
    "erf": "tl.erf({})",
    "max": "tl.maximum({}, {}, propagate_nan=PROPAGATE_NAN)",
    "min": "tl.minimum({}, {}, propagate_nan=PROPAGATE_NAN)",
    "neg": "-{}", "square": "{0} * {0}", "one_minus_square": "1.0 - {0} * {0}",
    "logistic": _SIGMOID.format("-1.4426950408889634 * {0}"),
    "tanh": f"1.0 - 2.0 * {_SIGMOID.format('2.8853900817779268 * {0}')}",
    "clamp": "tl.minimum(tl.maximum({1}, {0}, propagate_nan=PROPAGATE_NAN), {2}, propagate_nan=PROPAGATE_NAN)",
    "sign": "tl.where({0} == {0}, ({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype), {0})",
    "stop_gradient": "{}", "copy": "{}",
    "select_n": "tl.where({0}, {2}, {1})", "log2": "tl.log2({})", "transpose": "tl.trans({})",
}  # fmt: skip
# Primitives whose result may leave the range of a narrow integer dtype.
_OVERFLOWING = frozenset({"add", "sub", "mul", "neg", "not", "shift_left", "convert_element_type", "integer_pow"})
# Powers up to this are printed as plain products; higher ones use repeated squaring.
_FEW_FACTORS = 8
_KINDS = {"f": "tl.float32", "i": "tl.int32", "b": "tl.int1", "u": "tl.uint32", "V": "tl.float32"}


class NotPrintable(Exception):
    """Triton lacks an operation for an equation."""


@dataclass(frozen=True)
class Value:
    """Named value in the kernel.

    Attributes:
        name: an expression without operators.
        shape: the shape of the tile.
        is_read: whether it was read from memory and so may have a 16-bit dtype.
        line: the name of the same value with one axis, if it is one feature of each row.
        feature: for a matrix with features, returns the expression that reads one feature as a vector. The matrix as a
            whole may then not be loaded.
    """

    name: str
    shape: tuple[int, ...]
    is_read: bool = False
    line: str | None = None
    feature: Callable[[str], str] | None = field(default=None, compare=False)

    @property
    def is_number(self) -> bool:
        """Whether it has one element."""
        return math.prod(self.shape) == 1


class Printer:
    """Printer of equations.

    Args:
        emit: takes a line of source.
        prefix: the prefix of new names.
        precision: Triton's `input_precision` of products.
    """

    def __init__(self, emit: Callable[[str], None], prefix: str, precision: str) -> None:
        self._emit = emit
        self._prefix = prefix
        self._precision = precision
        self._count = 0
        self._is_in_loop = False

    def run(self, jaxpr: core.ClosedJaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Print a tile program.

        Returns:
            The values of its results.

        Raises:
            NotPrintable: the message names the primitive.
        """
        known: dict[Any, Value] = dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            if np.size(const) != 1:
                raise NotPrintable("an array of numbers")
            known[var] = Value(literal(const), ())
        for equation in jaxpr.jaxpr.eqns:
            given = [self._operand(known, x) for x in equation.invars]
            inner = body_of(equation)
            if equation.primitive.name == "scan":
                results = self._loop(equation, given)
            else:
                results = [self._equation(equation, given)] if inner is None else self.run(inner, given)
            known |= dict(zip(equation.outvars, results, strict=True))
        return [self._operand(known, x) for x in jaxpr.jaxpr.outvars]

    def name(self, expression: str, shape: tuple[int, ...]) -> Value:
        """Print an assignment of an expression to a new name, and return the named value."""
        self._count += 1
        name = f"{self._prefix}{self._count}"
        self._emit(f"{name} = {expression}")
        return Value(name, shape)

    @staticmethod
    def _operand(known: dict[Any, Value], operand: Any) -> Value:
        return Value(literal(operand.val), ()) if isinstance(operand, core.Literal) else known[operand]

    def _loop(self, equation: core.JaxprEqn, given: list[Value]) -> list[Value]:
        """Print a scan that has only constants and a carry, which comes last among its operands."""
        body: core.ClosedJaxpr = equation.params["jaxpr"]
        outer, inner = (*equation.invars, *equation.outvars), (*body.jaxpr.invars, *body.jaxpr.outvars)
        if any(aval_of(x).shape != aval_of(y).shape for x, y in zip(outer, inner, strict=True)):
            raise NotPrintable("a loop over an array")
        fixed, carried = given[: -len(equation.outvars)], given[-len(equation.outvars) :]
        carried = [self.name(x.name, x.shape) for x in carried]
        emit, is_in_loop = self._emit, self._is_in_loop
        emit(f"for _ in range({equation.params['length']}):  # each feature")
        self._emit, self._is_in_loop = lambda line: emit("    " + line), True
        results = self.run(body, [*fixed, *carried])
        for old, new in zip(carried, results, strict=True):
            self._emit(f"{old.name} = {new.name}")
        self._emit, self._is_in_loop = emit, is_in_loop
        return carried

    def _equation(self, equation: core.JaxprEqn, given: list[Value]) -> Value:
        result, dtype = self._printed(equation, given), np.dtype(aval_of(equation.outvars[0]).dtype)
        if dtype.kind in "iu" and dtype.itemsize < 4 and equation.primitive.name in _OVERFLOWING:
            # Registers are wider than the dtype, so wrap-around must be printed.
            spare = 32 - 8 * dtype.itemsize
            within = f"& {np.iinfo(dtype).max}" if dtype.kind == "u" else f"<< {spare} >> {spare}"
            return self.name(f"{result.name} {within}", result.shape)
        return result

    def _printed(self, equation: core.JaxprEqn, given: list[Value]) -> Value:
        name, shape = equation.primitive.name, tuple(aval_of(equation.outvars[0]).shape)
        dtype = np.dtype(aval_of(equation.outvars[0]).dtype)
        params = equation.params
        match name:
            case "div":
                sign = "/" if dtype.kind in "fV" else "//"
                return self.name(f"{given[0].name} {sign} {given[1].name}", shape)
            case "convert_element_type":
                source = np.dtype(aval_of(equation.invars[0]).dtype)
                if source.kind in "fV" and dtype.kind in "fV":
                    return Value(given[0].name, shape, given[0].is_read)
                if given[0].name.replace(".", "").replace("-", "").isdigit():
                    return Value(literal(np.asarray(float(given[0].name)).astype(dtype)), shape)
                return self.name(f"{given[0].name}.to({_KINDS[dtype.kind]})", shape)
            case "bitcast_convert_type":
                return self.name(_bits_as(given[0].name, np.dtype(aval_of(equation.invars[0]).dtype), dtype), shape)
            case "shift_right_logical" if dtype.kind == "i":
                if dtype.itemsize < 4:
                    raise NotPrintable(f"`{name}` of {dtype}")
                bits = f"({given[0].name}.to(tl.uint32, bitcast=True) >> {given[1].name})"
                return self.name(f"{bits}.to(tl.int32, bitcast=True)", shape)
            case "shift_right_arithmetic" if dtype.kind == "u":
                raise NotPrintable(f"`{name}` of {dtype}")
            case "not":
                return self.name(f"{given[0].name} == 0" if dtype.kind == "b" else f"~{given[0].name}", shape)
            case "select_n" if np.dtype(aval_of(equation.invars[0]).dtype).kind != "b":
                which, *cases = (x.name for x in given)
                expression = cases.pop()
                for number in reversed(range(len(cases))):
                    expression = f"tl.where({which} == {number}, {cases[number]}, {expression})"
                return self.name(expression, shape)
            case "integer_pow":
                return self._power(given[0], params["y"], shape)
            case "broadcast_in_dim" | "reshape" | "squeeze":
                return self._reshaped(given[0], shape, dtype, params.get("broadcast_dimensions"))
            case "iota" if dtype.kind in "iu" and sum(size > 1 for size in shape) == 1:
                axis = next(axis for axis, size in enumerate(shape) if size > 1)
                index = ", ".join(":" if i == axis else "None" for i in range(len(shape)))
                return self.name(f"tl.arange(0, {shape[axis]})[{index}]", shape)
            case "dynamic_slice" if given[0].feature is not None:
                line = self.name(given[0].feature(given[2].name), shape)
                return line if line.is_number else Value(f"{line.name}[:, None]", shape, line=line.name)
            case "reduce_sum":
                return self._summed(given[0], tuple(params["axes"]), shape)
            case "dot_general":
                return self._product(given, params["dimension_numbers"], shape)
        if name in _BINARY:
            return self.name(f"{given[0].name} {_BINARY[name]} {given[1].name}", shape)
        if name in _CALLS:
            return self.name(_CALLS[name].format(*(x.name for x in given)), shape)
        if is_spelled(name, aval_of(equation.invars[0]).dtype):
            return self._spelled(equation, given)
        raise NotPrintable(f"`{name}`, which Triton lacks")

    def _spelled(self, equation: core.JaxprEqn, given: list[Value]) -> Value:
        """Print the decomposition of an operation, with operands broadcast to its shape."""
        shape = aval_of(equation.outvars[0]).shape

        def of_tiles(*operands: Any) -> Any:
            whole = [x if x.shape == shape else lax.broadcast_in_dim(x, shape, ()) for x in operands]
            return SPELLED[equation.primitive.name](*whole, **equation.params)

        avals = [jax.ShapeDtypeStruct(aval_of(x).shape, aval_of(x).dtype) for x in equation.invars]
        return self.run(tile_jaxpr(of_tiles, *avals), given)[0]

    def _power(self, base: Value, exponent: int, shape: tuple[int, ...]) -> Value:
        if exponent == 0:
            raise NotPrintable("the power 0")
        factors, square, left = [], base, abs(exponent)
        if left <= _FEW_FACTORS:
            factors, left = [base.name] * left, 0
        while left:
            if left % 2:
                factors.append(square.name)
            left //= 2
            if left:
                square = self.name(f"{square.name} * {square.name}", shape)
        product = " * ".join(factors)
        return self.name(product if exponent > 0 else f"1.0 / ({product})", shape)

    def _reshaped(self, given: Value, shape: tuple[int, ...], dtype: Any, axes: Any) -> Value:
        """Print a reshape or broadcast that keeps the order of elements."""
        if given.line is not None and len(shape) == 1:
            return Value(given.line, shape)
        if math.prod(shape) == 1:
            return Value(given.name, shape, given.is_read)
        if given.is_number:
            return self.name(
                f"tl.full({list(shape)}, 0, {_KINDS[dtype.kind]}) + {given.name}"
                if dtype.kind != "b"
                else f"tl.full({list(shape)}, 1, tl.int1) & {given.name}",
                shape,
            )
        if len(given.shape) == len(shape) == 2:
            return given if given.shape == shape else self.name(f"tl.broadcast_to({given.name}, {list(shape)})", shape)
        if len(given.shape) == 1 and len(shape) == 2:
            axis = next(iter(axes)) if axes is not None else shape.index(given.shape[0])
            column = self.name(f"{given.name}[:, None]" if axis == 0 else f"{given.name}[None, :]", shape)
            return (
                column
                if given.shape[0] == math.prod(shape)
                else self.name(f"tl.broadcast_to({column.name}, {list(shape)})", shape)
            )
        if len(shape) == 1 and len(given.shape) == 2:
            return self.name(f"tl.sum({given.name}, {given.shape.index(1)})", shape)
        raise NotPrintable(f"a reshape from {given.shape} to {shape}")

    def _summed(self, given: Value, axes: tuple[int, ...], shape: tuple[int, ...]) -> Value:
        axes = tuple(axis for axis in axes if given.shape[axis] != 1)
        if given.is_number or not axes:
            if len(given.shape) == 2 and len(shape) == 1 and math.prod(shape) > 1:
                return self.name(f"tl.sum({given.name}, {given.shape.index(1)})", shape)
            return Value(given.name, shape)
        expression = given.name
        if self._is_in_loop and len(axes) == len(given.shape) == 2:
            # On Blackwell, Triton's compiler fails on a sum of a sum in a nested loop.
            return self.name(f"tl.sum({expression})", shape)
        for axis in sorted(axes, reverse=True):
            expression = f"tl.sum({expression}, {axis})"
        if math.prod(shape) > 1 and len(given.shape) - len(axes) != len(shape):
            raise NotPrintable("a sum that also removes an axis of size 1")
        if math.prod(shape) == 1 and len(axes) == 1 and len(given.shape) == 2:
            # The other axis has one element.
            expression = f"tl.sum({expression}, 0)"
        return self.name(expression, shape)

    def _product(self, given: list[Value], numbers: Any, shape: tuple[int, ...]) -> Value:
        (axes, shared) = numbers
        if shared[0] or len(axes[0]) != 1:
            raise NotPrintable("a product that is not of two matrices")
        left = given[0].name if axes[0][0] == 1 else f"tl.trans({given[0].name})"
        right = given[1].name if axes[1][0] == 0 else f"tl.trans({given[1].name})"
        if given[0].is_read and not given[1].is_read:
            right = f"({right}).to({given[0].name}.dtype)"
        if given[1].is_read and not given[0].is_read:
            left = f"({left}).to({given[1].name}.dtype)"
        return self.name(f'tl.dot({left}, {right}, input_precision="{self._precision}")', shape)


def _bits_as(name: str, given: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Return the expression that reinterprets integer bits as another dtype of the same width.

    16-bit values are held in wider registers.
    """
    if wanted.name == "float32" or (wanted.kind in "iu" and wanted.itemsize == 4):
        return f"{name}.to({_KINDS[wanted.kind]}, bitcast=True)"
    if wanted.name == "bfloat16" and given.kind == "u":
        return f"({name} << 16).to(tl.float32, bitcast=True)"
    if wanted.name == "float16" and given.kind == "u":
        return f"{name}.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)"
    raise NotPrintable(f"the bits of {given} as {wanted}")


def literal(value: Any) -> str:
    """Return a number as Triton source."""
    array = np.asarray(value)
    if array.dtype.kind == "b":
        return "True" if array.item() else "False"
    number = array.astype(np.float64).item() if array.dtype.kind in "fV" else array.item()
    if isinstance(number, float) and not math.isfinite(number):
        return 'float("nan")' if math.isnan(number) else f'float("{"-" if number < 0 else ""}inf")'
    return repr(number) if number >= 0 else f"({number!r})"
