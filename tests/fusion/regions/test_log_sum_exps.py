"""Tests of functions that use the log-sum-exp of scores, such as gates, merged parts and results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.programs import collect_specs
from blockdiag import explain, fuse
from blockdiag.fusion.program import trace
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.fusion_support import (
    alternated,
    arrays,
    assert_alike,
    assert_as_good_as_written,
    assert_fused,
    compiled_gradients,
    expected_results,
)
from tests.fusion.resident_cases import CASES as RESIDENT

BATCH, TOKENS, HEADS, WIDTH = 2, 37, 3, 16
OPERAND = (BATCH, TOKENS, HEADS, WIDTH)


def scores(query, key):
    return jnp.einsum("bthd,bshd->bhts", query, key) / 4


def causal(query, key):
    found = scores(query, key)
    return jnp.where(jnp.tri(*found.shape[-2:], dtype=bool), found, -jnp.inf)


def times(weights, value):
    return jnp.einsum("bhts,bshd->bhtd", weights, value)


def joined(output, log_sum):
    """Concatenate the output and the log-sum-exp."""
    return jnp.concatenate([output, log_sum[..., None]], -1)


def returned(query, key, value):
    found = causal(query, key)
    return joined(times(jax.nn.softmax(found), value), jax.nn.logsumexp(found, -1))


def before(query, key, value):
    """Compute the log-sum-exp, and a value that depends on it, before the softmax."""
    found = scores(query, key)
    log_sum = 2 * jax.scipy.special.logsumexp(found, axis=-1, keepdims=True) + 1
    return times(jax.nn.softmax(found), value) + log_sum


def gated(query, key, value, sink):
    """Gate the output by its log-sum-exp less sink [N], which acts as a further logit of each row without a value."""
    found = causal(query, key)
    gate = jax.nn.sigmoid(jax.nn.logsumexp(found, -1) - sink[None, :, None])
    return times(jax.nn.softmax(found), value) * gate[..., None]


def by_hand(query, key, value):
    found = scores(query, key)
    largest = found.max(-1, keepdims=True)
    powers = jnp.exp(found - largest)
    total = powers.sum(-1, keepdims=True)
    return joined(times(powers, value) / total, (largest + jnp.log(total))[..., 0])


def without_largest(query, key, value):
    powers = jnp.exp(scores(query, key))
    total = powers.sum(-1)
    return joined(times(powers / total[..., None], value), jnp.log(total))


def exponential(query, key, value):
    """Compute the weights from the log-sum-exp."""
    found = scores(query, key)
    log_sum = jax.nn.logsumexp(found, -1, keepdims=True)
    return joined(times(jnp.exp(found - log_sum), value), log_sum[..., 0])


def merged(query, key, value):
    """Merge attention to two parts of the keys, as for keys on several devices."""

    def part(key, value):
        found = scores(query, key)
        return times(jax.nn.softmax(found), value), jax.nn.logsumexp(found, -1)

    (first, left), (second, right) = part(key[:, :16], value[:, :16]), part(key[:, 16:], value[:, 16:])
    whole = jnp.logaddexp(left, right)
    return first * jnp.exp(left - whole)[..., None] + second * jnp.exp(right - whole)[..., None]


def with_sinks(query, key, value, sink):
    """Include the logits of sinks [N] in the log-sum-exp."""
    found = scores(query, key)
    whole = jnp.concatenate([found, jnp.broadcast_to(sink[None, :, None, None], (*found.shape[:3], 1))], -1)
    return joined(times(jax.nn.softmax(whole)[..., :-1], value), jax.nn.logsumexp(whole, -1))


def of_shared_scores(query, key, value):
    """Share scores without heads between the heads of values."""
    found = scores(query[:, :, :1], key[:, :, :1])
    output = times(jnp.broadcast_to(jax.nn.softmax(found), (BATCH, HEADS, TOKENS, TOKENS)), value)
    return output + jax.nn.logsumexp(found, -1)[..., None]


def penalty(query, key, value):
    """Add a penalty of squared log-sum-exps, as in a z-loss, with queries before heads."""
    found = scores(query, key)
    log_sum = jax.nn.logsumexp(found, -1).transpose(0, 2, 1).reshape(BATCH, TOKENS * HEADS)
    return times(jax.nn.softmax(found), value) + jnp.mean(log_sum**2, -1)[:, None, None, None]


FUNCTIONS = {
    "returned": (returned,),
    "used before": (before,),
    "gate": (gated, (HEADS,)),
    "by hand": (by_hand,),
    "without a largest": (without_largest,),
    "exponential": (exponential,),
    "merged": (merged,),
    "with sinks": (with_sinks, (HEADS,)),
    "shared scores": (of_shared_scores,),
    "penalty": (penalty,),
}


@pytest.mark.parametrize(("name", "implementation"), alternated(FUNCTIONS))
def test_log_sum_exps_match_the_reference_with_gradients(name, implementation):
    function, *shapes = FUNCTIONS[name]
    given = arrays(OPERAND, OPERAND, OPERAND, *shapes)
    assert_fused(function, given, implementation)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_are_not_in_memory(name):
    function, *shapes = FUNCTIONS[name]
    given = arrays(OPERAND, OPERAND, OPERAND, *shapes)
    program = trace(function, given, {})
    needed = program.needed()
    outside = [x for x in program.jaxpr.jaxpr.eqns if x.outvars[0] in needed - program.regions.keys()]
    assert len(program.regions) == (2 if function is merged else 1)
    assert not [x for x in outside if x.outvars[0].aval.shape[-2:] == (TOKENS, TOKENS)]
    assert not {"dot_general", "reduce_max", "reduce_sum"} & explain(function)(*given).outside.keys() - {"reduce_sum"}


@pytest.mark.parametrize("name", ["returned", "gate", "merged"])
def test_log_sum_exps_in_bfloat16_are_accurate(name):
    function, *shapes = FUNCTIONS[name]
    given = [x.astype(jnp.bfloat16) for x in arrays(OPERAND, OPERAND, OPERAND, *shapes)]
    assert_as_good_as_written(function, fuse(function, implementation="xla"), given)


def transformed(function, given):
    """Return a loss and its gradients under `vmap`, `jit` and `checkpoint`, and gradients of gradients."""
    query, key, value = given
    several = (jnp.stack([query, 2 * query]), key, jnp.stack([value, value + 1]))

    def loss(*arguments):
        return jnp.sum(jnp.sin(function(*arguments)))

    def mapped(of):
        return jax.vmap(of, in_axes=(0, None, 0))

    def total(*arguments):
        return jnp.sum(mapped(loss)(*arguments))

    def steep(x):
        return jnp.sum(jax.grad(loss)(x, key, value) ** 2)

    return [
        *jax.tree.leaves(jax.value_and_grad(total, (0, 1, 2))(*several)),
        *mapped(jax.grad(loss, (0, 1, 2)))(*several),
        jax.grad(steep)(query),
        jax.grad(jax.checkpoint(loss), 1)(query, key, value),
        jax.jit(jax.grad(loss, 2))(query, key, value),
    ]


@pytest.mark.parametrize("function", [returned, merged])
def test_log_sum_exps_under_transformations_match_the_reference(function):
    given = arrays(OPERAND, OPERAND, OPERAND)
    assert_alike(transformed(fuse(function), given), transformed(function, given), 2e-4)


def test_gradient_of_the_log_sum_exp_alone_matches_the_reference():
    """The loss does not use the attention's output."""
    given = arrays(OPERAND, OPERAND, OPERAND)
    query, key, _ = given

    def log_sum(function):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x)[..., -1])), (0, 1, 2))(*given)

    found = log_sum(fuse(returned, implementation="triton"))
    assert_alike(found[:2], jax.grad(lambda *x: jnp.sum(jnp.sin(jax.nn.logsumexp(causal(*x), -1))), (0, 1))(query, key))
    assert not np.any(found[2])


