"""Rounding noise: first-order error bounds per row for correct code, the part of the budget that ``same_dtype`` cannot show.

``same_dtype`` is one sample of the rounding errors. If a row's error is a sum over many keys and dims, one sample gives its size to a few
per cent, and twice that is a fair bound. If one score dominates the row (peaky scores, the first rows of a causal mask), the sample is one
number from a bell curve, as likely 0 as not: a row with one visible key has dq = p (dP - delta) k = 0 exactly, and any code that takes
delta from dO . O errs by some roundings there. So every result comes with its standard deviation ``sigma``, propagated in float64 through
the definition from one rounding per stored value (unit eps/2 of the inputs' dtype) and per accumulated product (float32 or better), and
with ``dof``, the number of independent errors in a row. The budget adds ``4 sigma / sqrt(dof)``: four standard deviations for a row with a
single error, little for a row with many. Errors that a whole row shares (its sum, its lse, partial sums that grow steadily) count as one;
so do the errors of equal lses, which come from equal roundings. Queries that see a single key have dP - delta = 0 in ``same_dtype``,
where the sum of p dP is dP itself: their roundings in dk are all noise, however many queries there are. A stored value below the dtype's
normal numbers is rounded to a multiple of the smallest subnormal number, not relative to itself.

For the gradients of captured tensors only the mod's code is known: their noise is sampled, with dS perturbed by its own noise and each
operation of the mod and of its derivative by one rounding of float32 or better (Monte Carlo arithmetic: Parker, UCLA CSD-970002, 1997):
after a saturated softcap a derivative 1 - tanh^2 is all rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.mods.dropout import Dropout
from anyattn.mods.tracing.trace import TracedMod
from anyattn.oracle import Mod, _apply, _Call, _chunks, _dropped, _scale, _times, _upcast, _upcast_mods, _visible

__all__ = ["DRAWS", "Later", "Noise", "Noises", "Rounded", "later", "rounding"]

_AS_IT_IS = contextlib.nullcontext()
DRAWS = 32  # with 8 samples a standard deviation is off by a quarter, and 4 of them are exceeded a hundred times as often


class Noise(NamedTuple):
    """sigma: one standard deviation per element; row_sigma: that of a row's rms about its usual size, stored per element."""

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


class Later:
    """The rounding noise of one call, computed when it is first needed (``budget.check`` needs it for borderline results), and separately
    for the gradients of captured tensors, which take nine derivatives of the mod."""

    def __init__(self, found: Callable[[bool], Noises]):
        """found: computes the noise, with or without that of captured tensors."""
        self.found = functools.cache(found)

    def of(self, name: str, taken: Callable[[Tensor], Tensor] = lambda t: t) -> Callable[[], Noise]:
        """name: a field of ``Noises`` except ``captured``. taken: selects a part of it."""
        return lambda: Noise(*map(taken, getattr(self.found(False), name)))

    def of_captured(self, i: int) -> Callable[[], Noise]:
        return lambda: self.found(True).captured[i]  # type: ignore[return-value]


_Pull = Callable[..., Sequence[Tensor | None]]  # of the gradient, and of the context in which the mod and its derivative are computed


class Rounded(TorchDispatchMode):
    """Perturbs the results of operations by a relative error of standard deviation ``unit``."""

    def __init__(self, unit: float, random: torch.Generator) -> None:
        super().__init__()
        self.unit, self.random = unit, random

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, so that torch does not import Dynamo to protect ``__torch_dispatch__`` from it, which takes two seconds."""
        return False

    def rounds(self, func: Any, found: Tensor) -> bool:
        """Whether ``func`` rounds this result of floating-point numbers: every elementwise operation does."""
        return torch.Tag.pointwise in func.tags

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return found
        return tuple(self._rounded(func, t) for t in found) if isinstance(found, tuple) else self._rounded(func, found)

    def _rounded(self, func: Any, found: Any) -> Any:
        if not (isinstance(found, Tensor) and found.is_floating_point() and self.rounds(func, found)):
            return found
        return _normal(found, self.random).mul_(self.unit).add_(1).mul_(found)


def _normal(like: Tensor, random: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that a budget does not depend on the device, and in float32: float64 takes over twice as long."""
    return torch.randn(like.shape, generator=random, dtype=torch.float32, device="cpu").to(like)


