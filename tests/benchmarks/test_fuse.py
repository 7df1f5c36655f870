"""The benchmark of fused functions: its arithmetic, checks, files and figures, at sizes that take no time."""

import collections
import dataclasses
import multiprocessing.pool
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.fuse.cases import (
    DOCUMENTS,
    FUSE_CASES,
    FUSE_PASSES,
    GROUPS,
    SMOKE_CASES,
    TOKEN_GROUPS,
    FuseCase,
    document_lengths,
    make_segments,
    select_fuse_cases,
    small_case,
)
from benchmarks.fuse.programs import FusePasses, cudnn_function, cudnn_unsupported, function_of, launch_specs
from benchmarks.fuse.report import OURS, PEER, compile_table, fuse_table, judge_fuse, summary_table
from benchmarks.harness.failures import ChainBroken
from benchmarks.harness.family import SPENT, floor_ms
from benchmarks.harness.pipeline import Choices, measure, run, select_names
from benchmarks.harness.programs import compile_program
from benchmarks.harness.records import FuseTiming, environment, merge_rows, read_rows
from benchmarks.harness.report import reasons
from blockdiag.triton_kernels.launch.plan import Target

torch = pytest.importorskip("torch")

from benchmarks.fuse import ahead as fuse_ahead  # noqa: E402
from benchmarks.fuse import check as fuse_check  # noqa: E402
from benchmarks.fuse import family as fuse_family  # noqa: E402
from benchmarks.fuse import torch_baselines as fuse_torch_baselines  # noqa: E402
from benchmarks.harness.failures import WrongResult  # noqa: E402

WHERE = dict(zip(("device", "driver", "jax", "jaxlib", "torch", "triton", "date"), "abcdefg", strict=True))
ROOFS = {"copy_gb_per_s": 100.0, "matmul_tflops": 0.1}
RATES = {"matmul_tflops": 800.0, "copy_gb_per_s": 4200.0}
SMALL = small_case("causal", batch=1, tokens=32, key_heads=2)


def timing(case: FuseCase, pass_name: str, milliseconds: float | None, implementation: str = OURS, **others):
    fields = {**case.columns(), **WHERE, **others}
    return FuseTiming(pass_name=pass_name, implementation=implementation, median_ms=milliseconds, **fields)


def both_passes(case: FuseCase, forward: float | None, both: float | None, implementation: str = OURS, **others):
    return [
        timing(case, pass_name, time, implementation, p20_ms=time, p80_ms=time, floor_ms=0.1, **others)
        for pass_name, time in zip(FUSE_PASSES, (forward, both), strict=True)
    ]


def by_pass(rows) -> dict[tuple[str, str], FuseTiming]:
    return {(row.implementation, row.pass_name): row for row in rows}


def test_fuse_cases_cover_every_group():
    assert len(FUSE_CASES) == 2 + 2 + 4 * len(TOKEN_GROUPS)
    assert {case.group for case in FUSE_CASES.values()} == set(GROUPS)
    for name, case in FUSE_CASES.items():
        assert name == case.name
        if case.group == "diff":
            assert 2 * case.query_heads * case.head_dim == 2048
            assert case.shapes["value"][-1] == case.value_dim == 2 * case.head_dim
        if case.group in TOKEN_GROUPS:
            assert case.batch * case.tokens == 16384 and case.query_heads // case.key_heads in (1, 8)
    assert FUSE_CASES["evoformer_d64"].shapes["pair_bias"] == (8, 1, 4, 256, 256)
    assert FUSE_CASES["evoformer_d64"].shapes["mask_bias"] == (8, 256, 1, 1, 256)


def test_cases_are_selected_by_group_and_by_name():
    assert select_fuse_cases(None) == list(FUSE_CASES.values())
    found = select_fuse_cases("window_4x4096_mha, diff")
    assert [case.name for case in found] == ["diff_d64", "diff_d128", "window_4x4096_mha"]
    for wrong in ("flash", ""):
        with pytest.raises(ValueError, match="`cases` must name groups"):
            select_fuse_cases(wrong)
    assert select_names("none", fuse_family.BASELINES) == ()
    assert select_names("jax-jit,torch-flex", fuse_family.BASELINES) == ("torch-flex", "jax-jit")
    with pytest.raises(ValueError, match="`baselines` must be none or name some of"):
        select_names("flash", fuse_family.BASELINES)


