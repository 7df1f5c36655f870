"""Gluon source of the Hopper backward kernels that keep a pair bias in shared memory.

See lowering/resident_schedule.py. One writer prints both sides, "rows" and "columns". In every round, a program has a
tile of queries, or of keys, and loops over the other axis in chunks. A chunk has two arrays. The product with the first
one gives scores. The product with the second one gives slopes, the gradients of the weights.

One warp loads, and two groups of four warps compute, each with 64 rows of the tile. On the "columns" side, tiles have
keys first. Probabilities and their gradients are then left operands of products in the layout that they have in
registers.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import HopperKernel, gluon_source, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Source, cells_of
from blockdiag.fusion.codegen.resident_sides import FEWEST_SLOTS, MOST_OTHERS, OWN, SUMS, Side, SideWriter, print_load
from blockdiag.fusion.codegen.resident_writer import print_share, request_terms
from blockdiag.fusion.ir.layout import layout_of
from blockdiag.fusion.ir.linear_terms import factor_in
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.resident_schedule import CHUNK, resident
from blockdiag.fusion.lowering.tile_program import value_labels


def resident_backward(region: Region, side: Side, places: Sequence[int], plain: Source) -> HopperKernel | None:
    """Return the Hopper kernel that replaces a plain backward kernel, None if it does not apply.

    Args:
        region: an arranged region without lists of live tiles.
        places: the indices of the leaves whose gradients are requested.
        plain: the plain kernel.
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
    own = SideWriter(region, plan, side, plain, terms)
    dtype = jnp.dtype(region.dtype).name
    is_written = all(place is not None for place in own.out_places.values())
    if not is_written or {own.outputs[name].dtype for name in own.written} != {dtype} or own.slots < FEWEST_SLOTS:
        return None
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum", "delta", *(f"grad{i}" for i in terms))
    rounds = cells_of(region, plan.through)
    return HopperKernel(_source(own), _moved(own), pointers, rounds, own.tiles_of * cells_of(region, plan.cell))


def _terms(region: Region, side: Side, places: Sequence[int]) -> dict[int, float] | None:
    """Return the factor of each row or column leaf with a gradient, None if one is not an additive term."""
    found: dict[int, float] = {}
    assert region.score is not None
    for i in places:
        leaf = region.leaves[i]
        if leaf.role in ("query", "key"):
            continue
        factor = factor_in(region.score, leaf) if leaf.role == side.removesuffix("s") else None
        if factor is None:
            return None
        found[i] = factor
    return found


def _moved(own: SideWriter) -> tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]:
    """Return the arrays that the copy engine moves, see `HopperKernel.moved`."""
    width = own.plan.width
    rows = own.others if own.is_columns else OWN
    rows_own = OWN if own.is_ahead else OWN // 2
    found = [(x, own.array_name(x), own.places[x].shape, (rows_own, width)) for x in own.own_arrays]
    found += [(x, own.array_name(x), own.places[x].shape, (CHUNK, width)) for x in own.chunk_arrays]
    held = f"leaf{own.region.leaves.index(own.plan.held)}"
    found.append(("bias", held, own.places["held"].shape, (rows, 64)))
    for name, place in own.out_places.items():
        assert place is not None
        found.append((f"d_{name}", name, place.shape, (64, width)))
    return tuple(found)


def _source(own: SideWriter) -> Source:
    _compute(own)
    print_load(own)
    _entry(own)
    region = own.region
    names = [f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None]
    return Source(
        gluon_source("free_slot, widened" if own.is_ahead else "forgotten, free_slot, widened", own.writer.lines),
        own.name,
        (*names, "value", "log_sum", "cotangent", "delta"),
        tuple(own.outputs.values()),
        (own.tiles_of * cells_of(region, own.plan.cell), 1, 1),
    )


