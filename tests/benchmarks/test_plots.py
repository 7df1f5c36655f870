"""Pictures drawn from the recorded rows without a GPU, and the reasons for pictures that are left out."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.block_diagonal.plots import draw_times
from benchmarks.harness import plots
from benchmarks.harness.plot_style import (
    DARK,
    FAR,
    LIGHT,
    LOOKS,
    THEMES,
    Dot,
    NothingToDraw,
    colour_of,
    draw_over_floor,
    new_figure,
    save_one,
    size_name,
)
from benchmarks.harness.plots import PICTURES, draw_pictures, of_one_device, pictures_of
from benchmarks.harness.records import FuseTiming, MoBATiming, PagedTiming, Timing, read_rows, write_rows
from benchmarks.moba.plots import draw_lengths
from benchmarks.overview import mask_plots, roofline_plots

Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 300_000


def files_of(pictures) -> set[str]:
    return {f"{picture.name}{theme.suffix}.png" for picture in pictures for theme in THEMES}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return the text that the command prints and the folder that it fills."""
    folder = tmp_path_factory.mktemp("pictures")
    arguments = ["all", "--plot", "--output", str(RESULTS), "--pictures", str(folder)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output, folder


@pytest.mark.exhaustive
def test_command_draws_every_picture_without_measuring(drawn):
    output, folder = drawn
    assert {path.name for path in folder.iterdir()} == files_of(PICTURES)
    assert "left out" not in output
    assert "smoke" not in output


@pytest.mark.exhaustive
def test_pictures_are_small_and_have_their_theme_background(drawn):
    for picture in PICTURES:
        for theme in THEMES:
            path = drawn[1] / f"{picture.name}{theme.suffix}.png"
            assert path.stat().st_size < LIMIT, path.name
            with Image.open(path) as image:
                assert 1200 <= image.width <= 1600 and image.height <= 2000, path.name
                corner = image.convert("RGB").getpixel((2, 2))
            assert "#{:02x}{:02x}{:02x}".format(*corner) == theme.background, path.name


def test_committed_pictures_match_the_command_and_are_small():
    committed = {path.name: path.stat().st_size for path in RESULTS.glob("*.png")}
    assert committed.keys() == files_of(PICTURES)
    assert max(committed.values()) < LIMIT


def test_no_picture_of_the_project_is_large():
    found = [path for folder in ("benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.png")]
    assert len(found) > len(PICTURES)
    assert not [path for path in found if path.stat().st_size >= LIMIT]


def test_draw_pictures_twice_writes_equal_files(tmp_path):
    picture = next(picture for picture in PICTURES if picture.name == "paged_splits")
    first, second = (draw_pictures([picture], RESULTS, tmp_path / name).paths for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_missing_files_are_named_with_their_command(tmp_path):
    shutil.copy(RESULTS / "paged.csv", tmp_path)
    pictures = [picture for picture in PICTURES if picture.name in ("paged_splits", "gallery", "roofline")]
    drawn = draw_pictures(pictures, tmp_path, tmp_path / "out")
    assert {path.name for path in drawn.paths} == {"paged_splits.png", "paged_splits-dark.png"}
    roofline, gallery = drawn.left_out
    assert "block_diagonal.csv, moba.csv, fuse.csv" in roofline
    assert "no gallery.csv; python -m benchmarks gallery writes it" in gallery


def test_rows_without_times_are_left_out_with_the_reason(tmp_path):
    rows = [dataclasses.replace(row, median_us=None) for row in read_rows(RESULTS / "paged.csv", PagedTiming)]
    write_rows(tmp_path / "paged.csv", PagedTiming, rows)
    drawn = draw_pictures(pictures_of("paged"), tmp_path, tmp_path)
    assert drawn.paths == ()
    assert len(drawn.left_out) == 3 and "no time of 'triton-torch' in group 'decode'" in drawn.left_out[0]


def test_draw_pictures_propagates_unrelated_errors(monkeypatch, tmp_path):
    def wrong(rows, theme):
        raise ValueError("a bug")

    monkeypatch.setattr("benchmarks.paged.plots.draw_splits", wrong)
    with pytest.raises(ValueError, match="a bug"):
        draw_pictures([picture for picture in PICTURES if picture.name == "paged_splits"], RESULTS, tmp_path)


def test_pictures_of_each_benchmark_exist():
    assert len(pictures_of("all")) == len(PICTURES)
    for op in ("block_diagonal", "moba", "paged", "fuse", "gallery"):
        assert pictures_of(op)
    assert pictures_of("torch") == []
    for picture in PICTURES:
        assert callable(picture.function)


def test_all_command_with_cases_exits_with_an_error():
    result = CliRunner().invoke(app, ["all", "--cases", "h8_d128"])
    assert result.exit_code == 1 and "--cases" in str(result.exception or result.output)


def test_rows_of_other_devices_are_not_mixed_in():
    rows = read_rows(RESULTS / "moba.csv", MoBATiming)
    elsewhere = [dataclasses.replace(row, device="another GPU") for row in rows if row.implementation == "triton"]
    kept = of_one_device([*elsewhere, *rows])
    assert len(kept) == len(rows)
    assert {row.implementation for row in kept} >= {"triton", "flashmoba-measured", "fa2-published"}


def lines_of(axis) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}


def test_draw_lengths_shows_times_and_memory_per_sequence():
    rows = read_rows(RESULTS / "moba.csv", MoBATiming)
    figure = draw_lengths(rows, LIGHT)
    times, memory = figure.axes
    assert times.get_xscale() == times.get_yscale() == memory.get_yscale() == "log"
    shown = dict(zip(*lines_of(times)[LOOKS["triton"].label], strict=True))
    row = next(row for row in rows if (row.case, row.pass_name, row.implementation) == ("n64k", "fwd+bwd", "triton"))
    assert shown[65536] == pytest.approx(row.median_ms / 2)
    assert max(shown) == 1 << 20
    floor = dict(zip(*lines_of(times)["floor: useful products and bytes; inputs and outputs"], strict=True))
    assert floor[65536] == pytest.approx(row.floor_ms / 2)
    shown = dict(zip(*lines_of(memory)[LOOKS["triton"].label], strict=True))
    assert shown[65536] == pytest.approx(row.peak_bytes / 2**31)


def test_draw_times_shows_block_diagonal_times_over_the_floor():
    rows = read_rows(RESULTS / "block_diagonal.csv", Timing)
    forward = draw_times(rows, DARK).axes[0]
    shown = lines_of(forward)[LOOKS["torch-fa2"].label][0]
    expected = [
        row.ratio_to_floor
        for row in rows
        if (row.implementation, row.pass_name) == ("torch-fa2", "fwd") and row.ratio_to_floor
    ]
    assert sorted(shown) == pytest.approx(sorted(expected))


def test_draw_over_floor_clamps_distant_marks_and_labels_them():
    _, (axis,) = new_figure(1, 4.0, 2.0)
    dots = [Dot("window", "triton", 3.0, "0.10 ms"), Dot("window", "jax-jit", 300.0), Dot("window", "torch-fa2", 400.0)]
    draw_over_floor(axis, ["window"], dots, LIGHT)
    (ours,), (first,), (second,) = (lines_of(axis)[LOOKS[dot.implementation].label][0] for dot in dots)
    assert ours == 3.0 < FAR < first < second < 2.5 * FAR
    assert [text.get_text() for text in axis.texts if text.get_text()] == ["0.10 ms", "300x", "400x"]
    assert [axis.xaxis.get_major_formatter()(value, None) for value in (1.0, 20.0, 50.0)] == ["1", "20", ""]


def test_roofline_counts_block_diagonal_products():
    case = {"case": "h8_d128", "implementation": "triton", "pass_name": "bwd"}
    (row,) = [
        row
        for row in read_rows(RESULTS / "block_diagonal.csv", Timing)
        if all(getattr(row, name) == value for name, value in case.items())
    ]
    (point,) = roofline_plots.block_diagonal_points([row])
    # Each row and head takes five products of 2 * 64 * 128 operations and seven arrays of two-byte elements.
    assert point.intensity == pytest.approx(5 * 2 * 64 * 128 / (7 * 128 * 2))
    assert point.tflops == pytest.approx(262144 * 8 * 5 * 2 * 64 * 128 / row.median_ms / 1e9)


def test_roofline_points_are_below_the_data_sheet():
    rate, peak = roofline_plots.NOMINAL["NVIDIA H200"]
    points = [
        *roofline_plots.block_diagonal_points(read_rows(RESULTS / "block_diagonal.csv", Timing)),
        *roofline_plots.paged_points(read_rows(RESULTS / "paged.csv", PagedTiming)),
        *roofline_plots.counted_points(read_rows(RESULTS / "fuse.csv", FuseTiming), "fuse"),
        *roofline_plots.counted_points(read_rows(RESULTS / "moba.csv", MoBATiming), "MoBA"),
    ]
    assert {point.series for point in points} == {"block diagonal", "paged decode", "fuse", "MoBA"}
    for point in points:
        assert point.tflops < min(peak, rate * point.intensity), point


def test_mask_plots_match_the_operations():
    position = np.arange(96)
    offsets = np.array(mask_plots.OFFSETS)
    sequence = np.searchsorted(offsets, position, side="right") - 1
    block = (position - offsets[sequence]) // mask_plots.BLOCK
    same = (sequence[:, None] == sequence) & (block[:, None] == block)
    np.testing.assert_array_equal(mask_plots.packed_mask(is_causal=False).seen, same)
    np.testing.assert_array_equal(mask_plots.packed_mask(is_causal=True).seen, same & (position[:, None] >= position))
    seen = mask_plots.moba_mask().seen.reshape(256, 16, 16).any(axis=2)
    np.testing.assert_array_equal(seen.sum(axis=1), np.minimum(np.arange(256) // 16 + 1, mask_plots.TOP_K))
    window = mask_plots.fused_mask("sliding_window").seen
    assert window.any(axis=1).all() and window.mean() < 0.2


def test_example_pool_holds_each_page_of_a_sequence_once():
    pool = mask_plots.example_pool()
    for sequence, length in enumerate((14, 9, 17, 6)):
        np.testing.assert_array_equal(np.sort(pool.place[pool.owner == sequence]), np.arange(length))
    assert (pool.owner == -1).sum() == 64 - 46


def test_saved_pictures_keep_the_drawn_colours(tmp_path):
    def draw(theme):
        figure, (axis,) = new_figure(1, 2.0, 2.0)
        axis.barh([0, 1], [1.0, 2.0], color=[theme.ours, theme.floor])
        return figure

    save_one(draw, DARK, tmp_path / "bars.png")
    with Image.open(tmp_path / "bars.png") as image:
        colours = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in image.convert("RGB").getcolors(10**6)}
    assert {DARK.background, DARK.ours.lower(), DARK.floor.lower()} <= colours


def test_implementation_styles_differ_without_colour():
    looks = [(look.marker, look.line) for name, look in LOOKS.items() if not name.endswith("-published")]
    together = [LOOKS[name] for name in ("triton", "torch-flex", "torch-compile", "jax-cudnn", "jax-jit")]
    assert len({look.marker for look in together}) == len(together)
    assert len(set(looks)) >= 12
    for theme in THEMES:
        assert colour_of("triton", theme) == theme.ours
        assert colour_of("torch-fa2", theme) == theme.neutral


def test_sizes_have_short_names():
    assert [size_name(size) for size in (512, 8192, 1 << 19, 1 << 20)] == ["512", "8K", "512K", "1M"]


def test_pictures_without_rows_raise_nothing_to_draw():
    for picture in plots.PICTURES:
        if picture.sources:
            with pytest.raises(NothingToDraw):
                picture.function(*([] for _ in picture.sources), LIGHT)
