"""Detector of races in the shared memory of Hopper kernels, for the interpreter.

It checks the order that barriers, fences and waits impose, not the order in which a run happened to execute, so one run
finds a missing wait whichever warps were slow. An actor is a partition, whose threads run together between thread
barriers. What it knows is the latest time of each other actor, up to which time a fence came after its writes, and the
completed copies. A barrier passes on what the arriving threads had in common at their last thread barrier. The rules:

| access | must know |
|---|---|
| threads read | the last write; of their own partition's writes, those before the last thread barrier |
| tensor cores or the copy engine read | the same, and a fence after it, by its writer or by one that knew of it |
| threads write | the last write, and all reads, which have completed |
| a copy writes | the same |

Products and copies out of shared memory read until they are awaited.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ACTORS = 8
_NOTHING, _COPY = -1, -2


class Race(AssertionError):
    """Two accesses of the same memory in no order."""


@dataclass
class Known:
    """The knowledge of an actor: times of all actors, up to which time each is fenced, completed and fenced copies."""

    times: np.ndarray = field(default_factory=lambda: np.zeros(ACTORS, np.int64))
    fences: np.ndarray = field(default_factory=lambda: np.zeros(ACTORS, np.int64))
    copies: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)

    def learn(self, other: "Known") -> None:
        self.times = np.maximum(self.times, other.times)
        self.fences = np.maximum(self.fences, other.fences)
        self.copies = self.copies | other.copies
        self.fenced = self.fenced | other.fenced


@dataclass
class Actor:
    """A partition.

    Attributes:
        known: what each of its threads knows.
        shared: what all of its threads have done or known since their last barrier.
        own: copies that each of its threads has started and awaited for itself.
    """

    index: int
    known: Known = field(default_factory=Known)
    shared: Known = field(default_factory=Known)
    own: set[int] = field(default_factory=set)

    def tick(self) -> int:
        self.known.times[self.index] += 1
        return int(self.known.times[self.index])


class Record:
    """Accesses of each element of a buffer: its last write, the last read of each actor, and the reads in flight."""

    def __init__(self, shape: Iterable[int]) -> None:
        shape = tuple(shape)
        self.writer = np.full(shape, _NOTHING, np.int8)
        self.written = np.zeros(shape, np.int64)
        self.flying = np.zeros(shape, np.int16)
        self.reads = [np.zeros(shape, np.int64) for _ in range(ACTORS)]

    def view(self, change: Any) -> "Record":
        """Return the record of a part of the buffer, which `change` cuts out of arrays of the buffer's shape."""
        found = object.__new__(Record)
        found.writer, found.written, found.flying = (change(x) for x in (self.writer, self.written, self.flying))
        found.reads = [change(x) for x in self.reads]
        return found


class Races:
    """The accesses of one program."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._actors: dict[int, Actor] = {}
        self._copies = 0
        # The copies that threads make, not the copy engine.
        self._by_threads: set[int] = set()
        self._main = self._actors[threading.get_ident()] = Actor(0)

    def begin(self) -> Known:
        """Return what all threads of the program's first warps know, with which other partitions begin."""
        known = Known()
        known.learn(self._main.shared)
        return known

    def enter(self, index: int, begin: Known) -> None:
        """Make the calling thread a partition. The one of index 0 has the warps that the program began with."""
        actor = self._main if index == 0 else Actor(index)
        if index:
            actor.known.learn(begin)
            actor.shared.learn(begin)
        self._actors[threading.get_ident()] = actor

    @property
    def _actor(self) -> Actor:
        return self._actors[threading.get_ident()]

    # Order

    def fence(self) -> None:
        actor = self._actor
        actor.tick()
        actor.known.fences = np.maximum(actor.known.fences, actor.known.times)
        actor.known.fenced = actor.known.copies | actor.own

    def thread_barrier(self) -> None:
        actor = self._actor
        actor.tick()
        actor.known.learn(Known(copies=actor.own))
        actor.own = set()
        actor.shared.learn(actor.known)

    def learn(self, known: Known) -> None:
        """Note that the threads of the calling actor have waited for what is known."""
        actor = self._actor
        actor.known.learn(known)
        actor.shared.learn(known)

    def common(self) -> Known:
        """Return what the calling actor's threads have in common, which an arrival at a barrier passes on."""
        return self._actor.shared

    def learn_copies(self, copies: Iterable[int]) -> None:
        """Note that each thread of the calling actor has waited for its own part of some copies."""
        self._actor.own |= set(copies)

    # Accesses

    def read(self, record: Record, *, by_engine: bool = False) -> None:
        """Note a read by threads, or the start of a read by tensor cores or the copy engine."""
        with self._lock:
            actor = self._actor
            time = actor.tick()
            self._check_write(record, actor, needs_fence=by_engine)
            if (record.writer == _NOTHING).any():
                raise Race("memory is read that nothing has been written to")
            if by_engine:
                record.flying += 1
            else:
                record.reads[actor.index][...] = time

    def end_read(self, record: Record) -> None:
        """Note that the calling actor has waited for the end of an engine's read."""
        with self._lock:
            actor = self._actor
            record.flying -= 1
            record.reads[actor.index][...] = actor.tick()

    def write(self, record: Record) -> None:
        """Note a write by threads."""
        with self._lock:
            actor = self._actor
            time = actor.tick()
            self._check_write(record, actor, may_be_own=True)
            self._check_reads(record, actor)
            record.writer[...], record.written[...] = actor.index, time

    def copy(self, record: Record, *, by_threads: bool = False) -> int:
        """Note the start of a copy into shared memory, and return its number."""
        with self._lock:
            actor = self._actor
            actor.tick()
            self._check_write(record, actor)
            self._check_reads(record, actor)
            self._copies += 1
            record.writer[...], record.written[...] = _COPY, self._copies
            if by_threads:
                self._by_threads.add(self._copies)
            return self._copies

    def _check_write(
        self, record: Record, actor: Actor, *, needs_fence: bool = False, may_be_own: bool = False
    ) -> None:
        known = actor.known
        for writer in np.unique(record.writer):
            written = record.written[record.writer == writer]
            if writer == _COPY:
                copies = set(np.unique(written).tolist())
                if not copies <= known.copies:
                    raise Race("an access does not wait for a copy into the memory")
                if needs_fence and not copies & self._by_threads <= known.fenced:
                    raise Race("an engine reads what threads have copied without a fence")
            elif writer >= 0 and not (may_be_own and writer == actor.index):
                least = actor.shared if writer == actor.index else known
                if (written > least.times[writer]).any():
                    raise Race("an access does not wait for a write")
                if needs_fence and (written > least.fences[writer]).any():
                    raise Race("an engine reads what threads have written without a fence")

    @staticmethod
    def _check_reads(record: Record, actor: Actor) -> None:
        if record.flying.any():
            raise Race("memory is overwritten while an engine reads it")
        for index, times in enumerate(record.reads):
            least = actor.shared if index == actor.index else actor.known
            if (times > least.times[index]).any():
                raise Race("memory is overwritten before it has been read")
