"""This library through `jax.jit`, and what a JAX user can write today: an einsum for XLA, and `jax.nn` with cuDNN."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.block_diagonal.cases import Case
from benchmarks.block_diagonal.implementations import PassMakers, implementation, jit_passes
from benchmarks.block_diagonal.workload import Workload
from benchmarks.harness.family import Implementation

type Attend = Callable[[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]], jax.Array]


def our_attention(case: Case, named: str, *, fused_rotary: bool = True) -> Attend:
    """`block_diagonal_attention` with a named implementation; rotary fused, or applied before by jax.numpy."""
    from blockdiag import Rotary, block_diagonal_attention

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        rotary = None
        if case.rotary and fused_rotary:
            rotary = Rotary(extra["cos"], extra["sin"])
        elif case.rotary:
            query, key = (rotate(case, operand, extra) for operand in (query, key))
        return block_diagonal_attention(
            query,
            key,
            value,
            block_size=case.block_size,
            sequence_offsets=extra.get("sequence_offsets"),
            rotary=rotary,
            scale=case.scale,
            implementation=named,
        )

    return attend


def rotate(case: Case, operand: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
    """Half-split rotary in float32, rounded to the operand's dtype: what XLA makes one kernel of."""
    cos, sin = extra["cos"], extra["sin"]
    if case.packed:
        cos, sin = cos[extra["token_positions"]], sin[extra["token_positions"]]
    else:
        length = case.sequence_lengths[0]
        cos, sin = cos[None, :length], sin[None, :length]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(operand.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(operand.dtype)


def fold(case: Case, operand: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
    """[blocks, block_size, heads, H]: a reshape where all blocks are full, a padded gather elsewhere."""
    if case.is_foldable:
        return operand.reshape(-1, case.block_size, *operand.shape[-2:])
    offset = jnp.arange(case.block_size, dtype=jnp.int32)[None, :]
    rows = extra["block_starts"][:, None] + jnp.minimum(offset, extra["block_lengths"][:, None] - 1)
    return operand[rows]


def unfold(case: Case, blocks: jax.Array, shape: tuple[int, ...], extra: dict[str, jax.Array]) -> jax.Array:
    """The inverse of `fold`, without the padding."""
    if case.is_foldable:
        return blocks.reshape(shape)
    return blocks.reshape(-1, *blocks.shape[2:])[extra["token_slots"]]


def einsum_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None, scale: float
) -> jax.Array:
    """Attention within [C, block_size, heads, H]: two einsums, a softmax in float32, keys past `lengths` masked."""
    blocks, rows, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    grouped = query.reshape(blocks, rows, key_heads, query_heads // key_heads, head_dim)
    scores = jnp.einsum("cqkgh,cskh->ckgqs", grouped, key, preferred_element_type=jnp.float32) * scale
    if lengths is not None:
        allowed = jnp.arange(rows)[None, :] < lengths[:, None]
        scores = jnp.where(allowed[:, None, None, None, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("ckgqs,cskh->cqkgh", weights, value).reshape(query.shape)


def einsum_attention(case: Case) -> Attend:
    """The XLA baseline."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        shape = query.shape
        if case.rotary:
            query, key = (rotate(case, operand, extra) for operand in (query, key))
        query, key, value = (fold(case, operand, extra) for operand in (query, key, value))
        lengths = None if case.is_foldable else extra["block_lengths"]
        return unfold(case, einsum_blocks(query, key, value, lengths, case.scale), shape, extra)

    return attend


def cudnn_attention(case: Case) -> Attend:
    """`jax.nn.dot_product_attention(implementation="cudnn")` with each block a batch row."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        shape = query.shape
        if case.rotary:
            query, key = (rotate(case, operand, extra) for operand in (query, key))
        folded = (fold(case, operand, extra) for operand in (query, key, value))
        lengths = None if case.is_foldable else extra["block_lengths"]
        blocks = jax.nn.dot_product_attention(
            *folded,
            scale=case.scale,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
        return unfold(case, blocks, shape, extra)

    return attend


def _ours(name: str, *, is_required: bool = True, is_chained: bool = False) -> Implementation:
    def passes(workload: Workload) -> PassMakers:
        attend = our_attention(workload.case, name)
        return jit_passes(attend, workload, keeps_residuals=False, is_chained=is_chained)

    return implementation(name, "jax", passes, is_required=is_required, preparation_seconds=8.0)


def _apart(workload: Workload) -> PassMakers:
    attend = our_attention(workload.case, "triton", fused_rotary=False)
    return jit_passes(attend, workload, keeps_residuals=False, note="rotary applied apart, by one XLA kernel each")


def _only_rotary(case: Case) -> str | None:
    return None if case.rotary else "the same as triton without rotary"


def _baseline(name: str, attention: Callable[[Case], Attend]) -> Implementation:
    def passes(workload: Workload) -> PassMakers:
        note = "rotary applied apart, by XLA" if workload.case.rotary else ""
        return jit_passes(attention(workload.case), workload, keeps_residuals=True, note=note)

    return implementation(name, "jax", passes, preparation_seconds=8.0)


OURS = (
    _ours("triton", is_chained=True),
    _ours("pallas"),
    implementation("triton-rope-apart", "jax", _apart, is_required=True, unsupported=_only_rotary),
)
JAX_BASELINES = (
    _baseline("jax-cudnn", cudnn_attention),
    _baseline("jax-einsum", einsum_attention),
    # Not for speed but for what `implementation=None` gives where no kernel runs.
    _ours("xla", is_required=False),
)
