"""A variant of the gallery as compiled programs: fused, as XLA compiles it, and one that compares with float32."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gallery.cases import PASSES, GalleryCase, GalleryPass, shape_text
from benchmarks.harness.compiled import address_table_bytes
from benchmarks.harness.family import SPENT, Program
from benchmarks.harness.programs import collect_specs
from benchmarks.harness.records import recordable_failures
from blockdiag.cli.machine import reason_of
from blockdiag.fusion.api import fuse
from blockdiag.fusion.gallery import VARIANTS, Variant
from blockdiag.triton_kernels.launch.plan import Target

type Whose = Literal["ours", "xla"]
type Key = tuple[Whose, GalleryPass]

WHOSE: tuple[Whose, ...] = ("ours", "xla")

# The relative error that a result in bfloat16 may have, or twice the error of XLA's result.
_ALLOWED_ERROR = 0.02


class WrongResult(ValueError):
    """A fused result is further from float32 than rounding explains: its time would mean nothing."""


@dataclass
class Work:
    """The programs of a variant.

    Attributes:
        inputs: by name; `cotangent` is of the outputs.
        traced: programs to be compiled.
        programs: those that are compiled.
        failures: why others are not.
        judge: returns the distances of the results of "fwd+bwd" from float32; None until it is compiled.
        judge_failure: why it is not compiled; an empty string if it is, or was not begun.
    """

    variant: Variant
    inputs: dict[str, Any]
    cotangent: Any
    traced: dict[Key, Any] = field(default_factory=dict)
    programs: dict[Key, Program] = field(default_factory=dict)
    failures: dict[Key, Exception] = field(default_factory=dict)
    judge: Callable[..., dict[str, Any]] | None = None
    judge_failure: str = ""

    def arguments(self, pass_name: GalleryPass) -> tuple[Any, ...]:
        """Return what a pass takes: the floating inputs, the others, and for gradients the cotangent."""
        floating = {name: x for name, x in self.inputs.items() if name in self.variant.differentiable}
        others = {name: x for name, x in self.inputs.items() if name not in floating}
        return (floating, others) if pass_name == "fwd" else (floating, others, self.cotangent)

    @functools.cached_property
    def distances(self) -> dict[Whose, dict[str, float]]:
        """The relative distances of results from float32 by name; empty where `uncompared` says why."""
        return {whose: {} if self.uncompared(whose) else self._judged(whose) for whose in WHOSE}

    def uncompared(self, whose: Whose) -> str:
        """Return why results are not compared with float32, or an empty string."""
        if (whose, "fwd+bwd") in self.failures:
            return "there are no results"
        if self.judge_failure:
            return self.judge_failure
        return SPENT if self.judge is None or (whose, "fwd+bwd") not in self.programs else ""

    def _judged(self, whose: Whose) -> dict[str, float]:
        key: Key = (whose, "fwd+bwd")
        try:
            results = jax.block_until_ready(self.programs[key].run())
        except recordable_failures() as failure:
            self.failures[key] = failure
            return {}
        try:
            assert self.judge is not None
            return {name: float(x) for name, x in self.judge(self.arguments("fwd+bwd"), results).items()}
        except recordable_failures() as failure:
            self.judge_failure = reason_of(failure)
            return {}

    def error(self, whose: Whose, pass_name: GalleryPass) -> float | None:
        """Return the largest distance of a pass's results from float32; None where there is none."""
        found = self.distances[whose].items()
        return max((x for name, x in found if pass_name == "fwd+bwd" or name.startswith("output")), default=None)

    def demand_right(self) -> None:
        """Compare the distances of fused results with those of XLA's.

        Raises:
            WrongResult: a result is further from float32 than rounding explains.
        """
        for name, error in self.distances["ours"].items():
            of_xla = self.distances["xla"].get(name, 0.0)
            allowed = max(_ALLOWED_ERROR, 2 * of_xla if math.isfinite(of_xla) else 0.0)
            if not error <= allowed:
                raise WrongResult(f"{name} errs by {error:.2e}, allowed {allowed:.2e}")


