"""Stand-in: back ends by name, and the place where a plugin puts its own."""

from __future__ import annotations

import importlib
from enum import Enum


class AttentionBackendEnum(Enum):
    FLEX_ATTENTION = "vllm.v1.attention.backends.flex_attention.FlexAttentionBackend"
    CUSTOM = None

    def get_path(self, include_classname=True):
        path = _OVERRIDES.get(self, self.value)
        if not path:
            raise ValueError(f"{self.name} is not registered")
        return path if include_classname else path.rpartition(".")[0]

    def get_class(self):
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)

    def is_overridden(self):
        return self in _OVERRIDES

    def clear_override(self):
        _OVERRIDES.pop(self, None)


_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    assert class_path is not None and not is_mamba
    _OVERRIDES[backend] = class_path
    return lambda cls: cls
