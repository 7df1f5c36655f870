"""Appending to a paged cache of torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

from typing import Any

from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.append.api import Call, _append
from blockdiag.torch.bridge import check_call, precision, to_arrays, to_jax_rotary
from blockdiag.torch.ops.append.operators import AppendArguments, describe


def append(arguments: AppendArguments) -> None:
    """Compute new arrays in JAX and copy them into the tensors."""
    with same_device(), precision(arguments.key, arguments.cos):
        # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
        problem = describe(arguments)
        names = check_call(problem, arguments.implementation, arguments.key.device)
        results = [to_torch(x) for x in _append(Call(problem, names), _arrays(arguments))]
        for target, result in zip(arguments.written, results, strict=True):
            target.copy_(result)


def _arrays(arguments: AppendArguments) -> dict[str, Any]:
    """Return the arguments of the JAX function by name."""
    tensors = dict(zip(AppendArguments._fields, arguments.tensors, strict=False))
    arrays = to_arrays({name: x for name, x in tensors.items() if name not in ("cos", "sin", "positions")})
    for name in ("key_scale", "value_scale"):
        pages = arrays.pop(f"{name}_pages")
        arrays[name] = arrays[name] if pages is None else pages
    return arrays | {"rotary": to_jax_rotary(arguments.to_rotary())}
