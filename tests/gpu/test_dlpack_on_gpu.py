"""DLPack bridges on a GPU share memory, keep the order of streams, and never let memory be reused too early."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from blockdiag.interop import _lifetimes, dlpack, jaxlib_launcher, to_jax, to_torch, wrap_jax
from tests.gpu.gate import Gate

pytestmark = pytest.mark.gpu

# The sleep takes about 50 ms at 1 to 2 GHz, far longer than the host needs for anything here.
SLEEP = 80_000_000
# A busy host may look too late now and then, but not each time.
NEVER_RUNNING = "the computation was never slow enough to show anything"
ELEMENTS = 1 << 22
SIDE = 2048
DTYPES = [str(dtype).removeprefix("torch.") for dtype in dlpack.DTYPES if dtype not in dlpack._NARROWED]


@pytest.fixture(params=["direct", "public"])
def path(request, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr(jaxlib_launcher, "dlpack_shortcut", lambda platform: "hidden by a test")
    else:
        found = jaxlib_launcher.dlpack_shortcut("gpu")
        assert not isinstance(found, str), f"crossings are slow: {found}"


@pytest.fixture(params=["default stream", "side stream"])
def stream(request):
    stream = torch.cuda.current_stream() if request.param == "default stream" else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def idle():
    # The fence is compiled here, because tests may count on a kernel that is still running.
    _lifetimes._start_fence(torch.cuda.current_device())
    yield
    torch.cuda.synchronize()
    dlpack.release_finished()


@functools.cache
def slow_then(function):
    """Return a JAX function that multiplies large matrices for about 50 ms before it reads its argument."""

    @jax.jit
    def slow(x, matrix):
        spin = jax.lax.fori_loop(0, 400, lambda _, y: y @ matrix, matrix)
        # The barrier delays the read until the product is finished.
        x, spin = jax.lax.optimization_barrier((x, spin[0, 0]))
        return function(x) + (spin * 0).astype(x.dtype)

    return slow


def matrix() -> jax.Array:
    return jnp.full((SIDE, SIDE), 1 / SIDE, jnp.float32)


def plus_one(x):
    return x + jnp.ones((), x.dtype)


def torch_churn(value: float) -> list[torch.Tensor]:
    return [torch.full((ELEMENTS,), value, device="cuda") for _ in range(8)]


def jax_churn(value: float) -> list[jax.Array]:
    return [jnp.full(ELEMENTS, value, jnp.float32) for _ in range(8)]


@pytest.mark.parametrize("name", DTYPES)
def test_crossing_keeps_the_memory_in_both_directions(name, path):
    tensor = (torch.arange(64, device="cuda") % 3 == 0).to(torch.float32).to(getattr(torch, name)).reshape(4, 16)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.device.platform == "gpu"
    back = to_torch(array)
    assert (back.data_ptr(), back.dtype, back.device) == (tensor.data_ptr(), tensor.dtype, tensor.device)
    expected = tensor.to(torch.complex64).cpu().numpy()
    np.testing.assert_array_equal(np.asarray(array).astype(np.complex64), expected)
    ours = jnp.zeros((4, 16), array.dtype)
    assert to_torch(ours).data_ptr() == ours.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_to_jax_of_64_bit_tensors_requires_x64(dtype, path):
    tensor = torch.arange(8, device="cuda", dtype=dtype)
    with pytest.raises(ValueError, match="would narrow"):
        to_jax(tensor)
    with jax.enable_x64(True):
        assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_to_jax_of_transposed_heads_keeps_the_memory(path):
    tensor = torch.randn(2, 3, 64, 16, device="cuda")
    array = to_jax(tensor.transpose(1, 2))
    assert array.shape == (2, 64, 3, 16) and array.unsafe_buffer_pointer() == tensor.data_ptr()
    torch.testing.assert_close(to_torch(jax.jit(plus_one)(array)), tensor.transpose(1, 2) + 1)
    assert to_torch(array).stride() == tensor.transpose(1, 2).stride()


def test_to_jax_of_unshareable_tensors_raises_value_error_unless_copied():
    packed = torch.randn(2, 8, 3, 4, 16, device="cuda").unbind(2)[1]
    misaligned = torch.arange(65, device="cuda", dtype=torch.bfloat16)[1:]
    for tensor, message in ((packed, "not a permutation"), (misaligned, "not a multiple of the 16 bytes")):
        with pytest.raises(ValueError, match=message):
            to_jax(tensor)
        torch.testing.assert_close(to_torch(to_jax(tensor, copy=True)), tensor)


def test_pinned_memory_is_host_memory():
    tensor = torch.arange(64.0).pin_memory()
    array = to_jax(tensor)
    assert array.device.platform == "cpu" and array.unsafe_buffer_pointer() == tensor.data_ptr()


def test_jax_waits_for_torch(stream, path):
    plus_one(to_jax(torch.zeros(ELEMENTS, device="cuda"))).block_until_ready()
    for value in range(3):
        tensor = torch.zeros(ELEMENTS, device="cuda")
        with Gate() as gate:
            tensor.fill_(value + 1)
            result = plus_one(to_jax(tensor))
            assert gate.is_closed(), "the host waited for the device"
        assert float(result.min()) == float(result.max()) == value + 2


def test_torch_waits_for_jax(stream, path):
    x = jnp.ones(ELEMENTS, jnp.float32)
    slow_then(plus_one)(x, matrix()).block_until_ready()
    was_running = []
    for value in range(4):
        result = slow_then(plus_one)(x * value, matrix())
        was_running.append(not result.is_ready())
        tensor = to_torch(result) * 2
        assert tensor.unique().tolist() == [2 * value + 2]
    assert any(was_running), NEVER_RUNNING


def test_host_does_not_wait(stream):
    wrapped = wrap_jax(plus_one)
    tensor = torch.ones(ELEMENTS, device="cuda")
    wrapped(tensor)
    torch.cuda.synchronize()
    with Gate() as gate:
        result = wrapped(to_torch(to_jax(tensor)))
        assert gate.is_closed(), "the host waited for the device"
    assert result.unique().tolist() == [2]


def test_wrap_jax_on_several_streams_keeps_results_apart():
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    wrapped = wrap_jax(plus_one)
    for turn in range(8):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                tensor = torch.zeros(ELEMENTS // 8, device="cuda")
                torch.cuda._sleep(SLEEP // 16 * (index + 1))
                tensor.fill_(turn * 10 + index)
                results.append((turn * 10 + index + 1, wrapped(tensor) + 0))
                del tensor
    torch.cuda.synchronize()
    for expected, result in results:
        assert result.unique().tolist() == [expected]


def test_array_freed_while_torch_reads_keeps_its_memory(stream, path):
    """JAX would reuse the freed memory for its next computation, which runs beside torch's waiting kernel."""
    jax_churn(0)
    copies = []
    for value in range(4):
        array = jnp.full(ELEMENTS, value + 1, jnp.float32).block_until_ready()
        tensor = to_torch(array)
        torch.cuda._sleep(SLEEP)
        copies.append(tensor[1:].clone())
        del array, tensor
        jax.block_until_ready(jax_churn(-1))
    for value, copy in enumerate(copies):
        assert copy.unique().tolist() == [value + 1]


