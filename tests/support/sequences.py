"""Varlen batches as plain lists, the expected attention over them, and the forms in which they are stored.

The expectation comes from ``anyattn.oracle``, one sequence at a time; it uses nothing else of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import Later, Noise, later

NAN = float("nan")


@dataclass
class Ragged:
    """q[i] (Hq, Sq_i, D), k[i] (Hkv, Sk_i, D), v[i] (Hkv, Sk_i, Dv), and the gradients that come in."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    dout: list[Tensor]

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        return [t.shape[1] for t in self.q], [t.shape[1] for t in self.k]


def ragged(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    kind: str = "normal",
) -> Ragged:
    """kind: normal; peaky (scores times 4); coded (zero scores, and each value names its key)."""
    g = torch.Generator().manual_seed(seed)
    dv = d if dv is None else dv
    q, k, v, dout = [], [], [], []
    for sq, sk in zip(lengths_q, lengths_k, strict=True):
        q.append((torch.randn(heads, sq, d, generator=g) * {"normal": 1.0, "peaky": 4.0, "coded": 0.0}[kind]).to(dtype))
        k.append(torch.randn(kv_heads, sk, d, generator=g).to(dtype))
        values = torch.randn(kv_heads, sk, dv, generator=g)
        v.append((torch.arange(sk)[:, None].expand(kv_heads, sk, dv) % 97 * 0.25 if kind == "coded" else values).to(dtype))
        dout.append(torch.randn(heads, sq, dv, generator=g).to(dtype))
    return Ragged(q, k, v, dout)


