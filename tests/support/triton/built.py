"""Triton kernels compiled without a GPU, as far as a test needs, and a mode in which reading a tensor on the host fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.support.inside import InsideMode

POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}


@contextlib.contextmanager
def compiling_until(stage: str) -> Iterator[None]:
    """Inside, NVIDIA's kernels are compiled until stage: "llir", where shared memory is known and LLVM has optimised nothing, "ptx", which
    is not assembled, or "cubin", which is all. The kernels of each stage have a cache of their own."""
    import triton
    from triton.backends.nvidia import compiler

    def unwritten(self: Any, source: Any, metadata: dict[str, Any], *about: Any) -> str:
        metadata["name"] = "unwritten"
        return "// not written"

    with contextlib.ExitStack() as stack:
        if stage != "cubin":
            folder = os.path.join(triton.knobs.cache.dir, f"until_{stage}")
            stack.enter_context(mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder))
            stack.enter_context(mock.patch.object(compiler.CUDABackend, "make_cubin", lambda *about: b""))
        if stage == "llir":
            stack.enter_context(mock.patch.object(compiler.llvm, "optimize_module", lambda *about, **options: None))
            stack.enter_context(mock.patch.object(compiler.CUDABackend, "make_ptx", unwritten))
        yield


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any], until: str = "cubin") -> Any:
    """The kernel compiled for Hopper (``compiling_until``)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with compiling_until(until):
        return triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))


class Waits(InsideMode):
    """Fails on every operation for which the host waits for the device, and counts the others."""

    FORBIDDEN = frozenset(
        ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim", "equal", "is_nonzero")
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        on_device = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and a.device.type == "cuda"]
        assert not (on_device and name in self.FORBIDDEN), f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            by_mask = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
            assert not by_mask, f"{name} by a mask waits for the device"
        if name == "repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, "repeat_interleave without output_size waits for the device"
        result = func(*args, **(kwargs or {}))
        if on_device and isinstance(result, torch.Tensor):
            assert result.device.type == "cuda", f"{name} copies to the host"
        self.calls.append(name)
        return result