class _Sum:
    """Variance of a sum of independent errors, with the sums for its dof: (sum of contributions)^2 / sum of squares."""

    def __init__(self, like: Tensor):
        self.variance, self.shared = torch.zeros_like(like), torch.zeros_like(like)
        self.first, self.second = (like.new_zeros(like.shape[:-1]) for _ in range(2))

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
    dropout: Dropout | None = None,
    captured: Sequence[Tensor] = (),
    has_captured: bool = True,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Noises:
    """The rounding noise of every result of one call; arguments as in ``oracle.gradients`` (k_descale, v_descale: as in
    ``oracle.attention``), in the dtype that is judged.

    has_captured: False leaves out the noise of captured tensors' gradients.
    """
    wide = _upcast(q, _times(k, k_descale), _times(v, v_descale), sink)
    call = _Call(*wide, *_upcast_mods(score, mask), _scale(q, scale), dropout)
    slots: list[int | None] = list(range(len(captured)))
    if isinstance(call.score, TracedMod):
        floats = [t.is_floating_point() for t in call.score.tensors]
        tensors = tuple(t.clone().requires_grad_() if f else t for t, f in zip(call.score.tensors, floats))
        call = call._replace(score=dataclasses.replace(call.score, tensors=tensors))
        captured = [t for t, f in zip(tensors, floats) if f]
        slots = [sum(floats[:i]) if f else None for i, f in enumerate(floats)]
    if not has_captured:
        captured, slots = (), []
    work = _Work(call, q.dtype, captured)
    for b, h in _chunks(call):
        work.add(b, h, None if dout is None else dout[b, h].double(), None if dlse is None else dlse[b, h].double())
    return work.result(dout is not None, slots)


