"""`python -m blockdiag doctor`."""

import json
import platform

import pytest
from typer.testing import CliRunner

from blockdiag.cli import app as command_line
from blockdiag.cli import doctor


def run_doctor(*arguments: str):
    return CliRunner().invoke(command_line.app, ["doctor", *arguments])


@pytest.fixture(scope="module")
def report() -> dict:
    result = run_doctor("--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_versions_and_devices(report):
    assert report["python"] == platform.python_version()
    assert report["packages"]["jax"]
    assert set(report["packages"]) == set(doctor.PACKAGES)
    assert report["devices"][0]["platform"] in ("cpu", "gpu")


def test_every_implementation_is_listed(report):
    names = {entry["implementation"] for entry in report["implementations"]}
    assert names == {"reference", "xla", "triton", "pallas"}
    always = [entry for entry in report["implementations"] if entry["implementation"] in ("reference", "xla")]
    assert always and all(entry["reason"] is None for entry in always)


def test_reason_is_shown(monkeypatch):
    entry = doctor.ImplementationReport("an_op", "triton", "Triton is not installed; pip install triton", "nowhere")
    monkeypatch.setattr(doctor, "_implementations", lambda *, has_gpu: [entry])
    result = run_doctor()
    assert result.exit_code == 0
    assert "Triton is not installed" in result.output


def test_tables(report):
    result = run_doctor()
    assert result.exit_code == 0
    assert "block_diagonal_attention" in result.output
    assert report["packages"]["jaxlib"] in result.output


def test_missing_package_has_no_version():
    assert doctor._package_version("no-such-package-anywhere") is None
