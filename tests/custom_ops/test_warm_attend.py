"""Warm calls of ``anyattn::attend``: found again without a look at mods or lists, and never another call's results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention
from anyattn.custom_ops import flex, list_operands, warm_attend
from anyattn.custom_ops.flex import attend, attend_backward, operands_of
from anyattn.mods.tracing.trace import trace
from anyattn.plan import Plan

S, H, TILE = 48, 2, 16


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    attention.clear()
    with torch.no_grad():
        yield


def made(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, H, S, 8, **options) for _ in range(3))
    return q, k, v


def operands(
    x: tuple, score: Any = None, mask: Any = None, block_mask: Any = None, sink: Any = None, scale: float = 0.25, wants_max: bool = False
) -> tuple:
    """The operator's arguments."""
    listed = None if block_mask is None else trace(block_mask.mask_mod, "mask")
    masks = (listed, None if mask is None else trace(mask, "mask"))
    of_mods = (*operands_of(x[0], None if score is None else trace(score, "score")), *operands_of(x[0], *masks))
    lists: tuple = ([], [0, 0], False)
    if block_mask is not None:
        given = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        lists = ([t for t in given if t is not None], [TILE, TILE], int(block_mask.is_exact))
    return (*x, sink, *of_mods, *lists, scale, wants_max, False, "", "")


def cold(args: tuple) -> tuple:
    """The operator's results where nothing is remembered."""
    cache = warm_attend._warm
    young, old = cache.young, cache.old
    objects, list_operands._by_object = list_operands._by_object, {}
    try:
        attention.clear()
        return attend(*args)  # type: ignore[no-any-return]
    finally:
        list_operands._by_object = objects
        cache.young, cache.old = young, old


def check(args: tuple, call: Callable[..., tuple] | None = None) -> None:
    for found, wanted in zip((call or attend.direct)(*args), cold(args), strict=True):
        assert found.dtype is wanted.dtype and found.stride() == wanted.stride() and torch.equal(found, wanted)


def lists_of(mask: Callable[..., Any]) -> Any:
    return anyattn.create_block_mask(mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=TILE)


TABLE = torch.randn(H, 2 * S)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {"score": lambda s, b, h, i, j: s * 0.5 + (i - j) * 3, "mask": lambda b, h, i, j: i - j < 30},
    "captured": {"score": lambda s, b, h, i, j: s + TABLE[h, i - j + S], "mask": lambda b, h, i, j: i >= j},
    "sink": {"sink": torch.randn(H), "wants_max": True},
    "exact lists": {"block_mask": lists_of(lambda b, h, i, j: i >= j)},
    "lists": {"block_mask": lists_of(lambda b, h, i, j: (i - j) % 3 != 1), "mask": lambda b, h, i, j: i >= j - 5},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_comes_again_is_not_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        check(operands(made(), **CALLS[name]))
    decoded: list[Any] = []
    original = flex.call_of
    monkeypatch.setattr(flex, "call_of", lambda given: (decoded.append(given), original(given))[1])
    x = made()
    args = operands(x, **CALLS[name])
    found = attend.direct(*args)
    assert not decoded
    for a, b in zip(found, cold(args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["plain", "captured", "lists"])
def test_the_operators_and_the_backward_pass_read_mods_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = operands(made(), **CALLS[name])
    out, lse, _ = attend(*args)
    backward = (*args[:14], *args[15:], out, lse, torch.randn_like(out), None, [True] * (4 + len(args[6])))
    for _ in range(3):
        attend(*args)
        wanted = attend_backward(*backward)
    read: list[Any] = []
    monkeypatch.setattr(flex, "mods_of_operands", lambda *a: read.append(a))
    attend(*args)
    for call in (attend_backward, attend_backward.direct):
        for a, b in zip(call(*backward), wanted, strict=True):
            assert torch.equal(a, b)
    assert not read


def changed() -> dict[str, tuple]:
    """Calls beside a first one of the same shapes that differ from it in what results depend on."""
    x, y = made(), made()
    score, slope = (lambda s, b, h, i, j: s + (i - j) * 0.1), 0.3
    other_table, other_ids = torch.randn(H, 2 * S), torch.arange(S) // 5
    return {
        "tensors": operands(y),
        "scale": operands(x, scale=0.5),
        "no finite scale": operands(x, scale=-0.0),
        "score": operands(x, score=score),
        "number": operands(x, score=lambda s, b, h, i, j: s + (i - j) * slope),
        "table": operands(x, score=lambda s, b, h, i, j: s + other_table[h, i - j + S]),
        "mask": operands(x, mask=lambda b, h, i, j: i >= j),
        "ids": operands(x, mask=lambda b, h, i, j: other_ids[i] == other_ids[j]),
        "lists": operands(x, block_mask=lists_of(lambda b, h, i, j: i >= j)),
        "other lists": operands(x, block_mask=lists_of(lambda b, h, i, j: i - j < 20)),
        "sink": operands(x, sink=torch.randn(H)),
        "maximum": operands(x, wants_max=True),
        "strides": operands(tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x)),
        "dtype": operands(tuple(t.double() for t in x)),
        "one batch entry of keys": operands((torch.randn(3, H, S, 8), *x[1:])),
        "grouped": operands((torch.randn(1, 2 * H, S, 8), *x[1:])),
        "offset": operands(tuple(torch.randn(t.numel() + 1)[1:].view(t.shape) for t in x)),
    }


