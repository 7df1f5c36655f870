"""MoBA over a paged cache on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

import torch

from blockdiag.torch.launches import Launches, Remembered, dense
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.moba_paged.operators import MoBAPagedArguments, describe
from blockdiag.torch.ops.paged.native import Results, cache_arrays, check_pages, no_keys
from blockdiag.triton_kernels.moba_paged.plans import steps, supports


class _Prepared:
    """The launches of one kind of call, bound to a device."""

    def __init__(self, arguments: MoBAPagedArguments) -> None:
        self._problem = problem = describe(arguments)
        self._is_empty = problem.paged.is_empty
        if self._is_empty:
            return
        reason = supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        self._launches = Launches(steps(problem), arguments.query.device.index, ("output", "log_sum"))

    def attend(self, arguments: MoBAPagedArguments) -> Results:
        """Return the output and the log-sum-exp."""
        if self._is_empty:
            return no_keys(self._problem.paged, arguments.query, arguments.query_lengths, None)
        check_pages({"key_centroids": arguments.key_centroids})
        arrays = cache_arrays(self._problem.paged, arguments)
        arrays["query"], arrays["centroids"] = dense(arguments.query), arguments.key_centroids
        if arguments.query_lengths is not None:
            arrays["query_lengths"] = dense(arguments.query_lengths)
        self._launches(arrays)
        return arrays["output"], arrays["log_sum"]


_prepared: Remembered[MoBAPagedArguments, _Prepared] = Remembered(_Prepared)


def attend(arguments: MoBAPagedArguments) -> Results:
    """Compute the output and the log-sum-exp on the current stream.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: the kernels cannot compute this call.
    """
    if arguments.query.get_device() == torch.cuda.current_device():
        return _prepared(arguments).attend(arguments)
    # Kernels are loaded into the context of the current device and run there.
    with torch.cuda.device(arguments.query.device):
        return _prepared(arguments).attend(arguments)
