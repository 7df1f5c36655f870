"""Dense causal attention as a PyTorch user calls it today, over the same arrays: FlashAttention 2 and cuDNN."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.device import torch_peak_bytes
from benchmarks.harness.family import Program
from benchmarks.moba.cases import MoBACase, MoBAPass

DENSE_BACKENDS = {"torch-fa2": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}


def dense_passes(
    case: MoBACase, operands: tuple[torch.Tensor, ...], backend: SDPBackend
) -> Mapping[MoBAPass, Callable[[], Program]]:
    """Makers of the passes of SDPA with one backend on query, key, value and cotangent [B, T, heads, H]."""
    *inputs, cotangent = (array.transpose(1, 2) for array in operands)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        is_grouped = case.query_heads != case.key_heads
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=is_grouped
            )

    def prepared(run: Callable[[], tuple[Any, ...]]) -> Program:
        return Program(run, extra_bytes=torch_peak_bytes(run))

    def leaves() -> list[torch.Tensor]:
        return [array.detach().requires_grad_() for array in inputs]

    def forward() -> Program:
        def run() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (attend(*inputs),)

        return prepared(run)

    def backward() -> Program:
        given = leaves()
        output = attend(*given)
        return prepared(lambda: torch.autograd.grad(output, given, cotangent, retain_graph=True))

    def both() -> Program:
        given = leaves()

        def run() -> tuple[torch.Tensor, ...]:
            output = attend(*given)
            return (output.detach(), *torch.autograd.grad(output, given, cotangent))

        return prepared(run)

    return {"fwd": forward, "bwd": backward, "fwd+bwd": both}
