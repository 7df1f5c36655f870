"""Transfers beside kernels: what XLA for GPUs makes of the exchanges of tokens for heads."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs JAX's CUDA plugin, jax-cuda13-plugin"
)
def test_exchanges_run_beside_kernels() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu_schedule"],
        env={**os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    together = [(arrays, kernels) for arrays, kernels in json.loads(found.stdout) if arrays > 1]
    # Four groups of heads. Query, key and value of the second, then these of the next group with the results of the one
    # before; and the mirror image in the backward pass, where three kernels compute a group.
    assert [arrays for arrays, _ in together] == [3, 4, 4, 4, 4, 3]
    assert all(kernels >= 3 for _, kernels in together), together
