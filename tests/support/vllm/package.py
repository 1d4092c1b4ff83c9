"""The vLLM that the tests of the back end run on: the installed one, its sources, or the stand-in.

``ANYATTN_VLLM_SOURCES``, the root of vLLM's source distribution, runs them on the package itself: its attention layers and interfaces are
plain Python. Modules of its dependencies that are not installed are then empty ones, for vLLM's imports alone. This changes the process
(vLLM registers operators and sets torch's options), so that such a run is one of its own:

    ANYATTN_VLLM_SOURCES=/path/to/vllm-0.33.0 python -m pytest tests/integrations/vllm
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.vllm.interface import STAND_IN

__all__ = ["SOURCES", "provided", "sources"]

SOURCES = "ANYATTN_VLLM_SOURCES"
_OURS = "anyattn.integrations.vllm"
_COMPILED = "vllm._C_stable_libtorch"  # vLLM's platform for NVIDIA GPUs imports it for its operators
# What vLLM looks for to find out where it runs and what is optional: these stay missing.
_OPTIONAL = ("libtpu", "amdsmi", "tpu_inference", "pynvml", "flashinfer", "torch_xla", "runai", "av", "soxr", "torchaudio", "soundfile",
             "torchcodec", "cv2", "intel", "vllm_", "aiter")  # fmt: skip


def sources() -> Path | None:
    """Where vLLM's sources are, of an installed package or named by the environment."""
    if os.environ.get(SOURCES):
        return Path(os.environ[SOURCES])
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parents[1]


@contextlib.contextmanager
def provided() -> Iterator[bool]:
    """Makes vLLM importable, and anyattn's modules that import it; afterwards neither is loaded. Whether it is vLLM itself."""
    path = os.environ.get(SOURCES)
    if path:
        if not any(isinstance(finder, _Missing) for finder in sys.meta_path):
            sys.meta_path.append(_Missing())
            sys.path.insert(0, path)
        yield True  # it stays: its operators cannot be registered twice
        return
    if importlib.util.find_spec("vllm") is not None:
        yield True
        return
    sys.path.insert(0, str(STAND_IN))
    try:
        yield False
    finally:
        sys.path.remove(str(STAND_IN))
        for name in list(sys.modules):
            if name.split(".")[0] == "vllm" or name.startswith(f"{_OURS}."):
                del sys.modules[name]
        importlib.invalidate_caches()


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__


class _Anything(metaclass=_AnyClass):
    """A class, function or decorator of a missing module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None: ...

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return importlib.import_module("pydantic_core.core_schema").any_schema()


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "999.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds last: empty modules for what vLLM's modules import and nobody has installed."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.split(".")[0]
        if name == _COMPILED:
            return importlib.machinery.ModuleSpec(name, self)
        if top in ("vllm", "torch", "triton", "anyattn", "tests") or top in sys.stdlib_module_names or name.startswith(_OPTIONAL):
            return None
        frame: Any = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = "" if frame is None else frame.f_globals.get("__name__", "")
        if not importer.startswith("vllm") and name.rpartition(".")[0] not in self.made:
            return None
        self.made.add(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
