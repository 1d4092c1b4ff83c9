"""The cases, as data: what is timed, at which sizes, and against whom."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.case import OURS, Shape

__all__ = [
    "BACKWARD",
    "CASES",
    "CAUSAL_SCORES",
    "DECODE",
    "DENSE",
    "FA2",
    "FA3",
    "FLASH_ATTENTION",
    "GRADIENTS",
    "GROUPS",
    "MASK_SIZES",
    "MASK_VARIANTS",
    "PAGED_SPLITS",
    "SCORE_VARIANTS",
    "SPLITS",
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
SPLITS = tuple(f"splits-{n}" for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
PAGED_SPLITS = tuple(f"anyattn-paged-16-splits-{n}" for n in (1, 2, 4, 8, 16, 32))
_BACKWARD_PRODUCTS = 5  # the scores again, dV, dP, dQ, dK


@dataclass(frozen=True)
class GpuCase:
    """One thing to time.

    door: which of anyattn's functions is timed: flash, varlen, flex, decode (``flash_attn_with_kvcache``), mask (``create_block_mask``) or
    host (a small call, host time only). backend: the one that anyattn's contestant insists on, None for its own choice. is_backward: what
    is timed are the gradients of q, k and v, the forward pass having been run before. learns: the score mod's tensors get one too.
    """

    group: str
    door: str
    variant: str
    shape: Shape
    peers: tuple[str, ...]
    backend: str | None = None
    is_backward: bool = False
    learns: bool = False

    @property
    def name(self) -> str:
        """What ``--only`` and bars look for."""
        shape = self.shape
        if self.door == "decode":
            return f"{self.group}/b{shape.batch}-h{shape.heads_q}-{shape.heads_kv}-s{shape.seqlen_k}"
        width = f"d{shape.head_dim}/" if self.door not in ("mask", "host") else ""
        heads = "-gqa" if shape.heads_q != shape.heads_kv and self.group != "gqa" else ""
        return f"{self.group}/{self.variant}{heads}/{width}{shape.seqlen_q}"

    @property
    def contestants(self) -> tuple[str, ...]:
        return (OURS, *self.peers)

    @property
    def products(self) -> int:
        """Matrix products per visible pair; 0 where it is not they that take the time."""
        if self.door in ("mask", "host", "decode"):
            return 0
        return _BACKWARD_PRODUCTS if self.is_backward else 2

    @property
    def bytes(self) -> int:
        """Of the keys and values that have to be read, where it is they that take the time (bfloat16)."""
        shape = self.shape
        return 2 * 2 * shape.batch * shape.seqlen_k * shape.heads_kv * shape.head_dim if self.door == "decode" else 0

    def flops(self, pairs: int) -> int:
        """Of the matrix products over ``pairs`` visible (query, key) pairs of all batch entries and heads."""
        return self.products * 2 * self.shape.head_dim * pairs


def _dense(variant: str, seqlen: int, head_dim: int) -> GpuCase:
    shape = Shape.square(seqlen, _WIDTH // head_dim, head_dim, _TOKENS // seqlen)
    return GpuCase("dense", "flash", variant, shape, ("cudnn", *FLASH_ATTENTION))


def _variant(name: str) -> GpuCase:
    peers: tuple[str, ...] = ("anyattn-mod", "anyattn-triton", *_FLEX)
    if name in MASK_VARIANTS:
        peers += ("cudnn-fe",)
    if name in ("full", "causal", "softcap", "sliding_window", "document", "document-causal"):
        peers += FLASH_ATTENTION
    if name in CAUSAL_SCORES:
        peers += ("anyattn-causal",)
    return GpuCase("variants", "flex", name, Shape.square(_SEQLEN, 16, 128, 2), peers)


def _backward(name: str, shape: Shape) -> GpuCase:
    """anyattn-auto: with the forward pass of its own choice. A deterministic one is looked at where atomic additions would pay the most."""
    peers = ("anyattn-auto", "flex-triton", *(("anyattn-deterministic",) if name == "causal" else ()))
    return GpuCase("backward", "flex", name, shape, peers, "triton", True)


def _fa2(case: GpuCase, is_backward: bool) -> GpuCase:
    group = "fa2-backward" if is_backward else "fa2"
    return replace(case, group=group, peers=("fa2",), backend="triton", is_backward=is_backward)


def _gradients(variant: str, shape: Shape) -> GpuCase:
    return GpuCase("gradients", "flex", variant, shape, ("anyattn-frozen", "anyattn-plain", "flex-triton"), "triton", True, True)


def _decode(batch: int, heads_q: int, seqlen_k: int) -> GpuCase:
    peers = ("copy", "anyattn-alibi", "anyattn-paged-64", "anyattn-paged-16", "anyattn-append", "fa3-pages", "fa3-paged-64")
    return GpuCase("decode", "decode", "causal", Shape(batch, heads_q, 8, 1, seqlen_k, 128), (*peers, *SPLITS, *PAGED_SPLITS), "triton")


_SQUARE = Shape.square(_SEQLEN, 16, 128, 2)
_GROUPED = Shape(2, 64, 8, _SEQLEN, _SEQLEN, 128)
DENSE = [_dense(v, s, d) for d in (64, 128, 256) for s in (2048, 8192, 16_384) for v in ("full", "causal")]
NATIVE = [
    GpuCase("gqa", "flash", "causal", _GROUPED, ("anyattn-triton", "flex-triton", "cudnn", *FLASH_ATTENTION)),
    GpuCase("window", "flash", "sliding_window", _SQUARE, FLASH_ATTENTION),
    *(GpuCase("varlen", "varlen", v, _SQUARE, FLASH_ATTENTION) for v in ("document", "document-causal")),
]
VARIANT_CASES = [_variant(name) for name in (*MASK_VARIANTS, *SCORE_VARIANTS)]
BACKWARD = [*(_backward(name, _SQUARE) for name in (*MASK_VARIANTS, *SCORE_VARIANTS)), _backward("causal", _GROUPED)]
FA2 = [_fa2(c, back) for back in (False, True) for c in DENSE if c.shape.head_dim <= 128 and c.shape.seqlen_q in (2048, 8192)]
DECODE = [_decode(16, 32, 8192), _decode(64, 32, 4096), _decode(1, 32, 131_072), _decode(128, 64, 2048)]
GRADIENTS = [
    *(_gradients(name, _SQUARE) for name in ("head_bias", "t5_bias")),
    *(_gradients(name, Shape.square(4096, 16, 128, 2)) for name in ("pair_bias", "bucket_bias")),
]
MASKS = [
    GpuCase("masks", "mask", v, Shape.square(s, 1, 64), ("flex-mask",)) for v in ("causal", "equal-documents-causal") for s in MASK_SIZES
]
HOST = [GpuCase("host", "host", "full", Shape.square(128, 2, 64), ("anyattn-flash", "anyattn-mods", "sdpa", "flex", *FLASH_ATTENTION))]

# the most telling first, for runs that are cut off
CASES: list[GpuCase] = [*VARIANT_CASES, *BACKWARD, *DECODE, *FA2, *GRADIENTS, *NATIVE, *DENSE, *MASKS, *HOST]
GROUPS = list(dict.fromkeys(case.group for case in CASES))


def chosen(cases: list[GpuCase], groups: tuple[str, ...] = (), only: str | None = None, who: str | None = None) -> list[GpuCase]:
    """Those of the groups (all of none) whose name the regular expression ``only`` finds something in, in the order of ``groups``.

    who: of a case's peers only those in whose name this finds something; a case that loses all of them is left out.
    """
    order = {group: place for place, group in enumerate(groups)}
    found = [c for c in cases if (not groups or c.group in groups) and (only is None or re.search(only, c.name))]
    if who is not None:
        narrowed = [replace(c, peers=tuple(p for p in c.peers if re.search(who, p))) for c in found]
        found = [c for c in narrowed if c.peers]
    return sorted(found, key=lambda case: order.get(case.group, 0))
