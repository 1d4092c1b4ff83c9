"""Forward pass whose rows have bits that do not depend on the batch: compiled loops over keys that have been copied out of pages, and
converted from 8 bits, where they are stored so."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.backends.result import Result
from anyattn.backends.torch.compiled import build
from anyattn.backends.torch.compiled import forward as compiled
from anyattn.backends.torch.compiled.work import work_of
from anyattn.backends.torch.coverage import cover
from anyattn.backends.torch.plan import TorchPlan
from anyattn.backends.torch.tiles import results_of
from anyattn.errors import BackendError
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.host_lists import ListedSequences

__all__ = ["forward"]


def forward(problem: Problem, plan: TorchPlan) -> Result:
    """The results of a call that ``decision.why_not_in_order`` accepts and that has pairs. Raises ``BackendError`` if its loops do not
    compile, or a mod reads a captured tensor outside of its size."""
    over = _with_plain_keys(problem)
    result = results_of(over)
    if not compiled.forward(over, work_of(over, cover(over, plan.tile_m, plan.pairs_at_once)), result):
        reason = build.reason_against() or "a mod reads a captured tensor outside of its size"
        raise BackendError(f'deterministic="batch" cannot have this call: {reason}; deterministic=True has every call')
    if over.q.dtype is problem.q.dtype:
        return result
    return result._replace(out=result.out.to(problem.q.dtype))


def _with_plain_keys(problem: Problem) -> Problem:
    """The problem over keys and values without pages, in the queries' dtype; 8-bit ones times their factors in float32, and so are the
    queries then."""
    q, k, v, s = problem.q, problem.k, problem.v, problem.sequences
    if s is None or (s.page_table is None and k.dtype is q.dtype):
        return problem
    factors = problem.kv_scales or (None, None)
    tokens = [_tokens(x, of_x, s) for x, of_x in zip((k, v), factors, strict=True)]
    numbers = s.on_host
    numbers = numbers._replace(k_row=[0] * s.batch, k_start=numbers.key_base)
    sequences = ListedSequences(numbers, q.device, is_cache=s.is_cache, most_q=s.most_q)
    wide = q if k.dtype is q.dtype else q.float()
    return problem.like(q=wide, k=tokens[0], v=tokens[1], kv_scales=None, sequences=sequences)


def _tokens(x: Tensor, factors: Tensor | None, s: Sequences) -> Tensor:
    """(1, K/V heads, keys of all entries, D): the keys or values in use. x: storage. factors: of 8-bit ones, ``kvcache.scales``."""
    parts = []
    for b, (row, start, count) in enumerate(zip(s.on_host.k_row, s.on_host.k_start, s.on_host.seqlens_k, strict=True)):
        if s.page_table is None:
            place: tuple = row, slice(None), slice(start, start + count)
            part = x[place].transpose(0, 1)  # (keys, heads, D)
        else:
            rows = s.storage_rows(b, b + 1)[0]
            place = rows // s.page_size, slice(None), rows % s.page_size
            part = x[place]
        if x.element_size() == 1:
            part = part.float()
            if factors is not None:
                part = part * _factors(factors, b, place, s.page_table is not None)
        parts.append(part)
    return torch.cat(parts).transpose(0, 1)[None]


def _factors(factors: Tensor, b: int, place: tuple, has_pages: bool) -> Tensor:
    """(keys or 1, heads, 1): the factors of entry b, (B, heads) or of each key as storage has it."""
    if factors.ndim == 2:
        return factors[b, None, :, None]
    return factors[place][..., None] if has_pages else factors[place].transpose(0, 1)[..., None]
