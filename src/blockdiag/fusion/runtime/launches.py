"""Launch plans of generated kernels: arrays, grid and options on each architecture."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from blockdiag.common.dtype_table import ELEMENT_TYPES
from blockdiag.fusion.codegen.gluon import HopperKernel
from blockdiag.fusion.codegen.kernels import Source
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.lowering.resident_schedule import rounds_each
from blockdiag.triton_kernels.launch.compile import load_compiler, shared_limit
from blockdiag.triton_kernels.launch.generated import GeneratedKernel
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Role,
    Target,
    TensorSpec,
)
from blockdiag.triton_kernels.launch.private_triton import gluon_reason, has_hopper_kernels


@dataclasses.dataclass(frozen=True)
class FusedLaunch:
    """Launch of a generated kernel. It is a KernelSpec, and compares equal by source.

    Attributes:
        num_stages: the most stages; fewer are used if shared memory is small.
        shared: estimated bytes of shared memory: the fixed part, and the part per stage.
        on_hopper: the kernel launched instead on Hopper. If it has the same source, other targets are not supported.
        flops: estimated floating-point operations of the products.
    """

    source: Source
    inputs: tuple[TensorSpec, ...]
    num_warps: int
    num_stages: int
    shared: tuple[int, int]
    on_hopper: HopperKernel | None = None
    flops: float = 0.0

    @property
    def name(self) -> str:
        """The kernel name that profilers show."""
        return self.source.name

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The shape and dtype of each array that the launch writes."""
        return tuple(TensorSpec(x.shape, x.dtype) for x in self.source.outputs)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        if self.on_hopper is not None and has_hopper_kernels(target.arch):
            return self._hopper_plan(self.on_hopper, target)
        if self.on_hopper is not None and self.on_hopper.source == self.source:
            reason = gluon_reason() or f"got compute capability {target.arch}"
            raise ValueError(f"kernel {self.name!r} is for Hopper alone and written in Gluon: {reason}")
        names = [f"p_{x}" for x in self.source.inputs]
        arguments = {name: Pointer("input", i) for i, name in enumerate(names)}
        arguments |= {f"p_{x.name}": Pointer("output", i) for i, x in enumerate(self.source.outputs)}
        return LaunchPlan(
            name=self.name,
            kernel=kernel_of(self.source.text, self.name),
            grid=self.source.grid,
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=arguments,
            # Before Hopper, warps hold the operands of products in registers, so eight warps are used.
            options=CompileOptions(
                num_warps=self.num_warps if target.arch >= 90 else 8, num_stages=self._stages(target)
            ),
            flops=self.flops,
        )

    def _hopper_plan(self, kernel: HopperKernel, target: Target) -> LaunchPlan:
        load_compiler()
        import triton.language as tl
        from triton.experimental.gluon import language as gl

        places: dict[str, tuple[Role, int]] = {x: ("input", i) for i, x in enumerate(self.source.inputs)}
        for i, written in enumerate(self.source.outputs):
            places[written.name] = ("output", i)
        started = [(x.name, i) for i, x in enumerate(self.source.outputs) if x.starts_at_zero]
        dtypes = dict(zip(self.source.inputs, (x.dtype for x in self.inputs), strict=True))
        dtypes |= {x.name: x.dtype for x in self.source.outputs}
        arguments: dict[str, Argument] = {}
        last: dict[str, Argument] = {}
        seen = set()
        for name, array, shape, block in kernel.moved:
            layout = gl.NVMMASharedLayout.get_default_for(list(block), tl.dtype(ELEMENT_TYPES[dtypes[array]].triton))
            # jaxlib's launcher takes the second use of an output after the first uses of all outputs.
            group = last if array in seen and places[array][0] == "output" else arguments
            group[name] = Descriptor(*places[array], shape=shape, block_shape=block, layout=layout)
            seen.add(array)
        arguments |= {f"p_{name}": Pointer(*places[name]) for name in kernel.pointers} | last
        shares = 1
        if kernel.rounds is not None:
            each = kernel.each or rounds_each(kernel.rounds, kernel.tiles, target.num_sms)
            arguments["ROUNDS"] = Constexpr(each)
            shares = -(-kernel.rounds // each)
        programs = min(kernel.tiles, target.num_sms) if kernel.is_persistent else kernel.tiles * shares
        return LaunchPlan(
            name=kernel.source.name,
            kernel=kernel_of(kernel.source.text, kernel.source.name),
            grid=(programs, 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=arguments,
            options=CompileOptions(num_warps=kernel.num_warps),
            aliases=tuple((places[f"zeros_{name}"][1], place) for name, place in started),
            flops=self.flops,
        )

    def _stages(self, target: Target) -> int:
        once, each = self.shared
        stages = self.num_stages if target.arch >= 90 else min(self.num_stages, 2)
        limit = shared_limit(target.arch)
        return stages if limit is None or not each else max(1, min(stages, (limit - once) // each))


@functools.lru_cache(maxsize=1024)
def kernel_of(text: str, name: str) -> GeneratedKernel:
    """Return the kernel that a source text defines; Triton parses it only when it is compiled."""
    return GeneratedKernel(text, name)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Kernel of a region with its launch parameters.

    Attributes:
        source: the generated source.
        tile: the tile size.
        num_warps, num_stages: options of Triton's compiler.
        shared: estimated bytes of shared memory: the fixed part, and the part per stage.
        live: the lists of live tiles that it reads, by name.
        on_hopper: the kernel launched instead on Hopper.
        flops: estimated floating-point operations of the products.
    """

    source: Source
    tile: Tile
    num_warps: int
    num_stages: int
    shared: tuple[int, int]
    live: Mapping[str, Any]
    on_hopper: HopperKernel | None = None
    flops: float = 0.0

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources that it may launch."""
        found = (self.source,) if self.on_hopper is None else (self.source, self.on_hopper.source)
        return tuple(dict.fromkeys(found))

    def given(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return its input arrays, in order."""
        found = {**arrays, **self.live}
        for x in self.source.outputs:
            if x.starts_at_zero:
                found[f"zeros_{x.name}"] = jnp.zeros(x.shape, x.dtype)
        return [found[name] for name in self.source.inputs]

    def launch(self, specs: Sequence[TensorSpec]) -> FusedLaunch:
        """Return the launch on arrays of these shapes and dtypes."""
        return FusedLaunch(
            self.source, tuple(specs), self.num_warps, self.num_stages, self.shared, self.on_hopper, self.flops
        )
