"""Evaluation of random programs' Triton text in Triton's interpreter. Arguments: "whole" or "float" numbers, first seed, count.

``test_fuzz_whole_numbers.py`` and ``test_fuzz_float_masks.py`` run it in a separate process, since the interpreter is chosen when Triton is
imported. Many programs share a text, and one kernel evaluates all of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from anyattn.backends.triton.codegen.assumptions import _style
from anyattn.mods.analysis.captured_loads import even_slots
from anyattn.mods.analysis.row_ranges import RowRanges, ranges_unread
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.sparsity.kernels.interval_codegen import MOST_SCALAR_BITS, mask_source
from anyattn.triton_tools import jit_source
from anyattn.triton_tools.emit import PLAIN, Style, emit, packed_tensors
from tests.support.fuzz.float_masks import float_masks
from tests.support.fuzz.whole_number_checks import B, H, called, grid, origin_of, traced
from tests.support.fuzz.whole_numbers import LENGTH, Program, programs
from tests.support.interpreter import mend

assert os.environ.get("TRITON_INTERPRET") == "1"
mend()
ROWS, COLUMNS, TOGETHER = 8, 16, 40
TILE = (4, 8)


def style_of(made: Program, mod: TracedMod | RowRanges) -> Style:
    """Every other program is written for the sizes of its call, as kernels are."""
    if made.seed % 2:
        return PLAIN
    numbers = tuple(n if type(n) is int else None for n in mod.scalars)
    places = tuple((t.shape, t.stride()) for t in mod.tensors)
    most = max(origin_of(made)) + 64
    return _style(mod.expr, numbers, places, (3, 4, most, most, False), "exact", False, even_slots(mod.expr, mod.tensors))


def value_text(name: str, made: Program, mod: TracedMod) -> str:
    lines = emit(mod.expr, style=style_of(made, mod))
    body = "\n".join(f"    {line}" for line in [*lines.all(), f"return {lines.outputs[0]}"])
    return f"@triton.jit\ndef {name}(b, h, q_idx, kv_idx, score, scalars, tensors):\n{body}\n"


def limits_text(name: str, made: Program, ranges: RowRanges) -> str:
    """Whether a key lies within a row's limits, as kernels bring them to 32 bits."""
    found = emit(ranges.expr, style=PLAIN._replace(is_small=style_of(made, ranges).is_small))
    pairs = zip(found.outputs[::2], found.outputs[1::2], strict=True)
    seen = " | ".join(f"((kv_idx >= device_math.limit({lo})) & (kv_idx < device_math.limit({hi})))" for lo, hi in pairs)
    body = "\n".join(f"    {line}" for line in [*found.all(), f"return {seen}"])
    return f"@triton.jit\ndef {name}(b, h, q_idx, kv_idx, score, scalars, tensors):\n{body}\n"


def kernel_text(names: list[str]) -> str:
    """One kernel that asks functions of these names, each with its own captures."""
    arguments = ", ".join(f"s{i}, t{i}" for i in range(len(names)))
    lines = [
        f"@triton.jit\ndef ask_all(out, score, firsts, {arguments}, M: tl.constexpr, N: tl.constexpr):",
        "    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]",
        "    place = i * N + j",
        "    s = tl.load(score + place)",
    ]
    for at, name in enumerate(names):
        lines += [
            f"    q{at}, kv{at} = tl.load(firsts + {2 * at}) + i, tl.load(firsts + {2 * at + 1}) + j",
            f"    v{at} = {name}({B}, {H}, q{at}, kv{at}, s, s{at}, t{at})",
            f"    tl.store(out + {at} * M * N + place, tl.broadcast_to(v{at}, (M, N)).to(tl.float32))",
        ]
    return "\n".join(lines) + "\n"


