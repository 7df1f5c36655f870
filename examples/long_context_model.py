"""The language model of `long_context.py`, with the division of its parameters and tokens over a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from long_context_data import VOCABULARY

from blockdiag import (
    ContextParallel,
    apply_rotary,
    block_diagonal_attention,
    key_convolution,
    moba_attention,
    rotary_tables,
)

ATTENTIONS = ("moba", "dense", "none")
type Tables = tuple[Float[Array, "T half"], Float[Array, "T half"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the model and of its training.

    Attributes:
        context: tokens of a sequence.
        batch_size: sequences of a step.
        heads: number of attention heads, for queries, keys and values.
        block_size, top_k: parameters of MoBA.
        key_taps: size of the convolution of keys, in tokens.
        dtype: dtype of the computation. Parameters, their updates and the loss are float32.
        warmup_steps: steps until the learning rate is reached, from which it falls to a tenth at the last step.
    """

    context: int = 512
    batch_size: int = 4
    width: int = 64
    heads: int = 4
    layers: int = 2
    block_size: int = 32
    top_k: int = 3
    key_taps: int = 3
    rotary_theta: float = 10_000.0
    dtype: str = "float32"
    steps: int = 80
    learning_rate: float = 4e-3
    warmup_steps: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"`width` must be a multiple of twice the {self.heads} heads, since rotary embedding turns pairs; got "
                f"{self.width}"
            )

    @property
    def head_dim(self) -> int:
        """The head dimension."""
        return self.width // self.heads


# About 101 million parameters. A query sees 8 of the 512 blocks of its context.
ON_GPUS = Settings(
    context=65_536,
    batch_size=1,
    width=1024,
    heads=8,
    layers=8,
    block_size=128,
    top_k=8,
    rotary_theta=1_000_000.0,
    dtype="bfloat16",
    steps=300,
    learning_rate=1e-3,
    warmup_steps=30,
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The division of arrays over a mesh with the axes "data" and "sequence".

    Sequences are shared along "data", the tokens of each along "sequence", and parameters along both (FSDP).

    Attributes:
        mesh: a mesh with automatic axes, so XLA's partitioner inserts the collectives.
    """

    mesh: Mesh

    @classmethod
    def over(cls, devices: Sequence[jax.Device], sequence_devices: int | None = None) -> "Placement":
        """Make a mesh of these devices, with `sequence_devices` of them along "sequence", by default all.

        Raises:
            ValueError: the number of devices is not a multiple of `sequence_devices`.
        """
        count = len(devices) if sequence_devices is None else sequence_devices
        if count < 1 or len(devices) % count:
            raise ValueError(f"`sequence_devices` must divide the {len(devices)} devices, got {count}")
        return cls(Mesh(np.asarray(devices).reshape(-1, count), ("data", "sequence")))

    @property
    def context(self) -> ContextParallel | None:
        """The division of a sequence's tokens over devices; None if each sequence is on one device."""
        if self.mesh.shape["sequence"] == 1:
            return None
        return ContextParallel("sequence", mesh=self.mesh, batch_axes=("data",))

    @property
    def tokens(self) -> NamedSharding:
        """The sharding of [B, T, ..]."""
        return NamedSharding(self.mesh, P("data", "sequence"))

    @property
    def tables(self) -> NamedSharding:
        """The sharding of tables [T, ..]."""
        return NamedSharding(self.mesh, P("sequence"))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, P())

    def parts(self, matrix: Any) -> NamedSharding:
        """The sharding of a matrix [.., inputs, outputs]: its rows over all devices if possible, else its columns."""
        divided = [axis for axis in (-2, -1) if matrix.shape[axis] % self.mesh.size == 0]
        if not divided:
            return self.whole
        before = [None] * (len(matrix.shape) + divided[0])
        return NamedSharding(self.mesh, P(*before, self.mesh.axis_names))

    def shardings(self, parameters: Any) -> Any:
        """Return the shardings of parameters, or of an optimiser's state for each: matrices are divided.

        The rest is a thousandth of all parameters: scales of norms, and weights of convolutions.
        """
        return jax.tree.map_with_path(lambda path, x: self.parts(x) if is_matrix(path) else self.whole, parameters)

    def check(self, settings: Settings) -> None:
        """Raise a ValueError if the devices cannot divide a batch."""
        for name, size in (("batch_size", settings.batch_size), ("context", settings.context)):
            axis = {"batch_size": "data", "context": "sequence"}[name]
            if size % self.mesh.shape[axis]:
                raise ValueError(
                    f"`{name}` must be a multiple of the {self.mesh.shape[axis]} devices along {axis!r}, got {size}"
                )


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Return whether a path in a tree leads to the kernel of a product, or to an optimiser's state for it."""
    return "kernel" in jax.tree_util.keystr(path)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(placement: Placement, dtype: str, parts: Array) -> Array:
    """Return a whole parameter in `dtype`, which is rounded before it is gathered.

    The float32 gradient stays sharded, so each device receives the sum of its own part only. The transpose of a
    sharding constraint would leave the whole sum on every device.
    """
    rounded = jax.lax.with_sharding_constraint(parts.astype(dtype), placement.parts(parts))
    return jax.lax.with_sharding_constraint(rounded, placement.whole)


