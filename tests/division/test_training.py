"""A training step with sharded parameters and batch has the same collectives as with XLA's attention."""

import contextlib
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag import block_diagonal_attention, fuse, moba_attention
from tests.division.division_support import count_collectives, make_mesh, shard

BATCH, TOKENS, HEADS, WIDTH, VOCABULARY = 4, 64, 4, 8, 48
FEATURES = HEADS * WIDTH
STEPS, RATE = 3, 0.1

# Specs of parameters, by the end of their path: features over "data" (FSDP), heads and hidden units over "model".
SPECS = {
    "qkv.kernel": P(None, "data", "model"),
    "out.kernel": P("model", None, "data"),
    "up.kernel": P("data", "model"),
    "up.bias": P("model"),
    "down.kernel": P("model", "data"),
    "embedding.kernel": P(None, "data"),
    "logits.kernel": P("data", "model"),
}
RESIDUAL, HIDDEN, PER_HEAD = P("data"), P("data", None, "model"), P(None, "data", None, "model")


def attend_causally(query, key, value):
    """Compute causal attention in a form that `fuse` recognises."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / WIDTH**0.5
    seen = jnp.tri(query.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


OURS = ("block_diagonal", "moba", "fuse")
ATTENTION = {
    "baseline": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    "block_diagonal": functools.partial(block_diagonal_attention, block_size=TOKENS, is_causal=True),
    "moba": functools.partial(moba_attention, block_size=16, top_k=2),
    "fuse": fuse(attend_causally),
}
# On an automatic mesh XLA may also shard the residual stream's features. It does so here without a constraint.
CASES = ("automatic", "automatic, constrained", "explicit")


def multiply(equation: str, x: jax.Array, kernel: jax.Array, *, out_sharding: Any = None, **options: Any) -> jax.Array:
    """Multiply by a parameter; on an explicit mesh, gather its features first (FSDP)."""
    if out_sharding is not None:
        spec = jax.typeof(kernel).sharding.spec
        kernel = jax.sharding.reshard(kernel, P(*(None if name == "data" else name for name in spec)))
    return jnp.einsum(equation, x, kernel, out_sharding=out_sharding, **options)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of a model's activations.

    Attributes:
        mesh: the mesh, or None; only explicit axes require the shardings of products.
        is_constrained: whether the residual stream is sharded over "data" alone; otherwise XLA chooses.
    """

    mesh: Mesh | None = None
    is_constrained: bool = False

    def of(self, spec: P) -> P | None:
        """Return the sharding of a product on an explicit mesh, which requires it, and None elsewhere."""
        return spec if self.mesh is not None and AxisType.Explicit in self.mesh.axis_types else None

    def residual(self, x: jax.Array) -> jax.Array:
        """Return the residual stream, constrained if `is_constrained`."""
        if not self.is_constrained:
            return x
        assert self.mesh is not None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, RESIDUAL))


class Layer(nnx.Module):
    """Attention and an MLP, each after a layer norm."""

    def __init__(self, attention: Callable[..., jax.Array], rngs: nnx.Rngs) -> None:
        product = functools.partial(nnx.Einsum, einsum_op=multiply, rngs=rngs)
        self.attention = attention
        self.norms = nnx.List([nnx.LayerNorm(FEATURES, rngs=rngs) for _ in range(2)])
        self.qkv = product("btf,cfnh->cbtnh", (3, FEATURES, HEADS, WIDTH))
        self.out = product("btnh,nhf->btf", (HEADS, WIDTH, FEATURES))
        self.up = product("btf,fm->btm", (FEATURES, 4 * FEATURES), (4 * FEATURES,))
        self.down = product("btm,mf->btf", (4 * FEATURES, FEATURES))

    def __call__(self, x: jax.Array, placement: Placement) -> jax.Array:
        query, key, value = self.qkv(self.norms[0](x), out_sharding=placement.of(PER_HEAD))
        attended = self.out(self.attention(query, key, value), out_sharding=placement.of(RESIDUAL))
        x = placement.residual(x + attended)
        hidden = jax.nn.gelu(self.up(self.norms[1](x), out_sharding=placement.of(HIDDEN)))
        return placement.residual(x + self.down(hidden, out_sharding=placement.of(RESIDUAL)))


