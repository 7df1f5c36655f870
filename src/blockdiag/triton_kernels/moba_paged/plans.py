"""Launch plans of MoBA over a paged cache: block scores, block selection, and attention to tiles of blocks."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Scalar,
    Target,
    TensorSpec,
    named_arguments,
)
from blockdiag.triton_kernels.paged import plans as paged
from blockdiag.triton_kernels.paged.plans import PagedLaunch
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

Kind = Literal["scores", "choose", "blocks"]

# Mean keys of a tile, and queries whose loads are in flight together.
SCORED_BLOCKS, SCORED_ROWS = 8, 4
# Scores of a query that are held at once, and the most candidates for which every program repeats the selection.
CHOICE_BLOCKS, FEW_BLOCKS = 4096, 2048
# Keys of a tile. One warp holds 32 keys of 128 elements and needs no barriers. Larger blocks have larger tiles, which
# leave fewer parts to merge.
TILE_KEYS, MAX_TILE_KEYS, TILES_OF_A_BLOCK = 32, 256, 8
# Bytes of keys that a warp holds in registers. One-byte elements count as two bytes.
WARP_BYTES, MAX_WARPS = 8192, 8


def supports(problem: MoBAPagedProblem) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy."""
    if problem.paged.max_keys + problem.block_size >= 2**31:
        return "the call has more keys than the kernels can count; give `page_table` as many columns as sequences need"
    return paged.supports(problem.paged)


