"""Device helper in Gluon that adds tiles to arrays in global memory."""

# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_rows(p_first, o_tile, b_tile):
    """Add a float32 tile to numbers in global memory, four at a time.

    `p_first` is a pointer, `o_tile` the offsets, int32; each thread has groups of four consecutive elements. The order
    of additions by several programs is their own concern. Gluon has no reduction of vectors, and `atomic_add` would
    return the old numbers one by one.
    """
    o_tile, b_tile = gl.broadcast(o_tile, b_tile)
    gl.inline_asm_elementwise(
        "{.reg .u64 a; mad.wide.s32 a, $5, 4, $1; "
        "red.relaxed.gpu.global.add.v4.f32 [a], {$9, $10, $11, $12}; mov.u32 $0, 0;}",
        "=r,l,l,l,l,r,r,r,r,r,r,r,r", [p_first.to(gl.int64), o_tile, b_tile.to(gl.int32, bitcast=True)],
        dtype=gl.int8, is_pure=False, pack=4,
    )
