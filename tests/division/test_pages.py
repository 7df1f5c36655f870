"""Paged attention, MoBA over pages and appending to pages on arrays sharded over a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import Rotary, append_to_pages, paged_attention
from tests.division.division_support import (
    KINDS,
    assert_divides,
    batch_specs,
    both,
    count_collectives,
    head_specs,
    make_mesh,
    results_of,
    shard,
)
from tests.ops.op_calls import CALLS, HEADS, KEY_HEADS, WIDTH

ALL = ("data", "model")
POOLS = ("key_pages", "value_pages", "pages")
SHARED = ("paged", "paged, scales", "moba_paged")
ATTENTION = (*SHARED, "paged, contiguous")
EVERY = (*ATTENTION, "paged, packed", "append", "append, packed")


def whole_pools(name):
    """Return the names of the replicated page arrays: none if each page belongs to a sequence."""
    return () if "contiguous" in name else POOLS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.division("batch")
def test_paged_operation_with_sharded_batch_matches_one_device(name, implementation, kind):
    call = CALLS[name]
    specs = batch_specs(call, ALL, whole_pools(name))
    assert_divides(results_of(call, implementation), call.arrays(4), specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.division("heads")
def test_paged_operation_with_sharded_heads_matches_one_device(name, implementation, kind):
    call = CALLS[name]
    assert_divides(results_of(call, implementation), call.arrays(2), head_specs(call, "model"), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.division("batch", "heads")
def test_paged_operation_with_sharded_batch_and_heads_matches_one_device(name, implementation, kind):
    call = CALLS[name]
    specs = both(batch_specs(call, "data", whole_pools(name)), head_specs(call, "model"))
    assert_divides(results_of(call, implementation), call.arrays(2), specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_paged_operation_with_only_pages_sharded_is_partitioned_by_heads(name, kind):
    call = CALLS[name]
    found = assert_divides(results_of(call, None), call.arrays(2), head_specs(call, "model", POOLS), kind)
    # Results keep the sharding of the heads.
    axis = 2 if "packed" not in name or name.startswith("append") else 1
    assert found[0].sharding.spec[axis] == "model"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded_pools", [False, True])
@pytest.mark.parametrize("name", [*ATTENTION, "paged, packed"])
@pytest.mark.division("fewer key heads")
def test_paged_operation_on_more_devices_than_key_heads_shards_query_heads(name, sharded_pools, kind):
    call = CALLS[name]
    specs = head_specs(call, ALL, ("query",))
    specs |= head_specs(call, "data", POOLS) if sharded_pools else {}
    assert_divides(results_of(call, None), call.arrays(2), specs, kind)


def test_paged_attention_on_one_axis_longer_than_key_heads_has_no_collectives():
    call = CALLS["paged"]
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("model",))
    arrays, specs = call.arrays(2), head_specs(call, "model", ("query",))
    placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in arrays.items()}
    compiled = jax.jit(call.bound(None)).lower(**placed).compile()
    for one, other in zip(compiled(**placed), jax.jit(call.bound(None))(**arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert not count_collectives(compiled.as_text())


# --- every form ---------------------------------------------------------------------------------------------------


def everything_about(batch, is_contiguous):
    """Return every argument of paged attention except packed queries, and specs."""
    draw = np.random.default_rng(3)
    pages, size = (batch, 32) if is_contiguous else (2 * batch, 16)

    def floats(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    arrays = {
        "query": floats(batch, 3, HEADS, WIDTH),
        "key_pages": floats(pages, size, KEY_HEADS, WIDTH),
        "value_pages": floats(pages, size, KEY_HEADS, 24),
        "kv_lengths": jnp.asarray([20, 0, 32, 7], jnp.int32)[:batch],
        "query_lengths": jnp.asarray([3, 1, 2, 0], jnp.int32)[:batch],
        "sinks": floats(HEADS),
        "key_scale": jnp.exp(floats(pages, size, KEY_HEADS)),
        "value_scale": jnp.exp(floats(batch, KEY_HEADS)),
        "query_scale": jnp.exp(floats(batch, KEY_HEADS)),
    }
    table = {} if is_contiguous else {"page_table": jnp.arange(2 * batch, dtype=jnp.int32)[::-1].reshape(batch, 2)}
    rows = {"query": P("data", None, "model"), "kv_lengths": P("data"), "value_scale": P("data", "model")}
    pool = P("data" if is_contiguous else None, None, "model")
    specs = rows | dict.fromkeys(("key_pages", "value_pages", "key_scale"), pool) | {"sinks": P("model")}
    return arrays | table, specs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_paged_attention_with_every_option_is_partitioned(is_contiguous, kind):
    arrays, specs = everything_about(4, is_contiguous)

    def attend(page_table=None, **arrays):
        options = dict(logits_soft_cap=20.0, local_window_size=(12, None), return_residual=True)
        return paged_attention(page_table=page_table, **arrays, **options)

    assert_divides(attend, arrays, specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_paged_attention_to_integers_is_partitioned(is_contiguous, kind):
    arrays, specs = everything_about(4, is_contiguous)
    arrays |= {name: jnp.round(arrays[name] * 40).astype(jnp.int8) for name in ("key_pages", "value_pages")}

    def attend(page_table=None, **arrays):
        return paged_attention(page_table=page_table, **arrays, scale=0.01, return_residual=True)

    assert_divides(attend, arrays, specs, kind)


def appended(batch, form):
    """Return arguments that append to a contiguous cache or to pages of a table, and specs."""
    draw = np.random.default_rng(4)
    is_contiguous = "contiguous" in form
    pages, size = (batch, 32) if is_contiguous else (2 * batch, 16)

    def floats(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    tokens = (3 * batch,) if "packed" in form else (batch, 3)
    arrays = {
        "key": floats(*tokens, KEY_HEADS, WIDTH),
        "value": floats(*tokens, KEY_HEADS, 24),
        "key_pages": floats(pages, size, KEY_HEADS, WIDTH).astype("int8" if "int8" in form else "float8_e4m3fn"),
        "value_pages": floats(pages, size, KEY_HEADS, 24),
        "kv_lengths": jnp.asarray([18, 3, 32, 9], jnp.int32)[:batch],
        "key_scale": jnp.exp(floats(pages, size, KEY_HEADS)),
        "key_centroids": floats(batch, 2, KEY_HEADS, WIDTH),
        "cos": floats(*tokens, WIDTH // 2),
        "sin": floats(*tokens, WIDTH // 2),
    }
    if "packed" in form:
        arrays["query_offsets"] = jnp.asarray([0, 3, 4, 6, 9, 11], jnp.int32)[: batch + 1]
    else:
        arrays["query_lengths"] = jnp.asarray([3, 1, 2, 0], jnp.int32)[:batch]
    if not is_contiguous:
        arrays["page_table"] = jnp.arange(2 * batch, dtype=jnp.int32)[::-1].reshape(batch, 2)
    rows = "data" if is_contiguous else None
    specs = dict.fromkeys(("key_pages", "value_pages", "key_scale", "key_centroids"), P(rows, None, "model"))
    new = P(None, "model") if "packed" in form else P(rows, None, "model")
    specs |= {"key": new, "value": new}
    for name in ("value", "value_pages") if "latent" in form else ():
        del arrays[name], specs[name]
    return arrays, specs


def append(cos=None, sin=None, **arrays):
    absent = dict.fromkeys(("page_table", "value", "value_pages"))
    return append_to_pages(**absent | arrays, rotary=Rotary(cos, sin, per_token=True), block_size=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "form",
    [
        "table",
        "contiguous",
        "table, packed",
        "contiguous, packed",
        "table, int8",
        "contiguous, packed, int8",
        "table, latent",
        "contiguous, packed, latent",
    ],
)
@pytest.mark.division("batch", "heads", operation="append")
def test_append_in_every_form_is_partitioned(form, kind):
    """With packed tokens, each device of a contiguous cache writes the tokens of its own sequences."""
    arrays, specs = appended(4, form)
    widened = lambda **arrays: jax.tree.map(lambda x: x.astype(jnp.float32), append(**arrays))  # noqa: E731
    assert_divides(widened, arrays, specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", ["data", ALL])
def test_packed_queries_of_a_sharded_contiguous_cache_are_summed_over_devices(axes, kind):
    """Rows of no sequence, of an empty one and of one that is too long match one device."""
    arrays, _ = everything_about(4, is_contiguous=True)
    arrays["query"] = arrays["query"].reshape(12, HEADS, WIDTH)
    del arrays["query_lengths"]
    arrays["query_offsets"] = jnp.asarray([0, 2, 5, 9, 11], jnp.int32)
    pages = dict.fromkeys((*POOLS[:2], "key_scale"), P(axes))

    def attend(**arrays):
        return paged_attention(page_table=None, max_query_length=3, return_residual=True, **arrays)

    output, log_sum = assert_divides(attend, arrays, pages, kind, {"all-reduce": 1})
    assert np.isnan(output[8]).all() and (output[11] == 0).all() and (log_sum[11] == -np.inf).all()


# --- pools stay where they are --------------------------------------------------------------------------------------


def gathered_shapes(program):
    return [tuple(map(int, x.split(","))) for x in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", program)]


def compiled_on_automatic_axes(function, arrays, specs, **options):
    mesh = make_mesh("automatic")
    placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in arrays.items()}
    return jax.jit(function, **options).lower(**placed).compile(), placed


@pytest.mark.parametrize(
    ("new", "pages"),
    [
        (P("data"), P(None, None, "model")),
        (P(ALL), P()),
        (P(None, None, "model"), P()),
        (P("data", None, "model"), P(None, None, "model")),
    ],
)
def test_append_gathers_new_tokens_and_never_pages(new, pages):
    arrays, _ = appended(4, "table")
    arrays |= {name: jnp.zeros((64, *arrays[name].shape[1:]), arrays[name].dtype) for name in POOLS[:2]}
    arrays["key_scale"] = jnp.ones((64, 16, KEY_HEADS))
    specs = dict.fromkeys(("key", "value"), new) | dict.fromkeys((*POOLS[:2], "key_scale"), pages)
    compiled, placed = compiled_on_automatic_axes(append, arrays, specs)
    assert set(count_collectives(compiled.as_text())) == {"all-gather"}
    most = arrays["value"].size
    assert all(np.prod(shape) <= most for shape in gathered_shapes(compiled.as_text()))
    results, expected = compiled(**placed), jax.jit(append)(**arrays)
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-5, atol=1e-5)
    for name, result in zip(POOLS[:2], results[:2], strict=True):
        assert result.sharding.is_equivalent_to(placed[name].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["table", "contiguous"])
def test_append_on_several_devices_writes_donated_pages_in_place(form, kind):
    arrays, specs = appended(4, form)
    arrays["key_pages"] = arrays["key_pages"].astype(jnp.float32)
    arrays["key_scale"] = jnp.ones((4, KEY_HEADS))
    del specs["key_scale"]
    written = ("key_pages", "value_pages", "key_centroids")
    mesh = make_mesh(kind)
    placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in arrays.items()}
    donated = {name: placed.pop(name) for name in written}
    function = jax.jit(lambda donated, others: append(**donated, **others), donate_argnums=0)
    with jax.set_mesh(mesh):
        compiled = function.lower(donated, placed).compile()
        places = {name: [x.data.unsafe_buffer_pointer() for x in donated[name].addressable_shards] for name in written}
        results = compiled(donated, placed)
    # Parameters are ordered by name.
    aliases = {int(x) for x in re.findall(r"\{\d\}: \((\d+), \{\}", compiled.as_text().split("\n")[0])}
    assert aliases == {0, 1, 2}
    for name, result in zip(written, results, strict=True):
        assert [x.data.unsafe_buffer_pointer() for x in result.addressable_shards] == places[name]
        assert donated[name].is_deleted()
    for one, other in zip(results, jax.jit(append)(**arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*SHARED, "append"])
def test_pages_that_are_sharded_along_the_pool_are_gathered_with_a_warning(name):
    call = CALLS[name]
    specs = {"pages" if name == "append" else "key_pages": P("data")}
    with pytest.warns(UserWarning, match=r"axis `pages` of an operand is sharded over .*: it is gathered"):
        assert_divides(call.bound(None), call.arrays(2), specs, "automatic", {"all-gather": 1})


@pytest.mark.parametrize("name", [*SHARED, "append"])
def test_pages_sharded_along_the_pool_of_an_explicit_mesh_raise_value_error(name):
    call = CALLS[name]
    mesh, pool = make_mesh("explicit"), "pages" if name == "append" else "key_pages"
    arrays = {x: shard(mesh, array, P("data") if x == pool else P()) for x, array in call.arrays(2).items()}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"`key_pages` must be sharded as `(query|key)` is"):
        call.bound(None)(**arrays)


def test_append_to_replicated_pages_with_sharded_heads_on_an_explicit_mesh_raises_value_error():
    call, mesh = CALLS["append"], make_mesh("explicit")
    specs = head_specs(call, "model", ("key", "value"))
    arrays = {name: shard(mesh, x, specs.get(name, P())) for name, x in call.arrays(2).items()}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="`key_pages` must be sharded as `key` is"):
        call.bound(None)(**arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_beside_a_larger_query_of_another_sharding_stay_in_place(kind):
    arrays, specs = everything_about(4, is_contiguous=False)
    arrays["query"] = jnp.tile(arrays["query"], (1, 20, 1, 1))
    assert arrays["query"].size > arrays["key_pages"].size
    pools = {name: specs[name] for name in ("key_pages", "value_pages", "key_scale")}

    mesh = make_mesh(kind)
    placed = {name: shard(mesh, x, (pools | {"query": P("model")}).get(name, P())) for name, x in arrays.items()}
    with jax.set_mesh(mesh):
        function = jax.jit(paged_attention, out_shardings=NamedSharding(mesh, P(None, None, "model")))
        compiled = function.lower(**placed).compile()
    np.testing.assert_allclose(compiled(**placed), jax.jit(paged_attention)(**arrays), rtol=1e-5, atol=1e-5)
    # Only the query is transferred.
    assert count_collectives(compiled.as_text()) == {"all-gather" if kind == "automatic" else "all-to-all": 1}


# --- transformations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_vmap_over_a_sharded_axis_is_partitioned(name, kind):
    """Each element has a separate cache."""
    call = CALLS[name]
    each = [call.arrays(2, seed) for seed in range(4)]
    arrays = {x: jnp.stack([one[x] for one in each]) for x in each[0]}
    function = call.bound(None)
    mapped = lambda **arrays: jax.vmap(lambda x: function(**x))(arrays)  # noqa: E731
    assert_divides(mapped, arrays, dict.fromkeys(arrays, P(ALL)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.division("vmap")
def test_vmap_of_a_paged_operation_with_sharded_batch_and_heads_is_partitioned(name, kind):
    """Queries or new keys are mapped over their last axis.

    All elements share one cache, except for the pages that they write.
    """
    call = CALLS[name]
    arrays = call.arrays(2)
    names = ("key", "value", "pages") if name.startswith("append") else ("query",)
    if name.startswith("append"):
        specs = head_specs(call, "model")
    else:
        specs = both(batch_specs(call, "data", whole_pools(name)), head_specs(call, "model"))
        specs = specs if "packed" not in name else head_specs(call, "model")
    arrays |= {x: jnp.stack([arrays[x], 2 * arrays[x], 1 - arrays[x]], -1) for x in names}

    def mapped(**arrays):
        others = {x: array for x, array in arrays.items() if x not in names}
        function = lambda *each: call.bound(None)(**dict(zip(names, each, strict=True)), **others)  # noqa: E731
        return jax.vmap(function, -1)(*(arrays[x] for x in names))

    assert_divides(mapped, arrays, specs, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.division("scan", operation="paged")
@pytest.mark.division("scan", operation="append")
def test_decoding_in_a_scan_is_partitioned(is_contiguous, kind):
    """Each step appends tokens and attends to all tokens, with the pages in the carry."""
    arrays, specs = everything_about(4, is_contiguous)
    heads = P("data", None, "model")
    arrays = {x: arrays[x] for x in ("query", "key_pages", "value_pages", "page_table") if x in arrays}
    arrays["value_pages"] = arrays["value_pages"][..., :WIDTH]
    arrays["lengths"] = jnp.asarray([20, 0, 25, 7], jnp.int32)

    def decode(query, key_pages, value_pages, lengths, page_table=None):
        def step(carry, _):
            query, pages, lengths = carry
            lengths = lengths + 3
            new = query.reshape(*query.shape[:2], KEY_HEADS, -1, WIDTH).sum(3)
            pages = append_to_pages(new, 2 * new, *pages, page_table, lengths)
            return (paged_attention(query, *pages, page_table, lengths), pages, lengths), None

        return jax.lax.scan(step, (query, (key_pages, value_pages), lengths), None, length=2)[0]

    rows = heads if is_contiguous else P(None, None, "model")
    specs = {x: specs[x] for x in ("key_pages", "value_pages")} | {"query": rows}
    assert_divides(decode, arrays, specs, kind)


@pytest.mark.parametrize("new", ["given", "made of queries"])
def test_decoding_in_a_scan_with_fewer_key_heads_than_devices_is_partitioned(new):
    """Replicated pages are in the carry. XLA shards new tokens that are computed from queries by parts of an axis."""
    arrays, _ = everything_about(4, is_contiguous=False)
    arrays = {x: arrays[x] for x in ("query", "key_pages", "page_table")}
    arrays["new_tokens"] = arrays["query"][:, :, :KEY_HEADS]
    arrays["lengths"] = jnp.asarray([20, 0, 25, 7], jnp.int32)

    def decode(query, key_pages, page_table, new_tokens, lengths):
        def step(carry, _):
            query, pages, lengths = carry
            lengths = lengths + 3
            tokens = new_tokens if new == "given" else query.reshape(*query.shape[:2], KEY_HEADS, -1, WIDTH).sum(3)
            pages = append_to_pages(tokens, 2 * tokens, *pages, page_table, lengths)
            return (paged_attention(query, *pages, page_table, lengths), pages, lengths), None

        return jax.lax.scan(step, (query, (key_pages, 2 * key_pages), lengths), None, length=2)[0]

    collectives = {} if new == "given" else {"all-gather": 2, "all-reduce": 1}
    assert_divides(decode, arrays, {"query": P(None, None, "model")}, "automatic", collectives, shape=(1, 4))
