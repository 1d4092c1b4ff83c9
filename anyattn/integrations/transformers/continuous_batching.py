"""Compatibility with Transformers' continuous batching: patches the functions that decide by the name of an attention implementation.

The manager of Transformers 5.23 knows ``"paged|eager"``, ``"sdpa"`` and names that contain "flash", refuses all others, and strips
``"paged|"`` from them; the manager of 5.17 puts it before all others. There is no registry for this. ``accept`` wraps these functions so
that they treat anyattn as FlashAttention: no mask tensors are allocated, CUDA graphs and asynchronous batching may be used, and pure
decoding steps get block tables, on any device. In 5.24 the model's layers call the paged cache before attention; for anyattn the cache
passes itself on, so that attention calls it as in 5.23. Functions that a release does not have are skipped; 4.57 accepts any registered
name and needs only to make no mask. A release without the functions that this module relies on is refused when a manager starts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from anyattn.integrations.transformers.hooks import wrap

__all__ = ["accept"]

_PACKAGE = "transformers.generation.continuous_batching"
_names: set[str] = set()


def accept(names: set[str], implementation: str) -> None:
    """Makes a manager set a model's implementation to ``implementation`` while it runs it,
    if it is one of ``names``. May be called again."""
    _names.update(names)
    api = _module("continuous_api")
    manager = getattr(api, "ContinuousBatchingManager", None)
    wrap(manager, "switch_to_cb_friendly_attn", functools.partial(_switching, implementation))
    cache = _module("cache")
    wrap(getattr(cache, "PagedAttentionCache", None), "update", functools.partial(_passing_itself_on, implementation))
    for module in (_module("initialization"), cache):
        wrap(module, "is_flash_attention_requested", functools.partial(_counting_as_flash, implementation))
    initialization = _module("initialization")
    wrap(initialization, "ensure_decode_fast_path_is_available", functools.partial(_with_block_tables, implementation))
    wrap(getattr(api, "ContinuousBatchProcessor", None), "return_attention_mask", _without_masks)  # 4.57


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError:
        return None


def _switching(implementation: str, original: Callable) -> Callable:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        current = model.config._attn_implementation
        if current not in _names:
            return original(self, model, *args, **kwargs)
        _check_release()
        if current != implementation:
            model.set_attn_implementation(implementation)
            self._original_attn_impl = current  # the manager restores it when it stops
        return None

    return switch_to_cb_friendly_attn


def _check_release() -> None:
    """Raises ``RuntimeError`` in the caller's thread: an error in the manager's thread leaves nothing but empty answers."""
    cache, initialization = getattr(_module("cache"), "PagedAttentionCache", None), _module("initialization")
    parameters = inspect.signature(cache.update).parameters if cache is not None else {}
    updates = "kwargs" in parameters or {"read_index", "write_index"} <= parameters.keys()
    tables = hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR") or hasattr(_module("cache"), "group_layers_by_attn_type")
    if not updates or not tables or not hasattr(initialization, "is_flash_attention_requested"):
        import transformers

        raise RuntimeError(
            f"continuous batching of transformers {transformers.__version__} has changed in a way that anyattn does not know; use "
            "generate() in place of generate_batch(), attn_implementation='sdpa', or transformers 5.17 to 5.24"
        )


def _passing_itself_on(implementation: str, original: Callable) -> Callable:
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **named: Any) -> Any:
        kwargs = named.get("kwargs")
        if kwargs is None or "cache" in kwargs or self.config._attn_implementation != implementation:
            return original(self, key_states, value_states, layer_idx, *args, **named)
        kwargs["cache"] = self
        return key_states, value_states

    return update


def _counting_as_flash(implementation: str, original: Callable) -> Callable:
    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        is_ours = config is not None and config._attn_implementation == implementation
        return is_ours or original(config, *args, **kwargs)

    return is_flash_attention_requested


def _with_block_tables(implementation: str, original: Callable) -> Callable:
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation != implementation:
            original(config, cb_config, user_requested)
        elif cb_config.max_blocks_per_request != 0 and not _all_have_block_tables(config):
            if user_requested:
                why = "this model has layers for which Transformers makes no block tables; it is set to 0"
                warnings.warn(f"max_blocks_per_request={cb_config.max_blocks_per_request}, but {why}", stacklevel=2)
            cb_config.max_blocks_per_request = 0

    return ensure_decode_fast_path_is_available


def _all_have_block_tables(config: Any) -> bool:
    """Whether Transformers makes block tables for all attention types of the model's layers."""
    initialization = _module("initialization")
    allocators = getattr(initialization, "ATTN_TYPE_TO_ALLOCATOR", None)
    if allocators is not None:
        return all(allocators[kind].supports_block_table for kind in initialization.group_layers_by_attn_type(config))
    _, kinds = _module("cache").group_layers_by_attn_type(config)  # 5.17
    return set(kinds) == {"full_attention"}


def _without_masks(original: Callable) -> Callable:
    def return_attention_mask(self: Any) -> bool:
        return self.config._attn_implementation not in _names and original(self)

    return return_attention_mask
