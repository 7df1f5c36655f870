"""The package before any call: a cheap import without side effects, typing marker, correct metadata."""

import itertools
import re
import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return its output."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_after_jax_loads_only_itself():
    """Any other package would slow down the import; benchmarks/block_diagonal/figures.py measures the time."""
    run_python("""
import sys
import jax
before = set(sys.modules)
import blockdiag
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert loaded == {"blockdiag"}, loaded
""")


def test_import_writes_no_environment_variable():
    run_python("""
import os
import jax
before = dict(os.environ)
import blockdiag
assert dict(os.environ) == before
""")


def test_import_needs_neither_torch_nor_triton():
    run_python("""
import sys
import blockdiag
import blockdiag.interop
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "triton", "flax", "typer", "matplotlib"}, loaded
""")


def test_import_starts_no_backend():
    # JAX refuses this option once a backend has started.
    run_python("""
import jax
import blockdiag
jax.config.update("jax_num_cpu_devices", 2)
""")
    with pytest.raises(AssertionError, match="jax_num_cpu_devices"):
        run_python('import jax; jax.devices("cpu"); jax.config.update("jax_num_cpu_devices", 2)')


def test_op_runs_where_torch_triton_and_flax_are_not_installed():
    run_python("""
import importlib.machinery
import sys

HIDDEN = {"torch", "triton", "flax", "optax", "typer", "rich", "matplotlib"}


class PathWithout(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path = [
    PathWithout if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
]
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import blockdiag
import blockdiag.interop.flax
query = jnp.ones((1, 24, 2, 8))
output = jax.jit(lambda array: blockdiag.block_diagonal_attention(array, array, array, block_size=16))(query)
assert output.shape == query.shape
assert "install" in blockdiag.ops.block_diagonal.problem.BLOCK_DIAGONAL.implementations["triton"].load().available()
""")


def test_package_is_typed():
    assert resources.files("blockdiag").joinpath("py.typed").is_file()


def test_public_names_are_documented():
    import blockdiag

    assert {"block_diagonal_attention", "Rotary", "rotary_tables"} <= set(blockdiag.__all__) <= set(dir(blockdiag))
    for name in blockdiag.__all__:
        assert getattr(blockdiag, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'block_attention'"):
        blockdiag.block_attention  # noqa: B018


def test_torch_operators_import_no_jax():
    pytest.importorskip("torch")
    run_python("""
import sys
import blockdiag.torch
assert blockdiag.torch.block_diagonal_attention and blockdiag.torch.rotary_tables(8, 16)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"jax", "jaxlib", "flax", "triton"}, loaded
import blockdiag.torch.ops.block_diagonal.native
assert "jax" not in sys.modules
""")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_extras_are_the_expected_ones():
    assert set(project()["optional-dependencies"]) == {"cuda", "torch", "flax", "cli", "versions", "test", "docs"}


def constrained_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_name_every_dependency():
    pinned = {normalized(name) for name in constrained_versions()}
    wanted = itertools.chain(project()["dependencies"], *project()["optional-dependencies"].values())
    names = {normalized(re.match(r"[A-Za-z0-9._-]+", requirement).group()) for requirement in wanted}
    assert names - {"blockdiag-attn"} <= pinned


def test_installed_versions_are_the_tested_ones():
    constrained = constrained_versions()
    for name in ("jax", "jaxlib", "flax", "torch"):
        # torch and others carry local labels such as +cu130.
        assert metadata.version(name).partition("+")[0] == constrained[name], name
