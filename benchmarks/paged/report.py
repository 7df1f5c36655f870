"""Tables of paged attention for the terminal, and the limits that its figures are compared with."""

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from benchmarks.harness.records import PagedTiming
from benchmarks.harness.report import Verdict, quotient
from benchmarks.paged.cases import CACHE_LABELS, DRAFT_LENGTHS, LATENT_DIM, LATENT_VALUE_DIM, MOBA, PAGE_SIZES

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
# Largest times of prompts over those of the fastest dense attention to a contiguous cache, and largest microseconds
# where that has no such mask, by workload.
PROMPT_OVER_DENSE, PROMPT_OVER_DENSE_PAGES_OF_1 = 1 / 0.93, 1 / 0.85
PROMPT_LIMITS = {"b1_32k": 470.0, "b8_8k": 160.0}
# Largest time of whole prompts with MoBA over that of `moba_attention` with contiguous keys.
MOBA_PROMPT_OVER_CONTIGUOUS = 1.15
# Latent caches: parts of the read bandwidth where memory decides, and TFLOP/s where products do.
LATENT_BANDWIDTH, LATENT_TFLOPS = 0.85, 600.0


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
    verdicts += [Verdict(f"{row.case}: us", row.median_us, latent_limit(row)) for row in groups.get("latent", [])]
    verdicts += _judge_moba_prompts(groups.get("moba_prompts", []), rows)
    return verdicts + _judge_prompts(groups.get("prompts", []), rows)


def _judge_moba_prompts(mine: Iterable[PagedTiming], rows: Sequence[PagedTiming]) -> list[Verdict]:
    """Times of whole prompts with a 16-bit cache over those of contiguous keys."""
    contiguous = next((row.median_us for row in rows if row.implementation == MOBA), None)
    return [
        Verdict(
            f"{row.case}: time over contiguous keys", quotient(row.median_us, contiguous), MOBA_PROMPT_OVER_CONTIGUOUS
        )
        for row in mine
        if row.cache == "bfloat16" and row.query_tokens == row.kv_length
    ]


def latent_limit(row: PagedTiming) -> float:
    """The bar of a row of group "latent": whichever of reading and products takes longer."""
    pairs = row.batch * row.kv_length * row.query_tokens
    products = 2e-6 * pairs * row.query_heads * (LATENT_DIM + LATENT_VALUE_DIM) / LATENT_TFLOPS
    rate = row.read_tb_per_s or float("inf")
    return max(products, 1e3 * (row.read_gb or 0.0) / (LATENT_BANDWIDTH * rate))


def _judge_prompts(mine: Iterable[PagedTiming], rows: Sequence[PagedTiming]) -> list[Verdict]:
    """Times of prompts, or their ratio to the fastest dense attention."""
    verdicts = []
    for row in mine:
        if row.workload in PROMPT_LIMITS:
            verdicts.append(Verdict(f"{row.case}: us", row.median_us, PROMPT_LIMITS[row.workload]))
            continue
        beside = [x for x in rows if (x.group, x.workload, x.page_size) == ("prompts", row.workload, None)]
        dense = min((x.median_us for x in beside if x.median_us is not None), default=None)
        limit = PROMPT_OVER_DENSE_PAGES_OF_1 if row.page_size == 1 else PROMPT_OVER_DENSE
        verdicts.append(Verdict(f"{row.case}: time over dense attention", quotient(row.median_us, dense), limit))
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
            quotient(times.get((workload, cache, small)), times.get((workload, cache, large))),
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
        verdicts.append(Verdict(name, quotient(None if chosen is None else chosen.median_us, best), SPLITS_LIMIT))
    return verdicts


def _judge_drafts(rows: Iterable[PagedTiming]) -> list[Verdict]:
    """Several queries over one."""
    times = {(row.workload, row.cache, row.query_tokens): row.median_us for row in rows}
    return [
        Verdict(
            f"{workload} {CACHE_LABELS[cache]}: T={count} over T=1",
            quotient(times.get((workload, cache, count)), times.get((workload, cache, 1))),
            DRAFT_LIMIT,
        )
        for workload, cache in dict.fromkeys(key[:2] for key in times)
        for count in DRAFT_LENGTHS
    ]


