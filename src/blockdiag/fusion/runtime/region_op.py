"""A fused region as a differentiable function of its leaves and values."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from blockdiag.common.derivatives import on_common_axes, reverse_only
from blockdiag.common.dispatch import call_implementation
from blockdiag.common.division import divide
from blockdiag.common.meshes import placed_like
from blockdiag.common.shards import Part, Share
from blockdiag.fusion.ir.batching import map_region
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import FEATURES, ROWS, Region, with_leaves
from blockdiag.fusion.runtime import xla
from blockdiag.fusion.runtime.ring import Ring
from blockdiag.fusion.runtime.rows import Pass, Rows, Tokens, gradients_in_order, results_in_order
from blockdiag.fusion.runtime.sharding import as_shares, backward_rule, forward_rule, local_region


@dataclasses.dataclass(frozen=True)
class Call:
    """A region and the options of its evaluation.

    Attributes:
        has_log_sum: True if the log-sum-exp is also a result, with a gradient.
        tokens: how devices share tokens; None if devices divide only batch axes.
    """

    region: Region = dataclasses.field(repr=False)
    implementations: tuple[str, ...] | None
    has_log_sum: bool = False
    tokens: Tokens | None = None


def attend(call: Call, leaves: Sequence[Any], value: Any) -> tuple[Any, Any]:
    """Compute the result of a region, with the axes of the product that it replaces, and its log-sum-exp [batch.., q].

    The log-sum-exp is None unless `call.has_log_sum`.

    Args:
        leaves: an array for each of the region's leaves, with the shape and dtype of the leaf's source.
        value: the values, with the shape and dtype of their variable.
    """
    leaves, value = on_common_axes(tuple(leaves), value)
    floating = [reverse_only(x) for x in _chosen(leaves, _floating(call.region))]
    results = _results(call, *_replaced(leaves, floating, _floating(call.region)), reverse_only(value))
    return results[0], results[1] if call.has_log_sum else None


def _results(call: Call, *operands: Any) -> list[Any]:
    """Compute the results through a primitive that can be mapped and differentiated in either order.

    If vmap comes first, the primitive binds another region, whose gradients of unmapped operands are summed over the
    mapped axis. If differentiation comes first, the primitive becomes `_attend`. Mapping its gradients then gives each
    index gradients of its own.
    """
    # Traced through a fresh function: JAX keeps a traced program as long as its function lives. `_forward`'s function
    # lives as long as the region, and its program would keep the region alive.
    program = jax.make_jaxpr(lambda *given: _forward(call)(*given))(*operands)
    return region_p.bind(*operands, call=call, program=program)


def _wanted(call: Call, results: Sequence[Any]) -> list[Any]:
    """Return the results that a call has: the result and, if requested, the log-sum-exp."""
    return list(results[: 2 if call.has_log_sum else 1])


def _evaluate(*operands: Any, call: Call, program: core.ClosedJaxpr) -> list[Any]:
    return _wanted(call, core.jaxpr_as_fun(program)(*operands))


def _type(*types: Any, call: Call, program: core.ClosedJaxpr) -> tuple[Any, Any]:
    return _wanted(call, program.out_avals), program.effects


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, program: Any) -> tuple[Any, Any]:
    del program
    flags = [not isinstance(x, ad.Zero) for x in tangents]

    def results(*varied: Any) -> list[Any]:
        *leaves, value = _replaced(primals, varied, flags)
        return _wanted(call, _attend(call, tuple(leaves), value))

    return jax.jvp(results, _chosen(primals, flags), _chosen(tangents, flags))


def _map(operands: Sequence[Any], axes: Sequence[int | None], *, call: Call, program: Any) -> tuple[Any, list[int]]:
    flags = [axis is not None for axis in axes]
    operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    (size,) = {len(x) for x in _chosen(operands, flags)}
    mapped = dataclasses.replace(call, region=call.region.once(map_region, size, tuple(flags)))
    results = _results(mapped, *operands)
    return results, [0] * len(results)


region_p = core.Primitive("blockdiag_fused_region")
region_p.multiple_results = True
region_p.def_impl(_evaluate)
region_p.def_effectful_abstract_eval(_type)
ad.primitive_jvps[region_p] = _differentiate
batching.primitive_batchers[region_p] = _map
mlir.register_lowering(region_p, mlir.lower_fun(_evaluate, multiple_results=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, leaves: tuple[Any, ...], value: Any) -> tuple[Any, Any]:
    """Return the result and the log-sum-exp. The backward pass needs the latter, and some calls return it."""
    return _forward(call)(*leaves, value)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """Static flags of a call's leaves: True for leaves whose gradient is unused."""

    leaves: tuple[bool, ...]


