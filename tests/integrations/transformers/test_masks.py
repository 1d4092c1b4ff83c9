"""Descriptions of masks beside Transformers' own dense masks, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from anyattn.integrations.transformers import describe_mask
from anyattn.integrations.transformers.description import Aligned, Cached, Listed, MaskDescription, Masked
from anyattn.integrations.transformers.mask_functions import form_of
from tests.support.transformers_models import IS_FIVE, padded

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
causal = masking_utils.causal_mask_function


def _packed(inner: Callable) -> Callable:
    ids = masking_utils.find_packed_sequence_indices(POSITIONS)
    if not IS_FIVE:
        return masking_utils.and_masks(inner, masking_utils.packed_sequence_mask_function(ids))
    return masking_utils.packed_sequence_compatibility_function(inner, POSITIONS, ids)


def _functions() -> dict[str, Callable]:
    found = {
        "causal": causal,
        "window": masking_utils.sliding_window_causal_mask_function(4),
        "window of one": masking_utils.sliding_window_causal_mask_function(1),
        "window of none": masking_utils.sliding_window_causal_mask_function(0),
        "chunked": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3])),
        "causal and a prefix": masking_utils.or_masks(causal, lambda b, h, q, k: k < 3),
        "causal and odd keys": masking_utils.and_masks(causal, lambda b, h, q, k: k % 2 == 1),
        "two windows": masking_utils.and_masks(
            masking_utils.sliding_window_overlay(6), masking_utils.sliding_window_causal_mask_function(3), causal
        ),
    }
    if IS_FIVE:
        found |= {
            "everything": masking_utils.bidirectional_mask_function,
            "both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
            "blocks": masking_utils.or_masks(
                causal, masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, 2, 2]]).expand(2, -1))
            ),
        }
    return found


PACKED = {
    "causal": causal,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "prefix": masking_utils.or_masks(causal, causal),
}

# batch 2: queries, keys, first query, first key
PLACES = {
    "whole": (12, 12, 0, 0),
    "one more": (1, 12, 11, 0),
    "a few more": (3, 12, 9, 0),
    "static, prefill": (5, 12, 0, 0),
    "static, one row": (1, 12, 6, 0),
    "static, some rows": (3, 12, 6, 0),
    "sliding": (1, 6, 11, 6),
    "sliding, some rows": (3, 8, 9, 4),
}
PADDING = {"none": None, "left": [12, 7], "all of one": [12, 0], "right": [12, 7], "holes": [12, 9]}


def _mask(kind: str, length: int) -> Tensor | None:
    lengths = PADDING[kind]
    if lengths is None:
        return None
    mask = padded(2, 12, lengths, "right" if kind == "right" else "left").bool()[:, :length]
    if kind == "holes":
        mask[0, 2:4] = False
    return mask


def _dense(function: Callable, places: tuple[int, int, int, int], mask: Tensor | None) -> Tensor:
    """Transformers' own answer, on index tensors."""
    queries, keys, first_q, first_k = places
    b = torch.arange(2)[:, None, None, None]
    h = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    q = torch.arange(first_q, first_q + queries)[None, None, :, None]
    k = torch.arange(first_k, first_k + keys)[None, None, None]
    seen = function(b, h, q, k).expand(2, 1, queries, keys)
    if mask is not None:
        wide = torch.nn.functional.pad(mask, (0, max(0, first_k + keys - mask.shape[1])))
        seen = seen & wide[:, None, None, first_k : first_k + keys]
    return seen


