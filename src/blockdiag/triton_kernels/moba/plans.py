"""Launch plans of MoBA for routing, lists, and the forward and backward passes."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.block_diagonal.plans import LOG2_E, takes_operands
from blockdiag.triton_kernels.launch.compiler_versions import adjusted
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Group,
    LaunchPlan,
    Scalar,
    Target,
    TensorSpec,
    array_group,
)
from blockdiag.triton_kernels.moba.arguments import (
    AddSpansArrays,
    BlocksBackwardArrays,
    BlocksBackwardScalars,
    BlocksForwardArrays,
    BlocksForwardScalars,
    BlockTile,
    CentroidsArrays,
    CentroidShape,
    ChoiceShape,
    ChoiceTile,
    ChooseArrays,
    ChooseScalars,
    CountArrays,
    CountScalars,
    CountTile,
    EntriesArrays,
    EntriesScalars,
    EntryTile,
    HalvesArrays,
    HalvesScalars,
    HopperChoiceShape,
    HopperChoiceTile,
    ItemsArrays,
    ItemsScalars,
    ItemTile,
    ListShape,
    MaskedCentroidShape,
    MergeBackwardArrays,
    MergeBackwardScalars,
    MergeForwardArrays,
    MergeForwardScalars,
    MergeTile,
    OffsetsArrays,
    OwnShape,
    QueryPartsArrays,
    QueryPartsScalars,
    RowTile,
    SpansScalars,
    SpanTile,
    StartsArrays,
    StartsScalars,
    VectorTile,
)
from blockdiag.triton_kernels.moba.configs import (
    ADJUSTMENTS,
    MANY_HEADS_SPANS,
    Config,
    config_of,
    has_halves,
    hopper_config,
    key_tiles,
    span_rows,
)
from blockdiag.triton_kernels.paged.plans import PagedLaunch, require_dtypes
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

Kind = Literal[
    "centroids", "halves", "choose", "count", "add_spans", "offsets", "entries", "items", "blocks_forward",
    "merge_forward", "starts", "blocks_backward", "query_parts", "merge_backward",
]  # fmt: skip


class _Arrays(NamedTuple):
    """The module of a kernel, and the arrays that it reads and writes, in the order of the launch."""

    module: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_OPERANDS = ("query", "key", "value")
# Arrays of a cache that are not operands.
_CACHE = ("page_table", "score_scale", "key_scale", "value_scale")
_LISTS = ("offsets", "counts", "entries")
_STARTS = ("score_start", "weight_start")
_KEY_GRADIENTS = ("d_key", "d_value")
_KINDS: Mapping[str, _Arrays] = {
    "centroids": _Arrays("routing", ("key", "mask", "blocks"), ("centroids",)),
    "halves": _Arrays("routing", ("centroids",), ("halves", "scales")),
    "choose": _Arrays("routing", ("query", "centroids", "halves", "scales", "queries"), ("chosen",)),
    "count": _Arrays("lists", ("chosen",), ("counters", "ranks")),
    "add_spans": _Arrays("lists", ("counters",), ("counts",)),
    "offsets": _Arrays("lists", ("counters", "counts"), ("offsets", "before")),
    "entries": _Arrays("lists", ("chosen", "ranks", "before"), ("entries", "degrees")),
    "items": _Arrays("lists", ("counts", "offsets", "blocks"), ("items",)),
    "blocks_forward": _Arrays("forward", (*_OPERANDS, "mask", "items", "entries", *_CACHE), ("part", "part_sum")),
    "merge_forward": _Arrays(
        "forward",
        (*_OPERANDS, "mask", "queries", "own", "degrees", *_CACHE, "part", "part_sum"),
        ("output", "log_sum"),
    ),
    "starts": _Arrays("backward", ("output", "output_cotangent", "log_sum", "log_sum_cotangent"), _STARTS),
    "blocks_backward": _Arrays(
        "backward",
        (*_OPERANDS, "output_cotangent", "mask", "blocks", "queries", "own", *_LISTS, *_STARTS),
        ("part", *_KEY_GRADIENTS),
    ),
    "query_parts": _Arrays(
        "backward", (*_OPERANDS, "output_cotangent", "mask", "items", "entries", *_STARTS), ("part",)
    ),
    "merge_backward": _Arrays(
        "backward",
        (*_OPERANDS, "output_cotangent", "mask", "queries", "own", "degrees", *_STARTS, "part"),
        ("d_query",),
    ),
}


class _Groups(NamedTuple):
    """The classes of a kernel's groups of arguments. Groups that the kernel does not take are None."""

    arrays: Any
    scalars: Any
    shape: type | None
    tile: type


