"""Every launch path on a GPU: values, equality between the paths, streams, graphs, several devices."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from blockdiag.interop import EXPORT_DISABLED_CHECKS
from blockdiag.interop.interpreter.launch import interpret
from blockdiag.interop.jax_call import launch
from blockdiag.interop.targets import session_target
from tests.interop.bridge_kernels import (
    AddSpec,
    DeviceDescriptorSpec,
    GluonCopySpec,
    HalvesSpec,
    IncrementSpec,
    MatmulSpec,
    add_kernel,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

EXAMPLES = [
    AddSpec(1000),
    AddSpec(100_003, "bfloat16"),
    IncrementSpec(300),
    MatmulSpec(200, 128, 256),
    MatmulSpec(1000, 256, 512, "float16", block=128),  # 96 KiB of shared memory
    HalvesSpec(80),
    HalvesSpec(96),
    DeviceDescriptorSpec(80),
    GluonCopySpec(80),
]


@pytest.fixture(autouse=True)
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")


def host_inputs(spec):
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, 100, given.shape).astype(np.int32)
        if given.dtype == "int32"
        else np.asarray(jnp.asarray(generator.standard_normal(given.shape), given.dtype))
        for given in spec.inputs
    ]


def to_torch(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(array.copy()).cuda()


def to_numpy(tensor):
    tensor = tensor.cpu()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def bits(array):
    array = np.asarray(array)
    return array.view(np.int16) if array.dtype.name == "bfloat16" else array


def torch_launch(spec, *tensors):
    from blockdiag.interop.torch_launch import launch

    return launch(spec, *tensors)


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda spec: f"{spec.name}-{spec.inputs[0].dtype}")
def test_torch_and_jax_launches_are_equal_bitwise_and_accurate(spec):
    inputs = host_inputs(spec)
    from_jax = jax.jit(lambda *arrays: launch(spec, *arrays))(*inputs)
    from_torch = torch_launch(spec, *map(to_torch, inputs))
    for jax_output, torch_output in zip(from_jax, from_torch, strict=True):
        np.testing.assert_array_equal(bits(jax_output), to_numpy(torch_output))
    expected = inputs if isinstance(spec, GluonCopySpec) else interpret(spec, *inputs)
    for output, exact in zip(from_jax, expected, strict=True):
        exact = np.asarray(exact, np.float64)
        np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=2**-7, atol=1e-2)
    again = jax.jit(lambda *arrays: launch(spec, *arrays))(*inputs)
    for first, second in zip(from_jax, again, strict=True):
        np.testing.assert_array_equal(bits(first), bits(second))


def test_session_target_is_that_of_the_device():
    properties = torch.cuda.get_device_properties(0)
    target = session_target()
    assert target.arch == properties.major * 10 + properties.minor
    assert target.num_sms == properties.multi_processor_count


def test_native_triton_works_after_launches_and_interpretation():
    x = jnp.arange(1000, dtype=jnp.float32)
    (through_jax,) = launch(AddSpec(1000), x, x)
    tensor = torch.arange(1000, dtype=torch.float32, device="cuda")
    out = torch.empty_like(tensor)
    add_kernel[(4,)](tensor, tensor, out, 1000, 0.5, BLOCK=256)
    np.testing.assert_array_equal(out.cpu().numpy(), through_jax)
    interpret(AddSpec(1000), np.asarray(x), np.asarray(x))
    add_kernel[(4,)](tensor, tensor, out, 1000, 1.5, BLOCK=256)
    np.testing.assert_array_equal(out.cpu().numpy(), np.asarray(x) * 2.5)


def test_aliased_output_keeps_the_input_unless_donated():
    spec = IncrementSpec(300)
    values = jnp.arange(300, dtype=jnp.int32)
    after, _ = jax.jit(lambda values: launch(spec, values))(values)
    np.testing.assert_array_equal(values, np.arange(300))
    np.testing.assert_array_equal(after, np.arange(300) + 1)
    donated = jax.jit(lambda values: launch(spec, values), donate_argnums=0)
    address = values.unsafe_buffer_pointer()
    after, _ = donated(values)
    assert values.is_deleted() and after.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(after, np.arange(300) + 1)


def test_output_used_twice_costs_no_copy():
    x = jnp.ones((80, 64), jnp.float16)
    compiled = jax.jit(lambda x: launch(HalvesSpec(80), x)).lower(x).compile()
    text = compiled.as_text()
    assert "AllocateBuffer" in text and " copy(" not in text
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < x.nbytes


def test_many_launches_in_one_program_match_numpy():
    x = jnp.ones(1 << 12, jnp.float32)
    spec = AddSpec(1 << 12, alpha=2.0**-10)

    @jax.jit
    def chain(x):
        for _ in range(40):
            (x,) = launch(spec, x, x)
        return jax.lax.fori_loop(0, 60, lambda _, x: launch(spec, x, x)[0], x)

    expected = np.float32(1)
    for _ in range(100):
        expected = np.float32(expected + np.float32(2.0**-10) * expected)
    for _ in range(5):
        np.testing.assert_allclose(chain(x), np.full(1 << 12, expected), rtol=1e-6)


def test_exported_launch_runs():
    pytest.importorskip("flatbuffers")
    x = jnp.arange(1000, dtype=jnp.float32)
    exported = jax.export.export(
        jax.jit(lambda x: launch(AddSpec(1000), x, x)[0]), disabled_checks=EXPORT_DISABLED_CHECKS
    )(x)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x), x * 1.5)


def test_torch_launches_on_the_current_stream():
    spec = AddSpec(1 << 20)
    zeros = torch.zeros(1 << 20, device="cuda")
    torch_launch(spec, zeros, zeros)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outputs = []
    for value, stream in enumerate(streams, start=1):
        with torch.cuda.stream(stream):
            # The launch must wait for the delayed work of this stream.
            torch.cuda._sleep(50_000_000)
            late = torch.full((1 << 20,), float(value), device="cuda")
            outputs += torch_launch(spec, late, late)
    for stream in streams:
        stream.synchronize()
    for value, output in enumerate(outputs, start=1):
        assert (output == 1.5 * value).all()


def test_torch_launch_runs_inside_a_cuda_graph():
    spec = MatmulSpec(200, 128, 256)
    a, b = map(to_torch, host_inputs(spec))
    (before,) = torch_launch(spec, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = torch_launch(spec, a, b)
    a.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, before * 2)


def test_torch_caches_do_not_grow_with_scalars():
    from blockdiag.interop import torch_launch as door

    x = torch.ones(1000, device="cuda")
    torch_launch(AddSpec(1000), x, x)
    kernels = len(door._kernels)
    for alpha in range(20):
        (out,) = torch_launch(AddSpec(1000, alpha=float(alpha)), x, x)
        assert (out == 1 + alpha).all()
    assert len(door._kernels) == kernels


@pytest.mark.multigpu
def test_launches_on_the_second_gpu_equal_the_first_bitwise(two_gpus):
    spec = MatmulSpec(200, 128, 256)
    inputs = host_inputs(spec)
    first, second = (
        jax.jit(lambda *arrays: launch(spec, *arrays))(*(jax.device_put(array, device) for array in inputs))[0]
        for device in jax.local_devices(backend="cuda")[:2]
    )
    assert first.devices() != second.devices()
    np.testing.assert_array_equal(bits(first), bits(second))
    torch.cuda.set_device(0)  # JAX leaves the thread on the device that it used last
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        (output,) = torch_launch(spec, *(to_torch(array).to(device) for array in inputs))
        assert output.device == torch.device(device)
        assert torch.cuda.current_device() == 0
        np.testing.assert_array_equal(to_numpy(output), bits(first))


@pytest.mark.multigpu
def test_shard_map_over_two_gpus_matches_numpy(two_gpus):
    devices = jax.local_devices(backend="cuda")[:2]
    mesh = jax.make_mesh((2,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(2000, dtype=jnp.float32)
    sharded = PartitionSpec("data")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=sharded, out_specs=(sharded, PartitionSpec()))
    def function(x):
        (out,) = launch(AddSpec(1000), x, x)
        return out, jax.lax.psum(jnp.sum(out), "data")

    outputs, total = function(x)
    np.testing.assert_array_equal(outputs, x * 1.5)
    np.testing.assert_allclose(total, np.sum(np.asarray(x) * 1.5), rtol=1e-5)


def test_shard_map_on_one_gpu_matches_numpy():
    mesh = jax.make_mesh(
        (1,), ("data",), devices=jax.local_devices(backend="cuda")[:1], axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = jnp.arange(1000, dtype=jnp.float32)
    function = jax.shard_map(
        lambda x: launch(AddSpec(1000), x, x)[0],
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    np.testing.assert_array_equal(jax.jit(function)(x), x * 1.5)
