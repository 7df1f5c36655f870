"""Which implementation computes a call.

Each operation has its own table of implementations, found by the type of the problem that describes a call. An
implementation is a module: `available()` and `supports(problem)` return None or the reason why not, and `forward`,
`backward` and what else the operation is made of compute the canonical call. A module of block-diagonal attention may
say `TAKES_PACKED`: it takes a packed problem as it is (query is then the one array, key and value None, and the
gradients likewise); for others it is taken apart. Modules are imported when first asked, never before.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.common.sizes import symbolic_field
from blockdiag.fusion.ir.tree import Region
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged.problem import PagedProblem

type Problem = (
    BlockDiagonalProblem
    | MoBAProblem
    | KeyConvolutionProblem
    | PagedProblem
    | AppendProblem
    | MoBAPagedProblem
    | Region
)


@dataclass(frozen=True, slots=True)
class Implementation:
    """Something that computes an operation.

    Attributes:
        name: what `implementation=` calls it.
        module: import path of the module with its functions.
        has_interpreter: whether it runs on a CPU only through an interpreter of its kernels, when asked for by name.

    Example:
        >>> from blockdiag.common.dispatch import IMPLEMENTATIONS
        >>> list(IMPLEMENTATIONS), IMPLEMENTATIONS["xla"].why_unavailable()
        (['reference', 'xla', 'triton', 'pallas'], None)
    """

    name: str
    module: str
    has_interpreter: bool = False

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(self.module)

    def why_unavailable(self) -> str | None:
        """None where this implementation can run in this process at all; otherwise the reason and the remedy."""
        return self.load().available()

    def decline(self, problem: Problem) -> str | None:
        """Why this implementation cannot compute a call.

        Args:
            problem: the call.

        Returns:
            None where it can; otherwise a sentence with the reason and the remedy.
        """
        reason = self.why_unavailable()
        is_launch = self.has_interpreter and not isinstance(problem, Region)
        if reason is None and is_launch and (size := symbolic_field(problem)):
            # A kernel's launch is laid out while tracing.
            return (
                f"kernels are launched for sizes that are numbers, got {size}; export for each size, or with "
                'implementation="xla"'
            )
        return reason or self.load().supports(problem)


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("reference", "blockdiag.ops.block_diagonal.reference"),
        Implementation("xla", "blockdiag.ops.block_diagonal.xla"),
        Implementation("triton", "blockdiag.ops.block_diagonal.triton", has_interpreter=True),
        Implementation("pallas", "blockdiag.ops.block_diagonal.pallas", has_interpreter=True),
    )
}

MOBA_IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("reference", "blockdiag.ops.moba.reference"),
        Implementation("xla", "blockdiag.ops.moba.xla"),
        Implementation("triton", "blockdiag.ops.moba.triton", has_interpreter=True),
    )
}

KEY_CONVOLUTION_IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("reference", "blockdiag.ops.key_convolution.reference"),
        Implementation("xla", "blockdiag.ops.key_convolution.xla"),
        Implementation("triton", "blockdiag.ops.key_convolution.triton", has_interpreter=True),
    )
}

PAGED_IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("reference", "blockdiag.ops.paged.reference"),
        Implementation("xla", "blockdiag.ops.paged.xla"),
        Implementation("triton", "blockdiag.ops.paged.triton", has_interpreter=True),
    )
}

APPEND_IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("reference", "blockdiag.ops.append.reference"),
        Implementation("xla", "blockdiag.ops.append.xla"),
        Implementation("triton", "blockdiag.ops.append.triton", has_interpreter=True),
    )
}

MOBA_PAGED_IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("reference", "blockdiag.ops.moba_paged.reference"),
        Implementation("xla", "blockdiag.ops.moba_paged.xla"),
        Implementation("triton", "blockdiag.ops.moba_paged.triton", has_interpreter=True),
    )
}

FUSED_IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("xla", "blockdiag.fusion.runtime.xla"),
        Implementation("triton", "blockdiag.fusion.runtime.triton", has_interpreter=True),
    )
}

# The implementations of each operation, by the type of its problems.
OPERATIONS: dict[type, dict[str, Implementation]] = {
    BlockDiagonalProblem: IMPLEMENTATIONS,
    MoBAProblem: MOBA_IMPLEMENTATIONS,
    KeyConvolutionProblem: KEY_CONVOLUTION_IMPLEMENTATIONS,
    PagedProblem: PAGED_IMPLEMENTATIONS,
    AppendProblem: APPEND_IMPLEMENTATIONS,
    MoBAPagedProblem: MOBA_PAGED_IMPLEMENTATIONS,
    Region: FUSED_IMPLEMENTATIONS,
}

# The public function of each operation, by the type of its problems.
OPERATION_NAMES: dict[type, str] = {
    BlockDiagonalProblem: "block_diagonal_attention",
    MoBAProblem: "moba_attention",
    KeyConvolutionProblem: "key_convolution",
    PagedProblem: "paged_attention",
    AppendProblem: "append_to_pages",
    MoBAPagedProblem: "moba_paged_attention",
    Region: "fuse",
}

# What `implementation=None` tries on CUDA, first to last, before "xla". Pallas joins where it is measured faster.
CUDA_DEFAULTS = ("triton",)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes a call.

    Attributes:
        cuda: where it is lowered for CUDA.
        elsewhere: on any other platform.

    Example:
        >>> from blockdiag.common.dispatch import IMPLEMENTATIONS, Choice
        >>> choice = Choice(cuda=IMPLEMENTATIONS["triton"], elsewhere=IMPLEMENTATIONS["xla"])
        >>> choice.cuda.name
        'triton'
    """

    cuda: Implementation
    elsewhere: Implementation


