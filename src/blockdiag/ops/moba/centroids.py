"""Mean keys of blocks as arrays that every implementation of MoBA writes and reads, so that devices can share them.

Mean keys are float32. Matrix units multiply numbers of the operands' dtype, so that a mean key of a 16-bit dtype is
held in parts: each is the rounding of what the ones before it leave.
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
    """Divide sums of keys by their number; a block without keys gets NaN, whose scores no query chooses."""
    sizes = jnp.where(counts > 0, counts.astype(sums.dtype), jnp.nan)
    rest = sums / sizes[:, None, None]
    kind = jnp.finfo(problem.dtype)
    parts = []
    for _ in range(problem.centroid_parts):
        # XLA may leave out a conversion to a narrower dtype and back, but not this.
        part = jax.lax.reduce_precision(rest, kind.nexp, kind.nmant)
        parts.append(part.astype(problem.dtype))
        # Infinity leaves nothing.
        rest = jnp.where(jnp.isfinite(part), (rest - part) * problem.centroid_scale, 0)
    return jnp.stack(parts, axis=2)


def whole_centroids(problem: MoBAProblem, centroids: Centroids) -> Float[Array, "num_blocks K H"]:
    """Add up the parts, in float32 (float64): exactly what they were made of, but for numbers that underflow."""
    wide = centroids.astype(accumulation_dtype(problem.dtype))
    total = wide[:, :, -1]
    for part in reversed(range(problem.centroid_parts - 1)):
        total = wide[:, :, part] + total / problem.centroid_scale
    return total
