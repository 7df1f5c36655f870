"""The demo with MoBA: its model, routing statistics and command, at small sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from benchmarks.harness.records import read_rows
from blockdiag import Routing
from blockdiag.cli import app as command_line
from blockdiag.cli import demo_moba
from blockdiag.demo import language_model, moba_model
from blockdiag.demo.moba_model import MoBALanguageModel, MoBASettings
from blockdiag.demo.records import LossRow, RoutingRow

TINY = MoBASettings(
    steps=4, batch_size=2, sequence_length=80, block_size=16, top_k=2, width=16, heads=2, layers=2, evaluation_batches=1
)


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def models():
    attends = {
        demo_moba.MOBA: moba_model.routed_attention(TINY, "xla"),
        demo_moba.DENSE: moba_model.dense_attention,
    }
    return {name: MoBALanguageModel(TINY, attend) for name, attend in attends.items()}


def random_tokens(count: int) -> jax.Array:
    generator = np.random.default_rng(0)
    return jnp.asarray(generator.integers(0, 256, size=(count, TINY.sequence_length)), jnp.int32)


def test_both_models_have_the_same_parameters(models):
    moba, dense = (nnx.state(model, nnx.Param) for model in models.values())
    jax.tree.map(np.testing.assert_array_equal, moba, dense)
    counts = {moba_model.count_parameters(model) for model in models.values()}
    assert len(counts) == 1
    # There are an embedding, a head and a norm. Each layer has projections, a key convolution, a feed-forward network
    # and norms.
    width, layers = TINY.width, TINY.layers
    per_layer = 4 * width * width + TINY.key_taps * width + 8 * width * width + 2 * width
    assert counts == {2 * 256 * width + width + layers * per_layer}


def test_models_are_causal_and_the_routed_one_sees_less(models):
    tokens = random_tokens(1)
    changed = tokens.at[0, 40].add(1) % 256
    for model in models.values():
        logits = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.concatenate([tokens, changed]))
        difference = np.abs(logits[0] - logits[1]).max(axis=-1)
        assert not difference[:40].any()
        assert difference[40] > 0
    one_layer = dataclasses.replace(TINY, layers=1, top_k=1)
    alone = MoBALanguageModel(one_layer, moba_model.routed_attention(one_layer, "xla"))
    logits = nnx.jit(lambda model, tokens: model(tokens))(alone, jnp.concatenate([tokens, changed]))
    # A query that sees only its own block depends on the changed token at most through that block's convolved keys.
    assert not np.abs(logits[0] - logits[1])[48:].any()


def test_gradients_reach_the_key_convolution(models):
    model = models[demo_moba.MOBA]
    batch = jnp.concatenate([random_tokens(2), random_tokens(2)[:, :1]], axis=1)
    _, gradients = nnx.jit(nnx.value_and_grad(language_model.loss_of))(model, batch)
    for layer in range(TINY.layers):
        assert np.abs(gradients["layers"][layer]["attention"]["key_weights"][...]).max() > 0


def test_routing_statistics_of_a_known_routing_match_by_hand():
    settings = dataclasses.replace(TINY, sequence_length=64, top_k=2)
    # One head always chooses the block before its own, the other one the first block.
    own = np.arange(64) // 16
    chosen = np.stack([np.stack([own, own - 1], axis=-1), np.stack([own, np.where(own, 0, -1)], axis=-1)], axis=1)
    found = moba_model._statistics(Routing(jnp.asarray(chosen[None]), 16, 4), np.full((1, 64, 2), 0.25), settings)
    # Queries of blocks 2 and 3 have a choice, among 2 and 3 blocks.
    assert found.distance == pytest.approx((1 + 1 + 2 + 3) / 4)
    assert found.blind_distance == pytest.approx((1.5 + 2) / 2)
    assert found.own_weight == 0.25
    assert found.own_keys == pytest.approx(np.mean([n / (n + 16) for n in range(1, 17)]))
    assert (found.distinct, found.available) == (1.0, 3)


def test_routing_statistics_without_a_choice_raise_value_error():
    settings = dataclasses.replace(TINY, sequence_length=32, top_k=2)
    routing = Routing(jnp.zeros((1, 32, 1, 2), jnp.int32), 16, 2)
    with pytest.raises(ValueError, match="take longer sequences"):
        moba_model._statistics(routing, np.ones((1, 32, 1)), settings)


def test_routing_statistics_of_a_model_are_in_range(models):
    found = moba_model.routing_statistics(models[demo_moba.MOBA], random_tokens(2), TINY, "xla")
    assert len(found) == TINY.layers
    for layer in found:
        assert 0 < layer.own_weight < 1
        assert 1 <= layer.distance <= 4
        assert 1 <= layer.distinct <= layer.available == 4


def run_demo(*arguments: str):
    return CliRunner().invoke(command_line.app, ["demo", "--attention", "moba", *arguments], env={"COLUMNS": "120"})


def test_command_prints_losses_and_routing_and_saves_a_plot(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_moba, "CPU_SETTINGS", dataclasses.replace(TINY, layers=1))
    plot = tmp_path / "losses.png"
    arguments = ["--output", str(plot), "--csv", str(tmp_path), "--implementation", "xla"]
    result = run_demo("--steps", "2", "--device", "cpu", *arguments)
    assert result.exit_code == 0, result.output
    for expected in (demo_moba.MOBA, demo_moba.DENSE, "bits/byte", "<= 32", "<= 80", "weight on own block", "of 4"):
        assert expected in result.output
    assert "agrees" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    losses = read_rows(tmp_path / "losses.csv", LossRow)
    assert [(row.attention, row.step) for row in losses] == [
        (name, step) for name in (demo_moba.MOBA, demo_moba.DENSE) for step in (1, 2)
    ]
    routing = read_rows(tmp_path / "routing.csv", RoutingRow)
    assert {row.share for row in routing if row.query_block == row.key_block} == {1.0}
    for query_block in range(TINY.num_blocks):
        for head in range(TINY.heads):
            seen = sum(row.share for row in routing if (row.head, row.query_block) == (head, query_block))
            assert seen == pytest.approx(min(query_block + 1, TINY.top_k))


def test_command_fails_when_moba_with_all_blocks_differs_from_dense(monkeypatch, tmp_path):
    training = language_model.Training(
        model=MoBALanguageModel(TINY, moba_model.dense_attention), losses=[2.0, 1.0], held_out_loss=1.0,
        tokens_per_second=1.0,
    )  # fmt: skip
    monkeypatch.setattr(demo_moba, "CPU_SETTINGS", TINY)
    monkeypatch.setattr(demo_moba, "train_with_progress", lambda console, settings, make: dict.fromkeys(make, training))
    monkeypatch.setattr(demo_moba, "routing_of", lambda *_: [])
    for difference in (0.5, float("nan")):
        monkeypatch.setattr(demo_moba, "difference_with_all_blocks", lambda *_, value=difference: value)
        result = run_demo("--device", "cpu", "--output", str(tmp_path / "losses.png"))
        assert result.exit_code == 1
        assert "DISAGREES" in result.output