def _gather_forward(placement: Placement, dtype: str, parts: Array) -> tuple[Array, None]:
    return gather(placement, dtype, parts), None


def _gather_backward(placement: Placement, dtype: str, residuals: None, cotangent: Array) -> tuple[Array]:
    del dtype, residuals
    return (jax.lax.with_sharding_constraint(cotangent, placement.parts(cotangent)).astype(jnp.float32),)


gather.defvjp(_gather_forward, _gather_backward)


class Product(nnx.Module):
    """A product with a matrix [inputs, outputs] that is sharded over the devices."""

    def __init__(self, inputs: int, outputs: int, model: "LanguageModel", *, rngs: nnx.Rngs, scale: float = 1.0):
        normal = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(scale * inputs**-0.5 * normal)
        self.placement, self.dtype = model.placement, model.settings.dtype

    def __call__(self, x: Float[Array, "B T inputs"]) -> Float[Array, "B T outputs"]:
        return x @ gather(self.placement, self.dtype, self.kernel[...])


type Attend = Callable[[Array, Array, Array], Array]
"""Causal attention of query, key and value [B, T, N, H]."""


def make_attention(name: str, settings: Settings, placement: Placement) -> Attend:
    """Return attention by name; "none" returns each token's own value, to time the rest of the model."""
    match name:
        case "moba":
            options: dict[str, Any] = {"block_size": settings.block_size, "top_k": settings.top_k}
            return functools.partial(moba_attention, **options, context_parallel=placement.context)
        case "dense":
            # One block of the length of the context.
            options = {"block_size": settings.context, "is_causal": True}
            return functools.partial(block_diagonal_attention, **options, context_parallel=placement.context)
        case "none":
            return lambda query, key, value: value
    raise ValueError(f"`name` must be one of {ATTENTIONS}, got {name!r}")


class Layer(nnx.Module):
    """Attention with a convolution of the keys, and a feed-forward network; both residual."""

    def __init__(self, model: "LanguageModel", *, rngs: nnx.Rngs) -> None:
        settings = model.settings
        width, heads = settings.width, (settings.heads, settings.head_dim)
        norm = functools.partial(nnx.RMSNorm, width, dtype=jnp.dtype(settings.dtype), rngs=rngs)
        product = functools.partial(Product, model=model, rngs=rngs)
        # The residual stream is a sum over layers.
        residual = (2 * settings.layers) ** -0.5
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.qkv, self.out = product(width, 3 * width), product(width, width, scale=residual)
        self.expand, self.contract = product(width, 4 * width), product(4 * width, width, scale=residual)
        self.key_taps = nnx.Param(0.1 * jax.random.normal(rngs.params(), (settings.key_taps, *heads), jnp.float32))
        self.settings, self.placement = settings, model.placement

    def project(self, hidden: Float[Array, "B T width"]) -> tuple[Array, Array, Array]:
        """Return query, key and value [B, T, N, H]."""
        joint = self.qkv(self.attention_norm(hidden))
        heads = (*hidden.shape[:2], self.settings.heads, self.settings.head_dim)
        query, key, value = (x.reshape(heads) for x in jnp.split(joint, 3, axis=-1))
        return query, key, value

    def finish(self, hidden: Float[Array, "B T width"], attended: Float[Array, "B T N H"]) -> Array:
        """Return the residual stream after the layer."""
        hidden = hidden + self.out(attended.reshape(hidden.shape))
        return hidden + self.contract(nnx.gelu(self.expand(self.feed_forward_norm(hidden))))

    def __call__(self, hidden: Float[Array, "B T width"], tables: Tables, attend: Attend) -> Float[Array, "B T width"]:
        query, key, value = self.project(hidden)
        key = key_convolution(key, self.key_taps[...], context_parallel=self.placement.context)
        query, key = apply_rotary(query, *tables), apply_rotary(key, *tables)
        hidden = self.finish(hidden, attend(query, key, value))
        return jax.lax.with_sharding_constraint(hidden, self.placement.tokens)


