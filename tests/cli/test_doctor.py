"""`python -m blockdiag doctor`."""

import importlib
import importlib.util
import io
import json
import platform

import pytest
from rich.console import Console
from typer.testing import CliRunner

import blockdiag
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


def test_every_implementation_of_every_op_is_listed(report):
    names: dict[str, set[str]] = {}
    for entry in report["implementations"]:
        names.setdefault(entry["op"], set()).add(entry["implementation"])
    assert names == {
        "block_diagonal_attention": {"reference", "xla", "triton", "pallas"},
        "moba_attention": {"reference", "xla", "triton"},
        "key_convolution": {"reference", "xla", "triton"},
        "paged_attention": {"reference", "xla", "triton"},
        "moba_paged_attention": {"reference", "xla", "triton"},
        "append_to_pages": {"reference", "xla", "triton"},
        "fuse": {"xla", "triton"},
    }
    always = [entry for entry in report["implementations"] if entry["implementation"] in ("reference", "xla")]
    assert len(always) == 13 and all(entry["reason"] is None for entry in always)


def test_ops_are_public_functions(report):
    assert {entry["op"] for entry in report["implementations"]} <= set(blockdiag.__all__)


def test_each_implementation_of_an_op_gives_its_own_reason(monkeypatch):
    monkeypatch.setattr(importlib.import_module("blockdiag.interop.triton_moba"), "available", lambda: "no MoBA here")
    found = {(entry.op, entry.implementation): entry.reason for entry in doctor._implementations(has_gpu=False)}
    assert found["moba_attention", "triton"] == "no MoBA here"
    assert found["block_diagonal_attention", "triton"] != "no MoBA here"
    assert found["moba_attention", "xla"] is None


def test_reason_is_shown(monkeypatch):
    entry = doctor.ImplementationReport("an_op", "triton", "Triton is not installed; pip install triton", "nowhere")
    monkeypatch.setattr(doctor, "_implementations", lambda *, has_gpu: [entry])
    result = run_doctor()
    assert result.exit_code == 0
    assert "Triton is not installed" in result.output


def test_tables(report):
    result = run_doctor()
    assert result.exit_code == 0
    for op in ("block_diagonal_attention", "moba_attention", "key_convolution"):
        assert op in result.output
    assert report["packages"]["jaxlib"] in result.output


def test_torch_beside_jax(report):
    torch = pytest.importorskip("torch")
    entry = report["torch"]
    assert entry["cuda"] == torch.version.cuda
    assert len(entry["devices"]) == torch.cuda.device_count()
    gpus = [device for device in report["devices"] if device["platform"] == "gpu"]
    assert entry["same_devices"] == (len(gpus) == torch.cuda.device_count())
    assert (entry["jax_memory_bytes"] is None) == (not gpus)
    assert "torch beside JAX" in run_doctor().output


def test_without_torch(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    result = run_doctor("--json")
    assert json.loads(result.stdout)["torch"] is None
    assert "torch beside JAX" not in run_doctor().output


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (True, 0.75)),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, (False, 0.75)),
        ({"XLA_CLIENT_MEM_FRACTION": "0.3"}, (True, 0.3)),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, (True, 0.5)),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, (False, 0.75)),
    ],
)
def test_memory_settings_of_jax(environment, expected):
    assert doctor._memory_settings(environment) == expected


def test_memory_and_devices_are_told():
    entry = doctor.TorchReport("13.0", "9.19.0", None, ["A GPU"], False, True, 0.75, 3 << 30)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(doctor._torch_table(entry))
    text = console.export_text()
    assert "13.0, 9.19.0, none" in text
    assert "no: set CUDA_VISIBLE_DEVICES" in text
    assert "75% of a GPU, 3.0 GiB at its first use; XLA_PYTHON_CLIENT_PREALLOCATE=false" in text


def test_missing_package_has_no_version():
    assert doctor._package_version("no-such-package-anywhere") is None
