"""The exchange of tokens for heads ("ulysses"): attention over whole sequences of each device's heads.

Heads move in groups, so that transfers overlap with computation: while one group is computed, the next one arrives and
the results of the previous one leave. Only the first arrivals and the last departures have nothing large to overlap
with. They are ordered, so that they overlap with each other's copies and with the steps that need only some of the
operands. The backward pass is the same pipeline of cotangents and gradients.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.context_parallel import run_together
from blockdiag.common.context_sizes import choose_groups
from blockdiag.common.dtypes import accumulation_dtype

# query [.., T, n, H], keys [.., T, k, H] each, other operands, what is prepared: to a tuple of results [.., T, n, ..]
type Compute = Callable[[Array, list[Array], Any, Any], tuple[Array, ...]]
type Prepare = Callable[[Array, Array, Any], Any]


def _prepare_nothing(query: Array, key: Array, others: Any) -> tuple[()]:
    del query, key, others
    return ()


def exchange(
    axis: str,
    compute: Compute,
    query: Array,
    keys: Sequence[Array],
    others: Any = (),
    *,
    prepare: Prepare = _prepare_nothing,
) -> tuple[Array, ...]:
    """Run attention over whole sequences of each device's heads, between exchanges of tokens for heads.

    A group consists of key heads and their query heads. If a device has one key head, a group consists of query heads
    alone, and the key head moves once. If there are fewer key heads than devices, several devices have the same key
    head. Gradients of a key head that is used several times are added in float32.

    Args:
        axis: name of the mesh axis, which must be manual here.
        compute: maps a device's heads over whole sequences, query [.., T, n, H] and keys [.., T, k, H], `others` and
            the result of `prepare` to a tuple of results [.., T, n, ..]. It must not close over traced arrays.
        query: [.., t, N, H], the device's tokens.
        keys: [.., t, K, H] each. K is a multiple or a divisor of the number of devices, N is a multiple.
        others: other operands of `compute`, a tree of arrays that do not move. Gradients of groups are added.
        prepare: the part of the computation that needs no values: maps a group's query, the first of its keys and
            `others` to a tree of arrays, which have no gradients. The first group's values arrive meanwhile.

    Returns:
        The results for the device's tokens and all heads.
    """
    devices = jax.lax.axis_size(axis)
    if devices == 1:
        return compute(query, list(keys), others, prepare(query, keys[0], others))
    keys = [_repeat_heads(x, max(devices // x.shape[-2], 1)) for x in keys]
    has_shared_keys = keys[0].shape[-2] == devices
    groups = choose_groups((query if has_shared_keys else keys[0]).shape[-2], devices)
    plan = _Exchange(axis, devices, groups, query.ndim - 3, has_shared_keys)
    return _exchange(plan, compute, prepare, query, keys, others)


@dataclass(frozen=True)
class _Exchange:
    """Shapes of an exchange: the devices, and the groups that heads move in.

    Attributes:
        axis: name of the mesh axis.
        devices: number of devices along it.
        groups: number of groups that heads move in.
        tokens: position of the token axis of every array; the head axis follows.
        has_shared_keys: whether all groups use the same keys, which move once.
    """

    axis: str
    devices: int
    groups: int
    tokens: int
    has_shared_keys: bool

    def split_heads(self, x: Array, groups: int) -> list[Array]:
        """Split [.., t, N, ..] into the parts of the devices, [devices, .., t, n, ..] for each group.

        The first group is copied by itself, so that its transfer need not wait for the copies of the others.
        """
        heads = self.tokens + 1

        def part(x: Array, group: int) -> Array:
            x = x.reshape(*x.shape[:heads], self.devices, groups, -1, *x.shape[heads + 1 :])
            return jnp.moveaxis(jax.lax.index_in_dim(x, group, heads + 1, keepdims=False), heads, 0)

        first = part(x, 0)
        if groups == 1:
            return [first]
        first, x = jax.lax.optimization_barrier((first, x))
        return [first, *(part(x, i) for i in range(1, groups))]

    def with_last_missing(self, groups: Sequence[Array]) -> Array | None:
        """Join the heads of all groups but the last, [devices, .., t, n, ..] each, to [.., t, N, ..].

        The place of the last group is left free, so that this copy need not wait for it; see `with_last`.
        """
        if not groups:
            return None
        heads = self.tokens + 1
        # Any array may fill the place.
        whole = jnp.moveaxis(jnp.stack([*groups, groups[-1]], heads + 1), 0, heads)
        # The reshape makes XLA sort the heads here, and not after the last group.
        return whole.reshape(*whole.shape[:heads], -1, *whole.shape[heads + 3 :])

    def with_last(self, early: Array | None, last: Array) -> Array:
        """Add the last group's heads [devices, .., t, n, ..] to the others, and return [.., t, N, ..]."""
        heads = self.tokens + 1
        whole = jnp.expand_dims(jnp.moveaxis(last, 0, heads), heads + 1)
        if early is not None:
            early = early.reshape(*whole.shape[: heads + 1], self.groups, *whole.shape[heads + 2 :])
            # XLA would turn an update at a constant index into a copy of the whole array.
            place = jax.lax.optimization_barrier(jnp.int32(self.groups - 1))
            whole = jax.lax.dynamic_update_slice_in_dim(early, whole, place, heads + 1)
        return whole.reshape(*whole.shape[:heads], -1, *whole.shape[heads + 3 :])

    def join_tokens(self, x: Array) -> Array:
        """Reshape [devices, .., t, n, ..] to whole sequences, [.., T, n, ..]."""
        x = jnp.moveaxis(x, 0, self.tokens)
        return x.reshape(*x.shape[: self.tokens], -1, *x.shape[self.tokens + 2 :])

    def split_tokens(self, x: Array) -> Array:
        """Reshape whole sequences [.., T, n, ..] to the parts of the devices, [devices, .., t, n, ..]."""
        x = x.reshape(*x.shape[: self.tokens], self.devices, -1, *x.shape[self.tokens + 1 :])
        return jnp.moveaxis(x, self.tokens, 0)

    def swap(self, arrays: Sequence[Array]) -> list[Array]:
        """Send each device its part of arrays [devices, ..], and return the parts that the devices send to this one."""
        return run_together(self.axis, lambda arrays: [jax.lax.all_to_all(x, self.axis, 0, 0) for x in arrays], arrays)


