"""Shared by all tests, for tests that run others in a process of their own.

``ANYATTN_MUTANT=name`` runs them with that mutant (see ``tests.mutants.cpu_mutants``). ``ANYATTN_TEST_BACKEND=name`` runs them on that
backend: every call that names none insists on it; ``ANYATTN_TEST_TILES=32x16`` says with tiles of which size where a call does not, so that
a test's few keys fill several. With ``ANYATTN_TEST_FILL=1`` all memory holds garbage first. ``ANYATTN_TEST_CPU`` is the CPU that calls are
planned for: plain, bf16 or fp16 (``machines.CPUS``), bf16 unless told otherwise.

Files named ``test_*_interpreted.py`` launch Triton kernels on the CPU and need ``TRITON_INTERPRET=1``; without it they are skipped, for
other tests run them in a process that has it (``support/processes.py``).
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest


class _NotInterpreted(pytest.Module):
    """A file that is not imported, for Triton would compile its kernels for a GPU."""

    def collect(self) -> Any:
        pytest.skip("runs in Triton's interpreter, with TRITON_INTERPRET=1; another test starts it so", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.stem.endswith("_interpreted") and not os.environ.get("TRITON_INTERPRET"):
        return _NotInterpreted.from_parent(parent, path=module_path)
    return None


def pytest_configure() -> None:
    if device := os.environ.get("ANYATTN_TEST_DEFAULT_DEVICE"):
        from tests.support.default_device import run_under

        run_under(device)
    if os.environ.get("TRITON_INTERPRET"):
        from tests.support.interpreter import mend

        mend()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.covering import mark_the_rest_slow
    from tests.support.longest_first import in_order

    mark_the_rest_slow(items)
    items[:] = in_order(items)


def pytest_collection_finish() -> None:
    """All that is imported and collected stays to the end: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cpu():
    from tests.support.machines import CPUS, planned_for

    with planned_for(CPUS[os.environ.get("ANYATTN_TEST_CPU", "bf16")]):
        yield


@pytest.fixture(autouse=True, scope="session")
def _mutant():
    name = os.environ.get("ANYATTN_MUTANT")
    if not name:
        yield
        return
    from tests.mutants import cpu_mutants

    with cpu_mutants.active(name):
        yield


@pytest.fixture(autouse=True, scope="session")
def _backend():
    name = os.environ.get("ANYATTN_TEST_BACKEND")
    if not name:
        yield
        return
    import torch

    from anyattn import planner
    from anyattn.call_cache import attention

    if os.environ.get("ANYATTN_TEST_FILL") == "1":
        # torch then fills all memory that it hands out uninitialised, with NaN or the greatest number. Its public function
        # (torch.use_deterministic_algorithms) imports Inductor too
        torch._C._set_deterministic_algorithms(True, warn_only=True)
    choose = planner.choose
    tiles = dict(zip(("tile_m", "tile_n"), map(int, os.environ.get("ANYATTN_TEST_TILES", "32x16").split("x"))))

    def insisting(problem: Any, hardware: Any, backend: str | None = None, options: dict[str, int] | None = None) -> Any:
        if (backend or name) != name:
            return choose(problem, hardware, backend, options)
        if problem.q.element_size() == 8:
            pytest.skip(f"{name} has no float64")
        if not problem.may_have_pairs:  # a named backend refuses what it has no part in
            return choose(problem, hardware, None, options)
        own = {} if problem.is_batch_invariant else tiles  # that mode has tiles of its own
        return choose(problem, hardware, name, own | (options or {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "choose", insisting)
        attention.clear()
        yield
        attention.clear()
    torch._C._set_deterministic_algorithms(False)
