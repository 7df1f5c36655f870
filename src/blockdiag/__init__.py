"""Block-sparse attention for JAX, with Triton kernels that PyTorch launches too (see `blockdiag.torch`).

Names are resolved on first use, so that `blockdiag.torch` can be imported without JAX.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiag.common.context_parallel import ContextParallel as ContextParallel
    from blockdiag.common.rotary import Rotary as Rotary
    from blockdiag.common.rotary import apply_rotary as apply_rotary
    from blockdiag.common.rotary import rotary_tables as rotary_tables
    from blockdiag.common.zigzag import inverse_zigzag_order as inverse_zigzag_order
    from blockdiag.common.zigzag import zigzag_order as zigzag_order
    from blockdiag.fusion.api import NotFusible as NotFusible
    from blockdiag.fusion.api import fuse as fuse
    from blockdiag.fusion.explain import explain as explain
    from blockdiag.ops.append.api import append_to_pages as append_to_pages
    from blockdiag.ops.block_diagonal.api import BLOCK_DIAGONAL_OUTPUT as BLOCK_DIAGONAL_OUTPUT
    from blockdiag.ops.block_diagonal.api import block_diagonal_attention as block_diagonal_attention
    from blockdiag.ops.block_diagonal.projection import BLOCK_DIAGONAL_QKV as BLOCK_DIAGONAL_QKV
    from blockdiag.ops.block_diagonal.projection import fused_qkv_block_attention as fused_qkv_block_attention
    from blockdiag.ops.key_convolution.api import key_convolution as key_convolution
    from blockdiag.ops.moba.api import MOBA_OUTPUT as MOBA_OUTPUT
    from blockdiag.ops.moba.api import MOBA_ROUTING as MOBA_ROUTING
    from blockdiag.ops.moba.api import moba_attention as moba_attention
    from blockdiag.ops.moba.api import moba_routing as moba_routing
    from blockdiag.ops.moba.routing import Routing as Routing
    from blockdiag.ops.moba_paged.api import moba_paged_attention as moba_paged_attention
    from blockdiag.ops.paged.api import merge_attention_states as merge_attention_states
    from blockdiag.ops.paged.api import paged_attention as paged_attention

_HOMES = {
    "BLOCK_DIAGONAL_OUTPUT": "blockdiag.ops.block_diagonal.api",
    "BLOCK_DIAGONAL_QKV": "blockdiag.ops.block_diagonal.projection",
    "MOBA_OUTPUT": "blockdiag.ops.moba.api",
    "MOBA_ROUTING": "blockdiag.ops.moba.api",
    "ContextParallel": "blockdiag.common.context_parallel",
    "NotFusible": "blockdiag.fusion.api",
    "Rotary": "blockdiag.common.rotary",
    "Routing": "blockdiag.ops.moba.routing",
    "append_to_pages": "blockdiag.ops.append.api",
    "apply_rotary": "blockdiag.common.rotary",
    "block_diagonal_attention": "blockdiag.ops.block_diagonal.api",
    "explain": "blockdiag.fusion.explain",
    "fuse": "blockdiag.fusion.api",
    "fused_qkv_block_attention": "blockdiag.ops.block_diagonal.projection",
    "inverse_zigzag_order": "blockdiag.common.zigzag",
    "key_convolution": "blockdiag.ops.key_convolution.api",
    "merge_attention_states": "blockdiag.ops.paged.api",
    "moba_attention": "blockdiag.ops.moba.api",
    "moba_paged_attention": "blockdiag.ops.moba_paged.api",
    "moba_routing": "blockdiag.ops.moba.api",
    "paged_attention": "blockdiag.ops.paged.api",
    "rotary_tables": "blockdiag.common.rotary",
    "zigzag_order": "blockdiag.common.zigzag",
}

__all__ = [
    "BLOCK_DIAGONAL_OUTPUT",
    "BLOCK_DIAGONAL_QKV",
    "MOBA_OUTPUT",
    "MOBA_ROUTING",
    "ContextParallel",
    "NotFusible",
    "Rotary",
    "Routing",
    "append_to_pages",
    "apply_rotary",
    "block_diagonal_attention",
    "explain",
    "fuse",
    "fused_qkv_block_attention",
    "inverse_zigzag_order",
    "key_convolution",
    "merge_attention_states",
    "moba_attention",
    "moba_paged_attention",
    "moba_routing",
    "paged_attention",
    "rotary_tables",
    "zigzag_order",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("blockdiag.interop.targets")
    for known, home in _HOMES.items():
        globals()[known] = getattr(importlib.import_module(home), known)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


# JAX traces and compiles all functions again if a context is registered after they were traced. The library's context
# is therefore registered as early as possible without importing JAX.
if "jax" in sys.modules:
    importlib.import_module("blockdiag.interop.targets")
