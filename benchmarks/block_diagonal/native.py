"""The same launch plans from PyTorch, natively on its current stream."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.block_diagonal.cases import Case
from benchmarks.block_diagonal.implementations import PassMakers, implementation
from benchmarks.block_diagonal.workload import Workload
from benchmarks.harness.device import torch_peak_bytes
from benchmarks.harness.family import Program
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem, RotaryProblem


def problem_of(case: Case, num_tiles: int) -> BlockDiagonalProblem:
    """The static description of a case's call."""
    rotary = RotaryProblem(
        interleaved=False,
        query=True,
        key=True,
        value=False,
        table_rows=case.table_rows,
        table_dtype=case.table_dtype,
        positions="sequence",
    )
    return BlockDiagonalProblem(
        tokens=case.tokens,
        query_heads=case.query_heads,
        key_heads=case.key_heads,
        head_dim=case.head_dim,
        dtype="bfloat16",
        block_size=case.block_size,
        sequence_length=None if case.packed else case.sequence_lengths[0],
        num_tiles=num_tiles,
        is_causal=False,
        scale=case.scale,
        rotary=rotary if case.rotary else None,
    )


def tile_table(case: Case, device: torch.device) -> torch.Tensor:
    """int32 [blocks, 3]: first row, length and position of each block."""
    tiles = case.tiles
    columns = (torch.from_numpy(column) for column in (tiles.starts, tiles.lengths, tiles.positions))
    return torch.stack(tuple(columns), dim=1).to(device, torch.int32)


def traced_launches(
    method: str, problem: BlockDiagonalProblem, shapes: Sequence[Any], has_tiles: bool
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What `method` ("forward" or "backward") of the Triton implementation launches, as a function of tensors.

    The launches are read out of the traced JAX call, so that both frameworks run the same plans in the same order.

    Args:
        shapes: a ShapeDtypeStruct for each tensor the function will take: query, key, value, the tile table if there is
            one, cos and sin if the problem has rotary, and for the backward the output's cotangent.
        has_tiles: whether there is a tile table.

    Raises:
        NotImplementedError: when the call does anything but launch kernels.
    """
    import jax

    from blockdiag.interop.torch_launch import launch as torch_launch
    from blockdiag.ops.block_diagonal import triton as triton_block_diagonal

    def call(*arrays: Any) -> Any:
        operands = iter(arrays)
        query, key, value = (next(operands) for _ in range(3))
        tiles = next(operands) if has_tiles else None
        rotary = (next(operands), next(operands), None) if problem.rotary else None
        return getattr(triton_block_diagonal, method)(problem, query, key, value, tiles, rotary, *operands)

    program: Any = jax.make_jaxpr(call)(*shapes).jaxpr
    steps = [_launch_of(equation) for equation in program.eqns]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(program.invars, tensors, strict=True))
        for spec, inputs, outputs in steps:
            values.update(zip(outputs, torch_launch(spec, *(values[name] for name in inputs)), strict=True))
        return tuple(values[name] for name in program.outvars)

    return run


def _launch_of(equation: Any) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """Spec, operands and results of one launch."""
    if "spec" not in equation.params:
        raise NotImplementedError(
            f"the call computes {equation.primitive.name} beside its kernels, which a native launch cannot do; "
            "time it through jax.jit"
        )
    return equation.params["spec"], equation.invars, equation.outvars


def native_passes(workload: Workload) -> PassMakers:
    """Forward, backward and one after the other. The tile table is made once, before the clock starts."""
    import jax

    case = workload.case
    operands = list(workload.inputs)
    if case.packed:
        operands.append(tile_table(case, workload.query.device))
    operands += workload.tables or ()
    problem = problem_of(case, len(case.tiles.starts))

    def shapes(tensors: Sequence[torch.Tensor]) -> list[Any]:
        return [jax.ShapeDtypeStruct(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in tensors]

    def runner(method: str) -> Callable[[], tuple[torch.Tensor, ...]]:
        tensors = operands if method == "forward" else [*operands, workload.cotangent]
        launch = traced_launches(method, problem, shapes(tensors), case.packed)
        return lambda: launch(*tensors)

    def prepared(*methods: str) -> Program:
        runners = [runner(method) for method in methods]

        def run() -> tuple[torch.Tensor, ...]:
            return tuple(result for one in runners for result in one())

        note = "tile table made beforehand" if case.packed else ""
        return Program(run, extra_bytes=torch_peak_bytes(run), note=note)

    return {
        "fwd": lambda: prepared("forward"),
        "bwd": lambda: prepared("backward"),
        "fwd+bwd": lambda: prepared("forward", "backward"),
    }


NATIVE = implementation("triton-torch", "torch", native_passes, is_required=True)
