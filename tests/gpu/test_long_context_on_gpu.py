"""examples/long_context.py on all GPUs with the kernels: training matches one GPU, and resuming is bitwise exact."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

pytestmark = pytest.mark.multigpu

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"context": 2048, "batch_size": 2, "width": 512, "heads": 8, "block_size": 128, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def usual_promotion():
    """Restore JAX's usual promotion, which Flax needs and the other tests disable."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def example(monkeypatch):
    """Yield the modules of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("model", "train")
    yield SimpleNamespace(**{name: importlib.import_module(f"long_context_{name}") for name in names})
    for name in [name for name in sys.modules if name.startswith("long_context_")]:
        del sys.modules[name]


def test_training_over_all_gpus_resumes_bitwise_and_has_the_losses_of_one(example, tmp_path):
    settings = example.model.Settings(**SIZES, steps=6, warmup_steps=1)
    count = len(jax.devices()) // 2 * 2
    placements = [example.model.Placement.over(jax.devices()[:n], min(n, 2)) for n in (1, count)]
    alone, shared = (example.train.Trainer(settings, placement, "moba") for placement in placements)
    whole, _ = example.train.train(shared, None)
    np.testing.assert_allclose(whole.losses, example.train.train(alone, None)[0].losses, rtol=2e-3)
    assert whole.losses[-1] < whole.losses[0]

    early = example.train.Checkpoints(tmp_path, settings)
    example.train.train(shared, early, until=3)
    early.close()
    late = example.train.Checkpoints(tmp_path, settings)
    assert int(late.latest(shared.abstract_state()).step) == 3
    resumed, _ = example.train.train(shared, late)
    late.close()
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)
