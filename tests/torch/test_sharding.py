"""DTensors and FSDP on two processes: devices compute their own shards, without communication where possible."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.torch.process_support import several_processes  # noqa: E402

BATCH, HEADS = 0, 2


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Yield a function that runs a check on two processes."""
    with several_processes(tmp_path_factory.mktemp("store"), 2) as run:
        yield lambda name, *arguments, module="sharding_worker": run(f"{module}.{name}", *arguments)


@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        ("shared positions", BATCH),
        ("positions", BATCH),
        ("tables of each row", BATCH),
        ("rotary", HEADS),
        ("positions", HEADS),
        ("rotary", None),
    ],
)
def test_sharded_call_keeps_shards_and_matches_the_whole_call_without_communication(both, kind, dim):
    both("check_sharded", kind, (dim,), False, 4, None)


@pytest.mark.parametrize("kind", ["offsets", "lengths"])
def test_packed_sequences_sharded_over_heads_match_the_whole_call_without_communication(both, kind):
    both("check_sharded", kind, (1,), True, 4, None)


def test_sharded_call_through_jax_matches_the_whole_call_without_communication(both):
    both("check_sharded", "rotary", (HEADS,), False, 2, "jax")


@pytest.mark.parametrize("dims", [(BATCH, HEADS), (HEADS, HEADS), (BATCH, None)])
def test_sharded_call_on_a_mesh_of_two_axes_matches_the_whole_call_without_communication(both, dims):
    both("check_sharded", "positions", dims, False, 2, None)


def test_sharded_operators_called_directly_match_the_whole_call_without_communication(both):
    both("check_operators_directly")


def test_sharded_call_with_an_uneven_batch_matches_the_whole_call(both):
    both("check_uneven_batch")


@pytest.mark.parametrize("dim", [BATCH, HEADS])
def test_sharded_call_with_a_replicated_cotangent_needs_no_communication(both, dim):
    both("check_sum_of_output", dim)


@pytest.mark.parametrize(
    ("key_heads", "query_dim", "key_dim"),
    [(4, 1, 1), (4, 3, 3), (4, BATCH, HEADS)],
    ids=["tokens", "head dimension", "batch and heads"],
)
def test_sharded_tokens_or_features_are_gathered_with_a_warning(both, key_heads, query_dim, key_dim):
    both("check_what_cannot_stay", key_heads, query_dim, key_dim)


def test_fused_projection_of_shards_matches_the_whole_call(both):
    both("check_fused_projection")


def test_compiled_call_of_dtensors_matches_the_eager_call(both):
    both("check_compiled")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("check_few_key_heads", ("moba", 1, True)),
        ("check_heads_that_do_not_divide", ()),
        ("check_channels", ()),
        ("check_cache", (False, True)),
        ("check_one_key_head_in_a_cache", ()),
        ("check_fuse_is_refused", ()),
        ("check_modules_with_fsdp", ()),
    ],
    ids=str,
)
def test_division_check_passes_on_two_processes(both, name, arguments):
    both(name, *arguments, module="division_worker")


def test_sharding_rules_are_registered_without_importing_dtensor():
    code = """
import sys
import blockdiag.torch
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed.tensor as distributed
from blockdiag.torch import dtensor_registration as _sharding
_sharding.register()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def both_moba(both):
    """Return `both` for the checks of MoBA and key convolution."""
    return lambda name, *arguments: both(name, *arguments, module="moba_sharding_worker")


@pytest.mark.parametrize(
    ("kind", "dims", "is_packed"),
    [
        ("plain", (BATCH,), False),
        ("plain", (HEADS,), False),
        ("plain", (BATCH, HEADS), False),
        ("mask and routing", (BATCH,), False),
        ("mask and routing", (HEADS,), False),
        ("offsets", (1,), True),
    ],
)
def test_moba_sharded_call_keeps_shards_and_matches_the_whole_call(both_moba, kind, dims, is_packed):
    both_moba("check_sharded", kind, dims, is_packed)


@pytest.mark.parametrize("dim", [BATCH, HEADS])
def test_moba_routing_of_shards_matches_the_whole_call(both_moba, dim):
    both_moba("check_routing", dim)


def test_moba_sharded_call_with_an_uneven_batch_matches_the_whole_call(both_moba):
    both_moba("check_uneven_batch")


@pytest.mark.parametrize(
    ("key_heads", "dims", "cotangent_dim"),
    [
        (2, (None, None, BATCH), None),
        (2, (BATCH, None, HEADS), HEADS),
        (2, (1, 1, 1), 1),
        (1, (HEADS, None, None), HEADS),
        (2, (None, None, HEADS), None),
    ],
    ids=["values by batch", "each in its own way", "tokens", "one key head", "values by heads"],
)
def test_moba_of_operands_with_different_placements_matches_the_whole_call(both_moba, key_heads, dims, cotangent_dim):
    both_moba("check_mixed", key_heads, dims, cotangent_dim)


def test_moba_compiled_call_of_dtensors_matches_the_eager_call(both_moba):
    both_moba("check_compiled")


def test_moba_sharded_operators_called_directly_match_the_whole_call(both_moba):
    both_moba("check_operators_directly")


@pytest.mark.parametrize(
    ("dims", "is_packed", "rows"),
    [((BATCH,), False, 4), ((HEADS,), False, 4), ((BATCH, HEADS), False, 4), ((BATCH,), False, 3), ((1,), True, 0)],
    ids=["batch", "heads", "batch and heads", "uneven batch", "packed"],
)
def test_key_convolution_of_shards_matches_the_whole_call(both_moba, dims, is_packed, rows):
    both_moba("check_key_convolution", dims, is_packed, rows)
