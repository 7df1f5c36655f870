"""Paged attention under JAX's transformations: batching, sharding, export and errors of differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import blockdiag.ops.paged.api
from blockdiag import paged_attention
from blockdiag.ops.paged import xla as xla_paged
from blockdiag.ops.paged.splits import choose_splits
from tests.ops.block_diagonal.test_transformations import assert_close, cpu_mesh, explicit_mesh, loop, random_arrays
from tests.ops.paged_support import simple_arguments
from tests.support import compiled_quickly

attend = functools.partial(paged_attention, return_residual=True)

# --- vmap ---------------------------------------------------------------------------------------------------------

EVERYTHING = (*simple_arguments(), "sinks", "key_scale", "value_scale", "query_lengths")


def attend_to_everything(*arrays):
    return attend(**dict(zip(EVERYTHING, arrays, strict=True)))


def attend_to_latents(*arrays):
    arguments = dict(zip(LATENT, arrays, strict=True))
    return attend(**(dict.fromkeys(EVERYTHING) | arguments), value_dim=5)


def attend_without_a_table(*arrays):
    return attend(**(dict.fromkeys(EVERYTHING) | dict(zip(WITHOUT_A_TABLE, arrays, strict=True))))


LATENT = tuple(name for name in EVERYTHING if name not in ("value_pages", "value_scale"))
WITHOUT_A_TABLE = tuple(name for name in EVERYTHING if name != "page_table")

# Each call is compiled once for all ways to map it.
compiled_once = functools.cache(compiled_quickly)


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (attend_to_everything, dict(query=0)),
        (attend_to_everything, dict(query=0, page_table=0, kv_lengths=0)),
        (attend_to_everything, dict(query=1, key_pages=0, value_pages=2, page_table=0, kv_lengths=0)),
        (attend_to_everything, dict(value_pages=0)),
        (attend_to_everything, dict(key_scale=0)),
        (attend_to_everything, dict(sinks=0, query=0)),
        (attend_to_everything, dict(query_lengths=0, value_scale=1)),
        (attend_to_latents, dict(query=0, kv_lengths=0)),
        (attend_to_latents, dict(key_pages=1, key_scale=0)),
        (attend_without_a_table, dict(kv_lengths=0)),
        (attend_without_a_table, dict(query=1, key_pages=0, value_pages=2, kv_lengths=0)),
        (attend_without_a_table, dict(sinks=0, key_pages=1)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value.__name__,
)
def test_vmap_matches_a_loop(function, axes):
    size, arguments, generator = 3, simple_arguments(tokens=2), np.random.default_rng(1)
    arguments |= dict(
        sinks=jnp.asarray(generator.normal(size=4).astype(np.float32)),
        key_scale=jnp.asarray(generator.uniform(0.5, 2, (7, 4, 2)).astype(np.float32)),
        value_scale=jnp.asarray([[1.0, 2.0], [3.0, 4.0]]),
        query_lengths=jnp.asarray([2, 1], jnp.int32),
    )
    names = LATENT if function is attend_to_latents else EVERYTHING
    if function is attend_without_a_table:
        names = WITHOUT_A_TABLE
        arguments |= {name: arguments[name][:2] for name in ("key_pages", "value_pages", "key_scale")}
        arguments["kv_lengths"] = jnp.minimum(arguments["kv_lengths"], 4)
    ranges = dict(page_table=7, kv_lengths=5, query_lengths=3)
    for name, axis in axes.items():
        shape = list(arguments[name].shape)
        shape.insert(axis, size)
        values = generator.integers(0, ranges[name], shape) if name in ranges else generator.uniform(0.5, 2, shape)
        arguments[name] = jnp.asarray(values.astype(arguments[name].dtype))
    in_axes, arrays = tuple(axes.get(name) for name in names), [arguments[name] for name in names]
    expected = loop(compiled_once(function), in_axes, *arrays)
    assert_close(compiled_quickly(jax.vmap(function, in_axes))(*arrays), expected)


def test_vmap_over_pages_and_scales_of_integers_matches_a_loop():
    arguments, generator = simple_arguments(tokens=2), np.random.default_rng(2)
    pages = [jnp.asarray(generator.integers(-128, 128, (3, 7, 4, 2, 8)), jnp.int8) for _ in range(2)]
    scales = jnp.asarray(generator.uniform(0.01, 0.05, (3, 7, 4, 2)), jnp.float32)

    def call(key_pages, value_pages, key_scale):
        pages = dict(key_pages=key_pages, value_pages=value_pages, key_scale=key_scale, value_scale=0.02)
        return attend(**(arguments | pages))

    in_axes = (0, None, 0)
    operands = pages[0], pages[1][0], scales
    assert_close(compiled_quickly(jax.vmap(call, in_axes))(*operands), loop(call, in_axes, *operands))


def test_vmap_clips_page_numbers_within_an_element():
    """A page number beyond the pool is clipped to it, not into the next element's pages."""
    arguments = simple_arguments()
    pages = {
        name: jnp.stack([arguments[name], jnp.full_like(arguments[name], jnp.nan)])
        for name in ("key_pages", "value_pages")
    }

    def call(key_pages, value_pages, page_table):
        return attend(**(arguments | dict(key_pages=key_pages, value_pages=value_pages, page_table=page_table)))

    wild = jnp.full((2, 3), 9, jnp.int32)
    output, _ = compiled_quickly(jax.vmap(call, (0, 0, None)))(*pages.values(), wild)
    assert_close(output[0], compiled_quickly(call)(arguments["key_pages"], arguments["value_pages"], wild // 9 * 6)[0])
    assert np.isnan(output[1]).all()


def test_nested_vmap_matches_a_loop():
    arguments = simple_arguments(tokens=2)
    queries = random_arrays((3, 2, *arguments["query"].shape))[0]
    lengths = jnp.asarray([[1, 12], [5, 0]], jnp.int32)

    def call(query, kv_lengths):
        return attend(**(arguments | dict(query=query, kv_lengths=kv_lengths)))

    actual = compiled_quickly(jax.vmap(jax.vmap(call, (0, 0)), (0, None)))(queries, lengths)
    one = compiled_quickly(call)
    assert_close(actual, loop(functools.partial(loop, one, (0, 0)), (0, None), queries, lengths))


def test_vmap_chooses_splits_for_the_folded_call(monkeypatch):
    seen = []

    def call_implementation(method, problem, names, *operands):
        seen.append((problem.batch, problem.num_splits))
        return xla_paged.forward(problem, *operands)

    monkeypatch.setattr(blockdiag.ops.paged.api, "call_implementation", call_implementation)
    arguments = simple_arguments() | {"page_table": jnp.zeros((2, 512), jnp.int32)}
    queries = jnp.zeros((400, 2, 1, 4, 8))

    def call(query, **options):
        # A unique scale makes a call that has not been traced before.
        return attend(**(arguments | {"query": query}), scale=0.123, **options)

    jax.eval_shape(jax.vmap(call), queries)
    shapes = dict(query_tokens=1, group_size=2, key_heads=2, max_keys=2048)
    one, folded = choose_splits(batch=2, **shapes), choose_splits(batch=800, **shapes)
    assert seen[-1] == (800, folded) and folded < one
    jax.eval_shape(jax.vmap(functools.partial(call, num_splits=5)), queries)
    assert seen[-1] == (800, 5)


# --- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *((name, "grad") for name in ("query", "key_pages", "value_pages", "sinks", "key_scale")),
        *(("query", transform) for transform in ("jit of grad of vmap", "jvp", "grad of checkpoint")),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_differentiation_raises_type_error_with_a_remedy(name, transform, implementation):
    arguments = simple_arguments() | dict(sinks=jnp.zeros(4), key_scale=jnp.ones((2, 2)))

    def call(x):
        return paged_attention(**(arguments | {name: x}), implementation=implementation)

    transforms = {
        "grad": jax.grad(lambda x: call(x).sum()),
        "jit of grad of vmap": jax.jit(jax.grad(lambda x: jax.vmap(call)(x[None]).sum())),
        "jvp": lambda x: jax.jvp(call, (x,), (x,)),
        "grad of checkpoint": jax.grad(lambda x: jax.checkpoint(call)(x).sum()),
    }
    with pytest.raises(
        TypeError, match=r"paged_attention is for inference .* cannot be differentiated; .*moba_attention"
    ):
        transforms[transform](arguments[name])


def test_stopped_gradients_beside_paged_attention_are_allowed():
    arguments = simple_arguments()

    def loss(weight):
        return (weight * paged_attention(**arguments)).sum() + paged_attention(
            **(arguments | {"query": jax.lax.stop_gradient(weight * arguments["query"])})
        ).sum()

    assert_close(jax.grad(loss)(2.0), paged_attention(**arguments).sum())


# --- several devices, export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "reference", "triton"])
@pytest.mark.division("batch", operation="paged", kind="manual")
def test_shard_map_with_replicated_pages_matches_one_device(implementation):
    """Sequences on several devices read replicated pages."""
    arguments = simple_arguments(batch=4)
    names = tuple(arguments)
    specs = tuple(P() if "pages" in name else P("x") for name in names)

    def call(*arrays):
        return attend(**dict(zip(names, arrays, strict=True)), implementation=implementation)

    sharded = jax.shard_map(call, mesh=cpu_mesh(), in_specs=specs, out_specs=P("x"))
    assert_close(compiled_quickly(sharded)(*arguments.values()), compiled_quickly(call)(*arguments.values()))


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        ("paged", P("x")),
        ("paged", P("x", None, "y")),
        ("paged", P()),
        ("contiguous", P(None, None, "y")),
        ("contiguous", P("x", None, "y")),
    ],
)
def test_explicit_shardings_match_one_device(form, spec):
    """Each device computes its batch rows and heads, and reads its heads of the pages."""
    arguments = simple_arguments(batch=4, pages=4)
    if form == "contiguous":
        arguments |= dict(page_table=None, kv_lengths=jnp.asarray([4, 2, 0, 1], jnp.int32))
    arguments["query_lengths"] = jnp.asarray([1, 0, 1, 1], jnp.int32)
    arguments |= dict(sinks=jnp.arange(4.0), key_scale=jnp.full((4, 4, 2), 0.5))
    arguments["value_scale"] = jnp.arange(1.0, 9.0).reshape(4, 2)
    expected = compiled_once(attend)(**arguments)
    with jax.set_mesh(explicit_mesh()):
        arguments["query"] = jax.device_put(arguments["query"], spec)
        heads = (*spec, None, None, None)[2]
        rows = (*spec, None)[0] if form == "contiguous" else None
        arguments["key_pages"] = jax.device_put(arguments["key_pages"], P(rows, None, heads))
        actual = compiled_once(attend)(**arguments)
    assert jax.typeof(actual[0]).sharding.spec == jax.typeof(arguments["query"]).sharding.spec
    assert_close(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected))


