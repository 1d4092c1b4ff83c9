"""vLLM integration: an attention back end for vLLM V1, registered as ``CUSTOM`` by the entry point ``vllm.general_plugins``.

``cache`` has the formats of vLLM's KV cache, ``cache_update`` writes it, ``visibility`` says which keys a query sees, ``metadata`` has what
one step's layers share, ``implementation`` the forward pass of a layer, ``backend`` what vLLM asks before it chooses. Importing this
package does not import vLLM.
"""

from __future__ import annotations

import warnings

__all__ = ["BACKEND", "register"]

BACKEND = "anyattn.integrations.vllm.backend.AnyAttentionBackend"


def register() -> None:
    """Registers anyattn as vLLM's attention back end ``CUSTOM``; vLLM calls it in each of its processes. A second call changes nothing.

    Without vLLM it does nothing. If another plugin has registered ``CUSTOM`` already, that one stays, and a warning says so.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "vllm":
            raise
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        warnings.warn(
            f"vLLM's attention backend CUSTOM is {custom.get_path()!r} already, so anyattn is not registered; to use anyattn, keep the "
            "other plugin from loading: VLLM_PLUGINS=anyattn",
            stacklevel=2,
        )
        return
    register_backend(custom, BACKEND)
