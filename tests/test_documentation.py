"""The Python examples of the documentation run: every block of a page, in order, in one file."""

import re
import runpy
from pathlib import Path

import jax
import pytest

from blockdiag.bench.records import Timing

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


def test_table_goes_between_the_markers(readme_table):
    start, end = readme_table["START"], readme_table["END"]
    once = readme_table["with_section"](f"before\n{start}\nold\n{end}\nafter\n", "new")
    assert once == f"before\n{start}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        readme_table["with_section"]("no markers", "new")


def test_readme_shows_the_recorded_figures(readme_table):
    if readme_table["RESULTS"].exists():
        readme_table["main"](["--check"])
