"""Shared parts of the Gluon kernel writers for Hopper: printer, tile coordinates and launch parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from blockdiag.fusion.codegen.expressions import NotPrintable, Printer, Value
from blockdiag.fusion.codegen.kernels import Source, Writer, cells_of
from blockdiag.fusion.ir.tree import Leaf, Node, Region
from blockdiag.fusion.lowering.hopper import Place


class GluonPrinter(Printer):
    """Printer for Gluon, which does not infer the layout of new tiles.

    Scalars and vectors are broadcast by the operation that combines them with a tile.
    """

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
    """Writer of the functions of one Gluon kernel.

    Args:
        writer: the writer of the plain kernel with the same tiles.
        moved: the leaves that the copy engine loads.
    """

    def __init__(self, region: Region, writer: Writer, moved: Sequence[Leaf]) -> None:
        self.region, self.writer = region, writer
        # The leaves that threads load themselves, and whether offsets in them or in the log-sum-exps need 64 bits.
        self.pointers = [i for i, leaf in enumerate(region.leaves) if leaf not in moved and leaf.source.key is not None]
        counts = [math.prod(region.leaves[i].source.shape) for i in self.pointers]
        self.is_long = max([*counts, cells_of(region, region.batch) * region.sizes["q"]]) >= 2**31

    def emit(self, line: str = "") -> None:
        self.writer.emit(line.replace("tl.", "gl."))

    def decode(self, name: str, labels: Sequence[str]) -> None:
        """Print `i_<label>` of batch labels, decoded from one flat index."""
        step = 1
        for label in reversed(labels):
            size = self.region.sizes[label]
            place = name if step == 1 else f"{name} // {step}"
            self.emit(f"i_{label} = {f'({place} % {size}).to(gl.int64)' if self.is_long else f'{place} % {size}'}")
            step *= size

    def at(self, place: Place, offset: str) -> str:
        """Return the row and column of a tile that starts at query or key `offset`, as source text."""
        first_row, first_column = place.first
        rows = [f"i_{x} * {step}" if step > 1 else f"i_{x}" for x, step in place.rows.items()]
        columns = [f"i_{x} * {step}" for x, step in place.columns.items()]
        rows = [*rows, *([str(first_row)] if first_row else []), offset]
        columns += [str(first_column)] if first_column else []
        return ", ".join(_coordinate(terms) for terms in (rows, columns))

    def evaluate(self, root: Node, tiles: Sequence[Value], prefix: str) -> Value:
        """Print a node whose leaves are all loaded."""
        program = self.writer.tile_program([root])
        return GluonPrinter(self.emit, prefix, self.writer.precision).run(program, tiles)[0]

    def tiles(self, known: dict[int, Value]) -> list[Value]:
        """Return a value for each leaf; unknown leaves get a placeholder that must not be used."""
        return [known.get(i, Value("0", self.writer.tile_shape(leaf))) for i, leaf in enumerate(self.region.leaves)]

    def read(self, roles: Sequence[str], *, counted: bool = False) -> dict[int, Value]:
        """Print loads of the leaves of some roles that threads read themselves, and the positions of rows or columns.

        Args:
            counted: print positions only.
        """
        found = {}
        for i, leaf in enumerate(self.region.leaves):
            if leaf.role in roles and (leaf.source.key is None or (i in self.pointers and not counted)):
                found[i] = self.read_leaf(i)
        return found

    def read_leaf(self, place: int) -> Value:
        """Print the load of a leaf's tile, and return the value."""
        lines = self.writer.lines
        first = len(lines)
        found = self.writer.read(place)
        lines[first:] = [line.replace("tl.", "gl.") for line in lines[first:]]
        return found

    def known(self, roles: Sequence[str]) -> dict[int, Value]:
        """Return the values that `read` has named, without printing loads."""
        leaves = self.region.leaves
        return {
            i: Value(f"leaf{i}", self.writer.tile_shape(leaf))
            for i, leaf in enumerate(leaves)
            if leaf.role in roles and (leaf.source.key is None or i in self.pointers)
        }

    def parameters(self) -> str:
        return "".join(f", p_leaf{i}" for i in self.pointers)


def _coordinate(terms: Sequence[str]) -> str:
    """Return a sum as 32-bit source text, as the copy engine requires."""
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
    """Gluon kernel with its launch parameters.

    Attributes:
        moved: for each descriptor parameter: its name, its array, the shape of the matrix, and the shape of a tile.
        pointers: the pointer parameters, in order.
        rounds: the number of rounds per tile; None if programs read it from lists.
        tiles: the number of programs if each did all rounds of a tile.
        each: the number of rounds per program; None if the launch chooses it.
        num_warps: the warps of the function that the kernel starts with.
        is_persistent: whether programs take tiles from a counter; at most one per multiprocessor is launched.
    """

    source: Source
    moved: tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]
    pointers: tuple[str, ...]
    rounds: int | None
    tiles: int
    each: int | None = None
    num_warps: int = 4
    is_persistent: bool = False
