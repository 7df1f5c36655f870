"""Arguments of a fused function whose tokens several processes share: which of their axes are divided."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from blockdiag.torch._context_parallel import ContextParallel, check_plain, compare_tokens

_REMEDY = (
    "pass the axis of tokens of all arrays, such as token_axes=1, or a tuple with an axis or None for each argument"
)


def check_shared_call(
    context: ContextParallel, token_axes: Any, implementation: str | Sequence[str] | None, fallback: bool
) -> None:
    """Check what does not depend on the arguments of a call.

    Raises:
        ValueError: `context_parallel` is something else, or does not go with the other options.
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
    context: ContextParallel,
    token_axes: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None,
) -> list[int | None]:
    """Return the axis of tokens of each leaf of (args, kwargs), None of those that are whole.

    Raises:
        ValueError: `token_axes` does not fit the arguments, an argument is a DTensor or a nested tensor, or processes
            have different numbers of tokens.
    """
    wanted = _spread(token_axes, args, kwargs)
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    found: list[int | None] = []
    tokens: dict[str, int] = {}
    for (path, leaf), axis in zip(leaves, wanted, strict=True):
        (where, *rest) = path
        name = f"{'args' if where == jax.tree_util.SequenceKey(0) else 'kwargs'}{jax.tree_util.keystr(tuple(rest))}"
        if not _is_array(leaf):
            found.append(None)
            continue
        if isinstance(leaf, torch.Tensor):
            check_plain(context, **{name: leaf})
        if axis is None:
            found.append(None)
            continue
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"`token_axes` has the axis {axis} for `{name}`, of shape {tuple(leaf.shape)}; name one of its axes, or "
                "None where it is whole"
            )
        found.append(axis % leaf.ndim)
        tokens[name] = leaf.shape[axis]
    if device is None:
        raise ValueError("`context_parallel` needs a tensor among the arguments, whose device the processes use")
    if not tokens:
        raise ValueError(f"`token_axes`={token_axes!r} names no axis of any array; {_REMEDY}")
    compare_tokens(context, tokens, device)
    return found


def _spread(token_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int | None]:
    """The axis for each leaf of (args, kwargs)."""
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
    """Return the type of a whole array, from that of the part of one of `count` processes."""
    shape = tuple(size * count if place == axis else size for place, size in enumerate(own.shape))
    return jax.ShapeDtypeStruct(shape, own.dtype)
