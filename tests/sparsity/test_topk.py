"""``BlockMask.from_topk``: attention over chosen blocks, forward and backward, against the mask that reads a table of the choice."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

import anyattn
from anyattn import BlockMask, masks
from anyattn.arithmetic import ceil_div
from anyattn.sparsity.block_mask import LISTS, _like
from tests.support.chosen_blocks import choice, mask_of, table_of
from tests.support.compiling import fresh, same
from tests.support.flex_calls import judge

MASKS: dict[str, Any] = {
    "none": None,
    "window": masks.sliding_window(9, 3),
    "a product": lambda b, h, q, k: (q * k) % 5 != 0,
    "by head": lambda b, h, q, k: (q + k + h) % 3 != 0,
    "by entry": lambda b, h, q, k: k - q < 7 * b + 1,
    "everything by head": lambda b, h, q, k: h >= 0,
}


@dataclass(frozen=True)
class Case:
    """listed: B and H of the indices. group: query heads per K/V head, of two."""

    lengths: tuple[int, int] = (70, 50)
    tile: tuple[int, int] = (16, 16)
    k: int = 3
    listed: tuple[int, int] = (2, 2)
    group: int = 1
    causal: bool = False
    mask: str = "none"
    with_counts: bool = False
    seed: int = 0

    def made(self) -> tuple[Tensor, Tensor | None, BlockMask, Any]:
        indices = choice(self.listed, self.lengths, self.tile, self.k, self.seed)
        g = torch.Generator().manual_seed(self.seed + 1)
        counts = torch.randint(-1, self.k + 1, indices.shape[:3], generator=g) if self.with_counts else None
        mask_mod = MASKS[self.mask]
        block_mask = BlockMask.from_topk(
            indices, counts=counts, BLOCK_SIZE=self.tile, seq_lengths=self.lengths, causal=self.causal, mask_mod=mask_mod
        )
        group = 1 if self.listed[1] == 2 * self.group else self.group
        table = table_of(indices, ceil_div(self.lengths[1], self.tile[1]), counts)
        return indices, counts, block_mask, mask_of(table, self.tile, group, self.lengths, self.causal, mask_mod)

    def rows(self) -> list[Tensor]:
        g = torch.Generator().manual_seed(self.seed + 2)
        shapes = ((2, 2 * self.group, self.lengths[0], 16), *((2, 2, self.lengths[1], d) for d in (16, 8)))
        return [torch.randn(shape, generator=g) for shape in shapes]


def check(case: Case, **options: Any) -> None:
    _, _, block_mask, mask = case.made()
    judge(*case.rows(), mask=mask, block_mask=block_mask, **options)


CASES = {
    "as many queries as keys": Case((64, 64), causal=True),
    "more queries than keys": Case((90, 41), causal=True),
    "more keys than queries": Case((33, 90), (16, 32), causal=True),
    "blocks of other sizes": Case((100, 70), (32, 16), k=2, mask="window"),
    "rows without a block": Case(k=1, with_counts=True),
    "nothing chosen": Case(k=0),
    "more numbers than blocks": Case(k=11, causal=True),
    "shorter than a block": Case((9, 5), (64, 64), causal=True),
    "one key": Case((9, 1), (16, 16)),
    "no keys": Case((9, 0), (16, 16)),
    "no queries": Case((0, 9), (16, 16)),
    "of K/V heads": Case(group=3, causal=True),
    "of K/V heads, by query head": Case(group=2, mask="by head"),
    "of query heads": Case(listed=(2, 4), group=2, mask="by head", causal=True),
    "of all entries": Case(listed=(1, 2), mask="by entry"),
    "of all heads": Case(listed=(2, 1), group=2, mask="everything by head"),
    "a mask without ranges": Case(mask="a product", causal=True, with_counts=True),
    "of each query": Case((40, 70), (1, 16), group=2, causal=True),
    "of each query, by query head": Case((40, 40), (1, 32), group=2, mask="by head", with_counts=True),
    "of each query, single keys": Case((40, 70), (1, 1), k=9, group=3, causal=True),
    "of each query, many small blocks": Case((20, 250), (1, 16), k=9, group=3, mask="a product", with_counts=True),
    "of each query, of all heads": Case((21, 150), (1, 32), k=4, listed=(1, 1), group=2, causal=True),
    "of each query, of query heads": Case((20, 150), (1, 16), k=5, listed=(2, 4), group=2, causal=True),
    "of each query, each head with keys": Case((20, 150), (1, 64), k=2, causal=True, mask="window"),
    "of each query, blocks of other sizes": Case((20, 150), (1, 48), k=3, group=2, causal=True),
    "small blocks": Case((70, 150), (16, 16), k=7, group=2, mask="by head", causal=True),
    "the largest blocks": Case((300, 260), (256, 128), k=2, causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_mask_that_reads_a_table(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", ["as many queries as keys", "of K/V heads", "a mask without ranges"])
def test_lists_are_those_of_the_mask_that_reads_a_table(name: str) -> None:
    """Block for block, both directions: dropped, partial and full as ``create_block_mask`` finds them."""
    case = CASES[name]
    indices, _, found, mask = case.made()
    if case.group > 1:
        table = table_of(indices, ceil_div(case.lengths[1], case.tile[1]))
        mask = mask_of(table, case.tile, 1, case.lengths, case.causal)
    wanted = anyattn.create_block_mask(mask, 2, 2, *case.lengths, device="cpu", BLOCK_SIZE=case.tile)
    for name in LISTS:
        room = getattr(found, name).shape[-1] if name in ("kv_indices", "full_kv_indices") else None
        assert torch.equal(getattr(found, name), getattr(wanted, name)[..., :room]), name


def test_forms_of_indices() -> None:
    """int32, any strides, and no lists of columns: the same mask."""
    case = Case(causal=True, with_counts=True)
    indices, counts, wanted, _ = case.made()
    strided = indices.to(torch.int32).transpose(1, 3).contiguous().transpose(1, 3)
    options: dict[str, Any] = {"BLOCK_SIZE": case.tile, "seq_lengths": case.lengths, "causal": True, "counts": counts}
    found = BlockMask.from_topk(strided, **options)
    assert all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in LISTS)
    short = BlockMask.from_topk(indices, compute_q_blocks=False, **options)
    assert short.q_indices is None and torch.equal(short.kv_indices, wanted.kv_indices)
    q, k, v = (t.requires_grad_() for t in case.rows())
    grads = [torch.autograd.grad(anyattn.flex_attention(q, k, v, block_mask=m).sin().sum(), (q, k, v)) for m in (wanted, short)]
    assert all(map(torch.equal, *grads))
    with torch.inference_mode():
        again = BlockMask.from_topk(indices, **options)
        assert again.may_share and torch.equal(
            anyattn.flex_attention(q, k, v, block_mask=again), anyattn.flex_attention(q, k, v, block_mask=wanted)
        )
    assert again[:, :, 1:3].shape == (2, 2, 32, 50) and again._adjust(40, 40).seq_lengths == (40, 40)


def test_torch_gets_lists_with_room_for_all_blocks() -> None:
    _, _, mask, _ = Case((64, 90)).made()
    assert [t.shape[-1] for t in (mask.kv_indices, mask.full_kv_indices)] == [3, 3]
    fields = [t for t in mask.as_tuple() if isinstance(t, Tensor) and t.ndim == 4]
    assert [t.shape[-1] for t in fields] == [6, 6, 4, 4]
    assert torch.equal(fields[0][..., :3], mask.kv_indices) and not fields[0][..., 3:].any()
    wide = anyattn.create_block_mask(masks.causal(), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert any(t is wide.kv_indices for t in wide.as_tuple())


@pytest.mark.slow
def test_torch_computes_with_chosen_blocks() -> None:
    """It sees the same keys: values name them, and all scores are equal."""
    mask = BlockMask.from_topk(choice((1, 2), (128, 192), (32, 32), 2), BLOCK_SIZE=32, seq_lengths=(128, 192), causal=True)
    q, k, v = torch.zeros(1, 2, 128, 16), torch.zeros(1, 2, 192, 16), torch.eye(192).expand(1, 2, 192, 192)
    found = torch.compile(torch_flex.flex_attention)(q, k, v, block_mask=mask)
    assert torch.equal(found != 0, anyattn.flex_attention(q, k, v, block_mask=mask) != 0)


def test_lists_that_are_written_to_are_read_again() -> None:
    case = Case((64, 64))
    _, _, mask, _ = case.made()
    q, k, v = case.rows()
    before = anyattn.flex_attention(q, k, v, block_mask=mask)
    mask.full_kv_num_blocks.zero_()
    assert before.any() and not mask.may_share and not anyattn.flex_attention(q, k, v, block_mask=mask).any()


BAD = [
    ({"indices": [[0]]}, TypeError, "indices is a list"),
    ({"indices": torch.zeros(1, 1, 4, 2)}, TypeError, r"indices is torch.float32; wanted int32 or int64 .*topk\(k\).indices"),
    ({"indices": torch.zeros(1, 1, 4, 2, dtype=torch.int16)}, TypeError, r"indices is torch.int16; .*to\(torch.int32\)"),
    ({"indices": torch.zeros(4, 2, dtype=torch.int64)}, ValueError, r"indices has shape \(4, 2\); wanted 4 dimensions"),
    ({"indices": torch.zeros(1, 1, 3, 2, dtype=torch.int64)}, ValueError, "indices has 3 query blocks, but 60 queries in blocks"),
    ({"indices": torch.full((1, 1, 4, 2), 9)}, ValueError, r"indices\[0, 0, 0, 0\] is 9, but there are 5 key blocks; wanted 0 to 4, or -1"),
    ({"counts": [1]}, TypeError, "counts is a list"),
    ({"counts": torch.ones(1, 1, 4)}, TypeError, "counts is torch.float32"),
    ({"counts": torch.ones(1, 4, dtype=torch.int32)}, ValueError, r"counts has shape \(1, 4\); wanted \(1, 1, 4\)"),
    ({"counts": torch.full((1, 1, 4), 3)}, ValueError, r"counts\[0, 0, 0\] is 3, but indices has 2 entries for each row; wanted at most 2"),
    ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE"),
    ({"BLOCK_SIZE": 16.0}, TypeError, "BLOCK_SIZE"),
    ({"seq_lengths": 60}, TypeError, "seq_lengths is 60; wanted"),
    ({"seq_lengths": (60, -1)}, ValueError, r"seq_lengths\[1\] is -1"),
    ({"causal": "yes"}, TypeError, "causal is 'yes'"),
    ({"mask_mod": 3}, TypeError, "mask"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "words"), BAD, ids=[words[:40] for *_, words in BAD])
def test_arguments_that_cannot_be(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"indices": torch.zeros(1, 1, 4, 2, dtype=torch.int64), "BLOCK_SIZE": 16, "seq_lengths": (60, 70)}
    with pytest.raises(error, match=words):
        BlockMask.from_topk(**good | wrong)


def test_entries_behind_a_count_are_not_read() -> None:
    indices = torch.tensor([[[[0, 99]]]])
    mask = BlockMask.from_topk(indices, counts=torch.ones(1, 1, 1, dtype=torch.int32), BLOCK_SIZE=16, seq_lengths=(16, 32))
    assert mask.to_dense().tolist() == [[[[1, 0]]]]


def test_tensors_without_values() -> None:
    """Fake and meta indices make lists without values; those of a transform are refused."""
    make = lambda indices: BlockMask.from_topk(indices, BLOCK_SIZE=16, seq_lengths=(32, 48), causal=True).kv_indices
    zeros = lambda *more, **where: torch.zeros(*more, 1, 1, 2, 2, dtype=torch.int64, **where)
    with FakeTensorMode():
        assert make(zeros()).shape == (1, 1, 2, 2)
    assert make(zeros(device="meta")).is_meta
    with pytest.raises(TypeError, match=r"indices is a tensor of torch.vmap"):
        torch.func.vmap(make)(zeros(3))


def test_choices_inside_transforms() -> None:
    """A choice by scores that ``torch.func.grad`` differentiates."""
    q = torch.randn(1, 1, 48, 8, generator=torch.Generator().manual_seed(0))

    def loss(q: Tensor) -> Tensor:
        blocks = q.unflatten(2, (3, 16)).mean(3)
        mask = BlockMask.from_topk((blocks @ blocks.mT).topk(2).indices, BLOCK_SIZE=16, seq_lengths=(48, 48), causal=True)
        return anyattn.flex_attention(q, q, q, block_mask=mask).square().sum()

    leaf = q.clone().requires_grad_()
    assert torch.equal(torch.func.grad(loss)(q), torch.autograd.grad(loss(leaf), leaf)[0])


def test_lists_of_other_heads_are_refused() -> None:
    q, k = torch.randn(1, 6, 32, 8), torch.randn(1, 3, 32, 8)
    of_heads = lambda n: torch.zeros(1, n, 2, 1, dtype=torch.int32)
    mask = BlockMask.from_topk(of_heads(2), BLOCK_SIZE=16, seq_lengths=(32, 32))
    with pytest.raises(ValueError, match=r"block_mask has heads 2 but query has 6; wanted 1 \(shared\), 3 \(one for each K/V head\) or 6"):
        anyattn.flex_attention(q, k, k, block_mask=mask, enable_gqa=True)
    by_head = lambda b, h, i, j: (i >= j) & (h > 0)
    listed = anyattn.create_block_mask(by_head, 1, 3, 32, 32, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match="block_mask has lists of 3 heads, the query has 6, and its mask_mod depends on the query head h"):
        anyattn.flex_attention(q, k, k, block_mask=listed, enable_gqa=True)


def test_lists_that_torch_made_are_never_of_key_value_heads_of_masks_by_head() -> None:
    """Without lists of full blocks too: h of 0 and 1 has decided which blocks are empty. A warm call of chosen blocks changes nothing."""
    limit = torch.tensor([3, 30, 9, 20])
    by_head = lambda b, h, i, j: (i - j).abs() <= limit[h]
    sizes: dict[str, Any] = {"device": "cpu", "BLOCK_SIZE": 16, "separate_full_blocks": False}
    q, k = torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8)
    call = lambda mask: anyattn.flex_attention(q, k, k, block_mask=mask, enable_gqa=True)
    call(BlockMask.from_topk(choice((1, 2), (32, 32), (16, 16), 1), BLOCK_SIZE=16, seq_lengths=(32, 32), mask_mod=by_head))
    ours, torchs = (make(by_head, 1, 2, 32, 32, **sizes) for make in (anyattn.create_block_mask, torch_flex.create_block_mask))
    limit.add_(1)  # a list no longer follows
    for mask in (ours, ours.to("cpu"), ours[:, :], torchs, BlockMask.from_torch(torchs)):
        for attend in (call, fresh(call)[0]):
            with pytest.raises(Exception, match="block_mask has lists of 2 heads, the query has 4, and its mask_mod depends on"):
                attend(mask)


def test_slices_of_heads() -> None:
    """Lists of K/V heads with a mask by query head: the first heads keep their numbers, others are refused."""
    case = Case((64, 64), group=2, mask="by head")
    _, _, block_mask, mask = case.made()
    q, k, v = case.rows()
    judge(q[:, :2], k[:, :1], v[:, :1], mask=mask, block_mask=block_mask[:, :1])
    judge(q[:, :, 16:], k, v, mask=lambda b, h, i, j: mask(b, h, i + 16, j), block_mask=block_mask[:, :, 1:])
    for index in (slice(1, None), [1, 0], 1):
        with pytest.raises(
            ValueError, match=r"its heads may be K/V heads, .* wanted the first heads, mask\[:, :n\], or a slice of the indices"
        ):
            block_mask[:, index]
    _, _, block_mask, same_of_heads = Case((64, 64), group=2, mask="window").made()
    judge(q[:, 2:], k[:, 1:], v[:, 1:], mask=lambda b, h, i, j: same_of_heads(b, h + 2, i, j), block_mask=block_mask[:, 1:])


def test_copies_of_lists_that_were_written_to_are_not_shared() -> None:
    """A copy counts no writes, but its lists are no longer known to be ascending."""
    _, _, mask, _ = Case((64, 64)).made()
    mask.kv_indices.add_(0)
    copied = {name: t.clone() for name, t in vars(mask).items() if isinstance(t, Tensor)}
    assert not _like(mask, copied).may_share and not copy.deepcopy(mask).may_share


def test_lists_of_key_value_heads_in_flash_attention() -> None:
    """``block_sparse_tensors`` per K/V head, and the same lists copied for each query head."""
    indices = choice((1, 2), (64, 64), (16, 16), 2)
    lists = BlockMask.from_topk(indices, BLOCK_SIZE=16, seq_lengths=(64, 64)).block_sparse()
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 64, n, 16, generator=g).requires_grad_() for n in (6, 2, 2))
    outs = [anyattn.flash_attn_func(q, k, v, block_sparse_tensors=one) for one in (lists, lists.of_heads(6))]
    assert torch.equal(*outs) and all(map(torch.equal, *(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in outs)))


cases = st.builds(
    Case,
    lengths=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    tile=st.tuples(st.sampled_from((1, 16, 32, 64)), st.sampled_from((1, 16, 48, 64))),
    k=st.integers(0, 6),
    listed=st.sampled_from(((2, 2), (1, 2), (2, 1), (1, 1))),
    group=st.sampled_from((1, 2, 3)),
    causal=st.booleans(),
    mask=st.sampled_from(list(MASKS)),
    with_counts=st.booleans(),
    seed=st.integers(0, 99),
)


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(cases)
def test_any_choice(case: Case) -> None:
    """The blocks that are listed, and those among them that are full, are the chosen ones as far as the mask shows them."""
    _, _, mask, whole = case.made()
    (rows, columns), (tile_m, tile_n) = case.lengths, case.tile
    heads = 2 * case.group
    b, h, q, k = (torch.arange(n).view(shape) for n, shape in zip((2, heads, rows, columns), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))))
    visible = torch.broadcast_to(whole(b, h, q, k), (2, heads, rows, columns))
    listed = mask.to_dense().bool().repeat_interleave(heads // mask.shape[1], 1).expand(2, -1, -1, -1)
    wide = lambda t: t.repeat_interleave(tile_m, -2).repeat_interleave(tile_n, -1)[..., :rows, :columns]
    assert not (visible & ~wide(listed)).any()
    if mask.full_kv_num_blocks is not None:
        full = anyattn.sparsity.lists.grid_of_lists(*(getattr(mask, name) for name in LISTS[:4]), mask.to_dense().shape[-1]) == 2
        full = full.repeat_interleave(heads // mask.shape[1], 1).expand(2, -1, -1, -1)
        assert bool(visible[wide(full)].all())
    mask.block_sparse().validate()
    assert mask.kv_indices.shape[-1] == min(max(case.k, 1), ceil_div(columns, tile_n)) and (mask.q_indices is None) == (tile_m == 1)


# ---- compiled


def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor | None, width: Tensor | None = None) -> Tensor:
    inner = None if width is None else lambda b, h, i, j: i - j < width[i]
    lengths = (q.shape[2], k.shape[2])
    mask = BlockMask.from_topk(indices, BLOCK_SIZE=(16, 32), seq_lengths=lengths, counts=counts, causal=True, mask_mod=inner)
    return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def arguments(length: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, h, length, 16, generator=g).requires_grad_() for h in (4, 2, 2)]
    return [*rows, choice((2, 2), (length, length), (16, 32), 3, seed)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_new_indices_compile_nothing(backend: str, has_mask: bool) -> None:
    compiled, graphs = fresh(attend, backend)
    for seed in range(3):
        *rows, indices = arguments(70, seed)
        counts = torch.randint(-1, 4, indices.shape[:3], generator=torch.Generator().manual_seed(seed))
        width = torch.arange(70) % (7 + seed) if has_mask else None
        assert same(compiled, attend, (*rows, indices, counts, width), rows)
    assert graphs.frame_count == 1


def test_compiled_choices_of_single_queries() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        mask = BlockMask.from_topk(indices, BLOCK_SIZE=(1, 16), seq_lengths=(q.shape[2], k.shape[2]), causal=True)
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled, graphs = fresh(attend)
    for seed in range(3):
        *rows, _ = arguments(40, seed)
        assert same(compiled, attend, (*rows, choice((2, 2), (40, 40), (1, 16), 2, seed)), rows)
    assert graphs.frame_count == 1


def test_choices_of_open_lengths() -> None:
    compiled, graphs = fresh(attend, dynamic=True)
    for length in (70, 99, 130):
        *rows, indices = arguments(length, length)
        assert same(compiled, attend, (*rows, indices, None), rows)
    assert graphs.frame_count == 1


def test_choices_of_two_open_lengths_and_a_captured_one() -> None:
    """The offset of causal, and a number that the mask captures, are symbols of the graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        reach, lengths = k.shape[2] - 9, (q.shape[2], k.shape[2])
        inner = lambda b, h, i, j: i - j < reach
        mask = BlockMask.from_topk(indices, BLOCK_SIZE=(16, 32), seq_lengths=lengths, causal=True, mask_mod=inner)
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled, graphs = fresh(attend, dynamic=True)
    for seed, lengths in enumerate([(70, 99), (99, 130), (130, 70), (33, 140)]):
        q = arguments(lengths[0], seed)[0]
        _, k, v, _ = arguments(lengths[1], seed)
        assert same(compiled, attend, (q, k, v, choice((2, 2), lengths, (16, 32), 6, seed)), (q, k, v))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": torch.zeros(2, 2, 5, 3)}, "indices is torch.float32"),
        ({"indices": torch.full((2, 2, 5, 3), 7)}, "is 7, but there are 3 key blocks"),
        ({"counts": torch.full((2, 2, 5), 4)}, "is 4, but indices has 3 entries"),
    ],
)
def test_compiled_calls_raise_what_eager_calls_raise(change: dict[str, Tensor], words: str) -> None:
    *rows, indices = arguments(70, 0)
    given = {"indices": indices, "counts": None} | change
    for call in (attend, fresh(attend)[0]):
        with pytest.raises(Exception, match=words):  # Dynamo wraps those that it meets
            call(*rows, given["indices"], given["counts"])


