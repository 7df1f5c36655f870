"""`benchmarks/block_diagonal/figures.py` compares rows with limits. Measuring needs an H200 and is not tested."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from benchmarks.harness.records import ErrorRow, HostRow, Timing, read_rows, write_rows

ROOT = Path(__file__).parents[2]
FILES = {
    "block_diagonal.csv": Timing,
    "block_diagonal_errors.csv": ErrorRow,
    "block_diagonal_host.csv": HostRow,
    "torch_host.csv": HostRow,
}


@pytest.fixture(scope="module")
def figures():
    return runpy.run_path(str(ROOT / "benchmarks" / "block_diagonal" / "figures.py"))


@pytest.fixture
def change(tmp_path):
    """Return a function that writes the committed rows to a folder, after a change of one file."""

    def write(name, changed):
        for file, kind in FILES.items():
            rows = read_rows(ROOT / "benchmarks" / "results" / file, kind)
            write_rows(tmp_path / file, kind, [changed(row) for row in rows] if file == name else rows)
        return tmp_path

    return write


def names(verdicts, is_met):
    return {verdict.name for verdict in verdicts if verdict.is_met == is_met}


def test_judge_of_committed_rows_gives_every_figure_a_value(figures, change):
    verdicts = figures["judge"](change(None, None))
    assert all(verdict.value is not None for verdict in verdicts)
    assert {"fwd, operator beyond its launch, us", "wrap_jax, three inputs, us"} <= names(verdicts, True)


@pytest.mark.parametrize(
    ("pass_name", "implementation", "figure"),
    [
        ("fwd", "operator", "fwd, operator beyond its launch, us"),
        ("fwd+bwd", "operator", "fwd+bwd, operator beyond its launches and one torch operation, us"),
        ("compiled", "with the operator", "compiled, operator, us"),
        ("round trip", "wrap_jax, one input", "wrap_jax, one input, us"),
        ("round trip", "wrap_jax, three inputs", "wrap_jax, three inputs, us"),
    ],
)
def test_judge_of_a_slower_host_time_reports_the_figure_as_missed(
    figures, change, capsys, pass_name, implementation, figure
):
    def slower(row):
        if (row.pass_name, row.implementation) == (pass_name, implementation):
            return dataclasses.replace(row, median_us=row.median_us + 1000)
        return row

    folder = change("torch_host.csv", slower)
    assert figure in names(figures["judge"](folder), False)
    assert figures["main"](["--judge", str(folder)]) == 1
    assert f"missed: {figure}" in capsys.readouterr().out


def test_judge_of_rows_from_another_device_exits_with_an_error(figures, change):
    folder = change("torch_host.csv", lambda row: dataclasses.replace(row, device="NVIDIA H100"))
    with pytest.raises(SystemExit, match="has no rows of an NVIDIA H200"):
        figures["judge"](folder)


def test_time_import_returns_a_verdict(figures):
    verdict = figures["time_import"]()
    assert verdict.value > 0 and verdict.limit == figures["IMPORT_LIMIT_SECONDS"]
