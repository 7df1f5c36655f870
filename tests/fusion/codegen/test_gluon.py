"""Tests of generated Hopper kernels in the Gluon interpreter: results and gradients match float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.codegen import resident_pairs as kernels_resident_pairs
from blockdiag.fusion.runtime import arrange, kernel_choice
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.interop import jax_call
from blockdiag.interop.interpreter.launch import interpret
from blockdiag.triton_kernels.launch import plan as launch_plan
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.lowering.test_resident_schedule import KERNELS, PLAIN, WITHOUT_JOINT
from tests.fusion.resident_cases import CASES as RESIDENT
from tests.fusion.resident_cases import rows_of_heads

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
    inner, _ = arrange.arranged(case.region())
    joint = kernel_choice.joint_kernel(inner)
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


def assert_same_nan_of_rows(function, inputs):
    """Assert that results and query gradients are NaN where plain ones are; return the number of NaN results."""
    cotangent = jnp.ones(jax.eval_shape(function, **inputs).shape)
    expected = results(function, inputs, cotangent)
    found = results(fuse(function, implementation="triton"), inputs, cotangent)
    for name in ("output", "query"):
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(expected[name]), err_msg=name)
    return np.isnan(expected["output"]).sum()


def test_resident_kernels_with_nan_in_a_bias_give_nan_where_xla_does(launched):
    inputs = RESIDENT["bent"].inputs()
    inputs["pair"] = inputs["pair"].at[0, 0, 1, 7, 4].set(jnp.nan)

    def clipped(query, key, value, mask, pair):
        return rows_of_heads(query, key, value, jnp.clip(mask, -1, 1), jax.nn.relu(pair))

    assert assert_same_nan_of_rows(clipped, inputs) == inputs["query"].shape[1] * inputs["value"].shape[-1]
    assert {"fused_forward_resident", "fused_rows_resident"} <= set(launched)
