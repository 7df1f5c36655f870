"""`python -m blockdiag doctor`: report on this machine, and check every implementation of every op on it."""

import dataclasses
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blockdiag.cli.doctor_checks import Check, Outcome, attempt, checks, examine
from blockdiag.cli.doctor_features import features_table, gather_features
from blockdiag.cli.machine import driver_version
from blockdiag.common.features import Feature
from blockdiag.common.versions import DISTRIBUTION, TESTED, installed_version, other_distributions

PACKAGES = (DISTRIBUTION, "jax", "jaxlib", "jax-cuda13-plugin", "triton", "torch", "flax", "numpy")
EXTRAS = {"jax-cuda13-plugin": "cuda", "triton": "cuda", "torch": "torch", "flax": "flax"}
"""For each optional package, the extra that installs it."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device as JAX reports it."""

    name: str
    platform: str
    kind: str
    compute_capability: str | None
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ImplementationReport:
    """Availability and correctness of one implementation of one op in this process.

    Attributes:
        framework: the framework that calls the op: "JAX", "torch", or "both" for conversions between them.
        runs_on: the device that it runs on in this process.
        outcome: the result of its check.
    """

    framework: str
    op: str
    implementation: str
    runs_on: str
    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class TorchReport:
    """Facts that matter if torch and JAX share a process.

    Attributes:
        cuda, cudnn, nccl: versions that torch was built with or has loaded, None without CUDA.
        devices: names of the CUDA devices that torch sees.
        same_devices: True if JAX sees the same ones, by name and number.
        preallocates: True if JAX allocates its share of a GPU's memory at first use.
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
    """The complete report of doctor.

    Attributes:
        python: version of the interpreter.
        system: operating system and processor.
        driver: version of the NVIDIA driver, "none" or "unknown".
        packages: version of each relevant package, None if it is not installed.
        remarks: by package, what to install if the package is missing or its version is untested.
        other_distributions: versions of other distributions that write into the `blockdiag` package.
        features: private interfaces of other packages, and whether they were found.
        devices: the devices that JAX finds, the default device first.
        implementations: every implementation of every op.
        torch: None if torch is not installed or cannot be imported.
    """

    python: str
    system: str
    driver: str
    packages: dict[str, str | None]
    remarks: dict[str, str]
    other_distributions: dict[str, str]
    features: tuple[Feature, ...]
    devices: list[DeviceReport]
    implementations: list[ImplementationReport]
    torch: TorchReport | None


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Run nothing; only say what is available.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show devices and versions, and run a small call of each op in each implementation, beside the reference.

    For each implementation, print that it is correct and how long the call took, or why it failed or cannot run here.
    Exits with 1 if an available implementation fails or is wrong.
    """
    # Progress goes to stderr, as it is not part of the report. If a kernel crashes the process, the screen still shows
    # the check that ran last.
    with Console(stderr=True).status("looking at this machine") as status:
        report = inspect_machine(quick=quick, say=status.update)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print(report)
    if any(entry.outcome.failure is not None for entry in report.implementations):
        raise typer.Exit(1)


def inspect_machine(*, quick: bool, say: Callable[[str], None]) -> Report:
    """Look at this machine and, unless `quick`, run the checks; starts JAX's backends."""
    packages = {name: installed_version(name) for name in PACKAGES}
    remarks = {name: _remark(name, version) for name, version in packages.items()}
    features, failure = attempt(gather_features)
    # Failures here are ignored, because the checks fail for the same reason and report it.
    devices, _ = attempt(jax.devices)
    beside, _ = attempt(_describe_torch)
    return Report(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        driver=driver_version(),
        packages=packages,
        remarks={name: remark for name, remark in remarks.items() if remark is not None},
        other_distributions=other_distributions(),
        features=features or (Feature("private interfaces", False, failure or "none found"),),
        devices=[_describe(device) for device in devices or ()],
        implementations=[_report_on(check, quick, say) for check in checks()],
        torch=beside,
    )


def _report_on(check: Check, quick: bool, say: Callable[[str], None]) -> ImplementationReport:
    say(f"{check.framework}: {check.op}, {check.implementation}")
    return ImplementationReport(
        framework=check.framework,
        op=check.op,
        implementation=check.implementation,
        runs_on=check.runs_on,
        outcome=examine(check, quick=quick),
    )


def _remark(package: str, version: str | None) -> str | None:
    """Return what to install if a package is missing or its version is untested, or None if all is well."""
    if version is None:
        extra = EXTRAS.get(package)
        if extra is None or (extra == "cuda" and platform.system() != "Linux"):
            return None
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    tested = TESTED.get(package)
    if tested is None or version in tested:
        return None
    return f"this version is untested, tested are {tested}; pip install '{tested.requirement(package)}'"


def _describe(device: jax.Device) -> DeviceReport:
    statistics: dict[str, Any] = device.memory_stats() or {}
    return DeviceReport(
        name=str(device),
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
        memory_bytes=statistics.get("bytes_limit"),
    )


def _describe_torch() -> TorchReport | None:
    if importlib.util.find_spec("torch") is None:
        return None
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
    """Return whether JAX preallocates GPU memory and the share it may use, from the variables its GPU client reads."""
    share = environment.get("XLA_CLIENT_MEM_FRACTION") or environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
    pools = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() != "platform"
    wanted = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    return pools and wanted, float(share)


def _print(report: Report) -> None:
    console = Console()
    if report.other_distributions:
        console.print(f"[red]{escape(_conflict(report.other_distributions))}[/red]")
    console.print(_versions_table(report))
    console.print(_devices_table(report))
    console.print(_implementations_table(report))
    console.print(features_table(report.features))
    if report.torch is not None:
        console.print(_torch_table(report.torch))


def _conflict(others: Mapping[str, str]) -> str:
    """Return a message about other distributions that install a package `blockdiag`, with the remedy."""
    names = " and ".join(f"{name} {version}" for name, version in others.items())
    return (
        f"{names} and {DISTRIBUTION} install a package of the same name, blockdiag, and overwrite each other's files. "
        f"Keep one: pip uninstall {' '.join(others)} {DISTRIBUTION}, then pip install {DISTRIBUTION}"
    )


def _versions_table(report: Report) -> Table:
    table = Table(title="Versions")
    for heading in ("what", "version", "remark"):
        table.add_column(heading)
    table.add_row("system", report.system)
    table.add_row("python", report.python)
    table.add_row("NVIDIA driver", report.driver)
    for name, version in report.packages.items():
        table.add_row(name, version or "[dim]not installed[/dim]", escape(report.remarks.get(name, "")))
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
    for heading in ("called by", "op", "implementation", "on", "here"):
        table.add_column(heading)
    for entry in report.implementations:
        table.add_row(entry.framework, entry.op, entry.implementation, entry.runs_on, _result(entry.outcome))
    return table


def _result(outcome: Outcome) -> str:
    """Return the outcome of a check as text with markup."""
    # Reasons may quote other packages' messages, so their square brackets must not be parsed as markup.
    if outcome.reason is not None:
        return escape(outcome.reason)
    if outcome.failure is not None:
        return f"[red]failed[/red]: {escape(outcome.failure)}"
    if outcome.seconds is None:
        return "[green]available[/green]"
    return f"[green]ok[/green], {outcome.seconds:.1f} s"
