"""Launch plans of paged attention: attention to the splits of the keys, and the merge of the splits."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from blockdiag.common.dtype_table import (
    EIGHT_BIT_DTYPES,
    EIGHT_BIT_FLOATS,
    ELEMENT_TYPES,
    KERNEL_FLOATS,
    lacking_dtype,
)
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.compiler_versions import adjusted
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Scalar,
    Target,
    TensorSpec,
    array_group,
    scalar_group,
)
from blockdiag.triton_kernels.launch.private_triton import has_hopper_kernels
from blockdiag.triton_kernels.paged.arguments import (
    Entries,
    MergeArrays,
    MergeConstants,
    PagedShape,
    PromptArrays,
    PromptScalars,
    SplitArrays,
    SplitOptions,
    SplitScalars,
    SplitTile,
)
from blockdiag.triton_kernels.paged.configs import (
    ADJUSTMENTS,
    FEWEST_BOX_ROWS,
    LATENT,
    SPLIT_GRAIN,
    key_columns,
    prompt_slots,
    split_config,
    value_columns,
)
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

# The largest H and V that the kernels take.
MOST_COLUMNS = (576, 512)

# Elements of the parts that a merge loads at once.
_MERGED_ELEMENTS = 64 * 256

# Programs along the second and the last axis of a grid.
_MOST_ON_AXIS = 65535

Kind = Literal["prompts", "splits", "merge"]


def supports(problem: PagedProblem, *, most: tuple[int, int] = MOST_COLUMNS) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy.

    Args:
        problem: the call.
        most: the largest H and V that its kernels take.
    """
    reason = takes_cache(
        problem.query_dtype, problem.key_dtype, problem.value_dtype, problem.head_dim, problem.value_dim, most=most
    )
    if reason is not None:
        return reason
    entries = problem.batch if problem.num_tiles is None else problem.num_tiles
    rows = entries * problem.query_tokens * problem.query_heads
    # Tiles may be on the first axis of a grid, which has no such limit.
    on_last_axis = entries if problem.num_tiles is None else 0
    if rows >= 2**31 or problem.max_keys >= 2**31 or max(on_last_axis, problem.key_heads) > _MOST_ON_AXIS:
        return "the call has more rows, keys, sequences or heads than the kernels can count; split the batch"
    return None


def takes_cache(
    query_dtype: str,
    key_dtype: str,
    value_dtype: str,
    head_dim: int,
    value_dim: int,
    *,
    most: tuple[int, int] = MOST_COLUMNS,
) -> str | None:
    """Return None if the kernels support these dtypes and head sizes; otherwise the reason and the remedy."""
    given = {"query": query_dtype, "key_pages": key_dtype, "value_pages": value_dtype}
    for name, dtype in given.items():
        eight_bits = EIGHT_BIT_FLOATS if name == "query" else EIGHT_BIT_DTYPES
        if dtype not in (*KERNEL_FLOATS, *eight_bits):
            return (
                f"the Triton kernels take bfloat16, float16, float32, eight-bit floats and caches of int8, and "
                f"`{name}` is {dtype}; use implementation='xla'"
            )
    wide = {dtype for dtype in given.values() if dtype not in EIGHT_BIT_DTYPES}
    if len(wide) > 1 or ("float32" in wide and len(set(given.values())) > 1):
        return (
            f"the Triton kernels take queries and caches of one dtype, or eight-bit caches beside 16-bit queries; got "
            f"{given}; use implementation='xla'"
        )
    sizes = {"H": head_dim, "the value's head size": value_dim}
    for (name, size), limit in zip(sizes.items(), most, strict=True):
        if size % 8 or not 8 <= size <= limit:
            return (
                f"the Triton kernels take multiples of 8 up to {limit} for {name}, got {size}; use implementation='xla'"
            )
    return None


def require_dtypes(arch: int, *dtypes: str) -> None:
    """Check that an architecture converts these dtypes.

    Raises:
        NotImplementedError: it does not; the message says what to do.
    """
    if lacking := lacking_dtype(arch, *dtypes):
        raise NotImplementedError(
            f"{lacking} needs compute capability {ELEMENT_TYPES[lacking].first_arch / 10} or higher, and this GPU has "
            f"{arch / 10}; use float8_e5m2, or implementation='xla'"
        )


def _kind_of(dtype: str) -> Any:
    """Return Triton's dtype for an eight-bit dtype, or None for a wider one."""
    import triton.language as tl

    return {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5, "int8": tl.int8}.get(dtype)


