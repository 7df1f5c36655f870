"""Bridges between launch plans and the frameworks that run them, and adapters for libraries around JAX.

Names are resolved on first use: importing this package imports neither triton nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiag.interop.dlpack import to_jax as to_jax
    from blockdiag.interop.dlpack import to_torch as to_torch
    from blockdiag.interop.jax_call import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
    from blockdiag.interop.kernel_call import ShardValue as ShardValue
    from blockdiag.interop.kernel_call import TensorDescriptor as TensorDescriptor
    from blockdiag.interop.kernel_call import triton_call as triton_call
    from blockdiag.interop.targets import compile_target as compile_target
    from blockdiag.interop.wrap import wrap_jax as wrap_jax
    from blockdiag.interop.wrap import wrap_torch as wrap_torch

_HOMES = {
    "EXPORT_DISABLED_CHECKS": "blockdiag.interop.jax_call",
    "ShardValue": "blockdiag.interop.kernel_call",
    "TensorDescriptor": "blockdiag.interop.kernel_call",
    "compile_target": "blockdiag.interop.targets",
    "to_jax": "blockdiag.interop.dlpack",
    "to_torch": "blockdiag.interop.dlpack",
    "triton_call": "blockdiag.interop.kernel_call",
    "wrap_jax": "blockdiag.interop.wrap",
    "wrap_torch": "blockdiag.interop.wrap",
}

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "ShardValue",
    "TensorDescriptor",
    "compile_target",
    "to_jax",
    "to_torch",
    "triton_call",
    "wrap_jax",
    "wrap_torch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
