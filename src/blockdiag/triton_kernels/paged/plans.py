"""Launch plans of paged attention: attention to the splits of the keys, and the merge of the splits."""

from dataclasses import dataclass
from typing import Any, Literal

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS, KERNEL_FLOATS, lacking_dtype
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.compiler_versions import adjusted
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Scalar,
    Target,
    TensorSpec,
    array_group,
    scalar_group,
)
from blockdiag.triton_kernels.paged.arguments import (
    MergeArrays,
    MergeConstants,
    PagedShape,
    SplitArrays,
    SplitOptions,
    SplitScalars,
    SplitTile,
)
from blockdiag.triton_kernels.paged.configs import ADJUSTMENTS, SPLIT_GRAIN, split_config
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

Kind = Literal["splits", "merge"]


def supports(problem: PagedProblem) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy."""
    reason = takes_cache(
        problem.query_dtype, problem.key_dtype, problem.value_dtype, problem.head_dim, problem.value_dim
    )
    if reason is not None:
        return reason
    rows = problem.batch * problem.query_tokens * problem.query_heads
    if rows >= 2**31 or problem.max_keys >= 2**31 or max(problem.batch, problem.key_heads) > 65535:
        return "the call has more rows, keys, sequences or heads than the kernels can count; split the batch"
    return None


def takes_cache(query_dtype: str, key_dtype: str, value_dtype: str, head_dim: int, value_dim: int) -> str | None:
    """Return None if the kernels support these dtypes and head sizes; otherwise the reason and the remedy."""
    given = {"query": query_dtype, "key_pages": key_dtype, "value_pages": value_dtype}
    for name, dtype in given.items():
        if dtype not in (*KERNEL_FLOATS, *EIGHT_BIT_FLOATS):
            return (
                f"the Triton kernels take bfloat16, float16, float32 and eight-bit floats, and `{name}` is {dtype}; "
                "use implementation='xla'"
            )
    wide = {dtype for dtype in given.values() if dtype not in EIGHT_BIT_FLOATS}
    if len(wide) > 1 or ("float32" in wide and len(set(given.values())) > 1):
        return (
            f"the Triton kernels take queries and caches of one dtype, or eight-bit caches beside 16-bit queries; got "
            f"{given}; use implementation='xla'"
        )
    for name, size in {"H": head_dim, "the value's head size": value_dim}.items():
        if size % 8 or not 8 <= size <= 256:
            return f"the Triton kernels take multiples of 8 up to 256 for {name}, got {size}; use implementation='xla'"
    return None


def _columns(size: int, dtype: str) -> int:
    """Return the columns of a tile, at least 16 for the tensor cores.

    Eight-bit tiles need at least 32, because their even and odd columns are multiplied separately.
    """
    return max(32 if dtype in EIGHT_BIT_FLOATS else 16, next_power_of_2(size))


def _kind_of(dtype: str) -> Any:
    """Return Triton's dtype for an eight-bit float, or None for a wider dtype."""
    import triton.language as tl

    return {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}.get(dtype)


