"""Block-diagonal attention by Pallas and Mosaic GPU: supported calls, and the forward and backward pass.

The kernels are for Hopper GPUs (sm_90). For tests, they also run on the CPU in Pallas's slow interpreter.
"""

from typing import TYPE_CHECKING

from blockdiag.common.dtype_table import SIXTEEN_BIT_FLOATS
from blockdiag.ops.block_diagonal.packed import takes_packed
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem

if TYPE_CHECKING:
    import jax

_REMEDY = "use implementation='triton' or 'xla'"


def supports(problem: BlockDiagonalProblem) -> str | None:
    """Return None if these kernels can compute `problem`, otherwise a sentence with the reason and the remedy."""
    if problem.dtype not in SIXTEEN_BIT_FLOATS:
        return f"pallas computes in bfloat16 or float16, got dtype {problem.dtype}; {_REMEDY}"
    if problem.block_size != 64:
        return f"pallas needs block_size 64, got {problem.block_size}; {_REMEDY}"
    if not problem.is_full:
        return f"pallas needs sequences of one length that is a multiple of block_size, without tile table; {_REMEDY}"
    widest = 256 if problem.group_size == 1 else 128
    if problem.head_dim % 64 or not 64 <= problem.head_dim <= widest:
        return (
            f"pallas needs a head_dim that is a multiple of 64 and at most 256 (128 when query heads share a key "
            f"head), got {problem.head_dim}; {_REMEDY}"
        )
    if problem.rotary is not None:
        return f"pallas does not fuse rotary embedding; {_REMEDY}, or rotate query and key before the call"
    if problem.tokens == 0:
        return f"pallas cannot launch an empty grid, got 0 tokens; {_REMEDY}"
    return None


def available() -> str | None:
    """Return None if the installed jax has the features that these kernels need, otherwise the reason."""
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ImportError as error:
        return f"jax.experimental.pallas.mosaic_gpu cannot be imported ({error}); install jax 0.11 with its cuda extra"
    missing = [name for name in ("kernel", "InterpretGPUParams", "copy_gmem_to_smem") if not hasattr(mosaic_gpu, name)]
    if missing:
        return f"jax.experimental.pallas.mosaic_gpu lacks {', '.join(missing)}; install jax 0.11"
    return None


@takes_packed
def forward(
    problem: BlockDiagonalProblem,
    query: "jax.Array",
    key: "jax.Array",
    value: "jax.Array",
    tiles: "jax.Array | None",
    rotary: tuple | None,
    *,
    interpret: bool = False,
) -> "jax.Array":
    """Return the attention output [tokens, N, H] of query [tokens, N, H], key and value [tokens, K, H], in their dtype.

    `tiles` and `rotary` must be None, as `supports` requires. `interpret=True` runs on the CPU.

    Raises:
        NotImplementedError: when `supports(problem)` gives a reason.
    """
    _require(problem, tiles, rotary)
    from blockdiag.pallas_kernels.block_diagonal.forward import forward_call

    return forward_call(problem, query, key, value, interpret=interpret)


@takes_packed
def backward(
    problem: BlockDiagonalProblem,
    query: "jax.Array",
    key: "jax.Array",
    value: "jax.Array",
    tiles: "jax.Array | None",
    rotary: tuple | None,
    output_cotangent: "jax.Array",
    *,
    interpret: bool = False,
) -> "tuple[jax.Array, jax.Array, jax.Array]":
    """Return the gradients of query [tokens, N, H] and of key and value [tokens, K, H], in their dtype.

    `tiles` and `rotary` must be None, as `supports` requires. `interpret=True` runs on the CPU.

    Raises:
        NotImplementedError: when `supports(problem)` gives a reason.
    """
    _require(problem, tiles, rotary)
    from blockdiag.pallas_kernels.block_diagonal.backward import backward_call

    return backward_call(problem, query, key, value, output_cotangent, interpret=interpret)


def _require(problem: BlockDiagonalProblem, tiles: "jax.Array | None", rotary: tuple | None) -> None:
    reason = supports(problem)
    if reason is not None:
        raise NotImplementedError(reason)
    if tiles is not None or rotary is not None:
        raise ValueError("`tiles` and `rotary` must be None, as the problem has neither; build it from the call")
