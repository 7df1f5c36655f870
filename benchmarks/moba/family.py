"""MoBA as a benchmark family: programs and checks of each case, and the columns of its rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch

from benchmarks.harness.device import to_jax
from benchmarks.harness.family import (
    SPENT,
    Context,
    Entry,
    Family,
    Implementation,
    Make,
    Program,
    Settings,
    counted_columns,
)
from benchmarks.harness.programs import chained_if_short
from benchmarks.harness.records import MoBATiming, recordable_failures
from benchmarks.harness.roofs import counted_rates
from benchmarks.moba.cases import SMOKE_CASE, MoBACase, select_moba_cases
from benchmarks.moba.check import check_sample, errors_at
from benchmarks.moba.dense import DENSE_BACKENDS, dense_passes
from benchmarks.moba.programs import Passes, launch_specs
from benchmarks.moba.recorded import recorded_rows
from benchmarks.moba.report import DENSE, dense_shape, judge_moba, moba_table
from blockdiag.cli.machine import reason_of

_ERROR_TOKENS = 2048
# Runs longer than this are timed one at a time, without a calibration that would run them six times more.
_LONG_MS = 40.0
# What a case after this one needs at the least, in seconds, for its own part to be measured at all.
_CASE_RESERVE = 8.0
# Other heads and blocks are compared with one dense baseline beyond this length.
_OTHER_DENSE_TOKENS = 32768
# How many runs of a pass preparing and timing it take, besides the rounds.
_RUNS_BESIDE = 4


@dataclass(frozen=True)
class MoBASettings(Settings):
    """Settings of MoBA.

    Attributes:
        dense_tokens: sequences longer than this are not given to dense attention.
        known_errors: filled by the cases, as errors do not depend on their length.
    """

    batch_ms: float = 20.0
    least_rounds: int = 3
    dense_tokens: int = 65536
    known_errors: dict[MoBACase, dict[str, float]] = field(default_factory=dict)


def random_tensors(case: MoBACase, settings: Settings) -> tuple[torch.Tensor, ...]:
    """Return standard normal query, key, value and cotangent, [B, T, heads, H]."""
    generator = torch.Generator(device=settings.device).manual_seed(settings.seed)
    heads = (case.query_heads, case.key_heads, case.key_heads, case.query_heads)
    shapes = [(case.batch, case.tokens, count, case.head_dim) for count in heads]
    options: Any = {"generator": generator, "device": settings.device, "dtype": torch.bfloat16}
    return tuple(torch.randn(one, **options) for one in shapes)


def _through_jax(context: Context, case: MoBACase) -> Make:
    """Return the maker of this library's passes, after a check of all results of a case."""
    settings = context.settings
    if settings.device == "cuda":
        torch.cuda.synchronize()
    operands: Any = tuple(to_jax(tensor) for tensor in context.inputs)
    passes = Passes(case, settings.implementation, operands)
    both = passes.make("fwd+bwd")
    check(passes, both.run(), settings.seed)
    errors = errors_against_float32(case, settings)

    def make(pass_name: Any) -> Program:
        program = both if pass_name == "fwd+bwd" else passes.make(pass_name)
        program = chained_if_short(program, _once_jax(program.run), is_on_gpu=settings.device == "cuda")
        columns: dict[str, Any] = {}
        note = program.note
        if isinstance(errors, str) and pass_name != "routing":
            note = f"{note}; {errors}"
        elif not isinstance(errors, str):
            gradients = max(error for name, error in errors.items() if name != "output")
            by_pass = {"fwd": errors["output"], "bwd": gradients, "fwd+bwd": max(errors["output"], gradients)}
            columns["relative_error"] = by_pass.get(pass_name)
        return replace(program, columns=columns, note=note, held_bytes=_held_bytes(case, pass_name, program))

    return make


def check(passes: Passes, results: tuple[Any, ...], seed: int) -> None:
    """Check the routing and the results of a case in float64."""
    from blockdiag.ops.moba.api import moba_routing

    case = passes.case
    query, key, _, _ = passes.operands
    indices = moba_routing(
        query, key, block_size=case.block_size, top_k=case.top_k, implementation=passes.implementation
    ).indices
    check_sample(case, indices, passes.operands, results, seed=seed)


def _once_jax(run: Callable[[], Any]) -> float:
    """Return the milliseconds of the second of two runs, waiting included."""
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - began) * 1e3


def _held_bytes(case: MoBACase, pass_name: Any, program: Program) -> int:
    return program.calls * case.operand_bytes(pass_name)[1] + (program.extra_bytes or 0)


def errors_against_float32(case: MoBACase, settings: Any) -> dict[str, float] | str:
    """Return distances from float32 attention, or why there are none; cases that differ in length share them."""
    tokens = min(case.tokens, max(_ERROR_TOKENS, 4 * case.block_size))
    key = replace(case.shrunk(tokens), name="")
    if key not in settings.known_errors:
        try:
            settings.known_errors[key] = errors_at(case, settings.implementation, tokens, seed=settings.seed)
        except recordable_failures() as failure:
            return f"errors against float32: {reason_of(failure)}"
    return settings.known_errors[key]