def _compute(own: SideWriter) -> None:
    """Print the function of a compute warp group."""
    emit, plan = own.emit, own.plan
    arrays = f"{own.memory()}{''.join(f', d_{name}' for name in own.written)}{own.pointer_parameters()}"
    print_function(own, f"def compute({arrays}, ROUNDS: gl.constexpr, GROUP: gl.constexpr):")
    emit(f'"""64 {"keys" if own.is_columns else "queries"} of each round."""')
    emit(f"S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {CHUNK}, 16])")
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
    else:
        own.indices(None, "first")
        request_terms(own, own.roles)
    own.writer.loop("for round in range(count):", lambda: _round(own))
    emit("tma.store_wait(0)")
    emit()
    emit()


def _round(own: SideWriter) -> None:
    emit, plan = own.emit, own.plan
    later = "(first + gl.minimum(round + 1, count - 1))"
    if own.is_ahead:
        _request_terms(own, later)
        known = own.known(own.roles)
    else:
        known = own.requested(own.roles)
    own.indices(None, "(first + round)")
    # Loaded long before they are needed, if there are registers.
    lines = [_read_lines(own, chunk) if chunk else {} for chunk in range(own.chunks if own.is_ahead else 0)]
    _find_own(own, "round")
    for name in SUMS[: len(own.written)]:
        emit(f"{name} = gl.zeros([64, {plan.width}], gl.float32, D)")
    if own.terms:
        emit("sums = gl.zeros([64, 8], gl.float32, T)")
    if own.is_ahead:
        for chunk in range(own.chunks):
            if chunk == 0:
                _find_chunk(own, 0, "round")
            else:
                _begin_scores(own, chunk, {**known, **lines[chunk]}, "round")
            _begin_slopes(own)
            if chunk == 0:
                _end_last_round(own)
            _chunk(own, chunk, chunk == 0)
    else:

        def part() -> None:
            _begin_scores(own, 0, {**known, **_read_lines(own, 0)}, "round")
            _begin_slopes(own)
            _chunk(own, 0, is_begun=False)
            _end_products(own, 0)

        own.writer.loop(f"for part in range({own.chunks}):", part)
        # Only now are there registers for these loads. Writing the gradients takes long enough to hide them.
        own.indices(None, later)
        request_terms(own, own.roles)
        own.indices(None, "(first + round)")
    _finish(own)


def _end_last_round(own: SideWriter) -> None:
    own.emit("# The last round's gradients have been stored by now.")
    own.emit("tma.store_wait(0)")
    own.emit("thread_barrier()")
    own.emit(f"free_slot(own_empty, round + {own.own_slots - 1}, {own.own_slots}, round > 0)")


def _end_products(own: SideWriter, later: int) -> None:
    """Print the wait for the gradient products of a round, or of a chunk.

    Args:
        later: the number of products started after these.
    """
    done = ", ".join(own.sums())
    own.emit(f"{done} = warpgroup_mma_wait({later}, deps=[{done}])")
    own.emit("thread_barrier()")
    last = f"round * {own.chunks} + {own.chunks - 1}" if own.is_ahead else "at"
    own.emit(f"free_slot(chunk_empty, {last}, {own.slots})")


def _find_own(own: SideWriter, number: str) -> None:
    """Print the wait for the program's own tiles of a round, and name them."""
    emit = own.emit
    emit(f"own_slot = {number} % {own.own_slots}")
    emit(f"mbarrier.wait(own_full.index({own.own_barrier('own_slot')}), {number} // {own.own_slots} % 2)")
    if own.is_ahead:
        for name in ("scores", "slopes"):
            _name_own(own, name)
    if not own.is_columns:
        for i, name in enumerate(("base", "delta")):
            place = f"lines.index(own_slot * 2 + {i}).slice(GROUP * 64, 64)"
            emit(f"{name} = {place}.load(gl.SliceLayout(1, S))[:, None]")


def _request_terms(own: SideWriter, through: str) -> None:
    """Print early loads of the terms that the first scores of a round start from."""
    own.indices(None, through)
    request_terms(own, own.roles)
    if _has_lines(own):
        _count_lines(own, 0)
        request_terms(own, (own.line_role,))


