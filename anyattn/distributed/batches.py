"""Batches of Transformers' models over ranks: masks of a model's layers for the whole sequence, and a batch's rows of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyattn.mods import masks
from anyattn.mods.algebra import Mask
from anyattn.mods.tracing.pickling import remade_by_call
from anyattn.sparsity.block_mask import BlockMask, build_block_mask

if TYPE_CHECKING:
    from anyattn.distributed.context_plan import ContextPlan

__all__ = ["is_of_shard", "shard_batch", "transformers_masks"]

IGNORED = -100  # the label that losses of Transformers leave out
_ROWS = ("input_ids", "inputs_embeds", "position_ids", "shift_labels", "token_type_ids")  # sharded by rows
_IN_MASKS = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # which the plan's masks contain

_MARK = "_anyattn_of_shard"  # an attribute of the tensor, which compiled code can read too


def is_of_shard(position_ids: Tensor | None) -> bool:
    """Whether these are the position_ids of a ``shard_batch`` over more than one rank: the same tensor, no copy of it."""
    return position_ids is not None and getattr(position_ids, _MARK, False)


def transformers_masks(config: Any, batch: Mapping[str, Any], *, block_size: int | tuple[int, int] = 128) -> dict[str, BlockMask]:
    """The masks of a Transformers decoder for a whole batch, by the kinds of its layers: what ``anyattn.distributed.plan`` takes.

    config: of the model: ``layer_types`` or ``sliding_window`` tell the kinds, "full_attention" and "sliding_attention".
    batch: ``input_ids``, integers (B, S), or ``inputs_embeds`` (B, S, hidden); and what keeps texts apart, of which the first that is there
        counts, as in the model with ``attn_implementation="anyattn"``: ``attention_mask`` (B, S), 0 for padding; ``position_ids``
        (B or 1, S), if they are not all consecutive: a text begins wherever one is not the previous one plus 1; ``cu_seq_lens_q``, int
        (texts + 1,), for a batch of one.
    block_size: of the masks. Smaller for short sequences: a rank has at least one block of rows, or none.

    Raises ``NotImplementedError`` for layers of other kinds and for models that are not causal, ``ValueError`` for tensors of other shapes.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=128)
    >>> batch = {"input_ids": torch.zeros(1, 512, dtype=torch.int64), "cu_seq_lens_q": torch.tensor([0, 200, 512])}
    >>> sorted(transformers_masks(config, batch))
    ['full_attention', 'sliding_attention']
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rows = _rows_of(batch)
    inside, entries = _texts(batch, rows)
    windows = {kind: _window(config, kind) for kind in _kinds(config)}
    made = {}
    for kind, left in windows.items():
        mod = masks.causal() if left is None else masks.sliding_window(left, 0)
        mod = mod if inside is None else inside & mod
        made[kind] = build_block_mask(mod, (entries, None), (rows.shape[1], rows.shape[1]), rows.device, block_size, True, None)
    return made


def _rows_of(batch: Mapping[str, Any]) -> Tensor:
    """The tensor whose first two dimensions are the batch's."""
    for name in ("input_ids", "inputs_embeds"):
        rows = batch.get(name)
        if isinstance(rows, Tensor) and rows.ndim == 2 + (name == "inputs_embeds"):
            return rows
    raise ValueError(f"batch has {sorted(batch)}; wanted input_ids (B, S) or inputs_embeds (B, S, hidden) of the whole sequence")


def _kinds(config: Any) -> list[str]:
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise NotImplementedError(
            f"{type(config).__name__} is of a model that is not a causal decoder; wanted plan(...) of masks that you make yourself, "
            "passed to the model's calls of attention"
        )
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if has_window else "full_attention"]
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if others or (getattr(config, "layer_types", None) is None and getattr(config, "attention_chunk_size", None) is not None):
        named = ", ".join(others) or "chunked_attention"
        raise NotImplementedError(f"{type(config).__name__} has layers of {named}; wanted full_attention and sliding_attention alone")
    return sorted(set(kinds))


def _window(config: Any, kind: str) -> int | None:
    """Most positions before its own that a row sees, None for all."""
    if kind == "full_attention":
        return None
    width = getattr(config, "sliding_window", None)
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"{type(config).__name__} has layers of sliding_attention and sliding_window={width!r}; wanted a positive int")
    return width - 1


def _texts(batch: Mapping[str, Any], rows: Tensor) -> tuple[Any, int | None]:
    """The mask that keeps texts and padding apart, None for one text in each row; and the batch, None if its entries are alike."""
    shape = tuple(rows.shape[:2])
    padding, positions, ends = (batch.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    if padding is not None:
        if not isinstance(padding, Tensor) or tuple(padding.shape) != shape:
            raise ValueError(f"attention_mask has shape {_shape(padding)}; wanted {shape}, 0 for padding: the mask of the whole sequence")
        visible = padding.to(rows.device).bool()
        if not bool(visible.all()):
            return visible_keys(visible), shape[0]
    elif positions is not None:
        if not isinstance(positions, Tensor) or tuple(positions.shape) not in (shape, (1, shape[1])):
            raise ValueError(f"position_ids has shape {_shape(positions)}; wanted {shape} or (1, {shape[1]}), of the whole sequence")
        ids = (positions.to(rows.device).diff(dim=1) != 1).cumsum(1)
        if bool(ids.any()):
            ids = torch.nn.functional.pad(ids, (1, 0))
            return (masks.document(ids[0]), None) if len(ids) == 1 else (masks.document(ids), shape[0])
    if ends is None:
        return None, None
    if not isinstance(ends, Tensor) or ends.ndim != 1 or shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q has shape {_shape(ends)} in a batch of {shape[0]}; wanted (texts + 1,) and a batch of 1")
    if int(ends[-1]) != shape[1]:
        raise ValueError(f"cu_seq_lens_q ends with {int(ends[-1])}; wanted {shape[1]}, the length of the sequence")
    return masks.document_from_cu_seqlens(ends.to(rows.device)), None


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


@remade_by_call
def visible_keys(visible: Tensor) -> Mask:
    """The keys of each batch entry that are no padding. visible: bool (B, S)."""
    return Mask(lambda b, h, q_idx, kv_idx: visible[b, kv_idx], "padding")


def shard_batch(plan: ContextPlan, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``ContextPlan.shard_batch``."""
    rows = _rows_of(batch)
    made: dict[str, Any] = {"use_cache": False}
    whole = {name: value for name, value in batch.items() if name not in _IN_MASKS and value is not None}
    labels = whole.pop("labels", None)
    if labels is not None and "shift_labels" not in whole:
        whole["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    whole.setdefault("position_ids", torch.arange(plan.length, device=rows.device)[None])
    for name, value in whole.items():
        if name in _ROWS:
            made[name] = plan.shard(value, dim=1 if name == "inputs_embeds" else -1)
            continue
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == plan.length:
            raise ValueError(
                f"batch[{name!r}] has shape {tuple(value.shape)}, and {plan.length} positions may be those of the sequence; wanted a batch "
                f"without it: pass plan.shard(batch[{name!r}]) to the model, or the tensor itself, as it needs"
            )
        made[name] = value
    if "shift_labels" in made:
        # the model computes a loss if there are labels; one that shifts these itself finds none that counts
        made["labels"] = torch.full_like(made["shift_labels"], IGNORED)
        made.setdefault("num_items_in_batch", (whole["shift_labels"] != IGNORED).sum())
    if plan.ranks > 1:
        setattr(made["position_ids"], _MARK, True)
    return made
