"""jaxlib's launcher: the buffer of each kernel parameter, and detection of supported launchers."""

import dataclasses
import importlib
import importlib.metadata
import re
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest

from blockdiag.common.features import Feature
from blockdiag.interop import jax_call, jaxlib_launcher
from blockdiag.triton_kernels.launch.compile import compile_plan
from blockdiag.triton_kernels.launch.plan import (
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)
from tests.interop.bridge_kernels import AddSpec, DeviceDescriptorSpec, MatmulSpec, SineSpec

pytestmark = pytest.mark.versions

VECTOR = TensorSpec((4,), "float32")
X, Y = Pointer("input", 0), Pointer("input", 1)
OUT, OTHER = Pointer("output", 0), Pointer("output", 1)


def plan_with(*arguments, outputs=1, aliases=()) -> LaunchPlan:
    return LaunchPlan(
        name="example",
        kernel=None,
        grid=(1, 1, 1),
        inputs=(VECTOR, VECTOR),
        outputs=(VECTOR,) * outputs,
        arguments={f"p{position}": argument for position, argument in enumerate(arguments)},
        aliases=aliases,
    )


@pytest.mark.parametrize(
    ("plan", "operands", "results", "aliases"),
    [
        (plan_with(X, Y, OUT), [("input", 0), ("input", 1)], (0,), {}),
        (plan_with(Y, Scalar(1, "i32"), X, OUT, Constexpr(1)), [("input", 1), ("input", 0)], (0,), {}),
        # An input of two parameters becomes two operands.
        (plan_with(X, Y, X, OUT), [("input", 0), ("input", 1), ("input", 0)], (0,), {}),
        # An unused input is no operand.
        (plan_with(Y, OUT), [("input", 1)], (0,), {}),
        # Parameters may name outputs in any order.
        (plan_with(X, OTHER, OUT, outputs=2), [("input", 0)], (1, 0), {}),
        # An output that precedes an input or is used twice aliases a buffer that is passed as an operand.
        (plan_with(OUT, X), [("output", 0), ("input", 0)], (0,), {0: 0}),
        (plan_with(X, OUT, OUT), [("input", 0), ("output", 0)], (0,), {1: 0}),
        (
            plan_with(X, OUT, OTHER, OUT, OTHER, outputs=2),
            [("input", 0), ("output", 0), ("output", 1)],
            (0, 1),
            {1: 0, 2: 1},
        ),
        # An aliased output is its input, whichever of the two a parameter names.
        (plan_with(X, Y, aliases=((0, 0),)), [("input", 0), ("input", 1)], (0,), {0: 0}),
        (plan_with(OUT, Y, aliases=((0, 0),)), [("input", 0), ("input", 1)], (0,), {0: 0}),
        (plan_with(X, OUT, aliases=((0, 0),)), [("input", 0)], (0,), {0: 0}),
        (
            plan_with(Y, OTHER, X, outputs=2, aliases=((0, 0),)),
            [("input", 1), ("output", 1), ("input", 0)],
            (0, 1),
            None,
        ),
    ],
)
def test_lay_out_buffers_orders_operands_and_results(plan, operands, results, aliases):
    layout = jaxlib_launcher.lay_out_buffers(plan)
    assert list(layout.operands) == operands
    assert layout.results == results
    assert layout.aliases == (aliases if aliases is not None else {1: 1, 2: 0})
    # The launcher assigns the operands, and then the results, to the array parameters in order.
    arrays = [argument for argument in plan.arguments.values() if isinstance(argument, Pointer)]
    walk = [*layout.operands, *(("output", index) for index in layout.results)]
    shared = {("output", output): ("input", source) for source, output in plan.aliases}
    for argument, met in zip(arrays, walk, strict=False):
        wanted = (argument.role, argument.index)
        assert shared.get(wanted, wanted) == shared.get(met, met)


@pytest.mark.parametrize(
    "plan",
    [
        plan_with(OUT, OUT, X),
        plan_with(X, OUT, OUT, OUT),
        plan_with(X, OUT, OUT, OTHER, OTHER, outputs=2),
        plan_with(X, X, Y, aliases=((0, 0),)),
    ],
)
def test_unsupported_buffer_layouts_raise_not_implemented_error(plan):
    with pytest.raises(NotImplementedError, match="Put outputs after inputs"):
        jaxlib_launcher.lay_out_buffers(plan)


