"""Tests that fused attention with tokens shared by two or four devices equals that of one device."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import ContextParallel, explain, fuse, inverse_zigzag_order, zigzag_order
from tests.division.division_support import count_collectives, make_mesh, shard

TOKENS, HEADS, KEY_HEADS, WIDTH = 64, 8, 4, 8


def random_arrays(*shapes):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def operands(batch=1, key_heads=KEY_HEADS, tokens=TOKENS):
    keys = (batch, tokens, key_heads, WIDTH)
    return random_arrays((batch, tokens, HEADS, WIDTH), keys, keys)


def attend(query, key, value, mask_of, bias=None):
    """Return grouped-query attention masked by `mask_of(row, column)`, with a bias [heads, T, S] or [T, S]."""
    batch, tokens, heads, width = query.shape
    query = (query * width**-0.5).reshape(batch, tokens, key.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key)
    if bias is not None:
        scores = scores + bias.reshape(1, *((key.shape[2], -1) if bias.ndim == 3 else (1, 1)), *bias.shape[-2:])
    row, column = jnp.arange(tokens)[:, None], jnp.arange(key.shape[1])[None, :]
    scores = jnp.where(mask_of(row, column), scores, -jnp.inf)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), value).reshape(batch, tokens, heads, width)


def causal(query, key, value):
    return attend(query, key, value, lambda row, column: row >= column)


def window(query, key, value):
    return attend(query, key, value, lambda row, column: (row >= column) & (row - column < 20))


def documents(query, key, value, number):
    """Return causal attention within documents; `number` [T] is the document of each token."""
    return attend(query, key, value, lambda row, column: (row >= column) & (number[:, None] == number[None, :]))


def prefix(query, key, value, length):
    return attend(query, key, value, lambda row, column: (row >= column) | (column < length))


def biased(query, key, value, bias):
    return attend(query, key, value, lambda row, column: row >= column, bias)


def relative(query, key, value, table):
    """Return causal attention with a bias for each head and each distance up to 15."""
    place = jnp.arange(query.shape[1])
    distance = jnp.clip(place[:, None] - place[None, :], -15, 15)
    return biased(query, key, value, table[:, distance + 15])


def sinks(query, key, value, logits):
    """Return causal attention with a sink: each head has a logit without a value."""
    batch, tokens, heads, width = query.shape
    query = (query * width**-0.5).reshape(batch, tokens, key.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key)
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf)
    logits = jnp.broadcast_to(logits.reshape(key.shape[2], -1, 1, 1), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, logits], axis=-1))[..., :-1]
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(batch, tokens, heads, width)


def neighbours(query, key, value):
    return attend(query, key, value, lambda row, column: (row >= column) & (row - column < 8))


def squared(query, key, value):
    """Return causal attention with squared ReLU weights instead of a softmax."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / TOKENS
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), jax.nn.relu(scores) ** 2, 0)
    return jnp.einsum("bhts,bshd->bthd", scores, value)


def everything(query, key, value):
    return attend(query, key, value, lambda row, column: row + column >= 0)


@functools.cache
def gradients_of(function, count):
    """Return a function that computes the result and the gradients of the first arrays, with a varying cotangent.

    Tests share the function, so that JAX compiles it once for one device.
    """

    def compute(*arrays):
        output, pull_back = jax.vjp(lambda *some: function(*some, *arrays[count:]), *arrays[:count])
        return output, pull_back(jnp.cos(3 * output))

    return compute


