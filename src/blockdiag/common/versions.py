"""Tested versions of other packages, and other distributions that install a package named `blockdiag`."""

import importlib.metadata
import re
from dataclasses import dataclass

DISTRIBUTION = "blockdiag-attn"
"""Name of the distribution, which `pip install` takes; `blockdiag` is the import package."""
IMPORT_PACKAGE = "blockdiag"


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The range of versions of a package that the tests were run with.

    Attributes:
        first: the lowest version, which pyproject.toml names as the lower bound.
        last: the highest version, as a prefix: "3.8" includes 3.8.1 and not 3.9.0.
    """

    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"

    def __contains__(self, version: str) -> bool:
        numbers, last = release_numbers(version), release_numbers(self.last)
        return numbers >= release_numbers(self.first) and numbers[: len(last)] <= last

    def requirement(self, package: str) -> str:
        """Return the requirement that makes pip choose a tested version, such as "triton>=3.6,<3.9"."""
        *start, end = release_numbers(self.last)
        return f"{package}>={self.first},<{'.'.join(map(str, (*start, end + 1)))}"


# The ends of each range are tested by `./do test-oldest` and `./do test-newest`.
TESTED = {
    "jax": VersionRange("0.11.1", "0.12"),
    "jaxlib": VersionRange("0.11.1", "0.12"),
    "triton": VersionRange("3.6", "3.8"),
    "torch": VersionRange("2.11", "2.14"),
}


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without suffixes: (2, 14, 1) for "2.14.1+cu130", (3, 9, 0) for "3.9.0rc1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"version {version!r} does not start with a number")
    return tuple(int(number) for number in found.group().split("."))


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def other_distributions() -> dict[str, str]:
    """Return the names and versions of other installed distributions whose files are in the `blockdiag` package.

    The diagram tool `blockdiag` on PyPI is one, and so is this library up to 0.1.0. Such a distribution and this one
    overwrite each other's `blockdiag/__init__.py`, and uninstalling one deletes the other's.
    """
    owners = importlib.metadata.packages_distributions().get(IMPORT_PACKAGE, [])
    names = {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} - {DISTRIBUTION}
    return {name: importlib.metadata.version(name) for name in sorted(names)}
