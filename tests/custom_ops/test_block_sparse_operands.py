"""``block_sparse_tensors`` in compiled and exported calls: the bits, gradients and errors of eager calls, and no graph for other lists."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import anyattn
from anyattn.custom_ops import block_sparse_operands
from anyattn.custom_ops.block_sparse_operands import BlockSparse, blocks_of_operands
from anyattn.custom_ops.flash import flash_block_sparse, flash_block_sparse_backward
from anyattn.custom_ops.flex import operands_of
from anyattn.mods.tracing.trace import trace
from anyattn.sparsity import BlockSparseTensors, VarlenBlockSparseTensors
from tests.support.compiling import fresh
from tests.support.covering import few
from tests.support.operands import as_its_fake
from tests.support.strided import EACH, inputs

B, S, H, D, TILE = 2, 70, 4, 16, 16
ENDS = torch.tensor([0, 9, 9, S], dtype=torch.int32)


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j < 40 + b)


def rows(*sizes: int, seed: int = 0) -> list[Tensor]:
    """q, k and v, laid out (*sizes, heads, D)."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*sizes, n, D, generator=g).requires_grad_() for n in (H, 2, 2)]


def dense_lists(n: int = 0, heads: int | None = None, batch: int | None = B, length: int = S, **options: Any) -> BlockSparseTensors:
    """The tiles of ``near`` without some rows; n: which."""
    mask = lambda b, h, i, j: near(b, h, i, j) & (i % (n + 9) > 0)
    return anyattn.compute_block_sparsity(TILE, TILE, batch, heads, length, length, mask, device="cpu", **options)


def varlen_lists(n: int = 0, heads: int | None = None, ends: Tensor = ENDS, **options: Any) -> VarlenBlockSparseTensors:
    mask = lambda b, h, i, j: near(b, h, i, j) & (i // TILE % (n + 3) != 1)
    return anyattn.compute_varlen_block_sparsity(TILE, TILE, heads, mask, cu_seqlens_q=ends, cu_seqlens_k=ends, **options)


def compact(lists: BlockSparseTensors, lengths: tuple[int, int] | None = None) -> BlockSparseTensors:
    """The same lists with room for no more tiles than a row has."""

    def narrow(cnt: Tensor | None, idx: Tensor | None) -> Tensor | None:
        return None if cnt is None or idx is None else idx[..., : max(1, int(cnt.max()))].contiguous()

    mask, full = narrow(lists.mask_block_cnt, lists.mask_block_idx), narrow(lists.full_block_cnt, lists.full_block_idx)
    return replace(lists, mask_block_idx=mask, full_block_idx=full, lengths=lengths)


def dense(q: Tensor, k: Tensor, v: Tensor, lists: Any) -> tuple[Tensor, Tensor]:
    return anyattn.flash_attn_func(q, k, v, mask_mod=near, block_sparse_tensors=lists, return_lse=True)


def varlen(q: Tensor, k: Tensor, v: Tensor, lists: Any, ends: Tensor = ENDS) -> tuple[Tensor, Tensor]:
    return anyattn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, mask_mod=near, block_sparse_tensors=lists, return_lse=True
    )


