"""Settings of every test: implicit promotion is an error, and the CPU pretends to be four devices."""

import functools

import hypothesis
import jax
import pytest

# The library must run under the strictest settings a user may have.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# For shard_map without several GPUs.
jax.config.update("jax_num_cpu_devices", 4)
# Most of the suite's time on a CPU is compilation, of programs that run once on a few tokens.
if jax.config.jax_platforms == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)

hypothesis.settings.register_profile(
    "blockdiag",
    deadline=None,  # an example that meets new shapes compiles
    derandomize=True,
    max_examples=20,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("blockdiag")


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
