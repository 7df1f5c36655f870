"""blockdiag for PyTorch: registered operators that launch the library's kernels, and modules made of them.

Importing this module does not import JAX. Calls on the CPU, calls that request JAX, `fuse` and `explain` import it.
"""

from blockdiag.torch import dtensor_registration
from blockdiag.torch.context.parallel import ContextParallel as ContextParallel
from blockdiag.torch.fusion.api import explain as explain
from blockdiag.torch.fusion.api import fuse as fuse
from blockdiag.torch.moba_modules import MoBASelfAttention as MoBASelfAttention
from blockdiag.torch.modules import BlockDiagonalSelfAttention as BlockDiagonalSelfAttention
from blockdiag.torch.ops.append.api import append_to_pages as append_to_pages
from blockdiag.torch.ops.block_diagonal.api import block_diagonal_attention as block_diagonal_attention
from blockdiag.torch.ops.block_diagonal.api import block_diagonal_attention_bhsd as block_diagonal_attention_bhsd
from blockdiag.torch.ops.block_diagonal.api import fused_qkv_block_attention as fused_qkv_block_attention
from blockdiag.torch.ops.key_convolution.api import key_convolution as key_convolution
from blockdiag.torch.ops.moba.api import moba_attention as moba_attention
from blockdiag.torch.ops.moba.api import moba_routing as moba_routing
from blockdiag.torch.ops.moba.routing import Routing as Routing
from blockdiag.torch.ops.moba_paged.api import moba_paged_attention as moba_paged_attention
from blockdiag.torch.ops.paged.api import merge_attention_states as merge_attention_states
from blockdiag.torch.ops.paged.api import paged_attention as paged_attention
from blockdiag.torch.rotary import Rotary as Rotary
from blockdiag.torch.rotary import apply_rotary as apply_rotary
from blockdiag.torch.rotary import rotary_tables as rotary_tables

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

dtensor_registration.register_where_imported()
