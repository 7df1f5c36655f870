"""Symbolic sizes, which arrays have while `jax.export` traces a function for any size.

Imports only the standard library, so that descriptions of calls may use it without JAX.
"""

import dataclasses
import sys
from typing import Any


def is_symbolic(size: Any) -> bool:
    """Return whether a size is a symbolic expression of `jax.export`, whose comparisons may be inconclusive.

    Example:
        >>> import jax
        >>> from blockdiag.common.sizes import is_symbolic
        >>> is_symbolic(3), is_symbolic(3 * jax.export.symbolic_shape("b")[0])
        (False, True)
    """
    export = sys.modules.get("jax.export")
    return export is not None and export.is_symbolic_dim(size)


def smaller_bound(size: Any, bound: Any) -> Any:
    """Return the smaller of two upper bounds, or `bound` where one is symbolic and they cannot be compared."""
    return bound if is_symbolic(size) or is_symbolic(bound) else min(size, bound)


def symbolic_field(description: Any) -> str | None:
    """Return the first field with a symbolic size, as "name=value", or None. Nested descriptions are searched too."""
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if is_symbolic(value):
            return f"{field.name}={value}"
        if dataclasses.is_dataclass(value) and (found := symbolic_field(value)):
            return found
    return None
