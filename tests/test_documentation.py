"""The Python examples of the documentation run: every block of a page, in order, in one file."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from blockdiag.bench.records import MoBATiming, PagedTiming, Timing, read_rows, write_rows

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Those that tests/test_examples_*.py run, in processes of their own.
LONG_EXAMPLES = ("*ranking*", "decode.py", "*language*", "*evoformer*")
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.py") if not any(path.match(pattern) for pattern in LONG_EXAMPLES)
)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Examples are shown as under JAX's own settings, not the strict ones of the other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# test_quickstarts.py runs those, without what their readers have not installed.
RUN_HERE = [page for page in PAGES if python_blocks(page) and not page.stem.startswith("quickstart_")]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_examples_of_page_run(page, tmp_path):
    # Triton reads a kernel's source from its file.
    script = tmp_path / f"{page.stem}_examples.py"
    script.write_text("\n".join(python_blocks(page)))
    runpy.run_path(str(script))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def readme_table():
    return runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))


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


def test_table_of_speed_ups(readme_table):
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


def test_table_of_moba(readme_table):
    rows = [
        moba_timing("routing", "triton", 0.25),
        moba_timing("fwd", "triton", 1.0, extra_bytes=3 << 28),
        moba_timing("bwd", "triton", 1.5),
        moba_timing("fwd+bwd", "triton", 2.5, floor_ms=0.625),
        moba_timing("fwd+bwd", "flashmoba-measured", 5.32, device="recorded"),
        # Dense attention of the same arrays, which stands with a case of other blocks; of other arrays; not measured.
        moba_timing("fwd", "torch-cudnn", 2.0, case="block64", block_size=64),
        moba_timing("bwd", "torch-cudnn", 3.0, case="block64", block_size=64),
        moba_timing("fwd+bwd", "torch-cudnn", 99.0, case="gqa", key_heads=4),
        moba_timing("fwd+bwd", "torch-cudnn", None),
    ]
    text = readme_table["moba_section"](rows)
    assert "A GPU" in text and "16 heads of 128, blocks of 128 and `top_k=8`" in text
    assert "| 8,192 | 0.25 | 1.00 | 1.50 | 2.50 | 0.62 | 5.3 | 0.75 GiB |" in text
    assert "2.0 times at 8,192 tokens" in text
    assert "routing, whose work" not in text
    longest = {"case": "n512k_b1", "tokens": 524288, "batch": 1}
    longest_rows = [
        moba_timing("fwd+bwd", "triton", 104.2, **longest),
        moba_timing("routing", "triton", 48.0, **longest),
    ]
    text = readme_table["moba_section"]([*rows[:4], *longest_rows])
    assert "524,288 tokens of one sequence take 104 ms, 48 of them for routing" in text
    assert "Dense" not in text
    with pytest.raises(ValueError, match="bench moba"):
        readme_table["moba_section"](rows[:3])


def test_sentence_of_moba(readme_table):
    longer = {"case": "n64k", "tokens": 65536}
    rows = [
        moba_timing("fwd+bwd", "triton", 15.58, **longer),
        moba_timing("fwd+bwd", "flashmoba-measured", 60.3, **longer),
    ]
    text = readme_table["moba_sentence"](rows)
    assert "On an A GPU it takes 15.6 ms forward and backward for 2 sequences of 65,536 tokens" in text
    assert "60.3 ms" in text
    with pytest.raises(ValueError, match="flashmoba"):
        readme_table["moba_sentence"](rows[:1])


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


def test_table_of_decode(readme_table):
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
    assert "FlashAttention 2 (SDPA) 170 us (1, 131,072)." in text
    assert "7.0 us for 1,024 keys where the cache is in the L2." in text
    assert "1.10 times for T = 4 (1, 131,072, bfloat16)." in text
    assert "12.0 us (bfloat16, pages of 16)." in text
    assert "3.0 us (bfloat16, given scales, pages of 64)." in text
    assert text.endswith("| 1 | 600.0 | | 32 | [129.0] |")
    with pytest.raises(ValueError, match="bench paged"):
        readme_table["decode_section"](rows[2:])


def test_a_section_without_results_is_empty(readme_table, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- decode:start -->\nold\n<!-- decode:end -->\n")
    one = replace(readme_table["SECTIONS"][-1], page=page, results=tmp_path / "none.csv")
    monkeypatch.setitem(readme_table["main"].__globals__, "SECTIONS", (one,))
    readme_table["main"]([])
    assert page.read_text() == "before\n<!-- decode:start -->\n\n<!-- decode:end -->\n"


def test_sections_go_between_their_markers(readme_table):
    page = "before\n<!-- one:start -->\nold\n<!-- one:end -->\nafter <!-- two:start --><!-- two:end -->\n"
    changed = readme_table["with_section"](page, "one", "new")
    assert changed == page.replace("old", "new")
    with pytest.raises(ValueError, match="once each"):
        readme_table["with_section"](page, "three", "new")


def test_pages_show_the_recorded_figures(readme_table):
    readme_table["main"](["--check"])


def test_pages_that_show_other_figures_are_found(readme_table, monkeypatch, tmp_path):
    """For each section alone, as if every time had been measured a tenth longer."""
    main, sections = readme_table["main"], readme_table["SECTIONS"]
    for one in sections:
        if not one.results.exists():
            continue
        rows, field = read_rows(one.results, one.kind), "median_us" if one.kind is PagedTiming else "median_ms"
        medians = [getattr(row, field) for row in rows]
        slower = [replace(row, **{field: None if x is None else 1.1 * x}) for row, x in zip(rows, medians, strict=True)]
        results = tmp_path / one.results.name
        write_rows(results, one.kind, slower)
        monkeypatch.setitem(main.__globals__, "SECTIONS", (replace(one, results=results),))
        with pytest.raises(SystemExit, match=f"{one.page.name} is not what the results say"):
            main(["--check"])
