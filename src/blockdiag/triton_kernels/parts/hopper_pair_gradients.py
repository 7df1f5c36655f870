"""Parts that the Hopper templates for gradients of queries and of a resident bias share.

The templates are `dense/hopper_resident_pairs.py` and `dense/hopper_resident_pairs_wide.py`. Each program has a tile of
64 queries of the bias, and processes it in several rounds: one for each batch index along which the bias is the same.
If there are few tiles, several programs share the rounds of a tile. The gradient of the tile of the bias is a sum over
the rounds, and stays in registers. Two groups of four warps share each tile of queries, each with half of the keys.

The caller of a template passes `FUNCTIONS`, generated for a region:

| function | returns |
|---|---|
| own_place(cell) | the batch indices of the bias, from a flat index |
| place(own, other) | all batch indices; `other` is the number of a round |
| query_at(place, tile) | the row and the column of a tile of queries |
| output_at(place, tile) | the same for results and their cotangents |
| gradient_at(place, tile) | the same for gradients of queries |
| bias_at(place, tile) | the row and the column of a tile of the bias, at key 0 |
| key_at, value_at (place) | the row and the column of the array at key 0 |
| line_at(pointer, place) | a pointer to the first element of a line in an array [batch.., queries] |
| per_query(arrays, place, r_q) | the positions of queries, and the per-query numbers that scores need |
| start(numbers, r_k, bias) | the sum of all terms of scores that are not in `key_terms`, from a tile of the bias |
| request_terms(arrays, place, r_k) | the numbers that `key_terms` needs, whose loads have started |
| key_terms(loaded, r_k) | the sum of the terms of scores without queries, [1, keys] or a number |

`place` is the tuple of all batch indices, `numbers` what `per_query` returns, `loaded` what `request_terms` returns.
Scores are `factor` times the sum of a product, `start` and `key_terms`. Both functions therefore divide their terms by
the factor.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blockdiag.triton_kernels.launch.gluon_names import tma_load

# Queries per program.
OWN = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class PairsFunctions:
    """Generated device functions; the module's docstring describes them."""

    own_place: Any
    place: Any
    query_at: Any
    output_at: Any
    key_at: Any
    value_at: Any
    bias_at: Any
    gradient_at: Any
    line_at: Any
    per_query: Any
    start: Any
    request_terms: Any
    key_terms: Any


@gluon.jit
def load_bias(matrices, memory, place, tile, FUNCTIONS: gl.constexpr):
    """Load the tile of the bias, which stays in shared memory."""
    PIECES: gl.constexpr = memory.bias.shape[0]
    COLUMNS: gl.constexpr = memory.bias.shape[2]
    mbarrier.expect(memory.bias_full.index(0), OWN * COLUMNS * PIECES * 2)
    row, column = FUNCTIONS.bias_at(place, tile)
    for piece in gl.static_range(PIECES):
        tma_load(matrices.bias, [row, column + piece * COLUMNS], memory.bias_full.index(0), memory.bias.index(piece))


@gluon.jit
def key_positions(SHAPE: gl.constexpr):
    """Return the positions of all keys, for the warps that sum key terms."""
    KEYS: gl.constexpr = SHAPE.keys
    SPREAD: gl.constexpr = gl.BlockedLayout([1, KEYS // 32 // gl.num_warps()], [1, 32], [1, gl.num_warps()], [1, 0])
    return gl.arange(0, KEYS, gl.SliceLayout(0, SPREAD))


@gluon.jit
def request_vectors(arrays, p_log_sum, place, tile, r_k, FUNCTIONS: gl.constexpr):
    """Start loading the key terms of a round, in the dtypes of their arrays, and its log-sum-exps."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    loaded = FUNCTIONS.request_terms(arrays, place, r_k)
    o_query = tile * OWN + gl.arange(0, OWN, LINE)
    return loaded, gl.load(FUNCTIONS.line_at(p_log_sum, place) + o_query)


@gluon.jit
def store_vectors(memory, line, slot, loaded, b_log_sum, r_k, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Write log-sum-exps times log2(e) to `line` of `memory.lines`, and the sums of key terms to a slot."""
    memory.lines.index(line).store(gl.where(b_log_sum == float("-inf"), 0.0, b_log_sum * LOG2_E))
    if SHAPE.has_key_terms:
        KEYS: gl.constexpr = SHAPE.keys
        SPREAD: gl.constexpr = r_k.type.layout.parent
        b_terms = gl.zeros([1, KEYS], gl.float32, SPREAD) + FUNCTIONS.key_terms(loaded, r_k)
        memory.key_terms.index(slot).store(gl.sum(b_terms, 0))


@gluon.jit
def store_bias_sums(p_gradient, b_sums, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Store a group's sums for the gradient of the bias, one for each of its chunks of keys."""
    KEYS: gl.constexpr = SHAPE.keys
    LAYOUT: gl.constexpr = b_sums[0].type.layout
    COUNT: gl.constexpr = len(b_sums)
    COLUMNS: gl.constexpr = b_sums[0].shape[1]
    p_tile = p_gradient + gl.program_id(0).to(gl.int64) * (OWN * KEYS) + GROUP * (KEYS // 2)
    o_query = gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(1, LAYOUT)), 1) * KEYS
    o_key = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)
    for chunk in gl.static_range(COUNT):
        p_chunk = p_tile + o_query + o_key + chunk * COLUMNS
        b_sum = b_sums[chunk]
        if SHAPE.bias_factor != 1:
            b_sum = b_sum * SHAPE.bias_factor
        gl.store(p_chunk, b_sum.to(p_gradient.dtype.element_ty))
