"""Private interfaces of Triton: one module names them, and unknown versions fall back to a slower path."""

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

import blockdiag
from blockdiag.fusion.runtime import arrange
from blockdiag.fusion.runtime.launches import FusedLaunch
from blockdiag.triton_kernels.launch import compile as compile_module
from blockdiag.triton_kernels.launch import private_triton
from blockdiag.triton_kernels.launch.compile import KernelCompileError, compile_plan
from blockdiag.triton_kernels.launch.plan import CompileOptions, Target
from blockdiag.triton_kernels.moba.plans import MoBALaunch
from blockdiag.triton_kernels.paged.plans import launches
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.lowering.test_resident_schedule import joint_launch
from tests.fusion.resident_cases import CASES
from tests.interop.bridge_kernels import AddSpec
from tests.triton_kernels.test_moba_plans import BASE
from tests.triton_kernels.test_paged_plans import PROBLEMS as PAGED

TARGET = Target.for_arch(90)
PRIVATE = re.compile(
    r"\btriton\.(?:_C|compiler|runtime|backends)\b"
    r"|\bgluon\._runtime\b"
    r"|^\s*from triton import .*\b(?:_C|compiler|runtime|backends)\b"
    r"|\badd_stages_inspection_hook\b",
    re.MULTILINE,
)


def test_library_names_private_parts_of_triton_in_one_module():
    root = Path(blockdiag.__file__).parent
    naming = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert naming == {"triton_kernels/launch/private_triton.py"}


