"""Loops of disassembled machine code (nvdisasm's SASS): which instructions a kernel repeats, and how deep they lie."""

import re
from collections.abc import Iterator, Sequence

_LABEL = re.compile(r"([\w.$]+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s*(?P<text>.*?)\s*;")
_TARGET = re.compile(r"`\((?P<label>[\w.$]+)\)")
_INDIRECT_TARGETS = re.compile(r'BRANCH_TARGETS (?P<labels>[^"]*)"')
# Without a predicate nothing follows these; a BRA with an operand before its target is conditional too.
_LEAVES = re.compile(r"(?:BRA(?:\.\w+)* `|BRX|EXIT|RET)")


def loop_depths(sass: str) -> list[tuple[str, int]]:
    """The instructions of `sass`, in order, each with the number of loops that it lies in.

    A loop is a set of instructions that can all reach each other; loops within it are found again without its first
    instruction. Code that stands behind the kernel and jumps back to where it was left (a barrier's wait) is no loop
    around what lies between, and neither is a branch to itself that nothing but padding reaches. In a warp-specialised
    kernel the code of the added warps lies in one more loop, in which they wait for work.
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
    """Instructions without their addresses, and the index of the instruction that each label stands before."""
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
    """What may be executed after each instruction. A call is taken to return, or to be a jump."""
    successors: list[set[int]] = []
    for index, text in enumerate(instructions):
        following: set[int] = set() if _LEAVES.match(text) else {index + 1}
        # Instructions that name a label without going there (BSSY) fall through to it by way of BSYNC.
        if re.search(r"\b(?:BRA|CALL)\b", text):
            following.update(labels[name] for name in _TARGET.findall(text))
        elif indirect := _INDIRECT_TARGETS.search(text):
            following.update(labels[name] for name in indirect["labels"].split(","))
        successors.append({target for target in following if target < len(instructions)})
    return successors


def _loops(body: set[int], successors: Sequence[set[int]]) -> Iterator[set[int]]:
    """The loops among the instructions of `body`, outer ones before those in them."""
    predecessors: list[set[int]] = [set() for _ in successors]
    for source in body:
        for target in successors[source]:
            predecessors[target].add(source)
    found: set[int] = set()
    # Wherever its parts are placed, a loop has a branch to an instruction at or before that branch.
    targets = {target for source in body for target in successors[source] if target <= source}
    for target in sorted(targets & body):
        loop = _reach(target, successors, body) & _reach(target, predecessors, body)
        if loop and target not in found:
            found |= loop
            yield loop
            first = min((index for index in loop if predecessors[index] - loop), default=min(loop))
            yield from _loops(loop - {first}, successors)


def _reach(start: int, edges: Sequence[set[int]], body: set[int]) -> set[int]:
    """Instructions of `body` that one or more steps from `start` lead to; `start` is one of them if it repeats."""
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        for index in edges[waiting.pop()] & body:
            if index not in reached:
                reached.add(index)
                waiting.append(index)
    return reached
