"""The gallery's variants as cases, and the sizes at which they are shown and timed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.harness.family import Work
from blockdiag.fusion.gallery import VARIANTS, Sizes

type GalleryPass = Literal["fwd", "fwd+bwd"]

PASSES: tuple[GalleryPass, ...] = ("fwd", "fwd+bwd")

SHOWN = Sizes(
    batch=1, rows=2, query_tokens=4096, key_tokens=4096, query_heads=2, key_heads=1, head_dim=64, value_dim=64,
    dtype="bfloat16",
)  # fmt: skip
"""Of the page: tiles and kernels depend on lengths and features, hardly on batch and heads."""

SMOKE = Sizes(query_tokens=96, key_tokens=96)
"""For a CPU."""

_USUAL = replace(SHOWN, batch=2, query_heads=8, key_heads=2)
_ROWS = replace(_USUAL, rows=256, query_tokens=256, key_tokens=256)
_POINTS = replace(_USUAL, query_tokens=2048, key_tokens=2048)
_CACHE = replace(_USUAL, batch=64)
# With about as many scores each, or bytes where there are few, so that XLA's fit the memory and nothing is too short.
_TIMED = {
    "packed_documents": replace(_USUAL, query_tokens=8192, key_tokens=8192),
    "similarity": replace(_USUAL, batch=16),
    "one_query": _CACHE,
    "one_query_grouped": _CACHE,
    "evoformer_row": _ROWS,
    "triangle": _ROWS,
    "invariant_points": _POINTS,
    "invariant_points_frames": _POINTS,
}


@dataclass(frozen=True)
class GalleryCase:
    """A variant of the gallery with the sizes of its inputs."""

    name: str
    sizes: Sizes

    @property
    def passes(self) -> tuple[GalleryPass, ...]:
        """The passes that are timed."""
        return PASSES

    def columns(self) -> dict[str, Any]:
        """Return the columns that are known before the inputs."""
        return {"variant": self.name, "dtype": jnp.dtype(self.sizes.dtype).name}

    def floor(self, pass_name: str) -> tuple[Work, ...]:
        """Return nothing: variants are compared with XLA, not with the GPU's rates."""
        del pass_name
        return ()


SMOKE_CASES = (GalleryCase("causal", SMOKE), GalleryCase("alibi_learned", SMOKE))


def timed_sizes(name: str) -> Sizes:
    """Sizes of a variant's inputs on a GPU."""
    return _TIMED.get(name, _USUAL)


def select_variants(names: str | None) -> list[str]:
    """Variants of a comma-separated list; None: all.

    Raises:
        ValueError: for a name that is no variant.
    """
    if names is None:
        return list(VARIANTS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown or not wanted:
        raise ValueError(f"variants must be some of {', '.join(VARIANTS)}; got {names!r}")
    return wanted


def select_gallery_cases(names: str | None) -> list[GalleryCase]:
    """Return the variants of a comma-separated list at the sizes of a GPU; see `select_variants`."""
    return [GalleryCase(name, timed_sizes(name)) for name in select_variants(names)]


def shape_text(inputs: Mapping[str, Array]) -> str:
    """The first input's shape, and the second's where it is another: "query [2, 4096, 8, 64]"."""
    (first, array), *others = inputs.items()
    text = f"{first} {list(array.shape)}"
    if others and others[0][1].shape != array.shape:
        text += f", {others[0][0]} {list(others[0][1].shape)}"
    return text
