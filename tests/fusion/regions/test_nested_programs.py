"""Tests of attention inside `jax.lax.scan`, `jax.lax.cond` and `jax.checkpoint`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from tests.fusion import fusion_support
from tests.fusion.fusion_support import alternated, assert_alike

BATCH, TOKENS, HEADS, WIDTH, LAYERS = 2, 64, 2, 16, 4


def arrays(*shapes):
    """Return small random numbers."""
    return [x / 12 for x in fusion_support.arrays(*shapes)]


X = (BATCH, TOKENS, HEADS * WIDTH)
INTO, UP, DOWN = (HEADS * WIDTH, 3 * HEADS * WIDTH), (HEADS * WIDTH, 128), (128, HEADS * WIDTH)


def attention(query, key, value, mask):
    scores = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", query, key) / 4, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)


def layer(mask, x, weights):
    into, up, down = weights
    query, key, value = jnp.split((x @ into).reshape(*x.shape[:2], 3 * HEADS, WIDTH), 3, axis=2)
    x = x + attention(query, key, value, mask).reshape(x.shape)
    return x + jnp.tanh(x @ up) @ down


def causal():
    return jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[None, None]


def unrolled(x, *weights, policy=None):
    """Run layers one after the other, each inside `jax.checkpoint`."""
    again = jax.checkpoint(functools.partial(layer, causal()), policy=policy)
    for i in range(LAYERS):
        x = again(x, [w[i] for w in weights])
    return x


def scanned(x, *weights):
    mask = causal()
    return jax.lax.scan(lambda x, w: (layer(mask, x, w), x.mean()), x, weights, reverse=True)


def scanned_again(x, *weights):
    mask = causal()
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(mask, x, w), None)), x, weights, unroll=2)[0]


def mapped(x, *weights):
    """Map the first layer over the sequences."""
    return jax.lax.map(lambda one: layer(causal(), one[None], [w[0] for w in weights])[0], x)


def nested(x, *weights):
    """Run a layer, then a loop of layers inside `jax.checkpoint`."""

    @jax.checkpoint
    def rest(x, weights):
        return scanned(x, *weights)[0]

    return rest(layer(causal(), x, [w[0] for w in weights]), weights)


def branched(x, *weights):
    """Run one of two attentions, or none."""
    window = jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)[None, :]) < 9
    first = [w[0] for w in weights]
    kinds = [
        lambda x: layer(causal(), x, first),
        lambda x: layer((window & causal()[0, 0])[None, None], x, first),
        jnp.tanh,
    ]
    return jax.lax.switch(jnp.argmax(x[0, 0, :3]), kinds, x) + jax.lax.cond(x[0, 0, 0] > 0, kinds[1], kinds[0], x)


def within_another(x, *weights):
    """Run a loop whose body is a loop and little else."""

    def outer(x, w):
        return scanned(x + w[1][0, 0], *weights)[0], None

    return jax.lax.scan(outer, x, weights)[0]


# Each function with its number of regions.
FUNCTIONS = {"unrolled": (unrolled, LAYERS), "scanned": (scanned, 1), "scanned again": (scanned_again, 1),
             "mapped": (mapped, 1), "nested": (nested, 2), "branched": (branched, 4),
             "within another": (within_another, 1)}  # fmt: skip


def given():
    return arrays(X, *[(LAYERS, *shape) for shape in (INTO, UP, DOWN)])


def with_gradients(function, arguments):
    outputs, pull = jax.vjp(lambda *x: jax.tree.leaves(function(*x)), *arguments)
    return [*outputs, *pull([jnp.sin(3 * x) for x in outputs])]


@pytest.mark.parametrize(("name", "implementation"), alternated(FUNCTIONS))
def test_nested_attention_matches_the_reference_with_gradients(name, implementation):
    function, _ = FUNCTIONS[name]
    found = jax.jit(functools.partial(with_gradients, fuse(function, implementation=implementation)))(given())
    assert_alike(found, with_gradients(function, given()), 1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_explain_finds_nested_attention_with_position_masks(name):
    """Position masks that are made outside a nested program become functions of positions inside it."""
    function, count = FUNCTIONS[name]
    explanation = explain(function)(*given())
    assert len(explanation.regions) == count and not explanation.scores and explanation.unopened is None
    for region in explanation.regions:
        assert {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column"} and region.skipped > 0.2


def chosen(x, *weights):
    """Pick each layer's mask by a flag, as in scanned models in which only some layers have a window."""
    window = causal() & (jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)[None, :]) < 9)[None, None]

    def step(x, each):
        *w, is_local = each
        return layer(jax.lax.cond(is_local, lambda: window, causal), x, w), None

    return jax.lax.scan(step, x, (*weights, jnp.arange(LAYERS) % 2 == 0))[0]


def one_of_three(x, segments, kind, *weights):
    """Pick one of three masks by the number `kind`; some of them have segments [B, T]."""
    same = (segments[:, :, None] == segments[:, None, :])[:, None]
    shape = (BATCH, 1, TOKENS, TOKENS)
    masks = [
        lambda same: jnp.broadcast_to(causal(), shape),
        lambda same: same,
        lambda same: same & causal(),
    ]
    return layer(jax.lax.switch(kind, masks, same), x, [w[0] for w in weights])


