"""The interpreter: language features compared with NumPy, memory checks, poison, and restoration of Triton."""

import dataclasses
import inspect
import os
import threading

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language import exp2 as exponential

from blockdiag.interop.interpreter.launch import interpret, interpret_plan, numpy_dtype
from blockdiag.triton_kernels.launch.compile import compile_plan
from blockdiag.triton_kernels.launch.offline import inspect_plan
from blockdiag.triton_kernels.launch.plan import (
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)
from tests.interop import bridge_kernels
from tests.interop.bridge_kernels import AddSpec, DeviceDescriptorSpec, HalvesSpec, IncrementSpec, MatmulSpec

pytestmark = pytest.mark.versions

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def plan_of(kernel, inputs, outputs, grid=(1, 1, 1), aliases=(), **values) -> LaunchPlan:
    """Return a plan whose kernel takes its inputs, its outputs and then `values`."""
    names = list(kernel.arg_names)
    arrays = [Pointer("input", index) for index in range(len(inputs))]
    arrays += [Pointer("output", index) for index in range(len(outputs))]
    arguments = dict(zip(names, arrays, strict=False))
    return LaunchPlan(
        name=kernel.fn.__name__,
        kernel=kernel,
        grid=grid,
        inputs=tuple(TensorSpec(array.shape, array.dtype.name) for array in inputs),
        outputs=tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in outputs),
        arguments=arguments | {name: values[name] for name in names[len(arrays) :]},
        aliases=aliases,
    )


def run(kernel, *inputs, outputs, grid=(1, 1, 1), **values):
    return interpret_plan(plan_of(kernel, inputs, outputs, grid, **values), *inputs)


