"""Tests that every gallery variant runs and that its fused function is as accurate as the function itself."""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.fusion.gallery import VARIANTS, Sizes, Variant
from blockdiag.fusion.gallery import masks as gallery_masks
from blockdiag.fusion.gallery import scores as gallery_scores
from tests import numpy_oracle
from tests.support import compiled_quickly, largest_error

IMPLEMENTATIONS = (
    "xla",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    ),
)
MOST_LINES = 15

# Several tiles of tokens, but few programs, since the interpreter's time grows with the number of heads.
SIZES = Sizes(rows=2, query_heads=2, key_heads=1)
GROUPED_SIZES = Sizes(rows=2)
# In `latent_slice` queries are a grid axis, and heads are the rows of tiles.
FEW_QUERIES = dataclasses.replace(SIZES, query_tokens=10)
# No size is a multiple of a tile, and variants with separate keys have more keys than queries. Every kind of variant,
# listed here or not, also has a variant with the usual sizes.
ODD_SIZES = Sizes(rows=2, query_tokens=37, key_tokens=53, head_dim=24, value_dim=20)
ODD_VARIANTS = (
    "vanilla",
    "causal_tril",
    "sliding_window",
    "causal_document",
    "two_biases",
    "sinks_concatenated",
    "grouped_query",
    "evoformer_row",
    "differential",
    "invariant_points",
    "sigmoid",
    "wide_values",
)
SIZES_OF = {
    **dict.fromkeys(ODD_VARIANTS, ODD_SIZES),
    **dict.fromkeys(("library_causal_grouped", "grouped_query_repeated", "one_query_grouped"), GROUPED_SIZES),
    "latent_slice": FEW_QUERIES,
    # This variant has by far the most operations, so it has as few heads as the usual sizes.
    "invariant_points": dataclasses.replace(ODD_SIZES, query_heads=2, key_heads=1),
}
BFLOAT16_VARIANTS = ("vanilla", "wide_scores", "library", "alibi_learned", "grouped_query", "evoformer_row")


def library_causal_grouped(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute the variant of this name without `jax.nn.dot_product_attention`."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    bias = jnp.where(jnp.tri(query.shape[1], key.shape[1], dtype=bool), 0.0, -jnp.inf)[None, None]
    return gallery_scores.dense_bias(query, key, value, bias.astype(query.dtype))


def library_window_lengths(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """Compute the variant of this name without `jax.nn.dot_product_attention`."""
    queries, keys = jnp.arange(query.shape[1])[None, :, None], jnp.arange(key.shape[1])[None, None, :]
    mask = (keys < lengths[:, None, None]) & (keys <= queries + 5)
    bias = jnp.where(mask, 0.0, -jnp.inf)[:, None]
    return gallery_scores.dense_bias(query, key, value, bias.astype(query.dtype))


# These variants compute softmaxes of float64 arrays in float32; their replacements here do not narrow.
EXACT_FUNCTIONS = {
    "wide_scores": gallery_masks.vanilla,
    "library": gallery_masks.vanilla,
    "library_causal_grouped": library_causal_grouped,
    "library_window_lengths": library_window_lengths,
}

Results = dict[str, Any]


def promotion(name: str) -> contextlib.AbstractContextManager[None]:
    """Keep implicit promotion an error, except for variants of JAX's own function, which need it."""
    return jax.numpy_dtype_promotion("standard" if name.startswith("library") else "strict")


def value_and_gradients(variant: Variant, function: Callable[..., Any]) -> Callable[..., Results]:
    """Return a function of inputs and a cotangent that computes outputs and gradients by name."""

    def compute(inputs: dict[str, jax.Array], cotangent: Any) -> Results:
        constant = {name: x for name, x in inputs.items() if name not in variant.differentiable}
        floating = {name: inputs[name] for name in variant.differentiable}
        outputs, pull_back = jax.vjp(lambda floating: function(**floating, **constant), floating)
        (gradients,) = pull_back(cotangent)
        named = {f"output {i}": x for i, x in enumerate(jax.tree.leaves(outputs))}
        return named | {f"gradient of {name}": x for name, x in gradients.items()}

    return compute


@functools.cache
def operands(name: str, sizes: Sizes, seed: int = 0) -> tuple[dict[str, jax.Array], Any]:
    """Return inputs of a variant and a cotangent of its outputs."""
    variant = VARIANTS[name]
    inputs = variant.make_inputs(jax.random.key(seed), sizes)
    generator = np.random.default_rng(seed)
    outputs = jax.eval_shape(lambda: variant.function(**inputs))
    cotangent = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), outputs)
    return inputs, cotangent


