"""Tests that equal regions share one derivation and that different regions do not."""

import collections
import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain, fuse
from blockdiag.fusion import program as program_module
from blockdiag.fusion.ir.structural_hash import key_of, shared
from blockdiag.fusion.ir.tree import with_leaves
from blockdiag.fusion.program import trace
from blockdiag.fusion.regions.operand_indexing import Puller
from blockdiag.fusion.runtime import kernel_choice
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.interop import compile_target, jax_call
from tests.fusion.fusion_support import arrays, assert_alike, assert_fused, with_gradients, work_of_passes

BATCH, HEADS, TOKENS, WIDTH = 2, 2, 24, 16
SHAPE = (BATCH, HEADS, TOKENS, WIDTH)


def attention(query, key, value, *, scale=0.25, seen=None, cap=None):
    scores = query @ key.mT * scale
    if cap is not None:
        scores = cap(scores)
    seen = jnp.tri(TOKENS, dtype=bool) if seen is None else seen
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ value


def region_of(function, *given):
    given = given or [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * 3
    ((region,),) = trace(function, given, {}).regions.values()
    return region


def with_scale(scale):
    return functools.partial(attention, scale=scale)


def positions_apart():
    places = jnp.arange(TOKENS)
    return places[:, None] - places[None, :]


def with_window(size):
    return lambda *given: attention(*given, seen=abs(positions_apart()) < size)


def with_mask(draw):
    return lambda *given: attention(*given, seen=np.random.default_rng(draw).random((TOKENS, TOKENS)) < 0.5)


def with_lengths(step):
    def lengths():
        # Known while tracing, since it depends on no argument.
        return (TOKENS - step * jnp.arange(BATCH))[:, None, None, None]

    return lambda *given: attention(*given, seen=jnp.arange(TOKENS)[None, None, None, :] < lengths())


def with_bias(bias):
    return lambda query, key, value: (
        jax.nn.softmax(query @ key.mT + bias * jnp.cumsum(jnp.ones((1, 1, 1, TOKENS)), axis=-1), axis=-1) @ value
    )


def with_cap(function):
    return functools.partial(attention, cap=function)


def with_slope(factor):
    """Return a function with a custom derivative."""

    @jax.custom_jvp
    def cap(scores):
        return jnp.tanh(scores)

    @cap.defjvp
    def slope(primals, tangents):
        return cap(*primals), factor * tangents[0]

    return cap


def tanh_of_rounded(dtype):
    return lambda scores: jnp.tanh(scores.astype(dtype).astype(jnp.float32))


def dropped(seed):
    def function(query, key, value):
        weights = jax.nn.softmax(query @ key.mT, axis=-1)
        kept = jax.random.bernoulli(jax.random.key(seed), 0.5, weights.shape)
        return jnp.where(kept, weights / 0.5, 0) @ value

    return function


@pytest.mark.parametrize(
    "make",
    [
        lambda: attention,
        lambda: with_window(4),
        lambda: with_mask(0),
        lambda: with_lengths(7),
        lambda: with_bias(1.0),
        lambda: with_cap(jnp.tanh),
        lambda: with_cap(with_slope(0.5)),
        lambda: dropped(0),
    ],
)
def test_regions_written_twice_have_the_same_hash(make):
    one, other = region_of(make()), region_of(make())
    assert one is not other
    assert key_of(one) == key_of(other)
    assert shared(one) is shared(other)


ZERO_BELOW = [with_cap(lambda scores, zero=zero: jnp.where(scores > 3, scores, zero)) for zero in (0.0, -0.0)]
TURNED = [
    lambda query, key, value: attention(query, key, value),
    lambda query, key, value: attention(key, query, value),
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (with_scale(0.25), with_scale(np.nextafter(np.float32(0.25), np.float32(1)))),
        (with_window(4), with_window(5)),
        (with_lengths(7), with_lengths(8)),
        (with_bias(1.0), with_bias(2.0)),
        ZERO_BELOW,
        (with_cap(jnp.tanh), with_cap(jnp.sin)),
        (with_cap(with_slope(0.5)), with_cap(with_slope(0.25))),
        (with_cap(lambda x: x**2), with_cap(lambda x: x**3)),
        (with_cap(lambda x: x * jnp.sin(x)), with_cap(lambda x: x * jnp.sin(jnp.sin(x)))),
        (with_cap(tanh_of_rounded(jnp.int32)), with_cap(tanh_of_rounded(jnp.int16))),
        (attention, lambda query, key, value: attention(query, key, value, seen=True)),
        (attention, lambda query, key, value: attention(query, query, value)),
        (attention, lambda query, key, value: attention(query, key, value).mT),
    ],
)
def test_regions_that_differ_have_different_hashes(one, other):
    regions = [region_of(one), region_of(other)]
    assert key_of(regions[0]) != key_of(regions[1])
    assert shared(regions[0]) is not shared(regions[1])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, *SHAPE[1:]), jnp.float32), (SHAPE, jnp.bfloat16), ((4, *SHAPE[2:]), jnp.float32)]
)
def test_regions_of_other_shapes_or_dtypes_have_different_hashes(shape, dtype):
    given = [jax.ShapeDtypeStruct(shape, dtype)] * 3
    assert key_of(region_of(attention)) != key_of(region_of(attention, *given))


