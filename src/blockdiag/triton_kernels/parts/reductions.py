"""Device helper in Gluon that adds tiles to arrays in global memory."""

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
