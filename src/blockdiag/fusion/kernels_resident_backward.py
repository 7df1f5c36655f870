"""Gluon source of backward kernels that keep a bias of pairs in shared memory, for Hopper; see resident.py.

By rows and by columns they are one: a program has a tile of queries, or of keys, of every round and goes through the
other ones in chunks; scores are the product of what it has with the first array of a chunk, slopes (what the cotangent
is of each weight) with the second. One warp loads, two groups of four warps compute, each with 64 rows of the tile.
By columns tiles have keys first, so that probabilities and their gradients are a product's first factor as they lie in
registers.
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from blockdiag.fusion.emit import Value
from blockdiag.fusion.kernels import LOG2_E, Source, Tile, Writer, cells_of
from blockdiag.fusion.kernels_resident import (
    ResidentKernel,
    ResidentWriter,
    gluon_source,
    print_function,
    print_ones,
    print_share,
)
from blockdiag.fusion.layout import layout_of
from blockdiag.fusion.resident import SHARED_BYTES, Place, Resident, place_of, resident, terms_of
from blockdiag.fusion.tiles import value_columns, value_labels
from blockdiag.fusion.tree import Region, leaves_of

Side = Literal["rows", "columns"]

OWN = 128
"""Queries or keys of a program: two groups of warps with 64 each."""
MOST_OTHERS = 256
_MOST_SLOTS = 6
_FEWEST_SLOTS = 2
_AHEAD = 4
"""Chunks whose lines are on their way: memory takes longer than a chunk does."""
# Gradients of the first factors of scores, and of slopes.
_SUMS = ("sum_first", "sum_second")
_MEMORY = (
    "own_scores, own_slopes, chunk_scores, chunk_slopes, lines, staged, ones, held, own_full, own_empty, chunk_full, "
    "chunk_empty, held_full"
)


class _Backward(ResidentWriter):
    """Lines of the functions of the kernel.

    Args:
        plain: the kernel whose place this one takes.
        terms: of each leaf with a gradient beside the product's one: its place, and the factor of its term.
    """

    def __init__(self, region: Region, plan: Resident, side: Side, plain: Source, terms: dict[int, float]) -> None:
        is_columns = side == "columns"
        # Wide gradients leave few registers.
        self.chunk = 64 if plan.width <= 64 else 32
        tile = Tile(self.chunk, 64) if is_columns else Tile(64, self.chunk)
        super().__init__(region, plan, Writer(region, side, tile, flipped=is_columns))
        self.side: Side = side
        self.is_columns = is_columns
        self.name = f"fused_{side}_resident"
        self.label, self.other = ("k", "q") if is_columns else ("q", "k")
        # What scores and slopes are products of: the program's, and the chunks'.
        self.own_arrays = ("key", "value") if is_columns else ("query", "cotangent")
        self.chunk_arrays = ("query", "cotangent") if is_columns else ("key", "value")
        self.terms, self.outputs = terms, {x.name: x for x in plain.outputs}
        self.others = region.sizes[self.other]
        self.own_slots, self.slots = slots_of(plan.width, self.others, self.chunk)
        self.tiles_of = region.sizes[self.label] // OWN
        leaf = plan.key if is_columns else plan.query
        self.written = {f"grad{region.leaves.index(leaf)}": leaf.features}
        if is_columns:
            self.written["grad_value"] = tuple(value_columns(region))
        self.out_places = {name: self._out_place(name, lines) for name, lines in self.written.items()}
        self.places = {**plan.places, "cotangent": plan.places["output"]}

    def _out_place(self, name: str, lines: tuple[str, ...]) -> Place | None:
        written = self.outputs[name]
        layout = layout_of(written.shape, written.dims, self.region.sizes)
        return place_of(layout, written.shape, self.label, lines, self.region.sizes)

    def pointer_parameters(self) -> str:
        grads = "".join(f", p_grad{i}" for i in self.terms)
        return f"{self.parameters()}, p_log_sum, p_delta{grads}"

    def array_name(self, name: str) -> str:
        """What an operand is called among the arrays of the launch."""
        leaves = self.region.leaves
        return {"query": f"leaf{leaves.index(self.plan.query)}", "key": f"leaf{leaves.index(self.plan.key)}"}.get(
            name, name
        )


def slots_of(width: int, others: int, chunk: int) -> tuple[int, int]:
    """Pairs of tiles of the program's own, and of chunks, that there is room for."""
    pair, part = 2 * OWN * width * 2, 2 * chunk * width * 2 + 2 * chunk * 4
    room = SHARED_BYTES - OWN * others * 2 - 8 * chunk * 2 - 4 * OWN * 4 - _AHEAD * 2 * chunk * 4
    own_slots = 2 if room - 2 * pair >= 4 * part else 1
    return own_slots, min(_MOST_SLOTS, (room - own_slots * pair) // part)


def resident_backward(region: Region, side: Side, places: Sequence[int], plain: Source) -> ResidentKernel | None:
    """The kernel that takes the place of the plain one, None where the bias cannot stay.

    Args:
        region: arranged, and without lists of tiles.
        places: of the leaves whose gradients are asked for.
        plain: the other kernel.
    """
    plan = resident(region)
    sizes = region.sizes
    if plan is None or (side == "columns" and sizes["k"] % OWN) or max(sizes["q"], sizes["k"]) > MOST_OTHERS:
        return None
    leaf = plan.key if side == "columns" else plan.query
    terms = _terms(region, side, places)
    if terms is None or region.leaves.index(leaf) not in places:
        return None
    labels = set(region.batch)
    if set(leaf.labels) != labels or set(value_labels(region)) != labels:
        return None
    own = _Backward(region, plan, side, plain, terms)
    dtype = jnp.dtype(region.dtype).name
    is_written = all(place is not None for place in own.out_places.values())
    if not is_written or {own.outputs[name].dtype for name in own.written} != {dtype} or own.slots < _FEWEST_SLOTS:
        return None
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum", "delta", *(f"grad{i}" for i in terms))
    rounds = cells_of(region, plan.through)
    return ResidentKernel(
        _source(own), _moved(own), dtype, pointers, rounds, own.tiles_of * cells_of(region, plan.cell)
    )


def _terms(region: Region, side: Side, places: Sequence[int]) -> dict[int, float] | None:
    """The factor of each line of rows or columns with a gradient, None where one is not simply a term."""
    found: dict[int, float] = {}
    assert region.score is not None
    terms = terms_of(region.score)
    for i in places:
        leaf = region.leaves[i]
        if leaf.role in ("query", "key"):
            continue
        own = [(factor, node) for factor, node in terms if leaf in leaves_of(node)]
        if leaf.role != side.removesuffix("s") or any(node.leaf is not leaf for _, node in own):
            return None
        found[i] = sum(factor for factor, _ in own)
    return found


def _moved(own: _Backward) -> tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]:
    """What the copy engine moves; see ResidentKernel."""
    width = own.plan.width
    rows = own.others if own.is_columns else OWN
    found = [(x, own.array_name(x), own.places[x].shape, (OWN, width)) for x in own.own_arrays]
    found += [(x, own.array_name(x), own.places[x].shape, (own.chunk, width)) for x in own.chunk_arrays]
    held = f"leaf{own.region.leaves.index(own.plan.held)}"
    found.append(("bias", held, own.places["held"].shape, (rows, 64)))
    for name, place in own.out_places.items():
        assert place is not None
        found.append((f"d_{name}", name, place.shape, (64, width)))
    return tuple(found)


