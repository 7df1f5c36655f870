"""Triton source of the gradient of what depends on q - k alone, see `kernels`.

Tiles of equally many queries and keys that lie on one diagonal of tiles have the same distances in the same places. A
program goes through these tiles, adds them up as they are, and sums the diagonals of the one tile that is left: each
distance lies on two diagonals of tiles at most, whose sums are added afterwards. No atomics, so results repeat.
"""

from blockdiag.fusion.kernels import Output, Source, Tile, Writer, cells_of
from blockdiag.fusion.kernels_backward import add_gradients, print_gradients, read_rows, times_factor
from blockdiag.fusion.layout import layout_of, shape_of
from blockdiag.fusion.tree import Dim, Region


def diagonals_source(region: Region, tile: Tile, place: int) -> Source:
    """The gradient of a leaf of distances, by diagonals of tiles: float32 [labels.., diagonals, 2 * size].

    Of each diagonal of tiles, from the last key's to the last query's, the sums of distances from `size` less than
    the first element of a tile has.

    Args:
        tile: as many rows as columns.
        place: of the leaf.
    """
    leaf, size = region.leaves[place], tile.rows
    assert tile.columns == size, "diagonals are those of squares"
    others = [label for label in region.batch if label not in leaf.labels]
    writer = Writer(region, "diagonals", tile, (place,))
    emit = writer.emit
    diagonals = writer.row_tiles + writer.key_tiles - 1
    writer.place_program(diagonals, leaf.labels)
    emit("# The longest first: they lie in the middle.")
    emit(f"own = {diagonals // 2} + tl.where(own % 2 == 0, own // 2, -(own + 1) // 2)")
    emit(f"shift = own - {writer.key_tiles - 1}  # tiles of queries beyond those of keys")
    fixed = {
        i: writer.read(i) for i, x in enumerate(region.leaves) if x.role == "scalar" and not set(x.labels) & set(others)
    }
    emit(f"sum{place} = tl.zeros([{size}, {size}], tl.float32)")

    def body() -> None:
        writer.tile_of("q", "tile")
        writer.tile_of("k", "(tile - shift)")
        read_rows(writer)
        tiles = [fixed[i] if i in fixed else writer.read(i) for i in range(len(region.leaves))]
        add_gradients(writer, print_gradients(writer, tiles, wants_power=False, has_masks=True))

    def cells() -> None:
        if others:
            writer.decode("other", others)
        first, last = "tl.maximum(shift, 0)", f"tl.minimum({writer.row_tiles}, shift + {writer.key_tiles})"
        writer.loop(f"for tile in range({first}, {last}):", body)

    if others:
        writer.loop(f"for other in range({cells_of(region, others)}):", cells)
    else:
        cells()
    times_factor(writer)
    _store_diagonals(writer, place)
    return writer.source(diagonals * cells_of(region, leaf.labels))


def _store_diagonals(writer: Writer, place: int) -> None:
    """The sums along the diagonals of a tile: rows are turned, each by its number, then columns are added up."""
    leaf, size, emit = writer.region.leaves[place], writer.tile.rows, writer.emit
    diagonals = writer.row_tiles + writer.key_tiles - 1
    sizes = {**writer.sizes, "diagonals": diagonals, "halves": 2 * size}
    dims: tuple[Dim, ...] = (*((label,) for label in leaf.labels), ("diagonals",), ("halves",))
    shape = shape_of(dims, sizes)
    name, base = f"grad{place}", layout_of(shape, dims, sizes).base(leaf.labels)
    writer.outputs.append(Output(name, dims, shape, "float32"))
    emit(f"line = tl.arange(0, {size})")
    emit("row, column = line[:, None], line[None, :]")
    emit(f"turned = tl.gather(sum{place}, (row - column) & {size - 1}, 1)")
    at = f"p_{name} + {base} + own * {2 * size} + line"
    emit(f"tl.store({at}, tl.sum(tl.where(row < column, turned, 0.0), 0))")
    emit(f"tl.store({at} + {size}, tl.sum(tl.where(row < column, 0.0, turned), 0))")
