"""Every public name has a complete docstring with an example that runs."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

# Modules whose `__all__` is public. A name that is added there without an example fails here.
MODULES = (
    "blockdiag",
    "blockdiag.fusion.explain",
    "blockdiag.fusion.gallery",
    "blockdiag.interop",
    "blockdiag.interop.flax",
    "blockdiag.torch",
)
NAMES = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
# Other names in the reference: parts of the library, which need no `References:` section.
REFERENCE = sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.rst"))
DIRECTIVE = r"^\.\. auto(?:function|class|exception|data):: (\S+)\.(\w+)$"
PARTS = sorted(
    {pair for page in REFERENCE for pair in re.findall(DIRECTIVE, page.read_text(), re.MULTILINE)} - {*NAMES}
)

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "References", "Example")
# Phrases with which an entry refers to another one for its shape or dtype.
ELSEWHERE = r"(see|as for|as of)\s+`|\bthe same for "
SHAPE = rf"\[[^\]]*\]|any shape|{ELSEWHERE}"
DTYPE = rf"\b(bool|complex|float|int)\d*\b|float8_|\bdtypes?\b|floating|integer|{ELSEWHERE}"


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Run the examples with JAX's default promotion instead of the strict one of the other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(("module", "name"), NAMES + PARTS, ids=[".".join(pair) for pair in NAMES + PARTS])
def test_public_name_is_documented(module, name):
    value = getattr(importlib.import_module(module), name)
    is_constant = not callable(value)
    text = constant_docstring(module, name) if is_constant else docstring(value)
    gaps = list(constant_gaps(text)) if is_constant else list(callable_gaps(value, has_source=(module, name) in NAMES))
    texts = [("", text), *((f".{member}", docstring(method)) for member, method in methods_of(value))]
    assert not gaps, f"{module}.{name}: " + "; ".join(gaps)
    for member, one in texts:
        failures = run_examples(one, f"{module}.{name}{member}")
        assert not failures, failures


@pytest.mark.parametrize("module", MODULES)
def test_dunder_all_lists_the_public_names(module):
    package = importlib.import_module(module)
    home = r"blockdiag\.torch\b" if module == "blockdiag.torch" else re.escape(module) + "$"
    defined = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and callable(value) and re.match(home, getattr(value, "__module__", None) or "")
    }
    assert defined <= set(package.__all__)
    assert sorted(package.__all__) == sorted(set(package.__all__) | set(getattr(package, "_HOMES", {})))


GOOD = """Twice x.

Args:
    x: float32 [N], what is doubled.

Returns:
    float32 [N].

Raises:
    ValueError: never.

References:
    Euclid (1956).

Example:
    >>> 1 + 1
    2
"""


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ("", "", None),
        (GOOD, "", "no docstring"),
        ("    2\n", "", "no `Example:` with a result"),
        ("(1956)", "", "no `References:` with a year"),
        ("    x: float32 [N], what is doubled.", "", "described are [], there are ['x']"),
        ("x: float32 [N]", "x, y: float32 [N]", "described are ['x', 'y'], there are ['x']"),
        ("x: float32 [N]", "x: float32", "no shape of `x`"),
        ("x: float32 [N]", "x: [N]", "no dtype of `x`"),
        ("x: float32 [N]", "x: see `y`", None),
        ("Raises:", "Errors:", "no `Raises:`"),
        ("Returns:", "Gives:", "no `Returns:`"),
        ("Twice x", "Several `x`es", "`x`es."),
    ],
)
def test_gaps_of_a_function_are_found(old, new, gap):
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    double.__doc__ = GOOD.replace(old, new) if old else GOOD
    found = list(callable_gaps(double))
    assert found == [] if gap is None else gap in found


def test_gaps_of_classes_are_found():
    @dataclasses.dataclass
    class Pair:
        first: torch.Tensor
        second: int

        def swapped(self) -> "Pair":
            return self

    assert list(callable_gaps(Pair)) == ["no docstring"]
    Pair.__doc__ = """Two.

