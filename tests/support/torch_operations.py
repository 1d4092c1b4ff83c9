"""Mods with torch's activations, with rows of captured tensors, and from other libraries, each with its captured tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

B, H, M, N = 2, 4, 41, 53


class UnderVmap:
    """A mod on single numbers that answers on tensors of positions as well, by ``torch.vmap``: what flex_attention in torch means by it."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        if not any(isinstance(a, torch.Tensor) and a.ndim for a in args):
            return self.fn(*args)
        whole = torch.broadcast_tensors(*(torch.as_tensor(a) for a in args))
        return torch.vmap(self.fn)(*(t.reshape(-1) for t in whole)).reshape(whole[0].shape)


class Mods(NamedTuple):
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captured: tuple[torch.Tensor, ...] = ()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- activations


def _with_gain(f: Callable[..., Any]) -> Callable[[], Mods]:
    """``f`` of the score, and of a learned number of each head."""

    def make() -> Mods:
        gain = randn(H, seed=3) * 0.3 + 1
        return Mods(lambda s, b, h, i, j: f(s * gain[h]) + gain[h] * 0.1, None, (gain,))

    return make


ACTIVATIONS = {
    "silu": _with_gain(F.silu),
    "gelu": _with_gain(F.gelu),
    "gelu_tanh": _with_gain(lambda x: F.gelu(x, approximate="tanh")),
    "softplus": _with_gain(lambda x: F.softplus(x, beta=1.5, threshold=4.0)),
    "logsigmoid": _with_gain(F.logsigmoid),
    "mish": _with_gain(F.mish),
    "elu_and_leaky": _with_gain(lambda x: F.elu(x, 0.8) - F.leaky_relu(x, 0.2)),
    "hard": _with_gain(lambda x: F.hardtanh(x, -0.7, 0.9) + F.hardsigmoid(x) + F.relu6(x)),
    "softsign": _with_gain(F.softsign),
    "atan_tan": _with_gain(lambda x: 3 * torch.atan(x) + torch.tan(torch.tanh(x))),
    "sinh_cosh": _with_gain(lambda x: torch.sinh(x * 0.5) - torch.cosh(x * 0.4)),
    "erfinv": _with_gain(lambda x: torch.erfinv(0.9 * torch.tanh(x))),
    "atan2_hypot": _with_gain(lambda x: torch.atan2(x, x * x + 0.5) + torch.hypot(x, x + 1)),
    "logaddexp_lerp": _with_gain(lambda x: torch.logaddexp(x, -x) + torch.lerp(x, x * x, 0.3) + torch.addcmul(x, x, x, value=0.1)),
    "frac_round": _with_gain(lambda x: x + torch.frac(x * 2) * 0.1 + torch.round(x, decimals=1)),
    "logit_xlogy": _with_gain(lambda x: torch.logit(torch.sigmoid(x) * 0.9 + 0.05) + torch.special.xlogy(x, x * x + 0.5)),
    "detach": _with_gain(lambda x: x * torch.tanh(x).detach() + 0.1 * torch.exp(x.detach()) - 0.2 * x.detach() * x),
    "powers": _with_gain(lambda x: x + 0.1 * 2**x),
    "nan_to_num": _with_gain(lambda x: torch.nan_to_num(torch.log(x), -3.0) + torch.where(torch.isnan(torch.sqrt(x)), x, 0.0)),
}


def _detached() -> Mods:
    """Captured tensors read with and without a gradient, and the score beside itself."""
    gain, bias, still = randn(H, seed=3) * 0.3 + 1, randn(H, N, seed=4), randn(M, seed=5)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        scaled = s * gain[h].detach() + 0.3 * torch.tanh(s.detach() * gain[h])
        return scaled + bias[h, j].detach() * bias[h, j] + still[i].detach() * still[i]

    return Mods(score, lambda b, h, i, j: (i + 20).detach() >= j, (gain, bias, still))


ACTIVATIONS["detached_tables"] = _detached


# ---- rows


def _learned(make: Callable[..., Callable[..., Any]], *shapes: tuple[int, ...]) -> Callable[[], Mods]:
    def made() -> Mods:
        captured = tuple(randn(*shape, seed=i) * 0.5 for i, shape in enumerate(shapes))
        return Mods(UnderVmap(make(*captured)), None, captured)

    return made


def _listed(width: int, mask: Callable[..., Any]) -> Callable[[], Mods]:
    def made() -> Mods:
        ids = torch.randint(0, N, (M, width), generator=torch.Generator().manual_seed(width))
        return Mods(None, UnderVmap(lambda b, h, i, j: mask(ids, i, j)))

    return made


