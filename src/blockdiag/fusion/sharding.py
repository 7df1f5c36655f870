"""How a fused region divides over the devices of a mesh: its batch labels are independent, all else stays whole."""

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

from blockdiag.common.rule import Dim as Labels
from blockdiag.common.rule import Rule
from blockdiag.fusion.layout import shape_of
from blockdiag.fusion.shared import key_of
from blockdiag.fusion.tree import ROWS, Dim, Leaf, Region, Source, with_leaves

type Implementations = tuple[str, ...] | None


def forward_rule(region: Region, implementations: Implementations) -> Rule:
    """The rule of a forward pass: leaves and values to the result and the log-sum-exp."""
    method = ("forward", implementations)
    return _rule(region, method, _operands(region), (_labels(region.out_dims), _row_labels(region)))


def backward_rule(region: Region, implementations: Implementations, has_log_sum_cotangent: bool) -> Rule:
    """The rule of a backward pass: leaves, values, result, log-sum-exp and cotangents to the gradients.

    A gradient is a sum over the batch labels that its array does not have.
    """
    rows, output = _row_labels(region), _labels(region.out_dims)
    operands = (*_operands(region), output, rows, output, *([rows] if has_log_sum_cotangent else []))
    gradients = [_labels(leaf.dims) for leaf in region.leaves if leaf.has_gradient]
    method = ("backward", implementations, has_log_sum_cotangent)
    return _rule(region, method, operands, (*gradients, _labels(region.value_dims)))


def local_region(region: Region, sizes: Mapping[str, int]) -> Region:
    """The region of one device, where labels have these sizes."""
    if dict(sizes) == region.sizes:
        return region
    return region.once(_local_region, tuple(sorted(sizes.items())))


def _local_region(region: Region, sizes: tuple[tuple[str, int], ...]) -> Region:
    found = dict(sizes)

    def local(source: Source, dims: tuple[Dim, ...]) -> Source:
        # Axes that stand for one index have no label, and keep their size.
        shape = tuple(
            size if isinstance(dim, int) else own
            for size, own, dim in zip(source.shape, shape_of(dims, found), dims, strict=True)
        )
        if shape == source.shape:
            return source
        # Which elements a device has is known where it runs.
        return Source(("local", source.key), shape, source.dtype)

    leaves: dict[Leaf, Leaf] = {
        leaf: dataclasses.replace(leaf, source=local(leaf.source, leaf.dims)) for leaf in region.leaves
    }
    return with_leaves(region, leaves, sizes=found, value=local(region.value, region.value_dims))


def _rule(region: Region, method: Any, operands: Any, results: Any) -> Rule:
    # Of a region that cannot be compared with others, no other process has the text.
    problem = repr((method, region.once(key_of) or uuid.uuid4()))
    return Rule("fuse", problem, tuple(operands), tuple(results), tuple(region.sizes.items()), frozenset(region.batch))


def _operands(region: Region) -> tuple[tuple[Labels, ...], ...]:
    return (*(_labels(leaf.dims) for leaf in region.leaves), _labels(region.value_dims))


def _labels(dims: tuple[Dim, ...]) -> tuple[Labels, ...]:
    return tuple(() if isinstance(dim, int) else dim for dim in dims)


def _row_labels(region: Region) -> tuple[Labels, ...]:
    """The labels of the log-sum-exp."""
    return tuple((label,) for label in (*region.batch, ROWS))
