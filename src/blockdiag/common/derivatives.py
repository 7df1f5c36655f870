"""Helpers for derivative rules: clear errors for unsupported differentiation, and common varying axes of operands."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_FORWARD_MODE_ERROR = (
    "blockdiag attention does not support forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize, "
    'jax.hessian); use reverse mode (jax.grad, jax.vjp, jax.jacrev), or pass implementation="reference", which '
    "supports both"
)


def reverse_only(x: jax.Array) -> jax.Array:
    """Return `x` unchanged, for an operand of a function that has only reverse-mode rules.

    Its tangent passes through a primitive that can be transposed but not computed. Reverse mode never computes a
    tangent. Forward mode does, and the primitive then raises a TypeError that says what to use instead: immediately
    outside `jax.jit`, during compilation under it.
    """
    return _reverse_only.bind(x)


def _refuse_forward_mode(*args: Any, **params: Any) -> Any:
    raise TypeError(_FORWARD_MODE_ERROR)


def _differentiate(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if isinstance(tangent, ad.Zero):
        return reverse_only(x), tangent
    return reverse_only(x), _tangent.bind(tangent)


def _map(arrays: tuple[Any], axes: tuple[int]) -> tuple[Any, int]:
    return reverse_only(*arrays), *axes


# This is a primitive rather than a `jax.custom_jvp`, because the gradient of a vmap would then map the tangent's
# primitive too. Its batching rule treats that as forward mode and raises the error.
_reverse_only = Primitive("blockdiag_reverse_only")
_reverse_only.def_impl(lambda x: x)
_reverse_only.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_reverse_only] = _differentiate
batching.primitive_batchers[_reverse_only] = _map
mlir.register_lowering(_reverse_only, lambda context, x: [x])

_tangent = Primitive("blockdiag_reverse_only_tangent")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_tangent, lambda cotangent, tangent: [cotangent])
batching.primitive_batchers[_tangent] = _refuse_forward_mode
mlir.register_lowering(_tangent, _refuse_forward_mode)


def not_differentiable(x: jax.Array, name: str) -> jax.Array:
    """Return `x` unchanged, for an operand of the public function `name`, which has no derivative.

    Differentiation with respect to the operand raises a TypeError as soon as it is traced, in either mode.
    """
    return _not_differentiable.bind(x, name=name)


def _refuse_differentiation(primals: tuple[Any], tangents: tuple[Any], *, name: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if isinstance(tangent, ad.Zero):
        return not_differentiable(x, name), tangent
    raise TypeError(
        f"{name} is for inference and cannot be differentiated; give it jax.lax.stop_gradient of its operands, or "
        "train with another attention function, such as moba_attention or jax.nn.dot_product_attention"
    )


def _map_not_differentiable(arrays: tuple[Any], axes: tuple[int], *, name: str) -> tuple[Any, int]:
    return not_differentiable(*arrays, name), *axes


_not_differentiable = Primitive("blockdiag_not_differentiable")
_not_differentiable.def_impl(lambda x, name: x)
_not_differentiable.def_abstract_eval(lambda x, name: x)
ad.primitive_jvps[_not_differentiable] = _refuse_differentiation
batching.primitive_batchers[_not_differentiable] = _map_not_differentiable
mlir.register_lowering(_not_differentiable, lambda context, x, name: [x])


def on_common_axes(*operands: Any) -> Any:
    """Make pytrees of arrays vary over the same manual axes of a surrounding `jax.shard_map`.

    An operand that is replicated over an axis is cast to vary over it. The transpose of the cast is a sum over the
    axis. The gradient of a replicated operand needs this sum, and a custom derivative rule cannot add it.
    """
    axes = frozenset().union(*(_varying_axes(leaf) for leaf in jax.tree.leaves(operands)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, operands)


def _varying_axes(x: jax.Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying
