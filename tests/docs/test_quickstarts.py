"""Each quickstart runs with only the packages that its first lines install."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages that other tests need but readers of a page may lack, by page.
MISSING = {
    "quickstart_jax": ("triton", "torch", "flax", "optax", "sklearn", "sphinx"),
    "quickstart_flax": ("triton", "torch", "sklearn", "sphinx"),
    "quickstart_torch": ("flax", "optax", "sklearn", "sphinx"),
}
# Code that hides packages from `import` and `find_spec` before anything else is imported.
HIDE = """
import importlib.abc, runpy, sys


class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hide())
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in MISSING else find_spec(name, *rest)
"""


def run(code: str, missing: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess:
    """Run a script as if some packages were not installed."""
    script = folder / "script.py"
    script.write_text(f"MISSING = {missing!r}\n{HIDE}\n{code}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    # XLA's optimizations of programs that run once would take most of the time.
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)


@pytest.mark.every_case
@pytest.mark.parametrize("page", MISSING)
def test_quickstart_runs_with_what_it_installs(page, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    result = run("\n".join(blocks), MISSING[page], tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]


def test_every_implementation_without_triton_gives_a_reason(tmp_path):
    code = """
from blockdiag.ops.registry import OPERATIONS

for operation in OPERATIONS.values():
    assert "triton is not installed" in operation.implementations["triton"].why_unavailable()
    assert operation.implementations["xla"].why_unavailable() is None
"""
    result = run(code, MISSING["quickstart_jax"], tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]


def test_blocked_packages_cannot_be_imported(tmp_path):
    result = run("import flax", ("flax",), tmp_path)
    assert result.returncode == 1
    assert "No module named 'flax'" in result.stderr


@pytest.mark.parametrize("page", MISSING)
def test_quickstart_install_commands_name_existing_extras(page):
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'\.\[([a-z,]+)\]'", (ROOT / "docs" / f"{page}.md").read_text())
    assert named
    assert {extra for those in named for extra in those.split(",")} <= set(extras)
