"""Kernel compilation from a config and the kinds of the arguments to a shared library or object file; needs no GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anyattn.backends.hopper.backward_config import BackwardConfig, RowsConfig
from anyattn.backends.hopper.compile.cache_key import ARCH, AnyConfig
from anyattn.backends.hopper.tables_config import TablesConfig
from anyattn.backends.hopper.wide_backward_config import WideBackwardConfig
from anyattn.disk_cache import Payload

__all__ = [
    "compiled_object",
    "dlpack_function",
    "examples",
    "has_tvm_ffi",
    "is_loadable",
    "kernel_of",
    "load",
    "make",
    "name_of",
    "wrapped",
]

_FUNCTION = "anyattn_hopper_forward"
_ELF = b"\x7fELF"  # first bytes of object files and shared libraries
_WIDE = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def has_tvm_ffi() -> bool:
    """Whether kernels can take torch's tensors directly; if not, every launch wraps each tensor."""
    return importlib.util.find_spec("tvm_ffi") is not None


def make(config: AnyConfig, kinds: tuple, may_link: bool = True) -> Payload:
    """The compiled kernel: a shared library, which loads in milliseconds, if the machine has a linker, else an object file."""
    code = compiled_object(config, kinds)
    library, runtime = _linked(code) if may_link else None, _runtime()
    facts = {
        **_described(config),
        "function": _FUNCTION,
        "runtime": runtime,
        "form": "object" if library is None else "library",
    }
    return Payload(code if library is None else library, facts)


def _described(config: AnyConfig) -> dict[str, Any]:
    """The facts about a kernel that ``anyattn cache`` shows."""
    if isinstance(config, TablesConfig):
        return {"name": name_of(config), "head_dim": 0, "dtype": "int32"}
    return {"name": name_of(config), "head_dim": config.head_dim, "dtype": "bfloat16" if config.is_bf16 else "float16"}


def name_of(config: AnyConfig) -> str:
    """The variant's readable name."""
    if isinstance(config, TablesConfig):
        return "tables of sequences"
    if isinstance(config, RowsConfig):
        return "backward: dq from its sums" if config.is_after else "backward: rows' statistics"
    left, right = config.has_left, config.has_right
    band = {(False, False): "full", (False, True): "causal", (True, True): "window", (True, False): "left"}[left, right]
    if isinstance(config, WideBackwardConfig):
        words = [f"score {config.score.key[:8]}"] if config.score is not None else []
        words += [f"mask {ask.expr.key[:8]}" for ask in config.asks]
        return " + ".join([f"backward: {config.of} of wide heads", "lists" if config.lists else band, *words])
    if isinstance(config, BackwardConfig):
        words = [f"score {config.score.key[:8]}"] if config.score is not None else []
        words += [f"mask {ask.expr.key[:8]}" for ask in (config.partial, *config.always) if ask is not None]
        words += [word for word, has in (("ragged", config.has_entries), ("deterministic", config.is_deterministic)) if has]
        return " + ".join(["backward", "lists" if config.lists else band, *words])
    extras = [
        f"score {config.score.key[:8]}" if config.score is not None else "",
        *(f"mask {ask.expr.key[:8]}" for ask in (config.partial, *config.always) if ask is not None),
        *(
            word
            for word, has in (
                ("packed heads", config.heads_per_tile > 1),
                ("ragged", config.has_entries),
                ("pages", config.is_paged),
                ("values in keys", config.has_one_kv),
                ("pairs", config.pairs),
                ("split keys", config.is_split),
                ("sink", config.has_sink),
                ("skips", config.has_skip),
            )
            if has
        ),
        *(word for word, has in (("lse", config.has_lse), ("max", config.has_max)) if has),
    ]
    return " + ".join(["lists" if config.lists else band, *filter(None, extras)])


