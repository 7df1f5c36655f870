"""Launch plans from JAX: a primitive whose CUDA lowering emits jaxlib's Triton kernel call.

Before lowering, nothing is compiled, no device is queried and Triton is not imported. So functions that launch kernels
trace anywhere, and inside `compile_target` they lower for CUDA on a machine without a GPU. Independent launches are
grouped in one call of a second primitive, whose lowering compiles their kernels in parallel.
"""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.extend.core
import numpy as np
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from blockdiag.interop import jaxlib_launcher
from blockdiag.interop.targets import compile_target as compile_target
from blockdiag.interop.targets import overriding_target, session_target
from blockdiag.triton_kernels.launch.plan import KernelSpec, LaunchPlan, Target, TensorSpec

EXPORT_DISABLED_CHECKS = (jax.export.DisabledSafetyCheck.custom_call(jaxlib_launcher.CALL_TARGET),)
"""The value of `disabled_checks=` that `jax.export.export` needs for functions with a Triton kernel.

JAX gives no compatibility guarantee for this custom call: load an exported function with the jaxlib version that
exported it.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from blockdiag import block_diagonal_attention
    >>> from blockdiag.interop import EXPORT_DISABLED_CHECKS, compile_target
    >>> x = jax.ShapeDtypeStruct((64, 2, 16), jnp.bfloat16)
    >>> export = jax.export.export(
    ...     jax.jit(block_diagonal_attention), platforms=["cuda"], disabled_checks=EXPORT_DISABLED_CHECKS
    ... )
    >>> with compile_target(90):
    ...     exported = export(x, x, x)
    >>> exported.platforms
    ('cuda',)
"""


def available() -> str | None:
    """Return None if this process can in principle compile and launch kernels, otherwise the reason and the remedy.

    It neither imports triton nor queries a device, so a machine without a GPU may well get None.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'blockdiag-attn[cuda]' (Linux only)"
    return jaxlib_launcher.availability()


def launch(spec: KernelSpec, *arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Launch the kernel of `spec` on `arrays` and return its outputs.

    Args:
        spec: a hashable KernelSpec; equal specs share traces and compiled programs.
        *arrays: one array for each of `spec.inputs`, with exactly its shape and dtype.
        interpret: run in Triton's interpreter on the host, on any platform: slow, for tests. Otherwise the call
            lowers for CUDA only.

    Returns:
        One array for each of `spec.outputs`. Under `jax.shard_map` they vary over every mesh axis that an input varies
        over.

    Raises:
        ValueError: when the arrays do not match `spec.inputs`.
        NotImplementedError: under jvp and vmap (wrap the call in custom_vjp and custom_vmap), and when lowered for a
            platform other than CUDA without `interpret`.
    """
    _check_arrays(spec, arrays)
    outputs = launch_p.bind(*_vary_alike(arrays), spec=spec, target=overriding_target(), interpret=interpret)
    return tuple(outputs)


type _Where = Callable[[Target], bool] | None
type _Members = dict[KernelSpec, set[_Where]]


def launch_together(
    launches: Sequence[tuple[KernelSpec, Sequence[jax.Array]]],
    *,
    interpret: bool = False,
    group: Hashable = None,
    where: _Where = None,
) -> list[tuple[jax.Array, ...]]:
    """Launch several independent kernels, which are compiled in parallel. None may read the output of another.

    A launch whose outputs are all unused is neither compiled nor executed. Outside of `jax.jit` JAX runs the launches
    one by one, so they are compiled one after the other.

    Args:
        launches: a spec and its arrays for each kernel, see `launch`.
        interpret: see `launch`.
        group: key that these launches share with related ones that may run after them, such as those of a derivative.
            When a launch of the group is lowered, compilation starts for all launches of the group traced so far.
        where: predicate of the target that says where these launches are lowered at all; hashable. None: everywhere.

    Returns:
        The outputs of each launch, see `launch`.

    Raises:
        ValueError, NotImplementedError: as `launch`.
    """
    if group is not None and not interpret:
        members = _members(group)
        for spec, _ in launches:
            members.setdefault(spec, set()).add(where)
            _group_of(spec)[:] = [members]
    if len(launches) < 2:
        return [launch(spec, *arrays, interpret=interpret) for spec, arrays in launches]
    counts = [len(arrays) for _, arrays in launches]

    def call(*arrays: jax.Array) -> list[tuple[jax.Array, ...]]:
        rest = iter(arrays)
        return [
            launch(spec, *itertools.islice(rest, count), interpret=interpret)
            for (spec, _), count in zip(launches, counts, strict=True)
        ]

    given = [array for _, arrays in launches for array in arrays]
    outputs = iter(together_p.bind(*given, call_jaxpr=jax.make_jaxpr(call)(*given)))
    return [tuple(itertools.islice(outputs, len(spec.outputs))) for spec, _ in launches]


