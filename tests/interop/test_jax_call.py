"""The JAX launch path without a GPU: lowering for CUDA, export, transformations, and the interpreter."""

import os
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import blockdiag
from blockdiag.interop import EXPORT_DISABLED_CHECKS, compile_target, jax_call
from blockdiag.interop.jax_call import available, launch, launch_alone, launch_together
from blockdiag.triton_kernels.launch import compile as compile_module
from blockdiag.triton_kernels.launch.plan import Target
from tests.interop.bridge_kernels import AddSpec, GluonCopySpec, HalvesSpec, IncrementSpec, MatmulSpec

CALL = "stablehlo.custom_call @triton_kernel_call_ffi"


def add(x, y, **options):
    return launch(AddSpec(x.size), x, y, **options)[0]


def lowered_text(function, *arrays, arch=90) -> str:
    with compile_target(arch):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def vector():
    return jnp.arange(1000, dtype=jnp.float32)


@pytest.mark.versions
def test_jax_launch_is_available():
    assert available() is None


@pytest.mark.versions
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_launch_lowers_for_cuda_without_a_gpu(arch, vector):
    text = lowered_text(add, vector, vector, arch=arch)
    assert text.count(CALL) == 1
    assert "mhlo.backend_config = {opaque = " in text
    assert "has_side_effect = true" not in text


def test_traces_for_different_targets_are_cached_separately():
    a, b = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    function = jax.jit(lambda a, b: launch(MatmulSpec(64, 64, 64), a, b)[0])

    def text():
        return function.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()

    with compile_target(80):
        ampere = text()
    with compile_target(100):
        blackwell = text()
        with compile_target(80):
            assert text() == ampere
        assert text() == blackwell
    assert ampere != blackwell


def test_lowering_without_a_target_or_gpu_raises_runtime_error_with_a_remedy(vector):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this machine has a GPU to compile for")
    with pytest.raises(RuntimeError, match=r"inside blockdiag.interop.compile_target\(arch\)"):
        jax.jit(add).trace(vector, vector).lower(lowering_platforms=("cuda",))


def test_compile_target_of_an_unknown_architecture_raises_value_error():
    with pytest.raises(ValueError, match="`arch` must be one of"):
        compile_target(42)
    with compile_target(42, num_sms=7):
        pass


def test_launch_on_a_cpu_without_interpret_raises_not_implemented_error(vector):
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(NotImplementedError, match="interpret=True"):
        jax.jit(add)(vector, vector)


@pytest.mark.versions
def test_interpreted_launch_matches_numpy_eagerly_and_under_jit(vector):
    expected = np.asarray(vector * 1.5)
    for function in (add, jax.jit(add, static_argnames="interpret")):
        np.testing.assert_array_equal(function(vector, vector, interpret=True), expected)


def test_interpreted_bfloat16_matmul_matches_float32():
    x = jnp.arange(64 * 64, dtype=jnp.bfloat16).reshape(64, 64) / 4096
    (product,) = jax.jit(lambda a, b: launch(MatmulSpec(64, 64, 64), a, b, interpret=True))(x, x.T)
    assert product.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float32) @ np.asarray(x.T, np.float32)
    np.testing.assert_allclose(np.asarray(product, np.float32), exact, rtol=2**-8)


def test_aliased_input_keeps_its_value():
    values = jnp.arange(300, dtype=jnp.int32)

    @jax.jit
    def increment(values):
        after, sums = launch(IncrementSpec(300), values, interpret=True)
        return values, after, sums

    before, after, sums = increment(values)
    np.testing.assert_array_equal(before, np.arange(300))
    np.testing.assert_array_equal(after, np.arange(300) + 1)
    np.testing.assert_array_equal(sums, [block.sum() for block in np.split(np.arange(300), [128, 256])])


def test_aliases_reach_the_custom_call():
    text = lowered_text(lambda values: launch(IncrementSpec(300), values), jnp.zeros(300, jnp.int32))
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 0" in text