def _source(own: _Backward) -> Source:
    _compute(own)
    _load(own)
    _entry(own)
    region = own.region
    names = [f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None]
    return Source(
        gluon_source("free_slot, widened", own.writer.lines),
        own.name,
        (*names, "value", "log_sum", "cotangent", "delta"),
        tuple(own.outputs.values()),
        (own.tiles_of * cells_of(region, own.plan.cell), 1, 1),
    )


def _compute(own: _Backward) -> None:
    """What a group of warps does."""
    emit, plan = own.emit, own.plan
    targets = "".join(f", d_{name}" for name in own.written)
    header = f"def compute({_MEMORY}{targets}{own.pointer_parameters()}, ROUNDS: gl.constexpr, GROUP: gl.constexpr):"
    print_function(own, header)
    emit(f'"""64 {"keys" if own.is_columns else "queries"} of each round."""')
    emit(f"S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {own.chunk}, 16])")
    emit(f"D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {plan.width}, 16])")
    emit("T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])")
    emit("P: gl.constexpr = gl.DotOperandLayout(0, D, 2)")
    emit("dtype: gl.constexpr = own_scores.dtype")
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"r_{own.label} = own * {OWN} + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))")
    emit("mbarrier.wait(held_full.index(0), 0)")
    own.writer.loop("for round in range(count):", lambda: _round(own))
    emit("tma.store_wait(0)")
    emit()
    emit()


