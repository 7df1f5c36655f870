"""Results of paged attention and of appending against float64, over some of the sequences."""

from collections.abc import Sequence

import torch

from benchmarks.harness.device import relative_error
from benchmarks.harness.failures import GATE, WrongResult
from benchmarks.paged.arrays import Tensors
from benchmarks.paged.cases import CACHES, PagedCase

# Log-sum-exps are float32 sums of products that are exact.
_LOG_SUM_GATE = 1e-3
# Rounding to eight bits errs by up to a half of 2^-3 (e4m3) or 2^-2 (e5m2) of a number, or a half of the scale (int8).
_ROUNDING_GATES = {"bfloat16": 0.0, "float8_e4m3fn": 0.04, "float8_e5m2": 0.08, "int8": 0.04}


# Queries of a prompt that are compared.
_CHECKED_QUERIES = 64
# Queries whose blocks are found together.
_COUNTED_QUERIES = 1024


def checked_queries(count: int) -> list[int]:
    """All queries of a sequence, or 64 of them at even distances."""
    if count <= _CHECKED_QUERIES:
        return list(range(count))
    return [round(i * (count - 1) / (_CHECKED_QUERIES - 1)) for i in range(_CHECKED_QUERIES)]


def checked_sequences(case: PagedCase) -> list[int]:
    """The first and the last one."""
    return sorted({0, case.shape.batch - 1})


def check_attention(
    case: PagedCase, arrays: Tensors, output: torch.Tensor, log_sum: torch.Tensor | None = None
) -> float:
    """Compares output [B, T, N, H] and log-sum-exp [B, T, N] with float64; returns the output's relative error.

    Raises:
        WrongResult: one is further away than rounding explains.
    """
    worst = 0.0
    for sequence in checked_sequences(case):
        exact, exact_log_sum = exact_attention(case, arrays, sequence)
        rows = checked_queries(output.shape[1])
        error = relative_error(output[sequence, rows], exact)
        if not error <= GATE:
            raise WrongResult(f"{case.name}, sequence {sequence}: output: relative error {error:.2e} exceeds {GATE}")
        worst = max(worst, error)
        if log_sum is not None:
            difference = float((log_sum[sequence, rows].double() - exact_log_sum).abs().max())
            if not difference <= _LOG_SUM_GATE:
                raise WrongResult(f"{case.name}, sequence {sequence}: log-sum-exp: error {difference:.2e}")
    return worst