@pytest.fixture
def fresh_probes(monkeypatch, tmp_path):
    """Forget the probed features of Triton and all compiled kernels."""
    probes = (
        private_triton._probe_stage_hook,
        private_triton._probe_gluon,
        private_triton.descriptor_reason,
        private_triton.interpreter_reason,
    )
    for probe in probes:
        probe.cache_clear()
    monkeypatch.setattr(private_triton, "_hook_failures", [])
    monkeypatch.setattr(compile_module, "_compiled", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    for probe in probes:
        probe.cache_clear()


def feature(name: str) -> private_triton.Feature:
    (found,) = [found for found in private_triton.describe_features() if found.name == name]
    return found


def compiled_add(**options):
    plan = dataclasses.replace(AddSpec(1000).plan(TARGET), options=CompileOptions(**options))
    return compile_plan(plan, TARGET)


def test_describe_features_of_the_installed_version_are_all_fast(fresh_probes):
    features = private_triton.describe_features()
    assert [found for found in features if not found.is_fast] == []
    assert len({found.name for found in features}) == len(features) == 4
    assert compiled_add().kernel.asm["cubin"] == b""
    assert feature("PTX without ptxas").is_fast


def slow_ptxas_kernel():
    """Compile a kernel with a version whose hook cannot be used, and return the feature that is reported."""
    hook = triton.knobs.runtime.add_stages_inspection_hook
    compiled = compiled_add()
    assert compiled.kernel.asm["cubin"] and ".entry add_kernel" in compiled.ptx
    assert triton.knobs.runtime.add_stages_inspection_hook is hook
    # Other kernels and kernels that fail behave as without a hook.
    assert compiled_add(num_warps=8).kernel.asm["cubin"]
    with pytest.raises(KernelCompileError, match="64 warps"):
        compiled_add(num_warps=64)
    return feature("PTX without ptxas")


@pytest.mark.parametrize(
    "call",
    [
        lambda hook, backend, stages: hook(stages=stages, backend=backend),
        lambda hook, backend, stages: hook(SimpleNamespace(backend=backend, stages=stages)),
        lambda hook, backend, stages: hook(backend, dict(stages)),
        lambda hook, backend, stages: hook(backend, tuple(stages)),
    ],
    ids=["by name", "one object", "a copy", "names of stages"],
)
def test_compile_with_a_hook_called_differently_runs_ptxas(call, fresh_probes, monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages, knobs = CUDABackend.add_stages, triton.knobs.runtime

    def add_stages_otherwise(backend, stages, options, language):
        hook, knobs.add_stages_inspection_hook = knobs.add_stages_inspection_hook, None
        add_stages(backend, stages, options, language)
        knobs.add_stages_inspection_hook = hook
        if hook is not None:
            call(hook, backend, stages)

    monkeypatch.setattr(CUDABackend, "add_stages", add_stages_otherwise)
    found = slow_ptxas_kernel()
    assert not found.is_fast and found.detail.startswith("ptxas runs for every kernel: Triton ")


@pytest.mark.parametrize("wanted", [1, 3])
def test_compile_with_a_hook_expecting_other_keys_runs_ptxas(wanted, fresh_probes, monkeypatch):
    run, asked = triton.compile, []

    def run_with_keys(*arguments, **options):
        hook = triton.knobs.runtime.add_stages_inspection_hook
        if hook is not None:
            asked.append(hook)
            if len(tuple(hook())) != wanted:
                raise ValueError(f"not enough values to unpack (expected {wanted})")
        return run(*arguments, **options)

    monkeypatch.setattr(triton, "compile", run_with_keys)
    found = slow_ptxas_kernel()
    assert not found.is_fast and "not enough values to unpack" in found.detail
    # The hook is not tried again.
    assert len(asked) == 1


def test_compile_with_a_hook_expecting_key_and_hash_skips_ptxas(fresh_probes, monkeypatch):
    run = triton.compile

    def run_with_key(*arguments, **options):
        hook = triton.knobs.runtime.add_stages_inspection_hook
        if hook is not None:
            key, digest = hook()
            assert isinstance(key, str) and isinstance(digest, str)
        return run(*arguments, **options)

    monkeypatch.setattr(triton, "compile", run_with_key)
    assert compiled_add().kernel.asm["cubin"] == b""
    assert feature("PTX without ptxas").is_fast


def test_compile_without_a_hook_runs_ptxas(fresh_probes, monkeypatch):
    without = SimpleNamespace(runtime=SimpleNamespace(), language=triton.knobs.language)
    with monkeypatch.context() as patch:
        patch.setattr(triton, "knobs", without)
        assert "has no hook for the compiler's stages" in private_triton.stage_hook_reason()
    assert not slow_ptxas_kernel().is_fast


def test_compile_of_a_broken_kernel_keeps_the_hook(fresh_probes, monkeypatch):
    def refuse(*arguments, **options):
        raise TypeError("the kernel is wrong")

    # This patch is undone separately. The fixture's patches keep kernels that other tests compiled away from this test.
    with monkeypatch.context() as patch:
        patch.setattr(triton, "compile", refuse)
        with pytest.raises(TypeError, match="the kernel is wrong"):
            compiled_add()
    assert feature("PTX without ptxas").is_fast
    assert triton.knobs.runtime.add_stages_inspection_hook is None
    assert compiled_add().kernel.asm["cubin"] == b""


@pytest.mark.parametrize(
    "names", [{"triton.experimental.gluon.language": ("warp_specialise",)}, {"triton.experimental.gluon.nowhere": ()}]
)
def test_plans_with_unknown_gluon_names_use_plain_triton_kernels(names, fresh_probes, monkeypatch):
    launch = MoBALaunch(BASE, "blocks_forward", heads=(16, 16))
    paged = [launches(PAGED[name])[0] for name in ("latent, 64 heads", "prompts beside other sequences")]
    region = CASES["narrow"].region()
    fused = [x for x in launches_of(region).values() if x.on_hopper is not None]
    fused.append(joint_launch(arrange.arranged(region)[0]))
    elsewhere = [x for x in fused if x.on_hopper.source != x.source]
    assert all(x.plan(TARGET).kernel.is_gluon() for x in (launch, *paged)) and elsewhere
    assert all(x.plan(TARGET).kernel.is_gluon() for x in fused)
    monkeypatch.setattr(private_triton, "_GLUON_NAMES", private_triton._GLUON_NAMES | names)
    private_triton._probe_gluon.cache_clear()
    for module in ("hopper_latent", "hopper_prompts"):
        # Its names may be missing, so it must not be imported.
        monkeypatch.setitem(sys.modules, f"blockdiag.triton_kernels.paged.{module}", None)
    assert not any(x.plan(TARGET).kernel.is_gluon() for x in (launch, *paged))
    assert not any(x.plan(TARGET).kernel.is_gluon() for x in elsewhere)
    found = feature("Gluon kernels for Hopper")
    assert not found.is_fast and found.detail.startswith("plain Triton kernels are used: Triton ")
    for alone in fused:
        if alone not in elsewhere:
            assert isinstance(alone, FusedLaunch)
            with pytest.raises(ValueError, match=r"is for Hopper alone and written in Gluon: Triton .* has no"):
                alone.plan(TARGET)


def test_descriptors_of_an_unknown_class_are_made_by_its_constructor(fresh_probes, monkeypatch):
    torch = pytest.importorskip("torch")
    example, tensor = torch.zeros(0, dtype=torch.float16), torch.zeros(80, 64, dtype=torch.float16)
    made = []
    for _ in range(2):
        make = private_triton.descriptor_maker(example, (80, 64), (64, 1), (32, 64), None)
        made.append(make(tensor))
        monkeypatch.setattr(private_triton, "descriptor_reason", lambda: "it has slots")
    fast, slow = made
    assert fast.base is slow.base is tensor and type(fast) is type(slow)
    assert vars(fast) == vars(slow)
    assert not feature("descriptors without checks").is_fast


def test_interpreter_with_an_unknown_builder_raises_not_implemented_error(fresh_probes, monkeypatch):
    monkeypatch.setattr(private_triton, "_BUILDER_METHODS", ("create_dot", "create_dot_again"))
    with pytest.raises(NotImplementedError, match=r"has no create_dot_again; install triton 3\.6 to 3\.9"):
        private_triton.interpreter_parts()
    assert not feature("interpreter").is_fast


def test_element_types_of_tensor_maps_match_the_driver():
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    for number, expected in TMA_DTYPE_DEVICE_TO_HOST.items():
        if number < 11:
            assert private_triton.driver_element_type({"elem_type": number}) == expected
    for unknown in ({"elem_type": 99}, {"elem_type": 6, "is_im2col": True}, {"elem_type": 0, "fp4_padded": True}):
        with pytest.raises(NotImplementedError, match="a tensor map of an unknown kind"):
            private_triton.driver_element_type(unknown)


@pytest.mark.parametrize(
    ("text", "numbers"), [("3.6.0", (3, 6, 0)), ("3.10.1+git1234", (3, 10, 1)), ("3.9.0.dev2026", (3, 9, 0))]
)
def test_version_returns_the_numbers_of_a_release_name(text, numbers, monkeypatch):
    monkeypatch.setattr(private_triton.importlib.metadata, "version", lambda name: text)
    assert private_triton.version() == numbers


def test_gluon_names_resolve_to_the_first_known_name():
    from blockdiag.triton_kernels.launch.gluon_names import _named

    older, newer = SimpleNamespace(old=1), SimpleNamespace(old=2, new=3)
    assert [_named(owner, "new", "old") for owner in (older, newer)] == [1, 3]
    with pytest.raises(AttributeError, match=r"none of new, newest in ampere; install triton 3\.6 to 3\.9"):
        _named(SimpleNamespace(__name__="ampere"), "new", "newest")
