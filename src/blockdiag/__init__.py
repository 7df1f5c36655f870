"""Block-diagonal attention for JAX, with Triton kernels that PyTorch launches too (see `blockdiag.torch`).

Names are resolved on first use, so that `blockdiag.torch` can be imported without JAX.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdiag.append import append_to_pages as append_to_pages
    from blockdiag.block_diagonal import BLOCK_DIAGONAL_OUTPUT as BLOCK_DIAGONAL_OUTPUT
    from blockdiag.block_diagonal import block_diagonal_attention as block_diagonal_attention
    from blockdiag.context_parallel import ContextParallel as ContextParallel
    from blockdiag.fusion.api import NotFusible as NotFusible
    from blockdiag.fusion.api import fuse as fuse
    from blockdiag.fusion.explain import explain as explain
    from blockdiag.key_convolution import key_convolution as key_convolution
    from blockdiag.moba import MOBA_OUTPUT as MOBA_OUTPUT
    from blockdiag.moba import MOBA_ROUTING as MOBA_ROUTING
    from blockdiag.moba import moba_attention as moba_attention
    from blockdiag.moba import moba_routing as moba_routing
    from blockdiag.moba_paged import moba_paged_attention as moba_paged_attention
    from blockdiag.paged import merge_attention_states as merge_attention_states
    from blockdiag.paged import paged_attention as paged_attention
    from blockdiag.projection import BLOCK_DIAGONAL_QKV as BLOCK_DIAGONAL_QKV
    from blockdiag.projection import fused_qkv_block_attention as fused_qkv_block_attention
    from blockdiag.rotary import Rotary as Rotary
    from blockdiag.rotary import apply_rotary as apply_rotary
    from blockdiag.rotary import rotary_tables as rotary_tables
    from blockdiag.routing import Routing as Routing
    from blockdiag.zigzag import inverse_zigzag_order as inverse_zigzag_order
    from blockdiag.zigzag import zigzag_order as zigzag_order

_HOMES = {
    "BLOCK_DIAGONAL_OUTPUT": "blockdiag.block_diagonal",
    "BLOCK_DIAGONAL_QKV": "blockdiag.projection",
    "MOBA_OUTPUT": "blockdiag.moba",
    "MOBA_ROUTING": "blockdiag.moba",
    "ContextParallel": "blockdiag.context_parallel",
    "NotFusible": "blockdiag.fusion.api",
    "Rotary": "blockdiag.rotary",
    "Routing": "blockdiag.routing",
    "append_to_pages": "blockdiag.append",
    "apply_rotary": "blockdiag.rotary",
    "block_diagonal_attention": "blockdiag.block_diagonal",
    "explain": "blockdiag.fusion.explain",
    "fuse": "blockdiag.fusion.api",
    "fused_qkv_block_attention": "blockdiag.projection",
    "inverse_zigzag_order": "blockdiag.zigzag",
    "key_convolution": "blockdiag.key_convolution",
    "merge_attention_states": "blockdiag.paged",
    "moba_attention": "blockdiag.moba",
    "moba_paged_attention": "blockdiag.moba_paged",
    "moba_routing": "blockdiag.moba",
    "paged_attention": "blockdiag.paged",
    "rotary_tables": "blockdiag.rotary",
    "zigzag_order": "blockdiag.zigzag",
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


# A context that JAX learns of after functions were traced makes it trace and compile them all again: so it learns of
# ours as early as can be without importing it.
if "jax" in sys.modules:
    importlib.import_module("blockdiag.interop.targets")
