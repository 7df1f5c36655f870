"""Choice of the kernels of a region: for every architecture, and those that replace them on Hopper."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.codegen.backward import columns_source, extras_source, pairs_source, rows_source
from blockdiag.fusion.codegen.diagonals import diagonals_source
from blockdiag.fusion.codegen.expressions import NotPrintable
from blockdiag.fusion.codegen.gluon import HopperKernel
from blockdiag.fusion.codegen.kernels import Source, forward_source
from blockdiag.fusion.codegen.one_pass_backward import one_pass_kernel
from blockdiag.fusion.codegen.resident_backward import Side, resident_backward
from blockdiag.fusion.codegen.resident_forward import resident_kernel
from blockdiag.fusion.codegen.resident_pairs import OWN, resident_pairs
from blockdiag.fusion.codegen.streamed_forward import streamed_kernel
from blockdiag.fusion.ir.factors import only_in_extras
from blockdiag.fusion.ir.tile import Kind, Tile
from blockdiag.fusion.ir.tree import FEATURES, Region
from blockdiag.fusion.lowering.eight_bit import widened, widened_arrays
from blockdiag.fusion.lowering.one_pass_schedule import is_fast, one_pass
from blockdiag.fusion.lowering.resident_schedule import CHUNK
from blockdiag.fusion.lowering.streamed_schedule import streamed_tile
from blockdiag.fusion.lowering.tile_configs import Config, config_of, shared_bytes
from blockdiag.fusion.runtime.arrange import arranged, arrays_by_name
from blockdiag.fusion.runtime.block_sparsity import Live, live_tiles, most_visits, walk_labels, walk_tables
from blockdiag.fusion.runtime.launches import Kernel


def forward_kernel(region: Region, arrays: Mapping[str, Any] | None) -> Kernel:
    """Return the kernel of the forward pass.

    Args:
        region: an arranged region.
        arrays: the leaves by name, "leaf0", ..., from which lists of live tiles are computed; None: no lists.
    """
    config = config_of(region, "forward")
    live = None if arrays is None else live_tiles(region, config.tile, arrays)
    lists = None if live is None else live.lists
    kernel = _kernel(region.once(forward_source, config.tile, lists), region, "forward", config, live)

    return _on_hopper(kernel, lambda: region.once(resident_kernel) if lists is None else None)


def own_forward_kernel(region: Region, arrays: Mapping[str, Any]) -> Kernel | None:
    """Return the forward kernel that only Hopper launches, None if Hopper launches the result of `forward_kernel`.

    Args:
        region: an arranged region.
        arrays: the leaves by name, from which lists of live tiles are computed.
    """
    tile = region.once(streamed_tile)
    if tile is None:
        return None
    live = live_tiles(region, tile, arrays)
    try:
        found = region.once(streamed_kernel, tile, None if live is None else live.lists)
    except NotPrintable:
        # Gluon lacks some operations that Triton has.
        return None
    if found is None:
        return None
    live_arrays = {} if live is None else live.arrays
    own = {name: x for name, x in live_arrays.items() if name in found.source.inputs}
    flops = _flops(region, "forward", tile, live)
    return Kernel(found.source, tile, found.num_warps, 1, (0, 0), own, found, flops)


def may_have_own_forward(region: Region) -> bool:
    """Return whether `own_forward_kernel` may find a kernel.

    Args:
        region: an arranged region.
    """
    return region.once(streamed_tile) is not None


def backward_kernels(region: Region, arrays: Mapping[str, Any] | None) -> list[Kernel]:
    """Return the kernels of the backward pass: gradients of the values and of each leaf with a gradient.

    Args:
        region: an arranged region.
        arrays: as for `forward_kernel`.
    """
    places: dict[str, list[int]] = collections.defaultdict(list)
    for i, leaf in enumerate(region.leaves):
        if leaf.has_gradient:
            places[leaf.role].append(i)
    found = []
    lists: dict[Tile, Live | None] = {}

    def add(kind: Kind, make: Callable[[Tile, Lists | None], Source]) -> None:
        config = config_of(region, kind)
        if config.tile not in lists:
            lists[config.tile] = None if arrays is None else live_tiles(region, config.tile, arrays)
        live = lists[config.tile]
        found.append(_kernel(make(config.tile, None if live is None else live.lists), region, kind, config, live))

    def add_side(side: Side, make: Callable[[Tile, Lists | None], Source], places: tuple[int, ...]) -> None:
        add(side, make)
        kernel = found[-1]
        if not kernel.live:
            found[-1] = _on_hopper(kernel, lambda: region.once(resident_backward, side, places, kernel.source))

    rows = tuple(sorted(places["query"] + places["feature"] + places["row"] + places["scalar"]))
    columns = tuple(sorted(places["key"] + places["column"]))
    if rows:
        add_side("rows", lambda tile, lists: region.once(rows_source, tile, rows, lists), rows)
    add_side("columns", lambda tile, lists: region.once(columns_source, tile, columns, lists), columns)
    for i in places["score"]:
        add("pairs", lambda tile, lists, i=i: region.once(pairs_source, tile, i))
    for i in places["distance"]:
        add("diagonals", lambda tile, lists, i=i: region.once(diagonals_source, tile, i, lists))
    return found


def joint_kernel(region: Region) -> Kernel | None:
    """Return the kernel that replaces the "rows" and "pairs" kernels on Hopper, None if it does not apply.

    Args:
        region: an arranged region.
    """
    try:
        found = region.once(resident_pairs)
    except NotPrintable:
        # Gluon lacks some operations that Triton has.
        return None
    if found is None:
        return None
    tile = Tile(OWN, CHUNK)
    return Kernel(found.source, tile, 4, 1, (0, 0), {}, found, _flops(region, "pairs", tile, None))


def leading_one_pass(region: Region, arrays: Mapping[str, Any]) -> Kernel | None:
    """Return the one-pass kernel of Hopper for the gradients of queries, keys and values, None if it is not used.

    Args:
        region: an arranged region.
        arrays: the leaves by name, from which lists of tiles are computed.
    """
    plan, kernel = region.once(one_pass), region.once(_one_pass_kernel)
    if plan is None or kernel is None:
        return None
    walks = walk_tables(region, plan.tile, arrays)
    live, share = ({}, 1.0) if walks is None else (walks.arrays, walks.share)
    # One pass has five products, the kernel by columns four.
    flops = _flops(region, "columns", plan.tile, None) * 1.25 * share
    return Kernel(kernel.source, plan.tile, kernel.num_warps, 1, (0, 0), live, kernel, flops)


def _one_pass_kernel(region: Region) -> HopperKernel | None:
    """Return the one-pass kernel of an arranged region, None if it does not apply or is not faster."""
    plan = region.once(one_pass)
    if plan is None:
        return None
    try:
        labels = region.once(walk_labels, plan.tile)
        if not is_fast(plan, region.once(most_visits, plan.tile), is_listed=labels is not None):
            return None
        return region.once(one_pass_kernel, labels)
    except (NotPrintable, OverflowError):
        # Gluon lacks some operations that Triton has. Very long sequences have too many tiles to list.
        return None


def has_leading_kernel(region: Region, *, has_sum: bool) -> bool:
    """Return whether backward passes of a region launch a kernel that replaces several others on Hopper.

    Args:
        region: an arranged region.
        has_sum: whether the log-sum-exp has a cotangent.
    """
    return (not has_sum and joint_kernel(region) is not None) or region.once(_one_pass_kernel) is not None


def hopper_kernels(region: Region, arrays: Mapping[str, Any], *, has_sum: bool) -> list[Kernel] | None:
    """Return the kernels of a backward pass on Hopper, None if it has no kernel that replaces several others.

    The first kernel is the one that replaces others.

    Args:
        region, arrays: as for `backward_kernels`.
        has_sum: whether the log-sum-exp has a cotangent. The joint kernel then does not apply: it computes delta
            itself, without that cotangent.
    """
    leading = None if has_sum else joint_kernel(region)
    leading = leading_one_pass(region, arrays) if leading is None else leading
    if leading is None:
        return None
    written = {x.name for x in leading.source.outputs}
    rest = [x for x in backward_kernels(region, arrays) if not written & {out.name for out in x.source.outputs}]
    apart = region.once(only_in_extras)
    return [leading, *rest, *([_extras_kernel(region, apart)] if apart else [])]


def _extras_kernel(region: Region, places: tuple[int, ...]) -> Kernel:
    """Return the kernel of the gradients of the leaves at `places`, on which only logits without values depend."""
    config = config_of(region, "extras")
    source = region.once(extras_source, config.tile, places)
    return Kernel(source, config.tile, config.num_warps, config.num_stages, (0, 0), {})


def _on_hopper(kernel: Kernel, make: Callable[[], HopperKernel | None]) -> Kernel:
    """Return a kernel with its replacement on Hopper, if there is one."""
    try:
        return dataclasses.replace(kernel, on_hopper=make())
    except NotPrintable:
        # Gluon lacks some operations that Triton has; the plain kernel is used on Hopper too.
        return kernel


def _kernel(source: Source, region: Region, kind: Kind, config: Config, live: Live | None) -> Kernel:
    own = {} if live is None else {name: x for name, x in live.arrays.items() if name in source.inputs}
    shared = shared_bytes(region, kind, config)
    flops = _flops(region, kind, config.tile, live)
    return Kernel(source, config.tile, config.num_warps, config.num_stages, shared, own, flops=flops)


def _flops(region: Region, kind: Kind, tile: Tile, live: Live | None) -> float:
    """Return the estimated floating-point operations of a kernel's products; tiles known to be dead do not count."""
    sizes = region.sizes
    pairs = math.prod(sizes[label] for label in (*region.batch, "q", "k"))
    features = sum(size for label, size in sizes.items() if label.startswith(FEATURES))
    share = 1.0
    if live is not None and not isinstance(live.arrays["live_counts"], jax.core.Tracer):
        share = live.share(-(-sizes["k"] // tile.columns))
    # Two products forward. Backward, each kernel recomputes the weights and has two or three gradient products.
    return 2.0 * pairs * features * share * (1.0 if kind == "forward" else 2.0)


def kernels(region: Region) -> list[Kernel]:
    """Return all kernels that a region may launch, forward first; lists of live tiles are shapes only.

    Forward kernels are those of GPUs with eight-bit products, and backward kernels those of the widened region.

    Raises:
        NotPrintable: Triton lacks an operation that the region needs.
    """
    found = region.once(_kernels)
    if isinstance(found, str):
        raise NotPrintable(found)
    return list(found)


def _kernels(region: Region) -> tuple[Kernel, ...] | str:
    """Return all kernels of a region, or the reason why there are none."""
    inner, change = arranged(region)
    wide, wide_change = arranged(widened(region))
    found: list[Kernel] = []

    def collect(leaves: Sequence[Any], value: Any) -> None:
        arrays = arrays_by_name(change, leaves, value)
        *wide_leaves, wide_value = widened_arrays(region, (*leaves, value))
        wide_arrays = arrays if wide is inner else arrays_by_name(wide_change, wide_leaves, wide_value)
        leading = (hopper_kernels(wide, wide_arrays, has_sum=has_sum) for has_sum in (False, True))
        every = [forward_kernel(inner, arrays), *backward_kernels(wide, wide_arrays)]
        for kernel in itertools.chain(*(found for found in leading if found is not None)):
            if kernel.source not in [x.source for x in every]:
                every.append(kernel)
        own = own_forward_kernel(inner, arrays)
        every += [] if own is None else [own]
        for kernel in every:
            shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in kernel.live.items()}
            found.append(dataclasses.replace(kernel, live=shapes))

    sources = [*(leaf.source for leaf in region.leaves), region.value]
    *leaves, value = [jax.ShapeDtypeStruct(source.shape, source.dtype) for source in sources]
    try:
        jax.eval_shape(collect, leaves, value)
    except NotPrintable as reason:
        return str(reason)
    return tuple(found)
