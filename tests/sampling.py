"""A sample of the cases of each parametrised test, for runs that must be short.

JAX's own tests sample their cases, too. The sample of a test does not change unless its cases do, so a run can be
repeated.
"""

import collections
import zlib
from collections.abc import Hashable, Mapping, Sequence, Set

import pytest

# A sample has a sixth of a test's cases, but at least two if there are as many.
LEAST_CASES = 2
PART = 6


def sample_cases(names: Sequence[str], cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the indices of a sample of a test's cases, in ascending order.

    The sample covers every parameter value that occurs in several cases, such as an architecture, as far as its size
    allows. A hash of the case names decides otherwise.

    Args:
        names: the names of the cases.
        cases: the values of all parameters of each case, by name.
    """
    size = max(LEAST_CASES, -(-len(cases) // PART))
    counts = collections.Counter(value for case in cases for value in case.items())
    waiting = sorted(range(len(cases)), key=lambda i: zlib.crc32(names[i].encode()))
    missing, chosen = {value for value, count in counts.items() if count > 1}, list[int]()
    while waiting and (missing or len(chosen) < size):
        best = max(waiting, key=lambda i: len(missing.intersection(cases[i].items())))
        waiting.remove(best)
        chosen.append(best)
        missing.difference_update(cases[best].items())
    return sorted(chosen)


def cover(names: Sequence[str], keys: Sequence[Set[Hashable]]) -> list[int]:
    """Return the indices of few cases that together have all keys, in ascending order.

    Args:
        names: the names of the cases.
        keys: the keys of each case.
    """
    waiting = sorted(range(len(keys)), key=lambda i: zlib.crc32(names[i].encode()))
    missing, chosen = set[Hashable]().union(*keys), list[int]()
    while missing:
        best = max(waiting, key=lambda i: len(missing & keys[i]))
        chosen.append(best)
        missing -= keys[best]
    return sorted(chosen)


def split_by_sample(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests in the sample, and the others."""
    by_function = collections.defaultdict(list)
    for item in items:
        by_function[item.parent, getattr(item, "originalname", None) or item.name].append(item)
    kept = set[int]()
    for same in by_function.values():
        if same[0].get_closest_marker("every_case"):
            kept.update(map(id, same))
            continue
        names, specs = [item.name for item in same], [getattr(item, "callspec", None) for item in same]
        if covers := same[0].get_closest_marker("covers"):
            keys = [set(covers.args[0](**spec.params)) for spec in specs if spec]
            kept.update(id(same[i]) for i in cover(names, keys))
            continue
        # The cases of a test share the objects that `parametrize` was given.
        cases = [{name: id(value) for name, value in spec.params.items()} if spec else {} for spec in specs]
        kept.update(id(same[i]) for i in sample_cases(names, cases))
    return [item for item in items if id(item) in kept], [item for item in items if id(item) not in kept]
