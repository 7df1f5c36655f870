"""Attention functions for Flax and the modules that hold them can be pickled, copied and compared."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blockdiag import Rotary, rotary_tables
from blockdiag.interop.flax import attention_fn, moba_attention_fn

WIDTH, HEADS = 32, 4


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def rotary(positions: int = 40) -> Rotary:
    return Rotary(*rotary_tables(max_position=positions, head_dim=WIDTH // HEADS), apply_to=["query"])


MAKERS: dict[str, Callable[[], Any]] = {
    "block diagonal": lambda: attention_fn(block_size=16),
    "block diagonal, options": lambda: attention_fn(
        block_size=32, rotary=rotary(), scale=0.3, is_causal=True, implementation=["xla", "reference"]
    ),
    "moba": lambda: moba_attention_fn(block_size=16, top_k=2),
    "moba, options": lambda: moba_attention_fn(block_size=16, top_k=3, rotary=rotary(), implementation="reference"),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A model configuration that holds an attention function."""

    name: str
    attention_fn: Any


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MAKERS)
def test_copied_attention_fn_is_equal_and_gives_equal_results(name, how):
    function = MAKERS[name]()
    found = COPIES[how](Config("model", function)).attention_fn
    assert found == function and hash(found) == hash(function)
    operands = jax.random.normal(jax.random.key(0), (3, 2, 40, HEADS, WIDTH // HEADS))
    np.testing.assert_array_equal(found(*operands), function(*operands))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MAKERS)
def test_copied_modules_with_an_attention_fn_give_equal_results(name, how):
    x = jax.random.normal(jax.random.key(0), (2, 40, WIDTH))
    function = MAKERS[name]()
    module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=function, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(COPIES[how](module)(x), module(x))

    # Flax's default initialiser of kernels cannot be pickled.
    layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function, kernel_init=nn.initializers.ones)
    parameters = layer.init(jax.random.key(0), x)
    copied = COPIES[how](layer)
    assert copied == layer
    np.testing.assert_array_equal(copied.apply(parameters, x), layer.apply(parameters, x))


def test_attention_fns_with_equal_options_are_equal():
    for make in MAKERS.values():
        assert make() == make() and hash(make()) == hash(make())


def test_attention_fns_with_other_options_differ():
    table = rotary()
    functions = [
        attention_fn(block_size=16),
        attention_fn(block_size=32),
        attention_fn(block_size=16, is_causal=True),
        attention_fn(block_size=16, scale=0.5),
        attention_fn(block_size=16, implementation="xla"),
        attention_fn(block_size=16, rotary=table),
        attention_fn(block_size=16, rotary=rotary(41)),
        attention_fn(block_size=16, rotary=dataclasses.replace(table, cos=2 * table.cos)),
        attention_fn(block_size=16, rotary=dataclasses.replace(table, interleaved=True)),
        attention_fn(block_size=16, rotary=dataclasses.replace(table, positions=jnp.arange(40, dtype=jnp.int32))),
        moba_attention_fn(block_size=16, top_k=2, is_causal=False),
        moba_attention_fn(block_size=16, top_k=3, is_causal=False),
    ]
    for i, one in enumerate(functions):
        assert [one == other for other in functions] == [i == j for j in range(len(functions))]


def test_jit_with_an_equal_attention_fn_does_not_trace_again():
    traces = []

    def call(x, function):
        traces.append(function)
        return function(x, x, x)

    call = jax.jit(call, static_argnums=1)
    x = jnp.ones((1, 40, HEADS, WIDTH // HEADS))
    for _ in range(2):
        call(x, attention_fn(block_size=16, rotary=rotary()))
    assert len(traces) == 1
