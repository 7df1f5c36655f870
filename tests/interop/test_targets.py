"""Tests of the GPU that a launch is compiled for."""

from types import SimpleNamespace

import jax
import pytest

from blockdiag.interop import targets
from blockdiag.triton_kernels.launch.plan import Target


def gpu(compute_capability, **attributes):
    return SimpleNamespace(compute_capability=compute_capability, **attributes)


@pytest.mark.parametrize(
    ("devices", "target"),
    [
        ([gpu("9.0", core_count=132)], Target(90, 132)),
        ([gpu("9.0", core_count=114)] * 2, Target(90, 114)),
        ([gpu("12.0")], Target(120, 188)),
    ],
)
def test_session_target_is_that_of_the_devices(devices, target, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    assert targets.session_target() == target


def test_session_target_with_devices_of_several_kinds_raises_value_error(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu("9.0", core_count=132), gpu("8.0", core_count=108)])
    with pytest.raises(ValueError, match=r"several kinds.*compile_target\(arch\)"):
        targets.session_target()


def test_overriding_target_is_the_innermost():
    assert targets.overriding_target() is None
    with targets.compile_target(90):
        with targets.compile_target(100, num_sms=7):
            assert targets.overriding_target() == Target(100, 7)
        assert targets.overriding_target() == Target.for_arch(90)
    assert targets.overriding_target() is None