def test_launches_carry_their_estimated_latency():
    """XLA uses this estimate to schedule transfers between devices during a launch."""

    def nanoseconds(tokens):
        x = jax.ShapeDtypeStruct((tokens, 1, 64), jnp.bfloat16)
        with compile_target(90):
            attend = jax.jit(lambda x: blockdiag.block_diagonal_attention(x, x, x, block_size=8192))
            text = attend.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        (found,) = re.findall(r'latency_metadata = "(\d+)"', text)
        return int(found)

    # The latency is 1 us, plus an eighth of the time for two products of 8192 x 4096 x 64 at 400 TFLOP/s and for 4.2 MB
    # at 3 TB/s.
    assert nanoseconds(8192) == pytest.approx(1000 + (2 * 2 * 8192 * 4096 * 64 / 4e5 + 4.2e6 / 3e3) / 8, rel=0.01)
    assert nanoseconds(4 * 8192) == pytest.approx(4 * nanoseconds(8192) - 3000, rel=0.01)


def test_output_used_by_two_parameters_is_allocated_once():
    x = jnp.ones((80, 64), jnp.float16)
    text = lowered_text(lambda x: launch(HalvesSpec(80), x), x)
    assert "stablehlo.custom_call @AllocateBuffer" in text
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 1" in text
    np.testing.assert_array_equal(launch(HalvesSpec(80), x, interpret=True)[0], 2 * x)


@pytest.mark.versions
def test_gluon_kernel_lowers():
    x = jnp.ones((80, 64), jnp.float16)
    assert CALL in lowered_text(lambda x: launch(GluonCopySpec(80), x), x)
    with pytest.raises(NotImplementedError, match="Gluon"):
        from blockdiag.interop.interpreter.launch import interpret

        interpret(GluonCopySpec(80), np.asarray(x))


def test_mismatched_arrays_raise_value_error(vector):
    with pytest.raises(ValueError, match="takes 2 arrays, got 1"):
        launch(AddSpec(1000), vector)
    with pytest.raises(ValueError, match=r"array 1 must be float32\[1000\], got float32\[999\]"):
        launch(AddSpec(1000), vector, vector[1:])
    with pytest.raises(ValueError, match=r"array 0 must be float32\[1000\], got int32\[1000\]"):
        launch(AddSpec(1000), vector.astype(jnp.int32), vector)


def test_launch_under_grad_or_vmap_raises_not_implemented_error(vector):
    with pytest.raises(NotImplementedError, match=r"jax\.custom_vjp"):
        jax.jvp(lambda x: add(x, x), (vector,), (vector,))
    with pytest.raises(NotImplementedError, match=r"jax\.custom_vjp"):
        jax.grad(lambda x: add(x, x).sum())(vector)
    with pytest.raises(NotImplementedError, match="custom_vmap"):
        jax.vmap(lambda x: add(x, x))(jnp.stack([vector, vector]))


def add_with_gradient(x, y):
    """Compute x + y / 2 with launches for both the sum and its gradient."""

    @jax.custom_vjp
    def function(x, y):
        return add(x, y, interpret=True)

    def backward(residuals, cotangent):
        zeros = jnp.zeros_like(cotangent)
        return add(cotangent, zeros, interpret=True), add(zeros, cotangent, interpret=True)

    function.defvjp(lambda x, y: (function(x, y), None), backward)
    return function(x, y)


def test_gradient_through_custom_vjp_and_checkpoint_matches_the_reference(vector):
    def loss(x):
        return jnp.sum(jax.checkpoint(add_with_gradient)(jnp.sin(x), x) ** 2)

    def exact(x):
        return jnp.sum((jnp.sin(x) + x / 2) ** 2)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(vector), jax.grad(exact)(vector), rtol=1e-5, atol=1e-3)


def test_checkpoint_repeats_only_the_necessary_launches(vector):
    @jax.custom_vjp
    def function(x):
        return add(x, x)

    function.defvjp(lambda x: (add(x, x), x), lambda x, cotangent: (add(cotangent, x),))

    def launches(transform) -> int:
        squared = transform(lambda x: function(jnp.sin(x)) ** 2)
        return lowered_text(jax.value_and_grad(lambda x: jnp.sum(squared(x))), vector).count(CALL)

    assert launches(lambda f: f) == 2
    assert launches(jax.checkpoint) == 3


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


