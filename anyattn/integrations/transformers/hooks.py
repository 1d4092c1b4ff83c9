"""Wraps around functions of Transformers: the one that judges an attention implementation for a model, the one that prepares masks."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from anyattn.integrations.transformers import forward_passes

__all__ = ["lacks_positions", "note_missing_positions", "refuse_models_without_interface", "wrap"]

_names: set[str] = set()
_prepared = {"lacks_positions": False}


def wrap(owner: Any, name: str, wrapping: Callable[[Callable], Callable]) -> None:
    """Replaces ``owner.name`` by ``wrapping`` of it, unless that was done before."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_anyattn_wraps"):
        return
    wrapped = functools.wraps(original)(wrapping(original))
    wrapped._anyattn_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def refuse_models_without_interface(name: str) -> None:
    """Makes ``attn_implementation=name`` an error for models that Transformers cannot run with it; as it is, some of them fail with
    ``KeyError``, and others run their own attention without a word. May be called again."""
    import transformers

    _names.add(name)
    wrap(transformers.PreTrainedModel, "get_correct_attn_implementation", _judging)


def _judging(original: Callable) -> Callable:
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in _names and not _uses_interface(self, requested_attention):
            other = "'sdpa' or 'eager'" if getattr(self, "_supports_sdpa", False) else "'eager'"
            raise ValueError(
                f"{type(self).__name__} does not use Transformers' attention interface, so attn_implementation={requested_attention!r} "
                f"does not reach its attention: use attn_implementation={other}. For one part of a model: a dict by the names of its "
                f'configs, such as {{"vision_config": "eager", "text_config": {requested_attention!r}}}'
            )
        if requested_attention in _names:
            _follow(self)
        return original(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


def _follow(model: Any) -> None:
    """Has the classes of a model and of its parts note the positions that they are called with, which some keep from their masks."""
    import transformers

    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            wrap(type(part), "forward", forward_passes.followed)


def _uses_interface(model: Any, name: str) -> bool:
    """False if one of the modules that define the model has attention of its own, or classes of attention by names without ``name``.

    Models that are made of others are judged by their parts, each when it is made.
    """
    import transformers

    classes = [c for c in type(model).__mro__ if issubclass(c, transformers.PreTrainedModel) and c is not transformers.PreTrainedModel]
    modules = [sys.modules[c.__module__] for c in classes if c.__module__ in sys.modules]
    has_parts = bool(getattr(model.config, "sub_configs", None))
    return not any(_lacks_class(module, name) or (not has_parts and _has_own_attention(module)) for module in modules)


@functools.cache
def _has_own_attention(module: ModuleType) -> bool:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # of a notebook
        return False
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return own is not None and "ALL_ATTENTION_FUNCTIONS" not in source and "AttentionInterface" not in source


def _lacks_class(module: ModuleType, name: str) -> bool:
    """Whether the module chooses a class of attention by the implementation's name, as SAM does."""
    tables = (table for key, table in vars(module).items() if key.endswith("_CLASSES") and isinstance(table, dict))
    return any("eager" in table and name not in table and isinstance(table["eager"], type) for table in tables)


def note_missing_positions() -> None:
    """Lets ``lacks_positions`` answer for the mask that Transformers is making. May be called again."""
    from transformers import masking_utils

    wrap(masking_utils, "_preprocess_mask_arguments", _noting)


def lacks_positions() -> bool:
    """Whether the mask in the making is of queries that follow no cache, and the model has not passed their ``position_ids`` to
    Transformers' mask, as gpt-oss of 5.23 and models of learned positions: packed sequences are then not apart in it."""
    return _prepared["lacks_positions"]


_DECIDING = {"past_key_values", "cache", "position_ids", "encoder_hidden_states"}


def _noting(original: Callable) -> Callable:
    names = list(inspect.signature(original).parameters)

    def _preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        values = [*zip(names, args, strict=False), *kwargs.items()]
        _prepared["lacks_positions"] = all(value is None for name, value in values if name in _DECIDING)
        return original(*args, **kwargs)

    return _preprocess_mask_arguments
