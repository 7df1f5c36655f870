"""How the operators run on DTensors: batch rows and heads stay on the devices that hold them.

Importing torch.distributed.tensor takes about as long as a third of torch itself, and whoever holds a DTensor has done
it already; so strategies are registered when the first DTensor is seen, and nothing here imports it before.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from blockdiag.torch._call import Arguments

if TYPE_CHECKING:
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

_TENSORS = 8
"""The operators' first arguments are tensors: query, key, value, offsets, lengths, cos, sin and positions."""

_NUM_OUTPUTS = {"forward": 1, "backward": 3, "packed_backward": 1}


def prepare_sharded(query: Any, tables: tuple[torch.Tensor | None, ...]) -> Any:
    """Make a call on DTensors possible; anything else is left alone.

    Args:
        query: a tensor of any kind.
        tables: the call's other tensors that are not sharded with the heads: offsets, lengths, cos, sin, positions.

    Returns:
        `tables`; where `query` is a DTensor those that are plain tensors as replicated DTensors of its mesh, since
        every process passes the same ones.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(query, distributed.DTensor):
        return tables
    register()
    mesh: Any = query.device_mesh
    placements = [distributed.Replicate()] * mesh.ndim
    return tuple(
        table
        if table is None or isinstance(table, distributed.DTensor)
        else distributed.DTensor.from_local(table, mesh, placements, run_check=False)
        for table in tables
    )


def register_where_imported() -> None:
    """Register the strategies now if DTensors exist in this process already, for direct calls of `torch.ops`."""
    if "torch.distributed.tensor" in sys.modules:
        register()


@functools.cache
def register() -> None:
    """Tell DTensor how each operator may be sharded."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for method, num_outputs in _NUM_OUTPUTS.items():
        first = 0 if method == "forward" else 1
        for suffix in ("", "_through_jax"):
            operator = getattr(torch.ops.blockdiag, f"block_diagonal_{method}{suffix}").default
            strategy = functools.partial(_strategy, first, num_outputs)
            propagator.register_op_strategy(operator, strategy, RuntimeSchemaInfo(static_argnum=first + _TENSORS))


def _strategy(first: int, num_outputs: int, schema: "OpSchema") -> "OpStrategy":
    """The one strategy for operands sharded as they are; `first` is the position of query among the arguments.

    One, not every possible one for torch to choose from: torch would combine strategies of single mesh axes freely,
    and heads over two axes need more than that they divide over each.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

    strategies: Any = schema.args_schema
    arguments = Arguments(*strategies[first:])
    specs: list[Any] = [None if one is None else _spec(one) for one in strategies[: first + _TENSORS]]
    # The cotangent follows the operands, which were sharded as the model is.
    operands = [spec for spec in (*specs[first : first + 3], *specs[:first]) if spec is not None]
    query = operands[0]
    is_batched = len(query.shape) == 4
    shards = _shards(operands, None if arguments.key is None else specs[first + 1].shape[-2])

    def placed(batch_rank: int | None, is_operand: bool) -> Any:
        """Placements of a tensor with a batch axis where its rank is `batch_rank`."""
        placements: list[Any] = []
        for shard in shards:
            if shard == "heads" and is_operand:
                placements.append(Shard(len(query.shape) - 2))
            elif shard == "batch" and batch_rank is not None:
                placements.append(Shard(0))
            else:
                placements.append(Replicate())
        return tuple(placements)

    operand_placements = placed(0 if is_batched else None, is_operand=True)
    batched_ranks = {first + 5: 3, first + 6: 3, first + 7: 2} if is_batched else {}
    inputs = []
    for position, spec in enumerate(specs):
        if spec is None:
            continue
        if position < first + 3:
            placements = operand_placements
        else:
            # Tables per token and positions may have a batch axis; those without serve every batch row.
            has_batch = len(spec.shape) == batched_ranks.get(position)
            placements = placed(0 if has_batch else None, is_operand=False)
        inputs.append(DTensorSpec(query.mesh, placements, tensor_meta=spec.tensor_meta))
    output = DTensorSpec(query.mesh, operand_placements)
    outputs = output if num_outputs == 1 else (output,) * num_outputs
    costs = [[0.0] for _ in inputs]
    return OpStrategy([OpSpec(outputs, tuple(inputs), costs)])


def _spec(strategy: Any) -> Any:
    """How one tensor argument is sharded."""
    return strategy.strategies[0].output_spec


def _shards(operands: list[Any], key_heads: int | None) -> list[str]:
    """For each mesh axis "batch", "heads" or "none": the first operand that is sharded in a way that can stay decides.

    Heads can stay where key heads divide over all mesh axes that shard heads together: each query head then lies with
    its own key head. In a packed array (`key_heads` is None) they cannot, since queries, keys and values follow each
    other in it.
    """
    from torch.distributed.tensor import Shard

    rank = len(operands[0].shape)
    mesh = operands[0].mesh
    shards, parts = [], 1
    for axis in range(mesh.ndim):
        kind = "none"
        for operand in operands:
            placement = operand.placements[axis]
            size = mesh.size(axis)
            if rank == 4 and placement == Shard(0):
                kind = "batch"
            elif placement == Shard(rank - 2) and key_heads is not None and key_heads % (parts * size) == 0:
                kind, parts = "heads", parts * size
            if kind != "none":
                break
        shards.append(kind)
    return shards
