"""examples/transformers_moba.py: its attention function for transformers, which need not be installed."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from blockdiag.torch import moba_attention  # noqa: E402

OPTIONS = {"block_size": 16, "top_k": 2}


@pytest.fixture(scope="module")
def forward():
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "transformers_moba.py"))[
        "moba_attention_forward"
    ]


@pytest.fixture
def operands():
    """Return query [B, N, T, H] and key and value [B, K, S, H], the layout of models in transformers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 40, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]


def test_forward_matches_moba_attention_in_the_layout_of_transformers(forward, operands):
    mask = torch.arange(40) >= torch.tensor([[0], [9]])
    output, weights = forward(SimpleNamespace(is_causal=True), *operands, mask, scaling=0.3, dropout=0.0, **OPTIONS)
    expected = moba_attention(*(x.transpose(1, 2) for x in operands), scale=0.3, key_mask=mask, **OPTIONS)
    assert weights is None and output.shape == (2, 40, 4, 16)
    assert torch.equal(output, expected)
    # A single new token after a cache has the position of the last key.
    query, key, value = operands
    step, _ = forward(SimpleNamespace(is_causal=True), query[:, :, -1:], key, value, mask, scaling=0.3, **OPTIONS)
    torch.testing.assert_close(step, output[:, -1:])


def test_gradients_reach_the_operands(forward, operands):
    # Models pass arguments that attention does not need.
    output, _ = forward(SimpleNamespace(), *operands, None, position_ids=torch.arange(40), **OPTIONS)
    assert all(gradient.any() for gradient in torch.autograd.grad(output.square().sum(), operands))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"attention_mask": torch.ones(2, 1, 40, 40, dtype=torch.bool)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 40)}, "attention_mask"),
    ],
)
def test_unsupported_arguments_raise_value_error(forward, operands, given, message):
    with pytest.raises(ValueError, match=message):
        forward(SimpleNamespace(is_causal=True), *operands, **{"attention_mask": None, **given}, **OPTIONS)


def test_non_causal_layers_raise_value_error(forward, operands):
    with pytest.raises(ValueError, match="is_causal=False"):
        forward(SimpleNamespace(is_causal=False), *operands, None, **OPTIONS)
