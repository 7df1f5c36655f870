"""Tests of `fuse` under JAX's transformations, on several devices and inside Flax modules."""

import functools
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag import fuse

HAS_TRITON = importlib.util.find_spec("triton") is not None
NAMES = (
    None,
    "xla",
    pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")),
)
EACH = pytest.mark.parametrize("implementation", NAMES)
ROWS, TOKENS, HEADS, WIDTH = 2, 40, 4, 16


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def operands() -> list[jax.Array]:
    """Return query, key and value [B, T, N, H] and a bias [N, T, T]."""
    return arrays(*[(ROWS, TOKENS, HEADS, WIDTH)] * 3, (HEADS, TOKENS, TOKENS))


def biased(query, key, value, bias):
    """Return causal attention with a bias and a function of scores, `relu`, that has a custom derivative."""
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5 + bias[None]
    scores = jax.nn.relu(scores) - 0.1 * scores
    positions = jnp.arange(query.shape[1])
    scores = jnp.where((positions[:, None] >= positions[None, :])[None, None], scores, -jnp.inf)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), value)


def of_documents(query, key, value, documents):
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(jnp.where(same, scores, -jnp.inf), axis=-1), value)


def results_and_gradients(function, *inputs):
    """Return a scalar and its gradients with respect to the floating inputs."""
    floating = tuple(i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating))
    return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(function(*given))), floating)(*inputs)


def assert_close(found, expected, tolerance=1e-5):
    # Some gradients are 0 except for rounding, such as that of the bias of a key projection.
    least = 1e-2 * max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(least, np.abs(other).max()))


# --- several devices ------------------------------------------------------------------------------------------------


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))


EACH_DEVICE = P("rows", None, "heads")


@EACH
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.division("batch", "heads", "gradients", operation="fuse", kind="manual")
def test_shard_map_over_batch_and_heads_matches_one_device(implementation, is_checked):
    """The bias has no batch axis, so its gradient is summed over the devices that share it."""
    sharded = jax.shard_map(
        fuse(biased, implementation=implementation),
        mesh=mesh(),
        in_specs=(EACH_DEVICE,) * 3 + (P("heads"),),
        out_specs=EACH_DEVICE,
        check_vma=is_checked,
    )
    found = jax.jit(functools.partial(results_and_gradients, sharded))(*operands())
    assert_close(found, jax.jit(functools.partial(results_and_gradients, biased))(*operands()))


@EACH
def test_gradients_inside_shard_map_match_one_device(implementation):
    """Keys and values are the same on all devices; documents are an array that differs between them."""
    query, key, value, _ = operands()
    documents = jnp.asarray(np.arange(TOKENS)[None] // np.asarray([[7], [16]]), jnp.int32)
    wide_key, wide_value = (jnp.repeat(x[:1], ROWS, axis=0) for x in (key, value))
    fused = fuse(of_documents, implementation=implementation)

    def step(query, key, value, documents):
        whole = (query.shape[0], *key.shape[1:])
        _, grads = results_and_gradients(
            lambda query, key, value: fused(
                query, jnp.broadcast_to(key, whole), jnp.broadcast_to(value, whole), documents
            ),
            query, key, value,
        )  # fmt: skip
        return grads

    sharded = jax.shard_map(
        step,
        mesh=mesh(),
        in_specs=(EACH_DEVICE, P(None, None, "heads"), P(None, None, "heads"), P("rows")),
        out_specs=(EACH_DEVICE, P(None, None, "heads"), P(None, None, "heads")),
    )
    found = jax.jit(sharded)(query, key[:1], value[:1], documents)
    plain = functools.partial(results_and_gradients, of_documents)
    _, (query_grad, key_grad, value_grad) = jax.jit(plain)(query, wide_key, wide_value, documents)
    assert_close(found, (query_grad, *(x.sum(0, keepdims=True) for x in (key_grad, value_grad))))


@EACH
def test_explicit_shardings_match_one_device(implementation):
    explicit = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu"))
    inputs = operands()
    compute = jax.jit(functools.partial(results_and_gradients, fuse(biased, implementation=implementation)))
    with jax.set_mesh(explicit):
        sharded = [*(jax.device_put(x, EACH_DEVICE) for x in inputs[:3]), jax.device_put(inputs[3], P("heads"))]
        found = jax.tree.map(np.asarray, compute(*sharded))
    assert_close(found, jax.jit(functools.partial(results_and_gradients, biased))(*inputs))


@EACH
def test_dropout_under_shard_map_draws_by_local_positions(implementation):
    """Each device draws the bits that a call with its shard would draw, from its key and its local positions."""
    query, key, value, _ = operands()
    keys = jax.random.split(jax.random.key(0), 2)

    def dropped(query, key, value, rng):
        weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key), axis=-1)
        keep = jax.random.bernoulli(rng[0], 0.7, weights.shape)
        return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, weights, 0.0), value)

    fused = fuse(dropped, implementation=implementation)
    sharded = jax.shard_map(fused, mesh=mesh(), in_specs=(P("rows"),) * 4, out_specs=P("rows"))
    found = jax.jit(sharded)(query, key, value, keys)
    for row in range(ROWS):
        part = slice(row, row + 1)
        assert_close(found[part], jax.jit(fused)(query[part], key[part], value[part], keys[part]))


