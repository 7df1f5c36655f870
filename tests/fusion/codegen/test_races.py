"""Tests that each barrier, fence and wait of the Hopper templates is needed, and that they suffice."""

import dataclasses
import functools
import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.fusion.codegen import resident_pairs
from blockdiag.fusion.lowering import one_pass_schedule, streamed_schedule
from blockdiag.fusion.runtime import arrange
from blockdiag.triton_kernels.dense import (
    hopper_backward,
    hopper_eight_bit_forward,
    hopper_forward,
    hopper_resident_forward,
    hopper_resident_pairs,
    hopper_resident_pairs_wide,
    hopper_resident_sides,
)
from blockdiag.triton_kernels.launch import plan as launch_plan
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.moba import hopper_backward as moba_backward
from blockdiag.triton_kernels.moba import hopper_forward as moba_forward
from blockdiag.triton_kernels.paged import hopper_eight_bit_prompts, hopper_latent, hopper_latent_keys, hopper_prompts
from blockdiag.triton_kernels.parts import resident_tiles
from tests.fusion import resident_cases
from tests.fusion.codegen import test_one_pass, test_plans, test_streamed
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.lowering.test_resident_schedule import joint_launch
from tests.fusion.thresholds import lifted
from tests.triton_kernels import (
    test_hopper_latent,
    test_hopper_moba,
    test_hopper_moba_backward,
    test_hopper_prompts,
)

PROMPTS = ("causal", "heads of 256")
EIGHT_BIT_PROMPTS = ("e4m3, scales by token", "e4m3, many chunks")
LATENT = ("decoding", "pages of 3, both sides", "e4m3, scales of tokens")
MOBA = ("long lists", "e4m3, scales of tokens")
MOBA_BACKWARD = ("long lists", "grouped, masked, float16")
FORWARD = ("cross", "one_chunk", "causal", "wide_result", "three_halves", *(f"prompts, {name}" for name in PROMPTS))
EIGHT_BIT_QUERIES = ("long_causal", "long_parts", "long_wide", "long_half")
EIGHT_BIT_VALUES = ("long_values", "long_values_one_chunk", "long_values_e5m2", "long_values_many_chunks")
BACKWARD = {
    "narrow": test_one_pass.FEW_PROGRAMS,
    "wide": test_one_pass.WIDE,
    "parts": test_one_pass.PARTS,
    "wide parts": test_one_pass.WIDE_PARTS,
}
# Their programs run three rounds of one tile of queries.
RESIDENT = {
    name: resident_cases.Resident(function, shapes)
    for name, function, shapes in (
        ("row sums as products", resident_cases.rows_of_heads, resident_cases.rows_shapes(1, 6, 128, 128, 1, 64)),
        ("two parts of keys", resident_cases.rows_of_heads, resident_cases.rows_shapes(1, 6, 128, 256, 1, 128)),
        ("no key terms", resident_cases.heads_of_rows, resident_cases.heads_shapes(1, 6, 1, 128, 32)),
    )
}
# The head dimension of each kernel's case. With 128, own tiles have one slot.
SIDES = {"rows, 64": 64, "columns, 64": 64, "rows, 128": 128, "columns, 128": 128}
# The keys and the head dimension of each case. With heads of 128, query tiles have two slots.
PAIRS = {"one chunk": (128, 32), "two chunks": (256, 64), "two slots": (128, 128)}
WIDE_PAIRS = {"wide": (256, 128)}
ORDER = re.compile(
    r"\s*(mbarrier\.(?:wait|arrive)\(|await_visit\(|free_slot\(|thread_barrier\(|fence_async_shared\("
    r"|tma\.store_wait\(|async_copy\.wait_group\(|\w+_bulk_additions\(\)"
    r"|(?P<names>\w+(?:, \w+)*) = (?P<wait>warpgroup_mma_wait|finished|both_finished)\([^,]+, (?P<deps>.*))"
)
# What one may remove without a race in shared memory: a line, and the function that has it, of all modules or one.
NOT_NEEDED = {
    # These change the order of exponentials of the groups, which no data depends on.
    "mbarrier.wait(memory.turns.index(GROUP), number % 2 ^ (1 - GROUP)) of weigh",
    "mbarrier.arrive(memory.turns.index(1 - GROUP), count=1) of weigh",
    "mbarrier.wait(memory.turns.index(GROUP), number % 2 ^ (1 - GROUP)) of weigh_values",
    # Without it, a slow warp might wait for a phase that has passed. The interpreter runs the warps of a group as one.
    "thread_barrier() of weigh_values",
    # The partitions start together, with barriers that have been initialised.
    "fence_async_shared() of streamed_forward",
    "thread_barrier() of streamed_forward",
    "fence_async_shared() of streamed_eight_bit_forward",
    "thread_barrier() of streamed_eight_bit_forward",
    "fence_async_shared() of one_pass_backward",
    "thread_barrier() of one_pass_backward",
    "fence_async_shared() of paged_prompts",
    "thread_barrier() of paged_prompts",
    "fence_async_shared() of paged_eight_bit_prompts",
    "thread_barrier() of paged_eight_bit_prompts",
    "fence_async_shared() of latent_splits",
    "thread_barrier() of latent_splits",
    "thread_barrier() of resident_forward",
    "fence_async_shared() of resident_sides",
    "thread_barrier() of resident_sides",
    "fence_async_shared() of resident_pairs",
    "thread_barrier() of resident_pairs",
    "fence_async_shared() of resident_pairs_wide",
    "thread_barrier() of resident_pairs_wide",
    # A program must not end before its results are stored.
    "tma.store_wait(0) of compute",
    "tma.store_wait(0) of compute_ahead",
    "tma.store_wait(0) of compute_chunks (2)",
    # `finish_values` has a barrier, too, after the last use of the queries.
    "thread_barrier() of compute",
    "thread_barrier() of finish_item",
    # `finish_scores` waits, too.
    "b_products = warpgroup_mma_wait(0, deps=[b_first]) of attend",
    # The interpreter runs one program after another, and the threads of a warp as one.
    "thread_barrier() of reduce (2)",
    "order_bulk_additions() of reduce",
    # Products of keys are fenced again, with the first queries.
    "fence_async_shared() of compute, moba.hopper_backward",
    # Later loads have waited until both groups are past the earlier phases of these barriers.
    "mbarrier.wait(memory.own_empty.index(own_slot), count // SHAPE.own_slots % 2 ^ 1) of load",
    "mbarrier.wait(memory.chunk_empty.index(slot), count * CHUNKS // SLOTS % 2 ^ 1) of load",
    "mbarrier.wait(memory.chunk_empty.index(number % SLOTS), number // SLOTS % 2 ^ 1) of load",
    # `gather` fills the lines of a round, which are waited for next, once its query tiles are there.
    "mbarrier.wait(memory.own_full.index(own_slot), round // SHAPE.own_slots % 2) of begin_round",
    # This barrier is passed already. It keeps the compiler from moving exponentials past it.
    "mbarrier.wait(memory.own_full.index(own_slot), round // OWN_SLOTS % 2) of weigh (2)",
    # Both groups have exchanged their parts of delta after they read the tiles.
    "mbarrier.wait(memory.tiles_read.index(0), round % 2) of exchange_halves",
    # The queries' slot, which is waited for first, is freed last.
    "await_visit(memory.cotangent_read, number - STAGES, SHAPE) of load",
}