def capabilities(problem: Problem) -> dict[str, str | None]:
    """What each implementation of an operation says to a call.

    Args:
        problem: the call.

    Returns:
        By name None where the implementation can compute the call in this process, otherwise the reason.

    Raises:
        KeyError: `problem` is of no operation.

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
    return {name: implementation.decline(problem) for name, implementation in OPERATIONS[type(problem)].items()}


def normalise_implementation(
    implementation: str | Sequence[str] | None, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> tuple[str, ...] | None:
    """The hashable form of an `implementation=` argument, of an operation with the given table of implementations.

    Raises:
        ValueError: a name is unknown, or the sequence is empty.
    """
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    unknown = [name for name in names if name not in implementations]
    if unknown or not names:
        raise ValueError(
            f"`implementation` must be None, one of {list(implementations)} or a sequence of those, "
            f"got {implementation!r}; leave it out to have one chosen by platform"
        )
    return names


def resolve(problem: Problem, names: tuple[str, ...] | None) -> Choice:
    """Choose who computes `problem`.

    Args:
        problem: the call.
        names: None for the default of each platform, or the names to try, first to last.

    Returns:
        The choice.

    Raises:
        NotImplementedError: none of `names` can compute `problem`; the message holds every reason.

    Example:
        >>> from blockdiag.common.dispatch import resolve
        >>> from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
        >>> sizes = {"tokens": 128, "query_heads": 2, "key_heads": 2, "head_dim": 64, "sequence_length": 128}
        >>> options = {"dtype": "float64", "block_size": 64, "num_tiles": 2, "is_causal": False, "scale": 0.125}
        >>> problem = BlockDiagonalProblem(**sizes, **options)
        >>> resolve(problem, ("triton", "reference")).cuda.name
        'reference'
    """
    implementations = OPERATIONS[type(problem)]
    if _is_empty(problem):
        # Nothing to compute: no kernel is asked, and the empty result is differentiable in every way.
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


def _is_empty(problem: Problem) -> bool:
    """Whether a call has no tokens to compute anything from."""
    if isinstance(problem, MoBAProblem):
        return problem.query_tokens == 0 or problem.num_blocks == 0
    if isinstance(problem, PagedProblem):
        return 0 in (problem.batch, problem.query_tokens, problem.num_pages, problem.max_keys)
    if isinstance(problem, MoBAPagedProblem):
        return _is_empty(problem.paged)
    if isinstance(problem, AppendProblem):
        return 0 in (problem.batch, problem.tokens, problem.num_pages, problem.max_keys)
    # A fused region without elements is computed like any other.
    return isinstance(problem, BlockDiagonalProblem | KeyConvolutionProblem) and problem.tokens == 0


def call_implementation(method: str, problem: Problem, names: tuple[str, ...] | None, *operands: Any) -> Any:
    """Compute `method`, a function such as "forward", of the canonical call by whom `resolve` chooses.

    Only platforms that could differ are traced separately; which one runs is decided when the program is lowered.
    """
    choice = resolve(problem, names)

    def compute(implementation: Implementation, **options: bool) -> Callable[..., Any]:
        module = implementation.load()
        function = functools.partial(getattr(module, method), **options)
        takes_packed = getattr(module, "TAKES_PACKED", False)
        if isinstance(problem, BlockDiagonalProblem) and problem.is_packed and not takes_packed:
            return functools.partial(_compute_unpacked, method, function, problem)
        return functools.partial(function, problem)

    if choice.cuda != choice.elsewhere:
        return jax.lax.platform_dependent(*operands, cuda=compute(choice.cuda), default=compute(choice.elsewhere))
    if choice.elsewhere.has_interpreter:
        return jax.lax.platform_dependent(
            *operands, cpu=compute(choice.elsewhere, interpret=True), default=compute(choice.elsewhere)
        )
    return compute(choice.elsewhere)(*operands)


def _compute_unpacked(
    method: str, function: Callable[..., Any], problem: BlockDiagonalProblem, packed: Any, _key: None, _value: None,
    *operands: Any,
) -> Any:  # fmt: skip
    """A packed problem by an implementation that takes query, key and value apart."""
    heads = (problem.query_heads, problem.query_heads + problem.key_heads)
    results = function(dataclasses.replace(problem, is_packed=False), *jnp.split(packed, heads, axis=1), *operands)
    return (jnp.concatenate(results, axis=1), None, None) if method == "backward" else results
