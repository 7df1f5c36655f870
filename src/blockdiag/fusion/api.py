"""`fuse`: an attention variant written in plain jax.numpy becomes one kernel, forward and backward."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.common.context_parallel import ContextParallel
from blockdiag.common.dispatch import normalise_implementation
from blockdiag.fusion.frontend.trace import aval_of, bind, body_of, flat_jaxpr, has_effects, hidden_attention, read
from blockdiag.fusion.ir.structural_hash import shared
from blockdiag.fusion.ir.tree import FUSE, Region, Source, SymbolicSizes
from blockdiag.fusion.ir.tree import NotFusible as NotFusible
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
from blockdiag.fusion.regions.axis_labels import place_of, producers_of
from blockdiag.fusion.regions.diagnosis import diagnosis, softmax_in
from blockdiag.fusion.regions.log_sum_exps import Wanted, in_order
from blockdiag.fusion.regions.match import NoAttention, QueryWithoutAxis, regions_and_sides
from blockdiag.fusion.regions.materialise import with_made
from blockdiag.fusion.regions.nested_programs import CHECKPOINTS, OPENED, Inner, has_checkpoints, inner_of
from blockdiag.fusion.runtime.context_parallel import Sharing, attend_to_shared_tokens, sharing_of, whole_type
from blockdiag.fusion.runtime.region_op import Call, attend, region_p

type _Compute = Callable[[Region, bool, list[Any], Any], tuple[Any, Any]]
type _Bind = Callable[[core.JaxprEqn, list[Any]], list[Any]]


def fuse[**P, R](
    function: Callable[P, R],
    *,
    implementation: str | Sequence[str] | None = None,
    fallback: bool = False,
    context_parallel: ContextParallel | None = None,
) -> Callable[P, R]:
    """A function whose attention is computed by fused kernels: the same results to rounding, and gradients.

    Wherever the function multiplies a softmax of scores by values, or another function of scores, tiles of scores are
    made, used and dropped in one kernel. Of arrays of queries by keys only biases and masks are in memory that the
    function is given or makes by a gather or a product, with the axes that they have, and the gradients of these; "xla"
    has such a gradient for each batch index before it is added up. All else is computed as written. Rows that see no
    key are 0, with gradients of 0. Random bits for each query and key are a hash of the key of `jax.random` and of the
    place instead of its own sequence: equally distributed, and the same in all passes and implementations. The function
    is traced with each call: call it under `jax.jit`.

    Works under `jax.jit` (with donated arguments), `grad` (reverse mode; derivatives of gradients are computed by XLA,
    which keeps all scores for them), `vmap`, `checkpoint`, `scan`, `export`, jitted `shard_map` over batch and heads,
    and inside modules of Flax; `checkpoint` and `scan` may be in the function, too. Devices of a mesh, with automatic
    or explicit axes, divide the batch axes of the function as its arrays are sharded; gradients of arrays that lack
    such an axis are summed over them.

    Args:
        function: of arrays of any shape and dtype, in pytrees; the Triton kernels take none of 64 bits. Other arguments
            are handed on as they are.
        implementation: None: the Triton kernels where the program is lowered for CUDA, and a scan over tiles of keys
            elsewhere; "triton", "xla", or a sequence of them: the first that can compute a region. "reference" is the
            function as it stands.
        fallback: run the function as it stands where it is not fusible; `fused.fallbacks` then has the reasons. Without
            `implementation` so does a function of arrays whose sizes are symbolic, as `jax.export` has them.
        context_parallel: devices along an axis of the mesh share the tokens of each sequence; see `ContextParallel`.
            The function is written for whole sequences, and results are those of one device. Its arguments are sharded
            along tokens as usual. `explain` says which strategy is chosen.

    Returns:
        A function of the same arguments, with the shapes and dtypes of the results that `function` has.

    Raises:
        ValueError: `implementation` has an unknown name, or is "reference" with `context_parallel`; (when called) the
            mesh has no such axis, the devices do not divide the queries, the strategy of `context_parallel` cannot
            serve, or the call is inside of a `jax.shard_map`. The message has the remedy.
        NotFusible: (when called) there is no attention in it, or one that breaks a rule, or the function changes what
            is in an argument; the message names the rule and the line.
        NotImplementedError: (when called) none of the implementations asked for can compute it; the message says why.

    References:
        Attention by tiles: FlashAttention of Dao et al. (2022). Variants as programs: FlexAttention of Dong et al.
        (2024). Finding them in the equations of a function: Flashlight of You et al. (2025), for PyTorch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import fuse
        >>> @fuse
        ... def attention(query, key, value):
        ...     scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
        ...     causal = jnp.arange(scores.shape[-2])[:, None] >= jnp.arange(scores.shape[-1])[None, :]
        ...     return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), value)
        >>> x = jnp.ones((1, 64, 2, 16))
        >>> attention(x, x, x).shape
        (1, 64, 2, 16)
    """
    if implementation == "reference":
        if context_parallel is not None:
            raise ValueError(
                "implementation='reference' is the function as it stands, which `context_parallel` does not divide; "
                "leave out one of them, or use implementation='xla'"
            )
        return function
    if is_fused(function):
        # Its kernels are chosen anew.
        function = function.__wrapped__  # pyrefly: ignore[missing-attribute]
    names = normalise_implementation(implementation, FUSE)
    reasons: list[str] = []

    @functools.wraps(function)
    def fused(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            program = trace(function, args, kwargs, context_parallel)
        except NotFusible as failure:
            has_choice = names is None and isinstance(failure, SymbolicSizes)
            if not fallback and not has_choice:
                raise
            reasons.append(str(failure))
            return function(*args, **kwargs)
        return program.run(names)

    fused.fallbacks = reasons  # pyrefly: ignore[missing-attribute]
    fused.context_parallel = context_parallel  # pyrefly: ignore[missing-attribute]
    return marked(fused)


def marked[F: Callable[..., Any]](fused: F) -> F:
    """A function that `fuse` made of its `__wrapped__`, for `is_fused`."""
    fused.fused = fused  # pyrefly: ignore[missing-attribute]
    return fused


def is_fused(function: Callable[..., Any]) -> bool:
    """Whether a function is what `fuse` made of another one."""
    # What `jax.vmap` and others make of a fused function has all its attributes.
    return getattr(function, "fused", None) is function


def _bind_outside(equation: core.JaxprEqn, given: list[Any]) -> list[Any]:
    """Return the results of an equation outside of regions."""
    return [read_rows(equation, *given)] if reads_rows(equation) else bind(equation, given)


_REWRITES = (plain, with_chosen, with_factors_inside, respelled, taken_apart, with_sources, with_sums, with_merged_keys)
"""In this order; each gives None where it changes nothing."""


class Program:
    """A traced call.

    Attributes:
        jaxpr: flat.
        regions: of the products that are fused.
        log_sums: variables that are needed and that regions compute beside their results.
        inner: loops, and what is computed again for gradients, with their programs, by the first variable that each
            gives.
        refused: what is said against attention outside of these, where none is found there.
        arguments: the arrays of the call, or their shapes and dtypes.
        structure: of its results.
        sharing: the devices that share tokens; None where each sequence is on one device.
    """

    sharing: Sharing | None = None

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
                "what its attention gives is not used, but something else is computed of scores, such as derivatives: "
                "fuse what is differentiated"
            )

    def _find(self, jaxpr: core.ClosedJaxpr) -> NoAttention | None:
        """Find the attention of a flat program, but for what loops have; what is said against it where there is none.

        What only looks like attention may be beside a loop of layers, such as an MLP of sines.
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
        """Take a program, in which queries without an axis get one."""
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
        """Make masks that are cut or joined functions of places, where these are then computed in tiles."""
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
        """All regions, of whichever product."""
        return [region for found in self.regions.values() for region in found]

    def _multiply_out(self) -> None:
        """Make squared distances products, where these are inside of regions."""
        before = self.jaxpr
        with_all = with_products(before)
        if with_all is None:
            return
        outside = _products_outside(before.jaxpr, self.regions)
        self._take(with_all)
        if _products_outside(with_all.jaxpr, self.regions) > outside:
            self._take(before)

    def run(self, names: tuple[str, ...] | None) -> Any:
        """The results."""

        def compute(region: Region, has_log_sum: bool, leaves: list[Any], value: Any) -> tuple[Any, Any]:
            call = Call(region, names, has_log_sum)
            if self.sharing is not None:
                return attend_to_shared_tokens(self.sharing, call, leaves, value)
            return attend(call, leaves, value)

        return jax.tree.unflatten(self.structure, self.evaluate(self.arguments, compute))

    def evaluate(self, arguments: Sequence[Any], compute: _Compute, bind_outside: _Bind = _bind_outside) -> list[Any]:
        """The results as a flat list.

        Args:
            compute: the result of a region, and its log-sum-exp where that is asked for, from its leaves and values. It
                is given one region for all equal ones, whose variables are those of the first.
            bind_outside: the results of an equation outside of regions, from its operands.
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
                    part, log_sum = compute(shared(region), bool(own), *_operands(region, known))
                    known |= {x: wanted.placed(log_sum, x) for x, wanted in own.items()}
                    parts.append(part)
                results = [functools.reduce(jnp.add, parts)]
            known |= dict(zip(equation.outvars, results, strict=True))
        results = [read(known, x) for x in jaxpr.outvars]
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]

    def programs(self) -> Iterator["Program"]:
        """This one, and those within."""
        yield self
        for _, programs in self.inner.values():
            for program in programs:
                if isinstance(program, Program):
                    yield from program.programs()

    def needed(self) -> set[core.Var]:
        """What must be computed: of what regions replace only their leaves and values."""
        return _needed(self.jaxpr.jaxpr, self.regions, self.log_sums)


def _evaluated(program: Program | core.ClosedJaxpr, compute: _Compute, *given: Any) -> list[Any]:
    if isinstance(program, Program):
        return program.evaluate(given, compute)
    return core.jaxpr_as_fun(program)(*given)


def _inner_programs(closed: core.ClosedJaxpr) -> dict[core.Var, tuple[Inner, list[Program | core.ClosedJaxpr]]]:
    """The programs within another one, where one of them has attention."""
    found = {}
    for inner in inner_of(closed):
        ways = [(inner, _opened(inner))]
        if inner.hoisted is not None:
            # What is made of less before a loop is made within, where it is no array of pairs then.
            ways.append((inner.hoisted, _opened(inner.hoisted)))
        best = min(ways, key=lambda one: _pairs([x for each in _within(one[1]) for x in each.all_regions()]))
        if _within(best[1]):
            found[inner.equation.outvars[0]] = best
    return found


def _opened(inner: Inner) -> list[Program | core.ClosedJaxpr]:
    """The programs of what is within, those without attention as they are."""
    programs: list[Program | core.ClosedJaxpr] = []
    for jaxpr in inner.jaxprs:
        try:
            programs.append(_program_of(jaxpr))
        except NotFusible:
            programs.append(jaxpr)
    return programs


def _program_of(jaxpr: core.ClosedJaxpr) -> Program:
    """The program of a body or a branch."""
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(aval_of, jaxpr.jaxpr.invars)]
    return Program(with_positions(jaxpr), arguments, None)


def _within(programs: Sequence[Program | core.ClosedJaxpr]) -> list[Program]:
    """Those that have attention, and those within."""
    return [x for program in programs if isinstance(program, Program) for x in program.programs()]


def _with_checkpoints(closed: core.ClosedJaxpr, arrays: Sequence[Any], structure: Any) -> Program:
    """The program of a function parts of which are computed again for gradients.

    They are opened where less attention, or more arrays of queries by keys, would be found otherwise.

    Raises:
        NotFusible: as it is refused when they are opened.
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
) -> Program:
    """The program of a call, with its regions.

    Args:
        args, kwargs: arrays, or `jax.ShapeDtypeStruct` in place of them for a program that is not run.
        context: which devices share tokens.

    Raises:
        NotFusible: it has none, or one that breaks a rule, or a size that is not a number.
        ValueError: there are no such devices.
    """
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
    sharing = None if context is None else sharing_of(context, arrays)
    program = _traced(function, args, kwargs, sharing)
    program.sharing = sharing
    return program


