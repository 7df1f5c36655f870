"""The figures of block-diagonal attention, measured afresh: `pytest -m gpu tests/gpu/test_figures.py` on an H200.

Run it by itself: another test's process may hold most of the GPU's memory for JAX.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from blockdiag.bench.records import ErrorRow, HostRow, Timing, read_rows
from blockdiag.bench.targets import Verdict, judge_errors, judge_host, judge_times

pytestmark = pytest.mark.gpu

_COMPARED = "torch-fa2,torch-varlen,jax-einsum,jax-cudnn"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[Verdict]:
    """Every verdict of one short benchmark, or a skip where there is no H200 to hold them against."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name():
        pytest.skip("the figures are those of an NVIDIA H200")
    folder: Path = tmp_path_factory.mktemp("figures")
    options = ["--baselines", _COMPARED, "--rounds", "15", "--output", str(folder)]
    command = [sys.executable, "-m", "blockdiag", "bench", "block_diagonal", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stdout + result.stderr
    return [
        *judge_times(read_rows(folder / "block_diagonal.csv", Timing)),
        *judge_errors(read_rows(folder / "block_diagonal_errors.csv", ErrorRow)),
        *judge_host(read_rows(folder / "block_diagonal_host.csv", HostRow)),
    ]


def test_every_figure_is_reached(figures: list[Verdict]):
    missed = [verdict for verdict in figures if not verdict.is_met]
    assert not missed, "\n".join(f"{one.name}: {one.value}, limit {one.limit}" for one in missed)
