"""Registration of the operators' division over DTensors, when the first DTensor is seen.

Importing torch.distributed.tensor takes about as long as a third of torch itself, and whoever holds a DTensor has done
it already; so nothing here imports it before.
"""

import sys
from typing import Any


def prepare(*operands: Any) -> None:
    """Make a call possible whose operands may be DTensors."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and any(isinstance(x, distributed.DTensor) for x in operands):
        register()


def register_where_imported() -> None:
    """Register now if DTensors exist in this process already, for direct calls of `torch.ops`."""
    if "torch.distributed.tensor" in sys.modules:
        register()


def register() -> None:
    """Tell torch how each operator is called with DTensors."""
    # A statement that registers, because torch.compile runs imports as they are, and would trace a function.
    from blockdiag.torch.dtensor import division  # noqa: F401
