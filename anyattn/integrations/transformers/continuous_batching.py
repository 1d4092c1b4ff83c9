"""What Transformers' manager of continuous batching decides by the name of an attention implementation, told of anyattn's.

The manager of Transformers 5.23 knows ``"paged|eager"``, ``"sdpa"`` and names with "flash" in them, refuses all others, and strips
``"paged|"`` from them: there is no registry for this. ``accept`` wraps the functions that ask, so that for anyattn they answer as for
FlashAttention: no mask tensors are allocated, CUDA graphs and asynchronous batching may be used, and steps of decoding alone get block
tables, on any device. Functions that a release lacks are left out; 4.57 takes any registered name and needs only to be told that no mask
is wanted.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["accept"]

_PACKAGE = "transformers.generation.continuous_batching"
_names: set[str] = set()


def accept(names: set[str], implementation: str) -> None:
    """While a manager runs a model whose implementation is one of ``names``, sets it to ``implementation``. May be called again."""
    _names.update(names)
    api = _module("continuous_api")
    manager = getattr(api, "ContinuousBatchingManager", None)
    _wrap(manager, "switch_to_cb_friendly_attn", functools.partial(_switching, implementation))
    for module in (_module("initialization"), _module("cache")):
        _wrap(module, "is_flash_attention_requested", functools.partial(_counting_as_flash, implementation))
    initialization = _module("initialization")
    _wrap(initialization, "ensure_decode_fast_path_is_available", functools.partial(_with_block_tables, implementation, initialization))
    _wrap(getattr(api, "ContinuousBatchProcessor", None), "return_attention_mask", _without_masks)  # 4.57


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError:
        return None


def _wrap(owner: Any, name: str, wrapping: Callable[[Callable], Callable]) -> None:
    """Replaces ``owner.name`` by ``wrapping`` of it, once."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_anyattn_wraps"):
        return
    wrapped = functools.wraps(original)(wrapping(original))
    wrapped._anyattn_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _switching(implementation: str, original: Callable) -> Callable:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        current = model.config._attn_implementation
        if current not in _names:
            return original(self, model, *args, **kwargs)
        if current != implementation:
            model.set_attn_implementation(implementation)
            self._original_attn_impl = current  # which the manager sets again when it stops
        return None

    return switch_to_cb_friendly_attn


def _counting_as_flash(implementation: str, original: Callable) -> Callable:
    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        is_ours = config is not None and config._attn_implementation == implementation
        return is_ours or original(config, *args, **kwargs)

    return is_flash_attention_requested


def _with_block_tables(implementation: str, initialization: Any, original: Callable) -> Callable:
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        kinds = initialization.group_layers_by_attn_type(config)
        allocators = [initialization.ATTN_TYPE_TO_ALLOCATOR[kind] for kind in kinds]
        if config._attn_implementation != implementation or not all(a.supports_block_table for a in allocators):
            original(config, cb_config, user_requested)

    return ensure_decode_fast_path_is_available


def _without_masks(original: Callable) -> Callable:
    def return_attention_mask(self: Any) -> bool:
        return self.config._attn_implementation not in _names and original(self)

    return return_attention_mask
