"""Tests of the streamed forward kernel of Hopper: results, barriers, several items per program, and compilation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.lowering import streamed_schedule
from blockdiag.fusion.runtime import arrange, kernel_choice
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.interop import jax_call
from blockdiag.interop.jaxlib_launcher import lay_out_buffers
from blockdiag.triton_kernels.launch import plan as launch_plan
from blockdiag.triton_kernels.launch.plan import Target, TensorSpec
from tests.fusion.codegen.test_gluon import assert_exact, assert_same_nan_of_rows, launched  # noqa: F401
from tests.fusion.eight_bit_cases import CASES as EIGHT_BIT_CASES
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.gluon_protocol import Slow
from tests.fusion.streamed_cases import CASES
from tests.fusion.thresholds import lifted
from tests.triton_kernels.plans_support import report_of

NAME = "fused_forward_streamed"
STREAMED = [name for name, case in CASES.items() if case.streams]
EIGHT_BIT_STREAMED = [name for name, case in EIGHT_BIT_CASES.items() if case.streams]
ALL_CASES = CASES | {name: EIGHT_BIT_CASES[name] for name in EIGHT_BIT_STREAMED}


@pytest.fixture(autouse=True)
def small_calls():
    with lifted(streamed_schedule):
        yield


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Let programs take several items."""
    monkeypatch.setitem(launch_plan._USUAL_MULTIPROCESSORS, 90, 2)


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_kernels_match_float32(name, launched):  # noqa: F811
    case = CASES[name]
    # Other kernels compute the gradients, and their residuals have the same form in all cases.
    assert_exact(case, fuse(case.function, implementation="triton"), has_gradients=name in ("cross", "far_away"))
    assert {x for x in launched if x.startswith("fused_forward")} == {NAME}


@pytest.mark.parametrize("name", EIGHT_BIT_STREAMED)
def test_streamed_kernels_of_eight_bit_queries_and_keys_are_as_exact_as_written(name, launched):  # noqa: F811
    case = EIGHT_BIT_CASES[name]
    inputs = case.inputs()
    found = np.asarray(fuse(case, implementation="triton")(*inputs.values()))
    exact = case.exact(inputs)
    assert np.abs(found.astype(np.float64) - exact).max() <= case.allowed_error(inputs, exact)
    assert launched == [NAME]


@pytest.mark.parametrize("name", [name for name, case in EIGHT_BIT_CASES.items() if not case.streams])
def test_other_calls_with_eight_bit_arrays_do_not_stream(name):
    assert NAME not in {kernel.source.name for kernel in kernel_choice.kernels(EIGHT_BIT_CASES[name].region())}


def test_streamed_kernel_with_nan_in_a_query_gives_nan_where_xla_does(launched):  # noqa: F811
    case = CASES["clipped"]
    inputs = case.inputs()
    inputs["query"] = inputs["query"].at[0, 5, 0, 3].set(jnp.nan)
    assert assert_same_nan_of_rows(case.function, inputs) == inputs["value"].shape[-1]
    assert NAME in launched


@pytest.mark.parametrize("sink", [-1e4, 1e4, -np.inf, np.nan])
def test_sinks_of_any_size(sink, launched):  # noqa: F811
    """The first queries see no key, so their log-sum-exp is that of the sink alone."""

    def function(query, key, value, sink):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
        seen = jnp.arange(256)[:, None] - jnp.arange(256)[None, :] >= 64
        logits = jnp.broadcast_to(sink, (*scores.shape[:3], 1)).astype(scores.dtype)
        every = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), logits], axis=-1)
        found = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(every, axis=-1)[..., :256], value)
        return found, jax.nn.logsumexp(every, axis=-1)

    inputs = [x for name, x in CASES["sunk"].inputs().items() if name != "sink"]
    inputs = [x[:1, :256] for x in inputs]
    found, log_sum = fuse(function, implementation="triton")(*inputs, jnp.float32(sink))
    exact, exact_log_sum = function(*(x.astype(jnp.float32) for x in inputs), jnp.float32(sink))
    if sink == -np.inf:
        # Plain functions return NaN for queries without any logit.
        exact = exact.at[:, :64].set(0)
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, atol=2e-2)
    np.testing.assert_allclose(np.asarray(log_sum, np.float32), exact_log_sum, rtol=1e-2)
    assert launched == [NAME]


