"""Tests of the one-pass backward kernel of Hopper: gradients, barriers, order of additions, and compilation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from blockdiag import fuse
from blockdiag.fusion.analysis.mask_states import DEAD, FULL, MASKED_TILE
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import unordered
from blockdiag.fusion.lowering import one_pass_schedule
from blockdiag.fusion.lowering.one_pass_schedule import one_pass
from blockdiag.fusion.runtime import arrange, block_sparsity, kernel_choice
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.interop import jax_call
from blockdiag.triton_kernels.launch.plan import Target, TensorSpec
from tests.fusion.codegen.test_gluon import assert_exact, launched  # noqa: F401
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.gluon_protocol import Slow
from tests.fusion.one_pass_cases import CASES
from tests.fusion.thresholds import lifted
from tests.triton_kernels.plans_support import report_of

HOPPER = Target.for_arch(90)
NAME = "fused_backward_one_pass"


@pytest.fixture(autouse=True)
def small_calls():
    with lifted(one_pass_schedule):
        yield


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.streams])
def test_one_pass_gradients_match_float32(name, launched):  # noqa: F811
    case = CASES[name]
    assert_exact(case, fuse(case.function, implementation="triton"))
    extras = ["fused_extras"] if name.startswith(("sunk", "null")) else []
    assert [x for x in launched if not x.startswith("fused_forward")] == [NAME, *extras]


def test_programs_that_go_through_all_queries_of_a_key_head_match_float32(launched, monkeypatch):  # noqa: F811
    monkeypatch.setattr(one_pass_schedule, "_FEWEST_PROGRAMS", 0)
    case = CASES["grouped"]
    plan = one_pass(arrange.arranged(case.region())[0])
    assert plan is not None and plan.others and not plan.is_shared
    assert_exact(case, fuse(case.function, implementation="triton"))
    assert NAME in launched


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.streams])
def test_one_pass_schedule_does_not_apply(name):
    inner, _ = arrange.arranged(CASES[name].region())
    assert one_pass(inner) is None


def launch_of(case, *, is_ordered=True):
    """Return the one-pass launch of a case whose only inputs are queries, keys and values, and the launch's arrays."""
    region = case.region() if is_ordered else unordered(case.region())
    inputs = case.inputs()
    result = jax.eval_shape(case.function, **inputs)
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=result.shape), case.dtype)
    kept = []

    def keep(launches, **_):
        kept.extend(launches)
        return [[jnp.zeros(x.shape, x.dtype) for x in spec.outputs] for spec, _ in launches]

    rows = tuple(region.sizes[label] for label in (*region.batch, "q"))
    shape = shape_of(region.out_dims, region.sizes)
    operands = (*inputs.values(), jnp.zeros(shape), jnp.zeros(rows), cotangent.reshape(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_call, "launch_together", keep)
        triton_fused._gradients(region, triton_fused._is_hopper, False, *operands)
    ((spec, arrays),) = kept
    return spec, [np.asarray(x) for x in arrays]


# Two programs, each of which visits four query tiles.
FEW_PROGRAMS = dataclasses.replace(CASES["full"], shapes=dict.fromkeys(("query", "key", "value"), (1, 256, 1, 128)))
WIDE = dataclasses.replace(CASES["wide"], shapes=dict.fromkeys(("query", "key", "value"), (1, 128, 1, 256)))
PARTS = dataclasses.replace(CASES["parts"], shapes=dict.fromkeys(("query", "key", "value"), (1, 256, 1, 96)))
WIDE_PARTS = dataclasses.replace(CASES["wide_parts"], shapes=dict.fromkeys(("query", "key", "value"), (1, 192, 1, 192)))

# The delays, in seconds, of the five partitions: compute, load, and three times reduce.
SLOW_LOAD, SLOW_REDUCE, SLOW_COMPUTE = (0, 3e-2, 0, 0, 0), (0, 0, 0.3, 0.1, 0), (1e-2, 0, 0, 0, 0)


@pytest.mark.parametrize("case", [FEW_PROGRAMS, WIDE_PARTS], ids=["narrow", "wide"])
@pytest.mark.parametrize("naps", [SLOW_LOAD, SLOW_REDUCE, SLOW_COMPUTE])
def test_one_pass_kernel_gives_the_same_bits_whichever_warps_are_slow(case, naps):
    spec, arrays = launch_of(case)
    plan = spec.plan(HOPPER)
    for one, other in zip(
        interpret_gluon(plan, *arrays), interpret_gluon(plan, *arrays, chance=Slow(*naps)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def states_of(lines):
    return np.asarray([[{".": DEAD, "m": MASKED_TILE, "F": FULL}[x] for x in line] for line in lines], np.int8)


def test_walks_list_live_tiles_in_order_with_ranks():
    # Rows are query tiles, columns are key tiles.
    states = states_of(["m...", "Fm..", "F.m.", "...."])
    codes, ranks = block_sparsity.walk_of(states)
    # The first key tile visits query tiles 0 (masked), 1 and 2. Code 8 marks the end, and 3 is the number of visits.
    assert codes.tolist() == [[1, 2, 4, 8, 3], [3, 3, 8, 8, 1], [5, 5, 5, 8, 1], [8, 8, 8, 8, 0]]
    live = states.T != DEAD
    assert ranks[live].tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_walks_of_arrays_equal_those_of_constants(seed):
    states = np.random.default_rng(seed).integers(0, 3, (2, 5, 7)).astype(np.int8)
    for one, other in zip(block_sparsity.walk_of(states), block_sparsity.walk_of(jnp.asarray(states)), strict=True):
        assert one.dtype == other.dtype == np.int32
        np.testing.assert_array_equal(one, other)


def constants_of(region):
    """Return the arrays of a region that are constants, by name."""
    return {f"leaf{i}": x.source.constant for i, x in enumerate(region.leaves) if x.source.constant is not None}


@pytest.mark.parametrize("name", ["causal", "window", "documents", "strided"])
def test_each_query_tile_is_added_to_in_an_order_without_gaps(name):
    case = CASES[name]
    inner, _ = arrange.arranged(case.region())
    plan = one_pass(inner)
    arrays = constants_of(inner)
    for i, leaf in enumerate(inner.leaves):
        if leaf.source.dtype == np.int32 and leaf.source.key is not None and f"leaf{i}" not in arrays:
            arrays[f"leaf{i}"] = case.inputs()["segment"]
    walks = block_sparsity.walk_tables(inner, plan.tile, arrays)
    codes, ranks = (np.asarray(walks.arrays[x]) for x in ("walk_codes", "walk_ranks"))
    key_tiles, tiles = ranks.shape[-2:]
    for own_codes, own_ranks in zip(
        codes.reshape(-1, key_tiles, tiles + 1), ranks.reshape(-1, key_tiles, tiles), strict=True
    ):
        found = [[] for _ in range(tiles)]
        # The programs of the last key tile start first.
        for key_tile in reversed(range(key_tiles)):
            tile, visited = own_codes[key_tile, 0] >> 1, 0
            while tile < tiles:
                found[tile].append(own_ranks[key_tile, tile])
                visited += 1
                tile = own_codes[key_tile, tile + 1] >> 1 if tile + 1 < tiles else tiles
            assert visited == own_codes[key_tile, tiles]
        assert all(x == list(range(len(x))) for x in found)


def test_very_long_sequences_have_no_walk(monkeypatch):
    monkeypatch.setattr(block_sparsity, "_MOST_WALKED", 10)
    inner, _ = arrange.arranged(CASES["causal"].region())
    assert kernel_choice.leading_one_pass(inner, constants_of(inner)) is None


def test_unordered_sums_are_another_kernel():
    (one, _), (other, _) = (launch_of(CASES["full"], is_ordered=x) for x in (True, False))
    assert (
        one.source != other.source and "is_ordered=True" in one.source.text and "is_ordered=False" in other.source.text
    )


def test_deterministic_is_passed_to_every_region():
    def attention(query, key, value):
        return jax.checkpoint(CASES["full"].function)(query, key, value)

    given = [jnp.zeros((1, 128, 1, 64), jnp.bfloat16)] * 3
    for is_ordered in (True, False):
        jaxpr = jax.make_jaxpr(fuse(attention, deterministic=is_ordered))(*given)
        assert flags_of(jaxpr.jaxpr) == {is_ordered}


def flags_of(jaxpr):
    """Return the set of `is_ordered` flags of all fused regions in a program."""
    found = set()
    for equation in jaxpr.eqns:
        if "call" in equation.params and hasattr(equation.params["call"], "region"):
            found.add(equation.params["call"].region.is_ordered)
        for inner in jaxprs_in_params(equation.params):
            found |= flags_of(getattr(inner, "jaxpr", inner))
    return found


FITTING = (
    "full", "narrow", "causal", "documents", "soft_cap", "causal_soft_cap", "numbered", "grouped", "wide", "parts",
    "wide_parts",
)  # fmt: skip


def hopper_launches(name):
    """Return the launches of a case's backward pass on Hopper, with arrays that are not known."""
    inner, _ = arrange.arranged(CASES[name].region())
    leaves = [jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in inner.leaves]
    found = []

    def trace(leaves, value):
        rows = tuple(inner.sizes[label] for label in (*inner.batch, "q"))
        arrays = {f"leaf{i}": x for i, x in enumerate(leaves)} | {"value": value}
        arrays |= {one: jnp.zeros(rows) for one in ("log_sum", "delta")}
        arrays["cotangent"] = jnp.zeros(shape_of(inner.out_dims, inner.sizes), value.dtype)
        for kernel in kernel_choice.hopper_kernels(inner, arrays, has_sum=False):
            found.append(kernel.launch([TensorSpec(x.shape, x.dtype.name) for x in kernel.given(arrays)]))

    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct(inner.value.shape, inner.value.dtype))
    return found


def test_kernel_of_sinks_fits_hopper():
    _, launch = hopper_launches("sunk_twice")
    report = report_of(launch.plan(HOPPER), 90)
    assert report.name == "fused_extras" and not sum(report.local_accesses.values()) and report.ptx["f64"] == 0


@pytest.mark.every_case
@pytest.mark.parametrize("name", FITTING)
def test_one_pass_kernel_fits_hopper(name):
    (launch,) = hopper_launches(name)
    report = report_of(launch.plan(HOPPER), 90)
    assert report.shared_bytes <= report.shared_limit and report.ptx["wgmma"] > 0
    assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0
    if name.startswith("wide"):
        # The interpreter of the tests does not run this PTX.
        text = report.kernel.asm["ptx"]
        order = ("fence.proxy.async;", "cp.reduce.async.bulk.tensor", "cp.async.bulk.wait_group.read", "wait_group 0;")
        places = [text.index(x) for x in order]
        assert places == sorted(places)
