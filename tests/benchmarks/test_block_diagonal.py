"""The benchmark's arithmetic, files, plots and baselines, at sizes that take no time."""

import collections
import dataclasses
import itertools
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.block_diagonal.cases import CASES, PASSES, Case, select_cases
from benchmarks.block_diagonal.report import judge_errors, judge_host, judge_times, judge_torch_host
from benchmarks.harness import clock
from benchmarks.harness.clock import Subject, interleave, sample_jax, summarise
from benchmarks.harness.pipeline import select_names
from benchmarks.harness.records import (
    ErrorRow,
    HostRow,
    Timing,
    columns,
    environment,
    merge_rows,
    read_rows,
    recordable_failures,
    write_rows,
)
from blockdiag.triton_kernels.launch.plan import TensorSpec

WHERE = {
    "device": "some GPU",
    "driver": "1.2",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-01-02",
}


def small(name: str, lengths: tuple[int, ...]) -> Case:
    return CASES[name].shrunk(lengths)


def timing(case: str, pass_name: str, implementation: str, milliseconds: float | None, **others) -> Timing:
    return Timing(
        op="block_diagonal",
        pass_name=pass_name,
        case=case,
        implementation=implementation,
        median_ms=milliseconds,
        **{**WHERE, **others},
    )


def test_floor_counts_each_byte_once():
    case = CASES["h8_d128"]
    array = 262_144 * 8 * 128 * 2
    assert case.tokens == 262_144
    assert case.floor_bytes("fwd") == 4 * array
    assert case.floor_bytes("bwd") == 7 * array
    assert case.floor_bytes("fwd+bwd") == 11 * array


def test_floor_of_grouped_heads_counts_keys_once_per_key_head():
    query, key = 262_144 * 8 * 128 * 2, 262_144 * 2 * 128 * 2
    assert CASES["gqa8_2_d128"].floor_bytes("fwd") == 2 * query + 2 * key
    assert CASES["gqa8_2_d128"].floor_bytes("bwd") == 3 * query + 4 * key


def test_packed_case_counts_tokens_without_padding():
    case = CASES["packed_h4_d128"]
    assert len(case.sequence_lengths) == 1152
    assert min(case.sequence_lengths) >= 800
    assert max(case.sequence_lengths) <= 2000
    assert case.tokens == case.sequence_offsets[-1] == int(case.tiles.lengths.sum())
    assert not case.is_foldable


def test_tiles_are_anchored_at_sequence_starts():
    tiles = small("packed_h4_d128", (65, 0, 1, 128)).tiles
    assert tiles.starts.tolist() == [0, 64, 65, 66, 130]
    assert tiles.lengths.tolist() == [64, 1, 1, 64, 64]
    assert tiles.positions.tolist() == [0, 64, 0, 0, 64]


def test_cases_are_selected_by_name():
    assert [case.name for case in select_cases("h16_d64, h8_d128")] == ["h16_d64", "h8_d128"]
    assert len(select_cases(None)) == len(CASES)
    with pytest.raises(ValueError, match="`cases` must name some of"):
        select_cases("h8_d127")


def test_case_with_unequal_lengths_that_is_not_packed_raises_value_error():
    with pytest.raises(ValueError, match="must be equal"):
        small("h8_d128", (64, 128))


def test_timing_columns_match_the_documentation():
    assert ",".join(columns(Timing)) == (
        "op,pass,case,implementation,median_ms,p20_ms,p80_ms,floor_ms,ratio_to_floor,gb_per_s,copy_gb_per_s,"
        "matmul_tflops,peak_bytes,device,driver,jax,jaxlib,torch,triton,date,note"
    )


def test_rows_survive_a_round_trip_through_csv(tmp_path: Path):
    rows = [
        timing("h8_d128", "fwd", "triton", 0.5, p20_ms=0.4, peak_bytes=0, note='custom calls: a x1, "b" x2'),
        timing("h8_d128", "bwd", "torch-fa2", None, note="not run:\n  no GPU"),
    ]
    write_rows(tmp_path / "rows.csv", Timing, rows)
    first, second = read_rows(tmp_path / "rows.csv", Timing)
    assert first == rows[0]
    assert second.median_ms is None
    assert second.note == "not run: no GPU"


