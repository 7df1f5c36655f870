"""The workloads of the block-diagonal benchmark and the bytes each of them must move at the least."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from benchmarks.harness.family import Work, names_of

PassName = Literal["fwd", "bwd", "fwd+bwd"]
PASSES: tuple[PassName, ...] = ("fwd", "bwd", "fwd+bwd")

OP = "block_diagonal"
ELEMENT_BYTES = 2  # every case is bfloat16


@dataclass(frozen=True)
class Tiles:
    """Where the blocks lie on the flattened token axis, one entry per non-empty block.

    Attributes:
        starts: first row of each block, int64 [blocks].
        lengths: rows of each block, int64 [blocks].
        positions: position of each block's first row within its sequence, int64 [blocks].
    """

    starts: np.ndarray
    lengths: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload in bfloat16.

    Attributes:
        name: what `--cases` takes and the CSV holds.
        query_heads, key_heads, head_dim: N, K and H.
        sequence_lengths: tokens of each sequence. Equal lengths are timed as [B, T, N, H], others packed.
        packed: whether the call is packed, with sequence offsets.
        rotary: whether query and key are rotated by a table over positions within the sequence.
        table_dtype: dtype name of the rotary tables.
        block_size: rows of a full block.
    """

    name: str
    query_heads: int
    key_heads: int
    head_dim: int
    sequence_lengths: tuple[int, ...]
    packed: bool = False
    rotary: bool = False
    table_dtype: Literal["float32", "bfloat16"] = "float32"
    block_size: int = 64

    def __post_init__(self) -> None:
        if not self.packed and len(set(self.sequence_lengths)) != 1:
            raise ValueError(f"`sequence_lengths` of case {self.name} must be equal unless it is packed")

    @property
    def passes(self) -> tuple[PassName, ...]:
        """Forward, backward and both."""
        return PASSES

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the workload."""
        return {"op": OP, "case": self.name}

    def floor(self, pass_name: PassName) -> tuple[Work, ...]:
        """Return the bytes that a pass moves; its arithmetic takes less time than that."""
        return (Work(0.0, self.floor_bytes(pass_name)),)

    @property
    def tokens(self) -> int:
        """True tokens, without any padding."""
        return sum(self.sequence_lengths)

    @property
    def is_foldable(self) -> bool:
        """Whether every block is full, so that a reshape to [blocks, block_size, N, H] is the whole layout."""
        return all(length % self.block_size == 0 for length in self.sequence_lengths)

    @property
    def scale(self) -> float:
        """The usual factor on the scores."""
        return self.head_dim**-0.5

    @property
    def table_rows(self) -> int:
        """Rows of the rotary tables: the longest sequence."""
        return max(self.sequence_lengths)

    @cached_property
    def sequence_offsets(self) -> np.ndarray:
        """int32 [sequences + 1], first row of each sequence and the total."""
        return np.concatenate([[0], np.cumsum(self.sequence_lengths)]).astype(np.int32)

    @cached_property
    def tiles(self) -> Tiles:
        """Blocks anchored at each sequence's start, the last of a sequence partial."""
        lengths = np.asarray(self.sequence_lengths, dtype=np.int64)
        blocks = -(-lengths // self.block_size)
        sequence = np.repeat(np.arange(len(lengths)), blocks)
        first_block = np.cumsum(blocks) - blocks
        positions = (np.arange(blocks.sum()) - first_block[sequence]) * self.block_size
        return Tiles(
            starts=self.sequence_offsets[sequence].astype(np.int64) + positions,
            lengths=np.minimum(self.block_size, lengths[sequence] - positions),
            positions=positions,
        )

    def floor_bytes(self, pass_name: PassName) -> int:
        """Bytes read once and written once.

        Forward: query, key and value in, output out. Backward: query, key, value and the output's cotangent in, three
        gradients out. Rotary tables and offsets are left out: they are under 1% and stay in L2.
        """
        row = ELEMENT_BYTES * self.head_dim
        forward = row * (2 * self.query_heads + 2 * self.key_heads) * self.tokens
        backward = row * (3 * self.query_heads + 4 * self.key_heads) * self.tokens
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[pass_name]

    def shrunk(self, sequence_lengths: tuple[int, ...]) -> "Case":
        """The same heads and options over other sequences, for checks and error tables."""
        return replace(self, sequence_lengths=sequence_lengths)


def _jagged_lengths(count: int, low: int, high: int) -> tuple[int, ...]:
    """`count` lengths uniform in low..high, the same in every run."""
    return tuple(int(length) for length in np.random.default_rng(0).integers(low, high + 1, count))


# 262,144 tokens. Only the rotary tables notice how many sequences they are.
_UNIFORM = (4096,) * 64
_JAGGED = _jagged_lengths(1152, 800, 2000)


def _case(name: str, query_heads: int, key_heads: int, head_dim: int, *, packed: bool, rotary: bool) -> Case:
    """One entry of the table below."""
    return Case(
        name=name,
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        sequence_lengths=_JAGGED if packed else _UNIFORM,
        packed=packed,
        rotary=rotary,
    )


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        _case("h8_d128", 8, 8, 128, packed=False, rotary=False),
        _case("h16_d64", 16, 16, 64, packed=False, rotary=False),
        _case("gqa8_2_d128", 8, 2, 128, packed=False, rotary=False),
        _case("h8_d128_rotary", 8, 8, 128, packed=False, rotary=True),
        replace(
            _case("h8_d128_rotary_bf16", 8, 8, 128, packed=False, rotary=True),
            table_dtype="bfloat16",
        ),
        _case("h16_d64_rotary", 16, 16, 64, packed=False, rotary=True),
        _case("packed_h4_d128", 4, 4, 128, packed=True, rotary=False),
        _case("packed_h4_d128_rotary", 4, 4, 128, packed=True, rotary=True),
    )
}


SMOKE_CASE = replace(CASES["h8_d128"], name="smoke_h2_d64", query_heads=2, key_heads=2, head_dim=64).shrunk((256,) * 4)


def select_cases(names: str | None) -> list[Case]:
    """Cases of a comma-separated list, all of them for None.

    Raises:
        ValueError: for a name that is no case.
    """
    return [CASES[name] for name in names_of(names, CASES)]


def rotary_tables(rows: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Float32 cos and sin tables [rows, head_dim / 2] with the usual base of 10,000."""
    frequencies = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(rows)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
