"""Small calls of every kernel family, in groups that run in one process each, for `sanitize.py`.

A call computes the same results by kernels on a GPU and without them on the CPU. The comparison is loose and only shows
that the call worked. The tests of each operation compare exactly.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

GPU = "cuda:0"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operation, forward and backward if it has derivatives.

    Attributes:
        name: its name in the family.
        compute: returns the results for an implementation (JAX) or a device (torch).
        kernels: the argument of `compute` that selects the kernels.
        expected: the argument of `compute` for the expected results.
        plain: the argument of `compute` for a computation without the library, for calls with results that are 0 but
            for rounding.
    """

    name: str
    compute: Callable[[str], Sequence[Any]]
    kernels: str = "triton"
    expected: str = "xla"
    plain: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """Calls that run in one process.

    Attributes:
        calls: returns the calls, and imports what they need.
        framework: the framework that launches the kernels, "torch" or "jax".
    """

    calls: Callable[[], Iterator[Call]]
    framework: str


def _jitted(function: Callable[..., Any], *operands: Any) -> list[Any]:
    """Return the leaves of a compiled function's results."""
    return jax.tree.leaves(jax.jit(function)(*operands))


# --- Block-diagonal attention ---------------------------------------------------------------------------------------

_BLOCK_DIAGONAL = (
    "full tiles",
    "full tiles, heads of 64",
    "full tiles, causal fp16",
    "partial tiles",
    "grouped",
    "grouped, packed, causal",
    "windows",
    "half-split",
    "interleaved, heads of 64",
    "rotary, packed, explicit",
    "rotary, packed, per token, bf16 tables",
    "rotary, grouped, packed",
    "blocks of 7, heads of 8",
    "blocks of 100, heads of 96",
    "blocks of 256",
    "blocks of 200, rotary",
    "heads of 256, rotary",
    "float32, packed, rotary",
)
_LONG_BLOCKS = ("blocks of 512, grouped, causal", "ragged to 2000, grouped, causal", "blocks of 700, packed, rotary")


def _block_diagonal_call(name: str, case: Any, kernels: str = "triton") -> Call:
    from tests.support import value_and_gradients

    def compute(implementation: str) -> list[Any]:
        return _jitted(functools.partial(value_and_gradients, case.attend(implementation)), *case.operands())

    return Call(name, compute, kernels)


def _block_diagonal() -> Iterator[Call]:
    from tests.gpu.test_block_diagonal_on_gpu import CASES

    for name in (*_BLOCK_DIAGONAL, *_LONG_BLOCKS):
        yield _block_diagonal_call(name, CASES[name])


def _pallas() -> Iterator[Call]:
    from tests.gpu.test_block_diagonal_on_gpu import CASES

    for name in ("full tiles", "full tiles, causal fp16", "grouped", "full tiles, heads of 64"):
        yield _block_diagonal_call(name, CASES[name], "pallas")


def _block_diagonal_torch() -> Iterator[Call]:
    from tests.gpu.test_block_diagonal_on_gpu import CASES
    from tests.torch import torch_support

    for name in (*_BLOCK_DIAGONAL, *_LONG_BLOCKS):
        yield Call(name, functools.partial(torch_support.results_of, CASES[name]), GPU, "cpu")


def _projection_torch() -> Iterator[Call]:
    import torch

    from blockdiag.torch import fused_qkv_block_attention
    from tests.torch.torch_support import to_tensor, value_and_gradients

    generator = np.random.default_rng(0)
    shapes = (2, 150, 64), (64, 12 * 64), (12 * 64,), (2, 150, 8, 64)
    arrays = [generator.normal(size=shape).astype(np.float32) / 8 for shape in shapes]
    function = functools.partial(fused_qkv_block_attention, query_heads=8, key_heads=2, head_dim=64)

    def compute(device: str) -> list[Any]:
        return value_and_gradients(function, *(to_tensor(x, device).to(torch.bfloat16) for x in arrays))

    yield Call("projection", compute, GPU, "cpu")


