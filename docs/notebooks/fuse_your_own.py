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
# # Fuse your own attention
#
# Write attention as you would explain it: an einsum, any changes to the scores, a softmax, and another einsum. `fuse`
# turns it into a function with the same arguments that never stores all scores, forward or backward. On CUDA it runs
# generated Triton kernels, and on a CPU a scan over tiles of keys. `explain` describes what was found, and draws the
# visited tiles.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from blockdiag import NotFusible, explain, fuse

jax.config.update("jax_default_matmul_precision", "highest")

# Colours that colour-blind readers can tell apart.
BLUE, ORANGE = "#0072B2", "#E69F00"

# %% [markdown]
# ## A variant
#
# Suppose you train on packed documents. You want a causal window of 100 tokens within each document, a learned slope
# for each head that fades distant tokens, and a soft cap on the scores. In plain `jax.numpy` this takes a few lines:


# %%
def document_attention(query, key, value, document, slope, *, window=100, cap=20.0):
    """query, key, value [B, T, N, H], document int [B, T], slope [N] -> [B, T, N, H]."""
    position = jnp.arange(query.shape[1])
    distance = position[:, None] - position[None, :]  # [T, T]
    same = document[:, :, None] == document[:, None, :]  # [B, T, T]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = cap * jnp.tanh(scores / cap) - jax.nn.softplus(slope)[None, :, None, None] * distance[None, None]
    is_seen = (same & (distance >= 0)[None] & (distance < window)[None])[:, None]
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


fused = fuse(document_attention)

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 512, 2, 32
query, key, value = jax.random.normal(jax.random.key(0), (3, BATCH, TOKENS, HEADS, HEAD_DIM))
ends = np.array([[130, 200, 420], [60, 300, 510]])  # documents of each row
document = jnp.asarray((np.arange(TOKENS)[None, :, None] >= ends[:, None, :]).sum(axis=-1))
slope = jnp.array([-4.0, -2.0])

output = jax.jit(fused)(query, key, value, document, slope)
expected = jax.jit(document_attention)(query, key, value, document, slope)
assert jnp.allclose(output, expected, atol=1e-5)
print(f"largest difference: {jnp.abs(output - expected).max():.1e}")

# %% [markdown]
# ## What was found
#
# `explain` takes the same arguments, and does not run the attention. It lists the arrays that a kernel would read, with
# their axes, and how many tiles of scores it can skip.

# %%
found = explain(document_attention)(query, key, value, document, slope)
region = found.regions[0]
print(found)
assert found.reason is None and region.skipped > 0.5

# %% [markdown]
# Interval arithmetic on the function's own expression finds the tiles to skip; no window or document mask was declared.
# The left picture shows the tiles that the kernel visits in the first row of the batch, and the right one the scores
# that the mask keeps. The window and the causal order are found at trace time. The documents are data, so a small
# computation before the kernel evaluates them.

# %%
position = np.arange(TOKENS)
distance = position[:, None] - position[None, :]
same = np.asarray(document[0])[:, None] == np.asarray(document[0])[None, :]
seen = same & (distance >= 0) & (distance < 100)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained", sharey=True)
region.plot(left)
left.set(title=f"tiles visited: {region.visited.mean():.0%}", xlabel="key", ylabel="query")
right.imshow(np.where(seen[..., None], (0.0, 0.447, 0.698), (0.92, 0.92, 0.92)), aspect="auto")
right.set(title=f"scores seen: {seen.mean():.0%}", xlabel="key")

# No tile is skipped by mistake: the mask keeps no pair outside of the visited tiles.
rows, columns = region.tile
for query_tile, key_tile in np.argwhere(~region.visited):
    tile = seen[query_tile * rows : (query_tile + 1) * rows, key_tile * columns : (key_tile + 1) * columns]
    assert not tile.any()

# %% [markdown]
# ## Gradients
#
# Every floating-point argument has a gradient, including the learned slope. Its gradient is a sum over all scores,
# which are never stored.


# %%
def gradients_of(function):
    cotangent = jax.random.normal(jax.random.key(1), query.shape)

    def loss(query, key, value, slope):
        return jnp.vdot(function(query, key, value, document, slope), cotangent)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, key, value, slope)


for name, gradient, other in zip(
    ("query", "key", "value", "slope"), gradients_of(fused), gradients_of(document_attention), strict=True
):
    difference = jnp.linalg.norm(gradient - other) / jnp.linalg.norm(other)
    assert difference < 1e-5
    print(f"gradient of {name:5}: relative difference {difference:.1e}")

# %% [markdown]
# ## Memory
#
# XLA reports how much memory the compiled forward and backward pass needs for intermediate results. Without `fuse` the
# scores are stored, and their number grows with the square of the length.


# %%
def temporary_bytes(function, tokens):
    """Return the memory for intermediate results of the compiled gradient, in bytes."""
    operand = jax.ShapeDtypeStruct((1, tokens, HEADS, HEAD_DIM), jnp.float32)
    documents = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    gradient = jax.grad(lambda *arrays: function(*arrays).sum(), argnums=(0, 1, 2, 4))
    compiled = jax.jit(gradient).lower(operand, operand, operand, documents, slope).compile()
    return compiled.memory_analysis().temp_size_in_bytes


lengths = (1024, 2048, 4096)
figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
for function, colour, marker, label in ((document_attention, ORANGE, "s", "as written"), (fused, BLUE, "o", "fused")):
    sizes = np.array([temporary_bytes(function, tokens) for tokens in lengths])
    axes.loglog(lengths, sizes / 2**20, color=colour, marker=marker, label=label)
    print(
        f"{label}: {sizes[-1] / 2**20:.0f} MiB at {lengths[-1]} tokens, {sizes[-1] / sizes[-2]:.1f} times that of half"
    )
    if function is fused:
        assert sizes[-1] < 3 * sizes[-2]
axes.set_xscale("log", base=2)
axes.set_xticks(lengths, [str(tokens) for tokens in lengths])
axes.set(xlabel="tokens", ylabel="MiB", title=f"temporary memory on {jax.devices()[0].platform}")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## The kernels
#
# The source of the kernels is text. This is the beginning of the forward kernel that would run on CUDA:

# %%
print("\n".join(found.source.splitlines()[:24]))

# %% [markdown]
# ## What is not fusible
#
# A tile of scores can be computed if each score depends only on its own query and key; a softmax over keys is the
# exception. Sorted scores depend on a whole row. The call raises `NotFusible`, which names the operation, the line and
# the rule. It does not fall back to slow code silently.


# %%
def sorted_attention(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    weights = jax.nn.softmax(jnp.sort(scores, axis=-1), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


try:
    fuse(sorted_attention)(query, key, value)
except NotFusible as refusal:
    message = str(refusal)
print(message)
assert "`sort` of scores" in message

# %% [markdown]
# `explain` returns the same reason instead of raising. With `fallback=True` a function that is not fusible runs
# unchanged, and the reasons are recorded.

# %%
assert explain(sorted_attention)(query, key, value).reason == message
patient = fuse(sorted_attention, fallback=True)
patient(query, key, value)
assert patient.fallbacks and "`sort`" in patient.fallbacks[0]

# %% [markdown]
# The gallery has 75 more variants, with the tiles that each one skips. `blockdiag.torch.fuse` takes the same functions
# and returns functions of tensors.

# %%
plt.show()  # as a script with a screen; a notebook has shown the pictures already
