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
# # MoBA's routing in pictures
#
# In mixture of block attention (MoBA) a query sees its own block of keys and the earlier blocks whose mean keys have
# the largest dot products with it. This notebook shows which blocks are selected in real text. It then compares how
# often the right block is among them with the prediction of a simple theory.

# %%
import math
import re
from pydoc_data import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from blockdiag import moba_attention, moba_routing

attend = jax.jit(moba_attention, static_argnames=("block_size", "top_k"))
route = jax.jit(moba_routing, static_argnames=("block_size", "top_k"))

jax.config.update("jax_default_matmul_precision", "highest")

# Colours that colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#EBEBEB"

# %% [markdown]
# ## The text
#
# The text is the language reference that Python's own `help("topics")` shows: about fifty thousand words of English,
# available in every installation. Paragraphs that several topics share are kept once. A token is a word.

# %%
paragraphs = {
    " ".join(paragraph.split()): None for topic in topics.topics.values() for paragraph in topic.split("\n\n")
}
words = re.findall(r"[a-z]+", "\n".join(paragraphs).lower())
vocabulary, tokens = np.unique(words, return_inverse=True)
print(f"{len(words):,} words, {len(vocabulary):,} different ones")
START, CONTEXT = 20000, 512
print(" ".join(words[START : START + 30]), "...")

# %% [markdown]
# Each distinct word gets a random vector of length 1, which is the key of each of its occurrences. Nothing is learned.
# The dot product of two such vectors is 1 for a word with itself and about $\pm 1 / \sqrt H$ for two different words,
# so the query of a word looks for its own occurrences.

# %%
HEAD_DIM, BLOCK, TOP_K = 64, 16, 4
generator = np.random.default_rng(0)


