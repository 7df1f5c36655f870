"""The operation under JAX's transformations: batching, differentiation, rematerialisation, sharding and export."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag import BLOCK_DIAGONAL_OUTPUT, Rotary, block_diagonal_attention, rotary_tables
from blockdiag.interop import compile_target
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from tests.support import Case, RotaryCase, compiled_quickly, to_array, value_and_gradients

attend = functools.partial(block_diagonal_attention, block_size=8)


def random_arrays(*shapes: tuple[int, ...], dtype=jnp.float32, seed: int = 0) -> list[jax.Array]:
    generator = np.random.default_rng(seed)
    return [to_array(generator.normal(size=shape).astype(np.float32), dtype) for shape in shapes]


def assert_close(actual, expected, tolerance: float = 2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


def loop(function, in_axes, *arrays):
    """Call the function once for each element and stack the results, which defines `jax.vmap`."""
    size = next(x.shape[axis] for x, axis in zip(arrays, in_axes, strict=True) if axis is not None)
    results = []
    for i in range(size):
        picked = (x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arrays, in_axes, strict=True))
        results.append(function(*picked))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


# Each function is compiled once for all ways to map it.
compiled_once = functools.cache(compiled_quickly)


def assert_mapped_is_looped(function, in_axes, *arrays):
    """Assert that `jax.vmap` of a function matches `loop`, with both functions compiled."""
    mapped = compiled_quickly(jax.vmap(function, in_axes))(*arrays)
    assert_close(mapped, loop(compiled_once(function), in_axes, *arrays))


# --- vmap ---------------------------------------------------------------------------------------------------------


def attend_and_gradients(query, key, value):
    return value_and_gradients(attend, query, key, value, jnp.cos(query))


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, None), (None, None, 1)])
@pytest.mark.parametrize("function", [attend, attend_and_gradients], ids=["value", "gradients"])
def test_vmap_of_batched_operands_matches_a_loop(in_axes, function):
    shapes = ((2, 11, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8))
    arrays = random_arrays(*(s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(shapes, in_axes, strict=True)))
    assert_mapped_is_looped(function, in_axes, *arrays)


@functools.cache
def packed_gradients(tables):
    """Return a function that computes output and gradients of a packed call with tables of this kind."""

    def function(query, key, value, offsets, cos, sin, positions):
        rotary = Rotary(
            cos, sin, positions=positions if tables == "explicit" else None, per_token="per token" in tables
        )
        call = functools.partial(attend, sequence_offsets=offsets, rotary=None if tables == "none" else rotary)
        return value_and_gradients(call, query, key, value, jnp.sin(query))

    return function


@pytest.mark.parametrize("offsets_axis", [0, None])
@pytest.mark.parametrize("tables", ["none", "shared", "mapped", "per token", "per token, mapped", "explicit"])
def test_vmap_of_packed_operands_and_tables_matches_a_loop(offsets_axis, tables):
    query, key, value = random_arrays((3, 23, 4, 8), (3, 23, 2, 8), (3, 23, 2, 8))
    offsets = jnp.asarray([[0, 5, 5, 20], [0, 1, 2, 23], [0, 0, 0, 0]], jnp.int32)
    offsets = offsets if offsets_axis == 0 else offsets[0]
    shape = {"none": (23, 4), "shared": (30, 4), "mapped": (3, 30, 4), "per token": (23, 4), "explicit": (30, 4)}
    cos, sin = random_arrays(*[shape.get(tables, (3, 23, 4))] * 2, seed=1)
    tables_axis = 0 if "mapped" in tables else None
    positions = jnp.asarray(np.random.default_rng(2).integers(0, 30, (3, 23)), jnp.int32)

    in_axes = (0, 0, 0, offsets_axis, tables_axis, tables_axis, 0)
    assert_mapped_is_looped(packed_gradients(tables), in_axes, query, key, value, offsets, cos, sin, positions)


@pytest.mark.parametrize("case_rotary", [None, "position", "token"])
def test_vmap_of_equal_sequences_with_mapped_tables_matches_a_loop(case_rotary):
    query, key, value = random_arrays((3, 2, 13, 2, 8), (3, 2, 13, 2, 8), (3, 2, 13, 2, 8))
    cos, sin = random_arrays((3, 2, 13, 4), (3, 2, 13, 4), seed=1)

    def function(query, key, value, cos, sin):
        match case_rotary:
            case None:
                rotary = None
            case "position":
                rotary = Rotary(cos[0], sin[0])
            case "token":
                rotary = Rotary(cos, sin, per_token=True)
        return attend(query, key, value, rotary=rotary)

    arrays = (query, key, value, cos, sin)
    assert_close(jax.vmap(function)(*arrays), loop(function, (0,) * 5, *arrays))


def test_tables_too_short_for_traced_offsets_clamp_alike_under_vmap():
    """Rows beyond the table read the last row of the element's own table, not another element's table."""
    query, key, value = random_arrays((2, 20, 2, 8), (2, 20, 2, 8), (2, 20, 2, 8))
    cos, sin = random_arrays((2, 5, 4), (2, 5, 4), seed=1)
    offsets = jnp.asarray([0, 20], jnp.int32)

    def function(query, key, value, offsets, cos, sin):
        return attend(query, key, value, sequence_offsets=offsets, rotary=Rotary(cos, sin))

    assert_mapped_is_looped(function, (0, 0, 0, None, 0, 0), query, key, value, offsets, cos, sin)


def test_nested_vmap_with_block_lengths_matches_a_loop():
    query, key, value = random_arrays((2, 3, 12, 2, 8), (3, 12, 2, 8), (2, 12, 2, 8))
    lengths = jnp.asarray([[8, 2, 0], [1, 8, 3], [0, 0, 4]], jnp.int32)

    def function(query, key, value, lengths):
        return attend(query, key, value, block_lengths=lengths)

    inner_axes, outer_axes = (0, 0, None, 0), (0, None, 0, None)
    actual = compiled_quickly(jax.vmap(jax.vmap(function, inner_axes), outer_axes))(query, key, value, lengths)
    one = compiled_quickly(function)
    assert_close(actual, loop(functools.partial(loop, one, inner_axes), outer_axes, query, key, value, lengths))


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_of_vmap_with_shared_key_and_value_matches_a_loop(packed):
    query, key, value, cotangent = random_arrays((3, 20, 4, 8), (20, 2, 8), (20, 2, 8), (3, 20, 4, 8))
    packing = {"sequence_offsets": jnp.asarray([0, 3, 17], jnp.int32)} if packed else {}
    call = functools.partial(attend, **packing)
    mapped = jax.vmap(call, (0, None, None))
    looped = functools.partial(loop, call, (0, None, None))
    assert_close(
        compiled_quickly(functools.partial(value_and_gradients, mapped))(query, key, value, cotangent),
        compiled_quickly(functools.partial(value_and_gradients, looped))(query, key, value, cotangent),
    )


def test_vmap_folds_into_one_call():
    """Mapped elements become tokens of one call, so the program has the products of an unmapped call."""
    query, key, value = random_arrays((6, 2, 16, 2, 8), (6, 2, 16, 2, 8), (6, 2, 16, 2, 8))
    lowered = jax.jit(jax.vmap(attend)).lower(query, key, value).as_text()
    assert len(re.findall("dot_general", lowered)) == 2
    assert "while" not in lowered


# --- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
        lambda f, x: jax.jacfwd(f)(x),
        lambda f, x: jax.linearize(f, x)[1](x),
        lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
        lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(x[None]),
        lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
        lambda f, x: jax.jit(jax.jacfwd(f))(x),
        lambda f, x: jax.jit(jax.hessian(lambda x: f(x).sum()))(x),
    ],
    ids=[
        "jvp",
        "jit of jvp",
        "jvp of jit",
        "jacfwd",
        "linearize",
        "hessian",
        "vmap of jvp",
        "checkpoint",
        "jit of jacfwd",
        "jit of hessian",
    ],
)
def test_forward_mode_raises_type_error_with_the_supported_implementation(implementation, transform):
    query, key, value = random_arrays((1, 5, 1, 4), (1, 5, 1, 4), (1, 5, 1, 4))
    with pytest.raises(TypeError, match='implementation="reference"'):
        transform(lambda x: attend(x, key, value, implementation=implementation), query)


def test_forward_mode_of_the_reference_matches_finite_differences():
    query, key, value, tangent = random_arrays(*[(2, 13, 2, 8)] * 4)
    function = functools.partial(attend, implementation="reference")
    _, by_rule = jax.jvp(lambda x: function(x, key, value), (query,), (tangent,))
    step = 1e-2
    difference = function(query + step * tangent, key, value) - function(query - step * tangent, key, value)
    assert_close(by_rule, difference / (2 * step), 1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivative_matches_the_reference(packed):
    case = Case(
        lengths=(11, 0, 9) if packed else (11, 11),
        layout="offsets" if packed else "batch",
        query_heads=4,
        head_dim=8,
        block_size=4,
        is_causal=True,
        rotary=RotaryCase(apply_to=("query", "key", "value")),
    )
    *inputs, cotangent = case.operands()

    def penalty(implementation, *inputs):
        gradients = jax.grad(lambda *x: (case.attend(implementation)(*x) * cotangent).sum(), (0, 1, 2))(*inputs)
        return sum((gradient**2).sum() for gradient in gradients)

    actual = jax.jit(jax.grad(functools.partial(penalty, "xla"), (0, 1, 2)))(*inputs)
    expected = jax.jit(jax.grad(functools.partial(penalty, "reference"), (0, 1, 2)))(*inputs)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * np.abs(e).max())


def test_third_derivative_under_vmap_matches_the_reference():
    query, key, value = random_arrays((2, 6, 1, 4), (2, 6, 1, 4), (2, 6, 1, 4))

    def total(implementation, query):
        return jnp.sum(attend(query, key[0], value[0], implementation=implementation) ** 2)

    def third(implementation):
        function = functools.partial(total, implementation)
        for _ in range(2):
            function = (lambda f: lambda x: jnp.sum(jnp.sin(jax.grad(f)(x))))(function)
        return jax.jit(jax.vmap(jax.grad(function)))

    assert_close(third("xla")(query), third("reference")(query), 1e-3)


def test_tables_and_offsets_have_zero_gradient():
    query, key, value, cos, sin = random_arrays((20, 2, 8), (20, 2, 8), (20, 2, 8), (20, 4), (20, 4))
    offsets = jnp.asarray([0, 20], jnp.int32)

    def total(rotary, offsets):
        return attend(query, key, value, sequence_offsets=offsets, rotary=rotary).sum()

    gradient, of_offsets = jax.grad(total, (0, 1), allow_int=True)(Rotary(cos, sin), offsets)
    assert not gradient.cos.any() and not gradient.sin.any()
    assert of_offsets.dtype == jax.dtypes.float0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_have_the_dtype_of_the_operands(dtype):
    query, key, value = random_arrays(*[(2, 9, 2, 8)] * 3, dtype=dtype)
    gradients = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(query, key, value)
    assert {str(gradient.dtype) for gradient in gradients} == {dtype}


@pytest.mark.parametrize("packed", [False, True])
def test_residuals_are_the_operands(packed):
    """Only the arguments, and for packed calls a small tile table, are kept for the backward pass."""
    query, key, value = random_arrays((64, 4, 8), (64, 2, 8), (64, 2, 8))
    packing = {"sequence_offsets": jnp.asarray([0, 10, 64], jnp.int32)} if packed else {}
    _, pull_back = jax.vjp(lambda *x: attend(*x, **packing), query, key, value)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.dtype == jnp.float32]
    assert sorted(x.size for x in kept) == sorted(x.size for x in (query, key, value))
    small = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.dtype != jnp.float32]
    assert sum(leaf.size for leaf in small) <= 3 * 12 if packed else not small


# --- rematerialisation and compilation ------------------------------------------------------------------------------


def count_softmaxes(function, *arguments) -> int:
    """Count the attention computations in a program: each one, forward or backward, has one exponential."""
    return jax.jit(function).lower(*arguments).compile().as_text().count(" exponential(")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("no remat", 2),
        (None, 3),
        (jax.checkpoint_policies.save_only_these_names(BLOCK_DIAGONAL_OUTPUT), 2),
        (jax.checkpoint_policies.save_only_these_names("something else"), 3),
    ],
)
def test_checkpoint_policy_that_saves_the_output_skips_the_forward_pass(policy, expected):
    query, key, value, weight = random_arrays((2, 16, 2, 8), (2, 16, 2, 8), (2, 16, 2, 8), (8, 8))

    def layer(weight, query, key, value):
        return jnp.einsum("btnh,hk->btnk", attend(query @ weight, key @ weight, value @ weight) ** 2, weight)

    layer = layer if policy == "no remat" else jax.checkpoint(layer, policy=policy)

    def loss(weight):
        return jnp.sum(jnp.tanh(layer(weight, query, key, value)))

    assert count_softmaxes(jax.grad(loss), weight) == expected


@pytest.mark.parametrize(("names", "expected"), [((), 3), ((BLOCK_DIAGONAL_OUTPUT,), 2)])
def test_training_step_launches_two_kernels_when_the_output_is_saved_and_three_otherwise(names, expected):
    """The step is lowered for a Hopper GPU that may be absent.

    It has a forward and a backward kernel, and repeats the forward kernel if the output is not saved.
    """
    if BLOCK_DIAGONAL.implementations["triton"].why_unavailable():
        pytest.skip(BLOCK_DIAGONAL.implementations["triton"].why_unavailable())
    (query,) = random_arrays((2, 128, 2, 64), dtype=jnp.bfloat16)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(scale):
        return jnp.sin(block_diagonal_attention(query * scale, query, query))

    step = jax.jit(jax.value_and_grad(lambda scale: layer(scale).astype(jnp.float32).sum()))
    with compile_target(90):
        lowered = step.trace(jnp.ones((), jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("triton_kernel_call_ffi") == expected


def test_scan_over_checkpointed_layers_matches_the_reference():
    query, key, value, weights = random_arrays((2, 16, 2, 8), (2, 16, 2, 8), (2, 16, 2, 8), (3, 8, 8))
    policy = jax.checkpoint_policies.save_only_these_names(BLOCK_DIAGONAL_OUTPUT)

    def loss(implementation, weights):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, weight):
            return x + attend(x @ weight, key, value, implementation=implementation), None

        x, _ = jax.lax.scan(layer, query, weights)
        return jnp.sum(x**2)

    gradients = (jax.jit(jax.grad(functools.partial(loss, name)))(weights) for name in ("xla", "reference"))
    assert_close(*gradients, 1e-3)


def test_new_offsets_do_not_recompile():
    query, key, value = random_arrays((40, 2, 8), (40, 2, 8), (40, 2, 8))
    traces = 0

    @jax.jit
    def compute(query, key, value, offsets):
        nonlocal traces
        traces += 1
        return value_and_gradients(functools.partial(attend, sequence_offsets=offsets), query, key, value, query)

    for offsets in ([0, 10, 40], [0, 0, 0], [0, 40, 40], [0, 1, 2]):
        compute(query, key, value, jnp.asarray(offsets, jnp.int32))
    assert traces == 1 and compute._cache_size() == 1


def test_concrete_offsets_do_not_change_the_program():
    """Outside of jit, too, values of offsets are checked but not compiled in."""
    from blockdiag.ops.block_diagonal.api import _attention

    query, key, value = random_arrays((40, 2, 8), (40, 2, 8), (40, 2, 8))
    attend(query, key, value, sequence_offsets=jnp.asarray([0, 10, 40], jnp.int32))
    before = _attention._cache_size()
    attend(query, key, value, sequence_offsets=jnp.asarray([0, 0, 7], jnp.int32))
    assert _attention._cache_size() == before


@pytest.mark.parametrize("packed", [False, True])
def test_grouped_heads_are_not_repeated_and_scores_stay_in_blocks(packed):
    """No operand is broadcast to the size of repeated keys, and no array is [T, T]."""
    tokens, heads, head_dim, block_size = 1024, 8, 64, 16
    query, key, value, cotangent = random_arrays(
        (tokens, heads, head_dim), (tokens, 1, head_dim), (tokens, 1, head_dim), (tokens, heads, head_dim)
    )
    packing = {"sequence_offsets": jnp.asarray([0, 100, tokens], jnp.int32)} if packed else {}
    call = functools.partial(block_diagonal_attention, block_size=block_size, **packing)
    compute = functools.partial(value_and_gradients, call)
    for text in (
        jax.jit(call).lower(query, key, value).as_text(),
        jax.jit(compute).lower(query, key, value, cotangent).as_text(),
    ):
        shapes = {
            tuple(map(int, re.findall(r"\d+(?=x)", shape))) for shape in re.findall(r"tensor<([\dx]+x)f32>", text)
        }
        assert not any(shape.count(tokens) > 1 for shape in shapes), "an array [T, T]"
        # Only query, output, their gradients and their tiles have all heads and the whole head dimension.
        assert max(np.prod(shape) for shape in shapes) <= query.size * (1.2 if packed else 1)
        for line in text.splitlines():
            if "broadcast_in_dim" in line and (found := re.search(r"-> tensor<([\dx]+)x(f32|i1)>", line)):
                size = np.prod([int(n) for n in found[1].split("x")])
                is_constant = "tensor<f32>)" in line or "i1>" in line
                assert is_constant or size < query.size, f"a broadcast of an operand: {line}"


# --- several devices, export --------------------------------------------------------------------------------------


def cpu_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.division("batch", "gradients", operation="block_diagonal", kind="manual")
def test_shard_map_with_replicated_key_and_value_matches_one_device(packed):
    query, key, value, cotangent = random_arrays((4, 20, 4, 8), (1, 20, 2, 8), (1, 20, 2, 8), (4, 20, 4, 8))
    offsets = jnp.asarray([0, 3, 17], jnp.int32)
    rotary = Rotary(*rotary_tables(20, 8))

    def loss(query, key, value, cotangent, offsets, rotary):
        packing = {"sequence_offsets": offsets} if packed else {}
        output = attend(query[0], key[0], value[0], rotary=rotary, **packing)
        return jax.lax.psum(jnp.sum(output * cotangent[0]), "x")

    sharded = jax.shard_map(
        loss,
        mesh=cpu_mesh(),
        in_specs=(P("x"), P(), P(), P("x"), P(), P()),
        out_specs=P(),
    )

    def unsharded(query, key, value, cotangent, offsets, rotary):
        packing = {"sequence_offsets": offsets} if packed else {}
        one = functools.partial(attend, rotary=rotary, **packing)
        return jnp.sum(jax.vmap(one, (0, None, None))(query, key[0], value[0]) * cotangent)

    arguments = (query, key, value, cotangent, offsets, rotary)
    assert_close(
        jax.jit(jax.value_and_grad(sharded, (0, 1, 2)))(*arguments),
        jax.jit(jax.value_and_grad(unsharded, (0, 1, 2)))(*arguments),
        1e-4,
    )


@pytest.mark.division("heads", "gradients", operation="block_diagonal", kind="manual")
def test_shard_map_over_heads_has_second_derivatives():
    query, key, value = random_arrays((2, 20, 4, 8), (2, 20, 4, 8), (2, 20, 4, 8))
    spec = P(None, None, "x")

    def penalty(function, *inputs):
        return jnp.sum(jax.grad(lambda *x: jnp.sum(function(*x) ** 2))(*inputs) ** 2)

    sharded = jax.shard_map(attend, mesh=cpu_mesh(), in_specs=spec, out_specs=spec)
    assert_close(
        jax.jit(jax.grad(functools.partial(penalty, sharded)))(query, key, value),
        jax.jit(jax.grad(functools.partial(penalty, attend)))(query, key, value),
        1e-3,
    )


def explicit_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu"))


@functools.cache
def unsharded(implementation):
    """Return operands, a function of them, and its results on one device."""
    operands = random_arrays((4, 12, 4, 8), (4, 12, 2, 8), (4, 12, 2, 8), (4, 12, 4, 8))
    rotary = Rotary(*random_arrays((4, 12, 4), (4, 12, 4), seed=1), per_token=True)
    call = functools.partial(attend, rotary=rotary, implementation=implementation)
    compute = functools.partial(value_and_gradients, call)
    return operands, compute, compiled_quickly(compute)(*operands)


# Every pair of the three choices occurs in some case, because all combinations would take a minute.
@pytest.mark.parametrize(
    ("spec", "implementation", "is_jitted"),
    [
        (P("x"), None, True),
        (P("x"), "xla", False),
        (P("x"), "reference", True),
        (P(None, None, "y"), None, False),
        (P(None, None, "y"), "xla", True),
        (P(None, None, "y"), "reference", True),
        (P("x", None, "y"), None, True),
        (P("x", None, "y"), "xla", True),
        (P("x", None, "y"), "reference", False),
        (P(("x", "y")), None, False),
        (P(("x", "y")), "xla", True),
        (P(("x", "y")), "reference", True),
        (P(), None, False),
        (P(), "xla", True),
        (P(), "reference", True),
    ],
)
def test_explicit_shardings_match_one_device(spec, implementation, is_jitted):
    """Each device computes its batch rows and heads, and results are sharded like the operands."""
    operands, compute, expected = unsharded(implementation)
    compute = jax.jit(compute) if is_jitted else compute
    with jax.set_mesh(explicit_mesh()):
        operands = [jax.device_put(x, spec) for x in operands]
        actual = compute(*operands)
    for a, operand in zip(actual, (operands[0], *operands[:3]), strict=True):
        assert jax.typeof(a).sharding.spec == jax.typeof(operand).sharding.spec
    assert_close([np.asarray(x) for x in actual], [np.asarray(x) for x in expected], 1e-4)


def test_explicit_shardings_of_the_query_alone_match_one_device():
    """Replicated keys and values follow the query's sharding. Their gradients are summed and replicated."""
    query, key, value, cotangent = random_arrays((4, 12, 4, 8), (4, 12, 2, 8), (4, 12, 2, 8), (4, 12, 4, 8))
    compute = functools.partial(value_and_gradients, attend)
    expected = compute(query, key, value, cotangent)
    with jax.set_mesh(explicit_mesh()):
        query, cotangent = (jax.device_put(x, P("x", None, "y")) for x in (query, cotangent))
        actual = jax.jit(compute)(query, key, value, cotangent)
    assert_close([np.asarray(x) for x in actual], [np.asarray(x) for x in expected], 1e-4)


def test_packed_tokens_sharded_over_heads_of_an_explicit_mesh_match_one_device():
    query, key, value = random_arrays((20, 4, 8), (20, 2, 8), (20, 2, 8))
    offsets = jnp.asarray([0, 3, 17], jnp.int32)
    expected = attend(query, key, value, sequence_offsets=offsets)
    with jax.set_mesh(explicit_mesh()):
        query, key, value = (jax.device_put(x, P(None, "x")) for x in (query, key, value))
        assert_close(np.asarray(attend(query, key, value, sequence_offsets=offsets)), np.asarray(expected))


def test_export_of_gradients_round_trips():
    query, key, value, cotangent = random_arrays((2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), (2, 20, 4, 8))
    compute = functools.partial(value_and_gradients, attend)
    exported = jax.export.export(jax.jit(compute), platforms=["cpu"])(query, key, value, cotangent)
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(query, key, value, cotangent), compute(query, key, value, cotangent))
