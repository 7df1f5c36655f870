"""Tests of dropout inside `fuse`: random bits are made in tiles and agree wherever they are needed."""

import functools
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blockdiag import explain, fuse
from blockdiag.fusion.passes.random_bits import counter_bits
from blockdiag.fusion.program import trace
from tests.support import largest_error

HAS_TRITON = importlib.util.find_spec("triton") is not None
NAMES = ("xla", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")))
BOTH = pytest.mark.parametrize("implementation", NAMES)
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
BATCH, QUERIES, KEYS, HEADS, RATE = 2, 40, 72, 2, 0.3


def operands(width: int = 16) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    shapes = [(BATCH, length, HEADS, width) for length in (QUERIES, KEYS, KEYS)]
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def softmax_of(query, key):
    return jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5, axis=-1)


def chosen(query, key, value, rng):
    weights = softmax_of(query, key)
    keep = jax.random.bernoulli(rng, 1 - RATE, weights.shape)
    return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0.0), value)


def multiplied(query, key, value, rng):
    weights = softmax_of(query, key)
    keep = (jax.random.uniform(rng, weights.shape) >= RATE).astype(weights.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", weights * keep / (1 - RATE), value)


def of_narrow_numbers(query, key, value, rng):
    weights = softmax_of(query, key)
    keep = jax.random.uniform(rng, weights.shape, jnp.bfloat16) >= jnp.bfloat16(RATE)
    return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0.0), value)


def of_half_numbers(query, key, value, rng):
    weights = softmax_of(query, key)
    keep = jax.random.uniform(rng, weights.shape, jnp.float16) >= jnp.float16(RATE)
    return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0.0), value)


def of_all_heads(query, key, value, rng):
    weights = softmax_of(query, key)
    keep = jax.random.bernoulli(rng, 1 - RATE, (1, 1, *weights.shape[2:]))
    return jnp.einsum("bnqk,bknh->bqnh", weights * (keep.astype(weights.dtype) / (1 - RATE)), value)


def keys_first(query, key, value, rng):
    weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bknq", query, key) * query.shape[-1] ** -0.5, axis=1)
    keep = jax.random.bernoulli(rng, 1 - RATE, weights.shape)
    return jnp.einsum("bknq,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0.0), value)


def heads_last(query, key, value, rng):
    weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bqkn", query, key) * query.shape[-1] ** -0.5, axis=2)
    keep = jax.random.bernoulli(rng, 1 - RATE, weights.shape)
    return jnp.einsum("bqkn,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0.0), value)


def a_key_for_each_sequence(query, key, value, rng):
    keys = jax.random.split(rng, query.shape[0])
    weights = softmax_of(query, key)
    keep = jax.vmap(lambda rng: jax.random.bernoulli(rng, 1 - RATE, weights.shape[1:]))(keys)
    return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0.0), value)


def old_keys(query, key, value, rng):
    return chosen(query, key, value, jax.random.key_data(rng))


FUNCTIONS = (
    chosen, multiplied, of_narrow_numbers, of_half_numbers, of_all_heads, keys_first, heads_last,
    a_key_for_each_sequence, old_keys,
)  # fmt: skip
EACH = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def mask_of(function, rng, implementation="xla") -> np.ndarray:
    """Return the mask of kept weights [batch, heads, queries, keys], which equal scores and identity values reveal."""
    query, key, _ = operands()
    value = jnp.broadcast_to(jnp.eye(KEYS)[None, :, None], (BATCH, KEYS, HEADS, KEYS))
    output = jax.jit(fuse(function, implementation=implementation))(query * 0, key, value, rng)
    # All weights are equal, except for rounding.
    share = np.asarray(output) * KEYS * (1 - RATE)
    assert np.all(np.isclose(share, 0) | np.isclose(share, 1, rtol=1e-5))
    return share.transpose(0, 2, 1, 3) > 0.5


