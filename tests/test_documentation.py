"""The Python examples of the documentation run: every block of a page, in order, in one file."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from blockdiag.bench.records import MoBATiming, Timing, read_rows, write_rows

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# test_examples_ranking.py runs the ranking models.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if "ranking" not in path.stem)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Examples are shown as under JAX's own settings, not the strict ones of the other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# torch's own code, which torch.compile imports.
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.stem)
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
        rows = read_rows(one.results, one.kind)
        slower = [replace(row, median_ms=None if row.median_ms is None else 1.1 * row.median_ms) for row in rows]
        results = tmp_path / one.results.name
        write_rows(results, one.kind, slower)
        monkeypatch.setitem(main.__globals__, "SECTIONS", (replace(one, results=results),))
        with pytest.raises(SystemExit, match=f"{one.page.name} is not what the results say"):
            main(["--check"])
