"""Rows of the benchmark's CSV files, and reading and writing them."""

import csv
import datetime
import importlib
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from blockdiag.cli.machine import driver_version


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What every row says about where it was measured."""

    device: str
    driver: str
    jax: str
    jaxlib: str
    torch: str
    triton: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Measured(Environment):
    """Last columns of every row of times or errors; `note` says why numbers are missing."""

    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Timing(Measured):
    """One row of the timing CSV; the file's columns are these fields, and then those of `Measured`.

    Numbers that were not measured are None and empty in the file; `note` then says why. `pass` is a keyword in
    Python, so the field is `pass_name` and the column `pass`.
    """

    op: str
    pass_name: str
    case: str
    implementation: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    floor_ms: float | None = None
    ratio_to_floor: float | None = None
    gb_per_s: float | None = None
    copy_gb_per_s: float | None = None
    matmul_tflops: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ErrorRow(Measured):
    """One row of the error CSV: distance of one tensor from the float64 oracle.

    Attributes:
        max_error, mean_error, relative_error: largest over all seeds, and means over the seeds.
        mean_over_flash, max_over_flash: mean over the seeds of this implementation's mean (largest) error divided by
            FlashAttention 2's on the same inputs; `_se` is the standard error of that mean.
    """

    op: str
    case: str
    implementation: str
    tensor: str
    tokens: int
    seeds: int
    max_error: float | None = None
    mean_error: float | None = None
    relative_error: float | None = None
    mean_over_flash: float | None = None
    mean_over_flash_se: float | None = None
    max_over_flash: float | None = None
    max_over_flash_se: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostRow(Measured):
    """One row of the host-time CSV: microseconds until a jitted call returns, without waiting for the device."""

    op: str
    pass_name: str
    implementation: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    over_trivial_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class MoBATiming(Measured):
    """One row of MoBA's CSV: one pass of one implementation on one workload.

    Attributes:
        pass_name: "routing" (mean keys, scores, choice, lists), "fwd" (routing included), "bwd" or "fwd+bwd".
        tokens, batch: tokens of a sequence, and sequences.
        useful_tflop, useful_gb: arithmetic and bytes that the pass cannot do without; see `moba_cases`.
        floor_ms: the longer of both at the rates that this run measured, `matmul_tflops` and `copy_gb_per_s`.
        extra_bytes: device memory beyond inputs and outputs; `peak_bytes` with them.
        relative_error: relative L2 norm of output and gradients (the largest of what the pass returns) against float32
            attention under the same routing, over few tokens.
    """

    op: str
    pass_name: str
    case: str
    implementation: str
    tokens: int
    batch: int
    query_heads: int
    key_heads: int
    head_dim: int
    block_size: int
    top_k: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    useful_tflop: float | None = None
    useful_gb: float | None = None
    floor_ms: float | None = None
    ratio_to_floor: float | None = None
    extra_bytes: int | None = None
    peak_bytes: int | None = None
    relative_error: float | None = None
    copy_gb_per_s: float | None = None
    matmul_tflops: float | None = None


@dataclass(frozen=True, kw_only=True)
class PagedTiming(Measured):
    """One row of the CSV of paged attention: one implementation on one workload.

    Attributes:
        group: what the row is measured for; see `paged_cases.GROUPS`.
        case: name of the row within its group; `workload` is that of the shape, batch, lengths and heads.
        cache, scales: dtype name of keys and values, and how their scales are given.
        page_size: tokens of a page; None for a contiguous cache.
        query_tokens: queries of each sequence.
        splits: parts of the keys; `is_chosen` is 1 where the library chose them from the shapes.
        read_gb: bytes that must be read, each once.
        read_tb_per_s: bandwidth of reading that the same run measured; `floor_us` is `read_gb` at that rate.
        relative_error: relative L2 norm of the output's distance from float64, of the sequences that were checked.
    """

    op: str
    group: str
    case: str
    implementation: str
    workload: str
    cache: str
    scales: str
    page_size: int | None = None
    batch: int
    kv_length: int
    query_tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    splits: int | None = None
    is_chosen: int | None = None
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    read_gb: float | None = None
    tb_per_s: float | None = None
    read_tb_per_s: float | None = None
    floor_us: float | None = None
    ratio_to_floor: float | None = None
    relative_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class GalleryTiming(Measured):
    """One row of the gallery's CSV: one pass of a variant, fused and as XLA compiles it.

    Attributes:
        variant: its name in `fusion.gallery.VARIANTS`.
        pass_name: "fwd", or "fwd+bwd" with the gradients of all floating inputs.
        shape: sizes of the inputs, and the variant's options, as text.
        ours_ms, xla_ms: medians; the percentiles are those of the same samples.
        ours_bytes, xla_bytes: device memory of one call beyond its inputs and outputs.
        ours_error, xla_error: largest relative L2 norm of a result's distance from float32.
    """

    variant: str
    pass_name: str
    shape: str
    dtype: str
    ours_ms: float | None = None
    ours_p20_ms: float | None = None
    ours_p80_ms: float | None = None
    xla_ms: float | None = None
    xla_p20_ms: float | None = None
    xla_p80_ms: float | None = None
    ours_bytes: int | None = None
    xla_bytes: int | None = None
    ours_error: float | None = None
    xla_error: float | None = None

    @property
    def speed_up(self) -> float | None:
        """How many times as long XLA takes; None where either was not measured."""
        return None if self.ours_ms is None or self.xla_ms is None else self.xla_ms / self.ours_ms


@dataclass(frozen=True, kw_only=True)
class FuseTiming(Measured):
    """One row of the CSV of fused functions: one pass of one implementation of one function.

    Attributes:
        pass_name: "fwd" or "fwd+bwd"; the latter has the gradients of all floating arguments, biases included.
        group, case: the function, and the workload within it; see `fuse_cases`.
        rows: sequences that share a bias of pairs.
        useful_tflop, useful_gb: arithmetic and bytes that the pass cannot do without.
        floor_ms: the longer of both at the rates that this run measured, `matmul_tflops` and `copy_gb_per_s`.
        extra_bytes: device memory beyond inputs and outputs; `peak_bytes` with them.
        relative_error: relative L2 norm of the distance from float64, the largest of what the pass returns.
        first_compile_s: to trace, lower and compile the pass with nothing on disk, `first_kernels_s` of it by Triton.
        cached_compile_ms: the same with kernels on disk, in a process that has not seen them; `cached_kernels_ms` of
            it to read them.
    """

    op: str
    pass_name: str
    group: str
    case: str
    implementation: str
    batch: int
    rows: int
    tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    useful_tflop: float | None = None
    useful_gb: float | None = None
    floor_ms: float | None = None
    ratio_to_floor: float | None = None
    extra_bytes: int | None = None
    peak_bytes: int | None = None
    relative_error: float | None = None
    first_compile_s: float | None = None
    first_kernels_s: float | None = None
    cached_compile_ms: float | None = None
    cached_kernels_ms: float | None = None
    copy_gb_per_s: float | None = None
    matmul_tflops: float | None = None


type Row = Timing | ErrorRow | HostRow | MoBATiming | PagedTiming | GalleryTiming | FuseTiming | DeviceTiming


@dataclass(frozen=True, kw_only=True)
class DeviceTiming(Measured):
    """One row of the CSV of several devices: a program, forward and backward.

    Attributes:
        mesh: kind of the mesh's axes; "one device" for the part of one device alone, the slowest one's.
        division: what devices share.
        rows, heads: of one device's part.
        perfect_ms: the time of the slowest device for its part alone, in the same run.
        collectives: of the compiled program, with their numbers.
        temporary_mib: temporary memory of the program on each device.
    """

    op: str
    mesh: str
    division: str
    devices: int
    rows: int
    tokens: int
    heads: int
    head_dim: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    perfect_ms: float | None = None
    collectives: str = ""
    temporary_mib: float | None = None


_KEYS: dict[type, tuple[str, ...]] = {
    Timing: ("op", "pass_name", "case", "implementation", "device"),
    ErrorRow: ("op", "case", "implementation", "tensor", "device"),
    HostRow: ("op", "pass_name", "implementation", "device"),
    MoBATiming: ("op", "pass_name", "case", "implementation", "device"),
    PagedTiming: ("op", "group", "case", "implementation", "device"),
    FuseTiming: ("op", "pass_name", "case", "implementation", "device"),
    GalleryTiming: ("variant", "pass_name", "device"),
    DeviceTiming: ("op", "mesh", "division", "devices", "tokens", "device"),
}


def _column(field_name: str) -> str:
    """The file's name of a field."""
    return "pass" if field_name == "pass_name" else field_name


