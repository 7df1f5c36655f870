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
# # Decoding with a paged cache
#
# When a language model generates text, each step has one new query for each sequence, which attends to all earlier
# keys. Here the keys are stored in pages of a shared pool: `append_to_pages` writes new keys, and `paged_attention`
# attends to them. Each step is compared with full attention. At the end the cache gets eight bits, and the loss of
# accuracy is measured.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from blockdiag import append_to_pages, merge_attention_states, paged_attention

jax.config.update("jax_default_matmul_precision", "highest")

# Colours that colour-blind readers can tell apart.
BLUE, ORANGE = "#0072B2", "#E69F00"

# %% [markdown]
# ## Requests
#
# There are three sequences with prompts of different lengths, and 12 more tokens are generated for each. There is no
# model: keys, values and queries are random. Two key heads serve eight query heads.

# %%
SEQUENCES, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 3, 8, 2, 64
PROMPTS, STEPS = np.array([37, 9, 22]), 12
lengths = PROMPTS + STEPS
longest = lengths.max()
keys = jax.random.split(jax.random.key(0), 3)
all_keys, all_values = jax.random.normal(keys[0], (2, SEQUENCES, longest, KEY_HEADS, HEAD_DIM))
all_queries = jax.random.normal(keys[1], (SEQUENCES, longest, QUERY_HEADS, HEAD_DIM))

# The expected result at every position: full causal attention of all tokens.
full = jax.nn.dot_product_attention(all_queries, all_keys, all_values, is_causal=True)

# %% [markdown]
# ## Pages
#
# The pool has 16 pages of 8 tokens. A sequence holds as many pages as its tokens need, anywhere in the pool, and gets
# another one when the last is full, so no memory is reserved for tokens that are never generated. The table lists the
# pages of each sequence in order; entries beyond its last page are not read. The pool is initialised to NaN, to show
# that nothing reads memory that was not written.

# %%
NUM_PAGES, PAGE_SIZE = 16, 8


class Allocator:
    """Hands out pages; the table [sequences, max_pages] holds their numbers."""

    def __init__(self, num_pages, sequences, max_pages):
        self.free = np.random.default_rng(0).permutation(num_pages).tolist()
        self.table = np.zeros((sequences, max_pages), np.int32)
        self.held = np.zeros(sequences, int)

    def grow(self, lengths):
        """Give each sequence enough pages for its length."""
        for sequence, length in enumerate(lengths):
            while self.held[sequence] * PAGE_SIZE < length:
                self.table[sequence, self.held[sequence]] = self.free.pop()
                self.held[sequence] += 1


