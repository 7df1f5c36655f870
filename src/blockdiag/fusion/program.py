"""A call that is traced and analysed: its fused regions, the programs within loops and branches, and refusals."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.common.context_parallel import ContextParallel
from blockdiag.fusion.frontend.trace import aval_of, bind, body_of, flat_jaxpr, has_effects, hidden_attention, read
from blockdiag.fusion.ir.structural_hash import shared
from blockdiag.fusion.ir.tree import NotFusible, Region, Source, SymbolicSizes, unordered
from blockdiag.fusion.passes.canonicalise_exponentials import with_factors_inside
from blockdiag.fusion.passes.canonicalise_products import as_products, respelled
from blockdiag.fusion.passes.cond_to_select import with_chosen
from blockdiag.fusion.passes.defer_division import with_sums
from blockdiag.fusion.passes.index_maps import with_places
from blockdiag.fusion.passes.merge_contractions import with_merged_keys
from blockdiag.fusion.passes.merge_products import joined
from blockdiag.fusion.passes.merge_sources import with_sources
from blockdiag.fusion.passes.position_constants import with_positions
from blockdiag.fusion.passes.query_axis import with_query_axes
from blockdiag.fusion.passes.random_bits import drawn_by, with_counters
from blockdiag.fusion.passes.simplify import plain
from blockdiag.fusion.passes.sink_slices import taken_apart
from blockdiag.fusion.passes.squared_distances import with_products
from blockdiag.fusion.passes.table_lookups import read_rows, reads_rows
from blockdiag.fusion.passes.widen_operands import with_wide_operands
from blockdiag.fusion.regions.axis_labels import place_of, producers_of
from blockdiag.fusion.regions.diagnosis import diagnosis, softmax_in
from blockdiag.fusion.regions.log_sum_exps import Wanted, in_order
from blockdiag.fusion.regions.match import NoAttention, QueryWithoutAxis, regions_and_sides
from blockdiag.fusion.regions.materialise import with_made
from blockdiag.fusion.regions.nested_programs import CHECKPOINTS, OPENED, Inner, has_checkpoints, inner_of
from blockdiag.fusion.runtime import manual_context
from blockdiag.fusion.runtime.context_parallel import Sharing, attend_to_shared_tokens, sharing_of, whole_type
from blockdiag.fusion.runtime.manual_context import OwnParts, attend_to_own_tokens
from blockdiag.fusion.runtime.region_op import Call, attend, region_p
from blockdiag.fusion.runtime.token_axes import REMEDY, token_axes_of
from blockdiag.fusion.runtime.token_parts import check_program, check_results

type _Compute = Callable[[Region, bool, list[Any], Any], tuple[Any, Any]]
type _Bind = Callable[[core.JaxprEqn, list[Any]], list[Any]]


def _bind_outside(equation: core.JaxprEqn, given: list[Any]) -> list[Any]:
    """Return the results of an equation outside regions."""
    return [read_rows(equation, *given)] if reads_rows(equation) else bind(equation, given)


_REWRITES = (
    plain, with_chosen, with_wide_operands, with_factors_inside, respelled, taken_apart, with_sources, with_sums,
    with_merged_keys,
)  # fmt: skip
"""The passes, in the order in which they run; each returns None if it changes nothing."""


class Program:
    """Traced call with its fused regions.

    Attributes:
        jaxpr: the flat program.
        regions: the regions of each fused product, by the variable of its result.
        log_sums: the needed variables that regions compute as log-sum-exps beside their results.
        inner: loops, branches and checkpoints with attention, with their programs, by the first result of each.
        refused: why no attention was found outside these; None if some was found.
        arguments: the arrays of the call, or their shapes and dtypes.
        structure: the tree structure of the results.
        sharing: the devices that share tokens; None if each sequence is on one device.
    """

    sharing: Sharing | None = None
    is_ordered: bool = True

    def __init__(self, jaxpr: core.ClosedJaxpr, arguments: Sequence[Any], structure: Any) -> None:
        self.arguments = arguments
        self.structure = structure
        for rewrite in _REWRITES:
            jaxpr = rewrite(jaxpr) or jaxpr
        self._refusal = self._find(jaxpr)
        self.refused = None if self._refusal is None else str(self._refusal)
        self.inner = _inner_programs(self.jaxpr)
        if not self.regions and not self.inner and not any(x.primitive is region_p for x in jaxpr.jaxpr.eqns):
            raise self._refusal or _Nothing("there is no product with a softmax of scores")
        whole = with_made(self.jaxpr, self.all_regions())
        ordered, self.log_sums = in_order(whole.jaxpr, self.regions, lambda x: _needed(whole.jaxpr, self.regions, x))
        self.jaxpr = core.ClosedJaxpr(ordered, whole.consts)
        if self.regions and not self.needed() & {*self.regions, *self.inner}:
            raise _Unused(
                "the result of its attention is not used, but other values are computed from scores, such as "
                "derivatives: fuse the function that is differentiated"
            )

    def _find(self, jaxpr: core.ClosedJaxpr) -> NoAttention | None:
        """Find the attention of a flat program outside loops; return the refusal if there is none.

        A refusal is not final: a loop over layers may have attention, next to code that only resembles attention.
        """
        try:
            self._take_with_axes(jaxpr)
        except NoAttention as refusal:
            self.jaxpr, self.regions, self._sides = jaxpr, {}, {}
            return refusal
        self._place()
        drawn = drawn_by(self.jaxpr.jaxpr, self.all_regions())
        if drawn:
            self._take(with_counters(self.jaxpr, drawn))
        self._multiply_out()
        wide = joined(self.jaxpr, self._sides)
        if wide is not None:
            self._take(wide)
        return None

    def _take_with_axes(self, jaxpr: core.ClosedJaxpr) -> None:
        """Take a program; if queries lack a token axis, insert one."""
        try:
            self._take(jaxpr)
        except QueryWithoutAxis as refusal:
            with_axes = with_query_axes(jaxpr, refusal.products)
            if with_axes is None:
                raise
            self._take(with_axes)

    def _take(self, jaxpr: core.ClosedJaxpr) -> None:
        self.jaxpr = jaxpr
        self.regions, self._sides = regions_and_sides(jaxpr.jaxpr)

    def _place(self) -> None:
        """Rewrite sliced or concatenated masks as functions of positions, if tiles can then compute them.

        The rewrite is kept if regions read fewer arrays of queries by keys and none is lost.
        """
        before, pairs, count = self.jaxpr, _pairs(self.all_regions()), len(self.regions)
        found = with_places(before, self.all_regions())
        if found is None:
            return
        try:
            self._take(found)
            is_better = len(self.regions) >= count and _pairs(self.all_regions()) < pairs
        except NotFusible:
            is_better = False
        if not is_better:
            self._take(before)

    def all_regions(self) -> list[Region]:
        """Return the regions of all products."""
        return [region for found in self.regions.values() for region in found]

    def _multiply_out(self) -> None:
        """Rewrite squared distances as products, unless more products are then computed outside regions."""
        before = self.jaxpr
        with_all = with_products(before)
        if with_all is None:
            return
        outside = _products_outside(before.jaxpr, self.regions)
        self._take(with_all)
        if _products_outside(with_all.jaxpr, self.regions) > outside:
            self._take(before)

    def run(self, names: tuple[str, ...] | None) -> Any:
        """Return the results of the call."""

        def compute(region: Region, has_log_sum: bool, leaves: list[Any], value: Any) -> tuple[Any, Any]:
            call = Call(region, names, has_log_sum)
            if self.sharing is None:
                return attend(call, leaves, value)
            attend_shared = attend_to_own_tokens if self.sharing.is_manual else attend_to_shared_tokens
            return attend_shared(self.sharing, call, leaves, value)

        if self.sharing is None or not self.sharing.is_manual:
            return jax.tree.unflatten(self.structure, self.evaluate(self.arguments, compute))
        inside = next((inner.equation.primitive.name for inner, _ in self.inner.values()), None)
        inside = "jax.checkpoint" if inside in CHECKPOINTS else inside
        check_program(self.jaxpr.jaxpr, inside, "in a Python loop, or under `jax.checkpoint`")
        results = self.evaluate(self.arguments, compute, OwnParts(self.sharing).bind)
        check_results(self.jaxpr.jaxpr, results, "devices")
        return jax.tree.unflatten(self.structure, results)

    def evaluate(self, arguments: Sequence[Any], compute: _Compute, bind_outside: _Bind = _bind_outside) -> list[Any]:
        """Return the results as a flat list.

        Args:
            compute: takes a region, whether its log-sum-exp is needed, its leaves and its values; returns the result
                and the log-sum-exp. Equal regions are represented by the first of them, with its variables.
            bind_outside: takes an equation outside regions and its operands; returns its results.
        """
        jaxpr = self.jaxpr.jaxpr
        known: dict[core.Var, Any] = dict(zip(jaxpr.constvars, self.jaxpr.consts, strict=True))
        known |= dict(zip(jaxpr.invars, arguments, strict=True))
        needed = self.needed()
        for equation in jaxpr.eqns:
            is_needed = any(var in needed for var in equation.outvars) or has_effects(equation)
            var = equation.outvars[0] if equation.outvars else None
            if not is_needed or var in self.log_sums:
                continue
            regions = None if var is None else self.regions.get(var)
            if var in self.inner:
                inner, programs = self.inner[var]
                within = [functools.partial(_evaluated, program, compute) for program in programs]
                results = inner.results(within, functools.partial(read, known))
            elif regions is None:
                results = bind_outside(equation, [read(known, x) for x in equation.invars])
            else:
                parts = []
                for region in regions:
                    own = {x: wanted for x, wanted in self.log_sums.items() if wanted.region is region}
                    one = shared(region) if self.is_ordered else shared(region).once(unordered)
                    part, log_sum = compute(one, bool(own), *_operands(region, known))
                    known |= {x: wanted.placed(log_sum, x) for x, wanted in own.items()}
                    parts.append(part)
                results = [functools.reduce(jnp.add, parts)]
            known |= dict(zip(equation.outvars, results, strict=True))
        results = [read(known, x) for x in jaxpr.outvars]
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]

    def programs(self) -> Iterator["Program"]:
        """Yield this program and all inner programs."""
        yield self
        for _, programs in self.inner.values():
            for program in programs:
                if isinstance(program, Program):
                    yield from program.programs()

    def needed(self) -> set[core.Var]:
        """Return the variables that must be computed; a region needs only its leaves and values."""
        return _needed(self.jaxpr.jaxpr, self.regions, self.log_sums)


def _evaluated(program: Program | core.ClosedJaxpr, compute: _Compute, *given: Any) -> list[Any]:
    if isinstance(program, Program):
        return program.evaluate(given, compute)
    return core.jaxpr_as_fun(program)(*given)


def _inner_programs(closed: core.ClosedJaxpr) -> dict[core.Var, tuple[Inner, list[Program | core.ClosedJaxpr]]]:
    """Return the inner programs of a program that have attention, by the first result of their equation."""
    found = {}
    for inner in inner_of(closed):
        ways = [(inner, _opened(inner))]
        if inner.hoisted is not None:
            # Arrays computed before a loop from smaller ones can be computed inside it instead. Tiles can then compute
            # them, and no array of queries by keys is needed.
            ways.append((inner.hoisted, _opened(inner.hoisted)))
        best = min(ways, key=lambda one: _pairs([x for each in _within(one[1]) for x in each.all_regions()]))
        if _within(best[1]):
            found[inner.equation.outvars[0]] = best
    return found


def _opened(inner: Inner) -> list[Program | core.ClosedJaxpr]:
    """Return the program of each body or branch; one without attention stays a jaxpr."""
    programs: list[Program | core.ClosedJaxpr] = []
    for jaxpr in inner.jaxprs:
        try:
            programs.append(_program_of(jaxpr))
        except NotFusible:
            programs.append(jaxpr)
    return programs


def _program_of(jaxpr: core.ClosedJaxpr) -> Program:
    """Return the program of a loop body or a branch."""
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(aval_of, jaxpr.jaxpr.invars)]
    return Program(with_positions(jaxpr), arguments, None)


def _within(programs: Sequence[Program | core.ClosedJaxpr]) -> list[Program]:
    """Return the programs with attention, and all programs inside them."""
    return [x for program in programs if isinstance(program, Program) for x in program.programs()]


def _with_checkpoints(closed: core.ClosedJaxpr, arrays: Sequence[Any], structure: Any) -> Program:
    """Return the program of a function with checkpoints.

    Checkpoints are inlined if less attention, or more arrays of queries by keys, would be found otherwise.

    Raises:
        NotFusible: the refusal of the program with inlined checkpoints.
    """
    whole, _ = flat_jaxpr(core.jaxpr_as_fun(closed), *closed.in_avals)
    try:
        kept = Program(with_positions(closed), arrays, structure)
    except NotFusible:
        return Program(with_positions(whole), arrays, structure)
    if not any(x.primitive.name in CHECKPOINTS and kept.needed() & set(x.outvars) for x in kept.jaxpr.jaxpr.eqns):
        return Program(with_positions(whole), arrays, structure)
    try:
        opened = Program(with_positions(whole), arrays, structure)
    except NotFusible:
        return kept
    found, expected = ([x for program in one.programs() for x in program.all_regions()] for one in (kept, opened))
    return kept if len(found) >= len(expected) and _pairs(found) <= _pairs(expected) else opened


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: ContextParallel | None = None,
    token_axes: Any = None,
    *,
    deterministic: bool = True,
) -> Program:
    """Return the program of a call, with its regions.

    Args:
        args, kwargs: the arguments; `jax.ShapeDtypeStruct` may replace arrays if the program is not run.
        context: the devices that share tokens.
        token_axes, deterministic: see `fuse`.

    Raises:
        NotFusible: the function has no attention, attention that breaks a rule, or a symbolic size.
        ValueError: the mesh has no such devices.
    """
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
    sharing = None if context is None else sharing_of(context, arrays)
    axes = _token_axes(sharing, token_axes, args, kwargs)
    program = _traced(function, args, kwargs, sharing, axes)
    program.sharing = sharing
    for one in program.programs():
        one.is_ordered = deterministic
    return program


def _token_axes(
    sharing: Sharing | None, token_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int | None] | None:
    """Return the axis of tokens of each argument inside of a `jax.shard_map`; None elsewhere.

    Raises:
        ValueError: `token_axes` is missing there, or given elsewhere.
    """
    if sharing is None or not sharing.is_manual:
        if token_axes is not None:
            raise ValueError(
                f"`token_axes`={token_axes!r} is for calls with `context_parallel` inside of a `jax.shard_map`, where "
                "arrays are shards; leave it out"
            )
        return None
    if token_axes is None:
        raise ValueError(
            "`fuse` with `context_parallel` was called inside of `jax.shard_map`, where arrays are shards, and needs "
            f"`token_axes`; {REMEDY}, or call it outside, on arrays that are sharded along tokens"
        )
    return token_axes_of(token_axes, args, kwargs)


def _traced(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharing: Sharing | None,
    axes: Sequence[int | None] | None,
) -> Program:
    """Return the program of a call, see `trace`."""
    flat, tree = jax.tree.flatten((args, kwargs))
    places = [place for place, x in enumerate(flat) if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)]

    def of_arrays(*arrays: Any) -> Any:
        whole = list(flat)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        inner_args, inner_kwargs = jax.tree.unflatten(tree, whole)
        results = function(*inner_args, **inner_kwargs)
        changed = _changed(whole, (inner_args, inner_kwargs))
        if changed is not None:
            raise NotFusible(
                f"the function modifies an argument{changed}, as nnx modules do that keep a cache "
                "(decode=True), count dropout or keep running averages, and the change would be lost: fuse attention "
                "alone (attention_fn=fuse(nnx.dot_product_attention)), or let the function modify a copy (nnx.clone) "
                "and return its state (nnx.state) for nnx.update outside"
            )
        return results

    arrays = [flat[place] for place in places]
    for array in arrays:
        if not all(isinstance(size, int) for size in array.shape):
            raise SymbolicSizes(
                f"`fuse` needs concrete sizes to choose tiles, got an array of shape {array.shape}; export for each "
                "size, or without `implementation`, which exports the function unchanged"
            )
    types = arrays
    if axes is not None and sharing is not None:
        own = [axes[place] for place in places]
        types = [manual_context.whole_type(x, axis, sharing.devices) for x, axis in zip(arrays, own, strict=True)]
    elif sharing is not None:
        types = [whole_type(sharing, x) for x in arrays]
    jaxpr, structure = flat_jaxpr(of_arrays, *types, keep=CHECKPOINTS)
    try:
        if has_checkpoints(jaxpr.jaxpr):
            return _with_checkpoints(jaxpr, arrays, structure)
        return Program(with_positions(jaxpr), arrays, structure)
    except _Unused:
        raise
    except NotFusible as refusal:
        raise NotFusible(_reason(jaxpr, refusal)) from None


class _Nothing(NoAttention):
    """Nothing in the program resembles attention."""


class _Unused(NotFusible):
    """The program has attention, but does not use its result."""


def _reason(closed: core.ClosedJaxpr, refusal: NotFusible) -> str:
    """Return why a flat program is refused: the first violation of a rule in program order, else the refusal.

    Args:
        refusal: the refusal of the compiler, which searches for attention from the end.
    """
    if has_checkpoints(closed.jaxpr):
        closed, _ = flat_jaxpr(core.jaxpr_as_fun(closed), *closed.in_avals)
    found = diagnosis(closed, _is_fused_with_last)
    if found.reason is None and (products := as_products(closed)) is not closed:
        found = diagnosis(products, _is_fused_with_last)
    if found.reason is not None:
        return found.reason
    has_attention = found.has_attention or isinstance(refusal, QueryWithoutAxis)
    if isinstance(refusal, _Nothing) or (isinstance(refusal, NoAttention) and not has_attention):
        return _nothing_found(closed)
    return str(refusal)


def _is_fused_with_last(closed: core.ClosedJaxpr) -> bool:
    """Return whether some attention is fused whose values depend on the last argument."""
    try:
        program = Program(with_positions(closed), closed.in_avals, None)
    except NotFusible:
        return False
    made = {program.jaxpr.jaxpr.invars[-1]}
    for equation in program.jaxpr.jaxpr.eqns:
        if not made.isdisjoint(x for x in equation.invars if isinstance(x, core.Var)):
            made.update(equation.outvars)
    return any(region.value.key in made for region in program.all_regions())


def _changed(before: Sequence[Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    """Return the first mutated leaf of the arguments, as part of a message; None if no leaf was mutated.

    Args:
        before: the leaves before the call.
    """
    args, kwargs = arguments
    after = jax.tree_util.tree_leaves_with_path((args, kwargs))
    if len(after) != len(before):
        return ""
    for (path, leaf), old in zip(after, before, strict=True):
        if not _is_same(leaf, old):
            where, *rest = path
            name = "args" if where == jax.tree_util.SequenceKey(0) else "kwargs"
            return f" (`{name}{jax.tree_util.keystr(tuple(rest))}`)"
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether a leaf of the arguments is unchanged; numbers and strings are compared by value."""
    return one is other or (isinstance(one, bool | int | float | complex | str) and one == other)


