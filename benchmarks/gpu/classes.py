"""Cases of whole classes of shapes, a group for each: several lengths, batches and heads are timed, so that no single one is tuned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyattn.testing.harness.case import Case, Shape

__all__ = ["BIASES", "CLASSES", "gpu_case"]

_FLASH = ("cudnn", "fa3", "fa4")  # of the FlashAttention-3 builds the one without pages
_FLEX = ("flex-triton", "flex-flash")
BIASES = (*_FLEX, "sdpa-bias")
_OTHER = "anyattn-triton"  # our own other backend


def gpu_case(group: str, kind: str, variant: str, shape: Shape, peers: tuple[str, ...] = (), **more: Any) -> Case:
    """A case in bfloat16 on a GPU."""
    return Case(group, kind, variant, shape, peers, **{"device": "cuda", "dtype": "" if kind == "mask" else "bfloat16", **more})


def _case(group: str, kind: str, variant: str, shape: Shape, peers: tuple[str, ...]) -> Case:
    return gpu_case(group, kind, variant, shape, peers, is_backward=group.endswith("-backward"), names_shape=True)


def _few_heads() -> list[Case]:
    """32 query heads and few K/V heads, in small batches."""
    sizes = [(1, 1, 1024), (1, 1, 2048), (1, 1, 8192), (1, 2, 2048), (2, 2, 4096), (1, 4, 1024), (1, 4, 16_384), (4, 4, 1024), (1, 8, 2048)]
    sizes += [(2, 8, 8192), (4, 1, 4096)]
    shapes = [Shape(b, 32, heads, s, s, d) for d in (64, 128) for b, heads, s in sizes]
    return [_case("few-heads-backward", "flash", variant, shape, ("fa4",)) for shape in shapes for variant in ("causal", "full")]


def _head_dims() -> list[Case]:
    sizes = [(8, 16, 1024, "full"), (2, 16, 4096, "full"), (2, 16, 4096, "causal"), (16, 16, 729, "full")]
    shapes = [(Shape.square(s, h, d, b), variant) for d in (72, 80, 88, 104, 112, 120) for b, h, s, variant in sizes]
    of_forward = [_case("head-dims", "flash", variant, shape, _FLASH) for shape, variant in shapes]
    return of_forward + [replace(c, group="head-dims-backward", peers=("cudnn", "fa4"), is_backward=True) for c in of_forward]


def _short() -> list[Case]:
    """Ragged short sequences and many heads: vision transformers."""
    sizes = [(64, 16, 197), (32, 16, 577), (16, 16, 1025), (128, 12, 257)]
    shapes = [Shape.square(s, h, d, b) for d in (64, 128) for b, h, s in sizes]
    return [_case("short-backward", "flash", "full", shape, ("cudnn", "fa4")) for shape in shapes]


def _tables() -> list[Case]:
    """A bias for each head and pair that all batch entries share (proteins), and one read from a table by a pair's place (windows)."""
    pairs = [Shape.square(s, h, 32, b) for b, h, s in ((1, 8, 512), (1, 4, 1024), (64, 8, 256), (128, 4, 384))]
    windows = [Shape.square(s, h, 32, b) for b, h, s in ((1024, 4, 49), (256, 8, 64), (64, 16, 49))]
    cases = [(variant, shape) for variant, shapes in (("shared_pair_bias", pairs), ("window_bias", windows)) for shape in shapes]
    of_forward = [_case("tables", "flex", variant, shape, (_OTHER, *BIASES)) for variant, shape in cases]
    of_backward = [replace(c, group="tables-backward", is_backward=True) for c in of_forward]
    learning = [replace(c, group="tables-learned-backward", learns=True) for c in of_backward]
    return of_forward + of_backward + learning


def _video() -> list[Case]:
    shapes = [Shape.square(8192, 8, 64), Shape.square(16_384, 8, 128)]
    of_forward = [_case("video", "flex", "neighbourhood_3d", shape, (_OTHER, *_FLEX)) for shape in shapes]
    return of_forward + [replace(c, group="video-backward", is_backward=True) for c in of_forward]


def _chosen_blocks() -> list[Case]:
    """64 key blocks of 64 for each head and block of 64 rows: long videos, a tenth of the blocks and one in 27."""
    shapes = [Shape.square(40_768, 16, 128), Shape.square(109_632, 7, 128)]
    of_forward = [_case("chosen-blocks", "flex", "chosen_blocks", shape, (_OTHER, "cudnn-blocks")) for shape in shapes]
    return of_forward + [replace(c, group="chosen-blocks-backward", is_backward=True) for c in of_forward]


def _cross() -> list[Case]:
    shapes = [Shape(b, h, h, s, keys, d) for b, h, s, keys, d in ((4, 16, 4096, 77, 64), (2, 16, 4096, 128, 128), (8, 16, 1024, 64, 64))]
    return [_case("cross", "flash", "full", shape, (_OTHER, *_FLASH)) for shape in shapes]


def _wide_heads() -> list[Case]:
    """Head dimension 512, of prefill, training and decoding, and 576 with 512 for v, of latent attention; each also with values that are
    the first columns of keys."""
    shape, found = Shape(1, 8, 4, 8192, 8192, 512), []
    for variant, peers in (("causal", ("sdpa", "ffpa-attn")), ("sliding_window", ("sdpa-mask",))):
        of_forward = gpu_case("wide-heads", "flash", variant, shape, (*peers, "anyattn-one-kv"), names_shape=True)
        found += [of_forward, replace(of_forward, group="wide-heads-backward", is_backward=True)]
    for heads, dim in ((16, 512), (128, 512), (16, 576), (128, 576)):
        of_cache = Shape(32, heads, 1, 1, 8192, dim, 512)
        peers = ("copy", "anyattn-paged-64", "anyattn-one-kv", "flash-mla", *(["matrix-product"] if heads == 128 else []))
        found.append(gpu_case("wide-heads-decode", "decode", "causal", of_cache, peers, names_shape=True))
    return found


def _every_batch() -> list[Case]:
    """``deterministic="batch"`` beside the default: prefill, the backward pass of training, decoding."""
    found, mode = [], ("anyattn-batch",)
    for dim in (64, 128, 256):
        of_forward = gpu_case("every-batch", "flash", "causal", Shape(1, 32, 8, 8192, 8192, dim), mode, names_shape=True)
        found += [of_forward, replace(of_forward, group="every-batch-backward", is_backward=True)]
    for heads, length, dim in ((16, 4096, 64), (8, 2048, 128), (4, 4096, 256)):  # about as many row tiles as multiprocessors
        shape = Shape(1, heads, heads, length, length, dim)
        found.append(gpu_case("every-batch", "flash", "causal", shape, mode, names_shape=True))
    for batch, keys in ((16, 8192), (64, 2048), (1, 131_072)):
        shape = Shape(batch, 32, 8, 1, keys, 128)
        found.append(gpu_case("every-batch-decode", "decode", "causal", shape, mode, backend="triton", names_shape=True))
    return found


CLASSES = [
    *(case for of_class in (_few_heads, _head_dims, _short, _tables, _video, _cross, _chosen_blocks) for case in of_class()),
    *_wide_heads(),
    *_every_batch(),
]
