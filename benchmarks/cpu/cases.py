"""Cases of the CPU benchmark."""

from __future__ import annotations

from dataclasses import replace

from anyattn import gallery
from anyattn.testing.harness.case import Case, Shape

__all__ = ["CASES", "GALLERY"]

# each against compiled flex_attention
GALLERY = tuple(gallery.VARIANTS)
_MASKS_ONLY = ("sliding_window", "document", "prefix_lm", "sink_window")  # variants that torch SDPA can compute with a dense bool mask
_DTYPES = ("float32", "bfloat16")
_MADE = ("causal", "document-causal")


def _forward_peers(variant: str) -> tuple[str, ...]:
    if variant in ("full", "causal"):
        return ("sdpa", "flex")
    return ("flex", "sdpa-mask") if variant in _MASKS_ONLY else ("flex",)


def _each_dtype(case: Case) -> list[Case]:
    return [replace(case, dtype=dtype) for dtype in _DTYPES]


FORWARD = [Case("forward", "flex", v, peers=_forward_peers(v), dtype=d) for d in _DTYPES for v in ("full", *GALLERY)]
BACKWARD = [Case("backward", "flex", v, peers=("sdpa",), is_backward=True, dtype=d) for d in _DTYPES for v in ("full", "causal")]
WINDOW = _each_dtype(Case("window", "flex", "window-512", Shape.square(16_384), ("anyattn-full", "flex"), rounds=3))
MASKS = [
    *(Case("masks", "mask", v, Shape.square(32_768), ("flex-mask",), dtype="") for v in _MADE),
    *(Case("masks", "mask", v, Shape.square(131_072), dtype="") for v in _MADE),
]
SEQUENCES = [
    *_each_dtype(Case("sequences", "varlen", "documents", Shape.square(16_384), ("sdpa-padded", "per-document"), rounds=5)),
    *_each_dtype(Case("sequences", "decode", "decode", Shape(16, 32, 8, 1, 8192, 128), ("sdpa-gqa", "paged-128", "paged-16"))),
]

CASES: list[Case] = [*FORWARD, *BACKWARD, *WINDOW, *MASKS, *SEQUENCES]
