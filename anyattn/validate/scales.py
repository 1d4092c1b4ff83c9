"""Validation of 8-bit keys and values, and of their descales: raises every user error in their dtypes, shapes and contents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.kvcache.scales import EIGHT_BITS, KVScales, kv_scales
from anyattn.sequences.batch import Sequences

__all__ = ["NAMES", "check_contents", "check_kind", "check_no_gradient", "check_stored", "scales_of"]

NAMES = ("k_descale", "v_descale")
_WANTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in EIGHT_BITS)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # torch.compile(dynamic=True) makes symbolic ones
_LEAST, _GREATEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_stored(names: tuple[str, str], k: Tensor, v: Tensor) -> bool:
    """Whether keys and values are stored in 8 bits. Raises ``TypeError`` for 8 bits of unknown meaning, and for two dtypes of which one has
    8 bits. names: of k and v."""
    for name, t in zip(names, (k, v), strict=True):
        if t.dtype is torch.uint8:
            raise TypeError(
                f"{name} has dtype torch.uint8, which does not tell what its bytes mean; wanted {_WANTED}: pass "
                f"{name}.view(torch.float8_e4m3fn)"
            )
        if t.dtype.itemsize == 1 and t.dtype not in EIGHT_BITS:
            raise TypeError(f"{name} has dtype {t.dtype}; of 8 bits wanted {_WANTED}: convert it with .to()")
    has_8_bits = [t.dtype in EIGHT_BITS for t in (k, v)]
    if any(has_8_bits) and k.dtype != v.dtype:
        raise TypeError(f"{names[1]} has dtype {v.dtype} but {names[0]} has {k.dtype}; wanted one dtype for both: convert one with .to()")
    return all(has_8_bits)


def scales_of(k_descale: Any, v_descale: Any, k: Tensor, batch: int) -> KVScales | None:
    """The checked scales of a call; reads no tensor. k: heads first, as ``Problem.k``."""
    for name, descale in zip(NAMES, (k_descale, v_descale), strict=True):
        _check(name, descale, k, batch)
    return kv_scales(k_descale, v_descale, k, batch) if k.dtype in EIGHT_BITS else None


def _check(name: str, descale: Any, k: Tensor, batch: int) -> None:
    check_kind(name, descale, k.dtype)
    if isinstance(descale, Tensor):
        _check_tensor(name, descale, k, batch)


def check_kind(name: str, descale: Any, dtype: torch.dtype) -> None:
    """Raises for what is no descale, for a wrong number, and unless it is 1 for keys of a dtype without scales."""
    if descale is None:
        return
    is_number = isinstance(descale, _NUMBERS) and not isinstance(descale, bool)
    if not is_number and not isinstance(descale, Tensor):
        raise TypeError(f"{name} is a {type(descale).__name__}; wanted None, a number or a float32 tensor")
    if dtype not in EIGHT_BITS:
        if is_number and descale == 1.0:
            return
        product = "softmax_scale" if name == "k_descale" else "the output"
        raise ValueError(
            f"{name} is given for {'keys' if name == 'k_descale' else 'values'} of {dtype}, which have no scale; wanted None or 1.0: "
            f"multiply {product} by a scale of one number, or store 8 bits ({_WANTED})"
        )
    if is_number and not _LEAST <= descale <= _GREATEST:
        raise ValueError(f"{name}={descale}; wanted a normal float32 number above 0")


def _check_tensor(name: str, descale: Tensor, k: Tensor, batch: int) -> None:
    rows, heads, positions = k.shape[:3]
    if descale.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {descale.dtype}; wanted torch.float32: convert it with .float()")
    if descale.device != k.device:
        raise ValueError(f"{name} is on {descale.device} but k is on {k.device}; move it with .to()")
    if descale.numel() == 1 and descale.ndim < 3:
        return
    whole = {2: (batch, heads), 3: (rows, positions, heads)}.get(descale.ndim, ())
    if not whole or any(n not in (1, size) for n, size in zip(descale.shape, whole, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(descale.shape)}; wanted one element, {(batch, heads)} (batch, K/V heads), or "
            f"{(rows, positions, heads)} (rows of the cache or pages, positions in them, K/V heads), with 1 for a dimension along which it "
            "is constant"
        )


def check_no_gradient(k_descale: Any, v_descale: Any) -> None:
    """Raises ``ValueError`` for a descale that requires grad; only called in grad mode."""
    for name, descale in zip(NAMES, (k_descale, v_descale), strict=True):
        if isinstance(descale, Tensor) and descale.requires_grad:
            raise ValueError(f"{name} requires grad, and 8-bit keys and values have no gradients; wanted {name}.detach()")


def check_contents(scales: KVScales | None, sequences: Sequences | None, appended: Sequence[int] = ()) -> None:
    """Raises ``ValueError`` if a key of a sequence has a scale that is not a finite number above 0; reads the scales of these keys only.

    appended: for each entry the number of its last keys that are about to be appended, whose own scales are not known.
    """
    if scales is None or sequences is None:
        return
    host = sequences.on_host
    for name, factors in zip(NAMES, scales, strict=True):
        if factors is None or _all_positive(factors):
            continue
        for b, count in enumerate(host.seqlens_k):
            known = count - (appended[b] if appended else 0)
            own = factors[b, :, None] if factors.ndim == 2 else _of_entry(factors, sequences, b)[:, :known]
            if count and not _all_positive(own):
                head, key = ((~((own > 0) & (own < math.inf))).nonzero()[0]).tolist()
                where = f"batch entry {b}, K/V head {head}" + (f", key {key}" if factors.ndim == 3 else "")
                raise ValueError(f"{name} is {float(own[head, key])} for {where}; wanted a finite number above 0")


def _all_positive(factors: Tensor) -> bool:
    if factors.ndim == 3 and factors.shape[0] * factors.shape[2] > 2**16:  # a pool, most of which a call may not read
        return False
    return bool(((factors > 0) & (factors < math.inf)).all())


def _of_entry(factors: Tensor, sequences: Sequences, b: int) -> Tensor:
    """(K/V heads, keys) of entry b, from factors of each key."""
    start, count, size = sequences.on_host.k_start[b], sequences.on_host.seqlens_k[b], factors.shape[2]
    if sequences.page_table is None:
        return factors[sequences.on_host.k_row[b], :, start : start + count]
    first = start // size
    pages = sequences.page_table[b, first : ceil_div(start + count, size)].long()
    return factors[pages].transpose(0, 1).flatten(1)[:, start - first * size : start - first * size + count]
