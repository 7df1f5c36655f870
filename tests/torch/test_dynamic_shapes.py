"""Dynamic token axes of every torch operator in torch.compile and torch.export."""

import functools

import pytest

torch = pytest.importorskip("torch")

from blockdiag.ops.moba.checks import count_packed_blocks, count_slots  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    BlockDiagonalSelfAttention,
    MoBASelfAttention,
    Rotary,
    append_to_pages,
    block_diagonal_attention,
    block_diagonal_attention_bhsd,
    fused_qkv_block_attention,
    key_convolution,
    merge_attention_states,
    moba_attention,
    moba_paged_attention,
    moba_routing,
    paged_attention,
    rotary_tables,
)
from blockdiag.torch.ops.moba.operators import symbolic_packed_blocks, symbolic_slots  # noqa: E402
from tests.torch.torch_support import assert_same_bits  # noqa: E402

BLOCK, TOP_K = 16, 3
# Numbers of tokens that need 1, k + 1 and k blocks, where k is `TOP_K`.
LENGTHS = (BLOCK - 1, TOP_K * BLOCK + 1, TOP_K * BLOCK)
MOST_TOKENS = 128
TABLES = rotary_tables(MOST_TOKENS, 8)

pytestmark = [
    # torch raises these: export for its tree of submodules, and torch.jit when it looks up a function.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(tokens, heads=2):
    return torch.randn(2, tokens, heads, 8)


def packed(tokens, heads=2):
    return torch.randn(tokens, heads, 8)


def offsets(tokens):
    """Return the offsets of two sequences, followed by a row that belongs to neither."""
    return torch.tensor([0, tokens // 3, tokens - 1], dtype=torch.int32)


def self_attention(make):
    return lambda tokens: {"query": make(tokens, 4), "key": make(tokens), "value": make(tokens)}


def with_tensors(make, **more):
    return lambda tokens: make(tokens) | {name: maker(tokens) for name, maker in more.items()}


BATCH, PACKED = self_attention(batch), self_attention(packed)
BLOCKS = functools.partial(block_diagonal_attention, block_size=BLOCK)
MOBA = functools.partial(moba_attention, block_size=BLOCK, top_k=TOP_K)


def rotated(query, key, value, positions=None):
    return BLOCKS(query, key, value, rotary=Rotary(*TABLES, positions=positions), is_causal=True)


def by_given_routing(query, key, value, **options):
    routing = moba_routing(query, key, block_size=BLOCK, top_k=TOP_K, **options)
    return MOBA(query, key, value, routing=routing, **options)


def indices_of_routing(query, key, **options):
    return moba_routing(query, key, block_size=BLOCK, top_k=TOP_K, **options).indices


def cache(tokens):
    """Return queries and a contiguous cache of `tokens` tokens for each of two sequences."""
    pages = {name: torch.randn(2, tokens, 2, 8) for name in ("key_pages", "value_pages")}
    return {"query": torch.randn(2, 1, 4, 8)} | pages | {"kv_lengths": torch.tensor([1, tokens], dtype=torch.int32)}


def pages(tokens):
    """Return queries and a pool of `tokens` pages."""
    pool = {name: torch.randn(tokens, 4, 2, 8) for name in ("key_pages", "value_pages")}
    table = torch.tensor([[0, 1, 2], [3, 4, 0]], dtype=torch.int32)
    return {"query": torch.randn(2, 1, 4, 8), "page_table": table, "kv_lengths": torch.tensor([9, 3]).int()} | pool


def packed_queries(tokens):
    """Return a contiguous cache and `tokens` rows of packed queries."""
    rows = torch.tensor([0, 3, 5], dtype=torch.int32)
    return cache(20) | {"query": torch.randn(tokens, 4, 8), "query_offsets": rows}


def centroids(tokens):
    return torch.randn(2, -(-tokens // BLOCK), 2, 8)


def appended(key, value, key_pages, value_pages, kv_lengths, **more):
    """Append to copies of the pages and return the copies."""
    written = [x.clone() for x in (key_pages, value_pages)]
    append_to_pages(key, value, *written, None, kv_lengths, **more)
    return tuple(written)


def new_tokens(tokens):
    new = {name: torch.randn(2, tokens, 2, 8) for name in ("key", "value")}
    whole = cache(MOST_TOKENS)
    del whole["query"]
    return new | whole | {"kv_lengths": torch.tensor([tokens, MOST_TOKENS], dtype=torch.int32)}


def merged(outputs, lses):
    return merge_attention_states(outputs, lses)


def attend_in_pages(function, **options):
    return lambda page_table=None, **tensors: function(page_table=page_table, **tensors, **options)


def project(x, weights):
    options = {"query_heads": 4, "key_heads": 2, "head_dim": 8, "block_size": BLOCK}
    return fused_qkv_block_attention(x, weights, **options)


def bhsd(query, key, value):
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return block_diagonal_attention_bhsd(query, key, value, block_size=BLOCK)


def lengths_of_blocks(tokens):
    return torch.tensor([BLOCK - 1, 0], dtype=torch.int32)


def positions(tokens):
    return torch.arange(tokens, dtype=torch.int32).flip(0)


def key_mask(tokens):
    return torch.arange(2 * tokens).reshape(2, tokens) % 3 != 0


def more_keys(tokens):
    return {"query": batch(BLOCK + 1, 4), "key": batch(tokens), "value": batch(tokens)}


def more_packed_keys(tokens):
    rows = {"query": packed(BLOCK, 4), "key": packed(tokens), "value": packed(tokens)}
    return rows | {"sequence_offsets": offsets(BLOCK), "key_sequence_offsets": offsets(tokens)}


# Each case: a function, a maker of its tensors for a number of tokens, and whether it is differentiated.
CALLS = {
    "block diagonal": (BLOCKS, BATCH, True),
    "block diagonal, causal": (functools.partial(BLOCKS, is_causal=True, scale=0.3), BATCH, True),
    "block diagonal, offsets": (BLOCKS, with_tensors(PACKED, sequence_offsets=offsets), True),
    "block diagonal, lengths": (BLOCKS, with_tensors(PACKED, block_lengths=lengths_of_blocks), True),
    "block diagonal, rotary": (rotated, BATCH, True),
    "block diagonal, rotary by position": (rotated, with_tensors(PACKED, positions=positions), True),
    "block diagonal, bhsd": (bhsd, BATCH, True),
    "fused projection": (
        project,
        lambda tokens: {"x": torch.randn(2, tokens, 12), "weights": torch.randn(12, 64)},
        True,
    ),
    "moba": (MOBA, BATCH, True),
    "moba, with log-sum-exp": (functools.partial(MOBA, return_residual=True), BATCH, True),
    "moba, not causal": (functools.partial(MOBA, is_causal=False), BATCH, False),
    "moba, top_k 1": (functools.partial(MOBA, top_k=1), BATCH, False),
    "moba, key mask": (MOBA, with_tensors(BATCH, key_mask=key_mask), False),
    "moba, offsets": (MOBA, with_tensors(PACKED, sequence_offsets=offsets), True),
    "moba, offsets, not causal": (
        functools.partial(MOBA, is_causal=False),
        with_tensors(PACKED, sequence_offsets=offsets),
        False,
    ),
    "moba, more keys than queries": (MOBA, more_keys, False),
    "moba, offsets of keys": (MOBA, more_packed_keys, False),
    "moba, given routing": (by_given_routing, BATCH, True),
    "moba, given routing, not causal": (functools.partial(by_given_routing, is_causal=False), BATCH, False),
    "moba routing": (
        indices_of_routing,
        lambda tokens: {"query": packed(tokens, 4), "key": packed(tokens), "sequence_offsets": offsets(tokens)},
        False,
    ),
    "key convolution": (
        key_convolution,
        lambda tokens: {"key": batch(tokens), "weights": torch.randn(3, 2, 8)},
        True,
    ),
    "key convolution, offsets": (
        functools.partial(key_convolution, activation=None, residual=False),
        lambda tokens: {
            "key": packed(tokens), "weights": torch.randn(3, 2, 8), "sequence_offsets": offsets(tokens)
        },
        True,
    ),
    "paged, contiguous": (attend_in_pages(paged_attention, key_scale=2.0), cache, False),
    "paged": (attend_in_pages(paged_attention, local_window_size=5), pages, False),
    "paged, packed queries": (attend_in_pages(paged_attention), packed_queries, False),
    "moba paged": (
        attend_in_pages(moba_paged_attention, block_size=BLOCK, top_k=TOP_K),
        with_tensors(cache, key_centroids=centroids),
        False,
    ),
    "append": (appended, new_tokens, False),
    "merge": (
        merged,
        lambda tokens: {"outputs": torch.randn(2, tokens, 2, 8), "lses": torch.randn(2, tokens, 2)},
        True,
    ),
}  # fmt: skip


def results(function, tensors, *, is_differentiated):
    """Return the outputs and, if differentiated, the gradients of all floating tensors.

    The cotangents are the outputs.
    """
    if not is_differentiated:
        with torch.no_grad():
            outputs = function(**tensors)
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x.is_floating_point()}
    outputs = function(**tensors | leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [x.detach() for x in outputs])
    return [*(x.detach() for x in outputs), *gradients]


# Other compiled calls cover each part of these, and every call is exported.
COVERED = ("moba, with log-sum-exp", "moba, offsets, not causal", "moba, given routing, not causal", "moba, top_k 1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in COVERED else []) for name in CALLS]
)
def test_compiled_call_of_new_lengths_equals_the_eager_call(name):
    """By default the first length is static, and the second one makes the axis dynamic."""
    function, make, is_differentiated = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for tokens in LENGTHS:
        tensors = make(tokens)
        actual, expected = (results(one, tensors, is_differentiated=is_differentiated) for one in (compiled, function))
        assert_same_bits(actual, expected)


class Exported(torch.nn.Module):
    """A module that calls a function of tensors, because torch.export takes a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, tensors):
        return self.function(**tensors)


def open_axes(make):
    """Return the dynamic axes for torch.export: those that grow with the tokens."""
    few, many = make(LENGTHS[0]), make(LENGTHS[1])
    tokens = torch.export.Dim("tokens", min=2, max=MOST_TOKENS)
    return {
        name: {
            axis: tokens if size == LENGTHS[0] else torch.export.Dim.DYNAMIC
            for axis, size in enumerate(x.shape)
            if many[name].shape[axis] != size
        }
        for name, x in few.items()
    }


@pytest.mark.parametrize("name", CALLS)
def test_exported_call_of_any_length_equals_the_eager_call(name):
    """One exported program serves all lengths: none may become a constant or split the range."""
    function, make, _ = CALLS[name]
    tensors = make(LENGTHS[1])
    program = torch.export.export(Exported(function), (tensors,), dynamic_shapes=({**open_axes(make)},))
    module = program.module()
    for tokens in LENGTHS:
        tensors = make(tokens)
        with torch.no_grad():
            actual, expected = module(tensors), function(**tensors)
        if isinstance(expected, torch.Tensor):
            actual, expected = [actual], [expected]
        assert_same_bits(actual, expected)


MODULES = {
    "block diagonal": lambda: BlockDiagonalSelfAttention(16, 2, block_size=BLOCK, rotary_max_position=MOST_TOKENS),
    "moba": lambda: MoBASelfAttention(
        16, 2, block_size=BLOCK, top_k=TOP_K, key_convolution_size=3, rotary_max_position=MOST_TOKENS
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_compiled_and_exported_modules_of_any_length_match_the_eager_module(name):
    module = MODULES[name]()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    tokens = torch.export.Dim("tokens", min=2, max=MOST_TOKENS)
    exported = torch.export.export(module, (torch.ones(1, 40, 16),), dynamic_shapes=({1: tokens},)).module()
    for length in LENGTHS:
        x = torch.randn(1, length, 16)
        with torch.no_grad():
            expected = module(x)
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(exported(x), expected)


def test_symbolic_counts_equal_integer_counts():
    for size in range(70):
        for top_k in (1, 2, 64):
            for is_causal in (False, True):
                assert symbolic_slots(top_k, size, is_causal) == count_slots(top_k, size, is_causal)
        for num_sequences in range(5):
            expected = count_packed_blocks(size, num_sequences, BLOCK)
            assert symbolic_packed_blocks(size, num_sequences, BLOCK) == expected


def test_compiled_call_with_changing_options_equals_the_eager_call():
    """torch.compile replaces number arguments by symbols when their values change."""
    x = torch.randn(40, 2, 8)

    def function(x, block_size, top_k, scale):
        return moba_attention(x, x, x, block_size=block_size, top_k=top_k, scale=scale)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for options in ((16, 2, 0.5), (32, 3, 0.25), (16, 1, 0.125)):
        assert_same_bits([compiled(x, *options)], [function(x, *options)])
