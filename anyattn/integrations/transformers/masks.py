"""Mask interface of Transformers: turns lengths, offsets, padding and a mask function into a ``MaskDescription``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function

from anyattn.block_masks import create_block_mask
from anyattn.determinism import is_batch_invariant
from anyattn.integrations.transformers import forward_passes, hooks
from anyattn.integrations.transformers.description import Aligned, Cached, FewRows, Listed, MaskDescription, Masked, Packed, Way
from anyattn.integrations.transformers.mask_functions import Form, form_of
from anyattn.integrations.transformers.padding import NO_PADDING, Padding, padding_of, padding_read
from anyattn.integrations.transformers.planned import planned_mask
from anyattn.integrations.transformers.positions import text_positions
from anyattn.mods import masks
from anyattn.mods.algebra import and_masks
from anyattn.tensors.kinds import has_memory

__all__ = ["describe_mask"]

_FEW = 1024  # query rows up to which ATen's CPU kernel was measured to be faster


def describe_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    config: Any = None,
    **others: Any,
) -> MaskDescription:
    """The mask of the layers of one type, with the signature that Transformers expects of a mask interface.

    q_length, q_offset: number of queries, and the global position of the first; a tensor with a static cache, which is not read on a GPU.
    Transformers 4 passes cache_position, the queries' positions, instead. kv_length, kv_offset: the same for the keys that the layers will
    pass. mask_function: ``(b, h, q, kv) -> bool`` over global positions. attention_mask: bool (B, positions), False for padding; or a
    description, which is returned. config: the model's, which errors name. others: arguments for other implementations.
    """
    if isinstance(attention_mask, MaskDescription):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], _first(cache_position, kv_length, kv_offset)
        device = cache_position.device
    if q_length is None:
        raise TypeError("describe_mask got neither q_length nor cache_position; wanted one of them, as Transformers passes it")
    if device is None:
        device = attention_mask.device if attention_mask is not None else "cpu"
    device = torch.device(device)
    is_read = _can_read(device, attention_mask, q_offset)
    if is_read and isinstance(q_offset, Tensor):
        q_offset = int(q_offset)
    planned = planned_mask(batch_size, (q_length, kv_length), q_offset, mask_function)
    if planned is not None:
        forward_passes.expect(planned)
        return planned
    if kv_offset and is_batch_invariant():
        raise ValueError(
            f"inside anyattn.batch_invariant() a cache has dropped its first {kv_offset} keys, behind a layer's window, and with them the "
            "places that the others had in tiles; wanted one that keeps all keys: past_key_values=DynamicCache(), without a config"
        )
    sizes = _Sizes(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    description = _described(sizes, mask_function, attention_mask, is_read, config)
    if hooks.lacks_positions() and 1 < q_length == kv_length and sizes.is_aligned and form_of(mask_function).depends_on_places:
        description.of_documents = partial(_of_documents, sizes, mask_function, attention_mask, config)
        positions = forward_passes.positions_of_call()
        if positions is not None:
            description = description.separated(positions)
            description.of_documents = None
    if not torch.compiler.is_compiling():
        forward_passes.expect(description)
    return description


def _described(sizes: _Sizes, mask_function: Callable, attention_mask: Tensor | None, is_read: bool, config: Any) -> MaskDescription:
    form = form_of(mask_function)
    if torch.compiler.is_compiling():
        way, rows, listed = _way_in_a_graph(sizes, form, mask_function, attention_mask), None, None
    else:
        padding = _padding(sizes, form, attention_mask, is_read)
        way = _way(sizes, form, padding, is_read)
        rows = _few_rows(sizes, form, attention_mask) if is_read else None
        listed = partial(_listed, sizes, form, padding) if isinstance(way, Cached) else None
    description = MaskDescription(sizes.batch, (sizes.queries, sizes.keys), way, rows, listed)
    is_plain = isinstance(way, Aligned) or (isinstance(way, Cached) and way.mask_mod is None)
    description.is_decoding = sizes.queries == 1 and sizes.device.type == "cpu" and is_plain
    description.has_documents = form.documents is not None
    if config is not None:
        description.model = type(config).__name__.removesuffix("Config")
    return description


def _of_documents(
    sizes: _Sizes, mask_function: Callable, attention_mask: Tensor | None, config: Any, position_ids: Tensor
) -> MaskDescription | None:
    """The mask of packed sequences, which begin wherever a position is not the previous one plus 1; None if there is only one, and beside
    padding, as in Transformers. OPT and its like make a padding mask of ones themselves: that is none."""
    if attention_mask is not None and (torch.compiler.is_compiling() or not bool(attention_mask.all())):
        return None
    if position_ids.ndim > 3 or position_ids.shape[-2:-1] not in ((), (1,), (sizes.batch,)):
        return None
    if position_ids.shape[-1] != sizes.queries:
        _refuse_packed(position_ids, sizes)
        return None
    position_ids = text_positions(position_ids).expand(sizes.batch, -1)
    ids = masking_utils.find_packed_sequence_indices(position_ids)
    if ids is None:
        return None
    remapped = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # not in 4.57
    inside = mask_function if remapped is None else remapped(mask_function, position_ids)
    both = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(ids), inside)
    described = _described(sizes, both, None, _can_read(sizes.device, None, sizes.q_offset), config)
    described.has_documents = True
    return described


def _refuse_packed(position_ids: Tensor, sizes: _Sizes) -> None:
    """Raises ``ValueError`` if positions of other lengths than the mask start again; in a compiled graph they are not read."""
    if not torch.compiler.is_compiling() and bool((text_positions(position_ids).diff(dim=1) < 0).any()):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} start again inside a row, and the model's mask is of {sizes.queries} "
            "queries, so that nothing keeps the texts apart; wanted one text in each row, or positions of all queries"
        )


@dataclass(frozen=True)
class _Sizes:
    """Lengths, and the global positions of the first query and the first key."""

    batch: int
    queries: int
    keys: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device

    @property
    def distance(self) -> int | Tensor:
        """The first query's position minus the first key's."""
        return self.q_offset - self.kv_offset

    @property
    def is_aligned(self) -> bool:
        """Whether the last query and the last key have the same position, judged by numbers on the host."""
        return not isinstance(self.q_offset, Tensor) and self.q_offset + self.queries == self.kv_offset + self.keys

    def in_use(self) -> Tensor | None:
        """The number of key rows up to the last query, int32 (B,); None if these are all rows."""
        if self.is_aligned:
            return None
        behind = self.queries - self.kv_offset  # computed first: then only one operation uses the tensor
        end = self.q_offset + behind
        if isinstance(end, Tensor):
            return end.to(torch.int32).expand(self.batch)
        return self.of_all(end)

    def of_all(self, rows: int) -> Tensor:
        """The same number of rows for every batch entry, int32 (B,)."""
        return torch.full((self.batch,), rows, dtype=torch.int32, device=self.device)


def _can_read(device: torch.device, attention_mask: Tensor | None, q_offset: int | Tensor) -> bool:
    """Whether reading tensors costs nothing: on a CPU, outside compiled graphs, for tensors that have contents."""
    if torch.compiler.is_compiling() or device.type != "cpu":
        return False
    return all(has_memory(t) and t.device.type == "cpu" for t in (attention_mask, q_offset) if isinstance(t, Tensor))


def _first(cache_position: Tensor, kv_length: int, kv_offset: int) -> int | Tensor:
    """The first query position; if there are as many queries as keys, it is 0 and not read."""
    count = cache_position.shape[0]
    if torch.compiler.is_compiling() or cache_position.device.type != "cpu":
        return 0 if count == kv_length and kv_offset == 0 else cache_position[0]
    first, last = int(cache_position[0]), int(cache_position[-1])
    if last - first != count - 1:
        raise ValueError(f"cache_position runs from {first} to {last} over {count} queries; wanted consecutive positions")
    return first


def _padding(sizes: _Sizes, form: Form, attention_mask: Tensor | None, is_read: bool) -> Padding:
    if attention_mask is None:
        return NO_PADDING
    if not is_read:
        return padding_of(attention_mask, sizes.kv_offset, sizes.keys)
    end = sizes.keys
    if form.causal and not isinstance(sizes.distance, Tensor):
        end = min(end, sizes.distance + sizes.queries)
    return padding_read(attention_mask, sizes.kv_offset, max(end, 0), sizes.keys)


def _way(sizes: _Sizes, form: Form, padding: Padding, is_read: bool) -> Way:
    places_matter = form.depends_on_places
    if padding is NO_PADDING and form.is_band and (sizes.is_aligned or not places_matter):
        return Aligned(form.causal, form.window)
    # rows after the queries, as in a static cache, are ignored by that call; causality hides them
    has_one_end = sizes.is_aligned or form.causal
    # keys behind padding then have the places in tiles that they have without
    moves_keys = padding.leftpad is not None and padding.visible is None and is_batch_invariant()
    is_cached = sizes.queries == 1 or ((not sizes.is_aligned or moves_keys) and not form.rest)
    if has_one_end and form.documents is None and is_cached:
        mods = [_on_cache(f, padding.leftpad, sizes.kv_offset) for f in form.rest]
        if padding.visible is not None:
            mods.append(_on_cache(_visible(padding.visible), padding.leftpad, sizes.kv_offset))
        mod = None if not mods else mods[0] if len(mods) == 1 else and_masks(*mods)
        lengths = sizes.in_use()
        if lengths is None and not is_read:
            lengths = sizes.of_all(sizes.keys)  # once here, instead of on the GPU in every layer
        return Cached(lengths, padding.leftpad, form.causal, form.window, mod)
    packed = _packed(sizes, form) if is_batch_invariant() and padding is NO_PADDING else None
    return _listed(sizes, form, padding) if packed is None else packed


def _packed(sizes: _Sizes, form: Form) -> Packed | None:
    """Packed sequences by their lengths; None for other masks, and for sequences in parts. Reads where they end."""
    ids = form.documents
    if ids is None or form.rest or not sizes.is_aligned or sizes.queries != sizes.keys:
        return None
    ids = ids[:, sizes.kv_offset : sizes.kv_offset + sizes.keys].expand(sizes.batch, -1)
    steps = ids.diff(dim=1)
    starts = torch.nn.functional.pad(steps != 0, (1, 0), value=True).flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(starts, (0, 1), value=ids.numel()).to(torch.int32)
    if bool((steps < 0).any()):
        return None
    return Packed(ends, int(ends.diff().max()), form.causal, form.window)


def _listed(sizes: _Sizes, form: Form, padding: Padding) -> Listed:
    """Block lists over query and key rows. Recognised parts are expressed by the library's own masks."""
    if padding.leftpad is not None and is_batch_invariant():
        raise ValueError(
            "inside anyattn.batch_invariant() a batch that is padded on the left has gradients or a mask with holes, and there the longest "
            "text decides where in tiles the others' keys are; wanted padding on the right (tokenizer.padding_side), or packed texts"
        )
    if form.documents is not None and is_batch_invariant():
        raise ValueError(
            "inside anyattn.batch_invariant() packed sequences are in parts, or have padding, a cache, or a mask function that is not one "
            "of Transformers', and so are no calls of their own; wanted one text in each row, padded on the right, or only position_ids"
        )
    distance = sizes.distance
    parts: list[Callable] = []
    is_shared = padding is NO_PADDING and not form.rest  # by all batch entries
    if form.causal or form.left is not None or form.right is not None:
        if isinstance(distance, Tensor):
            distance, is_shared = distance.expand(sizes.batch), False
        parts.append(masks.sliding_window(form.left, 0 if form.causal else form.right, distance))
    if form.documents is not None:
        ids = form.documents
        if not isinstance(sizes.q_offset, Tensor) and sizes.q_offset == sizes.kv_offset == 0:
            parts.append(masks.document(ids[0] if ids.shape[0] == 1 else ids))
            is_shared = is_shared and ids.shape[0] == 1
        else:
            parts.append(_on_rows(masks.document(ids), sizes.q_offset, sizes.kv_offset))
            is_shared = False
    if padding.leftpad is not None:
        parts.append(masks.left_padding(padding.leftpad))
    if padding.visible is not None:
        parts.append(_on_rows(_visible(padding.visible), sizes.q_offset, sizes.kv_offset))
    parts += [_on_rows(f, sizes.q_offset, sizes.kv_offset) for f in form.rest]
    mod = and_masks(*parts) if parts else masks.full()
    batch = None if is_shared else sizes.batch
    return Listed(create_block_mask(mod, batch, None, sizes.queries, sizes.keys, device=sizes.device))


