"""How each operator runs on DTensors that are sharded as they are.

A strategy gives one way to run a call, not every possible one for torch to choose from: torch would combine strategies
of single mesh axes freely, and heads over two axes need more than that they divide over each. What cannot stay where it
is (tokens, channels, heads that do not divide) is gathered by torch.

The tables and lists of MoBA are numbered within what a process holds: sharded over batch rows, each process has those
of its own rows, and no one can gather them. So attention follows them, wherever its operands are.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from blockdiag.interop.private_torch import dtensor_types
from blockdiag.torch._call import Arguments
from blockdiag.torch._moba_call import ListArguments

# Private classes of torch.distributed.tensor, whose places are known to private_torch alone.
type OpSchema = Any
type OpStrategy = Any

type Shard = Literal["batch", "heads", "none"]


class Holder(NamedTuple):
    """A tensor whose placement may decide how a call is sharded.

    Attributes:
        spec: how it is placed.
        batch, heads: its dimensions that are batch rows and heads; None where it has none, or does not decide.
    """

    spec: Any
    batch: int | None
    heads: int | None


def find_shards(holders: Sequence[Holder], key_heads: int | None) -> tuple[Shard, ...]:
    """What each mesh axis shards: the first holder that is sharded in a way that can stay decides.

    Heads can stay where key heads divide over all mesh axes that shard heads together: each query head then lies with
    its own key head. Where `key_heads` is None they cannot, as in an array in which queries, keys and values follow
    each other.
    """
    mesh = holders[0].spec.mesh
    shards: list[Shard] = []
    parts = 1
    for axis in range(mesh.ndim):
        shard: Shard = "none"
        for holder in holders:
            placement = holder.spec.placements[axis]
            if holder.batch is not None and placement.is_shard(holder.batch):
                shard = "batch"
            elif holder.heads is not None and placement.is_shard(holder.heads):
                size = mesh.size(axis)
                if key_heads is not None and key_heads % (parts * size) == 0:
                    shard, parts = "heads", parts * size
            if shard != "none":
                break
        shards.append(shard)
    return tuple(shards)


@dataclass(frozen=True)
class _Layout:
    """A mesh, and what each of its axes shards."""

    mesh: Any
    shards: tuple[Shard, ...]

    def spec(self, batch: int | None = None, heads: int | None = None, *, is_sum: bool = False) -> Any:
        """How a tensor with these dimensions is placed; `is_sum` if it is a sum over the batch rows instead."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        placements: list[Any] = []
        for shard in self.shards:
            if shard == "batch" and is_sum:
                placements.append(Partial())
                continue
            dimension = {"batch": batch, "heads": heads, "none": None}[shard]
            placements.append(Replicate() if dimension is None else Shard(dimension))
        return dtensor_types().DTensorSpec(self.mesh, tuple(placements))


def _block_diagonal(first: int, num_outputs: int, schema: OpSchema) -> OpStrategy:
    """`first` is the position of query among the arguments; before it stands a cotangent."""
    values: Any = schema.args_schema
    query, key, value, *tables = map(_spec, values[first : first + 8])
    rank = len(query.shape)
    batch, heads = (0 if rank == 4 else None), rank - 2
    # The cotangent follows the operands, which were sharded as the model is.
    operands = [query] if key is None else [query, key, value]
    holders = [Holder(one, batch, heads) for one in (*operands, *map(_spec, values[:first]))]
    layout = _Layout(query.mesh, find_shards(holders, None if key is None else key.shape[-2]))
    operand = layout.spec(batch, heads)
    # Tables per token and positions may have a batch axis; those without serve every batch row.
    ranks = {"cos": 3, "sin": 3, "positions": 2} if rank == 4 else {}
    inputs = [operand] * (first + len(operands))
    for name, table in zip(Arguments._fields[3:8], tables, strict=True):
        if table is not None:
            inputs.append(layout.spec(0 if len(table.shape) == ranks.get(name) else None))
    return _one_strategy(inputs, [operand] * num_outputs)


def _moba_lists(schema: OpSchema) -> OpStrategy:
    values: Any = schema.args_schema
    arguments = ListArguments(*values)
    layout, inputs = _list_layout(values[:6])
    table, per_head = layout.spec(0), layout.spec(1, 0)
    has_own = arguments.is_causal and arguments.indices is not None
    return _one_strategy(inputs, [table, table, *[per_head] * 4, per_head if has_own else layout.spec()])


def _moba_routing(schema: OpSchema) -> OpStrategy:
    _, inputs = _list_layout((*schema.args_schema[:5], None))
    # Numbers of blocks within sequences mean the same everywhere.
    return _one_strategy(inputs, [inputs[0]])