@NEEDS_TRITON
@EACH
def test_both_implementations_draw_the_same_bits(function):
    rng = jax.random.key(5)
    mask = mask_of(function, rng, "xla")
    np.testing.assert_array_equal(mask, mask_of(function, rng, "triton"))
    deviation = np.sqrt(RATE * (1 - RATE) / (QUERIES * KEYS))
    # Random bfloat16 numbers have only 128 values between 0 and 1.
    assert abs(mask[0, 0].mean() - (1 - RATE)) < 4 * deviation + (2**-7 if function is of_narrow_numbers else 0)
    is_shared = function is of_all_heads
    assert (mask[0, 0] == mask[0, 1]).all() == is_shared and (mask[0, 0] == mask[1, 0]).all() == is_shared


@EACH
def test_dropout_reads_no_bits_from_memory(function):
    """Bits of queries by keys are computed from leaves that have only queries or only keys."""
    (region,) = explain(function)(*operands(), jax.random.key(0)).regions
    assert {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column"}
    assert region.declined is None


def test_compiled_dropout_has_no_array_of_queries_by_keys():
    shape = (1, 1024, 1, 16)
    run = jax.jit(jax.grad(lambda x, rng: fuse(chosen, implementation="xla")(x, x, x, rng).sum()))
    assert "1024,1024" not in run.lower(jnp.ones(shape), jax.random.key(0)).compile().as_text()


@BOTH
@pytest.mark.parametrize("function", (chosen, of_all_heads, keys_first), ids=lambda function: function.__name__)
def test_gradients_use_the_mask_of_the_forward_pass(function, implementation):
    rng, inputs = jax.random.key(8), operands()
    mask = mask_of(function, rng, implementation)

    def known(query, key, value):
        weights = jnp.where(mask, softmax_of(query, key) / (1 - RATE), 0.0)
        return jnp.einsum("bnqk,bknh->bqnh", weights, value)

    def results(function, *inputs):
        output, pull = jax.vjp(function, *inputs)
        return (output, *pull(jnp.cos(output)))

    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(results, known))(*(np.asarray(x, np.float64) for x in inputs))
        exact = [np.asarray(x) for x in exact]
    fused = fuse(function, implementation=implementation)
    found = jax.jit(functools.partial(results, lambda *x: fused(*x, rng)))(*inputs)
    for one, true in zip(found, exact, strict=True):
        assert largest_error(one, true) < 1e-5 * max(1.0, np.abs(true).max())


def dropped_scores(query, key, value, rng):
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jax.random.bernoulli(rng, RATE, scores.shape), -jnp.inf, scores)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), value)


@BOTH
def test_dropout_before_the_softmax_matches_the_reference(implementation):
    """The weights of a row are the softmax over its kept keys."""
    rng, (query, key, value) = jax.random.key(2), operands()
    columns = jnp.broadcast_to(jnp.eye(KEYS)[None, :, None], (BATCH, KEYS, HEADS, KEYS))
    fused = jax.jit(fuse(dropped_scores, implementation=implementation))
    weights = np.asarray(fused(query, key, columns, rng)).transpose(0, 2, 1, 3)
    mask = weights > 0
    assert 0.65 < mask.mean() < 0.75
    scores = np.where(mask, np.einsum("bqnh,bknh->bnqk", query, key) / 4, -np.inf)
    np.testing.assert_allclose(weights, jax.nn.softmax(scores, axis=-1), rtol=1e-5, atol=1e-6)
    expected = np.einsum("bnqk,bknh->bqnh", weights, value)
    np.testing.assert_allclose(fused(query, key, value, rng), expected, rtol=1e-5, atol=1e-5)


