"""`triton_call`: a user's own Triton kernel as a JAX function."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.division import divide
from blockdiag.common.shards import Part
from blockdiag.interop.jax_call import launch, without_transformations
from blockdiag.interop.kernel_rule import OfSizes, function_text, local_shape, parse_rule
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)

type Grid = int | Sequence[int] | Callable[[Mapping[str, Any]], int | Sequence[int]]


@dataclass(frozen=True)
class TensorDescriptor:
    """Kernel argument that passes an array as a TMA descriptor made on the host, instead of a pointer.

    Attributes:
        array: the described array, of any shape and dtype, dense and row-major.
        block_shape: the tile that one `load` of the kernel reads, in elements; one size for each axis of `array`.
        layout: the shared-memory layout of a Gluon kernel's tile; None for a Triton kernel.

    References:
        The tensor memory accelerator of NVIDIA's Hopper architecture (2022).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import triton, triton.language as tl
        >>> from blockdiag.interop import TensorDescriptor, triton_call
        >>> @triton.jit
        ... def copy_kernel(d_x, p_out):
        ...     x = d_x.load([0, 0])
        ...     tl.store(p_out + tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :], x)
        >>> x = jnp.arange(128.0).reshape(8, 16)
        >>> described = TensorDescriptor(x, (8, 16))
        >>> is_cpu = jax.default_backend() == "cpu"
        >>> bool((triton_call(described, kernel=copy_kernel, out_shape=x, grid=1, interpret=is_cpu) == x).all())
        True
    """

    array: Any
    block_shape: tuple[int, ...]
    layout: Any = None


@dataclass(frozen=True)
class ShardValue:
    """A number or compile-time value computed from the sizes of a device's shard of the arrays.

    Attributes:
        function: takes a mapping from each label of `sharding_rule` to its size on the device.

    References:
        The local shapes that `jax.shard_map` shows to a function.

    Example:
        >>> from blockdiag.interop import ShardValue
        >>> ShardValue(lambda sizes: sizes["b"] * sizes["t"]).function({"b": 2, "t": 8})
        16
    """

    function: OfSizes


def triton_call(
    *args: Any,
    kernel: Any,
    out_shape: Any,
    grid: Grid,
    name: str | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    num_ctas: int = 1,
    maxnreg: int | None = None,
    input_output_aliases: Mapping[int | str, int] | None = None,
    interpret: bool = False,
    sharding_rule: str | None = None,
    divided_labels: str = "",
    **named: Any,
) -> Any:
    """Call a `@triton.jit` or `@gluon.jit` kernel on JAX arrays.

    Positional arguments fill the kernel's parameters in order, named ones by name. The remaining parameters receive the
    outputs, in order. The call works under `jax.jit`, `jax.shard_map`, `jax.checkpoint` and `jax.export` (with
    `blockdiag.interop.EXPORT_DISABLED_CHECKS`). For `grad` and `vmap`, wrap it in `jax.custom_vjp` and
    `jax.custom_batching.custom_vmap`.

    The kernel has to be in a Python file, since Triton reads its source.

    Args:
        *args: arrays of any shape and dtype, passed as pointers or wrapped in a `TensorDescriptor`; scalars; and
            compile-time values for parameters annotated `tl.constexpr`. Python ints become i32, or i64 if they do not
            fit. Python floats become fp32, never fp64. A `blockdiag.triton_kernels.launch.plan.Scalar` states its type
            explicitly. None may stand for an optional pointer.
        kernel: the kernel.
        out_shape: pytree of objects with `shape` and `dtype`, one per output; the result has the same structure.
        grid: one to three sizes, or a function that returns them. The function takes a mapping of all compile-time
            values and of num_warps, num_stages and num_ctas.
        name: the name that profilers show; the kernel's name when None.
        num_warps, num_stages, num_ctas, maxnreg: options of Triton's compiler.
        input_output_aliases: maps an array, by parameter name or by its index among the arrays in the kernel's order,
            to the index of a flat output that takes over its buffer. Such an output has no parameter of its own.
        interpret: run in Triton's interpreter on the host, on any platform; slow.
        sharding_rule: how a mesh may divide the call: axis labels of every array, in the kernel's order, and of every
            output, as in `"b t h, b s h -> b t h"`. `(b t)` is one axis composed of two labels; `_` is an axis that is
            never divided. `out_shape` stays the global shape. `grid` must be a function, whose mapping then also has
            the size of each label on one device. Values that depend on sizes must be a `ShardValue`. None: automatic
            meshes gather the arrays and every device computes everything; on explicit meshes call inside
            `jax.shard_map`.
        divided_labels: the labels that devices may divide, separated by spaces. Each element of an output may depend on
            only one index of such a label. An output that lacks the label is the exception: it is summed over devices.
        **named: further arguments by parameter name.

    Returns:
        The outputs, in the structure of `out_shape`, with its shapes and dtypes.

    Raises:
        TypeError: for names that are not parameters, missing arguments, or values of unsupported types.
        ValueError: for invalid grids, aliases and sharding rules.

    References:
        The function of this name in jax-triton (2022).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import triton, triton.language as tl
        >>> from blockdiag.interop import triton_call
        >>> @triton.jit
        ... def scale_kernel(p_x, p_out, num_elements, factor, BLOCK: tl.constexpr):
        ...     o_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ...     m_element = o_element < num_elements
        ...     x = tl.load(p_x + o_element, mask=m_element)
        ...     tl.store(p_out + o_element, x * factor, mask=m_element)
        >>> @jax.jit
        ... def scale(x):
        ...     return triton_call(
        ...         x,
        ...         kernel=scale_kernel,
        ...         out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        ...         grid=lambda meta: triton.cdiv(x.size, meta["BLOCK"]),
        ...         num_elements=x.size,
        ...         factor=2.5,
        ...         BLOCK=128,
        ...         interpret=jax.default_backend() == "cpu",
        ...     )
        >>> scale(jnp.arange(3.0)).tolist()
        [0.0, 2.5, 5.0]
    """
    leaves, tree = jax.tree.flatten(out_shape)
    outputs = tuple(TensorSpec(tuple(leaf.shape), np.dtype(leaf.dtype).name) for leaf in leaves)
    values = _bind_parameters(kernel, args, named)
    description = _Description(
        name=name or kernel.fn.__name__,
        kernel=kernel,
        grid=grid,
        options=CompileOptions(num_warps=num_warps, num_stages=num_stages, num_ctas=num_ctas, maxnreg=maxnreg),
        aliases=dict(input_output_aliases or {}),
        values=values,
    )
    if sharding_rule is None:
        if divided_labels:
            raise ValueError(
                f"`divided_labels` are labels of `sharding_rule`, got {divided_labels!r} without one; pass "
                'sharding_rule="b t h, b s h -> b t h", for example'
            )
        spec, arrays = description.spec(outputs, None)
        results = launch(spec, *arrays.values(), interpret=interpret)
    else:
        results = _divided(description, outputs, sharding_rule, divided_labels, interpret)
    return jax.tree.unflatten(tree, results)


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The arguments of a `triton_call`, from which the launch on each device is derived."""

    name: str
    kernel: Any
    grid: Grid
    options: CompileOptions
    aliases: dict[int | str, int]
    values: dict[str, Any]

    def spec(self, outputs: tuple[TensorSpec, ...], sizes: Mapping[str, int] | None) -> tuple["_CallSpec", dict]:
        """Return the launch with these outputs, and its arrays by parameter name.

        Args:
            outputs: outputs of one device.
            sizes: sizes of the sharding rule's labels on one device; None without a rule.
        """
        values = {name: self._resolve(name, value, sizes) for name, value in self.values.items()}
        arrays, arguments = _plan_arguments(self.kernel, values, outputs, self.aliases)
        spec = _CallSpec(
            name=self.name,
            kernel=self.kernel,
            grid=_normal_grid(self.grid, arguments, self.options, sizes or {}),
            inputs=tuple(_spec_of(array) for array in arrays.values()),
            outputs=outputs,
            arguments=tuple(arguments.items()),
            options=self.options,
            aliases=_alias_pairs(list(arrays), self.aliases),
        )
        return spec, arrays

    def with_arrays(self, arrays: Mapping[str, Any]) -> "_Description":
        """Return the same call with other arrays, given by parameter name."""
        values = dict(self.values)
        for name, array in arrays.items():
            old = values[name]
            is_described = isinstance(old, TensorDescriptor)
            values[name] = dataclasses.replace(old, array=array) if is_described else array
        return dataclasses.replace(self, values=values)

    def _resolve(self, name: str, value: Any, sizes: Mapping[str, int] | None) -> Any:
        if not isinstance(value, ShardValue):
            return value
        if sizes is None:
            raise TypeError(
                f"kernel {self.name!r}: parameter {name!r} is a ShardValue, which needs the labels of a "
                "`sharding_rule`; pass one, or the value itself"
            )
        return value.function(sizes)


