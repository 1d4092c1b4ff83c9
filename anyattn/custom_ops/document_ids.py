"""Operator that ``torch.compile`` and ``torch.export`` record for ``masks.document_from_cu_seqlens``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.custom_ops.operators import operator
from anyattn.mods.masks import ids_of_documents

__all__ = ["document_ids"]


class DocumentIds(NamedTuple):
    """The operator's arguments."""

    cu_seqlens: Tensor


def _fake(operands: DocumentIds) -> Tensor:
    # not ctx.new_dynamic_size, which requires torch._dynamo.config.capture_dynamic_output_shape_ops
    length = torch.library.get_ctx()._shape_env.create_unbacked_symint()
    torch._check(length >= 0)
    return operands.cu_seqlens.new_empty(length, dtype=torch.int32)


@operator(DocumentIds, fake=_fake)
def document_ids(operands: DocumentIds) -> Tensor:
    """The document of every position, int32 (cu_seqlens[-1],). Raises as ``masks.document_from_cu_seqlens`` does."""
    return ids_of_documents(operands.cu_seqlens)
