"""Oracle: reference attention in float64, from the definition; every backend is compared with it.

Its only code in common with the library is ``mods/analysis/evaluate.py``, and not even that for a mod that is a plain function: the
function is called on broadcast index tensors. Everything is dense, so the cost is S x S, a few heads at a time.

``attention`` and ``gradients`` compute in float64 on the inputs as they are (already rounded to their dtype); ``same_dtype`` and
``same_dtype_gradients`` are the plain formula in the inputs' own dtype, whose error is the unit of ``anyattn.testing.budget``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.dropout import Dropout
from anyattn.mods.tracing.trace import TracedMod

__all__ = [
    "Gradients",
    "Oracle",
    "Weights",
    "attention",
    "gradients",
    "same_dtype",
    "same_dtype_gradients",
    "same_dtype_weights",
    "weights",
]

Mod = TracedMod | Callable[..., Tensor]
_CHUNK = 1 << 22  # scores computed at once: 32 MiB of float64 per intermediate


class Oracle(NamedTuple):
    """Results of the forward: ``out`` (B, H, Sq, Dv); ``lse`` and ``max_scores`` (B, H, Sq), natural log.

    ``lse`` includes the sink; ``max_scores`` (the greatest visible score after the mods) does not. In a row without visible keys both are
    -inf, except that ``lse`` is the sink's logit if there is a sink.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor


class Gradients(NamedTuple):
    """Gradients of ``sum(out * dout) + sum(lse * dlse)``; ``captured``: one per float tensor that the score mod captured, in order."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    captured: tuple[Tensor | None, ...]


class Weights(NamedTuple):
    """The softmax before dropout, dense (B, H, Sq, Sk). ``scores``: after the mods, -inf where hidden. ``probabilities``: 0 there, and in
    rows without visible keys; a row's sum is below 1 where there is a sink."""

    scores: Tensor
    probabilities: Tensor


class _Call(NamedTuple):
    """One call: the mods, and the tensors in the dtype of the computation."""

    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hkv, Sk, D)
    v: Tensor  # (B, Hkv, Sk, Dv)
    sink: Tensor | None  # (Hq,)
    score: Mod | None
    mask: Mod | None
    scale: float
    dropout: Dropout | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: Mod | None = None,
    mask: Mod | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Oracle:
    """softmax(mask(score(scale * Q K^T)) [, sink]) V in float64.

    q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), any float dtype; Hq a multiple of Hkv. score, mask: a ``TracedMod`` (the score
    traced with ``score_dtype=torch.float64``) or a function of broadcast index tensors. sink: (Hq,) logits. dropout: of the weights
    (``mods.dropout.dropout_of``). k and v may have 8 bits; k_descale, v_descale: their factors, which broadcast to (B, Hkv, Sk). Returns
    float64 results.

    A row without visible keys gives 0; the value at a masked position, NaN included, changes nothing.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> attention(q, q, q, mask=lambda b, h, i, j: j < i).lse[0, 0].tolist()
    [-inf, 2.0]
    """
    with torch.no_grad():
        wide = _upcast(q, _times(k, k_descale), _times(v, v_descale), sink)
        return _run(_Call(*wide, *_upcast_mods(score, mask), _scale(q, scale), dropout), _definition)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    dlse: Tensor | None = None,
    score: Mod | None = None,
    mask: Mod | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    captured: Sequence[Tensor] = (),
) -> Gradients:
    """Gradients of ``attention`` in float64, for the incoming gradients ``dout`` of out and ``dlse`` of LSE.

    captured: for a score mod that is a plain function, the float64 tensors that it captured and whose gradients are wanted; for a
    ``TracedMod`` its own captured float tensors are used instead (None in the place of captured integers).
    """
    call = _Call(*_upcast(q, k, v, sink), *_upcast_mods(score, mask), _scale(q, scale), dropout)
    return _backward(call, dout.double(), None if dlse is None else dlse.double(), captured, _definition)


