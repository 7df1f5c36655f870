"""Calls that several devices share: batch rows or heads, or the tokens of one sequence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.harness.family import Work, names_of
from blockdiag.common.context_parallel import ContextParallel, Strategy
from blockdiag.fusion.api import fuse
from blockdiag.ops.block_diagonal.api import block_diagonal_attention
from blockdiag.ops.moba.api import moba_attention

type Division = Literal["batch", "heads"]

PASSES = ("fwd+bwd",)


@dataclass(frozen=True)
class ShardCase:
    """A call whose batch rows or heads the devices share. Query, key and value have one shape.

    Attributes:
        op: its name.
        attend: the call, of query, key and value.
        division: what the devices share.
        rows, heads: of one device.
        tokens, head_dim: of the operands.
        dtype: of the operands.
    """

    op: str
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    division: Division
    rows: int
    tokens: int
    heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16

    @property
    def name(self) -> str:
        """The name for lines of progress."""
        return f"{self.op}, {self.division}"

    @property
    def passes(self) -> tuple[str, ...]:
        """The one pass that is timed."""
        return PASSES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of one device's operands."""
        return self.rows, self.tokens, self.heads, self.head_dim

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the call."""
        names = ("op", "division", "rows", "tokens", "heads", "head_dim")
        return {name: getattr(self, name) for name in names}

    def floor(self, pass_name: str) -> tuple[Work, ...]:
        """Return nothing: programs are compared with one device, not with the GPU's rates."""
        del pass_name
        return ()


@dataclass(frozen=True)
class SequenceCase:
    """A call whose one sequence the devices share.

    Attributes:
        name: of the case, for a choice of cases.
        op: its name.
        attend: the call, of `context_parallel`, query, key and value.
        tokens, heads, key_heads, head_dim: of all devices together.
        dtype: of the operands.
        strategies: that are timed, where they can serve.
        repeats_heads: whether the call repeats key heads that devices outnumber, and exchanges heads in groups.
    """

    name: str
    op: str
    attend: Callable[..., jax.Array]
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16
    strategies: tuple[Strategy, ...] = ("ulysses", "gather")
    repeats_heads: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        """The one pass that is timed."""
        return PASSES

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the call."""
        names = ("op", "tokens", "heads", "head_dim")
        return {"division": "tokens", "rows": 1, **{name: getattr(self, name) for name in names}}

    def floor(self, pass_name: str) -> tuple[Work, ...]:
        """Return nothing: programs are compared with one device, not with the GPU's rates."""
        del pass_name
        return ()


@fuse
def _causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    row = jnp.arange(query.shape[1], dtype=jnp.int32)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    scores = jnp.where(row[:, None] >= row[None, :], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def _cudnn_causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _block_diagonal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return block_diagonal_attention(query, key, value, block_size=64)


def _moba(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return moba_attention(query, key, value, block_size=128, top_k=8)


def _divided(*cases: ShardCase) -> tuple[ShardCase, ...]:
    """Return each case with both divisions."""
    divisions: tuple[Division, ...] = ("batch", "heads")
    return tuple(replace(case, division=division) for case in cases for division in divisions)


SHARD_CASES = _divided(
    ShardCase("block_diagonal", _block_diagonal, "batch", 36, 16384, 8, 128),
    ShardCase("moba", _moba, "batch", 6, 16384, 8, 128),
    ShardCase("fuse causal", _causal, "batch", 2, 16384, 8, 128),
    ShardCase("jax.nn cudnn causal", _cudnn_causal, "batch", 2, 16384, 8, 128),
)
SMALL_SHARD_CASES = _divided(
    ShardCase("block_diagonal", _block_diagonal, "batch", 2, 128, 2, 16, jnp.float32),
    ShardCase("moba", _moba, "batch", 2, 512, 2, 16, jnp.float32),
    ShardCase("fuse causal", _causal, "batch", 2, 64, 2, 16, jnp.float32),
)


def _moba_of_sequence(context: ContextParallel | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return moba_attention(query, key, value, block_size=128, top_k=8, context_parallel=context)


def _fuse_of_sequence(context: ContextParallel | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return fuse(_grouped_causal, context_parallel=context)(query, key, value)


def _grouped_causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    batch, tokens, heads, width = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, width)
    row = jnp.arange(tokens, dtype=jnp.int32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(row[:, None] >= row[None, :], scores, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(batch, tokens, heads, width)


_RING: tuple[Strategy, ...] = ("ulysses", "gather", "ring")
SEQUENCE_CASES = (
    SequenceCase("moba_256k", "moba", _moba_of_sequence, 262_144, 16, 16, 128, repeats_heads=True),
    SequenceCase("moba_256k_k2", "moba, 2 key heads", _moba_of_sequence, 262_144, 16, 2, 128, repeats_heads=True),
    SequenceCase("moba_1024k", "moba", _moba_of_sequence, 1_048_576, 16, 16, 128, repeats_heads=True),
    SequenceCase("fuse_128k", "fuse causal", _fuse_of_sequence, 131_072, 64, 8, 128, strategies=_RING),
)
SMALL_SEQUENCE_CASES = (
    SequenceCase("moba_small", "moba", _moba_of_sequence, 2048, 8, 8, 16, jnp.float32, repeats_heads=True),
    SequenceCase("fuse_small", "fuse causal", _fuse_of_sequence, 256, 8, 4, 16, jnp.float32),
)


def select_device_cases(names: str | None) -> list[ShardCase | SequenceCase]:
    """Return the cases of a comma-separated list of "shards", "sequences" and names of sequences; None is both.

    Raises:
        ValueError: a name is unknown.
    """
    groups: dict[str, tuple[ShardCase | SequenceCase, ...]] = {"shards": SHARD_CASES, "sequences": SEQUENCE_CASES}
    known = groups | {case.name: (case,) for case in SEQUENCE_CASES}
    wanted = list(groups) if names is None else names_of(names, known)
    return [case for name in wanted for case in known[name]]
