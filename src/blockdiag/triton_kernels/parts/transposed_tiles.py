"""Device helpers in Gluon for Hopper: values of eight bits, transposed for products with weights.

Eight-bit operands in shared memory must be contiguous along the reduction, so values are transposed. Threads read four
keys by four features of a chunk, and write them as words of the transposed chunk. The order of keys in a transposed
chunk is the one in which threads have weights, so weights stay in their threads.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blockdiag.triton_kernels.launch.gluon_names import reinterpret


@gluon.jit
def bytes_of(b_first, b_second, SELECTOR: gl.constexpr):
    """Return words of the bytes that the digits of SELECTOR name, 0 to 3 in the first word and 4 to 7 in the second."""
    return gl.inline_asm_elementwise(f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [b_first, b_second],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def transpose_words(b_word):
    """Return a chunk of values [keys, words of 4 features] as [features, words of 4 keys].

    Word w of a result has keys 2 (w % 4), 2 (w % 4) + 1 of eight in sequence w // 4 of the first half, and then those
    of the second half. Each thread has the four keys of its words.
    """
    KEYS: gl.constexpr = b_word.shape[0]
    WORDS: gl.constexpr = b_word.shape[1]
    b_word = gl.permute(gl.reshape(b_word, [2, KEYS // 16, 4, 2, WORDS]), (1, 2, 4, 0, 3))
    b_even, b_odd = gl.split(b_word)
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    b_low = bytes_of(b_0, b_1, 0x5140)
    b_high = bytes_of(b_0, b_1, 0x7362)
    b_low_later = bytes_of(b_2, b_3, 0x5140)
    b_high_later = bytes_of(b_2, b_3, 0x7362)
    b_first = gl.join(bytes_of(b_low, b_low_later, 0x5410), bytes_of(b_low, b_low_later, 0x7632))
    b_second = gl.join(bytes_of(b_high, b_high_later, 0x5410), bytes_of(b_high, b_high_later, 0x7632))
    b_word = gl.permute(gl.join(b_first, b_second), (2, 4, 3, 0, 1))
    return gl.reshape(b_word, [WORDS * 4, KEYS // 4])


@gluon.jit
def transpose_chunk(value, turned, LAYOUT: gl.constexpr):
    """Write 128 keys of values into shared memory as [columns, keys], in the order of `transpose_words`.

    LAYOUT is the layout of the values as words of four columns. It needs four warps.
    """
    CHUNK: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    WORDS: gl.constexpr = COLUMNS // 4
    # Threads of a warp have different keys, so that their words of a transposed row are in different banks.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [CHUNK // 2, 0]], [[2, 0], [4, 0], [8, 0], [16, 0], [32, 0]], [[0, 4], [0, 8]], [],
        [CHUNK, 16])
    source = reinterpret(value, gl.int32, [CHUNK, WORDS], LAYOUT)
    target = reinterpret(turned, gl.int32, [COLUMNS, CHUNK // 4],
                         gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
    for i in gl.static_range(WORDS // 16):
        b_word = transpose_words(source.slice(i * 16, 16, 1).load(L))
        target.slice(i * 64, 64).store(b_word)


@gluon.jit
def rounded(b_weights, R: gl.constexpr, DTYPE: gl.constexpr):
    """Return weights as an operand of the value product, in the order of `transpose_words`; no data moves."""
    ROWS: gl.constexpr = b_weights.shape[0]
    KEYS: gl.constexpr = b_weights.shape[1]
    b_weights = gl.permute(gl.reshape(b_weights, [ROWS, 2, KEYS // 16, 4, 2]), (0, 2, 3, 1, 4))
    b_weights = gl.convert_layout(gl.reshape(b_weights, [ROWS, KEYS]), gl.DotOperandLayout(0, R, 4))
    return b_weights.to(DTYPE)
