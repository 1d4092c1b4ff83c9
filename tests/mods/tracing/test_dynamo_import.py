"""The callback of Dynamo's import, on a module that stands for Dynamo."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from anyattn.mods.tracing import dynamo_import
from anyattn.mods.tracing.dynamo_import import call_when_imported

NAME = "stands_for_dynamo"


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / f"{NAME}.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(dynamo_import, "_DYNAMO", NAME)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, dynamo_import._Watch)])
    return []


def test_the_callback_follows_the_import_once(called: list[str]) -> None:
    before = list(sys.meta_path)
    call_when_imported(lambda: called.append(f"first, {sys.modules[NAME].VALUE}"))
    call_when_imported(lambda: called.append("second"))
    importlib.import_module("colorsys")
    assert called == [] and len(sys.meta_path) == len(before) + 1
    importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert called == ["first, 3"] and sys.meta_path == before


def test_a_search_without_an_import_keeps_the_callback(called: list[str]) -> None:
    call_when_imported(lambda: called.append("then"))
    assert importlib.util.find_spec(NAME) is not None and called == []  # as Transformers asks what is installed
    importlib.import_module(NAME)
    assert called == ["then"]


def test_a_failed_import_keeps_the_callback(called: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text("import no_such_module\n")
    call_when_imported(lambda: called.append("then"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    (tmp_path / f"{NAME}.py").write_text("VALUE = 'found at the second try'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert called == ["then"]


def test_what_is_imported_already_calls_at_once(called: list[str]) -> None:
    importlib.import_module(NAME)
    call_when_imported(lambda: called.append("now"))
    assert called == ["now"]


def test_a_module_that_is_not_there_stays_missing(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_import, "_DYNAMO", "no_such_module")
    call_when_imported(lambda: called.append("never"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    assert called == []
