"""Which biases stay in shared memory on Hopper, and the kernels that keep them, compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from blockdiag.fusion.match import find_regions
from blockdiag.fusion.resident import resident, rounds_each
from blockdiag.fusion.trace import flat_jaxpr
from blockdiag.interop import triton_fused
from blockdiag.triton_kernels.plan import Target
from tests.plans_support import report_of
from tests.resident_cases import CASES
from tests.test_fusion_plans import launches_of


@pytest.mark.parametrize("name", CASES)
def test_the_bias_stays_where_it_can(name):
    case = CASES[name]
    inner, _ = triton_fused.arranged(case.region())
    assert (resident(inner) is not None) == case.stays


def test_a_bias_of_another_dtype_does_not_stay():
    case = CASES["evoformer"]
    given = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in case.shapes.items()}
    given["pair"] = jax.ShapeDtypeStruct(case.shapes["pair"], "float16")

    def attention(**arrays):
        return case.function(**{name: x.astype(jnp.bfloat16) for name, x in arrays.items()})

    flat, _ = flat_jaxpr(lambda given: attention(**given), given)
    ((region,),) = find_regions(flat.jaxpr).values()
    assert {x.source.dtype.name for x in region.leaves} == {"bfloat16", "float16"}
    assert resident(region) is None


KERNELS = ("forward", "rows", "columns")
# Keys of one chunk have no tile of their own by columns; numbers of each head have a gradient of their own by rows.
PLAIN = {("one_chunk", "columns"), ("three_chunks", "rows"), ("three_chunks", "columns"), ("terms", "rows")}


@pytest.mark.parametrize(
    "name", ["evoformer", "wide", "narrow", "three_chunks", "one_chunk", "triangle", "terms", "bent"]
)
def test_kernels_fit_hopper(name):
    launches = launches_of(CASES[name].region())
    for kind in KERNELS:
        report = report_of(launches[f"fused_{kind}"].plan(Target.for_arch(90)), 90)
        if (name, kind) in PLAIN:
            assert report.name == f"fused_{kind}"
            continue
        assert report.name == f"fused_{kind}_resident"
        assert report.shared_bytes <= report.shared_limit
        # Warps wait for their part in a loop of its own, outside of theirs: there the compiler may spill addresses.
        assert not any(depth > 1 and count for depth, count in report.local_accesses.items()), str(report)
        assert report.ptx["wgmma"] > 0 and report.ptx["cp.async.bulk.tensor"] > 0 and report.ptx["f64"] == 0


def test_other_architectures_get_the_plain_kernel():
    launch = launches_of(CASES["evoformer"].region())["fused_forward"]
    plans = {arch: launch.plan(Target.for_arch(arch)) for arch in (80, 90, 100)}
    found = {arch: plan.name for arch, plan in plans.items()}
    assert found == {80: "fused_forward", 90: "fused_forward_resident", 100: "fused_forward"}
    plain = dataclasses.replace(launch, resident=None)
    assert plain.plan(Target.for_arch(90)).name == "fused_forward" and plain != launch


def test_rounds_are_shared_evenly():
    # 64 tiles go twice into 132 multiprocessors.
    assert rounds_each(256, 64, 132) == 128
    # Nobody waits much longer than if all rounds were divided evenly.
    for rounds, tiles in ((256, 500), (64, 200), (100, 1), (1000, 7), (7, 3)):
        each = rounds_each(rounds, tiles, 132)
        longest = each * -(-tiles * -(-rounds // each) // 132)
        assert max(1.0, rounds * tiles / 132) <= longest <= 1.07 * rounds * tiles / 132 + 1


def test_a_launch_holds_the_plans_arrays():
    launch = launches_of(CASES["terms"].region())["fused_forward"]
    plan = launch.plan(Target(90, 100))
    assert plan.inputs == launch.inputs and plan.outputs == launch.outputs
    assert plan.grid[0] * plan.arguments["ROUNDS"].value >= 6