def assert_shared(
    function, arrays, specs, kind, context, *, shape=(1, 4), collectives=None, count=3, transform=lambda x: x, **options
):
    """Assert that devices that share tokens match one device in results and gradients, deterministically.

    Args:
        function: the function of arrays that is fused.
        arrays: the operands on one device.
        specs: the partition specs of the operands on the mesh.
        kind, shape: the kind of the mesh's axes and the mesh's shape.
        context: the devices that share tokens.
        collectives: the expected number of each collective in the program.
        count: the number of arrays that have gradients.
        transform: a transformation of the plain and of the fused function.
        options: further options of `fuse`.
    """
    mesh = make_mesh(kind, shape)
    expected = jax.jit(gradients_of(transform(function), count))(*arrays)
    context = dataclasses.replace(context, mesh=mesh) if kind == "automatic" else context
    compute = gradients_of(transform(fuse(function, context_parallel=context, **options)), count)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        placed = [shard(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(compute).lower(*placed).compile()
        found, again = compiled(*placed), compiled(*placed)
    for one, other, second in zip(*map(jax.tree.leaves, (found, expected, again)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())
        np.testing.assert_array_equal(one, second)
    for x, spec in zip((found[0], *found[1][:3]), (specs[0], *specs[:3]), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    counts = count_collectives(compiled.as_text())
    assert collectives is None or counts == collectives, counts


T = P(None, "model")
OF_TOKENS = P("model")
NUMBERS = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, TOKENS)), jnp.int32)
TABLE, DENSE, LOGITS = random_arrays((HEADS, 31), (TOKENS, TOKENS), (HEADS,))
EXCHANGES = {"all-to-all": 8}
# On an automatic mesh keys and values are gathered in each pass; on an explicit one XLA merges these gathers.
GATHERS = {"automatic": {"all-gather": 4, "reduce-scatter": 2}, "explicit": {"all-gather": 2, "reduce-scatter": 2}}
ZIGZAG = {"collective-permute": 8}


@pytest.mark.parametrize(
    ("function", "more", "kind", "collectives"),
    [
        (causal, {}, "automatic", {}),
        (causal, {}, "explicit", {}),
        (window, {}, "explicit", {}),
        (documents, {"number": (NUMBERS, OF_TOKENS)}, "automatic", {"all-gather": 1}),
        (relative, {"table": (TABLE, P())}, "explicit", {"all-gather": 1}),
        (biased, {"bias": (DENSE, OF_TOKENS)}, "automatic", {"all-gather": 1, "all-reduce": 1}),
    ],
    ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""),
)
@pytest.mark.division("tokens", "gradients", operation="fuse")
def test_ulysses_exchanges_tokens_for_key_heads(function, more, kind, collectives):
    arrays, specs = [*operands(), *(x for x, _ in more.values())], [*[T] * 3, *(spec for _, spec in more.values())]
    context = ContextParallel("model")
    assert_shared(function, arrays, specs, kind, context, collectives=EXCHANGES | collectives, count=count_of(more))


@pytest.mark.parametrize(
    ("function", "more", "kind", "collectives"),
    [
        (causal, {}, "automatic", ZIGZAG),
        (causal, {}, "explicit", ZIGZAG),
        # The keys' prefix membership is gathered too.
        (prefix, {"length": (jnp.int32(10), P())}, "automatic", ZIGZAG | {"all-gather": 6}),
        (everything, {}, "automatic", {}),
        # Document numbers of queries move with the queries; those of keys are gathered.
        (documents, {"number": (NUMBERS, OF_TOKENS)}, "explicit", {"all-gather": 3, "collective-permute": 10}),
        (relative, {"table": (TABLE, P())}, "explicit", ZIGZAG | {"all-reduce": 1}),
    ],
    ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""),
)
@pytest.mark.division("tokens", "fewer key heads", "gradients", operation="fuse")
def test_gather_is_chosen_where_devices_do_not_divide_key_heads(function, more, kind, collectives):
    arrays = [*operands(key_heads=2), *(x for x, _ in more.values())]
    specs = [*[T] * 3, *(spec for _, spec in more.values())]
    context = ContextParallel("model")
    assert_shared(function, arrays, specs, kind, context, collectives=GATHERS[kind] | collectives, count=count_of(more))


def count_of(more):
    """Return the number of arrays with gradients: queries, keys, values and biases."""
    return 3 + len(more.keys() & {"table", "bias", "logits"})