def _list_layout(tensors: Sequence[Any]) -> tuple[_Layout, list[Any]]:
    """The layout of a call that routes, and the placements of those of its tensors that it has."""
    query, key, *others = map(_spec, tensors)
    rank = len(query.shape)
    batch, heads = (0 if rank == 4 else None), rank - 2
    holders = [Holder(one, batch, heads) for one in (query, key)]
    layout = _Layout(query.mesh, find_shards(holders, key.shape[-2]))
    operand, mask, offsets = layout.spec(batch, heads), layout.spec(batch), layout.spec()
    rest = (mask, offsets, offsets, operand)
    return layout, [operand, operand, *(wanted for wanted, one in zip(rest, others, strict=True) if one is not None)]


def _moba_attention(first: int, num_outputs: int, schema: OpSchema) -> OpStrategy:
    """`first` is the position of query among the arguments; before it stand results and their cotangents."""
    query, key, value, key_mask, blocks, queries, *lists, own = map(_spec, schema.args_schema[first : first + 11])
    rank = len(query.shape)
    _check_tables((blocks, queries), lists, query.mesh.ndim)
    heads = rank - 2
    # Batch rows are where the lists have them and nowhere else; heads of the lists may be cut out of them.
    holders = [Holder(lists[0], 1, 0), *(Holder(one, None, heads) for one in (query, key, value))]
    layout = _Layout(query.mesh, find_shards(holders, key.shape[-2]))
    operand, table, per_head = layout.spec(0, heads), layout.spec(0), layout.spec(1, 0)
    inputs = [operand] * (first + 3)
    inputs += [] if key_mask is None else [layout.spec(0)]
    inputs += [table, table, *[per_head] * 4]
    inputs += [] if own is None else [per_head]
    return _one_strategy(inputs, [operand] * num_outputs)


def _check_tables(tables: Sequence[Any], lists: Sequence[Any], num_axes: int) -> None:
    for axis in range(num_axes):
        is_batch = {one.placements[axis].is_shard(0) for one in tables}
        is_batch |= {one.placements[axis].is_shard(1) for one in lists}
        if len(is_batch) > 1:
            raise ValueError(
                "tables and lists must be sharded over the same batch rows, got "
                f"{[tuple(one.placements) for one in (*tables, *lists)]}; pass what torch.ops.blockdiag.moba_lists "
                "returns, as it is: its numbers count within what a process holds"
            )


def _key_convolution(first: int, schema: OpSchema) -> OpStrategy:
    """`first` is the position of key among the arguments; before it stands a cotangent, of which there is one."""
    key, weights, offsets = map(_spec, schema.args_schema[first : first + 3])
    rank = len(key.shape)
    batch, heads = (0 if rank == 4 else None), rank - 2
    holders = [Holder(key, batch, heads), Holder(weights, None, 1)]
    layout = _Layout(key.mesh, find_shards(holders, key.shape[-2]))
    operand = layout.spec(batch, heads)
    inputs = [operand] * (first + 1) + [layout.spec(None, 1)]
    inputs += [] if offsets is None else [layout.spec()]
    # Each process sums the gradient of the weights over its own batch rows.
    outputs = [operand] if first == 0 else [operand, layout.spec(None, 1, is_sum=True)]
    return _one_strategy(inputs, outputs)


def _spec(strategy: Any) -> Any:
    """How one tensor argument is placed, or None where there is none."""
    return None if strategy is None else strategy.strategies[0].output_spec


def _one_strategy(inputs: Sequence[Any], outputs: Sequence[Any]) -> OpStrategy:
    types = dtensor_types()
    results: Any = outputs[0] if len(outputs) == 1 else tuple(outputs)
    return types.OpStrategy([types.OpSpec(results, tuple(inputs), [[0.0] for _ in inputs])])


STRATEGIES: Mapping[str, tuple[Callable[[OpSchema], OpStrategy], int]] = {
    "block_diagonal_forward": (functools.partial(_block_diagonal, 0, 1), 8),
    "block_diagonal_backward": (functools.partial(_block_diagonal, 1, 3), 9),
    "block_diagonal_packed_backward": (functools.partial(_block_diagonal, 1, 1), 9),
    "moba_routing": (_moba_routing, 5),
    "moba_lists": (_moba_lists, 6),
    "moba_forward": (functools.partial(_moba_attention, 0, 2), 11),
    "moba_backward": (functools.partial(_moba_attention, 4, 3), 15),
    "key_convolution_forward": (functools.partial(_key_convolution, 0), 3),
    "key_convolution_backward": (functools.partial(_key_convolution, 1), 4),
}
"""By the name of an operator its strategy, and how many tensors stand first among its arguments."""