def test_regions_with_a_constant_leaf_have_different_hashes():
    region = region_of(attention)
    for place, leaf in enumerate(region.leaves):
        if leaf.has_gradient:
            marked = [dataclasses.replace(x, is_constant=i == place) for i, x in enumerate(region.leaves)]
            other = with_leaves(region, dict(zip(region.leaves, marked, strict=True)))
            assert key_of(region) != key_of(other)


def test_regions_of_unknown_arrays_have_the_same_hash():
    """Kernels read such a mask from memory, so they are the same for all masks."""
    assert key_of(region_of(with_mask(0))) == key_of(region_of(with_mask(1)))


def test_regions_under_other_jax_settings_have_different_hashes():
    region = region_of(attention)
    key = key_of(region)
    with jax.default_matmul_precision("highest"):
        assert key_of(region) != key
    with jax.enable_x64(True):
        assert key_of(region) != key
    assert key_of(region) == key


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_layers_that_differ_in_one_value_match_the_reference(implementation):
    def layers(x):
        kinds = [with_scale(0.25), with_scale(0.5), with_window(4), with_window(9), with_mask(0), with_mask(1)]
        for kind in [*kinds, with_scale(0.25), with_mask(0)]:
            x = (x + kind(x, x * 0.5, x)) / 2
        return x

    assert_fused(layers, arrays(SHAPE), implementation)


def test_equal_layers_with_dropout_use_their_own_random_bits():
    def layers(*given):
        return jnp.stack([dropped(0)(*given), dropped(1)(*given), dropped(0)(*given)])

    given = arrays(SHAPE, SHAPE, SHAPE)
    first, second, third = fuse(layers)(*given)
    assert_alike([first, second], [fuse(dropped(seed))(*given) for seed in (0, 1)])
    np.testing.assert_array_equal(first, third)
    assert np.abs(first - second).max() > 0.1


def test_equal_layers_of_different_arrays_have_their_own_gradients():
    def layers(x, fixed):
        for weight in (x, fixed, x):
            x = x + attention(x, weight, x)
        return x

    x, fixed = arrays(SHAPE, SHAPE)
    fixed = fixed + 1
    found = with_gradients(lambda x: fuse(layers)(x, fixed), [x])
    assert_alike(found, with_gradients(lambda x: layers(x, fixed), [x]))


def model(count, layer=attention):
    """Return a function of layers with norms and a residual stream, and the shapes of its arguments."""

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    def function(x, parameters):
        for inputs, outputs, up, down in parameters:
            query, key, value = jnp.einsum("btc,icnh->ibnth", norm(x), inputs)
            x = x + jnp.einsum("bnth,nhc->btc", layer(query, key, value), outputs)
            x = x + jax.nn.gelu(norm(x) @ up) @ down
        return x

    shapes = [(3, 32, HEADS, WIDTH), (HEADS, WIDTH, 32), (32, 64), (64, 32)]
    parameters = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] for _ in range(count)]
    return function, (jax.ShapeDtypeStruct((BATCH, TOKENS, 32), jnp.float32), parameters)


def counted(monkeypatch, owner, *names):
    """Return a counter of the calls of functions from now on."""
    counts = collections.Counter()
    for name in names:
        function = getattr(owner, name)

        def call(*given, function=function, name=name, **options):
            counts[name] += 1
            return function(*given, **options)

        monkeypatch.setattr(owner, name, call)
    return counts


def forget_programs():
    """Collect garbage repeatedly: freeing a program's functions frees JAX's caches, and these free other functions."""
    for _ in range(4):
        if gc.collect() == 0:
            break


@pytest.fixture
def small_heap():
    """Set aside what is alive before a test. Otherwise each of its collections would visit all earlier programs."""
    # Objects that were set aside between tests may be garbage by now, such as equal regions of earlier tests.
    gc.unfreeze()
    forget_programs()
    gc.freeze()


