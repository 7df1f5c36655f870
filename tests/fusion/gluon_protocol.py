"""Interpreter of the barriers of a printed Gluon kernel on the CPU, with warps as threads.

Tile contents are ignored; a run checks that no warp schedule deadlocks. Indices and rounds are numbers, and barriers
count phases as on the GPU. gluon_interpreter.py also computes the tiles.
"""

import __future__

import builtins
import inspect
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from triton.language import constexpr

from blockdiag.triton_kernels.dense import (
    hopper_backward,
    hopper_eight_bit_forward,
    hopper_forward,
    hopper_resident_forward,
    hopper_resident_pairs,
    hopper_resident_pairs_wide,
    hopper_resident_sides,
)
from blockdiag.triton_kernels.moba import hopper_backward as moba_backward
from blockdiag.triton_kernels.paged import hopper_latent_keys, hopper_prompts, places
from blockdiag.triton_kernels.parts import (
    hopper_pair_gradients,
    hopper_split_numbers,
    hopper_tiles,
    resident_tiles,
    transposed_tiles,
)

# In the order in which their names hide each other.
TEMPLATES = (
    hopper_backward,
    hopper_forward,
    hopper_eight_bit_forward,
    hopper_resident_forward,
    hopper_resident_pairs,
    hopper_resident_pairs_wide,
    hopper_resident_sides,
    hopper_prompts,
    places,
    hopper_latent_keys,
    moba_backward,
)
PARTS = (hopper_tiles, resident_tiles, hopper_pair_gradients, transposed_tiles, hopper_split_numbers)


class Deadlock(AssertionError):
    """All remaining warps wait."""


class Number(int):
    """An integer scalar of a kernel; an operation on it and a tile gives a tile."""

    def to(self, dtype: object) -> "Number":
        del dtype
        return self


class Slow(random.Random):
    """Random generator of the interpreter's delays that makes some warps slow at every barrier."""

    def __init__(self, *naps):
        super().__init__(0)
        self.naps, self.at = naps, 0

    def choice(self, seq):
        del seq
        self.at += 1
        return self.naps[(self.at - 1) % len(self.naps)]

    def random(self):
        return 1.0


class Parity(Number):
    """A number modulo 2, perhaps inverted: the parity that a warp waits for, with the phase that it means."""

    phases: int

    @staticmethod
    def of(number: int, turned: int = 0) -> "Parity":
        """Return the parity of a phase, or of the previous phase if `turned` is 1.

        The phase before a barrier's first one counts as completed.
        """
        found = Parity(int(number) % 2 ^ turned)
        found.phases = number + 1 - turned
        return found


class Tile:
    """A tile, a descriptor, a layout or a dtype; every operation on it returns another one."""

    def __getattr__(self, name: str) -> "Tile":
        if name.startswith("__"):
            raise AttributeError(name)
        return Tile()

    def __call__(self, *_: object, **__: object) -> "Tile":
        return Tile()

    def __getitem__(self, key: object) -> "Tile":
        del key
        return Tile()


def _numbers(name: str) -> Callable[..., object]:
    def compute(self: Number, other: object) -> object:
        # Tiles handle operations on a number and a tile.
        return Number(getattr(int, name)(self, other)) if isinstance(other, int) else NotImplemented

    return compute


# The choices of a warp's longest delay per barrier, in seconds.
_NAPS = (0.0, 0.0, 1e-4, 5e-4)
_NAMES = [f"__{x}{y}__" for x in ("", "r") for y in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "rshift")]
for _name in _NAMES:
    setattr(Number, _name, _numbers(_name))
Number.__mod__ = lambda self, by: Parity.of(self) if by == 2 else Number(int(self) % by)  # pyrefly: ignore
Parity.__xor__ = lambda self, by: Parity.of(self.phases - 1, int(by))  # pyrefly: ignore
for _name in [*_NAMES, "__truediv__", "__rtruediv__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__"]:
    setattr(Tile, _name, lambda *_: Tile())


class Memory:
    """Numbers that a kernel reads from memory, repeated periodically."""

    def __init__(self, numbers: Sequence[int], offset: int = 0) -> None:
        self.numbers, self.offset = numbers, offset

    def __add__(self, more: int) -> "Memory":
        return Memory(self.numbers, self.offset + more)


