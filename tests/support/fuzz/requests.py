"""Random requests (``AuxRequest``) and thresholds (``skip_below``) of a random call, and their judgement against dense weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import anyattn
from anyattn import AuxRequest, BackendError, oracle
from anyattn.arithmetic import ceil_div
from anyattn.testing import budget
from anyattn.testing.rounding import Later, Noise, Rounded, later
from tests.support import poison
from tests.support.reductions import blocks, judged, listed

__all__ = ["Operands", "Request", "Threshold", "judge_request", "judge_threshold", "requests", "thresholds"]

Block = tuple[int, int]
_DRAWS = 16


class Operands(NamedTuple):
    """A call. mask: what it means to the oracle; the library's call has it, or a block mask, among ``options``."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Callable | None
    mask: Callable | None
    sink: Tensor | None
    options: dict[str, Any]

    def call(self, request: AuxRequest, **more: Any) -> tuple[Tensor, Any]:
        mask = {} if "block_mask" in self.options else {"mask_mod": self.mask}
        with poison.enabled():
            return anyattn.flex_attention(
                self.q, self.k, self.v, self.score, enable_gqa=True, sink=self.sink, return_aux=request, **mask, **self.options, **more
            )  # type: ignore[no-any-return]  # fmt: skip

    @property
    def meaning(self) -> dict[str, Any]:
        return {"score": self.score, "mask": self.mask, "sink": self.sink}


@dataclass(frozen=True)
class Request:
    """One random request; its repr is all that is needed to repeat it. of: the heads of the listed indices, k of each block of queries."""

    key_sums: bool
    last: int | None
    key_block: int | None
    sum_block: Block | None
    max_block: Block | None
    list_block: Block | None
    of: str
    k: int
    seed: int

    def made(self, q: Tensor, k: Tensor) -> AuxRequest | None:
        """None if it asks for nothing. Listed indices are repeated, negative and beyond the keys too."""
        listed_sums = None
        if self.list_block is not None:
            heads = {"query heads": q.shape[1], "K/V heads": k.shape[1], "all heads": 1}[self.of]
            count, g = ceil_div(k.shape[2], self.list_block[1]), torch.Generator().manual_seed(self.seed)
            shape = (q.shape[0], heads, ceil_div(q.shape[2], self.list_block[0]), self.k)
            indices = torch.randint(-2, count + 2, shape, generator=g, dtype=torch.int32 if self.seed % 2 else torch.int64)
            listed_sums = (indices.to(q.device), self.list_block)
        sums = self.sum_block if self.key_block is None else self.key_block
        last = self.last if self.key_sums or self.key_block is not None else None
        request = AuxRequest(True, True, self.key_sums, sums, self.max_block, listed_sums, last)
        return None if request[2:6] == (False, None, None, None) else request


@dataclass(frozen=True)
class Threshold:
    """A random threshold of a call: for all heads, or with ``by_head`` a tensor of it and 0 for every other head."""

    below: float
    by_head: bool
    asks: bool

    def made(self, heads: int, device: torch.device) -> float | Tensor:
        if not self.by_head:
            return self.below
        return self.below * (torch.arange(heads, device=device) % 2 == 0).float()


def judge_request(call: Operands, request: Request) -> None:
    """Every reduction against the dense weights; output, lse and greatest scores are the bits of the call without reductions.

    Triton may refuse a block of which it would have to store many parts.
    """
    asked = request.made(call.q, call.k)
    if asked is None:
        return
    out, plain = call.call(AuxRequest(lse=True, max_scores=True))
    try:
        reduced_out, aux = call.call(asked)
    except BackendError as error:
        assert "has no large common divisor with the tiles" in str(error), error
        return
    assert torch.equal(reduced_out, out) and torch.equal(aux.lse, plain.lse) and torch.equal(aux.max_scores, plain.max_scores)
    weights = tuple(f(call.q, call.k, **call.meaning) for f in (oracle.weights, oracle.same_dtype_weights))
    whole, last = call.q.shape[2], request.last or call.q.shape[2]
    drawn = functools.cache(lambda: [_drawn(call, seed) for seed in range(_DRAWS)])
    if request.key_sums:
        judged("key_sums", aux.key_sums, weights, lambda w: w.probabilities[:, :, max(0, whole - last) :].sum(2), drawn)
    if request.key_block is not None:
        one = (max(whole, 1), request.key_block)
        judged(
            "block_sums",
            aux.block_sums,
            weights,
            lambda w: blocks(w.probabilities[:, :, max(0, whole - last) :], one, "sum").sum(2),
            drawn,
            one[1],
        )
    elif (sum_block := request.sum_block) is not None:
        judged("block_sums", aux.block_sums, weights, lambda w: blocks(w.probabilities, sum_block, "sum"), drawn, sum_block[1])
    if (max_block := request.max_block) is not None:
        judged("block_max", aux.block_max, weights, lambda w: blocks(w.scores, max_block, "max"), drawn)
    if asked.listed_sums is not None:
        indices, block = asked.listed_sums
        of_blocks = lambda w: listed(blocks(w.probabilities, block, "sum").cpu(), indices.cpu()).to(call.q.device)
        judged("listed_sums", aux.listed_sums, weights, of_blocks, drawn, block[1])


