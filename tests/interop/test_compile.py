"""Compilation without a GPU: checks of plans, sharing of kernels, and the offline report."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl

from blockdiag.interop.interpreter.launch import interpret_plan
from blockdiag.triton_kernels.launch import compile as compile_module
from blockdiag.triton_kernels.launch.compile import (
    KernelCompileError,
    check_plan,
    compile_ahead,
    compile_key,
    compile_plan,
    compile_together,
    parameter_places,
    signature,
)
from blockdiag.triton_kernels.launch.offline import inspect_plan
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
    array_group,
    scalar_group,
)
from blockdiag.triton_kernels.launch.private_triton import compile_time_value
from tests.interop.bridge_kernels import (
    AddSpec,
    DeviceDescriptorSpec,
    GluonCopySpec,
    HalvesSpec,
    IncrementSpec,
    MatmulSpec,
)
from tests.triton_kernels.plans_support import assert_arguments_match

pytestmark = pytest.mark.versions

ARCHITECTURES = (80, 90, 100, 120)


def plan_of(spec, arch=90, **changes) -> LaunchPlan:
    return dataclasses.replace(spec.plan(Target.for_arch(arch)), **changes)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "spec", [AddSpec(1000, "bfloat16"), IncrementSpec(300), HalvesSpec(80)], ids=lambda spec: spec.name
)
def test_report_of_a_plain_kernel_shows_registers_and_memory(spec, arch):
    report = inspect_plan(plan_of(spec, arch), arch)
    assert report.arch == arch
    assert 0 < report.registers <= 255
    assert report.spill_bytes == 0 and report.sass["local load"] == 0
    assert report.shared_bytes <= report.shared_limit
    assert report.num_warps == 4 and report.partitions == ()
    assert report.ptx["f64"] == 0 and report.sass["f64"] == 0
    assert spec.name in str(report)


@pytest.mark.parametrize(
    ("arch", "instruction"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma"), (120, "mma.sync")]
)
def test_matmul_uses_the_matrix_unit_of_its_architecture(arch, instruction):
    report = inspect_plan(plan_of(MatmulSpec(1000, 256, 256), arch), arch)
    matrix_instructions = {"wgmma", "tcgen05.mma", "mma.sync"}
    assert report.ptx[instruction] > 0 and report.sass[instruction] > 0
    assert all(report.ptx[other] == 0 for other in matrix_instructions - {instruction})
    assert (report.ptx["cp.async.bulk.tensor"] > 0) == (arch >= 90)
    assert (report.sass["bulk tensor load"] > 0) == (arch >= 90)
    assert (report.tensor_memory_columns > 0) == (arch == 100)
    assert report.tensor_memory_columns <= 512


def test_spills_are_reported_with_the_loops_they_lie_in():
    report = inspect_plan(plan_of(MatmulSpec(1000, 256, 256, block=128), 80, options=CompileOptions(maxnreg=64)), 80)
    assert report.spill_bytes > 0 and report.local_accesses[0] > 0 and report.local_accesses[1] > 0
    assert sum(report.local_accesses.values()) == report.sass["local load"] + report.sass["local store"]


def test_warp_specialised_kernel_reports_partitions_and_real_warps():
    report = inspect_plan(plan_of(MatmulSpec(1000, 256, 256, block=128, specialize=True), 100), 100)
    (partitions,) = report.partitions
    assert partitions and sum(partitions) + 4 <= report.num_warps
    assert report.num_warps == report.kernel.metadata.num_warps > 4


def test_descriptors_made_on_the_device_report_scratch():
    assert inspect_plan(plan_of(DeviceDescriptorSpec(80)), 90).global_scratch_bytes > 0


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_gluon_kernel_compiles(arch):
    report = inspect_plan(plan_of(GluonCopySpec(80), arch), arch)
    assert report.sass["bulk tensor load"] == report.sass["bulk tensor store"] == 1


def test_too_much_shared_memory_raises_kernel_compile_error_with_numbers():
    with pytest.raises(KernelCompileError, match=r"needs \d+ bytes of shared memory, sm_120 has 101376"):
        inspect_plan(plan_of(MatmulSpec(1000, 256, 2048, block=128), 120, options=CompileOptions(num_stages=6)), 120)


@triton.jit
def nonsense_kernel(p_out):
    tl.store(p_out, tl.inline_asm_elementwise("nonsense.b32 $0;", "=r", [], tl.int32, is_pure=True, pack=1))


NONSENSE = LaunchPlan(
    name="nonsense",
    kernel=nonsense_kernel,
    grid=(1, 1, 1),
    inputs=(),
    outputs=(TensorSpec((1,), "int32"),),
    arguments={"p_out": Pointer("output", 0)},
)


def test_ptxas_errors_raise_kernel_compile_error_without_a_dump(capsys):
    with pytest.raises(KernelCompileError, match=r"ptxas refuses kernel 'nonsense' for sm_90(.|\n)*nonsense"):
        inspect_plan(NONSENSE, 90)
    assert capsys.readouterr().out == ""


def test_too_many_warps_raise_kernel_compile_error():
    with pytest.raises(KernelCompileError, match="64 warps"):
        compile_plan(TOO_WIDE, Target(90, 1))


def test_unknown_architecture_raises_value_error():
    with pytest.raises(ValueError, match="`arch` must be one of"):
        inspect_plan(plan_of(AddSpec(10)), 91)


def test_sizes_and_scalars_share_a_kernel_and_compile_time_values_do_not():
    first, other_size, other_scalar = AddSpec(1000), AddSpec(77777), AddSpec(1000, alpha=2.0)
    assert compile_plan(plan_of(first), Target(90, 1)) is compile_plan(plan_of(other_size), Target(90, 132))
    assert compile_plan(plan_of(first), Target(90, 1)) is compile_plan(plan_of(other_scalar), Target(90, 132))
    assert compile_plan(plan_of(first), Target(90, 1)) is not compile_plan(
        plan_of(AddSpec(1000, block=512)), Target(90, 1)
    )
    assert compile_key(plan_of(first), 90) != compile_key(plan_of(first), 100)


def test_compile_keys_of_constants_differ_by_type():
    plan = plan_of(AddSpec(1000))
    keys = {
        compile_key(dataclasses.replace(plan, arguments=plan.arguments | {"BLOCK": Constexpr(value)}), 90)
        for value in (1, 1.0, True, 0.0, -0.0, "1", None)
    }
    assert len(keys) == 7
    assert Scalar(0.0, "fp32") != Scalar(-0.0, "fp32") and Scalar(1, "fp32") == Scalar(1.0, "fp32")


class ScaleArrays(NamedTuple):
    x: Argument
    factor: Argument
    out: Argument


class ScaleScalars(NamedTuple):
    size: Argument
    bias: Argument


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaleTile:
    rows: int
    mode: str = "none"
    bound: float | None = None


@triton.jit
def scale_rows(arrays, o_rows, m_rows, TILE: tl.constexpr):
    b_x = tl.load(arrays.x + o_rows, mask=m_rows, other=0.0)
    if TILE.mode == "factor" and not TILE.bound:
        b_x *= tl.load(arrays.factor)
    return b_x + tl.zeros([TILE.rows], tl.float32)


@triton.jit
def scale_kernel(arrays: ScaleArrays, scalars: ScaleScalars, TILE: tl.constexpr):
    o_rows = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    m_rows = o_rows < scalars.size
    tl.store(arrays.out + o_rows, scale_rows(arrays, o_rows, m_rows, TILE) + scalars.bias, mask=m_rows)


def grouped_plan(input_names=("x", "factor"), **tile) -> LaunchPlan:
    arrays = {"x": TensorSpec((300,), "float32"), "factor": TensorSpec((1,), "float32")}
    return LaunchPlan(
        name="scale",
        kernel=scale_kernel,
        grid=(3, 1, 1),
        inputs=tuple(arrays[name] for name in input_names),
        outputs=(arrays["x"],),
        arguments={
            "arrays": array_group(ScaleArrays, input_names, ("out",)),
            "scalars": scalar_group(ScaleScalars, size=300, bias=Scalar(2.0, "fp32")),
            "TILE": Constexpr(ScaleTile(**{"rows": 128, "mode": "factor"} | tile)),
        },
    )


def test_leaves_of_groups_are_the_parameters_of_the_kernel():
    plan = grouped_plan()
    assert [(leaf.name, leaf.path) for leaf in plan.leaves()] == [
        ("arrays.x", (0, 0)),
        ("arrays.factor", (0, 1)),
        ("arrays.out", (0, 2)),
        ("scalars.size", (1, 0)),
        ("scalars.bias", (1, 1)),
        ("TILE", (2,)),
    ]
    assert_arguments_match(plan, compile_plan(plan, Target(90, 1)).kernel)
    absent = grouped_plan(input_names=("x",), mode="none")
    assert_arguments_match(absent, compile_plan(absent, Target(90, 1)).kernel)


def test_groups_run_in_the_interpreter():
    x, factor = np.arange(300, dtype=np.float32), np.full(1, 3, np.float32)
    np.testing.assert_array_equal(interpret_plan(grouped_plan(), x, factor)[0], 3 * x + 2)
    np.testing.assert_array_equal(interpret_plan(grouped_plan(input_names=("x",), mode="none"), x)[0], x + 2)


def test_groups_are_passed_to_tritons_launcher_in_the_form_of_the_signature():
    plan = grouped_plan()
    leaves = [leaf.argument for leaf in plan.leaves()]
    places = parameter_places(plan)
    assert places is not None
    grouped = [leaves[first] if make is None else make(leaves[first:end]) for first, end, make in places]
    assert grouped == list(plan.arguments.values())
    assert [type(x) for x in grouped[:2]] == [type(x) for x in list(signature(plan).values())[:2]]
    assert parameter_places(plan_of(AddSpec(10))) is None


def test_fields_of_compile_time_values_differ_by_type():
    plans = [grouped_plan(bound=bound) for bound in (1, 1.0, True, 0.0, -0.0, None)]
    assert len({compile_key(plan, 90) for plan in plans}) == 6
    assert compile_key(grouped_plan(), 90) == compile_key(grouped_plan(), 90)


def test_compile_time_values_give_different_kernels():
    kernels = {rows: compile_plan(grouped_plan(rows=rows), Target(90, 1)) for rows in (64, 128)}
    assert kernels[64].ptx != kernels[128].ptx
    assert compile_plan(grouped_plan(), Target(90, 1)) is kernels[128]


def test_unknown_fields_are_refused():
    with pytest.raises(AttributeError, match="ScaleTile has no field 'columns'"):
        _ = compile_time_value(ScaleTile(rows=1)).columns


class Named(NamedTuple):
    values: Argument


def test_scalars_keep_their_types_in_the_kernel():
    ptx = compile_plan(plan_of(AddSpec(1000)), Target(90, 1)).ptx
    assert ".f64" not in ptx
    assert ptx.count(".param .u32 add_kernel") == ptx.count(".param .f32 add_kernel") == 1


def replaced(plan: LaunchPlan, **arguments) -> LaunchPlan:
    return dataclasses.replace(plan, arguments=plan.arguments | arguments)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(AddSpec(10), grid=(0, 1, 1)), "`grid` must be three sizes"),
        (plan_of(AddSpec(10), grid=(1, 70000, 1)), "`grid` must be three sizes"),
        (plan_of(AddSpec(10), arguments={"p_x": Pointer("input", 0)}), "must name the kernel's parameters"),
        (replaced(plan_of(AddSpec(10)), p_x=Pointer("input", 2)), "there is no input 2"),
        (replaced(plan_of(AddSpec(10)), p_x=3), "is not an argument of a plan"),
        (replaced(plan_of(AddSpec(10)), p_x=(Pointer("input", 0),)), "must be a NamedTuple"),
        (
            replaced(plan_of(AddSpec(10)), p_x=Named(Descriptor("input", 0, (10,), (8,)))),
            "attributes `values` and `type`",
        ),
        (
            replaced(grouped_plan(), arrays=ScaleArrays(*[Descriptor("input", 0, (300,), (8,))] * 3)),
            "only for parameters of their own",
        ),
        (
            replaced(grouped_plan(), scalars=ScaleScalars(Scalar(2**31, "i32"), Scalar(0.0, "fp32"))),
            "'scalars.size': 2147483648 does not fit i32",
        ),
        (replaced(plan_of(AddSpec(10)), p_out=Pointer("input", 0)), "no parameter of the kernel refers to output 0"),
        (replaced(plan_of(AddSpec(10)), num_elements=Scalar(2**31, "i32")), "does not fit i32"),
        (plan_of(AddSpec(10, "float99")), "dtype 'float99' must be one of"),
        (plan_of(IncrementSpec(300), aliases=((0, 1),)), "must have one shape and dtype"),
        (plan_of(IncrementSpec(300), aliases=((0, 0), (0, 0))), "must pair each input and output once"),
        (plan_of(IncrementSpec(300), aliases=((3, 0),)), "names no input and output"),
        (plan_of(MatmulSpec(64, 63, 64)), "multiples of 16 bytes"),
        (
            replaced(plan_of(MatmulSpec(64, 64, 64)), d_a=Descriptor("input", 0, (128, 64), (64, 64))),
            "larger than its array",
        ),
        (replaced(plan_of(MatmulSpec(64, 64, 64)), d_a=Descriptor("input", 0, (64, 64), (64, 4))), "at least 16 bytes"),
        (replaced(plan_of(MatmulSpec(64, 64, 64)), d_a=Descriptor("input", 0, (64, 64), (64,))), "one equal rank"),
        (replaced(plan_of(MatmulSpec(64, 64, 64)), d_a=Descriptor("input", 0, (0, 64), (64, 64))), "within 1.."),
    ],
)
def test_invalid_plans_raise_value_error(plan, message):
    with pytest.raises(ValueError, match=message):
        check_plan(plan)
        compile_key(plan, 90)


def test_empty_output_needs_no_parameter():
    plan = plan_of(AddSpec(10))
    check_plan(dataclasses.replace(plan, outputs=(*plan.outputs, TensorSpec((0, 4), "float32"))))


SECOND_PROCESS = """
import triton
from blockdiag.triton_kernels.launch.compile import compile_plan
from blockdiag.triton_kernels.launch.plan import Target
from tests.interop.bridge_kernels import AddSpec, GluonCopySpec, MatmulSpec

