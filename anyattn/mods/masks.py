"""Library of masks, each written once in the mod language.

Positions are logical: ``q_idx`` and ``kv_idx`` count from 0 inside their own sequences. Every function returns a ``Mask``, which composes
with ``&``, ``|`` and ``~`` and can be passed as ``mask_mod``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.algebra import Mask
from anyattn.mods.tracing.pickling import remade_by_call
from anyattn.mods.tracing.pure_names import add_pure_names

__all__ = [
    "block_diagonal",
    "block_diffusion",
    "causal",
    "causal_bottom_right",
    "chunked",
    "dilated",
    "document",
    "document_from_cu_seqlens",
    "full",
    "left_padding",
    "neighborhood_3d",
    "prefix_lm",
    "sink_window",
    "sliding_tiles",
    "sliding_window",
    "tree",
]
add_pure_names(__all__)


def _whole(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; wanted an int")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}; wanted at least {least}")
    return value


_FAR = 2**31 - 1  # greatest position, and greatest difference of two positions


def _in_sight(distance: int) -> int:
    """A distance clamped to the greatest difference of two positions; larger ones give the same comparisons."""
    return max(-_FAR, min(distance, _FAR))


def _ids(name: str, value: Any, ranks: tuple[int, ...], shape: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; wanted an integer tensor of shape {shape}")
    if value.ndim not in ranks or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise ValueError(f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}; wanted an integer tensor of shape {shape}")
    return value


@remade_by_call
def full() -> Mask:
    """Every query sees every key."""
    return Mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0, "full")


@remade_by_call
def causal(offset: int | Tensor = 0) -> Mask:
    """A query sees the keys up to its own position: ``kv_idx <= q_idx + offset``. offset 0 is the top-left aligned mask of torch.

    offset: one int, or an integer tensor (B,) with one per batch entry.

    >>> causal()
    Mask(causal)
    """
    # compares the distance with offset: q_idx + offset would wrap around where a huge offset stands for "all keys"
    if isinstance(offset, Tensor):
        places = _ids("offset", offset, (1,), "(B,)")
        return Mask(lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= places[b], "causal(offset per batch)")
    name = f"causal(offset={offset})" if _whole("offset", offset) else "causal"
    offset = _in_sight(offset)
    return Mask(lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= offset, name)


@remade_by_call
def causal_bottom_right(seqlen_q: int, seqlen_k: int) -> Mask:
    """Causal with the last query seeing the last key, FlashAttention's ``causal=True``: offset ``seqlen_k - seqlen_q``."""
    return causal(_whole("seqlen_k", seqlen_k, 0) - _whole("seqlen_q", seqlen_q, 0))


