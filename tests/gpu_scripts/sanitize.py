"""Run small calls of every kernel family under the tools of compute-sanitizer.

    PYTHONPATH=src python tests/gpu_scripts/sanitize.py              # everything; `./do sanitize` in a checkout
    PYTHONPATH=src python tests/gpu_scripts/sanitize.py --list       # names of the families
    PYTHONPATH=src python tests/gpu_scripts/sanitize.py --families moba,moba_torch --tools racecheck
    PYTHONPATH=src python tests/gpu_scripts/sanitize.py --dry        # without a GPU: arguments are valid, kernels named

Each family runs in a separate process for each tool, so that a crash hides no other family. `plain` runs a family
without a tool; it comes first, fills the compile caches, and shows which calls fail anyway. The exit status is 1 if a
tool reports an unexplained error, a call raises or differs from the CPU, or a process does not finish. Explained
reports are listed in sanitize_known.py with reasons; they are counted and printed.

Every array is a separate allocation. Otherwise initcheck and memcheck would treat memory that an allocator reuses as
initialised and in bounds.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu_scripts.sanitize_calls import (  # noqa: E402
    FAMILIES,
    Call,
    difference,
    launched_kernels,
    to_numpy,
)
from tests.gpu_scripts.sanitize_known import DROPPED, KNOWN, WHY_DROPPED, Report, explain, lines_in, parse_reports  # noqa: E402

PLAIN = "plain"
TOOLS = ("memcheck", "racecheck", "initcheck")
# For 16-bit results, forward and backward. Near ties of MoBA's routing may be decided differently for a query or two.
TOLERANCE = 0.05
FINISHED = "all ran"
# The newest compute capability with hand-written kernels.
DRY_ARCH = 90


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The reports of one process.

    Attributes:
        ran: calls with the expected results.
        failed: other calls, with the reason.
        finished: whether the process ran all calls.
        errors: the tool's error count; None without a tool or a summary.
        explained: the number of reports that each name of `KNOWN` explains.
        rest: the other reports, with their counts.
        seconds: the time of the process.
    """

    family: str
    tool: str
    ran: int
    failed: tuple[str, ...]
    finished: bool
    errors: int | None
    explained: Mapping[str, int]
    rest: Mapping[Report, int]
    seconds: float

    @property
    def unexplained(self) -> int:
        """Return the number of unexplained errors, including those that are counted but not printed."""
        return max(sum(self.rest.values()), (self.errors or 0) - sum(self.explained.values()))

    @property
    def is_clean(self) -> bool:
        """Return whether there is nothing to examine."""
        is_reported = self.tool == PLAIN or self.errors is not None
        return self.finished and not self.failed and is_reported and not self.unexplained


def expected_results(call: Call, store: Path | None) -> list[np.ndarray]:
    """Return the CPU's results of a call, computed once for all tools."""
    file = None if store is None else store / (re.sub(r"\W+", "_", call.name) + ".npz")
    if file is not None and file.exists():
        with np.load(file) as kept:
            return [kept[f"arr_{index}"] for index in range(len(kept.files))]
    with jax.default_device(jax.devices("cpu")[0]):
        results = [to_numpy(x) for x in call.compute(call.expected)]
    if file is not None:
        # A process for another tool may write the same file.
        own = file.with_suffix(f".{os.getpid()}.npz")
        np.savez(own, *results)
        own.replace(file)
    return results


def run_call(call: Call, is_dry: bool, store: Path | None = None) -> str:
    """Run a call and compare its results with the CPU's; without a GPU, trace it and run only the CPU's part.

    Args:
        call: the call.
        is_dry: whether there is no GPU.
        store: folder with the CPU's results, shared by the tools.

    Returns:
        The kernels that a dry run traces, or else the largest difference.

    Raises:
        ArithmeticError: the results differ too much.
    """
    kernels = "torch"
    if is_dry:
        if call.kernels == "triton":
            kernels = " ".join(sorted(launched_kernels(call, DRY_ARCH)))
    else:
        found = [to_numpy(x) for x in call.compute(call.kernels)]
    expected = expected_results(call, store)
    if is_dry:
        return kernels
    differences = [difference(one, other) for one, other in zip(found, expected, strict=True)]
    for index, (largest, allowed) in enumerate(zip(differences, allowed_differences(call, expected), strict=True)):
        if not largest <= allowed:
            raise ArithmeticError(f"result {index} differs from the CPU's by {largest:.3g} of its norm")
    return f"{max(differences):.1e}"


