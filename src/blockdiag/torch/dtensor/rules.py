"""Rules by which each torch operator divides over the devices of a mesh, from those of `blockdiag.ops.<op>.sharding`.

The rules there describe canonical calls, which flatten batch rows and tokens into one axis. Operators have two axes.
Only the placement of labels changes here, except for the tables of MoBA (see `_list_labels`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from blockdiag.common.rotary_problem import PositionSource, RotaryProblem
from blockdiag.common.rule import Dim, Rule
from blockdiag.ops.append import sharding as append
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.ops.block_diagonal import sharding as block_diagonal
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.ops.key_convolution import sharding as key_convolution
from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem
from blockdiag.ops.moba import sharding as moba
from blockdiag.ops.moba.checks import count_sequence_blocks
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged import sharding as paged
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.torch.ops.append.operators import AppendArguments
from blockdiag.torch.ops.block_diagonal.operators import Arguments
from blockdiag.torch.ops.key_convolution.operators import Arguments as KeyConvolutionArguments
from blockdiag.torch.ops.moba.operators import AttentionArguments, ListArguments, symbolic_slots
from blockdiag.torch.ops.moba_paged.operators import MoBAPagedArguments
from blockdiag.torch.ops.paged.operators import PagedArguments


class Operand(NamedTuple):
    """Facts about a tensor that a rule depends on."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class OperatorRule:
    """The rule of an operator's call, and additional facts that placements need.

    Attributes:
        rule: its operands are the given tensors in the order of the schema, and its results those of the schema.
            Operands that are anchors are neither moved nor cut.
        shared: indices of the operands that may be plain tensors, which each process then has in full.
        rows: the label of batch rows, which need not divide evenly; None without batch rows.
        remedy: the advice if an anchor is not placed as the call needs it.
        alike: indices of the results that are equal in all processes, rather than sums over the labels that they lack.
    """

    rule: Rule
    shared: frozenset[int]
    rows: str | None
    remedy: str = ""
    alike: frozenset[int] = frozenset()


type RuleOf = Callable[..., OperatorRule]
"""Maps the arguments of an operator, with operands in place of tensors, to its rule."""

_ROWS = "sequences"
_CACHE = (
    "distribute the cache once, its heads as those of the query; where there are more devices than key heads, keep "
    "each key head in the cache as often as devices need it"
)
_LISTS = (
    "tables and lists must be sharded over the same batch rows: pass the results of torch.ops.blockdiag.moba_lists "
    "unchanged, since their indices count within each process's part"
)
_SHARED = frozenset((
    "sequence_offsets", "block_lengths", "key_sequence_offsets", "cos", "sin", "positions", "key_mask", "indices",
    "page_table", "kv_lengths", "query_lengths", "query_offsets", "sinks", "key_scale", "value_scale", "query_scale",
))  # fmt: skip
"""Operands that every process may have in full, as plain tensors."""

_WHOLE: tuple[Dim, ...] = ((),)
_COTANGENT = ("cotangent",)


def _block_diagonal(method: str, *values: Any) -> OperatorRule:
    cotangent = _COTANGENT if method == "backward" else ()
    arguments: Any = Arguments(*values[len(cotangent) :])
    query, key, _, offsets, lengths, cos, _, positions = arguments[:8]
    is_uniform = offsets is None and lengths is None
    *lead, heads, head_dim = query.shape
    rotary = None
    if cos is not None:
        is_per_token = "t" in arguments.rotary and not (is_uniform and cos.ndim == 2)
        source: PositionSource = "explicit" if positions is not None else "token" if is_per_token else "sequence"
        rotary = RotaryProblem(
            interleaved=False, query=True, key=True, value=False, table_rows=0, table_dtype="", positions=source
        )
    problem = BlockDiagonalProblem(
        tokens=math.prod(lead),
        query_heads=heads - 2 * arguments.key_heads,
        key_heads=arguments.key_heads if key is None else key.shape[-2],
        head_dim=head_dim,
        dtype="",
        block_size=arguments.block_size,
        sequence_length=lead[-1] if is_uniform else None,
        num_tiles=0,
        is_causal=arguments.is_causal,
        scale=1.0,
        rotary=rotary,
        is_packed=key is None,
    )
    tables = None if rotary is None else (cos, cos, positions)
    rule = block_diagonal.rule(problem, None, method, (query, key, key, None, tables, *cotangent))
    names = ["query"] if key is None else ["query", "key", "value"]
    names += [] if rotary is None else ["cos", "sin"] if positions is None else ["cos", "sin", "positions"]
    given = _given((*cotangent, *Arguments._fields), values)
    labels = dict(zip((*names, *cotangent), rule.operands, strict=True))
    fixed = {"sequence_offsets": _WHOLE, "block_lengths": _WHOLE}
    return _operator_rule(rule, labels, given, fixed, is_batched=query.ndim == 4)