# An evicted group costs only time: its launches are compiled when they are lowered, like all others.
@functools.lru_cache(maxsize=256)
def _members(group: Hashable) -> _Members:
    """Return the dict of a group's traced launches and the targets they are lowered for. Tracing fills it in place."""
    del group
    return {}


@functools.lru_cache(maxsize=1024)
def _group_of(spec: KernelSpec) -> list[_Members]:
    """Return a list with the members of the group that last traced a launch; empty if it was in no group.

    Each new trace has its own group. So lowering a program without a derivative never compiles the launches of another
    program's derivative.
    """
    del spec
    return []


def _check_arrays(spec: KernelSpec, arrays: Sequence[jax.Array]) -> None:
    if len(arrays) != len(spec.inputs):
        raise ValueError(f"kernel {spec.name!r} takes {len(spec.inputs)} arrays, got {len(arrays)}")
    for position, (array, expected) in enumerate(zip(arrays, spec.inputs, strict=True)):
        if tuple(array.shape) != expected.shape or np.dtype(array.dtype).name != expected.dtype:
            raise ValueError(
                f"kernel {spec.name!r}: array {position} must be {expected.dtype}{list(expected.shape)}, "
                f"got {np.dtype(array.dtype).name}{list(array.shape)}"
            )


def _vary_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Mark every array as varying over the union of the manual mesh axes that the arrays vary over.

    One kernel reads them all, so their varying axes must agree.
    """
    varying = [_varying_axes(array) for array in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(sorted(union - axes, key=str)), to="varying") if union - axes else array
        for array, axes in zip(arrays, varying, strict=True)
    ]


def _varying_axes(array: jax.Array) -> frozenset[Any]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


launch_p = jax.extend.core.Primitive("blockdiag_triton_launch")
launch_p.multiple_results = True
launch_p.def_impl(functools.partial(xla.apply_primitive, launch_p))


@launch_p.def_abstract_eval
def _abstract_eval(*avals: Any, spec: KernelSpec, target: Target | None, interpret: bool) -> list[Any]:
    del target, interpret
    return [_output_aval(avals, output) for output in spec.outputs]


def _output_aval(avals: Sequence[Any], output: TensorSpec) -> Any:
    dtype = jax.numpy.dtype(output.dtype)
    if not avals:
        return jax.core.ShapedArray(output.shape, dtype)
    # An input's aval carries the mesh and the manual axes it varies over (all inputs vary alike, see _vary_alike).
    sharding = NamedSharding(avals[0].sharding.mesh, PartitionSpec(*[None] * len(output.shape)))
    return avals[0].update(shape=output.shape, dtype=dtype, weak_type=False, sharding=sharding)


def _raise_on_jvp(*_: Any, spec: KernelSpec, **__: Any) -> Any:
    raise NotImplementedError(
        f"kernel {spec.name!r} has no derivative of its own: differentiate a function that wraps the launch in "
        "jax.custom_vjp (reverse mode), or use implementation='xla' or 'reference' for forward mode and higher "
        "derivatives"
    )


def _raise_on_vmap(*_: Any, spec: KernelSpec, **__: Any) -> Any:
    raise NotImplementedError(
        f"kernel {spec.name!r} cannot be mapped by itself: wrap the launch in jax.custom_batching.custom_vmap with a "
        "rule that folds the mapped axis into the kernel's own axes"
    )


ad.primitive_jvps[launch_p] = _raise_on_jvp
batching.primitive_batchers[launch_p] = _raise_on_vmap


def without_transformations(spec: KernelSpec, arrays: Iterable[jax.Array]) -> list[jax.Array]:
    """Return the arrays unchanged; `jvp` and `vmap` of them raise the errors of a launch of `spec`."""
    return [operand_p.bind(array, spec=spec) for array in arrays]


# Applied to the operands of a call divided over a mesh, whose own errors under jvp and vmap do not name a remedy.
operand_p = jax.extend.core.Primitive("blockdiag_triton_operand")
operand_p.def_impl(lambda x, spec: x)
operand_p.def_abstract_eval(lambda x, spec: x)
ad.primitive_jvps[operand_p] = _raise_on_jvp
batching.primitive_batchers[operand_p] = _raise_on_vmap
mlir.register_lowering(operand_p, lambda ctx, x, spec: [x])


def _call_together(*arrays: Any, call_jaxpr: jax.extend.core.ClosedJaxpr) -> list[Any]:
    return jax.extend.core.jaxpr_as_fun(call_jaxpr)(*arrays)


together_p = jax.extend.core.Primitive("blockdiag_triton_launches")
together_p.multiple_results = True
# Evaluated launch by launch: these jaxprs are new objects in every call, so a program for each would never be cached.
together_p.def_impl(_call_together)
together_p.def_abstract_eval(lambda *_, call_jaxpr: call_jaxpr.out_avals)
partial_eval.dce_rules[together_p] = partial_eval.dce_jaxpr_closed_call_rule
ad.primitive_jvps[together_p] = lambda *_, call_jaxpr: _raise_on_jvp(spec=_launches(call_jaxpr)[0]["spec"])
batching.primitive_batchers[together_p] = lambda *_, call_jaxpr: _raise_on_vmap(spec=_launches(call_jaxpr)[0]["spec"])


def _launches(jaxpr: jax.extend.core.ClosedJaxpr) -> list[dict[str, Any]]:
    """Return the parameters of the launches in a jaxpr."""
    return [equation.params for equation in jaxpr.jaxpr.eqns if equation.primitive is launch_p]


def _lower_together(ctx: Any, *operands: Any, call_jaxpr: jax.extend.core.ClosedJaxpr) -> Any:
    return mlir.lower_fun(_call_together, multiple_results=True)(ctx, *operands, call_jaxpr=call_jaxpr)


def _lower_together_cuda(ctx: Any, *operands: Any, call_jaxpr: jax.extend.core.ClosedJaxpr) -> Any:
    from blockdiag.triton_kernels.launch.compile import compile_together

    launches = [x for x in _launches(call_jaxpr) if not x["interpret"]]
    targets = [(x["spec"], x["target"] or session_target()) for x in launches]
    is_here = all(x["target"] is None for x in launches)
    # The lowering of each launch below then finds its kernel in this process's cache.
    compile_together(
        [(spec.plan(target), target) for spec, target in targets], made=_assemble_ahead if is_here else None
    )
    return _lower_together(ctx, *operands, call_jaxpr=call_jaxpr)


mlir.register_lowering(together_p, _lower_together)
mlir.register_lowering(together_p, _lower_together_cuda, platform="cuda")


type _Made = Callable[[LaunchPlan, Target], object]


def _lower_cuda(ctx: Any, *operands: Any, spec: KernelSpec, target: Target | None, interpret: bool) -> Any:
    if interpret:
        return _lower_interpreted(ctx, *operands, spec=spec, target=target, interpret=interpret)
    made = _assemble_ahead if target is None else None
    target = target or session_target()
    _compile_others(spec, target, made)
    return _lower_plan(ctx, operands, spec.plan(target), target, made)


def _compile_others(spec: KernelSpec, target: Target, made: _Made | None) -> None:
    """Start compiling the other launches of a group when one of them is about to be compiled."""
    from blockdiag.triton_kernels.launch.compile import compile_ahead

    others = {
        x: None
        for members in _group_of(spec)
        for x, places in list(members.items())
        if x != spec and any(where is None or where(target) for where in places)
    }
    compile_ahead([(x.plan(target), target) for x in others], made=made)


def _lower_plan(
    ctx: Any, inputs: Sequence[Any], plan: LaunchPlan, target: Target, made: _Made | None = None
) -> list[Any]:
    from blockdiag.triton_kernels.launch.compile import compile_plan

    compiled = compile_plan(plan, target, made=made)
    layout = jaxlib_launcher.lay_out_buffers(plan)
    operands = [
        inputs[index] if role == "input" else _empty_buffer(ctx, index, position)
        for position, (role, index) in enumerate(layout.operands)
    ]
    reordered = ctx.replace(
        avals_in=[(ctx.avals_in if role == "input" else ctx.avals_out)[index] for role, index in layout.operands],
        avals_out=[ctx.avals_out[index] for index in layout.results],
    )
    rule = jax.ffi.ffi_lowering(
        jaxlib_launcher.CALL_TARGET, api_version=4, operand_output_aliases=layout.aliases, has_side_effect=False
    )
    results = rule(reordered, *operands, opaque=jaxlib_launcher.build_opaque(plan, compiled))
    _say_how_long(results[0], plan, (*ctx.avals_in, *ctx.avals_out))
    return [results[layout.results.index(index)] for index in range(len(plan.outputs))]


def _say_how_long(result: Any, plan: LaunchPlan, arrays: Sequence[Any]) -> None:
    """Give XLA an estimate of a launch's duration, so that it overlaps transfers between devices with the launch.

    XLA assumes one microsecond for a foreign call. It reads this attribute only when it schedules a program. It starts
    a transfer as late as its estimate of the transfer allows, which is too short, so launches are understated.
    """
    moved = sum(x.size * x.dtype.itemsize for x in arrays)
    nanoseconds = 1000 + int((moved / _BYTES_PER_NS + plan.flops / _FLOPS_PER_NS) / _UNDERSTATEMENT)
    attributes = result.owner.attributes
    attributes["mhlo.frontend_attributes"] = mlir.ir_attribute({"latency_metadata": str(nanoseconds)})


# Approximate rates of an H100: 3 TB/s and 400 TFLOP/s.
_BYTES_PER_NS, _FLOPS_PER_NS = 3e3, 4e5
# Measured with MoBA on four H200s: transfers of 3 ms started 1 ms before they were needed.
_UNDERSTATEMENT = 8


def _assemble_ahead(plan: LaunchPlan, target: Target) -> None:
    """Start assembling a kernel for this process's GPU, before XLA compiles the whole program.

    jaxlib assembles the kernels of a program one after the other and caches the results in this process. So each kernel
    is assembled in a thread of its own, as part of a throwaway program, while the others compile. This is skipped if
    JAX caches whole programs on disk, since a cached program may need no kernel.
    """
    from blockdiag.triton_kernels.launch.compile import in_background

    if jax.config.jax_compilation_cache_dir is None or not jax.config.jax_enable_compilation_cache:
        in_background(_assemble, plan, target)


def _assemble(plan: LaunchPlan, target: Target) -> None:
    place = SingleDeviceSharding(jax.local_devices(backend="cuda")[0])
    # Without 64-bit types, JAX would narrow the dtypes of 64-bit arrays.
    with jax.enable_x64(True):
        arrays = [jax.ShapeDtypeStruct(x.shape, jax.numpy.dtype(x.dtype), sharding=place) for x in plan.inputs]
        jax.jit(launch_alone(plan, target)).lower(*arrays).compile()


def launch_alone(plan: LaunchPlan, target: Target) -> Callable[..., list[jax.Array]]:
    """Return a function of a plan's inputs that only launches it; it has neither derivatives nor a batching rule."""
    return functools.partial(alone_p.bind, alone=_Alone(plan, target))


