"""Results own their memory, so users may change them in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from blockdiag.interop import wrap_jax  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    BlockDiagonalSelfAttention,
    MoBASelfAttention,
    block_diagonal_attention,
    block_diagonal_attention_bhsd,
    fuse,
    fused_qkv_block_attention,
    key_convolution,
    moba_attention,
    paged_attention,
)

BLOCK, TOKENS = 16, 20
OFFSETS = torch.tensor([0, 7, TOKENS], dtype=torch.int32)


def attention(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / 4.0
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def transposed(query, key, value):
    return jnp.swapaxes(attention(query, key, value), 1, 2)


def x_of(*shape):
    return torch.randn(*shape, requires_grad=True)


def of_one(function, *shape):
    """Return self-attention as a function of one tensor, and the operands of a call."""
    return lambda x: function(x, x, x), (x_of(*shape),)


def project(x, weights):
    return fused_qkv_block_attention(x, weights, query_heads=2, key_heads=2, head_dim=8, block_size=BLOCK)


BLOCKS = functools.partial(block_diagonal_attention, block_size=BLOCK)
MOBA = functools.partial(moba_attention, block_size=BLOCK, top_k=2)
# Functions whose backward pass needs no result.
FREE = {
    "block diagonal": of_one(BLOCKS, 2, TOKENS, 2, 8),
    "block diagonal, packed": of_one(functools.partial(BLOCKS, sequence_offsets=OFFSETS), TOKENS, 2, 8),
    "block diagonal, reference": of_one(functools.partial(BLOCKS, implementation="reference"), 2, TOKENS, 2, 8),
    "bhsd, folded": of_one(functools.partial(block_diagonal_attention_bhsd, block_size=BLOCK), 2, 2, TOKENS, 8),
    "bhsd": (
        lambda x: block_diagonal_attention_bhsd(x, x[:, :1], x[:, :1], block_size=BLOCK),
        (x_of(2, 2, TOKENS, 8),),
    ),
    "fused projection": (project, (x_of(2, TOKENS, 6), x_of(6, 48))),
    "key convolution": (key_convolution, (x_of(2, TOKENS, 2, 8), x_of(3, 2, 8))),
    "key convolution, packed": (
        functools.partial(key_convolution, sequence_offsets=OFFSETS),
        (x_of(TOKENS, 2, 8), x_of(3, 2, 8)),
    ),
    "module": (BlockDiagonalSelfAttention(16, 2, block_size=BLOCK), (x_of(2, TOKENS, 16),)),
    "MoBA module": (
        MoBASelfAttention(16, 2, block_size=BLOCK, top_k=2, key_convolution_size=3),
        (x_of(2, TOKENS, 16),),
    ),
    "wrap_jax": (wrap_jax(jnp.cos), (x_of(3),)),
}
# Functions whose backward pass needs a result, as that of torch's own attention does.
KEEPING = {
    "moba": of_one(MOBA, 2, TOKENS, 2, 8),
    "moba, packed": of_one(functools.partial(MOBA, sequence_offsets=OFFSETS), TOKENS, 2, 8),
    "fuse": of_one(fuse(attention), 2, TOKENS, 2, 8),
    "fuse, a view": of_one(fuse(transposed), 2, TOKENS, 2, 8),
    "fuse, kernels": of_one(fuse(attention, implementation="triton"), 2, TOKENS, 2, 8),
}


@pytest.mark.parametrize("name", FREE)
def test_a_result_changed_in_place_is_differentiated(name):
    function, operands = FREE[name]
    expected = torch.autograd.grad((function(*operands) * 3 + 1).square().sum(), operands)
    output = function(*operands)
    output *= 3
    output += torch.ones_like(output)
    for actual, other in zip(torch.autograd.grad(output.square().sum(), operands), expected, strict=True):
        torch.testing.assert_close(actual, other)


@pytest.mark.parametrize("name", KEEPING)
def test_result_needed_by_backward_and_changed_in_place_raises_runtime_error(name):
    """torch's own attention raises the same error. Without autograd, writing to a result is always allowed."""
    function, operands = KEEPING[name]
    query = x_of(1, 2, TOKENS, 8)
    for result, sources in (
        (torch.nn.functional.scaled_dot_product_attention(query, query, query), (query,)),
        (function(*operands), operands),
    ):
        result += torch.ones_like(result)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result.sum(), sources)
    with torch.no_grad():
        result, untouched = function(*operands), function(*operands)
        result += torch.ones_like(result)
        torch.testing.assert_close(result, untouched + 1)
        torch.testing.assert_close(function(*operands), untouched, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["output", "log-sum-exp"])
def test_moba_and_paged_results_are_not_views(name):
    x = x_of(2, TOKENS, 2, 8)
    result = MOBA(x, x, x, return_residual=True)[name == "log-sum-exp"]
    assert result._base is None
    x = torch.randn(1, 1, 2, 8)
    assert paged_attention(x, x, x, None, torch.ones(1, dtype=torch.int32))._base is None
