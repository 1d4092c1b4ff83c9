"""Hugging Face Transformers integration: ``register()``, then ``attn_implementation="anyattn"``.

Importing this module imports transformers; ``import anyattn`` does not.
"""

from __future__ import annotations

import re

from anyattn.integrations.transformers import hooks, paged
from anyattn.integrations.transformers.attention import attention_forward
from anyattn.integrations.transformers.masks import describe_mask

__all__ = ["NAME", "attention_forward", "describe_mask", "register"]

NAME = "anyattn"
_OLDEST = (4, 57)


def register(name: str = NAME) -> None:
    """Registers ``attn_implementation=name`` with Transformers, for models made before and after; a second call changes nothing.

    The name is added to both registries: with an attention function only, Transformers makes no mask and every layer would see everything.

    A model whose code does not call the attention interface (Bloom, Falcon, GPT-J, ...) is refused when it is made with this name.

    Raises ``ImportError`` for a Transformers older than 4.57, ``ValueError`` for a name that has a meaning in Transformers.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register()
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    >>> LlamaForCausalLM._from_config(config, attn_implementation="anyattn").config._attn_implementation
    'anyattn'
    """
    import transformers

    version = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if version < _OLDEST:
        raise ImportError(f"transformers {transformers.__version__} is installed; wanted 4.57 or newer: pip install 'transformers>=4.57'")
    taken = [word for word in ("flash", "sdpa", "flex_attention", "eager", "paged", "/") if word in name]
    if taken or not name:
        why = f"contains {taken[0]!r}, which has a meaning in Transformers" if taken else "is empty"
        raise ValueError(f"name={name!r} {why}; wanted another name, such as {NAME!r}")
    transformers.AttentionInterface.register(name, attention_forward)
    transformers.AttentionMaskInterface.register(name, describe_mask)
    paged.register(name)
    hooks.refuse_models_without_interface(name)
    hooks.note_missing_positions()
