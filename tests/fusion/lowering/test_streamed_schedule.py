"""Tests of which keys and values stream through shared memory on Hopper, and of the compiled kernels."""

import random
import re

import pytest

from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.gluon_protocol import Deadlock, run_protocol
from tests.fusion.streamed_cases import CASES
from tests.triton_kernels.plans_support import report_of

STREAMED = [name for name, case in CASES.items() if case.streams]
NAME = "fused_forward_streamed"


def text_of(name):
    return launches_of(CASES[name].region())["fused_forward"].on_hopper.source.text


@pytest.mark.parametrize("name", CASES)
def test_keys_and_values_stream_in_the_expected_cases(name):
    launch = launches_of(CASES[name].region())["fused_forward"]
    plans = {arch: launch.plan(Target.for_arch(arch)) for arch in (80, 90, 100)}
    assert plans[90].name == (NAME if CASES[name].streams else "fused_forward")
    assert plans[80].name == plans[100].name == "fused_forward"
    assert plans[90].inputs == launch.inputs and plans[90].outputs == launch.outputs


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.versions] if name == "cross" else []) for name in STREAMED]
)
def test_kernels_fit_hopper(name):
    report = report_of(launches_of(CASES[name].region())["fused_forward"].plan(Target.for_arch(90)), 90)
    assert report.name == NAME and report.shared_bytes <= report.shared_limit
    assert report.spill_bytes == 0 and not report.local_accesses, str(report)
    assert report.ptx["wgmma"] > 0 and report.ptx["cp.async.bulk.tensor"] > 0 and report.ptx["f64"] == 0


def test_full_tiles_are_computed_without_masks():
    full, masked = re.findall(r"(?m)^    for chunk in range\(.*\n((?:        .*\n)+)", text_of("causal"))[:2]
    assert "gl.where(" not in full.split("score =")[0] and "leaf" not in full
    assert "gl.where(z" in masked and "leaf" in masked


@pytest.mark.parametrize("name", ["cross", "wide", "differential"])
def test_streamed_kernels_do_not_deadlock(name):
    for rounds in (1, 2, 3, 5, 9):
        for seed in range(3):
            run_protocol(text_of(name), NAME, 0, rounds, random.Random(seed))


@pytest.mark.parametrize("name", ["causal", "documents"])
@pytest.mark.parametrize("counts", [(0, 0), (0, 1), (1, 1), (3, 3), (0, 4), (2, 7)])
def test_streamed_kernels_with_tile_lists_do_not_deadlock(name, counts):
    lists = {"p_live_counts": counts, "p_live_tiles": range(16)}
    for seed in range(3):
        run_protocol(text_of(name), NAME, 4, None, random.Random(seed), lists)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("differential", "mbarrier.arrive(turns.index(1 - GROUP), count=1)"),
        ("cross", "free_slot(key_empty, chunk, 3)"),
        ("cross", "free_slot(value_empty, chunk - 1, 3)"),
    ],
)
def test_streamed_kernel_without_one_arrival_deadlocks(name, line):
    text = text_of(name)
    assert line in text
    with pytest.raises(Deadlock):
        run_protocol(text.replace(line, "pass"), NAME, 0, 6, random.Random(0))
