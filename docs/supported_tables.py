"""Tables of what each implementation supports, generated from the implementations' own `supports` functions.

`supports` returns None for a call that the implementation can compute, otherwise the reason why not. This script tries
calls that differ from a usual one in a single property, and writes the answers between the markers of the operations'
pages. `python docs/supported_tables.py` writes the pages; `--check` fails if a page differs.
"""

import argparse
import functools
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.common.dtype_table import EIGHT_BIT_DTYPES, EIGHT_BIT_FLOATS, FLOATS
from blockdiag.common.operation import Operation
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.fusion.ir.tree import FUSE
from blockdiag.fusion.program import trace
from blockdiag.ops.append.problem import APPEND, AppendProblem
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL, MOST_TILE_ROWS, BlockDiagonalProblem
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION, MAX_SIZE, KeyConvolutionProblem
from blockdiag.ops.moba.problem import MOBA, MoBAProblem
from blockdiag.ops.moba_paged.problem import MOBA_PAGED, MoBAPagedProblem
from blockdiag.ops.paged.problem import PAGED, PagedProblem

DOCS = Path(__file__).parent

HEADS = range(1, 321)

type Call = Any
type Supports = Callable[[Call], str | None]


@dataclass(frozen=True)
class Row:
    """One row of a table: calls that differ in one property.

    Attributes:
        label: the property.
        calls: the calls by the value of the property, a number or a word; a single call named "" for a yes or no.
    """

    label: str
    calls: Mapping[int | str, Call]


@dataclass(frozen=True)
class Table:
    """A table of the calls that the implementations of an operation support.

    Attributes:
        marker: name between the markers of the page.
        page: the page's file name.
        operation: whose implementations are asked.
        native: module whose `supports` the torch operator asks on CUDA; None where it asks that of "triton".
        rows: makes the rows; whether calls are supported is not asked before the table is written.
    """

    marker: str
    page: str
    operation: Operation
    native: str | None
    rows: Callable[[], Sequence[Row]]


def _changed(problem: Call, field: str, values: Iterable[int | str]) -> dict[int | str, Call]:
    """Return calls that set a field to each of several values."""
    return {value: replace(problem, **{field: value}) for value in values}


def _flag(problem: Call, **changes: Any) -> dict[int | str, Call]:
    return {"": replace(problem, **changes)}


def _block_diagonal() -> list[Row]:
    usual = BlockDiagonalProblem(
        tokens=4096, sequence_length=1024, num_tiles=64, block_size=64, query_heads=8, key_heads=8, head_dim=64,
        dtype="bfloat16", is_causal=False, scale=0.125,
    )  # fmt: skip
    rotary = RotaryProblem(
        interleaved=False, query=True, key=True, value=False, table_rows=1024, table_dtype="float32",
        positions="sequence",
    )  # fmt: skip

    def blocks(sizes: Iterable[int]) -> dict[int | str, Call]:
        return {
            size: replace(usual, tokens=8 * size, sequence_length=4 * size, num_tiles=8, block_size=size)
            for size in sizes
        }

    return [
        Row("dtype", _changed(usual, "dtype", FLOATS)),
        Row("H", _changed(usual, "head_dim", HEADS)),
        Row("H, grouped heads", _changed(replace(usual, key_heads=2), "head_dim", HEADS)),
        Row(f"`block_size` up to {MOST_TILE_ROWS}", blocks(range(1, MOST_TILE_ROWS + 1))),
        Row("longer blocks", {"": blocks([4096])[4096]}),
        Row("a shorter last block", _flag(usual, tokens=4000, sequence_length=1000)),
        Row("packed sequences, `block_lengths`", _flag(usual, sequence_length=None)),
        Row("`is_causal`", _flag(usual, is_causal=True)),
        Row("rotary embedding", _flag(usual, rotary=rotary)),
        Row("rotary, interleaved pairs", _flag(usual, rotary=replace(rotary, interleaved=True))),
        Row("rotary, `positions`", _flag(usual, rotary=replace(rotary, positions="explicit"))),
        Row("rotary, of values", _flag(usual, rotary=replace(rotary, value=True))),
        Row("rotary tables", {t: replace(usual, rotary=replace(rotary, table_dtype=t)) for t in FLOATS}),
    ]


