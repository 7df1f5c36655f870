"""Context parallelism: how tokens, heads and keys of one sequence move between several devices.

Every strategy is ordinary code on one device's shards, between collectives. It runs inside `jax.shard_map`, which is
added unless the mesh is already manual.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.experimental.xla_metadata import xla_metadata_call
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from blockdiag.common import validation
from blockdiag.common.context_sizes import next_multiple
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.meshes import explicit_mesh

type Strategy = Literal["ulysses", "gather", "ring"]


@dataclass(frozen=True)
class ContextParallel:
    """Options for sharding the tokens of each sequence over a mesh axis, in equal consecutive parts.

    The strategies:

    - "ulysses", for all operations: devices exchange tokens for heads; each computes whole sequences of its heads.
    - "gather", for MoBA and `fuse`: each device gathers keys and values and computes its own queries.
    - "ring", for `fuse`: shards of keys and values travel around the devices, so none ever has all of them.

    "ulysses" needs key heads that the devices divide, or query heads that they divide, with several devices having the
    same key head; `fuse` supports only the former. "ring" is for sequences whose keys do not fit into the memory of one
    device: it moves as many bytes as "gather" and is not faster.

    Attributes:
        axis: the mesh axis that shards the token axis.
        strategy: one of the above. None chooses "ulysses" where it supports the heads, otherwise "gather". With
            None, block-diagonal attention communicates only the rows of blocks that cross a device boundary.
        mesh: the mesh; required if its axes are automatic and no `jax.set_mesh` is active.
        batch_axes, head_axes: mesh axes that shard batch rows and heads. They are for automatic axes only, since
            explicit shardings are part of array types. Batch rows and heads sharded over other axes are gathered. For
            `fuse`, batch rows are the first batch axis of the attention, and heads are the last batch axis that
            queries, keys and values share.

    Raises:
        ValueError: `strategy` is none of these. A call that a strategy does not support raises its own error.

    References:
        Exchange of tokens for heads: Jacobs et al., "DeepSpeed Ulysses" (2023). Travelling keys: Liu et al., "Ring
        Attention with Blockwise Transformers for Near-Infinite Context" (2023).

    Example:
        >>> import jax
        >>> from blockdiag import ContextParallel, moba_attention
        >>> mesh = jax.make_mesh((jax.device_count(),), ("sequence",))
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 64 * jax.device_count(), 4, 32))
        >>> with jax.set_mesh(mesh):
        ...     shards = [jax.device_put(x, jax.P(None, "sequence")) for x in (query, key, value)]
        ...     context = ContextParallel("sequence")
        ...     output = moba_attention(*shards, block_size=16, top_k=3, context_parallel=context)
        >>> output.sharding.spec[:2] == (None, "sequence")
        True
    """

    axis: str
    strategy: Strategy | None = None
    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.strategy not in (None, "ulysses", "gather", "ring"):
            raise ValueError(
                f"`strategy` must be None, 'ulysses', 'gather' or 'ring', got {self.strategy!r}; 'ulysses' supports "
                "attention whose heads the devices divide, 'gather' MoBA and `fuse` with any number of key heads, "
                "'ring' `fuse`"
            )


type Parts = Callable[..., Any]
"""A computation on one device's shards."""


