"""The cases, as data: what is timed, at which sizes, and against whom."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.case import Shape

__all__ = [
    "CASES",
    "CAUSAL_SCORES",
    "DENSE",
    "FA3",
    "FLASH_ATTENTION",
    "GROUPS",
    "MASK_SIZES",
    "MASK_VARIANTS",
    "SCORE_VARIANTS",
    "GpuCase",
    "chosen",
]

FA3 = ("fa3", "fa3-pages")  # two builds of FlashAttention-3: one has softcap, the other windows and pages
FLASH_ATTENTION = (*FA3, "fa4")
_FLEX = ("flex-triton", "flex-flash")
_TOKENS = 32_768
_WIDTH = 2048  # heads times head dim
_SEQLEN = 8192

MASK_VARIANTS = ("full", "causal", "sliding_window", "document", "document-causal", "prefix", "sink_window")
SCORE_VARIANTS = ("alibi", "t5_bias", "softcap", "head_bias")
CAUSAL_SCORES = ("alibi", "softcap", "head_bias")
MASK_SIZES = (8192, 32_768, 131_072)


@dataclass(frozen=True)
class GpuCase:
    """door: which of anyattn's functions is timed: flash, varlen, flex, mask (create_block_mask) or host (a small call, host time only)."""

    group: str
    door: str
    variant: str
    shape: Shape
    peers: tuple[str, ...]

    @property
    def name(self) -> str:
        """What ``--only`` and bars look for."""
        width = f"d{self.shape.head_dim}/" if self.door not in ("mask", "host") else ""
        return f"{self.group}/{self.variant}/{width}{self.shape.seqlen_q}"

    @property
    def products(self) -> int:
        """Matrix products per visible pair."""
        return 0 if self.door in ("mask", "host") else 2

    def flops(self, pairs: int) -> int:
        """Of the matrix products over ``pairs`` visible (query, key) pairs of all batch entries and heads."""
        return self.products * 2 * self.shape.head_dim * pairs


def _dense(variant: str, seqlen: int, head_dim: int) -> GpuCase:
    shape = Shape.square(seqlen, _WIDTH // head_dim, head_dim, _TOKENS // seqlen)
    return GpuCase("dense", "flash", variant, shape, ("cudnn", *FLASH_ATTENTION))


def _variant(name: str) -> GpuCase:
    peers: tuple[str, ...] = ("anyattn-mod", *_FLEX)
    if name in MASK_VARIANTS:
        peers += ("cudnn-fe",)
    if name in ("full", "causal", "softcap", "sliding_window", "document", "document-causal"):
        peers += FLASH_ATTENTION
    if name in CAUSAL_SCORES:
        peers += ("anyattn-causal",)
    return GpuCase("variants", "flex", name, Shape.square(_SEQLEN, 16, 128, 2), peers)


DENSE = [_dense(v, s, d) for d in (64, 128, 256) for s in (2048, 8192, 16_384) for v in ("full", "causal")]
NATIVE = [
    GpuCase("gqa", "flash", "causal", Shape(2, 64, 8, _SEQLEN, _SEQLEN, 128), ("cudnn", *FLASH_ATTENTION)),
    GpuCase("window", "flash", "sliding_window", Shape.square(_SEQLEN, 16, 128, 2), FLASH_ATTENTION),
    *(GpuCase("varlen", "varlen", v, Shape.square(_SEQLEN, 16, 128, 2), FLASH_ATTENTION) for v in ("document", "document-causal")),
]
VARIANT_CASES = [_variant(name) for name in (*MASK_VARIANTS, *SCORE_VARIANTS)]
MASKS = [
    GpuCase("masks", "mask", v, Shape.square(s, 1, 64), ("flex-mask",)) for v in ("causal", "equal-documents-causal") for s in MASK_SIZES
]
HOST = [GpuCase("host", "host", "full", Shape.square(128, 2, 64), ("anyattn-flash", "anyattn-mods", "sdpa", "flex", *FLASH_ATTENTION))]

CASES: list[GpuCase] = [*NATIVE, *VARIANT_CASES, *DENSE, *MASKS, *HOST]
GROUPS = list(dict.fromkeys(case.group for case in CASES))


def chosen(cases: list[GpuCase], groups: tuple[str, ...] = (), only: str | None = None) -> list[GpuCase]:
    """Those of the groups (all of none) whose name the regular expression ``only`` finds something in, in the order of ``groups``."""
    order = {group: place for place, group in enumerate(groups)}
    found = [c for c in cases if (not groups or c.group in groups) and (only is None or re.search(only, c.name))]
    return sorted(found, key=lambda case: order.get(case.group, 0))
