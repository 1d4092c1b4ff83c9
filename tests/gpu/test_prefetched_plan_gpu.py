"""``ContextPlan.prefetch`` on a GPU: the plan is that of counts that were waited for, and planning waits for no other work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anyattn import distributed as ad
from anyattn import masks
from anyattn.block_masks import create_block_mask
from anyattn.distributed.placement import prefetched

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_plans_are_equal_and_nothing_else_is_waited_for() -> None:
    edges = torch.tensor([0, 900, 2500, 4000], device="cuda")
    ids = torch.searchsorted(edges, torch.arange(4096, device="cuda"), right=True)
    later = create_block_mask(masks.document(ids) & masks.causal(), None, None, 4096, 4096, "cuda")
    wanted = ad.plan(later, ranks=4)
    first = ad.plan(masks.causal(), ranks=4, S=4096, device="cuda")
    first.prefetch(later)
    assert prefetched._copies[later.kv_indices].counts.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ad.plan(later, ranks=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.digest == wanted.digest
    assert np.array_equal(found._placement.owner, wanted._placement.owner)
    assert all(np.array_equal(a, b) for a, b in zip(found._demands[""], wanted._demands[""], strict=True))