def test_masks_chosen_by_cond_are_not_arrays():
    """The masks remain functions of positions."""
    (region,) = explain(chosen)(*given()).regions
    assert "score" not in {leaf.role for leaf in region.leaves}
    found = jax.jit(functools.partial(with_gradients, fuse(chosen, implementation="xla")))(given())
    assert_alike(found, with_gradients(chosen, given()), 1e-4)


@pytest.mark.parametrize("kind", range(3))
def test_masks_chosen_by_switch_are_not_arrays(kind):
    x, *weights = given()
    segments = jnp.repeat(jnp.arange(4), TOKENS // 4)[None].repeat(BATCH, axis=0)
    (region,) = explain(one_of_three)(x, segments, jnp.int32(kind), *weights).regions
    assert "score" not in {leaf.role for leaf in region.leaves} and region.skipped > 0.2
    compute = [functools.partial(one, x, segments, jnp.int32(kind)) for one in (fuse(one_of_three), one_of_three)]
    assert_alike(*(with_gradients(one, weights) for one in compute), 1e-4)


def test_biases_chosen_by_cond_match_the_reference_with_gradients():
    """The other branch is NaN here, and must not contribute to the bias or to its gradient."""

    def biased(query, key, value, slope, is_linear):
        places = jnp.arange(TOKENS, dtype=jnp.float32)
        away = jnp.abs(places[:, None] - places[None, :])
        bias = jax.lax.cond(is_linear, lambda x: x * away, lambda x: jnp.sqrt(x) * away, slope)
        return jax.nn.softmax(query @ key.mT + bias[None], axis=-1) @ value

    operands = [*arrays(*[(BATCH, TOKENS, WIDTH)] * 3), jnp.float32(-0.1)]
    compute = [functools.partial(one, is_linear=jnp.bool_(True)) for one in (fuse(biased), biased)]
    assert_alike(*(with_gradients(one, operands) for one in compute), 1e-4)


def hoisted(x, into, up, down, segments, table):
    """Make masks and biases from arguments once, before the loop."""
    places = jnp.arange(TOKENS)
    mask = (segments[:, :, None] == segments[:, None, :])[:, None] & causal()
    bias = table[jnp.clip(places[None, :] - places[:, None], -4, 3) + 4]

    def step(x, w):
        query, key, value = jnp.split((x @ w).reshape(*x.shape[:2], 3 * HEADS, WIDTH), 3, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / 4 + bias[None, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return x + jnp.einsum("bnts,bsnh->btnh", weights, value).reshape(x.shape), None

    return jax.lax.scan(jax.checkpoint(step), x, into)[0]


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_masks_built_before_a_loop_are_not_arrays(implementation):
    """Inside the loop, such masks and biases are functions of the arrays from which they are made."""
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (BATCH, TOKENS)), 1))
    operands = [*given(), segments, *arrays((8,))]
    (region,) = explain(hoisted)(*operands).regions
    assert sorted(leaf.role for leaf in region.leaves) == [
        "column", "column", "distance", "key", "query", "row", "row",
    ]  # fmt: skip

    def floating(function):
        return lambda *x: function(*x[:-1], segments, x[-1])

    floats = [*operands[:4], operands[-1]]
    found = jax.jit(functools.partial(with_gradients, fuse(floating(hoisted), implementation=implementation)))(floats)
    assert_alike(found, with_gradients(floating(hoisted), floats), 1e-4)


def test_nested_attention_under_jit_and_vmap_matches_the_reference():
    several = [jnp.stack([given()[0], 2 * given()[0]]), *given()[1:]]
    for function in (unrolled, scanned):
        found, expected = (
            jax.jit(jax.vmap(f, in_axes=(0, None, None, None)))(*several) for f in (fuse(function), function)
        )
        assert_alike(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-4)


def temporary(function):
    """Return the bytes of temporary memory that the gradient needs."""
    slope = jax.jit(jax.grad(lambda *x: jnp.sum(function(*x)), (0, 1, 2, 3)))
    return slope.lower(*given()).compile().memory_analysis().temp_size_in_bytes


def test_checkpointed_attention_is_not_kept_in_memory():
    plain, fused = temporary(functools.partial(unrolled)), temporary(fuse(unrolled))
    kept = temporary(fuse(functools.partial(unrolled, policy=jax.checkpoint_policies.everything_saveable)))
    assert fused < 1.5 * plain and fused < 0.6 * kept


def test_softmax_inside_checkpoint_is_fused_with_the_product_outside():
    """The checkpoint is opened, because the attention extends beyond it."""

    def function(query, key, value):
        weights = jax.checkpoint(lambda q, k: jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)))(query, key)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    operands = arrays(*[(BATCH, TOKENS, HEADS, WIDTH)] * 3)
    assert len(explain(function)(*operands).regions) == 1
    assert_alike(with_gradients(fuse(function), operands), with_gradients(function, operands))


