"""Decoding contestants: ``flash_attn_with_kvcache`` in all its forms, and a copy of as many bytes as the keys and values have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn import scores
from anyattn.testing.harness.inputs import Inputs

__all__ = [
    "EIGHT_BITS",
    "PREFILL_8_BITS",
    "alibi",
    "append",
    "contiguous",
    "copy",
    "eight_bits",
    "fa3",
    "flash_mla",
    "one_kv",
    "paged",
    "pages",
    "splits",
]

_ROTARY = 64  # dimensions


def _lengths(inputs: Inputs, less: int = 0) -> Tensor:
    shape = inputs.case.shape
    return torch.full((shape.batch,), shape.seqlen_k - less, dtype=torch.int32, device=inputs.device)


def contiguous(inputs: Inputs, **options: Any) -> Callable[..., Any]:
    """One query per sequence against a full cache, nothing appended; the function still accepts ``backend``."""
    import anyattn

    (q, k, v), lengths = inputs.bshd, _lengths(inputs)
    return lambda **more: anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **options, **more)


def alibi(inputs: Inputs) -> Callable[[], Any]:
    """Decoding with a plain Python score mod."""
    slopes = scores.alibi_slopes(inputs.case.shape.heads_q).to(inputs.device)
    call = contiguous(inputs, score_mod=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx))
    return lambda: call(backend=inputs.case.backend)


def splits(count: int) -> Callable[[Inputs], Callable[[], Any]]:
    """Decoding with ``count`` splits."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        call = contiguous(inputs, num_splits=count)
        return lambda: call(backend=inputs.case.backend)

    return prepare


