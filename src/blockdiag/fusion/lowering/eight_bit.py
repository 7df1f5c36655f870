"""Eight-bit arrays of a region: which GPUs multiply them, and the region with 16-bit arrays in their place.

| pass | GPU | products of eight-bit operands |
|---|---|---|
| forward | compute capability 8.9 and higher | eight-bit |
| forward | others | 16-bit: XLA widens the arrays before the kernel |
| backward | all | 16-bit: gradients of scores must not be rounded to the dtype of queries or keys |

Sixteen bits represent every eight-bit float exactly.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS, SIXTEEN_BIT_FLOATS
from blockdiag.fusion.ir.factors import has_keys
from blockdiag.fusion.ir.tree import Region, Source, with_leaves
from blockdiag.triton_kernels.launch.plan import Target

FIRST_ARCH = 89
"""Ten times the first compute capability whose tensor cores have eight-bit floating-point products."""


def is_eight_bit(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is an eight-bit float that kernels read."""
    return dtype.name in EIGHT_BIT_FLOATS


def has_eight_bits(region: Region) -> bool:
    """Return whether a region reads or writes an eight-bit array of floats."""
    return any(is_eight_bit(x.dtype) for x in (*region.sources, region))


def multiplies_eight_bits(target: Target) -> bool:
    """Return whether a GPU has eight-bit products."""
    return target.arch >= FIRST_ARCH


def weight_unit(region: Region) -> float:
    """Return the power of two by which weights are multiplied before they are rounded to the dtype of values.

    It is 1 unless values have eight bits. A softmax's weights relative to the largest one are at most 1. With the
    factor, these fill the range of the dtype, and small ones are not rounded to 0. Other weights have no bound.
    """
    found = EIGHT_BIT_FLOATS.get(region.value.dtype.name)
    if found is None or region.score is None or (region.weight is not None and has_keys(region.weight)):
        return 1.0
    return 2.0 ** math.floor(math.log2(found.largest))


def widened(region: Region) -> Region:
    """Return a region whose arrays of eight bits have 16, and whose eight-bit result is float32."""
    return region.once(_widened) if has_eight_bits(region) else region


def widened_arrays(region: Region, arrays: Sequence[Any]) -> list[Any]:
    """Return the leaves and values of a region, in order, as `widened` reads them."""
    pairs = zip(arrays, widened(region).sources, strict=True)
    return [x if x.dtype == source.dtype else x.astype(source.dtype) for x, source in pairs]


def _widened(region: Region) -> Region:
    # Kernels of Hopper need one dtype for all operands.
    wide = np.dtype(region.value.dtype if region.value.dtype.name in SIXTEEN_BIT_FLOATS else jnp.bfloat16)

    def source_of(source: Source) -> Source:
        if not is_eight_bit(source.dtype):
            return source
        constant = None if source.constant is None else source.constant.astype(wide)
        return dataclasses.replace(source, key=("widened", source.key), dtype=wide, constant=constant)

    replaced = {leaf: dataclasses.replace(leaf, source=source_of(leaf.source)) for leaf in region.leaves}
    dtype = np.dtype(np.float32) if is_eight_bit(region.dtype) else region.dtype
    return with_leaves(region, replaced, value=source_of(region.value), dtype=dtype)
