"""Triton source of the gradient of a leaf that depends on q - k alone, see `kernels.py`.

Square tiles on one diagonal of tiles have the same distances at the same places. A program adds up these tiles
elementwise, and then sums the diagonals of the accumulated tile. Each distance lies on at most two diagonals of tiles,
whose sums are added afterwards. There are no atomics, so results are repeatable.
"""

from collections.abc import Callable

from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.codegen.backward import add_gradients, print_gradients, read_rows, times_factor
from blockdiag.fusion.codegen.kernels import Output, Source, Writer, cells_of
from blockdiag.fusion.ir.layout import layout_of, shape_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Dim, Region

# Enough programs to keep a large GPU busy: about four per multiprocessor.
_PROGRAMS = 512


def diagonals_source(region: Region, tile: Tile, place: int, lists: Lists | None = None) -> Source:
    """Return the kernel for the gradient of a leaf indexed by distance: float32 [labels.., parts, diagonals, 2 * size].

    Diagonals of tiles run from the last key to the last query. Each has the sums of 2 * size consecutive distances, the
    first of which is `size` below that of a tile's first element. If the leaf lacks batch axes and there would be few
    programs, the batch is divided into parts.

    Args:
        tile: a square tile.
        place: the index of the leaf.
    """
    leaf, size = region.leaves[place], tile.rows
    assert tile.columns == size, "diagonals need square tiles"
    others = [label for label in region.batch if label not in leaf.labels]
    writer = Writer(region, "diagonals", tile, (place,))
    emit = writer.emit
    diagonals = writer.row_tiles + writer.key_tiles - 1
    programs, cells = diagonals * cells_of(region, leaf.labels), cells_of(region, others)
    parts = min(cells, -(-_PROGRAMS // programs))
    writer.place_program(diagonals * parts, leaf.labels)
    if parts > 1:
        emit(f"part = own % {parts}")
        emit(f"own = own // {parts}")
    emit("# The longest first: they lie in the middle.")
    emit(f"own = {diagonals // 2} + tl.where(own % 2 == 0, own // 2, -(own + 1) // 2)")
    emit(f"shift = own - {writer.key_tiles - 1}  # tiles of queries beyond those of keys")
    emit("# All tiles of the diagonal have these distances.")
    emit(f"r_q = shift * {size} + tl.arange(0, {size})")
    emit(f"r_k = tl.arange(0, {size})")
    same = [x for x in enumerate(region.leaves) if not set(x[1].labels) & set(others)]
    fixed = {i: writer.read(i) for i, x in same if x.role in ("scalar", "distance")}
    emit(f"sum{place} = tl.zeros([{size}, {size}], tl.float32)")

    def body() -> None:
        writer.tile_of("q", "tile")
        writer.tile_of("k", "(tile - shift)")
        read_rows(writer)
        tiles = [fixed[i] if i in fixed else writer.read(i) for i in range(len(region.leaves))]
        add_gradients(writer, print_gradients(writer, tiles, wants_power=False, has_masks=True))

    def cell() -> None:
        if others:
            writer.decode("other", others)
        _along(writer, lists, body)

    if others:
        writer.loop(f"for other in range({'part' if parts > 1 else 0}, {cells}, {parts}):", cell)
    else:
        cell()
    times_factor(writer)
    _store_diagonals(writer, place, diagonals, parts)
    return writer.source(programs * parts)


def _along(writer: Writer, lists: Lists | None, body: Callable[[], None]) -> None:
    """Print the loop over the query tiles of a diagonal, all of them or the live ones."""
    if lists is None:
        first, last = "tl.maximum(shift, 0)", f"tl.minimum({writer.row_tiles}, shift + {writer.key_tiles})"
        writer.loop(f"for tile in range({first}, {last}):", body)
        return
    writer.line_of(lists, "_d", writer.row_tiles + writer.key_tiles - 1)

    def with_tile() -> None:
        writer.emit(f"tile = {lists.forms[2].tile('_d', 'tl', 'place', 'all')}")
        body()

    writer.loop("for place in range(tl.load(p_live_counts_d + line * 2 + 1)):", with_tile)


def _store_diagonals(writer: Writer, place: int, diagonals: int, parts: int) -> None:
    """Print the sums along the diagonals of a tile: each row is rotated by its index, then columns are summed."""
    leaf, size, emit = writer.region.leaves[place], writer.tile.rows, writer.emit
    sizes = {**writer.sizes, "parts": parts, "diagonals": diagonals, "halves": 2 * size}
    dims: tuple[Dim, ...] = (*((label,) for label in leaf.labels), ("parts",), ("diagonals",), ("halves",))
    shape = shape_of(dims, sizes)
    name, base = f"grad{place}", layout_of(shape, dims, sizes).base(leaf.labels)
    writer.outputs.append(Output(name, dims, shape, "float32"))
    emit(f"line = tl.arange(0, {size})")
    emit("row, column = line[:, None], line[None, :]")
    emit(f"turned = tl.gather(sum{place}, (row - column) & {size - 1}, 1)")
    own = f"(part * {diagonals} + own)" if parts > 1 else "own"
    at = f"p_{name} + {base} + {own} * {2 * size} + line"
    emit(f"tl.store({at}, tl.sum(tl.where(row < column, turned, 0.0), 0))")
    emit(f"tl.store({at} + {size}, tl.sum(tl.where(row < column, 0.0, turned), 0))")
