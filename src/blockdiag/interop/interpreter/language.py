"""The Triton language for the interpreter.

A kernel's functions are rebuilt as plain Python in which `tl` is a stand-in module. The stand-in passes the
interpreter's semantic object to builtins, as the compiler would pass its own. Triton's modules are not modified. Only
the methods of its value types, which cannot be replaced by name, are wrapped while a session runs. These wrappers defer
to the originals when a compiler calls them at the same time.
"""

import __future__

import ast
import builtins
import contextlib
import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl

from blockdiag.interop.interpreter import reductions
from blockdiag.interop.interpreter.builder import Builder, Memory
from blockdiag.interop.interpreter.operators import operators
from blockdiag.triton_kernels.launch import private_triton

__all__ = ["Memory", "Session", "lent_to"]

_PARTS = private_triton.interpreter_parts()
JITFunction = _PARTS.function
TensorHandle = _PARTS.handle

_TO_TENSOR = "_blockdiag_to_tensor"
_MODULES = (triton, tl, tl.core, tl.math, tl.standard)


class Session:
    """The state of one launch: the numpy builder, and the kernel's functions rebuilt as Python that uses it."""

    def __init__(self, grid: tuple[int, int, int], memory: Memory) -> None:
        self.builder = Builder(memory)
        self.builder.set_grid_dim(*grid)
        self.semantic = _PARTS.semantic(self.builder)
        self.owner = threading.get_ident()
        self._functions: dict[JITFunction, Callable[..., Any]] = {}
        self._stand_ins: dict[types.ModuleType, Any] = {module: _StandIn(module, self) for module in _MODULES}

    def interpreted(self, function: JITFunction) -> Callable[..., Any]:
        """Return a plain Python function equivalent to `function`."""
        if function not in self._functions:
            # Stored before the body runs, so functions may refer to each other.
            self._functions[function] = self._rebuild(function)
        return self._functions[function]

    def resolve(self, value: Any, name: str) -> Any:
        """Return the replacement of a global `value` of a kernel's module, or of a member `name` of a triton module."""
        if isinstance(value, types.ModuleType):
            return self._stand_ins.get(value, value)
        if name in _REPLACED and getattr(value, "__module__", "").startswith("triton."):
            return functools.partial(_REPLACED[name], self)
        if tl.core.is_builtin(value):
            return self.supplied(value)
        return value

    def supplied(self, builtin: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a language builtin so that it receives this session's semantic object instead of the compiler's."""

        @functools.wraps(builtin)
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = self.semantic
            return builtin(*args, **kwargs)

        return call

    def scalar(self, data: np.ndarray, dtype: str) -> Any:
        """Return a scalar of the kernel language from an array of one element."""
        scalar_type: Any = tl.str_to_ty(dtype, None)
        return tl.tensor(TensorHandle(data, scalar_type), scalar_type)

    def pointer(self, address: int, dtype: str) -> Any:
        """Return a pointer of the kernel language."""
        pointer_type: Any = tl.str_to_ty("*" + dtype, None)
        return tl.tensor(TensorHandle(np.array([address], np.uint64), pointer_type), pointer_type)

    def descriptor(
        self, pointer: Any, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...]
    ) -> Any:
        """Return a tensor descriptor like the one that a launch makes on the host."""
        return self.semantic.make_tensor_descriptor(
            pointer,
            [self.scalar(np.array([size], np.int32), "i32") for size in shape],
            [*(self.scalar(np.array([stride], np.int64), "i64") for stride in strides[:-1]), tl.constexpr(1)],
            [tl.constexpr(size) for size in block_shape],
        )

    def _rebuild(self, function: JITFunction) -> Callable[..., Any]:
        code = _assigning_code(function.src, function.fn.__code__.co_filename, _definition_line(function))
        namespace = {name: self.resolve(value, name) for name, value in function.get_capture_scope().items()}
        namespace[_TO_TENSOR] = functools.partial(self.semantic.to_tensor, check_type=False)
        namespace["min"] = functools.partial(_extremum, self, tl.minimum, builtins.min)
        namespace["max"] = functools.partial(_extremum, self, tl.maximum, builtins.max)
        namespace |= {name: value for name, value in function.__globals__.items() if name in ("min", "max")}
        exec(code, namespace)
        return namespace[function.fn.__name__]


class _StandIn:
    """Stand-in for a triton module whose builtins work in a session."""

    def __init__(self, module: types.ModuleType, session: Session) -> None:
        self._module = module
        self._session = session

    def __getattr__(self, name: str) -> Any:
        value = self._session.resolve(getattr(self._module, name), name)
        setattr(self, name, value)
        return value


class _Assignments(ast.NodeTransformer):
    """Wraps assigned values in a conversion to tensors, as the compiler does, except annotated (constexpr) ones."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name(_TO_TENSOR, ast.Load()), [node.value], [])
        return node


def _definition_line(function: JITFunction) -> int:
    """Return the line of the function's `def`, where `function.src` starts: decorators are not part of it."""
    decorators = itertools.takewhile(lambda line: not line.lstrip().startswith("def "), function.raw_src)
    return function.starting_line_number + len(list(decorators))


@functools.lru_cache(maxsize=1024)
def _assigning_code(source: str, filename: str, first_line: int) -> types.CodeType:
    tree = _Assignments().visit(ast.parse(source))
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first_line - 1)
    # Annotations are not evaluated, since they may use names that only a type checker knows.
    return compile(tree, filename, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)


