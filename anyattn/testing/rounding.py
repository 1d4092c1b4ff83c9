"""How much correct code may err in one row: first-order rounding noise, the part of the budget that ``same_dtype`` cannot show.

``same_dtype`` is one draw of the rounding errors. Where a row's error is a sum over many keys and dims, one draw tells their size to a few
per cent, and "twice that" is a fair bound. Where one score carries the row (peaky scores, the first rows of a causal mask) the draw is one
number from a bell curve, as likely 0 as not: a row with one visible key has dq = p (dP - delta) k = 0 exactly, and any code that takes
delta from dO . O errs by some roundings there. So every figure comes with its standard deviation ``sigma``, propagated in float64 through
the definition from one rounding per stored value (unit eps/2 of the inputs' dtype) and per accumulated product (float32 or better), and
with ``dof``, how many independent errors a row is made of. The budget adds ``4 sigma / sqrt(dof)``: four standard deviations for a row
made by one error, little for a row made of many. Errors that a whole row shares (its sum, its LSE, partial sums that grow steadily)
count as one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.trace import TracedMod
from anyattn.oracle import Mod, _apply, _Call, _chunks, _scale, _upcast, _upcast_mods, _visible

__all__ = ["Noise", "Noises", "rounding"]

_DRAWS = 8


class Noise(NamedTuple):
    """sigma: one standard deviation per element; row_sigma: of a row's rms about its usual size, given per element."""

    sigma: Tensor
    row_sigma: Tensor


class Noises(NamedTuple):
    out: Noise
    lse: Noise
    dq: Noise | None
    dk: Noise | None
    dv: Noise | None
    dsink: Noise | None
    captured: tuple[Noise | None, ...]


class _Sum:
    """Variance of a sum of independent errors, kept with what its dof needs: (sum of contributions)^2 / sum of squares."""

    def __init__(self, like: Tensor):
        self.variance, self.shared = torch.zeros_like(like), torch.zeros_like(like)
        self.first, self.second = (torch.zeros(like.shape[:-1], dtype=like.dtype) for _ in range(2))

    def noise(self) -> Noise:
        dof = torch.where(self.second > 0, self.first.square() / self.second.clamp_min(1e-300), 1.0)
        dof = dof.clamp(1.0, max(1, self.variance.shape[-1]))[..., None]
        return Noise((self.variance + self.shared).sqrt(), (self.variance / dof + self.shared).sqrt())


def rounding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    score: Mod | None = None,
    mask: Mod | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    captured: Sequence[Tensor] = (),
) -> Noises:
    """The rounding noise of every result of one call; arguments as in ``oracle.gradients``, in the dtype that is judged."""
    oracles_own = 2.0 if q.dtype is torch.float64 else 1.0  # there the oracle errs as much as what it judges
    unit = oracles_own * torch.finfo(q.dtype).eps / 2
    wide_unit = oracles_own * torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps / 2
    call = _Call(*_upcast(q, k, v, sink), *_upcast_mods(score, mask), _scale(q, scale))
    slots: list[int | None] = list(range(len(captured)))
    if isinstance(call.score, TracedMod):
        floats = [t.is_floating_point() for t in call.score.tensors]
        tensors = tuple(t.clone().requires_grad_() if f else t for t, f in zip(call.score.tensors, floats))
        call = call._replace(score=dataclasses.replace(call.score, tensors=tensors))
        captured = [t for t, f in zip(tensors, floats) if f]
        slots = [sum(floats[:i]) if f else None for i, f in enumerate(floats)]
    work = _Work(call, unit, wide_unit, captured)
    for b, h in _chunks(call):
        work.add(b, h, None if dout is None else dout[b, h].double(), None if dlse is None else dlse[b, h].double())
    return work.result(dout is not None, slots)


