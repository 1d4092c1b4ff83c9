"""What the machine offers is asked by the library, and chosen by a test; no test asks for seconds, cores or resident memory."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn import hardware
from tests.support.machines import CPUS, PLAIN, WITH_BF16, WITH_FP16, asked

QUESTIONS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")


@pytest.fixture(autouse=True)
def nobody_remembers():
    asked.cache_clear()
    yield
    asked.cache_clear()


@pytest.mark.parametrize(
    ("has", "found"),
    [
        ((), PLAIN),
        (("_is_avx512_bf16_supported",), WITH_BF16),
        (("_is_amx_tile_supported",), WITH_BF16),
        (("_is_amx_tile_supported", "_is_amx_fp16_supported"), WITH_FP16),
    ],
)
def test_what_the_library_learns_of_a_cpu(has: tuple[str, ...], found: hardware.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    for question in QUESTIONS:
        monkeypatch.setattr(torch.cpu, question, lambda answer=question in has: answer, raising=False)
    assert asked("cpu").fast_dtypes == found.fast_dtypes


def test_a_test_does_not_ask_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for question in QUESTIONS:
        monkeypatch.setattr(torch.cpu, question, lambda question=question: pytest.fail(question), raising=False)
    assert hardware.of("cpu") == CPUS[os.environ.get("ANYATTN_TEST_CPU", "bf16")]
    q = torch.randn(1, 2, 40, 8, dtype=torch.bfloat16)
    anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)


ASKS_THE_MACHINE = re.compile(r"perf_counter\(|process_time\(|getrusage\(|cpu_count\(|\btimeout=[1-9]|mark\.timeout\([1-9]")


_CHILDREN = ("python", "in_the_interpreter", "all_in_the_interpreter")  # tests/support/processes.py


def limits_of_seconds(call: ast.Call) -> list[ast.expr]:
    """The limits that a call sets: a mark's, ``timeout=`` of any call, ``seconds=`` of a child process."""
    name = ast.unparse(call.func)
    found = list(call.args[:1]) if name.endswith("mark.timeout") else []
    is_child = name.rpartition(".")[2] in _CHILDREN
    return found + [k.value for k in call.keywords if k.arg == "timeout" or (k.arg == "seconds" and is_child)]


def is_the_one_limit(limit: ast.expr, parameters: set[str]) -> bool:
    """Whether a limit is ``HANG``, a sum or a product with it, none (0, None), a parameter that is passed on, or a choice of these."""
    if isinstance(limit, ast.IfExp):
        return is_the_one_limit(limit.body, parameters) and is_the_one_limit(limit.orelse, parameters)
    if isinstance(limit, ast.Constant):
        return limit.value in (0, None)
    if isinstance(limit, ast.BinOp) and isinstance(limit.op, (ast.Add, ast.Mult)):
        return "HANG" in {n.id for n in ast.walk(limit) if isinstance(n, ast.Name)}
    return isinstance(limit, ast.Name) and limit.id in {"HANG", *parameters}


def other_limits(source: str) -> list[int]:
    """The lines on which a limit of seconds is set that is not the one of tests/support/limits.py."""
    nodes = list(ast.walk(ast.parse(source)))
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    limits = [limit for node in nodes if isinstance(node, ast.Call) for limit in limits_of_seconds(node)]
    return [limit.lineno for limit in limits if not is_the_one_limit(limit, parameters)]


def test_limits_of_seconds_are_seen_in_every_form() -> None:
    other = (
        "pytest.mark.timeout(900)", "pytest.mark.timeout(0 if FRESH else PATIENCE)", "mark.timeout(timeout=P)", "python(seconds=PATIENCE)",
        "run(timeout=60)", "processes.python('-c', seconds=None if FRESH else 900)", "run(timeout=PATIENCE + 20)", "get(timeout=limit())",
        "in_the_interpreter('f', seconds=HANG if FRESH else PATIENCE)", "run(timeout=HANG / 100)",
    )  # fmt: skip
    assert [text for text in other if not other_limits(text)] == []
    the_one = (
        "mark.timeout(HANG * 4 + 600)", "mark.timeout(0)", "python(seconds=None if FRESH else HANG)", "run(timeout=HANG)",
        "lambda seconds: run(timeout=seconds)", "Limits(seconds=77)",
    )  # fmt: skip
    assert [text for text in the_one if other_limits(text)] == []


def test_no_test_asks_for_seconds_cores_or_resident_memory() -> None:
    """Of the tests for a CPU; those for a GPU report how long they compiled."""
    folder = Path(__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        if "gpu" in path.relative_to(folder).parts or path.name == Path(__file__).name:
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        numbers = {number for number, line in enumerate(lines, 1) if ASKS_THE_MACHINE.search(line)} | set(other_limits(source))
        found += [f"{path.relative_to(folder)}:{number}: {lines[number - 1].strip()}" for number in sorted(numbers)]
    assert not found, "\n".join(found)
