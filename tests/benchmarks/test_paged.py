"""The benchmark of paged attention: its arithmetic, checks, files and figures, at sizes that take no time."""

import collections
import dataclasses
import functools
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.harness.pipeline import Choices, measure, run
from benchmarks.harness.records import PagedTiming, environment, merge_rows, read_rows
from benchmarks.harness.report import reasons
from benchmarks.paged.cases import (
    CACHE_LABELS,
    CACHES,
    DECODE_CACHES,
    GROUPS,
    MOBA,
    SHAPES,
    PagedCase,
    PagedShape,
    by_pool,
    make_cases,
    select_groups,
)
from benchmarks.paged.recorded import FLASHINFER, RECORDED, recorded_rows
from benchmarks.paged.report import NATIVE, THROUGH_JAX, judge_paged, paged_tables

torch = pytest.importorskip("torch")

from benchmarks.harness.failures import ChainBroken, WrongResult  # noqa: E402
from benchmarks.paged import check as paged_check  # noqa: E402
from benchmarks.paged import family as paged_family  # noqa: E402
from benchmarks.paged import programs as paged_programs  # noqa: E402
from benchmarks.paged.arrays import case_arrays, make_pool  # noqa: E402

WHERE = dict(zip(("device", "driver", "jax", "jaxlib", "torch", "triton", "date"), "abcdefg", strict=True))
RATES = {"read_tb_per_s": 4.0, "matmul_tflops": 700.0}
SMALL = PagedShape(name="small", batch=2, kv_length=128, query_heads=4, key_heads=2, head_dim=16)
# This shape is for the interpreter, which takes a second for few programs.
TINY = PagedShape(name="tiny", batch=1, kv_length=64, query_heads=2, key_heads=1, head_dim=16)


def timing(case: PagedCase, microseconds: float | None, implementation: str = NATIVE, **others) -> PagedTiming:
    fields = case.columns() | {"splits": case.num_splits, "is_chosen": int(case.splits is None)} | WHERE | others
    return PagedTiming(implementation=implementation, median_us=microseconds, **fields)


def all_rows(microseconds: float = 10.0) -> list[PagedTiming]:
    return [timing(case, microseconds, read_tb_per_s=4.4, tb_per_s=4.0) for case in make_cases()]


def cases_of(group: str) -> list[PagedCase]:
    return [case for case in make_cases() if case.group == group]


def test_make_cases_returns_unique_names_in_known_groups():
    cases = make_cases()
    names = [(case.group, case.name) for case in cases]
    assert len(set(names)) == len(names)
    assert {case.group for case in cases} == set(GROUPS)
    assert {(case.shape.name, case.cache) for case in cases if case.group == "decode"} == {
        (shape, cache) for shape in SHAPES for cache in DECODE_CACHES
    }
    assert {case.cache for case in cases} == set(CACHES) == set(CACHE_LABELS)
    assert sum(len(pool) for pool in by_pool(cases)) == len(cases)


def test_read_bytes_count_the_cache_and_its_scales():
    case = PagedCase(group="decode", shape=SHAPES["b1_128k"])
    assert case.read_bytes == 131072 * 8 * 128 * 2 * 2
    assert dataclasses.replace(case, cache="float8_e5m2").read_bytes == case.read_bytes // 2
    scaled = dataclasses.replace(case, cache="float8_e4m3fn", scales="token")
    assert scaled.read_bytes == case.read_bytes // 2 + 131072 * 8 * 4 * 2


def test_short_cases_are_measured_in_cache_and_in_memory():
    short = cases_of("short")
    assert {case.copies > 1 for case in short} == {False, True}
    for case in short:
        assert case.calls >= case.copies
        assert case.copies == 1 or case.copies * case.shape.cache_bytes(case.cache) >= 4 * 60e6


def test_products_of_prompts_are_those_that_a_causal_mask_leaves():
    case = PagedCase(group="prompts", shape=SMALL, query_tokens=128)
    assert case.flops == 4 * 2 * 4 * 16 * 128 * 129 / 2
    # Each of the last three queries sees 126, 127 or 128 keys.
    assert dataclasses.replace(case, query_tokens=3).flops == 4 * 2 * 4 * 16 * (126 + 127 + 128)
    (work,) = case.floor("call")
    assert work.flops == case.flops


