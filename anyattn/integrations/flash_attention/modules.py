"""The modules and distributions of FlashAttention while they are replaced: one finder per version in ``sys.meta_path``."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

__all__ = ["Package", "package"]

_HERE = __package__
_FUNCTIONS = f"{_HERE}.version2"
_VERSION_2 = {
    "flash_attn": _FUNCTIONS,
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.bert_padding": f"{_HERE}.bert_padding",
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": f"{_HERE}.rotary",
    "flash_attn.ops": None,
    "flash_attn.ops.triton": None,
    "flash_attn.ops.triton.rotary": f"{_HERE}.rotary",
}
_VERSION_3 = {"flash_attn_interface": f"{_HERE}.version3", "flash_attn_3": None}


class _Distribution(Distribution):
    """What ``importlib.metadata`` knows of a package: its name, version and modules."""

    def __init__(self, name: str, version: str, top_levels: Iterable[str]) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": "".join(f"{top}\n" for top in top_levels),
        }

    def read_text(self, filename: Any) -> str | None:
        return self._texts.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path} is part of a package that anyattn replaces, which has no files")


class Package(MetaPathFinder, Loader):
    """One version of FlashAttention; ``enter`` and ``leave`` replace it and restore what was there.

    homes: the module of anyattn whose public names each module has, None for a package without names.
    """

    def __init__(self, name: str, version: str, homes: dict[str, str | None]) -> None:
        self.name, self.version, self.homes = name, version, homes
        self._top_levels = tuple(m for m in homes if "." not in m)
        self._hidden: dict[str, ModuleType] = {}
        self._users = 0  # active replacements

    def enter(self) -> None:
        self._users += 1
        if self._users == 1:
            self._hidden = self._take_out()
            sys.meta_path.insert(0, self)
            self._tell_transformers()

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            sys.meta_path.remove(self)
            self._take_out()
            sys.modules.update(self._hidden)
            self._hidden = {}
            self._tell_transformers()

    def _take_out(self) -> dict[str, ModuleType]:
        """Removes this package's modules from ``sys.modules``."""
        return {m: sys.modules.pop(m) for m in list(sys.modules) if m.split(".")[0] in self._top_levels}

    def _tell_transformers(self) -> None:
        """Makes Transformers, where it is imported, look for FlashAttention once more: it remembers the answers, and the functions. Up to
        5.22 it also keeps a table of which distribution provides a module."""
        checks = vars(sys.modules.get("transformers.utils.import_utils", ModuleType("")))
        for name, check in checks.items():
            if name.startswith(("is_flash_attn_", "_package_distribution_mapping")) and hasattr(check, "cache_clear"):
                check.cache_clear()
        providers = checks.get("PACKAGE_DISTRIBUTION_MAPPING", {})
        own = [self.name] if any(importlib.metadata.distributions(name=self.name)) else []
        for module in self._top_levels:
            others = [n for n in providers.pop(module, []) if n.replace("_", "-") != self.name]
            if others or own:
                providers[module] = others + own
        use = sys.modules.get("transformers.modeling_flash_attention_utils")
        if getattr(use, "_loaded_implementation", None) in ("flash_attention_2", "flash_attention_3"):
            use._loaded_implementation = None  # type: ignore[union-attr]

    # ---- import

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.homes:
            return None
        is_package = self.homes[fullname] is None or any(m.startswith(f"{fullname}.") for m in self.homes)
        spec = ModuleSpec(fullname, self, origin="anyattn", is_package=is_package)
        if is_package:  # an installed package's other modules are found there
            installed = PathFinder.find_spec(fullname, path)
            spec.submodule_search_locations = list(installed.submodule_search_locations or []) if installed is not None else []
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        home = self.homes[module.__name__]
        if home is not None:
            names = vars(importlib.import_module(home))
            vars(module).update({n: value for n, value in names.items() if n in names["__all__"]})
            module.__doc__ = names["__doc__"]
        if module.__name__ in self._top_levels:
            module.__version__ = self.version  # type: ignore[attr-defined]
        for name in self.homes:  # importing a package is enough for its modules that are imported with it in FlashAttention
            if name == f"{module.__name__}.flash_attn_interface":
                importlib.import_module(name)

    # ---- importlib.metadata

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Distribution]:  # noqa: B008
        if context.name is None or context.name.lower().replace("-", "_").replace(".", "_") == self.name.replace("-", "_"):
            yield _Distribution(self.name, self.version, self._top_levels)


_packages = {2: Package("flash-attn", "2.8.3", _VERSION_2), 3: Package("flash-attn-3", "3.0.0", _VERSION_3)}


def package(version: Any) -> Package:
    """The package of FlashAttention 2 or 3."""
    if version not in _packages:
        raise ValueError(f"versions contains {version!r}; wanted 2 (flash_attn) and 3 (flash_attn_interface), or one of them")
    return _packages[version]
