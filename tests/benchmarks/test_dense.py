"""The benchmark of dense attention: its cases, baselines, columns and tables, at sizes that take no time."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend  # noqa: E402

from benchmarks.dense.cases import (  # noqa: E402
    DENSE_CASES,
    DENSE_GROUPS,
    SMOKE_CASES,
    select_dense_cases,
    small_case,
)
from benchmarks.dense.family import FAMILY  # noqa: E402
from benchmarks.dense.report import judge_dense, rate_table  # noqa: E402
from benchmarks.fuse import torch_baselines  # noqa: E402
from benchmarks.fuse.cases import FUSE_PASSES  # noqa: E402
from benchmarks.fuse.check import check_results, exact_results, make_arrays  # noqa: E402
from benchmarks.fuse.family import FuseSettings  # noqa: E402
from benchmarks.fuse.plots import case_name, draw_times  # noqa: E402
from benchmarks.fuse.programs import cudnn_function, function_of  # noqa: E402
from benchmarks.harness.pipeline import measure  # noqa: E402
from benchmarks.harness.plot_style import LIGHT  # noqa: E402
from benchmarks.harness.records import DenseTiming, columns, environment, merge_rows, read_rows  # noqa: E402
from benchmarks.overview.tables import dense_section  # noqa: E402

ROOFS = {"copy_gb_per_s": 100.0, "matmul_tflops": 0.1}


def operands(case):
    """Return the arguments in float32 as tensors and as JAX arrays."""
    arrays = make_arrays(case, seed=1, device="cpu")
    arrays = {name: array.float() if array.is_floating_point() else array for name, array in arrays.items()}
    return arrays, {name: jnp.asarray(array.numpy()) for name, array in arrays.items()}


def check_call(case, call, arrays):
    """Compare both passes of a torch call with float64."""
    exact = exact_results(case, arrays)
    for pass_name in FUSE_PASSES:
        assert check_results(case, call.results(call.run_of(pass_name)()), exact, 1e-5) < 1e-5


def test_dense_cases_have_unique_names_and_are_selected_by_group_and_by_name():
    assert len(DENSE_CASES) == 16
    assert {case.group for case in DENSE_CASES.values()} == set(DENSE_GROUPS)
    assert {case.head_dim for case in DENSE_CASES.values()} == {64, 96, 128, 192, 256}
    found = select_dense_cases("alibi, causal_4x8192_h48_d128")
    assert [case.name for case in found] == ["causal_4x8192_h48_d128", "alibi_1x16384_h16_d128"]
    with pytest.raises(ValueError, match="`cases` must name groups"):
        select_dense_cases("causal_1x16384_mha")


def test_useful_work_counts_unmasked_scores():
    full, softcap = DENSE_CASES["full_1x16384_h16_d128"], DENSE_CASES["softcap_1x16384_h16_d128"]
    assert full.useful_flops("fwd") == 4 * 16 * 16384**2 * 128
    assert full.useful_flops("fwd+bwd") == 3.5 * full.useful_flops("fwd")
    assert softcap.useful_flops("fwd") == 4 * 16 * 128 * 16384 * 16385 / 2
    window = DENSE_CASES["window1024_1x16384_h16_d128"]
    assert window.seen_pairs == 16 * (1025 * (16384 - 1024) + 1024 * 1025 // 2)


def test_title_shows_the_cost_of_the_check():
    case = DENSE_CASES["causal_1x16384_h16_d128"]
    assert FAMILY.title([case]) == (
        "causal_1x16384_h16_d128 (check: 16 score matrices of 2.1 GB, 6.6 TFLOP in float64)"
    )


@pytest.mark.parametrize("case", SMOKE_CASES, ids=lambda case: case.group)
def test_functions_match_between_jax_and_torch(case):
    arrays, views = operands(case)
    output = function_of(case)(*(views[name] for name in case.shapes))
    call = torch_baselines.plain_call(case, arrays, lambda function: function)
    np.testing.assert_allclose(output, call.run_of("fwd")()[0], rtol=1e-4, atol=1e-5)
    changed = torch_baselines.changed_scores(
        case,
        torch.zeros(case.batch, case.query_heads, case.tokens, case.tokens),
        {**arrays, **torch_baselines.slopes_of(case, torch.device("cpu"))},
    )
    assert int(changed.isfinite().sum()) == case.seen_pairs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", ["full", "softcap", "alibi"])
def test_flex_attention_matches_exact_results(group, monkeypatch):
    # FlexAttention rejects gradients on a CPU, although they would only be slow.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    case = small_case(group)
    arrays, _ = operands(case)
    check_call(case, torch_baselines.flex_call(case, arrays, lambda function: function), arrays)


@pytest.mark.parametrize("group", ["causal", "full"])
def test_sdpa_matches_exact_results(group):
    case = small_case(group)
    arrays, _ = operands(case)
    call = torch_baselines.sdpa_call(case, arrays, lambda function: function, backend=SDPBackend.MATH)
    check_call(case, call, arrays)


@pytest.mark.parametrize("group", ["window", "documents"])
def test_varlen_attention_matches_exact_results(group, monkeypatch):
    def by_sdpa(query, key, value, offsets, keys_offsets, longest, longest_keys, *, window_size):
        assert longest == int(offsets.diff().max()) and window_size[1] == 0
        parts = []
        for begin, end in zip(offsets.tolist(), offsets[1:].tolist(), strict=False):
            given = (array[begin:end].transpose(0, 1) for array in (query, key, value))
            row, column = torch_baselines.positions(end - begin, query.device)
            seen = (column <= row) & ((window_size[0] < 0) | (row - column <= window_size[0]))
            parts.append(torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=seen).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sdpa)
    case = small_case(group, key_heads=4)
    arrays, _ = operands(case)
    call = torch_baselines.TORCH_CALLS["torch-fa2"](case, arrays, lambda function: function)
    check_call(case, call, arrays)


def test_sdpa_unsupported_names_groups_without_arguments():
    def refused(name, **sizes):
        return {group for group in DENSE_GROUPS if torch_baselines.sdpa_unsupported(name, small_case(group, **sizes))}

    assert refused("torch-cudnn") == {"window", "documents", "softcap", "alibi"}
    assert refused("torch-fa2", key_heads=4) == {"softcap", "alibi"}
    assert refused("torch-fa2", key_heads=2) == refused("torch-cudnn")


def test_cudnn_function_without_mask_matches_full_attention(monkeypatch):
    attend = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        assert implementation == "cudnn" and not options
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return attend(*arrays, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    case = small_case("full")
    _, views = operands(case)
    given = [views[name] for name in case.shapes]
    np.testing.assert_allclose(cudnn_function(case)(*given), function_of(case)(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_measure_records_rates_and_the_reasons_of_missing_baselines():
    case = small_case("softcap")
    settings = FuseSettings(
        deadline=time.monotonic() + 120,
        rounds=1,
        batch_ms=1e-9,
        implementation="xla",
        device="cpu",
        baselines=FAMILY.baselines,
        compile_function=lambda function: function,
        say=lambda line: None,
    )
    rows = measure(FAMILY, [case], environment("cpu"), ROOFS, settings)
    found = {(row.implementation, row.pass_name): row for row in rows}
    assert list(found) == [(name, one) for name in ("xla", *FAMILY.baselines) for one in FUSE_PASSES]
    ours = found["xla", "fwd"]
    assert ours.op == "dense" and 0 < ours.relative_error < 1.5e-2
    assert ours.tflops == pytest.approx(case.useful_flops("fwd") / ours.median_ms / 1e9)
    assert found["torch-flex", "fwd"].tflops > 0
    assert found["jax-cudnn", "fwd"].note == "not run: it has no soft cap" and ours.over_cudnn is None
    assert "no argument for 'softcap'" in found["torch-fa2", "fwd+bwd"].note


def timing(case, pass_name, milliseconds, implementation="triton"):
    fields = case.columns() | dict.fromkeys(("device", "driver", "jax", "jaxlib", "torch", "triton", "date"), "a")
    work = case.useful_flops(pass_name) / 1e12
    return DenseTiming(
        pass_name=pass_name, implementation=implementation, median_ms=milliseconds, useful_tflop=work, **fields
    )


def test_rows_are_compared_with_cudnn_and_kept(tmp_path):
    case = DENSE_CASES["full_1x16384_h16_d128"]
    rows = [timing(case, "fwd", 4.0), timing(case, "fwd+bwd", 13.0)]
    rows += [timing(case, "fwd", 5.0, "jax-cudnn"), timing(case, "fwd+bwd", 15.0, "jax-cudnn")]
    rows += [timing(case, "fwd", None, "torch-flex"), timing(case, "fwd+bwd", 20.0, "torch-fa2")]
    rows = FAMILY.compared(rows)
    assert [row.over_cudnn for row in rows] == [0.8, pytest.approx(13 / 15), 1.0, 1.0, None, pytest.approx(4 / 3)]
    assert [verdict.value for verdict in judge_dense(rows)] == [row.over_cudnn for row in rows[:2]]
    console = Console(width=200, record=True)
    console.print(rate_table(rows))
    text = console.export_text()
    # The backward pass has 2.5 times the work of the forward pass, 2.2 TFLOP.
    assert "550 / 611 / 592" in text and "- / - / 385" in text and "0.80 / 0.90 / 0.87" in text
    merge_rows(tmp_path / "dense.csv", DenseTiming, rows)
    merge_rows(tmp_path / "dense.csv", DenseTiming, [dataclasses.replace(rows[0], median_ms=3.0)])
    kept = read_rows(tmp_path / "dense.csv", DenseTiming)
    assert len(kept) == len(rows) and kept[0].median_ms == 3.0
    assert {"tflops", "over_cudnn"} < set(columns(DenseTiming))


def test_tables_and_pictures_name_dense_cases():
    window, grouped = DENSE_CASES["window256_4x4096_h16_d64"], DENSE_CASES["causal_1x16384_h16k2_d128"]
    rows = [
        dataclasses.replace(timing(case, pass_name, 2.0), floor_ms=1.0)
        for case in (window, grouped)
        for pass_name in FUSE_PASSES
    ]
    rows.append(timing(window, "fwd", 3.0, "torch-cudnn"))
    assert [case_name(rows[0]), case_name(rows[-2])] == [
        "window of 256 4 x 4K, 16 heads of 64",
        "causal 1 x 16K, 16/2 heads of 128",
    ]
    text = dense_section(rows)
    assert "results/dense.csv" in text
    assert "| window of 256 4 x 4K, 16 heads of 64 | 2.00 / 2.00 | 1.00 / 1.00 | - | 3.00 / - | - | - |" in text
    figure = draw_times(rows, LIGHT)
    assert len(figure.axes) == 2 and figure.axes[0].get_yticklabels()[0].get_text().startswith("window")


def test_command_runs_the_smoke_check(tmp_path):
    from typer.testing import CliRunner

    from benchmarks.app import app

    result = CliRunner().invoke(app, ["dense", "--smoke", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "dense_smoke.csv", DenseTiming)
    assert {row.group for row in rows} == set(DENSE_GROUPS) and len(rows) == 2 * len(DENSE_GROUPS)
    assert all(row.tflops > 0 and row.relative_error < 1.5e-2 for row in rows)
