"""Operations and their implementations, by name. Imports neither jax nor torch.

An operation is a package with one module per implementation. In such a module, `available()` and `supports(problem)`
return None or the reason why not. `forward`, `backward` and any other methods of the operation compute the canonical
call. Modules are imported on first use.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar, Protocol

from blockdiag.common.sizes import symbolic_field

# Implementations that run on a CPU only through an interpreter of their kernels.
_INTERPRETED = ("triton", "pallas")


class Problem(Protocol):
    """The static, hashable description of a call: everything known before the values of its arrays.

    Attributes:
        operation: the operation that is called.
        is_empty: whether there are no elements to compute the result from.
    """

    operation: "ClassVar[Operation]"

    @property
    def is_empty(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Implementation:
    """A module that computes an operation.

    Attributes:
        name: its name in the argument `implementation` of a call.
        module: import path of the module.
        has_interpreter: whether it runs on a CPU only through an interpreter of its kernels, when selected by name.

    Example:
        >>> from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
        >>> list(BLOCK_DIAGONAL.implementations), BLOCK_DIAGONAL.implementations["xla"].why_unavailable()
        (['reference', 'xla', 'triton', 'pallas'], None)
    """

    name: str
    module: str
    has_interpreter: bool = False

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(self.module)

    def why_unavailable(self) -> str | None:
        """Return None if this implementation can run in this process at all, otherwise the reason and the remedy."""
        return self.load().available()

    def decline(self, problem: Problem) -> str | None:
        """Return the reason why this implementation cannot compute a call, or None.

        Args:
            problem: the call.

        Returns:
            None if it can compute the call; otherwise a sentence with the reason and the remedy.
        """
        reason = self.why_unavailable()
        is_launch = self.has_interpreter and not problem.operation.takes_symbolic_sizes
        if reason is None and is_launch and (size := symbolic_field(problem)):
            # Launch grids are computed while tracing, which needs numbers.
            return (
                f"kernels are launched for sizes that are numbers, got {size}; export for each size, or with "
                'implementation="xla"'
            )
        return reason or self.load().supports(problem)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A public operation and its implementations.

    Attributes:
        name: name of the public function.
        package: import path of the package whose modules are the implementations.
        names: names of the implementations.
        implementations: the implementations by name.
        takes_symbolic_sizes: whether kernel implementations check symbolic sizes of `jax.export` themselves.

    Example:
        >>> from blockdiag.common.operation import Operation
        >>> operation = Operation("paged_attention", "blockdiag.ops.paged", ("reference", "xla", "triton"))
        >>> operation.implementations["triton"].module
        'blockdiag.ops.paged.triton'
    """

    name: str
    package: str
    names: tuple[str, ...]
    takes_symbolic_sizes: bool = False
    implementations: Mapping[str, Implementation] = field(init=False)

    def __post_init__(self) -> None:
        implementations = {
            name: Implementation(name, f"{self.package}.{name}", has_interpreter=name in _INTERPRETED)
            for name in self.names
        }
        object.__setattr__(self, "implementations", implementations)