def pass_of(function: Callable[..., Any], pass_name: GalleryPass) -> Callable[..., Any]:
    """Return a pass as a function of `Work.arguments`: the outputs, and for "fwd+bwd" also the gradients by name."""

    def forward(floating: dict[str, Any], others: dict[str, Any]) -> Any:
        return function(**floating, **others)

    def both(floating: dict[str, Any], others: dict[str, Any], cotangent: Any) -> tuple[Any, dict[str, Any]]:
        outputs, pull_back = jax.vjp(lambda floating: forward(floating, others), floating)
        return outputs, *pull_back(cotangent)

    return forward if pass_name == "fwd" else both


def begin(case: GalleryCase, seed: int) -> Work:
    """Draw a variant's inputs and a cotangent of its outputs."""
    variant = VARIANTS[case.name]
    inputs = variant.make_inputs(jax.random.key(seed), case.sizes)
    outputs = jax.eval_shape(lambda: variant.scaled(**inputs))
    generator = np.random.default_rng(seed)

    def draw(like: Any) -> jax.Array:
        return jnp.asarray(generator.standard_normal(like.shape, np.float32), like.dtype)

    return Work(variant, inputs, jax.tree.map(draw, outputs))


def trace(work: Work, whose: Whose, implementation: str, target: Target | None = None) -> list[Any]:
    """Trace both passes, fused by `implementation` or as the function stands.

    Returns:
        The kernel launches on a target. Where tracing fails, the passes keep the reason, and there are none.
    """
    function = work.variant.scaled
    if whose == "ours":
        function = fuse(function, implementation=implementation)
    specs: dict[Any, None] = {}
    try:
        for pass_name in PASSES:
            traced = jax.jit(pass_of(function, pass_name)).trace(*work.arguments(pass_name))
            work.traced[whose, pass_name] = traced
            collect_specs(traced.jaxpr.jaxpr, specs, target)
    except recordable_failures() as failure:
        for pass_name in PASSES:
            work.traced.pop((whose, pass_name), None)
            work.failures[whose, pass_name] = failure
        return []
    return list(specs)


def compile_pass(work: Work, whose: Whose, pass_name: GalleryPass) -> None:
    """Compile a pass, if it is traced; where that fails, it keeps the reason."""
    traced = work.traced.pop((whose, pass_name), None)
    if traced is None:
        return
    try:
        compiled = traced.lower().compile()
    except recordable_failures() as failure:
        work.failures[whose, pass_name] = failure
        return
    memory, arguments = compiled.memory_analysis(), work.arguments(pass_name)
    extra, outputs = None, 0
    if memory is not None:
        extra = max(0, int(memory.temp_size_in_bytes) - address_table_bytes(compiled.as_text() or ""))
        outputs = int(memory.output_size_in_bytes)
    work.programs[whose, pass_name] = Program(
        lambda: compiled(*arguments),
        extra_bytes=extra,
        held_bytes=outputs + (extra or 0),
        columns={"shape": shape_text(work.inputs), "extra_bytes": extra},
    )


def compile_judge(work: Work) -> None:
    """Compile what compares results with the function in float32, with products of full precision."""
    arguments = work.arguments("fwd+bwd")
    exact_pass = pass_of(work.variant.scaled, "fwd+bwd")

    def judge(arguments: tuple[Any, ...], results: tuple[Any, Any]) -> dict[str, jax.Array]:
        floating, others, cotangent = arguments
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (floating, cotangent))
        with jax.default_matmul_precision("highest"):
            outputs, gradients = exact_pass(wide[0], others, wide[1])
        exact = _named(outputs, gradients)
        return {name: _distance(x, exact[name]) for name, x in _named(*results).items()}

    try:
        results = jax.eval_shape(exact_pass, *arguments)
        work.judge = jax.jit(judge).lower(arguments, results).compile()
    except recordable_failures() as failure:
        work.judge_failure = reason_of(failure)


def _named(outputs: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    named = {f"output {i}": x for i, x in enumerate(jax.tree.leaves(outputs))}
    return named | {f"gradient of {name}": x for name, x in gradients.items()}


def _distance(result: jax.Array, exact: jax.Array) -> jax.Array:
    """||result - exact|| / ||exact||, and ||result|| where the exact one is 0."""
    size = jnp.linalg.norm(exact.ravel())
    difference = jnp.linalg.norm((result.astype(exact.dtype) - exact).ravel())
    return difference / jnp.where(size == 0, 1.0, size)
