"""Programs that several devices run together, forward and backward, and those that one device runs alone."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.devices.cases import SequenceCase, ShardCase
from benchmarks.harness.family import Program
from blockdiag.common.context_parallel import ContextParallel, Strategy
from blockdiag.common.exchange import exchange

ALONE = "one device"
EXCHANGES = "exchanges alone"
MESHES = ("automatic", "explicit", "manual")
_DIVISIONS = {"batch": P("devices"), "heads": P(None, None, "devices")}
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def shard_operands(case: ShardCase) -> list[jax.Array]:
    """Return query, key and value of one device."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, case.shape, case.dtype) for key in keys]


def sequence_operands(case: SequenceCase) -> list[jax.Array]:
    """Return query, key and value of the whole sequence."""
    shapes = [(1, case.tokens, heads, case.head_dim) for heads in (case.heads, case.key_heads, case.key_heads)]
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes, strict=True)]


def gradients_of(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return a function that computes the output and the gradients of query, key and value."""

    def compute(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, *pull_back(output)

    return compute


def program_alone(case: ShardCase | SequenceCase, operands: Sequence[jax.Array], device: Any) -> Program:
    """Return the program of one device."""
    attend = case.attend if isinstance(case, ShardCase) else functools.partial(case.attend, None)
    given = jax.device_put(operands, device)
    return _program(jax.jit(gradients_of(attend)).lower(*given).compile(), given, _held_bytes(case, operands))


def program_on_mesh(case: ShardCase, kind: str, operands: Sequence[jax.Array]) -> Program:
    """Return the program of all devices on one kind of mesh, each of which has the same part."""
    mesh, spec = make_mesh(kind, jax.devices()), _DIVISIONS[case.division]
    compute = gradients_of(case.attend)
    if kind == "manual":
        compute = jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        given = _shared(operands, case.division, mesh)
        compiled = jax.jit(compute).lower(*given).compile()
    return _program(compiled, given, _held_bytes(case, operands))


def program_of_strategy(case: SequenceCase, name: Any, operands: Sequence[jax.Array]) -> Program:
    """Return the program of all devices by a strategy of context parallelism, or its exchanges alone."""
    mesh = make_mesh("explicit", jax.devices())
    if name == EXCHANGES:
        compute = _exchanges(mesh, in_groups=case.repeats_heads)
    else:
        compute = gradients_of(functools.partial(case.attend, ContextParallel("devices", name)))
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, P(None, "devices"))) for x in operands]
        compiled = jax.jit(compute).lower(*given).compile()
    return _program(compiled, given, _held_bytes(case, operands))


def _held_bytes(case: ShardCase | SequenceCase, operands: Sequence[jax.Array]) -> int:
    """Return the memory of a queued run's results; those of a sequence are on one device and on all."""
    return (1 if isinstance(case, ShardCase) else 2) * sum(x.nbytes for x in operands)


def _program(compiled: Any, given: Sequence[jax.Array], held_bytes: int) -> Program:
    analysis = compiled.memory_analysis()
    counts = count_collectives(compiled.as_text())
    return Program(
        lambda: compiled(*given),
        held_bytes=held_bytes,
        columns={
            "collectives": " ".join(f"{name}:{count}" for name, count in counts.items()),
            # Not every platform tells it.
            "temporary_mib": None if analysis is None else analysis.temp_size_in_bytes / 2**20,
        },
    )


def transfers(variables: Mapping[str, str]) -> str:
    """Return what moves data between GPUs under these environment variables: "kernels" or "copy engines".

    NCCL (2.28 and later) leaves transfers to copy engines, which use no multiprocessor, if its policy is 2 ("zero") and
    buffers are symmetric: they then have one address offset on all GPUs. XLA allocates such buffers if it is told to.
    """
    symmetric = "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true" in variables.get("XLA_FLAGS", "").split()
    return "copy engines" if symmetric and variables.get("NCCL_CTA_POLICY") == "2" else "kernels"


def strategies_of(case: SequenceCase, devices: int, variables: Mapping[str, str] = os.environ) -> list[Strategy]:
    """Return the strategies of a case that can serve on this many devices under these environment variables."""
    is_repeated = case.repeats_heads and devices % case.key_heads == 0
    is_exchanged = case.key_heads % devices == 0 or is_repeated
    # Gathers by copy engines have ended with illegal memory accesses (jax 0.11.2), so only exchanges are timed there.
    is_safe = transfers(variables) == "kernels"
    return [x for x in case.strategies if (is_exchanged if x == "ulysses" else is_safe)]


def make_mesh(kind: str, devices: Sequence[Any]) -> Mesh:
    """Return a mesh with the axis "devices"."""
    if kind == "explicit":
        return jax.make_mesh((len(devices),), ("devices",), axis_types=(AxisType.Explicit,))
    return Mesh(np.asarray(devices), ("devices",))


def _shared(operands: Sequence[jax.Array], division: str, mesh: Mesh) -> list[jax.Array]:
    """Return operands of which every device has the same part, so that all results are those of one device."""
    axis, copies = (0 if division == "batch" else 2), mesh.devices.size
    sharding = NamedSharding(mesh, _DIVISIONS[division])
    shared: list[jax.Array] = []
    for x in operands:
        shape = tuple(size * copies if i == axis else size for i, size in enumerate(x.shape))
        parts = [jax.device_put(x, device) for device in mesh.devices]
        shared.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return shared


def _exchanges(mesh: Mesh, in_groups: bool) -> Callable[..., Any]:
    """Return the exchanges of a forward and a backward pass: of query, key, value and output, and of their gradients.

    Args:
        mesh: has the axis "devices".
        in_groups: whether heads move in groups, as those of MoBA do; `fuse` moves all at once.
    """

    def at_once(compute: Callable[..., tuple[jax.Array]], *arrays: jax.Array) -> tuple[jax.Array]:
        swap = functools.partial(jax.lax.all_to_all, axis_name="devices", tiled=True)
        (output,) = compute(*(swap(x, split_axis=2, concat_axis=1) for x in arrays))
        return (swap(output, split_axis=1, concat_axis=2),)

    def compute(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        def there_and_back(*arrays: jax.Array) -> jax.Array:
            if in_groups:
                output, *_ = exchange("devices", _add_all, arrays[0], arrays[1:])
            else:
                (output,) = at_once(lambda query, *keys: _add_all(query, keys), *arrays)
            return output

        output, pull_back = jax.vjp(there_and_back, query, key, value)
        return output, *pull_back(output)

    spec = P(None, "devices")
    return jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec)


def _add_all(query: jax.Array, keys: Sequence[jax.Array], *empty: tuple[()]) -> tuple[jax.Array]:
    del empty
    key, value = keys
    # Equal gradients of key and value would be exchanged once.
    return (query + jnp.repeat(key + 2 * value, query.shape[-2] // key.shape[-2], axis=-2),)


def count_collectives(program: str) -> dict[str, int]:
    """Return how often each collective occurs in the text of a compiled program; those that occur."""
    counts = {name: len(re.findall(rf"= .*\b{name}(?:-start)?\(", program)) for name in _COLLECTIVES}
    return {name: count for name, count in counts.items() if count}
