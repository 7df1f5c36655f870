"""Sphinx configuration; `./do docs` builds build/docs."""

import re
from typing import Any

project = "blockdiag"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_typehints = "none"


def _escape_stars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks: a star is a star, as in the shape [*batch, T]."""
    lines[:] = [re.sub(r"(?<!\\)(?<!\*)\*(?!\*)", r"\\*", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _escape_stars)