def exact_attention(case: PagedCase, arrays: Tensors, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, N, V] and log-sum-exp [T, N] of the checked queries of one sequence in float64.

    Keys are gathered page by page.
    """
    key = gathered(arrays, "key", sequence)
    # The values of latent caches are columns of the keys, with their scales.
    latent = case.shape.latent_values
    value = gathered(arrays, "value", sequence) if latent is None else key[..., :latent]
    if latent is not None and "key_scale" in arrays:
        arrays = arrays | {"value_scale": arrays["key_scale"]}
    rows = checked_queries(arrays["query"].shape[1])
    query = arrays["query"][sequence, rows]
    group = case.shape.query_heads // case.shape.key_heads
    tokens, length = arrays["query"].shape[1], len(key)
    position = length - tokens + torch.tensor(rows, device=query.device)
    seen = (torch.arange(length, device=query.device)[None, :] <= position[:, None])[:, None, :]
    if case.block_size is not None:
        seen = seen & chosen_keys(case, arrays, sequence, rows)
    outputs, log_sums = [], []
    for head in range(case.shape.key_heads):
        heads = slice(head * group, (head + 1) * group)
        keys, values = key[:, head].double(), value[:, head].double()
        scores = torch.einsum("tgh,sh->tgs", query[:, heads].double(), keys) * case.shape.head_dim**-0.5
        if "score_scale" in arrays:
            scores *= arrays["score_scale"][sequence, head].double()
        if "key_scale" in arrays:
            scores *= gathered(arrays, "key_scale", sequence)[:, head].double()
        scores = scores.masked_fill(~(seen if seen.shape[1] == 1 else seen[:, heads]), -torch.inf)
        if "value_scale" in arrays:
            by_token = arrays["value_scale"].ndim == 3
            scale = gathered(arrays, "value_scale", sequence)[:, head, None] if by_token else None
            values = values * (arrays["value_scale"][sequence, head] if scale is None else scale).double()
        outputs.append(torch.einsum("tgs,sh->tgh", scores.softmax(-1), values))
        log_sums.append(torch.logsumexp(scores, -1))
    return torch.cat(outputs, 1), torch.cat(log_sums, 1)


def gathered(arrays: Tensors, name: str, sequence: int) -> torch.Tensor:
    """What the pages of one sequence hold, [length, ...]; of a contiguous cache its row."""
    pages, length = arrays[name], int(arrays["kv_lengths"][sequence])
    if "page_table" not in arrays:
        return pages[sequence, :length]
    # Of eight bits, elements are moved as bytes.
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages
    found = raw[arrays["page_table"][sequence].long()].flatten(0, 1)[:length]
    return found.view(pages.dtype)


def chosen_blocks(case: PagedCase, arrays: Tensors, sequence: int, rows: Sequence[int]) -> torch.Tensor:
    """Which blocks some queries see, their own included, bool [rows, N, blocks]."""
    assert case.block_size is not None and case.top_k is not None
    all_queries = arrays["query"][sequence]
    query, means = all_queries[list(rows)].double(), arrays["centroids"][sequence].double()
    group = case.shape.query_heads // case.shape.key_heads
    scores = torch.einsum("tnh,cnh->tnc", query, means.repeat_interleave(group, dim=1))
    tokens, length = len(all_queries), int(arrays["kv_lengths"][sequence])
    blocks = -(-length // case.block_size)
    own = (length - tokens + torch.tensor(rows, device=query.device)) // case.block_size
    scores = torch.nn.functional.pad(scores, (0, max(0, blocks - scores.shape[-1])), value=-torch.inf)[..., :blocks]
    is_past = torch.arange(blocks, device=query.device)[None, :] < own[:, None]
    scores = scores.masked_fill(~is_past[:, None], -torch.inf)
    best = scores.topk(min(case.top_k - 1, blocks), dim=-1).indices
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & is_past[:, None]
    return seen.scatter_(-1, own[:, None, None].expand(*seen.shape[:2], 1), True)


def chosen_keys(case: PagedCase, arrays: Tensors, sequence: int, rows: Sequence[int]) -> torch.Tensor:
    """Which keys the blocks of some queries hold, bool [rows, N, length]."""
    assert case.block_size is not None
    length = int(arrays["kv_lengths"][sequence])
    return chosen_blocks(case, arrays, sequence, rows).repeat_interleave(case.block_size, dim=-1)[..., :length]


def chosen_bytes(case: PagedCase, arrays: Tensors) -> int:
    """Bytes that MoBA must read: all mean keys, and each block that some query of a key head sees once."""
    assert case.block_size is not None
    shape, total = case.shape, arrays["centroids"].nbytes
    for sequence in range(shape.batch):
        by_head = None
        for first in range(0, case.query_tokens, _COUNTED_QUERIES):
            rows = range(first, min(first + _COUNTED_QUERIES, case.query_tokens))
            seen = chosen_blocks(case, arrays, sequence, rows)
            found = seen.view(seen.shape[0], shape.key_heads, -1, seen.shape[-1]).any(2).any(0)
            by_head = found if by_head is None else by_head | found
        assert by_head is not None
        total += int(by_head.sum()) * case.block_size * 2 * shape.head_dim * CACHES[case.cache]
    return total


def check_append(case: PagedCase, before: Tensors, after: Tensors) -> float:
    """New tokens in their places, and nothing else changed; returns the largest relative error of rounding.

    Args:
        before, after: the arrays of the call, with those that it changes as they were and as they are.

    Raises:
        WrongResult: a token is elsewhere, or something else changed.
    """
    shape, count = case.shape, case.query_tokens
    position = torch.arange(shape.kv_length - count, shape.kv_length, device=before["key"].device)
    pages = before["page_table"].long()[:, position // case.page_size]
    rows = (pages * case.page_size + position % case.page_size).flatten()
    errors = []
    for name in ("key", "value"):
        written = after[f"{name}_pages"].flatten(0, 1)[rows].float()
        if case.scales == "head":
            scale = before[f"{name}_scale"].repeat_interleave(count, dim=0)
            written = written * scale[..., None]
        elif case.scales == "token":
            written = written * after[f"{name}_scale"].flatten(0, 1)[rows][..., None]
        errors.append(relative_error(written, before[name].float()))
        changed = [f"{name}_pages", *([f"{name}_scale"] if case.scales == "token" else [])]
        for array in changed:
            old, new = (_bytes_by_row(arrays[array]) for arrays in (before, after))
            same = (old == new).all(dim=1)
            same[rows] = True
            if not bool(same.all()):
                raise WrongResult(
                    f"{case.name}: {array}: {int((~same).sum())} rows changed that nothing was written to"
                )
    if not max(errors) <= _ROUNDING_GATES[case.cache]:
        raise WrongResult(f"{case.name}: new tokens: relative errors {errors}")
    return max(errors)


def _bytes_by_row(pages: torch.Tensor) -> torch.Tensor:
    """[P, page_size, ...] as bytes [P * page_size, bytes]."""
    return pages.flatten(0, 1).flatten(1).view(torch.uint8)
