"""JAX functions as torch functions with autograd, and torch functions as JAX functions.

`wrap_jax` shares memory in both directions (see `blockdiag.interop.dlpack`) and runs one jitted program forward and one
backward. `wrap_torch` takes the way through the host, for notebooks and tests.
"""

import collections
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.autograd import forward_ad

from blockdiag.interop import dlpack
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop._torch_callback import wrap_torch

__all__ = ["wrap_jax", "wrap_torch"]


class CacheInfo(NamedTuple):
    """What `wrapped.cache_info()` tells: like `functools.lru_cache`."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


def wrap_jax(
    fn: Callable[..., Any],
    *,
    differentiable: bool | int | str | Sequence[int | str] | None = None,
    static_argnames: str | Sequence[str] = (),
    max_compiled: int = 128,
) -> Callable[..., Any]:
    """A torch function that computes what the JAX function `fn` computes, with autograd.

    Tensors anywhere in the arguments (tuples, lists, dicts, registered pytrees) reach `fn` as traced arrays, and the
    arrays it returns come back as tensors in the same structure. `fn` is jitted: once for each structure of the
    arguments, shapes and dtypes of their arrays, set of tensors to differentiate, and values of everything else. Where
    a gradient is asked for, the forward program also saves the residuals of `jax.vjp`, and a second program turns
    cotangents into gradients; the gradients of inputs that do not require grad are not computed.

    - Python numbers, strings and other hashable leaves are static: part of the program, and of the key it is compiled
      for. Pass a number that changes often as a tensor. `None` is an empty pytree.
    - JAX and numpy arrays among the arguments are operands without a gradient.
    - A tensor that DLPack cannot share (strided slices, broadcast dimensions, misaligned memory) is copied once, as are
      such cotangents. 64-bit tensors need 64-bit types in JAX (`jax.enable_x64`).
    - Results are new tensors, also where `fn` returns one of its arguments. Integer and boolean results carry no
      gradient. Complex gradients follow torch's convention.
    - Inputs and results that the backward program needs are saved as torch saves them: writing to them in place before
      the backward pass is an error, and hooks for saved tensors see them. All other residuals stay JAX arrays; for
      rematerialisation use `jax.checkpoint` inside of `fn`.
    - Under `torch.compile` the call is a graph break, and a CUDA graph cannot capture it.
    - The backward pass may run on another thread, where context managers of JAX other than `jax.enable_x64` are not in
      force; set such options for the process, with `jax.config.update`.

    Args:
        fn: a function of arrays and pytrees of arrays, such as `jax.jit` takes. It must be pure.
        differentiable: which tensors get a gradient. None: all that require grad. False: none. Positions or names of
            arguments: tensors that require grad within those arguments, while others count as constants.
        static_argnames: names of arguments that are static as a whole, such as a hashable pytree of options.
        max_compiled: how many compiled pairs of programs to keep; the least recently used one goes first.

    Returns:
        The function. Its `cache_info()` and `cache_clear()` are as those of `functools.lru_cache`.

    Raises:
        ValueError: when `differentiable` or `static_argnames` name no argument of `fn`; and, from calls, as
            `blockdiag.interop.to_jax` does.
        TypeError: from calls, for arguments that are neither arrays nor hashable.
        RuntimeError: from a second derivative: the backward program itself is not differentiable in torch. Wrap
            `jax.grad(fn)` instead.

    Example:
        >>> import jax.numpy as jnp
        >>> import torch
        >>> from blockdiag.interop import wrap_jax
        >>> norm = wrap_jax(lambda x: jnp.sqrt(jnp.sum(x * x)))
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> norm(x).backward()
        >>> x.grad
        tensor([0.6000, 0.8000])
    """
    function = _WrappedFunction(fn, differentiable, static_argnames, max_compiled)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(args, kwargs)

    # Dynamo would otherwise trace through JAX's Python code.
    result = torch.compiler.disable(wrapped, reason="JAX functions run outside of torch.compile")
    result.cache_info = function.cache_info
    result.cache_clear = function.cache_clear
    return result


class _WrappedFunction:
    """The programs of one wrapped function, by what they were compiled for."""

    def __init__(
        self,
        fn: Callable[..., Any],
        differentiable: bool | int | str | Sequence[int | str] | None,
        static_argnames: str | Sequence[str],
        max_compiled: int,
    ) -> None:
        if max_compiled < 1:
            raise ValueError(f"max_compiled={max_compiled} must be at least 1")
        self._fn = fn
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self._static = _arguments("static_argnames", names, fn)
        if differentiable is None or isinstance(differentiable, bool):
            # True says no more than None does: a tensor that does not require grad gets none.
            self._differentiable = frozenset() if differentiable is False else None
        else:
            chosen = (differentiable,) if isinstance(differentiable, int | str) else tuple(differentiable)
            self._differentiable = _arguments("differentiable", chosen, fn)
        self._programs: collections.OrderedDict[Any, _Program] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._max_compiled = max_compiled
        self._hits = self._misses = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        statics: tuple[tuple[int | str, Any], ...] = ()
        if self._static:
            args, kwargs, statics = self._split_statics(args, kwargs)
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        grad = torch.is_grad_enabled()
        operands: list[Any] = []
        signature: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                operands.append(leaf)
                signature.append((leaf.shape, leaf.dtype, leaf.device, grad and leaf.requires_grad))
            elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
                operands.append(leaf)
                signature.append((leaf.shape, leaf.dtype))
            else:
                signature.append(_static_key(leaf))
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            for operand in operands:
                _check_operand(operand)
        x64 = jax.config.jax_enable_x64
        key = (structure, tuple(signature), x64, *((name, _static_key(value)) for name, value in statics))
        with self._lock:
            program = self._find(key)
            if program is None:
                wanted = self._wanted(args, kwargs, grad)
                program = self._programs[key] = _Program(self._fn, leaves, structure, statics, wanted, x64)
                if len(self._programs) > self._max_compiled:
                    self._programs.popitem(last=False)
        with same_device():
            return program(operands)

    def _find(self, key: Any) -> "_Program | None":
        try:
            program = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"every argument must be made of tensors, arrays and hashable values ({error}); turn lists of numbers "
                "into tensors, and name options in static_argnames"
            ) from error
        if program is None:
            self._misses += 1
        else:
            self._hits += 1
            self._programs.move_to_end(key)
        return program

    def _split_statics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Arguments with None in place of static ones, and those, each with its position or name."""
        statics = [(index, value) for index, value in enumerate(args) if index in self._static]
        statics += [(name, value) for name, value in sorted(kwargs.items()) if name in self._static]
        args = tuple(None if index in self._static else value for index, value in enumerate(args))
        kwargs = {name: None if name in self._static else value for name, value in kwargs.items()}
        return args, kwargs, tuple(statics)

    def _wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> list[bool]:
        """For each leaf of the arguments, in order, whether its gradient is to be computed."""
        wanted = []
        # Dicts are flattened in the order of their sorted keys.
        for name, value in [*enumerate(args), *sorted(kwargs.items())]:
            chosen = grad and (self._differentiable is None or name in self._differentiable)
            for leaf in jax.tree_util.tree_leaves(value):
                wanted.append(chosen and isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return wanted

    def cache_info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, self._max_compiled, len(self._programs))

    def cache_clear(self) -> None:
        with self._lock:
            self._programs.clear()
            self._hits = self._misses = 0