def _divided(
    description: _Description, outputs: tuple[TensorSpec, ...], text: str, labels: str, interpret: bool
) -> Sequence[jax.Array]:
    """Run a call that devices of a mesh may divide and return its outputs."""
    if not callable(description.grid):
        raise ValueError(
            f"`grid` must be a function of sizes where there is a `sharding_rule`, got {description.grid}: a device "
            'with a part of the arrays needs a grid of its own, such as lambda meta: (meta["b"], 1)'
        )
    given = {
        name: jnp.asarray(value.array if isinstance(value, TensorDescriptor) else value)
        for name, value in description.values.items()
        if isinstance(value, (TensorDescriptor, jax.Array, np.ndarray))
    }
    rule = parse_rule(
        text,
        labels,
        {name: tuple(array.shape) for name, array in given.items()},
        [output.shape for output in outputs],
        name=description.name,
        problem="",
    )
    taken = sorted(dict(rule.sizes).keys() & ({x.name for x in description.kernel.params} | set(_OPTIONS)))
    if taken:
        raise ValueError(
            f"`sharding_rule` {text!r} has labels {taken} that are names of parameters or options of kernel "
            f"{description.name!r}; give them other names"
        )
    whole, _ = description.with_arrays(given).spec(outputs, dict(rule.sizes))
    functions = [description.grid, *(x.function for x in description.values.values() if isinstance(x, ShardValue))]
    problem = repr((whole, description.kernel.cache_key, [function_text(function) for function in functions]))
    rule = dataclasses.replace(rule, problem=problem)

    def local(part: Part) -> Callable[..., Sequence[jax.Array]]:
        own = tuple(
            dataclasses.replace(output, shape=local_shape(dims, output.shape, part.sizes))
            for output, dims in zip(outputs, rule.results, strict=True)
        )

        def compute(*arrays: jax.Array) -> Sequence[jax.Array]:
            call = description.with_arrays(dict(zip(given, arrays, strict=True)))
            spec, named = call.spec(own, part.sizes)
            return launch(spec, *named.values(), interpret=interpret)

        return compute

    return divide(rule, local, without_transformations(whole, given.values()))


