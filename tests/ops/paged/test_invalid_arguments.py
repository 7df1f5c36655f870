"""Paged attention with invalid arguments raises errors that name the argument, its value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import paged_attention
from tests.ops.paged_support import integers, zeros

GOOD = dict(
    query=zeros(2, 3, 4, 8), key_pages=zeros(5, 16, 2, 8), value_pages=zeros(5, 16, 2, 24),
    page_table=zeros(2, 3, dtype=jnp.int32), kv_lengths=integers(0, 48),
)  # fmt: skip
PACKED = dict(query=zeros(80, 4, 8), query_offsets=integers(0, 3, 60))
MISTAKES = {
    "rank 2": (dict(query=zeros(4, 8)), r"`query` must have shape \[B, T, N, H\], or .* got \(4, 8\); reshape"),
    "no heads": (dict(query=zeros(2, 3, 0, 8)), "`query` must have at least one head"),
    "rank 3 without offsets": (
        dict(query=zeros(2, 4, 8)),
        r"`query` of shape \(2, 4, 8\) needs `query_offsets`, .*None",
    ),
    "key head dimension": (
        dict(key_pages=zeros(5, 16, 2, 16)),
        r"`key_pages` must have shape \[P, page_size, K, 8\] .* got \(5, 16, 2, 16\); a contiguous",
    ),
    "key rank": (dict(key_pages=zeros(80, 2, 8)), r"`key_pages` must have shape .* got \(80, 2, 8\)"),
    "value pages": (
        dict(value_pages=zeros(5, 8, 2, 8)),
        r"`value_pages` must have shape \(5, 16, 2, V\) .* got \(5, 8, 2, 8\); one page number",
    ),
    "neither values nor their number": (
        dict(value_pages=None),
        r"`value_dim` must be an integer of 1\.\.8, known when tracing, without `value_pages`, got None; it is",
    ),
    "more values than columns": (
        dict(value_pages=None, value_dim=9),
        r"`value_dim` must be an integer of 1\.\.8, .* got 9",
    ),
    "values and their number": (
        dict(value_dim=8),
        r"`value_dim` and `value_pages` exclude each other, got 8 and values of shape \(5, 16, 2, 24\); pass",
    ),
    "value scale of a latent cache": (
        dict(value_pages=None, value_dim=8, value_scale=2.0),
        "`value_scale` must be None without `value_pages`, got a scale; the values .* `key_scale` is a factor on both",
    ),
    "no value elements": (dict(value_pages=zeros(5, 16, 2, 0)), r"`value_pages` must have shape \(5, 16, 2, V\)"),
    "heads do not divide": (dict(query=zeros(2, 3, 3, 8)), "must be a multiple .* got 3 and 2"),
    "no page tokens": (
        dict(key_pages=zeros(5, 0, 2, 8), value_pages=zeros(5, 0, 2, 8), kv_lengths=integers(0, 0)),
        "`key_pages` must have pages of at least one token",
    ),
    "query of integers": (
        dict(query=zeros(2, 3, 4, 8, dtype=jnp.int32)),
        "`query` must have one of the dtypes .* int32",
    ),
    "other cache dtype": (
        dict(key_pages=zeros(5, 16, 2, 8, dtype=jnp.bfloat16)),
        r"`key_pages` must have one of \D+ \['float32', 'float8_e4m3fn', 'float8_e5m2', 'int8'\] .* got bfloat16; cast",
    ),
    "wide cache of eight-bit queries": (
        dict(query=zeros(2, 3, 4, 8, dtype=jnp.float8_e5m2), key_pages=zeros(5, 16, 2, 8, dtype=jnp.float8_e5m2)),
        r"`value_pages` must have one of the dtypes \['float8_e4m3fn', 'float8_e5m2'\] .* got float32",
    ),
    "integers beside eight-bit queries": (
        dict(query=zeros(2, 3, 4, 8, dtype=jnp.float8_e5m2), key_pages=zeros(5, 16, 2, 8, dtype=jnp.int8)),
        r"`key_pages` must have one of the dtypes \['float8_e4m3fn', 'float8_e5m2'\] .* got int8",
    ),
    "unsigned integers": (
        dict(key_pages=zeros(5, 16, 2, 8, dtype=jnp.uint8)),
        "`key_pages` must have one of the dtypes .* got uint8",
    ),
    "integers without scale": (
        dict(key_pages=zeros(5, 16, 2, 8, dtype=jnp.int8)),
        "`key_scale` must be given for `key_pages` of int8, .* got None; pass pages of scales, or 1.0",
    ),
    "integers without scale of values": (
        dict(value_pages=zeros(5, 16, 2, 24, dtype=jnp.int8), key_scale=1.0),
        "`value_scale` must be given for `value_pages` of int8, .* got None",
    ),
    "query dtype beside integers": (
        dict(query_dtype="float8_e5m2", key_pages=zeros(5, 16, 2, 8, dtype=jnp.int8), key_scale=1.0),
        "`query_dtype` needs `key_pages` of eight-bit floats, .* got int8; leave `query_dtype` out",
    ),
    "lengths of int64": (
        dict(kv_lengths=np.asarray([0, 4])),
        "`kv_lengths` must be an int32 array, got int64; convert",
    ),
    "lengths of a list": (dict(kv_lengths=[0, 4]), "`kv_lengths` must be an int32 array, got <class 'list'>"),
    "too many lengths": (dict(kv_lengths=integers(0, 1, 2)), r"`kv_lengths` must have shape \(2,\), .* got \(3,\)"),
    "length beyond": (
        dict(kv_lengths=integers(3, 49)),
        r"`kv_lengths` must lie in \[0, 48\], the 48 keys that `page_table` has room for, got 49",
    ),
    "negative length": (dict(kv_lengths=integers(-1, 99)), "`kv_lengths` must lie in .* got -1; a sequence without"),
    "table of other sequences": (
        dict(page_table=zeros(3, 3, dtype=jnp.int32)),
        r"`page_table` must have shape \(2, max_pages\), .* got \(3, 3\)",
    ),
    "table of one row": (dict(page_table=integers(0, 1)), r"`page_table` must have rank 2, got shape \(2,\)"),
    "page beyond": (
        dict(page_table=jnp.asarray([[9, 9, 9], [1, 5, 9]], jnp.int32), kv_lengths=integers(0, 17)),
        r"`page_table` must hold page numbers in \[0, 5\) .* got 5 at \[1, 1\]; entries beyond",
    ),
    "negative page": (
        dict(page_table=jnp.asarray([[0, -1, 0], [0, 0, 0]], jnp.int32), kv_lengths=integers(17, 17)),
        r"`page_table` must hold .* got -1 at \[0, 1\]",
    ),
    "contiguous, other sequences": (
        dict(page_table=None),
        r"`key_pages` without a `page_table` must have shape \[B, S, K, H\] .* 2 sequences .* got \(5, 16, 2, 8\)",
    ),
    "contiguous, length beyond": (
        dict(page_table=None, key_pages=zeros(2, 9, 2, 8), value_pages=zeros(2, 9, 2, 8), kv_lengths=integers(1, 10)),
        r"`kv_lengths` must lie in \[0, 9\], the 9 keys that `key_pages` has room for, got 10",
    ),
    "query length beyond": (
        dict(query_lengths=integers(1, 4)),
        r"`query_lengths` must lie in \[0, 3\], the 3 queries .* got 4",
    ),
    "too few query lengths": (
        dict(query_lengths=integers(1)),
        r"`query_lengths` must have shape \(2,\), .* got \(1,\)",
    ),
    "packed, a batch": (
        dict(query_offsets=integers(0, 1, 2)),
        r"`query_offsets` describes packed .* \(2, 3, 4, 8\); pass",
    ),
    "packed, lengths too": (
        PACKED | dict(query_lengths=integers(3, 57)),
        "`query_lengths` and `query_offsets` exclude",
    ),
    "packed, other sequences": (
        PACKED | dict(query_offsets=integers(0, 60)),
        r"`kv_lengths` must have shape \(1,\), .* got \(2,\)",
    ),
    "packed, decreasing": (
        PACKED | dict(query_offsets=integers(0, 9, 3)),
        "`query_offsets` must not decrease, got 9 then 3",
    ),
    "packed, beyond": (
        PACKED | dict(query_offsets=integers(0, 9, 81)),
        "`query_offsets` must end within the 80 .* got 81",
    ),
    "packed, too long": (
        PACKED | dict(query_offsets=integers(0, 3, 70), max_query_length=64),
        "`query_offsets` describes a sequence of 67 queries, more than max_query_length=64; pass max_query_length=67",
    ),
    "longest without offsets": (dict(max_query_length=3), "`max_query_length` is for packed queries, .* got 3"),
    "longest of a float": (PACKED | dict(max_query_length=60.0), r"`max_query_length` must be an integer .* got 60\.0"),
    "negative scale": (dict(scale=-1.0), r"`scale` must be a positive number, .* got -1\.0"),
    "causal text": (dict(is_causal="yes"), "`is_causal` must be True or False, .* got 'yes'"),
    "negative window": (dict(local_window_size=-1), "`local_window_size` must be an integer from 0, .* got -1"),
    "window of three": (dict(local_window_size=(1, 2, 3)), r"`local_window_size` .* got \(1, 2, 3\)"),
    "window of a float": (dict(local_window_size=(None, 2.0)), r"`local_window_size` .* got \(None, 2\.0\)"),
    "window True": (dict(local_window_size=True), "`local_window_size` .* got True"),
    "soft cap 0": (dict(logits_soft_cap=0.0), r"`logits_soft_cap` must be a positive number, .* got 0\.0; pass None"),
    "sinks of key heads": (dict(sinks=zeros(2)), r"`sinks` must have shape \(4,\), .* got \(2,\)"),
    "sinks of integers": (dict(sinks=integers(1, 2, 3, 4)), "`sinks` must be an array of floats, got int32"),
    "sinks of a list": (dict(sinks=[0.0] * 4), "`sinks` must be an array of floats, got <class 'list'>"),
    "key scale of query heads": (
        dict(key_scale=zeros(2, 4)),
        r"`key_scale` must have shape \(\), \(2, 2\), .* or \(5, 16, 2\), one for each token .* got \(2, 4\)",
    ),
    "value scale of bfloat16": (
        dict(value_scale=zeros(2, 2, dtype=jnp.bfloat16)),
        "`value_scale` must be a number or a float32 array, got bfloat16; convert",
    ),
    "value scale True": (
        dict(value_scale=True),
        "`value_scale` must be a number or a float32 array, got <class 'bool'>",
    ),
    "query scale of tokens": (
        dict(query_scale=zeros(5, 16, 2)),
        r"`query_scale` must have shape \(\), \(2, 2\), one .*head, got \(5, 16, 2\)",
    ),
    "query dtype of 16 bits": (
        dict(query_dtype="float16"),
        r"`query_dtype` must be one of \['float8_e4m3fn', 'float8_e5m2'\] or None, got 'float16'",
    ),
    "query dtype beside a wide cache": (
        dict(query_dtype="float8_e5m2"),
        "`query_dtype` needs `key_pages` of eight-bit floats, .* got .*float32; leave `query_dtype` out",
    ),
    "no splits": (dict(num_splits=0), r"`num_splits` must be an integer of 1\.\.256, .* got 0; leave it out"),
    "splits True": (dict(num_splits=True), "`num_splits` .* got True"),
    "split size 100": (dict(split_size=100), "`split_size` must be a positive multiple of 64, .* got 100"),
    "both splits": (
        dict(num_splits=2, split_size=64),
        "`num_splits` and `split_size` exclude each other, got 2 and 64",
    ),
    "unknown implementation": (
        dict(implementation="pallas"),
        r"`implementation` must be None, one of \['reference', 'xla', 'triton'\] .* got 'pallas'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_value_error(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        paged_attention(**(GOOD | changes))


def test_valid_arguments_of_the_invalid_cases_are_accepted():
    assert paged_attention(**GOOD).shape == (2, 3, 4, 24)
    assert paged_attention(**(GOOD | PACKED)).shape == (80, 4, 24)
    assert paged_attention(**(GOOD | {"value_pages": None}), value_dim=5).shape == (2, 3, 4, 5)


def test_traced_options_raise_value_error():
    for name in ("num_splits", "split_size", "local_window_size", "logits_soft_cap", "scale"):
        with pytest.raises(ValueError, match=f"`{name}` must be .* known when tracing"):
            jax.jit(lambda x, name=name: paged_attention(**GOOD, **{name: x}))(64)
