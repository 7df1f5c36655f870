"""Shared comparisons for tests of `fuse`."""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.program import trace
from tests import numpy_oracle


def alternated(cases: Iterable[Any], implementations: Sequence[str] = ("xla", "triton")) -> list[Any]:
    """Return test parameters for cases, each a value or a tuple, and implementations.

    The analysis and the rewrites before computation do not depend on the implementation. So the implementations
    take turns: one of them computes each case, and the other pairs are marked `exhaustive`. The gallery's tests
    compute every variant with both.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            implementation,
            marks=[pytest.mark.exhaustive] if (i + j) % len(implementations) else [],
        )
        for i, case in enumerate(cases)
        for j, implementation in enumerate(implementations)
    ]


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Return random arrays."""
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def with_gradients(function: Callable[..., jax.Array], given: Sequence[Any]) -> list[Any]:
    """Return the result of a function, and the gradient of each argument with a random cotangent."""
    output, pull = jax.vjp(function, *given)
    return [output, *pull(jnp.asarray(np.random.default_rng(1).normal(size=output.shape), output.dtype))]


def compiled_gradients(function: Callable[..., jax.Array], given: Sequence[Any]) -> list[Any]:
    """Return `with_gradients` as one program; eager calls compile one for each operation and shape."""
    return jax.jit(functools.partial(with_gradients, function))(list(given))


def assert_alike(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 2e-5) -> None:
    """Assert that arrays agree up to `tolerance`, relative to each element or to the largest one."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * float(np.abs(other).max()))


def assert_fused(
    function: Callable[..., jax.Array],
    given: Sequence[jax.Array],
    implementation: str | None = None,
    tolerance: float = 2e-5,
) -> None:
    """Assert that results and gradients of the fused function are those of the function, in float32."""
    found = compiled_gradients(fuse(function, implementation=implementation), given)
    assert_alike(found, expected_results(function, given), tolerance)


def expected_results(function: Callable[..., jax.Array], given: Sequence[Any]) -> list[Any]:
    """Return `with_gradients` of a plain function, computed by NumPy where that is as precise, to avoid compilation."""
    compute = functools.partial(with_gradients, function)
    if re.search(r"\bb?f(16|8)", str(jax.make_jaxpr(compute)(given))):
        return compute(given)
    return numpy_oracle.traced(compute, given)(given)


def work_of_passes(function: Callable[..., jax.Array], given: Sequence[Any]) -> int:
    """Count the Python calls of the passes that look for attention in a function."""
    count = 0

    def count_call(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "/blockdiag/fusion/" in frame.f_code.co_filename

    sys.setprofile(count_call)
    try:
        trace(function, tuple(given), {})
    finally:
        sys.setprofile(None)
    return count


def assert_as_good_as_written(
    function: Callable[..., jax.Array], fused: Callable[..., jax.Array], given: Sequence[jax.Array]
) -> None:
    """Assert that 16-bit results and gradients err at most twice as much as the function's own, plus 2 ulp."""
    exact = compiled_gradients(function, [np.asarray(x).astype("float32") for x in given])
    naive = with_gradients(function, given)  # eager, so that every intermediate result is rounded
    for actual, poor, expected in zip(compiled_gradients(fused, given), naive, exact, strict=True):
        assert actual.dtype == poor.dtype
        error, allowed = (np.abs(np.asarray(x, np.float32) - expected).max() for x in (actual, poor))
        assert error <= 2 * allowed + 2**-7 * np.abs(expected).max()
