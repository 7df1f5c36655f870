"""Random arguments of the benchmark's functions, and their results in float64, a head or a sequence at a time."""

from collections.abc import Iterator, Mapping

import torch

from benchmarks.fuse.cases import FuseCase, FusePass, make_segments
from benchmarks.fuse.torch_baselines import Tensors, plain_attention, slopes_of
from benchmarks.harness.device import relative_error
from benchmarks.harness.failures import GATE, WrongResult

# Rounding of scores and weights that are written to memory, and of sums made by atomics, errs by up to some 5e-2;
# another mask or bias errs by far more.
BASELINE_GATE = 1e-1


def make_arrays(case: FuseCase, *, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Standard normal arguments in bfloat16, segments, and the output's "cotangent"."""
    generator = torch.Generator(device=device).manual_seed(seed)
    arrays = {}
    for name, shape in {**case.shapes, "cotangent": case.output_shape}.items():
        if name == "segments":
            arrays[name] = torch.from_numpy(make_segments(case)).to(device)
        else:
            arrays[name] = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return arrays


type Place = tuple[slice, ...]


def parts(case: FuseCase) -> Iterator[dict[str, Place]]:
    """Where each argument, the output and "slopes" of parts lie that are computed apart from each other.

    A part is a sequence of "evoformer" with all its rows, or a head of queries, or a pair of heads, of one sequence.
    What several parts read has gradients that add up.
    """
    for batch in range(case.batch):
        here = slice(batch, batch + 1)
        if case.group == "evoformer":
            yield dict.fromkeys((*case.shapes, "output"), (here,))
            continue
        for head in range(case.query_heads):
            one, key_head = slice(head, head + 1), head * case.key_heads // case.query_heads
            if case.group == "diff":
                halves, whole = (here, slice(None), slice(None), one), (here, slice(None), one)
                yield {"query": halves, "key": halves, "value": whole, "output": whole}
                continue
            query, key = (here, slice(None), one), (here, slice(None), slice(key_head, key_head + 1))
            yield {"query": query, "key": key, "value": key, "output": query, "slopes": (one,), "segments": (here,)}


def exact_results(case: FuseCase, arrays: Tensors) -> dict[str, torch.Tensor]:
    """The "output" and the gradient of each differentiated argument by its name, computed in float64, as float32."""
    wanted = case.differentiated
    exact = {name: torch.zeros(case.shapes[name], device=arrays[name].device) for name in wanted}
    exact["output"] = torch.empty(case.output_shape, device=arrays["query"].device)
    arrays = {**arrays, **slopes_of(case, arrays["query"].device)}
    for place in parts(case):
        given = {name: arrays[name][where] for name, where in place.items() if name in arrays}
        given = {name: array.double() if array.is_floating_point() else array for name, array in given.items()}
        leaves = [given[name].requires_grad_() for name in wanted]
        output = plain_attention(case, given)
        cotangent = arrays["cotangent"][place["output"]].double()
        for name, gradient in zip(wanted, torch.autograd.grad(output, leaves, cotangent), strict=True):
            exact[name][place[name]] += gradient
        exact["output"][place["output"]] = output.detach().float()
    return exact


def check_results(
    case: FuseCase, results: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], gate: float = GATE
) -> float:
    """The largest relative error of what a pass returned, by name.

    Raises:
        WrongResult: it exceeds `gate`.
    """
    errors = {name: relative_error(array, exact[name]) for name, array in results.items()}
    if not max(errors.values()) <= gate:
        found = ", ".join(f"{name} {error:.2e}" for name, error in errors.items())
        raise WrongResult(f"{case.name}: relative errors {found} exceed {gate}")
    return max(errors.values())


def expected_names(case: FuseCase, pass_name: FusePass) -> tuple[str, ...]:
    """Names of what a pass returns, in order."""
    return ("output",) if pass_name == "fwd" else ("output", *case.differentiated)
