"""Sphinx configuration; `./do docs` builds build/docs."""

from typing import Any

project = "blockdiag"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_typehints = "none"


def _escape_shapes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write shapes as [*batch, T]; in reStructuredText that star begins an emphasis."""
    lines[:] = [line.replace("[*", r"[\*") for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _escape_shapes)
