"""Dtypes of intermediate results."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype for sums and softmaxes over a floating dtype: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
