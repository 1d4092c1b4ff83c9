"""Table of the timed variants: each as plain mods, as FlashAttention's options for it, or both.

The gallery's variants come from ``anyattn.gallery``. On a GPU, variants with parameters of their own use those of the peers' published
tables instead, which do not grow with the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyattn import gallery, masks, scores
from anyattn.gallery import Mods

__all__ = ["DOCUMENTS", "VARIANTS", "WINDOW", "Setting", "Variant", "document_lengths", "spread_lengths"]

WINDOW = 1024
DOCUMENTS = 8
_PREFIX = 2048
_SINK = 64
_SOFTCAP = 30.0
_BUCKETS = 32
_EQUAL_DOCUMENT = 1000  # tokens, for masks that are only built
_NARROW = 128
_IMAGE_ROW = 128  # positions per row of an image
_NEIGHBOURS = 6  # rows and columns on each side
_FRAME = (32, 32)  # rows and columns of a frame of a video
_NEAR = (2, 6, 6)  # frames, rows and columns on each side
_STRIDE, _STRIDE_WINDOW = 64, 128
_RANDOM_BLOCK, _RANDOM_SHARE = 128, 0.1
_CHOSEN, _CHOSEN_BLOCK = 64, 64  # key blocks of each block of rows; their size
_MANY_DOCUMENTS = 256
_CPU_WINDOW = 512
_CPU_DOCUMENTS = 9


@dataclass(frozen=True)
class Setting(gallery.Setting):
    """The sizes that mods are made for. learns: the tensors that score mods read need gradients. dtype: q's, for tables that a model keeps
    in it. captured: the tensors that score mods read, once made."""

    batch: int = 1
    learns: bool = False
    dtype: torch.dtype = torch.float32
    captured: list[Tensor] = field(default_factory=list)

    def random(self, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers, the same on every call; generated where they are used, because the largest are a gigabyte."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=dtype).requires_grad_(self.learns)
        self.captured.append(made)
        return made


@dataclass(frozen=True)
class Variant:
    """make: the variant's mods for a setting. native: FlashAttention's options with the same meaning, None if there are none.

    documents: the lengths of the documents that fill a sequence, if FlashAttention computes it by its function for packed sequences.
    dense: the bias (1 or batch, heads, seqlen, seqlen) from the tensors that the score mod reads, as users of SDPA write it.
    block_size: of block masks.
    """

    make: Callable[[Setting], Mods]
    native: dict[str, Any] | None = None
    documents: Callable[[int], list[int]] | None = None
    dense: Callable[..., Tensor] | None = None
    block_size: int = 128

    def mods(self, setting: Setting) -> Mods:
        """Plain functions as users write them, the same for anyattn and its peers, without the wrapper for composition."""
        made = self.make(setting)
        return Mods(getattr(made.mask, "fn", made.mask), getattr(made.score, "fn", made.score))


def document_lengths(seqlen: int, count: int = DOCUMENTS) -> list[int]:
    """The lengths of ``count`` documents that fill a sequence, cut at random."""
    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(1), device="cpu")[: count - 1] + 1
    ends = torch.cat([torch.tensor([0], device="cpu"), cuts.sort().values, torch.tensor([seqlen], device="cpu")])
    return ends.diff().tolist()


def spread_lengths(seqlen: int, count: int = 64) -> list[int]:
    """Lengths from 12 to about 1,800, evenly spread in their logarithm and shuffled, with the sum ``seqlen``."""
    random = torch.Generator().manual_seed(0)
    spread = torch.exp(torch.linspace(2.5, 7.5, count, dtype=torch.float64, device="cpu"))[
        torch.randperm(count, generator=random, device="cpu")
    ]
    lengths = (spread / spread.sum() * seqlen).round().long().clamp(min=1)
    lengths[lengths.argmax()] += seqlen - lengths.sum()
    return lengths.tolist()


def _ids(setting: Setting, lengths: list[int]) -> Tensor:
    """The document of each position."""
    return torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), torch.tensor(lengths, device="cpu")).to(setting.device)


def _causal_documents(ids: Tensor) -> Mods:
    return Mods(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx))


def _documents(setting: Setting) -> Mods:
    return Mods(masks.document(_ids(setting, document_lengths(setting.seqlen))))


def _neighbourhood(setting: Setting) -> Mods:
    """Pixels of an image at most six rows and six columns away."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows, columns = q_idx // _IMAGE_ROW - kv_idx // _IMAGE_ROW, q_idx % _IMAGE_ROW - kv_idx % _IMAGE_ROW
        return (rows.abs() <= _NEIGHBOURS) & (columns.abs() <= _NEIGHBOURS)

    return Mods(mask)


