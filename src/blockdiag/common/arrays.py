"""Array properties that argument checks need, for numpy, JAX and torch. Imports neither jax nor torch."""

import sys
from typing import Any

import numpy as np


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of numpy, JAX or torch, as problems store it."""
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else np.dtype(dtype).name


def is_traced(value: Any) -> bool:
    """Return whether `value` is a tracer or another stand-in for an array or number that is not known yet."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return True
    if torch is None:
        return False
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


def known_values(array: Any) -> np.ndarray | None:
    """Return the values of an array on the host, or None where they are not available.

    They are not available in a trace or transform, or if another process holds them. Torch tensors on a GPU also give
    None, because reading them would wait for the stream.
    """
    if is_traced(array):
        return None
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    if torch is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            return None
        try:
            return array.numpy(force=True)
        except RuntimeError:  # raised while a transform of torch.func hides the values
            return None
    return np.asarray(array)
