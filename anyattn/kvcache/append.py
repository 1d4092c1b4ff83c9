"""Appending to a KV cache in place: computes the slot of each new row, checks the slots, and writes the rows.

A cache is (B_cache, S_cache, H, D), or a pool of pages (num_pages, page_size, H, D) with a page table; in both forms two leading indices
name a row. New row j of batch entry b goes to the entry's logical storage row ``cache_seqlens[b] + j``, padding included.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.kvcache.quantise import LIMITS, UNSCALED, Scaling, check_written, is_written, quantised, row_scales
from anyattn.sequences.batch import end_to_end
from anyattn.tensors.strides import begins

__all__ = [
    "append",
    "check_apart",
    "check_append",
    "check_disjoint",
    "check_pages",
    "check_scales",
    "check_step",
    "reaches",
    "shared",
    "slots",
]

_MOST_TRIED = 10_000  # sums of strides compared with two tensors' distance before the tensors are assumed to overlap


def slots(start: Tensor, new: Tensor, cache_rows: Tensor, page_table: Tensor | None, page_size: int) -> tuple[Tensor, Tensor]:
    """The two leading cache indices of every new row of a batch, entry after entry; int64 (total_new,) each.

    start, new: int64 (B,), the storage row of each entry's first new row, and the number of its new rows. cache_rows: int64 (B,), each
    entry's row of a contiguous cache; unused with pages. page_table: (B, max_pages) of any integer dtype, or None for a contiguous cache.
    page_size: rows of a page; unused without pages. ``check_append`` checks their contents.

    >>> start, new, rows = torch.tensor([7, 3]), torch.tensor([2, 2]), torch.tensor([5, 9])
    >>> slots(start, new, rows, None, 0)
    (tensor([5, 5, 9, 9]), tensor([7, 8, 3, 4]))
    >>> slots(start, new, rows, torch.tensor([[4, 6], [1, 0]]), 8)
    (tensor([4, 6, 1, 1]), tensor([7, 0, 3, 4]))
    """
    entry, row = end_to_end(start, new)
    if page_table is None:
        return cache_rows[entry], row
    return page_table[entry, row // page_size].long(), row % page_size


def append(cache: Tensor, rows: Tensor, first: Tensor, second: Tensor, scaling: Scaling = UNSCALED, entry: Tensor | None = None) -> None:
    """``cache[first, second] = rows``, in place; no other element of the cache is written.

    cache: (B_cache, S_cache, H, D) or (num_pages, page_size, H, D), with strides that do not make rows overlap (``check_apart``). rows:
    (..., H, D) of the cache's dtype, any strides; for an 8-bit cache of any float dtype. first, second: int64 (...), as the result of
    ``slots``, without repeated pairs. scaling: of an 8-bit cache. entry: int64, broadcasts with first; the batch entry of each row, for
    scales (B, H).

    >>> cache = torch.zeros(2, 4, 1, 1)
    >>> append(cache, torch.tensor([[[7.0]], [[8.0]]]), torch.tensor([1, 1]), torch.tensor([2, 3]))
    >>> cache[..., 0, 0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 7.0, 8.0]]
    """
    if cache.dtype not in LIMITS:
        cache.index_put_((first, second), rows)
        return
    descale, saturated = scaling
    if is_written(descale, cache):
        assert isinstance(descale, Tensor)
        scales: Tensor | float = row_scales(rows, cache.dtype)
        descale.index_put_((first, second), scales)  # type: ignore[arg-type]
    else:
        scales = _given_scales(descale, cache, first, second, entry)
    stored = quantised(rows, scales, cache.dtype)
    cache.view(torch.uint8).index_put_((first, second), stored.rows.view(torch.uint8))  # torch indexes no float8
    if saturated is not None:
        saturated.add_(stored.saturated)


def _given_scales(descale: Tensor | float | None, cache: Tensor, first: Tensor, second: Tensor, entry: Tensor | None) -> Tensor | float:
    if not isinstance(descale, Tensor):
        return 1.0 if descale is None else descale
    if descale.ndim == 3:
        return descale.expand(cache.shape[:3])[first, second]
    if descale.numel() == 1:
        return descale.reshape(())
    of_entries = descale.expand(-1, cache.shape[2])
    return of_entries[0] if len(of_entries) == 1 else of_entries[entry]


def check_append(
    first: Tensor, start: Tensor, new: Tensor, cache_rows: Tensor | None, page_table: Tensor | None, page_size: int, num_pages: int
) -> None:
    """Raises ``ValueError`` if appending, or reading afterwards, would leave the cache or write a slot twice.

    first: int64 (B,), the storage row of each entry's first key. start, new, cache_rows, page_table: as in ``slots``; cache rows and
    lengths before appending are assumed to be in range. cache_rows None without pages: every entry has its own row. page_size, num_pages:
    the second and the first dimension of the cache, which without pages are its capacity and its rows. Refused are entries that do not fit
    with their new rows, pages in use that are not in the pool, and a cache row or page that two entries append to. Pages or rows that
    another entry only reads are not checked.

    >>> check_append(torch.zeros(2), torch.tensor([7, 31]), torch.tensor([2, 2]), torch.tensor([5, 9]), None, 32, 16)
    Traceback (most recent call last):
    ValueError: k and v append 2 rows to the 31 of entry 1 (cache_seqlens[1]), 33 in all, but each row of k_cache holds 32; wanted at most \