def results(call: Callable, args: Sequence[Any], sources: Sequence[Tensor]) -> list[Tensor]:
    """out, lse and the gradients of a weighted sum of both, without the lse of rows that see nothing."""
    outs = call(*args)
    total = sum((o.where(o.isfinite(), 0) * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outs)
    return [*(o.detach() for o in outs), *torch.autograd.grad(total, sources)]


def same(compiled: Callable, eager: Callable, args: Sequence[Any], sources: Sequence[Tensor]) -> bool:
    pairs = list(zip(results(compiled, args, sources), results(eager, args, sources), strict=True))
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


# ---- compiled calls


DENSE: dict[str, Callable[[int], BlockSparseTensors]] = {
    "full tiles apart": dense_lists,
    "full tiles as partial ones": lambda n: dense_lists(n, compute_full_blocks=False),
    "a head's lists for all": lambda n: dense_lists(n, batch=None),
    "lists of each head": lambda n: dense_lists(n, H),
    "without lengths": lambda n: replace(dense_lists(n), lengths=None),
    "on strided memory": lambda n: replace(dense_lists(n), mask_block_cnt=dense_lists(n).mask_block_cnt.mT.contiguous().mT),
}
VARLEN: dict[str, Callable[[int], VarlenBlockSparseTensors]] = {
    "flat": varlen_lists,
    "padded": lambda n: varlen_lists(n, layout="padded"),
    "full tiles as partial ones": lambda n: varlen_lists(n, compute_full_blocks=False),
    "lists of each head": lambda n: varlen_lists(n, H),
}


def check_one_graph(call: Callable, make: Callable[[int], Any], given: list[Tensor], backend: str) -> None:
    """Three times other lists of the same shapes."""
    compiled, graphs = fresh(call, backend)
    for n in range(3):
        assert same(compiled, call, (*given, make(n)), given)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("name", DENSE)
def test_other_lists_of_the_same_shapes_compile_nothing(name: str) -> None:
    check_one_graph(dense, DENSE[name], rows(B, S), "aot_eager")


@pytest.mark.parametrize("name", VARLEN)
def test_other_varlen_lists_of_the_same_shapes_compile_nothing(name: str) -> None:
    check_one_graph(varlen, VARLEN[name], rows(S), "aot_eager")


@pytest.mark.parametrize("call, make, sizes", [(dense, dense_lists, (B, S)), (varlen, varlen_lists, (S,))], ids=["dense", "varlen"])
def test_inductor(call: Callable, make: Callable, sizes: tuple[int, ...]) -> None:
    check_one_graph(call, make, rows(*sizes), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *VARLEN])
def test_inductor_with_all_lists(name: str) -> None:
    for call, table, sizes in ((dense, DENSE, (B, S)), (varlen, VARLEN, (S,))):
        if name in table:
            check_one_graph(call, table[name], rows(*sizes), "inductor")


@pytest.mark.parametrize("knows_lengths", [False, True])
def test_compact_lists_of_other_widths_share_a_graph_of_open_sizes(knows_lengths: bool) -> None:
    compiled, graphs = fresh(dense)
    given = rows(B, S)
    seen = set()
    for n in (0, 60, 1, 30):
        band = lambda b, h, i, j, n=n: (i >= j) & (i - j <= n)
        lists = anyattn.compute_block_sparsity(TILE, TILE, None, None, S, S, band, device="cpu", compute_full_blocks=False)
        lists = compact(lists, (S, S) if knows_lengths else None)
        seen.add(lists.mask_block_idx.shape[-1])
        assert same(compiled, dense, (*given, lists), given)
    # the second width opens the size; a width of 1 may be a graph of its own
    assert len(seen) >= 3 and graphs.frame_count <= 3


def test_varlen_lists_of_other_lengths_share_a_graph_of_open_sizes() -> None:
    compiled, graphs = fresh(varlen)
    given = rows(S)
    for values in ((0, 9, 9, S), (0, 1, 20, S), (0, 30, 40, S), (0, 33, 66, S)):  # the second opens both sizes
        ends = torch.tensor(values, dtype=torch.int32)
        assert same(compiled, varlen, (*given, varlen_lists(ends=ends), ends), given)
    assert graphs.frame_count <= 2


def test_lengths_that_change_share_a_graph_of_open_sizes() -> None:
    compiled, graphs = fresh(dense)
    for length in (70, 90, 100, 130):
        given = rows(B, length)
        assert same(compiled, dense, (*given, dense_lists(length=length)), given)
    assert graphs.frame_count <= 2


def test_mods_with_captured_tensors_and_every_option() -> None:
    table, slopes, sink = (torch.randn(*sizes).requires_grad_() for sizes in ((H, S), (H,), (H,)))
    limits = torch.tensor([3.0])

    def call(q: Tensor, k: Tensor, v: Tensor, lists: Any) -> Any:
        return anyattn.flash_attn_func(
            q, k, v, score_mod=lambda s, b, h, i, j, aux: s * aux[0][0] + table[h, j], mask_mod=near, block_sparse_tensors=lists,
            aux_tensors=[limits], causal=True, window_size=(30, None), softcap=4.0, alibi_slopes=slopes, sink=sink, deterministic=True,
            return_lse=True,
        )  # fmt: skip

    given = rows(B, S)
    compiled, graphs = fresh(call)
    for n in range(2):
        assert same(compiled, call, (*given, dense_lists(n)), [*given, table, slopes, sink])
    assert graphs.frame_count == 1