SHARDED, REPLICATED = PartitionSpec("data"), PartitionSpec()


def interpreted_add(x, y):
    return add(x, y, interpret=True)


def test_shard_map_marks_outputs_as_varying(mesh, vector):
    outputs = jax.jit(jax.shard_map(interpreted_add, mesh=mesh, in_specs=(SHARDED, SHARDED), out_specs=SHARDED))(
        vector, vector
    )
    np.testing.assert_array_equal(outputs, vector * 1.5)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(interpreted_add, mesh=mesh, in_specs=(SHARDED, SHARDED), out_specs=REPLICATED))(
            vector, vector
        )


def test_shard_map_accepts_sharded_and_replicated_inputs(mesh, vector):
    small = vector[:250]
    outputs = jax.jit(jax.shard_map(interpreted_add, mesh=mesh, in_specs=(SHARDED, REPLICATED), out_specs=SHARDED))(
        vector, small
    )
    np.testing.assert_array_equal(outputs, vector + jnp.tile(small, 4) / 2)


def test_replicated_inputs_give_replicated_outputs(mesh, vector):
    outputs = jax.jit(
        jax.shard_map(interpreted_add, mesh=mesh, in_specs=(REPLICATED, REPLICATED), out_specs=REPLICATED)
    )(vector, vector)
    np.testing.assert_array_equal(outputs, vector * 1.5)


@pytest.mark.versions
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_shard_map_matches_the_reference(mesh, vector, check_vma):
    def loss(x, y):
        # custom_vjp needs operands that vary over the same axes. The transpose of pcast sums the cotangent of a shared
        # operand.
        y = jax.lax.pcast(y, "data", to="varying") if check_vma else y
        return jax.lax.psum(jnp.sum(add_with_gradient(x, y) ** 2), "data")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(SHARDED, REPLICATED), out_specs=REPLICATED, check_vma=check_vma)
    small = vector[:250]
    x_gradient, y_gradient = jax.jit(jax.grad(sharded, argnums=(0, 1)))(vector, small)
    total = vector + jnp.tile(small, 4) / 2
    np.testing.assert_allclose(x_gradient, 2 * total, rtol=1e-6)
    np.testing.assert_allclose(y_gradient, total.reshape(4, 250).sum(0), rtol=1e-6)


def test_gradient_within_shard_map_matches_the_reference(mesh, vector):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(add_with_gradient(x, x)))(x)

    outputs = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED))(vector)
    np.testing.assert_array_equal(outputs, jnp.full_like(vector, 1.5))


def test_shard_map_lowers_for_cuda(mesh, vector):
    function = jax.shard_map(add, mesh=mesh, in_specs=(SHARDED, SHARDED), out_specs=SHARDED)
    assert re.search(CALL + r".*tensor<250xf32>", lowered_text(function, vector, vector))


def test_shard_map_on_an_explicit_mesh_keeps_the_sharding(vector):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(vector, jax.NamedSharding(mesh, SHARDED))
        function = jax.shard_map(interpreted_add, in_specs=(SHARDED, SHARDED), out_specs=SHARDED)
        outputs = jax.jit(function)(sharded, sharded)
        assert jax.typeof(outputs).sharding.spec == SHARDED
    np.testing.assert_array_equal(outputs, vector * 1.5)


@pytest.mark.versions
def test_export_without_the_disabled_check_raises_value_error(vector):
    with compile_target(90):
        exported = jax.export.export(jax.jit(add), platforms=("cuda",), disabled_checks=EXPORT_DISABLED_CHECKS)(
            vector, vector
        )
    assert CALL in exported.mlir_module()
    with compile_target(90), pytest.raises(ValueError, match="triton_kernel_call_ffi"):
        jax.export.export(jax.jit(add), platforms=("cuda",))(vector, vector)


def test_exported_launch_serialises(vector):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    with compile_target(90):
        exported = jax.export.export(jax.jit(add), platforms=("cuda",), disabled_checks=EXPORT_DISABLED_CHECKS)(
            vector, vector
        )
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",) and again.out_avals == exported.out_avals


