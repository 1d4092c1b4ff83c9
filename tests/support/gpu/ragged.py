"""Varlen batches for the GPU suite: the forms in which they are stored, calls, and a judgement sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyattn
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, NAN

LENGTHS = ([150, 0, 17, 300, 1, 128, 0, 257, 64], [150, 3, 0, 500, 70, 129, 0, 30, 640])
EQUAL = ([150, 0, 17, 300, 1, 128, 257, 640],) * 2


class Stored(NamedTuple):
    """A batch as a call takes it. q_at, k_at: for each sequence the index of its rows; is_packed: whether q has no batch dimension."""

    q: Tensor
    k: Tensor
    v: Tensor
    where: dict[str, Any]
    q_at: list[Any]
    k_at: list[Any]

    @property
    def is_packed(self) -> bool:
        return self.q.ndim == 3


def drawn(
    lengths: tuple[list[int], list[int]] = LENGTHS,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 128,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "normal",
) -> list[list[Tensor]]:
    """q, k, v of each sequence, (S, H, D)."""
    found = []
    for b, (sq, sk) in enumerate(zip(*lengths, strict=True)):
        made = judging.qkv(1, heads, kv_heads, sq, sk, d, dv, dtype, kind, seed=b)
        found.append([t[0].transpose(0, 1) for t in made])
    return found


def ends(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype).to(DEVICE)


def numbers(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def _row(parts: list[Tensor], rooms: list[int], tail: int = 0) -> tuple[Tensor, list[Any]]:
    """The parts one after the other, each at the start of its own room; NaN in the rows of no part."""
    whole = torch.full((sum(rooms) + tail, *parts[0].shape[1:]), NAN, dtype=parts[0].dtype, device=DEVICE)
    at, places = 0, []
    for part, room in zip(parts, rooms, strict=True):
        whole[at : at + len(part)] = part
        places.append(slice(at, at + len(part)))
        at += room
    return whole, places


def _side(parts: list[Tensor], room: int) -> tuple[Tensor, list[Any]]:
    whole = torch.full((len(parts), room, *parts[0].shape[1:]), NAN, dtype=parts[0].dtype, device=DEVICE)
    for b, part in enumerate(parts):
        whole[b, : len(part)] = part
    return whole, [(b, slice(0, len(part))) for b, part in enumerate(parts)]


def _columns(batch: list[list[Tensor]]) -> tuple[list[Tensor], ...]:
    return tuple([one[i] for one in batch] for i in range(3))


def packed(batch: list[list[Tensor]], tail: int = 0, int_type: torch.dtype = torch.int32) -> Stored:
    lengths = [[len(x) for x in column] for column in _columns(batch)]
    (q, q_at), (k, k_at), (v, _) = (_row(c, n, tail * (1 + i)) for i, (c, n) in enumerate(zip(_columns(batch), lengths, strict=True)))
    k = k[: len(v)] if len(v) < len(k) else k
    v = v[: len(k)]
    return Stored(q, k, v, {"cu_seqlens_q": ends(lengths[0], int_type), "cu_seqlens_k": ends(lengths[1], int_type)}, q_at, k_at)


def partly_used(batch: list[list[Tensor]]) -> Stored:
    """Each sequence has room for more rows than it uses."""
    used = [[len(x) for x in column] for column in _columns(batch)]
    rooms = [[n + (b * 37) % 150 for b, n in enumerate(used[0])], [n + (b * 53 + 1) % 140 for b, n in enumerate(used[1])]]
    (q, q_at), (k, k_at), (v, _) = (_row(c, rooms[min(i, 1)]) for i, c in enumerate(_columns(batch)))
    where = {"cu_seqlens_q": ends(rooms[0]), "cu_seqlens_k": ends(rooms[1]), "seqused_q": numbers(used[0]), "seqused_k": numbers(used[1])}
    return Stored(q, k, v, where, q_at, k_at)


def padded(batch: list[list[Tensor]]) -> Stored:
    columns = _columns(batch)
    rooms = [max(map(len, c)) + 9 for c in columns]
    (q, q_at), (k, k_at), (v, _) = (_side(c, room) for c, room in zip(columns, rooms, strict=True))
    where = {"seqused_q": numbers([len(x) for x in columns[0]]), "seqused_k": numbers([len(x) for x in columns[1]])}
    return Stored(q, k, v, where, q_at, k_at)


def packed_q_padded_k(batch: list[list[Tensor]]) -> Stored:
    one, other = packed(batch), padded(batch)
    where = {"cu_seqlens_q": one.where["cu_seqlens_q"], "seqused_k": other.where["seqused_k"]}
    return Stored(one.q, other.k, other.v, where, one.q_at, other.k_at)


def paged(batch: list[list[Tensor]], size: int, seed: int = 1, padded_q: bool = False) -> Stored:
    """Pages in random order in a pool with other pages; NaN in unused rows and pages, arbitrary numbers in unused table entries."""
    _, keys, values = _columns(batch)
    counts = [-(-len(x) // size) for x in keys]
    order = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(seed)).tolist()
    # what is not used says anything: pages that are none, and those of the pool that hold nothing but NaN
    anything = torch.tensor([10**6, -1, order[0], -(2**31), 2**31 - 1], dtype=torch.int32)
    table = anything.repeat(len(keys) * (max(counts) + 9))[: len(keys) * (max(counts) + 9)].view(len(keys), -1).clone()
    pools = [torch.full((len(order), size, *x[0].shape[1:]), NAN, dtype=x[0].dtype, device=DEVICE) for x in (keys, values)]
    for b, count in enumerate(counts):
        for page in range(count):
            table[b, page] = at = order.pop()
            for pool, parts in zip(pools, (keys, values), strict=True):
                rows = parts[b][page * size : (page + 1) * size]
                pool[at, : len(rows)] = rows
    one = padded(batch) if padded_q else packed(batch)
    queries = {name: one.where[name] for name in ("cu_seqlens_q", "seqused_q") if name in one.where}
    where = queries | {"seqused_k": numbers([len(x) for x in keys]), "page_table": table.to(DEVICE)}
    return Stored(one.q, *pools, where, one.q_at, [])


FORMS: dict[str, Callable[[list[list[Tensor]]], Stored]] = {
    "packed": packed,
    "packed int64": lambda batch: packed(batch, int_type=torch.int64),
    "tail": lambda batch: packed(batch, tail=70),
    "partly used": partly_used,
    "padded": padded,
    "packed q, padded k": packed_q_padded_k,
    "pages of 1": lambda batch: paged(batch, 1),
    "pages of 2": lambda batch: paged(batch, 2),
    "pages of 7": lambda batch: paged(batch, 7),
    "pages of 8": lambda batch: paged(batch, 8, padded_q=True),
    "pages of 16": lambda batch: paged(batch, 16),
    "pages of 24": lambda batch: paged(batch, 24),
    "pages of 48": lambda batch: paged(batch, 48, padded_q=True),
    "pages of 64": lambda batch: paged(batch, 64),
    "pages of 100": lambda batch: paged(batch, 100),
    "pages of 128": lambda batch: paged(batch, 128),
    "pages of 256": lambda batch: paged(batch, 256, padded_q=True),
}


def call(stored: Stored, **options: Any) -> tuple[Tensor, Tensor]:
    judging.poisoned(2 * stored.q.numel(), 4 * stored.q.shape[:-1].numel())
    given = {"return_lse": True, "backend": judging.BACKEND} | options
    return anyattn.flash_attn_varlen_func(stored.q, stored.k, stored.v, **stored.where, **given)


def of(result: Tensor, stored: Stored, b: int, is_lse: bool = False) -> Tensor:
    """A sequence's part of a result, as (1, H, S, D) or (1, H, S)."""
    rows = (result.transpose(-1, -2) if is_lse else result)[stored.q_at[b]]
    return rows.transpose(0, 1)[None]


