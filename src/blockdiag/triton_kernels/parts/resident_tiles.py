"""Device helpers of the generated Hopper kernels, which are warp-specialised.

One producer warp loads tiles into rings of slots. Two consumer groups of four warps compute. Each slot has a "full"
barrier, and an "empty" barrier at which both groups arrive.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blockdiag.triton_kernels.launch.gluon_names import tma_load


@gluon.jit
def share_of(ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Return the program's own tile, its first round, its number of rounds and the batch indices of its bias.

    Tiles that read the same arrays run side by side.
    """
    SHARES: gl.constexpr = (SHAPE.rounds + ROUNDS - 1) // ROUNDS
    program = gl.program_id(0)
    own = program % SHAPE.tiles
    first = program // SHAPE.tiles % SHARES * ROUNDS
    cell = program // (SHAPE.tiles * SHARES)
    return own, first, gl.minimum(ROUNDS, SHAPE.rounds - first), FUNCTIONS.own_place(cell)


@gluon.jit
def load_slot(source, ring, full, empty, number, row, column):
    """Start copying tile `number` into its slot of the ring, once both groups have read the slot's previous tile."""
    SLOTS: gl.constexpr = ring.shape[0]
    BYTES: gl.constexpr = ring.shape[1] * ring.shape[2] * (ring.dtype.primitive_bitwidth // 8)
    slot = number % SLOTS
    mbarrier.wait(empty.index(slot), number // SLOTS % 2 ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    tma_load(source, [row, column], full.index(slot), ring.index(slot))


@gluon.jit
def wait_slot(ring, full, number):
    """Wait for tile `number` and return its slot."""
    SLOTS: gl.constexpr = ring.shape[0]
    slot = number % SLOTS
    mbarrier.wait(full.index(slot), number // SLOTS % 2)
    return ring.index(slot)


@gluon.jit
def free_slot(empty, number, SLOTS: gl.constexpr, pred=True):
    """Signal that this group has read tile `number`. Call it after a barrier of the group's warps."""
    mbarrier.arrive(empty.index(number % SLOTS), count=1, pred=pred)


@gluon.jit
def widened(b_tile):
    """Convert a 16-bit tile to f32. bfloat16 elements are converted in pairs, with one instruction per element."""
    if b_tile.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{.reg .b16 l, h, z; mov.b16 z, 0; mov.b32 {l, h}, $2; mov.b32 $0, {z, l}; and.b32 $1, $2, 0xffff0000;}",
            "=r,=r,r", [b_tile], dtype=gl.float32, is_pure=True, pack=2,
        )
    return b_tile.to(gl.float32)


@gluon.jit
def partial_sums(b_tile):
    """Return the sums of every eighth column, [rows, 8]. Only adds within threads; the rest is reduced at the end."""
    return gl.sum(gl.reshape(b_tile, [b_tile.shape[0], b_tile.shape[1] // 8, 8]), 1)


@gluon.jit
def halves(b_tile):
    """Return the left and right halves of a tile's columns. No data moves between threads."""
    ROWS: gl.constexpr = b_tile.shape[0]
    HALF: gl.constexpr = b_tile.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(b_tile, [ROWS, 2, HALF]), [0, 2, 1]))


@gluon.jit
def side_by_side(a_tile, b_tile, layout: gl.constexpr):
    """Concatenate two tiles along columns, the inverse of `halves`. No data moves between threads."""
    ROWS: gl.constexpr = a_tile.shape[0]
    HALF: gl.constexpr = a_tile.shape[1]
    both = gl.reshape(gl.permute(gl.join(a_tile, b_tile), [0, 2, 1]), [ROWS, 2 * HALF])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def forgotten(number):
    """Return `number`, opaque to the compiler. Values derived from it are recomputed instead of kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded_product(a_tile, b_tile):
    """Return a product that is never fused into a later sum. Fusion would keep both factors in registers until then."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a_tile, b_tile], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def make_ones(dtype: gl.constexpr, COUNT: gl.constexpr):
    """Return a matrix of ones, [8, COUNT], in shared memory, with which a product computes sums of rows."""
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * COUNT), element_bitwidth=16, rank=2)
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    ones = gl.allocate_shared_memory(dtype, [8, COUNT], LINES)
    ones.store(gl.full([8, COUNT], 1.0, gl.float32, SPREAD).to(dtype))
    return ones
