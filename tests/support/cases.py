"""Test cases: inputs of three kinds, shapes, and a gallery of mods.

A ``Variant`` is a recipe: it makes its mods from captured tensors of any dtype. The library gets them in the inputs' dtype, the oracle in
float64, as plain Python functions that are not traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import masks, oracle, scores
from anyattn.testing import budget
from anyattn.testing.rounding import Noise, later

__all__ = ["CASES", "KINDS", "VARIANTS", "Case", "Expected", "Shape", "Variant", "expected", "inputs"]

KINDS = ("normal", "peaky", "coded")


class Shape(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int


def inputs(kind: str, shape: Shape, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout in (B, H, S, D), rounded to ``dtype``.

    normal: standard normal. peaky: scores four times as large. coded: zero scores, and values that encode their key, so that a lost or
    doubled key shows in rows of any length.
    """
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads_q, seqlen_q, head_dim, generator=g, dtype=torch.float64, device="cpu")
    k = torch.randn(batch, heads_kv, seqlen_k, head_dim, generator=g, dtype=torch.float64, device="cpu")
    v = torch.randn(batch, heads_kv, seqlen_k, head_dim_v, generator=g, dtype=torch.float64, device="cpu")
    dout = torch.randn(batch, heads_q, seqlen_q, head_dim_v, generator=g, dtype=torch.float64, device="cpu")
    if kind == "peaky":
        q *= 4
    elif kind == "coded":
        q.zero_()
        key, dim = torch.arange(seqlen_k, device="cpu")[:, None], torch.arange(head_dim_v, device="cpu")
        v = v * 0 + ((key * (2 * dim + 1)) % 127 / 127 - 0.5)
    elif kind != "normal":
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    q, k, v, dout = (t.to(dtype) for t in (q, k, v, dout))
    return q, k, v, dout


@dataclass(frozen=True)
class Variant:
    """One kind of attention. ``make(shape, generator)`` draws the captured tensors; ``mask`` and ``score`` build a mod from them."""

    name: str
    mask: Callable[..., Callable] | None = None
    score: Callable[..., Callable] | None = None
    make: Callable[[Shape, torch.Generator], tuple[Tensor, ...]] = lambda shape, g: ()
    has_sink: bool = False

    def mods(self, tensors: tuple[Tensor, ...], shape: Shape) -> dict[str, Any]:
        """The keyword arguments ``score`` and ``mask`` for these captured tensors."""
        return {kind: None if f is None else f(shape, *tensors) for kind, f in (("score", self.score), ("mask", self.mask))}


def _causal(shape: Shape, *_: Tensor) -> Callable:
    return lambda b, h, q, k: q >= k


def _bottom_right(shape: Shape, *_: Tensor) -> Callable:
    offset = shape.seqlen_k - shape.seqlen_q
    return lambda b, h, q, k: k - q <= offset


