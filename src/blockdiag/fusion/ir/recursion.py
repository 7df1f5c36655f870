"""Recursion that takes no more of Python's stack than one call: programs are as deep as they are long.

A residual stream of a thousand additions is a thousand values, each of which is asked for by the next one. What asks in
such a way is written as a generator: it yields what it would call, a generator as well, and is sent what that returns.
"""

from collections.abc import Generator
from typing import Any

type Steps[T] = Generator[Any, Any, T]
"""What a recursive function does: it yields the steps of calls, and returns."""


def finished[T](steps: Steps[T], *passed: type[Exception]) -> T:
    """What steps return.

    Args:
        passed: exceptions that whoever waits for a call is told of, as it may be ready for them. Others end everything.
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