def test_without_a_mask_mod_a_partial_tile_shows_everything() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lists: Any) -> Any:
        return anyattn.flash_attn_func(q, k, v, block_sparse_tensors=lists, return_lse=True)

    given = rows(B, S)
    assert same(fresh(call)[0], call, (*given, dense_lists()), given)


def test_lists_that_a_function_closes_over() -> None:
    lists, given = dense_lists(), rows(B, S)
    call = lambda q, k, v: dense(q, k, v, lists)
    assert same(fresh(call)[0], call, given, given)


def test_dtypes_and_autocast() -> None:
    lists = dense_lists()
    with torch.autocast("cpu", torch.bfloat16):
        given = [t.detach() for t in rows(B, S)]
        out, eager = fresh(dense)[0](*given, lists), dense(*given, lists)
    assert out[0].dtype is torch.bfloat16 and all(map(torch.equal, out, eager))


def test_tables_of_a_padded_batch() -> None:
    used = torch.tensor([S, 33])
    lists = anyattn.compute_varlen_block_sparsity(
        TILE, TILE, None, near, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=used, seqused_k=used
    )

    def call(q: Tensor, k: Tensor, v: Tensor, lists: Any) -> Any:
        options = {"seqused_q": used, "seqused_k": used, "return_lse": True}
        return anyattn.flash_attn_varlen_func(q, k, v, mask_mod=near, block_sparse_tensors=lists, **options)

    given = rows(B, S)
    assert same(fresh(call)[0], call, (*given, lists), given)


# ---- what is remembered of lists


def test_lists_that_are_written_to_are_read_anew() -> None:
    lists, given = dense_lists(), rows(B, S)
    compiled, graphs = fresh(dense)
    before = compiled(*given, lists)[0]
    lists.full_block_cnt.zero_()
    assert same(compiled, dense, (*given, lists), given)
    assert not torch.equal(compiled(*given, lists)[0], before) and graphs.frame_count == 1


def of_operands(lists: BlockSparseTensors) -> BlockSparse:
    tensors = [lists.mask_block_cnt, lists.mask_block_idx, lists.full_block_cnt, lists.full_block_idx]
    return BlockSparse(tensors, list(lists.tile), list(lists.lengths))


def test_what_is_made_of_lists_lives_as_long_as_they() -> None:
    gc.collect()
    before = set(block_sparse_operands._by_place)  # of lists that other tests keep
    lists = dense_lists()
    made = blocks_of_operands(of_operands(lists))
    assert blocks_of_operands(of_operands(lists)) is made
    assert blocks_of_operands(of_operands(dense_lists())) is not made
    del made, lists
    gc.collect()
    assert set(block_sparse_operands._by_place) <= before


# ---- errors


def broken(**changed: Any) -> BlockSparseTensors:
    lists = dense_lists()
    vars(lists).update(changed)  # past the checks of their making
    return lists


COUNTS = dense_lists().mask_block_cnt
ERRORS: dict[str, tuple[Callable, Callable[[], Any], str]] = {
    "no lists": (dense, lambda: [1], "block_sparse_tensors is a list; wanted BlockSparseTensors"),
    "varlen lists": (dense, varlen_lists, "wanted BlockSparseTensors: make it with anyattn.compute_block_sparsity"),
    "dense lists": (varlen, dense_lists, "wanted VarlenBlockSparseTensors: make it with anyattn.compute_varlen_block_sparsity"),
    "lengths": (dense, lambda: dense_lists(length=90), r"but q and k have lengths \(70, 70\), 5 x 5 tiles; build it for these"),
    "tile": (dense, lambda: broken(tile=(8, 8)), r"9 x 9 tiles of \(8, 8\)|of \(8, 8\)"),
    "batch": (dense, lambda: dense_lists(batch=3), "has batch 3 but q has 2; wanted 1 .shared. or 2"),
    "heads": (dense, lambda: dense_lists(heads=3), "has heads 3 but q has 4; wanted 1 .shared. or 4"),
    "heads of varlen lists": (varlen, lambda: varlen_lists(heads=3), "has 3 heads but q has 4"),
    "device": (dense, lambda: dense_lists().to("meta"), "block_sparse_tensors is on meta but q is on cpu; move it"),
    "dtype": (dense, lambda: broken(mask_block_cnt=COUNTS.long()), "mask_block_cnt is torch.int64; wanted torch.int32"),
    "counts": (dense, lambda: broken(mask_block_cnt=COUNTS + 9), r"mask_block_cnt holds \d+ to \d+; wanted 0 to 5"),
    "a tile that does not exist": (dense, lambda: broken(mask_block_idx=dense_lists().mask_block_idx + 7), "name key tiles 7 to|outside"),
    "other sequences": (
        varlen,
        lambda: varlen_lists(ends=torch.tensor([0, 20, 30, S], dtype=torch.int32)),
        r"was built for seqlens_q \[20, 10, 40\] but the call has \[9, 0, 61\]",
    ),
}