def _traced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sharing: Sharing | None
) -> Program:
    """The program of a call; see `trace`."""
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
                f"the function changes what is in an argument{changed}, as modules of nnx do that keep a cache "
                "(decode=True), count dropout or keep running averages, and the change would be lost: fuse attention "
                "alone (attention_fn=fuse(nnx.dot_product_attention)), or have the function change a copy (nnx.clone) "
                "and return what has changed (nnx.state), for nnx.update outside"
            )
        return results

    arrays = [flat[place] for place in places]
    for array in arrays:
        if not all(isinstance(size, int) for size in array.shape):
            raise SymbolicSizes(
                f"`fuse` chooses tiles by sizes that are numbers, got an array of shape {array.shape}; export for each "
                "size, or without `implementation`, which exports the function as it stands"
            )
    types = arrays if sharing is None else [whole_type(sharing, x) for x in arrays]
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
    """There is nothing that could have been meant as attention."""


class _Unused(NotFusible):
    """There is attention, but its result is not used."""


def _reason(closed: core.ClosedJaxpr, refusal: NotFusible) -> str:
    """Why a flat program is refused: the first thing in it that breaks a rule, or what the compiler met first.

    Args:
        refusal: by the compiler, which looks for attention from the end.
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
    """Return whether attention is fused whose values are made of the last argument."""
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
    """Which leaf of the arguments is not what it was, as a part of a message; None where all are.

    Args:
        before: the leaves.
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
    """Whether a leaf of the arguments is what it was; numbers and text may be made anew."""
    return one is other or (isinstance(one, bool | int | float | complex | str) and one == other)


