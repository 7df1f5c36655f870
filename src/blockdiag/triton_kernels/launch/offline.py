"""Compiles launch plans for architectures that are not present and reports their resources and instructions.

Tests use the report to check, without the hardware, that a kernel fits and that it uses the intended matrix units.
"""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdiag.triton_kernels.launch import private_triton
from blockdiag.triton_kernels.launch.compile import CompiledLaunch, compile_plan, shared_limit
from blockdiag.triton_kernels.launch.plan import LaunchPlan, Target
from blockdiag.triton_kernels.launch.sass import loop_depths

# Those that begin with a word are found faster than those that begin with its boundary.
_PTX_PATTERNS = {
    "wgmma": r"wgmma\.mma_async\b",
    "tcgen05.mma": r"tcgen05\.mma\b",
    "mma.sync": r"mma\.sync\b",
    "cp.async.bulk.tensor": r"cp\.async\.bulk\.tensor\b",
    "cp.async": r"cp\.async\.c[ag]\b",
    "ldmatrix": r"ldmatrix\b",
    "ex2": r"ex2\.approx\b",
    "atom": r"\b(?:atom|red)\.(?:global|gpu|sys|relaxed|acq_rel|add)",
    "f64": r"\.f64\b",
    "trap": r"trap;",
}

# Machine instructions by the beginning of their mnemonic.
_SASS_PATTERNS = {
    "wgmma": r"\b[HIQ]GMMA\b",
    "tcgen05.mma": r"\bUTC[HIQO]\w*MMA\b",
    "mma.sync": r"\b[HIQO]MMA\b",
    "bulk tensor load": r"\bUTMALDG\b",
    "bulk tensor store": r"\bUTMA(?:STG|REDG)\b",
    "local load": r"\bLDL\b",
    "local store": r"\bSTL\b",
    "f64": r"\bD(?:ADD|MUL|FMA|SETP)\b",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The resources and instruction counts of a kernel compiled for `arch`.

    Attributes:
        name: the plan's name.
        arch: compute capability as an integer, 90 for sm_90.
        registers: registers per thread.
        spill_store_bytes, spill_load_bytes: local memory traffic per thread for spilled registers.
        stack_bytes: local memory per thread, for spills and indexed arrays.
        shared_bytes, shared_limit: dynamic shared memory of one program, and the architecture's limit.
        tensor_memory_columns: columns of tensor memory of one program, at most 512; 0 on architectures without it.
        num_warps: warps of one program, including those of every partition.
        partitions: for each warp-specialised region, the number of warps of each partition except the default one.
        ptx: instruction counts, with the keys wgmma, tcgen05.mma, mma.sync, cp.async.bulk.tensor, cp.async, ldmatrix,
            ex2, atom, f64, trap.
        global_scratch_bytes: global memory of one program for descriptors made on the device.
        kernel: Triton's compiled kernel, whose `asm` holds ttir, ttgir, llir, ptx and cubin.

    Example:
        >>> import triton, triton.language as tl
        >>> from blockdiag.triton_kernels.launch.offline import inspect_plan
        >>> from blockdiag.triton_kernels.launch.plan import Constexpr, LaunchPlan, Pointer, TensorSpec
        >>> @triton.jit
        ... def copy_kernel(p_x, p_out, BLOCK: tl.constexpr):
        ...     o_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ...     tl.store(p_out + o_element, tl.load(p_x + o_element))
        >>> array = TensorSpec((256,), "float32")
        >>> plan = LaunchPlan(
        ...     name="copy",
        ...     kernel=copy_kernel,
        ...     grid=(2, 1, 1),
        ...     inputs=(array,),
        ...     outputs=(array,),
        ...     arguments={"p_x": Pointer("input", 0), "p_out": Pointer("output", 0), "BLOCK": Constexpr(128)},
        ... )
        >>> report = inspect_plan(plan, 90)
        >>> report.arch, report.num_warps, report.spill_bytes, report.ptx["wgmma"]
        (90, 4, 0, 0)
    """

    name: str
    arch: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    shared_limit: int
    tensor_memory_columns: int
    num_warps: int
    partitions: tuple[tuple[int, ...], ...]
    ptx: Mapping[str, int]
    global_scratch_bytes: int
    kernel: Any

    # Disassembled on first use, because disassembling takes as long as assembling.
    @functools.cached_property
    def _machine_code(self) -> str:
        return _disassemble(self.kernel.asm["cubin"])

    @functools.cached_property
    def sass(self) -> Mapping[str, int]:
        """Instruction counts of the machine code, including local (spill) loads and stores."""
        return _count(_SASS_PATTERNS, self._machine_code)

    @functools.cached_property
    def local_accesses(self) -> Mapping[int, int]:
        """Number of local memory accesses in the machine code by loop depth, 0 outside loops; empty if there are none.

        See `sass.loop_depths` for the definition of a loop.
        """
        # A kernel without a stack frame has no local memory.
        return _local_accesses(self._machine_code) if self.stack_bytes or self.spill_bytes else {}

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and loads together; 0 if nothing spills."""
        return self.spill_store_bytes + self.spill_load_bytes

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.ptx.items() if count)
        return (
            f"{self.name} on sm_{self.arch}: {self.registers} registers, {self.spill_bytes} spill bytes (local memory "
            f"accesses by depth of loops: {dict(self.local_accesses)}), "
            f"{self.shared_bytes}/{self.shared_limit} shared bytes, {self.tensor_memory_columns} tensor memory "
            f"columns, {self.num_warps} warps, partitions {list(self.partitions)}, {counts}"
        )


