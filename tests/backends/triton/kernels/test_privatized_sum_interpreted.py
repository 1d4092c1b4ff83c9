"""Gradients of captured tensors to whose entries many pairs add, in Triton's interpreter: sums with private copies.

Lanes and programs share the copies out among them. Run by ``test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.triton import backward_pass
from anyattn.backends.triton.codegen.programs import gradient_part, slots_copied
from anyattn.call_cache import attention
from anyattn.documents.rewrite import DocumentTables
from anyattn.sparsity import read_lists
from anyattn.tensors import privatized_sum
from anyattn.validate import flex
from tests.entry_points import test_flash_varlen as varlen
from tests.support import cases
from tests.support import sequences as seq
from tests.support.covering import few
from tests.support.flex_calls import judge
from tests.support.sequences import Meaning

LENGTH = 75
IDS = torch.arange(LENGTH) * 5 % 3
RUNS = torch.arange(LENGTH) * 3 // LENGTH
FAR = 2**18  # entries beside the few that are asked, for which there is room once


def table(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).mul(7).sin().reshape(shape)


# shapes of what is captured, and the mod
MODS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "buckets": ([(32, 4)], lambda t: anyattn.scores.t5_bias(t)),
    "few buckets": ([(8, 4)], lambda t: anyattn.scores.t5_bias(t, bidirectional=False, max_distance=6)),
    "rows": ([(3,)], lambda t: lambda s, b, h, i, j: s * (1 + t[IDS[i]])),
    "keys": ([(4, 3)], lambda t: lambda s, b, h, i, j: s + t[h, IDS[j]]),
    "pairs": ([(4, 3, 3)], lambda t: lambda s, b, h, i, j: s + t[h, IDS[i], IDS[j]]),
    "runs": ([(3, 3)], lambda t: lambda s, b, h, i, j: s + t[RUNS[i], RUNS[j]]),
    "large": ([(3, FAR)], lambda t: lambda s, b, h, i, j: s + t[IDS[i], IDS[j]]),
    "far buckets": ([(4, FAR)], lambda t: lambda s, b, h, i, j: s + t[h, torch.clamp(i - j, min=0, max=3) + FAR - 4]),
    "whole and halves": (
        [(4, 3), (4,), (3,)],
        lambda t, u, w: lambda s, b, h, i, j: s * (1 + u[h]) + t[h, IDS[i]] * w[IDS[j]] + t[h, (i + j) % 3] + t[h, 2],
    ),
}
SHAPE = (1, 4, 2, LENGTH, LENGTH, 16, 16)


ROOMS = {"usual": privatized_sum._ROOM, "little": 1 << 10, "none": 0}
CALLS = [(name, dtype, "usual") for name in MODS for dtype in (torch.bfloat16, torch.float32)]
CALLS += [(name, torch.bfloat16, room) for name in ("few buckets", "rows", "pairs", "whole and halves") for room in ("little", "none")]
EACH_ROOM = [
    *(("far buckets", torch.bfloat16, "usual"), ("few buckets", torch.float32, "usual")),
    *(("pairs", torch.bfloat16, "none"), ("whole and halves", torch.bfloat16, "little")),
]


@pytest.mark.parametrize(("name", "dtype", "room"), few([pytest.param(*c) for c in CALLS], *(pytest.param(*c) for c in EACH_ROOM)), ids=str)
def test_gradients(name: str, dtype: torch.dtype, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles that sum by diagonals and in tiles that do not; heads in groups, a mask that cuts tiles. room: for many copies, few, one."""
    monkeypatch.setattr(privatized_sum, "_ROOM", ROOMS[room])
    attention.clear()
    shapes, mod = MODS[name]
    captured = [table(*shape) for shape in shapes]
    tile = (32, 32) if dtype is torch.bfloat16 else (32, 16)
    q, k, v = cases.inputs("normal", cases.Shape(*SHAPE), dtype, 0)[:3]
    options = {"captured": captured, "kernel_options": {"tile_m": tile[0], "tile_n": tile[1]}}
    judge(q, k, v, score=mod(*captured), mask=masks.causal(9), label=f"{name} {room}", **options)


