"""Declarations of the registered operators, `torch.ops.blockdiag.*`.

The operators of an operation are a package, `blockdiag.torch.ops.<operation>`, with these modules:

| module | contents |
|---|---|
| `api` | the public functions |
| `operators` | the arguments, the problem that they describe, and one `Operator` per method |
| `native` | the methods on CUDA tensors: Triton launches on the current stream |
| `through_jax` | the methods through DLPack and JAX, on the CPU and where JAX is requested |

A method takes the named arguments, then the tensors that precede them in the schema, such as
`backward(arguments, output_cotangent)`. `native` and `through_jax` are imported at their first call. The DTensor rules
need JAX, so they are in `blockdiag.torch.dtensor.rules`, by name of the operator.
"""

import functools
import importlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from blockdiag.torch.arguments import check_devices
from blockdiag.torch.transforms import register_constant, register_derivative

# Module-level, because deleting a library removes its operators.
LIBRARY = torch.library.Library("blockdiag", "DEF")

type Size = int
"""Annotation of a size that may be symbolic."""

type Mutated = torch.Tensor
"""Annotation of a tensor that the operator writes."""

_SCHEMA_TYPES: Mapping[Any, str] = {
    torch.Tensor: "Tensor", Mutated: "Tensor(!)", Size: "SymInt", int: "int", float: "float", bool: "bool", str: "str"
}  # fmt: skip


class Unsupported(NotImplementedError):
    """The native kernels cannot compute this call; the operator then computes it through JAX."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """An operator in two variants: native, and through JAX.

    There are two because tags are fixed when an operator is defined, and a CUDA graph may only capture the native one.
    On the CPU both go through JAX.

    Attributes:
        name: its name in `torch.ops.blockdiag`.
        method: the name of the function in the modules `native` and `through_jax` of the package that defines
            `arguments`.
        arguments: the NamedTuple of its arguments, tensors first; field names and annotations give the schema.
        num_results: number of tensors that it returns.
        fake: the method on tensors without data: returns uninitialised results. Devices are checked already.
        leading: names of tensors that precede the arguments.
        constants: the fields of `arguments` that are not arguments of this operator, and their values.
        shown_names: names of arguments in messages, where they differ.
        gradients: how it is differentiated.
        refusal: makes the error that differentiating it raises.
        is_constant: whether its results are constant under differentiation. Without `gradients`, `refusal` and
            `is_constant` the public function has to refuse tensors that autograd tracks.
    """

    name: str
    method: str
    arguments: type[Any]
    num_results: int
    fake: Callable[..., Any]
    leading: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    shown_names: Mapping[str, str] = field(default_factory=dict)
    gradients: "Gradients | None" = None
    refusal: Callable[[], Exception] | None = None
    is_constant: bool = False

    def schema(self) -> str:
        """Return arguments and results as torch's schemas describe them."""
        types_by_name = typing.get_type_hints(self.arguments)
        given = [f"Tensor {name}" for name in self.leading]
        given += [f"{_schema_type(types_by_name[name])} {name}" for name in self.fields()]
        aliases = iter("abcdefgh")
        given = [one.replace("!", f"{next(aliases)}!") if "!" in one else one for one in given]
        results = "Tensor" if self.num_results == 1 else f"({', '.join(['Tensor'] * self.num_results)})"
        return f"({', '.join(given)}) -> {results}"

    def variant(self, suffix: str) -> Any:
        """Return the registered variant with a suffix."""
        return getattr(torch.ops.blockdiag, self.name + suffix)

    def fields(self) -> list[str]:
        """Return the names of the arguments without the leading tensors."""
        return [name for name in self.arguments._fields if name not in self.constants]


@dataclass(frozen=True)
class Gradients:
    """The derivative of an operator, computed by another one from the cotangents and the arguments.

    Attributes:
        operator: returns the gradients of the first arguments; or a function from the tensor arguments to it.
        takes_results: whether it takes the results of the differentiated operator too, before the cotangents.
    """

    operator: Operator | Callable[[Sequence[torch.Tensor | None]], Operator]
    takes_results: bool = False


OPERATORS: list[Operator] = []
"""All registered operators."""

THROUGH_JAX = "_through_jax"
"""Suffix of the variant through JAX."""


def register(*operators: Operator) -> None:
    """Register both variants of operators: implementations, fake kernels and derivatives."""
    for operator in operators:
        native, through_jax = _implementations(operator)
        _register_variant(operator, "", native, through_jax)
        _register_variant(operator, THROUGH_JAX, through_jax, through_jax, torch.Tag.cudagraph_unsafe)
        OPERATORS.append(operator)


