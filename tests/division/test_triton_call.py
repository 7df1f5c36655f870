"""`triton_call` with a `sharding_rule`: users' kernels on arrays sharded over a mesh."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P

from blockdiag.interop import ShardValue, TensorDescriptor, compile_target, kernel_call, triton_call
from tests.division.division_support import KINDS, assert_divides, make_mesh, shard

ALL = ("data", "model")


@triton.jit
def weighted_kernel(p_x, p_weights, p_out, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Compute out[row, h, :] = x[row, h, :] * weights[h] for one head and some rows in each program."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_x = (o_row[:, None] * heads + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    m_x = (o_row < num_rows)[:, None]
    x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    tl.store(p_out + o_x, x * tl.load(p_weights + head), mask=m_x)


def weighted(x, weights, **changes):
    """Call `weighted_kernel` on x [batch, tokens, heads, width] and weights [heads]."""
    options = dict(
        kernel=weighted_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=lambda meta: (triton.cdiv(meta["b"] * meta["t"], meta["ROWS"]), meta["h"]),
        num_rows=ShardValue(lambda sizes: sizes["b"] * sizes["t"]),
        WIDTH=16,
        ROWS=8,
        interpret=True,
        sharding_rule="b t h _, h -> b t h _",
        divided_labels="b h",
    )
    return triton_call(x, weights, **(options | changes))


def weighted_by_hand(x, weights, **changes):
    return x * weights[None, None, :, None]


@triton.jit
def sum_kernel(p_x, p_out, num_rows, WIDTH: tl.constexpr):
    """Compute out[:], the sum of x [num_rows, WIDTH] over rows."""
    o_column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for row in range(num_rows):
        total += tl.load(p_x + row * WIDTH + o_column)
    tl.store(p_out + o_column, total)


def total(x, **changes):
    options = dict(
        kernel=sum_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        grid=lambda meta: 1,
        num_rows=ShardValue(lambda sizes: sizes["row"]),
        WIDTH=16,
        interpret=True,
        sharding_rule="row _ -> _",
        divided_labels="row",
    )
    return triton_call(x, **(options | changes))


@triton.jit
def copy_kernel(d_x, p_out, WIDTH: tl.constexpr):
    row = tl.program_id(0) * 2
    x = d_x.load([row, 0])
    tl.store(p_out + (row + tl.arange(0, 2)[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :], x)


@triton.jit
def increment_kernel(p_x, SIZE: tl.constexpr):
    p_own = p_x + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(p_own, tl.load(p_own) + 1)


def arrays():
    draw = np.random.default_rng(0)
    return {
        "x": jnp.asarray(draw.normal(size=(4, 5, 2, 16)), jnp.float32),
        "weights": jnp.asarray(draw.normal(size=2), jnp.float32),
    }


DIVIDED = {
    "batch": (P(ALL), P()),
    "heads": (P(None, None, "model"), P("model")),
    "heads of one operand": (P(None, None, "model"), P()),
    "batch and heads": (P("data", None, "model"), P("model")),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_triton_call_on_an_explicit_mesh_is_partitioned(case):
    specs = dict(zip(("x", "weights"), DIVIDED[case], strict=True))
    found = assert_divides(weighted, arrays(), specs, "explicit", atol=0)
    np.testing.assert_array_equal(found, weighted_by_hand(**arrays()))


def as_array_code(compute):
    """Return a stand-in for `launch` that checks shapes and runs `compute`, and the list of its launches."""

    def launch(spec, *given, interpret):
        assert interpret and [x.shape for x in given] == [x.shape for x in spec.inputs]
        launched.append((spec.grid, {name: getattr(x, "value", None) for name, x in spec.arguments}))
        results = compute(*given)
        assert [x.shape for x in spec.outputs] == [results.shape]
        return (results,)

    launched = []
    return launch, launched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", DIVIDED)
@pytest.mark.division("{case}", operation="triton_call")
def test_triton_call_on_a_mesh_launches_the_kernel_of_each_shard(monkeypatch, case, kind):
    """Array code replaces the kernel, because the interpreter cannot run within XLA's partitioner."""
    launch, launched = as_array_code(weighted_by_hand)
    monkeypatch.setattr(kernel_call, "launch", launch)
    specs = dict(zip(("x", "weights"), DIVIDED[case], strict=True))
    assert_divides(lambda **given: weighted(**given), arrays(), specs, kind)  # a new function, not traced before
    grid, values = launched[-1]
    rows, heads = {"batch": (5, 2), "heads": (20, 1), "heads of one operand": (20, 1), "batch and heads": (10, 1)}[case]
    assert grid == (-(-rows // 8), heads, 1) and values["num_rows"] == rows


@pytest.mark.parametrize("kind", KINDS)
def test_triton_call_outputs_without_a_sharded_label_are_summed(monkeypatch, kind):
    if kind == "automatic":
        launch, _ = as_array_code(lambda x: x.sum(0))
        monkeypatch.setattr(kernel_call, "launch", launch)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    found = assert_divides(lambda x: total(x), {"x": x}, {"x": P(ALL)}, kind, {"all-reduce": 1})
    np.testing.assert_allclose(found, x.sum(0), rtol=1e-5, atol=1e-5)


def merged(x, weights, rule="(b t) h _, h -> b t h _"):
    """Call `weighted` on x [batch * tokens, heads, width], whose first axis has two labels."""
    return weighted(
        x.reshape(20, 2, 16), weights, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), sharding_rule=rule
    )  # fmt: skip


def test_triton_call_with_merged_labels_is_partitioned():
    found = assert_divides(lambda **given: merged(**given), arrays(), {"x": P(ALL)}, "explicit", atol=0)
    np.testing.assert_array_equal(found, weighted_by_hand(**arrays()))


def test_triton_call_with_labels_of_unknown_size_raises_value_error():
    with pytest.raises(ValueError, match=r"does not determine the sizes of \['b', 't'\]; reshape an array"):
        weighted(
            arrays()["x"].reshape(20, 2, 16), arrays()["weights"], sharding_rule="(b t) h _, h -> (b t) h _",
            divided_labels="b",
        )  # fmt: skip


@pytest.mark.division("batch", operation="triton_call", kind="manual")
def test_triton_call_on_one_device_matches_shard_map():
    given = arrays()
    expected = weighted_by_hand(**given)
    np.testing.assert_array_equal(weighted(**given), expected)
    np.testing.assert_array_equal(jax.jit(weighted)(**given), expected)
    mapped = jax.shard_map(weighted, mesh=make_mesh("automatic"), in_specs=(P(ALL), P()), out_specs=P(ALL))
    np.testing.assert_array_equal(jax.jit(mapped)(*given.values()), expected)


def test_triton_call_with_a_sharding_rule_lowers_for_cuda():
    with compile_target(90):
        traced = jax.jit(lambda x, weights: weighted(x, weights, interpret=False)).trace(*arrays().values())
        assert "@triton_kernel_call_ffi" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_triton_call_with_an_aliased_output_is_partitioned():
    def increment(x):
        return triton_call(
            x, kernel=increment_kernel, out_shape=x, grid=lambda meta: meta["row"], SIZE=16,
            input_output_aliases={"p_x": 0}, interpret=True, sharding_rule="row _ -> row _", divided_labels="row",
        )  # fmt: skip

    x = jnp.arange(128.0).reshape(8, 16)
    found = assert_divides(increment, {"x": x}, {"x": P("data")}, "explicit", atol=0)
    np.testing.assert_array_equal(found, x + 1)


def test_triton_call_descriptors_describe_the_shard():
    def copy(x):
        return triton_call(
            TensorDescriptor(x, (2, 16)), kernel=copy_kernel, out_shape=x, grid=lambda meta: meta["r"] // 2,
            WIDTH=ShardValue(lambda sizes: sizes["w"]), interpret=True, sharding_rule="r w -> r w", divided_labels="r",
        )  # fmt: skip

    x = jnp.arange(128.0).reshape(8, 16)
    found = assert_divides(copy, {"x": x}, {"x": P(ALL)}, "explicit", atol=0)
    np.testing.assert_array_equal(found, x)


def test_sharding_rules_of_different_grid_functions_differ(monkeypatch):
    """A compilation cache that ignores Python functions only sees the text of the rule."""
    seen = []
    monkeypatch.setattr(kernel_call, "divide", lambda rule, local, given: seen.append(rule.problem) or [given[0]])
    for constant in (0, 1, 0):
        weighted(**arrays(), grid=lambda meta, constant=constant: (20, 2 + constant * (meta["b"] < 4)))
    assert seen[0] == seen[2] != seen[1]


def test_triton_call_with_a_rule_under_grad_or_vmap_raises_not_implemented_error():
    x, weights = arrays().values()
    with pytest.raises(NotImplementedError, match="'weighted_kernel' has no derivative of its own"):
        jax.grad(lambda x: weighted(x, weights).sum())(x)
    with pytest.raises(NotImplementedError, match="'weighted_kernel' cannot be mapped by itself"):
        jax.vmap(lambda w: weighted(x, w))(weights[None])


MISTAKES = {
    "no arrow": ({"sharding_rule": "b t h _, h"}, "must have one '->' between operands and results"),
    "an operand too few": ({"sharding_rule": "b t h _ -> b t h _"}, r"the arrays \['p_x', 'p_weights'\] and 1 outputs"),
    "an axis too few": ({"sharding_rule": "b t h, h -> b t h _"}, "gives 3 axes to 'p_x', which has shape"),
    "no word": ({"sharding_rule": "b t h 16, h -> b t h _"}, "cannot be read at '1'"),
    "a label twice": ({"sharding_rule": "b t h h, h -> b t h _"}, "has a label twice in 'b t h h'"),
    "other sizes": ({"sharding_rule": "b t h _, t -> b t h _"}, "axis 0 of 'p_weights' has 2 elements, and its labels"),
    "unknown labels": ({"divided_labels": "b, h"}, r"must name labels of `sharding_rule` .*, got 'b, h'"),
    "nothing divided": ({"divided_labels": ""}, "must name labels of `sharding_rule`"),
    "a fixed grid": ({"grid": (3, 2)}, r"`grid` must be a function of sizes .* lambda meta"),
    "a name taken": ({"sharding_rule": "b ROWS h _, h -> b ROWS h _"}, r"labels \['ROWS'\] that are names"),
    "labels without a rule": (
        {"sharding_rule": None, "num_rows": 20, "grid": (3, 2)}, "`divided_labels` are labels of `sharding_rule`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_sharding_rules_raise_value_error(mistake):
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        weighted(**arrays(), **changes)


def test_shard_value_without_a_rule_raises_type_error():
    with pytest.raises(TypeError, match="parameter 'num_rows' is a ShardValue, which needs the labels"):
        weighted(**arrays(), sharding_rule=None, divided_labels="", grid=(3, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_triton_call_with_a_sharded_axis_that_has_no_divided_label_gathers_it_with_a_warning(monkeypatch, kind):
    launch, _ = as_array_code(weighted_by_hand)
    monkeypatch.setattr(kernel_call, "launch", launch)
    mesh, given = make_mesh(kind), arrays()
    x = shard(mesh, jnp.tile(given["x"], (1, 2, 1, 1)), P(None, "data"))
    weights = shard(mesh, given["weights"], P())
    on_mesh = jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext()
    with on_mesh, pytest.warns(UserWarning, match="axis `t` of an operand"):
        found = jax.jit(lambda *given: weighted(*given))(x, weights)
    np.testing.assert_array_equal(found, weighted_by_hand(np.asarray(x), np.asarray(weights)))
