"""The sample of parametrised cases that `./do test` runs."""

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tests.sampling import LEAST_CASES, sample_cases, split_by_sample

NAMES = [f"case {i}" for i in range(24)]


def test_few_cases_are_all_in_the_sample():
    assert sample_cases(NAMES[:LEAST_CASES], [{"x": i} for i in range(LEAST_CASES)]) == list(range(LEAST_CASES))


def test_sample_is_a_quarter_and_does_not_depend_on_the_run():
    cases = [{"x": i} for i in range(24)]
    sample = sample_cases(NAMES, cases)
    assert len(sample) == 6 and sample == sorted(set(sample)) == sample_cases(NAMES, cases)


def test_sample_of_a_product_has_every_value():
    cases = [{"x": x, "y": y, "z": z} for x, y, z in itertools.product(range(6), range(2), "ab")]
    sample = [cases[i] for i in sample_cases(NAMES, cases)]
    assert {case["x"] for case in sample} == set(range(6))
    assert {case["y"] for case in sample} == {0, 1}
    assert {case["z"] for case in sample} == set("ab")


def test_collected_tests_are_sampled_by_function():
    def collected(function: str, values: Sequence[Mapping[str, object]]) -> list[Any]:
        specs = [SimpleNamespace(params=params) for params in values]
        return [
            SimpleNamespace(parent="file", originalname=function, name=f"{function}[{i}]", callspec=spec)
            for i, spec in enumerate(specs)
        ]

    product = [{"x": x, "y": y} for x, y in itertools.product(range(8), "ab")]
    items = [
        *collected("test_product", product),
        *collected("test_few", product[:LEAST_CASES]),
        SimpleNamespace(parent="file", originalname="test_one", name="test_one"),
        SimpleNamespace(parent="page", name="doctest"),
    ]
    sample, others = split_by_sample(items)
    assert [item.name for item in sample if "product" not in item.name] == [*(x.name for x in items[16:])]
    assert len(sample) == 4 + LEAST_CASES + 2
    assert [id(item) for item in items] == [id(x) for x in sorted([*sample, *others], key=items.index)]
