"""The recall experiment: its formula, its kinds of keys and its command, at small sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.experiments import recall_routing as recall_experiment
from benchmarks.experiments.recall_records import RecallRow
from benchmarks.experiments.recall_routing import RecallSettings, Retrieval, by_keys, chosen_probability, measure_recall
from benchmarks.harness.records import read_rows
from blockdiag.demo.language_model import english_text, split_text

SETTINGS = RecallSettings(
    block_sizes=(64, 16), attended_tokens=128, context=512, trials=200, head_dim=32, phrase=4, batch_size=8,
    training_context=128, steps=40, convolutions=(0, 3),
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's default promotion, as the command line does, instead of the strict one of the other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def rows():
    lines = []
    found = recall_experiment.run_recall(SETTINGS, say=lines.append)
    assert len(lines) == 2
    return by_keys(found)


def test_chosen_probability_matches_simulated_normal_scores():
    generator = np.random.default_rng(0)
    snr, candidates, places = 0.8, 9, 3
    scores = generator.standard_normal((200_000, candidates))
    scores[:, 0] += snr * np.sqrt(2.0)
    rank = (scores[:, 1:] > scores[:, :1]).sum(axis=1)
    assert chosen_probability(snr, candidates, places) == pytest.approx((rank < places).mean(), abs=4e-3)


def test_chosen_probability_at_the_limits_has_known_values():
    assert chosen_probability(0.0, 8, 2) == pytest.approx(2 / 8, abs=1e-4)
    assert chosen_probability(9.0, 100, 1) == pytest.approx(1.0, abs=1e-6)
    assert chosen_probability(1.0, 5, 0) == 0.0
    assert chosen_probability(1.0, 5, 5) == 1.0


def independent_retrieval(settings: RecallSettings) -> Retrieval:
    """Return keys that meet the assumptions of the formula: independent and of unit length."""
    generator = np.random.default_rng(0)
    key = generator.standard_normal((settings.trials, settings.context, settings.head_dim)).astype(np.float32)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    position = generator.integers(0, settings.context - max(settings.block_sizes), size=settings.trials)
    return Retrieval(jnp.asarray(key[np.arange(settings.trials), position]), jnp.asarray(key), position, 1)


def test_recall_of_independent_keys_matches_the_formula():
    settings = dataclasses.replace(SETTINGS, trials=600)
    predicted = np.sqrt(settings.head_dim / 2)
    retrieval = independent_retrieval(settings)
    assert recall_experiment.token_ratio(retrieval) == pytest.approx(predicted, rel=0.02)
    for row in measure_recall("independent", retrieval, settings, predicted=predicted):
        assert row.predicted_snr == pytest.approx(np.sqrt(settings.head_dim / (2 * row.block_size)))
        # The SNR is measured from 600 excesses, each with the noise of a score.
        assert row.snr == pytest.approx(row.predicted_snr, abs=4 / np.sqrt(2 * 600))
        assert row.accuracy == pytest.approx(row.predicted_accuracy, abs=4 * row.error)


@pytest.mark.exhaustive
def test_needles_lie_in_one_block_that_a_query_may_choose(rows):
    retrieval = recall_experiment.words_retrieval(SETTINGS)
    last = (SETTINGS.context - 1) // max(SETTINGS.block_sizes)
    assert (retrieval.position // max(SETTINGS.block_sizes) < last).all()
    # A needle's product with itself is 1, and its products with all other words are smaller.
    products = np.asarray(jnp.einsum("th,tch->tc", retrieval.query, retrieval.key, precision="highest"))
    np.testing.assert_array_equal(products.argmax(axis=1), retrieval.position)
    np.testing.assert_allclose(products.max(axis=1), 1.0, rtol=1e-5)
    generator = np.random.default_rng(0)
    position = recall_experiment._positions(SETTINGS, generator, SETTINGS.phrase)
    assert (position // 16 == (position + SETTINGS.phrase - 1) // 16).all()


@pytest.mark.exhaustive
def test_smaller_blocks_raise_accuracy_at_constant_attended_tokens(rows):
    assert list(rows) == ["words", "bytes", "bytes, convolved 3"]
    for found in rows.values():
        small, large = found
        assert small.block_size * small.top_k == large.block_size * large.top_k
        assert small.accuracy > large.accuracy + 2 * max(small.error, large.error)
        assert small.snr > large.snr
        assert small.accuracy > small.chance + 4 * small.error


@pytest.mark.exhaustive
def test_key_convolution_raises_the_signal_of_phrases():
    training_text, held_out_text = split_text(english_text())
    settings = dataclasses.replace(SETTINGS, steps=150, phrase=8, training_context=256)
    found = {}
    for size in (0, 5):
        weights, loss = recall_experiment.train(training_text, size, settings)
        assert (weights.convolution is None) == (size == 0)
        found[size] = (
            recall_experiment.token_ratio(recall_experiment.phrase_retrieval(weights, held_out_text, settings)),
            loss,
        )
    assert found[5][0] > 1.1 * found[0][0]
    assert found[5][1] < found[0][1]


def test_training_repeats_for_the_same_seed():
    text, _ = split_text(english_text())
    settings = dataclasses.replace(SETTINGS, steps=3)
    first, again = (recall_experiment.train(text, 3, settings)[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.exhaustive
def test_command_prints_the_table_and_saves_a_plot(monkeypatch, tmp_path, rows):
    flat = [row for found in rows.values() for row in found]
    monkeypatch.setattr(recall_experiment, "run_recall", lambda settings, say: flat)
    plot = tmp_path / "folder" / "recall.png"
    result = CliRunner().invoke(
        app, ["recall", "--trials", "2", "--output", str(plot), "--csv", str(tmp_path)], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.output
    kept = read_rows(tmp_path / "recall.csv", RecallRow)
    assert [(row.keys, row.block_size) for row in kept] == [(row.keys, row.block_size) for row in flat]
    assert [row.accuracy for row in kept] == pytest.approx([row.accuracy for row in flat], rel=1e-5)
    for expected in ("words", "bytes, convolved 3", "SNR", f"{flat[0].accuracy:.3f}", "2B)"):
        assert expected in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size < 200_000


def test_recall_command_with_too_short_a_context_exits_with_an_error():
    result = CliRunner().invoke(app, ["recall", "--context", "300"])
    assert result.exit_code == 2
    assert "--context" in result.output
