"""Configurations that depend on the version of Triton.

Configurations are measured with one version. A newer compiler may need more registers for the same kernel, so that
values spill in its loops. Such a kernel gets another configuration from that version on: one `Adjustment` beside the
table of its configurations. With older versions the configuration stays as it was measured.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdiag.triton_kernels.launch import private_triton


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjustment:
    """What differs in the configuration of some launches from a version of Triton on.

    Attributes:
        since: the version, (3, 8) for 3.8.0 and later.
        kinds: of the launches.
        archs: compute capabilities, 90 for sm_90.
        change: the fields of the configuration that differ.
        applies: whether a problem's measured configuration changes.
    """

    since: tuple[int, ...]
    kinds: tuple[str, ...]
    archs: tuple[int, ...]
    change: Mapping[str, Any]
    applies: Callable[[Any, Any], bool] = lambda problem, config: True


def adjusted[C](config: C, adjustments: Sequence[Adjustment], problem: Any, kind: str, arch: int) -> C:
    """Return a configuration as the installed Triton needs it; later adjustments change what earlier ones left.

    Args:
        config: a dataclass, as measured.
        adjustments: of the kernels that `config` is of.
        problem, kind, arch: of the launch.
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
    """Return the installed Triton's version, looked up once."""
    return private_triton.version()
