"""Gluon source of the Hopper forward kernel that streams keys and values through shared memory.

See lowering/streamed_schedule.py.

A program has a tile of queries. One warp loads keys and values through the copy engine, and two groups of four warps
compute. A group starts the scores of a chunk before the value product of the chunk before. That value product then
runs while the exponentials of the chunk are computed, as in FlashAttention-3 (Shah et al., 2024).
"""

import math

import jax.numpy as jnp

from blockdiag.fusion.analysis.tile_lists import Lists, Part
from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import GluonWriter, HopperKernel, gluon_source, print_function
from blockdiag.fusion.codegen.kernels import LIVE, LOG2_E, Source, Writer, cells_of, forward_outputs
from blockdiag.fusion.ir.factors import NO_KEY
from blockdiag.fusion.ir.layout import layout_of, shape_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region, leaves_of
from blockdiag.fusion.lowering.hopper import ROWS
from blockdiag.fusion.lowering.streamed_schedule import Streamed, streamed

NAME = "fused_forward_streamed"
_GROUP_ROWS = ROWS // 2
_MEMORY = "q_smem, key_ring, value_ring, passage, query_full, key_full, key_empty, value_full, value_empty, turns"
_LISTS = LIVE[:2]


class _StreamWriter(GluonWriter):
    """Writer of the kernel's functions."""

    def __init__(self, plan: Streamed) -> None:
        region = plan.region
        writer = Writer(region, "forward", Tile(_GROUP_ROWS, plan.chunk))
        super().__init__(region, writer, (plan.query, plan.key, plan.product))
        self.plan = plan
        # Converts scores to exponents of 2.
        self.unit = writer.factor * LOG2_E
        self.tiles_of = region.sizes["q"] // ROWS
        # Taking turns gains 4% with 64 features, where products with keys are short. With 128 it gains nothing or
        # loses 2%.
        self.takes_turns = plan.features <= 64
        self.lists = "".join(f", p_{x}" for x in _LISTS) if plan.lists else ""
        # The number of chunks; with lists, each program reads its own.
        self.count = "count" if plan.lists else "ROUNDS"
        self.output = "p_output" if plan.is_wide else "output"
        self.is_long |= plan.is_wide and math.prod(shape_of(region.out_dims, region.sizes)) >= 2**31
        self.limit = "" if plan.lists else ", ROUNDS: gl.constexpr"
        self.given_limit = "" if plan.lists else ", ROUNDS"

    def place(self) -> None:
        """Print the program's query tile, its batch indices, and with lists its number of chunks."""
        lists, region, tiles = self.plan.lists, self.region, self.tiles_of
        self.emit(f"own = gl.program_id(0) % {tiles}")
        self.emit(f"cell = gl.program_id(0) // {tiles}")
        if lists is None:
            self.decode("cell", region.batch)
            return
        self.emit(f"own = {tiles - 1} - own  # with a causal mask, the last query tiles take longest")
        self.decode("cell", region.batch)
        sizes = {label: region.sizes[label] for label in lists.labels}
        layout = layout_of([*sizes.values(), 1], [*((label,) for label in lists.labels), ()], sizes)
        self.emit(f"line = ({layout.base(lists.labels)}) * {tiles} + own")
        for text in lists.forms[0].setup("", "gl"):
            self.emit(text)
        self.emit("left = gl.load(p_live_counts + line * 2 + 1)")
        self.emit("# A line without live tiles computes one tile, whose result is dropped.")
        self.emit("count = gl.maximum(left, 1)")

    def chunk_at(self, lists: Lists | None, place: str, part: Part = "all") -> str:
        """Return the expression of the key chunk at a place of the loop."""
        return place if lists is None else lists.forms[0].tile("", "gl", place, part)


