"""Pictures of the operations' masks, computed from their weights, routings and tile lists."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.plot_style import Theme, frame, new_figure
from blockdiag import block_diagonal_attention, moba_attention
from blockdiag.fusion.explain import explain
from blockdiag.fusion.gallery import VARIANTS, Sizes
from blockdiag.interop.targets import compile_target

OFFSETS = (0, 40, 72, 96)
BLOCK = 16
MOBA_TOKENS = 256
TOP_K = 4
_HEAD_DIM = 64

# Launch plans may depend on the GPU.
_ARCHITECTURE = 90
_FUSED = Sizes(
    batch=1, rows=2, query_tokens=4096, key_tokens=4096, query_heads=2, key_heads=1, head_dim=64, value_dim=64,
    dtype="bfloat16",
)  # fmt: skip
FUSED_NAMES = {
    "sliding_window": "window",
    "prefix_lm": "prefix",
    "packed_documents": "documents",
    "dilated_window": "dilated window",
}


@dataclass(frozen=True)
class Mask:
    """A picture of one operation's mask.

    Attributes:
        title: the text above it.
        seen: bool [queries, keys], or one element per tile.
        extent: the numbers of queries and keys.
        lines: the starts of sequences or blocks.
    """

    title: str
    seen: np.ndarray
    extent: tuple[int, int]
    lines: tuple[int, ...] = ()


def weights_of(attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], key: jax.Array) -> np.ndarray:
    """Return the attention weights [T, T] of one head, read from results whose values are rows of the identity.

    Args:
        attend: attention of query, key and value [T, 1, H], causal or not.
        key: both the keys and the queries.
    """
    tokens, _, width = key.shape
    identity = jnp.eye(tokens, dtype=jnp.float32)[:, None, :]
    attend = jax.jit(attend)
    parts = [attend(key, key, identity[..., begin : begin + width]) for begin in range(0, tokens, width)]
    return np.concatenate([np.asarray(part)[:, 0] for part in parts], axis=-1)


@functools.cache
def packed_mask(*, is_causal: bool) -> Mask:
    """Return the mask of block-diagonal attention of packed sequences."""
    tokens = OFFSETS[-1]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        offsets = jnp.array(OFFSETS, jnp.int32)
        return block_diagonal_attention(
            query, key, value, block_size=BLOCK, sequence_offsets=offsets, is_causal=is_causal, implementation="xla"
        )

    title = "block diagonal, causal" if is_causal else "block diagonal"
    weights = weights_of(attend, jnp.zeros((tokens, 1, tokens // 2), jnp.float32))
    return Mask(title, weights > 0, (tokens, tokens), OFFSETS[1:-1])


@functools.cache
def moba_mask() -> Mask:
    """Return the mask of MoBA for keys that drift through topics and return to them."""
    walk = np.random.default_rng(0).normal(0.0, 0.12, MOBA_TOKENS).cumsum()
    centre = _HEAD_DIM * (0.5 + 0.4 * np.sin(walk))
    topics = np.exp(-0.5 * ((np.arange(_HEAD_DIM) - centre[:, None]) / 4.0) ** 2)
    key = jnp.asarray(topics, jnp.float32)[:, None, :]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query, key, value = query[None], key[None], value[None]
        return moba_attention(query, key, value, block_size=BLOCK, top_k=TOP_K, implementation="xla")[0]

    lines = tuple(range(BLOCK, MOBA_TOKENS, BLOCK))
    return Mask(f"MoBA, top_k {TOP_K}", weights_of(attend, key) > 0, (MOBA_TOKENS, MOBA_TOKENS), lines)


@functools.cache
def fused_mask(name: str) -> Mask:
    """Return the tiles that the fused kernels of a gallery variant visit."""
    variant = VARIANTS[name]
    with jax.default_device(jax.devices("cpu")[0]), compile_target(_ARCHITECTURE):
        region = explain(variant.scaled)(**variant.make_inputs(jax.random.key(0), _FUSED)).regions[0]
    title = f"fuse: {FUSED_NAMES.get(name, name)}\n{region.skipped:.0%} of tiles skipped"
    return Mask(title, region.visited, (region.sizes["q"], region.sizes["k"]))


def draw_mask(axis: Any, mask: Mask, theme: Theme) -> None:
    """Draw visible pairs dark, queries downwards and keys to the right."""
    from matplotlib.colors import ListedColormap

    queries, keys = mask.extent
    axis.imshow(
        mask.seen,
        cmap=ListedColormap([theme.faint, theme.ours]),
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0, keys, queries, 0),
        aspect="auto",
    )
    for line in mask.lines:
        axis.axhline(line, color=theme.background, linewidth=0.8)
        axis.axvline(line, color=theme.background, linewidth=0.8)
    axis.set_box_aspect(1)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_xticks([0, keys])
    axis.set_yticks([0, queries])
    axis.tick_params(length=0)


@dataclass(frozen=True)
class Pool:
    """The pages of some sequences in a pool.

    Attributes:
        owner: int [rows, columns], the sequence of each page, or -1.
        place: int [rows, columns], the page's number within its sequence.
    """

    owner: np.ndarray
    place: np.ndarray


def page_pool(lengths: Sequence[int], rows: int, columns: int) -> Pool:
    """Return a pool with the sequences' pages at random positions, as in the benchmark."""
    places = np.random.default_rng(1).permutation(rows * columns)
    owner = np.full(rows * columns, -1)
    place = np.zeros(rows * columns, int)
    taken = 0
    for sequence, length in enumerate(lengths):
        owner[places[taken : taken + length]] = sequence
        place[places[taken : taken + length]] = np.arange(length)
        taken += length
    return Pool(owner.reshape(rows, columns), place.reshape(rows, columns))


