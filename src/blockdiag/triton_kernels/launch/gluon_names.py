"""Names of the Gluon language that differ between versions of Triton. Device code imports them from here."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from blockdiag.triton_kernels.launch.private_triton import tma_addition


def _named(owner: Any, *names: str) -> Any:
    """Return the first of these attributes that an owner has."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"Gluon has none of {', '.join(names)} in {owner.__name__}; install triton 3.6 to 3.9")


# Synchronises the threads of a program; `barrier` since Triton 3.7.
thread_barrier = _named(gl, "thread_barrier", "barrier")

# Copies into shared memory and out of it. Triton 3.6 and 3.7 have only the long names, which raise in Triton 3.9.
load_async = _named(async_copy, "async_load", "async_copy_global_to_shared")
tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(tma, "async_store", "async_copy_shared_to_global")

# Views shared memory with another dtype, shape and layout: (memory, dtype, shape, layout). Named `reinterpret` since
# Triton 3.9. Triton 3.8 and later require that the view has exactly as many bytes as the memory.
reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")

# Adds a tile in shared memory to a tile of an array in global memory: (descriptor, place, memory).
tma_add = tma_addition()
