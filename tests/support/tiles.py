"""Brute-force tile classes, and masks to test them on: every mask of the library, and random trees of conditions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mods import masks
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL
from anyattn.mods.tracing.trace import trace

__all__ = ["brute_classes", "brute_classes_ragged", "dense", "library_masks", "random_lengths", "random_mask"]


def dense(mod: Any, seqlen_q: int, seqlen_k: int, B: int = 1, H: int = 1) -> Tensor:
    """bool (B, H, seqlen_q, seqlen_k): every pair evaluated."""
    b, h = torch.arange(B, device="cpu")[:, None, None, None], torch.arange(H, device="cpu")[:, None, None]
    q_idx, kv_idx = torch.arange(seqlen_q, device="cpu")[:, None], torch.arange(seqlen_k, device="cpu")
    return evaluate(trace(mod, "mask"), b, h, q_idx, kv_idx).expand(B, H, seqlen_q, seqlen_k)


def brute_classes(mask: Tensor, tile_m: int, tile_n: int, pad: bool = False) -> Tensor:
    """uint8 (B, H, M, N) classes of a dense mask by counting; ``pad`` counts the tail's padding as hidden, as torch does."""
    seqlen_q, seqlen_k = mask.shape[-2:]
    rows, columns = ceil_div(seqlen_q, tile_m), ceil_div(seqlen_k, tile_n)
    padding = (0, columns * tile_n - seqlen_k, 0, rows * tile_m - seqlen_q)

    def count(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, padding)
        return padded.unflatten(-1, (columns, tile_n)).unflatten(-3, (rows, tile_m)).sum((-3, -1))

    seen = count(mask)
    size = torch.full_like(seen, tile_m * tile_n) if pad else count(torch.ones_like(mask))
    return torch.where(seen == 0, EMPTY, torch.where(seen == size, FULL, PARTIAL)).to(torch.uint8)


def random_lengths(seed: int, tile: tuple[int, int], batch: int, most: int = 100) -> tuple[Tensor, Tensor]:
    """Lengths of the queries and keys of a varlen batch, int64 (batch,): 0, 1, around a tile, or anything up to ``most``."""
    rng = random.Random(seed)

    def side(size: int) -> Tensor:
        choices = (0, 1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 1, rng.randrange(most + 1), rng.randrange(most + 1))
        return torch.tensor([min(rng.choice(choices), most) for _ in range(batch)], dtype=torch.int64, device="cpu")

    return side(tile[0]), side(tile[1])


def brute_classes_ragged(
    mod: Any, seqlens_q: Tensor, seqlens_k: Tensor, tile: tuple[int, int], H: int = 1, q_first: Tensor | None = None
) -> Tensor:
    """uint8 (H, total_tiles): every pair of every sequence, one sequence after another, in ``classify_ragged``'s order."""
    traced, h, parts = (
        trace(mod, "mask"),
        torch.arange(H, device="cpu")[:, None, None],
        [torch.zeros(H, 0, dtype=torch.uint8, device="cpu")],
    )
    for b, (m, n) in enumerate(zip(seqlens_q.tolist(), seqlens_k.tolist(), strict=True)):
        rows = torch.arange(m, device="cpu")[:, None] + (0 if q_first is None else int(q_first[b]))
        seen = evaluate(traced, torch.tensor(b, device="cpu"), h, rows, torch.arange(n, device="cpu")).expand(H, m, n)
        parts.append(brute_classes(seen, *tile).reshape(H, -1))
    return torch.cat(parts, 1)