def meant(options: dict[str, Any], b: int, sq: int, sk: int) -> dict[str, Any]:
    """The oracle's arguments for sequence ``b``, by the meaning of the call's options."""
    left, right = options.get("window_size", (-1, -1))
    cap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    mask_mod, score_mod = options.get("mask_mod"), options.get("score_mod")

    def mask(zero: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = j - (i + sk - sq)
        seen = ahead == ahead
        if options.get("causal"):
            seen = seen & (ahead <= 0)
        if left not in (None, -1):
            seen = seen & (ahead >= -left)
        if right not in (None, -1):
            seen = seen & (ahead <= right)
        return seen if mask_mod is None else seen & mask_mod(zero + b, h, i, j)

    def score(s: Tensor, zero: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap:
            s = cap * torch.tanh(s / cap)
        if slopes is not None:
            s = s - (slopes if slopes.ndim == 1 else slopes[b])[h].double() * (i + sk - sq - j).abs()
        return s if score_mod is None else score_mod(s, zero + b, h, i, j)

    changes = cap or slopes is not None or score_mod is not None
    return {"mask": mask, "score": score if changes else None, "sink": options.get("sink"), "scale": options.get("softmax_scale")}


def judge(
    batch: list[list[Tensor]], stored: Stored, options: dict[str, Any], label: str = "", more: dict[str, Any] | None = None, **lists: Any
) -> tuple[Tensor, Tensor]:
    """Calls ``flash_attn_varlen_func`` and judges every sequence; rows of none give 0 and -inf. more: options as the oracle gets them."""
    out, lse = call(stored, **options, **lists)
    if not judging.RUNS:
        return out, lse
    exact = options | (more or {})
    for b, (q, k, v) in enumerate(batch):
        heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
        got = {"out": of(out, stored, b), "lse": of(lse, stored, b, True)}
        judging.check(f"{label} sequence {b}", got, *heads_first, **meant(exact, b, len(q), len(k)))
    rest = torch.ones(stored.q.shape[: 1 if stored.is_packed else 2], dtype=torch.bool, device=DEVICE)
    for at in stored.q_at:
        rest[at] = False
    assert bool((out[rest] == 0).all()), f"{label}: a row of no sequence is not 0"
    assert bool((lse.transpose(-1, -2)[rest] == -torch.inf).all()), f"{label}: a row of no sequence has an lse"
    return out, lse


def judge_gradients(
    batch: list[list[Tensor]], stored: Stored, options: dict[str, Any], label: str = "", more: dict[str, Any] | None = None, **given: Any
) -> None:
    """Judges dq, dk and dv of every sequence; rows of none have gradients of 0, also if the output's gradient is not 0 there.

    more: as of ``judge``.
    """
    leaves = [t.detach().requires_grad_() for t in (stored.q, stored.k, stored.v)]
    out, _ = call(stored._replace(q=leaves[0], k=leaves[1], v=leaves[2]), **options, **given)
    if not judging.RUNS:  # what it would launch is noted
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        return
    dout = torch.full_like(out, NAN)
    for b, at in enumerate(stored.q_at):
        dout[at] = judging.random(*out[at].shape, seed=b).to(out)
    judging.poisoned(*(2 * t.numel() for t in leaves), 4 * stored.q.numel(), 4 * stored.q.numel() // stored.q.shape[-1])
    gradients = torch.autograd.grad(out, leaves, dout)
    places = (stored.q_at, stored.k_at, stored.k_at)
    exact = options | (more or {})
    for b, parts in enumerate(batch):
        got = {name: d[at[b]].transpose(0, 1)[None] for name, d, at in zip(("dq", "dk", "dv"), gradients, places, strict=True)}
        heads_first = [t.transpose(0, 1)[None] for t in (*parts, dout[stored.q_at[b]])]
        judging.check(f"{label} sequence {b}", got, *heads_first, **meant(exact, b, len(parts[0]), len(parts[1])))
    for name, d, at in zip(("dq", "dk", "dv"), gradients, places, strict=True):
        rest = torch.ones(d.shape[:-2], dtype=torch.bool, device=DEVICE)
        for place in at:
            rest[place] = False
        assert bool((d[rest] == 0).all()), f"{label}: {name} of a row of no sequence is not 0"
