"""Gluon source of backward kernels that keep a bias of pairs in shared memory, for Hopper; see resident.py.

By rows and by columns they are one: a program has a tile of queries, or of keys, of every round and goes through the
other ones in chunks; scores are the product of what it has with the first array of a chunk, slopes (what the cotangent
is of each weight) with the second. One warp loads, two groups of four warps compute, each with 64 rows of the tile.
By columns tiles have keys first, so that probabilities and their gradients are a product's first factor as they lie in
registers.
"""

import math
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
    request_terms,
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
_MOST_UNROLLED = 4
_AHEAD = 4
"""Chunks whose lines are on their way: memory takes longer than a chunk does."""
# Gradients of the first factors of scores, and of slopes.
_SUMS = ("sum_first", "sum_second")
_MEMORY = (
    "own_scores, own_slopes, chunk_scores, chunk_slopes, lines, staged, ones, held, passage, own_full, own_empty, "
    "chunk_full, chunk_empty, held_full, passage_free"
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
        # Of what threads read themselves: the same for all chunks.
        self.roles = ("column" if side == "columns" else "row", "scalar")
        self.line_role = "row" if side == "columns" else "column"
        self.is_columns = is_columns
        self.name = f"fused_{side}_resident"
        self.label, self.other = ("k", "q") if is_columns else ("q", "k")
        # What scores and slopes are products of: the program's, and the chunks'.
        self.own_arrays = ("key", "value") if is_columns else ("query", "cotangent")
        self.chunk_arrays = ("query", "cotangent") if is_columns else ("key", "value")
        self.terms, self.outputs = terms, {x.name: x for x in plain.outputs}
        self.others = region.sizes[self.other]
        self.own_slots, self.slots = slots_of(plan.width, self.others, self.chunk)
        # With room for two rounds the first products of the next one begin before this one's results are written.
        self.is_ahead = self.own_slots > 1
        self.chunks = self.others // self.chunk
        # Long rounds are loops, or compilation takes more than five seconds.
        self.unrolled = self.chunks if self.is_ahead else math.gcd(self.chunks, _MOST_UNROLLED)
        self.is_looped = self.unrolled < self.chunks
        self.behind = 2 if is_columns and self.chunks > 2 else 0
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

    def forgotten(self, slot: str) -> str:
        """A slot; wide gradients leave no registers for what is the same in each round, so that is computed again."""
        return slot if self.is_ahead else f"forgotten({slot})"

    def own_barrier(self, slot: str, group: str = "GROUP") -> str:
        """Which barrier of the program's own tiles is a group's: with one round in memory each has its own.

        Then one group loads while the other one computes.
        """
        return slot if self.is_ahead else f"{slot} * 2 + {group}"

    def held_shape(self) -> str:
        """Of the bias, as it is copied."""
        return f"[2, {self.others}, 64]" if self.is_columns else f"[{self.others // 64}, {OWN}, 64]"

    def number(self, chunk: int) -> str:
        """Of a chunk of the loop, where there is one, among all."""
        return f"(part * {self.unrolled} + {chunk})" if self.is_looped else str(chunk)

    def sums(self) -> list[str]:
        """Accumulators of a round."""
        return [*_SUMS[: len(self.written)], *(["sums"] if self.terms else [])]

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
    if room - 2 * pair >= 4 * part:
        return 2, min(_MOST_SLOTS, (room - 2 * pair) // part)
    return 1, min(_MOST_SLOTS, (room - pair - pair // 4) // part)


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
    rows_own = OWN if own.is_ahead else OWN // 2
    found = [(x, own.array_name(x), own.places[x].shape, (rows_own, width)) for x in own.own_arrays]
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
        gluon_source("forgotten, free_slot, widened", own.writer.lines),
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
    if own.is_ahead:
        _find_own(own, "0")
        _request_terms(own, "first")
        _begin_scores(own, 0, _requested_terms(own), "0")
        emit("scores = warpgroup_mma_wait(0, deps=[scores])")
    own.writer.loop("for round in range(count):", lambda: _round(own))
    emit("tma.store_wait(0)")
    if not own.is_ahead:
        emit("gl.thread_barrier()")
        emit("mbarrier.arrive(passage_free.index(1 - GROUP), count=1)")
    emit()
    emit()


def _round(own: _Backward) -> None:
    emit, plan = own.emit, own.plan
    if own.is_ahead:
        _request_terms(own, "(first + gl.minimum(round + 1, count - 1))")
        own.indices(None, "(first + round)")
        known = own.known(own.roles)
    else:
        own.indices(None, "(first + round)")
        known = own.read(own.roles)
    # Long before they are needed, where registers allow.
    is_early = plan.width <= 64
    lines = [_read_lines(own, chunk) if is_early and (chunk or not own.is_ahead) else {} for chunk in range(own.chunks)]
    _find_own(own, "round")
    for name in _SUMS[: len(own.written)]:
        emit(f"{name} = gl.zeros([64, {plan.width}], gl.float32, D)")
    if own.terms:
        emit("sums = gl.zeros([64, 8], gl.float32, T)")

    def part() -> None:
        for chunk in range(own.unrolled):
            is_begun = chunk == 0 and own.is_ahead
            if is_begun:
                _find_chunk(own, 0, "round")
            else:
                seen = {**known, **(lines[chunk] if is_early else _read_lines(own, chunk))}
                _begin_scores(own, chunk, seen, "round")
            _begin_slopes(own)
            if chunk == 0:
                _end_last_round(own)
            _chunk(own, chunk, is_begun)
        if own.is_looped:
            _end_products(own, 0)

    if own.is_looped:
        own.writer.loop(f"for part in range({own.chunks // own.unrolled}):", part)
    else:
        part()
    _finish(own)


def _end_last_round(own: _Backward) -> None:
    emit = own.emit
    emit("# The last round's gradients have left meanwhile.")
    emit("tma.store_wait(0)")
    emit("gl.thread_barrier()")
    if own.is_ahead:
        emit(f"free_slot(own_empty, round + {own.own_slots - 1}, {own.own_slots}, round > 0)")
    else:
        pred = "(round > 0) & (part == 0)" if own.is_looped else "round > 0"
        emit(f"mbarrier.arrive(passage_free.index(1 - GROUP), count=1, pred={pred})")


def _end_products(own: _Backward, later: int) -> None:
    """Wait for what chunks add to the gradients.

    Args:
        later: products begun after these.
    """
    done = ", ".join(own.sums())
    own.emit(f"{done} = warpgroup_mma_wait({later}, deps=[{done}])")
    own.emit("gl.thread_barrier()")
    own.emit(
        f"free_slot(chunk_empty, {'at' if own.is_looped else f'round * {own.chunks} + {own.chunks - 1}'}, {own.slots})"
    )


def _find_own(own: _Backward, number: str) -> None:
    """The program's own tiles of a round, when they are there."""
    emit = own.emit
    emit(f"own_slot = ({number}) % {own.own_slots}")
    emit(f"mbarrier.wait(own_full.index({own.own_barrier('own_slot')}), ({number}) // {own.own_slots} % 2)")
    if own.is_ahead:
        for name in ("scores", "slopes"):
            _name_own(own, name)
    if not own.is_columns:
        for i, name in enumerate(("base", "delta")):
            place = f"lines.index(own_slot * 2 + {i}).slice(GROUP * 64, 64)"
            emit(f"{name} = {place}.load(gl.SliceLayout(1, S))[:, None]")


def _request_terms(own: _Backward, through: str) -> None:
    """Begin to load what the first scores of a round begin with."""
    own.indices(None, through)
    request_terms(own, own.roles)
    if _has_lines(own):
        _count_lines(own, 0)
        request_terms(own, (own.line_role,))


def _requested_terms(own: _Backward) -> dict[int, Value]:
    if not _has_lines(own):
        return own.requested(own.roles)
    _count_lines(own, 0)
    return own.requested((*own.roles, own.line_role))


def _has_lines(own: _Backward) -> bool:
    return any(leaf.role == own.line_role for leaf in own.region.leaves)


def _count_lines(own: _Backward, chunk: int) -> None:
    own.emit(f"r_{own.other} = {own.number(chunk)} * {own.chunk} + gl.arange(0, {own.chunk}, gl.SliceLayout(0, S))")


def _read_lines(own: _Backward, chunk: int) -> dict[int, Value]:
    """Lines of a chunk."""
    if not _has_lines(own):
        return {}
    _count_lines(own, chunk)
    found = {}
    for i, value in own.read((own.line_role,)).items():
        own.emit(f"line{i}_{chunk} = {value.name}")
        found[i] = Value(f"line{i}_{chunk}", value.shape)
    return found


def _name_own(own: _Backward, name: str) -> None:
    own.emit(f"{name}_own = own_{name}.index({own.forgotten('own_slot')}).slice(GROUP * 64, 64)")


def _find_chunk(own: _Backward, chunk: int, number: str) -> None:
    """Where a chunk is."""
    emit = own.emit
    emit(f"at = ({number}) * {own.chunks} + {own.number(chunk)}")
    emit(f"slot = at % {own.slots}")
    for name in ("scores", "slopes"):
        emit(f"{name}_chunk = chunk_{name}.index({own.forgotten('slot')})")


def _begin_scores(own: _Backward, chunk: int, known: dict[int, Value], number: str) -> None:
    """The product that scores of a chunk are."""
    emit, plan, region, size = own.emit, own.plan, own.region, own.chunk
    held = region.leaves.index(plan.held)
    if own.is_columns:
        emit(f"leaf{held} = widened(held.index(GROUP * {own.chunks} + {own.number(chunk)}).permute((1, 0)).load(S))")
    else:
        piece = f"held.index({own.number(chunk)} * {size} // 64).slice(GROUP * 64, 64)"
        piece += f".slice({chunk * size % 64}, {size}, dim=1)" if size < 64 else ""
        emit(f"leaf{held} = widened({piece}.load(S))")
    tiles = own.tiles({**known, held: Value(f"leaf{held}", own.writer.turned(*_shape(own)))})
    start = own.evaluate(plan.others, tiles, f"x{chunk}_").name
    if plan.of_keys is not None:
        start += f" + {own.evaluate(plan.of_keys, tiles, f'y{chunk}_').name}"
    emit(f"start = {start}")
    _find_chunk(own, chunk, number)
    emit(f"mbarrier.wait(chunk_full.index(slot), at // {own.slots} % 2)")
    if not own.is_ahead:
        _name_own(own, "scores")
    emit("scores = warpgroup_mma(scores_own, scores_chunk.permute((1, 0)), start, is_async=True)")


def _begin_slopes(own: _Backward) -> None:
    """The product that slopes of a chunk are."""
    emit = own.emit
    if own.is_columns:
        for i, name in enumerate(("base", "delta")):
            emit(f"{name} = lines.index(slot * 2 + {i}).load(gl.SliceLayout(0, S))[None, :]")
    emit(f"start, _ = gl.broadcast(delta, gl.zeros([64, {own.chunk}], gl.float32, S))")
    if not own.is_ahead:
        _name_own(own, "slopes")
    emit("slopes = warpgroup_mma(slopes_own, slopes_chunk.permute((1, 0)), start, is_async=True)")


def _chunk(own: _Backward, chunk: int, is_begun: bool) -> None:
    """Probabilities and slopes of a chunk, and what they add to the gradients.

    Args:
        is_begun: whether its scores are there already.
    """
    emit, plan = own.emit, own.plan
    if not is_begun:
        emit("scores = warpgroup_mma_wait(1, deps=[scores])")
    if chunk > 0:
        emit("# The last chunk's products are done, too.")
        emit("gl.thread_barrier()")
        emit(f"free_slot(chunk_empty, at + {own.slots - 1}, {own.slots})")
    emit(f"power = gl.exp2(scores * {plan.unit * LOG2_E} - base)")
    first = "use_acc=False, " if chunk == 0 and not own.is_looped else ""
    if own.is_columns:
        emit("factor = gl.convert_layout(power.to(dtype), P)")
        emit(f"sum_second = warpgroup_mma(factor, slopes_chunk, sum_second, {first}is_async=True)")
    emit(f"slopes = warpgroup_mma_wait({1 if own.is_columns else 0}, deps=[slopes])")
    if not own.is_ahead and chunk == own.unrolled - 1:
        emit("# Of the program's own tiles there are no more products.")
        emit("gl.thread_barrier()")
        pred = f", pred=part == {own.chunks // own.unrolled - 1}" if own.is_looped else ""
        emit(f"mbarrier.arrive(own_empty.index(GROUP), count=1{pred})")
    emit("slopes = (slopes * power).to(dtype)")
    emit(f"sum_first = warpgroup_mma(gl.convert_layout(slopes, P), scores_chunk, sum_first, {first}is_async=True)")
    if own.terms:
        emit("factor = gl.convert_layout(slopes, gl.DotOperandLayout(0, T, 2))")
        emit(f"sums = warpgroup_mma(factor, ones.permute((1, 0)), sums, {first}is_async=True)")


def _shape(own: _Backward) -> tuple[int, int]:
    return own.writer.tile.rows, own.writer.tile.columns


def _finish(own: _Backward) -> None:
    """Gradients leave by way of shared memory."""
    emit, region = own.emit, own.region
    if own.is_ahead:
        emit("scores_done, slopes_done = scores_own, slopes_own")
        _find_own(own, "round + 1")
        _begin_scores(own, 0, _requested_terms(own), "round + 1")
        emit("scores_own, slopes_own = scores_done, slopes_done")
    if not own.is_looped:
        _end_products(own, int(own.is_ahead))
    factors = (f" * {own.plan.unit}", "")
    results = [f"({total}{factor}).to(dtype)" for total, factor in zip(_SUMS, factors, strict=True)]
    written = list(zip(own.out_places, results, strict=False))
    if own.is_ahead:
        # Of this group's own rows, which nobody reads any more.
        _write(own, written, ("scores_own", "slopes_own"))
    else:
        emit("# Groups take turns.")
        emit("mbarrier.wait(passage_free.index(GROUP), round % 2 ^ (1 - GROUP))")
        for i, one in enumerate(written):
            if i > 0:
                emit("tma.store_wait(0)")
                emit("gl.thread_barrier()")
            _write(own, [one], ("passage.index(0)",))
    if own.terms:
        # Columns of a product with ones are equal.
        emit("sums = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, S))")
    for i, factor in own.terms.items():
        written = own.outputs[f"grad{i}"]
        layout = layout_of(written.shape, written.dims, region.sizes)
        at = f"p_grad{i} + {layout.base(region.batch)} + {own.writer.times(f'r_{own.label}', own.label, layout)}"
        emit(f"tl.store({at}, (sums * {factor}).to(p_grad{i}.dtype.element_ty))")
    if own.is_ahead:
        emit("# The compiler wants no product under way where a loop begins again.")
        emit("scores = warpgroup_mma_wait(0, deps=[scores])")


def _write(own: _Backward, written: Sequence[tuple[str, str]], memory: Sequence[str]) -> None:
    """Gradients leave by way of shared memory."""
    emit = own.emit
    for (_, result), place in zip(written, memory, strict=False):
        emit(f"{place}.store({result})")
    emit("fence_async_shared()")
    emit("gl.thread_barrier()")
    for (name, _), shared in zip(written, memory, strict=False):
        place = own.out_places[name]
        assert place is not None
        at = own.at(place, f"own * {OWN} + GROUP * 64")
        emit(f"tma.async_copy_shared_to_global(d_{name}, [{at}], {shared})")


def _load(own: _Backward) -> None:
    """What the warp does that loads."""
    emit = own.emit
    chunks = own.chunks
    arrays = ", ".join((*own.own_arrays, *own.chunk_arrays))
    print_function(own, f"def load({_MEMORY}, {arrays}, bias, p_log_sum, p_delta, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots, for all rounds."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"mbarrier.expect(held_full.index(0), {OWN * own.others * 2})")
    emit(f"whole = held._reinterpret(bias.dtype, {own.held_shape()}, bias.layout)")
    for piece in range(2 if own.is_columns else own.others // 64):
        place = own.places["held"]
        if own.is_columns:
            at = own.at(place, "0", f"own * {OWN} + {piece * 64}")
        else:
            at = own.at(place, f"own * {OWN}", piece * 64)
        emit(f"tma.async_copy_global_to_shared(bias, [{at}], held_full.index(0), whole.index({piece}))")
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
        # The second group comes a little later, as long as the first one keeps the tensor cores busy.
        for group in range(1 if own.is_ahead else 2):
            emit(f"if step % {chunks} == {group * own.behind}:")
            own.writer.depth += 1
            _load_own(own, group)
            own.writer.depth -= 1
        emit(f"slot = step % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), step // {own.slots} % 2 ^ 1)")
        emit(f"mbarrier.expect(chunk_full.index(slot), {2 * own.chunk * own.plan.width * 2})")
        for array, name in zip(own.chunk_arrays, ("scores", "slopes"), strict=True):
            at = own.at(own.places[array], f"step % {chunks} * {own.chunk}")
            memory = f"chunk_{name}.index(slot)"
            emit(f"tma.async_copy_global_to_shared({array}, [{at}], chunk_full.index(slot), {memory})")
        if own.is_columns:
            emit(f"async_copy.wait_group({_AHEAD - 1})")
            emit("gl.thread_barrier()")
            for i, name in enumerate(("sum", "delta")):
                emit(f"loaded_{name} = staged.index(step % {_AHEAD} * 2 + {i}).load(C)")
            _hand_over(own, ("chunk_full.index(slot)",))
            _copy_lines(own, f"gl.minimum(step + {_AHEAD}, {last})", f"step % {_AHEAD}")

    own.writer.loop(f"for step in range(count * {chunks}):", body)
    if own.is_ahead:
        emit("# Scores of one more round begin, with whatever is there, and are not used.")
        emit(f"slot = count % {own.own_slots}")
        emit(f"mbarrier.wait(own_empty.index(slot), count // {own.own_slots} % 2 ^ 1)")
        emit(f"mbarrier.arrive(own_full.index(slot), count={1 if own.is_columns else 2})")
        emit(f"slot = count * {chunks} % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), count * {chunks} // {own.slots} % 2 ^ 1)")
        emit(f"mbarrier.arrive(chunk_full.index(slot), count={2 if own.is_columns else 1})")
    emit()
    emit()


def _load_own(own: _Backward, group: int) -> None:
    """The program's own tiles of a round, or a group's."""
    emit = own.emit
    rows, last = (OWN, 0) if own.is_ahead else (OWN // 2, 1)
    emit(f"slot = round % {own.own_slots}")
    emit(f"at = {own.own_barrier('slot', str(group))}")
    emit(f"mbarrier.wait(own_empty.index(at), round // {own.own_slots} % 2 ^ 1)")
    emit(f"mbarrier.expect(own_full.index(at), {2 * rows * own.plan.width * 2})")
    for array, name in zip(own.own_arrays, ("scores", "slopes"), strict=True):
        at = own.at(own.places[array], f"own * {OWN} + {group * rows}")
        memory = f"own_{name}.index(slot).slice({group * rows}, {rows})"
        emit(f"tma.async_copy_global_to_shared({array}, [{at}], own_full.index(at), {memory})")
    if not own.is_columns and group == last:
        _hand_over(own, [f"own_full.index({own.own_barrier('slot', str(x))})" for x in range(last + 1)])
        own.indices(None, "(first + gl.minimum(round + 1, count - 1))")
        _request_lines(own)
        own.indices(None, "(first + round)")


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


def _hand_over(own: _Backward, full: Sequence[str]) -> None:
    """What was loaded, to those who compute."""
    emit = own.emit
    emit(f'lines.index(slot * 2).store(gl.where(loaded_sum == float("-inf"), 0.0, loaded_sum * {LOG2_E}))')
    emit("# Slopes begin from it.")
    emit("lines.index(slot * 2 + 1).store(0.0 - loaded_delta)")
    emit("gl.thread_barrier()")
    for barrier in full:
        emit(f"mbarrier.arrive({barrier}, count=1)")


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
    shape = f"[{2 * own.chunks}, {size}, 64]" if own.is_columns else own.held_shape()
    emit(f"held = gl.allocate_shared_memory(bias.dtype, {shape}, bias.layout)")
    if own.terms:
        print_ones(emit, "query.dtype", size)
    else:
        emit("ones = lines")
    # Beside the copy engine's bytes, the lines that come with them.
    owners, arrivals = (own.own_slots, 2) if own.is_ahead else (2, 1)
    emit(f"own_full = make_barriers({owners}, {1 if own.is_columns else 2})")
    emit(f"own_empty = make_barriers({owners}, {arrivals})")
    emit(f"chunk_full = make_barriers({own.slots}, {2 if own.is_columns else 1})")
    emit(f"chunk_empty = make_barriers({own.slots}, 2)")
    emit("held_full = make_barriers(1, 1)")
    if own.is_ahead:
        emit("passage = lines")
        emit("passage_free = held_full")
    else:
        name = next(iter(own.written))
        emit(f"passage = gl.allocate_shared_memory(query.dtype, [1, {OWN // 2}, {width}], d_{name}.layout)")
        emit("passage_free = make_barriers(2, 1)")
    emit("fence_async_shared()")
    emit("gl.thread_barrier()")
    computing = f"{_MEMORY}{targets}{pointers}, ROUNDS"
    emit("gl.warp_specialize([")
    emit(f"    (compute, ({computing}, 0)),")
    emit(f"    (compute, ({computing}, 1)),")
    emit(f"    (load, ({_MEMORY}, {arrays}, bias, p_log_sum, p_delta, ROUNDS)),")
    emit("], [4, 1], [240, 24])")
