"""Fuse moves and casts after a region's product into the kernel's epilogue."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of
from blockdiag.fusion.ir.tree import Dim, Region, Unpullable
from blockdiag.fusion.regions.axis_labels import labels_of, regrouped


def followed(
    var: core.Var,
    regions: tuple[Region, ...],
    users: Mapping[core.Var, Sequence[core.JaxprEqn | None]],
    read: Collection[object],
) -> tuple[core.Var, tuple[Region, ...]]:
    """Return the regions, and their result's variable, with the moves and casts of the result fused.

    A move or cast is fused if nothing else uses its operand. The kernel then writes the result in the final layout.

    Args:
        read: the variables that regions read. They must stay in the program.
    """
    while var not in read and len(users[var]) == 1 and (user := users[var][0]) is not None:
        result, first = user.outvars[0], regions[0]
        dims: tuple[Dim, ...] | None = None
        dtype = first.dtype
        match user.primitive.name:
            case "transpose":
                dims = tuple(first.out_dims[axis] for axis in user.params["permutation"])
            case "reshape":
                dims = _merged(aval_of(var).shape, aval_of(result).shape, first)
            case "convert_element_type" if len(regions) == 1:
                wanted = np.dtype(user.params["new_dtype"])
                if jnp.issubdtype(wanted, jnp.floating) and jnp.issubdtype(dtype, jnp.floating):
                    dims, dtype = first.out_dims, wanted
        if dims is None:
            break
        var, regions = result, tuple(replace(region, out_dims=dims, dtype=dtype) for region in regions)
    return var, regions


def _merged(given: Sequence[int], shape: Sequence[int], region: Region) -> tuple[Dim, ...] | None:
    """Return the dims of a result after a reshape that merges axes, or None if it divides an axis."""
    try:
        dims = regrouped(shape, given, region.out_dims, region.sizes)
    except Unpullable:
        return None
    return dims if labels_of(dims) == labels_of(region.out_dims) else None


def read_by(region: Region) -> Iterator[object]:
    """Yield the variables of a region's operands, and those that generated operands are computed from."""
    for source in (region.value, *(leaf.source for leaf in region.leaves)):
        yield source.key
        yield from (x for equation in source.made for x in equation.invars if isinstance(x, core.Var))
