"""Shared writer of the two Hopper "rows" kernels that also accumulate the gradient of their resident bias.

A program has a tile of queries in every round. The gradient of its tile of the bias is a sum over the rounds, and stays
in registers. Two groups of four warps share each tile, each with half of the keys. See lowering/resident_schedule.py,
resident_pairs.py for narrow heads and resident_pairs_wide.py for wide ones.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from blockdiag.fusion.codegen.kernels import LOG2_E, Writer
from blockdiag.fusion.codegen.resident_writer import ResidentWriter, begin_terms, request_terms, store_terms
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import Place
from blockdiag.fusion.lowering.resident_schedule import Resident

NAME = "fused_rows_and_pairs_resident"
OWN = 64
"""The number of queries per program."""
SLOTS = 2
"""The least number of rounds whose query tiles fit, so that the next round's tiles arrive before a round ends."""


class PairsWriter(ResidentWriter):
    """Writer of the kernel's functions.

    Attributes:
        HELPERS: the names imported from `resident_tiles`.
        INPUTS: further arrays with queries that the kernel loads.
        PARTS: the number of parts in which a tile of the query gradient is stored.
        GATHERING: the number of warps that prepare per-query and per-key vectors.
        own_slots: the number of rounds whose query tiles fit.

    Args:
        columns: the columns of one score product.
        place: the matrix view of the query gradient.
        factor: the factor of the bias in the scores.
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
        """Return the name of an operand, or of its gradient, among the arrays of the launch."""
        return f"{kind}{self.region.leaves.index(getattr(self.plan, name))}"

    def moved(self, gradient: str) -> tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]:
        """Return the arrays that the copy engine moves, see `HopperKernel.moved`.

        Args:
            gradient: the name of the query gradient.
        """
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
        """Print loads of `rows` rows of arrays, from `offset` on; they arrive at the barrier `full`."""
        self.emit(f"mbarrier.expect({full}, {len(places) * rows * self.plan.width * 2})")
        for array, place in places.items():
            at = self.at(self.places[array], offset)
            self.emit(f"tma_load({array}, [{at}], {full}, {place})")

    def gather_lines(
        self, lines: str, of_keys: str, before: Callable[[], None], after: Callable[[], None], last: Callable[[], None]
    ) -> None:
        """Print the loop that prepares per-query and per-key vectors for all rounds, loading one round ahead.

        Args:
            lines, of_keys: the indices in shared memory of a round's per-query and per-key vectors.
            before: prints code that runs before the vectors are stored.
            after: prints code that runs after they are stored.
            last: prints code that runs after the loads of the next round are issued.
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
        """Print the load of the log-sum-exps of a round's queries."""
        self.emit(f"o_q = own * {OWN} + gl.arange(0, {OWN}, B)")
        self.emit(f"loaded_sum = tl.load(p_log_sum + {self.writer.row_place()})")

    def store_bias(self, sums: Mapping[int, str], layout: str = "S") -> None:
        """Print the store of a group's sums for the bias.

        Args:
            sums: the name of each sum, by its first column within the group.
            layout: the layout of the sums.
        """
        columns = self.writer.tile.columns
        name = f"p_{self.array('held', 'grad')}"
        target = f"{name} + gl.program_id(0).to(gl.int64) * {OWN * self.keys}"
        self.emit(f"p_tile = {target} + GROUP * {self.keys // 2}")
        self.emit(f"o_q = gl.arange(0, {OWN}, gl.SliceLayout(1, {layout}))[:, None] * {self.keys}")
        self.emit(f"o_k = gl.arange(0, {columns}, gl.SliceLayout(0, {layout}))[None, :]")
        factor = "" if self.factor == 1 else f" * {self.factor}"
        for first, found in sums.items():
            self.emit(f"gl.store(p_tile + o_q + o_k + {first}, ({found}{factor}).to({name}.dtype.element_ty))")