def _meaning(mask: MaskDescription, way: Any) -> Tensor:
    """Which keys the calls of ``way`` see, from the documented meaning of their arguments."""
    queries, keys = mask.seq_lengths
    b = torch.arange(mask.batch)[:, None, None]
    rows, columns = torch.arange(queries)[None, :, None], torch.arange(keys)[None, None]
    if isinstance(way, Aligned):
        return _band(rows + keys - queries, columns, way.causal, way.window).expand(mask.batch, -1, -1)[:, None]
    if isinstance(way, Cached):
        lengths = torch.full((mask.batch,), keys) if way.lengths is None else way.lengths
        leftpad = torch.zeros(mask.batch, dtype=torch.int64) if way.leftpad is None else way.leftpad.long()
        q = rows + (lengths - queries - leftpad)[:, None, None]
        k = columns - leftpad[:, None, None]
        seen = _band(q, k, way.causal, way.window) & (k >= 0) & (columns < lengths[:, None, None])
        if way.mask_mod is None:
            return seen[:, None]
        return _asked(way.mask_mod, seen, b, q, k)[:, None]
    mod = way.mask_mod if isinstance(way, Masked) else way.block_mask.mask_mod
    return _asked(mod, torch.ones(mask.batch, queries, keys, dtype=torch.bool), b, rows, columns)[:, None]


def _band(q: Tensor, k: Tensor, is_causal: bool, window: tuple[int, int]) -> Tensor:
    seen = torch.ones(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool)
    seen = seen & (k <= q) if is_causal else seen
    seen = seen & (q - k <= window[0]) if window[0] >= 0 else seen
    return seen & (k - q <= window[1]) if window[1] >= 0 else seen


def _asked(mod: Callable, seen: Tensor, *places: Tensor) -> Tensor:
    """The mod at the visible pairs only: it must never be asked outside, where its tensors end."""
    at = seen.nonzero(as_tuple=True)
    b, q, k = (t.expand(seen.shape)[at] for t in places)
    found = seen.clone()
    found[at] = mod(b, torch.zeros_like(b), q, k)
    return found


def _described(function: Callable, places: tuple[int, int, int, int], mask: Tensor | None, as_tensor: bool = False) -> MaskDescription:
    queries, keys, first_q, first_k = places
    return describe_mask(
        batch_size=2, q_length=queries, kv_length=keys, q_offset=torch.tensor(first_q) if as_tensor else first_q, kv_offset=first_k,
        mask_function=function, attention_mask=mask, device="cpu",
    )  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("padding", list(PADDING))
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("name", list(_functions()))
def test_description_means_the_dense_mask(name: str, place: str, padding: str) -> None:
    function, places = _functions()[name], PLACES[place]
    mask = _mask(padding, places[2] + places[0])
    described = _described(function, places, mask, as_tensor=place.startswith("static"))
    dense = _dense(function, places, mask)
    assert torch.equal(_meaning(described, described.way), dense)
    assert described.shape == (2, 1, *places[:2])
    if described.rows is not None:
        lo, hi, hidden, is_causal = described.rows
        seen = torch.zeros(2, 1, places[0], places[1], dtype=torch.bool)
        seen[..., lo:hi] = True if hidden is None else ~hidden[:, None, None]
        assert torch.equal(seen.tril() if is_causal else seen, dense)
    if isinstance(described.way, Cached):
        listed = described.with_gradients()
        assert isinstance(listed, Listed)
        assert torch.equal(_meaning(described, listed), dense)


