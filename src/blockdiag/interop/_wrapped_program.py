"""The two jitted programs behind a function wrapped by `wrap_jax`, and their integration into torch's autograd.

The forward program saves the residuals of `jax.vjp`. The backward program turns cotangents into gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from blockdiag.interop import dlpack
from blockdiag.interop._lifetimes import same_device


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _TraceNumber:
    """Static pytree node in a jitted function's result that identifies the trace which produced it."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Trace:
    """Results of tracing the forward function once.

    Attributes:
        structure: tree structure of the value that `fn` returned.
        floating: for each output leaf, True if it carries a gradient.
        residuals: for each residual of the pull-back, the list that holds it (operands, outputs, saved or constants)
            and its index in that list.
        pullback: tree structure of the pull-back, whose leaves are the residuals.
        constants: residuals that do not depend on the operands.
        outputs: shape and dtype of each output that carries a gradient.
    """

    structure: Any
    floating: tuple[bool, ...] = ()
    residuals: tuple[tuple[str, int], ...] = ()
    pullback: Any = None
    outputs: tuple[jax.ShapeDtypeStruct, ...] = ()
    constants: tuple[Any, ...] = ()

    @functools.cached_property
    def from_operands(self) -> tuple[int, ...]:
        """Indices of the operands that the pull-back needs."""
        return tuple(sorted({index for source, index in self.residuals if source == "operands"}))

    @functools.cached_property
    def from_outputs(self) -> tuple[int, ...]:
        """Indices of the outputs that the pull-back needs."""
        return tuple(sorted({index for source, index in self.residuals if source == "outputs"}))


