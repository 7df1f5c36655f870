"""Run a warp-specialised kernel without shared data, to see what compute-sanitizer's racecheck says of the rest.

    PYTHONPATH=src compute-sanitizer --tool racecheck python tests/gpu_scripts/warp_specialize.py

Triton keeps a word of its own in shared memory for each warp-specialised program: the default warps write there which
partition the other warps run next, and beside it the values that the partition captures. This kernel has nothing else
in shared memory but one mbarrier, on which the default warps wait for the others. Hazards that racecheck reports here
are therefore those of Triton's own words.

`--code` needs no GPU: it prints the accesses of shared memory and the barriers of the compiled kernel with their
addresses, in which hazards are reported.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blockdiag.triton_kernels.offline import inspect_plan
from blockdiag.triton_kernels.plan import CompileOptions, LaunchPlan, Pointer, TensorSpec


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
    captured = gl.load(p_out + 2)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.thread_barrier()
    gl.warp_specialize([(wait_for_partition, (p_out, ready)), (arrive, (p_out, ready, captured))], [4], [40])


def run() -> None:
    """Launch the kernel and check what both partitions have stored."""
    import torch

    out = torch.tensor([0, 0, 7], dtype=torch.int32, device="cuda")
    for _ in range(3):
        out[:2] = 0
        specialised[(4,)](out, num_warps=8)
        assert out.tolist() == [1, 7, 7], out.tolist()
    print("all ran", flush=True)


def print_code(arch: int) -> None:
    """Print the accesses of shared memory and the barriers of the machine code."""
    array = TensorSpec((3,), "int32")
    plan = LaunchPlan(
        name="specialised",
        kernel=specialised,
        grid=(1, 1, 1),
        inputs=(array,),
        outputs=(array,),
        arguments={"p_out": Pointer("output", 0)},
        options=CompileOptions(num_warps=8),
        aliases=((0, 0),),
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(inspect_plan(plan, arch).kernel.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-sass", file.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kinds = r"LDS|STS|BAR\.|SYNCS|EXIT|BRA|SETMAXREG"
    for address, instruction in re.findall(rf"/\*([0-9a-f]{{4}})\*/\s+(\S*\s*(?:{kinds})[^;]*);", code):
        print(f"+0x{address} {instruction}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--code", action="store_true", help="print the machine code's accesses instead of running it")
    parser.add_argument("--arch", type=int, default=90, help="compute capability for --code")
    options = parser.parse_args()
    if options.code:
        print_code(options.arch)
    else:
        run()