def _compute(own: _StreamWriter) -> None:
    """Print the function of a compute warp group."""
    emit, plan = own.emit, own.plan
    parameters = f"{_MEMORY}, {own.output}, p_log_sum{own.parameters()}{own.lists}{own.limit}, GROUP: gl.constexpr"
    print_function(own, f"def compute({parameters}):")
    emit(f'"""{_GROUP_ROWS} queries."""')
    emit(f"S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {plan.chunk}, 16])")
    emit(f"O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {plan.columns}, 16])")
    emit("dtype: gl.constexpr = q_smem.dtype")
    own.place()
    emit(f"o_q = own * {ROWS} + GROUP * {_GROUP_ROWS} + gl.arange(0, {_GROUP_ROWS}, gl.SliceLayout(1, S))")
    emit("r_q = o_q")
    rows = own.read(("row", "scalar"))
    emit(f"q_part = q_smem.slice(GROUP * {_GROUP_ROWS}, {_GROUP_ROWS})")
    emit(f"nothing = gl.zeros([{_GROUP_ROWS}, {plan.chunk}], gl.float32, S)")
    emit(f"output_tile = gl.zeros([{_GROUP_ROWS}, {plan.columns}], gl.float32, O)")
    emit("mbarrier.wait(query_full.index(0), 0)")
    _begin_scores(own, "0")
    _end_scores(own, "0", 0, rows, has_masks=True)
    emit("largest = gl.max(score, 1)")
    _weigh(own, "0")
    emit("total = partial_sums(power)")
    emit("P: gl.constexpr = gl.SliceLayout(1, total.type.layout)")
    emit("weights = gl.convert_layout(power.to(dtype), gl.DotOperandLayout(0, O, 2))")
    first = "1"
    if plan.lists is not None and plan.lists.has_full:
        emit("first = gl.maximum(gl.load(p_live_counts + line * 2), 1)")
        emit("# Tiles that no mask touches.")
        own.writer.loop("for chunk in range(1, first):", lambda: _step(own, rows, has_masks=False))
        first = "first"
    own.writer.loop(f"for chunk in range({first}, {own.count}):", lambda: _step(own, rows, has_masks=True))
    _add_values(own, f"{own.count} - 1")
    _end_values(own, f"{own.count} - 1")
    _finish(own, rows)


def _step(own: _StreamWriter, rows: dict[int, Value], *, has_masks: bool) -> None:
    """Print one loop step: scores and exponentials of a chunk, and the value product of the chunk before."""
    emit = own.emit
    _begin_scores(own, "chunk")
    _add_values(own, "chunk - 1")
    _end_scores(own, "chunk", 1, rows, has_masks=has_masks)
    emit("last = largest")
    emit("largest = gl.maximum(last, gl.max(score, 1))")
    _weigh(own, "chunk")
    emit(f"shrink = gl.exp2(last * {own.unit} - base)")
    emit("total = total * gl.convert_layout(shrink, P)[:, None] + partial_sums(power)")
    emit("later = gl.convert_layout(power.to(dtype), gl.DotOperandLayout(0, O, 2))")
    _end_values(own, "chunk - 1")
    emit("output_tile = output_tile * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]")
    emit("weights = later")


def _begin_scores(own: _StreamWriter, chunk: str) -> None:
    own.emit(f"k_part = wait_slot(key_ring, key_full, {chunk})")
    own.emit("products = warpgroup_mma(q_part, k_part.permute((1, 0)), nothing, use_acc=False, is_async=True)")


def _end_scores(own: _StreamWriter, chunk: str, under_way: int, rows: dict[int, Value], *, has_masks: bool) -> None:
    """Print the wait for score products, and the scores computed from them."""
    emit, plan = own.emit, own.plan
    score, plain = own.writer.scores
    root = score if has_masks or plain is None else plain
    assert root is not None
    columns = {}
    if any(leaf.role == "column" for leaf in leaves_of(root)):
        # The first place may belong to either part.
        has_parts = plan.lists is not None and plan.lists.has_full and chunk != "0"
        part: Part = "all" if not has_parts else "masked" if has_masks else "full"
        emit(f"tile = {own.chunk_at(plan.lists, chunk, part)}")
        emit(f"r_k = tile * {plan.chunk} + gl.arange(0, {plan.chunk}, gl.SliceLayout(0, S))")
        columns = own.read(("column",))
    emit(f"products = warpgroup_mma_wait({under_way}, deps=[products])")
    emit("thread_barrier()")
    emit(f"free_slot(key_empty, {chunk}, {plan.slots})")
    products = {len(own.region.leaves) - 1: Value("products", (_GROUP_ROWS, plan.chunk))}
    # Each loop has names of its own, because tiles elsewhere may have other dtypes.
    prefix = "x" if chunk == "0" else "y" if root is plain else "z"
    emit(f"score = {own.evaluate(root, own.tiles({**rows, **columns, **products}), prefix).name}")