_GROUPS: Mapping[str, _Groups] = {
    "centroids": _Groups(CentroidsArrays, None, MaskedCentroidShape, VectorTile),
    "halves": _Groups(HalvesArrays, HalvesScalars, CentroidShape, VectorTile),
    "choose": _Groups(ChooseArrays, ChooseScalars, ChoiceShape, ChoiceTile),
    "count": _Groups(CountArrays, CountScalars, None, CountTile),
    "add_spans": _Groups(AddSpansArrays, SpansScalars, None, SpanTile),
    "offsets": _Groups(OffsetsArrays, SpansScalars, None, SpanTile),
    "entries": _Groups(EntriesArrays, EntriesScalars, None, EntryTile),
    "items": _Groups(ItemsArrays, ItemsScalars, None, ItemTile),
    "starts": _Groups(StartsArrays, StartsScalars, None, VectorTile),
    "blocks_forward": _Groups(BlocksForwardArrays, BlocksForwardScalars, ListShape, BlockTile),
    "merge_forward": _Groups(MergeForwardArrays, MergeForwardScalars, OwnShape, MergeTile),
    "blocks_backward": _Groups(BlocksBackwardArrays, BlocksBackwardScalars, OwnShape, BlockTile),
    "query_parts": _Groups(QueryPartsArrays, QueryPartsScalars, ListShape, RowTile),
    "merge_backward": _Groups(MergeBackwardArrays, MergeBackwardScalars, OwnShape, RowTile),
}


# Modules and names of the Gluon kernels for Hopper.
_HOPPER_KERNELS: Mapping[str, tuple[str, str]] = {
    "choose": ("hopper_routing", "moba_hopper_choose"),
    "blocks_forward": ("hopper_forward", "moba_hopper_forward"),
    "blocks_backward": ("hopper_backward", "moba_hopper_backward"),
}
# Their groups, where they differ from those of the plain kernels.
_HOPPER_GROUPS: Mapping[str, _Groups] = {
    "choose": _Groups(ChooseArrays, ChooseScalars, HopperChoiceShape, HopperChoiceTile),
}