def test_dropout_masks_repeat_for_a_key_and_differ_between_keys():
    masks = [mask_of(chosen, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(masks[0], masks[1])
    cells = masks[0].size
    agree, expected = (masks[0] == masks[2]).mean(), RATE**2 + (1 - RATE) ** 2
    assert abs(agree - expected) < 4 * np.sqrt(expected * (1 - expected) / cells)


def test_dropout_accepts_other_key_implementations():
    masks = [mask_of(chosen, jax.random.key(seed, impl="rbg")) for seed in (0, 1)]
    assert 0.65 < masks[0].mean() < 0.75 and (masks[0] != masks[1]).any()


@BOTH
def test_dropout_under_vmap_uses_the_mask_of_each_key(implementation):
    """A mapped key has the mask that it has alone; an unmapped key has one mask for all indices."""
    keys = jax.random.split(jax.random.key(4), 2)
    query, key, value = operands()
    queries = jnp.stack([query, -query])
    fused = jax.jit(fuse(chosen, implementation=implementation))
    found = jax.jit(jax.vmap(fused, (0, None, None, 0)))(queries, key, value, keys)
    same = jax.jit(jax.vmap(fused, (0, None, None, None)))(queries, key, value, keys[1])
    for i in range(2):
        np.testing.assert_allclose(found[i], fused(queries[i], key, value, keys[i]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(same[i], fused(queries[i], key, value, keys[1]), rtol=1e-5, atol=1e-6)


def test_dropout_gradients_under_vmap_and_checkpoint_match_single_calls():
    keys = jax.random.split(jax.random.key(4), 2)
    query, key, value = operands()
    fused = fuse(chosen, implementation="xla")

    def total(query, function):
        return jnp.sum(jnp.sin(jax.vmap(lambda rng: function(query, key, value, rng))(keys)))

    @jax.jit
    def single(query, rng):
        return jax.grad(lambda x: jnp.sum(jnp.sin(fused(x, key, value, rng))))(query)

    expected = single(query, keys[0]) + single(query, keys[1])
    for function in (fused, jax.checkpoint(fused)):
        found = jax.jit(lambda x, function=function: jax.grad(total)(x, function))(query)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_returned_dropout_mask_is_the_mask_of_the_weights(implementation):
    """The returned mask is drawn once more, with the same key."""

    def function(query, key, value, rng):
        weights = jax.nn.softmax(query @ key.mT, axis=-1)
        dropped = jnp.where(jax.random.bernoulli(rng, 0.75, weights.shape), weights, 0.0)
        return dropped @ value, jax.random.bernoulli(rng, 0.75, weights.shape)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 33, 16)), jnp.float32)
    found, mask = fuse(function, implementation=implementation)(x, x, x, jax.random.key(3))
    expected = jnp.where(mask, jax.nn.softmax(x @ x.mT, axis=-1), 0.0) @ x
    assert 0.7 < mask.mean() < 0.8
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_random_draws_outside_a_region_are_those_of_jax():
    """Draws that no region uses stay as written, and a returned mask is the one that the region used."""
    query, key, value = operands()
    rng, other = jax.random.split(jax.random.key(3))

    def function(query, key, value):
        weights = softmax_of(query, key)
        keep = jax.random.bernoulli(rng, 1 - RATE, weights.shape)
        output = jnp.einsum("bnqk,bknh->bqnh", weights * (keep.astype(weights.dtype) / (1 - RATE)), value)
        return output, keep, jax.random.bernoulli(other, 0.5, output.shape)

    output, keep, outside = jax.jit(fuse(function))(query, key, value)
    np.testing.assert_array_equal(outside, jax.random.bernoulli(other, 0.5, output.shape))
    np.testing.assert_array_equal(keep, mask_of(chosen, rng))
    weights = softmax_of(query, key) * keep.astype(query.dtype) / (1 - RATE)
    np.testing.assert_allclose(output, jnp.einsum("bnqk,bknh->bqnh", weights, value), rtol=1e-5, atol=1e-5)


def test_reference_draws_the_bits_of_jax():
    query, key, value = operands()
    rng = jax.random.key(3)
    plain = chosen(query, key, value, rng)
    np.testing.assert_array_equal(fuse(chosen, implementation="reference")(query, key, value, rng), plain)
    assert not np.allclose(fuse(chosen)(query, key, value, rng), plain, atol=1e-2)


def test_dropout_in_float64_matches_the_reference():
    with jax.enable_x64(True):
        inputs = [np.asarray(x, np.float64) for x in operands()]
        columns = np.broadcast_to(np.eye(KEYS)[None, :, None], (BATCH, KEYS, HEADS, KEYS))
        rng = jax.random.key(0)
        fused = jax.jit(fuse(chosen))
        keep = np.asarray(fused(inputs[0] * 0, inputs[1], columns, rng)).transpose(0, 2, 1, 3) > 0
        weights = np.where(keep, softmax_of(*inputs[:2]) / (1 - RATE), 0)
        assert 0.67 < keep.mean() < 0.73
        np.testing.assert_allclose(
            fused(*inputs, rng), np.einsum("bnqk,bknh->bqnh", weights, inputs[2]), rtol=1e-12, atol=1e-12
        )


@NEEDS_TRITON
def test_dropout_kernels_compile_without_spills():
    """On Hopper no register is spilled in a loop, and products use matrix units."""
    from blockdiag.triton_kernels.launch.plan import Target
    from tests.fusion.codegen.test_plans import launches_of
    from tests.triton_kernels.plans_support import report_of

    inputs = [jnp.zeros((2, 256, 4, 64), jnp.bfloat16)] * 3

    def narrow(query, key, value, rng):
        weights = softmax_of(query, key)
        keep = jax.random.bernoulli(rng, 1 - RATE, weights.shape)
        return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, weights / (1 - RATE), 0), value)

    ((region,),) = trace(narrow, (*inputs, jax.random.key(0)), {}).regions.values()
    for launch in launches_of(region).values():
        report = report_of(launch.plan(Target.for_arch(90)), 90)
        assert not any(depth > 0 and count for depth, count in report.local_accesses.items()), str(report)
        assert report.ptx["f64"] == 0 and report.ptx["wgmma"] > 0, str(report)
        # Bits are shifted as unsigned numbers.
        assert "shr.u32" in report.kernel.asm["ptx"], str(report)


