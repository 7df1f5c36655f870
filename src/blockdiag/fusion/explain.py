"""`explain`: a report of what `fuse` finds in a function, as data and as text."""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from blockdiag.fusion.api import is_fused
from blockdiag.fusion.frontend.trace import aval_of, bind, has_effects, loop_with_attention, read
from blockdiag.fusion.ir.structural_hash import shared
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import WITH_FEATURES, NotFusible, Region, nodes_of
from blockdiag.fusion.lowering.eight_bit import is_eight_bit
from blockdiag.fusion.lowering.tile_program import leaf_array, value_columns
from blockdiag.fusion.program import Program, trace, unopened_reason
from blockdiag.fusion.regions.axis_labels import MOVES, place_of, producers_of
from blockdiag.fusion.regions.guards import CASTS
from blockdiag.fusion.regions.nested_programs import OPENED
from blockdiag.fusion.runtime.block_sparsity import Live, live_tiles, needs_arrays
from blockdiag.fusion.runtime.context_parallel import Sharing, choose
from blockdiag.fusion.runtime.region_op import region_p
from blockdiag.fusion.runtime.sharding import backward_rule

__all__ = ["Explanation", "LeafReport", "RegionReport", "SummedGradient", "explain"]

_WHOLE = "each computes all of it, because there is no batch axis to divide"
_VISITED_COLOUR, _SKIPPED_COLOUR = (0.0, 0.447, 0.698), (0.92, 0.92, 0.92)


@dataclass(frozen=True)
class LeafReport:
    """Array that a region reads.

    Attributes:
        role: how the array depends on queries and keys. "query" and "key": an operand of a product, or of another sum
            over features. "feature": such an operand that has neither queries nor keys. "row" and "column": one number
            per query, or per key. "score": one number per query and key. "scalar": one number. "distance": a function
            of query position minus key position.
        labels: the batch axes that it has; it is broadcast along the others.
        shape, dtype: the shape and dtype of the array in memory.
        is_known: whether its elements are known while tracing.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import explain
        >>> def attention(query, key, value):
        ...     return jax.nn.softmax(query @ key.mT) @ value
        >>> x = jax.ShapeDtypeStruct((2, 256, 64), jnp.bfloat16)
        >>> leaf = explain(attention)(x, x, x).regions[0].leaves[0]
        >>> leaf.role, leaf.shape, leaf.dtype, leaf.is_known
        ('query', (2, 256, 64), 'bfloat16', False)
    """

    role: str
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    is_known: bool