def draw_pool(axis: Any, pool: Pool, theme: Theme) -> None:
    """Draw a cell for each page, in the colour of its sequence and with its number within the sequence."""
    from matplotlib.colors import ListedColormap

    colours = [theme.faint, theme.ours, theme.series[1], theme.series[2], theme.series[3]]
    count = len(colours)
    axis.imshow(
        pool.owner, cmap=ListedColormap(colours), vmin=-1.5, vmax=count - 1.5, interpolation="nearest", aspect="auto"
    )
    rows, columns = pool.owner.shape
    for row in range(rows):
        for column in range(columns):
            if pool.owner[row, column] >= 0:
                text = str(pool.place[row, column])
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color=theme.background)
    axis.set_xticks(np.arange(columns - 1) + 0.5, [])
    axis.set_yticks(np.arange(rows - 1) + 0.5, [])
    axis.grid(color=theme.background, linewidth=1.5)
    axis.set_axisbelow(False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_box_aspect(1)


def example_pool() -> Pool:
    """Return four sequences in a pool of 64 pages."""
    return page_pool((14, 9, 17, 6), 8, 8)


def draw_masks(theme: Theme) -> Any:
    """Draw all masks in one figure."""
    masks = [packed_mask(is_causal=False), packed_mask(is_causal=True), moba_mask()]
    masks += [fused_mask(name) for name in FUSED_NAMES]
    figure, axes = new_figure(4, 9.0, 5.5, rows=2)
    frame(
        figure,
        "Who sees whom",
        below="Queries downwards, keys to the right. Block diagonal (three packed sequences) and MoBA: blocks "
        "of 16, read from the weights. Paged: where pages of four sequences lie. fuse: tiles that its kernels visit.",
        note="Computed by the operations themselves.",
    )
    for axis, mask in zip((*axes[:3], *axes[4:]), masks, strict=True):
        draw_mask(axis, mask, theme)
        axis.set_title(mask.title, fontsize=8.5)
    draw_pool(axes[3], example_pool(), theme)
    axes[3].set_title("paged decode: the pool", fontsize=8.5)
    return figure
