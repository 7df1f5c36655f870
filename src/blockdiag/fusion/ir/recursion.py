"""Recursion on an explicit stack, because long programs would overflow Python's own.

A residual stream of a thousand additions is a chain of a thousand values, each computed from the one before. A
recursive function over such chains is written as a generator. It yields each recursive call, which is a generator
itself, and is sent the call's result.
"""

from collections.abc import Generator
from typing import Any

type Steps[T] = Generator[Any, Any, T]
"""A recursive function as a generator: it yields recursive calls and returns its result."""


def finished[T](steps: Steps[T], *passed: type[Exception]) -> T:
    """Run a recursive generator, and return its result.

    Args:
        steps: the generator.
        passed: the exceptions that are thrown into the caller's generator, which may catch them. All others leave this
            function at once.
    """
    waiting: list[Steps[Any]] = [steps]
    result: Any = None
    failure: Exception | None = None
    while waiting:
        try:
            called = waiting[-1].send(result) if failure is None else waiting[-1].throw(failure)
        except StopIteration as end:
            waiting.pop()
            result, failure = end.value, None
        except passed as raised:
            waiting.pop()
            result, failure = None, raised
        else:
            waiting.append(called)
            result, failure = None, None
    if failure is not None:
        raise failure
    return result