def _attend_forward(call: Call, leaves: tuple[Any, ...], value: Any) -> tuple[Any, Any]:
    constant = _Constant(tuple(not x.perturbed for x in leaves))
    arrays = tuple(x.value for x in leaves)
    # `_attend`, not `_forward`: for higher derivatives the saved results must be functions of the arrays.
    output, log_sum = _attend(call, arrays, value.value)
    return (output, log_sum), (arrays, value.value, output, log_sum, constant)


def _attend_backward(call: Call, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, Any]:
    leaves, value, output, log_sum, constant = saved
    cotangent, log_sum_cotangent = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    if cotangent is None and log_sum_cotangent is None:
        return tuple(None for _ in leaves), None
    cotangent = jnp.zeros_like(output) if cotangent is None else cotangent
    region = call.region
    if tuple(leaf.is_constant for leaf in region.leaves) != tuple(constant.leaves):
        call = dataclasses.replace(call, region=region.once(_marked, constant.leaves))
    grads, value_grad = _gradients(call, leaves, value, output, log_sum, cotangent, log_sum_cotangent)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value_grad = None
    return tuple(_replaced([None] * len(leaves), grads, _with_gradient(call.region))), value_grad


def _marked(region: Region, constant: Sequence[bool]) -> Region:
    """Return the region with `is_constant` set on the leaves whose gradient is unused."""
    pairs = zip(region.leaves, constant, strict=True)
    return with_leaves(region, {leaf: dataclasses.replace(leaf, is_constant=flag) for leaf, flag in pairs})


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def attend_with_carriers(call: Call, leaves: Sequence[Any], value: Any, carriers: Mapping[int, Any]) -> tuple[Any, Any]:
    """Compute `attend` on one device and pass the gradients of some operands to float32 carrier arrays instead.

    Args:
        call, leaves, value: see `attend`.
        carriers: float32 arrays that receive the unrounded gradients of leaves, or of the values, by index. Their
            elements are never read.
    """
    if not carriers:
        return attend(call, leaves, value)
    places = tuple(carriers)
    output, log_sum = _attend_carried(call, places, tuple(leaves), value, tuple(carriers.values()))
    return output, log_sum if call.has_log_sum else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_carried(
    call: Call, places: tuple[int, ...], leaves: tuple[Any, ...], value: Any, carriers: tuple[Any, ...]
) -> tuple[Any, Any]:
    return _forward(call)(*leaves, value)


def _carried_forward(
    call: Call, places: tuple[int, ...], leaves: tuple[Any, ...], value: Any, carriers: tuple[Any, ...]
) -> tuple[Any, Any]:
    arrays = tuple(x.value for x in leaves)
    wanted = dict(zip(places, carriers, strict=True))
    constant = _Constant(tuple(not wanted.get(i, x).perturbed for i, x in enumerate(leaves)))
    output, log_sum = _forward(call)(*arrays, value.value)
    return (output, log_sum), (arrays, value.value, output, log_sum, constant)


def _carried_backward(call: Call, places: tuple[int, ...], saved: Any, cotangents: tuple[Any, Any]) -> Any:
    leaves, value, output, log_sum, constant = saved
    cotangent, log_sum_cotangent = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    call = dataclasses.replace(call, region=call.region.once(_marked, constant.leaves))
    cotangent = jnp.zeros_like(output) if cotangent is None else cotangent
    more = [] if log_sum_cotangent is None else [log_sum_cotangent]
    *grads, value_grad = _backward(call)(*leaves, value, output, log_sum, cotangent, *more)
    wide = [*_replaced([None] * len(leaves), grads, _with_gradient(call.region)), value_grad]
    carried = tuple(None if wide[i] is None else wide[i].astype(jnp.float32) for i in places)
    own = [
        None if x is None or i in places or not jnp.issubdtype(like.dtype, jnp.floating) else x.astype(like.dtype)
        for i, (x, like) in enumerate(zip(wide, (*leaves, value), strict=True))
    ]
    return tuple(own[:-1]), own[-1], carried


