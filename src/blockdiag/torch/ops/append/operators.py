"""The registered operator that appends to a paged cache: its arguments, and the problem that they describe."""

from typing import Any, NamedTuple

import torch

from blockdiag.ops.append.checks import describe_append_call
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.torch.arguments import check_devices, check_plain_tensors
from blockdiag.torch.operator import Mutated, Operator, count_tensors, register
from blockdiag.torch.ops.paged.operators import check_layout, describe_tensors, is_absent
from blockdiag.torch.rotary import Rotary


class AppendArguments(NamedTuple):
    """The arguments of the operator, by name; see `append_to_pages`.

    Attributes:
        cos, sin, positions: the tensors of a rotary embedding.
        key_scale, value_scale: given scales: tensors; also numbers on the native path and in checks.
        key_scale_pages, value_scale_pages: pages of scales, which are computed and written.
        rotary: the options of a rotary embedding as letters (see `Rotary.letters`); empty without one.
        implementation: comma-separated names as for JAX, empty for None.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    key_pages: Mutated
    value_pages: Mutated | None
    page_table: torch.Tensor | None
    kv_lengths: torch.Tensor
    query_lengths: torch.Tensor | None
    query_offsets: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    positions: torch.Tensor | None
    key_scale: torch.Tensor | float | None
    value_scale: torch.Tensor | float | None
    key_scale_pages: Mutated | None
    value_scale_pages: Mutated | None
    key_centroids: Mutated | None
    rotary: str
    block_size: int | None
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        options = self[TENSORS:]
        # Types are part of the key, because True and 1 are equal keys of a dictionary.
        return (*describe_tensors(self[:TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensor arguments; None if absent, and a number for a scale that is given as one."""
        return self[:TENSORS]

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the call mutates."""
        given = self.key_pages, self.value_pages, self.key_scale_pages, self.value_scale_pages, self.key_centroids
        return tuple([one for one in given if one is not None])

    def to_rotary(self) -> Rotary | None:
        """Return the rotary embedding that the arguments encode."""
        return Rotary.from_letters(self.rotary, self.cos, self.sin, self.positions)


TENSORS = count_tensors(AppendArguments)
"""Number of leading tensor arguments."""


def describe(arguments: AppendArguments) -> AppendProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    names = AppendArguments._fields
    tensors = dict(zip(names, arguments.tensors, strict=False))
    check_plain_tensors(**{name: tensors[name] for name in names[:4] if tensors[name] is not None})
    check_devices(**tensors)
    given = {name: x for name, x in tensors.items() if name not in ("cos", "sin", "positions")}
    for name in ("key_scale", "value_scale"):
        pages = given.pop(f"{name}_pages")
        given[name] = given[name] if pages is None else pages
    problem = describe_append_call(**given, rotary=arguments.to_rotary(), block_size=arguments.block_size)
    check_plain_tensors(**{name: x for name, x in tensors.items() if not is_absent(x)})
    check_layout(**dict(zip(problem.written, arguments.written, strict=True)))
    return problem


def _fake(arguments: AppendArguments) -> None:
    """Write nothing."""


# Without a derivative: the public function refuses tensors that autograd tracks.
APPEND_TO_PAGES = Operator(
    name="append_to_pages", method="append", arguments=AppendArguments, num_results=0, fake=_fake
)
register(APPEND_TO_PAGES)