def launch_of(case):
    """Return the streamed launch of a case, and its arrays; the case has no inputs but queries, keys and values."""
    region, inputs = case.region(), case.inputs()
    operands = []
    for leaf in region.leaves:
        if leaf.source.key is None:
            operands.append(jnp.arange(*leaf.source.shape))
        elif leaf.source.constant is not None:
            operands.append(jnp.asarray(leaf.source.constant))
        else:
            operands.append(inputs[leaf.role])
    kept = []

    def keep(launches, **_):
        kept.extend(launches)
        return [[jnp.zeros(x.shape, x.dtype) for x in spec.outputs] for spec, _ in launches]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_call, "launch_together", keep)
        triton_fused._results(region, triton_fused._is_hopper, *operands, inputs["value"].astype(region.value.dtype))
    ((spec, arrays),) = kept
    return spec, [np.asarray(x) for x in arrays]


SEVERAL = ("cross", "wide", "narrow", "much_wider_values", "causal", "long_causal", "long_parts", "long_values")
# The delays, in seconds, of the partitions: the two compute groups, and load.
SLOW_LOAD, SLOW_GROUP, SLOW_COMPUTE = (0, 0, 1e-2), (1e-2, 0, 0), (3e-3, 3e-3, 0)


@pytest.mark.parametrize("naps", [SLOW_LOAD, SLOW_GROUP, SLOW_COMPUTE])
@pytest.mark.parametrize("name", SEVERAL)
def test_streamed_kernel_gives_the_same_bits_whichever_warps_are_slow(name, naps):
    spec, arrays = launch_of(ALL_CASES[name])
    plan = spec.plan(Target.for_arch(90))
    one = interpret_gluon(plan, *arrays)
    other = interpret_gluon(plan, *arrays, chance=Slow(*naps))
    assert np.isfinite(one[0].astype(np.float32)).all()
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


def traced_launch_of(name):
    """Return the streamed launch of a case, with arrays that are not known."""
    inner, change = arrange.arranged(ALL_CASES[name].region())
    found = []

    def trace(leaves, value):
        arrays = arrange.arrays_by_name(change, leaves, value)
        kernel = kernel_choice.own_forward_kernel(inner, arrays)
        found.append(kernel.launch([TensorSpec(x.shape, x.dtype.name) for x in kernel.given(arrays)]))

    leaves = [jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in inner.leaves]
    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct(inner.value.shape, inner.value.dtype))
    return found[0]


# Accesses of local memory. With values of eight bits and 128 columns, the sums, the products of a chunk and its scores
# are in registers at a time.
KNOWN_SPILLS = {"sloped": 2, "long_values": 42, "long_values_many_chunks": 29}


# Their kernels have the tiles, slots and dtypes of another case's kernel, and functions of their own.
WITH_COMMON_TILES = (
    "one_chunk",
    "clipped",
    "heads_first",
    "grouped",
    "soft_cap",
    "sloped",
    "tempered",
    "window",
    "global_and_local",
    "strided",
    "far_away",
    "added_mask",
    "documents",
    "padded",
    "long_scaled_heads",
    "sunk_without_keys",
    "null_key",
)


def markers_of(name):
    """Return the markers of the case that compiles a kernel."""
    return [pytest.mark.versions] * (name == "cross") + [pytest.mark.exhaustive] * (name in WITH_COMMON_TILES)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [pytest.param(x, marks=markers_of(x)) for x in (*STREAMED, *EIGHT_BIT_STREAMED)])
def test_streamed_kernels_fit_hopper(name):
    plan = traced_launch_of(name).plan(Target.for_arch(90))
    # jaxlib's launcher can pass the arrays in this order.
    lay_out_buffers(plan)
    report = report_of(plan, 90)
    assert report.name == NAME and report.shared_bytes <= report.shared_limit
    assert sum(report.local_accesses.values()) <= KNOWN_SPILLS.get(name, 0), str(report)
    assert report.ptx["wgmma"] > 0 and report.ptx["cp.async.bulk.tensor"] > 0 and report.ptx["f64"] == 0
    kinds = set(re.findall(r"wgmma\.mma_async\S*f32\.(\w+)\.(\w+)", report.kernel.asm["ptx"]))
    short = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(ALL_CASES[name].dtype)
    values = {"bfloat16": "bf16", "float16": "f16"}.get(ALL_CASES[name].region().value.dtype.name, short)
    assert kinds == {(x, x) for x in (short or values, values)}
