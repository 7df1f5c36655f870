"""Keys of random numbers between the parts of a program: torch has no such dtype, so that tensors are their data."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Whether an array, or what describes one, is of keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def data_of(x: Any) -> Any:
    """An array that torch can have: of keys their data."""
    return jax.random.key_data(x) if is_key(x) else x


def data_type(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `data_of` gives."""
    return jax.eval_shape(data_of, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def from_data(x: Any, aval: Any) -> Any:
    """What `data_of` was given."""
    return jax.random.wrap_key_data(x, impl=_kind(aval.dtype)) if is_key(aval) else x


@functools.cache
def _kind(dtype: Any) -> Any:
    """What makes numbers of keys of a dtype."""
    found = []
    # Only arrays are asked for it.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