hits = []
triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
for spec in (AddSpec(1000), AddSpec(2000), MatmulSpec(64, 64, 64), GluonCopySpec(64)):
    compile_plan(spec.plan(Target.for_arch(90)), Target.for_arch(90))
print(hits)
"""


def test_second_process_loads_kernels_from_the_disk_cache(tmp_path, pytestconfig):
    def hits() -> str:
        environment = os.environ | {
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(pytestconfig.rootpath / "src"), str(pytestconfig.rootpath)]),
        }
        command = [sys.executable, "-c", SECOND_PROCESS]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert hits() == str([False] * 3)  # the second AddSpec needs no kernel of its own
    assert hits() == str([True] * 3)


TARGET = Target.for_arch(90)
SPECS = (AddSpec(1000), MatmulSpec(64, 64, 64), GluonCopySpec(64), HalvesSpec(80))
TOO_WIDE = plan_of(AddSpec(999), options=CompileOptions(num_warps=64))


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    """Forget all kernels, in memory and on disk, and return the function that does so."""
    folders = iter(range(100))

    def forget() -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / str(next(folders))))
        monkeypatch.setattr(compile_module, "_compiled", {})

    forget()
    return forget


@pytest.fixture
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def test_compile_together_equals_compiling_one_by_one(nothing_compiled, two_processors):
    def binaries(compiled) -> list[tuple[bytes, str]]:
        return [(launch.kernel.asm["cubin"], launch.ptx) for launch in compiled]

    plans = [spec.plan(TARGET) for spec in SPECS]
    in_turn = binaries([compile_plan(plan, TARGET) for plan in plans])
    assert not any(cubin for cubin, _ in in_turn)
    for _ in range(2):
        nothing_compiled()
        together = compile_together([(plan, TARGET) for plan in plans])
        assert binaries(together) == in_turn
        # `compile_plan` returns the same kernels afterwards.
        assert all(compile_plan(plan, TARGET) is launch for plan, launch in zip(plans, together, strict=True))


def test_ptxas_runs_only_when_a_binary_is_requested(nothing_compiled, monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    assembled, make_cubin, hits = [], CUDABackend.make_cubin, []

    def watched(*arguments):
        assembled.append(None)
        return make_cubin(*arguments)

    monkeypatch.setattr(CUDABackend, "make_cubin", watched)
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: hits.append(event["cache_hit"]))
    for spec in (SPECS[1], SPECS[2]):
        plan = spec.plan(TARGET)
        text = compile_plan(plan, TARGET)
        assert not assembled and not text.kernel.asm["cubin"]
        binary = compile_plan(plan, TARGET, binary=True)
        assert len(assembled) == 1 and binary.kernel.asm["cubin"] and binary.ptx == text.ptx
        # A call that needs no binary accepts a kernel that has one. On disk, each kind has its own files.
        assert compile_plan(plan, TARGET) is binary is compile_plan(plan, TARGET, binary=True)
        monkeypatch.setattr(compile_module, "_compiled", {})
        assert not compile_plan(plan, TARGET).kernel.asm["cubin"]
        assert compile_plan(plan, TARGET, binary=True).kernel.asm["cubin"] == binary.kernel.asm["cubin"]
        assert hits == [False, False, True, True] and len(assembled) == 1
        assembled.clear(), hits.clear()


def test_compile_keeps_a_stages_hook_of_the_user(nothing_compiled, monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    inspected, inspections = [], triton.knobs.runtime

    def inspect(*asked):
        if not asked:
            return "theirs", "theirs"  # Triton 3.7 and later ask for a key first
        _, _, options, language, capability = asked
        backend, inspected_stages = asked[:2]
        assert "cubin" in inspected_stages
        inspected.append(capability)
        if len(inspected) == 1:
            # A compilation in another thread meanwhile must get all stages.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(elsewhere, backend, options, language, capability).result()

    def elsewhere(backend, options, language, capability):
        stages = {"cubin": CUDABackend.make_cubin}
        inspections.add_stages_inspection_hook(backend, stages, options, language, capability)
        assert stages == {"cubin": CUDABackend.make_cubin}

    monkeypatch.setattr(inspections, "add_stages_inspection_hook", inspect)
    assert not compile_plan(SPECS[0].plan(TARGET), TARGET).kernel.asm["cubin"]
    with pytest.raises(KernelCompileError):
        compile_plan(TOO_WIDE, TARGET)
    assert inspected == [90, 90, 90] and inspections.add_stages_inspection_hook is inspect


def test_compile_together_starts_with_the_longest_kernel(nothing_compiled, monkeypatch):
    begun = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: begun.append(event["src"].name))
    compiled = compile_together([(spec.plan(TARGET), TARGET) for spec in SPECS[:2]])
    assert begun == ["matmul_kernel", "add_kernel"]
    assert [launch.name for launch in compiled] == ["add_kernel", "matmul_kernel"]


def test_compile_together_runs_llvm_for_several_kernels_at_once(nothing_compiled, two_processors, monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    meeting, make_ptx = threading.Barrier(2, timeout=60), CUDABackend.make_ptx

    def make_ptx_beside_another(*arguments):
        meeting.wait()
        return make_ptx(*arguments)

    monkeypatch.setattr(CUDABackend, "make_ptx", make_ptx_beside_another)
    compile_together([(spec.plan(TARGET), TARGET) for spec in SPECS[:2]])


def test_compile_together_runs_the_front_end_in_one_thread_at_a_time(nothing_compiled, two_processors, monkeypatch):
    import triton.compiler.code_generator as code_generator

    translate, inside, most = code_generator.ast_to_ttir, [], []

    def watched(*arguments, **options):
        inside.append(None)
        time.sleep(0.05)
        most.append(len(inside))
        module = translate(*arguments, **options)
        inside.pop()
        return module

    monkeypatch.setattr(code_generator, "ast_to_ttir", watched)
    compile_together([(spec.plan(TARGET), TARGET) for spec in SPECS])
    assert most == [1] * len(SPECS)


def test_threads_that_want_one_kernel_compile_it_once(nothing_compiled, monkeypatch):
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: hits.append(event["cache_hit"]))
    plan = SPECS[1].plan(TARGET)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compile_plan(plan, TARGET), range(4)))
    assert hits == [False] and all(launch is found[0] for launch in found)


def test_kernel_that_fails_raises_in_every_thread_that_needs_it(nothing_compiled, two_processors, capsys):
    good = SPECS[0].plan(TARGET)
    with pytest.raises(KernelCompileError, match="64 warps"):
        compile_together([(TOO_WIDE, TARGET), (good, TARGET)])
    assert [future.result().kernel.name for future in compile_module._compiled.values()] == ["add_kernel"]

    def failure(_) -> BaseException | None:
        with pytest.raises(KernelCompileError, match="ptxas refuses kernel 'nonsense'"):
            compile_plan(NONSENSE, TARGET, binary=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(failure, range(3)))
    # The front end must also be released by a kernel that fails before it is a module.
    unfit = dataclasses.replace(good, arguments=good.arguments | {"BLOCK": Constexpr(3)})
    with pytest.raises(triton.CompilationError):
        compile_plan(unfit, TARGET)
    assert compile_together([(SPECS[2].plan(TARGET), TARGET), (good, TARGET)])[1] is compile_plan(good, TARGET)


def test_compile_plan_waits_for_a_kernel_compiled_ahead(nothing_compiled, monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    begun, make_ptx, hits = threading.Event(), CUDABackend.make_ptx, []

    def slow_make_ptx(*arguments):
        begun.set()
        time.sleep(0.2)
        return make_ptx(*arguments)

    monkeypatch.setattr(CUDABackend, "make_ptx", slow_make_ptx)
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: hits.append(event["cache_hit"]))
    plan = SPECS[0].plan(TARGET)
    compile_ahead([(plan, TARGET)])
    assert begun.wait(60) and hits == []
    compiled = compile_plan(plan, TARGET)
    compile_ahead([(plan, TARGET)])
    assert hits == [False] and compile_plan(plan, TARGET) is compiled


def test_kernel_that_fails_ahead_raises_where_it_is_requested(nothing_compiled, monkeypatch, capsys):
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(compile_module, "_ahead", lambda process: pool)
        compile_ahead([(TOO_WIDE, TARGET)])
        with pytest.raises(KernelCompileError, match="64 warps"):
            compile_plan(TOO_WIDE, TARGET)
    with pytest.raises(ValueError, match="`grid` must be three sizes"):
        compile_ahead([(plan_of(AddSpec(10), grid=(0, 1, 1)), TARGET)])


def test_compile_threads_of_a_new_process_do_not_import_gluon_concurrently(tmp_path):
    """The first program with a derivative in a new process needs Gluon in several threads."""
    program = """
