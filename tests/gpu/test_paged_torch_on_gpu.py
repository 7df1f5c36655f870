"""Paged caches in torch on a GPU: equality with JAX, in-place updates and CUDA graphs, without host synchronisation."""

import dataclasses
import functools
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.ops.paged import checks  # noqa: E402
from blockdiag.torch import (  # noqa: E402
    append_to_pages,
    merge_attention_states,
    moba_paged_attention,
    paged_attention,
)
from tests.gpu.gate import Gate  # noqa: E402
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory  # noqa: E402
from tests.gpu.test_moba_torch_on_gpu import captured  # noqa: E402
from tests.ops.append import test_append  # noqa: E402
from tests.ops.append_support import assert_appended  # noqa: E402
from tests.ops.moba_paged import test_moba_paged, test_prompts  # noqa: E402
from tests.ops.paged_support import MIXED_CASES, PROMPT_CASES, PagedCase, assert_accurate  # noqa: E402
from tests.torch import test_append as torch_append  # noqa: E402
from tests.torch import test_moba_paged as torch_moba  # noqa: E402
from tests.torch.paged_torch_support import (  # noqa: E402
    arguments_of,
    as_arrays,
    assert_packed_accurate,
    operator_arguments,
    packed_arguments_of,
    to_tensors,
)
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]

OPERATORS = torch.ops.blockdiag
GPU = "cuda:0"

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
DECODE = PagedCase(
    kv_lengths=(0, 1, 63, 64, 65, 500), query_heads=8, key_heads=2, head_dim=128, dtype="bfloat16", page_size=16
)
replace = functools.partial(dataclasses.replace, DECODE)
LATENT = replace(query_heads=64, key_heads=1, is_latent=True, head_dim=576, value_dim=512, scale=0.07)
latent = functools.partial(dataclasses.replace, LATENT)
CASES = {
    "bfloat16, pages of 16": DECODE,
    "float16, pages of 1, split": replace(dtype="float16", page_size=1, num_splits=3, head_dim=64),
    "e4m3, pages of 3, split": replace(cache_dtype=E4M3, page_size=3, num_splits=4),
    "e5m2, pages of 64, fixed splits": replace(cache_dtype=E5M2, page_size=64, split_size=128, dtype="float16"),
    "drafts, everything": replace(
        query_tokens=4, query_lengths=(4, 1, 0, 3, 4, 2), window=(200, None), soft_cap=5.0, sinks=True, num_splits=2,
        score_scale=True, key_scale="token", value_scale="token", cache_dtype=E4M3, value_dim=64, scale=0.1,
    ),
    "contiguous, scales of heads": replace(
        page_size=None, score_scale=True, value_scale="head", cache_dtype=E4M3, is_causal=False, window=(90, 7),
        query_tokens=2,
    ),
    "int8, scales of tokens": replace(cache_dtype="int8", key_scale="token", value_scale="token", num_splits=3),
    "int8, scales of heads, float16": replace(
        cache_dtype="int8", score_scale=True, value_scale="head", dtype="float16", page_size=64
    ),
    "int8, drafts, everything": replace(
        query_tokens=4, query_lengths=(4, 1, 0, 3, 4, 2), window=(200, None), soft_cap=5.0, sinks=True, num_splits=2,
        score_scale=True, key_scale="token", value_scale="token", cache_dtype="int8", value_dim=64, page_size=1,
    ),
    "int8, sixty-four queries": replace(
        cache_dtype="int8", key_scale="token", value_scale="token", query_tokens=64, kv_lengths=(64, 200)
    ),
    "latent, int8, scales of tokens": latent(cache_dtype="int8", key_scale="token", num_splits=3),
    "latent, int8, few heads": latent(query_heads=16, cache_dtype="int8", key_scale="token", page_size=64),
    "wide heads, int8": replace(
        head_dim=512, query_heads=16, page_size=64, cache_dtype="int8", score_scale=True, value_scale="token"
    ),
    "queries of eight bits": replace(dtype=E4M3, score_scale=True, query_heads=10),
    "float32": replace(dtype="float32", head_dim=40, value_dim=24, query_heads=2, kv_lengths=(70, 3)),
    "latent": LATENT,
    "latent, 128 heads, pages of 64": latent(query_heads=128, page_size=64, num_splits=2),
    "latent, e4m3, scales of tokens": latent(cache_dtype=E4M3, key_scale="token", num_splits=3),
    "latent, e4m3, 128 heads, pages of 64": latent(
        cache_dtype=E4M3, key_scale="token", query_heads=128, page_size=64, score_scale=True
    ),
    "latent, e5m2, float16, pages of 1": latent(cache_dtype=E5M2, dtype="float16", page_size=1, split_size=64),
    "latent, drafts, window, sinks": latent(
        query_tokens=4, query_lengths=(4, 1, 0, 3, 4, 2), window=(200, None), sinks=True, num_splits=2, page_size=64,
        soft_cap=9.0,
    ),
    "latent, e4m3, drafts, window, sinks": latent(
        query_tokens=4, query_lengths=(4, 1, 0, 3, 4, 2), window=(200, None), sinks=True, num_splits=2,
        cache_dtype=E4M3, key_scale="token",
    ),
    "latent, short prompts": latent(query_tokens=40, kv_lengths=(40, 0, 70, 500), query_heads=16),
    "latent, float16, pages of 3": latent(page_size=3, dtype="float16", query_tokens=2),
    "latent, pages of 32, fixed splits": latent(page_size=32, split_size=128),
    "latent, pages of 32, two key heads": latent(page_size=32, key_heads=2, num_splits=2),
    "latent, few heads, contiguous": latent(query_heads=8, page_size=None, num_splits=3),
    "latent, few heads, e4m3": latent(query_heads=16, cache_dtype=E4M3, key_scale="token"),
    "latent, not causal": latent(is_causal=False, window=(90, 7), query_tokens=2, page_size=64),
    "latent of eight bits": latent(dtype=E4M3, score_scale=True),
    "wide heads": replace(head_dim=512, query_heads=16, page_size=64, num_splits=2),
    "wide heads, e4m3, many queries": replace(head_dim=512, query_tokens=16, cache_dtype=E4M3, value_scale="head"),
    "wide heads, many queries": replace(head_dim=512, query_tokens=16, window=(60, None), kv_lengths=(70, 500, 16)),
    "other wide heads": replace(head_dim=576, value_dim=264, query_heads=16, dtype="float16"),
    "wide heads, float32": replace(dtype="float32", head_dim=320, value_dim=264, query_heads=2, kv_lengths=(70, 3)),
}  # fmt: skip
FULL = CASES["drafts, everything"]


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def attend(arguments, **more):
    """Return output and log-sum-exp."""
    return paged_attention(**arguments, **more, return_residual=True)