def _requested_terms(own: SideWriter) -> dict[int, Value]:
    if not _has_lines(own):
        return own.requested(own.roles)
    _count_lines(own, 0)
    return own.requested((*own.roles, own.line_role))


def _has_lines(own: SideWriter) -> bool:
    return any(leaf.role == own.line_role for leaf in own.region.leaves)


def _count_lines(own: SideWriter, chunk: int) -> None:
    own.emit(f"r_{own.other} = {own.number(chunk)} * {CHUNK} + gl.arange(0, {CHUNK}, gl.SliceLayout(0, S))")


def _read_lines(own: SideWriter, chunk: int) -> dict[int, Value]:
    """Print the loads of a chunk's per-row or per-column leaves, and return their values."""
    if not _has_lines(own):
        return {}
    _count_lines(own, chunk)
    found = {}
    for i, value in own.read((own.line_role,)).items():
        own.emit(f"line{i}_{chunk} = {value.name}")
        found[i] = Value(f"line{i}_{chunk}", value.shape)
    return found


def _name_own(own: SideWriter, name: str) -> None:
    own.emit(f"{name}_own = own_{name}.index({own.forgotten('own_slot')}).slice(GROUP * 64, 64)")


def _find_chunk(own: SideWriter, chunk: int, number: str) -> None:
    """Print the position of a chunk in the sequence of chunks, and name its slots."""
    emit = own.emit
    emit(f"at = {number} * {own.chunks} + {own.number(chunk)}")
    emit(f"slot = at % {own.slots}")
    for name in ("scores", "slopes"):
        emit(f"{name}_chunk = chunk_{name}.index({own.forgotten('slot')})")


def _begin_scores(own: SideWriter, chunk: int, known: dict[int, Value], round_number: str) -> None:
    """Print the start of the product that gives the scores of a chunk."""
    emit, plan, region = own.emit, own.plan, own.region
    held = region.leaves.index(plan.held)
    number = own.number(chunk)
    if not own.is_columns:
        piece = f"held.index({number}).slice(GROUP * 64, 64)"
    elif own.is_ahead:
        piece = f"held.index(GROUP).slice({chunk * CHUNK}, {CHUNK}).permute((1, 0))"
    else:
        emit(f"pieces = reinterpret(held, dtype, [{2 * own.chunks}, {CHUNK}, 64], held.layout)")
        piece = f"pieces.index(GROUP * {own.chunks} + {number}).permute((1, 0))"
    emit(f"leaf{held} = widened({piece}.load(S))")
    tiles = own.tiles({**known, held: Value(f"leaf{held}", (CHUNK, CHUNK))})
    start = own.evaluate(plan.others, tiles, f"x{chunk}_").name
    if plan.of_keys is not None:
        start += f" + {own.evaluate(plan.of_keys, tiles, f'y{chunk}_').name}"
    emit(f"start = {start}")
    _find_chunk(own, chunk, round_number)
    emit(f"mbarrier.wait(chunk_full.index(slot), at // {own.slots} % 2)")
    if not own.is_ahead:
        _name_own(own, "scores")
    emit("scores = warpgroup_mma(scores_own, scores_chunk.permute((1, 0)), start, is_async=True)")


def _begin_slopes(own: SideWriter) -> None:
    """Print the start of the product that gives the slopes of a chunk."""
    emit = own.emit
    if own.is_columns:
        for i, name in enumerate(("base", "delta")):
            emit(f"{name} = lines.index(slot * 2 + {i}).load(gl.SliceLayout(0, S))[None, :]")
    emit(f"start, _ = gl.broadcast(delta, gl.zeros([64, {CHUNK}], gl.float32, S))")
    if not own.is_ahead:
        _name_own(own, "slopes")
    emit("slopes = warpgroup_mma(slopes_own, slopes_chunk.permute((1, 0)), start, is_async=True)")


