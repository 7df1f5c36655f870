"""Every operation on arrays that the devices of an automatic or explicit mesh share."""

import pytest

from tests.division_support import KINDS, assert_divides, batch_specs, both, head_specs
from tests.op_calls import CALLS

ALL = ("data", "model")
BATCHED = (
    "block_diagonal", "block_diagonal, long blocks", "block_diagonal, rotary", "moba", "moba, key mask",
    "moba, not causal", "moba_routing", "fuse", "fuse, causal",
)  # fmt: skip
WITH_HEADS = (*BATCHED, "block_diagonal, offsets", "block_diagonal, lengths", "moba, offsets")
# Sums over shards: of gradients of what the shards share.
SUMS = {("fuse, causal", "batch"): {"all-reduce": 1}, ("fuse, causal", "both"): {"all-reduce": 1}}


def computed(call, *, is_checkpointed=False):
    """The gradients of a call where it has some, else its results, by the implementation for a CPU."""
    return call.gradients(None, is_checkpointed=is_checkpointed) if call.differentiated else call.bound(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHED)
def test_batch_is_divided(name, kind):
    call = CALLS[name]
    assert_divides(computed(call), call.arrays(4), batch_specs(call, ALL), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_are_divided(name, kind):
    call = CALLS[name]
    assert_divides(computed(call), call.arrays(2), head_specs(call, "model"), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHED)
def test_batch_and_heads_are_divided(name, kind):
    call = CALLS[name]
    specs = both(batch_specs(call, "data"), head_specs(call, "model"))
    assert_divides(computed(call), call.arrays(2), specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["block_diagonal", "block_diagonal, long blocks", "moba", "moba, offsets"])
def test_query_heads_are_divided_among_more_devices_than_there_are_key_heads(name, kind):
    call = CALLS[name]
    specs = head_specs(call, ALL, ("query",))
    assert_divides(computed(call), call.arrays(2), specs, kind, {"all-reduce": 2})