def unopened_reason(equation: core.JaxprEqn) -> str:
    """Return why attention that may be inside an equation's programs is not fused."""
    if equation.primitive.name == "while":
        return "loops without a known number of steps are not analysed: fuse the function that they run"
    return f"functions that `{equation.primitive.name}` runs are not analysed: fuse them themselves"


def _nothing_found(closed: core.ClosedJaxpr) -> str:
    """Return why a program has no attention."""
    whole = "there is no product with a softmax of scores"
    hidden = hidden_attention(closed.jaxpr)
    if hidden is None:
        softmax = softmax_in(closed.jaxpr)
        if softmax is None:
            return f"{whole}; `fuse` is for attention"
        return (
            f"{whole}: the softmax {place_of(softmax)} is not recognised as one of products of queries and keys, or "
            "is not multiplied by values that all queries share"
        )
    why = unopened_reason(hidden)
    if hidden.primitive.name in OPENED:
        why = "nothing inside it can be fused: " + _reason_within(closed, hidden)
    elif body_of(hidden) is not None:
        why = "it has a custom derivative, which `fuse` would lose: fuse the function that it calls, or remove it"
    return f"{whole}, except possibly in `{hidden.primitive.name}` {place_of(hidden)}; {why}"


def _reason_within(closed: core.ClosedJaxpr, hidden: core.JaxprEqn) -> str:
    """Return why nothing is fused inside a loop or a branch."""
    for inner in inner_of(closed):
        for jaxpr in inner.jaxprs if inner.equation is hidden else ():
            try:
                _program_of(jaxpr)
            except NotFusible as refusal:
                return _reason(jaxpr, refusal)
    return "fuse the function that it runs; its refusal gives the reason"


