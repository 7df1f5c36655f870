"""Dispatch: which implementation computes a call, and the error if no requested one can."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from blockdiag import block_diagonal_attention
from blockdiag.common import dispatch
from blockdiag.common.dispatch import capabilities, normalise_implementation, resolve
from blockdiag.common.operation import Implementation
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL, BlockDiagonalProblem

PROBLEM = BlockDiagonalProblem(
    tokens=128,
    query_heads=2,
    key_heads=2,
    head_dim=64,
    dtype="bfloat16",
    block_size=64,
    sequence_length=128,
    num_tiles=2,
    is_causal=False,
    scale=0.125,
)
DOUBLE = dataclasses.replace(PROBLEM, dtype="float64")


def test_array_implementations_support_every_problem():
    for problem in (PROBLEM, DOUBLE, dataclasses.replace(PROBLEM, head_dim=7, block_size=3, sequence_length=None)):
        reasons = capabilities(problem)
        assert reasons["reference"] is None and reasons["xla"] is None


def test_kernels_decline_double_precision_with_a_remedy():
    reasons = capabilities(DOUBLE)
    assert all(reasons[name] for name in ("triton", "pallas"))


def test_default_is_xla_off_cuda():
    assert resolve(PROBLEM, None).elsewhere.name == "xla"
    assert resolve(DOUBLE, None).cuda.name == "xla"


def test_sequence_picks_the_first_that_supports_the_call():
    assert resolve(DOUBLE, ("triton", "pallas", "xla", "reference")).elsewhere.name == "xla"


def test_single_name_that_cannot_compute_raises_not_implemented_error():
    with pytest.raises(NotImplementedError, match=r"implementation='triton' cannot compute this call: .*float64"):
        resolve(DOUBLE, ("triton",))


def test_unsupported_sequence_lists_every_reason():
    with pytest.raises(NotImplementedError) as caught:
        resolve(DOUBLE, ("triton", "pallas"))
    message = str(caught.value)
    assert "'triton': " in message and "'pallas': " in message and '"xla"' in message


def test_normalise_implementation_accepts_names_and_sequences():
    assert normalise_implementation(None, BLOCK_DIAGONAL) is None
    assert normalise_implementation("xla", BLOCK_DIAGONAL) == ("xla",)
    assert normalise_implementation(["triton", "xla"], BLOCK_DIAGONAL) == ("triton", "xla")
    with pytest.raises(ValueError, match="got \\['xla', 'cudnn'\\]"):
        normalise_implementation(["xla", "cudnn"], BLOCK_DIAGONAL)


def test_public_function_raises_before_tracing():
    query = jnp.zeros((1, 64, 2, 64), jnp.float16)
    with pytest.raises(NotImplementedError, match="pallas"):
        block_diagonal_attention(query, query, query, block_size=7, implementation="pallas")


def test_default_without_triton_traces_only_xla(monkeypatch):
    here = Implementation("triton", "blockdiag.ops.block_diagonal.reference")
    monkeypatch.setitem(BLOCK_DIAGONAL.implementations, "triton", here)
    monkeypatch.setattr("blockdiag.ops.block_diagonal.reference.available", lambda: "Triton is not installed")
    query = jnp.zeros((1, 64, 2, 64), jnp.float16)
    jaxpr = jax.make_jaxpr(lambda x: block_diagonal_attention(x, x, x, scale=0.37))(query)
    assert "platform_index" not in str(jaxpr)


def test_cuda_defaults_exist():
    assert set(dispatch.CUDA_DEFAULTS) <= set(BLOCK_DIAGONAL.implementations)


def test_import_loads_no_framework_and_starts_no_backend():
    program = (
        "import sys, blockdiag, jax\n"
        "heavy = {'triton', 'torch', 'flax', 'jax.experimental.pallas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
