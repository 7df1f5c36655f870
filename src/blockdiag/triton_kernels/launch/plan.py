"""The launch plan: one description of a Triton kernel launch for all consumers.

A plan names the kernel, its grid and the argument for every kernel parameter. It holds no array and imports neither
jax, torch nor triton. So every consumer (the JAX call, the torch launch, the interpreter, the offline compiler) reads
the same data and launches the same kernel.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Role = Literal["input", "output"]
ScalarType = Literal["i1", "i32", "i64", "fp32"]

# Multiprocessors of the most common GPU of each architecture, for planning without a device.
_USUAL_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 120: 188}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one dense, row-major array.

    Attributes:
        shape: elements along each axis.
        dtype: "bfloat16", "float32", "int32", ...

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import TensorSpec
        >>> TensorSpec((2, 3), "bfloat16")
        TensorSpec(shape=(2, 3), dtype='bfloat16')
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of the GPU that a plan may depend on.

    Attributes:
        arch: compute capability as an integer, 90 for sm_90.
        num_sms: streaming multiprocessors, used to size persistent grids. Results never depend on it.

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import Target
        >>> Target.for_arch(90)
        Target(arch=90, num_sms=132)
    """

    arch: int
    num_sms: int

    @classmethod
    def for_arch(cls, arch: int) -> "Target":
        """Return the most common GPU of an architecture, for offline compilation.

        Args:
            arch: compute capability as an integer: 80, 86, 89, 90, 100, 103 or 120.

        Returns:
            The target.

        Raises:
            ValueError: `arch` is none of these.
        """
        if arch not in _USUAL_MULTIPROCESSORS:
            raise ValueError(
                f"`arch` must be one of {sorted(_USUAL_MULTIPROCESSORS)}, got {arch}; "
                "pass Target(arch, num_sms) for another part"
            )
        return cls(arch, _USUAL_MULTIPROCESSORS[arch])


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer to the first element of an input or output, 16-byte aligned.

    Attributes:
        role: "input" or "output".
        index: of the array among the plan's inputs or outputs.

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import Pointer
        >>> Pointer("input", 0)
        Pointer(role='input', index=0)
    """

    role: Role
    index: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A host-made TMA tensor descriptor over an input or output viewed as a dense row-major array of `shape`.

    Attributes:
        role: "input" or "output".
        index: of the array among the plan's inputs or outputs.
        shape: elements along each axis of the array as it is viewed.
        block_shape: elements along each axis of the tile that one load or store moves.
        layout: the shared-memory layout object of a Gluon kernel's descriptor; None for a Triton kernel's.

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import Descriptor
        >>> Descriptor("input", 0, shape=(128, 64), block_shape=(32, 64)).strides
        (64, 1)
    """

    role: Role
    index: int
    shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides in elements."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A run-time scalar with an explicit type, because an untyped Python float would make a kernel compute in fp64.

    Attributes:
        value: the number. Scalars are equal if their bits are equal.
        dtype: "i1", "i32", "i64" or "fp32".

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import Scalar
        >>> Scalar(0.0, "fp32") == Scalar(-0.0, "fp32")
        False
    """

    value: int | float | bool
    dtype: ScalarType

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scalar) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, Any]:
        # Compare bits: 0.0 and -0.0 are different arguments, and a NaN equals itself.
        return self.dtype, float(self.value).hex() if self.dtype == "fp32" else int(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Constexpr:
    """A compile-time value.

    Values of different types are unequal, because 1, 1.0 and True compile differently. Floats compare by their bits.
    The fields of a frozen dataclass compare in the same way.

    Triton's cache identifies a value by its `repr`. So every value needs a `repr` that is equal in all processes. A
    kernel reads only the fields of a dataclass: a property may change while the `repr` does not.

    Attributes:
        value: int, float, bool, str, None, a triton dtype, a frozen dataclass of such values, or another hashable value
            that a kernel accepts.

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import Constexpr
        >>> Constexpr(1) == Constexpr(1), Constexpr(1) == Constexpr(True)
        (True, False)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constexpr) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def key(self) -> tuple[str, Any]:
        """Return a hashable key that identifies the value and its type."""
        return _typed(self.value)


def _typed(value: Any) -> tuple[str, Any]:
    name = type(value).__name__
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return name, tuple((x.name, _typed(getattr(value, x.name))) for x in fields)
    return name, value.hex() if isinstance(value, float) else value


type Argument = Pointer | Descriptor | Scalar | Constexpr
type Group = tuple[Argument, ...]
"""A NamedTuple of arguments, which a kernel receives as one parameter and reads by attribute."""