def same_dtype(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: Mod | None = None,
    mask: Mod | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Oracle:
    """The plain formula, every step rounded to q's dtype (mods and LSE at least float32): the accuracy of careful code written by hand.
    8-bit k and v times their factors are rounded too."""
    with torch.no_grad():
        k, v = (_times(t, descale).to(q.dtype) for t, descale in ((k, k_descale), (v, v_descale)))
        return _run(_Call(q, k, v, sink, score, mask, _scale(q, scale), dropout), _by_hand)


def same_dtype_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    dlse: Tensor | None = None,
    score: Mod | None = None,
    mask: Mod | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    captured: Sequence[Tensor] = (),
) -> Gradients:
    """Autograd's gradients of ``same_dtype``; arguments as in ``gradients``, captured tensors at least float32."""
    call = _Call(q.detach(), k.detach(), v.detach(), None if sink is None else sink.detach(), score, mask, _scale(q, scale), dropout)
    return _backward(call, dout, dlse, captured, _by_hand)


def weights(
    q: Tensor, k: Tensor, *, score: Mod | None = None, mask: Mod | None = None, scale: float | None = None, sink: Tensor | None = None
) -> Weights:
    """``Weights`` in float64; arguments as in ``attention``.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> weights(q, q, mask=lambda b, h, i, j: j < i).probabilities.sum(2).tolist()
    [[[1.0, 0.0]]]
    """
    with torch.no_grad():
        return _weights(_Call(*_upcast(q, k, k, sink), *_upcast_mods(score, mask), _scale(q, scale)), _exact_weights)


def same_dtype_weights(
    q: Tensor, k: Tensor, *, score: Mod | None = None, mask: Mod | None = None, scale: float | None = None, sink: Tensor | None = None
) -> Weights:
    """exp(score - lse) of ``same_dtype``'s scores and log-sum-exp, with their rounding."""
    with torch.no_grad():
        return _weights(_Call(q, k, k, sink, score, mask, _scale(q, scale)), _rounded_weights)


# ---- the two formulas, on some heads of one batch entry


def _exact_weights(call: _Call, b: int, h: Tensor) -> Weights:
    scores = _scores(call, b, h, _visible(call, b, h))
    lse = _definition(call, b, h).lse[..., None]
    return Weights(scores, torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)))


def _rounded_weights(call: _Call, b: int, h: Tensor) -> Weights:
    scores, lse = _rounded_scores(call, b, h, _visible(call, b, h)), _by_hand(call, b, h).lse[..., None]
    return Weights(scores, torch.exp(scores.to(lse.dtype) - torch.where(lse == -math.inf, 0.0, lse)))


def _definition(call: _Call, b: int, h: Tensor) -> Oracle:
    """The definition, unaffected by the values at masked positions."""
    v = _of_heads(call, call.v, b, h)
    visible = _visible(call, b, h)  # (heads, Sq, Sk)
    scores = _scores(call, b, h, visible)
    row_max = _row_max(scores)
    sink = None if call.sink is None else call.sink[h][:, None]  # (heads, 1)
    top = row_max if sink is None else torch.maximum(row_max, sink.detach())
    top = torch.where(top == -math.inf, 0.0, top)  # a row without visible keys
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1) + (0.0 if sink is None else torch.exp(sink - top))
    empty = total == 0
    out = _masked_product(_dropped(call, weights, b, h), v, visible, contract="kv") / torch.where(empty, 1.0, total)[..., None]
    lse = torch.where(empty, -math.inf, torch.log(torch.where(empty, 1.0, total)) + top)
    return Oracle(out, lse, row_max)


