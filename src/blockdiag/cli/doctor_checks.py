"""The checks of `python -m blockdiag doctor`: a small call of each op's implementations, compared with the reference.

A `Case` describes a call of an op by operands and options, for both JAX and torch. `checks` yields a `Check` for every
case and implementation, and `examine` runs one. To add an op, add a case to `CASES`.
"""

import contextlib
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import blockdiag
from blockdiag.cli.machine import reason_of
from blockdiag.common.operation import Implementation
from blockdiag.fusion.ir.tree import FUSE
from blockdiag.interop.jaxlib_launcher import CALL_TARGET
from blockdiag.interop.targets import compile_target
from blockdiag.ops.append.problem import APPEND
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION
from blockdiag.ops.moba.problem import MOBA
from blockdiag.ops.moba_paged.problem import MOBA_PAGED
from blockdiag.ops.paged.problem import PAGED

type Arrays = dict[str, np.ndarray]
type Function = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call."""

    dtype: str
    tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    block_size: int

    @property
    def query(self) -> tuple[int, ...]:
        return (1, self.tokens, self.query_heads, self.head_dim)

    @property
    def key(self) -> tuple[int, ...]:
        return (1, self.tokens, self.key_heads, self.head_dim)

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.block_size)


# On a GPU, the checks run the 16-bit kernels that programs use. On a CPU, interpreters are slow and need few tokens,
# and float32 reveals more errors.
ON_GPU = Sizes("bfloat16", tokens=256, query_heads=4, key_heads=2, head_dim=64, block_size=64)
ON_CPU = Sizes("float32", tokens=40, query_heads=2, key_heads=1, head_dim=16, block_size=16)
# The smallest call that the Pallas kernels accept.
PALLAS_ON_CPU = Sizes("bfloat16", tokens=64, query_heads=1, key_heads=1, head_dim=64, block_size=64)

# The largest allowed error against the float32 reference, relative to its largest element. For bfloat16 it is twice the
# error of a dense computation (about half a unit in the last place), plus two units in the last place.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3 * 2**-7}

# Ops that are also compiled for a GPU if there is none, because interpreters do not exercise the compiler.
# Block-diagonal attention covers plain Triton kernels, MoBA covers Gluon kernels.
COMPILED = ("block_diagonal_attention", "moba_attention")

PAGE_SIZE = 16
_CROSSING = np.linspace(-2, 2, 64, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Case:
    """A small call of one op.

    Attributes:
        op: name of the public function, in `blockdiag` and in `blockdiag.torch`.
        implementations: the op's table of implementations; empty if JAX computes the op in one way only.
        operands: makes the arrays of a call, by parameter name. Floating ones are rounded to the dtype of the sizes.
        options: returns the arguments that are not arrays.
        differentiable: names of the operands whose gradients are compared as well.
        kept: names of floating operands that stay float32 for every dtype.
        bind: returns the function of the operands, given the public function and its options.
        reference: JAX function of the operands to compare with; None means the op's implementation "reference".
    """

    op: str
    implementations: Mapping[str, Implementation]
    operands: Callable[[Sizes, np.random.Generator], Arrays]
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    differentiable: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    bind: Callable[[Function, dict[str, Any]], Function] = lambda public, arguments: partial(public, **arguments)
    reference: Function | None = None

    def arrays(self, sizes: Sizes) -> Arrays:
        """Return the operands as NumPy arrays of their final dtypes; every call returns the same ones."""
        arrays = self.operands(sizes, np.random.default_rng(0))
        return {
            name: array.astype(jnp.dtype(sizes.dtype))
            if np.issubdtype(array.dtype, np.floating) and name not in self.kept
            else array
            for name, array in arrays.items()
        }

    def function(self, package: ModuleType, sizes: Sizes, implementation: str | None) -> Function:
        """Return the op of a package as a function of the operands."""
        arguments = self.options(sizes)
        if implementation is not None:
            arguments["implementation"] = implementation
        return self.bind(getattr(package, self.op), arguments)


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)


def _attention_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    shapes = {"query": sizes.query, "key": sizes.key, "value": sizes.key}
    return {name: _normal(generator, *shape) for name, shape in shapes.items()}


def _routing_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"query": _normal(generator, *sizes.query), "key": _normal(generator, *sizes.key)}


def _projection_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    heads = sizes.query_heads + 2 * sizes.key_heads
    weights = _normal(generator, sizes.head_dim, heads * sizes.head_dim) * sizes.head_dim**-0.5
    return {"x": _normal(generator, 1, sizes.tokens, sizes.head_dim), "w_qkv": weights}


def _convolution_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"key": _normal(generator, *sizes.key), "weights": _normal(generator, 3, *sizes.key[2:])}


def _cache(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    """Return a cache of two sequences, one of which fills its pages, in a pool with one unused page."""
    max_pages = -(-sizes.tokens // PAGE_SIZE)
    pages = (2 * max_pages + 1, PAGE_SIZE, sizes.key_heads, sizes.head_dim)
    return {
        "key_pages": _normal(generator, *pages),
        "value_pages": _normal(generator, *pages),
        "page_table": generator.permutation(pages[0])[:-1].reshape(2, max_pages).astype(np.int32),
        "kv_lengths": np.array([max_pages * PAGE_SIZE, sizes.block_size + 3], np.int32),
    }


def _paged_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"query": _normal(generator, 2, 1, sizes.query_heads, sizes.head_dim), **_cache(sizes, generator)}


def _centroids(sizes: Sizes, generator: np.random.Generator) -> np.ndarray:
    return _normal(generator, 2, sizes.num_blocks, sizes.key_heads, sizes.head_dim)


def _moba_paged_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {**_paged_operands(sizes, generator), "key_centroids": _centroids(sizes, generator)}


def _append_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    new_tokens = (2, 2, sizes.key_heads, sizes.head_dim)
    return {
        "key": _normal(generator, *new_tokens),
        "value": _normal(generator, *new_tokens),
        **_cache(sizes, generator),
        "key_centroids": _centroids(sizes, generator),
    }


def _merge_operands(sizes: Sizes, generator: np.random.Generator) -> Arrays:
    return {"outputs": _normal(generator, 3, *sizes.query), "lses": _normal(generator, 3, *sizes.query[:-1])}


def _merge(outputs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `merge_attention_states` by its definition."""
    weights = jax.nn.softmax(lses, axis=0)
    return (weights[..., None] * outputs).sum(axis=0), jax.nn.logsumexp(lses, axis=0)


