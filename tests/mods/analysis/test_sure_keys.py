"""Sure keys are visible in every row, and are found where one operand of a disjunction shows a range."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn import masks
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.sure_keys import sure_range
from anyattn.mods.tracing.trace import trace
from tests.support.tiles import dense, random_mask

B, H, LENGTH = 2, 3, 24


def shown(mod) -> torch.Tensor | None:  # type: ignore[no-untyped-def]
    """(B, H, LENGTH, LENGTH): the sure keys of ``mod``; None if there are none."""
    mask = trace(mod, "mask")
    limits = sure_range(mask)
    if limits is None:
        return None
    b, h, q = (torch.arange(n).view(shape) for n, shape in ((B, (-1, 1, 1)), (H, (-1, 1)), (LENGTH, (-1,))))
    lo, hi = (
        torch.as_tensor(x).expand(B, H, LENGTH)[..., None] for x in run(limits, {"b": b, "h": h, "q_idx": q}, mask.scalars, mask.tensors)
    )
    keys = torch.arange(LENGTH)
    return (lo <= keys) & (keys < hi)


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_random_masks_show_their_sure_keys(seed: int) -> None:
    mod = random_mask(seed, LENGTH, B, H)
    found = shown(mod)
    assert found is None or not bool((found & ~dense(mod, LENGTH, LENGTH, B, H)).any())


def test_some_random_disjunctions_have_sure_keys() -> None:
    both = [(random_mask(seed, LENGTH, B, H), random_mask(seed + 1, LENGTH, B, H)) for seed in range(0, 200, 2)]
    found = [shown(lambda b, h, q, k, x=x, y=y: x(b, h, q, k) | y(b, h, q, k)) for x, y in both]
    assert sum(f is not None and bool(f.any()) for f in found) > 30


def test_the_prefix_of_a_tree() -> None:
    bits, lengths = torch.randint(0, 2**40, (LENGTH,)), torch.tensor([5, 20])
    found = shown(masks.tree(bits, offset=lengths))
    assert found is not None
    assert torch.equal(found, (torch.arange(LENGTH) < lengths[:, None, None, None]).expand(B, H, LENGTH, LENGTH))
    both = shown(masks.tree(bits, offset=lengths) & masks.causal())
    assert both is not None and bool(both.any())
    assert not bool((both & ~dense(masks.tree(bits, offset=lengths) & masks.causal(), LENGTH, LENGTH, B, H)).any())
    assert shown(masks.tree(bits)) is None