_attend_carried.defvjp(_carried_forward, _carried_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    call: Call, leaves: Any, value: Any, output: Any, log_sum: Any, cotangent: Any, log_sum_cotangent: Any
) -> tuple[Any, Any]:
    """Return the gradients of the leaves that have one, and of the values; `log_sum_cotangent` may be None."""
    more = [] if log_sum_cotangent is None else [log_sum_cotangent]
    *grads, value_grad = _backward(call)(*leaves, value, output, log_sum, cotangent, *more)
    like = _chosen(leaves, _with_gradient(call.region))
    if jnp.issubdtype(value.dtype, jnp.floating):
        value_grad = value_grad.astype(value.dtype)
    grads = [grad.astype(x.dtype) for grad, x in zip(grads, like, strict=True)]
    return placed_like((grads, value_grad), (like, value))


def _gradients_forward(call: Call, *operands: Any) -> tuple[Any, Any]:
    return _gradients(call, *operands), operands


def _gradients_backward(call: Call, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """Compute higher-order derivatives, of any order, with XLA, which materialises all scores.

    The result and the log-sum-exp are functions of leaves and values. Their contributions are part of the gradients of
    leaves and values, so their own gradients are zero.
    """
    leaves, value, output, log_sum, *given = saved
    region = call.region
    if call.tokens is not None and call.tokens.axis is not None:
        raise NotImplementedError(
            "second derivatives of `fuse` with `context_parallel` are not available inside of `jax.shard_map` by "
            f"strategy {call.tokens.strategy!r}; call it outside, or use strategy='ulysses'"
        )

    def gradients(floating: Sequence[Any], value: Any, given: Sequence[Any]) -> tuple[Any, Any]:
        whole = _replaced(leaves, floating, _floating(region))

        def results(wanted: Sequence[Any], value: Any) -> Any:
            compute = lambda *x: xla.forward(region, x[:-1], x[-1])  # noqa: E731
            if call.tokens is not None:
                compute = results_in_order(region, call.tokens, compute)
            found = compute(*_replaced(whole, wanted, _with_gradient(region)), value)
            return [x for x, cotangent in zip(found, given, strict=True) if cotangent is not None]

        _, pull = jax.vjp(results, _chosen(whole, _with_gradient(region)), value)
        return pull([x for x in given if x is not None])

    _, pull = jax.vjp(gradients, _chosen(leaves, _floating(region)), value, given)
    grads, value_grad, given_grads = pull(cotangents)
    of_leaves = tuple(_replaced([None] * len(leaves), grads, _floating(region)))
    return of_leaves, value_grad, jnp.zeros_like(output), jnp.zeros_like(log_sum), *given_grads


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _floating(region: Region) -> list[bool]:
    """Return a flag for each leaf: True if its dtype is floating."""
    return [bool(jnp.issubdtype(leaf.source.dtype, jnp.floating)) for leaf in region.leaves]


def _with_gradient(region: Region) -> list[bool]:
    """Return a flag for each leaf: True if its gradient is needed."""
    return [leaf.has_gradient for leaf in region.leaves]


def _chosen(arrays: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [x for x, flag in zip(arrays, flags, strict=True) if flag]


def _replaced(arrays: Sequence[Any], chosen: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """Return the arrays with the flagged ones replaced by `chosen`, in order."""
    rest = iter(chosen)
    return [next(rest) if flag else x for x, flag in zip(arrays, flags, strict=True)]


def _forward(call: Call) -> Any:
    """Return the forward function; it is memoised in the region, so JAX traces it once."""
    return call.region.once(_forward_function, call.implementations, call.tokens)


def _forward_function(region: Region, implementations: tuple[str, ...] | None, tokens: Tokens | None) -> Any:
    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        if _is_empty(region):
            # Without queries the results are empty. Without keys they are those of queries that see no key.
            sizes = region.sizes
            output = jnp.zeros(shape_of(region.out_dims, sizes), region.dtype)
            return output, jnp.full([sizes[label] for label in (*region.batch, ROWS)], -jnp.inf, jnp.float32)

        apart = region.once(_apart)

        def on_device(part: Part) -> Callable[..., Sequence[Any]]:
            pass_of = functools.partial(results_of, implementations=implementations)
            if tokens is not None and ROWS in part.axes:
                return _on_device(apart, part, tokens).results(pass_of)
            compute = pass_of(local_region(apart, part.sizes, part.axes))
            return compute if tokens is None else results_in_order(apart, tokens, compute)

        if tokens is not None and tokens.axis is not None:
            return tuple(on_device(_own_part(region, tokens))(*operands))
        output, log_sum = divide(region.once(forward_rule, implementations, tokens), on_device, operands)
        return output, log_sum

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[bool], *operands: Any) -> tuple[Any, Any]:
        mapped = region.once(map_region, axis_size, tuple(is_mapped))
        output, log_sum = _forward(Call(mapped, implementations, tokens=tokens))(*operands)
        return (output, log_sum), (True, True)

    return compute


def _backward(call: Call) -> Any:
    """Return the backward function, which computes gradients of leaves and values; memoised like `_forward`."""
    return call.region.once(_backward_function, call.implementations, call.tokens)


def _backward_function(region: Region, implementations: tuple[str, ...] | None, tokens: Tokens | None) -> Any:
    count = len(region.leaves) + 1

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        if _is_empty(region):
            return tuple(
                map(jnp.zeros_like, (*_chosen(operands[: count - 1], _with_gradient(region)), operands[count - 1]))
            )

        apart = region.once(_apart)

        def on_device(part: Part) -> Callable[..., Sequence[Any]]:
            pass_of = functools.partial(gradients_of, implementations=implementations)
            if tokens is not None and ROWS in part.axes:
                compute = _on_device(apart, part, tokens).gradients(pass_of)
            else:
                compute = pass_of(local_region(apart, part.sizes, part.axes))
                compute = compute if tokens is None else gradients_in_order(apart, tokens, compute)
            return as_shares(apart, compute) if part.axes else compute

        if tokens is not None and tokens.axis is not None:
            # JAX adds up the shares of arrays that all devices have, in their own dtype.
            shares = on_device(_own_part(region, tokens))(*operands)
            return tuple(x.array.astype(x.dtype) if isinstance(x, Share) else x for x in shares)

        # Operands: leaves, values, result, log-sum-exp, cotangent and optionally the log-sum-exp's cotangent.
        has_log_sum_cotangent = len(operands) == count + 4
        rule = region.once(backward_rule, implementations, has_log_sum_cotangent, tokens)
        return tuple(divide(rule, on_device, operands))

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[bool], *operands: Any) -> tuple[Any, Any]:
        # This maps gradients, it does not differentiate a mapped region: each index needs gradients of its own, even of
        # operands that are not mapped. So operands with gradients are broadcast.
        needed = [*_with_gradient(region), True, *[True] * (len(operands) - count)]
        operands = tuple(
            jnp.broadcast_to(x[None], (axis_size, *x.shape)) if is_needed and not flag else x
            for x, flag, is_needed in zip(operands, is_mapped, needed, strict=True)
        )
        flags = tuple(flag or is_needed for flag, is_needed in zip(is_mapped, needed, strict=True))
        mapped = region.once(map_region, axis_size, flags[:count])
        grads = _backward(Call(mapped, implementations, tokens=tokens))(*operands)
        return grads, (True,) * len(grads)

    return compute


def results_of(region: Region, implementations: tuple[str, ...] | None) -> Pass:
    """Return the forward pass of a region, which maps leaves and values to the result and its log-sum-exp."""
    return lambda *x: call_implementation("forward", region, implementations, list(x[:-1]), x[-1])


def gradients_of(region: Region, implementations: tuple[str, ...] | None) -> Pass:
    """Return the backward pass of a region.

    It takes leaves, values, result, log-sum-exp, cotangent and optionally the cotangent of the log-sum-exp. It returns
    the gradients of the leaves that have one, and of the values.
    """
    count = len(region.leaves)

    def gradients(*given: Any) -> Sequence[Any]:
        leaves, value, rest = given[:count], given[count], given[count + 1 :]
        grads, value_grad = call_implementation("backward", region, implementations, leaves, value, *rest)
        return *[x for x, leaf in zip(grads, region.leaves, strict=True) if leaf.has_gradient], value_grad

    return gradients


def _own_part(region: Region, tokens: Tokens) -> Part:
    """Return the part of this device inside of a `jax.shard_map`."""
    assert tokens.axis is not None, "the axis is manual"
    own = region.sizes[ROWS] // tokens.devices
    start = jax.lax.axis_index(tokens.axis) * own
    return Part(region.sizes | {ROWS: own}, {ROWS: start}, {ROWS: (tokens.axis,)})


def _on_device(region: Region, part: Part, tokens: Tokens) -> Rows | Ring:
    """Return the computation of one of the devices that share tokens."""
    return (Ring if tokens.strategy == "ring" else Rows)(region, part, tokens)


def _apart(region: Region) -> Region:
    """Return a copy of a region for traced programs to hold.

    JAX keeps a traced program as long as the traced function, which is stored in the region. A program that held the
    region itself would form a cycle and never be freed.
    """
    return dataclasses.replace(region)


def _is_empty(region: Region) -> bool:
    """Return True if any size other than the feature sizes is zero, such as that of queries or of keys."""
    return any(size == 0 for label, size in region.sizes.items() if not label.startswith(FEATURES))
