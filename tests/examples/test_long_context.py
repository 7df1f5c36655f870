"""examples/long_context.py at a small size: training on several devices, checkpoints and serving."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.devices.programs import count_collectives

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4
SIZES = {"context": 64, "batch_size": 2, "width": 16, "heads": 4, "layers": 2, "block_size": 16, "top_k": 2}


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example():
    """Return the modules of the example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        names = ("data", "model", "plots", "train", "serve")
        modules = {name: importlib.import_module(f"long_context_{name}") for name in names}
        return SimpleNamespace(main=importlib.import_module("long_context"), **modules)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def settings(example):
    return example.model.Settings(**SIZES, steps=STEPS, warmup_steps=1)


@pytest.fixture(scope="module")
def trainers(example, settings):
    """Return trainers on one device and on four, where two devices share each sequence."""
    placements = {count: example.model.Placement.over(jax.devices()[:count], min(count, 2)) for count in (1, 4)}
    return {count: example.train.Trainer(settings, placement, "moba") for count, placement in placements.items()}


@pytest.fixture(scope="module")
def trained(example, trainers, tmp_path_factory):
    """Return the states of both trainings, and the folder with the checkpoints of four devices."""
    folder = tmp_path_factory.mktemp("states")
    checkpoints = example.train.Checkpoints(folder, trainers[4].settings)
    states = {}
    for count, kept in ((1, None), (4, checkpoints)):
        states[count], _ = example.train.train(trainers[count], kept, save_every=2)
    checkpoints.close()
    return states, folder


def assert_same(tree, other):
    """Assert that two trees are equal to the last bit."""
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_training_on_four_devices_matches_the_losses_of_one(trained):
    states, _ = trained
    np.testing.assert_allclose(states[4].losses, states[1].losses, rtol=2e-6)
    assert states[1].losses[-1] < states[1].losses[0] - 0.1
    for one, four in zip(*(jax.tree.leaves(states[count].parameters) for count in (1, 4)), strict=True):
        np.testing.assert_allclose(one, four, atol=1e-4)


def test_parameters_and_moments_are_sharded(trainers, trained):
    """Each of four devices has a quarter of every matrix. Training on one device needs no collectives."""
    states, _ = trained
    for tree in (states[4].parameters, states[4].moments):
        matrices = [x for path, x in jax.tree.leaves_with_path(tree) if "kernel" in jax.tree_util.keystr(path)]
        assert len(matrices) >= 6
        assert all(4 * x.addressable_shards[0].data.size == x.size for x in matrices)
    found = count_collectives(trainers[4].program.as_text())
    assert found["all-to-all"] > 0 and found["all-gather"] > 0
    assert not count_collectives(trainers[1].program.as_text())


@pytest.mark.parametrize("count", [4, 1])
def test_training_resumes_from_a_checkpoint(example, trainers, trained, count, tmp_path):
    """The result is bitwise equal on as many devices, and equal up to rounding on another number."""
    states, _ = trained
    whole = states[4]
    early = example.train.Checkpoints(tmp_path, trainers[4].settings)
    example.train.train(trainers[4], early, until=2)
    early.close()
    resumed = example.train.Checkpoints(tmp_path, trainers[count].settings)
    first = resumed.latest(trainers[count].abstract_state())
    assert int(first.step) == 2 and np.isnan(first.losses[2:]).all()
    state, _ = example.train.train(trainers[count], resumed)
    resumed.close()
    if count == 4:
        assert_same(state, whole)
    np.testing.assert_allclose(state.losses, whole.losses, rtol=2e-6)


def test_finished_training_is_restored_without_steps(example, trainers, trained):
    states, folder = trained
    kept = example.train.Checkpoints(folder, trainers[4].settings)
    state, seconds = example.train.train(trainers[4], kept)
    kept.close()
    assert seconds is None
    assert_same(state, states[4])