# Hopper has 50 MB of L2.
_STREAMED_BYTES = 32 << 20
LOG2_E = math.log2(math.e)
# Scores below this number are masked.
NO_KEY = -3e38


def _hopper_kernel(problem: PagedProblem, target: Target) -> Literal[8, 16] | None:
    """Return the bits of the operands of the kernel for Hopper that computes prompts, or None."""
    dtypes = {problem.query_dtype, problem.key_dtype, problem.value_dtype}
    if not (
        has_hopper_kernels(target.arch)
        and problem.has_value_pages
        and problem.head_dim == problem.value_dim
        and problem.group_size <= 128
        # Exponents are scores times a positive factor.
        and problem.scale > 0
        and problem.num_pages * problem.page_size < 2**31
    ):
        return None
    has_scales = problem.has_score_scale or problem.key_scale != "none" or problem.value_scale != "none"
    if dtypes in ({"bfloat16"}, {"float16"}) and problem.head_dim in (64, 128, 256) and not has_scales:
        return 16
    if dtypes in ({"float8_e4m3fn"}, {"float8_e5m2"}) and problem.head_dim in (64, 128):
        return 8
    return None


def _is_latent_on_hopper(problem: PagedProblem, target: Target) -> bool:
    """Return whether the kernel for latent caches on Hopper computes the splits of a call."""
    return (
        has_hopper_kernels(target.arch)
        and not problem.has_value_pages
        and (problem.head_dim, problem.value_dim) == (576, 512)
        and problem.query_dtype in ("bfloat16", "float16")
        and problem.key_dtype in (problem.query_dtype, *EIGHT_BIT_DTYPES)
        # Exponents are scores times a positive factor.
        and problem.scale > 0
        and problem.num_pages * problem.page_size < 2**31
    )


def launches(problem: PagedProblem, *, is_portable: bool = False) -> "list[PagedLaunch]":
    """Return the launches of a call, in order. See `PagedLaunch`."""
    kinds: list[Kind] = [] if problem.few_queries is None else ["prompts"]
    if problem.few_queries != 0:
        kinds.append("splits")
        if problem.num_splits > 1:
            kinds.append("merge")
    return [PagedLaunch(problem, kind, is_portable) for kind in kinds]


