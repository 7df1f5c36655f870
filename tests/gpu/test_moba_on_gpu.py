"""The MoBA kernels on a GPU, including those that no interpreter runs, at the accuracy of the interpreter's tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockdiag
from blockdiag.ops.moba.triton import make_lists
from tests.ops import moba_support
from tests.ops.moba_support import MoBACase, assert_accurate, exact_routing

pytestmark = pytest.mark.gpu

CASES = {
    "heads of 128": MoBACase(lengths=(700, 300), head_dim=128, block_size=128, slots=3, dtype="bfloat16"),
    "heads of 64, fp16": MoBACase(lengths=(650,), head_dim=64, block_size=128, slots=2, dtype="float16"),
    "grouped": MoBACase(lengths=(520,), query_heads=4, head_dim=128, block_size=96, slots=3, dtype="bfloat16"),
    "blocks of 64": MoBACase(lengths=(400, 30), head_dim=64, block_size=64, slots=7, dtype="bfloat16"),
    "large blocks": MoBACase(lengths=(1100,), head_dim=128, block_size=512, slots=1, dtype="bfloat16"),
    "wide heads": MoBACase(lengths=(300,), head_dim=256, block_size=64, slots=2, dtype="bfloat16"),
    "float32": MoBACase(lengths=(200,), head_dim=64, block_size=32, slots=2),
    "own block only": MoBACase(lengths=(300,), head_dim=128, block_size=128, slots=0, dtype="bfloat16"),
    "packed, masked": MoBACase(
        lengths=(10, 460, 0),
        key_lengths=(130, 460, 4),
        padding=40,
        spare_blocks=2,
        head_dim=128,
        block_size=128,
        slots=2,
        masked=0.3,
        dtype="bfloat16",
    ),
    "long": MoBACase(lengths=(3000,), head_dim=128, block_size=16, slots=7, dtype="bfloat16", is_long=True),
    "long, float16, grouped, packed, masked": MoBACase(
        lengths=(700, 0, 613),
        padding=40,
        spare_blocks=2,
        query_heads=4,
        head_dim=64,
        block_size=16,
        slots=5,
        masked=0.3,
        dtype="float16",
        is_long=True,
    ),
    "long, many slots": MoBACase(
        lengths=(900, 900), head_dim=64, block_size=16, slots=15, is_causal=False, dtype="bfloat16", is_long=True
    ),
    "long, wide heads": MoBACase(lengths=(500,), head_dim=256, block_size=16, slots=3, dtype="float16", is_long=True),
    "edited own": MoBACase(
        lengths=(520, 70), head_dim=128, block_size=128, slots=3, edits="own", padding=9, dtype="bfloat16"
    ),
    "not causal": MoBACase(
        lengths=(500,), head_dim=128, block_size=128, slots=2, is_causal=False, masked=0.2, dtype="bfloat16"
    ),
}


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    monkeypatch.setattr(moba_support, "INTERPRETED", frozenset())


@pytest.mark.parametrize("name", CASES)
def test_moba_is_accurate_and_repeatable(name):
    case = CASES[name]
    results = case.results("triton")
    assert_accurate(case, results, case.operands())
    for first, second in zip(results, case.results("triton"), strict=True):
        np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slots and case.edits != "own"])
def test_moba_routing_matches_exact_routing(name):
    case = CASES[name]
    chosen, (expected, scores) = case.route("triton"), exact_routing(case, case.operands())
    np.testing.assert_array_equal(chosen >= 0, expected >= 0)
    # Scores are float32, so only nearly equal scores may change places.
    for n, t in zip(*np.nonzero((chosen != expected).any(-1)), strict=True):
        row, best = (x[n, t][x[n, t] >= 0] for x in (chosen, expected))
        np.testing.assert_allclose(scores[n, t, row], scores[n, t, best], rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "dtype"), [(4096, "bfloat16"), (9000, "bfloat16"), (9000, "float16")])
def test_moba_routing_of_many_blocks_matches_xla(tokens, dtype):
    """The call has thousands of queries, for which the fast comparison of scores is often inconclusive."""
    query, key = jax.random.normal(jax.random.key(0), (2, 1, tokens, 2, 64), jnp.dtype(dtype))
    ours = blockdiag.moba_routing(query, key, block_size=16, top_k=8, implementation="triton").indices
    with jax.default_matmul_precision("highest"):
        other = blockdiag.moba_routing(query, key, block_size=16, top_k=8, implementation="xla").indices
    differ = np.any(np.sort(ours, -1) != np.sort(other, -1), axis=-1)
    assert differ.mean() < 1e-3  # float32 sums are computed in another order


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_make_lists_of_few_heads_and_many_queries_matches_numpy(heads):
    """The kernels count few heads in more spans than many heads."""
    case = MoBACase(
        lengths=(100_037,), query_heads=heads, key_heads=heads, head_dim=128, block_size=128, slots=5, dtype="bfloat16"
    )
    blocks, shape = case.problem.num_blocks, (heads, case.problem.query_tokens, case.slots)
    chosen = np.random.default_rng(heads).integers(-1, blocks, shape).astype(np.int32)
    lists = make_lists(case.problem, jnp.asarray(chosen))
    for head in range(heads):
        pairs = chosen[head].ravel()
        counts = np.bincount(pairs[pairs >= 0], minlength=blocks)
        np.testing.assert_array_equal(lists.counts[head], counts)
        np.testing.assert_array_equal(lists.offsets[head], np.cumsum(counts) - counts)
        in_order = np.argsort(pairs, kind="stable")[np.count_nonzero(pairs < 0) :]
        np.testing.assert_array_equal(lists.entries[head, : counts.sum()], in_order)
        np.testing.assert_array_equal(lists.degrees[head], (chosen[head] >= 0).sum(1))


def test_moba_attention_gradients_match_xla():
    query, key, value = jax.random.normal(jax.random.key(1), (3, 2, 1000, 4, 128), jnp.bfloat16)

    def loss(query, key, value, implementation):
        routing = blockdiag.moba_routing(query, key, block_size=128, top_k=4, implementation="triton")
        output = blockdiag.moba_attention(
            query, key, value, block_size=128, top_k=4, routing=routing, implementation=implementation
        )
        return jnp.sum(jnp.sin(output.astype(jnp.float32)))

    ours = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(query, key, value, "triton")
    other = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(query, key, value, "xla")
    for a, b in zip(ours, other, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)
