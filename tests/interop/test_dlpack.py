"""`to_jax` and `to_torch` share memory between the frameworks or raise a clear error."""

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from blockdiag.common.features import Feature
from blockdiag.interop import _lifetimes, dlpack, jaxlib_launcher, to_jax, to_torch

WIDE = ["int64", "uint64", "float64", "complex128"]
NARROW = sorted({str(dtype).removeprefix("torch.") for dtype in dlpack.DTYPES} - set(WIDE))
LAYOUTS = {
    "row-major": lambda x: x,
    "transposed heads": lambda x: x.transpose(1, 2),
    "reversed": lambda x: x.permute(3, 2, 1, 0),
    "first half": lambda x: x[:1],
    "size-one dimensions": lambda x: x[:1].transpose(0, 1)[None],
}


@pytest.fixture(params=["direct", "public"])
def path(request, monkeypatch):
    """Run a test with jaxlib's private functions and with the public fallback."""
    if request.param == "public":
        monkeypatch.setattr(jaxlib_launcher, "dlpack_shortcut", lambda platform: "hidden by a test")
    else:
        found = jaxlib_launcher.dlpack_shortcut("cpu")
        assert not isinstance(found, str), f"crossings are slow: {found}"


def refuse(*arguments):
    raise NotImplementedError("not in this version")


UNKNOWN = {
    "gone": ({"dlpack_managed_tensor_to_buffer": None}, "AttributeError"),
    "other arguments": ({"dlpack_managed_tensor_to_buffer": lambda capsule: capsule}, "TypeError"),
    "refused": ({"buffer_to_dlpack_managed_tensor": refuse}, "NotImplementedError: not in this version"),
    "a copy": ({"dlpack_managed_tensor_to_buffer": lambda *_: jnp.zeros((2, 3), jnp.int32)}, "came back as another"),
}


@pytest.mark.parametrize(("names", "problem"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_jaxlib_functions_fall_back_to_public_dlpack(names, problem, monkeypatch):
    known = sys.modules["jaxlib._jax"]
    given = {name: value for name, value in (vars(known) | names).items() if value is not None}
    jaxlib_launcher.dlpack_shortcut.cache_clear()
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "jaxlib._jax", SimpleNamespace(**given))
        found = jaxlib_launcher.dlpack_shortcut("cpu")
    try:
        assert isinstance(found, str) and problem in found and "those of jax.dlpack are used" in found
        described = {feature.name: feature for feature in jaxlib_launcher.describe_features()}
        assert described["jaxlib: DLPack on cpu"] == Feature("jaxlib: DLPack on cpu", False, found)
        tensor = torch.arange(6).to(torch.int32).reshape(2, 3).T
        array = to_jax(tensor)
        assert pointer(array) == tensor.data_ptr() and array.tolist() == tensor.tolist()
        assert to_torch(array).data_ptr() == tensor.data_ptr()
    finally:
        jaxlib_launcher.dlpack_shortcut.cache_clear()


def test_to_jax_probes_jaxlib_while_tracing():
    seen = []

    def function(x):
        jaxlib_launcher.dlpack_shortcut.cache_clear()
        seen.append(to_jax(torch.ones(2)))
        assert jaxlib_launcher.describe_features()[1].is_fast
        return x

    jax.jit(function)(jnp.ones(2))
    assert seen[0].tolist() == [1, 1]


@pytest.mark.versions
def test_crossing_is_fast_with_the_installed_jaxlib():
    features = jaxlib_launcher.describe_features()
    assert {"jaxlib: launcher of Triton kernels", "jaxlib: DLPack on cpu"} <= {feature.name for feature in features}
    assert all(feature.is_fast for feature in features), features


def filled(dtype: torch.dtype, shape: tuple[int, ...] = (2, 4, 8, 16)) -> torch.Tensor:
    """Return a pattern of zeros and ones, which every dtype represents exactly."""
    size = int(np.prod(shape))
    return (torch.arange(size) % 3 == 0).to(torch.float32).to(dtype).reshape(shape)


def pointer(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def values(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.complex128)


@pytest.mark.versions
@pytest.mark.parametrize("name", NARROW)
def test_crossing_keeps_the_memory_in_both_directions(name, path):
    tensor = filled(getattr(torch, name))
    array = to_jax(tensor)
    assert pointer(array) == tensor.data_ptr()
    assert (array.shape, array.dtype) == (
        tuple(tensor.shape),
        np.dtype(getattr(jnp, "bool_" if name == "bool" else name)),
    )
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert (back.shape, back.dtype, back.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    np.testing.assert_array_equal(values(array), tensor.to(torch.complex128).numpy())


@pytest.mark.parametrize("name", NARROW)
def test_to_torch_keeps_the_memory_of_a_jax_array(name, path):
    array = jnp.zeros((3, 5), getattr(jnp, "bool_" if name == "bool" else name))
    tensor = to_torch(array)
    assert tensor.data_ptr() == pointer(array)
    assert (tuple(tensor.shape), tensor.dtype) == (array.shape, getattr(torch, name))
    assert not tensor.requires_grad
    again = to_jax(tensor)
    assert pointer(again) == pointer(array)


@pytest.mark.versions
@pytest.mark.parametrize("name", WIDE)
def test_to_jax_of_64_bit_tensors_requires_x64(name, path):
    tensor = filled(getattr(torch, name))
    with pytest.raises(ValueError, match=r"would narrow; cast it with tensor\.to\(torch\..*jax\.enable_x64"):
        to_jax(tensor)
    with pytest.raises(ValueError, match="would narrow"):
        to_jax(tensor, copy=True)
    with jax.enable_x64(True):
        array = to_jax(tensor)
        assert pointer(array) == tensor.data_ptr()
        assert array.dtype == name
        assert to_torch(array).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_crossing_of_permuted_layouts_keeps_the_memory(layout, path):
    tensor = layout(filled(torch.float32) + torch.arange(1024.0).reshape(2, 4, 8, 16))
    array = to_jax(tensor)
    assert pointer(array) == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: x * 2)(array)), tensor.numpy() * 2)
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    torch.testing.assert_close(back, tensor, rtol=0, atol=0)