def _key_convolution(method: str, *values: Any) -> OperatorRule:
    cotangent = _COTANGENT if method == "backward" else ()
    arguments: Any = KeyConvolutionArguments(*values[len(cotangent) :])
    key, weights = arguments[:2]
    *lead, heads, head_dim = key.shape
    problem = KeyConvolutionProblem(
        tokens=math.prod(lead),
        key_heads=heads,
        head_dim=head_dim,
        size=weights.shape[0],
        groups=1,
        dtype="",
        weights_dtype="",
        activation=arguments.activation,
        has_residual=arguments.residual,
        sequence_length=lead[-1] if arguments.sequence_offsets is None else None,
        tile_rows=0,
        num_tiles=0,
    )
    rule = key_convolution.rule(problem, None, method, (key, weights, None, *cotangent))
    # The canonical call has weights for several groups.
    key_dims, (_, *of_weights), *others = rule.operands
    weight_dims = tuple(of_weights)
    results = (key_dims, weight_dims)[: len(rule.results)]
    rule = dataclasses.replace(rule, operands=(key_dims, weight_dims, *others), results=results)
    given = _given((*cotangent, *KeyConvolutionArguments._fields), values)
    labels = dict(zip(("key", "weights", *cotangent), rule.operands, strict=True))
    return _operator_rule(rule, labels, given, {"sequence_offsets": _WHOLE}, is_batched=key.ndim == 4)


# The tables of MoBA hold positions of blocks and tokens. In torch, tables and lists count within the local part of a
# process, so they are sharded with the batch rows. In JAX the rule keeps them whole and counts through all sequences,
# because an array has one meaning for all devices. Here only the operators that attend read them.

_LIST_FIELDS = ("blocks", "queries", "offsets", "counts", "entries", "degrees", "own")
_RESULTS = ("output", "log_sum", "output_cotangent", "log_sum_cotangent")


def _moba_rule(query: Operand, key: Operand, method: str, operands: tuple[Any, ...], **sizes: Any) -> Rule:
    """Return the canonical rule; `operands` tell which are present, and `sizes` the numbers of blocks and slots."""
    problem = MoBAProblem(
        query_tokens=math.prod(query.shape[:-2]),
        key_tokens=math.prod(key.shape[:-2]),
        query_heads=query.shape[-2],
        key_heads=key.shape[-2],
        head_dim=query.shape[-1],
        dtype="",
        block_size=0,
        is_causal=True,
        has_key_mask=False,
        scale=1.0,
        **sizes,
    )
    return moba.rule(problem, None, math.prod(query.shape[:-3]), method, operands)


def _list_labels(rule: Rule) -> dict[str, tuple[Dim, ...]]:
    """Return the labels of tables and lists, from the canonical rule of a forward call with all operands."""
    labels = dict(zip(_LIST_FIELDS, rule.operands[4:11], strict=True))
    return labels | {"blocks": (labels["offsets"][1], ()), "queries": (labels["degrees"][1], ())}


def _moba_choice(method: str, *values: Any) -> OperatorRule:
    """Return the rule of `moba_routing` and `moba_lists`."""
    without_routing: Any = (*values[:5], None, 0, 0, *values[5:])
    arguments: Any = ListArguments(*(values if method == "lists" else without_routing))
    query, key, key_mask, _, _, indices = arguments[:6]
    is_batched = query.ndim == 4
    longest = count_sequence_blocks(key.shape[-3], max(arguments.block_size, 1))
    slots = symbolic_slots(arguments.top_k, longest, arguments.is_causal) if indices is None else indices.shape[-1]
    sizes: dict[str, Any] = {"num_blocks": arguments.num_sequences * longest, "slots": slots}
    mask = () if key_mask is None else ("key_mask",)
    rule = _moba_rule(query, key, "route", (True, True, True if mask else None, None, None), **sizes)
    chosen = _moba_rule(query, key, "indices", (True, True, True), **sizes).results
    labels = dict(zip(("query", "key", *mask), rule.operands, strict=True)) | {"indices": chosen[0]}
    fixed = {"sequence_offsets": _WHOLE, "key_sequence_offsets": _WHOLE}
    given = _given(ListArguments._fields, arguments)
    rule = dataclasses.replace(rule, results=chosen)
    found = _operator_rule(rule, labels, given, fixed, is_batched=is_batched)
    if method == "routing":
        return found
    lists = _list_labels(_moba_rule(query, key, "forward", (True,) * 11, **sizes))
    if indices is None or not arguments.is_causal:
        lists["own"] = _WHOLE
    alike = frozenset(i for i, dims in enumerate(lists.values()) if dims[0] != lists["offsets"][0])
    return dataclasses.replace(found, rule=dataclasses.replace(found.rule, results=tuple(lists.values())), alike=alike)


