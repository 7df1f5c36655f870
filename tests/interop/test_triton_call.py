"""`triton_call`: binding, types and checks of arguments, and the documented example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from blockdiag.interop import TensorDescriptor, compile_target, triton_call
from blockdiag.triton_kernels.launch.plan import Scalar
from tests.interop.bridge_kernels import add_kernel, increment_kernel, matmul_kernel

X = jnp.arange(1000, dtype=jnp.float32)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def add(x, y, *, interpret=True, **changes):
    options = {"num_elements": x.size, "alpha": 0.5, "BLOCK": 256} | changes
    return triton_call(
        x, y, kernel=add_kernel, out_shape=like(x), grid=lambda meta: triton.cdiv(x.size, meta["BLOCK"]),
        interpret=interpret, **options,
    )  # fmt: skip


def lowered_text(function, *arrays) -> str:
    with compile_target(90):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_triton_call_runs_eagerly_and_under_jit():
    np.testing.assert_array_equal(add(X, X), X * 1.5)
    np.testing.assert_array_equal(jax.jit(add)(X, X), X * 1.5)


def test_triton_call_lowers_for_cuda():
    assert "@triton_kernel_call_ffi" in lowered_text(lambda x: add(x, x, interpret=False), X)


def test_triton_call_accepts_numpy_arrays_and_scalars():
    x = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(add(x, x, num_elements=np.int64(10), alpha=np.float64(2)), x * 3)


@triton.jit
def middle_kernel(
    p_x, num_elements, p_sum, p_difference, p_y=None, FLIP: tl.constexpr = False, BLOCK: tl.constexpr = 16
):
    o_element = tl.arange(0, BLOCK)
    m_element = o_element < num_elements
    x = tl.load(p_x + o_element, mask=m_element)
    y = x
    if p_y is not None:
        y = tl.load(p_y + o_element, mask=m_element)
    tl.store(p_sum + o_element, x + y, mask=m_element)
    tl.store(p_difference + o_element, (y - x) if FLIP else (x - y), mask=m_element)


def test_triton_call_binds_outputs_to_missing_parameters_and_keeps_defaults():
    x = jnp.arange(10.0)
    outputs = triton_call(x, 10, kernel=middle_kernel, out_shape={"a": like(x), "b": [like(x)]}, grid=1, interpret=True)
    np.testing.assert_array_equal(outputs["a"], 2 * x)
    np.testing.assert_array_equal(outputs["b"][0], jnp.zeros(10))


def test_triton_call_with_an_input_after_the_outputs_allocates_both():
    x = jnp.arange(10.0)
    call = dict(kernel=middle_kernel, out_shape=(like(x), like(x)), grid=(1, 1), p_y=x * 3, FLIP=True)
    total, difference = triton_call(x, 10, interpret=True, **call)
    np.testing.assert_array_equal(total, 4 * x)
    np.testing.assert_array_equal(difference, 2 * x)
    text = lowered_text(lambda x: triton_call(x, 10, **call), x)
    assert text.count("@AllocateBuffer") == 2  # both outputs precede p_y


def test_triton_call_accepts_aliases_by_name_and_by_position():
    values = jnp.arange(300, dtype=jnp.int32)
    for key in ("p_values", 0):
        after, sums = triton_call(
            values, kernel=increment_kernel, out_shape=(like(values), jax.ShapeDtypeStruct((3,), jnp.int32)), grid=3,
            num_elements=300, BLOCK=128, input_output_aliases={key: 0}, interpret=True,
        )  # fmt: skip
        np.testing.assert_array_equal(after, np.arange(300) + 1)
        assert sums.sum() == values.sum()


def test_triton_call_accepts_tensor_descriptors():
    a, b = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)

    def product(a, b, **options):
        return triton_call(
            TensorDescriptor(a, (64, 64)), TensorDescriptor(b, (64, 64)), kernel=matmul_kernel, num_rows=128,
            out_shape=jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), grid=(2, 1), NUM_COLUMNS=64, DEPTH=64, BLOCK=64,
            BLOCK_DEPTH=64, SPECIALIZE=False, **options,
        )  # fmt: skip

    np.testing.assert_array_equal(product(a, b, interpret=True), jnp.full((128, 64), 64, jnp.bfloat16))
    assert "@triton_kernel_call_ffi" in lowered_text(product, a, b)


@triton.jit
def scalar_kernel(p_out, a, b, c, d, LABEL: tl.constexpr):
    tl.store(p_out, a.to(tl.float32) + b + c.to(tl.float32) + d.to(tl.float32))


def entry_parameters(**values) -> list[str]:
    from blockdiag.triton_kernels.launch import compile as compiler

    values = {"a": 1, "b": 2.0, "c": True, "d": 3} | values
    compiler._compiled.clear()
    lowered_text(
        lambda: triton_call(
            kernel=scalar_kernel, out_shape=jax.ShapeDtypeStruct((1,), jnp.float32), grid=1, LABEL="x", **values
        )
    )
    (compiled,) = [found.result() for found in compiler._compiled.values()]
    entry = compiled.ptx.split(".entry")[1].split(")")[0]
    assert ".f64" not in compiled.ptx
    return [line.split()[1] for line in entry.splitlines() if ".param" in line][1:-2]


def test_triton_call_scalars_have_the_smallest_matching_type():
    assert entry_parameters() == [".u32", ".f32", ".u8", ".u32"]
    assert entry_parameters(a=2**40)[0] == ".u64"
    assert entry_parameters(a=Scalar(1, "i64"))[0] == ".u64"
    assert entry_parameters(b=1e300 / 1e299)[1] == ".f32"
    assert entry_parameters(b=np.float64(3))[1] == ".f32"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: add(X, X, blokc=3), TypeError, "has no parameter 'blokc'"),
        (lambda: add(X, X, p_x=X), TypeError, "both by position and by name"),
        (lambda: triton_call(*[X] * 7, kernel=add_kernel, out_shape=like(X), grid=1), TypeError, "takes 6 arguments"),
        (lambda: triton_call(X, X, kernel=add_kernel, out_shape=like(X), grid=1), TypeError, "compile-time parameters"),
        (
            lambda: triton_call(X, kernel=add_kernel, out_shape=like(X), grid=1, BLOCK=8, alpha=1.0),
            TypeError,
            r"without \['p_y', 'p_out', 'num_elements'\], to be filled by 1 outputs",
        ),
        (
            lambda: add(X, X, alpha="half"),
            TypeError,
            "'alpha' must be an array, TensorDescriptor, number or None, got str",
        ),
        (lambda: triton_call(X, kernel=len, out_shape=like(X), grid=1), TypeError, "must be a @triton.jit"),
        (lambda: add(X, X, input_output_aliases={"p_z": 0}, p_out=X), ValueError, "it must be one of the arrays"),
        (
            lambda: triton_call(
                X, 1, kernel=middle_kernel, out_shape=(like(X),) * 2, grid=(1, 1, 1, 1), interpret=True
            ),
            ValueError,
            "`grid` must be one to three positive sizes",
        ),
        (
            lambda: triton_call(X, 1, kernel=middle_kernel, out_shape=(like(X),) * 2, grid=0, interpret=True),
            ValueError,
            "`grid` must be one to three positive sizes",
        ),
    ],
)
def test_invalid_triton_calls_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()