def wire_fields(message: bytes) -> dict[int, list]:
    """Return the fields of a protocol buffer message by number, as integers or bytes."""
    fields: dict[int, list] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while position < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            value = message[position : position + size]
            position += size
        fields.setdefault(number, []).append(value)
    return fields


def opaque_parameters(plan, compiled) -> list[bytes]:
    return wire_fields(wire_fields(zlib.decompress(jaxlib_launcher.build_opaque(plan, compiled)))[1][0])[5]


def kernel_call_of(spec, target: Target) -> tuple[dict[int, list], dict[int, list]]:
    plan = spec.plan(target)
    opaque = jaxlib_launcher.build_opaque(plan, compile_plan(plan, target))
    any_call = wire_fields(zlib.decompress(opaque))
    assert any_call[4] == [spec.name.encode()]
    call = wire_fields(any_call[1][0])
    return call, wire_fields(call[1][0])


def test_opaque_message_holds_the_launch():
    spec = AddSpec(1000, alpha=0.25)
    call, kernel = kernel_call_of(spec, Target(90, 132))
    assert kernel[1] == [b"add_kernel"]
    assert kernel[2] == [4]
    assert kernel[6] == [90]
    assert b".f64" not in kernel[5][0] if 5 in kernel else True
    assert b"sm_90a" in kernel[4][0] and b".f64" not in kernel[4][0]
    assert [call[2], call[3], call[4]] == [[4], [1], [1]]
    kinds = [next(iter(wire_fields(parameter))) for parameter in call[5]]
    assert kinds == [1, 1, 1, 3, 7]  # three arrays, an i32, an f32; no f64
    assert wire_fields(call[5][3]) == {3: [1000]}


@pytest.mark.parametrize("spec", [AddSpec(1000), MatmulSpec(200, 128, 256), SineSpec(1000)], ids=lambda spec: spec.name)
def test_dropping_line_information_changes_no_instruction(spec, tmp_path):
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    _, kernel = kernel_call_of(spec, Target(90, 132))
    full = compile_plan(spec.plan(Target(90, 132)), Target(90, 132)).ptx
    assert b"bridge_kernels" not in kernel[4][0] and "bridge_kernels" in full
    assert (".local" in full) == isinstance(spec, SineSpec)
    instructions = []
    for ptx in (full.encode(), kernel[4][0]):
        source, binary = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        source.write_bytes(ptx)
        subprocess.run([get_ptxas(90).path, "--gpu-name=sm_90a", source, "-o", binary], check=True)
        dump = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", binary], check=True, capture_output=True)
        instructions.append(dump.stdout)
    assert instructions[0] == instructions[1] and b"EXIT" in instructions[0]


def test_opaque_message_has_the_compiled_number_of_warps():
    _, kernel = kernel_call_of(MatmulSpec(1000, 256, 256, block=128, specialize=True), Target(100, 148))
    assert kernel[2][0] > 4


def test_opaque_message_has_scratch_for_device_descriptors():
    _, kernel = kernel_call_of(DeviceDescriptorSpec(80), Target(90, 132))
    assert kernel[12][0] > 0
    _, kernel = kernel_call_of(AddSpec(1000), Target(90, 132))
    assert 12 not in kernel


@pytest.mark.parametrize(
    ("arch", "counts"),
    # Without TMA, Triton 3.6 and 3.7 have one flag for each of the two descriptors, and later versions two.
    [(90, {2 * 5 + 2}), (80, {2 * (1 + 2 + 2 + flags + 2 + 2) + 2 for flags in (1, 2)})],
)
def test_descriptor_parameters_match_the_kernel_entry(arch, counts):
    spec = MatmulSpec(200, 128, 256)
    call, kernel = kernel_call_of(spec, Target(arch, 132))
    # Two more of the entry's parameters are scratch pointers, which the launcher adds.
    entry = kernel[4][0].split(b".entry")[1].split(b")")[0]
    assert entry.count(b".param") == len(call[5]) + 2
    assert len(call[5]) in counts


def entry_with(compiled, change: int):
    """Return a compiled kernel whose entry takes more parameters, or fewer."""
    head, entry, rest = re.split(r"(\.entry[^)]*)\)", compiled.ptx, maxsplit=1)
    parameters = entry.split(",")
    parameters = parameters[:change] if change < 0 else [*parameters, *parameters[-1:] * change]
    text = f"{head}{','.join(parameters)}){rest}"
    return dataclasses.replace(compiled, kernel=SimpleNamespace(asm={"ptx": text}))


