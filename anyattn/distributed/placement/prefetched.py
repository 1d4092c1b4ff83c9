"""Counts of masks on a GPU, and ids of documents, that travel to the host while it does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["is_asynchronous", "keep", "keep_ids", "on_host", "take"]

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class _Copy(NamedTuple):
    """Counts on their way to the host. lists: (data pointer, writes) of the mask's lists, of which they are. wait: until ``counts`` hold
    them."""

    chunk: int
    lists: tuple[tuple[int, int] | None, ...]
    counts: Tensor
    wait: Callable[[], None]


_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by a mask's kv_indices: a mask that dies takes its copy along


def is_asynchronous(t: Tensor) -> bool:
    return t.is_cuda


def keep(mask: torch_flex.BlockMask, chunk: int, counts: Tensor) -> None:
    """Starts to copy ``counts`` of the mask by chunks."""
    _copies[mask.kv_indices] = _Copy(chunk, _state(mask), *_to_host(counts))


def take(mask: torch_flex.BlockMask, chunk: int) -> Tensor | None:
    """The counts that ``keep`` has copied, once they are there; None if it was not called for this chunk and these lists as they are."""
    copy = _copies.pop(mask.kv_indices, None)
    if copy is None or (copy.chunk, copy.lists) != (chunk, _state(mask)):
        return None
    copy.wait()
    return copy.counts  # type: ignore[no-any-return]


class _Ids(NamedTuple):
    """Ids on their way to the host. writes: of the ids, as torch counted them. wait: until ``ids`` hold them."""

    writes: int
    ids: Tensor
    wait: Callable[[], None]


_ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def keep_ids(ids: Tensor) -> None:
    """Starts to copy the ids of documents, unless torch does not count writes to them."""
    if not ids.is_inference():
        _ids[ids] = _Ids(ids._version, *_to_host(ids))


def on_host(ids: Tensor) -> Tensor:
    """``ids.cpu()``; the copy that ``keep_ids`` has started, if they have not been written to since."""
    copy = _ids.get(ids)
    if copy is None or ids.is_inference() or copy.writes != ids._version:
        return ids.cpu()
    copy.wait()
    return copy.ids  # type: ignore[no-any-return]


def _state(mask: torch_flex.BlockMask) -> tuple[tuple[int, int] | None, ...]:
    lists = [getattr(mask, name) for name in _LISTS]
    return tuple([None if t is None else (t.data_ptr(), -1 if t.is_inference() else t._version) for t in lists])


def _to_host(counts: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Memory of the host that a copy fills, and what waits for that copy alone."""
    with torch.cuda.device(counts.device):
        host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
        host.copy_(counts, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    return host, done.synchronize
