"""Training for `long_context.py`: one program for all devices, and checkpoints for any number of devices."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import long_context_data as data
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, Float
from long_context_model import Placement, Settings, Tables, describe_model, draw_parameters, make_tables


class State(NamedTuple):
    """The state of a training.

    Attributes:
        step: number of steps done, int32 [].
        parameters: parameters, float32.
        moments: moments of the optimiser.
        losses: loss of each step before its update, in nats, float32 [steps]; NaN for later steps.
    """

    step: Array
    parameters: nnx.State
    moments: optax.OptState
    losses: Float[Array, " steps"]


class Trainer:
    """The training of one model: its programs, and its initial state.

    Args:
        settings: settings of the model and its training.
        placement: the division of tokens and parameters.
        attention: one of `ATTENTIONS`.

    Raises:
        ValueError: the devices cannot divide a batch.
    """

    def __init__(self, settings: Settings, placement: Placement, attention: str) -> None:
        placement.check(settings)
        self.settings, self.placement, self.attention = settings, placement, attention
        self.graph, self.shapes = describe_model(settings, placement)
        rate = optax.warmup_cosine_decay_schedule(
            0.0,
            settings.learning_rate,
            min(settings.warmup_steps, max(1, settings.steps // 2)),
            settings.steps,
            0.1 * settings.learning_rate,
        )
        self.optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))
        self.tables = make_tables(settings, placement)

    @property
    def shardings(self) -> State:
        """The shardings of the state."""
        whole, moments = self.placement.whole, jax.eval_shape(self.optimiser.init, self.shapes)
        return State(whole, self.placement.shardings(self.shapes), self.placement.shardings(moments), whole)

    def abstract_state(self) -> State:
        """Return the shapes of the state, with their shardings."""
        step, losses = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((self.settings.steps,), jnp.float32)
        shapes = State(step, self.shapes, jax.eval_shape(self.optimiser.init, self.shapes), losses)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, self.shardings)

    def first_state(self) -> State:
        """Draw the initial state."""
        parameters = draw_parameters(self.settings, self.placement)
        moments = jax.jit(self.optimiser.init, out_shardings=self.shardings.moments)(parameters)
        step, losses = jnp.zeros((), jnp.int32), jnp.full((self.settings.steps,), jnp.nan, jnp.float32)
        step, losses = jax.device_put((step, losses), self.placement.whole)
        return State(step, parameters, moments, losses)

    def place(self, text: np.ndarray, seed: int, step: int) -> tuple[Array, Array]:
        """Return a step's tokens and targets, sharded over the devices."""
        batch = data.crop(text, self.settings.batch_size, self.settings.context, seed, step)
        tokens, targets = jax.device_put(batch, self.placement.tokens)
        return tokens, targets

    def loss(self, parameters: nnx.State, tokens: Array, targets: Array, tables: Tables) -> Float[Array, ""]:
        """Return the mean loss of a batch."""
        return nnx.merge(self.graph, parameters).loss(tokens, targets, tables, self.attention)

    def update(self, state: State, tokens: Array, targets: Array, tables: Tables) -> tuple[State, Float[Array, ""]]:
        """Return the state after a step, and its loss."""
        loss, gradients = jax.value_and_grad(self.loss)(state.parameters, tokens, targets, tables)
        updates, moments = self.optimiser.update(gradients, state.moments, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        return State(state.step + 1, parameters, moments, state.losses.at[state.step].set(loss)), loss

    @functools.cached_property
    def program(self) -> jax.stages.Compiled:
        """The compiled `update`, which updates the state in place."""
        step = jax.jit(self.update, donate_argnums=0, out_shardings=(self.shardings, self.placement.whole))
        shape = self.settings.batch_size, self.settings.context
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.placement.tokens)
        return step.lower(self.abstract_state(), tokens, tokens, self.tables).compile()

    @property
    def program_bytes(self) -> int:
        """The memory that a step needs on a device: parameters, moments, batch and temporaries."""
        memory = self.program.memory_analysis()
        # Results that reuse the memory of arguments count once.
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)

    def evaluate(self, parameters: nnx.State, batches: int) -> float:
        """Return the mean loss of batches of held-out text."""
        _, held_out = data.load_text()
        compute, seed = jax.jit(self.loss), self.settings.seed + 1
        inputs = ((*self.place(held_out, seed, index), self.tables) for index in range(batches))
        return float(np.mean([float(compute(parameters, *x)) for x in inputs]))


class Checkpoints:
    """The last two states of one training, in a folder.

    A state can be resumed on any number of devices. With the same number, losses are bitwise equal. A GPU needs
    `keep_programs` for that, because XLA may choose different matrix products when it compiles again.

    Args:
        folder: folder of the states.
        settings: settings of the training.

    Raises:
        ValueError: the folder has states of other settings.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = dataclasses.asdict(settings)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=("state", "settings"))
        step = self.manager.latest_step()
        if step is None:
            return
        kept = self.manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore())).settings
        different = {name: kept.get(name) for name, x in self.settings.items() if kept.get(name) != x}
        if different:
            raise ValueError(
                f"{folder} has states of a training with other settings: {different}; take these, or another folder"
            )

    def save(self, state: State) -> None:
        """Start to save a state."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self.settings))
        self.manager.save(int(state.step), args=items)

    def latest(self, abstract: State) -> State | None:
        """Return the last state, sharded over the devices, or None."""
        step = self.manager.latest_step()
        if step is None:
            return None
        return self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state

    def close(self) -> None:
        """Wait until everything is saved."""
        self.manager.wait_until_finished()
        self.manager.close()


def keep_programs(folder: Path) -> None:
    """Let JAX cache compiled programs in a folder, and find them in another process.

    On a mesh with automatic axes the cache key must not contain the address of the function that divides a call.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


type Report = Callable[[float], None]
"""A callback that receives the loss of each step."""


def train(
    trainer: Trainer,
    checkpoints: Checkpoints | None = None,
    save_every: int = 50,
    until: int | None = None,
    report: Report = lambda _: None,
) -> tuple[State, float | None]:
    """Train from the last checkpoint, or from the beginning.

    Args:
        trainer: trainer of the model.
        checkpoints: the states to resume from and to save.
        save_every: number of steps between saved states; the last state is always saved.
        until: the step before which to stop; by default that of the settings.
        report: called after each step.

    Returns:
        The last state, and the median time of a step in seconds, None for fewer than five steps.
    """
    text, _ = data.load_text()
    state = checkpoints.latest(trainer.abstract_state()) if checkpoints is not None else None
    state = trainer.first_state() if state is None else state
    first, last = int(state.step), trainer.settings.steps if until is None else until
    batch = trainer.place(text, trainer.settings.seed, first)
    seconds = []
    for step in range(first, last):
        began = time.perf_counter()
        state, loss = trainer.program(state, *batch, trainer.tables)
        # The next batch is transferred while the step is computed.
        batch = trainer.place(text, trainer.settings.seed, step + 1)
        report(float(loss))
        seconds.append(time.perf_counter() - began)
        if checkpoints is not None and ((step + 1) % save_every == 0 or step + 1 == last):
            checkpoints.save(state)
    # The first step warms up.
    return state, float(np.median(seconds[1:])) if len(seconds) > 4 else None
