"""``ContextPlan.prefetch``: plans of what was copied before, here with the way of a GPU on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anyattn import distributed as ad
from anyattn import masks
from anyattn.block_masks import create_block_mask
from anyattn.distributed import by_documents
from anyattn.distributed.placement import prefetched, work


def mask_of(seed: int, heads: int | None = None) -> Any:
    ids = (torch.rand(512, generator=torch.Generator().manual_seed(seed), device="cpu") < 0.02).cumsum(0)
    mod = masks.document(ids) if heads is None else masks.document(ids) | (lambda b, h, q, k: q - k == 8 * h)
    return create_block_mask(mod, None, heads, 512, 512, "cpu", 16)


def same(a: Any, b: Any) -> bool:
    return a.digest == b.digest and np.array_equal(a._placement.owner, b._placement.owner) and a.stats == b.stats


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of a planner whose masks seem to lie on a GPU: a list is counted, a copy is waited for."""
    steps: list[str] = []
    count = work._by_chunks

    def counted(*args: Any) -> Any:
        steps.append("count")
        return count(*args)

    monkeypatch.setattr(work, "_by_chunks", counted)
    monkeypatch.setattr(work, "is_asynchronous", lambda t: True)
    monkeypatch.setattr(prefetched, "_to_host", lambda counts: (counts.clone(), lambda: steps.append("wait")))
    return steps


def test_a_plan_takes_what_was_copied(waits: list[str]) -> None:
    first, later = ad.plan(mask_of(0), ranks=2), mask_of(1)
    wanted = ad.plan(mask_of(1), ranks=2)
    waits.clear()
    assert first.prefetch(later) is later
    assert waits == ["count", "count"]
    assert same(ad.plan(later, ranks=2), wanted)
    assert waits == ["count", "count", "wait"]
    assert same(ad.plan(later, ranks=2), wanted)  # a copy serves one plan
    assert waits == ["count", "count", "wait", "count", "count"]


def test_several_masks_and_masks_by_head(waits: list[str]) -> None:
    both = {"a": mask_of(2), "b": mask_of(3, heads=3)}
    first, wanted = ad.plan(mask_of(0), ranks=3), ad.plan(both, ranks=3, weights={"a": 1, "b": 4})
    later = first.prefetch(both)
    waits.clear()
    assert same(ad.plan(later, ranks=3, weights={"a": 1, "b": 4}), wanted)
    assert waits == ["wait", "wait"]


@pytest.mark.parametrize("change", ["lists", "chunk"])
def test_what_was_copied_of_other_lists_or_chunks_is_not_taken(change: str, waits: list[str]) -> None:
    later = mask_of(4)
    ad.plan(mask_of(0), ranks=2).prefetch(later)
    waits.clear()
    if change == "lists":
        later.kv_num_blocks.zero_()
    found = ad.plan(later, ranks=2, chunk=32 if change == "chunk" else None)
    assert waits == ["count", "count"]
    assert same(found, ad.plan(later, ranks=2, chunk=32 if change == "chunk" else None))


def test_a_mask_on_a_cpu_is_not_copied() -> None:
    later = mask_of(1)
    assert ad.plan(mask_of(0), ranks=2).prefetch(later) is later
    assert later.kv_indices not in prefetched._copies


def test_a_mod_becomes_the_mask_of_a_later_plan() -> None:
    first = ad.plan(masks.causal(), ranks=2, S=512, device="cpu")
    later = first.prefetch(masks.sliding_window(40, 0))
    assert same(ad.plan(later, ranks=2), ad.plan(masks.sliding_window(40, 0), ranks=2, S=512, device="cpu"))


def test_the_ids_of_documents_are_copied_too_and_not_taken_after_a_write(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_documents, "is_asynchronous", lambda t: True)
    ids = torch.arange(512, device="cpu") // 100
    ad.plan(mask_of(0), ranks=2).prefetch(create_block_mask(masks.document(ids) & masks.causal(), None, None, 512, 512, "cpu", 16))
    waits.clear()
    assert prefetched.on_host(ids).data_ptr() != ids.data_ptr()
    assert waits == ["wait"]
    ids[:] = torch.arange(512, device="cpu") // 50
    assert torch.equal(prefetched.on_host(ids), ids)
    assert waits == ["wait"]