UNOPENED = "loops that may end anywhere are not opened: fuse what they run"
"""What is said of attention that may be in them."""


def _nothing_found(closed: core.ClosedJaxpr) -> str:
    """Why a program has no attention."""
    whole = "there is no product with a softmax of scores"
    hidden = hidden_attention(closed.jaxpr)
    if hidden is None:
        softmax = softmax_in(closed.jaxpr)
        if softmax is None:
            return f"{whole}; `fuse` is for attention"
        return (
            f"{whole}: the softmax {place_of(softmax)} is not seen to be of products of queries and keys, or not to be "
            "multiplied by values that all queries share"
        )
    why = UNOPENED
    if hidden.primitive.name in OPENED:
        why = "nothing in it can be fused by itself: " + _reason_within(closed, hidden)
    elif body_of(hidden) is not None:
        why = "it has a derivative of its own, which `fuse` would lose: fuse what it calls, or leave that out"
    return f"{whole}, but for what may be in `{hidden.primitive.name}` {place_of(hidden)}; {why}"


def _reason_within(closed: core.ClosedJaxpr, hidden: core.JaxprEqn) -> str:
    """Why nothing is fused of what a loop or a branch runs."""
    for inner in inner_of(closed):
        for jaxpr in inner.jaxprs if inner.equation is hidden else ():
            try:
                _program_of(jaxpr)
            except NotFusible as refusal:
                return _reason(jaxpr, refusal)
    return "fuse what it runs, whose refusal says why"


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
    """How many arrays of queries by keys regions read."""
    return sum(leaf.role == "score" for region in regions for leaf in region.leaves)


def _products_outside(jaxpr: core.Jaxpr, regions: Mapping[core.Var, Sequence[Region]]) -> int:
    """How many products are computed outside of regions."""
    needed = _needed(jaxpr, regions)
    names = [x.primitive.name for x in jaxpr.eqns if x.outvars[0] in needed and x.outvars[0] not in regions]
    return names.count("dot_general")


def _operands(region: Region, known: dict[core.Var, Any]) -> tuple[list[Any], Any]:
    """The arrays of a region's leaves, and of its values."""

    def array_of(source: Source) -> Any:
        return jnp.arange(source.shape[0], dtype=source.dtype) if source.key is None else known[source.key]

    *leaves, value = map(array_of, region.sources)
    return leaves, value
