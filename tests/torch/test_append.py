"""`append_to_pages` in torch on the CPU: exact in-place results, the interpreted native path, and the operator."""

import dataclasses
import functools
import subprocess
import sys

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import append_to_pages, paged_attention  # noqa: E402
from blockdiag.torch.ops.append.api import _apart  # noqa: E402
from blockdiag.torch.ops.append.operators import AppendArguments  # noqa: E402
from blockdiag.torch.rotary import rotary_of  # noqa: E402
from tests.ops.append.test_append import CASES, GOOD, MISTAKES  # noqa: E402
from tests.ops.append_support import AppendCase, RotaryCase, assert_appended  # noqa: E402
from tests.torch.paged_torch_support import (  # noqa: E402
    messages_of_mistakes,
    to_tensors,
)
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor, to_torch_rotary  # noqa: E402

OPERATORS = torch.ops.blockdiag


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def arguments_of(case, arrays, device="cpu"):
    """Return the arguments of the public function as tensors, from a case's NumPy arrays."""
    tensors = {name: to_tensor(x, device) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    rotary = to_torch_rotary(case.rotary_argument(), device)
    absent = dict.fromkeys(("page_table", "value", "value_pages"))
    return absent | {"rotary": rotary, "block_size": case.block_size} | tensors


def operator_arguments(*, rotary=None, key_scale=None, value_scale=None, **arguments):
    """Return the arguments of `torch.ops.blockdiag.append_to_pages` for a call."""
    (cos, sin, positions), letters = rotary_of(rotary)
    scales = dict(zip(("key_scale", "key_scale_pages"), _apart(key_scale), strict=True))
    scales |= dict(zip(("value_scale", "value_scale_pages"), _apart(value_scale), strict=True))
    defaults = dict.fromkeys(AppendArguments._fields) | {"implementation": "", "rotary": letters}
    return AppendArguments(**defaults | arguments | scales | dict(cos=cos, sin=sin, positions=positions))


def good_tensors():
    """Return the tensors of a valid call, with random numbers instead of zeros."""
    generator = torch.manual_seed(0)
    tensors = to_tensors(GOOD)
    return {
        name: torch.randn(x.shape, generator=generator) if x.is_floating_point() else x for name, x in tensors.items()
    }


def check(case, append, arrays=None):
    """Append to tensors and assert that their contents are exact and that their memory has not moved."""
    arrays = case.arguments() if arrays is None else arrays
    arguments = arguments_of(case, arrays)
    places = {name: arguments[name].data_ptr() for name in case.written}
    append(**arguments)
    assert {name: arguments[name].data_ptr() for name in case.written} == places
    assert_appended(case, {name: to_numpy(arguments[name]) for name in case.written}, arrays)


@pytest.mark.parametrize(
    "name",
    [
        "centroids, packed, rotary, computed scales",
        "contiguous",
        "rotary by token, 16-bit tables",
        "int8, computed scales",
        "int8, scales of heads, contiguous",
        "latent",
        "latent, packed, e4m3, computed scales, centroids",
    ],
)
def test_results_are_exact(name):
    check(CASES[name], append_to_pages)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_append_by_named_implementation_is_exact(implementation):
    check(CASES["computed scales"], functools.partial(append_to_pages, implementation=implementation))


def test_append_in_float64_is_exact():
    case = dataclasses.replace(CASES["rotary"], dtype="float64", rotary=RotaryCase(dtype="float64"), block_size=4)
    with jax.enable_x64(True):
        arrays = case.arguments()
        check(case, append_to_pages, arrays)


def test_append_returns_the_given_tensors():
    case = CASES["centroids, packed, rotary, computed scales"]
    arguments = arguments_of(case, case.arguments())
    results = append_to_pages(**arguments)
    assert all(result is arguments[name] for result, name in zip(results, case.written, strict=True))


# --- the native path, with Triton's interpreter in place of the launcher ------------------------------------------


@pytest.mark.usefixtures("interpreted_paged_kernels")
@pytest.mark.parametrize("name", CASES)
def test_native_append_in_the_interpreter_is_exact(name):
    from blockdiag.torch.ops.append import native

    check(CASES[name], lambda **arguments: native.append(operator_arguments(**arguments)))


@pytest.mark.usefixtures("interpreted_paged_kernels")
def test_native_append_of_no_tokens_keeps_the_pages():
    from blockdiag.torch.ops.append import native

    arguments = good_tensors()
    empty = {name: arguments[name][:, :0] for name in ("key", "value")}
    expected = arguments["key_pages"].clone()
    native.append(operator_arguments(**arguments | empty))
    assert_same_bits([arguments["key_pages"]], [expected])


@pytest.mark.usefixtures("interpreted_paged_kernels")
def test_native_append_increments_tensor_versions():
    from blockdiag.torch.ops.append import native

    arguments = good_tensors()
    versions = [arguments[name]._version for name in ("key_pages", "value_pages")]
    native.append(operator_arguments(**arguments))
    assert all(arguments[name]._version > old for name, old in zip(("key_pages", "value_pages"), versions, strict=True))
    with torch.inference_mode():
        pages = {name: arguments[name].clone() for name in ("key_pages", "value_pages")}
        native.append(operator_arguments(**arguments | pages))
    assert_same_bits(list(pages.values()), [arguments[name] for name in pages])


NO_JAX = """
import sys
import torch
from blockdiag.torch.ops.append import native, api as _append
from blockdiag.torch.ops.moba_paged import native as _moba_paged_native, api as _moba_paged
from blockdiag.torch import launches as _launches

def bound_launch(spec, device_index):
    shapes = [(x.shape, getattr(torch, x.dtype)) for x in spec.outputs]
    return lambda tensors: tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)

_launches.bound_launch = bound_launch
torch.cuda.current_device = lambda: -1
new, pages, centroids = torch.zeros(2, 1, 2, 16), torch.zeros(5, 16, 2, 16), torch.zeros(2, 9, 2, 16)
shared = dict(key_pages=pages, value_pages=pages.clone(), page_table=torch.zeros(2, 9, dtype=torch.int32),
              kv_lengths=torch.ones(2, dtype=torch.int32), key_centroids=centroids, block_size=16, implementation="")
defaults = dict.fromkeys(_append.AppendArguments._fields)
native.append(_append.AppendArguments(**defaults | shared | dict(key=new, value=new, rotary="")))
defaults = dict.fromkeys(_moba_paged.MoBAPagedArguments._fields)
output, _ = _moba_paged_native.attend(_moba_paged.MoBAPagedArguments(**defaults | shared | dict(query=new, top_k=3)))
assert output.shape == new.shape
assert not {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib"}
"""


def test_native_append_does_not_import_jax():
    """MoBA over a paged cache must not import JAX either."""
    pytest.importorskip("triton")
    result = subprocess.run([sys.executable, "-c", NO_JAX], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# --- opcheck, torch.compile and autograd --------------------------------------------------------------------------


def test_append_operators_pass_opcheck():
    """opcheck fails if an operator changes an argument that its schema does not declare as mutated."""
    arguments = good_tensors() | dict(
        key_centroids=torch.zeros(2, 1, 2, 8), block_size=4, rotary=blockdiag_rotary(), key_scale=torch.tensor(0.5)
    )
    for name in ("append_to_pages", "append_to_pages_through_jax"):
        torch.library.opcheck(getattr(OPERATORS, name), tuple(operator_arguments(**arguments)))
    assert torch.Tag.cudagraph_unsafe not in OPERATORS.append_to_pages.default.tags
    assert torch.Tag.cudagraph_unsafe in OPERATORS.append_to_pages_through_jax.default.tags


def blockdiag_rotary():
    from blockdiag.torch import Rotary, rotary_tables

    return Rotary(*rotary_tables(8, 8))


def test_a_decode_step_compiles_to_one_graph():
    """The step attends to the tokens that it has just appended."""
    arguments = good_tensors()
    rotary = blockdiag_rotary()

    def step(query, key, value, key_pages, value_pages, page_table, kv_lengths):
        append_to_pages(key.sin(), value, key_pages, value_pages, page_table, kv_lengths, rotary=rotary)
        return paged_attention(query, key_pages, value_pages, page_table, kv_lengths)

    results = []
    for function in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        tensors = {name: x.clone() for name, x in arguments.items()}
        output = function(torch.ones(2, 3, 4, 8), **tensors)
        results.append([output, *tensors.values()])
        assert not torch.equal(tensors["key_pages"], arguments["key_pages"])
    assert_same_bits(*results)


def test_append_to_tensors_that_require_grad_raises_type_error():
    arguments = good_tensors()
    for name in ("key", "key_pages"):
        followed = arguments | {name: arguments[name].clone().requires_grad_()}
        with pytest.raises(TypeError, match="append_to_pages is for inference and cannot be differentiated"):
            append_to_pages(**followed)
        with torch.no_grad():
            append_to_pages(**followed)


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_the_errors_of_jax(name):
    changes, _ = MISTAKES[name]
    arguments = GOOD | changes
    tensors = to_tensors(arguments) | {"rotary": to_torch_rotary(arguments.get("rotary"))}
    ours, other = messages_of_mistakes((blockdiag.append_to_pages, append_to_pages), (arguments, tensors))
    assert ours == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(key=np.zeros((2, 3, 2, 8), np.float32)), "`key` must be a tensor, got <class 'numpy.ndarray'>"),
        (dict(rotary=(1, 2)), "`rotary` must be a blockdiag.torch.Rotary or None"),
        (
            dict(kv_lengths=torch.zeros(2, dtype=torch.int32, device="meta")),
            "`kv_lengths` must be on the device of `key`",
        ),
        (dict(key_pages=torch.zeros(5, 2, 4, 8).transpose(1, 2)), "`key_pages` must be contiguous, got strides"),
        (dict(via="xla"), "`via` must be None or 'jax', got 'xla'"),
    ],
)
def test_invalid_tensors_raise_value_error(changes, message):
    with pytest.raises(ValueError, match=message):
        append_to_pages(**to_tensors(GOOD) | changes)


def test_unsupported_implementation_raises_not_implemented_error():
    arguments = {name: x.double() if x.is_floating_point() else x for name, x in to_tensors(GOOD).items()}
    with pytest.raises(NotImplementedError, match=r"`key` is float64; use implementation='xla'"):
        append_to_pages(**arguments, implementation="triton")


def test_cases_cover_every_written_array():
    assert {name for case in CASES.values() for name in case.written} == {
        "key_pages", "value_pages", "key_scale", "value_scale", "key_centroids"
    }  # fmt: skip
    assert isinstance(CASES["packed"], AppendCase)
