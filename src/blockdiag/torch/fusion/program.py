"""A traced function as steps on tensors: launches of regions, and JAX for other computations around them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, flat_jaxpr
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.eight_bit import multiplies_eight_bits
from blockdiag.fusion.regions.nested_programs import CHECKPOINTS, bodies_of
from blockdiag.interop.dlpack import to_torch
from blockdiag.interop.torch_launch import device_target
from blockdiag.interop.wrap import wrap_jax
from blockdiag.torch.fusion.equations import computation_of
from blockdiag.torch.fusion.nested_programs import Body, inner_of, is_launched
from blockdiag.torch.fusion.random_keys import data_of, is_key
from blockdiag.torch.fusion.region import Bind, mark, region_p
from blockdiag.torch.fusion.split import Segment, Split, variables_of
from blockdiag.triton_kernels.launch.plan import Target

type Compute = Callable[..., Sequence[torch.Tensor]]


class Traced(Protocol):
    """A traced call, such as `blockdiag.fusion.program.Program`.

    Attributes:
        arguments: the shapes and dtypes of its arrays.
        structure: the structure of its results.
    """

    @property
    def arguments(self) -> Sequence[Any]: ...
    @property
    def structure(self) -> Any: ...
    def evaluate(self, arguments: Sequence[Any], compute: Callable[..., tuple[Any, Any]], /) -> list[Any]:
        """Return the results as a flat list; `compute` returns the results and log-sum-exps of regions.

        Its arguments are a region, whether the log-sum-exp is wanted, leaves, values and, by index, carriers of
        gradients; see `mark`.
        """
        ...


def marked(program: Traced, *, has_gradient: bool, has_eight_bit_products: bool = False) -> core.ClosedJaxpr:
    """Return the flat program with `region_p` in place of regions.

    Args:
        has_gradient: whether to generate backward kernels.
        has_eight_bit_products: see `mark`.
    """
    options = {"has_gradient": has_gradient, "has_eight_bit_products": has_eight_bit_products}

    def with_marks(*arrays: Any) -> list[Any]:
        def compute(
            region: Region,
            has_log_sum: bool,
            leaves: Sequence[Any],
            value: Any,
            carriers: Mapping[int, Any] | None = None,
        ) -> tuple[Any, Any]:
            return mark(region, leaves, value, has_log_sum=has_log_sum, carriers=carriers, **options)

        return program.evaluate(arrays, compute)

    return flat_jaxpr(with_marks, *program.arguments, keep=CHECKPOINTS)[0]


class TorchProgram:
    """A traced call on one device.

    Args:
        program: a traced call.
        device: the device of all tensors.
        bind: binds a launch.
        has_gradient: whether gradients may be requested.
    """

    def __init__(self, program: Traced, device: torch.device, bind: Bind, *, has_gradient: bool) -> None:
        self._structure = program.structure
        target = device_target(device.index) if device.type == "cuda" and device.index is not None else None
        # The interpreter has them.
        has_products = device.type == "cpu" if target is None else multiplies_eight_bits(target)
        jaxpr = marked(program, has_gradient=has_gradient, has_eight_bit_products=has_products)
        if any(is_key(aval_of(x)) for x in jaxpr.jaxpr.outvars):
            raise TypeError(
                "the function returns a random key, which torch does not support; return jax.random.key_data of it"
            )
        self._steps = _Steps(jaxpr, device, bind, target)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the results with the structure of the function's results, as tensors that share no memory.

        Args:
            tensors: the array arguments.
        """
        results = self._steps(*tensors)
        own = [x.clone() if is_shared else x for x, is_shared in zip(results, self._steps.shared, strict=True)]
        return jax.tree.unflatten(self._structure, own)


