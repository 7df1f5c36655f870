"""Jagged nested tensors are packed sequences; every other nested tensor is refused with the lines that convert it."""

import functools

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from blockdiag.interop import wrap_jax  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    BlockDiagonalSelfAttention,
    MoBASelfAttention,
    Rotary,
    append_to_pages,
    block_diagonal_attention,
    block_diagonal_attention_bhsd,
    fuse,
    fused_qkv_block_attention,
    key_convolution,
    moba_attention,
    moba_paged_attention,
    moba_routing,
    paged_attention,
    rotary_tables,
)
from tests.torch.torch_support import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:.*lru_cache.*:UserWarning",
)

BLOCK = 16
LENGTHS = (5, 19, 1)
OFFSETS = torch.tensor([0, 5, 24, 25])
PACKED = OFFSETS.int()


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def jagged(packed, offsets=OFFSETS):
    return torch.nested.nested_tensor_from_jagged(packed, offsets=offsets)


def attention(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def project(x, **options):
    weights = torch.linspace(-1, 1, 6 * 48).view(6, 48)
    return fused_qkv_block_attention(x, weights, query_heads=2, key_heads=2, head_dim=8, block_size=BLOCK, **options)


def convolve(x, **options):
    return key_convolution(x, torch.linspace(-1, 1, 48).view(3, 2, 8), **options)


def of_one(function, **options):
    return lambda x, **more: function(x, x, x, **options, **more)


def modules():
    torch.manual_seed(0)
    options = {"block_size": BLOCK, "rotary_max_position": 32}
    return {
        "block diagonal module": BlockDiagonalSelfAttention(16, 2, **options),
        "MoBA module": MoBASelfAttention(16, 2, top_k=2, key_convolution_size=3, **options),
    }


# Functions of packed tokens with offsets, and the shape of a token.
FUNCTIONS = {
    "block diagonal": (of_one(block_diagonal_attention, block_size=BLOCK), (2, 8)),
    "block diagonal, rotary": (
        of_one(block_diagonal_attention, block_size=BLOCK, rotary=Rotary(*rotary_tables(32, 8))),
        (2, 8),
    ),
    "fused projection": (project, (6,)),
    "moba": (of_one(moba_attention, block_size=BLOCK, top_k=2), (2, 8)),
    "moba, not causal": (of_one(moba_attention, block_size=BLOCK, top_k=2, is_causal=False), (2, 8)),
    "key convolution": (convolve, (2, 8)),
    **{name: (module, (16,)) for name, module in modules().items()},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jagged_tensors_equal_packed_tokens(name):
    function, token = FUNCTIONS[name]
    packed = torch.randn(int(OFFSETS[-1]), *token, requires_grad=True)
    output = function(jagged(packed))
    expected = function(packed, sequence_offsets=PACKED)
    assert output.is_nested and output.layout is torch.jagged
    assert [part.shape[0] for part in output.unbind()] == list(LENGTHS)
    assert_same_bits([output.values().detach()], [expected.detach()])
    gradients = (torch.autograd.grad(x.square().sum(), packed) for x in (output.values(), expected))
    torch.testing.assert_close(*gradients)
    # A residual connection adds the input to the output.
    if output.shape[2:] == token:
        torch.testing.assert_close((output + jagged(packed, output.offsets())).values(), expected + packed)


def test_bhsd_operator_of_jagged_tensors_matches_torch_attention():
    x = jagged(torch.randn(25, 2, 8))
    output = block_diagonal_attention_bhsd(*[x.transpose(1, 2)] * 3, block_size=32)
    expected = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3)
    torch.testing.assert_close(output.transpose(1, 2).values(), expected.transpose(1, 2).values())


def test_moba_of_jagged_queries_and_keys_equals_packed_tokens():
    queries, keys = torch.randn(6, 2, 8), torch.randn(25, 2, 8)
    offsets = torch.tensor([0, 1, 4, 6])
    key = jagged(keys)
    call = functools.partial(moba_attention, block_size=BLOCK, top_k=2, return_residual=True)
    output, log_sum = call(jagged(queries, offsets), key, key)
    expected = call(queries, keys, keys, sequence_offsets=offsets.int(), key_sequence_offsets=PACKED)
    assert_same_bits([output.values(), log_sum.values()], expected)


def test_routing_of_packed_tokens_applies_to_jagged_tensors():
    packed = torch.randn(25, 2, 8)
    routing = moba_routing(packed, packed, block_size=BLOCK, top_k=1, sequence_offsets=PACKED)
    x = jagged(packed)
    options = {"block_size": BLOCK, "top_k": 1, "routing": routing}
    output = moba_attention(x, x, x, **options)
    assert_same_bits([output.values()], [moba_attention(packed, packed, packed, sequence_offsets=PACKED, **options)])


@pytest.mark.parametrize("name", ["block diagonal", "moba", "key convolution"])
def test_compiled_call_of_jagged_tensors_equals_the_eager_call(name):
    function, token = FUNCTIONS[name]
    x = jagged(torch.randn(25, *token))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits([compiled(x).values()], [function(x).values()])


def strided(*token):
    return torch.nested.nested_tensor([torch.randn(length, *token) for length in LENGTHS])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_nested_tensors_raise_value_error_with_the_conversion(name):
    function, token = FUNCTIONS[name]
    x = strided(*token)
    with pytest.raises(ValueError, match=r"is a nested tensor of layout torch\.strided; pass packed tokens") as caught:
        function(x)
    converted = converted_by(caught.value, x)
    assert_same_bits(
        [function(converted["packed"], sequence_offsets=converted["offsets"])],
        [function(torch.cat(x.unbind()), sequence_offsets=PACKED)],
    )


def converted_by(error, x):
    """Return the variables that the conversion in an error message assigns for the tensor `x`."""
    names = {"torch": torch, **dict.fromkeys(("x", "query", "key", "value", "tensor", "key_pages"), x)}
    lines = [line.strip() for line in str(error).split("\n")[1:]]
    assert len(lines) == 2
    for line in lines:
        exec(line, names)
    assert names["offsets"].dtype == torch.int32
    return names


def cache(query):
    pages = torch.randn(3, 32, 2, 8)
    return {
        "query": query, "key_pages": pages, "value_pages": pages, "page_table": None,
        "kv_lengths": torch.tensor([5, 20, 1], dtype=torch.int32),
    }  # fmt: skip


REFUSING = {
    "moba_routing": lambda x: moba_routing(x, x, block_size=BLOCK, top_k=2),
    "paged_attention": lambda x: paged_attention(**cache(x)),
    "moba_paged_attention": lambda x: moba_paged_attention(
        **cache(x), key_centroids=torch.randn(3, 2, 2, 8), block_size=BLOCK, top_k=2
    ),
    "append_to_pages": lambda x: append_to_pages(
        x, x, *torch.zeros(2, 3, 32, 2, 8), None, torch.tensor([5, 20, 1]).int()
    ),
    "fuse": lambda x: fuse(attention)(x, x, x),
    "fuse, kernels": lambda x: fuse(attention, implementation="triton")(x, x, x),
    "wrap_jax": lambda x: wrap_jax(jnp.sin)(x),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSING)
def test_functions_without_nested_support_raise_value_error_with_the_conversion(name):
    packed = torch.randn(25, 2, 8)
    for x in (jagged(packed), torch.nested.nested_tensor(list(packed.split(LENGTHS)))):
        with pytest.raises(ValueError, match=r"is (a nested tensor|nested)") as caught:
            REFUSING[name](x)
        converted = converted_by(caught.value, x)
        assert_same_bits([converted["packed"], converted["offsets"]], [packed, PACKED])


def test_invalid_jagged_tensors_raise_value_error():
    packed = torch.randn(25, 2, 8)
    x, plain = jagged(packed), torch.randn(3, 19, 2, 8)
    call = functools.partial(block_diagonal_attention, block_size=BLOCK)
    moba = functools.partial(moba_attention, block_size=BLOCK, top_k=2)
    with pytest.raises(ValueError, match="must be None where `query` is a nested tensor"):
        call(x, x, x, sequence_offsets=PACKED)
    with pytest.raises(ValueError, match="must be None where `query` is a nested tensor"):
        call(x, x, x, block_lengths=torch.tensor([5, 16, 3, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="must be None where `x` is a nested tensor"):
        modules()["MoBA module"](jagged(torch.randn(25, 16)), sequence_offsets=PACKED)
    for function in (call, moba):
        with pytest.raises(ValueError, match="`value` must be nested as the other tensors are, got a plain tensor"):
            function(x, x, plain)
        with pytest.raises(ValueError, match="`query` must be nested as the other tensors are, got a plain tensor"):
            function(plain, x, x)
        other = jagged(packed, OFFSETS.clone())
        with pytest.raises(ValueError, match=r"`value` must have the offsets of `(query|key)`"):
            function(x, x, other)
    with pytest.raises(ValueError, match="a nested tensor that is transposed or has holes"):
        call(*[x.transpose(1, 2)] * 3)
    holes = torch.nested.narrow(plain, 1, torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), layout=torch.jagged)
    with pytest.raises(ValueError, match="a nested tensor that is transposed or has holes") as caught:
        call(holes, holes, holes)
    assert converted_by(caught.value, holes)["offsets"].tolist() == [0, 3, 7, 12]