@pytest.mark.parametrize(
    ("function", "more", "kind", "moves"),
    [
        # 16 permutes bring rows, keys and values into zigzag order and back. Keys and values travel 3 times in either
        # pass, and their gradients 4 times.
        (causal, {}, "automatic", {"collective-permute": 16 + 20}),
        (everything, {}, "explicit", {"collective-permute": 20}),
        # Keys that no row of any device sees do not travel. Keys and values travel once in either pass, and gradients
        # travel there and back.
        (neighbours, {}, "explicit", {"collective-permute": 2 + 2 + 4}),
        # Document numbers travel with the keys.
        (documents, {"number": (NUMBERS, OF_TOKENS)}, "explicit", {"collective-permute": 36 + 8}),
        (biased, {"bias": (DENSE, OF_TOKENS)}, "automatic", {"collective-permute": 36 + 4}),
        (sinks, {"logits": (LOGITS, P())}, "explicit", {"collective-permute": 36, "all-reduce": 1}),
    ],
    ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""),
)
@pytest.mark.division("tokens", "fewer key heads", "gradients", operation="fuse")
def test_ring_passes_keys_around_devices(function, more, kind, moves):
    arrays = [*operands(key_heads=2), *(x for x, _ in more.values())]
    specs = [*[T] * 3, *(spec for _, spec in more.values())]
    context = ContextParallel("model", "ring")
    assert_shared(function, arrays, specs, kind, context, collectives=moves, count=count_of(more))


def test_ring_with_weights_without_softmax_matches_one_device():
    arrays, context = random_arrays(*[(1, TOKENS, 2, WIDTH)] * 3), ContextParallel("model", "ring")
    assert_shared(squared, arrays, [T] * 3, "explicit", context, shape=(1, 2))


def test_ring_reads_relative_biases_for_passed_keys():
    arrays, context = [*operands(key_heads=2), TABLE], ContextParallel("model", "ring")
    moves = {"collective-permute": 16 + 8, "all-reduce": 1}
    assert_shared(relative, arrays, [T, T, T, P()], "explicit", context, shape=(1, 2), collectives=moves, count=4)


