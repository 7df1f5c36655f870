"""Launch plan of appending to a paged cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from blockdiag.common.dtype_table import (
    EIGHT_BIT_DTYPES,
    EIGHT_BIT_FLOATS,
    EIGHT_BIT_INTEGERS,
    ELEMENT_TYPES,
    KERNEL_FLOATS,
    lacking_dtype,
)
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.triton_kernels.append.arguments import (
    AppendArrays,
    AppendSizes,
    AppendTile,
    CacheLayout,
    RowFormat,
)
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Target,
    TensorSpec,
    array_group,
    scalar_group,
)
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

# The first architecture that rounds float32 to eight-bit floats in one instruction.
_FIRST_THAT_ROUNDS = 90
# The last bit of float32 numbers in [2^23, 2^24) is 1.
_INTEGER_GRID = 1.5 * 2.0**23

_MAX_DIM = 1024
_SMALLEST_SCALE = 2.0**-126

# Elements of a program's tile, both of new rows and of a block's keys.
_TILE = 2048
_FEW_PROGRAMS = 2048


def supports(problem: AppendProblem) -> str | None:
    """Return None if the kernel can compute `problem`; otherwise a sentence with the reason and the remedy."""
    dtypes = {"key": problem.dtype, "key_pages": problem.key_dtype, "value_pages": problem.value_dtype}
    table_dtype = None if problem.rotary is None else problem.rotary.table_dtype
    reason = takes_rows(dtypes, table_dtype, problem.head_dim, problem.value_dim)
    if reason is not None:
        return reason
    programs = problem.tokens + problem.batch * max(problem.max_completed, 1)
    if max(programs, problem.max_keys, problem.batch * problem.key_heads) >= 2**31 or problem.key_heads > 65535:
        return "the call has more tokens, keys, sequences or heads than the kernel can count; split the batch"
    return None


def takes_rows(dtypes: Mapping[str, str], table_dtype: str | None, head_dim: int, value_dim: int) -> str | None:
    """Return None if the kernel supports these dtypes, by array name, and head sizes; otherwise the reason."""
    for name, dtype in dtypes.items():
        if dtype not in (*KERNEL_FLOATS, *(EIGHT_BIT_FLOATS if name == "key" else EIGHT_BIT_DTYPES)):
            return (
                f"the Triton kernel takes bfloat16, float16, float32, eight-bit floats and caches of int8, and "
                f"`{name}` is {dtype}; use implementation='xla'"
            )
    if table_dtype == "float64":
        return "the Triton kernel takes no float64 tables of rotary embedding; make them float32"
    for name, size in {"H": head_dim, "the value's head size": value_dim}.items():
        if size > _MAX_DIM:
            return f"the Triton kernel takes at most {_MAX_DIM} for {name}, got {size}; use implementation='xla'"
    return None


@dataclass(frozen=True, slots=True)
class AppendLaunch:
    """The launch that appends to a paged cache; a KernelSpec.

    Attributes:
        problem: the call.
    """

    problem: AppendProblem

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return "append_to_pages"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arrays that the launch reads, in order, including those that it updates."""
        problem = self.problem
        has_rotary = problem.rotary is not None
        is_read = {
            "key": True,
            "value": problem.has_values,
            "page_table": problem.has_page_table,
            "kv_lengths": True,
            "query_lengths": problem.has_query_lengths,
            "sequences": problem.is_packed,
            "first_rows": problem.is_packed,
            "cos": has_rotary,
            "sin": has_rotary,
            "positions": problem.rotary is not None and problem.rotary.positions == "explicit",
            "key_scale": problem.key_scale != "none",
            "value_scale": problem.value_scale != "none",
            "key_pages": True,
            "value_pages": problem.has_values,
            "key_centroids": problem.block_size is not None,
        }
        return tuple(name for name, reads in is_read.items() if reads)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch updates, in order."""
        return self.problem.written

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch reads."""
        return tuple(map(self._array_spec, self.input_names))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch updates."""
        return tuple(map(self._array_spec, self.output_names))

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`.

        Raises:
            NotImplementedError: the target has no float8_e4m3fn and the call uses it.
        """
        from blockdiag.triton_kernels.append.kernels import append_kernel

        problem = self.problem
        dtypes = (problem.dtype, problem.key_dtype, problem.value_dtype)
        if lacking := lacking_dtype(target.arch, *dtypes):
            first = ELEMENT_TYPES[lacking].first_arch / 10
            raise NotImplementedError(
                f"kernel {self.name!r} with {lacking} needs compute capability {first} or later, "
                f"got {target.arch / 10}; use a cache of float8_e5m2, or implementation='xla'"
            )
        rotary = problem.rotary
        key = self._row_format(problem.head_dim, problem.key_dtype, problem.key_scale, rotary, target.arch)
        value = self._row_format(problem.value_dim, problem.value_dtype, problem.value_scale, None, target.arch)
        layout = CacheLayout(
            page_size=problem.page_size,
            block_size=problem.block_size,
            is_packed=problem.is_packed,
            has_page_table=problem.has_page_table,
            has_query_lengths=problem.has_query_lengths,
        )
        block_rows = min(max(1, _TILE // (2 * key.columns)), next_power_of_2(problem.block_size or 1))
        programs = self._row_tiles + problem.batch * problem.max_completed
        return LaunchPlan(
            name=self.name,
            kernel=append_kernel,
            grid=(max(programs, 1), problem.key_heads, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(AppendArrays, self.input_names, self.output_names),
                "sizes": scalar_group(
                    AppendSizes,
                    tokens=problem.tokens,
                    query_tokens=problem.tokens if problem.query_tokens is None else problem.query_tokens,
                    max_pages=problem.max_pages,
                    num_pages=problem.num_pages,
                    max_keys=problem.max_keys,
                    table_rows=1 if rotary is None else rotary.table_rows,
                    row_tiles=self._row_tiles,
                    max_completed=max(problem.max_completed, 1),
                    max_blocks=problem.max_blocks,
                ),
                "LAYOUT": Constexpr(layout),
                "TILE": Constexpr(AppendTile(rows=self._rows, block_rows=block_rows)),
                "KEY": Constexpr(key),
                "VALUE": Constexpr(value if problem.has_values else None),
            },
            options=CompileOptions(num_warps=1 if self._rows == 1 and problem.block_size is None else 4),
            aliases=tuple((self.input_names.index(name), position) for position, name in enumerate(self.output_names)),
        )

    @property
    def _rows(self) -> int:
        """New rows per program: one if even one row per program does not fill the GPU."""
        widest = next_power_of_2(max(self.problem.head_dim, self.problem.value_dim))
        return 1 if self.problem.tokens * self.problem.key_heads <= _FEW_PROGRAMS else max(1, _TILE // widest)

    @property
    def _row_tiles(self) -> int:
        return -(-self.problem.tokens // self._rows)

    def _array_spec(self, name: str) -> TensorSpec:
        problem = self.problem
        rotary = problem.rotary
        pool = (problem.num_pages, problem.page_size, problem.key_heads)
        by_head = (problem.batch, problem.key_heads)
        match name:
            case "key":
                return TensorSpec((problem.tokens, problem.key_heads, problem.head_dim), problem.dtype)
            case "value":
                return TensorSpec((problem.tokens, problem.key_heads, problem.value_dim), problem.dtype)
            case "page_table":
                return TensorSpec((problem.batch, problem.max_pages), "int32")
            case "kv_lengths" | "query_lengths" | "first_rows":
                return TensorSpec((problem.batch,), "int32")
            case "sequences" | "positions":
                return TensorSpec((problem.tokens,), "int32")
            case "cos" | "sin" if rotary is not None:
                return TensorSpec((rotary.table_rows, problem.head_dim // 2), rotary.table_dtype)
            case "key_scale":
                return TensorSpec(pool if problem.key_scale == "token" else by_head, "float32")
            case "value_scale":
                return TensorSpec(pool if problem.value_scale == "token" else by_head, "float32")
            case "key_pages":
                return TensorSpec((*pool, problem.head_dim), problem.key_dtype)
            case "value_pages":
                return TensorSpec((*pool, problem.value_dim), problem.value_dtype)
            case "key_centroids":
                return TensorSpec((problem.batch, problem.max_blocks, problem.key_heads, problem.head_dim), "float32")
        raise KeyError(name)

    def _row_format(
        self, dim: int, dtype: str, scale: Literal["none", "head", "token"], rotary: RotaryProblem | None, arch: int
    ) -> RowFormat:
        """Return how rows of heads of `dim` elements are rotated and rounded to `dtype`."""
        half = -(-dim // 2)
        narrow, integer = EIGHT_BIT_FLOATS.get(dtype), EIGHT_BIT_INTEGERS.get(dtype)
        grid = None if integer is None else _INTEGER_GRID
        if narrow is not None and arch < _FIRST_THAT_ROUNDS:
            grid = 1.5 * 2.0 ** (23 - narrow.fraction_bits)
        return RowFormat(
            heads=self.problem.key_heads,
            dim=dim,
            half=half,
            columns=next_power_of_2(half),
            is_interleaved=rotary is not None and rotary.interleaved,
            has_rotary=rotary is not None,
            has_positions=rotary is not None and rotary.positions == "explicit",
            scale=scale,
            largest=EIGHT_BIT_DTYPES[dtype].largest if dtype in EIGHT_BIT_DTYPES else None,
            is_integer=integer is not None,
            grid=grid,
            lowest=None if narrow is None else narrow.smallest_normal,
            smallest_scale=_SMALLEST_SCALE,
        )
