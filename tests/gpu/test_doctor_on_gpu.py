"""`python -m blockdiag doctor` on a GPU runs the kernels that programs use and checks their results."""

import json
import os
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def entries() -> list[dict]:
    """Return what the command reports about each implementation, run in a separate process."""
    command = [sys.executable, "-m", "blockdiag", "doctor", "--json"]
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)["implementations"]


def test_available_implementations_are_within_tolerance(entries):
    for entry in entries:
        outcome = entry["outcome"]
        assert outcome["failure"] is None, entry
        assert outcome["reason"] is not None or outcome["error"] <= outcome["allowed"], entry


def test_kernels_ran_on_the_gpu(entries):
    triton = [entry for entry in entries if entry["implementation"] == "triton"]
    assert {entry["framework"] for entry in triton} == {"JAX", "torch"}
    assert all(entry["runs_on"] == "CUDA GPU" and entry["outcome"]["seconds"] for entry in triton)


def test_pallas_kernels_ran_on_hopper_alone(entries):
    capability = jax.devices()[0].compute_capability
    pallas = [entry["outcome"] for entry in entries if entry["implementation"] == "pallas"]
    assert pallas and all((outcome["reason"] is None) == (capability == "9.0") for outcome in pallas)


def test_crossing_ran_on_the_gpu(entries):
    (crossing,) = [entry for entry in entries if entry["framework"] == "both"]
    assert crossing["runs_on"] == "CUDA GPU" and crossing["outcome"]["seconds"]