@contextlib.contextmanager
def lent_to(session: Session) -> Iterator[None]:
    """Replace the methods of triton's value types by those of `session`, and restore them at the end."""
    with contextlib.ExitStack() as restore:
        for cls in (tl.tensor, *_classes_below(tl.core.tensor_descriptor_base)):
            for name, member in list(vars(cls).items()):
                if name in _REPLACED:
                    replacement = functools.partial(_REPLACED[name], session)
                    _replace(restore, cls, name, _choosing(session, member, replacement))
                elif tl.core.is_builtin(member):
                    _replace(restore, cls, name, _supplying_method(session, member))
        for name, method in [*_TENSOR_METHODS.items(), *operators(session.semantic, dict(vars(tl.tensor)))]:
            _replace(restore, tl.tensor, name, method)
        _replace(restore, tl.tensor, "__init__", _initialise_tensor)
        _replace(restore, tl.block_type, "__init__", _initialise_block_type(tl.block_type.__init__))
        _replace(restore, tl.dtype, "to_ir", functools.partialmethod(_type_of, tl.dtype.to_ir))
        _replace(restore, tl.range, "__iter__", functools.partialmethod(_iterate_range, session))
        _replace(restore, tl.static_range, "__init__", _initialise_static_range(tl.static_range.__init__))
        _replace(restore, tl.static_range, "__iter__", _iterate_static_range)
        _replace(restore, JITFunction, "__call__", _call_jit_function(session, JITFunction.__call__))
        yield


def _classes_below(cls: type) -> list[type]:
    return [cls, *(below for child in cls.__subclasses__() for below in _classes_below(child))]


def _replace(restore: contextlib.ExitStack, cls: type, name: str, value: Any) -> None:
    if name in vars(cls):
        restore.callback(setattr, cls, name, vars(cls)[name])
    else:
        restore.callback(delattr, cls, name)
    setattr(cls, name, value)


