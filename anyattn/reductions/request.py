"""Requests for auxiliary results of ``flex_attention``: ``AuxRequest``, ``AuxOutput``, the checks of the former and of ``skip_below``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.problem import Skip

__all__ = ["NO_GRADIENTS", "AuxOutput", "AuxRequest", "Reductions", "Sums", "counting", "named", "requested", "share_of", "skip_of"]

Sums = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # key_sums to listed_sums of ``AuxOutput``
NO_GRADIENTS = "skip_below is given and an input requires grad, but a call that skips tiles has no gradients; use torch.no_grad()"
_NONE = (0, 0)


class AuxRequest(NamedTuple):
    """The argument ``return_aux`` of ``flex_attention``: torch's record, and sums of the probabilities and maxima of the scores by blocks.

    P = exp(score - lse), with the score after the mods, 0 where hidden, before dropout; a sink is part of lse. M = ceil(Sq / m), N =
    ceil(Sk / n). A row without visible keys adds 0 to every sum. Sums and maxima are float32 (float64 for float64 inputs), have no
    gradients, and cost about as much as the forward pass, together or each.

    lse, max_scores: as in torch, per row.
    skipped: (B, Hq) float32, the share of visited tiles that a call with ``skip_below`` skipped; 0 where none was visited.
    key_sums: (B, Hq, Sk), the sum of P over the queries, for each key. last_queries: only over the last so many queries, here and in
        ``block_sums`` of one number.
    block_sums: for a number n (B, Hq, N), the sum of P over the queries and over each block of n keys; for a pair (m, n) (B, Hq, M, N), the
        sum over each block of m queries and n keys.
    block_max: a pair (m, n); (B, Hq, M, N), the greatest visible score of each block, -inf where nothing is visible.
    listed_sums: a pair (indices, (m, n)). indices: integers (B, G, M, k), numbers of key blocks for each block of m queries (m of 1: for
        each query), in any order; G is the number of query heads, or of K/V heads, or 1. The result has their shape: the sum of P over each
        named block and over the Hq / G query heads that share the indices; 0 for an index outside 0 to N - 1. It takes the memory of
        ``block_sums=(m, n)``.

    >>> import torch, anyattn
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> out, aux = anyattn.flex_attention(q, k, v, return_aux=anyattn.AuxRequest(key_sums=True, block_sums=(50, 20)))
    >>> aux.key_sums.shape, aux.block_sums.shape, round(aux.key_sums.sum().item())
    (torch.Size([1, 2, 100]), torch.Size([1, 2, 2, 5]), 200)
    """

    lse: bool = False
    max_scores: bool = False
    key_sums: bool = False
    block_sums: int | tuple[int, int] | None = None
    block_max: tuple[int, int] | None = None
    listed_sums: tuple[Tensor, tuple[int, int]] | None = None
    last_queries: int | None = None
    skipped: bool = False


class AuxOutput(NamedTuple):
    """What an ``AuxRequest`` with sums or maxima by blocks asked for, None for the rest. Other requests are answered by torch's record,
    which has the first two fields only."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    key_sums: Tensor | None = None
    block_sums: Tensor | None = None
    block_max: Tensor | None = None
    listed_sums: Tensor | None = None
    skipped: Tensor | None = None


class Reductions(NamedTuple):
    """The checked reductions of an ``AuxRequest``. last: the number of last queries, 0 for all. key_block: keys of a block of sums over all
    queries, 0 if not asked for. sum_block, max_block, list_block: (m, n), (0, 0) if not asked for."""

    key_sums: bool
    last: int
    key_block: int
    sum_block: tuple[int, int]
    max_block: tuple[int, int]
    list_block: tuple[int, int]
    indices: Tensor | None

    @property
    def are_named(self) -> tuple[bool, bool, bool, bool]:
        """Which of the last four fields of ``AuxOutput`` are asked for."""
        return self.key_sums, self.key_block > 0 or self.sum_block[0] > 0, self.max_block[0] > 0, self.list_block[0] > 0

    def shapes(self, query: Tensor, seqlen_k: int) -> list[tuple[int, ...]]:
        """The shapes of the results, in the order of ``are_named``."""
        heads, seqlen_q = (query.shape[0], query.shape[1]), query.shape[2]

        def blocks(size: tuple[int, int]) -> tuple[int, ...]:
            return (*heads, ceil_div(seqlen_q, size[0]), ceil_div(seqlen_k, size[1]))

        found: list[tuple[int, ...]] = [(*heads, seqlen_k)] if self.key_sums else []
        if self.key_block:
            found.append((*heads, ceil_div(seqlen_k, self.key_block)))
        found += [blocks(size) for size in (self.sum_block, self.max_block) if size[0]]
        return [*found, tuple(self.indices.shape)] if self.indices is not None else found