STEPS = {
    kernel_choice: ("_kernels", "forward_source", "rows_source", "columns_source", "live_tiles"),
    triton_fused: ("forward", "backward"),
}


def work_of(function, given, monkeypatch):
    """Count the steps that trace a function and its gradient for Hopper, which need not be present."""
    forget_programs()
    with monkeypatch.context() as patched, compile_target(90):
        counts = [counted(patched, owner, *names) for owner, names in STEPS.items()]
        jax.jit(jax.grad(lambda *given: function(*given).sum(), argnums=(0, 1))).trace(*given)
        return counts[0] | counts[1]


def test_equal_layers_generate_kernels_once(small_heap, monkeypatch):
    works = []
    for count in (1, 4):
        function, given = model(count)
        works.append(work_of(fuse(function, implementation="triton"), given, monkeypatch))
    assert works[0]["forward_source"] >= 1 and works[0]["backward"] >= 1
    assert works[0] == works[1]


def test_separately_fused_layers_generate_kernels_once(small_heap, monkeypatch):
    works = []
    for count in (1, 4):
        function, given = model(count, fuse(attention, implementation="triton"))
        works.append(work_of(function, given, monkeypatch))
    assert works[0]["columns_source"] >= 1
    assert works[0] == works[1]


def test_each_kind_of_layer_generates_its_own_kernels(small_heap, monkeypatch):
    def layers(x):
        for scale in (0.25, 0.5, 0.25, 0.5):
            x = x + attention(x, x, x, scale=scale)
        return x

    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    forget_programs()
    with monkeypatch.context() as patched:
        counts = counted(patched, triton_fused, "forward")
        jax.make_jaxpr(fuse(layers, implementation="triton"))(x)
    assert counts["forward"] == 2 * 2  # for the interpreter and for CUDA


def test_equal_layers_are_explained_once(small_heap, monkeypatch):
    forget_programs()
    counts = counted(monkeypatch, kernel_choice, "_kernels")
    function, given = model(3)
    regions = explain(function)(*given).regions
    assert counts["_kernels"] == 1
    assert len(regions) == 3 and len({tuple(x.kernels.items()) for x in regions}) == 1


def test_compile_targets_have_separate_launches():
    function, (x, parameters) = model(1)
    fused = jax.jit(fuse(function, implementation="triton"))
    found = []
    for arch in (80, 90):
        with compile_target(arch):
            jaxpr = fused.trace(x, parameters).jaxpr
        found.append({arch_of(equation) for equation in launches_in(jaxpr.jaxpr)})
    assert found == [{80}, {90}]


def launches_in(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive is jax_call.launch_p and not equation.params["interpret"]:
            yield equation
        for param in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from launches_in(inner)


def arch_of(equation):
    return equation.params["target"].arch


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_shared_region_is_freed_with_its_program(small_heap, implementation, monkeypatch):
    regions = []

    def remembered(region):
        regions.append(weakref.ref(shared(region)))
        return shared(region)

    monkeypatch.setattr(program_module, "shared", remembered)
    function, (x, parameters) = model(2)
    fused = fuse(function, implementation=implementation)
    program = jax.make_jaxpr(jax.grad(lambda *given: fused(*given).sum(), argnums=(0, 1)))(x, parameters)
    forget_programs()
    assert len(regions) == 2 and regions[0]() is regions[1]()
    del program
    forget_programs()
    assert regions[0]() is None


def test_attention_search_is_linear_in_layers(monkeypatch):
    """A residual stream connects all layers, but the search for attention in one must not descend to the first."""
    counts = counted(monkeypatch, Puller, "_new_node")
    nodes = []
    for count in (4, 8, 12):
        before = counts["_new_node"]
        function, given = model(count)
        trace(function, given, {})
        nodes.append(counts["_new_node"] - before)
    assert nodes[2] - nodes[1] <= 1.1 * (nodes[1] - nodes[0])


def squares(query, key, value):
    """Return attention with masked squares of scores as weights, which are divided by their sum."""
    weights = jnp.where(jnp.tri(TOKENS, dtype=bool), jnp.square(query @ key.mT), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ value


@pytest.mark.parametrize("layer", [attention, squares])
def test_pass_work_per_layer_is_constant(layer):
    calls = [work_of_passes(*model(count, layer)) for count in (8, 16, 24)]
    assert calls[2] - calls[1] <= 1.1 * (calls[1] - calls[0])
