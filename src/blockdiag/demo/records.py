"""The rows that `demo --csv` writes: training losses, and the routing of a trained model.

Unlike timings, these do not depend on a GPU and can be produced on a CPU.
"""

import csv
import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """Training loss of one step of one model of a demo.

    Attributes:
        demo: the demo, named by its attention: "block_diagonal" or "moba".
        attention: the attention function of the model.
        step: step number, starting from 1.
        loss: mean of the step's batch before its update, nats per byte.
    """

    demo: str
    attention: str
    step: int
    loss: float
    device: str
    jax: str
    date: str


@dataclass(frozen=True, kw_only=True)
class RoutingRow:
    """How often the queries of a block choose a key block, in one held-out sequence of `demo --attention moba`.

    Attributes:
        layer, head: indices within the trained model.
        query_block, key_block: indices of both blocks; there are rows only for past key blocks and a query's own.
        block_size, top_k: keys of a block, and blocks of a query, its own included.
        share: fraction of the block's queries that chose the key block; 1 for the own block.
    """

    layer: int
    head: int
    query_block: int
    key_block: int
    block_size: int
    top_k: int
    share: float
    device: str
    jax: str
    date: str


def where_of(device: jax.Device) -> dict[str, str]:
    """Return the columns that record a row's origin: device, JAX version, date."""
    return {"device": device.device_kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as a CSV file with a header and floats with six significant digits; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()})


def read_table(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """Read the rows of a file written by `write_table`, with cells as text.

    Raises:
        ValueError: the file has other columns.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(columns):
            raise ValueError(f"{path} has columns {reader.fieldnames}, expected {list(columns)}; delete it")
        return list(reader)
