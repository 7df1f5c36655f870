"""Tables of README.md, benchmarks/README.md and docs/: their content, and agreement of pages with result files."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.records import (
    FuseTiming,
    GalleryTiming,
    MoBATiming,
    PagedTiming,
    Timing,
    read_rows,
    write_rows,
)
from benchmarks.overview.speedup_table import behind_section, summary_section
from benchmarks.overview.speedups import behind, contiguous_factors, fuse_speedups, moba_speedups, paged_speedups

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def readme_table():
    return runpy.run_path(str(ROOT / "benchmarks" / "overview" / "tables.py"))


def timing(pass_name, implementation, median_ms, **fields):
    where = dict.fromkeys(("driver", "jax", "jaxlib", "torch", "triton", "date"), "1.0")
    return Timing(
        op="block_diagonal",
        pass_name=pass_name,
        case="h8_d128",
        implementation=implementation,
        median_ms=median_ms,
        p20_ms=median_ms,
        p80_ms=median_ms,
        device="A GPU",
        **where,
        **fields,
    )


def test_speed_up_table_shows_ratios_to_the_baselines(readme_table):
    rows = [
        timing("fwd", "triton", 0.5, ratio_to_floor=0.96),
        timing("bwd", "triton", 1.5),
        timing("fwd+bwd", "triton", 2.0),
        timing("fwd+bwd", "torch-fa2", 6.0),
        timing("fwd+bwd", "torch-flex-64", 9.0),
        timing("fwd+bwd", "torch-flex-128", 8.0),
        timing("fwd+bwd", "jax-cudnn", None, note="failed"),
    ]
    text = readme_table["section"](rows)
    assert "A GPU" in text
    assert "| 8 heads of 128 | 0.500 ms (0.96x) | 1.500 ms | 3.0x | - | - | 4.0x | - |" in text
    with pytest.raises(ValueError, match="bench"):
        readme_table["section"](rows[3:])


def moba_timing(pass_name, implementation, median_ms, case="n8k", tokens=8192, batch=2, **fields):
    where = dict.fromkeys(("driver", "jax", "jaxlib", "torch", "triton", "date"), "1.0")
    shape = {"query_heads": 16, "key_heads": 16, "head_dim": 128, "block_size": 128, "top_k": 8}
    return MoBATiming(
        op="moba",
        pass_name=pass_name,
        case=case,
        implementation=implementation,
        tokens=tokens,
        batch=batch,
        median_ms=median_ms,
        **{**shape, "device": "A GPU", **where, **fields},
    )


def test_moba_table_shows_times_and_dense_baselines(readme_table):
    rows = [
        moba_timing("routing", "triton", 0.25),
        moba_timing("fwd", "triton", 1.0, extra_bytes=3 << 28),
        moba_timing("bwd", "triton", 1.5),
        moba_timing("fwd+bwd", "triton", 2.5, floor_ms=0.625),
        moba_timing("fwd+bwd", "flashmoba-measured", 5.32, device="recorded"),
        # Dense attention: on the same arrays in a case of other blocks, on other arrays, and without a measurement.
        moba_timing("fwd", "torch-cudnn", 2.0, case="block64", block_size=64),
        moba_timing("bwd", "torch-cudnn", 3.0, case="block64", block_size=64),
        moba_timing("fwd+bwd", "torch-cudnn", 99.0, case="gqa", key_heads=4),
        moba_timing("fwd+bwd", "torch-cudnn", None),
    ]
    text = readme_table["moba_section"](rows)
    assert "A GPU" in text and "16 heads of 128, blocks of 128 and `top_k=8`" in text
    assert "| 8,192 | 0.25 | 1.00 | 1.50 | 2.50 | 0.62 | 5.3 | 0.75 GiB |" in text
    assert "2.0 times as long at 8,192 tokens" in text
    assert "routing takes" not in text
    longest = {"case": "n512k_b1", "tokens": 524288, "batch": 1}
    longest_rows = [
        moba_timing("fwd+bwd", "triton", 104.2, **longest),
        moba_timing("routing", "triton", 48.0, **longest),
    ]
    text = readme_table["moba_section"]([*rows[:4], *longest_rows])
    assert "One sequence of 524,288 tokens takes 104 ms, of which routing takes 48 ms" in " ".join(text.split())
    assert "Dense" not in text
    with pytest.raises(ValueError, match="benchmarks moba"):
        readme_table["moba_section"](rows[:3])


def paged_timing(group, case, median_us, implementation="triton-torch", **fields):
    where = dict.fromkeys(("driver", "jax", "jaxlib", "torch", "triton", "date"), "1.0")
    shape = {"batch": 1, "kv_length": 131072, "query_tokens": 1, "query_heads": 32, "key_heads": 8, "head_dim": 128}
    usual = {"workload": "b1_128k", "cache": "bfloat16", "scales": "none", "page_size": 64, "device": "A GPU"}
    roof = {"tb_per_s": 4.0, "read_tb_per_s": 4.5, "floor_us": 119.3}
    return PagedTiming(
        op="paged",
        group=group,
        case=case,
        implementation=implementation,
        median_us=median_us,
        **{**shape, **usual, **roof, **where, **fields},
    )


def test_decode_table_shows_times_and_ratios(readme_table):
    rows = [
        paged_timing("decode", "p1", 131.04, page_size=1),
        paged_timing("decode", "p64", 130.0),
        paged_timing("decode", "p64", 133.0, "triton"),
        paged_timing("decode", "p64", 139.7, "flashinfer-recorded", device="recorded"),
        paged_timing("decode", "contiguous", 170.2, "torch-fa2", page_size=None),
        paged_timing("decode", "failed", None, "jax-cudnn", page_size=None),
        paged_timing("short", "b1_1k_in_l2", 7.04, kv_length=1024),
        paged_timing("speculative", "t1", 100.0),
        paged_timing("speculative", "t4", 110.0, query_tokens=4),
        paged_timing("moba", "m", 12.0, page_size=16),
        paged_timing("append", "a", 3.0, batch=32, scales="head"),
        paged_timing("splits", "s32", 130.0, splits=32, is_chosen=0),
        paged_timing("splits", "chosen", 129.0, splits=32, is_chosen=1),
        paged_timing("splits", "s1", 600.0, splits=1, is_chosen=0),
    ]
    text = " ".join(readme_table["decode_section"](rows).split())
    assert "A GPU" in text and "4.50 TB/s" in text
    assert "| 1, 131,072 | bfloat16 | 131.0 | - | 130.0 | 4.00 | 119.3 | 133.0 | - / - / 139.7 |" in text
    assert "| sequences, keys of each | 1, 131,072 | |---|---| | FlashAttention 2 (SDPA) | 170.2 |" in text
    assert "| keys | 1,024 | |---|---| | cache in the L2 | 7.0 |" in text
    assert "| cache | T = 4 | |---|---|---| | 1, 131,072 | bfloat16 | 1.10x |" in text
    assert "| bfloat16 | 16 | 12.0 |" in text
    assert "| append one token to each of 32 sequences | bfloat16, scales given | 64 | 3.0 |" in text
    assert text.endswith("| 1 | 600.0 | | 32 | [129.0] |")
    with pytest.raises(ValueError, match="benchmarks paged"):
        readme_table["decode_section"](rows[2:])


def test_a_section_without_results_is_empty(readme_table, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- fuse:start -->\nold\n<!-- fuse:end -->\n")
    one = replace(readme_table["SECTIONS"][-1], page=page, sources={tmp_path / "none.csv": FuseTiming})
    monkeypatch.setitem(readme_table["main"].__globals__, "SECTIONS", (one,))
    readme_table["main"]([])
    assert page.read_text() == "before\n<!-- fuse:start -->\n\n<!-- fuse:end -->\n"


def test_with_section_replaces_text_between_markers(readme_table):
    page = "before\n<!-- one:start -->\nold\n<!-- one:end -->\nafter <!-- two:start --><!-- two:end -->\n"
    changed = readme_table["with_section"](page, "one", "new")
    assert changed == page.replace("old", "new")
    with pytest.raises(ValueError, match="once each"):
        readme_table["with_section"](page, "three", "new")


def test_pages_show_the_recorded_figures(readme_table):
    readme_table["main"](["--check"])


def test_check_of_pages_with_other_figures_exits_with_an_error(readme_table, monkeypatch, tmp_path):
    """For each section, each file alone has times of this library that are a tenth longer."""
    main, sections = readme_table["main"], readme_table["SECTIONS"]
    assert {one.page.name for one in sections} == {"README.md", "moba.md", "decode.md", "speed.md"}
    for one in sections:
        for path, kind in one.sources.items():
            sources = {tmp_path / path.name if it == path else it: of for it, of in one.sources.items()}
            write_rows(tmp_path / path.name, kind, [slower(row) for row in read_rows(path, kind)])
            monkeypatch.setitem(main.__globals__, "SECTIONS", (replace(one, sources=sources),))
            # Block-diagonal attention and MoBA are so far ahead that the list of faster baselines does not change.
            if one.name == "behind" and kind in (Timing, MoBATiming):
                main(["--check"])
                continue
            with pytest.raises(SystemExit, match=f"{one.page.name} differs from the results"):
                main(["--check"])


def slower(row):
    """Return a row in which the time of this library is a tenth longer."""
    field = {PagedTiming: "median_us", GalleryTiming: "ours_ms"}.get(type(row), "median_ms")
    is_ours = getattr(row, "implementation", "triton") in ("triton", "triton-torch")
    time = getattr(row, field)
    return replace(row, **{field: 1.1 * time}) if is_ours and time is not None else row


def fuse_timing(case, pass_name, implementation, median_ms, **fields):
    shape = {"batch": 4, "rows": 1, "tokens": 4096, "query_heads": 16, "key_heads": 16, "head_dim": 64, "value_dim": 64}
    where = dict.fromkeys(("driver", "jax", "jaxlib", "torch", "triton", "date"), "1.0")
    usual = {"op": "fuse", "group": "causal", "device": "A GPU"}
    return FuseTiming(
        case=case, pass_name=pass_name, implementation=implementation, median_ms=median_ms,
        **{**usual, **shape, **where, **fields},
    )  # fmt: skip


def test_fuse_table_shows_times_floor_and_baselines(readme_table):
    rows = [
        fuse_timing("causal_4x4096_mha", "fwd", "triton", 0.5, floor_ms=0.25),
        fuse_timing("causal_4x4096_mha", "fwd+bwd", "triton", 2.0, floor_ms=1.0),
        fuse_timing("causal_4x4096_mha", "fwd", "torch-flex", 0.75),
        fuse_timing("causal_4x4096_mha", "fwd+bwd", "torch-flex", None, note="failed"),
    ]
    text = readme_table["fuse_section"](rows)
    assert "A GPU" in text
    assert "| causal 4 x 4K, 16/16 | 0.500 / 2.00 | 0.250 / 1.00 | 0.750 / - | - | - | - |" in text
    with pytest.raises(ValueError, match="benchmarks fuse"):
        readme_table["fuse_section"](rows[2:])


def test_speedups_compare_with_the_fastest_baseline_on_the_same_gpu():
    rows = [
        fuse_timing("causal_4x4096_mha", "fwd", "triton", 0.5),
        fuse_timing("causal_4x4096_mha", "fwd", "torch-flex", 0.75),
        fuse_timing("causal_4x4096_mha", "fwd", "jax-cudnn", 0.4),
        fuse_timing("causal_4x4096_mha", "fwd", "xla", 0.1),
    ]
    (one,) = fuse_speedups(rows, ("fwd",))
    assert (one.other, one.other_ms) == ("jax-cudnn", 0.4)
    assert one.factor == pytest.approx(0.8) and behind([one]) == [one]
    published = moba_timing("fwd+bwd", "flashmoba-published", 0.5)
    recorded = moba_timing("fwd+bwd", "flashmoba-measured", 6.0, device="recorded")
    dense = moba_timing("fwd+bwd", "torch-cudnn", 5.0, case="block64", block_size=64)
    elsewhere = moba_timing("fwd+bwd", "flashmoba-measured", 1.0, case="block64", block_size=64)
    ours = moba_timing("fwd+bwd", "triton", 2.0)
    (one,) = moba_speedups([published, recorded, ours])
    assert one.other_name == "FlashMoBA *" and one.factor == 3.0 and behind([one]) == []
    (one,) = moba_speedups([published, recorded, dense, elsewhere, ours])
    assert one.other_name == "cuDNN (torch)" and one.factor == 2.5


def test_paged_speedups_compare_with_the_same_paged_cache():
    rows = [
        paged_timing("decode", "p64", 100.0),
        paged_timing("decode", "p64", 150.0, "flashinfer-recorded", device="recorded"),
        paged_timing("decode", "p1", 50.0, "flashinfer-recorded", page_size=1, device="recorded"),
        paged_timing("decode", "e4m3", 50.0, "flashinfer-recorded", cache="float8_e4m3fn", device="recorded"),
        paged_timing("decode", "contiguous", 90.0, "torch-cudnn", page_size=None),
    ]
    (one,) = paged_speedups(rows)
    assert one.other_name == "FlashInfer *" and one.factor == pytest.approx(1.5)
    assert contiguous_factors(rows) == {"1 x 131,072": pytest.approx(0.9)}


def test_readme_tells_where_others_are_faster():
    rows = [
        fuse_timing("causal_4x4096_mha", "fwd", "triton", 0.5),
        fuse_timing("causal_4x4096_mha", "fwd", "torch-flex", 0.4),
    ]
    where = dict.fromkeys(("driver", "jax", "jaxlib", "torch", "triton", "date"), "1.0")
    variants = [
        GalleryTiming(
            variant=name, pass_name="fwd", shape="", dtype="", ours_ms=1.0, xla_ms=xla, device="A GPU", **where
        )
        for name, xla in (("causal", 2.0), ("slice", 0.5))
    ]
    text = " ".join(behind_section([], [], [], rows, variants).split())
    assert "1 of 1 measured passes are slower" in text and "1 of 2 gallery variants are slower than XLA" in text
    assert "| fuse, causal 4 x 4K, 16/16, forward | FlexAttention | 0.80 |" in text
    assert "| gallery, `slice`, forward | XLA | 0.50 |" in text
    assert "No measured pass" in behind_section([], [], [], rows[:1], variants[:1])


def test_summary_without_an_operation_raises_value_error(readme_table):
    with pytest.raises(ValueError, match="no workload of block diagonal"):
        summary_section([], [], [], [], [])
