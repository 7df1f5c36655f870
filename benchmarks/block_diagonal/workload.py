"""Random inputs of a case, as torch tensors and as JAX arrays over the same memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.block_diagonal.cases import Case, rotary_tables
from benchmarks.harness.device import to_jax


@dataclass
class Workload:
    """Inputs of one case.

    Attributes:
        case: the case.
        query, key, value, cotangent: bfloat16 tensors [T, N, H], [T, K, H], [T, K, H], [T, N, H].
        tables: cos and sin [P, H/2] in the case's table dtype, or None.
        jax_arrays: query, key, value and cotangent as JAX arrays, [B, T, N, H] unless packed.
        jax_extra: what else a JAX call may take: "cos" and "sin" for a rotary case, and for a packed one
            "sequence_offsets" and the int32 tables of `_packed_tables` that the baselines need.
    """

    case: Case
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cotangent: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor] | None
    jax_arrays: tuple[Any, Any, Any, Any]
    jax_extra: dict[str, Any]

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def output_bytes(self, pass_name: str) -> int:
        """Bytes of what one call of a pass returns."""
        output = self.query.nbytes
        gradients = self.query.nbytes + self.key.nbytes + self.value.nbytes
        return {"fwd": output, "bwd": gradients, "fwd+bwd": output + gradients}[pass_name]


def make_workload(case: Case, *, seed: int, device: str) -> Workload:
    """Standard normal inputs: nothing is zero, nothing repeats, and scores have the spread of a trained model's."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = [(case.tokens, heads, case.head_dim) for heads in (case.query_heads, case.key_heads, case.key_heads)]
    query, key, value, cotangent = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in (*shapes, shapes[0])
    )
    tables = None
    if case.rotary:
        cos, sin = rotary_tables(case.table_rows, case.head_dim)
        dtype = getattr(torch, case.table_dtype)
        tables = (torch.from_numpy(cos).to(device, dtype), torch.from_numpy(sin).to(device, dtype))
    if device == "cuda":
        torch.cuda.synchronize()
    batch = () if case.packed else (len(case.sequence_lengths), case.sequence_lengths[0])

    def shaped(array: torch.Tensor) -> Any:
        return to_jax(array.view(*batch, *array.shape[1:]) if batch else array)

    extra: dict[str, Any] = {}
    if case.packed:
        extra = {name: to_jax(torch.from_numpy(table).to(device)) for name, table in _packed_tables(case).items()}
    if tables is not None:
        extra["cos"], extra["sin"] = (to_jax(table) for table in tables)
    jax_arrays = (shaped(query), shaped(key), shaped(value), shaped(cotangent))
    return Workload(case, query, key, value, cotangent, tables, jax_arrays, extra)


def _packed_tables(case: Case) -> dict[str, np.ndarray]:
    """Offsets for the library, and for the baselines: each block's first row and length, each token's row among the
    padded blocks and its position within its sequence."""
    tiles = case.tiles
    block = np.repeat(np.arange(len(tiles.starts)), tiles.lengths)
    within = np.arange(case.tokens) - tiles.starts[block]
    tables = {
        "sequence_offsets": case.sequence_offsets,
        "block_starts": tiles.starts,
        "block_lengths": tiles.lengths,
        "token_slots": block * case.block_size + within,
        "token_positions": tiles.positions[block] + within,
    }
    return {name: table.astype(np.int32) for name, table in tables.items()}
