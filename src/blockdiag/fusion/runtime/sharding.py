"""Sharding rules of fused regions: batch labels are independent, and all other labels stay whole.

If devices share tokens, rows (queries) are independent as well. Keys are then sharded like queries, so the rules give
both the same label. Each device's code either gathers keys before the kernels and sums their gradients afterwards
(`rows.py`), or passes shards of the keys around (`ring.py`).
"""

import dataclasses
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from blockdiag.common.rule import Dim as Labels
from blockdiag.common.rule import Rule
from blockdiag.common.shards import Share
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.structural_hash import key_of
from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim, Leaf, Region, Source, with_leaves

type Implementations = tuple[str, ...] | None


def forward_rule(region: Region, implementations: Implementations, tokens: Hashable | None = None) -> Rule:
    """Return the rule of a forward pass, which maps leaves and values to the result and the log-sum-exp.

    Args:
        tokens: how devices share tokens; None if they do not.
    """
    method = ("forward", implementations, tokens)
    results = (_labels(region.out_dims), _row_labels(region))
    return _rule(region, method, _operands(region, tokens is not None), results, tokens is not None)


def backward_rule(
    region: Region, implementations: Implementations, has_log_sum_cotangent: bool, tokens: Hashable | None = None
) -> Rule:
    """Return the rule of a backward pass, which maps leaves, values, results and cotangents to the gradients.

    The results are the forward pass's result and log-sum-exp. A gradient is summed over the divided labels that its
    array lacks.
    """
    rows, output = _row_labels(region), _labels(region.out_dims)
    read = _operands(region, tokens is not None)
    operands = (*read, output, rows, output, *([rows] if has_log_sum_cotangent else []))
    gradients = [x for x, leaf in zip(read, region.leaves, strict=False) if leaf.has_gradient]
    method = ("backward", implementations, has_log_sum_cotangent, tokens)
    return _rule(region, method, operands, (*gradients, read[-1]), tokens is not None)


def local_region(region: Region, sizes: Mapping[str, int], summed: Iterable[str] = ()) -> Region:
    """Return the region of one device's part of the work, where labels have these sizes.

    Args:
        summed: labels that are divided over devices. The gradient of an array that lacks one of them is one share of a
            sum over devices.
    """
    if dict(sizes) == region.sizes:
        return region
    return region.once(_local_region, tuple(sorted(sizes.items())), frozenset(summed))


def _local_region(region: Region, sizes: tuple[tuple[str, int], ...], summed: frozenset[str]) -> Region:
    found = dict(sizes)

    def is_share(dims: Sequence[Dim]) -> bool:
        return not summed.issubset(label for dim in _labels(dims) for label in dim)

    def local(source: Source, dims: tuple[Dim, ...]) -> Source:
        # Axes at a fixed index have no label and keep their size.
        shape = tuple(
            size if isinstance(dim, int) else own
            for size, own, dim in zip(source.shape, shape_of(dims, found), dims, strict=True)
        )
        if shape == source.shape:
            return source
        # The elements of a device are known only at run time, so the shard gets a key of its own.
        return Source(("local", source.key), shape, source.dtype)

    leaves: dict[Leaf, Leaf] = {
        leaf: dataclasses.replace(leaf, source=local(leaf.source, leaf.dims), is_share=is_share(leaf.dims))
        for leaf in region.leaves
    }
    value = local(region.value, region.value_dims)
    return with_leaves(region, leaves, sizes=found, value=value, is_value_share=is_share(region.value_dims))


def as_shares(region: Region, compute: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """Wrap one device's backward pass so that gradients wider than their arrays become `Share`s of sums."""
    dtypes = [*(leaf.source.dtype for leaf in region.leaves if leaf.has_gradient), region.value.dtype]

    def gradients(*operands: Any) -> list[Any]:
        pairs = zip(compute(*operands), dtypes, strict=True)
        return [x if x.dtype == dtype else Share(x, dtype) for x, dtype in pairs]

    return gradients


def is_known(source: Source) -> bool:
    """Return True if an array's elements are known while tracing, so that every device has all of them."""
    return source.key is None or source.constant is not None


def gathered_axes(region: Region) -> list[int | None]:
    """Return the sharded key axis of each leaf and of the values, or None for arrays without one.

    Keys are sharded like queries, which requires equally many of both; otherwise every entry is None.
    """
    if region.sizes[ROWS] != region.sizes[COLUMNS]:
        return [None] * (len(region.leaves) + 1)
    pairs = [*((leaf.source, leaf.dims) for leaf in region.leaves), (region.value, region.value_dims)]
    return [None if is_known(source) else _key_axis(dims) for source, dims in pairs]


def _key_axis(dims: Sequence[Dim]) -> int | None:
    """Return the key axis of an array that has no rows, or None."""
    labels = _labels(dims)
    if any(ROWS in dim for dim in labels):
        return None
    return next((axis for axis, dim in enumerate(labels) if COLUMNS in dim), None)


def _rule(region: Region, method: Any, operands: Any, results: Any, shares_tokens: bool) -> Rule:
    # A region that cannot be compared with others gets a text that no other process has.
    problem = repr((method, region.once(key_of) or uuid.uuid4()))
    independent = frozenset(region.batch)
    if shares_tokens:
        independent |= {ROWS}
    return Rule("fuse", problem, tuple(operands), tuple(results), tuple(region.sizes.items()), independent)


def _operands(region: Region, shares_tokens: bool) -> tuple[tuple[Labels, ...], ...]:
    """Return the labels of leaves and values; if devices share tokens, sharded keys take the label of rows."""
    found = [*(_labels(leaf.dims) for leaf in region.leaves), _labels(region.value_dims)]
    for i, place in enumerate(gathered_axes(region) if shares_tokens else ()):
        if place is not None:
            keys = tuple(ROWS if label == COLUMNS else label for label in found[i][place])
            found[i] = (*found[i][:place], keys, *found[i][place + 1 :])
    return tuple(found)


def _labels(dims: Sequence[Dim]) -> tuple[Labels, ...]:
    return tuple(() if isinstance(dim, int) else dim for dim in dims)


def _row_labels(region: Region) -> tuple[Labels, ...]:
    """Return the labels of the log-sum-exp."""
    return tuple((label,) for label in (*region.batch, ROWS))