# --- MoBA -------------------------------------------------------------------------------------------------------------


def _moba_cases() -> dict[str, Any]:
    from tests.ops.moba_cases import MoBACase

    tile = {"head_dim": 128, "dtype": "bfloat16", "block_size": 128}
    return {
        "batch": MoBACase(lengths=(700, 700), top_k=3, **tile),
        "heads of 64, float16": MoBACase(lengths=(500,), head_dim=64, dtype="float16", block_size=64, top_k=4),
        "grouped, packed": MoBACase(
            lengths=(300, 0, 1, 513, 128), layout="offsets", padding=70, query_heads=8, key_heads=2, top_k=3, **tile
        ),
        "packed, other keys, masked": MoBACase(
            lengths=(7, 5, 0, 300), key_lengths=(400, 0, 9, 333), layout="offsets", padding=3, mask=0.3, **tile
        ),
        "not causal": MoBACase(lengths=(200, 200), key_lengths=(600, 600), is_causal=False, top_k=2, **tile),
        "many blocks": MoBACase(lengths=(1500,), head_dim=64, dtype="bfloat16", block_size=16, top_k=8),
        "long sequence": MoBACase(lengths=(8200,), head_dim=64, dtype="float16", block_size=16, top_k=4),
        "blocks of 512": MoBACase(lengths=(1100,), head_dim=128, dtype="bfloat16", block_size=512, top_k=2),
        "heads of 256": MoBACase(lengths=(300,), head_dim=256, dtype="bfloat16", block_size=64, top_k=3),
        "float32": MoBACase(lengths=(200,), head_dim=64, block_size=32, query_heads=4, mask=0.2),
        "own block only": MoBACase(lengths=(300,), top_k=1, **tile),
    }


def _moba() -> Iterator[Call]:
    from tests.ops.moba_cases import value_and_gradients

    for name, case in _moba_cases().items():

        def compute(implementation: str, case: Any = case) -> list[Any]:
            return _jitted(functools.partial(value_and_gradients, case.attend(implementation)), *case.operands())

        def route(implementation: str, case: Any = case) -> list[Any]:
            return [jax.jit(case.route(implementation))(*case.operands()[:2]).indices]

        yield Call(name, compute)
        yield Call(f"{name}, routing", route)


def _moba_torch() -> Iterator[Call]:
    from tests.torch import moba_torch_support

    def edited(case: Any, device: str) -> list[Any]:
        """Attend with a routing that has some blocks that are not the best, and lacks some own blocks."""
        routing = moba_torch_support.route(case)(*moba_torch_support.tensors_of(case)[:2])
        indices = np.random.default_rng(3).integers(-2, routing.num_blocks + 2, routing.indices.shape, dtype=np.int32)
        given = dataclasses.replace(routing, indices=moba_torch_support.to_tensor(indices, device))
        return moba_torch_support.results_of(case, device, routing=given)

    for name, case in _moba_cases().items():
        yield Call(name, functools.partial(moba_torch_support.results_of, case), GPU, "cpu")
        if name in ("batch", "packed, other keys, masked", "heads of 256"):
            yield Call(f"{name}, given routing", functools.partial(edited, case), GPU, "cpu")


# --- Key convolution ------------------------------------------------------------------------------------------------


def _key_convolution() -> Iterator[Call]:
    from tests.gpu.test_key_convolution_on_gpu import CASES
    from tests.support import value_and_gradients

    for name, case in CASES.items():

        def compute(implementation: str, case: Any = case) -> list[Any]:
            return _jitted(functools.partial(value_and_gradients, case.convolve(implementation)), *case.operands())

        yield Call(name, compute)


