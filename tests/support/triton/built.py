"""Triton kernels compiled for Hopper without a GPU, and a mode in which reading a tensor on the host fails."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.inside import InsideMode

POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
