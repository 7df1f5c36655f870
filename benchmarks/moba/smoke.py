"""The MoBA benchmark on a CPU: the XLA implementation at a size that takes seconds, every check included."""

import time
from dataclasses import asdict

from benchmarks.harness.clock import Subject, interleave, summarise
from benchmarks.harness.records import Environment, MoBATiming
from benchmarks.moba.cases import MOBA_PASSES, MoBACase
from benchmarks.moba.check import check_sample, errors_of, random_operands
from benchmarks.moba.programs import Passes
from benchmarks.moba.recorded import shape_of
from blockdiag.ops.moba.api import moba_routing

SMOKE_CASE = MoBACase(
    name="smoke", tokens=200, batch=2, query_heads=4, key_heads=2, head_dim=32, block_size=16, top_k=4
)


def run_moba_smoke(environment: Environment, *, rounds: int = 3, case: MoBACase = SMOKE_CASE) -> list[MoBATiming]:
    """Check and time every pass of the XLA implementation.

    The times are host times of a CPU and say nothing about a GPU; there is no floor beside them.

    Raises:
        ValueError: when a result is wrong.
    """
    operands = random_operands(case, seed=0)
    passes = Passes(case, "xla", operands)  # pyrefly: ignore[bad-argument-type]
    query, key = operands[:2]
    routing = moba_routing(query, key, block_size=case.block_size, top_k=case.top_k, implementation="xla")
    programs = {name: passes.make(name) for name in MOBA_PASSES}
    results = programs["fwd+bwd"].run()
    check_sample(case, routing.indices, operands, results)
    errors = errors_of(case, routing.to_pattern(), operands, results)
    subjects = [Subject(name, program.run, "host") for name, program in programs.items()]
    interleave(subjects, rounds=rounds, batch_ms=5.0, deadline=time.monotonic() + 30.0, least_rounds=1)
    rows = []
    for subject in subjects:
        times = None if subject.failure else summarise(subject.samples)
        gradients = max(error for name, error in errors.items() if name != "output")
        rows.append(
            MoBATiming(
                op="moba",
                pass_name=subject.key,
                case=case.name,
                implementation="xla",
                **shape_of(case),
                median_ms=None if times is None else times.median,
                p20_ms=None if times is None else times.p20,
                p80_ms=None if times is None else times.p80,
                useful_tflop=case.useful_flops(subject.key) / 1e12,
                useful_gb=case.useful_bytes(subject.key) / 1e9,
                relative_error={
                    "fwd": errors["output"],
                    "bwd": gradients,
                    "fwd+bwd": max(errors["output"], gradients),
                }.get(subject.key),
                note=f"failed: {subject.failure}" if subject.failure else "CPU smoke, host time",
                **asdict(environment),
            )
        )
    return rows
