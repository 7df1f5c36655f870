"""Settings of every test: implicit promotion is an error, and the CPU pretends to be four devices."""

import hypothesis
import jax

# The library must run under the strictest settings a user may have.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# For shard_map without several GPUs.
jax.config.update("jax_num_cpu_devices", 4)

hypothesis.settings.register_profile(
    "blockdiag",
    deadline=None,  # an example that meets new shapes compiles
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("blockdiag")