def later(*args: Any, **named: Any) -> Later:
    """``rounding`` of these arguments, computed when it is needed."""
    return Later(torch.enable_grad()(lambda has_captured: rounding(*args, **named, has_captured=has_captured)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Forward:
    """The forward pass of some heads of one batch entry: values in float64 and the variances of their rounding errors."""

    q: Tensor  # (heads, Sq, D)
    k: Tensor  # (heads, Sk, D)
    v: Tensor  # (heads, Sk, Dv)
    slope: Tensor | None  # (heads, Sq, Sk), derivative of the score mod by the score; None for 1 everywhere
    pull: _Pull | None  # maps a gradient by the modified scores to those of the captured tensors
    p: Tensor  # (heads, Sq, Sk), probabilities
    p2: Tensor  # their squares
    kept: Tensor | float  # (heads, Sq, Sk), what dropout multiplies them by
    p_sink: Tensor | None  # (heads, Sq)
    score2: Tensor  # (heads, Sq, Sk), variance of the modified scores
    row2: Tensor  # (heads, Sq, 1), relative variance of a row's sum, its LSE's rounding included
    tied2: float  # relative variance of the errors that all keys share because their scores are equal
    out: Tensor  # (heads, Sq, Dv)
    out2: Tensor  # (heads, Sq, Dv)


class _Work:
    """Sums of variances over heads and batch entries; u2 is the variance unit of a stored value, w2 that of an accumulated one, quantum2
    the variance that storing adds to any value."""

    def __init__(self, call: _Call, dtype: torch.dtype, captured: Sequence[Tensor]):
        self.wide, info = torch.promote_types(dtype, torch.float32), torch.finfo(dtype)
        # in float64 the oracle errs as much as the judged result, and same_dtype errs like the oracle: only the noise is left as a measure
        oracles_own = 3.0 if dtype is torch.float64 else 1.0
        self.u2, self.w2 = ((oracles_own * torch.finfo(d).eps / 2) ** 2 for d in (dtype, self.wide))
        self.quantum2 = (info.tiny * info.eps / 2) ** 2
        clean = [torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (call.q, call.k, call.v)]
        self.call, self.captured = call._replace(q=clean[0], k=clean[1], v=clean[2]), captured
        self.out, self.dq = _Sum(call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])), _Sum(call.q)
        self.dk, self.dv = _Sum(call.k), _Sum(call.v)
        self.lse2, self.lse = (call.q.new_zeros(call.q.shape[:3]) for _ in range(2))
        self.dsink2 = None if call.sink is None else torch.zeros_like(call.sink)
        self.captured2 = [torch.zeros_like(t) for t in captured]
        self.random = torch.Generator().manual_seed(0)

    def add(self, b: int, h: Tensor, dout: Tensor | None, dlse: Tensor | None) -> None:
        forward = self._forward(b, h)
        if dout is not None:
            self._gradients(b, h, forward, dout, dlse)

    def _forward(self, b: int, h: Tensor) -> _Forward:
        call, u2, w2 = self.call, self.u2, self.w2
        kv = self._kv_heads(h)
        q, k, v = call.q[b, h], call.k[b, kv], call.v[b, kv]
        visible = _visible(call, b, h)
        product = q @ k.mT * call.scale
        terms = _depth(q.shape[-1]) * (q.square() @ k.square().mT) * call.scale**2
        modified, slope, pull = self._modified(product, visible, b, h)
        scores = torch.where(visible, modified, -math.inf)
        seen = torch.isfinite(scores)
        before = w2 * terms + u2 * product.square()
        if slope is not None:
            before = slope.square() * before
        score2 = torch.where(seen, before + (u2 + w2) * torch.where(seen, modified, 0.0).square(), 0.0)
        p, lse, p_sink = _softmax(scores, None if call.sink is None else call.sink[h][:, None])
        p2, v2, kept = p.square(), v.square(), _dropped(call, torch.ones_like(p), b, h) if call.dropout else 1.0
        out = (p * kept) @ v
        row2 = (p2 * (score2 + u2)).sum(-1, keepdim=True)
        # sum of p^2 score2 (kept v - out)^2, then p's own rounding and the accumulation of the products
        moved = p2 * score2
        out2 = (moved * kept**2) @ v2 - 2 * ((moved * kept) @ v) * out + moved.sum(-1, keepdim=True) * out.square()
        out2 = out2.clamp_min(0) + (u2 + w2 * _depth(k.shape[1])) * ((p2 * kept**2) @ v2) + self.quantum2
        # equal scores give equal probabilities with equal errors: at worst those of a whole row, or of a whole column
        is_tied = product.numel() > 0 and bool((product == product[..., :1, :1]).all())
        tied2 = float(score2.max()) + u2 if is_tied else 0.0
        shared = ((u2 if is_tied else 0.0) + w2 * _length(k.shape[1])) * out.square()
        _accumulate(self.out, b, h, out2, (moved + u2 * p2) * kept**2, shared)
        self.lse2[b, h] = torch.where(lse == -math.inf, 0.0, row2[..., 0] + w2 * (lse.square() + _length(k.shape[1])))
        self.lse[b, h] = lse
        row2 = row2 + w2 * torch.where(lse == -math.inf, 0.0, lse).square()[..., None]
        return _Forward(q, k, v, slope, pull, p, p2, kept, p_sink, score2, row2, tied2, out, out2 + shared)

    def _gradients(self, b: int, h: Tensor, f: _Forward, dout: Tensor, dlse: Tensor | None) -> None:
        u2, w2, scale2, kv = self.u2, self.w2, self.call.scale**2, self._kv_heads(h)
        seqlen_q, seqlen_k, deep = f.p.shape[1], f.p.shape[2], _depth(f.v.shape[-1])
        p2, dout2, out_sq = f.p2, dout.square(), f.out.square()
        relative2 = f.score2 + f.row2 + u2  # of a recomputed probability
        weights = p2 * f.kept**2 * (relative2 + w2 * _depth(seqlen_q))
        # heads with equal queries have equal errors: their sum in dk and dv multiplies one error
        alike = self._equal_heads(b)
        variance = weights.mT @ dout2
        shared = (f.tied2 + w2 * _length(seqlen_q)) * ((f.p * f.kept).mT @ dout).square() + alike * variance
        _accumulate(self.dv, b, kv, variance, weights.mT, shared)
        dp, delta = dout @ f.v.mT * f.kept, (dout * f.out).sum(-1, keepdim=True)
        # a stored dP is off by u dP; delta = sum of p dP, of the same dP, moves along: by all of it where a row sees one key
        p_dp2 = (p2 * dp.square()).sum(-1, keepdim=True)
        moved2 = dp.square() if self.call.dropout else ((1 - 2 * f.p) * dp.square() + p_dp2).clamp_min(0)
        dp2 = w2 * deep * (dout2 @ f.v.square().mT) * f.kept**2 + u2 * moved2
        of_out2 = u2 * out_sq + f.out2
        if seqlen_k and not self.call.dropout:  # a row that sees one key has a row of V, which is exact
            of_out2 = of_out2.masked_fill(f.p.amax(-1, keepdim=True) == 1, 0.0)
        delta2 = (dout2 * (of_out2 + w2 * deep * out_sq)).sum(-1, keepdim=True) + w2 * delta.square()
        net = dp - delta if dlse is None else dp - delta + dlse[..., None]
        own = p2 * (net.square() * (relative2 + 2 * u2) + dp2)  # of dS without delta's error, which a row shares
        ds = f.p * net
        common = f.p
        if f.slope is not None:
            if self.captured:
                self._captured(f, ds, relative2 + 2 * u2, dp2, delta2)
            # a derivative such as 1 - tanh^2 is a difference of numbers near 1 or near the largest derivative, however small the result
            bent2 = 4 * w2 * max(1.0, float(f.slope.abs().max())) ** 2
            common, ds = f.p * f.slope, ds * f.slope
            own = own * f.slope.square() + bent2 * (p2 * net.square())
        common2, ds2 = common.square(), ds.square()
        rows = own + w2 * _depth(seqlen_k) * ds2
        shared = delta2 * (common @ f.k).square() + w2 * _length(seqlen_k) * (ds @ f.k).square()
        _accumulate(self.dq, b, h, scale2 * (rows @ f.k.square()), rows, scale2 * shared)
        columns = (own + delta2 * common2 + w2 * _depth(seqlen_q) * ds2).mT
        shared = w2 * _length(seqlen_q) * (ds.mT @ f.q).square()
        if seqlen_k:
            sees_one = 1 - f.p.amax(-1, keepdim=True) <= math.sqrt(u2)
            unseen2 = torch.where(sees_one, (dp2 + delta2) * common2, 0.0) if sees_one.any() else None
            shared = shared if unseen2 is None else shared + unseen2.mT @ f.q.square()
        variance = columns @ f.q.square()
        _accumulate(self.dk, b, kv, scale2 * variance, columns, scale2 * (shared + alike * variance))
        if f.p_sink is not None and self.call.sink is not None and self.dsink2 is not None:
            net_sink = delta[..., 0] if dlse is None else delta[..., 0] - dlse
            relative = f.row2[..., 0] + u2 * (2 + self.call.sink[h][:, None].square())
            self.dsink2[h] += (f.p_sink.square() * (net_sink.square() * relative + delta2[..., 0])).sum(-1) + self.quantum2

    def _captured(self, f: _Forward, ds: Tensor, relative2: Tensor, dp2: Tensor, delta2: Tensor) -> None:
        """The variance of the captured tensors' gradients, from samples of dS: only the mod's derivative is known.

        Equal probabilities in a row have equal errors, with relative variance relative2, and a row has one error of delta.
        """
        assert f.pull is not None
        size, unit, equal = ds[0].numel(), math.sqrt(self.w2), _equal_in_rows(f.p)
        of_p, of_dp, of_delta = ds * relative2.sqrt(), f.p * dp2.sqrt(), f.p * delta2.sqrt()
        of_sum = ds * math.sqrt(self.w2 * _depth(size))
        exact = f.pull(ds)
        for _ in range(DRAWS):
            each, tied, row, summed = (_normal(t, self.random) for t in (ds, ds, delta2, ds))
            error = of_dp * each + of_p * tied.gather(-1, equal) + of_delta * row + of_sum * summed
            drawn = f.pull(ds + error, Rounded(unit, self.random))
            for total, part, right in zip(self.captured2, drawn, exact):
                if part is not None and right is not None:
                    total += (part - right).square() / DRAWS
        for total, part in zip(self.captured2, exact):
            if part is not None:
                total += self.w2 * _length(size) * part.square()

    def _equal_heads(self, b: int) -> int:
        """The number of query heads per K/V head if their queries are equal, as those of an expanded tensor; else 0."""
        ratio = self.call.q.shape[1] // max(1, self.call.k.shape[1])
        groups = self.call.q[b].unflatten(0, (-1, max(1, ratio))) if ratio > 1 else None
        return ratio if groups is not None and bool((groups == groups[:, :1]).all()) else 0

    def _kv_heads(self, h: Tensor) -> Tensor:
        return h // (self.call.q.shape[1] // max(1, self.call.k.shape[1]))

    def _modified(self, product: Tensor, visible: Tensor, b: int, h: Tensor) -> tuple[Tensor, Tensor | None, _Pull | None]:
        """The mod's value, its derivative by the score (None for 1), and a function that maps a gradient to the captured tensors."""
        mod = self.call.score
        if mod is None or product.numel() == 0:
            return product, None, None
        at = visible.nonzero(as_tuple=True)
        score = product[at].requires_grad_()

        def computed() -> Tensor:
            value = _apply(mod, score, torch.full_like(at[0], b), h[at[0]], at[1], at[2])
            return value.to(score.dtype).expand(score.shape)

        value, slope = computed(), torch.zeros_like(score)
        if value.requires_grad:
            (found,) = torch.autograd.grad(value, score, torch.ones_like(value), retain_graph=True, allow_unused=True)
            slope = slope if found is None else torch.nan_to_num(found, 0.0, 0.0, 0.0)

        def pull(d: Tensor, within: contextlib.AbstractContextManager = _AS_IT_IS) -> Sequence[Tensor | None]:
            if not value.requires_grad:
                return [None] * len(self.captured)
            with within:
                return torch.autograd.grad(computed(), self.captured, d[at], allow_unused=True)

        dense = torch.zeros_like(product)
        return dense.index_put(at, value.detach()), dense.index_put(at, slope), pull

    def result(self, backward: bool, slots: list[int | None]) -> Noises:
        # a row of lse is all queries of a head: its number of independent errors is its number of distinct values
        effective = self.lse2.sum(-1, keepdim=True).square() / _by_value(self.lse2, self.lse.to(self.wide)).clamp_min(1e-300)
        lse = Noise(self.lse2.sqrt(), (self.lse2 / effective.clamp_min(1.0)).sqrt())
        if not backward:
            return Noises(self.out.noise(), lse, None, None, None, None, ())
        dsink = None if self.dsink2 is None else _single(self.dsink2)
        captured = tuple(None if slot is None else _single(self.captured2[slot]) for slot in slots)
        return Noises(self.out.noise(), lse, self.dq.noise(), self.dk.noise(), self.dv.noise(), dsink, captured)


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    logits = scores if sink is None else torch.cat([scores, sink[..., None].expand(-1, scores.shape[1], 1)], -1)
    if not logits.shape[-1]:
        return scores, scores.new_zeros(scores.shape[:-1]), None
    empty = logits.amax(-1, keepdim=True) == -math.inf
    p = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, logits), -1))
    lse = torch.logsumexp(torch.where(empty, 0.0, logits), -1).masked_fill(empty[..., 0], -math.inf)
    return (p, lse, None) if sink is None else (p[..., :-1], lse, p[..., -1])