def unit_vectors(*shape):
    vectors = generator.standard_normal(shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


vectors = unit_vectors(len(vocabulary), HEAD_DIM)
text = tokens[START : START + CONTEXT]
key = jnp.asarray(vectors[text])[None, :, None, :]  # [B, T, K, H]

# %% [markdown]
# ## One query
#
# The query is a rare word after the end of the text. The routing scores are the dot products of the query with the mean
# key of each block. The query has the position of the last key, so the last block is its own block.

# %%
counts = np.bincount(text[:-BLOCK], minlength=len(vocabulary))
# The longest of the words that occur three times.
asked = max(np.flatnonzero(counts == 3), key=lambda word: len(vocabulary[word]))
query = jnp.asarray(vectors[asked])[None, None, None, :]  # [B, T, N, H], one query
routing = route(query, key, block_size=BLOCK, top_k=TOP_K)
chosen = routing.indices[0, 0, 0]  # its own block first, then by descending score

mean_keys = key[0, :, 0].reshape(-1, BLOCK, HEAD_DIM).mean(axis=1)  # [blocks, H]
scores = np.asarray(mean_keys @ vectors[asked])
holds_word = (text.reshape(-1, BLOCK) == asked).any(axis=1)
own = len(scores) - 1
best = np.argsort(-scores[:own])[: TOP_K - 1]
assert chosen.tolist() == [own, *best]

figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
colours = np.where(np.isin(np.arange(len(scores)), chosen), BLUE, "#B8B8B8")
axes.bar(np.arange(len(scores)), scores, color=colours)
axes.plot(
    np.flatnonzero(holds_word), scores[holds_word] + 0.004, "v", color=ORANGE, label=f"holds '{vocabulary[asked]}'"
)
axes.set(xlabel=f"block of {BLOCK} words", ylabel="score", title=f"blocks chosen for '{vocabulary[asked]}' (blue)")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
print(f"'{vocabulary[asked]}' is in blocks {np.flatnonzero(holds_word).tolist()}; chosen: {chosen.tolist()}")

# %% [markdown]
# ## All queries
#
# Now every word of the text is a query, as in a layer of a language model. The map has a row for each query and a
# column for each block. The query's own block is on the diagonal, and later blocks are never seen.

# %%
routing = route(key, key, block_size=BLOCK, top_k=TOP_K)
pattern = np.asarray(routing.to_pattern())[0, :, 0]  # bool [T, blocks]
occurs = np.zeros_like(pattern)  # whether a block has the word of the query
for block in range(pattern.shape[1]):
    occurs[:, block] = np.isin(text, text[block * BLOCK : (block + 1) * BLOCK])
own_block = np.arange(CONTEXT) // BLOCK
is_past = np.arange(pattern.shape[1])[None, :] < own_block[:, None]

state = np.where(pattern, 2, np.where(occurs & is_past, 1, 0))
palette = np.array([[0.92, 0.92, 0.92], [0.9, 0.62, 0.0], [0.0, 0.45, 0.7]])
figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
axes.imshow(palette[state], aspect="auto", interpolation="nearest", extent=(0, pattern.shape[1], CONTEXT, 0))
for label, colour in (("seen", BLUE), ("has the query's word, and is not seen", ORANGE), ("neither", GREY)):
    axes.plot([], [], "s", color=colour, label=label)
axes.set(xlabel=f"block of {BLOCK} keys", ylabel="query", title=f"routing of a text, {TOP_K} blocks for each query")
_ = axes.legend(loc="upper right")

# %% [markdown]
# How many of the words that occur in exactly one earlier block find it? Only queries with more candidate blocks than
# they may select are counted. A random selection finds the block with probability (selected blocks) / (candidate
# blocks).

# %%
has_choice = own_block > TOP_K - 1
once = has_choice & ((occurs & is_past).sum(axis=1) == 1)
found = (pattern & occurs & is_past)[once].any(axis=1)
blind = np.mean((TOP_K - 1) / own_block[once])
print(f"{once.sum()} queries: the block is found by {found.mean():.0%}, by chance it would be {blind:.0%}")
assert found.mean() > 2 * blind

# %% [markdown]
# The routing is a value that can be passed to `moba_attention`, which then does not compute it again. Attention to the
# selected blocks is one softmax over all of their keys.

# %%
value = jax.random.normal(jax.random.key(1), key.shape)
output = attend(key, key, value, block_size=BLOCK, top_k=TOP_K, routing=routing)
is_seen = np.repeat(pattern, BLOCK, axis=1) & np.tri(CONTEXT, dtype=bool)
dense = jax.jit(jax.nn.dot_product_attention)
assert jnp.allclose(output, dense(key, key, value, mask=jnp.asarray(is_seen)[None, None]), atol=1e-5)

# %% [markdown]
# ## Theory
#
# Suppose that one key of a block of $B$ keys, the needle, is the one that a query looks for. Its dot product with the
# query exceeds those of all other keys by $\Delta\mu$; the others are independent and have variance $1 / H$. The score
# of a block is the mean of its dot products. So the score of the needle's block exceeds that of another block by
# $\Delta\mu / B$ on average, and the difference of the two has a variance of $2 / (B H)$:
#
# $$ \mathrm{SNR} = \frac{\Delta\mu / B}{\sqrt{2 / (B H)}} = \Delta\mu \sqrt{\frac{H}{2 B}}, \qquad
# P(\text{the other block has the larger score}) = \Phi(-\mathrm{SNR}). $$
#
# This is the signal-to-noise ratio of the FlashMoBA paper ("Optimizing Mixture of Block Attention", arXiv 2511.11571).
# According to it, blocks a quarter as long double the ratio. If $m$ keys of the block are like the needle, $m
# \Delta\mu$ replaces $\Delta\mu$.
#
# With $n$ candidate blocks and $k - 1$ places, the needle's block is selected if fewer than $k - 1$ of the $n - 1$
# other blocks score higher. If scores are normal and independent, this probability is an integral over the score of the
# needle's block:


# %%
def normal_tail(x):
    """Return the probability that a standard normal number is larger than x."""
    return 0.5 * np.vectorize(math.erfc)(x / math.sqrt(2))


def predicted_recall(snr, candidates, places):
    """Return the probability that the needle's block is among the best `places` of `candidates` blocks."""
    if places >= candidates:
        return 1.0
    points = np.linspace(-8, 8, 2001)
    density = np.exp(-0.5 * points**2) / math.sqrt(2 * math.pi)
    # In units of the standard deviation of the scores, the needle's block leads by sqrt(2) SNR.
    higher = normal_tail(points + math.sqrt(2) * snr)
    others = candidates - 1
    fewer = sum(math.comb(others, i) * higher**i * (1 - higher) ** (others - i) for i in range(places))
    return float(np.sum(fewer * density) * (points[1] - points[0]))


# %% [markdown]
# ## Prediction and measurement
#
# Each context has 2,048 tokens and one needle that occurs nowhere else, followed by at least one block of the largest
# size. `moba_routing` selects blocks for the needle's own vector as the query. A query sees 512 tokens, whatever the
# block size. There are two kinds of contexts: independently drawn tokens, as the theory assumes, and excerpts of the
# text.

# %%
TRIALS, LONG, ATTENDED = 128, 2048, 512
BLOCK_SIZES = (16, 32, 64, 128, 256)


def contexts_of(kind, copies=1):
    """Return keys [trials, LONG, H] with needles, the needles [trials, H], and their positions [trials]."""
    needles = unit_vectors(TRIALS, HEAD_DIM)
    if kind == "independent tokens":
        keys = unit_vectors(TRIALS, LONG, HEAD_DIM)
    else:
        starts = generator.integers(0, len(tokens) - LONG, size=TRIALS)
        keys = vectors[tokens[starts[:, None] + np.arange(LONG)]]
    # Copies stay within one block of the smallest size, so there is one block to find at every size.
    place = generator.integers(0, (LONG - max(BLOCK_SIZES)) // 16, size=TRIALS) * 16
    place += generator.integers(0, 17 - copies, size=TRIALS)
    for i in range(copies):
        keys[np.arange(TRIALS), place + i] = needles
    return keys, needles, place


def measure(keys, needles, place, block_size):
    """Return the share of needles whose block is chosen, and the signal-to-noise ratio of the scores."""
    top_k = ATTENDED // block_size
    query, arrays = jnp.asarray(needles)[:, None, None, :], jnp.asarray(keys)[:, :, None, :]
    chosen = route(query, arrays, block_size=block_size, top_k=top_k).indices[:, 0, 0]  # [trials, top_k]
    holds_needle = place // block_size
    recall = np.mean((np.asarray(chosen) == holds_needle[:, None]).any(axis=1))

    candidates = LONG // block_size - 1  # without the own block
    means = keys[:, : candidates * block_size].reshape(TRIALS, candidates, block_size, HEAD_DIM).mean(axis=2)
    scores = np.einsum("th,tch->tc", needles, means)
    is_needle = np.arange(candidates) == holds_needle[:, None]
    others = np.where(is_needle, np.nan, scores)
    lead = scores[is_needle] - np.nanmean(others, axis=1)
    return recall, lead.mean() / math.sqrt(2 * np.nanvar(others, axis=1, ddof=1).mean())


def predict(block_size, copies=1):
    """Predict the numbers of `measure`: the needle's product is 1, and that of other keys is 0 on average."""
    snr = copies * math.sqrt(HEAD_DIM / (2 * block_size))
    return predicted_recall(snr, LONG // block_size - 1, ATTENDED // block_size - 1), snr


KINDS = ("independent tokens", "words of the text")
measured = {}
for kind in KINDS:
    contexts = contexts_of(kind)
    measured[kind] = np.array([measure(*contexts, size) for size in BLOCK_SIZES])
predicted = np.array([predict(size) for size in BLOCK_SIZES])

print("block  predicted   independent  text      (recall, in brackets the ratio)")
for i, size in enumerate(BLOCK_SIZES):
    columns = (predicted, *measured.values())
    print(f"{size:5d}  " + "  ".join(f"{rows[i, 0]:4.0%} ({rows[i, 1]:.2f})" for rows in columns))

# %% [markdown]
# For independent tokens the prediction holds within the precision of 128 trials. Words of a text are not independent: a
# word that is frequent in one block increases the spread of that block's scores. The measured ratio is therefore below
# the predicted one, and the gap grows with the block.

# %%
error = np.sqrt(predicted[:, 0] * (1 - predicted[:, 0]) / TRIALS)  # one standard error of a share
assert np.all(np.abs(measured[KINDS[0]][:, 0] - predicted[:, 0]) < 4 * error)
np.testing.assert_allclose(measured[KINDS[0]][:3, 1], predicted[:3, 1], rtol=0.15)
assert np.all(np.diff(measured[KINDS[1]][:, 1]) < 0)  # longer blocks find less

figure, (ratios, recalls) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for axes, column, title in ((ratios, 1, "signal-to-noise ratio"), (recalls, 0, "the needle's block is chosen")):
    axes.plot(BLOCK_SIZES, predicted[:, column], "--", color="black", label="predicted")
    for (kind, rows), colour, marker in zip(measured.items(), (BLUE, ORANGE), "os", strict=True):
        axes.plot(BLOCK_SIZES, rows[:, column], marker, color=colour, label=kind)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    axes.set(xlabel="keys of a block", title=title)
    axes.spines[["top", "right"]].set_visible(False)
chance = [(ATTENDED // size - 1) / (LONG // size - 1) for size in BLOCK_SIZES]
recalls.plot(BLOCK_SIZES, chance, ":", color="grey", label="blind choice")
recalls.set_ylim(0, 1)
recalls.legend(frameon=False)
ratios.set_yscale("log")

# %% [markdown]
# ## Similar neighbours
#
# Relevant tokens seldom occur alone. With $m$ copies of the needle in its block, the theory predicts $m$ times the
# ratio. Each point below is one block size and one $m$, in the text. Training a convolution of the keys
# (`key_convolution`) can have this effect, because it can make the neighbours of a token similar to it. Points are
# below the diagonal if correlations in the text reduce the recall, as above.

# %%
figure, axes = plt.subplots(figsize=(4.4, 4.4), layout="constrained")
axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
recall_of = {}
for copies, colour, marker in zip((1, 2, 4), (BLUE, ORANGE, GREEN), "os^", strict=True):
    contexts = contexts_of("words of the text", copies)
    points = np.array([(predict(size, copies)[0], measure(*contexts, size)[0]) for size in BLOCK_SIZES])
    recall_of[copies] = points[:, 1]
    axes.plot(points[:, 0], points[:, 1], marker, color=colour, label=f"m = {copies}")
axes.set(xlabel="predicted", ylabel="measured", title="the needle's block is chosen")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, title="copies of the needle")
assert recall_of[4].mean() > recall_of[2].mean() > recall_of[1].mean()
print("recall by block size:", {copies: recall.round(2).tolist() for copies, recall in recall_of.items()})

# %% [markdown]
# `python -m benchmarks recall` does the same with longer contexts and more trials, and also with keys that are learned
# from bytes, with and without a convolution. `python -m blockdiag demo --attention moba` and
# `examples/moba_language_model.py` show the effect of routing on a language model.

# %%
plt.show()  # as a script with a screen; a notebook has shown the pictures already
