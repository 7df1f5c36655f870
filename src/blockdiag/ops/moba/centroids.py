"""Mean keys of blocks, in a form that every implementation of MoBA writes and reads, so that devices can share them.

Mean keys are float32, but matrix units multiply numbers of the operands' dtype. For a 16-bit dtype a mean key is
therefore split into parts of that dtype. Each part is the rounded remainder of the parts before it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.ops.moba.problem import MoBAProblem

type Centroids = Float[Array, "num_blocks K parts H"]


def centroids_of_sums(
    problem: MoBAProblem, sums: Float[Array, "num_blocks K H"], counts: Int[Array, " blocks"]
) -> Centroids:
    """Divide sums of keys by their counts; a block without keys gets NaN, which no query chooses."""
    sizes = jnp.where(counts > 0, counts.astype(sums.dtype), jnp.nan)
    rest = sums / sizes[:, None, None]
    kind = jnp.finfo(problem.dtype)
    parts = []
    for _ in range(problem.centroid_parts):
        # XLA may remove a conversion to a narrower dtype and back, but not `reduce_precision`.
        part = jax.lax.reduce_precision(rest, kind.nexp, kind.nmant)
        parts.append(part.astype(problem.dtype))
        # An infinite part leaves no remainder.
        rest = jnp.where(jnp.isfinite(part), (rest - part) * problem.centroid_scale, 0)
    return jnp.stack(parts, axis=2)


def whole_centroids(problem: MoBAProblem, centroids: Centroids) -> Float[Array, "num_blocks K H"]:
    """Add up the parts in float32 (float64), which restores the mean keys exactly except for underflow."""
    wide = centroids.astype(accumulation_dtype(problem.dtype))
    total = wide[:, :, -1]
    for part in reversed(range(problem.centroid_parts - 1)):
        total = wide[:, :, part] + total / problem.centroid_scale
    return total