def on_parts(context: ContextParallel, compute: Parts, arrays: Sequence[Any], roles: Sequence[str], result: Any) -> Any:
    """Run a computation on each device's shards of arrays whose token axis is divided.

    Args:
        context: names the mesh axis that shards tokens.
        compute: function of the shards; it runs with manual mesh axes.
        arrays: arrays or None, the query first.
        roles: the axes of each array, one letter per axis: "b" batch, "t" tokens, "h" heads, "." any other.
        result: the roles of the results, a pytree.

    Raises:
        ValueError: the mesh has no such axis, or the axis does not divide the tokens.
    """
    kinds = _kinds(jax.sharding.get_abstract_mesh())
    if kinds.get(context.axis) == AxisType.Manual:
        return compute(*arrays)
    mesh = explicit_mesh([x for x in arrays if x is not None])
    shape = {} if mesh is None else dict(mesh.shape)
    if _kinds(mesh).get(context.axis) == AxisType.Explicit:
        names = {"b": _sharded_by(arrays[0], roles[0], "b"), "h": _sharded_by(arrays[0], roles[0], "h")}
        manual = {name for name, kind in _kinds(mesh).items() if kind == AxisType.Explicit}
    else:
        mesh = context.mesh if context.mesh is not None else jax.sharding.get_abstract_mesh()
        shape = dict(mesh.shape)
        names = {"b": context.batch_axes, "h": context.head_axes}
        manual = set(mesh.axis_names)
        _warn_of_unnamed_axes(arrays, roles, names)
    if context.axis not in shape:
        raise ValueError(
            f"`context_parallel` names the axis {context.axis!r}, but the mesh has {sorted(shape) or 'none'}; call "
            "inside `jax.set_mesh(mesh)` or pass ContextParallel(axis, mesh=mesh)"
        )
    names["t"] = (context.axis,)
    for x, axes in zip(arrays, roles, strict=True):
        tokens, devices = 0 if x is None or "t" not in axes else x.shape[axes.index("t")], shape[context.axis]
        if tokens % devices:
            raise ValueError(
                f"tokens must be a multiple of the {devices} devices along {context.axis!r}, got {tokens}; pad them to "
                f"{next_multiple(tokens, devices)}"
            )
    spec = functools.partial(_spec, names)
    specs = tuple(None if x is None else spec(axes) for x, axes in zip(arrays, roles, strict=True))
    if _kinds(mesh).get(context.axis) == AxisType.Explicit:
        arrays = [x if x is None else jax.sharding.reshard(x, s) for x, s in zip(arrays, specs, strict=True)]
    results = jax.tree.map(spec, result)
    mapped = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=results, axis_names=manual)
    return mapped(*arrays)


def run_together(axis: str, move: Callable[[Sequence[Array]], list[Array]], arrays: Sequence[Array]) -> list[Array]:
    """Move arrays by one call of the communication library, since XLA overlaps only one call at a time with kernels."""
    # XLA for GPUs cannot compile such a call if there is only one device.
    if len(arrays) < 2 or jax.lax.axis_size(axis) == 1:
        return move(arrays)
    # XLA for GPUs turns this attribute into an NCCL group. Other platforms ignore it.
    call: Any = xla_metadata_call(move, _collectives_group="", inlineable="false")
    return call(arrays)


def choose_strategy(
    context: ContextParallel, heads: tuple[int, int], devices: int, remedy: str = "use strategy='gather'"
) -> Strategy:
    """Return the user's strategy; by default "ulysses" where it supports the heads, otherwise "gather".

    Args:
        context: the call's `context_parallel`.
        heads: query heads and key heads of each device.
        devices: number of devices along the axis.
        remedy: remedy for the error message if "ulysses" is not possible.

    Raises:
        ValueError: the user asks for "ulysses" and the heads do not allow it, or for "ring".
    """
    refuse_ring(context, "MoBA", "use strategy='gather', or 'ulysses' where the devices divide the query heads")
    query_heads, key_heads = heads
    is_supported = key_heads % devices == 0 or (devices % key_heads == 0 and query_heads % devices == 0)
    if context.strategy == "ulysses" and not is_supported:
        raise ValueError(
            f"strategy 'ulysses' needs query heads that are a multiple of the {devices} devices along "
            f"{context.axis!r}, and key heads that are a multiple or a divisor of these, got {query_heads} query heads "
            f"and {key_heads} key heads on each; {remedy}"
        )
    return context.strategy or ("ulysses" if is_supported else "gather")


def refuse_ring(context: ContextParallel, operation: str, remedy: str) -> None:
    """Reject the strategy "ring" for an operation that does not support it.

    Raises:
        ValueError: the strategy is "ring".
    """
    if context.strategy == "ring":
        raise ValueError(f"strategy 'ring' supports only `fuse`, not {operation}; {remedy}")