@remade_by_call
def sliding_window(left: int | None, right: int | None, offset: int | Tensor = 0) -> Mask:
    """A query at position ``p = q_idx + offset`` sees ``p - left <= kv_idx <= p + right``: left and right neighbours, and itself.

    None or -1 is no limit on that side; ``sliding_window(-1, 0)`` is causal. A number below -1 puts that edge on the other side of the
    query's own position; where left + right < 0 no key is visible. offset: one int, or an integer tensor (B,) with one per batch entry.
    Source: FlashAttention's ``window_size``.
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None:
            _whole(name, side)
    name = f"sliding_window(left={left}, right={right})"
    sides = [None if side in (None, -1) else int(side) for side in (left, right)]  # type: ignore[arg-type]
    if isinstance(offset, Tensor):
        return _window_of_places(sides[0], sides[1], _ids("offset", offset, (1,), "(B,)"), name)
    before, after = (None if side is None else side + sign * _whole("offset", offset) for side, sign in zip(sides, (-1, 1), strict=True))
    has_left, has_right = before is not None and before < _FAR, after is not None and after < _FAR
    before, after = _in_sight(before or 0), _in_sight(after or 0)
    if has_left and has_right:
        return Mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= before) & (kv_idx - q_idx <= after), name)
    if has_left:
        return Mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= before, name)
    if has_right:
        return Mask(lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= after, name)
    return Mask(full().fn, name)


def _window_of_places(left: int | None, right: int | None, places: Tensor, name: str) -> Mask:
    """``sliding_window`` with one first query position per batch entry. Sides are clamped to 2^40: positions have 31 bits, so sums with an
    offset that is not near the ends of int64 cannot overflow."""
    far = 2**40
    first, last = max(-far, min(left or 0, far)), max(-far, min(right or 0, far))
    if left is not None and right is not None:
        return Mask(lambda b, h, q_idx, kv_idx: (kv_idx - q_idx + first >= places[b]) & (kv_idx - q_idx - last <= places[b]), name)
    if left is not None:
        return Mask(lambda b, h, q_idx, kv_idx: kv_idx - q_idx + first >= places[b], name)
    if right is not None:
        return Mask(lambda b, h, q_idx, kv_idx: kv_idx - q_idx - last <= places[b], name)
    return Mask(full().fn, name)


@remade_by_call
def prefix_lm(prefix_length: int | Tensor) -> Mask:
    """Everyone sees the prefix, the rest is causal: ``kv_idx < prefix or kv_idx <= q_idx``.

    prefix_length: one int, or an integer tensor (B,) with one per batch entry. Source: T5 (arXiv:1910.10683), the prefix language model.
    """
    if isinstance(prefix_length, Tensor):
        lengths = _ids("prefix_length", prefix_length, (1,), "(B,)")
        return Mask(lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) | (q_idx >= kv_idx), "prefix_lm(per batch)")
    name = f"prefix_lm({_whole('prefix_length', prefix_length, 0)})"
    prefix_length = _in_sight(prefix_length)
    return Mask(lambda b, h, q_idx, kv_idx: (kv_idx < prefix_length) | (q_idx >= kv_idx), name)


@remade_by_call
def document(ids: Tensor) -> Mask:
    """Packed documents: a query sees the keys of its own document. ids: integers (S,), or (B, S) with a packing per batch entry.

    >>> document(torch.tensor([0, 0, 1, 1, 1]))
    Mask(document)
    """
    _ids("ids", ids, (1, 2), "(S,) or (B, S)")
    if ids.ndim == 1:
        return Mask(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], "document")
    return Mask(lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx], "document")


@remade_by_call
def document_from_cu_seqlens(cu_seqlens: Tensor) -> Mask:
    """``document`` for concatenated documents: document i holds positions ``cu_seqlens[i] <= p < cu_seqlens[i + 1]``.

    cu_seqlens: integers (documents + 1,), from 0, not falling. Raises ``ValueError`` naming the first entry that breaks this.
    """
    _ids("cu_seqlens", cu_seqlens, (1,), "(documents + 1,)")
    if torch.compiler.is_compiling():
        return document(torch.ops.anyattn.document_ids(cu_seqlens))
    return document(ids_of_documents(cu_seqlens))


def ids_of_documents(cu_seqlens: Tensor) -> Tensor:
    """The document of every position, int32 (cu_seqlens[-1],), for ``document_from_cu_seqlens``."""
    steps = cu_seqlens.diff()
    if cu_seqlens.numel() < 1 or int(cu_seqlens[0]) != 0:
        raise ValueError(f"cu_seqlens starts with {cu_seqlens[:1].tolist()}; wanted 0, then each document's end")
    if bool((steps < 0).any()):
        bad = int((steps < 0).nonzero()[0, 0]) + 1
        raise ValueError(f"cu_seqlens[{bad}]={int(cu_seqlens[bad])} is less than the entry before it; wanted non-decreasing entries")
    numbers = torch.arange(steps.numel(), dtype=torch.int32, device=cu_seqlens.device)
    return torch.repeat_interleave(numbers, steps.to(torch.int64))


@remade_by_call
def chunked(chunk: int) -> Mask:
    """Chunked causal attention (Llama 4): a query sees the keys of its own chunk of ``chunk`` positions, up to its own position."""
    name = f"chunked({_whole('chunk', chunk, 1)})"
    chunk = _in_sight(chunk)
    return Mask(lambda b, h, q_idx, kv_idx: (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx), name)


@remade_by_call
def dilated(window: int, dilation: int) -> Mask:
    """Every ``dilation``-th key of a causal window: ``window`` of them besides the query's own. Source: Longformer (arXiv:2004.05150)."""
    _whole("window", window, 0)
    name = f"dilated(window={window}, dilation={_whole('dilation', dilation, 1)})"
    reach, dilation = _in_sight(window * dilation), _in_sight(dilation)
    return Mask(
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= reach) & ((q_idx - kv_idx) % dilation == 0),
        name,
    )


@remade_by_call
def left_padding(leftpad: Tensor) -> Mask:
    """Batches padded on the left: keys before ``leftpad[b]`` are padding. leftpad: integers (B,)."""
    _ids("leftpad", leftpad, (1,), "(B,)")
    return Mask(lambda b, h, q_idx, kv_idx: kv_idx >= leftpad[b], "left_padding")


@remade_by_call
def sink_window(sink: int, window: int) -> Mask:
    """Causal attention to the first ``sink`` keys and to the ``window`` keys before the query, and itself.

    Source: StreamingLLM (arXiv:2309.17453).
    """
    _whole("sink", sink, 0)
    _whole("window", window, 0)
    name = f"sink_window(sink={sink}, window={window})"
    sink, window = _in_sight(sink), _in_sight(window)
    return Mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < sink) | (q_idx - kv_idx <= window)), name)