def _moba() -> list[Row]:
    usual = MoBAProblem(
        query_tokens=8192, key_tokens=8192, query_heads=8, key_heads=8, head_dim=64, dtype="bfloat16", block_size=128,
        num_blocks=64, slots=7, is_causal=True, has_key_mask=False, scale=0.125,
    )  # fmt: skip
    return [
        Row("dtype", _changed(usual, "dtype", FLOATS)),
        Row("H", _changed(usual, "head_dim", HEADS)),
        Row("grouped heads", _flag(usual, key_heads=2)),
        Row("`block_size`", _changed(usual, "block_size", (16, 48, 128, 1024, 4096))),
        Row("`top_k` of 1 to 64", {"": replace(usual, slots=63)}),
        Row("`is_causal=False`", _flag(usual, is_causal=False, slots=8)),
        Row("`key_mask`", _flag(usual, has_key_mask=True)),
        Row("packed sequences", _flag(usual, has_padding=True)),
        Row("keys of another length", _flag(usual, query_tokens=100)),
    ]


def _key_convolution() -> list[Row]:
    usual = KeyConvolutionProblem(
        tokens=8192, key_heads=2, head_dim=64, size=3, groups=1, dtype="bfloat16", weights_dtype="bfloat16",
        activation="silu", has_residual=True, sequence_length=1024, tile_rows=64, num_tiles=128,
    )  # fmt: skip
    return [
        Row("dtype of keys and weights", {t: replace(usual, dtype=t, weights_dtype=t) for t in FLOATS}),
        Row("float32 weights of 16-bit keys", _flag(usual, weights_dtype="float32")),
        Row("size", _changed(usual, "size", range(1, MAX_SIZE + 1))),
        Row("H", _changed(usual, "head_dim", HEADS)),
        Row("packed sequences", _flag(usual, sequence_length=None)),
        Row("no activation, no residual", _flag(usual, activation=None, has_residual=False)),
    ]


def _usual_paged() -> PagedProblem:
    return PagedProblem(
        batch=8, query_tokens=1, query_heads=8, key_heads=2, head_dim=64, value_dim=64, query_dtype="bfloat16",
        key_dtype="bfloat16", value_dtype="bfloat16", output_dtype="bfloat16", num_pages=1024, page_size=16,
        max_pages=128, scale=0.125,
    )  # fmt: skip


def _caches(usual: PagedProblem) -> list[Row]:
    """Return the rows about dtypes, for paged attention with or without blocks."""

    def of(query: str, cache: str) -> PagedProblem:
        output = "bfloat16" if query in EIGHT_BIT_FLOATS else query
        return replace(usual, query_dtype=query, key_dtype=cache, value_dtype=cache, output_dtype=output)

    return [
        Row("dtype of queries and cache", {dtype: of(dtype, dtype) for dtype in FLOATS}),
        Row("8-bit cache, 16-bit queries", {dtype: of("bfloat16", dtype) for dtype in EIGHT_BIT_DTYPES}),
        Row("8-bit cache, float32 queries", {dtype: of("float32", dtype) for dtype in EIGHT_BIT_DTYPES}),
        Row("8-bit cache and queries", {dtype: of(dtype, dtype) for dtype in EIGHT_BIT_FLOATS}),
        Row("keys of 8 bits, values of 16", _flag(of("bfloat16", "bfloat16"), key_dtype="float8_e4m3fn")),
    ]


def _paged() -> list[Row]:
    usual = _usual_paged()
    return [
        *_caches(usual),
        Row("H", _changed(usual, "head_dim", (*HEADS, 512, 576, 640))),
        Row("head size of values", _changed(usual, "value_dim", (*HEADS, 512, 576))),
        Row("latent caches", _flag(usual, key_heads=1, head_dim=576, value_dim=512, has_value_pages=False)),
        Row("`page_size`", _changed(usual, "page_size", (1, 7, 16, 64, 1000))),
        Row("T", _changed(usual, "query_tokens", (1, 8, 64, 500))),
        Row("scales", {how: replace(usual, value_scale=how) for how in ("head", "token")}),
        Row("windows", _flag(usual, window=(127, 0))),
        Row("soft caps", _flag(usual, soft_cap=30.0)),
        Row("sinks", _flag(usual, has_sinks=True)),
        Row("`is_causal=False`", _flag(usual, is_causal=False)),
        Row("contiguous caches", _flag(usual, has_page_table=False, num_pages=8, max_pages=1)),
        Row("splits, `split_size`", _flag(usual, num_splits=8, split_size=256)),
    ]


