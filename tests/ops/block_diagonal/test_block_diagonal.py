"""Values of block-diagonal attention: output and gradients of every implementation against an exact computation."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import block_diagonal_attention
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from tests.support import (
    Case,
    RotaryCase,
    assert_accurate,
    compiled_call,
    exact_attention,
    runnable_implementations,
)

ARRAY_IMPLEMENTATIONS = ("reference", "xla")
INTERPRETED = [name for name in runnable_implementations() if BLOCK_DIAGONAL.implementations[name].has_interpreter]

CASES = {
    "full blocks": Case(lengths=(32, 32)),
    "one partial block": Case(lengths=(5,)),
    "partial tails": Case(lengths=(37, 37, 37), block_size=16),
    "blocks of one row": Case(lengths=(7, 7), block_size=1),
    "block size not a power of two": Case(lengths=(50,), block_size=13),
    "largest block": Case(lengths=(300,), block_size=256),
    "one token": Case(lengths=(1,)),
    "causal": Case(lengths=(37, 37), is_causal=True),
    "grouped heads": Case(lengths=(20, 20), query_heads=6, key_heads=2),
    "one key head": Case(lengths=(20, 20), query_heads=4, key_heads=1),
    "head dimension 72": Case(lengths=(20,), head_dim=72),
    "scale": Case(lengths=(20,), scale=0.7),
    "bfloat16": Case(lengths=(37, 37), dtype="bfloat16", head_dim=64),
    "float16": Case(lengths=(37, 37), dtype="float16", query_heads=4, is_causal=True),
    "offsets": Case(lengths=(3, 0, 1, 40, 0, 16, 32), layout="offsets", padding=5),
    "offsets, causal, grouped": Case(
        lengths=(17, 15, 0, 33), layout="offsets", query_heads=4, is_causal=True, dtype="bfloat16"
    ),
    "offsets, all empty": Case(lengths=(0, 0), layout="offsets", padding=20),
    "offsets, no sequences": Case(lengths=(), layout="offsets", padding=20),
    "lengths": Case(lengths=(16, 9, 0, 12, 16, 1), layout="lengths", padding=40),
    "lengths, no padding": Case(lengths=(1, 2, 3, 4, 16), layout="lengths", dtype="bfloat16"),
    "rotary": Case(lengths=(37, 37), rotary=RotaryCase()),
    "rotary, interleaved, bfloat16": Case(lengths=(20, 20), dtype="bfloat16", rotary=RotaryCase(interleaved=True)),
    "rotary of value": Case(lengths=(20,), rotary=RotaryCase(apply_to=("query", "key", "value"))),
    "rotary of key only": Case(lengths=(20,), rotary=RotaryCase(apply_to=("key",))),
    "rotary, explicit positions": Case(lengths=(20, 20), rotary=RotaryCase(tables="explicit")),
    "rotary, tables per token": Case(lengths=(20, 20), rotary=RotaryCase(tables="token", dtype="bfloat16")),
    "rotary, offsets": Case(lengths=(3, 0, 40), layout="offsets", padding=7, rotary=RotaryCase()),
    "rotary, offsets, explicit": Case(lengths=(3, 40), layout="offsets", rotary=RotaryCase(tables="explicit")),
    "rotary, offsets, per token": Case(
        lengths=(3, 40), layout="offsets", padding=7, rotary=RotaryCase(tables="token", interleaved=True)
    ),
    "rotary, lengths": Case(lengths=(3, 0, 16), layout="lengths", padding=7, rotary=RotaryCase()),
    "no tokens": Case(lengths=(0, 0), layout="batch"),
    "no packed tokens": Case(lengths=(0,), layout="offsets"),
}


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_accurate(implementation, name):
    case = CASES[name]
    assert_accurate(case, case.results(implementation), case.operands())


@st.composite
def rotary_cases(draw) -> RotaryCase | None:
    if draw(st.booleans()):
        return None
    names = st.lists(st.sampled_from(["query", "key", "value"]), min_size=1, max_size=3, unique=True)
    return RotaryCase(
        tables=draw(st.sampled_from(["position", "explicit", "token"])),
        interleaved=draw(st.booleans()),
        apply_to=tuple(draw(names)),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@st.composite
def cases(draw, longest: int, dtypes: tuple[str, ...]) -> Case:
    """Draw any call with sequences of up to `longest` tokens, including empty and one-token ones."""
    layout = draw(st.sampled_from(["batch", "offsets", "lengths"]))
    block_size = draw(st.integers(1, 40))
    length = st.one_of(st.sampled_from([0, 1, block_size]), st.integers(0, longest))
    if layout == "batch":
        lengths = (draw(length),) * draw(st.integers(1, 3))
    else:
        lengths = tuple(draw(st.lists(length, max_size=5)))
    if layout == "lengths":
        lengths = tuple(min(length, block_size) for length in lengths)
    key_heads = draw(st.integers(1, 2))
    return Case(
        lengths=lengths,
        layout=layout,
        padding=0 if layout == "batch" else draw(st.integers(0, 50)),
        query_heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        head_dim=draw(st.sampled_from([8, 16, 24, 40])),
        dtype=draw(st.sampled_from(dtypes)),
        block_size=block_size,
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        rotary=draw(rotary_cases()),
    )


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@hypothesis.given(data=st.data())
def test_drawn_cases_are_accurate(implementation, data):
    case = data.draw(cases(longest=70, dtypes=("float32", "bfloat16", "float16")))
    assert_accurate(case, case.results(implementation), case.operands())


@pytest.mark.parametrize("implementation", INTERPRETED)
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_drawn_cases_in_interpreters_are_accurate_or_declined(implementation, data):
    """Kernels either compute a call or decline it with an error that names the implementation."""
    case = data.draw(cases(longest=24, dtypes=("float32", "bfloat16", "float16")))
    try:
        results = case.results(implementation)
    except NotImplementedError as declined:
        assert implementation in str(declined)
        return
    assert_accurate(case, results, case.operands())


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreted_kernels_are_accurate(implementation, dtype):
    """Every kernel supports this call."""
    case = Case(lengths=(64, 64), block_size=64, head_dim=64, dtype=dtype, query_heads=2, key_heads=1)
    assert_accurate(case, case.results(implementation), case.operands())


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["partial tails", "offsets", "rotary, offsets, per token", "rotary, lengths"])
def test_float64_results_are_accurate(implementation, name):
    case = dataclasses.replace(CASES[name], dtype="float64")
    with jax.enable_x64(True):
        assert_accurate(case, case.results(implementation), case.operands())


@pytest.mark.parametrize("implementation", ARRAY_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["partial tails", "offsets", "lengths, no padding", "rotary, tables per token"])
def test_results_with_x64_enabled_are_accurate(implementation, name):
    case = CASES[name]
    with jax.enable_x64(True):
        assert_accurate(case, case.results(implementation), case.operands())


def poisoned_cases() -> dict[str, Case]:
    names = ["partial tails", "offsets", "lengths", "rotary", "rotary, offsets, per token", "causal"]
    whole = Case(lengths=(128, 128), block_size=64, head_dim=64, dtype="bfloat16", query_heads=2, key_heads=1)
    return {name: CASES[name] for name in names} | {
        "whole tiles": whole,
        "whole tiles, causal": dataclasses.replace(whole, is_causal=True),
    }


def poisoned_names(implementation: str) -> list[str]:
    """Return the cases that an implementation supports. Pallas only has kernels of whole tiles."""
    return [name for name in poisoned_cases() if implementation != "pallas" or name.startswith("whole tiles")]


@functools.cache
def clean_results(name: str, implementation: str) -> tuple[jax.Array, ...]:
    return poisoned_cases()[name].results(implementation)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("implementation", "name"), [(one, name) for one in runnable_implementations() for name in poisoned_names(one)]
)
def test_nan_and_inf_stay_in_their_block(implementation, name, poison):
    """NaN or infinity in one block, and in padding, changes no bit of any other block."""
    case = poisoned_cases()[name]
    operands = case.operands()
    poisoned_block = max(case.blocks, key=lambda block: block.length)
    is_bad = np.zeros(case.tokens, bool)
    is_bad[poisoned_block.start : poisoned_block.start + poisoned_block.length] = True
    is_bad[sum(case.lengths) :] = True
    is_bad = is_bad.reshape(case.tokens_shape)[..., None, None]

    clean = clean_results(name, implementation)
    poisoned = (jnp.where(is_bad, jnp.asarray(poison, x.dtype), x) for x in operands)
    dirty = compiled_call(case, implementation)(*poisoned)
    for before, after in zip(clean, dirty, strict=True):
        keep = ~np.broadcast_to(is_bad, before.shape)
        np.testing.assert_array_equal(np.asarray(before)[keep], np.asarray(after)[keep])
        padding = np.asarray(after).reshape(case.tokens, -1)[sum(case.lengths) :]
        assert not padding.any(), "padding rows must be 0 whatever they hold"


@pytest.mark.parametrize("implementation", [None, *ARRAY_IMPLEMENTATIONS])
@pytest.mark.parametrize("name", ["grouped heads", "offsets", "rotary, offsets, explicit"])
def test_repeated_calls_agree_bitwise(implementation, name):
    case = CASES[name]
    for first, second in zip(case.results(implementation), case.results(implementation), strict=True):
        np.testing.assert_array_equal(first, second)


def test_query_heads_use_their_own_key_head():
    """Query head n attends to key head n // G, not n % K."""
    case = Case(lengths=(8,), query_heads=4, key_heads=2, block_size=8)
    query, key, value, cotangent = case.operands()
    expected, *_ = exact_attention(case, (query, key, value, cotangent))
    value = value.at[:, :, 1].set(0)
    output = case.attend("xla")(query, key, value)
    assert not output[:, :, 2:].any()
    np.testing.assert_allclose(output[:, :, :2], expected[:, :, :2], rtol=1e-5, atol=1e-5)