@functools.cache
def compiled_variant(name: str) -> Callable[..., Results]:
    """Return the compiled function itself, with gradients."""
    return compiled_quickly(value_and_gradients(VARIANTS[name], VARIANTS[name].function))


@functools.cache
def exact_and_allowed(name: str, sizes: Sizes) -> dict[str, tuple[np.ndarray, float]]:
    """Return each result in float64, computed by NumPy, and its allowed error.

    The allowed error is twice the error of the function itself, plus two units in the last place. A small result may
    happen to be exact, so the error is the largest of six draws of inputs.
    """
    variant = VARIANTS[name]
    draws = [operands(name, sizes, seed) for seed in range(6)]
    rough = [jax.tree.map(np.asarray, compiled_variant(name)(*draw)) for draw in draws]
    wide_draws = jax.tree.map(_widened, draws)
    with jax.enable_x64(True):
        exact_function = value_and_gradients(variant, EXACT_FUNCTIONS.get(name, variant.function))
        compute = numpy_oracle.traced(exact_function, *wide_draws[0])
        exact = [compute(*draw) for draw in wide_draws]
    allowed = {}
    for result, true in exact[0].items():
        assert true.dtype == np.float64, result
        error = max(largest_error(rough[i][result], exact[i][result]) for i in range(len(draws)))
        unit = float(jnp.finfo(rough[0][result].dtype).eps) * np.abs(true).max(initial=0.0)
        # A result that is 0 by cancellation may differ from 0 by the rounding of numbers near 1.
        unit += 16 * float(jnp.finfo(jnp.float32).eps)
        allowed[result] = (true, 2 * error + 2 * unit)
    return allowed


def _widened(x: jax.Array) -> np.ndarray:
    array = np.asarray(x)
    if array.dtype == bool:
        return array
    return array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float64)


def check(name: str, sizes: Sizes, implementation: str) -> None:
    """Compare outputs and gradients of the plain or fused function with those of the function in float64."""
    with promotion(name):
        _check(name, sizes, implementation)


def _check(name: str, sizes: Sizes, implementation: str) -> None:
    plain = compiled_variant(name)(*operands(name, sizes))
    results = plain
    if implementation != "itself":
        from blockdiag import fuse

        variant = VARIANTS[name]
        fused = fuse(variant.function, implementation=implementation)
        results = compiled_quickly(value_and_gradients(variant, fused))(*operands(name, sizes))
    for result, (true, allowed) in exact_and_allowed(name, sizes).items():
        array = np.asarray(results[result])
        assert array.shape == true.shape, result
        assert array.dtype == plain[result].dtype, result
        error = largest_error(array, true)
        assert error <= allowed, f"{result} of {name} errs by {error}, allowed {allowed}"
        assert np.any(array != 0), result


@pytest.mark.parametrize("implementation", ("itself", *IMPLEMENTATIONS))
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_accurate_with_gradients(name: str, implementation: str) -> None:
    sizes = SIZES_OF.get(name, SIZES)
    check(name, sizes, implementation)
    for result, (true, allowed) in exact_and_allowed(name, sizes).items():
        # A larger error means that the function is meaningless in float32, or that it narrows a float64 array.
        assert allowed < 1e-4 * max(1.0, np.abs(true).max()), result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", BFLOAT16_VARIANTS)
def test_variant_in_bfloat16_is_accurate(name: str, implementation: str) -> None:
    usual = GROUPED_SIZES if name == "grouped_query" else SIZES
    check(name, dataclasses.replace(usual, dtype="bfloat16"), implementation)


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", ODD_SIZES), ("float64", SIZES)], ids=["bfloat16", "float64"])
def test_variants_keep_dtypes(dtype: str, sizes: Sizes) -> None:
    with jax.enable_x64(dtype == "float64"):
        for name, variant in VARIANTS.items():
            inputs = variant.make_inputs(jax.random.key(0), dataclasses.replace(sizes, dtype=dtype))
            floating = {n: x for n, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
            assert floating.keys() == set(variant.differentiable), name
            assert all(x.dtype == dtype for x in floating.values()), name
            with promotion(name):
                outputs = jax.eval_shape(lambda call=variant.function, inputs=inputs: call(**inputs))
            assert all(output.dtype == dtype for output in jax.tree.leaves(outputs)), name


def test_variants_are_short_and_described() -> None:
    for name, variant in VARIANTS.items():
        assert variant.name == name
        assert variant.note.endswith(".") and "\n" not in variant.note, name
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(variant.function))).body
        assert isinstance(definition, ast.FunctionDef) and ast.get_docstring(definition), name
        first, *_, last = definition.body
        assert last.end_lineno - first.end_lineno <= MOST_LINES, name
