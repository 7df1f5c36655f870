"""Several devices beside one as a benchmark family.

Every kind of mesh is timed: automatic axes (`jax.sharding.Mesh`), explicit ones (`jax.make_mesh`), and
`jax.shard_map`. Perfect is the time that the slowest device takes for its part alone, since GPUs of one kind differ by
some per cent where power limits their clocks; the rest is what dividing costs. The collectives of each program are
counted, and its temporary memory is compared with that of one device's part.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from benchmarks.devices.cases import (
    SMALL_SEQUENCE_CASES,
    SMALL_SHARD_CASES,
    SequenceCase,
    ShardCase,
    select_device_cases,
)
from benchmarks.devices.check import check_sequence, check_shards
from benchmarks.devices.programs import (
    ALONE,
    EXCHANGES,
    MESHES,
    program_alone,
    program_of_strategy,
    program_on_mesh,
    sequence_operands,
    shard_operands,
    strategies_of,
    transfers,
)
from benchmarks.devices.report import device_table
from benchmarks.harness.family import Context, Entry, Family, Implementation, Make, Program, Settings
from benchmarks.harness.records import DeviceTiming
from benchmarks.harness.report import Verdict, quotient

type Case = ShardCase | SequenceCase


@dataclass(frozen=True)
class DeviceSettings(Settings):
    """Settings of several devices."""

    batch_ms: float = 60.0


@dataclass(frozen=True)
class Inputs:
    """The operands of a case on the first device, its program there, and that program's results."""

    operands: Sequence[jax.Array]
    alone: Program
    expected: Sequence[jax.Array]


def _alone(device: Any) -> Implementation:
    """Return the program of one device, which has its part, or the whole sequence."""

    def begin(context: Context, case: Case) -> Make:
        inputs: Inputs = context.inputs
        is_first = device == jax.devices()[0]
        return lambda pass_name: inputs.alone if is_first else program_alone(case, inputs.operands, device)

    return Implementation(ALONE, "jax", begin)


def _together(name: str) -> Implementation:
    """Return the program of all devices on a kind of mesh or by a strategy, checked."""

    def begin(context: Context, case: Case) -> Make:
        inputs: Inputs = context.inputs

        def make(pass_name: str) -> Program:
            del pass_name
            if isinstance(case, ShardCase):
                program = program_on_mesh(case, name, inputs.operands)
                check_shards(program.run(), inputs.expected)
                return program
            program = program_of_strategy(case, name, inputs.operands)
            if name != EXCHANGES:
                check_sequence(program.run(), inputs.expected)
            return program

        return make

    return Implementation(name, "jax", begin)


class Devices(Family):
    """Calls whose batch rows, heads or sequence several devices share."""

    name = "devices"
    kind = DeviceTiming
    settings = DeviceSettings
    smoke_cases = (*SMALL_SHARD_CASES, *SMALL_SEQUENCE_CASES)
    smoke_text = "every kind of mesh against one device"

    select = staticmethod(select_device_cases)

    def unavailable(self) -> str:
        """Return that there is one device only, or an empty string."""
        if jax.device_count() > 1:
            return ""
        if jax.default_backend() == "gpu":
            return "devices needs several GPUs, and JAX sees one"
        return "devices: this process has one device; JAX_NUM_CPU_DEVICES=4 makes the CPU pretend to be four."

    def measure_rates(self) -> tuple[dict[str, float], str]:
        """Return the number of devices, because programs are compared with one device."""
        return {}, f"{jax.device_count()} devices, transfers by {transfers(os.environ)}"

    def make_inputs(self, cases: Sequence[Case], context: Context) -> Inputs:
        """Return the operands, and the results of one device."""
        del context
        (case,) = cases
        operands = shard_operands(case) if isinstance(case, ShardCase) else sequence_operands(case)
        alone = program_alone(case, operands, jax.devices()[0])
        return Inputs(operands, alone, alone.run())

    def own(self, cases: Sequence[Case], settings: Settings) -> list[tuple[Case, Implementation]]:
        """Return single devices, each kind of mesh, and each strategy with its exchanges alone."""
        del settings
        found: list[tuple[Case, Implementation]] = []
        for case in cases:
            if isinstance(case, ShardCase):
                programs = [*map(_alone, jax.devices()), *map(_together, MESHES)]
            else:
                strategies = strategies_of(case, jax.device_count())
                exchanges = [EXCHANGES] if "ulysses" in strategies else []
                programs = [_alone(jax.devices()[0]), *map(_together, (*strategies, *exchanges))]
            found += [(case, one) for one in programs]
        return found

    def others(self, cases: Sequence[Case], context: Context) -> list[tuple[Case, Implementation]]:
        """Return nothing: cuDNN is a case of its own."""
        del cases, context
        return []

    def columns(self, entry: Entry, rates: Mapping[str, float]) -> dict[str, Any]:
        """Return the program's name, its devices, and what moves data between them."""
        del rates
        mesh = entry.implementation.name
        devices = 1 if mesh == ALONE else jax.device_count()
        return {"mesh": mesh, "devices": devices, "transfers": transfers(os.environ)}

    def compared(self, rows: Sequence[DeviceTiming]) -> list[DeviceTiming]:
        """Return the rows with the perfect time. Of single devices the slowest one has a row."""
        alone = [row for row in rows if row.mesh == ALONE]
        slowest = max(alone, key=lambda row: row.median_ms or 0.0)
        found = []
        for row in (slowest, *(row for row in rows if row.mesh != ALONE)):
            shares = row.devices if row.division == "tokens" else 1
            found.append(replace(row, perfect_ms=quotient(slowest.median_ms, float(shares))))
        return found

    def tables(self, rows: Sequence[DeviceTiming], others: Sequence[DeviceTiming]) -> list[Any]:
        """Return the table of a case."""
        del others
        return [device_table(rows)]

    def judge(self, rows: Sequence[DeviceTiming]) -> list[Verdict]:
        """Return nothing: shares of the perfect time have no limit."""
        del rows
        return []


FAMILY = Devices()
