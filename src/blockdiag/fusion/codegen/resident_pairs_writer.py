"""What the two backward kernels by rows share that also sum the gradient of the bias they keep, for Hopper.

A program has a tile of queries of every round, so the gradient of its tile of the bias is a sum over the rounds: it
stays in registers. Two groups of four warps share each tile, each with half of the keys. See
lowering/resident_schedule.py, resident_pairs.py for narrow heads and resident_pairs_wide.py for wide ones.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from blockdiag.fusion.codegen.kernels import LOG2_E, Writer
from blockdiag.fusion.codegen.resident_forward import ResidentWriter, begin_terms, request_terms, store_terms
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import Place
from blockdiag.fusion.lowering.resident_schedule import Resident

NAME = "fused_rows_and_pairs_resident"
OWN = 64
"""Queries of a program."""
SLOTS = 2
"""Rounds whose tiles of queries have room, at the least: the next one's are there before one ends."""


class PairsWriter(ResidentWriter):
    """Lines of the functions of the kernel.

    `HELPERS` are those that it has from `resident_tiles`, `INPUTS` the arrays of queries that it loads beside those of
    all, in `PARTS` a tile of queries' gradients leaves; `GATHERING` warps make lines, and `own_slots` rounds' tiles of
    queries have room.

    Args:
        columns: of scores that are one product.
        place: of the queries' gradient.
        factor: of the bias in the scores.
    """

    HELPERS: str
    INPUTS: tuple[str, ...] = ()
    PARTS: int = 1
    GATHERING: int = 1
    own_slots: int = SLOTS

    def __init__(self, region: Region, plan: Resident, columns: int, place: Place, factor: float) -> None:
        super().__init__(region, plan, Writer(region, "rows", Tile(OWN, columns)))
        self.place, self.factor = place, factor
        self.keys = region.sizes["k"]
        self.tiles_of = region.sizes["q"] // OWN
        self.places = {**plan.places, "cotangent": plan.places["output"]}

    def array(self, name: Literal["query", "key", "held"], kind: str = "leaf") -> str:
        """What an operand, or its gradient, is called among the arrays of the launch."""
        return f"{kind}{self.region.leaves.index(getattr(self.plan, name))}"

    def moved(self, gradient: str) -> tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]:
        """What the copy engine moves, see HopperKernel; `gradient`: what that of queries is called."""
        width, columns, places = self.plan.width, self.writer.tile.columns, self.places
        return (
            ("query", self.array("query"), places["query"].shape, (OWN, width)),
            *((name, name, places[name].shape, (OWN, width)) for name in ("cotangent", *self.INPUTS)),
            ("key", self.array("key"), places["key"].shape, (columns, width)),
            ("value", "value", places["value"].shape, (columns, width)),
            ("bias", self.array("held"), places["held"].shape, (OWN, columns)),
            ("d_query", gradient, self.place.shape, (OWN, width // self.PARTS)),
        )

    def load_tiles(self, full: str, places: Mapping[str, str], offset: str, rows: int) -> None:
        """So many rows of these arrays, from `offset` on, to their places; `full`: the barrier that tells."""
        self.emit(f"mbarrier.expect({full}, {len(places) * rows * self.plan.width * 2})")
        for array, place in places.items():
            at = self.at(self.places[array], offset)
            self.emit(f"tma_load({array}, [{at}], {full}, {place})")

    def gather_lines(
        self, lines: str, of_keys: str, before: Callable[[], None], after: Callable[[], None], last: Callable[[], None]
    ) -> None:
        """What warps do that make lines of queries and of keys for all rounds, each requested a round ahead.

        Args:
            lines, of_keys: the places of a round's lines in memory.
            before: prints what comes before lines are stored.
            after: what comes when they are there.
            last: what comes when those of the next round are on their way.
        """
        emit, terms = self.emit, self.plan.of_keys
        emit(f"B: gl.constexpr = gl.BlockedLayout([1], [32], [{self.GATHERING}], [0])")
        if terms is not None:
            begin_terms(self, self.GATHERING)
        self.indices(None, "first")
        self._request_lines()

        def body() -> None:
            self.indices(None, "(first + round)")
            emit(f"slot = round % {self.own_slots}")
            before()
            emit(f'lines.index({lines}).store(gl.where(loaded_sum == float("-inf"), 0.0, loaded_sum * {LOG2_E}))')
            if terms is not None:
                store_terms(self, terms, of_keys)
            emit("thread_barrier()")
            emit("mbarrier.arrive(lines_full.index(slot), count=1)")
            after()
            self.indices(None, "(first + gl.minimum(round + 1, count - 1))")
            if terms is not None:
                request_terms(self)
            self._request_lines()
            last()

        self.writer.loop("for round in range(count):", body)

    def _request_lines(self) -> None:
        """Load what the softmax left of a round's queries."""
        self.emit(f"o_q = own * {OWN} + gl.arange(0, {OWN}, B)")
        self.emit(f"loaded_sum = tl.load(p_log_sum + {self.writer.row_place()})")

    def store_bias(self, sums: Mapping[int, str], layout: str = "S") -> None:
        """Write what a group has summed for the bias: names, by the first column of each among the group's."""
        columns = self.writer.tile.columns
        name = f"p_{self.array('held', 'grad')}"
        target = f"{name} + gl.program_id(0).to(gl.int64) * {OWN * self.keys}"
        self.emit(f"p_tile = {target} + GROUP * {self.keys // 2}")
        self.emit(f"o_q = gl.arange(0, {OWN}, gl.SliceLayout(1, {layout}))[:, None] * {self.keys}")
        self.emit(f"o_k = gl.arange(0, {columns}, gl.SliceLayout(0, {layout}))[None, :]")
        factor = "" if self.factor == 1 else f" * {self.factor}"
        for first, found in sums.items():
            self.emit(f"gl.store(p_tile + o_q + o_k + {first}, ({found}{factor}).to({name}.dtype.element_ty))")
