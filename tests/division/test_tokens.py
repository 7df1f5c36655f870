"""Key convolution, the fused projection and merged states on arrays sharded over a mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import Rotary, fused_qkv_block_attention, key_convolution, merge_attention_states
from tests.division.division_support import (
    KINDS,
    assert_divides,
    count_collectives,
    gradients_of,
    make_mesh,
    results_of,
    shard,
)
from tests.ops.op_calls import CALLS

ALL = ("data", "model")
# The interpreter of kernels cannot run where XLA partitions a call.
IMPLEMENTED = (("automatic", None), ("explicit", None), ("explicit", "triton"))
SUM = {"all-reduce": 1}

# Specs of key and weights, and the collectives of gradients. The only sum is that of the weight gradient, if the
# sequences are on several devices.
CONVOLVED = {
    "batch": (P("data"), P(), SUM),
    "batch over all devices": (P(ALL), P(), SUM),
    "heads": (P(None, None, "model"), P(None, "model"), {}),
    "heads of keys alone": (P(None, None, "model"), P(), {}),
    "elements of heads": (P(None, None, None, ALL), P(None, None, ALL), {}),
    "batch and heads": (P("data", None, "model"), P(None, "model"), SUM),
    "heads and elements": (P(None, None, "data", "model"), P(None, "data", "model"), {}),
}


@pytest.mark.parametrize(("kind", "implementation"), IMPLEMENTED)
@pytest.mark.parametrize("case", CONVOLVED)
@pytest.mark.division("{case}", "gradients", "checkpoint", operation="key_convolution")
def test_key_convolution_is_partitioned(case, kind, implementation):
    call, (key, weights, sums) = CALLS["key_convolution"], CONVOLVED[case]
    specs = {"key": key, "weights": weights}
    if case == "heads of keys alone" and kind == "explicit":
        sums = {"all-gather": 1}  # the weight gradient is on all devices, like the weights
    assert_divides(results_of(call, implementation), call.arrays(4), specs, kind)
    assert_divides(gradients_of(call, implementation), call.arrays(4), specs, kind, sums)
    assert_divides(gradients_of(call, implementation, is_checkpointed=True), call.arrays(4), specs, kind, sums)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_key_convolution_is_partitioned_by_heads(kind):
    call = CALLS["key_convolution, offsets"]
    specs = {"key": P(None, "data", "model"), "weights": P(None, "data", "model")}
    assert_divides(gradients_of(call, None), call.arrays(4), specs, kind)


@pytest.mark.parametrize("name", ["key_convolution", "key_convolution, offsets"])
def test_key_convolution_reference_on_an_explicit_mesh_is_partitioned(name):
    call = CALLS[name]
    heads = {"key": P(None, "data", "model"), "weights": P(None, "data", "model")}
    specs = heads if "offsets" in name else {"key": P("data", None, "model"), "weights": P(None, "model")}
    sums = {} if "offsets" in name else SUM
    assert_divides(gradients_of(call, "reference"), call.arrays(4), specs, "explicit", sums)


@pytest.mark.parametrize("kind", KINDS)
def test_key_convolution_second_derivative_is_partitioned(kind):
    call = CALLS["key_convolution"]
    gradients = call.gradients(None)

    def penalty(key, weights):
        d_key, d_weights = gradients(key=key, weights=weights).values()
        return (d_key**2).sum() + (d_weights**2).sum()

    def second(key, weights):
        return jax.grad(penalty, (0, 1))(key, weights)

    specs = {"key": P("data", None, "model"), "weights": P(None, "model")}
    # On an explicit mesh JAX transposes the sum in the weight gradient into another sum.
    assert_divides(second, call.arrays(4), specs, kind, {"all-reduce": 2 if kind == "automatic" else 3})


@pytest.mark.parametrize("kind", KINDS)
def test_key_convolution_bfloat16_weight_gradient_is_summed_before_rounding(kind):
    arrays = {name: x.astype(jnp.bfloat16) for name, x in CALLS["key_convolution"].arrays(4).items()}

    def gradient(key, weights):
        return jax.grad(lambda w: (key_convolution(key, w).astype(jnp.float32) ** 2).sum())(weights)

    found = assert_divides(gradient, arrays, {"key": P(ALL)}, kind, SUM, atol=0)
    assert found.dtype == jnp.bfloat16


STACKED = {
    "mapped axis": (P(None, ALL), P(ALL), {}),
    "mapped axis of keys alone": (P(None, ALL), P(), SUM),
    "batch": (P("data"), P(), SUM),
    "batch and heads": (P("data", None, None, "model"), P(None, None, "model"), SUM),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", STACKED)
@pytest.mark.division("vmap", operation="key_convolution")
def test_vmapped_key_convolution_is_partitioned(case, kind):
    """Keys are mapped over their second axis. Weights are mapped over their first axis or not at all."""
    call, (key, weights, sums) = CALLS["key_convolution"], STACKED[case]
    arrays = call.arrays(4)
    arrays["key"] = jnp.stack([arrays["key"], 2 * arrays["key"], arrays["key"] + 1, -arrays["key"]], 1)
    is_alone = case == "mapped axis of keys alone"
    if not is_alone:
        arrays["weights"] = jnp.stack([arrays["weights"], 2 * arrays["weights"], -arrays["weights"], arrays["weights"]])
    mapped = jax.vmap(key_convolution, (1, None if is_alone else 0))

    def gradients(key, weights):
        return jax.grad(lambda *x: (mapped(*x) ** 2).sum(), (0, 1))(key, weights)

    def mapped_gradients(key, weights):
        one = jax.grad(lambda *x: (key_convolution(*x) ** 2).sum(), (0, 1))
        return jax.vmap(one, (1, None if is_alone else 0))(key, weights)

    specs = {"key": key, "weights": weights}
    assert_divides(gradients, arrays, specs, kind, sums)
    # Each element has a separate gradient of shared weights here, on its own device.
    assert_divides(mapped_gradients, arrays, specs, kind, {} if is_alone else sums)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.division("scan", operation="key_convolution")
def test_scanned_key_convolution_is_partitioned(kind):
    call = CALLS["key_convolution"]

    def gradients(key, weights):
        def loss(key, weights):
            step = lambda carry, _: (key_convolution(carry, weights), None)  # noqa: E731
            return (jax.lax.scan(step, key, None, length=2)[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(key, weights)

    specs = {"key": P("data", None, "model"), "weights": P(None, "model")}
    assert_divides(gradients, call.arrays(4), specs, kind, SUM)


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_tokens_of_key_convolution_are_gathered_with_a_warning(kind):
    call = CALLS["key_convolution"]
    with pytest.warns(UserWarning, match=r"`key_convolution`: axis (1|`tokens`) of an operand is sharded over data"):
        assert_divides(call.bound(None), call.arrays(4), {"key": P(None, "data")}, kind, {"all-gather": 1})


def test_interpreter_on_an_automatic_mesh_raises_with_a_remedy():
    """The interpreter would crash the process."""
    call = CALLS["key_convolution"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="use implementation='xla' on CPUs, a mesh with explicit axes"):
        assert_divides(call.bound("triton"), call.arrays(4), {"key": P("data")}, "automatic")


@pytest.mark.parametrize(("kind", "implementation"), IMPLEMENTED)
@pytest.mark.parametrize("axes", ["data", ALL])
@pytest.mark.division("batch", "gradients", "checkpoint", operation="fused_qkv")
def test_fused_projection_with_sharded_batch_is_partitioned(axes, kind, implementation):
    call, specs = CALLS["fused_qkv"], {"x": P(axes)}
    assert_divides(results_of(call, implementation), call.arrays(4), specs, kind)
    assert_divides(gradients_of(call, implementation), call.arrays(4), specs, kind, SUM)
    assert_divides(gradients_of(call, implementation, is_checkpointed=True), call.arrays(4), specs, kind, SUM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_projection_with_bias_and_per_token_rotary_is_partitioned(is_causal, kind):
    arrays = CALLS["fused_qkv"].arrays(4)
    draw = np.random.default_rng(1)
    arrays["bias"] = jnp.asarray(draw.normal(size=arrays["weights"].shape[1]), jnp.float32)
    arrays["angle"] = jnp.asarray(draw.normal(size=(4, 40, 8)), jnp.float32)

    def gradients(x, weights, bias, angle):
        rotary = Rotary(jnp.cos(angle), jnp.sin(angle), per_token=True)
        sizes = dict(query_heads=4, key_heads=2, head_dim=16, block_size=16, rotary=rotary, is_causal=is_causal)
        loss = lambda *x: (fused_qkv_block_attention(*x, **sizes) ** 2).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(x, weights, bias)

    specs = {"x": P(ALL), "angle": P(ALL)}
    # XLA combines the sums of both gradients where it may.
    assert_divides(gradients, arrays, specs, kind, SUM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")])
def test_fused_projection_with_sharded_weights_matches_one_device(spec, kind):
    """Weights are sharded over the data axis (FSDP), the model axis (tensor parallelism) or both."""
    call, mesh = CALLS["fused_qkv"], make_mesh(kind)
    arrays = call.arrays(4)
    expected = call.gradients(None)(**arrays)
    specs = {"x": P("data"), "weights": spec}
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        found = jax.jit(call.gradients(None))(**{name: shard(mesh, x, specs[name]) for name, x in arrays.items()})
        if kind == "explicit":
            assert jax.typeof(found["weights"]).sharding.spec == P(*spec, *[None] * (2 - len(spec)))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-5 * np.abs(x).max())


def test_fused_projection_under_tensor_parallelism_shards_heads():
    """Each device has the query, key and value columns of its heads, in this order."""
    arrays = CALLS["fused_qkv"].arrays(4)
    kinds = np.split(np.arange(arrays["weights"].shape[1]), [4 * 16, 6 * 16])
    columns = np.concatenate([np.split(kind, 2)[device] for device in range(2) for kind in kinds])

    def gradients(project):
        return lambda x, weights: jax.grad(lambda *x: (project(*x) ** 2).sum(), (0, 1))(x, weights)

    def project(x, weights, count=1):
        sizes = dict(query_heads=4 // count, key_heads=2 // count, head_dim=16, block_size=16)
        return fused_qkv_block_attention(x, weights, **sizes)

    mesh, specs = make_mesh("automatic"), (P("data"), P(None, "model"))
    divided = jax.shard_map(
        functools.partial(project, count=2), mesh=mesh, in_specs=specs, out_specs=P("data", None, "model")
    )
    placed = [shard(mesh, x, spec) for x, spec in zip((arrays["x"], arrays["weights"][:, columns]), specs, strict=True)]
    compiled = jax.jit(gradients(divided)).lower(*placed).compile()
    x, weights = gradients(project)(**arrays)
    for one, other in zip(compiled(*placed), (x, weights[:, columns]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    # The gradient of `x` is summed over "model", and the weight gradient over "data".
    assert count_collectives(compiled.as_text()) == {"all-reduce": 2}


def test_packed_fused_projection_on_an_explicit_mesh_gathers_tokens_with_a_warning():
    call = CALLS["fused_qkv, offsets"]
    with pytest.warns(UserWarning, match="`fused_qkv_block_attention`: axis 0 of an operand is sharded over data"):
        assert_divides(call.bound(None), call.arrays(4), {"x": P("data")}, "explicit", {"all-gather": 1})


def test_fused_projection_reference_on_an_explicit_mesh_is_partitioned():
    call = CALLS["fused_qkv"]
    assert_divides(gradients_of(call, "reference"), call.arrays(4), {"x": P(ALL)}, "explicit", SUM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["vmap", "scan"])
@pytest.mark.division("{change}", operation="fused_qkv")
def test_transformed_fused_projection_is_partitioned(change, kind):
    call, project = CALLS["fused_qkv"], CALLS["fused_qkv"].bound(None)
    arrays = call.arrays(4)
    if change == "vmap":
        arrays["x"] = jnp.stack([arrays["x"], 2 * arrays["x"]])

    def compute(x, weights):
        if change == "vmap":
            return jax.vmap(project, (0, None))(x, weights)
        step = lambda x, _: (project(x, weights).reshape(*x.shape[:2], -1)[..., : x.shape[2]], None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=2)[0]

    def gradients(x, weights):
        return jax.grad(lambda *x: (compute(*x) ** 2).sum(), (0, 1))(x, weights)

    specs = {"x": P(*[None] * (change == "vmap"), "data")}
    assert_divides(gradients, arrays, specs, kind, SUM)


MERGED = {
    "batch": (P(None, "data"), P(None, "data")),
    "batch over all devices": (P(None, ALL), P(None, ALL)),
    "tokens": (P(None, None, None, "model"), P(None, None, None, "model")),
    "batch and heads": (P(None, "data", None, "model"), P(None, "data", None, "model")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MERGED)
@pytest.mark.division("{case}", "gradients", operation="merge")
def test_merged_states_are_partitioned(case, kind):
    call, (outputs, log_sums) = CALLS["merge"], MERGED[case]
    specs = {"outputs": outputs, "log_sums": log_sums}
    assert_divides(results_of(call, None), call.arrays(4), specs, kind)
    assert_divides(gradients_of(call, None), call.arrays(4), specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P(None, None, None, None, "model"), P(None, "data", None, None, "model")])
def test_merged_outputs_with_sharded_features_sum_the_log_sum_exp_gradient(spec, kind):
    """The gradient of a log-sum-exp is a sum over features."""
    call, specs = CALLS["merge"], {"outputs": spec, "log_sums": P(*spec[:-1])}
    assert_divides(results_of(call, None), call.arrays(4), specs, kind)
    assert_divides(gradients_of(call, None), call.arrays(4), specs, kind, SUM)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_states_given_as_lists_are_partitioned(kind):
    def merge(outputs, log_sums):
        return merge_attention_states(list(outputs), list(log_sums))

    arrays = CALLS["merge"].arrays(4)
    assert_divides(merge, arrays, {"outputs": P(None, "data"), "log_sums": P(None, "data")}, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_states_with_log_sum_exps_sharded_differently_are_exchanged(kind):
    specs = {"outputs": P(None, "data"), "log_sums": P(None, None, None, "data")}
    assert_divides(
        CALLS["merge"].bound(None),
        CALLS["merge"].arrays(4),
        specs,
        kind,
        {"all-to-all": 2 if kind == "automatic" else 1},
    )
