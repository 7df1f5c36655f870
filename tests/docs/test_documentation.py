"""The Python examples of the documentation run. The blocks of a page run in order, as one file."""

import re
import runpy
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# tests/examples covers these.
LONG_EXAMPLES = ("*ranking*", "decode*", "*language*", "*evoformer*", "long_context*")
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.py") if not any(path.match(pattern) for pattern in LONG_EXAMPLES)
)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Run the examples with JAX's default promotion instead of the strict one of the other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# test_quickstarts.py runs the quickstarts, without packages that their readers have not installed.
RUN_HERE = [page for page in PAGES if python_blocks(page) and not page.stem.startswith("quickstart_")]


@pytest.mark.every_case
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
def test_link_targets_of_page_exist(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
