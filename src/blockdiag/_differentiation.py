"""Small pieces that differentiation needs: a clear error in forward mode, and one set of varying axes for operands."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_FORWARD_MODE_ERROR = (
    "blockdiag attention does not support forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize, "
    'jax.hessian); use reverse mode (jax.grad, jax.vjp, jax.jacrev), or pass implementation="reference", which '
    "supports both"
)


@jax.custom_jvp
def reverse_only(x: jax.Array) -> jax.Array:
    """The identity, for an operand of a function that has reverse-mode rules only.

    Its tangent passes through a primitive that can be transposed but not computed. Reverse mode never computes a
    tangent; forward mode does, and then the primitive raises a TypeError that says what to use instead: at once when
    not under `jax.jit`, while compiling under it.
    """
    return x


@reverse_only.defjvp
def _reverse_only_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    # Through the identity again, so that forward mode over reverse mode meets it too.
    return reverse_only(x), _reverse_tangent.bind(tangent)


def _refuse_forward_mode(*args: Any, **params: Any) -> Any:
    raise TypeError(_FORWARD_MODE_ERROR)


_reverse_tangent = Primitive("blockdiag_reverse_only_tangent")
_reverse_tangent.def_impl(_refuse_forward_mode)
_reverse_tangent.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_reverse_tangent, lambda cotangent, tangent: [cotangent])
batching.primitive_batchers[_reverse_tangent] = _refuse_forward_mode
mlir.register_lowering(_reverse_tangent, _refuse_forward_mode)


def on_common_axes(*operands: Any) -> Any:
    """Make pytrees of arrays vary over the same manual axes of a surrounding `jax.shard_map`.

    An operand that is replicated over an axis is cast to vary over it. The transpose of the cast is a sum over the
    axis, which is what the gradient of a replicated operand needs, and which a custom rule cannot add by itself.
    """
    axes = frozenset().union(*(_varying_axes(leaf) for leaf in jax.tree.leaves(operands)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, operands)


def _varying_axes(x: jax.Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying
