"""Calls of the registered operator that appends to a paged cache: its arguments, and the description they stand for."""

from typing import Any, NamedTuple

import torch

from blockdiag.ops.append.checks import describe_append_call
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.torch.ops.paged.call import check_devices, check_layout, check_tensors, describe_tensors, is_absent
from blockdiag.torch.rotary import Rotary

TENSORS = 16
"""The first arguments of the operators are tensors."""


class AppendArguments(NamedTuple):
    """What the operators take, by name; see `append_to_pages`.

    Attributes:
        cos, sin, positions: the tensors of a rotary embedding.
        key_scale, value_scale: scales that are given: tensors, or, for the native path and for checks, numbers.
        key_scale_pages, value_scale_pages: scales that are computed and written.
        rotary: the options of a rotary embedding as letters (see `Rotary.letters`); empty without.
        implementation: names as for JAX with commas between them, empty for None.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    page_table: torch.Tensor | None
    kv_lengths: torch.Tensor
    query_lengths: torch.Tensor | None
    query_offsets: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    positions: torch.Tensor | None
    key_scale: torch.Tensor | float | None
    value_scale: torch.Tensor | float | None
    key_scale_pages: torch.Tensor | None
    value_scale_pages: torch.Tensor | None
    key_centroids: torch.Tensor | None
    rotary: str
    block_size: int | None
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """What decides about checks and launches: everything but the tensors' elements."""
        options = self[TENSORS:]
        # True is 1 to a dictionary.
        return (*describe_tensors(self[:TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors, None for those that are not given, and numbers for scales that are."""
        return self[:TENSORS]

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Those that the call changes."""
        given = self.key_pages, self.value_pages, self.key_scale_pages, self.value_scale_pages, self.key_centroids
        return tuple([one for one in given if one is not None])

    def to_rotary(self) -> Rotary | None:
        """The rotary embedding that the arguments stand for."""
        return Rotary.from_letters(self.rotary, self.cos, self.sin, self.positions)


def describe(arguments: AppendArguments) -> AppendProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    names = AppendArguments._fields
    tensors = dict(zip(names, arguments.tensors, strict=False))
    check_tensors(**{name: tensors[name] for name in names[:4]})
    check_devices(**tensors)
    given = {name: x for name, x in tensors.items() if name not in ("cos", "sin", "positions")}
    for name in ("key_scale", "value_scale"):
        pages = given.pop(f"{name}_pages")
        given[name] = given[name] if pages is None else pages
    problem = describe_append_call(**given, rotary=arguments.to_rotary(), block_size=arguments.block_size)
    check_tensors(**{name: x for name, x in tensors.items() if not is_absent(x)})
    check_layout(**dict(zip(problem.written, arguments.written, strict=True)))
    return problem
