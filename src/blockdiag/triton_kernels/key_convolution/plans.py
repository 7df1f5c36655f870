"""Launch plans of key convolution."""

from dataclasses import dataclass
from typing import Any, Literal

from blockdiag.common.dtype_table import KERNEL_FLOATS
from blockdiag.ops.key_convolution.problem import MAX_SIZE, KeyConvolutionProblem
from blockdiag.triton_kernels.key_convolution.arguments import (
    BackwardArrays,
    BackwardScalars,
    ForwardArrays,
    ForwardScalars,
    Shape,
    Tile,
)
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
    array_group,
)

Pass = Literal["forward", "backward", "weights_gradient"]

_RUN = 16
"""Length in tokens of the run that one thread computes."""

_SUM_ROWS = 32
_SUM_COLUMNS = 32


def takes_key(dtype: str) -> str | None:
    """Return None if the kernels support keys of a dtype; otherwise the reason and the remedy."""
    if dtype not in KERNEL_FLOATS:
        return f"the Triton kernels take bfloat16, float16 and float32, got {dtype}; use implementation='xla'"
    return None


def supports(problem: KeyConvolutionProblem) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy."""
    reason = takes_key(problem.dtype)
    if reason is not None:
        return reason
    if not 1 <= problem.size <= MAX_SIZE:
        return f"the Triton kernels take 1 to {MAX_SIZE} taps, got {problem.size}; use implementation='xla'"
    programs = problem.num_tiles * -(-problem.channels // 8)
    if max(programs, problem.tokens + problem.tile_rows, problem.channels * 2 * problem.tile_rows) >= 2**31:
        return (
            f"the call has {problem.tokens} tokens of {problem.channels} channels in {problem.num_tiles} tiles, more "
            "than fit 32-bit numbers; split the batch"
        )
    return None


@dataclass(frozen=True, slots=True)
class KeyConvolutionLaunch:
    """One kernel launch of key convolution; a KernelSpec.

    Attributes:
        problem: the call.
        kind: "forward"; "backward", which computes the key's gradient and partial gradients of the weights; or
            "weights_gradient", which sums the partial gradients.
    """

    problem: KeyConvolutionProblem
    kind: Pass

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return f"key_convolution_{self.kind}"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that the launch reads.

        These are the key, the weights, the output's cotangent (backward only) and the tile table (packed calls only).
        The weights' gradient reads only the partial gradients.
        """
        if self.kind == "weights_gradient":
            return (self._partials,)
        cotangents = (self._key,) if self.kind == "backward" else ()
        tables = () if self.problem.is_uniform else (TensorSpec((self.problem.num_tiles, 3), "int32"),)
        return (self._key, self._weights, *cotangents, *tables)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that the launch writes completely."""
        if self.kind == "weights_gradient":
            return (self._weights,)
        return (self._key,) if self.kind == "forward" else (self._key, self._partials)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan, which is the same for every target."""
        del target
        return self._sum_plan() if self.kind == "weights_gradient" else self._tile_plan()

    @property
    def _key(self) -> TensorSpec:
        problem = self.problem
        return TensorSpec((problem.tokens, problem.key_heads, problem.head_dim), problem.dtype)

    @property
    def _weights(self) -> TensorSpec:
        problem = self.problem
        return TensorSpec((problem.groups, problem.size, problem.key_heads, problem.head_dim), problem.weights_dtype)

    @property
    def _partials(self) -> TensorSpec:
        problem = self.problem
        return TensorSpec((problem.num_tiles, problem.size, problem.key_heads, problem.head_dim), "float32")

    def _tile_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.key_convolution.kernels import key_convolution_backward, key_convolution_forward

        problem = self.problem
        is_backward = self.kind == "backward"
        width, num_warps = _program_shape(problem, is_backward)
        cotangents = ("output_cotangent",) if is_backward else ()
        tables = () if problem.is_uniform else ("tiles",)
        scalars = {
            "sequence_length": Scalar(problem.sequence_length or 0, "i32"),
            "num_tiles": Scalar(problem.num_tiles, "i32"),
            "tiles_per_group": Scalar(max(problem.num_tiles // problem.groups, 1), "i32"),
        }
        scalar_kind: Any = BackwardScalars if is_backward else ForwardScalars
        shape = Shape(
            channels=problem.channels,
            size=problem.size,
            has_tiles=not problem.is_uniform,
            has_silu=problem.activation == "silu",
            has_residual=problem.has_residual,
        )
        return LaunchPlan(
            name=self.name,
            kernel=key_convolution_backward if is_backward else key_convolution_forward,
            grid=(max(problem.num_tiles * -(-problem.channels // width), 1), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(
                    BackwardArrays if is_backward else ForwardArrays,
                    ("key", "weights", *cotangents, *tables),
                    ("d_key", "partials") if is_backward else ("output",),
                ),
                "scalars": scalar_kind._make(scalars[name] for name in scalar_kind._fields),
                "SHAPE": Constexpr(shape),
                "TILE": Constexpr(Tile(rows=problem.tile_rows, run=_RUN, width=width)),
            },
            options=CompileOptions(num_warps=num_warps),
        )

    def _sum_plan(self) -> LaunchPlan:
        from blockdiag.triton_kernels.key_convolution.kernels import key_convolution_weights_gradient

        problem = self.problem
        elements = problem.size * problem.channels
        return LaunchPlan(
            name=self.name,
            kernel=key_convolution_weights_gradient,
            grid=(problem.groups * -(-elements // _SUM_COLUMNS), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_partials": Pointer("input", 0),
                "d_weights": Pointer("output", 0),
                "tiles_per_group": Scalar(problem.num_tiles // problem.groups, "i32"),
                "ELEMENTS": Constexpr(elements),
                "ROWS": Constexpr(_SUM_ROWS),
                "COLUMNS": Constexpr(_SUM_COLUMNS),
            },
            options=CompileOptions(num_warps=4),
        )


def _program_shape(problem: KeyConvolutionProblem, is_backward: bool) -> tuple[int, int]:
    """Return the channels and warps of a program.

    A thread computes a whole run in 4 neighbouring channels, or in 2 in the backward pass, which holds keys, cotangents
    and sums. More channels would take the registers that other programs on the multiprocessor need.
    """
    per_thread = 2 if is_backward else 4
    runs = problem.tile_rows // _RUN
    width = min(max(1 << (problem.channels - 1).bit_length(), 8), 128 * per_thread // runs)
    return width, max(runs * width // (32 * per_thread), 1)
