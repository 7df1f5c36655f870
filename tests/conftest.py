"""Settings of every test: implicit promotion is an error, and the CPU acts as four devices."""

import functools
import gc
import importlib.util
import itertools
import os
import sys
from pathlib import Path

# Most of the suite's CPU time is the compilation of programs that run once on a few tokens. By default XLA starts an
# MLIR compiler for every fusion; these flags use one for the whole program. XLA reads them when it is first used.
if os.environ.get("JAX_PLATFORMS") == "cpu" and "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
    )

# The suite's processes share the cores, and so do threads that interpret warps. NumPy's own threads would only wait for
# each other in busy loops.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import pytest

from tests.gpu_sharing import share_gpus
from tests.sampling import split_by_sample

# This runs before JAX and torch look for GPUs, which happens in the first test that needs one.
if os.environ.get("JAX_PLATFORMS") != "cpu":
    share_gpus()

# The library must run under the strictest settings that a user may choose.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Four CPU devices let `shard_map` tests run without several GPUs.
jax.config.update("jax_num_cpu_devices", 4)
if jax.config.jax_platforms == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)
# Programs that record Python source lines are a few percent slower to lower and to compile.
jax.config.update("jax_traceback_in_locations_limit", 0)

hypothesis.settings.register_profile(
    "blockdiag",
    deadline=None,  # examples with new shapes compile
    derandomize=True,
    max_examples=10,  # each example compiles a program or two
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("blockdiag")


@pytest.fixture(scope="session", autouse=True)
def _arithmetic_for_e5m2() -> None:
    """Compile the first kernel that rounds to e5m2 for a GPU before sm_89.

    Triton decides once per process, with the first kernel that converts to or from 8-bit floats, whether instructions
    convert e5m2. GPUs before sm_89 lack these instructions.
    """
    if jax.config.jax_platforms == "cpu" and importlib.util.find_spec("triton") is not None:
        from tests.triton_kernels.plans_support import compile_rounding_to_e5m2

        compile_rounding_to_e5m2(80)


@functools.cache
def count_gpus() -> int:
    """Return the number of CUDA GPUs that JAX can use."""
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
            torch.cuda.set_device(0)  # JAX leaves the thread on the GPU that it used last


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="run a sample of the cases of each parametrised test")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have left out tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases on request. Run slow GPU tests first, so that no process is left with one of them at the end."""
    if config.getoption("sample"):
        items[:], others = split_by_sample(items)
        config.hook.pytest_deselected(items=others)
    items.sort(key=lambda item: not (item.get_closest_marker("slow") and item.get_closest_marker("gpu")))


def pytest_collection_finish() -> None:
    """Reduce the cost of garbage collection: tracing creates many small objects that stay alive."""
    gc.freeze()
    gc.set_threshold(20_000)


# Linux limits a process to 65,530 memory mappings, beyond which compilers crash. Every program that XLA compiled for a
# CPU keeps about twenty while it is cached. Mappings are counted after every few tests only, because counting takes a
# hundredth of a second when there are many.
_MOST_MAPPINGS = 30_000
_TESTS_BETWEEN_COUNTS = 10
_finished_tests = itertools.count(1)


def count_mappings() -> int:
    """Return the number of memory mappings of this process, or 0 if the system does not report it."""
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


def forget_programs() -> None:
    """Drop the programs that tests share and those that JAX caches."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "tests":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    jax.clear_caches()
    gc.unfreeze()
    gc.collect()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Drop programs before the process has too many mappings, and set aside objects that stay alive.

    Otherwise each full collection would visit the millions of objects of traced programs again, which takes seconds.
    """
    del nodeid
    if next(_finished_tests) % _TESTS_BETWEEN_COUNTS == 0:
        if count_mappings() > _MOST_MAPPINGS:
            forget_programs()
        gc.collect()
        gc.freeze()