def test_wrapped_result_freed_while_torch_reads_keeps_its_memory(stream):
    wrapped = wrap_jax(plus_one)
    tensor = torch.full((ELEMENTS,), 4.0, device="cuda")
    wrapped(tensor)
    torch.cuda.synchronize()
    for _ in range(4):
        result = wrapped(tensor)
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(SLEEP)
        copy = result.clone()
        del result
        jax.block_until_ready(jax_churn(-1))
        assert copy.unique().tolist() == [5]


def test_tensor_freed_while_jax_reads_keeps_its_memory(stream, path):
    """torch would reuse the freed memory for its next operation, which runs beside JAX's long computation."""
    slow = slow_then(plus_one)
    slow(jnp.ones(ELEMENTS, jnp.float32), matrix()).block_until_ready()
    weights = matrix().block_until_ready()
    torch.cuda.empty_cache()
    results, was_running = [], []
    for value in range(4):
        tensor = torch.full((ELEMENTS,), float(value), device="cuda")
        array = to_jax(tensor)
        result = slow(array, weights)
        del tensor, array
        churn = torch_churn(-1)
        was_running.append(not result.is_ready())
        torch.cuda.synchronize()
        results.append(result)
        del churn
    assert any(was_running), NEVER_RUNNING
    for value, result in enumerate(results):
        assert np.unique(np.asarray(result)).tolist() == [value + 1]


def test_operand_of_another_stream_freed_at_once_keeps_its_memory():
    """JAX reads a tensor of one stream for another stream.

    The tensor is freed at once, and the first stream then allocates memory of the same size.
    """
    owner, caller = torch.cuda.Stream(), torch.cuda.Stream()
    slow, weights = slow_then(plus_one), matrix()
    wrapped = wrap_jax(lambda x, w: slow(x, w))
    weights_tensor = to_torch(weights)
    wrapped(torch.ones(ELEMENTS, device="cuda"), weights_tensor)
    torch.cuda.synchronize()
    for value in range(4):
        with torch.cuda.stream(owner):
            tensor = torch.full((ELEMENTS,), float(value), device="cuda")
        with torch.cuda.stream(caller):
            caller.wait_stream(owner)
            result = wrapped(tensor, weights_tensor)
        del tensor
        with torch.cuda.stream(owner):
            churn = torch_churn(-1)
        torch.cuda.synchronize()
        assert result.unique().tolist() == [value + 1]
        del churn


