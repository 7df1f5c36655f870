"""Loops, branches and recomputation around attention, fused from torch and run in Triton's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from blockdiag import NotFusible  # noqa: E402
from blockdiag.fusion.program import trace  # noqa: E402
from blockdiag.torch import fuse  # noqa: E402
from blockdiag.torch.fusion import call  # noqa: E402
from blockdiag.torch.fusion.program import marked  # noqa: E402
from blockdiag.torch.fusion.region import region_p  # noqa: E402
from blockdiag.torch.fusion.split import Segment, Split  # noqa: E402
from tests.fusion.regions import test_nested_programs as inner  # noqa: E402
from tests.torch.torch_support import assert_same_bits, to_numpy, to_tensor  # noqa: E402

TOKENS, WIDTH, LAYERS = 20, 16, 3


def attention(query, key, value):
    """Compute attention of operands [T, H]."""
    return jax.nn.softmax(query @ key.mT / 4) @ value


def layer(x, weight):
    """Add attention of projections to x [T, H]; `weight` is [3, H, H]."""
    return x + attention(*(x @ weight[i] for i in range(3)))


def arrays():
    """Return an input and a weight for each layer."""
    draw = np.random.default_rng(0)
    shapes = ((TOKENS, WIDTH), (LAYERS, 3, WIDTH, WIDTH))
    return [jnp.asarray(draw.normal(size=shape) / 4, jnp.float32) for shape in shapes]


def regions_in(program):
    """Count the regions of a program, including those inside nested programs."""
    found = 0
    for equation in program.eqns:
        found += equation.primitive is region_p
        for param in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            within = getattr(param, "jaxpr", param)
            found += regions_in(within) if hasattr(within, "eqns") else 0
    return found


def assert_as_in_jax(function, given, tolerance=1e-5):
    """Assert that the fused function has the results and gradients of `function` in JAX."""
    outputs, pull = jax.vjp(lambda *x: jax.tree.leaves(function(*x)), *given)
    cotangents = [jnp.sin(3 * x) for x in outputs]
    operands = [to_tensor(x).requires_grad_() for x in given]
    found = jax.tree.leaves(fuse(function, implementation="triton")(*operands))
    pairs = zip(found, map(to_tensor, cotangents), strict=True)
    # Counts and the results of loops without steps depend on no operand.
    followed, given_back = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
    gradients = torch.autograd.grad(followed, operands, given_back, materialize_grads=True)
    for one, other in zip([*found, *gradients], [*outputs, *pull(cotangents)], strict=True):
        largest = np.abs(other).max(initial=1)
        torch.testing.assert_close(one.detach(), to_tensor(other), rtol=0, atol=tolerance * largest)


@pytest.fixture
def launched(monkeypatch):
    """Return a list that collects the names of all kernels in the order in which they run."""
    names = []
    original = call._interpreted

    def counted(spec):
        launch = original(spec)
        return lambda tensors: (names.append(spec.name), launch(tensors))[1]

    monkeypatch.setattr(call, "_interpreted", counted)
    return names


@pytest.mark.parametrize("name", inner.FUNCTIONS)
def test_nested_attention_matches_jax_with_gradients(name):
    function, count = inner.FUNCTIONS[name]
    program = trace(function, tuple(inner.given()), {})
    assert regions_in(marked(program, has_gradient=True).jaxpr) == count
    assert_as_in_jax(function, inner.given(), 1e-4)


def test_masks_built_before_a_loop_match_jax():
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (inner.BATCH, inner.TOKENS)), 1))
    given = [*inner.given(), *inner.arrays((8,))]
    assert_as_in_jax(lambda *x: inner.hoisted(*x[:-1], segments, x[-1]), given, 1e-4)


def counted_up(x, weights):
    """Apply the layers in a loop over their indices."""
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, weights[i]), x)


def with_all_results(x, weights):
    """Return the results of every step of a reverse scan, and counters that the steps carry."""

    def step(carry, weight):
        count, x = carry
        x = layer(x, weight)
        return (count + 1, x), (x, count)

    (count, last), (all_of_them, counts) = jax.lax.scan(step, (0, x), weights, reverse=True)
    return last, all_of_them, (counts + count).astype(jnp.float32)


def without_steps(x, weights):
    last, made = jax.lax.scan(lambda x, w: (layer(x, w), x), x, weights[:0])
    return layer(last, weights[0]), made


def chosen_by_a_constant(x, weights):
    return jax.lax.switch(jnp.asarray(7), [lambda x: x, layer_of(weights[0]), layer_of(weights[1])], x)


def layer_of(weight):
    return functools.partial(layer, weight=weight)


@pytest.mark.parametrize("function", [counted_up, with_all_results, without_steps, chosen_by_a_constant])
def test_loops_and_branches_match_jax(function):
    assert_as_in_jax(function, arrays())


def test_loop_is_prepared_once(launched):
    """A loop of several steps must not trace its function more often than a loop of one step."""

    def scanned(x, weights):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]

    x, weights = map(to_tensor, arrays())
    counts = []
    for length in (1, LAYERS):
        traces = []
        fused = fuse(lambda *given, traces=traces: (traces.append(1), scanned(*given))[1], implementation="triton")
        fused(x, weights[:length])
        counts.append(len(traces))
    assert counts[0] == counts[1] and launched == ["fused_forward"] * (1 + LAYERS)


@pytest.mark.parametrize(
    ("policy", "times"), [(None, 2), (jax.checkpoint_policies.everything_saveable, 1)], ids=["nothing", "everything"]
)
def test_checkpointed_attention_is_recomputed_unless_saved(policy, times, launched):
    def function(x, weights):
        again = jax.checkpoint(layer, policy=policy)
        return jax.lax.scan(lambda x, w: (again(x, w), None), x, weights)[0]

    operands = [to_tensor(x).requires_grad_() for x in arrays()]
    fused = fuse(function, implementation="triton")
    output = fused(*operands)
    assert launched.count("fused_forward") == LAYERS
    output.sum().backward()
    assert launched.count("fused_forward") == times * LAYERS
    launched.clear()
    with torch.no_grad():
        fused(*operands)
    assert launched == ["fused_forward"] * LAYERS


def test_only_the_chosen_branch_runs(launched):
    def function(x, weights):
        return jax.lax.cond(x[0, 0] > 0, lambda: layer(x, weights[0]), lambda: 2 * x)

    x, weights = map(to_tensor, arrays())
    fused = fuse(function, implementation="triton")
    x[0, 0] = -1
    assert_same_bits([fused(x, weights)], [2 * x])
    assert not launched
    x[0, 0] = 1
    torch.testing.assert_close(
        fused(x, weights), to_tensor(layer(*(jnp.asarray(to_numpy(y)) for y in (x, weights[0]))))
    )
    assert launched == ["fused_forward"]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_cond_of_attention_needs_no_jax_segment(is_wanted):
    """Neither the predicate nor attention to arguments in a branch may need JAX."""

    def function(x, is_wanted):
        return jax.lax.cond(is_wanted, lambda: attention(x, x, x), lambda: x)

    x = arrays()[0]
    split = Split(marked(trace(function, (x, jnp.array(is_wanted)), {}), has_gradient=True))
    assert not any(isinstance(part, Segment) for part in split.parts)
    found = fuse(function, implementation="triton")(to_tensor(x), torch.tensor(is_wanted))
    torch.testing.assert_close(found, to_tensor(function(x, is_wanted)))


@pytest.mark.parametrize("index", [-2, 0, 1, 7])
def test_switch_clamps_indices_beyond_the_branches(index):
    def function(x, index):
        return jax.lax.switch(index, [lambda: x, lambda: 2 * x, lambda: attention(x, x, x)])

    x = arrays()[0]
    found = fuse(function, implementation="triton")(to_tensor(x), torch.tensor(index, dtype=torch.int32))
    torch.testing.assert_close(found, to_tensor(function(x, index)))


def test_results_of_loops_and_branches_own_their_memory():
    """This includes unchanged carries of a loop and operands that a branch returns unchanged."""

    def function(x, weights):
        (same, last), _ = jax.lax.scan(lambda c, w: ((c[0], layer(c[1], w)), None), (x, x), weights)
        first, second = jax.lax.cond(x[0, 0] < 9, lambda: (x, x), lambda: (layer(x, weights[0]), x))
        return same, last, first, second

    x, weights = map(to_tensor, arrays())
    expected = x.clone()
    same, last, first, second = fuse(function, implementation="triton")(x, weights)
    for one in (same, last, first):
        one.zero_()
    assert_same_bits([x, second], [expected, expected])


def test_second_derivatives_raise_not_implemented_error():
    operands = [to_tensor(x).requires_grad_() for x in arrays()]
    output = fuse(inner_scan, implementation="triton")(*operands)
    (gradient, *_) = torch.autograd.grad(output.square().sum(), operands, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives|first derivatives only"):
        gradient.sum().backward()


def inner_scan(x, weights):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights)[0]


def test_while_loop_with_attention_raises_not_fusible():
    def function(x, weights):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: layer(x, weights[0]), x)

    with pytest.raises(NotFusible, match=r"in `while` .*test_fuse_inner.py.*fuse the function that they run"):
        fuse(function, implementation="triton")(*map(to_tensor, arrays()))


def test_custom_jvp_of_attention_raises_not_fusible():
    by_hand = jax.custom_jvp(attention)
    by_hand.defjvp(lambda primals, tangents: jax.jvp(attention, primals, tangents))
    x, weights = map(to_tensor, arrays())
    with pytest.raises(NotFusible, match=r"in `custom_jvp_call` .*test_fuse_inner.py.*fuse the function that it calls"):
        fuse(lambda x, weights: by_hand(x, x @ weights[0, 0], x), implementation="triton")(x, weights)


def test_unsupported_head_dimension_in_a_loop_raises_not_implemented_error():
    x, weights = map(to_tensor, arrays())
    with pytest.raises(NotImplementedError, match="head sizes up to 256"):
        wide = torch.zeros(TOKENS, 264), torch.zeros(LAYERS, 3, 264, 264)
        fuse(inner_scan, implementation="triton")(*wide)
    found = fuse(inner_scan, implementation=("triton", "xla"))(x, weights)
    torch.testing.assert_close(found, to_tensor(inner_scan(*arrays())))