# types, lengths, values and where things lie; what is like one of them is slow
QUICK_ERRORS = ("dense lists", "lengths", "heads of varlen lists", "device", "dtype", "counts", "other sequences")


@pytest.mark.parametrize("name", few(ERRORS, *QUICK_ERRORS))
def test_errors_are_eager_ones(name: str) -> None:
    call, make, text = ERRORS[name]
    given = (*(rows(B, S) if call is dense else rows(S)), make())
    kinds = []
    for one in (call, torch.compile(call, backend="aot_eager")):
        torch._dynamo.reset()
        with pytest.raises((ValueError, TypeError), match=text) as caught:
            one(*given)
        kinds.append(caught.type)
    assert kinds[0] is kinds[1]
    with pytest.raises(Exception, match=text):
        fresh(call)[0](*given)


# ---- the operators


def operands(q: Tensor, k: Tensor, v: Tensor, lists: Any, *tables: Any, splits: int = 1) -> tuple:
    """The arguments of ``anyattn::flash_block_sparse``."""
    bias = torch.randn(H, requires_grad=True)
    score, mask = trace(lambda s, b, h, i, j: s + bias[h], "score"), trace(near, "mask")
    given = (q, k, v, *(tables or (None,) * 5), torch.rand(H), torch.randn(H), *operands_of(q, score), *operands_of(q, mask))
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", *block_sparse_operands._TABLES)
    tensors = [t for t in (getattr(lists, name, None) for name in names) if t is not None]
    of_lists = (tensors, list(lists.tile), list(getattr(lists, "lengths", None) or (-1, -1)))
    return (*given, None, 0.0, False, [-1, -1], splits, None, False, None, None, None, "", *of_lists)


@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_the_operators_lay_results_out_as_their_fakes_say(layouts: tuple[str, str, str]) -> None:
    x = [t.transpose(1, 2) for t in inputs(*layouts, shape=(B, H, S, D), heads_kv=2)]
    args = operands(*x, dense_lists(), splits=1)
    out, lse = as_its_fake(flash_block_sparse, args)
    dout = torch.randn(B, H, S, D).transpose(1, 2)
    as_its_fake(flash_block_sparse_backward, (*args, out, lse, dout, None, [True] * 6))
    as_its_fake(flash_block_sparse_backward, (*args, out, lse, dout, torch.ones_like(lse), [True, False, True, False, True, False]))


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_the_operators_of_packed_rows(layout: str) -> None:
    x = torch.randn(S, 3, H, D).unbind(1)
    args = operands(*x, varlen_lists(layout=layout), ENDS, ENDS, None, None, None)
    out, lse = as_its_fake(flash_block_sparse, args)
    as_its_fake(flash_block_sparse_backward, (*args, out, lse, torch.randn_like(out), torch.ones_like(lse), [True] * 6))


@pytest.mark.parametrize("layouts", [("projected",) * 3, ("sliced", "one head", "transposed")], ids="-".join)
def test_opcheck(layouts: tuple[str, str, str]) -> None:
    x = [t.transpose(1, 2).requires_grad_() for t in inputs(*layouts, shape=(B, H, S, D), heads_kv=2)]
    torch.library.opcheck(flash_block_sparse, operands(*x, dense_lists()))


def test_opcheck_of_packed_rows() -> None:
    torch.library.opcheck(flash_block_sparse, operands(*rows(S), varlen_lists(), ENDS, ENDS, None, None, None))


def test_lists_of_a_wrong_number_of_tensors_are_refused() -> None:
    args = list(operands(*rows(B, S), dense_lists()))
    args[-3] = args[-3][:3]
    with pytest.raises(ValueError, match="block_lists has 3 tensors; wanted 2 or 4"):
        flash_block_sparse(*args)


# ---- export, torch.func, fake tensors


class Given(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, lists: Any) -> Any:
        return (dense if q.ndim == 4 else varlen)(q, k, v, lists)


