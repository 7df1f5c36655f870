"""What a PyTorch user can call today: SDPA's kernels on folded blocks, varlen attention, FlexAttention."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.block_diagonal.cases import Case
from benchmarks.block_diagonal.exact import rotate_half
from benchmarks.block_diagonal.implementations import PassMakers, autograd_passes, implementation
from benchmarks.block_diagonal.workload import Workload
from benchmarks.harness.family import Implementation
from blockdiag.interop.private_torch import set_compiler_option

_FLEX_BATCH = 8
_EAGER_ROTARY = "rotary applied apart, eagerly"


def rotation(workload: Workload) -> Callable[[torch.Tensor], torch.Tensor]:
    """Eager rotary over [T, heads, H], as usual in PyTorch models, or the identity for a case without."""
    if workload.tables is None:
        return lambda array: array
    tiles = workload.case.tiles
    positions = torch.cat(
        [torch.arange(p, p + n) for p, n in zip(tiles.positions.tolist(), tiles.lengths.tolist(), strict=True)]
    ).to(workload.query.device)
    cos, sin = (table[positions][:, None, :] for table in workload.tables)
    return lambda array: rotate_half(array, cos, sin).to(array.dtype)


def _note(workload: Workload) -> str:
    return _EAGER_ROTARY if workload.case.rotary else ""


def _needs_equal_blocks(case: Case) -> str | None:
    """Folding is a reshape only where every block is full."""
    if case.is_foldable:
        return None
    return "blocks of unequal length cannot be folded by a reshape; see torch-varlen"


def sdpa_passes(workload: Workload, backend: SDPBackend) -> PassMakers:
    """SDPA with one backend on [blocks, N, block_size, H], a view of the [T, N, H] arrays."""
    case, rotate = workload.case, rotation(workload)

    def fold(array: torch.Tensor) -> torch.Tensor:
        return array.view(-1, case.block_size, *array.shape[1:]).transpose(1, 2)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                fold(rotate(query)),
                fold(rotate(key)),
                fold(value),
                scale=case.scale,
                enable_gqa=case.query_heads != case.key_heads,
            )

    return autograd_passes(attend, workload, fold=fold, note=_note(workload))


def varlen_passes(workload: Workload) -> PassMakers:
    """`torch.nn.attention.varlen.varlen_attn` with each block a sequence."""
    from torch.nn.attention.varlen import varlen_attn

    case, rotate = workload.case, rotation(workload)
    starts = torch.from_numpy(case.tiles.starts)
    offsets = torch.cat((starts, torch.tensor([case.tokens]))).to(workload.query.device, torch.int32)
    longest = int(case.tiles.lengths.max())

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = varlen_attn(rotate(query), rotate(key), value, offsets, offsets, longest, longest, scale=case.scale)
        return cast(torch.Tensor, output)

    return autograd_passes(attend, workload, note=_note(workload))


def _flex_unsupported(case: Case) -> str | None:
    if case.rotary:
        return "FlexAttention cannot rotate inside its kernel; timed without rotary only"
    if case.tokens % (_FLEX_BATCH * 128):
        return f"needs {_FLEX_BATCH} sequences of a multiple of 128 tokens"
    return _needs_equal_blocks(case)


def flex_passes(workload: Workload, mask_block: int) -> PassMakers:
    """FlexAttention on 8 sequences, its mask a block diagonal, with `BLOCK_SIZE=mask_block` in the block mask.

    Block size 64 needs tiles that divide it. The default backward tiles on Hopper do not, and pinning smaller ones by
    `kernel_options` is refused before it is looked at, so Inductor is told to choose among all its tiles by timing.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = workload.case
    length, block_size = case.tokens // _FLEX_BATCH, case.block_size

    def same_block(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        del batch, head
        return row // block_size == column // block_size

    mask = create_block_mask(
        same_block, None, None, length, length, device=workload.query.device.type, BLOCK_SIZE=mask_block
    )
    # The backward is timed again and again over one graph, which compiled code that reuses its buffers refuses.
    set_compiler_option("functorch", "donated_buffer", False)
    options: dict[str, Any] | None = (
        {"max_autotune": True, "autotune_num_choices_displayed": 0} if mask_block < 128 else None
    )
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, options=options)

    def fold(array: torch.Tensor) -> torch.Tensor:
        return array.view(_FLEX_BATCH, length, *array.shape[1:]).transpose(1, 2)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = compiled(
            fold(query),
            fold(key),
            fold(value),
            block_mask=mask,
            scale=case.scale,
            enable_gqa=case.query_heads != case.key_heads,
        )
        return cast(torch.Tensor, output)

    return autograd_passes(attend, workload, fold=fold, note="tiles chosen by max_autotune" if options else "")


def _finish_flex() -> None:
    """Forget the case's compiled programs, of which the compiler keeps eight at the most."""
    torch.compiler.reset()
    set_compiler_option("functorch", "donated_buffer", True)


def _sdpa(name: str, backend: SDPBackend) -> Implementation:
    return implementation(
        name, "torch", lambda workload: sdpa_passes(workload, backend), unsupported=_needs_equal_blocks
    )


def _flex(mask_block: int) -> Implementation:
    return implementation(
        f"torch-flex-{mask_block}",
        "torch",
        lambda workload: flex_passes(workload, mask_block),
        unsupported=_flex_unsupported,
        preparation_seconds=25.0 if mask_block < 128 else 15.0,
        finish=_finish_flex,
    )


TORCH_BASELINES = (
    _sdpa("torch-fa2", SDPBackend.FLASH_ATTENTION),
    _sdpa("torch-cudnn", SDPBackend.CUDNN_ATTENTION),
    _sdpa("torch-efficient", SDPBackend.EFFICIENT_ATTENTION),
    implementation("torch-varlen", "torch", varlen_passes),
)
# Apart, because they take so long to compile that a short budget should cost them first.
FLEX_BASELINES = (_flex(128), _flex(64))
