"""Paged attention on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import torch

from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.paged.api import Call, _attention
from blockdiag.torch.bridge import check_call, precision, to_arrays
from blockdiag.torch.ops.paged.operators import PagedArguments, describe


def attend(arguments: PagedArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp."""
    with same_device(), precision(arguments.query):
        # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
        problem = describe(arguments)
        names = check_call(problem.tiled, arguments.implementation, arguments.query.device)
        chooses_splits = arguments.num_splits is None and arguments.split_size is None
        tensors = dict(zip(PagedArguments._fields, arguments.tensors, strict=False))
        if arguments.sinks is not None:
            tensors["sinks"] = arguments.sinks.float()
        output, log_sum = _attention(Call(problem, names, chooses_splits), to_arrays(tensors))
        return to_torch(output), to_torch(log_sum)
