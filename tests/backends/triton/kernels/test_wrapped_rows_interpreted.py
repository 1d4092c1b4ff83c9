"""8-bit rows at multiples of 4 bytes, by Triton's interpreter: which bytes are loaded, and decoding from caches of such rows.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

import anyattn
from anyattn.backends.triton import api, launch_shape, tile_config
from anyattn.backends.triton.kernels.wrapped_rows import load_wrapped, wrap_of, wrapped_columns
from anyattn.backends.triton.wide_tiles import padded
from anyattn.call_cache import attention
from anyattn.testing import budget
from anyattn.triton_tools.launch import wrap_bytes
from tests.support import poison
from tests.support import sequences as seq
from tests.support.eight_bits import DTYPES, Q_DTYPES, Setting, made
from tests.support.sequences import Meaning


@pytest.fixture(autouse=True)
def truthful_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are multiples of what the kernels say: a GPU's copy of 16 bytes from elsewhere is an error."""
    set_attribute = TensorHandle.set_attr

    def checked(self: Any, name: str, values: Any) -> None:
        kind = self.dtype
        if name == "tt.divisibility" and kind.is_ptr():
            every = max(1, values[-1] * 8 // kind.element_ty.primitive_bitwidth)
            assert not (self.data[..., ::every] % values[-1]).any(), f"addresses are not multiples of {values[-1]}"
        set_attribute(self, name, values)

    monkeypatch.setattr(TensorHandle, "set_attr", checked)


@triton.jit
def copy_rows(
    memory, out, columns, stride, count, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WRAP: tl.constexpr,
    ALL_ROWS: tl.constexpr,
):  # fmt: skip
    row, d = tl.arange(0, 16)[:, None], tl.arange(0, BLOCK_D)[None, :]
    base = memory.to(tl.pointer_type(tl.int16 if UNIT == 2 else tl.int8))
    wrap = wrap_of(memory, WRAP) // UNIT
    found = load_wrapped(base, row.to(tl.int64) * stride // UNIT, row < count, wrap, D, BLOCK_D, ALL_ROWS, WRAP, UNIT, False)
    tl.store(out + row * BLOCK_D + d, found)
    tl.store(columns + tl.arange(0, BLOCK_D * UNIT), wrapped_columns(wrap_of(memory, WRAP), D * UNIT, BLOCK_D * UNIT))


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("most", [8, 16, 32])
@pytest.mark.parametrize("d", [16, 24, 32, 80, 128, 256])
def test_every_byte_of_a_row_is_loaded_once_and_no_other(d: int, most: int, unit: int) -> None:
    """Every byte that is loaded is one of the result's; bytes of a row name their places, and others are 255."""
    if d < most:
        return
    block, count = max(padded(d), 16 * unit), 11
    stride = 32 * -(-(d + most) // 32)
    for wrap in range(0, most, 4):
        memory = torch.full((16 * stride + 64,), 255, dtype=torch.uint8)
        first = -memory.data_ptr() % 32 + wrap
        rows = memory[first:].as_strided((16, d), (stride, 1))
        rows.copy_(torch.arange(d).remainder(251))
        for is_cut in (False, True):
            found = torch.empty(16, block, dtype=torch.uint8)
            columns = torch.empty(block, dtype=torch.int32)
            whole = memory[first:], found.view(torch.int16 if unit == 2 else torch.int8), columns, stride, count
            copy_rows[(1,)](*whole, unit, d // unit, block // unit, most, not is_cut)
            assert columns[:d].sort().values.equal(torch.arange(d, dtype=torch.int32))
            wanted = torch.zeros(16, block, dtype=torch.uint8)
            wanted[: count if is_cut else 16, :d] = rows[0, columns[:d].long()]
            assert torch.equal(found, wanted)


# ---- which caches have such rows


def cache(d: int, heads: int, behind: int = 4, offset: int = 0, heads_first: bool = False) -> torch.Tensor:
    """(rows, heads, positions, D) of 8 bits; ``behind`` bytes follow each head's."""
    memory = torch.zeros(offset + 2 * 48 * heads * (d + behind), dtype=torch.int8)[offset:]
    if heads_first:
        return memory.view(2, heads, 48, d + behind)[..., :d]
    return memory.view(2, 48, heads, d + behind)[..., :d].transpose(1, 2)


KINDS = {
    "as vLLM has them": (cache(128, 8), 32),
    "16 bytes at most": (cache(128, 4), 16),
    "rows that are narrower than 32": (cache(24, 8, 4), 16),
    "key and value of a cell": (cache(64, 4, 72), 32),
    "one head": (cache(128, 1), 0),
    "two heads": (cache(128, 2), 8),
    "cells of two, heads outside": (cache(128, 8, 136, heads_first=True), 8),
    "heads outside": (cache(128, 8, heads_first=True), 0),
    "nothing behind": (cache(128, 8, 0), 0),
    "nothing behind, elsewhere": (cache(128, 8, 0, offset=4), 32),
    "any byte": (cache(128, 8, offset=2), 0),
    "heads that are 2 bytes apart": (cache(128, 16, 2), 0),
    "odd width": (cache(126, 8, 6), 0),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_rows(name: str) -> None:
    found, wanted = KINDS[name]
    assert wrap_bytes(32, found, found) == wanted
    assert wrap_bytes(16, found, found) == min(wanted, 16)
    aligned = cache(128, 8, 0)
    assert wrap_bytes(32, aligned, found) == wrap_bytes(32, found, aligned) == wanted


# ---- calls


PLAIN = Setting(k_form="inline", v_form="inline", heads=8, kv_heads=4, d=16, dv=16)  # 80 bytes of a position
CALLS = {
    "plain": PLAIN,
    "wide heads": replace(PLAIN, d=128, dv=128, heads=16, kv_heads=8),
    "several queries": replace(PLAIN, queries=3),
    "more rows than a tile": replace(PLAIN, queries=9),
    "pages of 1": replace(PLAIN, page_size=1, queries=2),
    "pages of 16": replace(PLAIN, page_size=16, d=64, dv=64, heads=16, kv_heads=8),
    "pages of 3": replace(PLAIN, page_size=3, d=32, dv=32, heads=8, kv_heads=8),
    "left padding": replace(PLAIN, leftpad=(5, 0, 33), queries=2),
    "other rows": replace(PLAIN, shuffled_rows=True, d=80, dv=80),
    "different widths": replace(PLAIN, d=24, dv=96),
    "scales behind keys alone": replace(PLAIN, v_form="key"),
    "cells of two heads": replace(PLAIN, kv_heads=2, d=128, dv=128),
    "scales behind values alone": replace(PLAIN, k_form="head"),
}
MEANINGS = {
    "full": Meaning(),
    "window": Meaning(window_size=(9, 0), sink=torch.linspace(-1, 1, 16)),
    "mods": Meaning(score_mod=lambda s, b, h, i, j: s + 0.01 * (i - j) * (h % 3), mask_mod=lambda b, h, i, j: (i - j) % 7 != 3),
}


@pytest.fixture
def wraps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels' WRAP in all launches that were prepared."""
    attention.clear()
    found: list[int] = []
    prepare = api._constants_of_8_bits

    def noted(*given: Any) -> dict[str, int]:
        made_of = prepare(*given)
        found.append(made_of["WRAP"])
        return made_of

    monkeypatch.setattr(api, "_constants_of_8_bits", noted)
    yield found
    attention.clear()


def check(s: Setting, meaning: Meaning, **options: Any) -> None:
    if meaning.sink is not None:
        meaning = replace(meaning, sink=meaning.sink[: s.heads])
    case = made(s, meaning)
    for _ in range(2):  # a first call, and a warm one
        with poison.enabled():
            out, lse = anyattn.flash_attn_with_kvcache(
                *case.args, return_lse=True, **{"backend": "triton", **case.options, **options}
            )  # fmt: skip
        seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=str(s))


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize(("name", "i"), [(name, i) for i, name in enumerate(CALLS)])
def test_calls_against_the_oracle(name: str, i: int, meaning: str, wraps: list[int]) -> None:
    turn = i + list(MEANINGS).index(meaning)
    s = replace(CALLS[name], dtype=DTYPES[turn % 3], q_dtype=Q_DTYPES[turn // 3 % 3])
    check(s, MEANINGS[meaning], num_splits=(0, 1, 3)[turn % 3])
    assert wraps and all(wraps), wraps


@pytest.mark.parametrize("most", [16, 32])
def test_fronts_of_one_sector_or_half_of_one(most: int, wraps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_config, "_MOST_WRAP", (most,) * 3)
    check(CALLS["wide heads"], Meaning(causal=True))
    assert set(wraps) == {most}


@pytest.mark.parametrize("programs", [1, 3, 24])
@pytest.mark.parametrize("name", ["plain", "pages of 16"])
def test_even_shares(name: str, programs: int, wraps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program visits several heads, each of which is wrapped differently, and shares row tiles with others."""
    monkeypatch.setattr(tile_config, "_few_rows", lambda tiles, rows, dtype: tile_config.Tiles(16, 16, 4, 2))
    monkeypatch.setattr(launch_shape, "_programs", lambda *given: programs)
    for name_of, value in (("_LEAST_SHARED", 0), ("_LEAST_TILES", 1), ("_MERGED_TILES", 10**6), ("_SPARED_TILES", -(10**4))):
        monkeypatch.setattr(launch_shape, name_of, value)
    check(replace(CALLS[name], d=24, dv=40, heads=8, kv_heads=8) if name == "plain" else CALLS[name], Meaning(causal=True), num_splits=0)
    assert wraps and all(wraps)


def test_more_rows_than_these_tiles_have(wraps: list[int]) -> None:
    check(replace(PLAIN, queries=40, cached=(60, 47, 63)), Meaning(causal=True))
    assert wraps == [0] * len(wraps)


@pytest.mark.parametrize("d, wrapped", [(64, 8), (128, 16)])
def test_bits_are_those_of_rows_without_scales_behind_them(d: int, wrapped: int, wraps: list[int]) -> None:
    """But for the order in which a row's products are added."""
    case = made(replace(PLAIN, d=d, dv=d, k_form="inline", v_form="inline"), Meaning(causal=True))
    q, k, v = case.args
    apart = [t.contiguous() for t in (k, v)]
    options = case.options | {"causal": True, "backend": "triton", "return_lse": True}
    out, _ = anyattn.flash_attn_with_kvcache(q, k, v, **options)
    other, _ = anyattn.flash_attn_with_kvcache(q, *apart, **options)
    assert set(wraps) == {0, wrapped}
    exact = anyattn.flash_attn_with_kvcache(q.double().float(), *apart, **{**options, "return_lse": False})
    budget.check("wrapped", out, exact.double(), other)
