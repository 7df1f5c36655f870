"""Conversions of MoBA's routing in torch, compared with those in JAX."""

import functools

import jax
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import Routing  # noqa: E402
from tests.torch.moba_torch_support import CASES, edited_routing_of, to_torch_routing  # noqa: E402
from tests.torch.torch_support import assert_same_bits, to_tensor  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_conversions_equal_those_of_jax(name):
    case, routing = CASES[name], edited_routing_of(name)
    ours = to_torch_routing(routing)
    offsets = case.packing.get("sequence_offsets")
    tensor_offsets = None if offsets is None else to_tensor(offsets)
    # Without `jax.jit`, JAX's operations would take a second to compile for each case.
    pattern = jax.jit(blockdiag.Routing.to_pattern)(routing)
    assert_same_bits([ours.to_pattern()], [pattern])
    lists = jax.jit(blockdiag.Routing.to_block_lists)(routing, offsets)
    actual = ours.to_block_lists(tensor_offsets)
    assert_same_bits(actual, lists)

    top_k = max(int(pattern.sum(axis=-1).max()), 1)
    back = Routing.from_pattern(ours.to_pattern(), block_size=16, top_k=top_k)
    convert = functools.partial(blockdiag.Routing.from_pattern, block_size=16, top_k=top_k)
    assert_same_bits([back.indices], [jax.jit(convert)(pattern).indices])
    assert (back.block_size, back.num_blocks) == (16, routing.num_blocks)
    options = dict(num_queries=routing.indices.shape[-3], block_size=16, top_k=top_k)
    back = Routing.from_block_lists(*(x.long() for x in actual), **options, sequence_offsets=tensor_offsets)
    convert = functools.partial(blockdiag.Routing.from_block_lists, **options)
    expected = jax.jit(convert)(*lists, sequence_offsets=offsets)
    assert_same_bits([back.indices], [expected.indices])
    assert (back.block_size, back.num_blocks) == (16, routing.num_blocks)


def test_from_block_lists_accepts_lists_of_flash_moba():
    """The lists have int64 offsets and lie in any order in `rows`, which has more elements than they name."""
    offsets = torch.tensor([[[5, 2, 2]], [[7, 0, 9]]])
    counts = torch.tensor([[[2, 0, 3]], [[2, 2, 0]]])
    rows = torch.tensor([0, 3, 0, 1, 2, 0, 3, 1, 2, 77])
    routing = Routing.from_block_lists(offsets, counts, rows, num_queries=4, block_size=16, top_k=2)
    assert routing.indices[:, :, 0].tolist() == [
        [[2, 0], [2, -1], [2, -1], [0, -1]],
        [[1, -1], [0, -1], [0, -1], [1, -1]],
    ]
    with pytest.raises(ValueError, match="`top_k` must be at least the 2 blocks that the lists give a query, got 1"):
        Routing.from_block_lists(offsets, counts, rows, num_queries=4, block_size=16, top_k=1)


def test_empty_routings_are_converted():
    nothing = Routing(torch.zeros(0, 2, 3, dtype=torch.int32), 16, 0)
    offsets, counts, rows = nothing.to_block_lists()
    assert offsets.shape == counts.shape == (1, 2, 0) and rows.shape == (0,)
    back = Routing.from_block_lists(offsets, counts, rows, num_queries=0, block_size=16, top_k=3)
    assert back.indices.shape == (1, 0, 2, 3)


ZEROS = torch.zeros(1, 2, 3, dtype=torch.int32)
CONVERSION_MISTAKES = {
    "numbers": (
        lambda: Routing.from_pattern(torch.zeros(4, 1, 2), block_size=16),
        "`pattern` must be a bool tensor .* torch.float32",
    ),
    "rank": (
        lambda: Routing.from_pattern(torch.zeros(2, dtype=torch.bool), block_size=16),
        r"`pattern` must .* \(2,\)",
    ),
    "too many blocks": (
        lambda: Routing.from_pattern(torch.ones(4, 1, 3, dtype=torch.bool), block_size=16, top_k=2),
        "`top_k` must be at least the 3 blocks that `pattern` gives a query, got 2",
    ),
    "shapes": (
        lambda: Routing.from_block_lists(ZEROS, ZEROS[:, :1], ZEROS[0, 0], num_queries=4, block_size=16, top_k=2),
        r"one shape .* got \(1, 2, 3\), \(1, 1, 3\)",
    ),
    "rows of numbers": (
        lambda: Routing.from_block_lists(ZEROS, ZEROS, torch.zeros(5), num_queries=4, block_size=16, top_k=2),
        "`rows` must be an integer tensor, got torch.float32",
    ),
    "sequences": (
        lambda: Routing.from_block_lists(
            ZEROS, ZEROS, ZEROS[0, 0], num_queries=4, block_size=16, top_k=2,
            sequence_offsets=torch.tensor([0, 2, 4], dtype=torch.int32),
        ),
        r"`sequence_offsets` must have shape \(2,\)",
    ),
    "batch rows": (
        lambda: Routing(ZEROS[None], 16, 2).to_block_lists(torch.tensor([0, 1], dtype=torch.int32)),
        "`sequence_offsets` describes one packed token axis",
    ),
    "too large": (
        lambda: Routing(torch.empty(2**20, 32, 64, dtype=torch.int32, device="meta"), 128, 8192).to_block_lists(),
        r"fewer than 2\*\*31 indices .* got 2147483648",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSION_MISTAKES)
def test_invalid_conversions_raise_value_error(name):
    function, message = CONVERSION_MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        function()
