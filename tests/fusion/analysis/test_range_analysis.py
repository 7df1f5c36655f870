"""Tests of tile intervals: they contain every element, and masks of positions are resolved exactly."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from blockdiag.fusion.analysis.interval import Interval, unknown
from blockdiag.fusion.analysis.range_analysis import bounds, predicates, tile_extent, tile_states

ROWS, COLUMNS = 4, 8  # the shape of a tile
SHAPES = ((16, 16), (5, 21), (18, 7))
I32, F32 = jnp.int32, jnp.float32
LOWEST = float(jnp.finfo(F32).min)


class Program(NamedTuple):
    """A score function of [T, 1], [1, S], [T, S] and [1, 1] arrays.

    Attributes:
        roles: the roles of its arguments; "?" is a score whose interval is unknown.
        leaves: makes its arguments from a random generator and the lengths.
        masked: the largest score of masked elements; None: intervals need not find all dead tiles.
    """

    function: Callable[..., Any]
    roles: tuple[str, ...]
    leaves: Callable[[np.random.Generator, int, int], list[np.ndarray]]
    masked: float | None = None


def positions(_: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    return [np.arange(rows, dtype=np.int32), np.arange(columns, dtype=np.int32)]


def score(generator: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    return [generator.normal(size=(rows, columns)).astype(np.float32) * 4]


def scored(*parts: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    return lambda generator, rows, columns: [
        leaf for part in (score, *parts) for leaf in part(generator, rows, columns)
    ]


def documents(generator: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    # No number is skipped, so a tile has elements of all documents between its first and its last.
    return [generator.integers(0, 2, size).cumsum().astype(np.int32) for size in (rows, columns)]


def scalar(generator: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    del columns
    return [generator.integers(0, rows, ()).astype(np.int32)]


def slope(generator: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    del rows, columns
    return [generator.uniform(0.01, 1, ()).astype(np.float32)]


def padding(generator: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    return [(np.arange(columns) < generator.integers(0, columns + 1)).astype(np.float32) + np.zeros((rows, 1), "f")]


def flags(generator: np.random.Generator, rows: int, columns: int) -> list[np.ndarray]:
    return [generator.integers(0, 2, rows).astype(bool), generator.integers(0, 2, columns).astype(bool)]


def window(s: Any, q: Any, k: Any) -> Any:
    return jnp.where(jnp.abs(q - k) <= I32(5), s, -jnp.inf)


def floating_window(s: Any, q: Any, k: Any) -> Any:
    distance = q.astype(F32) - k.astype(F32)
    return jnp.where((distance >= F32(0)) & (distance < F32(6)), s, F32(-1e10))


def soft_cap(s: Any, q: Any, k: Any) -> Any:
    return jnp.where(q >= k, F32(20) * jnp.tanh(s / F32(20)), F32(LOWEST))


def alibi(s: Any, q: Any, k: Any, m: Any) -> Any:
    return jnp.where(k <= q, s - m * (q - k).astype(F32), -jnp.inf)


def nested(s: Any, q: Any, k: Any, d: Any, e: Any) -> Any:
    return jnp.where(d == e, jnp.where(k <= q, s, F32(-1e9)), -jnp.inf)


def blocks(s: Any, q: Any, k: Any) -> Any:
    return jnp.where((q // I32(6) == k // I32(6)) & (k % I32(3) != I32(2)), s, -jnp.inf)


def dilated(s: Any, q: Any, k: Any) -> Any:
    return jax.lax.select((jax.lax.rem(q - k, I32(3)) == I32(0)) & (q >= k), s, jnp.full_like(s, -jnp.inf))


def gated(s: Any, q: Any, k: Any) -> Any:
    gate = jax.nn.sigmoid(jnp.round(s)) * jax.lax.integer_pow(q - k, 2).astype(F32)
    return jnp.where(q >= k, gate + jnp.log1p(jnp.abs(s)), F32(-1e9)) - jax.nn.softplus(jnp.clip(s, -3.0, 3.0))


PROGRAMS = {
    "causal": Program(lambda s, q, k: jnp.where(q >= k, s, -jnp.inf), ("?", "row", "column"), scored(positions), -1e9),
    "strict": Program(lambda s, q, k: jnp.where(k < q, s, F32(-1e9)), ("?", "row", "column"), scored(positions), -1e9),
    "window": Program(window, ("?", "row", "column"), scored(positions), -1e9),
    "floating window": Program(floating_window, ("?", "row", "column"), scored(positions), -1e9),
    "soft cap": Program(soft_cap, ("?", "row", "column"), scored(positions), -1e9),
    "alibi": Program(alibi, ("?", "row", "column", "scalar"), scored(positions, slope), -1e9),
    "prefix": Program(
        lambda s, q, k, n: jnp.where((k < n) | (k <= q), s, F32(-1e10)),
        ("?", "row", "column", "scalar"),
        scored(positions, scalar),
        -1e9,
    ),
    "document": Program(
        lambda s, d, e: jnp.where(d == e, s, -jnp.inf), ("?", "row", "column"), scored(documents), -1e9
    ),
    "nested": Program(nested, ("?", "row", "column", "row", "column"), scored(positions, documents)),
    "bounded bias": Program(
        lambda s, b, q, k: jnp.where(q >= k, s, -jnp.inf) + b,
        ("score", "score", "row", "column"),
        scored(score, positions),
        -1e9,
    ),
    "flags": Program(lambda s, a, b: jnp.where(a & ~b, -jnp.inf, s), ("?", "row", "column"), scored(flags)),
    "exclusive": Program(lambda s, a, b: jnp.where(a ^ (a != b), s, -jnp.inf), ("?", "row", "column"), scored(flags)),
    "blocks": Program(blocks, ("?", "row", "column"), scored(positions)),
    "dilated": Program(dilated, ("?", "row", "column"), scored(positions)),
    "gated": Program(gated, ("score", "row", "column"), scored(positions)),
    "added mask": Program(lambda s, m: s + (F32(1) - m) * F32(-1e9), ("score", "score"), scored(padding)),
    "added infinity": Program(
        lambda s, q, k: s + jnp.where(q >= k, F32(0), F32(-jnp.inf)),
        ("score", "row", "column"),
        scored(positions),
        -1e9,
    ),
    "unknown plus infinity": Program(
        lambda s, q, k: s + jnp.where(q >= k, F32(0), F32(-jnp.inf)), ("?", "row", "column"), scored(positions)
    ),
}


def place(leaf: Any, role: str) -> Any:
    """Return a leaf as an operand of the whole score matrix."""
    return {"row": lambda: leaf[:, None], "column": lambda: leaf[None, :], "scalar": lambda: leaf[None, None]}.get(
        role, lambda: leaf
    )()


def tile_shape(role: str) -> tuple[int, int]:
    return {"row": (ROWS, 1), "column": (1, COLUMNS), "scalar": (1, 1)}.get(role, (ROWS, COLUMNS))


@functools.cache
def traced(name: str) -> Any:
    program = PROGRAMS[name]
    leaves = program.leaves(np.random.default_rng(0), 4, 4)
    tiles = [
        jax.ShapeDtypeStruct(tile_shape(role), leaf.dtype) for role, leaf in zip(program.roles, leaves, strict=True)
    ]
    return jax.make_jaxpr(program.function)(*tiles)


def extents(roles: tuple[str, ...], leaves: list[Any]) -> list[Interval]:
    return [
        unknown(leaf.dtype) if role == "?" else tile_extent(leaf, role, ROWS, COLUMNS)
        for role, leaf in zip(roles, leaves, strict=True)
    ]


def spread(end: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return the bound of the tile of each element."""
    tiles = tuple(-(-size // tile) for size, tile in zip(shape, (ROWS, COLUMNS), strict=True))
    end = np.broadcast_to(np.asarray(end), tiles)
    return np.repeat(np.repeat(end, ROWS, 0), COLUMNS, 1)[: shape[0], : shape[1]]


def assert_contains(interval: Interval, values: Any, name: str = "") -> None:
    values = np.asarray(values)
    low, high = spread(interval.low, values.shape), spread(interval.high, values.shape)
    values = values if values.dtype == bool else values.astype(np.float64)
    missing = (values != values) & ~((low == -np.inf) & (high == np.inf))
    outside = (values < low) | (values > high) | missing
    assert not outside.any(), (name, values[outside], low[outside], high[outside])


@functools.cache
def compiled(name: str) -> Any:
    return jax.jit(PROGRAMS[name].function)


@pytest.mark.parametrize("name", PROGRAMS)
@hypothesis.given(seed=strategies.integers(0, 2**20), shape=strategies.sampled_from(SHAPES))
def test_bounds_contain_every_element_of_their_tile(name: str, seed: int, shape: tuple[int, int]) -> None:
    program = PROGRAMS[name]
    leaves = program.leaves(np.random.default_rng(seed), *shape)
    (interval,) = bounds(traced(name), extents(program.roles, leaves))
    assert isinstance(interval.low, np.ndarray) and isinstance(interval.high, np.ndarray)
    values = np.asarray(compiled(name)(*[place(leaf, role) for leaf, role in zip(leaves, program.roles, strict=True)]))
    assert_contains(interval, values)
    states = spread(tile_states(interval), shape)
    assert (values[states == 0] <= -1e9).all()
    if program.masked is None:
        return
    alive = [
        [
            (values[row : row + ROWS, column : column + COLUMNS] > program.masked).any()
            for column in range(0, shape[1], COLUMNS)
        ]
        for row in range(0, shape[0], ROWS)
    ]
    tiles = np.broadcast_to(tile_states(interval), np.shape(alive))
    np.testing.assert_array_equal(tiles, np.asarray(alive, np.int8))


@pytest.mark.parametrize("name", PROGRAMS)
def test_bounds_with_jax_and_numpy_agree(name: str) -> None:
    program = PROGRAMS[name]
    shape = SHAPES[1]
    leaves = program.leaves(np.random.default_rng(3), *shape)

    @jax.jit
    def with_jax(*leaves: Any) -> Any:
        (interval,) = bounds(traced(name), extents(program.roles, list(leaves)))
        return jax.tree.map(jnp.asarray, interval), jnp.asarray(tile_states(interval))

    interval, states = with_jax(*map(jnp.asarray, leaves))
    (expected,) = bounds(traced(name), extents(program.roles, leaves))
    np.testing.assert_array_equal(states, tile_states(expected))
    np.testing.assert_allclose(*np.broadcast_arrays(interval.low, expected.low), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*np.broadcast_arrays(interval.high, expected.high), rtol=1e-5, atol=1e-6)
    values = compiled(name)(*[place(leaf, role) for leaf, role in zip(leaves, program.roles, strict=True)])
    assert_contains(interval, values)


def test_bounds_of_constants_are_resolved_while_tracing() -> None:
    """This also holds if the program's constants are JAX arrays and if other leaves are tracers."""
    floor = jnp.float32(-1e10)
    shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), F32)
    program = jax.make_jaxpr(lambda s, q, k: jnp.where(q >= k, s, floor))(
        shape, jax.ShapeDtypeStruct((ROWS, 1), I32), jax.ShapeDtypeStruct((1, COLUMNS), I32)
    )
    found = []

    @jax.jit
    def other(x: Any) -> Any:
        rows, columns = positions(np.random.default_rng(0), 16, 16)
        extent = [tile_extent(rows, "row", ROWS, COLUMNS), tile_extent(columns, "column", ROWS, COLUMNS)]
        (interval,) = bounds(program, [unknown(F32), *extent])
        found.append(interval)
        # A traced score does not prevent the mask from being resolved.
        (mixed,) = bounds(program, [tile_extent(x, "score", ROWS, COLUMNS), *extent])
        return tile_states(mixed)

    states = other(jnp.ones((16, 16)))
    expected = [[1, 0], [1, 0], [1, 1], [1, 1]]
    assert isinstance(found[0].low, np.ndarray) and isinstance(found[0].high, np.ndarray)
    np.testing.assert_array_equal(tile_states(found[0]), expected)
    np.testing.assert_array_equal(states, expected)
    assert states.dtype == np.int8


