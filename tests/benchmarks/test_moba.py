"""The MoBA benchmark's arithmetic, checks, files and figures, at sizes that take no time."""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.compiled import custom_calls
from benchmarks.harness.failures import ChainBroken, WrongResult
from benchmarks.harness.family import Context, floor_ms
from benchmarks.harness.kernels import compile_one, different_kernels
from benchmarks.harness.pipeline import Choices, measure, run
from benchmarks.harness.programs import compile_program
from benchmarks.harness.records import MoBATiming, environment, merge_rows, read_rows
from benchmarks.moba.cases import MOBA_CASES, MOBA_PASSES, MoBACase, select_moba_cases
from benchmarks.moba.check import check_choice, check_sample, float32_attention, random_operands
from benchmarks.moba.programs import Passes, launch_specs
from benchmarks.moba.recorded import RECORDED, recorded_rows
from benchmarks.moba.report import ROUTING_SHARE, judge_moba
from blockdiag.ops.moba.api import moba_attention, moba_routing
from blockdiag.triton_kernels.launch.plan import Target

WHERE = dict(zip(("device", "driver", "jax", "jaxlib", "torch", "triton", "date"), "abcdefg", strict=True))
SMALL = MoBACase(name="small", tokens=100, batch=2, query_heads=4, key_heads=2, head_dim=16, block_size=16, top_k=3)


def timing(case: str, pass_name: str, implementation: str, milliseconds: float | None, **others) -> MoBATiming:
    known = MOBA_CASES.get(case, SMALL)
    fields = {**known.columns(), "case": case, **WHERE, **others}
    return MoBATiming(pass_name=pass_name, implementation=implementation, median_ms=milliseconds, **fields)


def test_useful_flops_match_the_mask():
    past = np.arange(SMALL.tokens) // SMALL.block_size
    # The count does not depend on which blocks are chosen, because all but the last are full and the last one is never
    # chosen. This mask chooses the first ones.
    is_chosen = np.arange(SMALL.num_blocks)[None, :] < np.minimum(past, SMALL.top_k - 1)[:, None]
    is_chosen[np.arange(SMALL.tokens), past] = True
    mask = np.repeat(is_chosen, SMALL.block_size, axis=1)[:, : SMALL.tokens] & np.tri(SMALL.tokens, dtype=bool)
    assert SMALL.seen_keys == 2 * mask.sum()
    product = 2 * 16 * 4 * 2 * mask.sum()
    assert SMALL.useful_flops("bwd") == 5 * product
    assert SMALL.useful_flops("fwd") - SMALL.useful_flops("routing") == 2 * product
    assert SMALL.useful_flops("routing") == 2 * 16 * 4 * 2 * past.sum()
    assert SMALL.useful_flops("fwd+bwd") == SMALL.useful_flops("fwd") + SMALL.useful_flops("bwd")


def test_bytes_count_each_array_once():
    query, key = 2 * 100 * 4 * 16 * 2, 2 * 100 * 2 * 16 * 2
    assert SMALL.useful_bytes("fwd") == 2 * query + 2 * key
    assert SMALL.useful_bytes("bwd") == 4 * query + 4 * key
    assert SMALL.useful_bytes("routing") == query + key + 4 * 4 * SMALL.chosen_blocks


def test_floor_ms_is_the_maximum_of_compute_and_memory_time():
    slow_memory = floor_ms(SMALL.floor("fwd"), matmul_tflops=1e9, copy_gb_per_s=1.0)
    assert slow_memory == pytest.approx(SMALL.useful_bytes("fwd") / 1e6)
    slow_products = floor_ms(SMALL.floor("bwd"), matmul_tflops=1e-3, copy_gb_per_s=1e9)
    assert slow_products == pytest.approx(SMALL.useful_flops("bwd") / 1e6)
    rates = {"matmul_tflops": 1.0, "copy_gb_per_s": 1.0}
    both = sum(floor_ms(SMALL.floor(name), **rates) for name in ("fwd", "bwd"))
    assert floor_ms(SMALL.floor("fwd+bwd"), **rates) == pytest.approx(both)


def test_useful_flops_of_a_known_row_match_the_recorded_values():
    case = MOBA_CASES["n64k"]
    assert (case.useful_flops("fwd") - case.useful_flops("routing")) / 1e12 == pytest.approx(1.02, rel=0.01)
    assert case.useful_flops("routing") / 1e12 == pytest.approx(0.14, rel=0.03)


