"""Fixtures of the torch tests."""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def interpreted_paged_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the native path with Triton's interpreter instead of the launcher, and yield paged attention's module."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from blockdiag.interop.interpreter.launch import interpret
    from blockdiag.torch import launches
    from blockdiag.torch.ops.append import native as _append_native
    from blockdiag.torch.ops.moba_paged import native as _moba_paged_native
    from blockdiag.torch.ops.paged import native as _paged_native
    from blockdiag.triton_kernels.launch.plan import Target
    from tests.torch.torch_support import to_numpy, to_tensor

    target = Target.for_arch(90)

    def bound_launch(spec: Any, device_index: int | None) -> Any:
        if hasattr(spec, "is_portable"):
            spec = dataclasses.replace(spec, is_portable=True)

        def launch(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
            arrays = [to_numpy(x).reshape(expected.shape) for x, expected in zip(tensors, spec.inputs, strict=True)]
            outputs = [to_tensor(x) for x in interpret(spec, *arrays, target=target)]
            for source, index in spec.plan(target).aliases:
                outputs[index] = tensors[source].copy_(outputs[index])
            return tuple(outputs)

        return launch

    monkeypatch.setattr(launches, "bound_launch", bound_launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield _paged_native
    for module in (_append_native, _moba_paged_native, _paged_native):
        module._prepared.clear()
