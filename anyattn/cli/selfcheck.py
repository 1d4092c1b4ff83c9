"""Self-check: forward, backward and decoding calls by every available backend on every device, judged against float64."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import anyattn
from anyattn import gallery, hardware, planner
from anyattn.cli.judge import decode_share, shares
from anyattn.hardware import Hardware
from anyattn.triton_tools import launch_log

__all__ = ["Outcome", "Place", "outcomes", "places"]

_SEQLEN, _HEADS, _HEAD_DIM = 192, 2, 64
_CACHED = (5, 100)  # keys in the cache before a step, per batch entry
_CAPACITY = 128
_DECODERS = ("torch", "triton")  # backends with kernels for a cache


@dataclass(frozen=True)
class Place:
    """A device to check. backends: name -> None if the backend can run there, else the reason against it."""

    device: torch.device
    name: str
    backends: dict[str, str | None]
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, device: torch.device, found: Hardware) -> Place:
        name = str(device) if device.type == "cpu" else f"{device} {found.name}"
        return cls(device, name, planner.available(found))


@dataclass(frozen=True)
class Outcome:
    """The result of one call. share: of its error budget, at most 1 passes. kernels: those that ran, in order.
    error: that was raised, or None."""

    place: Place
    backend: str
    call: str
    kernels: tuple[str, ...] = ()
    share: float = 0.0
    seconds: float = 0.0
    error: str | None = None

    @property
    def is_right(self) -> bool:
        return self.error is None and self.share <= 1

    def __str__(self) -> str:
        said = f"{self.place.name}, {self.backend}, {self.call}: "
        if self.error is not None:
            return f"{said}failed: {self.error}"
        ran = ", ".join(dict.fromkeys(self.kernels)) or "torch's operations"
        return f"{said}{self.share:.0%} of the error budget, {self.seconds:.1f} s, by {ran}"


def places() -> list[Place]:
    """The CPU and every GPU of this machine."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [Place.of(torch.device("cpu"), hardware.of("cpu")), *(Place.of(gpu, hardware.of("cuda", gpu.index)) for gpu in gpus)]


def outcomes(place: Place) -> Iterator[Outcome]:
    """The results of the calls on one device, one by one; an error ends only its own call."""
    for backend in (name for name, reason in place.backends.items() if reason is None):
        yield _outcome(place, backend, "forward and backward", _training)
        if backend in _DECODERS:
            yield _outcome(place, backend, "decode", _decoding)


def _outcome(place: Place, backend: str, call: str, run: Callable[[Place, str], float]) -> Outcome:
    started = time.perf_counter()
    on_device = torch.cuda.device(place.device) if place.device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device, launch_log.noting() as kernels:
            share = run(place, backend)
    except Exception as error:  # a broken driver, compiler or package may raise any exception; doctor reports it
        return Outcome(place, backend, call, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    return Outcome(place, backend, call, tuple(kernels), share, time.perf_counter() - started)


def _training(place: Place, backend: str) -> float:
    mods = gallery.VARIANTS["causal"].mods(gallery.Setting(_SEQLEN, _HEADS))
    *qkv, dout = _random(place, *[(1, _HEADS, _SEQLEN, _HEAD_DIM)] * 4)
    q, k, v = inputs = [t.to(place.device, copy=True).requires_grad_() for t in qkv]
    out = anyattn.flex_attention(q, k, v, mods.score, mask_mod=mods.mask, backend=backend)
    found = [t.cpu() for t in (out, *torch.autograd.grad(out, inputs, dout.to(place.device)))]
    return max(shares(mods, tuple(qkv), dout, found[0], tuple(found[1:])).values())


def _decoding(place: Place, backend: str) -> float:
    shapes = (len(_CACHED), 1, _HEADS, _HEAD_DIM), (len(_CACHED), _CAPACITY, _HEADS, _HEAD_DIM)
    q, k, v, k_cache, v_cache = _random(place, *[shapes[0]] * 3, *[shapes[1]] * 2)
    lengths = torch.tensor(_CACHED, dtype=torch.int32, device="cpu")
    given = [t.to(place.device, copy=True) for t in (q, k_cache, v_cache, k, v, lengths)]
    out = anyattn.flash_attn_with_kvcache(*given[:5], cache_seqlens=given[5], causal=True, backend=backend)
    rows = torch.arange(len(_CACHED), device="cpu")
    k_cache[rows, lengths.long()], v_cache[rows, lengths.long()] = k[:, 0], v[:, 0]
    if not (torch.equal(given[1].cpu(), k_cache) and torch.equal(given[2].cpu(), v_cache)):
        return float("inf")  # the appended or the earlier cache entries are wrong
    return decode_share(q, k_cache, v_cache, lengths, out.cpu())


def _random(place: Place, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Random tensors on the CPU, where results are judged."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(place.dtype) for shape in shapes]