def test_documents_are_twelve_and_differ_by_sequence():
    case = FUSE_CASES["documents_4x4096_mha"]
    segments = make_segments(case)
    assert segments.shape == (4, 4096) and segments.dtype == np.int32
    assert (np.diff(segments, axis=1) >= 0).all()
    for row in range(case.batch):
        lengths = document_lengths(row, case.tokens)
        assert (lengths > 0).all() and np.array_equal(np.bincount(segments[row], minlength=DOCUMENTS), lengths)
    assert not np.array_equal(segments[0], segments[1])


@pytest.mark.parametrize("group", TOKEN_GROUPS)
def test_seen_pairs_match_the_mask(group):
    case = small_case(group, key_heads=2)
    arrays = fuse_check.make_arrays(case, seed=0, device="cpu")
    arrays |= {name: array for name, array in fuse_torch_baselines.slopes_of(case, torch.device("cpu")).items()}
    scores = torch.zeros(case.batch, case.query_heads, case.tokens, case.tokens)
    changed = fuse_torch_baselines.changed_scores(case, scores, arrays)
    assert int(changed.isfinite().sum()) == case.seen_pairs


def test_useful_work_is_two_products_forward_and_five_backward():
    diff = FUSE_CASES["diff_d64"]
    # There are two times 32 half heads, with queries and keys of 64 elements and values of 128.
    assert diff.useful_flops("fwd") == 6 * 32 * 16384**2 * 64
    causal = FUSE_CASES["causal_1x16384_gqa8"]
    product = 2 * 64 * 16 * 16384 * 16385 / 2
    assert causal.useful_flops("fwd") == 2 * product and causal.useful_flops("fwd+bwd") == 7 * product


def test_bytes_count_each_array_once():
    case = FUSE_CASES["evoformer_d64"]
    whole, mask, pairs = 8 * 256 * 256 * 4 * 64 * 2, 8 * 256 * 256 * 2, 8 * 4 * 256 * 256 * 2
    assert case.useful_bytes("fwd") == 4 * whole + mask + pairs
    # The backward pass reads three operands, the output and the cotangent, and writes three gradients. It also reads
    # both biases and writes their gradients.
    assert case.useful_bytes("fwd+bwd") - case.useful_bytes("fwd") == 8 * whole + 2 * (mask + pairs)
    assert case.operand_bytes("fwd+bwd") == (4 * whole + mask + pairs, 4 * whole + mask + pairs)
    documents = small_case("documents")
    assert documents.operand_bytes("fwd")[0] == 3 * 2 * 72 * 4 * 16 * 2 + 2 * 72 * 4


def test_floor_ms_is_the_maximum_of_compute_and_memory_time():
    case = FUSE_CASES["evoformer_d64"]
    assert floor_ms(case.floor("fwd"), **RATES) == pytest.approx(case.useful_bytes("fwd") / 4.2e9)
    causal = FUSE_CASES["causal_1x16384_mha"]
    assert floor_ms(causal.floor("fwd"), **RATES) == pytest.approx(causal.useful_flops("fwd") / 8e11)
    assert floor_ms(causal.floor("fwd+bwd"), **RATES) == pytest.approx(3.5 * floor_ms(causal.floor("fwd"), **RATES))


def operands(case: FuseCase):
    """Return the arguments as float32 tensors and as JAX arrays."""
    arrays = fuse_check.make_arrays(case, seed=1, device="cpu")
    arrays = {name: array.float() if array.is_floating_point() else array for name, array in arrays.items()}
    return arrays, {name: jnp.asarray(array.numpy()) for name, array in arrays.items()}


@pytest.mark.parametrize("case", SMOKE_CASES, ids=lambda case: case.group)
def test_benchmark_functions_match_between_jax_and_torch(case):
    arrays, views = operands(case)
    output = function_of(case)(*(views[name] for name in case.shapes))
    assert output.shape == case.output_shape
    found = fuse_torch_baselines.plain_call(case, arrays, lambda function: function).run_of("fwd")()
    np.testing.assert_allclose(output, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [small_case("evoformer", tokens=24), small_case("alibi", tokens=24, key_heads=2)],
    ids=lambda case: case.group,
)
def test_check_results_accepts_exact_and_rejects_wrong_gradients(case):
    arrays, _ = operands(case)
    call = fuse_torch_baselines.plain_call(case, arrays, lambda function: function)
    results = call.results(call.run_of("fwd+bwd")())
    assert tuple(results) == fuse_check.expected_names(case, "fwd+bwd")
    exact = fuse_check.exact_results(case, arrays)
    assert fuse_check.check_results(case, results, exact, 1e-5) < 1e-5
    results["value"] = results["value"].flip(0)
    with pytest.raises(WrongResult, match="value 1"):
        fuse_check.check_results(case, results, exact)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SMOKE_CASES, ids=lambda case: case.group)
