"""Declarations of registered operators."""

from typing import Any, Literal, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import blockdiag.torch  # noqa: E402, F401 - it registers the operators
from blockdiag.torch.operator import OPERATORS, THROUGH_JAX, Mutated, Operator, Size, count_tensors  # noqa: E402

Kind = Literal["a", "b"]


class Everything(NamedTuple):
    """Arguments of every type that a schema supports."""

    first: torch.Tensor
    second: torch.Tensor | None
    scale: torch.Tensor | float | None
    pages: Mutated
    means: Mutated | None
    size: Size
    window: Size | None
    count: int
    factor: float | None
    flag: bool
    kind: Kind | None
    implementation: str


def declared(**options: Any) -> Operator:
    return Operator(name="name", method="method", fake=lambda *values: None, **options)


def test_schema_follows_from_annotations():
    operator = declared(arguments=Everything, num_results=2, leading=("cotangent",), constants={"count": 3})
    assert operator.schema() == (
        "(Tensor cotangent, Tensor first, Tensor? second, Tensor? scale, Tensor(a!) pages, Tensor(b!)? means, "
        "SymInt size, SymInt? window, float? factor, bool flag, str? kind, str implementation) -> (Tensor, Tensor)"
    )
    assert count_tensors(Everything) == 5


@pytest.mark.parametrize(("num_results", "expected"), [(0, "()"), (1, "Tensor")])
def test_schema_lists_the_results(num_results, expected):
    assert declared(arguments=Everything, num_results=num_results).schema().endswith(f") -> {expected}")


def test_annotation_without_schema_type_raises_key_error():
    class Wrong(NamedTuple):
        x: complex

    with pytest.raises(KeyError):
        declared(arguments=Wrong, num_results=1).schema()


def test_every_operator_has_a_dtensor_rule():
    from blockdiag.torch.dtensor.rules import RULES

    assert {operator.name for operator in OPERATORS} == set(RULES)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_only_native_variant_is_safe_in_cuda_graphs(operator):
    assert torch.Tag.cudagraph_unsafe not in operator.variant("").default.tags
    assert torch.Tag.cudagraph_unsafe in operator.variant(THROUGH_JAX).default.tags
