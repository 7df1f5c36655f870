"""The command that times the gallery's variants, run without a GPU: rows, checks and failures."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.gallery import ahead
from benchmarks.gallery.cases import SMOKE, SMOKE_CASES, GalleryCase
from benchmarks.gallery.family import FAMILY, Gallery, GallerySettings
from benchmarks.gallery.programs import begin, compile_judge, pass_of, trace
from benchmarks.harness.clock import Subject, calibrate, sample
from benchmarks.harness.family import SPENT
from benchmarks.harness.pipeline import Choices, measure, run, smoke
from benchmarks.harness.records import Environment, GalleryTiming, read_rows
from blockdiag.fusion.gallery import VARIANTS
from blockdiag.interop import compile_target

WHERE = Environment(device="cpu", driver="1", jax="1", jaxlib="1", torch="1", triton="1", date="2026-01-02")
CAUSAL = GalleryCase("causal", SMOKE)


def settings(**options) -> GallerySettings:
    """Return settings for host times of a CPU."""
    usual = {"deadline": time.monotonic() + 600, "rounds": 1, "least_rounds": 1, "batch_ms": 0.1, "baselines": ("xla",)}
    usual |= {"implementation": "xla", "device": "cpu", "say": lambda line: None}
    return GallerySettings(**{**usual, **options})


def measured(case=CAUSAL, **options) -> list[GalleryTiming]:
    return measure(FAMILY, [case], WHERE, {}, settings(**options))


class Tiny(Gallery):
    """The gallery at sizes for a CPU, timed by the host."""

    def settings(self, **options):
        return settings(**{name: options[name] for name in ("deadline", "baselines")})

    def select(self, names):
        return [GalleryCase(name, SMOKE) for name in names.split(",")]


@pytest.fixture
def run_tiny(monkeypatch, tmp_path):
    """Return a function that runs the command for some variants and returns the rows that the file then has."""
    monkeypatch.setattr("benchmarks.harness.pipeline.device_name", lambda: "some GPU")
    monkeypatch.setattr("benchmarks.gallery.family.make_front", lambda: None)

    def run_variants(names, seconds=600.0):
        console = Console(record=True, width=200)
        run(Tiny(), console, tmp_path, Choices(names, None, 1, 0, time.monotonic() + seconds), file="times.csv")
        return {(row.variant, row.pass_name): row for row in read_rows(tmp_path / "times.csv", GalleryTiming)}

    return run_variants


def test_gallery_command_on_a_cpu_writes_smoke_rows(tmp_path, monkeypatch):
    assert {case.name for case in SMOKE_CASES} <= set(VARIANTS)
    monkeypatch.setattr(Gallery, "smoke_cases", SMOKE_CASES[:1])
    result = CliRunner().invoke(app, ["gallery", "--smoke", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "smoke run on the CPU" in " ".join(result.output.split())
    rows = read_rows(tmp_path / "gallery_smoke.csv", GalleryTiming)
    assert [(row.variant, row.pass_name) for row in rows] == [("causal", "fwd"), ("causal", "fwd+bwd")]
    for row in rows:
        assert row.ours_ms > 0 and row.xla_ms > 0 and row.speed_up == row.xla_ms / row.ours_ms
        assert row.ours_error < 1e-5 and row.xla_error < 1e-5
        assert row.note == "CPU smoke, host time" and row.dtype == "float32"


def sorts(query, key, value):
    scores = jnp.sort(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


@pytest.fixture
def broken(monkeypatch):
    """Add a variant that cannot be fused."""
    monkeypatch.setitem(VARIANTS, "broken", dataclasses.replace(VARIANTS["vanilla"], name="broken", function=sorts))


def test_run_records_failures_and_keeps_other_rows(run_tiny, broken):
    """A variant that cannot be fused has XLA's times and the reason."""
    rows = run_tiny("broken,multi_query")
    assert len(rows) == 4
    for pass_name in ("fwd", "fwd+bwd"):
        one = rows["broken", pass_name]
        assert one.ours_ms is None and one.speed_up is None and one.xla_ms > 0
        assert "ours failed: NotFusible" in one.note
        other = rows["multi_query", pass_name]
        assert other.speed_up > 0 and other.note == ""
        assert other.shape == "query [2, 96, 4, 16], key [2, 96, 16]"
    # Rows without any time do not replace rows with times.
    assert run_tiny("multi_query", -1.0) == rows


