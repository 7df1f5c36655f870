"""Random layers whose masks and biases depend on positions: pixel grids, moved arrays, and positions as arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fusion.fusion_random_layer import Arrays, Function, Layer, Reader
from tests.fusion.fusion_random_parts import hidden, placed

MORE = 3
"""The number of positions by which arrays exceed the longest sequence."""
WAYS = ("-inf", "-1e9", "add", "flipped")


def of_pixels(layer: Layer) -> Function:
    """Return attention between pixels of grids [y, x] and [z, w], with terms and masks of rows and columns."""
    draw, sizes = layer.draws, layer.sizes
    sizes |= {x: draw(f"size {x}", (3, 1, 2, 5)) for x in "yx"}
    is_same = draw("keys on", ("the same grid", "the same grid", "another")) == "the same grid"
    sizes |= {"z": sizes["y"], "w": sizes["x"]} if is_same else {x: draw(f"size {x}", (2, 3, 4)) for x in "zw"}
    sizes |= {"q": sizes["y"] * sizes["x"], "k": sizes["z"] * sizes["w"]}
    grid = ("b", "n", "y", "x", "z", "w")
    query = layer.operand("query", "bnqh")
    scores, before, product = layer.scores(query=query), layer.masked("flat"), layer.product()
    terms = [_term(layer, f"term {i}", query) for i in range(draw("terms", (1, 2, 0, 3)))]
    way, spelled = draw("hidden", WAYS), draw("softmax", ("flat", "two axes", "by hand"))

    def function(given: Arrays) -> tuple[Any, ...]:
        flat = before(scores(given), given)
        found = flat.reshape([sizes[x] for x in grid])
        for kind, term in terms:
            found = hidden(found, term(given), way) if kind == "mask" else found + term(given)
        if spelled == "flat":
            return (product(layer.softmax(found.reshape(flat.shape)), given),)
        if spelled == "two axes" or layer.is_guarded:
            return (product(layer.softmax(found, (-2, -1)).reshape(flat.shape), given),)
        powers = jnp.exp(found - jax.lax.stop_gradient(found.max(axis=(-2, -1), keepdims=True)))
        return (product((powers / powers.sum(axis=(-2, -1), keepdims=True)).reshape(flat.shape), given),)

    return function


def _term(layer: Layer, name: str, query: Any) -> tuple[str, Reader]:
    """Return a mask or a term of scores [b, n, y, x, z, w]."""
    draw, sizes, into = layer.draws, layer.sizes, "bnyxzw"
    kind = draw(name, ("decomposed", "decomposed", "table", "of queries", "near", "row mask", "lengths", "pairs"))
    side, across = draw(f"{name} along", (("y", "z"), ("x", "w")))
    over = draw.some(f"{name} over", "bn")
    if kind == "decomposed":
        table = layer.argument(name, f"{side}{across}h")(f"{side}{across}h")

        def products(given: Arrays) -> Any:
            array, own = query(given)
            whole = placed(array, own, "bnqh")
            whole = whole.reshape(*whole.shape[:2], sizes["y"], sizes["x"], -1)
            return placed(
                jnp.einsum(f"bnyxh,{side}{across}h->bnyx{across}", whole, table(given)), f"bnyx{across}", into
            )

        return "bias", products
    labels = {"table": side + across, "of queries": f"yx{across}", "row mask": f"yx{across}", "pairs": "yxzw"}
    if kind in ("table", "of queries", "pairs"):
        return "bias", layer.argument(name, over + labels[kind])(into)
    if kind == "row mask":
        seen = layer.argument(name, over + labels[kind], 0, 4)(into)
        return "mask", lambda given: seen(given) > 0
    if kind == "lengths":
        ends = layer.argument(name, over, 1, sizes[across] + 1)(into)
        return "mask", lambda given: layer.places(across, into) < ends(given)
    return "mask", lambda given: jnp.abs(layer.places(side, into) - layer.places(across, into)) <= 1


def moved(layer: Layer) -> Function:
    """Return attention with a mask or bias for longer sequences that is rolled, tiled, padded and cut."""
    draw = layer.draws
    scores, before, product = layer.scores(), layer.masked("before"), layer.product()
    arrays = [_moved(layer, f"places {i}") for i in range(draw("arrays", (1, 1, 2)))]
    way = draw("hidden", WAYS)

    def function(given: Arrays) -> tuple[Any, ...]:
        found = before(scores(given), given)
        for array in arrays:
            add = array(given)
            found = hidden(found, add, way) if add.dtype == bool else found + add.astype(found.dtype)
        return (product(layer.softmax(found), given),)

    return function


def _moved(layer: Layer, name: str) -> Reader:
    """Return a mask or bias that is cut to size from a moved array [.., L, L]."""
    draw, sizes = layer.draws, layer.sizes
    length = max(sizes["q"], sizes["k"]) + MORE
    sizes |= {"L": length, "M": length}
    make = _square(layer, name, length)
    moves = [_move(layer, f"{name} move {i}", length) for i in range(draw(f"{name} moves", (0, 1, 1, 2)))]
    cut = _cut(layer, f"{name} cut")

    def read(given: Arrays) -> Any:
        array = make(given)
        for move in moves:
            array = move(array, given)
        return cut(array, given)

    return read


def _square(layer: Layer, name: str, length: int) -> Reader:
    """Return a mask or bias [1 or n, L, L] of all positions."""
    draw = layer.draws
    kind = draw(name, ("causal", "window", "slopes", "table", "learned", "added", "constant", "segments"))
    number = draw(f"{name} number", (2, 1, 4))
    if kind == "table":
        layer.sizes["t"] = 2 * number + 1
        table = layer.argument(name, draw(f"{name} over", ("n", "")) + "t")("nt")
    elif kind == "learned":
        learned = layer.argument(name, draw(f"{name} over", ("", "n")) + "LM")("nLM")
    elif kind == "segments":
        segments = layer.argument(name, "L", 0, 1 + number)("L")

    def square(given: Arrays) -> Any:
        rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
        return {
            "causal": lambda: (rows >= columns)[None],
            "window": lambda: (jnp.abs(rows - columns) < number)[None],
            "slopes": lambda: -0.1 * jnp.abs(rows - columns)[None] * jnp.arange(1, 1 + layer.sizes["n"])[:, None, None],
            "table": lambda: table(given)[:, jnp.clip(rows - columns + number, 0, 2 * number)],
            "learned": lambda: learned(given),
            "added": lambda: jnp.where(rows >= columns, 0.0, -1e9)[None],
            "constant": lambda: jnp.asarray(np.triu(np.full((length, length), -np.inf), 1), jnp.float32)[None],
            "segments": lambda: (segments(given)[:, None] == segments(given)[None, :])[None],
        }[kind]()

    return square


def _move(layer: Layer, name: str, length: int) -> Callable[[Any, Arrays], Any]:
    """Return a function that moves the elements of an array and keeps its shape."""
    draw = layer.draws
    kind = draw(
        name,
        (
            "rolled",
            "rolled by",
            "reversed",
            "padded",
            "tiled",
            "joined",
            "written",
            "repeated",
            "transposed",
            "updated",
        ),
    )
    axis, number = draw(f"{name} axis", (-1, -2)), draw(f"{name} number", (1, 2, 3))
    if kind in ("rolled by", "updated"):
        layer.argument(name, "", 0, MORE)

    def move(array: Any, given: Arrays) -> Any:
        def part(start: int, stop: int) -> Any:
            return jax.lax.slice_in_dim(array, start, stop, axis=array.ndim + axis)

        half = part(0, -(-length // 2))
        widths = [(0, 0)] * array.ndim
        widths[axis] = (number, 0)
        first = (..., slice(0, number)) if axis == -1 else (..., slice(0, number), slice(None))

        return {
            "rolled": lambda: jnp.roll(array, number, axis=axis),
            "rolled by": lambda: jnp.roll(array, given[name], axis=axis),
            "reversed": lambda: jnp.flip(array, axis=axis),
            "padded": lambda: jnp.pad(part(0, length - number), widths, constant_values=array.dtype == bool),
            "tiled": lambda: jax.lax.slice_in_dim(
                jnp.concatenate([half, half], axis=axis), 0, length, axis=array.ndim + axis
            ),
            "joined": lambda: jnp.concatenate([part(number, length), part(0, number)], axis=axis),
            "written": lambda: array.at[first].set(array.dtype == bool),
            "repeated": lambda: jax.lax.slice_in_dim(jnp.repeat(half, 2, axis=axis), 0, length, axis=array.ndim + axis),
            "transposed": lambda: jnp.swapaxes(array, -1, -2),
            "updated": lambda: jax.lax.dynamic_update_slice_in_dim(
                array, part(0, number) if array.dtype != bool else ~part(0, number), given[name], axis=array.ndim + axis
            ),
        }[kind]()

    return move


def _cut(layer: Layer, name: str) -> Callable[[Any, Arrays], Any]:
    """Return a function that cuts [b or 1, n or 1, q, k] from an array [n or 1, L, L]."""
    draw, sizes = layer.draws, layer.sizes
    queries, keys = sizes["q"], sizes["k"]
    kind = draw(
        name,
        ("first", "last", "at an offset", "at offsets", "rows", "rows of batch", "columns", "pairs", "every other"),
    )
    if kind == "at an offset":
        layer.argument(name, "", 0, MORE)
    elif kind == "at offsets":
        offsets = layer.argument(name, "b", 0, MORE)("b")
    elif kind in ("rows", "rows of batch", "pairs"):
        rows = layer.argument(f"{name} rows", "q" if kind == "rows" else "bq", 0, sizes["L"])("bq")
    if kind in ("columns", "pairs"):
        columns = layer.argument(f"{name} columns", "k" if kind == "columns" else "bk", 0, sizes["L"])("bk")

    def at(array: Any, offset: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(array, offset, queries, axis=1)[..., :keys]

    def cut(array: Any, given: Arrays) -> Any:
        length = array.shape[-1]
        return {
            "first": lambda: array[None, :, :queries, :keys],
            "last": lambda: array[None, :, length - queries :, length - keys :],
            "at an offset": lambda: at(array, given[name])[None],
            "at offsets": lambda: jax.vmap(lambda offset: at(array, offset))(offsets(given)),
            "rows": lambda: jnp.take(array, rows(given)[0], axis=1)[None, ..., :keys],
            "rows of batch": lambda: jnp.moveaxis(array[:, rows(given), :keys], 1, 0),
            "columns": lambda: jnp.take(array, columns(given)[0], axis=2)[None, :, :queries],
            "pairs": lambda: jnp.moveaxis(array[:, rows(given)[:, :, None], columns(given)[:, None, :]], 1, 0),
            "every other": lambda: jnp.tile(array, (1, 2, 2))[None, :, : 2 * queries : 2, : 2 * keys : 2],
        }[kind]()

    return cut


def among(layer: Layer) -> Function:
    """Return attention with positions of queries and keys as arguments: masks, slopes, and tables read at positions."""
    draw, sizes = layer.draws, layer.sizes
    sizes |= {"L": 9, "M": 9, "t": 7}
    scores, before, product = layer.scores(), layer.masked("before"), layer.product()
    over = draw("positions of", ("b", ""))
    queries = layer.argument("queries' places", f"{over}q", 0, 9)("bnqk")
    keys = layer.argument("keys' places", f"{over}k", 0, 9)("bnqk")
    kinds = [draw(f"by places {i}", ("causal", "window", "slopes", "table", "pairs", "turned")) for i in range(2)]
    tables = {i: layer.argument(f"table {i}", "LM" if kind == "pairs" else "nt") for i, kind in enumerate(kinds)}
    way = draw("hidden", WAYS)

    def function(given: Arrays) -> tuple[Any, ...]:
        found = before(scores(given), given)
        away = queries(given) - keys(given)
        for i, kind in enumerate(kinds):
            if kind == "causal":
                found = hidden(found, away >= 0, way)
            elif kind == "window":
                found = hidden(found, jnp.abs(away) < 4, way)
            elif kind == "slopes":
                found = found - 0.2 * jnp.abs(away)
            elif kind == "turned":
                found = found * jnp.cos(0.1 * away)
            elif kind == "pairs":
                found = found + tables[i]("LM")(given)[queries(given), keys(given)]
            else:
                # Heads come first, as in a table of relative positions.
                table = tables[i]("nt")(given)
                found = found + jnp.moveaxis(table[:, jnp.clip(away[:, 0] + 3, 0, 6)], 0, 1)
        return (product(layer.softmax(found), given),)

    return function
