"""SeqlenInfo and its relatives: worked examples, vectors of a whole batch, slices of packed tensors, and CuTe DSL integers."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from anyattn.sequences.seqlen_info import SeqlenInfo, SeqlenInfoQK, SeqlenInfoQKNewK, aligned_offset
from tests.support.processes import python

CU = [0, 100, 150, 350]


def test_published_examples() -> None:
    infos = [SeqlenInfo.create(b, 0, CU, tile=128) for b in range(3)]
    assert [(i.offset, i.seqlen) for i in infos] == [(0, 100), (100, 50), (150, 200)]
    assert infos[2].offset_padded == 512
    new = SeqlenInfoQKNewK.create(0, 10, 4096, 10, seqused_k=[1000], leftpad_k=[50])
    assert (new.seqlen_k_og, new.seqlen_k, new.seqlen_rotary, new.offset_k) == (950, 960, 1000, 50)


def test_padded_offsets_leave_room_and_keep_tiles_whole() -> None:
    rng = random.Random(1)
    for _ in range(500):
        tile = rng.choice((1, 8, 64, 128))
        lengths = [rng.choice((0, 1, 7, tile, tile + 1, 300)) for _ in range(rng.randrange(1, 9))]
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        begins = [SeqlenInfo.create(b, 0, ends, tile=tile).offset_padded for b in range(len(lengths))]
        assert all(b % tile == 0 for b in begins)
        ends_in_tiles = [b + -(-n // tile) * tile for b, n in zip(begins, lengths)]
        assert all(e <= b for e, b in zip(ends_in_tiles, begins[1:]))
        assert ends_in_tiles[-1] <= aligned_offset(ends[-1], len(lengths), tile)


def test_seqused_wins_and_flags_say_what_was_given() -> None:
    info = SeqlenInfoQK.create(1, 9, 11, CU, None, [5, 6, 7], [1, 2, 3], tile_m=64, tile_n=128)
    assert (info.seqlen_q, info.seqlen_k, info.offset_q, info.offset_k) == (6, 2, 100, 0)
    assert (info.has_cu_seqlens_q, info.has_cu_seqlens_k, info.has_seqused_q, info.has_seqused_k) == (True, False, True, True)
    static = SeqlenInfoQK.create(1, 9, 11, tile_m=64, tile_n=128)
    assert (static.seqlen_q, static.seqlen_k, static.padded_offset_q, static.num_n_blocks) == (9, 11, 0, 1)


def test_a_whole_batch_at_once_is_every_entry() -> None:
    cu, used, pad, blocks = torch.tensor(CU), torch.tensor([90, 50, 7]), torch.tensor([3, 0, 5]), torch.tensor([0, 2, 3, 7])
    batch = torch.arange(3)
    vector = SeqlenInfoQK.create(batch, 0, 0, cu, cu, used, None, blocks, tile_m=64, tile_n=128)
    growing = SeqlenInfoQKNewK.create(batch, 4, 512, 0, cu, cu, cu, used, used, pad)
    for b in range(3):
        one = SeqlenInfoQK.create(b, 0, 0, CU, CU, used.tolist(), None, blocks.tolist(), tile_m=64, tile_n=128)
        assert tuple(int(f[b]) if isinstance(f, torch.Tensor) else f for f in astuple(vector)) == astuple(one)
        one_growing = SeqlenInfoQKNewK.create(b, 4, 512, 0, CU, CU, CU, used.tolist(), used.tolist(), pad.tolist())
        assert tuple(int(f[b]) if isinstance(f, torch.Tensor) else f for f in astuple(growing)) == astuple(one_growing)


def test_new_keys_by_length_by_table_or_none() -> None:
    assert SeqlenInfoQKNewK.create(1, 1, 64, 0, seqused_k=[3, 9]).seqlen_k == 9
    assert SeqlenInfoQKNewK.create(1, 1, 64, 2, seqused_k=[3, 9]).seqlen_k == 11
    by_table = SeqlenInfoQKNewK.create(1, 1, 64, 0, cu_seqlens_k_new=[0, 4, 9], seqused_k=[3, 9])
    assert (by_table.seqlen_k_new, by_table.offset_k_new, by_table.seqlen_k) == (5, 4, 14)
    packed = SeqlenInfoQKNewK.create(1, 1, 64, 0, cu_seqlens_k=CU, leftpad_k=[0, 7, 0], seqlens_rotary=[0, 33, 0])
    assert (packed.offset_k, packed.seqlen_k_og, packed.seqlen_rotary) == (107, 43, 33)
    static = SeqlenInfoQKNewK.create(0, 1, 64, 3, leftpad_k=[10])
    assert (static.seqlen_k_og, static.seqlen_k, static.seqlen_rotary) == (54, 57, 64)


def test_offset_batch_packed_padded_multiple_ragged() -> None:
    rows = torch.arange(350)
    info = SeqlenInfo.create(1, 0, CU, tile=128)
    assert info.offset_batch(rows, 1, 0)[0] == 100 and len(info.offset_batch(rows, 1, 0)) == 250
    assert info.offset_batch(rows, 1, 0, ragged=True).tolist() == list(range(100, 150))
    assert info.offset_batch(torch.arange(700), 1, 0, multiple=2, ragged=True).tolist() == list(range(200, 300))
    assert info.offset_batch(torch.arange(1024), 1, 0, padded=True)[0] == 256
    dense = torch.arange(24).view(4, 3, 2)  # (rows, batch, head)
    plain = SeqlenInfo.create(2, 4, seqused=[1, 2, 3], tile=128)
    assert torch.equal(plain.offset_batch(dense, 2, 1), dense[:, 2])
    assert torch.equal(plain.offset_batch(dense, 2, 1, ragged=True), dense[:3, 2])
    both = SeqlenInfoQK.create(2, 0, 4, CU, None, tile_m=64, tile_n=64)
    assert both.offset_batch_Q(rows, 2, 0, ragged=True).tolist() == list(range(150, 350))
    assert torch.equal(both.offset_batch_K(dense, 2, 1), dense[:, 2])


def test_a_tile_is_asked_for() -> None:
    with pytest.raises(TypeError, match="tile"):
        SeqlenInfo.create(0, 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="tile_m"):
        SeqlenInfoQK.create(0, 1, 1)  # type: ignore[call-arg]


KERNEL = """
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor

