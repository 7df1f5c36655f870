"""Error messages for torch objects used inside JAX functions: the offending name, its line and the remedy.

A traced JAX function that uses a torch tensor, dtype or function fails in many ways, and so does one that calls a
tensor method on an array: a TypeError of either library, an AttributeError, "Can't call numpy()". None of these
messages says that the function runs in JAX. This module finds the cause in the failing expression instead: the
traceback holds its start and end, and the frame holds the values of its names.
"""

import ast
import functools
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

# Errors that operations of JAX, numpy and torch raise for arguments of another library.
_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)

_LIBRARIES = {"blockdiag", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "torch", *sys.stdlib_module_names}

_KEYWORDS = {"dim": "axis", "keepdim": "keepdims"}


def explaining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a JAX function so that its errors name the torch object that caused them, and the remedy."""

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            # Refusals of unsupported calls already say why.
            raise
        except _ERRORS as error:
            message = _explanation(error)
            if message is None:
                raise
            raise TypeError(message) from error

    return explained


def _explanation(error: Exception) -> str | None:
    """Return a message that names the torch object in the failing expression and the remedy, or None if none is."""
    traceback = _last_of_user(error)
    if traceback is None:
        return None
    frame = traceback.tb_frame
    path = frame.f_code.co_filename
    expression = _failing_expression(traceback)
    for name, value, line in () if expression is None else _values(expression, frame):
        reason = _reason(name, value, f"({path}:{traceback.tb_lineno + line - 1})")
        if reason is not None:
            return reason
    place = f"({path}:{traceback.tb_lineno})"
    if (
        isinstance(error, AttributeError)
        and isinstance(error.obj, jax.Array)
        and hasattr(torch.Tensor, str(error.name))
    ):
        return (
            f"`.{error.name}` {place} is an attribute of torch tensors, which JAX arrays do not have: the function "
            "runs in JAX; write it with jax.numpy, jax.nn or jax.lax"
        )
    if expression is None:
        return None
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return (
            f"`{ast.unparse(expression)}` {place} reads the values of an array while the function is traced; write "
            "it with jax.numpy instead of numpy"
        )
    for node in ast.walk(expression):
        # Keyword names that torch uses and no function of jax.numpy takes.
        if isinstance(node, ast.keyword) and node.arg in _KEYWORDS and f"argument '{node.arg}'" in str(error):
            return (
                f"`{node.arg}=` {place} is torch's name of an argument, but the function runs in JAX; write "
                f"`{_KEYWORDS[node.arg]}=`"
            )
    return None


def _last_of_user(error: Exception) -> types.TracebackType | None:
    """Return the last traceback entry outside the libraries, which is the user's own line."""
    found, entry = None, error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
            found = entry
        entry = entry.tb_next
    return found


def _failing_expression(traceback: types.TracebackType) -> ast.expr | None:
    """Return the expression that was being evaluated, or None if its source is not available."""
    frame = traceback.tb_frame
    positions = list(frame.f_code.co_positions())[traceback.tb_lasti // 2]
    if None in positions:
        return None
    first, last, begin, end = map(int, positions)  # type: ignore[arg-type]
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if not lines:
        return None
    # Columns count bytes.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][begin:]
    try:
        return ast.parse(f"({b''.join(encoded).decode()}\n)", mode="eval").body
    except SyntaxError:  # a statement, such as `for`
        return None


def _values(node: ast.AST, frame: types.FrameType) -> Iterator[tuple[str, Any, int]]:
    """Yield each name in an expression, attributes included, with its value and its line within the expression."""
    if isinstance(node, ast.Name | ast.Attribute):
        names = ast.unparse(node).split(".")
        known = frame.f_globals | frame.f_locals
        if isinstance(_root(node), ast.Name) and names[0] in known:
            value = known[names[0]]
            try:
                for count, name in enumerate(names[1:], 1):
                    if isinstance(value, torch.Tensor):
                        # The rest is an attribute or a method of the tensor, so the tensor itself is reported.
                        yield ".".join(names[:count]), value, node.lineno
                        return
                    value = getattr(value, name)
            except AttributeError:
                return
            yield ".".join(names), value, node.lineno
            return
    for child in ast.iter_child_nodes(node):
        yield from _values(child, frame)


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _reason(name: str, value: Any, place: str) -> str | None:
    """Return why a value cannot be used in a JAX function and the remedy, or None if it can."""
    parts = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else (value,)
    tensor = next((part for part in parts if isinstance(part, torch.Tensor)), None)
    if tensor is not None:
        kind = "a torch parameter" if isinstance(tensor, torch.nn.Parameter) else "a torch tensor"
        holds = "is" if tensor is value else "holds"
        return (
            f"`{name}` {place} {holds} {kind} of shape {list(tensor.shape)}, but the function runs in JAX, on arrays: "
            "make it an argument of the function, and pass it with each call"
        )
    if isinstance(value, torch.dtype):
        twin = str(value).removeprefix("torch.")
        return f"`{name}` {place} is a torch dtype, but the function runs in JAX; write jnp.{twin}"
    if isinstance(value, torch.nn.Module):
        return (
            f"`{name}` {place} is a torch module, but the function runs in JAX, on arrays: call it outside of the "
            "function, or make its parameters arguments and write its computation with jax.numpy"
        )
    home = getattr(value, "__module__", None) or ""
    if callable(value) and home.split(".")[0] == "torch":
        return (
            f"`{name}` {place} belongs to torch, but the function runs in JAX, on arrays: write it with jax.numpy, "
            "jax.nn or jax.lax, or call it outside of the function"
        )
    if callable(value) and home.startswith("blockdiag.torch"):
        return (
            f"`{name}` {place} takes torch tensors, but the function runs in JAX, on arrays: call blockdiag's function "
            "of the same name"
        )
    return None
