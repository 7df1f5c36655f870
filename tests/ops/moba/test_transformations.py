"""MoBA under JAX's transformations: batching, differentiation, rematerialisation, sharding and export."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import blockdiag.ops.moba.xla
from blockdiag import MOBA_OUTPUT, MOBA_ROUTING, Routing, moba_attention, moba_routing
from tests.ops.block_diagonal.test_transformations import assert_close, cpu_mesh, explicit_mesh, loop, random_arrays
from tests.ops.moba_cases import value_and_gradients
from tests.support import compiled_quickly

attend = functools.partial(moba_attention, block_size=16, top_k=2)
attend_with_residual = functools.partial(attend, return_residual=True)
OFFSETS = jnp.asarray([[0, 20, 20, 45], [0, 1, 2, 50], [0, 0, 0, 0]], jnp.int32)


def gradients(function, query, key, value):
    """Return output, log-sum-exp and gradients, for cotangents that differ from element to element."""
    cotangents = jnp.cos(query), jnp.sin(query[..., 0])
    return value_and_gradients(function, query, key, value, *cotangents)


# Each function is compiled once for all ways to map it.
compiled_once = functools.cache(compiled_quickly)


def assert_maps(function, in_axes, *arrays):
    """Assert that `jax.vmap` of a function matches a loop over its elements."""
    expected = loop(compiled_once(function), in_axes, *arrays)
    assert_close(compiled_quickly(jax.vmap(function, in_axes))(*arrays), expected, 1e-4)


# --- vmap ---------------------------------------------------------------------------------------------------------

batched_gradients = functools.partial(gradients, attend_with_residual)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, None), (None, None, 1)])
def test_vmap_of_batched_operands_matches_a_loop(in_axes):
    shapes = ((2, 37, 4, 8), (2, 40, 2, 8), (2, 40, 2, 8))
    arrays = random_arrays(*(s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(shapes, in_axes, strict=True)))
    assert_maps(batched_gradients, in_axes, *arrays)


@functools.cache
def packed_gradients(is_causal):
    def function(query, key, value, offsets, mask):
        call = functools.partial(attend_with_residual, sequence_offsets=offsets, key_mask=mask, is_causal=is_causal)
        return gradients(call, query, key, value)

    return function


@pytest.mark.parametrize(
    ("mapped", "is_causal"),
    [("offsets", True), ("mask", True), ("both", True), ("neither", True), ("both", False), ("neither", False)],
)
def test_vmap_of_packed_operands_and_tables_matches_a_loop(mapped, is_causal):
    query, key, value = random_arrays((3, 50, 4, 8), (3, 50, 2, 8), (3, 50, 2, 8))
    masks = jnp.asarray(np.random.default_rng(1).uniform(size=(3, 50)) < 0.7)
    offsets_axis, mask_axis = 0 if mapped in ("offsets", "both") else None, 0 if mapped in ("mask", "both") else None

    in_axes = (0, 0, 0, offsets_axis, mask_axis)
    offsets, mask = (x if axis == 0 else x[0] for x, axis in ((OFFSETS, offsets_axis), (masks, mask_axis)))
    assert_maps(packed_gradients(is_causal), in_axes, query, key, value, offsets, mask)


def gradients_with_a_routing(query, key, value, indices):
    return gradients(functools.partial(attend_with_residual, routing=Routing(indices, 16, 4)), query, key, value)


@pytest.mark.parametrize("routing_axis", [0, None])
def test_vmap_of_a_given_routing_matches_a_loop(routing_axis):
    query, key, value = random_arrays((3, 50, 4, 8), (3, 50, 2, 8), (3, 50, 2, 8))
    indices = jnp.asarray(np.random.default_rng(1).integers(-1, 4, (3, 50, 4, 2)), jnp.int32)

    indices = indices if routing_axis == 0 else indices[0]
    assert_maps(gradients_with_a_routing, (0, 0, 0, routing_axis), query, key, value, indices)


def test_nested_vmap_matches_a_loop():
    query, key, value = random_arrays((2, 3, 40, 2, 8), (3, 40, 2, 8), (2, 40, 2, 8))

    def function(query, key, value, offsets):
        return attend_with_residual(query, key, value, sequence_offsets=jnp.minimum(offsets, 40))

    inner_axes, outer_axes = (0, 0, None, 0), (0, None, 0, None)
    actual = compiled_quickly(jax.vmap(jax.vmap(function, inner_axes), outer_axes))(query, key, value, OFFSETS)
    one = compiled_quickly(function)
    expected = loop(functools.partial(loop, one, inner_axes), outer_axes, query, key, value, OFFSETS)
    assert_close(actual, expected, 1e-4)


def test_gradient_of_vmap_with_shared_key_and_value_matches_a_loop():
    query, key, value = random_arrays((3, 40, 4, 8), (40, 2, 8), (40, 2, 8))
    mapped = jax.vmap(attend_with_residual, (0, None, None))
    looped = functools.partial(loop, attend_with_residual, (0, None, None))
    assert_close(
        compiled_quickly(functools.partial(gradients, mapped))(query, key, value),
        compiled_quickly(functools.partial(gradients, looped))(query, key, value),
        1e-4,
    )


def test_vmap_folds_into_one_call():
    """Mapped elements become tokens of one call, so the program has no more loops and products than an unmapped one."""
    query, key, value = random_arrays((3, 40, 2, 8), (3, 40, 2, 8), (3, 40, 2, 8))

    def count(function, *arguments):
        text = jax.jit(function).lower(*arguments).as_text()
        return len(re.findall("dot_general", text)), len(re.findall(r"stablehlo\.while", text))

    assert count(jax.vmap(attend), query, key, value) == count(attend, query[0], key[0], value[0])


# --- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda f, x: jax.jacfwd(f)(x),
        lambda f, x: jax.linearize(f, x)[1](x),
        lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
        lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    ],
    ids=["jvp", "jit of jvp", "jacfwd", "linearize", "hessian", "checkpoint"],
)
def test_forward_mode_raises_type_error_with_the_supported_implementation(transform):
    query, key, value = random_arrays((20, 1, 4), (20, 1, 4), (20, 1, 4))
    with pytest.raises(TypeError, match='implementation="reference"'):
        transform(lambda x: attend(x, key, value), query)


def test_forward_mode_of_the_reference_matches_finite_differences():
    query, key, value, tangent = random_arrays((30, 2, 8), (30, 1, 8), (30, 1, 8), (30, 1, 8))
    routing = moba_routing(query, key, block_size=16, top_k=2)
    function = jax.jit(functools.partial(attend, implementation="reference", routing=routing))
    _, by_rule = jax.jvp(lambda x: function(query, x, value), (key,), (tangent,))
    step = 1e-2
    difference = function(query, key + step * tangent, value) - function(query, key - step * tangent, value)
    assert_close(by_rule, difference / (2 * step), 1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivative_matches_the_reference(packed):
    query, key, value = random_arrays((45, 2, 8), (45, 1, 8), (45, 1, 8))
    packing = {"sequence_offsets": jnp.asarray([0, 20, 20, 40], jnp.int32)} if packed else {}

    def penalty(implementation, *inputs):
        def loss(*inputs):
            output, log_sum = attend_with_residual(*inputs, implementation=implementation, **packing)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(jnp.isfinite(log_sum), log_sum, 0) ** 2)

        return sum(jnp.sum(gradient**2) for gradient in jax.grad(loss, (0, 1, 2))(*inputs))

    def second(implementation):
        return compiled_quickly(jax.grad(functools.partial(penalty, implementation), (0, 1, 2)))(query, key, value)

    for a, e in zip(second("xla"), second("reference"), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-4 * np.abs(e).max())


def test_routing_offsets_and_mask_have_zero_gradient():
    query, key, value = random_arrays((20, 2, 8), (20, 2, 8), (20, 2, 8))
    routing = moba_routing(query, key, block_size=16, top_k=2)

    def total(routing, offsets, mask):
        return attend(query, key, value, sequence_offsets=offsets, routing=routing, key_mask=mask).sum()

    constants = (routing, jnp.asarray([0, 20], jnp.int32), jnp.ones(20, bool))
    for gradient in jax.tree.leaves(jax.grad(total, (0, 1, 2), allow_int=True)(*constants)):
        assert gradient.dtype == jax.dtypes.float0


def test_no_gradient_flows_through_the_routing():
    """The gradient equals that of a call with its routing given."""
    query, key, value = random_arrays((50, 2, 8), (50, 2, 8), (50, 2, 8))
    routing = moba_routing(query, key, block_size=16, top_k=2)
    given = functools.partial(attend_with_residual, routing=routing)
    actual, expected = (
        compiled_quickly(functools.partial(gradients, call))(query, key, value)
        for call in (attend_with_residual, given)
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_residuals_are_operands_results_and_integer_tables(dtype):
    """The kept floats are operands, output and log-sum-exp. The kept integers are tables and lists."""
    query, key, value = random_arrays((64, 4, 8), (64, 2, 8), (64, 2, 8), dtype=dtype)
    (output, log_sum), pull_back = jax.vjp(attend_with_residual, query, key, value)
    kept = jax.tree.leaves(pull_back)
    floating = [x.size for x in kept if jnp.issubdtype(x.dtype, jnp.floating)]
    assert sorted(floating) == sorted(x.size for x in (query, key, value, output, log_sum))
    slots, num_blocks = 1, 4
    lists = 4 * (64 * slots + 64 + 2 * num_blocks)
    assert sum(x.size for x in kept if x.dtype == jnp.int32) <= lists + 4 * (64 + num_blocks)


# --- rematerialisation and compilation ------------------------------------------------------------------------------


@pytest.fixture
def executions(monkeypatch) -> collections.Counter:
    """Count how often each function of the xla implementation is executed.

    Programs need a unique scale, so that no earlier trace is reused.
    """
    counter = collections.Counter()

    def count(name):
        function = getattr(blockdiag.ops.moba.xla, name)

        def counted(*arguments, **options):
            first, *others = jax.tree.leaves(results := function(*arguments, **options))

            def note(x):
                counter[name] += 1
                return x

            # One result passes through the host, so that unused and duplicate computations are not counted.
            first = jax.pure_callback(note, jax.ShapeDtypeStruct(first.shape, first.dtype), first)
            return jax.tree.unflatten(jax.tree.structure(results), [first, *others])

        monkeypatch.setattr(blockdiag.ops.moba.xla, name, counted)

    for name in ("route", "make_lists", "forward", "backward"):
        count(name)
    return counter


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, dict(route=1, make_lists=1, forward=1, backward=1)),
        ((), dict(route=2, make_lists=2, forward=2, backward=1)),
        ((MOBA_ROUTING,), dict(route=1, make_lists=1, forward=2, backward=1)),
        ((MOBA_OUTPUT,), dict(route=2, make_lists=2, forward=1, backward=1)),
        ((MOBA_OUTPUT, MOBA_ROUTING), dict(route=1, make_lists=1, forward=1, backward=1)),
    ],
)
def test_checkpoint_policies_repeat_only_the_unsaved_passes(names, expected, executions):
    query, key, value, weight = random_arrays((40, 2, 8), (40, 2, 8), (40, 2, 8), (8, 8))
    # A unique scale makes a call that has not been traced before.
    scale = 0.31 if names is None else 0.32 + 0.01 * sum(map(len, names))

    def layer(weight, query, key, value):
        return attend(query @ weight, key @ weight, value @ weight, scale=scale) @ weight

    if names is not None:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
    step = compiled_quickly(jax.value_and_grad(lambda weight: jnp.sum(jnp.tanh(layer(weight, query, key, value)))))
    jax.block_until_ready(step(weight))
    assert executions == expected


def test_scan_over_checkpointed_layers_matches_the_reference():
    query, key, value, weights = random_arrays((40, 2, 8), (40, 2, 8), (40, 2, 8), (3, 8, 8))
    policy = jax.checkpoint_policies.save_only_these_names(MOBA_OUTPUT, MOBA_ROUTING)

    def loss(implementation, weights):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, weight):
            return x + attend(x @ weight, key, value, implementation=implementation), None

        x, _ = jax.lax.scan(layer, query, weights)
        return jnp.sum(x**2)

    results = (compiled_quickly(jax.grad(functools.partial(loss, name)))(weights) for name in ("xla", "reference"))
    assert_close(*results, 1e-3)


def test_new_offsets_do_not_recompile():
    query, key, value = random_arrays((50, 2, 8), (50, 2, 8), (50, 2, 8))
    traces = 0

    @compiled_quickly
    def compute(query, key, value, offsets):
        nonlocal traces
        traces += 1
        return gradients(functools.partial(attend_with_residual, sequence_offsets=offsets), query, key, value)

    for offsets in ([0, 10, 40], [0, 0, 0], [0, 50, 50], [0, 1, 2]):
        compute(query, key, value, jnp.asarray(offsets, jnp.int32))
    assert traces == 1 and compute._cache_size() == 1


def test_concrete_offsets_do_not_change_the_program():
    from blockdiag.ops.moba.api import _attention

    query, key, value = random_arrays((50, 2, 8), (50, 2, 8), (50, 2, 8))
    attend(query, key, value, sequence_offsets=jnp.asarray([0, 10, 40], jnp.int32))
    before = _attention._cache_size()
    attend(query, key, value, sequence_offsets=jnp.asarray([0, 0, 7], jnp.int32))
    assert _attention._cache_size() == before


# --- several devices, export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.division("batch", "gradients", operation="moba", kind="manual")
def test_shard_map_with_replicated_key_and_value_matches_one_device(packed):
    query, key, value, cotangent = random_arrays((4, 40, 4, 8), (1, 40, 2, 8), (1, 40, 2, 8), (4, 40, 4, 8))
    offsets = jnp.asarray([0, 3, 37], jnp.int32)

    def loss(query, key, value, cotangent, offsets):
        packing = {"sequence_offsets": offsets} if packed else {}
        output, log_sum = attend_with_residual(query[0], key[0], value[0], **packing)
        log_sum = jnp.where(jnp.isfinite(log_sum), log_sum, 0)
        return jax.lax.psum(jnp.sum(output * cotangent[0]) + jnp.sum(log_sum), "x")

    sharded = jax.shard_map(loss, mesh=cpu_mesh(), in_specs=(P("x"), P(), P(), P("x"), P()), out_specs=P())

    def unsharded(query, key, value, cotangent, offsets):
        packing = {"sequence_offsets": offsets} if packed else {}
        one = functools.partial(attend_with_residual, **packing)
        output, log_sum = jax.vmap(one, (0, None, None))(query, key[0], value[0])
        return jnp.sum(output * cotangent) + jnp.sum(jnp.where(jnp.isfinite(log_sum), log_sum, 0))

    arguments = (query, key, value, cotangent, offsets)
    assert_close(
        compiled_quickly(jax.value_and_grad(sharded, (0, 1, 2)))(*arguments),
        compiled_quickly(jax.value_and_grad(unsharded, (0, 1, 2)))(*arguments),
        1e-4,
    )


@pytest.mark.division("heads", operation="moba", kind="manual")
def test_shard_map_over_heads_with_a_routing_matches_one_device():
    query, key, value = random_arrays((1, 40, 4, 8), (1, 40, 4, 8), (1, 40, 4, 8))
    spec = P(None, None, "x")

    def function(query, key, value):
        routing = moba_routing(query, key, block_size=16, top_k=2)
        return attend(query, key, value, routing=routing)

    sharded = jax.shard_map(function, mesh=cpu_mesh(), in_specs=spec, out_specs=spec)
    assert_close(compiled_quickly(sharded)(query, key, value), compiled_quickly(function)(query, key, value))


@functools.cache
@functools.cache
def masked_results(implementation):
    """Return a compiled function of operands and mask.

    It returns gradients, the output with the routing given, and the routing's indices.
    """

    @compiled_quickly
    def function(query, key, value, mask):
        options = dict(key_mask=mask, implementation=implementation)
        routing = moba_routing(query, key, block_size=16, top_k=2, **options)
        call = functools.partial(attend_with_residual, **options)
        given = functools.partial(attend, routing=routing, **options)
        return gradients(call, query, key, value), given(query, key, value), routing.indices

    return function


@pytest.mark.parametrize(
    ("spec", "implementation"),
    [
        *((spec, None) for spec in (P("x", None, "y"), P())),
        *(pytest.param(spec, None, marks=pytest.mark.exhaustive) for spec in (P("x"), P(None, None, "y"))),
        (P("x", None, "y"), "reference"),
        (P(), "reference"),
    ],
)
def test_explicit_shardings_match_one_device(spec, implementation):
    """Each device computes its batch rows and heads, and results are sharded like the operands."""
    query, key, value = random_arrays((4, 36, 4, 8), (4, 36, 2, 8), (4, 36, 2, 8))
    mask = jnp.asarray(np.random.default_rng(1).uniform(size=(4, 36)) < 0.7)
    function = masked_results(implementation)
    expected = function(query, key, value, mask)
    with jax.set_mesh(explicit_mesh()):
        operands = [jax.device_put(x, spec) for x in (query, key, value)]
        actual = function(*operands, mask)
    (output, log_sum, *operand_gradients), given, indices = actual
    for a, operand in zip((output, given, indices, *operand_gradients), (operands[0],) * 3 + (*operands,), strict=True):
        assert jax.typeof(a).sharding.spec == jax.typeof(operand).sharding.spec
    assert log_sum.sharding.spec[:1] == output.sharding.spec[:1]
    assert_close(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected), 1e-4)


def test_explicit_shardings_of_packed_tokens_match_one_device():
    query, key, value = random_arrays((40, 4, 8), (40, 2, 8), (40, 2, 8))
    offsets = jnp.asarray([0, 3, 37], jnp.int32)
    expected = attend(query, key, value, sequence_offsets=offsets)
    with jax.set_mesh(explicit_mesh()):
        query, key, value = (jax.device_put(x, P(None, "x")) for x in (query, key, value))
        actual = attend(query, key, value, sequence_offsets=offsets)
        assert_close(np.asarray(actual), np.asarray(expected))
        with pytest.warns(UserWarning, match=r"`moba_attention`: axis 0 .* is gathered"):
            actual = attend(jax.device_put(query, P("x")), key, value, sequence_offsets=offsets)
        assert_close(np.asarray(actual), np.asarray(expected))


def test_export_of_gradients_round_trips():
    query, key, value = random_arrays((2, 40, 4, 8), (2, 40, 2, 8), (2, 40, 2, 8))
    compute = jax.jit(functools.partial(gradients, attend_with_residual))
    exported = jax.export.export(compute, platforms=["cpu"])(query, key, value)
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(query, key, value), compute(query, key, value))