# --- Flax ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def usual_promotion():
    """Allow JAX's usual promotion, which Flax needs and the other tests do without."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@NEEDS_TRITON
@pytest.mark.parametrize(("implementation", "broadcasts"), [("xla", False), ("triton", True)])
def test_nnx_attention_module_with_dropout_has_gradients(usual_promotion, implementation, broadcasts):
    """A module with the fused function has gradients with dropout, and equals the plain module without dropout."""
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    fused = fuse(nnx.dot_product_attention, implementation=implementation)

    def module(function, **options):
        return nnx.MultiHeadAttention(
            num_heads=2, in_features=32, decode=False, rngs=nnx.Rngs(0), attention_fn=function,
            broadcast_dropout=broadcasts, **options,
        )  # fmt: skip

    plain, made = module(nnx.dot_product_attention, dropout_rate=RATE), module(fused, dropout_rate=RATE)
    np.testing.assert_allclose(made(x, deterministic=True), plain(x, deterministic=True), rtol=1e-5, atol=1e-5)

    @nnx.jit
    def step(model, key):
        return nnx.value_and_grad(lambda model: jnp.sum(model(x, deterministic=False, rngs=nnx.Rngs(key)) ** 2))(model)

    (one, grads), (same, _), (other, _) = (step(made, jax.random.key(seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in jax.tree.leaves(grads["query"]["kernel"]))


def test_linen_attention_module_with_dropout_has_gradients(usual_promotion):
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    module = nn.MultiHeadDotProductAttention(
        num_heads=2, dropout_rate=RATE, attention_fn=fuse(nn.dot_product_attention)
    )
    variables = module.init(jax.random.key(0), x, deterministic=True)

    @jax.jit
    def loss(variables, key):
        return jnp.sum(module.apply(variables, x, deterministic=False, rngs={"dropout": key}) ** 2)

    one, same, other = (loss(variables, jax.random.key(seed)) for seed in (1, 1, 2))
    assert one == same != other
    grads = jax.grad(loss)(variables, jax.random.key(1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_dropout_modules_inside_the_function_match_the_reference(usual_promotion):
    """The functions apply `nnx.Dropout` or `linen.Dropout` to the weights."""
    query, key, value = operands()

    def of_nnx(query, key, value, rng):
        weights = nnx.Dropout(RATE, deterministic=False)(softmax_of(query, key), rngs=nnx.Rngs(dropout=rng))
        return jnp.einsum("bnqk,bknh->bqnh", weights, value)

    def of_linen(query, key, value, rng):
        weights = nn.Dropout(RATE, deterministic=False).apply({}, softmax_of(query, key), rngs={"dropout": rng})
        return jnp.einsum("bnqk,bknh->bqnh", weights, value)

    for function in (of_nnx, of_linen):
        mask = mask_of(function, jax.random.key(1))
        weights = np.where(mask, softmax_of(query, key) / (1 - RATE), 0)
        expected = np.einsum("bnqk,bknh->bqnh", weights, value)
        np.testing.assert_allclose(
            jax.jit(fuse(function))(query, key, value, jax.random.key(1)), expected, rtol=1e-5, atol=1e-5
        )


# --- the generator ------------------------------------------------------------------------------------------------

SHAPE = (2, 3, 256, 512)


@functools.cache
def bits_of(seed: int, width: int = 32, key_axis: int = 3) -> np.ndarray:
    words = jax.random.bits(jax.random.key(seed), (2,), np.uint32)
    return np.asarray(jax.jit(lambda words: counter_bits(words, SHAPE, width, key_axis))(words))


def deviations(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two boolean arrays, in standard deviations of that of independent ones."""
    one, other = (x - x.mean() for x in (one, other))
    return float((one * other).mean() / (one.std() * other.std()) * np.sqrt(one.size))


