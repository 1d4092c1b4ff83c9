"""8-bit caches with every form of scales, NaN or noise wherever no key is, and the sequences that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.support import sequences as seq
from tests.support.sequences import NAN, Meaning

__all__ = ["DTYPES", "FORMS", "ON_GPU", "PLAIN_ON_GPU", "Q_DTYPES", "SETTINGS", "Case", "Setting", "made", "widened"]

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = ("none", "number", "tensor", "head", "page", "key", "inline")


@dataclass(frozen=True)
class Setting:
    """One call of ``flash_attn_with_kvcache``. cached: keys of each entry, padding included. page_size 0: no pages. k_form, v_form: of the
    scales. spread: the scales of keys and pages are up to 2 ** spread apart."""

    dtype: torch.dtype = torch.float8_e4m3fn
    k_form: str = "head"
    v_form: str = "head"
    q_dtype: torch.dtype = torch.bfloat16
    cached: tuple[int, ...] = (40, 7, 63)
    queries: int = 1
    page_size: int = 0
    leftpad: tuple[int, ...] | None = None
    shuffled_rows: bool = False
    capacity: int = 70
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    dv: int = 16
    spread: float = 2.0
    seed: int = 0


SETTINGS = {
    "plain": Setting(),
    "several queries": Setting(queries=3),
    "pages of 1": Setting(page_size=1, queries=2),
    "pages of 16": Setting(page_size=16),
    "pages of 64": Setting(page_size=64, queries=2),
    "left padding": Setting(leftpad=(5, 0, 33), queries=2),
    "padding_in_pages": Setting(leftpad=(5, 0, 33), page_size=16),
    "other rows": Setting(shuffled_rows=True),
    "wide values": Setting(d=24, dv=40),
    "one head": Setting(kv_heads=1),
}
PLAIN_ON_GPU = Setting(cached=(700, 33, 260, 1), capacity=1000, heads=8, kv_heads=2, d=64, dv=64)
ON_GPU = {  # a test file's own settings come on top
    "plain": PLAIN_ON_GPU,
    "wide": replace(PLAIN_ON_GPU, d=128, dv=128, queries=3),
    "widest": replace(PLAIN_ON_GPU, d=256, dv=256),
    "odd": replace(PLAIN_ON_GPU, d=72, dv=40, heads=10),
    "pages of 16": replace(PLAIN_ON_GPU, page_size=16, d=128, dv=128),
    "pages of 64": replace(PLAIN_ON_GPU, page_size=64, queries=4),
    "pages of 3": replace(PLAIN_ON_GPU, page_size=3),
    "padding": replace(PLAIN_ON_GPU, leftpad=(5, 0, 133, 1), page_size=16),
    "other rows": replace(PLAIN_ON_GPU, shuffled_rows=True),
}


@dataclass
class Case:
    """The arguments of the call, and its sequences with dequantised keys and values in float64."""

    args: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    batch: seq.Ragged
    firsts: list[int] = field(default_factory=list)

    def copy_(self, other: Case) -> None:
        """Writes the tensors of another case of the same setting to those of this one; ``batch`` stays."""
        for mine, theirs in zip(self.args, other.args, strict=True):
            mine.view(torch.uint8).copy_(theirs.view(torch.uint8)) if mine.element_size() == 1 else mine.copy_(theirs)
        for name, t in self.options.items():
            if isinstance(t, Tensor):
                t.copy_(other.options[name])


def made(s: Setting, meaning: Meaning | None = None, device: str = "cpu") -> Case:
    """device: of the call's tensors but those of ``meaning``; the sequences are on the CPU."""
    g = torch.Generator().manual_seed(s.seed)
    count, pads = len(s.cached), s.leftpad or (0,) * len(s.cached)
    counts = [c - p for c, p in zip(s.cached, pads, strict=True)]
    batch = seq.ragged([s.queries] * count, counts, s.heads, s.kv_heads, s.d, s.dv, torch.float32, s.seed)
    q = torch.stack(batch.q).transpose(1, 2).to(s.q_dtype)
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(s.cached, dtype=torch.int32), **(meaning or Meaning()).options()}
    if s.leftpad is not None:
        options["cache_leftpad"] = torch.tensor(s.leftpad, dtype=torch.int32)
    rows, table = list(range(count)), None
    if s.page_size:
        table, pages = seq.shuffled_table(count, s.capacity, s.page_size, s.seed)
        options["page_table"] = table
    elif s.shuffled_rows:
        rows = torch.randperm(count + 2, generator=g)[:count].tolist()
        options["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)

    def place(parts: list[Tensor]) -> Tensor:
        if table is not None:
            return seq.paged(parts, s.page_size, table, pages, pads)
        return seq.padded(parts, s.capacity, rows, count + 2 if s.shuffled_rows else count, pads)

    def entry(b: int, stored: Tensor) -> Tensor:
        """The rows of entry b: (heads, keys, ...)."""
        own = stored[rows[b]] if table is None else stored[table[b].long()].flatten(0, 1)
        return own[pads[b] : pads[b] + counts[b]].transpose(0, 1)

    caches, wide = [], []
    for name, form, parts in (("k_descale", s.k_form, batch.k), ("v_descale", s.v_form, batch.v)):
        unit = 40.0 if s.dtype is torch.int8 else 1.0
        stored = place([(part * unit).clamp(-127, 127) for part in parts])
        stored = stored.nan_to_num(99.0).to(s.dtype) if s.dtype is torch.int8 else stored.to(s.dtype)
        used = ~place([torch.zeros(*part.shape[:2], 1) for part in parts])[..., 0].isnan()
        factors, descale = _scales(form, s, used, count, 1 / unit, g)
        cache = stored.to(device)
        if form == "inline":
            width = stored.shape[3]
            inline = torch.zeros(*stored.shape[:3], -(-width // 4) * 4 + 4, dtype=torch.uint8, device=device)
            inline[..., :width], inline[..., -4:].view(torch.float32)[..., 0] = cache.view(torch.uint8), factors  # type: ignore[assignment]
            cache, descale = inline[..., :width].view(s.dtype), inline[..., -4:].view(torch.float32)[..., 0]
        if descale is not None:
            options[name] = descale
        caches.append(cache)
        per_key = factors is not None and factors.ndim == 3
        by_entry = [torch.ones(1) if factors is None else entry(b, factors) if per_key else factors[b, :, None] for b in range(count)]
        wide.append([entry(b, stored).double() * by_entry[b].double()[..., None] for b in range(count)])
    options = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in options.items()}
    whole = seq.Ragged([t.to(s.q_dtype) for t in batch.q], wide[0], wide[1], [t.to(s.q_dtype) for t in batch.dout])
    return Case((q.to(device), caches[0], caches[1]), options, whole, [n - s.queries for n in counts])


def _scales(
    form: str, s: Setting, used: Tensor, count: int, unit: float, g: torch.Generator
) -> tuple[Tensor | None, Tensor | float | None]:
    """The factors, (batch, heads) or of each key with NaN where no key is; and the argument that stands for them. used: (rows, positions,
    heads)."""

    def draw(*shape: int) -> Tensor:
        return unit * torch.exp2((torch.rand(shape, generator=g) - 0.5) * s.spread)

    heads = used.shape[2]
    if form == "none":
        return None, None
    if form == "number":
        return torch.full((count, heads), unit * 0.75), unit * 0.75
    if form == "tensor":
        one = draw(1)
        return one.expand(count, heads), one
    if form == "head":
        factors = draw(count, heads)
        return factors, factors
    if form == "page":
        factors = draw(used.shape[0], 1, heads).masked_fill(~used.any(1, keepdim=True), NAN)
        return factors.expand(used.shape), factors
    factors = draw(*used.shape).masked_fill(~used, NAN)
    return factors, factors


def widened(case: Case, dtype: torch.dtype) -> Case:
    """The same call with caches that have been converted to ``dtype``."""
    return replace(case, args=(case.args[0], *(t.to(dtype) for t in case.args[1:])))
