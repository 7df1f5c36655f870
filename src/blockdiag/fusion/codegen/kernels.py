"""Triton source of a region's forward kernel, and the writer that the backward kernels share.

The method is FlashAttention's (Dao et al., 2022). The backward kernels recompute tiles of scores:

| kernel | gradients of | a program has | and loops over |
|---|---|---|---|
| rows | leaves without keys | a query tile | keys |
| columns | values, leaves with keys only | a key tile | queries |
| pairs | a bias with queries and keys | a tile of the bias | batch axes that the bias lacks |

There are no atomics, so results are repeatable.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.fusion.analysis.tile_lists import Lists, Part
from blockdiag.fusion.codegen.expressions import TRITON_HEAD, Printer, Value
from blockdiag.fusion.frontend.trace import tile_jaxpr
from blockdiag.fusion.ir.factors import NO_KEY, has_keys, scores_of
from blockdiag.fusion.ir.layout import Layout, flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tile import Kind, Tile
from blockdiag.fusion.ir.tree import DISTANCE, WITHOUT_KEYS, Dim, Leaf, Node, Region, nodes_of
from blockdiag.fusion.ir.tree import Source as ArraySource
from blockdiag.fusion.lowering.eight_bit import is_eight_bit, weight_unit
from blockdiag.fusion.lowering.tile_program import tile_function, value_columns, value_labels
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

LOG2_E = 1.4426950408889634
# Hopper has 50 MB of L2, half of it near each multiprocessor. This is less, to leave room for other reads.
_STREAMED_BYTES = 4 << 20
LIVE = tuple(f"live_{what}{suffix}" for suffix in ("", "_t", "_d") for what in ("counts", "tiles"))


@dataclass(frozen=True)
class Output:
    """Array that a kernel writes.

    Attributes:
        dims: the labels of its axes; "tq" and "tk" are query tiles and key tiles.
        factor: what the array must be multiplied by.
        starts_at_zero: whether the array must be zero before the launch. The source then has an input "zeros_<name>",
            which shares its memory.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    dtype: str
    factor: float = 1.0
    starts_at_zero: bool = False


@dataclass(frozen=True)
class Source:
    """Generated kernel.

    Attributes:
        text: the source.
        name: the name of the function.
        inputs: the names of the arrays that it reads: "leaf0", ..., "value", "log_sum", "cotangent", "delta".
        outputs: the arrays that it writes.
        grid: the number of programs along each axis.
    """

    text: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    grid: tuple[int, int, int]


