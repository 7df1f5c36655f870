"""The table of operations, meshes and transformations in docs/several_gpus.md, generated from tests.

A test declares its cells by the marker `division`. The marker's arguments are columns of the table and may contain
parameters of the test in braces. The operation is the test's parameter `name`, a call of `op_calls`, unless the marker
has `operation=`. The mesh is the test's parameter `kind`, unless the marker has `kind=`.

    python -m tests.division.division_table            runs the tests and writes the table of those that pass
    python -m tests.division.division_table --check    fails if the page differs from the tests
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "several_gpus.md"
OPERATIONS = {
    "block_diagonal": "block_diagonal_attention",
    "fused_qkv": "fused_qkv_block_attention",
    "moba": "moba_attention",
    "moba_routing": "moba_routing",
    "to_block_lists": "moba_routing",
    "key_convolution": "key_convolution",
    "fuse": "fuse",
    "paged": "paged_attention",
    "moba_paged": "moba_paged_attention",
    "append": "append_to_pages",
    "merge": "merge_attention_states",
    "triton_call": "triton_call",
}
COLUMNS = (
    "batch", "heads", "fewer key heads", "elements", "tokens", "gradients", "checkpoint", "scan", "vmap", "export",
)  # fmt: skip
MESHES = {"automatic": "A", "explicit": "E", "manual": "M", "partly manual": "P"}

type Cell = tuple[str, str, str]
"""An operation, a column and a mesh."""


def cells_of(item: pytest.Item) -> list[Cell]:
    """Return the cells that a test declares.

    Raises:
        ValueError: the marker names an operation, a column or a mesh that the table does not have.
    """
    from tests.ops.op_calls import CALLS  # pytest must start first, because it rewrites the assertions of some plugins

    params = getattr(item, "callspec", None)
    given = dict(params.params) if params is not None else {}
    found = []
    for marker in item.iter_markers("division"):
        operation = str(marker.kwargs.get("operation", given.get("name"))).split(",")[0]
        kind = str(marker.kwargs.get("kind", given.get("kind")))
        for text in marker.args:
            wanted = text.format(**given)
            columns = [column for column in COLUMNS if wanted == column or wanted.startswith(f"{column} ")]
            if operation not in OPERATIONS or kind not in MESHES or len(columns) != 1:
                raise ValueError(f"{item.nodeid}: the table has no {(operation, wanted, kind)}")
            name = given.get("name")
            has_gradients = name not in CALLS or bool(CALLS[name].differentiated)
            if columns[0] != "gradients" or has_gradients:
                found.append((OPERATIONS[operation], columns[0], kind))
    return found


def table_of(cells: Iterable[Cell]) -> str:
    """Return the table in Markdown, with the meshes of each operation and column."""
    shown = set(cells)
    lines = [f"| operation | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for operation in dict.fromkeys(OPERATIONS.values()):
        entries = [
            " ".join(letter for kind, letter in MESHES.items() if (operation, column, kind) in shown)
            for column in COLUMNS
        ]
        lines.append(f"| `{operation}` | {' | '.join(entries)} |")
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def with_table(page: str, table: str) -> str:
    """Return the text of the page with its table replaced."""
    start, end = "<!-- division:start -->", "<!-- division:end -->"
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n{table}\n{end}", page, flags=re.DOTALL)


class Recorder:
    """Pytest plugin that records the cells of collected tests and of those that pass."""

    def __init__(self) -> None:
        self.cells: dict[str, list[Cell]] = {}
        self.collected: set[Cell] = set()
        self.passed: set[Cell] = set()
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep only tests with the marker that `./do test` runs, and record their cells."""
        items[:] = [
            item
            for item in items
            if item.get_closest_marker("division") is not None and item.get_closest_marker("exhaustive") is None
        ]
        self.cells = {item.nodeid: cells_of(item) for item in items if item.get_closest_marker("skip") is None}
        self.collected.update(cell for cells in self.cells.values() for cell in cells)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the cells of a test that has passed."""
        if report.when == "call" and report.passed:
            self.passed.update(self.cells.get(report.nodeid, ()))
        elif report.failed:
            self.failed.append(report.nodeid)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description="Write the table of docs/several_gpus.md from tests.")
    parser.add_argument("--check", action="store_true", help="fail if the page's table differs from the tests")
    is_check = parser.parse_args(arguments).check
    recorder = Recorder()
    files = [str(x) for x in sorted(Path(__file__).parents[1].rglob("test_*.py")) if "mark.division" in x.read_text()]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(["--collect-only", "-qq"] if is_check else [])]
    code = pytest.main([*options, *files], plugins=[recorder])
    if code != 0:
        sys.exit(f"pytest ended with {code}: {recorder.failed}")
    text = PAGE.read_text()
    wanted = with_table(text, table_of(recorder.collected if is_check else recorder.passed))
    if not is_check:
        PAGE.write_text(wanted)
    elif text != wanted:
        sys.exit(
            "the table of docs/several_gpus.md differs from the tests; run python -m tests.division.division_table"
        )


if __name__ == "__main__":
    main()