def test_to_jax_of_transposed_heads_keeps_the_memory():
    tensor = torch.randn(2, 3, 8, 16)  # [B, N, T, H]
    array = to_jax(tensor.transpose(1, 2))
    assert array.shape == (2, 8, 3, 16)
    assert pointer(array) == tensor.data_ptr()
    assert to_torch(array).stride() == tensor.transpose(1, 2).stride()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_crossing_of_empty_and_scalar_shapes_keeps_the_shape(shape, path):
    tensor = torch.ones(shape)
    array = to_jax(tensor)
    assert array.shape == shape
    assert to_torch(array).shape == shape
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())


def packed_projection() -> torch.Tensor:
    return torch.randn(2, 8, 3, 4, 16).unbind(2)[1]


REFUSED = {
    "packed slice": (packed_projection, "not a permutation of dense memory; pass tensor.contiguous"),
    "every second": (lambda: torch.arange(16.0)[::2], "not a permutation of dense memory"),
    "columns": (lambda: torch.randn(64, 64)[:, :32], "not a permutation of dense memory"),
    "broadcast": (lambda: torch.randn(1, 16).expand(4, 16), "not a permutation of dense memory"),
    "overlapping": (lambda: torch.arange(16.0).as_strided((4, 4), (2, 1)), "not a permutation of dense memory"),
    "conjugate": (lambda: torch.randn(16, dtype=torch.complex64).conj(), r"pass tensor.resolve_conj\(\)"),
    "negative": (lambda: torch.randn(16, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
    "misaligned": (lambda: torch.arange(65.0)[1:], r"not a multiple of the 64 bytes.*pass tensor.clone\(\)"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_to_jax_of_unshareable_tensors_raises_value_error_unless_copied(make, message, path):
    tensor = make()
    with pytest.raises(ValueError, match=f"{message}.*copy=True"):
        to_jax(tensor)
    array = to_jax(tensor, copy=True)
    assert pointer(array) != tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor.resolve_conj().resolve_neg().numpy())
    before = np.array(array)
    tensor.untyped_storage().fill_(0)
    np.testing.assert_array_equal(np.asarray(array), before)


def test_copy_true_does_not_copy_shareable_tensors(path):
    tensor = torch.randn(4, 4)
    assert pointer(to_jax(tensor, copy=True)) == tensor.data_ptr()


def test_copy_true_copies_once(monkeypatch):
    copies = []
    monkeypatch.setattr(dlpack, "dense_copy", lambda x, copy=dlpack.dense_copy: copies.append(x) or copy(x))
    to_jax(torch.randn(16, dtype=torch.complex64).conj()[::2], copy=True)
    assert len(copies) == 1


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


WRONG = {
    "requires grad": (lambda: torch.ones(3, requires_grad=True), ValueError, r"tensor.detach\(\), or wrap .*wrap_jax"),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(3)), ValueError, r"tensor.detach\(\)"),
    "sparse": (lambda: torch.eye(3).to_sparse(), ValueError, r"layout torch.sparse_coo.*to_dense\(\)"),
    "meta": (lambda: torch.ones(3, device="meta"), ValueError, "on meta"),
    "dtype": (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), ValueError, "dtype torch.qint8"),
    "fake": (fake, TypeError, "FakeTensor"),
    "array": (lambda: np.ones(3), TypeError, "must be a torch.Tensor, got ndarray"),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("copy", [False, True])
def test_to_jax_of_unsupported_tensors_raises(make, error, message, copy):
    with pytest.raises(error, match=message):
        to_jax(make(), copy=copy)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f)(torch.ones(2, 3)),
        lambda f: torch.func.grad(f)(torch.ones(3)),
        lambda f: torch.func.functionalize(f)(torch.ones(3)),
    ],
    ids=["vmap", "grad", "functionalize"],
)
def test_to_jax_inside_torch_func_transforms_raises_type_error(transform):
    def function(x):
        to_jax(x)
        return x.sum()

    with pytest.raises(TypeError, match=r"transform of torch\.func"):
        transform(function)


