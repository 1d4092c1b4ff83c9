"""What tests of the backends share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anyattn import hardware, planner
from anyattn.backends.hopper.compile import build, launch
from anyattn.call_cache import attention
from anyattn.sparsity.read_lists import read_lists
from anyattn.validate import flex
from tests.support.hopper.pretended import H200, Launch, noting


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """(config, arguments) of every launch; the CPU is taken for a Hopper GPU. A kernel fails for arguments of other kinds than its own.
    Calls so small that the planner would prefer Triton are Hopper's here too."""
    found: list[Launch] = []
    monkeypatch.setattr(hardware, "of", lambda *_: H200)
    monkeypatch.setattr(planner, "_slower", lambda *_: None)
    monkeypatch.setattr(flex, "lists_of", lambda lists, mask: (read_lists(lists), getattr(lists, "is_exact", False)))
    monkeypatch.setattr(build, "has_tvm_ffi", lambda: True)
    monkeypatch.setattr(launch, "_found_or_made", lambda config, kinds: noting(found, config, kinds))
    attention.clear()
    launch.forget()
    yield found
    attention.clear()
    launch.forget()