def allowed_differences(call: Call, expected: Sequence[np.ndarray]) -> list[float]:
    """Return the allowed difference of each result from the CPU's.

    Results that are 0 except for rounding have no digits to compare. They may be as wrong as a plain computation, if
    the call has one.
    """
    if call.plain is None:
        return [TOLERANCE] * len(expected)
    with jax.default_device(jax.devices("cpu")[0]):
        plain = [to_numpy(x) for x in call.compute(call.plain)]
    # The result is pure rounding if the plain computation is entirely wrong.
    differences = [difference(one, other) for one, other in zip(plain, expected, strict=True)]
    return [found if 1 < found < float("inf") else TOLERANCE for found in differences]


def run_family(name: str, is_dry: bool, store: Path | None = None) -> None:
    """Run all calls of a family and print a line for each; see `run_call`."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for call in FAMILIES[name].calls():
        begin = time.monotonic()
        try:
            note = run_call(call, is_dry, store)
        except Exception as failure:  # other calls still run, and the driver counts this one
            traceback.print_exc(limit=-4)
            print(f"EXC {call.name}: {type(failure).__name__} {' '.join(str(failure).split())[:300]}", flush=True)
        else:
            print(f"ran {call.name} ({time.monotonic() - begin:.1f} s, {note})", flush=True)
    if store is not None:
        keep_sources(store)
    print(FINISHED, flush=True)


def keep_sources(store: Path) -> None:
    """Write the sources of generated kernels to files, in which the driver looks up the lines of reports."""
    for name, entry in linecache.cache.items():
        if (match := re.fullmatch(r"<blockdiag\.fuse \w+ (\w+)>", name)) and len(entry) == 4:
            (store / f"{match[1]}.py").write_text("".join(entry[2]))


def environment_of(framework: str, caches: Path, is_dry: bool) -> dict[str, str]:
    """Return the environment of a process."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        # Every array is a separate allocation.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # XLA chooses no algorithm by timing, and makes no CUDA graph of a program.
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
        # Tools reuse the plain run's compiled programs.
        "JAX_COMPILATION_CACHE_DIR": str(caches / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # The plain run must compile, because it needs the sources of generated kernels; see `keep_sources`.
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    if is_dry or framework == "torch":
        # JAX computes the expected results of torch calls on the CPU. The kernels are launched without JAX.
        added["JAX_PLATFORMS"] = "cpu"
    return os.environ | added


def command_of(family: str, tool: str, options: argparse.Namespace, store: Path) -> list[str]:
    """Return the command line of a process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run", family, "--store", str(store)]
    command += ["--dry"] if options.dry else []
    if tool == PLAIN:
        return command
    fixed = ["--target-processes", "application-only", "--launch-timeout", "0"]
    # CUDA API calls that fail on purpose, when libraries query a driver's features, are not kernel errors.
    fixed += ["--report-api-errors", "no"]
    # Reports that are not printed cannot be explained.
    fixed += ["--print-limit", "0", "--show-backtrace", "no"]
    return [options.sanitizer, "--tool", tool, *fixed, *options.sanitizer_option, *command]


def count_errors(output: str) -> int | None:
    """Return the errors of all summaries in a tool's output, or None without a summary."""
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) errors?,", output)
    return sum(int(first or second) for first, second in summaries) if summaries else None