def test_cases_are_selected_by_name():
    assert [case.name for case in select_moba_cases("n8k, n64k")] == ["n8k", "n64k"]
    assert len(select_moba_cases(None)) == len(MOBA_CASES)
    with pytest.raises(ValueError, match="`cases` must name some of"):
        select_moba_cases("n8")


def test_recorded_rows_name_their_source():
    found = {(row.case, row.implementation, row.pass_name): row for row in recorded_rows()}
    assert found["n64k", "flashmoba-measured", "fwd"].median_ms == pytest.approx(45.959)
    assert found["n64k", "flashmoba-measured", "fwd+bwd"].median_ms == 60.252
    assert found["n64k", "flashmoba-measured", "fwd+bwd"].peak_bytes == round(5.08 * 2**30)
    assert found["n512k", "flashmoba-published", "fwd+bwd"].median_ms == 1620.0
    assert ("n512k", "flashmoba-published", "fwd") not in found
    for row in found.values():
        assert row.note.startswith(("published", "recorded")) and "(" in row.device
    for recorded in RECORDED:
        times = recorded.times()
        if {"fwd", "bwd", "fwd+bwd"} <= set(times):
            assert times["fwd"] + times["bwd"] == pytest.approx(times["fwd+bwd"], rel=0.02), recorded


def test_merged_rows_survive_csv_and_replace_rows_with_the_same_key(tmp_path):
    path = tmp_path / "folder" / "moba.csv"
    merge_rows(path, MoBATiming, recorded_rows())
    rows = [timing("n8k", "fwd", "triton", 1.0, extra_bytes=5, note="a, b"), timing("n8k", "bwd", "triton", None)]
    merge_rows(path, MoBATiming, rows)
    merge_rows(path, MoBATiming, [timing("n8k", "bwd", "triton", 2.0)])
    found = [row for row in read_rows(path, MoBATiming) if row.implementation == "triton"]
    assert found == [rows[0], timing("n8k", "bwd", "triton", 2.0)]
    assert len(read_rows(path, MoBATiming)) == len(recorded_rows()) + 2


def test_judge_moba_compares_rows_with_limits():
    rows = [
        timing("n64k", "routing", "triton", 2.0),
        timing("n64k", "fwd", "triton", 6.0, extra_bytes=4 * 2**30, relative_error=2.1e-3),
        timing("n64k", "bwd", "triton", 8.5, relative_error=4e-3),
        timing("n64k", "fwd+bwd", "triton", 14.5),
        timing("n64k", "fwd+bwd", "torch-cudnn", 221.0),
        timing("block512_k2_64k", "fwd+bwd", "triton", 300.0),
        timing("n8k", "fwd+bwd", "triton", 1.8),
        timing("n8k", "fwd+bwd", "torch-cudnn", 1.0),
    ]
    found = {verdict.name: verdict for verdict in judge_moba(rows)}
    assert found["n64k fwd+bwd: ms"].is_met and found["n64k fwd: ms"].is_met and found["n64k routing: ms"].is_met
    assert not found["n64k bwd: ms"].is_met
    share = found["n64k: routing over forward"]
    assert share.value == pytest.approx(1 / 3) and share.limit == ROUTING_SHARE and not share.is_met
    assert not found["n64k fwd: GiB beyond inputs and outputs"].is_met
    assert found["n64k fwd: relative error against float32"].is_met
    assert not found["n64k bwd: relative error against float32"].is_met
    assert found["n64k fwd+bwd: time over dense cuDNN"].is_met
    # A case over arrays of the same shape is compared with the same dense time. Cases of 8,192 tokens are not judged.
    assert found["block512_k2_64k fwd+bwd: time over dense cuDNN"].value == pytest.approx(300 / 221)
    assert "n8k fwd+bwd: time over dense cuDNN" not in found
    assert found["n8k: routing over forward"].value is None and not found["n8k: routing over forward"].is_met


def test_judge_moba_of_a_required_run_is_met_only_by_a_time():
    (verdict,) = [
        verdict
        for verdict in judge_moba([timing("n512k_b1", "fwd+bwd", "triton", None, note="failed")])
        if "runs" in verdict.name
    ]
    assert not verdict.is_met
    rows = [timing("n512k_b1", "fwd+bwd", "triton", 500.0)]
    assert any("runs" in verdict.name and verdict.is_met for verdict in judge_moba(rows))


@pytest.fixture(scope="module")
def computed():
    """Return the operands, routing and results of a small case."""
    operands = random_operands(SMALL, seed=1)
    options = {"block_size": SMALL.block_size, "top_k": SMALL.top_k, "implementation": "xla"}
    routing = moba_routing(operands[0], operands[1], **options)
    return operands, routing, Passes(SMALL, "xla", operands).make("fwd+bwd").run()


