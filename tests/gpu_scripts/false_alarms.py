"""Small correct kernels for which compute-sanitizer reports errors; see sanitize_known.py.

    PYTHONPATH=src python tests/gpu_scripts/sanitize.py --families false_alarms    # the kernels under every tool
    PYTHONPATH=src python tests/gpu_scripts/false_alarms.py                        # the kernels alone
    PYTHONPATH=src python tests/gpu_scripts/false_alarms.py --code                 # without a GPU: their machine code

Each kernel contains only one construct that a tool does not follow. Because the tool reports errors for it, its
reports for the same construct in the library's kernels are no evidence of errors. `--code` prints the shared-memory
accesses and barriers of the compiled kernels with their addresses, by which hazards are reported.
"""

# Device code is formatted by hand, because one argument per line would hide the algorithm.
# fmt: off

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blockdiag.triton_kernels.launch import private_triton
from blockdiag.triton_kernels.launch.gluon_names import thread_barrier, tma_store
from blockdiag.triton_kernels.launch.offline import inspect_plan
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    TensorSpec,
)

VALUES = 256


@gluon.jit
def wait_for_partition(p_out, ready):
    mbarrier.wait(ready, 0)
    gl.store(p_out, 1)


@gluon.jit
def arrive(p_out, ready, captured):
    gl.store(p_out + 1, captured)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def specialised(p_out):
    """Run partitions that share only one mbarrier; everything else in shared memory is Triton's own."""
    captured = gl.load(p_out + 2)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    thread_barrier()
    gl.warp_specialize([(wait_for_partition, (p_out, ready)), (arrive, (p_out, ready, captured))], [4], [40])


@gluon.jit
def receive(p_in, p_out, memory, ready):
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    o_value = gl.arange(0, memory.shape[0], LINE)
    mbarrier.wait(ready, 0)
    gl.store(p_out + o_value, memory.load(LINE))


