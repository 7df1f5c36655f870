"""Launch plans of block-diagonal attention: the kernel, grid and tile configuration of a problem on a target.

Three families of kernels compute the same results:

| family | method | used for |
|---|---|---|
| one-tile | holds a block's whole key tile | blocks of up to 64 rows |
| Hopper | the same, with tiles moved by TMA | the shapes for which this is faster |
| chunked | walks a block in chunks of rows | all other calls: larger blocks, wider heads, float32 |
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blockdiag.common.dtype_table import KERNEL_FLOATS
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.block_diagonal import configs
from blockdiag.triton_kernels.block_diagonal.arguments import (
    BackwardScalars,
    Chunk,
    ForwardScalars,
    GradientPointers,
    HopperTile,
    Rotary,
    Shape,
    Tables,
    Tile,
)
from blockdiag.triton_kernels.launch.compiler_versions import adjusted
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    Group,
    LaunchPlan,
    Pointer,
    Role,
    Scalar,
    Target,
    TensorSpec,
)

LOG2_E = 1.4426950408889634
_POSITIONS: Mapping[str, Literal[0, 1, 2]] = {"sequence": 0, "explicit": 1, "token": 2}

Pass = Literal["forward", "backward", "query_gradient", "key_gradient"]

# Operands that a pass reads as [tokens, heads, head_dim], and the arrays that it writes.
_OPERANDS: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("query", "key", "value"),
    "backward": ("query", "key", "value", "output_cotangent"),
    "query_gradient": ("query", "key", "value", "output_cotangent"),
    "key_gradient": ("query", "key", "value", "output_cotangent"),
}
_RESULTS: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("output",),
    "backward": ("d_query", "d_key", "d_value"),
    "query_gradient": ("d_query", "log_sum", "delta"),
    "key_gradient": ("d_key", "d_value"),
}
# Packed calls have fewer arrays: one array holds query, key and value, and another one their gradients.
_PACKED_OPERANDS: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("query",),
    "backward": ("query", "output_cotangent"),
    "query_gradient": ("query", "output_cotangent"),
    "key_gradient": ("query", "output_cotangent"),
}
_PACKED_RESULTS: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("output",),
    "backward": ("d_query",),
    "query_gradient": ("d_query", "log_sum", "delta"),
    "key_gradient": ("d_key",),
}
_QUERY_SHAPED = {"output", "output_cotangent"}
_KEY_SHAPED = {"key", "value", "d_key", "d_value"}
_STATISTICS = ("log_sum", "delta")


def takes_operands(dtype: str, head_dim: int) -> str | None:
    """Return None if the kernels support a dtype and head dimension; otherwise the reason and the remedy."""
    if dtype not in KERNEL_FLOATS:
        return f"the Triton kernels take bfloat16, float16 and float32, got {dtype}; use implementation='xla'"
    if head_dim % 8 or not 8 <= head_dim <= 256:
        return (
            f"the Triton kernels take head dimensions that are multiples of 8 from 8 to 256, got {head_dim}; "
            "pad the heads or use implementation='xla'"
        )
    return None


def supports(problem: BlockDiagonalProblem) -> str | None:
    """Return None if the kernels can compute `problem`; otherwise a sentence with the reason and the remedy."""
    reason = takes_operands(problem.dtype, problem.head_dim)
    if reason is not None:
        return reason
    if problem.rotary is not None and problem.rotary.table_dtype not in KERNEL_FLOATS:
        return (
            "the Triton kernels take rotary tables of bfloat16, float16 or float32, got "
            f"{problem.rotary.table_dtype}; cast the tables"
        )
    if problem.num_tiles * problem.query_heads * -(-problem.block_size // 16) >= 2**31:
        return (
            f"the call has {problem.num_tiles} tiles of {problem.query_heads} heads, more than 2^31 programs; "
            "split the batch"
        )
    return None


@dataclass(frozen=True, slots=True)
class BlockDiagonalLaunch:
    """One kernel launch of block-diagonal attention; a KernelSpec.

    Attributes:
        problem: the call.
        kind: "forward"; "backward", in one kernel; or one of the two kernels of the chunked backward pass.
        is_portable: whether to use only kernels that Triton's interpreter supports, on every target.
    """

    problem: BlockDiagonalProblem
    kind: Pass
    is_portable: bool = False

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return f"block_diagonal_{self.kind}"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that the launch reads, those that are present, in this order.

        1. the operands,
        2. for the key gradient the row statistics and, in packed calls, the gradients so far,
        3. the tile table, cos, sin and positions.
        """
        return tuple(spec for _, spec in self._input_specs())

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that the launch writes. All elements are written, in packed calls by both gradients together."""
        return tuple(self._array_spec(name) for name in self._results)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        # `backward_kinds` has fixed the number of backward launches, perhaps for another target than this one.
        is_single = self.kind == "backward"
        if not is_single and (self.kind != "forward" or configs.is_chunked(self.problem, target.arch)):
            return self._chunked_plan(target)
        if not self.is_portable and configs.is_hopper(self.problem, is_single, target.arch):
            return self._hopper_plan()
        return self._tile_plan(target)

    @property
    def _operands(self) -> tuple[str, ...]:
        return (_PACKED_OPERANDS if self.problem.is_packed else _OPERANDS)[self.kind]

    @property
    def _results(self) -> tuple[str, ...]:
        return (_PACKED_RESULTS if self.problem.is_packed else _RESULTS)[self.kind]

    @property
    def _continues_gradients(self) -> bool:
        """Whether the launch completes a packed array of which another launch has written a part."""
        return self.problem.is_packed and self.kind == "key_gradient"

    def _input_specs(self) -> Iterator[tuple[str, TensorSpec]]:
        problem = self.problem
        for name in self._operands:
            yield name, self._array_spec(name)
        if self.kind == "key_gradient":
            for name in _STATISTICS:
                yield f"p_{name}", self._array_spec(name)
        if self._continues_gradients:
            yield "d_key", self._array_spec("d_key")
        if not problem.is_uniform:
            yield "p_tiles", TensorSpec((problem.num_tiles, 3), "int32")
        if problem.rotary is not None:
            table = TensorSpec((problem.rotary.table_rows, problem.head_dim // 2), problem.rotary.table_dtype)
            yield "p_cos", table
            yield "p_sin", table
            if problem.rotary.positions == "explicit":
                yield "p_positions", TensorSpec((problem.tokens,), "int32")

    def _array_spec(self, name: str) -> TensorSpec:
        problem = self.problem
        if name in _STATISTICS:
            return TensorSpec((problem.tokens, problem.query_heads), "float32")
        if name in _QUERY_SHAPED:
            heads = problem.query_heads
        elif problem.is_packed:
            heads = problem.packed_heads
        else:
            heads = problem.key_heads if name in _KEY_SHAPED else problem.query_heads
        return TensorSpec((problem.tokens, heads, problem.head_dim), problem.dtype)

    def _input_pointers(self) -> dict[str, Argument | Group]:
        """Return the inputs: pointers to the arrays that are present, None for the others, and the group of tables."""
        found: dict[str, Argument] = {
            name: Pointer("input", index) for index, (name, _) in enumerate(self._input_specs())
        }
        tables = Tables._make(found.pop(f"p_{name}", Constexpr(None)) for name in Tables._fields)
        return {"key": Constexpr(None), "value": Constexpr(None), **found, "tables": tables}

    def _output_pointers(self) -> dict[str, Argument]:
        absent = [name for name in _RESULTS[self.kind] if name not in self._results]
        arguments: dict[str, Argument] = {name: Constexpr(None) for name in absent}
        for index, name in enumerate(self._results):
            arguments[f"p_{name}" if name in _STATISTICS else name] = Pointer("output", index)
        return arguments

    def _descriptors(
        self, names: tuple[str, ...], role: Role, rows: int, columns: int, layout: Any
    ) -> dict[str, Argument]:
        """Return descriptors over operands viewed as [tokens, heads * head_dim]."""
        tokens, head_dim = self.problem.tokens, self.problem.head_dim
        heads = {name: self._array_spec(name).shape[1] for name in names}
        return {
            name: Descriptor(role, index, (tokens, heads[name] * head_dim), (rows, columns), layout)
            for index, name in enumerate(names)
        }

    def _scalars(self) -> dict[str, Argument | Group]:
        """Return the run-time scalars. None is compiled in, so different lengths and scales share a kernel."""
        problem = self.problem
        units = problem.num_tiles * (problem.query_heads if self.kind == "forward" else problem.key_heads)
        shared = {
            "sequence_length": Scalar(problem.sequence_length or 0, "i32"),
            "scale_log2": Scalar(problem.scale * LOG2_E, "fp32"),
            "table_rows": Scalar(problem.rotary.table_rows if problem.rotary else 0, "i32"),
        }
        return {
            "num_items": Scalar(units, "i32"),
            "num_units": Scalar(problem.num_tiles * problem.key_heads, "i32"),
            "scalars": ForwardScalars(**shared)
            if self.kind == "forward"
            else BackwardScalars(**shared, scale=Scalar(problem.scale, "fp32")),
        }

    def _constants(self) -> dict[str, Argument | Group]:
        """Return the compile-time values that all families share."""
        problem, rotary = self.problem, self.problem.rotary
        is_packed = problem.is_packed
        shape = Shape(
            query_heads=problem.query_heads,
            key_heads=problem.key_heads,
            group_size=problem.group_size,
            head_dim=problem.head_dim,
            is_packed=is_packed,
            query_row=problem.packed_heads if is_packed else problem.query_heads,
            key_row=problem.packed_heads if is_packed else problem.key_heads,
            first_key=problem.query_heads if is_packed else 0,
            first_value=problem.query_heads + problem.key_heads if is_packed else 0,
            has_tiles=not problem.is_uniform,
            is_causal=problem.is_causal,
        )
        rotation = Rotary(
            rotates_query=rotary is not None and rotary.query,
            rotates_key=rotary is not None and rotary.key,
            rotates_value=rotary is not None and rotary.value,
            is_interleaved=rotary is not None and rotary.interleaved,
            positions=_POSITIONS[rotary.positions] if rotary else 0,
        )
        return {"SHAPE": Constexpr(shape), "ROTARY": Constexpr(rotation)}

    @property
    def _precision(self) -> Literal["ieee", "tf32"]:
        # Full float32 products: tf32 would keep ten bits of mantissa.
        return "ieee" if self.problem.dtype == "float32" else "tf32"

    def _launch(
        self, kernel: Any, programs: int, arguments: Mapping[str, Argument | Group], options: CompileOptions
    ) -> LaunchPlan:
        return LaunchPlan(
            name=self.name,
            kernel=kernel,
            grid=(max(programs, 1), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={name: arguments[name] for name in kernel.arg_names},
            options=options,
            aliases=((len(self._operands) + len(_STATISTICS), 0),) if self._continues_gradients else (),
            flops=self._flops(),
        )

    def _flops(self) -> float:
        """Return the floating-point operations of the matrix products: two products forward, five backward."""
        problem = self.problem
        products = {"forward": 2, "backward": 5, "query_gradient": 3, "key_gradient": 4}[self.kind]
        seen = problem.block_size * (0.5 if problem.is_causal else 1.0)
        return 2.0 * products * problem.tokens * problem.query_heads * problem.head_dim * seen

    def _tile_plan(self, target: Target) -> LaunchPlan:
        from blockdiag.triton_kernels.block_diagonal.backward import block_diagonal_backward
        from blockdiag.triton_kernels.block_diagonal.forward import block_diagonal_forward

        problem = self.problem
        if self.is_portable:
            config = configs.portable_tile_config()
        else:
            config = configs.tile_config(problem, self.kind == "backward", target.arch)
        rows, columns = configs.tile_rows(problem), configs.tile_columns(problem)
        rotary = problem.rotary
        is_full = problem.is_full and problem.block_size == rows
        is_paired = rotary is not None and (rotary.query or rotary.key)
        is_value_paired = rotary is not None and rotary.value
        arguments = self._input_pointers() | self._output_pointers() | self._scalars() | self._constants()
        if config.descriptors:
            arguments |= self._tile_descriptors("input", self._operands, rows, columns)
            if is_full:
                arguments |= self._tile_descriptors("output", self._results, rows, columns)
        tile = Tile(
            block_size=problem.block_size,
            rows=rows,
            columns=columns,
            is_full=is_full,
            is_paired=is_paired,
            is_value_paired=is_value_paired,
            precision=self._precision,
            has_descriptors=config.descriptors,
            warp_specialize=config.warp_specialize,
            loop_stages=config.loop_stages,
        )
        arguments["TILE"] = Constexpr(tile)
        items = problem.num_tiles * (problem.query_heads if self.kind == "forward" else problem.key_heads)
        programs = min(items, config.programs_per_sm * target.num_sms) if config.programs_per_sm else items
        kernel = block_diagonal_forward if self.kind == "forward" else block_diagonal_backward
        options = CompileOptions(num_warps=config.num_warps, num_stages=config.num_stages)
        return self._launch(kernel, programs, arguments, options)

    def _tile_descriptors(self, role: Role, names: tuple[str, ...], rows: int, columns: int) -> dict[str, Argument]:
        """Return descriptors for the one-tile kernels, which load half-split pairs one half at a time."""
        rotary = self.problem.rotary
        arguments: dict[str, Argument] = {}
        described = self._descriptors(names, role, rows, columns, None)
        halved = self._descriptors(names, role, rows, columns // 2, None)
        for name in names:
            is_value = name in ("value", "output", "output_cotangent", "d_value")
            is_paired = rotary is not None and (rotary.value if is_value else rotary.query or rotary.key)
            is_halved = is_paired and rotary is not None and not rotary.interleaved
            arguments[name] = halved[name] if is_halved else described[name]
        return arguments

    def _hopper_plan(self) -> LaunchPlan:
        from triton.experimental.gluon import language as gl

        from blockdiag.triton_kernels.block_diagonal import hopper_backward as backward
        from blockdiag.triton_kernels.block_diagonal.hopper_forward import block_diagonal_hopper_forward

        problem = self.problem
        config = configs.hopper_config(problem, self.kind == "backward")
        rows = configs.HOPPER_ROWS
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        arguments = self._input_pointers() | self._scalars() | self._constants()
        arguments |= self._output_memory()
        arguments |= self._descriptors(self._operands, "input", rows, problem.head_dim, layout)
        absent = {name: Constexpr(None) for name in _RESULTS[self.kind]}
        arguments |= absent | self._descriptors(self._results, "output", rows, problem.head_dim, layout)
        arguments["TILE"] = Constexpr(HopperTile(rows=rows, is_full=problem.is_full, heads=config.heads))
        if self.kind == "forward":
            kernel, heads = block_diagonal_hopper_forward, problem.query_heads
        elif problem.group_size == 1:
            kernel, heads = backward.block_diagonal_hopper_backward, problem.key_heads
        else:
            kernel, heads = backward.block_diagonal_hopper_grouped_backward, problem.key_heads
        options = CompileOptions(num_warps=4, maxnreg=config.maxnreg)
        return self._launch(kernel, problem.num_tiles * (heads // config.heads), arguments, options)

    def _output_memory(self) -> dict[str, Argument | Group]:
        """Return pointers to the results of the Hopper kernels: `p_output`, or the group `pointers` of gradients."""
        # TMA alone stores full tiles, so no pointers are needed.
        found = {} if self.problem.is_full else self._output_pointers()
        if self.kind == "forward":
            return {"p_output": found.get("output", Constexpr(None))}
        return {
            "pointers": GradientPointers._make(found.get(name, Constexpr(None)) for name in GradientPointers._fields)
        }

    def _chunked_plan(self, target: Target) -> LaunchPlan:
        from blockdiag.triton_kernels.block_diagonal import chunked as kernels

        problem = self.problem
        config = configs.chunk_config(problem, self.kind != "forward", target.arch)
        config = adjusted(config, configs.ADJUSTMENTS, problem, self.kind, target.arch)
        arguments = self._input_pointers() | self._output_pointers() | self._scalars() | self._constants()
        chunks = configs.most_chunks(problem, config)
        rotary = problem.rotary
        chunk = Chunk(
            block_size=problem.block_size,
            rows=config.rows,
            chunks=chunks,
            columns=configs.tile_columns(problem),
            is_paired=rotary is not None and (rotary.query or rotary.key),
            is_value_paired=rotary is not None and rotary.value,
            precision=self._precision,
        )
        arguments["TILE"] = Constexpr(chunk)
        heads = problem.key_heads if self.kind == "key_gradient" else problem.query_heads
        kernel = {
            "forward": kernels.block_diagonal_chunked_forward,
            "query_gradient": kernels.block_diagonal_chunked_query_gradient,
            "key_gradient": kernels.block_diagonal_chunked_key_gradient,
        }[self.kind]
        options = CompileOptions(num_warps=config.num_warps, num_stages=config.num_stages)
        return self._launch(kernel, problem.num_tiles * chunks * heads, arguments, options)


def backward_kinds(problem: BlockDiagonalProblem, target: Target) -> tuple[Pass, ...]:
    """Return the launches of the backward pass on `target`, in order."""
    is_chunked = configs.is_chunked(problem, target.arch)
    return ("query_gradient", "key_gradient") if is_chunked else ("backward",)