from anyattn.geometry.block_info import BlockInfo
from anyattn.geometry.seqlen_info import SeqlenInfo, SeqlenInfoQK, SeqlenInfoQKNewK


@cute.kernel
def kernel(cu: cute.Tensor, used: cute.Tensor, out: cute.Tensor, left: Int32, right: Int32, splits: Int32):
    b, m, n = cute.arch.block_idx()
    info = SeqlenInfoQK.create(b, 128, 256, cu, cu, None, used, cu, tile_m=128, tile_n=64)
    one = SeqlenInfo.create(b, 128, cu, used, tile=64)
    growing = SeqlenInfoQKNewK.create(b, 1, 256, 4, seqused_k=used, leftpad_k=used)
    blocks = BlockInfo(128, 64, True, True, True, left, right, 4, splits)
    lo, hi = blocks.get_n_block_min_max(info, m, n)
    found = [lo, hi, *blocks.get_m_block_min_max(info, n), *blocks.get_n_block_k_new_min_max(growing, m, n)]
    found += [blocks.get_n_block_min_causal_local_mask(info, m, lo), blocks.get_n_block_min_before_local_mask(info, m, lo)]
    found += [info.padded_offset_q, info.block_offset, info.block_idx_offset, info.num_n_blocks, one.offset_padded, growing.seqlen_rotary]
    rows = info.offset_batch_Q(out, b, 0)
    for i in cutlass.range_constexpr(len(found)):
        rows[i] = found[i]
    info.offset_batch_K(out, b, 0, padded=True, multiple=2, ragged=True)[0] = lo


@cute.jit
def launch(cu: cute.Tensor, used: cute.Tensor, out: cute.Tensor, left: Int32, right: Int32, splits: Int32):
    kernel(cu, used, out, left, right, splits).launch(grid=[4, 4, 4], block=[1, 1, 1])


tensors = [make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),)) for _ in range(3)]
cute.compile(launch, *tensors, Int32(1), Int32(1), Int32(1))
"""


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_the_formulas_compile_in_a_kernel(tmp_path: Path) -> None:
    """The same formulas on CuTe DSL integers, cross-compiled for Hopper; in a process of its own, for the target is read at import."""
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    done = python(str(script), CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
