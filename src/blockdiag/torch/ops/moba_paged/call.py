"""Calls of the registered operator of MoBA over a paged cache: its arguments, and the description they stand for."""

from typing import Any, NamedTuple

import torch

from blockdiag.ops.moba_paged.checks import describe_moba_paged_call
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.torch.ops.paged.call import (
    check_devices,
    check_layout,
    check_tensors,
    describe_tensors,
    is_absent,
    page_tensors,
)

TENSORS = 10
"""The first arguments of the operators are tensors."""


class MoBAPagedArguments(NamedTuple):
    """What the operators take, by name; see `moba_paged_attention`.

    Attributes:
        key_scale, value_scale, query_scale: tensors, or, for the native path and for checks, numbers.
        implementation: names as for JAX with commas between them, empty for None.
    """

    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    page_table: torch.Tensor | None
    kv_lengths: torch.Tensor
    key_centroids: torch.Tensor
    query_lengths: torch.Tensor | None
    key_scale: torch.Tensor | float | None
    value_scale: torch.Tensor | float | None
    query_scale: torch.Tensor | float | None
    block_size: int
    top_k: int
    scale: float | None
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """What decides about checks and launches: everything but the tensors' elements."""
        options = self[TENSORS:]
        # True is 1 and 1.0 to a dictionary.
        return (*describe_tensors(self[:TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors, None for those that are not given, and numbers for scales that are."""
        return self[:TENSORS]


def describe(arguments: MoBAPagedArguments) -> MoBAPagedProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    names = MoBAPagedArguments._fields
    tensors = dict(zip(names, arguments.tensors, strict=False))
    check_tensors(**{name: tensors[name] for name in names[:3]})
    check_devices(**tensors)
    options = {name: getattr(arguments, name) for name in ("block_size", "top_k", "scale")}
    problem = describe_moba_paged_call(**tensors, **options)
    check_tensors(**{name: x for name, x in tensors.items() if not is_absent(x)})
    check_layout(**page_tensors(arguments), key_centroids=arguments.key_centroids)
    return problem