def _window(shape: Shape, *_: Tensor) -> Callable:
    left, right = max(1, shape.seqlen_k // 7), 3
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


def _prefix(shape: Shape, lengths: Tensor, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (k <= q) | (k < lengths[b])


def _documents(shape: Shape, ids: Tensor, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


def _sink_window(shape: Shape, *_: Tensor) -> Callable:
    first, left = 4, max(1, shape.seqlen_k // 9)
    return lambda b, h, q, k: (k <= q) & ((k < first) | (q - k < left))


def _dilated(shape: Shape, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (k <= q) & ((q - k) % 3 == h % 3)


def _left_padding(shape: Shape, pad: Tensor, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (k >= pad[b]) & (k <= q)


def _islands(shape: Shape, *_: Tensor) -> Callable:
    """Hides all keys from whole rows, and whole tiles."""
    third = max(1, shape.seqlen_q // 3)
    return lambda b, h, q, k: (q // third == 1) & ((k % 5 != 2) | (h == 0))


def _block_diffusion(shape: Shape, *_: Tensor) -> Callable:
    return masks.block_diffusion(max(1, shape.seqlen_k // 2), 13)


def _neighborhood(shape: Shape, *_: Tensor) -> Callable:
    return masks.neighborhood_3d((-(-max(shape.seqlen_k, 1) // 42), 6, 7), (3, 4, 5))


def _sliding_tiles(shape: Shape, *_: Tensor) -> Callable:
    return masks.sliding_tiles((2 * -(-max(shape.seqlen_k, 1) // 96), 6, 8), (2, 3, 4), (3, 1, 2))


def _draw_ids(shape: Shape, g: torch.Generator) -> tuple[Tensor, ...]:
    longest = max(shape.seqlen_q, shape.seqlen_k, 1)
    cuts = torch.rand(shape.batch, longest, generator=g, device="cpu") < 6 / longest
    return (cuts.long().cumsum(1),)


def _draw_lengths(shape: Shape, g: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, max(1, shape.seqlen_k), (max(1, shape.batch),), generator=g, device="cpu"),)


def _normal(*dims: Callable[[Shape], int]) -> Callable[[Shape, torch.Generator], tuple[Tensor, ...]]:
    return lambda shape, g: (torch.randn([d(shape) for d in dims], generator=g, dtype=torch.float64, device="cpu"),)


def _heads(s: Shape) -> int:
    return s.heads_q


def _alibi(shape: Shape, slopes: Tensor, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: s - slopes[h] * abs(q - k)


def _relative(shape: Shape, table: Tensor, *_: Tensor) -> Callable:
    far = table.shape[1] // 2
    return lambda s, b, h, q, k: s + table[h, torch.clamp(q - k, -far, far) + far]


def _t5(shape: Shape, table: Tensor, *_: Tensor) -> Callable:
    def bucketed(s, b, h, q, k):
        distance = torch.abs(q - k)
        large = 8 + (torch.log(torch.clamp(distance, min=1) / 8.0) / math.log(16.0) * 8).to(torch.int64)
        return s + table[torch.where(distance < 8, distance, torch.clamp(large, max=15)), h]

    return bucketed


def _head_bias(shape: Shape, bias: Tensor, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: s + bias[h] * torch.where(k % 2 == 0, 1.0, -0.5)


def _pair_bias(shape: Shape, bias: Tensor, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: s + bias[0, h, q, k]


def _softcap(shape: Shape, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)


def _temperature(shape: Shape, t: Tensor, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: s * torch.exp(t * 0.1)


def _gated(shape: Shape, gate: Tensor, *_: Tensor) -> Callable:
    """Multiplies by and adds captured values that are indexed by q and by kv."""
    n = gate.shape[1]
    return lambda s, b, h, q, k: torch.sigmoid(gate[h, q % n]) * s + gate[h, k % n] * gate[h, (q + k) % n]


def _forget_gate(shape: Shape, cumulative: Tensor, *_: Tensor) -> Callable:
    return scores.forget_gate(cumulative)


def _disentangled(shape: Shape, c2p: Tensor, p2c: Tensor, *_: Tensor) -> Callable:
    return scores.disentangled(c2p, p2c, max_distance=20)


def _draw_gates(shape: Shape, g: torch.Generator) -> tuple[Tensor, ...]:
    longest = max(shape.seqlen_q, shape.seqlen_k)
    return (-torch.rand(shape.batch, shape.heads_q, longest, generator=g, dtype=torch.float64, device="cpu").cumsum(-1),)


def _draw_tables(shape: Shape, g: torch.Generator) -> tuple[Tensor, ...]:
    lead = (shape.batch, shape.heads_q)
    return tuple(torch.randn(*lead, n, 12, generator=g, dtype=torch.float64, device="cpu") for n in (shape.seqlen_q, shape.seqlen_k))


VARIANTS = {
    v.name: v
    for v in (
        Variant("full"),
        Variant("causal", _causal),
        Variant("bottom_right", _bottom_right),
        Variant("window", _window),
        Variant("prefix", _prefix, make=_draw_lengths),
        Variant("documents", _documents, make=_draw_ids),
        Variant("sink_window", _sink_window),
        Variant("dilated", _dilated),
        Variant("left_padding", _left_padding, make=_draw_lengths),
        Variant("islands", _islands),
        Variant("sink", _causal, has_sink=True),
        Variant("islands_sink", _islands, has_sink=True),
        Variant("alibi", _causal, _alibi, lambda s, g: (torch.rand(s.heads_q, generator=g, dtype=torch.float64, device="cpu"),)),
        Variant("relative", None, _relative, _normal(_heads, lambda s: 33)),
        Variant("relative_window", _window, _relative, _normal(_heads, lambda s: 33)),
        Variant("t5", _causal, _t5, _normal(lambda s: 16, _heads)),
        Variant("head_bias", _window, _head_bias, _normal(_heads)),
        Variant("pair_bias", _causal, _pair_bias, _normal(lambda s: 1, _heads, lambda s: s.seqlen_q, lambda s: s.seqlen_k)),
        Variant("softcap", _causal, _softcap),
        Variant("softcap_full", None, _softcap),
        Variant("temperature", None, _temperature, _normal()),
        Variant("gated", _causal, _gated, _normal(_heads, lambda s: 11)),
        Variant("gated_sink", _sink_window, _gated, _normal(_heads, lambda s: 11), has_sink=True),
        Variant("block_diffusion", _block_diffusion),
        Variant("neighborhood_3d", _neighborhood),
        Variant("sliding_tiles", _sliding_tiles),
        Variant("forget_gate", _causal, _forget_gate, _draw_gates),
        Variant("disentangled", None, _disentangled, _draw_tables),
    )
}


@dataclass(frozen=True)
class Case:
    """One call to judge; ``str`` gives its name in test ids."""

    variant: str
    shape: Shape
    kind: str
    seed: int = 0

    @property
    def recipe(self) -> Variant:
        return VARIANTS[self.variant]

    def __str__(self) -> str:
        s = self.shape
        return f"{self.variant}-b{s.batch}h{s.heads_q}:{s.heads_kv}s{s.seqlen_q}:{s.seqlen_k}d{s.head_dim}:{s.head_dim_v}-{self.kind}"


class Expected(NamedTuple):
    """A case's tensors in one dtype, and its expected results.

    tensors: the captured tensors in the dtype that the library gets. results: name (out, lse, dq, dk, dv, dsink, captured0, ...) -> the
    oracle's value, the plain formula's, and a function that computes the rounding noise, as ``budget.check`` takes them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    sink: Tensor | None
    tensors: tuple[Tensor, ...]
    results: dict[str, tuple[Tensor, Tensor, Callable[[], Noise | None]]]

    def check(self, got: dict[str, Tensor], label: str = "") -> None:
        """Checks every result against its budget."""
        missing = set(self.results) - set(got)
        assert not missing, f"{label}: no {', '.join(sorted(missing))}"
        for name, (fp64, plain, noise) in self.results.items():
            budget.check(f"{label} {name}", got[name], fp64, plain, noise)


def expected(
    case: Case,
    dtype: torch.dtype,
    captured_dtype: torch.dtype | None = None,
    backward: bool = True,
    with_lse: bool = True,
    device: str = "cpu",
) -> Expected:
    """Draws the case's inputs in ``dtype`` (captured tensors in at least float32 by default) and computes its expected results.

    with_lse: False for a call that does not return lse: then a backend may take another path, and lse has no gradient. device: of the
    computation and the results; random numbers are drawn on the CPU.
    """
    shape, variant = case.shape, case.recipe
    q, k, v, dout = (t.to(device) for t in inputs(case.kind, shape, dtype, case.seed))
    g = torch.Generator().manual_seed(case.seed + 1)
    wide = torch.promote_types(dtype, torch.float32)
    drawn = variant.make(shape, g)
    tensors = tuple((t.to(captured_dtype or wide) if t.is_floating_point() else t).to(device) for t in drawn)
    sink = torch.randn(shape.heads_q, generator=g, dtype=torch.float64, device="cpu").to(device, dtype) if variant.has_sink else None
    dlse = torch.randn(q.shape[:3], generator=g, dtype=torch.float64, device="cpu").to(device, wide) if with_lse else None

    def call(precision: torch.dtype) -> dict[str, Any]:
        leaves = tuple(oracle._leaf(t, precision) if t.is_floating_point() else t for t in tensors)
        return {**variant.mods(leaves, shape), "sink": sink, "captured": [t for t in leaves if t.is_floating_point()]}

    exact, plain = call(torch.float64), call(wide)
    results: dict[str, tuple[Tensor, Tensor, Callable[[], Noise | None]]] = {}
    without = ({n: a for n, a in c.items() if n != "captured"} for c in (exact, plain))
    forward, by_hand = (f(q, k, v, **a) for f, a in zip((oracle.attention, oracle.same_dtype), without))
    noise = later(q, k, v, dout if backward else None, dlse=dlse if backward else None, **exact)
    results["out"] = (forward.out, by_hand.out, noise.of("out"))
    if with_lse:
        results["lse"] = (forward.lse, by_hand.lse, noise.of("lse"))
    if backward:
        true, hand = (f(q, k, v, dout, dlse=dlse, **a) for f, a in ((oracle.gradients, exact), (oracle.same_dtype_gradients, plain)))
        for name in ("dq", "dk", "dv", "dsink"):
            if getattr(true, name) is not None:
                results[name] = (getattr(true, name), getattr(hand, name), noise.of(name))
        for i, (a, b) in enumerate(zip(true.captured, hand.captured)):
            results[f"captured{i}"] = (a, b.to(captured_dtype or wide), noise.of_captured(i))
    return Expected(q, k, v, dout, dlse, sink, tensors, results)


def _cases() -> tuple[Case, ...]:
    """Every variant on small ragged shapes in turn, and a third of all at S >= 2,048; the kinds of input alternate."""
    small = (
        Shape(2, 4, 2, 67, 67, 16, 16),
        Shape(1, 3, 1, 129, 200, 40, 24),
        Shape(2, 2, 2, 300, 257, 20, 64),
        Shape(1, 6, 2, 64, 128, 64, 64),
    )
    large = (Shape(1, 1, 1, 2048, 2048, 32, 32), Shape(1, 2, 1, 515, 2049, 64, 48), Shape(1, 1, 1, 2111, 2111, 24, 24))
    square = {"documents"}  # ids index both q and kv
    found = []
    for i, name in enumerate(VARIANTS):
        for j in range(2):
            shape = small[(i + 2 * j + i // 4) % len(small)]
            found.append(Case(name, _squared(shape) if name in square else shape, KINDS[(i + j) % 3], seed=2 * i + j))
        shape = large[i % len(large)]
        found.append(Case(name, _squared(shape) if name in square else shape, KINDS[(i + 2) % 3], seed=100 + i))
    return tuple(found)


def _squared(shape: Shape) -> Shape:
    return shape._replace(seqlen_q=shape.seqlen_k)


CASES = _cases()