def library_masks(seqlen_q: int, seqlen_k: int, B: int = 2, seed: int = 0) -> dict[str, Callable]:
    """Every mask of the library, with odd parameters that suit the lengths, and some compositions."""
    rng = random.Random(seed)
    length = max(seqlen_q, seqlen_k, 1)
    ids = torch.tensor(_runs(rng, length), device="cpu")
    ids_per_batch = torch.tensor([_runs(rng, length) for _ in range(B)], device="cpu")
    cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(3))})
    words = torch.randint(
        -(2**62), 2**62, (max(seqlen_q, 1), ceil_div(length, 64)), generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    prefix = torch.tensor([rng.randrange(length + 1) for _ in range(B)], device="cpu")
    w = rng.randrange(1, length + 2)
    return {
        "full": masks.full(),
        "causal": masks.causal(),
        "causal_offset": masks.causal(rng.randrange(-length, length)),
        "causal_bottom_right": masks.causal_bottom_right(seqlen_q, seqlen_k),
        "window": masks.sliding_window(w, 0),
        "window_both": masks.sliding_window(w, rng.randrange(w + 1), seqlen_k - seqlen_q),
        "window_open": masks.sliding_window(None, w),
        "prefix_lm": masks.prefix_lm(w),
        "prefix_per_batch": masks.prefix_lm(prefix),
        "document": masks.document(ids),
        "document_per_batch": masks.document(ids_per_batch),
        "cu_seqlens": masks.document_from_cu_seqlens(torch.tensor(cuts, device="cpu")),
        "document_causal": masks.document(ids) & masks.causal(),
        "not_document": ~masks.document(ids) & masks.causal(),
        "chunked": masks.chunked(w),
        "dilated": masks.dilated(5, 3),
        "left_padding": masks.left_padding(prefix),
        "padding_causal": masks.left_padding(prefix) & masks.causal(),
        "sink_window": masks.sink_window(3, w),
        "block_diagonal": masks.block_diagonal(w),
        "tree": masks.tree(words),
        "block_diffusion": masks.block_diffusion(max(1, length // 2), w),
        "neighborhood_3d": masks.neighborhood_3d((ceil_div(length, 35), 5, 7), (3, 2, 5)),
        "sliding_tiles": masks.sliding_tiles((2 * ceil_div(length, 64), 4, 8), (2, 2, 4), (3, 1, 2)),
        "prefix_or_document": masks.prefix_lm(w) | masks.document(ids),
    }


def _runs(rng: random.Random, length: int) -> list[int]:
    """Ids in runs, not sorted."""
    names = list(range(length + 1))
    rng.shuffle(names)
    result: list[int] = []
    while len(result) < length:
        result += [names.pop()] * rng.randrange(1, length + 1)
    return result[:length]


def random_mask(seed: int, length: int, B: int = 2, H: int = 2, depth: int = 4) -> Callable:
    """A tree of conditions combined by &, |, ~, ^ and where; half of the trees are limited to conditions that row ranges can express."""
    rng = random.Random(seed)
    return _tree(rng, max(length, 1), B, H, rng.randrange(depth + 1), rng.random() < 0.5)


def _tree(rng: random.Random, length: int, B: int, H: int, depth: int, ranges_only: bool) -> Callable:
    if depth == 0:
        kind = rng.choice(_RANGE_LEAVES if ranges_only else _RANGE_LEAVES + _OTHER_LEAVES)
        return kind(rng, length, B, H)
    x, y, z = (_tree(rng, length, B, H, rng.randrange(depth), ranges_only) for _ in range(3))
    joint = rng.choice("&&||~^?")
    if joint == "&":
        return lambda b, h, q, k: x(b, h, q, k) & y(b, h, q, k)
    if joint == "|":
        return lambda b, h, q, k: x(b, h, q, k) | y(b, h, q, k)
    if joint == "~":
        return lambda b, h, q, k: ~x(b, h, q, k)
    if joint == "^":
        return lambda b, h, q, k: x(b, h, q, k) ^ y(b, h, q, k)
    return lambda b, h, q, k: torch.where(x(b, h, q, k), y(b, h, q, k), z(b, h, q, k))


def _comparison(rng: random.Random) -> Callable:
    return rng.choice([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])


def _linear(rng: random.Random, length: int, B: int, H: int) -> Callable:
    a, c, n, compare = rng.randrange(-2, 3), rng.choice([-3, -1, 1, 1, 2]), rng.randrange(-length, length + 1), _comparison(rng)
    return lambda b, h, q, k: compare(a * q + n, c * k)


def _per_row(rng: random.Random, length: int, B: int, H: int) -> Callable:
    table, compare = (
        torch.tensor([[rng.randrange(-2, length + 2) for _ in range(length)] for _ in range(H)], device="cpu"),
        _comparison(rng),
    )
    return lambda b, h, q, k: compare(k, table[h, q] + b)


def _distance(rng: random.Random, length: int, B: int, H: int) -> Callable:
    w, compare = rng.randrange(-1, length + 1), _comparison(rng)
    return lambda b, h, q, k: compare(torch.abs(q - k), w)


def _blocks(rng: random.Random, length: int, B: int, H: int) -> Callable:
    n, w, compare = rng.randrange(1, length + 1), rng.randrange(-1, 2), _comparison(rng)
    return lambda b, h, q, k: compare(q // n, k // n + w)


def _documents(rng: random.Random, length: int, B: int, H: int) -> Callable:
    ids = torch.tensor([_runs(rng, length) for _ in range(B)], device="cpu")
    if rng.random() < 0.3:
        ids = ids.sort(-1).values
        compare = _comparison(rng)
        return lambda b, h, q, k: compare(ids[b, q], ids[b, k])
    other = torch.tensor([rng.choice(ids[0].tolist()) for _ in range(length)], device="cpu")
    one = ids[0].contiguous()
    return rng.choice(
        [lambda b, h, q, k: ids[b, q] == ids[b, k], lambda b, h, q, k: other[q] == one[k], lambda b, h, q, k: one[k] != one[q] + 1]
    )


def _keep(rng: random.Random, length: int, B: int, H: int) -> Callable:
    lo = [rng.randrange(length + 1) for _ in range(B)]
    keep = torch.tensor([[s <= i < s + length // 2 for i in range(length)] for s in lo], device="cpu")
    return lambda b, h, q, k: keep[b, k]


def _row_only(rng: random.Random, length: int, B: int, H: int) -> Callable:
    n, r = rng.randrange(1, 5), rng.randrange(4)
    return rng.choice(
        [lambda b, h, q, k: q % n == r, lambda b, h, q, k: h != r, lambda b, h, q, k: (b + h) % 2 == 0, lambda b, h, q, k: q >= 0]
    )


def _clamped(rng: random.Random, length: int, B: int, H: int) -> Callable:
    n, compare = rng.randrange(length + 1), _comparison(rng)
    return lambda b, h, q, k: compare(torch.clamp(q - k, -n, n), torch.minimum(q, torch.where(h == 0, n - b, 2)))


def _periodic(rng: random.Random, length: int, B: int, H: int) -> Callable:
    n, r = rng.randrange(1, 9), rng.randrange(4)
    return rng.choice([lambda b, h, q, k: (q - k) % n == r, lambda b, h, q, k: (q + k) % n < r, lambda b, h, q, k: (q ^ k) & n == 0])


def _scattered(rng: random.Random, length: int, B: int, H: int) -> Callable:
    table = torch.tensor([rng.randrange(-length, length) for _ in range(length)], device="cpu")
    return rng.choice(
        [lambda b, h, q, k: table[q] == table[k], lambda b, h, q, k: table[table[k]] > q, lambda b, h, q, k: table[k - q] * b < q]
    )


def _divided(rng: random.Random, length: int, B: int, H: int) -> Callable:
    """Divisors that differ per key, and change sign without being 0."""
    m, r = rng.randrange(length), rng.randrange(-4, 5)
    return rng.choice(
        [
            lambda b, h, q, k: q % (k + 1) == r,
            lambda b, h, q, k: (3 * q - r) // (2 * k - 2 * m - 1) > r,
            lambda b, h, q, k: (q - k) % (2 * q - 2 * m - 1) < r,
        ]
    )


def _jumping(rng: random.Random, length: int, B: int, H: int) -> Callable:
    """One short range per row, at a position unrelated to the next row's."""
    starts, size = torch.tensor([rng.randrange(length) for _ in range(length)], device="cpu"), rng.randrange(1, 4)
    return lambda b, h, q, k: (k >= starts[q]) & (k < starts[q] + size)


def _real(rng: random.Random, length: int, B: int, H: int) -> Callable:
    x = rng.uniform(0.1, 3.0)
    bias = torch.tensor([rng.choice([rng.random(), float("inf"), float("-inf"), float("nan")]) for _ in range(length)], device="cpu")
    return rng.choice(
        [
            lambda b, h, q, k: q * x >= k,
            lambda b, h, q, k: torch.exp(-torch.abs(q - k) / x) > 0.1,
            lambda b, h, q, k: torch.log((q - k).float()) > x,
            lambda b, h, q, k: bias[k] + bias[q] < x,
            lambda b, h, q, k: torch.sqrt(k.float() / (q + 1)) < x,
        ]
    )


_RANGE_LEAVES: list[Callable] = [_linear, _linear, _per_row, _distance, _blocks, _documents, _keep, _row_only, _jumping]
_OTHER_LEAVES: list[Callable] = [_clamped, _periodic, _scattered, _divided, _real]
