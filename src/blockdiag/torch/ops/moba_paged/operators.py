"""The registered operator of MoBA over a paged cache: its arguments, and the problem that they describe."""

import functools
from typing import Any, NamedTuple

import torch

from blockdiag.ops.moba_paged.checks import describe_moba_paged_call
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.torch.arguments import check_devices, check_plain_tensors, inference_error
from blockdiag.torch.operator import Operator, count_tensors, register
from blockdiag.torch.ops.paged.operators import check_layout, describe_tensors, fake_results, is_absent, page_tensors


class MoBAPagedArguments(NamedTuple):
    """The arguments of the operator, by name; see `moba_paged_attention`.

    Attributes:
        key_scale, value_scale, query_scale: tensors; also numbers on the native path and in checks.
        implementation: comma-separated names as for JAX, empty for None.
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
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        options = self[TENSORS:]
        # Types are part of the key, because True, 1 and 1.0 are equal keys of a dictionary.
        return (*describe_tensors(self[:TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensor arguments; None if absent, and a number for a scale that is given as one."""
        return self[:TENSORS]


TENSORS = count_tensors(MoBAPagedArguments)
"""Number of leading tensor arguments."""


def describe(arguments: MoBAPagedArguments) -> MoBAPagedProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    names = MoBAPagedArguments._fields
    tensors = dict(zip(names, arguments.tensors, strict=False))
    check_plain_tensors(**{name: tensors[name] for name in names[:3]})
    check_devices(**tensors)
    options = {name: getattr(arguments, name) for name in ("block_size", "top_k", "scale")}
    problem = describe_moba_paged_call(**tensors, **options)
    check_plain_tensors(**{name: x for name, x in tensors.items() if not is_absent(x)})
    check_layout(**page_tensors(arguments), key_centroids=arguments.key_centroids)
    return problem


MOBA_PAGED_ATTENTION = Operator(
    name="moba_paged_attention",
    method="attend",
    arguments=MoBAPagedArguments,
    num_results=2,
    fake=fake_results,
    refusal=functools.partial(inference_error, "moba_paged_attention"),
)
register(MOBA_PAGED_ATTENTION)
