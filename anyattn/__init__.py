"""anyattn: any attention that can be written as a few lines of Python, at the speed of a hand-written kernel.

Public names are loaded when first used, so that ``import anyattn`` costs next to nothing beyond importing torch.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from anyattn.errors import BackendError, ModError, OutOfPagesError
from anyattn.mods.tracing.dynamo_import import call_when_imported

if TYPE_CHECKING:
    from anyattn.block_masks import create_block_mask
    from anyattn.determinism import batch_invariant
    from anyattn.explanation import explain
    from anyattn.flash import (
        flash_attn_combine,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from anyattn.flex import flex_attention
    from anyattn.integrations.flash_attention import replace_flash_attention
    from anyattn.integrations.replaced_calls import replaced
    from anyattn.integrations.torch_flex import replace_flex_attention
    from anyattn.kvcache.pages import PagedKVCache
    from anyattn.kvcache.rotary import apply_rotary_emb
    from anyattn.mods import masks, scores
    from anyattn.mods.algebra import Mask, Score, and_masks, mod, or_masks
    from anyattn.reductions.request import AuxOutput, AuxRequest
    from anyattn.sequences.padding import pad_input, unpad_input
    from anyattn.sparsity.block_mask import BlockMask
    from anyattn.sparsity.block_sparse import BlockSparseTensors
    from anyattn.sparsity.compute import compute_block_sparsity
    from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors, compute_varlen_block_sparsity

__version__ = "0.1.0"
_HOME = {
    "AuxOutput": "anyattn.reductions.request",
    "AuxRequest": "anyattn.reductions.request",
    "BlockMask": "anyattn.sparsity.block_mask",
    "BlockSparseTensors": "anyattn.sparsity.block_sparse",
    "Mask": "anyattn.mods.algebra",
    "PagedKVCache": "anyattn.kvcache.pages",
    "Score": "anyattn.mods.algebra",
    "VarlenBlockSparseTensors": "anyattn.sparsity.varlen_block_sparse",
    "and_masks": "anyattn.mods.algebra",
    "apply_rotary_emb": "anyattn.kvcache.rotary",
    "batch_invariant": "anyattn.determinism",
    "compute_block_sparsity": "anyattn.sparsity.compute",
    "compute_varlen_block_sparsity": "anyattn.sparsity.varlen_block_sparse",
    "create_block_mask": "anyattn.block_masks",
    "explain": "anyattn.explanation",
    "flash_attn_combine": "anyattn.flash",
    "flash_attn_func": "anyattn.flash",
    "flash_attn_kvpacked_func": "anyattn.flash",
    "flash_attn_qkvpacked_func": "anyattn.flash",
    "flash_attn_varlen_func": "anyattn.flash",
    "flash_attn_varlen_kvpacked_func": "anyattn.flash",
    "flash_attn_varlen_qkvpacked_func": "anyattn.flash",
    "flash_attn_with_kvcache": "anyattn.flash",
    "flex_attention": "anyattn.flex",
    "mod": "anyattn.mods.algebra",
    "or_masks": "anyattn.mods.algebra",
    "pad_input": "anyattn.sequences.padding",
    "replace_flash_attention": "anyattn.integrations.flash_attention",
    "replace_flex_attention": "anyattn.integrations.torch_flex",
    "replaced": "anyattn.integrations.replaced_calls",
    "unpad_input": "anyattn.sequences.padding",
}
_MODULES = {"masks": "anyattn.mods.masks", "scores": "anyattn.mods.scores"}

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BackendError",
    "BlockMask",
    "BlockSparseTensors",
    "Mask",
    "ModError",
    "OutOfPagesError",
    "PagedKVCache",
    "Score",
    "VarlenBlockSparseTensors",
    "__version__",
    "and_masks",
    "apply_rotary_emb",
    "batch_invariant",
    "compute_block_sparsity",
    "compute_varlen_block_sparsity",
    "create_block_mask",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "masks",
    "mod",
    "or_masks",
    "pad_input",
    "replace_flash_attention",
    "replace_flex_attention",
    "replaced",
    "scores",
    "unpad_input",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'anyattn' has no attribute {name!r}")
    globals()[name] = value
    call_when_imported(_enter_into_dynamo)
    return value


def _enter_into_dynamo() -> None:
    """Imports what Dynamo captures: compiled code may use ``~`` on a mask or make block lists before it calls any entry point.

    Programs that use no name of this package, which torch imports in all of them, do not pay for it.
    """
    with contextlib.suppress(ImportError, AttributeError):  # a torch with other private names; the first call in compiled code raises
        importlib.import_module("anyattn.custom_ops.entry_points")


def __dir__() -> list[str]:
    return sorted(__all__)
