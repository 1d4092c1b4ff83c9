"""Source text made into functions that Triton can compile: Triton reads a function's source, so the text is where Python looks for it."""

from __future__ import annotations

import linecache
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

__all__ = ["load"]


@lru_cache(maxsize=4096)
def load(source: str, name: str) -> Any:
    """The namespace that ``source`` leaves: its functions, which see ``triton``, ``tl`` and our ``functions`` and ``tile_classes``.

    name: what tracebacks and profiles call the file; source that is equal is run once.
    """
    import triton
    import triton.language as tl

    from anyattn.backends.triton import functions, tile_classes

    filename = f"<anyattn {name}>"
    namespace = {"triton": triton, "tl": tl, "functions": functions, "tile_classes": tile_classes, "__name__": f"anyattn.generated.{name}"}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # no time: never looked for on disk
    exec(compile(source, filename, "exec"), namespace)
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})
