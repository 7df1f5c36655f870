"""Tests for GPUs are collected where only the frameworks and pytest are installed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.absent_packages import HIDDEN

ROOT = Path(__file__).parents[2]


def run_without_extras(*arguments):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.package.absent_packages",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_gpu_tests_are_collected_without_the_extras():
    """No module may be skipped, because a skipped module would hide its GPU tests."""
    marked = [
        str(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.(multi)?gpu", path.read_text()) and path != Path(__file__)
    ]
    result = run_without_extras("--collect-only", "-q", "-m", "gpu or multigpu", *marked)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr
    assert "SKIPPED" not in result.stdout
    files = {line.partition("::")[0] for line in result.stdout.splitlines() if "::" in line}
    assert files >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert "tests/interop/test_on_gpu.py" in files


def test_hidden_packages_are_installed_and_hidden():
    assert all(importlib.util.find_spec(package) is not None for package in HIDDEN)
    code = """
import importlib.util
from tests.package.absent_packages import HIDDEN, hide
hide()
assert not [package for package in HIDDEN if importlib.util.find_spec(package)]
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