def _key_convolution_torch() -> Iterator[Call]:
    from blockdiag.torch import key_convolution
    from tests.gpu.test_key_convolution_on_gpu import CASES
    from tests.torch.torch_support import to_tensor, value_and_gradients

    for name, case in CASES.items():

        def compute(device: str, case: Any = case) -> list[Any]:
            options = {
                option: to_tensor(x, device) if isinstance(x, (jax.Array, np.ndarray)) else x
                for option, x in case.options.items()
            }
            operands = (to_tensor(x, device) for x in case.operands())
            return value_and_gradients(functools.partial(key_convolution, **options), *operands)

        yield Call(name, compute, GPU, "cpu")


# --- Caches in pages ------------------------------------------------------------------------------------------------


def _paged() -> Iterator[Call]:
    from blockdiag import paged_attention
    from tests.gpu.test_paged_on_gpu import CASES

    for name, case in CASES.items():

        def compute(implementation: str, case: Any = case) -> list[Any]:
            arguments = case.arguments()
            arrays = {key: x for key, x in arguments.items() if isinstance(x, jax.Array)}
            options = {key: x for key, x in arguments.items() if key not in arrays}
            splits = {"split_size": case.split_size} if case.split_size else {"num_splits": case.num_splits}
            function = functools.partial(
                paged_attention, **options, **splits, implementation=implementation, return_residual=True
            )
            return _jitted(lambda arrays: function(**{"page_table": None} | arrays), arrays)

        yield Call(name, compute)
    for name, case in _prompt_cases().items():

        def compute_prompts(implementation: str, case: Any = case) -> list[Any]:
            arguments = case.arguments()
            arrays = {key: x for key, x in arguments.items() if isinstance(x, jax.Array)}
            options = {key: x for key, x in arguments.items() if key not in arrays}
            function = functools.partial(
                paged_attention, **options, implementation=implementation, return_residual=True
            )
            with _prompts_apart():
                return _jitted(lambda arrays: function(**{"page_table": None} | arrays), arrays)

        yield Call(f"prompts, {name}", compute_prompts)


def _prompt_cases() -> dict[str, Any]:
    from tests.ops.paged_support import PROMPT_CASES

    names = (
        "bfloat16, pages of 16",
        "heads of 256, pages of 3",
        "window, sinks, soft cap, heads of 64",
        "scales",
        "e4m3, many chunks, all keys",
        "e4m3, scales by token, group of 6",
    )
    return {name: PROMPT_CASES[name] for name in names}


def _prompts_apart() -> Any:
    """Return a context in which prompts are computed apart from other sequences however few they are."""
    from blockdiag.ops.paged import checks

    return mock.patch.object(checks, "FEWEST_PROMPT_ROWS", 0)


def _paged_torch() -> Iterator[Call]:
    from tests.gpu.test_paged_torch_on_gpu import CASES
    from tests.torch import paged_torch_support

    for name, case in CASES.items():
        if not case.is_latent:
            yield Call(name, functools.partial(paged_torch_support.results_of, case), GPU, "cpu")
    for name, case in _prompt_cases().items():

        def compute(device: str, case: Any = case) -> Any:
            from blockdiag.torch import paged_attention

            arguments, _ = paged_torch_support.packed_arguments_of(case, device)
            with _prompts_apart():
                return paged_attention(**arguments | {"num_splits": None}, return_residual=True)

        yield Call(f"prompts, {name}", compute, GPU, "cpu")


def _latent_torch() -> Iterator[Call]:
    from tests.gpu.test_paged_torch_on_gpu import CASES
    from tests.torch import paged_torch_support

    for name, case in CASES.items():
        if case.is_latent:
            yield Call(name, functools.partial(paged_torch_support.results_of, case), GPU, "cpu")


def _append() -> Iterator[Call]:
    from tests.ops.append.test_append import CASES

    for name, case in CASES.items():

        def compute(implementation: str, case: Any = case) -> list[Any]:
            return jax.tree.leaves(jax.jit(case.append(implementation))(**case.arguments()))

        yield Call(name, compute)


