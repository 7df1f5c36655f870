"""Tests of where the one-pass backward schedule of Hopper is chosen."""

import dataclasses

import pytest

from blockdiag.fusion.runtime import arrange, kernel_choice
from tests.fusion.one_pass_cases import CASES


@pytest.mark.parametrize(
    ("name", "is_chosen"),
    [
        ("causal", True),
        ("sunk", True),
        ("window", False),
        ("full", True),
        ("narrow", False),
        ("documents", False),
        ("wide", True),
    ],
)
def test_one_pass_kernel_is_chosen_where_it_is_faster(name, is_chosen):
    case = CASES[name]
    tokens = 4096 if name == "documents" else 2048
    shapes = {x: shape if x == "sink" else (1, tokens, *shape[2:]) for x, shape in case.shapes.items()}
    inner, _ = arrange.arranged(dataclasses.replace(case, shapes=shapes).region())
    assert kernel_choice.has_leading_kernel(inner, has_sum=False) is is_chosen
