"""Resident schedule: a pair bias shared along a batch axis stays in shared memory.

Evoformer's row attention and triangle attention have such a bias: every row of the alignment adds the same pair bias. A
plain kernel reads the bias again for each row, as many bytes as keys and values have. If scores have the form

    unit * (query . key) + terms of keys + other terms

a program can hold a tile of the bias, loop over the batch axis, and accumulate the products onto the bias.
"""

from dataclasses import dataclass

import numpy as np

from blockdiag.fusion.ir.linear_terms import sum_of, terms_of
from blockdiag.fusion.ir.tree import Leaf, Node, Region, leaves_of, nodes_of
from blockdiag.fusion.lowering.hopper import ROWS, SHARED_BYTES, Place, count_of, is_narrow, places_of
from blockdiag.fusion.lowering.tile_program import value_columns
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

CHUNK = 64
"""Keys whose scores a warp group computes at once."""
MOST_KEYS = 256
"""The most keys: a row of scores stays in registers, and the whole bias tile in shared memory."""
_WIDTHS = (32, 64, 128)
_FEWEST_ROUNDS = 4
QUERY_SLOTS = 2
_PARTS = (256, 128, 64)
# Room for the keys of a round and the first part of its values.
_FEWEST_SLOTS = 3
# A matrix of ones for the widest products, which take two chunks.
_ONES_BYTES = 8 * 2 * CHUNK * 2


@dataclass(frozen=True, eq=False)
class Scores:
    """Decomposition of scores into a product and additive terms.

    Attributes:
        held: the bias, the leaf that stays in shared memory.
        query, key: the leaves of the product.
        unit: scores are `unit` times the sum that the kernel accumulates.
        of_keys: the terms without queries, divided by `unit`; None if there are none.
        others: the other terms, divided by `unit`, including `held`.
    """

    held: Leaf
    query: Leaf
    key: Leaf
    unit: float
    of_keys: Node | None
    others: Node


@dataclass(frozen=True, eq=False)
class Resident(Scores):
    """Resident schedule of a region.

    Attributes:
        cell, through: the batch labels that `held` has, and the others.
        places: the matrix views of "query", "key", "value", "held" and "output".
        width: the head dimension of queries, keys and values.
        part: the keys, or values, per slot.
        slots: the number of slots, shared by parts of keys and of values.
        has_ones: whether a matrix of ones fits, with which tensor cores compute row sums.
    """

    cell: tuple[str, ...]
    through: tuple[str, ...]
    places: dict[str, Place]
    width: int
    part: int
    slots: int
    has_ones: bool


def resident(region: Region) -> Resident | None:
    """Return the resident schedule of a region, None if it does not apply.

    Args:
        region: an arranged region without lists of live tiles.
    """
    keys = region.sizes["k"]
    is_tiled = region.sizes["q"] % ROWS == 0 and keys % CHUNK == 0 and keys <= MOST_KEYS
    scores = _scores_of(region)
    if not is_tiled or scores is None:
        return None
    width = count_of(region, value_columns(region))
    cell = tuple(x for x in region.batch if x in scores.held.labels)
    through = tuple(x for x in region.batch if x not in scores.held.labels)
    held = (scores.held.source.shape, scores.held.dims, "q", ("k",))
    places = places_of(region, scores.query, scores.key, held=held)
    part = next((x for x in _PARTS if keys % x == 0 and _slots(keys, width, x) >= _FEWEST_SLOTS), None)
    if not _is_narrow(region, scores, width) or count_of(region, through) < _FEWEST_ROUNDS:
        return None
    if places is None or part is None:
        return None
    slots = _slots(keys, width, part)
    has_ones = _bytes_once(keys, width) + slots * part * width * 2 + _ONES_BYTES <= SHARED_BYTES
    return Resident(
        **vars(scores), cell=cell, through=through, places=places, width=width, part=part, slots=slots,
        has_ones=has_ones,
    )  # fmt: skip


def _scores_of(region: Region) -> Scores | None:
    """Return scores as one product, one pair bias and terms of keys, None if they do not have this form."""
    if region.score is None or region.weight is not None or region.extras:
        return None
    terms = terms_of(region.score)
    products = [(factor, node) for factor, node in terms if node.kind == "product"]
    others = [(factor, node) for factor, node in terms if node.kind != "product"]
    biases = [leaf for leaf in region.leaves if leaf.role in ("score", "distance")]
    if len(products) != 1 or any(x.kind in ("product", "sum") for _, node in others for x in nodes_of(node)):
        return None
    ((unit, product),) = products
    query, key = (x.leaf for x in product.inputs)
    of_keys = [(factor, node) for factor, node in others if not _has_queries(node)]
    rest = [(factor, node) for factor, node in others if _has_queries(node)]
    is_apart = not any(_varies(leaf, "column") for _, node in rest for leaf in leaves_of(node))
    if not np.isfinite(unit) or unit <= 0 or len(biases) != 1 or biases[0].role != "score" or not is_apart:
        return None
    bias = sum_of(rest, unit)
    if query is None or key is None or bias is None:
        return None
    return Scores(biases[0], query, key, unit, sum_of(of_keys, unit), bias)


def _is_narrow(region: Region, scores: Scores, width: int) -> bool:
    """Return whether all arrays share one 16-bit floating dtype and a supported head dimension."""
    is_short = is_narrow(region, scores.query, scores.key, scores.held)
    return is_short and width in _WIDTHS and count_of(region, scores.query.features) == width


def rounds_each(rounds: int, tiles: int, multiprocessors: int, most_programs: int | None = None) -> int:
    """Return the number of rounds per program that minimises the estimated total time.

    The estimate counts the start of a program as one round. Ties go to more rounds per program.

    Args:
        rounds: the number of rounds per tile.
        tiles: the number of programs if each did all rounds of a tile.
        multiprocessors: the number of multiprocessors; each runs one program at a time.
        most_programs: the most programs, for kernels that need memory per program; at least `tiles` are allowed.
    """

    def time(chunk: int) -> int:
        return -(-tiles * -(-rounds // chunk) // multiprocessors) * (chunk + 1)

    def is_small(chunk: int) -> bool:
        return most_programs is None or tiles * -(-rounds // chunk) <= max(tiles, most_programs)

    return min(filter(is_small, range(1, rounds + 1)), key=lambda chunk: (time(chunk), -chunk))


def _has_queries(node: Node) -> bool:
    return any(leaf.role not in ("column", "scalar") for leaf in leaves_of(node))


def _varies(leaf: Leaf, role: str) -> bool:
    """Return whether a leaf has this role and is read from memory; the positions 0, 1, 2, ... are not."""
    return leaf.role == role and leaf.source.key is not None


def _slots(keys: int, width: int, part: int) -> int:
    """Return how many parts of keys and values fit, at most those of one and a half rounds."""
    return min(3 * (keys // part), (SHARED_BYTES - _bytes_once(keys, width)) // (part * width * 2))


def _bytes_once(keys: int, width: int) -> int:
    """Return the bytes of the bias, the queries and the terms of keys."""
    return ROWS * keys * 2 + QUERY_SLOTS * (ROWS * width * 2 + next_power_of_2(keys) * 4)