def _append_torch() -> Iterator[Call]:
    from blockdiag.torch import append_to_pages
    from tests.ops.append.test_append import CASES
    from tests.torch.test_append import arguments_of

    for name, case in CASES.items():

        def compute(device: str, case: Any = case) -> Sequence[Any]:
            return append_to_pages(**arguments_of(case, case.arguments(), device))

        yield Call(name, compute, GPU, "cpu")


def _moba_paged_cases() -> dict[str, Any]:
    from tests.ops.moba_paged.test_moba_paged import CASES, MANY_BLOCKS
    from tests.ops.moba_paged.test_prompts import CASES as PROMPTS

    cases = {name: case for name, case in CASES.items() if name != "float64"} | {"many blocks": MANY_BLOCKS}
    return cases | {f"prompts, {name}": case for name, case in PROMPTS.items()}


def _moba_paged() -> Iterator[Call]:
    from blockdiag import moba_paged_attention

    for name, case in _moba_paged_cases().items():
        # Arguments are created before the call is traced; otherwise the case would store traced values.
        def compute(implementation: str, case: Any = case, arguments: Any = case.arguments) -> list[Any]:
            options = dict(block_size=case.block_size, top_k=case.top_k, scale=case.paged.scale, return_residual=True)
            function = functools.partial(moba_paged_attention, **options, implementation=implementation)
            return _jitted(lambda arguments: function(**arguments), arguments)

        yield Call(name, compute)


def _moba_paged_torch() -> Iterator[Call]:
    from blockdiag.torch import moba_paged_attention
    from tests.torch.test_moba_paged import arguments_of

    for name, case in _moba_paged_cases().items():

        def compute(device: str, case: Any = case) -> Sequence[Any]:
            return moba_paged_attention(**arguments_of(case, device), return_residual=True)

        yield Call(name, compute, GPU, "cpu")


# --- Generated kernels ------------------------------------------------------------------------------------------------


def _with_gradients(function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    """Return outputs, and gradients of the floating-point arguments."""
    places = [i for i, x in enumerate(given) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)]

    def of_floating(*floating: Any) -> Any:
        arguments = list(given)
        for place, x in zip(places, floating, strict=True):
            arguments[place] = x
        return function(*arguments)

    def compute(*floating: Any) -> Any:
        outputs, pull_back = jax.vjp(of_floating, *floating)
        cotangents = jax.tree.map(lambda x: jnp.cos(3 * x.astype(jnp.float32)).astype(x.dtype), outputs)
        return outputs, pull_back(cotangents)

    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        return _jitted(compute, *(given[i] for i in places))


def _fused_call(
    name: str, function: Callable[..., Any], given: Callable[[], Sequence[Any]], plain: str | None = None
) -> Call:
    from blockdiag import fuse

    def compute(implementation: str) -> list[Any]:
        fused = function if implementation == plain else fuse(function, implementation=implementation)
        return _with_gradients(fused, given())

    return Call(name, compute, plain=plain)


def _fused_by_name(
    name: str, function: Callable[..., Any], given: Callable[[], dict[str, Any]], plain: str | None = None
) -> Call:
    """Return the call of a fused function with named arguments."""
    names = list(given())
    return _fused_call(
        name,
        lambda *arrays: function(**dict(zip(names, arrays, strict=True))),
        lambda: list(given().values()),
        plain,
    )


def _gallery(group: str) -> Iterator[Call]:
    from blockdiag.fusion.gallery import GROUPS, Sizes

    sizes = Sizes(rows=1, query_heads=2, key_heads=1, query_tokens=70, key_tokens=70, head_dim=32, value_dim=32)
    grouped = dataclasses.replace(sizes, query_heads=4, key_heads=2)
    for variant in GROUPS[group]:
        chosen = grouped if "grouped" in variant.name else dataclasses.replace(sizes, dtype="bfloat16")
        inputs = jax.tree.map(np.asarray, variant.make_inputs(jax.random.key(0), chosen))
        yield _fused_by_name(variant.name, variant.function, lambda inputs=inputs: inputs)


