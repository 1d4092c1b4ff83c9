"""The cases. A GPU's cases are further rows with ``device="cuda"`` and that machine's peers."""

from __future__ import annotations

from anyattn import gallery
from benchmarks.case import Case, Shape

__all__ = ["CASES", "GALLERY"]

# each against compiled flex_attention
GALLERY = tuple(gallery.VARIANTS)
_MASKS_ONLY = ("sliding_window", "document", "prefix_lm", "sink_window")  # torch SDPA can do these with a dense bool mask
_DTYPES = ("float32", "bfloat16")


def _forward_peers(variant: str) -> tuple[str, ...]:
    if variant in ("full", "causal"):
        return ("sdpa", "flex")
    return ("flex", "sdpa-mask") if variant in _MASKS_ONLY else ("flex",)


FORWARD = [Case("forward", "forward", v, _forward_peers(v), dtype=d) for d in _DTYPES for v in ("full", *GALLERY)]
BACKWARD = [Case("backward", "backward", v, ("sdpa",), dtype=d) for d in _DTYPES for v in ("full", "causal")]
WINDOW = [Case("window", "forward", "window-512", ("anyattn-full", "flex"), Shape.square(16_384), dtype=d, rounds=3) for d in _DTYPES]
MASKS = [
    *(Case("masks", "mask", v, ("flex-mask",), Shape.square(32_768), dtype="") for v in ("causal", "document-causal")),
    *(Case("masks", "mask", v, (), Shape.square(131_072), dtype="") for v in ("causal", "document-causal")),
]

SEQUENCES = [
    *(
        Case("sequences", "documents", "documents", ("sdpa-padded", "per-document"), Shape.square(16_384), dtype=d, rounds=5)
        for d in _DTYPES
    ),
    *(
        Case("sequences", "decode", "decode", ("sdpa-gqa", "paged-128", "paged-16"), Shape(16, 32, 8, 1, 8192, 128), dtype=d)
        for d in _DTYPES
    ),
]

CASES: list[Case] = [*FORWARD, *BACKWARD, *WINDOW, *MASKS, *SEQUENCES]
