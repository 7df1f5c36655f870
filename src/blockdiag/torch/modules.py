"""Block-diagonal attention as a `torch.nn.Module`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn

from blockdiag import _validate
from blockdiag.torch._attention import fused_qkv_block_attention
from blockdiag.torch._rotary import Operand, Rotary, rotary_tables


class BlockDiagonalSelfAttention(nn.Module):
    """Multi-head self-attention within blocks: projection, optional rotary embedding, attention, output projection.

    Parameters are named and laid out as in `torch.nn.MultiheadAttention`, whose `state_dict` loads directly where all
    heads have their own key and value and H = embed_dim / num_heads:

    - `in_proj_weight`: [(N + 2 K) H, embed_dim], rows query, key, value, each head by head;
    - `in_proj_bias`: [(N + 2 K) H], with `bias`;
    - `out_proj.weight`: [embed_dim, N H];
    - `out_proj.bias`: [embed_dim], with `bias`.

    Rotary tables are buffers that are not saved. They keep the precision of float32 (float64 in a float64 module)
    whatever dtype the module is cast to. A module made on the "meta" device gets them when it is moved to a real one.

    Args:
        embed_dim: D, channels of the tokens.
        num_heads: N, query heads.
        num_key_heads: K, key and value heads, a divisor of N; N when None.
        head_dim: H; embed_dim / num_heads when None.
        block_size: rows of a block, 1..256; with `block_lengths` the most rows of a block.
        rotary_max_position: rows of the rotary tables, the most tokens of a sequence; None for no rotary embedding.
        rotary_theta: base of the rotary frequencies.
        rotary_interleaved: whether rotated pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).
        rotary_apply_to: which of "query", "key" and "value" are rotated.
        is_causal: whether a token attends only to itself and earlier tokens of its block.
        bias: whether both projections have a bias.
        scale: positive factor on the scores; 1 / sqrt(H) when None.
        device, dtype: of the parameters.
        implementation, via: as for `block_diagonal_attention`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.

    Example:
        >>> import torch
        >>> from blockdiag.torch import BlockDiagonalSelfAttention
        >>> attention = BlockDiagonalSelfAttention(64, 4, block_size=16, rotary_max_position=128, is_causal=True)
        >>> attention(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    in_proj_bias: nn.Parameter | None
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
        super().__init__()
        self.embed_dim = _positive("embed_dim", embed_dim)
        self.num_heads = _positive("num_heads", num_heads)
        self.num_key_heads = num_heads if num_key_heads is None else _positive("num_key_heads", num_key_heads)
        if num_heads % self.num_key_heads:
            raise ValueError(
                f"`num_heads` must be a multiple of `num_key_heads`, got {num_heads} and {num_key_heads}; query head n "
                "attends to key head n // (num_heads // num_key_heads)"
            )
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"`embed_dim` must be a multiple of `num_heads` where `head_dim` is None, got {embed_dim} and "
                f"{num_heads}; pass `head_dim`"
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else _positive("head_dim", head_dim)
        self.block_size = _validate.check_block_size(block_size)
        self.is_causal = _validate.check_is_causal(is_causal)
        self.scale = None if scale is None else _validate.check_scale(scale, self.head_dim)
        if via not in (None, "jax"):
            raise ValueError(f"`via` must be None or 'jax', got {via!r}; None launches the kernels natively on CUDA")
        self.implementation = implementation
        self.via: Literal["jax"] | None = via
        self.rotary_max_position = (
            None if rotary_max_position is None else _positive("rotary_max_position", rotary_max_position)
        )
        if not rotary_theta > 0:
            raise ValueError(f"`rotary_theta` must be positive, got {rotary_theta}; the usual value is 10000.0")
        self.rotary_theta = rotary_theta
        self.rotary_interleaved = rotary_interleaved
        self.rotary_apply_to: Sequence[Operand] = rotary_apply_to
        _validate.check_apply_to(rotary_apply_to)

        rows = (self.num_heads + 2 * self.num_key_heads) * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, device=device, dtype=dtype))
        _validate.check_dtype("dtype", self.in_proj_weight.dtype)
        self.register_parameter(
            "in_proj_bias", nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        )
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.register_buffer("rotary_cos", None, persistent=False)
        self.register_buffer("rotary_sin", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, distributed as those of `torch.nn.MultiheadAttention`; rotary tables are made anew."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
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
            positions: int32 [T] or, for a batched `x`, [T] or [B, T]: the rotary position of each token. None takes its
                position within its sequence; with `block_lengths` that is its position within its block.

        Returns:
            The shape and dtype of `x` (autocast's dtype under autocast).

        Raises:
            ValueError: an argument is wrong; the message names it, its value and the remedy.
            NotImplementedError: none of the implementations asked for can compute this call; the message says why.
        """
        if x.ndim not in (2, 3) or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"`x` must have shape [B, T, {self.embed_dim}] or [T, {self.embed_dim}], got {tuple(x.shape)}; "
                "reshape more batch axes into one"
            )
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
        names = ["embed_dim", "num_heads", "num_key_heads", "head_dim", "block_size", "is_causal"]
        if self.rotary_max_position is not None:
            names += ["rotary_max_position", "rotary_theta", "rotary_interleaved", "rotary_apply_to"]
        names += [name for name in ("scale", "implementation", "via") if getattr(self, name) is not None]
        options = [f"{name}={getattr(self, name)!r}" for name in names]
        return ", ".join([*options, f"bias={self.in_proj_bias is not None}"])

    def _rotary(self, positions: torch.Tensor | None) -> Rotary | None:
        if self.rotary_cos is None or self.rotary_sin is None:
            if positions is not None:
                raise ValueError(
                    f"`positions` of shape {tuple(positions.shape)} say where rotary embedding is, but there is none; "
                    "make the module with `rotary_max_position`"
                )
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
        # Every cast and every move comes through here. Casting would round the tables, and the rounding would stay
        # when the module is cast back; from the meta device come no values at all.
        before = self.rotary_cos
        super()._apply(fn, recurse)
        after = self.rotary_cos
        if before is None or after is None:
            return self
        if before.is_meta or not before.dtype == after.dtype == self._table_dtype():
            self._make_rotary_tables()
        return self

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """As of every module; the rotary tables have their values afterwards, as no checkpoint holds them."""
        super().to_empty(device=device, recurse=recurse)
        self._make_rotary_tables()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # With assign=True a module on the meta device gets real parameters in this way, and its tables nothing.
        super()._load_from_state_dict(*args, **kwargs)
        if self.rotary_cos is not None and self.rotary_cos.device != self.in_proj_weight.device:
            self._make_rotary_tables()


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {value!r}; pass a whole number of at least 1")
    return value
