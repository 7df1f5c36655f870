"""Loop analysis of SASS, the machine code that nvdisasm prints: the loop depth of every instruction."""

import re
from collections.abc import Iterator, Sequence

_LABEL = re.compile(r"([\w.$]+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s*(?P<text>.*?)\s*;")
_TARGET = re.compile(r"`\((?P<label>[\w.$]+)\)")
_INDIRECT_TARGETS = re.compile(r'BRANCH_TARGETS (?P<labels>[^"]*)"')
# Instructions without a fall-through if they have no predicate. A BRA with an operand before its target is conditional.
_LEAVES = re.compile(r"(?:BRA(?:\.\w+)* `|BRX|EXIT|RET)")


def loop_depths(sass: str) -> list[tuple[str, int]]:
    """Return the instructions of `sass` in order, each with its loop depth.

    A loop is a strongly connected set of instructions. Inner loops are found by removing the loop's first instruction
    and searching again. Two kinds of backward branches are not counted as loops:

    - out-of-line code behind the kernel that jumps back to where it came from, such as a barrier's wait;
    - a branch to itself that only padding reaches.

    In a warp-specialised kernel the added warps wait for work in a loop, which adds one to the depth of their code.
    """
    instructions, labels = _parse(sass)
    successors = _successors(instructions, labels)
    reachable = _reach(0, successors, set(range(len(instructions)))) | {0}
    depths = [0] * len(instructions)
    for loop in _loops(reachable, successors):
        for index in loop:
            depths[index] += 1
    return list(zip(instructions, depths, strict=True))


def _parse(sass: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions without their addresses, and the index of the instruction that follows each label."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            instructions.append(instruction["text"])
    if not instructions:
        raise ValueError("`sass` must be what nvdisasm prints of a kernel, got text without instructions")
    return instructions, labels


def _successors(instructions: Sequence[str], labels: dict[str, int]) -> list[set[int]]:
    """Return the possible successors of each instruction. A call may both return and act as a jump."""
    successors: list[set[int]] = []
    for index, text in enumerate(instructions):
        following: set[int] = set() if _LEAVES.match(text) else {index + 1}
        # BSSY names a label but does not branch to it; control reaches the label through BSYNC's fall-through.
        if re.search(r"\b(?:BRA|CALL)\b", text):
            following.update(labels[name] for name in _TARGET.findall(text))
        elif indirect := _INDIRECT_TARGETS.search(text):
            following.update(labels[name] for name in indirect["labels"].split(","))
        successors.append({target for target in following if target < len(instructions)})
    return successors


def _loops(body: set[int], successors: Sequence[set[int]]) -> Iterator[set[int]]:
    """Yield the loops among the instructions of `body`, outer loops first."""
    predecessors: list[set[int]] = [set() for _ in successors]
    for source in body:
        for target in successors[source]:
            predecessors[target].add(source)
    found: set[int] = set()
    # Every loop contains a branch to an instruction at or before the branch, however its code is laid out.
    targets = {target for source in body for target in successors[source] if target <= source}
    for target in sorted(targets & body):
        loop = _reach(target, successors, body) & _reach(target, predecessors, body)
        if loop and target not in found:
            found |= loop
            yield loop
            first = min((index for index in loop if predecessors[index] - loop), default=min(loop))
            yield from _loops(loop - {first}, successors)


def _reach(start: int, edges: Sequence[set[int]], body: set[int]) -> set[int]:
    """Return the instructions of `body` that are one or more steps from `start`, which includes `start` on a cycle."""
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        for index in edges[waiting.pop()] & body:
            if index not in reached:
                reached.add(index)
                waiting.append(index)
    return reached
