"""The notebooks of the documentation run, pass their own checks and draw pictures."""

import ast
import base64
import io
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.py"))

EXPECTED = {"block_diagonal", "fuse_your_own", "jax_and_torch", "moba_routing", "paged_decode"}
# Calls that may end a cell, because they return None.
RETURN_NOTHING = {
    "print",
    "draw_mask",
    "draw_pool",
    "set_visible",
    "set_yscale",
    "show",
    "assert_allclose",
    "assert_close",
}


@pytest.fixture
def usual_settings(monkeypatch):
    """Use JAX's default settings, as readers do, and draw without a display. Restore the settings afterwards."""
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
def test_notebook_has_the_structure_of_a_percent_script(notebook):
    """A notebook is a jupytext percent script with a title, prose, code and checks."""
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


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_cells_end_without_a_displayed_value(notebook):
    """Jupyter would show the value of a cell's last expression, such as the address of a legend."""
    _, *cells = re.split(r"^# %%.*\n", notebook.read_text(), flags=re.MULTILINE)
    code = [cell for cell in cells if not all(line.startswith("#") for line in cell.splitlines() if line)]
    for cell in code:
        last = ast.parse(cell).body[-1]
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
            assert ast.unparse(last.value.func).split(".")[-1] in RETURN_NOTHING, ast.unparse(last)


@pytest.fixture(scope="module")
def pictures():
    """Return the backend that draws figures for light pages and for dark ones."""
    pytest.importorskip("matplotlib_inline")
    return SimpleNamespace(**runpy.run_path(str(NOTEBOOKS[0].parents[1] / "_extensions" / "notebook_pictures.py")))


def test_darkened_colours_are_those_of_the_page_for_greys_and_unchanged_for_hues(pictures):
    blue = (0.0, 0.447, 0.698)
    found = pictures.darkened([(1, 1, 1, 0.5), (0, 0, 0, 1), (*blue, 1)])
    np.testing.assert_allclose(found, [(*pictures.BACKGROUND, 0.5), (*pictures.INK, 1), (*blue, 1)])
    light_grey, dark_grey = pictures.darkened([(0.9, 0.9, 0.9), (0.2, 0.2, 0.2)])
    assert light_grey.max() < 0.2 < 0.6 < dark_grey.min()


def test_figure_has_a_picture_for_light_pages_and_one_for_dark_pages(pictures):
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    figure = Figure(figsize=(2, 2))
    left, right = figure.subplots(1, 2)
    left.imshow([[0, 1]], cmap=ListedColormap(["#EBEBEB", "#0072B2"]))
    right.imshow(np.full((2, 2, 3), 0.92))
    right.plot([0, 1], [0, 1], "o-", color="black", label="a line")
    right.legend()
    html = pictures.pictures_as_html(figure)
    found = re.findall(r'<img class="([\w-]+)" alt="" src="data:image/png;base64,([^"]+)">', html)
    assert [name for name, _ in found] == ["only-light", "only-dark"]
    light, dark = (imread(io.BytesIO(base64.b64decode(text)))[..., :3] for _, text in found)
    np.testing.assert_allclose(light[0, 0], 1)
    np.testing.assert_allclose(dark[0, 0], pictures.BACKGROUND, atol=0.01)
    # Nothing on a dark page is brighter than its text.
    assert dark.min(axis=-1).max() < max(pictures.INK) + 0.01
    line = right.lines[0]
    assert line.get_color() == line.get_markerfacecolor()
    np.testing.assert_allclose(line.get_color()[:3], pictures.INK)
