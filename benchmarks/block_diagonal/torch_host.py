"""Host time of the torch operators: what they cost over launching their kernels, and through the bridges."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.block_diagonal.report import host_table, judge_torch_host
from benchmarks.harness.clock import summarise
from benchmarks.harness.machine import device_name
from benchmarks.harness.pipeline import Choices
from benchmarks.harness.records import Environment, HostRow, environment, merge_rows, recordable_failures
from benchmarks.harness.report import verdict_table
from blockdiag.cli.machine import reason_of

OP = "torch"
_SHAPE = (1, 1024, 8, 128)
_WAIT_EVERY = 8

# Largest host time over the baseline of the same pass, in microseconds.
LIMITS = {
    ("fwd", "operator"): 15.0,
    ("fwd+bwd", "operator"): 40.0,
    ("round trip", "wrap_jax, one input"): 120.0,
    ("compiled", "with the operator"): 3.0,
}
# One product of two tensors, forward and backward: what autograd itself takes.
AUTOGRAD = ("fwd+bwd", "one torch operation")


def time_calls(calls: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Microseconds of each call until it returns, call by call in turn, the device waited for now and then."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    torch.cuda.synchronize()
    gc.disable()
    try:
        for index in range(repetitions):
            for name, call in calls.items():
                begin = time.perf_counter_ns()
                call()
                end = time.perf_counter_ns()
                times[name].append((end - begin) / 1e3)
            if index % _WAIT_EVERY == 0:
                torch.cuda.synchronize()
    finally:
        gc.enable()
    return times


def _operands(*, requires_grad: bool) -> list[torch.Tensor]:
    make = torch.randn
    return [make(_SHAPE, device="cuda", dtype=torch.bfloat16).requires_grad_(requires_grad) for _ in range(3)]


def _launches(kinds: tuple[str, ...], *, through_jit: bool) -> Callable[[], None]:
    """One launch of each kind with everything prepared, outputs too.

    `through_jit` is Triton's own `kernel[grid](...)`; without, the compiled kernel is launched directly.
    """
    from blockdiag.interop.torch_launch import bound_launch
    from blockdiag.ops.block_diagonal.checks import describe_call
    from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch

    query, key, value = _operands(requires_grad=False)
    options: dict[str, Any] = {"block_size": 64, "sequence_offsets": None, "block_lengths": None}
    problem = describe_call(query, key, rotary=None, scale=None, is_causal=False, **options)
    ready = []
    for kind in kinds:
        bound = bound_launch(BlockDiagonalLaunch(problem, kind), query.device.index)  # type: ignore[arg-type]
        inputs = (query, key, value) if kind == "forward" else (query, key, value, torch.randn_like(query))
        ready.append(bound.prepared_jit(inputs) if through_jit else bound.prepared(inputs))

    def run() -> None:
        for launch in ready:
            launch()

    return run


def _both_launches(*kinds: str) -> dict[str, Callable[[], Any]]:
    return {
        "kernel[grid](...)": _launches(kinds, through_jit=True),
        "compiled kernel": _launches(kinds, through_jit=False),
    }


def _dispatched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The registered operator itself."""
    operator = torch.ops.blockdiag.block_diagonal_forward
    return operator(query, key, value, None, None, None, None, None, 0, 64, None, False, "", "")


def _forward_calls() -> dict[str, Callable[[], Any]]:
    from blockdiag.torch import block_diagonal_attention

    operands = _operands(requires_grad=False)
    return {
        **_both_launches("forward"),
        "operator": lambda: block_diagonal_attention(*operands),
        "operator through the dispatcher": lambda: _dispatched(*operands),
    }


def _gradient_calls() -> dict[str, Callable[[], Any]]:
    from blockdiag.torch import block_diagonal_attention

    operands = _operands(requires_grad=True)
    cotangent = torch.randn(_SHAPE, device="cuda", dtype=torch.bfloat16)

    def run() -> Any:
        return torch.autograd.grad(block_diagonal_attention(*operands), operands, cotangent)

    return {
        **_both_launches("forward", "backward"),
        "operator": run,
        "operator through the dispatcher": lambda: torch.autograd.grad(_dispatched(*operands), operands, cotangent),
        "one torch operation": lambda: torch.autograd.grad(operands[0] * operands[1], operands[:2], cotangent),
    }