def _round(own: _Backward) -> None:
    emit, plan = own.emit, own.plan
    chunks = own.others // own.chunk
    own.indices(None, "(first + round)")
    known = own.read(("column" if own.is_columns else "row", "scalar"))
    # Long before they are needed, where registers allow.
    is_early = plan.width <= 64
    lines = [_read_lines(own, chunk) if is_early else {} for chunk in range(chunks)]
    emit(f"own_slot = round % {own.own_slots}")
    emit(f"mbarrier.wait(own_full.index(own_slot), round // {own.own_slots} % 2)")
    for name in ("scores", "slopes"):
        emit(f"{name}_own = own_{name}.index(own_slot).slice(GROUP * 64, 64)")
    if not own.is_columns:
        for i, name in enumerate(("base", "delta")):
            place = f"lines.index(own_slot * 2 + {i}).slice(GROUP * 64, 64)"
            emit(f"{name} = {place}.load(gl.SliceLayout(1, S))[:, None]")
    for name in _SUMS[: len(own.written)]:
        emit(f"{name} = gl.zeros([64, {plan.width}], gl.float32, D)")
    if own.terms:
        emit("sums = gl.zeros([64, 8], gl.float32, T)")
    for chunk in range(chunks):
        seen = {**known, **(lines[chunk] if is_early else _read_lines(own, chunk))}
        _begin_products(own, chunk, chunks, seen)
        if chunk == 0 and own.own_slots > 1:
            emit("# The last round's gradients have left their places meanwhile.")
            _free_own(own, f"round + {own.own_slots - 1}", "round > 0")
        _chunk(own, chunk)
    _finish(own, chunks)


def _free_own(own: _Backward, number: str, pred: str) -> None:
    emit = own.emit
    emit("tma.store_wait(0)")
    emit("gl.thread_barrier()")
    emit(f"free_slot(own_empty, {number}, {own.own_slots}, {pred})")


def _read_lines(own: _Backward, chunk: int) -> dict[int, Value]:
    """Lines of a chunk."""
    role = "row" if own.is_columns else "column"
    if not any(leaf.role == role for leaf in own.region.leaves):
        return {}
    own.emit(f"r_{own.other} = {chunk * own.chunk} + gl.arange(0, {own.chunk}, gl.SliceLayout(0, S))")
    found = {}
    for i, value in own.read((role,)).items():
        own.emit(f"line{i}_{chunk} = {value.name}")
        found[i] = Value(f"line{i}_{chunk}", value.shape)
    return found


