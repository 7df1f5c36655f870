"""Dense attention as a benchmark family: that of fused functions with other cases, baselines and columns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.dense.cases import SMOKE_CASES, DenseCase, select_dense_cases
from benchmarks.dense.report import judge_dense, rate_table
from benchmarks.fuse.family import Fuse
from benchmarks.fuse.programs import CUDNN
from benchmarks.fuse.report import compile_table, summary_table
from benchmarks.fuse.torch_baselines import FLEX, SDPA_BACKENDS
from benchmarks.harness.family import Entry
from benchmarks.harness.records import DenseTiming
from benchmarks.harness.report import quotient


class Dense(Fuse):
    """Causal, full and windowed attention in plain jax.numpy that `blockdiag.fuse` compiles."""

    name = "dense"
    kind = DenseTiming
    # In the order in which a short budget should be spent.
    baselines = (CUDNN, *SDPA_BACKENDS, FLEX)
    smoke_cases = SMOKE_CASES

    select = staticmethod(select_dense_cases)
    judge = staticmethod(judge_dense)

    def title(self, cases: Sequence[DenseCase]) -> str:
        """Return the case, and what its check costs."""
        return f"{cases[0].name} (check: {cases[0].check_text})"

    def timed_columns(self, entry: Entry, row: DenseTiming) -> dict[str, Any]:
        """Return the useful TFLOP/s."""
        del entry
        return {"tflops": quotient(1e3 * (row.useful_tflop or 0.0), row.median_ms)}

    def compared(self, rows: Sequence[DenseTiming]) -> list[DenseTiming]:
        """Return the rows with their time over that of cuDNN through `jax.nn`, where that ran."""
        cudnn = {(row.case, row.pass_name): row.median_ms for row in rows if row.implementation == CUDNN}
        return [replace(row, over_cudnn=quotient(row.median_ms, cudnn.get((row.case, row.pass_name)))) for row in rows]

    def summary(self, rows: Sequence[Any]) -> list[Any]:
        """Return the tables of all cases, of rates and of compile times."""
        return [summary_table(rows), rate_table(rows), compile_table(rows)]


FAMILY = Dense()
