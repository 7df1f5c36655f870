"""How a kernel finds the tiles that masks leave in a line of tiles, as far as its source says it.

A line is a tile of queries with its tiles of keys, a tile of keys with its tiles of queries, or a diagonal of tiles. A
kernel goes through the places 0, 1, ... of a line: first the tiles that no mask touches, then the others. One of three
forms tells which tile is at a place:

| form | numbers of a line | tile at a place |
|---|---|---|
| ranges | for each range, tile minus place, and the place where it ends | the place plus the number of its range |
| shared | a base tile, and where the line begins in lists that all lines share | the base plus a number of the list |
| list | the tiles | a number of the line |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["full", "masked", "all"]
"""The places that a loop goes through: those of tiles that no mask touches, the others, or all."""

SHARED_WIDTH = 3


@dataclass(frozen=True)
class Form:
    """The form in which the tiles of a line are told.

    Attributes:
        kind: see above.
        most: no line has more tiles.
        full, masked: ranges of tiles that no mask touches, and of others; of a line without so many, some are empty.
    """

    kind: Literal["ranges", "shared", "list"]
    most: int
    full: int = 0
    masked: int = 0

    @property
    def width(self) -> int:
        """Numbers of a line."""
        if self.kind == "ranges":
            return 2 * (self.full + self.masked) - 1
        return SHARED_WIDTH if self.kind == "shared" else self.most

    def setup(self, suffix: str, language: str) -> list[str]:
        """Lines of source that read the numbers of `line`, before a loop.

        Args:
            suffix: of the names of the arrays.
            language: the name under which the source knows Triton's language.
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
        """The expression of the tile at a place of `line`."""
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
    """The distance between tiles and places in the range that a place is in."""
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
    """What a kernel knows of the tiles that masks leave.

    Attributes:
        labels: batch labels that they differ along.
        has_full: whether tiles that no mask touches come first, and are counted apart.
        forms: of tiles of keys by tile of queries, of tiles of queries by tile of keys, and of tiles along a diagonal
            of tiles where these are asked for.
    """

    labels: tuple[str, ...]
    has_full: bool
    forms: tuple[Form, ...]
