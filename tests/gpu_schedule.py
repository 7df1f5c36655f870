"""XLA's GPU schedule of MoBA over shared tokens, compiled on a machine without a GPU.

Run in a separate process, `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m tests.gpu_schedule`. JAX's CUDA plugin looks for
GPUs when it is loaded, unless this variable is set. The module prints JSON for the forward and backward pass:

- "ulysses", "gather": for this strategy on four GPUs, the asynchronous transfers in order: the number of arrays, and
  the number of kernels issued before the transfer is awaited;
- "sorted": for "ulysses", the number of fusions, by name, that write a whole array of a GPU's tokens: copies that sort
  heads;
- "aliased": for two calls with the same keys, the operands that each launch writes into.
"""

import functools
import json
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import ContextParallel, moba_attention
from blockdiag.common.context_parallel import Strategy
from blockdiag.interop import compile_target

# The properties of an H200 for XLA's cost model.
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


def four_gpus() -> Mesh:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=GPU, topology="1x1x4")
    return Mesh(np.array(topology.devices), ("devices",))


def scheduled(mesh: Mesh, spec: P, attend: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> str:
    """Return the text of forward and backward on a mesh, with instructions in the order in which they are issued."""

    def gradients(*arrays: jax.Array) -> object:
        output, pull_back = jax.vjp(attend, *arrays)
        return output, *pull_back(output)

    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for x in shapes]
    with compile_target(90):
        text = jax.jit(gradients).lower(*arrays).compile().as_text()
    assert text is not None
    assert "is_scheduled=true" in text
    return text


def shared_tokens(strategy: Strategy, key_heads: int) -> str:
    """Compile MoBA over a sequence shared by four GPUs."""
    mesh = four_gpus()
    context = ContextParallel("devices", strategy, mesh=mesh)
    attend = functools.partial(
        moba_attention, block_size=128, top_k=8, context_parallel=context, implementation="triton"
    )
    query, key = ((1, 262_144, heads, 128) for heads in (16, key_heads))
    return scheduled(mesh, P(None, "devices"), attend, query, key, key)


def two_calls() -> str:
    """Compile MoBA of early and of late queries over the same packed keys, whose gradients are sums."""
    tokens = 8192
    edges = [jnp.asarray(x, jnp.int32) for x in ([0, tokens // 2], [0, tokens // 2], [0, tokens])]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        halves = [
            moba_attention(
                part, key, value, block_size=128, top_k=4, implementation="triton",
                sequence_offsets=edges[0], key_sequence_offsets=own,
            )
            for part, own in zip(jnp.split(query, 2), edges[1:], strict=True)
        ]  # fmt: skip
        return jnp.concatenate(halves)

    return scheduled(four_gpus(), P(), attend, *[(tokens, 4, 128)] * 3)


def transfers_of(program: str) -> list[tuple[int, int]]:
    """Return the numbers of arrays and overlapping kernels of each asynchronous transfer in the entry computation."""
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


def sorting_copies(program: str, elements: int) -> dict[str, int]:
    """Count the fusions in the entry computation that write one array of this size, by name without numbers."""
    counts = dict[str, int]()
    for line in program[program.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([a-z_]+)[\w.\-]* = bf16\[([\d,]+)\]\S* fusion\(", line)
        if found is not None and math.prod(map(int, found[2].split(","))) == elements:
            name = found[1].strip("_")
            counts[name] = counts.get(name, 0) + 1
    return counts


def aliased_operands(program: str) -> list[list[str]]:
    """Return the operands that each launch writes into."""
    found = []
    for line in program.splitlines():
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?\{\}\))\}", line)
        call = re.search(r" custom-call\(([^)]*)\)", line)
        if aliases and call:
            operands = re.findall(r"%[\w.\-]+", call.group(1))
            found.append([operands[int(place)] for place in re.findall(r"\((\d+), ", aliases.group(1))])
    return found


if __name__ == "__main__":
    exchanged = shared_tokens("ulysses", 16)
    found = {
        "ulysses": transfers_of(exchanged),
        "sorted": sorting_copies(exchanged, 65_536 * 16 * 128),
        "gather": transfers_of(shared_tokens("gather", 2)),
        "aliased": aliased_operands(two_calls()),
    }
    print(json.dumps(found))