def short_name(template):
    """Return the name of a module of kernels, with that of its package."""
    return template.__name__.removeprefix("blockdiag.triton_kernels.")


def ordering_lines(template):
    """Return the number, the text and a unique name of each line that orders accesses."""
    found, names, function = [], set(), ""
    for number, line in enumerate(inspect.getsource(template).split("\n")):
        if match := re.match(r"def (\w+)\(", line):
            function = match[1]
        waits = re.search(r"= (?:warpgroup_mma_wait|finished|both_finished)\(", line)
        assert not waits or ORDER.match(line), f"a wait that is never removed: {line}"
        if ORDER.match(line):
            name = f"{line.strip()} of {function}"
            repeated = sum(x == name or x.startswith(f"{name} (") for x in names)
            name = f"{name} ({repeated + 1})" if repeated else name
            names.add(name)
            found.append((number, line, name))
    return found


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    monkeypatch.setitem(launch_plan._USUAL_MULTIPROCESSORS, 90, 2)
    with lifted(one_pass_schedule, streamed_schedule):
        yield


@functools.cache
def launch_of(template, name):
    if template in (hopper_prompts, hopper_eight_bit_prompts) or name.startswith("prompts, "):
        return test_hopper_prompts.launch_of(test_hopper_prompts.PROBLEMS[name.removeprefix("prompts, ")])
    if template is hopper_resident_sides:
        return sides_launch_of(name)
    if template in (hopper_resident_pairs, hopper_resident_pairs_wide):
        return pairs_launch_of(name)
    if template in (hopper_latent, hopper_latent_keys):
        return test_hopper_latent.launch_of(test_hopper_latent.PROBLEMS[name])
    if template in (hopper_resident_forward, resident_tiles):
        plan = test_plans.launches_of(RESIDENT[name].region())["fused_forward"].plan(Target.for_arch(90))
        generator = np.random.default_rng(0)
        return plan, [np.asarray(generator.normal(size=x.shape), jnp.dtype(x.dtype)) for x in plan.inputs]
    if template is moba_backward:
        return test_hopper_moba_backward.plan_and_inputs(name)
    if template is moba_forward:
        launch, arrays = test_hopper_moba.launch_and_inputs(name)
        return launch.plan(Target.for_arch(90)), [np.asarray(arrays[x]) for x in launch.input_names]
    if template in (hopper_forward, hopper_eight_bit_forward):
        spec, arrays = test_streamed.launch_of(test_streamed.ALL_CASES[name])
    else:
        spec, arrays = test_one_pass.launch_of(BACKWARD[name])
    return spec.plan(Target.for_arch(90)), arrays


