"""Gluon source of the Hopper forward kernel that keeps a pair bias in shared memory.

See lowering/resident_schedule.py.

A program has a tile of queries in every round. One warp loads queries, keys and values through the copy engine, and two
groups of four warps compute. Scores are accumulated onto the bias. A row of scores stays in registers, so its maximum
is known before the first exponential. Products of the next round start while results of the last one are written.
"""

from collections.abc import Callable, Sequence

from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import GluonPrinter, GluonWriter, HopperKernel, gluon_source, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Source, Writer, cells_of, forward_outputs, widening
from blockdiag.fusion.ir.factors import NO_KEY
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Node, Region, leaves_of
from blockdiag.fusion.lowering.hopper import ROWS
from blockdiag.fusion.lowering.resident_schedule import CHUNK, QUERY_SLOTS, Resident, resident
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

NAME = "fused_forward_resident"


class ResidentWriter(GluonWriter):
    """Writer of the functions of one resident kernel."""

    def __init__(self, region: Region, plan: Resident, writer: Writer | None = None) -> None:
        # Keys per score product: the more keys, the less often its left operand is read.
        self.chunk = 2 * CHUNK if plan.width == 128 and plan.part % (2 * CHUNK) == 0 else CHUNK
        writer = Writer(region, "forward", Tile(ROWS // 2, self.chunk)) if writer is None else writer
        super().__init__(region, writer, (plan.held, plan.query, plan.key))
        self.plan = plan
        self.parts = region.sizes["k"] // plan.part
        self.wide_keys = next_power_of_2(region.sizes["k"])
        # With 128 columns, products take as long as exponentials. A round takes 9% longer if groups then take turns.
        self.takes_turns = plan.width <= 64
        self.counts_keys = any(leaf.role == "column" and leaf.source.key is None for leaf in leaves_of(plan.others))

    def indices(self, cell: str | None, through: str | None) -> None:
        """Print `i_<label>` of batch labels, from a flat index of the bias's labels and one of the others."""
        for name, labels in ((cell, self.plan.cell), (through, self.plan.through)):
            if name is not None:
                self.decode(name, labels)

    def requested(self, roles: Sequence[str]) -> dict[int, Value]:
        """Print the values of leaves whose loads `request_terms` has started, as `read` would name them."""
        axis = {"row": self.writer.row, "column": self.writer.column}
        for i in self.pointers:
            leaf = self.region.leaves[i]
            if leaf.role in roles:
                self.emit(f"leaf{i} = (loaded{i}{widening(leaf)}){axis.get(leaf.role, '')}")
        return self.known(roles) | self.read(roles, counted=True)


_MEMORY = (
    "q_smem, ring, held, of_keys, ones, query_full, query_empty, part_full, part_empty, keys_full, held_full, turns"
)


def resident_source(region: Region, plan: Resident) -> Source:
    """Return the kernel. Its constexpr argument ROUNDS is the number of rounds per program."""
    own = ResidentWriter(region, plan)
    _compute(own)
    _load(own)
    _entry(own)
    return Source(
        gluon_source("free_slot, load_slot, partial_sums, wait_slot, widened", own.writer.lines),
        NAME,
        (*(f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None), "value"),
        forward_outputs(region),
        (region.sizes["q"] // ROWS * cells_of(region, plan.cell), 1, 1),
    )


def print_share(own: ResidentWriter, tiles: int) -> None:
    """Print the tile and the rounds of the program, which each warp group computes for itself."""
    emit, rounds = own.emit, cells_of(own.region, own.plan.through)
    emit("# Tiles that read the same arrays run side by side.")
    emit(f"own = gl.program_id(0) % {tiles}")
    emit(f"SHARES: gl.constexpr = ({rounds} + ROUNDS - 1) // ROUNDS")
    emit(f"first = gl.program_id(0) // {tiles} % SHARES * ROUNDS")
    emit(f"cell = gl.program_id(0) // ({tiles} * SHARES)")
    emit(f"count = gl.minimum(ROUNDS, {rounds} - first)")


def _compute(own: ResidentWriter) -> None:
    """Print the function of a compute warp group."""
    emit, plan, chunk = own.emit, own.plan, own.chunk
    chunks, per_part = own.region.sizes["k"] // chunk, plan.part // chunk
    width = plan.width
    print_function(own, f"def compute({_MEMORY}, output, p_log_sum{own.parameters()}, ROUNDS: gl.constexpr, "
              "GROUP: gl.constexpr):")  # fmt: skip
    emit(f'"""{ROWS // 2} queries of each round."""')
    emit(f"S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {chunk}, 16])")
    emit(f"O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {width}, 16])")
    emit("T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])")
    emit("dtype: gl.constexpr = q_smem.dtype")
    print_share(own, own.region.sizes["q"] // ROWS)
    own.indices("cell", None)
    emit(f"o_q = own * {ROWS} + GROUP * {ROWS // 2} + gl.arange(0, {ROWS // 2}, gl.SliceLayout(1, S))")
    emit("r_q = o_q")
    emit("mbarrier.wait(held_full.index(0), 0)")
    own.writer.loop("for round in range(count):", lambda: _round(own, chunks, per_part))
    emit("tma.store_wait(0)")
    emit()
    emit()


def _round(own: ResidentWriter, chunks: int, per_part: int) -> None:
    emit, plan, region, parts = own.emit, own.plan, own.region, own.parts
    slots, width = plan.slots, own.chunk
    held = region.leaves.index(plan.held)
    own.indices(None, "(first + round)")
    emit(f"part = round * {2 * parts}")
    emit(f"place = round % {QUERY_SLOTS}")
    emit(f"q_part = q_smem.index(place).slice(GROUP * {ROWS // 2}, {ROWS // 2})")
    rows = own.read(("row", "scalar"))
    if plan.of_keys is not None:
        emit("keys_part = wait_slot(of_keys, keys_full, round)")
    emit("# Scores of all keys, each chunk begun from its bias.")
    for chunk in range(chunks):
        columns = {}
        if own.counts_keys:
            emit(f"r_k = {chunk * width} + gl.arange(0, {width}, gl.SliceLayout(0, S))")
            columns = own.read(("column",), counted=True)
        emit(f"leaf{held} = widened(held.index({chunk}).slice(GROUP * {ROWS // 2}, {ROWS // 2}).load(S))")
        known = {**rows, **columns, held: Value(f"leaf{held}", (ROWS // 2, width))}
        start = own.evaluate(plan.others, own.tiles(known), f"x{chunk}_").name
        if plan.of_keys is not None:
            start += f" + keys_part.slice({chunk * width}, {width}).load(gl.SliceLayout(0, S))[None, :]"
        emit(f"start = {start}")
        if chunk == 0:
            emit(f"mbarrier.wait(query_full.index(place), round // {QUERY_SLOTS} % 2)")
        if chunk % per_part == 0:
            emit(f"k_part = wait_slot(ring, part_full, part + {chunk // per_part})")
        emit(f"s{chunk} = warpgroup_mma(q_part, k_part.slice({chunk % per_part * width}, {width}).permute((1, 0)), "
             "start, is_async=True)")  # fmt: skip
    emit("# The last round's result has been stored from its query's slot.")
    emit("tma.store_wait(0)")
    emit("thread_barrier()")
    emit(f"free_slot(query_empty, round + {QUERY_SLOTS - 1}, {QUERY_SLOTS}, round > 0)")
    largest = []
    for chunk in range(chunks):
        emit(f"s{chunk} = warpgroup_mma_wait({chunks - 1 - chunk}, deps=[s{chunk}])")
        emit(f"m{chunk} = gl.max(s{chunk}, 1)")
        largest.append(f"m{chunk}")
    emit("thread_barrier()")
    for part in range(parts):
        emit(f"free_slot(part_empty, part + {part}, {slots})")
    while len(largest) > 1:
        largest = [f"gl.maximum({', '.join(largest[:2])})", *largest[2:]]
    unit = plan.unit * LOG2_E
    emit(f"largest = {largest[0]}")
    emit(f"base = gl.where(largest <= {NO_KEY / plan.unit}, 0.0, largest)[:, None] * {unit}  # rows that see nothing")
    if own.takes_turns:
        emit("# One group computes exponentials while the other one's products are in flight.")
        emit("mbarrier.wait(turns.index(GROUP), round % 2 ^ (1 - GROUP))")
    _weigh(own, chunks, per_part, unit)
    _finish(own, unit)


def _weigh(own: ResidentWriter, chunks: int, per_part: int, unit: float) -> None:
    """Print exponentials, their products with values, and row sums, on tensor cores if the ones have room."""
    emit, plan, parts, slots = own.emit, own.plan, own.parts, own.plan.slots
    # With few slots, the next keys wait for the slot of the first values, which is freed early.
    is_early = slots < 2 * parts
    emit(f"output_tile = gl.zeros([{ROWS // 2}, {plan.width}], gl.float32, O)")
    if plan.has_ones:
        emit(f"sums = gl.zeros([{ROWS // 2}, 8], gl.float32, T)")
    under_way = "output_tile, sums" if plan.has_ones else "output_tile"
    for chunk in range(chunks):
        part = parts + chunk // per_part
        emit(f"power = gl.exp2(s{chunk} * {unit} - base)")
        if not plan.has_ones:
            emit(f"sums {'=' if chunk == 0 else '+='} partial_sums(power)")
        emit("power = power.to(dtype)")
        if chunk % per_part == 0:
            emit(f"v_part = wait_slot(ring, part_full, part + {part})")
        elif is_early and chunk // per_part > 0 and chunk % per_part == per_part - 1:
            emit(f"{under_way} = warpgroup_mma_wait({2 if plan.has_ones else 1}, deps=[{under_way}])")
            emit("thread_barrier()")
            emit(f"free_slot(part_empty, part + {part - 1}, {slots})")
        first = "use_acc=False, " if chunk == 0 else ""
        values = f"v_part.slice({chunk % per_part * own.chunk}, {own.chunk})"
        emit("factor = gl.convert_layout(power, gl.DotOperandLayout(0, O, 2))")
        emit(f"output_tile = warpgroup_mma(factor, {values}, output_tile, {first}is_async=True)")
        if plan.has_ones:
            emit("factor = gl.convert_layout(power, gl.DotOperandLayout(0, T, 2))")
            emit(f"sums = warpgroup_mma(factor, ones.permute((1, 0)), sums, {first}is_async=True)")
    if own.takes_turns:
        emit("thread_barrier()")
        emit("mbarrier.arrive(turns.index(1 - GROUP), count=1)")
    emit(f"{under_way} = warpgroup_mma_wait(0, deps=[{under_way}])")
    # The columns of a product with ones are equal, so the maximum selects any of them.
    emit(f"total = gl.convert_layout(gl.{'max' if plan.has_ones else 'sum'}(sums, 1), gl.SliceLayout(1, S))")
    emit("thread_barrier()")
    freed = range(parts - 1, parts) if is_early and per_part > 1 else range(parts)
    for part in freed:
        emit(f"free_slot(part_empty, part + {parts + part}, {slots})")


def _finish(own: ResidentWriter, unit: float) -> None:
    emit, plan = own.emit, own.plan
    emit("is_empty = total == 0  # rows that see no key are 0")
    emit("norm = gl.where(is_empty, 0.0, 1.0 / total)")
    emit("output_tile = output_tile * gl.convert_layout(norm, gl.SliceLayout(1, O))[:, None]")
    emit("# Staged in the query's slot, which is no longer read.")
    emit("q_part.store(output_tile.to(dtype))")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    at = own.at(plan.places["output"], f"own * {ROWS} + GROUP * {ROWS // 2}")
    emit(f"tma_store(output, [{at}], q_part)")
    emit(f'log_sum = gl.where(is_empty, float("-inf"), (largest * {unit} + gl.log2(total)) * 0.6931471805599453)')
    emit(f"gl.store(p_log_sum + {own.writer.row_place()}, log_sum)")


def _load(own: ResidentWriter) -> None:
    """Print the function of the load warp."""
    emit, plan, region = own.emit, own.plan, own.region
    keys, parts = region.sizes["k"], own.parts
    print_function(own, f"def load({_MEMORY}, query, key, value, bias{own.parameters()}, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots, for all rounds."""')
    print_share(own, own.region.sizes["q"] // ROWS)
    own.indices("cell", None)
    emit(f"mbarrier.expect(held_full.index(0), {ROWS * keys * 2})")
    for piece in range(keys // own.chunk):
        at = own.at(plan.places["held"], f"own * {ROWS}", piece * own.chunk)
        emit(f"tma_load(bias, [{at}], held_full.index(0), held.index({piece}))")

    if plan.of_keys is not None:
        begin_terms(own)

    def body() -> None:
        own.indices(None, "(first + round)")
        emit(f"part = round * {2 * parts}")

        def tile(name: str, number: int, part: int) -> None:
            at = own.at(plan.places[name], str(part * plan.part))
            emit(f"load_slot({name}, ring, part_full, part_empty, part + {number}, {at})")

        tile("key", 0, 0)
        if plan.of_keys is not None:
            # The keys have got a slot, so the round before last is over and its slot of key terms is free.
            store_terms(own, plan.of_keys, f"round % {QUERY_SLOTS}")
            emit("thread_barrier()")
            emit(f"mbarrier.arrive(keys_full.index(round % {QUERY_SLOTS}), count=1)")
        at = own.at(plan.places["query"], f"own * {ROWS}")
        emit(f"load_slot(query, q_smem, query_full, query_empty, round, {at})")
        for part in range(1, parts):
            tile("key", part, part)
        for part in range(parts):
            tile("value", parts + part, part)
        if plan.of_keys is not None:
            own.indices(None, "(first + gl.minimum(round + 1, count - 1))")
            request_terms(own)

    own.writer.loop("for round in range(count):", body)
    emit()
    emit()


def begin_terms(own: ResidentWriter, warps: int = 1) -> None:
    """Print the layout of a vector over all keys, spread over `warps`, and the first round's loads."""
    keys, wide = own.region.sizes["k"], own.wide_keys
    own.emit(f"C: gl.constexpr = gl.BlockedLayout([1, {wide // 32 // warps}], [1, 32], [1, {warps}], [1, 0])")
    lines = f"gl.arange(0, {wide}, gl.SliceLayout(0, C))"
    own.emit(f"r_k = {lines if wide == keys else f'gl.minimum({lines}, {keys - 1})'}")
    own.indices(None, "first")
    request_terms(own)


def request_terms(own: ResidentWriter, roles: Sequence[str] = ("column", "scalar")) -> None:
    """Print loads of the leaves of key or query terms in their own dtype; widening them would wait for the loads."""
    for i in own.pointers:
        leaf, layout = own.region.leaves[i], own.writer.layouts[i]
        if leaf.role in roles:
            label = {"row": "q", "column": "k"}.get(leaf.role)
            line = "" if label is None else f" + {own.writer.times(f'r_{label}', label, layout)}"
            own.emit(f"loaded{i} = tl.load(p_leaf{i} + {layout.base(leaf.labels)}{line})")


def store_terms(own: ResidentWriter, terms: Node, slot: str) -> None:
    """Print the sum of the key terms, and its store to a slot."""
    emit, region = own.emit, own.region
    whole = Writer(region, "forward", Tile(CHUNK, own.wide_keys))
    known = {}
    for i, leaf in enumerate(region.leaves):
        if leaf.role not in ("column", "scalar"):
            continue
        known[i] = Value(f"leaf{i}", whole.tile_shape(leaf))
        column = "[None, :]" if leaf.role == "column" else ""
        if leaf.source.key is None:
            emit(f"leaf{i} = r_k[None, :]{widening(leaf)}")
        else:
            emit(f"leaf{i} = (loaded{i}{widening(leaf)}){column}")
    tiles = [known.get(i, Value("0", whole.tile_shape(leaf))) for i, leaf in enumerate(region.leaves)]
    found = GluonPrinter(emit, "y", whole.precision).run(whole.tile_program([terms]), tiles)[0]
    emit(f"terms = gl.zeros([1, {own.wide_keys}], gl.float32, C) + {found.name}")
    emit(f"of_keys.index({slot}).store(gl.sum(terms, 0))")


def print_ones(emit: Callable[[str], None], dtype: str, count: int) -> None:
    """Print the allocation of ones, [8, count], with which a product computes row sums."""
    swizzle = f"swizzle_byte_width={min(128, 2 * count)}"
    emit(f"LINES: gl.constexpr = gl.NVMMASharedLayout({swizzle}, element_bitwidth=16, rank=2)")
    emit("SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])")
    emit(f"ones = gl.allocate_shared_memory({dtype}, [8, {count}], LINES)")
    emit(f"ones.store(gl.full([8, {count}], 1.0, gl.float32, SPREAD).to({dtype}))")


def _entry(own: ResidentWriter) -> None:
    """Print the kernel function."""
    emit, plan, region = own.emit, own.plan, own.region
    keys, width = region.sizes["k"], plan.width
    pointers = own.parameters()
    print_function(own, f"def {NAME}(query, key, value, bias, output{pointers}, p_log_sum, ROUNDS: gl.constexpr):")
    emit('"""One program: a tile of queries, and ROUNDS of the indices along which the bias is the same."""')
    emit(f"q_smem = gl.allocate_shared_memory(query.dtype, [{QUERY_SLOTS}, {ROWS}, {width}], query.layout)")
    emit(f"ring = gl.allocate_shared_memory(query.dtype, [{plan.slots}, {plan.part}, {width}], key.layout)")
    emit(f"held = gl.allocate_shared_memory(bias.dtype, [{keys // own.chunk}, {ROWS}, {own.chunk}], bias.layout)")
    line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    emit(f"of_keys = gl.allocate_shared_memory(gl.float32, [{QUERY_SLOTS}, {own.wide_keys}], {line})")
    if not plan.has_ones:
        emit("ones = of_keys")
    else:
        print_ones(emit, "query.dtype", own.chunk)
    for name, count in (("query", QUERY_SLOTS), ("part", plan.slots)):
        emit(f"{name}_full = make_barriers({count}, 1)")
        emit(f"{name}_empty = make_barriers({count}, 2)")
    emit(f"keys_full = {'query_full' if plan.of_keys is None else f'make_barriers({QUERY_SLOTS}, 1)'}")
    emit("held_full = make_barriers(1, 1)")
    emit(f"turns = {'make_barriers(2, 1)' if own.takes_turns else 'held_full'}")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    computing = f"{_MEMORY}, output, p_log_sum{pointers}, ROUNDS"
    emit("gl.warp_specialize([")
    emit(f"    (compute, ({computing}, 0)),")
    emit(f"    (compute, ({computing}, 1)),")
    emit(f"    (load, ({_MEMORY}, query, key, value, bias{pointers}, ROUNDS)),")
    emit("], [4, 1], [240, 24])")


def resident_kernel(region: Region) -> HopperKernel | None:
    """Return the resident forward kernel of a region, None if the schedule does not apply.

    Args:
        region: an arranged region without lists of live tiles.
    """
    plan = resident(region)
    if plan is None:
        return None
    own = ResidentWriter(region, plan)
    leaves, width, places = region.leaves, plan.width, plan.places
    moved = (
        ("query", f"leaf{leaves.index(plan.query)}", places["query"].shape, (ROWS, width)),
        ("key", f"leaf{leaves.index(plan.key)}", places["key"].shape, (plan.part, width)),
        ("value", "value", places["value"].shape, (plan.part, width)),
        ("bias", f"leaf{leaves.index(plan.held)}", places["held"].shape, (ROWS, own.chunk)),
        ("output", "output", places["output"].shape, (ROWS // 2, width)),
    )
    source = resident_source(region, plan)
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum")
    return HopperKernel(source, moved, pointers, cells_of(region, plan.through), source.grid[0])