def test_products_of_prompts_with_moba_are_those_of_chosen_blocks():
    case = PagedCase(group="moba_prompts", shape=SMALL, query_tokens=128, block_size=16, top_k=3)
    # Queries of the first two blocks see 1 to 32 keys. Each later block sees 33 to 48.
    assert case.flops == 4 * 2 * 4 * 16 * (32 * 33 / 2 + 6 * (33 + 48) * 16 / 2)


def test_launch_steps_plan_every_case():
    pytest.importorskip("triton")
    from blockdiag.triton_kernels.launch.plan import Target

    for case in make_cases():
        steps = paged_programs.launch_steps(case)
        written = {name for step in steps for name in step.output_names}
        assert ("key_pages" if case.group == "append" else "output") in written
        assert all(step.plan(Target(90, 132)).grid[0] >= 1 for step in steps)


def test_groups_are_selected_by_name():
    assert select_groups(None) == list(GROUPS)
    assert select_groups("append, decode") == ["decode", "append"]
    for wrong in ("decod", ""):
        with pytest.raises(ValueError, match="`cases` must name some of"):
            select_groups(wrong)


def test_recorded_rows_are_marked_as_recorded():
    rows = recorded_rows()
    assert len(rows) == 3 * len(RECORDED)
    assert all("not run here" in row.note and "recorded" in row.device for row in rows)
    row = next(row for row in rows if row.case == "b1_128k_bf16_p1")
    # The source of the recorded time gives 3,699 GB/s.
    assert row.median_us == 145.1 and row.tb_per_s == pytest.approx(3.699, abs=2e-3)


def test_merge_rows_replaces_only_rows_with_the_same_key(tmp_path):
    rows = all_rows()
    merge_rows(tmp_path / "paged.csv", PagedTiming, [*rows, *recorded_rows()])
    merge_rows(tmp_path / "paged.csv", PagedTiming, [dataclasses.replace(rows[0], median_us=3.0)])
    found = read_rows(tmp_path / "paged.csv", PagedTiming)
    assert len(found) == len(rows) + len(recorded_rows())
    assert found[0].median_us == 3.0 and found[1 : len(rows)] == rows[1:]


def test_judge_paged_compares_whole_prompts_of_moba_with_contiguous_keys():
    whole, wide, narrow, *chunks = cases_of("moba_prompts")
    rows = [timing(whole, 7000.0), timing(wide, 9000.0), timing(narrow, 9e9), *(timing(case, 9e9) for case in chunks)]
    rows.append(timing(wide, 7500.0, MOBA))
    found = [(verdict.name, verdict.is_met) for verdict in judge_paged(rows)]
    name = "b1_64k_bf16_p{}_t65536_block128_k8: time over contiguous keys"
    assert found == [(name.format(16), True), (name.format(64), False)]


def test_judge_paged_compares_rows_with_limits():
    times = {"b1_128k_bf16_p1": 137.0, "b1_128k_bf16_p64": 130.0, "b1_128k_e4m3_p1": 81.0, "b1_128k_e4m3_p64": 79.0}
    rows = [timing(case, times[case.name]) for case in cases_of("decode") if case.name in times]
    splits = [case for case in cases_of("splits") if (case.shape.name, case.cache) == ("b32_8k", "bfloat16")]
    rows += [timing(case, 260.0 if case.splits is None else 240.0 + case.splits) for case in splits]
    drafts = {1: 100.0, 4: 110.0, 8: 120.0}
    drafted = [case for case in cases_of("speculative") if case.shape.name == "b1_128k" and case.cache == "bfloat16"]
    rows += [timing(case, drafts[case.query_tokens]) for case in drafted]
    rows += [timing(cases_of("short")[0], 12.5), timing(cases_of("moba")[0], None, note="failed")]
    rows += [timing(cases_of("moba")[1], 14.0), timing(cases_of("moba")[1], 99.0, THROUGH_JAX)]
    found = {verdict.name: verdict for verdict in judge_paged(rows)}
    assert found["b1_128k bf16, pages of 1: us"].is_met and not found["b1_128k e4m3, pages of 1: us"].is_met
    assert found["b1_128k e4m3, pages of 64: us"].is_met
    ratio = found["b1_128k bf16: pages of 1 over pages of 64"]
    assert ratio.value == pytest.approx(137 / 130) and not ratio.is_met
    assert found["b1_128k e4m3: pages of 1 over pages of 64"].is_met
    choice = found["b32_8k bf16: chosen splits over the best"]
    assert choice.value == pytest.approx(260 / 241) and not choice.is_met
    assert found["b1_128k bf16: T=4 over T=1"].is_met and not found["b1_128k bf16: T=8 over T=1"].is_met
    assert not found["b1_1k_bf16_p1_in_l2: us"].is_met
    assert [found[case.name + ": us"].is_met for case in cases_of("moba")[:2]] == [False, True]


