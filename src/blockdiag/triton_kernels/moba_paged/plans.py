"""Launch plans of MoBA over a paged cache: block scores, block selection, and attention to tiles of blocks.

These launches are for few queries; `prompts` has those of prompts.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
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
from blockdiag.triton_kernels.moba.plans import MoBALaunch
from blockdiag.triton_kernels.moba_paged.arguments import (
    BlockArrays,
    BlockOptions,
    BlockScalars,
    BlockShape,
    BlockTile,
    ChoiceArrays,
    ChoiceShape,
    ChoiceTile,
    ScoreArrays,
    ScoreScalars,
    ScoreShape,
    ScoreTile,
)
from blockdiag.triton_kernels.moba_paged.prompts import PromptLaunch, is_prompt, prompt_steps
from blockdiag.triton_kernels.paged import plans as paged
from blockdiag.triton_kernels.paged.plans import PagedLaunch, require_dtypes
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

Kind = Literal["scores", "choose", "blocks"]

# Mean keys of a tile, and queries whose loads are in flight together.
SCORED_BLOCKS, SCORED_ROWS = 8, 4
# Counters that one step of the score kernel resets.
RESET_ROWS = 1024
# Scores of a query that are held at once, and the most candidates for which every program repeats the selection.
CHOICE_BLOCKS, FEW_BLOCKS = 4096, 2048
# Keys of a tile. One warp holds 32 keys of 128 elements and needs no barriers. Larger blocks have larger tiles, which
# leave fewer parts to merge.
TILE_KEYS, MAX_TILE_KEYS, TILES_OF_A_BLOCK = 32, 256, 8
# Bytes of keys that a warp holds in registers. One-byte elements count as two bytes.
WARP_BYTES, MAX_WARPS = 8192, 8


# The largest H and V that the kernels take.
MOST_COLUMNS = (256, 256)


def supports(problem: MoBAPagedProblem) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy."""
    if problem.paged.max_keys + problem.block_size >= 2**31:
        return "the call has more keys than the kernels can count; give `page_table` as many columns as sequences need"
    return paged.supports(problem.paged, most=MOST_COLUMNS)


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


type Step = MoBAPagedLaunch | PromptLaunch | MoBALaunch