def pages(inputs: Inputs, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cache as pages in random order: both pools, and the table (batch, pages of a sequence)."""
    _, k, v = inputs.bshd
    batch, seqlen = k.shape[:2]
    each = seqlen // page_size
    assert each * page_size == seqlen, f"pages of {page_size} do not divide {seqlen} keys"
    where = torch.randperm(batch * each, generator=torch.Generator().manual_seed(4), device="cpu").to(inputs.device)
    pools = []
    for cache in (k, v):
        pool = torch.empty(batch * each, page_size, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
        pool[where] = cache.view(pool.shape)
        pools.append(pool)
    return pools[0], pools[1], where.view(batch, each).int()


def paged(page_size: int, num_splits: int = 0, backend: str | None = None) -> Callable[[Inputs], Callable[[], Any]]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        import anyattn

        q, lengths = inputs.bshd[0], _lengths(inputs)
        k, v, table = pages(inputs, page_size)
        options: dict[str, Any] = {"causal": True, "num_splits": num_splits, "backend": backend or inputs.case.backend}
        return lambda: anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, **options)

    return prepare


# Caches of 8 bits by the name of the contestant: dtype, scales (of the whole cache, of each head, page or key, or behind each key's bytes),
# page size, and whether there is a score mod.
EIGHT_BITS: dict[str, tuple[torch.dtype, str, int, bool]] = {
    "anyattn-e4m3": (torch.float8_e4m3fn, "none", 0, False),
    "anyattn-e4m3-head": (torch.float8_e4m3fn, "head", 0, False),
    "anyattn-e4m3-key": (torch.float8_e4m3fn, "key", 0, False),
    "anyattn-e4m3-inline": (torch.float8_e4m3fn, "inline", 0, False),
    "anyattn-e5m2-head": (torch.float8_e5m2, "head", 0, False),
    "anyattn-int8-head": (torch.int8, "head", 0, False),
    "anyattn-e4m3-alibi": (torch.float8_e4m3fn, "head", 0, True),
    "anyattn-e4m3-paged-16-head": (torch.float8_e4m3fn, "head", 16, False),
    "anyattn-e4m3-paged-16-page": (torch.float8_e4m3fn, "page", 16, False),
    "anyattn-e4m3-paged-16-key": (torch.float8_e4m3fn, "key", 16, False),
    "anyattn-e4m3-paged-16-inline": (torch.float8_e4m3fn, "inline", 16, False),
}
# Prefill from such caches, as anyattn chooses, and by Triton's kernels, which convert every key once for each tile of queries.
PREFILL_8_BITS: dict[str, tuple[torch.dtype, str, int, bool]] = {
    f"anyattn-{dtype}-paged-16{'' if form == 'none' else f'-{form}'}-prefill{by}": (of_dtype, form, 16, False)
    for dtype, of_dtype, forms in (
        ("e4m3", torch.float8_e4m3fn, ("none", "head", "key", "inline")),
        ("int8", torch.int8, ("head",)),
    )
    for form in forms
    for by in ("", "-triton")
}


def eight_bits(name: str) -> Callable[[Inputs], Callable[[], Any]]:
    """Decoding from a cache of ``EIGHT_BITS``, or prefill from one of ``PREFILL_8_BITS``."""
    dtype, form, page_size, has_score = (EIGHT_BITS | PREFILL_8_BITS)[name]

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        import anyattn

        q, k, v = inputs.bshd
        backend = "triton" if name.endswith("-triton") else inputs.case.backend
        options: dict[str, Any] = {"cache_seqlens": _lengths(inputs), "causal": True, "backend": backend}
        if page_size:
            k, v, options["page_table"] = pages(inputs, page_size)
        if has_score:
            slopes = scores.alibi_slopes(inputs.case.shape.heads_q).to(inputs.device)
            options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)
        caches = []
        for option, x in (("k_descale", k), ("v_descale", v)):
            cache, options[option] = _quantised(x, dtype, form, len(q))
            caches.append(cache)
        return lambda: anyattn.flash_attn_with_kvcache(q, *caches, **options)

    return prepare


def _quantised(x: Tensor, dtype: torch.dtype, form: str, batch: int) -> tuple[Tensor, Tensor | None]:
    """``x`` in 8 bits, and its scales."""
    rows, positions, heads, width = x.shape
    unit = 32.0 if dtype is torch.int8 else 1.0
    shape = {"none": (), "head": (batch, heads), "page": (rows, 1, heads)}.get(form, (rows, positions, heads))
    found = torch.full(shape, 1 / unit, device=x.device)
    stored = (x * unit).clamp(-127, 127).to(dtype)
    if form != "inline":
        return stored, found if shape else None
    together = torch.empty(*x.shape[:3], width + 4, dtype=torch.uint8, device=x.device)
    together[..., :width], together[..., width:].view(torch.float32)[..., 0] = stored.view(torch.uint8), found
    return together[..., :width].view(dtype), together[..., width:].view(torch.float32)[..., 0]


def append(inputs: Inputs) -> Callable[[], Any]:
    """A whole decoding step on separate caches: the last key and value are appended, rotated by their positions, and attended to."""
    import anyattn

    q, k, v = inputs.bshd
    new_k, new_v = k[:, -1:].clone(), v[:, -1:].clone()
    caches, lengths, backend = (k.clone(), v.clone()), _lengths(inputs, 1), inputs.case.backend
    angles = torch.rand(inputs.case.shape.seqlen_k, _ROTARY // 2 if q.shape[-1] >= _ROTARY else q.shape[-1] // 2, device=inputs.device)
    turn: dict[str, Any] = {"rotary_cos": angles.cos().to(q.dtype), "rotary_sin": angles.sin().to(q.dtype), "causal": True}
    return lambda: anyattn.flash_attn_with_kvcache(q, *caches, k=new_k, v=new_v, cache_seqlens=lengths, **turn, backend=backend)


def copy(inputs: Inputs) -> Callable[[], Any]:
    """Reads the keys and writes them to another tensor: as many bytes as reading keys and values."""
    source = inputs.bshd[1]
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def fa3(module: Any, page_size: int = 0) -> Callable[[Inputs], Callable[[], Any]]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        flash, (q, k, v), table = module(), inputs.bshd, None
        if page_size:
            k, v, table = pages(inputs, page_size)
        lengths = _lengths(inputs)
        return lambda: flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True)

    return prepare


def one_kv(inputs: Inputs) -> Callable[[], Any]:
    """Decoding, or attention, with values that are the first columns of the keys, and without a gradient of their own."""
    import anyattn

    (q, k, _), backend, columns = inputs.bshd, inputs.case.backend, inputs.case.shape.value_dim
    if inputs.case.kind == "decode":
        lengths = _lengths(inputs)
        return lambda: anyattn.flash_attn_with_kvcache(q, k, k[..., :columns], cache_seqlens=lengths, causal=True, backend=backend)
    options = inputs.variant.native or {}
    return lambda: anyattn.flash_attn_func(q, k, k[..., :columns], **options, backend=backend)


def flash_mla(module: Any, page_size: int = 64) -> Callable[[Inputs], Callable[[], Any]]:
    """FlashMLA's decoding, from one cache in pages of 64."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        package, (q, k, v), lengths = module(), inputs.bshd, _lengths(inputs)
        pool, _, table = pages(inputs, page_size)
        plan = package.get_mla_metadata(lengths, q.shape[1] * q.shape[2] // k.shape[2], k.shape[2])
        return lambda: package.flash_mla_with_kvcache(q, pool, table, lengths, v.shape[-1], *plan, causal=True)

    return prepare
