"""Time of attention whose batch rows or heads several devices share, beside each device that computes its part alone.

Every kind of mesh is timed: automatic axes (`jax.sharding.Mesh`), explicit ones (`jax.make_mesh`), and `jax.shard_map`.
Perfect is the time that the slowest device takes for its part alone, since GPUs of one kind differ by some per cent
where power limits their clocks; the rest is what dividing costs. The collectives of each program
are counted, and its temporary memory is compared with that of one device's part.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness.clock import Subject, interleave, summarise
from benchmarks.harness.records import DeviceTiming, Environment
from blockdiag.common.context_parallel import ContextParallel, Strategy
from blockdiag.common.exchange import exchange
from blockdiag.fusion.api import fuse
from blockdiag.ops.block_diagonal.api import block_diagonal_attention
from blockdiag.ops.moba.api import moba_attention

MESHES = ("automatic", "explicit", "manual")
DIVISIONS = {"batch": P("devices"), "heads": P(None, None, "devices")}
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class DeviceCase:
    """A call whose query, key and value have one shape.

    Attributes:
        op: its name.
        attend: the call, of query, key and value.
        rows: batch rows of one device.
        tokens, heads, head_dim: of all devices together where heads are divided; `heads` are of one device else.
        dtype: of the operands.
    """

    op: str
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    rows: int
    tokens: int
    heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16

    def shape(self, division: str, devices: int) -> tuple[int, int, int, int]:
        """The shape of the operands of several devices; of one device its part."""
        rows, heads = (self.rows * devices, self.heads) if division == "batch" else (self.rows, self.heads * devices)
        return rows, self.tokens, heads, self.head_dim


@fuse
def _causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    row = jnp.arange(query.shape[1], dtype=jnp.int32)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    scores = jnp.where(row[:, None] >= row[None, :], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def _cudnn_causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _block_diagonal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return block_diagonal_attention(query, key, value, block_size=64)


def _moba(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return moba_attention(query, key, value, block_size=128, top_k=8)


CASES = (
    DeviceCase("block_diagonal", _block_diagonal, 36, 16384, 8, 128),
    DeviceCase("moba", _moba, 6, 16384, 8, 128),
    DeviceCase("fuse causal", _causal, 2, 16384, 8, 128),
    DeviceCase("jax.nn cudnn causal", _cudnn_causal, 2, 16384, 8, 128),
)
SMALL_CASES = (
    DeviceCase("block_diagonal", _block_diagonal, 2, 128, 2, 16, jnp.float32),
    DeviceCase("moba", _moba, 2, 512, 2, 16, jnp.float32),
    DeviceCase("fuse causal", _causal, 2, 64, 2, 16, jnp.float32),
)


def measure_devices(
    environment: Environment, cases: Sequence[DeviceCase] = CASES, *, rounds: int = 10, seconds: float = 400.0
) -> Iterator[DeviceTiming]:
    """Check and time every case on all devices of this process, forward and backward.

    Args:
        environment: what each row says of the machine.
        cases: what is timed.
        rounds: samples of each program.
        seconds: after which no case is begun.

    Yields:
        A row for each program.

    Raises:
        ArithmeticError: a result differs from that of one device.
    """
    deadline = time.monotonic() + seconds
    for case in cases:
        for division in DIVISIONS:
            if time.monotonic() < deadline:
                yield from _measure(environment, case, division, rounds, deadline)


def _measure(
    environment: Environment, case: DeviceCase, division: str, rounds: int, deadline: float
) -> Iterator[DeviceTiming]:
    devices = jax.devices()
    is_gpu = devices[0].platform == "gpu"
    operands = _operands(case, case.shape(division, 1))
    single = jax.jit(_gradients(case)).lower(*operands).compile()
    programs = {("one device", ""): (single, operands)}
    for device in devices[1:]:
        there = jax.device_put(operands, device)
        programs["another device", str(device.id)] = jax.jit(_gradients(case)).lower(*there).compile(), there
    for kind in MESHES:
        mesh = _mesh(kind, devices)
        with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
            given = _shared(operands, division, mesh)
            compiled = jax.jit(_on_mesh(case, kind, mesh, DIVISIONS[division])).lower(*given).compile()
        programs[kind, division] = compiled, given
        _check(compiled(*given), single(*operands))
    size = sum(x.nbytes for x in operands)
    subjects = [
        Subject(key, lambda run=run, given=given: run(*given), "jax" if is_gpu else "host", size)
        for key, (run, given) in programs.items()
    ]
    interleave(subjects, rounds=rounds, batch_ms=60.0 if is_gpu else 1.0, deadline=deadline)
    alone, together = subjects[: len(devices)], subjects[len(devices) :]
    slowest = max(alone, key=lambda subject: summarise(subject.samples).median)
    perfect = summarise(slowest.samples).median
    for subject in (slowest, *together):
        yield DeviceTiming(
            op=case.op,
            mesh=subject.key[0] if subject in together else "one device",
            division=division,
            devices=len(devices) if subject in together else 1,
            rows=case.rows,
            tokens=case.tokens,
            heads=case.heads,
            head_dim=case.head_dim,
            perfect_ms=perfect,
            **_measured(subject, programs[subject.key][0], environment),
        )


def _measured(subject: Subject, compiled: Any, environment: Environment) -> dict[str, Any]:
    """Return the columns of a row that describe a program, its time and the machine."""
    summary = summarise(subject.samples) if subject.samples else None
    analysis = compiled.memory_analysis()
    return {
        "median_ms": None if summary is None else summary.median,
        "p20_ms": None if summary is None else summary.p20,
        "p80_ms": None if summary is None else summary.p80,
        "transfers": transfers(os.environ),
        "collectives": " ".join(f"{name}:{count}" for name, count in count_collectives(compiled.as_text()).items()),
        # Not every platform tells it.
        "temporary_mib": None if analysis is None else analysis.temp_size_in_bytes / 2**20,
        "note": subject.failure,
        **asdict(environment),
    }


def transfers(variables: Mapping[str, str]) -> str:
    """Return what moves data between GPUs under these environment variables: "kernels" or "copy engines".

    NCCL (2.28 and later) leaves transfers to copy engines, which use no multiprocessor, if its policy is 2 ("zero") and
    buffers are symmetric: they then have one address offset on all GPUs. XLA allocates such buffers if it is told to.
    """
    symmetric = "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true" in variables.get("XLA_FLAGS", "").split()
    return "copy engines" if symmetric and variables.get("NCCL_CTA_POLICY") == "2" else "kernels"


@dataclass(frozen=True)
class SequenceCase:
    """A call whose one sequence the devices share.

    Attributes:
        name: of the case, for a choice of cases.
        op: its name.
        attend: the call, of `context_parallel`, query, key and value.
        tokens, heads, key_heads, head_dim: of all devices together.
        dtype: of the operands.
        strategies: that are timed, where they can serve.
    """

    name: str
    op: str
    attend: Callable[..., jax.Array]
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16
    strategies: tuple[Strategy, ...] = ("ulysses", "gather")


def _moba_of_sequence(context: ContextParallel | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return moba_attention(query, key, value, block_size=128, top_k=8, context_parallel=context)


def _fuse_of_sequence(context: ContextParallel | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return fuse(_grouped_causal, context_parallel=context)(query, key, value)


def _grouped_causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    batch, tokens, heads, width = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, width)
    row = jnp.arange(tokens, dtype=jnp.int32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(row[:, None] >= row[None, :], scores, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(batch, tokens, heads, width)


SEQUENCE_CASES = (
    SequenceCase("moba_256k", "moba", _moba_of_sequence, 262_144, 16, 16, 128),
    SequenceCase("moba_256k_k2", "moba, 2 key heads", _moba_of_sequence, 262_144, 16, 2, 128),
    SequenceCase("moba_1024k", "moba", _moba_of_sequence, 1_048_576, 16, 16, 128),
    SequenceCase(
        "fuse_128k", "fuse causal", _fuse_of_sequence, 131_072, 64, 8, 128, strategies=("ulysses", "gather", "ring")
    ),
)
SMALL_SEQUENCE_CASES = (
    SequenceCase("moba_small", "moba", _moba_of_sequence, 2048, 8, 8, 16, jnp.float32),
    SequenceCase("fuse_small", "fuse causal", _fuse_of_sequence, 256, 8, 4, 16, jnp.float32),
)


def measure_sequences(
    environment: Environment, cases: Sequence[SequenceCase] = SEQUENCE_CASES, *, rounds: int = 5, seconds: float = 200.0
) -> Iterator[DeviceTiming]:
    """Check and time sequences that all devices share beside one device that has them whole, forward and backward.

    Args:
        environment, cases, rounds, seconds: see `measure_devices`.

    Yields:
        A row for one device, for each strategy that can serve, and for the exchanges of "ulysses" alone.

    Raises:
        ArithmeticError: a result differs from that of one device.
    """
    deadline = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() < deadline:
            yield from _measure_sequence(environment, case, rounds, deadline)


def strategies_of(case: SequenceCase, devices: int, variables: Mapping[str, str]) -> list[Strategy]:
    """Return the strategies of a case that can serve on this many devices under these environment variables."""
    # MoBA repeats key heads where devices outnumber them; `fuse` does not.
    is_repeated = case.attend is _moba_of_sequence and devices % case.key_heads == 0
    is_exchanged = case.key_heads % devices == 0 or is_repeated
    # Gathers by copy engines have ended with illegal memory accesses (jax 0.11.2), so only exchanges are timed there.
    is_safe = transfers(variables) == "kernels"
    return [x for x in case.strategies if (is_exchanged if x == "ulysses" else is_safe)]


def _measure_sequence(
    environment: Environment, case: SequenceCase, rounds: int, deadline: float
) -> Iterator[DeviceTiming]:
    devices = jax.devices()
    is_gpu = devices[0].platform == "gpu"
    mesh = _mesh("explicit", devices)
    shapes = [(1, case.tokens, heads, case.head_dim) for heads in (case.heads, case.key_heads, case.key_heads)]
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes, strict=True)]
    single = jax.jit(_gradients_of(functools.partial(case.attend, None))).lower(*operands).compile()
    strategies = strategies_of(case, len(devices), os.environ)
    programs: dict[str, tuple[Any, Sequence[jax.Array]]] = {"one device": (single, operands)}
    expected = single(*operands)
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, P(None, "devices"))) for x in operands]
        for strategy in strategies:
            compute = _gradients_of(functools.partial(case.attend, ContextParallel("devices", strategy)))
            programs[strategy] = jax.jit(compute).lower(*given).compile(), given
        if "ulysses" in strategies:
            programs["exchanges alone"] = (
                jax.jit(_exchanges(mesh, in_groups=case.attend is _moba_of_sequence)).lower(*given).compile(),
                given,
            )
    for strategy in strategies:
        run, arrays = programs[strategy]
        _check_whole(run(*arrays), expected)
    del expected
    size = 2 * sum(x.nbytes for x in operands)
    subjects = [
        Subject(name, lambda run=run, arrays=arrays: run(*arrays), "jax" if is_gpu else "host", size)
        for name, (run, arrays) in programs.items()
    ]
    interleave(subjects, rounds=rounds, batch_ms=60.0 if is_gpu else 1.0, deadline=deadline)
    whole = summarise(subjects[0].samples).median
    for subject in subjects:
        yield DeviceTiming(
            op=case.op,
            mesh=subject.key,
            division="tokens",
            devices=1 if subject is subjects[0] else len(devices),
            rows=1,
            tokens=case.tokens,
            heads=case.heads,
            head_dim=case.head_dim,
            perfect_ms=whole if subject is subjects[0] else whole / len(devices),
            **_measured(subject, programs[subject.key][0], environment),
        )


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


def _check_whole(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> None:
    """Compare results that devices share with those of one device.

    Raises:
        ArithmeticError: they differ.
    """
    for one, other in zip(results, expected, strict=True):
        axis = 1
        for shard in one.addressable_shards:
            start = shard.index[axis].start or 0
            part = jax.lax.slice_in_dim(other, start, start + shard.data.shape[axis], axis=axis)
            difference, norm = map(float, _distance(shard.data, jax.device_put(part, shard.device)))
            # Gradients of keys in bfloat16 are 0.3% from those of float32: those of one device, and those of gathered
            # keys, whose parts MoBA rounds before they are added up.
            if not difference <= 1e-2 * norm:
                raise ArithmeticError(f"results of a device differ by {difference:.3g} of {norm:.3g}")


def _operands(case: DeviceCase, shape: Sequence[int]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, case.dtype) for key in keys]


def _gradients(case: DeviceCase) -> Callable[..., Any]:
    return _gradients_of(case.attend)


def _gradients_of(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def compute(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, *pull_back(output)

    return compute


def _on_mesh(case: DeviceCase, kind: str, mesh: Mesh, spec: P) -> Callable[..., Any]:
    compute = _gradients(case)
    return jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec) if kind == "manual" else compute


def _mesh(kind: str, devices: Sequence[Any]) -> Mesh:
    if kind == "explicit":
        return jax.make_mesh((len(devices),), ("devices",), axis_types=(AxisType.Explicit,))
    return Mesh(np.asarray(devices), ("devices",))


def _shared(operands: Sequence[jax.Array], division: str, mesh: Mesh) -> list[jax.Array]:
    """Operands of which every device has the same part, so that all results are those of one device."""
    axis, copies = (0 if division == "batch" else 2), mesh.devices.size
    sharding = NamedSharding(mesh, DIVISIONS[division])
    shared: list[jax.Array] = []
    for x in operands:
        shape = tuple(size * copies if i == axis else size for i, size in enumerate(x.shape))
        parts = [jax.device_put(x, device) for device in mesh.devices]
        shared.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return shared


def _check(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> None:
    """Compare every device's part with the results of one device.

    Raises:
        ArithmeticError: they differ.
    """
    for one, other in zip(results, expected, strict=True):
        for shard in one.addressable_shards:
            if shard.data.shape != other.shape:
                raise ArithmeticError(f"a device has {shard.data.shape} of the results, not {other.shape}")
            difference, norm = map(float, _distance(shard.data, jax.device_put(other, shard.device)))
            if not difference <= 1e-3 * norm:
                raise ArithmeticError(f"results of a device differ by {difference:.3g} of {norm:.3g}")


@jax.jit
def _distance(x: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norms of the difference and of the other."""
    wide, wanted = x.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.linalg.norm((wide - wanted).ravel()), jnp.linalg.norm(wanted.ravel())


def count_collectives(program: str) -> dict[str, int]:
    """How often each collective occurs in the text of a compiled program; those that occur."""
    counts = {name: len(re.findall(rf"= .*\b{name}(?:-start)?\(", program)) for name in _COLLECTIVES}
    return {name: count for name, count in counts.items() if count}
