"""MoBA's forward kernel for Hopper, in the interpreter: contiguous keys, and caches of prompts."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.interop.interpreter.launch import interpret
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.moba.plans import MoBALaunch
from blockdiag.triton_kernels.moba.steps import list_steps
from blockdiag.triton_kernels.moba_paged.prompts import PromptLaunch, moba_problem
from tests.fusion.gluon_interpreter import interpret_gluon
from tests.fusion.gluon_protocol import Slow
from tests.triton_kernels.test_moba_paged_plans import CACHES, prompt

TARGET = Target.for_arch(90)
SMALL = dict(
    batch=2, query_tokens=100, query_heads=2, key_heads=1, num_pages=40, max_pages=20, page_size=16, scale=0.1
)  # fmt: skip
NARROW = dict(head_dim=64, value_dim=64, query_dtype="float16", output_dtype="float16")
PROBLEMS = {
    "pages of 16": prompt(128, 2, **SMALL),
    "pages of 3, float16, heads of 64": prompt(
        64, 3, **SMALL | NARROW | dict(key_dtype="float16", value_dtype="float16", page_size=3, num_pages=214,
        max_pages=107)
    ),
    "contiguous": prompt(128, 2, **SMALL | dict(has_page_table=False, num_pages=2, page_size=320, max_pages=1)),
    "e4m3, scales of tokens": prompt(
        128, 2, **SMALL | CACHES["float8_e4m3fn"] | dict(key_scale="token", value_scale="token", has_score_scale=True)
    ),
    "e5m2, scales of heads": prompt(
        64, 3, **SMALL | NARROW | CACHES["float8_e5m2"] | dict(value_scale="head", has_score_scale=True)
    ),
    # Blocks with lists of more tiles than fit into shared memory.
    "long lists": prompt(128, 2, **SMALL | dict(query_tokens=450, num_pages=80, max_pages=40)),
}  # fmt: skip
LENGTHS = {"long lists": [640, 450]}


def lists_of(problem: MoBAProblem, queries: np.ndarray) -> dict[str, np.ndarray]:
    """Return the lists of random choices among the blocks that queries may choose."""
    generator = np.random.default_rng(3)
    chosen = np.full((problem.query_heads, problem.query_tokens, problem.slots), -1, np.int32)
    for head, token in np.ndindex(*chosen.shape[:2]):
        blocks = generator.permutation(np.arange(*queries[token, :2]))[: problem.slots]
        chosen[head, token, : len(blocks)] = blocks
    arrays = {"chosen": chosen}
    run(arrays, [MoBALaunch(problem, kind, is_portable=True) for kind, _ in list_steps()])
    return arrays


def run(arrays, launches) -> None:
    """Run launches in Triton's interpreter, and add their results to the arrays."""
    for launch in launches:
        results = interpret(launch, *(np.asarray(arrays[name]) for name in launch.input_names), target=TARGET)
        arrays |= dict(zip(launch.output_names, results, strict=True))


@functools.cache
def launch_and_inputs(name: str) -> tuple[MoBALaunch, dict[str, np.ndarray]]:
    """Return the launch of a case and its inputs; rows of pages that no sequence has are NaN."""
    problem = PROBLEMS[name]
    call, generator, lengths = problem.paged, np.random.default_rng(0), LENGTHS.get(name, [290, 200])
    pool = (call.num_pages, call.page_size, call.key_heads)
    table = generator.permutation(call.num_pages)[: call.batch * call.max_pages].reshape(call.batch, -1)
    table = table.astype(np.int32) if call.has_page_table else np.arange(call.batch)[:, None]
    is_used = np.zeros(pool[:2], bool)
    for pages, length in zip(table, lengths, strict=True):
        token = np.arange(length)
        is_used[pages[token // call.page_size], token % call.page_size] = True

    def used(values: np.ndarray, dtype: str) -> np.ndarray:
        is_row = is_used.reshape(*is_used.shape, *[1] * (values.ndim - 2))
        return np.where(is_row, values, np.nan).astype(jnp.dtype(dtype))

    by_head = (call.batch, call.key_heads)
    arrays = {
        "kv_lengths": np.asarray(lengths, np.int32),
        "query": generator.normal(size=(call.batch, call.query_tokens, call.query_heads, call.head_dim)).astype(
            jnp.dtype(call.query_dtype)
        ),
        "key": used(generator.normal(size=(*pool, call.head_dim)), call.key_dtype),
        "value": used(generator.normal(size=(*pool, call.head_dim)), call.value_dtype),
        "page_table": table,
        "score_scale": generator.uniform(-1, 1, size=by_head).astype(np.float32),
        "key_scale": used(generator.uniform(-2, 2, size=pool), "float32"),
        "value_scale": used(generator.uniform(-2, 2, size=pool), "float32"),
    }
    if call.value_scale == "head":
        arrays["value_scale"] = generator.uniform(-2, 2, size=by_head).astype(np.float32)
    run(arrays, [PromptLaunch(problem, "tables")])
    arrays |= lists_of(moba_problem(problem), arrays["queries"])
    run(arrays, [MoBALaunch(moba_problem(problem), "items", is_portable=True)])
    return MoBALaunch(moba_problem(problem), "blocks_forward", cache=call), arrays


def interpreted(launch, arrays, **options):
    """Return the parts of outputs and their log-sum-exps from the kernel for Hopper."""
    plan = launch.plan(TARGET)
    assert plan.kernel.__name__ == "moba_hopper_forward"
    return interpret_gluon(plan, *(np.asarray(arrays[name]) for name in launch.input_names), **options)


def assert_equal_to_the_plain_kernel(launch, arrays, **options):
    part, part_sum = interpreted(launch, arrays, **options)
    plain = dict(arrays)
    run(plain, [dataclasses.replace(launch, is_portable=True)])
    is_chosen = np.moveaxis(arrays["chosen"] >= 0, 0, 1)
    assert is_chosen.any() and not np.isnan(part_sum[is_chosen]).any()
    np.testing.assert_allclose(part_sum[is_chosen], plain["part_sum"][is_chosen], rtol=1e-5, atol=1e-4)
    unit = float(jnp.finfo(part.dtype).eps)
    np.testing.assert_allclose(
        part[is_chosen].astype(np.float32), plain["part"][is_chosen].astype(np.float32), rtol=2 * unit, atol=2 * unit
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernel_matches_the_plain_kernel(name):
    assert_equal_to_the_plain_kernel(*launch_and_inputs(name), is_checked=True)


def test_kernel_of_contiguous_keys_matches_the_plain_kernel():
    """Without a cache, rows of keys are numbered as in the contiguous one."""
    launch, arrays = launch_and_inputs("contiguous")
    rows = {name: arrays[name].reshape(-1, *arrays[name].shape[2:]) for name in ("query", "key", "value")}
    assert_equal_to_the_plain_kernel(dataclasses.replace(launch, cache=None), arrays | rows, is_checked=True)


@pytest.mark.parametrize("name", ["pages of 16", "e4m3, scales of tokens"])
def test_results_do_not_depend_on_slow_copies(name):
    launch, arrays = launch_and_inputs(name)
    punctual = interpreted(launch, arrays)
    for one, other in zip(interpreted(launch, arrays, chance=Slow(1e-4)), punctual, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
