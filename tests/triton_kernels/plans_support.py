"""Shared code of tests of launch plans: reports of kernels compiled for other architectures."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import triton
import triton.language as tl

from blockdiag.common.dtype_table import EIGHT_BIT_DTYPES, ELEMENT_TYPES
from blockdiag.triton_kernels.launch.compile import buffer_spec, check_plan, compile_key
from blockdiag.triton_kernels.launch.offline import Report, inspect_plan
from blockdiag.triton_kernels.launch.plan import (
    Constexpr,
    Descriptor,
    KernelSpec,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)

_reports: dict[tuple[object, ...], Report] = {}


def report_of(plan: LaunchPlan, arch: int) -> Report:
    """Return a kernel's report; equal kernels share one, because many launches differ only in sizes.

    The arguments of the plan are compared with the parameters of its kernel, too.
    """
    check_plan(plan)
    key = compile_key(plan, arch)
    if key not in _reports:
        with triton.knobs.compilation.scope():
            # Compilation is a few percent faster.
            triton.knobs.compilation.disable_line_info = True
            _reports[key] = inspect_plan(plan, arch)
    assert_arguments_match(plan, _reports[key].kernel)
    return _reports[key]


def launch_cases[P](
    problems: Mapping[str, P],
    launches_of: Callable[[P], Sequence[KernelSpec]],
    architectures: Iterable[int],
    *,
    marks: Mapping[str, pytest.MarkDecorator] | None = None,
    since_89: Container[str] = (),
) -> list[Any]:
    """Return the parameters of a test of each launch of each problem: the problem's name, the launch's place, and arch.

    Args:
        problems: problems by name.
        launches_of: returns the launches of a problem.
        architectures: the architectures to compile for.
        marks: marks of problems by name.
        since_89: names of problems with conversions to e4m3, which need sm_89.
    """
    return [
        pytest.param(
            name,
            place,
            arch,
            id=f"{name}, {launch.name} {place}-{arch}",
            marks=marks[name] if marks and name in marks else (),
        )
        for name, problem in problems.items()
        for place, launch in enumerate(launches_of(problem))
        for arch in architectures
        if arch >= 89 or name not in since_89
    ]


def configurations(specs: Iterable[KernelSpec], arch: int) -> Iterator[tuple[object, ...]]:
    """Yield the kernel and architecture of each launch, with its compiler options and tiles, and with its 8-bit dtypes.

    A launch that the architecture refuses has none.
    """
    for spec in specs:
        try:
            plan = spec.plan(Target.for_arch(arch))
        except NotImplementedError:
            continue
        tile, dtypes = plan.arguments.get("TILE"), frozenset(x.dtype for x in plan.inputs) & set(EIGHT_BIT_DTYPES)
        yield plan.kernel.__name__, arch, plan.options, repr(tile.value) if isinstance(tile, Constexpr) else ""
        yield plan.kernel.__name__, arch, dtypes


def assert_arguments_match(plan: LaunchPlan, kernel) -> None:
    """Assert that a compiled kernel takes a plan's leaves in order, by name, type and alignment of pointers.

    All launchers pass leaves in this order, so each argument reaches the parameter it was made for.
    """
    for leaf in plan.leaves():
        if isinstance(leaf.argument, Constexpr):
            # Triton's cache on disk identifies compile-time values by their text. An address would differ by process.
            assert " at 0x" not in repr(leaf.argument.value), leaf
    expected = [taken for leaf in plan.leaves() for taken in expected_parameters(plan, leaf)]
    found = module_parameters(kernel.asm["source"])
    assert [x[1:] for x in found] == [x[1:] for x in expected], plan.name
    for (name, *_), (leaf_name, *_) in zip(found, expected, strict=True):
        # Triton 3.6 and 3.7 name the members of a group after the parameter alone.
        assert name.partition(".")[0] == leaf_name.partition(".")[0], plan.name
        assert not ("." in name and "." in leaf_name) or name == leaf_name, plan.name
    if not any(isinstance(leaf.argument, Descriptor) for leaf in plan.leaves()):
        kinds = {"i1": ".s8", "i8": ".s8", "i32": ".u32", "i64": ".u64", "f32": ".f32"}
        entry = re.search(r"\.entry[^(]*\(([^)]*)\)", kernel.asm["ptx"])
        taken = re.findall(r"\.param (\.\w+(?: \.ptr)?)", entry[1] if entry else "")
        # Two pointers to scratch memory follow.
        assert taken == [kinds.get(kind, ".u64 .ptr") for _, kind, _ in expected] + [".u64 .ptr"] * 2, plan.name


def expected_parameters(plan: LaunchPlan, leaf) -> list[tuple[str, str, bool]]:
    """Return the name, type and alignment of a leaf's parameters."""
    name, argument = leaf.name, leaf.argument
    match argument:
        case Constexpr():
            return []
        case Scalar():
            return [(name, {"fp32": "f32"}.get(argument.dtype, argument.dtype), False)]
    dtype = ELEMENT_TYPES[buffer_spec(plan, argument).dtype].triton
    element = {"fp16": "f16", "fp32": "f32", "fp64": "f64", "fp8e4nv": "f8E4M3FN", "fp8e5": "f8E5M2"}.get(dtype, dtype)
    element = re.sub(r"^u(\d+)$", r"i\1", element)  # MLIR's integers have no sign
    if isinstance(argument, Pointer):
        return [(name, f"ptr<{element}>", True)]
    tile = "x".join(map(str, argument.block_shape))
    sizes = [(name, kind, False) for kind in ("i32", "i64") for _ in argument.shape]
    return [(name, f"tensordesc<{tile}x{element}>", False), *sizes]


def module_parameters(source: str) -> list[tuple[str, str, bool]]:
    """Return the name, type and alignment to 16 bytes of a kernel's parameters in its MLIR module."""
    head = re.search(r"tt\.func public @\w+\((.*?)\) attributes", source, re.DOTALL)
    found = []
    for name, described in re.findall(r"%([\w.]+): (.*?) loc\(", head[1] if head else ""):
        kind = described.partition(" {")[0].removeprefix("!tt.").removeprefix("!ttng.")
        tensor = re.match(r"tensordesc<(?:tensor<)?(\w+)", kind)
        kind = f"tensordesc<{tensor[1]}>" if tensor else kind
        found.append((re.sub(r"_\d+$", "", name), kind, "divisibility = 16" in described))
    return found


@triton.jit
def round_kernel(p_x, p_out):
    """Round 128 numbers."""
    o_x = tl.arange(0, 128)
    tl.store(p_out + o_x, tl.load(p_x + o_x).to(tl.float8e5))


def compile_rounding_to_e5m2(arch: int) -> Report:
    """Compile a kernel that rounds to e5m2, even if the cache on disk has it."""
    plan = LaunchPlan(
        name="round",
        kernel=round_kernel,
        grid=(1, 1, 1),
        inputs=(TensorSpec((128,), "bfloat16"),),
        outputs=(TensorSpec((128,), "float8_e5m2"),),
        arguments={"p_x": Pointer("input", 0), "p_out": Pointer("output", 0)},
    )
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        return report_of(plan, arch)
