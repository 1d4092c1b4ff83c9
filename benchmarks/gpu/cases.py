"""Cases of the GPU benchmark: what is timed, at which sizes, and against which peers."""

from __future__ import annotations

import re
from dataclasses import replace

from anyattn.testing.harness.case import Case, Shape
from anyattn.testing.harness.decode import EIGHT_BITS, PREFILL_8_BITS
from anyattn.testing.harness.peers import PAGED_SPLITS, SPLITS
from benchmarks.gpu.classes import CLASSES, gpu_case

__all__ = [
    "BACKWARD",
    "CASES",
    "CAUSAL_SCORES",
    "DECODE",
    "DECODE_8_BITS",
    "DENSE",
    "DETERMINISTIC",
    "FA2",
    "FA3",
    "FLASH_ATTENTION",
    "GRADIENTS",
    "GROUPS",
    "MASK_SIZES",
    "MASK_VARIANTS",
    "PARTIAL",
    "PREFILL",
    "SCORE_VARIANTS",
    "TRAINING",
    "chosen",
    "gpu_case",
    "names_of",
]

FA3 = ("fa3", "fa3-pages")  # two builds of FlashAttention-3: one has softcap, the other windows and pages
FLASH_ATTENTION = (*FA3, "fa4")
_FLEX = ("flex-triton", "flex-flash")
_TOKENS = 32_768
_WIDTH = 2048  # heads times head dim
_SEQLEN = 8192

MASK_VARIANTS = ("full", "causal", "sliding_window", "document", "document-causal", "prefix", "sink_window")
SCORE_VARIANTS = ("alibi", "t5_bias", "softcap", "head_bias")
DETERMINISTIC = (
    "full",
    "causal",
    "sliding_window",
    "document",
    "alibi",
)  # variants whose backward pass is also timed with ``deterministic=True``
CAUSAL_SCORES = ("alibi", "softcap", "head_bias")
MASK_SIZES = (8192, 32_768, 131_072)
_BUILT = ("causal", "equal-documents-causal")


