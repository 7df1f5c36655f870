"""Invalid arguments of the torch functions raise the messages of the JAX functions."""

import re

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import Rotary, block_diagonal_attention, fused_qkv_block_attention, rotary_tables  # noqa: E402
from tests.common import test_validation  # noqa: E402
from tests.torch.torch_support import to_tensor  # noqa: E402


def as_torch(value):
    """Convert an argument of the JAX function to one of the torch function."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return to_tensor(value)
    if isinstance(value, blockdiag.Rotary):
        names = ("positions", "per_token", "interleaved", "apply_to")
        more = {name: as_torch(getattr(value, name)) for name in names}
        return Rotary(as_torch(value.cos), as_torch(value.sin), **more)
    return value


def message_of(function, arguments) -> str:
    """Return the message of the error that a call raises, with plain dtype names."""
    with pytest.raises(ValueError) as caught:
        function(**arguments)
    return re.sub(r"torch\.(?=b?float|int)", "", str(caught.value))


# torch's messages differ for these; see `test_invalid_torch_arguments_raise_value_error`.
OTHER_KINDS = {"offsets of a list", "rotary of a tuple", "tables of lists"}


@pytest.mark.parametrize("mistake", [name for name in test_validation.MISTAKES if name not in OTHER_KINDS])
def test_invalid_arguments_raise_the_errors_of_jax(mistake):
    arguments, _ = test_validation.MISTAKES[mistake]
    query, key = test_validation.QUERY, test_validation.KEY
    arguments = {"query": query, "key": key, "value": key, "block_size": 8} | arguments
    expected = message_of(blockdiag.block_diagonal_attention, arguments)
    arguments = {name: as_torch(value) for name, value in arguments.items()}
    assert message_of(block_diagonal_attention, arguments) == expected


@pytest.mark.parametrize("mistake", test_validation.PROJECTION_MISTAKES)
def test_invalid_projection_arguments_raise_the_errors_of_jax(mistake):
    arguments, _ = test_validation.PROJECTION_MISTAKES[mistake]
    zeros = test_validation.zeros
    arguments = {"x": zeros(20, 16), "w_qkv": zeros(16, 64), **test_validation.PROJECTION} | arguments
    expected = message_of(blockdiag.fused_qkv_block_attention, arguments)
    arguments = {name: as_torch(value) for name, value in arguments.items()}
    assert message_of(fused_qkv_block_attention, arguments) == expected


def test_invalid_torch_arguments_raise_value_error():
    query = torch.zeros(2, 20, 4, 8)
    with pytest.raises(ValueError, match=r"`via` must be None or 'jax', got 'xla'"):
        block_diagonal_attention(query, query, query, via="xla")
    for array in ([0, 20], np.asarray([0, 20], np.int32)):
        with pytest.raises(ValueError, match=r"`sequence_offsets` must be a tensor, got <class '(list|numpy)"):
            block_diagonal_attention(query[0], query[0], query[0], sequence_offsets=array)
    with pytest.raises(ValueError, match=r"`rotary` must be a blockdiag.torch.Rotary or None, got <class 'tuple'>"):
        block_diagonal_attention(query, query, query, rotary=rotary_tables(20, 8))
    for table in ([0.0], None):
        with pytest.raises(ValueError, match=r"`rotary.sin` must be a tensor, got <class '(list|NoneType)'>"):
            Rotary(torch.zeros(20, 4), table)