# --- other transformations ------------------------------------------------------------------------------------------


@EACH
def test_checkpoint_scan_and_donation_match_the_reference(implementation):
    """Run a training step through checkpointed layers with donated weights."""
    weights = 0.2 * arrays((2, WIDTH, WIDTH))[0]
    query, _, _, bias = operands()

    def step(function, weights, x, bias):
        @jax.checkpoint
        def layer(x, weight):
            y = x @ weight
            return x + function(y, y, y, bias), None

        def loss(weights):
            return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 1e-3 * grads, value

    expected = jax.jit(functools.partial(step, biased))(weights, query, bias)
    fused = jax.jit(functools.partial(step, fuse(biased, implementation=implementation)), donate_argnums=0)
    assert_close(fused(weights, query, bias), expected, 1e-4)
    assert weights.is_deleted()


def test_vmap_of_gradients_matches_the_reference():
    query, key, value, bias = operands()
    fused = fuse(biased)

    def single(function, query, key, value):
        return results_and_gradients(lambda *x: function(*(y[None] for y in x), bias), query, key, value)

    found = jax.jit(jax.vmap(functools.partial(single, fused)))(query, key, value)
    assert_close(found, jax.jit(jax.vmap(functools.partial(single, biased)))(query, key, value))


def test_export_round_trips():
    """A fused function that XLA computes can be serialised and restored."""
    compute = functools.partial(results_and_gradients, fuse(biased, implementation="xla"))
    exported = jax.export.export(jax.jit(compute), platforms=["cpu"])(*operands())
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(*operands()), jax.jit(functools.partial(results_and_gradients, biased))(*operands()))


def test_einops_layouts_match_the_reference():
    """einops moves and merges axes before and after the attention."""
    import einops

    def attention(query, key, value):
        query, key, value = (einops.rearrange(x, "b t (n h) -> (b n) t h", n=HEADS) for x in (query, key, value))
        scores = einops.einsum(query, key, "m q h, m k h -> m q k") * WIDTH**-0.5
        output = einops.einsum(jax.nn.softmax(scores, axis=-1), value, "m q k, m k h -> m q h")
        return einops.rearrange(output, "(b n) t h -> b t (n h)", n=HEADS)

    inputs = arrays(*[(ROWS, TOKENS, HEADS * WIDTH)] * 3)
    compute = functools.partial(results_and_gradients, fuse(attention, implementation="xla"))
    assert_close(jax.jit(compute)(*inputs), jax.jit(functools.partial(results_and_gradients, attention))(*inputs))


# --- Flax -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def usual_promotion():
    """Allow JAX's usual promotion, which Flax needs and the other tests do without."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@EACH
def test_nnx_attention_modules_match_the_reference(usual_promotion, implementation):
    (x,) = arrays((ROWS, TOKENS, 32))
    mask = nnx.make_causal_mask(jnp.ones((ROWS, TOKENS)))

    def gradients(function):
        module = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=32, decode=False, rngs=nnx.Rngs(0), attention_fn=function
        )
        return nnx.jit(nnx.value_and_grad(lambda module: jnp.sum(jnp.sin(module(x, mask=mask)))))(module)

    fused = fuse(nnx.dot_product_attention, implementation=implementation)
    assert_close(gradients(fused), gradients(nnx.dot_product_attention))
    assert not fused.fallbacks


def test_linen_attention_modules_match_the_reference(usual_promotion):
    (x,) = arrays((ROWS, TOKENS, 32))
    mask = nn.make_causal_mask(jnp.ones((ROWS, TOKENS)))

    def gradients(function):
        module = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function)
        variables = module.init(jax.random.key(0), x)
        return jax.jit(jax.value_and_grad(lambda v: jnp.sum(jnp.sin(module.apply(v, x, mask=mask)))))(variables)

    assert_close(gradients(fuse(nn.dot_product_attention)), gradients(nn.dot_product_attention))


def test_fused_functions_inside_nnx_modules_match_the_reference(usual_promotion):
    """The fused function inside the module receives the module's parameters as arguments."""

    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.slopes = nnx.Param(jnp.linspace(0.1, 1.0, HEADS))
            self.project = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x, call):
            def attend(slopes, y):
                distance = jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)).astype(y.dtype)
                scores = jnp.einsum("bqnh,bknh->bnqk", y, y) - slopes[None, :, None, None] * distance
                return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), y)

            return call(attend)(self.slopes[...], self.project(x))

    x = operands()[0]
    module = Attention(nnx.Rngs(0))

    def gradients(call):
        return nnx.jit(nnx.value_and_grad(lambda module: jnp.sum(jnp.sin(module(x, call)))))(module)

    assert_close(gradients(fuse), gradients(lambda function: function))