def test_merge_rows_replaces_only_rows_with_the_same_key(tmp_path: Path):
    path = tmp_path / "folder" / "rows.csv"
    merge_rows(path, Timing, [timing("a", "fwd", "triton", 1.0), timing("b", "fwd", "triton", 2.0)])
    kept = merge_rows(path, Timing, [timing("a", "fwd", "triton", 3.0), timing("a", "fwd", "triton", 4.0, device="x")])
    assert [row.median_ms for row in kept] == [3.0, 2.0, 4.0]
    assert read_rows(path, Timing) == kept


def test_read_rows_with_another_header_raises_value_error(tmp_path: Path):
    path = tmp_path / "rows.csv"
    write_rows(path, ErrorRow, [])
    with pytest.raises(ValueError, match="expected"):
        read_rows(path, Timing)


def test_environment_has_versions_and_an_iso_date():
    found = environment("cpu")
    assert found.jax == jax.__version__
    assert time.strptime(found.date, "%Y-%m-%d")


def test_summarise_returns_median_and_percentiles():
    found = summarise([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert (found.median, found.p20, found.p80) == (3.5, 2.0, 5.0)
    with pytest.raises(ValueError, match="empty"):
        summarise([])


def test_interleave_continues_after_a_subject_fails():
    calls: list[str] = []

    def broken() -> None:
        calls.append("broken")
        if calls.count("broken") > 4:
            raise RuntimeError("lost the device")

    def steady() -> None:
        calls.append("steady")

    subjects = [Subject("broken", broken, "host"), Subject("steady", steady, "host")]
    interleave(subjects, rounds=6, batch_ms=1e-9, deadline=time.monotonic() + 60)
    assert subjects[0].failure == "RuntimeError: lost the device"
    assert len(subjects[1].samples) == 6
    assert not subjects[1].failure


def test_interleave_past_the_deadline_runs_the_minimum_number_of_rounds():
    subject = Subject("one", lambda: None, "host")
    interleave([subject], rounds=50, batch_ms=1e-9, deadline=time.monotonic() - 1, least_rounds=3)
    assert len(subject.samples) == 3


class _Result:
    """A result that reports the given readiness."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> "_Result":
        self.ready = True
        return self


@pytest.mark.parametrize("is_ahead", [True, False])
def test_sample_is_discarded_when_the_fence_ends_before_queueing_does(is_ahead: bool):
    value = sample_jax(lambda: _Result(not is_ahead), launches=2, fence=1)
    assert (value is not None) == is_ahead


def test_sample_with_a_slow_host_lengthens_fences_before_it_shortens_samples(monkeypatch):
    """On this slow host, a fence of 12 runs hides the queueing of at most four launches."""
    tried = []

    def sample(run, launches: int, fence: int, front) -> float | None:
        del run, front
        tried.append((launches, fence))
        return 1.5 if 3 * launches <= fence else None

    monkeypatch.setattr(clock, "sample_jax", sample)
    subject = Subject("slow to queue", lambda: None, "jax", launches=9, fence=7, calls=3)
    assert clock.sample(subject) == 0.5
    assert tried == [(9, 7), (9, 9), (9, 11), (9, 12), (6, 12), (4, 12)]
    assert clock.sample(subject) == 0.5
    assert len(tried) == 7
    monkeypatch.setattr(clock, "sample_jax", lambda *_: None)
    with pytest.raises(clock.FenceTooShort, match="12 calls end before 1 more are queued"):
        clock.sample(subject)


@pytest.mark.parametrize(("has_front", "output_bytes", "most"), [(True, 0, 24), (False, 0, 24), (False, 2**32, 10)])
def test_sample_queues_no_more_runs_than_the_queue_and_memory_hold(monkeypatch, has_front, output_bytes, most):
    queued = []
    monkeypatch.setattr(clock, "sample_host", lambda *_: 0.05)
    monkeypatch.setattr(clock, "sample_jax", lambda run, launches, fence, front: queued.append(launches + fence))
    front = (lambda: None) if has_front else None
    subject = Subject("short", lambda: None, "jax", output_bytes=output_bytes, front=front)
    clock.calibrate(subject, 60.0, memory_bytes=10 * 2**32)
    with pytest.raises(clock.FenceTooShort):
        clock.sample(subject)
    assert len(queued) > 3
    assert max(queued) <= most
    assert subject.launches == 1


@pytest.mark.parametrize("count", range(1, 10))
def test_order_of_round_places_each_subject_after_each_other_equally_often(count: int):
    rounds = count if count % 2 == 0 else 2 * count
    orders = [clock.order_of_round(count, index) for index in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    after = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(after) == count * (count - 1)
    assert set(after.values()) <= {rounds // count}
    places = collections.Counter(place for order in orders for place in enumerate(order))
    assert set(places.values()) == {rounds // count}
    assert clock.order_of_round(count, rounds) == orders[0]


def test_take_rounds_follows_order_of_round():
    taken = []
    subjects = [Subject(name, lambda name=name: taken.append(name), "host") for name in "abcd"]
    clock.take_rounds(subjects, rounds=4, deadline=time.monotonic() + 60, least_rounds=1)
    assert "".join(taken) == "".join("abcd"[place] for index in range(4) for place in clock.order_of_round(4, index))


def test_recordable_failures_include_errors_but_not_interrupts():
    kinds = recordable_failures()
    assert issubclass(NotImplementedError, kinds)
    assert not issubclass(KeyboardInterrupt, kinds)
    assert not issubclass(SystemExit, kinds)


def test_judge_times_compares_rows_with_limits():
    rows = [
        timing("h8_d128", "fwd", "triton", 0.48, ratio_to_floor=0.96, peak_bytes=0),
        timing("h8_d128", "bwd", "triton", 1.0, ratio_to_floor=1.2, peak_bytes=8),
        timing("h8_d128", "fwd+bwd", "triton", 1.5),
        timing("h8_d128", "fwd+bwd", "torch-fa2", 4.5),
        timing("h8_d128", "fwd+bwd", "jax-einsum", 6.0),
        timing("h8_d128", "fwd+bwd", "jax-cudnn", 3.0),
        timing("h8_d128_rotary", "fwd", "triton", 0.5),
    ]
    found = {verdict.name: verdict for verdict in judge_times(rows)}
    assert found["h8_d128 fwd: time over floor"].is_met
    assert not found["h8_d128 bwd: time over floor"].is_met
    assert not found["h8_d128 bwd: bytes beyond inputs and outputs"].is_met
    assert found["h8_d128 fwd+bwd: speed-up over FlashAttention 2"].value == 3.0
    assert found["h8_d128 fwd+bwd: speed-up over the best of XLA and cuDNN in JAX"].value == 2.0
    assert found["h8_d128_rotary fwd: time over the same without rotary"].value == pytest.approx(0.5 / 0.48)
    missing = found["h8_d128_rotary bwd: time over the same without rotary"]
    assert missing.value is None
    assert not missing.is_met


def test_judge_errors_and_judge_host_compare_rows_with_limits():
    base = {"op": "block_diagonal", "case": "c", "tensor": "dQ", "tokens": 64, "seeds": 1, **WHERE}
    ratios = {"mean_over_flash": 1.02, "mean_over_flash_se": 0.005, "max_over_flash": 1.02, "max_over_flash_se": 0.015}
    errors = [ErrorRow(implementation="triton", **ratios, **base), ErrorRow(implementation="torch-fa2", **base)]
    assert [verdict.value for verdict in judge_errors(errors)] == [1.02, 1.02]
    assert [verdict.is_met for verdict in judge_errors(errors)] == [False, True]
    unmeasured = ErrorRow(implementation="triton", mean_error=1e-4, **base)
    assert not any(verdict.is_met for verdict in judge_errors([unmeasured]))
    host = [HostRow(op="block_diagonal", pass_name="fwd", implementation="triton", over_trivial_us=6.0, **WHERE)]
    assert [verdict.is_met for verdict in judge_host(host)] == [False]


def test_judge_torch_host_covers_calls_with_and_without_autograd():
    pytest.importorskip("torch")
    times = {("fwd", "operator"): (30.0, 6.0), ("fwd+bwd", "operator"): (320.0, 180.0)}
    times["fwd+bwd", "one torch operation"] = (160.0, 20.0)
    rows = [
        HostRow(op="torch", pass_name=name, implementation=who, median_us=median, over_trivial_us=over, **WHERE)
        for (name, who), (median, over) in times.items()
    ]
    found = {verdict.name: verdict for verdict in judge_torch_host(rows)}
    assert found["fwd, operator: host time, us"].is_met
    assert not found["fwd+bwd, operator: host time, us"].is_met
    assert found["fwd+bwd, operator: host time beyond that of one torch operation, us"].value == 20.0
    assert not found["compiled, with the operator: host time, us"].is_met


def test_smoke_run_times_every_implementation(tmp_path: Path):
    pytest.importorskip("torch")
    from rich.console import Console

    from benchmarks.block_diagonal.family import FAMILY
    from benchmarks.harness.pipeline import smoke

    smoke(FAMILY, Console(record=True), tmp_path)
    rows = read_rows(tmp_path / "block_diagonal_smoke.csv", Timing)
    assert {row.implementation for row in rows} == {"xla", "jax-einsum"}
    assert all(row.median_ms > 0 and row.floor_ms is None and row.note == "CPU smoke, host time" for row in rows)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


ORACLE_CASES = {
    "grouped": small("gqa8_2_d128", (128,)),
    "rotary": small("h16_d64_rotary", (128,)),
    "packed": small("packed_h4_d128_rotary", (1, 64, 0, 70)),
}


@pytest.fixture(scope="module", params=ORACLE_CASES)
def workload(request, torch):
    from benchmarks.block_diagonal.workload import make_workload

    return make_workload(ORACLE_CASES[request.param], seed=1, device="cpu")


@pytest.fixture(scope="module")
def exact(workload):
    from benchmarks.block_diagonal.exact import exact_attention

    return exact_attention(workload.case, *workload.inputs, workload.cotangent, workload.tables, chunk=2)


def test_float64_oracle_matches_the_reference(workload, exact):
    from benchmarks.block_diagonal.implementations import check, jit_passes
    from benchmarks.block_diagonal.jax_implementations import our_attention

    passes = jit_passes(our_attention(workload.case, "reference"), workload, keeps_residuals=False)
    check(passes["fwd+bwd"](), exact, "fwd+bwd")


def test_jax_einsum_baseline_matches_the_oracle(workload, exact):
    from benchmarks.block_diagonal.implementations import check, jit_passes
    from benchmarks.block_diagonal.jax_implementations import einsum_attention

    passes = jit_passes(einsum_attention(workload.case), workload, keeps_residuals=True)
    for pass_name in ("fwd", "bwd"):
        check(passes[pass_name](), exact, pass_name)


def test_torch_baseline_matches_the_oracle(workload, exact):
    from benchmarks.block_diagonal.implementations import check, unchecked
    from benchmarks.block_diagonal.torch_baselines import TORCH_BASELINES

    flash = next(baseline for baseline in TORCH_BASELINES if baseline.name == "torch-fa2")
    reason = flash.unsupported(workload.case)
    assert (reason is None) == workload.case.is_foldable
    if reason is None:
        make = unchecked(flash, workload)
        for pass_name in PASSES:
            check(make(pass_name), exact, pass_name)


def test_unsupported_reasons_are_sentences(torch):
    from benchmarks.block_diagonal.family import BASELINES, NATIVE, THROUGH_JAX

    for case in CASES.values():
        for implementation in (*THROUGH_JAX, NATIVE, *BASELINES.values()):
            reason = implementation.unsupported(case)
            assert reason is None or len(reason.split()) > 3


def test_baselines_are_selected_by_name(torch):
    from benchmarks.block_diagonal.family import FAMILY

    assert select_names("torch-fa2,jax-einsum", FAMILY.baselines) == ("torch-fa2", "jax-einsum")
    assert select_names("none", FAMILY.baselines) == ()
    with pytest.raises(ValueError, match="`baselines` must be none or name some of"):
        select_names("flash", FAMILY.baselines)


def test_required_implementations_are_measured_after_the_end_of_the_budget(torch):
    from benchmarks.block_diagonal.family import BASELINES, FAMILY, NATIVE
    from benchmarks.harness.family import SPENT, Context

    context, case = Context(FAMILY.settings(deadline=time.monotonic() - 1), time.monotonic()), CASES["h8_d128"]
    assert FAMILY.starts_late and FAMILY.unsupported(context, case, NATIVE) == ""
    assert FAMILY.unsupported(context, case, BASELINES["torch-fa2"]) == SPENT
    context = Context(FAMILY.settings(deadline=time.monotonic() + 30), time.monotonic())
    assert FAMILY.unsupported(context, case, BASELINES["torch-fa2"]) == ""
    later = dataclasses.replace(context, later=[case] * 2)
    assert FAMILY.unsupported(later, case, BASELINES["torch-fa2"]) == SPENT


def test_check_of_a_wrong_result_raises_wrong_result(workload, exact):
    from benchmarks.block_diagonal.implementations import check
    from benchmarks.harness.failures import WrongResult
    from benchmarks.harness.family import Program

    shifted = exact.output + 0.1 * exact.output.std()
    with pytest.raises(WrongResult, match="exceed"):
        check(Program(lambda: (shifted,)), exact, "fwd")
    poisoned = exact.output.clone()
    poisoned[0, 0, 0] = np.nan
    with pytest.raises(WrongResult):
        check(Program(lambda: (poisoned,)), exact, "fwd")


def test_measure_host_compares_with_a_trivial_call(torch):
    from benchmarks.block_diagonal.host import measure_host

    rows = measure_host(("xla", "no-such-implementation"), environment("cpu"), repetitions=5)
    by_key = {(row.pass_name, row.implementation): row for row in rows}
    assert by_key["fwd", "trivial"].over_trivial_us == 0
    assert by_key["bwd", "xla"].median_us > 0
    assert "failed" in by_key["fwd", "no-such-implementation"].note


@dataclasses.dataclass(frozen=True)
class _Spec:
    """A named launch without a kernel."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def _shapes_of(arrays) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(array.shape), array.dtype.name) for array in arrays)


def test_native_passes_launch_the_kernels_of_the_jax_call(workload, exact, torch, monkeypatch):
    pytest.importorskip("triton")
    from benchmarks.block_diagonal.implementations import check
    from benchmarks.block_diagonal.native import native_passes
    from blockdiag.interop import jax_call, torch_launch

    def forward(problem, query, key, value, tiles, rotary):
        arrays = [query, key, value, *([] if tiles is None else [tiles]), *(rotary or ())[:2]]
        return jax_call.launch(_Spec("forward", _shapes_of(arrays), _shapes_of([query])), *arrays)[0]

    def backward(problem, query, key, value, tiles, rotary, cotangent):
        arrays = [query, key, value, cotangent]
        results = _shapes_of([query, key, value])
        first = jax_call.launch(_Spec("query", _shapes_of(arrays), results[:1]), *arrays)
        return (*first, *jax_call.launch(_Spec("key and value", _shapes_of(arrays), results[1:]), *arrays))

    known = {"forward": exact[:1], "query": exact[1:2], "key and value": exact[2:]}
    launched = []

    def launch(spec, *tensors):
        assert spec.inputs == tuple(
            TensorSpec(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in tensors
        )
        launched.append(spec.name)
        return known[spec.name]

    glue = types.SimpleNamespace(forward=forward, backward=backward)
    monkeypatch.setattr("blockdiag.ops.block_diagonal.triton", glue, raising=False)
    monkeypatch.setitem(sys.modules, "blockdiag.ops.block_diagonal.triton", glue)
    monkeypatch.setattr(torch_launch, "launch", launch)
    passes = native_passes(workload)
    check(passes["fwd+bwd"](), exact, "fwd+bwd")
    assert launched == ["forward", "query", "key and value"]