Attributes:
    first: float32 [N].
    second: a number.

References:
    Euclid (1956).

Example:
    >>> 2
    2
"""
    assert list(callable_gaps(Pair)) == ["swapped: no docstring"]
    Pair.__doc__ = Pair.__doc__.replace("second: a number", "third: a number").replace("float32 [N]", "bytes")
    wrong = "described are ['first', 'third'], there are ['first', 'second']"
    assert list(callable_gaps(Pair))[:3] == [wrong, "no shape of `first`", "no dtype of `first`"]


def test_wrong_examples_are_found():
    assert run_examples(">>> 1 + 1\n2\n", "right") == ""
    assert "Expected:\n    3" in run_examples(">>> 1 + 1\n3\n", "wrong")
    assert "NameError" in run_examples(">>> pytest\n", "with the names of its module")
    assert list(constant_gaps("")) == ["no docstring below its assignment", "no example with a result"]


def docstring(value: Any) -> str:
    """Return the docstring at a definition, but not one that is inherited or generated by `dataclass`."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and (text or "").startswith(f"{value.__name__}("):
        return ""
    return inspect.cleandoc(text or "")


def constant_docstring(module: str, name: str) -> str:
    """Return the string below the assignment of a name in the module that defines it."""
    package = importlib.import_module(module)
    source = inspect.getsource(importlib.import_module(getattr(package, "_HOMES", {}).get(name, module)))
    body = ast.parse(source).body
    for statement, following in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            return inspect.cleandoc(following.value.value) if is_text else ""
    return ""


def methods_of(value: Any) -> list[tuple[str, Any]]:
    """Return the public methods and properties of a class, except those of `torch.nn.Module` other than `forward`."""
    members = vars(value).items() if inspect.isclass(value) else ()
    functions = [
        (name, next((getattr(member, x) for x in ("__func__", "fget", "func") if hasattr(member, x)), member))
        for name, member in members
        if not name.startswith("_") and (name == "forward" or not hasattr(torch.nn.Module, name))
    ]
    return [(name, member) for name, member in functions if inspect.isfunction(member)]


def sections_of(text: str) -> dict[str, list[str]]:
    """Return the indented lines of each section of a docstring in Google style."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        heading = re.fullmatch(rf"({'|'.join(SECTIONS)}):", line)
        if heading:
            current = found.setdefault(heading[1], [])
        elif line.startswith("    ") or not line:
            current.append(line.removeprefix("    "))
        else:
            current = []
    return found


def entries_of(lines: list[str]) -> dict[str, str]:
    """Return the text of each name in a section of entries `a, b: text`."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        entry = re.match(r"((?:\*{0,2}\w+, )*\*{0,2}\w+): (.*)", line)
        # Several names may fill more than a line.
        more = re.fullmatch(r"((?:\w+, )+\w+,?):?", line)
        if entry:
            names = [x.strip(" *") for x in entry[1].split(",")] + [x for x in names if x not in found]
            found |= dict.fromkeys(names, entry[2])
            names = list(names)
        elif more:
            names = [x for x in re.findall(r"\w+", line) if x]
            if line.endswith(":"):
                found |= dict.fromkeys(names, "")
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names if name in found}
    return found


def constant_gaps(text: str) -> Iterator[str]:
    """Yield the gaps in the docstring of a constant."""
    if not text:
        yield "no docstring below its assignment"
    yield from glued_code(text)
    if not any(example.want for example in doctest.DocTestParser().get_examples(text)):
        yield "no example with a result"


