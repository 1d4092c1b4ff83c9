"""Random batches in which one sequence is computed with neighbours, by pages, by chunks and alone, and its rows' bits are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import anyattn

__all__ = ["OPTIONS", "PAGES", "Sequence", "alone", "differing", "draw", "packed", "ways"]

# by name, the options of a call whose mods see positions in the sequence. made from the number of query heads and a generator
OPTIONS: dict[str, Callable[[int, torch.Generator], dict[str, Any]]] = {
    "causal": lambda heads, g: {},
    "window": lambda heads, g: {"window_size": (_number(g, 0, 90), 0)},
    "sink": lambda heads, g: {"sink": torch.randn(heads, generator=g, device=g.device), "window_size": (37, 0)},
    "softcap": lambda heads, g: {"softcap": 4.0},
    "alibi": lambda heads, g: {"alibi_slopes": torch.rand(heads, generator=g, device=g.device)},
    "first and last": lambda heads, g: {"mask_mod": lambda b, h, q, kv: (kv < 3) | (q - kv < 50)},
    "thirds": lambda heads, g: {"mask_mod": lambda b, h, q, kv: (q + 2 * kv + h) % 3 != 0},
    "waves": lambda heads, g: {"score_mod": lambda s, b, h, q, kv: s + torch.sin(kv * 0.37) * torch.cos(q * 0.11)},
    "table": lambda heads, g: {"score_mod": _table(torch.randn(heads, MOST, generator=g, device=g.device))},
    "blind": lambda heads, g: {"mask_mod": lambda b, h, q, kv: (q % 5 != 2) & (kv % 64 > 20)},
}


def _table(values: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: s * 0.5 + values[h, kv]


@dataclass(frozen=True)
class Sequence:
    """q: (1, length, Hq, D), k, v: (1, length, Hkv, D or Dv)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[1]


MOST = 4096  # keys of a sequence under every option
PAGES = (1, 3, 16, 64)


def draw(g: torch.Generator, length: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> Sequence:
    """On the generator's device, as all that follows."""
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    return Sequence(*(torch.randn(1, length, *shape, generator=g, device=g.device).to(dtype) for shape in shapes))


def alone(s: Sequence, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out (length, Hq, Dv) and lse (Hq, length) of a sequence that is the whole batch."""
    out, lse = anyattn.flash_attn_func(s.q, s.k, s.v, causal=True, return_lse=True, **call)
    return out[0], lse[0]


def ways(
    g: torch.Generator, batch: list[Sequence], call: dict[str, Any], page_sizes: tuple[int, ...] = PAGES
) -> Iterator[tuple[str, slice, Tensor, Tensor]]:
    """The first sequence of a batch, computed in several ways: the way's name, its rows, and their out and lse as ``alone`` has them."""
    own = batch[0]
    n = own.length
    order = torch.randperm(len(batch), generator=g, device=g.device).tolist()
    place = order.index(0)
    yield "packed", slice(0, n), *packed([batch[i] for i in order], place, call)
    for chunk, is_paged in ((1, False), (1, True), (_number(g, 1, min(n, 10) + 1), True), (_number(g, 1, n + 1), False)):
        end, page_size = _number(g, chunk, n + 1), page_sizes[_number(g, 0, len(page_sizes))] if is_paged else 0
        found = _cached(g, [batch[i] for i in order], place, chunk, end, page_size, call)
        yield f"{f'pages of {page_size}' if is_paged else 'cache'}, {chunk} queries to {end}", slice(end - chunk, end), *found
    yield "alone, heads together or not", slice(0, n), *packed([own], 0, {**call, "pack_gqa": bool(_number(g, 0, 2))})


def packed(batch: list[Sequence], place: int, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, *(s.length for s in batch)]).cumsum(0).to(batch[0].q.device)
    q, k, v = (torch.cat([getattr(s, name)[0] for s in batch]) for name in ("q", "k", "v"))
    most = int(ends.diff().max()) + 7
    out, lse = anyattn.flash_attn_varlen_func(q, k, v, ends, ends, most, most, causal=True, return_lse=True, **call)
    lo, hi = int(ends[place]), int(ends[place + 1])
    return out[lo:hi], lse[:, lo:hi]


def _cached(
    g: torch.Generator, batch: list[Sequence], place: int, chunk: int, end: int, page_size: int, call: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The last ``chunk`` of the sequence's first ``end`` queries, over a cache that neighbours share; of pages, unless page_size is 0."""
    own, device, size = batch[place], g.device, page_size or 1
    lengths = [end if i == place else _number(g, 1, s.length + 1) for i, s in enumerate(batch)]
    room = max(lengths) + _number(g, 0, 40)
    pages_each = -(-room // size)
    caches = [torch.full((len(batch), pages_each * size, *x.shape[2:]), 7.0, dtype=x.dtype, device=device) for x in (own.k, own.v)]
    for i, (s, length) in enumerate(zip(batch, lengths, strict=True)):
        caches[0][i, :length], caches[1][i, :length] = s.k[0, :length], s.v[0, :length]
    more: dict[str, Any] = {}
    if page_size:
        count = len(batch) * pages_each
        places = torch.randperm(count + 3, generator=g, device=device)[:count]
        pools = [torch.full((count + 3, size, *c.shape[2:]), 9.0, dtype=c.dtype, device=device) for c in caches]
        for pool, cache in zip(pools, caches, strict=True):
            pool[places] = cache.reshape(-1, size, *cache.shape[2:])
        caches, more = pools, {"page_table": places.view(len(batch), pages_each).to(torch.int32)}
    q = torch.randn(len(batch), chunk, *own.q.shape[2:], generator=g, device=device).to(own.q.dtype)
    q[place] = own.q[0, end - chunk : end]
    lengths = [length if i == place else min(max(length, chunk), room) for i, length in enumerate(lengths)]
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    with torch.no_grad():
        out, lse = anyattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=used, causal=True, return_lse=True, **more, **call)
    return out[place], lse[place]


def differing(g: torch.Generator, batch: list[Sequence], call: dict[str, Any], page_sizes: tuple[int, ...] = PAGES) -> list[str]:
    """The ways in which a row of the batch's first sequence has other bits than alone."""
    out, lse = alone(batch[0], call)
    found = []
    for name, rows, own, own_lse in ways(g, batch, call, page_sizes):
        if not torch.equal(own, out[rows]) or not torch.equal(own_lse, lse[:, rows]):
            found.append(name)
    return found


def _number(g: torch.Generator, lo: int, hi: int) -> int:
    return int(torch.randint(lo, hi, (1,), generator=g, device=g.device))