def test_rank_three_without_packing_is_one_sequence():
    query, key, value, _ = Case(lengths=(37,)).operands()
    np.testing.assert_array_equal(
        block_diagonal_attention(query[0], key[0], value[0], block_size=16),
        block_diagonal_attention(query, key, value, block_size=16)[0],
    )


def test_lengths_and_offsets_agree_where_sequences_are_blocks():
    case = Case(lengths=(16, 3, 0, 9), layout="lengths", padding=4)
    as_offsets = dataclasses.replace(case, layout="offsets")
    for first, second in zip(case.results("xla"), as_offsets.results("xla"), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-6)


def test_traced_lengths_beyond_the_block_size_are_padding():
    case = Case(lengths=(16, 16, 8), layout="lengths")
    query, key, value, _ = case.operands()
    attend = jax.jit(lambda lengths: block_diagonal_attention(query, key, value, block_size=16, block_lengths=lengths))
    output = attend(jnp.asarray([24, 16], jnp.int32))
    expected = block_diagonal_attention(
        query, key, value, block_size=16, block_lengths=jnp.asarray([16, 8, 16], jnp.int32)
    )
    np.testing.assert_array_equal(output[:16], expected[:16])
    assert not output[16:24].any()
    np.testing.assert_array_equal(output[24:], expected[24:])
