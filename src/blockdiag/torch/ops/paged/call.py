"""Calls of paged attention in torch: the operator's arguments, their checks, and the description they stand for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.paged.checks import describe_paged_call
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.torch import nested

_TENSORS = 11
"""The first arguments are tensors; the last three of these may also be numbers before an operator is called."""


class PagedArguments(NamedTuple):
    """What the operator takes, by name; see `paged_attention`.

    Attributes:
        key_scale, value_scale, query_scale: tensors, or, for the native path and for checks, numbers.
        window_left, window_right: `local_window_size`, None for no bound.
        implementation: names as for JAX with commas between them, empty for None.
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
        """What decides about checks and launches: everything but the tensors' elements."""
        options = self[_TENSORS:]
        # True is 1 and 1.0 to a dictionary.
        return (*describe_tensors(self[:_TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors, None for those that are not given, and numbers for scales that are."""
        return self[:_TENSORS]


def describe_tensors(tensors: Sequence[Any]) -> list[Any]:
    """What is the same for tensors of equal calls; numbers stand for themselves."""
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
    """What has the size of the cache among the arguments of an operator: it is never copied."""
    pages = {"key_pages": arguments.key_pages, "value_pages": arguments.value_pages}
    for name, scale in (("key_scale", arguments.key_scale), ("value_scale", arguments.value_scale)):
        if isinstance(scale, torch.Tensor) and scale.ndim == 3:
            pages[name] = scale
    return pages


def is_absent(value: Any) -> bool:
    """Whether an argument is no tensor by right: not given, or the number that stands for a scale."""
    return value is None or type(value) in (int, float)


def check_tensors(**given: Any) -> None:
    """Tensors, not arrays of another library.

    Raises:
        ValueError: naming the one that is none.
    """
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {type(value)}; convert it with torch.as_tensor")
    nested.refuse(**given)


def check_devices(**given: Any) -> None:
    """All tensors must be on the device of the first.

    Raises:
        ValueError: naming the one that is not.
    """
    (first, reference), *others = given.items()
    for name, tensor in others:
        if isinstance(tensor, torch.Tensor) and tensor.device != reference.device:
            raise ValueError(
                f"`{name}` must be on the device of `{first}`, {reference.device}, got {tensor.device}; move one of "
                "them"
            )


def check_layout(**pages: torch.Tensor) -> None:
    """Pages must be contiguous: a copy of a whole cache for every call is never what is wanted.

    Raises:
        ValueError: naming those that are not.
    """
    for name, tensor in pages.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"`{name}` must be contiguous, got strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}; "
                "keep keys and values in tensors of their own, each page's rows one after the other"
            )


def check_via(via: Any) -> None:
    """Who else than the native kernels may be asked.

    Raises:
        ValueError: for anything but None and "jax".
    """
    if via not in (None, "jax"):
        raise ValueError(f"`via` must be None or 'jax', got {via!r}; None launches the kernels natively on CUDA")


def names_of(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of an `implementation=` argument, empty for None."""
    return (implementation,) if isinstance(implementation, str) else tuple(implementation or ())


def wants_gradient(tensors: Sequence[Any]) -> bool:
    """Whether autograd follows any of these."""
    return torch.is_grad_enabled() and any([isinstance(one, torch.Tensor) and one.requires_grad for one in tensors])


def inference_error(name: str) -> TypeError:
    """What a derivative of the public function `name` raises, as in JAX."""
    return TypeError(
        f"{name} is for inference and cannot be differentiated; call it under torch.no_grad() or with detached "
        "tensors, or train with another attention function, such as moba_attention or "
        "torch.nn.functional.scaled_dot_product_attention"
    )


def refuse_tangents(name: str, tensors: Sequence[Any]) -> None:
    """An operator in Python would drop them without a word, and give a derivative of 0."""
    if not may_have_tangents():
        return
    given = [one for one in tensors if isinstance(one, torch.Tensor)]
    if any(forward_ad.unpack_dual(one).tangent is not None for one in given):
        raise inference_error(name)


def as_tensor_scale(scale: Any, like: torch.Tensor) -> Any:
    """A number as the tensor float32 [] that operators take; anything else as it is."""
    if type(scale) not in (int, float):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=like.device)
