"""`python -m blockdiag doctor`."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import math
import platform
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import blockdiag
import blockdiag.torch
from blockdiag.cli import app as command_line
from blockdiag.cli import doctor, doctor_checks, doctor_features
from blockdiag.cli.doctor_checks import Outcome
from blockdiag.cli.doctor_features import features_table
from blockdiag.common.features import Feature
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from blockdiag.ops.registry import OPERATIONS
from tests.support import Case, exact_attention, largest_error, naive_attention, to_array


def run_doctor(*arguments: str):
    return CliRunner().invoke(command_line.app, ["doctor", *arguments], env={"COLUMNS": "300"})


def text_of(table) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def rows_of(report: dict, op: str, framework: str = "JAX") -> dict[str, dict]:
    """Return the outcome of each implementation of an op."""
    found = [entry for entry in report["implementations"] if (entry["op"], entry["framework"]) == (op, framework)]
    return {entry["implementation"]: entry["outcome"] for entry in found}


@pytest.fixture(scope="module")
def report(no_other_distributions) -> dict:
    """Return doctor's report on this machine, with every check run."""
    result = run_doctor("--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True, scope="module")
def no_other_distributions() -> Iterator[None]:
    """Keep doctor from reading every distribution's files, which test_package_versions.py covers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "other_distributions", dict)
        yield


@pytest.fixture
def only_convolution(monkeypatch) -> Iterator[None]:
    """Limit doctor to one cheap op, whose implementations a test may break."""
    cases = tuple(case for case in doctor_checks.CASES if case.op == "key_convolution")
    monkeypatch.setattr(doctor_checks, "CASES", cases)
    # JAX caches traces, which must not mix correct and broken implementations.
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_report_has_versions_and_devices(report):
    assert report["python"] == platform.python_version()
    assert report["packages"]["jax"]
    assert set(report["packages"]) == set(doctor.PACKAGES)
    assert report["devices"][0]["platform"] in ("cpu", "gpu")


def test_every_implementation_of_every_op_is_within_tolerance(report):
    for operation in OPERATIONS.values():
        rows = rows_of(report, operation.name)
        assert [name for name in rows if name != "triton, compiled"] == list(operation.implementations)
    for entry in report["implementations"]:
        outcome = entry["outcome"]
        if outcome["reason"] is None:
            assert outcome["failure"] is None and outcome["seconds"] > 0, entry
            assert outcome["error"] <= outcome["allowed"] < 0.03, entry


def test_interpreters_compute_results_of_their_own(report):
    # Bitwise equal results would mean that the reference was called instead.
    for op in ("block_diagonal_attention", "moba_attention", "fuse", "paged_attention"):
        for name in ("xla", "triton"):
            assert rows_of(report, op)[name]["error"] > 0, (op, name)


def test_report_checks_torch_operators_and_the_dlpack_crossing(report):
    assert {entry["op"] for entry in report["implementations"] if entry["framework"] == "torch"} == {
        case.op for case in doctor_checks.CASES
    }
    (crossing,) = rows_of(report, "to_jax, to_torch, wrap_jax", "both").values()
    assert crossing["seconds"] > 0 and crossing["failure"] is None


@pytest.mark.parametrize("package", [blockdiag, blockdiag.torch], ids=["jax", "torch"])
def test_every_public_function_with_implementations_has_a_case(package):
    callables = {name: getattr(package, name) for name in package.__all__ if callable(getattr(package, name))}
    with_choice = {
        name
        for name, value in callables.items()
        if not inspect.isclass(value) and "implementation" in inspect.signature(value).parameters
    }
    # This is the same operator for tensors with heads before tokens.
    assert with_choice - {"block_diagonal_attention_bhsd"} <= {case.op for case in doctor_checks.CASES}


def test_every_operation_has_a_case():
    tables = [case.implementations for case in doctor_checks.CASES]
    assert all(any(operation.implementations is one for one in tables) for operation in OPERATIONS.values())


def test_cases_of_differentiable_ops_check_gradients():
    with_gradients = {case.op for case in doctor_checks.CASES if case.differentiable}
    assert with_gradients == {
        "block_diagonal_attention",
        "fused_qkv_block_attention",
        "moba_attention",
        "key_convolution",
        "merge_attention_states",
        "fuse",
    }


@pytest.mark.parametrize(
    ("method", "spoil", "words"),
    [
        ("forward", lambda x: 1.001 * x, "the result differs from the reference by"),
        ("forward", lambda x: x.at[(0,) * x.ndim].set(jnp.nan), "the result has NaN"),
        ("forward", lambda x: x.at[(0,) * x.ndim].set(jnp.inf), "the result differs from the reference without bound"),
        ("backward", lambda x: (1.001 * x[0], *x[1:]), "the gradient of key differs"),
    ],
    ids=["value", "nan", "infinity", "gradient"],
)
def test_wrong_implementation_fails_and_exits_with_one(monkeypatch, only_convolution, method, spoil, words):
    module = importlib.import_module("blockdiag.ops.key_convolution.xla")
    right = getattr(module, method)
    monkeypatch.setattr(module, method, lambda *arguments: spoil(right(*arguments)))
    result = run_doctor("--json")
    assert result.exit_code == 1
    rows = rows_of(json.loads(result.stdout), "key_convolution")
    assert words in rows["xla"]["failure"]
    assert rows["reference"]["failure"] is None and rows["triton"]["failure"] is None


class _UnusualError(Exception):
    pass


@pytest.mark.parametrize("kind", [RuntimeError, KeyError, AssertionError, _UnusualError])
def test_implementation_that_raises_is_shown_and_the_others_are_checked(monkeypatch, only_convolution, kind):
    def fail(*arguments):
        raise kind("no [brackets] of markup")

    monkeypatch.setattr(importlib.import_module("blockdiag.ops.key_convolution.xla"), "forward", fail)
    result = run_doctor()
    assert result.exit_code == 1
    (row,) = [line for line in result.output.splitlines() if "no [brackets] of markup" in line and "│ JAX" in line]
    assert "xla" in row and f"failed: {kind.__name__}" in row
    assert result.output.count("ok, ") >= 3  # the reference, the interpreter, and the crossing


def test_implementation_whose_available_raises_fails(monkeypatch, only_convolution):
    def fail():
        raise ImportError("no such name in triton")

    module = importlib.import_module("blockdiag.ops.key_convolution.triton")
    monkeypatch.setattr(module, "available", fail)
    for arguments in ((), ("--quick",)):
        result = run_doctor("--json", *arguments)
        assert result.exit_code == 1
        rows = rows_of(json.loads(result.stdout), "key_convolution")
        assert rows["triton"]["failure"] == "ImportError: no such name in triton"
        assert rows["xla"]["failure"] is None


def test_each_implementation_of_an_op_gives_its_own_reason(monkeypatch):
    monkeypatch.setattr(importlib.import_module("blockdiag.ops.moba.triton"), "available", lambda: "no MoBA here")
    result = run_doctor("--quick", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert rows_of(found, "moba_attention")["triton"]["reason"] == "no MoBA here"
    assert rows_of(found, "block_diagonal_attention")["triton"]["reason"] is None
    assert rows_of(found, "moba_attention")["xla"]["reason"] is None
    assert "no MoBA here" in run_doctor("--quick").output


def test_unavailable_implementation_is_not_run(monkeypatch, only_convolution):
    module = importlib.import_module("blockdiag.ops.key_convolution.triton")
    monkeypatch.setattr(module, "available", lambda: "nothing [to] run it on")
    monkeypatch.setattr(module, "forward", lambda *arguments, **options: pytest.fail("it was run"))
    result = run_doctor()
    assert result.exit_code == 0
    assert "nothing [to] run it on" in result.output


def test_quick_runs_nothing(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_run_check", lambda check: pytest.fail("a check was run"))
    result = run_doctor("--quick", "--json")
    assert result.exit_code == 0
    assert all(entry["outcome"]["seconds"] is None for entry in json.loads(result.stdout)["implementations"])
    shown = run_doctor("--quick").output
    assert "available" in shown and "ok, " not in shown


def test_framework_that_cannot_be_started_is_a_failed_row(monkeypatch, only_convolution):
    def fail():
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib.import_module("torch").cuda, "is_available", fail)
    result = run_doctor("--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert "libcudart.so.13" in rows_of(found, "every op", "torch")["every one"]["failure"]
    assert rows_of(found, "key_convolution")["xla"]["failure"] is None


def test_jax_without_a_device_is_a_failed_row(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", fail)
    monkeypatch.setattr(jax, "devices", fail)
    result = run_doctor("--quick")
    assert result.exit_code == 1
    assert "Unable to initialize backend 'cuda'" in result.output


def test_pallas_kernels_are_not_tried_on_other_gpus_than_hopper(monkeypatch):
    pallas = BLOCK_DIAGONAL.implementations["pallas"]
    for capability, is_here in (("9.0", True), ("8.0", False), ("10.0", False)):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])  # noqa: B023
        reason = doctor_checks._why_unavailable(pallas, has_gpu=True)
        assert (reason is None) == is_here
    assert "compute capability 9.0 (Hopper), this one has 10.0" in reason


def test_kernels_that_do_not_compile_fail_without_a_gpu(monkeypatch, only_convolution):
    def fail(*arguments, **options):
        raise TypeError("the hook is missing 2 required positional arguments")

    monkeypatch.setattr(doctor_checks, "COMPILED", ("key_convolution",))
    assert rows_of(json.loads(run_doctor("--json").stdout), "key_convolution")["triton, compiled"]["seconds"] > 0
    monkeypatch.setattr(importlib.import_module("blockdiag.triton_kernels.launch.compile"), "compile_plan", fail)
    result = run_doctor("--json")
    assert result.exit_code == 1
    rows = rows_of(json.loads(result.stdout), "key_convolution")
    assert rows["triton, compiled"]["failure"] == "TypeError: the hook is missing 2 required positional arguments"
    assert rows["triton"]["failure"] is None


def test_compiled_program_without_kernels_is_a_failure(monkeypatch):
    case = next(case for case in doctor_checks.CASES if case.op == "key_convolution")
    monkeypatch.setattr(doctor_checks, "CASES", (case,))
    monkeypatch.setattr(doctor_checks, "COMPILED", (case.op,))
    monkeypatch.setattr(doctor_checks, "CALL_TARGET", "no_such_call")
    outcomes = [doctor_checks.examine(check, quick=False) for check in doctor_checks.checks()]
    assert [outcome.failure is not None for outcome in outcomes].count(True) == 1


def test_relative_error_of_other_shapes_or_integers_is_an_error():
    with pytest.raises(ValueError, match=r"\(2,\), that of the reference \(3,\)"):
        doctor_checks._relative_error(np.ones(2), np.ones(3))
    assert doctor_checks._relative_error(np.array([1, 2]), np.array([1, 2])) == 0
    assert doctor_checks._relative_error(np.array([1, 3]), np.array([1, 2])) == math.inf
    assert doctor_checks._relative_error(np.array([1.0, 4.0]), np.array([2.0, 4.0])) == 0.25


def test_tolerance_of_bfloat16_follows_from_a_naive_computation():
    sizes = doctor_checks.ON_GPU
    case = Case(
        lengths=(sizes.tokens,),
        query_heads=sizes.query_heads,
        key_heads=sizes.key_heads,
        head_dim=sizes.head_dim,
        dtype=sizes.dtype,
        block_size=sizes.block_size,
        is_causal=True,
    )
    operands = [to_array(x, sizes.dtype) for x in case.operands()]
    exact, naive = exact_attention(case, operands), naive_attention(case, operands)
    errors = [largest_error(rough, true) / np.abs(true).max() for rough, true in zip(naive, exact, strict=True)]
    unit = float(jnp.finfo(sizes.dtype).eps)
    tolerance = doctor_checks.TOLERANCES[sizes.dtype]
    assert 2 * min(errors) + 2 * unit <= tolerance * 1.1
    assert tolerance <= (2 * max(errors) + 2 * unit) * 1.1


def test_tables_list_operations_and_versions(report):
    result = run_doctor("--quick")
    assert result.exit_code == 0
    for op in ("block_diagonal_attention", "moba_attention", "key_convolution"):
        assert op in result.output
    assert report["packages"]["jaxlib"] in result.output


def test_untested_version_is_reported_with_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: "3.9.0" if name == "triton" else "0.11.2")
    remark = "this version is untested, tested are 3.6 to 3.8; pip install 'triton>=3.6,<3.9'"
    assert remark in run_doctor("--quick").output
    found = json.loads(run_doctor("--quick", "--json").stdout)
    assert found["remarks"]["triton"] == remark
    assert found["remarks"]["torch"].startswith("this version is untested")
    assert not {"jax", "jaxlib", "numpy", "flax"} & set(found["remarks"])


@pytest.mark.parametrize(
    ("package", "system", "remark"),
    [
        ("triton", "Linux", "pip install 'blockdiag-attn[cuda]'"),
        ("jax-cuda13-plugin", "Linux", "pip install 'blockdiag-attn[cuda]'"),
        ("triton", "Darwin", None),
        ("torch", "Darwin", "pip install 'blockdiag-attn[torch]'"),
        ("flax", "Linux", "pip install 'blockdiag-attn[flax]'"),
        ("blockdiag-attn", "Linux", None),
    ],
)
def test_missing_package_is_named_with_its_extra(monkeypatch, package, system, remark):
    monkeypatch.setattr(platform, "system", lambda: system)
    assert doctor._remark(package, None) == remark


def test_conflicting_distribution_is_reported_with_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "other_distributions", lambda: {"blockdiag": "3.0.0"})
    result = run_doctor("--quick")
    assert "blockdiag 3.0.0 and blockdiag-attn install a package of the same name" in result.output
    assert "pip uninstall blockdiag blockdiag-attn, then pip install blockdiag-attn" in result.output
    assert json.loads(run_doctor("--quick", "--json").stdout)["other_distributions"] == {"blockdiag": "3.0.0"}
    monkeypatch.setattr(doctor, "other_distributions", dict)
    assert "pip uninstall" not in run_doctor("--quick").output


def test_features_table_lists_fast_and_slow_features(monkeypatch):
    table = features_table((Feature("crossing", True, "found [it]"), Feature("launcher", False, "no such name")))
    fast, slow = (line for line in text_of(table).splitlines() if "crossing" in line or "launcher" in line)
    assert "fast" in fast and "found [it]" in fast
    assert "slow" in slow and "no such name" in slow
    monkeypatch.setattr(doctor, "gather_features", lambda: (Feature("crossing", True, "found"),))
    found = json.loads(run_doctor("--quick", "--json").stdout)
    assert found["features"] == [{"name": "crossing", "is_fast": True, "detail": "found"}]


@pytest.mark.parametrize("module", doctor_features.MODULES.values())
def test_every_module_of_private_names_describes_its_features(module):
    features = importlib.import_module(module).describe_features()
    assert features and all(feature.is_fast and feature.detail for feature in features)
    assert set(features) <= set(doctor_features.gather_features())


def test_features_that_raise_do_not_stop_doctor(monkeypatch):
    def fail():
        raise AttributeError("module 'triton' has no attribute 'knobs'")

    monkeypatch.setattr(doctor, "gather_features", fail)
    result = run_doctor("--quick")
    assert result.exit_code == 0
    assert "module 'triton' has no attribute 'knobs'" in result.output


def test_report_describes_torch_beside_jax(report):
    torch = pytest.importorskip("torch")
    entry = report["torch"]
    assert entry["cuda"] == torch.version.cuda
    assert len(entry["devices"]) == torch.cuda.device_count()
    gpus = [device for device in report["devices"] if device["platform"] == "gpu"]
    assert entry["same_devices"] == (len(gpus) == torch.cuda.device_count())
    assert (entry["jax_memory_bytes"] is None) == (not gpus)
    assert "torch beside JAX" in run_doctor("--quick").output


def test_report_without_torch_has_only_jax(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    result = run_doctor("--quick", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["torch"] is None
    assert {entry["framework"] for entry in found["implementations"]} == {"JAX"}
    assert "torch beside JAX" not in run_doctor("--quick").output


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (True, 0.75)),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, (False, 0.75)),
        ({"XLA_CLIENT_MEM_FRACTION": "0.3"}, (True, 0.3)),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, (True, 0.5)),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, (False, 0.75)),
    ],
)
def test_memory_settings_follow_the_environment(environment, expected):
    assert doctor._memory_settings(environment) == expected


def test_torch_table_shows_memory_and_devices():
    entry = doctor.TorchReport("13.0", "9.19.0", None, ["A GPU"], False, True, 0.75, 3 << 30)
    text = text_of(doctor._torch_table(entry))
    assert "13.0, 9.19.0, none" in text
    assert "no: set CUDA_VISIBLE_DEVICES" in text
    assert "75% of a GPU, 3.0 GiB at its first use; XLA_PYTHON_CLIENT_PREALLOCATE=false" in text


def test_result_text_shows_time_or_availability():
    assert doctor._result(Outcome(seconds=1.26)) == "[green]ok[/green], 1.3 s"
    assert doctor._result(Outcome()) == "[green]available[/green]"
