"""The torch launch path without a GPU: checks of tensors, argument order, bounded caches."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from blockdiag.interop import torch_launch  # noqa: E402
from blockdiag.triton_kernels.launch.plan import Target  # noqa: E402
from tests.interop.bridge_kernels import AddSpec, HalvesSpec, IncrementSpec  # noqa: E402

pytestmark = pytest.mark.versions


def test_mismatched_tensors_raise_value_error():
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="takes 2 tensors, got 1"):
        torch_launch.launch(AddSpec(10), x)
    with pytest.raises(ValueError, match=r"tensor 1 must be float32\[10\] on cpu, got torch.float64\[10\] on cpu"):
        torch_launch.launch(AddSpec(10), x, x.double())
    with pytest.raises(ValueError, match=r"tensor 0 must be contiguous .* pass tensor.contiguous\(\)"):
        torch_launch.launch(AddSpec(10), torch.zeros(20)[::2], x)
    with pytest.raises(ValueError, match=r"tensor 0 .* start at a multiple of 16 bytes"):
        torch_launch.launch(AddSpec(10), torch.zeros(11)[1:], x)
    with pytest.raises(ValueError, match=r"must be on a CUDA device, got cpu; use tensor.cuda\(\)"):
        torch_launch.launch(AddSpec(10), x, x)


class RecordingKernel:
    """A stand-in for Triton's loaded kernel that records its calls."""

    metadata = SimpleNamespace(global_scratch_size=0)

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


@pytest.fixture
def bind(monkeypatch):
    kernel = RecordingKernel()
    monkeypatch.setattr(torch_launch, "_loaded_kernel", lambda plan, device_index: kernel)
    monkeypatch.setattr(torch_launch, "_make_context_current", lambda device_index: None)
    monkeypatch.setattr(torch_launch, "on_device", lambda device: contextlib.nullcontext())

    def bind_to_cpu(spec):
        bound = torch_launch._BoundLaunch(spec.plan(Target(90, 132)), 0)
        bound._device = torch.device("cpu")
        return bound, kernel

    return bind_to_cpu


def test_bound_launch_passes_arguments_in_the_kernel_order(bind):
    bound, kernel = bind(AddSpec(1000, alpha=0.25))
    x, y = torch.zeros(1000), torch.zeros(1000)
    (out,) = bound((x, y))
    ((grid, arguments),) = kernel.calls
    assert grid == (4, 1, 1)
    assert arguments == (x.data_ptr(), y.data_ptr(), out.data_ptr(), 1000, 0.25, 256)


def test_aliased_output_is_the_input(bind):
    bound, kernel = bind(IncrementSpec(300))
    values = torch.zeros(300, dtype=torch.int32)
    after, sums = bound((values,))
    assert after is values and sums.shape == (3,)
    assert kernel.calls[0][1][:2] == (values.data_ptr(), sums.data_ptr())


def test_descriptors_are_made_on_the_host(bind):
    bound, kernel = bind(HalvesSpec(80))
    x = torch.zeros(80, 64, dtype=torch.float16)
    (out,) = bound((x,))
    source, target, pointer, *_ = kernel.calls[0][1]
    assert (source.base is x, target.base is out, pointer) == (True, True, out.data_ptr())
    assert (source.shape, source.strides, source.block_shape) == ([80, 64], [64, 1], [32, 64])


def test_loaded_kernels_are_shared_between_scalars(monkeypatch):
    monkeypatch.setattr(torch_launch, "device_target", lambda device_index: Target(90, 132))
    monkeypatch.setattr(torch_launch, "_kernels", {})
    kernels = {
        id(torch_launch._loaded_kernel(dataclasses.replace(AddSpec(1000), **changes).plan(Target(90, 132)), 0))
        for changes in ({}, {"size": 2000}, {"alpha": 7.0})
    }
    assert len(kernels) == len(torch_launch._kernels) == 1
    on_other_device = torch_launch._loaded_kernel(AddSpec(1000).plan(Target(90, 132)), 1)
    assert id(on_other_device) not in kernels
    assert on_other_device.module is None  # loaded on first use, by each device's own object
    assert torch_launch.bound_launch.cache_info().maxsize is not None
