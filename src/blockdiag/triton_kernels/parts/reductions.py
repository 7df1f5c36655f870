"""Device helpers in Gluon that add tiles to arrays in global memory."""

# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_rows(p_first, o_tile, b_tile):
    """Add a float32 tile atomically to an array in global memory, four numbers at a time.

    `p_first` is a pointer, and `o_tile` are int32 offsets from it. Each thread must have groups of four consecutive
    elements. Callers that need a fixed order of additions must enforce it themselves. Inline PTX is needed because
    Gluon has no reduction of vectors, and `atomic_add` would return the old numbers one by one.
    """
    o_tile, b_tile = gl.broadcast(o_tile, b_tile)
    gl.inline_asm_elementwise(
        "{.reg .u64 a; mad.wide.s32 a, $5, 4, $1; "
        "red.relaxed.gpu.global.add.v4.f32 [a], {$9, $10, $11, $12}; mov.u32 $0, 0;}",
        "=r,l,l,l,l,r,r,r,r,r,r,r,r", [p_first.to(gl.int64), o_tile, b_tile.to(gl.int32, bitcast=True)],
        dtype=gl.int8, is_pure=False, pack=4,
    )


@gluon.jit
def run_in_all_threads(PTX: gl.constexpr):
    """Run PTX without operands in each thread."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.inline_asm_elementwise(PTX + " mov.u32 $0, $1;", "=r,r", [gl.arange(0, 32 * gl.num_warps(), LINE)],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_bulk_additions():
    """Order the copy engine's next additions after all that this thread has seen, also of other programs' work."""
    run_in_all_threads("fence.proxy.async;")


@gluon.jit
def finish_bulk_additions():
    """Wait until the additions that this thread gave to the copy engine have been performed.

    `tma.store_wait` waits only until shared memory has been read.
    """
    run_in_all_threads("cp.async.bulk.wait_group 0;")
