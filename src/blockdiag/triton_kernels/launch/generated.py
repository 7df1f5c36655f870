"""Kernels of which there is only text: what is known of them before Triton has read it.

Triton makes a function of a kernel to hash it: it looks for the source of every function, parses it and visits what it
refers to. For generated kernels that was most of what loading them from the disk took: row attention forward and
backward took 78 ms on the machine of an H200, and takes 12 (`cached_kernels_ms` of benchmarks/results/fuse.csv). Here
text is hashed as it is, together with the library's modules that it imports, so that a kernel whose compiled form is on
disk never becomes a function.
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

# Modules that Triton's own cache key knows, by its version and the hash of its compiler, and one of Python's.
_KNOWN = ("triton", "math")


@dataclass(frozen=True)
class GeneratedKernel:
    """A `@triton.jit` or `@gluon.jit` function as text.

    It has what a plan, a compile key and Triton's cache on disk ask of a function; `function_of` makes it one.

    Attributes:
        text: a module that imports Triton, the library's device code and `math`, and nothing else.
        name: the kernel's, among the module's functions.

    Raises:
        ValueError: the text defines no such kernel, or imports something else.

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
    # Triton asks functions for it when a profiler listens.
    launch_metadata: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self._head is None:
            raise ValueError(f"`text` defines no kernel {self.name!r}: there is no @triton.jit or @gluon.jit above it")
        for module in _imports(self.text):
            # What a docstring begins a line with is none of the text's imports, and is refused like one.
            if module.partition(".")[0] not in (*_KNOWN, _LIBRARY):
                raise ValueError(f"kernel {self.name!r}: `text` imports {module}, whose changes nobody would notice")

    @property
    def __name__(self) -> str:
        return self.name

    @functools.cached_property
    def arg_names(self) -> list[str]:
        """The parameters, in order."""
        assert self._head is not None
        return [re.split("[:=]", part)[0].strip() for part in self._head["parameters"].split(",") if part.strip()]

    def is_gluon(self) -> bool:
        """Whether it is one of Gluon's."""
        assert self._head is not None
        return self._head["language"] == "gluon"

    @functools.cached_property
    def cache_key(self) -> str:
        """A digest of all that Triton's does not cover: the text, and the modules of this library that it needs."""
        digest = hashlib.sha256(f"{self.name}\n{self.text}".encode())
        for module in sorted(modules_needed(self.text)):
            digest.update(f"\n{module}\n{_source_of(module)}".encode())
        return digest.hexdigest()

    @functools.cached_property
    def _head(self) -> re.Match[str] | None:
        head = r"^@(?P<language>triton|gluon)\.jit\ndef " + re.escape(self.name) + r"\((?P<parameters>[^()]*)\):"
        return re.search(head, self.text, re.MULTILINE)


def function_of(kernel: Any) -> Any:
    """Triton's function of a kernel, whether it is one already or text."""
    return _function(kernel) if isinstance(kernel, GeneratedKernel) else kernel


@functools.lru_cache(maxsize=1024)
def _function(kernel: GeneratedKernel) -> Any:
    text = kernel.text
    file = f"<{_LIBRARY}.fuse {kernel.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton asks for the source of functions, which is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": f"{_LIBRARY}.generated"}
    exec(compile(text, file, "exec"), scope)
    function = scope[kernel.name]
    if list(function.arg_names) != kernel.arg_names:
        raise ValueError(f"kernel {kernel.name!r} takes {function.arg_names}, and its head reads {kernel.arg_names}")
    return function


def source_lines(kernel: Any) -> int:
    """Lines of a kernel's source; lists of many names make some of them long, but not what there is to compile."""
    return len((kernel.text if isinstance(kernel, GeneratedKernel) else kernel.src).splitlines())


def modules_needed(text: str) -> set[str]:
    """The modules of this library that a text imports, and those that they import."""
    found: set[str] = set()
    waiting = _imports(text)
    while waiting:
        module = waiting.pop()
        if module.partition(".")[0] == _LIBRARY and module not in found:
            found.add(module)
            waiting |= _imports(_source_of(module))
    return found


def _imports(text: str) -> set[str]:
    """The modules that a text imports, wherever it does so."""
    return set(re.findall(r"^[ \t]*(?:from|import)[ \t]+([\w.]+)", text, re.MULTILINE))


@functools.cache
def _source_of(module: str) -> str:
    # Found without being imported: device code imports Triton.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.submodule_search_locations is not None:
        raise ValueError(f"generated kernels import modules of this library by name, and {module} is none")
    source = spec.loader.get_source(module) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if source is None:
        raise ValueError(f"module {module} has no source to be hashed; install the library with its sources")
    return source
