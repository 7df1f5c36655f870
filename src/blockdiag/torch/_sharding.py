"""Calls of the operators on DTensors: batch rows and heads stay on the devices that hold them.

Importing torch.distributed.tensor takes about as long as a third of torch itself, and whoever holds a DTensor has done
it already; so strategies are registered when the first DTensor is seen, and nothing here imports it before.
"""

import functools
import sys
from typing import Any

import torch

from blockdiag.interop.private_torch import register_strategy
from blockdiag.torch._sharding_strategies import STRATEGIES


def prepare_sharded(operand: Any, tables: tuple[torch.Tensor | None, ...]) -> Any:
    """Make a call on DTensors possible; anything else is left alone.

    Args:
        operand: the first operand, a tensor of any kind.
        tables: the call's other tensors that every process has in full: offsets, lengths, masks, rotary tables, a
            given routing.

    Returns:
        `tables`; where `operand` is a DTensor those that are plain tensors as replicated DTensors of its mesh.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(operand, distributed.DTensor):
        return tables
    register()
    mesh: Any = operand.device_mesh
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
    for name, (strategy, tensors) in STRATEGIES.items():
        for suffix in ("", "_through_jax"):
            operator = getattr(torch.ops.blockdiag, name + suffix).default
            register_strategy(operator, strategy, tensors)
