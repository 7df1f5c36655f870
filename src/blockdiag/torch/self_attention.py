"""Base of the self-attention modules: projections in and out, and checks of their options."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from blockdiag.common import validation


class SelfAttention(nn.Module):
    """Options and projections of multi-head self-attention; a subclass attends and calls `reset_parameters`."""

    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None,
        head_dim: int | None,
        is_causal: bool,
        bias: bool,
        scale: float | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        implementation: str | Sequence[str] | None,
        via: Literal["jax"] | None,
    ) -> None:
        super().__init__()
        self.embed_dim = positive("embed_dim", embed_dim)
        self.num_heads = positive("num_heads", num_heads)
        self.num_key_heads = num_heads if num_key_heads is None else positive("num_key_heads", num_key_heads)
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
        self.head_dim = embed_dim // num_heads if head_dim is None else positive("head_dim", head_dim)
        self.is_causal = validation.check_is_causal(is_causal)
        self.scale = None if scale is None else validation.check_scale(scale, self.head_dim)
        if via not in (None, "jax"):
            raise ValueError(f"`via` must be None or 'jax', got {via!r}; None launches the kernels natively on CUDA")
        self.implementation = implementation
        self.via: Literal["jax"] | None = via

        rows = (self.num_heads + 2 * self.num_key_heads) * self.head_dim
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, **options))
        validation.check_dtype("dtype", self.in_proj_weight.dtype)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(rows, **options)) if bias else None)
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias, **options)

    def reset_parameters(self) -> None:
        """Draw new initial values, distributed as in `torch.nn.MultiheadAttention`."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _check_input(self, x: torch.Tensor, positions: torch.Tensor | None, *, has_rotary: bool) -> None:
        if x.ndim not in (2, 3) or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"`x` must have shape [B, T, {self.embed_dim}] or [T, {self.embed_dim}], got {tuple(x.shape)}; "
                "reshape more batch axes into one"
            )
        if positions is not None and not has_rotary:
            raise ValueError(
                f"`positions` of shape {tuple(positions.shape)} are for rotary embedding, but the module has none; "
                "create the module with `rotary_max_position`"
            )

    def _describe(self, always: Sequence[str], where_given: Sequence[str]) -> str:
        """Return options for `extra_repr`: those in `always`, and those in `where_given` that are not None."""
        sizes = ("embed_dim", "num_heads", "num_key_heads", "head_dim")
        given = [name for name in where_given if getattr(self, name) is not None]
        options = [f"{name}={getattr(self, name)!r}" for name in (*sizes, *always, *given)]
        return ", ".join([*options, f"bias={self.in_proj_bias is not None}"])


def positive(name: str, value: Any) -> int:
    """Return `value` if it is a positive integer.

    Raises:
        ValueError: it is not a positive integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {value!r}; pass a whole number of at least 1")
    return value
