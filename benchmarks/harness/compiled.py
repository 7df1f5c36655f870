"""What the text of a compiled JAX program tells: the kernels it launches, and memory that is not the op's."""

import collections
import re


def custom_calls(program: str) -> collections.Counter[str]:
    """How often a compiled JAX program makes custom calls, by target: how many kernels it launches."""
    return collections.Counter(re.findall(r'custom_call_target="([^"]+)"', program))


def calls_as_text(calls: collections.Counter[str]) -> str:
    """One line of them."""
    return ", ".join(f"{target} x{count}" for target, count in sorted(calls.items()))


def address_table_bytes(program: str) -> int:
    """Bytes of the tables in which XLA keeps the addresses of custom calls with several results: 8 per result.

    XLA counts them as temporary memory of the program (its buffer assignment shows one for each such call); they are
    no memory of the op's.
    """
    results = re.findall(r"= \(([^()]*(?:\([^()]*\)[^()]*)*)\) custom-call\(", program)
    return sum(8 * len(re.findall(r"\w+\[[\d,]*\]", shapes)) for shapes in results)
