"""Launches of MoBA over a paged cache for prompts: MoBA's own kernels, which find keys and values through the table.

In calls with few queries, each query reads its own blocks. The queries of a prompt are instead listed by block, so that
a block is read once for all queries that chose it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
    array_group,
    scalar_group,
)
from blockdiag.triton_kernels.moba import plans as moba
from blockdiag.triton_kernels.moba.configs import FEWEST_HALVED_BLOCKS
from blockdiag.triton_kernels.moba.plans import MoBALaunch
from blockdiag.triton_kernels.moba.steps import choice_steps, forward_steps, list_steps
from blockdiag.triton_kernels.moba_paged.arguments import TableArrays, TableScalars
from blockdiag.triton_kernels.paged.plans import PagedLaunch, require_dtypes

# Fewest queries of a sequence for which blocks are read once for all of their queries. It is the number of rows of a
# tile. An estimate, not a measurement: with 64 queries, 32 heads and 1,024 blocks, both ways read about 1 GB.
PROMPT_QUERIES = 64

_TABLE_ROWS = 256
_WIDENED_ELEMENTS = 2048


def is_prompt(problem: MoBAPagedProblem) -> bool:
    """Return whether a call runs as a prompt. This follows from shapes and dtypes, not from lengths."""
    call = problem.paged
    if call.query_tokens < PROMPT_QUERIES or call.head_dim != call.value_dim:
        return False
    keys = max(call.max_keys, problem.max_blocks * problem.block_size) + problem.block_size
    return call.batch * keys < 2**31 and moba.supports(moba_problem(problem)) is None


def moba_problem(problem: MoBAPagedProblem) -> MoBAProblem:
    """Return the call of MoBA over the queries and caches of all sequences.

    Queries of 16 bits choose by halves of mean keys, whose range is that of float32.
    """
    call = problem.paged
    return MoBAProblem(
        query_tokens=call.batch * call.query_tokens,
        key_tokens=call.batch * call.max_keys,
        query_heads=call.query_heads,
        key_heads=call.key_heads,
        head_dim=call.head_dim,
        dtype=call.output_dtype,
        block_size=problem.block_size,
        num_blocks=call.batch * problem.max_blocks,
        slots=problem.slots,
        is_causal=True,
        has_key_mask=False,
        scale=call.scale,
        sequence_blocks=max(problem.max_blocks, FEWEST_HALVED_BLOCKS),
    )


def prompt_steps(problem: MoBAPagedProblem, *, is_portable: bool) -> "Iterator[PromptLaunch | MoBALaunch]":
    """Yield the launches of a prompt in order. Each reads arrays by name and adds the arrays that it writes."""
    yield PromptLaunch(problem, "tables")
    if problem.paged.query_dtype in EIGHT_BIT_FLOATS:
        yield PromptLaunch(problem, "widen")
    call = moba_problem(problem)
    cache = dataclasses.replace(problem.paged, query_dtype=problem.paged.output_dtype)
    choice = (*choice_steps(call), *list_steps()) if call.slots > 0 else ()
    for kind, heads in (*choice, *forward_steps(call)):
        yield MoBALaunch(call, kind, heads=heads, is_portable=is_portable, cache=cache)


@dataclass(frozen=True, slots=True)
class PromptLaunch:
    """A launch before those of MoBA; a KernelSpec.

    Attributes:
        problem: the call.
        kind: "tables" of blocks and queries, or "widen" for eight-bit queries.
    """

    problem: MoBAPagedProblem
    kind: Literal["tables", "widen"]

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return f"moba_paged_{self.kind}"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arrays that the launch reads, in order."""
        if self.kind == "widen":
            return ("query",)
        return ("kv_lengths", "query_lengths") if self._call.has_query_lengths else ("kv_lengths",)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch writes, in order."""
        if self.kind == "widen":
            return ("query",)
        return ("blocks", "queries") if self.problem.slots > 0 else ("queries",)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch reads."""
        return tuple(PagedLaunch(self._call, "merge").array_spec(name) for name in self.input_names)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the arrays that the launch writes."""
        problem = moba_problem(self.problem)
        specs = {
            "blocks": TensorSpec((problem.num_blocks, 4), "int32"),
            "queries": TensorSpec((problem.query_tokens, 4), "int32"),
            "query": TensorSpec(self.inputs[0].shape, self._call.output_dtype),
        }
        return tuple(specs[name] for name in self.output_names)

    @property
    def _call(self) -> PagedProblem:
        return self.problem.paged

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`.

        Raises:
            NotImplementedError: the target cannot convert the dtype of the queries.
        """
        if self.kind == "tables":
            return self._tables_plan()
        require_dtypes(target.arch, self._call.query_dtype)
        return self._widen_plan()

    def _tables_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.moba_paged.prompt_kernels import moba_paged_tables

        problem, call = self.problem, self._call
        rows, blocks = call.batch * call.query_tokens, call.batch * problem.max_blocks
        scalars = scalar_group(
            TableScalars,
            rows=rows,
            blocks=blocks,
            query_tokens=call.query_tokens,
            max_keys=call.max_keys,
            max_blocks=problem.max_blocks,
            block_size=problem.block_size,
        )
        return LaunchPlan(
            name=self.name,
            kernel=moba_paged_tables,
            grid=(-(-max(rows, blocks) // _TABLE_ROWS), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(TableArrays, self.input_names, self.output_names),
                "scalars": scalars,
                "ROWS": Constexpr(_TABLE_ROWS),
            },
            options=CompileOptions(num_warps=4, num_stages=1),
        )

    def _widen_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.moba_paged.prompt_kernels import moba_paged_widen

        call = self._call
        elements = call.batch * call.query_tokens * call.query_heads * call.head_dim
        return LaunchPlan(
            name=self.name,
            kernel=moba_paged_widen,
            grid=(-(-elements // _WIDENED_ELEMENTS), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_query": Pointer("input", 0),
                "p_wide": Pointer("output", 0),
                "elements": Scalar(elements, "i64"),
                "ELEMENTS": Constexpr(_WIDENED_ELEMENTS),
            },
            options=CompileOptions(num_warps=4, num_stages=1),
        )