def test_bounds_of_leaves_with_different_batch_axes_broadcast() -> None:
    """Leaves with different batch axes, such as [B, 1] and [1, H], broadcast against each other."""
    generator = np.random.default_rng(0)
    lengths, slopes = np.array([[3], [9]], np.int32), generator.uniform(0.1, 1, (1, 3)).astype(np.float32)
    rows, columns = positions(generator, 10, 12)
    function = lambda q, k, n, m: jnp.where(k < n, m * (k - q).astype(F32), -jnp.inf)  # noqa: E731
    tiles = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((4, 1), I32), ((1, 8), I32), ((1, 1), I32))]
    program = jax.make_jaxpr(function)(*tiles, jax.ShapeDtypeStruct((1, 1), F32))
    roles = ("row", "column", "scalar", "scalar")
    (interval,) = bounds(program, extents(roles, [rows, columns, lengths, slopes]))
    np.testing.assert_array_equal(np.broadcast_to(tile_states(interval), (2, 3, 3, 2))[:, 0, 0], [[1, 0], [1, 1]])
    for batch in range(2):
        for head in range(3):
            values = function(rows[:, None], columns[None], lengths[batch, :, None], slopes[0, head][None, None])
            ends = [np.broadcast_to(end, (2, 3, 3, 2))[batch, head] for end in (interval.low, interval.high)]
            assert_contains(Interval(*ends), values)


