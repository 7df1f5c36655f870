"""Tests of queries and keys on a grid, whose scores have axes of rows and columns of pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.program import trace
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.fusion_support import (
    alternated,
    assert_alike,
    assert_as_good_as_written,
    compiled_gradients,
    expected_results,
)
from tests.triton_kernels.plans_support import report_of

BATCH, HEADS, HIGH, WIDE, WIDTH = 2, 2, 5, 7, 16
PIXELS = HIGH * WIDE
# The grid of pooled keys.
FEW, SMALL = 3, 4


def decomposed(query, key, value, high, wide):
    """Add relative positions from tables [HIGH, HIGH, H] and [WIDE, WIDE, H], as in Kirillov et al. (2023)."""
    scores = (query * WIDTH**-0.5) @ jnp.swapaxes(key, -1, -2)
    pixels = query.reshape(-1, HIGH, WIDE, WIDTH)
    up = jnp.einsum("bhwc,hkc->bhwk", pixels, high)
    left = jnp.einsum("bhwc,wkc->bhwk", pixels, wide)
    scores = scores.reshape(-1, HIGH, WIDE, HIGH, WIDE) + up[:, :, :, :, None] + left[:, :, :, None, :]
    return jax.nn.softmax(scores.reshape(-1, PIXELS, PIXELS), axis=-1) @ value


def pooled(query, key, value, high, wide):
    """Attend to keys on a smaller grid and add queries to the result, as in Li et al. (2021)."""
    scores = jnp.einsum("bnqc,bnkc->bnqk", query * WIDTH**-0.5, key)
    pixels = query.reshape(BATCH, HEADS, HIGH, WIDE, WIDTH)
    up = jnp.einsum("byhwc,hkc->byhwk", pixels, high)
    left = jnp.einsum("byhwc,wkc->byhwk", pixels, wide)
    scores = scores.reshape(BATCH, HEADS, HIGH, WIDE, FEW, SMALL)
    scores = (scores + up[..., None] + left[..., None, :]).reshape(BATCH, HEADS, PIXELS, FEW * SMALL)
    return jnp.einsum("bnqk,bnkc->bnqc", jax.nn.softmax(scores, axis=-1), value) + query


def of_pixels(query, key, value):
    """Return attention with a softmax over both axes of keys."""
    scores = jnp.einsum("bnhwc,bnijc->bnhwij", query, key) * WIDTH**-0.5
    return jnp.einsum("bnhwij,bnijc->bnhwc", jax.nn.softmax(scores, axis=(-2, -1)), value)


def of_pixels_by_hand(query, key, value):
    """Write the softmax by hand, with heads last and values as the first operand."""
    scores = jnp.einsum("bhwnc,bijnc->bnhwij", query, key) * WIDTH**-0.5
    power = jnp.exp(scores - jax.lax.stop_gradient(scores.max((-2, -1), keepdims=True)))
    return jnp.einsum("bijnc,bnhwij->bhwnc", value, power / power.sum((-2, -1), keepdims=True))


def bottleneck(query, key, value, bias):
    """Add a bias of pairs of pixels and merge the axes of keys for the softmax, as in Srinivas et al. (2021)."""
    scores = jnp.einsum("bnhwc,bnijc->bnhwij", query, key) * WIDTH**-0.5 + bias[None]
    weights = jax.nn.softmax(scores.reshape(BATCH, HEADS, HIGH, WIDE, PIXELS), axis=-1)
    weights = weights.reshape(BATCH, HEADS, HIGH, WIDE, HIGH, WIDE)
    return jnp.einsum("bnhwij,bnijc->bnhwc", weights, value)


def neighbours(query, key, value):
    """Mask keys by their position on the grid, and hide the last rows of pixels of one sequence."""
    scores = jnp.einsum("bntc,bnsc->bnts", query, key).reshape(BATCH, HEADS, HIGH, WIDE, HIGH, WIDE)
    high, wide = jnp.arange(HIGH), jnp.arange(WIDE)
    near = jnp.abs(high[:, None, None, None] - high[None, None, :, None]) <= 1
    near = near & (jnp.abs(wide[None, :, None, None] - wide[None, None, None, :]) <= 2)
    is_there = high[None, :] < jnp.array([HIGH, 4])[:, None]
    scores = jnp.where(near[None, None] & is_there[:, None, None, None, :, None], scores / 4, -jnp.inf)
    weights = jax.nn.softmax(scores.reshape(BATCH, HEADS, PIXELS, PIXELS), axis=-1)
    return weights @ value


def axial_biases(query, key, value, high, wide):
    """Add axial biases and cap them together with scores; the first row of pixels sees only itself."""
    scores = jnp.einsum("bntc,bnsc->bnts", query, key).reshape(BATCH, HEADS, HIGH, WIDE, HIGH, WIDE) / 4
    scores = scores + high[None, :, :, None, :, None] + wide[None, :, None, :, None, :]
    scores = 3 * jnp.tanh(jax.nn.relu(scores) / 3)
    sees = (jnp.arange(HIGH)[:, None] > 0) | (jnp.arange(HIGH)[None, :] == 0)
    scores = jnp.where(sees[None, None, :, None, :, None], scores, -1e9)
    return jax.nn.softmax(scores.reshape(BATCH, HEADS, PIXELS, PIXELS), axis=-1) @ value


def by_rows_of_keys(query, key, value, rows):
    """Add a product with an embedding [HIGH, H] of rows of keys, in the layout of Flax."""
    query, key, value = (x.reshape(BATCH, HIGH, WIDE, HEADS, WIDTH) for x in (query, key, value))
    scores = jnp.einsum("bhwnc,bijnc->bnhwij", query, key) + jnp.einsum("bhwnc,ic->bnhwi", query, rows)[..., None]
    weights = jax.nn.softmax(scores.reshape(BATCH, HEADS, PIXELS, PIXELS) / 4, axis=-1)
    return jnp.einsum("bnts,bsnc->btnc", weights, value.reshape(BATCH, PIXELS, HEADS, WIDTH))


def sigmoids(query, key, value):
    """Divide sigmoid weights by their sum, without a softmax."""
    weights = jax.nn.sigmoid(jnp.einsum("bnhwc,bnijc->bnhwij", query, key) / 4)
    weights = weights / weights.sum(axis=(-2, -1), keepdims=True)
    return jnp.einsum("bnhwij,bnijc->bnhwc", weights, value)


def hidden_rows(query, key, value, bias):
    """Hide rows of pixels by adding -inf, and add a bias [T, HIGH] of flat queries."""
    scores = (query @ key.mT / 4).reshape(BATCH * HEADS, PIXELS, HIGH, WIDE)
    hidden = jnp.where(jnp.arange(HIGH) < 3, bias.sum(0) - bias.sum(0), -jnp.inf)
    scores = scores + bias[None, :, :, None] + hidden[None, None, :, None]
    return jax.nn.softmax(scores.reshape(BATCH * HEADS, PIXELS, PIXELS), axis=-1) @ value


def split_heads(query, key, value, high):
    """Merge the batch and head axes of scores to add the bias, as code of ViTDet does."""
    scores = jnp.einsum("bntc,bnsc->bnts", query, key).reshape(BATCH * HEADS, HIGH, WIDE, HIGH, WIDE) / 4
    pixels = query.reshape(BATCH * HEADS, HIGH, WIDE, WIDTH)
    scores = scores + jnp.einsum("bhwc,hkc->bhwk", pixels, high)[..., None]
    weights = jax.nn.softmax(scores.reshape(BATCH, HEADS, PIXELS, PIXELS), axis=-1)
    return weights @ value


_FLAT = [(BATCH * HEADS, PIXELS, WIDTH)] * 3
_HEADS = [(BATCH, HEADS, PIXELS, WIDTH)] * 3
_GRID = [(BATCH, HEADS, HIGH, WIDE, WIDTH)] * 3
_LAST = [(BATCH, HIGH, WIDE, HEADS, WIDTH)] * 3
CASES = {
    decomposed: [*_FLAT, (HIGH, HIGH, WIDTH), (WIDE, WIDE, WIDTH)],
    pooled: [
        _HEADS[0],
        *[(BATCH, HEADS, FEW * SMALL, WIDTH)] * 2,
        (HIGH, FEW, WIDTH),
        (WIDE, SMALL, WIDTH),
    ],
    of_pixels: _GRID,
    of_pixels_by_hand: _LAST,
    bottleneck: [*_GRID, (HEADS, HIGH, WIDE, HIGH, WIDE)],
    neighbours: _HEADS,
    axial_biases: [*_HEADS, (HEADS, HIGH, HIGH), (HEADS, WIDE, WIDE)],
    by_rows_of_keys: [(BATCH, PIXELS, HEADS, WIDTH)] * 3 + [(HIGH, WIDTH)],
    sigmoids: _GRID,
    hidden_rows: [*_FLAT, (PIXELS, HIGH)],
    split_heads: [*_HEADS, (HIGH, HIGH, WIDTH)],
}


def arrays(function, dtype="float32"):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in CASES[function]]


@pytest.mark.parametrize(("function", "implementation"), alternated(CASES))
def test_attention_on_grids_matches_the_reference_with_gradients(function, implementation):
    given = arrays(function)
    found = compiled_gradients(fuse(function, implementation=implementation), given)
    assert_alike(found, expected_results(function, given))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_attention_on_grids_in_bfloat16_is_accurate(implementation):
    given = arrays(decomposed, "bfloat16")
    assert_as_good_as_written(decomposed, fuse(decomposed, implementation=implementation), given)


@pytest.mark.parametrize("function", CASES)
def test_grids_become_one_query_axis_and_one_key_axis(function):
    (region,) = explain(function)(*arrays(function)).regions
    assert region.sizes["q"] == PIXELS
    assert region.sizes["k"] == (FEW * SMALL if function is pooled else PIXELS)


@pytest.mark.parametrize("function", [decomposed, pooled, axial_biases, by_rows_of_keys, hidden_rows, split_heads])
def test_grid_biases_are_not_read_as_arrays_of_pairs(function):
    (region,) = explain(function)(*arrays(function)).regions
    assert all("bool" in leaf.dtype for leaf in region.leaves if leaf.role == "score"), region.leaves


def test_grid_masks_skip_tiles():
    side = 32

    def near_rows(query, key, value):
        rows = jnp.arange(side)
        near = jnp.abs(rows[:, None] - rows[None, :]) <= 2
        scores = jnp.einsum("ntc,nsc->nts", query, key).reshape(1, side, side, side, side)
        scores = jnp.where(near[None, :, None, :, None], scores, -jnp.inf)
        return jax.nn.softmax(scores.reshape(1, side**2, side**2), axis=-1) @ value

    shape = jax.ShapeDtypeStruct((1, side**2, 16), jnp.float32)
    (region,) = explain(near_rows)(shape, shape, shape).regions
    assert region.skipped > 0.4


def test_attention_on_grids_under_jit_vmap_and_grad_matches_the_reference():
    given = [jnp.stack([x, -x]) for x in arrays(decomposed)]

    def gradient(function):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), range(5))

    found = jax.jit(jax.vmap(gradient(fuse(decomposed))))(*given)
    assert_alike(found, jax.vmap(gradient(decomposed))(*given), 1e-4)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_grid_kernels_compile_without_spills(arch):
    pixels = jax.ShapeDtypeStruct((4, 35, 64), jnp.bfloat16)
    tables = [jax.ShapeDtypeStruct((n, n, 64), jnp.bfloat16) for n in (HIGH, WIDE)]

    def wider(query, key, value, high, wide):
        pixels = query.reshape(-1, HIGH, WIDE, 64)
        up, left = jnp.einsum("bhwc,hkc->bhwk", pixels, high), jnp.einsum("bhwc,wkc->bhwk", pixels, wide)
        scores = jnp.einsum("btc,bsc->bts", query, key).reshape(-1, HIGH, WIDE, HIGH, WIDE) / 8
        scores = (scores + up[..., None] + left[..., None, :]).reshape(-1, PIXELS, PIXELS)
        return jax.nn.softmax(scores, axis=-1) @ value

    ((region,),) = trace(wider, [pixels] * 3 + tables, {}).regions.values()
    for launch in launches_of(region).values():
        assert report_of(launch.plan(Target.for_arch(arch)), arch).spill_bytes == 0


def test_attention_on_grids_in_float64_matches_the_reference():
    with jax.enable_x64(True):
        given = [x.astype("float64") for x in arrays(axial_biases)]
        found = compiled_gradients(fuse(axial_biases, implementation="xla"), given)
        assert_alike(found, expected_results(axial_biases, given), 1e-12)


def test_grid_divided_in_two_ways_raises_not_fusible():
    def twice(query, key, value, bias):
        scores = jnp.einsum("btc,bsc->bts", query, key).reshape(-1, PIXELS, HIGH, WIDE) + 1.0
        scores = jnp.sin(scores.reshape(-1, PIXELS, WIDE, HIGH) + bias)
        return jax.nn.softmax(scores.reshape(-1, PIXELS, PIXELS), axis=-1) @ value

    with pytest.raises(NotFusible, match="reshape"):
        fuse(twice)(*arrays(decomposed)[:3], jnp.ones((1, 1, WIDE, HIGH)))