def test_flex_attention_baseline_matches_exact_results(case, monkeypatch):
    # FlexAttention rejects gradients on a CPU, although they would only be slow.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    arrays, _ = operands(case)
    call = fuse_torch_baselines.flex_call(case, arrays, lambda function: function)
    exact = fuse_check.exact_results(case, arrays)
    for pass_name in FUSE_PASSES:
        results = call.results(call.run_of(pass_name)())
        assert {name: tuple(array.shape) for name, array in results.items()} == {
            name: case.output_shape if name == "output" else case.shapes[name]
            for name in fuse_check.expected_names(case, pass_name)
        }
        assert fuse_check.check_results(case, results, exact, 1e-5) < 1e-5


def test_cudnn_unsupported_names_groups_without_matching_arguments():
    assert {group for group in GROUPS if cudnn_unsupported(small_case(group))} == {"diff", "alibi", "softcap"}
    with pytest.raises(ValueError, match="no soft cap"):
        cudnn_function(small_case("softcap"))


def test_cudnn_function_matches_the_benchmark_function(monkeypatch):
    attend = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return attend(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    for group in ("evoformer", "window", "prefix", "documents"):
        case = small_case(group, key_heads=4 if group == "evoformer" else 2)
        _, views = operands(case)
        given = [views[name] for name in case.shapes]
        np.testing.assert_allclose(cudnn_function(case)(*given), function_of(case)(*given), rtol=1e-4, atol=1e-5)


def test_chained_calls_take_the_previous_output_as_query(monkeypatch):
    _, views = operands(SMALL)
    given = [views[name] for name in SMALL.shapes]
    program = FusePasses(SMALL, function_of(SMALL), views).make("fwd+bwd").chain(3)
    output, *gradients = program.run()
    assert program.calls == 3 and len(gradients) == 9
    expected = given[0]
    for call in range(3):
        pull_back = jax.vjp(function_of(SMALL), expected, *given[1:])[1]
        np.testing.assert_allclose(gradients[3 * call], pull_back(views["cotangent"])[0], rtol=1e-4, atol=1e-5)
        expected = function_of(SMALL)(expected, *given[1:])
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    counts = iter([{"kernel": 3}, {"kernel": 5}])
    single = FusePasses(SMALL, function_of(SMALL), views).make("fwd")
    monkeypatch.setattr("benchmarks.harness.programs.work_of", lambda text: collections.Counter(next(counts)))
    with pytest.raises(ChainBroken, match="2 calls in one program"):
        single.chain(2)


def settings_of(**options) -> fuse_family.FuseSettings:
    defaults = {"rounds": 1, "batch_ms": 1e-9, "implementation": "xla", "device": "cpu", "baselines": ()}
    defaults |= {"compile_function": lambda function: function, "say": lambda line: None}
    return fuse_family.FuseSettings(**{"deadline": time.monotonic() + 120, **defaults, **options})


def measured(case: FuseCase = SMALL, **options) -> dict[tuple[str, str], FuseTiming]:
    return by_pass(measure(fuse_family.FAMILY, [case], environment("cpu"), ROOFS, settings_of(**options)))


def copies(passes: FusePasses, pass_name: str):
    """Return a program that compiles quickly and has as many results as the pass."""
    count = len(fuse_check.expected_names(passes.case, pass_name))
    return compile_program(lambda array: (array,) * count, jnp.zeros(4))


@pytest.mark.filterwarnings("ignore")
def test_every_implementation_is_checked_and_timed():
    rows = measured(baselines=fuse_family.BASELINES)
    assert list(rows) == [(name, one) for name in ("xla", *fuse_family.BASELINES) for one in FUSE_PASSES]
    for name in ("xla", "jax-jit", "torch-compile"):
        for pass_name in FUSE_PASSES:
            row = rows[name, pass_name]
            assert row.median_ms > 0 and 0 < row.relative_error < 1.5e-2
            assert row.ratio_to_floor == pytest.approx(row.median_ms / row.floor_ms)
    row = rows["xla", "fwd+bwd"]
    assert row.peak_bytes == row.extra_bytes + sum(SMALL.operand_bytes("fwd+bwd"))
    assert rows["torch-flex", "fwd"].median_ms > 0
    # A pass that cannot run on a CPU has a row with the reason, and the others continue.
    assert "backward on CPU" in rows["torch-flex", "fwd+bwd"].note
    assert rows["jax-cudnn", "fwd"].note.startswith("failed: NotImplementedError")
    assert rows["jax-cudnn", "fwd"].median_ms is None


def test_measure_times_nothing_when_the_check_fails(monkeypatch):
    def refuse(case, results, exact, gate):
        raise WrongResult("output 1")

    monkeypatch.setattr(fuse_family, "check_results", refuse)
    monkeypatch.setattr(fuse_family.FusePasses, "make", copies)
    rows = measured(baselines=("torch-compile",))
    assert all(row.median_ms is None and "WrongResult: output 1" in row.note for row in rows.values())


def test_measure_skips_baselines_that_exceed_memory_or_time(monkeypatch):
    monkeypatch.setattr(fuse_family.FusePasses, "make", copies)
    monkeypatch.setattr(fuse_family, "check_results", lambda *_: 0.0)
    monkeypatch.setattr(fuse_family.FAMILY, "own", lambda cases, settings: [])
    monkeypatch.setattr(fuse_family, "_MOST_SCORE_BYTES", 3 * 2 * SMALL.score_elements)
    rows = measured(baselines=("jax-jit", "torch-compile"), preparation={"jax-jit": 0.0, "torch-compile": 1e6})
    assert rows["jax-jit", "fwd"].median_ms > 0
    assert "6 arrays of scores" in rows["jax-jit", "fwd+bwd"].note
    assert rows["torch-compile", "fwd"].note == SPENT
    monkeypatch.undo()
    late = measured(deadline=time.monotonic() - 1)
    assert [row.note for row in late.values()] == [SPENT] * 2


def test_kernels_are_compiled_ahead_and_then_loaded(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # There is one thread, because the folder of Triton's cache is a setting of the process.
    threads = types.SimpleNamespace(Pool=lambda *_, **__: multiprocessing.pool.ThreadPool(1))
    monkeypatch.setattr(fuse_ahead.multiprocessing, "get_context", lambda method: threads)
    monkeypatch.setattr(fuse_ahead, "flex_compilation", lambda case, seed: f"no GPU for {case.name}")
    case = small_case("causal", batch=1, tokens=64, query_heads=1, key_heads=1)
    target = Target(90, 132)
    ahead = fuse_ahead.compile_ahead([case], target, with_flex=True, seed=0)
    kernels = launch_specs(case, "fwd+bwd", target=target)
    assert ahead.specs == {(case.name, "fwd"): kernels[:1], (case.name, "fwd+bwd"): kernels}
    assert set(ahead.seconds) == set(ahead.specs) and all(x > 0 for x in ahead.seconds.values())
    assert f"FlexAttention, {case.name}: no GPU for {case.name}" in ahead.lines
    assert any(tmp_path.iterdir())
    monkeypatch.setattr("blockdiag.interop.targets.session_target", lambda: target)
    rows = by_pass(measure(fuse_family.FAMILY, [case], environment("cpu"), ROOFS, settings_of(), ahead=ahead))
    row = rows["xla", "fwd"]
    assert row.first_compile_s > row.first_kernels_s == ahead.seconds[case.name, "fwd"]
    assert row.cached_compile_ms > row.cached_kernels_ms > 0
    assert rows["xla", "fwd+bwd"].cached_kernels_ms > row.cached_kernels_ms


def test_timed_compilation_of_a_broken_kernel_returns_the_reason(tmp_path):
    pytest.importorskip("triton")

    class Broken:
        name = "broken"

        def plan(self, target):
            raise ValueError(f"nothing for {target.arch}")

    assert (
        fuse_ahead.timed_compilation([Broken()], Target(90, 132), str(tmp_path / "kernels"))
        == "ValueError: nothing for 90"
    )


def test_judge_fuse_compares_rows_with_limits():
    evoformer, diff = FUSE_CASES["evoformer_d64"], FUSE_CASES["diff_d128"]
    window, softcap = FUSE_CASES["window_4x4096_mha"], FUSE_CASES["softcap_4x4096_gqa8"]
    rows = both_passes(evoformer, 0.44, 1.7, first_compile_s=4.0, cached_kernels_ms=51.0)
    rows += both_passes(diff, 7.0, None, extra_bytes=64 * diff.score_rows + 64)
    rows += [*both_passes(window, 0.1, 0.3), *both_passes(window, 0.11, 0.29, PEER)]
    rows += both_passes(softcap, 1.0, 3.0)
    found = {verdict.name: verdict for verdict in judge_fuse(rows)}
    assert found["evoformer_d64 fwd: ms"].is_met and not found["evoformer_d64 fwd+bwd: ms"].is_met
    assert found["diff_d128 fwd: ms"].is_met and "diff_d128 fwd+bwd: ms" not in found
    forward, backward = (found[f"{window.name} {one}: time over FlexAttention"] for one in ("fwd", "bwd"))
    assert forward.value == pytest.approx(0.1 / 0.11) and forward.is_met
    assert backward.value == pytest.approx(0.2 / 0.18) and not backward.is_met
    missing = found[f"{softcap.name} fwd: time over FlexAttention"]
    assert missing.value is None and not missing.is_met
    memory = found["bytes beyond inputs and outputs, for each row of scores, fwd, worst (diff_d128)"]
    assert memory.value > 64 and not memory.is_met
    assert found["first compile, s, fwd, worst (evoformer_d64)"].is_met
    assert not found["kernels of a compile from the disk, ms, fwd+bwd, worst (evoformer_d64)"].is_met


def test_fuse_tables_have_a_line_for_every_measured_row():
    from rich.console import Console

    case = FUSE_CASES["evoformer_d64"]
    numbers = {"relative_error": 2e-3, "extra_bytes": 2**21, "useful_tflop": 0.1, "ratio_to_floor": 1.5}
    rows = both_passes(case, 0.4, 1.5, first_compile_s=3.5, cached_compile_ms=400.0, cached_kernels_ms=9.0, **numbers)
    rows += both_passes(case, None, None, "jax-cudnn", note="failed: no bias")
    console = Console(width=200, record=True)
    for table in (fuse_table(rows), summary_table(rows), compile_table(rows)):
        console.print(table)
    text = console.export_text()
    for expected in ("8 x 256 x 256 tokens", "0.400  1.50x", "1.100", "2.0 / 2.0", "0.400 / 1.500", "3.50", "400"):
        assert expected in text
    assert reasons(rows) == ["jax-cudnn (fwd, fwd+bwd): failed: no bias"]


def test_fuse_command_keeps_recorded_rows_when_a_new_run_has_no_time(monkeypatch, tmp_path):
    from rich.console import Console

    monkeypatch.setattr("benchmarks.harness.pipeline.device_name", lambda: "some GPU")
    monkeypatch.setattr(fuse_family.FAMILY, "measure_rates", lambda: (ROOFS, "rates"))
    monkeypatch.setattr(fuse_family, "compile_ahead", lambda *_, **__: fuse_ahead.Ahead())
    monkeypatch.setattr("blockdiag.interop.targets.session_target", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "set anew")
    case = FUSE_CASES["evoformer_d64"]
    kept = dataclasses.replace(timing(case, "fwd", 0.4), **dataclasses.asdict(environment("some GPU")))
    merge_rows(tmp_path / "fuse.csv", FuseTiming, [kept])
    console = Console(width=200, record=True)
    choices = Choices("evoformer", "none", rounds=1, seed=0, deadline=time.monotonic() - 1)
    run(fuse_family.FAMILY, console, tmp_path, choices)
    rows = read_rows(tmp_path / "fuse.csv", FuseTiming)
    assert len(rows) == 4 and rows[0] == kept
    assert all(row.note == SPENT for row in rows[1:])
    assert "MISSED" in console.export_text()

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fuse_family, "make_arrays", fail)
    run(fuse_family.FAMILY, console, tmp_path, dataclasses.replace(choices, deadline=time.monotonic() + 600))
    rows = read_rows(tmp_path / "fuse.csv", FuseTiming)
    assert len(rows) == 4 and {row.note for row in rows} == {"failed: RuntimeError: out of memory"}
    with pytest.raises(SystemExit, match="must name groups"):
        run(fuse_family.FAMILY, console, tmp_path, dataclasses.replace(choices, cases="flash"))


def test_command_runs_the_smoke_check(tmp_path):
    from typer.testing import CliRunner

    from benchmarks.app import app

    result = CliRunner().invoke(app, ["fuse", "--smoke", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "fuse_smoke.csv", FuseTiming)
    assert {row.group for row in rows} == set(GROUPS) and len(rows) == 2 * len(GROUPS)
    assert all(row.median_ms > 0 and row.relative_error < 1.5e-2 for row in rows)
