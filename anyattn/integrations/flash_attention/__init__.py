"""``replace_flash_attention``: programs that import ``flash_attn`` or ``flash_attn_interface`` run on anyattn without an edit.

This module does not import torch: ``torch_flex.autoload`` imports it at the end of ``import torch``.
"""

from __future__ import annotations

from collections.abc import Sequence

from anyattn.integrations.flash_attention import modules
from anyattn.integrations.replacement import Replacement

__all__ = ["replace_flash_attention"]


def replace_flash_attention(versions: Sequence[int] = (2, 3)) -> Replacement:
    """Provides FlashAttention's modules in this process, whose functions anyattn computes, on any device.

    versions: 2 for ``flash_attn`` (with ``flash_attn_interface``, ``bert_padding``, ``layers.rotary`` and ``ops.triton.rotary``), 3 for
    ``flash_attn_interface``. Functions have FlashAttention's signatures, meanings and results; options that anyattn has no meaning for
    raise ``ValueError`` at any value but the one that changes nothing. ``importlib`` finds modules and versions as if the packages were
    installed; packages that are installed are hidden, but for their other modules, such as ``flash_attn.losses``.

    Call it before the program imports these modules: what was imported by name before stays what it was. The replacement holds for all
    threads, until ``undo()`` of the returned object or the end of its ``with`` block; if several are active, until the last one ends; then
    ``sys.modules`` is as before. For programs that cannot be edited, the environment variable ``ANYATTN_REPLACE_FLASH_ATTENTION`` does the
    same at the end of ``import torch``: 1 for both versions, 2 or 3 for one. ``replaced()`` counts calls.

    Raises ``ValueError`` for another version.

    >>> import torch
    >>> with replace_flash_attention():
    ...     from flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 16)
    >>> flash_attn_func(q, k, v, 0.0, 0.25, True).shape  # dropout_p, softmax_scale and causal, as FlashAttention 2 orders them
    torch.Size([2, 100, 4, 16])
    """
    return Replacement(*[modules.package(version) for version in dict.fromkeys(versions)])