def check_packing(
    context: ContextParallel,
    tokens_shape: Sequence[int],
    sequence_offsets: Any,
    block_lengths: Any = None,
    block_size: int = 1,
    operand: str = "query",
) -> None:
    """Check the description of packed tokens against the tokens of all devices.

    Args:
        context: names the mesh axis that shards tokens.
        tokens_shape: [T] or [B, T]; of one device if the axis is manual, else of all devices.
        sequence_offsets, block_lengths, block_size: arguments of the call.
        operand: name of the operand that has these tokens.

    Raises:
        ValueError: there are batch rows, or offsets or lengths do not match the tokens.
    """
    is_manual = _kinds(jax.sharding.get_abstract_mesh()).get(context.axis) == AxisType.Manual
    *batch, tokens = tokens_shape
    tokens *= jax.lax.axis_size(context.axis) if is_manual else 1
    validation.check_packing((*batch, tokens), block_size, sequence_offsets, block_lengths, operand)


def roles_of(x: Array, last: str) -> str:
    """Return the roles of an array's axes for `on_parts`: those of its batch axes, then `last`."""
    batch = x.ndim - len(last)
    return ("b" + "." * (batch - 1) if batch else "") + last


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_tokens(arrays: Sequence[Array], axis: str, tokens: int) -> list[Array]:
    """Gather arrays along the axis `tokens`, which is sharded; gradients are summed over devices in float32."""

    def gather(arrays: Sequence[Array]) -> list[Array]:
        return [jax.lax.all_gather(x, axis, axis=tokens, tiled=True) for x in arrays]

    return run_together(axis, gather, arrays)


def _gather_forward(arrays: Sequence[Array], axis: str, tokens: int) -> tuple[list[Array], None]:
    return gather_tokens(arrays, axis, tokens), None


def _gather_backward(axis: str, tokens: int, residuals: None, cotangents: list[Array]) -> tuple[list[Array]]:
    del residuals
    wide = [x.astype(accumulation_dtype(x.dtype)) for x in cotangents]

    def add_up(arrays: Sequence[Array]) -> list[Array]:
        return [jax.lax.psum_scatter(x, axis, scatter_dimension=tokens, tiled=True) for x in arrays]

    totals = run_together(axis, add_up, wide)
    return ([total.astype(x.dtype) for total, x in zip(totals, cotangents, strict=True)],)


gather_tokens.defvjp(_gather_forward, _gather_backward)


def rows_before(x: Array, axis: str, tokens: int, count: int) -> Array:
    """Return the last `count` rows of the previous device; zeros on the first device."""
    devices = jax.lax.axis_size(axis)
    last = jax.lax.slice_in_dim(x, x.shape[tokens] - count, x.shape[tokens], axis=tokens)
    return jax.lax.ppermute(last, axis, [(device, device + 1) for device in range(devices - 1)])


def rows_after(x: Array, axis: str, tokens: int, count: int) -> Array:
    """Return the first `count` rows of the next device; zeros on the last device."""
    devices = jax.lax.axis_size(axis)
    first = jax.lax.slice_in_dim(x, 0, count, axis=tokens)
    return jax.lax.ppermute(first, axis, [(device + 1, device) for device in range(devices - 1)])


def _kinds(mesh: Any) -> dict[str, AxisType]:
    return {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _warn_of_unnamed_axes(arrays: Sequence[Any], roles: Sequence[str], names: dict[str, tuple[str, ...]]) -> None:
    """Warn about arrays whose batch rows or heads are gathered. Only concrete arrays reveal their sharding."""
    fields = {"b": "batch_axes", "h": "head_axes"}
    for x, axes in zip(arrays, roles, strict=True):
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        for role, entry in zip(axes, sharding.spec, strict=False):
            found = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            unnamed = [axis for axis in found if sharding.mesh.shape[axis] > 1 and axis not in names.get(role, found)]
            if unnamed:
                warnings.warn(
                    f"an array of shape {x.shape} is sharded as {sharding.spec}, and is gathered over {unnamed}: name "
                    f"them in `{fields[role]}` of ContextParallel, as explicit axes need not be",
                    stacklevel=2,
                )


def _sharded_by(x: Array, roles: str, role: str) -> tuple[str, ...]:
    """Return the explicit mesh axes that shard the first axis with a given role."""
    spec = tuple(jax.typeof(x).sharding.spec)
    place = roles.find(role)
    entry = spec[place] if 0 <= place < len(spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _spec(names: dict[str, tuple[str, ...]], roles: str) -> P:
    """Return the spec of an array; of several batch axes only the first is sharded."""
    return P(*(names.get(role) or None if roles.index(role) == place else None for place, role in enumerate(roles)))