def _names(kind: type) -> list[str]:
    """Field names of one kind of row in the order of the file's columns: where it was measured comes last."""
    last = [field.name for field in fields(Measured)] if issubclass(kind, Measured) else []
    return [field.name for field in fields(kind) if field.name not in last] + last


def columns(kind: type) -> list[str]:
    """Column names of one kind of row, in order."""
    return [_column(name) for name in _names(kind)]


def _text(value: Any) -> str:
    """A cell: numbers with six significant digits, None empty, text on one line."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())


def write_rows(path: Path, kind: type, rows: Iterable[Any]) -> None:
    """Write rows of one kind with a header; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns(kind))
        writer.writerows([_text(getattr(row, name)) for name in _names(kind)] for row in rows)


def read_rows(path: Path, kind: type) -> list[Any]:
    """Rows of one kind from a file that `write_rows` wrote.

    Raises:
        ValueError: when the header is another one.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if header != columns(kind):
            raise ValueError(f"{path} has columns {header}, expected {columns(kind)}; delete it and measure again")
        hints = get_type_hints(kind)
        names = _names(kind)
        return [
            kind(**{name: _parse(hints[name], cell) for name, cell in zip(names, cells, strict=True)})
            for cells in reader
        ]


def _parse(hint: Any, cell: str) -> Any:
    """The value of a cell, by the field's type."""
    if hint is str:
        return cell
    if cell == "":
        return None
    return int(float(cell)) if hint in (int, int | None) else float(cell)


