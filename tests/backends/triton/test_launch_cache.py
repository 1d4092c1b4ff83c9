"""A launch that is made again gets what a first launch of the same call gets, and a call that needs another kernel is no such launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import hardware
from anyattn.call_cache import attention
from anyattn.hardware import Hardware
from anyattn.sparsity import read_lists
from anyattn.validate import sequences

pytest.importorskip("triton")

from anyattn.backends.triton import tile_config
from anyattn.backends.triton.codegen import entry
from anyattn.triton_tools import launch
from anyattn.triton_tools.fast_launch import Handle

H200 = Hardware("cuda", "a GPU", 0, frozenset((torch.bfloat16, torch.float16, torch.float32)), (9, 0), 132)
HALF = torch.bfloat16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CPU tensors are taken for a Hopper GPU's, and launches are noted: (kernel and options, grid, arguments), and whether it was known."""
    found = SimpleNamespace(made=[], known=[])

    def noted(kernel: Any, grid: Any, given: Any, device: Any, options: dict, known: tuple) -> Handle | None:
        if kernel.__name__ != "entry":  # not written for a call's mods, and launched as it is
            return None
        kind = (kernel, tuple(options.items()), known)

        def again(grid: Any, given: Any) -> None:
            found.made.append((kind, tuple(grid), list(given)))
            found.known.append(True)

        found.made.append((kind, tuple(grid), list(given)))
        found.known.append(False)
        return Handle(again)

    monkeypatch.setattr(hardware, "of", lambda *a: H200)
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
    monkeypatch.setattr(tile_config, "capability_of", lambda device: (9, 0))
    for module in (launch, entry):
        monkeypatch.setattr(module, "launch", noted)
    # where looking at ids would wait for the device, a block mask's lists are kept beside its mask
    monkeypatch.setattr(read_lists, "row_ranges", lambda mask: None)
    attention.clear()
    yield found
    attention.clear()


def same(a: Any, b: Any) -> bool:
    """Of tensors all but where they are."""
    if hasattr(a, "block_shape"):
        return type(a) is type(b) and (a.shape, a.strides, a.block_shape) == (b.shape, b.strides, b.block_shape) and same(a.base, b.base)
    if not isinstance(a, Tensor):
        return type(a) is type(b) and a == b
    return isinstance(b, Tensor) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def qkv(grad: bool = True, dim: int = 64, heads: int = 2, dtype: torch.dtype = HALF, length: int = 128) -> list[Tensor]:
    return [torch.randn(2, heads, length, dim, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def both(x: list[Tensor], dout: Tensor | None = None, with_lse: bool = False, **options: Any) -> None:
    found = anyattn.flex_attention(*x, return_lse=with_lse, backend="triton", **options)
    out = found[0] if with_lse else found
    results = (out, found[1]) if with_lse else (out,)
    torch.autograd.grad(results, x, [torch.randn_like(r) if dout is None or r is not out else dout for r in results])


def bias(heads: int = 2) -> Callable:
    table = torch.randn(heads, 256, requires_grad=True)
    return lambda s, b, h, i, j: s + table[h, i - j + 128]


def learned(**options: Any) -> None:
    table, x = torch.randn(2, 256, requires_grad=True), qkv()
    out = anyattn.flex_attention(*x, lambda s, b, h, i, j: s + table[h, i - j + 128], backend="triton", **options)
    torch.autograd.grad(out, [*x, table], torch.ones_like(out))


def slope(factor: float) -> Callable:
    return lambda s, b, h, i, j: s - factor * (i - j)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


LISTED = [anyattn.create_block_mask(lambda b, h, i, j, n=n: (i * j) % 5 != n, 1, 1, 128, 128, device="cpu") for n in (1, 1, 2)]
IDS = torch.arange(128) // 50


DOCUMENTS = anyattn.create_block_mask(lambda b, h, i, j: IDS[i] == IDS[j], None, None, 128, 128, device="cpu")


def packed(table: torch.dtype = torch.int32, rows: int = 200) -> dict[str, Any]:
    cu = torch.tensor([0, 90, rows], dtype=table)
    q, k, v = (torch.randn(rows, 2, 64, dtype=HALF).requires_grad_() for _ in range(3))
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 110, "max_seqlen_k": 110}


def varlen(given: dict[str, Any], **options: Any) -> None:
    out = anyattn.flash_attn_varlen_func(**given, **options, backend="triton")
    torch.autograd.grad(out, [given[n] for n in "qkv"], torch.ones_like(out))


def decode(page: int = 0, **options: Any) -> None:
    more: dict[str, Any] = {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4)} if page else {}
    shape = (8, page, 2, 128) if page else (2, 256, 2, 128)
    k, v = (torch.randn(shape, dtype=HALF) for _ in range(2))
    lengths = torch.tensor([30, 50], dtype=torch.int32)
    anyattn.flash_attn_with_kvcache(torch.randn(2, 1, 8, 128, dtype=HALF), k, v, cache_seqlens=lengths, backend="triton", **more, **options)