def random(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_masked_elementwise_kernel_matches_numpy(dtype):
    x, y = random(1000, dtype=dtype), random(1000, dtype=dtype, seed=1)
    (out,) = interpret(AddSpec(1000, dtype), x, y)
    exact = x.astype(np.float32) + np.float32(0.5) * y.astype(np.float32)
    np.testing.assert_array_equal(out, exact.astype(dtype))  # rounded once, to nearest even


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matmul_through_descriptors_with_a_partial_tile_matches_numpy(dtype):
    a, b = random(200, 128, dtype=dtype), random(128, 128, dtype=dtype, seed=1)
    (product,) = interpret(MatmulSpec(200, 128, 128, dtype), a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    tolerance = {"float32": 2**-20, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(product.astype(np.float64), exact, rtol=tolerance, atol=16 * 2**-20)


def test_descriptors_for_stores_and_on_the_device_match_numpy():
    x = random(80, 64, dtype="float16")
    np.testing.assert_array_equal(interpret(HalvesSpec(80), x)[0], 2 * x)
    np.testing.assert_array_equal(interpret(DeviceDescriptorSpec(80), x)[0], 2 * x)


def test_aliased_output_is_a_copy_of_the_input():
    values = np.arange(300, dtype=np.int32)
    after, sums = interpret(IncrementSpec(300), values)
    np.testing.assert_array_equal(values, np.arange(300))
    np.testing.assert_array_equal(after, np.arange(300) + 1)
    assert sums.sum() == values.sum()


@triton.jit
def rotate_pairs(b_x, b_cos, b_sin, INTERLEAVED: tl.constexpr):
    rows: tl.constexpr = b_x.shape[0]
    half: tl.constexpr = b_x.shape[1] // 2
    if INTERLEAVED:
        b_even, b_odd = tl.split(tl.reshape(b_x, (rows, half, 2)))
        b_pairs = tl.join(b_even * b_cos - b_odd * b_sin, b_odd * b_cos + b_even * b_sin)
        return tl.reshape(b_pairs, (rows, 2 * half))
    b_low, b_high = tl.split(tl.permute(tl.reshape(b_x, (rows, 2, half)), (0, 2, 1)))
    b_pairs = tl.join(b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin)
    return tl.reshape(tl.permute(b_pairs, (0, 2, 1)), (rows, 2 * half))


@triton.jit
def rotate_kernel(p_x, p_cos, p_sin, p_out, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_column = tl.arange(0, COLUMNS)
    o_half = tl.arange(0, COLUMNS // 2)
    b_x = tl.load(p_x + o_row[:, None] * COLUMNS + o_column[None, :])
    b_cos = tl.load(p_cos + o_row[:, None] * (COLUMNS // 2) + o_half[None, :])
    b_sin = tl.load(p_sin + o_row[:, None] * (COLUMNS // 2) + o_half[None, :])
    b_out = rotate_pairs(b_x.to(tl.float32), b_cos, b_sin, INTERLEAVED)
    tl.store(p_out + o_row[:, None] * COLUMNS + o_column[None, :], b_out.to(p_out.dtype.element_ty))


@pytest.mark.parametrize("interleaved", [False, True])
def test_split_join_and_permute_match_numpy(interleaved):
    x, angle = random(32, 16, dtype="bfloat16"), random(32, 8, seed=1)
    (out,) = run(
        rotate_kernel, x, np.cos(angle), np.sin(angle), outputs=[((32, 16), "bfloat16")], grid=(2, 1, 1),
        INTERLEAVED=Constexpr(interleaved), ROWS=Constexpr(16), COLUMNS=Constexpr(16),
    )  # fmt: skip
    wide = x.astype(np.float32)
    low, high = (wide[:, 0::2], wide[:, 1::2]) if interleaved else (wide[:, :8], wide[:, 8:])
    first, second = low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)
    exact = np.stack([first, second], -1).reshape(32, 16) if interleaved else np.concatenate([first, second], -1)
    np.testing.assert_array_equal(out, exact.astype(BFLOAT16))


@triton.jit
def softmax_kernel(p_x, p_out, p_most, p_where, p_sum, COLUMNS: tl.constexpr):
    i_row = tl.program_id(0)
    o_column = tl.arange(0, COLUMNS)
    x = tl.load(p_x + i_row * COLUMNS + o_column)
    most, where = tl.max(x, 0, return_indices=True)
    b_exp = exponential((x - most) * 1.4426950408889634)
    total = tl.sum(b_exp, 0)
    tl.store(p_out + i_row * COLUMNS + o_column, b_exp / total)
    tl.store(p_most + i_row, most)
    tl.store(p_where + i_row, where)
    tl.store(p_sum + i_row * COLUMNS + o_column, tl.cumsum(x, 0))


def test_reductions_and_scans_match_numpy():
    x = random(5, 32)
    outputs = [((5, 32), "float32"), ((5,), "float32"), ((5,), "int32"), ((5, 32), "float32")]
    out, most, where, sums = run(softmax_kernel, x, outputs=outputs, grid=(5, 1, 1), COLUMNS=Constexpr(32))
    exact = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, exact / exact.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(most, x.max(1))
    np.testing.assert_array_equal(where, x.argmax(1))
    np.testing.assert_allclose(sums, np.cumsum(x, 1), rtol=1e-4, atol=1e-5)


PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def extremes_kernel(p_x, p_y, p_out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    x, y = tl.load(p_x + o), tl.load(p_y + o)
    tl.store(p_out + o, tl.maximum(x, y))
    tl.store(p_out + SIZE + o, tl.minimum(x, y))
    tl.store(p_out + 2 * SIZE + o, tl.maximum(x, y, propagate_nan=PROPAGATE_NAN))
    tl.store(p_out + 3 * SIZE + o, tl.minimum(x, y, propagate_nan=PROPAGATE_NAN))
    tl.store(p_out + 4 * SIZE + o, tl.clamp(x, -1.0, 1.0))
    tl.store(p_out + 5 * SIZE + o, tl.clamp(x, -1.0, 1.0, propagate_nan=PROPAGATE_NAN))
    tl.store(p_out + 6 * SIZE + o, max(x, y))
    tl.store(p_out + 7 * SIZE + o, o * 0.0 + tl.max(x, 0))
    tl.store(p_out + 8 * SIZE + o, o * 0.0 + tl.min(x, 0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_minimum_and_maximum_with_nan_follow_ptx(dtype):
    """In PTX, max.f32 returns the other operand and max.NaN.f32 returns NaN."""
    x = np.asarray([np.nan, 0.5, np.nan, -3], np.float32).astype(numpy_dtype(dtype))
    y = np.asarray([2, np.nan, np.nan, 4], np.float32).astype(numpy_dtype(dtype))
    (out,) = run(extremes_kernel, x, y, outputs=[((9, 4), "float32")], SIZE=Constexpr(4))
    nan = np.nan
    expected = [
        [2, 0.5, nan, 4], [2, 0.5, nan, -3],
        [nan, nan, nan, 4], [nan, nan, nan, -3],
        [-1, 0.5, -1, -1], [nan, 0.5, nan, -1],
        [2, 0.5, nan, 4], [0.5] * 4, [-3] * 4,
    ]  # fmt: skip
    np.testing.assert_array_equal(out, np.asarray(expected, np.float32))


@triton.jit
def larger_first(x_value, x_index, y_value, y_index):
    is_larger = (x_value > y_value) | ((x_value == y_value) & (x_index > y_index))
    return tl.where(is_larger, x_value, y_value), tl.where(is_larger, x_index, y_index)


@triton.jit
def reduce_kernel(p_x, p_value, p_index, p_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(p_x + o_row[:, None] * COLUMNS + o_column[None, :])
    index = tl.broadcast_to(o_column[None, :], (ROWS, COLUMNS))
    value, where = tl.reduce((x, index), 1, larger_first)
    tl.store(p_value + o_row, value)
    tl.store(p_index + o_row, where)
    tl.store(p_rows, tl.max(tl.max(x, axis=1, keep_dims=True)) + tl.min(x))


def test_reduction_with_a_user_function_matches_numpy():
    x = np.round(random(8, 16) * 2)
    outputs = [((8,), "float32"), ((8,), "int32"), ((1,), "float32")]
    value, index, extremes = run(reduce_kernel, x, outputs=outputs, ROWS=Constexpr(8), COLUMNS=Constexpr(16))
    np.testing.assert_array_equal(value, x.max(1))
    np.testing.assert_array_equal(index, 15 - x[:, ::-1].argmax(1))  # the later index wins a tie
    assert extremes == x.max() + x.min()


OFFSET = tl.constexpr(3)


@triton.jit
def loops_kernel(p_out, p_wide, num_turns, START: tl.constexpr, TURNS: tl.constexpr):
    total = 0
    for turn in tl.range(0, num_turns, 2, num_stages=2):
        total += turn.to(tl.int32)
    for turn in tl.static_range(START, TURNS):
        tl.static_assert(turn >= START, "a static loop starts at its start")
        total += turn * OFFSET
    for turn in range(3):
        total += turn
    count = 0
    while count < num_turns:
        count += 1
    i_program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    tl.store(p_out + i_program, total + min(count, 100) + max(count, 2) + (count if total > 5 else 0))
    tl.store(p_wide + i_program, i_program.to(tl.int64) * 2**33 + tl.cdiv(num_turns, 4))


def test_loops_scalars_and_three_dimensional_grids_match_numpy():
    out, wide = run(
        loops_kernel, outputs=[((2, 3, 4), "int32"), ((2, 3, 4), "int64")], grid=(4, 3, 2),
        num_turns=Scalar(7, "i32"), START=Constexpr(1), TURNS=Constexpr(4),
    )  # fmt: skip
    expected = sum(range(0, 7, 2)) + sum(3 * turn for turn in (1, 2, 3)) + 3 + 7 + 7 + 7
    np.testing.assert_array_equal(out, np.full((2, 3, 4), expected))
    np.testing.assert_array_equal(wide.reshape(-1), np.arange(24) * 2**33 + 2)


@triton.jit
def low_precision_kernel(p_x, p_y, p_sum, p_product, p_eight, N: tl.constexpr):
    o_n = tl.arange(0, N)
    x, y = tl.load(p_x + o_n), tl.load(p_y + o_n)
    tl.store(p_sum + o_n, x + y)
    tl.store(p_product + o_n, -x * y)
    tl.store(p_eight + o_n, x.to(p_eight.dtype.element_ty))


@pytest.mark.parametrize("eight", ["float8_e4m3fn", "float8_e5m2"])
def test_bfloat16_arithmetic_and_float8_conversion_match_ml_dtypes(eight):
    x, y = random(64, dtype="bfloat16"), random(64, dtype="bfloat16", seed=1)
    x[:3] = 1e6, -1e6, 0.0
    outputs = [((64,), "bfloat16"), ((64,), "bfloat16"), ((64,), eight)]
    total, product, narrow = run(low_precision_kernel, x, y, outputs=outputs, N=Constexpr(64))
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_array_equal(product, -x * y)
    largest = float(ml_dtypes.finfo(eight).max)
    saturated = np.clip(x.astype(np.float32), -largest, largest)
    np.testing.assert_array_equal(narrow.astype(np.float32), saturated.astype(eight).astype(np.float32))


@triton.jit
def rounding_kernel(p_x, p_out, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(p_out + o_n, tl.load(p_x + o_n).to(tl.bfloat16))


def test_bfloat16_conversion_rounds_to_nearest_even():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.nan, np.inf, 3.4e38, -0.0, 1.0], np.float32)
    (out,) = run(rounding_kernel, x, outputs=[((8,), "bfloat16")], N=Constexpr(8))
    expected = np.array([1, 1 + 2**-6, 1 + 2**-7, np.nan, np.inf, np.inf, -0.0, 1], np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), expected)
    assert np.signbit(out.astype(np.float32)[6])


@triton.jit
def atomic_kernel(p_x, p_out, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.atomic_add(p_out + o_n % 2, tl.load(p_x + o_n))


def test_atomics_on_an_aliased_output_match_numpy():
    start, x = np.zeros(2, np.float32), np.arange(8, dtype=np.float32)
    plan = plan_of(atomic_kernel, [x], [((2,), "float32")], N=Constexpr(8))
    plan = dataclasses.replace(plan, inputs=(*plan.inputs, plan.outputs[0]), aliases=((1, 0),))
    (out,) = interpret_plan(plan, x, start)
    np.testing.assert_array_equal(out, [0 + 2 + 4 + 6, 1 + 3 + 5 + 7])


@triton.jit
def partial_kernel(p_floats, p_integers, p_flags, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(p_floats + o_n, 1.0, mask=o_n < 2)
    tl.store(p_integers + o_n, 1, mask=o_n < 2)
    tl.store(p_flags + o_n, o_n > 5, mask=o_n < 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_unwritten_output_elements_are_poisoned(dtype):
    outputs = [((4,), dtype), ((4,), "int32"), ((4,), "bool")]
    floats, integers, flags = run(partial_kernel, outputs=outputs, N=Constexpr(4))
    np.testing.assert_array_equal(np.isnan(floats.astype(np.float32)), [False, False, True, True])
    assert list(integers[:2]) == [1, 1] and abs(int(integers[2])) > 10**6
    assert list(flags) == [False, False, True, True]


@triton.jit
def stray_kernel(p_x, p_out, read_offset, write_offset, WRITE_INPUT: tl.constexpr):
    x = tl.load(p_x + read_offset)
    tl.store((p_x if WRITE_INPUT else p_out) + write_offset, x)


@pytest.mark.parametrize(
    ("read", "write", "write_input", "message"),
    [
        (4, 0, False, r"program \(0, 0, 0\) reads 4 bytes .* after "),
        (-1, 0, False, "reads 4 bytes"),
        (0, 9, False, "writes 4 bytes .* after "),
        (0, 0, True, "writes 4 bytes at offset 0 of input 0, which is read-only"),
    ],
)
def test_out_of_bounds_accesses_raise_index_error(read, write, write_input, message):
    x = np.arange(4, dtype=np.float32)
    with pytest.raises(IndexError, match=message):
        run(
            stray_kernel, x, outputs=[((4,), "float32")], read_offset=Scalar(read, "i32"),
            write_offset=Scalar(write, "i32"), WRITE_INPUT=Constexpr(write_input),
        )  # fmt: skip
    np.testing.assert_array_equal(x, np.arange(4))


@triton.jit
def optional_kernel(p_x, p_scale, p_out, N: tl.constexpr):
    o_n = tl.arange(0, N)
    x = tl.load(p_x + o_n)
    if p_scale is not None:
        x *= tl.load(p_scale)
    tl.store(p_out + o_n, x)


def test_optional_pointer_may_be_none():
    x = random(8)
    plan = plan_of(optional_kernel, [x, x[:1]], [((8,), "float32")], N=Constexpr(8))
    np.testing.assert_array_equal(interpret_plan(plan, x, x[:1].copy())[0], x * x[0])
    without = dataclasses.replace(plan, arguments=plan.arguments | {"p_scale": Constexpr(None)})
    np.testing.assert_array_equal(interpret_plan(without, x, x[:1].copy())[0], x)


def test_mismatched_arrays_raise_value_error():
    x = random(10)
    with pytest.raises(ValueError, match="takes 2 arrays, got 1"):
        interpret(AddSpec(10), x)
    with pytest.raises(ValueError, match=r"array 0 must be float32\[10\], got float64\[10\]"):
        interpret(AddSpec(10), x.astype(np.float64), x)


def test_non_contiguous_and_misaligned_inputs_are_copied():
    x = random(21)
    strided, misaligned = x[::2][:10], x[1:11]
    np.testing.assert_array_equal(
        interpret(AddSpec(10), strided, misaligned)[0], strided + np.float32(0.5) * misaligned
    )


def test_interpret_uses_the_plan_of_the_named_target():
    seen = []

    class Recording(AddSpec):
        def plan(self, target):
            seen.append(target)
            return super().plan(target)

    x = random(10)
    interpret(Recording(10), x, x, target=Target(100, 148))
    interpret(Recording(10), x, x)
    assert seen == [Target(100, 148), Target(90, 4)]


def triton_state():
    classes = (
        tl.tensor,
        tl.core.tensor_descriptor_base,
        tl.tensor_descriptor,
        tl.dtype,
        tl.block_type,
        tl.range,
        tl.static_range,
    )
    members = [dict(vars(cls)) for cls in (*classes, triton.JITFunction)]
    modules = [dict(vars(module)) for module in (tl, tl.core, tl.math, tl.standard, bridge_kernels)]
    return members, modules, dict(os.environ)


def test_interpreter_restores_the_state_of_triton():
    before = triton_state()
    x = random(10)
    interpret(AddSpec(10), x, x)
    with pytest.raises(IndexError):
        run(
            stray_kernel, x, outputs=[((4,), "float32")], read_offset=Scalar(99, "i32"),
            write_offset=Scalar(0, "i32"), WRITE_INPUT=Constexpr(False),
        )  # fmt: skip
    assert triton_state() == before
    with pytest.raises(RuntimeError, match=r"Cannot call @triton\.jit"):
        rotate_pairs(1, 2, 3, True)


def test_kernels_compile_in_other_threads_during_interpretation():
    x, stop, errors = random(1000), threading.Event(), []

    def keep_interpreting():
        while not stop.is_set():
            (out,) = interpret(AddSpec(1000), x, x)
            if not np.array_equal(out, x + np.float32(0.5) * x):
                errors.append("wrong sum")

    threads = [threading.Thread(target=keep_interpreting) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Compile the kernels here, even if a cache has them.
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        for columns in (32, 48):
            plan = plan_of(
                softmax_kernel, [random(5, 32)],
                [((5, 32), "float32"), ((5,), "float32"), ((5,), "int32"), ((5, 32), "float32")],
                grid=(5, 1, 1), COLUMNS=Constexpr(32 if columns == 32 else 64),
            )  # fmt: skip
            assert "ex2.approx" in compile_plan(plan, Target(90, 1)).ptx
            assert inspect_plan(MatmulSpec(columns * 8, 64, 64).plan(Target(90, 1)), 90).ptx["wgmma"] > 0
        loops = plan_of(
            loops_kernel, [], [((2, 3, 4), "int32"), ((2, 3, 4), "int64")], grid=(4, 3, 2),
            num_turns=Scalar(7, "i32"), START=Constexpr(1), TURNS=Constexpr(4),
        )  # fmt: skip
        compile_plan(loops, Target(90, 1))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_kernels_defined_in_a_function_are_interpreted():
    factor = tl.constexpr(4)

    @triton.jit
    def scale_kernel(p_x, p_out, N: tl.constexpr):
        o_n = tl.arange(0, N)
        tl.store(p_out + o_n, tl.load(p_x + o_n) * factor)

    x = random(16)
    np.testing.assert_array_equal(run(scale_kernel, x, outputs=[((16,), "float32")], N=Constexpr(16))[0], 4 * x)


def test_errors_have_a_traceback_into_the_kernel():
    @triton.jit
    def failing_kernel(p_out):
        tl.static_assert(False, "on purpose")

    with pytest.raises(AssertionError, match="on purpose") as failure:
        run(failing_kernel, outputs=[((1,), "float32")])
    frame = failure.traceback[-2]
    assert str(frame.path) == __file__
    assert (
        "static_assert(False"
        in inspect.getsource(inspect.getmodule(test_interpreter_restores_the_state_of_triton)).splitlines()[
            frame.lineno
        ]
    )


def test_descriptor_of_an_output_view_writes_the_output():
    @triton.jit
    def fill_kernel(d_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        d_out.store([tl.program_id(0) * ROWS, 0], tl.full((ROWS, COLUMNS), 1.0, tl.float32))

    plan = LaunchPlan(
        name="fill",
        kernel=fill_kernel,
        grid=(2, 1, 1),
        inputs=(),
        outputs=(TensorSpec((3, 2, 8), "float32"),),
        arguments={
            "d_out": Descriptor("output", 0, (6, 8), (4, 8)),
            "ROWS": Constexpr(4),
            "COLUMNS": Constexpr(8),
        },
    )
    np.testing.assert_array_equal(interpret_plan(plan)[0], np.ones((3, 2, 8)))
