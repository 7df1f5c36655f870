"""Generated kernels, kept as text until Triton's compiler needs a function.

To hash a kernel, Triton needs a function: it finds the function's source, parses it and visits everything it refers to.
For generated kernels that was most of the time to load them from disk. This module hashes the text itself, together
with the library's modules that it imports. A kernel whose compiled form is on disk never becomes a function.

Loading row attention, forward and backward, took 78 ms on the host of an H200 and now takes 12 ms (`cached_kernels_ms`
of benchmarks/results/fuse.csv).
"""

import functools
import hashlib
import importlib.abc
import importlib.util
import linecache
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

_LIBRARY = __name__.partition(".")[0]

# Modules that need no hash here: Triton's cache key covers Triton's version and compiler, and `math` is Python's.
_KNOWN = ("triton", "math")


@dataclass(frozen=True)
class GeneratedKernel:
    """The text of a `@triton.jit` or `@gluon.jit` function.

    It has the attributes that a plan, a compile key and Triton's on-disk cache read from a function. `function_of`
    converts it to a function.

    Attributes:
        text: the source of a module that imports only Triton, the library's device code and `math`.
        name: the name of the kernel in that module.

    Raises:
        ValueError: the text does not define the kernel, or it imports another module.

    Example:
        >>> from blockdiag.triton_kernels.launch.generated import GeneratedKernel
        >>> text = '''import triton
        ... import triton.language as tl
        ...
        ...
        ... @triton.jit
        ... def fill_kernel(p_out, BLOCK: tl.constexpr):
        ...     tl.store(p_out + tl.arange(0, BLOCK), 1)
        ... '''
        >>> kernel = GeneratedKernel(text, "fill_kernel")
        >>> kernel.arg_names, kernel.is_gluon()
        (['p_out', 'BLOCK'], False)
    """

    text: str = field(repr=False)
    name: str
    # Triton reads this attribute of functions when a profiler is active.
    launch_metadata: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self._head is None:
            raise ValueError(f"`text` defines no kernel {self.name!r}: there is no @triton.jit or @gluon.jit above it")
        for module in _imports(self.text):
            # A docstring's line that starts with "import" or "from" also counts as an import.
            if module.partition(".")[0] not in (*_KNOWN, _LIBRARY):
                raise ValueError(
                    f"kernel {self.name!r}: `text` imports {module}, whose changes its cache key would not cover"
                )

    @property
    def __name__(self) -> str:
        return self.name

    @functools.cached_property
    def arg_names(self) -> list[str]:
        """The names of the parameters, in order."""
        assert self._head is not None
        return [re.split("[:=]", part)[0].strip() for part in self._head["parameters"].split(",") if part.strip()]

    def is_gluon(self) -> bool:
        """Whether this is a Gluon kernel."""
        assert self._head is not None
        return self._head["language"] == "gluon"

    @functools.cached_property
    def cache_key(self) -> str:
        """A digest of everything that Triton's own key does not cover: the text and the library's modules it needs."""
        digest = hashlib.sha256(f"{self.name}\n{self.text}".encode())
        for module in sorted(modules_needed(self.text)):
            digest.update(f"\n{module}\n{_source_of(module)}".encode())
        return digest.hexdigest()

    @functools.cached_property
    def _head(self) -> re.Match[str] | None:
        head = r"^@(?P<language>triton|gluon)\.jit\ndef " + re.escape(self.name) + r"\((?P<parameters>[^()]*)\):"
        return re.search(head, self.text, re.MULTILINE)


def function_of(kernel: Any) -> Any:
    """Return Triton's function for a kernel that is either a function or text."""
    return _function(kernel) if isinstance(kernel, GeneratedKernel) else kernel


@functools.lru_cache(maxsize=1024)
def _function(kernel: GeneratedKernel) -> Any:
    text = kernel.text
    file = f"<{_LIBRARY}.fuse {kernel.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton looks up the source of functions; this one is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": f"{_LIBRARY}.generated"}
    exec(compile(text, file, "exec"), scope)
    function = scope[kernel.name]
    if list(function.arg_names) != kernel.arg_names:
        raise ValueError(f"kernel {kernel.name!r} takes {function.arg_names}, and its head reads {kernel.arg_names}")
    return function


def source_lines(kernel: Any) -> int:
    """Return the number of lines of a kernel's source.

    Lines estimate the compilation time better than characters: some lines are long lists of names, which cost nothing.
    """
    return len((kernel.text if isinstance(kernel, GeneratedKernel) else kernel.src).splitlines())


def modules_needed(text: str) -> set[str]:
    """Return the modules of this library that a text imports, directly or through other modules of the library."""
    found: set[str] = set()
    waiting = _imports(text)
    while waiting:
        module = waiting.pop()
        if module.partition(".")[0] == _LIBRARY and module not in found:
            found.add(module)
            waiting |= _imports(_source_of(module))
    return found


def _imports(text: str) -> set[str]:
    """Return the modules that a text imports, at any indentation."""
    return set(re.findall(r"^[ \t]*(?:from|import)[ \t]+([\w.]+)", text, re.MULTILINE))


@functools.cache
def _source_of(module: str) -> str:
    # The module is not imported, because device code imports Triton.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.submodule_search_locations is not None:
        raise ValueError(f"generated kernels import modules of this library by name, and {module} is not one")
    source = spec.loader.get_source(module) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if source is None:
        raise ValueError(f"module {module} has no source to be hashed; install the library with its sources")
    return source
