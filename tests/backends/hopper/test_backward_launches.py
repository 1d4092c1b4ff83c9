"""Launches of the Hopper backward pass over sequences and documents, without a GPU: which there are, and with which tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, planner
from anyattn.arithmetic import ceil_div
from anyattn.backends import repeater_of
from anyattn.backends.hopper import backward_launches, make_backward_config
from anyattn.backends.hopper.backward_config import BackwardConfig, RowsConfig
from anyattn.backends.hopper.backward_tables import KeyOrder, order_of_lists, order_where
from anyattn.backends.hopper.compile import launch
from anyattn.backends.hopper.make_backward_config import backward_dispatch, reason_against_backward
from anyattn.backends.hopper.tables_config import TablesConfig
from anyattn.call_cache.attention import FlexCall, flex_call
from anyattn.documents.rewrite import DocumentTables
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.validate import sequences
from tests.support.hopper.pretended import H200, Launch

ENDS = torch.tensor([0, 5, 5, 70, 200], dtype=torch.int32)
USED = torch.tensor([5, 0, 60, 100], dtype=torch.int32)
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 300, 128, 271]))


def requiring_grad(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()


def gradients_of(out: Tensor, launched: list[Launch]) -> list[Launch]:
    """What the backward pass launches."""
    launched.clear()
    out.backward(torch.zeros_like(out))
    return launched


@pytest.fixture(autouse=True)
def _unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)


def packed(**options: Any) -> Tensor:
    operands = requiring_grad(200, 4, 64), requiring_grad(200, 2, 64), requiring_grad(200, 2, 64)
    out: Tensor = anyattn.flash_attn_varlen_func(*operands, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, backend="hopper", **options)
    return out


def of_kind(found: list[Launch], kind: type) -> list[Launch]:
    return [one for one in found if isinstance(one[0], kind)]


def blind(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i % 5 != 0)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(
    ("keys", "mask", "is_cleared"), [(128, None, False), (100, masks.causal(), True), (90, blind, True), (129, None, False)]
)
def test_keys_of_one_tile_need_no_sums_of_dq(
    keys: int, mask: Any, is_cleared: bool, is_deterministic: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = requiring_grad(2, 4, 300, 64), requiring_grad(2, 2, keys, 64)
    out = anyattn.flex_attention(q, k, k, mask_mod=mask, enable_gqa=True, backend="hopper", deterministic=is_deterministic)
    cleared: list[tuple[int, ...]] = []
    monkeypatch.setattr(Tensor, "zero_", lambda t: cleared.append(tuple(t.shape)) or t)
    found = gradients_of(out, launched)
    ((config, products),) = of_kind(found, BackwardConfig)
    assert config.stores_dq == (keys <= 128) and config.is_deterministic == (is_deterministic and not config.stores_dq)
    assert [type(c) for c, _ in found] == [RowsConfig, BackwardConfig] + [RowsConfig] * (not config.stores_dq)
    assert cleared == [(2, 4, 300, 64)] * is_cleared and (mask is not blind or config.lists == "dense")
    if config.stores_dq:
        assert products[8].shape == q.shape and products[8].dtype == q.dtype and found[0][1][8] is None
    else:
        assert products[8].dtype == torch.float32


@pytest.mark.parametrize("keys,wants_dq", [(300, True), (300, False), (100, True)])
def test_few_heads_are_divided_and_their_parts_added(
    keys: int, wants_dq: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One K/V head for four query heads, and more multiprocessors than key tiles."""
    monkeypatch.setattr(make_backward_config, "processors_of", lambda device: 132)
    q, k = requiring_grad(1, 4, 600, 64), requiring_grad(1, 1, keys, 64)
    q = q if wants_dq else q.detach()
    gradients_of(anyattn.flex_attention(q, k, k, enable_gqa=True, backend="hopper"), launched)
    (before, _), (config, products), (after, last) = launched
    assert config.stores_float32 and after.divides_heads and after.is_after and not before.divides_heads
    dk, dv = products[4:6]
    assert dk.shape == dv.shape == (1, 4, keys, 64) and dk.dtype == dv.dtype == torch.float32
    assert products[20:22] == (ceil_div(keys, 128), 4)  # key tiles, and the parts that have each
    assert last[5:7] == (dk, dv) and [t.shape for t in last[7:9]] == [(1, 1, keys, 64)] * 2 and last[7].dtype == torch.bfloat16
    assert (last[0] is None) == (last[1] is None) == (config.stores_dq or not wants_dq)
    assert config.stores_dq == (keys == 100)


