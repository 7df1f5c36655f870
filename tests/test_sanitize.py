"""The calls that compute-sanitizer runs reach every kernel, and the driver reports what a tool finds."""

import importlib
import pkgutil
import re
import stat

import jax
import numpy as np
import pytest
import triton

from blockdiag import triton_kernels
from tests.gpu_scripts import sanitize
from tests.gpu_scripts.sanitize_calls import FAMILIES, Call, difference, launched_kernels

# Launched by torch's doors alone, whose families cannot be traced: by packed calls, and by gradients of `fuse`.
OF_TORCH = {"tile_table", "fused_delta"}
GENERATED = {
    "fused_columns",
    "fused_columns_resident",
    "fused_diagonals",
    "fused_forward",
    "fused_forward_resident",
    "fused_forward_streamed",
    "fused_pairs",
    "fused_rows",
    "fused_rows_and_pairs_resident",
    "fused_rows_resident",
}
# Of the generated kernels, families that have all names between them; every sixth call is enough of these.
TRACED = [name for name, family in FAMILIES.items() if family.door == "jax" and name != "pallas" and "fuse" not in name]
TRACED += ["fuse_distances", "fuse_resident_1", "fuse_streamed_1"]


def written_kernels():
    """Names of the library's kernels: functions that take pointers and that no other one calls."""
    functions = {}
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        loaded = importlib.import_module(f"blockdiag.triton_kernels.{module.name}")
        own = {name: x for name, x in vars(loaded).items() if isinstance(x, triton.JITFunction)}
        functions |= {name: x for name, x in own.items() if x.fn.__module__ == loaded.__name__}
    # Partitions of a warp-specialised kernel are named in tuples, the others called.
    uses = " ".join(re.sub(r"^def \w+", "", x.src, flags=re.MULTILINE) for x in functions.values())
    return {
        name
        for name, x in functions.items()
        if any(argument.startswith("p_") for argument in x.arg_names) and not re.search(rf"\b{name}[(,]", uses)
    }


@pytest.mark.slow
def test_families_launch_every_kernel_of_hopper():
    calls = [call for name in TRACED for call in list(FAMILIES[name].calls())[:: 6 if "fuse" in name else 1]]
    launched = {kernel for call in calls for kernel in launched_kernels(call, 90)}
    missing = (written_kernels() | GENERATED) - launched - OF_TORCH
    assert not missing, "kernels that no family launches"


def test_written_kernels_are_found():
    kernels = written_kernels()
    assert {"moba_hopper_backward", "tile_table", "paged_splits", "block_diagonal_forward"} <= kernels
    assert not kernels & {"tile_rows_at", "load_tile", "carry"}


@pytest.mark.parametrize("name", ["projection_torch", "key_convolution"])
def test_dry_run_of_a_family_runs_every_call(name, capsys):
    sanitize.run_family(name, is_dry=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == sanitize.FINISHED
    assert len(lines) - 1 == len(list(FAMILIES[name].calls())) and all(line.startswith("ran ") for line in lines[:-1])


def test_call_with_a_wrong_result_is_refused():
    wrong = Call("wrong", lambda who: [np.ones(3, np.float32) * (2 if who == "triton" else 1)])
    with pytest.raises(ArithmeticError, match=r"differ from the CPU's by 1 "):
        sanitize.run_call(wrong, is_dry=False)
    right = Call("right", lambda who: [jax.numpy.ones(3)])
    assert sanitize.run_call(right, is_dry=False) == "0.0e+00"


def test_expected_results_are_computed_once(tmp_path):
    turns = []

    def compute(who):
        turns.append(who)
        return [np.ones(3, np.float32), np.arange(4)]

    call = Call("one, two: three", compute)
    for _ in range(2):
        first, second = sanitize.expected_results(call, tmp_path)
        np.testing.assert_array_equal(first, np.ones(3, np.float32))
        np.testing.assert_array_equal(second, np.arange(4))
    assert turns == ["xla"]


@pytest.mark.parametrize(
    ("found", "expected", "largest"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, 2.0], [1.0, np.nan], np.inf),
        ([3.0, 4.0], [3.0, 9.0], 5 / np.hypot(3, 9)),
        ([1, 2, 3, 5], [1, 2, 3, 4], 0.25),
        ([1.0], [1.0, 1.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_difference_of_results(found, expected, largest):
    assert difference(np.asarray(found), np.asarray(expected)) == pytest.approx(largest)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at moba_offsets+0x110 in moba_lists.py:42
=========     by thread (0,0,0) in block (0,0,0)
ran batch (1.0 s, 0.0e+00)
all ran
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """========= Error: Race reported between Read access at moba_hopper_backward+0x110 in hopper.py:250
=========     and Write access at moba_hopper_backward+0x28b0 in hopper.py:250 [8 hazards]
ran batch (1.0 s, 0.0e+00)
all ran
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 1 warnings)
"""
CLEAN = "ran batch (1.0 s, 0.0e+00)\nall ran\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def tool(tmp_path):
    """A stand-in for compute-sanitizer, which prints a text instead of running anything."""

    def make(text, wait=0):
        path = tmp_path / "tool"
        (tmp_path / "text").write_text(text)
        path.write_text(f"#!/bin/sh\ncat {tmp_path / 'text'}\nsleep {wait}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return ["--sanitizer", str(path), "--output", str(tmp_path), "--families", "moba"]

    return make


@pytest.mark.parametrize(
    ("name", "text", "row", "reported"),
    [
        ("memcheck", MEMCHECK, r"1 ran +0 failed +3 errors .* LOOK", "reported: moba_offsets"),
        ("racecheck", RACECHECK, r"1 ran +0 failed +2 errors .* LOOK", "reported: moba_hopper_backward"),
        ("memcheck", CLEAN.replace("all ran\n", ""), r"1 ran +0 failed +0 errors .* unfinished", ""),
        ("memcheck", CLEAN.replace("ran batch", "EXC batch:"), r"0 ran +1 failed +0 errors .* LOOK", "EXC batch"),
        ("memcheck", "ran batch\nall ran\n", r"1 ran +0 failed none told errors .* LOOK", ""),
    ],
)
def test_driver_reports_what_is_not_clean(tool, capsys, name, text, row, reported):
    assert sanitize.main([*tool(text), "--tools", name]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"moba +{name} +{row}", printed) and reported in printed


def test_driver_of_clean_processes_returns_0(tool, capsys):
    assert sanitize.main([*tool(CLEAN), "--tools", "memcheck,initcheck"]) == 0
    assert "2 processes, 0 errors, 0 processes to look at" in capsys.readouterr().out


def test_driver_ends_a_process_whose_time_is_up(tool, capsys):
    assert sanitize.main([*tool("ran batch\n", wait=600), "--tools", "memcheck", "--time-limit", "1"]) == 1
    assert "unfinished" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--families", "--tools"])
def test_driver_refuses_unknown_names(option):
    with pytest.raises(SystemExit, match=f"`{option}` must name some of .*, got 'other'"):
        sanitize.main([option, "other"])
