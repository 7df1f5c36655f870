"""Cases of key convolution, an exact result computed by loops, and allowed errors.

`exact_convolution` is independent of the library: NumPy, float64, one sequence and one tap at a time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag import key_convolution
from tests.support import compiled_quickly, to_array, value_and_gradients

RESULTS = ("output", "key gradient", "weights gradient")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionCase:
    """One call of key convolution, described by shapes and options.

    With `layout` "batch", `lengths` are equal sequences of a batch. Otherwise they are sequences packed by offsets,
    followed by `padding` rows.
    """

    lengths: tuple[int, ...]
    layout: Literal["batch", "offsets"] = "batch"
    padding: int = 0
    key_heads: int = 2
    head_dim: int = 8
    size: int = 3
    dtype: str = "float32"
    weights_dtype: str | None = None
    activation: str | None = "silu"
    residual: bool = True

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding

    @property
    def tokens_shape(self) -> tuple[int, ...]:
        return (len(self.lengths), self.lengths[0]) if self.layout == "batch" else (self.tokens,)

    @property
    def options(self) -> dict[str, Any]:
        """Return all options of a call except the implementation."""
        options: dict[str, Any] = {"activation": self.activation, "residual": self.residual}
        if self.layout == "offsets":
            options["sequence_offsets"] = np.cumsum([0, *self.lengths], dtype=np.int32)
        return options

    def operands(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return random key, weights, and cotangent of the output."""
        generator = np.random.default_rng(seed)
        heads = (self.key_heads, self.head_dim)
        key, weights, cotangent = (
            generator.normal(size=shape).astype(np.float32)
            for shape in ((*self.tokens_shape, *heads), (self.size, *heads), (*self.tokens_shape, *heads))
        )
        weights_dtype = self.weights_dtype or self.dtype
        return to_array(key, self.dtype), to_array(weights, weights_dtype), to_array(cotangent, self.dtype)

    def convolve(self, implementation: Any = None) -> Callable[..., jax.Array]:
        """Return the operation as a function of key and weights."""
        return functools.partial(key_convolution, implementation=implementation, **self.options)

    def results(self, implementation: Any = None, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return the output and the gradients of key and weights."""
        run = functools.partial(value_and_gradients, self.convolve(implementation))
        return compiled_quickly(run)(*self.operands(seed))


def exact_convolution(case: ConvolutionCase, operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return the output and the gradients of key and weights in float64."""
    shape = np.shape(operands[0])
    heads = (case.key_heads, case.head_dim)
    key, weights, cotangent = (np.asarray(x).astype(np.float64) for x in operands)
    key, cotangent = (x.reshape(case.tokens, *heads) for x in (key, cotangent))
    output, d_key, d_weights = np.zeros_like(key), np.zeros_like(key), np.zeros_like(weights)
    start = 0
    for length in case.lengths:
        rows = slice(start, start + length)
        past = np.concatenate([np.zeros((case.size - 1, *heads)), key[rows]])
        # Row `tap` of the weights multiplies the key `size - 1 - tap` tokens back.
        total = sum((weights[tap] * past[tap : tap + length] for tap in range(case.size)), np.zeros((length, *heads)))
        sigmoid = 1 / (1 + np.exp(-total))
        is_silu = case.activation == "silu"
        output[rows] = (total * sigmoid if is_silu else total) + (key[rows] if case.residual else 0)
        slope = sigmoid * (1 + total * (1 - sigmoid)) if is_silu else np.ones_like(total)
        d_total = cotangent[rows] * slope
        d_past = np.zeros_like(past)
        for tap in range(case.size):
            d_past[tap : tap + length] += weights[tap] * d_total
            d_weights[tap] += (d_total * past[tap : tap + length]).sum(axis=0)
        d_key[rows] = d_past[case.size - 1 :] + (cotangent[rows] if case.residual else 0)
        start += length
    return output.reshape(shape), d_key.reshape(shape), d_weights


def assert_accurate(actual: Sequence[Any], exact: Sequence[np.ndarray], operands: Sequence[Any]) -> None:
    """Assert that each element errs by at most half a unit in the last place, plus the error of float32 sums."""
    dtypes = (operands[0].dtype, operands[0].dtype, operands[1].dtype)
    for name, result, true, dtype in zip(RESULTS, actual, exact, dtypes, strict=True):
        assert result.shape == true.shape and result.dtype == dtype, name
        wide = np.float64 if dtype == np.float64 else np.float32
        noise = 64 * float(jnp.finfo(wide).eps) * np.abs(true).max(initial=0)
        rounding = 0 if dtype == wide else 0.5 * float(jnp.finfo(dtype).eps) * np.abs(true)
        error = np.abs(np.asarray(result).astype(np.float64) - true)
        assert (error <= rounding + noise).all(), f"{name} errs by {error.max()}, of {np.abs(true).max()}"