@gluon.jit
def hand_over(p_in, p_out, memory, ready):
    # In reverse order, so that no thread reads a value stored by the arriving thread.
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    o_value = gl.arange(0, memory.shape[0], LINE)
    memory.store(gl.load(p_in + memory.shape[0] - 1 - o_value))
    thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def handed_over(p_in, p_out, VALUES: gl.constexpr):
    """Four warps store a vector in shared memory and meet, one thread arrives, and four other warps wait and read."""
    memory = gl.allocate_shared_memory(gl.int32, [VALUES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    thread_barrier()
    gl.warp_specialize([
        (receive, (p_in, p_out, memory, ready)), (hand_over, (p_in, p_out, memory, ready)),
    ], [4], [40])


@triton.jit
def summed_products(p_a, p_b, p_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum products in each thread; all threads of a row have its sum, each with its own rounding.

    The compiler fuses a thread's product with the first sum, so the thread's own product is not rounded, but the other
    thread's is.
    """
    o_row = tl.arange(0, ROWS)
    o_tile = o_row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b_sum = tl.sum(tl.load(p_a + o_tile) * tl.load(p_b + o_tile), 1)
    tl.store(p_out + o_row, b_sum)


@gluon.jit
def stored_by_copy_engine(p_in, target, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Write a tile to global memory by the copy engine."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    o_column = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))
    memory = gl.allocate_shared_memory(target.dtype, [ROWS, COLUMNS], target.layout)
    memory.store(gl.load(p_in + o_row[:, None] * COLUMNS + o_column[None, :]))
    fence_async_shared()
    thread_barrier()
    tma_store(target, [0, 0], memory)
    tma.store_wait(0)


def run_specialised(device: str) -> Any:
    import torch

    out = torch.tensor([0, 0, 7], dtype=torch.int32, device=device)
    if device == "cpu":
        return torch.tensor([1, 7, 7], dtype=torch.int32)
    specialised[(4,)](out, num_warps=8)
    return out


def run_handed_over(device: str) -> Any:
    import torch

    given = torch.arange(VALUES, dtype=torch.int32, device=device)
    if device == "cpu":
        return given.flip(0)
    out = torch.zeros_like(given)
    handed_over[(4,)](given, out, VALUES, num_warps=4)
    return out


def run_summed_products(device: str) -> Any:
    import torch

    numbers = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
    a, b = torch.from_numpy(numbers).to(device)
    if device == "cpu":
        return (a * b).sum(1)
    out = torch.zeros(16, device=device)
    summed_products[(1,)](a, b, out, 16, 16, num_warps=8)
    return out


def run_stored_by_copy_engine(device: str) -> Any:
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    given = torch.arange(64 * 32, device=device).reshape(64, 32).to(torch.float16)
    if device == "cpu":
        return given
    out = torch.empty_like(given)
    layout = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float16)
    stored_by_copy_engine[(1,)](given, TensorDescriptor.from_tensor(out, [64, 32], layout), 64, 32, num_warps=4)
    return out


RUNS: dict[str, Callable[[str], Any]] = {
    "specialised": run_specialised,
    "handed_over": run_handed_over,
    "summed_products": run_summed_products,
    "stored_by_copy_engine": run_stored_by_copy_engine,
}
"""Functions that launch a kernel and return its result; on the CPU they return the expected result."""


def plans() -> dict[str, LaunchPlan]:
    """Return the launch plans, to compile them without a GPU."""
    line, tile, half = TensorSpec((VALUES,), "int32"), TensorSpec((16, 16), "float32"), TensorSpec((64, 32), "float16")
    sums = TensorSpec((16,), "float32")
    layout = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float16)
    shared = {"grid": (1, 1, 1), "options": CompileOptions(num_warps=4)}
    out = Pointer("output", 0)
    return {
        "specialised": LaunchPlan(
            name="specialised", kernel=specialised, inputs=(line,), outputs=(line,), arguments={"p_out": out},
            aliases=((0, 0),), **shared,
        ),
        "handed_over": LaunchPlan(
            name="handed_over", kernel=handed_over, inputs=(line,), outputs=(line,),
            arguments={"p_in": Pointer("input", 0), "p_out": out, "VALUES": Constexpr(VALUES)}, **shared,
        ),
        "summed_products": LaunchPlan(
            name="summed_products", kernel=summed_products, inputs=(tile, tile), outputs=(sums,),
            arguments={"p_a": Pointer("input", 0), "p_b": Pointer("input", 1), "p_out": out,
                       "ROWS": Constexpr(16), "COLUMNS": Constexpr(16)},
            grid=(1, 1, 1), options=CompileOptions(num_warps=8),
        ),
        "stored_by_copy_engine": LaunchPlan(
            name="stored_by_copy_engine", kernel=stored_by_copy_engine, inputs=(half,), outputs=(half,),
            arguments={"p_in": Pointer("input", 0), "target": Descriptor("output", 0, (64, 32), (64, 32), layout),
                       "ROWS": Constexpr(64), "COLUMNS": Constexpr(32)}, **shared,
        ),
    }  # fmt: skip


def machine_code(plan: LaunchPlan, arch: int) -> list[tuple[int, str]]:
    """Return addresses and instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(inspect_plan(plan, arch).kernel.asm["cubin"])
        file.flush()
        command = [private_triton.disassembler(), "-hex", "-c", file.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;", code)]


def print_code(arch: int) -> None:
    """Print the shared-memory accesses and the barriers of the machine code."""
    kinds = r"LDS|STS|BAR\.|SYNCS|SHFL|FFMA|EXIT|BRA|BRX|SETMAXREG|UTMA"
    for name, plan in plans().items():
        print(name)
        for address, instruction in machine_code(plan, arch):
            if re.search(rf"\b({kinds})", instruction):
                print(f"+0x{address:x} {instruction}")


def main() -> None:
    """Run the kernels, or print their code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--code", action="store_true", help="print the machine code's accesses instead of running it")
    parser.add_argument("--arch", type=int, default=90, help="compute capability for --code")
    options = parser.parse_args()
    if options.code:
        print_code(options.arch)
        return
    for name, run in RUNS.items():
        found, expected = (run(device).cpu().numpy() for device in ("cuda", "cpu"))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        print(f"ran {name}", flush=True)


if __name__ == "__main__":
    main()