def test_checkpoint_of_other_settings_raises_value_error(example, settings, trained):
    other = dataclasses.replace(settings, learning_rate=1.0)
    with pytest.raises(ValueError, match=r"other settings: \{'learning_rate': 0\.004\}"):
        example.train.Checkpoints(trained[1], other)


def test_dense_attention_on_four_devices_matches_the_loss_of_one(example, settings):
    """The loss must differ from MoBA's although the parameters are the same."""
    settings = dataclasses.replace(settings, layers=1)
    losses = {}
    for name, count in (("dense", 1), ("dense", 4), ("moba", 1)):
        trainer = example.train.Trainer(settings, example.model.Placement.over(jax.devices()[:count]), name)
        batch = trainer.place(example.data.load_text()[0], 0, 0)
        parameters = example.model.draw_parameters(settings, trainer.placement)
        losses[name, count] = float(jax.jit(trainer.loss)(parameters, *batch, trainer.tables))
    np.testing.assert_allclose(losses["dense", 4], losses["dense", 1], rtol=1e-6)
    assert abs(losses["dense", 1] / losses["moba", 1] - 1) > 1e-5


def test_served_text_matches_the_model_without_a_cache(example, settings, trained, capsys):
    """The prompts take several steps, take one step, and are shorter than the convolution's reach."""
    prompts = [b"def function(self):\n    return self.f", b"import", b"a"]
    server = example.serve.Server(settings, trained[0][4].parameters, jax.devices()[0])
    served = server.write(prompts, 24)
    assert [len(text) for text in served.texts] == [len(prompt) + 24 for prompt in prompts]
    assert all(text.startswith(prompt) for text, prompt in zip(served.texts, prompts, strict=True))
    assert served.same_bytes == 1
    assert served.logit_difference < 1e-5
    # Run the forward pass of training on the served text.
    expected = server.logits_without_cache(served.texts).argmax(axis=-1)
    for row, (text, prompt) in enumerate(zip(served.texts, prompts, strict=True)):
        assert list(text[len(prompt) :]) == expected[row, len(prompt) - 1 : len(text) - 1].tolist()
    example.main.print_served(example.main.Console(), served)
    assert "100.0% of the generated bytes" in capsys.readouterr().out
    eight = server.write(prompts, 24, "float8_e4m3fn")
    assert 1e-5 < eight.logit_difference < 0.5
    assert eight.cache_bytes < served.cache_bytes
    with pytest.raises(ValueError, match="prompts of 1 to 37 bytes and 40 new ones"):
        server.write(prompts, 40)


def test_crop_targets_are_the_next_tokens(example):
    text = np.arange(100, 200, dtype=np.uint8)
    tokens, targets = example.data.crop(text, 3, 20, seed=1, step=2)
    np.testing.assert_array_equal(targets, tokens + 1)
    again, _ = example.data.crop(text, 3, 20, seed=1, step=2)
    other, _ = example.data.crop(text, 3, 20, seed=1, step=3)
    np.testing.assert_array_equal(tokens, again)
    assert (tokens != other).any()
    with pytest.raises(ValueError, match="`context` is 100"):
        example.data.crop(text, 1, 100, seed=0, step=0)


def test_text_is_documentation_and_source(example):
    text, held_out = example.data.load_text()
    assert len(text) > 3_000_000 and len(text) / 20 < len(held_out) < len(text) / 5
    assert b"The following" in text.tobytes() and b"def dataclass(" in text.tobytes() + held_out.tobytes()


