"""Key convolution: accuracy of every implementation, and JAX's transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag import key_convolution
from blockdiag.interop import compile_target
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION
from tests.ops.key_convolution_support import ConvolutionCase, assert_accurate, exact_convolution
from tests.support import compiled_quickly, value_and_gradients

IMPLEMENTATIONS = [
    name for name, implementation in KEY_CONVOLUTION.implementations.items() if implementation.why_unavailable() is None
]
needs_triton = pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="triton is not installed")

CASES = {
    "batch": ConvolutionCase(lengths=(37, 37)),
    "size 1": ConvolutionCase(lengths=(5, 5), size=1),
    "size 2, no activation": ConvolutionCase(lengths=(20, 20), size=2, activation=None),
    "size 4, no residual": ConvolutionCase(lengths=(33,), size=4, residual=False),
    "size 5, nothing but the sum": ConvolutionCase(lengths=(40,), size=5, activation=None, residual=False),
    "sequences shorter than the taps": ConvolutionCase(lengths=(3,) * 5, size=8),
    "several tiles": ConvolutionCase(lengths=(300,), size=8, key_heads=1),
    "one token": ConvolutionCase(lengths=(1,), size=5),
    "bfloat16": ConvolutionCase(lengths=(37, 37), dtype="bfloat16", size=5),
    "float16": ConvolutionCase(lengths=(150,), dtype="float16", size=3),
    "bfloat16, weights float32": ConvolutionCase(lengths=(37,), dtype="bfloat16", weights_dtype="float32"),
    "odd channels": ConvolutionCase(lengths=(20,), key_heads=3, head_dim=7),
    "one channel": ConvolutionCase(lengths=(20,), key_heads=1, head_dim=1),
    "many channels": ConvolutionCase(lengths=(9,), key_heads=5, head_dim=264),
    "offsets": ConvolutionCase(lengths=(3, 0, 40, 1, 130), layout="offsets", padding=7, size=5),
    "offsets, short sequences, bfloat16": ConvolutionCase(
        lengths=(1, 2, 0, 0, 17), layout="offsets", padding=20, size=8, dtype="bfloat16"
    ),
    "offsets, no padding": ConvolutionCase(lengths=(128, 129, 127), layout="offsets", size=4, key_heads=1),
    "no sequences": ConvolutionCase(lengths=(), layout="offsets", padding=20),
}
SMALL = ConvolutionCase(lengths=(3, 0, 17, 2), layout="offsets", padding=10, size=3, key_heads=1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_accurate(name, implementation):
    case = CASES[name]
    operands = case.operands()
    assert_accurate(case.results(implementation), exact_convolution(case, operands), operands)


@needs_triton
def test_weight_gradient_summed_in_several_steps_is_accurate(monkeypatch):
    from blockdiag.triton_kernels.key_convolution import plans as kernels

    monkeypatch.setattr(kernels, "_SUM_ROWS", 4)
    case = ConvolutionCase(lengths=(3,) * 6, size=1, key_heads=1, activation=None, residual=False)
    operands = case.operands()
    assert_accurate(case.results("triton"), exact_convolution(case, operands), operands)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["batch", "offsets"])
def test_float64_results_are_accurate(name, implementation):
    case = dataclasses.replace(CASES[name], dtype="float64")
    with jax.enable_x64(True):
        operands = case.operands()
        assert_accurate(case.results(implementation), exact_convolution(case, operands), operands)


def test_the_last_row_of_weights_belongs_to_the_current_token():
    key = jnp.arange(1.0, 6.0).reshape(5, 1, 1)
    for lag in range(3):
        weights = jnp.zeros((3, 1, 1)).at[2 - lag].set(1.0)
        output = key_convolution(key, weights, activation=None, residual=False)
        np.testing.assert_array_equal(output.ravel(), [0] * lag + list(range(1, 6 - lag)))


def test_zero_weights_return_the_key():
    key, weights, _ = CASES["bfloat16"].operands()
    np.testing.assert_array_equal(key_convolution(key, jnp.zeros_like(weights)), key)


@functools.cache
def small_call(implementation):
    """Return the compiled call of `SMALL` and its results."""
    run = compiled_quickly(functools.partial(value_and_gradients, SMALL.convolve(implementation)))
    return run, run(*SMALL.operands())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_sequence(implementation, poison):
    case = SMALL
    *inputs, cotangent = case.operands()
    rows = np.zeros(case.tokens, bool)
    rows[3:20] = True  # the third sequence; its neighbours are clean
    rows[-case.padding :] = True
    key, poisoned_cotangent = (jnp.where(rows[:, None, None], poison, x) for x in (inputs[0], cotangent))
    run, clean = small_call(implementation)
    dirty = run(key, inputs[1], poisoned_cotangent)
    for before, after in zip(clean[:2], dirty[:2], strict=True):
        before, after = np.asarray(before), np.asarray(after)
        np.testing.assert_array_equal(after[~rows], before[~rows])
        assert not after[-case.padding :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_padding_reaches_no_gradient(implementation):
    case = SMALL
    key, weights, cotangent = case.operands()
    run, clean = small_call(implementation)
    dirty = run(key.at[-case.padding :].set(jnp.nan), weights, cotangent.at[-case.padding :].set(jnp.nan))
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(after, before)


@functools.cache
def call_with_offsets(implementation):
    """Return the compiled call with offsets among its arguments."""

    def convolve(key, weights, offsets, cotangent):
        call = functools.partial(key_convolution, sequence_offsets=offsets, implementation=implementation)
        return value_and_gradients(call, key, weights, cotangent)

    return compiled_quickly(convolve)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "reference"])
@pytest.mark.parametrize("offsets", [[5, 12], [0, 18, 6, 21], [-4, 7, 59], [7], [0, 0, 0]])
def test_traced_invalid_offsets_are_clipped_and_sorted(offsets, implementation):
    """Offsets are clipped and made non-decreasing.

    Rows before the first offset and after the last one belong to no sequence.
    """
    key, weights, cotangent = ConvolutionCase(lengths=(24,), size=4).operands()
    operands = key[0], weights, jnp.asarray(offsets, jnp.int32), cotangent[0]
    edges = np.maximum.accumulate(np.clip(offsets, 0, 24))
    expected = [np.asarray(x) for x in call_with_offsets("reference")(*operands)]
    assert not expected[0][: edges[0]].any() and not expected[0][edges[-1] :].any()
    assert_close([np.asarray(x) for x in call_with_offsets(implementation)(*operands)], expected)


@pytest.mark.parametrize("shape", [(0, 20, 2, 8), (2, 0, 2, 8), (0, 2, 8)])
@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_empty_operands_keep_their_shape(shape, implementation):
    call = functools.partial(key_convolution, implementation=implementation)
    output, d_key, d_weights = value_and_gradients(call, jnp.zeros(shape), jnp.ones((3, 2, 8)), jnp.zeros(shape))
    assert output.shape == d_key.shape == shape and not d_weights.any()


@needs_triton
def test_kernels_repeat_bitwise():
    run, results = small_call("triton")
    for first, second in zip(run(*SMALL.operands()), results, strict=True):
        np.testing.assert_array_equal(first, second)


# --- transformations ------------------------------------------------------------------------------------------------


def arrays(*shapes, seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.normal(size=shape).astype(np.float32)) for shape in shapes]


def assert_close(actual, expected, tolerance=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


def loop(function, in_axes, *operands):
    """Call the function once for each element and stack the results, which defines `jax.vmap`."""
    size = next(x.shape[axis] for x, axis in zip(operands, in_axes, strict=True) if axis is not None)
    results = []
    for i in range(size):
        picked = (x if axis is None else jnp.take(x, i, axis) for x, axis in zip(operands, in_axes, strict=True))
        results.append(function(*picked))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


VMAP_AXES = [(0, None), (1, 0), (None, 2), (0, 3)]


@pytest.mark.parametrize(
    ("in_axes", "implementation"),
    [*((axes, "xla") for axes in VMAP_AXES), pytest.param((0, None), "triton", marks=needs_triton)],
)
def test_vmap_of_batched_keys_matches_a_loop(in_axes, implementation):
    shapes = ((2, 19, 2, 8), (3, 2, 8))
    operands = arrays(*(s if a is None else (*s[:a], 2, *s[a:]) for s, a in zip(shapes, in_axes, strict=True)))

    def function(key, weights, implementation="xla"):
        call = functools.partial(key_convolution, implementation=implementation)
        return value_and_gradients(call, key, weights, jnp.cos(key))

    mapped = jax.vmap(functools.partial(function, implementation=implementation), in_axes)
    assert_close(jax.jit(mapped)(*operands), loop(function, in_axes, *operands))


@pytest.mark.parametrize(
    ("offsets_axis", "weights_axis", "implementation"),
    [
        (0, 0, "xla"),
        (0, None, "xla"),
        (None, 0, "xla"),
        (None, None, "xla"),
        pytest.param(0, 0, "triton", marks=needs_triton),
    ],
)
def test_vmap_of_packed_keys_matches_a_loop(offsets_axis, weights_axis, implementation):
    key, weights = arrays((2, 20, 1, 8), (2, 3, 1, 8))
    weights = weights if weights_axis == 0 else weights[0]
    offsets = jnp.asarray([[0, 5, 5, 18], [0, 1, 2, 20]], jnp.int32)
    offsets = offsets if offsets_axis == 0 else offsets[0]

    def function(key, weights, offsets, implementation="xla"):
        call = functools.partial(key_convolution, sequence_offsets=offsets, implementation=implementation)
        return value_and_gradients(call, key, weights, jnp.cos(key))

    in_axes = (0, weights_axis, offsets_axis)
    mapped = jax.vmap(functools.partial(function, implementation=implementation), in_axes)
    assert_close(jax.jit(mapped)(key, weights, offsets), loop(function, in_axes, key, weights, offsets))


def test_nested_vmap_matches_a_loop():
    key, weights = arrays((2, 3, 12, 2, 8), (2, 3, 2, 8))
    inner, outer = (0, None), (0, 0)
    actual = jax.vmap(jax.vmap(key_convolution, inner), outer)(key, weights)
    assert_close(actual, loop(functools.partial(loop, key_convolution, inner), outer, key, weights))


def test_gradient_of_vmap_with_shared_weights_matches_a_loop():
    key, weights, cotangent = arrays((3, 20, 2, 8), (3, 2, 8), (3, 20, 2, 8))
    mapped = jax.vmap(key_convolution, (0, None))
    looped = functools.partial(loop, key_convolution, (0, None))
    assert_close(
        value_and_gradients(mapped, key, weights, cotangent), value_and_gradients(looped, key, weights, cotangent)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives_match_the_reference(packed):
    key, weights = arrays((20, 2, 4), (3, 2, 4))
    packing = {"sequence_offsets": jnp.asarray([0, 3, 3, 17], jnp.int32)} if packed else {}

    def penalty(implementation, key, weights):
        def total(key, weights):
            return jnp.sum(jnp.sin(key_convolution(key, weights, implementation=implementation, **packing)))

        return sum(jnp.sum(g**2) for g in jax.grad(total, (0, 1))(key, weights))

    actual, expected = (
        jax.jit(jax.grad(functools.partial(penalty, name), (0, 1)))(key, weights) for name in ("xla", "reference")
    )
    assert_close(actual, expected, 1e-4)


def test_forward_mode_raises_type_error_except_in_the_reference():
    key, weights = arrays((9, 2, 4), (3, 2, 4))
    reference = functools.partial(key_convolution, implementation="reference")
    _, tangent = jax.jvp(reference, (key, weights), (key, weights))
    step = 1e-2
    difference = reference(key * (1 + step), weights * (1 + step)) - reference(key * (1 - step), weights * (1 - step))
    assert_close(tangent, difference / (2 * step), 5e-3)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(key_convolution, (key, weights), (key, weights))


def test_offsets_have_no_gradient():
    key, weights = arrays((9, 2, 4), (3, 2, 4))

    def total(offsets):
        return key_convolution(key, weights, sequence_offsets=offsets).sum()

    assert jax.grad(total, allow_int=True)(jnp.asarray([0, 9], jnp.int32)).dtype == jax.dtypes.float0


def test_residuals_are_the_operands():
    key, weights = arrays((64, 2, 8), (3, 2, 8))
    offsets = jnp.asarray([0, 10, 64], jnp.int32)
    _, pull_back = jax.vjp(functools.partial(key_convolution, sequence_offsets=offsets), key, weights)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.dtype == jnp.float32]
    assert sorted(x.size for x in kept) == sorted(x.size for x in (key, weights))


def test_scan_over_checkpointed_layers_matches_the_reference():
    key, weights = arrays((2, 16, 2, 8), (3, 3, 2, 8))

    def loss(implementation, weights):
        @jax.checkpoint
        def layer(x, weight):
            return key_convolution(x, weight, implementation=implementation), None

        return jnp.sum(jax.lax.scan(layer, key, weights)[0] ** 2)

    assert_close(*(jax.jit(jax.grad(functools.partial(loss, name)))(weights) for name in ("xla", "reference")), 1e-3)


def test_new_offsets_do_not_recompile():
    from blockdiag.ops.key_convolution.api import _convolve_tokens

    key, weights = arrays((40, 2, 8), (3, 2, 8))
    key_convolution(key, weights, sequence_offsets=jnp.asarray([0, 10, 40], jnp.int32))
    before = _convolve_tokens._cache_size()
    key_convolution(key, weights, sequence_offsets=jnp.asarray([0, 0, 7], jnp.int32))
    assert _convolve_tokens._cache_size() == before


@needs_triton
@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 3), ("float64", 0)])
def test_training_step_launches_three_kernels_and_none_in_float64(dtype, expected):
    """The kernels compute the forward pass, the backward pass and the sum of the weight gradient."""
    with jax.enable_x64(True):
        key, weights, cotangent = dataclasses.replace(CASES["batch"], dtype=dtype).operands()
        step = jax.jit(functools.partial(value_and_gradients, key_convolution))
        with compile_target(90):
            lowered = step.trace(key, weights, cotangent).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("triton_kernel_call_ffi") == expected


@pytest.mark.division("batch", "gradients", operation="key_convolution", kind="manual")
def test_shard_map_with_replicated_weights_matches_one_device():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu"))
    key, weights, cotangent = arrays((4, 20, 2, 8), (3, 2, 8), (4, 20, 2, 8))
    offsets = jnp.asarray([0, 3, 17], jnp.int32)

    def loss(key, weights, cotangent, offsets):
        output = key_convolution(key[0], weights, sequence_offsets=offsets)
        return jax.lax.psum(jnp.sum(output * cotangent[0]), "x")

    def unsharded(key, weights, cotangent, offsets):
        one = functools.partial(key_convolution, sequence_offsets=offsets)
        return jnp.sum(jax.vmap(one, (0, None))(key, weights) * cotangent)

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), P(), P("x"), P()), out_specs=P())
    operands = (key, weights, cotangent, offsets)
    assert_close(*(jax.jit(jax.value_and_grad(f, (0, 1)))(*operands) for f in (sharded, unsharded)), 1e-4)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "y"), P("x", None, "y"), P()])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_explicit_shardings_match_one_device(spec, is_jitted):
    key, weights, cotangent = arrays((4, 12, 2, 8), (3, 2, 8), (4, 12, 2, 8))
    compute = functools.partial(value_and_gradients, key_convolution)
    expected = compute(key, weights, cotangent)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        operands = [jax.device_put(key, spec), weights, jax.device_put(cotangent, spec)]
        actual = (jax.jit(compute) if is_jitted else compute)(*operands)
        assert jax.typeof(actual[0]).sharding.spec == jax.typeof(operands[0]).sharding.spec
        with pytest.warns(UserWarning, match="`key_convolution`: axis 1 of an operand is sharded over x"):
            gathered = key_convolution(jax.device_put(key, P(None, "x")), weights)
        assert_close([np.asarray(gathered)], [np.asarray(expected[0])], 1e-4)
    assert_close([np.asarray(x) for x in actual], [np.asarray(x) for x in expected], 1e-4)


def test_export_of_gradients_round_trips():
    operands = CASES["batch"].operands()
    compute = functools.partial(value_and_gradients, key_convolution)
    exported = jax.export.export(jax.jit(compute), platforms=["cpu"])(*operands)
    assert_close(jax.export.deserialize(exported.serialize()).call(*operands), compute(*operands))


# --- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "key of rank 2": ({"key": (20, 8)}, r"`key` must have shape \[B, T, K, H\] or \[T, K, H\], got \(20, 8\)"),
    "no heads": ({"key": (20, 0, 8), "weights": (3, 0, 8)}, "`key` must have at least one head"),
    "integers": ({"key_dtype": jnp.int32}, "`key` must have one of the dtypes"),
    "other heads": ({"weights": (3, 1, 8)}, r"`weights` must have shape \(size, 2, 8\) .* got \(3, 1, 8\)"),
    "no taps": ({"weights": (0, 2, 8)}, r"with size 1..8 .* got \(0, 2, 8\)"),
    "too many taps": ({"weights": (9, 2, 8)}, r"with size 1..8 .* got \(9, 2, 8\)"),
    "weights of rank 2": ({"weights": (3, 8)}, r"got \(3, 8\); the last row belongs to the current token"),
    "other dtype": ({"weights_dtype": jnp.float16}, "`weights` must have the dtype of `key`, bfloat16, or float32"),
    "activation": ({"activation": "relu"}, "`activation` must be \"silu\" or None, got 'relu'"),
    "residual": ({"residual": 1}, "`residual` must be True or False, known when tracing, got 1"),
    "offsets of a batch": (
        {"key": (2, 20, 2, 8), "sequence_offsets": [0, 20]},
        r"`sequence_offsets` describes one packed token axis, key \[T, K, H\], got a key of shape \(2, 20, 2, 8\)",
    ),
    "offsets beyond": ({"sequence_offsets": [0, 21]}, "must end within the 20 tokens of `key`, got 21"),
    "offsets decrease": ({"sequence_offsets": [0, 9, 8]}, "`sequence_offsets` must not decrease, got 9 then 8"),
    "offsets start late": ({"sequence_offsets": [1, 9]}, "`sequence_offsets` must start with 0, got 1"),
    "implementation": ({"implementation": "pallas"}, r"one of \['reference', 'xla', 'triton'\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_value_error(name):
    changes, message = MISTAKES[name]
    options = dict(changes)
    key = jnp.zeros(options.pop("key", (20, 2, 8)), options.pop("key_dtype", jnp.bfloat16))
    weights = jnp.zeros(options.pop("weights", (3, 2, 8)), options.pop("weights_dtype", jnp.bfloat16))
    if "sequence_offsets" in options:
        options["sequence_offsets"] = jnp.asarray(options["sequence_offsets"], jnp.int32)
    with pytest.raises(ValueError, match=message):
        key_convolution(key, weights, **options)


def test_weights_of_another_dtype_than_float64_raise_value_error():
    with jax.enable_x64(True):
        for key_dtype, weights_dtype in (("float64", "float32"), ("float32", "float64")):
            with pytest.raises(ValueError, match="`weights` must have the dtype of `key`"):
                key_convolution(jnp.zeros((4, 1, 8), key_dtype), jnp.zeros((3, 1, 8), weights_dtype))


@needs_triton
def test_kernels_decline_float64():
    with jax.enable_x64(True):
        key, weights = jnp.zeros((4, 1, 8), jnp.float64), jnp.zeros((3, 1, 8), jnp.float64)
        with pytest.raises(NotImplementedError, match="float64; use implementation='xla'"):
            key_convolution(key, weights, implementation="triton")
        assert key_convolution(key, weights, implementation=("triton", "xla")).shape == key.shape