def requested(request: Any, query: Any, key: Any) -> Reductions | None:
    """The reductions that ``return_aux`` asks for; None for none, as in torch's record. Raises for values and shapes that do not fit."""
    if not hasattr(request, "key_sums"):
        return None
    key_sums, of_sums, of_max, listed, last = (
        request.key_sums,
        request.block_sums,
        request.block_max,
        request.listed_sums,
        request.last_queries,
    )
    if not isinstance(key_sums, bool):
        raise TypeError(f"AuxRequest(key_sums=...) is a {type(key_sums).__name__}; wanted True or False")
    if last is not None and not _is_count(last):
        raise ValueError(f"AuxRequest(last_queries={last!r}); wanted a positive int, or None for all queries")
    key_block = of_sums if _is_count(of_sums) else 0
    sum_block = _NONE if of_sums is None or key_block else _pair("block_sums", of_sums, "a positive int n, or ")
    max_block = _NONE if of_max is None else _pair("block_max", of_max)
    if last is not None and not (key_sums or key_block):
        raise ValueError(f"AuxRequest(last_queries={last}) restricts key_sums and block_sums=n, and neither is asked for")
    list_block, indices = _NONE, None
    if listed is not None:
        if not isinstance(listed, tuple) or len(listed) != 2 or not isinstance(listed[0], Tensor):
            raise TypeError("AuxRequest(listed_sums=...): wanted a pair (indices, (m, n)) of an integer tensor and a block size")
        indices, list_block = listed[0], _pair("listed_sums", listed[1])
        _check_indices(indices, list_block, query, key)
    if not (key_sums or key_block or sum_block[0] or max_block[0] or list_block[0]):
        return None
    return Reductions(key_sums, last or 0, key_block, sum_block, max_block, list_block, indices)


def named(wanted: Reductions, tensors: list[Tensor]) -> Sums:
    """The fields of ``AuxOutput`` after the first two, from the tensors that ``compute.results`` returns."""
    found: list[Tensor | None] = [None] * 4
    at = 0
    for i, is_named in enumerate(wanted.are_named):
        if is_named:
            found[i] = tensors[at]
            at += 1
    return found[0], found[1], found[2], found[3]


def skip_of(skip_below: Any, request: Any, query: Any) -> Skip | None:
    """The argument ``skip_below`` of ``flex_attention``, with counters if ``request`` asks for the share of skipped tiles."""
    wants_share = getattr(request, "skipped", False)
    if skip_below is None:
        if wants_share:
            raise ValueError("AuxRequest(skipped=True) asks for the share of skipped tiles, and skip_below is None; wanted a threshold")
        return None
    if not isinstance(query, Tensor) or query.ndim != 4:
        raise TypeError("skip_below: query must be a tensor of shape (batch, heads, length, head_dim)")
    heads, device = query.shape[1], query.device
    if isinstance(skip_below, Tensor):
        if skip_below.dtype is not torch.float32 or skip_below.shape != (heads,) or skip_below.device != device:
            raise ValueError(
                f"skip_below is {skip_below.dtype} of shape {tuple(skip_below.shape)} on {skip_below.device}; wanted a number, or "
                f"torch.float32 of shape (Hq,) = ({heads},) on {device}"
            )
        below = skip_below.detach().contiguous()
    elif isinstance(skip_below, (int, float)) and not isinstance(skip_below, bool) and 0 <= skip_below <= 1:
        if skip_below == 0 and not wants_share:
            return None
        below = torch.full((heads,), float(skip_below), dtype=torch.float32, device=device)
    else:
        raise ValueError(f"skip_below={skip_below!r}; wanted a number from 0 to 1, or a float32 tensor of shape (Hq,)")
    return counting(below, query.shape[0], wants_share)


def counting(below: Tensor, batch: Any, wants_share: bool) -> Skip:
    """Thresholds of each head, with counters of tiles if the share of skipped ones is wanted."""
    return Skip(below, torch.zeros((batch, *below.shape, 2), dtype=torch.int32, device=below.device) if wants_share else None)


def share_of(skip: Skip) -> Tensor | None:
    """``AuxOutput.skipped``."""
    if skip.counts is None:
        return None
    skipped, visited = skip.counts.float().unbind(-1)
    return skipped / visited.clamp_min(1.0)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _pair(name: str, block: Any, more: str = "") -> tuple[int, int]:
    if isinstance(block, (tuple, list)) and len(block) == 2 and _is_count(block[0]) and _is_count(block[1]):
        return block[0], block[1]
    raise ValueError(f"AuxRequest({name}=...) has the block {block!r}; wanted {more}a pair (queries, keys) of positive ints")


def _check_indices(indices: Tensor, block: tuple[int, int], query: Any, key: Any) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"AuxRequest(listed_sums=...): indices are {indices.dtype}; wanted int32 or int64")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.ndim != 4 or key.ndim != 4:
        return  # refused with the call's own checks
    if indices.device != query.device:
        raise ValueError(f"AuxRequest(listed_sums=...): indices are on {indices.device}; wanted {query.device}, where query is")
    rows, heads = ceil_div(query.shape[2], block[0]), (query.shape[1], key.shape[1], 1)
    if indices.ndim != 4 or indices.shape[0] != query.shape[0] or indices.shape[1] not in heads or indices.shape[2] != rows:
        raise ValueError(
            f"AuxRequest(listed_sums=...): indices are {tuple(indices.shape)}; wanted (B, heads, query blocks, k) = ({query.shape[0]}, one "
            f"of {', '.join(map(str, dict.fromkeys(heads)))}, {rows}, any)"
        )
