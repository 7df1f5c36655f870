# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Block-diagonal attention, step by step
#
# This notebook computes the same result in three ways, with a picture of each: attention with a dense mask, attention
# block by block, and `blockdiag.block_diagonal_attention`. Everything here runs on a CPU in a few seconds.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from blockdiag import Rotary, apply_rotary, block_diagonal_attention, rotary_tables

# By default, JAX's own float32 products have less precision on a GPU than the library's.
jax.config.update("jax_default_matmul_precision", "highest")

# Colours that colour-blind readers can tell apart, also in print.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#EBEBEB"
SEEN = ListedColormap([GREY, BLUE])

TOKENS, BLOCK, HEADS, HEAD_DIM = 48, 16, 2, 32
query, key, value = jax.random.normal(jax.random.key(0), (3, 1, TOKENS, HEADS, HEAD_DIM))  # [B, T, N, H] each

# %% [markdown]
# ## A dense mask
#
# Token $i$ sees token $j$ if both are in the same block: $\lfloor i / 16 \rfloor = \lfloor j / 16 \rfloor$. With a
# dense mask, all $T^2$ scores of a head are computed, and most of them are discarded.

# %%
block = jnp.arange(TOKENS) // BLOCK
mask = block[:, None] == block[None, :]  # [T, T]


