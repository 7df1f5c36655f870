"""Kernel configurations that depend on the version of Triton.

Configurations are measured with one version. A newer compiler may need more registers for the same kernel and spill
in its loops. An `Adjustment` beside the table of configurations changes such a kernel's configuration from that version
on. Older versions keep the measured configuration.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdiag.triton_kernels.launch import private_triton


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjustment:
    """A change to the configuration of some launches from a version of Triton on.

    Attributes:
        since: the first version that it applies to, (3, 8) for 3.8.0 and later.
        kinds: the kinds of launches that it applies to.
        archs: compute capabilities, 90 for sm_90.
        change: the changed fields of the configuration.
        applies: predicate of a problem and its measured configuration.
    """

    since: tuple[int, ...]
    kinds: tuple[str, ...]
    archs: tuple[int, ...]
    change: Mapping[str, Any]
    applies: Callable[[Any, Any], bool] = lambda problem, config: True


def adjusted[C](config: C, adjustments: Sequence[Adjustment], problem: Any, kind: str, arch: int) -> C:
    """Return a configuration with the adjustments for the installed Triton applied in order.

    Args:
        config: the measured configuration, a dataclass.
        adjustments: the adjustments of this operation's kernels.
        problem, kind, arch: the launch that the configuration is for.
    """
    for adjustment in adjustments:
        if (
            adjustment.since <= installed_version()
            and kind in adjustment.kinds
            and arch in adjustment.archs
            and adjustment.applies(problem, config)
        ):
            config = dataclasses.replace(config, **adjustment.change)  # pyrefly: ignore
    return config


@functools.cache
def installed_version() -> tuple[int, ...]:
    """Return the installed Triton's version. Cached."""
    return private_triton.version()