def _dense(name: str) -> Implementation:
    """Return dense attention by one backend of SDPA."""

    def begin(context: Context, case: MoBACase) -> Make:
        makers = dense_passes(case, context.inputs, DENSE_BACKENDS[name])

        def make(pass_name: Any) -> Program:
            program = makers[pass_name]()
            milliseconds = _once_torch(program.run) if context.settings.device == "cuda" else 0.0
            context.longest_ms[name] = max(milliseconds, context.longest_ms.get(name, 0.0))
            held_bytes = _held_bytes(case, pass_name, program)
            return replace(program, held_bytes=held_bytes, is_long=milliseconds > _LONG_MS)

        return make

    return Implementation(name, "torch", begin, passes=("fwd", "bwd", "fwd+bwd"))


def _once_torch(run: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


class MoBA(Family):
    """MoBA and dense attention over the same arrays."""

    name = "moba"
    kind = MoBATiming
    settings = MoBASettings
    baselines = tuple(DENSE_BACKENDS)
    smoke_cases = (SMOKE_CASE,)
    smoke_text = "the XLA implementation against float64 and float32"

    select = staticmethod(select_moba_cases)
    recorded = staticmethod(recorded_rows)
    launches = staticmethod(launch_specs)
    measure_rates = staticmethod(counted_rates)
    columns = staticmethod(counted_columns)
    judge = staticmethod(judge_moba)

    def make_inputs(self, cases: Sequence[MoBACase], context: Context) -> tuple[torch.Tensor, ...]:
        """Return query, key, value and cotangent."""
        settings = context.settings
        return random_tensors(cases[0], settings)

    def own(self, cases: Sequence[MoBACase], settings: Settings) -> list[tuple[MoBACase, Implementation]]:
        """Return this library through `jax.jit`."""
        return [(case, Implementation(settings.implementation, "jax", _through_jax)) for case in cases]

    def others(self, cases: Sequence[MoBACase], context: Context) -> list[tuple[MoBACase, Implementation]]:
        """Return the dense baselines that no earlier case has timed over arrays of the same shape."""
        (case,) = cases
        known = {row.implementation for row in dense_rows(context.measured, case) if row.pass_name == "fwd+bwd"}
        return [(case, _dense(name)) for name in context.settings.baselines if name not in known]

    def unsupported(self, context: Context, case: MoBACase, implementation: Implementation) -> str:
        """Refuse dense attention of long sequences."""
        name, longest = implementation.name, context.settings.dense_tokens
        if name not in DENSE_BACKENDS:
            return ""
        if case.tokens > longest:
            return f"not run: dense attention is timed up to {longest:,} tokens"
        if name != DENSE and case.tokens > _OTHER_DENSE_TOKENS and not case.is_usual:
            return f"not run: beyond {_OTHER_DENSE_TOKENS:,} tokens of other heads or blocks only {DENSE} is timed"
        return ""

    def refusal(self, context: Context, entry: Entry) -> str:
        """Refuse a dense pass that would take the time of later cases, as the longest pass so far tells."""
        name, settings = entry.implementation.name, context.settings
        if name not in DENSE_BACKENDS:
            return ""
        known = context.longest_ms.get(name, 0.0) / 1e3
        needed = 4 * known * (settings.rounds * 2 + _RUNS_BESIDE) + len(context.later) * _CASE_RESERVE
        return SPENT if time.monotonic() + needed > settings.deadline else ""

    def timed_columns(self, entry: Entry, row: MoBATiming) -> dict[str, Any]:
        """Return the memory beyond inputs and outputs, and with them."""
        del row
        extra = None if entry.program is None else entry.program.extra_bytes
        if extra is None:
            return {}
        return {"extra_bytes": extra, "peak_bytes": extra + sum(entry.case.operand_bytes(entry.pass_name))}

    def tables(self, rows: Sequence[MoBATiming], others: Sequence[MoBATiming]) -> list[Any]:
        """Return the table of a case, beside dense rows of the same shape and recorded ones."""
        shape, mine = dense_shape(rows[0]), {row.implementation for row in rows}
        beside = [
            row
            for row in others
            if row.implementation not in mine
            and (row.case == rows[0].case or (row.implementation in DENSE_BACKENDS and dense_shape(row) == shape))
        ]
        return [moba_table(rows[0].case, [*rows, *beside])]


def dense_rows(measured: Sequence[MoBATiming], case: MoBACase) -> list[MoBATiming]:
    """Return timed rows of dense baselines over arrays like the case's."""
    timed = [row for row in measured if row.implementation in DENSE_BACKENDS and row.median_ms is not None]
    return [row for row in timed if dense_shape(row) == case.dense_shape]


FAMILY = MoBA()
