"""The environment variable ANYATTN_REPLACE_FLEX_ATTENTION, read by a ``torch.backends`` entry point at the end of ``import torch``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyattn.integrations import torch_flex
from tests.support.covering import few
from tests.support.limits import HANG

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
{first}
import torch
from torch.nn.attention.flex_attention import flex_attention
call = {call}
out = call(*torch.ones(3, 1, 2, 16, 16))
import anyattn
print(anyattn.replaced().taken, out.sum().item())
"""


def entry_point() -> str:
    """The value of the project's entry point in the group that torch loads."""
    text = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."torch.backends"]\n', 1)[1]
    return text.split("\n", 1)[0].split(" = ")[1].strip('"')


@pytest.fixture
def run(tmp_path):
    """Runs Python in a process where anyattn of this tree is installed as far as its entry point goes."""
    installed = tmp_path / "anyattn_of_this_tree-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: anyattn-of-this-tree\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\nanyattn_of_this_tree = {entry_point()}\n")

    def run(code: str, value: str | None) -> subprocess.CompletedProcess:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        for name in ("ANYATTN_REPLACE_FLEX_ATTENTION", "TORCH_DEVICE_BACKEND_AUTOLOAD"):  # the latter switches entry points off
            env.pop(name, None)
        if value is not None:
            env["ANYATTN_REPLACE_FLEX_ATTENTION"] = value
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, timeout=HANG)

    return run


FIRST = ["", "import anyattn.flex", "import anyattn.integrations.torch_flex"]


@pytest.mark.parametrize("first", few(FIRST, "import anyattn.integrations.torch_flex"))
def test_a_program_runs_replaced_whatever_it_imports_first(run, first):
    done = run(PROGRAM.format(first=first, call="flex_attention"), "1")
    assert done.stdout == "1 512.0\n", done.stdout + done.stderr


def test_a_compiled_call_may_be_the_first_one(run):
    call = "torch.compile(flex_attention, backend='aot_eager', fullgraph=True)"
    done = run(PROGRAM.format(first="", call=call), "1")
    assert done.stdout == "1 512.0\n", done.stdout + done.stderr


@pytest.mark.parametrize("value", [None, "", "0"])
def test_values_that_ask_for_nothing(value, monkeypatch):
    monkeypatch.delenv(torch_flex.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(torch_flex.VARIABLE, value)
    asked = []
    monkeypatch.setattr(torch_flex, "replace_flex_attention", lambda: asked.append(1))
    torch_flex.autoload()
    assert not asked
    monkeypatch.setenv(torch_flex.VARIABLE, "1")
    torch_flex.autoload()
    assert asked == [1]


@pytest.mark.parametrize("value", few([None, "", "0"], None))
def test_nothing_is_replaced_unless_asked_for(run, value):
    done = run("import sys, torch; print('torch.nn.attention.flex_attention' in sys.modules, 'anyattn.flex' in sys.modules)", value)
    assert done.stdout == "False False\n", done.stdout + done.stderr
    assert "anyattn" not in done.stderr


def test_a_wrong_value_warns_and_import_torch_goes_on(monkeypatch):
    monkeypatch.setenv(torch_flex.VARIABLE, "yes")
    said = "torch's flex_attention is not replaced by anyattn's: ANYATTN_REPLACE_FLEX_ATTENTION='yes'; wanted 1 or 0"
    with pytest.warns(UserWarning, match=said):
        torch_flex.autoload()


def test_a_failure_warns_and_import_torch_goes_on(monkeypatch):
    def broken():
        raise OSError("no such thing")

    monkeypatch.setenv(torch_flex.VARIABLE, "1")
    monkeypatch.setattr(torch_flex, "replace_flex_attention", broken)
    with pytest.warns(UserWarning, match="is not replaced by anyattn's: no such thing"):
        torch_flex.autoload()


def test_the_entry_points_module_imports_no_torch(run):
    done = run(
        "import sys, anyattn.integrations.torch_flex; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))", None
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
