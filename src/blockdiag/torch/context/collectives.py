"""Differentiable transfers between the processes that share tokens, by public functions of torch.distributed.

Gradients take the reverse path: the gradient of an exchange is an exchange, and that of a gather is a reduce-scatter.
A transfer may run beside kernels in both passes: `Transfer.start` and `Transfer.wait` are two operations of autograd.
The gradient is sent in the backward of `wait` and awaited in the backward of `start`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from blockdiag.torch.context.parallel import ContextParallel


class Transfer:
    """An exchange of rows between all processes of a group, which runs beside kernels until it is awaited.

    Args:
        group: the processes.
        send, receive: number of rows for and from each process; None for equal parts.
    """

    def __init__(self, group: Any, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> None:
        self._group, self._send, self._receive = group, send, receive
        self._work: Any = None

    def start(self, x: torch.Tensor) -> torch.Tensor:
        """Start sending rows; the result may only be passed to `wait`."""
        return _Start.apply(x, self)

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows that other processes sent, ready for use on the current stream."""
        return _Wait.apply(x, self)

    def issue(self, x: torch.Tensor, *, is_backward: bool = False) -> torch.Tensor:
        """Start sending rows outside of autograd; `finish` makes the result ready."""
        send, receive = (self._receive, self._send) if is_backward else (self._send, self._receive)
        rows = x.shape[0] if receive is None else sum(receive)
        received = x.new_empty(rows, *x.shape[1:])
        self._work = dist.all_to_all_single(received, x.contiguous(), receive, send, group=self._group, async_op=True)
        if torch.is_anomaly_enabled():
            # Anomaly detection checks gradients for NaN as soon as an autograd function returns them.
            self.finish()
        return received

    def finish(self) -> None:
        """Make the current stream wait for the last transfer that `issue` started."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.issue(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.transfer.finish()
        return gradients[0], None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.finish()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.transfer.issue(gradients[0], is_backward=True), None


def send_rows(context: ContextParallel, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
    """Exchange rows: `x` [rows, ..] is sorted by the rank of the receiver, the result by the rank of the sender."""
    transfer = Transfer(context.group, send, receive)
    return transfer.wait(transfer.start(x))


def for_each_use(x: torch.Tensor, uses: int) -> tuple[torch.Tensor, ...]:
    """Return a tensor once for each use; the gradients of the uses are added in float32."""
    return _Uses.apply(x, uses)


class _Uses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, uses: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dtype = gradients[0].dtype
        total = gradients[0].to(torch.promote_types(dtype, torch.float32))
        for x in gradients[1:]:
            total = total + x
        return total.to(dtype), None


class Gather:
    """A non-differentiable gather of the axis `tokens` of a tensor, which runs beside kernels until it is awaited."""

    def __init__(self, context: ContextParallel, x: torch.Tensor, tokens: int) -> None:
        self.context, self.tokens = context, tokens
        self._found = x.new_empty(context.size, *x.shape)
        # Kept alive until it has been sent.
        self._sent = x.detach().contiguous()
        self._work: Any = dist.all_gather_into_tensor(
            self._found.flatten(0, 1), self._sent, group=context.group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Return the concatenation of all processes' tensors, ready for use on the current stream."""
        self._work.wait()
        return self._found.movedim(0, self.tokens).flatten(self.tokens, self.tokens + 1)