def _banded_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention to keys at a distance below 24, with grouped heads; the function given to `fuse`."""
    *_, tokens, heads, head_dim = query.shape
    grouped = query.reshape(*query.shape[:-2], key.shape[-2], heads // key.shape[-2], head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * head_dim**-0.5
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    weights = jax.nn.softmax(jnp.where((distance >= 0) & (distance < 24), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def _exact_banded_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    # By default, GPUs round the operands of float32 products.
    with jax.default_matmul_precision("highest"):
        return _banded_attention(query, key, value)


def _block_options(sizes: Sizes) -> dict[str, Any]:
    return {"block_size": sizes.block_size, "is_causal": True}


def _projection_options(sizes: Sizes) -> dict[str, Any]:
    heads = {"query_heads": sizes.query_heads, "key_heads": sizes.key_heads, "head_dim": sizes.head_dim}
    return {**heads, **_block_options(sizes)}


def _moba_options(sizes: Sizes) -> dict[str, Any]:
    return {"block_size": sizes.block_size, "top_k": 2}


def _indices_of(public: Function, arguments: dict[str, Any]) -> Function:
    return lambda **operands: public(**operands, **arguments).indices


CASES = (
    Case(
        "block_diagonal_attention",
        BLOCK_DIAGONAL.implementations,
        _attention_operands,
        _block_options,
        differentiable=("query", "key", "value"),
    ),
    Case(
        "fused_qkv_block_attention",
        BLOCK_DIAGONAL.implementations,
        _projection_operands,
        _projection_options,
        differentiable=("x", "w_qkv"),
    ),
    Case(
        "moba_attention",
        MOBA.implementations,
        _attention_operands,
        _moba_options,
        differentiable=("query", "key", "value"),
    ),
    Case("moba_routing", MOBA.implementations, _routing_operands, _moba_options, bind=_indices_of),
    Case(
        "key_convolution",
        KEY_CONVOLUTION.implementations,
        _convolution_operands,
        differentiable=("key", "weights"),
    ),
    Case("paged_attention", PAGED.implementations, _paged_operands),
    Case(
        "moba_paged_attention",
        MOBA_PAGED.implementations,
        _moba_paged_operands,
        _moba_options,
        kept=("key_centroids",),
    ),
    Case(
        "append_to_pages",
        APPEND.implementations,
        _append_operands,
        lambda sizes: {"block_size": sizes.block_size},
        kept=("key_centroids",),
    ),
    Case(
        "merge_attention_states",
        {},
        _merge_operands,
        differentiable=("outputs", "lses"),
        kept=("lses",),
        reference=_merge,
    ),
    Case(
        "fuse",
        FUSE.implementations,
        _attention_operands,
        differentiable=("query", "key", "value"),
        bind=lambda fuse, arguments: fuse(_banded_attention, **arguments),
        reference=_exact_banded_attention,
    ),
)


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
