"""Compiles the programs of all variants before any is timed.

Kernels are compiled in processes, the rest in threads, as XLA's choice among kernels would disturb what is timed
meanwhile.
"""

import concurrent.futures
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gallery.cases import PASSES, GalleryCase
from benchmarks.gallery.programs import WHOSE, Work, begin, compile_judge, compile_pass, trace
from benchmarks.harness.family import Settings
from benchmarks.harness.kernels import compile_ahead
from benchmarks.harness.records import recordable_failures

_MOST_THREADS = 12
_FRONT_SIZE, _FRONT_PRODUCTS = 4096, 32


@dataclass(frozen=True)
class Ahead:
    """The programs that are compiled before the first variant is timed.

    Attributes:
        works: programs by variant, or why there are none.
        front: queues some milliseconds of work, behind which shorter work is queued.
    """

    works: dict[str, Work | Exception]
    front: Callable[[], Any]


def prepared(case: GalleryCase, settings: Settings) -> Work:
    """Return the compiled programs of one variant."""
    work = begin(case, settings.seed)
    for whose in WHOSE:
        trace(work, whose, settings.implementation)
        for pass_name in PASSES:
            compile_pass(work, whose, pass_name)
    compile_judge(work)
    return work


def prepare_all(cases: Sequence[GalleryCase], settings: Settings, deadline: float) -> dict[str, Work | Exception]:
    """Draw, trace and compile all programs of all variants, or keep why a variant cannot even begin.

    Programs that are not compiled by the deadline, in `time.monotonic` seconds, are left out.
    """
    from blockdiag.interop.targets import session_target

    failures = recordable_failures()
    target = session_target() if jax.default_backend() == "gpu" else None
    pool = concurrent.futures.ThreadPoolExecutor(max(1, min(_MOST_THREADS, os.cpu_count() or 1)))
    works: dict[str, Work | Exception] = {}
    begun = {case.name: pool.submit(begin, case, settings.seed) for case in cases}
    waiting: list[concurrent.futures.Future[None]] = []
    specs: dict[Any, None] = {}
    for name, future in begun.items():
        try:
            work = works[name] = future.result()
        except failures as failure:
            works[name] = failure
            continue
        for whose in WHOSE:
            specs |= dict.fromkeys(trace(work, whose, settings.implementation, target))
        waiting += [pool.submit(compile_pass, work, "xla", pass_name) for pass_name in PASSES]
    settings.say(f"traced, {len(specs)} kernels")
    if specs:
        limit = max(1.0, deadline - time.monotonic())
        for line in compile_ahead(specs, session_target(), limit_seconds=limit):
            settings.say(f"compiled ahead: {line}")
    ready = [work for work in works.values() if isinstance(work, Work)]
    waiting += [pool.submit(compile_pass, work, "ours", pass_name) for work in ready for pass_name in PASSES]
    waiting += [pool.submit(compile_judge, work) for work in ready]
    concurrent.futures.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
    # Running compilations cannot be stopped. They are awaited, because they would disturb the timing.
    pool.shutdown(wait=True, cancel_futures=True)
    return works


def make_front() -> Callable[[], Any]:
    """Return a function that queues some milliseconds of products and returns their result."""
    x = jnp.zeros((_FRONT_SIZE, _FRONT_SIZE), jnp.bfloat16)

    def products(x: jax.Array) -> jax.Array:
        for _ in range(_FRONT_PRODUCTS):
            x = x @ x
        return x

    compiled = jax.jit(products).lower(x).compile()
    return lambda: compiled(x)
