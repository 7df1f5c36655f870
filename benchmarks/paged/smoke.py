"""The benchmark of paged attention on a CPU: every kind of case by the XLA implementation, checks included."""

import dataclasses
import time
from dataclasses import asdict

import jax

from benchmarks.harness.clock import Subject, interleave, summarise
from benchmarks.harness.device import to_jax, to_torch
from benchmarks.harness.records import Environment, PagedTiming
from benchmarks.paged.arrays import Tensors, case_arrays, make_pool
from benchmarks.paged.cases import PagedCase, PagedShape
from benchmarks.paged.check import check_append, check_attention
from benchmarks.paged.programs import jax_attention
from benchmarks.paged.recorded import columns_of
from blockdiag.ops.append.api import append_to_pages

SMOKE_SHAPE = PagedShape(name="smoke", batch=2, kv_length=96, query_heads=4, key_heads=2, head_dim=16)
SMOKE_CASES = (
    PagedCase(group="decode", shape=SMOKE_SHAPE, page_size=16),
    PagedCase(group="decode", shape=SMOKE_SHAPE, cache="float8_e5m2", page_size=1),
    PagedCase(group="speculative", shape=SMOKE_SHAPE, page_size=16, query_tokens=4),
    PagedCase(group="splits", shape=SMOKE_SHAPE, page_size=16, splits=2),
    PagedCase(group="scales", shape=SMOKE_SHAPE, cache="float8_e4m3fn", page_size=16, scales="token"),
    PagedCase(group="moba", shape=SMOKE_SHAPE, page_size=16, block_size=16, top_k=3),
    PagedCase(group="append", shape=SMOKE_SHAPE, cache="float8_e4m3fn", page_size=16, scales="token"),
)


def run_paged_smoke(environment: Environment, *, rounds: int = 3) -> list[PagedTiming]:
    """Check and time every case.

    The times are host times of a CPU and say nothing about a GPU; there is no bandwidth beside them.

    Raises:
        ValueError: when a result is wrong.
    """
    subjects, rows = [], []
    for case in SMOKE_CASES:
        arrays = case_arrays(case, make_pool(case, seed=0, device="cpu"), seed=0)[0]
        call, error = _append(case, arrays) if case.group == "append" else _attend(case, arrays)
        subjects.append(Subject(case.name, call, "host"))
        row = PagedTiming(implementation="xla", **columns_of(case), relative_error=error, **asdict(environment))
        rows.append(dataclasses.replace(row, note="CPU smoke, host time"))
    interleave(subjects, rounds=rounds, batch_ms=5.0, deadline=time.monotonic() + 30.0, least_rounds=1)
    return [_with_times(row, subject) for row, subject in zip(rows, subjects, strict=True)]


def _with_times(row: PagedTiming, subject: Subject) -> PagedTiming:
    if subject.failure:
        return dataclasses.replace(row, note=f"failed: {subject.failure}")
    times = summarise(subject.samples)
    return dataclasses.replace(row, median_us=1e3 * times.median, p20_us=1e3 * times.p20, p80_us=1e3 * times.p80)


def _attend(case: PagedCase, arrays: Tensors):
    views = {name: to_jax(array) for name, array in arrays.items()}
    call = jax.jit(lambda arrays: jax_attention(case, "xla")(arrays["query"], arrays))
    output, log_sum = (to_torch(result) for result in call(views))
    return (lambda: call(views)), check_attention(case, arrays, output, log_sum)


def _append(case: PagedCase, arrays: Tensors):
    tokens = (case.shape.batch, case.query_tokens)
    views = {name: to_jax(array) for name, array in arrays.items()}
    views |= {name: views[name].reshape(*tokens, *views[name].shape[1:]) for name in ("key", "value")}
    call = jax.jit(lambda views: append_to_pages(**views, implementation="xla"))
    written = (
        ("key_pages", "value_pages", "key_scale", "value_scale")
        if case.scales == "token"
        else ("key_pages", "value_pages")
    )
    results = dict(zip(written, map(to_torch, call(views)), strict=True))
    return (lambda: call(views)), check_append(case, arrays, arrays | results)