def run_process(family: str, tool: str, options: argparse.Namespace, caches: Path) -> Outcome:
    """Run a family under a tool, in a process group that is killed after the time limit."""
    log = options.output / f"{family}-{tool}.log"
    environment = environment_of(FAMILIES[family].framework, caches, options.dry)
    store = caches / family
    store.mkdir(exist_ok=True)
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command_of(family, tool, options, store),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(options.time_limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            file.write(f"\nnot finished after {options.time_limit} s\n")
    with log.open(errors="replace") as file:
        reports = parse_reports(file)
    with log.open(errors="replace") as file:
        # The reports, possibly a gigabyte, are left out.
        output = "".join(x for x in file if not x.startswith("=========") or "SUMMARY: " in x)
    explained, rest = explain(tool, family, reports, lines_in(ROOT / "src", Path(__file__).parent, store))
    return Outcome(
        family=family,
        tool=tool,
        ran=len(re.findall(r"^ran ", output, re.MULTILINE)),
        failed=tuple(re.findall(r"^EXC (.*)$", output, re.MULTILINE)),
        finished=bool(re.search(rf"^{FINISHED}$", output, re.MULTILINE)),
        errors=None if tool == PLAIN else count_errors(output),
        explained=explained,
        rest=rest,
        seconds=time.monotonic() - begin,
    )


def print_outcome(outcome: Outcome) -> None:
    """Print a row of the table, and the problems below it."""
    errors = "-" if outcome.tool == PLAIN else "uncounted" if outcome.errors is None else str(outcome.errors)
    fine = "explained" if outcome.explained else "ok"
    verdict = fine if outcome.is_clean else "unfinished" if not outcome.finished else "LOOK"
    row = f"{outcome.family:<22} {outcome.tool:<10} {outcome.ran:>4} ran {len(outcome.failed):>3} failed"
    print(f"{row} {errors:>9} errors {outcome.seconds:>6.0f} s  {verdict}", flush=True)
    for failure in outcome.failed:
        print(f"    EXC {failure}", flush=True)
    for name, count in outcome.explained.items():
        print(f"    explained: {count} of {name}", flush=True)
    for report, count in outcome.rest.items():
        print(
            f"    {count} x {report.title}{f' in {report.call!r}' if report.call else ''}: {places(report)}", flush=True
        )
    hidden = outcome.unexplained - sum(outcome.rest.values())
    if hidden:
        print(f"    {hidden} errors that are counted, and not printed", flush=True)


def places(report: Report) -> str:
    """Return the first accesses of a report as text."""
    shown = [
        f"{x.kind} {x.kernel}+0x{x.offset:x}{'' if x.line is None else f' in {x.line[0]}:{x.line[1]}'}".strip()
        for x in report.accesses[:3]
    ]
    return ", ".join(shown) + (f" and {len(report.accesses) - 3} more" if len(report.accesses) > 3 else "")


def chosen_names(text: str | None, known: tuple[str, ...], what: str) -> list[str]:
    """Return the names in a comma-separated option.

    Raises:
        SystemExit: a name is unknown.
    """
    names = list(known) if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"`--{what}` must name some of {', '.join(known)}, got {name!r}")
    return names


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", help="comma-separated; all unless given")
    parser.add_argument("--tools", help=f"comma-separated, of {PLAIN}, {', '.join(TOOLS)}; all unless given")
    # Each process takes a core, and 2 GB for libraries and a GPU context.
    parser.add_argument("-j", "--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--time-limit", type=float, default=420.0, help="seconds of a process (default: 420)")
    parser.add_argument("--output", type=Path, help="folder of the processes' output; a temporary one unless given")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer; looked for on PATH and in /usr/local/cuda")
    parser.add_argument("--sanitizer-option", action="append", default=[], help="another option of compute-sanitizer")
    parser.add_argument("--dry", action="store_true", help="trace the calls and run only the CPU's part; needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the names of the families")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer.

    Raises:
        SystemExit: it is not installed.
    """
    # The pip package is found first, because it may be newer than the toolkit.
    packages = [Path(path, "nvidia", "cu13", "compute-sanitizer") for path in sys.path]
    folders = [*packages, *map(Path, os.environ.get("PATH", "").split(os.pathsep)), Path("/usr/local/cuda/bin")]
    found = next((x for x in (shutil.which("compute-sanitizer", path=folder) for folder in folders) if x), None)
    if found is None:
        raise SystemExit(
            "compute-sanitizer is neither installed, by `pip install nvidia-cuda-sanitizer-api` or with the CUDA "
            "toolkit, nor on PATH: pass --sanitizer PATH"
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every process is clean, else 1."""
    options = parse(arguments)
    if options.list:
        print("\n".join(FAMILIES))
        return 0
    if options.run:
        run_family(options.run, options.dry, options.store)
        return 0
    families = chosen_names(options.families, tuple(FAMILIES), "families")
    tools = [PLAIN] if options.dry else chosen_names(options.tools, (PLAIN, *TOOLS), "tools")
    if tools != [PLAIN]:
        options.sanitizer = options.sanitizer or find_sanitizer()
    options.output = options.output or Path(tempfile.mkdtemp(prefix="sanitize-"))
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"output of the processes: {options.output}", flush=True)
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as caches,
        concurrent.futures.ThreadPoolExecutor(options.processes) as pool,
    ):
        start = functools.partial(pool.submit, run_process, options=options, caches=Path(caches))
        # Slow tools come first. Runs after a plain run find the compile caches filled.
        later = [tool for tool in ("initcheck", "racecheck", "memcheck") if tool in tools]
        first = [PLAIN] if PLAIN in tools else later
        waiting = {start(family, tool) for tool in first for family in families}
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for outcome in [job.result() for job in done]:
                outcomes.append(outcome)
                print_outcome(outcome)
                if outcome.tool == PLAIN:
                    waiting |= {start(outcome.family, tool) for tool in later}
    unclean = [outcome for outcome in outcomes if not outcome.is_clean]
    for name in sorted({name for outcome in outcomes for name in outcome.explained}):
        print(f"explained, {name}: {WHY_DROPPED if name == DROPPED else KNOWN[name].reason}", flush=True)
    errors = sum(outcome.unexplained for outcome in outcomes)
    print(f"{len(outcomes)} processes, {errors} errors, {len(unclean)} processes to look at", flush=True)
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main())
