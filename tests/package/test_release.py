"""The release: the contents of sdist and wheel, and the demo from an installed wheel, away from the checkout."""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED = {"__pycache__", ".pytest_cache", ".ipynb_checkpoints"}
# Top-level names of a checkout that a release leaves out.
LEFT_OUT = {".ci", ".gitignore", "lab"}


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def build(folder: Path, target: str, output: Path) -> Path:
    """Build one distribution of the project in `folder`, as `pip` and `build` do."""
    code = f"""
import os, sys
os.chdir(sys.argv[1])
import hatchling.build
print(hatchling.build.build_{target}(sys.argv[2]))
"""
    output.mkdir(exist_ok=True)
    command = [sys.executable, "-c", code, str(folder), str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return output / result.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Return a wheel built from the unpacked sdist, which must contain everything that a build needs."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return build(unpacked, "wheel", folder / "dist")


def files_of(folder: Path) -> set[str]:
    """Return the paths of the files below a folder of the checkout, relative to its root."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not IGNORED & set(path.parts) and path.suffix != ".pyc"
    }


def tracked() -> set[str]:
    """Return the files that git tracks, or skip the test in an unpacked sdist, which has no git repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    result = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return {name for name in result.stdout.splitlines() if (ROOT / name).exists()}


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    information = f"blockdiag_attn-{version()}.dist-info"
    expected = {name.removeprefix("src/") for name in files_of(ROOT / "src" / "blockdiag")}
    assert {name for name in names if not name.startswith(f"{information}/")} == expected
    assert {name.removeprefix(f"{information}/") for name in names - expected} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "licenses/LICENSE",
    }
    assert "blockdiag/py.typed" in names
    assert not [name for name in names if re.search(r"/(tests?|lab|bench|benchmarks)/|\.(png|csv|pyc)$", name)]
    assert wheel.stat().st_size < 2_000_000


def test_distributions_are_named_after_the_project(sdist, wheel):
    assert sdist.name == f"blockdiag_attn-{version()}.tar.gz"
    assert wheel.name == f"blockdiag_attn-{version()}-py3-none-any.whl"


def test_wheel_needs_no_compiler(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tags = email.message_from_string(archive.read(f"blockdiag_attn-{version()}.dist-info/WHEEL").decode())
        names = archive.namelist()
    assert tags["Root-Is-Purelib"] == "true"
    assert tags.get_all("Tag") == ["py3-none-any"]
    suffixes = {Path(name).suffix for name in names if name.startswith("blockdiag/")}
    assert suffixes <= {".py", ".typed"}


def test_sdist_contains_tracked_files_except_ci_and_experiments(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    # The build adds its own metadata and keeps .gitignore.
    assert names - {"PKG-INFO", ".gitignore"} >= {
        name for name in tracked() if name.partition("/")[0] not in LEFT_OUT and name != "PKG-INFO"
    }
    assert {name.partition("/")[0] for name in names} == {
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "benchmarks",
        "constraints.txt",
        "do",
        "docs",
        "examples",
        "pyproject.toml",
        "src",
        "tests",
    }
    assert not [
        name for name in names if re.search(r"__pycache__|\.pyc$|\.egg-info|(^|/)(build|\.venv|\.cache)/", name)
    ]


def test_wheel_metadata_matches_the_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"blockdiag_attn-{version()}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert (metadata["Name"], metadata["Version"]) == ("blockdiag-attn", version())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.12"
    assert set(metadata.get_all("Provides-Extra")) == {"cuda", "torch", "flax", "cli", "versions", "test", "docs"}
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[A-Za-z0-9_-]+", line).group() for line in required} == {"jax", "jaxtyping", "numpy"}
    for operation in ("block-diagonal", "MoBA", "paged", "jax.numpy"):
        assert operation in metadata["Summary"]
    assert metadata.get_payload().startswith("# blockdiag")


def test_documentation_never_says_to_install_the_diagram_tool():
    texts = [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    wrong = re.compile(r"(?<!un)install '?blockdiag(?![\w-])|\"blockdiag\[")
    found = [(path.name, line) for path in texts for line in path.read_text().splitlines() if wrong.search(line)]
    assert not found


def test_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, flags=re.MULTILINE).group(1) == version()
    assert re.search(r"^license: (.*)$", citation, flags=re.MULTILINE).group(1) == "Apache-2.0"
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE).group(1) == version()
    assert f"| version | {version()} |" in (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return the Python of a new environment with the wheel and this environment's packages, but not the checkout."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    result = subprocess.run(
        [*pip, "--disable-pip-version-check", "--quiet"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # A line of a .pth file adds a folder to the path. Other .pth files in that folder, such as that of an editable
    # install, are ignored.
    (Path(packages) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # XLA's optimizations of programs that run once would take most of the time.
    environment = {**inherited, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "COLUMNS": "160"}
    return subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_installed_package_is_imported_from_the_wheel(installed, tmp_path):
    result = run(installed, tmp_path, "-c", "import blockdiag; print(blockdiag.__file__)")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(installed.parent.parent)
    assert str(ROOT) not in result.stdout


def test_doctor_names_a_distribution_that_has_overwritten_the_package(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # `pip install blockdiag` overwrites this file with the __init__.py of the diagram tool.
    (tmp_path / "blockdiag" / "__init__.py").write_text("__version__ = '3.0.0'\n")
    information = tmp_path / "blockdiag-3.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: blockdiag\nVersion: 3.0.0\n")
    (information / "RECORD").write_text("blockdiag/__init__.py,,\n")
    result = run(Path(sys.executable), tmp_path, "-m", "blockdiag", "doctor", "--quick")
    assert result.returncode == 0, result.stderr
    assert "blockdiag 3.0.0 and blockdiag-attn install a package of the same name" in result.stdout
    assert "pip uninstall blockdiag blockdiag-attn" in " ".join(result.stdout.split())
    assert f"blockdiag-attn    │ {version()}" in result.stdout


def test_demo_runs_from_the_installed_wheel(installed, tmp_path):
    result = run(installed, tmp_path, "-m", "blockdiag", "demo", "--steps", "2", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "held-out losses agree" in result.stdout
    assert (tmp_path / "blockdiag-demo.png").read_bytes().startswith(b"\x89PNG")