32: append fewer, or make the cache longer
    """
    width, end = 1 if page_table is None else page_table.shape[1], start + new
    over = end > width * page_size
    if bool(over.any()):
        b = int(over.nonzero()[0])
        room, cure = f"each row of k_cache holds {page_size}", "make the cache longer"
        if page_table is not None:
            room = f"page_table[{b}] has {width} pages of {page_size} rows, {width * page_size} in all"
            cure = "give it more pages"
        raise ValueError(
            f"k and v append {int(new[b])} rows to the {int(start[b])} of entry {b} (cache_seqlens[{b}]), {int(end[b])} in all, but "
            f"{room}; wanted at most {width * page_size}: append fewer, or {cure}"
        )
    if page_table is not None:
        check_pages(page_table, first, end, page_size, num_pages)
        _check_own_pages(start, new, page_table, page_size)
    elif cache_rows is not None:
        _check_cache_rows(new, cache_rows)


def check_pages(page_table: Tensor, begin: Tensor | list[int], end: Tensor | list[int], page_size: int, num_pages: int) -> None:
    """Raises ``ValueError`` if a page that holds storage rows ``begin[b]`` to ``end[b]`` (B integers each) is not in the pool.

    page_table: integers (B, max_pages). Entries of pages that hold none of these rows are not checked.

    >>> check_pages(torch.tensor([[2, 9]]), torch.tensor([0]), torch.tensor([17]), 16, 8)
    Traceback (most recent call last):
    ValueError: page_table[0, 1]=9, but the pool has 8 pages; wanted 0 to 7 for the 2 pages that rows 0 to 16 of entry 0 are in: correct it
    """
    if page_table.numel() == 0:
        return
    least, greatest = torch.aminmax(page_table)
    if int(least) >= 0 and int(greatest) < num_pages:  # unused entries are usually 0, so most calls end here
        return
    begin, end = (torch.as_tensor(x, device=page_table.device) for x in (begin, end))
    position = torch.arange(page_table.shape[1], device=page_table.device)
    first, last = begin // page_size, ceil_div(end, page_size)
    used = (position >= first[:, None]) & (position < last[:, None]) & (begin < end)[:, None]
    outside = used & ((page_table < 0) | (page_table >= num_pages))
    if bool(outside.any()):
        b, i = outside.nonzero()[0].tolist()
        raise ValueError(
            f"page_table[{b}, {i}]={int(page_table[b, i])}, but the pool has {num_pages} pages; wanted 0 to {num_pages - 1} for the "
            f"{int(last[b] - first[b])} pages that rows {int(begin[b])} to {int(end[b]) - 1} of entry {b} are in: correct it"
        )


def check_apart(name: str, cache: Tensor) -> None:
    """Raises ``ValueError`` if a dimension of the cache is expanded, so that one write would change several rows.

    >>> check_apart("k_cache", torch.zeros(1, 8, 2, 4).expand(3, -1, -1, -1))
    Traceback (most recent call last):
    ValueError: k_cache has shape (3, 8, 2, 4) and strides (0, 8, 4, 1): its dimension 0 is expanded, so rows share memory and cannot be \
