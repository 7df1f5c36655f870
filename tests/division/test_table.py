"""The table of operations, meshes and transformations in the documentation matches the tests."""

import os
import subprocess
import sys

import pytest

from tests.division.division_table import PAGE, main, table_of


def test_page_table_matches_the_collected_tests():
    pytest.importorskip("triton", reason="without triton there are no tests of its kernels, which the table has")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.division.division_table", "--check"]
    found = subprocess.run(command, cwd=PAGE.parent.parent, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]


def test_table_of_markers_lists_meshes_for_each_operation_and_column():
    lines = table_of([("fuse", "heads", "manual"), ("fuse", "heads", "automatic")]).splitlines()
    assert sum("A" in line or " M " in line for line in lines) == 1
    assert next(line for line in lines if "`fuse`" in line).startswith("| `fuse` | | A M | |")


def test_check_of_a_page_with_another_table_exits_with_an_error(monkeypatch, tmp_path):
    """No test is collected here, so the page claims more than the tests show."""
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr("tests.division.division_table.PAGE", page)
    monkeypatch.setattr(pytest, "main", lambda *_, **__: 0)
    with pytest.raises(SystemExit, match="differs from the tests"):
        main(["--check"])
