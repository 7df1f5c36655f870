"""Kernels on shards of two GPUs, over automatic and explicit meshes."""

import pytest
from jax.sharding import PartitionSpec as P

from tests.division.division_support import KINDS, assert_divides, batch_specs, head_specs
from tests.ops.op_calls import CALLS

pytestmark = pytest.mark.multigpu
NAMES = (
    "block_diagonal", "block_diagonal, long blocks", "block_diagonal, rotary", "moba", "moba, key mask",
    "moba, not causal", "moba_routing", "fuse",
)  # fmt: skip


def computed(call):
    return call.gradients("triton") if call.differentiated else call.bound("triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_operation_with_sharded_batch_matches_one_gpu(name, kind):
    call = CALLS[name]
    assert_divides(computed(call), call.arrays(4), batch_specs(call, "data"), kind, shape=(2, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*NAMES, "block_diagonal, offsets", "moba, offsets"])
def test_operation_with_sharded_heads_matches_one_gpu(name, kind):
    call = CALLS[name]
    assert_divides(computed(call), call.arrays(2), head_specs(call, "model"), kind, shape=(1, 2))


@pytest.mark.parametrize(("name", "gathers"), [("block_diagonal", 1), ("moba", 2)])
def test_sharded_tokens_are_gathered_with_a_warning(name, gathers):
    """XLA gathers query, key and value at once. It first shards and then gathers the chosen blocks."""
    call = CALLS[name]
    specs = dict.fromkeys(("query", "key", "value"), P(None, "data"))
    with pytest.warns(UserWarning, match=r"every device needs all of it: it is gathered"):
        assert_divides(call.bound("triton"), call.arrays(2), specs, "automatic", {"all-gather": gathers}, shape=(2, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["block_diagonal", "moba"])
def test_operation_with_fewer_key_heads_than_gpus_shards_query_heads(name, kind):
    """Each GPU reads the key head of its query heads. XLA gathers the gradients of keys and values at once."""
    call = CALLS[name]
    specs = head_specs(call, "model", ("query",))
    assert_divides(computed(call), call.arrays(2), specs, kind, {"all-gather": 1}, shape=(1, 2))
