"""Paged attention in torch on the CPU: values, the interpreted native path, and the operators."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import merge_attention_states, paged_attention  # noqa: E402
from tests.ops.paged.test_invalid_arguments import GOOD, MISTAKES, PACKED  # noqa: E402
from tests.ops.paged_support import MIXED_CASES, PagedCase, assert_accurate, simple_arguments  # noqa: E402
from tests.torch.paged_torch_support import (  # noqa: E402
    CASES,
    arguments_of,
    as_arrays,
    assert_packed_accurate,
    messages_of_mistakes,
    operator_arguments,
    packed_arguments_of,
    results_of,
    to_tensors,
)
from tests.torch.torch_support import assert_same_bits, to_tensor  # noqa: E402

OPERATORS = torch.ops.blockdiag


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


# --- values, through JAX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_output_and_residual_are_accurate(name):
    assert_accurate(CASES[name], as_arrays(results_of(CASES[name])))


def test_named_implementations_are_accurate():
    case = CASES["everything"]
    for implementation in ("reference", ("triton", "xla")):
        assert_accurate(case, as_arrays(results_of(case, implementation=implementation)))


def test_float64_results_are_accurate():
    case = dataclasses.replace(CASES["contiguous"], dtype="float64", cache_dtype="float64")
    with jax.enable_x64(True):
        arguments = arguments_of(case)
    assert arguments["query"].dtype == arguments["key_pages"].dtype == torch.float64
    with jax.enable_x64(True):
        assert_accurate(case, as_arrays(paged_attention(**arguments, return_residual=True)))


def test_results_equal_jax_bitwise():
    case = CASES["paged"]
    expected = blockdiag.paged_attention(**case.arguments(), num_splits=1, return_residual=True)
    assert_same_bits(results_of(case), expected)


def test_packed_queries_equal_padded_queries_bitwise():
    case = CASES["everything"]
    arguments, is_row = packed_arguments_of(case)
    output, log_sum = paged_attention(**arguments, max_query_length=3, return_residual=True)
    assert_same_bits((output[:-2], log_sum[:-2]), [x[is_row] for x in results_of(case)])
    assert not output[-2:].any() and log_sum[-2:].isneginf().all()


def test_scalar_and_tensor_scales_are_the_same_factor():
    arguments, names = to_tensors(simple_arguments()), ("key_scale", "value_scale", "query_scale")
    forms = (1.5, torch.tensor(1.5), torch.full((2, 2), 1.5))
    expected, *others = (
        paged_attention(**arguments, **dict.fromkeys(names, form), return_residual=True) for form in forms
    )
    by_token = dict.fromkeys(names[:2], torch.full((7, 4, 2), 1.5)) | {"query_scale": 1.5}
    others.append(paged_attention(**arguments, **by_token, return_residual=True))
    for actual in others:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("query_dtype", ["float8_e4m3fn", torch.float8_e5m2])
def test_queries_are_rounded_to_the_query_dtype_as_in_jax(query_dtype):
    arguments = simple_arguments(tokens=3, dtype=jnp.float8_e4m3fn)
    query = simple_arguments(tokens=3, seed=1)["query"].astype(jnp.bfloat16).at[0, 0, 0, 0].set(1e5)
    arguments |= {"query": query}
    name = str(query_dtype).removeprefix("torch.")
    expected = blockdiag.paged_attention(**arguments, query_dtype=name, return_residual=True)
    attend = functools.partial(paged_attention, query_dtype=query_dtype, return_residual=True)
    actual = attend(**to_tensors(arguments))
    assert actual[0].dtype == torch.bfloat16
    assert_same_bits(actual, expected)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(**to_tensors(arguments)), expected)


def test_residual_is_returned_on_request_only():
    arguments = arguments_of(CASES["paged"])
    output = paged_attention(**arguments)
    assert_same_bits([output], paged_attention(**arguments, return_residual=True)[:1])


# --- the native path, with Triton's interpreter in place of the launcher ------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_native_path_in_the_interpreter_is_accurate(interpreted_paged_kernels, name):
    case = CASES[name]
    arguments = operator_arguments(arguments_of(case))
    assert_accurate(case, as_arrays(interpreted_paged_kernels.attend(arguments)))


def test_native_packed_queries_equal_padded_queries_bitwise(interpreted_paged_kernels):
    case = CASES["everything"]
    arguments, is_row = packed_arguments_of(case)
    expected = interpreted_paged_kernels.attend(operator_arguments(arguments_of(case)))
    for longest in (None, 3):
        call = operator_arguments(arguments | {"max_query_length": longest})
        output, log_sum = interpreted_paged_kernels.attend(call)
        assert_same_bits((output[:-2], log_sum[:-2]), [x[is_row] for x in expected])
        assert not output[-2:].any() and log_sum[-2:].isneginf().all()


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"split_size": 64}], ids=str)
@pytest.mark.parametrize("name", MIXED_CASES)
def test_native_packed_prompts_beside_decoding_sequences_are_accurate(interpreted_paged_kernels, name, options):
    case = MIXED_CASES[name]
    arguments, is_row = packed_arguments_of(case)
    results = interpreted_paged_kernels.attend(operator_arguments(arguments | {"num_splits": None} | options))
    assert_packed_accurate(case, results, is_row)


def test_native_out_of_range_offsets_are_clipped(interpreted_paged_kernels, monkeypatch):
    """The checks do not know values on a GPU, so the kernels clip offsets.

    The results of a sequence with more than `max_query_length` queries are right.
    """
    from blockdiag.common import validation
    from blockdiag.ops.paged import checks

    for module in (checks, validation):
        monkeypatch.setattr(module, "known_values", lambda array: None)
    jax_arguments = simple_arguments(batch=3)
    jax_arguments["query"] = jnp.concatenate([jax_arguments["query"][:, 0]] * 2)
    arguments = to_tensors(jax_arguments)

    def attend(*offsets, longest=2):
        call = arguments | {"query_offsets": torch.tensor(offsets, dtype=torch.int32), "max_query_length": longest}
        return interpreted_paged_kernels.attend(operator_arguments(call))

    for found, expected in zip(attend(0, 1, 4, 6), attend(0, 1, 4, 6, longest=3), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert_same_bits(attend(-3, 2, 1, 99)[:1], attend(0, 2, 2, 6)[:1])


def test_native_scales_multiply_and_equal_their_tensor_forms(interpreted_paged_kernels):
    """Scales may be numbers or tensors of shape [] or [B, K]; key and query scales are multiplied."""
    arguments = to_tensors(simple_arguments())
    by_head = torch.tensor([[1.0, 2.0], [0.5, 3.0]])
    pairs = [(1.5, 2.0), (torch.tensor(1.5), 2.0), (torch.tensor(1.5), torch.full((2, 2), 2.0)), (3.0, None), (None, 3)]
    results = [
        interpreted_paged_kernels.attend(operator_arguments(arguments | dict(key_scale=key, query_scale=query)))
        for key, query in pairs
    ]
    for actual in results:
        assert_same_bits(actual, results[0])
    one, other = (
        interpreted_paged_kernels.attend(operator_arguments(arguments | scales))
        for scales in (dict(key_scale=by_head, query_scale=2.0, value_scale=2.0), dict(key_scale=2 * by_head))
    )
    torch.testing.assert_close(one[0], 2 * other[0])
    torch.testing.assert_close(one[1], other[1])


def test_prepared_calls_are_cached_by_options_and_not_by_lengths(interpreted_paged_kernels):
    arguments = operator_arguments(to_tensors(simple_arguments()))
    interpreted_paged_kernels.attend(arguments)
    interpreted_paged_kernels.attend(operator_arguments(to_tensors(simple_arguments(seed=4))))
    assert len(interpreted_paged_kernels._prepared._calls) == 1
    interpreted_paged_kernels.attend(arguments._replace(logits_soft_cap=3.0))
    # `True` and 1.0 are equal dictionary keys, but only 1.0 is a valid scale.
    interpreted_paged_kernels.attend(arguments._replace(scale=1.0))
    with pytest.raises(ValueError, match="`scale` must be a positive number"):
        interpreted_paged_kernels.attend(arguments._replace(scale=True))
    assert len(interpreted_paged_kernels._prepared._calls) == 3


@pytest.mark.parametrize(
    ("batch", "tokens", "pages", "columns", "rows"),
    [(0, 1, 7, 3, None), (2, 0, 7, 3, None), (2, 1, 0, 3, None), (2, 1, 7, 0, None), (2, None, 7, 3, 0)],
)
def test_native_empty_calls_return_zeros(interpreted_paged_kernels, batch, tokens, pages, columns, rows):
    """Each case has an axis of size 0; the native path must match the path through JAX."""
    shape = (batch, tokens, 4, 8) if rows is None else (rows, 4, 8)
    integers = functools.partial(torch.zeros, dtype=torch.int32)
    arguments = dict(query=torch.ones(shape), key_pages=torch.ones(pages, 4, 2, 8))
    arguments |= dict(value_pages=torch.ones(pages, 4, 2, 24), page_table=integers(batch, columns))
    arguments |= dict(kv_lengths=integers(batch), value_scale=torch.ones(pages, 4, 2))
    arguments |= {} if rows is None else {"query_offsets": integers(batch + 1)}
    results = interpreted_paged_kernels.attend(operator_arguments(arguments))
    assert_same_bits(results, paged_attention(**arguments, return_residual=True))
    assert results[0].shape == (*shape[:-1], 24) and not results[0].any() and results[1].isneginf().all()


def test_native_call_without_keys_returns_the_sinks_as_residual(interpreted_paged_kernels):
    arguments = to_tensors(simple_arguments(tokens=2)) | dict(
        page_table=torch.zeros(2, 0, dtype=torch.int32), kv_lengths=torch.zeros(2, dtype=torch.int32),
        query_lengths=torch.tensor([2, 1], dtype=torch.int32), sinks=torch.arange(4.0, dtype=torch.float16),
    )  # fmt: skip
    results = interpreted_paged_kernels.attend(operator_arguments(arguments))
    assert_same_bits(results, paged_attention(**arguments, return_residual=True))
    assert torch.equal(results[1][0, 1], torch.arange(4.0)) and results[1][1, 1].isneginf().all()


def test_native_call_copies_strided_queries_and_raises_value_error_for_strided_caches(interpreted_paged_kernels):
    """Strided caches are rejected because they would have to be copied in every call."""
    jax_arguments = simple_arguments(tokens=2)
    arguments = to_tensors(jax_arguments)
    expected = interpreted_paged_kernels.attend(operator_arguments(arguments))
    query = arguments["query"].transpose(1, 2).contiguous().transpose(1, 2)
    table = arguments["page_table"].t().contiguous().t()
    changes = {"query": query, "page_table": table}
    assert_same_bits(interpreted_paged_kernels.attend(operator_arguments(arguments | changes)), expected)
    pages = arguments["key_pages"]
    swapped = pages.transpose(1, 2).contiguous().transpose(1, 2)
    misaligned = torch.empty(pages.numel() + 1)[1:].view(pages.shape)
    for wrong, message in (
        (swapped, "must be contiguous, got strides"),
        (misaligned, "must start at a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=f"`key_pages` {message}"):
            interpreted_paged_kernels.attend(operator_arguments(arguments | {"key_pages": wrong}))
    with pytest.raises(ValueError, match="`key_pages` must be contiguous"):
        paged_attention(**(arguments | {"key_pages": swapped}))


NO_JAX = """
import contextlib, sys, types
import torch
from blockdiag.torch import merge_attention_states
from blockdiag.torch import launches as _launches
from blockdiag.torch.ops.paged import native as _paged_native, operators as _paged_operators