class Closed(torch.nn.Module):
    def __init__(self, lists: Any) -> None:
        super().__init__()
        self.lists = lists

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (dense if q.ndim == 4 else varlen)(q, k, v, self.lists)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make, sizes", [(dense_lists, (B, S)), (varlen_lists, (S,))], ids=["dense", "varlen"])
def test_export(make: Callable, sizes: tuple[int, ...], strict: bool) -> None:
    x = [t.detach() for t in rows(*sizes)]
    given = torch.export.export(Given(), (*x, make(0)), strict=strict)
    assert any("flash_block_sparse" in str(node.target) for node in given.graph.nodes)
    closed = torch.export.export(Closed(make(1)), tuple(x), strict=strict)
    for n in range(2):
        assert all(map(torch.equal, given.module()(*x, make(n)), Given()(*x, make(n))))
    assert all(map(torch.equal, closed.module()(*x), Given()(*x, make(1))))


@pytest.mark.parametrize("make, sizes", [(dense_lists, (B, S)), (varlen_lists, (S,))], ids=["dense", "varlen"])
def test_an_exported_program_is_saved(make: Callable, sizes: tuple[int, ...], tmp_path: Any) -> None:
    x = [t.detach() for t in rows(*sizes)]
    torch.export.save(torch.export.export(Given(), (*x, make())), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert all(map(torch.equal, loaded.module()(*x, make(1)), Given()(*x, make(1))))
    again = loaded.example_inputs[0][3]
    assert type(again) is type(make()) and torch.equal(again.classes(), make().classes())


@pytest.mark.parametrize("make", [dense_lists, varlen_lists], ids=["dense", "varlen"])
def test_lists_are_pytrees(make: Callable) -> None:
    lists = make()
    leaves, spec = pytree.tree_flatten(lists)
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert type(again) is type(lists) and again.tile == lists.tile
    assert torch.equal(again.classes(), lists.classes())
    assert getattr(again, "lengths", None) == getattr(lists, "lengths", None)


@pytest.mark.parametrize("call, make, sizes", [(dense, dense_lists, (B, S)), (varlen, varlen_lists, (S,))], ids=["dense", "varlen"])
def test_gradients_of_torch_func(call: Callable, make: Callable, sizes: tuple[int, ...]) -> None:
    x, lists = rows(*sizes), make()
    total = lambda q, k, v: call(q, k, v, lists)[0].sin().sum()
    wanted = torch.autograd.grad(total(*x), x)
    found = torch.func.grad(total, argnums=(0, 1, 2))(*(t.detach() for t in x))
    assert all(map(torch.equal, found, wanted))


def test_fake_tensors_beside_lists_with_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    lists, mode = dense_lists(), FakeTensorMode()
    fakes = [mode.from_tensor(t.detach()) for t in rows(B, S)]
    out, lse = dense(*fakes, lists)
    assert out.shape == (B, S, H, D) and lse.shape == (B, H, S) and type(out).__name__ == "FakeTensor"
    with pytest.raises(ValueError, match="has batch 3 but q has 2"):
        dense(*fakes, dense_lists(batch=3))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("call, make, sizes", [(dense, dense_lists, (B, S)), (varlen, varlen_lists, (S,))], ids=["dense", "varlen"])
def test_make_fx(call: Callable, make: Callable, sizes: tuple[int, ...], mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = [t.detach() for t in rows(*sizes)]
    # fake tensors do not mix with what a function closes over
    traced = lambda q, k, v, lists, ends: call(q, k, v, lists) if call is dense else call(q, k, v, lists, ends)
    graph = make_fx(traced, tracing_mode=mode)(*x, make(), ENDS)
    assert sum("flash_block_sparse" in str(node.target) for node in graph.graph.nodes) == 1
    assert all(map(torch.equal, graph(*x, make(1), ENDS), call(*x, make(1))))


def test_inference_mode() -> None:
    """Whose tensors have no count of writes: what is made of lists is made anew."""
    block_sparse_operands._by_place.clear()
    with torch.inference_mode():
        x, lists = [t.detach().clone() for t in rows(B, S)], dense_lists()
        compiled, graphs = fresh(dense)
        for _ in range(2):
            assert all(map(torch.equal, compiled(*x, lists), dense(*x, lists)))
            lists.full_block_cnt.zero_()
    assert graphs.frame_count == 1 and not block_sparse_operands._by_place