def _append() -> list[Row]:
    usual = AppendProblem(
        tokens=8, batch=8, query_tokens=1, key_heads=2, head_dim=64, value_dim=64, dtype="bfloat16",
        key_dtype="bfloat16", value_dtype="bfloat16", num_pages=1024, page_size=16, max_pages=128,
    )  # fmt: skip
    rotary = RotaryProblem(
        interleaved=False, query=True, key=True, value=False, table_rows=2048, table_dtype="float32",
        positions="sequence",
    )  # fmt: skip

    def of(dtype: str, cache: str) -> AppendProblem:
        return replace(usual, dtype=dtype, key_dtype=cache, value_dtype=cache)

    return [
        Row("dtype of keys, values and cache", {dtype: of(dtype, dtype) for dtype in FLOATS}),
        Row("8-bit cache, 16-bit keys", {dtype: of("bfloat16", dtype) for dtype in EIGHT_BIT_DTYPES}),
        Row("8-bit cache, float32 keys", {dtype: of("float32", dtype) for dtype in EIGHT_BIT_DTYPES}),
        Row("H", _changed(usual, "head_dim", (1, 3, 64, 80, 256, 512, 1024, 1025))),
        Row("latent caches", _flag(usual, has_values=False, value_dim=0)),
        Row("packed tokens", _flag(usual, query_tokens=None, has_query_lengths=True)),
        Row("rotary embedding", _flag(usual, rotary=rotary)),
        Row("rotary tables", {t: replace(usual, rotary=replace(rotary, table_dtype=t)) for t in FLOATS}),
        Row("scales", {how: replace(of("bfloat16", "float8_e4m3fn"), key_scale=how) for how in ("head", "token")}),
        Row("mean keys of blocks", _flag(usual, block_size=128, max_blocks=16)),
    ]


def _moba_paged() -> list[Row]:
    paged = _usual_paged()

    def of(paged: PagedProblem, **changes: int) -> MoBAPagedProblem:
        return replace(MoBAPagedProblem(paged=paged, block_size=128, max_blocks=16, slots=7), **changes)

    return [
        *(Row(row.label, {name: of(call) for name, call in row.calls.items()}) for row in _caches(paged)),
        Row("H", {size: of(replace(paged, head_dim=size)) for size in HEADS}),
        Row("`page_size`", {size: of(replace(paged, page_size=size)) for size in (1, 7, 16, 64, 1000)}),
        Row("`block_size`", {size: of(paged, block_size=size) for size in (16, 48, 128, 1024, 4096)}),
        Row("T", {tokens: of(replace(paged, query_tokens=tokens)) for tokens in (1, 8, 64)}),
    ]


def _fused() -> list[Row]:
    def of(dtype: str = "bfloat16", head_dim: int = 64, value_dim: int = 64, tokens: int = 256) -> Call:
        shapes = [(1, tokens, 2, head_dim), (1, tokens, 2, head_dim), (1, tokens, 2, value_dim)]
        with jax.enable_x64(dtype == "float64"):
            arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
            (regions,) = trace(_attention, tuple(arrays), {}).regions.values()
        return regions[0]

    sizes = (1, 8, 20, 64, 100, 128, 200, 256, 257, 320)
    return [
        Row("dtype", {dtype: of(dtype) for dtype in (*EIGHT_BIT_FLOATS, *FLOATS)}),
        Row("head size", {size: of(head_dim=size, value_dim=size) for size in sizes}),
        Row("head size of values", {size: of(value_dim=size) for size in sizes}),
        Row("any number of tokens", {"": of(tokens=77)}),
        Row("no tokens", {"": of(tokens=0)}),
    ]


