"""Rules of division: which axes of an operation's arrays the devices of a mesh may divide, and Shardy's text for them.

A rule names the axes of each operand and result by labels, as einsum does, and says which labels devices may divide
among themselves. One rule serves every kind of mesh (`division.py`).
"""

import functools
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from blockdiag.common.versions import installed_version

_ADDRESS = " at 0x"

type Dim = tuple[str, ...]
"""The labels of one axis of an array, slowest first; an axis without labels is never divided."""


@dataclass(frozen=True)
class Rule:
    """Description of how devices may divide an operation.

    Attributes:
        operation: its public name, for messages.
        problem: text that differs where the computation does, beyond the shapes and dtypes of arrays.
        operands, results: the labels of every axis of every array.
        sizes: the size of each label, as pairs.
        independent: the labels that devices may divide: no element of a result needs two indices of such a label, but
            for results without the label, which are sums over it.
        anchors: numbers of the operands that must not move, such as a pool of pages: how they are sharded counts before
            all else.
        is_anchored: whether labels that anchors have are divided as the anchors are, or not at all.
    """

    operation: str
    problem: str
    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[tuple[str, int], ...]
    independent: frozenset[str]
    anchors: tuple[int, ...] = ()
    is_anchored: bool = False


def shardy_rule(rule: Rule, mesh: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
    """The text of a rule for Shardy, and what `def_partition` takes besides it.

    Axes that have no label, or no divisible one, get factors of their own that need replication.

    Args:
        rule: the rule.
        mesh: the size of each axis of the mesh.
    """
    sizes = dict(rule.sizes)
    order: list[str] = []
    whole: set[str] = set()
    compound: set[str] = set()
    size_of: dict[str, int] = {}

    lengths = [length for length in mesh.values() if length > 1]
    # Shardy would pass parts of an axis of a mesh from heads of queries to key heads, of which there may be fewer than
    # devices, and JAX cannot express parts: arrays that have a label alone do not hear from those that have it in a
    # compound axis. Of anchors all others hear on meshes where no axis would be cut.
    dims = {dim for array in (*rule.operands, *rule.results) for dim in array}
    in_compound = {label for dim in dims for label in dim if sum(sizes[x] > 1 for x in dim) > 1}
    # What does not decide how a label is divided must not say so to the others.
    anchored = {label for i in rule.anchors for dim in rule.operands[i] for label in dim} if rule.is_anchored else set()

    def words(arrays: Sequence[Sequence[Dim]], prefix: str) -> str:
        texts = []
        for number, dims in enumerate(arrays):
            is_apart = prefix == "o" and number not in rule.anchors
            axes = []

            def factor(label: str, is_alone: bool, suffix: str = f"_o{number}" if is_apart else "") -> str:
                name = f"l_{label}{suffix if label in anchored else ''}"
                if is_alone and label in in_compound and not (rule.anchors and _cuts_no_axis(sizes[label], lengths)):
                    name += "_alone"
                if name not in order:
                    order.append(name)
                size_of[name] = sizes[label]
                return name

            for axis, dim in enumerate(dims):
                # Shardy has no factors of one element beside others.
                names = [factor(label, len(dim) == 1) for label in dim if len(dim) == 1 or sizes[label] > 1]
                if not names:
                    names = [f"x_{prefix}{number}_{axis}"]
                    order.append(names[0])
                (whole if len(names) == 1 else compound).update(names)
                axes.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
            texts.append(" ".join(axes))
        return ", ".join(texts)

    text = f"{words(rule.operands, 'o')} -> {words(rule.results, 'r')}"
    shared = {f"l_{label}" for label in sizes.keys() - rule.independent}
    options: dict[str, Any] = {
        # Shardy wants these in the order in which they appear.
        "need_replication_factors": tuple(name for name in order if name.startswith("x_") or name in shared),
    }
    options |= {name: size for name, size in size_of.items() if name in compound - whole}
    return text, options


def _cuts_no_axis(size: int, axes: Sequence[int]) -> bool:
    """Return whether axes of a mesh of these sizes, in any order, are used up whole until each element is apart."""
    return size == 1 or all(
        size % axis == 0 and _cuts_no_axis(size // axis, [*axes[:place], *axes[place + 1 :]])
        for place, axis in enumerate(axes)
    )


def digest_of(rule: Rule) -> np.ndarray:
    """A number, uint32[8], that programs have for each division, so that it tells apart what they compute.

    JAX's compilation cache can be told to ignore which Python function divides a call
    (`jax_remove_custom_partitioning_ptr_from_cache_key`). The program itself must then say all that this function
    depends on, and say the same in every process: also which edition of this library's kernels it has.
    """
    # The edition takes tens of milliseconds to find, once, and tells nothing apart where the function itself does.
    edition = _library() if jax.config.jax_remove_custom_partitioning_ptr_from_cache_key else None
    # Addresses, in the text of objects that equal themselves alone, may be those of other objects in other processes.
    unique = uuid.uuid4().hex if _ADDRESS in rule.problem else ""
    settings = [getattr(jax.config, name) for name in ("jax_default_matmul_precision", "jax_enable_x64")]
    dims = (rule.operands, rule.results, rule.sizes, sorted(rule.independent), rule.anchors, rule.is_anchored)
    text = repr((edition, settings, rule.operation, rule.problem, dims, unique))
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)


@functools.cache
def _library() -> tuple[str, str | None]:
    """Return a hash of this library's sources and Triton's version, on which compiled kernels depend."""
    folder = Path(__file__).parent.parent
    content = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest(), installed_version("triton")
