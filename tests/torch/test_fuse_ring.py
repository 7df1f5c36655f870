"""The order of transfers and kernels of `fuse` with the strategy "ring".

`check_fuse` in context_fuse_worker compares the results across processes.
"""

import types

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from blockdiag.fusion.program import trace  # noqa: E402
from blockdiag.torch.fusion.context import SharedRegion  # noqa: E402
from blockdiag.torch.fusion.program import marked  # noqa: E402
from blockdiag.torch.fusion.region import BackwardSteps, Steps, mark, mark_gradients, region_p  # noqa: E402
from blockdiag.torch.fusion.ring import Passes  # noqa: E402
from blockdiag.torch.fusion.split import Segment, Split  # noqa: E402


def causal(query, key, value):
    scores = jnp.einsum("bth,bsh->bts", query, key) / 4
    row = jnp.arange(query.shape[1])
    return jax.nn.softmax(jnp.where(row[:, None] >= row[None, :], scores, -jnp.inf)) @ value


def test_ring_transfers_overlap_with_attention():
    """Each step starts its transfers before its kernels and awaits them afterwards, forward and backward."""
    whole = jax.ShapeDtypeStruct((1, 64, 16), jnp.bfloat16)
    (region,) = trace(causal, (whole, whole, whole), {}).all_regions()
    programs = []

    def make(program):
        parts = [x for x in Split(marked(program, has_gradient=False)).parts if not isinstance(x, Segment)]
        steps = [x.params["steps"] for x in parts if x.primitive is region_p]
        names = [
            "attend" if isinstance(x, Steps | BackwardSteps) else getattr(x.compute, "__name__", "") for x in steps
        ]
        programs.append(" ".join(name for name in names if name in ("attend", "start", "finish")))
        own = torch.zeros(1, 16, 16)
        return lambda tensors: [own, torch.zeros(1, 16)] if len(tensors) == 3 else [own] * 3

    passes = Passes(
        lambda region: lambda *x: mark(region, x[:-1], x[-1], has_gradient=False, has_log_sum=True),
        lambda region: lambda *x: mark_gradients(region, x[: len(region.leaves)], *x[len(region.leaves) :]),
    )
    processes = types.SimpleNamespace(size=4, rank=1, group=None, strategy="ring")
    # Sources without a key are positions, which have no token axis to divide.
    axes = tuple(None if source.key is None else 1 for source in region.sources)
    ring = []
    SharedRegion(processes, region, axes, False, ring.append).bound()
    compute = ring[0].bound(passes, make)
    compute([torch.zeros(1, 16, 16, requires_grad=True) for _ in range(3)])[0].sum().backward()
    forward, backward = programs
    sent, awaited = "start start", "finish finish"
    step = f"{sent} attend {awaited}"
    assert forward == f"{step} {step} {step} attend"
    # Gradients of keys and values are sent during the next step, and return to their process after the last one.
    with_sums = f"{sent} {sent} attend {awaited} {awaited}"
    assert backward == f"{step} {with_sums} {with_sums} {step} {sent} {awaited}"
