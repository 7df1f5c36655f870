"""The functions of the benchmark in plain jax.numpy, and their passes as compiled programs that can be timed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.fuse.cases import SECOND_SHARE, SOFT_CAP, FuseCase, FusePass, alibi_slopes
from benchmarks.harness.programs import Chain, Program, collect_specs, compile_program
from blockdiag.triton_kernels.launch.plan import Target

type Array = jax.Array
type Attend = Callable[..., Array]

CUDNN = "jax-cudnn"
XLA = "jax-jit"


def evoformer(query: Array, key: Array, value: Array, mask_bias: Array, pair_bias: Array) -> Array:
    """query, key, value [B, R, T, N, H], mask_bias [B, R, 1, 1, T], pair_bias [B, 1, N, T, T] -> as query."""
    scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores + mask_bias + pair_bias, axis=-1)
    return jnp.einsum("brnts,brsnh->brtnh", weights, value)


def differential(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, 2, N, H], value [B, T, N, V] -> as value."""
    scores = jnp.einsum("btmnh,bsmnh->bmnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights[:, 0] - SECOND_SHARE * weights[:, 1], value)


def attention(query: Array, key: Array, value: Array, change: Callable[[Array], Array]) -> Array:
    """query [B, T, N, H], key, value [B, T, K, H] -> as query; `change` takes scores [B, N or (K, N / K), T, T]."""
    batch, tokens, heads, head_dim = query.shape
    if heads == key.shape[2]:
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * head_dim**-0.5
        weights = jax.nn.softmax(change(scores), axis=-1).astype(value.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)
    grouped = query.reshape(batch, tokens, key.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * head_dim**-0.5
    weights = jax.nn.softmax(change(scores), axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def masked(scores: Array, seen: Array) -> Array:
    """Scores [B, .., T, T] where `seen` [T, T] or [B, T, T], and -inf elsewhere."""
    lead = seen.shape[:-2] or (1,)
    return jnp.where(seen.reshape(*lead, *[1] * (scores.ndim - 3), *seen.shape[-2:]), scores, -jnp.inf)


def positions(tokens: int) -> tuple[Array, Array]:
    """Positions of queries [T, 1] and of keys [1, T]."""
    position = jnp.arange(tokens)
    return position[:, None], position[None, :]


def seen_of(case: FuseCase) -> Array:
    """Which keys each query sees, bool [T, T], of "causal", "window" and "prefix", or of "documents" in one of them."""
    row, column = positions(case.tokens)
    match case.group:
        case "window":
            return (column <= row) & (row - column <= case.window)
        case "prefix":
            return column <= jnp.maximum(case.prefix - 1, row)
    return column <= row


def function_of(case: FuseCase) -> Attend:
    """The function of a case, of its arguments in order."""

    def full(query: Array, key: Array, value: Array) -> Array:
        return attention(query, key, value, lambda scores: scores)

    def of_mask(query: Array, key: Array, value: Array) -> Array:
        seen = seen_of(case)
        return attention(query, key, value, lambda scores: masked(scores, seen))

    def documents(query: Array, key: Array, value: Array, segments: Array) -> Array:
        seen = (segments[:, :, None] == segments[:, None, :]) & seen_of(case)[None]
        return attention(query, key, value, lambda scores: masked(scores, seen))

    def causal_if_asked(scores: Array) -> Array:
        return masked(scores, seen_of(case)) if case.is_causal else scores

    def alibi(query: Array, key: Array, value: Array) -> Array:
        row, column = positions(case.tokens)

        def change(scores: Array) -> Array:
            slopes = jnp.asarray(alibi_slopes(case.query_heads)).reshape(1, *scores.shape[1:-2], 1, 1)
            distance = (column - row).reshape(*[1] * (scores.ndim - 2), *[case.tokens] * 2)
            # In bfloat16, distances beyond 256 would be rounded.
            return causal_if_asked(scores.astype(jnp.float32) + slopes * distance.astype(jnp.float32))

        return attention(query, key, value, change)

    def softcap(query: Array, key: Array, value: Array) -> Array:
        return attention(query, key, value, lambda scores: causal_if_asked(SOFT_CAP * jnp.tanh(scores / SOFT_CAP)))

    others: dict[str, Attend] = {
        "evoformer": evoformer,
        "diff": differential,
        "documents": documents,
        "alibi": alibi,
        "softcap": softcap,
        "full": full,
    }
    return others.get(case.group, of_mask)


def fused_function(case: FuseCase, implementation: str) -> Attend:
    """What `blockdiag.fuse` makes of the function of a case."""
    from blockdiag import fuse

    return fuse(function_of(case), implementation=implementation)


def cudnn_unsupported(case: FuseCase) -> str | None:
    """None, or why `jax.nn.dot_product_attention` with cuDNN cannot compute a case."""
    return {
        "diff": "jax.nn.dot_product_attention takes no values that are wider than keys",
        "alibi": "its bias is an array [N, T, T] in bfloat16, which rounds distances beyond 256",
        "softcap": "it has no soft cap",
    }.get(case.group)


def cudnn_function(case: FuseCase) -> Attend:
    """The function of a case by cuDNN through `jax.nn`: masks that it has no argument for are arrays, biases as well.

    Raises:
        ValueError: it cannot; see `cudnn_unsupported`.
    """
    reason = cudnn_unsupported(case)
    if reason is not None:
        raise ValueError(reason)

    def attend(query: Array, key: Array, value: Array, **options: Any) -> Array:
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)

    def flattened(query: Array, key: Array, value: Array, mask_bias: Array, pair_bias: Array) -> Array:
        bias = (mask_bias + pair_bias).reshape(-1, *pair_bias.shape[2:])
        folded = (array.reshape(-1, *array.shape[2:]) for array in (query, key, value))
        return attend(*folded, bias=bias).reshape(query.shape)

    def documents(query: Array, key: Array, value: Array, segments: Array) -> Array:
        seen = (segments[:, :, None] == segments[:, None, :]) & seen_of(case)[None]
        return attend(query, key, value, mask=seen[:, None])

    match case.group:
        case "evoformer":
            return flattened
        case "window":
            return lambda *operands: attend(*operands, is_causal=True, local_window_size=(case.window, 0))
        case "prefix":
            return lambda *operands: attend(*operands, mask=seen_of(case)[None, None])
        case "documents":
            return documents
        case "full":
            return attend
    return lambda *operands: attend(*operands, is_causal=True)


def pass_of(case: FuseCase, attend: Attend, pass_name: FusePass) -> Callable[..., Any]:
    """A pass as a function of the arguments, and for "fwd+bwd" of the output's cotangent; it returns a tuple."""
    if pass_name == "fwd":
        return lambda *operands: (attend(*operands),)
    names, wanted = tuple(case.shapes), case.differentiated

    def both(*operands: Array) -> tuple[Array, ...]:
        *arguments, cotangent = operands
        given = dict(zip(names, arguments, strict=True))

        def of_floating(*floating: Array) -> Array:
            return attend(*(given | dict(zip(wanted, floating, strict=True))).values())

        output, pull_back = jax.vjp(of_floating, *(given[name] for name in wanted))
        return (output, *pull_back(cotangent))

    return both


@dataclass(frozen=True)
class FusePasses:
    """The programs of a function, each made when it is asked for.

    Attributes:
        case, attend: what is computed, and by which function of its arguments.
        arrays: the arguments and the output's "cotangent" by name.
    """

    case: FuseCase
    attend: Attend
    arrays: Mapping[str, Array]

    def make(self, pass_name: FusePass) -> Program:
        """Trace, lower and compile one pass; it returns the output and, of "fwd+bwd", the gradients in order."""
        names = (*self.case.shapes, *(("cotangent",) if pass_name == "fwd+bwd" else ()))
        arguments = tuple(self.arrays[name] for name in names)
        function = pass_of(self.case, self.attend, pass_name)
        # What does not depend on the call, as lists of tiles, may be shared.
        return compile_program(function, *arguments, chain=Chain(chained, spare_copies=0, shared="cub"))


def chained(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """`function` again and again in one program, each call with the output before as its first argument.

    The program returns the gradients of all calls, which would not be computed otherwise, and the last output. The
    other arguments are the same for all calls, so that numbers become neither large nor small.
    """

    def program(first: Array, *rest: Array) -> Any:
        gradients = []
        output = first
        for _ in range(calls):
            output, *found = function(output.reshape(first.shape), *rest)
            gradients += found
        return output, *gradients

    return program


def launch_specs(
    case: FuseCase, pass_name: FusePass, implementation: str = "triton", target: Target | None = None
) -> list[Any]:
    """The kernel launches of a pass of this library on a target, found by tracing, without compiling any."""
    shapes: Sequence[Any] = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if name == "segments" else jnp.bfloat16)
        for name, shape in case.shapes.items()
    ]
    if pass_name == "fwd+bwd":
        shapes = [*shapes, jax.ShapeDtypeStruct(case.output_shape, jnp.bfloat16)]
    found: dict[Any, None] = {}
    attend = fused_function(case, implementation)
    collect_specs(jax.make_jaxpr(pass_of(case, attend, pass_name))(*shapes).jaxpr, found, target)
    return list(found)