def in_jax(case):
    """Return output and log-sum-exp of the JAX function."""
    splits = {"split_size": case.split_size} if case.split_size else {"num_splits": case.num_splits}
    return blockdiag.paged_attention(**case.arguments(), **splits, return_residual=True)


# --- paged attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_native_paged_attention_is_accurate_and_equals_jax_bitwise(name):
    case = CASES[name]
    arguments = arguments_of(case, GPU)
    poison_free_memory()
    native = attend(arguments)
    assert all(x.is_cuda for x in native)
    assert_accurate(case, as_arrays(native))
    poison_free_memory()
    assert_same_bits(attend(arguments), native)
    assert_same_bits(in_jax(case), native)
    assert_same_bits(attend(arguments, via="jax"), native)
    # Eager calls bypass the registered operator.
    assert_same_bits(OPERATORS.paged_attention(*operator_arguments(arguments)), native)


def test_splits_change_only_rounding_and_a_fixed_split_size_is_independent_of_the_batch():
    case = replace(kv_lengths=(500, 3, 129), cache_dtype=E4M3)
    for num_splits in (None, 1, 2, 8):
        assert_accurate(case, as_arrays(attend(arguments_of(case, GPU) | {"num_splits": num_splits})))
    arguments = arguments_of(dataclasses.replace(case, split_size=64), GPU)
    rows = ("query", "page_table", "kv_lengths")
    alone = attend(arguments | {name: arguments[name][:1] for name in rows})
    assert_same_bits(alone, [x[:1] for x in attend(arguments)])


