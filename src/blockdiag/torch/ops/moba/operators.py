"""The registered operators of MoBA: `torch.ops.blockdiag.moba_*`, with fake kernels and derivatives.

- `moba_routing` returns the routing, see `Routing.indices`.
- `moba_lists` routes, or takes a given routing, and returns the inputs of attention: tables, lists and own blocks.
- `moba_forward` and `moba_backward` attend.

A policy of selective activation checkpointing that saves the results of `moba_lists` and `moba_forward` keeps
everything that the backward pass needs besides query, key and value.

Each operator exists twice, native and through JAX, because tags are fixed when an operator is defined and a CUDA graph
may only capture the native one. On the CPU both go through JAX.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockdiag.ops.moba.checks import count_sequence_blocks
from blockdiag.torch.ops.block_diagonal import operators  # noqa: F401 - it defines the library that this one adds to
from blockdiag.torch.ops.moba.call import AttentionArguments, ListArguments, ListResults, check_devices
from blockdiag.torch.transforms import register_constant, register_derivative

_ROUTED = "Tensor query, Tensor key, Tensor? key_mask, Tensor? sequence_offsets, Tensor? key_sequence_offsets"
_GIVEN = "Tensor? indices, int given_block_size, SymInt given_num_blocks"
_OPTIONS = "int block_size, int top_k, bool is_causal, str implementation"
_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor blocks, Tensor queries, Tensor offsets, "
    "Tensor counts, Tensor entries, Tensor degrees, Tensor? own, int block_size, float? scale, bool is_causal, "
    "bool has_padding, str implementation"
)
_TENSORS = 11
"""Number of leading tensor arguments of attention."""

_RESULTS = "Tensor output, Tensor log_sum, Tensor output_cotangent, Tensor log_sum_cotangent"
_SCHEMAS = {
    "routing": f"({_ROUTED}, {_OPTIONS}) -> Tensor",
    "lists": f"({_ROUTED}, {_GIVEN}, {_OPTIONS}) -> ({', '.join(['Tensor'] * len(ListResults._fields))})",
    "forward": f"({_ATTENTION}) -> (Tensor, Tensor)",
    "backward": f"({_RESULTS}, {_ATTENTION}) -> (Tensor, Tensor, Tensor)",
}
_NO_GRADIENTS = (None,) * (len(AttentionArguments._fields) - 3)

# Module-level, because deleting a library removes its operators.
_library = torch.library.Library("blockdiag", "FRAGMENT")


def _without_routing(values: Sequence[Any]) -> ListArguments:
    """Return the arguments of a call of `moba_routing`."""
    tensors, options = values[:5], values[5:]
    return ListArguments(*tensors, None, 0, 0, *options)  # type: ignore[bad-argument-count]


def _jax_routing(*values: Any) -> torch.Tensor:
    from blockdiag.torch.ops.moba import through_jax

    return through_jax.route(_without_routing(values))


def _jax_lists(*values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.moba import through_jax

    return tuple(through_jax.make_lists(ListArguments(*values)))


def _jax_forward(*values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.moba import through_jax

    return through_jax.attend(AttentionArguments(*values))


def _jax_backward(*values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.moba import through_jax

    return through_jax.differentiate(AttentionArguments(*values[4:]), *values[:4])


def _native_routing(*values: Any) -> torch.Tensor:
    from blockdiag.torch.ops.moba import native

    try:
        return native.route(_without_routing(values))
    except native.Unsupported:
        return _jax_routing(*values)


def _native_lists(*values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.moba import native

    try:
        return tuple(native.make_lists(ListArguments(*values)))
    except native.Unsupported:
        return _jax_lists(*values)


def _native_forward(*values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.moba import native

    try:
        return native.attend(AttentionArguments(*values))
    except native.Unsupported:
        return _jax_forward(*values)


def _native_backward(*values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.moba import native

    try:
        return native.differentiate(AttentionArguments(*values[4:]), *values[:4])
    except native.Unsupported:
        return _jax_backward(*values)


# The fake kernels check devices: one meta argument among others selects them, and they would return uninitialised
# memory. Other mistakes are found when the operator runs, so that no tracer wraps the messages.


def _fake_routing(*values: Any) -> torch.Tensor:
    query, top_k = values[0], max(values[6], 0)
    _check_list_devices(*values[:5])
    return query.new_empty((*query.shape[:-1], top_k), dtype=torch.int32)


def _fake_lists(*values: Any) -> tuple[torch.Tensor, ...]:
    arguments = ListArguments(*values)
    query, key = arguments.query, arguments.key
    _check_list_devices(*arguments[:6])
    tokens, heads, key_length = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-3]
    block_size = max(arguments.block_size, 1)
    longest = count_sequence_blocks(key_length, block_size)
    if arguments.sequence_offsets is not None:
        num_blocks = symbolic_packed_blocks(key_length, arguments.sequence_offsets.shape[0] - 1, block_size)
    else:
        num_blocks = arguments.num_sequences * longest
    if arguments.indices is not None:
        slots: Any = arguments.indices.shape[-1]
    else:
        slots = symbolic_slots(arguments.top_k, longest, arguments.is_causal)
    has_own = arguments.is_causal and arguments.indices is not None
    shapes = (
        (num_blocks, 4), (tokens, 4), (heads, num_blocks), (heads, num_blocks), (heads, tokens * slots), (heads, tokens)
    )  # fmt: skip
    if torch.compiler.is_exporting():
        shapes = tuple(tuple(map(_exported_size, shape)) for shape in shapes)
    own = query.new_empty((heads, tokens) if has_own else (0,), dtype=torch.bool)
    return (*(query.new_empty(shape, dtype=torch.int32) for shape in shapes), own)


def _exported_size(size: Any) -> Any:
    """Replace a size that follows from symbols by one that is only known when the operator runs.

    Torch asks of each derived size whether it is 0 or 1, such as that of a table of one block. A compiled function is
    recompiled where the answer differs, but an exported program must serve all sizes.
    """
    return torch.library.get_ctx().new_dynamic_size() if isinstance(size, torch.SymInt) else size


# Counts as in `blockdiag.ops.moba.checks`, for sizes that may be symbolic. Python's `min`, `max` and `if` would compare
# a symbol with a number. A compiled function would then be recompiled on either side of it, and torch.export, which has
# one program for all sizes, would refuse the call.


def symbolic_packed_blocks(tokens: Any, num_sequences: Any, block_size: int) -> Any:
    """Return `count_packed_blocks` of sizes that may be symbolic."""
    # Without sequences there are no blocks, however many tokens there are.
    most = (tokens + num_sequences * (block_size - 1)) // block_size
    return torch.sym_min(torch.sym_min(tokens, most), tokens * num_sequences)


def symbolic_slots(top_k: int, sequence_blocks: Any, is_causal: bool) -> Any:
    """Return `count_slots` of sizes that may be symbolic."""
    return torch.sym_max(torch.sym_min(top_k, sequence_blocks) - int(is_causal), 0)


def _fake_forward(*values: Any) -> tuple[torch.Tensor, ...]:
    query = values[0]
    _check_attention_devices(*values)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=wide)


def _fake_backward(*values: Any) -> tuple[torch.Tensor, ...]:
    check_devices(values[4], output=values[0], log_sum=values[1], cotangent=values[2], log_sum_cotangent=values[3])
    _check_attention_devices(*values[4:])
    return tuple(operand.new_empty(operand.shape) for operand in values[4:7])


def _check_list_devices(query: torch.Tensor, *others: torch.Tensor | None) -> None:
    names = ("key", "key_mask", "sequence_offsets", "key_sequence_offsets", "routing.indices")
    check_devices(query, **dict(zip(names, others, strict=False)))


def _check_attention_devices(*values: Any) -> None:
    check_devices(values[0], **dict(zip(AttentionArguments._fields[1:_TENSORS], values[1:_TENSORS], strict=True)))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save the results and the tensor arguments, which include lists and tables, for the backward pass."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]


def _differentiate(suffix: str) -> Callable[..., tuple[Any, ...]]:
    def backward(
        ctx: Any, output_cotangent: torch.Tensor | None, log_sum_cotangent: torch.Tensor | None
    ) -> tuple[Any, ...]:
        output, log_sum, *tensors = ctx.saved_tensors
        # Usually only one of the two results is differentiated, and the other cotangent is None.
        if output_cotangent is None:
            output_cotangent = torch.zeros_like(output)
        if log_sum_cotangent is None:
            log_sum_cotangent = torch.zeros_like(log_sum)
        operator = getattr(torch.ops.blockdiag, f"moba_backward{suffix}")
        gradients = operator(output, log_sum, output_cotangent, log_sum_cotangent, *tensors, *ctx.options)
        return (*gradients, *_NO_GRADIENTS)

    return backward


def _refuse_second_derivative(ctx: Any, *cotangents: torch.Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of MoBA are not available in torch; differentiate blockdiag.moba_attention in JAX, where "
        "they are"
    )


def _define(suffix: str, tags: Sequence[torch.Tag], cuda: dict[str, Callable[..., Any]]) -> None:
    """Define all operators with implementations for CUDA and, through JAX, for the CPU."""
    cpu = {"routing": _jax_routing, "lists": _jax_lists, "forward": _jax_forward, "backward": _jax_backward}
    fake = {"routing": _fake_routing, "lists": _fake_lists, "forward": _fake_forward, "backward": _fake_backward}
    for method, schema in _SCHEMAS.items():
        name = f"moba_{method}{suffix}"
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _library.impl(name, cpu[method], "CPU")
        _library.impl(name, cuda[method], "CUDA")
        torch.library.register_fake(f"blockdiag::{name}", fake[method], lib=_library)
    for method, derivative, setup in (
        ("forward", _differentiate(suffix), _remember),
        ("backward", _refuse_second_derivative, None),
    ):
        register_derivative(_library, f"moba_{method}{suffix}", derivative, setup)
    for method in ("routing", "lists"):
        register_constant(_library, f"moba_{method}{suffix}")


_define(
    "",
    (),
    {"routing": _native_routing, "lists": _native_lists, "forward": _native_forward, "backward": _native_backward},
)
_define(
    "_through_jax",
    (torch.Tag.cudagraph_unsafe,),
    {"routing": _jax_routing, "lists": _jax_lists, "forward": _jax_forward, "backward": _jax_backward},
)