def _dense(variant: str, seqlen: int, head_dim: int) -> Case:
    shape = Shape.square(seqlen, _WIDTH // head_dim, head_dim, _TOKENS // seqlen)
    return gpu_case("dense", "flash", variant, shape, ("cudnn", *FLASH_ATTENTION))


def _variant(name: str) -> Case:
    peers: tuple[str, ...] = ("anyattn-mod", "anyattn-triton", *_FLEX)
    if name in MASK_VARIANTS:
        peers += ("cudnn-fe",)
    if name in ("full", "causal", "softcap", "sliding_window", "document", "document-causal"):
        peers += FLASH_ATTENTION
    if name in CAUSAL_SCORES:
        peers += ("anyattn-causal",)
    return gpu_case("variants", "flex", name, Shape.square(_SEQLEN, 16, 128, 2), peers)


def _backward(name: str, shape: Shape) -> Case:
    """anyattn-auto: with the forward pass of its own choice. Deterministic for the variant in which atomic additions gain the most."""
    peers = ("anyattn-auto", "flex-triton", *(("anyattn-deterministic",) if name == "causal" else ()))
    return gpu_case("backward", "flex", name, shape, peers, backend="triton", is_backward=True)


def _fa2(case: Case, is_backward: bool) -> Case:
    group = "fa2-backward" if is_backward else "fa2"
    return replace(case, group=group, peers=("fa2",), backend="triton", is_backward=is_backward)


def _gradients(variant: str, shape: Shape) -> Case:
    peers = ("anyattn-frozen", "anyattn-plain", "flex-triton")
    return gpu_case("gradients", "flex", variant, shape, peers, backend="triton", is_backward=True, learns=True)


def _decode(batch: int, heads_q: int, seqlen_k: int) -> Case:
    peers = ("copy", "anyattn-alibi", "anyattn-paged-64", "anyattn-paged-16", "anyattn-append", "fa3-pages", "fa3-paged-64")
    shape = Shape(batch, heads_q, 8, 1, seqlen_k, 128)
    return gpu_case("decode", "decode", "causal", shape, (*peers, *SPLITS, *PAGED_SPLITS), backend="triton")


def _decode_8_bits(batch: int, heads_q: int, seqlen_k: int, head_dim: int = 128) -> Case:
    """Beside the same calls with caches of bfloat16."""
    shape = Shape(batch, heads_q, 8, 1, seqlen_k, head_dim)
    peers = ("copy", "anyattn-alibi", "anyattn-paged-16", *EIGHT_BITS)
    return gpu_case("decode-8-bits", "decode", "causal", shape, peers, backend="triton")


def _prefill_8_bits(batch: int, seqlen_q: int, seqlen_k: int, head_dim: int = 128) -> Case:
    """Beside the same calls from pages of bfloat16, and from a contiguous cache of it."""
    shape = Shape(batch, 32, 8, seqlen_q, seqlen_k, head_dim)
    peers = ("anyattn-paged-16", "anyattn-paged-64", "anyattn-paged-16-triton", *PREFILL_8_BITS, "fa3-paged-64")
    return gpu_case("prefill-8-bits", "decode", "causal", shape, peers, names_shape=True)


_SQUARE = Shape.square(_SEQLEN, 16, 128, 2)
_GROUPED = Shape(2, 64, 8, _SEQLEN, _SEQLEN, 128)
DENSE = [_dense(v, s, d) for d in (64, 128, 256) for s in (2048, 8192, 16_384) for v in ("full", "causal")]
NATIVE = [
    gpu_case("gqa", "flash", "causal", _GROUPED, ("anyattn-triton", "flex-triton", "cudnn", *FLASH_ATTENTION)),
    gpu_case("window", "flash", "sliding_window", _SQUARE, FLASH_ATTENTION),
    *(gpu_case("varlen", "varlen", v, _SQUARE, FLASH_ATTENTION) for v in ("document", "document-causal")),
]
VARIANT_CASES = [_variant(name) for name in (*MASK_VARIANTS, *SCORE_VARIANTS)]
BACKWARD = [*(_backward(name, _SQUARE) for name in (*MASK_VARIANTS, *SCORE_VARIANTS)), _backward("causal", _GROUPED)]
FA2 = [_fa2(c, back) for back in (False, True) for c in DENSE if c.shape.head_dim <= 128 and c.shape.seqlen_q in (2048, 8192)]
DECODE = [_decode(16, 32, 8192), _decode(64, 32, 4096), _decode(1, 32, 131_072), _decode(128, 64, 2048)]
DECODE_8_BITS = [_decode_8_bits(16, 32, 32_768), _decode_8_bits(16, 32, 8192), _decode_8_bits(32, 64, 16_384, 64)]
PREFILL = [_prefill_8_bits(4, 8192, 8192), _prefill_8_bits(16, 512, 4096), _prefill_8_bits(4, 4096, 4096, 64)]
GRADIENTS = [
    *(_gradients(name, _SQUARE) for name in ("head_bias", "t5_bias")),
    *(_gradients(name, Shape.square(4096, 16, 128, 2)) for name in ("pair_bias", "bucket_bias")),
]
_TRITON_TOO = "anyattn-triton"
BESIDE_A_PRODUCT = "dense-backward/full/d128/16384"  # timed beside a product of two matrices
_PARTIAL = ("neighbourhood", "strided", "random_blocks")


def _partial(variant: str) -> Shape:
    return Shape.square(_SEQLEN, 16, 128 if variant == "random_blocks" else 64, 2)


def _training(group: str, kind: str, variant: str, shape: Shape, *peers: str) -> Case:
    """A backward pass with backends of anyattn's own choice."""
    return gpu_case(group, kind, variant, shape, (_TRITON_TOO, *peers), is_backward=True)


def _dense_backward(case: Case) -> Case:
    found = replace(case, group="dense-backward", peers=(_TRITON_TOO, "cudnn", "fa4"), is_backward=True)
    return replace(found, peers=(*found.peers, "matrix-product")) if found.name == BESIDE_A_PRODUCT else found


TRAINING = [
    *map(_dense_backward, DENSE),
    *(_training("dims-backward", "flash", "causal", Shape.square(_SEQLEN, 16, d, 2), "fa4") for d in (96, 80)),
    _training("dims-backward", "flash", "causal", replace(Shape.square(_SEQLEN, 16, 192, 2), head_dim_v=128), "fa4"),
    *(
        _training("variants-backward", "flex", v, _SQUARE, *_FLEX, "cudnn-fe", *(["anyattn-deterministic"] if v in DETERMINISTIC else []))
        for v in (*MASK_VARIANTS, *SCORE_VARIANTS)
    ),
    *(_training("native-backward", "flash", "causal", shape, "fa4") for shape in (_GROUPED, Shape(4, 32, 8, 4096, 4096, 128))),
    _training("native-backward", "flash", "causal", Shape.square(512, 16, 128, 64), "fa4"),
    _training("native-backward", "flash", "narrow_window", Shape(2, 64, 8, _SEQLEN, _SEQLEN, 64), "fa4"),
    *(_training("packed-backward", "varlen", v, _SQUARE, "fa4") for v in ("document", "document-causal")),
    _training("packed-backward", "varlen", "document-causal", Shape(2, 32, 8, _SEQLEN, _SEQLEN, 128), "fa4"),
    *(_training("packed-backward", "varlen", f"many-{v}", Shape.square(65_536, 16, 128), "fa4") for v in ("documents", "documents-causal")),
    *(_training("partial-backward", "flex", v, _partial(v), *_FLEX) for v in _PARTIAL),
    *(replace(c, group="captured-backward", peers=("anyattn-frozen", "flex-triton"), backend=None) for c in GRADIENTS),
]
PARTIAL = [gpu_case("partial", "flex", v, _partial(v), (_TRITON_TOO, *_FLEX)) for v in _PARTIAL]
MASKS = [
    *(gpu_case("masks", "mask", v, Shape.square(s, 1, 64), ("flex-mask",)) for v in _BUILT for s in MASK_SIZES),
    *(gpu_case("masks", "mask", v, Shape.square(32_768, 1, 64), ("flex-mask",)) for v in ("sliding_window", "dilated")),
]
HOST = [
    gpu_case(
        "host",
        "flex",
        "full",
        Shape.square(128, 2, 64),
        ("anyattn-flash", "anyattn-mods", "sdpa", "flex", *FLASH_ATTENTION),
        is_host_time=True,
    ),
    *(gpu_case("masks-host", "mask", v, Shape.square(8192, 1, 64), ("flex-mask",), is_host_time=True) for v in _BUILT),
]

# the most informative first, for runs that are cut off
CASES: list[Case] = [
    *VARIANT_CASES,
    *BACKWARD,
    *DECODE,
    *DECODE_8_BITS,
    *PREFILL,
    *FA2,
    *GRADIENTS,
    *TRAINING,
    *PARTIAL,
    *NATIVE,
    *DENSE,
    *MASKS,
    *HOST,
    *CLASSES,
]
GROUPS = list(dict.fromkeys(case.group for case in CASES))


def names_of(group: str) -> list[str]:
    """The names of a group's cases."""
    return [case.name for case in CASES if case.group == group]


def chosen(cases: list[Case], groups: tuple[str, ...] = (), only: str | None = None, who: str | None = None) -> list[Case]:
    """The cases of the groups (of all groups if there are none) whose name matches the regular expression ``only``, in the groups' order.

    who: keeps only those of a case's peers whose name matches; a case that loses all of them is left out.
    """
    order = {group: place for place, group in enumerate(groups)}
    found = [c for c in cases if (not groups or c.group in groups) and (only is None or re.search(only, c.name))]
    if who is not None:
        narrowed = [replace(c, peers=tuple(p for p in c.peers if re.search(who, p))) for c in found]
        found = [c for c in narrowed if c.peers]
    return sorted(found, key=lambda case: order.get(case.group, 0))