def test_ring_second_derivatives_match_one_device():
    arrays, mesh = operands(key_heads=2), make_mesh("automatic", (1, 2))

    def curvature(function):
        def slope(*arrays):
            gradients = jax.grad(lambda *x: jnp.cos(function(*x)).sum(), (0, 1, 2))(*arrays)
            return sum((x**2).sum() for x in gradients)

        return jax.jit(jax.grad(slope, (0, 1, 2)))

    fused = fuse(causal, context_parallel=ContextParallel("model", "ring", mesh=mesh))
    found = curvature(fused)(*(shard(mesh, x, T) for x in arrays))
    for one, other in zip(found, curvature(causal)(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())


def test_context_parallel_with_sharded_batch_or_heads_matches_one_device():
    context = ContextParallel("model", "gather", batch_axes=("data",))
    moves = GATHERS["automatic"] | ZIGZAG
    assert_shared(causal, operands(2), [P("data", "model")] * 3, "automatic", context, shape=(2, 2), collectives=moves)
    specs = [P(None, "data", "model")] * 3
    assert_shared(causal, operands(), specs, "explicit", ContextParallel("data"), shape=(2, 2), collectives=EXCHANGES)
    assert_shared(causal, operands(), specs, "explicit", ContextParallel("data", "ring"), shape=(2, 2))


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_context_parallel_under_vmap_scan_and_checkpoint_matches_one_device(strategy):
    def layers(query, key, value):
        step = jax.checkpoint(lambda x, _: (causal(x, key, value), None))
        return jax.lax.scan(step, query, None, length=2)[0]

    arrays = [jnp.stack([x, 2 * x]) for x in operands()]
    specs = [P(None, None, "model")] * 3
    assert_shared(
        layers, arrays, specs, "explicit", ContextParallel("model", strategy), shape=(1, 2), transform=jax.vmap
    )


@pytest.mark.parametrize("strategy", ["ulysses", "gather"])
def test_context_parallel_with_fewer_keys_than_queries_replicates_keys(strategy):
    query, key, value = operands()
    arrays = [query, key[:, :45], value[:, :45]]
    assert_shared(everything, arrays, [T, P(), P()], "explicit", ContextParallel("model", strategy))


def test_context_parallel_with_heads_and_tokens_in_one_axis_matches_one_device():
    def folded(query, key, value):
        query, key, value = (x.reshape(1, HEADS, TOKENS, WIDTH).transpose(0, 2, 1, 3) for x in (query, key, value))
        return causal(query, key, value).transpose(0, 2, 1, 3).reshape(HEADS * TOKENS, WIDTH)

    arrays, mesh = random_arrays(*[(HEADS * TOKENS, WIDTH)] * 3), make_mesh("automatic", (1, 4))
    attend_shared = fuse(folded, context_parallel=ContextParallel("model", mesh=mesh))
    found = jax.jit(attend_shared)(*(shard(mesh, x, P("model")) for x in arrays))
    np.testing.assert_allclose(found, folded(*arrays), atol=1e-5)


def test_context_parallel_over_one_device_has_no_collectives():
    odd = operands(key_heads=1, tokens=33)
    context = ContextParallel("data", "ulysses")
    assert_shared(causal, odd, [P(None, "data")] * 3, "explicit", context, collectives={})


def test_context_parallel_triton_kernels_match_one_device():
    assert_shared(
        causal, operands(), [T] * 3, "explicit", ContextParallel("model", "gather"), implementation="triton",
        collectives=GATHERS["explicit"] | ZIGZAG,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "key_heads", "kind", "implementation", "most"),
    [
        # Kernels round as on one device. XLA rounds between fusions, and its fusions differ from those on one device.
        ("gather", 2, "explicit", "triton", 1.01),
        ("ulysses", 4, "explicit", "triton", 1.01),
        # Merging partial results changes their rounding.
        ("ring", 2, "explicit", "triton", 1.1),
        ("gather", 2, "automatic", "xla", 1.2),
    ],
)
def test_context_parallel_gradients_are_rounded_once(strategy, key_heads, kind, implementation, most):
    context, mesh = ContextParallel("model", strategy), make_mesh(kind, (1, 2))
    wide = [*operands(key_heads=key_heads), DENSE]
    narrow = [x.astype(jnp.bfloat16) for x in wide]
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in gradients_of(biased, 4)(*(x.astype(jnp.float64) for x in narrow))[1]]
    one = jax.jit(gradients_of(fuse(biased, implementation=implementation), 4))(*narrow)[1]
    context = dataclasses.replace(context, mesh=mesh) if kind == "automatic" else context
    compute = jax.jit(gradients_of(fuse(biased, implementation=implementation, context_parallel=context), 4))
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        placed = [shard(mesh, x, spec) for x, spec in zip(narrow, [T, T, T, OF_TOKENS], strict=True)]
        found = compute(*placed)[1]
    for gradient, other, expected in zip(found, one, exact, strict=True):
        assert gradient.dtype == jnp.bfloat16
        error, error_of_one = (np.linalg.norm(np.asarray(x, np.float64) - expected) for x in (gradient, other))
        assert error <= most * error_of_one, (error, error_of_one)


def test_explain_names_the_chosen_strategy():
    def chosen(function, key_heads, strategy=None):
        context = ContextParallel("model", strategy, mesh=make_mesh("automatic", (1, 4)))
        (region,) = explain(fuse(function, context_parallel=context))(*operands(key_heads=key_heads)).regions
        return region.shared, str(region).splitlines()[-1]

    shared, line = chosen(causal, 4)
    assert shared == "4 devices share tokens along 'model'; 'ulysses': they exchange tokens for b1"
    assert line.startswith(f"devices: {shared}; batch axes b1, g0 may be divided; ")
    gathers = "4 devices share tokens along 'model'; 'gather': they gather arrays with keys, and compute "
    assert chosen(causal, 2)[0] == f"{gathers}rows in zigzag order"
    assert chosen(everything, 4, "gather")[0] == f"{gathers}consecutive rows"
    travels = "4 devices share tokens along 'model'; 'ring': arrays with keys travel around them in "
    assert chosen(causal, 4, "ring")[0] == f"{travels}4 steps, rows in zigzag order"
    assert chosen(neighbours, 4, "ring")[0] == f"{travels}2 steps, consecutive rows"
    assert explain(fuse(causal))(*operands()).regions[0].shared is None