def _compiled_calls() -> dict[str, Callable[[], Any]]:
    """A model under CUDA graphs with and without the operator between two products."""
    from blockdiag.torch import block_diagonal_attention

    width = _SHAPE[2] * _SHAPE[3]
    weights = [torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(_SHAPE[1], width, device="cuda", dtype=torch.bfloat16)

    def model(x: torch.Tensor, with_operator: bool) -> torch.Tensor:
        hidden = (x @ weights[0]).view(_SHAPE)
        if with_operator:
            hidden = block_diagonal_attention(hidden, hidden, hidden)
        return hidden.view(-1, width) @ weights[1]

    def caller(with_operator: bool) -> Callable[[], Any]:
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        return torch.no_grad()(lambda: compiled(x, with_operator))

    return {"without the operator": caller(False), "with the operator": caller(True)}


def _bridge_calls() -> dict[str, Callable[[], Any]]:
    """A jitted JAX function of one operation, wrapped: one input, three, and three with a gradient."""
    import jax

    from blockdiag.interop.wrap import wrap_jax

    one = wrap_jax(lambda x: x + 1)
    three = wrap_jax(lambda x, y, z: x * y + z)
    inputs = _operands(requires_grad=False)
    leaves = _operands(requires_grad=True)
    cotangent = torch.randn(_SHAPE, device="cuda", dtype=torch.bfloat16)
    jitted = jax.jit(lambda x: x + 1)
    array = jax.dlpack.from_dlpack(inputs[0])
    naive = _naive_function()
    return {
        "the jitted function alone, in JAX": lambda: jitted(array),
        "jax.dlpack and torch.from_dlpack": lambda: torch.from_dlpack(jitted(jax.dlpack.from_dlpack(inputs[0]))),
        "wrap_jax, one input": lambda: one(inputs[0]),
        "wrap_jax, three inputs": lambda: three(*inputs),
        "jax.dlpack in an autograd.Function, three inputs and gradients": lambda: torch.autograd.grad(
            naive.apply(*leaves), leaves, cotangent
        ),
        "wrap_jax, three inputs and gradients": lambda: torch.autograd.grad(three(*leaves), leaves, cotangent),
    }


def _naive_function() -> type[torch.autograd.Function]:
    """x * y + z and its gradients, as one writes it with the public functions of both frameworks."""
    import jax

    forward_program = jax.jit(lambda x, y, z: x * y + z)
    backward_program = jax.jit(lambda x, y, cotangent: (cotangent * y, cotangent * x, cotangent))
    from_torch = jax.dlpack.from_dlpack

    class Naive(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return torch.from_dlpack(forward_program(*(from_torch(each.detach()) for each in (x, y, z))))

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
            gradients = backward_program(*(from_torch(each.detach()) for each in (*ctx.saved_tensors, *cotangents)))
            return tuple(torch.from_dlpack(each) for each in gradients)

    return Naive


_PASSES: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
    "fwd": _forward_calls,
    "fwd+bwd": _gradient_calls,
    "compiled": _compiled_calls,
    "round trip": _bridge_calls,
}


def measure_torch_host(environment: Environment, *, repetitions: int = 1000) -> list[HostRow]:
    """Rows of every pass. `over_trivial_us` is the time over the pass's first call; for bridges the time itself."""
    rows = []
    for pass_name, make in _PASSES.items():
        try:
            times = time_calls(make(), repetitions)
        except recordable_failures() as failure:
            note = f"failed: {reason_of(failure)}"
            rows.append(HostRow(op=OP, pass_name=pass_name, implementation="all", note=note, **asdict(environment)))
            continue
        summaries = {name: summarise(samples) for name, samples in times.items()}
        baseline = 0.0 if pass_name == "round trip" else next(iter(summaries.values())).median
        rows += [
            HostRow(
                op=OP,
                pass_name=pass_name,
                implementation=name,
                median_us=found.median,
                p20_us=found.p20,
                p80_us=found.p80,
                over_trivial_us=found.median - baseline,
                **asdict(environment),
            )
            for name, found in summaries.items()
        ]
    return rows


def measure_torch(console: Console, folder: Path, choices: Choices) -> None:
    """Measure host times of the torch operators, which take no options."""
    del choices
    rows = measure_torch_host(environment(device_name()))
    merge_rows(folder / "torch_host.csv", HostRow, rows)
    console.print(host_table(rows))
    console.print(verdict_table(judge_torch_host(rows)))
    console.print(f"torch: {folder / 'torch_host.csv'}")