def test_checkpoint_without_attention_is_not_opened():
    def function(query, key, value):
        return jax.checkpoint(jnp.tanh)(attention(query, key, value, causal()))

    operands = arrays(*[(BATCH, TOKENS, HEADS, WIDTH)] * 3)
    explanation = explain(function)(*operands)
    assert len(explanation.regions) == 1 and set(explanation.outside) & {"remat2", "checkpoint"}


def test_running_softmax_in_a_scan_is_not_rewritten():
    """In blockwise attention by hand, sums that are carried from step to step are not a softmax of one step."""

    def function(query, key, value):
        def step(carry, block):
            largest, total, output = carry
            scores = query @ block[0].T
            new = jnp.maximum(largest, scores.max(-1))
            powers, shrink = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
            return (new, total * shrink + powers.sum(-1), output * shrink[:, None] + powers @ block[1]), None

        start = (jnp.full(TOKENS, -jnp.inf), jnp.zeros(TOKENS), jnp.zeros((TOKENS, WIDTH)))
        blocks = (key.reshape(4, -1, WIDTH), value.reshape(4, -1, WIDTH))
        _, total, output = jax.lax.scan(step, start, blocks)[0]
        return jax.nn.softmax(query @ key.T) @ value + output / total[:, None]

    operands = arrays(*[(TOKENS, WIDTH)] * 3)
    explanation = explain(function)(*operands)
    assert len(explanation.regions) == 1 and explanation.unopened is None
    assert_alike(with_gradients(fuse(function), operands), with_gradients(function, operands))


def test_references_in_loops_are_not_rewritten():
    def function(x, weights):
        reference = jax.new_ref(weights[0])

        def step(x, w):
            reference[...] = reference[...] + w
            return jax.nn.softmax(x @ reference[...] @ x.T) @ x, None

        return jax.lax.scan(step, x, weights)[0]

    operands = arrays((TOKENS, WIDTH), (LAYERS, WIDTH, WIDTH))
    fused = fuse(function, fallback=True)
    assert_alike([fused(*operands)], [function(*operands)])
    assert len(fused.fallbacks) == 1 and "except possibly in `scan`" in explain(function)(*operands).reason


def sines(steps, first, second):
    """Return an embedding of steps [B, F] for all layers, with first [F, D] and second [D, C]."""
    return (jax.nn.silu(jnp.sin(steps) @ first) @ second)[:, None]


STEPS = (BATCH, HEADS * WIDTH), (HEADS * WIDTH, 2 * HEADS * WIDTH), (2 * HEADS * WIDTH, HEADS * WIDTH)
BESIDE = {
    "before a scan": lambda x, into, up, down, *time: scanned(x + sines(*time), into, up, down)[0],
    "beside a scan": lambda x, into, up, down, *time: scanned(x, into, up, down)[0] + sines(*time),
    "in a loop around it": lambda x, into, up, down, *time: jax.lax.fori_loop(
        0, 2, lambda i, x: scanned(x + sines(*time), into, up, down)[0], x
    ),
    "before a branch": lambda x, into, up, down, *time: jax.lax.cond(
        time[0][0, 0] > -9, lambda x: layer(causal(), x, (into[0], up[0], down[0])), lambda x: x, x + sines(*time)
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_non_attention_beside_loops_is_not_fused_and_matches_the_reference(name):
    """Without other attention, such products of exponentials look like attention that is refused."""
    function = BESIDE[name]
    given = arrays(X, *((LAYERS, *shape) for shape in (INTO, UP, DOWN)), *STEPS)
    assert len(explain(function)(*given).regions) == 1
    found = fuse(function)(*given)
    np.testing.assert_allclose(found, function(*given), rtol=0, atol=2e-5 * float(np.abs(found).max()))


def test_explain_names_unopened_products_around_a_loop():
    function, given = BESIDE["beside a scan"], arrays(X, *((LAYERS, *shape) for shape in (INTO, UP, DOWN)), *STEPS)
    found = explain(function)(*given)
    assert found.reason is None and "computed as written: `dot_general`" in found.unopened
    assert found.unopened in str(found)


def test_unfusible_softmax_beside_a_loop_with_attention_raises_not_fusible():
    """The loop's attention does not hide the refusal."""

    def function(x, keys, weights):
        weights = jax.nn.softmax(jnp.concatenate([x @ keys.mT, x @ x.mT], axis=-1), axis=-1)
        x = weights[..., keys.shape[1] :] @ x + weights.max(-1, keepdims=True)
        return jax.lax.scan(lambda x, _: (jax.nn.softmax(x @ x.mT) @ x, None), x, None, length=2)[0]

    with pytest.raises(NotFusible, match="`concatenate` of scores"):
        fuse(function)(*arrays((2, 8, 4), (2, 5, 4), (3, 4, 4)))


def test_unfusible_softmax_beside_a_loop_without_attention_raises_not_fusible():
    def function(x, weights):
        scores = x @ x.mT
        return jax.lax.scan(lambda x, w: (x @ w, None), jax.nn.softmax(jnp.sort(scores), axis=-1) @ x, weights)[0]

    with pytest.raises(NotFusible, match="`sort`"):
        fuse(function)(*arrays((2, 8, 4), (3, 4, 4)))
