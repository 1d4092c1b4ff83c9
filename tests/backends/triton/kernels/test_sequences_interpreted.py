"""Sequences of different lengths by Triton's interpreter: the tests of ``tests/entry_points/test_flash_varlen.py``, on shorter ones.

Run by ``test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from tests.entry_points import test_flash_varlen as varlen
from tests.entry_points.test_flash_varlen import (  # noqa: F401
    test_aux_tensors,
    test_nothing_at_all,
    test_rows_behind_the_last_sequence,
    test_shared_pages,
)
from tests.support import sequences as seq
from tests.support.covering import few

# as many, with empty ones on either side and on both, and several tiles of one
varlen.LENGTHS = ([5, 0, 17, 35, 1, 0, 0], [5, 3, 0, 30, 18, 0, 0])
NAMES = ("causal", "window", "alibi", "sink")


@pytest.mark.parametrize(
    "name", few(varlen.MEANINGS, "causal", "shifted band", "empty band", "alibi per entry", "mask by entry", "everything")
)
def test_packed(name: str) -> None:
    meaning = varlen.MEANINGS[name]()
    batch = seq.ragged(*varlen.LENGTHS, dv=8)
    got, shared = varlen.results(batch, meaning, varlen.packed_call)
    seq.judge(got, batch, meaning, shared=shared, label=name)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_padded_with_garbage_behind(name: str) -> None:
    varlen.test_padded_with_garbage_behind(name)


@pytest.mark.parametrize(("name", "page_size"), [("causal", 3), ("everything", 16), ("causal", 64)])
def test_pages(name: str, page_size: int) -> None:
    varlen.test_pages(name, page_size)


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16], torch.bfloat16), ids=str)
def test_halves(dtype: torch.dtype) -> None:
    meaning = varlen.MEANINGS["everything"]()
    batch = seq.ragged(*varlen.LENGTHS, dtype=dtype)
    got, shared = varlen.results(batch, meaning, varlen.packed_call, int_type=torch.int64)
    seq.judge(got, batch, meaning, shared=shared)


@pytest.mark.parametrize(("kind", "heads", "kv_heads", "d", "dv"), [("peaky", 5, 1, 24, 40), ("coded", 3, 3, 8, 16)])
def test_kinds(kind: str, heads: int, kv_heads: int, d: int, dv: int) -> None:
    meaning = seq.Meaning(causal=True, window_size=(20, 0))
    batch = seq.ragged([50, 3], [40, 30], heads, kv_heads, d, dv, kind=kind)
    got, _ = varlen.results(batch, meaning, varlen.packed_call)
    seq.judge(got, batch, meaning)


@pytest.mark.parametrize(("layout", "tile"), [("flat", (16, 16)), ("padded", (64, 32)), ("flat", (48, 80))], ids=str)
def test_block_lists(layout: str, tile: tuple[int, int]) -> None:
    mask = lambda b, h, i, j: (i >= j) & (i - j < 12 + b)
    lengths = [5, 0, 70, 33]
    batch = seq.ragged(lengths, lengths, 2, 1)
    cu = seq.ends(lengths)
    lists = varlen.anyattn.compute_varlen_block_sparsity(*tile, None, mask, cu_seqlens_q=cu, cu_seqlens_k=cu, layout=layout)
    meaning = seq.Meaning(mask_mod=mask, causal=True, window_size=(7, 0), softcap=3.0)
    got, shared = varlen.results(batch, meaning, varlen.packed_call, block_sparse_tensors=lists)
    seq.judge(got, batch, meaning, shared=shared)


@pytest.mark.parametrize("name", few(NAMES, "window", "sink"))
def test_packed_is_each_sequence_on_its_own_to_the_bit(name: str) -> None:
    batch = seq.ragged(*varlen.LENGTHS, 2, 1)
    meaning = varlen.MEANINGS[name]()
    for field in ("sink", "alibi_slopes"):
        if (given := getattr(meaning, field)) is not None:
            setattr(meaning, field, given[:2])
    got, _ = varlen.results(batch, meaning, varlen.packed_call)
    for b, (q, k, v, dout) in enumerate(zip(batch.q, batch.k, batch.v, batch.dout, strict=True)):
        leaves = [t.transpose(0, 1)[None].clone().requires_grad_() for t in (q, k, v)]
        out, lse = varlen.anyattn.flash_attn_func(*leaves, return_lse=True, **meaning.options())
        grads = torch.autograd.grad(out, leaves, dout.transpose(0, 1)[None])
        for what, one in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
            assert torch.equal(got[what][b], one[0].transpose(0, 1)), (name, b, what)
        assert torch.equal(got["lse"][b], lse[0]), (name, b)


def test_batch_permuted_is_output_permuted_to_the_bit() -> None:
    batch = seq.ragged(*varlen.LENGTHS, 2, 1)
    order = [3, 0, 6, 5, 2, 4, 1]
    other = seq.Ragged(*([part[i] for i in order] for part in (batch.q, batch.k, batch.v, batch.dout)))
    meaning = seq.Meaning(window_size=(9, 2), softcap=3.0)
    one, two = (varlen.results(b, meaning, varlen.packed_call)[0] for b in (batch, other))
    for what in one:
        assert all(torch.equal(one[what][i], two[what][at]) for at, i in enumerate(order)), what
