"""``VarlenBlockSparseTensors.from_topk``: chosen tiles of packed sequences, against the mask that reads a table of the choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import VarlenBlockSparseTensors, masks
from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.tile_classes import EMPTY, FULL
from tests.support.chosen_blocks import choice, table_of
from tests.support.compiling import fresh
from tests.support.flash_reference import judge, packed

LENGTHS = [(40, 40), (0, 7), (33, 70), (5, 0), (64, 31)]
TILE = (16, 32)


def ends(side: int) -> Tensor:
    return torch.tensor([0, *(n[side] for n in LENGTHS)], dtype=torch.int32).cumsum(0, dtype=torch.int32)


TABLES: dict[str, Any] = {"cu_seqlens_q": ends(0), "cu_seqlens_k": ends(1)}
OFFSETS = torch.tensor([k - q for q, k in LENGTHS])
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.causal(OFFSETS),
    "by head": lambda b, h, q, k: (q + k + h) % 3 != 0,
    "causal by head": lambda b, h, q, k: (k - q <= OFFSETS[b]) & ((q + k + h) % 3 != 0),
}


def chosen(heads: int, k: int = 3, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The choice of each sequence, and all of them one after another."""
    each = [choice((1, heads), lengths, TILE, k, seed + b) for b, lengths in enumerate(LENGTHS)]
    return each, torch.cat(each, 2)[0]


def reading_tables(each: list[Tensor], group: int, mask_mod: Any) -> Any:
    """The mask that reads the choice from a table (sequence, head, row tile, key tile)."""
    rows, columns = (max(ceil_div(n[side], TILE[side]) for n in LENGTHS) for side in (0, 1))
    table = torch.zeros(len(each), each[0].shape[1], rows, columns, dtype=torch.bool)
    for b, indices in enumerate(each):
        one = table_of(indices, ceil_div(LENGTHS[b][1], TILE[1]))[0]
        table[b, :, : one.shape[1], : one.shape[2]] = one

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = table[b, h // group, q // TILE[0], k // TILE[1]]
        return seen if mask_mod is None else seen & mask_mod(b, h, q, k)

    return mask


def check(lists: Any, mask_mod: Any, whole: Any, **options: Any) -> None:
    """Results by the lists, forward and backward, are those of the mask ``whole``."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(int(ends(side)[-1]), h, 16, generator=g).requires_grad_() for h, side in ((4, 0), (2, 1), (2, 1)))
    longest = {"max_seqlen_q": 64, "max_seqlen_k": 70}
    out = anyattn.flash_attn_varlen_func(q, k, v, **TABLES, **longest, mask_mod=mask_mod, block_sparse_tensors=lists, **options)
    dout = torch.randn(out.shape, generator=g)
    got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))}
    judge(packed(*(t.detach() for t in (q, k, v)), **TABLES), got, lambda t: {"mask_mod": whole}, dout=dout)


@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_the_mask_that_reads_a_table(name: str, layout: str) -> None:
    """Tiles of each K/V head, of each query head, of all heads; listed tiles are dropped and full as the mask says."""
    for heads in (2, 4, 1):
        each, indices = chosen(heads)
        lists = VarlenBlockSparseTensors.from_topk(indices, tile=TILE, **TABLES, mask_mod=MASKS[name], layout=layout).validate()
        group = 4 if heads == 1 else 4 // heads
        whole = reading_tables(each, group, MASKS[name])
        if "head" in name and heads == 2:
            with pytest.raises(ValueError, match="depends on the query head h"):
                check(lists, MASKS[name], whole)
            continue
        check(lists, MASKS[name], whole)
        if "head" in name:
            assert lists.full_block_cnt is None
            continue
        of_table = anyattn.compute_varlen_block_sparsity(*TILE, heads, reading_tables(each, 1, MASKS[name]), **TABLES)
        assert torch.equal(lists.classes(), of_table.classes()) and FULL in lists.classes() and EMPTY in lists.classes()


def test_counts() -> None:
    _, indices = chosen(2, k=4)
    counts = torch.randint(-1, 5, indices.shape[:2], generator=torch.Generator().manual_seed(1))
    found = VarlenBlockSparseTensors.from_topk(indices, counts=counts, tile=TILE, **TABLES)
    shortened = torch.where(torch.arange(4) < counts[..., None], indices, -1)
    assert torch.equal(found.classes(), VarlenBlockSparseTensors.from_topk(shortened.to(torch.int32), tile=TILE, **TABLES).classes())


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"indices": torch.zeros(1, 12, 2)}, TypeError, "indices is torch.float32"),
        ({"indices": torch.zeros(12, 2, dtype=torch.int64)}, ValueError, r"indices has shape \(12, 2\); wanted 3 dimensions"),
        (
            {"indices": torch.zeros(1, 9, 2, dtype=torch.int64)},
            ValueError,
            "indices has 9 row tiles, but the lengths in tiles",
        ),
        ({"indices": torch.full((1, 11, 2), 2)}, ValueError, r"indices\[0, 0, 0\] is 2, but sequence 0 has 2 key tiles"),
        ({"counts": torch.full((1, 11), 3)}, ValueError, r"counts\[0, 0\] is 3, but indices has 2 entries"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is None"),
        ({"layout": "wide"}, ValueError, "layout is 'wide'"),
    ],
)
def test_arguments_that_cannot_be(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"indices": torch.full((1, 11, 2), -1), "tile": TILE, **TABLES}
    with pytest.raises(error, match=words):
        VarlenBlockSparseTensors.from_topk(**good | wrong)


def test_compiled_code_refuses() -> None:
    call = lambda indices: VarlenBlockSparseTensors.from_topk(indices, tile=TILE, **TABLES)
    with pytest.raises(Exception, match=r"from_topk is called inside torch.compile; wanted a call outside"):
        fresh(call)[0](chosen(1)[1])
