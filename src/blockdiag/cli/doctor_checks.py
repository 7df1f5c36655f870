"""The checks of `python -m blockdiag doctor`: a small call of each op's implementations, compared with the reference.

`checks` yields a `Check` for every case of `doctor_cases.CASES` and every implementation, and `examine` runs one.
"""

import contextlib
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import blockdiag
from blockdiag.cli.doctor_cases import CASES, ON_CPU, ON_GPU, PALLAS_ON_CPU, Arrays, Case, Function, Sizes
from blockdiag.cli.machine import reason_of
from blockdiag.common.operation import Implementation
from blockdiag.interop.jaxlib_launcher import CALL_TARGET
from blockdiag.interop.targets import compile_target

# The largest allowed error against the float32 reference, relative to its largest element. For bfloat16 it is twice the
# error of a dense computation (about half a unit in the last place), plus two units in the last place.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3 * 2**-7}

# Ops that are also compiled for a GPU if there is none, because interpreters do not exercise the compiler.
# Block-diagonal attention covers plain Triton kernels, MoBA covers Gluon kernels.
COMPILED = ("block_diagonal_attention", "moba_attention")

_CROSSING = np.linspace(-2, 2, 64, dtype=np.float32)


@dataclass(frozen=True)
class Check:
    """One check of doctor.

    Attributes:
        framework: the framework that calls the op: "JAX", "torch", or "both" for conversions between them.
        op, implementation: names of the op and of the implementation.
        runs_on: the device that it runs on in this process.
        compute: returns the results, by name.
        expect: returns the expected results, by name.
        tolerance: largest error of floating results, relative to the largest expected element.
        why_unavailable: returns None if the check can run in this process, otherwise the reason and the remedy.
    """

    framework: str
    op: str
    implementation: str
    runs_on: str
    compute: Callable[[], Arrays]
    expect: Callable[[], Arrays]
    tolerance: float
    why_unavailable: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check.

    Attributes:
        reason: None if the implementation is available, otherwise why it is not.
        failure: None if the check passed, otherwise what went wrong.
        seconds: time of the call and its gradient, including compilation; None if it did not finish.
        error: largest error of a result, relative to its largest expected element; None if there is no finite one.
        allowed: the tolerance of `error`; None if there are no results.
    """

    reason: str | None = None
    failure: str | None = None
    seconds: float | None = None
    error: float | None = None
    allowed: float | None = None


def attempt[T](function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return a function's result and None, or None and a description of its failure."""
    try:
        return function(), None
    # The only place that catches every exception: doctor has to report any failure and continue with its other checks.
    except Exception as failure:
        return None, reason_of(failure)


def checks() -> Iterator[Check]:
    """Yield every check. This starts JAX's backends but computes nothing."""
    for framework, list_checks in (("JAX", _checks_in_jax), ("torch", _checks_in_torch), ("both", _checks_of_crossing)):
        found, failure = attempt(lambda list_checks=list_checks: list(list_checks()))
        yield from found or ()
        if failure is not None:
            yield _unlisted(framework, failure)


def _unlisted(framework: str, failure: str) -> Check:
    """Return a check that fails because the checks of a framework cannot even be listed."""

    def fail() -> NoReturn:
        raise RuntimeError(failure)

    return Check(framework, "every op", "every one", "", fail, fail, 0.0, fail)


def _checks_in_jax() -> Iterator[Check]:
    has_gpu = jax.default_backend() == "gpu"
    for case in CASES:
        for name, implementation in case.implementations.items():
            sizes = PALLAS_ON_CPU if name == "pallas" and not has_gpu else _sizes(has_gpu)
            yield Check(
                framework="JAX",
                op=case.op,
                implementation=name,
                runs_on=_where_it_runs(implementation, has_gpu),
                compute=partial(_compute_in_jax, case, sizes, name),
                expect=partial(_expected, case, sizes),
                tolerance=TOLERANCES[sizes.dtype],
                why_unavailable=partial(_why_unavailable, implementation, has_gpu),
            )
        if case.op in COMPILED and not has_gpu:
            yield Check(
                framework="JAX",
                op=case.op,
                implementation="triton, compiled",
                runs_on="nothing, for Hopper",
                compute=partial(_compile_for_hopper, case),
                expect=lambda: {"the number of programs with kernels": np.array(1)},
                tolerance=0.0,
                why_unavailable=case.implementations["triton"].why_unavailable,
            )
        if not case.implementations:
            sizes = _sizes(has_gpu)
            yield Check(
                framework="JAX",
                op=case.op,
                implementation="jax.numpy",
                runs_on="any device",
                compute=partial(_compute_in_jax, case, sizes, None),
                expect=partial(_expected, case, sizes),
                tolerance=TOLERANCES[sizes.dtype],
            )


