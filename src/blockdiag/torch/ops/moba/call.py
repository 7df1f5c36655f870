"""Arguments and results of the registered operators of MoBA, and the problem that they describe."""

import math
from typing import Any, NamedTuple

import torch

from blockdiag.ops.moba.checks import check_moba_operands, describe_moba_call
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem


class ListArguments(NamedTuple):
    """The arguments of the operators that route, by name.

    Attributes:
        query: [B, T, N, H] or [T, N, H].
        key: [B, S, K, H] or [S, K, H].
        key_mask: bool [B, S] or [S], or None.
        sequence_offsets, key_sequence_offsets: int32 [num_sequences + 1] or None.
        indices: the indices of a given routing, int32 [B, T, N, k] or [T, N, k], or None.
        given_block_size, given_num_blocks: the other attributes of a given routing, 0 without one.
        implementation: comma-separated names as for JAX, empty for None.
    """

    query: torch.Tensor
    key: torch.Tensor
    key_mask: torch.Tensor | None
    sequence_offsets: torch.Tensor | None
    key_sequence_offsets: torch.Tensor | None
    indices: torch.Tensor | None
    given_block_size: int
    given_num_blocks: int
    block_size: int
    top_k: int
    is_causal: bool
    implementation: str

    @property
    def num_sequences(self) -> int:
        """Number of batch rows; 1 for a packed call, whose sequences follow from offsets."""
        return math.prod(self.query.shape[:-3])


class AttentionArguments(NamedTuple):
    """The arguments of the operators that attend, by name: operands and the fields of `ListResults`.

    Attributes:
        own: bool [N, query_tokens], True for queries that see their own block; None where all do or none has one.
        has_padding: whether rows may belong to no block, such as those after packed sequences.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    blocks: torch.Tensor
    queries: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    entries: torch.Tensor
    degrees: torch.Tensor
    own: torch.Tensor | None
    block_size: int
    scale: float | None
    is_causal: bool
    has_padding: bool
    implementation: str


class ListResults(NamedTuple):
    """Results of routing that attention reads: tables (see `moba_tables`), lists (see `Lists`), and own blocks.

    Attributes:
        own: bool [N, query_tokens] in causal calls with a given routing, else empty.
    """

    blocks: torch.Tensor
    queries: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    entries: torch.Tensor
    degrees: torch.Tensor
    own: torch.Tensor


class _Given(NamedTuple):
    """The attributes of a routing, for checks."""

    indices: torch.Tensor
    block_size: int
    num_blocks: int


def describe_lists(arguments: ListArguments, value: Any = None, scale: float | None = None) -> MoBAProblem:
    """Check the arguments and describe the call.

    Args:
        arguments: the arguments of the operator.
        value, scale: arguments of attention, checked too if they are already known.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    query, key, key_mask, sequence_offsets, key_sequence_offsets, indices = arguments[:6]
    check_devices(
        query,
        key=key,
        value=value,
        key_mask=key_mask,
        sequence_offsets=sequence_offsets,
        key_sequence_offsets=key_sequence_offsets,
        **{"routing.indices": indices},
    )
    check_moba_operands(query, key, value)
    given = None
    if indices is not None:
        given = _Given(indices, arguments.given_block_size, arguments.given_num_blocks)
    return describe_moba_call(
        query,
        key,
        block_size=arguments.block_size,
        top_k=arguments.top_k,
        scale=scale,
        is_causal=arguments.is_causal,
        sequence_offsets=sequence_offsets,
        key_sequence_offsets=key_sequence_offsets,
        key_mask=key_mask,
        routing=given,
    )


def describe_attention(arguments: AttentionArguments) -> MoBAProblem:
    """Check the shapes of tables and lists, which follow from a checked call, and describe the call.

    Raises:
        ValueError: a tensor does not have the shape or dtype that the others imply.
    """
    query, key = arguments.query, arguments.key
    check_devices(query, **{name: getattr(arguments, name) for name in AttentionArguments._fields[1:11]})
    check_moba_operands(query, key, arguments.value)
    tokens, heads = math.prod(query.shape[:-2]), query.shape[-2]
    num_blocks = arguments.blocks.shape[0]
    slots = arguments.entries.shape[-1] // max(tokens, 1)
    problem = MoBAProblem(
        query_tokens=tokens,
        key_tokens=math.prod(key.shape[:-2]),
        query_heads=heads,
        key_heads=key.shape[-2],
        head_dim=query.shape[-1],
        dtype=str(query.dtype).removeprefix("torch."),
        block_size=arguments.block_size,
        num_blocks=num_blocks,
        slots=slots,
        is_causal=arguments.is_causal,
        has_key_mask=arguments.key_mask is not None,
        has_padding=arguments.has_padding,
        scale=1.0 / math.sqrt(query.shape[-1]) if arguments.scale is None else arguments.scale,
    )
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "key_mask": (tuple(key.shape[:-2]), torch.bool),
        "blocks": ((num_blocks, 4), torch.int32),
        "queries": ((tokens, 4), torch.int32),
        "offsets": ((heads, num_blocks), torch.int32),
        "counts": ((heads, num_blocks), torch.int32),
        "entries": ((heads, tokens * slots), torch.int32),
        "degrees": ((heads, tokens), torch.int32),
        "own": ((heads, tokens), torch.bool),
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(arguments, name)
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
            raise ValueError(
                f"`{name}` must be {dtype} of shape {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}; pass "
                "what torch.ops.blockdiag.moba_lists returns for the same call"
            )
    return problem


def check_devices(query: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that all tensors are on the device of `query`.

    Raises:
        ValueError: a tensor is on another device; the message names it.
    """
    for name, tensor in others.items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"`{name}` must be on the device of `query`, {query.device}, got {tensor.device}; move one of them"
            )


def is_empty(problem: MoBAProblem) -> bool:
    """Return whether there are no queries or no blocks."""
    return problem.query_tokens == 0 or problem.num_blocks == 0


def no_lists(problem: MoBAProblem, device: torch.device) -> Lists:
    """Return lists without entries, for calls in which queries choose no block."""
    heads, tokens = problem.query_heads, problem.query_tokens
    shapes = (heads, problem.num_blocks), (heads, problem.num_blocks), (heads, tokens * problem.slots), (heads, tokens)
    return Lists(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


def no_results(problem: MoBAProblem, arguments: ListArguments) -> ListResults:
    """Return the results of `moba_lists` for an empty call."""
    device = arguments.query.device
    blocks = torch.zeros((problem.num_blocks, 4), dtype=torch.int32, device=device)
    queries = torch.zeros((problem.query_tokens, 4), dtype=torch.int32, device=device)
    has_own = problem.is_causal and arguments.indices is not None
    own = torch.zeros(own_shape(problem, has_own), dtype=torch.bool, device=device)
    return ListResults(blocks, queries, *no_lists(problem, device), own)


def own_shape(problem: MoBAProblem, has_own: bool) -> tuple[int, ...]:
    """Return the shape of `ListResults.own`."""
    return (problem.query_heads, problem.query_tokens) if has_own else (0,)
