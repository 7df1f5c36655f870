"""Register MoBA as an attention implementation of Hugging Face transformers (tried with transformers 5.23).

python examples/transformers_moba.py
"""

import functools
import importlib.util
from typing import Any

import torch

from blockdiag.torch import moba_attention

# Options that models may pass and that would change the result.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "cache", "cu_seq_lens_q")


def moba_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    block_size: int,
    top_k: int,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention with the signature that models of transformers call.

    Args:
        module: the attention layer.
        query: [B, N, T, H], rotated already; the last one has the position of the last key.
        key, value: [B, K, S, H], including those of a cache; N is a multiple of K.
        attention_mask: bool [B, S], False for padding; or None.
        scaling: factor of the scores; 1 / sqrt(H) if None.
        dropout, is_causal: only a dropout of 0 and causal attention are supported.
        block_size, top_k: as for `moba_attention`.

    Returns:
        The output [B, T, N, H], and None for the attention weights.

    Raises:
        ValueError: the model requests anything but causal attention with padding.
    """
    unsupported = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if unsupported or dropout or not is_causal:
        raise ValueError(
            f"MoBA here is causal attention without dropout, got {is_causal=}, {dropout=} and values of {unsupported}; "
            "use another attn_implementation for this model, or change its config"
        )
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.dtype != torch.bool):
        raise ValueError(
            f"`attention_mask` must be None or bool [B, S], got {attention_mask.dtype} of shape "
            f"{tuple(attention_mask.shape)}; pass the model a mask [B, S] that is 1 for tokens and 0 for padding"
        )
    operands = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options: dict[str, Any] = {"block_size": block_size, "top_k": top_k, "scale": scaling, "key_mask": attention_mask}
    return moba_attention(*operands, **options), None


def register(name: str = "moba", *, block_size: int = 128, top_k: int = 8) -> None:
    """Register `attn_implementation=name` with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function

    def padding_mask(
        *,
        q_length: int,
        kv_length: int,
        q_offset: int,
        kv_offset: int,
        mask_function: Any,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor | None:
        if mask_function is not causal_mask_function or kv_offset != 0 or q_offset + q_length != kv_length:
            raise ValueError(
                "MoBA here takes causal sequences with padding, and caches that grow: no windows, no packed sequences, "
                'no static caches; use attn_implementation="sdpa" for those'
            )
        return attention_mask

    AttentionInterface.register(name, functools.partial(moba_attention_forward, block_size=block_size, top_k=top_k))
    # Without a registered mask function, transformers would drop the padding mask for this name.
    AttentionMaskInterface.register(name, padding_mask)


def main() -> None:
    """Run a small Llama: with all blocks selected, MoBA equals dense attention, also when generating from a cache."""
    if importlib.util.find_spec("transformers") is None:
        print("this example needs transformers: pip install transformers")
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    register("moba", block_size=16, top_k=8)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, pad_token_id=0, **sizes)).eval()
    tokens = torch.randint(1, 97, (2, 100))
    mask = torch.ones_like(tokens)
    mask[1, :30] = 0
    found = {}
    for name in ("sdpa", "moba"):
        model.set_attn_implementation(name)
        logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        written = model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
        found[name] = logits, written
    difference = (found["moba"][0] - found["sdpa"][0]).abs().max().item()
    is_same = torch.equal(found["moba"][1], found["sdpa"][1])
    print(f"largest difference of logits to dense attention {difference:.1e}, the same tokens generated: {is_same}")


if __name__ == "__main__":
    main()
