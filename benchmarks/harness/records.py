"""Rows of the benchmark's CSV files, and reading and writing them."""

import datetime
import importlib
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import pandas

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
        useful_tflop, useful_gb: arithmetic and bytes that the pass cannot do without; see `benchmarks.moba.cases`.
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
        group: what the row is measured for; see `benchmarks.paged.cases.GROUPS`.
        case: name of the row within its group; `workload` is that of the shape, batch, lengths and heads.
        cache, scales: dtype name of keys and values, and how their scales are given.
        page_size: tokens of a page; None for a contiguous cache.
        query_tokens: queries of each sequence.
        splits: parts of the keys; `is_chosen` is 1 where the library chose them from the shapes.
        read_gb: bytes that must be read, each once.
        read_tb_per_s: bandwidth of reading that the same run measured; `floor_us` is `read_gb` at that rate.
        matmul_tflops: of prompts, the rate of products that the same run measured; `floor_us` is then that of products.
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
    matmul_tflops: float | None = None
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
    def case(self) -> str:
        """The variant."""
        return self.variant

    @property
    def speed_up(self) -> float | None:
        """How many times as long XLA takes; None where either was not measured."""
        return None if self.ours_ms is None or self.xla_ms is None else self.xla_ms / self.ours_ms


@dataclass(frozen=True, kw_only=True)
class FuseTiming(Measured):
    """One row of the CSV of fused functions: one pass of one implementation of one function.

    Attributes:
        pass_name: "fwd" or "fwd+bwd"; the latter has the gradients of all floating arguments, biases included.
        group, case: the function, and the workload within it; see `benchmarks.fuse.cases`.
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


@dataclass(frozen=True, kw_only=True)
class DenseTiming(FuseTiming):
    """One row of the CSV of dense attention: one pass of one implementation, as of fused functions.

    Attributes:
        tflops: `useful_tflop` per second; masked scores do not count.
        over_cudnn: time over that of cuDNN through `jax.nn`, of the same case and pass in the same rounds.
    """

    tflops: float | None = None
    over_cudnn: float | None = None


type Row = (
    Timing | ErrorRow | HostRow | MoBATiming | PagedTiming | GalleryTiming | FuseTiming | DenseTiming | DeviceTiming
)


@dataclass(frozen=True, kw_only=True)
class DeviceTiming(Measured):
    """One row of the CSV of several devices: a program, forward and backward.

    Attributes:
        mesh: kind of the mesh's axes; "one device" for the part of one device alone, the slowest one's.
        division: what devices share.
        transfers: what moves data between devices, "kernels" (NCCL's default) or "copy engines"; see
            `benchmarks.devices.programs.transfers`.
        rows, heads: of one device's part.
        perfect_ms: the time of the slowest device for its part alone, in the same run.
        collectives: of the compiled program, with their numbers.
        temporary_mib: temporary memory of the program on each device.
    """

    op: str
    mesh: str
    division: str
    transfers: str
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

    @property
    def case(self) -> str:
        """The operation, its tokens, and the axis that devices share."""
        return f"{self.op}, {self.tokens} tokens, {self.division}"

    @property
    def implementation(self) -> str:
        """The kind of mesh, or the strategy."""
        return self.mesh


_KEYS: dict[type, tuple[str, ...]] = {
    Timing: ("op", "pass_name", "case", "implementation", "device"),
    ErrorRow: ("op", "case", "implementation", "tensor", "device"),
    HostRow: ("op", "pass_name", "implementation", "device"),
    MoBATiming: ("op", "pass_name", "case", "implementation", "device"),
    PagedTiming: ("op", "group", "case", "implementation", "device"),
    FuseTiming: ("op", "pass_name", "case", "implementation", "device"),
    DenseTiming: ("op", "pass_name", "case", "implementation", "device"),
    GalleryTiming: ("variant", "pass_name", "device"),
    DeviceTiming: ("op", "mesh", "division", "transfers", "devices", "tokens", "device"),
}


def _fields(kind: type) -> dict[str, str]:
    """Return the field name behind each column of one kind of row, in order: where it was measured comes last."""
    last = [field.name for field in fields(Measured)] if issubclass(kind, Measured) else []
    names = [field.name for field in fields(kind) if field.name not in last] + last
    return {"pass" if name == "pass_name" else name: name for name in names}


def columns(kind: type) -> list[str]:
    """Return the column names of one kind of row, in order."""
    return list(_fields(kind))


def _dtypes(kind: type) -> dict[str, Any]:
    """Return the pandas dtype of each column."""
    hints = get_type_hints(kind)
    by_hint = {str: object, int: "Int64", int | None: "Int64"}
    return {column: by_hint.get(hints[name], "float64") for column, name in _fields(kind).items()}


def _frame(kind: type, rows: Iterable[Any]) -> pandas.DataFrame:
    """Return rows as a table; text is put on one line."""
    cells = [[getattr(row, name) for name in _fields(kind).values()] for row in rows]
    texts = [[" ".join(cell.split()) if isinstance(cell, str) else cell for cell in row] for row in cells]
    return pandas.DataFrame(texts, columns=columns(kind), dtype=object).astype(_dtypes(kind))


def _rows(kind: type, frame: pandas.DataFrame) -> list[Any]:
    """Return the rows of a table; missing numbers are None."""
    cells = [[None if pandas.isna(cell) else cell for cell in frame[column].tolist()] for column in frame.columns]
    names = _fields(kind).values()
    return [kind(**dict(zip(names, row, strict=True))) for row in zip(*cells, strict=True)]


def _read(path: Path, kind: type) -> pandas.DataFrame:
    # Cells are read as text, because Pandas's parser may round the last digit of a number.
    frame = pandas.read_csv(path, dtype=object, keep_default_na=False)
    if frame.columns.to_list() != columns(kind):
        raise ValueError(
            f"{path} has columns {frame.columns.to_list()}, expected {columns(kind)}; delete it and measure again"
        )
    for column, dtype in _dtypes(kind).items():
        if dtype is not object:
            frame[column] = frame[column].replace("", None).astype("float64").astype(dtype)
    return frame


def _write(path: Path, frame: pandas.DataFrame) -> None:
    """Write a table with six significant digits; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def write_rows(path: Path, kind: type, rows: Iterable[Any]) -> None:
    """Write rows of one kind with a header; missing folders are created."""
    _write(path, _frame(kind, rows))


def read_rows(path: Path, kind: type) -> list[Any]:
    """Read the rows of one kind from a file that `write_rows` wrote.

    Raises:
        ValueError: the file has other columns.
    """
    return _rows(kind, _read(path, kind))


def merge_rows(
    path: Path, kind: type, rows: Sequence[Row], *, is_measured: Callable[[Any], bool] = lambda row: True
) -> list[Any]:
    """Write `rows` into `path`, each in the place of the row of the same key, and return what the file now holds.

    Args:
        path: of the file, which may be missing.
        kind: of the rows.
        rows: of which the last one of a key is kept.
        is_measured: rows for which it is false replace no row for which it is true.
    """
    known = read_rows(path, kind) if path.exists() else []
    kept = {key_of(row) for row in known if is_measured(row)}
    frame = _frame(kind, [*known, *(row for row in rows if is_measured(row) or key_of(row) not in kept)])
    place = frame.groupby(["pass" if name == "pass_name" else name for name in _KEYS[kind]], sort=False).ngroup()
    frame = frame.loc[place.drop_duplicates(keep="last").sort_values().index]
    _write(path, frame)
    return _rows(kind, frame)


def key_of(row: Row) -> tuple[Any, ...]:
    """Return what identifies a row in its file."""
    return tuple(getattr(row, name) for name in _KEYS[type(row)])


def is_attempted(row: Any) -> bool:
    """Return whether a row was measured or has failed, rather than not been run."""
    return not row.note.startswith("not run")


_TIMES = ("median_ms", "median_us", "ours_ms", "xla_ms")


def is_timed(row: Any) -> bool:
    """Return whether a row holds any time."""
    return any(getattr(row, name, None) is not None for name in _TIMES)


def is_complete(row: Any) -> bool:
    """Return whether a row holds all its times."""
    return all(getattr(row, name) is not None for name in _TIMES if hasattr(row, name))


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