def check_values(asked: list[tuple[Program, TracedMod | RowRanges]]) -> None:
    """All of them in one launch: what they say of every pair."""
    names = [f"f{i}" for i in range(len(asked))]
    texts = [
        limits_text(name, made, mod) if isinstance(mod, RowRanges) else value_text(name, made, mod)
        for name, (made, mod) in zip(names, asked, strict=True)
    ]
    loaded = load("\n".join([*texts, kernel_text(names)]))
    out = torch.empty(len(asked), ROWS, COLUMNS)
    score = torch.linspace(-3, 3, ROWS * COLUMNS).view(ROWS, COLUMNS)
    firsts = torch.tensor([origin_of(made) for made, _ in asked], dtype=torch.int32)
    captured: list[Any] = []
    for _, mod in asked:
        captured += [bits_of_numbers(mod.scalars), packed_tensors(mod.tensors)]
    loaded.ask_all[(1,)](out, score, firsts, *captured, ROWS, COLUMNS)
    for got, text, (made, mod) in zip(out, texts, asked, strict=True):
        want = called(made, *grid(origin_of(made), ROWS, COLUMNS), score if made.kind == "score" else None)
        assert torch.equal(got, want.float()), f"Triton text\n{made}{mod.expr}\n{text}\n{got}\n{want.float()}"


def load(source: str) -> Any:
    return jit_source.load(source, f"programs_{jit_source.digest(source)}")


def check_verdicts(made: Program, mod: TracedMod) -> None:
    """What tiles certainly show and may show."""
    if any(not -(2**MOST_SCALAR_BITS) < n < 2**MOST_SCALAR_BITS for n in mod.scalars):
        return
    at = origin_of(made)
    first_q, first_kv = (torch.tensor([at[axis], at[axis] + TILE[axis]], dtype=torch.int32) for axis in (0, 1))
    lo, hi = torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    source = mask_source(mod.expr).text + "\n" + _VERDICT
    captured = bits_of_numbers(mod.scalars), packed_tensors(mod.tensors)
    load(source).ask_verdict[(1,)](lo, hi, first_q, first_q + TILE[0] - 1, first_kv, first_kv + TILE[1] - 1, *captured, *TILE)
    for i in range(2):
        tile = called(made, *grid((int(first_q[i]), int(first_kv[i])), *TILE))
        assert bool(tile.all()) or not lo[i], f"a tile is certain to be seen and is not\n{made}{mod.expr}\n{source}"
        assert not bool(tile.any()) or hi[i], f"a tile is certain to be hidden and is not\n{made}{mod.expr}\n{source}"


_VERDICT = f"""@triton.jit
def ask_verdict(lo, hi, q_first, q_last, kv_first, kv_last, scalars, tensors, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, 2)
    q0, q1, k0, k1 = tl.load(q_first + i), tl.load(q_last + i), tl.load(kv_first + i), tl.load(kv_last + i)
    must, may = verdict_at_once({B}, {H}, q0, q1, k0, k1, None, 0, None, 0, scalars, tensors, M, N)
    tl.store(lo + i, tl.broadcast_to(must, (2,)).to(tl.int32))
    tl.store(hi + i, tl.broadcast_to(may, (2,)).to(tl.int32))
"""


def main(numbers: str, first: int, count: int) -> None:
    asked: list[tuple[Program, TracedMod | RowRanges]] = []
    for made in {"whole": programs, "float": float_masks}[numbers](count, first):
        mod = traced(made)
        if mod is None or any(node.dtype is torch.bfloat16 for node in mod.expr.nodes):  # which the interpreter cuts off
            continue
        asked.append((made, mod))
        if made.kind == "mask":
            if made.seed % 4 == 0:
                check_verdicts(made, mod)
            ranges = ranges_unread(mod)
            if ranges is not None:
                asked.append((made, ranges))
        if len(asked) >= TOGETHER:
            check_values(asked)
            asked = []
    if asked:
        check_values(asked)
    assert LENGTH >= ROWS + COLUMNS


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
