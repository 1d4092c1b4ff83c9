"""Forms in which one sequence is computed among others: packed, padded, dense, in caches and pages, by chunks, by lists, and trained.

What no sequence uses, between sequences and behind them, in the tails of caches and in spare pages, is NaN, or 99 in 8 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores

__all__ = ["FORMS", "MOST", "PAGES", "SHORT_FORMS", "WITHOUT_8_BITS", "ByPlace", "Found", "Scene", "Sequence", "number", "placed"]

MOST = 4096  # keys of a sequence under every option
PAGES = (1, 3, 16, 64)


@dataclass(frozen=True)
class Sequence:
    """q: (1, length, Hq, D), k, v: (1, length, Hkv, D or Dv). scales: of 8-bit k and v, float32 (1, length, Hkv) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: tuple[Tensor, ...] | None = None

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def is_in_keys(self) -> bool:
        """Whether v is a view of k."""
        return self.v.data_ptr() == self.k.data_ptr()


class ByPlace(NamedTuple):
    """An option that has a part for each entry of a batch. make: from the numbers of the sequences, in the batch's order; a number means
    the same sequence in every batch."""

    make: Callable[[list[int]], Any]


def placed(call: dict[str, Any], order: list[int]) -> dict[str, Any]:
    return {name: x.make(order) if isinstance(x, ByPlace) else x for name, x in call.items()}


class Found(NamedTuple):
    """One way of computing a sequence: its name, the rows that were computed, their out (rows, Hq, Dv) and lse (Hq, rows), and whether two
    backward passes gave the same bits."""

    name: str
    rows: slice
    out: Tensor
    lse: Tensor
    repeats: bool = True


class Scene(NamedTuple):
    """g: draws what a form leaves open. batch: the sequences in their order. place: of the one that is compared. order: the number of each.
    call: the options, with the mode."""

    g: torch.Generator
    batch: list[Sequence]
    place: int
    order: list[int]
    call: dict[str, Any]
    page_sizes: tuple[int, ...] = PAGES

    @property
    def own(self) -> Sequence:
        return self.batch[self.place]

    def number(self, lo: int, hi: int) -> int:
        return number(self.g, lo, hi)

    def flip(self) -> bool:
        return bool(self.number(0, 2))

    def called(self, door: Callable[..., Any], *tensors: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """out and lse of a call with the scene's options; the mode of half of them comes from the context."""
        options = placed(self.call, self.order) | more
        if not self.flip() or options.get("deterministic") != "batch":
            return door(*tensors, return_lse=True, **options)
        del options["deterministic"]
        with anyattn.batch_invariant():
            return door(*tensors, return_lse=True, **options)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.g.device)


def number(g: torch.Generator, lo: int, hi: int) -> int:
    return int(torch.randint(lo, hi, (1,), generator=g, device=g.device))


# ---- storage


def _empty(like: Tensor, *shape: int) -> Tensor:
    """Memory that no sequence uses yet."""
    if like.element_size() == 1:
        return torch.full((*shape, *like.shape[2:]), 99.0, device=like.device).to(like.dtype)
    return torch.full((*shape, *like.shape[2:]), torch.nan, dtype=like.dtype, device=like.device)


def _in_a_row(parts: list[Tensor], room: list[int] | None = None) -> Tensor:
    """(rows, ...), each part (1, length, ...) at the beginning of its room."""
    room = [p.shape[1] for p in parts] if room is None else room
    out = _empty(parts[0], sum(room))
    for start, part in zip(itertools.accumulate(room, initial=0), parts):
        out[start : start + part.shape[1]] = part[0]
    return out


def _side_by_side(parts: list[Tensor], capacity: int, pads: list[int] | None = None, rows: list[int] | None = None) -> Tensor:
    """(entries, capacity, ...), each part behind its padding in its row."""
    count = len(parts)
    out = _empty(parts[0], count if rows is None else max(rows) + 1, capacity)
    for row, pad, part in zip(rows or range(count), pads or [0] * count, parts, strict=True):
        out[row, pad : pad + part.shape[1]] = part[0]
    return out


