"""Figures of another implementation of paged decode that this benchmark does not run.

They stand beside the rows that a run measures, never mixed with them: `device` and `note` say what they are.
"""

from benchmarks.harness.records import PagedTiming
from benchmarks.paged.cases import PAGE_SIZES, SHAPES, PagedCase

FLASHINFER = "flashinfer-recorded"
DEVICE = "NVIDIA H200 (recorded)"
_SOURCE = (
    "recorded: FlashInfer 0.7.2, tensor-core decode, planning outside, random pages, medians on an H200; not run here"
)

# Microseconds of pages of 1, 16 and 64 tokens, by shape and dtype of the cache; bfloat16 queries, 32/8 heads of 128.
RECORDED = {
    ("b1_128k", "bfloat16"): (145.1, 142.0, 139.7),
    ("b1_128k", "float8_e4m3fn"): (132.4, 117.4, 119.0),
    ("b32_8k", "bfloat16"): (256.2, 253.4, 252.3),
    ("b32_8k", "float8_e4m3fn"): (232.5, 210.4, 206.2),
    ("b16_32k", "bfloat16"): (495.0, 490.6, 488.3),
    ("b16_32k", "float8_e4m3fn"): (430.9, 406.9, 392.3),
}


def recorded_rows() -> list[PagedTiming]:
    """The recorded figures as rows of the CSV."""
    rows = []
    for (name, cache), times in RECORDED.items():
        for page_size, microseconds in zip(PAGE_SIZES, times, strict=True):
            case = PagedCase(group="decode", shape=SHAPES[name], cache=cache, page_size=page_size)
            rows.append(
                PagedTiming(
                    implementation=FLASHINFER,
                    **case.columns(),
                    median_us=microseconds,
                    read_gb=case.read_bytes / 1e9,
                    tb_per_s=case.read_bytes / microseconds / 1e6,
                    device=DEVICE,
                    driver="",
                    jax="",
                    jaxlib="",
                    torch="",
                    triton="",
                    date="",
                    note=_SOURCE,
                )
            )
    return rows
