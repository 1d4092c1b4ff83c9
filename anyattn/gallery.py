"""Gallery of attention variants, as data: the demo runs them, the benchmarks time them and the docs show them.

A variant is a function from a ``Setting`` to a pair of mods, written as a user would write it.

>>> from anyattn import gallery
>>> gallery.VARIANTS["causal"].mods(gallery.Setting(seqlen=64, heads=2)).mask
Mask(causal)
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.mods import masks, scores

__all__ = ["VARIANTS", "Mods", "Setting", "Variant"]


@dataclass(frozen=True)
class Setting:
    """Sizes that a variant's mods are built for: ``heads`` query heads over ``seqlen`` queries and keys."""

    seqlen: int
    heads: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("seqlen", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        """float32, standard normal, the same for the same seed."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(self.device)


@dataclass(frozen=True)
class Mods:
    """mask: ``(b, h, q_idx, kv_idx) -> bool``, None for no mask. score: ``(score, b, h, q_idx, kv_idx) -> score``, None for no change."""

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Variant:
    """name: for the command line. title, meaning: for people. mods: builds the pair of mods for a setting.

    is_additive: the score mod adds a bias that does not depend on the score, so that torch can do the same job with a dense bias.
    """

    name: str
    title: str
    meaning: str
    mods: Callable[[Setting], Mods]
    is_additive: bool = True

    @property
    def code(self) -> str:
        """The body of the function that makes the mods, as text."""
        lines = textwrap.dedent(inspect.getsource(self.mods)).splitlines()
        return textwrap.dedent("\n".join(lines[1:])).strip()


def _causal(setting: Setting) -> Mods:
    return Mods(masks.causal())


def _sliding_window(setting: Setting) -> Mods:
    return Mods(masks.sliding_window(left=setting.seqlen // 8, right=0))


def _document(setting: Setting) -> Mods:
    # lengths as uneven as real documents are
    ends = torch.tensor([0.0, 0.08, 0.30, 0.36, 0.60, 0.71, 1.0], device="cpu").mul(setting.seqlen).long()
    return Mods(masks.document_from_cu_seqlens(ends.to(setting.device)))


def _prefix_lm(setting: Setting) -> Mods:
    return Mods(masks.prefix_lm(setting.seqlen // 4))


def _sink_window(setting: Setting) -> Mods:
    return Mods(masks.sink_window(sink=4, window=setting.seqlen // 8))


def _block_diffusion(setting: Setting) -> Mods:
    # as many clean tokens as noisy ones
    return Mods(masks.block_diffusion(length=max(1, setting.seqlen // 2), block=32))


def _neighborhood_3d(setting: Setting) -> Mods:
    frames = -(-setting.seqlen // 64)  # of 8 x 8 tokens
    return Mods(masks.neighborhood_3d(shape=(frames, 8, 8), window=(3, 3, 3)))


def _sliding_tiles(setting: Setting) -> Mods:
    frames = 4 * -(-setting.seqlen // 512)  # of 16 x 8 tokens, in tiles of 4 x 4 x 4
    return Mods(masks.sliding_tiles(shape=(frames, 16, 8), tile=(4, 4, 4), window=(3, 3, 1)))


def _alibi(setting: Setting) -> Mods:
    slopes = scores.alibi_slopes(setting.heads).to(setting.device)
    return Mods(masks.causal(), scores.alibi(slopes))


def _t5_bias(setting: Setting) -> Mods:
    table = setting.random(32, setting.heads, seed=2)
    return Mods(None, scores.t5_bias(table, bidirectional=True, max_distance=128))


def _softcap(setting: Setting) -> Mods:
    return Mods(masks.causal(), scores.softcap(2.0))


def _head_bias(setting: Setting) -> Mods:
    return Mods(masks.causal(), scores.head_bias(setting.random(setting.heads, seed=3)))


def _forget_gate(setting: Setting) -> Mods:
    gates = setting.random(1, setting.heads, setting.seqlen, seed=4) * 2 + 3
    cumulative = torch.nn.functional.logsigmoid(gates).cumsum(-1)
    return Mods(masks.causal(), scores.forget_gate(cumulative))


def _disentangled(setting: Setting) -> Mods:
    # in a model: queries and keys times projected positions
    content, positions = setting.random(2, 1, setting.heads, setting.seqlen, 2, seed=5), setting.random(2, 64, seed=6)
    c2p, p2c = content.cumsum(-2) @ positions.cumsum(-1) / 100
    return Mods(None, scores.disentangled(c2p, p2c, max_distance=128))


def _own(setting: Setting) -> Mods:
    paragraph = max(1, setting.seqlen // 16)

    def mask(b, h, q_idx, kv_idx):
        mine, theirs = q_idx // paragraph, kv_idx // paragraph
        return (q_idx >= kv_idx) & ((mine == theirs) | (theirs % 4 == 0))

    def score(score, b, h, q_idx, kv_idx):
        return score - torch.log1p(torch.abs(q_idx - kv_idx).float())

    return Mods(mask, score)


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("causal", "Causal", "A query sees the keys up to its own place.", _causal),
        Variant("sliding_window", "Sliding window", "A query sees the keys just before it, and itself.", _sliding_window),
        Variant("document", "Document", "Sequences packed end to end; a query sees its own sequence.", _document),
        Variant("prefix_lm", "Prefix LM", "Everyone sees the prompt, the rest is causal.", _prefix_lm),
        Variant("sink_window", "Sink + window", "A sliding window that keeps the first tokens in view.", _sink_window),
        Variant("block_diffusion", "Block diffusion", "Noisy blocks see themselves and the clean blocks before them.", _block_diffusion),
        Variant("neighborhood_3d", "3-D neighborhood", "A token of a video sees a window of frames, rows, columns.", _neighborhood_3d),
        Variant("sliding_tiles", "Sliding tiles", "A tile of a video's tokens sees a window of whole tiles.", _sliding_tiles),
        Variant("alibi", "ALiBi", "Causal; scores fall with the distance, at a slope per head.", _alibi),
        Variant("t5_bias", "T5 bias", "A learned bias per bucket of distances and head.", _t5_bias),
        Variant("softcap", "Softcap", "Causal; scores are squeezed by a tanh, as in Gemma 2.", _softcap, is_additive=False),
        Variant("head_bias", "Per-head bias", "Causal; a learned number per head is added.", _head_bias),
        Variant("forget_gate", "Forget gate", "Causal; each position may fade what came before it.", _forget_gate),
        Variant("disentangled", "DeBERTa's positions", "Queries and keys have tables of relative positions.", _disentangled),
        Variant("own", "One of your own", "Own paragraph and every fourth one, near keys preferred.", _own),
    )
}