def _attention(query: Any, key: Any, value: Any) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.125
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)


_KERNELS = "blockdiag.triton_kernels"
TABLES = (
    Table("supported", "block_diagonal.md", BLOCK_DIAGONAL, f"{_KERNELS}.block_diagonal.plans", _block_diagonal),
    Table("supported", "moba.md", MOBA, f"{_KERNELS}.moba.plans", _moba),
    Table("supported-convolution", "moba.md", KEY_CONVOLUTION, f"{_KERNELS}.key_convolution.plans", _key_convolution),
    Table("supported", "decode.md", PAGED, f"{_KERNELS}.paged.plans", _paged),
    Table("supported-append", "decode.md", APPEND, f"{_KERNELS}.append.plans", _append),
    Table("supported-moba", "decode.md", MOBA_PAGED, f"{_KERNELS}.moba_paged.plans", _moba_paged),
    Table("supported", "fusion.md", FUSE, None, _fused),
)


def section(table: Table) -> str:
    """Return the table in Markdown, followed by the error messages for unsupported calls."""
    implementations = table.operation.implementations
    # Whether triton is installed here is not asked: that is a matter of the machine.
    columns: dict[str, Supports] = {f"`{name}`": x.load().supports for name, x in implementations.items()}
    where = ["CUDA; a CPU's interpreter" if x.has_interpreter else "everywhere" for x in implementations.values()]
    if table.native is not None:
        columns["torch on CUDA"] = importlib.import_module(table.native).supports
        where.append("CUDA")
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", f"| runs on | {' | '.join(where)} |"]
    reasons: dict[str, list[str]] = {}
    for row in table.rows():
        cells = []
        for column, supports in columns.items():
            answers = {name: supports(call) for name, call in row.calls.items()}
            cells.append(_cell(answers))
            declined = [reason for reason in answers.values() if reason is not None]
            if declined:
                reasons.setdefault(declined[-1], []).append(column)
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    if reasons:
        lines += ["", "Errors for unsupported calls; a row with several shows the last:", ""]
    for reason, by in reasons.items():
        text = f"- {' and '.join(dict.fromkeys(by))}: {reason}."
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _cell(answers: Mapping[int | str, str | None]) -> str:
    """Describe in words which calls of a row are supported."""
    names = list(answers)
    taken = [name for name, reason in answers.items() if reason is None]
    if names == [""]:
        return "yes" if taken else "no"
    if not taken:
        return "none"
    if not all(isinstance(name, int) for name in names):
        return ", ".join(str(name) for name in taken)
    return "any" if taken == names else _numbers(taken, names)


def _numbers(taken: Sequence[Any], asked: Sequence[Any]) -> str:
    """Describe supported numbers as a range or as multiples, whichever matches the numbers that were tried."""
    if len(taken) == 1:
        return str(taken[0])
    low, high = taken[0], taken[-1]
    if taken == [number for number in asked if low <= number <= high]:
        return f"up to {high}" if low == asked[0] else f"{low} to {high}"
    for step in range(high, 1, -1):
        if taken == [number for number in asked if low <= number <= high and number % step == 0]:
            return f"multiples of {step}, {low} to {high}"
    return ", ".join(map(str, taken))


def with_section(text: str, marker: str, content: str) -> str:
    """Return a page's text with new content between its markers.

    Raises:
        ValueError: the page does not have each marker exactly once.
    """
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"the page must have {start} and {end} once each")
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n{content}\n{end}", text, flags=re.DOTALL)


def written(page: Path) -> str:
    """Return the text of a page with its tables up to date."""
    tables = [table for table in TABLES if table.page == page.name]
    return functools.reduce(lambda text, x: with_section(text, x.marker, section(x)), tables, page.read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a page shows something else")
    is_check = parser.parse_args(arguments).check
    for name in dict.fromkeys(table.page for table in TABLES):
        page = DOCS / name
        text = written(page)
        if is_check and text != page.read_text():
            sys.exit(f"{name} is not what the implementations declare; run python docs/supported_tables.py")
        if not is_check:
            page.write_text(text)


if __name__ == "__main__":
    main()
