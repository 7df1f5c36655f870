"""Launch plans of paged attention, compiled for three architectures without a GPU."""

import dataclasses
import re

import numpy as np
import pytest

from blockdiag.interop.jaxlib_launcher import lay_out_buffers
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.ops.paged.splits import choose_splits
from blockdiag.triton_kernels.launch.compile import compile_key
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.paged.plans import launches, supports
from tests.triton_kernels.plans_support import configurations, launch_cases, report_of

BASE = PagedProblem(
    batch=1,
    query_tokens=1,
    query_heads=32,
    key_heads=8,
    head_dim=128,
    value_dim=128,
    query_dtype="bfloat16",
    key_dtype="bfloat16",
    value_dtype="bfloat16",
    output_dtype="bfloat16",
    num_pages=4096,
    page_size=64,
    max_pages=2048,
    scale=0.088,
    num_splits=33,
)
LATENT = dataclasses.replace(
    BASE, query_heads=64, key_heads=1, head_dim=576, value_dim=512, has_value_pages=False, num_splits=4
)
INT8 = dataclasses.replace(BASE, key_dtype="int8", value_dtype="int8", key_scale="token", value_scale="token")
NARROW = dataclasses.replace(BASE, key_dtype="float8_e4m3fn", value_dtype="float8_e4m3fn")
PROBLEMS = {
    "one query": BASE,
    "pages of one token": dataclasses.replace(BASE, page_size=1, num_pages=2**18, max_pages=2**17),
    "short splits": dataclasses.replace(BASE, num_pages=128, max_pages=128),
    "e4m3": NARROW,
    "e4m3, eight queries, scales by token": dataclasses.replace(
        NARROW, query_tokens=8, key_scale="token", value_scale="token", has_query_lengths=True
    ),
    "all e5m2, one split": dataclasses.replace(
        BASE,
        query_dtype="float8_e5m2",
        key_dtype="float8_e5m2",
        value_dtype="float8_e5m2",
        has_score_scale=True,
        value_scale="head",
        num_splits=1,
    ),
    "sixteen queries, window, soft cap, sinks": dataclasses.replace(
        BASE, query_tokens=16, window=(1024, None), soft_cap=30.0, has_sinks=True, page_size=3
    ),
    "tiles of packed queries": dataclasses.replace(
        BASE, packed_rows=4096, query_tokens=4096, has_query_lengths=True, num_splits=2
    ).tiled,
    "prompts beside other sequences": dataclasses.replace(
        BASE, batch=40, packed_rows=4096, query_tokens=4096, few_queries=8, num_splits=2, has_sinks=True
    ).tiled,
    "a batch of prompts, h64, window, soft cap": dataclasses.replace(
        BASE, batch=2, query_tokens=700, few_queries=0, num_splits=1, head_dim=64, value_dim=64, soft_cap=30.0,
        window=(1024, None), query_heads=48, page_size=1,
    ).tiled,
    "a batch of prompts, h256, all keys": dataclasses.replace(
        BASE, batch=2, query_tokens=700, few_queries=0, num_splits=1, head_dim=256, value_dim=256, is_causal=False,
        has_page_table=False,
    ).tiled,
    "more tiles than the last axis of a grid has": dataclasses.replace(
        BASE, batch=64, query_tokens=8192, query_heads=128, few_queries=0, num_splits=1
    ).tiled,
    "prompts, e4m3 caches": dataclasses.replace(NARROW, packed_rows=4096, query_tokens=4096, few_queries=8).tiled,
    "a batch of prompts, e4m3, scales by token, sinks": dataclasses.replace(
        NARROW, query_dtype="float8_e4m3fn", batch=2, query_tokens=700, few_queries=0, num_splits=1,
        has_score_scale=True, key_scale="token", value_scale="token", has_sinks=True,
    ).tiled,
    "a batch of prompts, e4m3, pages of 8": dataclasses.replace(
        NARROW, query_dtype="float8_e4m3fn", batch=2, query_tokens=700, few_queries=0, num_splits=1, page_size=8,
    ).tiled,
    "a batch of prompts, e4m3, pages of 4": dataclasses.replace(
        NARROW, query_dtype="float8_e4m3fn", batch=2, query_tokens=700, few_queries=0, num_splits=1, page_size=4,
    ).tiled,
    "prompts, e5m2, h64, soft cap": dataclasses.replace(
        BASE, packed_rows=4096, query_tokens=4096, few_queries=8, num_splits=1, head_dim=64, value_dim=64,
        soft_cap=30.0, query_dtype="float8_e5m2", key_dtype="float8_e5m2", value_dtype="float8_e5m2",
    ).tiled,
    "h256, contiguous, not causal": dataclasses.replace(
        BASE, head_dim=256, value_dim=256, has_page_table=False, is_causal=False, window=(None, 64), num_splits=1
    ),
    "h80, values of 96, five heads to one": dataclasses.replace(
        BASE, head_dim=80, value_dim=96, query_heads=5, key_heads=1, query_tokens=3, query_dtype="float16",
        key_dtype="float16", value_dtype="float16", output_dtype="float16",
    ),
    "latent, 64 heads": LATENT,
    "latent, 128 heads, drafts, window, soft cap, sinks": dataclasses.replace(
        LATENT, query_heads=128, query_tokens=4, window=(1024, None), soft_cap=30.0, has_sinks=True, num_splits=1
    ),
    "latent, e4m3, scales by token": dataclasses.replace(
        LATENT, key_dtype="float8_e4m3fn", value_dtype="float8_e4m3fn", key_scale="token", value_scale="token"
    ),
    "int8, scales by token": INT8,
    "int8, pages of one token, scales by head": dataclasses.replace(
        INT8, key_scale="none", has_score_scale=True, value_scale="head", page_size=1, num_pages=2**18, max_pages=2**17
    ),
    "int8, eight queries, float16": dataclasses.replace(
        INT8, query_tokens=8, query_dtype="float16", output_dtype="float16", has_query_lengths=True, num_splits=1
    ),
    "int8, sixteen queries, window, soft cap, sinks": dataclasses.replace(
        INT8, query_tokens=16, window=(1024, None), soft_cap=30.0, has_sinks=True, page_size=3
    ),
    "int8 keys, e5m2 values": dataclasses.replace(INT8, value_dtype="float8_e5m2", value_scale="none"),
    "prompts, int8 caches": dataclasses.replace(INT8, packed_rows=4096, query_tokens=4096, few_queries=8).tiled,
    "latent, int8, scales by token": dataclasses.replace(
        LATENT, key_dtype="int8", value_dtype="int8", key_scale="token", value_scale="token"
    ),
    "h512, 16 heads": dataclasses.replace(BASE, head_dim=512, value_dim=512, key_heads=2),
    "h576, values of 512, drafts": dataclasses.replace(BASE, head_dim=576, value_dim=512, query_tokens=16),
    "float32": dataclasses.replace(
        BASE, head_dim=64, value_dim=64, query_dtype="float32", key_dtype="float32", value_dtype="float32",
        output_dtype="float32",
    ),
}  # fmt: skip

