"""`context_parallel=` on GPUs, with the kernels of long sequences: results and gradients match one GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import ContextParallel, block_diagonal_attention, fuse, key_convolution, moba_attention

TOKENS, HEAD_DIM = 8192, 128
DEVICES = [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)]


def moba(context, query, key, value):
    return moba_attention(query, key, value, block_size=128, top_k=4, context_parallel=context)


def packed_moba(context, query, key, value):
    edges = jnp.asarray([0, TOKENS // 9, TOKENS // 9, TOKENS * 2 // 3, TOKENS - 77], jnp.int32)
    return moba_attention(
        query[0], key[0], value[0], block_size=128, top_k=4, sequence_offsets=edges, context_parallel=context
    )


def within_blocks(context, query, key, value):
    return block_diagonal_attention(query, key, value, block_size=384, context_parallel=context)


def convolved(context, query, key, value):
    weights = jnp.full((3, *key.shape[-2:]), 0.2, key.dtype)
    key = key_convolution(key, weights, context_parallel=context)
    return moba_attention(query, key, value, block_size=128, top_k=4, context_parallel=context)


def causal(context, query, key, value):
    def attend(query, key, value):
        rows = jnp.arange(query.shape[1], dtype=jnp.int32)
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * HEAD_DIM**-0.5
        weights = jax.nn.softmax(jnp.where(rows[:, None] >= rows[None, :], scores, -jnp.inf), axis=-1).astype(
            value.dtype
        )
        return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)

    return fuse(attend, context_parallel=context)(query, key, value)


def gradients(attend, context):
    def compute(query, key, value):
        output, pull_back = jax.vjp(lambda *arrays: attend(context, *arrays), query, key, value)
        return output, *pull_back(output)

    return jax.jit(compute)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    ("attend", "strategy"),
    [
        (moba, "ulysses"),
        (moba, "gather"),
        (packed_moba, "ulysses"),
        (packed_moba, "gather"),
        (within_blocks, None),
        (convolved, None),
        (causal, "ulysses"),
        (causal, "gather"),
        (causal, "ring"),
    ],
)
def test_context_parallel_attention_matches_one_gpu(attend, strategy, devices):
    mesh = jax.make_mesh((devices,), ("tokens",), devices=jax.devices()[:devices])
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, TOKENS, heads, HEAD_DIM) for heads in (8, 4, 4)]
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    expected = gradients(attend, None)(*operands)
    with jax.set_mesh(mesh):
        shards = [jax.device_put(x, NamedSharding(mesh, P(None, "tokens"))) for x in operands]
        compute = gradients(attend, ContextParallel("tokens", strategy))
        found, again = compute(*shards), compute(*shards)
    for one, other, second in zip(found, expected, again, strict=True):
        one, other, second = (np.asarray(x, np.float32) for x in (one, other, second))
        np.testing.assert_array_equal(one, second)
        # Each partial gradient is rounded to bfloat16 before the sum.
        assert np.linalg.norm(one - other) <= 5e-3 * np.linalg.norm(other)