class Program:
    """The jitted forward and backward functions for one structure, set of shapes and dtypes, and static values."""

    def __init__(
        self,
        fn: Callable[..., Any],
        leaves: list[Any],
        structure: Any,
        statics: tuple[tuple[int | str, Any], ...],
        wanted: list[bool],
        x64: bool,
    ) -> None:
        self._fn = fn
        self._structure = structure
        self._statics = statics
        self._x64 = x64
        is_operand = [isinstance(leaf, torch.Tensor | jax.Array | np.ndarray | np.generic) for leaf in leaves]
        # Static leaves stay where they are; operands are filled in.
        self._leaves = [None if operand else leaf for leaf, operand in zip(leaves, is_operand, strict=True)]
        self._places = [place for place, operand in enumerate(is_operand) if operand]
        self._differentiated = [position for position, place in enumerate(self._places) if wanted[place]]
        operands = [leaves[place] for place in self._places]
        self._others = [position for position, x in enumerate(operands) if not isinstance(x, torch.Tensor)]
        self._traces: list[_Trace] = []
        self._backwards: dict[Any, Callable[..., Any]] = {}
        # keep_unused makes the program wait for all operands, so one of them can carry the event that orders them all
        # (see dlpack.share).
        function = self._forward_with_residuals if self._differentiated else self._forward_only
        self._forward = jax.jit(function, keep_unused=True)
        for operand in operands:
            check_operand(operand)

    def __call__(self, operands: list[Any]) -> Any:
        if self._differentiated:
            call = _Call(self)
            outputs = _WithGradient.apply(call, *operands)
            return jax.tree_util.tree_unflatten(call.trace.structure, outputs)
        # Inputs are kept until the outputs are received: from then on the current stream waits for all their readers.
        inputs = self.arrays(operands)
        arrays, number = self._forward(*inputs)
        outputs = jax.tree_util.tree_unflatten(self._traces[number.number].structure, dlpack.receive(arrays))
        del inputs
        return outputs

    def arrays(self, operands: Sequence[Any]) -> list[jax.Array]:
        """Return the operands as JAX arrays. Tensors share memory if possible and are copied otherwise."""
        if not self._others:
            return dlpack.share(map(_shareable, operands), for_one_program=True)
        tensors = (_shareable(x) for x in operands if isinstance(x, torch.Tensor))
        shared = iter(dlpack.share(tensors, for_one_program=True))
        # A numpy array may change after the call, and the backward program may still need it.
        return [
            next(shared) if isinstance(x, torch.Tensor) else x if isinstance(x, jax.Array) else jnp.array(x, copy=True)
            for x in operands
        ]

    def _evaluate(self, operands: Sequence[Any]) -> tuple[list[Any], Any]:
        """Evaluate the function on traced operands and return the leaves and structure of its result."""
        leaves = list(self._leaves)
        for place, operand in zip(self._places, operands, strict=True):
            leaves[place] = operand
        args, kwargs = jax.tree_util.tree_unflatten(self._structure, leaves)
        args = list(args)
        for name, value in self._statics:
            if isinstance(name, str):
                kwargs[name] = value
            else:
                args[name] = value
        return jax.tree_util.tree_flatten(self._fn(*args, **kwargs))

    def _remember(self, trace: _Trace) -> _TraceNumber:
        # Appending is atomic, but other threads may append their traces in between: the index is searched for.
        self._traces.append(trace)
        return _TraceNumber(next(i for i in reversed(range(len(self._traces))) if self._traces[i] is trace))

    def _forward_only(self, *operands: jax.Array) -> tuple[list[jax.Array], _TraceNumber]:
        outputs, structure = self._evaluate(operands)
        return _distinct(outputs, operands), self._remember(_Trace(structure))

    def _forward_with_residuals(self, *operands: jax.Array) -> tuple[list[jax.Array], list[jax.Array], _TraceNumber]:
        described: dict[str, Any] = {}

        def differentiated(*chosen: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            every = list(operands)
            for position, operand in zip(self._differentiated, chosen, strict=True):
                every[position] = operand
            leaves, structure = self._evaluate(every)
            leaves = [jnp.asarray(leaf) for leaf in leaves]
            floating = tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
            described.update(structure=structure, floating=floating)
            return (
                [leaf for leaf, is_floating in zip(leaves, floating, strict=True) if is_floating],
                [leaf for leaf, is_floating in zip(leaves, floating, strict=True) if not is_floating],
            )

        chosen = [operands[position] for position in self._differentiated]
        carrying, pullback, others = jax.vjp(differentiated, *chosen, has_aux=True)
        carried, uncarried = iter(carrying), iter(others)
        outputs = [next(carried if is_floating else uncarried) for is_floating in described["floating"]]
        results = _distinct(outputs, operands)
        leaves, structure = jax.tree_util.tree_flatten(pullback)
        saved: list[jax.Array] = []
        constants: list[Any] = []
        residuals = []
        for leaf in leaves:
            place = _place_of(leaf, [("operands", operands), ("outputs", results), ("saved", saved)])
            if place is None:
                name, home = ("saved", saved) if isinstance(leaf, jax.core.Tracer) else ("constants", constants)
                place = name, len(home)
                home.append(leaf)
            residuals.append(place)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carrying)
        trace = _Trace(
            **described,
            residuals=tuple(residuals),
            pullback=structure,
            outputs=shapes,
            constants=tuple(constants),
        )
        return results, saved, self._remember(trace)

    def run_forward(self, operands: Sequence[Any]) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], _Trace]:
        """Run the forward program; return operand arrays, outputs, the other saved residuals and their trace."""
        arrays = self.arrays(operands)
        outputs, saved, number = self._forward(*arrays)
        return arrays, outputs, saved, self._traces[number.number]

    def run_backward(
        self,
        trace: _Trace,
        kept: Sequence[torch.Tensor],
        residuals_of: Callable[[list[jax.Array]], list[jax.Array]],
        cotangents: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Return the gradient of each needed operand and None for the others.

        `residuals_of` maps the kept tensors, converted to JAX arrays, to the residuals of the pull-back.
        """
        wanted = tuple(position for position in self._differentiated if needed[position])
        given = [x for x, is_floating in zip(cotangents, trace.floating, strict=True) if is_floating]
        missing = tuple(x is None for x in given)
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        if not wanted or all(missing):
            return gradients
        # The id is a valid key because the trace lives as long as the program.
        key = id(trace), missing, wanted
        backward = self._backwards.get(key)
        if backward is None:
            chosen = tuple(self._differentiated.index(position) for position in wanted)
            pull_back = functools.partial(_pull_back, trace, missing, chosen)
            backward = self._backwards[key] = jax.jit(pull_back, keep_unused=True)
        arrays = dlpack.share(map(_shareable, (*kept, *(x for x in given if x is not None))), for_one_program=True)
        residuals, arrays = residuals_of(arrays[: len(kept)]), arrays[len(kept) :]
        if jax.config.jax_enable_x64 == self._x64:
            results = backward(residuals, arrays)
        else:
            with jax.enable_x64(self._x64):
                results = backward(residuals, arrays)
        for position, gradient in zip(wanted, dlpack.receive(results), strict=True):
            gradients[position] = gradient
        return gradients


_WIDE = [np.dtype(x) for x in ("int64", "uint64", "float64", "complex128")]


def check_operand(operand: Any) -> None:
    if isinstance(operand, torch.Tensor):
        dlpack.check_tensor(operand)
    elif isinstance(operand, jax.core.Tracer):
        raise TypeError(
            "a wrapped JAX function takes concrete arguments, got a traced JAX array; call the JAX function itself "
            "inside of JAX's transformations"
        )
    elif not jax.config.jax_enable_x64 and operand.dtype in _WIDE:
        raise ValueError(
            f"an argument is a numpy array of {operand.dtype}, which JAX would narrow; cast it to 32 bits, or turn on "
            "64-bit types with jax.enable_x64"
        )


def _shareable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a dense copy if JAX cannot share its memory."""
    if type(tensor) not in dlpack.PLAIN_TYPES or tensor.layout is not torch.strided:
        dlpack.check_tensor(tensor)
    return tensor if dlpack.why_not_shared(tensor) is None else dlpack.dense_copy(tensor)


def _distinct(outputs: Sequence[Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the outputs with copies of those that are operands, constants or repeated outputs.

    For these, jit may return an existing buffer, and a write to one tensor would change the other.
    """
    distinct: list[jax.Array] = []
    for output in outputs:
        is_new = isinstance(output, jax.core.Tracer) and all(output is not other for other in (*operands, *distinct))
        distinct.append(output if is_new else jnp.array(output, copy=True))
        if jnp.issubdtype(distinct[-1].dtype, jax.dtypes.prng_key):
            raise TypeError(
                "the function returns a random key, which torch does not support; return jax.random.key_data of it"
            )
        if distinct[-1].dtype not in dlpack.TENSOR_DTYPES:
            raise TypeError(
                f"the function returns an array of {distinct[-1].dtype}, which torch does not support; cast it"
            )
    return distinct


def _place_of(leaf: Any, places: list[tuple[str, Sequence[Any]]]) -> tuple[str, int] | None:
    for name, arrays in places:
        for index, array in enumerate(arrays):
            if leaf is array:
                return name, index
    return None


def _pull_back(
    trace: _Trace,
    missing: tuple[bool, ...],
    chosen: tuple[int, ...],
    residuals: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return the gradients of the chosen operands. Missing cotangents are zeros that XLA need not materialise."""
    pullback = jax.tree_util.tree_unflatten(trace.pullback, residuals)
    given = iter(cotangents)
    every = [
        jnp.zeros(output.shape, output.dtype) if is_missing else _conjugate(next(given))
        for output, is_missing in zip(trace.outputs, missing, strict=True)
    ]
    gradients = pullback(every)
    # Two gradients may be the same array, or a cotangent itself, but each tensor needs memory of its own.
    return _distinct([_conjugate(gradients[index]) for index in chosen], cotangents)


def _conjugate(x: jax.Array) -> jax.Array:
    """Convert a complex gradient between torch's convention and JAX's, which are conjugates of each other."""
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


class _Call:
    """Holder that passes a program into `_WithGradient` and the trace of its forward run back out."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.trace: Any = None


class _WithGradient(torch.autograd.Function):
    """Autograd function that runs the forward program, with the backward program as its gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> tuple[torch.Tensor, ...]:
        arrays, outputs, saved, trace = call.program.run_forward(operands)
        tensors = tuple(dlpack.receive(outputs))
        call.trace = trace
        # Operands that are not tensors are kept as arrays: autograd saves only tensors, and arrays are immutable.
        others = {i: arrays[i] for i in trace.from_operands if not isinstance(operands[i], torch.Tensor)}
        ctx.program, ctx.trace, ctx.others = call.program, trace, others
        ctx.operands = [i for i in trace.from_operands if i not in others]
        keep = [*(operands[i] for i in ctx.operands), *(tensors[i] for i in trace.from_outputs)]
        if saved:
            keep.append(_carrier(saved))
        ctx.has_saved = bool(saved)
        ctx.save_for_backward(*keep)
        ctx.set_materialize_grads(False)
        if not all(trace.floating):
            ctx.mark_non_differentiable(*(x for x, carries in zip(tensors, trace.floating, strict=True) if not carries))
        return tensors

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        kept = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *_backward(ctx, kept, cotangents)
        # With create_graph=True, the error is deferred until the gradients themselves are differentiated.
        with torch.no_grad():
            gradients = _backward(ctx, kept, cotangents)
        leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        return None, *_not_differentiable(gradients, [x for x in (*cotangents, *kept, *leaves) if x is not None])


def _backward(
    ctx: Any, kept: tuple[torch.Tensor, ...], cotangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the gradients of the operands, None for those not requested."""
    dlpack.refuse_several(cotangents)
    trace: _Trace = ctx.trace
    saved: list[jax.Array] = []
    if ctx.has_saved:
        saved = _carried(kept[-1])
        kept = kept[:-1]

    def residuals_of(arrays: list[jax.Array]) -> list[jax.Array]:
        split = len(ctx.operands)
        sources: dict[str, Any] = {
            "operands": ctx.others | dict(zip(ctx.operands, arrays[:split], strict=True)),
            "outputs": dict(zip(trace.from_outputs, arrays[split:], strict=True)),
            "saved": saved,
            "constants": trace.constants,
        }
        return [sources[source][index] for source, index in trace.residuals]

    with same_device():
        return ctx.program.run_backward(trace, kept, residuals_of, cotangents, ctx.needs_input_grad[1:])


def _carrier(saved: list[jax.Array]) -> torch.Tensor:
    """Return an empty tensor whose storage holds JAX arrays.

    Saving this tensor ties the arrays' lifetime to autograd's saved tensors: a backward pass that does not retain the
    graph frees them, and so does activation checkpointing.
    """
    carrier = torch.empty(0)
    storage: Any = carrier.untyped_storage()
    storage.residuals = saved
    return carrier


def _carried(carrier: torch.Tensor) -> list[jax.Array]:
    residuals = getattr(carrier.untyped_storage(), "residuals", None)
    if residuals is None:
        raise RuntimeError(
            "a hook for saved tensors copied the tensor that holds the residuals of a wrapped JAX function, which lost "
            "them; make the call outside of that hook, and use jax.checkpoint inside of the function instead"
        )
    return residuals


class _NotDifferentiable(torch.autograd.Function):
    """Identity function on gradients whose differentiation is an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NotImplementedError(
            "wrap_jax supports first derivatives only, and its gradient is being differentiated; take this derivative "
            "in JAX, as with wrap_jax(jax.grad(fn)) or wrap_jax(jax.hessian(fn))"
        )


def _not_differentiable(gradients: list[torch.Tensor | None], sources: list[torch.Tensor]) -> list[torch.Tensor | None]:
    given = [x for x in gradients if x is not None]
    # The empty tensor makes the gradients always require grad, so that autograd never treats them as constants.
    guarded = iter(_NotDifferentiable.apply(len(given), *given, *sources, torch.empty(0, requires_grad=True)))
    return [None if x is None else next(guarded) for x in gradients]