# calls of one kind: i says which
CALLS: dict[str, Callable[[int], None]] = {
    "plain": lambda i: both(qkv()),
    "128": lambda i: both(qkv(dim=128)),
    "float32": lambda i: both(qkv(dtype=torch.float32)),
    "scale": lambda i: both(qkv(), scale=0.1 + i),
    "with lse": lambda i: both(qkv(), with_lse=True),
    "sink": lambda i: both(qkv(), sink=torch.randn(2)),
    "another number": lambda i: both(qkv(), score_mod=slope(0.5 + i)),
    "bias": lambda i: both(qkv(), score_mod=bias(), mask_mod=causal),
    "a bias that learns": lambda i: learned(),
    "learning in a fixed order": lambda i: learned(deterministic=True),
    "mask": lambda i: both(qkv(), mask_mod=causal),
    "lists": lambda i: both(qkv(), block_mask=LISTED[i]),
    "documents": lambda i: both(qkv(), score_mod=slope(1.5 + i), block_mask=DOCUMENTS),
    "grouped heads": lambda i: both([*qkv(heads=4)[:1], *qkv()[1:]], enable_gqa=True),
    "varlen": lambda i: varlen(packed(), causal=True),
    "decode": lambda i: decode(causal=True, num_splits=1),
    "decode, split": lambda i: decode(num_splits=3, return_lse=True),
    "decode, pages": lambda i: decode(page=64, causal=True, softcap=20.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_made_again_as_the_first_time(launches: Any, name: str) -> None:
    call = CALLS[name]
    call(0)
    first = len(launches.made)
    torch.manual_seed(1)
    call(1)
    made, known = launches.made[first:], launches.known[first:]
    assert all(known) and len(made) == first, known
    # once more, by a call that nothing is known of
    attention.clear()
    before = len(launches.made)
    torch.manual_seed(1)
    call(1)
    fresh = launches.made[before:]
    assert not any(launches.known[before:])
    for (kind, grid, given), (kind2, grid2, given2) in zip(made, fresh, strict=True):
        assert (kind, grid, len(given)) == (kind2, grid2, len(given2))
        assert all(same(a, b) for a, b in zip(given, given2, strict=True))


def test_the_calls_own_tensors_are_put_in(launches: Any) -> None:
    for _ in range(2):
        launches.made.clear()
        x, dout = qkv(), torch.randn(2, 2, 128, 64, dtype=HALF)
        both(x, dout)
    assert len(launches.made) == 4 and launches.known[4:] == [True] * 4
    addresses = [[getattr(g, "base", g).data_ptr() for g in given[:4]] for _, _, given in launches.made]
    wanted = [t.data_ptr() for t in (*x, dout)]
    assert addresses[0][:3] == wanted[:3] and addresses[1][1] == wanted[3] and addresses[2] == addresses[3] == wanted


def shifted(x: Tensor) -> Tensor:
    """The same, but no row begins at a multiple of 16 bytes."""
    found = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x.detach())
    return found.requires_grad_(x.requires_grad)


def turned(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad)


def odd(x: Tensor) -> Tensor:
    """Rows at a distance that is no multiple of 16 bytes."""
    return torch.cat((x.detach(), x.detach()[..., :1]), -1)[..., :-1].requires_grad_(x.requires_grad)


OTHERS: dict[str, Callable[[], None]] = {
    "alignment": lambda: both([shifted(t) for t in qkv()]),
    "alignment of v alone": lambda: both([*qkv()[:2], shifted(qkv()[2])]),
    "strides": lambda: both([turned(t) for t in qkv()]),
    "odd strides": lambda: both([odd(t) for t in qkv()]),
    "length": lambda: both(qkv(length=96)),
    "scale beyond floats": lambda: both(qkv(), scale=0.0),
    "lse": lambda: both(qkv(), with_lse=True),
    "dtype": lambda: both(qkv(dtype=torch.float16)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_call_is_another_launch(launches: Any, name: str) -> None:
    both(qkv())
    before = len(launches.made)
    OTHERS[name]()
    # what the backward pass computes does not hang on how the scale was, nor the forward pass on what comes back
    is_new = [not known for known in launches.known[before:]]
    assert is_new[0] or name == "lse", is_new
    assert all(is_new[1:]) or name == "scale beyond floats", is_new


@pytest.mark.parametrize("change", (shifted, turned, odd, lambda t: t.mT.contiguous().mT), ids=("alignment", "strides", "odd", "columns"))
def test_another_gradient_of_the_output(launches: Any, change: Callable) -> None:
    """The alignment and strides of what comes back are no facts of the forward call."""
    dout = torch.randn(2, 2, 128, 64, dtype=HALF)
    both(qkv(), dout)
    both(qkv(), change(dout))
    is_copied = change(dout).stride(3) != 1
    assert launches.known[4:] == [True] + [is_copied] * 3
    both(qkv(), change(dout))
    assert launches.known[8:] == [True] * 4


def test_whole_numbers_choose_a_text(launches: Any) -> None:
    """A score mod's whole numbers say how large its sums become: another one is looked at anew."""
    scored = lambda n: both(qkv(), score_mod=lambda s, b, h, i, j: s + i * n)
    scored(3)
    scored(2**33)
    attention.clear()
    before = len(launches.made)
    scored(2**33)
    (again, *_), (fresh, *_) = launches.made[before - 4 : before], launches.made[before:]
    assert again[0] == fresh[0] != launches.made[0][0]


@pytest.mark.parametrize("change", (shifted, odd), ids=("alignment", "odd"))
def test_another_place_of_a_bias(launches: Any, change: Callable) -> None:
    """Rows of a captured tensor that begin at multiples of 16 bytes are loaded in wide pieces, others are not."""
    tables = [torch.randn(2, 128, 128, dtype=HALF) for _ in range(2)]
    for table, is_known in (
        (tables[0], False),
        (tables[1], True),
        (change(tables[1]), False),
        (change(tables[0]), True),
        (tables[0], True),
    ):
        launches.known.clear()
        both(qkv(), score_mod=lambda s, b, h, i, j, table=table: s + table[h, i, j])
        assert launches.known == [is_known] * 4, is_known


def test_no_tensor_is_kept(launches: Any) -> None:
    import gc
    import weakref

    x = qkv()
    gone = [weakref.ref(t) for t in x]
    both(x, score_mod=bias(), mask_mod=causal)
    launches.made.clear()
    del x
    gc.collect()
    assert all(r() is None for r in gone)


def test_tuned_tiles_are_asked_for_each_time(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyattn.backends.triton import autotune

    asked = []
    monkeypatch.setattr(autotune, "best", lambda question, device, measure: (asked.append(question), tile_config.Tiles(64, 64, 4, 2))[1])
    for _ in range(2):
        anyattn.flex_attention(*qkv(False), backend="triton", kernel_options={"autotune": True})
    assert len(asked) == 2 and launches.known == [False, False]
