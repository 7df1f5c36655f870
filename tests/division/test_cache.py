"""Partitioned programs in JAX's persistent compilation cache.

With `jax_remove_custom_partitioning_ptr_from_cache_key`, a cache key does not depend on the Python function that
partitions a call. The digest of the rules, which is an operand, distinguishes the programs.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

from blockdiag import (
    block_diagonal_attention,
    fuse,
    fused_qkv_block_attention,
    key_convolution,
    moba_attention,
    moba_paged_attention,
    moba_routing,
)
from blockdiag.common import rule as rules
from blockdiag.common.rule import Rule, digest_of
from tests.division.division_support import batch_specs, make_mesh, shard
from tests.ops.op_calls import CALLS, HEADS, KEY_HEADS, WIDTH

_SETTINGS = {
    "jax_remove_custom_partitioning_ptr_from_cache_key": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_POOLS = ("key_pages", "value_pages")
_EVENTS = "/jax/compilation_cache/cache_"
_MOBA = dict(block_size=16, top_k=2)
ROOT = Path(__file__).parents[2]


@dataclass
class Cache:
    """A separate persistent compilation cache.

    Attributes:
        hits: number of programs found in the cache.
    """

    folder: Path
    hits: int = 0

    def entries(self, name: str = "jit_compute-") -> int:
        """Return how many programs with this name the cache has."""
        return len(list(self.folder.glob(f"{name}*-cache")))

    def listen(self, event: str, **_: Any) -> None:
        self.hits += event == f"{_EVENTS}hits"


@pytest.fixture
def cache(tmp_path) -> Iterator[Cache]:
    former = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", *_SETTINGS)}
    found = Cache(tmp_path)
    for name, value in (_SETTINGS | {"jax_compilation_cache_dir": str(tmp_path)}).items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(found.listen)
    yield found
    jax.monitoring.unregister_event_listener(found.listen)
    for name, value in former.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run(function: Callable[..., Any], arrays: dict[str, jax.Array], specs: dict[str, P]) -> Any:
    """Return results on an automatic mesh, from a program whose name is always the same."""

    def compute(arrays: dict[str, jax.Array]) -> Any:
        return function(**arrays)

    mesh = make_mesh("automatic")
    placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in arrays.items()}
    return jax.block_until_ready(jax.jit(compute)(placed))


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        finite = np.where(np.isfinite(other), other, 0)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(finite).max() + 1e-6)


def differ(one: Any, other: Any) -> bool:
    return any(not np.allclose(x, y, atol=1e-3) for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True))


def _sloped(constant: float) -> Callable[..., Any]:
    def attend(query, key, value):
        row = jnp.arange(query.shape[1], dtype=jnp.float32)
        away = jnp.abs(row[:, None] - row[None, :])
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / WIDTH**0.5 - constant * away[None, None]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    return fuse(attend)


def _within(width: int) -> Callable[..., Any]:
    def attend(query, key, value):
        row = jnp.arange(query.shape[1], dtype=jnp.int32)
        away = jnp.abs(row[:, None] - row[None, :])
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / WIDTH**0.5
        scores = jnp.where((away < width)[None, None], scores, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    return fuse(attend)


def _rows(constants: np.ndarray) -> Callable[..., Any]:
    """Return an attention function with an array constant that is known while tracing."""

    def attend(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / WIDTH**0.5 + constants[None, None, None, :]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    return fuse(attend)


def _options(function: Callable[..., Any], name: str, **others: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda value: functools.partial(function, **{name: value}, **others)


def _routed(is_causal: bool) -> Callable[..., Any]:
    def choose(query, key, value):
        del value
        return moba_routing(query, key, block_size=16, top_k=1, is_causal=is_causal).indices

    return choose


def _projected(scale: float) -> Callable[..., Any]:
    sizes = dict(query_heads=HEADS, key_heads=KEY_HEADS, head_dim=WIDTH, block_size=16)
    return lambda x, weights: fused_qkv_block_attention(x, weights, scale=scale, **sizes)


def _softly_capped(cap: float) -> Callable[..., Any]:
    return functools.partial(CALLS["paged"].bound(None), logits_soft_cap=cap)


def _moba_paged(scale: float) -> Callable[..., Any]:
    def attend(query, key_pages, value_pages, table, lengths, centroids):
        operands = (query, key_pages, value_pages, table, lengths, centroids)
        return moba_paged_attention(*operands, scale=scale, **_MOBA)

    return attend


# Each entry has the name of a call, a function from a constant to a function of the call's arrays, and two constants.
# Shapes do not depend on the constants.
PAIRS: dict[str, tuple[str, Callable[[Any], Callable[..., Any]], tuple[Any, Any]]] = {
    "block_diagonal, scale": ("block_diagonal", _options(block_diagonal_attention, "scale"), (0.25, 0.5)),
    "block_diagonal, is_causal": ("block_diagonal", _options(block_diagonal_attention, "is_causal"), (False, True)),
    "block_diagonal, block_size": ("block_diagonal", _options(block_diagonal_attention, "block_size"), (16, 20)),
    "block_diagonal, long blocks": (
        "block_diagonal", _options(block_diagonal_attention, "is_causal", block_size=512), (False, True),
    ),
    "moba, scale": ("moba", _options(moba_attention, "scale", **_MOBA), (0.25, 0.5)),
    "moba, is_causal": ("moba", _options(moba_attention, "is_causal", block_size=16, top_k=1), (False, True)),
    "moba_routing, is_causal": ("moba_routing", _routed, (False, True)),
    "key_convolution, activation": ("key_convolution", _options(key_convolution, "activation"), ("silu", None)),
    "key_convolution, residual": ("key_convolution", _options(key_convolution, "residual"), (True, False)),
    "fused_qkv, scale": ("fused_qkv", _projected, (0.25, 0.5)),
    "paged, scale": ("paged", lambda scale: functools.partial(CALLS["paged"].bound(None), scale=scale), (0.25, 0.5)),
    "paged, logits_soft_cap": ("paged", _softly_capped, (1.0, 2.0)),
    "moba_paged, scale": ("moba_paged", _moba_paged, (0.25, 0.5)),
    "fuse, a factor": ("fuse", _sloped, (0.25, 0.5)),
    "fuse, a width": ("fuse", _within, (5, 9)),
    "fuse, an array": ("fuse", _rows, (np.zeros(40, np.float32), np.arange(40, dtype=np.float32) / 9)),
}  # fmt: skip


DIFFERENTIATED = (
    "block_diagonal, scale", "block_diagonal, block_size", "moba, scale", "key_convolution, residual",
    "fused_qkv, scale", "fuse, a factor", "fuse, an array",
)  # fmt: skip


def assert_entries_apart(cache: Cache, functions: list[Callable[..., Any]], arrays: Any, specs: Any) -> None:
    """Assert that two programs differ in results and in cache entries, and that each entry is found again."""
    expected = [jax.jit(function)(**arrays) for function in functions]
    assert differ(*expected)
    for count, function in enumerate(functions, 1):
        assert_close(run(function, arrays, specs), expected[count - 1])
        assert cache.entries() == count
    jax.clear_caches()
    for count, function in enumerate(reversed(functions), 1):
        before = cache.hits
        assert_close(run(function, arrays, specs), expected[-count])
        assert cache.entries() == 2
        assert cache.hits > before


@pytest.mark.parametrize("name", PAIRS)
def test_programs_that_differ_in_a_constant_have_separate_cache_entries(cache, name):
    call_name, make, constants = PAIRS[name]
    call = CALLS[call_name]
    assert_entries_apart(cache, [make(x) for x in constants], call.arrays(4), batch_specs(call, "data", _POOLS))


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_that_differ_in_a_constant_have_separate_cache_entries(cache, name):
    call_name, make, constants = PAIRS[name]
    call = CALLS[call_name]

    def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **arrays: jax.grad(lambda x: jnp.sum(function(**x) ** 2))(arrays)

    functions = [gradients(make(x)) for x in constants]
    assert_entries_apart(cache, functions, call.arrays(4), batch_specs(call, "data", _POOLS))


def start(what: str, folder: Path, seed: int) -> subprocess.Popen[str]:
    """Start a process that runs `tests.division.division_programs` on four CPU devices with a compilation cache."""
    names = {name.upper(): str(int(value)) for name, value in _SETTINGS.items()}
    settings = names | {"JAX_COMPILATION_CACHE_DIR": str(folder), "PYTHONHASHSEED": str(seed)}
    settings |= {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.division.division_programs", what]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(output)


@pytest.mark.exhaustive
def test_programs_cached_by_one_process_are_found_by_another(tmp_path):
    first = result_of(start("programs", tmp_path, seed=1))
    second = result_of(start("programs", tmp_path, seed=2))
    assert first["missed"] >= len(first["results"]) > 0
    assert (second["missed"], second["found"]) == (0, first["missed"] + first["found"])
    assert first["results"] == second["results"]


def test_digests_of_all_operations_are_the_same_in_another_process(tmp_path):
    first, second = map(result_of, [start("digests", tmp_path, seed) for seed in (1, 2)])
    assert first == second
    kernels = {"triton_call"} if importlib.util.find_spec("triton") is not None else set()
    assert set(first) == CALLS.keys() - {"merge"} | kernels
    # Both calls that only route have the routing digest of "moba".
    assert first.pop("moba_routing") == first.pop("to_block_lists") == first["moba"][:1]
    every = [digest for digests in first.values() for digest in digests]
    assert len(set(every)) == len(every)


def test_digest_of_a_problem_with_an_address_is_never_the_same():
    """Objects that are only equal to themselves are shown by their address, which has no meaning in another process."""
    rule = Rule("named", repr(object()), (((),),), (((),),), (), frozenset())
    assert (digest_of(rule) != digest_of(rule)).any()
    known = dataclasses.replace(rule, problem="known")
    np.testing.assert_array_equal(digest_of(known), digest_of(known))


CHANGES = {
    "operation": "other", "problem": "other", "operands": ((("b",),),), "results": ((("b",),),), "sizes": (("b", 2),),
    "independent": frozenset("b"), "anchors": (0,), "is_anchored": True,
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Rule)])
def test_digest_depends_on_every_field_of_a_rule(field):
    rule = Rule("named", "known", (((),),), (((),),), (), frozenset())
    other = dataclasses.replace(rule, **{field: CHANGES[field]})
    assert (digest_of(rule) != digest_of(other)).any()


def test_digest_depends_on_the_matmul_precision():
    rule = Rule("named", "known", (((),),), (((),),), (), frozenset())
    with jax.default_matmul_precision("bfloat16"):
        other = digest_of(rule)
    assert (digest_of(rule) != other).any()


def test_digest_depends_on_the_library_version_where_the_cache_ignores_functions(cache, monkeypatch):
    del cache
    rule = Rule("named", "known", (((),),), (((),),), (), frozenset())
    digest = digest_of(rule)
    np.testing.assert_array_equal(digest_of(rule), digest)
    monkeypatch.setattr(rules, "_library", lambda: ("other", None))
    assert (digest_of(rule) != digest).any()