def masked_attention(query, key, value, mask):
    """query [B, T, N, H], key, value [B, S, N, H], mask bool [T, S] -> [B, T, N, H]; rows that see nothing are 0."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(mask[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1, where=mask[None, None])
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def draw_mask(axes, mask, title, edges=()):
    """Draw a mask, queries downwards and keys to the right, with lines at the edges of blocks."""
    axes.imshow(mask, cmap=SEEN, vmin=0, vmax=1, interpolation="nearest", extent=(0, mask.shape[1], mask.shape[0], 0))
    for edge in edges:
        axes.axhline(edge, color="white", linewidth=0.8)
        axes.axvline(edge, color="white", linewidth=0.8)
    axes.set(title=f"{title}: {np.mean(mask):.0%} seen", xlabel="key", ylabel="query")


dense = masked_attention(query, key, value, mask)
causal = mask & jnp.tri(TOKENS, dtype=bool)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
draw_mask(left, mask, "blocks of 16", range(0, TOKENS, BLOCK))
draw_mask(right, causal, "the same, causal", range(0, TOKENS, BLOCK))

# %% [markdown]
# ## Block by block
#
# The mask keeps square pieces on the diagonal. A reshape gives the blocks an axis of their own. Then no mask is needed,
# and each head has $T \cdot 16$ scores instead of $T^2$.


# %%
def blocked_attention(query, key, value, block_size):
    """query, key, value [B, T, N, H], where `block_size` divides T -> [B, T, N, H]."""
    batch, tokens, heads, head_dim = query.shape

    def cut(array):
        return array.reshape(batch, tokens // block_size, block_size, heads, head_dim)

    scores = jnp.einsum("bctnh,bcsnh->bcnts", cut(query), cut(key)) * head_dim**-0.5
    weights = jax.nn.softmax(scores, axis=-1)  # [B, blocks, N, block_size, block_size]
    return jnp.einsum("bcnts,bcsnh->bctnh", weights, cut(value)).reshape(query.shape)


blocked = blocked_attention(query, key, value, BLOCK)
assert jnp.allclose(blocked, dense, atol=1e-5)
print(f"largest difference from the dense mask: {jnp.abs(blocked - dense).max():.1e}")

# %% [markdown]
# The pictures show the attention weights of the first head. On the left is the whole matrix, and on the right are the
# squares on its diagonal: the same numbers without the zeros between them.

# %%
scores = jnp.einsum("td,sd->ts", query[0, :, 0], key[0, :, 0]) * HEAD_DIM**-0.5
weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
pieces = np.stack([weights[start : start + BLOCK, start : start + BLOCK] for start in range(0, TOKENS, BLOCK)])
shown = {"cmap": "cividis", "vmin": 0, "vmax": 0.3, "interpolation": "nearest"}
figure = plt.figure(figsize=(9, 3.6), layout="constrained")
whole, *small = figure.subplot_mosaic("A123", width_ratios=[2, 1, 1, 1]).values()
picture = whole.imshow(weights, **shown)
whole.set(title="weights [T, T]", xlabel="key", ylabel="query")
for index, axes in enumerate(small):
    axes.imshow(pieces[index], **shown)
    axes.set(title=f"block {index}", xticks=[], yticks=[])
figure.colorbar(picture, ax=small, extend="max", label="attention weight", shrink=0.7)
np.testing.assert_allclose(pieces.sum(axis=2), 1, rtol=1e-5)

# %% [markdown]
# ## The operator
#
# `block_diagonal_attention` computes this in one call, for any length, causal or not. On CUDA it is one kernel, which
# reads query, key and value once and writes the output once. On a CPU it is blocked `jax.numpy`, like the function
# above.

# %%
output = block_diagonal_attention(query, key, value, block_size=BLOCK)
assert jnp.allclose(output, dense, atol=1e-5)

output = block_diagonal_attention(query, key, value, block_size=BLOCK, is_causal=True)
assert jnp.allclose(output, masked_attention(query, key, value, causal), atol=1e-5)

# %% [markdown]
# ## Packed sequences
#
# The sequences of a batch seldom have equal lengths. Without a batch axis, sequences are concatenated along the token
# axis, and `sequence_offsets` says where each begins. Blocks start at the first token of each sequence, and the last
# block may be shorter. Here the sequences have 21, 0 and 19 tokens, followed by 8 rows of padding that belong to no
# sequence.

# %%
offsets = jnp.array([0, 21, 21, 40], jnp.int32)
packed_query, packed_key, packed_value = query[0], key[0], value[0]  # [T, N, H]
packed = block_diagonal_attention(
    packed_query, packed_key, packed_value, sequence_offsets=offsets, block_size=BLOCK, is_causal=True
)

rows = np.arange(TOKENS)
sequence = np.searchsorted(np.asarray(offsets), rows, side="right") - 1  # of each row; the last number is padding
position = rows - np.asarray(offsets)[sequence]
is_token = rows < offsets[-1]
same_block = (sequence[:, None] == sequence[None, :]) & (position[:, None] // BLOCK == position[None, :] // BLOCK)
packed_mask = same_block & (position[:, None] >= position[None, :]) & is_token[:, None] & is_token[None, :]

expected = masked_attention(query, key, value, packed_mask)[0]
assert jnp.allclose(packed, expected, atol=1e-5)
assert not packed[40:].any()  # rows of padding are 0

figure, axes = plt.subplots(figsize=(4.4, 4.4), layout="constrained")
draw_mask(axes, packed_mask, "sequences of 21, 0 and 19", (0, 16, 21, 37, 40))

# %% [markdown]
# ## Blocks are independent
#
# Blocks are strictly independent: a NaN in one of them does not reach the others. With a dense mask it does, because a
# weight of zero times NaN is NaN.

# %%
poisoned = packed_value.at[3].set(jnp.nan)  # in the first block, rows 0 to 15
by_operator = block_diagonal_attention(
    packed_query, packed_key, poisoned, sequence_offsets=offsets, block_size=BLOCK, is_causal=True
)
by_mask = masked_attention(query, key, poisoned[None], packed_mask)[0]
has_nan = np.stack([jnp.isnan(array).any(axis=(1, 2)) for array in (by_operator, by_mask)])  # [2, T]
assert has_nan[0].any() and not has_nan[0, 16:].any()
print(f"rows with NaN: {has_nan[0].sum()} by the operator, {has_nan[1].sum()} by the dense mask")

# %% [markdown]
# ## Rotary embedding
#
# Query and key are rotated as they are loaded, so no rotated copy is stored. The result equals that of rotating first.
# Positions start at 0 in each sequence.

# %%
cos, sin = rotary_tables(max_position=TOKENS, head_dim=HEAD_DIM)
fused = block_diagonal_attention(
    packed_query, packed_key, packed_value, sequence_offsets=offsets, block_size=BLOCK, rotary=Rotary(cos, sin)
)
turned_query, turned_key = (apply_rotary(array, cos[position], sin[position]) for array in (packed_query, packed_key))
apart = block_diagonal_attention(turned_query, turned_key, packed_value, sequence_offsets=offsets, block_size=BLOCK)
assert jnp.allclose(fused, apart, atol=1e-5)

# %% [markdown]
# ## Gradients
#
# The gradient equals that of attention with the mask. The forward pass saves only query, key and value for it.

# %%
cotangent = jax.random.normal(jax.random.key(1), query.shape)


def gradients_of(attention):
    """Return the gradients of query, key and value for one cotangent."""
    return jax.jit(jax.grad(lambda *arrays: jnp.vdot(attention(*arrays), cotangent), argnums=(0, 1, 2)))


gradients = gradients_of(lambda *arrays: block_diagonal_attention(*arrays, block_size=BLOCK))(query, key, value)
expected = gradients_of(lambda *arrays: masked_attention(*arrays, mask))(query, key, value)
for name, gradient, other in zip(("query", "key", "value"), gradients, expected, strict=True):
    assert jnp.allclose(gradient, other, atol=1e-5)
    print(f"gradient of {name}: largest difference {jnp.abs(gradient - other).max():.1e}")

# %% [markdown]
# ## Memory
#
# XLA reports how much memory a compiled program needs for intermediate results. With a dense mask these are mostly the
# scores, which grow with the square of the length; block by block, memory grows linearly with the length. These
# programs are only compiled, not run.


# %%
def temporary_bytes(function, tokens):
    """Return the memory for intermediate results of a compiled call on [1, T, N, H] float32."""
    operand = jax.ShapeDtypeStruct((1, tokens, HEADS, HEAD_DIM), jnp.float32)
    return jax.jit(function).lower(operand, operand, operand).compile().memory_analysis().temp_size_in_bytes


def with_dense_mask(query, key, value):
    block = jnp.arange(query.shape[1]) // BLOCK
    return masked_attention(query, key, value, block[:, None] == block[None, :])


lengths = [256, 512, 1024, 2048, 4096]
dense_bytes = [temporary_bytes(with_dense_mask, tokens) for tokens in lengths]
operator_bytes = [
    temporary_bytes(lambda *arrays: block_diagonal_attention(*arrays, block_size=BLOCK), tokens) for tokens in lengths
]
assert dense_bytes[-1] > 12 * dense_bytes[-3] and operator_bytes[-1] < 6 * operator_bytes[-3]

figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
axes.loglog(lengths, np.array(dense_bytes) / 2**20, color=ORANGE, marker="s", label="dense mask")
axes.loglog(lengths, np.array(operator_bytes) / 2**20, color=BLUE, marker="o", label="block_diagonal_attention")
axes.set_xscale("log", base=2)
axes.set_xticks(lengths, [str(tokens) for tokens in lengths])
axes.set(xlabel="tokens", ylabel="MiB", title=f"temporary memory on {jax.devices()[0].platform}")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Times need a GPU: `python -m benchmarks block_diagonal` measures them, and the README has those of an H200.

# %%
plt.show()  # as a script with a screen; a notebook has shown the pictures already