def test_log_sum_exp_of_fully_masked_rows_is_minus_infinity():
    """The log-sum-exp of such rows is minus infinity, as in JAX, and their output is 0."""

    def function(query, key, value, seen):
        found = jnp.where(seen[:, None, None, :], scores(query, key), -jnp.inf)
        return times(jax.nn.softmax(found), value), jax.nn.logsumexp(found, -1)

    given = [*arrays(OPERAND, OPERAND, OPERAND), jnp.asarray([[True] * TOKENS, [False] * TOKENS])]
    for implementation in ("xla", "triton"):
        output, log_sum = fuse(function, implementation=implementation)(*given)
        expected, exact = function(*given)
        np.testing.assert_array_equal(log_sum[1], -jnp.inf)
        np.testing.assert_array_equal(output[1], 0)
        assert_alike([output[0], log_sum[0]], [expected[0], exact[0]])


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_log_sum_exp_of_rows_masked_by_a_finite_number_matches_the_reference(implementation):
    """The log-sum-exp of such rows is finite, so that sums of it with a mask are not NaN."""

    def function(query, key, value):
        seen = jnp.arange(TOKENS) < 7
        found = jnp.where((seen[:, None] & seen[None, :])[None, None], scores(query, key), -1e9)
        log_sum = jax.nn.logsumexp(found, -1)
        output = times(jax.nn.softmax(found), value) * seen[None, None, :, None]
        return output + jnp.sum(log_sum**2 * seen[None, None, :])

    with jax.numpy_dtype_promotion("standard"):
        given = arrays(OPERAND, OPERAND, OPERAND)
        found = compiled_gradients(fuse(function, implementation=implementation), given)
        assert_alike(found, expected_results(function, given), 1e-4)
        assert trace(function, given, {}).log_sums