def test_crossed_memory_is_released():
    allocated = torch.cuda.memory_allocated()
    for _ in range(4):
        tensor = torch.ones(ELEMENTS, device="cuda")
        plus_one(to_jax(tensor)).block_until_ready()
        del tensor
    assert len(to_torch(jnp.ones(8))) == 8
    gc.collect()
    dlpack.release_finished()
    torch.cuda.synchronize()
    jax.block_until_ready(jnp.ones(1) + 1)
    dlpack.release_finished()
    dlpack.release_finished()
    assert torch.cuda.memory_allocated() <= allocated
    assert len(_lifetimes.limbo) == 0


def test_ten_thousand_crossings_do_not_leak_memory(path):
    tensor = torch.ones(1024, device="cuda")
    step = jax.jit(plus_one)
    device = to_jax(tensor).device

    def cross(times):
        for _ in range(times):
            to_torch(step(to_jax(tensor)))
        torch.cuda.synchronize()
        gc.collect()
        dlpack.release_finished()

    cross(500)
    cross(1)
    torch_bytes, jax_bytes = torch.cuda.memory_allocated(), device.memory_stats()["bytes_in_use"]
    watches, arrays = len(_lifetimes._watches), len(jax.live_arrays())
    cross(10_000)
    cross(1)
    assert torch.cuda.memory_allocated() <= torch_bytes + (1 << 16)
    assert device.memory_stats()["bytes_in_use"] <= jax_bytes + (1 << 20)
    assert len(_lifetimes._watches) <= watches + 4
    assert len(_lifetimes.limbo) <= 4
    assert len(jax.live_arrays()) <= arrays + 40


def test_gradients_on_a_side_stream_match_torch(stream):
    wrapped = wrap_jax(lambda x, w: jnp.tanh(jnp.matmul(x, w, precision="highest")))
    for _ in range(3):
        x = torch.randn(512, 256, device="cuda", requires_grad=True)
        w = torch.randn(256, 128, device="cuda", requires_grad=True)
        cotangent = torch.randn(512, 128, device="cuda")
        torch.cuda._sleep(SLEEP // 8)
        gradients = torch.autograd.grad(wrapped(x * 1, w * 1), (x, w), cotangent)
        expected = torch.autograd.grad(torch.tanh(x @ w), (x, w), cotangent)
        torch.testing.assert_close(gradients, expected, rtol=2e-2, atol=2e-2)


def test_training_with_freed_intermediates_matches_torch(stream):
    """Ten steps that free every intermediate at once match the same steps in torch."""
    wrapped = wrap_jax(lambda x, w: jnp.sin(x) * w)
    weights = torch.ones(ELEMENTS // 4, device="cuda", requires_grad=True)
    twin = weights.detach().clone().requires_grad_()
    x = torch.linspace(0, 6, ELEMENTS // 4, device="cuda")
    for _ in range(10):
        for w, function in ((weights, wrapped), (twin, lambda x, w: torch.sin(x) * w)):
            h = x * 1
            for _ in range(4):
                h = function(h, w)
            (gradient,) = torch.autograd.grad(h.square().mean(), w)
            with torch.no_grad():
                w -= 1000 * gradient
    torch.testing.assert_close(weights, twin, rtol=1e-3, atol=1e-4)


def test_crossing_during_graph_capture_raises_runtime_error():
    static = torch.ones(8, device="cuda")
    array = jnp.ones(8)
    wrapped = wrap_jax(plus_one)
    wrapped(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static + 1
        for call in (lambda: to_jax(static), lambda: to_torch(array), lambda: wrapped(static)):
            with pytest.raises(RuntimeError, match="being captured into a graph"):
                call()
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [2] * 8


def test_tensor_dropped_during_graph_capture_is_released_later():
    tensor = to_torch(jnp.full(8, 3.0))
    static = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        del tensor
    to_torch(jnp.ones(8))
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1] * 8


@pytest.mark.multigpu
def test_crossing_on_the_second_gpu_keeps_the_memory():
    tensor = torch.arange(8.0, device="cuda:1")
    array = to_jax(tensor)
    assert array.device.local_hardware_id == 1 and array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array + 1)
    assert back.device == tensor.device and back.tolist() == list(range(1, 9))


@pytest.mark.multigpu
def test_crossings_leave_the_current_device_alone():
    """JAX leaves a thread on the GPU that it used last, which users of torch must not notice."""
    tensor = torch.arange(8.0, device="cuda:1", requires_grad=True)
    wrapped = wrap_jax(lambda x: x * x)
    assert torch.cuda.current_device() == 0
    wrapped(tensor).sum().backward()
    assert tensor.grad.tolist() == [2.0 * x for x in range(8)]
    assert torch.cuda.current_device() == 0
    to_torch(to_jax(tensor.detach()))
    assert torch.cuda.current_device() == 0
