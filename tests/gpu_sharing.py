"""Settings of test processes that share the GPUs and cores of one machine. They are read before JAX and torch start."""

import os
import shutil
import subprocess
from collections.abc import Mapping

# This is a cap, not a reservation. The largest tests keep two pools of 2 GiB. A test that needs much more fails alone
# and does not take the memory of other processes.
MEMORY_FRACTION = "0.2"


def count_listed_gpus() -> int:
    """Count the driver's GPUs without starting CUDA; 0 if there is none or GPUs are split by MIG."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
    if any(line.lstrip().startswith("MIG") for line in listing):
        return 0
    return sum(line.startswith("GPU ") for line in listing)


def own_gpu_first(worker: str, gpus: list[str]) -> str:
    """Return all visible GPUs, in an order with a different first GPU for each worker, such as `gw3`.

    Tests of several GPUs can run in any worker; all other tests run on the worker's first GPU.
    """
    start = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join(gpus[start:] + gpus[:start])


def sharing_settings(environment: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """Return the environment variables to add for a test process.

    Args:
        environment: the environment variables; a user's own values stay, except for the order of several GPUs.
        num_gpus: number of GPUs of the machine.
    """
    settings = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_FRACTION,
        # XLA would choose matrix product algorithms by timing them. That takes longer than most tests and, beside other
        # processes, gives different choices in every run.
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }
    worker = environment.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        # Otherwise each worker starts a compile process and threads for each core.
        settings |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    settings = {name: value for name, value in settings.items() if name not in environment}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(num_gpus)] if visible is None else [x for x in visible.split(",") if x]
    if worker is not None and len(gpus) > 1:
        settings["CUDA_VISIBLE_DEVICES"] = own_gpu_first(worker, gpus)
    return settings


def share_gpus() -> None:
    """Set the variables of this process and its subprocesses."""
    num_gpus = count_listed_gpus() if "PYTEST_XDIST_WORKER" in os.environ else 0
    os.environ.update(sharing_settings(os.environ, num_gpus))