@pytest.mark.parametrize("via", [None, "jax"])
def test_packed_queries_equal_batched_queries_bitwise(via):
    arguments, is_row = packed_arguments_of(FULL, GPU)
    results = attend(arguments, max_query_length=4, via=via)
    assert_same_bits([x[:-2] for x in results], [x[is_row] for x in attend(arguments_of(FULL, GPU))])
    assert not results[0][-2:].any() and results[1][-2:].isneginf().all()


@pytest.mark.parametrize("via", [None, "jax"])
@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"split_size": 64}], ids=str)
@pytest.mark.parametrize("name", MIXED_CASES)
def test_packed_prompts_beside_decoding_sequences_are_accurate(name, options, via):
    case = MIXED_CASES[name]
    arguments, is_row = packed_arguments_of(case, GPU)
    assert_packed_accurate(case, attend(arguments | {"num_splits": None} | options, via=via), is_row)


@pytest.mark.parametrize("name", PROMPT_CASES)
def test_prompts_computed_apart_are_accurate_and_equal_jax_bitwise(name, monkeypatch):
    """In packed form and as a batch, whose rows are the same."""
    monkeypatch.setattr(checks, "FEWEST_PROMPT_ROWS", 0)
    case = PROMPT_CASES[name]
    arguments, is_row = packed_arguments_of(case, GPU)
    arguments |= {"num_splits": None}
    poison_free_memory()
    packed = attend(arguments)
    assert_packed_accurate(case, packed, is_row)
    poison_free_memory()
    assert_same_bits(attend(arguments), packed)
    assert_same_bits(attend(arguments, via="jax"), packed)
    poison_free_memory()
    batch = attend(arguments_of(case, GPU) | {"num_splits": None})
    assert_accurate(case, as_arrays(batch))
    whole = dataclasses.replace(case, query_lengths=None)
    assert_accurate(whole, as_arrays(attend(arguments_of(whole, GPU) | {"num_splits": None})))


def test_kernel_of_prompts_runs_on_hopper(monkeypatch):
    """16-bit prompts with scales are left to the plain kernel."""
    monkeypatch.setattr(checks, "FEWEST_PROMPT_ROWS", 0)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    kernels = {
        "bfloat16, pages of 16": {"paged_prompts"},
        "scales": set(),
        "e4m3": {"paged_eight_bit_prompts"},
        "e4m3, scales by token, group of 6": {"paged_eight_bit_prompts"},
    }
    for name, kernel in kernels.items():
        arguments, _ = packed_arguments_of(PROMPT_CASES[name], GPU)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            attend(arguments | {"num_splits": None})
            torch.cuda.synchronize()
        found = {event.name for event in profile.events()} & {"paged_prompts", "paged_eight_bit_prompts"}
        assert found == (kernel if is_hopper else set()), name


def test_eight_bit_sums_over_a_long_cache_are_accurate():
    """Tensor cores alone would lose a part of a sum over 131,072 keys."""
    keys, tokens, heads, width = 131_072, 64, 4, 128
    generator = torch.Generator(GPU).manual_seed(0)
    draw = functools.partial(torch.randn, device=GPU, generator=generator)
    query = draw(1, tokens, heads, width).to(torch.float8_e4m3fn)
    key = draw(1, keys, 1, width).to(torch.float8_e4m3fn)
    value = (draw(1, keys, 1, width) + 2).to(torch.float8_e4m3fn)
    lengths = torch.tensor([keys], dtype=torch.int32, device=GPU)
    with unittest.mock.patch.object(checks, "FEWEST_PROMPT_ROWS", 0):
        output, log_sum = attend(
            dict(query=query, key_pages=key, value_pages=value, page_table=None, kv_lengths=lengths, is_causal=False)
        )
    scores = torch.einsum("tnh,jh->ntj", query[0].double(), key[0, :, 0].double()) * width**-0.5
    true = torch.einsum("ntj,jh->tnh", scores.softmax(-1), value[0, :, 0].double())
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = (powers * 256).to(torch.float8_e4m3fn).double()
    naive = torch.einsum("ntj,jh->tnh", rounded, value[0, :, 0].double()) / 256 / powers.sum(-1).T[..., None]
    allowed = 2 * (naive - true).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * true.abs().max()
    assert (output[0].double() - true).abs().max() <= allowed
    assert ((output[0].double() - true).mean() / true.mean()).abs() < 2**-8
    assert (log_sum[0].double() - scores.logsumexp(-1).T).abs().max() < 2**-10 * scores.logsumexp(-1).max()


