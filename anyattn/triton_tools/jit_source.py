"""Loading of generated source as functions that Triton can compile: Triton reads a function's source, so it is put into ``linecache``."""

from __future__ import annotations

import hashlib
import importlib
import linecache
from collections.abc import Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from anyattn import disk_cache

__all__ = ["digest", "group", "load"]


@lru_cache(maxsize=4096)
def load(source: str, name: str, *modules: str) -> Any:
    """The namespace that ``source`` defines. Its functions can use ``triton``, ``tl``, our ``device_math`` and ``modules`` (dotted names,
    each available under its last part).

    name: of the file, in tracebacks and profiles. Equal source is run once. The text is written to the user's cache for reading.
    """
    import triton
    import triton.language as tl

    from anyattn.triton_tools import device_math

    filename, source = f"<anyattn {name}>", disk_cache.TEXT_HEADER + source  # header: line numbers match the cached file
    beside: dict[str, Any] = {"device_math": device_math}
    for module in modules:
        beside[module.rpartition(".")[2]] = importlib.import_module(module)
    namespace = {"triton": triton, "tl": tl, **beside, "__name__": f"anyattn.generated.{name}"}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # mtime None: never checked on disk
    exec(compile(source, filename, "exec"), namespace)
    disk_cache.keep_text(f"triton-{name}", source)
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})


def group(fields: Any, values: Iterable[str]) -> str:
    """Source that constructs a NamedTuple of a module called ``arguments`` from the texts of its fields.

    By keyword, so that the text contains the order of the fields: Triton's disk cache is keyed by the kernel's text.
    """
    return f"arguments.{fields.__name__}({', '.join(f'{name}={value}' for name, value in zip(fields._fields, values, strict=True))})"


def digest(source: str) -> str:
    """A short hash of a source, the same in every process."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]