ROWS = {
    "rope_dot": _learned(
        lambda qr, kr: lambda s, b, h, i, j: s + 0.3 * torch.dot(qr[b, h, i], kr[b, h // 2, j]), (B, H, M, 6), (B, H // 2, N, 6)
    ),
    "distance": _learned(lambda x, y: lambda s, b, h, i, j: s - 0.2 * (x[i] - y[j]).pow(2).sum(-1), (M, 5), (N, 5)),
    "euclid": _learned(lambda x, y: lambda s, b, h, i, j: s - (x[i] - y[j]).norm(dim=-1), (M, 3), (N, 3)),
    "weights": _learned(lambda x, w: lambda s, b, h, i, j: s + (w[h] * torch.tanh(x[i] * s)).mean(-1), (M, 4), (H, 4)),
    "pairs": _learned(lambda x: lambda s, b, h, i, j: s + x[i, j].sum(-1) * x[i, j].amax(), (M, N, 3)),
    "keys": _learned(lambda y, w: lambda s, b, h, i, j: s + y[j] @ w, (N, 4), (4,)),
    "neighbours": _listed(9, lambda ids, i, j: (ids[i] == j[..., None]).any(-1)),
    "strangers": _listed(7, lambda ids, i, j: (ids[i] != j).all(-1)),
    "counts": _listed(5, lambda ids, i, j: ((ids[i] - j).abs() < 9).sum(-1) >= 2),
}


# ---- those of other libraries


def _alibi() -> Mods:
    return Mods(lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H)))


def _tanh_softcap() -> Mods:
    cap = 2.5
    return Mods(lambda s, b, h, i, j: cap * torch.tanh(s / cap), lambda b, h, i, j: i >= j)


def _rope_of_latents() -> Mods:
    """What a latent attention adds to its compressed scores: the product of the rotated parts, whose keys all heads share."""
    q_rope, k_rope = randn(B, H, M, 8) * 0.4, randn(B, 1, N, 8, seed=1) * 0.4
    scale = 0.35
    score = UnderVmap(lambda s, b, h, i, j: s + (q_rope[b, h, i] * k_rope[b, 0, j]).sum() * scale)
    return Mods(score, lambda b, h, i, j: i + N - M >= j, (q_rope, k_rope))


def _activation() -> Mods:
    return Mods(lambda s, b, h, i, j: F.silu(s) + torch.sigmoid(s) * F.softplus(s), lambda b, h, i, j: i >= j)


def _document() -> Mods:
    ids = torch.arange(max(M, N)) // 13
    return Mods(None, lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))


def _neighbourhood() -> Mods:
    """Windows on a canvas that keep their size at its edges."""
    width, reach = 8, 2
    last = (N - 1) // width - reach

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        x, y = (i % width).clamp(reach, width - 1 - reach), (i // width).clamp(reach, last)
        return ((x - j % width).abs() <= reach) & ((y - j // width).abs() <= reach)

    return Mods(None, mask)


def _prefix() -> Mods:
    lengths = torch.tensor([5, 19])
    return Mods(None, lambda b, h, i, j: (j < lengths[b]) | (i >= j))


def _window() -> Mods:
    size = 11
    return Mods(None, lambda b, h, i, j: (i >= j) & (i - j <= size))


def _tiles() -> Mods:
    """Windows of whole tiles on a canvas of three dimensions."""
    canvas, tile, window = (4, 4, 4), (2, 2, 2), (1, 1, 3)

    def place(n: Any) -> tuple[Any, ...]:
        n = n.clamp(max=63)
        return n // 16 // tile[0], n // 4 % canvas[1] // tile[1], n % canvas[2] // tile[2]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = i >= 0
        for a, c, w, n, t in zip(place(i), place(j), window, canvas, tile, strict=True):
            middle = torch.clamp(a, min=w // 2, max=(n // t - 1) - w // 2) if n // t > w else a
            seen = seen & ((middle - c).abs() <= w // 2)
        return seen

    return Mods(None, mask)


def _dilated() -> Mods:
    return Mods(None, lambda b, h, i, j: ((i - j).abs() <= 12) & ((i - j) % 3 == 0))


def _interleaved() -> Mods:
    """Text that sees the last image before it, and what comes before the first image nothing."""
    image = torch.arange(M) // 9 - 1

    return Mods(None, lambda b, h, i, j: (image[i] == j // 13) & (image[i] >= 0))


def _inverse_causal() -> Mods:
    return Mods(None, lambda b, h, i, j: i <= j)


OTHERS = {
    "alibi": _alibi,
    "softcap_tanh": _tanh_softcap,
    "latent_rope": _rope_of_latents,
    "activation": _activation,
    "document": _document,
    "neighbourhood_2d": _neighbourhood,
    "prefix_lm": _prefix,
    "sliding_window": _window,
    "sliding_tiles_3d": _tiles,
    "dilated_window": _dilated,
    "interleaved_images": _interleaved,
    "inverse_causal": _inverse_causal,
}
EVERY = {**ACTIVATIONS, **ROWS, **OTHERS}
