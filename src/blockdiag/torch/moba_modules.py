"""MoBA as a `torch.nn.Module`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn

from blockdiag.common import validation
from blockdiag.ops.key_convolution.problem import MAX_SIZE
from blockdiag.ops.moba.checks import check_moba_block_size, check_top_k
from blockdiag.torch import nested
from blockdiag.torch.arguments import autocast
from blockdiag.torch.ops.key_convolution.api import key_convolution
from blockdiag.torch.ops.moba.api import moba_attention
from blockdiag.torch.ops.moba.routing import Routing
from blockdiag.torch.ops.moba.tables import clip_offsets, rows_to_sequences
from blockdiag.torch.rotary import Rotary, apply_rotary, rotary_tables
from blockdiag.torch.self_attention import SelfAttention, positive


class MoBASelfAttention(SelfAttention):
    """Multi-head self-attention to the best-scoring blocks of each query: projection, MoBA, output projection.

    Optionally, a learned convolution mixes each key with the few before it. A rotary embedding of queries and keys may
    follow, so that scores depend on positions only through their differences.

    Parameters are named and laid out as in `torch.nn.MultiheadAttention`. Its `state_dict` loads directly if all heads
    have their own key and value, H = embed_dim / num_heads, and keys are not convolved:

    - `in_proj_weight`: [(N + 2 K) H, embed_dim], rows query, key, value, each head by head;
    - `in_proj_bias`: [(N + 2 K) H], with `bias`;
    - `key_convolution_weight`: [size, K, H], with `key_convolution_size`; see `key_convolution`;
    - `out_proj.weight`: [embed_dim, N H];
    - `out_proj.bias`: [embed_dim], with `bias`.

    Rotary tables are non-persistent buffers. They keep float32 precision (float64 in a float64 module) whatever dtype
    the module is cast to. A module made on the "meta" device gets them when it is moved to a real one.

    Args:
        embed_dim: D, channels of the tokens.
        num_heads: N, query heads.
        num_key_heads: K, key and value heads, a divisor of N; N when None.
        head_dim: H; embed_dim / num_heads when None.
        block_size: keys of a block, a multiple of 16 from 16 to 4096.
        top_k: blocks that a query sees, its own included, 1..64.
        key_convolution_size: number of tokens that the key convolution covers, 1..8; None for no convolution.
        rotary_max_position: rows of the rotary tables, the maximum length of a sequence; None for no rotary embedding.
        rotary_theta: base of the rotary frequencies.
        rotary_interleaved: whether rotated pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).
        is_causal: whether a token attends only to itself and earlier tokens.
        bias: whether both projections have a bias.
        scale: positive factor on the scores of the softmax; 1 / sqrt(H) when None.
        device, dtype: device and dtype of the parameters.
        implementation, via: as for `moba_attention`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025). Key convolution: Xiao et al.,
        "Optimizing Mixture of Block Attention" (FlashMoBA, 2025). Rotary embedding: Su et al., "RoFormer" (2021).

    Example:
        >>> import torch
        >>> from blockdiag.torch import MoBASelfAttention
        >>> attention = MoBASelfAttention(64, 4, block_size=16, top_k=3, key_convolution_size=3)
        >>> attention(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    key_convolution_weight: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int = 128,
        top_k: int = 8,
        key_convolution_size: int | None = None,
        rotary_max_position: int | None = None,
        rotary_theta: float = 10000.0,
        rotary_interleaved: bool = False,
        is_causal: bool = True,
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
        self.block_size = check_moba_block_size(block_size)
        self.top_k = check_top_k(top_k)
        if key_convolution_size is not None and positive("key_convolution_size", key_convolution_size) > MAX_SIZE:
            raise ValueError(
                f"`key_convolution_size` must be None or an integer of 1..{MAX_SIZE}, got "
                f"{key_convolution_size}; 3 and 5 are usual"
            )
        self.key_convolution_size = key_convolution_size
        weight = None
        if key_convolution_size is not None:
            shape = (key_convolution_size, self.num_key_heads, self.head_dim)
            weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter("key_convolution_weight", weight)
        self.rotary: _RotaryTables | None = None
        if rotary_max_position is not None:
            self.rotary = _RotaryTables(
                rotary_max_position, self.head_dim, rotary_theta, rotary_interleaved, self.in_proj_weight
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values.

        The projections are distributed as in `torch.nn.MultiheadAttention`. The convolution is 0, so keys are initially
        unchanged.
        """
        super().reset_parameters()
        if self.key_convolution_weight is not None:
            nn.init.zeros_(self.key_convolution_weight)

    def forward(
        self,
        x: torch.Tensor,
        *,
        sequence_offsets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        routing: Routing | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            x: [B, T, embed_dim], or packed [T, embed_dim], in the dtype of the parameters (any under autocast).
            sequence_offsets: int32 [num_sequences + 1], only for a packed `x`.
            positions: int32 [T] or, for a batched `x`, [T] or [B, T]: the rotary position of each token. None means its
                position within its sequence.
            key_mask: bool [B, T] or [T], True for tokens that others may attend to. The key convolution ignores it.
            routing: the blocks that each query sees, instead of the best-scoring ones; see `moba_attention`.

        Returns:
            The attended tokens, in the shape and dtype of `x` (autocast's dtype under autocast).

        Raises:
            ValueError: an argument is wrong; the message names it, its value and the remedy.
            NotImplementedError: none of the requested implementations can compute this call; the message says why.
        """
        if x.is_nested:
            (values,), (offsets,) = nested.unpack(sequence_offsets, x=x)
            more = {"positions": positions, "key_mask": key_mask, "routing": routing}
            return nested.repack(self.forward(values, sequence_offsets=offsets, **more), x)
        self._check_input(x, positions, has_rotary=self.rotary is not None)
        who: dict[str, Any] = {"implementation": self.implementation, "via": self.via}
        query, key, value = self._project(x)
        if self.key_convolution_weight is not None:
            key = key_convolution(key, self.key_convolution_weight, sequence_offsets=sequence_offsets, **who)
        if self.rotary is not None:
            query, key = self.rotary(query, key, sequence_offsets, positions)
        attended = moba_attention(
            # Copied once here, instead of in the forward and again in the backward pass.
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            block_size=self.block_size,
            top_k=self.top_k,
            scale=self.scale,
            is_causal=self.is_causal,
            sequence_offsets=sequence_offsets,
            routing=routing,
            key_mask=key_mask,
            **who,
        )
        return self.out_proj(attended.flatten(-2))

    def extra_repr(self) -> str:
        always = ("block_size", "top_k", "is_causal")
        return self._describe(always, ("key_convolution_size", "scale", "implementation", "via"))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query, key and value, [B, T, heads, H] or [T, heads, H]."""
        x, weight = autocast(x, self.in_proj_weight)
        bias = None if self.in_proj_bias is None else autocast(self.in_proj_bias)[0]
        heads = (self.num_heads, self.num_key_heads, self.num_key_heads)
        if not torch.compiler.is_compiling():
            validation.check_projection(x, weight.t(), bias, *heads[:2], self.head_dim)
        buffer = nn.functional.linear(x, weight, bias)
        return buffer.unflatten(-1, (sum(heads), self.head_dim)).split(heads, dim=-2)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # With assign=True a module on the meta device gets real parameters here, but its tables stay without values.
        super()._load_from_state_dict(*args, **kwargs)
        if self.rotary is not None and self.rotary.cos.device != self.in_proj_weight.device:
            self.rotary.make(self.in_proj_weight)


class _RotaryTables(nn.Module):
    """Rotary embedding of queries and keys, by tables that keep their dtype when the module is cast.

    Args:
        max_position, head_dim, theta: as for `rotary_tables`.
        interleaved: as for `apply_rotary`.
        like: a parameter of the module, which determines dtype and device of the tables.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, max_position: int, head_dim: int, theta: float, interleaved: bool, like: torch.Tensor) -> None:
        super().__init__()
        self.max_position = positive("rotary_max_position", max_position)
        if not theta > 0:
            raise ValueError(f"`rotary_theta` must be positive, got {theta}; the usual value is 10000.0")
        self.head_dim, self.theta, self.interleaved = head_dim, theta, interleaved
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self.make(like)

    def make(self, like: torch.Tensor) -> None:
        """Compute the tables on the device of `like`, in float64 if `like` is float64, else in float32."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.cos, self.sin = rotary_tables(self.max_position, self.head_dim, self.theta, dtype, like.device)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        sequence_offsets: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return query and key [B, T, heads, H] or [T, heads, H], rotated."""
        tokens_shape = query.shape[:-2]
        if not torch.compiler.is_compiling():
            longest = tokens_shape[-1]
            if sequence_offsets is not None:
                longest = validation.check_sequence_offsets(tokens_shape[-1], sequence_offsets, operand="x")
            rotary = Rotary(self.cos, self.sin, positions=positions, interleaved=self.interleaved)
            validation.check_rotary(rotary, tokens_shape, self.head_dim, longest)
        if positions is None and sequence_offsets is not None:
            edges = clip_offsets(sequence_offsets, tokens_shape[-1])
            sequence, _ = rows_to_sequences(edges, tokens_shape[-1])
            positions = torch.arange(tokens_shape[-1], dtype=torch.int32, device=query.device) - edges[sequence]
        if positions is None:
            cos, sin = self.cos[: tokens_shape[-1]], self.sin[: tokens_shape[-1]]
        else:
            # Rows of no sequence have arbitrary positions, and positions beyond the tables cannot be checked on a GPU.
            positions = positions.clamp(0, self.max_position - 1)
            cos, sin = self.cos[positions], self.sin[positions]
        turn = {"interleaved": self.interleaved}
        return apply_rotary(query, cos, sin, **turn), apply_rotary(key, cos, sin, **turn)

    def extra_repr(self) -> str:
        return f"max_position={self.max_position}, theta={self.theta}, interleaved={self.interleaved}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Every cast and every move goes through this method. A cast would round the tables, and casting them back would
        # not undo that. A move from the meta device and `to_empty` leave the tables without values.
        super()._apply(fn, recurse)
        self.make(self.cos)
        return self