@pytest.mark.parametrize("seed", range(4))
def test_check_sample_accepts_correct_results(computed, seed):
    operands, routing, results = computed
    check_sample(SMALL, routing.indices, operands, results, seed=seed)


@pytest.mark.parametrize(("position", "name"), [(0, "output"), (1, "log-sum-exp"), (2, "dQ"), (3, "dK"), (4, "dV")])
def test_check_sample_of_a_wrong_result_raises_wrong_result(computed, position, name):
    operands, routing, results = computed
    wrong = [result * jnp.asarray(1.1, result.dtype) if i == position else result for i, result in enumerate(results)]
    with pytest.raises(WrongResult, match=name):
        check_sample(SMALL, routing.indices, operands, tuple(wrong))


def test_check_sample_of_nan_raises_wrong_result(computed):
    operands, routing, results = computed
    with pytest.raises(WrongResult, match="dV"):
        check_sample(SMALL, routing.indices, operands, (*results[:4], results[4] * jnp.nan))


def test_check_choice_of_blocks_that_are_not_the_best_raises_wrong_result():
    keys = np.repeat(np.arange(1.0, 8.0), 16)[:100, None] * np.ones((1, 2))
    query = np.ones((100, 2))
    own = np.arange(100)[:, None] // 16
    chosen = np.where(own >= np.arange(3), own - np.arange(3), -1)
    rows = np.arange(100)
    check_choice(SMALL, query, keys, chosen, rows)
    for row, wrong in ((99, [6, 5, 3]), (99, [6, 5, 5]), (99, [6, 5, -1]), (99, [5, 4, 3]), (40, [2, 1, 3])):
        changed = chosen.copy()
        changed[row] = wrong
        with pytest.raises(WrongResult, match=f"query {row}"):
            check_choice(SMALL, query, keys, changed, rows)


def test_float32_attention_matches_the_reference_under_a_routing():
    operands = [array.astype(jnp.float32) for array in random_operands(SMALL, seed=2)[:3]]
    options = {"block_size": SMALL.block_size, "top_k": SMALL.top_k}
    routing = moba_routing(*operands[:2], **options, implementation="xla")
    wanted = moba_attention(*operands, **options, routing=routing, implementation="xla")[0]
    found = float32_attention(SMALL, routing.to_pattern()[0])(*(array[0] for array in operands))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def cholesky_program():
    """Return a program with one custom call."""
    return compile_program(lambda x: jnp.linalg.cholesky(x, symmetrize_input=False), 8 * jnp.eye(8))


def test_chain_runs_the_kernels_of_all_its_calls():
    program = cholesky_program()
    assert program.note.endswith(" x1")
    chain = program.chain(3)
    assert chain.calls == 3 and "programs of 3 calls" in chain.note
    # Later calls of the chain have another first element of the matrix.
    assert program.run()[0, 0] > 1 > chain.run()[0, 0] > 0