# Bytes that threads spill.
KNOWN_SPILLS = {
    ("one query", 120): 8,
    ("a batch of prompts, h256, all keys", 90): 32,
    ("prompts, e4m3 caches", 90): 8,
    # Sums, products of a chunk and its scores are in registers at a time.
    ("a batch of prompts, e4m3, scales by token, sinks", 90): 400,
    ("a batch of prompts, e4m3, pages of 8", 90): 268,
    ("a batch of prompts, e4m3, pages of 8", 120): 28,
    ("a batch of prompts, e4m3, pages of 4", 90): 212,
    ("a batch of prompts, e4m3, pages of 4", 120): 28,
    ("a batch of prompts, e4m3, scales by token, sinks", 120): 44,
    ("prompts, int8 caches", 120): 44,
    ("int8, eight queries, float16", 100): 32,
    # Results take half of the registers.
    ("latent, 64 heads", 90): 24,
    ("latent, 128 heads, drafts, window, soft cap, sinks", 90): 24,
    ("latent, e4m3, scales by token", 90): 52,
    ("latent, int8, scales by token", 90): 52,
    ("h576, values of 512, drafts", 90): 32,
}


# Conversions to e4m3 need sm_89.
WITH_E4M3 = [name for name, problem in PROBLEMS.items() if "float8_e4m3fn" in problem.key_dtype]


@pytest.mark.parametrize("name", WITH_E4M3)
def test_e4m3_is_refused_where_gpus_have_no_conversion(name):
    for launch in launches(PROBLEMS[name]):
        if launch.kind != "merge":
            with pytest.raises(NotImplementedError, match=r"8\.9 or higher, and this GPU has 8\.0"):
                launch.plan(Target.for_arch(80))


