"""MoBA in torch on the CPU: values, gradients, and the operators under torch's transformations."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockdiag.ops.moba import tables as moba_tables  # noqa: E402
from blockdiag.ops.moba.problem import MoBAProblem  # noqa: E402
from blockdiag.torch import Routing, moba_attention, moba_routing  # noqa: E402
from blockdiag.torch.ops.moba import tables as _moba_tables  # noqa: E402
from blockdiag.torch.ops.moba.operators import describe_lists  # noqa: E402
from blockdiag.triton_kernels.moba.plans import MoBALaunch  # noqa: E402
from blockdiag.triton_kernels.moba.steps import forward_steps  # noqa: E402
from tests.ops.moba_cases import MoBACase, assert_accurate, dense_results, dense_routing  # noqa: E402
from tests.torch.moba_torch_support import (  # noqa: E402
    CASES,
    attend,
    attention_arguments,
    edited_routing_of,
    list_arguments,
    options_of,
    results_of,
    route,
    routing_of,
    tensors_of,
    to_torch_routing,
    value_and_gradients,
)
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402

OPERATORS = torch.ops.blockdiag

EMPTY_CASES = {
    "no tokens": MoBACase(lengths=(0, 0)),
    "no keys": MoBACase(lengths=(5,), key_lengths=(0,)),
    "no queries": MoBACase(lengths=(0,), key_lengths=(5,)),
    "no sequences": MoBACase(lengths=(), layout="offsets", padding=20),
    "empty sequences": MoBACase(lengths=(0, 0), layout="offsets", padding=20),
}


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    yield
    torch._dynamo.reset()


def as_arrays(tensors):
    return tuple(to_numpy(x) for x in tensors)


# Values


@pytest.mark.parametrize("name", CASES | EMPTY_CASES)
def test_output_and_gradients_are_accurate(name):
    case = (CASES | EMPTY_CASES)[name]
    assert_accurate(case, as_arrays(results_of(case)), dense_results(case))


@pytest.mark.parametrize(
    ("name", "implementation"), [("packed, other keys", "reference"), ("own block only", ("triton", "xla"))]
)
def test_named_implementations_are_accurate(name, implementation):
    case = dataclasses.replace(CASES[name], head_dim=7) if implementation != "reference" else CASES[name]
    assert_accurate(case, as_arrays(results_of(case, implementation=implementation)), dense_results(case))


@pytest.mark.parametrize("name", ["batch", "packed, other keys", "not causal"])
def test_results_equal_jax_bitwise(name):
    case = CASES[name]
    assert_same_bits(results_of(case)[:2], case.attend(None)(*case.operands()[:3]))


@pytest.mark.parametrize("name", CASES | EMPTY_CASES)
def test_moba_routing_matches_dense_routing(name):
    case = (CASES | EMPTY_CASES)[name]
    routing = route(case)(*tensors_of(case)[:2])
    assert routing.indices.dtype == torch.int32 and routing.block_size == 16
    query, key, *_ = case.operands()
    np.testing.assert_array_equal(to_numpy(routing.indices), dense_routing(case, query, key))
    assert routing.num_blocks == -(-key.shape[-3] // 16)


@pytest.mark.parametrize("name", ["grouped, bfloat16", "packed, other keys", "not causal", "own block only"])
def test_given_routings_are_accurate(name):
    case = CASES[name]
    edited = edited_routing_of(name)
    actual = as_arrays(results_of(case, routing=to_torch_routing(edited)))
    assert_accurate(case, actual, dense_results(case, np.asarray(edited.indices)))
    same = route(case)(*tensors_of(case)[:2])
    assert_accurate(case, as_arrays(results_of(case, routing=same)), dense_results(case))


@pytest.mark.parametrize(("name", "implementation"), [("packed, other keys", None), ("not causal", "reference")])
def test_float64_results_are_accurate(name, implementation):
    case = dataclasses.replace(CASES[name], dtype="float64")
    with jax.enable_x64(True):
        tensors = tensors_of(case)
        actual = as_arrays(value_and_gradients(attend(case, implementation=implementation), *tensors))
        assert_accurate(case, actual, dense_results(case))


def test_gradients_pass_gradcheck():
    case = MoBACase(lengths=(18, 3), layout="offsets", padding=1, head_dim=2, top_k=2, query_heads=2, key_heads=1)
    inputs = [x.double().requires_grad_() for x in tensors_of(case)[:3]]
    # With a given routing, gradcheck's small differences cannot change the chosen blocks.
    routing = route(case)(*inputs[:2])
    function = attend(case, routing=routing, implementation="reference")
    assert torch.autograd.gradcheck(lambda *x: [one[:21] for one in function(*x)], inputs)


def test_non_contiguous_operands_give_equal_results():
    case = CASES["more keys, masked, scale"]
    *operands, log_sum_cotangent = tensors_of(case)
    swapped = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in operands]
    swapped.append(log_sum_cotangent.transpose(1, 2).contiguous().transpose(1, 2))
    mask = options_of(case)["key_mask"].t().contiguous().t()
    assert not any(x.is_contiguous() for x in (*swapped, mask))
    assert_same_bits(value_and_gradients(attend(case, key_mask=mask), *swapped), results_of(case))


def test_gradient_of_one_result_and_one_operand_equals_the_full_gradient():
    case = CASES["packed"]
    tensors = tensors_of(case)
    nothing = torch.zeros_like
    for index in range(2):
        expected = value_and_gradients(attend(case), *tensors[:3], *(
            x if place == index else nothing(x) for place, x in enumerate(tensors[3:])
        ))[2:]  # fmt: skip
        for wanted in range(3):
            operands = [x.clone().requires_grad_(place == wanted) for place, x in enumerate(tensors[:3])]
            attend(case)(*operands)[index].backward(tensors[3 + index])
            assert_same_bits([operands[wanted].grad], [expected[wanted]])
            assert all(x.grad is None for place, x in enumerate(operands) if place != wanted)


def test_residuals_are_operands_results_tables_and_lists():
    """The backward pass keeps no scores and no scratch memory."""
    case = CASES["batch"]
    query, key, value, *_ = (x.requires_grad_() for x in tensors_of(case))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output, log_sum = attend(case)(query, key, value)
    blocks, tokens, heads, slots = 8, 122, 2, 2
    lists = [(blocks, 4), (tokens, 4), (heads, blocks), (heads, blocks), (heads, tokens * slots), (heads, tokens)]
    operands = [tuple(x.shape) for x in (query, key, value, output, log_sum)]
    assert sorted(tuple(x.shape) for x in kept) == sorted(lists + operands)


def test_repeated_calls_agree_bitwise():
    case = CASES["packed, other keys"]
    assert_same_bits(results_of(case), results_of(case))


# Tables and choices that the native path computes without JAX

# Without `jax.jit`, JAX would compile dozens of operations for each shape.
jax_tables = jax.jit(moba_tables.moba_tables, static_argnums=(0, 1))

WILD_OFFSETS = {
    "decreasing, negative and beyond": ([-5, 90, 40, 10_000, 30], [10, -3, 5, 70, 20]),
    "late start": ([10, 50], [3, 80]),
    "empty ones": ([0, 0, 30, 30, 60], [0, 17, 17, 49, 49]),
    "all empty": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", WILD_OFFSETS)
def test_tables_of_invalid_offsets_equal_those_of_jax(name, is_causal):
    case = MoBACase(lengths=(60,), key_lengths=(75,), is_causal=is_causal)
    offsets = [np.asarray(x, np.int32) for x in WILD_OFFSETS[name]]
    arguments = list_arguments(case)
    problem = describe_lists(arguments._replace(query=arguments.query[0], key=arguments.key[0]))
    num_sequences = len(offsets[0]) - 1
    problem = dataclasses.replace(problem, num_blocks=(75 + 15 * num_sequences) // 16)
    expected = jax_tables(problem, 1, *map(jnp.asarray, offsets))
    actual = _moba_tables.moba_tables(problem, 1, *map(torch.as_tensor, offsets), torch.device("cpu"))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", CASES)
def test_tables_equal_those_of_jax(name):
    case = CASES[name]
    arguments = list_arguments(case)
    problem = describe_lists(arguments)
    expected = jax_tables(problem, arguments.num_sequences, *case.packing.values())
    offsets = arguments.sequence_offsets, arguments.key_sequence_offsets
    actual = _moba_tables.moba_tables(problem, arguments.num_sequences, *offsets, torch.device("cpu"))
    assert_same_bits(actual, expected)


@pytest.fixture
def interpreted_kernels(monkeypatch):
    """Yield the module of the native path, with Triton's interpreter instead of the launcher."""
    pytest.importorskip("triton")
    from blockdiag.interop.interpreter.launch import interpret
    from blockdiag.torch import launches as _moba_launches
    from blockdiag.torch.ops.moba import native as _moba_native
    from blockdiag.triton_kernels.launch.plan import Target

    def bound_launch(spec, device_index):
        spec = dataclasses.replace(spec, is_portable=True)

        def launch(tensors):
            arrays = [to_numpy(x).reshape(expected.shape) for x, expected in zip(tensors, spec.inputs, strict=True)]
            return tuple(to_tensor(x) for x in interpret(spec, *arrays, target=Target.for_arch(80)))

        return launch

    monkeypatch.setattr(_moba_launches, "bound_launch", bound_launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield _moba_native
    _moba_native._launches.cache_clear()


NATIVE_CASES = {
    "batch": MoBACase(lengths=(40, 40), head_dim=16, query_heads=2, key_heads=1),
    "packed, masked, bfloat16": MoBACase(
        lengths=(37, 0, 20), layout="offsets", padding=3, head_dim=16, mask=0.3, dtype="bfloat16"
    ),
    "not causal": MoBACase(lengths=(9,), key_lengths=(40,), head_dim=16, is_causal=False, top_k=2),
    "own block only": MoBACase(lengths=(20,), head_dim=16, top_k=1),
    "no keys": MoBACase(lengths=(5,), key_lengths=(0,), head_dim=16),
}


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("name", NATIVE_CASES)
def test_native_path_in_the_interpreter_is_accurate(interpreted_kernels, name, is_given):
    case = NATIVE_CASES[name]
    *operands, cotangent, log_sum_cotangent = tensors_of(case)
    query, key, *_ = case.operands()
    arguments = list_arguments(case)
    indices = interpreted_kernels.route(arguments)
    expected = dense_routing(case, query, key)
    np.testing.assert_array_equal(to_numpy(indices), expected)
    if is_given:
        routing = Routing(to_tensor(expected[..., ::-1].copy()), 16, -(-key.shape[-3] // 16))
        arguments = list_arguments(case, routing=routing)
    *lists, own = interpreted_kernels.make_lists(arguments)
    problem = describe_lists(arguments)
    if not is_given and problem.slots > 0:
        # A choice by given mean keys reads no key, so keys of NaN must give the same lists.
        mask = None if arguments.key_mask is None else arguments.key_mask.reshape(-1)
        centroids = interpreted_kernels.find_centroids(problem, "", arguments.key.flatten(0, -3), mask, lists[0])
        unread = arguments._replace(key=torch.full_like(arguments.key, torch.nan))
        chosen = interpreted_kernels.choose(unread, centroids, problem.sequence_blocks)
        for one, other in zip(interpreted_kernels.make_lists(unread, chosen), (*lists, own), strict=True):
            assert torch.equal(one, other)
    call = interpreted_kernels.AttentionArguments(
        *operands,
        arguments.key_mask,
        *lists,
        own if is_given and case.is_causal else None,
        16,
        case.scale,
        case.is_causal,
        "sequence_offsets" in case.packing,
        "",
    )
    results = interpreted_kernels.attend(call)
    gradients = interpreted_kernels.differentiate(call, *results, cotangent, log_sum_cotangent)
    assert_accurate(case, as_arrays((*results, *gradients)), dense_results(case))


@pytest.mark.parametrize("name", ["packed, other keys", "not causal", "more queries"])
def test_given_choice_equals_that_of_jax(name):
    from blockdiag.ops.moba import routing as jax_routing
    from blockdiag.torch.ops.moba import routing as _moba_routing

    case = CASES[name]
    extremes = np.random.default_rng(1).choice(
        np.asarray([-(2**31), 2**31 - 1, 0, 1, 2], np.int32), routing_of(name).indices.shape
    )
    for indices in (edited_routing_of(name).indices, routing_of(name).indices, jnp.asarray(extremes)):
        given = to_torch_routing(dataclasses.replace(routing_of(name), indices=indices))
        arguments = list_arguments(case, routing=given)
        problem = describe_lists(arguments)
        tables = jax_tables(problem, arguments.num_sequences, *case.packing.values())
        mask = None if case.key_mask() is None else case.key_mask().reshape(-1)
        flat = indices.reshape(problem.query_tokens, problem.query_heads, problem.slots)
        choose = jax.jit(jax_routing.given_choice, static_argnums=0)
        chosen, own = choose(problem, flat, None if mask is None else jnp.asarray(mask), *tables)
        tensors = (to_tensor(flat), None if mask is None else to_tensor(mask), *map(to_tensor, tables))
        actual, actual_own = _moba_routing.given_choice(problem, *tensors)
        assert_same_bits([actual], [chosen])
        assert (own is None) == (actual_own is None)
        if own is not None:
            assert_same_bits([actual_own], [own])


# Operators under torch's transformations


def check_operators(case, suffix="", **more):
    """Run opcheck on the operators: schema, fake kernel and derivative, also with symbolic shapes."""
    operators = {
        name: getattr(OPERATORS, f"moba_{name}{suffix}") for name in ("routing", "lists", "forward", "backward")
    }
    lists = list_arguments(case, **more)
    torch.library.opcheck(operators["lists"], tuple(lists))
    if lists.indices is None:
        torch.library.opcheck(operators["routing"], (*lists[:5], *lists[8:]))
    arguments = attention_arguments(case, **more)
    torch.library.opcheck(operators["forward"], (*(x.clone().requires_grad_() for x in arguments[:3]), *arguments[3:]))
    results = operators["forward"](*arguments)
    torch.library.opcheck(operators["backward"], (*results, *tensors_of(case)[3:], *arguments))


@pytest.mark.parametrize("name", ["grouped, bfloat16", "packed, other keys", "own block only"])
def test_operators_pass_opcheck(name):
    check_operators(CASES[name])


@pytest.mark.parametrize("name", ["batch", "not causal"])
def test_operators_with_a_given_routing_pass_opcheck(name):
    check_operators(CASES[name], routing=to_torch_routing(edited_routing_of(name)))


def test_operators_through_jax_pass_opcheck():
    check_operators(CASES["packed"], "_through_jax", implementation="xla")


def test_operators_of_empty_calls_pass_opcheck():
    check_operators(EMPTY_CASES["no keys"])


def test_only_native_operators_are_safe_in_cuda_graphs():
    for method in ("routing", "lists", "forward", "backward"):
        native, through_jax = (getattr(OPERATORS, f"moba_{method}{end}") for end in ("", "_through_jax"))
        assert torch.Tag.cudagraph_unsafe not in native.default.tags
        assert torch.Tag.cudagraph_unsafe in through_jax.default.tags


@pytest.mark.parametrize("via", [None, "jax"])
@pytest.mark.parametrize("name", ["grouped, bfloat16", "packed, other keys"])
def test_compiled_call_is_one_graph_and_equals_the_eager_call(name, via):
    case = CASES[name]
    function = attend(case, via=via)

    def layer(query, key, value):
        output, log_sum = function(query.sin(), key, value)
        return 2 * output, log_sum

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(value_and_gradients(compiled, *tensors_of(case)), value_and_gradients(layer, *tensors_of(case)))


def test_compiled_layers_with_a_shared_routing_equal_eager_layers():
    case = CASES["batch"]

    def layers(query, key, value):
        routing = route(case)(query, key)
        for _ in range(2):
            query, log_sum = attend(case, routing=routing)(query, key, value)
        return query, log_sum

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    assert_same_bits(value_and_gradients(compiled, *tensors_of(case)), value_and_gradients(layers, *tensors_of(case)))


@pytest.mark.parametrize("layout", ["batch", "offsets"])
def test_new_lengths_do_not_recompile(layout):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def function(query, key, value, offsets):
        options = {"sequence_offsets": offsets} if layout == "offsets" else {}
        return moba_attention(query, key, value, block_size=16, top_k=2, return_residual=True, **options)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 37):
        case = MoBACase(lengths=(length,) * 2, layout=layout)
        offsets = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        actual, expected = (
            value_and_gradients(functools.partial(one, offsets=offsets), *tensors_of(case))
            for one in (compiled, function)
        )
        assert_same_bits(actual, expected)
    assert counter.frame_count == 1


def test_invalid_arguments_of_a_compiled_call_raise_value_error():
    query = torch.zeros(20, 4, 8)
    mistakes = {
        "`block_size` must be a multiple of 16": dict(block_size=0),
        "`top_k` must be an integer of 1..64": dict(top_k=0),
        "`routing.block_size` must be 16 here, got 32": dict(routing=Routing(torch.zeros(20, 4, 2).int(), 32, 2)),
    }
    for message, change in mistakes.items():
        attend = functools.partial(moba_attention, **(dict(block_size=16, top_k=2) | change))
        compiled = torch.compile(lambda x, attend=attend: attend(x, x, x), fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match=message):
            compiled(query)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_equals_the_bfloat16_call(is_compiled):
    case = CASES["batch"]
    query, key, value, cotangent, log_sum_cotangent = tensors_of(case)
    function = attend(case)

    def layer(query, key, value):
        with torch.autocast("cpu", torch.bfloat16):
            return function(query, key, value)

    narrow = [x.bfloat16() for x in (query, key, value, cotangent)]
    output, log_sum, *gradients = value_and_gradients(function, *narrow, log_sum_cotangent)
    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = value_and_gradients(layer, query, key, value, cotangent.bfloat16(), log_sum_cotangent)
    assert_same_bits(actual, [output, log_sum, *(x.float() for x in gradients)])
    with torch.autocast("cpu", torch.bfloat16):
        assert function(query.double(), key.double(), value.double())[0].dtype == torch.float64
        routing = route(case)(query, key)
    assert_same_bits([routing.indices], [route(case)(*narrow[:2]).indices])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_activation_checkpointing_equals_the_plain_call(is_compiled):
    case = CASES["packed, other keys"]
    function = attend(case)
    run = lambda query, key, value: function(query.sin(), key, value)  # noqa: E731

    def layer(*operands):
        return torch.utils.checkpoint.checkpoint(run, *operands, use_reentrant=False)

    expected = value_and_gradients(run, *tensors_of(case))
    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(value_and_gradients(layer, *tensors_of(case)), expected)


def test_selective_checkpointing_routes_and_attends_once():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    case = CASES["batch"]
    run = lambda query, key, value: attend(case)(query.sin(), key, value)  # noqa: E731
    calls = []

    def policy(context, operator, *args, **kwargs):
        kept = operator in (OPERATORS.moba_lists.default, OPERATORS.moba_forward.default)
        if kept:
            calls.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(*operands):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return torch.utils.checkpoint.checkpoint(run, *operands, use_reentrant=False, context_fn=contexts)

    assert_same_bits(value_and_gradients(layer, *tensors_of(case)), value_and_gradients(run, *tensors_of(case)))
    assert calls.count(False) == 2


def test_vmap_equals_single_calls():
    case = CASES["batch"]
    stacked = [torch.stack((x, 2 * x)) for x in tensors_of(case)]
    mapped = value_and_gradients(torch.func.vmap(attend(case)), *stacked)
    for index in range(2):
        expected = value_and_gradients(attend(case), *(x[index] for x in stacked))
        assert_same_bits([x[index] for x in mapped], expected)


def test_second_derivatives_raise_not_implemented_error():
    query, key, value, *_ = tensors_of(CASES["batch"])
    query.requires_grad_()
    output, _ = attend(CASES["batch"])(query, key, value)
    (gradient,) = torch.autograd.grad(output.sin().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of MoBA are not available in torch"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by torch for its first tangent
def test_forward_mode_raises_not_implemented_error():
    operands = tuple(tensors_of(CASES["batch"])[:3])
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives of MoBA"):
        torch.func.jvp(attend(CASES["batch"]), operands, operands)


def test_meta_tensors_give_meta_tensors():
    """Shape inference needs neither data nor an implementation."""
    query = torch.zeros(2, 100, 4, 8, device="meta", dtype=torch.bfloat16)
    output, log_sum = moba_attention(query, query, query, block_size=16, top_k=3, return_residual=True)
    assert output.is_meta and output.shape == query.shape and output.dtype == query.dtype
    assert log_sum.shape == (2, 100, 4) and log_sum.dtype == torch.float32
    assert moba_routing(query, query, block_size=16, top_k=3).indices.shape == (2, 100, 4, 3)


# Mistakes


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


QUERY, KEY = torch.zeros(20, 4, 8), torch.zeros(30, 2, 8)
GOOD_ROUTING = Routing(torch.zeros(20, 4, 2, dtype=torch.int32), 16, 2)
PACKED = dict(sequence_offsets=offsets(0, 20), key_sequence_offsets=offsets(0, 30))
SHARED_MISTAKES = {
    "array": (dict(query=np.zeros((20, 4, 8), np.float32)), "`query` must be a tensor, got <class 'numpy.ndarray'>"),
    "rank 2": (dict(query=torch.zeros(20, 8)), r"`query` must have shape \[B, T, N, H\] .* got \(20, 8\); reshape"),
    "key head dimension": (dict(key=torch.zeros(30, 2, 16)), r"`key` must have shape \(S, K, 8\) .* got \(30, 2, 16\)"),
    "heads do not divide": (dict(query=torch.zeros(20, 3, 8)), "must be a multiple .* got 3 and 2"),
    "key dtype": (dict(key=KEY.half()), "`key` must have the dtype of `query`, .* torch.float16; cast"),
    "key device": (dict(key=KEY.to("meta")), "`key` must be on the device of `query`, cpu, got meta"),
    "block size 24": (dict(block_size=24), "`block_size` must be a multiple of 16 from 16 to 4096, .* got 24"),
    "block size of a float": (dict(block_size=16.0), r"`block_size` .* got 16\.0"),
    "top_k 65": (dict(top_k=65), "`top_k` must be an integer of 1..64, .* got 65; .* larger blocks"),
    "causal text": (dict(is_causal="yes"), "`is_causal` must be True or False, .* got 'yes'"),
    "only key offsets": (dict(key_sequence_offsets=offsets(0, 30)), "`key_sequence_offsets` needs `sequence_offsets`"),
    "offsets of int64": (
        PACKED | dict(sequence_offsets=torch.tensor([0, 20])),
        "`sequence_offsets` must be an int32 array, got torch.int64; convert",
    ),
    "offsets of a list": (PACKED | dict(sequence_offsets=[0, 20]), "`sequence_offsets` must be a tensor, got <class"),
    "offsets beyond": (
        PACKED | dict(sequence_offsets=offsets(0, 21)),
        "`sequence_offsets` must end within the 20 tokens of `query`, got 21",
    ),
    "key offsets beyond": (
        PACKED | dict(key_sequence_offsets=offsets(0, 31)),
        "`key_sequence_offsets` must end within the 30 tokens of `key`, got 31",
    ),
    "mask of numbers": (dict(key_mask=torch.zeros(30)), "`key_mask` must be a bool array, got torch.float32; True"),
    "mask of queries": (dict(key_mask=torch.zeros(20).bool()), r"`key_mask` must have shape \(30,\), .* got \(20,\)"),
    "via": (dict(via="xla"), "`via` must be None or 'jax', got 'xla'"),
    "implementation": (dict(implementation="pallas"), "`implementation` must be None, one of .* got 'pallas'"),
}
ATTENTION_MISTAKES = {
    "value shape": (dict(value=torch.zeros(29, 2, 8)), r"`value` must have the shape of `key`, .* got \(29, 2, 8\)"),
    "value device": (dict(value=KEY.to("meta")), "`value` must be on the device of `query`, cpu, got meta"),
    "negative scale": (dict(scale=-1.0), r"`scale` must be a positive number, .* got -1\.0"),
    "routing of a tensor": (dict(routing=GOOD_ROUTING.indices), "`routing` must be a blockdiag.torch.Routing or None"),
    "routing of numbers": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, indices=torch.zeros(20, 4, 2))),
        "`routing.indices` must be an int32 array, got torch.float32",
    ),
    "routing with another k": (dict(routing=GOOD_ROUTING, top_k=3), r"`routing.indices` must have shape \(20, 4, 3\)"),
    "routing with another block size": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, block_size=32)),
        "`routing.block_size` must be 16 here, got 32",
    ),
    "routing of other keys": (
        dict(routing=dataclasses.replace(GOOD_ROUTING, num_blocks=3)),
        "`routing.num_blocks` must be 2 here, got 3",
    ),
}


