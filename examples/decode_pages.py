"""Pages of `decode.py`: reference counts, and an index of finished pages by which requests share equal prefixes."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

# The prefix of a page that begins a text.
START = 0


class FinishedPage(NamedTuple):
    """An entry of the index: a page that is full, and the number of the text from its beginning to the page's end."""

    page: int
    prefix: int


class PagePool:
    """A pool of page numbers.

    A page is in one of three states:

    | state | owners | in the index |
    |---|---|---|
    | free | 0 | no |
    | in use | 1 while it is written; any number once it is finished | once it is finished |
    | idle | 0 | yes; its content can still be shared, until the page is needed for something else |

    The index finds a page by the text before it and the text in it. The text before it is represented by the number of
    the previous page's entry. Numbers are never reused, so an entry is never found after other text.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.owners = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._index: dict[tuple[int, bytes], FinishedPage] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        # A dict is ordered: the least recently used page comes first.
        self._idle: dict[int, None] = {}
        self._prefixes = itertools.count(START + 1)

    @property
    def available(self) -> int:
        """The number of pages that `take` can return."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        return len(self.owners) - self.available

    @property
    def idle(self) -> int:
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self) -> int | None:
        """Return a page to write to, or None if all pages are in use."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = next(iter(self._idle))
            del self._idle[page], self._index[self._keys.pop(page)]
        else:
            return None
        self.owners[page] = 1
        return page

    def finish(self, page: int, prefix: int, text: bytes) -> int:
        """Enter a page that is full and final into the index, unless an equal page is there.

        Args:
            page: the page.
            prefix: number of the text before the page.
            text: the text of the page.

        Returns:
            The number of the text up to the end of the page.
        """
        found = self._index.get((prefix, text))
        if found is None:
            found = self._index[prefix, text] = FinishedPage(page, next(self._prefixes))
            self._keys[page] = prefix, text
        return found.prefix

    def share(self, prefix: int, text: bytes) -> FinishedPage | None:
        """Return a finished page with this text after this prefix, with one more owner; None if there is none."""
        found = self._index.get((prefix, text))
        if found is not None:
            self.owners[found.page] += 1
            self._idle.pop(found.page, None)
        return found

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each page of a text."""
        # The end of a text is of less use to others than its beginning, so it becomes idle, and is reused, first.
        for page in reversed(list(pages)):
            self.owners[page] -= 1
            if self.owners[page] == 0:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)
