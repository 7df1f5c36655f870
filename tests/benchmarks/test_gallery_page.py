"""The gallery's page: its content, agreement of the committed page with the code, and its command."""

import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.gallery.cases import SHOWN, select_variants, shape_text, timed_sizes
from benchmarks.gallery.page import explanation_of, heading_of, recorded_times, times_of, write_gallery
from benchmarks.harness.records import GalleryTiming, merge_rows, write_rows
from blockdiag.fusion.gallery import GROUPS, VARIANTS, Sizes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
SHOWN_HERE = ["sliding_window", "differential", "dense_bias_1N1S"]
WHERE = dict.fromkeys(("driver", "jax", "jaxlib", "torch", "triton", "date"), "1.0")


def timing(variant: str, pass_name: str, ours_ms: float | None, xla_ms: float | None, **fields) -> GalleryTiming:
    usual = {"shape": "query [2, 4096, 8, 64]", "dtype": "bfloat16", "device": "A GPU", **WHERE}
    return GalleryTiming(variant=variant, pass_name=pass_name, ours_ms=ours_ms, xla_ms=xla_ms, **{**usual, **fields})


def sections(text: str) -> dict[str, str]:
    """Return the sections of a page by the variant in their heading."""
    _, *parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    (folder / "gallery").mkdir()
    (folder / "gallery" / "old.png").touch()
    rows = [
        timing("sliding_window", "fwd", 0.0625, 1.0),
        timing("sliding_window", "fwd+bwd", 0.5, None, note="xla fwd+bwd: failed: out of memory"),
        timing("differential", "fwd", 0.5, 2.0),
    ]
    assert write_gallery(folder, rows, SHOWN_HERE, say=lambda line: None) == folder / "gallery.md"
    return folder


def test_page_shows_code_tiles_kernels_and_times(written):
    text = (written / "gallery.md").read_text()
    found = sections(text)
    assert list(found) == [name for name in VARIANTS if name in SHOWN_HERE]
    window = found["sliding_window"]
    assert "```py\ndef sliding_window(query" in window
    assert "with `window=256`" in window
    cells = r"^\| (\d+)% \| \d+ / \d+ \+ \d+ \| (.*) \| (.*) \| (.*) \|$"
    skipped, *times = re.search(cells, window, flags=re.MULTILINE).groups()
    assert 80 < int(skipped) < 100
    assert times == ["query [2, 4096, 8, 64]", "0.062 ms, 16.0x", "0.500 ms"]
    assert "out of memory" in window
    # There are two regions, and neither skips tiles. Hopper has different forward kernels.
    assert re.search(
        r"^\| none.* \| \d+ \+ \d+ \+ \d+ \+ \d+ / .* \| 0.500 ms, 4.0x \| - \|$", found["differential"], re.MULTILINE
    )
    assert "gallery/" not in found["differential"]
    assert found["dense_bias_1N1S"].count("| - | - | - |") == 1
    assert "A GPU" in text and "Median of 2 factors, forward: 10.0." in text


def test_gallery_pictures_match_the_page_and_are_reproducible(written, tmp_path):
    write_gallery(tmp_path, [], ["sliding_window"], say=lambda line: None)
    first, second = (
        {path.name: path.read_bytes() for path in (folder / "gallery").iterdir()} for folder in (written, tmp_path)
    )
    assert first == second and sorted(first) == ["sliding_window-dark.png", "sliding_window.png"]
    assert all(data.startswith(b"\x89PNG") and len(data) < 10_000 for data in first.values())


def test_region_plot_draws_visited_tiles():
    region = explanation_of(VARIANTS["causal_tril"]).regions[0]
    rows = SHOWN.query_tokens // region.tile[0], SHOWN.key_tokens // region.tile[1]
    assert region.visited.shape == rows and 0.4 < 1 - region.visited.mean() < 0.5
    axis = Figure().add_subplot()
    region.plot(axis)
    (image,) = axis.images
    assert image.get_extent() == [0, SHOWN.key_tokens, SHOWN.query_tokens, 0]
    colours = image.get_array().reshape(-1, 3)
    dark = np.asarray((colours == colours.min(axis=0)).all(axis=1)).reshape(rows)
    np.testing.assert_array_equal(dark, region.visited)


def test_committed_gallery_page_matches_the_variants():
    """The compiler's figures take long and are not checked; `python -m benchmarks gallery-page` writes them."""
    text = PAGE.read_text()
    assert list(sections(text)) == list(VARIANTS)
    assert not re.search(r"/[^ ]*/[^ ]*\.py:", text), "a path of the machine that wrote it"
    places = [text.index(heading_of(variant)) for variant in VARIANTS.values()]
    assert places == sorted(places)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == list(GROUPS)


def test_committed_page_has_the_recorded_times():
    rows = recorded_times(ROOT / "benchmarks" / "results" / "gallery.csv")
    for name, section in sections(PAGE.read_text()).items():
        assert f"| {times_of(rows, name)} |" in section, f"{name}: run python -m benchmarks gallery-page"


def test_committed_gallery_pictures_match_the_page():
    shown = set(re.findall(r"\]\(gallery/(.*?)\.png\)", PAGE.read_text()))
    drawn = {f"{name}{suffix}.png" for name in shown for suffix in ("", "-dark")}
    assert drawn == {path.name for path in (ROOT / "docs" / "gallery").iterdir()}
    assert {"causal", "sliding_window", "block_diagonal"} <= shown


def test_recorded_times_are_those_of_the_last_device(tmp_path):
    path = tmp_path / "gallery.csv"
    assert recorded_times(path) == []
    write_rows(path, GalleryTiming, [timing("causal", "fwd", 1.0, 2.0, device="another GPU")])
    merge_rows(path, GalleryTiming, [timing("causal", "fwd", 0.5, 2.0), timing("causal", "fwd", 0.25, 2.0)])
    (row,) = recorded_times(path)
    assert (row.device, row.ours_ms) == ("A GPU", 0.25)


def test_gallery_page_command_writes_the_selected_variants(tmp_path):
    arguments = [
        "gallery-page",
        "--output",
        str(tmp_path),
        "--variants",
        "vanilla",
        "--results",
        str(tmp_path / "none.csv"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "no times" in " ".join(result.output.split())
    assert list(sections((tmp_path / "gallery.md").read_text())) == ["vanilla"]
    result = CliRunner().invoke(app, [*arguments[:4], "vanila"])
    assert "vanila" in str(result.exception)
    result = CliRunner().invoke(app, [*arguments, "--measure"])
    assert "needs an NVIDIA GPU" in str(result.exception)


def test_select_variants_and_timed_sizes_match_the_variants():
    assert select_variants(" causal, alibi") == ["causal", "alibi"]
    assert select_variants(None) == list(VARIANTS)
    with pytest.raises(ValueError, match="some of"):
        select_variants("")
    for name, variant in VARIANTS.items():
        assert timed_sizes(name).dtype == "bfloat16"
        assert set(variant.options) <= set(inspect.signature(variant.function).parameters), name
    few = Sizes(batch=1, query_tokens=4, key_tokens=6)
    texts = {"causal": "query [1, 4, 4, 16]", "one_query": "query [1, 1, 4, 16], key [1, 6, 4, 16]"}
    for name, text in texts.items():
        assert shape_text(VARIANTS[name].make_inputs(jax.random.key(0), few)) == text
