"""`python -m blockdiag doctor`: what this machine has, and which implementation of each op can run on it."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
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
class TorchReport:
    """What matters where torch and JAX share a process.

    Attributes:
        cuda, cudnn, nccl: versions that torch was built with or has loaded, None without CUDA.
        devices: names of the CUDA devices that torch sees.
        same_devices: whether JAX sees the same ones, by name and number.
        preallocates: whether JAX takes its share of a GPU's memory at its first use.
        jax_share: the share of a GPU's memory that JAX may use.
        jax_memory_bytes: that share of the first GPU in bytes, None without one.
    """

    cuda: str | None
    cudnn: str | None
    nccl: str | None
    devices: list[str]
    same_devices: bool
    preallocates: bool
    jax_share: float
    jax_memory_bytes: int | None


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
        torch: None where torch is not installed.
    """

    python: str
    system: str
    driver: str
    packages: dict[str, str | None]
    devices: list[DeviceReport]
    implementations: list[ImplementationReport]
    torch: TorchReport | None


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
    if report.torch is not None:
        console.print(_torch_table(report.torch))


def inspect_machine() -> Report:
    """Looks at this machine; starts JAX's backends."""
    return Report(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        driver=driver_version(),
        packages={name: _package_version(name) for name in PACKAGES},
        devices=[_describe(device) for device in jax.devices()],
        implementations=_implementations(has_gpu=any(device.platform == "gpu" for device in jax.devices())),
        torch=_describe_torch() if importlib.util.find_spec("torch") is not None else None,
    )


def _implementations(*, has_gpu: bool) -> list[ImplementationReport]:
    """Asks every implementation of every op."""
    return [
        ImplementationReport(
            op=dispatch.OPERATION_NAMES[operation],
            implementation=name,
            reason=implementation.why_unavailable(),
            runs_on=_where_it_runs(implementation, has_gpu),
        )
        for operation, implementations in dispatch.OPERATIONS.items()
        for name, implementation in implementations.items()
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


def _describe_torch() -> TorchReport:
    import torch

    has_cuda = torch.version.cuda is not None
    cudnn = torch.backends.cudnn.version() if has_cuda else None
    names = {index: torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    preallocates, share = _memory_settings(os.environ)
    return TorchReport(
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
        devices=list(names.values()),
        same_devices=names == {device.local_hardware_id: device.device_kind for device in gpus},
        preallocates=preallocates,
        jax_share=share,
        jax_memory_bytes=_describe(gpus[0]).memory_bytes if gpus else None,
    )


def _memory_settings(environment: Mapping[str, str]) -> tuple[bool, float]:
    """Whether JAX preallocates GPU memory, and which share it may use: the variables that its GPU client reads."""
    share = environment.get("XLA_CLIENT_MEM_FRACTION") or environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
    pools = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() != "platform"
    wanted = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    return pools and wanted, float(share)


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


def _torch_table(torch: TorchReport) -> Table:
    table = Table(title="torch beside JAX")
    table.add_column("what")
    table.add_column("here")
    table.add_row("CUDA, cuDNN, NCCL of torch", ", ".join(x or "none" for x in (torch.cuda, torch.cudnn, torch.nccl)))
    table.add_row("CUDA devices of torch", escape(", ".join(torch.devices)) or "none")
    same = "yes" if torch.same_devices else "[red]no[/red]: set CUDA_VISIBLE_DEVICES before both start"
    table.add_row("the same GPUs as JAX", same if torch.devices or not torch.same_devices else "neither has one")
    amount = f"{torch.jax_share:.0%} of a GPU"
    if torch.jax_memory_bytes is not None:
        amount += f", {torch.jax_memory_bytes / 2**30:.1f} GiB"
    if torch.preallocates:
        amount += " at its first use; XLA_PYTHON_CLIENT_PREALLOCATE=false takes it as needed"
    else:
        amount += " at most, as needed"
    table.add_row("memory for JAX", amount)
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