@dataclass(frozen=True, slots=True)
class PagedLaunch:
    """One kernel launch of paged attention; a KernelSpec.

    With `few_queries`, sequences with more queries are prompts. Later launches then write the results of the others
    into the arrays that the launch of prompts has returned.

    Attributes:
        problem: the call, as `PagedProblem.tiled` returns it.
        kind: "prompts" for prompts, "splits" for attention to each split of the keys, or "merge" for the merge of the
            splits.
        is_portable: whether to use only operations that Triton's interpreter supports, on every target.
    """

    problem: PagedProblem
    kind: Kind
    is_portable: bool = False

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return f"paged_{self.kind}"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arrays that the launch reads, in order."""
        problem = self.problem
        optional = {
            "value": problem.has_value_pages,
            "page_table": problem.has_page_table,
            "query_lengths": problem.has_query_lengths,
            "tiles": problem.num_tiles is not None,
            "sinks": problem.has_sinks,
            "score_scale": problem.has_score_scale,
            "key_scale": problem.key_scale != "none",
            # Without pages of values, the kernel multiplies weights by the scales of the keys.
            "value_scale": problem.value_scale != "none"
            and not (problem.value_scale == "token" and not problem.has_value_pages),
        }
        if self.kind == "merge":
            names = ("part", "part_sum", "query_lengths", "tiles", "sinks")
        else:
            names = ("query", "key", "value", "page_table", "kv_lengths", *list(optional)[2:])
        names = tuple(name for name in names if optional.get(name, True))
        if self.kind == "prompts":
            return (*names, "zeros")
        return (*names, *self.output_names) if self._completes else names

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch writes, in order."""
        if self.kind == "prompts":
            return ("output", "log_sum", "counter")
        is_last = self.kind == "merge" or self.problem.num_splits == 1
        return ("output", "log_sum") if is_last else ("part", "part_sum")

    @property
    def _completes(self) -> bool:
        """Whether the launch writes into the results of the launch of prompts."""
        is_last = self.kind == "merge" or (self.kind == "splits" and self.problem.num_splits == 1)
        return is_last and self.problem.few_queries is not None

    @property
    def _own(self) -> PagedProblem:
        """The problem in which the tiles, or the sequences, of this launch are a batch."""
        problem = self.problem
        if problem.num_tiles is None:
            return problem
        if problem.few_queries is None or self.kind == "prompts":
            splits = 1 if self.kind == "prompts" else problem.num_splits
            return replace(problem, batch=problem.num_tiles, num_splits=splits)
        return replace(problem, query_tokens=problem.few_queries)

    @property
    def _entries(self) -> Entries:
        """The entries that the programs of this launch compute."""
        if self.problem.num_tiles is None:
            return "sequences"
        return "tiles" if self.problem.few_queries is None or self.kind == "prompts" else "wholes"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the arrays that the launch reads."""
        return tuple(self.array_spec(name) for name in self.input_names)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the arrays that the launch writes."""
        return tuple(self.array_spec(name) for name in self.output_names)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        if self.kind == "merge":
            return self._merge_plan()
        if self.kind == "prompts" and not self.is_portable:
            bits = _hopper_kernel(self.problem, target)
            if bits is not None:
                return self._hopper_plan(target, bits)
        return self._split_plan(target)

    def array_spec(self, name: str) -> TensorSpec:
        """Return the spec of an array of the call, by name."""
        problem, own = self.problem, self._own
        rows = own.batch, own.query_tokens, own.query_heads
        whole = rows if problem.packed_rows is None else (problem.packed_rows, problem.query_heads)
        pool = (problem.num_pages, problem.page_size, problem.key_heads)
        by_head = (problem.batch, problem.key_heads)
        match name:
            case "query":
                return TensorSpec((*whole, problem.head_dim), problem.query_dtype)
            case "key":
                return TensorSpec((*pool, problem.head_dim), problem.key_dtype)
            case "value":
                return TensorSpec((*pool, problem.value_dim), problem.value_dtype)
            case "page_table":
                return TensorSpec((problem.batch, problem.max_pages), "int32")
            case "kv_lengths" | "query_lengths":
                return TensorSpec((problem.batch,), "int32")
            case "tiles":
                return TensorSpec(((problem.num_tiles or 0) + problem.batch, 4), "int32")
            case "zeros" | "counter":
                return TensorSpec((1,), "int32")
            case "sinks":
                return TensorSpec((problem.query_heads,), "float32")
            case "score_scale":
                return TensorSpec(by_head, "float32")
            case "key_scale":
                return TensorSpec(pool, "float32")
            case "value_scale":
                return TensorSpec(pool if problem.value_scale == "token" else by_head, "float32")
            case "output":
                return TensorSpec((*whole, problem.value_dim), problem.output_dtype)
            case "log_sum":
                return TensorSpec(whole, "float32")
            case "part":
                return TensorSpec((own.num_splits, *rows, problem.value_dim), "float32")
            case "part_sum":
                return TensorSpec((own.num_splits, *rows), "float32")
        raise KeyError(name)

    @property
    def _aliases(self) -> tuple[tuple[int, int], ...]:
        inputs, outputs = self.input_names, self.output_names
        shared = {name: name for name in outputs} | {"zeros": "counter"}
        return tuple((i, outputs.index(shared[name])) for i, name in enumerate(inputs) if shared.get(name) in outputs)

    def _hopper_plan(self, target: Target, bits: Literal[8, 16]) -> LaunchPlan:
        from blockdiag.triton_kernels.paged.hopper_eight_bit_prompts import EightBitShape, paged_eight_bit_prompts
        from blockdiag.triton_kernels.paged.hopper_prompts import PromptShape, paged_prompts

        problem, tiles = self.problem, self.problem.num_tiles
        assert tiles is not None and problem.few_queries is not None
        left, right = problem.window
        if problem.is_causal:
            right = 0 if right is None else min(right, 0)
        chunk, slots, query_slots = prompt_slots(problem.head_dim)
        unit = (problem.scale if problem.soft_cap is None else problem.soft_cap) * LOG2_E
        shape = PromptShape(
            rows=128,
            chunk=chunk,
            features=problem.head_dim,
            columns=problem.value_dim,
            features_more=0,
            columns_more=0,
            slots=slots,
            query_slots=query_slots,
            query_tiles=0,
            chunks=0,
            lines=0,
            together=1,
            masks="some",
            is_listed=True,
            staging="none",
            unit=unit,
            no_key=NO_KEY,
            has_extras=False,
            has_weight=False,
            takes_turns=False,
            is_copied=True,
            query_heads=problem.query_heads,
            key_heads=problem.key_heads,
            group=problem.group_size,
            page_size=problem.page_size,
            few=problem.few_queries,
            left=left,
            right=right,
            has_page_table=problem.has_page_table,
            has_soft_cap=problem.soft_cap is not None,
            has_sinks=problem.has_sinks,
        )
        boxes: dict[str, Any] = {}
        if bits == 8:
            # Threads that copy scales of tokens may as well copy rows.
            has_boxes = "token" not in (problem.key_scale, problem.value_scale)
            boxes = {
                f"{name}s": self._boxes(name, chunk, problem.head_dim) if has_boxes else Constexpr(None)
                for name in ("key", "value")
            }
            box = boxes["keys"].block_shape[0] if isinstance(boxes["keys"], Descriptor) else 0
            largest = EIGHT_BIT_FLOATS[problem.query_dtype].largest
            shape = replace(shape, is_copied=box == 0)
            shape = EightBitShape(
                **vars(shape),
                box=box,
                most_score=problem.head_dim * largest**2 if problem.soft_cap is None else 1.0,
                has_score_scale=problem.has_score_scale,
                has_key_scale=problem.key_scale == "token",
                value_scale=problem.value_scale,
            )
        slope = 0.0 if problem.soft_cap is None else 2 * LOG2_E * problem.scale / problem.soft_cap
        return LaunchPlan(
            name=self.name,
            kernel=paged_prompts if bits == 16 else paged_eight_bit_prompts,
            grid=(min(tiles * problem.key_heads, target.num_sms), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            aliases=self._aliases,
            arguments={
                "arrays": array_group(PromptArrays, self.input_names, self.output_names),
                **boxes,
                "scalars": scalar_group(
                    PromptScalars,
                    num_tiles=tiles,
                    together=max(
                        1, min(problem.key_heads, _STREAMED_BYTES // (problem.max_keys * problem.head_dim * bits // 4))
                    ),
                    max_pages=problem.max_pages,
                    num_pages=problem.num_pages,
                    max_keys=problem.max_keys,
                    slope=Scalar(slope, "fp32"),
                    unit=Scalar(unit, "fp32"),
                ),
                "SHAPE": Constexpr(shape),
            },
            options=CompileOptions(num_warps=4),
        )

    def _split_plan(self, target: Target) -> LaunchPlan:
        from blockdiag.triton_kernels.paged.attention import paged_splits

        problem, few = self._own, self.problem.few_queries
        require_dtypes(target.arch, problem.query_dtype, problem.key_dtype, problem.value_dtype)
        kernel: Any = paged_splits
        boxes: dict[str, Any] = {}
        is_latent = not self.is_portable and _is_latent_on_hopper(self.problem, target)
        if is_latent:
            # Imported here, because other Triton versions may lack Gluon's names.
            from blockdiag.triton_kernels.paged.hopper_latent import latent_splits

            kernel = latent_splits
            # Eight-bit keys are widened by threads.
            has_boxes = problem.key_dtype not in EIGHT_BIT_DTYPES
            boxes["keys"] = self._boxes("key", LATENT.keys, 64) if has_boxes else Constexpr(None)
        config = LATENT if is_latent else split_config(problem, target.arch)
        config = adjusted(config, ADJUSTMENTS, problem, self.kind, target.arch)
        rows = problem.query_tokens * problem.group_size
        row_tiles = -(-rows // config.rows)
        parts = max(1, problem.num_splits * row_tiles)
        is_long = problem.batch > _MOST_ON_AXIS
        left, right = problem.window
        if problem.is_causal and right is not None:
            right = min(right, 0)
        shape = PagedShape(
            query_tokens=problem.query_tokens,
            query_heads=problem.query_heads,
            key_heads=problem.key_heads,
            group_size=problem.group_size,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            page_size=problem.page_size,
            has_values=problem.has_value_pages,
            has_page_table=problem.has_page_table,
            has_query_lengths=problem.has_query_lengths,
            entries=self._entries,
            is_long=is_long,
            fewest=few + 1 if few and self.kind == "prompts" else None,
            most=few if few and self.kind == "splits" else None,
        )
        columns, more_columns = key_columns(problem)
        tile = SplitTile(
            rows=config.rows,
            row_tiles=row_tiles,
            keys=config.keys,
            columns=columns,
            more_columns=more_columns,
            value_columns=value_columns(problem),
            is_keys_first=config.keys_first,
            num_warps=min(config.num_warps, config.keys // 16),
            is_aligned=SPLIT_GRAIN % config.keys == 0 and (problem.split_size or 0) % config.keys == 0,
            masks_edges=config.masks_edges,
            loop_stages=config.loop_stages,
            precision="ieee" if problem.query_dtype == "float32" else "tf32",
        )
        options = SplitOptions(
            is_causal=problem.is_causal,
            left=left,
            right=right,
            has_soft_cap=problem.soft_cap is not None,
            has_sinks=problem.has_sinks,
            has_score_scale=problem.has_score_scale,
            has_key_scale=problem.key_scale != "none",
            value_scale=problem.value_scale,
            is_whole=problem.num_splits == 1,
            key_kind=_kind_of(problem.key_dtype),
            value_kind=_kind_of(problem.value_dtype),
            has_machine_code=not self.is_portable,
        )
        return LaunchPlan(
            name=self.name,
            kernel=kernel,
            grid=(problem.batch, problem.key_heads, parts) if is_long else (parts, problem.key_heads, problem.batch),
            inputs=self.inputs,
            outputs=self.outputs,
            aliases=self._aliases,
            arguments={
                "arrays": array_group(SplitArrays, self.input_names, self.output_names),
                **boxes,
                "scalars": scalar_group(
                    SplitScalars,
                    num_tiles=problem.num_tiles or 0,
                    max_pages=problem.max_pages,
                    num_pages=problem.num_pages,
                    max_keys=problem.max_keys,
                    num_splits=problem.num_splits,
                    split_size=problem.split_size or 0,
                    scale=Scalar(problem.scale, "fp32"),
                    soft_cap=Scalar(problem.soft_cap or 0.0, "fp32"),
                ),
                "SHAPE": Constexpr(shape),
                "TILE": Constexpr(tile),
                "OPTIONS": Constexpr(options),
            },
            options=CompileOptions(num_warps=config.num_warps, num_stages=config.loop_stages),
        )

    def _boxes(self, name: str, most_rows: int, columns: int) -> Argument:
        """Return a descriptor of boxes of keys or values that are neighbours in a page, or None if pages are small.

        Args:
            name: "key" or "value".
            most_rows: keys of a tile. Tiles begin at multiples of it.
            columns: columns of a box, of a line of swizzled shared memory.
        """
        from triton.experimental.gluon import language as gl

        problem = self.problem
        rows = math.gcd(problem.page_size, most_rows) if problem.has_page_table else most_rows
        if rows < FEWEST_BOX_ROWS:
            return Constexpr(None)
        index = self.input_names.index(name)
        bits = 8 * ELEMENT_TYPES[self.inputs[index].dtype].bytes
        return Descriptor(
            "input",
            index,
            (problem.num_pages * problem.page_size, problem.key_heads * problem.head_dim),
            (rows, columns),
            gl.NVMMASharedLayout(swizzle_byte_width=columns * bits // 8, element_bitwidth=bits, rank=2),
        )

    def _merge_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.paged.attention import paged_merge

        problem = self._own
        rows = problem.batch * problem.query_tokens * problem.query_heads
        merge = merge_constants(problem, max(16, next_power_of_2(problem.value_dim)))
        return LaunchPlan(
            name=self.name,
            kernel=paged_merge,
            grid=(max(1, rows), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            aliases=self._aliases,
            arguments={
                "arrays": array_group(MergeArrays, self.input_names, self.output_names),
                "rows": Scalar(rows, "i32"),
                "num_splits": Scalar(problem.num_splits, "i32"),
                "num_tiles": Scalar(problem.num_tiles or 0, "i32"),
                "MERGE": Constexpr(replace(merge, entries=self._entries, most=self.problem.few_queries)),
            },
            options=CompileOptions(num_warps=4),
        )


def merge_constants(problem: PagedProblem, value_columns: int) -> MergeConstants:
    """Return the compile-time values of the merge of a call's splits."""
    return MergeConstants(
        query_tokens=problem.query_tokens,
        query_heads=problem.query_heads,
        value_dim=problem.value_dim,
        value_columns=value_columns,
        # Wider values have fewer parts at once, so that these fit into registers.
        parts=min(64, _MERGED_ELEMENTS // value_columns, max(2, next_power_of_2(problem.num_splits))),
        has_query_lengths=problem.has_query_lengths,
        has_sinks=problem.has_sinks,
    )