def test_platform_dependent_takes_the_branch_of_its_platform(vector):
    def function(x):
        return jax.lax.platform_dependent(x, cuda=lambda x: add(x, x), default=lambda x: x * 1.5)

    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(jax.jit(function)(vector), vector * 1.5)
    assert CALL in lowered_text(function, vector)


def test_interpreted_launches_of_one_program_run_in_many_threads():
    x = jnp.ones(1 << 16)

    @jax.jit
    def function(x):
        parts = [launch(AddSpec(1 << 16, alpha=float(k), block=1 << 14), x, x, interpret=True)[0] for k in range(6)]
        return sum(parts)

    np.testing.assert_array_equal(function(x), jnp.full(1 << 16, 6.0 + sum(range(6))))


def test_launch_with_x64_enabled_keeps_float32(vector):
    with jax.enable_x64(True):
        outputs = jax.jit(add, static_argnames="interpret")(vector, vector, interpret=True)
        assert outputs.dtype == jnp.float32
        assert CALL in lowered_text(add, vector, vector)
    np.testing.assert_array_equal(outputs, vector * 1.5)


def test_launch_inside_scan_matches_the_reference(vector):
    def body(carry, _):
        return add(carry, carry, interpret=True), None

    outputs, _ = jax.jit(lambda x: jax.lax.scan(body, x, length=3))(vector)
    np.testing.assert_allclose(outputs, vector * 1.5**3)


def three(x, y, *, interpret=False):
    """Compute x + k y for three k by independent launches."""
    launches = [(AddSpec(x.size, alpha=alpha, block=block), (x, y)) for alpha, block in ((1, 128), (2, 256), (3, 512))]
    return [result for (result,) in launch_together(launches, interpret=interpret)]


@pytest.fixture
def compiled_together(monkeypatch):
    """Return a list with the block sizes of the kernels in each call of `compile_together`."""
    calls, compile_together = [], compile_module.compile_together

    def watched(launches, *, made=None):
        calls.append([plan.arguments["BLOCK"].value for plan, _ in launches])
        return compile_together(launches, made=made)

    monkeypatch.setattr(compile_module, "compile_together", watched)
    return calls


@pytest.mark.versions
def test_launch_together_equals_separate_launches(vector, compiled_together):
    def alone(x, y):
        specs = [AddSpec(x.size, alpha=alpha, block=block) for alpha, block in ((1, 128), (2, 256), (3, 512))]
        return [launch(spec, x, y)[0] for spec in specs]

    def calls(function):
        return re.findall(r"opaque = (\"[^\"]*\")", lowered_text(function, vector, vector))

    found = calls(lambda x, y: three(x, y))
    assert found == calls(alone) and len(found) == 3
    assert compiled_together == [[128, 256, 512]]
    for transform in (lambda f: f, jax.jit):
        found = transform(lambda x, y: three(x, y, interpret=True))(vector, vector)
        for k, result in enumerate(found, 1):
            np.testing.assert_array_equal(result, vector * (1 + k))


