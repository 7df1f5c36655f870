"""Small kernels that the bridge tests launch through every launch path, with the specs of their launches."""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from blockdiag.triton_kernels.launch.gluon_names import tma_load, tma_store
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)


@triton.jit
def add_kernel(p_x, p_y, p_out, num_elements, alpha, BLOCK: tl.constexpr):
    o_element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_element = o_element < num_elements
    x = tl.load(p_x + o_element, mask=m_element, other=0.0)
    y = tl.load(p_y + o_element, mask=m_element, other=0.0)
    tl.store(
        p_out + o_element, (x.to(tl.float32) + alpha * y.to(tl.float32)).to(p_out.dtype.element_ty), mask=m_element
    )


@dataclass(frozen=True)
class AddSpec:
    """out = x + alpha * y, elementwise over any size."""

    size: int
    dtype: str = "float32"
    alpha: float = 0.5
    block: int = 256
    name: str = "add"

    @property
    def inputs(self):
        return (TensorSpec((self.size,), self.dtype),) * 2

    @property
    def outputs(self):
        return (TensorSpec((self.size,), self.dtype),)

    def plan(self, target: Target) -> LaunchPlan:
        return LaunchPlan(
            name=self.name,
            kernel=add_kernel,
            grid=(triton.cdiv(self.size, self.block), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_x": Pointer("input", 0),
                "p_y": Pointer("input", 1),
                "p_out": Pointer("output", 0),
                "num_elements": Scalar(self.size, "i32"),
                "alpha": Scalar(self.alpha, "fp32"),
                "BLOCK": Constexpr(self.block),
            },
        )


