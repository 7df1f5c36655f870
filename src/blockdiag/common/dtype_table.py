"""Table of array dtypes: their names and sizes, and the operations and architectures that support them.

Imports neither jax nor torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """A dtype of array elements.

    Attributes:
        name: its name in NumPy and JAX.
        bytes: size of one element.
        triton: its name in the signatures of Triton kernels.
        first_arch: ten times the first compute capability that converts to and from it; 0 for all.
    """

    name: str
    bytes: int
    triton: str
    first_arch: int = 0


@dataclass(frozen=True, slots=True)
class EightBitFloat:
    """The finite range of an 8-bit floating-point dtype.

    Attributes:
        largest: the largest finite number, at which rounding saturates.
        fraction_bits: explicit mantissa bits of a normal number.
        smallest_normal: the smallest positive normal number.
    """

    largest: float
    fraction_bits: int
    smallest_normal: float


@dataclass(frozen=True, slots=True)
class EightBitInteger:
    """The range of an 8-bit integer dtype.

    Attributes:
        largest: the largest magnitude that rounding gives. It is the same for both signs.
    """

    largest: float


ELEMENT_TYPES = {
    x.name: x
    for x in (
        ElementType("bfloat16", 2, "bf16"),
        ElementType("float16", 2, "fp16"),
        ElementType("float32", 4, "fp32"),
        ElementType("float64", 8, "fp64"),
        ElementType("float8_e4m3fn", 1, "fp8e4nv", first_arch=89),
        ElementType("float8_e5m2", 1, "fp8e5"),
        ElementType("bool", 1, "i1"),
        ElementType("int8", 1, "i8"),
        ElementType("int16", 2, "i16"),
        ElementType("int32", 4, "i32"),
        ElementType("int64", 8, "i64"),
        ElementType("uint8", 1, "u8"),
        ElementType("uint16", 2, "u16"),
        ElementType("uint32", 4, "u32"),
        ElementType("uint64", 8, "u64"),
    )
}
"""Element types that launch plans may use, by name."""

SIXTEEN_BIT_FLOATS = ("bfloat16", "float16")
"""Operand dtypes of kernels that are written for one architecture: Gluon on Hopper, and Mosaic GPU."""
KERNEL_FLOATS = (*SIXTEEN_BIT_FLOATS, "float32")
"""Operand dtypes of every operation's Triton kernels."""
FLOATS = (*KERNEL_FLOATS, "float64")
"""Operand dtypes of every operation in "reference" and "xla"."""

EIGHT_BIT_FLOATS = {
    "float8_e4m3fn": EightBitFloat(448.0, 3, 2.0**-6),
    "float8_e5m2": EightBitFloat(57344.0, 2, 2.0**-14),
}
"""Dtypes of paged caches, of queries to them, and of arrays in fused functions, in every implementation."""
EIGHT_BIT_INTEGERS = {"int8": EightBitInteger(127.0)}
"""Dtypes of paged caches beside wider queries, in every implementation. Their elements are multiples of a scale."""
EIGHT_BIT_DTYPES = EIGHT_BIT_FLOATS | EIGHT_BIT_INTEGERS
"""Every 8-bit dtype of paged caches."""


def lacking_dtype(arch: int, *dtypes: str) -> str | None:
    """Return the first of these dtypes that an architecture cannot convert, or None if it converts all."""
    return next((dtype for dtype in dtypes if arch < ELEMENT_TYPES[dtype].first_arch), None)