def _begin_products(own: _Backward, chunk: int, chunks: int, known: dict[int, Value]) -> None:
    """The products that scores and slopes of a chunk are."""
    emit, plan, region, size = own.emit, own.plan, own.region, own.chunk
    held = region.leaves.index(plan.held)
    emit(f"at = round * {chunks} + {chunk}")
    emit(f"slot = at % {own.slots}")
    if own.is_columns:
        emit(f"leaf{held} = widened(held.index(GROUP).slice({chunk * size}, {size}).permute((1, 0)).load(S))")
    else:
        piece = f"held.index({chunk * size // 64}).slice(GROUP * 64, 64)"
        piece += f".slice({chunk * size % 64}, {size}, dim=1)" if size < 64 else ""
        emit(f"leaf{held} = widened({piece}.load(S))")
    tiles = own.tiles({**known, held: Value(f"leaf{held}", own.writer.turned(*_shape(own)))})
    start = own.evaluate(plan.others, tiles, f"x{chunk}_").name
    if plan.of_keys is not None:
        start += f" + {own.evaluate(plan.of_keys, tiles, f'y{chunk}_').name}"
    emit(f"start = {start}")
    emit(f"mbarrier.wait(chunk_full.index(slot), at // {own.slots} % 2)")
    emit("scores_chunk = chunk_scores.index(slot)")
    emit("slopes_chunk = chunk_slopes.index(slot)")
    emit("scores = warpgroup_mma(scores_own, scores_chunk.permute((1, 0)), start, is_async=True)")
    if own.is_columns:
        for i, name in enumerate(("base", "delta")):
            emit(f"{name} = lines.index(slot * 2 + {i}).load(gl.SliceLayout(0, S))[None, :]")
    emit(f"start = gl.zeros([64, {size}], gl.float32, S) - delta")
    emit("slopes = warpgroup_mma(slopes_own, slopes_chunk.permute((1, 0)), start, is_async=True)")


def _chunk(own: _Backward, chunk: int) -> None:
    """Probabilities and slopes of a chunk, and what they add to the gradients."""
    emit, plan = own.emit, own.plan
    emit("scores = warpgroup_mma_wait(1, deps=[scores])")
    if chunk > 0:
        emit("# The last chunk's products are done, too.")
        emit("gl.thread_barrier()")
        emit(f"free_slot(chunk_empty, at + {own.slots - 1}, {own.slots})")
    emit(f"power = gl.exp2(scores * {plan.unit * LOG2_E} - base)")
    first = "use_acc=False, " if chunk == 0 else ""
    if own.is_columns:
        emit("factor = gl.convert_layout(power.to(dtype), P)")
        emit(f"sum_second = warpgroup_mma(factor, slopes_chunk, sum_second, {first}is_async=True)")
    emit(f"slopes = warpgroup_mma_wait({1 if own.is_columns else 0}, deps=[slopes])")
    emit("slopes = (slopes * power).to(dtype)")
    emit(f"sum_first = warpgroup_mma(gl.convert_layout(slopes, P), scores_chunk, sum_first, {first}is_async=True)")
    if own.terms:
        emit("factor = gl.convert_layout(slopes, gl.DotOperandLayout(0, T, 2))")
        emit(f"sums = warpgroup_mma(factor, ones.permute((1, 0)), sums, {first}is_async=True)")


def _shape(own: _Backward) -> tuple[int, int]:
    return own.writer.tile.rows, own.writer.tile.columns


def _finish(own: _Backward, chunks: int) -> None:
    """Gradients leave by way of the places of this group's own rows, which nobody reads any more."""
    emit, region = own.emit, own.region
    done = ", ".join([*_SUMS[: len(own.written)], *(["sums"] if own.terms else [])])
    emit(f"{done} = warpgroup_mma_wait(0, deps=[{done}])")
    emit("gl.thread_barrier()")
    emit(f"free_slot(chunk_empty, round * {chunks} + {chunks - 1}, {own.slots})")
    emit(f"scores_own.store((sum_first * {own.plan.unit}).to(dtype))")
    if own.is_columns:
        emit("slopes_own.store(sum_second.to(dtype))")
    emit("fence_async_shared()")
    emit("gl.thread_barrier()")
    for (name, place), memory in zip(own.out_places.items(), ("scores_own", "slopes_own"), strict=False):
        assert place is not None
        at = own.at(place, f"own * {OWN} + GROUP * 64")
        emit(f"tma.async_copy_shared_to_global(d_{name}, [{at}], {memory})")
    if own.terms:
        # Columns of a product with ones are equal.
        emit("sums = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, S))")
    for i, factor in own.terms.items():
        written = own.outputs[f"grad{i}"]
        layout = layout_of(written.shape, written.dims, region.sizes)
        at = f"p_grad{i} + {layout.base(region.batch)} + {own.writer.times(f'r_{own.label}', own.label, layout)}"
        emit(f"tl.store({at}, (sums * {factor}).to(p_grad{i}.dtype.element_ty))")
    if own.own_slots == 1:
        _free_own(own, "round", "True")


