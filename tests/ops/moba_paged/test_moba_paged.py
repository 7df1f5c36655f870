"""MoBA over a paged cache: every implementation against loops in numpy, and against MoBA over whole sequences."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import moba_attention, moba_paged_attention, paged_attention
from blockdiag.ops.moba_paged import xla as xla_moba_paged
from blockdiag.triton_kernels.moba_paged import plans as triton_moba_paged
from tests.ops.paged_support import EIGHT_BITS, INTEGERS, PagedCase, poison_of
from tests.support import compiled_quickly, largest_error

IMPLEMENTATIONS = ("reference", "xla", "triton")
ARGUMENTS = ("query", "key_pages", "value_pages", "page_table", "kv_lengths", "query_lengths")
SCALES = ("query_scale", "key_scale", "value_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoBAPagedCase:
    """A call of paged attention and the blocks that its queries choose from."""

    paged: PagedCase
    block_size: int = 16
    top_k: int = 3

    @functools.cached_property
    def centroids(self) -> np.ndarray:
        """Return mean keys, float32 [B, max_blocks, K, H]; incomplete blocks have NaN or huge numbers."""
        problem, size = self.paged.problem, self.block_size
        shape = (problem.batch, -(-problem.max_keys // size), problem.key_heads, problem.head_dim)
        result = np.where(np.arange(shape[1]) % 2 == 0, np.nan, 1e30).astype(np.float32)[None, :, None, None]
        result = np.broadcast_to(result, shape).copy()
        key = self.paged.dense["key"].astype(np.float64)
        if self.paged.key_scale == "token":
            key = key * self.paged.dense["key_scale"][..., None]
        for b, length in enumerate(self.paged.kv_lengths):
            for c in range(length // size):
                result[b, c] = key[b, c * size : (c + 1) * size].mean(axis=0)
        return result

    @functools.cached_property
    def seen(self) -> np.ndarray:
        """Return the keys that each query of each head sees, bool [B, T, N, longest]."""
        problem, size, lengths = self.paged.problem, self.block_size, self.paged.kv_lengths
        seen = np.zeros((problem.batch, problem.query_tokens, problem.query_heads, max(lengths)), bool)
        for b, t, n in np.ndindex(*seen.shape[:3]):
            num_queries = self.paged.query_lengths[b] if self.paged.query_lengths else problem.query_tokens
            position = lengths[b] - num_queries + t
            if t >= num_queries or position < 0:
                continue
            own = position // size
            seen[b, t, n, own * size : position + 1] = True
            centroids = self.centroids[b, :own, n // problem.group_size].astype(np.float64)
            scores = centroids @ self.paged.dense["query"][b, t, n].astype(np.float64)
            order = np.argsort(-scores)
            if len(order) > self.top_k - 1 > 0:
                last, left = scores[order[self.top_k - 2 : self.top_k]]
                assert last - left > 1e-5, "the blocks of this case's queries are left open by rounding"
            for c in order[: self.top_k - 1]:
                seen[b, t, n, c * size : (c + 1) * size] = True
        return seen

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Return arrays of the public function, with poison in keys and values that no query of their head sees."""
        problem, paged = self.paged.problem, self.paged
        groups = (problem.key_heads, problem.group_size)
        by_head = self.seen.reshape(*self.seen.shape[:2], *groups, self.seen.shape[-1])
        is_unseen = ~by_head.any(axis=(1, 3)).swapaxes(1, 2)  # [B, longest, K]
        arguments = {name: x for name, x in paged.arguments().items() if name in (*ARGUMENTS, *SCALES)}
        names = {"key": "key_pages", "value": "value_pages"}
        names |= {name: name for name in SCALES[1:] if getattr(paged, name) == "token"}
        for name, argument in names.items():
            rows = paged.dense[name].copy()
            rows[is_unseen] = poison_of(rows.dtype)
            arguments[argument] = jnp.asarray(paged.paged(rows))
        return arguments | {"key_centroids": jnp.asarray(self.centroids)}

    @functools.cached_property
    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Return output and log-sum-exp in float64, query by query and head by head."""
        return self._by_loops(np.float64, lambda x: x)

    @functools.cached_property
    def naive_output(self) -> np.ndarray:
        """Return the output of dense computations in the output's own dtype; see `paged_support.naive_output`."""
        dtype = jnp.dtype(self.paged.problem.output_dtype)
        return self._by_loops(np.float32, lambda x: x.astype(dtype).astype(np.float32))[0]

    def _by_loops(self, wide: Any, rounded: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        problem, paged = self.paged.problem, self.paged
        dense = {name: x.astype(wide) for name, x in paged.dense.items()}
        output = np.zeros((*self.seen.shape[:3], problem.value_dim), wide)
        log_sum = np.full(self.seen.shape[:3], -np.inf, wide)
        key, value = dense["key"], dense["value"]
        if paged.score_scale:
            key = key * dense["score_scale"][:, None, :, None]
        if paged.key_scale == "token":
            key = key * dense["key_scale"][..., None]
        if paged.value_scale != "none":
            scale = dense["value_scale"]
            value = value * (scale[:, None, :, None] if paged.value_scale == "head" else scale[..., None])
        key, value, query = rounded(key), rounded(value), rounded(dense["query"])
        for b, t, n in np.argwhere(self.seen.any(axis=-1)):
            k, keys = n // problem.group_size, self.seen[b, t, n]
            scores = rounded(wide(problem.scale) * (key[b, keys, k] @ query[b, t, n]))
            exponentials = np.exp(scores - scores.max())
            log_sum[b, t, n] = scores.max() + np.log(exponentials.sum())
            output[b, t, n] = rounded(rounded(exponentials / exponentials.sum()) @ value[b, keys, k])
        return output, log_sum

    def attend(self, implementation: str | None, **arrays: Any) -> tuple[jax.Array, jax.Array]:
        """Call the public function, compiled once, on traced arrays."""
        arguments = self.arguments | arrays
        return compiled_call(implementation, self.block_size, self.top_k, self.paged.scale)(arguments)

    @functools.cache  # noqa: B019
    def results(self, implementation: str) -> tuple[jax.Array, jax.Array]:
        """Return output and log-sum-exp, computed once for all tests."""
        return self.attend(implementation)

    def check(self, results: tuple[Any, Any]) -> None:
        """Assert that results, which are computed in float32, err by little more than their own rounding."""
        output, _ = results
        true, _ = self.exact
        unit, eps = float(jnp.finfo(output.dtype).eps), float(jnp.finfo(self._wide).eps)
        assert largest_error(output, true) <= (unit + 32 * eps) * (1 + np.abs(true).max())
        self._check_rest(results)

    def check_products(self, results: tuple[Any, Any]) -> None:
        """Assert that results of matrix products err by at most twice the naive error plus two units."""
        output, _ = results
        true, _ = self.exact
        unit, eps = float(jnp.finfo(output.dtype).eps), float(jnp.finfo(self._wide).eps)
        allowed = 2 * largest_error(self.naive_output, true) + 2 * (unit * np.abs(true).max() + 16 * eps)
        assert largest_error(output, true) <= allowed
        self._check_rest(results)

    @property
    def _wide(self) -> Any:
        return jnp.float64 if self.paged.problem.query_dtype == "float64" else jnp.float32

    def _check_rest(self, results: tuple[Any, Any]) -> None:
        (output, log_sum), (true, true_log_sum) = results, self.exact
        eps = float(jnp.finfo(self._wide).eps)
        assert output.dtype == self.paged.problem.output_dtype and output.shape == true.shape
        assert log_sum.dtype == self._wide and log_sum.shape == true_log_sum.shape
        np.testing.assert_array_equal(np.asarray(log_sum) == -np.inf, true_log_sum == -np.inf)
        log_sum, true_log_sum = (np.where(true_log_sum == -np.inf, 0, x) for x in (log_sum, true_log_sum))
        assert largest_error(log_sum, true_log_sum) <= 32 * eps * (1 + np.abs(true_log_sum).max())


@functools.cache
def compiled_call(implementation: str | None, block_size: int, top_k: int, scale: float | None) -> Any:
    options = dict(block_size=block_size, top_k=top_k, scale=scale, return_residual=True)
    return compiled_quickly(
        lambda arguments: moba_paged_attention(**arguments, **options, implementation=implementation)
    )


FEW = PagedCase(kv_lengths=(70, 16, 0, 1, 33), query_heads=4, key_heads=2)
CASES = {
    "pages of 16": MoBAPagedCase(paged=FEW),
    "pages of 1, four queries": MoBAPagedCase(
        paged=dataclasses.replace(FEW, kv_lengths=(40, 2, 64), page_size=1, query_tokens=4, query_heads=2), top_k=2
    ),
    "pages of 3, edges of blocks, fewer queries": MoBAPagedCase(
        paged=PagedCase(
            kv_lengths=(95, 96, 97, 31), query_lengths=(4, 1, 0, 2), query_tokens=4, page_size=3, head_dim=24
        ),
        block_size=32,
        top_k=2,
    ),
    "pages of 64, blocks of 48": MoBAPagedCase(
        paged=PagedCase(kv_lengths=(150, 47, 48, 49), page_size=64, value_dim=24, scale=0.4), block_size=48, top_k=3
    ),
    "contiguous, bfloat16": MoBAPagedCase(
        paged=PagedCase(kv_lengths=(70, 20), page_size=None, dtype="bfloat16", query_heads=5)
    ),
    "own block only": MoBAPagedCase(paged=FEW, top_k=1),
    "more than there are": MoBAPagedCase(paged=dataclasses.replace(FEW, page_size=64), top_k=64),
    "tiles of a block": MoBAPagedCase(
        paged=PagedCase(kv_lengths=(300, 445), page_size=64, query_tokens=2), block_size=144, top_k=2
    ),
    "e4m3, scales of tokens": MoBAPagedCase(
        paged=PagedCase(
            kv_lengths=(70, 33), page_size=3, dtype="bfloat16", cache_dtype="float8_e4m3fn", key_heads=2,
            key_scale="token", value_scale="token",
        )
    ),
    "e5m2, scales of heads": MoBAPagedCase(
        paged=PagedCase(
            kv_lengths=(70, 33), dtype="float16", cache_dtype="float8_e5m2", score_scale=True, value_scale="head",
            query_tokens=2,
        )
    ),
    "int8, scales of tokens": MoBAPagedCase(
        paged=PagedCase(
            kv_lengths=(70, 33), page_size=3, dtype="bfloat16", cache_dtype="int8", key_heads=2, key_scale="token",
            value_scale="token",
        )
    ),
    "int8, scales of heads": MoBAPagedCase(
        paged=PagedCase(
            kv_lengths=(70, 33), dtype="float16", cache_dtype="int8", score_scale=True, value_scale="head",
            query_tokens=2, page_size=None,
        )
    ),
    "eight bits": MoBAPagedCase(
        paged=PagedCase(
            kv_lengths=(70, 33), dtype="float8_e4m3fn", cache_dtype="float8_e5m2", score_scale=True, page_size=None
        ),
        top_k=2,
    ),
    "float64": MoBAPagedCase(paged=dataclasses.replace(FEW, dtype="float64", cache_dtype="float8_e4m3fn")),
    "nothing": MoBAPagedCase(paged=PagedCase(kv_lengths=(0, 0), page_size=4)),
}  # fmt: skip
# The kernel of the scores cannot choose from so many candidates itself. Only GPUs run this case: interpreters are slow.
MANY_BLOCKS = MoBAPagedCase(paged=PagedCase(kv_lengths=(33_000, 70)), top_k=4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_output_and_residual_are_accurate(implementation, name):
    case = CASES[name]
    if name == "float64":
        with jax.enable_x64(True):
            if implementation == "triton":
                with pytest.raises(NotImplementedError, match="`query` is float64"):
                    case.attend(implementation)
            else:
                case.check(case.attend(implementation))
        return
    case.check(case.results(implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repeated_calls_agree_bitwise(implementation):
    case = CASES["pages of 16"]
    for one, other in zip(case.results(implementation), case.attend(implementation), strict=True):
        np.testing.assert_array_equal(one, other)


@functools.cache
def last_rows_of_moba(tokens: int) -> tuple[dict[str, Any], tuple[jax.Array, jax.Array]]:
    """Return a contiguous cache of two sequences with mean keys, and the last rows of MoBA over whole sequences."""
    generator = np.random.default_rng(2)
    query, key, value = (jnp.asarray(generator.normal(size=(2, 83, n, 16)), jnp.float32) for n in (4, 2, 2))
    options = dict(block_size=16, top_k=3, return_residual=True)
    output, log_sum = moba_attention(query, key, value, **options)
    centroids = key[:, :80].reshape(2, 5, 16, 2, 16).mean(axis=2)
    arguments = dict(query=query[:, -tokens:], key_pages=key, value_pages=value, page_table=None)
    arguments |= dict(kv_lengths=jnp.full(2, 83, jnp.int32), key_centroids=centroids)
    return arguments, (output[:, -tokens:], log_sum[:, -tokens:])


@pytest.mark.parametrize(("implementation", "tokens"), [("reference", 1), ("xla", 9), ("triton", 4)])
def test_results_match_the_last_rows_of_moba_attention(implementation, tokens):
    """Nine queries begin in the block before the last one."""
    arguments, expected = last_rows_of_moba(tokens)
    results = moba_paged_attention(
        **arguments, block_size=16, top_k=3, implementation=implementation, return_residual=True
    )
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_top_k_of_all_blocks_matches_paged_attention(implementation):
    case = CASES["more than there are"]
    arguments = {name: x for name, x in case.arguments.items() if name != "key_centroids"}
    expected = compiled_quickly(functools.partial(paged_attention, return_residual=True, implementation="xla"))
    for actual, wanted in zip(case.results(implementation), expected(**arguments), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def chosen_blocks(implementation: str, centroids: np.ndarray, top_k: int) -> set[int]:
    """Return the blocks that a query of ones in the last of nine blocks sees.

    Each block's values are nonzero in a separate column.
    """
    value = jnp.repeat(jnp.eye(9, 16), 16, axis=0)[None, :, None]
    output = moba_paged_attention(
        jnp.ones((1, 1, 1, 8)),
        jnp.zeros((1, 144, 1, 8)),
        value,
        None,
        jnp.asarray([144], jnp.int32),
        jnp.broadcast_to(jnp.asarray(centroids, jnp.float32)[None, :, None, None], (1, 8, 1, 8)),
        block_size=16,
        top_k=top_k,
        implementation=implementation,
    )
    return set(np.flatnonzero(np.asarray(output).ravel() > 0).tolist())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_choose_the_later_block_and_nan_is_never_chosen(implementation):
    choose = functools.partial(chosen_blocks, implementation)
    assert choose([1, 1, 1, 0, 1, 0, 0, 0], 3) == {8, 4, 2}, "of equal scores the later block"
    assert choose([-1, 0.0, -0.0, -1, -0.0, -2, -1, -1], 3) == {8, 4, 2}, "0 too, of either sign"
    assert choose([np.nan, 1, np.inf, -np.inf, np.nan, -3, -2, np.nan], 3) == {8, 2, 1}, "NaN is below all"
    assert choose([np.nan, 1, 2, -np.inf, np.nan, -3, -2, np.nan], 9) == {8, 2, 1, 6, 5, 3}, "NaN is never chosen"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_out_of_range_lengths_and_pages_are_clipped(implementation):
    """The interpreter refuses to read out of bounds. Results match those of clipped lengths and pages."""
    case = CASES["pages of 3, edges of blocks, fewer queries"]
    problem = case.paged.problem
    wild = np.random.default_rng(5).choice([-(2**31), -7, 2**31 - 1], (problem.batch, problem.max_pages))
    lengths, queries = (jnp.asarray(x, jnp.int32) for x in ([2**31 - 1, -5, 97, 31], [-1, 99, 4, 2]))
    tame = dict(
        page_table=jnp.clip(jnp.asarray(wild, jnp.int32), 0, problem.num_pages - 1),
        kv_lengths=jnp.clip(lengths, 0, problem.max_keys),
        query_lengths=jnp.clip(queries, 0, problem.query_tokens),
    )
    bad = dict(page_table=jnp.asarray(wild, jnp.int32), kv_lengths=lengths, query_lengths=queries)
    for one, other in zip(case.attend(implementation, **bad), case.attend(implementation, **tame), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["e4m3, scales of tokens", "contiguous, bfloat16"])
def test_vmap_matches_single_calls(name):
    """Elements have separate caches or share one."""
    case = CASES[name]
    arguments = {name: x for name, x in case.arguments.items() if x is not None}
    queries = jnp.stack([arguments["query"], arguments["query"][..., ::-1]])
    attend = functools.partial(
        moba_paged_attention, block_size=16, top_k=case.top_k, page_table=arguments.pop("page_table", None)
    )
    del arguments["query"]
    own = jax.tree.map(lambda x: jnp.stack([x, x]), arguments)
    one = compiled_quickly(attend)
    expected = [one(query=q, **arguments) for q in queries]
    for mapped, others in ((None, arguments), (0, own)):
        function = jax.vmap(lambda q, others: attend(query=q, **others), in_axes=(0, mapped))
        results = compiled_quickly(function)(queries, others)
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.astype(jnp.float32), wanted.astype(jnp.float32), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_explicit_mesh_matches_one_device(is_contiguous):
    arguments, expected = last_rows_of_moba(4)
    arguments = dict(arguments)
    if not is_contiguous:
        arguments["page_table"] = jnp.arange(2, dtype=jnp.int32)[:, None]
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        rows = P("rows", None, "heads", None)
        arguments["query"] = jax.sharding.reshard(arguments["query"], rows)
        for name in ("key_pages", "value_pages"):
            spec = rows if is_contiguous else P(None, None, "heads", None)
            arguments[name] = jax.sharding.reshard(arguments[name], spec)
        results = moba_paged_attention(**arguments, block_size=16, top_k=3, return_residual=True)
        assert jax.typeof(results[0]).sharding.spec == rows
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.division("batch", operation="moba_paged", kind="manual")
def test_export_and_shard_map_match_one_device():
    arguments, expected = last_rows_of_moba(4)
    attend = functools.partial(moba_paged_attention, block_size=16, top_k=3, return_residual=True)
    names = tuple(name for name, x in arguments.items() if x is not None)
    operands = tuple(jnp.asarray(arguments[name]) for name in names)

    def call(*operands):
        return attend(page_table=None, **dict(zip(names, operands, strict=True)))

    exported = jax.export.deserialize(jax.export.export(jax.jit(call))(*operands).serialize())
    # Caches are contiguous, so each device has separate sequences.
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("rows"), out_specs=P("rows")))
    for results in (exported.call(*operands), sharded(*operands)):
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_differentiation_raises_type_error():
    arguments, _ = last_rows_of_moba(1)
    query = arguments["query"]

    def total(query):
        return moba_paged_attention(**arguments | {"query": query}, block_size=16, top_k=3).sum()

    with pytest.raises(TypeError, match="moba_paged_attention is for inference"):
        jax.grad(total)(query)
    assert jnp.isfinite(total(jax.lax.stop_gradient(query)))


@pytest.mark.parametrize("choice", [2, 32])
def test_blocks_scored_in_several_tiles_are_accurate(monkeypatch, choice):
    """Kernels process mean keys, queries and scores in several steps, and a separate kernel chooses."""
    # A unique scale avoids programs of other tests, which have larger tiles.
    case = CASES["pages of 16"]
    paged = dataclasses.replace(case.paged, kv_lengths=(120, 60), query_heads=6, scale=0.3 + choice / 1024)
    case = dataclasses.replace(case, paged=paged)
    for name, size in (("SCORED_BLOCKS", 2), ("SCORED_ROWS", 2), ("CHOICE_BLOCKS", choice), ("FEW_BLOCKS", 1)):
        monkeypatch.setattr(triton_moba_paged, name, size)
    case.check(case.attend("triton"))


def test_keys_gathered_in_several_steps_are_accurate(monkeypatch):
    # A unique scale avoids programs of other tests, which have larger tiles.
    case = CASES["tiles of a block"]
    case = dataclasses.replace(case, paged=dataclasses.replace(case.paged, scale=0.3))
    monkeypatch.setattr(xla_moba_paged, "_GATHERED", 1)
    case.check(case.attend("xla"))


BAD = {
    "`query` must have shape": dict(query=jnp.zeros((2, 4, 16))),
    "`key_centroids` must be a float32 array": dict(key_centroids=jnp.zeros((2, 5, 2, 16), jnp.bfloat16)),
    "`key_centroids` must have shape": dict(key_centroids=jnp.zeros((2, 5, 4, 16))),
    "`key_centroids` must have rows for the 5 blocks": dict(key_centroids=jnp.zeros((2, 4, 2, 16))),
    "`block_size` must be a multiple of 16": dict(block_size=24),
    "`top_k` must be an integer": dict(top_k=0),
    "`kv_lengths` must lie in": dict(kv_lengths=jnp.asarray([84, 1], jnp.int32)),
    "`key_scale` must have shape": dict(key_scale=jnp.ones(3)),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_raise_value_error(message):
    arguments, _ = last_rows_of_moba(1)
    with pytest.raises(ValueError, match=message):
        moba_paged_attention(**arguments | {"block_size": 16, "top_k": 3} | BAD[message])


def test_empty_calls_return_zeros():
    arguments, _ = last_rows_of_moba(1)
    output, log_sum = moba_paged_attention(
        **arguments | {"query": jnp.zeros((2, 0, 4, 16))}, block_size=16, top_k=3, return_residual=True
    )
    assert output.shape == (2, 0, 4, 16) and log_sum.shape == (2, 0, 4)
    nothing = dict(key_pages=jnp.zeros((2, 0, 2, 16)), value_pages=jnp.zeros((2, 0, 2, 8)))
    nothing |= dict(kv_lengths=jnp.zeros(2, jnp.int32), key_centroids=jnp.zeros((2, 0, 2, 16)))
    output, log_sum = moba_paged_attention(**arguments | nothing, block_size=16, top_k=3, return_residual=True)
    assert output.shape == (2, 1, 4, 8) and not output.any() and (log_sum == -jnp.inf).all()


def test_cases_cover_every_eight_bit_dtype():
    assert {case.paged.cache_dtype for case in CASES.values()} >= {*EIGHT_BITS, *INTEGERS}


def test_pages_without_values_raise_value_error():
    arguments, _ = last_rows_of_moba(1)
    with pytest.raises(ValueError, match="`value_pages` must be an array, got None"):
        moba_paged_attention(**arguments | {"block_size": 16, "top_k": 3, "value_pages": None})
