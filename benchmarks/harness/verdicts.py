"""Figures against their limits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One figure against its limit.

    Attributes:
        name: what was measured.
        value: the figure; None when it was not measured.
        limit: what it may not exceed, or with `at_least` not fall short of.
        uncertainty: how far beyond the limit a value may lie and still not be told from it.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = False
    uncertainty: float = 0.0

    @property
    def is_met(self) -> bool:
        """Return whether the figure was measured and is within its limit."""
        if self.value is None:
            return False
        if self.at_least:
            return self.value >= self.limit - self.uncertainty
        return self.value <= self.limit + self.uncertainty