def test_log_sum_exp_with_a_partly_stopped_shift_is_not_rewritten():
    """The function's derivative is not that of a log-sum-exp."""

    def function(query, key, value):
        found = scores(query, key)
        largest = found.max(-1, keepdims=True)
        log_sum = jnp.log(jnp.exp(found - jax.lax.stop_gradient(largest)).sum(-1)) + largest[..., 0]
        return joined(times(jax.nn.softmax(found), value), log_sum)

    given = arrays(OPERAND, OPERAND, OPERAND)
    assert not trace(function, given, {}).log_sums
    assert_fused(function, given)


@pytest.mark.parametrize("keys", [1, 2])
def test_log_sum_exp_with_a_stopped_shift_and_few_keys_matches_the_reference(keys):
    """With one key, a value per row has as many elements as the scores."""

    def function(query, key, value):
        found = scores(query, key)
        largest = jax.lax.stop_gradient(found.max(-1, keepdims=True))
        log_sum = largest + jnp.log(jnp.exp(found - largest).sum(-1, keepdims=True))
        return joined(times(jax.nn.softmax(found), value), log_sum[..., 0])

    few = (BATCH, keys, HEADS, WIDTH)
    assert_fused(function, arrays(OPERAND, few, few))


def test_log_sum_exp_of_other_scores_is_not_rewritten():
    """The softmax has a mask that the log-sum-exp does not have."""

    def function(query, key, value):
        return joined(times(jax.nn.softmax(causal(query, key)), value), jax.nn.logsumexp(scores(query, key), -1))

    given = arrays(OPERAND, OPERAND, OPERAND)
    assert not trace(function, given, {}).log_sums
    assert_fused(function, given)


def test_log_sum_exp_that_values_depend_on_is_not_rewritten():
    """A kernel cannot return a value that its own operands need, so the log-sum-exp is computed as written."""

    def function(query, key, value):
        found = scores(query, key)
        scale = jax.nn.logsumexp(found, -1).transpose(0, 2, 1)[..., None]
        return times(jax.nn.softmax(found), value * scale)

    given = arrays(OPERAND, OPERAND, OPERAND)
    assert not trace(function, given, {}).log_sums
    assert_fused(function, given)


def test_joint_kernel_is_not_launched_when_the_log_sum_exp_has_a_gradient():
    """The joint kernel computes delta itself, without the cotangent of the log-sum-exp."""
    region = RESIDENT["evoformer"].region()
    rows = jax.ShapeDtypeStruct(tuple(region.sizes[x] for x in (*region.batch, "q")), "float32")
    leaves = [jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in region.leaves]
    value = jax.ShapeDtypeStruct(region.value.shape, region.value.dtype)
    found = {}
    for more in ((), (rows,)):
        given = (leaves, value, value, rows, value, *more)
        specs: dict = {}
        collect_specs(
            jax.make_jaxpr(lambda *given: triton_fused.backward(region, *given))(*given).jaxpr,
            specs,
            Target.for_arch(90),
        )
        found[len(more)] = [spec.name for spec in specs]
    assert found == {
        0: ["fused_rows_and_pairs_resident", "fused_columns"],
        1: ["fused_rows", "fused_columns", "fused_pairs"],
    }


def test_explain_of_a_program_that_prints_finds_its_region():
    """An explanation ignores equations without results."""

    def function(query, key, value):
        jax.debug.print("{}", query[0, 0, 0, 0])
        return returned(query, key, value)

    assert len(explain(function)(*arrays(OPERAND, OPERAND, OPERAND)).regions) == 1