def test_program_trains_on_several_numbers_of_devices(example, tmp_path, capsys):
    """Training without attention saves time. The printed text must follow from the written rows."""
    sizes = [f"--{name.replace('_', '-')}={x}" for name, x in SIZES.items()]
    file = tmp_path / "found.json"
    options = ["--steps=6", "--evaluation-batches=1", "--attention=none", f"--json={file}"]
    example.main.main([*sizes, *options, "--devices", "1", "2"])
    assert "of perfect scaling" in capsys.readouterr().out
    found = json.loads(file.read_text())
    one, two = (example.main.Training(**row) for row in found["trainings"])
    assert (one.devices, two.devices) == (1, 2) and found["served"] is None
    np.testing.assert_allclose(one.losses, two.losses, rtol=1e-5)
    np.testing.assert_allclose(one.held_out, two.held_out, rtol=1e-5)
    assert min(one.step_ms, two.tokens_per_second, two.program_bytes) > 0
    one, two = (dataclasses.replace(x, step_ms=time) for x, time in ((one, 10.0), (two, 8.0)))
    moba = dataclasses.replace(one, attention="moba", step_ms=25.0, peak_bytes=3 << 30)
    example.main.print_trainings(example.main.Console(width=200), [one, two, moba], example.model.Settings(), "GPU")
    printed = capsys.readouterr().out
    assert "62%" in printed and "on a device: 3.0 GiB" in printed
    assert "moba, 1 device(s): of 25.0 ms, 15.0 ms are attention" in printed


def test_draw_losses_shows_a_line_for_each_attention(example, tmp_path):
    training = example.main.Training(
        attention="moba", devices=1, sequence_devices=1, parameters=1, losses=[5.0, 4.0, 3.0], held_out=None,
        step_ms=None, tokens_per_second=None, program_bytes=1, peak_bytes=None, collectives={}, compile_seconds=1.0,
    )  # fmt: skip
    trainings = [training, dataclasses.replace(training, attention="dense", losses=[5.0, 4.5, 4.0])]
    draw = functools.partial(example.plots.draw_losses, trainings, example.model.Settings(steps=3), "GPU")
    (axis,) = draw(example.plots.LIGHT).axes
    assert [line.get_label() for line in axis.lines] == ["moba", "dense"]
    np.testing.assert_allclose(axis.lines[0].get_ydata(), np.array([5, 4, 3]) / np.log(2))
    (axis,) = example.plots.draw_losses(trainings[1:], example.model.Settings(), "GPU", example.plots.DARK).axes
    assert [line.get_label() for line in axis.lines] == ["dense"]
    assert all(path.exists() for path in example.plots.save_picture(draw, tmp_path / "losses.png"))


def test_draw_scaling_shows_measured_and_perfect_scaling(example):
    training = example.main.Training(
        attention="moba", devices=1, sequence_devices=1, parameters=1, losses=[5.0], held_out=None, step_ms=12.0,
        tokens_per_second=1.0, program_bytes=1, peak_bytes=None, collectives={}, compile_seconds=1.0,
    )  # fmt: skip
    trainings = [training, dataclasses.replace(training, devices=4, sequence_devices=4, step_ms=5.0)]
    (axis,) = example.plots.draw_scaling(trainings, example.model.Settings(), "GPU", example.plots.LIGHT).axes
    measured, perfect = (line.get_ydata() for line in axis.lines)
    np.testing.assert_allclose([measured, perfect], [[12.0, 5.0], [12.0, 3.0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "9"], "--devices must be from 1 to 4"),
        (["--sequence-devices", "3"], "`sequence_devices` must divide the 4 devices, got 3"),
        (["--sequence-devices", "1", "--batch-size", "3"], "`batch_size` must be a multiple of the 4 devices"),
        (["--context", "510"], "`context` must be a multiple of the 4 devices along 'sequence', got 510"),
        (["--width", "20"], "`width` must be a multiple of twice the 4 heads"),
        (["--attention", "none", "--plot", "x.png"], "--plot compares"),
        (["--devices", "1", "2", "--checkpoints", "x"], "--checkpoints are for one number"),
    ],
)
def test_invalid_option_exits_with_an_error(example, capsys, options, message):
    with pytest.raises(SystemExit):
        example.main.main(options)
    assert message in capsys.readouterr().err