def supports(problem: MoBAProblem) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy."""
    reason = takes_operands(problem.dtype, problem.head_dim)
    if reason is not None:
        return reason
    rows = problem.query_tokens * max(problem.slots + 1, problem.query_heads)
    if max(rows, problem.key_tokens) >= 2**31 or problem.query_heads > 65535:
        return "the call has 2^31 or more rows, or more than 65535 heads; split the batch or the heads"
    return None


@dataclass(frozen=True, slots=True)
class MoBALaunch:
    """One kernel launch of MoBA; a KernelSpec.

    Attributes:
        problem: the call.
        kind: the kernel.
        has_own: whether an array says which queries see their own block; otherwise all do.
        heads: first key head and number of key heads of the launch, with their query heads; None for all. Attention is
            computed for some heads at a time to reduce the memory of partial results.
        is_portable: whether to use only kernels that Triton's interpreter supports, on every target.
        cache: the call of a paged cache whose keys and values the launch reads, or None. Keys are then numbered as in
            the page table, sequence * max_keys + position, and mean keys are float32.
    """

    problem: MoBAProblem
    kind: Kind
    has_own: bool = False
    is_portable: bool = False
    heads: tuple[int, int] | None = None
    cache: PagedProblem | None = None

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return f"moba_{self.kind}"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arrays that the launch reads, in order."""
        names = tuple(name for name in _KINDS[self.kind].inputs if self._is_present(name))
        return (*names, *self._continued)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch writes, in order."""
        return tuple(name for name in _KINDS[self.kind].outputs if self._is_present(name))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch reads."""
        return tuple(map(self._array_spec, self.input_names))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch writes."""
        return tuple(map(self._array_spec, self.output_names))

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`.

        Raises:
            NotImplementedError: the target cannot convert the dtype of the cache.
        """
        if self.cache is not None:
            require_dtypes(target.arch, self.cache.key_dtype, self.cache.value_dtype)
        module, name, groups = _KINDS[self.kind].module, self.name, _GROUPS[self.kind]
        hopper = None if self.is_portable else hopper_config(self.problem, self.kind, target.arch)
        if hopper is not None:
            module, name = _HOPPER_KERNELS[self.kind]
            groups = _HOPPER_GROUPS.get(self.kind, groups)
        kernel = getattr(importlib.import_module(f"blockdiag.triton_kernels.moba.{module}"), name)
        scales_values = self.cache is not None and self.cache.value_scale == "token"
        config = hopper or config_of(self.problem, self.kind, target.arch, scales_values=scales_values)
        config = adjusted(config, ADJUSTMENTS, self.problem, self.kind, target.arch)
        return LaunchPlan(
            name=self.name,
            kernel=kernel,
            grid=self._grid(config),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=self._arguments(kernel, groups, config),
            options=CompileOptions(
                num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers
            ),
            aliases=tuple(
                (index, self.output_names.index(name))
                for index, name in enumerate(self.input_names)
                if name in self.output_names
            ),
            flops=self._flops(),
        )

    def _arguments(self, kernel: Any, groups: _Groups, config: Config) -> dict[str, Argument | Group]:
        """Return the arguments of a kernel. Groups are filled by the names of their fields.

        A parameter that is no group is the size of its name.
        """
        scalars = self._scalars(config)
        values = self._shape_values() | self._tile_values(config)
        arguments: dict[str, Argument | Group] = {}
        for name in kernel.arg_names:
            match name:
                case "arrays":
                    arguments[name] = array_group(groups.arrays, self.input_names, self.output_names)
                case "scalars":
                    arguments[name] = groups.scalars._make(scalars[field] for field in groups.scalars._fields)
                case "SHAPE" | "TILE":
                    kind: Any = groups.shape if name == "SHAPE" else groups.tile
                    arguments[name] = Constexpr(kind(**{field.name: values[field.name] for field in fields(kind)}))
                case _:
                    arguments[name] = Constexpr(values[name.lower()])
        return arguments

    def _shape_values(self) -> dict[str, Any]:
        problem, cache = self.problem, self.cache
        return {
            "query_heads": problem.query_heads,
            "key_heads": problem.key_heads,
            "group_size": problem.group_size,
            "head_dim": problem.head_dim,
            "parts": self._parts,
            "part_scale": 1.0 if self._parts < 3 else problem.centroid_scale,
            "slots": problem.slots,
            "part_slots": problem.slots if self.kind.endswith("forward") else self._part_slots,
            "part_heads": self._query_heads,
            "has_mask": problem.has_key_mask,
            "is_causal": problem.is_causal,
            "has_own": self.has_own and problem.is_causal,
            "has_cache": cache is not None,
            "page_size": cache.page_size if cache is not None and cache.has_page_table else 0,
            "has_score_scale": cache is not None and cache.has_score_scale,
            "has_key_scale": cache is not None and cache.key_scale != "none",
            "value_scale": "none" if cache is None else cache.value_scale,
        }

    def _tile_values(self, config: Config) -> dict[str, Any]:
        problem = self.problem
        return {
            "rows": config.rows,
            "keys": config.keys,
            "blocks": config.blocks,
            "pairs": config.pairs,
            "spans": 16 if -(-problem.query_tokens // span_rows(problem)) <= MANY_HEADS_SPANS else 64,
            "columns": max(16, next_power_of_2(problem.head_dim)),
            "loop_stages": config.loop_stages,
            "precision": self._precision,
            "chunk": config.chunk,
            "key_tiles": self._key_tiles,
            "slot_columns": max(2, next_power_of_2(problem.slots)),
            "keep": next_power_of_2(problem.slots + 1),
            "has_match": not self.is_portable,
        }

    @property
    def _precision(self) -> Literal["ieee", "tf32"]:
        # Full float32 products: tf32 would keep ten bits of mantissa.
        return "ieee" if self.problem.dtype == "float32" else "tf32"

    def _flops(self) -> float:
        """Return the floating-point operations of the matrix products."""
        problem = self.problem
        rows = problem.query_tokens * self._query_heads * problem.head_dim
        seen = 0.5 if problem.is_causal else 1.0
        own = seen * problem.block_size
        match self.kind:
            case "choose":
                # Every query is multiplied by all parts of the mean keys.
                return 2.0 * rows * seen * problem.num_blocks * self._parts
            case "blocks_forward":
                return 4.0 * rows * problem.slots * problem.block_size
            case "merge_forward":
                return 4.0 * rows * own
            case "blocks_backward":
                return 10.0 * rows * (problem.slots * problem.block_size + own)
        return 0.0

    @property
    def _continued(self) -> tuple[str, ...]:
        """Arrays that earlier launches have written in part, as extra inputs.

        Elements that this launch does not write keep their content. The inputs also make launches for later heads
        depend on those for earlier heads, whose partial results can then be freed.
        """
        is_later = self._first_head > 0
        match self.kind:
            case "blocks_forward" if is_later:
                return ("output",)
            case "merge_forward" if is_later:
                return "output", "log_sum"
            case "blocks_backward":
                # No program writes the gradients of rows outside all blocks, so these are initialised with zeros.
                gradients = _KEY_GRADIENTS if is_later or self.problem.has_padding else ()
                return (*gradients, "d_query") if is_later else gradients
            case "merge_backward" if is_later:
                return ("d_query",)
        return ()

    @property
    def _key_heads(self) -> int:
        return self.problem.key_heads if self.heads is None else self.heads[1]

    @property
    def _query_heads(self) -> int:
        return self._key_heads * self.problem.group_size

    @property
    def _first_head(self) -> int:
        """The first query head."""
        return 0 if self.heads is None else self.heads[0] * self.problem.group_size

    @property
    def _parts(self) -> int:
        """The parts of mean keys that the launch reads."""
        if self.kind == "choose" and has_halves(self.problem):
            return 2
        return 1 if self.cache is not None else self.problem.centroid_parts

    def _is_present(self, name: str) -> bool:
        match name:
            case "centroids" if self.kind == "choose":
                return not has_halves(self.problem)
            case "halves" | "scales":
                return has_halves(self.problem)
            case "mask":
                return self.problem.has_key_mask
            case "own":
                return self.has_own and self.problem.is_causal
            case "page_table":
                return self.cache is not None and self.cache.has_page_table
            case "score_scale":
                return self.cache is not None and self.cache.has_score_scale
            case "key_scale":
                return self.cache is not None and self.cache.key_scale != "none"
            case "value_scale":
                return self.cache is not None and self.cache.value_scale != "none"
            case "offsets" | "counts" | "entries" | "degrees" | "part_sum":
                return self.problem.slots > 0
            case "part":
                slots = self.problem.slots if self.kind.endswith("forward") else self._part_slots
                return slots > 0 and not (self.kind == "blocks_backward" and self._key_tiles > 1)
        return True

    @property
    def _key_tiles(self) -> int:
        return key_tiles(self.problem)

    @property
    def _part_slots(self) -> int:
        """Parts of a query's gradient. They include its own block's part if a block is a single tile."""
        is_whole = self._key_tiles == 1 and self.problem.is_causal
        return self.problem.slots + is_whole

    def _num_items(self, config: Config) -> int:
        problem = self.problem
        return problem.num_blocks + problem.query_tokens * problem.slots // config.chunk

    def _array_spec(self, name: str) -> TensorSpec:
        problem, cache = self.problem, self.cache
        if cache is not None and name in (*_OPERANDS, *_CACHE, "output", "log_sum"):
            return PagedLaunch(cache, "merge").array_spec(name)
        if cache is not None and name == "centroids":
            shape = (cache.batch, problem.num_blocks // cache.batch, problem.key_heads, problem.head_dim)
            return TensorSpec(shape, "float32")
        tokens, heads, head_dim = problem.query_tokens, problem.query_heads, problem.head_dim
        spans = -(-tokens // span_rows(problem))
        match name:
            case "query" | "output" | "output_cotangent" | "d_query":
                return TensorSpec((tokens, heads, head_dim), problem.dtype)
            case "key" | "value" | "d_key" | "d_value":
                return TensorSpec((problem.key_tokens, problem.key_heads, head_dim), problem.dtype)
            case "centroids":
                shape = (problem.num_blocks, problem.key_heads, problem.centroid_parts, head_dim)
                return TensorSpec(shape, problem.dtype)
            case "halves":
                return TensorSpec((problem.num_blocks, problem.key_heads, 2, head_dim), "float16")
            case "scales":
                return TensorSpec((problem.key_heads, problem.num_blocks), "float32")
            case "mask":
                return TensorSpec((problem.key_tokens,), "int8")
            case "own":
                return TensorSpec((heads, tokens), "int8")
            case "blocks":
                return TensorSpec((problem.num_blocks, 4), "int32")
            case "queries":
                return TensorSpec((tokens, 4), "int32")
            case "chosen":
                return TensorSpec((heads, tokens, problem.slots), "int32")
            case "counters" | "before":
                return TensorSpec((heads, spans, problem.num_blocks), "int32")
            case "counts" | "offsets":
                return TensorSpec((heads, problem.num_blocks), "int32")
            case "degrees":
                return TensorSpec((heads, tokens), "int32")
            case "entries" | "ranks":
                return TensorSpec((heads, tokens * problem.slots), "int32")
            case "items":
                config = config_of(problem, self.kind, 90)
                return TensorSpec((heads, self._num_items(config), 4), "int32")
            case "part":
                slots = problem.slots if self.kind.endswith("forward") else self._part_slots
                return TensorSpec((tokens, self._query_heads, slots, head_dim), problem.dtype)
            case "part_sum":
                return TensorSpec((tokens, self._query_heads, problem.slots), "float32")
            case "log_sum" | "log_sum_cotangent" | "score_start" | "weight_start":
                return TensorSpec((tokens, heads), "float32")
        raise KeyError(name)

    def _grid(self, config: Config) -> tuple[int, int, int]:
        problem = self.problem
        tokens, heads, blocks = problem.query_tokens, problem.query_heads, problem.num_blocks
        spans = -(-tokens // span_rows(problem))
        query_tiles = max(1, -(-tokens // config.rows))
        match self.kind:
            case "centroids":
                return max(1, blocks), problem.key_heads, 1
            case "halves":
                return max(1, -(-blocks // config.rows)), problem.key_heads, 1
            case "choose" | "entries":
                return query_tiles, heads, 1
            case "merge_forward" | "merge_backward":
                return query_tiles, self._query_heads, 1
            case "count":
                return max(1, spans), heads, 1
            case "add_spans" | "offsets":
                return max(1, -(-blocks // config.blocks)), heads, 1
            case "items":
                return heads, 1, 1
            case "blocks_forward" | "query_parts":
                return max(1, self._num_items(config)), self._query_heads, 1
            case "starts":
                return max(1, -(-tokens * heads // config.rows)), 1, 1
            case "blocks_backward":
                return max(1, blocks * self._key_tiles), self._key_heads, 1
        raise KeyError(self.kind)

    def _scalars(self, config: Config) -> dict[str, Argument]:
        """Return the run-time scalars. None is compiled in, so different lengths and scales share a kernel."""
        problem, cache = self.problem, self.cache
        tokens = problem.query_tokens
        rows = span_rows(problem)
        return {
            "num_pages": Constexpr(None) if cache is None else Scalar(cache.num_pages, "i32"),
            "max_keys": Constexpr(None) if cache is None else Scalar(cache.max_keys, "i32"),
            "query_tokens": Scalar(tokens, "i32"),
            "num_blocks": Scalar(problem.num_blocks, "i32"),
            "num_items": Scalar(self._num_items(config), "i32"),
            "num_spans": Scalar(-(-tokens // rows), "i32"),
            "span_rows": Scalar(rows, "i32"),
            "first_head": Scalar(self._first_head, "i32"),
            "num_rows": Scalar(tokens * problem.query_heads, "i32"),
            "scale": Scalar(problem.scale, "fp32"),
            "scale_log2": Scalar(problem.scale * LOG2_E, "fp32"),
        }
