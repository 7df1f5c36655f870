"""A variant of the gallery as compiled programs: fused, as XLA compiles it, and one that compares with float32."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gallery.cases import shape_text
from benchmarks.harness.compiled import address_table_bytes
from benchmarks.harness.programs import collect_specs
from blockdiag.fusion.api import fuse
from blockdiag.fusion.gallery import Sizes, Variant
from blockdiag.triton_kernels.launch.plan import Target

type Whose = Literal["ours", "xla"]
type GalleryPass = Literal["fwd", "fwd+bwd"]

WHOSE: tuple[Whose, ...] = ("ours", "xla")
PASSES: tuple[GalleryPass, ...] = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        call: the program.
        extra_bytes, output_bytes: device memory of one call beyond inputs and outputs, and of its outputs.
    """

    call: Callable[..., Any]
    extra_bytes: int | None
    output_bytes: int


@dataclass
class Work:
    """A variant on its way to rows.

    Attributes:
        inputs: by name; `cotangent` is of the outputs.
        traced: the programs, to be compiled.
        programs, reasons: those that are compiled; why one is not, or was not timed.
        judge: distances of the results of "fwd+bwd" from float32, if compiled.
    """

    variant: Variant
    inputs: dict[str, Any]
    cotangent: Any
    traced: dict[tuple[Whose, GalleryPass], Any] = field(default_factory=dict)
    programs: dict[tuple[Whose, GalleryPass], Compiled] = field(default_factory=dict)
    reasons: dict[tuple[Whose, GalleryPass], str] = field(default_factory=dict)
    judge: Callable[..., dict[str, Any]] | None = None

    @property
    def shape(self) -> str:
        """The inputs' shapes, for the file."""
        return shape_text(self.inputs)

    def arguments(self, pass_name: GalleryPass) -> tuple[Any, ...]:
        """What a pass takes: the floating inputs, the others, and for gradients the cotangent."""
        floating = {name: x for name, x in self.inputs.items() if name in self.variant.differentiable}
        others = {name: x for name, x in self.inputs.items() if name not in floating}
        return (floating, others) if pass_name == "fwd" else (floating, others, self.cotangent)


def pass_of(function: Callable[..., Any], pass_name: GalleryPass) -> Callable[..., Any]:
    """A pass as a function of `Work.arguments`: the outputs, and for "fwd+bwd" also the gradients by name."""

    def forward(floating: dict[str, Any], others: dict[str, Any]) -> Any:
        return function(**floating, **others)

    def both(floating: dict[str, Any], others: dict[str, Any], cotangent: Any) -> tuple[Any, dict[str, Any]]:
        outputs, pull_back = jax.vjp(lambda floating: forward(floating, others), floating)
        return outputs, *pull_back(cotangent)

    return forward if pass_name == "fwd" else both


def begin(variant: Variant, sizes: Sizes, seed: int) -> Work:
    """Draw a variant's inputs and a cotangent of its outputs."""
    inputs = variant.make_inputs(jax.random.key(seed), sizes)
    outputs = jax.eval_shape(lambda: variant.scaled(**inputs))
    generator = np.random.default_rng(seed)

    def draw(like: Any) -> jax.Array:
        return jnp.asarray(generator.standard_normal(like.shape, np.float32), like.dtype)

    return Work(variant, inputs, jax.tree.map(draw, outputs))


def trace(work: Work, whose: Whose, implementation: str, target: Target | None = None) -> list[Any]:
    """Trace both passes, fused by `implementation` or as the function stands; returns what they launch on a target."""
    function = work.variant.scaled
    if whose == "ours":
        function = fuse(function, implementation=implementation)
    specs: dict[Any, None] = {}
    for pass_name in PASSES:
        traced = jax.jit(pass_of(function, pass_name)).trace(*work.arguments(pass_name))
        work.traced[whose, pass_name] = traced
        collect_specs(traced.jaxpr.jaxpr, specs, target)
    return list(specs)


def compile_pass(work: Work, whose: Whose, pass_name: GalleryPass) -> None:
    """Compile a traced pass."""
    compiled = work.traced.pop((whose, pass_name)).lower().compile()
    memory = compiled.memory_analysis()
    extra, outputs = None, 0
    if memory is not None:
        extra = max(0, int(memory.temp_size_in_bytes) - address_table_bytes(compiled.as_text() or ""))
        outputs = int(memory.output_size_in_bytes)
    work.programs[whose, pass_name] = Compiled(compiled, extra, outputs)


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

    results = jax.eval_shape(exact_pass, *arguments)
    work.judge = jax.jit(judge).lower(arguments, results).compile()


def _named(outputs: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    named = {f"output {i}": x for i, x in enumerate(jax.tree.leaves(outputs))}
    return named | {f"gradient of {name}": x for name, x in gradients.items()}


def _distance(result: jax.Array, exact: jax.Array) -> jax.Array:
    """||result - exact|| / ||exact||, and ||result|| where the exact one is 0."""
    size = jnp.linalg.norm(exact.ravel())
    difference = jnp.linalg.norm((result.astype(exact.dtype) - exact).ravel())
    return difference / jnp.where(size == 0, 1.0, size)
