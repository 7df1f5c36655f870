"""Runs the barriers of a printed Gluon kernel on the CPU: its warps as threads, tiles as nothing.

What warps tell each other does not depend on what tiles contain: with numbers for places and rounds, and barriers that
count phases as those of the GPU do, a kernel ends here or it does not. gluon_interpreter.py has tiles of numbers.
"""

import builtins
import inspect
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from blockdiag.triton_kernels.parts import resident_tiles


class Deadlock(AssertionError):
    """All warps that are left wait."""


class Number(int):
    """A number of a warp; what is made of it and of a tile is a tile."""

    def to(self, dtype: object) -> "Number":
        del dtype
        return self


class Parity(Number):
    """A number modulo 2, perhaps turned around: what a warp waits for, with the phases that it means by that."""

    phases: int

    @staticmethod
    def of(number: int, turned: int = 0) -> "Parity":
        """Of the phase of this number, or of the one before, which no barrier has before its first."""
        found = Parity(int(number) % 2 ^ turned)
        found.phases = number + 1 - turned
        return found


class Tile:
    """A tile, a descriptor, a layout or a dtype: whatever is done with it is one again."""

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
        # What it is and a tile is the tile's concern.
        return Number(getattr(int, name)(self, other)) if isinstance(other, int) else NotImplemented

    return compute


# How much slower warps are, in seconds a barrier at most; the first ones not at all.
_NAPS = (0.0, 0.0, 1e-4, 5e-4)
_NAMES = [f"__{x}{y}__" for x in ("", "r") for y in ("add", "sub", "mul", "floordiv", "mod", "xor", "and")]
for _name in _NAMES:
    setattr(Number, _name, _numbers(_name))
Number.__mod__ = lambda self, by: Parity.of(self) if by == 2 else Number(int(self) % by)  # pyrefly: ignore
Parity.__xor__ = lambda self, by: Parity.of(self.phases - 1, int(by))  # pyrefly: ignore
for _name in [*_NAMES, "__truediv__", "__rtruediv__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__"]:
    setattr(Tile, _name, lambda *_: Tile())


class Memory:
    """Numbers that a kernel reads, the same ones over and over."""

    def __init__(self, numbers: Sequence[int], offset: int = 0) -> None:
        self.numbers, self.offset = numbers, offset

    def __add__(self, more: int) -> "Memory":
        return Memory(self.numbers, self.offset + more)


class Warps:
    """Those of one program, and what they wait for."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.changed = threading.Condition()
        self.naps: dict[int, float] = {}
        self.running = 0
        self.waiting: dict[int, tuple[Barrier, int]] = {}
        self.is_stuck = False

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run all of them to their ends.

        Raises:
            Deadlock: where they do not come to them.
        """

        def finish(function: Callable[[], None], nap: float) -> None:
            self.naps[threading.get_ident()] = nap
            try:
                # As GPUs do, without a word.
                with np.errstate(all="ignore"):
                    function()
            finally:
                with self.changed:
                    self.running -= 1
                    self.look()

        self.running = len(functions)
        with ThreadPoolExecutor(len(functions)) as pool:
            ends = [pool.submit(finish, x, self.chance.choice(_NAPS)) for x in functions]
        failures = [x for x in (end.exception() for end in ends) if x is not None]
        # Where one warp fails, others wait for it.
        for failure in sorted(failures, key=lambda x: isinstance(x, Deadlock)):
            raise failure

    def nap(self) -> None:
        """Make the calling warp as slow as it is."""
        if most := self.naps.get(threading.get_ident()):
            time.sleep(most * self.chance.random())

    def look(self) -> None:
        """Give up where nobody is left who could go on."""
        are_stuck = all(barrier.phase % 2 == parity for barrier, parity in self.waiting.values())
        self.is_stuck |= 0 < self.running == len(self.waiting) and are_stuck
        self.changed.notify_all()