@dataclass(frozen=True, slots=True)
class PagedLaunch:
    """One kernel launch of paged attention; a KernelSpec.

    Attributes:
        problem: the call.
        kind: "splits" for attention to each split of the keys, or "merge" for the merge of the splits.
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
            "page_table": problem.has_page_table,
            "query_lengths": problem.has_query_lengths,
            "sinks": problem.has_sinks,
            "score_scale": problem.has_score_scale,
            "key_scale": problem.key_scale != "none",
            "value_scale": problem.value_scale != "none",
        }
        if self.kind == "merge":
            names = ("part", "part_sum", "query_lengths", "sinks")
        else:
            names = ("query", "key", "value", "page_table", "kv_lengths", *list(optional)[1:])
        return tuple(name for name in names if optional.get(name, True))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch writes, in order."""
        is_last = self.kind == "merge" or self.problem.num_splits == 1
        return ("output", "log_sum") if is_last else ("part", "part_sum")

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch reads."""
        return tuple(map(self.array_spec, self.input_names))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch writes."""
        return tuple(map(self.array_spec, self.output_names))

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        return self._merge_plan() if self.kind == "merge" else self._split_plan(target)

    def array_spec(self, name: str) -> TensorSpec:
        """Return the spec of an array of the call, by name."""
        problem = self.problem
        rows = (problem.batch, problem.query_tokens, problem.query_heads)
        pool = (problem.num_pages, problem.page_size, problem.key_heads)
        by_head = (problem.batch, problem.key_heads)
        match name:
            case "query":
                return TensorSpec((*rows, problem.head_dim), problem.query_dtype)
            case "key":
                return TensorSpec((*pool, problem.head_dim), problem.key_dtype)
            case "value":
                return TensorSpec((*pool, problem.value_dim), problem.value_dtype)
            case "page_table":
                return TensorSpec((problem.batch, problem.max_pages), "int32")
            case "kv_lengths" | "query_lengths":
                return TensorSpec((problem.batch,), "int32")
            case "sinks":
                return TensorSpec((problem.query_heads,), "float32")
            case "score_scale":
                return TensorSpec(by_head, "float32")
            case "key_scale":
                return TensorSpec(pool, "float32")
            case "value_scale":
                return TensorSpec(pool if problem.value_scale == "token" else by_head, "float32")
            case "output":
                return TensorSpec((*rows, problem.value_dim), problem.output_dtype)
            case "log_sum":
                return TensorSpec(rows, "float32")
            case "part":
                return TensorSpec((problem.num_splits, *rows, problem.value_dim), "float32")
            case "part_sum":
                return TensorSpec((problem.num_splits, *rows), "float32")
        raise KeyError(name)

    def _split_plan(self, target: Target) -> LaunchPlan:
        from blockdiag.triton_kernels.paged.attention import paged_splits

        problem = self.problem
        if lacking_dtype(target.arch, problem.query_dtype, problem.key_dtype, problem.value_dtype):
            raise NotImplementedError(
                f"float8_e4m3fn needs compute capability 8.9 or higher, and this GPU has {target.arch / 10}; use "
                "float8_e5m2, or implementation='xla'"
            )
        config = adjusted(split_config(problem, target.arch), ADJUSTMENTS, problem, self.kind, target.arch)
        rows = problem.query_tokens * problem.group_size
        row_tiles = -(-rows // config.rows)
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
            has_page_table=problem.has_page_table,
            has_query_lengths=problem.has_query_lengths,
            has_more_queries=problem.has_more_queries,
        )
        tile = SplitTile(
            rows=config.rows,
            row_tiles=row_tiles,
            keys=config.keys,
            columns=_columns(problem.head_dim, problem.key_dtype),
            value_columns=_columns(problem.value_dim, problem.value_dtype),
            is_keys_first=config.keys_first,
            num_warps=min(config.num_warps, config.keys // 16),
            is_aligned=SPLIT_GRAIN % config.keys == 0 and (problem.split_size or 0) % config.keys == 0,
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
            kernel=paged_splits,
            grid=(max(1, problem.num_splits * row_tiles), problem.key_heads, problem.batch),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(SplitArrays, self.input_names, self.output_names),
                "scalars": scalar_group(
                    SplitScalars,
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

    def _merge_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.paged.attention import paged_merge

        problem = self.problem
        rows = problem.batch * problem.query_tokens * problem.query_heads
        return LaunchPlan(
            name=self.name,
            kernel=paged_merge,
            grid=(max(1, rows), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(MergeArrays, self.input_names, self.output_names),
                "rows": Scalar(rows, "i32"),
                "num_splits": Scalar(problem.num_splits, "i32"),
                "MERGE": Constexpr(merge_constants(problem, max(16, next_power_of_2(problem.value_dim)))),
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
        parts=min(64, max(2, next_power_of_2(problem.num_splits))),
        has_query_lengths=problem.has_query_lengths,
        has_sinks=problem.has_sinks,
    )