def _moba_attention(method: str, *values: Any) -> OperatorRule:
    results = _RESULTS if method == "backward" else ()
    arguments: Any = AttentionArguments(*values[len(results) :])
    query, key = arguments[:2]
    tokens = max(math.prod(query.shape[:-2]), 1)
    slots = arguments.entries.shape[-1] // tokens
    rule = _moba_rule(
        query, key, method, (True,) * (11 + len(results)), num_blocks=arguments.blocks.shape[0], slots=slots
    )
    names = (*AttentionArguments._fields[:11], *results)
    fixed = _list_labels(rule)
    labels = {name: dims for name, dims in zip(names, rule.operands, strict=True) if name not in fixed}
    given = _given((*results, *AttentionArguments._fields), values)
    found = _operator_rule(rule, labels, given, fixed, is_batched=query.ndim == 4)
    anchors = tuple(number for number, name in enumerate(given) if name in fixed)
    return dataclasses.replace(
        found, rule=dataclasses.replace(found.rule, anchors=anchors, is_anchored=True), remedy=_LISTS
    )


def _paged_problem(arguments: Any) -> PagedProblem:
    pages = arguments.key_pages
    return PagedProblem(
        batch=arguments.kv_lengths.shape[0],
        query_tokens=0,
        query_heads=arguments.query.shape[-2],
        key_heads=pages.shape[2],
        head_dim=pages.shape[-1],
        value_dim=arguments.value_dim if arguments.value_pages is None else arguments.value_pages.shape[-1],
        query_dtype="",
        key_dtype="",
        value_dtype="",
        output_dtype="",
        num_pages=pages.shape[0],
        page_size=pages.shape[1],
        max_pages=0,
        scale=1.0,
        has_page_table=arguments.page_table is not None,
    )


def _paged(*values: Any) -> OperatorRule:
    arguments: Any = PagedArguments(*values)
    problem = _paged_problem(arguments)
    found = _pool_rule(_given(PagedArguments._fields, values), functools.partial(paged.rule, problem, None, ""))
    if arguments.query_offsets is None:
        return found
    # Packed queries have no axis of batch rows. Devices with some of the rows would give partial sums, and a
    # log-sum-exp cannot be summed.
    rule = dataclasses.replace(found.rule, independent=found.rule.independent - {"rows"})
    return dataclasses.replace(found, rule=rule)


def _moba_paged(*values: Any) -> OperatorRule:
    arguments: Any = MoBAPagedArguments(*values)
    problem = MoBAPagedProblem(
        paged=_paged_problem(arguments),
        block_size=arguments.block_size,
        max_blocks=arguments.key_centroids.shape[1],
        slots=0,
    )
    rule = functools.partial(paged.rule, problem.paged, None, "", whole=problem, blocks=problem.max_blocks)
    return _pool_rule(_given(MoBAPagedArguments._fields, values), rule)


def _append(*values: Any) -> OperatorRule:
    arguments: Any = AppendArguments(*values)
    key, pages = arguments.key, arguments.key_pages
    problem = AppendProblem(
        tokens=0,
        batch=arguments.kv_lengths.shape[0],
        query_tokens=None if arguments.query_offsets is not None else 0,
        key_heads=key.shape[-2],
        head_dim=key.shape[-1],
        value_dim=0 if arguments.value is None else arguments.value.shape[-1],
        has_values=arguments.value is not None,
        dtype="",
        key_dtype="",
        value_dtype="",
        num_pages=pages.shape[0],
        page_size=pages.shape[1],
        max_pages=0,
        has_page_table=arguments.page_table is not None,
        key_scale="none" if arguments.key_scale_pages is None else "token",
        value_scale="none" if arguments.value_scale_pages is None else "token",
        block_size=None if arguments.key_centroids is None else 0,
    )
    found = _pool_rule(_given(AppendArguments._fields, values), functools.partial(append.rule, problem, None))
    # The operator writes in place and returns nothing.
    return dataclasses.replace(found, rule=dataclasses.replace(found.rule, results=()))