class Leaf(NamedTuple):
    """One argument of a plan.

    Attributes:
        name: the name of the kernel's parameter, followed by the name of the field if the parameter is a group:
            "block_size" or "arrays.query".
        path: the position of the parameter, followed by the position in the group. Triton uses these paths, too.
        argument: the argument.
    """

    name: str
    path: tuple[int, ...]
    argument: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """Options of Triton's compiler.

    Attributes:
        num_warps: warps per program, of 32 threads each.
        num_stages: loop iterations whose loads are in flight at once.
        num_ctas: thread blocks in the cluster that computes one program.
        maxnreg: the maximum number of registers per thread; None leaves it to the compiler.

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import CompileOptions
        >>> CompileOptions(num_warps=8).num_stages
        3
    """

    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One launch of one kernel.

    Attributes:
        name: the name shown by profilers.
        kernel: the `@triton.jit` or `@gluon.jit` function.
        grid: programs along the three grid axes.
        inputs, outputs: the arrays the launch reads and writes, in the order the caller passes and receives them.
        arguments: every parameter of the kernel by name, in the kernel's own order. A group of pointers or scalars is a
            NamedTuple. See `leaves` for the order in which launchers pass them.
        options: compile options.
        aliases: (input index, output index) pairs that share one buffer: the output starts with the input's content.
        flops: approximate floating-point operations of the matrix products; 0 if the launch is bound by memory.

    Example:
        >>> import triton, triton.language as tl
        >>> from blockdiag.triton_kernels.launch.plan import Constexpr, LaunchPlan, Pointer, TensorSpec
        >>> @triton.jit
        ... def copy_kernel(p_x, p_out, BLOCK: tl.constexpr):
        ...     o_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ...     tl.store(p_out + o_element, tl.load(p_x + o_element))
        >>> array = TensorSpec((256,), "float32")
        >>> plan = LaunchPlan(
        ...     name="copy",
        ...     kernel=copy_kernel,
        ...     grid=(2, 1, 1),
        ...     inputs=(array,),
        ...     outputs=(array,),
        ...     arguments={"p_x": Pointer("input", 0), "p_out": Pointer("output", 0), "BLOCK": Constexpr(128)},
        ... )
        >>> list(plan.arguments) == plan.kernel.arg_names
        True
    """

    name: str
    kernel: Any
    grid: tuple[int, int, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: Mapping[str, Argument | Group]
    options: CompileOptions = field(default_factory=CompileOptions)
    aliases: tuple[tuple[int, int], ...] = ()
    flops: float = 0.0

    def leaves(self) -> Iterator[Leaf]:
        """Yield every argument, with groups flattened in place.

        This is the order of the compiled kernel's parameters. Compile-time values are no parameters of it.
        """
        for position, (name, argument) in enumerate(self.arguments.items()):
            if isinstance(argument, tuple):
                fields = getattr(argument, "_fields", range(len(argument)))
                for index, (field_name, member) in enumerate(zip(fields, argument, strict=True)):
                    yield Leaf(f"{name}.{field_name}", (position, index), member)
            else:
                yield Leaf(name, (position,), argument)


def array_group[G: Group](kind: type[G], input_names: Sequence[str], output_names: Sequence[str]) -> G:
    """Return a group of pointers to the arrays that the fields of a NamedTuple are named after.

    If the call has no array of that name, the argument is None. A name that is both an input and an output refers to
    the output.
    """
    fields: Any = kind
    return fields._make(_array_argument(name, input_names, output_names) for name in fields._fields)


def _array_argument(name: str, input_names: Sequence[str], output_names: Sequence[str]) -> Argument:
    if name in output_names:
        return Pointer("output", output_names.index(name))
    if name in input_names:
        return Pointer("input", input_names.index(name))
    return Constexpr(None)


def scalar_group[G: Group](kind: type[G], dtype: ScalarType = "i32", **values: int | float | Scalar) -> G:
    """Return a group of run-time scalars. A value that is not yet a `Scalar` gets the given type."""
    fields: Any = kind
    return fields(**{name: x if isinstance(x, Scalar) else Scalar(x, dtype) for name, x in values.items()})


@runtime_checkable
class KernelSpec(Protocol):
    """A hashable launch without a target: its outputs are known at trace time, its plan at lowering.

    Example:
        >>> from blockdiag.triton_kernels.launch.plan import KernelSpec
        >>> isinstance("a string", KernelSpec)
        False
    """

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that the launch reads."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that the launch writes."""
        ...

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for a target.

        Args:
            target: the GPU that the launch is for.

        Returns:
            The plan, with these inputs and outputs.
        """
        ...
