"""The figures that paged attention has to reach, and whether measured rows reach them."""

from collections.abc import Iterable, Sequence

from benchmarks.harness.records import PagedTiming
from benchmarks.harness.verdicts import Verdict
from benchmarks.paged.cases import CACHE_LABELS, DRAFT_LENGTHS, PAGE_SIZES

# The same compiled kernels, launched natively and through `jax.jit`.
NATIVE = "triton-torch"
THROUGH_JAX = "triton"

# Largest microseconds by workload, of a 16-bit cache and of an eight-bit one, for pages of every size.
DECODE_LIMITS = {"b1_128k": (138.0, 80.0), "b32_8k": (255.0, 145.0), "b16_32k": (490.0, 270.0)}
PAGE_LIMIT = 1.05  # pages of one token over those of 64
SPLITS_LIMIT = 1.05  # the choice over the best
SHORT_LIMIT = 12.0
DRAFT_LIMIT = 1.15  # several queries over one
MOBA_LIMIT = 15.0


def decode_limit(row: PagedTiming) -> float:
    """The bar of a row of group "decode"."""
    wide, narrow = DECODE_LIMITS[row.workload]
    return wide if row.cache == "bfloat16" else narrow


def judge_paged(rows: Sequence[PagedTiming]) -> list[Verdict]:
    """Verdicts for the groups that `rows` hold."""
    mine = [row for row in rows if row.implementation == NATIVE]
    groups: dict[str, list[PagedTiming]] = {}
    for row in mine:
        groups.setdefault(row.group, []).append(row)
    decode = groups.get("decode", [])
    verdicts = [Verdict(f"{_title(row)}: us", row.median_us, decode_limit(row)) for row in decode]
    verdicts += _judge_pages(decode)
    verdicts += _judge_splits(groups.get("splits", []))
    verdicts += [Verdict(f"{row.case}: us", row.median_us, SHORT_LIMIT) for row in groups.get("short", [])]
    verdicts += _judge_drafts(groups.get("speculative", []))
    verdicts += [Verdict(f"{row.case}: us", row.median_us, MOBA_LIMIT) for row in groups.get("moba", [])]
    return verdicts


def _title(row: PagedTiming) -> str:
    return f"{row.workload} {CACHE_LABELS[row.cache]}, pages of {row.page_size}"


def _judge_pages(rows: Iterable[PagedTiming]) -> list[Verdict]:
    """Pages of one token over the largest ones."""
    times = {(row.workload, row.cache, row.page_size): row.median_us for row in rows}
    small, large = PAGE_SIZES[0], PAGE_SIZES[-1]
    return [
        Verdict(
            f"{workload} {CACHE_LABELS[cache]}: pages of {small} over pages of {large}",
            _quotient(times.get((workload, cache, small)), times.get((workload, cache, large))),
            PAGE_LIMIT,
        )
        for workload, cache in dict.fromkeys(key[:2] for key in times)
    ]


def _judge_splits(rows: Iterable[PagedTiming]) -> list[Verdict]:
    """The chosen number of splits over the best one, which may be the chosen one."""
    found: dict[tuple[str, str], list[PagedTiming]] = {}
    for row in rows:
        found.setdefault((row.workload, row.cache), []).append(row)
    verdicts = []
    for (workload, cache), tried in found.items():
        best = min((row.median_us for row in tried if row.median_us is not None), default=None)
        chosen = next((row for row in tried if row.is_chosen), None)
        name = f"{workload} {CACHE_LABELS[cache]}: chosen splits over the best"
        verdicts.append(Verdict(name, _quotient(None if chosen is None else chosen.median_us, best), SPLITS_LIMIT))
    return verdicts


def _judge_drafts(rows: Iterable[PagedTiming]) -> list[Verdict]:
    """Several queries over one."""
    times = {(row.workload, row.cache, row.query_tokens): row.median_us for row in rows}
    return [
        Verdict(
            f"{workload} {CACHE_LABELS[cache]}: T={count} over T=1",
            _quotient(times.get((workload, cache, count)), times.get((workload, cache, 1))),
            DRAFT_LIMIT,
        )
        for workload, cache in dict.fromkeys(key[:2] for key in times)
        for count in DRAFT_LENGTHS
    ]


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below
