"""A primitive that selects one of two functions by target GPU at lowering time, so tracing queries no device."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir, xla

from blockdiag.interop.targets import overriding_target, session_target
from blockdiag.triton_kernels.launch.plan import Target

type Function = Callable[..., Sequence[Any]]


def by_target(choose: Callable[[Target], bool], chosen: Function, other: Function, *arrays: Any) -> list[Any]:
    """Return the results of one of two functions, selected by the target at lowering time.

    The call has no derivative and no batching rule.

    Args:
        choose: predicate of the target that selects `chosen`; hashable.
        chosen, other: functions that return the same shapes and dtypes. Platforms other than CUDA run `other`.
        *arrays: operands of both functions.

    Raises:
        TypeError: the functions return arrays of different shapes or dtypes.
    """
    jaxprs = tuple(jax.make_jaxpr(function)(*arrays) for function in (chosen, other))
    return by_target_p.bind(*arrays, jaxprs=jaxprs, choose=choose, target=overriding_target())


by_target_p = core.Primitive("blockdiag_by_target")
by_target_p.multiple_results = True
by_target_p.def_impl(functools.partial(xla.apply_primitive, by_target_p))


@by_target_p.def_abstract_eval
def _type(*avals: Any, jaxprs: tuple[core.ClosedJaxpr, ...], **_: Any) -> list[Any]:
    del avals
    first, second = ([str(x) for x in jaxpr.out_avals] for jaxpr in jaxprs)
    if first != second:
        raise TypeError(f"both functions must return the same shapes and dtypes, got {first} and {second}")
    return jaxprs[0].out_avals


def _raise(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("wrap `by_target` in jax.custom_vjp and jax.custom_batching.custom_vmap")


ad.primitive_jvps[by_target_p] = _raise
batching.primitive_batchers[by_target_p] = _raise


def chosen_jaxpr(lowered_for: Target | None, *, jaxprs: Any, choose: Any, target: Target | None) -> Any:
    """Return the jaxpr to lower for `lowered_for`, which is None on platforms other than CUDA."""
    if lowered_for is None:
        return jaxprs[1]
    return jaxprs[0 if choose(target or lowered_for) else 1]


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower_jaxpr(ctx, operands, chosen_jaxpr(None, **params))


def _lower_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower_jaxpr(ctx, operands, chosen_jaxpr(params["target"] or session_target(), **params))


def _lower_jaxpr(ctx: Any, operands: Sequence[Any], jaxpr: core.ClosedJaxpr) -> Any:
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


mlir.register_lowering(by_target_p, _lower)
mlir.register_lowering(by_target_p, _lower_cuda, platform="cuda")
