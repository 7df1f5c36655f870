"""Every operation within a `jax.shard_map` that is manual over only some axes of its mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag.interop import compile_target
from tests.ops.op_calls import CALLS, expected_results, mark_covered, pairs

GATHERED = r"inside a jax\.shard_map that leaves axes \['model'\] automatic, operands are gathered"
pytestmark = pytest.mark.filterwarnings(f"ignore:{GATHERED}")


def on_shards(function, axes):
    """Return a compiled function that runs `function` on two shards, each with separate arrays."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def compute(arrays):
        found = function(**{name: x[0] for name, x in arrays.items()})
        return jax.tree.map(lambda x: x[None], found)

    return jax.jit(jax.shard_map(compute, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=axes))


def stacked(call):
    return jax.tree.map(lambda *x: jnp.stack(x), call.arrays(2, seed=0), call.arrays(2, seed=1))


def assert_equal_to_each(found, name):
    """Assert that the results of each shard are those of its seed."""
    for i in range(2):
        expected = expected_results(name, 2, i, is_gradient=bool(CALLS[name].differentiated))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            largest = np.abs(np.where(np.isfinite(other), other, 0)).max()
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-5 * largest)


def computed(call, implementation):
    """Return the gradients of a call if it has any, else its results."""
    return call.gradients(implementation) if call.differentiated else call.bound(implementation)


@pytest.mark.parametrize(("name", "implementation"), mark_covered(x for x in pairs() if x[1] != "triton"))
@pytest.mark.division("batch", "gradients", kind="partly manual")
def test_operation_in_a_partly_manual_shard_map_computes_each_shard(name, implementation):
    function, arrays = computed(CALLS[name], implementation), stacked(CALLS[name])
    assert_equal_to_each(on_shards(function, {"data"})(arrays), name)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "triton" in call.implementations])
def test_kernels_in_a_partly_manual_shard_map_lower_for_cuda(name):
    """Callbacks, which the interpreter uses, need a mesh that is manual over all axes."""
    with compile_target(90):
        traced = on_shards(computed(CALLS[name], "triton"), {"data"}).trace(stacked(CALLS[name]))
        assert "triton_kernel_call_ffi" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["block_diagonal", "moba", "fuse"])
def test_operation_in_a_partly_manual_shard_map_warns_of_gathers(name):
    jax.clear_caches()  # A call that has been traced before does not warn again.
    with pytest.warns(UserWarning, match=GATHERED):
        on_shards(computed(CALLS[name], None), {"data"}).trace(stacked(CALLS[name]))
