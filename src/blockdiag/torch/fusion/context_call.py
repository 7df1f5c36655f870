"""Arguments of fused functions with context parallelism: the axes that processes share."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from blockdiag.torch.context.parallel import ContextParallel, check_plain, compare_tokens

_REMEDY = (
    "pass the axis of tokens of all arrays, such as token_axes=1, or a tuple with an axis or None for each argument"
)


def check_shared_call(
    context: ContextParallel, token_axes: Any, implementation: str | Sequence[str] | None, fallback: bool
) -> None:
    """Check the options that do not depend on the arguments of a call.

    Raises:
        ValueError: `context_parallel` has the wrong type, or cannot be combined with the other options.
    """
    check_plain(context)
    if implementation == "reference":
        raise ValueError(
            "implementation='reference' is the function as it stands, which `context_parallel` does not divide; "
            "leave out one of them, or use implementation='xla'"
        )
    if fallback:
        raise ValueError(
            "`fallback` runs the function as it stands, of this process's tokens alone where `context_parallel` is "
            "given; leave out one of them"
        )
    if token_axes is None:
        raise ValueError(f"`context_parallel` needs `token_axes`; {_REMEDY}")


def shared_axes(
    context: ContextParallel, token_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[int | None]:
    """Return the token axis of each leaf of (args, kwargs), None for leaves that are whole.

    Raises:
        ValueError: `token_axes` does not fit the arguments, or an argument is a DTensor or a nested tensor.
    """
    found: list[int | None] = []
    for (name, leaf), axis in zip(_named(args, kwargs), _spread(token_axes, args, kwargs), strict=True):
        if isinstance(leaf, torch.Tensor):
            check_plain(context, **{name: leaf})
        if axis is None or not _is_array(leaf):
            found.append(None)
            continue
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"`token_axes` has the axis {axis} for `{name}`, of shape {tuple(leaf.shape)}; name one of its axes, "
                "or None where it is whole"
            )
        found.append(axis % leaf.ndim)
    if all(axis is None for axis in found):
        raise ValueError(f"`token_axes`={token_axes!r} names no axis of any array; {_REMEDY}")
    return found


def compare_parts(
    context: ContextParallel,
    axes: Sequence[int | None],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None,
) -> None:
    """Check that the parts of all processes are equally large.

    Args:
        context: the processes.
        axes: the result of `shared_axes`.
        args, kwargs: the arguments of the call.
        device: the device of its tensors.

    Raises:
        ValueError: there is no tensor, or processes have different numbers of tokens.
    """
    if device is None:
        raise ValueError("`context_parallel` needs a tensor among the arguments, whose device the processes use")
    pairs = zip(_named(args, kwargs), axes, strict=True)
    compare_tokens(context, {name: leaf.shape[axis] for (name, leaf), axis in pairs if axis is not None}, device)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of the arguments of a call, with names for error messages."""
    found = []
    for (where, *rest), leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        name = "args" if where == jax.tree_util.SequenceKey(0) else "kwargs"
        found.append((f"{name}{jax.tree_util.keystr(tuple(rest))}", leaf))
    return found


def _spread(token_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int | None]:
    """Return the axis of each leaf of (args, kwargs)."""
    if isinstance(token_axes, int) and not isinstance(token_axes, bool):
        return [token_axes] * len(jax.tree.leaves((args, kwargs)))
    if not isinstance(token_axes, tuple | list):
        raise ValueError(f"`token_axes` must be a number or a tuple, got {token_axes!r}; {_REMEDY}")
    if any(_is_array(x) for x in jax.tree.leaves(dict(kwargs))):
        raise ValueError(
            f"`token_axes`={token_axes!r} is for arguments in order, and arrays are passed by name, "
            f"{sorted(kwargs)}; pass them in order"
        )
    found: list[int | None] = []

    def spread(axis: Any, argument: Any) -> None:
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise ValueError(f"`token_axes` must be made of numbers and None, got {axis!r}; {_REMEDY}")
        found.extend([axis] * len(jax.tree.leaves(argument)))

    try:
        jax.tree.map(spread, tuple(token_axes), args, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        if "token_axes" in str(error):
            raise
        raise ValueError(f"`token_axes`={token_axes!r} does not fit the {len(args)} arguments ({error})") from None
    return [*found, *[None] * len(jax.tree.leaves(dict(kwargs)))]


def _is_array(x: Any) -> bool:
    return isinstance(x, torch.Tensor | jax.Array | np.ndarray | np.generic)


def whole_type(own: jax.ShapeDtypeStruct, axis: int, count: int) -> jax.ShapeDtypeStruct:
    """Return the type of a whole array from the type of one of `count` parts."""
    shape = tuple(size * count if place == axis else size for place, size in enumerate(own.shape))
    return jax.ShapeDtypeStruct(shape, own.dtype)
