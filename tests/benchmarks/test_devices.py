"""The benchmark of several devices, with one CPU acting as several devices."""

import dataclasses
from pathlib import Path

import jax
import pytest
from rich.console import Console

from benchmarks.devices import command as bench_devices
from benchmarks.devices import measure as devices
from benchmarks.harness.records import DeviceTiming, environment, read_rows

SHARED = devices.SMALL_CASES[0]
SEQUENCE, FUSED = devices.SMALL_SEQUENCE_CASES


def test_every_mesh_and_division_has_a_row_without_collectives():
    rows = list(devices.measure_devices(environment("cpu"), [SHARED], rounds=1))
    found = {(row.division, row.mesh) for row in rows}
    assert found == {(division, mesh) for division in devices.DIVISIONS for mesh in ("one device", *devices.MESHES)}
    assert all(row.collectives == "" and row.median_ms and row.perfect_ms and not row.note for row in rows)
    assert {row.devices for row in rows if row.mesh != "one device"} == {jax.device_count()}


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """Return the text that the command prints and the rows that it saves, for one sequence."""
    folder, console = tmp_path_factory.mktemp("devices"), Console(record=True, width=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "SMALL_CASES", ())
        patch.setattr(devices, "SMALL_SEQUENCE_CASES", (dataclasses.replace(SEQUENCE, tokens=512),))
        bench_devices.smoke_devices(console, folder)
    return console.export_text(), read_rows(folder / "devices_smoke.csv", DeviceTiming)


def test_measure_sequences_has_rows_for_each_strategy_and_its_exchanges(smoke_run):
    rows = {row.mesh: row for row in smoke_run[1]}
    assert list(rows) == ["one device", "ulysses", "gather", "exchanges alone"]
    assert rows["one device"].collectives == ""
    assert "all-to-all" in rows["ulysses"].collectives


def test_measure_sequences_of_fused_grouped_heads_has_the_same_rows():
    rows = {row.mesh: row for row in devices.measure_sequences(environment("cpu"), [FUSED], rounds=1)}
    assert list(rows) == ["one device", "ulysses", "gather", "exchanges alone"]
    assert rows["ulysses"].collectives == rows["exchanges alone"].collectives == "all-to-all:8"


def test_check_of_wrong_results_raises_arithmetic_error():
    right = [jax.numpy.ones((1, 8, 2, 4))]
    with pytest.raises(ArithmeticError, match="results of a device differ"):
        devices._check([right[0] + 0.1], right)
    with pytest.raises(ArithmeticError, match=r"a device has \(1, 8, 2, 4\) of the results, not \(1, 4, 2, 4\)"):
        devices._check(right, [right[0][:, :4]])
    with pytest.raises(ArithmeticError, match="results of a device differ"):
        devices._check_whole([right[0] + 0.1], right)


def test_command_prints_and_keeps_every_row(smoke_run):
    printed, rows = smoke_run
    assert "ulysses" in printed
    assert len(rows) == 4


def test_devices_command_with_unknown_cases_exits_with_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"`--cases` must be some of shards, sequences, .*, got heads"):
        bench_devices.bench_devices(Console(), tmp_path / "x.csv", cases="heads", rounds=1, deadline=0.0)


def test_recorded_device_rows_cover_every_mesh():
    rows = read_rows(Path(__file__).parents[2] / "benchmarks" / "results" / "devices.csv", DeviceTiming)
    assert {row.mesh for row in rows} >= {"one device", *devices.MESHES}


COPY_ENGINES = {
    "XLA_FLAGS": "--xla_a=1 --xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
    "NCCL_CTA_POLICY": "2",
}


def test_transfers_are_by_copy_engines_only_with_symmetric_buffers_and_the_policy():
    assert devices.transfers(COPY_ENGINES) == "copy engines"
    for name in COPY_ENGINES:
        assert devices.transfers({name: COPY_ENGINES[name]}) == "kernels"


def test_strategies_leave_out_gathers_by_copy_engines_and_exchanges_of_too_few_heads():
    assert devices.strategies_of(SEQUENCE, 4, {}) == ["ulysses", "gather"]
    assert devices.strategies_of(SEQUENCE, 4, COPY_ENGINES) == ["ulysses"]
    assert devices.strategies_of(SEQUENCE, 16, {}) == ["ulysses", "gather"]
    assert devices.strategies_of(FUSED, 8, {}) == ["gather"]