def _arguments(option: str, chosen: Sequence[int | str], fn: Callable[..., Any]) -> frozenset[int | str]:
    """Both the position and the name of each chosen argument of fn, since a caller may use either."""
    if not chosen:
        return frozenset()
    parameters = inspect.signature(fn).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    resolved: set[int | str] = set(chosen)
    for each in chosen:
        if isinstance(each, str):
            if each in positional:
                resolved.add(positional.index(each))
            known = each in named or inspect.Parameter.VAR_KEYWORD in kinds
        else:
            resolved.update(positional[each : each + 1])
            known = 0 <= each < len(positional) or (each >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds)
        if not known:
            raise ValueError(f"{option}={each!r} is no argument of the function, which takes {positional + named}")
    return frozenset(resolved)


def _static_key(value: Any) -> Any:
    # Equal numbers of different types make different programs, and so do 0.0 and -0.0; NaN equals not even itself.
    if isinstance(value, tuple):
        return type(value), tuple(_static_key(each) for each in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _TraceNumber:
    """Rides along in the result of a jitted function to tell which of its traces it belongs to."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What one trace of the forward function found out.

    Attributes:
        structure: of what `fn` returned.
        floating: which of the output leaves carry a gradient.
        residuals: for each residual of the pull-back, the list that it is found in (operands, outputs, saved or
            constants) and its place there.
        pullback: structure of the pull-back, whose leaves are the residuals.
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
        """Which operands the pull-back needs."""
        return tuple(sorted({index for source, index in self.residuals if source == "operands"}))

    @functools.cached_property
    def from_outputs(self) -> tuple[int, ...]:
        """Which outputs the pull-back needs."""
        return tuple(sorted({index for source, index in self.residuals if source == "outputs"}))


class _Program:
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
        # All operands are waited for, so that one of them can carry the event that orders all (see dlpack.share).
        function = self._forward_with_residuals if self._differentiated else self._forward_only
        self._forward = jax.jit(function, keep_unused=True)
        for operand in operands:
            _check_operand(operand)

    def __call__(self, operands: list[Any]) -> Any:
        if self._differentiated:
            call = _Call(self)
            outputs = _WithGradient.apply(call, *operands)
            return jax.tree_util.tree_unflatten(call.trace.structure, outputs)
        # Kept until the outputs are received: from then on the current stream waits for whoever reads them.
        inputs = self.arrays(operands)
        arrays, number = self._forward(*inputs)
        outputs = jax.tree_util.tree_unflatten(self._traces[number.number].structure, dlpack.receive(arrays))
        del inputs
        return outputs

    def arrays(self, operands: Sequence[Any]) -> list[jax.Array]:
        """The operands as JAX arrays: tensors share memory, or are copied where that is impossible."""
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
        """Leaves and structure of what the function returns for traced operands."""
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
        # Appending is atomic, and traces in other threads may come in between.
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
        """Arrays of the operands, the outputs, the residuals that are neither, and the trace they belong to."""
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
        """The gradient of each operand that is needed, None for the others; `residuals_of` takes the kept as arrays."""
        wanted = tuple(position for position in self._differentiated if needed[position])
        given = [x for x, is_floating in zip(cotangents, trace.floating, strict=True) if is_floating]
        missing = tuple(x is None for x in given)
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        if not wanted or all(missing):
            return gradients
        # The trace itself is part of the key: it lives as long as the program.
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


def _check_operand(operand: Any) -> None:
    if isinstance(operand, torch.Tensor):
        dlpack.check_tensor(operand)
    elif isinstance(operand, jax.core.Tracer):
        raise TypeError(
            "a wrapped JAX function takes concrete arguments, got a traced JAX array; call the JAX function itself "
            "inside of JAX's transformations"
        )
    elif operand.dtype.itemsize == 8 and operand.dtype.kind in "iuf" and not jax.config.jax_enable_x64:
        raise ValueError(
            f"an argument is a numpy array of {operand.dtype}, which JAX would narrow; cast it to 32 bits, or turn on "
            "64-bit types with jax.enable_x64"
        )


def _shareable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a dense copy where JAX cannot share its memory."""
    if type(tensor) not in dlpack.PLAIN_TYPES or tensor.layout is not torch.strided:
        dlpack.check_tensor(tensor)
    return tensor if dlpack.why_not_shared(tensor) is None else dlpack.dense_copy(tensor)


def _distinct(outputs: Sequence[Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Outputs of which none is an operand, a constant or another output: jit may return the buffer of that, and a
    write to one tensor would change the other."""
    distinct: list[jax.Array] = []
    for output in outputs:
        is_new = isinstance(output, jax.core.Tracer) and all(output is not other for other in (*operands, *distinct))
        distinct.append(output if is_new else jnp.array(output, copy=True))
        if distinct[-1].dtype not in dlpack.TENSOR_DTYPES:
            raise TypeError(f"the function returns an array of {distinct[-1].dtype}, which torch has not; cast it")
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
    """Gradients of the chosen operands. Cotangents that are missing are zeros, which XLA need not write to memory."""
    pullback = jax.tree_util.tree_unflatten(trace.pullback, residuals)
    given = iter(cotangents)
    every = [
        jnp.zeros(output.shape, output.dtype) if is_missing else _conjugate(next(given))
        for output, is_missing in zip(trace.outputs, missing, strict=True)
    ]
    gradients = pullback(every)
    # Two gradients may be one array, or a cotangent: tensors of their own all the same.
    return _distinct([_conjugate(gradients[index]) for index in chosen], cotangents)


def _conjugate(x: jax.Array) -> jax.Array:
    """From torch's convention for complex gradients to JAX's, and back."""
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


class _Call:
    """One call on its way through autograd."""

    def __init__(self, program: _Program) -> None:
        self.program = program
        self.trace: Any = None


class _WithGradient(torch.autograd.Function):
    """The forward program, and the backward program as its gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> tuple[torch.Tensor, ...]:
        arrays, outputs, saved, trace = call.program.run_forward(operands)
        tensors = tuple(dlpack.receive(outputs))
        call.trace = trace
        # Arrays among the operands are no tensors to save, and nobody writes to them.
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
        # With create_graph=True: nothing is wrong until somebody differentiates the gradients.
        with torch.no_grad():
            gradients = _backward(ctx, kept, cotangents)
        leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        return None, *_not_differentiable(gradients, [x for x in (*cotangents, *kept, *leaves) if x is not None])


def _backward(
    ctx: Any, kept: tuple[torch.Tensor, ...], cotangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of the operands, None for those that are not asked for."""
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
    """An empty tensor whose storage holds JAX arrays.

    Saved as a tensor, they live exactly as long as autograd keeps saved tensors: a backward pass that does not retain
    the graph frees them, and so does activation checkpointing.
    """
    carrier = torch.empty(0)
    storage: Any = carrier.untyped_storage()
    storage.residuals = saved
    return carrier


def _carried(carrier: torch.Tensor) -> list[jax.Array]:
    residuals = getattr(carrier.untyped_storage(), "residuals", None)
    if residuals is None:
        raise RuntimeError(
            "a hook for saved tensors copied what a wrapped JAX function had saved, and residuals of JAX do not follow "
            "a copy; leave the call out of that hook, and use jax.checkpoint inside of the function instead"
        )
    return residuals


class _NotDifferentiable(torch.autograd.Function):
    """Gradients as they are; differentiating them is an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "wrap_jax gives first derivatives only, and this asks for a derivative of its gradient; take that one "
            "in JAX, as with wrap_jax(jax.grad(fn)) or wrap_jax(jax.hessian(fn))"
        )


def _not_differentiable(gradients: list[torch.Tensor | None], sources: list[torch.Tensor]) -> list[torch.Tensor | None]:
    given = [x for x in gradients if x is not None]
    # The empty tensor makes the gradients require grad in any case, so that nobody takes them for constants.
    guarded = iter(_NotDifferentiable.apply(len(given), *given, *sources, torch.empty(0, requires_grad=True)))
    return [None if x is None else next(guarded) for x in gradients]