class Model(nnx.Module):
    """A language model of two layers."""

    def __init__(self, attention: Callable[..., jax.Array], rngs: nnx.Rngs) -> None:
        product = functools.partial(nnx.Einsum, einsum_op=multiply, rngs=rngs)
        self.embedding = product("btv,vf->btf", (VOCABULARY, FEATURES))
        self.layers = nnx.List([Layer(attention, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.logits = product("btf,fv->btv", (FEATURES, VOCABULARY))

    def loss(self, tokens: jax.Array, placement: Placement) -> jax.Array:
        """Return the mean cross-entropy of next tokens."""
        given = jax.nn.one_hot(tokens, VOCABULARY)
        x = placement.residual(self.embedding(given, out_sharding=placement.of(RESIDUAL)))
        for layer in self.layers:
            x = layer(x, placement)
        logits = jax.nn.log_softmax(self.logits(self.norm(x), out_sharding=placement.of(HIDDEN)))
        return -(logits[:, :-1] * given[:, 1:]).sum() / (BATCH * (TOKENS - 1))


def make_model(attention: Callable[..., jax.Array]) -> tuple[nnx.GraphDef[Model], nnx.State]:
    """Return the graph and the parameters of a model."""
    return nnx.split(Model(attention, nnx.Rngs(0)))


def place_parameters(mesh: Mesh, parameters: Any) -> Any:
    """Return sharded parameters; those of norms are on all devices."""

    def place(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        *_, module, name, _ = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        return shard(mesh, x, SPECS.get(f"{module}.{name}", P()))

    return jax.tree.map_with_path(place, parameters)


def make_step(graph: nnx.GraphDef[Model], placement: Placement) -> Callable[..., tuple[Any, jax.Array]]:
    """Return a step of gradient descent, from parameters and tokens to parameters and loss."""

    def step(parameters: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda x: nnx.merge(graph, x).loss(tokens, placement))(parameters)
        return jax.tree.map(lambda x, gradient: x - RATE * gradient, parameters, gradients), loss

    return step


def draw_tokens() -> jax.Array:
    """Return the batch on which every step trains."""
    return jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, TOKENS)))


def train(step: Callable[..., Any], parameters: Any, tokens: jax.Array) -> tuple[list[float], Any]:
    """Return the losses of some steps and the parameters after them."""
    losses = []
    for _ in range(STEPS):
        parameters, loss = step(parameters, tokens)
        losses.append(float(loss))
    return losses, parameters


@functools.cache
def train_on_one_device(name: str) -> tuple[list[float], Any]:
    """Return losses and parameters of a model with this attention."""
    graph, parameters = make_model(ATTENTION[name])
    return train(jax.jit(make_step(graph, Placement())), parameters, draw_tokens())


@functools.cache
def compile_step(name: str, case: str) -> tuple[jax.stages.Compiled, Any, Any]:
    """Compile the step of a model with this attention by plain `jax.jit` of sharded arrays.

    The step donates its parameters. The parameters on one device and the shardings are also returned.
    """
    kind = case.split(",")[0]
    mesh = make_mesh(kind)
    graph, first = make_model(ATTENTION[name])
    parameters, tokens = place_parameters(mesh, first), shard(mesh, draw_tokens(), P("data"))
    shardings = jax.tree.map(lambda x: x.sharding, parameters)
    step = make_step(graph, Placement(mesh, is_constrained=case.endswith("constrained")))
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))
        return jitted.lower(parameters, tokens).compile(), first, shardings


def transferred(program: str) -> Counter[tuple[str, str]]:
    """Count the results of a compiled program's collectives, by collective and array type."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (.+?) ({names})(?:-start)?\(", program)
    return Counter((name, array) for types, name in found for array in re.findall(r"\w+\[[\d,]*\]", types))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OURS)
def test_training_step_has_the_collectives_of_xla_attention(name, case):
    program, baseline = (compile_step(x, case)[0].as_text() for x in (name, "baseline"))
    assert count_collectives(program) == count_collectives(baseline)
    found = transferred(program)
    assert found == transferred(baseline)
    if case != "automatic":
        # Each layer gathers each matrix over "data" and has both sums over "model".
        assert found["all-gather", f"f32[3,{FEATURES},{HEADS // 2},{WIDTH}]"] == 2
        assert found["all-reduce", f"f32[{BATCH // 2},{TOKENS},{FEATURES}]"] >= 4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OURS)
def test_training_on_a_mesh_matches_the_losses_of_one_device(name, case):
    expected, last = train_on_one_device(name)
    step, parameters, shardings = compile_step(name, case)
    first = jax.device_put(parameters, shardings)
    tokens = jax.device_put(draw_tokens(), step.input_shardings[0][1])
    losses, parameters = train(step, first, tokens)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    assert losses[-1] < losses[0] - 0.05
    leaves = (jax.tree.leaves(x) for x in (parameters, last, first, shardings))
    for x, other, donated, sharding in zip(*leaves, strict=True):
        np.testing.assert_allclose(x, other, rtol=1e-5, atol=1e-6)
        assert donated.is_deleted()
        assert x.sharding == sharding


@pytest.mark.parametrize("name", ["block_diagonal", "fuse"])
def test_training_with_causal_attention_matches_the_losses_of_xla_attention(name):
    """One block as long as the sequence and `fuse` of causal attention define the same model."""
    losses, _ = train_on_one_device(name)
    expected, _ = train_on_one_device("baseline")
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
