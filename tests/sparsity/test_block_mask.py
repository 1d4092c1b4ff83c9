"""create_block_mask makes torch's lists, block for block, and what it returns is torch's BlockMask to torch."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree

from anyattn import ModError, flash_attn_func, flex_attention, oracle
from anyattn.block_masks import create_block_mask
from anyattn.mods import masks
from anyattn.sparsity import (
    BlockMask,
    BlockSparseTensors,
    compute_block_sparsity,
    compute_varlen_block_sparsity,
)
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.compiling import fresh, nearly_same
from tests.support.counting import peak_bytes
from tests.support.tiles import brute_classes, dense, library_masks, random_mask

SIDES = ("kv", "full_kv", "q", "full_q")


def lists(mask, side):
    """Counts, and indices with what lies beyond them cleared (torch leaves that undefined)."""
    cnt, idx = getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")
    return None if cnt is None else (cnt, idx * (torch.arange(idx.shape[-1]) < cnt[..., None]))


def assert_same(ours, theirs):
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.shape == theirs.shape
    for side in SIDES:
        a, b = lists(ours, side), lists(theirs, side)
        assert (a is None) == (b is None), side
        for x, y in zip(a or (), b or (), strict=True):
            assert x.dtype == y.dtype == torch.int32 and x.is_contiguous() and torch.equal(x, y), side


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(64, 64), (30, 50), (1, 96)], ids=str)
@pytest.mark.parametrize("block", [16, (8, 32)], ids=str)
def test_equals_torch(lengths, block):
    for name, mod in library_masks(*lengths).items():
        if name in ("tree", "prefix_per_batch", "document_per_batch"):
            continue  # minutes of vmap in torch for no new case
        for batch in ((None, None), (2, 3)):
            ours = create_block_mask(mod, *batch, *lengths, "cpu", block)
            assert_same(ours, torch_flex.create_block_mask(mod, *batch, *lengths, "cpu", block))
            ours.block_sparse().validate()


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(64, 64), (30, 50), (97, 31), (200, 7)], ids=str)
@pytest.mark.parametrize("block", [1, 16, (5, 32), 128], ids=str)
def test_equals_brute_force_in_torchs_meaning(lengths, block):
    tile = (block, block) if isinstance(block, int) else block
    trees = {f"tree {seed}": random_mask(seed, max(lengths)) for seed in range(8)}
    for name, mod in {**library_masks(*lengths), **trees}.items():
        wanted = brute_classes(dense(mod, *lengths, 2, 2), *tile, pad=True)
        assert torch.equal(create_block_mask(mod, 2, 2, *lengths, "cpu", block).block_sparse().classes(), wanted), name


def test_separate_full_blocks():
    ours = create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16, separate_full_blocks=False)
    assert ours.full_kv_num_blocks is None and ours.full_q_indices is None
    assert ours.kv_num_blocks.tolist() == [[[1, 2, 3, 4]]] and ours.q_num_blocks.tolist() == [[[4, 3, 2, 1]]]
    ours.block_sparse().validate()


def test_describes_itself_like_torch():
    ours, theirs = (f(masks.causal(), 2, 1, 96, 80, "cpu", BLOCK_SIZE=16) for f in (create_block_mask, torch_flex.create_block_mask))
    assert str(ours) == str(theirs) and ours.sparsity() == theirs.sparsity() and ours.numel() == theirs.numel()
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.to_string(4) == theirs.to_string(4)
    assert "kv_num_blocks=torch.Size([2, 1, 6])" in repr(ours) and isinstance(ours, torch_flex.BlockMask)


def qkv(q_len, kv_len, heads=2):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, n, 16, generator=g) for n in (q_len, kv_len, kv_len)]


ids = torch.tensor([0] * 20 + [1] * 50 + [2] * 30)


def document_causal(b, h, q_idx, kv_idx):
    return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


@pytest.mark.filterwarnings("ignore")
def test_torch_flex_attention_takes_ours():
    q, k, v = qkv(100, 100)
    ours, theirs = (
        f(document_causal, None, None, 100, 100, "cpu", BLOCK_SIZE=32) for f in (create_block_mask, torch_flex.create_block_mask)
    )
    run = torch_flex.flex_attention
    whole = run(q, k, v, block_mask=theirs)
    assert torch.equal(run(q, k, v, block_mask=ours), whole)
    # slices with a mask that works: torch's own raise here
    assert torch.equal(run(q[:, :, 32:96], k, v, block_mask=ours[:, :, 1:3]), whole[:, :, 32:96])
    assert torch.equal(run(q[:, :, 96:], k, v, block_mask=ours[:, :, -1]), whole[:, :, 96:])


def sliced_dense(mask):
    """What a mask shows by its lists and mask_mod together."""
    classes = mask.block_sparse().classes()
    (q_len, kv_len), (m, n) = mask.seq_lengths, mask.BLOCK_SIZE
    by_pair = classes.repeat_interleave(m, -2)[..., :q_len, :].repeat_interleave(n, -1)[..., :kv_len]
    B, H = classes.shape[:2]
    return (by_pair == 2) | ((by_pair == 1) & dense(mask.mask_mod, q_len, kv_len, B, H))


SLICES = [
    (0,),
    (-1,),
    (slice(1, 3),),
    (slice(None), 1),
    (slice(None, None, 2), slice(1, None)),
    (torch.tensor([2, 0]), torch.tensor([1, 1, 0])),
    (slice(None), slice(None), 2),
    (slice(None), slice(None), slice(1, 3)),
    (slice(None), slice(None), slice(0, None, 2)),
    (2, 1, torch.tensor([3, 0, 1])),
    (torch.tensor([True, False, True]), slice(None), slice(0, 0)),
]


@pytest.mark.parametrize("index", SLICES, ids=str)
@pytest.mark.parametrize("q_len", [64, 60])
def test_slices_show_what_the_whole_shows(index, q_len):
    per_batch = torch.tensor([[0] * 30 + [1] * 34, [0] * 64, [0] * 10 + [4] * 54])

    def mod(b, h, q, k):
        return (per_batch[b, q] == per_batch[b, k]) & (q + 5 * h >= k)

    mask = create_block_mask(mod, 3, 2, q_len, 64, "cpu", 16)
    if index[-1] is SLICES[9][-1] and q_len == 60:
        index = (*index[:-1], torch.tensor([0, 2, 3]))  # the short last block comes last
    whole = dense(mod, q_len, 64, 3, 2)
    keep = [slice(i, i + 1) if isinstance(i, int) and i >= 0 else slice(-1, None) if isinstance(i, int) else i for i in index]
    rows = torch.arange(q_len)
    if len(keep) == 3:
        blocks = torch.arange(4)[keep[2]]
        rows = torch.cat([rows[b * 16 : (b + 1) * 16] for b in blocks.tolist()] or [rows[:0]])
    wanted = whole[keep[0]]
    wanted = (wanted[:, keep[1]] if len(keep) > 1 else wanted)[:, :, rows]
    part = mask[index]
    assert isinstance(part, BlockMask) and part.is_exact and part.seq_lengths == (len(rows), 64)
    assert torch.equal(sliced_dense(part), wanted)
    again = part[:, :, 1:] if part.kv_num_blocks.shape[-1] > 1 else part
    assert torch.equal(sliced_dense(again), wanted[:, :, 16 * (again is not part) :])


def test_bad_slices():
    mask = create_block_mask(masks.causal(), 1, 2, 64, 64, "cpu", 16)
    with pytest.raises(IndexError, match="head index is 2, but this BlockMask has 2"):
        mask[0, 2]
    with pytest.raises(ValueError, match="query block index is -5"):
        mask[0, 0, -5]
    with pytest.raises(IndexError, match="got 4 indices"):
        mask[0, 0, 0, 0]


@pytest.mark.parametrize("new", [(64, 64), (40, 64), (33, 17), (1, 1), (0, 64)], ids=str)
def test_adjust_crops_any_mask(new):
    mod = masks.document(torch.tensor([3] * 30 + [1] * 34)) | masks.causal(10)
    cropped = create_block_mask(mod, 1, 1, 64, 64, "cpu", 16)._adjust(*new)
    assert cropped.seq_lengths == new and cropped.is_exact and torch.equal(sliced_dense(cropped), dense(mod, *new))
    cropped.block_sparse().validate()


def test_adjust_does_not_grow():
    with pytest.raises(ValueError, match=r"covers \(64, 64\) and cannot grow to \(65, 64\)"):
        create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16)._adjust(65, 64)


def test_from_kv_blocks_equals_torch():
    made = torch_flex.create_block_mask(document_causal, 1, 1, 100, 100, "cpu", BLOCK_SIZE=32)
    arguments = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    for given, kwargs in (
        (arguments, {}),
        (arguments[:2], {}),
        ([a[0, 0] for a in arguments], {}),
        (arguments, {"seq_lengths": (100, 100)}),
    ):
        ours, theirs = (c.from_kv_blocks(*given, BLOCK_SIZE=32, **kwargs) for c in (BlockMask, torch_flex.BlockMask))
        assert ours.kv_indices is given[1] and not ours.is_exact
        assert_same(ours, theirs)
    with pytest.raises(AssertionError, match="both or neither"):
        BlockMask.from_kv_blocks(*arguments[:3])
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        BlockMask.from_kv_blocks(arguments[0][0, 0, 0], arguments[1][0, 0, 0])
    assert BlockMask.from_kv_blocks(*arguments, compute_q_blocks=False).q_indices is None


def test_from_torch_and_back():
    theirs = torch_flex.create_block_mask(document_causal, 1, 1, 100, 100, "cpu", BLOCK_SIZE=(16, 32))
    ours = BlockMask.from_torch(theirs)
    assert_same(ours, theirs)
    assert ours.mask_mod is document_causal and BlockMask.from_torch(ours) is ours and not ours.is_exact
    listed = BlockSparseTensors.from_block_mask(theirs).validate()
    assert listed.tile == (16, 32) and listed.lengths == (100, 100)
    assert_same(listed.to_block_mask(document_causal), theirs)


def test_is_exact_ends_with_an_assignment():
    mask = create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16)
    for copied in (mask, mask.to("cpu"), mask.contiguous(), copy.copy(mask), copy.deepcopy(mask)):
        assert copied.is_exact
    mask.mask_mod = masks.full()
    assert not mask.is_exact and not mask.contiguous().is_exact
    assert not create_block_mask(lambda b, h, q, k: q + b >= k, None, None, 64, 64, "cpu", 16).is_exact
    assert create_block_mask(lambda b, h, q, k: q + b >= k, 2, None, 64, 64, "cpu", 16).is_exact


def test_is_exact_ends_with_a_write():
    for field in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        mask = create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16)
        before = copy.deepcopy(mask)
        getattr(mask, field)[0, 0, 1:].zero_()
        assert not mask.is_exact and before.is_exact
        for copied in (mask[:, :, 1:], mask.contiguous(), copy.copy(mask), copy.deepcopy(mask)):
            assert not copied.is_exact


def test_is_exact_is_known_of_what_inference_mode_made():
    with torch.inference_mode():
        mask = create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16)
        part = mask[:, :, 2:]
        assert mask.is_exact and part.is_exact and not part.kv_indices.is_inference()
        part.kv_indices.zero_()
    assert mask.is_exact and not part.is_exact


def test_pickled_masks_stay_exact_or_not():
    mask = create_block_mask(masks.causal(), 1, 1, 64, 64, "cpu", 16)
    mask.mask_mod = torch_flex.noop_mask  # which can be pickled
    assert not pickle.loads(pickle.dumps(mask)).is_exact
    mask = create_block_mask(torch_flex.noop_mask, 1, 1, 64, 64, "cpu", 16)
    assert mask.is_exact and pickle.loads(pickle.dumps(mask)).is_exact
    mask.full_kv_num_blocks.zero_()
    assert not pickle.loads(pickle.dumps(mask)).is_exact


@pytest.mark.parametrize("length", [2**30 + 1, 2**31, 2**31 + 128, 2**40])
def test_lengths_beyond_32_bits_are_refused(length):
    for made in (
        lambda: create_block_mask(lambda b, h, q, k: k >= q - 5, 1, 1, 1, length, "cpu", 2**24),
        lambda: create_block_mask(lambda b, h, q, k: k >= q - 5, 1, 1, length, 1, "cpu", 2**24),
        lambda: compute_block_sparsity(16, 2**24, 1, 1, 1, length, lambda b, h, q, k: k >= q, device="cpu"),
        lambda: compute_varlen_block_sparsity(
            16, 2**24, 1, lambda b, h, q, k: k >= q, cu_seqlens_q=torch.tensor([0, 1]), cu_seqlens_k=torch.tensor([0, length])
        ),
    ):
        with pytest.raises(ValueError, match=f" {length}; wanted at most 1073741824"):
            made()


def test_the_longest_length_is_exact():
    mask = create_block_mask(lambda b, h, q, k: k >= 2**30 - 5, 1, 1, 3, 2**30, "cpu", (3, 2**24))
    assert mask.kv_num_blocks.tolist() == [[[1]]] and int(mask.kv_indices[0, 0, 0, 0]) == 63


@pytest.mark.parametrize("size", [10**9, 2**30, 2**40])
def test_a_block_far_longer_than_the_sequences_is_one_block(size):
    """In the time of the sequences, not of the block."""
    for mask in (masks.causal(), lambda b, h, q, k: (q * 7 + k * 5) % 3 == 0):
        made = create_block_mask(mask, 1, 1, 50, 50, "cpu", size)
        assert made.kv_num_blocks.tolist() == [[[1]]] and made.kv_indices.shape == (1, 1, 1, 1)
        q, k, v = torch.randn(3, 1, 1, 50, 16)
        assert torch.equal(flex_attention(q, k, v, block_mask=made), flex_attention(q, k, v, mask_mod=mask))
        lists = compute_block_sparsity(size, size, 1, 1, 50, 50, mask, device="cpu")
        assert lists.grid == (1, 1) and lists.visited().tolist() == [[[1]]]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = flash_attn_func(q, k, v, mask_mod=mask, block_sparse_tensors=lists)
        assert float((out - flash_attn_func(q, k, v, mask_mod=mask)).abs().max()) <= 32 * torch.finfo(out.dtype).eps * float(v.abs().max())


def test_torchs_empty_block_mask_is_no_mask():
    q, k, v = torch.randn(3, 2, 4, 50, 16)
    empty = torch_flex._create_empty_block_mask(q, k)
    for given in (empty, BlockMask.from_torch(empty)):
        for _ in range(2):
            assert torch.equal(flex_attention(q, k, v, block_mask=given), flex_attention(q, k, v))
        mask = masks.causal()
        assert torch.equal(flex_attention(q, k, v, block_mask=given, mask_mod=mask), flex_attention(q, k, v, mask_mod=mask))
    call = torch.compile(lambda q: flex_attention(q, k, v, block_mask=empty), backend="eager", fullgraph=True)
    assert torch.equal(call(q), torch.compile(lambda q: flex_attention(q, k, v), backend="eager", fullgraph=True)(q))
    empty.kv_num_blocks.zero_()
    with pytest.raises(ValueError, match="block_mask was made for lengths"):
        flex_attention(q, k, v, block_mask=empty)


def listed(count):
    """Two rows of lists with room for 8 blocks, of which the second has so many."""
    return torch.tensor([[[8, count]]], dtype=torch.int32), torch.arange(8, dtype=torch.int32).expand(1, 1, 2, 8).contiguous()


@pytest.mark.parametrize("count", [9, 99])
def test_counts_that_cannot_be_are_refused(count):
    good, bad = listed(3), listed(count)
    for name, arguments in (("kv_num_blocks", bad), ("full_kv_num_blocks", (*good, *bad))):
        for options in ({}, {"compute_q_blocks": False}):
            with pytest.raises(ValueError, match=rf"^{name} holds .*; wanted 0 to 8"):
                BlockMask.from_kv_blocks(*arguments, BLOCK_SIZE=16, **options)
    for name, arguments in (("mask_block_cnt", bad), ("full_block_cnt", (*good, *bad))):
        with pytest.raises(ValueError, match=rf"^{name} holds .*; wanted 0 to 8"):
            BlockSparseTensors(*arguments, tile=(16, 16))
    with pytest.raises(ValueError, match="the count of a row's partial blocks holds"):
        BlockSparseTensors.from_block_mask(torch_flex.BlockMask.from_kv_blocks(*bad, BLOCK_SIZE=16, compute_q_blocks=False))


def test_copies():
    mask = create_block_mask(document_causal, 1, 1, 100, 100, "cpu", 32)
    mask.kv_indices = mask.kv_indices.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert not mask.kv_indices.is_contiguous()
    assert mask.contiguous().kv_indices.is_contiguous() and not mask.kv_indices.is_contiguous()
    assert_same(pickle.loads(pickle.dumps(mask.contiguous())), mask.contiguous())
    assert mask.to("meta").kv_indices.device.type == "meta"


def test_flattens_as_torchs_does():
    mask = create_block_mask(document_causal, 1, 1, 100, 100, "cpu", 32)
    leaves, context = mask._flatten()
    back = BlockMask._unflatten(leaves, context)
    assert type(back) is BlockMask
    assert_same(back, mask)
    if torch_flex.BlockMask in pytree.SUPPORTED_NODES:
        assert len(pytree.tree_leaves(mask)) >= 8


def test_sizes_and_defaults():
    causal = masks.causal()
    assert create_block_mask(causal, None, None, 256, 256).BLOCK_SIZE == (128, 128)
    if not torch.accelerator.is_available():
        assert create_block_mask(causal, None, None, 256, 256).kv_indices.device.type == "cpu"
    assert create_block_mask(causal, 3, 5, 256, 300, "cpu").kv_indices.shape == (3, 5, 2, 3)
    for lengths in ((0, 0), (0, 40), (40, 0)):
        empty = create_block_mask(causal, 1, 1, *lengths, "cpu", 16)
        assert empty.kv_indices.shape == (1, 1, -(-lengths[0] // 16), -(-lengths[1] // 16)) and empty.sparsity() == 0.0
    assert create_block_mask(causal, 0, 1, 16, 16, "cpu", 16).kv_indices.shape == (0, 1, 1, 1)


def test_called_from_compiled_code():
    """torch.compile(create_block_mask) is what torch's users are told to write; here it is needless, and must stay harmless."""
    compiled = torch.compile(create_block_mask, backend="eager")
    for length in (64, 96):
        assert_same(
            compiled(document_causal, 1, 1, length, length, "cpu", 32), create_block_mask(document_causal, 1, 1, length, length, "cpu", 32)
        )


