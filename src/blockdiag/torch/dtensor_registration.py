"""Registration of the operators' DTensor rules, deferred until the first DTensor is seen.

Importing torch.distributed.tensor takes about a third of the time of importing torch. Code that holds a DTensor has
imported it already, so nothing here imports it earlier.
"""

import sys
from typing import Any


def prepare(*operands: Any) -> None:
    """Register the operators for DTensors if one of the operands is a DTensor."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and any(isinstance(x, distributed.DTensor) for x in operands):
        register()


def register_where_imported() -> None:
    """Register now if DTensors exist in this process already, for direct calls of `torch.ops`."""
    if "torch.distributed.tensor" in sys.modules:
        register()


def register() -> None:
    """Register how each operator is called with DTensors."""
    # Registration is an import, because torch.compile runs imports as they are but would trace a function.
    from blockdiag.torch.dtensor import division  # noqa: F401
