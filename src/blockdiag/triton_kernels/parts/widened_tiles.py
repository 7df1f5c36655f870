"""Device functions in Gluon for eight-bit numbers that are widened to 16 bits in registers."""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# PTX that widens the four bytes of a word $1 to float16, which represents every eight-bit number.
FROM_E4M3 = gl.constexpr("""
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
""")
# float8_e5m2 is the upper byte of a float16.
FROM_E5M2 = gl.constexpr("""
    prmt.b32 first, $1, 0, 0x1404;
    prmt.b32 second, $1, 0, 0x3424;
""")
# The float16 with the upper byte 0x64 and the lower byte b is 1024 + b. With the sign bit of an integer x flipped, b is
# x + 128, so that 1152 (0x6480) is subtracted.
FROM_INT8 = gl.constexpr("""
    mov.b32 word, 0x64806480;
    xor.b32 second, $1, 0x80808080;
    prmt.b32 first, second, 0x64646464, 0x4140;
    prmt.b32 second, second, 0x64646464, 0x4342;
    sub.rn.f16x2 first, first, word;
    sub.rn.f16x2 second, second, word;
""")
# bfloat16 represents every eight-bit number, too.
TO_BFLOAT16 = gl.constexpr("""
    mov.b32 {low, high}, first;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 first, y, x;
    mov.b32 {low, high}, second;
    cvt.f32.f16 x, low;
    cvt.f32.f16 y, high;
    cvt.rn.bf16x2.f32 second, y, x;
""")
BEGIN = gl.constexpr("{ .reg .b16 low, high; .reg .b32 first, second, word; .reg .f32 x, y;")
END = gl.constexpr(" mov.b64 $0, {first, second}; }")


@gluon.jit
def widen_words(b_word, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Return words of four numbers of an eight-bit dtype as 64-bit words of four numbers of a 16-bit dtype."""
    if KIND.is_fp8e5():
        NARROW: gl.constexpr = FROM_E5M2
    elif KIND.is_int8():
        NARROW: gl.constexpr = FROM_INT8
    else:
        gl.static_assert(KIND.is_fp8e4nv())
        NARROW: gl.constexpr = FROM_E4M3
    if DTYPE.is_bf16():
        PTX: gl.constexpr = NARROW + TO_BFLOAT16
    else:
        PTX: gl.constexpr = NARROW
    return gl.inline_asm_elementwise(BEGIN + PTX + END, "=l,r", [b_word], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def fetch_lines(p_line):
    """Start loading the lines of pointers into L2."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line], dtype=gl.int32,
                              is_pure=False, pack=1)