def test_to_torch_of_a_traced_array_raises_type_error():
    with pytest.raises(TypeError, match=r"outside of jax\.jit.*wrap_torch"):
        jax.jit(lambda x: to_torch(x))(jnp.ones(3))


def test_to_torch_of_unsupported_arrays_raises():
    with pytest.raises(TypeError, match=r"must be a jax\.Array, got ndarray"):
        to_torch(np.ones(3))
    with pytest.raises(TypeError, match="key_data"):
        to_torch(jax.random.key(0))
    with pytest.raises(TypeError, match="int4, which torch does not support"):
        to_torch(jnp.zeros(4, jnp.int4))
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(ValueError, match="deleted"):
        to_torch(deleted)


def test_to_torch_of_an_array_on_several_devices_raises_value_error():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (jax.P("x"), jax.P()):
        array = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=r"4 devices.*addressable_shards"):
            to_torch(array)
        assert to_torch(array.addressable_shards[3].data).sum() == 8 // (4 if spec else 1)


def test_to_torch_of_an_array_on_a_mesh_of_one_device_keeps_values():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    array = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
    assert to_torch(array).tolist() == list(range(8))


def test_to_torch_waits_for_a_running_computation(path):
    x = jnp.full((400, 400), 1 / 400, jnp.float32)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))(x)
    torch.testing.assert_close(to_torch(product), torch.full((400, 400), 1 / 400), rtol=1e-4, atol=0)


def test_writes_are_seen_on_the_other_side(path):
    # This is documented but not recommended, because JAX assumes that its arrays are immutable.
    tensor = torch.zeros(16)
    array = to_jax(tensor)
    tensor[3] = 7
    assert np.asarray(array)[3] == 7
    ours = jnp.zeros(16)
    to_torch(ours)[5] = 2
    assert np.asarray(ours)[5] == 2


def test_memory_outlives_the_object_it_came_from(path):
    tensor = torch.arange(1000.0)
    array = to_jax(tensor)
    del tensor
    gc.collect()
    churn = [torch.full((1000,), -1.0) for _ in range(50)]
    np.testing.assert_array_equal(np.asarray(array), np.arange(1000.0))
    view = to_torch(array)[10:20]
    del array
    gc.collect()
    churn += [jnp.full(1000, -1.0) for _ in range(50)]
    assert view.tolist() == list(range(10, 20))


def test_to_jax_inside_jit_is_a_constant():
    tensor = torch.arange(4.0)
    result = jax.jit(lambda x: x + to_jax(tensor))(jnp.ones(4))
    assert result.tolist() == [1, 2, 3, 4]


def test_ten_thousand_crossings_do_not_leak_memory(path):
    tensor = torch.ones(64)
    step = jax.jit(lambda x: x + 1)

    def cross(times):
        for _ in range(times):
            to_torch(step(to_jax(tensor)))

    cross(500)
    gc.collect()
    arrays, watches = len(jax.live_arrays()), len(_lifetimes._watches)
    resident = resident_bytes()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cross(2000)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cross(8000)
    gc.collect()
    assert after - before < 50_000
    assert len(jax.live_arrays()) <= arrays
    assert len(_lifetimes._watches) <= watches
    # Leaking one 64-element array per call would add 2.5 MB, and leaking its bookkeeping several times that.
    assert resident_bytes() - resident < 8e6