class Warps:
    """The warps of one program, and the barriers that they wait for."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.changed = threading.Condition()
        self.naps: dict[int, float] = {}
        # Warps of the partition that a thread stands for.
        self.sizes: dict[int, int] = {}
        self.running = 0
        # The copies that were started, and how many of them are in flight.
        self.copies, self.in_flight = 0, 0
        self.waiting: dict[int, tuple[Barrier, int]] = {}
        self.is_stuck = False

    def run(self, functions: Sequence[Callable[[], Any]], sizes: Sequence[int] = ()) -> Any:
        """Run all warps to completion, and return what the first partition returns.

        Args:
            functions: one for each partition.
            sizes: warps of each partition; those beyond have one.

        Raises:
            Deadlock: the warps wait for each other.
        """

        def finish(function: Callable[[], Any], nap: float, size: int) -> Any:
            self.naps[threading.get_ident()] = nap
            self.sizes[threading.get_ident()] = size
            try:
                # GPUs raise no warnings.
                with np.errstate(all="ignore"):
                    return function()
            finally:
                with self.changed:
                    self.running -= 1
                    self.look()

        self.running = len(functions)
        with ThreadPoolExecutor(len(functions)) as pool:
            all_sizes = [*sizes, *[1] * (len(functions) - len(sizes))]
            ends = [
                pool.submit(finish, x, self.chance.choice(_NAPS), size)
                for x, size in zip(functions, all_sizes, strict=True)
            ]
        failures = [x for x in (end.exception() for end in ends) if x is not None]
        # If one warp fails, others wait for it, so deadlocks are reported last.
        for failure in sorted(failures, key=lambda x: isinstance(x, Deadlock)):
            raise failure
        return ends[0].result()

    def size(self) -> int:
        """Return the warps of the calling partition."""
        return self.sizes.get(threading.get_ident(), 1)

    def nap(self) -> None:
        """Delay the calling warp."""
        if most := self.naps.get(threading.get_ident()):
            time.sleep(most * self.chance.random())

    def later(self, land: Callable[[], None]) -> None:
        """End a copy that the calling warp has started. If the warp is slow, every other copy ends late."""
        self.copies += 1
        most = self.naps.get(threading.get_ident())
        if not most or self.copies % 2 == 0:
            land()
            return

        def wait_and_land() -> None:
            # Later than the next copies of the warp, which is slow at the barriers before them.
            time.sleep(8 * most * self.chance.random())
            land()
            with self.changed:
                self.in_flight -= 1
                self.look()

        with self.changed:
            self.in_flight += 1
        threading.Thread(target=wait_and_land).start()

    def look(self) -> None:
        """Record whether no warp can continue, and wake the waiting ones."""
        are_stuck = all(barrier.phase % 2 == parity for barrier, parity in self.waiting.values())
        self.is_stuck |= 0 < self.running == len(self.waiting) and are_stuck and not self.in_flight
        self.changed.notify_all()


class Barrier:
    """A barrier that counts arrivals, with phases that have parities."""

    def __init__(self, warps: Warps, arrivals: int) -> None:
        self.warps, self.arrivals = warps, arrivals
        self.phase, self.pending = 0, arrivals
        self.fillings = 0
        self.empty: Barrier | None = None

    def fill(self) -> None:
        """Start and complete a copy into the slot of this barrier."""
        with self.warps.changed:
            is_read = self.empty is None or self.empty.phase >= self.fillings
            assert is_read, "what has not been read yet is written over"
            self.fillings += 1
        self.arrive(1)

    def arrive(self, count: int) -> None:
        self.warps.nap()
        with self.warps.changed:
            self.pending -= count
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0:
                self.complete()
                self.phase, self.pending = self.phase + 1, self.arrivals
                self.warps.changed.notify_all()

    def complete(self) -> None:
        """Note the end of a phase."""

    def wait(self, parity: int) -> None:
        """Wait until the phase of this parity, the previous or the present one, has ended."""
        warps, thread = self.warps, threading.get_ident()
        warps.nap()
        with warps.changed:
            while self.phase % 2 == parity and not warps.is_stuck:
                warps.waiting[thread] = (self, parity)
                warps.look()
                if not warps.is_stuck:
                    warps.changed.wait()
            warps.waiting.pop(thread, None)
            if self.phase % 2 == parity:
                raise Deadlock("all warps wait")
            # Parity alone cannot distinguish a phase from the second one after it.
            assert not isinstance(parity, Parity) or self.phase == parity.phases, "a warp goes on at another time"


class Barriers(list[Barrier]):
    """The barriers of a ring's slots."""

    index = list.__getitem__  # pyrefly: ignore


class Mbarrier:
    """Stand-in for the `mbarrier` module."""

    def wait(self, barrier: Barrier, parity: int) -> None:
        barrier.wait(parity)

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.arrive(count)

    def expect(self, barrier: Barrier, count: int) -> None:
        del count
        barrier.fill()


