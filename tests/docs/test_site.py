"""The site builds without warnings, loads nothing from the network, and matches the code."""

import inspect
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import blockdiag
import blockdiag.interop
import blockdiag.interop.flax
import blockdiag.torch
from blockdiag.fusion import gallery

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WALK = DOCS / "how_a_kernel_works.md"


class Page(HTMLParser):
    """The anchors and links of an HTML page, and the files that a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "source", "iframe") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "shortcut icon"):
            self.loaded.append(given["href"])

    def target(self, address: str) -> Path:
        """Return the file of a relative address."""
        path = unquote(urlsplit(address).path)
        return (self.path.parent / path).resolve() if path else self.path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site, built as by `./do docs` but without running the notebooks."""
    output = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-n", "-q", "-D", "nb_execution_mode=off", "-d", str(output / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, "-b", "html", str(DOCS), str(output / "html")]
    build = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert build.returncode == 0, build.stderr
    return output / "html"


def local(addresses):
    return [address for address in addresses if not urlsplit(address).scheme and not address.startswith("//")]


def public_names():
    torch_names = {name for name in vars(blockdiag.torch) if not name.startswith("_")}
    torch_names = {name for name in torch_names if not inspect.ismodule(getattr(blockdiag.torch, name))}
    adapters = {name for name, value in vars(blockdiag.interop.flax).items() if is_defined_in(value, "flax")}
    names = {
        "blockdiag": blockdiag.__all__,
        "blockdiag.interop": blockdiag.interop.__all__,
        "blockdiag.interop.flax": adapters,
        "blockdiag.fusion.gallery": gallery.__all__,
        "blockdiag.torch": torch_names,
    }
    return {f"{module}.{name}" for module, those in names.items() for name in those}


def is_defined_in(value, module):
    """Return whether a value is a public function of a module of `blockdiag.interop`."""
    is_here = getattr(value, "__module__", None) == f"blockdiag.interop.{module}"
    return inspect.isfunction(value) and is_here and not value.__name__.startswith("_")


# This is one test, because otherwise several test processes would each build the site.
def test_site_has_all_pages_live_links_and_public_names(site):
    from sphinx.util.inventory import InventoryFile

    pages = {path: Page(path) for path in site.rglob("*.html")}
    sources = [path for kind in ("*.md", "*.rst", "notebooks/*.py") for path in DOCS.glob(kind)]
    missing = [path for path in sources if (site / path.relative_to(DOCS)).with_suffix(".html") not in pages]
    assert not missing, "pages that are not on the site"

    dead = defaultdict(list)
    for page in pages.values():
        for address in local([*page.links, *page.loaded]):
            target, anchor = page.target(address), unquote(urlsplit(address).fragment)
            is_alive = target.exists() and (not anchor or target.suffix != ".html" or anchor in pages[target].anchors)
            if not is_alive:
                dead[page.path.name].append(address)
    assert not dead, "links that lead nowhere"

    remote = {address for page in pages.values() for address in page.loaded} - set(
        local(address for page in pages.values() for address in page.loaded)
    )
    assert all(address.startswith("data:") for address in remote), "what is loaded from the network"

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    documented = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    assert public_names() <= documented, "public names without a place in the reference"


def test_formula_with_braces_of_a_set_does_not_stretch_them():
    from docutils.utils.math import latex2mathml

    finish = runpy.run_path(str(DOCS / "_extensions" / "mathml.py"))["_with_plain_braces"]
    formula = finish(latex2mathml.tex2mathml(r"\{ a \} \cup \left\{ \frac{b}{c} \right\}", as_block=True))
    assert re.findall(r"<mo([^>]*)>([{}])", formula) == [
        (' stretchy="false"', "{"),
        (' stretchy="false"', "}"),
        ("", "{"),
        ("", "}"),
    ]


@pytest.fixture(scope="module")
def supported():
    return runpy.run_path(str(DOCS / "supported_tables.py"))


def test_supported_tables_match_the_implementations(supported):
    supported["main"](["--check"])


def test_check_after_a_changed_declaration_exits_with_an_error(supported, monkeypatch):
    from blockdiag.triton_kernels.block_diagonal import plans as block_diagonal

    takes = block_diagonal.supports
    monkeypatch.setattr(block_diagonal, "supports", lambda problem: "odd" if problem.head_dim == 24 else takes(problem))
    with pytest.raises(SystemExit, match=r"block_diagonal.md is not what the implementations declare"):
        supported["main"](["--check"])


@pytest.mark.parametrize(
    "taken, asked, words",
    [
        ([64], range(1, 100), "64"),
        ([1, 2, 3], range(1, 5), "up to 3"),
        ([2, 3], range(1, 5), "2 to 3"),
        ([8, 16, 24], range(1, 30), "multiples of 8, 8 to 24"),
        ([8, 24], range(1, 30), "8, 24"),
        ([16, 48], (16, 20, 48), "multiples of 16, 16 to 48"),
    ],
)
def test_numbers_are_summarised_as_ranges(supported, taken, asked, words):
    assert supported["_numbers"](taken, list(asked)) == words


def quotations(page: str) -> list[tuple[str, str]]:
    """Return the file and the text of every code quotation on a page."""
    blocks = r"^```\{code-block\} python\n:caption: (src/\S+)\n\n(.*?)\n```$"
    return re.findall(blocks, page, flags=re.DOTALL | re.MULTILINE)


def places(quotation: str, source: str) -> list[range]:
    """Return the ranges of lines in a source that equal a quotation at any indentation."""
    quoted, lines = quotation.split("\n"), source.split("\n")
    starts = range(len(lines) - len(quoted) + 1)
    here = [range(start, start + len(quoted)) for start in starts]
    return [lines_ for lines_ in here if textwrap.dedent("\n".join(lines[i] for i in lines_)) == quotation]


def test_quoted_code_occurs_once_in_its_source():
    quoted = quotations(WALK.read_text())
    assert len(quoted) > 10
    for file, text in quoted:
        assert len(places(text, (ROOT / file).read_text())) == 1, f"{file} has not, or not once:\n{text}"


def test_every_line_of_the_walkthrough_kernel_is_quoted():
    file = "src/blockdiag/triton_kernels/block_diagonal/forward.py"
    source = (ROOT / file).read_text()
    shown = {i for name, text in quotations(WALK.read_text()) if name == file for i in places(text, source)[0]}
    lines = source.split("\n")
    kernel = range(lines.index("@triton.jit"), len(lines))
    assert not [lines[i] for i in kernel if lines[i].strip() and i not in shown]


def test_places_of_a_wrong_quotation_is_empty():
    source = "def f(x):\n    y = x\n    return y\n"
    assert places("y = x\nreturn y", source) == [range(1, 3)]
    assert places("y = x + 1\nreturn y", source) == []
