"""Tests that kernels with a resident bias do not deadlock, for any slow warp and any number of rounds."""

import inspect
import random
import re

import pytest

from blockdiag.fusion.runtime import arrange, kernel_choice
from blockdiag.triton_kernels.dense import (
    hopper_resident_forward,
    hopper_resident_pairs,
    hopper_resident_pairs_wide,
    hopper_resident_sides,
)
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.gluon_protocol import Deadlock, run_protocol
from tests.fusion.lowering.test_resident_schedule import joint_launch
from tests.fusion.resident_cases import CASES

ROUNDS = (1, 2, 3, 5, 8)


def resident_kernels(name):
    """Return the sources of the kernels of a case that keep the bias in shared memory, by name."""
    region = CASES[name].region()
    inner, _ = arrange.arranged(region)
    launches = launches_of(region)
    found = [launches[f"fused_{x}"].on_hopper for x in ("forward", "rows", "columns")]
    if kernel_choice.joint_kernel(inner) is not None:
        found.append(joint_launch(inner).on_hopper)
    return {kernel.source.name: kernel.source.text for kernel in found if kernel is not None}


@pytest.mark.parametrize(
    "name", ["many_rows", "many_wide_rows", "narrow", "three_chunks", "one_chunk", "terms", "shared", "wide_triangle"]
)
def test_resident_kernels_do_not_deadlock(name):
    kernels = resident_kernels(name)
    assert kernels
    for kernel, text in kernels.items():
        for rounds in ROUNDS:
            for seed in range(3):
                run_protocol(text, kernel, 0, rounds, random.Random(seed))


def template_of(text):
    """Return the source of the template that a backward kernel calls."""
    templates = (hopper_resident_sides, hopper_resident_pairs, hopper_resident_pairs_wide)
    (found,) = [x for x in templates if f"{x.__name__} import" in text]
    return inspect.getsource(found)


@pytest.mark.parametrize(
    ("name", "kernel", "line"),
    [
        # Sums of one half are never handed over.
        ("many_rows", "fused_rows_and_pairs_resident", "mbarrier.arrive(memory.half_full.index(0), count=1)"),
        # No warp signals that the gradients are ready, or that they have been stored.
        ("many_rows", "fused_rows_and_pairs_resident", "mbarrier.arrive(memory.gradient_full.index(0), count=1)"),
        ("many_rows", "fused_rows_and_pairs_resident", "mbarrier.arrive(memory.half_empty.index(0), count=1)"),
        # No warp signals the data of the extra round, whose first product starts ahead of time.
        (
            "many_rows",
            "fused_rows_and_pairs_resident",
            "mbarrier.arrive(memory.lines_full.index(count % OWN_SLOTS), count=1)",
        ),
        (
            "many_rows",
            "fused_columns_resident",
            "mbarrier.arrive(memory.own_full.index(own_slot), count=1 if SHAPE.is_columns else 2)",
        ),
        # No warp signals that the keys or the query tiles have been read, or that the gradients are ready.
        ("many_wide_rows", "fused_rows_and_pairs_resident", "mbarrier.arrive(memory.ring_empty.index(keys), count=1)"),
        ("many_wide_rows", "fused_rows_and_pairs_resident", "mbarrier.arrive(memory.tiles_read.index(0), count=1)"),
        (
            "many_wide_rows",
            "fused_rows_and_pairs_resident",
            "mbarrier.arrive(memory.gradient_full.index(own_slot), count=1)",
        ),
        # The phase has one arrival too few.
        (
            "many_wide_rows",
            "fused_columns_resident",
            "mbarrier.arrive(memory.own_empty.index(GROUP), count=1, pred=part == SHAPE.chunks - 1)",
        ),
    ],
)
def test_resident_kernel_without_one_arrival_deadlocks(name, kernel, line):
    text = resident_kernels(name)[kernel]
    assert line in template_of(text)

    def change(source):
        return source.replace(line, "pass")

    with pytest.raises(Deadlock):
        run_protocol(text, kernel, 0, 3, random.Random(0), change=change)


@pytest.mark.parametrize(
    "line",
    [
        # The second group is never told that the first one's exponentials are done.
        "mbarrier.arrive(memory.turns.index(1 - GROUP), count=1)",
        # No warp signals that key terms are there, or that values have been read.
        "mbarrier.arrive(memory.terms_full.index(number % SHAPE.query_slots), count=1)",
        "free_slot(memory.part_empty, part + (PARTS + i), SHAPE.slots)",
    ],
)
def test_resident_forward_template_without_one_arrival_deadlocks(line):
    name = "fused_forward_resident"
    text = resident_kernels("many_rows")[name]
    assert line in inspect.getsource(hopper_resident_forward)
    with pytest.raises(Deadlock):
        run_protocol(text, name, 0, 3, random.Random(0), change=lambda template: template.replace(line, "pass"))


@pytest.mark.parametrize(
    ("name", "kernel", "line"),
    [
        ("many_rows", "fused_columns_resident", r"mbarrier\.wait\(memory\.chunk_empty.*"),
        ("many_rows", "fused_columns_resident", r"mbarrier\.wait\(memory\.own_empty.*"),
        ("many_rows", "fused_rows_and_pairs_resident", r"mbarrier\.wait\(memory\.chunk_empty.*"),
        ("many_wide_rows", "fused_rows_and_pairs_resident", r"mbarrier\.wait\(memory\.ring_empty.*"),
        ("many_wide_rows", "fused_columns_resident", r"mbarrier\.wait\(memory\.own_empty.*"),
    ],
)
def test_resident_kernel_whose_loader_does_not_wait_is_detected(name, kernel, line):
    text = resident_kernels(name)[kernel]
    assert re.search(line, template_of(text))

    def change(source):
        return re.sub(line, "pass", source)

    # Only a schedule with slow groups exposes the missing wait, so several seeds are tried.
    with pytest.raises(AssertionError):
        for seed in range(8):
            run_protocol(text, kernel, 0, 8, random.Random(seed), change=change)