def callable_gaps(value: Callable[..., Any], *, has_source: bool = True) -> Iterator[str]:
    """Yield the gaps in the docstring of a function or class; `has_source` also demands a reference."""
    text = docstring(value)
    if not text:
        yield "no docstring"
        return
    if inspect.isclass(value):
        yield from glued_code(text)
    sections = sections_of(text)
    examples = doctest.DocTestParser().get_examples("\n".join(sections.get("Example", ())))
    if not any(example.want for example in examples):
        yield "no `Example:` with a result"
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    is_record = dataclasses.is_dataclass(value) and not any(is_taken(field.type) for field in dataclasses.fields(value))
    if has_source and not is_record and not re.search(r"\b(19|20)\d\d\b", "\n".join(sections.get("References", ()))):
        yield "no `References:` with a year"
    if not inspect.isclass(value):
        yield from function_gaps(value, text)
        if inspect.signature(value).parameters and "Raises" not in sections:
            yield "no `Raises:`"
    elif dataclasses.is_dataclass(value):
        fields = {
            field.name: field.type for field in dataclasses.fields(value) if field.init and field.type != "KW_ONLY"
        }
        yield from entry_gaps(entries_of(sections.get("Attributes", [])), fields)
    elif not getattr(value, "_is_protocol", False):
        parameters = dict(list(inspect.signature(value.__init__).parameters.items())[1:])
        described = entries_of(sections.get("Args", []))
        yield from entry_gaps(described, {name: x.annotation for name, x in parameters.items()})
        if "Raises" not in sections:
            yield "no `Raises:`"
    for name, method in methods_of(value):
        yield from (f"{name}: {gap}" for gap in function_gaps(method, docstring(method)))


def glued_code(text: str) -> Iterator[str]:
    """Yield code in backticks that a letter follows, which reStructuredText does not render as code."""
    parts = re.split(r"(`+[^`]+`+)", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(">")))
    for code, following in zip(parts[1::2], parts[2::2], strict=True):
        if re.match(r"\w", following):
            yield f"{code}{following[:3]}"


def function_gaps(function: Callable[..., Any], text: str) -> Iterator[str]:
    """Yield the gaps in the docstring of a function, method or property, except for a missing example."""
    if not text:
        yield "no docstring"
        return
    yield from glued_code(text)
    sections = sections_of(text)
    parameters = {name: x.annotation for name, x in inspect.signature(function).parameters.items()}
    taken = {name: x for name, x in parameters.items() if name not in ("self", "cls")}
    yield from entry_gaps(entries_of(sections.get("Args", [])), taken)
    if not taken:
        return
    if any(map(is_array, taken.values())) and "Raises" not in sections:
        yield "no `Raises:`"
    if "Returns" not in sections and inspect.signature(function).return_annotation not in (None, "None"):
        yield "no `Returns:`"


def entry_gaps(described: dict[str, str], expected: dict[str, Any]) -> Iterator[str]:
    """Yield a difference between the described and the expected names, and arrays without a shape or a dtype."""
    if set(described) != set(expected):
        yield f"described are {sorted(described)}, there are {sorted(expected)}"
    for name, annotation in expected.items():
        for what, pattern in (("shape", SHAPE), ("dtype", DTYPE)):
            if is_array(annotation) and not re.search(pattern, described.get(name, "")):
                yield f"no {what} of `{name}`"


def is_taken(annotation: Any) -> bool:
    """Return whether a field may hold an array or a function. Dataclasses with such fields need a reference."""
    return annotation is Any or is_array(annotation) or typing.get_origin(annotation) is Callable


def is_array(annotation: Any) -> bool:
    """Return whether a parameter may be or contain an array or a tensor."""
    if isinstance(annotation, typing.TypeAliasType):
        return is_array(annotation.__value__)
    if typing.get_origin(annotation) is Callable:
        return False
    parts = typing.get_args(annotation)
    if parts:
        return any(map(is_array, parts))
    return annotation in (torch.Tensor, jax.Array) or hasattr(annotation, "array_type")


def run_examples(text: str, name: str) -> str:
    """Run the examples of a docstring without the names of its module, and return the failures."""
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, 0)
    output: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    return "".join(output)
