"""BlockSparseTensors: what compute_block_sparsity returns, its checks, re-tiling and transposition."""

import pytest
import torch

from anyattn import flash_attn_func
from anyattn.block_masks import create_block_mask
from anyattn.mods import masks
from anyattn.sparsity import BlockMask, BlockSparseTensors, compute_block_sparsity
from anyattn.sparsity import lists as between
from anyattn.sparsity.lists import grid_of_lists, kept_transposed, lists_of_grid
from tests.support.tiles import brute_classes, dense, library_masks, random_mask

LENGTHS = [(1, 1), (16, 16), (31, 64), (64, 31), (100, 100), (97, 61)]
TILES = [(16, 16), (8, 32), (5, 7), (64, 128)]


def causal_768_896(**kwargs):
    return compute_block_sparsity(128, 128, 1, 1, 768, 896, masks.causal_bottom_right(768, 896), device="cpu", **kwargs)


def test_the_768_by_896_causal_example():
    """6 x 7 tiles: 6 mask blocks along the diagonal, which ends in the bottom-right corner, 21 full below it, 15 skipped."""
    lists = causal_768_896()
    assert lists.grid == (6, 7)
    assert lists.mask_block_cnt.tolist() == [[[1, 1, 1, 1, 1, 1]]]
    assert lists.mask_block_idx[0, 0, :, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert lists.full_block_cnt.tolist() == [[[1, 2, 3, 4, 5, 6]]]
    for m in range(6):
        assert lists.full_block_idx[0, 0, m].tolist() == [*range(m + 1), *[0] * (6 - m)]
    assert int(lists.mask_block_cnt.sum()), int(lists.full_block_cnt.sum()) == (6, 21)
    assert int((lists.classes() == 0).sum()) == 15
    assert "6 mask, 21 full, 15 skipped" in repr(lists.validate())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_brute_force(lengths):
    trees = {f"tree {seed}": random_mask(seed, max(lengths)) for seed in range(100, 106)}
    for name, mod in {**library_masks(*lengths), **trees}.items():
        mask = dense(mod, *lengths, 2, 2)
        for tile in TILES:
            lists = compute_block_sparsity(*tile, 2, 2, *lengths, mod, device="cpu")
            assert torch.equal(lists.classes(), brute_classes(mask, *tile)), (name, tile)
            assert lists.mask_block_cnt.shape[:2] == (2, 2) and lists.tile == tile and lists.lengths == lengths


def test_lists_are_valid_both_ways():
    for mod in library_masks(61, 100).values():
        lists = compute_block_sparsity(8, 16, 2, 2, 61, 100, mod, device="cpu").validate()
        turned = lists.transposed().validate()
        assert turned.tile == (16, 8) and turned.lengths == (100, 61)
        assert torch.equal(turned.classes(), lists.classes().transpose(-1, -2))
        assert torch.equal(turned.transposed().mask_block_idx, lists.mask_block_idx)


def test_options():
    without = causal_768_896(compute_full_blocks=False).validate()
    assert without.full_block_cnt is None and without.mask_block_cnt.tolist() == [[[2, 3, 4, 5, 6, 7]]]
    assert torch.equal(without.visited(), causal_768_896().visited()) and without.transposed().full_block_idx is None
    assert torch.equal(causal_768_896(use_fast_sampling=True).classes(), causal_768_896().classes())
    table = torch.tensor([3, 5])
    lists = compute_block_sparsity(
        2, 2, 2, None, 8, 8, lambda b, h, q, k, aux_tensors: k < aux_tensors[0][b], aux_tensors=[table], device="cpu"
    )
    assert torch.equal(lists.classes(), brute_classes(dense(lambda b, h, q, k: k < table[b], 8, 8, 2, 1), 2, 2))


def test_a_full_tail_is_full_here_and_partial_in_a_block_mask():
    lists = compute_block_sparsity(16, 16, 1, 1, 40, 40, masks.full(), device="cpu")
    assert lists.full_block_cnt.tolist() == [[[3, 3, 3]]] and lists.mask_block_cnt.sum() == 0
    mask = lists.to_block_mask(masks.full())
    assert isinstance(mask, BlockMask) and mask.full_kv_num_blocks.tolist() == [[[2, 2, 0]]]
    assert torch.equal(mask.kv_indices, create_block_mask(masks.full(), 1, 1, 40, 40, "cpu", 16).kv_indices)


def test_retile_of_lists_of_unknown_lengths():
    lists = causal_768_896()
    assert lists.retile(128, 128) is lists
    unknown = BlockSparseTensors(lists.mask_block_cnt, lists.mask_block_idx, tile=(128, 128))
    assert unknown.retile(256, 128).grid == (3, 7)
    with pytest.raises(ValueError, match="do not know their sequence lengths"):
        unknown.retile(64, 128)


def lists_of(mask_cnt, mask_idx, full_cnt=None, full_idx=None, **kwargs):
    as_int = lambda x: None if x is None else torch.tensor(x, dtype=torch.int32)[None, None]
    return BlockSparseTensors(*map(as_int, (mask_cnt, mask_idx, full_cnt, full_idx)), **{"tile": (16, 16), **kwargs})


def written(cnt, idx, count):
    """Lists whose count was changed behind the checks of their making."""
    made = lists_of(cnt, idx)
    made.mask_block_cnt.fill_(count)
    return made


def test_validate():
    lists_of([2, 0], [[0, 2, 0], [0, 0, 0]], [1, 1], [[1, 0, 0], [2, 0, 0]]).validate()
    for bad, message in [
        (lists_of([2], [[2, 0, 0]]), "mask_block_idx is not strictly increasing"),
        (lists_of([2], [[1, 1, 0]]), "not strictly increasing"),
        (written([2], [[0, 1, 2]], 4), "mask_block_cnt holds 4 to 4; wanted 0 to 3"),
        (written([2], [[0, 1, 2]], -1), "mask_block_cnt holds -1"),
        (lists_of([1], [[3, 0, 0]]), "outside 0 to 2"),
        (lists_of([1], [[0, 0, 2]]), "not 0 after the listed"),
        (lists_of([1], [[1, 0, 0]], [2], [[0, 1, 0]]), "tile 1 of row 0 .b=0, h=0. is listed as mask block and as full block"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad.validate()


def test_bad_construction():
    cnt, idx = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32)
    for arguments, kwargs, error, message in [
        ((cnt, idx), {}, TypeError, "needs tile="),
        ((cnt, idx), {"tile": (16, 0)}, ValueError, r"tile\[1\] is 0"),
        ((cnt, idx, cnt), {"tile": 16}, ValueError, "pass both or neither"),
        ((cnt.long(), idx), {"tile": 16}, TypeError, "mask_block_cnt is torch.int64; wanted torch.int32"),
        (([0], idx), {"tile": 16}, TypeError, "mask_block_cnt is a list"),
        ((cnt[0], idx), {"tile": 16}, ValueError, "wanted 3 dimensions"),
        ((cnt, idx[:, :, :1]), {"tile": 16}, ValueError, r"wanted \(B, H, M\) and \(B, H, M, N\)"),
        ((cnt, idx, cnt[..., :1], idx[:, :, :1]), {"tile": 16}, ValueError, "wanted the same"),
        (
            (cnt, idx),
            {"tile": 16, "lengths": (16, 48)},
            ValueError,
            r"2 x 3 tiles, but lengths \(16, 48\) in tiles of \(16, 16\) make 1 x 3",
        ),
    ]:
        with pytest.raises(error, match=message):
            BlockSparseTensors(*arguments, **kwargs)


def test_bad_arguments():
    good = {
        "tile_m": 16,
        "tile_n": 16,
        "batch_size": 1,
        "num_heads": 1,
        "seqlen_q": 32,
        "seqlen_k": 32,
        "mask_mod": masks.causal(),
        "device": "cpu",
    }
    for change, error, message in [
        ({"tile_m": 0}, ValueError, "tile_m is 0"),
        ({"tile_n": 1.5}, TypeError, "tile_n is 1.5"),
        ({"seqlen_q": -3}, ValueError, "seqlen_q is -3"),
        ({"num_heads": [1]}, TypeError, "num_heads is a list"),
        ({"mask_mod": lambda b, h, q, k, aux_tensors: q >= k}, TypeError, "passes no aux_tensors"),
    ]:
        with pytest.raises(error, match=message):
            compute_block_sparsity(**{**good, **change})


def test_damaged_lists_are_noticed():
    with pytest.raises(ValueError, match="name key tiles 7 to 7; wanted 0 to 2"):
        lists_of([1], [[7, 0, 0]]).classes()


@pytest.mark.parametrize("separate_full", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 9, 1), (1, 2, 0, 4), (1, 1, 3, 0)], ids=str)
def test_without_waiting_lists_are_the_same(shape: tuple[int, ...], separate_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all tiles are gone through; what stands behind a row's count may be anything."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        classes = torch.randint(0, 3, shape, generator=draw, dtype=torch.uint8)
        wanted = lists_of_grid(classes, separate_full)
        with monkeypatch.context() as patch:
            patch.setattr(between, "_sees_all", lambda _: True)
            found = lists_of_grid(classes, separate_full)
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
            cnt, idx, *full = found
            idx = torch.where(torch.arange(shape[-1]) < cnt[..., None], idx, 12345)
            assert torch.equal(grid_of_lists(cnt, idx, *full), grid_of_lists(*wanted))


@pytest.mark.parametrize("column", [-1, 4, 5])
def test_without_waiting_torch_notices_damaged_lists(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "_sees_all", lambda _: True)
    cnt, idx = torch.ones(1, 1, 1, dtype=torch.int32), torch.full((1, 1, 1, 4), column, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="out of bounds"):
        grid_of_lists(cnt, idx, None, None)


def test_transposed_lists_are_kept_until_someone_writes():
    """The same object while nothing changes; new ones after a write to a list, and none for tensors whose writes torch does not count."""
    lists = causal_768_896()
    kept = kept_transposed(lists)
    assert kept_transposed(lists) is kept and torch.equal(kept.classes(), lists.classes().mT)
    lists.full_block_cnt.zero_()
    changed = kept_transposed(lists)
    assert changed is not kept and torch.equal(changed.classes(), lists.classes().mT) and not (changed.classes() == 2).any()
    with torch.inference_mode():
        uncounted = causal_768_896()
    assert kept_transposed(uncounted) is not kept_transposed(uncounted)


@pytest.mark.parametrize("has_lengths", [True, False], ids=["lengths", "no lengths"])
@pytest.mark.parametrize("lengths", [(64, 96), (50, 90)])
def test_compact_lists_are_the_wide_ones(lengths, has_lengths):
    """[B, H, M, most] with fewer columns than key tiles: in every reading, and in a call, forward and backward."""
    mask = masks.sliding_window(20, 0, offset=lengths[1] - lengths[0])
    wide = compute_block_sparsity(16, 16, 1, 1, *lengths, mask, device="cpu")
    most = [int(c.max()) for c in (wide.mask_block_cnt, wide.full_block_cnt)]
    assert max(most) < wide.grid[1] and most[0] != most[1]
    cut = (wide.mask_block_cnt, wide.mask_block_idx[..., : most[0]].contiguous(), wide.full_block_cnt, wide.full_block_idx[..., : most[1]])
    compact = BlockSparseTensors(*cut, tile=(16, 16), lengths=lengths if has_lengths else None)
    if has_lengths:
        compact.validate()
        assert compact.grid == wide.grid and torch.equal(compact.classes(), wide.classes())
        for made in (BlockSparseTensors.transposed, lambda x: x.retile(32, 16), lambda x: x.retile(8, 8), lambda x: x.to_block_mask(mask)):
            a, b = ([t for t in vars(made(x)).values() if isinstance(t, torch.Tensor)] for x in (compact, wide))
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    found = []
    for lists in (compact, wide):
        q, k, v = (torch.randn(1, n, 2, 16, generator=torch.Generator().manual_seed(3)) for n in (lengths[0], lengths[1], lengths[1]))
        tensors = [t.requires_grad_() for t in (q, k, v)]
        for _ in range(2):
            out = flash_attn_func(*tensors, mask_mod=mask, block_sparse_tensors=lists)
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compact_lists_with_a_column_that_there_is_not_are_refused():
    count, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.full((1, 1, 2, 1), 7, dtype=torch.int32)
    BlockSparseTensors(count, index, tile=16, lengths=(32, 128)).validate()
    with pytest.raises(ValueError, match="lists a tile outside 0 to 6"):
        BlockSparseTensors(count, index, tile=16, lengths=(32, 112)).validate()
    q, k = torch.randn(1, 32, 1, 16), torch.randn(1, 112, 1, 16)
    with pytest.raises(ValueError, match="name key tiles 7 to 7; wanted 0 to 6"):
        flash_attn_func(q, k, k, block_sparse_tensors=BlockSparseTensors(count, index, tile=16))
    twice = torch.tensor([[[[1, 1], [0, 1]]]], dtype=torch.int32)
    with pytest.raises(ValueError, match="mask_block_idx is not strictly increasing"):
        flash_attn_func(q, k, k, block_sparse_tensors=BlockSparseTensors(2 * count, twice, tile=16))
    with pytest.raises(ValueError, match="is listed as mask block and as full block"):
        flash_attn_func(q, k, k, block_sparse_tensors=BlockSparseTensors(count, index * 0, count, index * 0, tile=16))
    with pytest.raises(ValueError, match="has 2 x 9 tiles"):
        flash_attn_func(q, k, k, block_sparse_tensors=BlockSparseTensors(count, index.expand(1, 1, 2, 9) * 0, tile=16))


@pytest.mark.parametrize("lengths", [(256, 256), (200, 330), (7, 40)])
def test_ordered_lists_are_read_as_they_are(lengths: tuple[int, int]) -> None:
    """What ``from_block_mask`` reads of lists that anyattn built, also of rows and crops; memory is shared where kernels can read it."""
    made = create_block_mask(lambda b, h, i, j: (i >= j) & ((i + h) % 64 > 3), 1, 2, *lengths, device="cpu", BLOCK_SIZE=32)
    odd = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, *lengths, device="cpu", BLOCK_SIZE=32)
    odd.kv_indices = torch.cat((torch.zeros(1, dtype=torch.int32), odd.kv_indices.reshape(-1)))[1:].view(odd.kv_indices.shape)
    for mask in (made, made[:, 1:], made[:, :, -1:], made._adjust(lengths[0] - 5, lengths[1] - 33), odd):
        found, wanted = BlockSparseTensors.from_ordered_lists(mask), BlockSparseTensors.from_block_mask(mask)
        assert found is not None and (found.tile, found.lengths) == (wanted.tile, wanted.lengths)
        for name in ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"):
            mine, theirs = getattr(found, name), getattr(wanted, name)
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)
            assert mine.is_contiguous() and mine.data_ptr() % 16 == 0, name
    found = BlockSparseTensors.from_ordered_lists(made)
    assert found is not None and found.mask_block_idx.data_ptr() == made.kv_indices.data_ptr()
    made.seq_lengths = (lengths[0], 1)  # fewer tiles than the lists have room for
    assert BlockSparseTensors.from_ordered_lists(made) is None