def gather_whole(context: ContextParallel, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the whole of a tensor whose axis `tokens` processes share, without a gradient."""
    return Gather(context, x, tokens).wait()


def gather_tokens(context: ContextParallel, x: torch.Tensor, tokens: int, gather: Gather | None = None) -> torch.Tensor:
    """Return the whole of a tensor whose axis `tokens` processes share.

    Gradients of all processes are added in float32 (float64), and each process gets its part of them.

    Args:
        context, x, tokens: the processes, the process's part, and its axis of tokens.
        gather: the gather of `x`, if it has been started already.
    """
    return _Gathered.apply(x, gather or Gather(context, x, tokens))


def gather_with_carrier(x: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole of a tensor without a gradient, and a carrier that receives its gradient.

    Autograd rounds gradients to the dtype of their tensor. The carrier is float32, so each process's share of the
    gradient is rounded only after all shares are added. It has the shape of the whole tensor and the memory of one
    number.

    Args:
        x: the process's part.
        gather: the gather of `x`, already started.
    """
    return _Carried.apply(x, gather)


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.context, ctx.tokens, ctx.dtype = gather.context, gather.tokens, x.dtype
        whole = gather.wait()
        ctx.mark_non_differentiable(whole)
        ctx.set_materialize_grads(False)
        return whole, x.new_zeros((), dtype=torch.float32).expand(whole.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _own_sum(ctx.context, gradients[1], ctx.tokens).to(ctx.dtype), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: Gather) -> torch.Tensor:
        ctx.context, ctx.tokens = gather.context, gather.tokens
        return gather.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dtype = gradients[0].dtype
        wide = gradients[0].to(torch.promote_types(dtype, torch.float32))
        return _own_sum(ctx.context, wide, ctx.tokens).to(dtype), None


def _own_sum(context: ContextParallel, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the process's part of the sum over all processes."""
    parts = x.unflatten(tokens, (context.size, -1)).movedim(tokens, 0).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=context.group)
    return own


def with_neighbours(
    context: ContextParallel, tensors: Sequence[torch.Tensor], tokens: int, before: int, after: int
) -> tuple[torch.Tensor, ...]:
    """Extend tensors by rows of the neighbouring processes, with one exchange for all of them.

    Args:
        context: the processes.
        tensors: tensors of one dtype with equal numbers of tokens.
        tokens: the axis of tokens.
        before, after: number of rows from the previous and from the next process; rows beyond the first and last
            process are 0.
    """
    return _Neighbours.apply(context, tokens, before, after, *tensors)


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: ContextParallel, tokens: int, before: int, after: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.halo = halo = _Halo(context, tokens, before, after)
        own = tensors[0].shape[tokens]
        first = [x.narrow(tokens, 0, after) for x in tensors]
        last = [x.narrow(tokens, own - before, before) for x in tensors]
        earlier, later = halo.swap(first, last, before, after)
        whole = zip(earlier, tensors, later, strict=True)
        return tuple(torch.cat(parts, tokens) for parts in whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        halo: _Halo = ctx.halo
        tokens, before, after = halo.tokens, halo.before, halo.after
        own = gradients[0].shape[tokens] - before - after
        earlier = [x.narrow(tokens, 0, before) for x in gradients]
        later = [x.narrow(tokens, before + own, after) for x in gradients]
        first, last = halo.swap(earlier, later, after, before)
        found = [x.narrow(tokens, before, own).clone() for x in gradients]
        for x, of_earlier, of_later in zip(found, first, last, strict=True):
            x.narrow(tokens, 0, after).add_(of_earlier)
            x.narrow(tokens, own - before, before).add_(of_later)
        return None, None, None, None, *found


class _Halo:
    """Exchanges of rows with the neighbouring processes.

    Args:
        context, tokens, before, after: see `with_neighbours`.
    """

    def __init__(self, context: ContextParallel, tokens: int, before: int, after: int) -> None:
        self._context, self.tokens, self.before, self.after = context, tokens, before, after

    def swap(
        self, first: Sequence[torch.Tensor], last: Sequence[torch.Tensor], before: int, after: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Send rows to both neighbours, and return the rows of both, 0 where there is no process.

        Args:
            first, last: rows for the previous and for the next process.
            before, after: number of rows that the previous and the next process send.
        """
        rank, size = self._context.rank, self._context.size
        send, receive = [0] * size, [0] * size
        leaving = []
        if rank > 0:
            send[rank - 1], receive[rank - 1] = first[0].shape[self.tokens], before
            leaving.append(self._joined(first))
        if rank + 1 < size:
            send[rank + 1], receive[rank + 1] = last[0].shape[self.tokens], after
            leaving.append(self._joined(last))
        joined = torch.cat(leaving) if leaving else self._joined(first)[:0]
        transfer = Transfer(self._context.group, send, receive)
        found = transfer.issue(joined)
        transfer.finish()
        at = before if rank > 0 else 0
        earlier = found[:at] if rank > 0 else found.new_zeros(before, found.shape[1])
        later = found[at:] if rank + 1 < size else found.new_zeros(after, found.shape[1])
        return self._parted(earlier, first), self._parted(later, first)

    def _joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate the rows of all tensors, [rows, elements]."""
        rows = [x.movedim(self.tokens, 0) for x in tensors]
        return torch.cat([x.reshape(x.shape[0], x.shape[1:].numel()) for x in rows], 1)

    def _parted(self, joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split joined rows into the rows of each tensor."""
        shapes = [x.movedim(self.tokens, 0).shape[1:] for x in like]
        parts = joined.split([shape.numel() for shape in shapes], 1)
        rows = [x.reshape(x.shape[0], *shape) for x, shape in zip(parts, shapes, strict=True)]
        return [x.movedim(0, self.tokens) for x in rows]


def sorted_sizes(size: int, rows: int, ranks: Sequence[int]) -> list[int]:
    """Return the number of rows for each of `size` processes, if parts of `rows` rows go to `ranks`."""
    sizes = [0] * size
    for rank in ranks:
        sizes[rank] += rows
    return sizes