def test_rows_of_no_sequence_have_parts_of_zeros(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_backward_config, "processors_of", lambda device: 132)
    q, k, ends = requiring_grad(1200, 4, 64), requiring_grad(1200, 1, 64), torch.tensor([0, 500, 1100], dtype=torch.int32)
    out = anyattn.flash_attn_varlen_func(q, k, k, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, backend="hopper")
    gradients_of(out, launched)
    ((config, products),) = of_kind(launched, BackwardConfig)
    assert config.stores_float32 and config.has_entries
    assert all(t.shape == (1, 4, 1200, 64) and not t.any() for t in products[4:6])


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("form", ["dense", "one tile", "packed"])
def test_wide_gradients_of_keys_are_what_the_kernel_stores_or_their_sum(
    form: str, parts: int, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns with 16-bit ones on one plan: a prepared launch fails for arguments of other kinds (``pretended.noting``)."""
    monkeypatch.setattr(make_backward_config, "parts_for", lambda ratio, *sizes: parts)
    keys = 100 if form == "one tile" else 700
    q, k = requiring_grad(1, 4, 1200, 64), requiring_grad(1, 1, keys, 64)
    problem, plan = flex_call(FlexCall(q, k, k, None, None, None, None, None, True, None, True, False, False), "hopper", None)  # type: ignore[misc]
    if form == "packed":
        tables = LengthTables(*(torch.tensor([0, 500, n], dtype=torch.int32) for n in (1100, 600)), None, None)
        problem = problem.like(sequences=StoredSequences(tables, StoredSizes(2, 1200, keys, 600, 500)))
    repeater = repeater_of(problem, plan)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    for is_wide in (False, True, False, True):
        launched.clear()
        dq, dk, dv, _ = repeater.backward(problem.like(wide_kv_grads=is_wide), out, lse, out, None)
        ((config, products),) = of_kind(launched, BackwardConfig)
        kind = torch.float32 if is_wide else torch.bfloat16
        assert (dq.dtype, dk.dtype, dv.dtype) == (torch.bfloat16, kind, kind)  # type: ignore[union-attr]
        assert config.stores_float32 == (is_wide or parts > 1) and config.stores_dq == (form == "one tile")
        if parts == 1:
            assert products[4] is dk and products[5] is dv
        else:
            assert launched[-1][0].divides_heads and launched[-1][1][7] is dk and launched[-1][1][8] is dv
            assert products[4].shape == (1, 4, keys, 64) and products[4].dtype is torch.float32
        assert [args[6] is dk and args[7] is dv for _, args in of_kind(launched, TablesConfig)] == [True] * (form == "packed")


def test_as_many_key_tiles_as_multiprocessors_have_no_parts(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_backward_config, "processors_of", lambda device: 4)
    q, k = requiring_grad(1, 4, 600, 64), requiring_grad(1, 2, 600, 64)
    gradients_of(anyattn.flex_attention(q, k, k, enable_gqa=True, backend="hopper"), launched)
    assert not any(getattr(config, name, False) for config, _ in launched for name in ("stores_float32", "divides_heads"))


def test_a_gradient_that_is_not_wanted_is_not_cleared(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = requiring_grad(2, 4, 300, 64).detach(), requiring_grad(2, 4, 100, 64)
    out = anyattn.flex_attention(q, k, k, mask_mod=masks.causal(), backend="hopper")
    monkeypatch.setattr(Tensor, "zero_", None)
    ((config, _),) = of_kind(gradients_of(out, launched), BackwardConfig)
    assert config.stores_dq


def test_a_packed_call_launches_tables_rows_and_products(launched: list[Launch]) -> None:
    found = gradients_of(packed(causal=True), launched)
    assert [type(c) for c, _ in found] == [TablesConfig, RowsConfig, BackwardConfig, RowsConfig]
    by_key, tables = found[0]
    order, entries = tables[5], tables[4]
    assert by_key.by_key and not by_key.ends_with_row and by_key.tile_m == 128
    assert tables[0].equal(ENDS) and tables[:4] == (tables[0], tables[0], None, None)
    assert order.shape == (200 // 128 + 4 + 1, 3) and entries.shape == (4, 9)
    assert [t.shape for t in tables[6:8]] == [(1, 2, 200, 64)] * 2 and tables[8] is None
    assert tables[9].shape == (1, 4, 200, 64)
    (before, rows), (config, products), (after, last) = found[1:]
    assert config.has_entries and before.has_entries and after.has_entries and config.has_right and config.lists is None
    assert rows[5] is entries and last[2] is entries and products[16] is entries and products[15] is order
    (lse, delta, sums), tile_m = products[6:9], config.tiles.tile_m
    assert lse.shape == delta.shape == (1, 4, ceil_div(200, tile_m) + 4, tile_m) and sums.shape == (*lse.shape[:3], 64 * tile_m)
    assert rows[6:9] == (lse, delta, sums) and last[0] is sums
    assert products[4] is tables[6] and products[5] is tables[7] and last[1] is tables[9]
    rows_, spread, section, workers = products[20:24]
    assert (rows_, spread) == (len(order) - 1, 2) and 1 <= section <= 2 and workers == 1


@pytest.mark.parametrize("heads,section", [(4, 4), (8, 2)])
def test_grouped_heads_go_one_round_at_a_time(heads: int, section: int, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key tiles of a head and four multiprocessors: two K/V heads fill them."""
    monkeypatch.setattr(backward_launches, "multiprocessors", lambda device: 4)
    q, k = requiring_grad(1, heads, 250, 64), requiring_grad(1, 4, 250, 64)
    out = anyattn.flex_attention(q, k, k, mask_mod=masks.causal(), enable_gqa=True, backend="hopper")
    ((_, products),) = of_kind(gradients_of(out, launched), BackwardConfig)
    assert products[20:24] == (2, 4, section, 4)
    out = anyattn.flex_attention(q, k, k, mask_mod=masks.causal(), enable_gqa=True, backend="hopper", deterministic=True)
    ((_, products),) = of_kind(gradients_of(out, launched), BackwardConfig)
    assert products[20:24] == (2, 4, 4, 4)  # there tiles wait for one another


@pytest.mark.parametrize(
    ("sizes", "mask", "is_deterministic", "section"),
    [
        ((2, 16, 8192, 128), None, True, 16),
        ((2, 16, 8192, 128), None, False, 4),
        ((1, 16, 8192, 256), None, True, 4),  # of whose heads the L2 cache holds fewer rows
        ((2, 16, 8192, 128), masks.causal(), True, 16),
        ((2, 16, 8192, 128), masks.causal(), False, 8),
        ((1, 4, 8192, 128), masks.causal(), True, 4),
        ((8, 16, 2048, 128), masks.causal(), True, 32),
        ((1, 16, 8192, 256), masks.causal(), True, 16),
        ((2, 16, 8192, 128), masks.sliding_window(1023, 0), True, 4),  # whose tiles begin at rows of their own
    ],
)
def test_few_tiles_of_a_head_take_turns(
    sizes: tuple[int, int, int, int],
    mask: Any,
    is_deterministic: bool,
    section: int,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backward_launches, "multiprocessors", lambda device: 132)
    batch, heads, length, dim = sizes
    q = torch.empty(1, 1, 1, dim, dtype=torch.bfloat16).expand(batch, heads, length, dim).requires_grad_()
    out = anyattn.flex_attention(q, q, q, mask_mod=mask, backend="hopper", deterministic=is_deterministic)
    ((_, products),) = of_kind(gradients_of(out, launched), BackwardConfig)
    assert products[20:24] == (length // (128 if dim <= 128 else 64), batch * heads, section, 132)


def test_lists_from_a_table_go_one_round_at_a_time(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows have no order, so that the L2 cache holds those of few heads; a mask by positions keeps the heads that even tiles out."""
    monkeypatch.setattr(backward_launches, "multiprocessors", lambda device: 16)
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16).expand(2, 16, 1024, 128).requires_grad_()
    table = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    for mask, section in ((lambda b, h, i, j: table[i // 128, j // 128], 2), (masks.prefix_lm(300), 32)):
        for is_deterministic in (False, True):
            out = anyattn.flex_attention(q, q, q, mask_mod=mask, backend="hopper", deterministic=is_deterministic)
            ((config, products),) = of_kind(gradients_of(out, launched), BackwardConfig)
            assert config.looks_up_pairs == (section == 2) and products[20:22] == (8, 32)
            assert products[22] == (section if not is_deterministic else 32)


@pytest.mark.parametrize(("total", "entries", "section"), [(16_384, 8, 4), (65_536, 256, 1)])
def test_heads_of_packed_sequences_go_side_by_side(
    total: int, entries: int, section: int, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many that the longest sequences of some heads do not end the launch, unless there are many tiles in all."""
    monkeypatch.setattr(backward_launches, "multiprocessors", lambda device: 132)
    q = torch.empty(1, 1, 128, dtype=torch.bfloat16).expand(total, 16, 128).requires_grad_()
    ends = torch.arange(0, total + 1, total // entries, dtype=torch.int32)
    for is_causal in (False, True):
        out = anyattn.flash_attn_varlen_func(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=is_causal, backend="hopper")
        ((_, products),) = of_kind(gradients_of(out, launched), BackwardConfig)
        assert products[21:23] == (16, section)


def test_turns_follow_sequences_in_their_order(launched: list[Launch]) -> None:
    found = gradients_of(packed(causal=True, deterministic=True), launched)
    ((config, products),) = of_kind(found, BackwardConfig)
    assert config.is_deterministic
    assert (
        products[9].shape == (1, 4, ceil_div(200, config.tiles.tile_m) + 4) and products[9].dtype is torch.int32 and not products[9].any()
    )


def test_the_blocks_that_clear_rows_are_bounded(launched: list[Launch]) -> None:
    q, k = requiring_grad(80_000, 32, 8), requiring_grad(80_000, 1, 8)
    out = anyattn.flash_attn_varlen_func(q, k, k, cu_seqlens_q=80 * ENDS, cu_seqlens_k=80 * ENDS, backend="hopper")
    ((_, tables),) = of_kind(gradients_of(out, launched), TablesConfig)
    assert tables[-2:] == (1 + 528 // 32, 32)


def test_rows_are_cleared_where_there_may_be_gaps(launched: list[Launch]) -> None:
    q, k = requiring_grad(4, 60, 4, 64), requiring_grad(4, 100, 2, 64)
    out = anyattn.flash_attn_varlen_func(q, k, k, seqused_k=USED, backend="hopper")
    found = of_kind(gradients_of(out, launched), TablesConfig)
    assert len(found) == 1 and [t.shape for t in found[0][1][6:8]] == [(4, 2, 100, 64)] * 2 and found[0][1][9] is None
    out = anyattn.flash_attn_varlen_func(q, k, k, seqused_q=USED.clamp(max=60), backend="hopper")
    found = of_kind(gradients_of(out, launched), TablesConfig)
    assert len(found) == 1 and found[0][1][6] is None and found[0][1][9].shape == (4, 4, 60, 64)


def test_other_masks_than_bands_are_lists(launched: list[Launch]) -> None:
    mask = masks.document(IDS)
    ((config, products),) = of_kind(gradients_of(packed(mask_mod=mask, causal=True), launched), BackwardConfig)
    assert (config.lists, config.list_cut, config.per_head) == ("flat", (2, 1), False)
    assert config.partial is not None and len(config.always) == 1 and not config.bands
    assert products[10].shape[0] == 1 and products[16][:, 7].tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_lists_of_sequences_are_transposed(layout: str, launched: list[Launch]) -> None:
    mask = masks.document(IDS)
    lists = anyattn.compute_varlen_block_sparsity(128, 128, None, mask, layout=layout, device="cpu", cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
    ((config, products),) = of_kind(gradients_of(packed(mask_mod=mask, block_sparse_tensors=lists), launched), BackwardConfig)
    assert config.lists == ("flat" if layout == "flat" else "ragged") and config.partial is not None
    turned = lists.transposed()
    assert products[10].equal(turned.mask_block_cnt) and products[11].equal(turned.mask_block_idx)


def by_documents(mask: Any, launched: list[Launch], lists: Any = None) -> list[Launch]:
    operands = [requiring_grad(2, 2, 700, 64) for _ in range(3)]
    lists = anyattn.create_block_mask(mask, 2, None, 700, 700, device="cpu") if lists is None else lists
    return list(gradients_of(anyattn.flex_attention(*operands, block_mask=lists, backend="hopper"), launched))


def test_documents_are_sequences(launched: list[Launch]) -> None:
    found = by_documents(masks.document(IDS) & masks.causal(), launched)
    assert [type(c) for c, _ in found] == [RowsConfig, BackwardConfig, RowsConfig] and all(c.has_entries for c, _ in found)
    config, products = found[1]
    order, entries = products[15:17]
    count = int(order[-1, 0])
    assert count == 2 * (1 + 3 + 1 + 3) and config.has_right and config.lists is None and not config.always
    assert entries[:4, :3].tolist() == [[0, 0, 1], [0, 1, 300], [0, 301, 128], [0, 429, 271]]
    lengths = entries[:, 2].tolist()
    assert all(n * 128 < lengths[b] for n, _, b in order[:count].tolist())
    found = by_documents(masks.document(torch.arange(700) // 50 % 2), launched)
    assert [c.has_entries for c, _ in found] == [False] * 3 and found[1][0].lists == "dense"
    assert found[1][1][15].tolist() == [[n, 0, 0] for n in range(6)] + [[6, 0, 0]]
    assert found[2][1][3] is None


@pytest.mark.parametrize("ids,held", [(IDS, True), (torch.arange(700) // 50 % 2, False)], ids=["documents", "others"])
def test_both_are_launched_until_it_is_known(ids: Tensor, held: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    found = by_documents(masks.document(ids), launched)
    assert [c.has_entries for c, _ in found] == [True] * 3 + [False] * 3
    within, listed = found[1][1], found[4][1]
    assert bool(within[15][-1, 0]) is held and listed[15][-1].tolist() == [0 if held else 6, 0, 0]
    assert sorted(listed[15][:-1, 0].tolist()) == list(range(6))
    assert within[4] is listed[4] and within[5] is listed[5] and found[2][1][1] is found[5][1][1]
    assert found[2][1][3] is None and found[5][1][3].tolist() == [int(held)]


def test_parts_of_both_launches_end_in_the_same_gradients(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of the launch by sequences come first, and those of the launch by lists heed the guard."""
    monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    monkeypatch.setattr(make_backward_config, "processors_of", lambda device: 132)
    q, k = requiring_grad(1, 4, 700, 64), requiring_grad(1, 1, 700, 64)
    lists = anyattn.create_block_mask(masks.document(IDS), None, None, 700, 700, device="cpu")
    found = gradients_of(anyattn.flex_attention(q, k, k, block_mask=lists, enable_gqa=True, backend="hopper"), launched)
    assert [c.has_entries for c, _ in found] == [True] * 3 + [False] * 3
    assert all(found[i][0].stores_float32 and found[i + 1][0].divides_heads for i in (1, 4))
    within, listed = found[2][1], found[5][1]
    assert within[3] is None and listed[3].tolist() == [1]
    assert within[7] is listed[7] and within[8] is listed[8] and within[5] is not listed[5]
    assert within[5:7] == found[1][1][4:6] and listed[5:7] == found[4][1][4:6]


@pytest.mark.parametrize("is_held", [True, False])
def test_documents_of_one_key_tile_keep_their_gradient(is_held: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch by lists, which has no sums of dq to write, clears dq only where the documents' launch has not written it."""
    monkeypatch.setattr(DocumentTables, "answer", lambda self: None)

    def written(config: Any, arguments: tuple) -> None:
        launch.launch(config, arguments)
        if isinstance(config, RowsConfig) and config.is_after:
            arguments[1].fill_(7.0)

    monkeypatch.setattr(backward_launches, "launch", written)
    ids = torch.arange(100) // 40 if is_held else torch.arange(100) // 10 % 2
    operands = [requiring_grad(2, 2, 100, 64) for _ in range(3)]
    lists = anyattn.create_block_mask(masks.document(ids), 2, None, 100, 100, device="cpu")
    out = anyattn.flex_attention(*operands, block_mask=lists, backend="hopper")
    found = gradients_of(out, launched)
    assert [c.stores_dq for c, _ in of_kind(found, BackwardConfig)] == [False, True]
    assert operands[0].grad is not None and operands[0].grad.unique().tolist() == [7.0 * is_held]


def test_ahead_of_time_both_are_compiled(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(launch, "warm", lambda config, kinds: found.append(config))
    with launch.compiling_only():
        by_documents(masks.document(IDS), launched)
    assert [c.has_entries for c in found if isinstance(c, BackwardConfig)] == [True, False]


def test_an_order_that_a_guard_empties() -> None:
    rows = torch.tensor([[2, 0, 0], [0, 0, 0], [1, 0, 0], [3, 0, 0]], dtype=torch.int32)
    for guard, tiles in ((0, 3), (1, 0)):
        for given, numbers in ((KeyOrder(rows), [2, 0, 1]), (KeyOrder(), [0, 1, 2])):
            order, entries = order_where(given, 3, torch.tensor([guard], dtype=torch.int32))
            assert order is not None and order.tolist() == [[n, 0, 0] for n in numbers] + [[tiles, 0, 0]]
            assert order.dtype is torch.int32 and entries is None


def test_key_tiles_that_most_rows_see_come_first() -> None:
    """In classes of an eighth of the most, in which they keep their order; lists of entries and heads are added up."""
    partial, full = torch.tensor([[[1, 9, 0, 30]], [[0, 9, 1, 31]]]), torch.tensor([[[0, 2, 1, 1]], [[1, 0, 1, 1]]])
    lists = (partial, None, full, None)
    orders = order_of_lists(lists, 1, 4), order_of_lists((partial, None, None, None), 2, 7)
    for (order, entries), numbers in zip(orders, ([3, 1, 0, 2], [6, 2, 3, 0, 1, 4, 5]), strict=True):
        assert order is not None and entries is None
        assert order.tolist() == [[n, 0, 0] for n in numbers] + [[len(numbers), 0, 0]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_lists_that_are_kept_are_sorted_once(deterministic: bool, launched: list[Launch]) -> None:
    """For each width of key tiles: heads of 256 have tiles of 64 keys."""
    seen = torch.zeros(700, dtype=torch.int64)
    seen[300:400] = 650
    mask = anyattn.create_block_mask(lambda b, h, i, j: i <= seen[j], 1, None, 700, 700, device="cpu")

    def order(d: int) -> Any:
        out = anyattn.flex_attention(
            *(requiring_grad(1, 2, 700, d) for _ in range(3)), block_mask=mask, backend="hopper", deterministic=deterministic
        )
        ((_, products),) = of_kind(gradients_of(out, launched), BackwardConfig)
        return products[15]

    first, wide, again = order(64), order(256), order(64)
    if deterministic:  # key tiles wait for those before them
        assert first is wide is again is None
    else:
        assert first is again and first[:, 0].tolist() == [2, 3, 0, 1, 4, 5, 6]
        assert wide[:, 0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]


def problem(page_table: Tensor | None = None, **changes: Any) -> Problem:
    q = torch.zeros(1, 2, 200, 128, dtype=torch.bfloat16).requires_grad_()
    stored = StoredSequences(LengthTables(ENDS, ENDS, None, None), StoredSizes(4, 200, 200, 200, 200), page_table, q.device)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1, "sequences": stored} | changes))


BANDS = [trace(m, "mask").expr for m in (masks.causal(), masks.sliding_window(9, 0))]


def test_plans_name_this_backend() -> None:
    for mask in (masks.causal(), masks.sliding_window(9, 0), masks.prefix_lm(5), masks.document(IDS)):
        p = problem(predicates=(trace(mask, "mask"),))
        assert planner.choose(p, H200).backward == "hopper" and backward_dispatch(p).spec.config.has_entries
        reason = reason_against_backward(problem(predicates=(trace(mask, "mask"),), deterministic=True))
        assert reason is None if p.predicates[0].expr in BANDS else "no fixed order" in str(reason)
    assert "pages" in str(reason_against_backward(problem(torch.zeros(4, 2, dtype=torch.int32))))


def test_lists_in_other_tiles_are_refused(launched: list[Launch]) -> None:
    lists = anyattn.compute_varlen_block_sparsity(128, 64, None, masks.causal(), device="cpu", cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
    p = problem(predicates=(trace(masks.causal(), "mask"),), blocks=lists)
    assert "64 rows x 128 keys" in str(reason_against_backward(p)) and planner.choose(p, H200).backward == "triton"


def test_explain_names_this_backend(launched: list[Launch]) -> None:
    operands = [requiring_grad(2, 2, 700, 64) for _ in range(3)]
    lists = anyattn.create_block_mask(masks.document(IDS), 2, None, 700, 700, device="cpu")
    plan = anyattn.explain(*operands, block_mask=lists, backend="hopper").plan
    assert plan.backward == "hopper" and any("each is run as a sequence" in line for line in plan.why)
