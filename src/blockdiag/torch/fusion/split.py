"""Split the program of a fused function into ordered parts for JAX and torch.

| equations | computed by |
|---|---|
| independent of all arguments | JAX, once |
| views, casts and sums next to a region | torch |
| regions, and loops, branches and checkpointed parts that contain one (with parts of their own) | torch |
| everything else | JAX, in segments |

There is one segment before the first regions, one before each further level of regions that needs their results, and
one for the results. An equation belongs to the latest segment that precedes all its uses: a gate is computed after the
attention, next to the product with it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, read
from blockdiag.fusion.regions.axis_labels import producers_of
from blockdiag.torch.fusion.equations import computation_of, is_view
from blockdiag.torch.fusion.nested_programs import is_launched
from blockdiag.torch.fusion.random_keys import data_of, from_data

type Home = Literal["argument", "constant", "region", "torch", "jax"]


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations that form one JAX function.

    Attributes:
        inputs, outputs: the variables that it takes and returns.
        function: maps arrays to a list of arrays; random keys are represented by their data in both.
    """

    inputs: tuple[core.Var, ...]
    outputs: tuple[core.Var, ...]
    function: Callable[..., list[Any]]


class Split:
    """The parts of a program.

    Args:
        program: a flat program with `region_p`.

    Attributes:
        parts: in order, segments and equations: regions, equations that contain regions, and those that torch computes.
        constants: arrays that parts and results read and that depend on no argument.
    """

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self._program = program
        self._jaxpr = program.jaxpr
        self._producers = producers_of(self._jaxpr)
        self._homes: dict[core.Var, Home] = {}
        for var in self._jaxpr.invars:
            self._homes[var] = "argument"
        for var in self._jaxpr.constvars:
            self._homes[var] = "constant"
        # The number of consecutive regions that a value depends on; for a region's equation, the number before it.
        self._levels: dict[core.Var, int] = dict.fromkeys(self._homes, 0)
        self._region_levels: dict[int, int] = {}
        for equation in self._jaxpr.eqns:
            self._find_home(equation)
        self._count = 1 + max(self._region_levels.values(), default=-1)
        # The segment that computes each value of JAX's.
        self._stages = self._find_stages()
        self.parts: list[Segment | core.JaxprEqn] = []
        self._emitted: set[core.Var] = set()
        self._wanted_constants: dict[core.Var, None] = {}
        for level in range(self._count + 1):
            self._add_segment(level)
            for equation in self._jaxpr.eqns:
                if self._region_levels.get(id(equation)) == level:
                    self._add_views(equation.invars)
                    self.parts.append(equation)
        self._add_views(self._jaxpr.outvars)
        self.constants = self._constants()

    def owner_of(self, result: core.Var) -> core.Var:
        """Return the value that owns a value's memory: the source of torch's views, or the value itself."""
        while self._homes[result] == "torch" and is_view(self._producers[result]):
            (result,) = variables_of(self._producers[result].invars)
        return result

    def region_operands(self) -> list[Sequence[Any]]:
        """Return the operands of each region, and of each equation that contains one."""
        return [x.invars for x in self.parts if isinstance(x, core.JaxprEqn) and id(x) in self._region_levels]

    def is_new(self, var: core.Var) -> bool:
        """Return whether each call computes a value, rather than reads an argument or a constant."""
        return self._homes[var] not in ("argument", "constant")

    def _find_home(self, equation: core.JaxprEqn) -> None:
        given = variables_of(equation.invars)
        homes = {self._homes[x] for x in given}
        level = max((self._levels[x] for x in given), default=0)
        home: Home = "jax"
        if is_launched(equation):
            home = "region"
            self._region_levels[id(equation)] = level
            level += 1
        elif homes <= {"constant"}:
            home = "constant"
        elif "jax" not in homes and computation_of(equation) is not None:
            home = "torch"
        for var in equation.outvars:
            self._homes[var], self._levels[var] = home, level

    def _find_stages(self) -> dict[core.Var, int]:
        """Return the segment that computes each needed value of JAX's."""
        stages: dict[core.Var, int] = {}

        def ask(operands: Iterable[Any], stage: int) -> None:
            for x in variables_of(operands):
                if self._homes[x] == "jax":
                    stages[x] = min(stages.get(x, stage), stage)

        ask(self._jaxpr.outvars, self._count)
        for equation in reversed(self._jaxpr.eqns):
            if id(equation) in self._region_levels:
                ask(equation.invars, self._region_levels[id(equation)])
                continue
            own = [stages[var] for var in equation.outvars if var in stages]
            if own:
                stages |= {var: min(own) for var in equation.outvars if var in stages}
                ask(equation.invars, min(own))
        return stages

    def _add_segment(self, stage: int) -> None:
        # Outputs are the values that results, regions and later segments read.
        asked = set(variables_of(self._jaxpr.outvars))
        for equation in self._jaxpr.eqns:
            stages = [self._stages[var] for var in equation.outvars if var in self._stages]
            if id(equation) in self._region_levels or (stages and min(stages) > stage):
                asked |= set(variables_of(equation.invars))
        outputs = tuple(var for var, own in self._stages.items() if own == stage and var in asked)
        if not outputs:
            return

        def is_input(var: core.Var) -> bool:
            home = self._homes[var]
            return home in ("argument", "region") or (home == "jax" and self._stages[var] < stage)

        self.parts.append(self._segment(outputs, is_input))

    def _segment(self, outputs: tuple[core.Var, ...], is_input: Callable[[core.Var], bool]) -> Segment:
        """Return the equations between inputs and outputs as a function."""
        equations: list[core.JaxprEqn] = []
        needed = set(outputs)
        for equation in reversed(self._jaxpr.eqns):
            if any(var in needed and not is_input(var) for var in equation.outvars):
                equations.append(equation)
                needed |= set(variables_of(equation.invars))
        every = [*self._jaxpr.invars, *(var for equation in self._jaxpr.eqns for var in equation.outvars)]
        inputs = tuple(var for var in every if var in needed and is_input(var))

        def compute(*arrays: Any) -> list[Any]:
            known: dict[core.Var, Any] = dict(zip(self._jaxpr.constvars, self._program.consts, strict=True))
            known |= {var: from_data(x, aval_of(var)) for var, x in zip(inputs, arrays, strict=True)}
            for equation in reversed(equations):
                results = bind(equation, [read(known, x) for x in equation.invars])
                known |= dict(zip(equation.outvars, results, strict=True))
            return [data_of(known[var]) for var in outputs]

        return Segment(inputs, outputs, compute)

    def _add_views(self, operands: Iterable[Any]) -> None:
        """Add the equations that torch computes for some operands, each once."""
        for var in variables_of(operands):
            if self._homes[var] == "constant":
                self._wanted_constants[var] = None
            elif self._homes[var] == "torch" and var not in self._emitted:
                equation = self._producers[var]
                self._add_views(equation.invars)
                self.parts.append(equation)
                self._emitted |= set(equation.outvars)

    def _constants(self) -> dict[core.Var, Any]:
        wanted = tuple(self._wanted_constants)
        if not wanted:
            return {}
        segment = self._segment(wanted, lambda var: False)
        return dict(zip(wanted, jax.jit(segment.function)(), strict=True))


def variables_of(operands: Iterable[Any]) -> list[core.Var]:
    """Return the operands that are variables rather than literals."""
    return [x for x in operands if isinstance(x, core.Var)]