@dataclass
class _Moving:
    """An array that moves between devices.

    Attributes:
        array: an operand [.., t, N, ..], the device's tokens of all heads, or a result [.., T, n, ..], whole sequences
            of a group's heads.
        is_shared: whether all groups use the operand; of a result, whether it is to be added up over all groups.
    """

    array: Array
    is_shared: bool = False


def _run(
    plan: _Exchange,
    operands: Sequence[_Moving],
    step: Callable[[list[Array], Any], list[_Moving]],
    prepare: Callable[[list[Array]], Any] = lambda here: (),
) -> list[Array]:
    """Run a step for each group of heads, between exchanges.

    Args:
        plan: how arrays move.
        operands: in the order in which the step needs them.
        step: maps operands, whole sequences [.., T, n, ..] of a group's heads, and the result of `prepare` to results,
            in the order in which they are ready.
        prepare: maps all operands of a group but the last to what the step needs of them first.

    Returns:
        The results for the device's tokens and all heads, [.., t, N, ..].
    """
    barrier = jax.lax.optimization_barrier
    split = [plan.split_heads(x.array, 1 if x.is_shared else plan.groups) for x in operands]
    moves = [i for i, x in enumerate(operands) if not x.is_shared]
    # The first group's operands arrive one after another, so that the step can begin before all of them are here. While
    # one arrives, the other groups of the one before are copied. Without barriers XLA would run all exchanges first.
    here: list[Array] = []
    for i, (sending, *_) in enumerate(split):
        if i:
            here[-1], sending, split[i - 1] = barrier((here[-1], sending, split[i - 1]))
        here += plan.swap([sending])
    last, leaving, results = [len(here) - 1], list[Array](), list[_Moving]()
    totals: dict[int, Array] = {}
    returned: dict[int, list[Array]] = {}
    for group in range(plan.groups):
        prepared = prepare([plan.join_tokens(x) for x in here[:-1]])
        following = [split[i][group + 1] for i in moves if group + 1 < plan.groups]
        # While this group is computed, the next one arrives and the results of the previous one leave, in one call. It
        # does not begin before this group has arrived. The first group is prepared before its last operand is here.
        arrived, sending, ready = barrier(([here[i] for i in last], [*following, *leaving], () if group else prepared))
        prepared = prepared if group else ready
        for i, x in zip(last, arrived, strict=True):
            here[i] = x
        moved = plan.swap(sending)
        for own, x in zip(returned.values(), moved[len(following) :], strict=False):
            own.append(x)
        results = step([plan.join_tokens(x) for x in here], prepared)
        for i, x in enumerate(results):
            if x.is_shared:
                wide = x.array.astype(accumulation_dtype(x.array.dtype))
                totals[i] = totals[i] + wide if i in totals else wide
            else:
                returned.setdefault(i, [])
        leaving = [plan.split_tokens(x.array) for x in results if not x.is_shared]
        for i, x in zip(moves, moved, strict=False):
            here[i] = x
        last = moves
    final = [totals[i].astype(x.array.dtype) if x.is_shared else x.array for i, x in enumerate(results)]
    return _leave(plan, [plan.split_tokens(x) for x in final], [returned.get(i, []) for i in range(len(final))])