import jax, jax.numpy as jnp
from blockdiag import fuse
from blockdiag.interop import compile_target
from tests.fusion.resident_cases import CASES

case = CASES["three_chunks"]
given = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in case.shapes.items()}
loss = lambda given: fuse(case.function, implementation="triton")(**given).astype(jnp.float32).sum()
with compile_target(90):
    lowered = jax.jit(jax.grad(loss)).trace(given).lower(lowering_platforms=("cuda",))
print(lowered.as_text().count("custom_call @triton_kernel_call_ffi"))
"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["4"]


def test_made_callback_runs_once_per_kernel(nothing_compiled, two_processors):
    plans = [spec.plan(TARGET) for spec in SPECS[:2]]
    made = []
    compile_ahead([(plans[0], TARGET)], made=lambda *launch: made.append(launch))
    compile_together([(plan, TARGET) for plan in plans], made=lambda *launch: made.append(launch))
    compile_plan(plans[1], TARGET, made=lambda *launch: made.append(launch))
    # A caller that waits for a kernel may continue before `made` is called.
    for _ in range(100):
        if len(made) == 2:
            break
        time.sleep(0.05)
    assert {id(plan) for plan, _ in made} == set(map(id, plans))
    assert len(made) == 2
    assert {target for _, target in made} == {TARGET}
