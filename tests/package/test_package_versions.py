"""Tested versions, and distributions that install a package named `blockdiag`."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from blockdiag.common import versions
from blockdiag.common.versions import TESTED, VersionRange, other_distributions, release_numbers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("3.5.9", False),
        ("3.6", True),
        ("3.6.0", True),
        ("3.7.1+git1234", True),
        ("3.8.0", True),
        ("3.8.12", True),
        ("3.9.0.dev20260101", False),
        ("3.9.0", False),
        ("3.10.0", False),
        ("4.0", False),
    ],
)
def test_range_holds_every_patch_of_its_last_version(version, is_tested):
    assert (version in VersionRange("3.6", "3.8")) == is_tested


def test_version_range_may_start_at_a_patch():
    jax = VersionRange("0.11.1", "0.12")
    assert [version in jax for version in ("0.11.0", "0.11.1", "0.12.0.1", "0.13.0")] == [False, True, True, False]


def test_requirement_allows_what_is_tested_and_nothing_else():
    assert VersionRange("0.11.1", "0.12").requirement("jax") == "jax>=0.11.1,<0.13"
    assert VersionRange("2.11", "2.14").requirement("torch") == "torch>=2.11,<2.15"


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.14.1+cu130", (2, 14, 1)), ("3.9.0rc1", (3, 9, 0)), ("0.12.0.1", (0, 12, 0, 1))]
)
def test_release_numbers_returns_the_numbers_of_a_version(version, numbers):
    assert release_numbers(version) == numbers


def test_release_numbers_of_a_version_without_a_number_raises_value_error():
    with pytest.raises(ValueError, match="'unknown' does not start with a number"):
        release_numbers("unknown")


def declared_bounds() -> dict[str, tuple[str, str | None]]:
    """Return the lower and upper bounds of the requirements in pyproject.toml that have a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    pattern = r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9.]+)(?:,<([0-9.]+))?"
    found = (re.match(pattern, one) for one in requirements)
    return {match[1]: (match[2], match[3]) for match in found if match}


@pytest.mark.parametrize("package", ["jax", "triton", "torch"])
def test_tested_range_is_the_declared_one(package):
    lower, upper = declared_bounds()[package]
    assert TESTED[package].first == lower
    # An upper bound, if there is one, excludes exactly the untested versions.
    assert upper is None or TESTED[package].requirement(package) == f"{package}>={lower},<{upper}"


def test_installation_page_has_the_tested_versions():
    page = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| ([a-z, ]+) \| (\S+ to \S+) \|$", page, flags=re.MULTILINE)
    written = {package: ends for packages, ends in rows for package in packages.split(", ")}
    assert written == {package: str(tested) for package, tested in TESTED.items()}


def test_jaxlib_is_tested_in_the_versions_of_jax():
    assert TESTED["jaxlib"] == TESTED["jax"]


@pytest.mark.parametrize("package", sorted(TESTED))
def test_installed_version_is_a_tested_one(package):
    assert metadata.version(package) in TESTED[package]


def test_distribution_is_named_as_in_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == versions.DISTRIBUTION


def test_installed_version_of_a_missing_package_is_none():
    assert versions.installed_version("no-such-package-anywhere") is None
    assert versions.installed_version("jax") == metadata.version("jax")


def install(folder: Path, name: str, version: str, *files: str) -> None:
    """Write the files of a distribution and the metadata that pip records."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (information / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_other_distributions_finds_the_diagram_tool(packages):
    install(packages, "blockdiag", "3.0.0", "blockdiag/__init__.py", "blockdiag/parser.py")
    install(packages, "blockdiag_attn", "0.2.0", "blockdiag/__init__.py", "blockdiag/ops/paged/api.py")
    assert other_distributions() == {"blockdiag": "3.0.0"}


def test_other_distributions_of_this_library_alone_is_empty(packages):
    install(packages, "blockdiag-attn", "0.2.0", "blockdiag/__init__.py", "blockdiag/ops/paged/api.py")
    # A plugin of the diagram tool has a package of its own.
    install(packages, "blockdiagcontrib-math", "0.9.0", "blockdiagcontrib/math.py")
    assert other_distributions() == {}


def test_other_distributions_finds_every_distribution(packages):
    install(packages, "Block_Diag.Fork", "1.0", "blockdiag/__init__.py")
    install(packages, "blockdiag", "3.0.0", "blockdiag/__init__.py")
    assert other_distributions() == {"block-diag-fork": "1.0", "blockdiag": "3.0.0"}