def _way_in_a_graph(sizes: _Sizes, form: Form, mask_function: Callable, attention_mask: Tensor | None) -> Way:
    """The call of the layers inside ``torch.compile`` and ``torch.export``: nothing is read, and the compiled call makes its own lists."""
    places_matter = form.depends_on_places
    if attention_mask is None and form.is_band:
        if sizes.is_aligned or not places_matter:
            return Aligned(form.causal, form.window)
        if form.causal and not torch.is_grad_enabled():
            return Cached(sizes.in_use(), None, True, form.window, None)
    whole = _on_rows(mask_function, sizes.q_offset, sizes.kv_offset)
    if attention_mask is None:
        return Masked(whole)
    if is_batch_invariant():
        raise ValueError(
            "inside anyattn.batch_invariant() a compiled graph has an attention_mask, which it does not read: whether padding moves keys "
            "in tiles is unknown; wanted no attention_mask (packed texts, or one text), or the model uncompiled"
        )
    seen = _on_rows(_visible(padding_of(attention_mask, sizes.kv_offset, sizes.keys).positions), sizes.q_offset, sizes.kv_offset)

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return whole(b, h, q_idx, kv_idx) & seen(b, h, q_idx, kv_idx)

    return Masked(both)


def _few_rows(sizes: _Sizes, form: Form, attention_mask: Tensor | None) -> FewRows | None:
    """The keys that a few query rows see, as numbers; None if the mask depends on more than distances and padding."""
    distance = sizes.distance
    if sizes.queries > _FEW or not form.is_band or isinstance(distance, Tensor):
        return None
    lo, hi, is_causal = 0, sizes.keys, False
    if sizes.queries == 1:
        after = 0 if form.causal else form.right
        lo = 0 if form.left is None else max(0, distance - form.left)
        hi = hi if after is None else min(hi, distance + after + 1)
    elif form.depends_on_places:
        is_wide = form.left is None or form.left >= sizes.queries - 1
        if distance != 0 or not form.causal or not is_wide:
            return None
        hi, is_causal = min(hi, sizes.queries), True
    if hi <= lo:
        return None
    if attention_mask is None:
        return FewRows(lo, hi, None, is_causal)
    seen = attention_mask[:, sizes.kv_offset + lo : sizes.kv_offset + hi]
    seen = seen if seen.dtype is torch.bool else seen.to(torch.bool)
    if seen.shape[1] < hi - lo:
        seen = torch.nn.functional.pad(seen, (0, hi - lo - seen.shape[1]))
    return FewRows(lo, hi, None if bool(seen.all()) else ~seen, is_causal)


def _visible(mask: Tensor) -> Callable:
    return lambda b, h, q_idx, kv_idx: mask[b, kv_idx]


def _on_rows(mask_function: Callable, q_offset: int | Tensor, kv_offset: int) -> Callable:
    """A mask function over global positions as a mod over rows."""
    return lambda b, h, q_idx, kv_idx: mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)


def _on_cache(mask_function: Callable, leftpad: Tensor | None, kv_offset: int) -> Callable:
    """A mask function over global positions as a mod of ``flash_attn_with_kvcache``, whose positions count from the end of the padding."""
    if leftpad is None:
        return lambda b, h, q_idx, kv_idx: mask_function(b, h, q_idx + kv_offset, kv_idx + kv_offset)
    first = leftpad + kv_offset
    return lambda b, h, q_idx, kv_idx: mask_function(b, h, q_idx + first[b], kv_idx + first[b])