def test_nothing_is_compiled_before_lowering(vector, monkeypatch):
    def fail(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(compile_module, "_compile", fail)
    monkeypatch.setattr(compile_module, "_compiled", {})
    with compile_target(90):
        assert [x.shape for x in jax.eval_shape(three, vector, vector)] == [(1000,)] * 3
        traced = jax.jit(lambda x, y: three(x, y)).trace(vector, vector)
        with pytest.raises(AssertionError, match="compiled"):
            traced.lower(lowering_platforms=("cuda",))


def test_unused_launches_are_not_compiled(vector, compiled_together):
    text = lowered_text(lambda x, y: three(x, y)[::2], vector, vector)
    assert text.count(CALL) == 2 and compiled_together == [[128, 512]]
    assert lowered_text(lambda x, y: jnp.sin(x) if three(x, y) else x, vector, vector).count(CALL) == 0
    assert len(compiled_together) == 1


def test_launch_together_with_unsupported_use_raises(vector):
    with pytest.raises(NotImplementedError, match=r"kernel 'add'.*jax\.custom_vjp"):
        jax.jvp(three, (vector, vector), (vector, vector))
    with pytest.raises(NotImplementedError, match=r"kernel 'add'.*custom_vmap"):
        jax.vmap(three)(jnp.stack([vector, vector]), jnp.stack([vector, vector]))
    with pytest.raises(ValueError, match="array 1 must be"):
        launch_together([(AddSpec(1000), (vector, vector)), (AddSpec(1000), (vector, vector[1:]))])


def test_launch_together_runs_in_shard_map(mesh, vector):
    def summed(x, y):
        return sum(three(x, y, interpret=True))

    function = jax.shard_map(summed, mesh=mesh, in_specs=(SHARDED, REPLICATED), out_specs=SHARDED)
    expected = 3 * vector + 6 * jnp.tile(vector[:250], 4)
    np.testing.assert_array_equal(jax.jit(function)(vector, vector[:250]), expected)
    on_cuda = jax.shard_map(lambda x, y: sum(three(x, y)), mesh=mesh, in_specs=(SHARDED, SHARDED), out_specs=SHARDED)
    assert lowered_text(on_cuda, vector, vector).count(CALL) == 3
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(NotImplementedError, match="interpret=True"):
        jax.jit(three)(vector, vector)


@pytest.fixture
def compiled_names(monkeypatch):
    """Return lists with the names of the plans in each call of `compile_ahead` and of `compile_together`."""
    ahead, together = [], []

    def watched(launches, *, made=None):
        together.append([plan.name for plan, _ in launches])
        return [compile_module.compile_plan(*launch) for launch in launches]

    monkeypatch.setattr(compile_module, "compile_together", watched)
    monkeypatch.setattr(
        compile_module, "compile_ahead", lambda launches, *, made=None: ahead.append([p.name for p, _ in launches])
    )
    return ahead, together


@pytest.fixture
def assembled(monkeypatch):
    """Return a list of the launches that are assembled in the background, on a simulated H100 with an empty cache."""
    monkeypatch.setattr(compile_module, "_compiled", {})
    monkeypatch.setattr(jax_call, "session_target", lambda: Target.for_arch(90))
    found = []
    monkeypatch.setattr(compile_module, "in_background", lambda function, *launch: found.append(launch))
    return found


def text_for_own_gpu(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_kernels_for_the_gpu_of_the_process_are_assembled_ahead(vector, assembled):
    (text,) = {text_for_own_gpu(lambda x: launch(AddSpec(x.size), x, x), vector) for _ in range(2)}
    ((plan, target),) = assembled
    assert target == Target.for_arch(90)
    # jaxlib identifies a kernel by this string, whichever program contains it.
    (words,) = set(re.findall('opaque = "([^"]+)"', text))
    assert words in text_for_own_gpu(launch_alone(plan, target), vector, vector)


def test_launch_together_kernels_are_assembled_ahead(vector, assembled):
    text_for_own_gpu(
        lambda x: launch_together([(AddSpec(x.size), (x, x)), (AddSpec(x.size, block=128), (x, x))]), vector
    )
    assert len({id(plan) for plan, _ in assembled}) == len(assembled) == 2


def test_kernels_for_another_gpu_are_not_assembled(vector, assembled):
    with compile_target(90):
        text_for_own_gpu(lambda x: launch(AddSpec(x.size), x, x), vector)
    assert not assembled


def test_kernels_of_programs_in_the_compilation_cache_are_not_assembled_ahead(vector, assembled, tmp_path):
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        text_for_own_gpu(lambda x: launch(AddSpec(x.size), x, x), vector)
    finally:
        jax.config.update("jax_compilation_cache_dir", former)
    assert not assembled


def test_backward_kernels_of_a_fused_region_are_compiled_with_the_forward_kernel(compiled_names):
    from tests.fusion.resident_cases import CASES

    ahead, together = compiled_names
    backward = ["fused_rows", "fused_columns", "fused_pairs"]
    case = CASES["one_chunk"]
    arrays = case.inputs()
    fused = blockdiag.fuse(case.function, implementation="triton")

    def loss(given):
        return fused(**given).astype(jnp.float32).sum()

    with compile_target(80):
        jax.eval_shape(jax.grad(loss), arrays)
        assert ahead == together == []
        traced = jax.jit(jax.grad(loss)).trace(arrays)
        assert ahead == together == []
        traced.lower(lowering_platforms=("cuda",))
    # Lowering the forward launch starts compiling the backward kernels; later launches have few left to start.
    assert ahead[0] == backward and together == [backward]


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        (90, {"fused_rows_and_pairs_resident", "fused_columns_resident"}),
        (80, {"fused_rows", "fused_columns", "fused_pairs"}),
    ],
)
def test_kernels_that_are_not_lowered_for_a_target_are_not_compiled_for_it(compiled_names, arch, expected):
    from tests.fusion.resident_cases import CASES

    ahead, _ = compiled_names
    case = CASES["evoformer"]
    given = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in case.shapes.items()}

    def loss(given):
        return blockdiag.fuse(case.function, implementation="triton")(**given).astype(jnp.float32).sum()

    with compile_target(arch):
        jax.jit(jax.grad(loss)).trace(given).lower(lowering_platforms=("cuda",))
    assert set(ahead[0]) == expected
    assert set().union(*ahead) <= expected | {"fused_forward", "fused_forward_resident"}


