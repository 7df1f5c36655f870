"""Chained programs for the clock, and errors relative to FlashAttention 2's, with made-up implementations."""

import pytest

pytest.importorskip("torch")

from benchmarks.block_diagonal.accuracy import measure_errors
from benchmarks.block_diagonal.cases import CASES
from benchmarks.block_diagonal.exact import exact_attention
from benchmarks.block_diagonal.implementations import (
    PassMakers,
    _chained,
    implementation,
    jit_passes,
)
from benchmarks.block_diagonal.workload import Workload, make_workload
from benchmarks.harness.compiled import address_table_bytes
from benchmarks.harness.failures import ChainBroken
from benchmarks.harness.family import Implementation, Program
from benchmarks.harness.records import environment


def _scaled(factor: float) -> Implementation:
    """Return an implementation whose results have a relative error of `factor` * 2**-8 against the oracle."""

    def passes(workload: Workload) -> PassMakers:
        exact = exact_attention(workload.case, *workload.inputs, workload.cotangent, workload.tables)
        results = tuple(tensor.float() * (1 + factor * 2**-8) for tensor in exact)
        return {"fwd+bwd": lambda: Program(lambda: results)}

    return implementation("torch-fa2" if factor == 1 else "triton", "torch", passes)


def test_errors_are_compared_seed_by_seed():
    case = next(iter(CASES.values())).shrunk((64, 64))
    implementations = [_scaled(2.0), _scaled(1.0)]
    rows = measure_errors([case], implementations, environment("cpu"), seeds=3, device="cpu")
    ours = [row for row in rows if row.implementation == "triton"]
    assert len(ours) == 4
    for row in ours:
        assert row.mean_over_flash == pytest.approx(2.0, rel=1e-3)
        assert row.max_over_flash == pytest.approx(2.0, rel=1e-3)
        assert row.mean_over_flash_se < 1e-3
    assert all(row.mean_over_flash is None for row in rows if row.implementation == "torch-fa2")


def _attend(query, key, value, extra):
    """Compute a stand-in for attention whose backward pass is one expression per gradient."""
    del extra
    return query * key + value


def test_chain_without_custom_calls_raises_chain_broken():
    """Only the custom calls of a chain show whether its calls were merged."""
    case = next(iter(CASES.values())).shrunk((64, 64))
    workload = make_workload(case, seed=0, device="cpu")
    prepared = jit_passes(_attend, workload, keeps_residuals=False, is_chained=True)["fwd"]()
    assert prepared.calls == 1
    with pytest.raises(ChainBroken, match="20 calls"):
        prepared.chain(20)


def test_chained_calls_feed_outputs_to_the_next_call():
    program = _chained({0: 1, 1: 0}, lambda a, b: (a + b, a * b), 3)
    assert program(1, 2) == (2 + 3 + 6, (2 + 3) * 6)


def test_address_table_bytes_counts_custom_calls_with_several_results():
    program = """
      %one = bf16[64,8,128]{2,1,0:T(8)} custom-call(%a), custom_call_target="x"
      %three = (bf16[64,8,128]{2,1,0:T(8)}, bf16[64,8,128]{2,1,0}, f32[]) custom-call(%a, %b), custom_call_target="x"
      ROOT %tuple = (bf16[64,8,128]{2,1,0}, f32[]) tuple(%one, %c)
    """
    assert address_table_bytes(program) == 24