def _where_it_runs(implementation: Implementation, has_gpu: bool) -> str:
    if not implementation.has_interpreter:
        return "any device"
    return "CUDA GPU" if has_gpu else "CPU interpreter, slow"


def _why_unavailable(implementation: Implementation, has_gpu: bool) -> str | None:
    reason = implementation.why_unavailable()
    if reason is None and has_gpu and implementation.name == "pallas":
        capability = jax.devices()[0].compute_capability
        if capability != "9.0":
            reason = f"the Pallas kernels are for GPUs of compute capability 9.0 (Hopper), this one has {capability}"
    return reason


def _sizes(has_gpu: bool) -> Sizes:
    return ON_GPU if has_gpu else ON_CPU


def _checks_in_torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    has_gpu = torch.cuda.is_available()
    sizes = _sizes(has_gpu)
    for case in CASES:
        # Without an explicit implementation, calls on a CPU go through JAX.
        is_native = has_gpu and bool(case.implementations)
        yield Check(
            framework="torch",
            op=case.op,
            implementation="triton" if is_native else "through JAX" if case.implementations else "torch",
            runs_on="CUDA GPU" if has_gpu else "CPU",
            compute=partial(
                _compute_in_torch, case, sizes, "triton" if is_native else None, "cuda" if has_gpu else "cpu"
            ),
            expect=partial(_expected, case, sizes),
            tolerance=TOLERANCES[sizes.dtype],
            why_unavailable=_why_not_native if is_native else lambda: None,
        )


def _why_not_native() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'blockdiag-attn[cuda]' (Linux only)"
    return None


def _checks_of_crossing() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    has_gpu = torch.cuda.is_available() and jax.default_backend() == "gpu"
    yield Check(
        framework="both",
        op="to_jax, to_torch, wrap_jax",
        implementation="shared memory",
        runs_on="CUDA GPU" if has_gpu else "CPU",
        compute=partial(_cross, "cuda" if has_gpu else "cpu"),
        expect=_expected_of_crossing,
        tolerance=TOLERANCES["float32"],
    )


def examine(check: Check, *, quick: bool) -> Outcome:
    """Test whether an implementation is available and, unless `quick`, run its check."""
    reason, failure = attempt(check.why_unavailable)
    if quick or reason is not None or failure is not None:
        return Outcome(reason, failure)
    outcome, failure = attempt(partial(_run_check, check))
    return outcome or Outcome(failure=failure)


