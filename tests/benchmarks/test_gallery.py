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
from benchmarks.gallery import measure as gallery_measure
from benchmarks.gallery.cases import SMOKE, SMOKE_VARIANTS
from benchmarks.gallery.command import keep_all
from benchmarks.gallery.measure import SPENT, GallerySettings, measure_variants, time_work
from benchmarks.gallery.programs import begin, compile_judge, compile_pass, pass_of, trace
from benchmarks.harness.clock import Subject, calibrate, sample
from benchmarks.harness.records import Environment, GalleryTiming, read_rows
from blockdiag.fusion.gallery import VARIANTS
from blockdiag.interop import compile_target

WHERE = Environment(device="cpu", driver="1", jax="1", jaxlib="1", torch="1", triton="1", date="2026-01-02")


def settings(seconds: float = 60.0) -> GallerySettings:
    return GallerySettings(
        deadline=time.monotonic() + seconds,
        rounds=1,
        batch_ms=0.1,
        implementation="xla",
        framework="host",
        say=lambda line: None,
    )


@pytest.fixture
def tiny(monkeypatch):
    """Use sizes for a CPU, and queue no work in front of the timed work."""
    monkeypatch.setattr(gallery_measure, "timed_sizes", lambda name: SMOKE)
    monkeypatch.setattr(gallery_measure, "_front", lambda: None)


def test_gallery_command_on_a_cpu_writes_smoke_rows(tmp_path, monkeypatch):
    assert set(SMOKE_VARIANTS) <= set(VARIANTS)
    monkeypatch.setattr(gallery_measure, "SMOKE_VARIANTS", SMOKE_VARIANTS[:1])
    result = CliRunner().invoke(app, ["gallery", "--smoke", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "smoke run on the CPU" in " ".join(result.output.split())
    rows = read_rows(tmp_path / "gallery_smoke.csv", GalleryTiming)
    expected = [(name, pass_name) for name in SMOKE_VARIANTS[:1] for pass_name in ("fwd", "fwd+bwd")]
    assert [(row.variant, row.pass_name) for row in rows] == expected
    for row in rows:
        assert row.ours_ms > 0 and row.xla_ms > 0 and row.speed_up == row.xla_ms / row.ours_ms
        assert row.ours_error < 1e-5 and row.xla_error < 1e-5
        assert row.note == "CPU smoke, host time" and row.dtype == "float32"


def test_measure_variants_records_failures_and_keeps_other_rows(tiny, monkeypatch, tmp_path):
    """A variant that cannot be fused has XLA's times and the reason."""

    def sorts(query, key, value):
        scores = jnp.sort(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)

    broken = dataclasses.replace(VARIANTS["vanilla"], name="broken", function=sorts)
    monkeypatch.setitem(VARIANTS, "broken", broken)
    measured = measure_variants(["broken", "multi_query"], WHERE, settings())
    path = tmp_path / "gallery.csv"
    keep_all(Console(quiet=True), path, measured)
    rows = {(row.variant, row.pass_name): row for row in read_rows(path, GalleryTiming)}
    assert len(rows) == 4
    for pass_name in ("fwd", "fwd+bwd"):
        one = rows["broken", pass_name]
        assert one.ours_ms is None and one.speed_up is None and one.xla_ms > 0
        assert "ours failed: NotFusible" in one.note
        other = rows["multi_query", pass_name]
        assert other.speed_up > 0 and other.note == ""
        assert other.shape == "query [2, 96, 4, 16], key [2, 96, 16]"
    # Rows without any time do not replace rows with times.
    (late,) = measure_variants(["multi_query"], WHERE, settings(-1.0))
    assert {row.note for row in late} == {SPENT}
    keep_all(Console(quiet=True), path, [late])
    assert len(read_rows(path, GalleryTiming)) == 4
    assert {row.speed_up for row in read_rows(path, GalleryTiming)} == {row.speed_up for row in rows.values()}


def test_wrong_results_are_not_timed(tiny):
    """The fused function is not timed if its results are wrong or were not compared."""
    work = begin(VARIANTS["causal"], SMOKE, seed=0)
    trace(work, "ours", "xla")
    trace(work, "xla", "")
    for whose, pass_name in list(work.traced):
        compile_pass(work, whose, pass_name)
    compile_judge(work)
    right = work.programs["ours", "fwd+bwd"].call

    def wrong(*arguments):
        output, gradients = right(*arguments)
        return output, gradients | {"value": gradients["value"] * 1.05}

    work.programs["ours", "fwd+bwd"] = dataclasses.replace(work.programs["ours", "fwd+bwd"], call=wrong)
    rows = time_work(work, SMOKE, WHERE, settings(), front=None, deadline=time.monotonic() + 600)
    for row in rows:
        assert row.ours_ms is None and row.xla_ms > 0
        assert "WrongResult: gradient of value errs by 5.00e-02, allowed 2.00e-02" in row.note
    work.judge, work.reasons = None, {}
    rows = time_work(work, SMOKE, WHERE, settings(), front=None, deadline=time.monotonic() + 600)
    for row in rows:
        assert row.ours_ms is None and row.xla_ms > 0 and row.ours_error is None
        assert "ours not compared with float32" in row.note


def test_judge_measures_relative_distance_from_float32():
    """A bfloat16 result differs from float32 by rounding, and a halved result by one half."""
    work = begin(VARIANTS["alibi_learned"], dataclasses.replace(SMOKE, dtype="bfloat16"), seed=1)
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
    work = begin(VARIANTS["dense_bias_1NTS"], dataclasses.replace(SMOKE, dtype="bfloat16"), seed=0)
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