class _Steps:
    """A flat program with `region_p`, as steps on tensors.

    Args:
        program: the program.
        device: the device of all tensors.
        bind: binds a launch.
        target: the GPU, None for the interpreter.

    Attributes:
        shared: for each result, whether it may share memory with an argument, a constant or an earlier result.
    """

    def __init__(self, program: core.ClosedJaxpr, device: torch.device, bind: Bind, target: Target | None) -> None:
        self._device, self._bind, self._target = device, bind, target
        split = Split(program)
        results = program.jaxpr.outvars
        # All values of a call lie in one list: arguments, constants, and results of steps, in order.
        self._slots: dict[Any, int] = {}
        self._make_slots(program.jaxpr.invars)
        self._known = dict(split.constants)
        for operands in (results, *split.region_operands()):
            self._known |= {
                _key(x): jnp.asarray(x.val, aval_of(x).dtype) for x in operands if isinstance(x, core.Literal)
            }
        self._make_slots(self._known)
        self._constants = [to_torch(data_of(jnp.asarray(x))).to(device, copy=True) for x in self._known.values()]
        self._steps: list[tuple[Compute, tuple[int, ...]]] = []
        # Results of loops, branches and checkpoints that may alias their operands.
        self._borrowed: set[core.Var] = set()
        for part in split.parts:
            self._add(part)
        self._results = [self._slots[_key(x)] for x in results]
        self._ended = self._find_ended()
        self.shared = self._find_shared(split, results)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        values: list[Any] = [*tensors, *self._constants]
        for (compute, given), ended in zip(self._steps, self._ended, strict=True):
            values += compute(*[values[slot] for slot in given])
            for slot in ended:
                values[slot] = None
        return [values[slot] for slot in self._results]

    def _find_ended(self) -> list[list[int]]:
        """Return, for each step, the values that no later step reads, whose memory can be freed."""
        last = {slot: number for number, (_, given) in enumerate(self._steps) for slot in given}
        ended: list[list[int]] = [[] for _ in self._steps]
        for slot, number in last.items():
            if slot not in self._results:
                ended[number].append(slot)
        return ended

    def _find_shared(self, split: Split, results: Sequence[Any]) -> list[bool]:
        shared, owners = [], set()
        for x in results:
            owner = None if isinstance(x, core.Literal) else split.owner_of(x)
            is_new = owner is not None and split.is_new(owner) and owner not in self._borrowed | owners
            owners |= {owner} if is_new else set()
            shared.append(not is_new)
        return shared

    def _make_slots(self, values: Iterable[Any]) -> None:
        for x in values:
            self._slots[x] = len(self._slots)

    def _add(self, part: Segment | core.JaxprEqn) -> None:
        inputs: Sequence[Any]
        compute: Compute | None
        if isinstance(part, Segment):
            inputs, outputs, compute = part.inputs, part.outputs, _InJax(part)
        elif part.primitive is region_p:
            compute = part.params["steps"].bound(self._bind, self._target)
            inputs, outputs = part.invars, part.outvars
        elif is_launched(part):
            inner, inputs = self._inner(part)
            compute, outputs = inner, part.outvars
            self._borrowed |= {var for var, is_shared in zip(outputs, inner.shared, strict=True) if is_shared}
        else:
            # Literals are part of the computation.
            inputs, outputs, compute = variables_of(part.invars), part.outvars, computation_of(part)
        assert compute is not None
        self._steps.append((compute, tuple(self._slots[_key(x)] for x in inputs)))
        self._make_slots(outputs)

    def _inner(self, equation: core.JaxprEqn) -> tuple[Body, Sequence[Any]]:
        """Return the function of an equation that contains regions, and its operands."""
        bodies, *_ = bodies_of(equation)
        index = self._known.get(_key(equation.invars[0])) if equation.primitive.name == "cond" else None
        if index is not None:
            # The predicate depends on no argument, so the branch is known.
            return self._within(bodies[int(index)]), equation.invars[1:]
        return inner_of(equation, list(map(self._within, bodies)), self._device), equation.invars

    def _within(self, body: core.ClosedJaxpr) -> "_Steps":
        flat, _ = flat_jaxpr(core.jaxpr_as_fun(body), *body.in_avals, keep=CHECKPOINTS)
        return _Steps(flat, self._device, self._bind, self._target)


def _key(x: Any) -> Any:
    """Return the key by which a value is looked up; literals are not hashable and use their identity."""
    return id(x) if isinstance(x, core.Literal) else x


class _InJax:
    """A segment as a differentiable function of tensors."""

    def __init__(self, segment: Segment) -> None:
        has_gradient = any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in segment.outputs)
        self._wrapped = wrap_jax(segment.function, differentiable=None if has_gradient else False)

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._wrapped(*tensors)
