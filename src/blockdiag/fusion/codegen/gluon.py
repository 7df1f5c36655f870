"""What the printers of Gluon's kernels for Hopper share: words, places of tiles, and what a launch is told."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from blockdiag.fusion.codegen.expressions import NAN_LINE, NotPrintable, Printer, Value
from blockdiag.fusion.codegen.kernels import Source, Writer, cells_of
from blockdiag.fusion.ir.tree import Leaf, Node, Region
from blockdiag.fusion.lowering.hopper import Place

_HEAD = """import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.launch.gluon_names import load_async, reinterpret, thread_barrier, tma_load, tma_store
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import """


def gluon_source(helpers: str, lines: Sequence[str]) -> str:
    """The text of a kernel.

    Args:
        helpers: that it has from `resident_tiles`, as an import has them.
    """
    return f"{_HEAD}{helpers}\n\n{NAN_LINE}\n\n\n" + "\n".join(lines) + "\n"


class GluonPrinter(Printer):
    """Gluon infers no layouts: numbers and lines become tiles where an operation meets one."""

    def _printed(self, equation: core.JaxprEqn, given: list[Value]) -> Value:
        if equation.primitive.name in ("dot_general", "reduce_sum", "transpose"):
            raise NotPrintable(f"`{equation.primitive.name}` of a tile whose layout is not known")
        return super()._printed(equation, given)

    def _loop(self, equation: core.JaxprEqn, given: list[Value]) -> list[Value]:
        raise NotPrintable("a loop over features")

    def _reshaped(self, given: Value, shape: tuple[int, ...], dtype: Any, axes: Any) -> Value:
        if given.is_number or given.shape == shape or (len(given.shape) == len(shape) == 2):
            return Value(given.name, shape, given.is_read)
        raise NotPrintable(f"a reshape from {given.shape} to {shape}")


class GluonWriter:
    """Lines of the functions of one kernel.

    Args:
        writer: of the plain kernel with the same tiles.
        moved: leaves that the copy engine brings.
    """

    def __init__(self, region: Region, writer: Writer, moved: Sequence[Leaf]) -> None:
        self.region, self.writer = region, writer
        # Leaves that threads read themselves, and whether places in them or in the log-sums need 64 bits.
        self.pointers = [i for i, leaf in enumerate(region.leaves) if leaf not in moved and leaf.source.key is not None]
        counts = [math.prod(region.leaves[i].source.shape) for i in self.pointers]
        self.is_long = max([*counts, cells_of(region, region.batch) * region.sizes["q"]]) >= 2**31

    def emit(self, line: str = "") -> None:
        self.writer.emit(line.replace("tl.", "gl."))

    def decode(self, name: str, labels: Sequence[str]) -> None:
        """`i_<label>` of batch labels, from one number."""
        step = 1
        for label in reversed(labels):
            size = self.region.sizes[label]
            place = name if step == 1 else f"{name} // {step}"
            self.emit(f"i_{label} = {f'({place} % {size}).to(gl.int64)' if self.is_long else f'{place} % {size}'}")
            step *= size

    def at(self, place: Place, offset: str, column: int | str = 0) -> str:
        """Row and column of a tile of a matrix that begins `offset` queries or keys, and so many columns, later."""
        first_row, first_column = place.first
        rows = [f"i_{x} * {step}" if step > 1 else f"i_{x}" for x, step in place.rows.items()]
        columns = [f"i_{x} * {step}" for x, step in place.columns.items()]
        rows = [*rows, *([str(first_row)] if first_row else []), offset]
        columns += [str(x) for x in (first_column, column) if x != 0]
        return ", ".join(_coordinate(terms) for terms in (rows, columns))

    def evaluate(self, root: Node, tiles: Sequence[Value], prefix: str) -> Value:
        """Print a node of which all leaves are read."""
        program = self.writer.tile_program([root])
        return GluonPrinter(self.emit, prefix, self.writer.precision).run(program, tiles)[0]

    def tiles(self, known: dict[int, Value]) -> list[Value]:
        """A value for each leaf; those that are not known are not used."""
        return [known.get(i, Value("0", self.writer.tile_shape(leaf))) for i, leaf in enumerate(self.region.leaves)]

    def read(self, roles: Sequence[str], *, counted: bool = False) -> dict[int, Value]:
        """Load what threads read themselves, of some roles, and numbers of rows or columns; `counted`: only these."""
        found = {}
        for i, leaf in enumerate(self.region.leaves):
            if leaf.role in roles and (leaf.source.key is None or (i in self.pointers and not counted)):
                lines = self.writer.lines
                first = len(lines)
                found[i] = self.writer.read(i)
                lines[first:] = [line.replace("tl.", "gl.") for line in lines[first:]]
        return found

    def known(self, roles: Sequence[str]) -> dict[int, Value]:
        """What `read` names."""
        leaves = self.region.leaves
        return {
            i: Value(f"leaf{i}", self.writer.tile_shape(leaf))
            for i, leaf in enumerate(leaves)
            if leaf.role in roles and (leaf.source.key is None or i in self.pointers)
        }

    def parameters(self) -> str:
        return "".join(f", p_leaf{i}" for i in self.pointers)


def _coordinate(terms: Sequence[str]) -> str:
    """A sum in 32 bits, as the copy engine takes it."""
    kept = [term for term in terms if term != "0"]
    if all(term.isdigit() for term in kept):
        return str(sum(map(int, kept)))
    return f"({' + '.join(kept)}).to(gl.int32)"


def print_function(own: GluonWriter, header: str) -> None:
    own.writer.depth = 0
    own.emit("@gluon.jit")
    own.emit(header)
    own.writer.depth = 1


@dataclass(frozen=True)
class HopperKernel:
    """A kernel, and what its launch needs to know.

    Attributes:
        moved: of each parameter that the copy engine moves: name, array, shape of its matrix, and of a tile.
        dtype: of these arrays.
        pointers: the parameters that are pointers, in order.
        rounds: in all; None where a program learns that from lists.
        tiles: programs, if each went through all rounds.
        each: how many rounds a program goes through, where that is not the launch's choice.
    """

    source: Source
    moved: tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]
    dtype: str
    pointers: tuple[str, ...]
    rounds: int | None
    tiles: int
    each: int | None = None