def _by_value(weights: Tensor, values: Tensor) -> Tensor:
    """(..., 1): for each row the sum of the squared total weights of its distinct values."""
    rows, found = values.flatten(0, -2), weights.new_zeros(weights.shape[:-1]).flatten()
    for i, (row, weight) in enumerate(zip(rows, weights.flatten(0, -2))):
        which = row.unique(return_inverse=True)[1]
        found[i] = weight.new_zeros(row.numel()).index_add_(0, which, weight).square().sum()
    return found.reshape(weights.shape[:-1])[..., None]


def _equal_in_rows(x: Tensor) -> Tensor:
    """For each element a number below the row's length that identifies its value within the row."""
    ordered, places = x.sort(-1)
    is_next = torch.nn.functional.pad((ordered[..., 1:] != ordered[..., :-1]).to(torch.int64), (1, 0))
    return torch.empty_like(places).scatter_(-1, places, is_next.cumsum(-1))


def _single(variance: Tensor) -> Noise:
    return Noise(variance.sqrt(), variance.sqrt())


def _accumulate(total: _Sum, b: int, h: Tensor, variance: Tensor, contributions: Tensor, shared: Tensor) -> None:
    """contributions: (heads, rows, terms), the variances whose sum is a row's, up to the row's common factor."""
    parts = (variance, contributions.sum(-1), contributions.square().sum(-1), shared)
    for whole, part in zip((total.variance, total.first, total.second, total.shared), parts):
        whole[b].index_add_(0, h, part)


def _depth(n: int) -> float:
    """Growth of the rounding error of a random walk: n products summed one after the other, in blocks of at most 512."""
    return max(1.0, min(n, 512) / 6)


def _length(n: int) -> float:
    """The growth if partial sums grow steadily: then all rounding errors may have one sign."""
    return max(1.0, (min(n, 512) / 6) ** 2)