def test_learned_parameters_in_a_mask():
    threshold = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    mod = lambda b, h, q, k: threshold[k] * threshold[q] > 0.1
    classes = create_block_mask(mod, 1, 1, 64, 64, "cpu", 16).block_sparse().classes()
    assert torch.equal(classes, brute_classes(dense(mod, 64, 64), 16, 16)) and not classes.requires_grad


def test_write_order_is_torchs():
    if not hasattr(torch_flex, "_compute_dq_write_order_from_block_mask"):
        pytest.skip("this torch has no dq write order")
    options = {"BLOCK_SIZE": 32, "compute_dq_write_order": True, "dq_kv_order": False}
    ours, theirs = (f(document_causal, 1, 1, 100, 100, "cpu", **options) for f in (create_block_mask, torch_flex.create_block_mask))
    assert ours.dq_kv_order_spt is theirs.dq_kv_order_spt is False
    for side, order in (("q", "dq_write_order"), ("full_q", "dq_write_order_full")):
        listed = torch.arange(4) < getattr(ours, f"{side}_num_blocks")[..., None]
        assert torch.equal(getattr(ours, order) * listed, getattr(theirs, order) * listed)
    assert ours[:, :, :2].dq_write_order is not None and ours._adjust(50, 50).dq_write_order is not None


