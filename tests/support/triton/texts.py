"""The Triton text of a mod, run alone: the value at every row and column of one tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.triton_tools import jit_source
from anyattn.triton_tools.emit import Style, emit, packed_tensors

ROWS, COLUMNS = 16, 32


@triton.jit
def everywhere(out, score, first, s0, s1, t0, n0, n1, n2, n3, FN: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    q, kv = first + tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    place = (q - first) * N + kv
    value = FN(1, 2, q, kv, tl.load(score + place), (s0, s1), ((t0, n0, n1, n2, n3),))
    tl.store(out + place, tl.broadcast_to(value, (M, N)).to(out.dtype.element_ty))


def by_triton(traced: TracedMod, style: Style, score: Tensor, first: int) -> Tensor:
    """The values of a mod's text at rows from ``first`` and columns from 0, batch entry 1 and head 2; it captures one tensor at most."""
    lines = emit(traced.expr, style=style)
    body = "\n".join(f"    {line}" for line in [*lines.all(), f"return {lines.outputs[0]}"])
    text = f"@triton.jit\ndef mod(b, h, q_idx, kv_idx, score, scalars, tensors):\n{body}\n"
    fn = jit_source.load(text, f"styled_{jit_source.digest(text)}").mod
    out = torch.empty(ROWS, COLUMNS, dtype=traced.expr.output.dtype, device=score.device)
    numbers = (*bits_of_numbers(traced.scalars), 0, 0)[:2]
    tensor, *places = (packed_tensors(traced.tensors) or ((score,),))[0]
    everywhere[(1,)](out, score, first, *numbers, tensor, *(*places, 0, 0, 0, 0)[:4], fn, ROWS, COLUMNS)
    return out