appended to; wanted a cache with memory of its own: .contiguous()
    """
    for dim, (size, stride) in enumerate(zip(cache.shape, cache.stride())):
        if size > 1 and stride == 0:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)} and strides {cache.stride()}: its dimension {dim} is expanded, so rows share "
                f"memory and cannot be appended to; wanted a cache with memory of its own: .contiguous()"
            )


def check_step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, extents: tuple[int, ...] | None = None) -> None:
    """Raises ``ValueError`` if a cache shares an element with the other cache, or with q, k or v, which are read after the first write.

    Interleaved views of one tensor are allowed, and a cache whose values are the first columns of its keys: there v is the same of k, and
    is not written. extents: ``reaches`` of the five tensors, if the caller has computed it.

    >>> k_cache, v_cache, q, k = (torch.zeros(1, n, 2, 4) for n in (16, 16, 1, 1))
    >>> check_step(q, k, k, k_cache, v_cache)
    >>> check_step(q, k, k_cache[:, 4:5], k_cache, v_cache)
    Traceback (most recent call last):
    ValueError: k_cache and v share memory (shapes (1, 16, 2, 4) and (1, 1, 2, 4), strides (128, 8, 4, 1) and (128, 8, 4, 1), v 128 bytes \
behind k_cache), and k_cache is written before v is read; wanted memory of its own for v: pass v.clone()
    """
    of_q, of_k, of_v, of_keys, of_values = extents or reaches(q, k, v, k_cache, v_cache)
    keys, values = k_cache.data_ptr(), v_cache.data_ptr()
    keys_end, values_end = keys + of_keys, values + of_values
    if begins(v_cache, k_cache):
        if not begins(v, k):
            raise ValueError(
                f"k_cache and v_cache share memory: v_cache is the first {v_cache.shape[-1]} columns, so that only k is written, but v is "
                f"not the same of k; wanted v=None or v = k[..., :{v_cache.shape[-1]}], or caches of their own"
            )
    elif keys < values_end and values < keys_end:
        check_disjoint(k_cache, v_cache)
    for name, x, of_x in (("q", q, of_q), ("k", k, of_k), ("v", v, of_v)):
        at = x.data_ptr()
        if at < keys_end and keys < at + of_x:
            _check_read(name, x, "k_cache", k_cache)
        if at < values_end and values < at + of_x:
            _check_read(name, x, "v_cache", v_cache)


def _check_read(name: str, x: Tensor, cache_name: str, cache: Tensor) -> None:
    text = shared(cache_name, cache, name, x)
    if text is not None:
        raise ValueError(
            f"{text}, and {cache_name} is written before {name} is read; wanted memory of its own for {name}: pass {name}.clone()"
        )


def check_disjoint(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises ``ValueError`` if the caches share an element: new values would be written over keys.

    Interleaved views of one tensor, such as ``kv[:, 0]`` and ``kv[:, 1]``, are allowed.

    >>> kv = torch.zeros(4, 2, 16, 2, 8)
    >>> check_disjoint(kv[:, 0], kv[:, 1])
    >>> check_disjoint(kv[:3, 0], kv[1:, 0])
    Traceback (most recent call last):
    ValueError: k_cache and v_cache share memory (shapes (3, 16, 2, 8) and (3, 16, 2, 8), strides (512, 16, 8, 1) and (512, 16, 8, 1), \
v_cache 2048 bytes behind k_cache), so v would be written over k; wanted memory of its own for each, as kv[0] and kv[1] of a tensor have
    """
    text = shared("k_cache", k_cache, "v_cache", v_cache)
    if text is not None:
        raise ValueError(f"{text}, so v would be written over k; wanted memory of its own for each, as kv[0] and kv[1] of a tensor have")