def _chunk(own: SideWriter, chunk: int, is_begun: bool) -> None:
    """Print the probabilities and slopes of a chunk, and the start of its gradient products.

    Args:
        is_begun: whether its scores are finished already.
    """
    emit, plan = own.emit, own.plan
    if not is_begun:
        emit("scores = warpgroup_mma_wait(1, deps=[scores])")
    if chunk > 0:
        emit("# The last chunk's products are done, too.")
        emit("thread_barrier()")
        emit(f"free_slot(chunk_empty, at + {own.slots - 1}, {own.slots})")
    emit(f"power = gl.exp2(scores * {plan.unit * LOG2_E} - base)")
    first = "use_acc=False, " if chunk == 0 and own.is_ahead else ""
    if own.is_columns:
        emit("factor = gl.convert_layout(power.to(dtype), P)")
        emit(f"sum_second = warpgroup_mma(factor, slopes_chunk, sum_second, {first}is_async=True)")
    emit(f"slopes = warpgroup_mma_wait({1 if own.is_columns else 0}, deps=[slopes])")
    if not own.is_ahead:
        emit("# No more products read the program's own tiles.")
        emit("thread_barrier()")
        emit(f"mbarrier.arrive(own_empty.index(GROUP), count=1, pred=part == {own.chunks - 1})")
    emit("slopes = (slopes * power).to(dtype)")
    emit(f"sum_first = warpgroup_mma(gl.convert_layout(slopes, P), scores_chunk, sum_first, {first}is_async=True)")
    if own.terms:
        emit("factor = gl.convert_layout(slopes, gl.DotOperandLayout(0, T, 2))")
        emit(f"sums = warpgroup_mma(factor, ones.permute((1, 0)), sums, {first}is_async=True)")


def _finish(own: SideWriter) -> None:
    """Print the end of a round: its gradients are written, and the scores of the next round may start before that."""
    emit, region = own.emit, own.region
    if own.is_ahead:
        emit("scores_done, slopes_done = scores_own, slopes_own")
        _find_own(own, "(round + 1)")
        _begin_scores(own, 0, _requested_terms(own), "(round + 1)")
        emit("scores_own, slopes_own = scores_done, slopes_done")
        _end_products(own, 1)
    results = (f"({SUMS[0]} * {own.plan.unit}).to(dtype)", f"{SUMS[1]}.to(dtype)")
    written = list(zip(own.out_places, results, strict=False))
    if own.is_ahead:
        # Gradients are staged in this group's own rows, which are no longer read.
        _write(own, written, ("scores_own", "slopes_own"))
    else:
        for one in written:
            emit("# The staging buffer is free once its last store is done.")
            emit("tma.store_wait(0)")
            emit("thread_barrier()")
            _write(own, [one], ("passage.index(GROUP)",))
    if own.terms:
        # The columns of a product with ones are equal, so the maximum selects any of them.
        emit("sums = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, S))")
    for i, factor in own.terms.items():
        written = own.outputs[f"grad{i}"]
        layout = layout_of(written.shape, written.dims, region.sizes)
        at = f"p_grad{i} + {layout.base(region.batch)} + {own.writer.times(f'r_{own.label}', own.label, layout)}"
        emit(f"tl.store({at}, (sums * {factor}).to(p_grad{i}.dtype.element_ty))")
    if own.is_ahead:
        emit("# The compiler does not support a product in flight across loop iterations.")
        emit("scores = warpgroup_mma_wait(0, deps=[scores])")


def _write(own: SideWriter, written: Sequence[tuple[str, str]], memory: Sequence[str]) -> None:
    """Print the store of gradients through shared memory."""
    emit = own.emit
    for (_, result), place in zip(written, memory, strict=False):
        emit(f"{place}.store({result})")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    for (name, _), shared in zip(written, memory, strict=False):
        place = own.out_places[name]
        assert place is not None
        at = own.at(place, f"own * {OWN} + GROUP * 64")
        emit(f"tma_store(d_{name}, [{at}], {shared})")


