"""Calls with NaN and infinities that some rows see and others do not, judged entry by entry.

What meets one is what adding up its visible products gives, NaN or an infinity; what meets none is within its budget of the same call with
numbers there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.testing import budget, poison
from anyattn.testing.rounding import rounding

Plant = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # writes into q, k, v, dout
NAMES = ("out", "dq", "dk", "dv")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {"NaN": torch.isnan, "inf": torch.isposinf, "-inf": torch.isneginf}


def keys(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Two whole keys near the end, three apart, and their values."""
    k[:, :, -1], k[:, :, -4], v[:, :, -1], v[:, :, -4] = math.nan, math.inf, math.inf, math.nan


def values(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Single entries of values, of each kind and of two that some row meets in one column."""
    v[:, :, 10, 0], v[:, :, 12, 0], v[:, :, 11, 1], v[:, :, 2, 7] = math.inf, -math.inf, -math.inf, math.inf
    v[:, :, 30, 5], v[:, :, 31, 5] = math.nan, math.inf


def queries(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Queries, and single entries of dout."""
    q[:, :, 1], q[:, :, -2] = math.nan, math.inf
    dout[:, :, 21:24, 3], dout[:, :, 22, 4], dout[:, -1, -9, 2] = math.inf, math.nan, -math.inf
    dout[:, :, 23, 3], dout[:, :, 3] = -math.inf, math.nan


def judge(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], plant: Plant, mask: Any, *, bias: Any = None, label: str = "", **options: Any
) -> None:
    """inputs: q, k, v, dout. bias: (h, i, j), added to scores. options: of ``flex_attention``; a block mask is in the mask's stead."""
    clean, spoiled = ([t.detach().clone() for t in inputs] for _ in range(2))
    plant(*spoiled)
    score = None if bias is None else lambda s, b, h, i, j: s + bias(h, i, j)
    sink = options.get("sink")
    if "block_mask" not in options:
        options["mask_mod"] = mask
    leaves = [t.requires_grad_() for t in spoiled[:3]]
    with poison.enabled():
        out = anyattn.flex_attention(*leaves, score, enable_gqa=True, **options)
        got = [out.detach(), *torch.autograd.grad(out, leaves, spoiled[3])]
    q, k, v, dout = clean
    mods = {"score": score, "mask": mask, "sink": sink}
    wants = [(f(q, k, v, **mods).out, *g(q, k, v, dout, **mods)[:3]) for f, g in (
        (oracle.attention, oracle.gradients), (oracle.same_dtype, oracle.same_dtype_gradients)
    )]  # fmt: skip
    noise = rounding(q, k, v, dout, **mods)
    said = by_definition(*(t.detach() for t in spoiled), mask, bias, sink)
    for name, value, met, exact, plain in zip(NAMES, got, said, *wants, strict=True):
        # of dq and dk a difference of infinities has the kind, and rounding one of their signs
        for kind, is_kind in (KINDS if name in ("out", "dv") else {"a number": torch.isfinite}).items():
            apart = (is_kind(value) != is_kind(met)).nonzero().tolist()
            assert not apart, f"{label} {name}: {kind} on one side only at {apart[0]}, one of {len(apart)} places"
        rest = torch.where(met.isfinite(), value.double(), exact)
        budget.check(f"{label} {name}", rest, exact, plain, getattr(noise, name))


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Any, bias: Any = None, sink: Tensor | None = None
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in float64, of visible pairs alone: no sum has a term of any other."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    q, k, v, dout = (t.double() for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), dout))
    b, h, i, j = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    b, h, i = b[:, None, None, None], h[:, None, None], i[:, None]
    seen = (torch.ones((), dtype=torch.bool, device=q.device) if mask is None else mask(b, h, i, j)).expand(*q.shape[:3], k.shape[2])
    s = q @ k.mT * scale + (0.0 if bias is None else bias(h, i, j))
    s = torch.where(seen, s, -math.inf)
    top = s.amax(-1, keepdim=True) if sink is None else torch.maximum(s.amax(-1, keepdim=True), sink.double()[:, None, None])
    top = torch.where(top == -math.inf, 0.0, top)
    p = torch.where(seen, (s - top).exp(), 0.0)
    total = p.sum(-1, keepdim=True) + (0.0 if sink is None else (sink.double()[:, None, None] - top).exp())
    p = p / torch.where(total == 0, 1.0, total)
    out = _sums(p, v, seen)
    ds = torch.where(seen, p * (dout @ v.mT - (out * dout).sum(-1, keepdim=True)), 0.0)
    dq, dk, dv = _sums(ds, k, seen) * scale, _sums(ds.mT, q, seen.mT) * scale, _sums(p.mT, dout, seen.mT)
    return out, dq, *(t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))


def _sums(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """weights @ x of what is seen and has a weight: infinities and NaN of x are counted apart."""
    found = torch.where(seen, weights, 0.0) @ torch.where(x.isfinite(), x, 0.0)
    counts = (seen & (weights != 0)).double()
    for fill, of_kind in ((math.inf, x.isposinf()), (-math.inf, x.isneginf())):
        found = torch.where(counts @ (of_kind | x.isnan()).double() > 0, found + fill, found)
    return found
