"""Keys and values of the benchmark of paged attention, and the arrays of a case over them, as torch tensors."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.paged.cases import PagedCase, PagedShape

type Tensors = dict[str, torch.Tensor]

_CHUNK = 2**26
# The standard deviation of integers. Few of their normal numbers saturate.
_INTEGERS = 40


@dataclass(frozen=True)
class Pool:
    """Standard normal keys and values [tokens, K, H] of one dtype; pages of any size are views of them.

    Integers have a standard deviation of 40. Latent caches have no values of their own.
    """

    key: torch.Tensor
    value: torch.Tensor | None

    def pages(self, case: PagedCase) -> Tensors:
        """Keys and values [P, page_size, K, H] of a case."""
        shape = (case.num_pages, case.page_size, *self.key.shape[1:])
        pages = {"key": self.key, "value": self.value}
        return {name: x.view(shape) for name, x in pages.items() if x is not None}

    def contiguous(self, shape: PagedShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, S, K, H]."""
        assert self.value is not None
        sizes = (shape.batch, shape.kv_length, *self.key.shape[1:])
        return self.key.view(sizes), self.value.view(sizes)


def make_pool(case: PagedCase, *, seed: int, device: str) -> Pool:
    """What the case's pages hold."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (case.num_pages * case.page_size, case.shape.key_heads, case.shape.head_dim)

    def filled() -> torch.Tensor:
        array = torch.empty(shape, device=device, dtype=getattr(torch, case.cache))
        for part in array.view(-1).split(_CHUNK):
            numbers = torch.randn(part.shape, generator=generator, device=device, dtype=torch.bfloat16)
            part.copy_((numbers * _INTEGERS).round_().clamp_(-127, 127) if case.cache == "int8" else numbers)
        return array

    return Pool(filled(), None if case.shape.latent_values else filled())


def case_arrays(case: PagedCase, pool: Pool, *, seed: int) -> list[Tensors]:
    """The arrays of every call of a round, by the names that launches give them.

    Pages are a permutation of the pool's, so that none is shared. With several copies each call has pages of its own;
    decoding with MoBA, a query of its own, since calls with one query would find their blocks in the L2.
    """
    device = pool.key.device
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    permutation = torch.randperm(case.num_pages, generator=generator, device=device).int()
    tables = permutation.view(case.copies, case.shape.batch, case.max_pages)
    lengths = torch.full((case.shape.batch,), case.shape.kv_length, device=device, dtype=torch.int32)
    shared = {"kv_lengths": lengths} | _scales(case, generator)
    if case.group == "append":
        return [shared | _appended(case, pool, generator) | {"page_table": tables[0].contiguous()}]
    shared |= pool.pages(case)
    if case.block_size is not None:
        shared["centroids"] = mean_keys(case, shared["key"], tables[0])
    queries = case.calls if case.group == "moba" else 1
    given = [(_query(case, generator), tables[0].contiguous()) for _ in range(queries)]
    if case.copies > 1:
        given = [(given[0][0], table.contiguous()) for table in tables]
    return [shared | {"query": query, "page_table": table} for query, table in given]


def _query(case: PagedCase, generator: torch.Generator) -> torch.Tensor:
    shape = (case.shape.batch, case.query_tokens, case.shape.query_heads, case.shape.head_dim)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


def _scales(case: PagedCase, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Scales of keys and values; those of an append are what it divides by, or pages that it writes."""
    if case.scales == "none":
        return {}
    heads = case.shape.key_heads
    sizes = (case.shape.batch, heads) if case.scales == "head" else (case.num_pages, case.page_size, heads)

    def random() -> torch.Tensor:
        return 0.5 + torch.rand(sizes, generator=generator, device=generator.device, dtype=torch.float32)

    is_integer = case.cache == "int8"
    if case.group == "append":
        unit = 0.08 if is_integer else 0.02
        return {"key_scale": unit * random(), "value_scale": unit * random()}
    unit = 1 / _INTEGERS if is_integer else 1
    keys = {"score_scale" if case.scales == "head" else "key_scale": unit * random()}
    return keys if case.shape.latent_values else keys | {"value_scale": unit * random()}


def _appended(case: PagedCase, pool: Pool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    shape = (case.shape.batch * case.query_tokens, case.shape.key_heads, case.shape.head_dim)
    options: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    pages = {f"{name}_pages": x for name, x in pool.pages(case).items()}
    new = {"key": torch.randn(shape, **options), "value": torch.randn(shape, **options)}
    return new | pages


def mean_keys(case: PagedCase, key_pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Means of the complete blocks before the last one, float32 [B, max_blocks, K, H]."""
    assert case.block_size is not None
    blocks = case.moba_problem().max_blocks
    means = []
    for pages in table:
        keys = key_pages[pages.long()].reshape(-1, *key_pages.shape[2:])[: blocks * case.block_size].float()
        means.append(keys.view(blocks, case.block_size, *keys.shape[1:]).mean(1))
    return torch.stack(means).contiguous()
