"""Appending to a paged cache of torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

from typing import Any

import blockdiag.common.rotary
from blockdiag.common.dispatch import normalise_implementation, resolve
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.append.api import Call, _append
from blockdiag.ops.append.problem import APPEND
from blockdiag.torch.ops.append.call import AppendArguments, describe
from blockdiag.torch.ops.paged.through_jax import given_names, precision, refuse_capture, to_arrays


def append(arguments: AppendArguments) -> None:
    """Compute new arrays in JAX and copy them into the tensors."""
    with same_device(), precision(arguments.key, arguments.cos):
        # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
        problem = describe(arguments)
        names = normalise_implementation(given_names(arguments.implementation), APPEND)
        resolve(problem, names)
        refuse_capture(arguments.key.device)
        results = [to_torch(x) for x in _append(Call(problem, names), _arrays(arguments))]
        for target, result in zip(arguments.written, results, strict=True):
            target.copy_(result)


def _arrays(arguments: AppendArguments) -> dict[str, Any]:
    """Return the arguments of the JAX function by name."""
    arrays = to_arrays(dict(zip(AppendArguments._fields, arguments.tensors, strict=False)))
    for name in ("key_scale", "value_scale"):
        pages = arrays.pop(f"{name}_pages")
        arrays[name] = arrays[name] if pages is None else pages
    tables = [arrays.pop(name) for name in ("cos", "sin", "positions")]
    given, rotary = arguments.to_rotary(), None
    if given is not None:
        rotary = blockdiag.common.rotary.Rotary(
            tables[0],
            tables[1],
            positions=tables[2],
            per_token=given.per_token,
            interleaved=given.interleaved,
            apply_to=given.apply_to,
        )
    return arrays | {"rotary": rotary}