def test_query_heads_of_a_latent_cache_are_sharded_over_devices_that_share_it():
    arguments = simple_arguments(batch=4)
    arguments |= dict(key_pages=arguments["key_pages"][:, :, :1], value_pages=None, value_dim=5)
    latents = functools.partial(attend, value_dim=arguments.pop("value_dim"))
    expected = latents(**arguments)
    with jax.set_mesh(explicit_mesh()):
        arguments["query"] = jax.device_put(arguments["query"], P(None, None, "x"))
        actual = jax.jit(latents)(**arguments)
    assert jax.typeof(actual[0]).sharding.spec[2] == "x"
    assert_close(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected))


def test_explicit_shardings_of_packed_queries_match_and_of_pools_raise_value_error():
    arguments = simple_arguments(batch=4, pages=4)
    query = arguments.pop("query")[:, 0]
    packed = arguments | {"query_offsets": jnp.asarray([0, 1, 2, 3, 4], jnp.int32)}
    expected = attend(query, **packed)
    with jax.set_mesh(explicit_mesh()):
        query = jax.device_put(query, P(None, "x"))
        assert_close(np.asarray(attend(query, **packed)[0]), np.asarray(expected[0]))
        packed["key_pages"] = jax.device_put(packed["key_pages"], P("x"))
        with pytest.raises(ValueError, match=r"`key_pages` must be sharded as `query` is, .* use jax.sharding.reshard"):
            attend(query, **packed)
        with pytest.raises(ValueError, match="`query` must be sharded over batch rows and heads only"):
            attend(jax.device_put(query, P("x")), **packed)


def test_export_round_trips():
    arguments = simple_arguments()
    compute = jax.jit(attend)
    exported = jax.export.export(compute, platforms=["cpu"])(**arguments)
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(**arguments), compute(**arguments))
