"""The workloads of dense attention: cases of `benchmarks.fuse` with heads of 64 to 256."""

from collections.abc import Mapping
from typing import Any

from benchmarks.fuse.cases import FuseCase, Group
from benchmarks.harness.family import names_of

DENSE_GROUPS: dict[Group, str] = {
    "causal": "keys up to the query",
    "full": "all keys",
    "window": "the query's own key and as many before it as the window says",
    "softcap": "30 tanh(score / 30), causal",
    "documents": "keys of the query's own document, up to the query; twelve documents of any length",
    "alibi": "a slope of each head times the distance of the key, causal",
}


class DenseCase(FuseCase):
    """One attention function on arrays of one size."""

    @property
    def name(self) -> str:
        """The name of the case in the CSV, which no other case has."""
        mask = f"window{self.window}" if self.group == "window" else self.group
        heads = f"h{self.query_heads}" + (f"k{self.key_heads}" if self.key_heads != self.query_heads else "")
        return f"{mask}_{self.batch}x{self.tokens}_{heads}_d{self.head_dim}"

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the workload."""
        return {**super().columns(), "op": "dense"}

    @property
    def share(self) -> int:
        """The weight of the case when the time budget is divided. All cases have the same."""
        return 1

    @property
    def check_text(self) -> str:
        """The cost of the exact results in words: they are computed in float64, one score matrix at a time."""
        matrices = self.batch * self.query_heads
        # Two products forward and four backward; the scores are kept.
        tflop = 6 * 2 * matrices * self.tokens**2 * self.head_dim / 1e12
        return f"{matrices} score matrices of {8 * self.tokens**2 / 1e9:.1f} GB, {tflop:.1f} TFLOP in float64"


def _case(group: Group, batch: int, tokens: int, heads: int, head_dim: int, **others: int) -> DenseCase:
    sizes = {"batch": batch, "tokens": tokens, "query_heads": heads, "key_heads": heads, "head_dim": head_dim}
    return DenseCase(group=group, is_causal=group in ("softcap", "alibi"), **(sizes | others))


def make_cases() -> list[DenseCase]:
    """All cases, in the order in which a short budget should be spent."""
    return [
        _case("causal", 1, 16384, 16, 128),
        # Its check is the longest one: 192 score matrices.
        _case("causal", 4, 8192, 48, 128),
        _case("causal", 4, 4096, 16, 128),
        _case("causal", 1, 16384, 16, 128, key_heads=2),
        _case("full", 1, 16384, 16, 128),
        _case("causal", 1, 16384, 16, 64),
        _case("causal", 4, 4096, 16, 64),
        _case("causal", 1, 16384, 8, 256),
        _case("causal", 1, 16384, 16, 96),
        _case("causal", 1, 16384, 8, 192),
        _case("window", 1, 16384, 16, 128, window=1024),
        _case("window", 4, 4096, 16, 64, window=256),
        _case("softcap", 1, 16384, 16, 64),
        _case("softcap", 1, 16384, 16, 128),
        _case("documents", 4, 4096, 16, 64),
        _case("alibi", 1, 16384, 16, 128),
    ]


DENSE_CASES: Mapping[str, DenseCase] = {case.name: case for case in make_cases()}


def small_case(group: Group, key_heads: int = 2) -> DenseCase:
    """A case of a group at a size that takes no time; tokens are no multiple of a tile."""
    return _case(group, 2, 72, 4, 16, key_heads=key_heads, window=7)


SMOKE_CASES = tuple(map(small_case, DENSE_GROUPS))


def select_dense_cases(names: str | None) -> list[FuseCase]:
    """Cases of a comma-separated list of groups and cases, all of them for None.

    Raises:
        ValueError: for a name that is neither.
    """
    wanted = names_of(names, (*DENSE_GROUPS, *DENSE_CASES), "groups or cases")
    return [case for case in DENSE_CASES.values() if case.group in wanted or case.name in wanted]