def _fused_forms() -> Iterator[Call]:
    from tests.fusion.passes import test_merge_sources as sources
    from tests.fusion.regions import test_feature_sums as features
    from tests.fusion.regions import test_log_sum_exps as log_sums

    for name, function in features.FORMS.items():
        yield _fused_call(f"features: {name}", function, lambda: features.arrays(*features.OPERANDS))
    for name, (function, *shapes) in log_sums.FUNCTIONS.items():
        given = functools.partial(log_sums.arrays, *[log_sums.OPERAND] * 3, *shapes)
        yield _fused_call(f"log-sums: {name}", function, given)
    for name in sources.FUNCTIONS:
        function, _ = sources.given_for(name)
        yield _fused_call(f"sources: {name}", function, lambda name=name: sources.given_for(name)[1])


def _fused_distances() -> Iterator[Call]:
    from tests.fusion.passes import test_random_bits as dropout
    from tests.fusion.regions import test_relative_positions as distances

    for name, (function, *rest) in distances.CASES.items():
        yield _fused_call(f"distances: {name}", function, lambda rest=rest: [*distances.operands(), *rest])
    for function in dropout.FUNCTIONS:

        def dropped(*inputs: Any, function: Any = function) -> Any:
            return function(*inputs, jax.random.key(5))

        yield _fused_call(f"dropout: {function.__name__}", dropped, dropout.operands)


def _resident(first: int) -> Iterator[Call]:
    from tests.fusion.resident_cases import CASES

    # These only run more rounds of the other cases, as "shared" does.
    left_out = ("many_rows", "many_wide_rows")
    names = [name for name, case in CASES.items() if case.stays and name not in left_out]
    for name in names[first::2]:
        # Adding a term to all scores of a row changes nothing, so the gradients of these terms are 0.
        plain = "plain" if name == "terms" else None
        yield _fused_by_name(name, CASES[name].function, CASES[name].inputs, plain)


def _streamed(first: int) -> Iterator[Call]:
    from tests.fusion.streamed_cases import CASES

    for name in [name for name, case in CASES.items() if case.streams][first::2]:
        yield _at_any_size(_fused_by_name(name, CASES[name].function, CASES[name].inputs))


def _at_any_size(call: Call) -> Call:
    """Return a call that uses the kernels of Hopper's schedules although it is small."""

    def compute(who: str) -> Sequence[Any]:
        from blockdiag.fusion.lowering import one_pass_schedule, streamed_schedule
        from tests.fusion.thresholds import lifted

        with lifted(one_pass_schedule, streamed_schedule):
            return call.compute(who)

    return dataclasses.replace(call, compute=compute)


def _one_pass() -> Iterator[Call]:
    from tests.fusion.one_pass_cases import CASES

    for name in ("narrow", "causal", "documents", "soft_cap", "grouped", "wide_causal"):
        yield _at_any_size(_fused_by_name(f"one_pass_{name}", CASES[name].function, CASES[name].inputs))


def _fused_torch() -> Iterator[Call]:
    from blockdiag.torch import fuse
    from tests.fusion.resident_cases import CASES as RESIDENT
    from tests.fusion.streamed_cases import CASES as STREAMED
    from tests.torch.torch_support import to_tensor

    for case, name in ((RESIDENT["evoformer"], "evoformer"), (STREAMED["causal"], "causal")):

        def compute(device: str, case: Any = case) -> list[Any]:
            import torch

            leaves = {key: to_tensor(x, device).requires_grad_() for key, x in case.inputs().items()}
            output = fuse(case.function)(**leaves)
            return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), torch.cos(3 * output))]

        yield _at_any_size(Call(name, compute, GPU, "cpu"))


