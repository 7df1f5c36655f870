"""Appending to a paged cache of CUDA tensors: the Triton launch plan, on the current stream. Imports no JAX."""

from typing import Any

import torch

from blockdiag.ops.append.problem import AppendProblem
from blockdiag.torch.launches import Launches, Remembered, dense
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.append.operators import AppendArguments, describe
from blockdiag.torch.ops.moba.tables import clip_offsets, rows_to_sequences
from blockdiag.torch.ops.paged.native import check_pages, scale_by_head
from blockdiag.triton_kernels.append.plans import AppendLaunch, supports


class _Prepared:
    """The launch of one kind of call, bound to a device."""

    def __init__(self, arguments: AppendArguments) -> None:
        self._problem = problem = describe(arguments)
        self._is_empty = 0 in (problem.batch, problem.tokens, problem.num_pages, problem.max_keys)
        if self._is_empty:
            return
        reason = supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        self._launch = Launches([AppendLaunch(problem)], arguments.key.device.index)

    def append(self, arguments: AppendArguments) -> None:
        """Write the new tokens, scales and mean keys."""
        if self._is_empty:
            return
        written = dict(zip(self._problem.written, arguments.written, strict=True))
        check_pages(written)
        self._launch(self._read(arguments) | written)
        # Autograd compares versions of tensors that it saved. It never saves inference tensors, which have no version.
        torch.autograd.graph.increment_version([x for x in written.values() if not x.is_inference()])

    def _read(self, arguments: AppendArguments) -> dict[str, Any]:
        """Return the arrays that the launch only reads, by name."""
        problem = self._problem
        arrays: dict[str, Any] = {
            "key": dense(arguments.key),
            "kv_lengths": dense(arguments.kv_lengths),
        }
        for name in ("value", "page_table", "query_lengths"):
            tensor = getattr(arguments, name)
            arrays[name] = None if tensor is None else dense(tensor)
        by_head, device = (problem.batch, problem.key_heads), arguments.key.device
        if problem.key_scale == "head":
            arrays["key_scale"] = scale_by_head(arguments.key_scale, by_head, device)
        if problem.value_scale == "head":
            arrays["value_scale"] = scale_by_head(arguments.value_scale, by_head, device)
        if arguments.query_offsets is not None:
            offsets = clip_offsets(arguments.query_offsets, problem.tokens)
            sequences, is_row = rows_to_sequences(offsets, problem.tokens)
            arrays["sequences"] = sequences.masked_fill(~is_row, -1)
            arrays["query_lengths"], arrays["first_rows"] = offsets.diff(), offsets[:-1]
        if problem.rotary is not None and arguments.cos is not None and arguments.sin is not None:
            arrays["cos"], arrays["sin"] = dense(arguments.cos), dense(arguments.sin)
            if problem.rotary.positions == "explicit":
                arrays["positions"] = _positions(problem, arguments, arguments.cos)
        return arrays


def _positions(problem: AppendProblem, arguments: AppendArguments, cos: torch.Tensor) -> torch.Tensor:
    """Return the row of the rotary tables for each token, int32 [tokens]."""
    positions = arguments.positions
    if positions is None:
        positions = torch.arange(cos.shape[:-1].numel(), dtype=torch.int32, device=cos.device).view(cos.shape[:-1])
    if positions.numel() != problem.tokens:
        positions = positions.expand(arguments.key.shape[:-2])
    return dense(positions)


_prepared: Remembered[AppendArguments, _Prepared] = Remembered(_Prepared)


def append(arguments: AppendArguments) -> None:
    """Write the new tokens, scales and mean keys on the current stream.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: the kernel cannot compute this call.
    """
    if arguments.key.get_device() == torch.cuda.current_device():
        return _prepared(arguments).append(arguments)
    # Kernels are loaded into the context of the current device and run there.
    with torch.cuda.device(arguments.key.device):
        return _prepared(arguments).append(arguments)