@pytest.mark.covering(2)
@pytest.mark.parametrize("padding", list(PADDING))
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("name", ["causal", "window", "chunked"])
def test_description_without_a_look_at_contents(name: str, place: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyattn.integrations.transformers.masks._can_read", lambda *given: False)
    function, places = _functions()[name], PLACES[place]
    mask = _mask(padding, places[2] + places[0])
    described = _described(function, places, mask, as_tensor=True)
    assert described.rows is None
    assert torch.equal(_meaning(described, described.way), _dense(function, places, mask))


@pytest.mark.parametrize("name", list(PACKED))
def test_packed_sequences(name: str) -> None:
    function = _packed(PACKED[name])
    described = _described(function, PLACES["whole"], None)
    assert isinstance(described.way, Listed)
    assert described.has_documents
    assert torch.equal(_meaning(described, described.way), _dense(function, PLACES["whole"], None))


def test_packed_sequences_are_recognised() -> None:
    form = form_of(_packed(PACKED["window"]))
    assert (form.causal, form.left, form.rest) == (True, 2, ())
    assert form.documents is not None


@pytest.mark.skipif(not IS_FIVE, reason="Transformers 4 has no remapped positions")
def test_positions_that_do_not_belong_to_the_documents_stay_a_function() -> None:
    ids = masking_utils.find_packed_sequence_indices(POSITIONS)
    function = masking_utils.packed_sequence_compatibility_function(causal, POSITIONS.flip(1), ids)
    form = form_of(function)
    assert len(form.rest) == 1
    described = _described(function, PLACES["whole"], None)
    assert torch.equal(_meaning(described, described.way), _dense(function, PLACES["whole"], None))


def test_what_is_recognised() -> None:
    functions = _functions()
    form = form_of(functions["window"])
    assert (form.causal, form.left, form.right, form.is_band) == (True, 3, None, True)
    assert form_of(functions["two windows"]).left == 2
    for name in ("window of none", "chunked", "causal and a prefix", "causal and odd keys"):
        assert form_of(functions[name]).rest


def test_a_look_alike_is_not_recognised() -> None:
    def sliding_window_overlay(sliding_window: int) -> Callable:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    assert form_of(sliding_window_overlay(3)).rest


@pytest.mark.parametrize("name", list(_functions()))
def test_wrapped_functions_mean_what_they_wrap(name: str) -> None:
    """A function around a recognised one is another mask: it is asked whole."""
    inner = _functions()[name]
    function = lambda b, h, q, k: inner(b, h, q, k) & (k != 5)
    described = _described(function, PLACES["whole"], None)
    assert torch.equal(_meaning(described, described.way), _dense(function, PLACES["whole"], None))


def test_transformers_four_passes_positions() -> None:
    described = describe_mask(batch_size=2, cache_position=torch.arange(6, 9), kv_length=12, mask_function=causal)
    assert described.shape == (2, 1, 3, 12)
    assert torch.equal(_meaning(described, described.way), _dense(causal, (3, 12, 6, 0), None))
    with pytest.raises(ValueError, match="cache_position runs from 3 to 8"):
        describe_mask(batch_size=2, cache_position=torch.tensor([3, 8]), kv_length=12, mask_function=causal)
    with pytest.raises(TypeError, match="neither q_length nor cache_position"):
        describe_mask(batch_size=2, kv_length=12)


@pytest.mark.parametrize("q_offset", [11, torch.tensor(11)])
def test_a_mask_moves_to_another_device_whole(q_offset: int | Tensor) -> None:
    """Also what it makes later, for layers with gradients; the keys of few rows on a CPU are forgotten on another device."""
    mask = padded(2, 12, [12, 5]).bool()
    mask[0, 7] = False
    described = describe_mask(batch_size=2, q_length=1, kv_length=12, q_offset=q_offset, mask_function=causal, attention_mask=mask)
    assert isinstance(described.way, Cached) and described.rows is not None and described.rows.hidden is not None
    here, moved = described.to("cpu"), described.to("meta")
    assert here.rows is described.rows and moved.rows is None and moved.bias(torch.float32) is None
    for found, device in ((here, "cpu"), (moved, "meta")):
        assert found.shape == described.shape
        way = found.with_gradients()
        assert isinstance(way, Listed)
        assert {t.device.type for t in way.block_mask.as_tuple() if isinstance(t, Tensor)} == {device}
    assert isinstance(described.way, Cached)  # the copies' lists are not its own


def test_a_decoding_step_that_moves_is_no_longer_one_on_a_cpu() -> None:
    described = describe_mask(batch_size=2, q_length=1, kv_length=12, q_offset=11, mask_function=causal)
    assert described.is_decoding and described.to("cpu").is_decoding and not described.to("meta").is_decoding
