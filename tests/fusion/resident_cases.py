"""Attention with a bias that is broadcast along a batch axis, which the resident schedule supports or rejects."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.regions.match import find_regions

type Shapes = dict[str, tuple[int, ...]]


def rows_of_heads(query, key, value, mask, pair):
    """Return attention of query [B, R, T, N, H] with mask [B, R, 1, 1, S] and pair bias [B, 1, N, T, S]."""
    scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("brnts,brsnh->brtnh", jax.nn.softmax(scores + mask + pair, axis=-1), value)


def heads_of_rows(query, key, value, pair):
    """Return unscaled attention of query [B, R, N, T, H] with pair bias [B, N, T, S] and no mask."""
    scores = query @ key.mT + pair[:, None]
    return jax.nn.softmax(scores, axis=-1) @ value


def one_bias(query, key, value, pair, offset, slope):
    """Return attention of query [B, T, N, H] with pair [T, S], offset [B, N, T] and slope [N] as terms."""
    scores = (jnp.einsum("btnh,bsnh->bnts", query, key) - slope[None, :, None, None] * 2) / 7
    scores = 0.5 * (scores + pair[None, None] - offset[..., None])
    scores = scores - 0.01 * jnp.arange(key.shape[1])[None, None, None, :].astype(scores.dtype)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def tokens_first(query, key, value, pair):
    """Return attention of query [T, B, N, H] with pair bias [N, T, S], and key terms of positions alone."""
    scores = jnp.einsum("tbnh,sbnh->bnts", query, key) * query.shape[-1] ** -0.5 + pair[None]
    scores = scores - 0.01 * jnp.arange(key.shape[0])[None, None, None, :].astype(scores.dtype)
    return jnp.einsum("bnts,sbnh->tbnh", jax.nn.softmax(scores, axis=-1), value)


def masked_rows(query, key, value, mask, pair):
    """Like `rows_of_heads`; the mask removes all keys of the first row by -1e9, and keys of other rows by -inf."""
    row = jnp.arange(query.shape[1])[None, :, None, None, None]
    dead = jnp.where(row == 0, -1e9, jnp.where(mask > 0.5, -jnp.inf, 0.0)).astype(mask.dtype)
    return rows_of_heads(query, key, value, dead, pair)


def bent(query, key, value, mask, pair):
    """Like `rows_of_heads`, with a function of the biases."""
    return rows_of_heads(query, key, value, jnp.abs(mask) * jnp.sin(mask), jnp.tanh(pair) - pair**2 / 4)


def scaled_bias(query, key, value, mask, pair):
    """Like `rows_of_heads`, with half of the pair bias."""
    return rows_of_heads(query, key, value, mask, -0.5 * pair)


def selected(query, key, value, mask, pair):
    """Like `rows_of_heads` with a select instead of the sum, so the product is not an additive term."""
    scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5 + pair
    scores = jnp.where(mask > 0.5, -1e9, scores)
    return jnp.einsum("brnts,brsnh->brtnh", jax.nn.softmax(scores, axis=-1), value)


@dataclass(frozen=True)
class Resident:
    """A call of attention.

    Attributes:
        stays: whether the bias stays in shared memory.
    """

    function: Callable[..., jax.Array]
    shapes: Shapes
    dtype: str = "bfloat16"
    stays: bool = True

    def inputs(self, seed: int = 0) -> dict[str, jax.Array]:
        """Return the arguments, scaled so that weights are not uniform."""
        generator = np.random.default_rng(seed)
        return {x: jnp.asarray(generator.normal(size=shape), self.dtype) for x, shape in self.shapes.items()}

    def region(self) -> Region:
        """Return the region of the function."""
        given = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes.values()]
        flat, _ = flat_jaxpr(self.function, *given)
        ((region,),) = find_regions(flat.jaxpr).values()
        return region


def rows_shapes(batch: int, rows: int, queries: int, keys: int, heads: int, width: int) -> Shapes:
    lead = (batch, rows)
    return {
        "query": (*lead, queries, heads, width),
        "key": (*lead, keys, heads, width),
        "value": (*lead, keys, heads, width),
        "mask": (*lead, 1, 1, keys),
        "pair": (batch, 1, heads, queries, keys),
    }


def heads_shapes(batch: int, rows: int, heads: int, tokens: int, width: int) -> Shapes:
    shape = (batch, rows, heads, tokens, width)
    return dict.fromkeys(("query", "key", "value"), shape) | {"pair": (batch, heads, tokens, tokens)}


def _tokens_first(tokens: int, batch: int, heads: int, width: int) -> Shapes:
    operands = dict.fromkeys(("query", "key", "value"), (tokens, batch, heads, width))
    return operands | {"pair": (heads, tokens, tokens)}


def _one_bias(width: int) -> Shapes:
    operands = dict.fromkeys(("query", "key", "value"), (3, 128, 2, width))
    return operands | {"pair": (128, 128), "offset": (3, 2, 128), "slope": (2,)}


CASES = {
    "evoformer": Resident(rows_of_heads, rows_shapes(2, 7, 256, 256, 2, 64)),
    "wide": Resident(rows_of_heads, rows_shapes(1, 9, 256, 256, 2, 128)),
    # A program runs several rounds.
    "many_rows": Resident(rows_of_heads, rows_shapes(1, 150, 256, 256, 1, 64)),
    "many_wide_rows": Resident(rows_of_heads, rows_shapes(1, 150, 256, 256, 1, 128)),
    "narrow": Resident(rows_of_heads, rows_shapes(1, 5, 128, 256, 4, 32)),
    "float16": Resident(rows_of_heads, rows_shapes(1, 4, 128, 128, 2, 64), "float16"),
    "three_chunks": Resident(rows_of_heads, rows_shapes(2, 4, 384, 192, 1, 128)),
    "one_chunk": Resident(rows_of_heads, rows_shapes(1, 40, 128, 64, 2, 64)),
    "triangle": Resident(heads_of_rows, heads_shapes(1, 6, 3, 128, 32)),
    "terms": Resident(one_bias, _one_bias(64)),
    "tokens_first": Resident(tokens_first, _tokens_first(128, 5, 2, 64)),
    "bent": Resident(bent, rows_shapes(1, 4, 128, 128, 2, 64)),
    "masked": Resident(masked_rows, rows_shapes(1, 4, 128, 256, 2, 64)),
    "wide_masked": Resident(masked_rows, rows_shapes(1, 4, 128, 256, 2, 128)),
    "wide_triangle": Resident(heads_of_rows, heads_shapes(1, 5, 1, 256, 128), "float16"),
    "shared": Resident(scaled_bias, rows_shapes(1, 67, 256, 128, 2, 128)),
    "selected": Resident(selected, rows_shapes(1, 4, 128, 128, 2, 64), stays=False),
    "long": Resident(rows_of_heads, rows_shapes(1, 4, 128, 320, 2, 64), stays=False),
    "odd_queries": Resident(rows_of_heads, rows_shapes(1, 4, 100, 128, 2, 64), stays=False),
    "odd_width": Resident(rows_of_heads, rows_shapes(1, 4, 128, 128, 2, 48), stays=False),
    "float32": Resident(rows_of_heads, rows_shapes(1, 4, 128, 128, 2, 64), "float32", stays=False),
    "few_rows": Resident(rows_of_heads, rows_shapes(4, 2, 128, 128, 2, 64), stays=False),
}
