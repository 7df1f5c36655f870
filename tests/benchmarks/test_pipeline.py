"""The pipeline of all families, with a made-up family whose programs take no time."""

import collections
import dataclasses
import functools
import time

import pytest
from rich.console import Console

pytest.importorskip("torch")

from benchmarks.harness.clock import Subject
from benchmarks.harness.failures import ChainBroken, WrongResult
from benchmarks.harness.family import SPENT, Family, Implementation, Program, Settings, Work, floor_ms, names_of
from benchmarks.harness.pipeline import Choices, measure, run, smoke
from benchmarks.harness.programs import Chain
from benchmarks.harness.records import MoBATiming, environment, merge_rows, read_rows

RATES = {"copy_gb_per_s": 1.0, "matmul_tflops": 1.0}
SHAPE = dict.fromkeys(("tokens", "batch", "query_heads", "key_heads", "head_dim", "block_size", "top_k"), 1)


@dataclasses.dataclass(frozen=True)
class MadeUpCase:
    name: str
    passes: tuple[str, ...] = ("fwd", "bwd")

    def columns(self):
        return {"op": "made up", "case": self.name, **SHAPE}

    def floor(self, pass_name):
        return (Work(0.0, 1e6),)


def makes(ran, broken=()):
    """Return the `begin` of an implementation whose passes record their runs in `ran`."""

    def begin(context, case):
        if case.name in broken:
            raise WrongResult(f"{case.name} is wrong")

        def make(pass_name):
            if (case.name, pass_name) in broken:
                raise WrongResult(f"{pass_name} is wrong")
            return Program(lambda: ran.append((case.name, pass_name)), columns={"relative_error": 0.5}, keep=context)

        return make

    return begin


class MadeUp(Family):
    name = "made_up"
    kind = MoBATiming
    settings = Settings
    baselines = ("baseline",)
    smoke_cases = (MadeUpCase("tiny"),)

    def __init__(self, broken=()):
        self.ran, self.broken, self.refused = [], broken, ""

    def select(self, names):
        return [MadeUpCase(name) for name in names_of(names, ("one", "two"))]

    def measure_rates(self):
        return RATES, "rates"

    def make_inputs(self, cases, context):
        return "inputs"

    def own(self, cases, settings):
        return [(case, Implementation("ours", "jax", makes(self.ran, self.broken))) for case in cases]

    def others(self, cases, context):
        assert context.inputs == "inputs"
        baselines = context.settings.baselines
        return [
            (case, Implementation(name, "torch", makes([]), passes=("fwd",))) for case in cases for name in baselines
        ]

    def refusal(self, context, entry):
        return self.refused if entry.implementation.name == "baseline" else ""

    def beside(self, settings):
        return Subject("beside", lambda: self.ran.append("beside"), "host")

    def rates_beside(self, subject):
        return {"copy_gb_per_s": float(len(subject.samples))}

    def columns(self, entry, rates):
        return {"floor_ms": floor_ms(entry.case.floor(entry.pass_name), **rates)} if rates else {}

    def timed_columns(self, entry, row):
        return {"extra_bytes": 7}

    def tables(self, rows, others):
        return []

    def judge(self, rows):
        return []


def measured(family, **options):
    defaults = {"rounds": 3, "batch_ms": 1e-9, "device": "cpu", "baselines": ("baseline",), "say": lambda line: None}
    settings = Settings(**{"deadline": time.monotonic() + 60, **defaults, **options})
    rows = measure(family, [MadeUpCase("one")], environment("cpu"), RATES, settings)
    return {(row.implementation, row.pass_name): row for row in rows}


def test_every_pass_is_a_row_with_its_floor_at_the_rates_of_the_rounds():
    family = MadeUp()
    rows = measured(family)
    assert list(rows) == [("ours", "fwd"), ("ours", "bwd"), ("baseline", "fwd")]
    for row in rows.values():
        # After three rounds, `rates_beside` returns 3 GB/s.
        assert row.median_ms > 0 and row.floor_ms == pytest.approx(1 / 3) and row.extra_bytes == 7
        assert row.ratio_to_floor == pytest.approx(row.median_ms / row.floor_ms) and row.relative_error == 0.5
    counts = collections.Counter(family.ran)
    # After the runs for calibration, every round runs each subject equally often.
    assert len(set(counts.values())) == 1 and counts["beside"] >= 6


def test_a_pass_that_fails_keeps_the_reason_and_the_others_go_on():
    rows = measured(MadeUp(broken={("one", "fwd")}))
    assert rows["ours", "fwd"].note == "failed: WrongResult: fwd is wrong" and rows["ours", "fwd"].median_ms is None
    assert rows["ours", "bwd"].median_ms > 0 and rows["baseline", "fwd"].median_ms > 0