class Writer:
    """Writer of the source of one kernel of a region.

    Args:
        tile: the tile size.
        leaf_grads: the indices of the leaves whose gradients the kernel computes.
        flipped: whether score tiles are transposed, [columns, rows].
    """

    def __init__(
        self, region: Region, kind: Kind, tile: Tile, leaf_grads: Sequence[int] = (), *, flipped: bool = False
    ) -> None:
        self.region, self.kind, self.tile = region, kind, tile
        self.leaf_grads = tuple(leaf_grads)
        self.flipped = flipped
        # Scores are `factor` times one of `scores`, which are the trees with and without masks.
        self.scores, self.factor = scores_of(region)
        self.lines: list[str] = []
        self.depth = 1
        self.outputs: list[Output] = []
        self.sizes = region.sizes
        self.rows, self.keys = region.sizes["q"], region.sizes["k"]
        self.row_tiles, self.key_tiles = -(-self.rows // tile.rows), -(-self.keys // tile.columns)
        self.tile_counts = (self.row_tiles, self.key_tiles)
        self.tile_sizes = {**region.sizes, "tq": self.row_tiles, "tk": self.key_tiles}
        self.value_layout = layout_of(region.value.shape, region.value_dims, region.sizes)
        self.layouts = [layout_of(leaf.source.shape, leaf.dims, region.sizes) for leaf in region.leaves]
        roots = (region.score, region.weight, *region.extras)
        factors = {x.leaf for node in nodes_of(*roots) if node.kind == "product" for x in node.inputs}
        # Leaves with features that are no operand of a product are read one feature at a time.
        self.multiplied = frozenset(i for i, leaf in enumerate(region.leaves) if leaf in factors)
        columns = value_columns(region)
        self.columns = math.prod(region.sizes[x] for x in columns)
        self.wide = next_power_of_2(max(16, self.columns))
        dtypes = [x.source.dtype for x in region.leaves if x.role in ("query", "key")] + [region.value.dtype]
        self.precision = "ieee" if any(dtype.itemsize == 4 for dtype in dtypes) else "tf32"

    # Lines

    def emit(self, line: str = "") -> None:
        self.lines.append("    " * self.depth + line if line else "")

    def loop(self, header: str, body: Callable[[], None]) -> None:
        self.emit(header)
        self.depth += 1
        body()
        self.depth -= 1

    # Places

    def features(self, leaf: Leaf) -> tuple[int, int]:
        """Return the number of features of a leaf, and the stride between them."""
        stride = flat_stride(self.layouts[self.region.leaves.index(leaf)], leaf.features, self.sizes)
        assert stride is not None, "such leaves are arranged before"
        return math.prod(self.sizes[x] for x in leaf.features), stride

    def tile_shape(self, leaf: Leaf) -> tuple[int, int]:
        match leaf.role:
            case "query":
                return self.tile.rows, self._padded(leaf)
            case "key":
                return self.tile.columns, self._padded(leaf)
            case "feature":
                return 1, next_power_of_2(max(16, self.features(leaf)[0]))
            case "row":
                return self.turned(self.tile.rows, 1)
            case "column":
                return self.turned(1, self.tile.columns)
            case "score" | "distance":
                return self.turned(self.tile.rows, self.tile.columns)
        return 1, 1

    def _padded(self, leaf: Leaf) -> int:
        """Return the number of features of a leaf's tile: a power of two, at least the least that a product sums."""
        return next_power_of_2(max(32 if is_eight_bit(leaf.source.dtype) else 16, self.features(leaf)[0]))

    def turned(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of a score tile, transposed if tiles are flipped."""
        return (columns, rows) if self.flipped else (rows, columns)

    @property
    def row(self) -> str:
        """The index expression that makes a vector of rows a tile."""
        return "[None, :]" if self.flipped else "[:, None]"

    @property
    def column(self) -> str:
        """The index expression that makes a vector of columns a tile."""
        return "[:, None]" if self.flipped else "[None, :]"

    def times(self, line: str, label: str, layout: Layout) -> str:
        """Return the expression of memory offsets of queries or keys, in 64 bits only if needed."""
        stride = layout.stride(label)
        return f"{line}.to(tl.int64) * {stride}" if stride * self.sizes[label] >= 2**30 else f"{line} * {stride}"

    def decode(self, index: str, labels: Sequence[str]) -> None:
        """Print `i_<label>` of every label, decoded from one flat index."""
        rest = index
        for place, label in enumerate(reversed(labels)):
            size = self.sizes[label]
            index = f"{rest} % {size}" if place < len(labels) - 1 else rest
            self.emit(f"i_{label} = tl.full([], {index}, tl.int64)")
            if place < len(labels) - 1:
                self.emit(f"rest_{place} = {rest} // {size}")
                rest = f"rest_{place}"

    def place_program(
        self, tiles: int, labels: Sequence[str], *, last_first: bool = False, through: str | None = None
    ) -> None:
        """Print `own`, the program's tile, and `i_<label>` of its batch axes.

        The grid has one axis, because the limits of the other axes are low.

        Args:
            last_first: run the last tiles first. With causal masks, the last query tiles take longest.
            through: the label that every program loops over completely, if there is one.
        """
        together = self.interleaved(labels, through) if tiles > 1 else 1
        program = "tl.program_id(0)"
        if together > 1:
            self.emit(f"# {together} heads in turn, because their rows are adjacent in memory.")
            self.emit(f"own = {program} // {together} % {tiles}")
            self.emit(f"cell = {program} // {together * tiles} * {together} + {program} % {together}")
        else:
            self.emit(f"own = {program} % {tiles}")
            self.emit(f"cell = {program} // {tiles}")
        if last_first:
            self.emit(f"own = {tiles - 1} - own  # the longest first")
        self.decode("cell", labels)

    def interleaved(self, labels: Sequence[str], through: str | None) -> int:
        """Return how many consecutive batch indices, up to 4, run interleaved because their values are adjacent."""
        if not labels or self.value_layout.stride(labels[-1]) >= self.value_layout.stride("k"):
            return 1
        most = 4
        if through is not None:
            # The arrays that all programs read at once must fit into L2. For ALiBi with 4 heads of 64 and 16,384 keys,
            # interleaving took 1% longer forward and 2% longer backward. With 4,096 keys it took 4% and 3% less.
            most = min(most, max(1, _STREAMED_BYTES // self._bytes_of(through)))
        return math.gcd(most, self.sizes[labels[-1]])

    def _bytes_of(self, label: str) -> int:
        """Return the bytes of all product operands with queries, or with keys, per batch index."""
        role = "key" if label == "k" else "query"
        columns = [value_columns(self.region), *(leaf.features for leaf in self.region.leaves if leaf.role == role)]
        width = sum(math.prod(self.sizes[x] for x in line) for line in columns)
        return self.sizes[label] * width * self.region.value.dtype.itemsize

    def mask(self, rows: bool, columns: bool, axes: int = 2) -> list[str]:
        found = []
        if rows and self.rows % self.tile.rows:
            found.append(f"m_q{self.row}" if axes == 2 else "m_q")
        if columns and self.keys % self.tile.columns:
            found.append(f"m_k{self.column}" if axes == 2 else "m_k")
        return found

    # Reading

    def read(self, place: int) -> Value:
        """Print the load of a leaf's tile, and return the value."""
        leaf, layout = self.region.leaves[place], self.layouts[place]
        name, shape = f"leaf{place}", self.tile_shape(leaf)
        base = layout.base(leaf.labels)
        if leaf.source.key is None and leaf.role in ("row", "column") and not leaf.labels:
            line = f"r_q{self.row}" if leaf.role == "row" else f"r_k{self.column}"
            dtype = {"i": "", "u": ".to(tl.uint32)"}.get(leaf.source.dtype.kind, ".to(tl.float32)")
            self.emit(f"{name} = {line}{dtype}")
            return Value(name, shape)
        widen = widening(leaf)
        match leaf.role:
            case "query" | "key":
                if place not in self.multiplied:
                    return Value(name, shape, is_read=True, feature=self._feature(place))
                count, stride = self.features(leaf)
                line, label = ("r_q", "q") if leaf.role == "query" else ("r_k", "k")
                masks = []
                masks += [f"(tl.arange(0, {shape[1]}) < {count})[None, :]"] if shape[1] != count else []
                at = f"{self.times(line + '[:, None]', label, layout)} + tl.arange(0, {shape[1]})[None, :] * {stride}"
                self.emit(f"{name} = tl.load(p_{name} + {base} + {at}{self.masked(masks, leaf.source)})")
                return Value(name, shape, is_read=True, feature=self._feature(place))
            case "feature":
                return Value(name, shape, is_read=True, feature=self._feature(place))
            case "row":
                at = f"p_{name} + {base} + {self.times('r_q', 'q', layout)}"
                self.emit(f"{name} = (tl.load({at}){widen}){self.row}")
            case "column":
                at = f"p_{name} + {base} + {self.times('r_k', 'k', layout)}"
                self.emit(f"{name} = (tl.load({at}){widen}){self.column}")
            case "score":
                at = f"{self.times('r_q' + self.row, 'q', layout)} + {self.times('r_k' + self.column, 'k', layout)}"
                self.emit(f"{name} = tl.load(p_{name} + {base} + {at}){widen}")
            case "distance":
                at = f"r_q{self.row} - r_k{self.column} + {self.keys - 1}"
                if self.kind == "diagonals":
                    # Tiles may reach beyond the ends of queries and keys.
                    at = f"tl.minimum(tl.maximum({at}, 0), {self.rows + self.keys - 2})"
                self.emit(f"{name} = tl.load(p_{name} + {base} + ({at}) * {layout.stride(DISTANCE)}){widen}")
            case "scalar":
                self.emit(f"{name} = tl.load(p_{name} + {base}){widen}")
        return Value(name, shape)

    def _feature(self, place: int) -> Callable[[str], str]:
        """Return a function that gives the expression which reads one feature of a leaf.

        The result is a vector over rows or columns, or one number for a "feature" leaf.
        """
        leaf, layout = self.region.leaves[place], self.layouts[place]
        _, stride = self.features(leaf)
        if leaf.source.key is None:
            return lambda feature: f"tl.full([], {feature}, tl.int32){widening(leaf)}"
        line = {"query": ("r_q", "q"), "key": ("r_k", "k")}.get(leaf.role)
        at = f"p_leaf{place} + {layout.base(leaf.labels)}"
        at = at if line is None else f"{at} + {self.times(*line, layout)}"
        return lambda feature: f"tl.load({at} + {feature} * {stride}){widening(leaf)}"

    @staticmethod
    def masked(masks: Sequence[str], source: ArraySource | None = None) -> str:
        """Return the mask arguments of a load; `source` is needed if its elements may have eight bits."""
        # Triton does not convert integers to eight-bit floats.
        zero = "0.0" if source is not None and is_eight_bit(source.dtype) else "0"
        return f", mask={' & '.join(masks)}, other={zero}" if masks else ""

    def read_value(self, name: str = "value") -> None:
        """Print the load of a value tile, [keys of the tile, value columns]."""
        layout = self.value_layout
        stride = flat_stride(layout, value_columns(self.region), self.sizes)
        at = f"{self.times('r_k[:, None]', 'k', layout)} + tl.arange(0, {self.wide})[None, :] * {stride}"
        masks = [f"(tl.arange(0, {self.wide}) < {self.columns})[None, :]"] if self.wide != self.columns else []
        base = layout.base(value_labels(self.region))
        self.emit(f"{name} = tl.load(p_value + {base} + {at}{self.masked(masks, self.region.value)})")

    def result_layout(self) -> tuple[Layout, int]:
        """Return the layout of the result and of its cotangent, and the stride of its columns."""
        layout = layout_of(shape_of(self.region.out_dims, self.sizes), self.region.out_dims, self.sizes)
        stride = flat_stride(layout, value_columns(self.region), self.sizes)
        assert stride is not None, "such results are arranged before"
        return layout, stride

    def result_place(self) -> tuple[str, list[str]]:
        layout, stride = self.result_layout()
        lines = f"{self.times('o_q[:, None]', 'q', layout)} + tl.arange(0, {self.wide})[None, :] * {stride}"
        at = f"{layout.base(self.region.batch)} + {lines}"
        masks = ["m_q[:, None]"] if self.rows % self.tile.rows else []
        masks += [f"(tl.arange(0, {self.wide}) < {self.columns})[None, :]"] if self.wide != self.columns else []
        return at, masks

    def row_place(self) -> str:
        """Return the offset expression of an array [batch.., q]."""
        labels = (*self.region.batch, "q")
        layout = layout_of([self.sizes[x] for x in labels], [(x,) for x in labels], self.sizes)
        return f"{layout.base(self.region.batch)} + o_q"

    # Tile programs

    def tile_avals(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(self.tile_shape(leaf), leaf.source.dtype) for leaf in self.region.leaves]

    def tile_program(self, roots: Sequence[Node | None]) -> core.ClosedJaxpr:
        """Return the program that computes some nodes from tiles of the leaves."""
        function = tile_function(roots, self.region.leaves, np.dtype(np.float32), flipped=self.flipped)

        def some(*tiles: Any) -> list[Any]:
            return [x for x in function(*tiles) if x is not None]

        return tile_jaxpr(some, *self.tile_avals())

    def evaluate(self, roots: Sequence[Node | None], tiles: Sequence[Value], prefix: str) -> list[Value | None]:
        """Print nodes and return their values, None for None."""
        found = iter(Printer(self.emit, prefix, self.precision).run(self.tile_program(roots), tiles))
        return [None if root is None else next(found) for root in roots]

    def whole(self, value: Value) -> str:
        """Return the expression of a value broadcast to a full score tile."""
        shape = list(self.turned(self.tile.rows, self.tile.columns))
        return value.name if list(value.shape) == shape else f"(tl.zeros({shape}, tl.float32) + {value.name})"

    def function_text(self) -> tuple[str, tuple[str, ...]]:
        """Return the text of the function, and the names of the arrays that it reads."""
        body = "\n".join(self.lines)
        inputs = [f"leaf{i}" for i in range(len(self.region.leaves)) if f"p_leaf{i} " in body or f"p_leaf{i}\n" in body]
        written = {x.name for x in self.outputs}
        others = ("value", "log_sum", "cotangent", "delta", *LIVE)
        inputs += [x for x in others if x not in written and f"p_{x} " in body]
        parameters = ", ".join(f"p_{x}" for x in (*inputs, *(x.name for x in self.outputs)))
        name = f"fused_{self.kind}"
        return f"@triton.jit\ndef {name}({parameters}):\n{body}\n", tuple(inputs)

    def source(self, programs: int) -> Source:
        text, inputs = self.function_text()
        return Source(
            TRITON_HEAD + text,
            f"fused_{self.kind}",
            inputs,
            tuple(self.outputs),
            (programs, 1, 1),
        )

    def through(self, lists: Lists | None, body: Callable[[bool], None], *, rows: bool = False) -> None:
        """Print the loops over key tiles, or over query tiles, all of them or the live ones.

        Args:
            body: prints the loop body for `tile`. Its argument says whether masks and the end of the keys apply.
            rows: loop over query tiles.
        """
        tiles, others = (self.key_tiles, self.row_tiles) if not rows else (self.row_tiles, self.key_tiles)
        if lists is None:
            self.loop(f"for tile in range({tiles}):", lambda: body(True))
            return
        suffix, form = "_t" if rows else "", lists.forms[rows]
        self.line_of(lists, suffix, others)
        self.emit(f"count = tl.load(p_live_counts{suffix} + line * 2 + 1)")

        def through_part(first: str, last: str, part: Part) -> None:
            def with_tile() -> None:
                self.emit(f"tile = {form.tile(suffix, 'tl', 'place', part)}")
                body(part != "full")

            self.loop(f"for place in range({first}, {last}):", with_tile)

        if lists.has_full:
            self.emit(f"first = tl.load(p_live_counts{suffix} + line * 2)")
            self.emit("# Tiles that no mask touches.")
            through_part("0", "first", "full")
            through_part("first", "count", "masked")
        else:
            through_part("0", "count", "all")

    def line_of(self, lists: Lists, suffix: str, lines: int) -> None:
        """Print `line`, the program's line of tiles, and the numbers that locate its tiles.

        Args:
            lines: the number of lines per batch index.
        """
        sizes = {label: self.sizes[label] for label in lists.labels}
        layout = layout_of([*sizes.values(), 1], [*((label,) for label in lists.labels), ()], sizes)
        self.emit(f"line = ({layout.base(lists.labels)}) * {lines} + own")
        form = lists.forms[("", "_t", "_d").index(suffix)]
        for text in form.setup(suffix, "tl"):
            self.emit(text)

    def tile_of(self, axis: Literal["q", "k"], index: str) -> None:
        """Print the indices `o_`, the mask `m_` and the clamped indices `r_` of a tile's queries or keys."""
        size, count = (self.tile.rows, self.rows) if axis == "q" else (self.tile.columns, self.keys)
        self.emit(f"o_{axis} = {index} * {size} + tl.arange(0, {size})")
        if count % size:
            self.emit(f"m_{axis} = o_{axis} < {count}")
            # Out-of-range places read the last element again. Its values are finite and are dropped.
            self.emit(f"r_{axis} = tl.minimum(o_{axis}, {count - 1})")
        else:
            self.emit(f"r_{axis} = o_{axis}")


def widening(leaf: Leaf) -> str:
    """Return the suffix that converts loaded elements of a leaf to the dtype of tile computations."""
    return {"b": " != 0", "i": ".to(tl.int32)", "u": ".to(tl.uint32)"}.get(leaf.source.dtype.kind, ".to(tl.float32)")


def forward_source(region: Region, tile: Tile, lists: Lists | None = None) -> Source:
    """Return the kernel that computes a region's result and log-sum-exp."""
    writer = Writer(region, "forward", tile)
    emit = writer.emit
    emit("# One program: a tile of queries against all tiles of keys.")
    writer.place_program(writer.row_tiles, region.batch, last_first=lists is not None, through=None if lists else "k")
    writer.tile_of("q", "own")
    before = {i: writer.read(i) for i, leaf in enumerate(region.leaves) if leaf.role in WITHOUT_KEYS}
    emit(f"output = tl.zeros([{tile.rows}, {writer.wide}], tl.float32)")
    if region.score is not None:
        emit(f'largest = tl.full([{tile.rows}], float("-inf"), tl.float32)')
        emit(f"total = tl.zeros([{tile.rows}], tl.float32)")
    weight_of_rows = None
    if region.score is not None and region.weight is not None and not has_keys(region.weight):
        weight_of_rows = region.weight
    in_loop = None if weight_of_rows is not None else region.weight

    def body(has_masks: bool) -> None:
        writer.tile_of("k", "tile")
        tiles = [before[i] if i in before else writer.read(i) for i in range(len(region.leaves))]
        score, weight = writer.evaluate([writer.scores[0 if has_masks else 1], in_loop], tiles, "x")
        _add_tile(writer, score, weight, writer.mask(False, True) if has_masks else [])

    writer.through(lists, body)
    place, masks = writer.result_place()
    unit = weight_unit(region)
    if region.score is not None:
        emit(f"largest *= {writer.factor * LOG2_E}")
        rest = [before.get(i, Value("0", writer.tile_shape(leaf))) for i, leaf in enumerate(region.leaves)]
        _add_extras(writer, rest)
        emit("is_empty = total == 0  # rows that see no key are 0")
        emit(f"norm = tl.where(is_empty, 0.0, {1.0 / unit!r} / total)")
        emit("output *= norm[:, None]")
        if weight_of_rows is not None:
            (weight,) = writer.evaluate([weight_of_rows], rest, "w")
            assert weight is not None
            emit(f"output *= {weight.name}")
        emit('log_sum = tl.where(is_empty, float("-inf"), (largest + tl.log2(total)) * 0.6931471805599453)')
    else:
        emit(f"log_sum = tl.zeros([{tile.rows}], tl.float32)")
    emit(f"tl.store(p_output + {place}, output.to(p_output.dtype.element_ty){store_mask(masks)})")
    emit(f"tl.store(p_log_sum + {writer.row_place()}, log_sum{store_mask(writer.mask(True, False, 1))})")
    writer.outputs = list(forward_outputs(region))
    return writer.source(writer.row_tiles * cells_of(region, region.batch))


def forward_outputs(region: Region) -> tuple[Output, Output]:
    """Return the outputs of a forward kernel: the result and the log-sum-exp."""
    labels = (*region.batch, "q")
    return (
        Output("output", region.out_dims, shape_of(region.out_dims, region.sizes), _name(region.dtype)),
        Output("log_sum", tuple((x,) for x in labels), tuple(region.sizes[x] for x in labels), "float32"),
    )


def _add_tile(writer: Writer, score: Value | None, weight: Value | None, masks: Sequence[str]) -> None:
    """Print one step of the forward loop: online softmax and value product of a tile."""
    emit = writer.emit
    if score is not None:
        emit(f"score = {writer.whole(score)}")
        if masks:
            emit(f'score = tl.where({masks[0]}, score, float("-inf"))')
        emit("new = tl.maximum(largest, tl.max(score, 1))")
        no_key = NO_KEY / writer.factor
        emit(f"base = tl.where(new <= {no_key}, 0.0, new) * {writer.factor * LOG2_E}  # rows that have seen no key yet")
        emit(f"shrink = tl.exp2(largest * {writer.factor * LOG2_E} - base)")
        emit(f"power = tl.exp2(score * {writer.factor * LOG2_E} - base[:, None])")
        emit("total = total * shrink + tl.sum(power, 1)")
        emit("output *= shrink[:, None]")
        emit("largest = new")
        if weight is not None:
            emit(f"power *= {weight.name}")
    else:
        assert weight is not None
        emit(f"power = {writer.whole(weight)}")
        if masks:
            emit(f"power = tl.where({masks[0]}, power, 0.0)")
    writer.read_value()
    if is_eight_bit(writer.region.value.dtype):
        unit = weight_unit(writer.region)
        weights = "power" if unit == 1.0 else f"(power * {unit})"
        emit("# The tensor cores of Hopper keep about 14 bits of their sums, so each tile's sums are added in float32.")
        emit(f"output = tl.dot({weights}.to(value.dtype), value, output, max_num_imprecise_acc={writer.tile.columns})")
        return
    emit(f'output = tl.dot(power.to(value.dtype), value, output, input_precision="{writer.precision}")')


def _add_extras(writer: Writer, tiles: Sequence[Value]) -> None:
    """Print the addition of logits without values to the softmax; `largest` is in base-2 units by then."""
    emit = writer.emit
    for i, extra in enumerate(writer.evaluate(writer.region.extras, tiles, "e")):
        assert extra is not None
        emit(f"logit{i} = (tl.zeros([{writer.tile.rows}, 1], tl.float32) + {extra.name}) * {LOG2_E}")
        emit(f"logit{i} = tl.sum(logit{i}, 1)")
        emit(f"new = tl.maximum(largest, logit{i})")
        emit('base = tl.where(new == float("-inf"), 0.0, new)')
        emit(f"total = total * tl.exp2(largest - base) + tl.exp2(logit{i} - base)")
        emit("output *= tl.exp2(largest - base)[:, None]")
        emit("largest = new")


def cells_of(region: Region, labels: Sequence[str]) -> int:
    """Return the product of the sizes of some batch axes."""
    return math.prod(region.sizes[x] for x in labels)


def store_mask(masks: Sequence[str]) -> str:
    """Return the mask argument of a store."""
    return f", mask={' & '.join(masks)}" if masks else ""


def _name(dtype: np.dtype[Any]) -> str:
    return jnp.dtype(dtype).name
