"""Shared code of append tests: caches filled with poison, and an exact result computed by loops.

`exact_append` is independent of the library: NumPy, one token, head and element of a cache after the other.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from blockdiag import Rotary, append_to_pages
from tests.support import compiled_quickly, to_array

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8",)
WRITTEN = ("key_pages", "value_pages", "key_scale", "value_scale", "key_centroids")
LENGTHS_LIKE = ("page_table", "kv_lengths", "query_lengths", "query_offsets")


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a dtype name."""
    return np.dtype(name if name in INTEGERS else getattr(ml_dtypes, name, name))


def largest_of(dtype: str) -> float:
    """Return the largest number that rounding to an 8-bit dtype gives."""
    return 127.0 if dtype in INTEGERS else float(ml_dtypes.finfo(dtype).max)


def poison_of(dtype: str) -> float:
    """Return a number that no token has: NaN, or the integer that rounding never gives."""
    return -128 if dtype in INTEGERS else np.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryCase:
    """Rotary tables and how tokens index them.

    Tokens use their position in the sequence, an explicit position or a row of their own. Batch rows may share the rows
    of tokens.
    """

    tables: Literal["position", "explicit", "token", "shared token"] = "position"
    interleaved: bool = False
    apply_to: tuple[str, ...] = ("query", "key")
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppendCase:
    """One call, described by shapes and options.

    Attributes:
        before, new: number of keys of each sequence before the append, and of new ones.
        layout: whether rows are [B, T, ...], where T is the largest number of new tokens (with `query_lengths` if some
            sequences have fewer), or packed by offsets, with `padding` rows at the end.
        page_size: tokens of a page; None for a contiguous cache of `room` keys.
        key_dtype, value_dtype: dtypes of the pages; None for that of the key.
        key_scale, value_scale: None, the form of a given scale ("number", "scalar" or "head"), or "token" for scales
            that are computed and written to pages.
        is_latent: whether there are keys alone.
        block_size: keys of a block whose mean is maintained, or None.
        magnitude: the magnitude of keys and values.
    """

    before: tuple[int, ...]
    new: tuple[int, ...]
    layout: Literal["batch", "packed"] = "batch"
    padding: int = 0
    page_size: int | None = 16
    room: int = 24
    key_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "bfloat16"
    key_dtype: str | None = None
    value_dtype: str | None = None
    key_scale: Literal["number", "scalar", "head", "token"] | None = None
    value_scale: Literal["number", "scalar", "head", "token"] | None = None
    rotary: RotaryCase | None = None
    is_latent: bool = False
    block_size: int | None = None
    max_blocks: int = 6
    magnitude: float = 1.0

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what is appended."""
        return ("key",) if self.is_latent else ("key", "value")

    @property
    def batch(self) -> int:
        return len(self.new)

    @property
    def max_pages(self) -> int:
        longest = max(map(sum, zip(self.before, self.new, strict=True)), default=0)
        return -(-longest // (self.page_size or 1)) + 2

    @property
    def tokens_shape(self) -> tuple[int, ...]:
        if self.layout == "packed":
            return (sum(self.new) + self.padding,)
        return (self.batch, max(self.new, default=0))

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Return every array argument of a call as a NumPy array; pages hold poison where they have no keys."""
        generator = np.random.default_rng(seed)
        arguments: dict[str, Any] = {}
        sizes = {name: {"key": self.head_dim, "value": self.value_dim}[name] for name in self.parts}
        dtypes = {"key": self.key_dtype or self.dtype, "value": self.value_dtype or self.dtype}
        for name, size in sizes.items():
            x = generator.normal(size=(*self.tokens_shape, self.key_heads, size)) * self.magnitude
            arguments[name] = _rounded(x, self.dtype)
        pool = (3 * self.batch * self.max_pages, self.page_size or 1)
        if self.page_size is None:
            pool = (self.batch, self.room)
        else:
            numbers = generator.permutation(pool[0])[: self.batch * self.max_pages]
            arguments["page_table"] = numbers.reshape(self.batch, self.max_pages).astype(np.int32)
        for name, size in sizes.items():
            dtype = numpy_dtype(dtypes[name])
            arguments[f"{name}_pages"] = np.full((*pool, self.key_heads, size), poison_of(dtype.name), dtype)
            kind = getattr(self, f"{name}_scale")
            shapes = {"scalar": (), "head": (self.batch, self.key_heads), "token": (*pool, self.key_heads)}
            if kind == "number":
                arguments[f"{name}_scale"] = 0.3
            elif kind is not None:
                scale = generator.uniform(0.1, 0.5, shapes[kind]).astype(np.float32)
                arguments[f"{name}_scale"] = scale
        arguments["kv_lengths"] = np.asarray(self.before, np.int32) + np.asarray(self.new, np.int32)
        if self.layout == "packed":
            arguments["query_offsets"] = np.cumsum([0, *self.new], dtype=np.int32)
        elif len(set(self.new)) > 1:
            arguments["query_lengths"] = np.asarray(self.new, np.int32)
        if self.block_size is not None:
            shape = (self.batch, self.max_blocks, self.key_heads, self.head_dim)
            arguments["key_centroids"] = np.full(shape, np.nan, np.float32)
        self._fill(arguments, generator)
        for name in self.parts:
            if self.__getattribute__(f"{name}_scale") == "token":
                scale = arguments[f"{name}_scale"]
                pages = arguments[f"{name}_pages"]
                poison = np.full((), poison_of(pages.dtype.name), pages.dtype).astype(np.float32)
                scale[np.isclose(pages.astype(np.float32), poison, equal_nan=True).all(axis=-1)] = np.nan
        return arguments

    def _fill(self, arguments: dict[str, Any], generator: np.random.Generator) -> None:
        """Write the keys and values of earlier tokens."""
        for sequence, length in enumerate(self.before):
            for position in range(length):
                page, offset = place_of(arguments, sequence, position)
                for name in self.parts:
                    pages = arguments[f"{name}_pages"]
                    row = pages[page, offset]
                    unit = 40 if row.dtype.name in INTEGERS else 1
                    pages[page, offset] = _rounded(unit * generator.normal(size=row.shape), row.dtype.name)

    def rotary_argument(self, seed: int = 1) -> Rotary | None:
        """Return random tables (cos² + sin² is not 1) and positions."""
        if self.rotary is None:
            return None
        generator = np.random.default_rng(seed)
        rows = {
            "token": self.tokens_shape,
            "shared token": self.tokens_shape[-1:],
        }.get(self.rotary.tables, (max(self.before, default=0) + max(self.new, default=0) + 1,))
        cos, sin = (
            to_array(_rounded(generator.uniform(-1, 1, (*rows, self.head_dim // 2)), self.rotary.dtype))
            for _ in range(2)
        )
        positions = None
        if self.rotary.tables == "explicit":
            positions = to_array(generator.integers(0, rows[0], self.tokens_shape), jnp.int32)
        return Rotary(
            cos,
            sin,
            positions=positions,
            per_token="token" in self.rotary.tables,
            interleaved=self.rotary.interleaved,
            apply_to=self.rotary.apply_to,
        )

    def append(self, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
        """Return the call as a function of its arguments, by name."""
        return functools.partial(
            call, rotary=self.rotary_argument(), block_size=self.block_size, implementation=implementation
        )

    def results(self, implementation: str | None, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the results of a compiled call by name, with every argument traced."""
        results = _compiled(self, implementation)(**arguments)
        return {name: np.asarray(x) for name, x in zip(self.written, results, strict=True)}

    @property
    def written(self) -> tuple[str, ...]:
        """Return the names of the results."""
        is_written = {
            "value_pages": not self.is_latent,
            "key_scale": self.key_scale == "token",
            "value_scale": self.value_scale == "token",
            "key_centroids": self.block_size is not None,
        }
        return tuple(name for name in WRITTEN if is_written.get(name, True))


@functools.cache
def _compiled(case: AppendCase, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    return compiled_quickly(case.append(implementation))


def call(**arguments: Any) -> tuple[jax.Array, ...]:
    """Call `append_to_pages` with every argument by name; a table, and values, may be absent."""
    return append_to_pages(**dict.fromkeys(("page_table", "value", "value_pages")) | arguments)


def place_of(arguments: dict[str, Any], sequence: int, position: int) -> tuple[int, int] | None:
    """Return the page of a position and its row in the page, or None if there is none."""
    num_pages, page_size = arguments["key_pages"].shape[:2]
    table = arguments.get("page_table")
    if position < 0 or position >= (page_size if table is None else table.shape[1] * page_size):
        return None
    page = sequence if table is None else int(table[sequence, position // page_size])
    return (page, position % page_size) if 0 <= page < num_pages else None


def token_rows(case: AppendCase, arguments: dict[str, Any]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return sequence, position and row of each new token."""
    tokens, lengths = [], arguments["kv_lengths"]
    for sequence in range(case.batch):
        if case.layout == "packed":
            first, end = arguments["query_offsets"][sequence : sequence + 2]
            rows = [(int(row),) for row in range(first, end)]
        else:
            most = case.tokens_shape[1]
            count = arguments["query_lengths"][sequence] if "query_lengths" in arguments else most
            rows = [(sequence, token) for token in range(min(max(int(count), 0), most))]
        start = max(int(lengths[sequence]), 0) - len(rows)
        tokens += [(sequence, start + token, row) for token, row in enumerate(rows)]
    return tokens


def exact_append(case: AppendCase, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the expected results by name; rotations are float64, and divisions float32 as defined."""
    results = {name: arguments[name].copy() for name in case.written}
    tokens = token_rows(case, arguments)
    for sequence, position, row in tokens:
        place = place_of(arguments, sequence, position)
        if place is None:
            continue
        for name in case.parts:
            for head in range(case.key_heads):
                x = arguments[name][row][head].astype(np.float64)
                if name == "key":
                    x = _turned(case, x, position, row)
                kind, dtype = getattr(case, f"{name}_scale"), results[f"{name}_pages"].dtype.name
                scale = np.float32(1)
                if kind == "token":
                    largest = np.float32(np.abs(x).max())
                    scale = np.maximum(largest / np.float32(largest_of(dtype)), np.finfo(np.float32).tiny)
                    results[f"{name}_scale"][(*place, head)] = scale
                elif kind is not None:
                    scale = np.broadcast_to(arguments[f"{name}_scale"], (case.batch, case.key_heads))[sequence, head]
                wide = np.float64 if case.dtype == "float64" else np.float32
                x = x.astype(wide) / np.asarray(scale, np.float32).astype(wide)
                results[f"{name}_pages"][(*place, head)] = _rounded(x, dtype)
    if case.block_size is not None:
        for sequence in range(case.batch):
            for last in [position for owner, position, _ in tokens if owner == sequence]:
                _complete(case, arguments, results, sequence, last)
    return results


def _complete(case: AppendCase, arguments: dict[str, Any], results: dict[str, Any], sequence: int, last: int) -> None:
    """Write the mean of the block that ends at a position, if one does."""
    block = last // case.block_size
    places = [place_of(arguments, sequence, last - back) for back in range(case.block_size)]
    if last < 0 or (last + 1) % case.block_size or None in places or block >= case.max_blocks:
        return
    for head in range(case.key_heads):
        total = np.zeros(case.head_dim)
        for place in places:
            scale = 1.0
            if case.key_scale == "token":
                scale = results["key_scale"][(*place, head)]
            elif case.key_scale is not None:
                scale = np.broadcast_to(arguments["key_scale"], (case.batch, case.key_heads))[sequence, head]
            total += results["key_pages"][(*place, head)].astype(np.float64) * np.float64(scale)
        results["key_centroids"][sequence, block, head] = total / case.block_size


def _turned(case: AppendCase, x: np.ndarray, position: int, row: tuple[int, ...]) -> np.ndarray:
    if case.rotary is None or "key" not in case.rotary.apply_to:
        return x
    rotary = case.rotary_argument()
    cos, sin = (np.asarray(table).astype(np.float64) for table in (rotary.cos, rotary.sin))
    match case.rotary.tables:
        case "position":
            place = (min(max(position, 0), cos.shape[0] - 1),)
        case "explicit":
            place = (int(rotary.positions[row]),)
        case "token":
            place = row
        case "shared token":
            place = row[-1:]
    turned, half = np.empty_like(x), case.head_dim // 2
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if case.rotary.interleaved else (i, i + half)
        c, s = cos[(*place, i)], sin[(*place, i)]
        turned[first], turned[second] = x[first] * c - x[second] * s, x[second] * c + x[first] * s
    return turned


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to nearest even, saturating at the largest number of an 8-bit dtype. NaN becomes 0 among integers."""
    if dtype in (*EIGHT_BITS, *INTEGERS):
        x = np.clip(x, -largest_of(dtype), largest_of(dtype))
    if dtype in INTEGERS:
        return np.where(np.isnan(x), 0, np.rint(x)).astype(dtype)
    return x.astype(np.float32 if dtype in EIGHT_BITS else x.dtype).astype(numpy_dtype(dtype))


def _last_place(dtype: np.dtype, unit: float = 1.0) -> tuple[float, float]:
    """Return the distance of neighbouring numbers, relative to them and at least; that of integers is `unit`."""
    if dtype.name in INTEGERS:
        return 0.0, unit
    limits = ml_dtypes.finfo(dtype)
    return float(limits.eps), float(limits.smallest_subnormal)


def bits(x: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, so that NaN poison compares equal."""
    return np.ascontiguousarray(x).view(np.uint8)


def assert_appended(case: AppendCase, actual: dict[str, np.ndarray], arguments: dict[str, Any]) -> None:
    """Assert that written elements are right and no other bit changed.

    Pages must be exact if the only computation is one division. After a rotation, or with a computed scale, they may
    err by one unit in the last place, because sums in another order round differently. Means may err by the error of
    their float32 sum.
    """
    exact = exact_append(case, arguments)
    for name, wanted in exact.items():
        result, before = actual[name], arguments[name]
        assert result.shape == wanted.shape and result.dtype == wanted.dtype, name
        is_kept = (bits(wanted) == bits(before)).reshape(*wanted.shape, -1).all(axis=-1)
        np.testing.assert_array_equal(bits(result[is_kept]), bits(before[is_kept]), err_msg=f"{name} of {case}")
        is_key = name == "key_pages" and case.rotary is not None
        is_computed = (
            is_key or name.endswith(("_scale", "_centroids")) or getattr(case, f"{name[:-6]}_scale") == "token"
        )
        numbers, wanted_numbers = (x[~is_kept].astype(np.float64) for x in (result, wanted))
        if not is_computed:
            np.testing.assert_array_equal(numbers, wanted_numbers, err_msg=f"{name} of {case}")
            continue
        is_narrow = result.dtype.itemsize < 4
        tolerance, smallest = _last_place(result.dtype) if is_narrow else (1e-5, 1e-6)
        if name == "key_centroids" and (case.rotary is not None or case.key_scale == "token"):
            # A few keys may round in the other direction, and the mean includes a share of each.
            key_eps = max(_last_place(arguments["key_pages"].dtype, unit=1 / 127))
            smallest += 4 * key_eps * float(np.abs(arguments["key"].astype(np.float64)).max()) / case.block_size
        np.testing.assert_allclose(
            numbers, wanted_numbers, rtol=1.01 * tolerance, atol=1.01 * smallest, err_msg=f"{name} of {case}"
        )
        # Only a few elements are close enough to a tie.
        assert not is_narrow or (numbers != wanted_numbers).sum() <= 0.05 * numbers.size, f"{name} of {case}"
