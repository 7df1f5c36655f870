"""What the machine can do at best, measured in the run it is compared with: copying, streaming, multiplying."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness.clock import sample_torch, summarise

COPY_BYTES = 2 * 2**31


def copy_subject() -> Callable[[], torch.Tensor]:
    """Device-to-device copy of 2 GiB of random bytes: `COPY_BYTES` read plus written, far more than L2 holds."""
    source = torch.randint(-(2**31), 2**31 - 1, (COPY_BYTES // 8,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


@dataclass(frozen=True)
class Roofs:
    """Rates of one GPU.

    Attributes:
        copy_gb_per_s: bytes read plus written per second of a device-to-device copy.
        stream_gb_per_s: the same of a kernel with three reads and one write, the forward's mix.
        matmul_tflops: rate of an 8192 x 8192 x 8192 bfloat16 product of random matrices.
    """

    copy_gb_per_s: float
    stream_gb_per_s: float
    matmul_tflops: float


def measure_roofs(samples: int = 10) -> Roofs:
    """Medians of `samples` batches each."""
    copy = copy_subject()
    copy_ms = summarise([sample_torch(copy, 5) for _ in range(samples)]).median
    return Roofs(COPY_BYTES / copy_ms / 1e6, _stream_rate(samples), matmul_rate(samples))


def _stream_rate(samples: int) -> float:
    """GB/s of result = a + b * c over four arrays of 512 MiB."""
    first, second, third = (torch.randn(2**28, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    result = torch.empty_like(first)
    times = [sample_torch(lambda: torch.addcmul(first, second, third, out=result), 5) for _ in range(samples)]
    return 4 * result.nbytes / summarise(times).median / 1e6


def matmul_rate(samples: int = 10, size: int = 8192) -> float:
    """Return the TFLOP/s of a square bfloat16 product."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [sample_torch(lambda: left @ right, 5) for _ in range(samples)]
    return 2 * size**3 / summarise(times).median / 1e9


def counted_rates() -> tuple[dict[str, float], str]:
    """Return the rates of a copy and of a product, by the rows' columns and as text."""
    roofs = measure_roofs()
    text = f"copy {roofs.copy_gb_per_s:,.0f} GB/s, bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s"
    return {"copy_gb_per_s": roofs.copy_gb_per_s, "matmul_tflops": roofs.matmul_tflops}, text