def bound_launch(spec, device_index):
    shapes = [(x.shape, getattr(torch, x.dtype)) for x in spec.outputs]
    return lambda tensors: tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)

_launches.bound_launch = bound_launch
torch.cuda.current_device = lambda: -1
query, pages = torch.zeros(2, 1, 4, 16), torch.zeros(5, 16, 2, 16)
defaults = dict.fromkeys(_paged_operators.PagedArguments._fields) | {"is_causal": True, "implementation": ""}
arguments = _paged_operators.PagedArguments(**defaults | dict(
    query=query, key_pages=pages, value_pages=pages, page_table=torch.zeros(2, 9, dtype=torch.int32),
    kv_lengths=torch.ones(2, dtype=torch.int32)))
output, log_sum = _paged_native.attend(arguments)
merge_attention_states([output, output], [log_sum, log_sum])
assert output.shape == query.shape
assert not {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib"}
"""


def test_native_call_does_not_import_jax():
    pytest.importorskip("triton")
    result = subprocess.run([sys.executable, "-c", NO_JAX], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# --- opcheck, torch.compile and derivatives -----------------------------------------------------------------------


# opcheck cannot compare 8-bit floats before and after a call, so its schema test needs a wider cache.
WIDE = dataclasses.replace(CASES["everything"], cache_dtype="bfloat16")
NOT_OF_THE_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_operators_pass_opcheck():
    """opcheck covers the schema, the fake kernel and the derivative, also with symbolic shapes."""
    torch.library.opcheck(OPERATORS.paged_attention, tuple(operator_arguments(arguments_of(WIDE))))
    narrow = operator_arguments(arguments_of(CASES["e5m2 queries"]))
    latent = operator_arguments(arguments_of(CASES["latent"]))
    for call in (narrow, latent):
        torch.library.opcheck(OPERATORS.paged_attention, tuple(call), test_utils=NOT_OF_THE_SCHEMA)


def test_operator_through_jax_passes_opcheck():
    arguments, _ = packed_arguments_of(WIDE)
    call = operator_arguments(arguments | {"max_query_length": 3}, "xla")
    torch.library.opcheck(OPERATORS.paged_attention_through_jax, tuple(call))


def test_only_native_operator_is_safe_in_cuda_graphs():
    assert torch.Tag.cudagraph_unsafe not in OPERATORS.paged_attention.default.tags
    assert torch.Tag.cudagraph_unsafe in OPERATORS.paged_attention_through_jax.default.tags


def test_compiled_call_is_one_graph_and_equals_the_eager_call():
    """The function has a scalar scale, a latent cache, and merges states; a new batch size must not recompile it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def layer(query, arguments):
        one, other = (
            paged_attention(query.sin(), **arguments, **more, return_residual=True)
            for more in (dict(key_scale=1.5, local_window_size=3), dict(implementation="xla", logits_soft_cap=2.0))
        )
        latents = arguments | {"value_pages": None, "value_dim": 8, "return_residual": True}
        return merge_attention_states(*zip(one, other, paged_attention(query, **latents), strict=True))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for batch in (5, 6):
        arguments = to_tensors(simple_arguments(batch=batch))
        query = arguments.pop("query")
        assert_same_bits(compiled(query, arguments), layer(query, arguments))
    assert counter.frame_count == 1


def test_invalid_arguments_of_a_compiled_call_raise_value_error():
    arguments = to_tensors(simple_arguments())
    compiled = torch.compile(
        lambda arguments: paged_attention(**arguments, num_splits=0), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match=r"`num_splits` must be an integer of 1\.\.256"):
        compiled(arguments)


def test_derivatives_raise_type_error():
    arguments = to_tensors(simple_arguments())
    query = arguments["query"].clone().requires_grad_()
    output = paged_attention(**(arguments | {"query": query}))
    with pytest.raises(TypeError, match="paged_attention is for inference and cannot be differentiated"):
        output.sum().backward()
    with torch.no_grad():
        assert not paged_attention(**(arguments | {"query": query})).requires_grad


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch for its first tangent
def test_forward_mode_raises_type_error():
    arguments = to_tensors(simple_arguments())
    query = arguments.pop("query")
    with pytest.raises(TypeError, match="paged_attention is for inference and cannot be differentiated"):
        torch.func.jvp(lambda query: paged_attention(query, **arguments), (query,), (query,))


def test_meta_tensors_give_meta_tensors():
    arguments = {name: x.to("meta") for name, x in to_tensors(simple_arguments(dtype=jnp.float8_e5m2)).items()}
    output, log_sum = paged_attention(**arguments, return_residual=True)
    assert output.is_meta and output.shape == (2, 1, 4, 8) and output.dtype == torch.bfloat16
    assert log_sum.shape == (2, 1, 4) and log_sum.dtype == torch.float32


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_the_errors_of_jax(name):
    changes, _ = MISTAKES[name]
    arguments = GOOD | changes
    functions = blockdiag.paged_attention, paged_attention
    ours, other = messages_of_mistakes(functions, (arguments, to_tensors(arguments)))
    assert ours == other


def test_valid_arguments_of_the_invalid_cases_are_accepted():
    assert paged_attention(**to_tensors(GOOD)).shape == (2, 3, 4, 24)
    assert paged_attention(**to_tensors(GOOD | PACKED)).shape == (80, 4, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(query=np.zeros((2, 3, 4, 8), np.float32)), "`query` must be a tensor, got <class 'numpy.ndarray'>"),
        (dict(key_pages=[1], query_dtype="float8_e5m2"), "`key_pages` must be a tensor, got <class 'list'>"),
        (dict(kv_lengths=np.zeros(2, np.int32)), "`kv_lengths` must be a tensor, got <class 'numpy.ndarray'>"),
        (dict(kv_lengths=torch.zeros(2, dtype=torch.int32, device="meta")), "`kv_lengths` must be on the device of"),
        (dict(via="xla"), "`via` must be None or 'jax', got 'xla'"),
    ],
)
def test_invalid_tensors_raise_value_error(changes, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**(to_tensors(GOOD) | changes))