def _weigh(own: _StreamWriter, chunk: str) -> None:
    emit = own.emit
    no_key = NO_KEY / own.writer.factor
    emit(f"base = gl.where(largest <= {no_key}, 0.0, largest) * {own.unit}  # rows that have seen no key yet")
    if own.takes_turns:
        emit("# One group computes exponentials while the other one's products are in flight.")
        emit(f"mbarrier.wait(turns.index(GROUP), {chunk} % 2 ^ (1 - GROUP))")
    emit(f"power = gl.exp2(score * {own.unit} - base[:, None])")
    if own.takes_turns:
        emit("mbarrier.arrive(turns.index(1 - GROUP), count=1)")


def _add_values(own: _StreamWriter, chunk: str) -> None:
    own.emit(f"v_part = wait_slot(value_ring, value_full, {chunk})")
    own.emit("output_tile = warpgroup_mma(weights, v_part, output_tile, is_async=True)")


def _end_values(own: _StreamWriter, chunk: str) -> None:
    own.emit("output_tile = warpgroup_mma_wait(0, deps=[output_tile])")
    own.emit("thread_barrier()")
    own.emit(f"free_slot(value_empty, {chunk}, {own.plan.slots})")


def _finish(own: _StreamWriter, rows: dict[int, Value]) -> None:
    emit, plan = own.emit, own.plan
    emit("total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S))")
    emit(
        f"is_empty = {'total == 0' if plan.lists is None else '(total == 0) | (left == 0)'}  # rows without keys are 0"
    )
    emit("norm = gl.convert_layout(gl.where(is_empty, 0.0, 1.0 / total), gl.SliceLayout(1, O))[:, None]")
    emit("# A selection, not a product: an unseen value may be NaN.")
    emit("output_tile = gl.where(norm == 0.0, 0.0, output_tile * norm)")
    if own.region.weight is not None:
        weight = own.evaluate(own.region.weight, own.tiles(rows), "w")
        name = weight.name
        if not weight.is_number:
            name = f"gl.convert_layout(gl.sum({name}, 1), gl.SliceLayout(1, O))[:, None]"
        emit(f"output_tile = output_tile * {name}")
    if plan.is_wide:
        _store_wide(own)
    else:
        emit(f"exit = passage.slice(GROUP * {_GROUP_ROWS}, {_GROUP_ROWS})")
        emit("exit.store(output_tile.to(dtype))")
        emit("fence_async_shared()")
        emit("thread_barrier()")
        at = own.at(plan.places["output"], f"own * {ROWS} + GROUP * {_GROUP_ROWS}")
        emit(f"tma_store(output, [{at}], exit)")
    emit(f'log_sum = gl.where(is_empty, float("-inf"), (largest * {own.unit} + gl.log2(total)) * 0.6931471805599453)')
    emit(f"gl.store(p_log_sum + {own.writer.row_place()}, log_sum)")
    if not plan.is_wide:
        emit("tma.store_wait(0)")
    emit()
    emit()


def _store_wide(own: _StreamWriter) -> None:
    """Print the store of results from registers, where four threads have 32 contiguous bytes."""
    layout, _ = own.writer.result_layout()
    first = f"own * {ROWS} + GROUP * {_GROUP_ROWS}"
    own.emit(f"o_r = {first} + gl.arange(0, {_GROUP_ROWS}, gl.SliceLayout(1, O))")
    own.emit(f"o_c = gl.arange(0, {own.plan.columns}, gl.SliceLayout(0, O))")
    at = f"{layout.base(own.region.batch)} + {own.writer.times('o_r[:, None]', 'q', layout)} + o_c[None, :]"
    own.emit(f"gl.store(p_output + {at}, output_tile)")