def test_chain_that_lost_calls_raises_chain_broken(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.programs._chained", lambda function, calls: function)
    program = cholesky_program()
    with pytest.raises(ChainBroken, match="x1"):
        program.chain(3)


def test_custom_calls_are_counted_by_target():
    text = 'a = f32[] custom-call(b), custom_call_target="one"\nc = f32[] custom-call(a), custom_call_target="one"'
    assert custom_calls(text) == {"one": 2}


def test_launch_specs_are_found_by_tracing_and_shared_between_lengths():
    pytest.importorskip("triton")
    cases = [MOBA_CASES["n8k"], MOBA_CASES["n16k"]]
    first, second = (launch_specs(case) for case in cases)
    names = {spec.name for spec in first}
    assert any("forward" in name for name in names) and any("backward" in name for name in names)
    different, reasons = different_kernels([*first, *second], Target(90, 132))
    assert reasons == []
    # Launches for different groups of heads share a kernel, too.
    assert len(names) <= len(different) < len(first) + len(second)


def test_different_kernels_reports_a_kernel_that_cannot_be_planned():
    class Broken:
        name = "broken"

        def plan(self, target):
            raise ValueError(f"nothing for {target.arch}")

    pytest.importorskip("triton")
    assert different_kernels([Broken()], Target(90, 132)) == ([], ["broken: ValueError: nothing for 90"])


@pytest.mark.parametrize("binary", [False, True])
def test_compile_one_writes_the_binary_only_on_request(binary, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from blockdiag.triton_kernels.launch import compile as compile_module
    from tests.interop.bridge_kernels import AddSpec

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_module, "_compiled", {})
    assert compile_one(AddSpec(1000), Target(90, 132), binary) == ""
    assert [path.stat().st_size > 0 for path in tmp_path.rglob("*.cubin")] == [binary]


@pytest.fixture(scope="module")
def moba():
    pytest.importorskip("torch")
    from benchmarks.moba import family as moba_family

    return moba_family


def settings_of(moba, **options):
    defaults = {"rounds": 2, "batch_ms": 1e-9, "implementation": "xla", "device": "cpu", "baselines": ("torch-fa2",)}
    return moba.MoBASettings(deadline=time.monotonic() + 60, say=lambda line: None, **{**defaults, **options})


def measured_rows(moba, case=SMALL, **options):
    rates = {"copy_gb_per_s": 100.0, "matmul_tflops": 0.1}
    rows = measure(moba.FAMILY, [case], environment("cpu"), rates, settings_of(moba, **options))
    return {(row.implementation, row.pass_name): row for row in rows}


def test_measure_records_a_failed_pass_and_times_the_others(moba, monkeypatch):
    def make(self, pass_name):
        if pass_name == "bwd":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return compile_program(lambda x: x + 1.0, jnp.zeros(8))

    errors = {"output": 1e-3, "dQ": 2e-3, "dK": 3e-3, "dV": 1e-3}
    monkeypatch.setattr(moba, "check", lambda passes, results, seed: None)
    monkeypatch.setattr(moba, "errors_at", lambda *_, **__: errors)
    monkeypatch.setattr(Passes, "make", make)
    rows = measured_rows(moba)
    assert "out of memory" in rows["xla", "bwd"].note and rows["xla", "bwd"].median_ms is None
    assert rows["xla", "fwd"].median_ms > 0 and rows["xla", "fwd"].relative_error == 1e-3
    assert rows["xla", "fwd+bwd"].relative_error == 3e-3
    assert rows["xla", "routing"].ratio_to_floor > 0
    assert rows["xla", "fwd"].peak_bytes == rows["xla", "fwd"].extra_bytes + sum(SMALL.operand_bytes("fwd"))
    assert all(rows["torch-fa2", name].median_ms > 0 for name in ("fwd", "bwd", "fwd+bwd"))


def test_measure_times_nothing_when_the_check_fails(moba, monkeypatch):
    def refuse(passes, results, seed):
        raise WrongResult("output: relative error 1")

    monkeypatch.setattr(moba, "check", refuse)
    monkeypatch.setattr(moba, "errors_at", lambda *_, **__: pytest.fail("never reached"))
    monkeypatch.setattr(Passes, "make", lambda self, name: compile_program(lambda x: x + 1.0, jnp.zeros(8)))
    rows = measured_rows(moba, baselines=())
    assert all(row.median_ms is None and "WrongResult" in row.note for row in rows.values())


def test_dense_attention_is_left_out_beyond_its_length(moba, monkeypatch):
    monkeypatch.setattr(moba.FAMILY, "own", lambda cases, settings: [])
    rows = measured_rows(moba, dense_tokens=64)
    assert all(row.note == "not run: dense attention is timed up to 64 tokens" for row in rows.values())
    # The cases after this one need the remaining time.
    rows = measure(moba.FAMILY, [SMALL], environment("cpu"), {}, settings_of(moba), later=[SMALL] * 10)
    assert len(rows) == 3 and all("time budget" in row.note for row in rows)


def test_errors_are_computed_once_for_all_lengths(moba, monkeypatch):
    asked = []

    def errors_at(case, implementation, tokens, *, seed):
        asked.append(tokens)
        if len(asked) == 1:
            raise RuntimeError("first time")
        return {"output": 1.0}

    monkeypatch.setattr(moba, "errors_at", errors_at)
    settings = settings_of(moba)
    assert "first time" in moba.errors_against_float32(MOBA_CASES["n8k"], settings)
    assert moba.errors_against_float32(MOBA_CASES["n8k"], settings) == {"output": 1.0}
    assert moba.errors_against_float32(MOBA_CASES["n512k_b1"], settings) == {"output": 1.0}
    assert len(asked) == 2
    moba.errors_against_float32(MOBA_CASES["d64_n32_64k"], settings)
    assert len(asked) == 3


def test_long_cases_of_other_heads_are_compared_with_one_baseline(moba):
    context, case = Context(settings_of(moba), time.monotonic()), MOBA_CASES["gqa32_8_64k"]
    reasons = {
        one.name: moba.FAMILY.unsupported(context, case, one)
        for _, one in moba.FAMILY.others(
            [case], dataclasses.replace(context, settings=settings_of(moba, baselines=("torch-fa2", "torch-cudnn")))
        )
    }
    assert "only torch-cudnn is timed" in reasons["torch-fa2"] and reasons["torch-cudnn"] == ""
    assert MOBA_CASES["n64k"].is_usual and not MOBA_CASES["block64_k16_16k"].is_usual


def test_dense_baselines_are_timed_once_for_a_shape(moba):
    context = Context(settings_of(moba), time.monotonic())
    timed = timing("n64k", "fwd+bwd", "torch-fa2", 1.0)
    assert len(moba.FAMILY.others([MOBA_CASES["block64_k16_64k"]], context)) == 1
    known = dataclasses.replace(context, measured=[timed])
    assert moba.FAMILY.others([MOBA_CASES["block64_k16_64k"]], known) == []
    assert len(moba.FAMILY.others([MOBA_CASES["gqa32_8_64k"]], known)) == 1
    untimed = dataclasses.replace(context, measured=[dataclasses.replace(timed, median_ms=None)])
    assert len(moba.FAMILY.others([MOBA_CASES["block64_k16_64k"]], untimed)) == 1


def test_moba_command_past_the_deadline_adds_rows_and_replaces_none(moba, monkeypatch, tmp_path):
    from rich.console import Console

    monkeypatch.setattr("benchmarks.harness.pipeline.device_name", lambda: "some GPU")
    monkeypatch.setattr(
        moba.FAMILY, "measure_rates", lambda: ({"copy_gb_per_s": 4000.0, "matmul_tflops": 700.0}, "rates")
    )
    monkeypatch.setattr(moba.FAMILY, "launches", lambda case: ())
    kept = dataclasses.replace(timing("n8k", "fwd", "triton", 1.0), **dataclasses.asdict(environment("some GPU")))
    merge_rows(tmp_path / "moba.csv", MoBATiming, [kept])
    console = Console(width=200, record=True)
    choices = Choices("n8k,n16k", "none", rounds=1, seed=0, deadline=time.monotonic() - 1)
    run(moba.FAMILY, console, tmp_path, choices)
    rows = [row for row in read_rows(tmp_path / "moba.csv", MoBATiming) if row.implementation == "triton"]
    assert kept in rows and len(rows) == 8
    assert all("time budget" in row.note for row in rows if row != kept)
    assert "MISSED" in console.export_text()

    def lose_the_device(cases, settings):
        raise RuntimeError(f"{cases[0].name} lost the device")

    monkeypatch.setattr(moba.FAMILY, "make_inputs", lose_the_device)
    folder = tmp_path / "other"
    run(moba.FAMILY, console, folder, dataclasses.replace(choices, deadline=time.monotonic() + 60))
    notes = {row.case: row.note for row in read_rows(folder / "moba.csv", MoBATiming) if row.implementation == "triton"}
    assert notes == {name: f"failed: RuntimeError: {name} lost the device" for name in ("n8k", "n16k")}


def test_dense_baselines_compute_causal_attention(moba):
    torch = pytest.importorskip("torch")
    from benchmarks.moba.dense import DENSE_BACKENDS, dense_passes

    tensors = moba.random_tensors(SMALL, settings_of(moba))
    passes = dense_passes(SMALL, tensors, DENSE_BACKENDS["torch-fa2"])
    output, *gradients = passes["fwd+bwd"]().run()
    wide = [tensor.float().transpose(1, 2).requires_grad_() for tensor in tensors[:3]]
    keys, values = (array.repeat_interleave(2, dim=1) for array in wide[1:])
    mask = torch.ones(SMALL.tokens, SMALL.tokens, dtype=torch.bool).tril()
    scores = (wide[0] @ keys.transpose(-1, -2) * SMALL.head_dim**-0.5).masked_fill(~mask, -torch.inf)
    exact = scores.softmax(-1) @ values
    wanted = torch.autograd.grad(exact, wide, tensors[3].float().transpose(1, 2))
    for mine, other in zip((output, *gradients), (exact.detach(), *wanted), strict=True):
        assert float((mine.float() - other).norm() / other.norm()) < 2e-2


@pytest.mark.exhaustive
def test_command_runs_the_smoke_check(tmp_path):
    from typer.testing import CliRunner

    from benchmarks.app import app

    result = CliRunner().invoke(app, ["moba", "--smoke", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "moba_smoke.csv", MoBATiming)
    assert [row.pass_name for row in rows] == list(MOBA_PASSES)
    assert all(row.median_ms > 0 for row in rows)
    assert all(0 < row.relative_error < 1e-2 for row in rows[1:])