def test_unsupported_implementation_raises_not_implemented_error():
    arguments = to_tensors(simple_arguments())
    arguments |= {name: arguments[name][..., :7].contiguous() for name in ("query", "key_pages")}
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot compute this call"):
        paged_attention(**arguments, implementation="triton")


# --- merged states ------------------------------------------------------------------------------------------------


def test_merged_states_match_jax():
    generator = np.random.default_rng(0)
    outputs = generator.normal(size=(3, 2, 5, 8)).astype(np.float32)
    lses = np.asarray(generator.normal(size=(3, 2, 5)) * 20, np.float32)
    lses[0, 0, 0] = lses[:, 1, 1] = -np.inf
    outputs[0, 0, 0] = np.nan
    expected = blockdiag.merge_attention_states(jnp.asarray(outputs), jnp.asarray(lses))
    assert np.asarray(expected[1])[1, 1] == -np.inf and not np.isnan(expected[0]).any()
    tensors = to_tensor(outputs), to_tensor(lses)
    for actual in (merge_attention_states(*tensors), merge_attention_states(list(tensors[0]), tuple(tensors[1]))):
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    narrow = merge_attention_states(tensors[0].bfloat16(), tensors[1])
    assert narrow[0].dtype == torch.bfloat16 and narrow[1].dtype == torch.float32


