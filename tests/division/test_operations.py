"""Every operation on arrays sharded over automatic and explicit meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import explain, fuse, moba_attention, moba_routing
from blockdiag.common.meshes import spec_on
from tests.division.division_support import (
    KINDS,
    assert_divides,
    batch_specs,
    both,
    count_collectives,
    gradients_of,
    head_specs,
    make_mesh,
    results_of,
    shard,
)
from tests.ops.op_calls import CALLS

ALL = ("data", "model")
BATCHED = (
    "block_diagonal", "block_diagonal, long blocks", "block_diagonal, rotary", "moba", "moba, key mask",
    "moba, not causal", "moba_routing", "fuse", "fuse, causal",
)  # fmt: skip
WITH_HEADS = (*BATCHED, "block_diagonal, offsets", "block_diagonal, lengths", "moba, offsets")
# Sums over shards: gradients of operands that the shards share.
SUMS = {("fuse, causal", "batch"): {"all-reduce": 1}, ("fuse, causal", "both"): {"all-reduce": 1}}
# Another test shards batch and heads together on every mesh. Here its calls alternate between meshes.
ALONE = [
    pytest.param(name, kind, marks=[pytest.mark.exhaustive] if name in BATCHED and (i + j) % 2 else [])
    for i, name in enumerate(WITH_HEADS)
    for j, kind in enumerate(KINDS)
]


def computed(call):
    """Return the gradients of a call if it has any, else its results, by the implementation for a CPU."""
    return gradients_of(call, None) if call.differentiated else results_of(call, None)


@pytest.mark.parametrize(("name", "kind"), [case for case in ALONE if case.values[0] in BATCHED])
@pytest.mark.division("batch", "gradients")
def test_operation_with_sharded_batch_matches_one_device(name, kind):
    call = CALLS[name]
    assert_divides(computed(call), call.arrays(4), batch_specs(call, ALL), kind)


@pytest.mark.parametrize(("name", "kind"), ALONE)
@pytest.mark.division("heads", "gradients")
def test_operation_with_sharded_heads_matches_one_device(name, kind):
    call = CALLS[name]
    assert_divides(computed(call), call.arrays(2), head_specs(call, "model"), kind)


@pytest.mark.versions
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.division("batch", "heads", "gradients")
def test_operation_with_sharded_batch_and_heads_matches_one_device(name, kind):
    call = CALLS[name]
    specs = both(batch_specs(call, "data"), head_specs(call, "model"))
    assert_divides(computed(call), call.arrays(2), specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["block_diagonal", "block_diagonal, long blocks", "moba", "moba, offsets"])
@pytest.mark.division("fewer key heads", "gradients")
def test_operation_on_more_devices_than_key_heads_shards_query_heads(name, kind):
    """Gradients of keys and values are summed over the devices that share a key head, and are then on all devices."""
    call = CALLS[name]
    specs = head_specs(call, ALL, ("query",))
    assert_divides(computed(call), call.arrays(2), specs, kind, {"all-reduce": 1})


@pytest.mark.parametrize("name", ["block_diagonal", "moba", "moba_routing"])
def test_reference_on_an_explicit_mesh_is_partitioned(name):
    """XLA partitions the reference on an automatic mesh, as it does all array code."""
    call = CALLS[name]
    function = call.gradients("reference") if call.differentiated else call.bound("reference")
    specs = both(batch_specs(call, "data"), head_specs(call, "model"))
    assert_divides(function, call.arrays(2), specs, "explicit")


@pytest.mark.parametrize("kind", KINDS)
def test_moba_with_a_given_routing_is_partitioned(kind):
    call = CALLS["moba"]
    arrays = call.arrays(2)
    chosen = moba_routing(arrays["query"], arrays["key"], block_size=16, top_k=2)

    def gradients(indices, **given):
        routing = dataclasses.replace(chosen, indices=indices)
        loss = lambda given: (moba_attention(**given, block_size=16, top_k=2, routing=routing) ** 2).sum()  # noqa: E731
        return jax.grad(loss)(given)

    specs = both(batch_specs(call, "data"), head_specs(call, "model"))
    assert_divides(gradients, arrays | {"indices": chosen.indices}, specs | {"indices": specs["query"]}, kind)


TRANSFORMED = {
    "checkpoint": (jax.checkpoint, ("data", None, "model"), ()),
    "scan": (lambda f: lambda x, *more: jax.lax.scan(lambda c, _: (f(c, *more), None), x, None, length=2)[0],
             ("data", None, "model"), ()),
    "vmap over the sharded axis": (jax.vmap, (ALL,), (1,)),
    "vmap within sharded rows": (jax.vmap, (None, "data", None, "model"), (0,)),
    "vmap of queries alone": (lambda f: jax.vmap(f, (0, None, None)), (None, "data", None, "model"), ()),
}  # fmt: skip


# Some cases test the same operation, kind of change and mesh: both block-diagonal calls are one operation, and three
# changes use vmap. Half of these cases are left to exhaustive runs.
SHOWN = ("block_diagonal", "block_diagonal, long blocks", "moba", "fuse")
TRANSFORMED_CASES = [
    pytest.param(
        name,
        change,
        kind,
        marks=[pytest.mark.exhaustive]
        if (i + j + k) % 2 and (name.startswith("block_diagonal") or change.startswith("vmap"))
        else [],
    )
    for i, name in enumerate(SHOWN)
    for j, change in enumerate(TRANSFORMED)
    for k, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "change", "kind"), TRANSFORMED_CASES)
@pytest.mark.division("{change}")
def test_transformed_operation_is_partitioned(name, change, kind):
    call, (transform, spec, stacked) = CALLS[name], TRANSFORMED[change]
    arrays = {name: x for name, x in call.arrays(4).items()}
    specs = dict.fromkeys(arrays, P(*spec))
    if stacked:
        arrays = {
            name: jnp.stack([x, 2 * x, x + 1, -x], stacked[0] if stacked[0] == 0 else 1) for name, x in arrays.items()
        }
    elif len(spec) == 4:
        arrays["query"] = jnp.stack([arrays["query"], 2 * arrays["query"]])
        specs |= {name: P(*spec[1:]) for name in ("key", "value")}

    def first(results):
        return results[0] if isinstance(results, tuple) else results

    def gradients(query, key, value):
        compute = transform(lambda *x: first(call.bound(None)(**dict(zip(("query", "key", "value"), x, strict=True)))))
        return jax.grad(lambda *x: (compute(*x) ** 2).sum(), (0, 1, 2))(query, key, value)

    assert_divides(gradients, arrays, specs, kind)


@pytest.mark.division("export", kind="explicit")
@pytest.mark.parametrize("name", ["block_diagonal", "moba", "fuse", "paged"])
def test_export_on_an_explicit_mesh_round_trips(name):
    call, mesh = CALLS[name], make_mesh("explicit")
    specs = both(batch_specs(call, "data", ("key_pages", "value_pages")), head_specs(call, "model"))
    arrays = call.arrays(2)
    with jax.set_mesh(mesh):
        placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in arrays.items()}
        exported = jax.export.export(jax.jit(call.bound(None)))(**placed)
        found = jax.jit(jax.export.deserialize(exported.serialize()).call)(**placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(call.bound(None)(**arrays)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_export_on_an_automatic_mesh_round_trips_under_explicit_axes():
    call, mesh, spec = CALLS["block_diagonal"], make_mesh("automatic"), P("data", None, "model")
    arrays = {name: call.arrays(2)[name] for name in ("query", "key", "value")}
    attend = lambda *x: call.bound(None)(**dict(zip(arrays, x, strict=True)))  # noqa: E731

    def gradients(attend):
        return jax.jit(lambda *x: jax.grad(lambda *x: (attend(2 * x[0], *x[1:]) ** 2).sum(), (0, 1, 2))(*x))

    placed = [shard(mesh, x, spec) for x in arrays.values()]
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks is not yet implemented"):
        jax.export.export(gradients(attend))(*placed)
    with jax.set_mesh(mesh):
        divided = jax.sharding.explicit_axes(attend, axes=("data", "model"), in_sharding=(spec,) * 3)
        exported = jax.export.export(gradients(divided))(*placed)
    program = jax.jit(jax.export.deserialize(exported.serialize()).call)
    for one, other in zip(program(*placed), gradients(attend)(*arrays.values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert not count_collectives(program.lower(*placed).compile().as_text())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("block_diagonal", "moba") for kind in KINDS),
        ("block_diagonal, offsets", "automatic"),
        ("fuse", "automatic"),
    ],
)
def test_tokens_that_are_sharded_are_gathered_with_a_warning(name, kind):
    call = CALLS[name]
    arrays = call.arrays(2)
    specs = {name: P(*[None] * (arrays[name].ndim - 3), "data") for name in ("query", "key", "value")}
    with pytest.warns(UserWarning, match=r"every device needs all of it: it is gathered"):
        assert_divides(call.bound(None), arrays, specs, kind, {"all-gather": 3})


def test_queries_of_a_fused_region_on_an_explicit_mesh_are_gathered_with_a_warning():
    call = CALLS["fuse"]
    with pytest.warns(UserWarning, match=r"`fuse`: axis `q` of an operand is sharded over data"):
        assert_divides(call.bound(None), call.arrays(2), {"query": P(None, "data")}, "explicit", {"all-gather": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_fuse_dropout_of_shards_matches_one_device(kind):
    """The random bits are resharded like the weights on an explicit mesh, and no array of bits is in memory."""
    arrays = CALLS["fuse"].arrays(2)

    def dropped(query, key, value, rng):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        keep = jax.random.bernoulli(rng, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights, 0.0), value)

    def gradients(query, key, value, rng):
        return jax.grad(lambda *x: (fuse(dropped)(*x, rng) ** 2).sum(), (0, 1, 2))(query, key, value)

    specs = dict.fromkeys(arrays, P("data", None, "model"))
    assert_divides(gradients, arrays | {"rng": jax.random.key(0)}, specs, kind)
    mesh = make_mesh(kind)
    placed = [shard(mesh, x, specs[name]) for name, x in arrays.items()]
    with jax.set_mesh(mesh):
        (region,) = explain(dropped)(*placed, jax.random.key(0)).regions
    assert "score" not in {leaf.role for leaf in region.leaves}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((2, 2), P("data", None, "model")),
        ((2, 2), P(("data", "model"), None, None)),
        ((2, 2), P(None, ("model", "data"), None)),
        ((1, 4), P(None, None, "model")),
        ((2, 2), P(None, None, None)),
    ],
)
def test_spec_on_recovers_the_spec_of_a_sharding(shape, spec):
    mesh = make_mesh("automatic", shape)
    assert spec_on(mesh, NamedSharding(mesh, spec), 3) == spec


@pytest.mark.parametrize("name", ["block_diagonal", "block_diagonal, long blocks", "moba"])
def test_keys_computed_in_the_program_on_more_devices_than_key_heads_are_partitioned(name):
    """XLA chooses the sharding of the keys. It must not split a mesh axis, which JAX cannot express."""
    call = CALLS[name]

    def gradients(query, key, value):
        compute = call.gradients(None)
        return compute(query=query, key=2 * key, value=3 * value)

    specs = head_specs(call, "model", ("query",))
    assert_divides(gradients, call.arrays(2), specs, "automatic", {"all-reduce": 1}, shape=(1, 4))
