"""Hugging Face Transformers on anyattn: ``register()``, then ``attn_implementation="anyattn"`` or ``"paged|anyattn"``."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes ``attn_implementation="paged|anyattn"`` known to Transformers, for ``model.generate_batch``. May be called again."""
    from transformers import AttentionInterface

    from anyattn.integrations.transformers import paged

    paged.register()
    AttentionInterface.register("anyattn", paged.paged_attention)
