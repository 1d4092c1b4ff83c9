"""Cases of the CPU benchmark."""

from __future__ import annotations

from dataclasses import replace

from anyattn import gallery
from anyattn.testing.harness.case import Case, Shape

__all__ = ["BUSY", "CASES", "GALLERY", "TABLES"]

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
_SMALL = Shape.square(192, 4, 16, 2)
SMALL = [
    *_each_dtype(Case("forward", "flex", "causal", _SMALL, ("sdpa", "flex"))),
    *_each_dtype(Case("backward", "flex", "causal", _SMALL, ("sdpa",), is_backward=True)),
]
WINDOW = _each_dtype(Case("window", "flex", "window-512", Shape.square(16_384), ("anyattn-full", "flex"), rounds=3))
MASKS = [
    *(Case("masks", "mask", v, Shape.square(32_768), ("flex-mask",), dtype="") for v in _MADE),
    *(Case("masks", "mask", v, Shape.square(131_072), dtype="") for v in _MADE),
]
SEQUENCES = [
    *_each_dtype(Case("sequences", "varlen", "documents", Shape.square(16_384), ("sdpa-padded", "per-document"), rounds=5)),
    *_each_dtype(Case("sequences", "decode", "decode", Shape(16, 32, 8, 1, 8192, 128), ("sdpa-gqa", "paged-128", "paged-16"))),
]


def _tables() -> list[Case]:
    """Small batches of training code whose masks read a table for each sample, and whose biases are read by pair: both passes, and both
    with the bias' gradient."""
    sizes = {
        "sample_mask": [(4, 2, 384, 32), (2, 8, 200, 64), (2, 8, 1024, 64)],
        "pair_bias": [(2, 4, 192, 16), (4, 8, 250, 32), (1, 8, 512, 64)],
        "shared_pair_bias": [(16, 4, 256, 32)],
        "two_numbers": [(2, 4, 192, 16), (4, 8, 320, 64)],
    }
    shapes = [(v, Shape.square(s, h, d, b)) for v, each in sizes.items() for b, h, s, d in each]
    peers = {v: ("flex", "sdpa-mask" if v == "sample_mask" else "sdpa-bias") for v in sizes}
    forward = [c for v, s in shapes for c in _each_dtype(Case("tables", "flex", v, s, peers[v], names_shape=True))]
    backward = [replace(c, group="tables-backward", is_backward=True, peers=c.peers[1:]) for c in forward]
    return forward + backward + [replace(c, group="tables-learned-backward", learns=True) for c in backward if c.variant != "sample_mask"]


TABLES = _tables()
# timed beside busy processes, by a probe
BUSY = [
    Case("busy", "flex", v, Shape.square(s), (peer,)) for v, peer in (("causal", "sdpa"), ("window-512", "sdpa-mask")) for s in (1024, 2048)
]

CASES: list[Case] = [*FORWARD, *BACKWARD, *SMALL, *WINDOW, *MASKS, *SEQUENCES, *TABLES]