def _neighbourhood_3d(setting: Setting) -> Mods:
    """Pixels of a video, in raster order, at most two frames, six rows and six columns away."""
    rows, columns = _FRAME

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        frames = (q_idx // (rows * columns) - kv_idx // (rows * columns)).abs()
        down = (q_idx // columns % rows - kv_idx // columns % rows).abs()
        right = (q_idx % columns - kv_idx % columns).abs()
        return (frames <= _NEAR[0]) & (down <= _NEAR[1]) & (right <= _NEAR[2])

    return Mods(mask)


def _strided(setting: Setting) -> Mods:
    """Causal: the last keys, and every 64th before them."""
    return Mods(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx < _STRIDE_WINDOW) | (kv_idx % _STRIDE == _STRIDE - 1)))


def _random_blocks(setting: Setting) -> Mods:
    """A tenth of the blocks, and those on the diagonal."""
    blocks = -(-setting.seqlen // _RANDOM_BLOCK)
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(5), device="cpu") < _RANDOM_SHARE
    table = (drawn | torch.eye(blocks, dtype=torch.bool, device="cpu")).to(setting.device)
    return Mods(lambda b, h, q_idx, kv_idx: table[q_idx // _RANDOM_BLOCK, kv_idx // _RANDOM_BLOCK])


def _chosen_blocks(setting: Setting) -> Mods:
    """Blocks of keys for each head and block of rows, in no order, as layers that learn which blocks to read choose them."""
    blocks = -(-setting.seqlen // _CHOSEN_BLOCK)
    drawn = torch.rand(setting.heads, blocks, blocks, generator=torch.Generator().manual_seed(6), device="cpu")
    table = torch.zeros_like(drawn, dtype=torch.bool).scatter_(-1, drawn.topk(min(_CHOSEN, blocks), sorted=False).indices, True)
    table = table.to(setting.device)
    return Mods(lambda b, h, q_idx, kv_idx: table[h, q_idx // _CHOSEN_BLOCK, kv_idx // _CHOSEN_BLOCK])


def _many_documents(seqlen: int) -> list[int]:
    return document_lengths(seqlen, _MANY_DOCUMENTS)


def _window_512(setting: Setting) -> Mods:
    return Mods(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < _CPU_WINDOW))


def _distance_bias(setting: Setting) -> Mods:
    table = setting.random(setting.heads, setting.seqlen)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + table[h, torch.abs(q_idx - kv_idx)])


def _pair_bias(setting: Setting) -> Mods:
    bias = setting.random(setting.batch, setting.heads, setting.seqlen, setting.seqlen, dtype=setting.dtype)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx])


def _shared_pair_bias(setting: Setting) -> Mods:
    bias = setting.random(setting.heads, setting.seqlen, setting.seqlen, dtype=setting.dtype)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])


def _distance(setting: Setting) -> Tensor:
    """(seqlen, seqlen): a number for each distance of two pixels of a square window."""
    side, place = math.isqrt(setting.seqlen), torch.arange(setting.seqlen, device=setting.device)
    down, right = (x[:, None] - x[None] + side - 1 for x in (place // side, place % side))
    return down * (2 * side - 1) + right


def _dense_window_bias(setting: Setting, table: Tensor) -> Tensor:
    return table[_distance(setting)].permute(2, 0, 1)[None].contiguous()


def _window_bias(setting: Setting) -> Mods:
    """Windows of an image, as Swin transformers have them: a number for each head and each distance of two pixels, read through a table of
    all pairs."""
    side, distance = math.isqrt(setting.seqlen), _distance(setting)
    table = setting.random((2 * side - 1) ** 2, setting.heads, dtype=setting.dtype)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + table[distance[q_idx, kv_idx], h])


def _kinds(setting: Setting) -> Tensor:
    random = torch.Generator().manual_seed(6)
    return torch.randint(0, 4, (setting.batch, setting.seqlen), generator=random, device="cpu").to(setting.device)


def _dense_two_numbers(setting: Setting, table: Tensor) -> Tensor:
    kinds, (other, same) = _kinds(setting), table[:, :, None, None]
    return torch.where((kinds[:, :, None] == kinds[:, None])[:, None], same, other)


def _two_numbers(setting: Setting) -> Mods:
    """Two numbers for each head: one is added to pairs of tokens of the same kind, the other to the rest."""
    kinds, table = _kinds(setting), setting.random(2, setting.heads, dtype=setting.dtype)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + table[(kinds[b, q_idx] == kinds[b, kv_idx]).to(torch.int32), h])