def _needed(
    jaxpr: core.Jaxpr,
    found: Mapping[core.Var, Sequence[Region]],
    log_sums: Mapping[core.Var, Wanted] = MappingProxyType({}),
) -> set[core.Var]:
    producers = producers_of(jaxpr)
    needed: set[core.Var] = set()
    waiting: list[Any] = [
        *jaxpr.outvars,
        *(x for equation in jaxpr.eqns if has_effects(equation) for x in equation.invars),
    ]
    while waiting:
        var = waiting.pop()
        if not isinstance(var, core.Var) or var in needed:
            continue
        needed.add(var)
        equation = producers.get(var)
        if var in log_sums:
            waiting.append(log_sums[var].result)
        elif var in found:
            waiting += [source.key for region in found[var] for source in region.sources]
        elif equation is not None:
            waiting += equation.invars
    return needed


def _pairs(regions: Sequence[Region]) -> int:
    """Return how many arrays of queries by keys the regions read."""
    return sum(leaf.role == "score" for region in regions for leaf in region.leaves)


def _products_outside(jaxpr: core.Jaxpr, regions: Mapping[core.Var, Sequence[Region]]) -> int:
    """Return how many products are computed outside regions."""
    needed = _needed(jaxpr, regions)
    names = [x.primitive.name for x in jaxpr.eqns if x.outvars[0] in needed and x.outvars[0] not in regions]
    return names.count("dot_general")


def _operands(region: Region, known: dict[core.Var, Any]) -> tuple[list[Any], Any]:
    """Return the arrays of a region's leaves, and its values."""

    def array_of(source: Source) -> Any:
        return jnp.arange(source.shape[0], dtype=source.dtype) if source.key is None else known[source.key]

    *leaves, value = map(array_of, region.sources)
    return leaves, value
