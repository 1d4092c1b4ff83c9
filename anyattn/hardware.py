"""Hardware capabilities of a device: kind, compute capability and full-speed dtypes; queried once per device."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["Hardware", "of"]


@dataclass(frozen=True)
class Hardware:
    """One device: its kind, its compute capability (CUDA), and the input dtypes of full-speed matrix products."""

    device: str
    name: str
    threads: int
    fast_dtypes: frozenset[torch.dtype]
    capability: tuple[int, int] | None = None
    sm_count: int = 0


@lru_cache(maxsize=16)
def of(device_type: str, index: int | None = None) -> Hardware:
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(index if index is not None else torch.cuda.current_device())
        fast = frozenset((torch.float16, torch.bfloat16, torch.float32))
        return Hardware("cuda", properties.name, 0, fast, (properties.major, properties.minor), properties.multi_processor_count)
    fast_cpu = {torch.float32, torch.float64}
    if _cpu_has("_is_avx512_bf16_supported") or _cpu_has("_is_amx_tile_supported"):
        fast_cpu.add(torch.bfloat16)
    if _cpu_has("_is_amx_fp16_supported"):
        fast_cpu.add(torch.float16)
    return Hardware(device_type, platform.processor() or platform.machine(), torch.get_num_threads(), frozenset(fast_cpu))


def _cpu_has(question: str) -> bool:
    """The result of one of torch.cpu's semi-private query functions; False if this torch does not have the function."""
    ask = getattr(torch.cpu, question, None)
    return bool(ask()) if ask is not None else False
