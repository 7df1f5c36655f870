"""Calls on arrays sharded over four devices, compared with the same calls on one device."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.devices.programs import count_collectives
from tests.ops.op_calls import OpCall

KINDS = ("automatic", "explicit")
"""The kinds of meshes: automatic (`jax.sharding.Mesh`) and explicit (`jax.make_mesh`)."""

HEAD_AXES = {
    "query": -2, "key": -2, "value": -2, "outputs": -2, "log_sums": -1, "slopes": 0, "key_scale": -1, "centroids": -2,
    "key_pages": -2, "value_pages": -2, "pages": -2,
}  # fmt: skip
"""The head axis of each array of `op_calls`, by the array's name."""


# All tests of a call share one function, so that JAX compiles it once for one device.


@functools.cache
def results_of(call: OpCall, implementation: str | None) -> Callable[..., Any]:
    """Return the results of a call as a function of its arrays."""
    return call.bound(implementation)


@functools.cache
def gradients_of(call: OpCall, implementation: str | None, *, is_checkpointed: bool = False) -> Callable[..., Any]:
    """Return the gradients of a call as a function of its arrays."""
    return call.gradients(implementation, is_checkpointed=is_checkpointed)


def make_mesh(kind: str, shape: tuple[int, int] = (2, 2)) -> Mesh:
    """Return a mesh of the first devices."""
    devices = jax.devices()[: shape[0] * shape[1]]
    kinds = (AxisType.Auto if kind == "automatic" else AxisType.Explicit,) * 2
    return Mesh(np.asarray(devices).reshape(shape), ("data", "model"), axis_types=kinds)


def shard(mesh: Mesh, x: jax.Array, spec: P) -> jax.Array:
    """Return an array sharded over the mesh."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def assert_divides(
    function: Callable[..., Any],
    arrays: dict[str, jax.Array],
    specs: dict[str, P],
    kind: str,
    collectives: dict[str, int] | None = None,
    atol: float = 1e-5,
    shape: tuple[int, int] = (2, 2),
) -> Any:
    """Assert that a sharded call gives the results of one device, with these collectives and no others.

    Args:
        function: function of the arrays, by name.
        arrays: the arrays on one device, by name.
        specs: the specs of the sharded arrays; the others are on all devices.
        kind: the kind of the mesh.
        collectives: the expected collectives of the compiled program; none by default.
        atol: largest difference, relative to the largest element.
        shape: the shape of the mesh.

    Returns:
        The results of the shards.
    """
    mesh = make_mesh(kind, shape)
    placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in arrays.items()}
    expected = jax.jit(function)(**arrays)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        compiled = jax.jit(function).lower(**placed).compile()
        found = compiled(**placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        finite = np.where(np.isfinite(other), other, 0)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol * np.abs(finite).max())
    counts = count_collectives(compiled.as_text())
    assert counts == (collectives or {}), f"{counts} in the compiled program"
    return found


def batch_specs(call: OpCall, axes: Any, whole: tuple[str, ...] = ()) -> dict[str, P]:
    """Return specs that shard the axis of every array that grows with the batch.

    Args:
        call: the call.
        axes: the mesh axes.
        whole: names of arrays that grow with the batch but are on all devices.
    """
    found = {}
    small, large = call.types(4), call.types(8)
    for name, x in small.items():
        grown = [i for i, (one, other) in enumerate(zip(x.shape, large[name].shape, strict=True)) if one != other]
        if grown and name not in whole:
            found[name] = P(*[None] * grown[0], axes)
    return found


def head_specs(call: OpCall, axes: Any, names: tuple[str, ...] | None = None) -> dict[str, P]:
    """Return specs that shard the heads of these arrays, by default of all arrays with heads."""
    shapes = {name: x.shape for name, x in call.types(4).items()}
    wanted = [name for name in shapes if name in HEAD_AXES and (names is None or name in names)]
    return {name: P(*[None] * (HEAD_AXES[name] % len(shapes[name])), axes) for name in wanted}


def both(first: dict[str, P], second: dict[str, P]) -> dict[str, P]:
    """Return the union of two sets of specs; no axis may be sharded by both."""
    found = dict(first)
    for name, spec in second.items():
        one = (*first.get(name, P()),)
        length = max(len(one), len(spec))
        pairs = zip((*one, *[None] * (length - len(one))), (*spec, *[None] * (length - len(spec))), strict=True)
        found[name] = P(*(x if x is not None else y for x, y in pairs))
    return found
