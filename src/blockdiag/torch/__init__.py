"""blockdiag for PyTorch: registered operators that launch the library's kernels, and modules made of them.

Importing this module imports no JAX; calls on the CPU, calls that ask for it, `fuse` and `explain` do.
"""

from blockdiag.torch import _sharding
from blockdiag.torch._append import append_to_pages as append_to_pages
from blockdiag.torch._attention import block_diagonal_attention as block_diagonal_attention
from blockdiag.torch._attention import block_diagonal_attention_bhsd as block_diagonal_attention_bhsd
from blockdiag.torch._attention import fused_qkv_block_attention as fused_qkv_block_attention
from blockdiag.torch._context_parallel import ContextParallel as ContextParallel
from blockdiag.torch._fuse import explain as explain
from blockdiag.torch._fuse import fuse as fuse
from blockdiag.torch._key_convolution import key_convolution as key_convolution
from blockdiag.torch._moba import moba_attention as moba_attention
from blockdiag.torch._moba import moba_routing as moba_routing
from blockdiag.torch._moba_paged import moba_paged_attention as moba_paged_attention
from blockdiag.torch._moba_routing import Routing as Routing
from blockdiag.torch._paged import merge_attention_states as merge_attention_states
from blockdiag.torch._paged import paged_attention as paged_attention
from blockdiag.torch._rotary import Rotary as Rotary
from blockdiag.torch._rotary import apply_rotary as apply_rotary
from blockdiag.torch._rotary import rotary_tables as rotary_tables
from blockdiag.torch.moba_modules import MoBASelfAttention as MoBASelfAttention
from blockdiag.torch.modules import BlockDiagonalSelfAttention as BlockDiagonalSelfAttention

__all__ = [
    "BlockDiagonalSelfAttention",
    "ContextParallel",
    "MoBASelfAttention",
    "Rotary",
    "Routing",
    "append_to_pages",
    "apply_rotary",
    "block_diagonal_attention",
    "block_diagonal_attention_bhsd",
    "explain",
    "fuse",
    "fused_qkv_block_attention",
    "key_convolution",
    "merge_attention_states",
    "moba_attention",
    "moba_paged_attention",
    "moba_routing",
    "paged_attention",
    "rotary_tables",
]

_sharding.register_where_imported()
