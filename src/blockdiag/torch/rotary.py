"""Rotary embedding in torch: tables to fuse into an attention call, and the same rotation in plain torch."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch

from blockdiag.common.rotary_angles import check_rotation, rotary_angles
from blockdiag.common.validation import check_apply_to

Operand = Literal["query", "key", "value"]
LETTERS: dict[str, Operand] = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding to fuse into an attention call: `blockdiag.Rotary` with tensors.

    A pair (x0, x1) of a row becomes (x0 cos - x1 sin, x1 cos + x0 sin), computed in float32 and rounded once to the
    dtype of the rotated tensor. Gradients use the exact transpose of this rotation. The tables get no gradient.

    Attributes:
        cos, sin: floating tables of one shape and dtype on the device of the operands. Without `per_token`, [P, H/2]
            with one row per position. With `per_token`, [T, H/2] with one row per token (shared by all batch rows of a
            [B, T, N, H] query) or [B, T, H/2].
        positions: int32 [T] or, for a batched query, [T] or [B, T]: the table row of each token, in [0, P). None means
            a token's position within its sequence, or with `block_lengths` its position within its block. Rows outside
            the table raise an error for a tensor on the CPU, and are clamped on a GPU.
        per_token: whether the tables hold one row per token rather than one per position.
        interleaved: whether pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).
        apply_to: which of "query", "key" and "value" are rotated. A rotated value is not rotated back in the output.

    Raises:
        ValueError: a table is not a tensor, or `apply_to` is empty or has another name. The call that uses the tables
            checks shapes, dtypes and devices.

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), whose pairs are
        `interleaved`; pairs of the two halves: GPT-NeoX (2022).

    Example:
        >>> import torch
        >>> from blockdiag.torch import Rotary, block_diagonal_attention, rotary_tables
        >>> rotary = Rotary(*rotary_tables(max_position=64, head_dim=16), apply_to=["query", "key"])
        >>> query, key, value = torch.randn(3, 1, 40, 2, 16)
        >>> block_diagonal_attention(query, key, value, block_size=16, rotary=rotary).shape
        torch.Size([1, 40, 2, 16])
    """

    cos: torch.Tensor
    sin: torch.Tensor
    _: KW_ONLY
    positions: torch.Tensor | None = None
    per_token: bool = False
    interleaved: bool = False
    apply_to: Sequence[Operand] = ("query", "key")
    # The options in the operators' form: q, k and v for rotated operands, i for interleaved, t for per token.
    letters: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, table in (("cos", self.cos), ("sin", self.sin), ("positions", self.positions)):
            if not isinstance(table, torch.Tensor) and not (table is None and name == "positions"):
                raise ValueError(
                    f"`rotary.{name}` must be a tensor, got {type(table)}; convert it with torch.as_tensor"
                )
        object.__setattr__(self, "apply_to", check_apply_to(self.apply_to))
        letters = "".join(letter for letter, name in LETTERS.items() if name in self.apply_to)
        letters += ("i" if self.interleaved else "") + ("t" if self.per_token else "")
        object.__setattr__(self, "letters", letters)

    @classmethod
    def from_letters(
        cls, letters: str, cos: torch.Tensor | None, sin: torch.Tensor | None, positions: torch.Tensor | None
    ) -> "Rotary | None":
        """Return the embedding that the arguments of an operator encode.

        Args:
            letters: those of "qkv" that are rotated, "i" if pairs are interleaved, "t" if tables are per token.
            cos, sin, positions: see `Rotary`; None without an embedding.

        Returns:
            The embedding, or None without one.

        Raises:
            ValueError: given tables are not tensors.
        """
        if not letters or cos is None or sin is None:
            return None
        return cls(
            cos,
            sin,
            positions=positions,
            per_token="t" in letters,
            interleaved="i" in letters,
            apply_to=tuple(name for letter, name in LETTERS.items() if letter in letters),
        )


def rotary_of(rotary: Any) -> tuple[tuple[Any, Any, Any], str]:
    """Return the tensors (cos, sin, positions) and the letters of a `rotary` argument, as operators take them.

    Raises:
        ValueError: it is neither a `Rotary` nor None.
    """
    if rotary is None:
        return (None, None, None), ""
    if not isinstance(rotary, Rotary):
        raise ValueError(
            f"`rotary` must be a blockdiag.torch.Rotary or None, got {type(rotary)}; wrap cos and sin tables"
        )
    return (rotary.cos, rotary.sin, rotary.positions), rotary.letters


def rotary_tables(
    max_position: int,
    head_dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the usual cosine and sine tables: angle position * theta ** (-2i / H) for pair i, computed in float64.

    Args:
        max_position: rows P of the tables, at least 1.
        head_dim: H, even.
        theta: base of the frequencies, positive; angles are in radians.
        dtype, device: dtype and device of the tables.

    Returns:
        cos and sin, each [P, H/2] in `dtype`.

    Raises:
        ValueError: an argument is out of range.

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).

    Example:
        >>> from blockdiag.torch import rotary_tables
        >>> cos, sin = rotary_tables(max_position=64, head_dim=16)
        >>> cos.shape, sin.dtype
        (torch.Size([64, 8]), torch.float32)
    """
    angles = torch.from_numpy(rotary_angles(max_position, head_dim, theta))
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate every head of every token by that token's row of the tables, without any attention.

    This is the rotation that an attention call with a `Rotary` applies to its operands before the scores.

    Args:
        x: floating [*batch, T, heads, H] with H even.
        cos, sin: floating [T, H/2], or [*batch, T, H/2].
        interleaved: whether pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).

    Returns:
        The rotated tensor, in the shape and dtype of `x`, rounded once from float32 (float64 for float64).

    Raises:
        ValueError: the shapes do not match.

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), whose pairs are
        `interleaved`; pairs of the two halves: GPT-NeoX (2022).

    Example:
        >>> import torch
        >>> from blockdiag.torch import apply_rotary, rotary_tables
        >>> x = torch.randn(1, 40, 2, 16)
        >>> rotated = apply_rotary(x, *rotary_tables(max_position=40, head_dim=16))
        >>> rotated.shape, torch.equal(rotated[:, 0], x[:, 0])
        (torch.Size([1, 40, 2, 16]), True)
    """
    half = check_rotation(x, cos, sin)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[..., None, :].to(wide) for table in (cos, sin))
    if interleaved:
        first, second = x.to(wide).unflatten(-1, (half, 2)).unbind(-1)
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return pairs.flatten(-2).to(x.dtype)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
