"""Kernels that exist only as text: compilers get Triton functions, and cached kernels are not turned into functions."""

import dataclasses
import os
import subprocess
import sys

import pytest
from triton.runtime.jit import JITCallable

from blockdiag.fusion.runtime import arrange
from blockdiag.interop.interpreter.launch import interpret_plan
from blockdiag.triton_kernels.launch import generated
from blockdiag.triton_kernels.launch.compile import compile_key, compile_plan
from blockdiag.triton_kernels.launch.generated import GeneratedKernel, function_of, modules_needed
from blockdiag.triton_kernels.launch.plan import Constexpr, LaunchPlan, Pointer, Target, TensorSpec
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.lowering.test_resident_schedule import joint_launch
from tests.fusion.resident_cases import CASES

HEAD = """import triton
import triton.language as tl

from blockdiag.triton_kernels.parts.tiles import rotate


"""
FILL = f"""{HEAD}@triton.jit
def other_kernel(p_out):
    tl.store(p_out, 0)


@triton.jit
def fill_kernel(p_out, BLOCK: tl.constexpr, VALUE: tl.constexpr = 3):
    tl.store(p_out + tl.arange(0, BLOCK), VALUE)
"""
TARGET = Target.for_arch(90)


def plan_of(kernel) -> LaunchPlan:
    return LaunchPlan(
        name="fill",
        kernel=kernel,
        grid=(1, 1, 1),
        inputs=(),
        outputs=(TensorSpec((64,), "int32"),),
        arguments={"p_out": Pointer("output", 0), "BLOCK": Constexpr(64), "VALUE": Constexpr(3)},
    )


def resident_kernels() -> list[GeneratedKernel]:
    launches = launches_of(CASES["narrow"].region()).values()
    sources = [launch.on_hopper.source if launch.on_hopper else launch.source for launch in launches]
    joint = [joint_launch(arrange.arranged(CASES[name].region())[0]).source for name in ("narrow", "wide")]
    return [GeneratedKernel(source.text, source.name) for source in (*sources, *joint)]


def test_generated_kernel_matches_its_function():
    kernels = [GeneratedKernel(FILL, "fill_kernel"), *resident_kernels()]
    assert {kernel.is_gluon() for kernel in kernels} == {True, False}
    for kernel in kernels:
        function = function_of(kernel)
        assert kernel.arg_names == function.arg_names and kernel.is_gluon() == function.is_gluon()
        assert kernel.__name__ == function.__name__ and function_of(function) is function
        assert function_of(GeneratedKernel(kernel.text, kernel.name)) is function


def test_generated_kernel_is_compiled_and_interpreted_like_its_function():
    kernel = GeneratedKernel(FILL, "fill_kernel")
    (filled,) = interpret_plan(plan_of(kernel))
    assert (filled == 3).all()
    text, function = compile_plan(plan_of(kernel), TARGET), compile_plan(plan_of(function_of(kernel)), TARGET)
    assert text is not function and text.kernel.asm["cubin"] == function.kernel.asm["cubin"]
    assert compile_plan(plan_of(GeneratedKernel(FILL, "fill_kernel")), TARGET) is text


def test_cache_key_depends_on_the_text_and_its_imported_modules(monkeypatch):
    key = GeneratedKernel(FILL, "fill_kernel").cache_key
    assert GeneratedKernel(FILL + "\n", "fill_kernel").cache_key != key
    assert GeneratedKernel(FILL, "other_kernel").cache_key != key
    assert compile_key(plan_of(GeneratedKernel(FILL, "fill_kernel")), 90)[0] == key
    read = generated._source_of
    for module in ("blockdiag.triton_kernels.parts.tiles", "blockdiag.triton_kernels.moba.plans"):
        monkeypatch.setattr(generated, "_source_of", lambda name, m=module: read(name) + "#" * (name == m))
        assert (GeneratedKernel(FILL, "fill_kernel").cache_key != key) == module.endswith("tiles")


def test_cache_key_covers_the_modules_of_every_called_function():
    for kernel in resident_kernels():
        known, waiting = modules_needed(kernel.text) | {"blockdiag.generated"}, [function_of(kernel)]
        # By identity: the hash of a function copies its constants, which may hold functions that cannot be copied.
        seen = {}
        while waiting:
            function = waiting.pop()
            if id(function) not in seen:
                seen[id(function)] = function
                names = function.fn.__code__.co_names
                found = [function.__globals__.get(name) for name in names]
                waiting += [
                    x for x in found if isinstance(x, JITCallable) and not x.fn.__module__.startswith("triton.")
                ]
        assert {function.fn.__module__ for function in seen.values()} <= known
        assert len(seen) > 1 or not kernel.is_gluon()


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (FILL, "empty_kernel", "defines no kernel 'empty_kernel'"),
        (FILL.replace("@triton.jit\n", ""), "fill_kernel", "defines no kernel 'fill_kernel'"),
        ("import numpy\n" + FILL, "fill_kernel", "imports numpy"),
    ],
)
def test_invalid_kernel_texts_raise_value_error(text, name, message):
    with pytest.raises(ValueError, match=message):
        GeneratedKernel(text, name)


def test_imports_not_by_module_name_raise_value_error():
    for imported in ("from blockdiag.triton_kernels import tiles", "import blockdiag.no_module"):
        with pytest.raises(ValueError, match="import modules of this library by name"):
            _ = GeneratedKernel(FILL.replace(HEAD, f"{HEAD}{imported}\n\n\n"), "fill_kernel").cache_key


SECOND_PROCESS = """
import sys
import triton
from blockdiag.triton_kernels.launch import generated
from blockdiag.triton_kernels.launch.compile import compile_plan
from blockdiag.triton_kernels.launch.generated import GeneratedKernel
from blockdiag.triton_kernels.launch.plan import Constexpr, LaunchPlan, Pointer, Target, TensorSpec

plan = LaunchPlan(
    name="fill",
    kernel=GeneratedKernel(sys.argv[1], "fill_kernel"),
    grid=(1, 1, 1),
    inputs=(),
    outputs=(TensorSpec((64,), "int32"),),
    arguments={"p_out": Pointer("output", 0), "BLOCK": Constexpr(64), "VALUE": Constexpr(3)},
)
hits = []
triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
compile_plan(plan, Target.for_arch(90))
print(hits, generated._function.cache_info().misses, "blockdiag.triton_kernels.parts.tiles" in sys.modules)
"""


def test_kernel_in_the_disk_cache_is_not_turned_into_a_function(tmp_path, pytestconfig):
    def said(text: str) -> str:
        environment = os.environ | {
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(pytestconfig.rootpath / "src"), str(pytestconfig.rootpath)]),
        }
        command = [sys.executable, "-c", SECOND_PROCESS, text]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert said(FILL) == "[False] 1 True"
    assert said(FILL) == "[True] 0 False"
    assert said(FILL.replace("VALUE)", "VALUE + 1)")) == "[False] 1 True"


def test_equal_texts_are_equal_kernels():
    one, other = GeneratedKernel(FILL, "fill_kernel"), GeneratedKernel(FILL, "fill_kernel")
    assert one == other and hash(one) == hash(other) and plan_of(one) == plan_of(other)
    assert one != dataclasses.replace(one, name="other_kernel")