def _register_variant(
    operator: Operator, suffix: str, cuda: Callable[..., Any], cpu: Callable[..., Any], *tags: torch.Tag
) -> None:
    name = operator.name + suffix
    LIBRARY.define(name + operator.schema(), tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"blockdiag::{name}", _fake_kernel(operator), lib=LIBRARY)
    if operator.gradients is not None:
        register_derivative(LIBRARY, name, *_reverse_mode(operator, operator.gradients, suffix))
    elif operator.refusal is not None:
        register_derivative(LIBRARY, name, _refuse(operator.refusal))
    elif operator.is_constant:
        register_constant(LIBRARY, name)


def count_tensors(arguments: type[Any]) -> int:
    """Return the number of leading tensor fields of a NamedTuple of arguments."""
    return sum(_schema_type(one).startswith("Tensor") for one in typing.get_type_hints(arguments).values())


def _schema_type(annotation: Any) -> str:
    """Return the schema's type for an annotation; of a union, the type of its first member."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    first = "str" if typing.get_origin(members[0]) is Literal else _SCHEMA_TYPES[members[0]]
    return f"{first}?" if type(None) in members else first


# Modules are found by the convention of their names, as in `blockdiag.common.operation`.
_load = functools.cache(importlib.import_module)


def _implementations(operator: Operator) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the native implementation and the one through JAX, as functions of all arguments of the operator."""
    package = operator.arguments.__module__.rpartition(".")[0]
    native_path, jax_path = f"{package}.native", f"{package}.through_jax"
    method, count, to_arguments = operator.method, len(operator.leading), _to_arguments(operator)

    def through_jax(*values: Any) -> Any:
        return getattr(_load(jax_path), method)(to_arguments(*values[count:]), *values[:count])

    def native(*values: Any) -> Any:
        try:
            return getattr(_load(native_path), method)(to_arguments(*values[count:]), *values[:count])
        except Unsupported:
            return through_jax(*values)

    return native, through_jax


def _to_arguments(operator: Operator) -> Callable[..., Any]:
    """Return the function that names the values of a call."""
    make, fields, constants = operator.arguments, operator.fields(), operator.constants
    if not constants:
        return make
    return lambda *values: make(**dict(zip(fields, values, strict=True)), **constants)


def _fake_kernel(operator: Operator) -> Callable[..., Any]:
    """Return the kernel for tensors without data.

    It checks devices: one meta argument among others selects it, and it returns uninitialised memory. Other mistakes
    are found when the operator runs, so that no tracer wraps the messages.
    """
    count, to_arguments = len(operator.leading), _to_arguments(operator)
    tensors = operator.arguments._fields[: count_tensors(operator.arguments)]
    names = [operator.shown_names.get(name, name) for name in tensors]

    def fake(*values: Any) -> Any:
        arguments, leading = to_arguments(*values[count:]), values[:count]
        check_devices(**dict(zip(names, arguments, strict=False)), **dict(zip(operator.leading, leading, strict=True)))
        return operator.fake(arguments, *leading)

    return fake


def _refuse(error: Callable[[], Exception]) -> Callable[..., Any]:
    def refuse(ctx: Any, *cotangents: Any) -> Any:
        raise error()

    return refuse


def _reverse_mode(operator: Operator, gradients: Gradients, suffix: str) -> tuple[Callable[..., Any], ...]:
    """Return the derivative of a variant, and the function that saves what it needs."""
    num_tensors, num_arguments = count_tensors(operator.arguments), len(operator.fields())
    num_saved_results = operator.num_results if gradients.takes_results else 0

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = ()
        if num_saved_results:
            # Usually only one of several results is differentiated, and the other cotangents are None.
            ctx.set_materialize_grads(False)
            results = output
        ctx.save_for_backward(*results, *inputs[:num_tensors])
        ctx.options = inputs[num_tensors:]

    def differentiate(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        results, tensors = saved[:num_saved_results], saved[num_saved_results:]
        if results:
            pairs = zip(results, cotangents, strict=True)
            cotangents = tuple(torch.zeros_like(result) if one is None else one for result, one in pairs)
        backward = gradients.operator if isinstance(gradients.operator, Operator) else gradients.operator(tensors)
        found = backward.variant(suffix)(*results, *cotangents, *tensors, *ctx.options)
        found = (found,) if isinstance(found, torch.Tensor) else found
        return (*found, *(None,) * (num_arguments - len(found)))

    return differentiate, remember
