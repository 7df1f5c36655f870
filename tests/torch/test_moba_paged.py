"""MoBA over a paged cache in torch on the CPU: values, the interpreted native path, and the operator."""

import pytest

torch = pytest.importorskip("torch")

import blockdiag  # noqa: E402
from blockdiag.torch import moba_paged_attention  # noqa: E402
from blockdiag.torch.ops.moba_paged.operators import MoBAPagedArguments, describe  # noqa: E402
from tests.ops.moba_paged.test_moba_paged import BAD, CASES, last_rows_of_moba  # noqa: E402
from tests.ops.moba_paged.test_prompts import CASES as PROMPTS  # noqa: E402
from tests.torch.paged_torch_support import (  # noqa: E402
    as_arrays,
    messages_of_mistakes,
    to_tensors,
)
from tests.torch.torch_support import assert_same_bits, to_tensor  # noqa: E402

OPERATORS = torch.ops.blockdiag
OPTIONS = {"block_size": 16, "top_k": 3}


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def arguments_of(case, device="cpu"):
    """Return the arguments of the public function."""
    options = {"block_size": case.block_size, "top_k": case.top_k, "scale": case.paged.scale}
    return to_tensors(case.arguments, device) | options


def operator_arguments(arguments, implementation=""):
    """Return the arguments of `torch.ops.blockdiag.moba_paged_attention` for a call."""
    defaults = dict.fromkeys(MoBAPagedArguments._fields) | {"implementation": implementation}
    return MoBAPagedArguments(**defaults | arguments)


def small_arguments():
    """Return the arguments of a call with two sequences of 83 keys and four queries each."""
    arguments, _ = last_rows_of_moba(4)
    return to_tensors(arguments) | OPTIONS


def test_moba_paged_attention_is_accurate():
    case = CASES["e4m3, scales of tokens"]
    case.check(as_arrays(moba_paged_attention(**arguments_of(case), return_residual=True)))


@pytest.mark.parametrize("via", [None, "jax"])
def test_results_match_the_last_rows_of_moba(via):
    _, expected = last_rows_of_moba(4)
    results = moba_paged_attention(**small_arguments(), via=via, implementation="reference", return_residual=True)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, to_tensor(other), rtol=1e-5, atol=1e-5)
    assert_same_bits([moba_paged_attention(**small_arguments(), implementation="reference")], results[:1])


NATIVE = (
    "pages of 16",
    "pages of 3, edges of blocks, fewer queries",
    "e4m3, scales of tokens",
    "e5m2, scales of heads",
    "eight bits",
    "nothing",
)


@pytest.mark.usefixtures("interpreted_paged_kernels")
@pytest.mark.parametrize("name", NATIVE)
def test_native_path_in_the_interpreter_is_accurate(name):
    from blockdiag.torch.ops.moba_paged import native

    case = CASES[name]
    case.check(as_arrays(native.attend(operator_arguments(arguments_of(case)))))


@pytest.mark.usefixtures("interpreted_paged_kernels")
@pytest.mark.parametrize(
    "name", ["pages of 16", "e4m3, scales of tokens", "e5m2, scales of heads", "eight bits", "own block only"]
)
def test_native_path_of_prompts_has_the_bits_of_jax(name):
    """The interpreter computes both, by the same launches."""
    from blockdiag.torch.ops.moba_paged import native

    case = PROMPTS[name]
    arguments = operator_arguments(arguments_of(case))
    query = arguments.query.clone()
    results = native.attend(arguments)
    case.check_products(as_arrays(results))
    assert_same_bits(results, case.results("triton"))
    assert_same_bits([arguments.query], [query])


@pytest.mark.usefixtures("interpreted_paged_kernels")
def test_scratch_memory_of_prompts_is_freed_after_its_last_launch():
    from blockdiag.torch.launches import unneeded_arrays
    from blockdiag.triton_kernels.moba_paged.plans import steps

    launches = steps(describe(operator_arguments(arguments_of(PROMPTS["pages of 16"]))))
    freed = dict(zip([x.name for x in launches], unneeded_arrays(launches, ("output", "log_sum")), strict=True))
    assert "chosen" in freed["moba_entries"] and {"part", "part_sum"} <= set(freed["moba_merge_forward"])
    written = {name for x in launches for name in x.output_names} - {"output", "log_sum"}
    assert written == {name for names in freed.values() for name in names}


@pytest.mark.usefixtures("interpreted_paged_kernels")
def test_empty_calls_return_zeros():
    """One call has no queries, and the other one has no pages."""
    from blockdiag.torch.ops.moba_paged import native

    arguments = small_arguments()
    nothing = dict(key_pages=torch.zeros(2, 0, 2, 16), value_pages=torch.zeros(2, 0, 2, 8))
    nothing |= dict(kv_lengths=torch.zeros(2, dtype=torch.int32), key_centroids=torch.zeros(2, 0, 2, 16))
    for changes in ({"query": torch.zeros(2, 0, 4, 16)}, nothing):
        results = native.attend(operator_arguments(arguments | changes))
        assert_same_bits(results, moba_paged_attention(**arguments | changes, return_residual=True))
        assert not results[0].any() and results[1].isneginf().all()


def test_operator_passes_opcheck():
    arguments = operator_arguments(small_arguments() | {"key_scale": torch.tensor(2.0)})
    torch.library.opcheck(OPERATORS.moba_paged_attention, tuple(arguments))
    assert torch.Tag.cudagraph_unsafe not in OPERATORS.moba_paged_attention.default.tags
    assert torch.Tag.cudagraph_unsafe in OPERATORS.moba_paged_attention_through_jax.default.tags


def test_compiled_call_is_one_graph_and_equals_the_eager_call():
    arguments = small_arguments()
    compiled = torch.compile(moba_paged_attention, fullgraph=True, backend="aot_eager")
    assert_same_bits([compiled(**arguments, value_scale=2.0)], [moba_paged_attention(**arguments, value_scale=2.0)])


def test_derivatives_raise_type_error():
    arguments = small_arguments()
    arguments["query"].requires_grad_()
    with pytest.raises(TypeError, match="moba_paged_attention is for inference and cannot be differentiated"):
        moba_paged_attention(**arguments).sum().backward()


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_raise_the_errors_of_jax(message):
    arguments, _ = last_rows_of_moba(1)
    arguments = arguments | OPTIONS | BAD[message]
    functions = blockdiag.moba_paged_attention, moba_paged_attention
    ours, other = messages_of_mistakes(functions, (arguments, to_tensors(arguments)))
    assert ours == other


def test_invalid_tensors_raise_value_error():
    arguments = small_arguments()
    centroids = arguments["key_centroids"]
    swapped = centroids.transpose(1, 2).contiguous().transpose(1, 2)
    for changes, message in (
        (dict(via="xla"), "`via` must be None or 'jax', got 'xla'"),
        (dict(key_centroids=swapped), "`key_centroids` must be contiguous"),
        (dict(key_centroids=centroids.to("meta")), "`key_centroids` must be on the device of `query`"),
        (dict(query=arguments["query"].numpy()), "`query` must be a tensor"),
        (dict(implementation="pallas"), "`implementation` must be None, one of"),
    ):
        with pytest.raises(ValueError, match=message):
            moba_paged_attention(**arguments | changes)
