"""Forms in which a kernel reads the live tiles of a line, and the source text that reads them.

A line is a query tile with its key tiles, a key tile with its query tiles, or a diagonal of tiles. A kernel iterates
over the places 0, 1, ... of a line: first the full tiles, then the masked ones. One of three forms maps places to
tiles:

| form | numbers of a line | tile at a place |
|---|---|---|
| ranges | for each range, tile minus place, and its end place | the place plus the first number of its range |
| shared | a base tile, and positions in lists that all lines share | the base plus an entry of a list |
| list | the tiles | an entry of the line |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["full", "masked", "all"]
"""The places that a loop iterates over: those of full tiles, those of masked tiles, or all."""

SHARED_WIDTH = 3


@dataclass(frozen=True)
class Form:
    """Form in which the live tiles of a line are stored.

    Attributes:
        kind: see the table of this module.
        most: an upper bound of the number of live tiles in a line.
        full, masked: the number of ranges of full tiles and of masked tiles. A line with fewer has empty ranges.
    """

    kind: Literal["ranges", "shared", "list"]
    most: int
    full: int = 0
    masked: int = 0

    @property
    def width(self) -> int:
        """The count of numbers stored for a line."""
        if self.kind == "ranges":
            return 2 * (self.full + self.masked) - 1
        return SHARED_WIDTH if self.kind == "shared" else self.most

    def setup(self, suffix: str, language: str) -> list[str]:
        """Return source lines that read the numbers of `line` before a loop.

        Args:
            suffix: the suffix of the array names.
            language: the name of Triton's language module in the source.
        """
        at = f"p_live_tiles{suffix} + line * {self.width}"
        match self.kind:
            case "ranges":
                moves = [f"move{i} = {language}.load({at} + {2 * i})" for i in range(self.full + self.masked)]
                ends = [f"end{i} = {language}.load({at} + {2 * i + 1})" for i in range(len(moves) - 1)]
                return moves + ends
            case "shared":
                names = ("tile_base", "full_list", "masked_list")
                numbers = [f"{name} = {language}.load({at} + {i})" for i, name in enumerate(names)]
                return [*numbers, f"num_full = {language}.load(p_live_counts{suffix} + line * 2)"]
        return []

    def tile(self, suffix: str, language: str, place: str, part: Part) -> str:
        """Return the expression of the tile at a place of `line`."""
        match self.kind:
            case "ranges":
                last = self.full if part == "full" else self.full + self.masked
                return f"{place} + {_move(language, place, range(self.full if part == 'masked' else 0, last))}"
            case "shared":
                start = f"{language}.where({place} < num_full, full_list, masked_list)"
                start = {"full": "full_list", "masked": "masked_list"}.get(part, start)
                return f"tile_base + {language}.load(p_live_tiles{suffix} + {start} + {place})"
        return f"{language}.load(p_live_tiles{suffix} + line * {self.width} + {place})"


def _move(language: str, place: str, ranges: Sequence[int]) -> str:
    """Return the expression of tile minus place in the range that contains a place."""
    if not ranges:
        return "0"
    first, *rest = ranges
    return (
        f"{language}.where({place} < end{first}, move{first}, {_move(language, place, rest)})"
        if rest
        else f"move{first}"
    )


@dataclass(frozen=True)
class Lists:
    """Static description of the lists of live tiles that a kernel reads.

    Attributes:
        labels: the batch labels along which the lists differ.
        has_full: whether full tiles come first and are counted separately.
        forms: the form of key tiles per query tile, of query tiles per key tile, and, if requested, of tiles per
            diagonal of tiles.
    """

    labels: tuple[str, ...]
    has_full: bool
    forms: tuple[Form, ...]