def _supplying_method(session: Session, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_semantic") is None:
            kwargs["_semantic"] = session.semantic
        return method(*args, **kwargs)

    return call


def _choosing(session: Session, method: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_compiler = kwargs.get("_semantic") not in (None, session.semantic)
        return (method if is_compiler else replacement)(*args, **kwargs)

    return call


def _call_jit_function(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != session.owner:
            return original(function, *args, **kwargs)
        kwargs.pop("_semantic", None)
        return session.interpreted(function)(*args, **kwargs)

    return call


def _is_interpreted(tensor: Any) -> bool:
    return isinstance(tensor.handle, TensorHandle)


def _truth(tensor: Any) -> bool:
    # Only scalars have a truth value in kernels, and every scalar here is an array of one element.
    return not _is_interpreted(tensor) or tensor.handle.data.size != 1 or bool(tensor.handle.data.reshape(-1)[0])


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.reshape(-1)[0])


def _text(tensor: Any) -> str:
    return str(tensor.handle.data) if _is_interpreted(tensor) else f"{tensor.dtype}{tensor.shape}"


def _transposed(tensor: Any) -> Any:
    data = np.swapaxes(tensor.handle.data, -1, -2)
    return tl.tensor(TensorHandle(data, tensor.handle.dtype), tl.block_type(tensor.dtype, list(data.shape)))


_TENSOR_METHODS = {
    "__bool__": _truth,
    "__index__": _index,
    "__int__": _index,
    "__str__": _text,
    "__repr__": _text,
    "T": property(_transposed),
}


@functools.lru_cache(maxsize=1024)
def _language_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a tensor's shape and number of elements as kernel language values; cached, as they are slow to create."""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _initialise_tensor(tensor: Any, handle: Any, dtype: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, dtype, dtype.scalar
    tensor.shape, tensor.numel = _language_shape(tuple(dtype.shape) if dtype.is_block() else ())


def _initialise_block_type(original: Callable[..., None]) -> Callable[..., None]:
    @functools.lru_cache(maxsize=1024)
    def checked(shape: tuple[Any, ...]) -> tuple[Any, int, str]:
        block = object.__new__(tl.block_type)
        original(block, tl.int1, list(shape))
        return block.shape, block.numel, f"<{block.shape}, "

    def initialise(block: Any, element_ty: Any, shape: Any) -> None:
        block.element_ty = element_ty
        block.shape, block.numel, start_of_name = checked(tuple(shape))
        block.name = f"{start_of_name}{element_ty}>"

    return initialise


def _type_of(dtype: Any, original: Callable[..., Any], builder: Any) -> Any:
    # MLIR's integer types have no signedness and numpy's do, so the builder keeps Triton's type.
    return dtype if isinstance(builder, Builder) else original(dtype, builder)


def _iterate_range(loop: Any, session: Session) -> Iterator[Any]:
    bounds = (loop.start, loop.end, loop.step)
    is_long = any(isinstance(bound, tl.tensor) and bound.dtype == tl.int64 for bound in bounds)
    dtype, numpy_type = ("i64", np.int64) if is_long else ("i32", np.int32)
    for value in builtins.range(*map(_plain, bounds)):
        yield session.scalar(np.array([value], numpy_type), dtype)


def _initialise_static_range(original: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Any, *bounds: Any, **options: Any) -> None:
        original(self, *map(_as_constexpr, bounds), **{name: _as_constexpr(value) for name, value in options.items()})

    return initialise


def _iterate_static_range(loop: Any) -> Iterator[int]:
    return iter(builtins.range(*(_plain(bound) for bound in (loop.start, loop.end, loop.step))))


def _as_constexpr(value: Any) -> Any:
    return value if value is None or isinstance(value, tl.constexpr) else tl.constexpr(_plain(value))


def _plain(value: Any) -> int:
    return int(value.value if isinstance(value, tl.constexpr) else value)


def _extremum(session: Session, pairwise: Callable[..., Any], plain: Callable[..., Any], *values: Any) -> Any:
    if not any(isinstance(value, tl.tensor) for value in values):
        return plain(*values)
    return functools.reduce(lambda left, right: pairwise(left, right, _semantic=session.semantic), values)


def _static_assert(session: Session, condition: Any, message: str = "", **_: Any) -> None:
    if not condition:
        raise AssertionError(message)


def _hint(session: Session, value: Any, *_: Any, **__: Any) -> Any:
    return value


def _static_print(session: Session, *values: Any, sep: str = " ", **_: Any) -> None:
    print(*values, sep=sep)


_REPLACED: dict[str, Callable[..., Any]] = {
    "reduce": reductions.reduce,
    "_reduce_with_indices": reductions.reduce_with_indices,
    "associative_scan": reductions.associative_scan,
    "static_assert": _static_assert,
    "static_print": _static_print,
    "multiple_of": _hint,
    "max_contiguous": _hint,
    "max_constancy": _hint,
}
