"""Device helpers in Gluon that add a float32 number of each query to a tile of products [keys, queries] on Hopper.

Each thread of such a tile has two rows and many columns, so it would load many numbers, which its neighbours load too:
7% of the traffic of shared memory in a backward pass with 128 features. Worse, a load waits until operands of the
products in flight have been read. So a product adds the numbers: of a tile of ones, and of a matrix whose rows have the
parts of a number in bfloat16. Three parts have all bits of a float32 number.
"""

# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# The columns of the matrix of parts: the fewest that a product takes.
PARTS = gl.constexpr(16)


@gluon.jit
def make_split_numbers(SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Return shared memory for the parts of the numbers of ROWS queries, in each of some slots."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, PARTS], LAYOUT)


@gluon.jit
def split_rows(ROWS: gl.constexpr):
    """Return the indices of rows in the layout of the numbers that `store_split` takes; two lanes have each row."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [gl.num_warps(), 1], [1, 0])
    return gl.arange(0, ROWS, gl.SliceLayout(1, LINES))


@gluon.jit
def store_split(memory, b_number):
    """Write numbers to shared memory: each row has the three parts of a number, and zeros. Infinities become NaN.

    Readers that are products need a fence before the barrier at which they wait.
    """
    b_first = b_number.to(gl.bfloat16)
    b_rest = b_number - b_first.to(gl.float32)
    b_second = b_rest.to(gl.bfloat16)
    b_third = (b_rest - b_second.to(gl.float32)).to(gl.bfloat16)
    o_part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(0, b_number.type.layout.parent)), 0)
    b_parts = gl.where(o_part == 1, gl.expand_dims(b_second, 1), gl.expand_dims(b_third, 1))
    b_parts = gl.where(o_part == 0, gl.expand_dims(b_first, 1), b_parts)
    memory.store(gl.where(o_part < 3, b_parts, 0.0))


@gluon.jit
def start_from_split(memory, b_zero):
    """Start the product that is the number of each query in all rows of a tile; other products can be added to it."""
    ONES: gl.constexpr = gl.DotOperandLayout(0, b_zero.type.layout, 2)
    b_ones = gl.full([b_zero.shape[0], PARTS], 1.0, gl.bfloat16, ONES)
    return warpgroup_mma(b_ones, memory.permute((1, 0)), b_zero, use_acc=False, is_async=True)