def _pool_rule(given: Mapping[str, Operand], rule_of: Callable[[Mapping[str, Operand]], Rule]) -> OperatorRule:
    """Return the rule of a call that reads or writes a cache, with tensors as in JAX; a cache never moves."""
    order = paged.OPERANDS if "query" in given else append.OPERANDS
    by_name = {name.removesuffix("_pages") if "scale" in name else name: x for name, x in given.items()}
    rule = rule_of({name: by_name[name] for name in order if name in by_name})
    labels = dict(zip([name for name in order if name in by_name], rule.operands, strict=True))
    numbers = list(by_name)
    anchors = {list(labels)[i] for i in rule.anchors}
    anchors |= {name for name, x in by_name.items() if name.endswith("_scale") and x.ndim == 3}
    shared = [number for number, name in enumerate(numbers) if name in _SHARED and name not in anchors]
    rule = dataclasses.replace(
        rule,
        operands=tuple(labels[name] for name in numbers),
        anchors=tuple(number for number, name in enumerate(numbers) if name in anchors),
    )
    return OperatorRule(rule, frozenset(shared), "rows", _CACHE)


def _operator_rule(
    rule: Rule,
    labels: Mapping[str, tuple[Dim, ...]],
    given: Mapping[str, Operand],
    fixed: Mapping[str, tuple[Dim, ...]],
    *,
    is_batched: bool,
) -> OperatorRule:
    """Return the rule of an operator's call from the rule of the canonical call.

    Args:
        rule: the rule of the canonical call.
        labels: the labels of its operands, by name.
        given: the operands of the operator, in the order of its schema.
        fixed: labels of operands that differ from those of the canonical call.
        is_batched: whether there is an axis of batch rows.
    """
    operands = [
        fixed[name] if name in fixed else _stored(labels[name], x) if is_batched else labels[name]
        for name, x in given.items()
    ]
    results = [_apart(dims) if is_batched else dims for dims in rule.results]
    return OperatorRule(
        dataclasses.replace(rule, operands=tuple(operands), results=tuple(results)),
        frozenset(number for number, name in enumerate(given) if name in _SHARED),
        _ROWS if is_batched else None,
    )


def _given(names: Sequence[str], values: Sequence[Any]) -> dict[str, Operand]:
    """Return the operands among the arguments, by name."""
    return {name: x for name, x in zip(names, values, strict=True) if isinstance(x, Operand)}


def _apart(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the labels of an array after batch rows get an axis of their own."""
    first = dims[0]
    return (first[:1], first[1:], *dims[1:]) if first[:1] == (_ROWS,) else dims


def _stored(dims: tuple[Dim, ...], x: Operand) -> tuple[Dim, ...]:
    """Return the labels of an operand with a batch axis from `dims`, its labels in the canonical call."""
    if x.ndim > len(dims):
        return _apart(dims)
    # All batch rows share tables and positions without a batch axis.
    return (tuple(label for label in dims[0] if label != _ROWS), *dims[1:])


RULES: Mapping[str, RuleOf] = {
    "block_diagonal_forward": functools.partial(_block_diagonal, "forward"),
    "block_diagonal_backward": functools.partial(_block_diagonal, "backward"),
    "block_diagonal_packed_backward": functools.partial(_block_diagonal, "backward"),
    "moba_routing": functools.partial(_moba_choice, "routing"),
    "moba_lists": functools.partial(_moba_choice, "lists"),
    "moba_forward": functools.partial(_moba_attention, "forward"),
    "moba_backward": functools.partial(_moba_attention, "backward"),
    "key_convolution_forward": functools.partial(_key_convolution, "forward"),
    "key_convolution_backward": functools.partial(_key_convolution, "backward"),
    "paged_attention": _paged,
    "moba_paged_attention": _moba_paged,
    "append_to_pages": _append,
}
"""For each operator, the function from its arguments to its rule."""
