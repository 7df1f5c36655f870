"""torch.func, in-place changes of results and nested tensors on a GPU, by the kernels and through JAX."""

import functools

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, vmap  # noqa: E402

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

GPU = "cuda:0"
TOKENS, BLOCK = 200, 64


def normal(*shape):
    return torch.randn(*shape, device=GPU, dtype=torch.bfloat16)


def attention(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) / 8.0
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def project(x, weights):
    return fused_qkv_block_attention(x, weights, query_heads=2, key_heads=2, head_dim=64, block_size=BLOCK)


BLOCKS = functools.partial(block_diagonal_attention, block_size=BLOCK)
MOBA = functools.partial(moba_attention, block_size=BLOCK, top_k=2)
# Each entry has a function, its operands for a number of batch rows, and how many of the first have batch rows.
FUNCTIONS = {
    "block diagonal": (BLOCKS, lambda rows: normal(3, rows, TOKENS, 2, 64).unbind(), 3),
    "block diagonal, through JAX": (
        functools.partial(BLOCKS, via="jax"),
        lambda rows: normal(3, rows, TOKENS, 2, 64).unbind(),
        3,
    ),
    "fused projection": (project, lambda rows: (normal(rows, TOKENS, 32), normal(32, 6 * 64)), 1),
    "key convolution": (key_convolution, lambda rows: (normal(rows, TOKENS, 2, 64), normal(3, 2, 64)), 1),
    "moba": (MOBA, lambda rows: normal(3, rows, TOKENS, 2, 64).unbind(), 3),
    "fuse": (fuse(attention), lambda rows: normal(3, rows, TOKENS, 2, 64).unbind(), 3),
}


def loss(function, *operands):
    return function(*operands).float().square().sum()


def gradients_of_autograd(function, operands):
    leaves = [x.detach().requires_grad_() for x in operands]
    return torch.autograd.grad(loss(function, *leaves), leaves)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad_equals_autograd_bitwise(name):
    function, make, _ = FUNCTIONS[name]
    operands = make(2)
    found = grad(functools.partial(loss, function), tuple(range(len(operands))))(*operands)
    for one, other in zip(found, gradients_of_autograd(function, operands), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_of_grad_equals_autograd_of_each_row(name):
    function, make, mapped = FUNCTIONS[name]
    operands = make(3)
    rows = [x[:, None] if place < mapped else x for place, x in enumerate(operands)]
    in_dims = tuple(0 if place < mapped else None for place in range(len(rows)))
    found = vmap(grad(functools.partial(loss, function), tuple(range(len(rows)))), in_dims)(*rows)
    for index in range(3):
        row = [x if dim is None else x[index] for x, dim in zip(rows, in_dims, strict=True)]
        expected = gradients_of_autograd(function, row)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[index], other, rtol=0, atol=0)


MODULES = {
    "block diagonal": lambda: BlockDiagonalSelfAttention(
        128, 2, block_size=BLOCK, rotary_max_position=TOKENS, device=GPU, dtype=torch.bfloat16
    ),
    "moba": lambda: MoBASelfAttention(
        128, 2, block_size=BLOCK, top_k=2, key_convolution_size=3, device=GPU, dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_per_sample_gradients_of_module_parameters_match_autograd(name):
    module, samples = MODULES[name](), normal(3, TOKENS, 128)
    parameters = dict(module.named_parameters())

    def of_one(parameters, sample):
        return functional_call(module, parameters, (sample[None],)).float().square().sum()

    found = vmap(grad(of_one), (None, 0))(parameters, samples)
    for index, sample in enumerate(samples):
        module.zero_grad()
        module(sample[None]).float().square().sum().backward()
        for key, parameter in parameters.items():
            # Matrix products of a batch and of one sample round differently.
            size = parameter.grad.float().abs().max().item()
            torch.testing.assert_close(found[key][index], parameter.grad, rtol=0.05, atol=0.02 * size)


IN_PLACE = {
    "block diagonal": lambda x: BLOCKS(x, x, x),
    "block diagonal, through JAX": lambda x: BLOCKS(x, x, x, via="jax"),
    "block diagonal, packed": lambda x: BLOCKS(
        x[0], x[0], x[0], sequence_offsets=torch.tensor([0, 7, TOKENS], dtype=torch.int32, device=GPU)
    ),
    "bhsd": lambda x: block_diagonal_attention_bhsd(*[x.transpose(1, 2)] * 3, block_size=BLOCK),
    "key convolution": lambda x: key_convolution(x, torch.ones(3, 2, 64, device=GPU, dtype=x.dtype)),
    "key convolution, through JAX": lambda x: key_convolution(
        x, torch.ones(3, 2, 64, device=GPU, dtype=x.dtype), via="jax"
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_changed_in_place_is_differentiated(name):
    function, x = IN_PLACE[name], normal(2, TOKENS, 2, 64).requires_grad_()
    (expected,) = torch.autograd.grad((function(x) * 2 + 1).float().square().sum(), x)
    output = function(x)
    output *= 2
    output += 1
    (actual,) = torch.autograd.grad(output.float().square().sum(), x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("via", [None, "jax"])
def test_moba_results_are_not_views(via):
    x = normal(2, TOKENS, 2, 64).requires_grad_()
    for result in MOBA(x, x, x, return_residual=True, via=via):
        assert result._base is None
        result += 1
        # The result is kept for the backward pass, like the output of torch's own attention.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result.float().sum(), x, retain_graph=True)


def jagged():
    packed, offsets = normal(25, 2, 64), torch.tensor([0, 5, 24, 25], device=GPU)
    return packed, offsets.int(), torch.nested.nested_tensor_from_jagged(packed, offsets=offsets)


@pytest.mark.parametrize("function", [BLOCKS, MOBA], ids=["block diagonal", "moba"])
def test_jagged_tensors_are_packed_sequences(function):
    packed, offsets, x = jagged()
    expected = function(packed, packed, packed, sequence_offsets=offsets)
    torch.testing.assert_close(function(x, x, x).values(), expected, rtol=0, atol=0)


def test_strided_nested_tensors_raise_value_error():
    packed, _, x = jagged()
    strided = torch.nested.nested_tensor(list(packed.split([5, 19, 1])))
    for function in (BLOCKS, MOBA):
        with pytest.raises(
            ValueError, match=r"`query` is a nested tensor of layout torch\.strided; pass packed tokens"
        ):
            function(strided, strided, strided)
    lengths = torch.ones(3, dtype=torch.int32, device=GPU)
    pages = normal(3, 32, 2, 64)
    for query in (x, strided):
        with pytest.raises(ValueError, match="`query` is a nested tensor"):
            paged_attention(query, pages, pages, None, lengths)
