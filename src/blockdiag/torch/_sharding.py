"""Registration of the operators' division over DTensors, when the first DTensor is seen.

Importing torch.distributed.tensor takes about as long as a third of torch itself, and whoever holds a DTensor has done
it already; so nothing here imports it before.
"""

import functools
import sys
from typing import Any

import torch


def prepare(*operands: Any) -> None:
    """Make a call possible whose operands may be DTensors."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and any(isinstance(x, distributed.DTensor) for x in operands):
        register()


def register_where_imported() -> None:
    """Register now if DTensors exist in this process already, for direct calls of `torch.ops`."""
    if "torch.distributed.tensor" in sys.modules:
        register()


# torch.compile calls it while it traces, and does not look into it.
@torch.compiler.assume_constant_result
def register() -> None:
    """Tell torch how each operator is called with DTensors."""
    _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor

    from blockdiag.torch import _ops
    from blockdiag.torch._rules import RULES

    for name, rule_of in RULES.items():
        for suffix in ("", "_through_jax"):
            torch.library.register_torch_dispatch(
                f"blockdiag::{name}{suffix}", DTensor, functools.partial(_call, rule_of), lib=_ops._library
            )


def _call(rule_of: Any, _mode: Any, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    from blockdiag.torch import _division

    names = [argument.name for argument in operator._schema.arguments[len(args) :]]
    return _division.call(rule_of, operator, (*args, *((kwargs or {})[name] for name in names)))
