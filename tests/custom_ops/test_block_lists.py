"""``compute_block_sparsity`` and ``compute_varlen_block_sparsity`` inside ``torch.compile`` and ``torch.export``: as in eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.custom_ops.block_lists import tile_lists, varlen_tile_lists
from anyattn.custom_ops.flex import operands_of
from anyattn.mods.tracing.trace import trace
from tests.support.compiling import fresh
from tests.support.operands import as_its_fake

B, S, H, D, TILE = 2, 70, 4, 16, 16
FIELDS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")


def rows(*sizes: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*sizes, n, D, generator=g).requires_grad_() for n in (H, 2, 2)]


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fields(lists: Any) -> tuple:
    names = FIELDS if hasattr(lists, "lengths") else (*FIELDS, "cu_block_cnt", "cu_block_idx", "seqlens_q", "seqlens_k")
    return tuple(t for name in names if (t := getattr(lists, name)) is not None)


def results(call: Callable, args: tuple, sources: list[Tensor]) -> list[Tensor]:
    out = call(*args)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), sources)]


def same(compiled: Callable, call: Callable, args: tuple, sources: list[Tensor]) -> bool:
    return all(map(torch.equal, results(compiled, args, sources), results(call, args, sources)))


def dense(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    mask = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)
    lists = anyattn.compute_block_sparsity(TILE, TILE, q.shape[0], None, q.shape[1], k.shape[1], mask, device=q.device)
    return anyattn.flash_attn_func(q, k, v, mask_mod=mask, block_sparse_tensors=lists)


def varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    mask = lambda b, h, i, j: (i - j) % 3 != 1
    lists = anyattn.compute_varlen_block_sparsity(TILE, TILE, None, mask, cu_seqlens_q=cu, cu_seqlens_k=cu)
    return anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask_mod=mask, block_sparse_tensors=lists)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_lists_are_made_inside(backend: str) -> None:
    compiled, graphs = fresh(dense, backend)
    given = rows(B, S)
    for width in (9, 20, 33):
        assert same(compiled, dense, (*given, (torch.arange(S) // width).expand(B, S)), given)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_varlen_lists_are_made_inside(backend: str) -> None:
    """One graph, whatever the lengths are, though they decide how many tiles there are."""
    compiled, graphs = fresh(varlen, backend)
    given = rows(S)
    for cu in (ends(0, 9, 9, S), ends(0, 40, 50, S), ends(0, 1, 2, S)):
        assert same(compiled, varlen, (*given, cu), given)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("options", [{}, {"compute_full_blocks": False}, {"aux_tensors": [torch.tensor([5, 50])]}], ids=str)
def test_lists_are_eagers(options: dict[str, Any]) -> None:
    def made(x: Tensor) -> tuple:
        aux = "aux_tensors" in options
        mask = (lambda b, h, i, j, t: j < t[0][b]) if aux else (lambda b, h, i, j: (i >= j) & (i // TILE != h))
        lists = anyattn.compute_block_sparsity(TILE, 32, B, H, S, 2 * S, mask, device="cpu", **options)
        return x + 1, *fields(lists), lists.tile, lists.lengths

    found, wanted = fresh(made)[0](torch.ones(1)), made(torch.ones(1))
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, wanted, strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("full", [True, False])
def test_varlen_lists_are_eagers(layout: str, full: bool) -> None:
    def made(cu: Tensor, used: Tensor) -> tuple:
        mask = lambda b, h, i, j: (i >= j) & (i // TILE != h)
        tables = {"cu_seqlens_q": cu, "cu_seqlens_k": None, "seqused_k": used}
        lists = anyattn.compute_varlen_block_sparsity(TILE, 32, H, mask, **tables, layout=layout, compute_full_blocks=full)
        return *fields(lists), lists.tile

    compiled, graphs = fresh(made)
    for given in ((ends(0, 9, 9, S), torch.tensor([20, 0, 90])), (ends(0, 0, 40, S), torch.tensor([3, 4, 5]))):
        pairs = zip(compiled(*given), made(*given), strict=True)
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
    assert graphs.frame_count == 1


def test_lists_of_open_lengths() -> None:
    compiled, graphs = fresh(dense, dynamic=True)
    for length in (70, 96, 130):
        given = rows(B, length)
        assert same(compiled, dense, (*given, (torch.arange(length) // 20).expand(B, length)), given)
    assert graphs.frame_count == 1


def test_lists_leave_the_graph() -> None:
    def made(n: Tensor) -> Any:
        return anyattn.compute_block_sparsity(TILE, TILE, None, None, S, S, lambda b, h, i, j: i - j < n, device="cpu")

    lists = fresh(made)[0](torch.tensor(20))
    assert all(map(torch.equal, fields(lists.validate()), fields(made(torch.tensor(20)))))
    assert (lists.tile, lists.lengths) == ((TILE, TILE), (S, S))


def test_lists_of_the_users_own_tensors_are_put_together_inside() -> None:
    ready = anyattn.compute_block_sparsity(TILE, TILE, None, None, S, S, masks.causal(), device="cpu")

    def call(q: Tensor, k: Tensor, v: Tensor, cnt: Tensor, idx: Tensor) -> Tensor:
        lists = anyattn.BlockSparseTensors(cnt + 0, idx + 0, tile=(TILE, TILE), lengths=(S, S))
        return anyattn.flash_attn_func(q, k, v, causal=True, block_sparse_tensors=lists)

    given = rows(B, S)
    assert same(fresh(call)[0], call, (*given, ready.mask_block_cnt, ready.mask_block_idx), given)


# ---- errors


ERRORS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "tile": ("tile_m is 0", lambda cu: anyattn.compute_block_sparsity(0, 16, 1, 1, S, S, masks.causal(), device="cpu")),
    "length": ("seqlen_k is -1", lambda cu: anyattn.compute_block_sparsity(16, 16, 1, 1, S, -1, masks.causal(), device="cpu")),
    "heads": ("num_heads is 1.5", lambda cu: anyattn.compute_block_sparsity(16, 16, 1, 1.5, S, S, masks.causal(), device="cpu")),
    "layout": (
        "layout is 'ragged'",
        lambda cu: anyattn.compute_varlen_block_sparsity(16, 16, 1, masks.causal(), cu_seqlens_q=cu, cu_seqlens_k=cu, layout="ragged"),
    ),
    "no table": (
        "cu_seqlens_k is None",
        lambda cu: anyattn.compute_varlen_block_sparsity(16, 16, 1, masks.causal(), cu_seqlens_q=cu[:2], cu_seqlens_k=None),
    ),
    "ends that fall": (
        r"cu_seqlens_q\[2\] is 3, less than 9",
        lambda cu: anyattn.compute_varlen_block_sparsity(16, 16, 1, masks.causal(), cu_seqlens_q=cu, cu_seqlens_k=cu),
    ),
    "a mask of heads": (
        "num_heads is None, but mask_mod uses h",
        lambda cu: anyattn.compute_varlen_block_sparsity(16, 16, None, lambda b, h, i, j: i > h, cu_seqlens_q=cu.abs(), cu_seqlens_k=cu),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_eager_ones(name: str) -> None:
    text, call = ERRORS[name]
    cu = ends(0, 9, 20) if name == "a mask of heads" else ends(0, 9, 3)
    kinds = []
    for one in (call, torch.compile(lambda cu: call(cu), backend="aot_eager")):
        torch._dynamo.reset()
        with pytest.raises((ValueError, TypeError), match=text) as caught:
            one(cu)
        kinds.append(caught.type)
    assert kinds[0] is kinds[1]


# ---- operators, export


def of_mask(mask: Callable) -> tuple:
    like = torch.empty(0)
    return like, *operands_of(like, trace(mask, "mask"))


@pytest.mark.parametrize("full", [True, False])
def test_the_operators_keep_their_contracts(full: bool) -> None:
    given = (*of_mask(masks.document(torch.arange(S) // 9)), B, H, S, S, TILE, 2 * TILE, full)
    as_its_fake(tile_lists, given)
    torch.library.opcheck(tile_lists, given)
    for layout in ("flat", "padded"):
        given = (*of_mask(masks.causal()), ends(0, 9, S), None, None, torch.tensor([5, 9]), H, TILE, TILE, full, layout)
        torch.library.opcheck(varlen_tile_lists, given, test_utils=("test_schema", "test_faketensor"))


def test_no_result_of_the_operator_is_an_argument() -> None:
    used = torch.tensor([5, 9])
    found = varlen_tile_lists(*of_mask(masks.causal()), None, None, used, used, None, TILE, TILE, True, "flat")
    memory = [t.untyped_storage().data_ptr() for t in found]
    assert len(set(memory)) == len(memory) and used.untyped_storage().data_ptr() not in memory


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, of: Tensor) -> Tensor:
            return (dense if q.ndim == 4 else varlen)(q, k, v, of)

    for sizes, samples in (((B, S), [(torch.arange(S) // n).repeat(B, 1) for n in (9, 30)]), ((S,), [ends(0, 9, 9, S), ends(0, 1, 50, S)])):
        x = [t.detach() for t in rows(*sizes)]
        program = torch.export.export(Model(), (*x, samples[0]), strict=strict).module()
        for one in samples:
            assert torch.equal(program(*x, one), Model()(*x, one))