def test_out_of_range_lengths_and_pages_are_clipped():
    """Integers that are not checked on a GPU are memory safe and have the same meaning as in JAX."""
    case = replace(query_tokens=3, kv_lengths=(60, 70, 5))
    problem, arguments = case.problem, arguments_of(case, GPU)
    integers = functools.partial(torch.tensor, dtype=torch.int32, device=GPU)
    table = arguments["page_table"].clone()
    table[0], table[1, 0] = 2**31 - 1, -(2**31)
    wild = dict(kv_lengths=integers([2**31 - 1, -5, 2]), query_lengths=integers([-1, 99, 2]), page_table=table)
    tame = dict(
        kv_lengths=integers([problem.max_keys, 0, 2]),
        query_lengths=integers([0, 3, 2]),
        page_table=table.clamp(0, problem.num_pages - 1),
    )
    # Every page holds numbers, so that reading it would change the result.
    pool = {name: torch.randn_like(arguments[name]) for name in ("key_pages", "value_pages")}
    assert_same_bits(attend(arguments | pool | wild), attend(arguments | pool | tame))
    packed = arguments | pool | {"query": torch.randn(6, 8, 128, device=GPU, dtype=torch.bfloat16)}
    found, expected = (attend(packed, query_offsets=integers([0, 1, 4, 6]), max_query_length=x) for x in (2, 3))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_misaligned_and_strided_operands_are_copied_except_pages():
    case = CASES["bfloat16, pages of 16"]
    arguments = arguments_of(case, GPU)
    expected = attend(arguments)
    query, pages = arguments["query"], arguments["key_pages"]
    misaligned = torch.empty(query.numel() + 1, device=GPU, dtype=query.dtype)[1:].view(query.shape).copy_(query)
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.stack([arguments["page_table"]] * 2, dim=-1)[..., 0]
    for changes in ({"query": misaligned}, {"query": transposed}, {"page_table": table}):
        assert_same_bits(attend(arguments | changes), expected)
    slice_of_both = torch.stack([pages, pages], dim=1)[:, 0]
    late = torch.empty(pages.numel() + 1, device=GPU, dtype=pages.dtype)[1:].view(pages.shape)
    for wrong, message in ((slice_of_both, "must be contiguous"), (late, "must start at a multiple of 16 bytes")):
        with pytest.raises(ValueError, match=f"`key_pages` {message}"):
            paged_attention(**(arguments | {"key_pages": wrong}))
    with pytest.raises(ValueError, match=r"`kv_lengths` must be on the device of `query`, cuda:0, got cpu"):
        paged_attention(**(arguments | {"kv_lengths": arguments["kv_lengths"].cpu()}))


def test_scalar_and_tensor_scales_equal_jax_bitwise():
    """A number, a tensor [] and a tensor [B, K] give the same bits as JAX."""
    case = CASES["e4m3, pages of 3, split"]
    arguments, names = arguments_of(case, GPU), ("key_scale", "value_scale", "query_scale")
    forms = (1.5, torch.tensor(1.5, device=GPU), torch.full((6, 2), 1.5, device=GPU))
    results = [attend(arguments | dict.fromkeys(names, form)) for form in forms]
    expected = blockdiag.paged_attention(
        **(case.arguments() | dict.fromkeys(names, 1.5)), num_splits=4, return_residual=True
    )
    for actual in results:
        assert_same_bits(actual, expected)


