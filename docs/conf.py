"""Sphinx configuration; `./do docs` builds build/docs."""

project = "blockdiag"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
