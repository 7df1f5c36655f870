"""The functions of the benchmark in PyTorch: plain mathematics for `torch.compile`, FlexAttention and SDPA."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fuse.cases import SECOND_SHARE, SOFT_CAP, FuseCase, FusePass, alibi_slopes, document_lengths

type Tensors = Mapping[str, torch.Tensor]
type Compile = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]

COMPILE = "torch-compile"
FLEX = "torch-flex"
SDPA_BACKENDS = {"torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-fa2": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class TorchCall:
    """A torch function with its arguments, in a layout of its own.

    Attributes:
        attend: of `arrays`, in order.
        arrays: by name.
        differentiated: names of those whose gradients are taken.
        cotangent: of the output.
        back: an array in this layout, by name ("output" too), in the case's layout.
        note: what the CSV should say.
    """

    attend: Callable[..., torch.Tensor]
    arrays: Tensors
    differentiated: tuple[str, ...]
    cotangent: torch.Tensor
    back: Callable[[str, torch.Tensor], torch.Tensor]
    note: str = ""

    def run_of(self, pass_name: FusePass) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Queues a pass; returns the output and, of "fwd+bwd", the gradients in order."""
        if pass_name == "fwd":

            def forward() -> tuple[torch.Tensor, ...]:
                with torch.no_grad():
                    return (self.attend(*self.arrays.values()),)

            return forward
        leaves = {
            name: array.detach().requires_grad_() if name in self.differentiated else array
            for name, array in self.arrays.items()
        }
        wanted = [leaves[name] for name in self.differentiated]

        def both() -> tuple[torch.Tensor, ...]:
            output = self.attend(*leaves.values())
            return (output.detach(), *torch.autograd.grad(output, wanted, self.cotangent))

        return both

    def results(self, found: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a pass returned by name, in the case's layout."""
        names = ("output", *self.differentiated)[: len(found)]
        return {name: self.back(name, array) for name, array in zip(names, found, strict=True)}


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function by torch's compiler, for fixed shapes."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def positions(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries [T, 1] and of keys [1, T]."""
    position = torch.arange(tokens, device=device)
    return position[:, None], position[None, :]


def changed_scores(case: FuseCase, scores: torch.Tensor, arrays: Tensors) -> torch.Tensor:
    """Scores [B, .., T, T] of one of the groups of tokens, masked or changed as the group says.

    Args:
        arrays: with "segments" [B, T] of "documents", and "slopes" [.., 1, 1] of "alibi", as wide as the scores' heads.
    """
    row, column = positions(case.tokens, scores.device)
    seen = column <= row
    match case.group:
        case "full":
            return scores
        case "alibi":
            # In bfloat16, distances beyond 256 would be rounded.
            wide = torch.promote_types(scores.dtype, torch.float32)
            scores = scores.to(wide) + arrays["slopes"].to(wide) * (column - row)
            if not case.is_causal:
                return scores
        case "softcap":
            scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
            if not case.is_causal:
                return scores
        case "window":
            seen = seen & (row - column <= case.window)
        case "prefix":
            seen = column <= row.clamp(min=case.prefix - 1)
        case "documents":
            segments = arrays["segments"]
            same = segments[:, :, None] == segments[:, None, :]
            seen = (same & seen).reshape(-1, *[1] * (scores.ndim - 3), *scores.shape[-2:])
    return scores.masked_fill(~seen, -torch.inf)


def plain_attention(case: FuseCase, arrays: Tensors) -> torch.Tensor:
    """The function of a case, in its layout and in the dtype of `arrays`, which may be a part of its heads or batch."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    scale = case.head_dim**-0.5
    if case.group == "evoformer":
        scores = torch.einsum("brtnh,brsnh->brnts", query, key) * scale
        weights = torch.softmax(scores + arrays["mask_bias"] + arrays["pair_bias"], dim=-1)
        return torch.einsum("brnts,brsnh->brtnh", weights, value)
    if case.group == "diff":
        weights = torch.softmax(torch.einsum("btmnh,bsmnh->bmnts", query, key) * scale, dim=-1)
        return torch.einsum("bnts,bsnv->btnv", weights[:, 0] - SECOND_SHARE * weights[:, 1], value)
    if query.shape[2] == key.shape[2]:
        scores = changed_scores(case, torch.einsum("btnh,bsnh->bnts", query, key) * scale, arrays)
        return torch.einsum("bnts,bsnh->btnh", torch.softmax(scores, dim=-1).to(value.dtype), value)
    grouped = query.unflatten(2, (key.shape[2], -1))
    if "slopes" in arrays:
        arrays = {**arrays, "slopes": arrays["slopes"].unflatten(-3, (key.shape[2], -1))}
    scores = changed_scores(case, torch.einsum("btkgh,bskh->bkgts", grouped, key) * scale, arrays)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    return torch.einsum("bkgts,bskh->btkgh", weights, value).flatten(2, 3)


def slopes_of(case: FuseCase, device: torch.device) -> dict[str, torch.Tensor]:
    """Of "alibi", the slopes [N, 1, 1] by their name."""
    if case.group != "alibi":
        return {}
    return {"slopes": torch.from_numpy(alibi_slopes(case.query_heads)).to(device)[:, None, None]}


def plain_call(case: FuseCase, arrays: Tensors, compile_function: Compile = compiled) -> TorchCall:
    """The plain function, compiled, on the case's arrays as they lie."""
    constants = slopes_of(case, arrays["query"].device)
    names = tuple(case.shapes)

    def attend(*operands: torch.Tensor) -> torch.Tensor:
        return plain_attention(case, {**dict(zip(names, operands, strict=True)), **constants})

    given = {name: arrays[name] for name in names}
    return TorchCall(compile_function(attend), given, case.differentiated, arrays["cotangent"], lambda _, array: array)


def flex_mask(case: FuseCase, arrays: Tensors) -> Any:
    """The block mask of a case, made once; None where nothing is masked."""
    from torch.nn.attention.flex_attention import create_block_mask

    segments, window, prefix = arrays.get("segments"), case.window, case.prefix

    def causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return column <= row

    def windowed(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (column <= row) & (row - column <= window)

    def prefixed(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (column <= row) | (column < prefix)

    def documents(batch: Any, head: Any, row: Any, column: Any) -> Any:
        assert segments is not None
        return (column <= row) & (segments[batch, row] == segments[batch, column])

    masks = {"causal": causal, "window": windowed, "prefix": prefixed, "documents": documents}
    seen = masks.get("causal" if case.is_causal else case.group)
    if seen is None:
        return None
    batch = case.batch if case.group == "documents" else None
    device = arrays["query"].device.type
    return create_block_mask(seen, batch, None, case.tokens, case.tokens, device=device)


def flex_call(case: FuseCase, arrays: Tensors, compile_function: Compile = compiled) -> TorchCall:
    """FlexAttention on arrays [B, heads, T, H], contiguous as it likes them best, with the block mask made beforehand.

    "evoformer" is flattened to [B * R, N, T, H], its biases being captured by the function of scores; "diff" is two
    calls and a subtraction.
    """
    make = {"evoformer": _flex_evoformer, "diff": _flex_diff}.get(case.group, _flex_tokens)
    return make(case, arrays, compile_function)


def _heads_first(array: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, H] as [B, heads, T, H], and the other way round."""
    return array.transpose(1, 2).contiguous()


def _flex_tokens(case: FuseCase, arrays: Tensors, compile_function: Compile) -> TorchCall:
    from torch.nn.attention.flex_attention import flex_attention

    mask, is_grouped = flex_mask(case, arrays), case.query_heads != case.key_heads
    slopes = torch.from_numpy(alibi_slopes(case.query_heads)).to(arrays["query"].device)

    def alibi(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return score + slopes[head] * (column - row)

    def softcap(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return SOFT_CAP * torch.tanh(score / SOFT_CAP)

    change = {"alibi": alibi, "softcap": softcap}.get(case.group)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = flex_attention(query, key, value, score_mod=change, block_mask=mask, enable_gqa=is_grouped)
        return cast(torch.Tensor, output)

    names = ("query", "key", "value")
    given = {name: _heads_first(arrays[name]) for name in names}
    cotangent = _heads_first(arrays["cotangent"])
    note = "" if mask is None else "block mask made beforehand"
    return TorchCall(
        compile_function(attend), given, names, cotangent, lambda _, array: array.transpose(1, 2), note=note
    )


def _flex_evoformer(case: FuseCase, arrays: Tensors, compile_function: Compile) -> TorchCall:
    from torch.nn.attention.flex_attention import flex_attention

    rows = case.rows

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask_bias: torch.Tensor, pair_bias: torch.Tensor
    ) -> torch.Tensor:
        def biased(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return score + mask_bias[batch, column] + pair_bias[batch // rows, head, row, column]

        return cast(torch.Tensor, flex_attention(query, key, value, score_mod=biased))

    folded = ("query", "key", "value")
    given = {name: _heads_first(arrays[name].flatten(0, 1)) for name in folded}
    given |= {"mask_bias": arrays["mask_bias"].flatten(0, 3), "pair_bias": arrays["pair_bias"].squeeze(1)}
    given["mask_bias"] = given["mask_bias"].view(-1, case.tokens)
    shapes = case.shapes | {"output": case.output_shape}

    def back(name: str, array: torch.Tensor) -> torch.Tensor:
        return (array if name.endswith("bias") else array.transpose(1, 2)).reshape(shapes[name])

    cotangent = _heads_first(arrays["cotangent"].flatten(0, 1))
    note = f"flattened to {case.batch * rows} sequences; biases captured"
    return TorchCall(compile_function(attend), given, case.differentiated, cotangent, back, note=note)


def _flex_diff(case: FuseCase, arrays: Tensors, compile_function: Compile) -> TorchCall:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        first, second = (cast(torch.Tensor, flex_attention(query[i], key[i], value)) for i in range(2))
        return first - SECOND_SHARE * second

    given = {name: arrays[name].permute(2, 0, 3, 1, 4).contiguous() for name in ("query", "key")}
    given["value"] = _heads_first(arrays["value"])

    def back(name: str, array: torch.Tensor) -> torch.Tensor:
        return array.permute(1, 3, 0, 2, 4) if name in ("query", "key") else array.transpose(1, 2)

    cotangent = _heads_first(arrays["cotangent"])
    return TorchCall(
        compile_function(attend), given, case.differentiated, cotangent, back, note="two calls and a subtraction"
    )


def sdpa_unsupported(name: str, case: FuseCase) -> str | None:
    """None, or why a backend of SDPA cannot compute a case; FlashAttention 2 also has PyTorch's `varlen_attn`."""
    if case.group in ("causal", "full"):
        return None
    if name == "torch-fa2" and case.group in ("window", "documents"):
        return None if case.query_heads == case.key_heads else "`varlen_attn` takes as many key heads as query heads"
    return f"scaled_dot_product_attention has no argument for {case.group!r} without an array of scores' size"


def sdpa_call(case: FuseCase, arrays: Tensors, compile_function: Compile, *, backend: SDPBackend) -> TorchCall:
    """SDPA with one backend on views [B, heads, T, H]; "window" and "documents" use `varlen_attn` instead.

    `compile_function` is ignored, because the kernels are already compiled.
    """
    del compile_function
    if case.group in ("window", "documents"):
        return _varlen_call(case, arrays)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=case.group == "causal", enable_gqa=case.query_heads != case.key_heads
            )

    names = ("query", "key", "value")
    given = {name: arrays[name].transpose(1, 2) for name in names}
    cotangent = arrays["cotangent"].transpose(1, 2)
    return TorchCall(attend, given, names, cotangent, lambda _, array: array.transpose(1, 2))


def _varlen_call(case: FuseCase, arrays: Tensors) -> TorchCall:
    """FlashAttention 2 on packed sequences [B * T, heads, H]: windows, or documents as sequences of their own."""
    from torch.nn.attention.varlen import varlen_attn

    is_window = case.group == "window"
    rows = range(case.batch)
    lengths = [n for row in rows for n in ([case.tokens] if is_window else document_lengths(row, case.tokens).tolist())]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(arrays["query"].device, torch.int32)
    window, longest = (case.window if is_window else -1, 0), max(lengths)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=window)
        return cast(torch.Tensor, output)

    names = ("query", "key", "value")
    given = {name: arrays[name].flatten(0, 1) for name in names}
    shapes = case.shapes | {"output": case.output_shape}
    cotangent = arrays["cotangent"].flatten(0, 1)
    return TorchCall(
        attend, given, names, cotangent, lambda name, array: array.reshape(shapes[name]), note="by varlen_attn"
    )


TORCH_CALLS: Mapping[str, Callable[..., TorchCall]] = {
    FLEX: flex_call,
    COMPILE: plain_call,
    **{name: partial(sdpa_call, backend=backend) for name, backend in SDPA_BACKENDS.items()},
}
"""What makes the call of a baseline from a case, its arrays and a compiler."""