def key_of(row: Row) -> tuple[Any, ...]:
    """Return what names a row: of two rows with the same key the later one stays."""
    return tuple(getattr(row, name) for name in _KEYS[type(row)])


def merge_rows(path: Path, kind: type, rows: Sequence[Row]) -> list[Any]:
    """Write `rows` over the rows of the same key that `path` holds, keep its others, and return what it holds now."""
    merged = {key_of(row): row for row in (read_rows(path, kind) if path.exists() else [])}
    merged.update({key_of(row): row for row in rows})
    write_rows(path, kind, merged.values())
    return list(merged.values())


def is_timed(row: Any) -> bool:
    """Return whether a row holds any time."""
    times = ("median_ms", "median_us", "ours_ms", "xla_ms")
    return any(getattr(row, name, None) is not None for name in times)


def dates_of(rows: Iterable[Any]) -> str:
    """When rows were measured: a day, or the first and the last one."""
    days = sorted({row.date for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _version(package: str) -> str:
    """Installed version of a package, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def environment(device: str) -> Environment:
    """Versions of this process and today's date; `device` is the name the rows carry."""
    return Environment(
        device=device,
        driver=driver_version(),
        jax=_version("jax"),
        jaxlib=_version("jaxlib"),
        torch=_version("torch"),
        triton=_version("triton"),
        date=datetime.date.today().isoformat(),
    )


def recordable_failures() -> tuple[type[Exception], ...]:
    """What a baseline that cannot run raises: it becomes a row with its reason, and the others go on.

    Interrupts and exits are no part of it.
    """
    kinds: list[type[Exception]] = [
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        NameError,
        OSError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
        subprocess.SubprocessError,
    ]
    for module, name in (("triton.errors", "TritonError"), ("jaxlib.mlir.ir", "MLIRError")):
        if importlib.util.find_spec(module.split(".")[0]) is not None:
            kinds.append(getattr(importlib.import_module(module), name))
    return tuple(kinds)
