"""Arguments of the registered operator of paged attention with their checks, and the problem that they describe."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.paged.checks import describe_paged_call
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.torch import nested

_TENSORS = 11
"""Number of leading tensor arguments; the last three of these are scales, which may also be numbers before the call."""


class PagedArguments(NamedTuple):
    """The arguments of the operator, by name; see `paged_attention`.

    Attributes:
        key_scale, value_scale, query_scale: tensors; also numbers on the native path and in checks.
        window_left, window_right: the two sides of `local_window_size`, None for no bound.
        implementation: comma-separated names as for JAX, empty for None.
    """

    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    page_table: torch.Tensor | None
    kv_lengths: torch.Tensor
    query_lengths: torch.Tensor | None
    query_offsets: torch.Tensor | None
    sinks: torch.Tensor | None
    key_scale: torch.Tensor | float | None
    value_scale: torch.Tensor | float | None
    query_scale: torch.Tensor | float | None
    max_query_length: int | None
    scale: float | None
    is_causal: bool
    window_left: int | None
    window_right: int | None
    logits_soft_cap: float | None
    num_splits: int | None
    split_size: int | None
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        options = self[_TENSORS:]
        # Types are part of the key, because True, 1 and 1.0 are equal keys of a dictionary.
        return (*describe_tensors(self[:_TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensor arguments; None if absent, and a number for a scale that is given as one."""
        return self[:_TENSORS]


def describe_tensors(tensors: Sequence[Any]) -> list[Any]:
    """Return the part of a cache key that describes tensors; numbers are their own description."""
    return [
        None
        if one is None
        else (one.shape, one.dtype, one.get_device())
        if isinstance(one, torch.Tensor)
        else (type(one), one)
        for one in tensors
    ]


def describe(arguments: PagedArguments) -> PagedProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    names = PagedArguments._fields[:_TENSORS]
    tensors = dict(zip(names, arguments.tensors, strict=True))
    check_tensors(**{name: tensors[name] for name in names[:3]})
    check_devices(**tensors)
    window = arguments.window_left, arguments.window_right
    problem = describe_paged_call(
        **tensors,
        max_query_length=arguments.max_query_length,
        scale=arguments.scale,
        is_causal=arguments.is_causal,
        local_window_size=window,
        logits_soft_cap=arguments.logits_soft_cap,
        num_splits=arguments.num_splits,
        split_size=arguments.split_size,
    )
    check_tensors(**{name: x for name, x in tensors.items() if not is_absent(x)})
    check_layout(**page_tensors(arguments))
    return problem


def page_tensors(arguments: Any) -> dict[str, torch.Tensor]:
    """Return the arguments of the size of the cache, which are never copied."""
    pages = {"key_pages": arguments.key_pages, "value_pages": arguments.value_pages}
    for name, scale in (("key_scale", arguments.key_scale), ("value_scale", arguments.value_scale)):
        if isinstance(scale, torch.Tensor) and scale.ndim == 3:
            pages[name] = scale
    return pages


def is_absent(value: Any) -> bool:
    """Return whether an argument is legitimately no tensor: None, or a scale given as a number."""
    return value is None or type(value) in (int, float)


def check_tensors(**given: Any) -> None:
    """Check that arguments are torch tensors rather than arrays of another library, and not nested.

    Raises:
        ValueError: an argument is not; the message names it.
    """
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {type(value)}; convert it with torch.as_tensor")
    nested.refuse(**given)


def check_devices(**given: Any) -> None:
    """Check that all tensors are on the device of the first.

    Raises:
        ValueError: a tensor is on another device; the message names it.
    """
    (first, reference), *others = given.items()
    for name, tensor in others:
        if isinstance(tensor, torch.Tensor) and tensor.device != reference.device:
            raise ValueError(
                f"`{name}` must be on the device of `{first}`, {reference.device}, got {tensor.device}; move one of "
                "them"
            )


def check_layout(**pages: torch.Tensor) -> None:
    """Check that pages are contiguous, because copying a whole cache for every call is never wanted.

    Raises:
        ValueError: pages are not contiguous; the message names them.
    """
    for name, tensor in pages.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"`{name}` must be contiguous, got strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}; "
                "keep keys and values in tensors of their own, each page's rows one after the other"
            )


def check_via(via: Any) -> None:
    """Check the value of `via`.

    Raises:
        ValueError: it is neither None nor "jax".
    """
    if via not in (None, "jax"):
        raise ValueError(f"`via` must be None or 'jax', got {via!r}; None launches the kernels natively on CUDA")


def names_of(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of an `implementation=` argument as a tuple, empty for None."""
    return (implementation,) if isinstance(implementation, str) else tuple(implementation or ())


def wants_gradient(tensors: Sequence[Any]) -> bool:
    """Return whether autograd tracks any of these."""
    return torch.is_grad_enabled() and any([isinstance(one, torch.Tensor) and one.requires_grad for one in tensors])


def inference_error(name: str) -> TypeError:
    """Return the error that differentiating the public function `name` raises, as in JAX."""
    return TypeError(
        f"{name} is for inference and cannot be differentiated; call it under torch.no_grad() or with detached "
        "tensors, or train with another attention function, such as moba_attention or "
        "torch.nn.functional.scaled_dot_product_attention"
    )


def refuse_tangents(name: str, tensors: Sequence[Any]) -> None:
    """Refuse forward-mode tangents: a Python operator would silently drop them and give a derivative of 0."""
    if not may_have_tangents():
        return
    given = [one for one in tensors if isinstance(one, torch.Tensor)]
    if any(forward_ad.unpack_dual(one).tangent is not None for one in given):
        raise inference_error(name)


def as_tensor_scale(scale: Any, like: torch.Tensor) -> Any:
    """Convert a number to the float32 scalar tensor that operators take; return anything else unchanged."""
    if type(scale) not in (int, float):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=like.device)
