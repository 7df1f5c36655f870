"""The demo's model, its two attentions and its command, at small sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from benchmarks.harness.records import read_rows, write_rows
from blockdiag.cli import app as command_line
from blockdiag.cli import demo
from blockdiag.demo import language_model
from blockdiag.demo.language_model import Settings
from blockdiag.demo.records import LossRow

TINY = Settings(
    steps=20, batch_size=2, sequence_length=40, block_size=16, width=16, heads=2, layers=1, evaluation_batches=2
)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def trainings():
    attentions = {
        demo.OURS: language_model.block_attention(TINY, None),
        demo.BASELINE: language_model.masked_attention(TINY),
    }
    return {name: language_model.train(TINY, attention) for name, attention in attentions.items()}, attentions


def test_held_out_text_is_english_and_absent_from_training_text():
    text = language_model.english_text()
    assert text.dtype == np.uint8 and len(text) > 200_000
    training, held_out = language_model.split_text(text)
    assert len(training) + len(held_out) == len(text)
    assert b"the value of the" in training.tobytes()
    known = b" ".join(training.tobytes().split())
    # The first and the last paragraph may be cut.
    paragraphs = [part for part in held_out.tobytes().split(b"\n\n")[1:-1] if len(part) > 80]
    assert paragraphs and not any(b" ".join(part.split()) in known for part in paragraphs)


def test_batches_repeat_for_the_same_seed():
    text = language_model.english_text()
    first, again, other = (list(language_model.batches(text, TINY, count=2, seed=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first[0].shape == (2, 41) and first[0].dtype == np.int32
    assert not np.array_equal(first[0], other[0])


def test_block_attention_matches_masked_attention():
    query, key, value = (jax.random.normal(jax.random.key(seed), (2, 40, 2, 8)) for seed in range(3))
    ours, baseline = language_model.block_attention(TINY, None), language_model.masked_attention(TINY)
    results = (jax.jit(function)(query, key, value) for function in (ours, baseline))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


def test_model_is_causal_and_sees_earlier_blocks():
    model = language_model.LanguageModel(TINY, language_model.block_attention(TINY, None))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, size=(1, 40)), jnp.int32)
    changed = tokens.at[0, 15].add(1) % 256
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.concatenate([tokens, changed]))
    difference = np.abs(logits[0] - logits[1]).max(axis=-1)
    assert not difference[:15].any()
    # Token 16 begins the next block, but the convolution reaches back to token 15.
    assert difference[16] > 0


def test_losses_of_both_attentions_agree(trainings):
    results, attentions = trainings
    ours, baseline = results[demo.OURS], results[demo.BASELINE]
    np.testing.assert_allclose(ours.losses, baseline.losses, rtol=1e-5)
    assert ours.losses[-1] < ours.losses[0]
    assert all(check.passed for check in demo.compare(TINY, results, attentions))


def test_compare_of_different_attentions_fails_the_check(trainings):
    results, attentions = trainings
    wrong = dict(attentions)
    wrong[demo.BASELINE] = language_model.masked_attention(dataclasses.replace(TINY, block_size=8))
    checks = demo.compare(TINY, results, wrong)
    assert not checks[0].passed
    assert not demo.Check("not a number", float("nan"), 1.0).passed


def test_swapping_the_attention_keeps_the_weights(trainings):
    results, attentions = trainings
    model = results[demo.OURS].model
    swapped = language_model.with_attention(model, TINY, attentions[demo.BASELINE])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), nnx.state(swapped, nnx.Param))


def run_demo(*arguments: str):
    return CliRunner().invoke(command_line.app, ["demo", *arguments])


@pytest.mark.versions
def test_command_prints_both_results_and_saves_a_plot(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "CPU_SETTINGS", TINY)
    plot = tmp_path / "folder" / "losses.png"
    other = LossRow(
        demo="moba", attention="moba_attention", step=1, loss=2.0, device="cpu", jax="1.0", date="2026-01-02"
    )
    write_rows(tmp_path / "losses.csv", LossRow, [other])
    arguments = ["--output", str(plot), "--csv", str(tmp_path), "--implementation", "xla"]
    result = run_demo("--steps", "2", "--device", "cpu", *arguments)
    assert result.exit_code == 0, result.output
    for expected in (demo.OURS, demo.BASELINE, "bits per byte", "tokens/s", "With the same weights", "Trained apart"):
        assert expected in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size < 100_000
    kept, *rows = read_rows(tmp_path / "losses.csv", LossRow)
    assert kept == other
    assert [(row.attention, row.step) for row in rows] == [
        (name, step) for name in (demo.OURS, demo.BASELINE) for step in (1, 2)
    ]
    assert all(4.0 < row.loss < 8.0 for row in rows)


def test_command_fails_when_losses_disagree(monkeypatch, tmp_path, trainings):
    results, _ = trainings
    monkeypatch.setattr(demo, "_train_all", lambda console, settings, attentions: results)
    monkeypatch.setattr(demo, "compare", lambda *_: [demo.Check("With the same weights", 0.5, 1e-5)])
    result = run_demo("--device", "cpu", "--output", str(tmp_path / "losses.png"))
    assert result.exit_code == 1
    assert "DISAGREE" in result.output


def test_command_without_the_device_exits_with_an_error(monkeypatch):
    def no_device(kind):
        raise RuntimeError(f"Unknown backend {kind}")

    monkeypatch.setattr(jax, "devices", no_device)
    result = run_demo("--device", "gpu")
    assert result.exit_code == 2
    assert "--device" in result.output
