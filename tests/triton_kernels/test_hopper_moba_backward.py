"""MoBA's backward kernel for Hopper in the interpreter, compared with the plain kernel."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba.tables import moba_tables
from blockdiag.triton_kernels.launch.plan import LaunchPlan, Target
from blockdiag.triton_kernels.moba.plans import MoBALaunch
from blockdiag.triton_kernels.moba.steps import forward_steps
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.gluon_protocol import Slow
from tests.triton_kernels.test_hopper_moba import lists_of, run

BASE = MoBAProblem(
    query_tokens=500, key_tokens=500, query_heads=1, key_heads=1, head_dim=128, dtype="bfloat16", block_size=128,
    num_blocks=4, slots=2, is_causal=True, has_key_mask=False, scale=0.1,
)  # fmt: skip
PROBLEMS = {
    # Lists of more tiles than the ring has slots.
    "long lists": BASE,
    "grouped, masked, float16": dataclasses.replace(
        BASE, query_tokens=300, key_tokens=300, query_heads=2, num_blocks=3, dtype="float16", has_key_mask=True
    ),
    "heads of 64": dataclasses.replace(BASE, query_tokens=260, key_tokens=260, num_blocks=3, head_dim=64),
}


def launch_of(name: str, *, is_portable: bool = False) -> MoBALaunch:
    """Return the launch of a case."""
    return MoBALaunch(PROBLEMS[name], "blocks_backward", is_portable=is_portable)


def plan_and_inputs(name: str) -> tuple[LaunchPlan, list[np.ndarray]]:
    """Return the plan of a case for Hopper, and its inputs."""
    launch, arrays = launch_of(name), arrays_of(name)
    plan = launch.plan(Target.for_arch(90))
    assert plan.kernel.__name__ == "moba_hopper_backward"
    return plan, [arrays[x] for x in launch.input_names]


@functools.cache
def arrays_of(name: str) -> dict[str, np.ndarray]:
    """Return the inputs of a case, and the results of the plain kernel."""
    problem = PROBLEMS[name]
    generator = np.random.default_rng(0)
    blocks, queries = (np.array(x) for x in moba_tables(problem, 1))

    def normal(*shape: int, dtype: str = problem.dtype) -> np.ndarray:
        return generator.normal(size=shape).astype(jnp.dtype(dtype))

    rows, heads = problem.query_tokens, problem.query_heads
    arrays = {"blocks": blocks, "queries": queries, "query": normal(rows, heads, problem.head_dim)}
    arrays |= {x: normal(problem.key_tokens, problem.key_heads, problem.head_dim) for x in ("key", "value")}
    arrays["mask"] = (generator.uniform(size=problem.key_tokens) < 0.8).astype(np.int8)
    arrays |= lists_of(problem, queries)
    run(arrays, [MoBALaunch(problem, kind, heads=own, is_portable=True) for kind, own in forward_steps(problem)])
    arrays["output_cotangent"] = normal(rows, heads, problem.head_dim)
    arrays["log_sum_cotangent"] = normal(rows, heads, dtype="float32")
    run(arrays, [MoBALaunch(problem, "starts", is_portable=True), launch_of(name, is_portable=True)])
    return {x: np.asarray(array) for x, array in arrays.items()}


def interpreted(name, **options):
    """Return the kernel's partial gradients of queries, and the gradients of keys and values."""
    plan, inputs = plan_and_inputs(name)
    return dict(zip(launch_of(name).output_names, interpret_gluon(plan, *inputs, **options), strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernel_matches_the_plain_kernel(name):
    results, arrays = interpreted(name, is_checked=True), arrays_of(name)
    # A query's parts are those of the blocks that it chose, then that of its own block.
    is_chosen = np.moveaxis(arrays["chosen"] >= 0, 0, 1)
    is_part = np.concatenate([is_chosen, np.ones_like(is_chosen[..., :1])], -1)
    masks = {"part": is_part, "d_key": ..., "d_value": ...}
    unit = float(jnp.finfo(PROBLEMS[name].dtype).eps)
    for one, mask in masks.items():
        found, expected = (np.asarray(x[one], np.float32)[mask] for x in (results, arrays))
        np.testing.assert_allclose(found, expected, rtol=8 * unit, atol=8 * unit * np.abs(expected).max())


def test_results_do_not_depend_on_slow_copies():
    punctual = interpreted("heads of 64")
    for name, found in interpreted("heads of 64", chance=Slow(1e-4)).items():
        is_written = ~np.isnan(np.asarray(punctual[name], np.float32))
        np.testing.assert_array_equal(found[is_written], punctual[name][is_written])
