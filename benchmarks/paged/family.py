"""Paged attention as a benchmark family: programs and checks of each case, and the columns of its rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benchmarks.harness.clock import sample_torch, summarise
from benchmarks.harness.device import captured, to_jax, to_torch
from benchmarks.harness.family import SPENT, Context, Entry, Family, Implementation, Make, Program, Settings
from benchmarks.harness.records import PagedTiming
from benchmarks.harness.roofs import matmul_rate
from benchmarks.paged.arrays import Pool, Tensors, case_arrays, make_pool
from benchmarks.paged.cases import MOBA, SMOKE_CASES, PagedCase, by_pool, make_cases, select_groups
from benchmarks.paged.check import check_append, check_attention, chosen_bytes
from benchmarks.paged.programs import (
    BASELINES,
    JAX_CUDNN,
    SDPA_BACKENDS,
    Launch,
    jax_append,
    jax_attention,
    jax_cudnn_attention,
    jax_program,
    launch_steps,
    moba_call,
    run_steps,
    sdpa_call,
)
from benchmarks.paged.recorded import recorded_rows
from benchmarks.paged.report import NATIVE, THROUGH_JAX, judge_paged, paged_tables

_READ_BYTES = 2**32
# Calls of one JAX program: together they last longer than the host needs to queue one. Those of MoBA are shorter.
_JAX_CALLS = 20
_JAX_MOBA_CALLS = 50
_CPU_CALLS = 2


@dataclass(frozen=True)
class PagedSettings(Settings):
    """Settings of paged attention; `launch` launches kernels (None: on torch's current stream)."""

    batch_ms: float = 2.0
    launch: Launch | None = None


def measure_read_rate(samples: int = 10) -> float:
    """Return the bandwidth of `torch.amax` over 4 GiB of random integers, in TB/s: it reads them and writes nothing."""
    values = torch.randint(-(2**31), 2**31 - 1, (_READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    times = [sample_torch(lambda: torch.amax(values), 5) for _ in range(samples)]
    return _READ_BYTES / summarise(times).median / 1e9


def _native(context: Context, case: PagedCase) -> Make:
    """Return the maker of native launches: it launches once, checks, and captures the calls of a round."""

    def make(pass_name: str) -> Program:
        del pass_name
        settings, launch = context.settings, context.settings.launch
        if launch is None:
            from blockdiag.interop.torch_launch import launch
        steps, given = launch_steps(case), case_arrays(case, context.inputs, seed=settings.seed)
        before = given[0]
        if case.group == "prompts":
            # Launches take the queries of all sequences as rows.
            given = [arrays | {"query": arrays["query"].flatten(0, 1)} for arrays in given]
        if case.group == "append":
            changed = steps[0].output_names
            before = {name: array.clone() if name in changed else array for name, array in given[0].items()}
            found = run_steps(steps, given[0], launch)
            error = check_append(case, before, found)
        else:
            found = run_steps(steps, given[0], launch)
            if case.group == "prompts":
                rows = (case.shape.batch, case.query_tokens)
                found |= {name: found[name].unflatten(0, rows) for name in ("output", "log_sum")}
            error = check_attention(case, before, found["output"], found["log_sum"])
        columns = {"relative_error": error, **_moba_bytes(case, before)}
        calls = [_call(steps, given[index % len(given)], launch) for index in range(case.calls)]
        if settings.device != "cuda":
            return Program(calls[0], columns=columns)
        return Program(captured(calls), len(calls), columns=columns, keep=(given, found))

    return make


def _call(steps: Sequence[Any], arrays: Tensors, launch: Launch) -> Callable[[], Any]:
    return lambda: run_steps(steps, arrays, launch)


def _moba_bytes(case: PagedCase, arrays: Tensors) -> dict[str, float]:
    return {} if case.block_size is None else {"read_gb": chosen_bytes(case, arrays) / 1e9}


def _through_jax(context: Context, case: PagedCase) -> Make:
    """Return the maker of calls through `jax.jit`: it checks one call and compiles a program of several."""

    def make(pass_name: str) -> Program:
        del pass_name
        arrays = case_arrays(case, context.inputs, seed=context.settings.seed)[0]
        if case.group == "append":
            views = {name: to_jax(array) for name, array in arrays.items()}
            written, run = jax_append(case, views, context.settings.implementation)
            error = check_append(case, arrays, arrays | {name: to_torch(array) for name, array in written.items()})
            return Program(run, columns={"relative_error": error}, keep=(arrays, views))
        program = _jax(context, case, arrays, jax_attention(case, context.settings.implementation))
        return replace(program, columns={**program.columns, **_moba_bytes(case, arrays)})

    return make


def _contiguous(name: str) -> Callable[[Context, PagedCase], Make]:
    """Return the maker of dense attention to the pool's keys as they lie, without pages."""

    def begin(context: Context, case: PagedCase) -> Make:
        def make(pass_name: str) -> Program:
            del pass_name
            arrays = dict(case_arrays(case, context.inputs, seed=context.settings.seed)[0])
            del arrays["page_table"]
            arrays["key"], arrays["value"] = context.inputs.contiguous(case.shape)
            if name == JAX_CUDNN:
                return _jax(context, case, arrays, jax_cudnn_attention)
            if name == MOBA:
                return _moba(context, case, arrays)
            operands = (SDPA_BACKENDS[name], arrays["query"], arrays["key"], arrays["value"])
            error = check_attention(case, arrays, sdpa_call(*operands))
            return Program(lambda: sdpa_call(*operands), columns={"relative_error": error})

        return make

    return begin


def _moba(context: Context, case: PagedCase, arrays: Tensors) -> Program:
    """Return calls of `moba_attention`, captured as the native launches are.

    The check takes mean keys of the keys as they lie.
    """
    blocks, size = case.moba_problem().max_blocks, case.block_size
    key = arrays["key"][:, : blocks * (size or 0)].float()
    means = key.unflatten(1, (blocks, size or 0)).mean(2)
    operands = case, arrays["query"], arrays["key"], arrays["value"]
    error = check_attention(case, arrays | {"centroids": means}, moba_call(*operands))

    def call() -> torch.Tensor:
        return moba_call(*operands)

    columns = {"relative_error": error}
    if context.settings.device != "cuda":
        return Program(call, columns=columns)
    return Program(captured([call] * case.calls), case.calls, columns=columns, keep=operands)


def _jax(context: Context, case: PagedCase, arrays: Tensors, attend: Callable[..., Any]) -> Program:
    on_gpu = context.settings.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    views = {name: to_jax(array) for name, array in arrays.items()}
    calls = (_JAX_MOBA_CALLS if case.group == "moba" else _JAX_CALLS) if on_gpu else _CPU_CALLS
    results, run = jax_program(attend, views, calls)
    output, log_sum = (None if result is None else to_torch(result) for result in results)
    assert output is not None
    error = check_attention(case, arrays, output, log_sum)
    note = f"through jax.jit, programs of {calls} calls"
    return Program(run, calls, note=note, columns={"relative_error": error}, keep=(arrays, views))


class Paged(Family):
    """Paged attention; cases of a batch read one pool of pages."""

    name = "paged"
    kind = PagedTiming
    settings = PagedSettings
    baselines = BASELINES
    smoke_cases = SMOKE_CASES
    recorded = staticmethod(recorded_rows)
    launches = staticmethod(launch_steps)
    # Native launches need binaries; those through JAX use the same kernels.
    compile_options: ClassVar[Mapping[str, Any]] = {"limit_seconds": 60.0, "binary": True}
    judge = staticmethod(judge_paged)

    def select(self, names: str | None) -> list[PagedCase]:
        """Return the cases of the selected groups, in the order in which a short budget is spent."""
        return [case for group in select_groups(names) for case in make_cases() if case.group == group]

    def batches(self, cases: Sequence[PagedCase]) -> list[list[PagedCase]]:
        """Return the cases of each group and pool."""
        groups = dict.fromkeys(case.group for case in cases)
        return [pool for group in groups for pool in by_pool([case for case in cases if case.group == group])]

    def section(self, case: PagedCase) -> str:
        """Return the group."""
        return case.group

    def title(self, cases: Sequence[PagedCase]) -> str:
        """Return group, shape and dtype."""
        return f"{cases[0].group}, {cases[0].shape.name}, {cases[0].cache}"

    def measure_rates(self) -> tuple[dict[str, float], str]:
        """Return the rates of reading and of products."""
        rates = {"read_tb_per_s": measure_read_rate(), "matmul_tflops": matmul_rate()}
        text = f"reading 4 GiB: {rates['read_tb_per_s']:.3f} TB/s, bf16 product {rates['matmul_tflops']:,.0f} TFLOP/s"
        return rates, text

    def make_inputs(self, cases: Sequence[PagedCase], context: Context) -> Pool:
        """Return the pool of pages."""
        settings = context.settings
        return make_pool(cases[0], seed=settings.seed, device=settings.device)

    def own(self, cases: Sequence[PagedCase], settings: Settings) -> list[tuple[PagedCase, Implementation]]:
        """Return native launches; where no kernel runs, the XLA implementation."""
        if settings.device == "cuda" or getattr(settings, "launch", None) is not None:
            return [(case, Implementation(NATIVE, "torch", _native)) for case in cases]
        return [(case, Implementation(settings.implementation, "jax", _through_jax)) for case in cases]

    def others(self, cases: Sequence[PagedCase], context: Context) -> list[tuple[PagedCase, Implementation]]:
        """Return the same kernels through JAX and attention without pages, for some cases."""
        found = []
        for case in cases:
            if case.page_size == 64 and case.group in ("decode", "moba", "prompts", "moba_prompts"):
                # Several calls of one program would share the tables of prompts, which depend on lengths alone.
                if case.group != "moba_prompts":
                    found.append((case, Implementation(THROUGH_JAX, "jax", _through_jax)))
                # Others have no causal mask that ends at the last of more keys than queries.
                is_dense = case.query_tokens in (1, case.shape.kv_length)
                if case.group != "moba" and case.cache == "bfloat16" and is_dense:
                    is_moba = case.block_size is not None
                    for name in context.settings.baselines:
                        if (name == MOBA) != is_moba:
                            continue
                        framework = "jax" if name == JAX_CUDNN else "torch"
                        found.append((case, Implementation(name, framework, _contiguous(name))))
        return found

    def refusal(self, context: Context, entry: Entry) -> str:
        """Refuse everything once the time budget is spent."""
        del entry
        return SPENT if context.settings.is_spent else ""

    def clock_deadline(self, context: Context, ready: float, cases: Sequence[PagedCase]) -> float:
        """Return the deadline of the run: rounds of a pool take little of it."""
        del ready, cases
        return context.settings.deadline

    def columns(self, entry: Entry, rates: Mapping[str, float]) -> dict[str, Any]:
        """Return the cache and the floor; baselines have no pages, and some cases no splits."""
        case, name = entry.case, entry.implementation.name
        found: dict[str, Any] = {"read_gb": case.read_bytes / 1e9}
        if entry.program is not None and "read_gb" in entry.program.columns:
            found["read_gb"] = entry.program.columns["read_gb"]
        if name in BASELINES:
            tokens = f"_t{case.query_tokens}" if case.query_tokens > 1 else ""
            found |= {"page_size": None, "case": f"{case.shape.name}_contiguous{tokens}"}
        elif case.group not in ("append", "prompts") and case.block_size is None:
            found |= {"splits": case.num_splits, "is_chosen": int(case.splits is None)}
        if rates:
            floor = 1e3 * found["read_gb"] / rates["read_tb_per_s"]
            found |= {"read_tb_per_s": rates["read_tb_per_s"], "floor_us": floor}
            if case.counts_products:
                floor = max(floor, case.flops / rates["matmul_tflops"] / 1e6)
                found |= {"matmul_tflops": rates["matmul_tflops"], "floor_us": floor}
        return found

    def timed_columns(self, entry: Entry, row: PagedTiming) -> dict[str, Any]:
        """Return the bandwidth."""
        del entry
        return {"tb_per_s": 1e3 * (row.read_gb or 0.0) / (row.median_us or 1.0)} if row.floor_us else {}

    def tables(self, rows: Sequence[PagedTiming], others: Sequence[PagedTiming]) -> list[Any]:
        """Return tables of a group, recorded rows beside those of decode."""
        recorded = [row for row in others if rows[0].group == "decode" and row.note.startswith("recorded")]
        return paged_tables([*rows, *recorded])


FAMILY = Paged()
