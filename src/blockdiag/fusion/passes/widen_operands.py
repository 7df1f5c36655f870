"""Widen eight-bit operands of products whose other operand has another dtype.

Kernels multiply two arrays of one dtype. Sixteen bits represent every eight-bit float exactly, so widening one operand
keeps the result, while rounding the other one to eight bits would not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS
from blockdiag.fusion.frontend.trace import aval_of, bind, rewritten


def with_wide_operands(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with both operands of such products in one dtype, or None if there are none."""
    replaced = {
        id(equation): functools.partial(_widened, equation, dtype)
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "dot_general" and (dtype := _common(equation)) is not None
    }
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def _common(product: core.JaxprEqn) -> np.dtype[Any] | None:
    """Return the dtype to which the operands of a product are widened, or None if the product stays."""
    dtypes = {np.dtype(aval_of(x).dtype) for x in product.invars}
    wide = [x for x in dtypes if x.name not in EIGHT_BIT_FLOATS]
    if len(dtypes) == 1 or len(wide) == 2 or not all(jnp.issubdtype(x, jnp.floating) for x in wide):
        return None
    return wide[0] if wide else np.dtype(jnp.bfloat16)


def _widened(product: core.JaxprEqn, dtype: np.dtype[Any], value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
    (result,) = product.outvars
    given = [lax.convert_element_type(value_of(x), dtype) for x in product.invars]
    params = product.params | {"preferred_element_type": aval_of(result).dtype}
    return dict(zip(product.outvars, bind(product.replace(params=params), given), strict=True))
