"""What tests of the backends share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hopper_pretended import H200, Launch

from anyattn import check, hardware, recall
from anyattn.backends.hopper import build, launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """(config, arguments) of every launch; the CPU is taken for a Hopper GPU."""
    found: list[Launch] = []
    monkeypatch.setattr(hardware, "of", lambda *_: H200)
    monkeypatch.setattr(check, "lists_of", lambda lists, mask: (check.read_lists(lists), getattr(lists, "is_exact", False)))
    monkeypatch.setattr(build, "has_tvm_ffi", lambda: True)
    monkeypatch.setattr(launch, "_found_or_made", lambda config, kinds: lambda *arguments: found.append((config, arguments)))
    recall.clear()
    launch.forget()
    yield found
    recall.clear()
    launch.forget()
