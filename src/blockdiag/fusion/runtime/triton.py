"""Triton implementation of fused regions in JAX: launches of generated kernels."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.common.dtype_table import KERNEL_FLOATS
from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.codegen.backward import columns_source, pairs_source, rows_source
from blockdiag.fusion.codegen.diagonals import diagonals_source
from blockdiag.fusion.codegen.expressions import NotPrintable
from blockdiag.fusion.codegen.gluon import HopperKernel
from blockdiag.fusion.codegen.kernels import Source, forward_source
from blockdiag.fusion.codegen.one_pass_backward import one_pass_kernel
from blockdiag.fusion.codegen.resident_backward import resident_backward
from blockdiag.fusion.codegen.resident_forward import resident_kernel
from blockdiag.fusion.codegen.resident_pairs import OWN, resident_pairs
from blockdiag.fusion.codegen.resident_sides import Side
from blockdiag.fusion.codegen.streamed_forward import streamed_kernel
from blockdiag.fusion.ir.layout import arranged_dims, flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tile import Kind, Tile
from blockdiag.fusion.ir.tree import FEATURES, Leaf, Region, nodes_of, with_leaves
from blockdiag.fusion.ir.tree import Source as ArraySource
from blockdiag.fusion.lowering.diagonals import distance_gradient
from blockdiag.fusion.lowering.one_pass_schedule import is_fast, one_pass
from blockdiag.fusion.lowering.resident_schedule import CHUNK, rounds_each
from blockdiag.fusion.lowering.streamed_schedule import streamed_tile
from blockdiag.fusion.lowering.tile_configs import Config, config_of, shared_bytes, widest
from blockdiag.fusion.lowering.tile_program import (
    canonical_result,
    leaf_array,
    result_array,
    value_array,
    value_columns,
    value_labels,
)
from blockdiag.fusion.runtime.block_sparsity import Live, live_tiles, most_visits, walk_labels, walk_tables
from blockdiag.interop import jax_call
from blockdiag.interop.by_target import by_target
from blockdiag.triton_kernels.launch.compile import load_compiler, shared_limit
from blockdiag.triton_kernels.launch.generated import GeneratedKernel
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Role,
    Target,
    TensorSpec,
)
from blockdiag.triton_kernels.launch.private_triton import gluon_reason, has_hopper_kernels

__all__ = [
    "arranged", "arrays_by_name", "available", "backward", "backward_kernels", "forward", "forward_kernel",
    "kernels", "supports",
]  # fmt: skip

_MOST_COLUMNS = 256


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def supports(region: Region) -> str | None:
    """Return None if the kernels can compute a region, otherwise a sentence with the reason and the remedy."""
    for source in (*(leaf.source for leaf in region.leaves), region.value):
        if source.dtype.itemsize == 8:
            return f"the Triton kernels take no {source.dtype} arrays; use implementation='xla'"
    if (declined := _declined_dtype(region)) is not None:
        return f"{declined}; cast them, or use implementation='xla'"
    columns = widest(region)
    if columns > _MOST_COLUMNS:
        return f"the Triton kernels take head sizes up to {_MOST_COLUMNS}, got {columns}; use implementation='xla'"
    if 0 in region.sizes.values():
        return "the Triton kernels take no empty arrays; use implementation='xla'"
    try:
        kernels(region)
    except NotPrintable as reason:
        return f"{reason}; use implementation='xla'"
    return None


def _declined_dtype(region: Region) -> str | None:
    """Return which operands of a product have unsupported dtypes, in words; None if all are supported."""
    if region.value.dtype.name not in KERNEL_FLOATS:
        return f"the Triton kernels take values of {', '.join(KERNEL_FLOATS)}, got {region.value.dtype}"
    for node in nodes_of(region.score, region.weight, *region.extras):
        if node.kind == "product":
            names = sorted({x.leaf.source.dtype.name for x in node.inputs if x.leaf is not None})
            if len(names) > 1 or names[0] not in (*KERNEL_FLOATS, "int8"):
                given = " and ".join(names)
                allowed = f"{', '.join(KERNEL_FLOATS)} or int8"
                return f"the Triton kernels multiply two arrays of the same dtype, {allowed}, got {given}"
    return None


@dataclasses.dataclass(frozen=True)
class FusedLaunch:
    """Launch of a generated kernel. It is a KernelSpec, and compares equal by source.

    Attributes:
        num_stages: the most stages; fewer are used if shared memory is small.
        shared: estimated bytes of shared memory: the fixed part, and the part per stage.
        on_hopper: the kernel launched instead on Hopper. If it has the same source, other targets are not supported.
        flops: estimated floating-point operations of the products.
    """

    source: Source
    inputs: tuple[TensorSpec, ...]
    num_warps: int
    num_stages: int
    shared: tuple[int, int]
    on_hopper: HopperKernel | None = None
    flops: float = 0.0

    @property
    def name(self) -> str:
        """The kernel name that profilers show."""
        return self.source.name

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The shape and dtype of each array that the launch writes."""
        return tuple(TensorSpec(x.shape, x.dtype) for x in self.source.outputs)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        if self.on_hopper is not None and has_hopper_kernels(target.arch):
            return self._hopper_plan(self.on_hopper, target)
        if self.on_hopper is not None and self.on_hopper.source == self.source:
            reason = gluon_reason() or f"got compute capability {target.arch}"
            raise ValueError(f"kernel {self.name!r} is for Hopper alone and written in Gluon: {reason}")
        names = [f"p_{x}" for x in self.source.inputs]
        arguments = {name: Pointer("input", i) for i, name in enumerate(names)}
        arguments |= {f"p_{x.name}": Pointer("output", i) for i, x in enumerate(self.source.outputs)}
        return LaunchPlan(
            name=self.name,
            kernel=kernel_of(self.source.text, self.name),
            grid=self.source.grid,
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=arguments,
            # Before Hopper, warps hold the operands of products in registers, so eight warps are used.
            options=CompileOptions(
                num_warps=self.num_warps if target.arch >= 90 else 8, num_stages=self._stages(target)
            ),
            flops=self.flops,
        )

    def _hopper_plan(self, kernel: HopperKernel, target: Target) -> LaunchPlan:
        load_compiler()
        from triton.experimental.gluon import language as gl

        places: dict[str, tuple[Role, int]] = {x: ("input", i) for i, x in enumerate(self.source.inputs)}
        for i, written in enumerate(self.source.outputs):
            places[written.name] = ("output", i)
        started = [(x.name, i) for i, x in enumerate(self.source.outputs) if x.starts_at_zero]
        dtype = {"bfloat16": gl.bfloat16, "float16": gl.float16}[kernel.dtype]
        arguments: dict[str, Argument] = {}
        last: dict[str, Argument] = {}
        seen = set()
        for name, array, shape, block in kernel.moved:
            layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
            # jaxlib's launcher takes the second use of an output after the first uses of all outputs.
            group = last if array in seen and places[array][0] == "output" else arguments
            group[name] = Descriptor(*places[array], shape=shape, block_shape=block, layout=layout)
            seen.add(array)
        arguments |= {f"p_{name}": Pointer(*places[name]) for name in kernel.pointers} | last
        shares = 1
        if kernel.rounds is not None:
            each = kernel.each or rounds_each(kernel.rounds, kernel.tiles, target.num_sms)
            arguments["ROUNDS"] = Constexpr(each)
            shares = -(-kernel.rounds // each)
        programs = min(kernel.tiles, target.num_sms) if kernel.is_persistent else kernel.tiles * shares
        return LaunchPlan(
            name=kernel.source.name,
            kernel=kernel_of(kernel.source.text, kernel.source.name),
            grid=(programs, 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=arguments,
            options=CompileOptions(num_warps=kernel.num_warps),
            aliases=tuple((places[f"zeros_{name}"][1], place) for name, place in started),
            flops=self.flops,
        )

    def _stages(self, target: Target) -> int:
        once, each = self.shared
        stages = self.num_stages if target.arch >= 90 else min(self.num_stages, 2)
        limit = shared_limit(target.arch)
        return stages if limit is None or not each else max(1, min(stages, (limit - once) // each))


@functools.lru_cache(maxsize=1024)
def kernel_of(text: str, name: str) -> GeneratedKernel:
    """Return the kernel that a source text defines; Triton parses it only when it is compiled."""
    return GeneratedKernel(text, name)


def forward(region: Region, leaves: Sequence[Any], value: Any, *, interpret: bool = False) -> tuple[Any, Any]:
    """Return the result, with the axes of the product that it replaces, and the log-sum-exp [batch.., q]."""
    operands = (*leaves, value)
    if interpret or not region.once(_may_have_own_forward):
        output, log_sum = _results(region, None, *operands, interpret=interpret)
    else:
        chosen = (functools.partial(_results, region, where) for where in (_is_hopper, _is_not_hopper))
        output, log_sum = by_target(_is_hopper, *chosen, *operands)
    return output, log_sum


def _results(
    region: Region, where: Callable[[Target], bool] | None, *operands: Any, interpret: bool = False
) -> list[Any]:
    """Return the result and the log-sum-exp.

    Args:
        where: selects the targets that this computation is for; None: all targets.
        operands: the arrays of leaves and values.
    """
    *leaves, value = operands
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    kernel = own_forward_kernel(inner, arrays) if where is _is_hopper else None
    kernel = forward_kernel(inner, arrays) if kernel is None else kernel
    (results,) = _launch([kernel], arrays, interpret=interpret, group=_group(region), where=where)
    output = results["output"]
    return [result_array(region, output) if change.changes_result else output, results["log_sum"]]


def backward(
    region: Region,
    leaves: Sequence[Any],
    value: Any,
    output: Any,
    log_sum: Any,
    cotangent: Any,
    log_sum_cotangent: Any = None,
    *,
    interpret: bool = False,
) -> tuple[list[Any], Any]:
    """Return the gradients of the leaves, None for a leaf without one, and the gradient of the values."""
    has_sum = log_sum_cotangent is not None
    operands = (*leaves, value, output, log_sum, cotangent, *([log_sum_cotangent] if has_sum else []))
    inner, _ = arranged(region)
    if interpret or not has_leading_kernel(inner, has_sum=has_sum):
        found = _gradients(region, None, has_sum, *operands, interpret=interpret)
    else:
        on_hopper = functools.partial(_gradients, region, _is_hopper, has_sum)
        elsewhere = functools.partial(_gradients, region, _is_not_hopper, has_sum)
        found = by_target(_is_hopper, on_hopper, elsewhere, *operands)
    *found, value_grad = found
    rest = iter(found)
    return [next(rest) if leaf.has_gradient else None for leaf in region.leaves], value_grad


def _is_hopper(target: Target) -> bool:
    return has_hopper_kernels(target.arch)


def _is_not_hopper(target: Target) -> bool:
    return not _is_hopper(target)


def _gradients(
    region: Region,
    where: Callable[[Target], bool] | None,
    has_sum: bool,
    *operands: Any,
    interpret: bool = False,
) -> list[Any]:
    """Return the gradients of the leaves that have one, and the gradient of the values.

    Args:
        where: selects the targets that this computation is for; None: all targets.
        has_sum: whether the log-sum-exp has a cotangent, which then is the last operand.
        operands: the arrays of leaves, values, result, log-sum-exp and cotangent.
    """
    count = len(region.leaves)
    leaves, (value, output, log_sum, cotangent) = operands[:count], operands[count : count + 4]
    log_sum_cotangent = operands[-1] if has_sum else None
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    wanted = None if where is not _is_hopper else hopper_kernels(inner, arrays, has_sum=has_sum)
    wanted = backward_kernels(inner, arrays) if wanted is None else wanted
    arrays |= {"log_sum": log_sum}
    for name, x in (("output", output), ("cotangent", cotangent.astype(value.dtype))):
        arrays[name] = canonical_result(region, x) if change.changes_result else x
    # The joint kernel, which is launched first, may compute delta for the other kernels.
    made = {x.name for x in wanted[0].source.outputs if x.name == "delta"}
    if not made:
        wide = jnp.float32
        products = canonical_result(region, output).astype(wide) * canonical_result(region, cotangent).astype(wide)
        delta = products.sum(-1)
        arrays["delta"] = delta if log_sum_cotangent is None else delta - log_sum_cotangent.astype(wide)
    launch = functools.partial(_launch, interpret=interpret, group=_group(region), where=where)
    written = {}
    for kernels in (wanted[:1], wanted[1:]) if made else (wanted,):
        for kernel, results in zip(kernels, launch(kernels, arrays), strict=True):
            written |= {x.name: (_scaled(results[x.name], x.factor), x.dims) for x in kernel.source.outputs}
            arrays |= {name: results[name] for name in made & results.keys()}
    grads = [
        change.leaf_gradient(i, leaves[i], *written[f"grad{i}"])
        for i, leaf in enumerate(region.leaves)
        if leaf.has_gradient
    ]
    return [*grads, change.value_gradient(value, *written["grad_value"])]


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Kernel of a region with its launch parameters.

    Attributes:
        source: the generated source.
        tile: the tile size.
        num_warps, num_stages: options of Triton's compiler.
        shared: estimated bytes of shared memory: the fixed part, and the part per stage.
        live: the lists of live tiles that it reads, by name.
        on_hopper: the kernel launched instead on Hopper.
        flops: estimated floating-point operations of the products.
    """

    source: Source
    tile: Tile
    num_warps: int
    num_stages: int
    shared: tuple[int, int]
    live: Mapping[str, Any]
    on_hopper: HopperKernel | None = None
    flops: float = 0.0

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources that it may launch."""
        found = (self.source,) if self.on_hopper is None else (self.source, self.on_hopper.source)
        return tuple(dict.fromkeys(found))

    def given(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return its input arrays, in order."""
        found = {**arrays, **self.live}
        for x in self.source.outputs:
            if x.starts_at_zero:
                found[f"zeros_{x.name}"] = jnp.zeros(x.shape, x.dtype)
        return [found[name] for name in self.source.inputs]

    def launch(self, specs: Sequence[TensorSpec]) -> FusedLaunch:
        """Return the launch on arrays of these shapes and dtypes."""
        return FusedLaunch(
            self.source, tuple(specs), self.num_warps, self.num_stages, self.shared, self.on_hopper, self.flops
        )


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
    if tile is None or region.once(resident_kernel) is not None:
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


def _may_have_own_forward(region: Region) -> bool:
    inner, _ = arranged(region)
    return inner.once(streamed_tile) is not None


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
    return [leading, *rest]


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
    found: list[Kernel] = []

    def collect(leaves: Sequence[Any], value: Any) -> None:
        arrays = arrays_by_name(change, leaves, value)
        leading = (hopper_kernels(inner, arrays, has_sum=has_sum) for has_sum in (False, True))
        every = [forward_kernel(inner, arrays), *backward_kernels(inner, arrays)]
        every += [found[0] for found in leading if found is not None]
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


@dataclasses.dataclass(frozen=True)
class _Change:
    """Change of array layouts made by `arranged`.

    Attributes:
        region, inner: the region before and after.
        leaves: for each leaf, whether its layout changes.
        value, changes_result: whether the layout of the values, and that of the result, changes.
    """

    region: Region
    inner: Region
    leaves: tuple[bool, ...]
    value: bool
    changes_result: bool

    def leaf_gradient(self, place: int, array: Any, grad: Any, dims: Any) -> Any:
        """Return the gradient of a leaf from a kernel's output.

        Args:
            place: the index of the leaf.
            array: the array of the leaf.
            grad: the output of the kernel, perhaps partial sums.
            dims: the labels of the axes of `grad`.
        """
        region = self.region
        leaf = region.leaves[place]
        if dims == leaf.dims and not self.leaves[place]:
            return grad.astype(leaf.gradient_dtype)
        if leaf.role == "distance":
            return distance_gradient(region, leaf, array, grad)
        inner = self.inner.leaves[place]
        if dims == inner.dims:
            canonical = grad
        else:
            # The sizes of the axes of partial sums are only known from the array.
            sizes = self.inner.sizes | {
                dim[0]: size for dim, size in zip(dims, grad.shape, strict=True) if len(dim) == 1
            }
            order = [label for dim in dims for label in dim]
            parts = grad.reshape([sizes[label] for label in order])
            kept = {*leaf.labels, "q", "k"} | {label for label in order if label.startswith("f")}
            canonical = parts.sum(tuple(axis for axis, label in enumerate(order) if label not in kept))
        array = array.astype(leaf.gradient_dtype)
        shape, pull = jax.vjp(lambda x: leaf_array(leaf, x, region.batch, region.sizes), array)
        return pull(canonical.reshape(shape.shape).astype(array.dtype))[0]

    def value_gradient(self, array: Any, grad: Any, dims: Any) -> Any:
        """Return the gradient of the values from a kernel's output, see `leaf_gradient`."""
        region = self.region
        if dims == region.value_dims and not self.value:
            return grad
        if dims != self.inner.value_dims:
            order = [label for dim in dims for label in dim]
            parts = grad.reshape([self.inner.sizes[label] for label in order])
            own = {*value_labels(region), "k", *value_columns(self.inner)}
            grad = parts.sum(tuple(axis for axis, label in enumerate(order) if label not in own))
        array = array.astype(region.value_gradient_dtype)
        shape, pull = jax.vjp(lambda x: value_array(region, x), array)
        return pull(grad.reshape(shape.shape).astype(array.dtype))[0]


def arranged(region: Region) -> tuple[Region, _Change]:
    """Return the region with array layouts that the kernels can address, and the change of layouts.

    Features, and columns of values, become one axis each.
    """
    return region.once(_arranged)


def _arranged(region: Region) -> tuple[Region, _Change]:
    replaced: dict[Leaf, Leaf] = {}
    flags = []
    for leaf in region.leaves:
        dims = arranged_dims(leaf, region.sizes)
        flags.append(dims is not None)
        replaced[leaf] = leaf
        if dims is not None:
            # Leaves of the same array may label its axes differently.
            key = ("arranged", leaf.source.key, leaf.dims)
            source = ArraySource(key, shape_of(dims, region.sizes), leaf.source.dtype)
            replaced[leaf] = dataclasses.replace(leaf, source=source, dims=dims)
    columns = value_columns(region)
    changes_value = (
        flat_stride(layout_of(region.value.shape, region.value_dims, region.sizes), columns, region.sizes) is None
    )
    value, value_dims = region.value, region.value_dims
    if changes_value:
        value_dims = (*((label,) for label in value_labels(region)), ("k",), tuple(columns))
        value = ArraySource(("arranged", value.key), shape_of(value_dims, region.sizes), value.dtype)
    out_layout = layout_of(shape_of(region.out_dims, region.sizes), region.out_dims, region.sizes)
    changes_result = flat_stride(out_layout, columns, region.sizes) is None
    out_dims = (*((label,) for label in region.batch), ("q",), tuple(columns)) if changes_result else region.out_dims
    inner = region
    if any(flags) or changes_value or changes_result:
        inner = with_leaves(region, replaced, value=value, value_dims=value_dims, out_dims=out_dims)
    return inner, _Change(region, inner, tuple(flags), changes_value, changes_result)


def arrays_by_name(change: _Change, leaves: Sequence[Any], value: Any) -> dict[str, Any]:
    """Return the arrays of a call by the names that the kernels use: "leaf0", "leaf1", ... and "value"."""
    region = change.region
    found = {}
    for i, (leaf, x) in enumerate(zip(region.leaves, leaves, strict=True)):
        x = leaf_array(leaf, x, region.batch, region.sizes) if change.leaves[i] else x
        found[f"leaf{i}"] = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    found["value"] = value_array(region, value) if change.value else value
    return found


def _group(region: Region) -> Hashable:
    """Return a key that is the same for a region and its derivative, whose leaves have other flags."""
    return (region.value, tuple(leaf.source for leaf in region.leaves), region.out_dims)


def _launch(
    wanted: Sequence[Kernel],
    arrays: Mapping[str, Any],
    *,
    interpret: bool,
    group: Hashable,
    where: Callable[[Target], bool] | None = None,
) -> list[dict[str, Any]]:
    """Launch kernels that do not depend on each other, and return the outputs of each by name.

    Args:
        group, where: see `jax_call.launch_together`, which compiles the kernels of a group together.
    """
    launches = []
    for kernel in wanted:
        given = kernel.given(arrays)
        specs = [TensorSpec(tuple(x.shape), jnp.dtype(x.dtype).name) for x in given]
        # The interpreter does not support the layouts of Gluon kernels.
        kernel = dataclasses.replace(kernel, on_hopper=None) if interpret else kernel
        launches.append((kernel.launch(specs), given))
    found = jax_call.launch_together(launches, interpret=interpret, group=group, where=where)
    names = [[x.name for x in kernel.source.outputs] for kernel in wanted]
    return [dict(zip(own, results, strict=True)) for own, results in zip(names, found, strict=True)]