def test_predicates_returns_the_intervals_of_boolean_selects() -> None:
    """The keys are equation indices; a select with an integer index is not included."""
    rows, columns = positions(np.random.default_rng(0), 8, 16)
    shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), F32)

    def function(s: Any, q: Any, k: Any) -> Any:
        chosen = jax.lax.select_n(jnp.broadcast_to(jnp.sign(q), s.shape), s, s)
        return jax.lax.select(jnp.broadcast_to(q >= k - I32(3), s.shape), chosen, jnp.full_like(s, -1e9))

    program = jax.make_jaxpr(function)(
        shape, jax.ShapeDtypeStruct((ROWS, 1), I32), jax.ShapeDtypeStruct((1, COLUMNS), I32)
    )
    found = predicates(program, [unknown(F32), *extents(("row", "column"), [rows, columns])])
    ((index, predicate),) = found.items()
    assert program.jaxpr.eqns[index].primitive.name == "select_n"
    np.testing.assert_array_equal(predicate.low, [[False, False], [True, False]])
    np.testing.assert_array_equal(predicate.high, [[True, False], [True, True]])


def test_bounds_of_products_are_finite_only_with_known_operands() -> None:
    """Nothing is known of a product, unless something is known of both operands."""
    generator = np.random.default_rng(0)
    query, key = (generator.normal(size=(size, 5)).astype(np.float32) for size in (10, 12))
    rows, columns = positions(generator, 10, 12)

    def function(query: Any, key: Any, q: Any, k: Any) -> Any:
        product = jax.lax.dot_general(query, key, (((1,), (1,)), ((), ())))
        return product, product + jnp.where(q >= k, F32(0), F32(-1e10))

    tiles = [((ROWS, 5), F32), ((COLUMNS, 5), F32), ((ROWS, 1), I32), ((1, COLUMNS), I32)]
    program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*tile) for tile in tiles))
    known = extents(("query", "key", "row", "column"), [query, key, rows, columns])
    for interval, values in zip(
        bounds(program, known), function(query, key, rows[:, None], columns[None]), strict=True
    ):
        assert_contains(interval, values)
    assert tile_states(bounds(program, known)[1])[0, 1] == 0
    for given in ([unknown(F32), *known[1:]], [unknown(F32), unknown(F32), *known[2:]]):
        for interval in bounds(program, given):
            assert (interval.low == -np.inf).all() and (interval.high == np.inf).all()
    query[0, 0] = np.nan
    (interval, _) = bounds(program, [tile_extent(query, "query", ROWS, COLUMNS), *known[1:]])
    np.testing.assert_array_equal(interval.high == np.inf, np.arange(3)[:, None] == [0, 0])


SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -7.0, 88.0, -88.0, 1e-40, -1e-45, 1e30, -1e9, 3e38, -3e38)
UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(jax.lax, name) for name in ("neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "expm1", "log")},
    **{name: getattr(jax.lax, name) for name in ("log1p", "sqrt", "rsqrt", "tanh", "logistic", "erf", "square", "sin")},
    "round": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN),
    "round away": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
    "cube": lambda x: jax.lax.integer_pow(x, 3),
    "inverse": lambda x: jax.lax.integer_pow(x, -2),
    "to int32": lambda x: jax.lax.convert_element_type(x, I32),
    "to uint8": lambda x: jax.lax.convert_element_type(x, jnp.uint8),
    "to bool": lambda x: jax.lax.convert_element_type(x, jnp.bool_),
    "to bfloat16": lambda x: jax.lax.convert_element_type(x, jnp.bfloat16),
    "to float16": lambda x: jax.lax.convert_element_type(x, jnp.float16),
    "to float32": lambda x: jax.lax.convert_element_type(x, F32),
    "clamp": lambda x: jax.lax.clamp(jnp.asarray(-2, x.dtype), x, jnp.asarray(90, x.dtype)),
    "cumsum": lambda x: jax.lax.cumsum(x, axis=0),
}
BINARY: dict[str, Callable[..., Any]] = {
    name: getattr(jax.lax, name) for name in ("add", "sub", "mul", "div", "rem", "max", "min", "pow")
} | {name: getattr(jax.lax, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_xor")}
INTEGER_UNARY = ("neg", "sign", "square", "cube", "to int32", "to uint8", "to bool", "to float16", "to bfloat16")
NO_FLOATS, NO_BOOLS = ("bitwise_and", "bitwise_xor"), ("add", "sub", "mul", "div", "rem", "pow", "lt", "le", "gt", "ge")


def chosen(dtype: Any, operands: int) -> dict[str, Callable[..., Any]]:
    """Return the primitives that take operands of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return UNARY if operands == 1 else {name: rule for name, rule in BINARY.items() if name not in NO_FLOATS}
    if operands == 1:
        more = () if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger) else ("abs", "clamp")
        return {name: rule for name, rule in UNARY.items() if name in (*INTEGER_UNARY, "to float32", *more)}
    return {name: rule for name, rule in BINARY.items() if name not in (NO_BOOLS if dtype == jnp.bool_ else ("pow",))}


def draw(generator: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Draw numbers of one random kind, such as special values, small integers or normal numbers."""
    kind = generator.integers(0, 6)
    if dtype == np.bool_:
        return generator.integers(0, 1 + min(kind, 1), shape).astype(bool)
    if not jnp.issubdtype(dtype, jnp.floating):
        info = jnp.iinfo(dtype)
        low, high = [(info.min, info.max), (-3, 4), (1, 9), (info.max - 4, info.max), (0, 2**14), (5, 5)][kind]
        return generator.integers(max(low, info.min), min(high, info.max), shape, endpoint=True).astype(dtype)
    values = [
        generator.choice(SPECIAL, shape),
        generator.choice((*SPECIAL, np.inf, -np.inf, np.nan), shape),
        generator.integers(-5, 6, shape) + 0.0,
        generator.normal(size=shape),
        generator.normal(size=shape) * 0.1 + 2.0,
        np.exp(generator.normal(size=shape) * 20),
    ][kind]
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(dtype)


@pytest.mark.parametrize("operands", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "uint32", "bool"])
def test_bounds_of_primitives_contain_their_results(dtype: Any, operands: int) -> None:
    """Intervals computed by NumPy and by JAX contain the results, even if bits are lost or numbers overflow."""
    dtype, shape = jnp.dtype(dtype), (8, 16)
    functions = chosen(dtype, operands) if (dtype, operands) != (jnp.bool_, 1) else {"not": jnp.logical_not}
    roles = ("score",) if operands == 1 else ("row", "column")

    def every(*values: Any) -> list[Any]:
        return [function(*jnp.broadcast_arrays(*values)) for function in functions.values()]

    program = jax.make_jaxpr(every)(*[jax.ShapeDtypeStruct(tile_shape(role), dtype) for role in roles])
    evaluate = jax.jit(every)
    # Without x64 no JAX array can hold the bounds of uint32.
    is_wide = [result.dtype == jnp.uint32 for result in program.out_avals]

    @jax.jit
    def with_jax(*leaves: Any) -> Any:
        intervals = bounds(program, extents(roles, list(leaves)))
        return [None if wide else jax.tree.map(jnp.asarray, x) for x, wide in zip(intervals, is_wide, strict=True)]

    for seed in range(40):
        generator = np.random.default_rng(seed)
        sizes = [shape] if operands == 1 else [shape[:1], shape[1:]]
        leaves = [draw(generator, dtype, size) for size in sizes]
        results = evaluate(*[place(leaf, role) for leaf, role in zip(leaves, roles, strict=True)])
        found = zip(functions, results, bounds(program, extents(roles, leaves)), with_jax(*leaves), strict=True)
        for name, values, *intervals in found:
            for interval in intervals:
                if interval is None:
                    continue
                if name in ("cumsum", "sin", "pow"):
                    assert (interval.low == -np.inf).all() and (interval.high == np.inf).all()
                else:
                    assert_contains(interval, values, name)

    # The intervals of constant operands must also be tight.
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return  # negation wraps around
    is_float = jnp.issubdtype(dtype, jnp.floating)
    tolerance = 0.1 if is_float else 0.0
    loose = {"cumsum", "sin", "pow", "inverse"} | ({"rem"} if is_float else set())
    loose |= set() if dtype == np.bool_ else {"bitwise_and", "bitwise_xor"}
    leaves = [np.full(size, 3 - index).astype(dtype) for index, size in enumerate(sizes)]
    results = evaluate(*[place(leaf, role) for leaf, role in zip(leaves, roles, strict=True)])
    for name, values, *intervals in zip(
        functions, results, bounds(program, extents(roles, leaves)), with_jax(*leaves), strict=True
    ):
        for interval in () if name in loose else intervals:
            for end in (interval.low, interval.high):
                wanted = np.asarray(values).astype(np.float64)
                np.testing.assert_allclose(spread(end, shape).astype(np.float64), wanted, rtol=tolerance, err_msg=name)


def extent_in(xp: Any, array: Any, role: Any) -> Interval:
    if xp is np:
        return tile_extent(array, role, ROWS, COLUMNS)
    return jax.jit(lambda array: tile_extent(array, role, ROWS, COLUMNS))(array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("xp", [np, jnp])
def test_tile_extent_is_the_minimum_and_maximum_of_each_tile(dtype: str, xp: Any) -> None:
    generator = np.random.default_rng(1)
    values = xp.asarray(draw(generator, jnp.dtype(dtype), (2, 10, 9)))
    if dtype != "bool":
        values = xp.asarray(generator.integers(-9, 9, (2, 10, 9)).astype(dtype))
    wide = np.asarray(values).astype(np.float64)

    def extent_of(array: Any, role: Any) -> Any:
        found = extent_in(xp, array, role)
        assert isinstance(found.low, np.ndarray) == isinstance(found.high, np.ndarray) == (xp is np)
        return jax.tree.map(np.asarray, found)

    extent = extent_of(values, "score")
    assert extent.low.shape == extent.high.shape == (2, 3, 2)
    assert extent.low[1, 2, 1] == wide[1, 8:, 8:].min() and extent.high[1, 2, 1] == wide[1, 8:, 8:].max()
    assert extent.low[0, 1, 0] == wide[0, 4:8, :8].min() and extent.high[0, 1, 0] == wide[0, 4:8, :8].max()
    rows, columns = (extent_of(values[:, 0], role) for role in ("row", "column"))
    assert rows.low.shape == (2, 3, 1) and columns.low.shape == (2, 1, 2)
    assert rows.high[1, 2, 0] == wide[1, 0, 8:].max() and columns.low[1, 0, 0] == wide[1, 0, :8].min()
    query, key = (extent_of(values, role) for role in ("query", "key"))
    assert query.high.shape == (2, 3, 1) and key.high.shape == (2, 1, 2)
    assert query.high[0, 1, 0] == wide[0, 4:8].max() and key.low[0, 0, 1] == wide[0, 8:].min()
    single = extent_of(values[:, 0, 0], "scalar")
    assert single.low.shape == (2, 1, 1) and (single.low[:, 0, 0] == wide[:, 0, 0]).all()


def test_tile_extent_of_nan_is_unknown() -> None:
    values = np.ones((8, 16), np.float32)
    values[5, 9] = np.nan
    for array in (values, jnp.asarray(values)):
        extent = tile_extent(array, "score", ROWS, COLUMNS)
        np.testing.assert_array_equal(extent.low, [[1, 1], [1, -np.inf]])
        np.testing.assert_array_equal(extent.high, [[1, 1], [1, np.inf]])


def test_bounds_of_calls_and_constants_are_exact() -> None:
    """The program has a function with a custom derivative, a checkpoint and a constant array."""

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return x * F32(2)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, t: (t * F32(2),))
    table = np.linspace(-1, 2, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)

    def function(x: Any) -> Any:
        return jax.checkpoint(lambda x: jax.nn.relu(doubled(x)) + jnp.asarray(table))(x)

    program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((ROWS, COLUMNS), F32))
    (interval,) = bounds(program, [Interval(np.full((1, 1), -1.5), np.full((1, 1), 3.25))])
    np.testing.assert_allclose(interval.low, -1, rtol=1e-6)
    np.testing.assert_allclose(interval.high, 8.5, rtol=1e-6)


def test_bounds_of_unsupported_primitives_are_unknown() -> None:
    def function(x: Any, i: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(3)
        total = jnp.sum(x, axis=1, keepdims=True)
        looped = jax.lax.fori_loop(0, 3, lambda _, y: y * F32(2), x)
        return bits.astype(F32), total, looped, i & I32(3), jnp.sort(x, axis=1) > F32(0)

    program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((ROWS, COLUMNS), F32), jax.ShapeDtypeStruct((ROWS, 1), I32))
    for module in (np, jnp):
        given = [
            Interval(module.zeros((1, 1)), module.ones((1, 1))),
            Interval(np.zeros((1, 1), int), np.ones((1, 1), int)),
        ]
        *floats, integer, boolean = bounds(program, given)
        assert math.inf in floats[1].high and -math.inf in floats[2].low
        assert integer.high.max() == 2**31 - 1 and not boolean.low.any() and boolean.high.all()


def test_bounds_with_a_wrong_number_of_leaves_raises_value_error() -> None:
    program = jax.make_jaxpr(lambda x, y: x + y)(jnp.ones((1, 1)), jnp.ones((1, 1)))
    with pytest.raises(ValueError, match="each of 2 inputs"):
        bounds(program, [unknown(F32)])
