"""Tests of softmaxes over keys of several sources, whose scores are concatenated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.program import trace
from tests.fusion.fusion_support import (
    alternated,
    arrays,
    assert_alike,
    assert_as_good_as_written,
    assert_fused,
    with_gradients,
)

BATCH, HEADS, TOKENS, MEMORIES, WIDTH = 2, 3, 33, 20, 16
OPERAND, MEMORY = (BATCH, HEADS, TOKENS, WIDTH), (BATCH, HEADS, MEMORIES, WIDTH)


def causal(scores):
    return jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)


def sliced(query, key, value, memory_key, memory_value):
    """Attend to a memory with a scale of its own, and slice the weights."""
    scores = jnp.concatenate([2 * query @ memory_key.mT, causal(query @ key.mT)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    return weights[..., :MEMORIES] @ memory_value + weights[..., MEMORIES:] @ value


def joined_values(query, key, value, memory_key, memory_value):
    scores = jnp.concatenate([query @ memory_key.mT, query @ key.mT], axis=-1) / 4
    values = jnp.concatenate([memory_value, value], axis=2)
    return jnp.einsum("bhts,bhsd->bthd", jax.nn.softmax(scores, axis=-1), values)


def with_sink(query, key, value, memory_key, memory_value, sink):
    """Add a sink [N], a further logit without a value."""
    last = jnp.broadcast_to(sink[None, :, None, None], (BATCH, HEADS, TOKENS, 1))
    scores = jnp.concatenate([query @ memory_key.mT, query @ key.mT, last], axis=-1)
    first, second, _ = jnp.split(jax.nn.softmax(scores, axis=-1), [MEMORIES, MEMORIES + TOKENS], axis=-1)
    return jnp.einsum("bhts,bhsd->bhtd", first, memory_value) + jnp.einsum("bhts,bhsd->bhtd", second, value)


def with_null(query, key, value, memory_key, memory_value, null_key, null_value):
    """Add one more key, null_key [H] with null_value [H], and mask all sources together."""
    first = jnp.einsum("bhtd,d->bht", query, null_key)[..., None]
    scores = jnp.concatenate([first, query @ memory_key.mT, query @ key.mT], axis=-1) / 4
    scores = jnp.where(jnp.arange(scores.shape[-1])[None, None, None, :] < 40, scores, -1e9)
    before = jnp.broadcast_to(null_value, (BATCH, HEADS, 1, WIDTH))
    return jax.nn.softmax(scores, axis=-1) @ jnp.concatenate([before, memory_value, value], axis=2)


def masked_together(query, key, value, memory_key, memory_value):
    """Apply a causal mask to the tokens after the memory, and cast the weights."""
    scores = jnp.concatenate([query @ memory_key.mT, query @ key.mT], axis=-1) / 4
    mask = jnp.arange(MEMORIES + TOKENS)[None, :] <= jnp.arange(TOKENS)[:, None] + MEMORIES
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(query.dtype)
    return weights @ jnp.concatenate([memory_value, value], axis=2)


def by_hand(query, key, value, memory_key, memory_value):
    scores = jnp.concatenate([query @ memory_key.mT, query @ key.mT + 1], axis=-1)
    powers = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    return weights[..., MEMORIES:] @ value + 0.5 * (weights[..., :MEMORIES] @ memory_value)


def joined_again(query, key, value, memory_key, memory_value, sink):
    """Concatenate a sink [N] with scores that are already concatenated."""
    scores = jnp.concatenate([query @ memory_key.mT, query @ key.mT], axis=-1)
    first = jnp.broadcast_to(sink[:, None, None], (BATCH, HEADS, TOKENS, 1))
    weights = jax.nn.softmax(jnp.concatenate([first, scores], axis=-1), axis=-1)[..., 1:]
    return weights @ jnp.concatenate([memory_value, value], axis=2)


FUNCTIONS = {
    "sliced": (sliced,),
    "joined values": (joined_values,),
    "sink": (with_sink, (HEADS,)),
    "null": (with_null, (WIDTH,), (WIDTH,)),
    "masked together": (masked_together,),
    "by hand": (by_hand,),
    "joined again": (joined_again, (HEADS,)),
}


def given_for(name):
    function, *shapes = FUNCTIONS[name]
    return function, arrays(OPERAND, OPERAND, OPERAND, MEMORY, MEMORY, *shapes)


@pytest.mark.parametrize(("name", "implementation"), alternated(FUNCTIONS))
def test_merged_sources_match_the_reference_with_gradients(name, implementation):
    function, given = given_for(name)
    assert_fused(function, given, implementation)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_are_not_in_memory(name):
    function, given = given_for(name)
    program = trace(function, given, {})
    needed = program.needed() - program.regions.keys() - program.log_sums.keys()
    made = [x.outvars[0].aval.shape for x in program.jaxpr.jaxpr.eqns if x.outvars[0] in needed]
    assert len(program.regions) == 2 and len(program.log_sums) == 2
    assert not [x for x in made if len(x) > 1 and x[-2] == TOKENS and x[-1] in (MEMORIES, TOKENS, MEMORIES + TOKENS)]
    leaves = [leaf for report in explain(function)(*given).regions for leaf in report.leaves]
    assert not [leaf for leaf in leaves if leaf.role == "score"]


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("is_first", [True, False])
def test_source_of_one_key_matches_the_reference(is_first, implementation):
    """The source is a learned null key with a value of its own."""

    def function(query, key, value, null_key, null_value):
        order = slice(None, None, -1 if is_first else 1)
        scores = jnp.concatenate([query @ key.mT, query @ null_key.mT][order], axis=-1)
        return jax.nn.softmax(scores, axis=-1) @ jnp.concatenate([value, null_value][order], axis=2)

    one = (BATCH, HEADS, 1, WIDTH)
    given = arrays(OPERAND, OPERAND, OPERAND, one, one)
    assert_fused(function, given, implementation)
    assert "score" not in {x.role for region in trace(function, given, {}).all_regions() for x in region.leaves}


@pytest.mark.parametrize("name", ["sliced", "joined values"])
def test_merged_sources_in_bfloat16_are_accurate(name):
    function, given = given_for(name)
    assert_as_good_as_written(function, fuse(function), [x.astype(jnp.bfloat16) for x in given])


def test_rows_masked_in_a_source_match_the_reference():
    """Rows that see nothing of one source have the other source's result; rows that see no key are 0."""

    def function(query, key, value, memory_key, memory_value, seen, has_memory):
        before = jnp.where(has_memory[:, None, None, None], query @ memory_key.mT, -jnp.inf)
        scores = jnp.concatenate([before, jnp.where(seen[:, None, None, None], query @ key.mT, -jnp.inf)], axis=-1)
        return jax.nn.softmax(scores, axis=-1) @ jnp.concatenate([memory_value, value], axis=2)

    given = arrays(OPERAND, OPERAND, OPERAND, MEMORY, MEMORY)
    flags = jnp.asarray([[True, False], [False, True], [False, False]])
    for seen in flags:
        more = (seen, ~seen if seen.any() else seen)
        found, expected = (
            with_gradients(lambda *x, f=f, more=more: f(*x, *more), given) for f in (fuse(function), function)
        )
        if seen.any():
            assert_alike(found, expected)
        else:
            assert not any(np.any(x) for x in found)