@pytest.mark.parametrize("width", (8, 16, 32))
def test_random_bits_have_mean_one_half(width):
    bits = bits_of(0, width)
    assert bits.dtype == f"uint{width}" and bits.shape == SHAPE
    for place in range(width):
        assert abs(((bits >> place) & 1).mean() - 0.5) * 2 * np.sqrt(bits.size) < 4.5


@pytest.mark.parametrize("share", (0.1, 0.5, 0.9))
def test_random_masks_of_neighbours_are_uncorrelated(share):
    mask = bits_of(0) < int(share * 2**32)
    assert abs(mask.mean() - share) < 4.5 * np.sqrt(share * (1 - share) / mask.size)
    for lag in (1, 2, 16, 64, 128):
        assert abs(deviations(mask[:, :, lag:], mask[:, :, :-lag])) < 4.5
        assert abs(deviations(mask[..., lag:], mask[..., :-lag])) < 4.5
        assert abs(deviations(mask[:, :, lag:, lag:], mask[:, :, :-lag, :-lag])) < 4.5
    for head in (1, 2):
        assert abs(deviations(mask[:, 0], mask[:, head])) < 4.5
    assert abs(deviations(mask[0], mask[1])) < 4.5
    for seed in (1, 2):
        assert abs(deviations(mask, bits_of(seed) < int(share * 2**32))) < 4.5


def test_random_mask_sums_have_binomial_variance():
    mask = bits_of(0) < 2**30
    for axes, parts in ((3, mask), (2, mask), ((3, 5), mask.reshape(2, 3, 8, 32, 16, 32))):
        sums = parts.sum(axes)
        expected = parts.size / sums.size * 3 / 16
        assert abs(sums.var() / expected - 1) < 4.5 * np.sqrt(2 / sums.size)


def test_random_bits_of_pairs_of_rows_and_columns_are_uncorrelated():
    """If bits were a sum of a term of the row and a term of the column, the four corners would cancel."""
    bits = bits_of(0)
    corners = bits[..., ::2, ::2] ^ bits[..., 1::2, ::2] ^ bits[..., ::2, 1::2] ^ bits[..., 1::2, 1::2]
    for place in range(32):
        assert abs(((corners >> place) & 1).mean() - 0.5) * 2 * np.sqrt(corners.size) < 4.5


def test_random_bits_of_a_row_are_distinct():
    bits = bits_of(0)
    assert all(len(np.unique(row)) == SHAPE[-1] for row in bits.reshape(-1, SHAPE[-1]))
