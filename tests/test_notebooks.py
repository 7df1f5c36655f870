"""The notebooks of the documentation run, with the checks inside them, and draw pictures."""

import re
import runpy
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.py"))

EXPECTED = {"block_diagonal", "fuse_your_own", "jax_and_torch", "moba_routing", "paged_decode"}


@pytest.fixture
def usual_settings(monkeypatch):
    """JAX's own settings, as readers have them, put back afterwards; pictures without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    precision = jax.config.jax_default_matmul_precision
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_default_matmul_precision", precision)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, usual_settings):
    import matplotlib.pyplot as plt

    plt.close("all")
    runpy.run_path(str(notebook), run_name="__main__")
    assert len(plt.get_fignums()) >= 2
    plt.close("all")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_one(notebook):
    """A percent script of jupytext: a header, prose and code in turns, a title first, and checks."""
    text = notebook.read_text()
    header, *cells = re.split(r"^# %%", text, flags=re.MULTILINE)
    assert "format_name: percent" in header and "name: python3" in header
    assert cells[0].startswith(" [markdown]\n# # ")
    prose = [cell for cell in cells if cell.startswith(" [markdown]")]
    for cell in prose:
        assert all(line.startswith("#") for line in cell.splitlines()[1:] if line), cell
    assert 5 <= len(prose) < len(cells)
    assert len(re.findall(r"^\s*(?:assert |np\.testing\.)", text, flags=re.MULTILINE)) >= 4


def test_all_notebooks_are_found():
    assert {path.stem for path in NOTEBOOKS} >= EXPECTED