class Barrier:
    """One that counts arrivals, and whose phases have parities."""

    def __init__(self, warps: Warps, arrivals: int) -> None:
        self.warps, self.arrivals = warps, arrivals
        self.phase, self.pending = 0, arrivals
        self.fillings = 0
        self.empty: Barrier | None = None

    def fill(self) -> None:
        """Bytes are copied into the slot that this barrier is of, and arrive at once."""
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
                self.phase, self.pending = self.phase + 1, self.arrivals
                self.warps.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity has ended, which is the one before or the present one."""
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
            # Parity alone cannot tell a phase from the second one after it.
            assert not isinstance(parity, Parity) or self.phase == parity.phases, "a warp goes on at another time"


class Barriers(list[Barrier]):
    """Those of a ring's slots."""

    index = list.__getitem__  # pyrefly: ignore


class Mbarrier:
    """The module of barriers."""

    def wait(self, barrier: Barrier, parity: int) -> None:
        barrier.wait(parity)

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.arrive(count)

    def expect(self, barrier: Barrier, count: int) -> None:
        del count
        barrier.fill()


class Language(Tile):
    """The module of everything else."""

    def __init__(self, program: int, warps: Warps) -> None:
        self.program, self.warps = program, warps

    def program_id(self, axis: int) -> Number:
        del axis
        return Number(self.program)

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

    def split(self, _: object) -> tuple[Tile, Tile]:
        return Tile(), Tile()

    def warp_specialize(self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: object) -> None:
        for function, arguments in functions:
            names = function.__code__.co_varnames  # pyrefly: ignore
            given = dict(zip(names, arguments, strict=False))
            for name, barriers in given.items():
                if name.endswith("_full"):
                    for full, empty in zip(barriers, given.get(name.replace("_full", "_empty"), []), strict=False):
                        full.empty = empty
        self.warps.run([lambda f=function, a=arguments: f(*a) for function, arguments in functions])


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
) -> None:
    """Run one program of a kernel.

    Args:
        text: Gluon source of a module.
        name: of the kernel in it.
        rounds: that a program goes through; None where it is not told.
        chance: decides which warps are slow.
        lists: numbers in memory, by the parameters that point to them.

    Raises:
        Deadlock: where its warps wait for each other forever.
    """
    warps = Warps(chance)
    words = {
        "gl": Language(program, warps), "tma": Tile(), "async_copy": Tile(), "mbarrier": Mbarrier(),
        "tma_load": Tile(), "tma_store": Tile(), "load_async": Tile(), "reinterpret": Tile(),
        "warpgroup_mma": Tile(), "warpgroup_mma_wait": _waited,
        "make_barriers": lambda count, arrivals: Barriers(Barrier(warps, arrivals) for _ in builtins.range(count)),
    }  # fmt: skip
    # The one helper whose result is a number that barriers are found by.
    kernel = kernel_with(text, name, words, {"forgotten": Number})
    given: dict[str, object] = {x: Tile() for x in kernel.__code__.co_varnames[: kernel.__code__.co_argcount]}
    given |= {x: Memory(numbers) for x, numbers in (lists or {}).items()}
    kernel(**given | ({} if rounds is None else {"ROUNDS": Number(rounds)}))


def kernel_with(text: str, name: str, words: Mapping[str, Any], helpers: Mapping[str, Any]) -> Any:
    """A kernel as a function of Python, of which these words are what its module imports.

    Args:
        helpers: what takes the place of helpers of the same names.
    """
    scope: dict[str, Any] = {
        "gluon": _Gluon, "fence_async_shared": lambda: None, "thread_barrier": lambda: None,
        "range": lambda *x: map(Number, builtins.range(*x)),
        "PROPAGATE_NAN": True,
    } | dict(words)  # fmt: skip
    for source in (inspect.getsource(resident_tiles), text):
        exec(compile(source[source.index("@gluon.jit") :], f"<{name}>", "exec"), scope)
        scope |= helpers
    return scope[name]


def _waited(number: int, deps: Sequence[object]) -> object:
    del number
    return deps[0] if len(deps) == 1 else list(deps)
