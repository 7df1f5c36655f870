"""The sample of parametrised cases that `./do test` runs."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tests.sampling import LEAST_CASES, cover, sample_cases, split_by_sample

NAMES = [f"case {i}" for i in range(24)]


def test_few_cases_are_all_in_the_sample():
    assert sample_cases(NAMES[:LEAST_CASES], [{"x": i} for i in range(LEAST_CASES)]) == list(range(LEAST_CASES))


def test_sample_is_a_sixth_and_does_not_depend_on_the_run():
    cases = [{"x": i} for i in range(24)]
    sample = sample_cases(NAMES, cases)
    assert len(sample) == 4 and sample == sorted(set(sample)) == sample_cases(NAMES, cases)


def test_sample_of_a_product_has_every_value():
    cases = [{"x": x, "y": y, "z": z} for x, y, z in itertools.product(range(6), range(2), "ab")]
    sample = [cases[i] for i in sample_cases(NAMES, cases)]
    assert {case["x"] for case in sample} == set(range(6))
    assert {case["y"] for case in sample} == {0, 1}
    assert {case["z"] for case in sample} == set("ab")


def test_cover_has_all_keys_in_few_cases():
    keys = [{1}, {1, 2, 3}, {4}, {3, 4}, set(), {2, 5}]
    chosen = cover(NAMES[: len(keys)], keys)
    assert set().union(*(keys[i] for i in chosen)) == {1, 2, 3, 4, 5} and len(chosen) == 3
    assert chosen == cover(NAMES[: len(keys)], keys) and cover(NAMES[:1], [set()]) == []


def collected(function: str, cases: Sequence[Mapping[str, object]], **markers: object) -> list[Any]:
    """Return stand-ins for a test's collected cases; without cases it is not parametrised.

    Each marker has one argument.
    """
    specs = [{"callspec": SimpleNamespace(params=params)} for params in cases] or [{}]
    names = [f"{function}[{i}]" for i in range(len(specs))]
    found = {name: SimpleNamespace(args=(argument,)) for name, argument in markers.items()}
    return [
        SimpleNamespace(parent="file", originalname=function, name=name, get_closest_marker=found.get, **spec)
        for name, spec in zip(names, specs, strict=True)
    ]


def test_collected_tests_are_sampled_by_function():
    product = [{"x": x, "y": y} for x, y in itertools.product(range(8), "ab")]
    tests = [
        collected("product", product),
        collected("few", product[:LEAST_CASES]),
        collected("pages", product, every_case=1),
        collected("plans", product, covers=lambda x, y: {x % 4}),
        collected("one", []),
    ]
    sample, others = split_by_sample([item for same in tests for item in same])
    sizes = collections.Counter(item.originalname for item in sample)
    assert sizes == {"product": 8, "few": LEAST_CASES, "pages": 16, "plans": 4, "one": 1}
    assert collections.Counter(item.originalname for item in others) == {"product": 8, "plans": 12}