class LanguageModel(nnx.Module):
    """A decoder that predicts the next byte.

    Args:
        settings: the sizes of the model.
        placement: the division of its parameters and tokens.
    """

    def __init__(self, settings: Settings, placement: Placement) -> None:
        rngs = nnx.Rngs(settings.seed)
        self.settings, self.placement = settings, placement
        self.embedding = Product(VOCABULARY, settings.width, self, rngs=rngs, scale=VOCABULARY**0.5)
        # The parameters of all layers are stacked, so that a layer is compiled once.
        make_layers = nnx.vmap(lambda rngs: Layer(self, rngs=rngs))
        self.layers = nnx.split_rngs(splits=settings.layers)(make_layers)(rngs)
        self.norm = nnx.RMSNorm(settings.width, dtype=jnp.dtype(settings.dtype), rngs=rngs)
        self.head = Product(settings.width, VOCABULARY, self, rngs=rngs)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T width"]:
        """Return the residual stream before the first layer.

        This is a product with one-hot rows. The gradient of a lookup is a scatter, whose sums on a GPU have no fixed
        order, so a resumed training would not be bitwise equal.
        """
        return self.embedding(jax.nn.one_hot(tokens, VOCABULARY, dtype=self.settings.dtype))

    def logits(self, hidden: Float[Array, "B T width"]) -> Float[Array, "B T 256"]:
        """Return the float32 logits of the next byte."""
        return self.head(self.norm(hidden)).astype(jnp.float32)

    def run_layers(self, tokens: Int[Array, "B T"], tables: Tables, attention: str) -> Float[Array, "B T width"]:
        """Return the residual stream after the last layer.

        The backward pass recomputes the layers, so only the residual stream between them is saved.
        """
        attend = make_attention(attention, self.settings, self.placement)
        graph, parameters = nnx.split(self.layers)

        @jax.checkpoint
        def run(hidden: Array, parameters: nnx.State) -> tuple[Array, None]:
            return nnx.merge(graph, parameters)(hidden, tables, attend), None

        hidden = jax.lax.with_sharding_constraint(self.embed(tokens), self.placement.tokens)
        # On CPUs, XLA may run collectives of a loop concurrently with later ones, in a different order on each
        # device, and deadlock. The loop is therefore unrolled there.
        is_unrolled = self.placement.mesh.devices.flat[0].platform == "cpu"
        return jax.lax.scan(run, hidden, parameters, unroll=is_unrolled)[0]

    def each_layer(self) -> list[Layer]:
        """Return the layers, one by one."""
        graph, parameters = nnx.split(self.layers)
        indices = range(self.settings.layers)
        return [nnx.merge(graph, jax.tree.map(lambda x, at=at: x[at], parameters)) for at in indices]

    def loss(
        self, tokens: Int[Array, "B T"], targets: Int[Array, "B T"], tables: Tables, attention: str
    ) -> Float[Array, ""]:
        """Return the mean cross entropy of the targets, in nats.

        Each device has the logits of its own tokens, and recomputes them for the backward pass.
        """

        def losses(model: LanguageModel, hidden: Array) -> Array:
            logits = model.logits(hidden)
            chosen = (logits * jax.nn.one_hot(targets, VOCABULARY)).sum(axis=-1)
            return jax.nn.logsumexp(logits, axis=-1) - chosen

        return nnx.remat(losses)(self, self.run_layers(tokens, tables, attention)).mean()


def make_tables(settings: Settings, placement: Placement) -> Tables:
    """Return the tables of rotary embedding, sharded so that each device has the rows of its tokens."""
    tables = rotary_tables(settings.context, settings.head_dim, settings.rotary_theta)
    cos, sin = (jax.device_put(table, placement.tables) for table in tables)
    return cos, sin


def describe_model(settings: Settings, placement: Placement) -> tuple[nnx.GraphDef[LanguageModel], nnx.State]:
    """Return the graph of a model, and the shapes of its parameters; nothing is computed."""
    return nnx.split(nnx.eval_shape(lambda: LanguageModel(settings, placement)))


def draw_parameters(settings: Settings, placement: Placement) -> nnx.State:
    """Draw the initial parameters, each device its own part; the values do not depend on the number of devices."""
    _, shapes = describe_model(settings, placement)
    draw = jax.jit(lambda: nnx.state(LanguageModel(settings, placement)), out_shardings=placement.shardings(shapes))
    return draw()


def round_matrices(parameters: nnx.State, dtype: str) -> nnx.State:
    """Round matrices to a dtype, as `gather` does in each step."""
    return jax.tree.map_with_path(lambda path, x: x.astype(dtype) if is_matrix(path) else x, parameters)


def count_parameters(parameters: nnx.State) -> int:
    """Count the trained parameters."""
    return sum(x.size for x in jax.tree.leaves(parameters))
