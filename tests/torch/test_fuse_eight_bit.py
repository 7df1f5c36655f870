"""Tests of `blockdiag.torch.fuse` with tensors of eight-bit floats."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from blockdiag.torch import fuse  # noqa: E402
from blockdiag.torch.fusion import program as programs  # noqa: E402
from blockdiag.torch.fusion import region as regions  # noqa: E402
from tests.fusion.eight_bit_cases import CASES  # noqa: E402
from tests.torch.torch_support import to_tensor  # noqa: E402


@pytest.fixture
def widened_regions(monkeypatch):
    """Return the growing list of the regions that are widened."""
    found = []

    def widened(region, *arguments):
        found.append(region)
        return original(region, *arguments)

    original = regions.widened
    monkeypatch.setattr(regions, "widened", widened)
    return found


@pytest.mark.parametrize("name", ["causal", "causal_e5m2", "scaled_tokens", "eight_bit_values", "narrow"])
def test_eight_bit_tensors_without_gradients_are_multiplied_as_such(name, widened_regions):
    case = CASES[name]
    inputs = case.inputs()
    found = fuse(case, implementation="triton")(*map(to_tensor, inputs.values()))
    exact = case.exact(inputs)
    assert np.abs(found.numpy() - exact).max() <= case.allowed_error(inputs, exact)
    assert not widened_regions


@pytest.mark.parametrize("name", ["causal", "eight_bit_values"])
def test_gradients_of_eight_bit_tensors_are_those_of_wide_tensors(name, widened_regions):
    case = CASES[name]
    tensors = [to_tensor(x).requires_grad_() for x in case.inputs().values()]
    fuse(case, implementation="triton")(*tensors).sum().backward()
    assert len(widened_regions) == 1
    wide = [x.detach().float().requires_grad_() for x in tensors]
    fuse(lambda *x: case.function(CASES["float32_values"].dtypes, *x), implementation="triton")(*wide).sum().backward()
    for x, other in zip(tensors, wide, strict=True):
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad.float(), other.grad, rtol=0.07, atol=0.07 * other.grad.abs().max().item())


def test_gpu_without_eight_bit_products_widens_tensors(monkeypatch, widened_regions):
    case = CASES["eight_bit_values"]
    inputs = case.inputs()

    def marked(*arguments, has_eight_bit_products, **options):
        assert has_eight_bit_products
        return original(*arguments, has_eight_bit_products=False, **options)

    original = programs.marked
    monkeypatch.setattr(programs, "marked", marked)
    found = fuse(case, implementation="triton")(*map(to_tensor, inputs.values()))
    assert len(widened_regions) == 1
    np.testing.assert_allclose(found.numpy(), case.exact(inputs), atol=1e-2)
