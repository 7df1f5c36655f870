"""Bad input: each mistake is a ValueError that names the argument, its value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import Rotary, block_diagonal_attention, fused_qkv_block_attention, rotary_tables


def zeros(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def offsets(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


QUERY, KEY = zeros(20, 4, 8), zeros(20, 2, 8)
TABLES = rotary_tables(20, 8)

MISTAKES = {
    "rank 2": (dict(query=zeros(20, 8)), r"`query` must have shape \[B, T, N, H\] .* got \(20, 8\); reshape"),
    "rank 5": (dict(query=zeros(1, 1, 20, 4, 8)), "`query` must have shape .* jax.vmap"),
    "zero heads": (dict(query=zeros(20, 0, 8)), "`query` must have at least one head"),
    "zero head dimension": (dict(query=zeros(20, 4, 0)), "`query` must have at least one head"),
    "zero key heads": (dict(key=zeros(20, 0, 8), value=zeros(20, 0, 8)), "must be a multiple .* got 4 and 0"),
    "key tokens": (dict(key=zeros(19, 2, 8)), r"`key` must have shape \(20, K, 8\) .* got \(19, 2, 8\)"),
    "value head dimension": (dict(value=zeros(20, 2, 16)), r"`value` must have shape .* got \(20, 2, 16\)"),
    "key and value heads": (dict(value=zeros(20, 4, 8)), "`value` must have the 2 heads of `key`, got 4"),
    "heads do not divide": (dict(query=zeros(20, 3, 8)), "must be a multiple .* got 3 and 2"),
    "dtypes differ": (dict(value=zeros(20, 2, 8, dtype=jnp.bfloat16)), "`value` must have the dtype .* bfloat16; cast"),
    "integers": (
        {name: zeros(20, 2, 8, dtype=jnp.int32) for name in ("query", "key", "value")},
        "`query` must have one of the dtypes .* got int32",
    ),
    "block size 0": (dict(block_size=0), "`block_size` must be a positive integer, .* got 0"),
    "block size of a float": (dict(block_size=8.0), "`block_size` .* got 8.0"),
    "block size True": (dict(block_size=True), "`block_size` .* got True"),
    "negative scale": (dict(scale=-1.0), "`scale` must be a positive number, .* got -1.0"),
    "infinite scale": (dict(scale=np.inf), "`scale` .* got inf"),
    "NaN scale": (dict(scale=np.nan), "`scale` .* got nan"),
    "scale of text": (dict(scale="1"), "`scale` .* got '1'"),
    "causal text": (dict(is_causal="yes"), "`is_causal` must be True or False, .* got 'yes'"),
    "offsets of int64": (
        dict(sequence_offsets=np.asarray([0, 20])),
        "`sequence_offsets` must be an int32 array, got int64; convert",
    ),
    "offsets of a list": (
        dict(sequence_offsets=[0, 20]),
        "`sequence_offsets` must be an int32 array, got <class 'list'>",
    ),
    "offsets of rank 2": (dict(sequence_offsets=zeros(2, 3, dtype=jnp.int32)), "`sequence_offsets` must have rank 1"),
    "offsets empty": (dict(sequence_offsets=zeros(0, dtype=jnp.int32)), "`sequence_offsets` .* got an empty array"),
    "offsets start late": (dict(sequence_offsets=offsets(1, 20)), "`sequence_offsets` must start with 0, got 1"),
    "offsets decrease": (
        dict(sequence_offsets=offsets(0, 10, 5, 20)),
        "`sequence_offsets` must not decrease, got 10 then 5 at index 2; pass the running sum",
    ),
    "offsets beyond the tokens": (
        dict(sequence_offsets=offsets(0, 21)),
        "`sequence_offsets` must end within the 20 tokens of `query`, got 21",
    ),
    "offsets of a batch": (
        dict(
            query=zeros(2, 20, 4, 8), key=zeros(2, 20, 2, 8), value=zeros(2, 20, 2, 8), sequence_offsets=offsets(0, 9)
        ),
        r"`sequence_offsets` describes one packed token axis, .* got tokens of shape \(2, 20\)",
    ),
    "offsets and lengths": (
        dict(sequence_offsets=offsets(0, 20), block_lengths=offsets(20)),
        "`sequence_offsets` and `block_lengths` exclude each other",
    ),
    "negative length": (dict(block_lengths=offsets(4, -1)), "`block_lengths` must not be negative, got -1"),
    "long block": (
        dict(block_lengths=offsets(9, 11)),
        "`block_lengths` must not exceed block_size=8, got 11; pass block_",
    ),
    "block of 300": (dict(block_lengths=offsets(300)), "must not exceed block_size=8, got 300; pass block_size=300"),
    "lengths beyond the tokens": (
        dict(block_lengths=offsets(8, 8, 8)),
        "`block_lengths` must sum to at most .* got 24",
    ),
    "rotary of a tuple": (dict(rotary=TABLES), "`rotary` must be a blockdiag.Rotary or None, got <class 'tuple'>"),
    "odd head dimension": (
        dict(query=zeros(20, 2, 7), key=zeros(20, 2, 7), value=zeros(20, 2, 7), rotary=Rotary(*TABLES)),
        "`rotary` needs an even head dimension, got H=7",
    ),
    "tables too short": (
        dict(rotary=Rotary(*rotary_tables(19, 8))),
        "`rotary` tables must have a row for every position, got 19 rows for a sequence of 20 tokens; make longer",
    ),
    "tables too short for the offsets": (
        dict(rotary=Rotary(*rotary_tables(9, 8)), sequence_offsets=offsets(0, 10, 20)),
        "`rotary` tables .* got 9 rows for a sequence of 10 tokens",
    ),
    "tables too wide": (
        dict(rotary=Rotary(*rotary_tables(20, 16))),
        r"must have shape \[P, 4\] for H=8, got \(20, 8\)",
    ),
    "tables differ": (
        dict(rotary=Rotary(TABLES[0], TABLES[1][:10])),
        "`rotary.cos` and `rotary.sin` must have one shape",
    ),
    "tables of integers": (
        dict(rotary=Rotary(zeros(20, 4, dtype=jnp.int32), zeros(20, 4, dtype=jnp.int32))),
        "`rotary.cos` must have one of the dtypes",
    ),
    "tables of lists": (dict(rotary=Rotary([1.0], [0.0])), "`rotary.cos` must be an array, got <class 'list'>"),
    "too few rows per token": (
        dict(rotary=Rotary(*rotary_tables(19, 8), per_token=True)),
        r"with per_token=True must have shape \(20, 4\), one row for each token, got \(19, 4\)",
    ),
    "positions per token": (
        dict(rotary=Rotary(*TABLES, per_token=True, positions=zeros(20, dtype=jnp.int32))),
        "`rotary.positions` must be None with per_token=True",
    ),
    "positions of floats": (
        dict(rotary=Rotary(*TABLES, positions=zeros(20))),
        "`rotary.positions` must be an int32 array",
    ),
    "positions of another shape": (
        dict(rotary=Rotary(*TABLES, positions=zeros(19, dtype=jnp.int32))),
        r"`rotary.positions` must have shape \(20,\), .* got \(19,\)",
    ),
    "positions out of range": (
        dict(rotary=Rotary(*TABLES, positions=jnp.full(20, 20, jnp.int32))),
        r"`rotary.positions` must lie in \[0, 20\), .* got values in \[20, 20\]",
    ),
    "negative positions": (
        dict(rotary=Rotary(*TABLES, positions=jnp.full(20, -1, jnp.int32))),
        r"`rotary.positions` must lie in \[0, 20\), .* got values in \[-1, -1\]",
    ),
    "unknown implementation": (dict(implementation="cuda"), "`implementation` must be None, one of .* got 'cuda'"),
    "no implementation": (dict(implementation=()), "`implementation` must be None"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_attention_with_invalid_arguments_raises_value_error(mistake):
    arguments, message = MISTAKES[mistake]
    arguments = {"query": QUERY, "key": KEY, "value": KEY, "block_size": 8} | arguments
    with pytest.raises(ValueError, match=message):
        block_diagonal_attention(**arguments)


@pytest.mark.parametrize("option", ["scale", "block_size", "is_causal"])
def test_traced_options_raise_value_error(option):
    with pytest.raises(ValueError, match=f"`{option}` .* known when tracing"):
        jax.jit(lambda x: block_diagonal_attention(QUERY, KEY, KEY, **{option: x}))(1)


def test_constant_offsets_are_checked_while_tracing():
    """Offsets that are constants of the traced function are checked. Its arguments cannot be checked."""

    def attend(query, sequence_offsets):
        return block_diagonal_attention(query, KEY, KEY, sequence_offsets=sequence_offsets)

    decreasing = offsets(0, 10, 5)
    with pytest.raises(ValueError, match="must not decrease"):
        jax.jit(lambda query: attend(query, decreasing))(QUERY)
    assert jax.jit(attend)(QUERY, decreasing).shape == QUERY.shape


@pytest.mark.parametrize("scale", [2, np.float32(0.5), np.asarray(0.5), jnp.float32(0.5)])
def test_scale_accepts_numbers_of_any_kind(scale):
    assert block_diagonal_attention(QUERY, KEY, KEY, scale=scale).shape == QUERY.shape


@pytest.mark.parametrize("block_size", [np.int32(8), np.int64(8)])
def test_block_size_accepts_integers_of_any_kind(block_size):
    assert block_diagonal_attention(QUERY, KEY, KEY, block_size=block_size).shape == QUERY.shape


def test_operands_may_be_numpy_arrays():
    query, key = np.zeros((20, 4, 8), np.float32), np.zeros((20, 2, 8), np.float32)
    packed = block_diagonal_attention(query, key, key, sequence_offsets=np.asarray([0, 20], np.int32))
    assert isinstance(packed, jax.Array)


@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8), (0, 4, 8)])
@pytest.mark.parametrize("implementation", [None, "xla", "pallas", "reference"])
def test_empty_operands_give_zero_output_and_empty_gradients(shape, implementation):
    query = zeros(*shape)
    output, gradient = jax.value_and_grad(
        lambda x: block_diagonal_attention(x, x, x, implementation=implementation).sum()
    )(query)
    assert output == 0 and gradient.shape == shape


PROJECTION = dict(query_heads=4, key_heads=2, head_dim=8)
PROJECTION_MISTAKES = {
    "rank": (dict(x=zeros(16)), r"`x` must have shape \[B, T, D\] or \[T, D\], got \(16,\)"),
    "integers": (dict(x=zeros(20, 16, dtype=jnp.int32)), "`x` must have one of the dtypes"),
    "columns": (dict(w_qkv=zeros(16, 63)), r"`w_qkv` must have shape \(16, 64\), .* got \(16, 63\); concatenate"),
    "rows": (dict(w_qkv=zeros(15, 64)), r"`w_qkv` must have shape \(16, 64\)"),
    "bias": (dict(bias=zeros(63)), r"`bias` must have shape \(64,\), .* got \(63,\)"),
    "weight dtype": (dict(w_qkv=zeros(16, 64, dtype=jnp.bfloat16)), "`w_qkv` must have the dtype of `x`, float32, got"),
    "bias dtype": (dict(bias=zeros(64, dtype=jnp.bfloat16)), "`bias` must have the dtype of `x`"),
    "heads": (dict(key_heads=3), "must be a multiple .* got 4 and 3"),
    "zero heads": (dict(key_heads=0), "`key_heads` must be a positive integer, got 0"),
    "head dimension": (dict(head_dim=8.0), "`head_dim` must be a positive integer, got 8.0"),
    "block size": (dict(block_size=0), "`block_size` must be"),
    "tables": (dict(rotary=Rotary(*rotary_tables(3, 8))), "`rotary` tables must have a row for every position"),
}


@pytest.mark.parametrize("mistake", PROJECTION_MISTAKES)
def test_fused_projection_with_invalid_arguments_raises_value_error(mistake):
    arguments, message = PROJECTION_MISTAKES[mistake]
    arguments = {"x": zeros(20, 16), "w_qkv": zeros(16, 64), **PROJECTION} | arguments
    with pytest.raises(ValueError, match=message):
        fused_qkv_block_attention(**arguments)
