"""Snapshots of compiler results, for changes that must not affect them, such as moved modules and new names.

Record the machine code of every kernel that the tests compile (PTX without debug lines, comments and kernel names):

    python -m pytest -p tests.snapshot --kernel-snapshot before ...

Record the results of `explain` for the gallery's variants and for random functions:

    python -m tests.snapshot explain before/explain.txt

Compare two snapshots line by line:

    python -m tests.snapshot compare before after
"""

import argparse
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

RANDOM_FUNCTIONS = 200
SHOWN = 20
"""Maximum number of differing lines of each kind that `compare` prints."""


def pytest_addoption(parser) -> None:
    """Add the option that names the folder of the snapshot."""
    parser.addoption("--kernel-snapshot", help="folder for hashes of the PTX of every kernel that is compiled")


def pytest_configure(config) -> None:
    """Write a line for every kernel that this process compiles, or reads from Triton's cache."""
    folder = config.getoption("--kernel-snapshot")
    if folder is None:
        return
    from blockdiag.triton_kernels.launch import compile as compiler

    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder).resolve() / f"kernels-{os.getpid()}.txt"
    compile_kernel = compiler._compile

    def recorded(plan, arch, binary):
        compiled = compile_kernel(plan, arch, binary)
        with file.open("a") as out:
            print(f"sm_{arch} {plan.name} {machine_code_hash(compiled.ptx, compiled.name)}", file=out)
        return compiled

    compiler._compile = recorded


def machine_code_hash(ptx: str, name: str) -> str:
    """Hash PTX without debug lines, comments and the name of the kernel."""
    code = ptx.split("\t.section\t.debug")[0].replace(name, "kernel")
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def explanations() -> Iterator[str]:
    """Yield the results of `explain` for every variant of the gallery and for random functions."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from blockdiag import NotFusible, explain
    from blockdiag.fusion.gallery import VARIANTS, Sizes
    from tests.fusion.fusion_random import Attention

    for name, variant in VARIANTS.items():
        inputs = variant.make_inputs(jax.random.key(0), Sizes())
        yield f"== {name}\n{explain(variant.function)(**inputs)}"
    for seed in range(RANDOM_FUNCTIONS):
        attention = Attention(seed)
        given = {
            key: jnp.asarray(x, jnp.float32 if np.issubdtype(x.dtype, np.floating) else x.dtype)
            for key, x in attention.arrays.items()
        }
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            try:
                found = explain(attention)(given)
            except NotFusible as refusal:
                found = refusal
        yield f"== random {seed}\n{found}"


def lines_of(folder: Path) -> set[str]:
    """Return the lines of a snapshot without the folders of files, which moves change."""
    lines = (line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines())
    return {re.sub(r"\S*/(\w+\.py)", r"\1", line) for line in lines}


def compare(before: Path, after: Path) -> int:
    """Print the lines that only one of two snapshots has, and return their number."""
    first, second = lines_of(before), lines_of(after)
    for title, lines in (("only before", first - second), ("only after", second - first)):
        print(f"{title}: {len(lines)} of {len(first | second)}")
        for line in sorted(lines)[:SHOWN]:
            print("   ", line)
    return len(first ^ second)


def main() -> None:
    """Run one of the commands in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("explain").add_argument("file", type=Path)
    comparison = commands.add_parser("compare")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "explain":
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text("\n".join(explanations()) + "\n")
    else:
        raise SystemExit(min(compare(arguments.before, arguments.after), 1))


if __name__ == "__main__":
    main()