def test_paged_tables_have_a_line_for_every_measured_row():
    from rich.console import Console

    rows = [*all_rows(), *recorded_rows(), timing(cases_of("append")[0], None, "xla", note="failed: no memory")]
    console = Console(width=200, record=True)
    for group in GROUPS:
        for table in paged_tables([row for row in rows if row.group == group]):
            console.print(table)
    text = console.export_text()
    assert FLASHINFER in text and "131,072 keys" in text and "10.0  4.00*" in text
    assert reasons([row for row in rows if row.median_us is None]) == ["xla (b32_8k_bf16_p1): failed: no memory"]


def drawn(case: PagedCase):
    """Return the arrays of every call of a round, on the CPU."""
    return case_arrays(case, make_pool(case, seed=0, device="cpu"), seed=0)


def test_page_tables_of_copies_share_no_page():
    case = PagedCase(group="short", shape=SMALL, page_size=16, copies=3)
    tables = torch.cat([arrays["page_table"].flatten() for arrays in drawn(case)])
    assert sorted(tables.tolist()) == list(range(3 * 2 * 8))
    assert tables.tolist() != sorted(tables.tolist())


def test_moba_calls_have_different_queries():
    case = PagedCase(group="moba", shape=SMALL, page_size=16, block_size=16, top_k=3)
    arrays = drawn(case)
    assert len(arrays) == case.calls == 10
    assert not torch.equal(arrays[0]["query"], arrays[1]["query"])
    # A call reads at least the mean keys and one block for each head, and at most the mean keys and the whole cache.
    least = arrays[0]["centroids"].nbytes + 2 * 2 * 16 * 16 * 2 * 2
    assert least < paged_check.chosen_bytes(case, arrays[0]) <= arrays[0]["centroids"].nbytes + case.read_bytes


def test_exact_attention_matches_the_library_reference():
    from benchmarks.harness.device import to_jax
    from blockdiag.ops.moba_paged.api import moba_paged_attention

    case = PagedCase(group="moba", shape=SMALL, page_size=16, query_tokens=2, block_size=16, top_k=3)
    arrays = drawn(case)[0]
    views = {name: to_jax(array) for name, array in arrays.items()}
    operands = [views[name] for name in ("query", "key", "value", "page_table", "kv_lengths", "centroids")]
    options = {"block_size": 16, "top_k": 3, "implementation": "reference", "return_residual": True}
    output, log_sum = moba_paged_attention(*operands, **options)
    for sequence in range(2):
        exact, exact_log_sum = paged_check.exact_attention(case, arrays, sequence)
        np.testing.assert_allclose(log_sum[sequence], exact_log_sum, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(output[sequence], np.float32), exact, rtol=1e-2, atol=1e-2)


def test_check_attention_of_wrong_results_raises_wrong_result():
    case = PagedCase(group="decode", shape=SMALL, cache="float8_e4m3fn", page_size=16, scales="token")
    arrays = drawn(case)[0]
    output, log_sum = map(
        torch.stack, zip(*(paged_check.exact_attention(case, arrays, b) for b in range(2)), strict=True)
    )
    assert paged_check.check_attention(case, arrays, output, log_sum) == 0
    for wrong in (1.1 * output, output.flip(2), output * torch.nan):
        with pytest.raises(WrongResult, match="output"):
            paged_check.check_attention(case, arrays, wrong, log_sum)
    with pytest.raises(WrongResult, match="log-sum-exp"):
        paged_check.check_attention(case, arrays, output, log_sum + 0.01)


