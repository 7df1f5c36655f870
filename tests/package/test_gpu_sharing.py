"""Environment variables of test processes that share GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_sharing import sharing_settings

ROOT = Path(__file__).parents[2]


def test_settings_of_a_single_process_leave_memory_to_others():
    settings = sharing_settings({}, 0)
    assert settings["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert 0 < float(settings["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 0.5
    assert "CUDA_VISIBLE_DEVICES" not in settings


def test_sharing_settings_keep_variables_of_the_user():
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "OMP_NUM_THREADS": "3", "XLA_FLAGS": "--xla_dump_to=/x"}
    assert not sharing_settings(given | {"PYTEST_XDIST_WORKER": "gw0"}, 1).keys() & given.keys()


def test_sharing_settings_rotate_gpus_between_workers():
    orders = [sharing_settings({"PYTEST_XDIST_WORKER": f"gw{i}"}, 2)["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert orders == ["0,1", "1,0", "0,1"]


@pytest.mark.parametrize(
    ("visible", "expected"), [("3", None), ("", None), ("5,7,2", "7,2,5"), ("GPU-a,GPU-b", "GPU-b,GPU-a")]
)
def test_sharing_settings_rotate_only_the_visible_gpus(visible, expected):
    settings = sharing_settings({"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": visible}, 8)
    assert settings.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.slow
def test_workers_have_their_settings_before_the_tests(tmp_path):
    """Two workers run a small test with the real conftest and a fake nvidia-smi that lists two GPUs."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf 'GPU 0: some GPU\\nGPU 1: some GPU\\n'\n")
    driver.chmod(0o755)
    names = ("PYTEST_XDIST_WORKER", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE")
    (tmp_path / "test_shared.py").write_text(f"""
import os
import time
import pathlib
import pytest

@pytest.mark.parametrize("turn", range(2))
def test_one(turn):
    folder = pathlib.Path({str(tmp_path)!r})
    (folder / os.environ["PYTEST_XDIST_WORKER"]).write_text(" ".join(os.environ.get(x, "") for x in {names!r}))
""")
    # The worker that runs this test has such settings too, and they must not be inherited.
    hidden = {"PYTEST_XDIST_WORKER", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", *sharing_settings({}, 0)}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PATH": f"{tmp_path}{os.pathsep}{environment['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "-p", "tests.conftest", str(tmp_path / "test_shared.py")]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    told = sorted((tmp_path / worker).read_text() for worker in ("gw0", "gw1"))
    assert told == ["gw0 0,1 false", "gw1 1,0 false"]
