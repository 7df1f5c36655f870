"""`blockdiag.torch.fuse` in use: effects."""

import contextlib
import importlib.util
import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from blockdiag.torch import fuse  # noqa: E402
from tests.torch.torch_support import to_numpy, to_tensor  # noqa: E402

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def attention(query, key, value):
    """[T, H] each."""
    return jax.nn.softmax(query @ key.mT / 4) @ value


def tensors(grad: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, 16, generator=generator).requires_grad_(grad) for _ in range(3)]


def printing(query, key, value):
    output = attention(query, key, value)
    jax.debug.print("largest {:.0f}", jnp.float32(7) + 0 * output[0, 0])
    return output


def writing(query, key, value):
    reference = jax.new_ref(query)
    reference[...] = reference[...] * 2
    return attention(reference[...], key, value)


def writing_the_result(query, key, value):
    reference = jax.new_ref(jnp.zeros_like(query))
    reference[...] = attention(query, key, value)
    return reference[...]


def printing_in_a_loop(query, key, value):
    return jax.lax.scan(lambda x, _: (printing(x, key, value), None), query, None, length=1)[0]


EFFECTS = {"debug_print": printing, "new_ref": writing, "ref": writing_the_result, "scan": printing_in_a_loop}


@NEEDS_TRITON
@pytest.mark.parametrize("name", EFFECTS)
def test_effects_are_not_lost(name):
    """They are JAX's, as a whole: refused where it may not compute the call."""
    function = EFFECTS[name]
    with pytest.raises(NotImplementedError, match=rf"`\w*{name}.*test_fuse_uses.py.*via=\"jax\""):
        fuse(function, implementation="triton")(*tensors())
    arrays = [jnp.asarray(to_numpy(x)) for x in tensors()]
    expected = attention(2 * arrays[0] if name == "new_ref" else arrays[0], *arrays[1:])
    ways: list[dict[str, Any]] = [{"implementation": ("triton", "xla")}, {"implementation": "triton", "via": "jax"}]
    for way in ways:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found = fuse(function, **way)(*tensors())
            jax.effects_barrier()
        assert ("largest 7" in printed.getvalue()) == ("ref" not in name)
        torch.testing.assert_close(found, to_tensor(expected), rtol=1e-5, atol=1e-5)
