"""Formulas as MathML, which browsers show by themselves: no script, no font and no network when a page is read."""

import html
import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

_log = logging.getLogger(__name__)
_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", _NAMESPACE)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx; adds `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _visit_inline(translator: Any, node: nodes.Element) -> None:
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _visit_block(translator: Any, node: nodes.Element) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(_mathml(node, as_block=True))
    translator.body.append("</div>")
    raise nodes.SkipNode


def _with_plain_braces(formula: str) -> str:
    r"""Braces of a set keep their size: only those of \left, \right and cases, at the ends of a row, stretch."""
    # XML has no names for other characters, such as spaces.
    named = re.compile(r"&(?!(?:amp|lt|gt|quot|apos);)\w+;")
    root = ElementTree.fromstring(named.sub(lambda name: html.unescape(name[0]), formula))
    for parent in root.iter():
        inner = parent[1:-1] if parent.tag == f"{{{_NAMESPACE}}}mrow" else parent
        for child in inner:
            if (child.text or "").strip() in ("{", "}"):
                child.set("stretchy", "false")
    return ElementTree.tostring(root, encoding="unicode")


def _mathml(node: nodes.Element, as_block: bool) -> str:
    try:
        return _with_plain_braces(latex2mathml.tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        # Under -W this ends the build.
        _log.warning("a formula cannot be read: %s", error, location=node)
        return f"<code>{node.astext()}</code>"
