"""What is computed: each variant as plain mods, as the options that FlashAttention has for it, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyattn import masks, scores
from anyattn.gallery import Mods

__all__ = ["DOCUMENTS", "VARIANTS", "WINDOW", "Setting", "Variant", "document_lengths"]

WINDOW = 1024
DOCUMENTS = 8
_PREFIX = 2048
_SINK = 64
_SOFTCAP = 30.0
_BUCKETS = 32
_EQUAL_DOCUMENT = 1000  # tokens, in the masks that are only built


@dataclass(frozen=True)
class Setting:
    """The sizes that mods are made for. learns: what score mods read wants gradients. captured: what they read, once they were made."""

    seqlen: int
    heads: int
    device: str = "cpu"
    batch: int = 1
    learns: bool = False
    captured: list[Tensor] = field(default_factory=list)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same numbers on every call: random ones, made where they are used, for the largest are a gigabyte."""
        generator = torch.Generator(self.device).manual_seed(3)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=dtype).requires_grad_(self.learns)
        self.captured.append(made)
        return made


@dataclass(frozen=True)
class Variant:
    """mods: the variant as plain functions, the same for anyattn and for flex.

    native: the options of FlashAttention's functions that mean the same, None where it has none. is_packed: by its function for packed
    sequences, over the documents of ``document_lengths``.
    """

    mods: Callable[[Setting], Mods]
    native: dict[str, Any] | None = field(default=None)
    is_packed: bool = False


def document_lengths(seqlen: int) -> list[int]:
    """The tokens of 8 documents that fill a sequence, cut at random."""
    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(1))[: DOCUMENTS - 1] + 1
    ends = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])])
    return ends.diff().tolist()


def _plain(mod: Any) -> Callable[..., Any]:
    """A library mod without the wrapper that makes anyattn's mods compose."""
    return mod.fn


def _ids(setting: Setting) -> Tensor:
    lengths = torch.tensor(document_lengths(setting.seqlen))
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(setting.device)


def _causal(setting: Setting) -> Mods:
    return Mods(_plain(masks.causal()))


def _causal_documents(ids: Tensor) -> Mods:
    return Mods(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx))


def _alibi(setting: Setting) -> Mods:
    slopes = scores.alibi_slopes(setting.heads).to(setting.device)
    return Mods(_plain(masks.causal()), _plain(scores.alibi(slopes)))


def _t5_bias(setting: Setting) -> Mods:
    table = setting.random(setting.heads, setting.seqlen)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + table[h, torch.abs(q_idx - kv_idx)])


def _pair_bias(setting: Setting) -> Mods:
    bias = setting.random(setting.batch, setting.heads, setting.seqlen, setting.seqlen, dtype=torch.bfloat16)
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx])


VARIANTS: dict[str, Variant] = {
    "full": Variant(lambda setting: Mods(), {}),
    "causal": Variant(_causal, {"causal": True}),
    "sliding_window": Variant(lambda setting: Mods(_plain(masks.sliding_window(left=WINDOW, right=0))), {"window_size": (WINDOW, 0)}),
    "document": Variant(lambda setting: Mods(_plain(masks.document(_ids(setting)))), {}, True),
    "document-causal": Variant(lambda setting: _causal_documents(_ids(setting)), {"causal": True}, True),
    "prefix": Variant(lambda setting: Mods(_plain(masks.prefix_lm(_PREFIX)))),
    "sink_window": Variant(lambda setting: Mods(_plain(masks.sink_window(sink=_SINK, window=WINDOW)))),
    "alibi": Variant(_alibi),
    "t5_bias": Variant(_t5_bias),
    "softcap": Variant(
        lambda setting: Mods(_plain(masks.causal()), _plain(scores.softcap(_SOFTCAP))), {"causal": True, "softcap": _SOFTCAP}
    ),
    "head_bias": Variant(lambda setting: Mods(_plain(masks.causal()), _plain(scores.head_bias(setting.random(setting.heads))))),
    "pair_bias": Variant(_pair_bias),
    "bucket_bias": Variant(lambda setting: Mods(None, _plain(scores.t5_bias(setting.random(_BUCKETS, setting.heads))))),
    "equal-documents-causal": Variant(
        lambda setting: _causal_documents(torch.arange(setting.seqlen, device=setting.device) // _EQUAL_DOCUMENT)
    ),
}