def _leave(plan: _Exchange, leaving: Sequence[Array], returned: Sequence[Sequence[Array]]) -> list[Array]:
    """Exchange the last group's results, and join them with those of the earlier groups.

    Results leave one after another. The first one leaves while the others are computed; while another one leaves, the
    heads of the one before are copied to their places. Earlier heads of the last one are copied while it leaves.
    """
    barrier = jax.lax.optimization_barrier
    # Earlier results must have left before. Otherwise XLA sends them at the end, when nothing is left to compute.
    first, returned = barrier((leaving[0], returned))
    leaving, returned, whole = [first, *leaving[1:]], list(returned), list[Array]()
    (arrived,) = plan.swap(leaving[:1])
    for i in range(1, len(leaving)):
        # A result is not sent, and no heads are copied, before the last transfer has ended: only computation may
        # overlap with the first one.
        arrived, leaving[i:], returned[i - 1 :], whole = barrier((arrived, leaving[i:], returned[i - 1 :], whole))
        moved = plan.swap(leaving[i : i + 1])
        whole.append(plan.with_last(plan.with_last_missing(returned[i - 1]), arrived))
        (arrived,) = moved
    early = plan.with_last_missing(returned[-1])
    arrived, early, whole = barrier((arrived, early, whole))
    # Otherwise XLA would copy all heads again for each use of the result, and not add the last group in place.
    return [*whole, barrier(plan.with_last(early, arrived))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchange(
    plan: _Exchange, compute: Compute, prepare: Prepare, query: Array, keys: Sequence[Array], others: Any
) -> tuple[Array, ...]:
    def step(here: list[Array], prepared: Any) -> list[_Moving]:
        key, query, *values = here
        return [_Moving(x) for x in compute(query, [key, *values], others, prepared)]

    return tuple(_run(plan, _operands(plan, query, keys), step, _prepare_group(prepare, others)))


def _operands(plan: _Exchange, query: Array, keys: Sequence[Array]) -> list[_Moving]:
    """Return query and keys in the order in which attention needs them: MoBA chooses before it reads values."""
    key, *values = (_Moving(x, plan.has_shared_keys) for x in keys)
    return [key, _Moving(query), *values]


def _prepare_group(prepare: Prepare, others: Any) -> Callable[[list[Array]], Any]:
    """Return a function of a group's operands in the order of `_operands`, without the last one."""
    return lambda here: prepare(here[1], here[0], others)


def _exchange_forward(
    plan: _Exchange, compute: Compute, prepare: Prepare, query: Array, keys: Sequence[Array], others: Any
) -> tuple[tuple[Array, ...], list[Any]]:
    pull_backs = []

    def step(here: list[Array], prepared: Any) -> list[_Moving]:
        key, query, *values = here

        def prepared_compute(query: Array, keys: list[Array], others: Any) -> tuple[Array, ...]:
            return compute(query, keys, others, prepared)

        results, pull_back = jax.vjp(prepared_compute, query, [key, *values], others)
        pull_backs.append(pull_back)
        return [_Moving(x) for x in results]

    return tuple(_run(plan, _operands(plan, query, keys), step, _prepare_group(prepare, others))), pull_backs


def _exchange_backward(
    plan: _Exchange, compute: Compute, prepare: Prepare, pull_backs: list[Any], cotangents: tuple[Array, ...]
) -> tuple[Array, list[Array], Any]:
    del compute, prepare
    waiting, others = iter(pull_backs), []

    def step(here: list[Array], _: Any) -> list[_Moving]:
        d_query, d_keys, d_others = next(waiting)(tuple(here))
        others.append(d_others)
        # Gradients of queries are added up last.
        return [*(_Moving(x, plan.has_shared_keys) for x in d_keys), _Moving(d_query)]

    *d_keys, d_query = _run(plan, [_Moving(x) for x in cotangents], step)
    return d_query, d_keys, jax.tree.map(_add, *others)


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _add(*gradients: Any) -> Any:
    """Add up gradients in float32. Gradients of integers have no value."""
    first = gradients[0]
    if first.dtype == jax.dtypes.float0:
        return first
    total = functools.reduce(jnp.add, (x.astype(accumulation_dtype(first.dtype)) for x in gradients))
    return total.astype(first.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_each_use(x: Array, uses: int) -> tuple[Array, ...]:
    """Return an array once for each use; the gradients of the uses are added in float32."""
    return (x,) * uses


def _add_uses(uses: int, _: None, cotangents: tuple[Array, ...]) -> tuple[Array]:
    del uses
    return (_add(*cotangents),)


_for_each_use.defvjp(lambda x, uses: (_for_each_use(x, uses), None), _add_uses)


def _repeat_heads(x: Array, count: int) -> Array:
    """Repeat each head `count` times: [.., K, H] to [.., K * count, H]."""
    if count == 1:
        return x
    return jnp.stack(_for_each_use(x, count), axis=x.ndim - 1).reshape(*x.shape[:-2], -1, x.shape[-1])
