"""``AnyConfig``: the union of the configs that identify this backend's compiled kernels."""

from __future__ import annotations

from anyattn.backends.hopper.backward_config import BackwardConfig, RowsConfig
from anyattn.backends.hopper.config import Config
from anyattn.backends.hopper.tables_config import TablesConfig

__all__ = ["AnyConfig"]

AnyConfig = Config | TablesConfig | BackwardConfig | RowsConfig
