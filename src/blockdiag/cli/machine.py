"""The machine's driver, and failures in one line: what `doctor` and the benchmarks of a checkout say of both."""

import shutil
import subprocess


def driver_version() -> str:
    """The NVIDIA driver's version as nvidia-smi reports it, or "none"."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else "unknown"


def reason_of(failure: BaseException) -> str:
    """One line that says what went wrong: the type and the first lines of the message."""
    message = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {message[:400]}" if message else type(failure).__name__