class Language(Tile):
    """Stand-in for the `gl` module."""

    def __init__(self, program: Sequence[int], programs: Sequence[int], warps: Warps, warps_of_launch: int = 1) -> None:
        self.program, self.programs, self.warps, self.warps_of_launch = program, programs, warps, warps_of_launch

    def program_id(self, axis: int) -> Number:
        return Number(self.program[axis])

    def num_programs(self, axis: int) -> Number:
        return Number(self.programs[axis])

    def cdiv(self, number: int, by: int) -> Number:
        return Number(-(-number // by))

    def load(self, place: object) -> object:
        return Number(place.numbers[place.offset % len(place.numbers)]) if isinstance(place, Memory) else Tile()

    def maximum(self, left: object, right: object, **_: object) -> object:
        both = isinstance(left, int) and isinstance(right, int)
        return Number(max(left, right)) if both else Tile()  # pyrefly: ignore

    def minimum(self, left: object, right: object, **_: object) -> object:
        both = isinstance(left, int) and isinstance(right, int)
        return Number(min(left, right)) if both else Tile()  # pyrefly: ignore

    def allocate_shared_memory(self, dtype: object, shape: Sequence[int], layout: object) -> Tile:
        del dtype, layout
        found = Tile()
        found.shape = [Number(x) for x in shape]
        return found

    def broadcast(self, *_: object) -> tuple[Tile, Tile]:
        return Tile(), Tile()

    def constexpr(self, value: object) -> object:
        return value

    def static_range(self, *limits: int) -> object:
        return map(Number, builtins.range(*limits))

    def split(self, _: object) -> tuple[Tile, Tile]:
        return Tile(), Tile()

    def warp_specialize(
        self, functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]], sizes: Sequence[int] = (), *_: object
    ) -> Any:
        for function, arguments in functions:
            names = function.__code__.co_varnames  # pyrefly: ignore
            given = dict(zip(names, arguments, strict=False))
            for group in [x for x in arguments if isinstance(x, tuple) and hasattr(x, "_fields")]:
                given |= group._asdict()
            for name, barriers in given.items():
                empties = given.get(name.replace("full", "empty"), []) if name.endswith("full") else []
                # Neighbouring slots that are freed together share a barrier.
                sharing = max(1, len(barriers) // len(empties)) if empties else 1
                for i, empty in enumerate(empties):
                    for full in barriers[i * sharing : (i + 1) * sharing]:
                        full.empty = empty
        # The first partition has the warps of the launch, and `sizes` are those of the others.
        return self.warps.run(
            [lambda f=function, a=arguments: f(*a) for function, arguments in functions],
            [self.warps_of_launch, *(int(size) for size in sizes)],
        )


class _Gluon:
    @staticmethod
    def jit(function: Any) -> Any:
        return function


def run_protocol(
    text: str,
    name: str,
    program: int,
    rounds: int | None,
    chance: random.Random,
    lists: Mapping[str, Sequence[int]] | None = None,
    change: Callable[[str], str] = lambda template: template,
) -> None:
    """Run one program of a kernel.

    Args:
        text: the Gluon source of a module.
        name: the name of the kernel.
        rounds: the number of rounds of the program; None if the kernel has no such argument.
        chance: chooses the slow warps.
        lists: numbers in memory, by the parameter that points to them.
        change: changes the source of the modules whose functions the kernel calls.

    Raises:
        Deadlock: the warps wait for each other forever.
    """
    warps = Warps(chance)
    words = {
        "gl": Language((program,), (1,), warps), "tma": Tile(), "async_copy": Tile(), "mbarrier": Mbarrier(),
        "tma_load": Tile(), "tma_store": Tile(), "load_async": Tile(), "reinterpret": Tile(),
        "warpgroup_mma": Tile(), "warpgroup_mma_wait": _waited,
        "make_barriers": lambda count, arrivals: Barriers(Barrier(warps, arrivals) for _ in builtins.range(count)),
    }  # fmt: skip
    # The only helper whose result is an index of barriers.
    kernel = kernel_with(text, name, words, {"forgotten": Number}, change)
    given: dict[str, object] = {x: Tile() for x in kernel.__code__.co_varnames[: kernel.__code__.co_argcount]}
    given |= {x: Memory(numbers) for x, numbers in (lists or {}).items()}
    kernel(**given | ({} if rounds is None else {"ROUNDS": Number(rounds)}))


def kernel_with(
    text: str,
    name: str,
    words: Mapping[str, Any],
    helpers: Mapping[str, Any],
    change: Callable[[str], str] = lambda template: template,
) -> Any:
    """Return a kernel as a Python function, in a module with these imported names.

    Args:
        helpers: replacements of helpers by name.
        change: changes the source of the modules whose functions the kernel calls.
    """
    scope: dict[str, Any] = {
        "gluon": _Gluon, "triton": _Gluon, "tl": words["gl"],
        "fence_async_shared": lambda: None, "thread_barrier": lambda: None,
        "range": lambda *x: map(Number, builtins.range(*x)),
        "PROPAGATE_NAN": True,
    } | dict(words)  # fmt: skip
    templates = [x for x in TEMPLATES if f"{x.__name__} import" in text]
    for module in (*PARTS, *templates):
        scope |= definitions_of(module)
    for source in (*(change(inspect.getsource(x)) for x in (*PARTS, *templates)), text):
        first = re.search(r"^@(gluon|triton)\.jit", source, re.MULTILINE)
        assert first is not None
        # Types of annotations need not be there.
        code = compile(source[first.start() :], f"<{name}>", "exec", __future__.annotations.compiler_flag)
        exec(code, scope)
        # A template defines the barriers of the GPU.
        scope |= {"make_barriers": words["make_barriers"], **helpers}
    return scope[name]


def definitions_of(module: Any) -> dict[str, Any]:
    """Return the constants of a module with kernels, and the types that it names."""
    constants = {key: x.value for key, x in vars(module).items() if isinstance(x, constexpr)}
    return {key: x for key, x in vars(module).items() if isinstance(x, type)} | constants


def _waited(number: int, deps: Sequence[object]) -> object:
    del number
    return deps[0] if len(deps) == 1 else list(deps)
