"""The main job on a GPU: the kernels inside a Flax model that trains, against dense attention."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_demo_trains_and_agrees_with_dense_attention(tmp_path):
    """In a process of its own, as a user runs it; the command itself fails where the two losses disagree."""
    plot = tmp_path / "loss.png"
    command = [sys.executable, "-m", "blockdiag", "demo", "--steps", "20", "--output", str(plot)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert plot.stat().st_size > 1000
