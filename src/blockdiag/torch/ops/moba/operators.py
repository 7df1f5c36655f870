"""The registered operators of MoBA: `torch.ops.blockdiag.moba_*`, their arguments and the problem that these describe.

- `moba_routing` returns the routing, see `Routing.indices`.
- `moba_lists` routes, or takes a given routing, and returns the inputs of attention: tables, lists and own blocks.
- `moba_forward` and `moba_backward` attend.

A policy of selective activation checkpointing that saves the results of `moba_lists` and `moba_forward` keeps
everything that the backward pass needs besides query, key and value.
"""

import functools
import math
from typing import Any, NamedTuple

import torch

from blockdiag.ops.moba.checks import check_moba_operands, count_sequence_blocks, describe_moba_call
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.torch.arguments import check_devices, second_derivative_error
from blockdiag.torch.operator import Gradients, Operator, Size, count_tensors, register


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
    given_num_blocks: Size
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


ATTENTION_TENSORS = count_tensors(AttentionArguments)
"""Number of leading tensor arguments of attention."""


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
        query=query,
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
    check_devices(**dict(zip(AttentionArguments._fields, arguments[:ATTENTION_TENSORS], strict=False)))
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
                "the results of torch.ops.blockdiag.moba_lists for the same call"
            )
    return problem


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


# Fake kernels


def _fake_routing(arguments: ListArguments) -> torch.Tensor:
    query = arguments.query
    return query.new_empty((*query.shape[:-1], max(arguments.top_k, 0)), dtype=torch.int32)


def _fake_lists(arguments: ListArguments) -> tuple[torch.Tensor, ...]:
    query, key = arguments.query, arguments.key
    tokens, heads, key_length = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-3]
    block_size = max(arguments.block_size, 1)
    longest = count_sequence_blocks(key_length, block_size)
    if arguments.sequence_offsets is not None:
        num_blocks = symbolic_packed_blocks(key_length, arguments.sequence_offsets.shape[0] - 1, block_size)
    else:
        num_blocks = arguments.num_sequences * longest
    if arguments.indices is not None:
        slots: Any = arguments.indices.shape[-1]
    else:
        slots = symbolic_slots(arguments.top_k, longest, arguments.is_causal)
    has_own = arguments.is_causal and arguments.indices is not None
    shapes = (
        (num_blocks, 4), (tokens, 4), (heads, num_blocks), (heads, num_blocks), (heads, tokens * slots), (heads, tokens)
    )  # fmt: skip
    if torch.compiler.is_exporting():
        shapes = tuple(tuple(map(_exported_size, shape)) for shape in shapes)
    own = query.new_empty((heads, tokens) if has_own else (0,), dtype=torch.bool)
    return (*(query.new_empty(shape, dtype=torch.int32) for shape in shapes), own)


def _exported_size(size: Any) -> Any:
    """Replace a size that follows from symbols by one that is only known when the operator runs.

    Torch asks of each derived size whether it is 0 or 1, such as that of a table of one block. A compiled function is
    recompiled where the answer differs, but an exported program must support all sizes.
    """
    return torch.library.get_ctx().new_dynamic_size() if isinstance(size, torch.SymInt) else size


# Counts as in `blockdiag.ops.moba.checks`, for sizes that may be symbolic. Python's `min`, `max` and `if` would compare
# a symbol with a number. A compiled function would then be recompiled on either side of it, and torch.export, which has
# one program for all sizes, would refuse the call.


def symbolic_packed_blocks(tokens: Any, num_sequences: Any, block_size: int) -> Any:
    """Return `count_packed_blocks` of sizes that may be symbolic."""
    # Without sequences there are no blocks, however many tokens there are.
    most = (tokens + num_sequences * (block_size - 1)) // block_size
    return torch.sym_min(torch.sym_min(tokens, most), tokens * num_sequences)


def symbolic_slots(top_k: int, sequence_blocks: Any, is_causal: bool) -> Any:
    """Return `count_slots` of sizes that may be symbolic."""
    return torch.sym_max(torch.sym_min(top_k, sequence_blocks) - int(is_causal), 0)


def _fake_forward(arguments: AttentionArguments) -> tuple[torch.Tensor, ...]:
    query = arguments.query
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=wide)


def _fake_backward(arguments: AttentionArguments, *leading: torch.Tensor) -> tuple[torch.Tensor, ...]:
    del leading
    return tuple(operand.new_empty(operand.shape) for operand in arguments[:3])


# The operators

ROUTING = Operator(
    name="moba_routing",
    method="route",
    arguments=ListArguments,
    constants={"indices": None, "given_block_size": 0, "given_num_blocks": 0},
    num_results=1,
    fake=_fake_routing,
    is_constant=True,
)
LISTS = Operator(
    name="moba_lists",
    method="make_lists",
    arguments=ListArguments,
    shown_names={"indices": "routing.indices"},
    num_results=len(ListResults._fields),
    fake=_fake_lists,
    is_constant=True,
)
BACKWARD = Operator(
    name="moba_backward",
    method="differentiate",
    leading=("output", "log_sum", "output_cotangent", "log_sum_cotangent"),
    arguments=AttentionArguments,
    num_results=3,
    fake=_fake_backward,
    refusal=functools.partial(second_derivative_error, "MoBA", "moba_attention"),
)
FORWARD = Operator(
    name="moba_forward",
    method="attend",
    arguments=AttentionArguments,
    num_results=2,
    fake=_fake_forward,
    gradients=Gradients(BACKWARD, takes_results=True),
)
register(ROUTING, LISTS, FORWARD, BACKWARD)
