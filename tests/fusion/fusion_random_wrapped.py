"""Random layers inside JAX's transformations, with `fuse` around or inside them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fusion.fusion_random_forms import KEPT, Form
from tests.fusion.fusion_random_layer import Arrays, Function

TIMES = 2
"""The length of the axes that `vmap` and `scan` map over."""
POLICIES = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", None)
WRAPPERS = ("checkpoint", "vmap", "scan", "jit", "scan of checkpoint", "cond")


class Wrapped:
    """A form inside transformations, each around the previous one.

    Attributes:
        form: the layer.
        wrappers: the names of the transformations.
        fused_at: the number of transformations inside of `fuse`.
        is_mapped_gradient: whether the outermost `vmap` maps gradients of the inner function.
        is_eager: whether calls are not compiled.
    """

    def __init__(self, form: Form, wrappers: Iterable[str] | None = None) -> None:
        draw = form.layer.draws
        self.form = form
        drawn = (draw(f"wrapper {i}", WRAPPERS) for i in range(draw("wrappers", (0, 1, 1, 2))))
        self.wrappers = tuple(drawn if wrappers is None else wrappers)
        self.fused_at = draw("fuse around", range(len(self.wrappers) + 1))
        self.policies = [draw(f"policy {i}", POLICIES) for i, _ in enumerate(self.wrappers)]
        self.axes = [self._axes(i, kind) for i, kind in enumerate(self.wrappers)]
        ends_mapped = self.wrappers[-1:] == ("vmap",) and self.fused_at < len(self.wrappers)
        self.is_mapped_gradient = ends_mapped and draw("gradients are mapped", (True, False))
        self.is_eager = draw("eager", (False, False, False, True))

    def _axes(self, place: int, kind: str) -> dict[str, int | None]:
        """Return the mapped axis of each argument; at least one argument is mapped."""
        if kind not in ("vmap", "scan", "scan of checkpoint"):
            return {}
        draw, arguments = self.form.layer.draws, self.form.layer.arguments
        axes: dict[str, int | None] = {}
        for name, argument in arguments.items():
            places = range(len(argument.labels) + 1) if kind == "vmap" else (0,)
            is_mapped = draw(f"{name} is mapped by {place}", (True, False))
            axes[name] = draw(f"{name} mapped by {place}", places) if is_mapped else None
        if all(x is None for x in axes.values()):
            axes[_query_of(axes)] = 0
        return axes

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arguments; floats are float64."""
        layer = self.form.layer
        made = {}
        for name, argument in layer.arguments.items():
            shape = [layer.sizes[x] for x in argument.labels]
            for axes in self.axes:
                if axes.get(name) is not None:
                    shape.insert(axes[name], TIMES)
            made[name] = layer.made(name, shape)
        return made

    def operands(self) -> Arrays:
        """Return the arguments in the layer's dtypes."""
        return {
            name: jnp.asarray(x, self.form.layer.dtype(name) if np.issubdtype(x.dtype, np.floating) else x.dtype)
            for name, x in self.arrays().items()
        }

    def around(self, function: Function, fuse: Callable[[Function], Function] | None = None) -> Function:
        """Return a function inside all transformations."""
        for i, kind in enumerate(self.wrappers):
            if fuse is not None and i == self.fused_at:
                function = fuse(function)
            function = self._wrapped(function, kind, self.axes[i], self.policies[i])
        return fuse(function) if fuse is not None and self.fused_at == len(self.wrappers) else function

    def inner(self, function: Function, fuse: Callable[[Function], Function] | None = None) -> Function:
        """Return a function inside all transformations except the outermost map."""
        whole = self.wrappers
        self.wrappers = whole[:-1]
        try:
            return self.around(function, fuse)
        finally:
            self.wrappers = whole

    def _wrapped(self, function: Function, kind: str, axes: dict[str, int | None], policy: str | None) -> Function:
        if kind == "vmap":
            return lambda given: jax.vmap(function, in_axes=(self.in_axes(axes, given),))(given)
        if kind == "jit":
            return jax.jit(function)
        if kind == "cond":
            return lambda given: jax.lax.cond(
                given[_query_of(given)].sum() > -1e9, function, _zeros_of(function), given
            )
        saved = None if policy is None else getattr(jax.checkpoint_policies, policy)
        if kind == "checkpoint":
            return jax.checkpoint(function, policy=saved)
        step = jax.checkpoint(function, policy=saved) if kind == "scan of checkpoint" else function
        return lambda given: _scanned(step, given, self.in_axes(axes, given))

    def in_axes(self, axes: dict[str, int | None], given: Arrays) -> dict[str, int | None]:
        """Return the mapped axes of all operands; the kept weights of dropout have the mapped axis first."""
        return {name: 0 if name == KEPT else axes[name] for name in given}


def _query_of(given: Iterable[str]) -> str:
    """Return the name of one of the queries."""
    return next(name for name in sorted(given) if name.endswith("query"))


def _zeros_of(function: Function) -> Function:
    """Return a branch that is not taken."""
    return lambda given: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, given))


def _scanned(function: Function, given: Arrays, axes: dict[str, int | None]) -> tuple[Any, ...]:
    """Run steps in which some query depends on the previous step."""
    mapped = {name: x for name, x in given.items() if axes[name] is not None}
    rest = {name: x for name, x in given.items() if axes[name] is None}

    def step(carry: Any, each: Arrays) -> tuple[Any, tuple[Any, ...]]:
        whole = rest | each
        name = _query_of(given)
        results = function(whole | {name: (whole[name] * (1 + 0.1 * carry)).astype(whole[name].dtype)})
        return jnp.tanh(results[0].astype(carry.dtype).mean()), results

    return jax.lax.scan(step, jnp.asarray(0.5), mapped)[1]