@pytest.mark.parametrize("name", SHARED_MISTAKES | ATTENTION_MISTAKES)
def test_moba_attention_with_invalid_arguments_raises_value_error(name):
    changes, message = (SHARED_MISTAKES | ATTENTION_MISTAKES)[name]
    arguments = dict(query=QUERY, key=KEY, value=changes.get("key", KEY), block_size=16, top_k=2) | changes
    with pytest.raises(ValueError, match=message):
        moba_attention(**arguments)


@pytest.mark.parametrize("name", SHARED_MISTAKES)
def test_moba_routing_with_invalid_arguments_raises_value_error(name):
    changes, message = SHARED_MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        moba_routing(**(dict(query=QUERY, key=KEY, block_size=16, top_k=2) | changes))


def test_unsupported_implementation_raises_not_implemented_error():
    query = torch.zeros(20, 1, 7)
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot compute this call"):
        moba_attention(query, query, query, block_size=16, top_k=2, implementation="triton")


def test_lists_of_another_call_raise_value_error():
    arguments = attention_arguments(CASES["batch"])
    with pytest.raises(ValueError, match=r"`queries` must be torch.int32 of shape \(122, 4\), got .*moba_lists"):
        OPERATORS.moba_forward(*arguments[:5], arguments[5][:-1], *arguments[6:])


def test_forward_steps_merge_each_group_of_heads_before_the_next():
    from blockdiag.torch import launches as _moba_launches

    problem = MoBAProblem(
        query_tokens=256,
        key_tokens=256,
        query_heads=4,
        key_heads=4,
        head_dim=64,
        dtype="bfloat16",
        block_size=16,
        num_blocks=16,
        slots=7,
        is_causal=True,
        has_key_mask=False,
        scale=1.0,
    )
    specs = [MoBALaunch(problem, kind, heads=heads) for kind, heads in forward_steps(problem)]
    assert [spec.kind for spec in specs] == ["items", *["blocks_forward", "merge_forward"] * 2]
    needed = [_moba_launches.needed_arrays(specs[index + 1 :], {"output", "log_sum"}) for index in range(len(specs))]
    assert ["part" in names for names in needed] == [False, True, False, True, False]
    assert ["output" in names for names in needed] == [False, False, True, True, True]