@pytest.mark.parametrize("change", [-1, 1])
def test_build_opaque_with_unknown_entry_parameters_raises_not_implemented_error(change):
    target = Target(90, 132)
    for spec in (AddSpec(1000), MatmulSpec(200, 128, 256)):
        plan = spec.plan(target)
        compiled = compile_plan(plan, target)
        with pytest.raises(NotImplementedError, match=r"its entry takes \d+ parameters and \d+ are known"):
            jaxlib_launcher.build_opaque(plan, entry_with(compiled, change))


def test_build_opaque_of_decomposed_descriptors_passes_the_flags_of_the_entry():
    target = Target(80, 108)
    plan = MatmulSpec(200, 128, 256).plan(target)
    compiled = compile_plan(plan, target)
    known = len(opaque_parameters(plan, compiled))
    # One more flag for each of the two descriptors is known, but not one for only one of them.
    assert len(opaque_parameters(plan, entry_with(compiled, 2))) == known + 2
    with pytest.raises(NotImplementedError, match="in an unknown way"):
        jaxlib_launcher.build_opaque(plan, entry_with(compiled, 1))


@pytest.fixture
def launcher(monkeypatch):
    """Yield a function that replaces some names of jaxlib's launcher."""

    def replace(**names) -> None:
        known = importlib.import_module("jaxlib.gpu_triton")
        given = {name: value for name, value in (vars(known) | names).items() if value is not None}
        monkeypatch.setitem(sys.modules, "jaxlib.gpu_triton", SimpleNamespace(**given))
        jaxlib_launcher._launcher_reason.cache_clear()

    yield replace
    monkeypatch.undo()
    jaxlib_launcher._launcher_reason.cache_clear()


def takes_other_arguments(name: str, description: bytes) -> None:
    raise AssertionError("a probe must not get this far")


class CallWithoutName:
    def __init__(self, *arguments):
        pass

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return b"another description"


UNKNOWN = {
    "a function is gone": ({"create_tma_descriptor_parameter": None}, "create_tma_descriptor_parameter"),
    "a class is gone": ({"TritonKernel": None}, "TritonKernel"),
    "other arguments": ({"TritonKernelCall": takes_other_arguments}, "TypeError"),
    "another description": ({"TritonKernelCall": CallWithoutName}, "its description of a launch has an unknown form"),
}


@pytest.mark.parametrize(("names", "problem"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_launcher_is_unavailable_with_a_remedy(names, problem, launcher):
    launcher(**names)
    reason = jaxlib_launcher.availability()
    assert f"jaxlib {importlib.metadata.version('jaxlib')} has no launcher" in reason and problem in reason
    assert "install" in reason and "implementation='xla'" in reason
    assert jax_call.available() == reason
    plan = AddSpec(10).plan(Target(90, 1))
    compiled = compile_plan(plan, Target(90, 1))
    with pytest.raises(NotImplementedError, match="no launcher of Triton kernels in the known form"):
        jaxlib_launcher.build_opaque(plan, compiled)
    assert jaxlib_launcher.describe_features()[0] == Feature("jaxlib: launcher of Triton kernels", False, reason)


@pytest.mark.parametrize("version", ["0.11.1", "0.12.0.1", "0.13.0", "1.0.0"])
def test_launcher_of_the_known_form_is_available_whatever_the_version(version, launcher, monkeypatch):
    launcher()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert jaxlib_launcher.availability() is None
    assert jaxlib_launcher.describe_features()[0].is_fast


def test_availability_without_packages_names_them(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    jaxlib_launcher._plugin_reason.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "CUDA plugin" in jaxlib_launcher.availability() and "install jax[cuda13]" in jaxlib_launcher.availability()
    monkeypatch.undo()
    jaxlib_launcher._plugin_reason.cache_clear()
    monkeypatch.setattr(jax_call.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in jax_call.available()


def test_lay_out_buffers_treats_descriptors_like_pointers():
    spec = MatmulSpec(64, 64, 64)
    plan = spec.plan(Target(90, 1))
    twice = dataclasses.replace(
        plan,
        arguments={**plan.arguments, "more": Descriptor("input", 0, (64, 64), (64, 64)), "p_c2": Pointer("output", 0)},
    )
    layout = jaxlib_launcher.lay_out_buffers(twice)
    assert layout.operands == (("input", 0), ("input", 1), ("output", 0), ("input", 0))