def inspect_plan(plan: LaunchPlan, arch: int | Target) -> Report:
    """Compile `plan` for `arch` (80, 90, 100, 120, ...) without a GPU and report its resources and instructions.

    Args:
        plan: the launch.
        arch: compute capability as an integer, or a `Target`.

    Returns:
        The report.

    Raises:
        KernelCompileError: ptxas rejects the kernel (the message quotes ptxas), or shared or tensor memory exceed the
            architecture's limits.
        ValueError: the shared memory of `arch` is not known.

    Example:
        >>> import triton, triton.language as tl
        >>> from blockdiag.triton_kernels.launch.offline import inspect_plan
        >>> from blockdiag.triton_kernels.launch.plan import Constexpr, LaunchPlan, Pointer, TensorSpec
        >>> @triton.jit
        ... def copy_kernel(p_x, p_out, BLOCK: tl.constexpr):
        ...     o_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ...     tl.store(p_out + o_element, tl.load(p_x + o_element))
        >>> array = TensorSpec((256,), "float32")
        >>> plan = LaunchPlan(
        ...     name="copy",
        ...     kernel=copy_kernel,
        ...     grid=(2, 1, 1),
        ...     inputs=(array,),
        ...     outputs=(array,),
        ...     arguments={"p_x": Pointer("input", 0), "p_out": Pointer("output", 0), "BLOCK": Constexpr(128)},
        ... )
        >>> inspect_plan(plan, 100).local_accesses
        {}
    """
    target = arch if isinstance(arch, Target) else Target.for_arch(arch)
    limit = shared_limit(target.arch)
    if limit is None:
        raise ValueError(f"`arch` must be one whose shared memory is known, got {target.arch}")
    compiled, printed = _compile_quietly(plan, target)
    asm = compiled.kernel.asm
    # A kernel from Triton's cache on disk was assembled by another process.
    usage = printed if "registers" in printed else private_triton.assemble(asm["ptx"], target.arch)
    return Report(
        name=plan.name,
        arch=target.arch,
        registers=_number(r"Used (\d+) registers", usage),
        spill_store_bytes=_number(r"(\d+) bytes spill stores", usage),
        spill_load_bytes=_number(r"(\d+) bytes spill loads", usage),
        stack_bytes=_number(r"(\d+) bytes stack frame", usage),
        shared_bytes=compiled.shared_bytes,
        shared_limit=limit,
        tensor_memory_columns=compiled.tensor_memory_columns,
        num_warps=compiled.num_warps,
        partitions=_partitions(asm["ttgir"]),
        ptx=_count(_PTX_PATTERNS, asm["ptx"]),
        global_scratch_bytes=compiled.global_scratch_bytes,
        kernel=compiled.kernel,
    )


def _compile_quietly(plan: LaunchPlan, target: Target) -> tuple[CompiledLaunch, str]:
    """Return the compiled kernel and ptxas's output, which is empty if the kernel came from the cache."""
    with private_triton.ptxas_log() as printed:
        compiled = compile_plan(plan, target, binary=True)
    return compiled, printed.getvalue()


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [private_triton.disassembler(), "-c", str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _local_accesses(sass: str) -> dict[int, int]:
    depths = Counter(depth for text, depth in loop_depths(sass) if re.search(r"\b(?:LDL|STL)\b", text))
    return dict(sorted(depths.items()))


def _partitions(ttgir: str) -> tuple[tuple[int, ...], ...]:
    regions: list[list[int]] = []
    for match in re.finditer(r"\bpartition(\d+)\(.*?num_warps\((\d+)\)", ttgir):
        if match[1] == "0":
            regions.append([])
        regions[-1].append(int(match[2]))
    return tuple(map(tuple, regions))


def _count(patterns: Mapping[str, str], text: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}


def _number(pattern: str, text: str) -> int:
    return max((int(number) for number in re.findall(pattern, text)), default=0)
