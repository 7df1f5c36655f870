"""The argument `token_axes` of fused functions: the axis along which each argument is a part of the tokens."""

from collections.abc import Mapping
from typing import Any

import jax

REMEDY = (
    "pass the axis of tokens of all arrays, such as token_axes=1, or a tuple with an axis or None for each argument"
)


def token_axes_of(token_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int | None]:
    """Return the axis of tokens of each leaf of (args, kwargs), None for whole ones.

    Raises:
        ValueError: `token_axes` does not fit the arguments, or names no axis.
    """
    found: list[int | None] = []
    for (name, leaf), axis in zip(named_leaves(args, kwargs), _spread(token_axes, args, kwargs), strict=True):
        if axis is None or not is_array(leaf):
            found.append(None)
            continue
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"`token_axes` has the axis {axis} for `{name}`, of shape {tuple(leaf.shape)}; name one of its axes, "
                "or None where it is whole"
            )
        found.append(axis % leaf.ndim)
    if all(axis is None for axis in found):
        raise ValueError(f"`token_axes`={token_axes!r} names no axis of any array; {REMEDY}")
    return found


def named_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of the arguments of a call, with their names in messages."""
    found = []
    for (where, *rest), leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        name = "args" if where == jax.tree_util.SequenceKey(0) else "kwargs"
        found.append((f"{name}{jax.tree_util.keystr(tuple(rest))}", leaf))
    return found


def is_array(x: Any) -> bool:
    """Return whether a leaf has a shape: an array of JAX or NumPy, or a tensor."""
    return hasattr(x, "shape") and hasattr(x, "ndim")


def _spread(token_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int | None]:
    """Return the axis for each leaf of (args, kwargs)."""
    if isinstance(token_axes, int) and not isinstance(token_axes, bool):
        return [token_axes] * len(jax.tree.leaves((args, kwargs)))
    if not isinstance(token_axes, tuple | list):
        raise ValueError(f"`token_axes` must be a number or a tuple, got {token_axes!r}; {REMEDY}")
    if any(is_array(x) for x in jax.tree.leaves(dict(kwargs))):
        raise ValueError(
            f"`token_axes`={token_axes!r} is for arguments in order, and arrays are passed by name, "
            f"{sorted(kwargs)}; pass them in order"
        )
    found: list[int | None] = []

    def spread(axis: Any, argument: Any) -> None:
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise ValueError(f"`token_axes` must be made of numbers and None, got {axis!r}; {REMEDY}")
        found.extend([axis] * len(jax.tree.leaves(argument)))

    try:
        jax.tree.map(spread, tuple(token_axes), args, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        if "token_axes" in str(error):
            raise
        raise ValueError(f"`token_axes`={token_axes!r} does not fit the {len(args)} arguments ({error})") from None
    return [*found, *[None] * len(jax.tree.leaves(dict(kwargs)))]
