"""Dispatch: choose the implementation that computes a call, and call it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from blockdiag.common.operation import Implementation, Operation, Problem

# The implementations that `implementation=None` tries on CUDA, in order, before "xla". Pallas is to be added where it
# is measured to be faster.
CUDA_DEFAULTS = ("triton",)


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementations that compute a call.

    Attributes:
        cuda: the implementation where the call is lowered for CUDA.
        elsewhere: the implementation on any other platform.

    Example:
        >>> from blockdiag.common.dispatch import Choice
        >>> from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
        >>> choice = Choice(BLOCK_DIAGONAL.implementations["triton"], BLOCK_DIAGONAL.implementations["xla"])
        >>> choice.cuda.name
        'triton'
    """

    cuda: Implementation
    elsewhere: Implementation


def capabilities(problem: Problem) -> dict[str, str | None]:
    """Ask each implementation of an operation whether it can compute a call.

    Args:
        problem: the call.

    Returns:
        For each implementation name, None if it can compute the call in this process, otherwise the reason why not.

    Raises:
        AttributeError: `problem` does not describe a call.

    Example:
        >>> from blockdiag.common.dispatch import capabilities
        >>> from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
        >>> sizes = {"tokens": 128, "query_heads": 2, "key_heads": 2, "head_dim": 64, "sequence_length": 128}
        >>> options = {"dtype": "float64", "block_size": 64, "num_tiles": 2, "is_causal": False, "scale": 0.125}
        >>> problem = BlockDiagonalProblem(**sizes, **options)
        >>> reasons = capabilities(problem)
        >>> reasons["xla"] is None, "float64" in reasons["pallas"]
        (True, True)
    """
    return {name: implementation.decline(problem) for name, implementation in problem.operation.implementations.items()}


def normalise_implementation(
    implementation: str | Sequence[str] | None, operation: Operation
) -> tuple[str, ...] | None:
    """Return the argument `implementation` in hashable form.

    Raises:
        ValueError: a name is unknown, or the sequence is empty.
    """
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    unknown = [name for name in names if name not in operation.implementations]
    if unknown or not names:
        raise ValueError(
            f"`implementation` must be None, one of {list(operation.implementations)} or a sequence of those, "
            f"got {implementation!r}; leave it out to have one chosen by platform"
        )
    return names


def resolve(problem: Problem, names: tuple[str, ...] | None) -> Choice:
    """Choose the implementations that compute `problem`.

    Args:
        problem: the call.
        names: None for the default of each platform, or the names to try in order.

    Returns:
        The choice.

    Raises:
        NotImplementedError: none of `names` can compute `problem`; the message lists every reason.

    Example:
        >>> from blockdiag.common.dispatch import resolve
        >>> from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
        >>> sizes = {"tokens": 128, "query_heads": 2, "key_heads": 2, "head_dim": 64, "sequence_length": 128}
        >>> options = {"dtype": "float64", "block_size": 64, "num_tiles": 2, "is_causal": False, "scale": 0.125}
        >>> problem = BlockDiagonalProblem(**sizes, **options)
        >>> resolve(problem, ("triton", "reference")).cuda.name
        'reference'
    """
    implementations = problem.operation.implementations
    if problem.is_empty:
        # The reference needs no kernel, and its empty result is differentiable in either mode.
        return Choice(implementations["reference"], implementations["reference"])
    if names is None:
        xla = implementations["xla"]
        candidates = (implementations[name] for name in CUDA_DEFAULTS)
        return Choice(next((candidate for candidate in candidates if candidate.decline(problem) is None), xla), xla)
    reasons = []
    for name in names:
        reason = implementations[name].decline(problem)
        if reason is None:
            return Choice(implementations[name], implementations[name])
        reasons.append(f"{name!r}: {reason}")
    if len(reasons) == 1:
        raise NotImplementedError(f"implementation={names[0]!r} cannot compute this call: {reasons[0]}")
    raise NotImplementedError(
        f"None of implementation={names} can compute this call ({len(reasons)} declined):\n  "
        + "\n  ".join(reasons)
        + '\nAdd "xla", which computes every call, or leave `implementation` out.'
    )


def call_implementation(method: str, problem: Problem, names: tuple[str, ...] | None, *operands: Any) -> Any:
    """Compute a method of the canonical call, such as "forward", with the implementation that `resolve` chooses.

    Platforms are traced separately only if their implementations differ. Lowering decides which trace runs.
    """
    choice = resolve(problem, names)

    def compute(implementation: Implementation, **options: bool) -> Callable[..., Any]:
        return functools.partial(getattr(implementation.load(), method), problem, **options)

    if choice.cuda != choice.elsewhere:
        return jax.lax.platform_dependent(*operands, cuda=compute(choice.cuda), default=compute(choice.elsewhere))
    if choice.elsewhere.has_interpreter:
        return jax.lax.platform_dependent(
            *operands, cpu=compute(choice.elsewhere, interpret=True), default=compute(choice.elsewhere)
        )
    return compute(choice.elsewhere)(*operands)
