"""Statements of `explain` about devices, compared with compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import explain, fuse
from tests.division.division_support import KINDS, assert_divides
from tests.ops.op_calls import WIDTH


def attend(query, key, value, bias):
    """Attend with two query heads for each key head and a bias shared by all sequences."""
    query = query.reshape(*query.shape[:2], key.shape[2], -1, WIDTH)
    scores = jnp.einsum("bqngh,bknh->bngqk", query, key) + bias[None, :, None]
    return jnp.einsum("bngqk,bknh->bqngh", jax.nn.softmax(scores, axis=-1), value)


def shapes(batch=4):
    keys = (batch, 24, 2, WIDTH)
    return {"query": (batch, 24, 4, WIDTH), "key": keys, "value": keys, "bias": (2, 24, 24)}


def types(batch=4):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes(batch).items()}


def last_line(function, **arrays):
    (region,) = explain(function)(**arrays).regions
    return str(region).splitlines()[-1]


def test_explanation_names_divisible_axes_and_summed_gradients():
    found = explain(fuse(attend))(**types())
    (region,) = found.regions
    assert region.divided == ("b0", "b1", "g0")
    assert {x.role: x.over for x in region.summed} == {"key": ("g0",), "value": ("g0",), "score": ("b0", "g0")}
    line = (
        "devices: batch axes b0, b1, g0 may be divided; gradients of key float32[4, 24, 2, 16], "
        "value float32[4, 24, 2, 16] are summed over g0; the gradient of score float32[2, 24, 24] is summed over b0, g0"
    )
    assert line == last_line(attend, **types())
    assert f"  {line}" in str(found).splitlines()


def test_explanation_omits_axes_of_size_one():
    (region,) = explain(attend)(**types(batch=1)).regions
    assert region.divided == ("b1", "g0")
    assert {x.over for x in region.summed} == {("g0",)}


def test_explanation_of_constant_or_integer_arrays_has_no_gradient_sum():
    def masked(query, key, value, mask):
        row = jnp.arange(24.0)
        away = jnp.abs(row[:, None] - row[None, :])
        scores = jnp.einsum("bqnh,bknh->bnqk", query, key) - away[None, None]
        scores = jnp.where(mask[None, None], scores, -jnp.inf)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), value)

    x = jax.ShapeDtypeStruct((4, 24, 2, WIDTH), jnp.float32)
    mask = jax.ShapeDtypeStruct((24, 24), jnp.bool_)
    line = last_line(masked, query=x, key=x, value=x, mask=mask)
    assert line == "devices: batch axes b0, b1 may be divided"


def test_explanation_of_a_call_without_batch_axes_has_nothing_to_divide():
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    line = last_line(lambda query, key, value: jax.nn.softmax(query @ key.mT) @ value, query=x, key=x, value=x)
    assert line == "devices: each computes all of it, because there is no batch axis to divide"


SHARDED = {
    "b0": dict.fromkeys(("query", "key", "value"), P("data")),
    "b1": dict.fromkeys(("query", "key", "value"), P(None, None, "data")) | {"bias": P("data")},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", SHARDED)
def test_compiled_gradients_have_the_reductions_of_the_explanation(label, kind):
    (region,) = explain(attend)(**types()).regions
    summed = [x.role for x in region.summed if label in x.over]
    assert summed == {"b0": ["score"], "b1": []}[label]
    draws = jax.random.split(jax.random.key(0), 4)
    arrays = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(draws, shapes().items(), strict=True)}

    def gradients(**arrays):
        return jax.grad(lambda x: (fuse(attend)(**x) ** 2).sum())(arrays)

    assert_divides(gradients, arrays, SHARDED[label], kind, {"all-reduce": len(summed)} if summed else {})
