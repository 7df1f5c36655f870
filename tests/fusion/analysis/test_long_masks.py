"""Tests of tables of live tiles: they are right for every tile, and their time and size are linear in tokens."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import block_diagonal_attention, explain, fuse
from blockdiag.fusion.analysis import mask_states as states_module
from blockdiag.fusion.analysis import refinement as refine
from blockdiag.fusion.analysis import tile_tables
from blockdiag.fusion.analysis.leaf_ranges import Tiling, distance_extent
from blockdiag.fusion.analysis.range_analysis import bounds
from blockdiag.fusion.analysis.tile_lists import Form
from blockdiag.fusion.analysis.tile_tables import expanded
from blockdiag.fusion.gallery import VARIANTS, Sizes
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.program import trace
from blockdiag.fusion.runtime import arrange, kernel_choice
from blockdiag.fusion.runtime.block_sparsity import live_tiles, mask_states
from blockdiag.interop import compile_target
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.triton_kernels.plans_support import report_of

BLOCK = 1 << 12
DOCUMENT_LENGTH = 3000


def masked(query, key, value, seen):
    """Return attention with a mask `seen` [T, S]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def places(query, key):
    return jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None, :]


def causal(query, key):
    row, column = places(query, key)
    return row >= column


def window(query, key):
    row, column = places(query, key)
    return (row >= column) & (row - column < 512)


def shifted_window(query, key):
    row, column = places(query, key)
    return jnp.abs(row + 300 - column) < 200


def prefix(query, key):
    row, column = places(query, key)
    return (row >= column) | (column < 700)


def sinks(query, key):
    row, column = places(query, key)
    return (row >= column) & ((row - column < 512) | (column < 4))


def global_and_local(query, key):
    row, column = places(query, key)
    return (jnp.abs(row - column) < 300) | (column < 200) | (row < 200)


def strided(query, key):
    row, column = places(query, key)
    away = row - column
    return (away >= 0) & ((away < 256) | (away % 1024 == 0))


def dilated(query, key):
    row, column = places(query, key)
    away = row - column
    return (away >= 0) & (away < 2048) & (away % 4 == 0)


def blocks(query, key):
    row, column = places(query, key)
    return row // BLOCK == column // BLOCK