def _load(own: _StreamWriter) -> None:
    """Print the function of the load warp."""
    emit, plan = own.emit, own.plan
    print_function(own, f"def load({_MEMORY}, query, key, value{own.lists}{own.limit}):")
    emit('"""Fills the slots."""')
    own.place()
    emit(f"mbarrier.expect(query_full.index(0), {ROWS * plan.features * 2})")
    at = own.at(plan.places["query"], f"own * {ROWS}")
    emit(f"tma_load(query, [{at}], query_full.index(0), q_smem)")

    def body() -> None:
        emit(f"tile = {own.chunk_at(plan.lists, 'chunk')}")
        for name in ("key", "value"):
            at = own.at(plan.places[name], f"tile * {plan.chunk}")
            emit(f"load_slot({name}, {name}_ring, {name}_full, {name}_empty, chunk, {at})")

    own.writer.loop(f"for chunk in range({own.count}):", body)
    emit()
    emit()


def _entry(own: _StreamWriter) -> None:
    """Print the kernel function."""
    emit, plan = own.emit, own.plan
    pointers = own.parameters()
    print_function(own, f"def {NAME}(query, key, value, {own.output}{pointers}{own.lists}, p_log_sum{own.limit}):")
    through = "the chunks of keys and values in its list" if plan.lists else "ROUNDS chunks of keys and values"
    emit(f'"""One program: a tile of queries, and {through}."""')
    emit(f"q_smem = gl.allocate_shared_memory(query.dtype, [{ROWS}, {plan.features}], query.layout)")
    for name, width in (("key", plan.features), ("value", plan.columns)):
        shape = f"[{plan.slots}, {plan.chunk}, {width}]"
        emit(f"{name}_ring = gl.allocate_shared_memory(query.dtype, {shape}, {name}.layout)")
    exit_memory = f"gl.allocate_shared_memory(query.dtype, [{ROWS}, {plan.columns}], output.layout)"
    emit(f"passage = {exit_memory if plan.has_exit else 'q_smem'}")
    emit("query_full = make_barriers(1, 1)")
    for name in ("key", "value"):
        emit(f"{name}_full = make_barriers({plan.slots}, 1)")
        emit(f"{name}_empty = make_barriers({plan.slots}, 2)")
    emit(f"turns = {'make_barriers(2, 1)' if own.takes_turns else 'query_full'}")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    computing = f"{_MEMORY}, {own.output}, p_log_sum{pointers}{own.lists}{own.given_limit}"
    emit("gl.warp_specialize([")
    emit(f"    (compute, ({computing}, 0)),")
    emit(f"    (compute, ({computing}, 1)),")
    emit(f"    (load, ({_MEMORY}, query, key, value{own.lists}{own.given_limit})),")
    emit("], [4, 1], [240, 24])")


def streamed_kernel(region: Region, tile: Tile, lists: Lists | None) -> HopperKernel | None:
    """Return the streamed kernel of a region, None if the schedule does not apply.

    Args:
        region: an arranged region.
        tile, lists: the tile size and the lists of the plain kernel.
    """
    plan = streamed(region, tile, lists)
    if plan is None:
        return None
    own = _StreamWriter(plan)
    _compute(own)
    _load(own)
    _entry(own)
    tiles = own.tiles_of * cells_of(region, region.batch)
    leaves, places = region.leaves, plan.places
    listed = _LISTS if lists is not None else ()
    inputs = (*(f"leaf{i}" for i, leaf in enumerate(leaves) if leaf.source.key is not None), "value", *listed)
    text = gluon_source("free_slot, load_slot, partial_sums, wait_slot", own.writer.lines)
    moved = (
        ("query", f"leaf{leaves.index(plan.query)}", places["query"].shape, (ROWS, plan.features)),
        ("key", f"leaf{leaves.index(plan.key)}", places["key"].shape, (plan.chunk, plan.features)),
        ("value", "value", places["value"].shape, (plan.chunk, plan.columns)),
    )
    pointers = (*(f"leaf{i}" for i in own.pointers), *listed, "log_sum")
    if plan.is_wide:
        pointers = ("output", *pointers)
    else:
        moved = (*moved, ("output", "output", places["output"].shape, (_GROUP_ROWS, plan.columns)))
    # With lists, programs read their number of rounds from the lists.
    rounds = None if lists is not None else region.sizes["k"] // plan.chunk
    source = Source(text, NAME, inputs, forward_outputs(region), (tiles, 1, 1))
    return HopperKernel(source, moved, jnp.dtype(region.value.dtype).name, pointers, rounds, tiles, rounds)
