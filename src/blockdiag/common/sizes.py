"""Sizes that are expressions, as arrays have them while `jax.export` traces a function for any size.

Imports nothing but the standard library, so that descriptions of calls may use it without JAX.
"""

import dataclasses
import sys
from typing import Any


def is_symbolic(size: Any) -> bool:
    """Return whether a size is an expression of `jax.export`; comparisons of those may be inconclusive.

    Example:
        >>> import jax
        >>> from blockdiag.common.sizes import is_symbolic
        >>> is_symbolic(3), is_symbolic(3 * jax.export.symbolic_shape("b")[0])
        (False, True)
    """
    export = sys.modules.get("jax.export")
    return export is not None and export.is_symbolic_dim(size)


def smaller_bound(size: Any, bound: Any) -> Any:
    """The smaller one of two upper bounds; the second one where they cannot be compared."""
    return bound if is_symbolic(size) or is_symbolic(bound) else min(size, bound)


def symbolic_field(description: Any) -> str | None:
    """The first field of a description, or of one within it, that holds a symbolic size, as "name=value"; or None."""
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if is_symbolic(value):
            return f"{field.name}={value}"
        if dataclasses.is_dataclass(value) and (found := symbolic_field(value)):
            return found
    return None