@triton.jit
def matmul_kernel(
    d_a,
    d_b,
    p_c,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    i_row = tl.program_id(0) * BLOCK
    i_column = tl.program_id(1) * BLOCK
    # [BLOCK, BLOCK]
    b_sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    for i_depth in tl.range(0, DEPTH, BLOCK_DEPTH, warp_specialize=SPECIALIZE):
        # [BLOCK, BLOCK_DEPTH] and [BLOCK_DEPTH, BLOCK]
        b_a = d_a.load([i_row, i_depth])
        b_b = d_b.load([i_depth, i_column])
        b_sum = tl.dot(b_a, b_b, b_sum)
    o_row = (i_row + tl.arange(0, BLOCK)).to(tl.int64)
    o_column = i_column + tl.arange(0, BLOCK)
    m_c = (o_row < num_rows)[:, None] & (o_column < NUM_COLUMNS)[None, :]
    tl.store(p_c + o_row[:, None] * NUM_COLUMNS + o_column[None, :], b_sum.to(p_c.dtype.element_ty), mask=m_c)


@dataclass(frozen=True)
class MatmulSpec:
    """c = a @ b, with both operands read through tensor descriptors made on the host."""

    rows: int
    columns: int
    depth: int
    dtype: str = "bfloat16"
    block: int = 64
    specialize: bool = False
    name: str = "matmul"

    @property
    def inputs(self):
        return (TensorSpec((self.rows, self.depth), self.dtype), TensorSpec((self.depth, self.columns), self.dtype))

    @property
    def outputs(self):
        return (TensorSpec((self.rows, self.columns), self.dtype),)

    def plan(self, target: Target) -> LaunchPlan:
        block = self.block
        return LaunchPlan(
            name=self.name,
            kernel=matmul_kernel,
            grid=(triton.cdiv(self.rows, block), triton.cdiv(self.columns, block), 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "d_a": Descriptor("input", 0, (self.rows, self.depth), (block, 64)),
                "d_b": Descriptor("input", 1, (self.depth, self.columns), (64, block)),
                "p_c": Pointer("output", 0),
                "num_rows": Scalar(self.rows, "i32"),
                "NUM_COLUMNS": Constexpr(self.columns),
                "DEPTH": Constexpr(self.depth),
                "BLOCK": Constexpr(block),
                "BLOCK_DEPTH": Constexpr(64),
                "SPECIALIZE": Constexpr(self.specialize),
            },
            options=CompileOptions(num_warps=4, num_stages=3),
        )


@triton.jit
def increment_kernel(p_values, p_total, num_elements, BLOCK: tl.constexpr):
    o_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_element = o_element < num_elements
    values = tl.load(p_values + o_element, mask=m_element, other=0)
    tl.store(p_values + o_element, values + 1, mask=m_element)
    tl.store(p_total + tl.program_id(0), tl.sum(values, 0))


@dataclass(frozen=True)
class IncrementSpec:
    """Launch that adds one to an int32 array in place and returns each block's former sum."""

    size: int
    block: int = 128
    name: str = "increment"

    @property
    def inputs(self):
        return (TensorSpec((self.size,), "int32"),)

    @property
    def outputs(self):
        return (TensorSpec((self.size,), "int32"), TensorSpec((triton.cdiv(self.size, self.block),), "int32"))

    def plan(self, target: Target) -> LaunchPlan:
        return LaunchPlan(
            name=self.name,
            kernel=increment_kernel,
            grid=(triton.cdiv(self.size, self.block), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_values": Pointer("input", 0),
                "p_total": Pointer("output", 1),
                "num_elements": Scalar(self.size, "i32"),
                "BLOCK": Constexpr(self.block),
            },
            aliases=((0, 0),),
        )


@triton.jit
def halves_kernel(d_x, d_out, p_out, num_rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0) * BLOCK
    b_x = d_x.load([i_row, 0]) * 2
    if i_row + BLOCK <= num_rows:
        d_out.store([i_row, 0], b_x)
    else:
        o_row = i_row + tl.arange(0, BLOCK)
        o_column = tl.arange(0, COLUMNS)
        m_out = (o_row < num_rows)[:, None] & (o_column >= 0)[None, :]
        tl.store(p_out + o_row[:, None] * COLUMNS + o_column[None, :], b_x, mask=m_out)


@dataclass(frozen=True)
class HalvesSpec:
    """out = 2 x, whole tiles written through a descriptor and the last one through a pointer to the same output."""

    rows: int
    columns: int = 64
    block: int = 32
    name: str = "halves"

    @property
    def inputs(self):
        return (TensorSpec((self.rows, self.columns), "float16"),)

    @property
    def outputs(self):
        return (TensorSpec((self.rows, self.columns), "float16"),)

    def plan(self, target: Target) -> LaunchPlan:
        shape, block_shape = (self.rows, self.columns), (self.block, self.columns)
        return LaunchPlan(
            name=self.name,
            kernel=halves_kernel,
            grid=(triton.cdiv(self.rows, self.block), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "d_x": Descriptor("input", 0, shape, block_shape),
                "d_out": Descriptor("output", 0, shape, block_shape),
                "p_out": Pointer("output", 0),
                "num_rows": Scalar(self.rows, "i32"),
                "COLUMNS": Constexpr(self.columns),
                "BLOCK": Constexpr(self.block),
            },
        )


@triton.jit
def device_descriptor_kernel(p_x, p_out, num_rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    d_x = tl.make_tensor_descriptor(p_x, [num_rows, COLUMNS], [COLUMNS, 1], [BLOCK, COLUMNS])
    d_out = tl.make_tensor_descriptor(p_out, [num_rows, COLUMNS], [COLUMNS, 1], [BLOCK, COLUMNS])
    i_row = tl.program_id(0) * BLOCK
    d_out.store([i_row, 0], d_x.load([i_row, 0]) * 2)


@dataclass(frozen=True)
class DeviceDescriptorSpec:
    """out = 2 x through descriptors that the kernel makes itself, which need global scratch."""

    rows: int
    columns: int = 64
    block: int = 32
    name: str = "device_descriptor"

    @property
    def inputs(self):
        return (TensorSpec((self.rows, self.columns), "float16"),)

    @property
    def outputs(self):
        return (TensorSpec((self.rows, self.columns), "float16"),)

    def plan(self, target: Target) -> LaunchPlan:
        return LaunchPlan(
            name=self.name,
            kernel=device_descriptor_kernel,
            grid=(triton.cdiv(self.rows, self.block), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_x": Pointer("input", 0),
                "p_out": Pointer("output", 0),
                "num_rows": Scalar(self.rows, "i32"),
                "COLUMNS": Constexpr(self.columns),
                "BLOCK": Constexpr(self.block),
            },
        )


@gluon.jit
def gluon_copy_kernel(d_x, d_out, BLOCK: gl.constexpr, COLUMNS: gl.constexpr):
    tile = gl.allocate_shared_memory(d_x.dtype, [BLOCK, COLUMNS], d_x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    i_row = gl.program_id(0) * BLOCK
    mbarrier.expect(ready, d_x.block_type.nbytes)
    tma_load(d_x, [i_row, 0], ready, tile)
    mbarrier.wait(ready, 0)
    tma_store(d_out, [i_row, 0], tile)
    tma.store_wait(0)


@dataclass(frozen=True)
class GluonCopySpec:
    """out = x, tile by tile through shared memory, written in Gluon."""

    rows: int
    columns: int = 64
    block: int = 32
    name: str = "gluon_copy"

    @property
    def inputs(self):
        return (TensorSpec((self.rows, self.columns), "float16"),)

    @property
    def outputs(self):
        return (TensorSpec((self.rows, self.columns), "float16"),)

    def plan(self, target: Target) -> LaunchPlan:
        shape, block_shape = (self.rows, self.columns), (self.block, self.columns)
        layout = gl.NVMMASharedLayout.get_default_for(list(block_shape), gl.float16)
        return LaunchPlan(
            name=self.name,
            kernel=gluon_copy_kernel,
            grid=(triton.cdiv(self.rows, self.block), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "d_x": Descriptor("input", 0, shape, block_shape, layout),
                "d_out": Descriptor("output", 0, shape, block_shape, layout),
                "BLOCK": Constexpr(self.block),
                "COLUMNS": Constexpr(self.columns),
            },
        )


@triton.jit
def sine_kernel(p_x, p_out, num_elements, BLOCK: tl.constexpr):
    o_element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_element = o_element < num_elements
    tl.store(p_out + o_element, tl.sin(tl.load(p_x + o_element, mask=m_element, other=0.0)), mask=m_element)


@dataclass(frozen=True)
class SineSpec:
    """out = sin(x) for any size; large angles are reduced with a per-thread array in local memory."""

    size: int
    name: str = "sine"

    @property
    def inputs(self):
        return (TensorSpec((self.size,), "float32"),)

    @property
    def outputs(self):
        return (TensorSpec((self.size,), "float32"),)

    def plan(self, target: Target) -> LaunchPlan:
        block = 256
        return LaunchPlan(
            name=self.name,
            kernel=sine_kernel,
            grid=(triton.cdiv(self.size, block), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_x": Pointer("input", 0),
                "p_out": Pointer("output", 0),
                "num_elements": Scalar(self.size, "i32"),
                "BLOCK": Constexpr(block),
            },
        )
