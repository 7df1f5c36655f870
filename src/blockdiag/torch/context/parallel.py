"""The argument `context_parallel` of torch functions: the processes that share tokens, and their strategy."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import distributed as dist

from blockdiag.common import validation

type Strategy = Literal["ulysses", "gather", "ring"]


@dataclass(frozen=True)
class ContextParallel:
    """Division of the tokens of each sequence among the processes of a group, in equal consecutive parts.

    Operands and results are plain tensors: each process passes its own tokens, and the parts follow each other in the
    order of ranks. Offsets of packed sequences, lengths of blocks and rotary tables indexed by position are those of
    all tokens, the same in every process. Every process of the group must make the same calls and differentiate with
    respect to the same operands, or processes wait for each other forever.

    Attributes:
        group: the processes, as `torch.distributed.new_group` returns them, or a DeviceMesh of one axis.
        strategy: "ulysses" exchanges tokens for heads, and each process computes whole sequences of its heads. The
            number of processes divides the key heads; or it divides the query heads, and several processes have the
            same key head (not with `fuse`). "gather", for MoBA and `fuse`: each process gathers keys and values and
            computes its own queries. "ring", for `fuse`: parts of keys and values travel around the processes, so that
            none ever has them whole. It moves as many bytes as "gather", so it is for keys that do not fit into the
            memory of a device. None chooses "ulysses" where it supports the heads, otherwise "gather". Block-diagonal
            attention only communicates the rows that boundaries within blocks need.

    Raises:
        ValueError: `strategy` is none of these, or this process is not part of the group. The call that uses a strategy
            raises if the strategy does not support it.

    References:
        Exchange of tokens for heads: Jacobs et al., "DeepSpeed Ulysses" (2023). Ring: Liu et al., "Ring Attention with
        Blockwise Transformers for Near-Infinite Context" (2023).

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from blockdiag.torch import ContextParallel, moba_attention
        >>> if not dist.is_initialized():  # one process, as an example
        ...     dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> context = ContextParallel(dist.group.WORLD)
        >>> query, key, value = torch.randn(3, 1, 64, 4, 32)  # this process's tokens
        >>> moba_attention(query, key, value, block_size=16, top_k=3, context_parallel=context).shape
        torch.Size([1, 64, 4, 32])
        >>> dist.destroy_process_group()
    """

    group: Any
    strategy: Strategy | None = None
    # Device types on which the processes' numbers of tokens have been compared.
    _compared: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.strategy not in (None, "ulysses", "gather", "ring"):
            raise ValueError(
                f"`strategy` must be None, 'ulysses', 'gather' or 'ring', got {self.strategy!r}; 'ulysses' supports "
                "attention whose heads the processes divide, 'gather' MoBA and `fuse` with any number of key heads, "
                "'ring' `fuse`"
            )
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("`group` needs torch.distributed; call torch.distributed.init_process_group first")
        group = self.group
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "`group` does not have this process, which torch.distributed.new_group returned no group for; make the "
                "call in the processes of the group only"
            )
        if not isinstance(group, dist.ProcessGroup):
            from torch.distributed.device_mesh import DeviceMesh

            if not isinstance(group, DeviceMesh):
                raise ValueError(
                    f"`group` must be a process group or a DeviceMesh of one axis, got {type(group)}; "
                    "torch.distributed.group.WORLD has all processes"
                )
            if group.ndim != 1:
                raise ValueError(
                    f"`group` must be a DeviceMesh of one axis, got the axes {group.mesh_dim_names or group.ndim}; "
                    "pass mesh['name'] of the axis whose processes share tokens"
                )
            if group.get_coordinate() is None:
                raise ValueError(
                    f"`group` does not have this process, whose rank is {dist.get_rank()}: {group}; make the call in "
                    "the processes of the mesh only"
                )
            object.__setattr__(self, "group", group.get_group())

    @property
    def rank(self) -> int:
        """The index of this process's part among the parts of all processes."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of processes that share tokens."""
        return dist.get_world_size(self.group)