class _Work:
    def __init__(self, call: _Call, unit: float, wide_unit: float, captured: Sequence[Tensor]):
        clean = [torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (call.q, call.k, call.v)]
        self.call, self.u2, self.w2, self.captured = call._replace(q=clean[0], k=clean[1], v=clean[2]), unit**2, wide_unit**2, captured
        self.out, self.dq = _Sum(call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])), _Sum(call.q)
        self.dk, self.dv = _Sum(call.k), _Sum(call.v)
        self.lse = call.q.new_zeros(call.q.shape[:3])
        self.dsink = None if call.sink is None else torch.zeros_like(call.sink)
        self.draws = [torch.zeros(_DRAWS, *t.shape, dtype=torch.float64) for t in captured]
        self.random = torch.Generator().manual_seed(0)
        self.tied = 0.0

    def add(self, b: int, h: Tensor, dout: Tensor | None, dlse: Tensor | None) -> None:
        call, u2, w2 = self.call, self.u2, self.w2
        kv = h // (call.q.shape[1] // max(1, call.k.shape[1]))
        q, k, v = call.q[b, h], call.k[b, kv], call.v[b, kv]
        visible = _visible(call, b, h)
        product = q @ k.mT * call.scale
        term2 = _depth(q.shape[-1]) * (q.square() @ k.square().mT) * call.scale**2
        modified, slope, pulls = self._modified(product, visible, b, h)
        scores = torch.where(visible, modified, -math.inf)
        seen = torch.isfinite(scores)
        finite = torch.where(seen, modified, 0.0)
        score2 = torch.where(seen, slope.square() * (w2 * term2 + u2 * product.square()) + (u2 + w2) * finite.square(), 0.0)
        sink = None if call.sink is None else call.sink[h][:, None]
        p, lse, p_sink = _softmax(scores, sink)
        p2 = p.square()
        row2 = (p2 * (score2 + u2)).sum(-1, keepdim=True)  # relative error of a row's sum
        out = p @ v
        spread = p2 * score2
        v2 = v.square()
        out2 = (
            spread @ v2 - 2 * (spread @ v) * out + spread.sum(-1, keepdim=True) * out.square() + (u2 + w2 * _depth(k.shape[1])) * (p2 @ v2)
        )
        each = spread + u2 * p2
        # equal scores give equal probabilities, whose rounding errors (uniform, variance unit^2 / 3) are equal too
        self.tied = u2 / 3 if bool((product == product[..., :1]).all()) else 0.0
        shared = (self.tied + w2 * _length(k.shape[1])) * out.square()
        _accumulate(self.out, b, h, out2.clamp_min(0), each, shared)
        self.lse[b, h] = (row2[..., 0] + w2 * (lse.square() + _length(k.shape[1]))).sqrt()
        row2 = row2 + w2 * lse.square()[..., None]
        out2 = out2.clamp_min(0) + shared
        if dout is None:
            return
        self._gradients(b, h, kv, q, k, v, dout, dlse, p, p_sink, score2 + row2 + u2, row2, out, out2, slope, pulls)

    def _gradients(self, b, h, kv, q, k, v, dout, dlse, p, p_sink, weight2, row2, out, out2, slope, pulls) -> None:  # type: ignore[no-untyped-def]
        u2, w2, scale2 = self.u2, self.w2, self.call.scale**2
        p2, dout2 = p.square(), dout.square()
        dp = dout @ v.mT
        delta = (dout * out).sum(-1, keepdim=True)
        dp2 = w2 * _depth(v.shape[-1]) * (dout2 @ v.square().mT) + u2 * dp.square()
        delta2 = (dout2 * (u2 * out.square() + out2)).sum(-1, keepdim=True) + w2 * _depth(v.shape[-1]) * (dout2 * out.square()).sum(
            -1, keepdim=True
        )
        delta2 = delta2 + u2 * delta.square()
        net = dp - delta if dlse is None else dp - delta + dlse[..., None]
        each = p2 * (net.square() * (weight2 + 2 * u2) + dp2)
        total = each + p2 * delta2
        inner, whole = each * slope.square(), total * slope.square()
        weighted = p2 * (weight2 + w2 * _depth(q.shape[1]))
        shared = (self.tied + w2 * _length(q.shape[1])) * (p.mT @ dout).square()
        _accumulate(self.dv, b, kv, weighted.mT @ dout2, weighted.mT, shared)
        ds = p * net * slope
        common = p * slope
        inner = inner + w2 * _depth(k.shape[1]) * ds.square()
        shared = delta2 * (common @ k).square() + w2 * _length(k.shape[1]) * (ds @ k).square()
        _accumulate(self.dq, b, h, scale2 * (inner @ k.square()), inner, scale2 * shared)
        whole = (whole + w2 * _depth(q.shape[1]) * ds.square()).mT
        _accumulate(self.dk, b, kv, scale2 * (whole @ q.square()), whole, scale2 * w2 * _length(q.shape[1]) * (ds.mT @ q).square())
        if p_sink is not None and self.dsink is not None:
            net_sink = delta[..., 0] if dlse is None else delta[..., 0] - dlse
            sink2 = u2 * (1 + self.call.sink[h][:, None].square())  # type: ignore[index]
            self.dsink[h] += (p_sink.square() * (net_sink.square() * (row2[..., 0] + sink2 + u2) + delta2[..., 0])).sum(-1)
        if pulls is not None:
            for draw in range(_DRAWS):
                for whole_, part in zip(
                    self.draws, pulls(total.sqrt() * torch.randn(total.shape, generator=self.random, dtype=total.dtype))
                ):
                    if part is not None:
                        whole_[draw] += part

    def _modified(self, product: Tensor, visible: Tensor, b: int, h: Tensor):  # type: ignore[no-untyped-def]
        """The mod's value, its derivative by the score, and a function that pulls a gradient back to the captured tensors."""
        if self.call.score is None or product.numel() == 0:
            return product, torch.ones_like(product), None
        at = visible.nonzero(as_tuple=True)
        score = product[at].requires_grad_()
        value = _apply(self.call.score, score, torch.full_like(at[0], b), h[at[0]], at[1], at[2]).to(score.dtype).expand(score.shape)
        slope = None
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value, score, torch.ones_like(value), retain_graph=True, allow_unused=True)

        def pulls(d: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(value, self.captured, d[at], retain_graph=True, allow_unused=True)

        dense = torch.zeros_like(product)
        slopes = torch.zeros_like(score) if slope is None else torch.nan_to_num(slope, 0.0, 0.0, 0.0)
        return dense.index_put(at, value.detach()), dense.index_put(at, slopes), pulls if self.captured and value.requires_grad else None

    def result(self, backward: bool, slots: list[int | None]) -> Noises:
        n = max(1, self.lse.shape[-1])
        lse = Noise(self.lse, self.lse / math.sqrt(n))
        if not backward:
            return Noises(self.out.noise(), lse, None, None, None, None, ())
        dsink = None if self.dsink is None else _single(self.dsink.sqrt())
        captured = [_single(d.square().mean(0).sqrt()) for d in self.draws]
        return Noises(
            self.out.noise(),
            lse,
            self.dq.noise(),
            self.dk.noise(),
            self.dv.noise(),
            dsink,
            tuple(None if s is None else captured[s] for s in slots),
        )


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    logits = scores if sink is None else torch.cat([scores, sink[..., None].expand(-1, scores.shape[1], 1)], -1)
    if not logits.shape[-1]:
        return scores, scores.new_zeros(scores.shape[:-1]), None
    empty = logits.amax(-1, keepdim=True) == -math.inf
    p = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, logits), -1))
    lse = torch.logsumexp(torch.where(empty, 0.0, logits), -1)
    return (p, lse, None) if sink is None else (p[..., :-1], lse, p[..., -1])


def _single(sigma: Tensor) -> Noise:
    return Noise(sigma, sigma)


def _accumulate(total: _Sum, b: int, h: Tensor, variance: Tensor, contributions: Tensor, shared: Tensor) -> None:
    """contributions: (heads, rows, terms), the variances that a row is summed from, up to the row's common factor."""
    parts = (variance, contributions.sum(-1), contributions.square().sum(-1), shared)
    for whole, part in zip((total.variance, total.first, total.second, total.shared), parts):
        whole[b].index_add_(0, h, part)


def _depth(n: int) -> float:
    """Growth of a random walk's rounding error: n products summed one after the other, in blocks of at most 512."""
    return max(1.0, min(n, 512) / 6)


def _length(n: int) -> float:
    """The same where partial sums grow steadily: then their rounding errors may all have one sign."""
    return max(1.0, (min(n, 512) / 6) ** 2)
