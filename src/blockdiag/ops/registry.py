"""Registry of the public operations that have several implementations."""

from blockdiag.common.operation import Operation
from blockdiag.fusion.ir.tree import FUSE
from blockdiag.ops.append.problem import APPEND
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION
from blockdiag.ops.moba.problem import MOBA
from blockdiag.ops.moba_paged.problem import MOBA_PAGED
from blockdiag.ops.paged.problem import PAGED

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (BLOCK_DIAGONAL, MOBA, KEY_CONVOLUTION, PAGED, APPEND, MOBA_PAGED, FUSE)
}
"""Operations by the name of their public function."""
