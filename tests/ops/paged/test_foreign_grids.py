"""The parameters of other projects' tests of paged attention, with our caches, oracle and tolerances.

Each grid has many parameters. Its cases cover every pair of values of two parameters, as tests of all combinations
would take hours on a CPU. All cases run with "xla", and a seeded sample of them with the Triton kernels in their
interpreter.

| grid | parameters of |
|---|---|
| jax | jax.experimental.pallas.ops.gpu.paged_attention: float16 queries, caches of 16 or 8 bits with scales of tokens |
| flash | FlashAttention's attention with a cache of keys and values: lengths, new tokens, pages, windows |
| vllm | vLLM's unified Triton kernel: prompts beside decoding sequences, windows, soft caps, float8 |

Left out are tile sizes, 131,072 keys, and what our functions do not have: ALiBi, padding before the keys, and partial
rotary embedding.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import append_to_pages, paged_attention
from tests.ops.paged.test_paged import assert_packed_call_is_accurate
from tests.ops.paged_support import PagedCase, assert_accurate, exact_paged
from tests.support import compiled_quickly

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def covering_cases(grid: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return cases of a grid that together have every pair of values of two parameters."""
    generator, places = random.Random(seed), {name: place for place, name in enumerate(grid)}

    def pair(one: tuple[str, int], other: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return two parameters with the indices of their values, in the order of the grid."""
        return (one, other) if places[one[0]] < places[other[0]] else (other, one)

    indexed = [[(name, index) for index in range(len(values))] for name, values in grid.items()]
    both = itertools.combinations(indexed, 2)
    missing = dict.fromkeys(x for one, other in both for x in itertools.product(one, other))
    cases = []
    while missing:
        row = list(next(iter(missing)))
        others = [column for column in indexed if column[0][0] not in dict(row)]
        generator.shuffle(others)
        for column in others:
            # Of the values that give the most new pairs, a random one.
            candidates = generator.sample(column, len(column))
            row.append(max(candidates, key=lambda x: sum(pair(x, one) in missing for one in row)))
        for one, other in itertools.combinations(row, 2):
            missing.pop(pair(one, other), None)
        chosen = dict(row)
        cases.append({name: values[chosen[name]] for name, values in grid.items()})
    return cases


def named(cases: Sequence[dict[str, Any]]) -> list[Any]:
    """Return cases as parameters of a test, whose names list the values."""
    return [pytest.param(case, id=" ".join(f"{name}={value}" for name, value in case.items())) for case in cases]


def sampled(cases: Sequence[dict[str, Any]], count: int) -> list[Any]:
    """Return a sample of cases as parameters of a test in the interpreter."""
    return named(random.Random(1).sample(cases, count))


def test_covering_cases_have_every_pair_of_values():
    grid = {"a": (1, 2, 3), "b": "xy", "c": (None, True), "d": (0, 1, 2, 3)}
    cases = covering_cases(grid)
    assert len(cases) < 20
    for a, b in itertools.combinations(grid, 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(grid[a], grid[b]))


# --- jax ------------------------------------------------------------------------------------------------------------

JAX_LENGTHS = (3, 256, 513, 1023, 2048)
JAX_SIZES = {
    "page_size": (8, 16, 32),
    "key_heads": (1, 2),
    "group": (2, 16, 20),
    "head_dim": (32, 64),
    "num_splits": (4, 16),
}
JAX_CASES = covering_cases(JAX_SIZES)
JAX_ROUNDED = covering_cases({"rounds": ("keys", "values", "both"), "cache": (E5M2, E4M3, "int8"), **JAX_SIZES})
# Errors of attention to a rounded cache, relative to the norm of the exact results.
ROUNDING = {E5M2: 0.08, E4M3: 0.04, "int8": 0.01}


def jax_case(
    page_size: int, key_heads: int, group: int, head_dim: int, num_splits: int, rounds: str = "", cache: str = "float16"
) -> PagedCase:
    """Return a case of jax's grid; `rounds` says what of its cache has eight bits."""
    has_keys, has_values = rounds in ("keys", "both"), rounds in ("values", "both")
    return PagedCase(
        kv_lengths=JAX_LENGTHS,
        query_heads=group * key_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        page_size=page_size,
        spare_pages=0,
        dtype="float16",
        cache_dtype=cache if has_keys else "float16",
        value_dtype=cache if has_values else "float16",
        key_scale="token" if has_keys else "none",
        value_scale="token" if has_values else "none",
        num_splits=num_splits,
    )


def check_jax_case(values: dict[str, Any], implementation: str) -> None:
    """Assert that the results of a case are accurate."""
    case = jax_case(**values)
    arguments = case.arguments()
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    options |= dict(num_splits=case.num_splits, return_residual=True, implementation=implementation)
    assert_accurate(case, compiled_quickly(functools.partial(paged_attention, **options))(**arrays))


@pytest.mark.parametrize("values", named([*JAX_CASES, *JAX_ROUNDED]))
def test_jax_grid_is_accurate(values):
    check_jax_case(values, "xla")


@pytest.mark.parametrize("values", [*sampled(JAX_CASES, 2), *sampled(JAX_ROUNDED, 4)])
def test_jax_grid_of_kernels_is_accurate(values):
    check_jax_case(values, "triton")


def rounded_error(values: dict[str, Any], implementation: str) -> float:
    """Return the relative error of attention to a cache that `append_to_pages` rounds, against the unrounded keys."""
    case = jax_case(**values)
    wide = dataclasses.replace(case, cache_dtype="float16", value_dtype="float16", key_scale="none", value_scale="none")
    problem, lengths = case.problem, jnp.asarray(JAX_LENGTHS, jnp.int32)
    pool = (problem.num_pages, problem.page_size, problem.key_heads)
    key, value = (
        np.concatenate([rows[:length] for rows, length in zip(wide.dense[name], JAX_LENGTHS, strict=True)])
        for name in ("key", "value")
    )
    names = [f"{name}_scale" for name in ("key", "value") if getattr(case, f"{name}_scale") == "token"]
    offsets = jnp.cumsum(jnp.asarray([0, *JAX_LENGTHS], jnp.int32), dtype=jnp.int32)

    @compiled_quickly
    def run(key, value, query, table):
        pages = [jnp.full((*pool, problem.head_dim), 99).astype(x) for x in (problem.key_dtype, problem.value_dtype)]
        scales = {name: jnp.full(pool, jnp.nan) for name in names}
        *pages, key_scale, value_scale = (
            *append_to_pages(
                key, value, *pages, table, lengths, query_offsets=offsets, implementation=implementation, **scales
            ),
            *[None] * (2 - len(names)),
        )
        scales = dict(zip(names, (key_scale, value_scale), strict=False))
        return paged_attention(query, *pages, table, lengths, implementation=implementation, **scales)

    output = np.asarray(run(key, value, wide.dense["query"], wide.table)).astype(np.float64)
    exact = exact_paged(wide)[0]
    return float(np.linalg.norm(output - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("values", sampled(JAX_ROUNDED, 6))
def test_jax_grid_of_caches_that_append_rounds_is_near_the_unrounded_attention(values):
    assert rounded_error(values, "xla") < ROUNDING[values["cache"]]


@pytest.mark.parametrize("values", sampled([x for x in JAX_ROUNDED if x["cache"] == "int8"], 2))
def test_jax_grid_of_integers_that_the_kernel_appends_is_near_the_unrounded_attention(values):
    assert rounded_error(values, "triton") < ROUNDING["int8"]


# --- FlashAttention -------------------------------------------------------------------------------------------------

FLASH_GRID = {
    "lengths": ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (128, 128), (256, 512)),
    "head_dim": (32, 59, 64, 80, 128, 256),
    "page_size": (None, 1, 4, 128, 256),
    "key_heads": (6, 3, 1),
    "sees": ("all", "past", "window"),
    "dtype": ("float16", "bfloat16", E4M3),
    "new": ("none", "some", "all"),
    "is_ragged": (False, True),
    "num_splits": (1, None),
}
FLASH_CASES = covering_cases(FLASH_GRID)
FLASH_LONG = [
    {"lengths": (16, 20000), "head_dim": 64, "page_size": size, "key_heads": 1, "sees": sees, "dtype": dtype,
     "new": new, "is_ragged": False, "num_splits": None}
    for size, sees, dtype, new in ((None, "past", "float16", "none"), (128, "window", E4M3, "some"))
]  # fmt: skip
# The kernels take multiples of 8, and the interpreter is slow.
FLASH_FOR_KERNELS = [
    x for x in FLASH_CASES if x["head_dim"] % 8 == 0 and x["lengths"][0] <= 64 and x["lengths"][1] <= 1024
]


def flash_case(values: dict[str, Any]) -> tuple[PagedCase, int]:
    """Return a case of FlashAttention's grid and the number of its keys that are new."""
    queries, keys = values["lengths"]
    draw = random.Random(str(values))
    new = {"none": 0, "some": draw.randint(1, queries), "all": queries}[values["new"]]
    window = (draw.randrange(keys), draw.randrange(keys)) if values["sees"] == "window" else (None, None)
    case = PagedCase(
        kv_lengths=(draw.randint(max(1, new), keys), keys),
        query_lengths=(draw.randint(1, queries), queries) if values["is_ragged"] else None,
        query_tokens=queries,
        query_heads=6,
        key_heads=values["key_heads"],
        head_dim=values["head_dim"],
        page_size=values["page_size"],
        spare_pages=0,
        dtype=values["dtype"],
        is_causal=values["sees"] == "past",
        window=window,
        num_splits=values["num_splits"] or 1,
    )
    return case, new


def check_flash_case(values: dict[str, Any], implementation: str) -> None:
    """Append the new keys of a case, attend, and assert that the results are accurate."""
    case, new = flash_case(values)
    arguments = case.arguments()
    tokens: dict[str, Any] = {}
    if new:
        for name in ("key", "value"):
            rows = case.dense[name].copy()
            tokens[name] = np.stack([x[length - new : length] for x, length in zip(rows, case.kv_lengths, strict=True)])
            for x, length in zip(rows, case.kv_lengths, strict=True):
                x[length - new : length] = np.nan
            arguments[f"{name}_pages"] = jnp.asarray(case.paged(rows))
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in arguments.items() if name not in arrays and name != "page_table"}

    @compiled_quickly
    def run(arrays, tokens):
        arrays = {"page_table": None} | arrays
        if tokens:
            names = ("key_pages", "value_pages", "page_table", "kv_lengths")
            pages = append_to_pages(**tokens, **{name: arrays[name] for name in names}, implementation=implementation)
            arrays |= dict(zip(names, pages, strict=False))
        return paged_attention(
            **arrays, **options, num_splits=values["num_splits"], return_residual=True, implementation=implementation
        )

    assert_accurate(case, run(arrays, tokens))


@pytest.mark.parametrize("values", named([*FLASH_CASES, *FLASH_LONG]))
def test_flash_grid_is_accurate(values):
    check_flash_case(values, "xla")


@pytest.mark.parametrize("values", sampled(FLASH_FOR_KERNELS, 6))
def test_flash_grid_of_kernels_is_accurate(values):
    check_flash_case(values, "triton")


# --- vLLM -----------------------------------------------------------------------------------------------------------

# Queries and keys of each sequence.
MIXED, DECODING = ((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011))
VLLM_GRID = {
    "lengths": (MIXED, DECODING),
    "heads": ((4, 4), (8, 2), (5, 1)),
    "head_dim": (128, 256),
    "window": (None, 64, 128, 256),
    "soft_cap": (None, 50.0),
    # Queries and caches; eight bits have scales.
    "dtypes": (("bfloat16", "bfloat16"), (E4M3, E4M3), ("bfloat16", E4M3), ("bfloat16", "int8")),
    "num_splits": (1, 16),
}
VLLM_CASES = covering_cases(VLLM_GRID)


def check_vllm_case(values: dict[str, Any], implementation: str) -> None:
    """Attend from the packed queries of a case, and assert that the results are accurate."""
    queries, keys = zip(*values["lengths"], strict=True)
    query_heads, key_heads = values["heads"]
    dtype, cache = values["dtypes"]
    has_scales = cache != "bfloat16"
    case = PagedCase(
        kv_lengths=keys,
        query_lengths=queries,
        query_tokens=max(queries),
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=values["head_dim"],
        dtype=dtype,
        cache_dtype=cache,
        page_size=16,
        # Their window counts the query's own position.
        window=(None if values["window"] is None else values["window"] - 1, None),
        soft_cap=values["soft_cap"],
        score_scale=has_scales,
        value_scale="head" if has_scales else "none",
    )
    assert_packed_call_is_accurate(case, implementation, {"num_splits": values["num_splits"]})


@pytest.mark.parametrize("values", named(VLLM_CASES))
def test_vllm_grid_is_accurate(values):
    check_vllm_case(values, "xla")


@pytest.mark.parametrize("values", sampled(VLLM_CASES, 4))
def test_vllm_grid_of_kernels_is_accurate(values):
    check_vllm_case(values, "triton")
