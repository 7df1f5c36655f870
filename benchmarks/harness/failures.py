"""Errors that stop a measurement: wrong results, and programs that do other work than they should."""

# ||out - exact|| / ||exact||. Rounding of bfloat16 operands, weights and results gives 2e-3 to 6e-3.
GATE = 1.5e-2


class WrongResult(ValueError):
    """An implementation disagrees with the float64 oracle: its time would mean nothing."""


class ChainBroken(RuntimeError):
    """XLA removed, merged or added work in a chained program: its time is not that of so many calls."""