BAD = [
    ({"Q_LEN": -1}, ValueError, "Q_LEN is -1; wanted an integer >= 0"),
    ({"KV_LEN": 64.0}, TypeError, "KV_LEN is 64.0 .float.; wanted an integer >= 0; pass 64"),
    ({"Q_LEN": True}, TypeError, "Q_LEN is True"),
    ({"Q_LEN": None}, TypeError, "Q_LEN is None"),
    ({"B": -2}, ValueError, "B is -2"),
    ({"H": "8"}, TypeError, "H is '8'"),
    ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE is 0; wanted an integer >= 1"),
    ({"BLOCK_SIZE": (64, -1)}, ValueError, r"BLOCK_SIZE\[1\] is -1"),
    ({"BLOCK_SIZE": (64, 64, 64)}, ValueError, "wanted one integer or a pair"),
    ({"mask_mod": lambda b, h, q: q > 0}, TypeError, "takes 3 arguments; wanted 4"),
    ({"mask_mod": None}, TypeError, "mask_mod is a NoneType"),
    ({"mask_mod": lambda b, h, q, k: q - k}, ModError, "return a bool"),
    ({"mask_mod": lambda b, h, q, k: ids[q] == 0, "Q_LEN": 101}, ValueError, "index 100 .*q_idx=100.*wanted an index from -100 to 99"),
    ({"mask_mod": document_causal, "device": "meta"}, ValueError, "device is 'meta' but mask_mod 'document_causal' captures a tensor"),
    ({"dq_kv_order": torch.zeros(1)}, ValueError, "dq_kv_order is"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_arguments(change, error, message):
    arguments = {"mask_mod": masks.causal(), "B": 1, "H": 1, "Q_LEN": 64, "KV_LEN": 64, "device": "cpu"}
    with pytest.raises(error, match=message):
        create_block_mask(**{**arguments, **change})


def test_a_long_mask_stays_small():
    """131,072 x 131,072 pairs would take 16 GiB; the lists of both directions take 16 MB."""
    whole = masks.document(torch.arange(2**17) // 3000) & masks.causal()
    made = []
    assert peak_bytes(lambda: made.append(create_block_mask(whole, None, None, 2**17, 2**17, "cpu"))) < 100 * 2**20
    (mask,) = made
    assert mask.kv_indices.shape == (1, 1, 1024, 1024) and int(mask.kv_num_blocks.sum()) < 4 * 1024


LENGTHS = torch.tensor([5, 20, 24])


def short(b, h, q, k):
    return (q >= k) & (k < LENGTHS[b]) & (q - k < 9 + h)


@pytest.mark.parametrize(("sizes", "names"), [((None, None), "BH"), ((1, 2), "B"), ((3, None), "H"), ((3, 2), "")], ids=str)
def test_lists_of_one_entry_for_all_are_warned_of(sizes, names):
    """As torch does, they decide for all; that the mask tells the others apart is said."""
    q, k, v = (torch.randn(3, 2, 24, 8) for _ in range(3))
    made = create_block_mask(short, *sizes, 24, 24, "cpu", 8)
    for mask in (made, made.to("cpu"), copy.copy(made)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flex_attention(q, k, v, block_mask=mask)
        assert [w.message.args[0].split(" (or None)")[0][-3:] for w in caught] == [f"{name}=1" for name in names]


def test_lists_of_one_entry_are_fine_for_one_or_where_the_caller_made_them():
    q, k, v = (torch.randn(3, 2, 24, 8) for _ in range(3))
    count, index = torch.full((1, 1, 3), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(q[:1, :1], k[:1, :1], v[:1, :1], block_mask=create_block_mask(short, None, None, 24, 24, "cpu", 8))
        coarse = flex_attention(q, k, v, block_mask=BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=8, mask_mod=short))
    torch.testing.assert_close(coarse, flex_attention(q, k, v, mask_mod=short))


def test_lists_of_more_tiles_than_memory_are_refused_at_once():
    for make in (
        lambda: create_block_mask(masks.causal(), 1, 1, 2**30, 2**30, "cpu"),
        lambda: compute_block_sparsity(128, 128, 1, 1, 2**30, 2**30, masks.causal(), device="cpu"),
    ):
        with pytest.raises(ValueError, match="larger tiles, or pass the function as mask_mod="):
            make()


def test_lists_made_inside_a_function_transform_are_plain_tensors():
    """They have no gradient, and may be kept for calls outside of it."""
    ids = torch.arange(70) // 20
    query = torch.randn(1, 2, 70, 16)
    kept = []

    def build():
        return create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 1, 1, 70, 70, "cpu", 32)

    def loss(query, mask=None):
        kept.append(build() if mask is None else mask)
        return flex_attention(query, query, query, block_mask=kept[-1]).square().sum()

    found = torch.func.grad(loss)(query)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in kept[0].as_tuple() if isinstance(t, torch.Tensor))
    assert_same(kept[0], build())
    assert torch.equal(found, torch.func.grad(loss)(query, kept[0]))
    with pytest.raises(TypeError, match=r"captures is a tensor of torch\.func\.grad.*wanted a plain tensor"):
        torch.func.grad(lambda x: (create_block_mask(lambda b, h, q, k: q > x, 1, 1, 70, 70, "cpu"), x)[1])(torch.tensor(1.0))


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("of", [BlockMask, torch_flex.BlockMask], ids=["ours", "torch's"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_count_below_0_is_an_empty_list(of, is_compiled):
    """A schedule's min(count, window - 1) where the window is 0 blocks; torch's kernels loop over the first ``count`` entries."""
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    index = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4).contiguous()
    counts = torch.tensor([[[-1, 2, -7, 3]]], dtype=torch.int32), torch.tensor([[[1, -1, -2, 2]]], dtype=torch.int32)

    def call(*tensors, **options):  # a function of its own: Dynamo may have given up on flex_attention's frame in an earlier test
        return flex_attention(*tensors, **options)

    call = torch.compile(call, backend="eager", fullgraph=True) if is_compiled else call
    found = []
    for count, full in (counts, [c.clamp(min=0) for c in counts]):
        mask = of.from_kv_blocks(count, index, full, index.flip(-1).contiguous(), BLOCK_SIZE=16, mask_mod=causal)
        found.append((call(q, k, v, block_mask=mask), BlockMask.from_torch(mask)))
    (out, mask), (wanted, clean) = found
    assert torch.equal(out, wanted) and not out[:, :, 32:48].any() and out[:, :, :16].any()
    assert mask.sparsity() == clean.sparsity() and torch.equal(mask.to_dense(), clean.to_dense())
    assert_same(create_block_mask(causal, 1, 1, 64, 64, "cpu", 16)[:, :, [0]], create_block_mask(causal, 1, 1, 16, 64, "cpu", 16))
    assert mask[:, :, [1, 2]].kv_num_blocks.tolist() == [[[2, -7]]] and mask._adjust(50, 40).kv_num_blocks[0, 0, 0] == 0


@pytest.mark.parametrize("mask_mod", [None, causal])
@pytest.mark.parametrize("has_full", [False, True])
@pytest.mark.parametrize(("shape", "lengths"), [((3, 5), None), ((2, 1, 3, 5), (20, 37))], ids=str)
def test_a_map_of_blocks(shape, lengths, has_full, mask_mod):
    g = torch.Generator().manual_seed(0)
    block_map, full = (torch.rand(shape, generator=g) < p for p in (0.5, 0.3))
    given = {"full_block_map": full[..., :1, :] if has_full else None, "mask_mod": mask_mod, "seq_lengths": lengths}
    mask = BlockMask.from_block_map(block_map, BLOCK_SIZE=8, **given)
    rows, columns = lengths or (24, 40)
    assert mask.seq_lengths == (rows, columns) and mask.BLOCK_SIZE == (8, 8) and (lengths is None or mask.shape[:2] == (2, 1))
    wide = lambda t: t.repeat_interleave(8, -2).repeat_interleave(8, -1)[..., :rows, :columns]
    visible = wide(block_map)
    if mask_mod is not None:
        visible = visible & causal(0, 0, torch.arange(rows)[:, None], torch.arange(columns))
    if has_full:
        visible = visible | wide(full[..., :1, :].expand(shape))
    q, k = torch.randn(2, 2, rows, 16, generator=g), torch.randn(2, 2, columns, 16, generator=g)
    each = visible.expand(2, 1, rows, columns)
    judges = (oracle.attention, oracle.same_dtype, rounding)
    exact, plain, noise = (f(q, k, k, mask=lambda b, h, i, j: each[b, 0, i, j]).out for f in judges)
    torchs = torch_flex.BlockMask(**{n: t for n, t in vars(mask).items() if not n.startswith("_")})
    for one in (mask, torchs):
        assert torch.equal(flex_attention(q, k, k, block_mask=one), flex_attention(q, k, k, block_mask=mask))
    budget.check("out", flex_attention(q, k, k, block_mask=mask), exact, plain, noise)


def test_a_map_of_blocks_that_cannot_be():
    good = torch.ones(3, 5, dtype=torch.bool)
    for block_map, more, error, words in (
        (good.int(), {}, TypeError, "block_map is torch.int32"),
        (None, {}, TypeError, "block_map is NoneType"),
        (good[0], {}, ValueError, r"block_map has shape \(5,\)"),
        (good, {"full_block_map": good[:2]}, ValueError, r"full_block_map has shape \(2, 5\)"),
        (good, {"full_block_map": good.float()}, TypeError, "full_block_map is torch.float32"),
        (good, {"seq_lengths": (8, 40)}, ValueError, "block_map has 3 x 5 blocks.*make 1 x 5"),
        (good, {"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE"),
    ):
        with pytest.raises(error, match=words):
            BlockMask.from_block_map(block_map, **{"BLOCK_SIZE": 8} | more)
    with pytest.raises(TypeError, match="BLOCK_SIZE"):
        BlockMask.from_block_map(good)  # type: ignore[call-arg]


@pytest.mark.parametrize("dynamic", [None, True], ids=["constant", "symbolic"])
@pytest.mark.parametrize("of", ["a map", "lists"])
def test_blocks_chosen_inside_a_graph(of: str, dynamic: bool | None) -> None:
    """Other maps and lists of the same sizes compile nothing."""
    length, tile = 44, 16
    drawn = torch.randn(3, 2, 2, length, 8, generator=torch.Generator().manual_seed(0))
    inputs = [t.clone().requires_grad_() for t in drawn.unbind()]

    def attention(q, k, v, block_map, counts, indices):
        if of == "a map":
            causal = lambda b, h, i, j: i >= j
            made = BlockMask.from_block_map(block_map, BLOCK_SIZE=tile, mask_mod=causal, seq_lengths=(length, length))
        else:
            made = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=tile, seq_lengths=(length, length))
        return flex_attention(q, k, v, block_mask=made)

    call, counter = fresh(attention, dynamic=dynamic)
    for seed in range(3):
        block_map = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(seed)) < 0.6
        indices = torch.argsort(block_map.int(), dim=-1, descending=True, stable=True).to(torch.int32)
        given = (block_map, block_map.sum(-1, dtype=torch.int32), indices)
        assert nearly_same(call, attention, (*inputs, *given), inputs)
    assert counter.frame_count == 1