@pytest.mark.covers(lambda name, place, arch: configurations([launches(PROBLEMS[name])[place]], arch))
@pytest.mark.parametrize(
    ("name", "place", "arch"),
    launch_cases(
        PROBLEMS,
        launches,
        (80, 90, 100, 120),
        marks=dict.fromkeys(["one query", "prompts beside other sequences"], pytest.mark.versions),
        since_89=WITH_E4M3,
    ),
)
def test_plan_fits_its_architecture(name, place, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    launch = launches(problem)[place]
    plan = launch.plan(Target.for_arch(arch))
    # jaxlib's launcher can pass the arrays in this order.
    lay_out_buffers(plan)
    report = report_of(plan, arch)
    is_for_hopper = plan.kernel.__name__ in ("paged_prompts", "paged_eight_bit_prompts")
    assert is_for_hopper == (
        arch == 90
        and launch.kind == "prompts"
        and problem.query_dtype == problem.key_dtype
        and problem.head_dim == problem.value_dim <= 256
    )
    assert report.shared_bytes <= report.shared_limit and report.tensor_memory_columns <= 512
    assert report.spill_bytes <= KNOWN_SPILLS.get((name, arch), 0), str(report)
    assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0
    # Programs for prompts on Hopper count the items that they take.
    assert (report.ptx["atom"] > 0) == is_for_hopper
    if launch.kind != "merge" and problem.query_dtype != "float32":
        assert sum(report.ptx[product] for product in ("mma.sync", "wgmma", "tcgen05.mma")) > 0, str(report)
        # Caches are read asynchronously. Only masks are loaded by bytes, and there are few of them.
        assert report.ptx["cp.async"] > 0 and report.kernel.asm["ptx"].count("ld.shared.b8") < 32


def test_machine_code_of_int8_gives_each_integer_as_float16():
    """The instructions of `widen_pairs` are computed here for every integer in every byte of a register."""
    ptx = report_of(launches(INT8)[0].plan(Target.for_arch(80)), 80).kernel.asm["ptx"]
    block = re.search(r"\.reg \.b32 shifted, even, odd, offset;\n(.*?)\}", ptx, re.DOTALL)
    assert block is not None
    lines = [re.findall(r"[^\s,;]+", line) for line in block[1].strip().splitlines()]
    (pairs,) = {source for name, *_, source, _ in (line for line in lines if line[0].startswith("xor"))} - {"xor.b32"}
    integers = np.arange(-128, 128).astype(np.int8)
    stored = np.stack([np.roll(integers, shift) for shift in (0, 50, 100, 150)], -1)
    registers = {pairs: stored.copy().view(np.uint32)[:, 0]}

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full(256, int(name, 0), np.uint32)

    for instruction, target, *sources in lines:
        first, *others = map(read, sources)
        match instruction:
            case "mov.b32":
                result = first
            case "xor.b32":
                result = first ^ others[0]
            case "prmt.b32":
                both = np.stack([first, others[0]], -1).view(np.uint8)
                selected = [int(others[1][0]) >> shift & 7 for shift in (0, 4, 8, 12)]
                result = both[:, selected].copy().view(np.uint32)[:, 0]
            case "sub.rn.f16x2":
                result = (first[:, None].view(np.float16) - others[0][:, None].view(np.float16)).view(np.uint32)[:, 0]
        registers[target] = result
    even, odd = (registers[line[1]][:, None].view(np.float16) for line in lines if line[0] == "sub.rn.f16x2")
    np.testing.assert_array_equal(even, stored[:, 0::2].astype(np.float16))
    np.testing.assert_array_equal(odd, stored[:, 1::2].astype(np.float16))


def test_numbers_of_rows_and_sequences_share_kernels():
    few = dict(query_tokens=4096, few_queries=8, num_splits=2)
    for arch in (90, 100):
        keys = [
            [
                compile_key(launch.plan(Target.for_arch(arch)), arch)
                for launch in launches(dataclasses.replace(BASE, batch=batch, packed_rows=rows, **few).tiled)
            ]
            for batch, rows in ((40, 4096), (7, 1111))
        ]
        assert keys[0] == keys[1] and len(set(keys[0])) == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head_dim": 12}, "multiples of 8 up to 576 for H, got 12"),
        ({"value_dim": 520}, "multiples of 8 up to 512 for the value's head size, got 520"),
        ({"key_dtype": "float16"}, "queries and caches of one dtype"),
        ({"query_dtype": "float64"}, "`query` is float64"),
        ({"query_dtype": "float32", "key_dtype": "float8_e5m2"}, "queries and caches of one dtype"),
        ({"batch": 70000}, "split the batch"),
    ],
)
def test_supports_names_what_the_kernels_decline(change, match):
    assert match in (supports(dataclasses.replace(BASE, **change)) or "")


@pytest.mark.parametrize(
    ("batch", "max_keys", "expected"),
    [(1, 131072, 33), (2, 65536, 16), (16, 32768, 2), (32, 8192, 1), (1, 1024, 16), (20, 8192, 2), (1, 64, 1)],
)
def test_choose_splits_returns_the_measured_best(batch, max_keys, expected):
    """The problem has 32/8 heads of 128 on an H200; the best numbers are from benchmarks/results/paged.csv."""
    assert choose_splits(batch=batch, query_tokens=1, group_size=4, key_heads=8, max_keys=max_keys) == expected
