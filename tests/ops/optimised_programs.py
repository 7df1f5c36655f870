"""Checks of programs that XLA compiles with its usual options; test_optimised_programs runs this file.

The tests' own programs are compiled without optimisation and without XLA's fusion compiler. These settings hold for a
whole process.
"""

import functools

import jax
import numpy as np

import tests.ops.moba_support
import tests.ops.paged_support
from tests import support
from tests.ops import append_support, key_convolution_support
from tests.ops.append import test_append as append
from tests.ops.block_diagonal import test_block_diagonal as block_diagonal
from tests.ops.block_diagonal import test_long_blocks as long_blocks
from tests.ops.key_convolution import test_key_convolution as key_convolution
from tests.ops.moba import test_implementations as moba
from tests.ops.paged import test_implementations as paged


def check_block_diagonal(implementation: str) -> None:
    case = block_diagonal.CASES["offsets, causal, grouped"]
    run = jax.jit(functools.partial(support.value_and_gradients, case.attend(implementation)))
    support.assert_accurate(case, run(*case.operands()), case.operands())


def check_long_blocks(implementation: str) -> None:
    case = long_blocks.CASES["lengths"]
    run = jax.jit(functools.partial(support.value_and_gradients, case.attend(implementation)))
    support.assert_accurate(case, run(*case.operands()), case.operands())


def check_moba(implementation: str) -> None:
    case = moba.CASES["edited own, packed, masked"]
    run = jax.jit(case.compute(implementation).__wrapped__)
    tests.ops.moba_support.assert_accurate(case, run(*case.operands(), case.arguments()), case.operands())


def check_key_convolution(implementation: str) -> None:
    case = key_convolution.CASES["offsets"]
    run = jax.jit(functools.partial(support.value_and_gradients, case.convolve(implementation)))
    exact = key_convolution_support.exact_convolution(case, case.operands())
    key_convolution_support.assert_accurate(run(*case.operands()), exact, case.operands())


def check_paged(implementation: str) -> None:
    case = paged.CASES["sinks, ragged, window, soft cap"]
    run = jax.jit(case.compute(implementation).__wrapped__)
    tests.ops.paged_support.assert_accurate(case, run(*case.operands()))


def check_append(implementation: str) -> None:
    case = append.CASES["centroids, packed, rotary, computed scales"]
    arguments = case.arguments()
    results = jax.jit(case.append(implementation))(**arguments)
    append_support.assert_appended(case, dict(zip(case.written, map(np.asarray, results), strict=True)), arguments)


if __name__ == "__main__":
    for check in (check_block_diagonal, check_moba, check_key_convolution, check_paged):
        check("reference")
    for check in (
        check_block_diagonal, check_long_blocks, check_moba, check_key_convolution, check_paged, check_append
    ):  # fmt: skip
        check("xla")
    print("all are accurate")
