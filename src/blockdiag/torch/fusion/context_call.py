"""Arguments of fused functions with context parallelism: the axes that processes share."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from blockdiag.fusion.runtime.token_axes import REMEDY, named_leaves, token_axes_of
from blockdiag.torch.context.parallel import ContextParallel, check_plain, compare_tokens


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
            "implementation='reference' runs the function unchanged, which `context_parallel` cannot divide; "
            "omit one of them, or use implementation='xla'"
        )
    if fallback:
        raise ValueError(
            "`fallback` runs the function unchanged, which with `context_parallel` would see only this process's "
            "tokens; omit one of them"
        )
    if token_axes is None:
        raise ValueError(f"`context_parallel` needs `token_axes`; {REMEDY}")


def shared_axes(
    context: ContextParallel, token_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[int | None]:
    """Return the token axis of each leaf of (args, kwargs), None for leaves that are whole.

    Raises:
        ValueError: `token_axes` does not fit the arguments, or an argument is a DTensor or a nested tensor.
    """
    for name, leaf in named_leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            check_plain(context, **{name: leaf})
    return token_axes_of(token_axes, args, kwargs)


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
    pairs = zip(named_leaves(args, kwargs), axes, strict=True)
    compare_tokens(context, {name: leaf.shape[axis] for (name, leaf), axis in pairs if axis is not None}, device)


def whole_type(own: jax.ShapeDtypeStruct, axis: int, count: int) -> jax.ShapeDtypeStruct:
    """Return the type of a whole array from the type of one of `count` parts."""
    shape = tuple(size * count if place == axis else size for place, size in enumerate(own.shape))
    return jax.ShapeDtypeStruct(shape, own.dtype)
