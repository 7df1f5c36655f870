"""torch.func transforms of the torch functions, alone and nested."""

import functools

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

from blockdiag.interop import wrap_jax  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    BlockDiagonalSelfAttention,
    MoBASelfAttention,
    Rotary,
    block_diagonal_attention,
    block_diagonal_attention_bhsd,
    fuse,
    fused_qkv_block_attention,
    key_convolution,
    merge_attention_states,
    moba_attention,
    moba_paged_attention,
    moba_routing,
    paged_attention,
    rotary_tables,
)

BLOCK = 16
TOKENS = 20

# torch raises these warnings for its first tangent.
TANGENT_WARNINGS = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def plain_attention(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / 4.0
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def by_given_routing(query, key, value):
    routing = moba_routing(query, key, block_size=BLOCK, top_k=2)
    return moba_attention(query, key, value, block_size=BLOCK, top_k=2, routing=routing)


def rotated(query, key, value):
    return block_diagonal_attention(query, key, value, block_size=BLOCK, rotary=Rotary(*rotary_tables(TOKENS, 8)))


def projected(x, weights, bias):
    options = {"query_heads": 2, "key_heads": 2, "head_dim": 8, "block_size": BLOCK}
    return fused_qkv_block_attention(x, weights, bias, **options)


def packed(function, *operands, **options):
    """Call `function` on one batch row as packed sequences."""
    offsets = torch.tensor([0, 7, TOKENS], dtype=torch.int32)
    return function(*(x[0] for x in operands), sequence_offsets=offsets, **options)[None]


def q_k_v(rows=1):
    return tuple(torch.randn(3, rows, TOKENS, 2, 8).unbind())


def projection(rows=1):
    return torch.randn(rows, TOKENS, 6), torch.randn(6, 48), torch.randn(48)


def convolved(rows=1):
    return torch.randn(rows, TOKENS, 2, 8), torch.randn(3, 2, 8)


MOBA = functools.partial(moba_attention, block_size=BLOCK, top_k=2)
BLOCKS = functools.partial(block_diagonal_attention, block_size=BLOCK)
# Each case: a function, a maker of its operands, and the number of leading operands that have batch rows.
FUNCTIONS = {
    "block diagonal": (BLOCKS, q_k_v, 3),
    "block diagonal, rotary": (rotated, q_k_v, 3),
    "block diagonal, packed": (functools.partial(packed, BLOCKS), q_k_v, 3),
    "block diagonal, bhsd": (
        functools.partial(block_diagonal_attention_bhsd, block_size=BLOCK),
        lambda rows=1: tuple(x.transpose(1, 2).contiguous() for x in q_k_v(rows)),
        3,
    ),
    "fused projection": (projected, projection, 1),
    "moba": (MOBA, q_k_v, 3),
    "moba, log-sum-exp": (lambda q, k, v: MOBA(q, k, v, return_residual=True)[1], q_k_v, 3),
    "moba, packed": (functools.partial(packed, MOBA), q_k_v, 3),
    "moba, given routing": (by_given_routing, q_k_v, 3),
    "key convolution": (key_convolution, convolved, 1),
    "fuse": (fuse(plain_attention), q_k_v, 3),
    "wrap_jax": (wrap_jax(plain_attention), q_k_v, 3),
}


def loss(function, *operands):
    """Sum the output with a different weight for each element."""
    output = function(*operands)
    return (output * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).sum()


def gradients_of_autograd(function, operands):
    leaves = [x.detach().requires_grad_() for x in operands]
    return torch.autograd.grad(loss(function, *leaves), leaves)


def assert_close(actual, expected):
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad_and_vjp_give_the_gradients_of_autograd(name):
    function, make, _ = FUNCTIONS[name]
    operands = make()
    argnums = tuple(range(len(operands)))
    expected = gradients_of_autograd(function, operands)
    assert_close(grad(functools.partial(loss, function), argnums)(*operands), expected)
    _, pull_back = vjp(functools.partial(loss, function), *operands)
    assert_close(pull_back(torch.ones(())), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_inside_and_outside_of_grad_gives_gradients_of_each_row(name):
    function, make, mapped = FUNCTIONS[name]
    operands = make(3)
    argnums = tuple(range(len(operands)))
    rows = [x[:, None] if place < mapped else x for place, x in enumerate(operands)]
    in_dims = tuple(0 if place < mapped else None for place in argnums)
    of_one = functools.partial(loss, function)
    singly = [[x[index] if place < mapped else x for place, x in enumerate(rows)] for index in range(3)]
    expected = [gradients_of_autograd(function, one) for one in singly]
    stacked = [torch.stack(parts) for parts in zip(*expected, strict=True)]
    assert_close(vmap(grad(of_one, argnums), in_dims)(*rows), stacked)

    def total(*operands):
        return vmap(of_one, in_dims)(*operands).sum()

    # The gradient of an operand that all rows share is the sum over rows.
    joint = [x if place < mapped else x.sum(0) for place, x in enumerate(stacked)]
    assert_close(grad(total, argnums)(*rows), joint)
    leaves = [x.clone().requires_grad_() for x in rows]
    total(*leaves).backward()
    assert_close([x.grad for x in leaves], joint)


@pytest.mark.parametrize("name", ["block diagonal", "moba", "key convolution", "fuse"])
def test_jacrev_gives_the_jacobian_of_autograd(name):
    function, make, _ = FUNCTIONS[name]
    operands = tuple(x[..., :3, :1, :2] for x in make())
    argnums = tuple(range(len(operands)))

    def outputs(*operands):
        return function(*operands)[:, 1:].flatten()

    assert_close(
        jacrev(outputs, argnums)(*operands), torch.autograd.functional.jacobian(outputs, operands, vectorize=False)
    )


MODULES = {
    "block diagonal": lambda: BlockDiagonalSelfAttention(16, 2, block_size=BLOCK, rotary_max_position=TOKENS),
    "moba": lambda: MoBASelfAttention(16, 2, block_size=BLOCK, top_k=2, key_convolution_size=3, rotary_max_position=64),
}


@pytest.mark.parametrize("name", MODULES)
def test_per_sample_gradients_of_module_parameters_match_autograd(name):
    module = MODULES[name]()
    parameters = dict(module.named_parameters())
    samples = torch.randn(3, TOKENS, 16)

    def of_one(parameters, sample):
        return functional_call(module, parameters, (sample[None],)).square().sum()

    found = vmap(grad(of_one), (None, 0))(parameters, samples)
    for index, sample in enumerate(samples):
        module.zero_grad()
        module(sample[None]).square().sum().backward()
        for key, parameter in parameters.items():
            torch.testing.assert_close(found[key][index], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["block diagonal", "moba", "key convolution"])
def test_grad_inside_a_compiled_function_matches_the_eager_call(name):
    function, make, _ = FUNCTIONS[name]
    operands = make()
    gradient = grad(functools.partial(loss, function))
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    assert_close([compiled(*operands)], [gradient(*operands)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_raise_not_implemented_error(name):
    function, make, _ = FUNCTIONS[name]
    inner = grad(functools.partial(loss, function))
    with pytest.raises(NotImplementedError, match=r"second derivatives of .* not available in torch"):
        grad(lambda *operands: inner(*operands).square().sum())(*make())


@TANGENT_WARNINGS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_raises_not_implemented_error(name):
    function, make, _ = FUNCTIONS[name]
    operands = make()
    for derivative in (
        lambda: jvp(function, operands, operands),
        lambda: jacfwd(lambda x: function(x, *operands[1:]))(operands[0]),
        lambda: jacfwd(grad(functools.partial(loss, function)))(*operands),
    ):
        with pytest.raises(NotImplementedError, match=r"forward-mode derivatives of .* not available in torch"):
            derivative()


def cache():
    pages = {name: torch.randn(2, TOKENS, 2, 8) for name in ("key_pages", "value_pages")}
    lengths = torch.tensor([1, TOKENS], dtype=torch.int32)
    return {"query": torch.randn(2, 1, 4, 8), "page_table": None, "kv_lengths": lengths} | pages


INFERENCE = {
    "paged_attention": (paged_attention, cache),
    "moba_paged_attention": (
        functools.partial(moba_paged_attention, block_size=BLOCK, top_k=2),
        lambda: cache() | {"key_centroids": torch.randn(2, 2, 2, 8)},
    ),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_functions_support_vmap_and_raise_type_error_under_grad(name):
    function, make = INFERENCE[name]
    arguments = make()
    query = torch.stack([arguments.pop("query"), torch.randn(2, 1, 4, 8)])
    mapped = vmap(lambda query: function(query, **arguments))(query)
    torch.testing.assert_close(mapped, torch.stack([function(x, **arguments) for x in query]), rtol=0, atol=0)
    with pytest.raises(TypeError, match=f"{name} is for inference and cannot be differentiated"):
        grad(lambda query: function(query, **arguments).sum())(query[0])


def test_grad_of_merged_states_matches_autograd():
    outputs, lses = torch.randn(2, 3, 8), torch.randn(2, 3)
    expected = gradients_of_autograd(lambda *x: merge_attention_states(*x)[0], (outputs, lses))
    assert_close(
        grad(functools.partial(loss, lambda *x: merge_attention_states(*x)[0]), (0, 1))(outputs, lses), expected
    )


def test_batched_cotangents_in_autograd_match_single_cotangents():
    function, make, _ = FUNCTIONS["moba"]
    leaves = [x.requires_grad_() for x in make()]
    output = function(*leaves)
    cotangents = torch.randn(3, *output.shape)
    together = torch.autograd.grad(output, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(output, leaves, x, retain_graph=True) for x in cotangents]
    assert_close(together, [torch.stack(x) for x in zip(*singly, strict=True)])


def test_vmap_over_an_empty_axis_and_functionalize_raise_not_implemented_error():
    query = torch.randn(1, TOKENS, 2, 8)
    for function in (BLOCKS, fuse(plain_attention)):
        with pytest.raises(NotImplementedError, match="cannot be mapped over an axis of size 0"):
            vmap(lambda x, function=function: function(x, x, x))(torch.zeros(0, 1, TOKENS, 2, 8))
    with pytest.raises(NotImplementedError, match=r"functionalize does not support blockdiag::block_diagonal_forward"):
        torch.func.functionalize(lambda x: BLOCKS(x, x, x))(query)


def test_integer_results_of_wrap_jax_have_no_gradient_under_grad():
    function = wrap_jax(lambda x: (x * x, jnp.argmax(x)))
    gradient, index = grad(lambda x: (function(x)[0].sum(), function(x)[1]), has_aux=True)(torch.tensor([1.0, 3.0]))
    assert gradient.tolist() == [2.0, 6.0] and index.item() == 1
