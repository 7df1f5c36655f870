"""The calls of `python -m blockdiag doctor`: one small call of each op, for both JAX and torch.

To add an op, add a case to `CASES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.operation import Implementation
from blockdiag.fusion.ir.tree import FUSE
from blockdiag.ops.append.problem import APPEND
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION
from blockdiag.ops.moba.problem import MOBA
from blockdiag.ops.moba_paged.problem import MOBA_PAGED
from blockdiag.ops.paged.problem import PAGED

type Arrays = dict[str, np.ndarray]
type Function = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call."""

    dtype: str
    tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    block_size: int

    @property
    def query(self) -> tuple[int, ...]:
        return (1, self.tokens, self.query_heads, self.head_dim)

    @property
    def key(self) -> tuple[int, ...]:
        return (1, self.tokens, self.key_heads, self.head_dim)

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.block_size)


# On a GPU, the checks run the 16-bit kernels that programs use. On a CPU, interpreters are slow and need few tokens,
# and float32 reveals more errors.
ON_GPU = Sizes("bfloat16", tokens=256, query_heads=4, key_heads=2, head_dim=64, block_size=64)
ON_CPU = Sizes("float32", tokens=40, query_heads=2, key_heads=1, head_dim=16, block_size=16)
# The smallest call that the Pallas kernels accept.
PALLAS_ON_CPU = Sizes("bfloat16", tokens=64, query_heads=1, key_heads=1, head_dim=64, block_size=64)

PAGE_SIZE = 16


@dataclass(frozen=True, eq=False)
class Case:
    """A small call of one op.

    Attributes:
        op: name of the public function, in `blockdiag` and in `blockdiag.torch`.
        implementations: the op's table of implementations; empty if JAX computes the op in one way only.
        operands: makes the arrays of a call, by parameter name. Floating ones are rounded to the dtype of the sizes.
        options: returns the arguments that are not arrays.
        differentiable: names of the operands whose gradients are compared as well.
        kept: names of floating operands that stay float32 for every dtype.
        bind: returns the function of the operands, given the public function and its options.
        reference: JAX function of the operands to compare with; None means the op's implementation "reference".
    """

    op: str
    implementations: Mapping[str, Implementation]
    operands: Callable[[Sizes, np.random.Generator], Arrays]
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    differentiable: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    bind: Callable[[Function, dict[str, Any]], Function] = lambda public, arguments: partial(public, **arguments)
    reference: Function | None = None

    def arrays(self, sizes: Sizes) -> Arrays:
        """Return the operands as NumPy arrays of their final dtypes; every call returns the same ones."""
        arrays = self.operands(sizes, np.random.default_rng(0))
        return {
            name: array.astype(jnp.dtype(sizes.dtype))
            if np.issubdtype(array.dtype, np.floating) and name not in self.kept
            else array
            for name, array in arrays.items()
        }

    def function(self, package: ModuleType, sizes: Sizes, implementation: str | None) -> Function:
        """Return the op of a package as a function of the operands."""
        arguments = self.options(sizes)
        if implementation is not None:
            arguments["implementation"] = implementation
        return self.bind(getattr(package, self.op), arguments)


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)


def _attention_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    shapes = {"query": sizes.query, "key": sizes.key, "value": sizes.key}
    return {name: _normal(generator, *shape) for name, shape in shapes.items()}


def _routing_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"query": _normal(generator, *sizes.query), "key": _normal(generator, *sizes.key)}


def _projection_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    heads = sizes.query_heads + 2 * sizes.key_heads
    weights = _normal(generator, sizes.head_dim, heads * sizes.head_dim) * sizes.head_dim**-0.5
    return {"x": _normal(generator, 1, sizes.tokens, sizes.head_dim), "w_qkv": weights}


def _convolution_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"key": _normal(generator, *sizes.key), "weights": _normal(generator, 3, *sizes.key[2:])}


