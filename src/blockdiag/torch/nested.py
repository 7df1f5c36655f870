"""Nested tensors: jagged ones are unpacked into packed sequences, and errors for others show the conversion."""

from typing import Any

import torch


def unpack(sequence_offsets: Any = None, **given: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the packed tokens of jagged tensors, and the int32 offsets of the sequences in each.

    Args:
        sequence_offsets: offsets or lengths that were passed to the call, which must be None.
        given: jagged tensors [B, tokens, ...], by name.

    Raises:
        ValueError: one of the tensors is not jagged along its second axis, or offsets are given twice.
    """
    if sequence_offsets is not None:
        raise ValueError(
            f"`sequence_offsets` and `block_lengths` must be None where `{next(iter(given))}` is a nested tensor, "
            "which has offsets of its own; pass its values() with other ones"
        )
    for name, tensor in given.items():
        if not tensor.is_nested or tensor.layout is not torch.jagged or tensor.lengths() is not None:
            raise refusal(name, tensor)
        # If sequences lie along another axis than the second, the other axes are not those of each token.
        if tensor.values().shape[1:] != tensor.shape[2:]:
            raise refusal(name, tensor)
    return [x.values() for x in given.values()], [x.offsets().int() for x in given.values()]


def check_same_sequences(**given: torch.Tensor) -> None:
    """Check that jagged tensors have sequences of the same lengths.

    Raises:
        ValueError: a tensor has other lengths than the first; the message names it.
    """
    (first, reference), *others = given.items()
    for name, tensor in others:
        # Torch gives all tensors that share their offsets one symbol, so this comparison never waits for a GPU.
        if tensor.shape[1] != reference.shape[1]:
            raise ValueError(
                f"`{name}` must have the offsets of `{first}`, got a nested tensor with others; make it with\n"
                f"    torch.nested.nested_tensor_from_jagged({name}.values(), offsets={first}.offsets())\n"
                "where the lengths are equal"
            )


def repack(output: torch.Tensor, like: Any) -> torch.Tensor:
    """Return packed tokens as a jagged tensor with the offsets of `like`."""
    return torch.nested.nested_tensor_from_jagged(output, offsets=like.offsets())


def refuse(**given: Any) -> None:
    """Raise a ValueError if one of these is a nested tensor, with the lines that convert it."""
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_nested:
            raise refusal(name, tensor)


def refusal(name: str, tensor: Any) -> ValueError:
    """Return the error for a nested tensor that is not supported, or for a plain tensor among nested ones."""
    if not tensor.is_nested:
        return ValueError(
            f"`{name}` must be nested as the other tensors are, got a plain tensor of shape {tuple(tensor.shape)}; "
            "pass packed tokens and `sequence_offsets` for all of them"
        )
    if tensor.layout is torch.jagged:
        whole = name if tensor.lengths() is None else f"{name}.contiguous()"
        lines = (f"packed = {whole}.values()", f"offsets = {whole}.offsets().int()")
        found = "a nested tensor that is transposed or has holes, or that this function does not support"
    else:
        lines = (
            f"packed = torch.cat({name}.unbind())",
            f"offsets = torch.tensor([0, *map(len, {name}.unbind())], device={name}.device).cumsum(0).int()",
        )
        found = f"a nested tensor of layout {tensor.layout}"
    return ValueError(
        f"`{name}` is {found}; pass packed tokens, and the offsets as `sequence_offsets` (`query_offsets` of a paged "
        "call):\n" + "\n".join(f"    {line}" for line in lines)
    )
