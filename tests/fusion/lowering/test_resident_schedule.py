"""Tests of which biases stay in shared memory on Hopper, and of their compiled kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from blockdiag import fuse
from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import with_leaves
from blockdiag.fusion.lowering.resident_schedule import resident, rounds_each
from blockdiag.fusion.regions.match import find_regions
from blockdiag.fusion.runtime import arrange, kernel_choice
from blockdiag.interop import compile_target, jaxlib_launcher
from blockdiag.triton_kernels.launch.plan import Target, TensorSpec
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.resident_cases import CASES
from tests.triton_kernels.plans_support import report_of


@pytest.mark.parametrize("name", CASES)
def test_bias_is_resident_where_it_fits(name):
    case = CASES[name]
    inner, _ = arrange.arranged(case.region())
    assert (resident(inner) is not None) == case.stays


def test_bias_of_another_dtype_is_not_resident():
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
# A joint kernel is ruled out because the two warp groups cannot halve the keys in whole chunks, because per-query
# arrays have gradients of their own, or because the bias is not simply an additive term.
WITHOUT_JOINT = ("three_chunks", "one_chunk", "terms", "bent")
# The plain kernel runs if keys of the columns kernel are no multiple of 128 or if there are more than 256 queries. It
# also runs if a per-head value has its gradient in the rows kernel.
PLAIN = {("one_chunk", "columns"), ("three_chunks", "rows"), ("three_chunks", "columns"), ("terms", "rows")}


@pytest.mark.covers(lambda name, kind: {name, kind})
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("evoformer", marks=pytest.mark.versions),
        "many_rows",
        "many_wide_rows",
        "shared",
        "narrow",
        "three_chunks",
        "one_chunk",
        "triangle",
        "terms",
        "bent",
        "wide_triangle",
    ],
)
def test_kernel_fits_hopper(name, kind):
    launch = launches_of(CASES[name].region())[f"fused_{kind}"]
    report = report_of(launch.plan(Target.for_arch(90)), 90)
    if (name, kind) in PLAIN:
        assert report.name == f"fused_{kind}"
        return
    assert report.name == f"fused_{kind}_resident"
    assert report.shared_bytes <= report.shared_limit
    # Warps wait for their partition in an outer loop, in which the compiler may spill addresses.
    assert not any(depth > 1 and count for depth, count in report.local_accesses.items()), str(report)
    assert report.ptx["wgmma"] > 0 and report.ptx["cp.async.bulk.tensor"] > 0 and report.ptx["f64"] == 0


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [
        "evoformer",
        "many_rows",
        "many_wide_rows",
        "narrow",
        "float16",
        "triangle",
        "masked",
        "shared",
        "wide_triangle",
        *WITHOUT_JOINT,
    ],
)
def test_a_joint_kernel_fits_hopper(name):
    inner, _ = arrange.arranged(CASES[name].region())
    joint = kernel_choice.joint_kernel(inner)
    assert (joint is None) == (name in WITHOUT_JOINT)
    if joint is None:
        return
    launch = joint_launch(inner)
    report = report_of(launch.plan(Target.for_arch(90)), 90)
    assert report.shared_bytes <= report.shared_limit
    # Computing warps must not spill. The warps that gather vectors may spill an address that they read once a round.
    accesses = sum(count for depth, count in report.local_accesses.items() if depth > 1)
    assert report.spill_bytes <= 16 and accesses <= 2, str(report)
    assert report.ptx["wgmma"] > 0 and report.ptx["cp.async.bulk.tensor"] > 0 and report.ptx["f64"] == 0
    with pytest.raises(ValueError, match="Hopper alone"):
        launch.plan(Target.for_arch(100))


def joint_launch(inner):
    """Return the launch of the joint kernel of an arranged region."""
    joint = kernel_choice.joint_kernel(inner)
    sizes = inner.sizes
    rows = TensorSpec(tuple(sizes[x] for x in (*inner.batch, "q")), "float32")
    made = {"log_sum": rows, "delta": rows, "value": spec_of(inner.value)}
    made["cotangent"] = TensorSpec(shape_of(inner.out_dims, sizes), inner.dtype.name)
    made["output"] = made["cotangent"]
    made |= {f"leaf{i}": spec_of(leaf.source) for i, leaf in enumerate(inner.leaves)}
    return joint.launch([made[x] for x in joint.source.inputs])


def spec_of(source):
    return TensorSpec(source.shape, source.dtype.name)


def test_bias_gradient_parts_fill_the_gpu():
    # Eight tiles alone would be few programs, so several programs share the rounds of each tile.
    inner, _ = arrange.arranged(CASES["shared"].region())
    joint = kernel_choice.joint_kernel(inner)
    (bias,) = [x for x in joint.source.outputs if ("part",) in x.dims]
    parts = bias.shape[[x for (x,) in bias.dims].index("part")]
    assert bias.dtype == "float32" and parts > 1
    assert joint.on_hopper.each * parts >= joint.on_hopper.rounds
    assert joint_launch(inner).plan(Target.for_arch(90)).grid[0] == joint.on_hopper.tiles * parts


@pytest.mark.versions
@pytest.mark.parametrize(("arch", "expected"), [(90, ("rows_and_pairs_resident", "columns_resident")), (100, None)])
def test_gradient_kernels_are_chosen_when_lowered(arch, expected, monkeypatch):
    case = CASES["evoformer"]
    given = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in case.shapes.items()}

    def loss(given):
        return fuse(case.function, implementation="triton")(**given).astype(jnp.float32).sum()

    launched = []
    build = jaxlib_launcher.build_opaque
    monkeypatch.setattr(
        jaxlib_launcher, "build_opaque", lambda plan, compiled: (launched.append(plan.name), build(plan, compiled))[1]
    )
    with compile_target(arch):
        text = jax.jit(jax.grad(loss)).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    names = ("forward_resident", *expected) if expected else ("forward", "rows", "columns", "pairs")
    assert launched == [f"fused_{name}" for name in names]
    assert text.count("custom_call @triton_kernel_call_ffi") == len(names)


def test_a_bias_without_gradient_has_no_joint_kernel():
    inner, _ = arrange.arranged(CASES["evoformer"].region())
    held = resident(inner).held
    still = with_leaves(inner, {x: dataclasses.replace(x, is_constant=x is held) for x in inner.leaves})
    assert kernel_choice.joint_kernel(inner) is not None and kernel_choice.joint_kernel(still) is None


def test_other_architectures_get_the_plain_kernel():
    launch = launches_of(CASES["evoformer"].region())["fused_forward"]
    plans = {arch: launch.plan(Target.for_arch(arch)) for arch in (80, 90, 100)}
    found = {arch: plan.name for arch, plan in plans.items()}
    assert found == {80: "fused_forward", 90: "fused_forward_resident", 100: "fused_forward"}
    plain = dataclasses.replace(launch, on_hopper=None)
    assert plain.plan(Target.for_arch(90)).name == "fused_forward" and plain != launch


def test_rounds_each_balances_work_between_multiprocessors():
    # 64 tiles go twice into 132 multiprocessors.
    assert rounds_each(256, 64, 132) == 128
    # The longest program takes little more time than an even division of all rounds would.
    for rounds, tiles in ((256, 500), (64, 200), (100, 1), (1000, 7), (7, 3)):
        each = rounds_each(rounds, tiles, 132)
        longest = each * -(-tiles * -(-rounds // each) // 132)
        assert max(1.0, rounds * tiles / 132) <= longest <= 1.07 * rounds * tiles / 132 + 1


def test_rounds_each_with_private_memory_limits_the_number_of_programs():
    for tiles in (4, 12, 128, 140, 404, 528, 600):
        for rounds in (4, 67, 256, 512):
            each = rounds_each(rounds, tiles, 132, 528)
            programs = tiles * -(-rounds // each)
            assert 1 <= each <= rounds and programs <= max(tiles, 528)
            # At least half of the GPU has work, if there is enough of it.
            assert programs >= min(66, tiles * rounds)
    assert rounds_each(512, 404, 132) < rounds_each(512, 404, 132, 528) == 512


def test_a_launch_holds_the_plans_arrays():
    launch = launches_of(CASES["terms"].region())["fused_forward"]
    plan = launch.plan(Target(90, 100))
    assert plan.inputs == launch.inputs and plan.outputs == launch.outputs
    assert plan.grid[0] * plan.arguments["ROUNDS"].value >= 6


def test_kernel_sources_are_generated_once_per_traced_pass(monkeypatch):
    printed = []
    for name in ("forward_source", "rows_source", "columns_source", "pairs_source", "resident_backward"):
        make = getattr(kernel_choice, name)

        def counted(*given, make=make, name=name):
            printed.append((name, *given[1:]))
            return make(*given)

        monkeypatch.setattr(kernel_choice, name, counted)
    case = CASES["evoformer"]
    function = fuse(case.function, implementation="triton")

    def total(*arrays):
        return function(*arrays).astype("float32").sum()

    # Hopper has other kernels for the pass than other architectures, and both are traced.
    arrays = list(case.inputs().values())
    jax.jit(jax.grad(total, argnums=tuple(range(len(arrays))))).trace(*arrays)
    assert {name for name, *_ in printed} >= {"rows_source", "columns_source", "pairs_source", "resident_backward"}
    assert len(printed) == len(set(printed))