def compiled_object(config: AnyConfig, kinds: tuple) -> bytes:
    """The host and device code as one object file, callable through tvm-ffi."""
    with tempfile.TemporaryDirectory(prefix="anyattn-") as folder:
        path = Path(folder) / "kernel.o"
        with _without_collections():
            _compiled(config, kinds, True).export_to_c(str(path), function_name=_FUNCTION, export_only_tvm_ffi_symbols=True)
        return path.read_bytes()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Context without garbage collection: importing the compiler and tracing create so many objects that collections would take half of
    the import and much of the trace."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiled(config: AnyConfig, kinds: tuple, through_tvm_ffi: bool) -> Any:
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    stream = make_fake_stream(use_tvm_ffi_env_stream=through_tvm_ffi)
    options = f"--gpu-arch {ARCH}" + (" --enable-tvm-ffi" if through_tvm_ffi else "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuTe DSL's own deprecations
        # an exported kernel needs no execution engine; one would generate the machine code a second time
        return cute.compile(kernel_of(config), *examples(kinds), stream, options=options, no_jit_engine=through_tvm_ffi)


def kernel_of(config: AnyConfig) -> Any:
    """The object to compile, whose kernel is specialised for ``config``."""
    from anyattn.backends.hopper.kernel.backward.alone import HopperAloneBackward
    from anyattn.backends.hopper.kernel.backward.backward import HopperBackward
    from anyattn.backends.hopper.kernel.backward.halved import HopperHalvedBackward
    from anyattn.backends.hopper.kernel.backward.rows import RowsAfter, RowsBefore
    from anyattn.backends.hopper.kernel.backward.wide import HopperWideBackward
    from anyattn.backends.hopper.kernel.forward import HopperForward
    from anyattn.backends.hopper.kernel.in_order.forward import HopperInOrderForward, HopperInPlaceForward
    from anyattn.backends.hopper.kernel.skipping.forward import HopperSkippingForward
    from anyattn.backends.hopper.kernel.tile_order import SequenceTables
    from anyattn.backends.hopper.kernel.wide.forward import HopperWideForward
    from anyattn.backends.hopper.kernel.wide_backward.keys import HopperKeyGradient, HopperValueGradient
    from anyattn.backends.hopper.kernel.wide_backward.queries import HopperQueryGradient

    if isinstance(config, WideBackwardConfig):
        return {"dq": HopperQueryGradient, "dk": HopperKeyGradient, "dv": HopperValueGradient}[config.of](config)
    if isinstance(config, TablesConfig):
        return SequenceTables(config)
    if isinstance(config, RowsConfig):
        return RowsAfter(config) if config.is_after else RowsBefore(config)
    if isinstance(config, BackwardConfig):
        if config.tiles.blocks > 1:
            return HopperAloneBackward(config)
        if config.tiles.halves_dp:
            return HopperHalvedBackward(config)
        return HopperWideBackward(config) if config.tiles.shares_keys else HopperBackward(config)
    if config.has_skip:
        return HopperSkippingForward(config)
    if config.in_order:
        return HopperInPlaceForward(config) if config.head_dim_v > 128 else HopperInOrderForward(config)
    return HopperWideForward(config) if config.is_wide else HopperForward(config)


def examples(kinds: tuple) -> list[Any]:
    """Placeholders for arguments of the given ``kinds`` (``launch.kinds_of``)."""
    rest = iter(kinds)
    return [_example(kind, rest, is_nested=False) for kind in rest]


def _example(kind: Any, rest: Iterator, is_nested: bool) -> Any:
    from cutlass import Float32, Int32

    if isinstance(kind, torch.dtype):
        return _fake_tensor(kind, next(rest), is_nested)
    if isinstance(kind, int):  # the length of an integer tuple
        return tuple(_example(next(rest), rest, is_nested=True) for _ in range(kind))
    if kind is type(None):
        return None
    if not issubclass(kind, (int, float)):
        raise TypeError(f"an argument of a kernel is a {kind.__name__}; wanted a tensor, None, an int, a float, or a tuple of these")
    return Float32(0.0) if issubclass(kind, float) else Int32(0)


def _fake_tensor(dtype: torch.dtype, rank: int, is_nested: bool) -> Any:
    """A placeholder tensor with sizes in 32 bits and strides in 64; the last stride is 1 unless ``rank`` is negative.

    The kernel's own 16-bit tensors (q, k, v, out) are read by TMA: addresses and strides are multiples of 16 bytes. A captured tensor
    may have any strides.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    is_dense, rank = rank >= 0, abs(rank) or 1  # in the kernel a scalar tensor has one dimension
    is_wide = not is_nested and dtype in _WIDE and rank >= 3
    last = [1] if is_dense else [cute.sym_int64()]
    strides = [cute.sym_int64(divisibility=8) if is_wide else cute.sym_int64() for _ in range(rank - 1)] + last
    alignment = 16 if is_wide else dtype.itemsize
    return make_fake_tensor(_element(dtype), tuple(cute.sym_int() for _ in range(rank)), tuple(strides), assumed_align=alignment)


def _element(dtype: torch.dtype) -> Any:
    import cutlass

    names = {"bool": "Uint8", "bfloat16": "BFloat16"}  # bool is a byte: the kernel tests it against 0
    name = str(dtype).removeprefix("torch.")
    return getattr(cutlass, names.get(name, name.capitalize()))


def dlpack_function(config: AnyConfig, kinds: tuple) -> Callable[..., None]:
    """The kernel as a function of torch's tensors without tvm-ffi: tens of microseconds per launch, and not cached on disk."""
    import cuda.bindings.driver as cuda

    # CuTe's own tensors need a stride of 1 in some dimension; other tensors are copied
    function = _compiled(config, tuple(abs(k) if isinstance(k, int) else k for k in kinds), False)

    def call(*arguments: Any) -> None:
        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        stream = cuda.CUstream(torch.cuda.current_stream(device).cuda_stream)
        function(*(wrapped(a, is_nested=False) for a in arguments), stream)

    return call


def wrapped(item: Any, is_nested: bool) -> Any:
    """``item`` as CuTe's own type, with the layout of its placeholder."""
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import from_dlpack

    if isinstance(item, torch.Tensor):
        item = item.detach()
        item = item if item.stride(-1) == 1 else item.clone(memory_format=torch.contiguous_format)
        is_wide = not is_nested and item.dtype in _WIDE and item.ndim >= 3
        return from_dlpack(item, assumed_align=16 if is_wide else item.element_size()).mark_layout_dynamic(leading_dim=item.ndim - 1)
    if isinstance(item, tuple):
        return tuple(wrapped(x, is_nested=True) for x in item)
    if isinstance(item, float):
        return Float32(item)
    return None if item is None else Int32(item)


def _linked(code: bytes) -> bytes | None:
    """``code`` linked as a shared library that names the two libraries it needs; None without a linker, or if linking fails."""
    linker = next(filter(None, map(shutil.which, ("ld", "ld.lld", "ld.gold"))), None)
    if linker is None:
        return None
    import tvm_ffi

    with tempfile.TemporaryDirectory(prefix="anyattn-") as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        source.write_bytes(code)
        # all symbols are bound when the library loads: a missing function is an error then, not in a launch
        command = [linker, "-shared", "-z", "now", "-z", "noexecstack", "-Bsymbolic", "-o", str(target), str(source)]
        command += [_runtime_path(), tvm_ffi.libinfo.find_libtvm_ffi()]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
        return target.read_bytes()


def _runtime_path() -> str:
    """The path of CuTe DSL's runtime library, which every kernel calls."""
    from cutlass.cute.runtime import find_runtime_libraries

    found = find_runtime_libraries(enable_tvm_ffi=False)
    if not found:
        raise RuntimeError("CuTe DSL's runtime library is missing; install nvidia-cutlass-dsl[cu13] again")
    return found[0]


def _runtime() -> str:
    """The path of the runtime library relative to the package: the next process finds it without importing the compiler."""
    return os.path.relpath(_runtime_path(), _package())


def _package() -> str:
    spec = importlib.util.find_spec("cutlass")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the Hopper backend needs nvidia-cutlass-dsl: pip install 'anyattn[cute]'")
    return next(iter(spec.submodule_search_locations))


_kept: list[Any] = []  # loaded libraries are never unloaded: a kernel may still run when its last caller is gone


def is_loadable(payload: Payload) -> bool:
    """Whether a payload read from disk has the form that ``make`` returns; its checksum only proves that it is unaltered."""
    facts = payload.facts
    has_names = all(isinstance(facts.get(name), str) for name in ("function", "runtime"))
    return has_names and facts.get("form") in ("library", "object") and payload.data.startswith(_ELF)


def load(payload: Payload) -> Callable[..., None]:
    """The function in ``payload``. Loading a library does not import the compiler, which takes half a second.

    The verified bytes themselves run: they are written to a private temporary file and loaded from it.
    Raises OSError if that is impossible, such as when no folder for temporary files allows executable code.
    """
    with tempfile.TemporaryDirectory(prefix="anyattn-") as folder:
        path = Path(folder) / ("kernel.so" if payload.facts["form"] == "library" else "kernel.o")
        path.write_bytes(payload.data)
        if path.suffix == ".so":
            import tvm_ffi

            _load_runtime(payload.facts["runtime"])
            try:
                module: Any = tvm_ffi.load_module(str(path))
            except RuntimeError as error:
                raise OSError(f"a compiled kernel cannot be loaded: {error}") from error
        else:
            from cutlass.cute.runtime import load_module

            module = load_module(str(path), enable_tvm_ffi=True)
        _kept.append(module)
        try:
            return getattr(module, payload.facts["function"])
        except AttributeError as error:
            raise OSError(f"a compiled kernel has no function {payload.facts['function']!r}") from error


@lru_cache(maxsize=4)
def _load_runtime(relative: str) -> None:
    """Loads CuTe DSL's runtime library, to which a kernel's library links by name."""
    import ctypes

    named = next((p for p in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep) if p.endswith("libcute_dsl_runtime.so")), None)
    _kept.append(ctypes.CDLL(named or os.path.normpath(os.path.join(_package(), relative))))
