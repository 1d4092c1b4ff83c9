"""VarlenBlockSparseTensors: what compute_varlen_block_sparsity returns, its layouts, its checks, re-tiling and transposition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.mods import masks
from anyattn.sparsity import BlockSparseTensors, VarlenBlockSparseTensors, compute_block_sparsity, compute_varlen_block_sparsity
from anyattn.sparsity import lists as between
from tests.support.counting import Work
from tests.support.covering import few
from tests.support.inside import InsideMode
from tests.support.tiles import brute_classes, brute_classes_ragged, dense, library_masks, random_lengths, random_mask

TILES = [(16, 16), (8, 32), (5, 7), (64, 128)]
FIELDS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "cu_block_cnt", "cu_block_idx", "seqlens_q", "seqlens_k")


def ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def compute(
    mod: Any, seqlens_q: Tensor, seqlens_k: Tensor, tile: tuple[int, int], H: int | None, **kwargs: Any
) -> VarlenBlockSparseTensors:
    return compute_varlen_block_sparsity(*tile, H, mod, cu_seqlens_q=ends(seqlens_q), cu_seqlens_k=ends(seqlens_k), **kwargs)


def same(a: VarlenBlockSparseTensors, b: VarlenBlockSparseTensors) -> bool:
    pairs = [(getattr(a, f), getattr(b, f)) for f in FIELDS]
    return a.tile == b.tile and all(x is y is None or (x.dtype is y.dtype and torch.equal(x, y)) for x, y in pairs)


def batches(of_round: int | None) -> Any:
    """Random ragged batches with every mask of the library and some trees: (name, mask, lengths, tile). Every mask meets every tile in a
    round; without one each meets one tile, in turn."""
    for seed, tile in enumerate(TILES, (of_round or 0) * len(TILES)):
        seqlens = random_lengths(seed, tile, 6)
        longest = [int(t.max()) for t in seqlens]
        trees = {f"tree {s}": random_mask(s, 100, B=6) for s in range(10 * seed, 10 * seed + 4)}
        for i, (name, mod) in enumerate({**library_masks(*longest, B=6, seed=seed), **trees}.items()):  # type: ignore[arg-type]
            if of_round is not None or (i + seed) % len(TILES) == 0:
                yield name, mod, seqlens, tile


of_each_round = pytest.mark.parametrize("of_round", few([None, 0, 1], None))


def example(**kwargs: Any) -> VarlenBlockSparseTensors:
    """Causal, lengths 200, 0, 300 and 100 keys more in the last: 2 x 2, 0 x 0 and 3 x 4 tiles."""
    return compute(masks.causal(), torch.tensor([200, 0, 300]), torch.tensor([200, 0, 400]), (128, 128), None, **kwargs)


def test_the_example() -> None:
    flat = example()
    assert flat.cu_block_cnt.tolist() == [0, 2, 2, 5] and flat.cu_block_idx.tolist() == [0, 4, 4, 16]
    assert flat.cu_block_cnt.dtype is torch.int32 and flat.cu_block_idx.dtype is torch.int64
    assert flat.mask_block_cnt.tolist() == [[1, 1, 1, 1, 1]] and flat.full_block_cnt.tolist() == [[0, 1, 0, 1, 2]]
    assert flat.mask_block_idx.tolist() == [[0, 0, 1, 0, *[0, 0, 0, 0], *[1, 0, 0, 0], *[2, 0, 0, 0]]]
    assert flat.full_block_idx.tolist() == [[0, 0, 0, 0, *[0, 0, 0, 0], *[0, 0, 0, 0], *[0, 1, 0, 0]]]
    assert example(layout="padded").full_block_idx.tolist() == [[[0] * 4, [0] * 4, [0] * 4, [0] * 4, [0, 1, 0, 0]]]
    text = "3 sequences, 5 row tiles, tiles of 128 x 128, heads: 1, flat: 5 mask, 4 full, 7 skipped"
    assert text in repr(flat) and text.replace("flat", "padded") in repr(flat.to_padded())
    assert flat.visited().tolist() == [[1, 2, 1, 2, 3]] and flat.visited().dtype is torch.int32
    assert anyattn.VarlenBlockSparseTensors is VarlenBlockSparseTensors
    assert anyattn.compute_varlen_block_sparsity is compute_varlen_block_sparsity


@of_each_round
def test_equals_brute_force(of_round: int | None) -> None:
    for name, mod, seqlens, tile in batches(of_round):
        lists = compute(mod, *seqlens, tile, 2).validate()
        wanted = brute_classes_ragged(mod, *seqlens, tile, 2)
        assert torch.equal(lists.classes().expand(2, -1), wanted), (name, tile)
        visited = lists.visited().expand(2, -1)
        assert int(visited.sum()) == int((wanted != 0).sum())


@of_each_round
def test_layouts(of_round: int | None) -> None:
    for name, mod, seqlens, tile in batches(of_round):
        flat, padded = compute(mod, *seqlens, tile, 2), compute(mod, *seqlens, tile, 2, layout="padded").validate()
        total_m, max_n = int(flat.cu_block_cnt[-1]), int((-(-seqlens[1] // tile[1])).max())
        assert flat.layout == "flat" and flat.mask_block_idx.shape[1:] == (int(flat.cu_block_idx[-1]),)
        assert padded.layout == "padded" and padded.mask_block_idx.shape[1:] == (total_m, max_n)
        assert same(flat.to_padded(), padded) and same(padded.to_flat(), flat), name
        assert flat.to_flat() is flat and padded.to_padded() is padded
        assert torch.equal(flat.classes(), padded.classes())


def test_lookup() -> None:
    """The lists of every row tile, found through SeqlenInfoQK, are its classes; sequence by sequence they are what it has alone."""
    for seed, tile in enumerate(TILES):
        seqlens_q, seqlens_k = random_lengths(seed, tile, 5)
        mod = lambda b, h, q, k: (q + 9 * h >= k) & (k != b)
        for layout in ("flat", "padded"):
            lists = compute(mod, seqlens_q, seqlens_k, tile, 3, layout=layout)
            for b, (seqlen_q, seqlen_k) in enumerate(zip(seqlens_q.tolist(), seqlens_k.tolist())):
                alone = compute_block_sparsity(*tile, 5, 3, seqlen_q, seqlen_k, mod, device="cpu")
                for h in range(3):
                    for m in range(-(-seqlen_q // tile[0])):
                        mask, full = lists.lists(b, h, m)
                        assert mask.tolist() == alone.mask_block_idx[b, h, m, : alone.mask_block_cnt[b, h, m]].tolist()
                        assert full.tolist() == alone.full_block_idx[b, h, m, : alone.full_block_cnt[b, h, m]].tolist()


def test_lookup_of_what_is_not_there() -> None:
    lists = example()
    assert [t.tolist() for t in lists.lists(2, 7, 2)] == [[2], [0, 1]]  # one head stands for all
    assert [t.tolist() for t in example(compute_full_blocks=False).lists(2, 0, 2)] == [[0, 1, 2], []]
    for place, error, message in [
        ((3, 0, 0), ValueError, "b is 3, but there are 3 sequences; wanted 0 to 2"),
        ((1, 0, 0), ValueError, "m is 0, but there are 0 row tiles in sequence 1"),
        ((2, 0, 3), ValueError, "m is 3, but there are 3 row tiles in sequence 2; wanted 0 to 2"),
        ((2, -1, 0), ValueError, "h is -1"),
        ((-1, 0, 0), ValueError, "b is -1"),
        ((0, 0, 0.5), TypeError, "m is 0.5"),
    ]:
        with pytest.raises(error, match=message):
            lists.lists(*place)
    two = compute(lambda b, h, q, k: q + h >= k, torch.tensor([9]), torch.tensor([9]), (4, 4), 2)
    with pytest.raises(ValueError, match="h is 2, but there are 2 heads; wanted 0 to 1"):
        two.lists(0, 2, 0)


@of_each_round
def test_transposed(of_round: int | None) -> None:
    for name, mod, (seqlens_q, seqlens_k), tile in batches(of_round):
        for layout in ("flat", "padded"):
            lists = compute(mod, seqlens_q, seqlens_k, tile, 2, layout=layout)
            turned = lists.transposed().validate()
            assert turned.tile == tile[::-1] and turned.layout == layout and torch.equal(turned.seqlens_q, seqlens_k)
            assert same(turned.transposed(), lists), name
            brute = brute_classes_ragged(lambda b, h, q, k, mod=mod: mod(b, h, k, q), seqlens_k, seqlens_q, tile[::-1], 2)
            assert torch.equal(turned.classes().expand(2, -1), brute), name


class NoReading(InsideMode):
    """Fails where a GPU would be waited for."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = operation.overloadpacket.__name__
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        assert not unsized and name not in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select"), name
        return operation(*args, **(kwargs or {}))


