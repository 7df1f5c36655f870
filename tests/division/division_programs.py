"""Programs that `test_division_cache` runs in separate processes; each prints JSON.

`python -m tests.division.division_programs programs` compiles and runs calls on an automatic mesh, with the compilation
cache that the environment names. `... digests` only traces all calls and prints the digests of their rules.
"""

import functools
import importlib.util
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from blockdiag.common import division
from blockdiag.common.rule import Rule, digest_of
from tests.division.division_support import batch_specs, make_mesh, shard
from tests.ops.op_calls import CALLS

_PROGRAMS = ("block_diagonal", "moba", "key_convolution", "paged", "fuse, causal")


def run_programs() -> dict[str, Any]:
    """Return the hits and misses of the compilation cache, and sums of the results."""
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    mesh, results = make_mesh("automatic"), {}
    for name in _PROGRAMS:
        call = CALLS[name]
        function = call.gradients(None) if call.differentiated else call.bound(None)
        specs = batch_specs(call, "data")
        placed = {name: shard(mesh, x, specs.get(name, P())) for name, x in call.arrays(4).items()}
        found = jax.jit(function)(**placed)
        results[name] = [float(np.abs(x).sum()) for x in jax.tree.leaves(found)]
    count = {name: events.count(f"/jax/compilation_cache/cache_{name}") for name in ("hits", "misses")}
    return {"found": count["hits"], "missed": count["misses"], "results": results}


def all_digests() -> dict[str, list[str]]:
    """Return the digests of each call, in the order of tracing."""
    found: dict[str, list[str]] = {}

    def record(name: str, rule: Rule) -> np.ndarray:
        assert " at 0x" not in rule.problem, rule.problem
        digest = digest_of(rule)
        found.setdefault(name, []).append(digest.tobytes().hex())
        return digest

    for name, call in CALLS.items():
        division.digest_of = functools.partial(record, name)
        function = call.gradients(None) if call.differentiated else call.bound(None)
        jax.clear_caches()
        jax.eval_shape(function, **call.types(4))
    if importlib.util.find_spec("triton") is not None:
        from tests.division.test_triton_call import arrays, weighted

        division.digest_of = functools.partial(record, "triton_call")
        jax.eval_shape(weighted, **arrays())
    return found


if __name__ == "__main__":
    print(json.dumps({"programs": run_programs, "digests": all_digests}[sys.argv[1]]()))