def steps(problem: MoBAPagedProblem, *, is_portable: bool = False) -> tuple[Step, ...]:
    """Return the launches of a call in order. Each reads arrays by name and adds the arrays that it writes.

    Args:
        problem: the call.
        is_portable: whether to use only kernels that Triton's interpreter supports.
    """
    if is_prompt(problem):
        return tuple(prompt_steps(problem, is_portable=is_portable))
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
        """Return the launch plan for `target`.

        Raises:
            NotImplementedError: the target cannot convert a dtype of the call.
        """
        call = self.problem.paged
        require_dtypes(target.arch, call.query_dtype, call.key_dtype, call.value_dtype)
        match self.kind:
            case "scores":
                return self._scores_plan()
            case "choose":
                return self._choice_plan()
            case "blocks":
                return self._blocks_plan()

    @property
    def _rows(self) -> int:
        call = self.problem.paged
        return max(1, call.batch * call.query_tokens * call.query_heads)

    def _scores_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.moba_paged.kernels import moba_paged_scores

        problem, call = self.problem, self.problem.paged
        rows = next_power_of_2(call.query_tokens * call.group_size)
        tile = ScoreTile(
            blocks=min(SCORED_BLOCKS, next_power_of_2(max(1, problem.num_candidates))),
            rows=min(SCORED_ROWS, rows),
            all_rows=min(RESET_ROWS, rows),
            columns=next_power_of_2(call.head_dim),
        )
        shape = ScoreShape(
            query_tokens=call.query_tokens,
            query_heads=call.query_heads,
            key_heads=call.key_heads,
            group_size=call.group_size,
            head_dim=call.head_dim,
            block_size=problem.block_size,
            has_query_lengths=call.has_query_lengths,
        )
        return LaunchPlan(
            name=self.name,
            kernel=moba_paged_scores,
            grid=(max(1, -(-problem.num_candidates // tile.blocks)), call.key_heads, max(1, call.batch)),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(ScoreArrays, self.input_names, self.output_names),
                "scalars": scalar_group(
                    ScoreScalars,
                    max_keys=call.max_keys,
                    max_blocks=problem.max_blocks,
                    num_candidates=problem.num_candidates,
                ),
                "SHAPE": Constexpr(shape),
                "TILE": Constexpr(tile),
            },
            # With one warp the sums over columns need no shared memory.
            options=CompileOptions(num_warps=1, num_stages=1),
        )

    def _choice_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.moba_paged.kernels import moba_paged_choose

        problem, call = self.problem, self.problem.paged
        shape = ChoiceShape(
            query_tokens=call.query_tokens,
            query_heads=call.query_heads,
            block_size=problem.block_size,
            slots=problem.slots,
            has_query_lengths=call.has_query_lengths,
        )
        tile = ChoiceTile(
            blocks=min(CHOICE_BLOCKS, self._all_candidates), slot_columns=next_power_of_2(max(1, problem.slots))
        )
        return LaunchPlan(
            name=self.name,
            kernel=moba_paged_choose,
            grid=(self._rows, 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(ChoiceArrays, self.input_names, self.output_names),
                "max_keys": Scalar(call.max_keys, "i32"),
                "num_candidates": Scalar(problem.num_candidates, "i32"),
                "SHAPE": Constexpr(shape),
                "TILE": Constexpr(tile),
            },
            options=CompileOptions(num_warps=min(MAX_WARPS, max(1, tile.blocks // 256)), num_stages=1),
        )

    @property
    def _all_candidates(self) -> int:
        return max(32, next_power_of_2(self.problem.num_candidates))

    def _blocks_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.moba_paged.kernels import moba_paged_blocks

        problem, call = self.problem, self.problem.paged
        selects = problem.slots > 0 and not _has_chosen(problem)
        shape = BlockShape(
            query_tokens=call.query_tokens,
            query_heads=call.query_heads,
            key_heads=call.key_heads,
            head_dim=call.head_dim,
            value_dim=call.value_dim,
            page_size=call.page_size,
            block_size=problem.block_size,
            slots=problem.slots,
            has_page_table=call.has_page_table,
            has_query_lengths=call.has_query_lengths,
        )
        tile = BlockTile(
            keys=tile_keys(problem),
            columns=next_power_of_2(call.head_dim),
            value_columns=next_power_of_2(call.value_dim),
            candidates=self._all_candidates if selects else 0,
            parts=call.num_splits,
        )
        options = BlockOptions(
            selects=selects,
            has_score_scale=call.has_score_scale,
            has_key_scale=call.key_scale != "none",
            value_scale=call.value_scale,
        )
        num_warps = min(MAX_WARPS, max(1, tile.keys * _bytes_of_a_key(problem) // WARP_BYTES))
        return LaunchPlan(
            name=self.name,
            kernel=moba_paged_blocks,
            grid=(self._rows, tile.parts, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(BlockArrays, self.input_names, self.output_names),
                "scalars": scalar_group(
                    BlockScalars,
                    rows=self._rows,
                    max_pages=call.max_pages,
                    num_pages=call.num_pages,
                    max_keys=call.max_keys,
                    num_candidates=problem.num_candidates,
                    scale=Scalar(call.scale, "fp32"),
                ),
                "SHAPE": Constexpr(shape),
                "TILE": Constexpr(tile),
                "OPTIONS": Constexpr(options),
                "MERGE": Constexpr(paged.merge_constants(call, tile.value_columns)),
            },
            options=CompileOptions(num_warps=num_warps, num_stages=1),
            aliases=((self.input_names.index("arrived"), 0),),
        )
