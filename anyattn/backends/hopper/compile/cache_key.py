"""Cache key of a compiled kernel: a SHA-256 of all inputs of its compilation, and of nothing else."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import platform
import sys
from functools import lru_cache
from pathlib import Path

import torch

from anyattn.backends.hopper.backward_config import BackwardConfig, RowsConfig
from anyattn.backends.hopper.config import Config
from anyattn.backends.hopper.tables_config import TablesConfig
from anyattn.backends.hopper.wide_backward_config import WideBackwardConfig
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.cute_mod import NativeFunction

__all__ = ["ARCH", "AnyConfig", "NoContentError", "canonical", "key_of", "sources"]

AnyConfig = Config | TablesConfig | BackwardConfig | RowsConfig | WideBackwardConfig  # those that identify compiled kernels
ARCH = "sm_90a"
_PACKAGES = (
    "anyattn",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
# every module that a kernel is traced through is listed here or lies in a listed folder;
# tests/backends/hopper/test_launch.py checks the imports
SOURCES = ("backends/hopper", "sequences", "mods", "arithmetic.py")


class NoContentError(TypeError):
    """An object in a config, such as a function, has no content to hash: its kernel is cached in memory only."""


def canonical(item: object) -> str:
    """``item`` as text that is the same in every process: dataclasses by field names and values, expressions by content key.

    >>> canonical((1, 1.0, True, None))
    '(1,1.0,True,None)'
    """
    if isinstance(item, Expr):
        if not all(n.attr.has_content for n in item.nodes if isinstance(n.attr, NativeFunction)):
            raise NoContentError("a CuTe function captures what has no content to name a kernel by")
        return f"Expr:{item.key}"
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = ",".join(f"{f.name}={canonical(getattr(item, f.name))}" for f in dataclasses.fields(item))
        return f"{type(item).__name__}({fields})"
    if isinstance(item, enum.Enum):
        return f"{type(item).__name__}.{item.name}"
    if isinstance(item, tuple):
        return "(" + ",".join(map(canonical, item)) + ")"
    if isinstance(item, (torch.dtype, bool, int, float, str)) or item is None:
        return repr(item)
    if isinstance(item, type) and "<" not in item.__qualname__:  # a class defined inside a function has no unique name
        return f"{item.__module__}.{item.__qualname__}"
    raise NoContentError(f"{type(item).__name__} has no content to name a kernel by")


def key_of(config: AnyConfig, kinds: tuple) -> str:
    """64 hexadecimal digits that name the kernel for ``config`` and ``kinds`` (see ``launch.kinds_of``).

    Raises NoContentError if an object in them has no content to hash.
    """
    return hashlib.sha256("\n".join((canonical(config), canonical(kinds), _surroundings())).encode()).hexdigest()


@lru_cache(maxsize=1)
def _surroundings() -> str:
    """Everything else that a kernel depends on: our sources, the compiler, and the host processor for which its launch code is compiled."""
    versions = [f"{name}={_version(name)}" for name in _PACKAGES]
    python = ".".join(map(str, sys.version_info[:2]))
    return "\n".join((ARCH, f"python={python}", *versions, _processor(), sources()))


def sources() -> str:
    """A hash of the text of all modules through which kernels are traced."""
    root, total = Path(__file__).parents[3], hashlib.sha256()
    modules = (p for name in SOURCES for p in ((root / name).rglob("*.py") if (root / name).is_dir() else (root / name,)))
    for path in sorted(modules):
        text = path.read_bytes()
        total.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return total.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    """The host's instruction set: the compiler generates launch code for the processor it runs on, AVX-512 included."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        flags = ""
    return f"{sys.platform} {platform.machine()} " + hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()