@remade_by_call
def block_diagonal(block: int) -> Mask:
    """Attention inside blocks of ``block`` positions only, both directions."""
    name = f"block_diagonal({_whole('block', block, 1)})"
    block = _in_sight(block)
    return Mask(lambda b, h, q_idx, kv_idx: q_idx // block == kv_idx // block, name)


@remade_by_call
def block_diffusion(length: int, block: int) -> Mask:
    """The training mask of block diffusion language models, over ``length`` noisy tokens and then the same tokens without noise.

    A noisy query sees the noisy tokens of its own block of ``block`` tokens, and the clean tokens of earlier blocks. A clean query sees the
    clean tokens of its own and of earlier blocks. q, k and v have 2 * length positions: token i is at i with noise, at length + i without;
    the last block may be short. Raises ``TypeError`` or ``ValueError`` for a length or block that is not an int above 0.
    Source: BD3-LM (arXiv:2503.09573), section 3.1 and appendix B.6.

    >>> mask = block_diffusion(length=4, block=2)
    >>> mask(0, 0, torch.arange(8)[:, None], torch.arange(8)).int()[2].tolist()  # noisy token 2: its noisy block, clean tokens 0 and 1
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    name = f"block_diffusion(length={_whole('length', length, 1)}, block={_whole('block', block, 1)})"
    length, block = _in_sight(length), _in_sight(block)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_noisy = q_idx < length
        token = torch.where(is_noisy, q_idx, q_idx - length)
        first = token // block * block
        clean = kv_idx - length
        noisy_block = is_noisy & (kv_idx < length) & (kv_idx >= first) & (kv_idx - first < block)
        return noisy_block | ((clean >= 0) & (clean < first + torch.where(is_noisy, 0, block)))

    return Mask(visible, name)


@remade_by_call
def neighborhood_3d(shape: tuple[int, int, int], window: tuple[int, int, int]) -> Mask:
    """Neighborhood attention over video tokens: a query sees a window of frames, rows and columns around its own place.

    shape: frames, rows and columns (t, h, w); the token at (t, h, w) has position ``(t * rows + h) * columns + w``. window: how many
    positions are visible on each axis, the query's own included; ``w // 2`` of them come before it. At a border the window is shifted to
    stay inside, so that every query sees equally many keys; a window longer than its axis is the whole axis. Tokens beyond the shape's,
    such as a text after the video, see nothing and are seen by none: join them with ``|``. Raises ``TypeError`` or ``ValueError`` for other
    than three ints above 0. Source: NATTEN, Neighborhood Attention (arXiv:2204.07143); its kernel_size, with stride and dilation 1.

    >>> mask = neighborhood_3d(shape=(1, 1, 6), window=(1, 1, 3))
    >>> mask(0, 0, torch.arange(6)[:, None], torch.arange(6)).int()[0].tolist()  # the first query: the window has moved to the right
    [1, 1, 1, 0, 0, 0]
    """
    sizes, near = _three("shape", shape), _three("window", window)
    return Mask(_windows(sizes, near, (1, 1, 1)), f"neighborhood_3d(shape={sizes}, window={near})")


@remade_by_call
def sliding_tiles(shape: tuple[int, int, int], tile: tuple[int, int, int], window: tuple[int, int, int]) -> Mask:
    """Sliding tile attention over video tokens: the queries of a tile of tokens see the same window of whole tiles around it.

    shape: frames, rows and columns (t, h, w), multiples of tile, which has as many of each. window: how many tiles are visible on each
    axis, shifted at borders as in ``neighborhood_3d``. Tokens are ordered tile by tile: tiles in the order t, h, w, and so the tokens in
    each. With blocks of t * h * w tokens of a tile, or of a divisor of it, every block of pairs is seen whole or not at all. Tokens beyond
    the shape's see nothing and are seen by none: join them with ``|``. Raises ``TypeError`` or ``ValueError`` for other than three ints
    above 0, or a shape that tiles do not divide. Source: Sliding Tile Attention (arXiv:2502.04507).

    >>> from anyattn import create_block_mask
    >>> mask = sliding_tiles(shape=(12, 16, 16), tile=(6, 8, 8), window=(1, 1, 1))
    >>> blocks = create_block_mask(mask, 1, 1, 3072, 3072, device="cpu", BLOCK_SIZE=384)
    >>> blocks.kv_num_blocks.tolist(), blocks.full_kv_num_blocks.tolist()
    ([[[0, 0, 0, 0, 0, 0, 0, 0]]], [[[1, 1, 1, 1, 1, 1, 1, 1]]])
    """
    sizes, tiles, near = _three("shape", shape), _three("tile", tile), _three("window", window)
    for axis, size, each in zip("thw", sizes, tiles, strict=True):
        if size % each:
            raise ValueError(f"shape={sizes} has {size} tokens on axis {axis}; wanted a multiple of the tile's {each}: pad the video")
    counts = tuple(size // each for size, each in zip(sizes, tiles, strict=True))
    return Mask(_windows(counts, near, tiles), f"sliding_tiles(shape={sizes}, tile={tiles}, window={near})")


def _three(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise TypeError(f"{name}={value!r}; wanted three ints (t, h, w)")
    sizes = tuple(_whole(f"{name}[{i}]", each, 1) for i, each in enumerate(value))
    if math.prod(sizes) > _FAR:
        raise ValueError(f"{name}={sizes} has {math.prod(sizes):,} positions; wanted at most {_FAR:,}")
    return sizes


def _windows(counts: tuple[int, ...], window: tuple[int, ...], tile: tuple[int, ...]) -> Callable[..., Any]:
    """Windows over a grid of ``counts`` tiles of ``tile`` tokens, which are ordered tile by tile."""
    rows, columns, each = counts[1], counts[2], math.prod(tile)
    frame, total = rows * columns, math.prod(counts) * each
    near = tuple(map(min, window, counts))
    before, last = tuple(n // 2 for n in near), tuple(count - n for count, n in zip(counts, near, strict=True))

    def place(token: Any) -> tuple[Any, Any, Any]:
        at = token // each if each > 1 else token
        return at // frame, at // columns % rows, at % columns

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # comparisons of one number of the query with one of the key: kernels evaluate each side once per row and column
        seen = q_idx < total
        for mine, theirs, size, left, end in zip(place(q_idx), place(kv_idx), near, before, last, strict=True):
            first = torch.clamp(mine - left, 0, end)
            seen = seen & (theirs >= first) & (theirs < first + size)
        return seen

    return visible


@remade_by_call
def tree(bitmask: Tensor, offset: int | Tensor = 0, first_query: int | Tensor = 0) -> Mask:
    """Any mask given bit by bit, such as the ancestors in a tree of draft tokens: key j is visible to query i if bit j of row i is set.

    bitmask: int64 (Sq,) for up to 64 keys, or (Sq, words) with bit ``j % 64`` of word ``j // 64``. offset: the length of a cached prefix,
    which every query sees; the tree's key j is then ``kv_idx = offset + j``. first_query: the ``q_idx`` of row 0 of the bitmask, which is
    0, or the prefix's length in ``flash_attn_with_kvcache``, where q_idx is a position among the keys. offset and first_query are each one
    int, or an integer tensor (B,) with one per batch entry. Source: SpecInfer (arXiv:2305.09781).

    >>> bits = torch.tensor([0b001, 0b011, 0b101])  # two draft tokens that both follow the first
    >>> tree(bits, offset=10)
    Mask(tree(offset=10))
    """
    _ids("bitmask", bitmask, (1, 2), "(Sq,) or (Sq, words)")
    if bitmask.dtype is not torch.int64:
        raise ValueError(f"bitmask has dtype {bitmask.dtype}; wanted torch.int64, 64 keys to a word")
    words = bitmask if bitmask.ndim == 2 else bitmask[:, None]
    prefix, rows = _per_entry("offset", offset), _per_entry("first_query", first_query)
    if prefix is None and rows is None:
        # >> keeps the sign bit, and & 1 selects one bit of the result, so bit 63 is right too
        return Mask(lambda b, h, q_idx, kv_idx: ((words[q_idx, kv_idx // 64] >> (kv_idx % 64)) & 1) != 0, "tree")
    before, first = prefix or (lambda b: 0), rows or (lambda b: 0)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        end = before(b)
        inside = torch.clamp(kv_idx - end, min=0)
        return (kv_idx < end) | (((words[q_idx - first(b), inside // 64] >> (inside % 64)) & 1) != 0)

    return Mask(visible, "tree(offset per batch)" if isinstance(offset, Tensor) else f"tree(offset={offset})")


def _per_entry(name: str, value: int | Tensor) -> Callable[[Any], Any] | None:
    """A function that returns the number of batch entry b; None if it is 0 for all entries."""
    if isinstance(value, Tensor):
        each = _ids(name, value, (1,), "(B,)")
        return lambda b: each[b]
    _whole(name, value, 0)
    return (lambda b: value) if value else None
