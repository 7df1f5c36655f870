"""Block-diagonal attention as a `torch.nn.Module`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch

from blockdiag.common import validation
from blockdiag.torch import nested
from blockdiag.torch.ops.block_diagonal.api import fused_qkv_block_attention
from blockdiag.torch.rotary import Operand, Rotary, rotary_tables
from blockdiag.torch.self_attention import SelfAttention, positive


class BlockDiagonalSelfAttention(SelfAttention):
    """Multi-head self-attention within blocks: projection, optional rotary embedding, attention, output projection.

    Parameters are named and laid out as in `torch.nn.MultiheadAttention`. Its `state_dict` loads directly if all heads
    have their own key and value and H = embed_dim / num_heads:

    - `in_proj_weight`: [(N + 2 K) H, embed_dim], rows query, key, value, each head by head;
    - `in_proj_bias`: [(N + 2 K) H], with `bias`;
    - `out_proj.weight`: [embed_dim, N H];
    - `out_proj.bias`: [embed_dim], with `bias`.

    Rotary tables are non-persistent buffers. They keep float32 precision (float64 in a float64 module) whatever dtype
    the module is cast to. A module made on the "meta" device gets them when it is moved to a real one.

    Args:
        embed_dim: D, channels of the tokens.
        num_heads: N, query heads.
        num_key_heads: K, key and value heads, a divisor of N; N when None.
        head_dim: H; embed_dim / num_heads when None.
        block_size: rows of a block; with `block_lengths` the maximum number of rows of a block.
        rotary_max_position: rows of the rotary tables, the maximum length of a sequence; None for no rotary embedding.
        rotary_theta: base of the rotary frequencies.
        rotary_interleaved: whether rotated pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).
        rotary_apply_to: which of "query", "key" and "value" are rotated.
        is_causal: whether a token attends only to itself and earlier tokens of its block.
        bias: whether both projections have a bias.
        scale: positive factor on the scores; 1 / sqrt(H) when None.
        device, dtype: device and dtype of the parameters.
        implementation, via: as for `block_diagonal_attention`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.

    References:
        Multi-head attention: Vaswani et al., "Attention Is All You Need" (2017). Within blocks: Liu et al. (2018), see
        `block_diagonal_attention`. Rotary embedding: Su et al., "RoFormer" (2021).

    Example:
        >>> import torch
        >>> from blockdiag.torch import BlockDiagonalSelfAttention
        >>> attention = BlockDiagonalSelfAttention(64, 4, block_size=16, rotary_max_position=128, is_causal=True)
        >>> attention(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int = 64,
        rotary_max_position: int | None = None,
        rotary_theta: float = 10000.0,
        rotary_interleaved: bool = False,
        rotary_apply_to: Sequence[Operand] = ("query", "key"),
        is_causal: bool = False,
        bias: bool = True,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        implementation: str | Sequence[str] | None = None,
        via: Literal["jax"] | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_key_heads=num_key_heads,
            head_dim=head_dim,
            is_causal=is_causal,
            bias=bias,
            scale=scale,
            device=device,
            dtype=dtype,
            implementation=implementation,
            via=via,
        )
        self.block_size = validation.check_block_size(block_size)
        self.rotary_max_position = (
            None if rotary_max_position is None else positive("rotary_max_position", rotary_max_position)
        )
        if not rotary_theta > 0:
            raise ValueError(f"`rotary_theta` must be positive, got {rotary_theta}; the usual value is 10000.0")
        self.rotary_theta = rotary_theta
        self.rotary_interleaved = rotary_interleaved
        self.rotary_apply_to: Sequence[Operand] = rotary_apply_to
        validation.check_apply_to(rotary_apply_to)
        self.register_buffer("rotary_cos", None, persistent=False)
        self.register_buffer("rotary_sin", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values, distributed as in `torch.nn.MultiheadAttention`, and recompute the rotary tables."""
        super().reset_parameters()
        self._make_rotary_tables()

    def forward(
        self,
        x: torch.Tensor,
        *,
        sequence_offsets: torch.Tensor | None = None,
        block_lengths: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            x: [B, T, embed_dim], or packed [T, embed_dim], in the dtype of the parameters (any under autocast).
            sequence_offsets: int32 [num_sequences + 1], only for a packed `x`.
            block_lengths: int32 [num_blocks], only for a packed `x` and instead of `sequence_offsets`.
            positions: int32 [T] or, for a batched `x`, [T] or [B, T]: the rotary position of each token. None means its
                position within its sequence, or with `block_lengths` its position within its block.

        Returns:
            The attended tokens, in the shape and dtype of `x` (autocast's dtype under autocast).

        Raises:
            ValueError: an argument is wrong; the message names it, its value and the remedy.
            NotImplementedError: none of the requested implementations can compute this call; the message says why.
        """
        if x.is_nested:
            (values,), (offsets,) = nested.unpack(block_lengths if sequence_offsets is None else sequence_offsets, x=x)
            return nested.repack(self.forward(values, sequence_offsets=offsets, positions=positions), x)
        self._check_input(x, positions, has_rotary=self.rotary_cos is not None)
        attended = fused_qkv_block_attention(
            x,
            self.in_proj_weight.t(),
            self.in_proj_bias,
            query_heads=self.num_heads,
            key_heads=self.num_key_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            sequence_offsets=sequence_offsets,
            block_lengths=block_lengths,
            rotary=self._rotary(positions),
            scale=self.scale,
            is_causal=self.is_causal,
            implementation=self.implementation,
            via=self.via,
        )
        return self.out_proj(attended.flatten(-2))

    def extra_repr(self) -> str:
        rotary = ("rotary_max_position", "rotary_theta", "rotary_interleaved", "rotary_apply_to")
        has_rotary = self.rotary_max_position is not None
        always = ("block_size", "is_causal", *(rotary if has_rotary else ()))
        return self._describe(always, ("scale", "implementation", "via"))

    def _rotary(self, positions: torch.Tensor | None) -> Rotary | None:
        if self.rotary_cos is None or self.rotary_sin is None:
            return None
        return Rotary(
            self.rotary_cos,
            self.rotary_sin,
            positions=positions,
            interleaved=self.rotary_interleaved,
            apply_to=self.rotary_apply_to,
        )

    def _make_rotary_tables(self) -> None:
        if self.rotary_max_position is None:
            return
        weight = self.in_proj_weight
        self.rotary_cos, self.rotary_sin = rotary_tables(
            self.rotary_max_position, self.head_dim, self.rotary_theta, self._table_dtype(), weight.device
        )

    def _table_dtype(self) -> torch.dtype:
        return torch.float64 if self.in_proj_weight.dtype == torch.float64 else torch.float32

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Every cast and every move goes through this method. A cast would round the tables, and casting the module back
        # would not undo that. A move from the meta device leaves the tables without values.
        before = self.rotary_cos
        super()._apply(fn, recurse)
        after = self.rotary_cos
        if before is None or after is None:
            return self
        if before.is_meta or not before.dtype == after.dtype == self._table_dtype():
            self._make_rotary_tables()
        return self

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Move without values, as every module does, but fill the rotary tables, which no checkpoint contains."""
        super().to_empty(device=device, recurse=recurse)
        self._make_rotary_tables()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # With assign=True a module on the meta device gets real parameters here, but its tables stay without values.
        super()._load_from_state_dict(*args, **kwargs)
        if self.rotary_cos is not None and self.rotary_cos.device != self.in_proj_weight.device:
            self._make_rotary_tables()
