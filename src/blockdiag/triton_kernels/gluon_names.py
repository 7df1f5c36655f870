"""Names of the Gluon language that differ between versions of Triton; device code takes them from here."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Orders the threads of a program. Triton 3.6 calls it `thread_barrier`, Triton 3.7 and later `barrier`.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier

# Triton 3.6 and 3.7 have the long names only; Triton 3.9 has functions of these names that raise.
load_async: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Shared memory with another dtype, shape and layout: (memory, dtype, shape, layout). The method is `_reinterpret` up to
# Triton 3.8, and `reinterpret` since.
_memory = gl.shared_memory_descriptor
reinterpret: Any = getattr(_memory, "reinterpret", None) or _memory._reinterpret