def _run_check(check: Check) -> Outcome:
    with _quick_compilation():
        began = time.perf_counter()
        actual = check.compute()
        seconds = time.perf_counter() - began
        expected = check.expect()
    errors = {name: _relative_error(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    failure = None
    if errors[worst] > check.tolerance:
        failure = f"{worst} {_difference(actual[worst], errors[worst])}, allowed are {check.tolerance:.1e}"
    error = errors[worst] if math.isfinite(errors[worst]) else None
    return Outcome(failure=failure, seconds=seconds, error=error, allowed=check.tolerance)


@contextlib.contextmanager
def _quick_compilation() -> Iterator[None]:
    """Disable XLA's optimisations on a CPU: the checks then take half the time and compute the same results."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before or jax.default_backend() == "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest error relative to the largest expected element; infinite for NaN and for unequal integers."""
    if actual.shape != expected.shape:
        raise ValueError(f"the shape of a result is {actual.shape}, that of the reference {expected.shape}")
    if np.issubdtype(expected.dtype, np.integer):
        return 0.0 if np.array_equal(actual, expected) else math.inf
    wide = expected.astype(np.float64)
    error = np.abs(actual.astype(np.float64) - wide).max()
    return math.inf if np.isnan(error) else float(error / np.abs(wide).max())


def _difference(actual: np.ndarray, error: float) -> str:
    """Describe how a result differs from the reference."""
    if math.isfinite(error):
        return f"differs from the reference by {error:.1e} of its largest element"
    if np.isnan(actual.astype(np.float64)).any():
        return "has NaN where the reference has none"
    return "differs from the reference without bound"


def _compute_in_jax(case: Case, sizes: Sizes, implementation: str | None) -> Arrays:
    if implementation == "reference":
        return _run(_reference(case, sizes), case, case.arrays(sizes))
    return _run(_program(case.function(blockdiag, sizes, implementation), case), case, case.arrays(sizes))


def _compile_for_hopper(case: Case) -> Arrays:
    """Compile the kernels of a case and of its gradients, without running them."""
    program = _program(case.function(blockdiag, ON_GPU, "triton"), case)
    with compile_target(90):
        lowered = program.trace(*_operands(case, case.arrays(ON_GPU))).lower(lowering_platforms=("cuda",))
    return {"the number of programs with kernels": np.array(int(CALL_TARGET in lowered.as_text()))}


def _expected(case: Case, sizes: Sizes) -> Arrays:
    """Compute a case by its reference, with the same operands converted to float32."""
    arrays = case.arrays(sizes)
    wide = {name: x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float32) for name, x in arrays.items()}
    return _run(_reference(case, sizes), case, wide)


@functools.cache
def _reference(case: Case, sizes: Sizes) -> Function:
    """Return the jitted reference of a case, which all checks of the case share."""
    return _program(case.reference or case.function(blockdiag, sizes, "reference"), case)


def _program(function: Function, case: Case) -> Any:
    """Return a jitted function of differentiable and other operands that computes results and gradients.

    The gradients are those of the differentiable operands.
    """

    @jax.jit
    def compute(followed: dict[str, jax.Array], others: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        if not case.differentiable:
            return function(**others), {}
        results, pull_back = jax.vjp(lambda followed: function(**followed, **others), followed)
        (gradients,) = pull_back(jax.tree.map(lambda x: jnp.asarray(_cotangent(x.shape), x.dtype), results))
        return results, gradients

    return compute


def _operands(case: Case, arrays: Arrays) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the differentiable operands and the others."""
    operands = {name: jnp.asarray(array) for name, array in arrays.items()}
    followed = {name: operands.pop(name) for name in case.differentiable}
    return followed, operands


def _run(program: Function, case: Case, arrays: Arrays) -> Arrays:
    results, gradients = jax.tree.map(np.asarray, program(*_operands(case, arrays)))
    return _named(jax.tree.leaves(results), gradients)


def _compute_in_torch(case: Case, sizes: Sizes, implementation: str | None, device: str) -> Arrays:
    import torch

    import blockdiag.torch

    def to_tensor(array: np.ndarray) -> torch.Tensor:
        # torch does not accept NumPy arrays of ml_dtypes' bfloat16.
        is_half = array.dtype == jnp.bfloat16
        tensor = torch.from_numpy(array.view(np.int16) if is_half else array).to(device)
        return tensor.view(torch.bfloat16) if is_half else tensor

    def to_numpy(tensor: torch.Tensor) -> np.ndarray:
        return (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().numpy()

    operands = {name: to_tensor(array) for name, array in case.arrays(sizes).items()}
    followed = [operands[name].requires_grad_() for name in case.differentiable]
    results = case.function(blockdiag.torch, sizes, implementation)(**operands)
    results = results if isinstance(results, tuple) else (results,)
    gradients = ()
    if followed:
        cotangents = [torch.from_numpy(_cotangent(x.shape)).to(x) for x in results]
        gradients = torch.autograd.grad(results, followed, cotangents)
    return _named([to_numpy(x) for x in results], dict(zip(case.differentiable, map(to_numpy, gradients), strict=True)))


def _cotangent(shape: tuple[int, ...]) -> np.ndarray:
    """Return the cotangent of a result; it depends on the shape only."""
    return np.random.default_rng(1).standard_normal(tuple(shape), np.float32)


def _named(results: list[np.ndarray], gradients: Arrays) -> Arrays:
    """Return results and gradients by the names that messages use for them."""
    outputs = {f"result {i}" if len(results) > 1 else "the result": x for i, x in enumerate(results, 1)}
    return {**outputs, **{f"the gradient of {name}": x for name, x in gradients.items()}}


def _cross(device: str) -> Arrays:
    """Convert a tensor to JAX and back, and differentiate a JAX function in torch."""
    import torch

    from blockdiag.interop import to_jax, to_torch, wrap_jax

    tensor = torch.from_numpy(_CROSSING).to(device).clone()
    array = to_jax(tensor)
    followed = tensor.clone().requires_grad_()
    result = wrap_jax(jnp.sin)(followed)
    (gradient,) = torch.autograd.grad(result, followed, torch.ones_like(result))
    return {
        "the array": np.asarray(array),
        "whether memory is shared": np.array(int(to_torch(array).data_ptr() == tensor.data_ptr())),
        "the result of wrap_jax": result.detach().cpu().numpy(),
        "the gradient of wrap_jax": gradient.cpu().numpy(),
    }


def _expected_of_crossing() -> Arrays:
    results = (_CROSSING, np.array(1), np.sin(_CROSSING), np.cos(_CROSSING))
    names = ("the array", "whether memory is shared", "the result of wrap_jax", "the gradient of wrap_jax")
    return dict(zip(names, results, strict=True))
