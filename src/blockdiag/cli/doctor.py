"""`python -m blockdiag doctor`: what this machine has, and which implementation of each op can run on it."""

import dataclasses
import importlib.metadata
import json
import platform
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blockdiag import dispatch
from blockdiag.bench.records import driver_version

PACKAGES = ("blockdiag", "jax", "jaxlib", "jax-cuda13-plugin", "triton", "torch", "flax", "numpy")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device as JAX sees it."""

    name: str
    platform: str
    kind: str
    compute_capability: str | None
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ImplementationReport:
    """Whether one implementation of one op can run in this process.

    Attributes:
        reason: None where it is available, otherwise why it is not.
        runs_on: where it runs in this process.
    """

    op: str
    implementation: str
    reason: str | None
    runs_on: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Everything that doctor says.

    Attributes:
        python: version of the interpreter.
        system: operating system and processor.
        driver: version of the NVIDIA driver, "none" or "unknown".
        packages: version of each package that matters, None where it is not installed.
        devices: what JAX finds, the default device first.
        implementations: every implementation of every op.
    """

    python: str
    system: str
    driver: str
    packages: dict[str, str | None]
    devices: list[DeviceReport]
    implementations: list[ImplementationReport]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show devices, versions, and which implementation of each op can run here, or the reason why it cannot."""
    report = inspect_machine()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    console = Console()
    console.print(_versions_table(report))
    console.print(_devices_table(report))
    console.print(_implementations_table(report))


def inspect_machine() -> Report:
    """Looks at this machine; starts JAX's backends."""
    return Report(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        driver=driver_version(),
        packages={name: _package_version(name) for name in PACKAGES},
        devices=[_describe(device) for device in jax.devices()],
        implementations=_implementations(has_gpu=any(device.platform == "gpu" for device in jax.devices())),
    )


def _implementations(*, has_gpu: bool) -> list[ImplementationReport]:
    """Asks every implementation of every op."""
    return [
        ImplementationReport(
            op="block_diagonal_attention",
            implementation=name,
            reason=implementation.why_unavailable(),
            runs_on=_where_it_runs(implementation, has_gpu),
        )
        for name, implementation in dispatch.IMPLEMENTATIONS.items()
    ]


def _where_it_runs(implementation: dispatch.Implementation, has_gpu: bool) -> str:
    if not implementation.has_interpreter:
        return "any device"
    return "CUDA GPU" if has_gpu else "CPU interpreter, slow"


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(device: jax.Device) -> DeviceReport:
    statistics: dict[str, Any] = device.memory_stats() or {}
    return DeviceReport(
        name=str(device),
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
        memory_bytes=statistics.get("bytes_limit"),
    )


def _versions_table(report: Report) -> Table:
    table = Table(title="Versions")
    table.add_column("what")
    table.add_column("version")
    table.add_row("system", report.system)
    table.add_row("python", report.python)
    table.add_row("NVIDIA driver", report.driver)
    for name, version in report.packages.items():
        table.add_row(name, version or "[dim]not installed[/dim]")
    return table


def _devices_table(report: Report) -> Table:
    table = Table(title="Devices")
    for heading in ("device", "kind", "compute capability", "memory for JAX"):
        table.add_column(heading)
    for device in report.devices:
        memory = "" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.1f} GiB"
        table.add_row(device.name, device.kind, device.compute_capability or "", memory)
    return table


def _implementations_table(report: Report) -> Table:
    table = Table(title="Implementations")
    for heading in ("op", "implementation", "here"):
        table.add_column(heading)
    for entry in report.implementations:
        # Reasons are other people's text: square brackets in them are no markup.
        here = f"[green]available[/green], {entry.runs_on}" if entry.reason is None else escape(entry.reason)
        table.add_row(entry.op, entry.implementation, here)
    return table
