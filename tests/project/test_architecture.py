"""docs/architecture.md: its files and names exist, backends offer what its recipe says, backward passes make as many launches."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends import backend_module
from anyattn.backends.triton import Repeater, backward_pass
from anyattn.backends.triton.plan import plan_of
from anyattn.mods.tracing.trace import trace
from anyattn.plan import BACKENDS, Backward
from anyattn.problem import Problem
from tests.backends.hopper.conftest import launched as launched  # a fixture
from tests.support.hopper.pretended import H200, Launch
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "anyattn"


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def operands(wanted: str, length: int) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, length, 64, dtype=torch.bfloat16).requires_grad_(name in wanted) for name in "qkv"]


def test_files_that_the_page_names_are_there() -> None:
    paths = [path for path in re.findall(r"`([\w/]+\.(?:py|toml))`", PAGE) if "NAME" not in path]
    names = {path.name for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py")}
    missing = [path for path in paths if not any((root / path).is_file() for root in (ROOT, PACKAGE)) and path not in names]
    assert len(paths) > 10 and not missing


def is_there(name: str, folder: Path) -> bool:
    """Whether a dotted name leads to a module, or to what a module or a folder's ``__init__`` defines."""
    first, _, rest = name.partition(".")
    if (folder / first).is_dir():
        return is_there(rest, folder / first) if rest else True
    at = folder / f"{first}.py"
    text, names = (at.read_text(), rest) if at.is_file() else ((folder / "__init__.py").read_text(), name)
    return all(re.search(rf"^ *(?:def |class )?{each} *[(:=]", text, flags=re.M) for each in names.split(".") if each)


def test_names_with_dots_that_the_page_quotes_are_there() -> None:
    """From the package, or from a folder that the walk of a call is in."""
    quoted = [name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", PAGE) if not name.endswith((".py", ".toml"))]
    own = [name.removeprefix("anyattn.") for name in quoted if not name.startswith("torch.") and name != "anyattn.explain"]
    folders = (PACKAGE, PACKAGE / "mods", *(PACKAGE / "backends" / name for name in BACKENDS))
    assert len(own) > 30 and not [name for name in own if not any(is_there(name, folder) for folder in folders)]


def test_backends_offer_what_the_recipe_says() -> None:
    table = dict(re.findall(r"^\| `(\w+)\(([\w, ]+)\)`", PAGE, flags=re.M))
    assert list(table) == ["forward", "backward", "key_sums", "block_reductions", "reads_lists", "again"]
    for backend in BACKENDS:
        repeater = backend_module(backend).Repeater
        for name, parameters in table.items():
            assert [*inspect.signature(getattr(repeater, name)).parameters][1:] == parameters.split(", "), (backend, name)


def test_backends_plan_as_the_recipe_says() -> None:
    (parameters,) = re.findall(r"`plan_of\((problem, [\w, ]+)\)`", PAGE)
    for backend in BACKENDS:
        module = importlib.import_module(f"anyattn.backends.{backend}.plan")
        assert list(inspect.signature(module.plan_of).parameters) == parameters.split(", "), backend
        assert hasattr(module, "reason_against") is (backend != "torch")


@pytest.mark.parametrize(("wanted", "count"), [("qkv", 3), ("q", 2), ("kv", 2)])
def test_triton_makes_up_to_three_launches_backward(monkeypatch: pytest.MonkeyPatch, wanted: str, count: int) -> None:
    prepared: list[tuple] = []
    monkeypatch.setattr(backward_pass, "launch_cached", lambda *given: prepared.append(given))
    q, k, v = operands(wanted, 256)
    problem = Problem(q, k, v, 0.125, predicates=(trace(causal, "mask"),))
    plan = plan_of(problem, H200, "for a test", {}, Backward("triton"))
    Repeater(problem, plan).backward(problem, torch.zeros_like(q), torch.zeros(1, 2, 256), torch.zeros_like(q), None)
    assert len(prepared) == count


@pytest.mark.parametrize(("wanted", "length", "count"), [("qkv", 1024, 3), ("kv", 1024, 2), ("qkv", 64, 2)])
def test_hopper_makes_up_to_three_launches_backward(launched: list[Launch], wanted: str, length: int, count: int) -> None:
    """Two where dq is not needed, or where all keys fit one tile."""
    out = anyattn.flex_attention(*operands(wanted, length), mask_mod=causal, backend="hopper")
    launched.clear()
    out.backward(torch.zeros_like(out))
    assert len(launched) == count