def _load(own: _Backward) -> None:
    """What the warp does that loads."""
    emit = own.emit
    chunks = own.others // own.chunk
    arrays = ", ".join((*own.own_arrays, *own.chunk_arrays))
    print_function(own, f"def load({_MEMORY}, {arrays}, bias, p_log_sum, p_delta, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots, for all rounds."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"mbarrier.expect(held_full.index(0), {OWN * own.others * 2})")
    for piece in range(2 if own.is_columns else own.others // 64):
        place = own.places["held"]
        if own.is_columns:
            at = own.at(place, "0", f"own * {OWN} + {piece * 64}")
        else:
            at = own.at(place, f"own * {OWN}", piece * 64)
        emit(f"tma.async_copy_global_to_shared(bias, [{at}], held_full.index(0), held.index({piece}))")
    emit("C: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])")
    last = f"count * {chunks} - 1"
    if own.is_columns:
        for step in range(_AHEAD):
            _copy_lines(own, f"gl.minimum({step}, {last})", str(step))
    else:
        own.indices(None, "first")
        _request_lines(own)

    def body() -> None:
        emit(f"round = step // {chunks}")
        own.indices(None, "(first + round)")
        emit(f"if step % {chunks} == 0:")
        own.writer.depth += 1
        emit(f"slot = round % {own.own_slots}")
        emit(f"mbarrier.wait(own_empty.index(slot), round // {own.own_slots} % 2 ^ 1)")
        _load_pair(own, "own", own.own_arrays, f"own * {OWN}", OWN)
        if not own.is_columns:
            _hand_over(own, "own_full")
            own.indices(None, "(first + gl.minimum(round + 1, count - 1))")
            _request_lines(own)
            own.indices(None, "(first + round)")
        own.writer.depth -= 1
        emit(f"slot = step % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), step // {own.slots} % 2 ^ 1)")
        _load_pair(own, "chunk", own.chunk_arrays, f"step % {chunks} * {own.chunk}", own.chunk)
        if own.is_columns:
            emit(f"async_copy.wait_group({_AHEAD - 1})")
            emit("gl.thread_barrier()")
            for i, name in enumerate(("sum", "delta")):
                emit(f"loaded_{name} = staged.index(step % {_AHEAD} * 2 + {i}).load(C)")
            _hand_over(own, "chunk_full")
            _copy_lines(own, f"gl.minimum(step + {_AHEAD}, {last})", f"step % {_AHEAD}")

    own.writer.loop(f"for step in range(count * {chunks}):", body)
    emit()
    emit()


def _load_pair(own: _Backward, which: str, arrays: tuple[str, str], offset: str, rows: int) -> None:
    """Tiles of both products, into `slot`."""
    own.emit(f"mbarrier.expect({which}_full.index(slot), {2 * rows * own.plan.width * 2})")
    for array, name in zip(arrays, ("scores", "slopes"), strict=True):
        at = own.at(own.places[array], offset)
        memory = f"{which}_{name}.index(slot)"
        own.emit(f"tma.async_copy_global_to_shared({array}, [{at}], {which}_full.index(slot), {memory})")


def _request_lines(own: _Backward) -> None:
    """Load what the softmax left of the program's queries, and what their slopes are compared with."""
    own.emit(f"o_q = own * {OWN} + gl.arange(0, {OWN}, C)")
    own.emit(f"loaded_sum = tl.load(p_log_sum + {own.writer.row_place()})")
    own.emit(f"loaded_delta = tl.load(p_delta + {own.writer.row_place()})")


def _copy_lines(own: _Backward, step: str, slot: str) -> None:
    """Begin to copy the lines of a chunk of queries."""
    emit = own.emit
    chunks = own.others // own.chunk
    emit(f"later = {step}")
    own.indices(None, f"(first + later // {chunks})")
    emit(f"o_q = later % {chunks} * {own.chunk} + gl.arange(0, {own.chunk}, C)")
    for i, name in enumerate(("log_sum", "delta")):
        place = f"p_{name} + {own.writer.row_place()}"
        emit(f"async_copy.async_copy_global_to_shared(staged.index({slot} * 2 + {i}), {place})")
    emit("async_copy.commit_group()")


def _hand_over(own: _Backward, full: str) -> None:
    """What was loaded, to those who compute."""
    emit = own.emit
    emit(f'lines.index(slot * 2).store(gl.where(loaded_sum == float("-inf"), 0.0, loaded_sum * {LOG2_E}))')
    emit("lines.index(slot * 2 + 1).store(loaded_delta)")
    emit("gl.thread_barrier()")
    emit(f"mbarrier.arrive({full}.index(slot), count=1)")


def _entry(own: _Backward) -> None:
    """The kernel itself."""
    emit = own.emit
    width, size = own.plan.width, own.chunk
    pointers = own.pointer_parameters()
    arrays = ", ".join((*own.own_arrays, *own.chunk_arrays))
    targets = "".join(f", d_{name}" for name in own.written)
    print_function(own, f"def {own.name}({arrays}, bias{targets}{pointers}, ROUNDS: gl.constexpr):")
    held = "keys" if own.is_columns else "queries"
    emit(f'"""One program: a tile of {held}, and ROUNDS of the indices along which the bias is the same."""')
    for which, names, shape in (
        ("own", own.own_arrays, f"[{own.own_slots}, {OWN}, {width}]"),
        ("chunk", own.chunk_arrays, f"[{own.slots}, {size}, {width}]"),
    ):
        for name, kind in zip(names, ("scores", "slopes"), strict=True):
            emit(f"{which}_{kind} = gl.allocate_shared_memory(query.dtype, {shape}, {name}.layout)")
    line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    count, length = (own.slots, size) if own.is_columns else (own.own_slots, OWN)
    emit(f"lines = gl.allocate_shared_memory(gl.float32, [{2 * count}, {length}], {line})")
    if own.is_columns:
        emit(f"staged = gl.allocate_shared_memory(gl.float32, [{2 * _AHEAD}, {size}], {line})")
    else:
        emit("staged = lines")
    shape = f"[2, {own.others}, 64]" if own.is_columns else f"[{own.others // 64}, {OWN}, 64]"
    emit(f"held = gl.allocate_shared_memory(bias.dtype, {shape}, bias.layout)")
    if own.terms:
        print_ones(emit, "query.dtype", size)
    else:
        emit("ones = lines")
    # Beside the copy engine's bytes, the lines that come with them.
    emit(f"own_full = make_barriers({own.own_slots}, {1 if own.is_columns else 2})")
    emit(f"own_empty = make_barriers({own.own_slots}, 2)")
    emit(f"chunk_full = make_barriers({own.slots}, {2 if own.is_columns else 1})")
    emit(f"chunk_empty = make_barriers({own.slots}, 2)")
    emit("held_full = make_barriers(1, 1)")
    emit("fence_async_shared()")
    emit("gl.thread_barrier()")
    computing = f"{_MEMORY}{targets}{pointers}, ROUNDS"
    emit("gl.warp_specialize([")
    emit(f"    (compute, ({computing}, 0)),")
    emit(f"    (compute, ({computing}, 1)),")
    emit(f"    (load, ({_MEMORY}, {arrays}, bias, p_log_sum, p_delta, ROUNDS)),")
    emit("], [4, 1], [240, 24])")
