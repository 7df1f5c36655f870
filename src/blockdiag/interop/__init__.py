"""Doors between launch plans and the frameworks that run them, and adapters for libraries around JAX.

Names are resolved on first use: importing this package imports neither triton nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiag.interop.jax_call import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
    from blockdiag.interop.kernel_call import TensorDescriptor as TensorDescriptor
    from blockdiag.interop.kernel_call import triton_call as triton_call
    from blockdiag.interop.targets import compile_target as compile_target

_HOMES = {
    "EXPORT_DISABLED_CHECKS": "blockdiag.interop.jax_call",
    "TensorDescriptor": "blockdiag.interop.kernel_call",
    "compile_target": "blockdiag.interop.targets",
    "triton_call": "blockdiag.interop.kernel_call",
}

__all__ = ["EXPORT_DISABLED_CHECKS", "TensorDescriptor", "compile_target", "triton_call"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