def _sample_mask(setting: Setting) -> Mods:
    """A batch of two kinds: causal text behind padding, with an image in its middle whose positions see one another; text with a prefix."""
    batch, length = setting.batch, setting.seqlen
    first, end, place = length // 4, 3 * length // 4, torch.arange(length, device=setting.device)
    padding = torch.arange(batch, device=setting.device)[:, None] * length // (4 * batch)
    is_padding, is_image = place < padding, (place >= first) & (place < end)
    starts, ends = place.masked_fill(is_image, first), place.masked_fill(is_image, end)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        text = ~is_padding[b, kv_idx] & (q_idx >= kv_idx) | (q_idx == kv_idx)
        image = (kv_idx >= starts[q_idx]) & (kv_idx < ends[q_idx])
        prefix = (q_idx >= kv_idx) | (kv_idx < length // 3)
        return ((b < batch // 2) & (text | image)) | ((b >= batch // 2) & prefix)

    return Mods(mask)


_PAIRS = {
    "pair_bias": Variant(_pair_bias, dense=lambda setting, bias: bias),
    "shared_pair_bias": Variant(_shared_pair_bias, dense=lambda setting, bias: bias[None]),
    "window_bias": Variant(_window_bias, dense=_dense_window_bias),
    "two_numbers": Variant(_two_numbers, dense=_dense_two_numbers),
}
_GALLERY = {name: Variant(variant.mods) for name, variant in gallery.VARIANTS.items()}
_BOTH = {"full": Variant(lambda setting: Mods(), {}), "causal": Variant(_GALLERY["causal"].make, {"causal": True})}

_CPU = {
    **_GALLERY,
    **_BOTH,
    "window-512": Variant(_window_512),
    "sample_mask": Variant(_sample_mask),
    **_PAIRS,
    "document-causal": Variant(lambda s: _causal_documents(_ids(s, document_lengths(s.seqlen, _CPU_DOCUMENTS)))),
    "documents": Variant(lambda s: _causal_documents(_ids(s, spread_lengths(s.seqlen))), {"causal": True}, spread_lengths),
    "decode": Variant(lambda setting: Mods(), {"causal": True}),  # one query per sequence, at the last position: causal hides nothing
}
_CUDA = {
    **_BOTH,
    "sliding_window": Variant(lambda s: Mods(masks.sliding_window(left=WINDOW, right=0)), {"window_size": (WINDOW, 0)}),
    "narrow_window": Variant(lambda s: Mods(masks.sliding_window(left=_NARROW, right=0)), {"window_size": (_NARROW, 0)}),
    "document": Variant(_documents, {}, document_lengths),
    "document-causal": Variant(lambda s: _causal_documents(_ids(s, document_lengths(s.seqlen))), {"causal": True}, document_lengths),
    "many-documents": Variant(lambda s: Mods(masks.document(_ids(s, _many_documents(s.seqlen)))), {}, _many_documents),
    "many-documents-causal": Variant(lambda s: _causal_documents(_ids(s, _many_documents(s.seqlen))), {"causal": True}, _many_documents),
    "neighbourhood": Variant(_neighbourhood),
    "strided": Variant(_strided),
    "random_blocks": Variant(_random_blocks),
    "chosen_blocks": Variant(_chosen_blocks, block_size=_CHOSEN_BLOCK),
    "prefix": Variant(lambda s: Mods(masks.prefix_lm(_PREFIX))),
    "sink_window": Variant(lambda s: Mods(masks.sink_window(sink=_SINK, window=WINDOW))),
    "alibi": _GALLERY["alibi"],
    "t5_bias": Variant(_distance_bias),
    "softcap": Variant(lambda s: Mods(masks.causal(), scores.softcap(_SOFTCAP)), {"causal": True, "softcap": _SOFTCAP}),
    "head_bias": _GALLERY["head_bias"],
    **_PAIRS,
    "neighbourhood_3d": Variant(_neighbourhood_3d),
    "bucket_bias": Variant(lambda s: Mods(None, scores.t5_bias(s.random(_BUCKETS, s.heads)))),
    "equal-documents-causal": Variant(lambda s: _causal_documents(torch.arange(s.seqlen, device=s.device) // _EQUAL_DOCUMENT)),
    "dilated": Variant(lambda s: Mods(masks.dilated(512, 3))),
}
VARIANTS: dict[str, dict[str, Variant]] = {"cpu": _CPU, "cuda": _CUDA}
