"""Tests of `fuse` on functions that do more than compute, such as effects, mapped axes and stateful modules."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.api import is_fused
from tests.fusion.fusion_support import assert_alike, assert_fused, with_gradients

SHAPE = (2, 24, 2, 16)


def arrays(count=3, shape=SHAPE):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for _ in range(count)]


def attention(query, key, value):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / 4)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def test_mask_value_beyond_float16_becomes_infinite_without_a_warning():
    def function(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        weights = jax.nn.softmax(jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -1e9))
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    given = [x.astype(jnp.float16) for x in arrays()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fuse(function)(*given)
    np.testing.assert_allclose(found, function(*given), atol=5e-3)


# Effects


def test_writes_to_a_local_reference_are_kept():
    def function(query, key, value):
        reference = jax.new_ref(attention(query, key, value))
        reference[:, 0] = jnp.zeros_like(query[:, 0])
        return reference[...]

    given = arrays()
    for fused in (fuse(function), jax.jit(fuse(function))):
        assert_alike([fused(*given)], [function(*given)])


def test_writes_to_a_given_reference_happen_once_per_call():
    def function(query, key, value, reference):
        output = attention(query, key, value)
        reference[...] += 1.0
        return output

    reference = jax.new_ref(0.0)
    fuse(function)(*arrays(), reference)
    jax.jit(fuse(function))(*arrays(), reference)
    assert reference[...] == 2


def test_reads_of_a_given_reference_are_kept():
    def function(query, key, value, reference):
        return attention(query * reference[...], key, value)

    given = [*arrays(), jax.new_ref(2.0)]
    assert_alike([fuse(function)(*given)], [function(*given)])


def test_callbacks_are_called_in_order():
    seen = []

    def function(query, key, value):
        jax.debug.callback(lambda x: seen.append(("first", float(x))), query[0, 0, 0, 0], ordered=True)
        output = attention(query, key, value)
        jax.debug.callback(lambda x: seen.append(("second", float(x))), output[0, 0, 0, 0], ordered=True)
        return output

    given = arrays()
    output = jax.jit(fuse(function))(*given)
    jax.effects_barrier()
    assert seen == [("first", float(given[0][0, 0, 0, 0])), ("second", float(output[0, 0, 0, 0]))]


def test_callbacks_are_called_each_time():
    """A callback without arguments is not treated as a constant."""
    count = []

    def number():
        count.append(1)
        return np.float32(len(count))

    def function(query, key, value):
        return attention(query * io_callback(number, jax.ShapeDtypeStruct((), jnp.float32)), key, value)

    fused, given = jax.jit(fuse(function)), arrays()
    first, second = fused(*given), fused(*given)
    assert len(count) == 2 and not np.array_equal(first, second)


def test_checkify_checks_are_kept():
    def function(query, key, value):
        checkify.check(jnp.all(query < 0), "query must be negative")
        return attention(query, key, value)

    error, _ = checkify.checkify(jax.jit(fuse(function)))(*arrays())
    assert "query must be negative" in error.get()


def test_ordered_callbacks_with_a_log_sum_exp_run_in_order():
    """A callback that waits for the kernel still runs before a later callback that does not."""
    seen = []

    def function(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        log_sum = jax.nn.logsumexp(scores, -1)
        jax.debug.callback(lambda x: seen.append(("sum", float(x))), log_sum[0, 0, 0], ordered=True)
        jax.debug.callback(lambda x: seen.append(("query", float(x))), query[0, 0, 0, 0], ordered=True)
        return jnp.einsum("bnts,bsnh->bnth", jax.nn.softmax(scores), value) * log_sum[..., None]

    given = arrays()
    assert_alike([jax.jit(fuse(function))(*given)], [jax.jit(function)(*given)])
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["sum", "query"] * 2
    assert {leaf for leaf in explain(function)(*given).outside} >= {"debug_callback"}


# Mapped axes


def with_offset(query, key, value):
    """Return causal attention for the queries of one device, or of one index of `vmap`."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    places = jnp.arange(query.shape[1]) + jax.lax.axis_index("i") * 5
    mask = places[:, None] >= jnp.arange(key.shape[1])[None, :]
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_axis_index_of_vmap_matches_the_reference(implementation):
    given = [x[:, None] for x in arrays()]

    def mapped(function):
        return jax.vmap(function, axis_name="i")(*given)

    assert_alike([mapped(fuse(with_offset, implementation=implementation))], [mapped(with_offset)])


