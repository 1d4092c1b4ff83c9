"""Compiler of generated C++: finds it, keeps what it makes on disk with the other kernels, and loads it into this process.

``ANYATTN_COMPILED_LOOPS=0`` turns compiled loops off, ``CXX`` names the compiler (default: ``g++``, then ``clang++``). A text that does not
compile, or a result that does not load, is warned about once; the process then goes on without compiled loops.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from anyattn.disk_cache import Payload, open_cache

__all__ = ["function_of", "parallel_address", "reason_against"]

_FLAGS = (
    "-std=c++17", "-O2", "-ftree-vectorize", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-ffp-contract=off",
    "-fopenmp-simd", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared", "-x", "c++",
)  # fmt: skip
_FLAGS_OF_GCC = ("-fvect-cost-model=dynamic",)  # otherwise -O2 vectorises only loops of a known length
_LIMIT = 60  # seconds
_failure: list[str] = []
_loaded: dict[str, Callable[[int], int]] = {}


def reason_against() -> str | None:
    """Why nothing can be compiled in this process, for people; None if it can be tried."""
    if os.environ.get("ANYATTN_COMPILED_LOOPS", "1").strip().lower() in ("0", "off", "false", "no"):
        return "ANYATTN_COMPILED_LOOPS turns them off"
    if _failure:
        return _failure[0]
    if _compiler(os.environ.get("CXX", "")) is None:
        return "there is no C++ compiler (g++, clang++, or the one that CXX names)"
    return None if parallel_address() else "torch's threads are not libgomp's"


@lru_cache(maxsize=8)
def _compiler(chosen: str) -> tuple[str, ...] | None:
    """The command that compiles C++; chosen: as CXX names it."""
    try:
        named = [shlex.split(chosen)] if chosen.strip() else [["g++"], ["clang++"]]
    except ValueError:  # an open quotation mark
        return None
    for command in named:
        if command and (path := shutil.which(command[0])) is not None:
            return (path, *command[1:])
    return None


@lru_cache(maxsize=1)
def parallel_address() -> int:
    """The address of libgomp's function that runs a parallel region on torch's own threads; 0 if torch has another library."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@lru_cache(maxsize=8)
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=_LIMIT, check=True).stdout


def _flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    is_gcc = not any(word in _version(compiler).lower() for word in ("clang", "llvm", "icpx"))
    return (*_FLAGS_OF_GCC, *_FLAGS) if is_gcc else _FLAGS


@lru_cache(maxsize=8)
def _identity(compiler: tuple[str, ...]) -> str:
    """What decides the machine code besides the text: the compiler, its flags and this CPU."""
    macros = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    native = subprocess.run(macros, capture_output=True, text=True, timeout=_LIMIT, check=True).stdout
    return "\n".join([*compiler, *_flags(compiler), _version(compiler), native])


def function_of(text: str) -> Callable[[int], int] | None:
    """The function ``anyattn_pass`` of ``text``, a C function of one address; None if there is none, for the reason that
    ``reason_against`` gives from then on."""
    found = _loaded.get(text)
    if found is None and reason_against() is None:
        try:
            found = _loaded[text] = _load(_machine_code(text))
        except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
            _failure.append(f"compiling them failed: {_first_line(error)}")
            warnings.warn(f"anyattn computes without compiled loops: {_failure[0]}", RuntimeWarning, stacklevel=2)
    return found


def _first_line(error: Exception) -> str:
    output = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(output).splitlines() if "error" in line] or str(output).splitlines() or [type(error).__name__]
    return lines[0][:300]


def _machine_code(text: str) -> bytes:
    compiler = _compiler(os.environ.get("CXX", ""))
    assert compiler is not None
    cache = open_cache()
    key = hashlib.sha256(f"{_identity(compiler)}\0{text}".encode()).hexdigest()
    if cache is None:
        return _compile(compiler, text)
    return cache.get_or_make(key, lambda: Payload(_compile(compiler, text), {"name": "CPU loops", "compiler": compiler[0]})).data


def _compile(compiler: tuple[str, ...], text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="anyattn-") as folder:
        target = Path(folder) / "loops.so"
        command = [*compiler, *_flags(compiler), "-", "-o", str(target)]
        subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=True)
        return target.read_bytes()


def _load(code: bytes) -> Callable[[int], int]:
    """Loads a shared library from memory: the cache's file has a header, so the library gets a file of its own while it is loaded."""
    with tempfile.NamedTemporaryFile(prefix="anyattn-", suffix=".so") as file:
        file.write(code)
        file.flush()
        function = ctypes.CDLL(file.name).anyattn_pass
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64
    return function  # type: ignore[no-any-return]