@dataclass(frozen=True, kw_only=True)
class _CallSpec:
    """A KernelSpec whose plan is the same on every target."""

    name: str
    kernel: Any
    grid: tuple[int, int, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: tuple[tuple[str, Argument], ...]
    options: CompileOptions
    aliases: tuple[tuple[int, int], ...]

    def plan(self, target: Target) -> LaunchPlan:
        return LaunchPlan(
            name=self.name,
            kernel=self.kernel,
            grid=self.grid,
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=dict(self.arguments),
            options=self.options,
            aliases=self.aliases,
        )


def _bind_parameters(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the value of every parameter that has an argument or a default, by name, in the kernel's order."""
    if not hasattr(kernel, "params"):
        raise TypeError(
            f"`kernel` must be a @triton.jit or @gluon.jit function, got {type(kernel).__name__}; "
            "of an autotuned kernel pass `.fn`, with the chosen values as named arguments"
        )
    parameters = [parameter.name for parameter in kernel.params]
    if len(args) > len(parameters):
        raise TypeError(f"kernel {kernel.fn.__name__!r} takes {len(parameters)} arguments, got {len(args)}")
    values = dict(zip(parameters, args, strict=False))
    for name, value in named.items():
        if name not in parameters:
            raise TypeError(f"kernel {kernel.fn.__name__!r} has no parameter {name!r}; its parameters are {parameters}")
        if name in values:
            raise TypeError(f"kernel {kernel.fn.__name__!r} got parameter {name!r} both by position and by name")
        values[name] = value
    return {
        parameter.name: values.get(parameter.name, parameter.default)
        for parameter in kernel.params
        if parameter.name in values or parameter.has_default
    }


def _plan_arguments(
    kernel: Any, values: dict[str, Any], outputs: tuple[TensorSpec, ...], aliases: dict[int | str, int]
) -> tuple[dict[str, Any], dict[str, Argument]]:
    """Return the arrays by parameter name, and the plan argument of every parameter."""
    waiting = [index for index in range(len(outputs)) if index not in aliases.values()]
    missing = [parameter.name for parameter in kernel.params if parameter.name not in values]
    if any(parameter.is_constexpr for parameter in kernel.params if parameter.name in missing):
        raise TypeError(f"kernel {kernel.fn.__name__!r} needs values for its compile-time parameters among {missing}")
    if len(missing) != len(waiting):
        raise TypeError(
            f"kernel {kernel.fn.__name__!r} is called without {missing}, to be filled by {len(waiting)} outputs; give "
            "every other parameter a value, by name where it follows an output"
        )
    arrays: dict[str, Any] = {}
    arguments: dict[str, Argument] = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in missing:
            arguments[name] = Pointer("output", waiting[missing.index(name)])
        elif parameter.is_constexpr:
            arguments[name] = Constexpr(values[name])
        else:
            arguments[name] = _run_time_argument(kernel, name, values[name], arrays)
    return arrays, arguments


def _run_time_argument(kernel: Any, name: str, value: Any, arrays: dict[str, Any]) -> Argument:
    match value:
        case None:
            return Constexpr(None)
        case Scalar():
            return value
        case TensorDescriptor():
            arrays[name] = value.array
            shape = tuple(value.array.shape)
            return Descriptor("input", len(arrays) - 1, shape, tuple(value.block_shape), value.layout)
        case bool() | np.bool_():
            return Scalar(bool(value), "i1")
        case int() | np.integer():
            return Scalar(int(value), "i32" if -(2**31) <= value < 2**31 else "i64")
        case float() | np.floating():
            return Scalar(float(value), "fp32")
        case jax.Array() | np.ndarray():
            arrays[name] = value
            return Pointer("input", len(arrays) - 1)
    raise TypeError(
        f"kernel {kernel.fn.__name__!r}: parameter {name!r} must be an array, TensorDescriptor, number or None, got "
        f"{type(value).__name__}; annotate it with tl.constexpr to pass a compile-time value"
    )


def _spec_of(array: Any) -> TensorSpec:
    return TensorSpec(tuple(array.shape), np.dtype(array.dtype).name)


def _alias_pairs(names: list[str], aliases: dict[int | str, int]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for source, output in aliases.items():
        if source not in names and source not in range(len(names)):
            raise ValueError(
                f"`input_output_aliases` has key {source!r}; it must be one of the arrays {names} or its index among "
                "them"
            )
        pairs.append((names.index(source) if isinstance(source, str) else source, output))
    return tuple(pairs)


_OPTIONS = ("num_warps", "num_stages", "num_ctas")


def _normal_grid(
    grid: Grid, arguments: Mapping[str, Argument], options: CompileOptions, sizes: Mapping[str, int]
) -> tuple[int, int, int]:
    if callable(grid):
        meta = {name: argument.value for name, argument in arguments.items() if isinstance(argument, Constexpr)}
        grid = grid(meta | {name: getattr(options, name) for name in _OPTIONS} | dict(sizes))
    programs = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(programs) <= 3 or math.prod(programs) < 1:
        raise ValueError(f"`grid` must be one to three positive sizes, got {grid}")
    x, y, z = (*map(int, programs), 1, 1)[:3]
    return x, y, z