def test_variant_whose_inputs_cannot_be_drawn_has_rows_with_the_reason(run_tiny, monkeypatch):
    def fail(case, seed):
        raise ValueError("no inputs")

    monkeypatch.setattr("benchmarks.gallery.ahead.begin", fail)
    rows = run_tiny("causal")
    assert {row.note for row in rows.values()} == {"failed: ValueError: no inputs"} and len(rows) == 2


def test_smoke_run_with_a_variant_that_is_not_fused_raises_value_error(broken, monkeypatch):
    monkeypatch.setattr(Gallery, "smoke_cases", (GalleryCase("broken", SMOKE),))
    with pytest.raises(ValueError, match=r"smoke run of gallery: .*NotFusible"):
        smoke(FAMILY, Console(quiet=True), None)


def test_spent_budget_leaves_rows_with_the_reason():
    assert {row.note for row in measured(deadline=time.monotonic() - 1.0)} == {SPENT}


@pytest.fixture
def edit_work(monkeypatch):
    """Return a function that lets a variant's programs be changed before they are checked."""
    prepared = ahead.prepared

    def edit_by(edit):
        def edited(case, settings):
            work = prepared(case, settings)
            edit(work)
            return work

        monkeypatch.setattr("benchmarks.gallery.family.prepared", edited)

    return edit_by


def test_wrong_results_are_not_timed(edit_work):
    def edit(work):
        program = work.programs["ours", "fwd+bwd"]

        def wrong():
            output, gradients = program.run()
            return output, gradients | {"value": gradients["value"] * 1.05}

        work.programs["ours", "fwd+bwd"] = dataclasses.replace(program, run=wrong)

    edit_work(edit)
    for row in measured():
        assert row.ours_ms is None and row.xla_ms > 0
        assert "ours failed: WrongResult: gradient of value errs by 5.00e-02, allowed 2.00e-02" in row.note


def test_results_that_were_not_compared_are_not_timed(edit_work):
    edit_work(lambda work: setattr(work, "judge", None))
    for row in measured():
        assert row.ours_ms is None and row.xla_ms > 0 and row.ours_error is None
        assert row.note == f"ours not compared with float32: {SPENT}"


def test_programs_that_were_not_compiled_in_time_are_not_run(edit_work):
    edit_work(lambda work: work.programs.clear())
    assert {row.note for row in measured()} == {SPENT}


def test_judge_measures_relative_distance_from_float32():
    """A bfloat16 result differs from float32 by rounding, and a halved result by one half."""
    work = begin(GalleryCase("alibi_learned", dataclasses.replace(SMOKE, dtype="bfloat16")), seed=1)
    compile_judge(work)
    arguments = work.arguments("fwd+bwd")
    outputs, gradients = jax.jit(pass_of(work.variant.scaled, "fwd+bwd"))(*arguments)
    found = work.judge(arguments, (outputs, gradients))
    assert found.keys() == {"output 0", *(f"gradient of {name}" for name in work.variant.differentiable)}
    assert all(1e-4 < float(x) < 0.1 for x in found.values())
    halved = work.judge(arguments, (outputs / 2, gradients))
    np.testing.assert_allclose(halved["output 0"], 0.5, atol=0.01)
    assert halved["gradient of key"] == found["gradient of key"]


def test_kernels_of_a_variant_are_found_by_tracing():
    pytest.importorskip("triton")
    work = begin(GalleryCase("dense_bias_1NTS", dataclasses.replace(SMOKE, dtype="bfloat16")), seed=0)
    with compile_target(90):
        specs = trace(work, "ours", "triton")
    assert {"fused_forward", "fused_rows", "fused_columns", "fused_pairs"} <= {spec.name for spec in specs}
    assert set(work.traced) == {("ours", "fwd"), ("ours", "fwd+bwd")}


def test_short_work_is_queued_behind_its_front():
    """The front runs before the subject, and its result is the fence. A sample consists of many runs."""
    order = []

    class Result:
        def __init__(self, name: str) -> None:
            self.name = name

        def is_ready(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            order.append(f"wait for {self.name}")

    def run(name: str):
        order.append(name)
        return Result(name)

    subject = Subject("short", lambda: run("work"), "jax", front=lambda: run("front"))
    calibrate(subject, batch_ms=15.0)
    assert subject.fence == 1 and subject.launches > 12
    order.clear()
    assert sample(subject) >= 0
    assert order == ["front", *["work"] * subject.launches, "wait for front", "wait for work"]
