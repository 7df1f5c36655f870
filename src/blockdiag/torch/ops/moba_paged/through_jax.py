"""MoBA over a paged cache on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import torch

from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.moba_paged.api import Call, _attention
from blockdiag.torch.bridge import check_call, precision, to_arrays
from blockdiag.torch.ops.moba_paged.operators import MoBAPagedArguments, describe


def attend(arguments: MoBAPagedArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp."""
    with same_device(), precision(arguments.query):
        # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
        problem = describe(arguments)
        names = check_call(problem, arguments.implementation, arguments.query.device)
        tensors = dict(zip(MoBAPagedArguments._fields, arguments.tensors, strict=False))
        output, log_sum = _attention(Call(problem, names), to_arrays(tensors))
        return to_torch(output), to_torch(log_sum)
