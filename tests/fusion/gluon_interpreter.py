"""Interpreter of printed Gluon kernels on the CPU, program by program: warps are threads, tiles are NumPy arrays.

Asynchronous operations run as late as the GPU may run them: products read shared memory when they are awaited, and
copies out of it when their completion is awaited. Memory that is refilled too early therefore gives wrong numbers.
Shared memory and outputs start as NaN. Layouts are ignored, and so are fences between the copy engine and other
accesses.
"""

import builtins
import functools
import inspect
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from blockdiag.triton_kernels.launch.generated import GeneratedKernel
from blockdiag.triton_kernels.launch.plan import Constexpr, Descriptor, LaunchPlan, Pointer, Scalar
from tests.fusion.gluon_protocol import (
    Barrier,
    Barriers,
    Language,
    Mbarrier,
    Number,
    Tile,
    Warps,
    definitions_of,
    kernel_with,
)
from tests.fusion.happens_before import Known, Races, Record

_NAMES = {"float32": np.float32, "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "int8": np.int8}
_DTYPES = {
    **_NAMES,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8e4nv": ml_dtypes.float8_e4m3fn,
    "float8e5": ml_dtypes.float8_e5m2,
}

# Eight-bit dtypes by the names of Triton's.
_NARROW = {"fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2, "int8": np.int8}


class Dtype:
    """A dtype of the kernel language."""

    def __init__(self, dtype: Any) -> None:
        self.numpy = np.dtype(dtype)
        self.primitive_bitwidth = self.numpy.itemsize * 8
        self.element_ty = self


class Array(np.ndarray):
    """A tile, or a number other than an index."""

    @property
    def type(self) -> Tile:
        return Tile()

    def to(self, dtype: Dtype) -> "Array":
        if dtype.numpy.itemsize == 1 and dtype.numpy.kind != "i":
            # GPUs saturate.
            largest = float(ml_dtypes.finfo(dtype.numpy).max)
            return np.clip(self, -largest, largest).astype(dtype.numpy)
        return self.astype(dtype.numpy)


def array(values: Any) -> Array:
    return np.asarray(values).view(Array)


class Shared:
    """A buffer of shared memory.

    Args:
        races: checks the order of accesses; None: they are not checked.
        record: the accesses of the buffer. It has one more axis if its units are smaller than elements.
        unit: the bytes that an element of the record stands for; None: those of an element of the buffer.
    """

    def __init__(
        self, values: np.ndarray, races: Races | None = None, record: Record | None = None, unit: int | None = None
    ) -> None:
        self.values = values
        self.races, self.record = races, record
        self.unit = values.itemsize if unit is None else unit
        self.dtype, self.layout = Dtype(values.dtype), Tile()
        self.shape = [Number(x) for x in values.shape]

    def _view(self, change: Callable[[np.ndarray], np.ndarray]) -> "Shared":
        record = None if self.record is None else self.record.view(change)
        return Shared(change(self.values), self.races, record, self.unit)

    def index(self, place: int) -> "Shared":
        assert 0 <= place < len(self.values)
        return self._view(lambda x: x[place])

    def slice(self, first: int, count: int, dim: int = 0) -> "Shared":
        assert first >= 0 and first + count <= self.values.shape[dim]
        return self._view(lambda x: x[(slice(None),) * dim + (slice(first, first + count),)])

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._view(lambda x: x.transpose(*order, *range(len(order), x.ndim)))

    def reinterpret(self, dtype: Dtype, shape: Sequence[int], layout: object) -> "Shared":
        del layout
        assert self.values.flags.c_contiguous
        count = int(np.prod(shape))
        size = dtype.numpy.itemsize
        values = self.values.reshape(-1).view(np.uint8)[: count * size].view(dtype.numpy).reshape(shape)
        units = size // self.unit
        if self.record is None or units == 0:
            # Accesses to parts of units are not checked.
            return Shared(values)
        last = () if units == 1 else (units,)
        record = self.record.view(lambda x: x.reshape(-1)[: count * units].reshape(*shape, *last))
        return Shared(values, self.races, record, self.unit)

    def _keep_alive(self) -> None:
        """Keep the memory from being reused, which does not happen here."""

    def load(self, layout: object) -> Array:
        del layout
        if self.races is not None and self.record is not None:
            self.races.read(self.record)
        return array(self.values.copy())

    def store(self, tile: Array) -> None:
        if self.races is not None and self.record is not None:
            self.races.write(self.record)
        self.fill(tile)

    def fill(self, tile: Array) -> None:
        """Write a tile in a copy, whose start has been noted."""
        assert np.shape(tile) == self.values.shape
        self.values[...] = tile

    def begin_copy(self, *, by_threads: bool = False) -> set[int]:
        """Note the start of a copy into this memory, and return its number."""
        if self.races is None or self.record is None:
            return set()
        return {self.races.copy(self.record, by_threads=by_threads)}

    def begin_read(self) -> None:
        """Note that tensor cores or the copy engine start to read this memory."""
        if self.races is not None and self.record is not None:
            self.races.read(self.record, by_engine=True)

    def end_read(self) -> None:
        if self.races is not None and self.record is not None:
            self.races.end_read(self.record)


class Global:
    """A pointer to one element, or a tile of pointers."""

    def __init__(self, values: np.ndarray, offset: Any = 0) -> None:
        self.values, self.offset = values, offset
        self.dtype = Dtype(values.dtype)

    def __add__(self, more: Any) -> "Global":
        return Global(self.values, self.offset + more)

    def to(self, dtype: Dtype) -> "Global":
        """Return a pointer to elements of another dtype."""
        assert np.ndim(self.offset) == 0 and self.offset == 0
        return Global(self.values.view(dtype.numpy))

    def places(self, mask: Any = True) -> np.ndarray:
        """Return the indices of elements, 0 where they are masked."""
        found = np.where(mask, self.offset, 0)
        assert ((found >= 0) & (found < self.values.size)).all(), "outside of the array"
        return found


class View:
    """An array as the copy engine sees it: a matrix."""

    def __init__(self, values: np.ndarray, descriptor: Descriptor) -> None:
        self.values = values.reshape(descriptor.shape)
        self.dtype, self.layout = Dtype(values.dtype), Tile()
        self.block_shape = descriptor.block_shape

    def tile(self, at: Sequence[int]) -> np.ndarray:
        (row, column), (rows, columns) = at, self.block_shape
        found = self.values[row : row + rows, column : column + columns]
        assert found.shape == self.block_shape, "tiles that reach beyond an array are not needed yet"
        return found


class Product:
    """A product in flight, which only the next product may use."""

    def __init__(self, compute: Callable[[], Array], operands: Sequence[Shared]) -> None:
        self._compute, self._operands = compute, operands
        self.found: Array | None = None
        for operand in operands:
            operand.begin_read()

    def end(self) -> Array:
        if self.found is None:
            self.found = self._compute()
            for operand in self._operands:
                operand.end_read()
        return self.found


class CopyBarrier(Barrier):
    """A barrier that also counts the bytes of expected copies."""

    def __init__(self, warps: Warps, arrivals: int) -> None:
        super().__init__(warps, arrivals)
        self.bytes = 0
        # What is known to those that have arrived, and to those that have waited.
        self.arriving, self.known = Known(), Known()
        self.races: Races | None = None

    def arrive(self, count: int) -> None:
        if self.races is not None:
            self.pass_on(self.races.common())
        super().arrive(count)

    def pass_on(self, known: Known) -> None:
        with self.warps.changed:
            self.arriving.learn(known)

    def complete(self) -> None:
        self.known.learn(self.arriving)
        self.arriving = Known()

    def wait(self, parity: int) -> None:
        super().wait(parity)
        if self.races is not None:
            with self.warps.changed:
                known = self.known
            self.races.learn(known)

    def expect(self, count: int) -> None:
        """Expect a copy that fills a slot, and arrive."""
        with self.warps.changed:
            assert self.empty is None or self.empty.phase >= self.fillings, "what is not read yet is written over"
            self.fillings += 1
            self.bytes += count
            # The phase ends when the bytes have arrived.
            self.pending += 1
        self.arrive(1)

    def land(self, count: int, copies: set[int]) -> None:
        """Note that copies have written some bytes."""
        self.pass_on(Known(copies=copies))
        with self.warps.changed:
            self.bytes -= count
            assert self.bytes >= 0, "more bytes than were announced"
            ends = self.bytes == 0
        if ends:
            super().arrive(1)


class _Mbarrier(Mbarrier):
    def expect(self, barrier: CopyBarrier, count: int) -> None:
        barrier.expect(count)


@dataclass(frozen=True)
class Copy:
    """A copy of a vector into shared memory.

    Attributes:
        land: copies.
        numbers: the number of the copy, empty if accesses are not checked.
    """

    land: Callable[[], None]
    numbers: set[int]


class _Queues(threading.local):
    """The operations that a warp has started and not awaited."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.copies: list[Copy] = []
        self.groups: list[list[Copy]] = []
        self.additions: list[Callable[[], None]] = []


class _Engine:
    """The copy engine, asynchronous copies of vectors, and tensor cores."""

    def __init__(self, warps: Warps, races: Races | None) -> None:
        self.warps, self.races, self.queues = warps, races, _Queues()
        # The additions of all threads that end with the program, because nobody waits for them.
        self.unfinished: list[Callable[[], None]] = []

    # The copy engine

    def load(self, source: View, at: Sequence[int], barrier: CopyBarrier, memory: Shared) -> None:
        tile = array(source.tile(at))
        copies = memory.begin_copy()

        def land() -> None:
            memory.fill(tile)
            barrier.land(memory.values.nbytes, copies)

        # Copies may end in another order than the one in which they were started.
        self.warps.later(land)

    def store(self, target: View, at: Sequence[int], memory: Shared) -> None:
        def copy() -> None:
            target.tile(at)[...] = memory.values
            memory.end_read()

        memory.begin_read()
        self.queues.stores.append(copy)

    def store_wait(self, left: int) -> None:
        self.warps.nap()
        while len(self.queues.stores) > left:
            self.queues.stores.pop(0)()

    def add(self, target: View, at: Sequence[int], memory: Shared) -> None:
        def read() -> None:
            tile = memory.values.copy()
            memory.end_read()

            def addition() -> None:
                target.tile(at)[...] += tile

            self.queues.additions.append(addition)
            self.unfinished.append(addition)

        memory.begin_read()
        self.queues.stores.append(read)

    def finish_additions(self) -> None:
        self.store_wait(0)
        for addition in self.queues.additions:
            addition()
            self.unfinished.remove(addition)
        self.queues.additions = []

    def release(self) -> None:
        """Check that other programs may rely on what this thread has done."""
        assert not self.queues.stores and not self.queues.additions, "additions may not have been performed"

    def suspend(self) -> Callable[[], None]:
        """Return a function that makes the operations that this thread has not awaited those of its caller."""
        started = dict(vars(self.queues))
        return lambda: vars(self.queues).update(started)

    # Copies of lines

    def copy(self, memory: Shared, source: Global, mask: Any = True) -> None:
        """Copy the elements that a mask selects, and zeros for the others."""
        places, mask = source.places(mask), np.broadcast_to(mask, memory.values.shape)
        copies = memory.begin_copy(by_threads=True)
        self.queues.copies.append(Copy(lambda: memory.fill(array(np.where(mask, source.values[places], 0))), copies))

    def commit_group(self) -> None:
        self.queues.groups.append(self.queues.copies)
        self.queues.copies = []

    def arrive_after_copies(self, barrier: CopyBarrier, increment_count: bool) -> None:
        assert not increment_count
        self.warps.nap()
        for copy in self.queues.copies:
            copy.land()
            barrier.pass_on(Known(copies=copy.numbers))
        self.queues.copies = []
        # Each thread arrives.
        barrier.arrive(32 * self.warps.size())

    def wait_group(self, left: int) -> None:
        self.warps.nap()
        while len(self.queues.groups) > left:
            for copy in self.queues.groups.pop(0):
                copy.land()
                if self.races is not None:
                    self.races.learn_copies(copy.numbers)

    # Tensor cores

    def multiply(
        self, first: Shared | Array, second: Shared, sums: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        def compute() -> Array:
            left = first.values if isinstance(first, Shared) else first
            found = np.asarray(left, np.float32) @ np.asarray(second.values, np.float32)
            before = sums.end() if isinstance(sums, Product) else sums
            assert found.shape == before.shape and before.dtype == np.float32
            return array(found + before if use_acc else found)

        product = Product(compute, [x for x in (first, second) if isinstance(x, Shared)])
        if not is_async:
            return product.end()
        self.queues.products.append(product)
        return product

    def wait(self, left: int, deps: Sequence[Any]) -> Any:
        self.warps.nap()
        products = self.queues.products
        while len(products) > left:
            products.pop(0).end()
        found = [x.found if isinstance(x, Product) and x.found is not None else x for x in deps]
        return found[0] if len(found) == 1 else found


class _Values(Language):
    """The `gl` module of the kernel language, on NumPy arrays."""

    def __init__(
        self,
        program: Sequence[int],
        programs: Sequence[int],
        warps: Warps,
        warps_of_launch: int,
        races: Races | None,
    ) -> None:
        super().__init__(program, programs, warps, warps_of_launch)
        self.races = races
        self.release: Callable[[], None] = lambda: None
        for name, dtype in _DTYPES.items():
            setattr(self, name, Dtype(dtype))
        self.exp, self.exp2, self.log2, self.abs = np.exp, np.exp2, np.log2, np.abs
        self.rsqrt = lambda tile: 1.0 / np.sqrt(tile)

    def arange(self, first: int, end: int, layout: object) -> Array:
        del layout
        return array(np.arange(first, end, dtype=np.int32))

    def zeros(self, shape: Sequence[int], dtype: Dtype, layout: object) -> Array:
        return self.full(shape, 0, dtype, layout)

    def full(self, shape: Sequence[int], value: float, dtype: Dtype, layout: object) -> Array:
        del layout
        return array(np.full(shape, value, dtype.numpy))

    def max(self, tile: Array, axis: int) -> Array:
        # A number takes precedence over NaN, as in `max.f32`.
        found = np.fmax.reduce(tile, axis)
        return Number(found) if found.ndim == 0 and found.dtype.kind == "i" else found

    def sum(self, tile: Array, axis: int) -> Array:
        found = tile.sum(axis, dtype=tile.dtype)
        return Number(found) if np.ndim(found) == 0 and found.dtype.kind == "i" else found

    def maximum(self, left: Any, right: Any, propagate_nan: bool = False) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return Number(builtins.max(left, right))
        return (np.maximum if propagate_nan else np.fmax)(left, right)

    def minimum(self, left: Any, right: Any, propagate_nan: bool = False) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return Number(builtins.min(left, right))
        return (np.minimum if propagate_nan else np.fmin)(left, right)

    def fma(self, left: Any, right: Any, term: Any) -> Array:
        # Products of float32 are exact in float64, so only the sum is rounded.
        return array((np.float64(left) * np.float64(right) + term).astype(np.float32))

    def where(self, condition: Any, left: Any, right: Any) -> Array:
        if isinstance(left, int) and isinstance(right, int) and np.ndim(condition) == 0:
            return Number(left if condition else right)
        found = np.where(condition, left, right)
        # NumPy returns float64 for two numbers.
        return array(found.astype(np.float32) if found.dtype == np.float64 else found)

    def pointer_type(self, dtype: Dtype) -> Dtype:
        return dtype

    def broadcast(self, *tiles: Array) -> list[Array]:
        return [array(x) for x in np.broadcast_arrays(*tiles)]

    def reshape(self, tile: Array, shape: Sequence[int]) -> Array:
        return tile.reshape(shape)

    def permute(self, tile: Array, order: Sequence[int]) -> Array:
        return tile.transpose(order)

    def split(self, tile: Array) -> tuple[Array, Array]:
        return tile[..., 0], tile[..., 1]

    def join(self, one: Array, other: Array) -> Array:
        return np.stack([one, other], -1)

    def convert_layout(self, tile: Array, layout: object, assert_trivial: bool = False) -> Array:
        del layout, assert_trivial
        return tile

    def expand_dims(self, tile: Array, axis: int) -> Array:
        return np.expand_dims(tile, axis)

    def full_like(self, tile: Array, value: float) -> Array:
        return np.full_like(tile, value)

    def zeros_like(self, tile: Array) -> Array:
        return np.zeros_like(tile)

    def atomic_add(self, place: Global, number: int, sem: str) -> Number:
        """Add to a number in memory. Programs run in the order in which they start, so none waits for another."""
        assert sem in ("acquire", "release", "relaxed")
        if sem == "release":
            self.release()
        before = Number(place.values[place.places()])
        place.values[place.places()] += number
        return before

    def load(self, place: Any, mask: Any = True, other: float = 0) -> Any:
        found = np.where(mask, place.values[place.places(mask)], np.asarray(other, place.values.dtype))
        return Number(found) if np.ndim(found) == 0 and found.dtype.kind == "i" else array(found)

    def store(self, place: Global, tile: Any, mask: Any = True) -> None:
        places = place.places(mask)
        assert np.shape(places) == np.shape(tile)
        mask = np.broadcast_to(mask, np.shape(tile))
        place.values[places[mask]] = np.asarray(tile)[mask]

    def allocate_shared_memory(self, dtype: Dtype, shape: Sequence[int], layout: object) -> Shared:
        del layout
        is_whole = dtype.numpy.kind == "i"
        values = np.full(shape, np.iinfo(dtype.numpy).min if is_whole else np.nan, dtype.numpy)
        # Memory of sums in float32 is used for their results in 16 bits, too.
        units = max(1, values.itemsize // 2)
        last = () if units == 1 else (units,)
        return Shared(
            values, self.races, None if self.races is None else Record((*shape, *last)), values.itemsize // units
        )

    def warp_specialize(self, functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]], *numbers: object) -> Any:
        races, resume = self.races, self.suspend()
        begin = None if races is None else races.begin()

        def entered(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(*arguments: Any) -> Any:
                if races is not None:
                    races.enter(index, begin)
                if index == 0:
                    # The warps of the first partition are those that began the program.
                    resume()
                return function(*arguments)

            return run

        found = [(entered(i, function), arguments) for i, (function, arguments) in enumerate(functions)]
        return super().warp_specialize(found, *numbers)


class _Punctual(random.Random):
    """A random generator for which no warp is slow."""

    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[0]


def interpret_gluon(
    plan: LaunchPlan,
    *arrays: np.ndarray,
    chance: random.Random | None = None,
    change: Callable[[str], str] = lambda template: template,
    is_checked: bool = False,
) -> list[np.ndarray]:
    """Return the outputs of a launch.

    Args:
        chance: chooses the slow warps; None: no warp is slow.
        change: changes the source of the modules whose functions the kernel calls, and of a kernel that is not printed.
        is_checked: whether to check the order of accesses of shared memory.

    Raises:
        Race: two accesses are in no order.
    """
    chance = _Punctual() if chance is None else chance
    sources = {output: source for source, output in plan.aliases}
    outputs = [
        arrays[sources[i]].copy() if i in sources else np.full(x.shape, np.nan, _DTYPES[x.dtype])
        for i, x in enumerate(plan.outputs)
    ]
    given = {"input": [np.ascontiguousarray(x) for x in arrays], "output": outputs}
    for program in np.ndindex(*plan.grid[::-1]):
        _run(plan, given, program[::-1], chance, change, Races() if is_checked else None)
    return outputs


def _add_rows(first: Global, offsets: Array, tile: Array) -> None:
    place = (first + offsets).places()
    assert place.shape == tile.shape
    first.values[place] += tile


def _bytes_of(first: Array, second: Array, selector: int) -> Array:
    """Return words of the bytes that a selector names, as the instruction `prmt` does."""
    given = np.concatenate([np.ascontiguousarray(x)[..., None].view(np.uint8) for x in (first, second)], -1)
    order = [selector >> 4 * i & 15 for i in range(4)]
    return array(np.ascontiguousarray(given[..., order]).view(np.int32)[..., 0])


def _widen_words(words: Array, kind: Any, dtype: Dtype) -> Array:
    """Return words of four eight-bit numbers as words of four 16-bit numbers."""
    narrow = np.ascontiguousarray(words)[..., None].view(_NARROW[kind.name])
    return array(narrow.astype(np.float32).astype(dtype.numpy).view(np.int64)[..., 0])


def _run(
    plan: LaunchPlan,
    given: dict[str, list[np.ndarray]],
    program: tuple[int, ...],
    chance: random.Random,
    change: Callable[[str], str],
    races: Races | None,
) -> None:
    warps = Warps(chance)
    engine = _Engine(warps, races)

    def make_barriers(count: int, arrivals: int) -> Barriers:
        found = Barriers(CopyBarrier(warps, arrivals) for _ in range(count))
        for barrier in found:
            barrier.races = races  # pyrefly: ignore
        return found

    copy_engine, lines = Tile(), Tile()
    copy_engine.store_wait = engine.store_wait
    lines.commit_group, lines.wait_group = engine.commit_group, engine.wait_group
    lines.mbarrier_arrive = engine.arrive_after_copies
    language = _Values(program, plan.grid, warps, plan.options.num_warps, races)
    language.release, language.suspend = engine.release, engine.suspend
    words = {
        "gl": language, "tma": copy_engine, "async_copy": lines,
        "mbarrier": _Mbarrier(),
        "tma_load": engine.load, "tma_store": engine.store, "load_async": engine.copy,
        "tma_add": engine.add, "order_bulk_additions": lambda: None, "finish_bulk_additions": engine.finish_additions,
        "reinterpret": Shared.reinterpret,
        "warpgroup_mma": engine.multiply, "warpgroup_mma_wait": engine.wait,
        "make_barriers": make_barriers,
    }  # fmt: skip
    if races is not None:
        words |= {"fence_async_shared": races.fence, "thread_barrier": races.thread_barrier}
    helpers = {
        "forgotten": Number,
        "add_rows": _add_rows,
        "widened": lambda tile: tile.astype(np.float32),
        "rounded_product": lambda left, right: left * right,
        "bytes_of": _bytes_of,
        "widen_words": _widen_words,
        # Data arrives at once.
        "fetch_lines": lambda lines: None,
    }
    if isinstance(plan.kernel, GeneratedKernel):
        text, name = plan.kernel.text, plan.kernel.name
    else:
        module = inspect.getmodule(plan.kernel.fn)
        assert module is not None
        text, name = change(inspect.getsource(module)), plan.kernel.__name__
        words |= {key: x for key, x in vars(module).items() if isinstance(x, type)} | definitions_of(module)
    kernel = kernel_with(text, name, words, helpers, change)
    kernel(**{name: _parameter(argument, given) for name, argument in plan.arguments.items()})
    for addition in engine.unfinished:
        addition()


def _parameter(argument: Any, given: dict[str, list[np.ndarray]]) -> Any:
    match argument:
        case Constexpr():
            return Number(argument.value) if isinstance(argument.value, int) else argument.value
        case Scalar():
            return Number(argument.value) if isinstance(argument.value, int) else np.float32(argument.value)
        case Descriptor():
            return View(given[argument.role][argument.index], argument)
        case Pointer():
            return Global(given[argument.role][argument.index].reshape(-1))
        case _:
            return type(argument)(*(_parameter(x, given) for x in argument))