def check_scales(k_descale: Any, v_descale: Any, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises ``ValueError`` for scales that cannot be written, or that are written and share memory with the other scales or a cache.

    Scales between the bytes of the caches are allowed, as in ``memory[..., :64]`` and ``memory[..., 64:68].view(torch.float32)``.

    >>> cache, scales = torch.zeros(2, 6, 8, 2, 64, dtype=torch.int8), torch.ones(6, 8, 2)
    >>> check_scales(scales, scales, cache[0], cache[1])
    Traceback (most recent call last):
    ValueError: k_descale and v_descale share memory (shapes (6, 8, 2) and (6, 8, 2), strides (16, 2, 1) and (16, 2, 1), v_descale 0 bytes \
behind k_descale), and appending writes k_descale; wanted memory of its own for each, as scales[0] and scales[1] of a tensor have
    """
    if k_cache.dtype not in LIMITS:
        return
    if begins(v_cache, k_cache):
        if not _are_one(k_descale, v_descale):
            raise ValueError(
                "k_descale and v_descale differ, and v_cache is the first columns of k_cache, whose numbers have one scale each; wanted "
                "v_descale=k_descale, or caches of their own"
            )
        caches, descales = {"k_cache": k_cache}, {"k_descale": k_descale}
    else:
        caches, descales = {"k_cache": k_cache, "v_cache": v_cache}, {"k_descale": k_descale, "v_descale": v_descale}
    for name, cache in zip(descales, caches.values(), strict=True):
        if not is_written(descales[name], cache):
            check_written(name, descales[name], cache)
            continue
        for other_name, other in {**descales, **caches}.items():
            if other_name == name or not isinstance(other, Tensor):
                continue
            text = shared(name, descales[name], other_name, other)
            if text is not None:
                raise ValueError(
                    f"{text}, and appending writes {name}; wanted memory of its own for each, as scales[0] and scales[1] of a tensor have"
                )


def _are_one(descale: Any, other: Any) -> bool:
    if isinstance(descale, Tensor) and isinstance(other, Tensor):
        return descale.numel() == other.numel() and begins(descale, other)
    return not isinstance(descale, Tensor) and not isinstance(other, Tensor) and descale == other


def shared(name: str, x: Tensor, other_name: str, other: Tensor) -> str | None:
    """The error text for two tensors that have an element in common; None if they have none."""
    gap = other.data_ptr() - x.data_ptr()
    of_x, of_other = reaches(x, other)
    sizes = (tuple(x.shape), x.stride(), tuple(other.shape), other.stride())
    if not -of_other < gap < of_x:
        return None
    is_one_size = x.element_size() == other.element_size()
    if not (_share_elements(gap, x.element_size(), *sizes) if is_one_size else _share_elements(gap, 1, *_by_bytes(x), *_by_bytes(other))):
        return None
    return (
        f"{name} and {other_name} share memory (shapes {sizes[0]} and {sizes[2]}, strides {sizes[1]} and {sizes[3]}, "
        f"{other_name} {gap} bytes behind {name})"
    )


def _by_bytes(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the tensor's bytes."""
    size = x.element_size()
    return (*x.shape, size), (*[size * stride for stride in x.stride()], 1)


def reaches(*tensors: Tensor) -> tuple[int, ...]:
    """For each tensor the bytes from its first element to the end of its last one."""
    return tuple(map(_reach, tensors))


def _reach(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


@lru_cache(maxsize=256)  # all layers of a model pass equal views
def _share_elements(
    gap: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], other_shape: tuple[int, ...], other_strides: tuple[int, ...]
) -> bool:
    """Whether two tensors have an element in common, where the other one begins ``gap`` bytes after the first; True if undecided.

    They do if the gap is a sum of multiples of the first's strides minus a sum of multiples of the other's, within the sizes.
    """
    if 0 in shape or 0 in other_shape:
        return False
    distance, rest = divmod(gap, itemsize)
    if rest:
        return True
    counts: dict[int, list[int]] = {}  # by stride: least and greatest multiple
    for sizes, steps_of, side, sign in ((shape, strides, 1, 1), (other_shape, other_strides, 0, -1)):
        for size, stride in zip(sizes, steps_of, strict=True):
            counts.setdefault(stride, [0, 0])[side] += sign * (size - 1)
    steps = sorted(((stride, *count) for stride, count in counts.items() if stride), reverse=True)
    tried = 0

    def can_make(goal: int, at: int) -> bool:
        nonlocal tried
        if at == len(steps):
            return goal == 0
        stride, least, most = steps[at]
        low, high = (sum(step[0] * step[side] for step in steps[at + 1 :]) for side in (1, 2))
        for count in range(max(least, -((high - goal) // stride)), min(most, (goal - low) // stride) + 1):
            tried += 1
            if tried > _MOST_TRIED or can_make(goal - count * stride, at + 1):
                return True
        return False

    return can_make(distance, 0)


def _check_cache_rows(new: Tensor, cache_rows: Tensor) -> None:
    appending = (new > 0).nonzero().flatten()
    twice = _equal_pair(cache_rows[appending])
    if twice is not None:
        a, b = (int(appending[i]) for i in twice)
        raise ValueError(
            f"cache_batch_idx[{a}] and cache_batch_idx[{b}] are both {int(cache_rows[a])}, so k and v would be appended to one cache row "
            f"twice; wanted a row of its own for every entry that appends: give one of them another row"
        )


def _check_own_pages(start: Tensor, new: Tensor, page_table: Tensor, page_size: int) -> None:
    """Refuses whole pages, not only slots: where one entry appends, another appending entry has keys or will have them."""
    first = start // page_size
    entry, position = end_to_end(first, torch.where(new > 0, ceil_div(start + new, page_size) - first, 0))
    pages = page_table[entry, position]
    twice = _equal_pair(pages)
    if twice is not None:
        (a, i), (b, j) = ((int(entry[n]), int(position[n])) for n in twice)
        raise ValueError(
            f"page_table[{a}, {i}] and page_table[{b}, {j}] are both page {int(pages[twice[0]])}, and k and v would be appended to it for "
            f"both (rows from {int(start[a])} of entry {a}, from {int(start[b])} of entry {b}); wanted pages of its own for every entry "
            f"that appends: copy the shared page first"
        )


def _equal_pair(keys: Tensor) -> tuple[int, int] | None:
    """The places of two equal elements, the earlier place first; None if all elements differ."""
    ordered, order = keys.sort(stable=True)
    same = ordered[1:] == ordered[:-1]
    if not bool(same.any()):
        return None
    at = int(same.nonzero()[0])
    return int(order[at]), int(order[at + 1])