def test_an_implementation_that_cannot_begin_fails_in_all_passes():
    rows = measured(MadeUp(broken={"one"}))
    assert {row.note for name, row in rows.items() if name[0] == "ours"} == {"failed: WrongResult: one is wrong"}


def test_refused_passes_are_not_prepared():
    family = MadeUp()
    family.refused = "not run: too large"
    assert measured(family)["baseline", "fwd"].note == "not run: too large"


def test_a_spent_budget_leaves_rows_of_this_library():
    family = MadeUp()
    rows = measured(family, deadline=time.monotonic() - 1)
    assert [row.note for row in rows.values()] == [SPENT] * 2 and family.ran == []
    family.starts_late = True
    assert measured(family, deadline=time.monotonic() - 1)["ours", "fwd"].median_ms > 0


def test_rows_are_written_case_by_case_and_not_run_replaces_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.harness.pipeline.device_name", lambda: "some GPU")
    monkeypatch.setattr(MadeUp, "settings", functools.partial(Settings, device="cpu"))
    family, console = MadeUp(), Console(record=True, width=200)
    choices = Choices(None, "none", rounds=1, seed=0, deadline=time.monotonic() + 60)
    run(family, console, tmp_path, choices)
    path = tmp_path / "made_up.csv"
    first = read_rows(path, MoBATiming)
    assert [(row.case, row.pass_name) for row in first] == [(x, y) for x in ("one", "two") for y in ("fwd", "bwd")]
    run(family, console, tmp_path, dataclasses.replace(choices, deadline=time.monotonic() - 1))
    assert read_rows(path, MoBATiming) == first
    # Unlike rows that were not run, failures replace a time.
    run(MadeUp(broken={"two"}), console, tmp_path, dataclasses.replace(choices, cases="two"))
    again = read_rows(path, MoBATiming)
    assert again[:2] == first[:2] and [row.note for row in again[2:]] == ["failed: WrongResult: two is wrong"] * 2
    with pytest.raises(SystemExit, match="`cases` must name some of one, two"):
        run(family, console, tmp_path, dataclasses.replace(choices, cases="three"))


def test_a_smoke_run_fails_where_a_result_is_wrong(tmp_path):
    smoke(MadeUp(), Console(record=True), tmp_path)
    rows = read_rows(tmp_path / "made_up_smoke.csv", MoBATiming)
    assert {row.note for row in rows} == {"CPU smoke, host time"} and len(rows) == 2
    with pytest.raises(ValueError, match="tiny is wrong"):
        smoke(MadeUp(broken={"tiny"}), Console(record=True), None)


def test_rows_of_a_key_that_comes_twice_are_merged_in_the_first_place(tmp_path):
    fields = {**SHAPE, **dataclasses.asdict(environment("cpu")), "op": "x", "implementation": "ours"}
    rows = [MoBATiming(case=name, pass_name="fwd", median_ms=time, **fields) for name, time in (("a", 1.0), ("b", 2.0))]
    path = tmp_path / "rows.csv"
    merge_rows(path, MoBATiming, rows)
    later = [dataclasses.replace(rows[0], median_ms=None, note="not run"), dataclasses.replace(rows[0], median_ms=3.0)]
    kept = merge_rows(path, MoBATiming, later, is_measured=lambda row: row.median_ms is not None)
    assert [(row.case, row.median_ms) for row in kept] == [("a", 3.0), ("b", 2.0)]
    assert merge_rows(path, MoBATiming, []) == kept


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        (Chain(None), {"kernel": 3}),
        (Chain(None, spare_copies=1), {"kernel": 4, "copy": 4}),
        (Chain(None, is_exact=True), {"kernel": 4, "other": 1}),
        (Chain(None, shared="cub"), {"kernel": 2, "cub_sort": 1}),
    ],
)
def test_a_chain_with_other_work_is_refused(chain, found):
    single = collections.Counter({"kernel": 2, "copy": 1, "cub_sort": 0})
    with pytest.raises(ChainBroken, match="2 calls"):
        chain.demand(single, collections.Counter(found), 2)
    chain.demand(single, collections.Counter({"kernel": 4, "copy": 3}), 2)


def test_a_chain_may_share_what_does_not_depend_on_the_call():
    single = collections.Counter({"kernel": 2, "cub_sort": 1})
    Chain(None, shared="cub").demand(single, collections.Counter({"kernel": 6, "cub_sort": 1}), 3)
    with pytest.raises(ChainBroken):
        Chain(None).demand(single, collections.Counter({"kernel": 6, "cub_sort": 1}), 3)
    with pytest.raises(ChainBroken):
        Chain(None, needs_kernels=True).demand(collections.Counter(), collections.Counter(), 3)