def test_axis_index_of_a_mesh_matches_the_reference():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))

    def sharded(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(*arrays())

    assert_alike([sharded(fuse(with_offset))], [sharded(with_offset)])


def test_sharding_constraints_do_not_prevent_fusion():
    place = NamedSharding(jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,)), P("i"))

    def function(query, key, value):
        scores = jax.lax.with_sharding_constraint(jnp.einsum("btnh,bsnh->bnts", query, key), place)
        weights = jax.lax.with_sharding_constraint(jax.nn.softmax(scores), place)
        return jax.lax.with_sharding_constraint(jnp.einsum("bnts,bsnh->btnh", weights, value), place)

    assert len(explain(function)(*arrays()).regions) == 1
    found, expected = (jax.jit(lambda *x, f=f: with_gradients(f, x))(*arrays()) for f in (fuse(function), function))
    assert_alike(found, expected)


def test_vmap_over_an_empty_axis_keeps_shapes():
    empty = jnp.zeros((0, *SHAPE))
    fused = fuse(attention)
    assert jax.vmap(fused)(empty, empty, empty).shape == empty.shape
    assert jax.vmap(jax.grad(lambda x: fused(x, x, x).sum()))(empty).shape == empty.shape
    (query, *_) = arrays()
    total = jax.grad(lambda key: jax.vmap(fused, in_axes=(0, None, None))(empty, key, key).sum())(query)
    assert total.shape == query.shape and not total.any()


def test_fuse_leaks_no_tracers():
    def function(query, key, value, seen):
        scores = jnp.where(seen[:, None, None, :], jnp.einsum("btnh,bsnh->bnts", query, key), -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)

    seen = jnp.asarray(np.random.default_rng(0).random((2, 24)) < 0.7)
    with jax.check_tracer_leaks():
        fuse(function)(*arrays(), seen)


# Modules, inner derivatives and nested calls


class Attention(nnx.Module):
    """Attention by hand, with dropout of weights."""

    def __init__(self, rate, rngs):
        self.into = nnx.Linear(16, 48, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs, deterministic=not rate)

    def __call__(self, x):
        query, key, value = jnp.split(self.into(x).reshape(*x.shape[:2], 6, 8), 3, 2)
        weights = self.dropout(jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key)))
        return jnp.einsum("bnts,bsnh->btnh", weights, value).reshape(x.shape)


def test_unchanged_nnx_module_is_fused():
    module, x = Attention(0, nnx.Rngs(0)), jnp.ones((2, 20, 16))
    fused = fuse(lambda module, x: module(x))
    assert_alike([fused(module, x)], [module(x)])


def test_changed_nnx_module_raises_not_fusible():
    """Without the change, the module's random counts would not advance and dropout would repeat its masks."""
    x = jnp.ones((2, 20, 16))
    with pytest.raises(NotFusible, match="modifies an argument"):
        fuse(lambda module, x: module(x))(Attention(0.5, nnx.Rngs(0)), x)
    module = Attention(0.5, nnx.Rngs(0))
    fused = fuse(lambda module, x: module(x), fallback=True)
    assert not np.array_equal(fused(module, x), fused(module, x)) and len(fused.fallbacks) == 2


def decoding(**options):
    module = nnx.MultiHeadAttention(2, 16, decode=True, rngs=nnx.Rngs(0), **options)
    module.init_cache((1, 8, 16))
    return module


def test_nnx_module_with_a_cache_raises_not_fusible_with_remedies():
    """The message names the modified argument and two remedies."""
    ways = ["`args\\[0\\]\\.cache_", "decode=True", "attention_fn=fuse", "nnx.clone", "nnx.state", "nnx.update"]
    for function in (lambda module, x: module(x), nnx.jit(lambda module, x: module(x))):
        with pytest.raises(NotFusible, match=".*".join(ways)):
            fuse(function)(decoding(), jnp.ones((1, 1, 16)))


