"""GPU programs compiled without a GPU: overlap of transfers with kernels, and memory of aliased operands."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs JAX's CUDA plugin, jax-cuda13-plugin"
    ),
]


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    environment = {**os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.gpu_schedule"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def several(transfers: list[list[int]]) -> list[tuple[int, int]]:
    """Return the transfers of several arrays, each as its number of arrays and of kernels beside it."""
    return [(arrays, kernels) for arrays, kernels in transfers if arrays > 1]


def test_ulysses_exchanges_overlap_with_kernels(programs: dict[str, Any]) -> None:
    together = several(programs["ulysses"])
    # The heads are in four groups. In the forward pass the second group's query, key and value move together.
    # The operands of each later group move together with the results of the group before. In the backward pass a
    # group has one cotangent and three gradients. The first two cotangents and the last gradients move separately.
    assert [arrays for arrays, _ in together] == [3, 4, 4, 4, 4, 3]
    # The transfer of the third group's gradients overlaps with two of the last group's three backward kernels.
    *others, (_, last) = together
    assert all(kernels >= 3 for _, kernels in others) and last == 2, together


def test_ulysses_exchanges_of_the_first_and_the_last_group_overlap_with_kernels(programs: dict[str, Any]) -> None:
    """Values arrive while queries choose by mean keys. A key gradient leaves while the query gradient is summed."""
    first, last = programs["ulysses"][:3], programs["ulysses"][-3:]
    assert first == [[1, 0], [1, 0], [1, 2]]
    assert last == [[1, 1], [1, 0], [1, 0]]


def test_ulysses_sorts_heads_once_and_writes_the_last_group_in_place(programs: dict[str, Any]) -> None:
    """The output and three gradients have their heads sorted.

    The last group of the output and of one gradient is written later.
    """
    assert programs["sorted"] == {"loop_transpose_fusion": 4, "loop_dynamic_update_slice_fusion": 2}


def test_gather_strategy_overlaps_gathers_with_routing_and_reductions_with_gradients(programs: dict[str, Any]) -> None:
    """Keys and values are gathered together.

    Early and late queries each have a routing kernel. Gradients are computed for two parts of the heads.
    """
    assert several(programs["gather"]) == [(2, 2), (2, 2)]


def test_aliased_launch_operands_have_separate_memory(programs: dict[str, Any]) -> None:
    """XLA once gave the gradients of keys and values the same memory, because both start as the same zeros."""
    aliased = programs["aliased"]
    assert aliased
    assert all(len(set(operands)) == len(operands) for operands in aliased), aliased