def appended(case: PagedCase):
    """Return the arrays before and after an append by the library."""
    from benchmarks.harness.device import to_jax, to_torch
    from blockdiag.ops.append.api import append_to_pages

    before = drawn(case)[0]
    views = {name: to_jax(array) for name, array in before.items()}
    views |= {name: views[name].reshape(2, 1, 2, 16) for name in ("key", "value")}
    pages = append_to_pages(**views, implementation="xla")
    return before, before | dict(zip(("key_pages", "value_pages"), map(to_torch, pages), strict=False))


def test_check_append_accepts_new_tokens_and_rejects_other_changes():
    case = PagedCase(group="append", shape=SMALL, page_size=16)
    before, after = appended(case)
    assert paged_check.check_append(case, before, after) == 0
    with pytest.raises(WrongResult, match="new tokens"):
        paged_check.check_append(case, before, before)
    page = int(before["page_table"][0, 0])
    pages = after["value_pages"].clone()
    pages[page, 0] += 1
    with pytest.raises(WrongResult, match="1 rows changed"):
        paged_check.check_append(case, before, after | {"value_pages": pages})


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8"])
def test_check_append_undoes_a_scale_per_head(cache):
    case = PagedCase(group="append", shape=SMALL, cache=cache, page_size=16, scales="head")
    assert 0 < paged_check.check_append(case, *appended(case)) < 0.04


def interpreted(spec, *tensors):
    """Run a launch in Triton's interpreter and copy in-place changes back to the tensors."""
    from blockdiag.interop.interpreter.launch import interpret
    from blockdiag.triton_kernels.launch.plan import Target

    def to_numpy(tensor):
        name = str(tensor.dtype).removeprefix("torch.")
        kind = getattr(ml_dtypes, name, None)
        if kind is None:
            return tensor.numpy()
        return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8).numpy().view(kind)

    def to_tensor(array):
        if not hasattr(ml_dtypes, array.dtype.name):
            return torch.from_numpy(array)
        raw = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
        return torch.from_numpy(raw).view(getattr(torch, array.dtype.name))

    results = [to_tensor(np.ascontiguousarray(one)) for one in interpret(spec, *map(to_numpy, tensors))]
    for source, target in spec.plan(Target(90, 4)).aliases:
        tensors[source].copy_(results[target])
        results[target] = tensors[source]
    return tuple(results)


def settings_of(**options):
    defaults = {"rounds": 1, "batch_ms": 1e-9, "implementation": "xla", "device": "cpu", "launch": interpreted}
    return paged_family.PagedSettings(
        deadline=time.monotonic() + 60,
        say=lambda line: None,
        **{"baselines": ("torch-fa2", MOBA), **defaults, **options},
    )


def portable(monkeypatch):
    """Make launch plans portable, as the interpreter requires."""
    from blockdiag.triton_kernels.moba_paged import plans as moba_paged
    from blockdiag.triton_kernels.paged import plans as paged

    monkeypatch.setattr(paged, "launches", functools.partial(paged.launches, is_portable=True))
    monkeypatch.setattr(moba_paged, "steps", functools.partial(moba_paged.steps, is_portable=True))