def test_merging_is_differentiable():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    lses = torch.tensor([[0.0] * 4, [-torch.inf] * 4, [-torch.inf, 0, 1, 2]], dtype=torch.float64)
    is_finite = lses.isfinite()
    finite = lses[is_finite].requires_grad_()

    def merge(outputs, finite):
        return merge_attention_states(outputs, lses.masked_scatter(is_finite, finite))

    assert torch.autograd.gradcheck(merge, (outputs, finite))


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), r"`lses` must have the shape of `outputs` .* got \(2, 4\)"),
        (torch.zeros(0, 3, 4), torch.zeros(0, 3), "of at least one part"),
        ([], [], "`outputs` must be one or more arrays"),
        ([torch.zeros(3, 4), torch.zeros(2, 4)], torch.zeros(2, 3), r"one shape .* 'float32\[2, 4\]'\]"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int32), "`lses` must have a floating dtype, got"),
        ([np.zeros((3, 4))], torch.zeros(1, 3), r"`outputs\[0\]` must be a tensor"),
    ],
)
def test_merge_with_invalid_arguments_raises_value_error(outputs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_attention_states(outputs, lses)


def test_cases_cover_scales_and_splits():
    problems = [case.problem for case in CASES.values()]
    assert {"none", "head", "token"} <= {problem.value_scale for problem in problems}
    assert any(problem.num_splits > 1 for problem in problems) and isinstance(CASES["paged"], PagedCase)
