"""The model of `demo --attention moba`: the demo's language model with a key convolution and MoBA or dense attention.

Both variants have the same parameters, including the key convolution. They differ only in the keys that a query sees.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from blockdiag import Routing, apply_rotary, key_convolution, moba_attention, moba_routing
from blockdiag.demo.language_model import VOCABULARY, Settings, position_tables

type Implementation = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoBASettings(Settings):
    """Sizes of the model with MoBA.

    Attributes:
        top_k: blocks that a query attends to, its own included.
        key_taps: number of tokens that the key convolution reads.
    """

    top_k: int = 4
    key_taps: int = 3
    steps: int = 120
    batch_size: int = 4
    sequence_length: int = 512
    block_size: int = 32
    layers: int = 2

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a sequence."""
        return -(-self.sequence_length // self.block_size)


class Attend(Protocol):
    """A causal attention function of query, key and value [B, T, N, H]."""

    def __call__(self, query: Array, key: Array, value: Array, /) -> Array: ...


def routed_attention(settings: MoBASettings, implementation: Implementation, *, top_k: int | None = None) -> Attend:
    """Return MoBA as an attention function; `top_k` overrides the settings."""
    return functools.partial(
        moba_attention,
        block_size=settings.block_size,
        top_k=settings.top_k if top_k is None else top_k,
        implementation=implementation,
    )


def dense_attention(query: Array, key: Array, value: Array) -> Array:
    """Compute causal attention to all tokens with JAX."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


class Projected(NamedTuple):
    """The operands of an attention layer, [B, T, N, H] each."""

    query: Array
    key: Array
    value: Array


class Attention(nnx.Module):
    """Attention layer: projection, key convolution, rotary embedding, attention and output projection."""

    def __init__(self, settings: MoBASettings, attend: Attend, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(settings.dtype)
        heads = settings.heads, settings.head_dim
        self.project = nnx.LinearGeneral(
            settings.width, (3, *heads), use_bias=False, dtype=dtype, param_dtype=jnp.float32, rngs=rngs
        )
        self.key_weights = nnx.Param(0.1 * jax.random.normal(rngs.params(), (settings.key_taps, *heads), jnp.float32))
        self.output = nnx.LinearGeneral(heads, settings.width, axis=(-2, -1), use_bias=False, dtype=dtype, rngs=rngs)
        self.settings = settings
        self.attend = attend

    def operands(self, inputs: Float[Array, "B T width"]) -> Projected:
        """Return query and convolved key, both rotated, and value."""
        query, key, value = jnp.moveaxis(self.project(inputs), 2, 0)
        key = key_convolution(key, self.key_weights[...])
        tables = position_tables(self.settings)
        return Projected(apply_rotary(query, *tables), apply_rotary(key, *tables), value)

    def __call__(self, inputs: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        return self.output(self.attend(*self.operands(inputs)))


class Layer(nnx.Module):
    """Residual layer: attention and feed-forward."""

    def __init__(self, settings: MoBASettings, attend: Attend, *, rngs: nnx.Rngs) -> None:
        width, dtype = settings.width, jnp.dtype(settings.dtype)
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(settings, attend, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        tokens = inputs + self.attention(self.attention_norm(inputs))
        return tokens + self.contract(nnx.gelu(self.expand(self.feed_forward_norm(tokens))))


class MoBALanguageModel(nnx.Module):
    """Predicts every next byte: int32 [B, T] -> float32 logits [B, T, 256]."""

    def __init__(self, settings: MoBASettings, attend: Attend) -> None:
        rngs, dtype = nnx.Rngs(settings.seed), jnp.dtype(settings.dtype)
        self.embedding = nnx.Embed(VOCABULARY, settings.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(settings, attend, rngs=rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(settings.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(settings.width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T 256"]:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).astype(jnp.float32)

    def operands(self, tokens: Int[Array, "B T"]) -> list[Projected]:
        """Return the operands of each layer's attention."""
        hidden, found = self.embedding(tokens), []
        for layer in self.layers:
            found.append(layer.attention.operands(layer.attention_norm(hidden)))
            hidden = layer(hidden)
        return found


def count_parameters(model: nnx.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """Routing statistics of one layer, averaged over heads, sequences and the queries that have a choice.

    Attributes:
        own_weight: share of the attention weight on the query's own block.
        own_keys: the own block's share of the visible keys, which equals `own_weight` under equal weights.
        distance: distance in blocks from a query's own block to a chosen one; 1 is the preceding block.
        blind_distance: `distance` for blocks chosen at random.
        distinct: number of different blocks that the queries of a sequence's last block choose, per head.
        available: number of blocks that these queries can choose from.
    """

    own_weight: float
    own_keys: float
    distance: float
    blind_distance: float
    distinct: float
    available: int


def routing_statistics(
    model: MoBALanguageModel, tokens: Int[Array, "B T"], settings: MoBASettings, implementation: Implementation
) -> list[LayerStatistics]:
    """Return the routing statistics of each layer on a batch."""
    operands = nnx.jit(lambda model, tokens: model.operands(tokens))(model, tokens)
    options = {"block_size": settings.block_size, "implementation": implementation}
    statistics = []
    for query, key, value in operands:
        routing = moba_routing(query, key, top_k=settings.top_k, **options)
        # The own block's weight is exp of the difference of two log-sum-exps: own block alone minus all visible blocks.
        log_sums = (
            moba_attention(query, key, value, top_k=top_k, return_residual=True, **options)[1]
            for top_k in (1, settings.top_k)
        )
        own_log_sum, log_sum = (np.asarray(array, np.float64) for array in log_sums)
        statistics.append(_statistics(routing, np.exp(own_log_sum - log_sum), settings))
    return statistics


def _statistics(routing: Routing, own_weight: np.ndarray, settings: MoBASettings) -> LayerStatistics:
    """Compute statistics from a routing [B, T, N, k] and the weights of own blocks [B, T, N]."""
    chosen = np.asarray(routing.indices)[..., 1:]
    position = np.arange(chosen.shape[1])
    own = position // settings.block_size
    # Queries with at most top_k - 1 past blocks attend to all of them, whatever the scores.
    has_choice = own > settings.top_k - 1
    if not has_choice.any():
        raise ValueError(
            f"`sequence_length` is {settings.sequence_length}: no query has more than top_k = {settings.top_k} blocks "
            f"of {settings.block_size} to choose from; take longer sequences"
        )
    chosen, own_weight, own, position = (
        chosen[:, has_choice],
        own_weight[:, has_choice],
        own[has_choice],
        position[has_choice],
    )
    own_keys = position % settings.block_size + 1
    past_keys = (settings.top_k - 1) * settings.block_size
    last = np.moveaxis(chosen[:, own == own[-1]], 2, 1)  # [B, N, queries, k - 1]
    distinct = [len(np.unique(head)) for head in last.reshape(-1, last.shape[2] * last.shape[3])]
    return LayerStatistics(
        own_weight=float(own_weight.mean()),
        own_keys=float((own_keys / (own_keys + past_keys)).mean()),
        distance=float((own[None, :, None, None] - chosen).mean()),
        blind_distance=float(((own + 1) / 2).mean()),
        distinct=float(np.mean(distinct)),
        available=int(own[-1]),
    )


def routing_shares(
    model: MoBALanguageModel, tokens: Int[Array, "1 T"], settings: MoBASettings, implementation: Implementation
) -> list[np.ndarray]:
    """Return, for each layer, the share of each block's queries that see each block: float64 [N, blocks, blocks]."""
    operands = nnx.jit(lambda model, tokens: model.operands(tokens))(model, tokens)
    options = {"block_size": settings.block_size, "implementation": implementation}
    shares = []
    for query, key, _ in operands:
        indices = np.asarray(moba_routing(query, key, top_k=settings.top_k, **options).indices)[0]  # [T, N, k]
        seen = (indices[..., None] == np.arange(settings.num_blocks)).any(axis=2)  # [T, N, blocks]
        padding = settings.num_blocks * settings.block_size - len(seen)
        counts = np.pad(seen, ((0, padding), (0, 0), (0, 0))).reshape(
            settings.num_blocks, settings.block_size, *seen.shape[1:]
        )
        queries = np.minimum(settings.block_size, len(seen) - settings.block_size * np.arange(settings.num_blocks))
        shares.append(np.moveaxis(counts.sum(axis=1) / queries[:, None, None], 1, 0))
    return shares
