"""Tests of `fuse` beyond the gallery: refusals, transformations and the tiles that are computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.programs import collect_specs
from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.analysis.tile_lists import Form, Lists
from blockdiag.fusion.codegen.kernels import forward_source
from blockdiag.fusion.gallery import VARIANTS, Sizes
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.program import trace
from blockdiag.fusion.runtime import arrange
from blockdiag.fusion.runtime.block_sparsity import live_tiles

SHAPE = (2, 40, 2, 16)
BOTH = pytest.mark.parametrize("implementation", ["xla", "triton"])


def arrays(count: int = 3, shape: tuple[int, ...] = SHAPE) -> list[jax.Array]:
    generator = np.random.default_rng(count)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for _ in range(count)]


def causal(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    scores = jnp.where((positions[:, None] >= positions[None, :])[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def regions(function, *operands):
    program = trace(function, operands, {})
    return program, [region for found in program.regions.values() for region in found]


def test_fuse_without_attention_raises_not_fusible():
    with pytest.raises(NotFusible, match="no product with a softmax of scores"):
        fuse(lambda x: jnp.tanh(x) @ x.mT)(*arrays(1, (8, 8)))


def test_fuse_of_sorted_scores_names_the_primitive_and_the_line():
    def sorted_scores(query, key, value):
        scores = jnp.sort(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    with pytest.raises(NotFusible, match=r"`sort` of scores .*test_fuse.py:\d+"):
        fuse(sorted_scores)(*arrays())


def test_fuse_of_mixed_heads_raises_not_fusible():
    def talking_heads(query, key, value, mix):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        scores = jnp.einsum("bnts,nm->bmts", scores, mix)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    with pytest.raises(NotFusible, match="a product of scores with another array"):
        fuse(talking_heads)(*arrays(), jnp.eye(2))


def test_fallback_runs_the_function_and_records_why():
    def ranked(query, key, value):
        scores = jnp.sort(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    fused = fuse(ranked, fallback=True)
    np.testing.assert_array_equal(fused(*arrays()), ranked(*arrays()))
    assert len(fused.fallbacks) == 1 and "`sort`" in fused.fallbacks[0]


def test_reference_is_the_function_itself():
    assert fuse(causal, implementation="reference") is causal


def test_unknown_implementation_raises_value_error():
    with pytest.raises(ValueError, match="`implementation` must be None"):
        fuse(causal, implementation="cuda")


def test_non_array_arguments_are_passed_through():
    def attention(operands, *, is_causal, scale):
        query, key, value = operands
        return causal(query * scale, key, value) if is_causal else value

    operands = tuple(arrays())
    result = fuse(attention)(operands, is_causal=True, scale=0.5)
    np.testing.assert_allclose(result, attention(operands, is_causal=True, scale=0.5), rtol=1e-5, atol=1e-5)


@BOTH
def test_vmap_with_unmapped_keys_has_their_gradients(implementation):
    query, key, value, more = arrays(4)
    queries = jnp.stack([query, more])

    def total(function, key):
        outputs = jax.vmap(lambda query, value: function(query, key, value))(queries, jnp.stack([value, more]))
        return jnp.sum(jnp.sin(outputs))

    fused = fuse(causal, implementation=implementation)
    expected = jax.value_and_grad(functools.partial(total, causal))(key)
    found = jax.jit(jax.value_and_grad(functools.partial(total, fused)))(key)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("fill", [-np.inf, -1e9, float(np.finfo(np.float32).min)])
@BOTH
def test_fully_masked_rows_are_zero(implementation, fill):
    query, key, value = arrays()
    blind = jnp.arange(SHAPE[1]) % 3 == 0

    def attention(query, key, value, blind):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        scores = jnp.where(blind[None, None, :, None], fill, scores)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    fused = fuse(attention, implementation=implementation)
    output, pull = jax.vjp(lambda *args: fused(*args, blind), query, key, value)
    assert not np.asarray(output[:, blind]).any() and np.asarray(output[:, ~blind]).all()

    def seeing(*args):
        return jnp.where(blind[None, :, None, None], 0, attention(*args, jnp.zeros_like(blind)))

    cotangent = jnp.cos(output)
    for grad, expected in zip(pull(cotangent), jax.vjp(seeing, query, key, value)[1](cotangent), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_checkpoint_with_closed_over_arrays_matches_the_reference():
    query, key, value = arrays()

    def loss(function, query):
        return jnp.sum(jnp.cos(jax.checkpoint(lambda query: function(query, key * 2, value))(query)))

    expected = jax.grad(functools.partial(loss, causal))(query)
    np.testing.assert_allclose(jax.grad(functools.partial(loss, fuse(causal)))(query), expected, rtol=1e-5, atol=1e-5)


def test_compiled_program_has_no_array_of_queries_by_keys():
    """The compiled program has no array of queries by keys, forward or backward."""
    shape = (1, 1024, 1, 16)
    run = jax.jit(jax.grad(lambda q, k, v: fuse(causal, implementation="xla")(q, k, v).sum(), argnums=(0, 1, 2)))
    assert "1024,1024" not in run.lower(*arrays(3, shape)).compile().as_text()


def test_biases_keep_their_axes():
    _, (region,) = _traced(VARIANTS["evoformer_row"])
    labels = {leaf.role: leaf.labels for leaf in region.leaves}
    batch = region.batch
    assert labels["column"] == batch[:2] and labels["score"] == (batch[0], batch[2])


def _traced(variant, dtype=jnp.float32):
    program = trace(variant.function, (), variant.make_inputs(jax.random.key(0), Sizes(dtype=dtype)))
    return program, [region for found in program.regions.values() for region in found]


def live_counts(name, tile, dtype=jnp.float32):
    program, (region, *_) = _traced(VARIANTS[name], dtype)
    inner, change = arrange.arranged(region)
    known = dict(zip(program.jaxpr.jaxpr.invars, program.arguments, strict=True))
    leaves = [known.get(leaf.source.key, np.zeros(leaf.source.shape, leaf.source.dtype)) for leaf in region.leaves]
    found = live_tiles(inner, tile, arrange.arrays_by_name(change, leaves, known[region.value.key]))
    return found if found is None else np.asarray(found.arrays["live_counts"])[..., 1]


def test_dead_tiles_are_not_visited():
    """The numbers are live tiles of each tile of queries, for 40 queries and keys in tiles of 8."""
    np.testing.assert_array_equal(live_counts("causal", Tile(8, 8)), [1, 2, 3, 4, 5])
    assert live_counts("vanilla", Tile(8, 8)) is None
    np.testing.assert_array_equal(live_counts("alibi", Tile(8, 8)), [[1, 2, 3, 4, 5]] * 4)


def test_masks_rounded_by_bfloat16_still_skip_tiles():
    """-1e9 is -998244352 in bfloat16."""
    counts = live_counts("document", Tile(8, 8), jnp.bfloat16)
    np.testing.assert_array_equal(counts, live_counts("document", Tile(8, 8)))
    assert counts.min() < 5


def test_forward_source_is_python_with_the_listed_inputs():
    _, (region,) = regions(causal, *arrays())
    source = forward_source(region, Tile(32, 16), Lists((), False, (Form("list", 2), Form("list", 2))))
    assert source.text.count("tl.dot") == 2
    assert "p_live_tiles" in source.text and "p_value" in source.text
    compile(source.text, "kernel", "exec")
    assert source.inputs[-2:] == ("live_counts", "live_tiles")


def test_head_dimensions_above_256_raise_not_implemented_error_or_use_xla():
    wide = arrays(3, (1, 8, 1, 512))
    with pytest.raises(NotImplementedError, match="head sizes up to 256, got 512"):
        fuse(causal, implementation="triton")(*wide)
    np.testing.assert_allclose(
        fuse(causal, implementation=("triton", "xla"))(*wide), causal(*wide), rtol=1e-5, atol=1e-5
    )


def test_explain_of_a_causal_call_shows_skipped_tiles():
    query, key, value = arrays(3, (1, 256, 2, 16))
    found = explain(fuse(causal))(query, key, value)
    assert str(found) == str(explain(causal)(query, key, value))
    (region,) = found.regions
    assert region.sizes == {"b0": 1, "b1": 2, "q": 256, "k": 256, "f": 16, "d": 16}
    assert {leaf.role for leaf in region.leaves if leaf.is_known} == {"row", "column"}
    rows, columns = region.tile
    expected = np.arange(256 // rows)[:, None] * rows + rows - 1 >= np.arange(256 // columns)[None, :] * columns
    np.testing.assert_array_equal(region.live, expected)
    assert region.picture.splitlines()[0].startswith("#.") and 0 < region.skipped < 1
    assert set(region.kernels) == {"fused_forward", "fused_rows", "fused_columns"}


def test_explanation_reads_masks_but_runs_no_attention():
    segments = jnp.asarray(np.arange(256)[None] // 64, jnp.int32)

    def document(query, key, value, segments):
        same = segments[:, None, :, None] == segments[:, None, None, :]
        scores = jnp.where(same, jnp.einsum("btnh,bsnh->bnts", query, key), -jnp.inf)
        return jnp.tanh(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value))

    found = explain(document)(*arrays(3, (1, 256, 2, 16)), segments)
    (region,) = found.regions
    assert region.skipped == pytest.approx(0.75, abs=0.13)
    assert found.outside["tanh"] == 1 and "dot_general" not in found.outside
    assert "def fused_forward(" in found.source and "skipped" in str(found)


def test_explain_of_an_unfusible_function_gives_the_reason():
    found = explain(jnp.tanh)(jnp.ones(3))
    assert found.regions == () and "no product" in str(found)


def test_only_gradients_that_are_asked_for_are_computed():
    """A backward kernel is launched only if one of its gradients is requested."""

    def attention(query, key, value, bias):
        scores = query @ key.mT + bias
        return jax.nn.softmax(scores) @ value

    (x,) = arrays(1, (2, 40, 16))
    bias = jnp.ones((1, 40, 40))

    def kernels_of(places):
        gradient = jax.grad(lambda *args: fuse(attention, implementation="triton")(*args).sum(), argnums=places)
        jaxpr = str(jax.make_jaxpr(gradient)(x, x, x, bias))
        return [name for name in ("fused_rows", "fused_columns", "fused_pairs") if name in jaxpr]

    assert kernels_of((0, 1, 2, 3)) == ["fused_rows", "fused_columns", "fused_pairs"]
    assert kernels_of((0, 1, 2)) == ["fused_rows", "fused_columns"]
    assert kernels_of((1, 2)) == ["fused_columns"]


@pytest.mark.parametrize("name", ["causal", "document", "vanilla"])
def test_explained_source_is_the_launched_source(name):
    variant = VARIANTS[name]
    inputs = variant.make_inputs(jax.random.key(0), Sizes())
    fused = fuse(variant.function, implementation="triton")
    specs: dict[object, None] = {}
    traced = jax.jit(lambda inputs: jax.vjp(lambda query: fused(**inputs | {"query": query}), inputs["query"]))
    collect_specs(traced.trace(inputs).jaxpr.jaxpr, specs)
    launched = {spec.source.text for spec in specs}
    source = explain(variant.function)(**inputs).source
    assert launched and all(text in source for text in launched)
    assert ("live_tiles" in source) == (name != "vanilla")


@pytest.mark.parametrize("shape", [(1, 4, 40, 16), (2, 1, 40, 16), (1, 1, 40, 16), (40, 16)], ids=str)
def test_late_division_with_axes_of_size_one_matches_the_reference(shape):
    def divided(query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        powers = jnp.exp(scores - scores.max(-1, keepdims=True))
        return (powers @ value) / powers.sum(-1, keepdims=True)

    def gradients(function):
        return jax.grad(lambda *given: jnp.sin(function(*given)).sum(), argnums=(0, 1, 2))

    given = jax.random.normal(jax.random.key(0), (3, *shape))
    for found, expected in zip(gradients(fuse(divided))(*given), gradients(divided)(*given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def attention(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


CHAINS = {
    "query": lambda q, k, v: attention(attention(q, k, v), k, v),
    "key": lambda q, k, v: attention(q, attention(q, k, v), v),
    "value": lambda q, k, v: attention(q, k, attention(q, k, v)),
    "all": lambda q, k, v: attention(*[attention(q, k, v)] * 3),
    # The second attention runs along the other axis, as in attention to the rows and then the columns of an image.
    "turned": lambda q, k, v: attention(attention(q, k, v).swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_consecutive_attentions_are_both_fused(name):
    chain, operands = CHAINS[name], arrays()
    if name == "turned":
        operands = [x[:, :2] for x in operands]
    _, found = regions(chain, *operands)
    assert len(found) == 2
    report = explain(chain)(*operands)
    assert len(report.regions) == 2 and not {"dot_general", "exp"} & report.outside.keys()

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: jnp.vdot(function(*x), operands[1]), argnums=(0, 1, 2)))(*operands)

    for actual, wanted in zip(gradients(fuse(chain, implementation="xla")), gradients(chain), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-4)
