"""Settings of every test: implicit promotion is an error, and the CPU pretends to be four devices."""

import functools
import gc
import importlib.util
import itertools
import os
import sys
from pathlib import Path

# Most of the suite's time on a CPU is compilation, of programs that run once on a few tokens. XLA starts a compiler of
# its own (MLIR) for every fusion, unless told to have one for the whole program. XLA reads this when it is first used.
if os.environ.get("JAX_PLATFORMS") == "cpu" and "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
    )

# Processes of the suite share the cores, and so do threads that interpret warps: NumPy's own threads would only wait
# for each other, in loops.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import pytest

from tests.gpu_sharing import share_gpus

# Before JAX and torch look for GPUs, with the first test that needs one.
if os.environ.get("JAX_PLATFORMS") != "cpu":
    share_gpus()

# The library must run under the strictest settings a user may have.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# For shard_map without several GPUs.
jax.config.update("jax_num_cpu_devices", 4)
if jax.config.jax_platforms == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)
# Programs that remember the lines of Python they come from are a few per cent slower to lower and to compile.
jax.config.update("jax_traceback_in_locations_limit", 0)

hypothesis.settings.register_profile(
    "blockdiag",
    deadline=None,  # an example that meets new shapes compiles
    derandomize=True,
    max_examples=10,  # each compiles a program or two
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("blockdiag")


@pytest.fixture(scope="session", autouse=True)
def _arithmetic_for_e5m2() -> None:
    """Triton decides once in a process, with the first kernel that converts to or from eight bits, whether e5m2 is
    converted by instructions, which GPUs before sm_89 lack: the first kernel is for one of those."""
    if jax.config.jax_platforms == "cpu" and importlib.util.find_spec("triton") is not None:
        from tests.triton_kernels.plans_support import compile_rounding_to_e5m2

        compile_rounding_to_e5m2(80)


@functools.cache
def count_gpus() -> int:
    """CUDA GPUs that JAX can use."""
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` or `multigpu` where JAX has too few GPUs."""
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed > 0 and count_gpus() < needed:
        pytest.skip(f"needs {needed} CUDA GPU(s), found {count_gpus()}")
    if needed > 0:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # JAX leaves a thread on the GPU that it used last


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests for GPUs, so that no process is left with one of them at the end."""
    items.sort(key=lambda item: not (item.get_closest_marker("slow") and item.get_closest_marker("gpu")))


def pytest_collection_finish() -> None:
    """Look for garbage less often, and only among what tests make: tracing makes many small objects that stay."""
    gc.freeze()
    gc.set_threshold(20_000)


# Linux lets a process have 65,530 mappings, and crashes compilers that ask for more; every program that XLA compiled
# for a CPU keeps about twenty for as long as it is remembered. They are counted after every few tests, as that takes
# a hundredth of a second where there are many.
_MOST_MAPPINGS = 30_000
_TESTS_BETWEEN_COUNTS = 10
_finished_tests = itertools.count(1)


def count_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


def forget_programs() -> None:
    """Let go of the programs that tests share and of those that JAX remembers."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "tests":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Forget programs before there are too many of them."""
    del nodeid
    if next(_finished_tests) % _TESTS_BETWEEN_COUNTS == 0 and count_mappings() > _MOST_MAPPINGS:
        forget_programs()
