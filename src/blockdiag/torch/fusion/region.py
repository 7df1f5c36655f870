"""A fused region in torch: launches of its generated kernels, and its derivative."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend import core

from blockdiag.fusion.codegen.delta import delta_source
from blockdiag.fusion.codegen.kernels import Output, Source
from blockdiag.fusion.ir.tree import DISTANCE, Dim, Region
from blockdiag.fusion.lowering.eight_bit import has_eight_bits, widened, widened_arrays
from blockdiag.fusion.lowering.tile_program import canonical_result, result_array
from blockdiag.fusion.runtime.arrange import arranged, arrays_by_name
from blockdiag.fusion.runtime.kernel_choice import (
    backward_kernels,
    forward_kernel,
    hopper_kernels,
    own_forward_kernel,
)
from blockdiag.fusion.runtime.launches import Kernel, kernel_of
from blockdiag.interop.dlpack import TENSOR_DTYPES, refuse_several
from blockdiag.interop.torch_launch import on_device
from blockdiag.torch.launches import dense
from blockdiag.triton_kernels.launch.plan import KernelSpec, LaunchPlan, Pointer, Target, TensorSpec
from blockdiag.triton_kernels.launch.private_triton import has_hopper_kernels

type Tensors = tuple[torch.Tensor, ...]
type Bind = Callable[[KernelSpec], Callable[[Tensors], Tensors]]
"""Binds a launch, so that it can be called with dense tensors."""


@dataclass(frozen=True)
class Gradient:
    """Conversion of a kernel's output to the gradient of an operand.

    Attributes:
        operand: index of the operand.
        dims: labels of the axes of the written array.
        sizes: sizes of the labels in `dims`.
        target: labels of the axes of the operand.
        shape: shape of the operand.
        dtype: dtype of the operand.
        factor: what the written array must be multiplied by.
    """

    operand: int
    dims: tuple[Dim, ...]
    sizes: Mapping[str, int]
    target: tuple[Dim, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    factor: float = 1.0

    def finished(self, written: torch.Tensor) -> torch.Tensor:
        """Return the gradient: partial results are summed and placed where the region reads the operand."""
        if self.factor != 1.0:
            # In place, because nothing else reads what the launch has written.
            written = written.mul_(self.factor)
        if self.dims == self.target:
            return written.to(self.dtype)
        dims = self.dims
        if ("diagonals",) in dims:
            written, dims = _by_distance(written, self.sizes["q"], self.sizes["k"]), (*dims[:-3], (DISTANCE,))
        labels = _labels(dims)
        parts = written.reshape([self.sizes[label] for label in labels])
        wanted = _labels(self.target)
        summed = [axis for axis, label in enumerate(labels) if label not in wanted]
        if summed:
            parts = parts.sum(summed)
        kept = [label for label in labels if label in wanted]
        parts = parts.permute([kept.index(label) for label in wanted]).to(self.dtype)
        index = tuple(dim if isinstance(dim, int) else slice(None) for dim in self.target)
        if not any(isinstance(dim, int) for dim in self.target):
            return parts.reshape(self.shape)
        # The region reads a single index of some axes, so the gradient is 0 elsewhere.
        whole = parts.new_zeros(self.shape)
        whole[index] = parts.reshape(whole[index].shape)
        return whole


def _by_distance(parts: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Return the gradient by distance from a kernel's output, as `fusion.diagonals.distance_gradient` does."""
    size = parts.shape[-1] // 2
    parts = parts.sum(-3)
    low, high = (
        torch.nn.functional.pad(x, (0, 0, *ends))
        for x, ends in zip(parts.split(size, -1), ((0, 1), (1, 0)), strict=True)
    )
    first = -(-keys // size) * size - (keys - 1)
    return (low + high).flatten(-2)[..., first : first + rows + keys - 1]


def _labels(dims: Sequence[Dim]) -> list[str]:
    return [label for dim in dims if isinstance(dim, tuple) for label in dim]


@dataclass(frozen=True)
class DeltaLaunch:
    """The launch that computes delta, rowsum(O * dO); a KernelSpec.

    Attributes:
        output: shape and dtype of the result and of its cotangent.
    """

    source: Source
    output: TensorSpec

    @property
    def name(self) -> str:
        """The name that profilers show."""
        return self.source.name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the result and its cotangent."""
        return (self.output, self.output)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the arrays that the launch writes."""
        return tuple(TensorSpec(x.shape, x.dtype) for x in self.source.outputs)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan, which is the same for every target."""
        del target
        arguments = {f"p_{name}": Pointer("input", i) for i, name in enumerate(self.source.inputs)}
        arguments |= {f"p_{x.name}": Pointer("output", i) for i, x in enumerate(self.source.outputs)}
        return LaunchPlan(
            name=self.name,
            kernel=kernel_of(self.source.text, self.name),
            grid=self.source.grid,
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=arguments,
        )


@dataclass(frozen=True)
class Step:
    """A launch of a region.

    Attributes:
        launch: its kernel and arrays.
        inputs: indices of operands, and names of the region's own arrays: "output", "log_sum", "cotangent", "delta",
            and "zeros_<name>", arrays of zeros that become an output.
        gradients: one for each array that it writes; None if the array is no gradient of an operand.
        has_delta: whether the last array that it writes is "delta", for the launches after it.
    """

    launch: KernelSpec
    inputs: tuple[int | str, ...]
    gradients: tuple[Gradient | None, ...]
    has_delta: bool = False


@dataclass(frozen=True, eq=False)
class Steps:
    """The launches of a region.

    Attributes:
        forward: writes the result and the log-sum-exp.
        own_forward: replaces `forward` on Hopper; None: nothing does.
        delta: computes "delta", if a backward launch reads it.
        backward: launches that write gradients; empty if gradients were not requested.
        on_hopper: replaces `backward` on Hopper, if one launch can compute several gradients there.
        cotangent: dtype of the cotangent that backward launches read.
        has_log_sum: whether the log-sum-exp is also a result.
        carriers: number of trailing operands that no launch reads; each receives the gradient of another operand.
    """

    forward: Step
    own_forward: Step | None
    delta: Step | None
    backward: tuple[Step, ...]
    on_hopper: tuple[Step, ...]
    cotangent: torch.dtype
    has_log_sum: bool
    carriers: int

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the result, and of the log-sum-exp if that is a result."""
        return self.forward.launch.outputs[: 2 if self.has_log_sum else 1]

    def bound(self, bind: Bind, target: Target | None) -> "BoundRegion":
        """Return the launches on one device; see `BoundRegion`."""
        return BoundRegion(self, bind, target)


@dataclass(frozen=True, eq=False)
class TorchStep:
    """A function of tensors that takes the place of a region.

    Attributes:
        compute: the function.
        results: shapes and dtypes of its results.
    """

    compute: Callable[..., Sequence[torch.Tensor]]
    results: tuple[TensorSpec, ...]

    def bound(self, *_: Any) -> Callable[..., Sequence[torch.Tensor]]:
        """Return the function; see `BoundRegion`."""
        return self.compute


@dataclass(frozen=True, eq=False)
class BackwardSteps:
    """The launches of a backward pass in place of a region, not differentiable.

    Attributes:
        launches: each with its inputs: indices of operands, or "delta".
        delta: the launch that computes "delta" with the indices of its inputs, if any launch reads it.
        log_sum_cotangent: index of the log-sum-exp's cotangent, None if that is 0.
    """

    launches: tuple[tuple[KernelSpec, tuple[int | str, ...]], ...]
    delta: tuple[DeltaLaunch, tuple[int, ...]] | None
    log_sum_cotangent: int | None

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the arrays that the launches write, in order."""
        return tuple(spec for launch, _ in self.launches for spec in launch.outputs)

    def bound(self, bind: Bind, target: Target | None) -> Callable[..., Sequence[torch.Tensor]]:
        """Return a function that runs the launches on one device; each is bound when it first runs."""
        del target
        ready = functools.cache(bind)

        def run(*operands: torch.Tensor) -> list[torch.Tensor]:
            given: dict[int | str, torch.Tensor] = {place: dense(x) for place, x in enumerate(operands)}
            if self.delta is not None:
                launch, inputs = self.delta
                (given["delta"],) = ready(launch)(tuple([given[x] for x in inputs]))
                if self.log_sum_cotangent is not None:
                    given["delta"] -= given[self.log_sum_cotangent]
            return [x for launch, inputs in self.launches for x in ready(launch)(tuple([given[x] for x in inputs]))]

        return run


region_p = core.Primitive("blockdiag_fused_region")
"""Placeholder for a region in a program that is split and never run; its operands are the arrays of its kernels."""
region_p.multiple_results = True


@region_p.def_abstract_eval
def _abstract_region(*avals: Any, steps: Steps) -> Any:
    del avals
    return [jax.core.ShapedArray(x.shape, jnp.dtype(x.dtype)) for x in steps.results]


def mark(
    region: Region,
    leaves: Sequence[Any],
    value: Any,
    *,
    has_gradient: bool,
    has_log_sum: bool,
    carriers: Mapping[int, Any] | None = None,
    has_eight_bit_products: bool = False,
) -> tuple[Any, Any]:
    """Trace a region as `region_p` of its arranged arrays and its lists of tiles; return its results.

    Args:
        has_gradient: whether to generate backward kernels.
        has_log_sum: whether to return the log-sum-exp [batch.., q] too; None takes its place otherwise.
        carriers: float32 arrays that receive the gradients of some leaves, or of the values, instead of these.
        has_eight_bit_products: whether the device multiplies eight-bit arrays. They are widened otherwise, and for
            backward kernels.
    """
    carriers = carriers if carriers and has_gradient else {}
    if has_eight_bits(region) and (has_gradient or not has_eight_bit_products):
        *wide_leaves, wide_value = widened_arrays(region, (*leaves, value))
        given = {"has_gradient": has_gradient, "has_log_sum": has_log_sum, "carriers": carriers}
        output, log_sum = mark(widened(region), wide_leaves, wide_value, **given)
        return output.astype(region.dtype), log_sum
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    constant = {name: jax.lax.stop_gradient(x) for name, x in arrays.items()}
    own_forward = own_forward_kernel(inner, constant)
    groups = [
        [forward_kernel(inner, constant)],
        backward_kernels(inner, constant) if has_gradient else [],
        [] if own_forward is None else [own_forward],
        (hopper_kernels(inner, constant, has_sum=False) or []) if has_gradient else [],
    ]
    kernels = list(itertools.chain(*groups))
    names = {name for kernel in kernels for name in kernel.source.inputs}
    operands = {name: x for name, x in arrays.items() if name in names}
    places = {name: place for place, name in enumerate(operands)}
    arguments = list(operands.values())
    made = _made(kernels, value.dtype)
    launched: list[tuple[Kernel, tuple[int | str, ...]]] = []
    for kernel in kernels:
        inputs: list[int | str] = []
        for name in kernel.source.inputs:
            if name in kernel.live:
                # Kernels with equal tiles share their lists of tiles.
                found = [i for i, x in enumerate(arguments) if x is kernel.live[name]]
                inputs.append(found[0] if found else len(arguments))
                arguments += [] if found else [kernel.live[name]]
            else:
                inputs.append(places.get(name, name))
        launched.append((kernel, tuple(inputs)))
    count = len(arguments)
    if carriers:
        *wide_leaves, wide_value = (carriers.get(i, x) for i, x in enumerate((*leaves, value)))
        wide = arrays_by_name(change, wide_leaves, wide_value)
        names_of_carried = [f"leaf{i}" if i < len(leaves) else "value" for i in carriers]
        places |= {name: count + i for i, name in enumerate(names_of_carried)}
        arguments += [wide[name] for name in names_of_carried]
    steps: list[Step] = []
    for kernel, read in launched:
        specs = [made[x] if isinstance(x, str) else _spec(arguments[x]) for x in read]
        gradients = tuple(_gradient(inner, x, places, count) for x in kernel.source.outputs)
        has_delta = kernel.source.outputs[-1].name == "delta"
        steps.append(Step(kernel.launch(specs), read, gradients, has_delta))
    delta = None
    if any("delta" in step.inputs for step in steps):
        delta = Step(DeltaLaunch(delta_source(inner), made["output"]), ("output", "cotangent"), (None,))
    left = iter(steps)
    (forward,), backward, own, on_hopper = (tuple(itertools.islice(left, len(group))) for group in groups)
    marker = Steps(
        forward,
        own[0] if own else None,
        delta,
        backward,
        on_hopper,
        _tensor_dtype(value.dtype),
        has_log_sum,
        len(carriers),
    )
    output, *rest = region_p.bind(*arguments, steps=marker)
    return result_array(region, output) if change.changes_result else output, rest[0] if rest else None


def mark_gradients(
    region: Region,
    leaves: Sequence[Any],
    value: Any,
    output: Any,
    log_sum: Any,
    cotangent: Any,
    log_sum_cotangent: Any = None,
) -> list[Any]:
    """Trace the gradients of the leaves that have one, and of the values, as one `region_p`.

    Args:
        output, log_sum: results of the forward pass, which may have covered more keys than this region.
        cotangent: cotangent of the result.
        log_sum_cotangent: cotangent of the log-sum-exp; None if it is 0.
    """
    if has_eight_bits(region):
        *wide_leaves, wide_value = widened_arrays(region, (*leaves, value))
        saved = (output.astype(widened(region).dtype), log_sum, cotangent, log_sum_cotangent)
        *grads, value_grad = mark_gradients(widened(region), wide_leaves, wide_value, *saved)
        dtypes = [leaf.gradient_dtype for leaf in region.leaves if leaf.has_gradient]
        grads = [x.astype(dtype) for x, dtype in zip(grads, dtypes, strict=True)]
        return [*grads, value_grad.astype(region.value_gradient_dtype)]
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    kernels = backward_kernels(inner, {name: jax.lax.stop_gradient(x) for name, x in arrays.items()})
    if change.changes_result:
        output, cotangent = canonical_result(region, output), canonical_result(region, cotangent)
    arrays |= {"output": output, "log_sum": log_sum, "cotangent": cotangent.astype(value.dtype)}
    operands: list[Any] = []

    def place_of(x: Any) -> int:
        found = [place for place, other in enumerate(operands) if other is x]
        operands.extend([] if found else [x])
        return found[0] if found else len(operands) - 1

    delta = None
    if any("delta" in kernel.source.inputs for kernel in kernels):
        delta = DeltaLaunch(delta_source(inner), _spec(output)), (place_of(output), place_of(cotangent))
    place_of_sum = None if log_sum_cotangent is None else place_of(log_sum_cotangent)
    launches: list[tuple[KernelSpec, tuple[int | str, ...]]] = []
    for kernel in kernels:
        arrays |= kernel.live
        inputs = tuple("delta" if name == "delta" else place_of(arrays[name]) for name in kernel.source.inputs)
        specs = [_spec(log_sum if isinstance(x, str) else operands[x]) for x in inputs]
        launches.append((kernel.launch(specs), inputs))
    results = region_p.bind(*operands, steps=BackwardSteps(tuple(launches), delta, place_of_sum))
    outputs = [x for kernel in kernels for x in kernel.source.outputs]
    written = {x.name: (array, x.dims) for x, array in zip(outputs, results, strict=True)}
    pairs = enumerate(region.leaves)
    grads = [change.leaf_gradient(i, leaves[i], *written[f"grad{i}"]) for i, leaf in pairs if leaf.has_gradient]
    return [*grads, change.value_gradient(value, *written["grad_value"])]


def _made(kernels: Sequence[Kernel], value_dtype: Any) -> dict[str, TensorSpec]:
    """Return shapes and dtypes of the arrays that the region itself makes; the first kernel is that of the result."""
    output, log_sum = (TensorSpec(x.shape, x.dtype) for x in kernels[0].source.outputs)
    cotangent = TensorSpec(output.shape, jnp.dtype(value_dtype).name)
    written = [x for kernel in kernels for x in kernel.source.outputs]
    zeros = {f"zeros_{x.name}": TensorSpec(x.shape, x.dtype) for x in written if x.starts_at_zero}
    return {"output": output, "log_sum": log_sum, "delta": log_sum, "cotangent": cotangent, **zeros}


def _spec(x: Any) -> TensorSpec:
    return TensorSpec(tuple(x.shape), jnp.dtype(x.dtype).name)


def _tensor_dtype(dtype: Any) -> torch.dtype:
    return TENSOR_DTYPES[jnp.dtype(dtype)]


def _gradient(inner: Region, written: Output, places: Mapping[str, int], count: int) -> Gradient | None:
    """Return how a kernel's output becomes the gradient of an operand; None if it belongs to no operand.

    Args:
        places: indices of operands, or of the carriers of their gradients, by name.
        count: number of operands before the carriers.
    """
    name = written.name.removeprefix("grad").removeprefix("_")
    name = f"leaf{name}" if name.isdigit() else name
    if name not in places:
        # The results, and gradients of positions, which are no arrays.
        return None
    source, target = inner.value, inner.value_dims
    if name != "value":
        leaf = inner.leaves[int(name.removeprefix("leaf"))]
        source, target = leaf.source, leaf.dims
    sizes = dict(inner.sizes)
    for dim, size in zip(written.dims, written.shape, strict=True):
        if isinstance(dim, tuple) and len(dim) == 1:
            # The numbers of tiles are only known from the written arrays.
            sizes[dim[0]] = size
    place = places[name]
    dtype = _tensor_dtype(source.dtype) if place < count else torch.float32
    return Gradient(place, written.dims, sizes, target, tuple(source.shape), dtype, written.factor)


class BoundRegion:
    """The launches of a region on one device.

    Args:
        bind: binds a launch; called for each launch when it first runs.
        target: the GPU, None for the interpreter.
    """

    def __init__(self, steps: Steps, bind: Bind, target: Target | None) -> None:
        self.steps = steps
        self._target = target
        self._bind = bind
        self._bound: dict[int, Callable[[Tensors], Tensors]] = {}

    def __call__(self, *operands: torch.Tensor) -> Tensors:
        """Return the results."""
        count = len(operands) - self.steps.carriers
        operands = (*[dense(x) for x in operands[:count]], *operands[count:])
        if torch.is_grad_enabled() and any([x.requires_grad for x in operands]):
            return _Region.apply(self, *operands)
        return self.forward(operands)[: len(self.steps.results)]

    def forward(self, operands: Tensors) -> Tensors:
        """Return the result and the log-sum-exp."""
        step, own = self.steps.forward, self.steps.own_forward
        is_own = own is not None and self._target is not None and has_hopper_kernels(self._target.arch)
        output, log_sum, *_counter = self.run(own if own is not None and is_own else step, operands, {})
        return output, log_sum

    def run(self, step: Step, operands: Tensors, made: Mapping[str, torch.Tensor]) -> Tensors:
        """Run one launch and return the arrays that it writes."""
        launch = self._bound.get(id(step))
        if launch is None:
            launch = self._bound[id(step)] = self._bind(step.launch)
        given = []
        for x, spec in zip(step.inputs, step.launch.inputs, strict=True):
            if isinstance(x, str) and x.startswith("zeros_"):
                dtype, device = TENSOR_DTYPES[jnp.dtype(spec.dtype)], operands[0].device
                given.append(torch.zeros(spec.shape, dtype=dtype, device=device))
            else:
                given.append(made[x] if isinstance(x, str) else operands[x])
        return launch(tuple(given))

    def backward(
        self,
        operands: Tensors,
        output: torch.Tensor,
        log_sum: torch.Tensor,
        cotangent: torch.Tensor | None,
        log_sum_cotangent: torch.Tensor | None,
        needed: Any,
    ) -> list[torch.Tensor | None]:
        """Return the gradient of each operand that needs one, None for others; a cotangent of None is 0."""
        steps = self.steps
        cotangent = torch.zeros_like(output) if cotangent is None else dense(cotangent)
        made = {"output": output, "log_sum": log_sum, "cotangent": cotangent}
        launches = self.backward_steps(needed, has_sum=log_sum_cotangent is not None)
        if steps.delta is not None and not launches[0].has_delta:
            (made["delta"],) = self.run(steps.delta, (), made)
            if log_sum_cotangent is not None:
                made["delta"] -= log_sum_cotangent
        made["cotangent"] = cotangent.to(steps.cotangent)
        found: list[torch.Tensor | None] = [None] * len(needed)
        for step in launches:
            wanted = [gradient is not None and needed[gradient.operand] for gradient in step.gradients]
            if not any(wanted):
                continue
            results = self.run(step, operands, made)
            if step.has_delta:
                made["delta"] = results[-1]
            for gradient, written, is_wanted in zip(step.gradients, results, wanted, strict=True):
                if gradient is not None and is_wanted:
                    found[gradient.operand] = gradient.finished(written)
        return found

    def backward_steps(self, needed: Any, *, has_sum: bool = False) -> tuple[Step, ...]:
        """Return the backward launches. A launch that replaces several only pays if all its gradients are needed.

        Args:
            has_sum: whether the log-sum-exp has a cotangent, which launches that compute delta cannot subtract.
        """
        steps = self.steps.on_hopper
        if not steps or self._target is None or not has_hopper_kernels(self._target.arch):
            return self.steps.backward
        if has_sum and steps[0].has_delta:
            return self.steps.backward
        is_needed = all(gradient is None or needed[gradient.operand] for gradient in steps[0].gradients)
        return steps if is_needed else self.steps.backward


class _Region(torch.autograd.Function):
    """A region whose gradient is computed by its backward launches."""

    @staticmethod
    def forward(ctx: Any, region: BoundRegion, *operands: torch.Tensor) -> Tensors:
        output, log_sum = region.forward(operands)
        ctx.region = region
        ctx.save_for_backward(*operands[: len(operands) - region.steps.carriers], output, log_sum)
        ctx.set_materialize_grads(False)
        return (output, log_sum)[: len(region.steps.results)]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, cotangent: torch.Tensor | None, log_sum_cotangent: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        *operands, output, log_sum = ctx.saved_tensors
        cotangents = (cotangent, log_sum_cotangent)
        arguments = (ctx.region, ctx.needs_input_grad[1:], *cotangents, output, log_sum, *operands)
        if torch.is_grad_enabled():
            return None, *_RegionGradient.apply(*arguments)
        return None, *_gradients(*arguments)


class _RegionGradient(torch.autograd.Function):
    """Gradients with `create_graph=True`, which raise only if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        del ctx
        return tuple(_gradients(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "second derivatives of a fused function are not available; take them in JAX, from the unfused function"
        )


def _gradients(
    region: BoundRegion,
    needed: Sequence[bool],
    cotangent: torch.Tensor | None,
    log_sum_cotangent: torch.Tensor | None,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *operands: torch.Tensor,
) -> list[torch.Tensor | None]:
    refuse_several([x for x in (cotangent, log_sum_cotangent) if x is not None])
    with on_device(output.device):
        return region.backward(operands, output, log_sum, cotangent, log_sum_cotangent, needed)
