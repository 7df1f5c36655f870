"""Tests of generated Hopper kernels in the Gluon interpreter: results and gradients match float32."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.codegen import resident_pairs as kernels_resident_pairs
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.interop import jax_call
from blockdiag.interop.interpreter.launch import interpret
from blockdiag.triton_kernels.launch import plan as launch_plan
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.lowering.test_resident_schedule import KERNELS, PLAIN, WITHOUT_JOINT
from tests.fusion.resident_cases import CASES as RESIDENT
from tests.fusion.resident_cases import rows_of_heads
from tests.fusion.streamed_cases import CASES as STREAMED

HOPPER = Target.for_arch(90)


@pytest.fixture
def launched(monkeypatch):
    """Run the kernels that Hopper would launch in interpreters, and return the growing list of their names."""
    names = []
    # A program that was compiled for an earlier test would report its kernels to that test's list.
    jax.clear_caches()

    def run(spec, plan, *arrays):
        names.append(plan.name)
        arrays = [np.asarray(x) for x in arrays]
        found = interpret_gluon(plan, *arrays) if plan.kernel.is_gluon() else interpret(spec, *arrays, target=HOPPER)
        return tuple(found)

    def launch_together(launches, **_):
        plans = [spec.plan(Target.for_arch(90)) for spec, _ in launches]
        types = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.outputs] for plan in plans]
        return [
            tuple(jax.pure_callback(functools.partial(run, spec, plan), tuple(outputs), *arrays))
            for (spec, arrays), plan, outputs in zip(launches, plans, types, strict=True)
        ]

    def as_compiled(function):
        return lambda *operands, interpret=False: function(*operands)

    monkeypatch.setattr(jax_call, "launch_together", launch_together)
    monkeypatch.setattr(triton_fused, "forward", as_compiled(triton_fused.forward))
    monkeypatch.setattr(triton_fused, "backward", as_compiled(triton_fused.backward))
    monkeypatch.setattr(triton_fused, "by_target", lambda choose, chosen, other, *arrays: chosen(*arrays))
    return names


def results(function, inputs, cotangent):
    """Return the result by name, and the gradients of floating inputs if there is a cotangent."""
    if cotangent is None:
        return {"output": np.asarray(function(**inputs), np.float32)}
    whole = {name: x for name, x in inputs.items() if x.dtype.kind == "i"}
    given = {name: x for name, x in inputs.items() if name not in whole}
    output, pull = jax.vjp(lambda given: function(**given, **whole), given)
    found = {"output": output} | pull(cotangent.astype(output.dtype))[0]
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def widened(inputs):
    return {name: x if x.dtype.kind == "i" else x.astype(jnp.float32) for name, x in inputs.items()}


def assert_exact(case, function, *, is_masked=False, has_gradients=True):
    """Assert that results are about as accurate as those of the plain function with 16-bit arrays."""
    inputs = case.inputs()
    cotangent = None
    if has_gradients:
        shape = jax.eval_shape(case.function, **inputs).shape
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    found = results(function, inputs, cotangent)
    rough = results(case.function, inputs, cotangent)
    unit = 2.0 ** (-8 if case.dtype == "bfloat16" else -11)
    for name, exact in results(jax.jit(case.function), widened(inputs), cotangent).items():
        actual, other = found[name], rough[name]
        if is_masked:
            # The first row sees no key: fused functions return 0 there, and plain ones do not.
            if name in ("mask", "pair"):
                continue
            exact, actual, other = (x[:, 1:] for x in (exact, actual, other))
        allowed = 2 * np.abs(other - exact).max() + 2 * unit * 2.0 ** np.ceil(np.log2(np.abs(exact).max()))
        assert np.abs(actual - exact).max() <= allowed, name


@pytest.mark.parametrize("name", [name for name, case in STREAMED.items() if case.streams])
def test_streamed_kernels_match_float32(name, launched):
    case = STREAMED[name]
    # Other kernels compute the gradients, and their residuals have the same form in all cases.
    assert_exact(case, fuse(case.function, implementation="triton"), has_gradients=name in ("cross", "far_away"))
    assert {x for x in launched if x.startswith("fused_forward")} == {"fused_forward_streamed"}


# Programs of these cases run several rounds on a GPU with 132 multiprocessors. With 8, few rows suffice for that.
MANY_ROUNDS = ("many_rows", "many_wide_rows", "one_chunk", "shared")
FEW_ROWS, FEW_MULTIPROCESSORS = 6, 8


def with_few_rows(case):
    rows = case.shapes["query"][1]
    shapes = {name: tuple(FEW_ROWS if x == rows else x for x in shape) for name, shape in case.shapes.items()}
    return dataclasses.replace(case, shapes=shapes)


@pytest.mark.parametrize("name", [name for name, case in RESIDENT.items() if case.stays])
def test_resident_bias_kernels_match_float32(name, launched, monkeypatch):
    case = RESIDENT[name]
    if name in MANY_ROUNDS:
        case = with_few_rows(case)
        monkeypatch.setitem(launch_plan._USUAL_MULTIPROCESSORS, 90, FEW_MULTIPROCESSORS)
        monkeypatch.setattr(kernels_resident_pairs, "_USUAL_MULTIPROCESSORS", FEW_MULTIPROCESSORS)
        monkeypatch.setattr(kernels_resident_pairs, "_MOST_PROGRAMS", 4 * FEW_MULTIPROCESSORS)
    assert_exact(case, fuse(case.function, implementation="triton"), is_masked=name.endswith("masked"))
    expected = {f"fused_{kind}" if (name, kind) in PLAIN else f"fused_{kind}_resident" for kind in KERNELS}
    if name in WITHOUT_JOINT:
        expected |= {"fused_pairs"}
    else:
        expected = expected - {"fused_rows", "fused_rows_resident"} | {"fused_rows_and_pairs_resident"}
    assert set(launched) == expected


@pytest.mark.parametrize("name", ["float16", "triangle", "wide_triangle"])
def test_resident_bias_gradient_in_one_part_keeps_shape_and_dtype(name, launched, monkeypatch):
    # With one multiprocessor a program goes through all rounds.
    monkeypatch.setattr(kernels_resident_pairs, "_USUAL_MULTIPROCESSORS", 1)
    case = RESIDENT[name]
    inner, _ = triton_fused.arranged(case.region())
    joint = triton_fused.joint_kernel(inner)
    assert joint is not None
    (place,) = [i for i, leaf in enumerate(inner.leaves) if leaf.role == "score"]
    (found,) = [x for x in joint.source.outputs if x.name == f"grad{place}"]
    assert (found.dims, found.shape, found.dtype) == (
        inner.leaves[place].dims,
        inner.leaves[place].source.shape,
        case.dtype,
    )
    assert_exact(case, fuse(case.function, implementation="triton"))
    assert "fused_rows_and_pairs_resident" in launched


class Slow:
    """A stand-in for `random.Random` with fixed delays of the first warp group, the second group and the loader."""

    def __init__(self, *naps):
        self.naps = itertools.cycle(naps)

    def choice(self, naps):
        return next(self.naps)

    def random(self):
        return 1.0


FREE = "        thread_barrier()\n        free_slot(value_empty, chunk - 1, 3)\n"
WAIT = "        output_tile = warpgroup_mma_wait(0, deps=[output_tile])\n"
LOADED = "        k_part = wait_slot(key_ring, key_full, chunk)\n"


@pytest.mark.parametrize(
    ("lines", "changed", "naps"),
    [
        # The slot of values is freed before the product that reads it has completed.
        (WAIT + FREE, FREE + WAIT, (2e-3, 2e-3, 0.0)),
        # The wait for keys is missing.
        (LOADED, "        k_part = key_ring.index(chunk % 3)\n", (0.0, 0.0, 2e-3)),
    ],
)
def test_reordered_shared_memory_accesses_are_detected(lines, changed, naps):
    case = STREAMED["cross"]
    arrays = [np.asarray(x) for x in case.inputs().values()]
    plan = launches_of(case.region())["fused_forward"].plan(HOPPER)

    def output_of(text):
        one = dataclasses.replace(plan, kernel=dataclasses.replace(plan.kernel, text=text))
        return interpret_gluon(one, *arrays, chance=Slow(*naps))[0].astype(np.float32)

    text = plan.kernel.text
    assert lines in text
    right = output_of(text)
    assert np.isfinite(right).all()
    try:
        is_noticed = not np.array_equal(output_of(text.replace(lines, changed)), right)
    except AssertionError:
        # The interpreter detects a barrier in the wrong phase.
        is_noticed = True
    assert is_noticed


def assert_same_nan_of_rows(function, inputs):
    """Assert that results and query gradients are NaN where plain ones are; return the number of NaN results."""
    cotangent = jnp.ones(jax.eval_shape(function, **inputs).shape)
    expected = results(function, inputs, cotangent)
    found = results(fuse(function, implementation="triton"), inputs, cotangent)
    for name in ("output", "query"):
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(expected[name]), err_msg=name)
    return np.isnan(expected["output"]).sum()


def test_streamed_kernel_with_nan_in_a_query_gives_nan_where_xla_does(launched):
    case = STREAMED["clipped"]
    inputs = case.inputs()
    inputs["query"] = inputs["query"].at[0, 5, 0, 3].set(jnp.nan)
    assert assert_same_nan_of_rows(case.function, inputs) == inputs["value"].shape[-1]
    assert "fused_forward_streamed" in launched


def test_resident_kernels_with_nan_in_a_bias_give_nan_where_xla_does(launched):
    inputs = RESIDENT["bent"].inputs()
    inputs["pair"] = inputs["pair"].at[0, 0, 1, 7, 4].set(jnp.nan)

    def clipped(query, key, value, mask, pair):
        return rows_of_heads(query, key, value, jnp.clip(mask, -1, 1), jax.nn.relu(pair))

    assert assert_same_nan_of_rows(clipped, inputs) == inputs["query"].shape[1] * inputs["value"].shape[-1]
    assert {"fused_forward_resident", "fused_rows_resident"} <= set(launched)