def _print_ones(own: SideWriter) -> None:
    """Print the allocation of ones, [8, CHUNK], with which a product computes row sums."""
    emit = own.emit
    swizzle = f"swizzle_byte_width={min(128, 2 * CHUNK)}"
    emit(f"LINES: gl.constexpr = gl.NVMMASharedLayout({swizzle}, element_bitwidth=16, rank=2)")
    emit("SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])")
    emit(f"ones = gl.allocate_shared_memory(query.dtype, [8, {CHUNK}], LINES)")
    emit(f"ones.store(gl.full([8, {CHUNK}], 1.0, gl.float32, SPREAD).to(query.dtype))")


def _entry(own: SideWriter) -> None:
    """Print the kernel function."""
    emit = own.emit
    width = own.plan.width
    pointers = own.pointer_parameters()
    own_arrays, chunk_arrays = ", ".join(own.own_arrays), ", ".join(own.chunk_arrays)
    targets = "".join(f", d_{name}" for name in own.written)
    print_function(own, f"def {own.name}({own_arrays}, {chunk_arrays}, bias{targets}{pointers}, ROUNDS: gl.constexpr):")
    held = "keys" if own.is_columns else "queries"
    emit(f'"""One program: a tile of {held}, and ROUNDS of the indices along which the bias is the same."""')
    for which, names, shape in (
        ("own", own.own_arrays, f"[{own.own_slots}, {OWN}, {width}]"),
        ("chunk", own.chunk_arrays, f"[{own.slots}, {CHUNK}, {width}]"),
    ):
        for name, kind in zip(names, ("scores", "slopes"), strict=True):
            emit(f"{which}_{kind} = gl.allocate_shared_memory(query.dtype, {shape}, {name}.layout)")
    line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    count, length = (own.slots, CHUNK) if own.is_columns else (own.own_slots, OWN)
    emit(f"lines = gl.allocate_shared_memory(gl.float32, [{2 * count}, {length}], {line})")
    if own.is_columns:
        emit(f"staged = gl.allocate_shared_memory(gl.float32, [{2 * own.lead}, {CHUNK}], {line})")
    else:
        emit("staged = lines")
    shape = f"[2, {own.others}, 64]" if own.is_columns else f"[{own.others // 64}, {OWN}, 64]"
    emit(f"held = gl.allocate_shared_memory(bias.dtype, {shape}, bias.layout)")
    if own.terms:
        _print_ones(own)
    else:
        emit("ones = lines")
    # A second arrival stands for the vectors that come with the bytes of the copy engine.
    owners, arrivals = (own.own_slots, 2) if own.is_ahead else (2, 1)
    emit(f"own_full = make_barriers({owners}, {1 if own.is_columns else 2})")
    emit(f"own_empty = make_barriers({owners}, {arrivals})")
    emit(f"chunk_full = make_barriers({own.slots}, {2 if own.is_columns else 1})")
    emit(f"chunk_empty = make_barriers({own.slots}, 2)")
    emit("held_full = make_barriers(1, 1)")
    if not own.is_ahead:
        name = next(iter(own.written))
        emit(f"passage = gl.allocate_shared_memory(query.dtype, [2, {OWN // 2}, {width}], d_{name}.layout)")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    computing = f"{own.memory()}{targets}{pointers}, ROUNDS"
    emit("gl.warp_specialize([")
    emit(f"    (compute, ({computing}, 0)),")
    emit(f"    (compute, ({computing}, 1)),")
    lines = "p_log_sum, p_delta, ROUNDS"
    if own.is_ahead:
        emit(f"    (load, ({own.memory()}, {own_arrays}, {chunk_arrays}, bias, {lines})),")
        emit("], [4, 1], [240, 24])")
        return
    emit(f"    (load, ({own.memory()}, {chunk_arrays}, {lines})),")
    emit(f"    (load_own, ({own.memory()}, {own_arrays}, bias, {lines})),")
    emit("], [4, 1, 1], [240, 24, 24])")