@dataclasses.dataclass(frozen=True, eq=False)
class _Alone:
    """A plan and its target as a primitive's parameter; compared by identity, since plans have no hash."""

    plan: LaunchPlan
    target: Target


alone_p = jax.extend.core.Primitive("blockdiag_triton_launch_alone")
alone_p.multiple_results = True
alone_p.def_abstract_eval(lambda *avals, alone: [_output_aval(avals, output) for output in alone.plan.outputs])
mlir.register_lowering(
    alone_p, lambda ctx, *inputs, alone: _lower_plan(ctx, inputs, alone.plan, alone.target), platform="cuda"
)


def _empty_buffer(ctx: Any, output: int, position: int) -> Any:
    """Return an uninitialised buffer for an output; the position keeps XLA from merging two equal buffers."""
    rule = jax.ffi.ffi_lowering(
        jaxlib_launcher.EMPTY_BUFFER_TARGET, api_version=1, backend_config=str(position), has_side_effect=False
    )
    (buffer,) = rule(ctx.replace(avals_in=[], avals_out=[ctx.avals_out[output]]))
    return buffer


def _lower_elsewhere(ctx: Any, *operands: Any, spec: KernelSpec, target: Target | None, interpret: bool) -> Any:
    if interpret:
        return _lower_interpreted(ctx, *operands, spec=spec, target=target, interpret=interpret)
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(
        f"kernel {spec.name!r} is lowered for {platforms}, and Triton kernels run on CUDA; use implementation='xla' "
        "there, or interpret=True for Triton's slow interpreter, or lower for another machine with "
        "lowering_platforms=('cuda',)"
    )