def sides_launch_of(name):
    """Return the plan of a backward kernel with a resident bias, and random arrays; programs have several rounds."""
    side, _ = name.split(", ")
    shapes = resident_cases.rows_shapes(1, 10, 256, 128, 1, SIDES[name])
    case = dataclasses.replace(resident_cases.CASES["evoformer"], shapes=shapes)
    plan = test_plans.launches_of(case.region())[f"fused_{side}"].plan(Target.for_arch(90))
    generator = np.random.default_rng(0)
    return plan, [generator.normal(size=x.shape).astype(jnp.dtype(x.dtype)) for x in plan.inputs]


def pairs_launch_of(name):
    """Return the plan of a kernel with the gradient of its bias, and random arrays; programs have six rounds."""
    keys, width = {**PAIRS, **WIDE_PAIRS}[name]
    shapes = resident_cases.rows_shapes(1, 6, 128, keys, 1, width)
    case = dataclasses.replace(resident_cases.CASES["evoformer"], shapes=shapes)
    inner, _ = arrange.arranged(case.region())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_pairs, "_USUAL_MULTIPROCESSORS", 1)
        plan = joint_launch(inner).plan(Target.for_arch(90))
    generator = np.random.default_rng(0)
    return plan, [generator.normal(size=x.shape).astype(jnp.dtype(x.dtype)) for x in plan.inputs]


TEMPLATES = [
    (hopper_forward, FORWARD),
    (hopper_eight_bit_forward, EIGHT_BIT_VALUES),
    (hopper_backward, tuple(BACKWARD)),
    (hopper_resident_forward, tuple(RESIDENT)),
    (resident_tiles, tuple(RESIDENT)),
    (hopper_resident_sides, tuple(SIDES)),
    (hopper_resident_pairs, tuple(PAIRS)),
    (hopper_resident_pairs_wide, tuple(WIDE_PAIRS)),
    (hopper_prompts, PROMPTS),
    (hopper_eight_bit_prompts, EIGHT_BIT_PROMPTS),
    (hopper_latent, LATENT),
    (hopper_latent_keys, LATENT),
    (moba_forward, MOBA),
    (moba_backward, MOBA_BACKWARD),
]


@pytest.mark.parametrize(
    ("template", "name"),
    [(x, name) for x, names in (*TEMPLATES, (hopper_forward, EIGHT_BIT_QUERIES)) for name in names],
)
def test_accesses_of_shared_memory_are_ordered(template, name):
    plan, arrays = launch_of(template, name)
    interpret_gluon(plan, *arrays, is_checked=True)


@pytest.mark.parametrize(
    ("template", "names", "number", "line"),
    [
        pytest.param(template, names, number, line, id=f"{name}, {short_name(template)}")
        for template, names in TEMPLATES
        for number, line, name in ordering_lines(template)
        if not {name, f"{name}, {short_name(template)}"} & NOT_NEEDED
    ],
)
def test_removing_one_barrier_fence_or_wait_is_noticed(template, names, number, line):
    source = inspect.getsource(template)

    def change(text):
        if text != source:
            return text
        lines = text.split("\n")
        assert lines[number] == line
        match = ORDER.match(line)
        kept = f"{match['names']} = {match['wait']}(9, {match['deps']}" if match["names"] else "pass"
        lines[number] = line[: len(line) - len(line.lstrip())] + kept
        return "\n".join(lines)

    def is_noticed(name):
        plan, arrays = launch_of(template, name)
        try:
            interpret_gluon(plan, *arrays, change=change, is_checked=True)
        except (AssertionError, AttributeError, TypeError, ValueError):
            # Races, deadlocks, and uses of products that are still in flight.
            return True
        return False

    assert any(is_noticed(name) for name in names)