def known_documents(query, key):
    document = jnp.asarray(np.arange(query.shape[1], dtype=np.int32) // DOCUMENT_LENGTH)
    row, column = places(query, key)
    return (document[:, None] == document[None, :]) & (row >= column)


LINEAR = {
    mask.__name__: mask
    for mask in (
        causal, window, shifted_window, prefix, sinks, global_and_local, strided, dilated, blocks, known_documents,
    )
}  # fmt: skip


def shapes(tokens, heads=1, size=16, batch=1, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct((batch, tokens, heads, size), dtype)] * 3


def region_of(function, given):
    ((region,),) = trace(function, tuple(given), {}).regions.values()
    return arrange.arranged(region)[0]


def masked_region(mask, tokens):
    return region_of(lambda query, key, value: masked(query, key, value, mask(query, key)), shapes(tokens))


def line_tiles(region, tile, way):
    row_tiles, key_tiles = Tiling(tile, region.sizes["q"], region.sizes["k"]).counts
    return key_tiles if way == "" else row_tiles


def states_of(found, region, tile, way):
    """Return the states [.., lines, tiles] that a table encodes."""
    counts = np.asarray(found.arrays[f"live_counts{way}"])
    form = found.lists.forms[("", "_t", "_d").index(way)]
    states = expanded(form, counts, found.arrays[f"live_tiles{way}"], line_tiles(region, tile, way))
    return states.reshape(*counts.shape[:-1], -1)


def along_diagonals(states):
    rows, columns = states.shape[-2:]
    row = np.arange(rows)[None, :]
    column = row - np.arange(rows + columns - 1)[:, None] + columns - 1
    is_tile = (column >= 0) & (column < columns)
    return np.where(is_tile, states[..., row, column.clip(0, columns - 1)], 0)


def assert_sound(states, tile, seen):
    """Assert that dead tiles have no visible element and that full tiles have no hidden one.

    Args:
        states: [tiles of queries, tiles of keys].
        seen: bool [queries, keys].
    """
    for row, line in enumerate(states):
        for column, state in enumerate(line):
            own = seen[row * tile.rows : (row + 1) * tile.rows, column * tile.columns : (column + 1) * tile.columns]
            assert own.all() if state == 2 else state == 1 or not own.any()


def every_state(region, tile, arrays):
    """Return the states of all tiles, computed for each of them."""
    states = mask_states(region, tile, arrays)
    row_tiles, key_tiles = states.tiling.counts
    found = np.asarray(states.at(np.arange(row_tiles)[:, None], np.arange(key_tiles)[None, :]))
    return np.broadcast_to(found, (*found.shape[:-2], row_tiles, key_tiles))


def assert_same_states(region, tile, arrays):
    """Assert that the tables of every direction match the states of all tiles; return the tables or None."""
    expected = every_state(region, tile, arrays)
    found = live_tiles(region, tile, arrays)
    if found is None:
        assert expected.all()
        return None
    states = states_of(found, region, tile, "")
    expected = expected.reshape(states.shape)
    np.testing.assert_array_equal(states, expected)
    np.testing.assert_array_equal(states_of(found, region, tile, "_t"), expected.swapaxes(-1, -2))
    if "live_counts_d" in found.arrays:
        np.testing.assert_array_equal(states_of(found, region, tile, "_d"), along_diagonals(expected))
    return found


TILES = (Tile(16, 16), Tile(32, 16), Tile(16, 64))


@pytest.mark.parametrize("tokens", [1024, 1000])
@pytest.mark.parametrize("name", LINEAR)
def test_tile_tables_of_position_masks_have_the_state_of_every_tile(name, tokens, monkeypatch):
    monkeypatch.setitem(globals(), "BLOCK", 300)
    monkeypatch.setitem(globals(), "DOCUMENT_LENGTH", 300)
    region = masked_region(LINEAR[name], tokens)
    seen = np.asarray(LINEAR[name](*shapes(tokens)[:2]))
    for tile in TILES:
        found = assert_same_states(region, tile, {})
        if found is not None:
            assert_sound(states_of(found, region, tile, ""), tile, seen)


def gallery_regions(name, array):
    """Yield the regions of a variant and the arrays of their leaves."""
    inputs = VARIANTS[name].make_inputs(jax.random.key(0), Sizes())
    program = trace(VARIANTS[name].function, (), inputs)
    known = dict(zip(program.jaxpr.jaxpr.invars, program.arguments, strict=True))
    for region in (x for found in program.regions.values() for x in found):
        inner, change = arrange.arranged(region)
        leaves = [known.get(x.source.key, np.zeros(x.source.shape, x.source.dtype)) for x in region.leaves]
        arrays = arrange.arrays_by_name(change, leaves, jnp.zeros(region.value.shape, region.value.dtype))
        yield inner, {name: array(x) for name, x in arrays.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_tile_tables_of_gallery_variants_have_the_state_of_every_tile(name):
    for region, arrays in gallery_regions(name, np.asarray):
        for tile in (Tile(8, 8), Tile(4, 8)):
            assert_same_states(region, tile, arrays)


DECIDED_BY_ARRAYS = (
    "document", "causal_document", "prefix_lm_lengths", "cross_attention", "library_window_lengths", "dense_mask",
)  # fmt: skip


@pytest.mark.parametrize("name", DECIDED_BY_ARRAYS)
def test_tile_tables_of_traced_arrays_equal_those_of_known_arrays(name, monkeypatch):
    """Tables are lists, or ranges, with which long calls save memory."""
    for (region, arrays), (_, known) in zip(
        gallery_regions(name, jnp.asarray), gallery_regions(name, np.asarray), strict=True
    ):
        expected = every_state(region, Tile(4, 8), known)
        for most in (1 << 22, 64):
            monkeypatch.setattr(tile_tables, "_MOST_STATES", most)
            found = live_tiles(region, Tile(4, 8), arrays)
            has_pairs = any(leaf.role == "score" for leaf in region.leaves)
            assert {form.kind for form in found.lists.forms} == {"list" if most > 64 or has_pairs else "ranges"}
            for way, states in (("", expected), ("_t", expected.swapaxes(-1, -2))):
                told = states_of(found, region, Tile(4, 8), way)
                np.testing.assert_array_equal(told, states.reshape(told.shape))


@pytest.mark.parametrize("most", [1 << 22, 64])
def test_diagonal_tile_tables_of_traced_arrays_equal_those_of_known_arrays(most, monkeypatch):
    def documents_with_table(query, key, value, table, segment):
        row, column = places(query, key)
        bias = table[jnp.clip(row - column, -20, 20) + 20]
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) + bias[None, None]
        scores = jnp.where((segment[:, :, None] == segment[:, None, :])[:, None], scores, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    monkeypatch.setattr(tile_tables, "_MOST_STATES", most)
    segment = np.sort(np.random.default_rng(0).integers(0, 2, (2, 100))).astype(np.int32)
    region = region_of(
        documents_with_table,
        [*shapes(100, batch=2, dtype=jnp.float32), jnp.zeros(41), jax.ShapeDtypeStruct((2, 100), jnp.int32)],
    )
    assert any(leaf.role == "distance" for leaf in region.leaves)
    arrays = {f"leaf{i}": segment for i, leaf in enumerate(region.leaves) if leaf.source.dtype == np.int32}
    known = assert_same_states(region, Tile(8, 8), arrays)
    found = live_tiles(region, Tile(8, 8), {name: jnp.asarray(x) for name, x in arrays.items()})
    assert {form.kind for form in found.lists.forms} == {"ranges" if most == 64 else "list"}
    for way in ("", "_t", "_d"):
        states = [states_of(x, region, Tile(8, 8), way) for x in (known, found)]
        np.testing.assert_array_equal(*states)


def test_rows_with_too_many_ranges_become_one_range():
    states = np.array([[0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 0], [0, 2, 2, 1, 0, 1, 2, 0, 1, 0, 0, 1]], np.int8)
    counts, numbers = map(np.asarray, tile_tables.ranges_of(jnp.asarray(states)))
    form = Form("ranges", 12, tile_tables.DYNAMIC_FULL, tile_tables.DYNAMIC_MASKED)
    expected = [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], states[1]]
    np.testing.assert_array_equal(expanded(form, counts, numbers, 12), expected)


def known_arrays(region, **by_role):
    """Return the arrays of leaves that are not constants, selected by role."""
    leaves = [(i, x) for i, x in enumerate(region.leaves) if x.role in by_role and x.source.constant is None]
    return {f"leaf{i}": by_role[x.role].reshape(x.source.shape) for i, x in leaves if x.source.key is not None}


def random_masks(seed):
    """Yield regions with masks of distances, pairs and unsorted segments, with their arrays and masks."""
    generator = np.random.default_rng(seed)
    tokens = (200, 256)[seed % 2]
    line = np.repeat(generator.random(2 * tokens // 8 + 1) < 0.3, 8)[: 2 * tokens - 1]
    pairs = np.kron(generator.random((tokens // 8, tokens // 8)) < 0.1, np.ones((8, 8), bool))
    segment = np.repeat(generator.integers(0, 4, tokens // 8), 8).astype(np.int32)

    def of_distances(query, key):
        row, column = places(query, key)
        return jnp.asarray(line)[row - column + tokens - 1]

    region = masked_region(of_distances, tokens)
    assert any(leaf.role == "distance" for leaf in region.leaves)
    apart = np.arange(tokens)[:, None] - np.arange(tokens)
    yield region, known_arrays(region, distance=line), line[apart + tokens - 1]
    region = masked_region(lambda query, key: pairs, tokens)
    yield region, known_arrays(region, score=pairs), pairs
    region = region_of(
        lambda query, key, value, segment: masked(query, key, value, segment[:, None] == segment[None]),
        [*shapes(tokens), jax.ShapeDtypeStruct((tokens,), jnp.int32)],
    )
    yield region, known_arrays(region, row=segment, column=segment), segment[:, None] == segment


@pytest.mark.parametrize("seed", range(4))
def test_tile_tables_of_random_known_masks_have_the_state_of_every_tile(seed):
    kinds = set()
    for region, arrays, seen in random_masks(seed):
        assert arrays
        for tile in (Tile(8, 8), Tile(16, 8), Tile(8, 32)):
            found = assert_same_states(region, tile, arrays)
            if found is None:
                continue
            kinds.update(form.kind for form in found.lists.forms)
            assert_sound(states_of(found, region, tile, ""), tile, seen)
    assert kinds >= ({"list", "shared"} if seed % 2 else {"list"})


def test_distance_extents_of_tiles_bound_their_elements():
    line = np.random.default_rng(0).integers(-50, 50, 40 + 56 - 1)
    tile = Tile(8, 4)
    extent = distance_extent(Tiling(tile, 40, 56), line)
    whole = line[np.arange(40)[:, None] - np.arange(56) + 55]
    for level in range(3):
        size = 1 << level
        for row in range(-(-5 // size)):
            for column in range(-(-14 // size)):
                own = whole[row * size * 8 : (row + 1) * size * 8, column * size * 4 : (column + 1) * size * 4]
                found = extent.at(np.array([[row]]), np.array([[column]]))
                assert found.low.item() <= own.min() and found.high.item() >= own.max()
                assert level or (found.low.item() == own.min() and found.high.item() == own.max())
        extent = extent.coarser()


def work_of(name, tokens, monkeypatch):
    """Return the number of tiles and blocks visited to make the tables of one tile size, the tables and the region."""
    region, visited = masked_region(LINEAR[name], tokens), 0

    def counted(program, leaves, **options):
        nonlocal visited
        visited += max(np.size(x.low) for x in leaves)
        return bounds(program, leaves, **options)

    with monkeypatch.context() as patched:
        patched.setattr(states_module, "bounds", counted)
        found = live_tiles(region, Tile(64, 32), {})
    return visited, found, region


@pytest.mark.parametrize("name", LINEAR)
def test_tile_table_work_and_size_are_linear_in_tokens(name, monkeypatch):
    """Eight times the tokens visit at most nine times the blocks, and the table size per line of tiles is bounded."""
    works = [work_of(name, tokens, monkeypatch) for tokens in (1 << 15, 1 << 18)]
    (few, _, _), (many, found, _) = works
    assert few > 100 and many <= 9 * few
    for way, lines in (("", 1 << 12), ("_t", 1 << 13)):
        assert found.arrays[f"live_counts{way}"].shape == (lines, 2)
        assert found.arrays[f"live_tiles{way}"].size <= 11 * lines


def test_tile_table_work_of_undecidable_masks_is_bounded(monkeypatch):
    """Few tiles of keys are seen, so no large block of tiles is decided. Beyond a work limit, blocks stay masked."""
    monkeypatch.setattr(refine, "_MOST_BLOCKS", 1 << 12)
    monkeypatch.setattr(refine, "_MOST_PER_LINE", 4)

    def columns(query, key):
        row, column = places(query, key)
        return (row >= column) & (column % 4096 < 64)

    monkeypatch.setitem(LINEAR, "columns", columns)
    visited, found, region = work_of("columns", 1 << 15, monkeypatch)
    assert visited < 1 << 16
    states = states_of(found, region, Tile(64, 32), "")
    needed = every_state(region, Tile(64, 32), {})
    assert not (needed.reshape(states.shape) > states).any() and (states == 0).mean() > 0.4


def one_block(query, key, value):
    return block_diagonal_attention(query, key, value, block_size=10**7, is_causal=True)


@fuse
def fused_window(query, key, value):
    return masked(query, key, value, window(query, key))


@fuse
def fused_documents(query, key, value, segment):
    same = segment[:, :, None] == segment[:, None, :]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where((same & causal(query, key)[None])[:, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


@pytest.mark.parametrize("function", [fused_window, one_block, fused_documents], ids=["window", "block", "documents"])
def test_tracing_a_million_tokens_takes_little_memory(function):
    """Lists of tiles or their states would take gigabytes in the forward and backward passes."""
    tokens = 1 << 20
    given = shapes(tokens, heads=8, size=64)
    if function is fused_documents:
        given.append(jax.ShapeDtypeStruct((1, tokens), jnp.int32))
    tracemalloc.start()
    try:
        with compile_target(90):
            gradient = jax.grad(lambda *given: function(*given).astype(jnp.float32).sum(), (0, 1, 2))
            traced = jax.jit(gradient).trace(*given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400e6
    constants = sum(np.size(x) * np.dtype(x.dtype).itemsize for x in traced.jaxpr.consts)
    assert constants < 64e6


def test_explain_of_a_long_call_uses_little_memory():
    tokens = 1 << 18
    tracemalloc.start()
    try:
        (region,) = explain(fused_window)(*shapes(tokens)).regions
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6 and region.skipped > 0.99


@pytest.mark.parametrize(
    ("name", "kind"),
    [("global_and_local", "ranges"), ("strided", "shared"), ("scattered", "list"), ("documents", "ranges")],
)
def test_kernels_visit_the_tiles_of_every_table_form(name, kind, monkeypatch):
    """Results and gradients are right in the interpreter, with several ranges, shared lists and separate lists."""
    tokens = 512
    monkeypatch.setattr(tile_tables, "_MOST_STATES", 16)
    scattered = np.kron(np.random.default_rng(0).random((16, 16)) < 0.6, np.ones((32, 32), bool)) | np.eye(
        512, dtype=bool
    )
    segment = jnp.asarray(np.arange(tokens)[None] // 150, jnp.int32)

    def seen_of(query, key, segment):
        row, column = places(query, key)
        match name:
            case "global_and_local":
                return (jnp.abs(row - column) < 80) | (column < 70)
            case "strided":
                return (row >= column) & ((row - column) % 64 == 0)
            case "scattered":
                return scattered
        return (segment[0, :, None] == segment[0, None, :]) & (row >= column)

    def function(query, key, value, segment):
        return masked(query, key, value, seen_of(query, key, segment))

    kinds = set()

    def watched(*given):
        found = live_tiles(*given)
        kinds.update(form.kind for form in found.lists.forms[:2])
        return found

    monkeypatch.setattr(kernel_choice, "live_tiles", watched)
    monkeypatch.setattr(tile_tables, "_MOST_LISTED_OF_BLOCKS", 0)
    given = [*jax.random.normal(jax.random.key(0), (3, 1, tokens, 1, 16)), segment]

    def both(function):
        output, pull = jax.vjp(lambda *x: function(*x, segment), *given[:3])
        return output, *pull(jnp.cos(output))

    found = jax.jit(functools.partial(both, fuse(function, implementation="triton")))()
    assert kinds == {kind}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(both, function))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_tile_lists_that_would_be_too_long_become_one_range_per_row(monkeypatch):
    """In known masks, lines with few ranges stay exact, and lines with many ranges also visit dead tiles."""
    monkeypatch.setattr(tile_tables, "_MOST_LISTED", 0)
    monkeypatch.setattr(tile_tables, "_MOST_LISTED_OF_BLOCKS", 0)
    seen = np.kron(np.random.default_rng(0).random((32, 32)) < 0.5, np.ones((8, 8), bool))
    seen[:64, 64:] = False
    region = masked_region(lambda query, key: seen, 256)
    arrays = known_arrays(region, score=seen)
    found, needed = live_tiles(region, Tile(8, 8), arrays), every_state(region, Tile(8, 8), arrays)
    needed = needed.reshape(32, 32)
    states = states_of(found, region, Tile(8, 8), "")
    assert {form.kind for form in found.lists.forms} == {"ranges"}
    is_same = (states == needed).all(-1)
    assert 0 < is_same.sum() < 32
    assert not ((needed > 0) & (states == 0)).any() and (states[~is_same] < 2).all()


def test_tile_rows_with_different_ends_share_a_list(monkeypatch):
    monkeypatch.setattr(tile_tables, "_MOST_APART", 0)

    def stripes(query, key):
        row, column = places(query, key)
        return (row >= column) & ((row - column) % 48 < 24)

    region = masked_region(stripes, 1000)
    found, needed = live_tiles(region, Tile(16, 8), {}), every_state(region, Tile(16, 8), {})
    needed = needed.reshape(63, 125)
    assert (needed == 2).any() and not found.lists.has_full
    for way, states in (("", needed), ("_t", needed.T)):
        assert found.lists.forms[("", "_t").index(way)].kind == "shared"
        told = states_of(found, region, Tile(16, 8), way)
        assert not ((states > 0) & (told == 0)).any() and ((states == 0) & (told > 0)).mean() < 0.02


@pytest.mark.every_case
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", ["global_and_local", "strided"])
def test_kernels_of_every_table_form_do_not_spill_in_loops(name, arch, monkeypatch):
    """Kernels of heads of 64 have no local memory accesses in loops, compiled for each architecture."""
    monkeypatch.setattr(tile_tables, "_MOST_LISTED_OF_BLOCKS", 0)
    mask = LINEAR[name]
    region = region_of(lambda *given: masked(*given, mask(*given[:2])), shapes(1 << 14, size=64))
    found = launches_of(region)
    number = {"global_and_local": "end3 = tl.load(", "strided": "masked_list = tl.load("}[name]
    assert number in found["fused_forward"].source.text
    for launch in found.values():
        report = report_of(launch.plan(Target.for_arch(arch)), arch)
        assert report.shared_bytes <= report.shared_limit
        assert not any(depth > 0 and count for depth, count in report.local_accesses.items()), str(report)
