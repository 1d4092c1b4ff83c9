"""The operator through which ``torch.compile`` and ``torch.export`` see ``masks.document_from_cu_seqlens``."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.custom_ops.define import operator
from anyattn.mods.masks import ids_of_documents

__all__ = ["document_ids"]


@operator
def document_ids(cu_seqlens: Tensor) -> Tensor:
    """The document of every position, int32 (cu_seqlens[-1],). Raises as ``masks.document_from_cu_seqlens`` does."""
    return ids_of_documents(cu_seqlens)


@torch.library.register_fake("anyattn::document_ids")
def _(cu_seqlens: Tensor) -> Tensor:
    # not ctx.new_dynamic_size, which asks for torch._dynamo.config.capture_dynamic_output_shape_ops
    length = torch.library.get_ctx()._shape_env.create_unbacked_symint()
    torch._check(length >= 0)
    return cu_seqlens.new_empty(length, dtype=torch.int32)
