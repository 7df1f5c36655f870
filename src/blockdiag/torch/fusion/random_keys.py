"""Random keys between the parts of a program: torch has no key dtype, so tensors hold the keys' data."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Return whether an array, or its description, has a key dtype."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def data_of(x: Any) -> Any:
    """Return an array that torch can represent: the data of keys, and other arrays unchanged."""
    return jax.random.key_data(x) if is_key(x) else x


def data_type(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of `data_of` for an array of this type."""
    return jax.eval_shape(data_of, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def from_data(x: Any, aval: Any) -> Any:
    """Invert `data_of`."""
    return jax.random.wrap_key_data(x, impl=_kind(aval.dtype)) if is_key(aval) else x


@functools.cache
def _kind(dtype: Any) -> Any:
    """Return the random number implementation of a key dtype."""
    found = []
    # Only arrays have an implementation, so one is traced.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
