"""The GPU as PyTorch and JAX share it: memory, arrays of both, CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness.failures import WrongResult


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """||output - exact|| / ||exact||; infinite when the output holds NaN or Inf."""
    if output.shape != exact.shape:
        raise WrongResult(f"result has shape {tuple(output.shape)}, expected {tuple(exact.shape)}")
    wide = torch.promote_types(output.dtype, exact.dtype)
    difference = torch.linalg.vector_norm(output.to(wide) - exact.to(wide))
    error = float(difference / torch.linalg.vector_norm(exact))
    return error if error == error else float("inf")


def poison(like: Sequence[torch.Tensor]) -> None:
    """Fill memory that the next outputs are likely to get with NaN, so that rows nobody writes are noticed."""
    import jax
    import jax.numpy as jnp

    for tensor in like:
        torch.full_like(tensor, torch.nan)
        jax.block_until_ready(jnp.full(tensor.shape, jnp.nan, jnp.bfloat16))


def to_jax(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a JAX array; the tensor must not be written afterwards."""
    import jax

    return jax.dlpack.from_dlpack(tensor.contiguous())


def to_torch(array: Any) -> torch.Tensor:
    """A JAX array's memory as a tensor, once it is computed."""
    return torch.from_dlpack(array.block_until_ready())


def torch_peak_bytes(run: Callable[[], tuple[torch.Tensor, ...]]) -> int | None:
    """Device memory of one call beyond what was allocated before and what it returns; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    returned = sum(result.untyped_storage().nbytes() for result in results)
    return max(0, torch.cuda.max_memory_allocated() - before - returned)


def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A CUDA graph of calls, one after the other, whose kernels are loaded: what a decode step is in a server."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph.replay
