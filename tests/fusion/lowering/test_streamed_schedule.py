"""Tests of which keys and values stream through shared memory on Hopper."""

import dataclasses
import re

import pytest

from blockdiag.fusion.lowering import streamed_schedule
from blockdiag.fusion.runtime import kernel_choice
from tests.fusion.streamed_cases import CASES
from tests.fusion.thresholds import lifted

NAME = "fused_forward_streamed"


def sources_of(case):
    return {kernel.source.name: kernel.source for kernel in kernel_choice.kernels(case.region())}


@pytest.mark.parametrize("name", CASES)
def test_keys_and_values_stream_in_the_expected_cases(name):
    with lifted(streamed_schedule):
        sources = sources_of(CASES[name])
    # Other architectures launch the plain kernel.
    assert "fused_forward" in sources
    assert (NAME in sources) is CASES[name].streams


@pytest.mark.parametrize(
    ("name", "tokens", "heads", "streams"),
    [
        ("cross", 2048, 4, True),
        ("cross", 256, 64, False),
        ("narrow", 4096, 16, True),
        ("narrow", 2048, 4, False),
        ("causal_wide", 256, 1, True),
    ],
)
def test_small_calls_use_plain_kernels(name, tokens, heads, streams):
    case = CASES[name]
    shapes = {x: (1, tokens, heads, shape[-1]) for x, shape in case.shapes.items()}
    assert (NAME in sources_of(dataclasses.replace(case, shapes=shapes))) is streams


def test_full_tiles_are_computed_without_masks():
    with lifted(streamed_schedule):
        text = sources_of(CASES["causal"])[NAME].text
    score, plain = (re.search(rf"def {name}\(.*\n((?:    .*\n)+)", text)[1] for name in ("score", "plain_score"))
    assert "gl.where(" in score and plain.strip() == "return products"
    assert "'some'" in text
