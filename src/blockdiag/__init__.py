"""Block-diagonal attention for JAX, with Triton kernels that other frameworks can launch too."""

from blockdiag.block_diagonal import BLOCK_DIAGONAL_OUTPUT as BLOCK_DIAGONAL_OUTPUT
from blockdiag.block_diagonal import block_diagonal_attention as block_diagonal_attention

# Before anything is traced: a context that JAX learns of later makes it trace and compile every function again.
from blockdiag.interop import targets as _targets  # noqa: F401
from blockdiag.projection import BLOCK_DIAGONAL_QKV as BLOCK_DIAGONAL_QKV
from blockdiag.projection import fused_qkv_block_attention as fused_qkv_block_attention
from blockdiag.rotary import Rotary as Rotary
from blockdiag.rotary import apply_rotary as apply_rotary
from blockdiag.rotary import rotary_tables as rotary_tables