def test_other_calls_are_not_taken_for_it() -> None:
    calls = changed()
    for _ in range(3):
        for args in calls.values():
            check(args)
    for args in reversed(calls.values()):
        check(args)


def test_captured_tensors_are_this_calls() -> None:
    for _ in range(5):
        table, ids = torch.randn(H, 2 * S), torch.randint(0, 3, (S,))
        score, mask = (lambda s, b, h, i, j, t=table: s + t[h, i - j + S]), (lambda b, h, i, j, d=ids: d[i] == d[j])
        args = operands(made(), score=score, mask=mask)
        check(args)
        table.zero_()
        ids.add_(torch.arange(S))
        check(args)


@pytest.mark.parametrize("mask", [lambda b, h, i, j: i >= j, lambda b, h, i, j: (i - j) % 3 != 1], ids=["exact", "tiles"])
def test_lists_that_change(mask: Callable[..., Any]) -> None:
    """Written to, exchanged in place, and made anew at the same places."""
    x, block_mask = made(), lists_of(mask)
    args = operands(x, block_mask=block_mask)
    for _ in range(3):
        check(args)
    assert list_operands.known(args[10], ((TILE, TILE), (S, S)), bool(args[12])) is not None
    counts = args[10][2] if args[10][2].any() else args[10][0]
    counts.zero_()
    assert list_operands.known(args[10], ((TILE, TILE), (S, S)), bool(args[12])) is None
    for _ in range(3):
        check(args)
    with_others = lists_of(lambda b, h, i, j: (i >= j) & (i < 40))
    for mine, theirs in zip(args[10], operands(x, block_mask=with_others)[10], strict=True):
        mine.data = theirs
    for _ in range(3):
        check(args)
    for n in range(4):  # memory that was given back may come again
        check(operands(x, block_mask=lists_of(lambda b, h, i, j, n=n: i - j >= n)))


def test_lists_asked_with_another_size_or_exactness() -> None:
    x, block_mask = made(), lists_of(lambda b, h, i, j: i >= j)
    args = operands(x, block_mask=block_mask)
    for _ in range(3):
        check(args)
    check((*args[:12], False, *args[13:]))
    shorter = (x[0], x[1][:, :, : S - 3], x[2][:, :, : S - 3], *args[3:])
    for _ in range(3):
        check(shorter)
        check(args)


def test_nothing_keeps_lists_alive() -> None:
    gc.collect()
    before = len(list_operands._by_object)
    block_mask = lists_of(lambda b, h, i, j: (i - j) % 5 != 2)
    args = operands(made(), block_mask=block_mask)
    for _ in range(4):
        attend.direct(*args)
    assert len(list_operands._by_object) == before + 1
    del args, block_mask
    gc.collect()
    assert len(list_operands._by_object) == before


def test_lists_whose_writes_nobody_counts() -> None:
    args = operands(made(), block_mask=lists_of(lambda b, h, i, j: i >= j))
    with torch.inference_mode():
        args = (*args[:10], [t.clone() for t in args[10]], *args[11:])
    for _ in range(4):
        check(args)
    assert list_operands.known(args[10], ((TILE, TILE), (S, S)), bool(args[12])) is None


def test_requires_grad_and_alignment_belong_to_the_key() -> None:
    x = made()
    args = operands(x)
    for _ in range(3):
        check(args)
    with torch.enable_grad():
        q = x[0].clone().requires_grad_()
        for _ in range(3):
            out, _, _ = attend.direct(q, *args[1:])
            assert out.requires_grad
            (found,) = torch.autograd.grad(out.sum(), q)
            assert found.any()


def test_wrong_scales_are_refused_as_by_the_operator() -> None:
    args = operands(made())
    for _ in range(3):
        attend.direct(*args)
    for scale in (float("nan"), float("inf"), 1e39):
        wrong = (*args[:13], scale, *args[14:])
        messages = []
        for call in (attend, attend.direct):
            with pytest.raises(ValueError, match="scale") as error:
                call(*wrong)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_clear_forgets() -> None:
    args = operands(made())
    for _ in range(3):
        attend.direct(*args)
    assert warm_attend._warm.young
    attention.clear()
    assert not warm_attend._warm.young


def test_many_lengths_in_turn_stay_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph with dynamic shapes has them."""
    calls = [operands((torch.randn(1, H, n, 8), *made()[1:])) for n in range(3, 43)]
    for args in calls * 2:
        attend.direct(*args)
    monkeypatch.setattr(flex, "call_of", None)
    for args in calls:
        attend.direct(*args)


def test_a_plan_and_its_repeater_do_not_keep_one_another() -> None:
    gc.collect()
    gc.disable()
    try:
        ids = torch.arange(S) // 7
        before = sum(isinstance(x, Plan) for x in gc.get_objects())
        for _ in range(5):  # a plan that depends on what a mask captures is no other call's
            anyattn.flex_attention(*made(), mask_mod=lambda b, h, i, j: ids[i] == ids[j])
        assert sum(isinstance(x, Plan) for x in gc.get_objects()) <= before + 1
    finally:
        gc.enable()
