"""Implementations of block-diagonal attention by the makers of their passes: torch autograd, and `jax.vjp`."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.block_diagonal.cases import Case, PassName
from benchmarks.block_diagonal.exact import Exact
from benchmarks.block_diagonal.workload import Workload
from benchmarks.harness.clock import Framework
from benchmarks.harness.device import poison, relative_error, to_torch, torch_peak_bytes
from benchmarks.harness.failures import GATE, WrongResult
from benchmarks.harness.family import Context, Implementation, Make, Program
from benchmarks.harness.programs import Chain, compile_program

type PassMakers = Mapping[PassName, Callable[[], Program]]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a case, and the exact results that every pass is compared with; None: nothing is compared."""

    workload: Workload
    exact: Exact | None = None


def implementation(
    name: str, framework: Framework, passes: Callable[[Workload], PassMakers], **options: Any
) -> Implementation:
    """Return an implementation by the makers of its passes, each of which may raise; passes are checked and chained."""

    def begin(context: Context, case: Case) -> Make:
        del case
        workload, exact = context.inputs.workload, context.inputs.exact
        makers = passes(workload)

        def make(pass_name: Any) -> Program:
            poison(workload.inputs)
            program = makers[pass_name]()
            if exact is None:
                return program
            check(program, exact, pass_name)
            program = program.chain(_CHAINED_CALLS) if program.chain else program
            return replace(program, held_bytes=workload.output_bytes(pass_name))

        return make

    return Implementation(name, framework, begin, **options)


def unchecked(one: Implementation, workload: Workload) -> Make:
    """Return the function that makes the passes of an implementation as they are."""
    return one.begin(Context(None, 0.0, inputs=Inputs(workload)), workload.case)


def check(program: Program, exact: Exact, pass_name: PassName) -> None:
    """Run once and compare with the exact results of the pass.

    Raises:
        WrongResult: a result is further away than rounding explains.
    """
    expected = {"fwd": exact[:1], "bwd": exact[1:], "fwd+bwd": tuple(exact)}[pass_name]
    results = program.tensors(program.run())
    errors = [relative_error(result, wanted) for result, wanted in zip(results, expected, strict=True)]
    if max(errors) > GATE:
        raise WrongResult(f"relative errors {', '.join(f'{error:.2e}' for error in errors)} exceed {GATE}")


def autograd_passes(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    workload: Workload,
    *,
    fold: Callable[[torch.Tensor], torch.Tensor] = lambda array: array,
    note: str = "",
) -> PassMakers:
    """The passes of a torch function of query, key and value [T, heads, H].

    `fold` turns an array like query into the layout that `attend` returns, without copying; the cotangent is given in
    that layout, and outputs are brought back only for the check, so that no timed pass holds a copy of ours.
    """
    leaves = [array.detach().requires_grad_() for array in workload.inputs]
    cotangent = fold(workload.cotangent)
    unfolded = torch.empty_like(workload.query)

    def as_given(output: torch.Tensor) -> torch.Tensor:
        fold(unfolded).copy_(output)
        return unfolded

    def prepared(run: Callable[[], tuple[torch.Tensor, ...]], *, has_output: bool) -> Program:
        def tensors(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (as_given(results[0]), *results[1:]) if has_output else tuple(results)

        return Program(run, extra_bytes=torch_peak_bytes(run), note=note, tensors=tensors)

    def forward() -> Program:
        def run() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (attend(*workload.inputs),)

        return prepared(run, has_output=True)

    def backward() -> Program:
        output = attend(*leaves)
        return prepared(lambda: torch.autograd.grad(output, leaves, cotangent, retain_graph=True), has_output=False)

    def both() -> Program:
        def run() -> tuple[torch.Tensor, ...]:
            output = attend(*leaves)
            return (output.detach(), *torch.autograd.grad(output, leaves, cotangent))

        return prepared(run, has_output=True)

    return {"fwd": forward, "bwd": backward, "fwd+bwd": both}


# Calls of one chained program. One call of a chain divides the cotangent by about ten, so that 20 stay in range.
_CHAINED_CALLS = 20


def _chained(feed: Mapping[int, int], function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """`function` again and again in one program, argument i of a call being result `feed[i]` of the one before."""

    def program(*arguments: Any) -> Any:
        results = function(*arguments)
        for _ in range(calls - 1):
            handed_on = {position: results[result] for position, result in feed.items()}
            arguments = tuple(handed_on.get(position, argument) for position, argument in enumerate(arguments))
            results = function(*arguments)
        return results

    return program


def jit_passes(
    attend: Callable[..., Any], workload: Workload, *, keeps_residuals: bool, is_chained: bool = False, note: str = ""
) -> PassMakers:
    """The passes of a JAX function `attend(query, key, value, extra)`, each compiled by `jax.jit`.

    The backward alone: with `keeps_residuals`, the forward is run once and its vjp function, residuals and all, is the
    argument of the jitted function. Without, the jitted function takes query, key, value and the cotangent and returns
    only the gradients; where the op keeps nothing but its inputs, the forward kernel is then dead code, and the number
    of custom calls in the note shows that it is gone.

    With `is_chained`, what is timed is one jitted program of 20 calls, each of which takes the output of the one before
    for its query and dQ for its cotangent: calls of half a millisecond are too short for the host's clock. Only for
    ops whose backward is one kernel: of several, those that no later call depends on would be removed.

    Raises:
        ChainBroken: by the makers, when the program does not have 20 times the custom calls of one call.
    """
    import jax

    query, key, value, cotangent = workload.jax_arrays
    extra = workload.jax_extra

    def gradients(query: Any, key: Any, value: Any, cotangent: Any, extra: Any) -> Any:
        return jax.vjp(lambda *operands: attend(*operands, extra), query, key, value)[1](cotangent)

    def output_and_gradients(query: Any, key: Any, value: Any, cotangent: Any, extra: Any) -> Any:
        output, pull_back = jax.vjp(lambda *operands: attend(*operands, extra), query, key, value)
        return (output, *pull_back(cotangent))

    def prepared(function: Callable[..., Any], *arguments: Any, feed: Mapping[int, int] | None = None) -> Program:
        chain = Chain(functools.partial(_chained, feed or {}), is_exact=True, needs_kernels=True)
        program = compile_program(function, *arguments, chain=chain, note=note, tensors=_flat_tensors)
        return program if is_chained and feed is not None else replace(program, chain=None)

    def forward() -> Program:
        return prepared(lambda *arguments: (attend(*arguments),), query, key, value, extra, feed={0: 0})

    def backward() -> Program:
        if not keeps_residuals:
            return prepared(gradients, query, key, value, cotangent, extra, feed={3: 0})
        record = jax.jit(lambda query, key, value: jax.vjp(lambda *o: attend(*o, extra), query, key, value)[1])
        return prepared(lambda pull_back, cotangent: pull_back(cotangent), record(query, key, value), cotangent)

    def both() -> Program:
        return prepared(output_and_gradients, query, key, value, cotangent, extra, feed={0: 0, 3: 1})

    return {"fwd": forward, "bwd": backward, "fwd+bwd": both}


def _flat_tensors(results: Any) -> tuple[torch.Tensor, ...]:
    """JAX results as tensors with one token axis."""
    tensors = (to_torch(result) for result in results)
    return tuple(tensor.reshape(-1, *tensor.shape[-2:]) for tensor in tensors)
