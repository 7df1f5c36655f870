"""Batching rule of regions (`jax.vmap`): one more batch axis."""

import dataclasses
from collections.abc import Sequence

from blockdiag.fusion.ir.tree import Dim, Leaf, Region, Source, with_leaves


def map_region(region: Region, axis_size: int, is_mapped: Sequence[bool]) -> Region:
    """Return the region of a mapped call, with one more batch label as the first axis of mapped arrays.

    Args:
        region: the region.
        axis_size: the size of the mapped axis.
        is_mapped: for each leaf, and then the values, whether it is mapped.
    """
    label = f"m{len(region.batch)}"
    leaves: dict[Leaf, Leaf] = {}
    *flags, is_value_mapped = is_mapped

    def mapped_source(source: Source) -> Source:
        return Source((label, source.key), (axis_size, *source.shape), source.dtype)

    for leaf, flag in zip(region.leaves, flags, strict=True):
        leaves[leaf] = leaf
        if flag:
            leaves[leaf] = dataclasses.replace(
                leaf,
                source=mapped_source(leaf.source),
                dims=((label,), *leaf.dims),
                labels=(label, *leaf.labels),
            )
    value_dims: tuple[Dim, ...] = ((label,), *region.value_dims) if is_value_mapped else region.value_dims
    value = mapped_source(region.value) if is_value_mapped else region.value
    return with_leaves(
        region,
        leaves,
        sizes=region.sizes | {label: axis_size},
        batch=(label, *region.batch),
        value=value,
        value_dims=value_dims,
        out_dims=((label,), *region.out_dims),
    )