def test_large_arrays_are_freed_after_crossing():
    resident = None
    for turn in range(60):
        tensor = torch.ones(1 << 20)
        array = to_jax(tensor) + 1
        assert to_torch(array)[-1] == 2
        if turn == 10:
            resident = resident_bytes()
    # 50 more turns move 400 MB.
    assert resident_bytes() - resident < 100e6


def test_crossings_in_threads_keep_results_apart():
    failures = []

    def work(seed):
        for step in range(200):
            tensor = torch.full((64,), float(seed * 1000 + step))
            result = to_torch(to_jax(tensor) * 2)
            if not torch.equal(result, tensor * 2):
                failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def in_another_process(queue):
    tensor = torch.arange(4.0)
    queue.put((to_torch(to_jax(tensor) + 1)).tolist())


def test_crossing_in_a_spawned_process_keeps_values(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_another_process, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == [1, 2, 3, 4]
    process.join(60)
    assert process.exitcode == 0


FORKED = """
import os, signal, sys, warnings
import torch
from blockdiag.interop import to_jax

warnings.simplefilter("ignore")
to_jax(torch.ones(3))
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
try:
    to_jax(torch.ones(3))
except RuntimeError as error:
    os._exit(7 if "spawn" in str(error) else 1)
os._exit(2)
"""


def test_crossing_in_a_forked_process_raises_runtime_error():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    assert subprocess.run([sys.executable, "-c", FORKED], env=environment, timeout=120).returncode == 7


class Device:
    """A stand-in for a GPU's progress, because a CPU never uses this bookkeeping."""

    def __init__(self) -> None:
        self.passed = 0

    def mark(self, at: int):
        return lambda: self.passed >= at


def test_limbo_keeps_owners_until_the_device_has_passed():
    limbo, device = _lifetimes.Limbo(), Device()
    owners = [torch.ones(1) for _ in range(4)]
    freed = []
    for at, owner in enumerate(owners):
        limbo.keep("fast" if at % 2 else "slow", owner, device.mark(10 * at), lambda at=at: freed.append(at))
    limbo.release()
    assert len(limbo) == 3
    device.passed = 10
    limbo.release()
    assert len(limbo) == 2
    device.passed = 30
    limbo.release()
    assert len(limbo) == 0
    assert freed == [0, 1, 2, 3]


def test_limbo_release_is_reentrant():
    limbo = _lifetimes.Limbo()

    class Owner:
        def __del__(self):
            limbo.keep("lane", "left behind", lambda: False)
            limbo.release()

    limbo.keep("lane", Owner(), lambda: True)
    limbo.release()
    assert len(limbo) == 1


def test_watch_reports_a_storage_after_its_last_view():
    ended = []
    tensor = to_torch(jnp.arange(8.0))
    _lifetimes.watch(tensor.untyped_storage(), ended.append, "storage")
    view = tensor[2:]
    detached = view.detach()
    del tensor, view
    gc.collect()
    assert not ended
    del detached
    gc.collect()
    assert ended == ["storage"]


def test_watch_reports_release_by_jax():
    ended = []
    tensor = torch.arange(16.0)
    alias = tensor.detach()
    (array,) = dlpack.share([alias])
    _lifetimes.watch(alias, ended.append, "alias")
    del alias
    gc.collect()
    assert not ended
    result = array + 1
    result.block_until_ready()
    del array
    gc.collect()
    assert ended == ["alias"]


def test_settle_fences_small_storages_together(monkeypatch):
    monkeypatch.setattr(_lifetimes, "limbo", _lifetimes.Limbo())
    fences = []

    class Fence:
        def is_ready(self):
            return len(fences) > 1

    monkeypatch.setattr(_lifetimes, "_start_fence", lambda index: fences.append(index) or Fence())
    dropped = _lifetimes._dropped[7]
    for _ in range(_lifetimes.UNFENCED_STORAGES - 1):
        dropped.append(torch.ones(4).untyped_storage())
    _lifetimes.settle()
    assert not fences
    dropped.append(torch.ones(4).untyped_storage())
    _lifetimes.settle()
    assert fences == [7] and not dropped
    assert len(_lifetimes.limbo) == 1
    dropped.append(torch.ones(_lifetimes.UNFENCED_BYTES // 4).untyped_storage())
    _lifetimes.settle()
    assert fences == [7, 7]
    assert len(_lifetimes.limbo) == 0
    dropped.append(torch.ones(1).untyped_storage())
    dlpack.release_finished()
    assert fences == [7, 7, 7] and not dropped
    del _lifetimes._dropped[7]


def test_cuda_device_without_a_gpu_raises_value_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"JAX has no CUDA device.*jax\[cuda13\]"):
        _lifetimes.cuda_device(0)
