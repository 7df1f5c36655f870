"""Programs for GPUs, compiled without one: transfers beside kernels, and operands that launches write into."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs JAX's CUDA plugin, jax-cuda13-plugin"
)


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    environment = {**os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.gpu_schedule"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def several(transfers: list[list[int]]) -> list[tuple[int, int]]:
    """The transfers of several arrays: how many these are, and kernels beside them."""
    return [(arrays, kernels) for arrays, kernels in transfers if arrays > 1]


def test_ulysses_exchanges_overlap_with_kernels(programs: dict[str, Any]) -> None:
    together = several(programs["ulysses"])
    # Four groups of heads. Forward, the second group's query, key and value move together, then each next group's with
    # the results of the one before. Backward, a group has one cotangent and three gradients; the first two cotangents
    # and the last gradients move by themselves.
    assert [arrays for arrays, _ in together] == [3, 4, 4, 4, 4, 3]
    # The third group's gradients leave under two of the last group's three backward kernels.
    *others, (_, last) = together
    assert all(kernels >= 3 for _, kernels in others) and last == 2, together


def test_ulysses_exchanges_of_the_first_and_the_last_group_overlap_with_kernels(programs: dict[str, Any]) -> None:
    """Values arrive while queries choose by mean keys; a gradient of keys leaves while that of queries is added up."""
    first, last = programs["ulysses"][:3], programs["ulysses"][-3:]
    assert first == [[1, 0], [1, 0], [1, 2]]
    assert last == [[1, 1], [1, 0], [1, 0]]


def test_ulysses_sorts_heads_once_and_writes_the_last_group_in_place(programs: dict[str, Any]) -> None:
    """Heads of the output and of three gradients; the last group of the output and of one gradient is added later."""
    assert programs["sorted"] == {"loop_transpose_fusion": 4, "loop_dynamic_update_slice_fusion": 2}


def test_gather_strategy_overlaps_gathers_with_routing_and_reductions_with_gradients(programs: dict[str, Any]) -> None:
    """Keys and values together; early and late queries choose by a kernel each, heads in two parts have gradients."""
    assert several(programs["gather"]) == [(2, 2), (2, 2)]


def test_aliased_launch_operands_have_separate_memory(programs: dict[str, Any]) -> None:
    """Gradients of keys and values once started as the same zeros, and XLA gave both the same memory."""
    aliased = programs["aliased"]
    assert aliased
    assert all(len(set(operands)) == len(operands) for operands in aliased), aliased
