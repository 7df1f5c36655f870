"""Generate random bits of score shape from counters, so each tile can be computed where it is used.

`jax.random` generates the bits of an array as one sequence. If a region needs bits for each query and key, they become
a hash of the random key and the position. Every tile, kernel, implementation and pass then sees the same bits, and no
array of them is stored. They are as evenly distributed as those of `jax.random` and depend on the random key alone, but
they are different bits.

The method is a counter-based generator (Salmon et al., 2011). Each row has two words, which hash the random key and the
indices of all axes but that of attention keys. They come from the finaliser of MurmurHash3 (Appleby, 2011), applied to
one index after the other; XLA computes them, 8 bytes for each row. The same finaliser mixes them with the index of the
attention key. That is all that is left for each element: ten operations on 32-bit integers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import evaluate
from blockdiag.fusion.ir.tree import COLUMNS, Region

# 2^32 over the golden ratio: products of consecutive numbers with it are far apart.
_GOLDEN = 0x9E3779B9
# Multipliers of MurmurHash3's finaliser.
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35


def drawn_by(jaxpr: core.Jaxpr, regions: Iterable[Region]) -> dict[core.Var, int]:
    """Map each array of random bits that regions read as tiles of queries by keys to its axis of keys."""
    bits = {x for equation in jaxpr.eqns if equation.primitive.name == "random_bits" for x in equation.outvars}
    found: dict[core.Var, int] = {}
    for leaf in (leaf for region in regions for leaf in region.leaves):
        if leaf.role == "score" and leaf.source.key in bits:
            axes = [axis for axis, dim in enumerate(leaf.dims) if isinstance(dim, tuple) and COLUMNS in dim]
            found.setdefault(leaf.source.key, axes[0])
    return found


def with_counters(jaxpr: core.ClosedJaxpr, drawn: Mapping[core.Var, int]) -> core.ClosedJaxpr:
    """Return the flat program with these random bits computed by `counter_bits`, wherever they are used."""
    replaced = {}
    for equation in jaxpr.jaxpr.eqns:
        if equation.outvars[0] in drawn:
            replaced[equation.outvars[0]] = _counted(equation, drawn[equation.outvars[0]])
    return jax.make_jaxpr(lambda *given: evaluate(jaxpr.jaxpr, jaxpr.consts, given, replaced))(*jaxpr.in_avals)


def _counted(equation: core.JaxprEqn, key_axis: int) -> Any:
    shape, width = equation.params["shape"], equation.params["bit_width"]

    def compute(key: Any) -> list[Any]:
        words = equation.primitive.bind(key, bit_width=32, shape=(4 if width == 64 else 2,))
        return [counter_bits(words, shape, width, key_axis)]

    return compute


def counter_bits(words: Any, shape: Sequence[int], bit_width: int, key_axis: int) -> Any:
    """Return random bits that depend on the words of a random key and on the position.

    Args:
        words: uint32 [keys.., 2], or [keys.., 4] for 64 bits: independent random numbers that stand for random keys.
        shape: the shape of the bits of one random key, as `jax.random.bits` takes it.
        bit_width: 8, 16, 32 or 64; 64 needs `jax_enable_x64`.
        key_axis: the axis of `shape` along which an element costs least.

    Returns:
        uint8, uint16, uint32 or uint64 [keys.., *shape].
    """
    whole = (*words.shape[:-1], *shape)
    pairs = [lax.slice_in_dim(words, i, i + 2, axis=-1) for i in range(0, words.shape[-1], 2)]
    parts = [_hashed(pair, whole, key_axis) for pair in pairs]
    if bit_width == 64:
        high, low = (lax.convert_element_type(x, jnp.uint64) for x in parts)
        return lax.bitwise_or(lax.shift_left(high, lax.full_like(high, 32)), low)
    # The highest bits are the best mixed: every multiplication affects them.
    bits = parts[0] if bit_width == 32 else _right(parts[0], 32 - bit_width)
    return lax.convert_element_type(bits, np.dtype(f"uint{bit_width}"))


def _hashed(words: Any, whole: tuple[int, ...], key_axis: int) -> Any:
    """Return bits uint32 [*whole] from two words of each random key [keys.., 2]."""
    keys = words.ndim - 1
    first, second = (lax.index_in_dim(words, i, keys, keepdims=False) for i in (0, 1))
    first, second = (lax.expand_dims(x, range(keys, len(whole))) for x in (first, second))
    for axis in range(keys, len(whole)):
        if axis != key_axis and whole[axis] != 1:
            # Different indices stay different in each word, and almost surely in the pair of words.
            first, second = _absorbed(first, whole[axis], axis), _absorbed(second, whole[axis], axis)
    first, second = (lax.broadcast_in_dim(x, whole, range(len(whole))) for x in (first, second))
    bits = first + lax.broadcasted_iota(np.uint32, whole, key_axis) * np.uint32(_GOLDEN)
    bits = (bits ^ _right(bits, 16)) * np.uint32(_FIRST)
    # Up to here two rows may be shifted copies of each other; the second word separates them.
    bits = bits ^ second
    bits = (bits ^ _right(bits, 13)) * np.uint32(_SECOND)
    return bits ^ _right(bits, 16)


def _absorbed(word: Any, size: int, axis: int) -> Any:
    """Mix a word [.., 1, ..] with the index along one more axis, to [.., size, ..]."""
    shape = tuple(size if i == axis else x for i, x in enumerate(word.shape))
    word = lax.broadcast_in_dim(word, shape, range(len(shape)))
    bits = word + lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(_GOLDEN)
    bits = (bits ^ _right(bits, 16)) * np.uint32(_FIRST)
    bits = (bits ^ _right(bits, 13)) * np.uint32(_SECOND)
    return bits ^ _right(bits, 16)


def _right(bits: Any, count: int) -> Any:
    return lax.shift_right_logical(bits, lax.full_like(bits, count))
