"""Figures of other implementations of MoBA that this benchmark does not run, with their sources.

They stand beside the rows that a run measures, never mixed with them: `device` and `note` say what they are.
"""

from dataclasses import dataclass

from benchmarks.harness.records import MoBATiming
from benchmarks.moba.cases import MoBACase, MoBAPass

_FIGURE = (
    "published: read off the efficiency figure of mit-han-lab/flash-moba (assets/efficiency.png, float16), to one pixel"
)
_MEASURED = "recorded: flash-moba 2.0.0 (39d9ac0), bfloat16, medians on an H200 with torch 2.11.0; not run here"


@dataclass(frozen=True)
class Recorded:
    """Milliseconds and GiB of one implementation over one length, B2 N16 H128, block 128, top_k 8, causal.

    Attributes:
        routing, attention, backward: of the three parts; the forward is the sum of the first two.
        total: of all; None takes their sum.
        peak: device memory, inputs and outputs included.
    """

    implementation: str
    device: str
    source: str
    tokens: int
    routing: float | None
    attention: float | None
    backward: float | None
    total: float | None
    peak: float | None

    def times(self) -> dict[MoBAPass, float]:
        """Milliseconds by pass, where known."""
        times: dict[MoBAPass, float | None] = {"routing": self.routing, "bwd": self.backward, "fwd+bwd": self.total}
        if self.attention is not None:
            times["fwd"] = (self.routing or 0.0) + self.attention
        if self.total is None and self.backward is not None and times.get("fwd") is not None:
            times["fwd+bwd"] = (times["fwd"] or 0.0) + self.backward
        return {name: value for name, value in times.items() if value is not None}


def _flash_moba_measured() -> list[Recorded]:
    rows = (
        (8192, 0.744, 2.679, 1.871, 5.316, 0.64),
        (16384, 1.683, 6.073, 3.666, 11.449, 1.27),
        (32768, 4.037, 13.198, 7.206, 24.391, 2.54),
        (65536, 11.125, 34.834, 14.292, 60.252, 5.08),
        (131072, 33.425, 104.03, 28.576, 166.366, 10.16),
    )
    return [Recorded("flashmoba-measured", "NVIDIA H200 (recorded)", _MEASURED, *row) for row in rows]


def _figures() -> list[Recorded]:
    flash_moba = (
        (8192, 0.7, 3.0, 2.3, 6.0, 0.9),
        (16384, 1.8, 6.7, 4.3, 12.8, 1.7),
        (32768, 3.5, 14.0, 9.0, 27.0, 3.4),
        (65536, 12.0, 39.0, 15.0, 66.0, 7.0),
        (131072, 35.0, 100.0, 28.0, 163.0, 14.0),
        (262144, None, None, None, 530.0, 28.5),
        (524288, None, None, None, 1620.0, 56.0),
    )
    moba = (
        (8192, 3.4, 6.7, 9.5, 19.5, 3.9),
        (16384, 12.6, 14.0, 20.0, 47.0, 8.3),
        (32768, 69.0, 35.0, None, None, 18.0),
        (65536, 276.0, 100.0, None, 500.0, 43.0),
    )
    flash = (
        (8192, None, 1.7, 4.9, 6.6, 0.9),
        (16384, None, 6.4, 17.7, 24.0, 1.7),
        (32768, None, 24.0, 69.0, 93.5, 3.4),
        (65536, None, 101.0, 269.0, 370.0, 7.0),
        (131072, None, 416.0, 1075.0, 1490.0, 13.7),
        (262144, None, 1690.0, 4270.0, 5960.0, 27.5),
        (524288, None, 6960.0, 16840.0, 23800.0, 55.0),
    )
    named = (("flashmoba-published", flash_moba), ("moonshot-moba-published", moba), ("fa2-published", flash))
    return [Recorded(name, "NVIDIA H100 80GB (published)", _FIGURE, *row) for name, rows in named for row in rows]


RECORDED = (*_flash_moba_measured(), *_figures())

# Relative L2 errors of FlashMoBA against float32, output and gradients, recorded on an H200.
FLASH_MOBA_ERRORS = {"fwd": 2.0e-3, "bwd": 2.4e-3}


def recorded_rows() -> list[MoBATiming]:
    """The recorded figures as rows of the CSV."""
    rows = []
    for recorded in RECORDED:
        case = MoBACase(name=f"n{recorded.tokens // 1024}k", tokens=recorded.tokens)
        for pass_name, milliseconds in recorded.times().items():
            peak = recorded.peak if pass_name == "fwd+bwd" else None
            is_measured = recorded.implementation == "flashmoba-measured"
            rows.append(
                MoBATiming(
                    pass_name=pass_name,
                    implementation=recorded.implementation,
                    **case.columns(),
                    median_ms=milliseconds,
                    peak_bytes=None if peak is None else round(peak * (2**30 if is_measured else 1e9)),
                    relative_error=FLASH_MOBA_ERRORS.get(pass_name) if is_measured else None,
                    device=recorded.device,
                    driver="",
                    jax="",
                    jaxlib="",
                    torch="2.11.0" if is_measured else "",
                    triton="",
                    date="",
                    note=recorded.source,
                )
            )
    return rows
