"""The benchmark of several devices, with one CPU acting as several devices."""

import dataclasses
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

from benchmarks.devices import programs
from benchmarks.devices.cases import SMALL_SEQUENCE_CASES, SMALL_SHARD_CASES, select_device_cases
from benchmarks.devices.check import check_sequence, check_shards
from benchmarks.devices.family import FAMILY, Devices
from benchmarks.harness.pipeline import Choices, measure, run, smoke
from benchmarks.harness.records import DeviceTiming, environment, read_rows

SHARED = SMALL_SHARD_CASES[:2]
SEQUENCE, FUSED = SMALL_SEQUENCE_CASES


def measured(case):
    options = {"rounds": 1, "least_rounds": 1, "batch_ms": 1e-3, "device": "cpu", "say": lambda line: None}
    settings = FAMILY.settings(deadline=time.monotonic() + 600, **options)
    return measure(FAMILY, [case], environment("cpu"), {}, settings)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.division)
def test_every_mesh_has_a_row_without_collectives(case):
    rows = measured(case)
    assert [row.mesh for row in rows] == ["one device", *programs.MESHES]
    assert all(row.division == case.division and row.rows == case.rows for row in rows)
    assert all(row.collectives == "" and row.median_ms and not row.note for row in rows)
    assert [row.devices for row in rows] == [1] + 3 * [jax.device_count()]
    # Perfect is the time of the slowest device for its part.
    assert {row.perfect_ms for row in rows} == {rows[0].median_ms}


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """Return the text that the command prints and the rows that it saves, for one sequence."""
    folder, console = tmp_path_factory.mktemp("devices"), Console(record=True, width=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Devices, "smoke_cases", (dataclasses.replace(SEQUENCE, tokens=512),))
        smoke(FAMILY, console, folder)
    return console.export_text(), read_rows(folder / "devices_smoke.csv", DeviceTiming)


def test_sequence_has_rows_for_each_strategy_and_its_exchanges(smoke_run):
    rows = {row.mesh: row for row in smoke_run[1]}
    assert list(rows) == ["one device", "ulysses", "gather", "exchanges alone"]
    assert rows["one device"].collectives == ""
    assert "all-to-all" in rows["ulysses"].collectives
    whole = rows["one device"].median_ms
    assert rows["one device"].perfect_ms == whole
    assert rows["gather"].perfect_ms == pytest.approx(whole / jax.device_count(), rel=1e-4)


def test_sequence_of_fused_grouped_heads_has_the_same_rows():
    rows = {row.mesh: row for row in measured(FUSED)}
    assert list(rows) == ["one device", "ulysses", "gather", "exchanges alone"]
    assert rows["ulysses"].collectives == rows["exchanges alone"].collectives == "all-to-all:8"


def test_program_with_a_wrong_result_is_not_timed(monkeypatch):
    right = programs.program_on_mesh

    def wrong(case, kind, operands):
        program = right(case, kind, operands)
        if kind != "manual":
            return program
        return dataclasses.replace(program, run=lambda: tuple(1.01 * x for x in program.run()))

    monkeypatch.setattr("benchmarks.devices.family.program_on_mesh", wrong)
    rows = {row.mesh: row for row in measured(SHARED[0])}
    assert rows["manual"].median_ms is None
    assert "failed: ArithmeticError: results of a device differ" in rows["manual"].note
    assert rows["explicit"].median_ms > 0


def test_check_of_wrong_results_raises_arithmetic_error():
    right = [jax.numpy.ones((1, 8, 2, 4))]
    with pytest.raises(ArithmeticError, match="results of a device differ"):
        check_shards([right[0] + 0.1], right)
    with pytest.raises(ArithmeticError, match=r"a device has \(1, 8, 2, 4\) of the results, not \(1, 4, 2, 4\)"):
        check_shards(right, [right[0][:, :4]])
    with pytest.raises(ArithmeticError, match="results of a device differ"):
        check_sequence([right[0] + 0.1], right)


def test_command_prints_and_keeps_every_row(smoke_run):
    printed, rows = smoke_run
    assert "ulysses" in printed and "of perfect" in printed
    assert len(rows) == 4 and {row.note for row in rows} == {"CPU smoke, host time"}


def test_devices_command_with_unknown_cases_exits_with_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"`cases` must name some of shards, sequences, .*; got 'heads'"):
        run(FAMILY, Console(), tmp_path, Choices("heads", None, 1, 0, 0.0))


def test_one_device_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    console = Console(record=True, width=200)
    smoke(FAMILY, console, tmp_path)
    assert "JAX_NUM_CPU_DEVICES=4" in console.export_text() and list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="one device"):
        run(FAMILY, Console(quiet=True), tmp_path, Choices(None, None, 1, 0, 0.0))


def test_selected_cases_are_groups_or_sequences():
    assert len(select_device_cases(None)) == len(select_device_cases("shards")) + len(select_device_cases("sequences"))
    assert [case.name for case in select_device_cases("fuse_128k,moba_256k")] == ["fuse_128k", "moba_256k"]


def test_recorded_device_rows_cover_every_mesh():
    rows = read_rows(Path(__file__).parents[2] / "benchmarks" / "results" / "devices.csv", DeviceTiming)
    assert {row.mesh for row in rows} >= {"one device", *programs.MESHES}


COPY_ENGINES = {
    "XLA_FLAGS": "--xla_a=1 --xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
    "NCCL_CTA_POLICY": "2",
}


def test_transfers_are_by_copy_engines_only_with_symmetric_buffers_and_the_policy():
    assert programs.transfers(COPY_ENGINES) == "copy engines"
    for name in COPY_ENGINES:
        assert programs.transfers({name: COPY_ENGINES[name]}) == "kernels"


def test_strategies_leave_out_gathers_by_copy_engines_and_exchanges_of_too_few_heads():
    assert programs.strategies_of(SEQUENCE, 4, {}) == ["ulysses", "gather"]
    assert programs.strategies_of(SEQUENCE, 4, COPY_ENGINES) == ["ulysses"]
    assert programs.strategies_of(SEQUENCE, 16, {}) == ["ulysses", "gather"]
    assert programs.strategies_of(FUSED, 8, {}) == ["gather"]