@dataclass(frozen=True)
class SummedGradient:
    """Gradient that is summed over devices, because its array lacks batch axes that devices may divide.

    Attributes:
        role: the role of the leaf (see `LeafReport`), or "value".
        shape, dtype: the shape and dtype of the array in memory.
        over: the batch axes that the array lacks; devices that divide one of them sum their gradients.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import explain
        >>> def attention(query, key, value):
        ...     return jax.nn.softmax(jnp.einsum("bqh,kh->bqk", query, key)) @ value
        >>> query, key = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(2, 64, 16), (64, 16)])
        >>> region = explain(attention)(query, key, query).regions[0]
        >>> region.divided, [(x.role, x.over) for x in region.summed]
        (('b0',), [('key', ('b0',))])
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    over: tuple[str, ...]


@dataclass(frozen=True)
class RegionReport:
    """Attention that is compiled to kernels.

    Attributes:
        sizes: the sizes of the axes: batch axes ("b0", "g0", ...), "q", "k", "f" and "d".
        batch: the batch axes, in the order of the result.
        leaves: the arrays from which scores, masks and weights are computed.
        has_softmax: whether there is a softmax.
        has_weight: whether the softmax is multiplied by a weight. Without a softmax, whether there is a weight.
        extras: the number of logits without a value in the softmax, such as sinks.
        tile: the rows and columns of a score tile, forward.
        tables: the lists of visited tiles. None if all tiles are visited, or if that depends on arrays which the
            explanation was not given.
        flops: the floating-point operations of the forward products in visited tiles. A multiply-add counts as two.
        read_bytes: the bytes of the leaves and values, each counted once.
        kernels: the source of each kernel by name, each followed by its replacement on Hopper. Empty if the kernels
            cannot compute the region, see `declined`.
        declined: why the kernels cannot compute the region; None if they can.
        divided: the batch axes that devices of a mesh may divide. Each device has all of the other axes.
        summed: the arrays whose gradients are then summed over devices, because they lack some of these axes.
        shared: how devices share the tokens, in words; None without `context_parallel`.
        eight_bit: the forward products of eight-bit operands, with their dtype. GPUs before compute capability 8.9
            compute them with 16 bits, and so do gradients.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import explain
        >>> def attention(query, key, value):
        ...     return jax.nn.softmax(query @ key.mT) @ value
        >>> x = jax.ShapeDtypeStruct((2, 256, 64), jnp.bfloat16)
        >>> region = explain(attention)(x, x, x).regions[0]
        >>> region.has_softmax, region.skipped, region.flops, region.read_bytes
        (True, 0.0, 33554432, 196608)
    """

    sizes: Mapping[str, int]
    batch: tuple[str, ...]
    leaves: tuple[LeafReport, ...]
    has_softmax: bool
    has_weight: bool
    extras: int
    tile: tuple[int, int]
    tables: Live | None
    flops: int
    read_bytes: int
    kernels: Mapping[str, str]
    declined: str | None
    divided: tuple[str, ...]
    summed: tuple[SummedGradient, ...]
    shared: str | None = None
    eight_bit: tuple[str, ...] = ()

    @functools.cached_property
    def live(self) -> np.ndarray | None:
        """The mask of visited tiles, bool [.., query tiles, key tiles]; None if `tables` is None."""
        return None if self.tables is None else self.tables.states(-(-self.sizes["k"] // self.tile[1])) > 0

    @property
    def skipped(self) -> float:
        """The fraction of tiles that are not visited."""
        return 0.0 if self.tables is None else 1 - self.tables.share(-(-self.sizes["k"] // self.tile[1]))

    @property
    def visited(self) -> np.ndarray:
        """The mask of visited tiles of the first batch index, bool [query tiles, key tiles]."""
        rows, columns = (-(-self.sizes[axis] // size) for axis, size in zip("qk", self.tile, strict=True))
        return np.ones((rows, columns), bool) if self.live is None else self.live.reshape(-1, rows, columns)[0]

    @property
    def picture(self) -> str:
        """The tiles of the first batch index, one line per query tile: # visited, . skipped."""
        return "\n".join("".join("#" if x else "." for x in row) for row in self.visited)

    def plot(self, axis: Any) -> None:
        """Draw the tiles of the first batch index, with visited tiles dark.

        Args:
            axis: a `matplotlib.axes.Axes`. Its units are tokens, with queries downwards and keys to the right.
        """
        queries, keys = self.sizes["q"], self.sizes["k"]
        colours = np.where(self.visited[..., None], _VISITED_COLOUR, _SKIPPED_COLOUR)
        axis.imshow(colours, interpolation="nearest", aspect="auto", extent=(0, keys, queries, 0))

    def __str__(self) -> str:
        axes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        kind = "softmax" if self.has_softmax else "no softmax"
        parts = [kind, *(["a weight"] if self.has_weight else []), *([f"{self.extras} sinks"] if self.extras else [])]
        lines = [f"axes: {axes}", f"scores: {', '.join(parts)}"]
        for leaf in self.leaves:
            along = ", ".join(leaf.labels) or "no batch axis"
            known = ", known while tracing" if leaf.is_known else ""
            lines.append(f"  {leaf.role}: {leaf.dtype}{list(leaf.shape)}, along {along}{known}")
        lines.append(f"tiles of {self.tile[0]} queries by {self.tile[1]} keys, {self.skipped:.0%} skipped")
        lines.append(f"forward: {self.flops / 1e9:.4g} GFLOP of products, {self.read_bytes / 1e6:.4g} MB read")
        lines.append(f"kernels: {', '.join(self.kernels) or self.declined}")
        if self.eight_bit:
            where = "16-bit before compute capability 8.9 and for gradients"
            lines.append(f"eight-bit products: {', '.join(self.eight_bit)}; {where}")
        lines.append(f"devices: {self._division()}")
        return "\n".join(lines)

    def _division(self) -> str:
        """Return how devices of a mesh divide the region, in words."""
        sharing = [] if self.shared is None else [self.shared]
        if not self.divided:
            return "; ".join([*sharing, "there is no batch axis to divide"]) if sharing else _WHOLE
        arrays: dict[tuple[str, ...], list[str]] = {}
        for x in self.summed:
            arrays.setdefault(x.over, []).append(f"{x.role} {x.dtype}{list(x.shape)}")
        parts = [*sharing, f"batch axes {', '.join(self.divided)} may be divided"]
        for over, names in arrays.items():
            subject, verb = ("the gradient", "is") if len(names) == 1 else ("gradients", "are")
            parts.append(f"{subject} of {', '.join(names)} {verb} summed over {', '.join(over)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Explanation:
    """Report of what `fuse` finds in a call.

    Attributes:
        regions: the attentions that are compiled to kernels.
        outside: the number of equations of each primitive that are computed as written.
        reason: why the function is not fusible; None if it is.
        unopened: code that may have attention which was not found, in words; None if there is none.
        scores: the scores that are also computed in memory, beside the kernels: dtype, shape and place in words.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import explain
        >>> def attention(query, key, value):
        ...     return jax.nn.softmax(query @ key.mT) @ value
        >>> x = jax.ShapeDtypeStruct((2, 256, 64), jnp.bfloat16)
        >>> explanation = explain(attention)(x, x, x)
        >>> len(explanation.regions), dict(explanation.outside), explanation.reason
        (1, {}, None)
        >>> print(explain(jnp.sin)(x))
        not fusible: there is no product with a softmax of scores; `fuse` is for attention
    """

    regions: tuple[RegionReport, ...]
    outside: Mapping[str, int]
    reason: str | None = None
    unopened: str | None = None
    scores: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The source of all kernels."""
        return "\n\n".join(text for region in self.regions for text in region.kernels.values())

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not fusible: {self.reason}"
        parts = [f"region {i}\n" + _indented(str(region)) for i, region in enumerate(self.regions)]
        outside = ", ".join(f"{count} {name}" for name, count in sorted(self.outside.items())) or "nothing"
        unopened = [] if self.unopened is None else [self.unopened]
        scores = [f"in memory as well: scores {x}" for x in self.scores]
        return "\n".join([*parts, f"outside: {outside}", *scores, *unopened])


def explain[**P](function: Callable[P, Any]) -> Callable[P, Explanation]:
    """Return a function that reports what `fuse` finds in a call; only masks are evaluated.

    Args:
        function: the function, or the result of `fuse`. `jax.ShapeDtypeStruct` may replace arrays of the arguments.
            It is then unknown which tiles are skipped by masks that depend on these arrays.

    Returns:
        A function of the same arguments that returns an `Explanation`.

    Raises:
        Exception: (when called) any exception of `function` itself. A `NotFusible` becomes the `reason` of the report.

    References:
        FlashAttention of Dao et al. (2022), whose tiles are counted and drawn; see `fuse`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import explain
        >>> def attention(query, key, value):
        ...     scores = jnp.where(jnp.tri(query.shape[-2], dtype=bool), query @ key.mT, -jnp.inf)
        ...     return jax.nn.softmax(scores) @ value
        >>> x = jax.ShapeDtypeStruct((2, 128, 64), jnp.float32)
        >>> region = explain(attention)(x, x, x).regions[0]
        >>> region.tile
        (32, 32)
        >>> print(region.picture)
        #...
        ##..
        ###.
        ####
    """

    plain = function.__wrapped__ if is_fused(function) else function  # pyrefly: ignore[missing-attribute]
    context = getattr(function, "context_parallel", None) if is_fused(function) else None
    axes = getattr(function, "token_axes", None) if is_fused(function) else None

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> Explanation:
        try:
            program = trace(plain, args, kwargs, context, axes)
        except NotFusible as failure:
            return Explanation((), {}, str(failure))
        reports: list[RegionReport] = []
        outside: collections.Counter[str] = collections.Counter()
        scores: list[str] = []
        for inner in program.programs():
            known, needed = _masks(inner), inner.needed()
            found = [region for var, regions in inner.regions.items() if var in needed for region in regions]
            reports += [_report(region, known, program.sharing) for region in found]
            computed = inner.regions.keys() | inner.log_sums.keys() | inner.inner.keys()
            outside += collections.Counter(
                equation.primitive.name
                for equation in inner.jaxpr.jaxpr.eqns
                if has_effects(equation) or any(x in needed for x in equation.outvars)
                if not set(equation.outvars) & computed
            )
            scores += _scores_outside(inner, found)
        equations = [x for inner in program.programs() for x in inner.jaxpr.jaxpr.eqns]
        loop = loop_with_attention([x for x in equations if x.primitive.name not in OPENED])
        unopened = None
        if loop is not None and loop.primitive is region_p:
            unopened = "there is attention that is already fused: explain the function that was passed to `fuse`"
        elif loop is not None:
            unopened = f"there may be more in `{loop.primitive.name}`, {place_of(loop)}: {unopened_reason(loop)}"
        elif (refused := next((x.refused for x in program.programs() if x.refused), None)) is not None:
            unopened = f"around loops and branches everything is computed as written: {refused}"
        return Explanation(tuple(reports), dict(outside), unopened=unopened, scores=tuple(scores))

    return explained


def _scores_outside(program: Program, regions: Sequence[Region]) -> Iterator[str]:
    """Yield the query-key products that are computed outside regions although a region computes them too."""
    jaxpr, needed = program.jaxpr.jaxpr, program.needed()
    producers = producers_of(jaxpr)

    def source_of(var: Any) -> int:
        """Return the identity of the array behind a chain of moves and casts."""
        while isinstance(var, core.Var) and var in producers and producers[var].primitive.name in (*MOVES, *CASTS):
            var = producers[var].invars[0]
        return id(var)

    products = [x for region in regions for x in nodes_of(region.score, region.weight) if x.kind == "product"]
    pairs = [{source_of(x.leaf.source.key) for x in product.inputs if x.leaf is not None} for product in products]
    for equation in jaxpr.eqns:
        var = equation.outvars[0] if equation.outvars else None
        if equation.primitive.name != "dot_general" or var not in needed or var in program.regions:
            continue
        if set(map(source_of, equation.invars)) in pairs:
            aval = aval_of(var)
            yield f"{aval.dtype}{list(aval.shape)}, {place_of(equation)}"


def _report(region: Region, known: Mapping[Any, Any], sharing: Sharing | None) -> RegionReport:
    from blockdiag.fusion.runtime import kernel_choice
    from blockdiag.fusion.runtime import triton as triton_fused

    common = shared(region)
    declined = triton_fused.supports(common)
    kernels = [] if declined else kernel_choice.kernels(common)
    tile = kernels[0].tile if kernels else Tile(64, 64)
    features = [math.prod(region.sizes[x] for x in leaf.features) for leaf in region.leaves if leaf.role == "query"]
    columns = math.prod(region.sizes[x] for x in value_columns(region))
    cells = math.prod(region.sizes[x] for x in region.batch)
    tables = _tables(region, tile, known)
    visited = 1.0 if tables is None else tables.share(-(-region.sizes["k"] // tile.columns))
    products = _products(region)
    flops = 2 * cells * region.sizes["q"] * region.sizes["k"] * (products * max(features, default=0) + columns)
    arrays = [*(leaf.source for leaf in region.leaves if leaf.source.key is not None), region.value]
    sizes = {label: size for label, size in region.sizes.items() if label[0] not in "fd"}
    return RegionReport(
        sizes=sizes | {"f": max(features, default=0), "d": columns},
        batch=region.batch,
        leaves=tuple(
            LeafReport(
                leaf.role,
                leaf.labels,
                leaf.source.shape,
                leaf.source.dtype.name,
                leaf.source.key is None or leaf.source.constant is not None,
            )
            for leaf in region.leaves
        ),
        has_softmax=region.score is not None,
        has_weight=region.weight is not None,
        extras=len(region.extras),
        tile=(tile.rows, tile.columns),
        tables=tables,
        flops=int(flops * visited),
        read_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in {x.key: x for x in arrays}.values()),
        kernels={source.name: source.text for kernel in kernels for source in kernel.sources},
        declined=declined,
        divided=tuple(label for label in region.batch if region.sizes[label] > 1),
        summed=tuple(_summed(region)),
        shared=None if sharing is None else choose(sharing, region, _types(region)).described(sharing),
        eight_bit=() if declined else tuple(_eight_bit_products(region)),
    )


def _eight_bit_products(region: Region) -> Iterator[str]:
    """Yield the products of eight-bit operands, each with its dtype."""
    products = [x for x in nodes_of(region.score, region.weight) if x.kind == "product"]
    dtypes = {x.leaf.source.dtype for product in products for x in product.inputs if x.leaf is not None}
    yield from (f"query x key: {x}" for x in sorted(map(str, filter(is_eight_bit, dtypes))))
    if is_eight_bit(region.value.dtype):
        yield f"weights x value: {region.value.dtype}"


def _types(region: Region) -> list[Any]:
    """Return the types of a region's arrays, with the shardings of the trace."""
    return [
        jax.core.ShapedArray(x.shape, x.dtype) if x.key is None else getattr(x.key, "aval", x) for x in region.sources
    ]


def _summed(region: Region) -> Iterator[SummedGradient]:
    """Yield the gradients that are summed over devices, if all gradients are requested."""
    rule = backward_rule(region, None, has_log_sum_cotangent=False)
    leaves = [(leaf.role, leaf.source) for leaf in region.leaves if leaf.has_gradient]
    for (role, source), dims in zip([*leaves, ("value", region.value)], rule.results, strict=True):
        own = {label for dim in dims for label in dim}
        over = tuple(x for x in region.batch if x in rule.independent - own and region.sizes[x] > 1)
        is_known = source.key is None or source.constant is not None
        if over and not is_known and jax.dtypes.issubdtype(source.dtype, np.floating):
            yield SummedGradient(role, source.shape, source.dtype.name, over)


def _tables(region: Region, tile: Tile, known: Mapping[Any, Any]) -> Live | None:
    """Return the lists of visited tiles, None if all are visited or a needed array is unknown."""
    from blockdiag.fusion.runtime import arrange

    inner, change = arrange.arranged(region)
    arrays = {}
    if not needs_arrays(inner, tile):
        return live_tiles(inner, tile, arrays)
    for i, leaf in enumerate(region.leaves):
        is_bias = leaf.role in ("score", "distance") and leaf.source.dtype.kind in "fV"
        is_read = leaf.role not in WITH_FEATURES and not is_bias
        if not is_read or leaf.source.key is None or leaf.source.constant is not None:
            continue
        if leaf.source.key not in known:
            return None
        x = known[leaf.source.key]
        arrays[f"leaf{i}"] = np.asarray(leaf_array(leaf, x, region.batch, region.sizes) if change.leaves[i] else x)
    return live_tiles(inner, tile, arrays)


def _masks(program: Program) -> dict[Any, Any]:
    """Evaluate the arrays from which masks are computed, unless they depend on the result of an attention."""
    leaves = [leaf for found in program.regions.values() for region in found for leaf in region.leaves]
    wanted = {leaf.source.key for leaf in leaves if leaf.role not in WITH_FEATURES}
    jaxpr = program.jaxpr.jaxpr
    computed = program.regions.keys() | program.log_sums.keys() | program.inner.keys()
    for equation in reversed(jaxpr.eqns):
        if any(var in wanted for var in equation.outvars) and equation.outvars[0] not in computed:
            wanted |= {x for x in equation.invars if isinstance(x, core.Var)}
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, program.jaxpr.consts, strict=True))
    given = zip(jaxpr.invars, program.arguments, strict=True)
    known |= {var: x for var, x in given if not isinstance(x, jax.ShapeDtypeStruct)}
    for equation in jaxpr.eqns:
        inputs = [x for x in equation.invars if isinstance(x, core.Var)]
        if any(var in wanted for var in equation.outvars) and all(x in known for x in inputs):
            if equation.outvars[0] in computed or equation.effects:
                continue
            results = bind(equation, [read(known, x) for x in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
    return known


def _products(region: Region) -> int:
    """Return how many query-key products the score and the weight have."""
    return sum(node.kind == "product" for node in nodes_of(region.score, region.weight))


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