@pytest.mark.parametrize("has_full", [True, False])
def test_the_operator_keeps_its_contract(has_full: bool) -> None:
    from anyattn.custom_ops.block_lists import topk_lists
    from anyattn.custom_ops.flex import operands_of
    from anyattn.mods.tracing.trace import trace

    indices = choice((2, 2), (70, 50), (16, 16), 3)
    mods = operands_of(indices, trace(masks.causal() if has_full else MASKS["by head"], "mask"))
    for wants_columns in (True, False):
        torch.library.opcheck(
            topk_lists, (indices, None, *mods, 70, 50, 16, 16, wants_columns), test_utils=("test_schema", "test_faketensor")
        )
    single = choice((2, 2), (20, 50), (1, 16), 3)
    torch.library.opcheck(topk_lists, (single, None, *mods, 20, 50, 1, 16, False), test_utils=("test_schema", "test_faketensor"))


def test_single_keys_of_single_queries_take_the_memory_of_their_numbers() -> None:
    """Lists for each query and key would have 4 * 2^30 entries; kernels list what is chosen."""
    with FakeTensorMode():
        indices = torch.empty((1, 4, 32_768, 2048), dtype=torch.int32, device="cuda")
        made = BlockMask.from_topk(indices, BLOCK_SIZE=(1, 1), seq_lengths=(32_768, 32_768), causal=True)
        assert made.kv_indices.shape == indices.shape
        with pytest.raises(ValueError, match="4,294,967,296 entries"):
            BlockMask.from_topk(torch.cat((indices,) * 3, -1), BLOCK_SIZE=(1, 1), seq_lengths=(32_768, 32_768))