def test_softmax_over_sources_used_elsewhere_raises_not_fusible():
    def function(query, key, value, memory_key, memory_value):
        weights = jax.nn.softmax(jnp.concatenate([query @ memory_key.mT, query @ key.mT], axis=-1), axis=-1)
        return weights[..., MEMORIES:] @ value + weights.max(-1, keepdims=True)

    with pytest.raises(NotFusible, match="`concatenate` of scores"):
        fuse(function)(*arrays(OPERAND, OPERAND, OPERAND, MEMORY, MEMORY))


@pytest.mark.parametrize(
    "spread", [lambda total: total, lambda total: total[None, :]], ids=["keepdims forgotten", "along queries"]
)
def test_division_by_sums_of_other_rows_raises_not_fusible(spread):
    """With as many queries as keys, each exponential may be divided by the sum of another row."""

    def function(query, first, second, value):
        scores = jnp.concatenate([query @ first.T, query @ second.T], -1)
        powers = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = spread(powers.sum(-1))
        return (powers / jnp.broadcast_to(total, powers.shape)) @ value

    with pytest.raises(NotFusible):
        fuse(function)(*arrays((12, 8), (4, 8), (8, 8), (12, 8)))


CHANGED = {
    "a bound": lambda total: jnp.maximum(total, 5.0),
    "a choice": lambda total: jnp.where(total > 2, 1.0, total),
    "a sum that stands still": jax.lax.stop_gradient,
}


@pytest.mark.parametrize("name", CHANGED)
def test_division_by_changed_sums_raises_not_fusible(name):
    def function(query, first, second, value):
        scores = jnp.concatenate([query @ first.T, query @ second.T], -1)
        powers = jnp.exp(scores - scores.max(-1, keepdims=True))
        return (powers / CHANGED[name](powers.sum(-1, keepdims=True))) @ value

    with pytest.raises(NotFusible):
        fuse(function)(*arrays((12, 8), (4, 8), (8, 8), (12, 8)))


def test_guarded_maximum_of_joined_scores_matches_the_reference():
    """The guard may differ between keys; the maximum is then a part of the scores."""
    mask = np.random.default_rng(1).random((12, 12)) > 0.5

    def function(query, first, second, value, is_guard):
        scores = jnp.concatenate([query @ first.T, query @ second.T], -1)
        largest = scores.max(-1, keepdims=True)
        kept = jnp.isfinite(largest) if is_guard else jnp.asarray(mask)
        powers = jnp.exp(scores - jnp.where(kept, jnp.broadcast_to(largest, scores.shape), 0.0))
        return (powers / powers.sum(-1, keepdims=True)) @ value

    given = arrays((12, 8), (4, 8), (8, 8), (12, 8))
    for is_guard in (True, False):
        plain = functools.partial(function, is_guard=is_guard)
        fused = fuse(plain, fallback=True)
        assert_alike(with_gradients(fused, given), with_gradients(plain, given))


@pytest.mark.parametrize("batch", [1, 2])
def test_matmul_of_sources_with_a_batch_of_one_is_fused(batch):
    def function(query, key, value, memory_key, memory_value):
        scores = jnp.concatenate([query @ memory_key.mT, query @ key.mT], -1)
        return jax.nn.softmax(scores) @ jnp.concatenate([memory_value, value], -2)

    given = arrays(*[(batch, *x[1:]) for x in (OPERAND, OPERAND, OPERAND, MEMORY, MEMORY)])
    assert len(explain(function)(*given).regions) == 2
    assert_fused(function, given)
