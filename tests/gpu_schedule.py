"""Print which kernels XLA runs beside the exchanges of MoBA over four GPUs, compiled on a machine without one.

Run in a process of its own, `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m tests.gpu_schedule`: JAX's CUDA plugin looks
for GPUs when it is loaded, and this variable tells it not to. Prints a JSON list with an entry for each asynchronous
exchange of forward and backward, in order: how many arrays it moves, and how many kernels are issued before it is
awaited.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import ContextParallel, moba_attention
from blockdiag.interop import compile_target

DEVICES = 4
# What XLA's cost model wants to know of a GPU: an H200.
GPU = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 140000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def scheduled_program() -> str:
    """The text of forward and backward, instructions in the order in which they are issued."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=GPU, topology=f"1x1x{DEVICES}"
    )
    mesh = Mesh(np.array(topology.devices), ("devices",))
    context = ContextParallel("devices", "ulysses", mesh=mesh)

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array) -> object:
        def attend(*arrays: jax.Array) -> jax.Array:
            return moba_attention(*arrays, block_size=128, top_k=8, context_parallel=context, implementation="triton")

        output, pull_back = jax.vjp(attend, query, key, value)
        return pull_back(output)

    sharding = NamedSharding(mesh, P(None, "devices"))
    x = jax.ShapeDtypeStruct((1, 262_144, 16, 128), jnp.bfloat16, sharding=sharding)
    with compile_target(90):
        lowered = jax.jit(gradients).lower(x, x, x)
    text = lowered.compile().as_text()
    assert text is not None
    assert "is_scheduled=true" in text
    return text


def exchanges_of(program: str) -> list[tuple[int, int]]:
    """Arrays of each asynchronous exchange of a program's entry computation, and kernels beside it."""
    arrays, kernels = dict[str, int](), dict[str, int]()
    under_way: set[str] = set()
    for line in program[program.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(([^)]*)\)", line)
        if found is None:
            continue
        name, operation, operands = found.groups()
        if operation in ("async-start", "all-to-all-start"):
            arrays[name], kernels[name] = operands.count("%"), 0
            under_way.add(name)
        elif operation in ("async-done", "all-to-all-done"):
            under_way.remove(operands.lstrip("%"))
        elif operation == "custom-call":
            for exchange in under_way:
                kernels[exchange] += 1
    return [(arrays[name], kernels[name]) for name in arrays]


if __name__ == "__main__":
    print(json.dumps(exchanges_of(scheduled_program())))
