"""Printer of the device functions that the Gluon templates of `triton_kernels.dense` call."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdiag.fusion.codegen.expressions import NAN_LINE, Value
from blockdiag.fusion.codegen.gluon import GluonPrinter, GluonWriter, print_function
from blockdiag.fusion.ir.layout import layout_of
from blockdiag.fusion.lowering.hopper import Place


def template_source(names: Mapping[str, str], lines: Sequence[str]) -> str:
    """Return the text of a kernel module.

    Args:
        names: what it imports from modules of `triton_kernels`, comma-separated.
    """
    imports = "\n".join(f"from blockdiag.triton_kernels.{module} import {x}" for module, x in names.items())
    head = f"""import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

{imports}

{NAN_LINE}


"""
    return head + "\n".join(lines) + "\n"


def packed(labels: Sequence[str], otherwise: str) -> str:
    """Return a tuple of batch indices as source text. Without labels it holds `otherwise`, as it must not be empty."""
    return f"({', '.join(f'i_{label}' for label in labels) or otherwise},)"


def indices(labels: Sequence[str], name: str) -> dict[str, str]:
    """Return the names of batch indices, each with the element of the tuple `name` that holds it."""
    return {f"i_{label}": f"{name}[{i}]" for i, label in enumerate(labels)}


class FunctionWriter(GluonWriter):
    """Writer of device functions, which get batch indices in a tuple `place`."""

    @property
    def batch_indices(self) -> dict[str, str]:
        """The batch indices, each with the element of `place` that holds it."""
        return indices(self.region.batch, "place")

    @property
    def arrays(self) -> dict[str, str]:
        """The pointers to leaves, each with the element of `arrays` that holds it."""
        return {f"p_leaf{x}": f"arrays[{i}]" for i, x in enumerate(self.pointers)}

    def function(self, name: str, parameters: str, body: Callable[[], None], known: Mapping[str, str]) -> None:
        """Print a device function.

        Args:
            body: prints the body.
            known: expressions by name. The names that the body uses are assigned before it.
        """
        print_function(self, f"def {name}({parameters}):")
        lines = self.writer.lines
        first = len(lines)
        body()
        words = set(re.findall(r"\w+", "\n".join(lines[first:])))
        lines[first:first] = [f"    {one} = {expression}" for one, expression in known.items() if one in words]
        self.emit()
        self.emit()

    def returning(self, name: str, parameters: str, expression: str, known: Mapping[str, str] | None = None) -> None:
        """Print a device function that returns an expression.

        Args:
            known: as for `function`; None: the batch indices.
        """
        body = functools.partial(self.emit, f"return {expression}")
        self.function(name, parameters, body, self.batch_indices if known is None else known)

    def print_batch_places(self, own: Sequence[str], others: Sequence[str]) -> None:
        """Print `own_place`, which decodes a program's batch indices, and `place`, which adds those it loops over."""
        batch = self.region.batch

        def own_place() -> None:
            self.decode("cell", own)
            self.emit(f"return {packed(own, 'cell')}")

        def place() -> None:
            self.decode("other", others)
            self.emit(f"return {packed(batch, 'other')}")

        self.function("own_place", "cell", own_place, {})
        self.function("place", "own, other", place, indices(own, "own"))

    def print_places(self, places: Mapping[str, Place]) -> None:
        """Print a function `<name>_at` for each array, which returns the row and the column of a tile."""
        for name, place in places.items():
            self.returning(f"{name}_at", "place, first", self.at(place, "first"))

    def base(self, labels: Sequence[str], last: int) -> str:
        """Return the offset of the first element of a line in an array [labels.., last]."""
        sizes = {label: self.region.sizes[label] for label in labels} | {"last": last}
        return layout_of(list(sizes.values()), [(label,) for label in sizes], sizes).base(labels)

    def print_program(self, program: Any, loaded: Mapping[int, Value], more: Sequence[str] = ()) -> None:
        """Print the body of a function that computes a tile program. It loads only the leaves that the program reads.

        The region's last leaf is the product.

        Args:
            loaded: the values of leaves that the function is given.
            more: the names of further score tiles that the program takes, after the leaves.
        """
        region, writer = self.region, self.writer
        used = {id(x) for line in program.jaxpr.eqns for x in line.invars} | {id(x) for x in program.jaxpr.outvars}
        shape = writer.turned(writer.tile.rows, writer.tile.columns)
        tiles = []
        for i, leaf in enumerate(region.leaves[:-1]):
            is_read = id(program.jaxpr.invars[i]) in used and leaf.role in ("row", "column", "scalar")
            if i in loaded:
                tiles.append(loaded[i])
            else:
                tiles.append(self.read_leaf(i) if is_read else Value("0", writer.tile_shape(leaf)))
        tiles += [Value(name, shape) for name in ("products", *more)]
        (found,) = GluonPrinter(self.emit, "x", writer.precision).run(program, tiles)
        self.emit(f"return {found.name if found.shape == shape else f'{found.name} + gl.zeros_like(products)'}")