def check_plain(context: Any, **operands: torch.Tensor) -> None:
    """Check the types of `context_parallel` and of operands.

    Raises:
        ValueError: `context_parallel` has the wrong type, or an operand is a DTensor or a nested tensor.
    """
    if not isinstance(context, ContextParallel):
        raise ValueError(
            f"`context_parallel` must be a blockdiag.torch.ContextParallel or None, got {type(context)}; make one of a "
            "process group"
        )
    for name, x in operands.items():
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested:
            kind = "a nested tensor" if x.is_nested else f"{type(x)}"
            raise ValueError(
                f"`{name}` must be a plain tensor of this process's tokens where `context_parallel` is given, got "
                f"{kind}; pass to_local() of a DTensor, or values() and offsets() of all tokens of a nested tensor"
            )


def check_parts(
    context: ContextParallel,
    operands: dict[str, torch.Tensor],
    sequence_offsets: torch.Tensor | None,
    block_lengths: torch.Tensor | None = None,
    block_size: int = 1,
) -> None:
    """Check a process's operands, and the offsets or lengths of the tokens of all processes.

    Args:
        context: the processes.
        operands: operands [.., T, heads, H] by name; the first one determines the number of tokens.
        sequence_offsets, block_lengths, block_size: as for the call.

    Raises:
        ValueError: processes have different numbers of tokens, or offsets or lengths do not describe the tokens.
    """
    name, x = next(iter(operands.items()))
    compare_tokens(context, {name: x.shape[-3]}, x.device)
    tokens = (*x.shape[:-3], x.shape[-3] * context.size)
    validation.check_packing(tokens, block_size, sequence_offsets, block_lengths, name)


def compare_tokens(context: ContextParallel, tokens: dict[str, int], device: torch.device) -> None:
    """Check that all processes have equally many tokens.

    On CPUs the numbers are compared in every call. On a GPU the comparison waits for the device, so only the first call
    with a `ContextParallel` object compares them.

    Args:
        context: the processes.
        tokens: number of tokens of each operand in this process, by name.
        device: the device of the operands.

    Raises:
        ValueError: processes have different numbers of tokens.
    """
    if device.type in context._compared:
        return
    own = torch.tensor([list(tokens.values())], dtype=torch.int64, device=device)
    found = own.new_empty(context.size, len(tokens))
    dist.all_gather_into_tensor(found, own, group=context.group)
    for name, counts in zip(tokens, found.T.tolist(), strict=True):
        if len(set(counts)) > 1:
            raise ValueError(
                f"the processes of `context_parallel` must have equally many tokens of `{name}`, got {counts}; pad "
                f"{sum(counts)} tokens to {max(counts) * len(counts)} and give each process {max(counts)}"
            )
    if device.type != "cpu":
        context._compared.add(device.type)


def choose_strategy(
    context: ContextParallel, heads: tuple[int, int], remedy: str = "use strategy='gather'"
) -> Strategy:
    """Return the requested strategy, or by default "ulysses" where it supports the heads, else "gather".

    Args:
        context: the argument of the call.
        heads: numbers of query heads and key heads.
        remedy: the advice if "ulysses" does not support the heads.

    Raises:
        ValueError: the strategy is "ulysses", which does not support the heads; or it is "ring".
    """
    refuse_ring(context, "MoBA", "use strategy='gather', or 'ulysses' where the processes divide the query heads")
    query_heads, key_heads = heads
    is_supported = key_heads % context.size == 0 or (context.size % key_heads == 0 and query_heads % context.size == 0)
    if context.strategy == "ulysses" and not is_supported:
        raise ValueError(
            f"strategy 'ulysses' needs query heads that are a multiple of the {context.size} processes of the group, "
            f"and key heads that are a multiple or a divisor of these, got {query_heads} query heads and {key_heads} "
            f"key heads; {remedy}"
        )
    return context.strategy or ("ulysses" if is_supported else "gather")


def refuse_ring(context: ContextParallel, operation: str, remedy: str) -> None:
    """Refuse the strategy "ring" for an operation that does not support it.

    Raises:
        ValueError: the strategy is "ring".
    """
    if context.strategy == "ring":
        raise ValueError(f"strategy 'ring' supports only `fuse`, not {operation}; {remedy}")
