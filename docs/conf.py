"""Sphinx configuration; `./do docs` builds build/docs."""

import builtins
import os
import re
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE / "_extensions"), str(_HERE.parent / "src")]
# Notebooks are run as on any machine: by the CPU, without a message about a GPU that is not there.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Their figures have a version for dark pages. Kernels are processes of their own.
os.environ["MPLBACKEND"] = "module://notebook_pictures"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_HERE / "_extensions"), os.environ.get("PYTHONPATH"))))
# Most of their time would be XLA's optimizations, of programs that run once on a few tokens.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

project = "blockdiag"
copyright = "the authors of blockdiag"
extensions = ["dark_images", "mathml", "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Python files are notebooks, but for these.
exclude_patterns = ["_extensions", "conf.py", "supported_tables.py"]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}

# A reference that leads nowhere is a warning, and `./do docs` makes warnings errors. What is documented elsewhere
# cannot be looked up, since the build does not use the network.
nitpicky = True
_EXCEPTIONS = {name for name, kind in vars(builtins).items() if isinstance(kind, type)}
nitpick_ignore = {("py:exc", name) for name in _EXCEPTIONS} | {("py:class", name) for name in _EXCEPTIONS}
nitpick_ignore |= {("py:class", "torch.nn.Module"), ("py:class", "torch.nn.modules.module.Module")}

# Notebooks are Python files (jupytext), executed with every build.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "code"
smartquotes = False
add_module_names = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# Names that share a description stay together.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = "blockdiag"
html_static_path = ["_static"]
html_css_files = ["blockdiag.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"


def _escape_stars(lines: list[str]) -> list[str]:
    """Stars of prose; those of code in backticks and of examples are left alone."""
    escaped, in_example = [], False
    for line in lines:
        in_example = line.lstrip().startswith(">>>") or (in_example and line.strip() != "")
        spans = [line] if in_example else re.split(r"(`+[^`]*`+)", line)
        escaped.append("".join(span if "`" in span or in_example else span.replace("*", r"\*") for span in spans))
    return escaped


def _arrange_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks, arranged before napoleon reads them.

    A star is a star, as in the shape [*batch, T]; and what is returned, or a property, has its type in the signature,
    so that what stands before a colon there is no type.
    """
    lines[:] = _escape_stars(lines)
    for heading, line in enumerate(lines[:-1]):
        if line.strip() == "Returns:":
            text = lines[heading + 1].lstrip()
            lines[heading + 1] = lines[heading + 1].replace(text, ": " + text)
    if what == "property":
        lines[0] = ": " + lines[0]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _arrange_docstring, priority=400)
