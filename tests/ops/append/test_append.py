"""Appending to a paged cache: accuracy of every implementation, in-place writes and JAX's transformations."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag import Rotary, append_to_pages, moba_attention, moba_paged_attention, paged_attention
from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS, EIGHT_BIT_INTEGERS, EightBitFloat
from blockdiag.interop import compile_target
from blockdiag.ops.append.problem import APPEND
from tests.ops.append_support import AppendCase, RotaryCase, assert_appended, bits, call
from tests.support import compiled_quickly

IMPLEMENTATIONS = [
    name for name, implementation in APPEND.implementations.items() if implementation.why_unavailable() is None
]
needs_triton = pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="triton is not installed")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASES = {
    "one token": AppendCase(before=(15, 0, 16, 33), new=(1, 1, 1, 1)),
    "some without tokens": AppendCase(before=(7, 0, 16), new=(1, 0, 0), key_heads=1),
    "pages of 1": AppendCase(before=(2, 0), new=(3, 5), page_size=1, dtype="float32"),
    "pages of 3": AppendCase(before=(2, 4, 0), new=(5, 1, 7), page_size=3, dtype="float16", key_heads=3, value_dim=5),
    "pages of 64": AppendCase(before=(62, 0), new=(4, 4), page_size=64, value_dim=24),
    "contiguous": AppendCase(before=(3, 20, 0), new=(4, 4, 0), page_size=None),
    "packed": AppendCase(before=(3, 0, 14, 1), new=(2, 0, 5, 1), layout="packed", padding=3, page_size=4),
    "packed, nothing new": AppendCase(before=(3,), new=(0,), layout="packed", padding=2),
    "eight bits without scales, too large": AppendCase(
        before=(3, 0), new=(6, 6), key_dtype=E4M3, value_dtype=E5M2, magnitude=3e4
    ),
    "numbers and scalars": AppendCase(
        before=(3,), new=(3,), key_dtype=E5M2, key_scale="number", value_dtype=E4M3, value_scale="scalar"
    ),
    "scales of heads": AppendCase(
        before=(3, 15), new=(4, 2), key_dtype=E4M3, key_scale="head", value_scale="head", dtype="float16"
    ),
    "computed scales": AppendCase(
        before=(3, 15), new=(4, 2), key_dtype=E4M3, key_scale="token", value_dtype=E5M2, value_scale="token",
        magnitude=1e3,
    ),
    "computed scale of values, contiguous": AppendCase(
        before=(3, 7), new=(4, 4), page_size=None, value_dtype=E4M3, value_scale="token", dtype="float32"
    ),
    "keys of eight bits": AppendCase(before=(3,), new=(4,), dtype=E4M3, value_dtype=E5M2),
    "int8, numbers and scalars, too large": AppendCase(
        before=(3, 0), new=(6, 6), key_dtype="int8", key_scale="number", value_dtype="int8", value_scale="scalar",
        dtype="float32", magnitude=30,
    ),
    "int8, scales of heads, contiguous": AppendCase(
        before=(3, 15), new=(4, 2), key_dtype="int8", key_scale="head", value_dtype="int8", value_scale="head",
        dtype="float16", page_size=None, magnitude=9,
    ),
    "int8, computed scales": AppendCase(
        before=(3, 15, 0), new=(4, 2, 5), layout="packed", key_dtype="int8", key_scale="token", value_dtype="int8",
        value_scale="token", head_dim=7, value_dim=24, magnitude=1e3, page_size=3, dtype="float32",
    ),
    "int8, rotary, computed scales, centroids": AppendCase(
        before=(7, 2), new=(5, 10), key_dtype="int8", key_scale="token", value_dtype=E4M3, value_scale="token",
        rotary=RotaryCase(), block_size=4, page_size=5,
    ),
    "int8, centroids, scales of heads": AppendCase(
        before=(7, 14), new=(9, 2), key_dtype="int8", key_scale="head", block_size=8, dtype="float32", magnitude=20
    ),
    "rotary": AppendCase(before=(3, 9), new=(4, 1), rotary=RotaryCase(), page_size=3),
    "rotary, positions, interleaved, packed": AppendCase(
        before=(3, 9), new=(4, 1), layout="packed", padding=2, dtype="float32",
        rotary=RotaryCase(tables="explicit", interleaved=True),
    ),
    "rotary by token, 16-bit tables": AppendCase(
        before=(3, 9), new=(4, 4), dtype="float16", rotary=RotaryCase(tables="token", dtype="float16")
    ),
    "rotary by token shared, eight bits, computed scale": AppendCase(
        before=(3, 9), new=(4, 4), key_dtype=E5M2, key_scale="token",
        rotary=RotaryCase(tables="shared token", interleaved=True),
    ),
    "rotary by token, packed": AppendCase(
        before=(3, 9), new=(4, 2), layout="packed", rotary=RotaryCase(tables="token")
    ),
    "rotary of queries alone": AppendCase(before=(3,), new=(4,), rotary=RotaryCase(apply_to=("query",))),
    "centroids": AppendCase(before=(7, 6, 0, 3), new=(1, 1, 1, 1), page_size=3, block_size=4),
    "centroids of many blocks": AppendCase(
        before=(7, 2, 0), new=(10, 13, 3), page_size=5, block_size=4, max_blocks=3, dtype="float32"
    ),
    "centroids, packed, rotary, computed scales": AppendCase(
        before=(7, 2, 0), new=(10, 6, 3), layout="packed", padding=1, page_size=16, block_size=6, key_dtype=E4M3,
        key_scale="token", rotary=RotaryCase(interleaved=True),
    ),
    "centroids, contiguous, scales of heads": AppendCase(
        before=(7, 14), new=(2, 2), page_size=None, block_size=16, max_blocks=1, key_dtype=E5M2, key_scale="head"
    ),
    "latent": AppendCase(before=(3, 15), new=(4, 1), key_heads=1, is_latent=True, head_dim=12, page_size=3),
    "latent, packed, e4m3, computed scales, centroids": AppendCase(
        before=(7, 2, 0), new=(10, 6, 3), layout="packed", padding=1, key_heads=1, is_latent=True, key_dtype=E4M3,
        key_scale="token", block_size=4,
    ),
    "latent, contiguous, int8, rotary": AppendCase(
        before=(3, 15), new=(4, 2), is_latent=True, key_dtype="int8", key_scale="head", page_size=None, dtype="float16",
        rotary=RotaryCase(),
    ),
    "centroids of single keys": AppendCase(before=(1, 0), new=(2, 2), block_size=1, max_blocks=3),
}  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_exact(name, implementation):
    case = CASES[name]
    arguments = case.arguments()
    assert_appended(case, case.results(implementation, arguments), arguments)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_append_in_float64_is_exact(implementation):
    case = dataclasses.replace(CASES["rotary"], dtype="float64", rotary=RotaryCase(dtype="float64"), block_size=4)
    with jax.enable_x64(True):
        arguments = case.arguments()
        assert_appended(case, case.results(implementation, arguments), arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_append_drops_tokens_without_a_page(implementation):
    case = AppendCase(before=(4,) * 8, new=(4,) * 8, page_size=3, block_size=2, max_blocks=8)
    arguments = case.arguments()
    capacity = case.max_pages * case.page_size
    lengths = [2, 0, -5, capacity + 2, 2**31 - 1, -(2**31), 8, 8]
    arguments["kv_lengths"] = np.asarray(lengths, np.int32)
    arguments["page_table"][6, 1:] = [-1, 10**6, 2**31 - 1, -7]
    arguments["page_table"][7, 2] = arguments["key_pages"].shape[0]
    arguments["page_table"][3, 1] = -(2**31)
    exact = {name: np.asarray(x) for name, x in case.results("reference", arguments).items()}
    assert_appended(case, case.results(implementation, arguments), arguments)
    assert not np.isnan(exact["key_centroids"][0, 0]).any()
    assert np.isnan(exact["key_centroids"][[1, 2, 4, 5]]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_append_clips_query_lengths(implementation):
    case = AppendCase(before=(4, 4, 4), new=(2, 3, 1))
    arguments = case.arguments()
    arguments["query_lengths"] = np.asarray([-3, 99, 1], np.int32)
    assert_appended(case, case.results(implementation, arguments), arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_append_rounds_float8_to_nearest_even_and_saturates(dtype, implementation):
    """Ties round to even. Values out of range saturate or become 0, and NaN stays NaN."""
    case = AppendCase(before=(0,), new=(1,), key_heads=1, head_dim=1024, dtype="float32", key_dtype=dtype, value_dim=4)
    arguments = case.arguments()
    numbers = np.arange(256, dtype=np.uint8).view(arguments["key_pages"].dtype).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    between = (numbers[1:] + numbers[:-1]) / 2
    tests = [numbers, between, *(np.nextafter(between, np.float32(to)) for to in (-np.inf, np.inf))]
    tests = np.concatenate([*tests, np.asarray([1e9, -np.inf, np.inf, 1e-30, -0.0], np.float32)])[:1024]
    arguments["key"][:] = 0
    arguments["key"][0, 0, 0, : tests.size] = tests
    assert_appended(case, case.results(implementation, arguments), arguments)
    arguments["key"][0, 0, 0, 5] = np.nan
    page, offset = arguments["page_table"][0, 0], 0
    row = case.results(implementation, arguments)["key_pages"][page, offset, 0].astype(np.float32)
    assert np.isnan(row[5]) and np.isfinite(np.delete(row, 5)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_append_rounds_int8_to_nearest_even_and_saturates(implementation):
    """Ties round to even, values saturate at -127 and 127, and NaN becomes 0."""
    case = AppendCase(
        before=(0,), new=(1,), key_heads=1, head_dim=1024, dtype="float32", key_dtype="int8", key_scale="head",
        value_dim=4,
    )  # fmt: skip
    arguments = case.arguments()
    arguments["key_scale"][:] = 1
    numbers = np.arange(-130, 131, dtype=np.float32)
    between = numbers[1:] - np.float32(0.5)
    tests = [numbers, between, *(np.nextafter(between, np.float32(to)) for to in (-np.inf, np.inf))]
    tests = np.concatenate([*tests, np.asarray([1e9, -np.inf, np.inf, 1e-30, -0.0, np.nan], np.float32)])[:1024]
    tests[-1] = np.nan
    arguments["key"][:] = 0
    arguments["key"][0, 0, 0, : tests.size] = tests
    results = case.results(implementation, arguments)
    assert_appended(case, results, arguments)
    row = results["key_pages"][arguments["page_table"][0, 0], 0, 0]
    assert row.min() == -127 and row.max() == 127 and row[tests.size - 1] == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_append_computed_scales_of_int8_mark_tokens_with_nan_and_infinity(implementation):
    """Integers have no NaN, so the scale has it. An infinite scale of integers that are 0 has NaN as product."""
    case = CASES["int8, computed scales"]
    arguments = case.arguments()
    arguments["key"][0], arguments["key"][1, 0, 3], arguments["key"][2, 1, 2] = 0, np.nan, np.inf
    results = case.results(implementation, arguments)
    page_table = arguments["page_table"]
    places = [(page_table[0, position // 3], position % 3) for position in (3, 4, 5)]
    keys, scales = results["key_pages"], results["key_scale"]
    assert not keys[places[0]].any() and (scales[places[0]] == np.finfo(np.float32).tiny).all()
    assert np.isnan(scales[places[1]][0]) and not keys[places[1]][0].any() and np.isfinite(scales[places[1]][1])
    assert np.isinf(scales[places[2]][1]) and not keys[places[2]][1].any() and np.abs(keys[places[2]][0]).max() == 127


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_append_computed_scales_of_zeros_and_nan_are_tiny_and_nan(implementation):
    case = CASES["computed scales"]
    arguments = case.arguments()
    arguments["key"][0, 0], arguments["key"][0, 1, 0, 3] = 0, np.nan
    results = case.results(implementation, arguments)
    places = [(arguments["page_table"][0, 0], row) for row in (3, 4, 5)]
    keys, scales = (results[name].astype(np.float32) for name in ("key_pages", "key_scale"))
    assert not keys[places[0]].any() and (scales[places[0]] == np.finfo(np.float32).tiny).all()
    assert np.isnan(scales[places[1]][0]) and np.isnan(keys[places[1]][0]).all()
    assert np.isfinite(scales[places[1]][1]) and np.isfinite(keys[places[2]]).all()


def test_append_outside_jit_equals_the_compiled_call():
    case = CASES["centroids"]
    arguments = case.arguments()
    results = dict(zip(case.written, map(np.asarray, case.append(None)(**arguments)), strict=True))
    for name, x in case.results("xla", arguments).items():
        np.testing.assert_array_equal(bits(results[name]), bits(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pages, tokens", [(0, 1), (2, 0)])
def test_append_with_nothing_to_write_keeps_the_pages(pages, tokens, implementation):
    key, pool = jnp.ones((2, tokens, 1, 8)), jnp.ones((pages, 4, 1, 8))
    table, lengths = jnp.zeros((2, 3), jnp.int32), jnp.full(2, tokens, jnp.int32)
    append = jax.jit(functools.partial(append_to_pages, implementation=implementation))
    for result in append(key, key, pool, pool, table, lengths):
        np.testing.assert_array_equal(result, pool)


def test_moba_over_appended_centroids_matches_moba_over_all_keys():
    """MoBA over a cache that grew in two steps matches the last rows of MoBA over all keys."""
    generator = np.random.default_rng(0)
    query, key, value = (jnp.asarray(generator.normal(size=(2, 70, 2, 16)), jnp.float32) for _ in range(3))
    pool, centroids = jnp.full((20, 8, 2, 16), jnp.nan), jnp.full((2, 5, 2, 16), jnp.nan)
    table = jnp.asarray(generator.permutation(20)[:18].reshape(2, 9), jnp.int32)

    @compiled_quickly
    def grow_and_attend(query, key, value, pool, centroids, table):
        state = (pool, pool, centroids)
        for new in (slice(0, 67), slice(67, 70)):
            lengths = jnp.full(2, new.stop, jnp.int32)
            pages, means = state[:2], state[2]
            state = append_to_pages(
                key[:, new], value[:, new], *pages, table, lengths, key_centroids=means, block_size=16
            )
        attend = functools.partial(moba_paged_attention, block_size=16, top_k=3, implementation="xla")
        return attend(query[:, -3:], *state[:2], table, lengths, state[2])

    @compiled_quickly
    def attend_to_all(query, key, value):
        return moba_attention(query, key, value, block_size=16, top_k=3, implementation="xla")[:, -3:]

    actual = grow_and_attend(query, key, value, pool, centroids, table)
    np.testing.assert_allclose(actual, attend_to_all(query, key, value), atol=1e-5)


def test_paged_attention_over_appended_tokens_matches_the_reference():
    """The cache grows token by token, and attention uses the scales that were appended."""
    generator = np.random.default_rng(0)
    query, key, value = (jnp.asarray(generator.normal(size=(2, 9, 1, 16)), jnp.float32) for _ in range(3))
    pages = [jnp.full((8, 4, 1, 16), jnp.nan, dtype) for dtype in (E4M3, "float32")]
    scale = jnp.full((8, 4, 1), jnp.nan, "float32")
    table = jnp.asarray([[3, 1, 5], [0, 7, 2]], jnp.int32)

    @compiled_quickly
    def step(pages, scale, key, value, lengths):
        return append_to_pages(key, value, *pages, table, lengths, key_scale=scale)

    for token in range(9):
        new = slice(token, token + 1)
        *pages, scale = step(pages, scale, key[:, new], value[:, new], jnp.full(2, token + 1, jnp.int32))
    attend = compiled_quickly(
        lambda query, pages, scale, lengths: paged_attention(query, *pages, table, lengths, key_scale=scale)
    )
    actual = attend(query, pages, scale, jnp.full(2, 9, jnp.int32))
    exact = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(actual, exact, atol=0.1)


# --- in place -------------------------------------------------------------------------------------------------------


def grown_in_place(case, implementation):
    """Return a compiled function of the written arrays, which are donated, and of the other arguments."""
    return jax.jit(lambda written, others: case.append(implementation)(**written, **others), donate_argnums=0)


def split_arguments(case):
    arguments = {name: jnp.asarray(x) for name, x in case.arguments().items()}
    written = {name: arguments.pop(name) for name in case.written}
    return written, arguments


@pytest.mark.parametrize("name", ["one token", "packed", "centroids, packed, rotary, computed scales"])
def test_append_writes_donated_pages_in_place(name):
    case = CASES[name]
    written, others = split_arguments(case)
    places = {name: x.unsafe_buffer_pointer() for name, x in written.items()}
    results = grown_in_place(case, "xla")(written, others)
    for result, name in zip(results, case.written, strict=True):
        assert result.unsafe_buffer_pointer() == places[name], name
        assert written[name].is_deleted()


@needs_triton
@pytest.mark.parametrize("name", ["one token", "centroids, packed, rotary, computed scales"])
def test_append_lowers_to_one_kernel_on_donated_pages(name):
    """The call is lowered for a GPU that may be absent. One launch writes to its own operands, which are donated."""
    case = CASES[name]
    written, others = split_arguments(case)
    with compile_target(90):
        lowered = grown_in_place(case, None).trace(written, others).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("triton_kernel_call_ffi") == 1
    donated = set(re.findall(r"(%arg\d+): tensor<\S+> {tf.aliasing_output", text))
    assert len(donated) == len(case.written)
    # Pages go from the arguments to the kernel without another operation, and the kernel writes where it reads.
    operands = re.search(r"@triton_kernel_call_ffi\((.*?)\)", text)[1].split(", ")
    written_operands = {operands[int(place)] for place in re.findall(r"operand_index = (\d+)", text)}
    assert written_operands == donated


# --- transformations ------------------------------------------------------------------------------------------------


MAPPED = {
    "everything": {},
    "shared pages": {"key_pages": None, "value_pages": None, "page_table": None},
    "shared lengths": {"kv_lengths": None, "query_offsets": None, "query_lengths": None},
    "only pages": dict.fromkeys(
        ("key", "value", "page_table", "kv_lengths", "query_offsets", "query_lengths", "key_centroids")
    ),
}


@pytest.mark.parametrize(
    "name, mapping, implementation",
    [
        *(("centroids, packed, rotary, computed scales", mapping, "xla") for mapping in MAPPED),
        ("contiguous", "everything", "xla"),
        ("one token", "shared pages", "reference"),
        pytest.param("one token", "everything", "triton", marks=needs_triton),
        pytest.param("centroids, packed, rotary, computed scales", "shared pages", "triton", marks=needs_triton),
    ],
)
def test_append_under_vmap_matches_single_calls(name, mapping, implementation):
    case = CASES[name]
    both = [case.arguments(seed) for seed in (0, 1)]
    axes = {key: MAPPED[mapping].get(key, 0) for key in both[0]}
    stacked = {key: np.stack([one[key] for one in both]) if axis == 0 else both[0][key] for key, axis in axes.items()}
    mapped = compiled_quickly(
        lambda arguments: jax.vmap(lambda x: case.append(implementation)(**x), (axes,))(arguments)
    )
    results = mapped(stacked)
    for element in range(2):
        arguments = {key: x[element] if axes[key] == 0 else x for key, x in stacked.items()}
        actual = {key: np.asarray(x)[element] for key, x in zip(case.written, results, strict=True)}
        assert_appended(case, actual, arguments)


def test_append_under_vmap_over_rotary_tables_equals_single_calls():
    case = CASES["rotary"]
    arguments, rotary = case.arguments(), case.rotary_argument()
    cos = jnp.stack([rotary.cos, 2 * rotary.cos])

    def append(cos):
        return call(**arguments, rotary=dataclasses.replace(rotary, cos=cos))[0]

    mapped = jax.jit(jax.vmap(append))(cos)
    for element in range(2):
        np.testing.assert_array_equal(bits(np.asarray(mapped[element])), bits(np.asarray(append(cos[element]))))


def test_append_differentiation_raises_type_error():
    case = dataclasses.replace(CASES["one token"], dtype="float32")
    arguments = {name: jnp.asarray(x) for name, x in case.arguments().items()}

    def loss(operand, name):
        return jnp.sum(call(**arguments | {name: operand})[0])

    for name in ("key", "key_pages"):
        with pytest.raises(TypeError, match="append_to_pages is for inference"):
            jax.grad(loss)(arguments[name], name)
    with pytest.raises(TypeError, match="append_to_pages is for inference"):
        jax.jvp(functools.partial(loss, name="value"), (arguments["value"],), (arguments["value"],))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.division("batch", "heads", operation="append", kind="manual")
def test_append_in_shard_map_over_pools_and_heads_is_exact(implementation):
    case = CASES["centroids, packed, rotary, computed scales"]
    both = [case.arguments(seed) for seed in (0, 1)]
    stacked = {name: np.stack([one[name] for one in both]) for name in both[0]}
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    heads = {"key": 2, "value": 2, "key_pages": 3, "value_pages": 3, "key_scale": 3, "key_centroids": 3}
    specs = {name: P("x", *[None] * (heads[name] - 1), "y") if name in heads else P("x") for name in stacked}

    def append(arguments):
        results = case.append(implementation)(**{name: x[0] for name, x in arguments.items()})
        return tuple(x[None] for x in results)

    results = tuple(specs[name] for name in case.written)
    sharded = jax.shard_map(append, mesh=mesh, in_specs=(specs,), out_specs=results)
    actual = compiled_quickly(sharded)(stacked)
    for element in range(2):
        assert_appended(
            case, {name: np.asarray(x)[element] for name, x in zip(case.written, actual, strict=True)}, both[element]
        )


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("name, rows", [("contiguous", "x"), ("centroids", None)])
def test_append_with_explicit_shardings_is_exact(name, rows, is_jitted):
    case = dataclasses.replace(CASES[name], before=(3, 20), new=(4, 4), rotary=RotaryCase())
    arguments = case.arguments()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu"))
    specs = {name: P(rows, None, "y") for name in ("key", "value", "key_pages", "value_pages", "key_centroids")}
    append = case.append(None)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, specs.get(name, P())) for name, x in arguments.items()}
        results = (jax.jit(append) if is_jitted else append)(**placed)
        for name, result in zip(case.written, results, strict=True):
            assert jax.typeof(result).sharding.spec == jax.typeof(placed[name]).sharding.spec
        with pytest.raises(ValueError, match="`key_pages` must be sharded as `key` is"):
            append(**placed | {"key_pages": jax.device_put(arguments["key_pages"], P("x"))})
        if rows is None:
            with pytest.raises(ValueError, match="`key` must not be sharded over batch rows"):
                append(**placed | {"key": jax.device_put(arguments["key"], P("x"))})
    assert_appended(case, {name: np.asarray(x) for name, x in zip(case.written, results, strict=True)}, arguments)


def test_append_export_round_trips():
    case = CASES["one token"]
    arguments = case.arguments()
    exported = jax.export.export(jax.jit(case.append(None)), platforms=["cpu"])(**arguments)
    results = jax.export.deserialize(exported.serialize()).call(**arguments)
    assert_appended(case, {name: np.asarray(x) for name, x in zip(case.written, results, strict=True)}, arguments)


# --- mistakes -------------------------------------------------------------------------------------------------------


def array(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


GOOD = dict(
    key=array(2, 3, 2, 8),
    value=array(2, 3, 2, 6),
    key_pages=array(5, 4, 2, 8),
    value_pages=array(5, 4, 2, 6),
    page_table=jnp.asarray([[0, 1], [2, 3]], jnp.int32),
    kv_lengths=jnp.asarray([3, 7], jnp.int32),
)
TABLES = (array(8, 4), array(8, 4))
E4M3_POOL = array(5, 4, 2, 8, dtype=E4M3)
MISTAKES = {
    "rank of key": (dict(key=array(3, 8)), r"`key` must have shape \[B, T, K, H\]"),
    "no offsets": (dict(key=array(6, 2, 8), value=array(6, 2, 6)), "needs `query_offsets`"),
    "heads of value": (dict(value=array(2, 3, 1, 6)), r"`value` must have shape \(2, 3, 2, V\)"),
    "dtype of value": (dict(value=array(2, 3, 2, 6, dtype="bfloat16")), "`value` must have the dtype of `key`"),
    "dtype of key": (dict(key=array(2, 3, 2, 8, dtype="int32")), "`key` must have one of the dtypes"),
    "dtype of pages": (dict(key_pages=array(5, 4, 2, 8, dtype="bfloat16")), "`key_pages` must have one of the dtypes"),
    "heads of pages": (dict(value_pages=array(5, 4, 1, 6)), r"`value_pages` must have shape \[P, page_size, 2, 6\]"),
    "values without pages": (dict(value_pages=None), "`value` and `value_pages` belong together"),
    "pages without values": (dict(value=None), "`value` and `value_pages` belong together"),
    "scale of no values": (dict(value=None, value_pages=None, value_scale=2.0), "`value_scale` must be None"),
    "pages of value": (dict(value_pages=array(6, 4, 2, 6)), "`value_pages` must have the pages of `key_pages`"),
    "rows of table": (dict(page_table=array(3, 2, dtype="int32")), "`page_table` must have shape"),
    "page number": (dict(page_table=jnp.asarray([[0, 1], [2, 5]], jnp.int32)), r"page numbers in \[0, 5\)"),
    "lengths": (dict(kv_lengths=jnp.asarray([3, 9], jnp.int32)), r"`kv_lengths` must lie in \[0, 8\]"),
    "dtype of lengths": (dict(kv_lengths=jnp.asarray([3.0, 7.0])), "`kv_lengths` must be an int32 array"),
    "number of lengths": (dict(kv_lengths=jnp.asarray([3], jnp.int32)), r"`kv_lengths` must have shape \(2,\)"),
    "before the start": (dict(kv_lengths=jnp.asarray([3, 2], jnp.int32)), "counts the new tokens too, got 2"),
    "query lengths": (dict(query_lengths=jnp.asarray([0, 4], jnp.int32)), r"`query_lengths` must lie in \[0, 3\]"),
    "offsets of a batch": (dict(query_offsets=jnp.asarray([0, 1, 2], jnp.int32)), "`query_offsets` describes packed"),
    "contiguous": (dict(page_table=None), "`key_pages` without a `page_table`"),
    "shape of scale": (dict(key_scale=array(2, 3)), "`key_scale` must have shape"),
    "dtype of scale": (dict(value_scale=array(2, 2, dtype="bfloat16")), "`value_scale` must be a number or a float32"),
    "scales of wide pages": (dict(key_scale=array(5, 4, 2)), "`key_scale` as pages of scales needs `key_pages`"),
    "integers without scale": (
        dict(key_pages=array(5, 4, 2, 8, dtype="int8"), value_pages=array(5, 4, 2, 6, dtype="int8"), key_scale=0.1),
        "`value_scale` must be given for `value_pages` of int8, which are multiples of it, got None; pass pages",
    ),
    "integers of integers": (
        dict(key=array(2, 3, 2, 8, dtype="int8"), value=array(2, 3, 2, 6, dtype="int8")), "`key` must have one of the"
    ),
    "integers of eight-bit floats": (
        dict(key=array(2, 3, 2, 8, dtype=E4M3), value=array(2, 3, 2, 6, dtype=E4M3),
             key_pages=array(5, 4, 2, 8, dtype="int8")), "`key_pages` must have one of the dtypes"
    ),
    "centroids without size": (dict(key_centroids=array(2, 1, 2, 8)), "`key_centroids` and `block_size` belong"),
    "size without centroids": (dict(block_size=4), "`key_centroids` and `block_size` belong"),
    "shape of centroids": (dict(key_centroids=array(2, 1, 2, 6), block_size=4), "`key_centroids` must be float32"),
    "block size": (dict(key_centroids=array(2, 1, 2, 8), block_size=0), "`block_size` must be a positive integer"),
    "rotary of values": (
        dict(rotary=Rotary(*TABLES, apply_to=("key", "value"))), "`rotary` must not be applied to values"
    ),
    "rows of rotary": (dict(rotary=Rotary(array(5, 4), array(5, 4))), "a row for every position"),
    "implementation": (dict(implementation="pallas"), "`implementation` must be None"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_append_with_invalid_arguments_raises_value_error(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        append_to_pages(**GOOD | changes)


def test_append_with_invalid_offsets_raises_value_error():
    packed = GOOD | dict(key=array(6, 2, 8), value=array(6, 2, 6))
    for offsets, message in {
        (0, 7, 6): "must not decrease",
        (0, 3, 9): "`key`",
        (0, 4, 6): "got 3 for sequence 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            append_to_pages(**packed, query_offsets=jnp.asarray(offsets, jnp.int32))
    with pytest.raises(ValueError, match="exclude each other"):
        offsets, lengths = jnp.asarray([0, 3, 6], jnp.int32), jnp.asarray([1, 1], jnp.int32)
        append_to_pages(**packed, query_offsets=offsets, query_lengths=lengths)


def test_append_in_float64_with_triton_raises_not_implemented_error():
    with jax.enable_x64(True):
        doubles = {name: x.astype("float64") for name, x in GOOD.items() if x.dtype == "float32"}
        with pytest.raises(NotImplementedError, match=r"`key` is float64; use implementation='xla'"):
            append_to_pages(**GOOD | doubles, implementation="triton")


def test_eight_bit_float_table_matches_ml_dtypes():
    for name, narrow in EIGHT_BIT_FLOATS.items():
        limits = ml_dtypes.finfo(name)
        assert narrow == EightBitFloat(float(limits.max), limits.nmant, float(limits.smallest_normal))


def test_eight_bit_integers_are_symmetric():
    for name, integer in EIGHT_BIT_INTEGERS.items():
        assert integer.largest == np.iinfo(name).max
