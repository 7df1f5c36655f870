"""Explained reports of compute-sanitizer: constructs that a tool does not follow, described as narrowly as possible.

A report that matches no entry of `KNOWN` is an error. false_alarms.py has small kernels with only these constructs;
`sanitize.py --families false_alarms` shows the tools' reports for them.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Access:
    """A memory access in a report.

    Attributes:
        kind: "Read" or "Write" of a hazard, "" elsewhere.
        kernel: the function, as the tool prints it.
        offset: byte offset of the instruction in the kernel.
        line: file and line number of the source; None if the kernel was compiled without lines, as JAX does.
    """

    kind: str
    kernel: str
    offset: int
    line: tuple[str, int] | None


@dataclass(frozen=True)
class Report:
    """One report of a tool.

    Attributes:
        title: its first line without locations; for a copy by the host the second line, which describes the error.
        accesses: the accesses, in order.
        call: the call of the family during which it was reported; "" if the process ended before the call did.
    """

    title: str
    accesses: tuple[Access, ...]
    call: str

    @property
    def kernels(self) -> set[str]:
        """Return the functions that the report names."""
        return {access.kernel for access in self.accesses}


_TITLE = re.compile(r"========= (?! )(?!COMPUTE-SANITIZER|Default timeout|(?:\w+ )?SUMMARY: )(.*\S)")
_DETAIL = "=========     "
_ENDED_CALL = re.compile(r"(?:ran (?P<ran>.*) \([\d.]+ s, .*\)|EXC (?P<failed>.*?): [A-Z]\w* .*)$")
_ACCESS = re.compile(
    r"(?:(?P<kind>Read|Write) access )?at (?P<kernel>\S.*?)\+0x(?P<offset>[0-9a-f]+)"
    r"(?: in (?P<file>.+?):(?P<line>\d+))?(?: \[\d+ hazards?\])?$"
)
_COPY = re.compile(r"Uninitialized access to 0x[0-9a-f]+ on access by (cudaMemcpy\w* source)$")


def parse_reports(lines: Iterable[str]) -> Counter[Report]:
    """Return the reports in the output of a process, which also prints a line when a call ends.

    Reports that differ only in the thread, the address or the number of hazards count as equal. There may be millions.
    """
    found: Counter[Report] = Counter()
    of_call: Counter[tuple[str, tuple[Access, ...]]] = Counter()
    title, accesses = "", ()

    def end_report() -> None:
        if title:
            of_call[title, accesses] += 1

    def end_call(call: str) -> None:
        for (one, places), count in of_call.items():
            found[Report(one, places, call)] += count
        of_call.clear()

    for line in lines:
        line = line.rstrip()
        if line.startswith(_DETAIL):
            detail = line.removeprefix("=========").lstrip()
            if copy := _COPY.match(detail):
                title = f"Uninitialized {copy[1]}"
            elif detail.startswith(("at ", "and ")):
                accesses += _accesses(detail)
        elif match := _TITLE.match(line):
            end_report()
            title, accesses = _title(match[1]), _accesses(match[1])
        elif ended := _ENDED_CALL.match(line):
            end_report()
            title = ""
            end_call(ended["ran"] or ended["failed"])
    end_report()
    end_call("")
    return found


@functools.lru_cache(maxsize=4096)
def _accesses(text: str) -> tuple[Access, ...]:
    match = _ACCESS.search(text)
    if match is None:
        return ()
    line = None if match["file"] is None else (match["file"], int(match["line"]))
    return (Access(match["kind"] or "", match["kernel"].removeprefix("void "), int(match["offset"], 16), line),)


def _title(text: str) -> str:
    """Return a title without locations, which accesses have, and without addresses."""
    return re.sub(r" at .*\+0x[0-9a-f]+.*$| access error at host access to 0x.*$", "", text)


type Lines = Callable[[str, int, str], str]
"""A function that returns the text of a line of a file that has a kernel."""


def lines_in(*folders: Path) -> Lines:
    """Return a function that looks up lines of files in these folders; it returns "" for unknown files.

    The tool names files without their folder. Of several files, the one that defines the kernel is meant, or else the
    template that a generated kernel calls. Generated kernels have source files whose names are the last word of the
    tool's name for them.
    """

    @functools.cache
    def line_of(name: str, number: int, kernel: str) -> str:
        file = re.sub(r"^<.* (\w+)>$", r"\1.py", name)
        found = [path for folder in folders for path in folder.rglob(file)]
        texts = [path.read_text() for path in found]
        if len(texts) > 1:
            own = [text for text in texts if re.search(rf"^def {re.escape(kernel)}\(", text, flags=re.MULTILINE)]
            texts = own or [text for text in texts if "FUNCTIONS: gl.constexpr" in text]
        lines = texts[0].splitlines() if len(texts) == 1 else []
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    return line_of


@dataclass(frozen=True)
class Known:
    """A kind of explained report.

    Attributes:
        tool: the tool that reports it.
        title: a pattern of the whole title.
        kernels: a pattern of each kernel's whole name.
        reason: the construct that the tool does not follow, or why the reported access cannot affect a result.
        is_such: predicate of the accesses that the reason describes.
        families: the families of the calls; all if empty.
        calls: the calls of these families; all if empty.
        most: maximum number of reports in one process.
    """

    tool: str
    title: str
    kernels: str
    reason: str
    is_such: Callable[[Sequence[Access], Lines], bool] = lambda accesses, line_of: True
    families: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    most: int | None = None

    def matches(self, tool: str, family: str, report: Report, line_of: Lines) -> bool:
        """Return whether this explains the report, regardless of the number of such reports."""
        return (
            tool == self.tool
            and family in (self.families or (family,))
            and report.call in (self.calls or (report.call,))
            and re.fullmatch(self.title, report.title) is not None
            and bool(report.accesses) == bool(self.kernels)
            and all(re.fullmatch(self.kernels, kernel) for kernel in report.kernels)
            and self.is_such(report.accesses, line_of)
        )


def _has_text(access: Access, line_of: Lines, pattern: str) -> bool:
    """Return whether the line of an access matches a pattern; True if the kernel was compiled without lines."""
    return access.line is None or re.search(pattern, line_of(*access.line, access.kernel)) is not None


# Warps wait for their partition at the start of the kernel.
_FIRST_INSTRUCTIONS = 0x400


def _is_of_specialisation(accesses: Sequence[Access], line_of: Lines) -> bool:
    """Return whether accesses belong to warp specialisation.

    Waiting warps read their next task at the line of `def`. Writes are there, and at the places that signal work: where
    the partitions begin, and where the kernel ends.
    """
    read, *writes = accesses
    begins = rf"^def {read.kernel}\("

    def is_signal(write: Access) -> bool:
        if _has_text(write, line_of, rf"{begins}|warp_specialize\("):
            return True
        assert write.line is not None
        file, number = write.line
        here, *after = (line_of(file, number + further, write.kernel) for further in range(3))
        return here != "" and not any(after)

    return (
        len(writes) > 0
        and read.kind == "Read"
        and read.offset < _FIRST_INSTRUCTIONS
        and _has_text(read, line_of, begins)
        and all(x.kind == "Write" and x.offset > read.offset and is_signal(x) for x in writes)
    )


def _is_handed_over(accesses: Sequence[Access], line_of: Lines) -> bool:
    """Return whether one side stores and the other loads memory that partitions hand over."""
    memory = r"\b(?:terms|lines|half|memory)\b"
    texts = {"Write": rf"{memory}.*\.store\(|^gradient\.store\(", "Read": rf"{memory}.*\.load\("}
    kinds = [x.kind for x in accesses]
    return (
        len(set(kinds[1:])) == 1
        and kinds[0] != kinds[1]
        and all(_has_text(x, line_of, texts[x.kind]) for x in accesses)
    )


def _is_one_store(accesses: Sequence[Access], line_of: Lines) -> bool:
    """Return whether one instruction, which stores sums of products, races with itself."""
    stores = r"^tl\.store\((?:p_delta|p_part|arrays\.part|p_out) \+"
    return (
        len(accesses) > 1
        and len({x.offset for x in accesses}) == 1
        and all(x.kind == "Write" for x in accesses)
        and all(_has_text(x, line_of, stores) for x in accesses)
    )


def _is_of_parts(accesses: Sequence[Access], line_of: Lines) -> bool:
    """Return whether the accesses load parts and not their sums."""
    return all(_has_text(x, line_of, r"^b_part = tl\.load\(arrays\.part \+") for x in accesses)


_RACE = r"Error: Race reported between (?:Read|Write) access"
_READ = r"Uninitialized __global__ memory read of size {} bytes"
# Kernels whose results the copy engine stores, and the families that launch them.
_BY_COPY_ENGINE = (
    "block_diagonal", "block_diagonal_torch", "projection_torch", "pallas", "fuse_resident_1", "fuse_resident_2",
    "fuse_streamed_1", "fuse_streamed_2", "fuse_one_pass", "fuse_torch", "false_alarms",
)  # fmt: skip
_COPY_ENGINE = (
    "initcheck does not see what the copy engine (TMA) writes, so that who reads it next seems to read nothing. Each "
    "result is compared with the CPU's. Evidence: `stored_by_copy_engine` in false_alarms.py; kernels that store by "
    "themselves (`moba`) have no such reports."
)
_WITH_PRODUCTS = ("fuse_structures",)
_PRODUCTS = ("invariant_points_frames", "projected")
_OF_CUBLAS = (
    "Products outside of the fused region are cuBLAS's, whose kernels store by the copy engine (TMA), which initcheck "
    "does not see. These calls' own kernels store by themselves, as those of the other calls of this family, of which "
    "nothing is reported."
)

KNOWN = {
    "word of warp specialisation": Known(
        "racecheck",
        _RACE,
        r"moba_hopper_\w+|block_diagonal_hopper_\w+|fused_\w+_(?:resident|streamed|one_pass)|specialised|handed_over",
        "Triton tells waiting warps in shared memory what to run next, between barriers of all warps that racecheck "
        "does not pair. Evidence: `specialised` in false_alarms.py has nothing else in shared memory.",
        is_such=_is_of_specialisation,
    ),
    "handed over by an mbarrier": Known(
        "racecheck",
        _RACE,
        r"fused_(?:forward_resident|forward_streamed|rows_and_pairs_resident|backward_one_pass)|handed_over",
        "Warps store, meet at a barrier, and one thread arrives at an mbarrier on which the reading warps wait; "
        "racecheck takes the wait for ordered after that thread alone, not after those that it met. Evidence: "
        "`handed_over` in false_alarms.py; values that the arriving thread itself has stored are not reported.",
        is_such=_is_handed_over,
    ),
    "copies of a sum": Known(
        "racecheck",
        _RACE,
        r"block_diagonal_chunked_query_gradient|moba_paged_blocks|summed_products",
        "Threads of one warp that all have a sum store it at one place with one instruction. The sums differ in their "
        "last bit, for each thread's own product is fused with the first addition. Any of them is the sum. Evidence: "
        "`summed_products` in false_alarms.py.",
        is_such=_is_one_store,
    ),
    "parts that are not there": Known(
        "initcheck",
        _READ.format("(?:4|8|16)"),
        r"paged_merge|moba_paged_blocks",
        "Parts are loaded whether they are there or not, so that nothing waits for their sums, and those whose sum "
        "is -inf are replaced by 0 before they are used. Torch's families run the same kernels with lines of the "
        "source, and there no other line is reported.",
        is_such=_is_of_parts,
        families=("paged", "paged_torch", "latent_torch", "moba_paged", "moba_paged_torch"),
    ),
    "copied to the host, written by the copy engine": Known(
        "initcheck", r"Uninitialized cudaMemcpy\w* source", "", _COPY_ENGINE, families=_BY_COPY_ENGINE
    ),
    "read by frameworks, written by the copy engine": Known(
        "initcheck",
        _READ.format(r"\d+"),
        r"(?:loop|input|wrapped)_\w+|at::native::.*|fused_delta",
        _COPY_ENGINE,
        families=_BY_COPY_ENGINE,
    ),
    "products of XLA, copied to the host": Known(
        "initcheck", r"Uninitialized cudaMemcpy\w* source", "", _OF_CUBLAS, families=_WITH_PRODUCTS, calls=_PRODUCTS
    ),
    "products of XLA, read by XLA": Known(
        "initcheck",
        _READ.format("[26]"),
        r"(?:loop|input|wrapped)_\w+",
        _OF_CUBLAS,
        families=_WITH_PRODUCTS,
        calls=_PRODUCTS,
    ),
    "counter of items": Known(
        "initcheck",
        _READ.format("4"),
        "fused_forward_streamed",
        "Programs take items from a counter of 4 bytes that XLA has set to 0 with a copy of its own, which initcheck "
        "does not see (as in `counter of a loop of XLA`). With another start, tiles of the result would be missing.",
        families=("fuse_streamed_1", "fuse_streamed_2"),
    ),
    "counter of a loop of XLA": Known(
        "initcheck",
        _READ.format("4"),
        "loop_add_fusion",
        "XLA's loop for `searchsorted` counts its turns in 4 bytes that its own copy has set. Kernels of this library "
        "neither read nor write them.",
        families=("fuse_masks",),
        calls=("packed_documents",),
        most=1,
    ),
}
"""The explained reports by name."""


_DROPPED = re.compile(
    r"Warning: Error buffer overflow has been detected\. Some records have been dropped"
    r"|\d+ errors were skipped \(error buffer overflow\)\."
)
DROPPED = "records that the tool dropped"
WHY_DROPPED = (
    "initcheck keeps 256 records of a launch and says that it dropped others. It is explained in calls whose other "
    "reports all are: a launch of which one thread reads what is not known to be written does so in the other threads."
)


def explain(
    tool: str, family: str, reports: Mapping[Report, int], line_of: Lines
) -> tuple[Counter[str], Counter[Report]]:
    """Return how many reports of a process each name of `KNOWN` (or `DROPPED`) explains, and the other reports."""
    counts: Counter[str] = Counter()
    rest: Counter[Report] = Counter()
    calls: set[str] = set()
    reported = {report: count for report, count in reports.items() if not _DROPPED.match(report.title)}
    for report, count in reported.items():
        names = [name for name, known in KNOWN.items() if known.matches(tool, family, report, line_of)]
        most = KNOWN[names[0]].most if names else 0
        explained = count if most is None else min(count, most - counts[names[0]]) if names else 0
        if explained:
            counts[names[0]] += explained
            calls.add(report.call)
        if count > explained:
            rest[report] += count - explained
    calls -= {report.call for report in rest}
    for report, count in reports.items():
        if report in reported:
            continue
        # Only the end of a process tells how many there were in all its calls.
        if tool == "initcheck" and (report.call in calls or (not report.call and calls and not rest)):
            counts[DROPPED] += count
        else:
            rest[report] += count
    return counts, rest