def _cache(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    """Return a cache of two sequences, one of which fills its pages, in a pool with one unused page."""
    max_pages = -(-sizes.tokens // PAGE_SIZE)
    pages = (2 * max_pages + 1, PAGE_SIZE, sizes.key_heads, sizes.head_dim)
    return {
        "key_pages": _normal(generator, *pages),
        "value_pages": _normal(generator, *pages),
        "page_table": generator.permutation(pages[0])[:-1].reshape(2, max_pages).astype(np.int32),
        "kv_lengths": np.array([max_pages * PAGE_SIZE, sizes.block_size + 3], np.int32),
    }


def _paged_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"query": _normal(generator, 2, 1, sizes.query_heads, sizes.head_dim), **_cache(sizes, generator)}


def _centroids(sizes: Sizes, generator: np.random.Generator) -> np.ndarray:
    return _normal(generator, 2, sizes.num_blocks, sizes.key_heads, sizes.head_dim)


def _moba_paged_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {**_paged_operands(sizes, generator), "key_centroids": _centroids(sizes, generator)}


def _append_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    new_tokens = (2, 2, sizes.key_heads, sizes.head_dim)
    return {
        "key": _normal(generator, *new_tokens),
        "value": _normal(generator, *new_tokens),
        **_cache(sizes, generator),
        "key_centroids": _centroids(sizes, generator),
    }


def _merge_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"outputs": _normal(generator, 3, *sizes.query), "lses": _normal(generator, 3, *sizes.query[:-1])}


def _merge(outputs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `merge_attention_states` by its definition."""
    weights = jax.nn.softmax(lses, axis=0)
    return (weights[..., None] * outputs).sum(axis=0), jax.nn.logsumexp(lses, axis=0)


def _banded_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention to keys at a distance below 24, with grouped heads; the function given to `fuse`."""
    *_, tokens, heads, head_dim = query.shape
    grouped = query.reshape(*query.shape[:-2], key.shape[-2], heads // key.shape[-2], head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * head_dim**-0.5
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    weights = jax.nn.softmax(jnp.where((distance >= 0) & (distance < 24), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def _exact_banded_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    # By default, GPUs round the operands of float32 products.
    with jax.default_matmul_precision("highest"):
        return _banded_attention(query, key, value)


def _block_options(sizes: Sizes) -> dict[str, Any]:
    return {"block_size": sizes.block_size, "is_causal": True}


def _projection_options(sizes: Sizes) -> dict[str, Any]:
    heads = {"query_heads": sizes.query_heads, "key_heads": sizes.key_heads, "head_dim": sizes.head_dim}
    return {**heads, **_block_options(sizes)}


def _moba_options(sizes: Sizes) -> dict[str, Any]:
    return {"block_size": sizes.block_size, "top_k": 2}


def _indices_of(public: Function, arguments: dict[str, Any]) -> Function:
    return lambda **operands: public(**operands, **arguments).indices


CASES = (
    Case(
        "block_diagonal_attention",
        BLOCK_DIAGONAL.implementations,
        _attention_operands,
        _block_options,
        differentiable=("query", "key", "value"),
    ),
    Case(
        "fused_qkv_block_attention",
        BLOCK_DIAGONAL.implementations,
        _projection_operands,
        _projection_options,
        differentiable=("x", "w_qkv"),
    ),
    Case(
        "moba_attention",
        MOBA.implementations,
        _attention_operands,
        _moba_options,
        differentiable=("query", "key", "value"),
    ),
    Case("moba_routing", MOBA.implementations, _routing_operands, _moba_options, bind=_indices_of),
    Case(
        "key_convolution",
        KEY_CONVOLUTION.implementations,
        _convolution_operands,
        differentiable=("key", "weights"),
    ),
    Case("paged_attention", PAGED.implementations, _paged_operands),
    Case(
        "moba_paged_attention",
        MOBA_PAGED.implementations,
        _moba_paged_operands,
        _moba_options,
        kept=("key_centroids",),
    ),
    Case(
        "append_to_pages",
        APPEND.implementations,
        _append_operands,
        lambda sizes: {"block_size": sizes.block_size},
        kept=("key_centroids",),
    ),
    Case(
        "merge_attention_states",
        {},
        _merge_operands,
        differentiable=("outputs", "lses"),
        kept=("lses",),
        reference=_merge,
    ),
    Case(
        "fuse",
        FUSE.implementations,
        _attention_operands,
        differentiable=("query", "key", "value"),
        bind=lambda fuse, arguments: fuse(_banded_attention, **arguments),
        reference=_exact_banded_attention,
    ),
)