allocator = Allocator(NUM_PAGES, SEQUENCES, max_pages=-(-longest // PAGE_SIZE))
key_pages, value_pages = jnp.full((2, NUM_PAGES, PAGE_SIZE, KEY_HEADS, HEAD_DIM), jnp.nan)

# %% [markdown]
# ## Prompts
#
# One call appends all prompts; `query_lengths` gives the number of valid rows of each sequence. Donated pages are
# updated in place.

# %%
append = jax.jit(append_to_pages, donate_argnums=(2, 3))
attend = jax.jit(paged_attention, static_argnames=("return_residual", "split_size"))

allocator.grow(PROMPTS)
prompt_rows = PROMPTS.max()
kv_lengths = jnp.asarray(PROMPTS, jnp.int32)
key_pages, value_pages = append(
    all_keys[:, :prompt_rows],
    all_values[:, :prompt_rows],
    key_pages,
    value_pages,
    jnp.asarray(allocator.table),
    kv_lengths,
    query_lengths=kv_lengths,
)


def owners(allocator, lengths):
    """Return the sequence of each row of the pool, or -1, int [pages, page_size]."""
    pool = np.full((NUM_PAGES, PAGE_SIZE), -1)
    for sequence, length in enumerate(lengths):
        for position in range(length):
            pool[allocator.table[sequence, position // PAGE_SIZE], position % PAGE_SIZE] = sequence
    return pool


def draw_pool(axes, allocator, lengths, title):
    """Draw the pages to the right and their rows downwards, with a colour for each sequence."""
    palette = np.array([[0.92, 0.92, 0.92], [0.0, 0.45, 0.7], [0.9, 0.62, 0.0], [0.0, 0.62, 0.45]])
    axes.imshow(palette[owners(allocator, lengths).T + 1], interpolation="nearest")
    axes.set_xticks(np.arange(NUM_PAGES + 1) - 0.5, [])
    axes.set_yticks(np.arange(PAGE_SIZE + 1) - 0.5, [])
    axes.grid(color="white", linewidth=1)
    for sequence in range(SEQUENCES):
        for order, page in enumerate(allocator.table[sequence, : allocator.held[sequence]]):
            axes.text(page, -0.7, str(order), ha="center", fontsize=8)
    axes.set_title(title, pad=18)
    axes.set_xlabel("page; the number above is its place in its sequence")


figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
draw_pool(axes, allocator, PROMPTS, "the pool after three prompts")
is_written = ~np.isnan(np.asarray(key_pages)).any(axis=(2, 3))
assert (is_written == (owners(allocator, PROMPTS) >= 0)).all()

# %% [markdown]
# ## Steps
#
# Each step appends one token to each sequence and attends from it. `kv_lengths` includes the new token. All steps use
# the same compiled program, because lengths are data.

# %%
everyone = np.arange(SEQUENCES)
errors, outputs = [], []
for step in range(STEPS):
    position = PROMPTS + step  # of the new tokens
    allocator.grow(position + 1)
    table, kv_lengths = jnp.asarray(allocator.table), jnp.asarray(position + 1, jnp.int32)
    new_key, new_value = (array[everyone, position][:, None] for array in (all_keys, all_values))  # [B, 1, K, H]
    key_pages, value_pages = append(new_key, new_value, key_pages, value_pages, table, kv_lengths)
    output = attend(all_queries[everyone, position][:, None], key_pages, value_pages, table, kv_lengths)  # [B, 1, N, H]
    outputs.append(output)
    errors.append(float(jnp.abs(output[:, 0] - full[everyone, position]).max()))

assert max(errors) < 1e-5
print(f"{STEPS} steps, largest difference from full attention: {max(errors):.1e}")
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
draw_pool(axes, allocator, lengths, f"after {STEPS} more tokens of each sequence")

# %% [markdown]
# ## Drafts and dropped tokens
#
# On a GPU, several queries of a sequence in one call cost little more than one, because the cache is read once for all
# of them. Here one call attends from the last four tokens as a draft; its results are those of the single steps. To
# drop tokens, pass smaller lengths in later calls. Nothing has to be cleared.

# %%
last = lengths[:, None] + np.arange(-4, 0)  # positions [B, 4]
drafted = attend(all_queries[everyone[:, None], last], key_pages, value_pages, table, kv_lengths)
assert jnp.allclose(drafted, jnp.concatenate(outputs[-4:], axis=1), atol=1e-5)

shorter = kv_lengths - 3
taken_back = attend(all_queries[everyone, lengths - 4][:, None], key_pages, value_pages, table, shorter)
assert jnp.allclose(taken_back, outputs[-4], atol=1e-5)

# %% [markdown]
# ## Merging partial results
#
# Attention to several sets of keys can be merged into attention to all of them, given the log-sum-exp of each. In this
# way a prefix that many sequences share is read once, and the library splits one long sequence over a GPU.

# %%
query = all_queries[:1, lengths[0] - 1][:, None]
parts = [(table[:1, :3], 3 * PAGE_SIZE), (table[:1, 3:], int(lengths[0]) - 3 * PAGE_SIZE)]
states = [
    attend(query, key_pages, value_pages, pages, jnp.array([count], jnp.int32), return_residual=True)
    for pages, count in parts
]
merged, log_sum = merge_attention_states(*zip(*states, strict=True))
assert jnp.allclose(merged, outputs[-1][:1], atol=1e-5)

# %% [markdown]
# ## Eight bits
#
# A float8 cache halves the bytes that a step reads, and rounds keys and values. Values are first divided by a scale.
# The scale is either known, or computed by `append_to_pages` for each token and head, so that the largest element
# becomes the largest number of the format. These scales are stored in pages of their own.
#
# This part uses longer sequences, appended in one call. As is common for keys, some channels are much larger than the
# others.

# %%
TOKENS = 512
pages_needed = TOKENS // PAGE_SIZE
long_keys, long_values = jax.random.normal(keys[2], (2, SEQUENCES, TOKENS, KEY_HEADS, HEAD_DIM))
outliers = jnp.where(jnp.arange(HEAD_DIM) % 16 == 0, 6.0, 1.0)
long_keys = long_keys * outliers
long_query = jax.random.normal(jax.random.key(1), (SEQUENCES, 1, QUERY_HEADS, HEAD_DIM)) / outliers
long_table = jnp.arange(SEQUENCES * pages_needed, dtype=jnp.int32).reshape(SEQUENCES, pages_needed)
long_lengths = jnp.full(SEQUENCES, TOKENS, jnp.int32)
expected = jax.nn.dot_product_attention(long_query, long_keys, long_values)


@functools.partial(jax.jit, static_argnames=("dtype", "scales"))
def through_cache(key, value, query, dtype, scales):
    """Append all tokens to a cache of `dtype` and attend; `scales` is "tokens", a number, or None."""
    pool = (SEQUENCES * pages_needed, PAGE_SIZE, KEY_HEADS, HEAD_DIM)
    cache = [jnp.zeros(pool, dtype) for _ in range(2)]
    scale = {}
    if scales == "tokens":
        scale = {name: jnp.zeros(pool[:-1], jnp.float32) for name in ("key_scale", "value_scale")}
    elif scales is not None:
        scale = {"key_scale": scales, "value_scale": scales}
    cache = append_to_pages(key, value, *cache, long_table, long_lengths, **scale)
    if scales == "tokens":
        *cache, scale["key_scale"], scale["value_scale"] = cache
    return paged_attention(query, *cache[:2], long_table, long_lengths, **scale)


# The single scale maps the largest number of the cache to the largest number of the format.
largest = float(jnp.maximum(jnp.abs(long_keys).max(), jnp.abs(long_values).max()))
caches = {
    "float32": ("float32", None),
    "e4m3, a scale per token": ("float8_e4m3fn", "tokens"),
    "e4m3, one scale": ("float8_e4m3fn", largest / 448),
    "e5m2, a scale per token": ("float8_e5m2", "tokens"),
    "e5m2, one scale": ("float8_e5m2", largest / 57344),
}
relative = {}
for name, (dtype, scales) in caches.items():
    output = through_cache(long_keys, long_values, long_query, dtype, scales)
    relative[name] = float(jnp.linalg.norm(output - expected) / jnp.linalg.norm(expected))
    print(f"{name:24} relative error {relative[name]:.1e}")

# %% [markdown]
# float8_e4m3fn has three mantissa bits, so a number is rounded by at most 1/16 of its magnitude; float8_e5m2 has two,
# and rounds by at most 1/8. The rounding errors of many keys average out, so the error of the output is smaller than
# either bound. Scales change little here, because both formats are floating-point: they matter if numbers are too small
# or too large for the format.

# %%
assert relative["float32"] < 1e-5
for name, bound in (("e4m3", 1 / 16), ("e5m2", 1 / 8)):
    assert 0 < relative[f"{name}, a scale per token"] < bound
assert relative["e4m3, a scale per token"] < relative["e5m2, a scale per token"]

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
names = list(relative)[1:]
colours = [BLUE if name.startswith("e4m3") else ORANGE for name in names]
axes.barh(names[::-1], [relative[name] for name in names[::-1]], color=colours[::-1])
for bound, colour in ((1 / 16, BLUE), (1 / 8, ORANGE)):
    axes.axvline(bound, color=colour, linestyle="--", linewidth=1)
axes.set(xlabel="relative error of the output (dashed: bound of one number's rounding)", title="what eight bits cost")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# `examples/decode.py` serves requests to a small language model in this way, and prints how many bits per byte either
# format costs. `moba_paged_attention` reads only the blocks whose mean keys fit the query best.

# %%
plt.show()  # as a script with a screen; a notebook has shown the pictures already