def test_nnx_module_with_a_cache_is_fused_by_the_suggested_remedies():
    tokens = jax.random.normal(jax.random.key(0), (3, 1, 1, 16))
    plain, module, other = decoding(), decoding(), decoding(attention_fn=fuse(nnx.dot_product_attention))

    @fuse
    def step(module, x):
        module = nnx.clone(module)
        return module(x), nnx.state(module, nnx.Cache)

    for x in tokens:
        result, state = step(module, x)
        nnx.update(module, state)
        expected = plain(x)
        assert_alike([result, other(x)], [expected, expected])


def test_derivatives_inside_a_function_raise_not_fusible():
    def function(query, key, value):
        return jax.grad(lambda x: attention(x, key, value).sum())(query)

    with pytest.raises(NotFusible, match="fuse the function that is differentiated"):
        fuse(function)(*arrays())


def test_fuse_of_a_fused_function_matches_the_reference():
    given = arrays()
    again = fuse(fuse(attention, implementation="triton"), implementation="xla")
    inside = fuse(lambda *x: 2 * fuse(attention)(*x))
    assert_alike([again(*given), inside(*given)], [attention(*given), 2 * attention(*given)])


@pytest.mark.parametrize("change", [jax.vmap, jax.jit, jax.checkpoint, functools.partial])
def test_transformed_fused_function_is_run_as_it_is(change):
    """`functools.wraps` copies attributes of the fused function, which must not mark the transformed one as fused."""
    given = [x[None] for x in arrays()] if change is jax.vmap else arrays()
    changed = change(fuse(attention))
    assert not is_fused(changed)
    assert_alike([fuse(changed)(*given)], [changed(*given)])
    assert explain(changed)(*given).unopened.startswith("there is attention that is already fused")


def test_explain_lists_scores_that_are_recomputed():
    def function(query, key, value):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key))
        return jnp.einsum("bnts,bsnh->btnh", weights, value), -(weights * jnp.log(weights)).sum(-1)

    explanation = explain(function)(*arrays())
    (scores,) = explanation.scores
    assert scores.startswith("float32[2, 2, 24, 24], at ") and f"scores {scores}" in str(explanation)
    assert not explain(attention)(*arrays()).scores


def test_results_are_arrays():
    def function(query, key, value):
        return attention(query, key, value), np.arange(3), 2.0, np.float32(3)

    assert all(isinstance(x, jax.Array) for x in fuse(function)(*arrays()))


def test_fuse_of_a_function_without_attention_says_what_fuse_is_for():
    with pytest.raises(NotFusible, match="`fuse` is for attention"):
        fuse(lambda x: jnp.cumsum(jax.nn.softplus(x)))(jnp.ones((4, 4)))


def test_second_derivatives_without_xla_optimisation_match_the_reference():
    """Recomputed scores may be rounded differently, so that none of them equals the maximum."""

    def biased(query, key, value, bias):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 8**-0.5 + bias[None, None]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)

    draw = np.random.default_rng(0)
    query, key, value, bias = (
        jnp.asarray(draw.normal(size=x), jnp.float32) for x in ((2, 20, 2, 8), (2, 24, 2, 8), (2, 24, 2, 8), (20, 24))
    )

    def second(function):
        def loss(x):
            return jnp.sum(jnp.sin(function(x, key, value, bias)))

        steep = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(loss)(x)))))
        return steep.lower(query).compile({"xla_backend_optimization_level": 0})(query)

    assert_alike([second(fuse(biased))], [second(biased)], 1e-4)


def test_gated_and_projected_results_of_grouped_heads_match_the_reference():
    """The operand of the final projection is not attention weights, and its axes do not separate groups of heads."""

    def function(query, key, value, gate, projection):
        batch, tokens = query.shape[:2]
        found = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
        return (found.reshape(batch, tokens, -1) * jax.nn.sigmoid(gate)) @ projection

    query, gate = arrays(2, (2, 24, 4, 16))
    projection = arrays(1, (64, 8))[0]
    assert_fused(function, (query, *arrays(2), gate.reshape(2, 24, 64), projection))