def test_float64_call_runs_through_jax():
    case = PagedCase(kv_lengths=(40, 3), dtype="float64", query_heads=2)
    with jax.enable_x64(True):
        assert_accurate(case, as_arrays(attend(arguments_of(case, GPU))))


def test_native_calls_do_not_import_jax():
    code = """
import sys
import torch
from blockdiag.torch import (
    Rotary, append_to_pages, merge_attention_states, moba_paged_attention, paged_attention, rotary_tables)
options = dict(device="cuda", dtype=torch.bfloat16)
pages = [torch.zeros(40, 16, 2, 128, **options) for _ in range(2)]
table = torch.arange(40, dtype=torch.int32, device="cuda").view(2, 20)
lengths = torch.tensor([300, 17], dtype=torch.int32, device="cuda")
new = torch.randn(2, 1, 2, 128, **options)
centroids = torch.zeros(2, 20, 2, 128, device="cuda")
rotary = Rotary(*rotary_tables(320, 128, device="cuda"))
append_to_pages(new, new, *pages, table, lengths, rotary=rotary, key_centroids=centroids, block_size=16)
query = torch.randn(2, 1, 8, 128, **options)
parts = [paged_attention(query, *pages, table, lengths, return_residual=True) for _ in range(2)]
output, _ = merge_attention_states(*zip(*parts))
other = moba_paged_attention(query, *pages, table, lengths, centroids, block_size=16, top_k=3)
torch.cuda.synchronize()
assert output.isfinite().all() and other.isfinite().all()
assert not {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib"}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_merged_states_of_parts_match_the_whole():
    """The first 160 keys and the rest, which has a separate page table, are merged."""
    case = replace(kv_lengths=(500, 400), page_size=16)
    arguments = arguments_of(case, GPU) | {"num_splits": None}
    first = arguments | dict(kv_lengths=torch.full((2,), 160, dtype=torch.int32, device=GPU))
    rest = arguments | dict(
        page_table=arguments["page_table"][:, 10:].contiguous(), kv_lengths=arguments["kv_lengths"] - 160
    )
    merged = merge_attention_states(*zip(attend(first), attend(rest), strict=True))
    assert_accurate(case, as_arrays(merged))


@pytest.mark.xdist_group("large pools")  # one at a time, because each needs gigabytes
def test_pools_of_more_than_2_to_the_31_elements_are_read_and_written_exactly():
    """Pages at the end of such a pool give the same bits as pages of a small pool."""
    sizes = (16, 8, 128)
    num_pages = 2**31 // (16 * 8 * 128) + 9
    generator = torch.Generator(GPU).manual_seed(0)
    small = torch.randn(9, *sizes, generator=generator, device=GPU).to(torch.float8_e4m3fn)
    pool = torch.zeros(num_pages, *sizes, dtype=torch.uint8, device=GPU)
    pool[-9:] = small.view(torch.uint8)
    pool = pool.view(torch.float8_e4m3fn)
    assert pool.numel() > 2**31
    query = torch.randn(1, 1, 32, 128, generator=generator, device=GPU, dtype=torch.bfloat16)
    order = torch.tensor([[8, 3, 0, 5, 7, 1]], dtype=torch.int32, device=GPU)
    lengths = torch.tensor([90], dtype=torch.int32, device=GPU)
    near = attend(dict(query=query, key_pages=small, value_pages=small, page_table=order, kv_lengths=lengths))
    table = order + (num_pages - 9)
    far = attend(dict(query=query, key_pages=pool, value_pages=pool, page_table=table, kv_lengths=lengths))
    assert near[0].isfinite().all()
    assert_same_bits(far, near)
    new = torch.full((1, 1, 8, 128), 2.0, device=GPU, dtype=torch.bfloat16)
    values = torch.zeros(pool.shape, dtype=torch.uint8, device=GPU).view(pool.dtype)
    append_to_pages(new, new, pool, values, table, lengths)
    written = pool[num_pages - 9 + 1, 89 % 16]
    assert (written.float() == 2).all()
    pool[num_pages - 9 + 1, 89 % 16] = small[1, 89 % 16]
    assert torch.equal(pool[-9:].view(torch.uint8), small.view(torch.uint8))
    assert not pool[:-9].view(torch.uint8).any()


# --- appending ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", test_append.CASES)
def test_append_is_exact_in_place_and_equals_jax_bitwise(name):
    case = test_append.CASES[name]
    arrays = case.arguments()
    results = []
    for more in ({}, {}, {"via": "jax"}):
        arguments = torch_append.arguments_of(case, arrays, GPU)
        places = {name: arguments[name].data_ptr() for name in case.written}
        returned = append_to_pages(**arguments, **more)
        assert all(x is arguments[name] for x, name in zip(returned, case.written, strict=True))
        assert {name: arguments[name].data_ptr() for name in case.written} == places
        results.append({name: to_numpy(arguments[name]) for name in case.written})
    assert_appended(case, results[0], arrays)
    in_jax = jax.jit(case.append("triton"))(**arrays)
    for other in (*results[1:], dict(zip(case.written, in_jax, strict=True))):
        for name in case.written:
            np.testing.assert_array_equal(
                results[0][name].view(np.uint8), np.asarray(other[name]).view(np.uint8), err_msg=name
            )


# --- MoBA over the cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", test_prompts.CASES)
def test_moba_paged_attention_of_prompts_is_accurate_and_equals_jax_bitwise(name):
    case = test_prompts.CASES[name]
    arguments = torch_moba.arguments_of(case, GPU)
    poison_free_memory()
    native = moba_paged_attention(**arguments, return_residual=True)
    case.check_products(as_arrays(native))
    options = dict(block_size=case.block_size, top_k=case.top_k, scale=case.paged.scale, return_residual=True)
    assert_same_bits(blockdiag.moba_paged_attention(**case.arguments, **options, implementation="triton"), native)
    poison_free_memory()
    assert_same_bits(moba_paged_attention(**arguments, return_residual=True), native)
    assert_same_bits(OPERATORS.moba_paged_attention(*torch_moba.operator_arguments(arguments)), native)


def test_cuda_graph_of_moba_prompts_reads_new_lengths_and_tables():
    case = test_prompts.CASES["heads of 128, blocks of 128"]
    arguments = torch_moba.arguments_of(case, GPU)

    def run():
        return moba_paged_attention(**arguments, return_residual=True)

    graph, results = captured(run)
    for changes in ({"kv_lengths": [640, 65, 127], "query_lengths": [300, 65, 1]}, {"kv_lengths": [0, 299, 128]}):
        for name, numbers in changes.items():
            arguments[name].copy_(torch.tensor(numbers, dtype=torch.int32))
        arguments["key_centroids"].nan_to_num_(0.0)
        for pages in ("key_pages", "value_pages"):
            arguments[pages].nan_to_num_(0.0)
        arguments["page_table"].copy_(arguments["page_table"].flip(1))
        graph.replay()
        found = [x.clone() for x in results]
        assert_same_bits(found, run())


@pytest.mark.parametrize("name", [name for name in test_moba_paged.CASES if name != "float64"])
def test_moba_paged_attention_is_accurate_and_equals_jax_bitwise(name):
    case = test_moba_paged.CASES[name]
    arguments = torch_moba.arguments_of(case, GPU)
    poison_free_memory()
    native = moba_paged_attention(**arguments, return_residual=True)
    case.check(as_arrays(native))
    options = dict(block_size=case.block_size, top_k=case.top_k, scale=case.paged.scale, return_residual=True)
    assert_same_bits(blockdiag.moba_paged_attention(**case.arguments, **options, implementation="triton"), native)
    poison_free_memory()
    assert_same_bits(moba_paged_attention(**arguments, return_residual=True), native)
    assert_same_bits(moba_paged_attention(**arguments, return_residual=True, via="jax"), native)
    assert_same_bits(OPERATORS.moba_paged_attention(*torch_moba.operator_arguments(arguments)), native)


# --- decode steps: streams and graphs -----------------------------------------------------------------------------


class Decoder:
    """A cache with lengths and new tokens, and a decode step on this static memory."""

    def __init__(self) -> None:
        generator = torch.Generator(GPU).manual_seed(0)
        normal = functools.partial(torch.randn, generator=generator, device=GPU, dtype=torch.bfloat16)
        self.state = {
            "key_pages": normal(60, 16, 2, 128).to(torch.float8_e4m3fn),
            "value_pages": normal(60, 16, 2, 128).to(torch.float8_e4m3fn),
            "key_scale": torch.rand(60, 16, 2, generator=generator, device=GPU) + 0.5,
            "key_centroids": torch.zeros(3, 20, 2, 128, device=GPU),
            "kv_lengths": torch.tensor([250, 15, 100], dtype=torch.int32, device=GPU),
            "page_table": torch.randperm(60, generator=generator, device=GPU).view(3, 20).int(),
            "query": normal(3, 1, 8, 128),
            "key": normal(3, 1, 2, 128),
            "value": normal(3, 1, 2, 128),
        }

    def step(self) -> list[torch.Tensor]:
        """Append a token to each sequence and attend to all keys, as packed queries and to chosen blocks."""
        state = dict(self.state)
        query, key, value = (state.pop(name) for name in ("query", "key", "value"))
        centroids = state.pop("key_centroids")
        state["kv_lengths"].add_(1)
        append_to_pages(key, value, **state, value_scale=0.5, key_centroids=centroids, block_size=32)
        shared = state | {"value_scale": 0.5}
        offsets = torch.arange(4, dtype=torch.int32, device=GPU)
        results = attend({"query": query, **shared})
        packed = attend({"query": query[:, 0], **shared}, query_offsets=offsets, query_scale=2.0)
        chosen = moba_paged_attention(query, **shared, key_centroids=centroids, block_size=32, top_k=2)
        return [*results, *packed, chosen]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_decode_step_does_not_synchronise_the_host():
    expected = Decoder().step()
    decoder = Decoder()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same_bits(results, expected)


def test_decode_step_runs_on_the_current_stream():
    """Inputs are written late on a side stream, so a kernel on another stream would read the old values."""
    expected = Decoder().step()
    late, source = Decoder(), Decoder()
    for tensor in late.state.values():
        tensor.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), Gate() as gate:
        for name, tensor in late.state.items():
            tensor.copy_(source.state[name])
        results = late.step()
        assert gate.is_closed(), "the host waited for the device"
        copies = [x.clone() for x in results]
    side.synchronize()
    assert_same_bits(copies, expected)


def test_cuda_graphs_read_new_lengths_tables_and_pages():
    """Replays with other lengths match eager steps in results, caches and centroids."""
    decoder, eager = Decoder(), Decoder()
    graph, results = captured(decoder.step)
    for name, tensor in decoder.state.items():
        tensor.copy_(eager.state[name])
    for seed in range(4):
        if seed == 2:
            # The sequences then have other pages, and one sequence is new.
            lengths = torch.tensor([0, 318, 31], dtype=torch.int32, device=GPU)
            table = eager.state["page_table"].flip(0, 1).contiguous()
            for one in (decoder, eager):
                one.state["kv_lengths"].copy_(lengths)
                one.state["page_table"].copy_(table)
        new = torch.randn(3, 1, 8, 128, device=GPU, dtype=torch.bfloat16)
        for one in (decoder, eager):
            one.state["query"].copy_(new)
            one.state["key"].copy_(new[:, :, :2])
        graph.replay()
        expected = eager.step()
        assert_same_bits(results, expected)
        for name, tensor in eager.state.items():
            assert_same_bits([decoder.state[name]], [tensor])
    assert eager.state["key_centroids"].any()


def test_capture_of_the_path_through_jax_raises_runtime_error():
    arguments = arguments_of(DECODE, GPU)
    attend(arguments, via="jax")
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"cannot capture the path through JAX"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        arguments["query"] + 1  # torch warns of empty graphs
        attend(arguments, via="jax")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # warnings of the compiler
def test_compiled_paged_attention_runs_in_cuda_graphs():
    arguments = arguments_of(DECODE, GPU) | {"key_scale": 0.5}
    query = arguments.pop("query")

    def layer(query):
        output, log_sum = paged_attention(query * 2, **arguments, return_residual=True)
        return 2 * output, log_sum

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    counters = torch._dynamo.utils.counters
    counters.clear()
    for seed in range(4):
        query = torch.randn(query.shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits([x.clone() for x in compiled(query)], layer(query))
    assert not counters["inductor"]["cudagraph_skips"]
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # warnings of the compiler
def test_a_compiled_step_writes_in_place():
    decoder, eager = Decoder(), Decoder()
    places = {name: x.data_ptr() for name, x in decoder.state.items()}
    compiled = torch.compile(decoder.step, fullgraph=True)
    for _ in range(2):
        assert_same_bits(compiled(), eager.step())
    assert {name: x.data_ptr() for name, x in decoder.state.items()} == places
    for name, tensor in eager.state.items():
        assert_same_bits([decoder.state[name]], [tensor])


def test_operators_pass_opcheck():
    case = replace(kv_lengths=(65, 300), num_splits=2)
    arguments = arguments_of(case, GPU)
    # NaN poison is not equal to itself.
    arguments |= {name: arguments[name].nan_to_num() for name in ("key_pages", "value_pages")}
    torch.library.opcheck(OPERATORS.paged_attention, tuple(operator_arguments(arguments)))
    new = torch_append.operator_arguments(**{name: x.to(GPU) for name, x in torch_append.good_tensors().items()})
    torch.library.opcheck(OPERATORS.append_to_pages, tuple(new))
    moba = {name: x.to(GPU) if isinstance(x, torch.Tensor) else x for name, x in torch_moba.small_arguments().items()}
    torch.library.opcheck(OPERATORS.moba_paged_attention, tuple(torch_moba.operator_arguments(moba)))


def test_derivatives_raise_type_error():
    arguments = arguments_of(DECODE, GPU)
    query = arguments["query"].clone().requires_grad_()
    with pytest.raises(TypeError, match="paged_attention is for inference and cannot be differentiated"):
        paged_attention(**(arguments | {"query": query})).sum().backward()
    state = Decoder().state
    state = {name: state[name] for name in ("key", "value", "key_pages", "value_pages", "page_table", "kv_lengths")}
    with pytest.raises(TypeError, match="append_to_pages is for inference and cannot be differentiated"):
        append_to_pages(**(state | {"key": state["key"].requires_grad_()}))


@pytest.mark.multigpu
@pytest.mark.parametrize("via", [None, "jax"])
def test_paged_attention_on_the_second_gpu_equals_the_first(via):
    """The tensors are not on the current device."""
    results = attend(arguments_of(FULL, "cuda:1"), via=via)
    assert all(x.device.index == 1 for x in results)
    assert_same_bits(results, attend(arguments_of(FULL, GPU)))
    assert torch.cuda.current_device() == 0


def test_paged_attention_of_empty_calls_returns_zeros():
    """Calls have no keys, no table columns or no sequences, as a server may meet."""
    arguments = to_tensors(
        dict(
            query=jnp.ones((2, 1, 4, 8), jnp.bfloat16),
            key_pages=jnp.ones((7, 4, 2, 8), jnp.bfloat16),
            value_pages=jnp.ones((7, 4, 2, 8), jnp.bfloat16),
            page_table=jnp.zeros((2, 3), jnp.int32),
            kv_lengths=jnp.zeros(2, jnp.int32),
        ),
        GPU,
    )
    sinks = to_tensor(np.arange(4, dtype=np.float32), GPU)
    for columns in (3, 0):
        output, log_sum = attend(arguments | {"page_table": arguments["page_table"][:, :columns].contiguous()})
        assert not output.any() and log_sum.isneginf().all()
    _, log_sum = attend(arguments, sinks=sinks)
    assert torch.equal(log_sum, sinks.expand(2, 1, 4))
    nothing = {name: arguments[name][:0] for name in ("query", "page_table", "kv_lengths")}
    assert attend(arguments | nothing)[0].shape == (0, 1, 4, 8)