@pytest.mark.parametrize(
    "case",
    [
        PagedCase(group="decode", shape=TINY),
        PagedCase(group="scales", shape=TINY, cache="float8_e4m3fn", page_size=16, scales="token", splits=2),
        PagedCase(group="scales", shape=TINY, cache="int8", page_size=16, scales="head"),
        PagedCase(group="moba", shape=TINY, page_size=16, block_size=16, top_k=3),
        PagedCase(group="append", shape=TINY, cache="int8", page_size=16, scales="token"),
        PagedCase(group="append", shape=TINY, cache="float8_e5m2", page_size=16, scales="head"),
        PagedCase(group="prompts", shape=TINY, query_tokens=64),
        PagedCase(group="moba_prompts", shape=TINY, query_tokens=64, block_size=16, top_k=3),
    ],
    ids=lambda case: case.group,
)
def test_native_launches_are_checked_and_timed(case, monkeypatch):
    pytest.importorskip("triton")
    portable(monkeypatch)
    rows = measure(paged_family.FAMILY, [case], environment("cpu"), RATES, settings_of())
    found = {row.implementation: row for row in rows}
    assert found[NATIVE].note == "" and found[NATIVE].median_us > 0
    assert found[NATIVE].relative_error < 0.1
    assert found[NATIVE].ratio_to_floor == pytest.approx(found[NATIVE].median_us / found[NATIVE].floor_us)
    if case.group in ("decode", "prompts"):
        assert set(found) == {NATIVE, THROUGH_JAX, "torch-fa2"}
        assert found[THROUGH_JAX].median_us > 0 and "programs of 2 calls" in found[THROUGH_JAX].note
        assert found["torch-fa2"].page_size is None and found["torch-fa2"].median_us > 0
    if case.group == "moba_prompts":
        assert set(found) == {NATIVE, MOBA}
        assert found[MOBA].page_size is None and found[MOBA].note == ""


def test_measure_times_nothing_when_the_check_fails(monkeypatch):
    def refuse(*_):
        raise WrongResult("output: relative error 1")

    monkeypatch.setattr(paged_family, "check_attention", refuse)
    monkeypatch.setattr(paged_family, "run_steps", lambda *_: {"output": None, "log_sum": None})
    case = PagedCase(group="decode", shape=SMALL, page_size=16)
    (row,) = measure(paged_family.FAMILY, [case], environment("cpu"), RATES, settings_of())
    assert row.median_us is None and "WrongResult" in row.note
    late = dataclasses.replace(settings_of(), deadline=time.monotonic() - 1)
    (row,) = measure(paged_family.FAMILY, [case], environment("cpu"), RATES, late)
    assert "time budget" in row.note


def test_jax_program_that_lost_calls_raises_chain_broken(monkeypatch):
    def attend(query, rest):
        return jnp.linalg.cholesky(query, symmetrize_input=False), None

    arrays = {"query": 8 * jnp.eye(8)}
    (output, _), run = paged_programs.jax_program(attend, arrays, 3)
    assert output[0, 0] == pytest.approx(8**0.5) and run()[0, 0] == pytest.approx(8 ** (1 / 8))
    counts = iter([{"one": 1}, {"one": 1}])
    monkeypatch.setattr("benchmarks.harness.programs.work_of", lambda text: collections.Counter(next(counts)))
    with pytest.raises(ChainBroken, match="3 calls"):
        paged_programs.jax_program(attend, arrays, 3)


def test_paged_command_past_the_deadline_keeps_recorded_rows(monkeypatch, tmp_path):
    from rich.console import Console

    monkeypatch.setattr("benchmarks.harness.pipeline.device_name", lambda: "some GPU")
    monkeypatch.setattr(paged_family, "measure_read_rate", lambda: 4.4)
    monkeypatch.setattr(paged_family, "matmul_rate", lambda: 700.0)
    monkeypatch.setattr(paged_family.FAMILY, "launches", lambda case: ())
    where = dataclasses.asdict(environment("some GPU"))
    kept = dataclasses.replace(timing(cases_of("append")[0], 3.0), **where)
    merge_rows(tmp_path / "paged.csv", PagedTiming, [kept])
    console = Console(width=200, record=True)
    choices = Choices("append,moba", "none", rounds=1, seed=0, deadline=time.monotonic() - 1)
    run(paged_family.FAMILY, console, tmp_path, choices)
    rows = [row for row in read_rows(tmp_path / "paged.csv", PagedTiming) if row.implementation == NATIVE]
    assert kept in rows and len(rows) == len(cases_of("append")) + len(cases_of("moba"))
    assert all("time budget" in row.note for row in rows if row != kept)
    assert "MISSED" in console.export_text()


@pytest.mark.exhaustive
def test_command_runs_the_smoke_check(tmp_path):
    from typer.testing import CliRunner

    from benchmarks.app import app

    result = CliRunner().invoke(app, ["paged", "--smoke", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "paged_smoke.csv", PagedTiming)
    assert {row.group for row in rows} == set(GROUPS) - {"short"}
    assert all(row.median_us > 0 and row.relative_error < 0.05 for row in rows)
