"""Views of vLLM's cache, and what is written to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn.integrations.vllm import cache_update
from anyattn.integrations.vllm.cache import FORMATS, SCALE_BYTES, cache_views
from tests.integrations.vllm.batches import HEAD_SIZE, KV_HEADS, batch_of, empty_cache, layer_of

QUANTISED = [name for name, stored in FORMATS.items() if stored.dtype is not None]
INLINE = [name for name, stored in FORMATS.items() if stored.has_inline_scales]


def storage(name: str) -> tuple[torch.dtype, int]:
    """vLLM's dtype of a cache in this format, and the size of a cell's content in it."""
    stored = FORMATS[name]
    numbers = 2 * HEAD_SIZE + 2 * SCALE_BYTES * stored.has_inline_scales
    return (torch.bfloat16 if stored.dtype is None else torch.int8 if name.startswith("int8") else torch.uint8), numbers


@pytest.mark.parametrize("layout", ["LBHNC", "BHLNC", "LBNHC"])
@pytest.mark.parametrize("name", FORMATS)
def test_views_are_the_cells(vllm: Any, name: str, layout: str) -> None:
    dtype, content = storage(name)
    of = batch_of(vllm)
    kv_cache = empty_cache(vllm, of, layout, dtype, content)
    views = cache_views(kv_cache, HEAD_SIZE, FORMATS[name])
    assert views.k.shape == views.v.shape == (of.num_pages, 16, KV_HEADS, HEAD_SIZE)
    assert views.k.dtype == views.v.dtype == (FORMATS[name].dtype or dtype)
    kv_cache.view(torch.uint8).zero_()
    cell = kv_cache[3, 1, 5].view(torch.uint8)
    views.k[3, 5, 1].view(torch.uint8).fill_(1)
    views.v[3, 5, 1].view(torch.uint8).fill_(2)
    ends = [HEAD_SIZE * views.k.itemsize]
    assert cell[: ends[0]].eq(1).all()
    if views.k_scale is None or views.v_scale is None:
        assert name not in INLINE and cell[ends[0] :].eq(2).all()
        return
    assert views.k_scale.dtype == views.v_scale.dtype == torch.float32
    assert views.k_scale.shape == views.v_scale.shape == (of.num_pages, 16, KV_HEADS)
    views.k_scale[3, 5, 1], views.v_scale[3, 5, 1] = 3.0, 4.0
    assert cell[HEAD_SIZE : HEAD_SIZE + 4].clone().view(torch.float32) == 3.0
    assert cell[HEAD_SIZE + 4 : -4].eq(2).all() and cell[-4:].clone().view(torch.float32) == 4.0
    assert int((kv_cache.view(torch.uint8) != 0).any(-1).sum()) == 1, "no other cell is written"


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_quantised_rows(vllm: Any, name: str, layout: str) -> None:
    """Within half a step of the stored format, in their own slots; padding writes nothing."""
    dtype, content = storage(name)
    of, stored = batch_of(vllm, dtype=torch.bfloat16), FORMATS[name]
    kv_cache = empty_cache(vllm, of, layout, dtype, content)
    before = kv_cache.clone()
    layer = layer_of(k_scale=0.25, v_scale=2.0)
    views = cache_views(kv_cache, HEAD_SIZE, stored)
    slots = of.common.slot_mapping
    cache_update.update_cache(views, stored, name, of.key, of.value, slots, layer)
    kept = slots >= 0
    page, row = slots[kept] // 16, slots[kept] % 16
    assert stored.dtype is not None
    for rows, cells, scales, scale in ((of.key, views.k, views.k_scale, 0.25), (of.value, views.v, views.v_scale, 2.0)):
        wanted = rows[: len(slots)][kept].float()
        factor = torch.tensor(scale) if scales is None else scales[page, row][..., None]
        got = cells[page, row].float() * factor
        step = wanted.abs() * torch.finfo(stored.dtype).eps / 2 if stored.dtype.is_floating_point else factor / 2
        smallest = factor * torch.finfo(stored.dtype).smallest_normal if stored.dtype.is_floating_point else 0.0
        assert ((got - wanted).abs() <= step * 1.001 + smallest).all()
        if scales is not None:
            greatest = 448.0 if stored.dtype.is_floating_point else 127.0
            assert torch.equal(factor[..., 0], (wanted.abs().amax(-1) / greatest).clamp_min(1e-6))
    untouched = torch.ones(of.num_pages, 16, dtype=torch.bool)
    untouched[page, row] = False
    bytes_of = [x.transpose(1, 2).view(torch.uint8)[untouched] for x in (kv_cache, before)]
    assert torch.equal(*bytes_of)


def test_saturation(vllm: Any) -> None:
    of = batch_of(vllm, [(2, 2)], padding=(0, 0))
    for name, greatest in (("fp8", 448.0), ("fp8_e5m2", 57344.0)):
        kv_cache = empty_cache(vllm, of, "LBHNC", torch.uint8, 2 * HEAD_SIZE)
        views = cache_views(kv_cache, HEAD_SIZE, FORMATS[name])
        big = torch.full_like(of.key, 1e6)
        cache_update.update_cache(views, FORMATS[name], name, big, -big, of.common.slot_mapping, layer_of())
        page, row = of.common.slot_mapping // 16, of.common.slot_mapping % 16
        assert views.k[page, row].float().eq(greatest).all() and views.v[page, row].float().eq(-greatest).all()


def test_a_head_of_zeros_has_a_scale(vllm: Any) -> None:
    of = batch_of(vllm, [(2, 2)], padding=(0, 0))
    for name in INLINE:
        dtype, content = storage(name)
        views = cache_views(empty_cache(vllm, of, "LBHNC", dtype, content), HEAD_SIZE, FORMATS[name])
        zeros = torch.zeros_like(of.key)
        cache_update.update_cache(views, FORMATS[name], name, zeros, zeros, of.common.slot_mapping, layer_of())
        page, row = of.common.slot_mapping // 16, of.common.slot_mapping % 16
        assert views.k_scale is not None and views.k_scale[page, row].gt(0).all() and not views.k[page, row].float().any()


@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_vllms_operations_write(vllm: Any, name: str) -> None:
    """With the arguments that they have in the release."""
    if vllm.is_real:
        pytest.skip("vLLM's operations need a GPU; this test looks at their arguments")
    from vllm import _custom_ops
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as kernels

    dtype, content = storage(name)
    of, stored, layer = batch_of(vllm), FORMATS[name], layer_of(k_scale=3.0)
    views = cache_views(empty_cache(vllm, of, "LBNHC", dtype, content), HEAD_SIZE, stored)
    key = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    for calls in (_custom_ops.CALLS, kernels.CALLS):
        calls.clear()
    cache_update.update_cache(views, stored, name, key, of.value, of.common.slot_mapping, layer)  # type: ignore[arg-type]
    if stored.has_inline_scales:
        (call,) = kernels.CALLS
        assert call[:6] == (key, of.value, *views) and call[6] is of.common.slot_mapping
        assert call[7] is vllm.cache.KVQuantMode[name.upper()] and not _custom_ops.CALLS
    else:
        (call,) = _custom_ops.CALLS
        assert call[:4] == (key, of.value, *views[:2]) and call[4] is of.common.slot_mapping
        assert call[5:] == (name, layer._k_scale, layer._v_scale) and not kernels.CALLS
