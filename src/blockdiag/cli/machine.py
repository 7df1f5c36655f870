"""The machine's driver version, and one-line descriptions of failures, for `doctor` and the benchmarks."""

import shutil
import subprocess


def driver_version() -> str:
    """Return the NVIDIA driver's version as nvidia-smi reports it, "none" without nvidia-smi, or "unknown"."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else "unknown"


def reason_of(failure: BaseException) -> str:
    """Return one line that describes a failure: its type and the first 400 characters of its message."""
    message = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {message[:400]}" if message else type(failure).__name__