@of_each_round
def test_turned_without_waiting(of_round: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all tiles are gone through, a few at a time; what stands behind a row's count may be anything."""
    for _, mod, (seqlens_q, seqlens_k), tile in batches(of_round):
        for layout in ("flat", "padded"):
            lists = compute(mod, seqlens_q, seqlens_k, tile, 2, layout=layout, compute_full_blocks=tile != (8, 32))
            wanted = lists.transposed()
            width = lists.tiles.num_n[lists.tiles.sequence_of_row]
            if layout == "padded":
                behind = torch.arange(lists.tiles.max_n) >= lists.mask_block_cnt[..., None]
                lists = replace(lists, mask_block_idx=torch.where(behind, -7, lists.mask_block_idx))
            with monkeypatch.context() as patch:
                patch.setattr(between, "_sees_all", lambda _: True)
                patch.setattr(between, "_BATCH_TILES", 7 + 2 * int(width.max()) if len(width) else 7)
                with NoReading():
                    found = lists.transposed()
            assert same(found, wanted)
            assert same(VarlenBlockSparseTensors(**{f: getattr(found, f) for f in FIELDS}, tile=found.tile), wanted)


@pytest.mark.parametrize("column", (-1, 2, 9))
def test_without_waiting_torch_notices_damaged_lists(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "_sees_all", lambda _: True)
    lists = damaged("mask_block_idx", (0, 0), column)
    with pytest.raises(RuntimeError, match="out of bounds"):
        lists.classes()


def test_options() -> None:
    without = example(compute_full_blocks=False).validate()
    assert without.full_block_cnt is None and without.mask_block_cnt.tolist() == [[1, 2, 1, 2, 3]]
    assert without.transposed().full_block_idx is None and without.to_padded().retile(256, 128).full_block_cnt is None
    assert torch.equal(without.visited(), example().visited()) and without.classes().max() == 1
    table, seqlens = torch.tensor([3, 5]), torch.tensor([8, 8])
    lists = compute(lambda b, h, q, k, aux_tensors: k < aux_tensors[0][b], seqlens, seqlens, (2, 2), None, aux_tensors=[table])
    assert torch.equal(lists.classes(), brute_classes_ragged(lambda b, h, q, k: k < table[b], seqlens, seqlens, (2, 2)))
    assert same(example().to("cpu"), example())
    meta = example().to_padded().to("cpu")
    assert meta.device == torch.device("cpu") and meta.layout == "padded"


def test_used_lengths() -> None:
    """seqused is shorter than the room that cu_seqlens gives, or stands without it; int32 and int64 are the same."""
    room, used_q, used_k = torch.tensor([10, 20, 30]), torch.tensor([10, 0, 17]), torch.tensor([3, 20, 30])
    wanted = compute(masks.causal(), used_q, used_k, (8, 8), None)
    for kind in (torch.int32, torch.int64):
        tables = {"cu_seqlens_q": ends(room).to(kind), "cu_seqlens_k": ends(room).to(kind)}
        used = {"seqused_q": used_q.to(kind), "seqused_k": used_k.to(kind)}
        assert same(compute_varlen_block_sparsity(8, 8, None, masks.causal(), **tables, **used), wanted)
        tables["cu_seqlens_k"] = None  # a paged cache has no packed keys
        assert same(compute_varlen_block_sparsity(8, 8, None, masks.causal(), **tables, **used), wanted)
    alone = compute_varlen_block_sparsity(8, 8, None, masks.causal(), cu_seqlens_q=ends(used_q), cu_seqlens_k=ends(room), seqused_k=used_k)
    assert same(alone, wanted)


def test_heads() -> None:
    seqlens = torch.tensor([30, 7])
    assert compute(masks.causal(), seqlens, seqlens, (8, 8), 6).mask_block_cnt.shape == (6, 5)
    assert compute(masks.causal(), seqlens, seqlens, (8, 8), None).mask_block_cnt.shape == (1, 5)
    per_head = lambda b, h, q, k: q + 8 * h >= k
    assert compute(per_head, seqlens, seqlens, (8, 8), 6).validate().mask_block_cnt.shape == (6, 5)
    with pytest.raises(ValueError, match="num_heads is None, but mask_mod uses h; pass the number of query heads"):
        compute(per_head, seqlens, seqlens, (8, 8), None)


@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 0], [5, 9]), ([5, 9], [0, 0]), ([0, 3, 0], [4, 0, 0])], ids=str)
def test_nothing_to_list(lengths: tuple[list[int], list[int]]) -> None:
    seqlens_q, seqlens_k = (torch.tensor(n, dtype=torch.int64) for n in lengths)
    for layout in ("flat", "padded"):
        lists = compute(masks.causal(), seqlens_q, seqlens_k, (4, 4), None, layout=layout).validate()
        rows = int((-(-seqlens_q // 4)).sum())
        assert lists.mask_block_cnt.tolist() == [[0] * rows] == lists.visited().tolist()
        assert lists.classes().shape == (1, 0)
        assert same(lists.transposed().transposed(), lists) and same(lists.to_flat().to_padded(), lists.to_padded())
        assert lists.retile(8, 2).validate().tile == (8, 2)
        for b, seqlen in enumerate(seqlens_q.tolist()):
            if seqlen:
                assert [len(t) for t in lists.lists(b, 0, 0)] == [0, 0]


def grids(of_round: int | None) -> Any:
    """Dense lists of the library's masks, and lists of ragged batches: (name, lists in a tile, brute force classes in a tile)."""
    for lengths in [(64, 64), (61, 100), (5, 3), (0, 9)]:
        for name, mod in library_masks(*lengths).items():
            lists = partial(compute_block_sparsity, batch_size=2, num_heads=2, mask_mod=mod, device="cpu")
            by_tile = partial(lists, seqlen_q=lengths[0], seqlen_k=lengths[1])
            yield f"{name} {lengths}", by_tile, partial(brute_classes, dense(mod, *lengths, 2, 2))
    for name, mod, (seqlens_q, seqlens_k), _ in batches(of_round):
        ends_of = {"cu_seqlens_q": ends(seqlens_q), "cu_seqlens_k": ends(seqlens_k)}
        lists = partial(compute_varlen_block_sparsity, num_heads=2, mask_mod=mod, layout="padded", **ends_of)
        yield name, lists, lambda *tile, case=(mod, seqlens_q, seqlens_k): brute_classes_ragged(*case, tile, 2)


@of_each_round
def test_retile_coarser_is_exact(of_round: int | None) -> None:
    for name, lists, brute in grids(of_round):
        fine = lists(4, 8)
        for tile in [(8, 8), (4, 32), (16, 16), (64, 128)]:
            coarse = fine.retile(*tile).validate()
            assert coarse.tile == tile and torch.equal(coarse.classes(), brute(*tile)), (name, tile)
            assert isinstance(coarse, BlockSparseTensors) or coarse.layout == "padded"


@of_each_round
def test_retile_to_other_sizes_covers(of_round: int | None) -> None:
    """Full and empty tiles are so for sure; what was partial, or shares a tile with something else, stays listed."""
    for name, lists, brute in grids(of_round):
        for old, sizes in [((16, 32), [(8, 8), (1, 32), (32, 16)]), ((6, 31), [(7, 5), (16, 32), (4, 128)]), ((31, 3), [(7, 5)])]:
            made = lists(*old)
            for tile in sizes:
                new, exact = made.retile(*tile).validate().classes(), brute(*tile)
                assert new.shape == exact.shape and torch.equal(new[new != 1], exact[new != 1]), (name, old, tile)
            if old == (16, 32):
                assert int((made.retile(8, 8).classes() == 1).sum()) <= 8 * int((made.classes() == 1).sum()), name


def test_retile_to_its_own_tile_and_to_none() -> None:
    lists = example()
    assert lists.retile(128, 128) is lists
    with pytest.raises(ValueError, match=r"tile\[0\] is 0"):
        lists.retile(0, 64)


def test_from_block_sparse() -> None:
    table = torch.tensor([3, 50, 0])
    for mod, batch in ((masks.causal(), 1), (lambda b, h, q, k: (k < table[b]) | (k < h), 3)):
        dense = compute_block_sparsity(16, 8, batch, 2, 40, 61, mod, device="cpu")
        for layout in ("flat", "padded"):
            lists = VarlenBlockSparseTensors.from_block_sparse(dense, batch=3, layout=layout).validate()
            equal = torch.tensor([40] * 3), torch.tensor([61] * 3)
            assert lists.layout == layout and torch.equal(lists.classes(), brute_classes_ragged(mod, *equal, (16, 8), 2))
    assert VarlenBlockSparseTensors.from_block_sparse(dense).tiles.batch == 3
    unknown = BlockSparseTensors(dense.mask_block_cnt, dense.mask_block_idx, tile=(16, 8))
    assert VarlenBlockSparseTensors.from_block_sparse(replace(unknown, lengths=(40, 61))).full_block_cnt is None
    for arguments, error, message in [
        ((dense, 4), ValueError, "batch is 4, but the block lists are for 3 batch entries"),
        ((unknown,), ValueError, "do not know their sequence lengths"),
        (([],), TypeError, "lists is a list; wanted BlockSparseTensors"),
    ]:
        with pytest.raises(error, match=message):
            VarlenBlockSparseTensors.from_block_sparse(*arguments)


def test_a_thousand_sequences() -> None:
    """1,000 sequences of 1 to 4,096 tokens, from the mask to the lists, in a few hundred operations on a few numbers for each token."""
    cu_seqlens = ends(torch.randint(1, 4097, (1000,), generator=torch.Generator().manual_seed(0)))
    with Work() as work:
        lists = compute_varlen_block_sparsity(128, 128, None, masks.causal(), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    assert work.operations <= 800 and work.results <= 50 * 8 * int(cu_seqlens[-1])
    rows = -(-cu_seqlens.diff() // 128)
    lone = cu_seqlens.diff() % 128 == 1  # a last tile of one row and one key, which it sees
    assert int(lists.mask_block_cnt.sum()) == int(rows.sum()) - int(lone.sum())
    assert int(lists.visited().sum()) == int((rows * (rows + 1) // 2).sum())


# ---- bad input


def damaged(name: str, at: Any, value: int, **kwargs: Any) -> VarlenBlockSparseTensors:
    lists = example(**kwargs)
    tensor = getattr(lists, name).clone()
    tensor[at] = value
    return replace(lists, **{name: tensor})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("mask_block_cnt", (0, 3), 5), "mask_block_cnt of sequence 2, row tile 1, head 0 is 5; wanted 0 to 4, its key tiles"),
        (("mask_block_cnt", (0, 1), 3), "mask_block_cnt of sequence 0, row tile 1, head 0 is 3; wanted 0 to 2"),
        (("full_block_cnt", (0, 0), -1), "full_block_cnt of sequence 0, row tile 0, head 0 is -1"),
        (("mask_block_idx", (0, 2), 2), "mask_block_idx of sequence 0, row tile 1, head 0 lists tile 2; wanted 0 to 1"),
        (("mask_block_idx", (0, 12), -1), "mask_block_idx of sequence 2, row tile 2, head 0 lists tile -1; wanted 0 to 3"),
        (("full_block_idx", (0, 13), 0), "full_block_idx of sequence 2, row tile 2, head 0 is not strictly increasing: 0 follows 0"),
        (("full_block_idx", (0, 12), 3), "full_block_idx of sequence 2, row tile 2, head 0 is not strictly increasing: 1 follows 3"),
        (("full_block_idx", (0, 15), 3), "full_block_idx of sequence 2, row tile 2, head 0 is 3 after the listed tiles"),
        (("mask_block_idx", (0, 12), 1), "tile 1 of sequence 2, row tile 2, head 0 is listed as mask block and as full block"),
    ],
)
def test_validate(bad: tuple, message: str) -> None:
    example().validate()
    with pytest.raises(ValueError, match=message):
        damaged(*bad).validate()


def test_validate_padded() -> None:
    example(layout="padded").validate()
    with pytest.raises(ValueError, match="mask_block_idx of sequence 0, row tile 1, head 0 is 1 after the listed tiles"):
        damaged("mask_block_idx", (0, 1, 3), 1, layout="padded").validate()  # beyond what the flat layout has room for
    with pytest.raises(ValueError, match="full_block_idx of sequence 2, row tile 2, head 0 is not strictly increasing: 0 follows 0"):
        damaged("full_block_idx", (0, 4, 1), 0, layout="padded").validate()


def test_damaged_lists_are_noticed() -> None:
    with pytest.raises(
        ValueError, match="name key tile 7 in row tile 1 of sequence 2, which has 4 key tiles; wanted lists of these sequences"
    ):
        damaged("mask_block_idx", (0, 8), 7).classes()


def build(**change: Any) -> VarlenBlockSparseTensors:
    lists = example()
    fields = {name: getattr(lists, name) for name in FIELDS}
    return VarlenBlockSparseTensors(**{**fields, "tile": (128, 128), **change})


def test_bad_construction() -> None:
    whole, long = example(), torch.tensor([200, 0, 300])
    int32 = lambda *shape: torch.zeros(shape, dtype=torch.int32)
    assert same(build(cu_block_cnt=None, cu_block_idx=None), whole)
    for change, error, message in [
        ({"tile": None}, TypeError, r"needs tile, \(tile_m, tile_n\)"),
        ({"tile": (128, 0)}, ValueError, r"tile\[1\] is 0"),
        ({"tile": (64, 128)}, ValueError, r"cu_block_cnt\[1\] is 2, but seqlens_q and seqlens_k in this tile make it 4"),
        ({"seqlens_k": None}, TypeError, r"needs seqlens_k, the keys \(B,\)"),
        ({"seqlens_q": [200, 0, 300]}, TypeError, r"seqlens_q is a list; wanted a torch.int64 tensor \(B,\)"),
        ({"seqlens_q": long.int()}, TypeError, "seqlens_q is torch.int32; wanted torch.int64"),
        ({"seqlens_q": long[None]}, ValueError, r"seqlens_q has shape \(1, 3\); wanted 1 dimensions"),
        ({"seqlens_q": long - 1}, ValueError, r"seqlens_q\[1\] is -1; wanted 0 or more"),
        ({"seqlens_q": long[:2]}, ValueError, "seqlens_q has 2 entries and seqlens_k 3"),
        ({"cu_block_cnt": whole.cu_block_cnt.long()}, TypeError, "cu_block_cnt is torch.int64; wanted torch.int32"),
        ({"cu_block_idx": whole.cu_block_idx[:2]}, ValueError, "cu_block_idx has 2 entries; wanted 4"),
        ({"cu_block_idx": whole.cu_block_idx + 1}, ValueError, r"cu_block_idx\[0\] is 1, .* make it 0; leave cu_block_idx out"),
        ({"full_block_idx": None}, ValueError, "pass both or neither"),
        ({"mask_block_cnt": [0]}, TypeError, r"mask_block_cnt is a list; wanted a torch.int32 tensor \(H, total_m\)"),
        ({"mask_block_cnt": whole.mask_block_cnt.long()}, TypeError, "mask_block_cnt is torch.int64; wanted torch.int32"),
        ({"mask_block_cnt": whole.mask_block_cnt[0]}, ValueError, r"mask_block_cnt has shape \(5,\); wanted 2 dimensions"),
        ({"mask_block_cnt": int32(1, 6)}, ValueError, r"mask_block_cnt has 6 row tiles, but the lengths in tiles of \(128, 128\) make 5"),
        ({"mask_block_cnt": int32(2, 5)}, ValueError, "mask_block_cnt has 2 heads and mask_block_idx 1"),
        ({"mask_block_idx": int32(1)}, ValueError, r"mask_block_idx has shape \(1,\); wanted 2 or 3 dimensions"),
        ({"mask_block_idx": int32(1, 15)}, ValueError, r"mask_block_idx has 15 entries \(flat layout\), .* make 16"),
        ({"mask_block_idx": int32(1, 5, 3)}, ValueError, r"mask_block_idx has 5 row tiles of 3 entries \(padded layout\), .* make 5 of 4"),
        ({"full_block_idx": int32(1, 5, 4)}, ValueError, "wanted the same heads and the same layout"),
        ({"full_block_cnt": int32(2, 5), "full_block_idx": int32(2, 16)}, ValueError, "wanted the same heads and the same layout"),
        ({"full_block_idx": int32(1, 16).to("meta")}, ValueError, "full_block_idx is on meta and seqlens_q on cpu; wanted one device"),
    ]:
        with pytest.raises(error, match=message):
            build(**change)


def test_bad_classes() -> None:
    seqlens, classes = torch.tensor([8, 3]), torch.zeros(1, 5, dtype=torch.uint8)
    assert VarlenBlockSparseTensors.from_classes(classes, (4, 4), seqlens, seqlens).classes().tolist() == [[0] * 5]
    for arguments, error, message in [
        ((classes[:, :4], (4, 4), seqlens, seqlens), ValueError, r"classes has 4 tiles, but the lengths in tiles of \(4, 4\) make 5"),
        ((classes.int(), (4, 4), seqlens, seqlens), TypeError, "classes is torch.int32; wanted torch.uint8"),
        ((classes[0], (4, 4), seqlens, seqlens), ValueError, r"classes has shape \(5,\); wanted 2 dimensions"),
        ((classes, (4, 4), seqlens - 4, seqlens), ValueError, r"seqlens_q\[1\] is -1"),
        ((classes, (4, 4), seqlens, seqlens, True, "rows"), ValueError, "layout is 'rows'; wanted 'flat'"),
    ]:
        with pytest.raises(error, match=message):
            VarlenBlockSparseTensors.from_classes(*arguments)


def test_bad_arguments() -> None:
    cu = torch.tensor([0, 10, 32])
    good = {"tile_m": 16, "tile_n": 16, "num_heads": 1, "mask_mod": masks.causal(), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    for change, error, message in [
        ({"tile_m": 0}, ValueError, "tile_m is 0"),
        ({"tile_n": 1.5}, TypeError, "tile_n is 1.5"),
        ({"num_heads": [1]}, TypeError, "num_heads is a list"),
        ({"layout": "dense"}, ValueError, "layout is 'dense'; wanted 'flat' .H, total_n. or 'padded'"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is None; pass it"),
        ({"cu_seqlens_q": [0, 10]}, TypeError, r"cu_seqlens_q is a list; wanted an int32 or int64 tensor \(B \+ 1,\)"),
        ({"cu_seqlens_k": cu.float()}, TypeError, "cu_seqlens_k is torch.float32"),
        ({"cu_seqlens_k": cu[None]}, ValueError, r"cu_seqlens_k has shape \(1, 3\)"),
        ({"cu_seqlens_k": cu[1:]}, ValueError, r"cu_seqlens_k starts with \[10\]; wanted 0"),
        ({"cu_seqlens_k": cu[:0]}, ValueError, r"cu_seqlens_k starts with \[\]; wanted 0"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 4])}, ValueError, r"cu_seqlens_k\[2\] is 4, less than 9 before it"),
        ({"cu_seqlens_k": cu[:2]}, ValueError, "there are 2 sequences of queries and 1 of keys"),
        ({"seqused_k": torch.tensor([10, 23])}, ValueError, r"seqused_k\[1\] is 23; wanted 0 to 22, the length that cu_seqlens_k gives"),
        ({"seqused_q": torch.tensor([-1, 3])}, ValueError, r"seqused_q\[0\] is -1; wanted 0 to 10"),
        ({"seqused_k": torch.tensor([-1, 3]), "cu_seqlens_k": None}, ValueError, r"seqused_k\[0\] is -1; wanted 0 or more"),
        ({"seqused_q": torch.tensor([1, 2, 3])}, ValueError, "seqused_q has 3 entries, but cu_seqlens_q has 3; wanted B and B . 1"),
        ({"seqused_q": 5}, TypeError, r"seqused_q is a int; wanted an int32 or int64 tensor \(B,\)"),
        ({"mask_mod": lambda b, h, q, k, aux_tensors: q >= k}, TypeError, "passes no aux_tensors"),
        ({"mask_mod": lambda b, h, q, k: cu[k] > q}, ValueError, "reads dimension 0 of a captured tensor .* wanted an index from -3 to 2"),
        ({"device": "meta", "mask_mod": lambda b, h, q, k: cu[b] > q}, ValueError, "device is 'meta' but mask_mod"),
    ]:
        with pytest.raises(error, match=message):
            compute_varlen_block_sparsity(**{**good, **change})


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_lists_have_as_many_heads_as_asked_for(layout):
    """As the dense ones do, though the mask ignores heads."""
    where = {"cu_seqlens_q": ends(torch.tensor([20, 0, 33])), "cu_seqlens_k": ends(torch.tensor([20, 5, 40]))}
    one = compute_varlen_block_sparsity(8, 8, None, masks.causal(), **where, layout=layout)
    four = compute_varlen_block_sparsity(8, 8, 4, masks.causal(), **where, layout=layout).validate()
    for name in ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"):
        found, wanted = getattr(four, name), getattr(one, name)
        assert found.shape == (4, *wanted.shape[1:]) and found.is_contiguous() and torch.equal(found, wanted.expand_as(found))
    without = compute_varlen_block_sparsity(8, 8, 4, masks.causal(), **where, compute_full_blocks=False)
    assert without.mask_block_cnt.shape[0] == 4 and without.full_block_cnt is None