@dataclass
class Meaning:
    """The options of a call, and by them what each sequence's queries see. score, mask: functions of (b, h, q_idx, kv_idx)."""

    causal: bool = False
    window_size: tuple[int | None, int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    score_mod: Callable | None = None
    mask_mod: Callable | None = None
    captured: list[Tensor] = field(default_factory=list)
    """float64 tensors that score_mod closes over and whose gradients are judged."""

    def options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("alibi_slopes", "sink", "score_mod", "mask_mod")}
        return {"causal": self.causal, "window_size": self.window_size, "softcap": self.softcap, **given}

    def of(self, b: int, sq: int, sk: int, first: int) -> dict[str, Any]:
        """The oracle's arguments for sequence b, whose first query is q_idx ``first`` to the mods."""
        left, right = (None if side == -1 else side for side in self.window_size)

        def mask(_: Any, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            place = i + (sk - sq)
            seen = (j >= 0) & (place >= place)
            if self.causal:
                seen = seen & (j <= place)
            if left is not None:
                seen = seen & (j >= place - left)
            if right is not None:
                seen = seen & (j <= place + right)
            return seen if self.mask_mod is None else seen & self.mask_mod(b, h, i + first, j)

        def score(s: Tensor, _: Any, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if self.softcap:
                s = self.softcap * torch.tanh(s / self.softcap)
            if self.alibi_slopes is not None:
                slopes = self.alibi_slopes.double()
                s = s - (slopes if slopes.ndim == 1 else slopes[b])[h] * (i + (sk - sq) - j).abs()
            return s if self.score_mod is None else self.score_mod(s, b, h, i + first, j)

        changes = self.softcap or self.alibi_slopes is not None or self.score_mod is not None
        return {"mask": mask, "score": score if changes else None, "sink": self.sink}


class Wanted(NamedTuple):
    """Of one sequence: the definition in float64 and in its own dtype, both with gradients or not, and the rounding that is allowed."""

    forward: list[Any]
    backward: list[Any]
    noise: Later


def wanted(batch: Ragged, meaning: Meaning, firsts: list[int] | None = None, backward: bool = True) -> list[Wanted]:
    """What ``judge`` compares with, for tests that judge several calls of one meaning."""
    found = []
    for b, (q, k, v, dout) in enumerate(zip(batch.q, batch.k, batch.v, batch.dout, strict=True)):
        mods = meaning.of(b, q.shape[1], k.shape[1], 0 if firsts is None else firsts[b])
        one = (q[None], k[None], v[None])
        forward, back = [oracle.attention(*one, **mods), oracle.same_dtype(*one, **mods)], []
        if backward:
            back = [f(*one, dout[None], **mods, captured=meaning.captured) for f in (oracle.gradients, oracle.same_dtype_gradients)]
        noise = later(*one, dout[None] if backward else None, **mods, captured=meaning.captured)
        found.append(Wanted(forward, back, noise))
    return found


def judge(
    got: dict[str, list[Tensor]],
    batch: Ragged,
    meaning: Meaning,
    firsts: list[int] | None = None,
    shared: dict[str, Tensor] | None = None,
    label: str = "",
    want: list[Wanted] | None = None,
) -> None:
    """Judges every sequence's results by the budget. got: out, lse, dq, dk, dv as lists like ``batch.q``; absent names are not judged.

    shared: gradients of the sink (``dsink``) and of ``meaning.captured`` (``captured0``, ...), summed over the sequences. want: of
    ``wanted``, where it is known.
    """
    totals: dict[str, list] = {}
    for b, one in enumerate(want or wanted(batch, meaning, firsts, bool("dq" in got or shared))):
        noise = one.noise
        for name, values in got.items():
            exact = [getattr(t, name)[0] for t in (one.forward if name in ("out", "lse") else one.backward)]
            budget.check(f"{label} sequence {b} {name}", values[b], *exact, noise.of(name, lambda t: t[0]))
        for name in shared or {}:
            parts = [t.dsink if name == "dsink" else t.captured[int(name[8:])] for t in one.backward]
            totals.setdefault(name, []).append([*parts, noise.of(name) if name == "dsink" else noise.of_captured(int(name[8:]))])
    for name, value in (shared or {}).items():
        exact, plain = (sum(parts[i] for parts in totals[name]) for i in (0, 1))
        spread = partial(_spread, [parts[2] for parts in totals[name]])
        budget.check(f"{label} {name}", value, exact, plain, spread)


def _spread(parts: list[Callable[[], Noise]]) -> Noise:
    """The noise of a sum."""
    return Noise(*(torch.stack(list(t)).square().sum(0).sqrt() for t in zip(*(noise() for noise in parts), strict=True)))


# ---- storage


def packed(parts: list[Tensor]) -> Tensor:
    """(heads, S_i, D) each -> (total, heads, D)."""
    return torch.cat([t.transpose(0, 1) for t in parts])


def unpacked(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """(total, heads, D) -> (heads, S_i, D) each."""
    return [t.transpose(0, 1) for t in x[: sum(lengths)].split(lengths)]


def ends(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(list(lengths), dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def padded(
    parts: list[Tensor], capacity: int, rows: Sequence[int] | None = None, count: int = 0, leftpad: Sequence[int] | None = None
) -> Tensor:
    """(B or count, capacity, heads, D): part i in row ``rows[i]`` behind ``leftpad[i]`` rows; NaN wherever nothing belongs."""
    rows = range(len(parts)) if rows is None else rows
    heads, _, d = parts[0].shape
    out = torch.full((max(count, len(parts)), capacity, heads, d), NAN, dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        start = 0 if leftpad is None else leftpad[i]
        out[rows[i], start : start + part.shape[1]] = part.transpose(0, 1)
    return out


def paged(parts: list[Tensor], page_size: int, table: Tensor, num_pages: int, leftpad: Sequence[int] | None = None) -> Tensor:
    """(num_pages, page_size, heads, D): part i in the pages of row i of ``table``; NaN wherever nothing belongs."""
    heads, _, d = parts[0].shape
    out = torch.full((num_pages, page_size, heads, d), NAN, dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        start = 0 if leftpad is None else leftpad[i]
        for t in range(part.shape[1]):
            out[table[i, (start + t) // page_size], (start + t) % page_size] = part[:, t]
    return out


def shuffled_table(batch: int, capacity: int, page_size: int, seed: int, spare: int = 3) -> tuple[Tensor, int]:
    """A page table int32 (batch, pages) over a shuffled pool, and the number of its pages."""
    each = -(-capacity // page_size)
    count = batch * each + spare
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[: batch * each].view(batch, each).to(torch.int32), count
