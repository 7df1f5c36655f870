"""Sharding rules: which axes of an operation's arrays the devices of a mesh may divide, and the rules in Shardy's form.

A rule labels the axes of each operand and result, as einsum does, and says which labels devices may divide. One rule
is used for every kind of mesh (`division.py`).
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
        problem: text that identifies the computation beyond the shapes and dtypes of its arrays.
        operands, results: the labels of every axis of every array.
        sizes: the size of each label, as pairs.
        independent: the labels that devices may divide. An element of a result depends on a single index of such a
            label; a result without the label is a sum over it.
        anchors: indices of the operands that must not move, such as a pool of pages. Their shardings take precedence.
        is_anchored: whether labels of anchors are divided only as the anchors are.
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
    """Return the text of a rule for Shardy, and the further keyword arguments of `def_partition`.

    An axis with no labels, or with several labels of size 1, gets a factor of its own that needs replication. Labels
    that devices may not divide need replication too.

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
    # Query heads are a compound axis (key_heads, group), and key heads have the first label alone. With fewer key heads
    # than devices, Shardy would propagate a part of a mesh axis from query heads to key heads, and JAX cannot express
    # such parts. A label that is alone on its axis therefore gets a factor of its own, "_alone", that nothing
    # propagates to. Rules with anchors share the factor on meshes where no mesh axis would be cut.
    dims = {dim for array in (*rule.operands, *rule.results) for dim in array}
    in_compound = {label for dim in dims for label in dim if sum(sizes[x] > 1 for x in dim) > 1}
    # Only anchors decide how these labels are divided. Other operands get factors of their own for them, so that their
    # shardings do not propagate.
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
                # Shardy does not allow factors of size 1 in a compound axis.
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
        # Shardy requires these in order of appearance.
        "need_replication_factors": tuple(name for name in order if name.startswith("x_") or name in shared),
    }
    options |= {name: size for name, size in size_of.items() if name in compound - whole}
    return text, options


def _cuts_no_axis(size: int, axes: Sequence[int]) -> bool:
    """Return whether mesh axes of these sizes, taken in any order, divide `size` elements without cutting an axis."""
    return size == 1 or all(
        size % axis == 0 and _cuts_no_axis(size // axis, [*axes[:place], *axes[place + 1 :]])
        for place, axis in enumerate(axes)
    )


def digest_of(rule: Rule) -> np.ndarray:
    """Return a digest, uint32 [8], of everything that a division depends on; programs hold it as a constant.

    JAX's compilation cache can be configured to ignore the Python function that divides a call
    (`jax_remove_custom_partitioning_ptr_from_cache_key`). The program itself must then identify everything that the
    function depends on, including the version of this library's kernels, and equally in every process.
    """
    # Hashing the library takes tens of milliseconds, once. It is needed only where the cache key ignores the function.
    edition = _library() if jax.config.jax_remove_custom_partitioning_ptr_from_cache_key else None
    # A default repr contains the object's address, which may belong to another object in another process.
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