def _lower_interpreted(ctx: Any, *operands: Any, spec: KernelSpec, target: Target | None, interpret: bool) -> Any:
    del interpret
    name = ctx.module_context.module.operation.attributes["sym_name"].value
    if name == _PARTITIONED_MODULE:
        # The callback table of the program does not include this separate module, so a call would crash the process.
        raise NotImplementedError(
            f"kernel {spec.name!r}: Triton's interpreter cannot run where XLA divides a call over the devices of an "
            "automatic mesh; use implementation='xla' on CPUs, a mesh with explicit axes, or jax.shard_map"
        )
    return mlir.lower_fun(functools.partial(_call_interpreter, spec, target), multiple_results=True)(ctx, *operands)


# The name that `jax.experimental.custom_partitioning` gives to the module that holds one device's part.
_PARTITIONED_MODULE = "tmp_xla_computation"


def _call_interpreter(spec: KernelSpec, target: Target | None, *arrays: jax.Array) -> Sequence[jax.Array]:
    def run_on_host(*host_arrays: Any) -> tuple[np.ndarray, ...]:
        from blockdiag.interop.interpreter.launch import interpret

        return interpret(spec, *map(np.asarray, host_arrays), target=target)

    shapes = [jax.ShapeDtypeStruct(output.shape, jax.numpy.dtype(output.dtype)) for output in spec.outputs]
    return jax.pure_callback(run_on_host, shapes, *arrays, vmap_method=None)


mlir.register_lowering(launch_p, _lower_elsewhere)
mlir.register_lowering(launch_p, _lower_cuda, platform="cuda")
