"""The demo on a GPU: a Flax model trains with the kernels and is compared with dense attention."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_demo_trains_and_agrees_with_dense_attention(tmp_path):
    """The demo runs in a separate process and fails if the two losses disagree."""
    plot = tmp_path / "loss.png"
    command = [sys.executable, "-m", "blockdiag", "demo", "--steps", "20", "--output", str(plot)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert plot.stat().st_size > 1000