def test_a_launch_without_a_derivative_is_compiled_alone(vector, compiled_names):
    ahead, together = compiled_names

    def grouped(x, y, *, group, alphas, **options):
        launches = [(AddSpec(x.size, alpha=alpha, name=f"add {alpha}"), (x, y)) for alpha in alphas]
        return launch_together(launches, group=group, **options)

    def lowered(function):
        ahead.clear()
        lowered_text(lambda x, y: function(x, y), vector, vector)
        return ahead

    def both(x, y):
        ((first,),) = grouped(x, y, group="both", alphas=(1,))
        return grouped(first, y, group="both", alphas=(2, 3))

    assert lowered(both)[0] == ["add 2", "add 3"] and together == [["add 2", "add 3"]]
    # A later program must not start kernels of an earlier one, and interpreted launches must not join a group.
    assert lowered(lambda x, y: grouped(x, y, group="alone", alphas=(1,))) == [[]]
    grouped(vector, vector, group="alone", alphas=(2, 3), interpret=True)
    assert lowered(lambda x, y: grouped(x, y, group="alone", alphas=(1,))) == [[]]
    assert lowered(lambda x, y: grouped(x, y, group=None, alphas=(4,))) == [[]]


LAZINESS = """
import os
import sys

before = dict(os.environ)
import blockdiag
assert "jax" not in sys.modules
for name in list(sys.modules):
    if name.startswith("blockdiag"):
        del sys.modules[name]
import jax
import blockdiag

# jax.make_user_context must have run before a user traces anything, or JAX traces it all anew.
assert "blockdiag.interop.targets" in sys.modules
import blockdiag.interop
import blockdiag.interop.jax_call
import blockdiag.interop.kernel_call
blockdiag.interop.compile_target
blockdiag.interop.EXPORT_DISABLED_CHECKS
function = blockdiag.interop.triton_call
assert callable(function), function
assert blockdiag.interop.jax_call.available() is None
loaded = [name for name in ("triton", "torch") if name in sys.modules]
assert not loaded, loaded
assert dict(os.environ) == before
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()

import numpy as np
from tests.interop.bridge_kernels import AddSpec
from blockdiag.interop.interpreter.launch import interpret
import jax

x = np.ones(10, np.float32)
interpret(AddSpec(10), x, x)
with blockdiag.interop.compile_target(90):
    jax.jit(lambda x: blockdiag.interop.jax_call.launch(AddSpec(10), x, x)).trace(x).lower(lowering_platforms=("cuda",))
assert "torch" not in sys.modules
assert dict(os.environ) == before
"""


def test_imports_are_lazy_and_the_environment_stays_untouched(pytestconfig):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(pytestconfig.rootpath / "src"), str(pytestconfig.rootpath)])
    }
    subprocess.run([sys.executable, "-c", LAZINESS], env=environment, check=True)