def _false_alarms() -> Iterator[Call]:
    from tests.gpu_scripts import false_alarms

    for name, run in false_alarms.RUNS.items():

        def compute(device: str, run: Any = run) -> Sequence[Any]:
            return [run(device)]

        yield Call(name, compute, GPU, "cpu")


FAMILIES = {
    "block_diagonal": Family(_block_diagonal, "jax"),
    "block_diagonal_torch": Family(_block_diagonal_torch, "torch"),
    "projection_torch": Family(_projection_torch, "torch"),
    "pallas": Family(_pallas, "jax"),
    "moba": Family(_moba, "jax"),
    "moba_torch": Family(_moba_torch, "torch"),
    "key_convolution": Family(_key_convolution, "jax"),
    "key_convolution_torch": Family(_key_convolution_torch, "torch"),
    "paged": Family(_paged, "jax"),
    "paged_torch": Family(_paged_torch, "torch"),
    "latent_torch": Family(_latent_torch, "torch"),
    "append": Family(_append, "jax"),
    "append_torch": Family(_append_torch, "torch"),
    "moba_paged": Family(_moba_paged, "jax"),
    "moba_paged_torch": Family(_moba_paged_torch, "torch"),
    "fuse_masks": Family(functools.partial(_gallery, "Masks"), "jax"),
    "fuse_scores": Family(functools.partial(_gallery, "Scores and biases"), "jax"),
    "fuse_structures": Family(functools.partial(_gallery, "Structures"), "jax"),
    "fuse_sums": Family(functools.partial(_gallery, "Sums and grids"), "jax"),
    "fuse_forms": Family(_fused_forms, "jax"),
    "fuse_distances": Family(_fused_distances, "jax"),
    "fuse_resident_1": Family(functools.partial(_resident, 0), "jax"),
    "fuse_resident_2": Family(functools.partial(_resident, 1), "jax"),
    "fuse_streamed_1": Family(functools.partial(_streamed, 0), "jax"),
    "fuse_streamed_2": Family(functools.partial(_streamed, 1), "jax"),
    "fuse_one_pass": Family(_one_pass, "jax"),
    "fuse_torch": Family(_fused_torch, "torch"),
    "false_alarms": Family(_false_alarms, "torch"),
}


def to_numpy(result: Any) -> np.ndarray:
    """Return a result of either framework as a NumPy array, with floats in float32."""
    if not isinstance(result, (jax.Array, np.ndarray)):
        from tests.torch import torch_support

        result = torch_support.to_numpy(result)
    array = np.asarray(result)
    return array if array.dtype.kind in "iub" else array.astype(np.float32)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return how far two results differ.

    For floats this is the norm of the difference over the norm of the expected result, over finite elements. For
    integers it is the fraction that differs. It is infinite if the shapes or the places of non-finite elements differ.
    """
    if found.shape != expected.shape:
        return float("inf")
    if found.dtype.kind in "iub":
        return float((found != expected).mean()) if found.size else 0.0
    is_finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(found), is_finite):
        return float("inf")
    found, expected = found[is_finite].astype(np.float64), expected[is_finite].astype(np.float64)
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)) if found.size else 0.0


def launched_kernels(call: Call, arch: int) -> set[str]:
    """Return the names of the kernels that a JAX call launches on an architecture, without a GPU."""
    from blockdiag.interop import compile_target
    from blockdiag.interop.jax_call import launch_p
    from blockdiag.triton_kernels.launch.plan import Target

    target = Target.for_arch(arch)
    names: set[str] = set()

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive is launch_p:
                names.add(_kernel_name(equation.params["spec"].plan(target)))
            for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(part):
                    visit(getattr(part, "jaxpr", part))

    with compile_target(arch):
        visit(jax.make_jaxpr(lambda: call.compute(call.kernels))().jaxpr)
    return names


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _kernel_name(plan: Any) -> str:
    """Return the name of the function in the source; for a generated kernel, the name of the plan."""
    return plan.kernel.fn.__name__ if hasattr(plan.kernel, "fn") else plan.name
