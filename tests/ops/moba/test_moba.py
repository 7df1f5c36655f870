"""MoBA attention: values and gradients against a dense computation, limiting cases, and mistakes of the caller."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import Routing, block_diagonal_attention, moba_attention, moba_routing
from blockdiag.common.dispatch import capabilities, resolve
from blockdiag.ops.moba.checks import describe_moba_call
from blockdiag.ops.moba.problem import MOBA
from tests.ops.moba_cases import MoBACase, assert_accurate, compiled_call, dense_results
from tests.support import compiled_quickly

ARRAY_IMPLEMENTATIONS = ("reference", "xla")

CASES = {
    "two sequences": MoBACase(lengths=(64, 64)),
    "shorter than a block": MoBACase(lengths=(5, 5)),
    "one token": MoBACase(lengths=(1,)),
    "own block only": MoBACase(lengths=(55,), top_k=1),
    "all blocks": MoBACase(lengths=(55,), top_k=9),
    "grouped heads": MoBACase(lengths=(50,), query_heads=4, key_heads=2, top_k=2),
    "one key head, scale": MoBACase(lengths=(50,), query_heads=3, key_heads=1, scale=0.7),
    "bfloat16": MoBACase(lengths=(70,), dtype="bfloat16", head_dim=16),
    "float16, grouped": MoBACase(lengths=(70,), dtype="float16", query_heads=2, key_heads=1),
    "block of 48": MoBACase(lengths=(130,), block_size=48, top_k=2),
    "one query, more keys": MoBACase(lengths=(1, 1), key_lengths=(61, 61)),
    "more queries": MoBACase(lengths=(61,), key_lengths=(37,), top_k=2),
    "key mask": MoBACase(lengths=(61, 61), mask=0.5),
    "key mask, most": MoBACase(lengths=(75,), mask=0.97, query_heads=2, key_heads=1),
    "all masked": MoBACase(lengths=(40,), mask=1.0),
    "not causal": MoBACase(lengths=(61, 61), is_causal=False, top_k=2),
    "not causal, more keys, masked": MoBACase(
        lengths=(7,), key_lengths=(61,), is_causal=False, top_k=2, mask=0.6, query_heads=4
    ),
    "not causal, all blocks": MoBACase(lengths=(40,), is_causal=False, top_k=64),
    "packed": MoBACase(lengths=(37, 0, 1, 50, 16), layout="offsets", padding=9, top_k=2),
    "packed, more keys": MoBACase(
        lengths=(7, 5, 0, 30), key_lengths=(40, 0, 9, 35), layout="offsets", padding=3, query_heads=4, mask=0.3
    ),
    "packed, fewer keys": MoBACase(lengths=(40, 20), key_lengths=(20, 33), layout="offsets", top_k=2),
    "packed, not causal": MoBACase(lengths=(37, 0, 40), layout="offsets", padding=4, is_causal=False, top_k=2),
    "packed, all empty": MoBACase(lengths=(0, 0), layout="offsets", padding=20),
    "packed, no sequences": MoBACase(lengths=(), layout="offsets", padding=20),
    "no tokens": MoBACase(lengths=(0, 0)),
    "no keys": MoBACase(lengths=(5,), key_lengths=(0,)),
    "no queries": MoBACase(lengths=(0,), key_lengths=(5,)),
}


@functools.cache
def expected_results(name: str) -> tuple[np.ndarray, ...]:
    return dense_results(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_default_implementation_is_accurate(name):
    assert_accurate(CASES[name], CASES[name].results(None), expected_results(name))


@pytest.mark.parametrize("name", ["grouped heads", "key mask", "not causal", "packed, more keys", "no keys"])
def test_reference_is_accurate(name):
    assert_accurate(CASES[name], CASES[name].results("reference"), expected_results(name))


@pytest.mark.skipif(MOBA.implementations["triton"].why_unavailable() is not None, reason="needs Triton")
@pytest.mark.parametrize(
    "case",
    [
        MoBACase(lengths=(40, 40), head_dim=16, query_heads=2, key_heads=1),
        MoBACase(lengths=(37, 0, 20), layout="offsets", padding=3, head_dim=16, mask=0.3, dtype="bfloat16"),
        MoBACase(lengths=(9,), key_lengths=(40,), head_dim=16, is_causal=False, top_k=2),
    ],
)
def test_interpreted_kernels_are_accurate(case):
    assert_accurate(case, case.results("triton"), dense_results(case))


@st.composite
def cases(draw) -> MoBACase:
    """Draw any call of a few blocks."""
    layout = draw(st.sampled_from(["batch", "offsets"]))
    length = st.one_of(st.sampled_from([0, 1, 16]), st.integers(0, 50))
    lengths = (
        (draw(length),) * draw(st.integers(1, 2)) if layout == "batch" else tuple(draw(st.lists(length, max_size=4)))
    )
    key_lengths = None
    if draw(st.booleans()):
        other = draw(length)
        key_lengths = tuple(other if layout == "batch" else draw(length) for _ in lengths)
    key_heads = draw(st.integers(1, 2))
    return MoBACase(
        lengths=lengths,
        key_lengths=key_lengths,
        layout=layout,
        padding=0 if layout == "batch" else draw(st.integers(0, 20)),
        query_heads=key_heads * draw(st.integers(1, 2)),
        key_heads=key_heads,
        top_k=draw(st.integers(1, 4)),
        is_causal=draw(st.booleans()),
        mask=draw(st.sampled_from([None, 0.5])),
    )


@hypothesis.settings(max_examples=8)
@hypothesis.given(case=cases())
def test_drawn_cases_are_accurate(case):
    assert_accurate(case, case.results("xla"), dense_results(case))


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["grouped heads", "packed, more keys"])
def test_float64_results_are_accurate(implementation, name):
    case = dataclasses.replace(CASES[name], dtype="float64")
    with jax.enable_x64(True):
        assert_accurate(case, case.results(implementation), dense_results(case))


@pytest.mark.parametrize("name", ["key mask", "packed"])
def test_results_with_x64_enabled_are_accurate(name):
    with jax.enable_x64(True):
        assert_accurate(CASES[name], CASES[name].results("xla"), expected_results(name))


def test_top_k_of_one_matches_block_diagonal_attention():
    query, key, value, *_ = MoBACase(lengths=(55,), query_heads=4).operands()
    np.testing.assert_allclose(
        moba_attention(query, key, value, block_size=16, top_k=1),
        block_diagonal_attention(query, key, value, block_size=16, is_causal=True),
        rtol=1e-5,
        atol=1e-5,
    )


def test_top_k_of_all_blocks_matches_causal_attention():
    query, key, value, *_ = MoBACase(lengths=(55, 55), query_heads=4).operands()
    np.testing.assert_allclose(
        moba_attention(query, key, value, block_size=16, top_k=4),
        jax.nn.dot_product_attention(query, key, value, is_causal=True),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rank_three_is_one_sequence():
    query, key, value, *_ = MoBACase(lengths=(55,)).operands()
    attend = functools.partial(moba_attention, block_size=16, top_k=2)
    np.testing.assert_array_equal(attend(query[0], key[0], value[0]), attend(query, key, value)[0])


def test_traced_offsets_are_clipped():
    case = MoBACase(lengths=(60,), layout="offsets")
    query, key, value, *_ = case.operands()
    attend = functools.partial(moba_attention, query, key, value, block_size=16, top_k=2)
    wild = compiled_quickly(lambda offsets: attend(sequence_offsets=offsets))(jnp.asarray([-5, 30, 20, 99], jnp.int32))
    tame = attend(sequence_offsets=jnp.asarray([0, 30, 30, 60], jnp.int32))
    np.testing.assert_allclose(wild, tame, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_sequence_and_behind_the_mask(implementation, poison):
    """NaN or infinity in one sequence, in padding and in masked keys changes no bit elsewhere."""
    case = MoBACase(lengths=(40, 33, 20), layout="offsets", padding=6, mask=0.4, top_k=2)
    operands = case.operands()
    is_bad = np.zeros(99, bool)
    is_bad[40:73] = is_bad[93:] = True
    bad_keys = is_bad | ~case.key_mask()
    compute = functools.partial(compiled_call(case, implementation), None)
    clean = compute(*operands)
    bad_rows = (is_bad, bad_keys, bad_keys, is_bad, is_bad)
    dirty = compute(
        *(
            jnp.where(bad.reshape(-1, *[1] * (x.ndim - 1)), jnp.asarray(poison, x.dtype), x)
            for bad, x in zip(bad_rows, operands, strict=True)
        )
    )
    for before, after, bad in zip(clean, dirty, (is_bad, is_bad, is_bad, bad_keys, bad_keys), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[~bad], np.asarray(after)[~bad])
    for gradient in dirty[3:]:
        assert not np.asarray(gradient)[~case.key_mask()].any(), "masked keys must have zero gradients"
    assert not np.asarray(dirty[0])[93:].any() and np.isneginf(dirty[1][93:]).all()


@pytest.mark.parametrize("name", ["grouped heads", "packed, more keys"])
def test_repeated_calls_agree_bitwise(name):
    case = CASES[name]
    for first, second in zip(case.results(None), case.results(None), strict=True):
        np.testing.assert_array_equal(first, second)


def test_residual_is_returned_on_request_only():
    query, key, value, *_ = MoBACase(lengths=(20,)).operands()
    attend = functools.partial(moba_attention, query, key, value, block_size=16, top_k=2)
    output, log_sum = attend(return_residual=True)
    assert isinstance(attend(), jax.Array) and log_sum.shape == output.shape[:-1]


# --- who computes it ----------------------------------------------------------------------------------------------


def problem_of(**changes):
    query, key, *_ = MoBACase(lengths=(64,), head_dim=64, dtype="bfloat16").operands()
    arguments = dict(scale=None, is_causal=True, sequence_offsets=None, key_sequence_offsets=None, key_mask=None)
    problem = describe_moba_call(query, key, block_size=16, top_k=2, **arguments)
    return dataclasses.replace(problem, **changes)


def test_capabilities_list_the_implementations_of_moba():
    assert set(capabilities(problem_of())) == {"reference", "xla", "triton"}
    for problem in (problem_of(), problem_of(dtype="float64"), problem_of(head_dim=7)):
        reasons = capabilities(problem)
        assert reasons["reference"] is None and reasons["xla"] is None
    assert resolve(problem_of(), None).elsewhere.name == "xla"
    assert resolve(problem_of(dtype="float64"), None).cuda.name == "xla"
    assert resolve(problem_of(num_blocks=0, dtype="float64"), ("triton",)).elsewhere.name == "reference"


def test_unsupported_implementation_raises_not_implemented_error():
    query = jnp.zeros((20, 1, 7))
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot compute this call"):
        moba_attention(query, query, query, block_size=16, top_k=2, implementation="triton")


def test_slots_follow_from_top_k_and_the_keys():
    """There are no slots for blocks that no sequence can have. A given routing has one slot for each index."""
    query, key = jnp.zeros((40, 1, 8)), jnp.zeros((40, 1, 8))
    arguments = dict(scale=None, sequence_offsets=None, key_sequence_offsets=None, key_mask=None, block_size=16)
    slots = {
        (top_k, is_causal): describe_moba_call(query, key, top_k=top_k, is_causal=is_causal, **arguments).slots
        for top_k in (1, 2, 9)
        for is_causal in (True, False)
    }
    assert slots == {(1, True): 0, (2, True): 1, (9, True): 2, (1, False): 1, (2, False): 2, (9, False): 3}
    routing = Routing(jnp.zeros((40, 1, 2), jnp.int32), 16, 3)
    given = describe_moba_call(query, key, top_k=2, is_causal=True, routing=routing, **arguments)
    assert given.slots == 2


# --- mistakes -----------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def offsets(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


QUERY, KEY = zeros(20, 4, 8), zeros(30, 2, 8)
GOOD_ROUTING = Routing(zeros(20, 4, 2, dtype=jnp.int32), 16, 2)
PACKED = dict(sequence_offsets=offsets(0, 20), key_sequence_offsets=offsets(0, 30))

SHARED_MISTAKES = {
    "rank 2": (dict(query=zeros(20, 8)), r"`query` must have shape \[B, T, N, H\] .* got \(20, 8\); reshape"),
    "zero heads": (dict(query=zeros(20, 0, 8)), "`query` must have at least one head"),
    "zero head dimension": (dict(query=zeros(20, 4, 0)), "`query` must have at least one head"),
    "key head dimension": (dict(key=zeros(30, 2, 16)), r"`key` must have shape \(S, K, 8\) .* got \(30, 2, 16\)"),
    "key rank": (dict(key=zeros(1, 30, 2, 8)), r"`key` must have shape \(S, K, 8\)"),
    "key batch": (dict(query=zeros(3, 20, 4, 8), key=zeros(2, 30, 2, 8)), r"`key` must have shape \(3, S, K, 8\)"),
    "heads do not divide": (dict(query=zeros(20, 3, 8)), "must be a multiple .* got 3 and 2"),
    "key dtype": (
        dict(key=zeros(30, 2, 8, dtype=jnp.float16)),
        "`key` must have the dtype of `query`, .* float16; cast",
    ),
    "block size 8": (dict(block_size=8), "`block_size` must be a multiple of 16 from 16 to 4096, .* got 8; usual"),
    "block size 24": (dict(block_size=24), "`block_size` .* got 24"),
    "block size 8192": (dict(block_size=8192), "`block_size` .* got 8192"),
    "block size of a float": (dict(block_size=16.0), r"`block_size` .* got 16\.0"),
    "top_k 0": (dict(top_k=0), "`top_k` must be an integer of 1..64, .* got 0"),
    "top_k 65": (dict(top_k=65), "`top_k` .* got 65; .* larger blocks"),
    "top_k True": (dict(top_k=True), "`top_k` .* got True"),
    "causal text": (dict(is_causal="yes"), "`is_causal` must be True or False, .* got 'yes'"),
    "only key offsets": (dict(key_sequence_offsets=offsets(0, 30)), "`key_sequence_offsets` needs `sequence_offsets`"),
    "only query offsets": (
        dict(sequence_offsets=offsets(0, 20)),
        "`key_sequence_offsets` must be given .* got None for 20 and 30 tokens; pass",
    ),
    "offsets of batch rows": (
        dict(query=zeros(1, 20, 4, 8), key=zeros(1, 30, 2, 8), **PACKED),
        r"`sequence_offsets` describes one packed token axis, .* got tokens of shape \(1, 20\)",
    ),
    "offsets of int64": (
        PACKED | dict(sequence_offsets=np.asarray([0, 20])),
        "`sequence_offsets` must be an int32 array, got int64; convert",
    ),
    "offsets beyond": (
        PACKED | dict(sequence_offsets=offsets(0, 21)),
        "`sequence_offsets` must end within the 20 tokens of `query`, got 21",
    ),
    "key offsets beyond": (
        PACKED | dict(key_sequence_offsets=offsets(0, 31)),
        "`key_sequence_offsets` must end within the 30 tokens of `key`, got 31",
    ),
    "key offsets decrease": (
        dict(sequence_offsets=offsets(0, 1, 2), key_sequence_offsets=offsets(0, 9, 5)),
        "`key_sequence_offsets` must not decrease, got 9 then 5",
    ),
    "unequally many sequences": (
        PACKED | dict(key_sequence_offsets=offsets(0, 3, 30)),
        r"`key_sequence_offsets` must have the shape of `sequence_offsets`, \(2,\), got \(3,\)",
    ),
    "mask of numbers": (dict(key_mask=zeros(30)), "`key_mask` must be a bool array, got float32; True marks"),
    "mask of a list": (dict(key_mask=[True] * 30), "`key_mask` must be a bool array, got <class 'list'>"),
    "mask of queries": (dict(key_mask=zeros(20, dtype=bool)), r"`key_mask` must have shape \(30,\), .* got \(20,\)"),
    "unknown implementation": (
        dict(implementation="pallas"),
        r"`implementation` must be None, one of \['reference', 'xla', 'triton'\] .* got 'pallas'",
    ),
}
ATTENTION_MISTAKES = {
    "value shape": (dict(value=zeros(29, 2, 8)), r"`value` must have the shape of `key`, .* got \(29, 2, 8\)"),
    "value dtype": (dict(value=zeros(30, 2, 8, dtype=jnp.bfloat16)), "`value` must have the dtype .* bfloat16; cast"),
    "negative scale": (dict(scale=-1.0), r"`scale` must be a positive number, .* got -1\.0"),
    "routing of an array": (dict(routing=GOOD_ROUTING.indices), "`routing` must be a blockdiag.Routing or None, got"),
    "routing of numbers": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, indices=zeros(20, 4, 2))),
        "`routing.indices` must be an int32 array, got float32",
    ),
    "routing of other tokens": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, indices=zeros(19, 4, 2, dtype=jnp.int32))),
        r"`routing.indices` must have shape \(20, 4, 2\), .* got \(19, 4, 2\); pad",
    ),
    "routing with another k": (dict(routing=GOOD_ROUTING, top_k=3), r"`routing.indices` must have shape \(20, 4, 3\)"),
    "routing with another block size": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, block_size=32)),
        "`routing.block_size` must be 16 here, got 32",
    ),
    "routing of other keys": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, num_blocks=3)),
        "`routing.num_blocks` must be 2 here, got 3",
    ),
}


@pytest.mark.parametrize("name", SHARED_MISTAKES | ATTENTION_MISTAKES)
def test_moba_attention_with_invalid_arguments_raises_value_error(name):
    changes, message = (SHARED_MISTAKES | ATTENTION_MISTAKES)[name]
    key = changes.get("key", KEY)
    arguments = dict(query=QUERY, key=key, value=key, block_size=16, top_k=2) | changes
    with pytest.raises(ValueError, match=message):
        moba_attention(**arguments)


@pytest.mark.parametrize("name", SHARED_MISTAKES)
def test_moba_routing_with_invalid_arguments_raises_value_error(name):
    changes, message = SHARED_MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        moba_routing(**(dict(query=QUERY, key=KEY, block_size=16, top_k=2) | changes))


def test_dropout_rate_argument_raises_type_error():
    with pytest.raises(TypeError, match="dropout_rate"):
        moba_attention(QUERY, KEY, KEY, block_size=16, top_k=2, dropout_rate=0.1)


def test_traced_options_raise_value_error():
    with pytest.raises(ValueError, match=r"`block_size` must be .* known when tracing"):
        jax.jit(lambda size: moba_attention(QUERY, KEY, KEY, block_size=size, top_k=2))(16)
