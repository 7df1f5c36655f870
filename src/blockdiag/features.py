"""How a part of the library that rests on private interfaces of other packages works here: the fast or the slow way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """Whether a private interface that makes something fast was found.

    Attributes:
        name: what it makes fast.
        is_fast: whether it was found; otherwise the slow way, which gives the same results, is taken.
        detail: what was found, or what is missing and done instead.
    """

    name: str
    is_fast: bool
    detail: str
