"""Mask states of score tiles and of blocks of tiles: dead, partly masked, or full.

The interval of a block contains the intervals of its tiles. If a block is dead or full, so are all of its tiles. To
prove that no tile of a block is dead, unknown values are replaced by one possible choice, see `bounds`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.fusion.analysis.interval import FLOATS, Interval, is_bool
from blockdiag.fusion.analysis.leaf_ranges import Extent, Tiling
from blockdiag.fusion.analysis.range_analysis import bounds, tile_states
from blockdiag.fusion.frontend.trace import aval_of, body_of
from blockdiag.fusion.ir.factors import MASKED, Mask

DEAD, MASKED_TILE, FULL, UNDECIDED = 0, 1, 2, 3
"""States of a tile.

DEAD: the mask removes every score. MASKED_TILE: the mask must be applied. FULL: no mask changes a score.
UNDECIDED: a block whose tiles may have different states.
"""


@dataclass(frozen=True, eq=False)
class MaskStates:
    """Masks of a region, evaluated on score tiles.

    Attributes:
        program: computes a tile of scores, or a tile of weights in a region without a softmax.
        has_softmax: whether `program` computes scores.
        predicates: computes the predicates of `masks`. None: no tile is ever called full.
        masks: the selects between a score and a masking number.
        extents: one per leaf.
        fixed: the positions of leaves whose bounds are assumed, the same in every tile.
        tiling: the score tiles.
    """

    program: core.ClosedJaxpr
    has_softmax: bool
    predicates: core.ClosedJaxpr | None
    masks: tuple[Mask, ...]
    extents: tuple[Extent, ...]
    fixed: frozenset[int]
    tiling: Tiling

    def at(self, row: Any, column: Any, cell: Sequence[Any] = ()) -> Any:
        """Return the states of tiles, int8 [*batch, a, b].

        Args:
            row, column, cell: see `Extent.at`.
        """
        return self._states([x.at(row, column, cell) for x in self.extents], self.is_whole(column))

    def is_whole(self, column: Any) -> Any:
        """Return which key tiles, or blocks of them, have no key beyond the end; None if all tiles are whole.

        The end of the keys acts as a mask.
        """
        whole = self.tiling.columns // self.tiling.tile.columns
        return None if whole * self.tiling.tile.columns == self.tiling.columns else column < whole

    def of_blocks(self, row: Any, column: Any, cell: Sequence[Any]) -> Any:
        """Return the states of blocks, int8 [n, 1], which may be UNDECIDED.

        The extents must be those of the blocks, and the masks known while tracing.
        """
        leaves = [x.at(row, column, cell) for x in self.extents]
        states = self._states(leaves, self.is_whole(column))
        one = Interval(np.ones((1, 1)), np.ones((1, 1)))
        chosen = [one if place in self.fixed else leaf for place, leaf in enumerate(leaves)]
        found = bounds(self.program, chosen, unknown_is_one=True)[0]
        is_alive = found.low > MASKED if self.has_softmax else (found.low > 0) | (found.high < 0)
        is_settled = is_alive if self.predicates is None else is_alive & (states == FULL)
        return np.where(is_settled | (states == DEAD), states, UNDECIDED)

    def by_offset(self, cell: Sequence[Any]) -> Any:
        """Return the states of tiles by tile offset, int8 [offsets, 1], see `Tiling.offsets`.

        The masks must depend on distance alone. The ends of queries and keys are ignored.
        """
        tile = self.tiling.tile
        first, last = self.tiling.offsets
        offset = np.arange(first, last + 1)[:, None] * self.tiling.step
        starts = {"q": (np.maximum(offset, 0), tile.rows), "k": (np.maximum(-offset, 0), tile.columns)}
        leaves = []
        for extent in self.extents:
            if extent.line is None:
                leaves.append(extent.at_offsets(cell))
            else:
                start, size = starts[extent.line]
                leaves.append(Interval(extent.start + start, extent.start + start + size - 1))
        return self._states(leaves, None)

    def _states(self, leaves: Sequence[Interval], is_whole: Any) -> Any:
        found = bounds(self.program, leaves)[0]
        states = tile_states(found, dead_below=MASKED) if self.has_softmax else _nonzero(found)
        if self.predicates is None:
            return states
        kept: Any = True
        for mask, held in zip(self.masks, bounds(self.predicates, leaves), strict=True):
            kept = kept & (held.low >= 1 if mask.keeps else held.high <= 0)
        if is_whole is not None:
            kept = kept & is_whole.reshape((1,) * (kept.ndim - 2) + is_whole.shape)
        xp = np if isinstance(states, np.ndarray) and isinstance(kept, bool | np.ndarray) else jnp
        return xp.where(xp.logical_and(kept, states > 0), np.int8(FULL), states)

    @property
    def is_by_distance(self) -> bool:
        """Return whether the states depend on the distance between queries and keys alone."""
        kinds: list[str] = []
        for extent in self.extents:
            ends = (extent.interval.low, extent.interval.high)
            varies = any(max(np.shape(x)[-2:]) > 1 for x in ends)
            kinds.append(extent.line or ("distance" if extent.is_distance or not varies else "other"))
        lines = [x for x in self.extents if x.line is not None]
        most = max(self.tiling.rows, self.tiling.columns) + 2 * max((abs(x.start) for x in lines), default=0)
        programs = [self.program, *([] if self.predicates is None else [self.predicates])]
        return all(set(_kinds(x, kinds, most)) <= {"distance"} for x in programs)


def _nonzero(weight: Interval) -> Any:
    """Return which tiles may have nonzero weights, int8 in the form of `tile_states`."""
    is_zero = (weight.low == 0) & (weight.high == 0)
    return (~is_zero).astype(np.int8)


# Primitives that preserve positions, and primitives that compare or subtract two positions.
_SAME = frozenset(("broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient"))
_DIFFERENCES = frozenset(("sub", "eq", "ne", "lt", "le", "gt", "ge"))


def _kinds(jaxpr: core.ClosedJaxpr, given: Sequence[str], most: int) -> list[str]:
    """Classify the results of a program by their dependence on queries and keys.

    "q" or "k": numbers that grow by one with each query or key. "distance": depends on at most the distance between
    query and key. "other": anything else.

    Args:
        given: the kinds of the arguments.
        most: an upper bound of the magnitude of such numbers and of their differences.
    """
    known: dict[Any, str] = dict.fromkeys(jaxpr.jaxpr.constvars, "distance")
    known |= dict(zip(jaxpr.jaxpr.invars, given, strict=True))

    def kind_of(operand: Any) -> str:
        return "distance" if isinstance(operand, core.Literal) else known[operand]

    for equation in jaxpr.jaxpr.eqns:
        kinds = [kind_of(x) for x in equation.invars]
        body = body_of(equation)
        if body is not None:
            results = _kinds(body, kinds, most)
        else:
            results = [_kind(equation, kinds, most)] * len(equation.outvars)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [kind_of(x) for x in jaxpr.jaxpr.outvars]


def _kind(equation: core.JaxprEqn, kinds: Sequence[str], most: int) -> str:
    """Classify the result of one equation, see `_kinds`."""
    if set(kinds) <= {"distance"}:
        return "distance"
    name = equation.primitive.name
    dtypes = [aval_of(x).dtype for x in (*equation.invars, *equation.outvars)]
    if not all(is_bool(x) or _counts_to(x, most) for x in dtypes):
        return "other"
    if name in _SAME or name == "convert_element_type":
        return kinds[0]
    if name in _DIFFERENCES and set(kinds) == {"q", "k"}:
        return "distance"
    return "other"


def _counts_to(dtype: Any, most: int) -> bool:
    """Return whether a dtype represents all integers up to `most`, and their differences, exactly."""
    if dtype in FLOATS:
        return most <= 2 ** (jnp.finfo(dtype).nmant + 1)
    return bool(jnp.issubdtype(dtype, jnp.signedinteger)) and most <= jnp.iinfo(dtype).max