@pytest.mark.parametrize("name", few(["few buckets", "pairs", "rows"], "pairs"))
def test_packed_and_paged_sequences(name: str) -> None:
    shapes, mod = MODS[name]
    captured = [table(*shape) for shape in shapes]
    batch = seq.ragged([20, 3, 37], [30, 41, 18])
    meaning = Meaning(causal=True, score_mod=mod(*captured), captured=captured)
    got, shared = varlen.results(batch, meaning, varlen.packed_call)
    seq.judge(got, batch, meaning, shared=shared)
    places, count = seq.shuffled_table(3, 48, 8, 1)
    pools = [seq.paged(part, 8, places, count).requires_grad_() for part in (batch.k, batch.v)]
    out = anyattn.flash_attn_varlen_func(
        seq.packed(batch.q), *pools, cu_seqlens_q=seq.ends([20, 3, 37]), seqused_k=torch.tensor([30, 41, 18]), page_table=places,
        causal=True, score_mod=meaning.score_mod,
    )  # fmt: skip
    found = torch.autograd.grad(out, captured, seq.packed(batch.dout))
    seq.judge({}, batch, meaning, shared={f"captured{i}": g for i, g in enumerate(found)})


@pytest.mark.parametrize("is_known", few([False, True], False))
def test_documents(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched as sequences and by lists, of which one adds nothing; and as sequences alone, once that is known."""
    if not is_known:
        monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    monkeypatch.setattr(read_lists, "row_ranges", lambda mask: None)  # as on a GPU: lists beside the mask
    attention.clear()
    ids, own = torch.repeat_interleave(torch.tensor([4, 1, 3]), torch.tensor([20, 30, 25])), table(8, 4)
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    lists = anyattn.create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    q, k, v = cases.inputs("normal", cases.Shape(*SHAPE), torch.bfloat16, 0)[:3]
    judge(q, k, v, score=MODS["few buckets"][1](own), captured=[own], mask=mask, block_mask=lists)
    attention.clear()


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Totals with copies, as the kernel leaves them."""
    found: list[torch.Tensor] = []
    read = privatized_sum.read

    def reading(total: torch.Tensor) -> torch.Tensor:
        found.append(total.clone())
        return read(total)

    monkeypatch.setattr(privatized_sum, "read", reading)
    assert backward_pass.privatized_sum is privatized_sum
    attention.clear()
    yield found


def backward(name: str, dtype: torch.dtype, own: torch.dtype = torch.float32, wants: tuple[int, ...] = (0,), **options: Any) -> Any:
    """The captured tensors, their gradients (None where none is wanted) and dq."""
    shapes, mod = MODS[name]
    captured = [table(*shape).to(own).requires_grad_(i in wants) for i, shape in enumerate(shapes)]
    q, k, v, dout = cases.inputs("normal", cases.Shape(*SHAPE), dtype, 0)[:4]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = anyattn.flex_attention(*leaves, score_mod=mod(*captured), enable_gqa=True, backend="triton", **options)
    out.backward(dout)
    return captured, [t.grad for t in captured], leaves[0].grad


@pytest.mark.parametrize("name", few(["few buckets", "rows", "keys", "pairs"], "few buckets", "rows"))
def test_neighbours_add_to_copies_of_their_own(name: str, summed: list[torch.Tensor]) -> None:
    """Those of the 32 that share an entry, and more by programs; of an entry to which only whole tiles add, programs alone."""
    backward(name, torch.bfloat16, kernel_options={"tile_m": 32, "tile_n": 32})
    (total,) = summed
    assert total.shape[-1] == privatized_sum.copies_for(total[..., 0].numel(), 4) >= 1024
    groups = total.unflatten(-1, (-1, 32)) != 0
    lanes, programs = groups.any(-2).sum(-1), groups.any(-1).sum(-1)
    assert (lanes >= 8).sum() >= lanes.numel() // 2 and programs.max() >= 3, (lanes, programs)


def test_a_tile_of_one_entry_adds_one_number(summed: list[torch.Tensor]) -> None:
    """All of them to the first lane's copy."""
    name = "one entry"
    MODS[name] = ([(2, 2)], lambda t: lambda s, b, h, i, j: s + t[i // 64 // 9, j // 64 // 9])
    try:
        backward(name, torch.float32, kernel_options={"tile_m": 32, "tile_n": 32})
    finally:
        del MODS[name]
    lanes = summed[0].unflatten(-1, (-1, 32))
    assert lanes[0, 0, :, 0].count_nonzero() > 1 and not lanes[..., 1:].any() and not lanes.flatten(0, 1)[1:].any()


@pytest.mark.parametrize("own", few([torch.bfloat16, torch.float16, torch.float32, torch.float64], torch.bfloat16), ids=str)
def test_captured_dtypes(own: torch.dtype) -> None:
    """A gradient has its tensor's dtype, and does not depend on it but for the last rounding of both."""
    captured, (grad,), _ = backward("pairs", torch.bfloat16, own)
    assert grad.dtype is own and grad.shape == captured[0].shape and bool(grad.isfinite().all()) and bool(grad.any())


@pytest.mark.parametrize("wants", few([(), (0,), (0, 2), (1, 2)], (0, 2)), ids=str)
def test_of_some_tensors_alone(wants: tuple[int, ...], summed: list[torch.Tensor]) -> None:
    """The bits of each gradient are those of the call in which all are wanted."""
    _, everything, dq = backward("whole and halves", torch.bfloat16, wants=(0, 1, 2))
    count = len(summed)
    _, some, other_dq = backward("whole and halves", torch.bfloat16, wants=wants)
    assert torch.equal(dq, other_dq) and len(summed) - count == len(set(wants) - {1})
    for i, (grad, full) in enumerate(zip(some, everything, strict=True)):
        assert (grad is None) is (i not in wants) and (grad is None or torch.equal(grad, full)), i


def test_exact_sums_have_no_copies(summed: list[torch.Tensor]) -> None:
    _, first, _ = backward("whole and halves", torch.bfloat16, wants=(0, 1, 2), deterministic=True)
    assert not summed and all(g is not None for g in first)


def test_whose_sums_have_copies() -> None:
    """Not those of entries that the text itself tells apart, whose pairs never meet, nor those of one number a tile."""
    for shapes, score, of_halves, of_floats in (
        ([(4,)], lambda t: lambda s, b, h, i, j: s + t[h], 0, 0),
        ([()], lambda t: lambda s, b, h, i, j: s * t, 0, 0),
        ([(4, 2 * LENGTH)], lambda t: lambda s, b, h, i, j: s + t[h, i - j + LENGTH], 0, 1),
        ([(4, LENGTH)], lambda t: lambda s, b, h, i, j: s + t[h, (i - j).abs()], 0, 1),
        ([(4, LENGTH, LENGTH)], lambda t: lambda s, b, h, i, j: s + t[h, i, j], 0, 0),
        ([(LENGTH,)], lambda t: lambda s, b, h, i, j: s + t[j], 0, 0),
        ([(LENGTH,)], lambda t: lambda s, b, h, i, j: s + t[LENGTH - 1 - i] * s, 0, 0),
        ([(LENGTH, 3)], lambda t: lambda s, b, h, i, j: s + t[i, IDS[j]], 1, 1),
        ([(3,)], lambda t: lambda s, b, h, i, j: s + t[IDS[j]], 1, 1),
        ([(32, 4)], lambda t: anyattn.scores.t5_bias(t), 1, 1),
        ([(LENGTH,)], lambda t: lambda s, b, h, i, j: s + t[i] * t[IDS[i]], 1, 1),
    ):  # fmt: skip
        for dtype, wanted in ((torch.bfloat16, of_halves), (torch.float32, of_floats)):
            tensors = [torch.zeros(shape, requires_grad=True) for shape in shapes]
            q, k = torch.zeros(2, 4, LENGTH, 16, dtype=dtype), torch.zeros(2, 4, LENGTH, 16, dtype=dtype)
            problem = flex.flex_problem(q, k, k, score(*tensors), None, None, None, None, False, None, False, False, False)
            found = slots_copied(problem, ())
            assert len(found) == wanted, (shapes, dtype)
            assert problem.score is not None
            slots = tuple(slot for slot, t in enumerate(problem.score.tensors) if t.requires_grad)
            part = gradient_part(problem, slots)
            assert part.totals == (len(shapes[0]) + wanted,) and all(load.has_copies is bool(wanted) for load in part.loads)


def test_how_many_copies() -> None:
    assert [privatized_sum.copies_for(n, 4) for n in (0, 1, 512, 1024, 2**16, 2**20, 2**20 + 1, 2**30)] == [
        1024,
        1024,
        1024,
        1024,
        16,
        1,
        1,
        1,
    ]
    for entries in (1, 3, 100, 5000, 300_000, 2_000_000):
        for itemsize in (4, 8):
            count = privatized_sum.copies_for(entries, itemsize)
            assert count & (count - 1) == 0 and (count == 1 or count * entries * itemsize <= 4 << 20)