def _in_pages(stored: Tensor, table: Tensor, pages: int, size: int) -> Tensor:
    """(pages, size, ...) of (entries, capacity, ...)."""
    pool = _empty(stored, pages, size)
    pool[table] = stored.reshape(*table.shape, size, *stored.shape[2:])
    return pool


def _keys(scene: Scene, batch: list[Sequence], lay: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """k, v and their factors. Values that are views of keys are views or copies."""
    k = lay([s.k for s in batch])
    v = k[..., : scene.own.v.shape[3]] if scene.own.is_in_keys and scene.flip() else lay([s.v for s in batch])
    if scene.own.scales is None:
        return k, v, {}
    names = ("k_descale", "v_descale")
    return k, v, {name: lay([s.scales[i][..., None] for s in batch])[..., 0] for i, name in enumerate(names)}  # type: ignore[index]


def _ends(scene: Scene, room: list[int]) -> Tensor:
    return scene.integers(itertools.accumulate(room, initial=0), (torch.int32, torch.int64)[scene.number(0, 2)])


def _rows(scene: Scene, out: Tensor, lse: Tensor, room: list[int], count: int) -> tuple[Tensor, Tensor]:
    """The sequence's rows of packed results."""
    first = sum(room[: scene.place])
    return out[first : first + count], lse[:, first : first + count]


# ---- forms


@torch.no_grad()
def packed(scene: Scene) -> Found:
    lengths = [s.length for s in scene.batch]
    k, v, more = _keys(scene, scene.batch, _in_a_row)
    ends = _ends(scene, lengths)
    most = max(lengths) + scene.number(0, 9) if scene.flip() else None
    more |= {"causal": True, "max_seqlen_q": most, "max_seqlen_k": most}
    more |= {name: x[None] for name, x in more.items() if name.endswith("_descale")}
    q = _in_a_row([s.q for s in scene.batch])
    found = scene.called(anyattn.flash_attn_varlen_func, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, **more)
    return Found("packed", slice(0, scene.own.length), *_rows(scene, *found, lengths, scene.own.length))


@torch.no_grad()
def partly_used(scene: Scene) -> Found:
    """Packed or padded, queries and keys each for themselves, with rows that are not in use; pages of keys sometimes."""
    n, lengths = scene.own.length, [s.length for s in scene.batch]
    queries, where, room = [s.q for s in scene.batch], {"seqused_q": scene.integers(lengths)}, None
    if scene.flip():
        room = [length + scene.number(0, 5) for length in lengths]
        q, where["cu_seqlens_q"] = _in_a_row(queries, room), _ends(scene, room)
    else:
        q = _side_by_side(queries, max(lengths) + scene.number(0, 5))
    kind = ("packed", "padded", "pages")[scene.number(0, 3)]
    where["seqused_k"] = scene.integers(lengths)
    if kind == "packed":
        room_k = [length + scene.number(0, 5) for length in lengths]
        k, v, more = _keys(scene, scene.batch, lambda parts: _in_a_row(parts, room_k))
        where["cu_seqlens_k"] = _ends(scene, room_k)
        more = {name: x[None] for name, x in more.items()}
    else:
        lay, table = _capacity(scene, max(lengths) + scene.number(0, 5), kind == "pages")
        k, v, more = _keys(scene, scene.batch, lay)
        where |= table
    out, lse = scene.called(anyattn.flash_attn_varlen_func, q, k, v, causal=True, **where, **more)
    name = f"{'padded' if room is None else 'packed'} queries, keys {kind}"
    if room is None:
        return Found(name, slice(0, n), out[scene.place, :n], lse[scene.place, :, :n])
    return Found(name, slice(0, n), *_rows(scene, out, lse, room, n))


def _capacity(
    scene: Scene, room: int, has_pages: bool, pads: list[int] | None = None, rows: list[int] | None = None
) -> tuple[Callable[[list[Tensor]], Tensor], dict[str, Any]]:
    """How keys are laid out in caches with ``room`` rows for each entry, and the page table if there is one."""
    if not has_pages:
        return lambda parts: _side_by_side(parts, room, pads, rows), {}
    size = scene.page_sizes[scene.number(0, len(scene.page_sizes))]
    each = -(-room // size)
    count = len(scene.batch) * each
    table = torch.randperm(count + 3, generator=scene.g, device=scene.g.device)[:count].view(-1, each)
    lay = lambda parts: _in_pages(_side_by_side(parts, each * size, pads), table, count + 3, size)
    return lay, {"page_table": table.to(torch.int32)}


@torch.no_grad()
def dense(scene: Scene) -> Found:
    """Neighbours of the sequence's own length."""
    n = scene.own.length
    batch = [_resized(s, n) for s in scene.batch]
    k, v, more = _keys(scene, batch, torch.cat)
    out, lse = scene.called(anyattn.flash_attn_func, torch.cat([s.q for s in batch]), k, v, causal=True, **more)
    return Found("dense", slice(0, n), out[scene.place], lse[scene.place])


@torch.no_grad()
def chunk_of_varlen(scene: Scene) -> Found:
    """Some last queries of the sequence's beginning, packed beside whole neighbours. Mods, for which the first query of a chunk is query 0,
    have the whole beginning."""
    end = scene.number(1, scene.own.length + 1)
    count = end if _has_mods(scene.call) else scene.number(1, end + 1)
    batch = [_resized(s, end) if s is scene.own else s for s in scene.batch]
    queries = [s.q[:, end - count :] if i == scene.place else s.q for i, s in enumerate(batch)]
    k, v, more = _keys(scene, batch, _in_a_row)
    more = {name: x[None] for name, x in more.items()}
    room = [x.shape[1] for x in queries]
    ends = {"cu_seqlens_q": _ends(scene, room), "cu_seqlens_k": _ends(scene, [s.length for s in batch])}
    out, lse = scene.called(anyattn.flash_attn_varlen_func, _in_a_row(queries), k, v, causal=True, **ends, **more)
    return Found(f"packed, {count} queries to {end}", slice(end - count, end), *_rows(scene, out, lse, room, count))


def _has_mods(call: dict[str, Any]) -> bool:
    return "score_mod" in call or "mask_mod" in call


def _resized(s: Sequence, n: int) -> Sequence:
    """The sequence's first n rows, which begin anew behind its last one."""
    rows = torch.arange(n, device=s.q.device) % s.length
    k = s.k[:, rows]
    v = k[..., : s.v.shape[3]] if s.is_in_keys else s.v[:, rows]
    return Sequence(s.q[:, rows], k, v, None if s.scales is None else tuple(x[:, rows] for x in s.scales))


def _cached(has_pages: bool, most: Callable[[int], int]) -> Callable[[Scene], Found]:
    """A form in which up to ``most`` queries of a sequence of n rows are computed over a cache that neighbours share."""

    @torch.no_grad()
    def form(scene: Scene) -> Found:
        chunk = scene.number(1, min(scene.own.length, most(scene.own.length)) + 1)
        end, device = scene.number(chunk, scene.own.length + 1), scene.g.device
        q, lengths, where, room = _queries(scene, chunk, end)
        new = scene.number(1, min(lengths) + 1) if scene.own.scales is None and scene.number(0, 3) == 0 else 0
        whole = [_resized(s, n) for s, n in zip(scene.batch, lengths, strict=True)]
        pads = [scene.number(0, 70) for _ in whole] if scene.number(0, 3) == 0 else [0] * len(whole)
        rows = list(range(len(whole)))
        if not has_pages and scene.number(0, 3) == 0:
            rows = torch.randperm(len(whole) + 2, generator=scene.g, device=device)[: len(whole)].tolist()
            where["cache_batch_idx"] = scene.integers(rows)
        used = [n - new + pad for n, pad in zip(lengths, pads, strict=True)]
        lay, table = _capacity(scene, max(used) + new + scene.number(0, 40), has_pages, pads, rows)
        k, v, more = _keys(scene, [_resized(s, s.length - new) for s in whole], lay)
        if any(pads):
            where["cache_leftpad"] = scene.integers(pads)
        if new:
            names = ("k",) if v.data_ptr() == k.data_ptr() else ("k", "v")
            where |= {name: torch.cat([getattr(s, name)[:, -new:] for s in whole]) for name in names}
        where |= table | {"cache_seqlens": scene.integers(used)}
        out, lse = scene.called(anyattn.flash_attn_with_kvcache, q, k, v, causal=True, **where, **more)
        name = f"{chunk} queries to {end} in {f'pages of {k.shape[1]}' if has_pages else 'a cache'}: {', '.join(where)}"
        if room is None:
            return Found(name, slice(end - chunk, end), out[scene.place], lse[scene.place])
        return Found(name, slice(end - chunk, end), *_rows(scene, out, lse, room, chunk))

    return form


def _queries(scene: Scene, chunk: int, end: int) -> tuple[Tensor, list[int], dict[str, Any], list[int] | None]:
    """The sequence's ``chunk`` queries to ``end`` and neighbours', each entry's number of keys, where queries are, and, if they are packed,
    how many each entry has: one step of one beside a prefill of another."""
    lengths = [end if i == scene.place else scene.number(1, s.length + 1) for i, s in enumerate(scene.batch)]
    if scene.flip():
        counts = [(1, scene.number(1, n + 1))[scene.number(0, 2)] for n in lengths]
        counts[scene.place] = chunk
        parts = [s.q[:, n - count : n] for s, n, count in zip(scene.batch, lengths, counts, strict=True)]
        return _in_a_row(parts), lengths, {"cu_seqlens_q": _ends(scene, counts)}, counts
    lengths = [max(n, chunk) for n in lengths]  # a mod may read a table at the query's position
    q = torch.cat([_resized(s, n).q[:, n - chunk :] for s, n in zip(scene.batch, lengths, strict=True)])
    return q, lengths, {}, None


@torch.no_grad()
def alone_again(scene: Scene) -> Found:
    """The sequence is the whole batch again, with query heads in one row tile or not, and a number of splits that asks for none."""
    single = scene._replace(batch=[scene.own], place=0, order=[scene.order[scene.place]])
    packs, splits = scene.flip(), scene.number(0, 2)
    single = single._replace(call=scene.call | {"pack_gqa": packs, "num_splits": splits})
    form = (packed, partly_used, _cached(False, lambda n: n))[scene.number(0, 3)]
    found = form(single)
    return found._replace(name=f"alone, pack_gqa={packs}, num_splits={splits}: {found.name}")


# ---- as block masks, and trained


def _as_mods(scene: Scene) -> dict[str, Any]:
    """The options of ``flex_attention`` that say what the scene's say."""
    options = placed(scene.call, scene.order)
    window, visible = options.pop("window_size", None), options.pop("mask_mod", None)
    band = masks.causal() if window is None else masks.sliding_window(window[0], 0)
    chain = [scores.capped(options.pop("softcap"))] if "softcap" in options else []
    chain += [scores.alibi(options.pop("alibi_slopes"))] if "alibi_slopes" in options else []
    chain += [options.pop("score_mod")] if "score_mod" in options else []
    options["mask_mod"] = band if visible is None else lambda b, h, q, kv: band(b, h, q, kv) & visible(b, h, q, kv)
    if chain:
        options["score_mod"] = _chained(chain)
    options["scale"] = options.pop("softmax_scale", None)
    return options


def _chained(chain: list[Callable[..., Any]]) -> Callable[..., Any]:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for mod in chain:
            s = mod(s, b, h, q, kv)
        return s

    return score


def _flex(scene: Scene, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, S, Dv) and lse of tensors (B, S, heads, D)."""
    mods = scene._replace(call=_as_mods(scene) | {"enable_gqa": True} | more)
    return mods.called(anyattn.flex_attention, *(x.transpose(1, 2) for x in (q, k, v)))


@torch.no_grad()
def mods(scene: Scene) -> Found:
    """``flex_attention`` of neighbours of the sequence's own length, by a mask mod or its block mask."""
    n = scene.own.length
    more: dict[str, Any] = {}
    name = "a mask mod"
    if scene.flip():
        size = ((128, 128), (64, 64), (64, 128), (256, 64), (128, 192))[scene.number(0, 5)]
        mask_mod, heads = _as_mods(scene)["mask_mod"], scene.own.q.shape[2]
        of = (len(scene.batch), heads) if scene.flip() else (None, heads)
        lists = anyattn.create_block_mask(mask_mod, *of, n, n, device=str(scene.g.device), BLOCK_SIZE=size)
        more, name = {"block_mask": lists, "mask_mod": None}, f"a block mask of {of}, {size}"
    batch = [_resized(s, n) for s in scene.batch]
    k, v, _ = _keys(scene, batch, torch.cat)
    out, lse = _flex(scene, torch.cat([s.q for s in batch]), k, v, **more)
    return Found(name, slice(0, n), out[scene.place].transpose(0, 1), lse[scene.place])


def trained(scene: Scene) -> Found:
    """Packed, over pages, dense or by mods, in grad mode with every tensor a leaf; the backward pass runs twice."""
    n, heads = scene.own.length, scene.own.q.shape[2]
    kind = ("packed", "pages", "dense", "mods")[scene.number(0, 4)]
    lengths, where = [s.length for s in scene.batch], {}
    if kind in ("packed", "pages"):
        batch, join = scene.batch, _in_a_row
        where = {"cu_seqlens_q": _ends(scene, lengths), "cu_seqlens_k": _ends(scene, lengths)}
    else:
        batch, join = [_resized(s, n) for s in scene.batch], torch.cat
    lay = join
    if kind == "pages":
        lay, table = _capacity(scene, max(lengths), True)
        where |= table
    k, v, _ = _keys(scene, batch, lay)
    q, k = join([s.q for s in batch]).requires_grad_(), k.requires_grad_()
    v = k[..., : v.shape[-1]] if v.data_ptr() == k.data_ptr() else v.requires_grad_()
    scene = scene._replace(call=_fixed(placed(scene.call, scene.order)))
    if where:
        out, lse = scene.called(anyattn.flash_attn_varlen_func, q, k, v, causal=True, **where)
        own = _rows(scene, out, lse, lengths, n)
    elif kind == "dense":
        out, lse = scene.called(anyattn.flash_attn_func, q, k, v, causal=True)
        own = out[scene.place], lse[scene.place]
    else:
        out, lse = _flex(scene, q, k, v)
        own = out[scene.place].transpose(0, 1), lse[scene.place]
    leaves = [q, k, *([v] if v.is_leaf else []), *_captured(scene.call)]
    incoming = [torch.randn(x.shape, generator=scene.g, device=x.device).to(x.dtype) for x in (out, lse)]
    with anyattn.batch_invariant():
        gradients = [torch.autograd.grad((out, lse), leaves, incoming, retain_graph=True) for _ in range(2)]
    same = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return Found(f"trained, {kind}, {heads} heads", slice(0, n), own[0].detach(), own[1].detach(), same)


def _fixed(call: dict[str, Any]) -> dict[str, Any]:
    """The options with tensors of their own that want gradients."""
    return {name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for name, x in call.items()}


def _captured(call: dict[str, Any]) -> list[Tensor]:
    """What the options and the score mod's closure hold and wants a gradient."""
    score = call.get("score_mod")
    held = [*call.values(), *(cell.cell_contents for cell in getattr(score, "__closure__", None) or ())]
    return [x for x in held if isinstance(x, Tensor) and x.requires_grad]


FORMS: dict[str, Callable[[Scene], Found]] = {
    "packed": packed,
    "partly used": partly_used,
    "dense": dense,
    "chunk of varlen": chunk_of_varlen,
    "one query in a cache": _cached(False, lambda n: 1),
    "one query in pages": _cached(True, lambda n: 1),
    "few queries in pages": _cached(True, lambda n: 9),
    "chunk in a cache": _cached(False, lambda n: n),
    "chunk in pages": _cached(True, lambda n: n),
    "alone": alone_again,
    "mods": mods,
    "trained": trained,
}
WITHOUT_8_BITS = ("dense", "mods", "trained")  # forms that have no keys of 8 bits
SHORT_FORMS = ("packed", "one query in a cache", "one query in pages", "few queries in pages", "chunk in a cache", "alone")