def tile_keys(problem: MoBAPagedProblem) -> int:
    """Return the keys of a tile, a power of two from 16, limited by the block size and by the registers."""
    block = next_power_of_2(problem.block_size)
    wanted = min(max(TILE_KEYS, block // TILES_OF_A_BLOCK), MAX_TILE_KEYS)
    return max(16, min(wanted, block, WARP_BYTES * MAX_WARPS // _bytes_of_a_key(problem)))


def with_parts(problem: MoBAPagedProblem) -> MoBAPagedProblem:
    """Return the call with one split for each part of a query: the tiles of its own block and of selected blocks."""
    tiles = -(-problem.block_size // tile_keys(problem))
    call = dataclasses.replace(problem.paged, num_splits=(1 + problem.slots) * tiles, split_size=None)
    return dataclasses.replace(problem, paged=call)


def steps(problem: MoBAPagedProblem) -> "tuple[MoBAPagedLaunch, ...]":
    """Return the launches of a call in order. Each reads arrays by name and adds the arrays that it writes."""
    problem = with_parts(problem)
    kinds: tuple[Kind, ...] = ("scores", "choose", "blocks") if _has_chosen(problem) else ("scores", "blocks")
    return tuple(MoBAPagedLaunch(problem, kind) for kind in kinds)


def _has_chosen(problem: MoBAPagedProblem) -> bool:
    """Whether a separate launch selects the blocks before attention."""
    return problem.slots > 0 and problem.num_candidates > FEW_BLOCKS


def _bytes_of_a_key(problem: MoBAPagedProblem) -> int:
    """Return the bytes of a key or of a value in registers, whichever is larger."""
    call = problem.paged
    sizes = ((call.head_dim, call.key_dtype), (call.value_dim, call.value_dtype))
    return max(next_power_of_2(size) * (4 if dtype == "float32" else 2) for size, dtype in sizes)


@dataclass(frozen=True, slots=True)
class MoBAPagedLaunch:
    """One kernel launch of MoBA over a paged cache; a KernelSpec.

    Attributes:
        problem: the call, from `with_parts`.
        kind: "scores" of the mean keys, "choose" for each query's selection, or "blocks" for attention and the merge.
    """

    problem: MoBAPagedProblem
    kind: Kind

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return f"moba_paged_{self.kind}"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arrays that the launch reads, in order."""
        call = self.problem.paged
        lengths = ("kv_lengths", "query_lengths")
        match self.kind:
            case "scores":
                names = ("query", "centroids", *lengths)
            case "choose":
                names = ("scores", *lengths)
            case "blocks":
                names = ("query", "key", "value", "page_table", *lengths)
                names = (*names, "score_scale", "key_scale", "value_scale", "scores", "chosen", "arrived")
        is_there = {
            "page_table": call.has_page_table,
            "query_lengths": call.has_query_lengths,
            "score_scale": call.has_score_scale,
            "key_scale": call.key_scale != "none",
            "value_scale": call.value_scale != "none",
            "scores": self.kind == "choose" or (self.problem.slots > 0 and not _has_chosen(self.problem)),
            "chosen": _has_chosen(self.problem),
        }
        return tuple(name for name in names if is_there.get(name, True))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch writes, in order."""
        blocks = ("arrived", "part", "part_sum", "output", "log_sum")
        return {"scores": ("scores", "arrived"), "choose": ("chosen",), "blocks": blocks}[self.kind]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch reads."""
        return tuple(map(self._array_spec, self.input_names))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch writes."""
        return tuple(map(self._array_spec, self.output_names))

    def _array_spec(self, name: str) -> TensorSpec:
        problem, call = self.problem, self.problem.paged
        rows = (call.batch, call.query_tokens, call.query_heads)
        match name:
            case "centroids":
                return TensorSpec((call.batch, problem.max_blocks, call.key_heads, call.head_dim), "float32")
            case "scores":
                return TensorSpec((*rows, problem.num_candidates), "float32")
            case "chosen":
                return TensorSpec((*rows, problem.slots), "int32")
            case "arrived":
                return TensorSpec(rows, "int32")
        return PagedLaunch(call, "merge").array_spec(name)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        from blockdiag.triton_kernels.moba_paged import kernels

        problem, call = self.problem, self.problem.paged
        rows = max(1, call.batch * call.query_tokens * call.query_heads)
        scored_rows = min(SCORED_ROWS, next_power_of_2(call.query_tokens * call.group_size))
        columns, value_columns = next_power_of_2(call.head_dim), next_power_of_2(call.value_dim)
        scored_blocks = min(SCORED_BLOCKS, next_power_of_2(max(1, problem.num_candidates)))
        all_blocks = max(32, next_power_of_2(problem.num_candidates))
        choice_blocks = min(CHOICE_BLOCKS, all_blocks)
        parts, chooses = call.num_splits, problem.slots > 0 and not _has_chosen(problem)
        keys = tile_keys(problem)
        match self.kind:
            case "scores":
                kernel, blocks = kernels.moba_paged_scores, scored_blocks
                grid = (max(1, -(-problem.num_candidates // blocks)), call.key_heads, max(1, call.batch))
                # With one warp the sums over columns need no shared memory.
                num_warps = 1
            case "choose":
                kernel, blocks, grid = kernels.moba_paged_choose, choice_blocks, (rows, 1, 1)
                num_warps = min(MAX_WARPS, max(1, choice_blocks // 256))
            case "blocks":
                kernel, blocks, grid = kernels.moba_paged_blocks, all_blocks if chooses else 0, (rows, parts, 1)
                num_warps = min(MAX_WARPS, max(1, keys * _bytes_of_a_key(problem) // WARP_BYTES))
        known: dict[str, Argument] = {
            "rows": Scalar(rows, "i32"),
            "max_pages": Scalar(call.max_pages, "i32"),
            "num_pages": Scalar(call.num_pages, "i32"),
            "max_keys": Scalar(call.max_keys, "i32"),
            "max_blocks": Scalar(problem.max_blocks, "i32"),
            "num_candidates": Scalar(problem.num_candidates, "i32"),
            "scale": Scalar(call.scale, "fp32"),
        }
        constants = {
            "QUERY_TOKENS": call.query_tokens,
            "QUERY_HEADS": call.query_heads,
            "KEY_HEADS": call.key_heads,
            "HEAD_DIM": call.head_dim,
            "COLUMNS": columns,
            "VALUE_DIM": call.value_dim,
            "VALUE_COLUMNS": value_columns,
            "PAGE_SIZE": call.page_size,
            "BLOCK_SIZE": problem.block_size,
            "ROWS": scored_rows,
            "ALL_ROWS": next_power_of_2(call.query_tokens * call.group_size),
            "BLOCKS": blocks,
            "SLOTS": problem.slots,
            "SLOT_COLUMNS": next_power_of_2(max(1, problem.slots)),
            "CHOOSES": chooses,
            "PARTS": parts,
            "PART_COLUMNS": min(64, max(2, next_power_of_2(parts))),
            "KEYS": keys,
            "TABLE": call.has_page_table,
            "QUERY_LENGTHS": call.has_query_lengths,
            "SCORE_SCALE": call.has_score_scale,
            "KEY_SCALE": call.key_scale != "none",
            "VALUE_SCALE": call.value_scale,
        }
        known |= {name: Constexpr(value) for name, value in constants.items()}
        return LaunchPlan(
            name=self.name,
            kernel=kernel,
            grid=grid,
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=named_arguments(kernel, known, self.input_names, self.output_names),
            options=CompileOptions(num_warps=num_warps, num_stages=1),
            aliases=((self.input_names.index("arrived"), 0),) if self.kind == "blocks" else (),
        )