def decode_table(rows: Sequence[PagedTiming]) -> Table:
    """Rows of one workload of group "decode": a line per implementation and cache, a column per page size."""
    first = rows[0]
    shape = f"{first.batch} x {first.kv_length:,} keys, heads {first.query_heads}/{first.key_heads}, H{first.head_dim}"
    table = _table(f"{first.workload}: {shape}   (us, TB/s of the cache read once)", ["implementation", "cache"])
    for name in (*(f"pages of {size}" for size in PAGE_SIZES), "contiguous", "floor", "error"):
        table.add_column(name, justify="right")
    for name, cache in dict.fromkeys((row.implementation, row.cache) for row in rows):
        found = {row.page_size: row for row in rows if (row.implementation, row.cache) == (name, cache)}
        if any(row.median_us is not None for row in found.values()):
            errors = [row.relative_error for row in found.values() if row.relative_error is not None]
            floor = next((row.floor_us for row in found.values() if row.floor_us is not None), None)
            table.add_row(
                name,
                CACHE_LABELS[cache],
                *(_cell(found.get(size)) for size in (*PAGE_SIZES, None)),
                "-" if floor is None else f"{floor:.1f}",
                f"{max(errors):.1e}" if errors else "-",
            )
    return table


def splits_table(rows: Sequence[PagedTiming]) -> Table:
    """Rows of group "splits": a line per number of splits, a column per workload and cache; the choice is marked."""
    table = _table("splits   (us, TB/s; * is what the library chooses)", ["splits"])
    columns = list(dict.fromkeys((row.workload, row.cache) for row in rows))
    for workload, cache in columns:
        table.add_column(f"{workload} {CACHE_LABELS[cache]}", justify="right")
    for splits in sorted({row.splits for row in rows if row.splits is not None}):
        cells = []
        for key in columns:
            here = [row for row in rows if (row.workload, row.cache) == key and row.splits == splits]
            # Where the choice is one of the powers of two, it was measured twice.
            here.sort(key=lambda row: -(row.is_chosen or 0))
            cells.append(_cell(here[0]) + ("*" if here[0].is_chosen else " ") if here else "")
        table.add_row(str(splits), *cells)
    return table


def others_table(group: str, rows: Sequence[PagedTiming]) -> Table:
    """Rows of any other group: a line each."""
    table = _table(f"{group}   (us, TB/s of what must be read)", ["case", "implementation"])
    readers: dict[str, Callable[[PagedTiming], str]] = {
        "time": _cell,
        "p20 to p80": lambda row: "-" if row.p20_us is None else f"{row.p20_us:.2f} to {row.p80_us:.2f}",
        "T": lambda row: str(row.query_tokens),
        "splits": lambda row: "-" if row.splits is None else str(row.splits),
        "floor": lambda row: "-" if row.floor_us is None else f"{row.floor_us:.2f}",
        "error": lambda row: "-" if row.relative_error is None else f"{row.relative_error:.1e}",
    }
    for name in readers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.case, row.implementation, *(read(row) for read in readers.values()))
    return table


def paged_tables(rows: Sequence[PagedTiming]) -> list[Table]:
    """All tables of the rows of one group."""
    group = rows[0].group
    if group == "decode":
        workloads = dict.fromkeys(row.workload for row in rows)
        return [decode_table([row for row in rows if row.workload == name]) for name in workloads]
    return [splits_table(rows) if group == "splits" else others_table(group, rows)]


def _table(title: str, left: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name)
    return table


def _cell(row: PagedTiming | None) -> str:
    if row is None or row.median_us is None:
        return "-"
    return f"{row.median_us:.1f}" + ("" if row.tb_per_s is None else f"  {row.tb_per_s:.2f}")
