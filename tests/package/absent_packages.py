"""A pytest plugin (`-p tests.package.absent_packages`) that hides packages for documentation, release and some tests.

It simulates a machine with the frameworks and pytest, but without the extras `test` and `docs`.
"""

import importlib.machinery
import sys

HIDDEN = {
    "docutils",
    "einops",
    "flatbuffers",
    "furo",
    "hatchling",
    "jupytext",
    "myst_nb",
    "myst_parser",
    "nbclient",
    "nbformat",
    "sklearn",
    "sphinx",
    "sphinx_copybutton",
}


class PathWithout(importlib.machinery.PathFinder):
    """A finder of installed packages that does not find the hidden ones."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


def hide() -> None:
    """Make this process unable to find the hidden packages."""
    sys.meta_path = [PathWithout if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]


def pytest_load_initial_conftests() -> None:
    hide()