@pytest.mark.parametrize(
    ("context", "change", "message"),
    [
        (ContextParallel("absent"), {}, r"names the axis 'absent', but the mesh has \['data', 'model'\]"),
        (ContextParallel("model"), {"tokens": 62}, "queries must be a multiple of the 4 devices along 'model', got 62"),
        (ContextParallel("model", "gather"), {"tokens": 60}, "a multiple of twice the 4 devices along 'model', got 60"),
        (ContextParallel("model", "ring"), {"tokens": 60}, "'ring' of a causal mask needs tokens that are a multiple"),
        (
            ContextParallel("model", "ulysses"),
            {"key_heads": 2},
            r"'ulysses' needs an axis .* such as key heads, .* got \{'b1': 2\}; use strategy='gather' or 'ring'",
        ),
    ],
)
def test_unsupported_context_parallel_calls_raise_value_error(context, change, message):
    mesh = make_mesh("explicit", (1, 4))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        fuse(causal, context_parallel=context)(*(shard(mesh, x, P()) for x in operands(**change)))


def test_context_parallel_in_unsupported_places_raises_value_error():
    mesh = make_mesh("automatic", (1, 4))
    attend_shared = fuse(causal, context_parallel=ContextParallel("model", mesh=mesh))
    with pytest.raises(ValueError, match=r"inside of `jax.shard_map`.* needs `token_axes`; .* or call it outside"):
        jax.shard_map(attend_shared, mesh=mesh, in_specs=T, out_specs=T)(*operands())
    with pytest.raises(ValueError, match="`token_axes`=1 is for calls with `context_parallel` inside"):
        fuse(causal, context_parallel=ContextParallel("model", mesh=mesh), token_axes=1)(*operands())
    with pytest.raises(ValueError, match=r"the mesh has none; call inside `jax.set_mesh"):
        fuse(causal, context_parallel=ContextParallel("model"))(*operands())
    mixed = jax.make_mesh((1, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mixed), pytest.raises(ValueError, match="axes are of one kind: 'model' is automatic"):
        fuse(causal, context_parallel=ContextParallel("model"))(*(shard(mixed, x, P()) for x in operands()))
    with pytest.raises(ValueError, match="implementation='reference' runs the function unchanged"):
        fuse(causal, implementation="reference", context_parallel=ContextParallel("model", mesh=mesh))
    query, key, value = operands(key_heads=2)
    travelling = fuse(everything, context_parallel=ContextParallel("model", "ring", mesh=mesh))
    with pytest.raises(
        ValueError, match=r"'ring' does not support .* 64 queries and 45 keys, .* use strategy='gather'"
    ):
        travelling(query, key[:, :45], value[:, :45])


def in_shard_map(mesh, specs, check_vma=True, names=("data", "model")):
    """Return a wrapper that runs a fused function on shards inside `jax.shard_map`."""

    def wrapped(fused):
        return jax.shard_map(
            fused, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=check_vma, axis_names=set(names)
        )

    return wrapped


@pytest.mark.parametrize(
    ("function", "strategy", "more", "check_vma", "collectives"),
    [
        (causal, "ulysses", {}, True, EXCHANGES),
        (relative, "ulysses", {"table": (TABLE, P(), None)}, False, None),
        (documents, "gather", {"number": (NUMBERS, OF_TOKENS, 0)}, True, None),
        (window, "gather", {}, False, None),
        (biased, "ring", {"bias": (DENSE, OF_TOKENS, 0)}, True, None),
        (prefix, "ring", {"length": (jnp.int32(11), P(), None)}, True, None),
    ],
    ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""),
)
@pytest.mark.division("tokens", "gradients", operation="fuse", kind="manual")
def test_fuse_inside_of_shard_map_equals_one_device(function, strategy, more, check_vma, collectives):
    """Devices also hold different batch rows; gradients of replicated operands are summed over all devices."""
    mesh, rows = make_mesh("automatic", (1 if strategy == "ring" else 2, 4 if strategy == "ring" else 2)), 2
    whole = P("data", "model")
    arrays, specs = (
        [*operands(rows), *(x for x, *_ in more.values())],
        [*[whole] * 3, *(x for _, x, _ in more.values())],
    )
    axes = (1, 1, 1, *(axis for *_, axis in more.values()))
    count = 3 + sum(jnp.issubdtype(x.dtype, jnp.floating) for x, *_ in more.values())
    expected = jax.jit(gradients_of(function, count))(*arrays)
    fused = fuse(function, context_parallel=ContextParallel("model", strategy), token_axes=axes)
    compute = gradients_of(in_shard_map(mesh, specs, check_vma)(fused), count)
    placed = [shard(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(compute).lower(*placed).compile()
    found, again = compiled(*placed), compiled(*placed)
    for one, other, second in zip(*map(jax.tree.leaves, (found, expected, again)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())
        np.testing.assert_array_equal(one, second)
    assert collectives is None or count_collectives(compiled.as_text()) == collectives


def test_triton_kernels_inside_of_shard_map_equal_one_device():
    mesh = make_mesh("automatic", (1, 4))
    fused = fuse(causal, context_parallel=ContextParallel("model", "gather"), token_axes=1, implementation="triton")
    arrays = operands()
    found = jax.jit(gradients_of(in_shard_map(mesh, [T] * 3)(fused), 3))(*(shard(mesh, x, T) for x in arrays))
    for one, other in zip(*map(jax.tree.leaves, (found, gradients_of(causal, 3)(*arrays))), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ("data",)}, "is not manual over the axis 'model'; make it manual too"),
        ({"names": ("model",)}, r"leaves the axes \['data'\] of its mesh; make them manual too"),
        ({"token_axes": 2}, "`token_axes` must name axes of queries, or of keys of arrays without queries"),
        ({"token_axes": (1, 1)}, r"`token_axes`=\(1, 1\) does not fit the 3 arguments"),
        ({"function": lambda q, k, v: causal(q, k, v).sum(1)}, "must not mix tokens, but `reduce_sum`"),
        ({"tokens": 62}, "a multiple of twice the 2 devices along 'model', got 62"),
    ],
    ids=["context", "others", "heads", "too few", "mixed", "length"],
)
def test_fuse_inside_shard_map_with_unsupported_arguments_raises_value_error(change, message):
    mesh = make_mesh("automatic", (2, 2))
    context = ContextParallel("model", "gather")
    fused = fuse(change.get("function", causal), context_parallel=context, token_axes=change.get("token_axes", 1))
    names = change.get("names", ("data", "model"))
    inside = in_shard_map(mesh, [T if "model" in names else P()] * 3, names=names)
    arrays = operands(tokens=change.get("tokens", TOKENS))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(inside(fused), *arrays)


def test_second_derivatives_of_gathered_keys_inside_shard_map_raise_not_implemented_error():
    mesh = make_mesh("automatic", (1, 4))
    fused = fuse(causal, context_parallel=ContextParallel("model", "gather"), token_axes=1)
    inside = in_shard_map(mesh, [T] * 3)(fused)

    def slope(query, key, value):
        return jax.grad(lambda x: jnp.sum(inside(x, key, value) ** 2))(query).sum()

    with pytest.raises(NotImplementedError, match=r"second derivatives .* use strategy='ulysses'"):
        jax.eval_shape(jax.grad(slope), *operands())


def test_zigzag_order_gives_devices_equal_shares_of_causal_pairs():
    for devices in (1, 2, 4, 7):
        order, inverse = (f(28 * devices, devices) for f in (zigzag_order, inverse_zigzag_order))
        np.testing.assert_array_equal(order[inverse], np.arange(28 * devices))
        # Query t sees t + 1 keys.
        pairs = (order + 1).reshape(devices, -1).sum(1)
        assert set(pairs) == {pairs.mean()}
    with pytest.raises(ValueError, match="a multiple of twice the 4 devices, got 12"):
        zigzag_order(12, 4)