def _by_hand(call: _Call, b: int, h: Tensor) -> Oracle:
    """The same formula in a few torch calls, as a user would write it, with their rounding."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    visible = _visible(call, b, h)
    scores = _rounded_scores(call, b, h, visible)
    logits = scores
    if call.sink is not None:
        logits = torch.cat([scores, call.sink[h].to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    empty = _row_max(logits) == -math.inf
    weights = torch.softmax(torch.where(empty[..., None], 0.0, logits), dim=-1)[..., : scores.shape[-1]]
    out = torch.matmul(_dropped(call, torch.where(visible & ~empty[..., None], weights, 0.0), b, h), _of_heads(call, call.v, b, h))
    lse = torch.logsumexp(torch.where(empty[..., None], 0.0, logits).to(wide), dim=-1)
    return Oracle(out, torch.where(empty, -math.inf, lse), _row_max(scores).to(wide))


def _of_heads(call: _Call, x: Tensor, b: int, h: Tensor) -> Tensor:
    """The keys or values of query heads ``h``."""
    return x[b, h // (call.q.shape[1] // max(1, x.shape[1]))]


def _scores(call: _Call, b: int, h: Tensor, visible: Tensor) -> Tensor:
    product = _masked_product(call.q[b, h], _of_heads(call, call.k, b, h).transpose(-1, -2), visible, contract="d")
    return _modified(call, product * call.scale, visible, b, h)


def _rounded_scores(call: _Call, b: int, h: Tensor, visible: Tensor) -> Tensor:
    product = torch.matmul(call.q[b, h], _of_heads(call, call.k, b, h).transpose(-1, -2)) * call.scale
    return _modified(call, product.to(torch.promote_types(call.q.dtype, torch.float32)), visible, b, h).to(call.q.dtype)


def _dropped(call: _Call, weights: Tensor, b: int, h: Tensor) -> Tensor:
    """The weights (heads, Sq, Sk) after dropout."""
    if call.dropout is None:
        return weights
    return torch.where(_apply(call.dropout.keep, *_indices(call, b, h)), weights / (1.0 - call.dropout.p), 0.0)


def _row_max(scores: Tensor) -> Tensor:
    scores = scores.detach()
    return scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)


def _indices(call: _Call, b: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = call.q.device
    return (
        torch.tensor(b, device=device).reshape(1, 1, 1),
        h[:, None, None],
        torch.arange(call.q.shape[2], device=device)[:, None],
        torch.arange(call.k.shape[2], device=device),
    )


def _visible(call: _Call, b: int, h: Tensor) -> Tensor:
    shape = (len(h), call.q.shape[2], call.k.shape[2])
    if call.mask is None or 0 in shape:
        return torch.ones(shape, dtype=torch.bool, device=call.q.device)
    return _apply(call.mask, *_indices(call, b, h)).expand(shape)


def _modified(call: _Call, scores: Tensor, visible: Tensor, b: int, h: Tensor) -> Tensor:
    """The score mod's value where visible, -inf elsewhere. The mod is evaluated at visible positions only: an infinite value or derivative
    at a masked position would become NaN."""
    if call.score is None or scores.numel() == 0:
        return torch.where(visible, scores, -math.inf)
    if call.mask is None:
        return _apply(call.score, scores, *_indices(call, b, h)).expand(scores.shape)
    at = visible.nonzero(as_tuple=True)
    value = _apply(call.score, scores[at], torch.full_like(at[0], b), h[at[0]], at[1], at[2])
    return torch.full_like(scores, -math.inf).index_put(at, value.to(scores.dtype).expand(at[0].shape))


def _apply(mod: Mod, *args: Tensor) -> Tensor:
    if not isinstance(mod, TracedMod):
        value = mod(*args)
        return value if isinstance(value, Tensor) else torch.as_tensor(value, device=args[0].device)
    score, indices = (args[0], args[1:]) if mod.kind == "score" else (None, args)
    b, h, q_idx, kv_idx = indices
    return evaluate(mod, b, h, q_idx, kv_idx, score)


def _masked_product(a: Tensor, b: Tensor, visible: Tensor, contract: str) -> Tensor:
    """a @ b over the (q, kv) pairs in ``visible``: NaN at a pair that is not visible does not spread (0 * NaN is NaN)."""
    if (torch.isfinite(a).all() and torch.isfinite(b).all()) or not visible.numel():
        return a @ b
    if contract == "d":  # (heads, Sq, D) @ (heads, D, Sk)
        pairs = (torch.where(visible[..., None], t, 0.0) for t in (a[:, :, None, :], b.transpose(-1, -2)[:, None]))
        return torch.mul(*pairs).sum(-1)
    return (torch.where(visible, a, 0.0)[..., None] * torch.where(visible[..., None], b[:, None], 0.0)).sum(-2)


# ---- all heads of all batch entries


def _chunks(call: _Call) -> Iterator[tuple[int, Tensor]]:
    heads = call.q.shape[1]
    group = max(1, _CHUNK // max(1, call.q.shape[2] * call.k.shape[2]))
    for b in range(call.q.shape[0]):
        for start in range(0, heads, group):
            yield b, torch.arange(start, min(heads, start + group), device=call.q.device)


def _weights(call: _Call, formula: Callable[[_Call, int, Tensor], Weights]) -> Weights:
    shape = (*call.q.shape[:3], call.k.shape[2])
    result = Weights(*(call.q.new_zeros(shape, dtype=torch.promote_types(call.q.dtype, torch.float32)) for _ in Weights._fields))
    for b, h in _chunks(call):
        for whole, part in zip(result, formula(call, b, h), strict=True):
            whole[b, h] = part.to(whole.dtype)
    return result


def _run(call: _Call, formula: Callable[[_Call, int, Tensor], Oracle]) -> Oracle:
    batch, heads, seqlen_q, _ = call.q.shape
    wide = torch.promote_types(call.q.dtype, torch.float32)
    rows = (batch, heads, seqlen_q)
    result = Oracle(call.q.new_zeros((*rows, call.v.shape[3])), call.q.new_zeros(rows, dtype=wide), call.q.new_zeros(rows, dtype=wide))
    for b, h in _chunks(call):
        for whole, part in zip(result, formula(call, b, h)):
            whole[b, h] = part
    return result


def _backward(
    call: _Call, dout: Tensor, dlse: Tensor | None, captured: Sequence[Tensor], formula: Callable[[_Call, int, Tensor], Oracle]
) -> Gradients:
    wide = torch.promote_types(call.q.dtype, torch.float32)
    slots: list[int | None] = list(range(len(captured)))
    if isinstance(call.score, TracedMod):
        tensors = tuple(_leaf(t, wide) if t.is_floating_point() else t for t in call.score.tensors)
        call = call._replace(score=dataclasses.replace(call.score, tensors=tensors))
        captured = [t for t in tensors if t.is_floating_point()]
        order = iter(range(len(captured)))
        slots = [next(order) if t.is_floating_point() else None for t in tensors]
    leaves = [t if t is None else t.requires_grad_() for t in (call.q, call.k, call.v, call.sink)]
    wanted = [t for t in (*leaves, *captured) if t is not None]
    grads = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, wide)) for t in wanted]
    for b, h in _chunks(call):
        result = formula(call, b, h)
        outputs, incoming = [result.out], [dout[b, h]]
        if dlse is not None:
            outputs.append(result.lse)
            # in rows without visible keys LSE is -inf, a constant
            incoming.append(torch.where(result.lse.detach() == -math.inf, 0.0, dlse[b, h].to(result.lse.dtype)))
        live = [(o, g) for o, g in zip(outputs, incoming) if o.requires_grad]
        if not live:
            continue
        parts = torch.autograd.grad([o for o, _ in live], wanted, [g for _, g in live], allow_unused=True)
        for whole, part in zip(grads, parts):
            if part is not None:
                whole += part
    found = iter([g.to(w.dtype) for g, w in zip(grads, wanted)])
    dq, dk, dv, dsink = (None if t is None else next(found) for t in leaves)
    others = list(found)
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv, dsink, tuple(None if s is None else others[s] for s in slots))


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, dtype)).clone().requires_grad_()


def _upcast(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v = (t.detach().double() for t in (q, k, v))
    return q, k, v, None if sink is None else sink.detach().double()


def _upcast_mods(score: Mod | None, mask: Mod | None) -> tuple[Mod | None, Mod | None]:
    if isinstance(score, TracedMod):
        tensors = tuple(t.detach().double() if t.is_floating_point() else t for t in score.tensors)
        score = dataclasses.replace(score, tensors=tensors)
    return score, mask


def _times(stored: Tensor, descale: Tensor | None) -> Tensor:
    return stored if descale is None else stored.double() * descale.double()[..., None]


def _scale(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