def _drawn(call: Operands, seed: int) -> oracle.Weights:
    """The weights with other roundings of every operation, the mods' too."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    with Rounded(torch.finfo(wide).eps / 2, torch.Generator().manual_seed(seed)):
        return oracle.weights(call.q, call.k, **call.meaning)


def judge_threshold(call: Operands, threshold: Threshold) -> None:
    """Heads of which nothing is skipped are exact; of the others a row loses at most n t exp(max - lse) of its weight, n being its number
    of visible keys. Greatest scores are those of the call without a threshold, reruns have the same bits."""
    heads = call.q.shape[1]
    below = threshold.made(heads, call.q.device)
    request = AuxRequest(lse=True, max_scores=True, skipped=True)
    (out, aux), (again, of_again) = (call.call(request, skip_below=below) for _ in range(2))
    assert torch.equal(out, again) and torch.equal(aux.lse, of_again.lse) and torch.equal(aux.skipped, of_again.skipped)
    assert aux.skipped.shape == call.q.shape[:2] and bool(((aux.skipped >= 0) & (aux.skipped <= 1)).all())
    if threshold.by_head or threshold.below == 0:
        of_none = aux.skipped if threshold.below == 0 else aux.skipped[:, 1::2]
        assert not of_none.any(), "a tile is skipped by a threshold of 0"
    if not threshold.asks:
        is_none = threshold.below == 0 and not threshold.by_head  # then it is the call without the argument
        unasked = call.call(AuxRequest(lse=True), **({} if is_none else {"skip_below": below}))[0]
        assert torch.equal(call.call(AuxRequest(lse=True), skip_below=below)[0], unasked)
        assert is_none or torch.equal(unasked, out)
    qkv = (call.q, call.k.expand(call.q.shape[0], -1, -1, -1), call.v.expand(call.q.shape[0], -1, -1, -1))
    exact, plain = (f(*qkv, **call.meaning) for f in (oracle.attention, oracle.same_dtype))
    noise = later(*qkv, **call.meaning)
    assert not bool(((aux.skipped == 1) & ~exact.max_scores.isneginf().all(-1)).any()), "a head that sees a key skips all tiles"
    whole = (aux.skipped == 0)[..., None]  # of these, every result is the exact one
    for name, got in (("out", out), ("lse", aux.lse)):
        want, unit = getattr(exact, name), getattr(plain, name)
        cell = whole[..., None] if name == "out" else whole
        budget.check(
            f"{name} of heads that skip nothing",
            torch.where(cell, got, want.to(got.dtype)),
            want,
            torch.where(cell, unit, want.to(unit.dtype)),
            noise.of(name),
        )
    if out.numel():
        _judge_lost(call, torch.as_tensor(below, device=call.q.device), out, aux.lse, (exact, plain), noise)


def _judge_lost(
    call: Operands, below: Tensor, out: Tensor, lse: Tensor, references: tuple[oracle.Oracle, oracle.Oracle], noise: Later
) -> None:
    """The bound of what rows lose, beside the greatest rounding that the budget allows. references: exact, and by the plain formula."""
    exact, plain = references
    weights = oracle.weights(call.q, call.k, **call.meaning)
    sees = ~exact.max_scores.isneginf()
    assert torch.equal(lse.isneginf(), exact.lse.isneginf()) and not out[~sees].any()
    keys = (~weights.scores.isneginf()).sum(-1)
    top = torch.where(sees, exact.max_scores - torch.where(sees, exact.lse, 0.0), 0.0).exp()  # the greatest probability, never skipped
    lost = torch.minimum(keys * below.double().view(-1, 1) * top, 1 - top).clamp_min(0.0)
    gone = torch.where(sees, exact.lse - lse, 0.0)
    rounded = _rounded(exact.lse, plain.lse, noise.of("lse")())
    assert bool((gone >= -rounded).all()), f"lse exceeds the exact one by {float((-gone).max()):.3g}"
    assert bool((gone <= -torch.log1p(-lost) + rounded).all()), (
        f"lse falls short by {float((gone + torch.log1p(-lost)).max()):.3g} too much"
    )
    if call.v.numel():
        bound = 2 * call.v.double().abs().amax() * lost / (1 - lost) + _rounded(exact.out, plain.out, noise.of("out")())
        error = (out.double() - exact.out).abs().amax(-1)
        assert bool((error <= bound).all()), f"an output errs by {float((error - bound).max()):.3g} more than what is skipped explains"


def _rounded(exact: Tensor, plain: Tensor, noise: Noise) -> float:
    """The greatest error of any element that ``budget.check`` allows."""
    unit, size = (torch.where(exact.isneginf(), 0.0, t).abs().amax() for t in (plain.double() - exact, exact))
    return float(2 * unit + torch.finfo(plain.dtype).eps * size + 4 * torch.where(exact.isneginf(), 0.0, noise.sigma).abs().amax())


_size = st.sampled_from((1, 16, 32, 64, 128))
_keys = st.sampled_from((16, 32, 64, 128))
_blocks = st.one_of(st.none(), st.tuples(_size, _keys), st.tuples(st.integers(1, 40), st.integers(1, 90)))

requests = st.builds(
    Request,
    key_sums=st.booleans(),
    last=st.one_of(st.none(), st.sampled_from((1, 2, 17, 64, 1000))),
    key_block=st.one_of(st.none(), st.none(), st.sampled_from((1, 7, 16, 64, 500))),
    sum_block=_blocks,
    max_block=_blocks,
    list_block=_blocks,
    of=st.sampled_from(("query heads", "K/V heads", "all heads")),
    k=st.sampled_from((0, 1, 3, 6)),
    seed=st.integers(0, 99),
)
thresholds = st.builds(Threshold, below=st.sampled_from((0.0, 1e-3, 0.05, 0.5, 1.0)), by_head=st.booleans(), asks=st.booleans())
