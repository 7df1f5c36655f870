"""Transfers beside kernels: what XLA for GPUs makes of the exchanges of tokens for heads."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs JAX's CUDA plugin, jax-cuda13-plugin"
)


def transfers(strategy: str) -> list[tuple[int, int]]:
    """Arrays of each asynchronous transfer of several, and kernels beside it."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu_schedule", strategy],
        env={**os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [(arrays, kernels) for arrays, kernels in json.loads(found.stdout) if arrays > 1]


def test_exchanges_run_beside_kernels() -> None:
    together = transfers("ulysses")
    # Four groups of heads. Query, key and value of the second, then these of the next group with the results of the one
    # before; and the mirror image in the backward pass, where three kernels compute a group.
    assert [arrays for arrays, _ in together] == [3, 4, 4, 4, 4, 3]
    assert all(kernels >= 3 for _, kernels in together), together


def test_gathers_run_beside_the_choice_of_blocks_and_sums_beside_the_gradient_of_queries() -> None:
    """Keys and values together; early and late queries choose by a kernel each, heads in two parts have gradients."""
    assert transfers("gather") == [(2, 2), (2, 2)]
