"""Destinations of new tokens: sequence, position, page and offset in the page of each row of an append."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.ops.append.problem import AppendArrays, AppendProblem


class Places(NamedTuple):
    """The destination of each row, int32 [tokens] except for `is_written`, bool [tokens].

    Attributes:
        sequence: the sequence of the row; arbitrary but valid if it belongs to none.
        position: the position of the row in its sequence.
        page, offset: the destination of key and value; for rows that are not written, `page` is `num_pages`.
        is_written: whether the row is written.
    """

    sequence: Array
    position: Array
    page: Array
    offset: Array
    is_written: Array


def find_places(problem: AppendProblem, arrays: AppendArrays) -> Places:
    """Return the places of all rows, for arbitrary values of table and lengths."""
    row = jnp.arange(problem.tokens, dtype=jnp.int32)
    if problem.query_tokens is None:
        sequence = jnp.maximum(arrays.sequences, 0)
        token, is_token = row - arrays.first_rows[sequence], arrays.sequences >= 0
    else:
        sequence, token = row // problem.query_tokens, row % problem.query_tokens
        is_token = jnp.ones_like(row, dtype=bool)
    num_tokens = token_counts(problem, arrays)[sequence]
    position = jnp.maximum(arrays.kv_lengths, 0)[sequence] - num_tokens + token
    is_written = is_token & (token < num_tokens) & (position >= 0) & (position < problem.max_keys)
    page = find_pages(problem, arrays, sequence, jnp.where(is_written, position, 0))
    is_written = is_written & (page >= 0) & (page < problem.num_pages)
    page = jnp.where(is_written, page, problem.num_pages)
    return Places(sequence, position, page, position % problem.page_size, is_written)


def token_counts(problem: AppendProblem, arrays: AppendArrays) -> Array:
    """Return the number of new tokens of each sequence, int32 [batch]."""
    most = problem.tokens if problem.query_tokens is None else problem.query_tokens
    if arrays.query_lengths is None:
        return jnp.full_like(arrays.kv_lengths, most)
    return jnp.clip(arrays.query_lengths, 0, most)


def find_pages(problem: AppendProblem, arrays: AppendArrays, sequence: Array, position: Array) -> Array:
    """Return the page numbers for positions within the table; the numbers may be out of range."""
    if arrays.page_table is None:
        return jnp.broadcast_to(sequence, position.shape)
    return arrays.page_table[sequence, position // problem.page_size]
